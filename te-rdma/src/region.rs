//! What this fabric keeps of regions and segments, beside what every fabric does: registrations and remote keys.

use std::collections::{HashSet, VecDeque};

use te_fabric::Queue;

use crate::exchange::Chunking;
use crate::verbs::Registration;

/// The part of a region that is te-rdma's own.
#[derive(Debug)]
pub(crate) struct RegionExt {
    pub(crate) chunking: Chunking,
    pub(crate) chunks: Vec<Registration>,
    /// Memory of this process. Another device's the CPU cannot read.
    pub(crate) mapped: bool,
    /// Some peer has got its remote keys.
    pub(crate) shown: bool,
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

/// The part of a segment that is te-rdma's own. Its length and rights are as exported, and then as the target says.
#[derive(Debug)]
pub(crate) struct SegmentExt {
    pub(crate) keys: Keys,
    pub(crate) chunking: Option<Chunking>,
    pub(crate) remote_keys: Vec<u32>,
    /// Slices that wait for the keys.
    pub(crate) waiting: Queue,
}

impl SegmentExt {
    /// Of a segment that was just attached.
    pub(crate) const fn new() -> Self {
        Self { keys: Keys::Unknown, chunking: None, remote_keys: Vec::new(), waiting: Queue::new() }
    }

    /// Forgets the remote keys: they have to be asked for again, unless the region was withdrawn.
    pub(crate) fn forget(&mut self, keys: Keys) {
        self.remote_keys.clear();
        self.keys = keys;
    }
}

pub(crate) type Region = te_fabric::Region<RegionExt>;
pub(crate) type Regions = te_fabric::Regions<RegionExt>;
pub(crate) type Segment = te_fabric::Segment<SegmentExt>;
pub(crate) type Segments = te_fabric::Segments<SegmentExt>;

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
    fn retired_keys_are_forgotten_oldest_first() {
        let mut retired = Retired::default();
        (0..=Retired::KEYS_MAX as u32).for_each(|key| retired.add(key));
        assert!(!retired.contains(0) && retired.contains(1) && retired.contains(Retired::KEYS_MAX as u32));
    }
}
