//! Segments: the memory that nodes contribute, and how much of it is allocated. The choice of a segment for a
//! replica is in [`crate::placement`].

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::allocator::{Allocator, AnyAllocator, Block};
use crate::message::{Export, SegmentInfo};
use crate::placement::{AllocationStrategy, Placement};
use crate::room::Rooms;
use crate::slab::NIL;
use crate::{ErrorCode, Incarnation, MemoryLocation, NodeId, SegmentNo};

/// The place of one replica: 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Placed {
    pub(crate) addr: u64,
    pub(crate) segment: SegmentNo,
    block: u32,
}

impl Placed {
    /// No segment has the number 0.
    pub(crate) const NOWHERE: Self = Self { addr: 0, segment: SegmentNo::NONE, block: 0 };

    pub(crate) const fn new(addr: u64, segment: SegmentNo, block: Block) -> Self {
        Self { addr, segment, block: block.index() }
    }

    /// A place on a disk, which is no block of an allocator.
    pub(crate) const fn on_disk(disk: SegmentNo, locator: u64) -> Self {
        Self { addr: locator, segment: disk, block: 0 }
    }

    pub(crate) const fn block(&self) -> Block {
        Block::new(self.block)
    }
}

impl Default for Placed {
    fn default() -> Self {
        Self::NOWHERE
    }
}

/// The tag of blocks that are held back and belong to no object.
pub(crate) const HELD: u32 = NIL;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Segment {
    pub(crate) no: SegmentNo,
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) name: Box<str>,
    pub(crate) endpoint: Box<str>,
    pub(crate) base: u64,
    pub(crate) len: u64,
    #[serde(with = "crate::snapshot::location")]
    pub(crate) location: MemoryLocation,
    pub(crate) export: Export,
    /// When it was mounted.
    pub(crate) joined: Instant,
    /// Whether new replicas may be placed on it. See [`Segments::set_accepts_new`].
    pub(crate) accepts_new: bool,
    /// A client reported it as out of reach, and its node has not been heard of since.
    pub(crate) unreachable: bool,
    pub(crate) allocator: AnyAllocator,
}

impl Segment {
    pub(crate) fn info(&self) -> SegmentInfo<'_> {
        SegmentInfo {
            shared: "",
            extent_bytes: 0,
            segment: self.no,
            node: self.node,
            incarnation: self.incarnation,
            name: &self.name,
            endpoint: &self.endpoint,
            base: self.base,
            len: self.len,
            location: self.location,
            export: self.export,
            stage: "",
            used: self.allocator.used_bytes(),
            free_bytes_largest: self.allocator.largest_free(),
        }
    }

    /// The most bytes that are worth requesting before an allocation was refused.
    fn bound(&self) -> u64 {
        if self.accepts_new { self.allocator.capacity_bytes() } else { 0 }
    }
}

/// All mounted segments, by number.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Segments {
    /// Numbers only grow, so that appending keeps the list sorted.
    pub(crate) list: Vec<Segment>,
    /// The bound of each segment, in the same order.
    pub(crate) rooms: Rooms,
    last_no: SegmentNo,
    capacity_bytes: u64,
    /// Number of segments that are out of reach.
    pub(crate) unreachable: u32,
    pub(crate) used_bytes: u64,
    pub(crate) strategy: AllocationStrategy,
    pub(crate) slow_start: Duration,
    /// When the slow start of every segment is over.
    pub(crate) settled_at: Instant,
    pub(crate) draws: u64,
}

impl Segments {
    /// No segments; the first one will have the number after `no`.
    pub(crate) fn after(no: SegmentNo, strategy: AllocationStrategy, slow_start: Duration) -> Self {
        Self {
            list: Vec::new(),
            rooms: Rooms::default(),
            last_no: no,
            capacity_bytes: 0,
            unreachable: 0,
            used_bytes: 0,
            strategy,
            slow_start,
            settled_at: Instant::ZERO,
            draws: 0,
        }
    }

    /// Whether the capacity stays within `u64` with `len` more bytes.
    pub(crate) fn can_count(&self, len: u64) -> bool {
        self.capacity_bytes.checked_add(len).is_some()
    }

    /// A number for a disk: disks and segments share their numbers.
    pub(crate) fn take_no(&mut self) -> Option<SegmentNo> {
        self.last_no = self.last_no.next()?;
        Some(self.last_no)
    }

    /// `None`: the numbers are used up, or [`Self::can_count`] is false.
    pub(crate) fn add(&mut self, make: impl FnOnce(SegmentNo) -> Segment) -> Option<SegmentNo> {
        let no = self.last_no.next()?;
        let segment = make(no);
        self.capacity_bytes = self.capacity_bytes.checked_add(segment.allocator.capacity_bytes())?;
        self.last_no = no;
        self.settled_at = self.settled_at.max(segment.joined + self.slow_start);
        self.rooms.push(segment.bound());
        self.list.push(segment);
        Some(self.last_no)
    }

    /// Removes a segment, with all its blocks.
    pub(crate) fn remove(&mut self, no: SegmentNo) -> Option<Segment> {
        let at = self.position(no)?;
        let segment = self.list.remove(at);
        self.rooms.remove(at);
        self.capacity_bytes -= segment.allocator.capacity_bytes();
        self.used_bytes -= segment.allocator.used_bytes();
        self.unreachable -= u32::from(segment.unreachable);
        Some(segment)
    }

    /// Sets whether new replicas may be placed on a segment; existing ones stay. Returns whether it is
    /// mounted.
    pub(crate) fn set_accepts_new(&mut self, no: SegmentNo, accepts: bool) -> bool {
        let Some(at) = self.position(no) else { return false };
        self.list[at].accepts_new = accepts;
        self.rooms.set(at, self.list[at].bound());
        true
    }

    /// Marks a segment as out of reach, or removes the mark. Returns whether that changed; `None`: it is not
    /// mounted.
    pub(crate) fn set_unreachable(&mut self, no: SegmentNo, unreachable: bool) -> Option<bool> {
        let at = self.position(no)?;
        let changed = core::mem::replace(&mut self.list[at].unreachable, unreachable) != unreachable;
        match (changed, unreachable) {
            (true, true) => self.unreachable += 1,
            (true, false) => self.unreachable -= 1,
            _ => {}
        }
        Some(changed)
    }

    /// Assigns a replica's bytes, held back so far, to an object.
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

    /// Whether some segment that a put allows could hold `len` bytes if it were empty.
    ///
    /// # Errors
    /// The reason why no segment could.
    pub(crate) fn could_hold(&self, len: u64, placement: &Placement) -> Result<(), ErrorCode> {
        let mut large = self.list.iter().filter(|segment| segment.allocator.capacity_bytes() >= len);
        let (mut any, mut open) = (false, false);
        let allowed = large.any(|segment| {
            any = true;
            open |= segment.accepts_new;
            segment.accepts_new && !placement.excluded.contains(&segment.no)
        });
        match (allowed, any, open) {
            (true, ..) => Ok(()),
            _ if self.list.is_empty() => Err(ErrorCode::NoSegment),
            (_, false, _) => Err(ErrorCode::ObjectTooLarge),
            (.., true) => Err(ErrorCode::SegmentsExcluded),
            (.., false) => Err(ErrorCode::SegmentsClosed),
        }
    }

    pub(crate) fn allocator(&self, no: SegmentNo) -> Option<&AnyAllocator> {
        self.get(no).map(|segment| &segment.allocator)
    }

    /// Frees a replica's bytes; returns their number. 0: the segment is gone.
    pub(crate) fn free(&mut self, placed: &Placed) -> u64 {
        let Some(at) = self.position(placed.segment) else { return 0 };
        let bytes = self.list[at].allocator.free(Block::new(placed.block)).unwrap_or(0);
        debug_assert!(bytes > 0, "freed twice");
        self.used_bytes -= bytes;
        self.rooms.set(at, self.list[at].bound());
        bytes
    }

    /// Marks a replica's bytes as held back; returns their number. 0: the segment is gone.
    pub(crate) fn hold(&mut self, placed: &Placed, len: u64) -> u64 {
        let Some(at) = self.position(placed.segment) else { return 0 };
        self.list[at].allocator.set_tag(Block::new(placed.block), HELD);
        self.list[at].allocator.rounded(len)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.rooms.memory_bytes()
            + self
                .list
                .iter()
                .map(|segment| segment.allocator.memory_bytes() + size_of::<Segment>())
                .sum::<usize>()
    }

    pub(crate) fn position(&self, no: SegmentNo) -> Option<usize> {
        // As long as no segment was removed, the position is the distance from the first number.
        let first = self.list.first()?.no;
        let last = (no.get().checked_sub(first.get())? as usize).min(self.list.len() - 1);
        if self.list[last].no == no {
            return Some(last);
        }
        self.list[..last].binary_search_by_key(&no, |segment| segment.no).ok()
    }
}
