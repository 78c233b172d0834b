//! Which rail takes a slice.

use core::time::Duration;

use crate::{Completion, Instant, Slice};

/// Rails a [`MultiTransport`](crate::MultiTransport) can hold: the bits of its masks.
pub const RAILS_MAX: usize = 32;

/// Chooses a rail for each slice and learns from what became of it.
///
/// # For implementers
/// All calls are on the data path: no allocation, no clock. `tick` tells the time once a poll.
pub trait Route {
    /// The rail for `slice` among those set in `reachable`; `None`: none of them may be used now.
    fn route(&mut self, slice: &Slice, reachable: u32) -> Option<usize>;
    /// Whether `rail`, just chosen, may get the slices that follow as well without being asked again.
    fn takes_more(&self, _rail: usize) -> bool {
        true
    }
    /// The slice is given to `rail`.
    fn accepted(&mut self, rail: usize, slice: &Slice);
    /// `rail` was full, or refused a slice that was just given to it.
    fn returned(&mut self, rail: usize, slice: &Slice);
    /// A slice that `rail` had accepted ended, `nanos` after it was accepted, when `bytes_ahead` bytes (its own included)
    /// were in flight on the rail at that time.
    fn completed(
        &mut self,
        rail: usize,
        slice: &Slice,
        completion: &Completion,
        nanos: u64,
        bytes_ahead: u64,
    );
    /// The time, once a poll.
    fn tick(&mut self, now: Instant);
    /// When the answer of `route` may change by itself: after the last `tick`, never before.
    fn wake_at(&self) -> Option<Instant> {
        None
    }
    /// Bytes in flight on `rail`.
    fn bytes_in_flight(&self, rail: usize) -> u64;
}

/// How [`HealthRoute`] judges rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthConfig {
    /// Rail faults in a row that pause a rail.
    pub errors_max: u32,
    /// First pause. Each further one is twice as long.
    pub cooldown_min: Duration,
    /// Longest pause.
    pub cooldown_max: Duration,
    /// Bandwidth assumed before anything was measured, bytes per microsecond (= MB/s).
    pub bandwidth_initial: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            errors_max: 3,
            cooldown_min: Duration::from_millis(10),
            cooldown_max: Duration::from_secs(10),
            bandwidth_initial: 1_000,
        }
    }
}

/// What a [`HealthRoute`] knows of one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailHealth {
    /// Smoothed bandwidth, bytes per second.
    pub bandwidth: u64,
    /// Bytes accepted and not ended.
    pub bytes_in_flight: u64,
    /// Bytes that ended `Applied`.
    pub bytes_done: u64,
    /// Slices that ended, in any way.
    pub slices_ended: u64,
    /// Slices that ended with an error of any kind.
    pub errors: u64,
    /// The rail gets nothing before this time, then one slice as a probe.
    pub paused_until: Option<Instant>,
}

/// Predicted finish time, with a static penalty for distance, a pause for rails that fail, and a probe to bring them back.
///
/// A rail's cost for a slice is `(bytes in flight + len) ÷ smoothed bandwidth × penalty`. A rail that is merely slow
/// shows in its bandwidth and gets its share of it; a rail that fails `errors_max` times in a row is paused, longer each
/// time, and gets a single slice when the pause is over.
#[derive(Debug)]
pub struct HealthRoute {
    rails: heapless::Vec<Rail, RAILS_MAX>,
    config: HealthConfig,
    now: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Rail {
    /// Nanoseconds a byte takes, times 2^16, smoothed.
    ns_per_byte_q16: u64,
    /// Percent; 100 = near.
    penalty: u32,
    in_flight: u64,
    faults_in_row: u32,
    cooldown_ns: u64,
    paused_until: Option<Instant>,
    /// When the last pause began.
    paused_at: Instant,
    probing: bool,
    bytes_done: u64,
    slices_ended: u64,
    errors: u64,
}

impl HealthRoute {
    /// A route over as many rails as there are `penalties`, in percent: 100 for the nearest, more for those further away.
    ///
    /// # Panics
    /// With more than [`RAILS_MAX`] rails.
    #[must_use]
    pub fn new(penalties: &[u32], config: HealthConfig) -> Self {
        let rail = |&penalty: &u32| Rail {
            ns_per_byte_q16: ns_per_byte_q16(u64::from(config.bandwidth_initial.max(1)), 1_000),
            penalty: penalty.max(1),
            in_flight: 0,
            faults_in_row: 0,
            cooldown_ns: 0,
            paused_until: None,
            paused_at: Instant::ZERO,
            probing: false,
            bytes_done: 0,
            slices_ended: 0,
            errors: 0,
        };
        assert!(penalties.len() <= RAILS_MAX, "at most {RAILS_MAX} rails");
        Self { rails: penalties.iter().map(rail).collect(), config, now: Instant::ZERO }
    }

    /// What is known of `rail`; `None` when there is no such rail.
    #[must_use]
    pub fn health(&self, rail: usize) -> Option<RailHealth> {
        self.rails.get(rail).map(|rail| RailHealth {
            bandwidth: (1_000_000_000u64 << 16) / rail.ns_per_byte_q16.max(1),
            bytes_in_flight: rail.in_flight,
            bytes_done: rail.bytes_done,
            slices_ended: rail.slices_ended,
            errors: rail.errors,
            paused_until: rail.paused_until,
        })
    }
}

impl Route for HealthRoute {
    #[inline]
    fn route(&mut self, slice: &Slice, reachable: u32) -> Option<usize> {
        let mut best = None;
        let mut best_cost = u64::MAX;
        let mut rest = reachable;
        while rest != 0 {
            let index = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let Some(rail) = self.rails.get(index) else { break };
            if !rail.usable(self.now) {
                continue;
            }
            let bytes = rail.in_flight.saturating_add(u64::from(slice.len));
            let cost =
                (bytes.saturating_mul(rail.ns_per_byte_q16) >> 8).saturating_mul(u64::from(rail.penalty));
            if best.is_none() || cost < best_cost {
                (best, best_cost) = (Some(index), cost);
            }
        }
        best
    }

    #[inline]
    fn takes_more(&self, rail: usize) -> bool {
        self.rails[rail].paused_until.is_none()
    }

    #[inline]
    fn accepted(&mut self, rail: usize, slice: &Slice) {
        let rail = &mut self.rails[rail];
        rail.in_flight += u64::from(slice.len);
        rail.probing |= rail.paused_until.is_some();
    }

    #[inline]
    fn returned(&mut self, rail: usize, slice: &Slice) {
        let rail = &mut self.rails[rail];
        rail.in_flight = rail.in_flight.saturating_sub(u64::from(slice.len));
        rail.probing = false;
    }

    #[inline]
    fn completed(
        &mut self,
        rail: usize,
        slice: &Slice,
        completion: &Completion,
        nanos: u64,
        bytes_ahead: u64,
    ) {
        let now = self.now;
        let config = self.config;
        let rail = &mut self.rails[rail];
        rail.in_flight = rail.in_flight.saturating_sub(u64::from(slice.len));
        rail.slices_ended += 1;
        match completion.result {
            Ok(()) => {
                rail.bytes_done += u64::from(slice.len);
                if rail.faults_in_row > 0 || rail.cooldown_ns > 0 {
                    rail.faults_in_row = 0;
                    rail.cooldown_ns /= 2;
                    rail.paused_until = None;
                    rail.probing = false;
                }
                // A division a slice is dear: once a rail is known, one in eight is enough.
                if nanos > 0 && (rail.slices_ended < 64 || rail.slices_ended.is_multiple_of(8)) {
                    let sample = ns_per_byte_q16(bytes_ahead.max(1), nanos);
                    rail.ns_per_byte_q16 = (rail.ns_per_byte_q16 * 7 + sample) / 8;
                    rail.ns_per_byte_q16 = rail.ns_per_byte_q16.max(1);
                }
            }
            Err(error) => {
                rail.errors += 1;
                // What was in flight when the pause began fails with the rest and says nothing new: one broken connection must
                // not pause its rail as often as it had slices in flight.
                if rail.paused_until.is_some() && now.nanos_since(rail.paused_at) <= nanos {
                    return;
                }
                rail.probing = false;
                if !error.kind.is_rail_fault() {
                    return;
                }
                rail.faults_in_row += 1;
                // A rail that was paused has to prove itself: its first fault pauses it again.
                if rail.faults_in_row >= config.errors_max || rail.paused_until.is_some() {
                    let min = nanos_of(config.cooldown_min);
                    rail.cooldown_ns =
                        (rail.cooldown_ns * 2).clamp(min, nanos_of(config.cooldown_max).max(min));
                    rail.paused_until = Some(now + Duration::from_nanos(rail.cooldown_ns));
                    rail.paused_at = now;
                }
            }
        }
    }

    #[inline]
    fn tick(&mut self, now: Instant) {
        self.now = now;
    }

    fn wake_at(&self) -> Option<Instant> {
        self.rails.iter().filter_map(|rail| rail.paused_until).filter(|&until| until > self.now).min()
    }

    #[inline]
    fn bytes_in_flight(&self, rail: usize) -> u64 {
        self.rails.get(rail).map_or(0, |rail| rail.in_flight)
    }
}

impl Rail {
    fn usable(&self, now: Instant) -> bool {
        match self.paused_until {
            None => true,
            Some(until) => !self.probing && now >= until,
        }
    }
}

/// `nanos` for `bytes`, as nanoseconds a byte times 2^16.
fn ns_per_byte_q16(bytes: u64, nanos: u64) -> u64 {
    (nanos.min(u64::MAX >> 16) << 16) / bytes
}

fn nanos_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
