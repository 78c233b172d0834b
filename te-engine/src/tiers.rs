//! The route of an engine: the nearest rail that reaches a segment, and a farther one while that is paused.
//!
//! On a host, rails compete for the same cores and memory bandwidth. Distributing a copy over shared memory
//! *and* a socket would use more CPU and not be faster. So rails are grouped in tiers, and only rails of the
//! nearest usable tier share work, by predicted finish time.

use te_core::{
    BatchHandle, Completion, HealthConfig, HealthRoute, Instant, RAILS_MAX, RailHealth, RegionId,
    RemoteRegionId, Route, Slice,
};

/// Rails in tiers over a [`HealthRoute`].
#[derive(Debug)]
pub(crate) struct Tiers {
    health: HealthRoute,
    /// Masks of rails, nearest first.
    tiers: Vec<u32>,
    /// By batch index: the rails that may carry the batch. Empty until a batch is restricted.
    permits: Vec<u32>,
}

impl Tiers {
    /// `tier_of[rail]` is the tier of each rail; lower is nearer.
    pub(crate) fn new(tier_of: &[u8], config: HealthConfig) -> Self {
        let mut levels = tier_of.to_vec();
        levels.sort_unstable();
        levels.dedup();
        let mask = |level: u8| {
            let rails = tier_of.iter().take(RAILS_MAX).enumerate();
            rails.filter(|&(_, &tier)| tier == level).fold(0, |mask, (rail, _)| mask | 1 << rail)
        };
        let penalties = vec![100; tier_of.len().min(RAILS_MAX)];
        // A rail counts as slow only in comparison with rails of its tier, which are of one kind.
        let health = HealthRoute::new(&penalties, config).with_groups(tier_of);
        Self { health, tiers: levels.into_iter().map(mask).collect(), permits: Vec::new() }
    }

    /// The penalty of each rail for a local region, percent. Penalties choose among the rails of one tier.
    pub(crate) fn set_region_penalties(&mut self, region: RegionId, penalties: Option<&[u32]>) {
        self.health.set_region_penalties(region, penalties);
    }

    /// Restricts the batch with this index to the rails of a mask, until the index gets another mask.
    pub(crate) fn permit(&mut self, batch: usize, rails: u32) {
        if self.permits.len() <= batch && rails != u32::MAX {
            self.permits.resize(batch + 1, u32::MAX);
        }
        if let Some(permit) = self.permits.get_mut(batch) {
            *permit = rails;
        }
    }

    /// Throughput, errors and state of `rail`.
    pub(crate) fn health(&self, rail: usize) -> Option<RailHealth> {
        self.health.health(rail)
    }
}

impl Route for Tiers {
    fn route(&mut self, slice: &Slice, reachable: u32) -> Option<usize> {
        let Self { health, tiers, .. } = self;
        tiers
            .iter()
            .filter(|&tier| tier & reachable != 0)
            .find_map(|tier| health.route(slice, tier & reachable))
    }

    #[inline]
    fn permitted(&self, slice: &Slice) -> u32 {
        self.permits.get(BatchHandle::index_of(slice.token)).copied().unwrap_or(u32::MAX)
    }

    fn takes_more(&self, rail: usize) -> bool {
        self.health.takes_more(rail)
    }

    fn accepted(&mut self, rail: usize, slice: &Slice) {
        self.health.accepted(rail, slice);
    }

    fn returned(&mut self, rail: usize, slice: &Slice) {
        self.health.returned(rail, slice);
    }

    fn completed(
        &mut self,
        rail: usize,
        slice: &Slice,
        completion: &Completion,
        nanos: u64,
        bytes_ahead: u64,
    ) {
        self.health.completed(rail, slice, completion, nanos, bytes_ahead);
    }

    fn tick(&mut self, now: Instant) {
        self.health.tick(now);
    }

    fn wake_at(&self) -> Option<Instant> {
        self.health.wake_at()
    }

    fn bytes_in_flight(&self, rail: usize) -> u64 {
        self.health.bytes_in_flight(rail)
    }

    fn region_penalty(&self, region: RegionId, rail: usize) -> u32 {
        self.health.region_penalty(region, rail)
    }

    fn attached(&mut self, remote_region: RemoteRegionId, penalties: Option<&[u32]>) {
        self.health.attached(remote_region, penalties);
    }
}

#[cfg(test)]
mod tests {
    use te_core::{Error, ErrorKind, Op, Token};

    use te_core::{RegionOffset, RemoteOffset};

    use super::*;

    fn slice() -> Slice {
        Slice {
            token: Token(1),
            local: RegionOffset::new(RegionId::new(0, 0), 0),
            remote: RemoteOffset::new(RemoteRegionId::new(0, 0), 0),
            len: 4096,
            op: Op::Read,
        }
    }

    #[test]
    fn penalties_choose_within_a_tier_and_never_across() {
        let mut route = Tiers::new(&[0, 1, 1, 1], HealthConfig::default());
        route.set_region_penalties(RegionId::new(0, 0), Some(&[2000, 300, 100, 300]));
        assert_eq!(route.route(&slice(), 0b1111), Some(0), "a high penalty, but the nearest tier");
        assert_eq!(route.route(&slice(), 0b1110), Some(2));
        // Under load the others join in.
        for _ in 0..3 {
            route.accepted(2, &slice());
        }
        assert_eq!(route.route(&slice(), 0b1110), Some(1));
        route.set_region_penalties(RegionId::new(0, 0), None);
        assert_eq!(route.route(&slice(), 0b1110), Some(1));
        route.accepted(1, &slice());
        assert_eq!(route.route(&slice(), 0b1110), Some(3), "no penalties any more");
    }

    #[test]
    fn penalties_of_regions_are_reported_and_those_of_remote_regions_count() {
        let mut route = Tiers::new(&[0, 0], HealthConfig::default());
        route.set_region_penalties(RegionId::new(1, 0), Some(&[300, 150]));
        let penalties =
            |route: &Tiers, region| [0, 1].map(|rail| route.region_penalty(RegionId::new(region, 0), rail));
        assert_eq!((penalties(&route, 0), penalties(&route, 1)), ([100, 100], [300, 150]));
        route.attached(RemoteRegionId::new(0, 0), Some(&[300, 100]));
        assert_eq!(route.route(&slice(), 0b11), Some(1));
        route.attached(RemoteRegionId::new(0, 1), None);
        assert_eq!(route.route(&slice(), 0b11), Some(0), "another remote region under the same index");
    }

    #[test]
    fn a_rail_is_not_slow_for_being_of_another_kind() {
        let mut route = Tiers::new(&[0, 1], HealthConfig::default());
        for _ in 0..100 {
            for (rail, nanos) in [(0, 1_000), (1, 100_000)] {
                route.accepted(rail, &slice());
                route.completed(rail, &slice(), &Completion::applied(Token(1)), nanos, 4096);
            }
        }
        assert_eq!(route.health(1).unwrap().state, te_core::RailState::Open);
    }

    #[test]
    fn work_stays_on_the_nearest_rail_until_that_is_paused() {
        let mut route = Tiers::new(&[0, 1, 2, 2], HealthConfig::default());
        let slice = slice();
        for _ in 0..100 {
            assert_eq!(route.route(&slice, 0b1111), Some(0));
            assert_eq!(route.route(&slice, 0b1110), Some(1));
            route.accepted(1, &slice);
        }
        let fault = Completion::not_applied(Token(1), Error::new(ErrorKind::Rail));
        for _ in 0..3 {
            route.completed(1, &slice, &fault, 1, 1);
        }
        let far = route.route(&slice, 0b1110).unwrap();
        assert!(far >= 2);
        route.accepted(far, &slice);
        assert_eq!(route.route(&slice, 0b1110), Some(5 - far), "rails of one tier share the work");
    }
}
