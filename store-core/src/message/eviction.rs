//! Messages about eviction: what was evicted, what is kept and why, what is evicted next.

use serde::{Deserialize, Serialize};

use crate::EvictionPolicy;
use crate::codec::Key;

/// What keeps an object from eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kept {
    /// Leased, or a member of its group is leased.
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
#[non_exhaustive]
pub struct EvictionReport {
    /// The policy that chooses the object to evict.
    pub policy: EvictionPolicy,
    /// Candidates of the policy, objects and groups. Some may be leased: that shows when their turn comes.
    pub candidates: u64,
    /// Size of the leased set: objects and groups whose turn came while they were leased.
    pub kept_leased: u64,
    /// Objects that are kept because of a soft pin.
    pub kept_soft_pinned: u64,
    /// Objects that are kept because of a hard pin.
    pub kept_hard_pinned: u64,
    /// Objects that are kept because another member of their group is pinned or being written.
    pub kept_by_group: u64,
    /// Objects that are being written.
    pub kept_unfinished: u64,
    /// Bytes that are pinned for good, each object counted once.
    pub hard_pinned_bytes: u64,
    /// Groups with at least one member.
    pub groups: u64,
    /// Bytes of all segments that are allocated or pending release.
    pub used_bytes: u64,
    /// Eviction begins when more bytes than this are used.
    pub high_mark_bytes: u64,
    /// Eviction ends when no more bytes than this are used.
    pub low_mark_bytes: u64,
    /// Objects evicted.
    pub evictions_total: u64,
    /// Bytes of evicted objects, each object counted once.
    pub evicted_bytes_total: u64,
    /// Objects that were evicted because a put found no room; the others were evicted at the watermark.
    pub evicted_for_room_total: u64,
    /// Times that eviction was wanted and nothing could be evicted.
    pub starved_total: u64,
    /// Candidates examined: the total work of eviction.
    pub looks_total: u64,
    /// Times that an object was leased when its turn came.
    pub kept_leased_total: u64,
    /// Times that a softly pinned object was wanted, and a lease or another member of its group kept it.
    pub kept_soft_pinned_total: u64,
    /// Soft pins that ran out.
    pub soft_pins_decayed_total: u64,
    /// Soft pins that a read renewed after they had run out.
    pub soft_pins_revived_total: u64,
    /// Softly pinned objects, or groups with one, that were evicted because there was nothing else.
    pub soft_pinned_evicted_total: u64,
    /// Groups of several objects that were evicted.
    pub groups_evicted_total: u64,
    /// Objects whose time to live ended.
    pub expired_total: u64,
    /// Keys that were put again soon after they had been evicted, or that preceded such a key in their batch.
    pub returned_total: u64,
}

/// An object that is evicted soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextVictim<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Length of the object, bytes.
    pub len: u64,
    /// Objects that are evicted together with it, itself included.
    pub company: u32,
    /// It is leased: it would move to the leased set until the lease is over.
    pub leased: bool,
}

/// How much eviction is to leave: objects are evicted until both limits hold. A limit on what is left makes
/// the request idempotent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evict {
    /// Most objects to leave, those that are being written not counted.
    pub objects_max: u64,
    /// Most bytes to leave allocated or pending release, of all segments.
    pub used_bytes_max: u64,
}

/// What an `EvictNow` evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Number of evicted objects.
    pub objects: u64,
    /// Bytes of the evicted objects, each object counted once.
    pub bytes: u64,
    /// A limit does not hold yet and there may be more to evict: repeat the request.
    pub more: bool,
}
