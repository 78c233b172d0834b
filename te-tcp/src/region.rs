//! Local regions and attached segments: what an id means, who uses it, and whether it may go.

use te_core::{Access, Error, ErrorKind, Op, RegionId, SegmentId, Slice};

use crate::frame::{Operation, Status};
use crate::sys::Pinned;

/// A registered region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) generation: u32,
    pub(crate) memory: Pinned,
    pub(crate) access: Access,
    pub(crate) key: u64,
    /// Slices of ours that may touch it.
    pub(crate) own: u32,
    /// Payloads of peers on their way into or out of it.
    pub(crate) peers: u32,
    /// `deregister` was refused for a peer's sake: no new ones.
    pub(crate) withdrawn: bool,
}

/// A peer's exported region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) generation: u32,
    pub(crate) peer: u32,
    pub(crate) region: u32,
    pub(crate) region_generation: u32,
    pub(crate) key: u64,
    pub(crate) len: u64,
    pub(crate) access: Access,
    /// Slices and fences that refer to it.
    pub(crate) users: u32,
}

/// Values by index, each with a generation. Grows on registration, never on the data path.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<Option<T>>,
    max: usize,
}

impl<T> Table<T> {
    pub(crate) const fn new(max: u32) -> Self {
        Self { slots: Vec::new(), max: max as usize }
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    pub(crate) fn insert(&mut self, index: u32, value: T) -> Result<(), Error> {
        let at = index as usize;
        if at >= self.max {
            return Err(ErrorKind::Full.into());
        }
        if at >= self.slots.len() {
            self.slots.resize_with(at + 1, || None);
        }
        if self.slots[at].is_some() {
            return Err(ErrorKind::Busy.into());
        }
        self.slots[at] = Some(value);
        Ok(())
    }

    /// Puts `value` where there is room; gives the index.
    pub(crate) fn add(&mut self, value: T) -> Result<u32, Error> {
        let at = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len()) as u32;
        self.insert(at, value).map(|()| at)
    }

    /// Indexes there ever were: the bound for a walk.
    pub(crate) fn bound(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        self.slots.get_mut(index as usize)?.take()
    }
}

impl Table<Region> {
    pub(crate) fn find(&self, id: RegionId) -> Result<&Region, Error> {
        let region = self.get(id.index).ok_or(ErrorKind::NotFound)?;
        if region.generation == id.generation { Ok(region) } else { Err(ErrorKind::Stale.into()) }
    }

    /// The local side of a slice, checked.
    pub(crate) fn local(&self, slice: &Slice) -> Result<Pinned, Error> {
        let region = self.find(slice.local.0)?;
        let needed = match slice.op {
            Op::Read => Access::LOCAL_WRITE,
            Op::Write => Access::LOCAL_READ,
        };
        if !region.access.contains(needed) {
            return Err(ErrorKind::AccessDenied.into());
        }
        region.memory.part(slice.local.1, u64::from(slice.len))
    }

    /// What a peer's operation may touch, checked (L6).
    pub(crate) fn remote(&self, asked: &Operation, needed: Access, bytes_max: u32) -> Result<Pinned, Status> {
        let region = self.get(asked.region.get()).ok_or(Status::NotFound)?;
        if region.generation != asked.generation.get() || region.withdrawn {
            return Err(Status::Stale);
        }
        if region.key != asked.key.get() || !region.access.contains(needed) {
            return Err(Status::AccessDenied);
        }
        let (offset, len) = (asked.offset.get(), asked.len.get());
        if len == 0 {
            return Err(Status::Empty);
        }
        if len > u64::from(bytes_max) {
            return Err(Status::TooLong);
        }
        region.memory.part(offset, len).map_err(|_| Status::OutOfRange)
    }

    pub(crate) fn peer_begins(&mut self, index: u32) {
        if let Some(region) = self.get_mut(index) {
            region.peers += 1;
        }
    }

    pub(crate) fn peer_ends(&mut self, index: u32) {
        if let Some(region) = self.get_mut(index) {
            debug_assert!(region.peers > 0, "a payload ends once");
            region.peers = region.peers.saturating_sub(1);
        }
    }
}

impl Table<Segment> {
    pub(crate) fn find(&self, id: SegmentId) -> Result<&Segment, Error> {
        let segment = self.get(id.index).ok_or(ErrorKind::NotFound)?;
        if segment.generation == id.generation { Ok(segment) } else { Err(ErrorKind::Stale.into()) }
    }

    /// The remote side of a slice, checked.
    pub(crate) fn remote(&self, slice: &Slice) -> Result<&Segment, Error> {
        let segment = self.find(slice.remote.0)?;
        let needed = match slice.op {
            Op::Read => Access::REMOTE_READ,
            Op::Write => Access::REMOTE_WRITE,
        };
        if !segment.access.contains(needed) {
            return Err(ErrorKind::AccessDenied.into());
        }
        match slice.remote.1.checked_add(u64::from(slice.len)) {
            Some(end) if end <= segment.len => Ok(segment),
            _ => Err(ErrorKind::OutOfRange.into()),
        }
    }
}
