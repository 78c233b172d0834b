//! Segments: the memory that nodes contribute, and where new replicas go.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::codec::Short;
use crate::message::{Export, REPLICAS_MAX, SegmentInfo, SegmentNo};
use crate::offset::{Block, OffsetAllocator};
use crate::slab::NIL;

/// One replica's place: 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) addr: u64,
    pub(crate) segment: SegmentNo,
    block: u32,
}

impl Placed {
    /// No segment has the number 0.
    pub(crate) const NOWHERE: Self = Self { addr: 0, segment: 0, block: 0 };
}

impl Default for Placed {
    fn default() -> Self {
        Self::NOWHERE
    }
}

/// The tag of blocks that belong to no object any more but are held back.
pub(crate) const HELD: u32 = NIL;

#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) no: SegmentNo,
    pub(crate) node: u64,
    pub(crate) incarnation: u64,
    pub(crate) name: Box<str>,
    pub(crate) endpoint: Box<str>,
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) export: Export,
    /// Whether new replicas may go there. See [`Segments::set_accepts_new`].
    pub(crate) accepts_new: bool,
    pub(crate) allocator: OffsetAllocator,
}

impl Segment {
    pub(crate) fn info(&self) -> SegmentInfo<'_> {
        SegmentInfo {
            segment: self.no,
            node: self.node,
            incarnation: self.incarnation,
            name: &self.name,
            endpoint: &self.endpoint,
            base: self.base,
            len: self.len,
            export: self.export,
            used: self.allocator.used_bytes(),
        }
    }

    fn allocate(&mut self, len: u64, tag: u32) -> Option<Placed> {
        if !self.accepts_new {
            return None;
        }
        let (block, offset) = self.allocator.allocate(len, tag)?;
        Some(Placed { addr: self.base + offset, segment: self.no, block: block.index() })
    }
}

/// All mounted segments, by number.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// Numbers only go up, so that appending keeps it sorted.
    list: Vec<Segment>,
    last_no: SegmentNo,
    capacity_bytes: u64,
    used_bytes: u64,
    draws: u64,
}

impl Segments {
    /// None; the first will have the number after `no`.
    pub(crate) fn after(no: SegmentNo) -> Self {
        Self { last_no: no, ..Self::default() }
    }

    /// Whether a further `len` bytes still fit a number of bytes.
    pub(crate) fn can_count(&self, len: u64) -> bool {
        self.capacity_bytes.checked_add(len).is_some()
    }

    /// `None`: the numbers are used up, or [`Self::can_count`] says no.
    pub(crate) fn add(&mut self, make: impl FnOnce(SegmentNo) -> Segment) -> Option<SegmentNo> {
        let no = self.last_no.checked_add(1)?;
        let segment = make(no);
        self.capacity_bytes = self.capacity_bytes.checked_add(segment.allocator.capacity_bytes())?;
        self.last_no = no;
        self.list.push(segment);
        Some(self.last_no)
    }

    /// Takes a segment away, with all its blocks.
    pub(crate) fn remove(&mut self, no: SegmentNo) -> Option<Segment> {
        let segment = self.list.remove(self.position(no)?);
        self.capacity_bytes -= segment.allocator.capacity_bytes();
        self.used_bytes -= segment.allocator.used_bytes();
        Some(segment)
    }

    /// Whether new replicas may go to a segment; those that are there stay. Gives whether it is mounted.
    pub(crate) fn set_accepts_new(&mut self, no: SegmentNo, accepts: bool) -> bool {
        let Some(at) = self.position(no) else { return false };
        self.list[at].accepts_new = accepts;
        true
    }

    /// Gives a replica's bytes, held back so far, to an object.
    pub(crate) fn own(&mut self, placed: &Placed, tag: u32) {
        if let Some(at) = self.position(placed.segment) {
            self.list[at].allocator.set_tag(Block::new(placed.block), tag);
        }
    }

    pub(crate) fn get(&self, no: SegmentNo) -> Option<&Segment> {
        self.position(no).map(|at| &self.list[at])
    }

    pub(crate) fn named(&self, name: &str) -> Option<&Segment> {
        self.list.iter().find(|segment| *segment.name == *name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.list.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Whether an empty segment could hold `len` bytes at all.
    pub(crate) fn could_hold(&self, len: u64) -> bool {
        self.list.iter().any(|segment| segment.allocator.capacity_bytes() >= len)
    }

    /// Room for one more replica, on a segment that has none of `others`, and on another node if that is possible.
    pub(crate) fn place(
        &mut self,
        len: u64,
        tag: u32,
        preferred: Option<SegmentNo>,
        others: &[Placed],
    ) -> Option<Placed> {
        let at = self.choose(preferred, others);
        let nodes: Short<u64, REPLICAS_MAX> = self.nodes_of(others);
        let count = self.list.len();
        // First the chosen one, then all, from there on; nodes that have a replica already come last.
        let mut found = None;
        for same_node in [false, true] {
            let mut order = at.into_iter().flat_map(|at| (at..count).chain(0..at));
            found = order.find_map(|at| {
                let segment = &mut self.list[at];
                let taken = others.iter().any(|placed| placed.segment == segment.no);
                if taken || nodes.contains(&segment.node) != same_node {
                    return None;
                }
                segment.allocate(len, tag).map(|placed| (placed, segment.allocator.rounded(len)))
            });
            if found.is_some() || nodes.is_empty() {
                break;
            }
        }
        let (placed, bytes) = found?;
        self.used_bytes += bytes;
        Some(placed)
    }

    /// Room on one given segment.
    pub(crate) fn place_on(&mut self, no: SegmentNo, len: u64, tag: u32) -> Option<Placed> {
        let at = self.position(no)?;
        let placed = self.list[at].allocate(len, tag)?;
        self.used_bytes += self.list[at].allocator.rounded(len);
        Some(placed)
    }

    /// Gives a replica's bytes back; gives how many. 0: the segment is gone.
    pub(crate) fn free(&mut self, placed: &Placed) -> u64 {
        let Some(at) = self.position(placed.segment) else { return 0 };
        let bytes = self.list[at].allocator.free(Block::new(placed.block)).unwrap_or(0);
        debug_assert!(bytes > 0, "freed twice");
        self.used_bytes -= bytes;
        bytes
    }

    /// Marks a replica's bytes as held back; gives how many. 0: the segment is gone.
    pub(crate) fn hold(&mut self, placed: &Placed, len: u64) -> u64 {
        let Some(at) = self.position(placed.segment) else { return 0 };
        self.list[at].allocator.set_tag(Block::new(placed.block), HELD);
        self.list[at].allocator.rounded(len)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.list.iter().map(|segment| segment.allocator.memory_bytes() + size_of::<Segment>()).sum()
    }

    /// Where to begin: the preferred segment, or the emptier of two drawn ones. Two choices even the load out about as well
    /// as looking at all, and a node that has just come back empty does not draw every write.
    fn choose(&mut self, preferred: Option<SegmentNo>, others: &[Placed]) -> Option<usize> {
        let count = self.list.len();
        if count == 0 {
            return None;
        }
        if let Some(at) = preferred.filter(|_| others.is_empty()).and_then(|no| self.position(no)) {
            return Some(at);
        }
        self.draws = self.draws.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let draw = mix(self.draws);
        let pick = |bits: u64| ((bits & 0xffff_ffff) as usize * count) >> 32;
        let (a, b) = (pick(draw), pick(draw >> 32));
        let share = |at: usize| {
            let allocator = &self.list[at].allocator;
            allocator.free_bytes() as f64 / allocator.capacity_bytes().max(1) as f64
        };
        Some(if a == b || share(a) >= share(b) { a } else { b })
    }

    fn nodes_of(&self, others: &[Placed]) -> Short<u64, REPLICAS_MAX> {
        let mut nodes = Short::new();
        for segment in others.iter().filter_map(|placed| self.get(placed.segment)) {
            // There are no more than fit.
            let _ = nodes.push(segment.node);
        }
        nodes
    }

    fn position(&self, no: SegmentNo) -> Option<usize> {
        self.list.binary_search_by_key(&no, |segment| segment.no).ok()
    }
}

/// Spreads a counter over 64 bits (the finisher of SplitMix64).
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
