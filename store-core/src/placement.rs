//! Placement: the choice of the segment for a replica.
//!
//! ```text
//!   named segments ─▶ the near node ─▶ a few draws  ─▶ search for room, from a random segment on
//!    in their order     its segments     by strategy      in a tree, without visiting all segments
//! ```
//!
//! What a put forbids (excluded segments, a second replica on a segment, and with
//! [`Placement::distinct_nodes`] on a node) applies in every step; what it prefers decides where the search
//! begins. A segment that accepts nothing new is skipped in every step.
//!
//! *Slow start.* A segment that has just been mounted is empty, and the emptiest of all. Without precaution
//! it would get every write, and soon every read, of the whole cluster, on a machine that is still warming
//! up. So for [`slow_start_ms`](crate::MasterConfig::slow_start_ms) it takes part in a draw only with the
//! probability `its age / the age of the oldest`, which is 1/16 at first and 1 in the end. When all others
//! are full, that is its share of the puts, and the rest evict where they would have without it. Only the
//! probability is reduced; no put waits: a put that finds no other place goes there anyway, and segments
//! mounted at about the same time have about the same probability.
//!
//! Two draws and the emptier of them, instead of the emptiest of all: M. Mitzenmacher, "The power of two
//! choices in randomized load balancing", IEEE TPDS 12(10), 2001.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::allocator::Allocator;
use crate::codec::Short;
use crate::message::REPLICAS_MAX;
use crate::segments::{Placed, Segments};
use crate::{NodeId, SegmentNo};

/// Most segments that a put can prefer, and most that it can exclude.
pub const NAMED_MAX: usize = 8;
/// Draws before the tree is searched.
const DRAWS_MAX: usize = 8;
/// Segments of the near node that are tried.
const NEAR_MAX: usize = 8;
/// Segments that may refuse, though they seemed to have room, before a put evicts instead.
const REFUSALS_MAX: usize = 64;
/// The reciprocal of the probability of a segment that has just been mounted.
const SLOW_START_SHARE: u32 = 16;

/// Where a new object may be placed, and where it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Try these segments first, in this order: the first replica goes to the first one with room, the next
    /// replica to the next. At most 8.
    pub preferred: Short<SegmentNo, NAMED_MAX>,
    /// Never use these segments. At most 8.
    pub excluded: Short<SegmentNo, NAMED_MAX>,
    /// Then try the segments of this node, for every replica: the writer's own node, or the node of the rest
    /// of its batch.
    pub near: Option<NodeId>,
    /// Never place two replicas on one node, even if that means fewer replicas. Without it replicas share a
    /// node only if there is no other way, or if `preferred` or `near` requests it.
    pub distinct_nodes: bool,
}

impl Placement {
    /// Any segment, by the strategy.
    pub const ANY: Self = Self {
        preferred: Short::of(SegmentNo::NONE),
        excluded: Short::of(SegmentNo::NONE),
        near: None,
        distinct_nodes: false,
    };

    /// This segment first, if it has room.
    #[must_use]
    pub fn on(segment: SegmentNo) -> Self {
        let mut placement = Self::ANY;
        // An empty list has room for one.
        let _ = placement.preferred.push(segment);
        placement
    }
}

impl Default for Placement {
    fn default() -> Self {
        Self::ANY
    }
}

/// How segments are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum AllocationStrategy {
    /// Draw two segments at random and take the one with the larger free share: nodes fill up evenly. The
    /// default.
    #[default]
    FreeRatioFirst,
    /// Draw one segment at random.
    Random,
}

impl AllocationStrategy {
    /// All strategies of this release.
    pub const ALL: &'static [Self] = &[Self::FreeRatioFirst, Self::Random];

    /// The name in configurations and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FreeRatioFirst => "free-ratio-first",
            Self::Random => "random",
        }
    }
}

impl fmt::Display for AllocationStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AllocationStrategy {
    type Err = UnknownStrategy;

    fn from_str(text: &str) -> Result<Self, UnknownStrategy> {
        Self::ALL.iter().find(|strategy| strategy.name() == text).copied().ok_or(UnknownStrategy)
    }
}

/// No strategy has the given name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownStrategy;

impl fmt::Display for UnknownStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown allocation strategy: choose one of")?;
        AllocationStrategy::ALL.iter().try_for_each(|strategy| write!(f, " {strategy}"))
    }
}

impl core::error::Error for UnknownStrategy {}

/// A request for the place of one replica.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceRequest<'a> {
    pub(crate) now: Instant,
    pub(crate) len: u64,
    pub(crate) tag: u32,
    pub(crate) placement: &'a Placement,
    /// The first segments of the node [`Placement::near`].
    pub(crate) near: Short<SegmentNo, NEAR_MAX>,
    /// Which segments the search may use.
    pub(crate) spared: Spared,
}

/// Which segments are spared as long as there is another choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Spared {
    /// New segments take part with their probability, those out of reach do not, and the search ends after
    /// some refusals.
    Alone,
    /// New segments take part fully, and the search ends only after the last segment.
    New,
    /// Segments out of reach take part as well.
    All,
}

/// The replicas that an object has already, and their nodes.
struct Others<'a> {
    placed: &'a [Placed],
    nodes: Short<NodeId, REPLICAS_MAX>,
}

impl Segments {
    /// Allocates one more replica on a segment that has none of `others`.
    pub(crate) fn place(&mut self, request: &PlaceRequest<'_>, others: &[Placed]) -> Option<Placed> {
        if request.len > self.rooms.most() {
            return None;
        }
        let others = Others { placed: others, nodes: self.nodes_of(others) };
        self.place_where_wished(request, &others)
            .or_else(|| self.place_by_draw(request, &others))
            .or_else(|| self.place_by_search(request, &others, false))
            .or_else(|| {
                let may_share = !others.nodes.is_empty() && !request.placement.distinct_nodes;
                if may_share { self.place_by_search(request, &others, true) } else { None }
            })
    }

    /// Allocates the first replica on one given segment.
    pub(crate) fn place_on(&mut self, no: SegmentNo, request: &PlaceRequest<'_>) -> Option<Placed> {
        let at = self.position(no)?;
        let allowed = self.rooms.bound(at) >= request.len
            && !request.placement.excluded.contains(&no)
            && (request.spared == Spared::All || !self.list[at].unreachable);
        if allowed { self.take(at, request) } else { None }
    }

    /// Whether the replica could be placed on this segment if it were empty.
    pub(crate) fn would_serve(&self, no: SegmentNo, request: &PlaceRequest<'_>) -> bool {
        let Some(at) = self.position(no) else { return false };
        let segment = &self.list[at];
        segment.accepts_new
            && segment.allocator.capacity_bytes() >= request.len
            && (request.spared > Spared::Alone || at == 0 || segment.joined + self.slow_start <= request.now)
            && (request.spared == Spared::All || !segment.unreachable)
            && !request.placement.excluded.contains(&no)
    }

    fn place_where_wished(&mut self, request: &PlaceRequest<'_>, others: &Others<'_>) -> Option<Placed> {
        let wished = request.placement.preferred.iter().chain(request.near.iter());
        for no in wished {
            let Some(at) = self.position(*no) else { continue };
            let shares = others.nodes.contains(&self.list[at].node);
            if self.suits(at, request, others, shares) && !(shares && request.placement.distinct_nodes) {
                let placed = self.take(at, request);
                if placed.is_some() {
                    return placed;
                }
            }
        }
        None
    }

    fn place_by_draw(&mut self, request: &PlaceRequest<'_>, others: &Others<'_>) -> Option<Placed> {
        for _ in 0..DRAWS_MAX {
            let draw = self.draw();
            let count = self.list.len();
            let pick = |bits: u64| ((bits & 0xffff_ffff) as usize * count) >> 32;
            let one = self.drawn(pick(draw), request, others);
            let two = match self.strategy {
                AllocationStrategy::Random => None,
                AllocationStrategy::FreeRatioFirst => self.drawn(pick(draw >> 32), request, others),
            };
            let at = match (one, two) {
                (Some(one), Some(two)) if self.free_share(two) > self.free_share(one) => two,
                (Some(at), _) | (None, Some(at)) => at,
                (None, None) => continue,
            };
            let placed = self.take(at, request);
            if placed.is_some() {
                return placed;
            }
        }
        None
    }

    /// The segment at `at`, if it can be used.
    fn drawn(&mut self, at: usize, request: &PlaceRequest<'_>, others: &Others<'_>) -> Option<usize> {
        (self.suits(at, request, others, false) && self.is_admitted(at, request)).then_some(at)
    }

    /// The first segment with room, from a random one on. `shares`: only segments whose node has a replica
    /// already.
    fn place_by_search(
        &mut self,
        request: &PlaceRequest<'_>,
        others: &Others<'_>,
        shares: bool,
    ) -> Option<Placed> {
        let count = self.list.len();
        let start = ((self.draw() & 0xffff_ffff) as usize * count) >> 32;
        let mut refusals = 0;
        for (mut at, end) in [(start, count), (0, start)] {
            while let Some(found) = self.rooms.next(at, request.len).filter(|found| *found < end) {
                at = found + 1;
                if !self.suits(found, request, others, shares) || !self.is_admitted(found, request) {
                    continue;
                }
                let placed = self.take(found, request);
                refusals += 1;
                if placed.is_some() || (refusals >= REFUSALS_MAX && request.spared == Spared::Alone) {
                    return placed;
                }
            }
        }
        None
    }

    /// Whether the segment at `at` may be used and seems to have room. `shares`: its node has a replica
    /// already.
    fn suits(&self, at: usize, request: &PlaceRequest<'_>, others: &Others<'_>, shares: bool) -> bool {
        if self.rooms.bound(at) < request.len {
            return false;
        }
        let segment = &self.list[at];
        !request.placement.excluded.contains(&segment.no)
            && (request.spared == Spared::All || !segment.unreachable)
            && (others.placed.is_empty() && !shares
                || others.nodes.contains(&segment.node) == shares
                    && others.placed.iter().all(|placed| placed.segment != segment.no))
    }

    /// Whether its slow start admits it to this draw.
    fn is_admitted(&mut self, at: usize, request: &PlaceRequest<'_>) -> bool {
        if request.spared > Spared::Alone || request.now >= self.settled_at {
            return true;
        }
        let least = self.slow_start / SLOW_START_SHARE;
        let age = |joined: Instant| (request.now - joined).clamp(least, self.slow_start);
        // The list is in the order of mounting.
        let (own, oldest) = (age(self.list[at].joined), age(self.list[0].joined));
        own >= oldest || u128::from(self.draw() >> 32) * oldest.as_nanos() < own.as_nanos() << 32
    }

    fn take(&mut self, at: usize, request: &PlaceRequest<'_>) -> Option<Placed> {
        let segment = &mut self.list[at];
        let before = segment.allocator.used_bytes();
        let Some((block, offset)) = segment.allocator.allocate(request.len, request.tag) else {
            self.rooms.set(at, segment.allocator.refused_above(request.len));
            return None;
        };
        self.used_bytes += segment.allocator.used_bytes() - before;
        Some(Placed::new(segment.base + offset, segment.no, block))
    }

    fn free_share(&self, at: usize) -> f64 {
        let allocator = &self.list[at].allocator;
        allocator.free_bytes() as f64 / allocator.capacity_bytes().max(1) as f64
    }

    fn nodes_of(&self, others: &[Placed]) -> Short<NodeId, REPLICAS_MAX> {
        let mut nodes = Short::new();
        for segment in others.iter().filter_map(|placed| self.get(placed.segment)) {
            // The list has room for all replicas of one object.
            let _ = nodes.push(segment.node);
        }
        nodes
    }

    fn draw(&mut self) -> u64 {
        self.draws = self.draws.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.draws)
    }
}

/// Spreads a counter over 64 bits (the finaliser of SplitMix64).
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;
    use core::time::Duration;

    use super::*;
    use crate::AllocatorKind;
    use crate::Incarnation;
    use crate::segments::Segment;

    fn three() -> Segments {
        let mut segments =
            Segments::after(SegmentNo::new(7), AllocationStrategy::FreeRatioFirst, Duration::ZERO);
        for node in 1..=3 {
            let make = |no| Segment {
                no,
                node: NodeId::new(node),
                incarnation: Incarnation::new(1),
                name: Box::default(),
                endpoint: Box::default(),
                base: 0,
                len: 4096,
                location: crate::MemoryLocation::default(),
                export: Default::default(),
                joined: Instant::ZERO,
                accepts_new: true,
                unreachable: false,
                allocator: AllocatorKind::Offset.build(4096),
            };
            segments.add(make).unwrap();
        }
        segments
    }

    // Mooncake issue 2704: a segment that was known to be unhealthy was still allocated from.
    #[test]
    fn a_segment_that_takes_nothing_new_gets_nothing_even_if_it_alone_has_room() {
        let mut segments = three();
        let wish = Placement::on(SegmentNo::new(8));
        let mut request = PlaceRequest {
            now: Instant::ZERO,
            len: 1024,
            tag: 0,
            placement: &wish,
            near: Short::new(),
            spared: Spared::Alone,
        };
        let _ = request.near.push(SegmentNo::new(8));
        let there = segments.place(&request, &[]).unwrap();
        assert_eq!(there.segment, SegmentNo::new(8));
        assert!(
            segments.set_accepts_new(SegmentNo::new(8), false)
                && !segments.set_accepts_new(SegmentNo::new(99), false)
        );
        for (spared, times) in [(Spared::Alone, 4), (Spared::New, 2), (Spared::All, 2)] {
            let request = PlaceRequest { spared, ..request };
            assert!(
                segments.place_on(SegmentNo::new(8), &request).is_none()
                    && !segments.would_serve(SegmentNo::new(8), &request)
            );
            for _ in 0..times {
                assert_ne!(segments.place(&request, &[]).unwrap().segment, SegmentNo::new(8));
            }
        }
        assert!(
            segments.place(&PlaceRequest { spared: Spared::All, ..request }, &[]).is_none(),
            "8 alone has room"
        );
        // Freeing space there does not make it accept new replicas; the existing ones stay until then.
        assert_eq!(segments.free(&there), 1024);
        assert!(segments.place(&PlaceRequest { spared: Spared::All, ..request }, &[]).is_none());
        assert!(segments.set_accepts_new(SegmentNo::new(8), true));
        assert_eq!(segments.place(&request, &[]).unwrap().segment, SegmentNo::new(8));
    }

    #[test]
    fn a_segment_is_found_by_its_number_also_when_others_have_gone() {
        let mut segments = three();
        assert_eq!(
            [7, 8, 9, 10, 11].map(|no| segments.position(SegmentNo::new(no))),
            [None, Some(0), Some(1), Some(2), None]
        );
        assert!(segments.remove(SegmentNo::new(9)).is_some() && segments.remove(SegmentNo::new(9)).is_none());
        assert_eq!(
            [8, 9, 10, 11].map(|no| segments.position(SegmentNo::new(no))),
            [Some(0), None, Some(1), None]
        );
        assert!(segments.remove(SegmentNo::new(8)).is_some());
        assert_eq!(
            [8, 9, 10, 11].map(|no| segments.position(SegmentNo::new(no))),
            [None, None, Some(0), None]
        );
        assert!(
            segments.remove(SegmentNo::new(10)).is_some() && segments.position(SegmentNo::new(10)).is_none()
        );
    }
}
