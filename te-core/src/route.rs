//! Which rail takes a slice.

mod rail;

use alloc::vec::Vec;
use core::time::Duration;

use crate::{Completion, Instant, RegionId, RemoteRegionId, Slice};
use rail::{Figures, Rail};

/// The largest number of rails in a [`MultiTransport`](crate::MultiTransport): the bits of its masks.
pub const RAILS_MAX: usize = 32;

/// Chooses a rail for each slice, and learns from how each slice ended.
///
/// # For implementers
/// All calls except `region_penalty` and `attached` are on the data path: no allocation, no clock. `tick`
/// sets the time once per poll.
pub trait Route {
    /// The rail for `slice` among those set in `reachable`; `None` when none of them may be used now.
    fn route(&mut self, slice: &Slice, reachable: u32) -> Option<usize>;
    /// The rails that may carry `slice`, as a mask: no other gets it, whatever fails. A slice without such a
    /// rail is refused as `Unreachable`.
    #[inline]
    fn permitted(&self, _slice: &Slice) -> u32 {
        u32::MAX
    }
    /// Whether `rail`, which was just chosen, may also get the following slices without another call of
    /// `route`.
    fn takes_more(&self, _rail: usize) -> bool {
        true
    }
    /// `rail` accepted the slice.
    fn accepted(&mut self, rail: usize, slice: &Slice);
    /// `rail` was full, or refused a slice that was just counted as accepted.
    fn returned(&mut self, rail: usize, slice: &Slice);
    /// A slice that `rail` had accepted ended, `nanos` after it was accepted, when `bytes_ahead` bytes (its
    /// own included) were in flight on the rail.
    fn completed(
        &mut self,
        rail: usize,
        slice: &Slice,
        completion: &Completion,
        nanos: u64,
        bytes_ahead: u64,
    );
    /// The time, once per poll.
    fn tick(&mut self, now: Instant);
    /// When the result of `route` may change by itself: after the last `tick`, never before.
    fn wake_at(&self) -> Option<Instant> {
        None
    }
    /// The bytes in flight on `rail`.
    fn bytes_in_flight(&self, rail: usize) -> u64;
    /// The cost of `rail` for a local region, in percent of a near rail. An export carries it to peers.
    fn region_penalty(&self, _region: RegionId, _rail: usize) -> u32 {
        100
    }
    /// A remote region was attached. `penalties[rail]`, in percent, by our rails, is the cost at its owner's
    /// end; `None` when all are equal.
    fn attached(&mut self, _remote_region: RemoteRegionId, _penalties: Option<&[u32]>) {}
}

/// The limits by which [`HealthRoute`] judges rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealthConfig {
    /// The number of rail faults in a row that pause a rail.
    pub errors_max: u32,
    /// The first pause, and the first wait before a slow rail is tried again. Each further one is twice as
    /// long.
    pub backoff_min: Duration,
    /// The longest pause and the longest wait.
    pub backoff_max: Duration,
    /// The bandwidth that is assumed before anything was measured, in bytes per microsecond (MB/s).
    pub bandwidth_initial: u32,
    /// A rail is slow when it takes this many times as long per byte as the best rail of its group. 0: no
    /// rail is ever slow.
    pub slow_factor: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            errors_max: 3,
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_secs(10),
            bandwidth_initial: 1_000,
            slow_factor: 4,
        }
    }
}

/// What a [`HealthRoute`] knows about one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailHealth {
    /// How it is used.
    pub state: RailState,
    /// Smoothed bandwidth, in bytes per second.
    pub bandwidth: u64,
    /// Smoothed time from acceptance to end of a slice, in nanoseconds, with the wait behind other slices.
    pub slice_nanos: u64,
    /// The number of bytes that were accepted and have not ended.
    pub bytes_in_flight: u64,
    /// The number of bytes that ended `Applied`.
    pub bytes_done: u64,
    /// The number of slices that ended, in any way.
    pub slices_ended: u64,
    /// The number of slices that ended with an error of any kind.
    pub errors: u64,
    /// How many times it was paused.
    pub pauses: u64,
    /// How many times it became slow.
    pub slowdowns: u64,
    /// The rail gets nothing before this time, and then one slice as a probe.
    pub paused_until: Option<Instant>,
}

/// How a rail is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RailState {
    /// It takes its share.
    Open,
    /// It works, several times slower than the best rail of its group. It takes as much as it can carry, one
    /// slice at a time, and is tried from time to time when there is too little work for it.
    Slow,
    /// It failed, and gets nothing for now.
    Paused,
    /// Its pause has ended: one slice shows whether it works again.
    Probing,
}

/// Chooses by predicted finish time, with penalties for distance, a pause for rails that fail, and probes
/// that end it.
///
/// A rail's cost for a slice is `(bytes in flight + len) ÷ smoothed bandwidth × penalty`. The penalty is the
/// rail's own, times that of the slice's region, times that of its remote region
/// ([`set_region_penalties`](Self::set_region_penalties)): how far the rail's NICs are from the memory at
/// either end. Therefore a near rail is used alone while it is free, and those that are further away join
/// once it has a queue.
///
/// A slow rail has a low bandwidth, gets a share of the work that fits it, and is reported. A rail that fails
/// `errors_max` times in a row is paused, longer each time, and gets a single slice when the pause has ended.
#[derive(Debug)]
pub struct HealthRoute {
    rails: heapless::Vec<Rail, RAILS_MAX>,
    /// The rails with a `paused_until`, as a mask.
    paused: u32,
    /// The rails that are slow, as a mask.
    slow: u32,
    /// No slow rail is to be tried before this time, and doubtful rails are not looked for.
    probe_due: Instant,
    config: HealthConfig,
    now: Instant,
    /// The penalties, by index of region and of remote region.
    regions: Vec<Row>,
    remote_regions: Vec<Row>,
}

/// A penalty for each rail, in tenths: 10 is near.
type Row = [u8; RAILS_MAX];
const NEAR: Row = [10; RAILS_MAX];

impl HealthRoute {
    /// A route over as many rails as there are `penalties`, in percent: 100 for the nearest, more for those
    /// that are further away.
    ///
    /// # Panics
    /// With more than [`RAILS_MAX`] rails.
    #[must_use]
    pub fn new(penalties: &[u32], config: HealthConfig) -> Self {
        assert!(penalties.len() <= RAILS_MAX, "at most {RAILS_MAX} rails");
        Self {
            rails: penalties.iter().map(|&penalty| Rail::new(penalty, config)).collect(),
            paused: 0,
            slow: 0,
            probe_due: Instant::ZERO,
            config,
            now: Instant::ZERO,
            regions: Vec::new(),
            remote_regions: Vec::new(),
        }
    }

    /// Looks for slow rails by comparison within their group only: `groups[rail]`. Without it, all rails are
    /// one group.
    #[must_use]
    pub fn with_groups(mut self, groups: &[u8]) -> Self {
        for (rail, &group) in self.rails.iter_mut().zip(groups) {
            rail.group = group;
        }
        self
    }

    /// Sets how far each rail's NIC at this end is from a region: `penalties[rail]` in percent, 10 to 2550 in
    /// steps of 10, and 100 for rails beyond the slice. `None`: all are equal. Holds for the region's index
    /// until it is set again; takes 32 bytes per index up to it. Not for the data path.
    pub fn set_region_penalties(&mut self, region: RegionId, penalties: Option<&[u32]>) {
        set_row(&mut self.regions, region.index, penalties);
    }

    /// Sets how far each rail's NIC at the peer is from a remote region; otherwise as for regions.
    pub fn set_remote_region_penalties(&mut self, remote_region: RemoteRegionId, penalties: Option<&[u32]>) {
        set_row(&mut self.remote_regions, remote_region.index, penalties);
    }

    /// What is known about `rail`; `None` when there is no such rail.
    #[must_use]
    pub fn health(&self, rail: usize) -> Option<RailHealth> {
        self.rails.get(rail).map(|rail| rail.health(self.now))
    }

    /// The rail of `open` that would finish `len` bytes first, by a cost that `weigh` may change.
    #[inline]
    fn cheapest(&self, len: u32, open: u32, weigh: impl Fn(usize, u64) -> u64) -> Option<usize> {
        let mut best = None;
        let mut best_cost = u64::MAX;
        let mut rest = open;
        while rest != 0 {
            let index = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let Some(rail) = self.rails.get(index) else { break };
            let cost = weigh(index, rail.cost(len));
            if best.is_none() || cost < best_cost {
                (best, best_cost) = (Some(index), cost);
            }
        }
        best
    }

    /// The rails of `reachable` that may get a slice, when some of them are paused.
    #[cold]
    fn without_paused(&self, reachable: u32) -> u32 {
        let usable = |&(index, rail): &(usize, &Rail)| reachable & 1 << index != 0 && rail.usable(self.now);
        self.rails.iter().enumerate().filter(usable).fold(0, |mask, (index, _)| mask | 1 << index)
    }

    /// A slow, doubtful or overshadowed rail of `open` that is to be tried again. Otherwise it would get
    /// nothing for as long as the others are not busy, and its figures would never be corrected. Also notes
    /// whether a rail has become doubtful because others have become better.
    #[cold]
    fn slow_probe(&mut self, open: u32) -> Option<usize> {
        let (now, config) = (self.now, self.config);
        let mut found = None;
        self.probe_due = now + config.backoff_min * 10;
        for index in 0..self.rails.len() {
            let best = self.best_beside(index);
            let rail = &mut self.rails[index];
            rail.doubt(best, now, &config);
            if !rail.slow && !rail.doubtful && !rail.is_overshadowed(best) {
                rail.reset_probe();
                continue;
            }
            if found.is_none() && open & 1 << index != 0 && rail.wants_probe(now) {
                rail.probed(now, &config);
                found = Some(index);
            }
            // A rail that this slice cannot reach must not start a search at every slice.
            self.probe_due = self.probe_due.min(rail.probe_at.max(now + config.backoff_min));
        }
        found
    }

    /// The best other rail of a rail's group, among those that are well measured.
    fn best_beside(&self, index: usize) -> Option<Figures> {
        let group = self.rails[index].group;
        let peer = |&(other, rail): &(usize, &Rail)| other != index && rail.group == group && rail.is_known();
        self.rails.iter().enumerate().filter(peer).map(|(_, rail)| rail.figures()).min()
    }

    /// Takes the time of a slice into account. Not inlined: most slices are not measured.
    #[inline(never)]
    fn learn(&mut self, index: usize, nanos: u64, bytes_ahead: u64) {
        if nanos == 0 {
            return;
        }
        let rail = &mut self.rails[index];
        let sample = rail.learn(nanos, bytes_ahead);
        rail.skip();
        // A slice that took many times as long as any before is measured in any case.
        let is_odd = sample / 4 > rail.ns_per_byte_q16;
        if is_odd || rail.is_suspect() || rail.doubtful || rail.slices_ended & 15 < 8 {
            self.judge(index, sample, nanos);
        }
    }

    /// Compares a rail with the best of its group, after a slice that took `nanos` in all and `sample` per
    /// byte.
    fn judge(&mut self, index: usize, sample: u64, nanos: u64) {
        let best = self.best_beside(index);
        let (now, config) = (self.now, self.config);
        let rail = &mut self.rails[index];
        let was_slow = rail.slow || rail.doubtful;
        rail.judge(best, Figures { ns_per_byte_q16: sample, slice_ns: nanos }, now, &config);
        rail.skip();
        if was_slow || rail.slow || rail.doubtful {
            self.slow = self.slow & !(1 << index) | u32::from(rail.slow) << index;
            self.probe_due = self.probe_due.min(self.rails[index].probe_at);
        }
    }
}

/// A penalty as rows and exports hold it.
pub(crate) fn to_tenths(percent: u32) -> u8 {
    (percent / 10).clamp(1, u32::from(u8::MAX)) as u8
}

fn set_row(rows: &mut Vec<Row>, index: u32, penalties: Option<&[u32]>) {
    let index = index as usize;
    let Some(penalties) = penalties else {
        if let Some(row) = rows.get_mut(index) {
            *row = NEAR;
        }
        return;
    };
    let mut row = NEAR;
    for (tenths, &percent) in row.iter_mut().zip(penalties) {
        *tenths = to_tenths(percent);
    }
    if rows.len() <= index {
        rows.resize(index + 1, NEAR);
    }
    rows[index] = row;
}

impl Route for HealthRoute {
    #[inline]
    fn route(&mut self, slice: &Slice, reachable: u32) -> Option<usize> {
        let open = if reachable & self.paused == 0 { reachable } else { self.without_paused(reachable) };
        if open.is_power_of_two() {
            let only = open.trailing_zeros() as usize;
            return (only < self.rails.len()).then_some(only);
        }
        if self.now >= self.probe_due
            && let Some(rail) = self.slow_probe(open)
        {
            return Some(rail);
        }
        let local = self.regions.get(slice.local.region.index as usize);
        let remote = self.remote_regions.get(slice.remote.region.index as usize);
        match (local, remote) {
            (None, None) => self.cheapest(slice.len, open, |_, cost| cost),
            (local, remote) => {
                let (local, remote) = (local.unwrap_or(&NEAR), remote.unwrap_or(&NEAR));
                let weigh = |rail: usize, cost: u64| {
                    let penalty = u64::from(local[rail % RAILS_MAX]) * u64::from(remote[rail % RAILS_MAX]);
                    (cost >> 8).saturating_mul(penalty)
                };
                self.cheapest(slice.len, open, weigh)
            }
        }
    }

    #[inline]
    fn takes_more(&self, rail: usize) -> bool {
        (self.paused | self.slow) & 1 << rail == 0
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
        index: usize,
        slice: &Slice,
        completion: &Completion,
        nanos: u64,
        bytes_ahead: u64,
    ) {
        let rail = &mut self.rails[index];
        rail.in_flight = rail.in_flight.saturating_sub(u64::from(slice.len));
        rail.slices_ended += 1;
        match completion.result {
            Ok(()) => {
                rail.bytes_done += u64::from(slice.len);
                if rail.faults_in_row > 0 || rail.backoff_ns > 0 {
                    rail.recover();
                    self.paused &= !(1 << index);
                    // Most of its time was spent on making the connection again, and does not predict the
                    // time of the next slice.
                } else if rail.skip == 0 {
                    self.learn(index, nanos, bytes_ahead);
                } else {
                    rail.skip -= 1;
                }
            }
            Err(error) => {
                rail.failed(error.kind.is_rail_fault(), nanos, self.now, &self.config);
                self.paused = self.paused & !(1 << index) | u32::from(rail.paused_until.is_some()) << index;
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

    fn region_penalty(&self, region: RegionId, rail: usize) -> u32 {
        let row = self.regions.get(region.index as usize).unwrap_or(&NEAR);
        u32::from(row[rail % RAILS_MAX]) * 10
    }

    fn attached(&mut self, remote_region: RemoteRegionId, penalties: Option<&[u32]>) {
        self.set_remote_region_penalties(remote_region, penalties);
    }
}
