//! Local regions and attached segments: what an id means, who uses it, and whether it may go.

use std::collections::{HashSet, VecDeque};

use te_core::{Access, Error, ErrorKind, Op, RegionId, SegmentId, Slice};
use te_fabric::Queue;

use crate::exchange::Chunking;
use crate::verbs::Registration;

/// A registered region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) generation: u32,
    pub(crate) chunking: Chunking,
    pub(crate) chunks: Vec<Registration>,
    pub(crate) access: Access,
    pub(crate) key: u64,
    /// Memory of this process. Another device's the CPU cannot read.
    pub(crate) mapped: bool,
    /// Slices of ours that may touch it.
    pub(crate) own: u32,
    /// Some peer has got its remote keys.
    pub(crate) shown: bool,
    /// A `deregister` has begun: nothing may use it any more.
    pub(crate) leaving: bool,
}

/// What the target has said about a segment.
#[derive(Debug)]
pub(crate) enum Keys {
    /// Not asked.
    Unknown,
    /// Asked, with this id.
    Asked(u64),
    /// All known; asked for in order, so the list grows.
    Known,
    /// The target has withdrawn the region.
    Withdrawn,
}

/// A peer's exported region.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) generation: u32,
    pub(crate) endpoint: u32,
    pub(crate) region: u32,
    pub(crate) region_generation: u32,
    pub(crate) key: u64,
    /// As exported, then as the target says.
    pub(crate) len: u64,
    /// As exported, then as the target says.
    pub(crate) access: Access,
    pub(crate) keys: Keys,
    pub(crate) chunking: Option<Chunking>,
    pub(crate) remote_keys: Vec<u32>,
    /// Slices that wait for the keys.
    pub(crate) waiting: Queue,
    /// Slices and fences.
    pub(crate) users: u32,
}

/// A table of things that the caller numbers: `index` is his, and so is `generation`.
#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: Vec<Option<T>>,
    max: u32,
}

impl<T> Table<T> {
    pub(crate) const fn new(max: u32) -> Self {
        Self { entries: Vec::new(), max }
    }

    /// Indexes there ever were: the bound for a walk over all.
    pub(crate) fn bound(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.entries.get(index as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    /// Whether something may be put at `index`.
    pub(crate) fn vacant(&self, index: u32) -> Result<(), Error> {
        match (index < self.max, self.get(index)) {
            (false, _) => Err(ErrorKind::Full.into()),
            (true, Some(_)) => Err(ErrorKind::Busy.into()),
            (true, None) => Ok(()),
        }
    }

    pub(crate) fn insert(&mut self, index: u32, entry: T) -> Result<(), Error> {
        self.vacant(index)?;
        let at = index as usize;
        if self.entries.len() <= at {
            self.entries.resize_with(at + 1, || None);
        }
        self.entries[at] = Some(entry);
        Ok(())
    }

    /// Puts `entry` at the first free index.
    pub(crate) fn add(&mut self, entry: T) -> Result<u32, Error> {
        let free = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len()) as u32;
        self.insert(free, entry).map(|()| free)
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        self.entries.get_mut(index as usize)?.take()
    }
}

impl Table<Region> {
    pub(crate) fn find(&self, id: RegionId) -> Result<&Region, Error> {
        match self.get(id.index) {
            None => Err(ErrorKind::NotFound.into()),
            Some(region) if region.generation != id.generation => Err(ErrorKind::Stale.into()),
            Some(region) => Ok(region),
        }
    }

    /// Whether a slice may use its local range.
    pub(crate) fn check_local(&self, slice: &Slice) -> Result<(), Error> {
        let region = self.find(slice.local.0)?;
        let needed = match slice.op {
            Op::Read => Access::LOCAL_WRITE,
            Op::Write => Access::LOCAL_READ,
        };
        if region.leaving || !region.access.contains(needed) {
            return Err(ErrorKind::AccessDenied.into());
        }
        check_range(slice.local.1, slice.len, region.chunking.len)
    }
}

impl Table<Segment> {
    pub(crate) fn find(&self, id: SegmentId) -> Result<&Segment, Error> {
        match self.get(id.index) {
            None => Err(ErrorKind::NotFound.into()),
            Some(segment) if segment.generation != id.generation => Err(ErrorKind::Stale.into()),
            Some(segment) => Ok(segment),
        }
    }

    /// Whether a slice may use its remote range, as far as is known here.
    pub(crate) fn check_remote(&self, slice: &Slice) -> Result<&Segment, Error> {
        let segment = self.find(slice.remote.0)?;
        segment.check(slice.op, slice.remote.1, slice.len)?;
        Ok(segment)
    }
}

impl Segment {
    /// Whether this operation on this range is allowed, as far as is known here.
    pub(crate) fn check(&self, op: Op, offset: u64, len: u32) -> Result<(), Error> {
        if matches!(self.keys, Keys::Withdrawn) {
            return Err(ErrorKind::Stale.into());
        }
        let needed = match op {
            Op::Read => Access::REMOTE_READ,
            Op::Write => Access::REMOTE_WRITE,
        };
        check_range(offset, len, self.len)?;
        if self.access.contains(needed) { Ok(()) } else { Err(ErrorKind::AccessDenied.into()) }
    }
}

fn check_range(offset: u64, len: u32, bound: u64) -> Result<(), Error> {
    match offset.checked_add(u64::from(len)) {
        Some(end) if end <= bound => Ok(()),
        _ => Err(ErrorKind::OutOfRange.into()),
    }
}

/// Remote keys that peers may still hold though their regions are gone. A device gives its 32-bit keys out again, and a
/// peer with an old one would reach the new region (L6): such a key is not used while it is remembered.
#[derive(Debug, Default)]
pub(crate) struct Retired {
    order: VecDeque<u32>,
    keys: HashSet<u32>,
}

impl Retired {
    const KEYS_MAX: usize = 65_536;

    pub(crate) fn add(&mut self, key: u32) {
        if self.keys.insert(key) {
            self.order.push_back(key);
            if self.order.len() > Self::KEYS_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.keys.remove(&oldest);
            }
        }
    }

    pub(crate) fn contains(&self, key: u32) -> bool {
        self.keys.contains(&key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_taken_once_and_bounded() {
        let mut table = Table::new(2);
        assert_eq!(table.insert(1, 'a'), Ok(()));
        assert_eq!(table.insert(1, 'b').map_err(|e| e.kind), Err(ErrorKind::Busy));
        assert_eq!(table.insert(2, 'b').map_err(|e| e.kind), Err(ErrorKind::Full));
        assert_eq!((table.add('c'), table.add('d').map_err(|e| e.kind)), (Ok(0), Err(ErrorKind::Full)));
        assert_eq!((table.remove(1), table.remove(1), table.get(0)), (Some('a'), None, Some(&'c')));
    }

    #[test]
    fn retired_keys_are_forgotten_oldest_first() {
        let mut retired = Retired::default();
        (0..=Retired::KEYS_MAX as u32).for_each(|key| retired.add(key));
        assert!(!retired.contains(0) && retired.contains(1) && retired.contains(Retired::KEYS_MAX as u32));
    }
}
