//! What a [`HealthRoute`](super::HealthRoute) keeps about one rail, and how it judges the rail.

use core::time::Duration;

use super::{HealthConfig, RailHealth, RailState};
use crate::Instant;

// Its size is a power of two: the data path finds it with a shift.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rail {
    /// `ns_per_byte_q16 × penalty`.
    cost_per_byte: u64,
    pub(super) in_flight: u64,
    /// Nanoseconds per byte, times 2^16, smoothed.
    pub(super) ns_per_byte_q16: u64,
    /// In percent; 100 is near.
    penalty: u32,
    pub(super) faults_in_row: u32,
    pub(super) backoff_ns: u64,
    pub(super) paused_until: Option<Instant>,
    pub(super) probing: bool,
    pub(super) slow: bool,
    /// The number of slices that spoke for it being slow, less those that spoke against: slow at
    /// [`SLOW_SIGNS`], no longer slow at 0.
    slow_signs: u8,
    /// Its figures would keep slices away from it for ever, and may be due to a few slow slices: it is tried
    /// from time to time.
    pub(super) doubtful: bool,
    /// The number of slices that are not measured before the next one is.
    pub(super) skip: u8,
    /// The smoothed time per byte of the slices that spoke for it being slow.
    slow_ns_per_byte_q16: u64,
    pub(super) group: u8,
    pub(super) bytes_done: u64,
    pub(super) slices_ended: u64,
    errors: u64,
    /// The time of a slice, smoothed.
    slice_ns: u64,
    /// When a slow rail is to be tried, if it is idle then.
    pub(super) probe_at: Instant,
    /// How long it then waits for the next try.
    probe_wait_ns: u64,
    pauses: u32,
    slowdowns: u32,
}

/// The time of one slice, or smoothed. Ordered by the time per byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Figures {
    /// Nanoseconds per byte, times 2^16.
    pub(super) ns_per_byte_q16: u64,
    /// Nanoseconds per slice.
    pub(super) slice_ns: u64,
}

const _: () = assert!(size_of::<Rail>() == 128);

/// The number of slices after which a rail's figures are good enough to compare others with.
const KNOWN_SLICES: u64 = 16;
/// The number of first slices that are all measured.
const WATCHED_SLICES: u64 = 64;
/// Later on, one of this many slices is measured.
const LEARN_EVERY: u8 = 8;
/// The number of slices in a row that make a rail slow, or no longer slow.
const SLOW_SIGNS: u8 = 4;

impl Rail {
    pub(super) fn new(penalty: u32, config: HealthConfig) -> Self {
        let mut this = Self {
            cost_per_byte: 0,
            in_flight: 0,
            ns_per_byte_q16: ns_per_byte_q16(u64::from(config.bandwidth_initial.max(1)), 1_000),
            penalty: penalty.max(1),
            faults_in_row: 0,
            backoff_ns: 0,
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

    /// When it would finish `len` more bytes, in a unit that is good for comparisons only.
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

    /// Learns from a slice that ended `nanos` after it was accepted, with `bytes_ahead` bytes in flight, its
    /// own included. Returns the time per byte, as `ns_per_byte_q16`.
    pub(super) fn learn(&mut self, nanos: u64, bytes_ahead: u64) -> u64 {
        let sample = ns_per_byte_q16(bytes_ahead.max(1), nanos);
        if self.slow || self.doubtful {
            // A slow rail is seldom measured: each measurement counts for more, and a good one is followed up
            // at once.
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

    /// Sets how many slices are skipped before the next one is measured: none while too little is known, or
    /// the figures are bad. A division per slice is expensive, and one in eight is enough for a rail that is
    /// well measured.
    pub(super) fn skip(&mut self) {
        let every_one = self.slices_ended < WATCHED_SLICES || self.is_suspect() || self.doubtful;
        self.skip = if every_one { 0 } else { LEARN_EVERY - 1 };
    }

    fn weigh(&mut self) {
        self.cost_per_byte = self.ns_per_byte_q16.saturating_mul(u64::from(self.penalty));
    }

    /// Whether others can be compared with it.
    pub(super) fn is_known(&self) -> bool {
        !self.slow && self.paused_until.is_none() && self.slices_ended >= KNOWN_SLICES
    }

    /// The figures by which it is compared.
    pub(super) fn figures(&self) -> Figures {
        Figures { ns_per_byte_q16: self.ns_per_byte_q16, slice_ns: self.slice_ns }
    }

    /// Decides whether it is slow, compared with the best of its group, after a slice with these `figures`.
    ///
    /// A rail with one small slice in flight takes long per byte because of its latency, not because it is
    /// slow. It ends that slice sooner than a busy rail does, though, and the route gives it more until all
    /// take about as long. Therefore a slice counts as slow when its bytes took several times as long and the
    /// slice itself not much less.
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
                // While it is slow it gets few slices, which soon end: that alone does not make it faster.
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

    /// Decides whether it is doubtful, compared with the best of its group.
    pub(super) fn doubt(&mut self, best: Option<Figures>, now: Instant, config: &HealthConfig) {
        let limit = |best: Figures| best.ns_per_byte_q16.saturating_mul(u64::from(config.slow_factor));
        let is = config.slow_factor > 0 && best.is_some_and(|best| self.ns_per_byte_q16 > limit(best));
        if is && !core::mem::replace(&mut self.doubtful, is) && !self.slow {
            self.probe_wait_ns = 0;
            self.probed(now, config);
        }
        self.doubtful = is;
    }

    /// Whether another rail of its group would be chosen before it in any case: it is idle, and its figures
    /// are worse.
    pub(super) fn is_overshadowed(&self, best: Option<Figures>) -> bool {
        self.in_flight == 0 && self.slices_ended > 0 && best.is_some_and(|best| self.figures() > best)
    }

    /// It gets slices without being tried: the next try, if one is needed, is soon.
    pub(super) fn reset_probe(&mut self) {
        (self.probe_at, self.probe_wait_ns) = (Instant::ZERO, 0);
    }

    /// Whether a rail that gets nothing because of others is to be tried: it has been idle for long enough.
    pub(super) fn wants_probe(&self, now: Instant) -> bool {
        self.in_flight == 0 && now >= self.probe_at
    }

    /// It was just tried, or just became slow: the next try is later each time.
    pub(super) fn probed(&mut self, now: Instant, config: &HealthConfig) {
        self.probe_wait_ns = longer(self.probe_wait_ns, config);
        // The next slice is measured.
        self.skip = 0;
        self.probe_at = now + Duration::from_nanos(self.probe_wait_ns);
    }

    /// A slice ended well after others had failed.
    #[cold]
    pub(super) fn recover(&mut self) {
        self.faults_in_row = 0;
        self.backoff_ns /= 2;
        self.paused_until = None;
        self.probing = false;
    }

    /// A slice failed, `nanos` after it was accepted.
    #[cold]
    pub(super) fn failed(&mut self, is_rail_fault: bool, nanos: u64, now: Instant, config: &HealthConfig) {
        self.errors += 1;
        // Slices that were in flight when the pause began fail with the rest and show nothing new: one broken
        // connection must not pause its rail as often as it had slices in flight.
        if let Some(until) = self.paused_until
            && until.as_nanos().saturating_sub(self.backoff_ns).saturating_add(nanos) >= now.as_nanos()
        {
            return;
        }
        self.probing = false;
        if !is_rail_fault {
            return;
        }
        self.faults_in_row += 1;
        // A rail that was paused is on probation: its first fault pauses it again.
        if self.faults_in_row >= config.errors_max || self.paused_until.is_some() {
            self.pauses = self.pauses.saturating_add(1);
            self.backoff_ns = longer(self.backoff_ns, config);
            self.paused_until = Some(now + Duration::from_nanos(self.backoff_ns));
        }
    }
}

/// Twice as long, within the limits.
fn longer(nanos: u64, config: &HealthConfig) -> u64 {
    let min = nanos_of(config.backoff_min);
    nanos.saturating_mul(2).clamp(min, nanos_of(config.backoff_max).max(min))
}

/// `nanos` for `bytes`, as nanoseconds per byte times 2^16.
fn ns_per_byte_q16(bytes: u64, nanos: u64) -> u64 {
    // Below 2^61: it is multiplied by 7 when smoothed.
    (nanos.min((u64::MAX >> 19) - 1) << 16) / bytes
}

fn nanos_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
