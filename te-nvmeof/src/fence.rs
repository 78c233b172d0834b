//! What may still land: controllers that were lost with WRITEs in flight, and what proves that nothing of
//! them lands any more. No I/O; time is an argument.
//!
//! | | proof | when | whose word |
//! |---|---|---|---|
//! | F0 | every WRITE has its response | nothing is in doubt | the target's |
//! | F1 | Cross-Controller Reset (TP8028) | the target offers it, and another association lives | the target's |
//! | F2 | Preempt and Abort | the owner of an adopted range fences a client: `expel` | the target's |
//! | F3 | CC.EN = 0, CSTS.RDY = 0 | never used: the kernel's target clears RDY with commands in flight | – |
//! | F4 | time: 2 × KATO (3 × with TBKAS) and CQT | the target offers no F1, and the settings allow it | the standard's |
//!
//! A restart of our own target is a proof, too: its new incarnation has none of the old one's connections.

use core::time::Duration;

use te_core::Instant;

use crate::identify::Controller;

/// Controllers in doubt for one peer. With more, no WRITE is sent to it.
const DOUBTS_MAX: usize = 16;

/// A controller that was lost with WRITEs that have no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Doubt {
    /// Its name in the list.
    pub(crate) number: u32,
    pub(crate) id: u16,
    pub(crate) instance: u8,
    pub(crate) random: u64,
    /// The oldest of its WRITEs, on the clock of fences.
    stamp: u64,
    /// F1: the target offers resets, and has not refused one for this controller.
    resets: bool,
    /// F4: when time alone is a proof.
    until: Option<Instant>,
}

impl Doubt {
    /// When time alone is a proof: not while the target offers a better one.
    const fn quiet(&self) -> Option<Instant> {
        if self.resets { None } else { self.until }
    }
}

/// When time alone proves that a target has ended a controller, of which nothing was sent after `last_sent`.
///
/// The target's timer may have been started anew by the last command, and is checked once per KATO; with
/// traffic based keep-alive, one more KATO may pass. Then commands may go on for CQT.
pub(crate) fn quiet_at(
    last_sent: Instant,
    identity: &Controller,
    keep_alive_ms: u32,
    quiesce_ms: u32,
) -> Option<Instant> {
    let quiesce = if identity.quiesce_ms > 0 { identity.quiesce_ms } else { quiesce_ms };
    // Without a keep-alive timer the target never notices the silence.
    if quiesce_ms == 0 || keep_alive_ms == 0 || identity.keep_alive_granularity_ms == 0 {
        return None;
    }
    let intervals = if identity.traffic_keep_alive { 3 } else { 2 };
    // The target rounds the timeout up to its granularity.
    let timeout = u64::from(keep_alive_ms.next_multiple_of(identity.keep_alive_granularity_ms));
    Some(last_sent + Duration::from_millis(intervals * timeout + u64::from(quiesce)))
}

/// The doubts of one peer.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    list: Vec<Doubt>,
    numbers: u32,
}

impl Doubts {
    /// A controller was lost. `until` is when time alone is a proof, where it may be one at all.
    pub(crate) fn add(&mut self, id: u16, identity: &Controller, stamp: u64, until: Option<Instant>) {
        self.numbers += 1;
        self.list.push(Doubt {
            number: self.numbers,
            id,
            instance: identity.instance,
            random: identity.instance_random,
            stamp,
            // Without a random number of its life, a reset could hit its successor.
            resets: identity.resets_max > 0 && identity.instance > 0,
            until,
        });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether no WRITE may be sent before some doubts are cleared.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= DOUBTS_MAX
    }

    /// Whether something that ended before `stamp` may still land.
    pub(crate) fn block(&self, stamp: u64) -> bool {
        self.list.iter().any(|doubt| doubt.stamp < stamp)
    }

    /// The next controller to reset.
    pub(crate) fn to_reset(&self) -> Option<Doubt> {
        self.list.iter().find(|doubt| doubt.resets).copied()
    }

    /// The response to a reset: whether it proves that the controller is gone. Returns whether a doubt was
    /// cleared.
    pub(crate) fn reset(&mut self, number: u32, proved: bool) -> bool {
        let before = self.list.len();
        if proved {
            self.list.retain(|doubt| doubt.number != number);
        } else if let Some(doubt) = self.list.iter_mut().find(|doubt| doubt.number == number) {
            doubt.resets = false;
        }
        self.list.len() < before
    }

    /// The target has restarted, or has closed all our controllers.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Clears what time has proved; returns how many.
    pub(crate) fn pass(&mut self, now: Instant) -> usize {
        let before = self.list.len();
        self.list.retain(|doubt| doubt.quiet().is_none_or(|until| now < until));
        before - self.list.len()
    }

    /// When time proves something next.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.list.iter().filter_map(Doubt::quiet).min()
    }

    /// Whether time will prove something.
    pub(crate) fn may_pass(&self) -> bool {
        self.next().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    /// A target with keep-alive, with or without resets.
    fn target(resets_max: u8) -> Controller {
        Controller {
            resets_max,
            instance: resets_max,
            instance_random: 9,
            keep_alive_granularity_ms: 100,
            ..Controller::default()
        }
    }

    #[test]
    fn time_is_a_proof_only_after_the_target_must_have_noticed_and_quiesced() {
        let mut of = target(0);
        assert_eq!(quiet_at(at(1_000), &of, 5_000, 15_000), Some(at(1_000 + 10_000 + 15_000)));
        of.traffic_keep_alive = true;
        assert_eq!(quiet_at(at(1_000), &of, 5_000, 15_000), Some(at(1_000 + 15_000 + 15_000)));
        of.quiesce_ms = 400;
        assert_eq!(quiet_at(at(1_000), &of, 5_050, 15_000), Some(at(1_000 + 3 * 5_100 + 400)));
        assert_eq!(quiet_at(at(1_000), &of, 5_000, 0), None, "not allowed");
        of.keep_alive_granularity_ms = 0;
        assert_eq!(quiet_at(at(1_000), &of, 5_000, 15_000), None, "it never notices");
    }

    #[test]
    fn a_fence_waits_for_what_is_older_alone() {
        let mut all = Doubts::default();
        all.add(1, &target(4), 10, None);
        assert!(all.block(11) && !all.block(10) && !all.block(5));
        let doubt = all.to_reset().expect("the target offers resets");
        assert_eq!((doubt.id, doubt.random), (1, 9));
        assert!(all.reset(doubt.number, true));
        assert!(!all.block(u64::MAX) && all.is_empty());
    }

    #[test]
    fn a_reset_that_proves_nothing_leaves_the_doubt() {
        let mut all = Doubts::default();
        all.add(1, &target(4), 0, None);
        let doubt = all.to_reset().expect("offered");
        assert!(!all.reset(doubt.number, false));
        assert!(all.block(1) && all.to_reset().is_none(), "it is not tried again");
        assert_eq!(all.pass(at(u64::MAX / 2_000_000)), 0, "no time, no proof");
        all.clear();
        assert!(all.is_empty());
    }

    #[test]
    fn a_target_without_resets_is_fenced_by_time() {
        let mut all = Doubts::default();
        all.add(1, &target(0), 0, Some(at(500)));
        assert!(all.to_reset().is_none() && all.may_pass());
        assert_eq!((all.next(), all.pass(at(499)), all.pass(at(500))), (Some(at(500)), 0, 1));
        assert!(!all.block(u64::MAX));
        all.add(1, &target(4), 0, Some(at(500)));
        assert!(!all.may_pass() && all.pass(at(501)) == 0, "a reset is the better proof");
        let doubt = all.to_reset().expect("offered");
        assert!(!all.reset(doubt.number, false) && all.pass(at(501)) == 1, "until it is refused");
        (0..DOUBTS_MAX).for_each(|_| all.add(1, &target(0), 0, None));
        assert!(all.is_full());
    }

    /// A fence is proved exactly when each older loss was excluded: by a reset that was done, or by time
    /// where no reset is on offer. The model keeps, for each loss, when its bytes can land last.
    #[test]
    fn fences_agree_with_a_model_of_late_writes() {
        use te_core::testkit::Rng;
        for seed in 0..500 {
            let mut rng = Rng::new(seed);
            let mut all = Doubts::default();
            // (stamp, offers resets, lands until), and whether a reset has ended it.
            let mut losses: Vec<(u64, bool, Option<Instant>, bool)> = Vec::new();
            let (mut clock, mut now) = (0, 0);
            for _ in 0..60 {
                match rng.below(4) {
                    0 => {
                        let (resets, timed) = (rng.below(2) == 0, rng.below(3) > 0);
                        let until = timed.then(|| at(now + 100));
                        all.add(losses.len() as u16, &target(u8::from(resets)), clock, until);
                        losses.push((clock, resets, until, false));
                    }
                    1 => {
                        let Some(doubt) = all.to_reset() else { continue };
                        let proved = rng.below(2) == 0;
                        all.reset(doubt.number, proved);
                        let loss = &mut losses[usize::from(doubt.id)];
                        (loss.1, loss.3) = (false, proved);
                    }
                    2 => {
                        now += rng.below(80);
                        all.pass(at(now));
                    }
                    _ => clock += 1,
                }
                all.pass(at(now));
                let may_land = losses.iter().any(|(stamp, resets, until, ended)| {
                    let quiet = !resets && until.is_some_and(|until| at(now) >= until);
                    *stamp < clock && !ended && !quiet
                });
                assert_eq!(all.block(clock), may_land, "seed {seed}");
            }
        }
    }
}
