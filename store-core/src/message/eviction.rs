//! Messages about eviction: what went, what is kept and why, what goes next.

use serde::{Deserialize, Serialize};

use crate::EvictionPolicy;
use crate::codec::Key;

/// What keeps an object from eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kept {
    /// Readers hold a lease to it, or to another of its group.
    Leased,
    /// It is being written.
    Unfinished,
    /// Pinned as long as there is anything else to evict.
    SoftPinned,
    /// Pinned for good.
    HardPinned,
    /// Another member of its group is pinned or being written.
    Group,
}

/// Eviction: gauges (now) and counters (since the master was created). A counter ends in `_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionReport {
    /// How the object to evict is chosen.
    pub policy: EvictionPolicy,
    /// Objects and groups to choose from. Some may be leased: that shows when their turn comes.
    pub candidates: u64,
    /// Objects and groups whose turn came while they were leased, and that wait for the end of the lease.
    pub kept_leased: u64,
    /// Objects that a soft pin spares.
    pub kept_soft_pinned: u64,
    /// Objects that a hard pin spares.
    pub kept_hard_pinned: u64,
    /// Objects that are kept because another of their group is pinned or being written.
    pub kept_by_group: u64,
    /// Objects that are being written.
    pub kept_unfinished: u64,
    /// Bytes that are pinned for good, each object counted once.
    pub hard_pinned_bytes: u64,
    /// Groups with a member.
    pub groups: u64,
    /// Bytes of all segments that are allocated or held back.
    pub used_bytes: u64,
    /// Eviction begins above this.
    pub high_mark_bytes: u64,
    /// It ends here.
    pub low_mark_bytes: u64,
    /// Objects evicted.
    pub evictions_total: u64,
    /// Bytes of them, each object counted once.
    pub evicted_bytes_total: u64,
    /// Of the objects evicted, those that made room for a put that found none; the rest went at the watermark.
    pub evicted_for_room_total: u64,
    /// Times that eviction was wanted and nothing could go.
    pub starved_total: u64,
    /// Candidates looked at: the work of it all.
    pub looks_total: u64,
    /// Times that a turn came and there was a lease.
    pub kept_leased_total: u64,
    /// Times that a softly pinned object was wanted, and a lease or another of its group kept it.
    pub kept_soft_pinned_total: u64,
    /// Soft pins that ran out.
    pub soft_pins_decayed_total: u64,
    /// Soft pins that a read renewed after they had run out.
    pub soft_pins_revived_total: u64,
    /// Softly pinned objects, or groups with one, that went because there was nothing else.
    pub soft_pinned_evicted_total: u64,
    /// Groups of several that were evicted.
    pub groups_evicted_total: u64,
    /// Objects whose time to live was over.
    pub expired_total: u64,
    /// Keys that were put again soon after they had been evicted, or that preceded such a key in their batch.
    pub returned_total: u64,
}

/// One that would be evicted soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextVictim<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes.
    pub len: u64,
    /// Objects that go with it, itself included.
    pub company: u32,
    /// Readers hold a lease: it will be set aside until that is over.
    pub leased: bool,
}

/// How much to leave: objects go until neither bound is passed. What to leave rather than what to take, so that asking twice
/// is asking once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evict {
    /// Objects, those being written not counted.
    pub objects_max: u64,
    /// Bytes of all segments that are allocated or held back.
    pub used_bytes_max: u64,
}

/// What was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Objects.
    pub objects: u64,
    /// Bytes of them, each counted once.
    pub bytes: u64,
    /// A bound is still passed and there may be more to evict: ask again.
    pub more: bool,
}
