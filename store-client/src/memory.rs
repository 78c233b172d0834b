//! Registered memory of a client: what there is, and how to read and checksum it.

use std::collections::HashMap;

use te_core::{MemSpan, RegionId};
use te_engine::SharedRegion;

use crate::checksum::Checksum;
use crate::sys;

/// A part of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// The region.
    pub region: RegionId,
    /// Where in it, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl BufferRange {
    /// All of a region.
    #[must_use]
    pub fn all(region: &SharedRegion) -> Self {
        Self { region: region.id(), offset: 0, len: region.len() as u64 }
    }

    /// `len` bytes of a region from `offset` on.
    #[must_use]
    pub fn part(region: &SharedRegion, offset: u64, len: u64) -> Self {
        Self { region: region.id(), offset, len }
    }
}

/// A part of an object, and where it is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Where in the object it begins, bytes.
    pub offset: u64,
    /// Where it goes; as long as the part.
    pub into: BufferRange,
}

impl Fragment {
    /// Where the part ends in the object; `None`: it has no byte, or ends beyond the largest offset there is.
    pub(crate) fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.into.len).filter(|_| self.into.len > 0)
    }
}

impl BufferRange {
    /// Whether they have a byte in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.region == other.region
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

/// What a region is made of.
#[derive(Clone)]
pub(crate) enum Held {
    /// The engine's own.
    Shared(SharedRegion),
    /// The caller's, kept alive by the contract of [`Client::register`](crate::Client::register).
    Raw(MemSpan),
}

/// Every region that a client may name.
#[derive(Default)]
pub(crate) struct Memory {
    regions: HashMap<RegionId, Held>,
}

impl Memory {
    pub(crate) fn insert(&mut self, region: RegionId, held: Held) {
        self.regions.insert(region, held);
    }

    pub(crate) fn remove(&mut self, region: RegionId) -> Option<Held> {
        self.regions.remove(&region)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Whether the region is known and lies there.
    pub(crate) fn is_at(&self, region: RegionId, span: MemSpan) -> bool {
        self.regions.get(&region).is_some_and(|held| held.span() == span)
    }

    /// Whether the range is of a known region and inside it.
    pub(crate) fn contains(&self, range: BufferRange) -> bool {
        self.regions.get(&range.region).is_some_and(|held| held.span().contains(range.offset, range.len))
    }

    /// Takes a range into a checksum. A range that is not there changes nothing.
    pub(crate) fn checksum(&self, range: BufferRange, checksum: &mut Checksum) {
        if let Some(held) = self.regions.get(&range.region) {
            checksum.update_span(held.span(), range.offset, range.len);
        }
    }

    /// Copies bytes of another registered region to a range. A range that is not there stays as it is.
    pub(crate) fn copy_in(&self, from: MemSpan, offset: u64, into: BufferRange) {
        if let Some(held) = self.regions.get(&into.region) {
            sys::copy_span(from, offset, held.span(), into.offset, into.len);
        }
    }
}

impl Held {
    fn span(&self) -> MemSpan {
        match self {
            Self::Shared(shared) => shared.span(),
            Self::Raw(span) => *span,
        }
    }
}
