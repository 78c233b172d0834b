//! Groups: objects that are useful only together, and are evicted together.
//!
//! A group is one candidate for eviction. One of its members, the *lead*, stands for it in the policy's
//! order; while a member is pinned or being written, the group has no lead. A read of any member is a read of
//! the group, and a lease on any of them is a lease on all.

use alloc::vec::Vec;

use foldhash::quality::FixedState;
use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::TenantNo;
use crate::map::Map;
use crate::slab::trim_map;

/// Identifies a group: the number is chosen by the tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct GroupId {
    pub(crate) tenant: TenantNo,
    pub(crate) id: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Group {
    pub(crate) members: Vec<u32>,
    /// The member that stands for the group, if the group can be evicted.
    pub(crate) lead: Option<u32>,
    /// When the last lease of any member ends, including members that are gone by now.
    pub(crate) leased_until: Instant,
    pub(crate) unfinished: u32,
    pub(crate) hard: u32,
    pub(crate) soft: u32,
}

impl Group {
    /// Whether at most leases keep the group from eviction.
    pub(crate) const fn is_free(&self) -> bool {
        self.unfinished == 0 && self.hard == 0 && self.soft == 0
    }

    /// Memory of the list of members, bytes: of their number alone, so that it is the same on a standby.
    const fn members_bytes(&self) -> usize {
        match self.members.len() {
            0 => 0,
            len => len.next_power_of_two() * size_of::<u32>(),
        }
    }

    /// Number of members that are kept because of other members.
    const fn held(&self) -> u32 {
        if self.is_free() { 0 } else { self.members.len() as u32 - self.unfinished - self.hard - self.soft }
    }
}

/// All groups with at least one member.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Groups {
    map: Map<GroupId, Group, FixedState>,
    members_bytes: usize,
    held: u32,
}

impl Groups {
    pub(crate) fn new(seed: u64) -> Self {
        Self { map: Map::with_seed(seed), members_bytes: 0, held: 0 }
    }

    pub(crate) fn get(&self, id: GroupId) -> Option<&Group> {
        self.map.get(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Number of members that could be evicted but for other members of their groups.
    pub(crate) const fn held(&self) -> u32 {
        self.held
    }

    /// Changes a group. A group without members afterwards is removed.
    pub(crate) fn with<T>(&mut self, id: GroupId, change: impl FnOnce(&mut Group) -> T) -> T {
        let group = self.map.entry(id).or_insert_with(|| Group {
            members: Vec::new(),
            lead: None,
            leased_until: Instant::ZERO,
            unfinished: 0,
            hard: 0,
            soft: 0,
        });
        self.members_bytes -= group.members_bytes();
        self.held -= group.held();
        let result = change(group);
        self.held += group.held();
        self.members_bytes += group.members_bytes();
        if group.members.is_empty() {
            self.map.remove(&id);
        }
        result
    }

    pub(crate) fn tidy(&mut self) {
        trim_map(&mut self.map);
    }

    /// As [`Self::memory_bytes`], but only what the present groups need.
    pub(crate) fn live_bytes(&self) -> usize {
        self.map.len() * 2 * size_of::<(GroupId, Group)>() + self.members_bytes
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.map.allocation_size() + self.members_bytes
    }
}
