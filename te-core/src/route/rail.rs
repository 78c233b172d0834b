//! What a [`HealthRoute`](super::HealthRoute) keeps of one rail, and how it judges it.

use core::time::Duration;

use super::{HealthConfig, RailHealth, RailState};
use crate::Instant;

// Its size is a power of two: the data path finds it with a shift.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rail {
    /// `ns_per_byte_q16 × penalty`.
    cost_per_byte: u64,
    pub(super) in_flight: u64,
    /// Nanoseconds a byte takes, times 2^16, smoothed.
    pub(super) ns_per_byte_q16: u64,
    /// Percent; 100 = near.
    penalty: u32,
    pub(super) faults_in_row: u32,
    pub(super) cooldown_ns: u64,
    pub(super) paused_until: Option<Instant>,
    pub(super) probing: bool,
    pub(super) slow: bool,
    /// Slices that spoke against it, less those that spoke for it: slow at [`SLOW_SIGNS`], and again not slow at 0.
    slow_signs: u8,
    /// What is known of it would keep slices away for ever, and may rest on one that had bad luck: it is tried now and then.
    pub(super) doubtful: bool,
    /// Slices to let pass before one is learnt from.
    pub(super) skip: u8,
    /// What the slices that spoke against it took for a byte, smoothed.
    slow_ns_per_byte_q16: u64,
    pub(super) group: u8,
    pub(super) bytes_done: u64,
    pub(super) slices_ended: u64,
    errors: u64,
    /// Time of a slice, smoothed.
    slice_ns: u64,
    /// When a slow rail is to be tried, if it has nothing to do by then.
    pub(super) probe_at: Instant,
    /// How long it then waits for the next try.
    probe_wait_ns: u64,
    pauses: u32,
    slowdowns: u32,
}

/// How long it takes: of one slice, or smoothed. In the order of what a byte takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Figures {
    /// Nanoseconds a byte, times 2^16.
    pub(super) ns_per_byte_q16: u64,
    /// Nanoseconds a slice.
    pub(super) slice_ns: u64,
}

const _: () = assert!(size_of::<Rail>() == 128);

/// Slices after which a rail's figures are good enough to compare others with.
const KNOWN_SLICES: u64 = 16;
/// Slices that are all learnt from.
const WATCHED_SLICES: u64 = 64;
/// Slices of which one is learnt from, later on.
const LEARN_EVERY: u8 = 8;
/// Slices in a row that make a rail slow, or not slow any more.
const SLOW_SIGNS: u8 = 4;

impl Rail {
    pub(super) fn new(penalty: u32, config: HealthConfig) -> Self {
        let mut this = Self {
            cost_per_byte: 0,
            in_flight: 0,
            ns_per_byte_q16: ns_per_byte_q16(u64::from(config.bandwidth_initial.max(1)), 1_000),
            penalty: penalty.max(1),
            faults_in_row: 0,
            cooldown_ns: 0,
            paused_until: None,
            probing: false,
            slow: false,
            slow_signs: 0,
            doubtful: false,
            skip: 0,
            slow_ns_per_byte_q16: 0,
            group: 0,
            bytes_done: 0,
            slices_ended: 0,
            errors: 0,
            slice_ns: 0,
            probe_at: Instant::ZERO,
            probe_wait_ns: 0,
            pauses: 0,
            slowdowns: 0,
        };
        this.weigh();
        this
    }

    pub(super) fn health(&self, now: Instant) -> RailHealth {
        RailHealth {
            state: match self.paused_until {
                Some(until) if now < until => RailState::Paused,
                Some(_) => RailState::Probing,
                None if self.slow => RailState::Slow,
                None => RailState::Open,
            },
            bandwidth: (1_000_000_000u64 << 16) / self.ns_per_byte_q16.max(1),
            slice_nanos: self.slice_ns,
            bytes_in_flight: self.in_flight,
            bytes_done: self.bytes_done,
            slices_ended: self.slices_ended,
            errors: self.errors,
            pauses: self.pauses.into(),
            slowdowns: self.slowdowns.into(),
            paused_until: self.paused_until,
        }
    }

    /// When it would finish `len` more bytes, in a unit that only compares.
    #[inline]
    pub(super) fn cost(&self, len: u32) -> u64 {
        self.in_flight.saturating_add(u64::from(len)).saturating_mul(self.cost_per_byte)
    }

    pub(super) fn usable(&self, now: Instant) -> bool {
        match self.paused_until {
            None => true,
            Some(until) => !self.probing && now >= until,
        }
    }

    /// Whether it is slow, or may be.
    pub(super) fn is_suspect(&self) -> bool {
        self.slow_signs > 0
    }

    /// Learns from a slice that ended `nanos` after it was accepted behind others, `bytes_ahead` with its own. Gives the
    /// time of a byte, as `ns_per_byte_q16`.
    pub(super) fn learn(&mut self, nanos: u64, bytes_ahead: u64) -> u64 {
        let sample = ns_per_byte_q16(bytes_ahead.max(1), nanos);
        if self.slow || self.doubtful {
            // It is seldom asked: what it says counts for more, and good news are looked into at once.
            if sample < self.ns_per_byte_q16 / 2 {
                (self.probe_at, self.probe_wait_ns) = (Instant::ZERO, 0);
            }
            self.ns_per_byte_q16 = self.ns_per_byte_q16.midpoint(sample).max(1);
            self.slice_ns = self.slice_ns.midpoint(nanos);
        } else {
            self.ns_per_byte_q16 = ((self.ns_per_byte_q16 * 7 + sample) / 8).max(1);
            self.slice_ns = if self.slice_ns == 0 { nanos } else { (self.slice_ns * 7 + nanos) / 8 };
        }
        self.weigh();
        sample
    }

    /// Sets how many slices are to pass before the next one is learnt from: none while too little is known or what is known
    /// is bad. A division a slice is dear, and one in eight tells enough of a rail that is well known.
    pub(super) fn skip(&mut self) {
        let every_one = self.slices_ended < WATCHED_SLICES || self.is_suspect() || self.doubtful;
        self.skip = if every_one { 0 } else { LEARN_EVERY - 1 };
    }

    fn weigh(&mut self) {
        self.cost_per_byte = self.ns_per_byte_q16.saturating_mul(u64::from(self.penalty));
    }

    /// Whether others can be measured by it.
    pub(super) fn is_known(&self) -> bool {
        !self.slow && self.paused_until.is_none() && self.slices_ended >= KNOWN_SLICES
    }

    /// What it is compared by.
    pub(super) fn figures(&self) -> Figures {
        Figures { ns_per_byte_q16: self.ns_per_byte_q16, slice_ns: self.slice_ns }
    }

    /// Decides whether it is slow, beside the best of its group, after a slice with these `figures`.
    ///
    /// A rail with one small slice in flight takes long for a byte because of its latency, not because it is slow. It ends
    /// that slice sooner than a busy rail does, though, and the route gives it more until all take about as long. So a slice
    /// speaks against its rail when its bytes took several times as long, and itself not much less.
    pub(super) fn judge(
        &mut self,
        best: Option<Figures>,
        figures: Figures,
        now: Instant,
        config: &HealthConfig,
    ) {
        let Some(best) = best.filter(|_| config.slow_factor > 0) else {
            (self.slow, self.slow_signs, self.doubtful) = (false, 0, false);
            return;
        };
        let (sample, nanos) = (figures.ns_per_byte_q16, figures.slice_ns);
        let limit = best.ns_per_byte_q16.saturating_mul(u64::from(config.slow_factor));
        self.doubt(Some(best), now, config);
        let slow_now = sample > limit
            && if self.slow {
                // While it is slow it gets few slices, which soon end: that alone makes it no quicker than it was.
                nanos > best.slice_ns / 4 || sample > self.slow_ns_per_byte_q16 / 2
            } else {
                nanos > best.slice_ns / 2
            };
        if slow_now {
            let last = if self.slow_signs == 0 { sample } else { self.slow_ns_per_byte_q16 };
            self.slow_ns_per_byte_q16 = last.midpoint(sample);
            self.slow_signs = (self.slow_signs + 1).min(SLOW_SIGNS);
        } else {
            self.slow_signs = self.slow_signs.saturating_sub(1);
        }
        if self.slow_signs == 0 {
            self.slow = false;
        } else if self.slow_signs == SLOW_SIGNS && !self.slow {
            self.slow = true;
            self.slowdowns = self.slowdowns.saturating_add(1);
            self.probe_wait_ns = 0;
            self.probed(now, config);
        }
    }

    /// Decides whether it is doubtful, beside the best of its group.
    pub(super) fn doubt(&mut self, best: Option<Figures>, now: Instant, config: &HealthConfig) {
        let limit = |best: Figures| best.ns_per_byte_q16.saturating_mul(u64::from(config.slow_factor));
        let is = config.slow_factor > 0 && best.is_some_and(|best| self.ns_per_byte_q16 > limit(best));
        if is && !core::mem::replace(&mut self.doubtful, is) && !self.slow {
            self.probe_wait_ns = 0;
            self.probed(now, config);
        }
        self.doubtful = is;
    }

    /// Whether another rail of its group would be taken before it, busy or not so: it is idle, and known to be worse.
    pub(super) fn is_overshadowed(&self, best: Option<Figures>) -> bool {
        self.in_flight == 0 && self.slices_ended > 0 && best.is_some_and(|best| self.figures() > best)
    }

    /// It gets slices without being tried: the next try, if there is need of one, is soon.
    pub(super) fn rests(&mut self) {
        (self.probe_at, self.probe_wait_ns) = (Instant::ZERO, 0);
    }

    /// Whether a rail that others keep waiting is to be tried: it has been idle for long enough.
    pub(super) fn wants_probe(&self, now: Instant) -> bool {
        self.in_flight == 0 && now >= self.probe_at
    }

    /// It was just tried, or just found slow: the next try is later each time.
    pub(super) fn probed(&mut self, now: Instant, config: &HealthConfig) {
        self.probe_wait_ns = longer(self.probe_wait_ns, config);
        // Whatever it says then is learnt from.
        self.skip = 0;
        self.probe_at = now + Duration::from_nanos(self.probe_wait_ns);
    }

    /// A slice ended well after others had not.
    #[cold]
    pub(super) fn recover(&mut self) {
        self.faults_in_row = 0;
        self.cooldown_ns /= 2;
        self.paused_until = None;
        self.probing = false;
    }

    /// A slice ended badly, `nanos` after it was accepted.
    #[cold]
    pub(super) fn failed(&mut self, is_rail_fault: bool, nanos: u64, now: Instant, config: &HealthConfig) {
        self.errors += 1;
        // What was in flight when the pause began fails with the rest and says nothing new: one broken connection must
        // not pause its rail as often as it had slices in flight.
        if let Some(until) = self.paused_until
            && until.as_nanos().saturating_sub(self.cooldown_ns).saturating_add(nanos) >= now.as_nanos()
        {
            return;
        }
        self.probing = false;
        if !is_rail_fault {
            return;
        }
        self.faults_in_row += 1;
        // A rail that was paused has to prove itself: its first fault pauses it again.
        if self.faults_in_row >= config.errors_max || self.paused_until.is_some() {
            self.pauses = self.pauses.saturating_add(1);
            self.cooldown_ns = longer(self.cooldown_ns, config);
            self.paused_until = Some(now + Duration::from_nanos(self.cooldown_ns));
        }
    }
}

/// Twice as long, within the limits.
fn longer(nanos: u64, config: &HealthConfig) -> u64 {
    let min = nanos_of(config.cooldown_min);
    nanos.saturating_mul(2).clamp(min, nanos_of(config.cooldown_max).max(min))
}

/// `nanos` for `bytes`, as nanoseconds a byte times 2^16.
fn ns_per_byte_q16(bytes: u64, nanos: u64) -> u64 {
    // Below 2^61: it is multiplied by 7 when smoothed.
    (nanos.min((u64::MAX >> 19) - 1) << 16) / bytes
}

fn nanos_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
