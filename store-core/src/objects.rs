//! Objects: a hash table of slab indices, and lists of what may be evicted.
//!
//! ```text
//!   table  hash ─▶ index          9 bytes per slot; keeps 32 bits of the hash, so it grows without touching entries
//!   replacing  hash ─▶ index      the same for unfinished upserts: any number of entries with one key
//!   slots  which are taken        1 bit; empty pages of 1,024 entries are freed, and a table that is too large shrinks
//!   slab   [entry][entry][entry]… 96 bytes: key (inline to 38 bytes), length, checksum, generation, replica, lease
//!   nodes  [node][node][node]…    16 bytes: links and the eviction policy's marks
//!   kept   index ─▶ …             only for objects with a retention of their own
//! ```
//!
//! The rules on what may be done to an object and when are in `retention.rs`.

pub(crate) mod changes;
mod groups;
mod leases;
mod leaving;
mod retention;
mod shares;
mod state;
pub(crate) mod table;

use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::time::Duration;

use core::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::eviction::{Eviction as _, EvictionPolicy, List, Nodes, Place};
use crate::map::Map;
use crate::message::Retention;
use crate::segments::Placed;
use crate::slab::{Slots, Values, trim_heap, trim_map};
use crate::{FullKey, SegmentNo, TenantNo};
use changes::Changes;
use groups::Groups;
use leases::LeaseCount;
use retention::Kept;
pub(crate) use retention::{Removed, Why};
use shares::Order;
pub(crate) use shares::{Usage, charge};
use table::{BUCKETS_PER_TIMEOUT, SLOT_BYTES, Table};

/// The state of an entry. It determines the list that the entry is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Being written; `time` is the start of the put. On a list, oldest start first.
    Processing,
    /// Readable, and pinned for good. On a list.
    Hard,
    /// Readable, and softly pinned. On a list of its tenant, oldest renewal first.
    Soft,
    /// Readable. It was leased when its turn to be evicted came. In the leased set until the lease is over.
    Leased,
    /// Readable, and in the order of the eviction policy.
    Candidate,
    /// Readable, and chosen by the policy to be evicted soon: it is copied to a disk before that, if it can
    /// be. On a list of its tenant, the first choice first. A read makes it a candidate again.
    Leaving,
    /// Readable, and member of a group: another member stands for the group, or none while the group cannot
    /// be evicted.
    Member,
    /// Being written by an upsert: as `Processing`, on the same list, and not found by its key yet.
    Replacing,
    /// A free entry.
    Vacant,
}

/// Number of states that have a list in [`Objects`].
const LISTS: usize = State::Hard as usize + 1;

/// One object. 96 bytes.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: KeyBytes,
    pub(crate) generation: u64,
    pub(crate) len: u64,
    /// While the object is being written: the start of the put. Then its last use, so far as it is known: the
    /// commit, or the end or return of the last lease. See [`Self::leased_until`].
    pub(crate) time: Instant,
    pub(crate) replicas: Placements,
    /// While the object is being written: the nonce of the put.
    pub(crate) checksum: u32,
    /// The tenant that the object belongs to.
    pub(crate) tenant: TenantNo,
    pub(crate) state: State,
    /// A combination of [`Self::RENEWED`] and the constants after it.
    marks: u8,
}

const _: () = assert!(size_of::<Entry>() <= 96);

impl Entry {
    /// What free entries read as.
    const VACANT: Self = Self {
        key: KeyBytes::EMPTY,
        generation: 0,
        len: 0,
        time: Instant::ZERO,
        replicas: Placements::NONE,
        checksum: 0,
        tenant: TenantNo::DEFAULT,
        state: State::Vacant,
        marks: 0,
    };
    /// Softly pinned, and read since it was put at its place of the list.
    const RENEWED: u8 = 1;
    /// The object has an entry in `Objects::kept`.
    const KEPT: u8 = 2;
    /// The object was the last of its batch.
    const LAST: u8 = 4;
    /// The object was put again soon after its eviction.
    const RETURNING: u8 = 8;
    /// The upper bits count the valid leases that were not returned.
    const LEASE: u8 = 16;
    /// From this count on leases are not counted any more: they end by time.
    const LEASES_MANY: u8 = 0xf0;

    /// The key that the object is found by.
    pub(crate) fn full_key(&self) -> FullKey<'_> {
        FullKey { tenant: self.tenant, key: self.key.as_slice() }
    }

    /// Whether a replica is at this place.
    pub(crate) fn is_at(&self, segment: SegmentNo, addr: u64) -> bool {
        self.replicas.as_slice().iter().any(|placed| (placed.segment, placed.addr) == (segment, addr))
    }

    pub(crate) fn is_complete(&self) -> bool {
        !matches!(self.state, State::Processing | State::Replacing | State::Vacant)
    }

    /// Whether it has no pin, time to live or group, and may be copied to a disk.
    pub(crate) fn is_plain(&self) -> bool {
        !self.has(Self::KEPT)
    }

    /// Whether the object is found by its key. An unfinished upsert is not.
    pub(crate) fn has_key(&self) -> bool {
        !matches!(self.state, State::Replacing | State::Vacant)
    }

    pub(crate) fn is_leased(&self, now: Instant) -> bool {
        self.is_complete() && now < self.leased_until()
    }

    /// The end of the last lease that was not returned; zero if there was none.
    pub(crate) const fn leased_until(&self) -> Instant {
        if self.marks & Self::LEASES_MANY == 0 { Instant::ZERO } else { self.time }
    }

    /// Counts a lease. `fresh`: it is the only one.
    fn count_lease(&mut self, fresh: bool) {
        let others = if fresh { 0 } else { self.marks & Self::LEASES_MANY };
        let count = if others == Self::LEASES_MANY { others } else { others + Self::LEASE };
        self.marks = self.marks & !Self::LEASES_MANY | count;
    }

    /// Number of leases that may be valid and were not returned; 0: none, or more than are counted.
    fn leases_left(&self) -> u8 {
        match self.marks & Self::LEASES_MANY {
            Self::LEASES_MANY => 0,
            counted => counted / Self::LEASE,
        }
    }

    fn has(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }
}

/// The bytes of a key, stored in place if they are few.
#[derive(Debug)]
pub(crate) enum KeyBytes {
    Inline { len: u8, bytes: [u8; Self::INLINE_MAX] },
    Heap(Box<[u8]>),
}

impl KeyBytes {
    const INLINE_MAX: usize = 38;
    pub(crate) const EMPTY: Self = Self::Inline { len: 0, bytes: [0; Self::INLINE_MAX] };

    pub(crate) fn new(key: &[u8]) -> Self {
        if key.len() > Self::INLINE_MAX {
            return Self::Heap(key.into());
        }
        let mut bytes = [0; Self::INLINE_MAX];
        bytes[..key.len()].copy_from_slice(key);
        Self::Inline { len: key.len() as u8, bytes }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Self::Heap(bytes) => bytes,
        }
    }

    fn first(&self) -> u8 {
        self.as_slice().first().copied().unwrap_or(0)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Self::Inline { .. } => 0,
            Self::Heap(bytes) => bytes.len(),
        }
    }
}

/// The places of an object's bytes. One replica is the usual case and needs no allocation.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Placements {
    One(Placed),
    Many(Box<[Placed]>),
}

impl Placements {
    pub(crate) const NONE: Self = Self::One(Placed::NOWHERE);

    pub(crate) fn new(placed: &[Placed]) -> Self {
        match placed {
            [] => Self::NONE,
            [one] => Self::One(*one),
            many => Self::Many(many.into()),
        }
    }

    pub(crate) fn as_slice(&self) -> &[Placed] {
        match self {
            Self::One(placed) if *placed == Placed::NOWHERE => &[],
            Self::One(placed) => core::slice::from_ref(placed),
            Self::Many(many) => many,
        }
    }

    /// Forgets the replica on a segment; returns whether any replica is left.
    pub(crate) fn drop_segment(&mut self, segment: SegmentNo) -> bool {
        let left: crate::codec::Short<Placed, { crate::message::REPLICAS_MAX }> = {
            let mut left = crate::codec::Short::new();
            for placed in self.as_slice().iter().filter(|placed| placed.segment != segment) {
                // The list has room for all replicas of one object.
                let _ = left.push(*placed);
            }
            left
        };
        *self = Self::new(&left);
        !left.is_empty()
    }

    fn heap_bytes(&self) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Many(many) => size_of_val(&**many),
        }
    }
}

/// An object that a put creates.
#[derive(Debug)]
pub(crate) struct New<'a> {
    pub(crate) key: FullKey<'a>,
    pub(crate) len: u64,
    pub(crate) generation: u64,
    pub(crate) nonce: u32,
    pub(crate) replicas: Placements,
    pub(crate) place: Place,
    pub(crate) retention: Retention,
    /// It is found by its key only when it is complete, and replaces what is found then.
    pub(crate) replaces: bool,
}

/// Times at which something may be due for an object, the earliest first, with the object's generation and
/// index.
type Times = BinaryHeap<Reverse<(Instant, u64, u32)>>;

/// All objects.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Objects {
    slots: Slots,
    entries: Values<Entry>,
    #[serde(skip, default = "Table::new")]
    table: Table,
    /// Unfinished upserts.
    #[serde(skip, default = "Table::new")]
    replacing: Table,
    #[serde(skip)]
    hasher: FixedState,
    heap_bytes: usize,
    /// Bytes of complete objects, each object counted once.
    complete_bytes: u64,
    /// Bytes of objects that are being written, each object counted once.
    processing_bytes: u64,
    nodes: Nodes,
    /// Indexed by `State`, for the states with a list.
    lists: [List; LISTS],
    /// Indexed by tenant.
    orders: Vec<Order>,
    /// Indexed by tenant.
    usage: Vec<Usage>,
    /// Properties that most objects do not have.
    kept: Map<u32, Kept, FixedState>,
    groups: Groups,
    /// Ends of the leases of the leased set, and of soft pins, at the earliest. May name objects that are
    /// gone or not in that state any more.
    wakings: Times,
    /// Number of objects in the leased set.
    leased: u32,
    /// Number of softly pinned objects.
    soft: u32,
    /// Bytes of objects that leave, each object counted once.
    leaving_bytes: u64,
    /// Ends of times to live. May name objects that are gone.
    expiries: Times,
    /// Number of entries of `kept` with a time to live that has begun.
    mortal: u32,
    soft_pin_ttl: Duration,
    leases: LeaseCount,
    hard_bytes: u64,
    why: Why,
    #[serde(skip)]
    pub(crate) changes: Changes,
}

impl Objects {
    pub(crate) fn new(
        hash_seed: u64,
        policy: EvictionPolicy,
        soft_pin_ttl: Duration,
        lease: Duration,
    ) -> Self {
        let mut this = Self {
            slots: Slots::new(),
            entries: Values::new(Entry::VACANT),
            table: Table::new(),
            replacing: Table::new(),
            hasher: FixedState::with_seed(hash_seed),
            heap_bytes: 0,
            complete_bytes: 0,
            processing_bytes: 0,
            nodes: Nodes::new(),
            lists: [List::EMPTY; LISTS],
            orders: Vec::new(),
            usage: Vec::new(),
            kept: Map::with_seed(hash_seed),
            groups: Groups::new(hash_seed),
            wakings: Times::new(),
            leased: 0,
            soft: 0,
            leaving_bytes: 0,
            expiries: Times::new(),
            mortal: 0,
            soft_pin_ttl,
            leases: LeaseCount::new(lease),
            hard_bytes: 0,
            why: Why::default(),
            changes: Changes::default(),
        };
        this.add_share(TenantNo::DEFAULT, policy);
        this
    }

    pub(crate) fn find(&self, key: FullKey<'_>) -> Option<u32> {
        self.table.find(short(self.hash(key)), |index| self.entries[index].full_key() == key)
    }

    /// An unfinished upsert of this key with a property.
    pub(crate) fn find_upsert(&self, key: FullKey<'_>, is: impl Fn(&Entry) -> bool) -> Option<u32> {
        // Usually there are none at all.
        if self.replacing.len() == 0 {
            return None;
        }
        self.replacing.find(short(self.hash(key)), |index| {
            let entry = &self.entries[index];
            entry.full_key() == key && is(entry)
        })
    }

    /// The unfinished upserts, in no particular order.
    pub(crate) fn upserts(&self) -> impl Iterator<Item = &Entry> {
        self.replacing.iter().map(|index| &self.entries[index])
    }

    /// Number of unfinished upserts.
    pub(crate) fn upserts_len(&self) -> usize {
        self.replacing.len()
    }

    /// A number that identifies a key, the same one as long as the master runs.
    pub(crate) fn key_number(&self, key: FullKey<'_>) -> u64 {
        self.hash(key)
    }

    /// An upsert gets its key. No other entry may have it.
    pub(crate) fn take_key(&mut self, index: u32) {
        self.note_change(index);
        let hash = short(self.hash(self.entries[index].full_key()));
        self.replacing.remove(hash, index);
        self.table.insert(hash, index);
        self.entries[index].state = State::Processing;
    }

    /// Touches the memory that looking up the keys will touch. The loads of different keys do not wait for
    /// each other, as they would with the work of an operation between them.
    pub(crate) fn warm<'a>(&self, keys: impl Iterator<Item = FullKey<'a>>) {
        let mut sum = 0;
        for key in keys {
            if let Some(index) = self.table.find(short(self.hash(key)), |_| true) {
                // The two ends of an entry lie in different cache lines.
                let entry = &self.entries[index];
                sum ^= u64::from(entry.key.first()) ^ u64::from(entry.checksum);
                sum ^= self.nodes.node(index).stamp();
            }
        }
        core::hint::black_box(sum);
    }

    /// The entry at an index. A free one reads as vacant, with generation 0.
    pub(crate) fn entry(&self, index: u32) -> &Entry {
        &self.entries[index]
    }

    /// The entry at a slot that may not exist.
    pub(crate) fn get(&self, index: u32) -> Option<&Entry> {
        (index < self.slots()).then(|| &self.entries[index])
    }

    /// Adds an object that is being written. Unless it replaces another one the key must not exist, and the
    /// object's group must have room.
    pub(crate) fn insert(&mut self, now: Instant, new: New<'_>) -> u32 {
        let hash = short(self.hash(new.key));
        let key = KeyBytes::new(new.key.key);
        self.heap_bytes += key.heap_bytes() + new.replicas.heap_bytes();
        let mark = |on: bool, mark: u8| if on { mark } else { 0 };
        let kept = new.retention != Retention::default();
        let entry = Entry {
            key,
            generation: new.generation,
            len: new.len,
            time: now,
            replicas: new.replicas,
            checksum: new.nonce,
            tenant: new.key.tenant,
            state: if new.replaces { State::Replacing } else { State::Processing },
            marks: mark(kept, Entry::KEPT)
                | mark(new.place.last, Entry::LAST)
                | mark(new.place.returning, Entry::RETURNING),
        };
        let usage = &mut self.usage[entry.tenant.index()];
        usage.objects += 1;
        usage.bytes += entry.charge();
        self.processing_bytes += entry.len;
        let index = self.slots.take();
        self.entries.put(index, entry);
        self.nodes.put(index);
        if new.replaces { &mut self.replacing } else { &mut self.table }.insert(hash, index);
        self.lists[State::Processing as usize].push_back(&mut self.nodes, index);
        self.note_change(index);
        if kept {
            self.keep(index, &new.retention);
        }
        index
    }

    /// Removes an object; returns what it held.
    pub(crate) fn remove(&mut self, index: u32) -> Removed {
        self.leave(index);
        self.erase(index)
    }

    /// As [`Self::remove`], for an object that is on no list any more.
    fn erase(&mut self, index: u32) -> Removed {
        self.note_change(index);
        let hash = short(self.hash(self.entries[index].full_key()));
        let entry = &mut self.entries[index];
        let table = if entry.state == State::Replacing { &mut self.replacing } else { &mut self.table };
        table.remove(hash, index);
        let usage = &mut self.usage[entry.tenant.index()];
        usage.objects -= 1;
        usage.bytes -= entry.charge();
        if entry.is_complete() {
            self.complete_bytes -= entry.len;
            self.leases.ended(entry.leased_until());
        } else {
            self.processing_bytes -= entry.len;
        }
        self.heap_bytes -= entry.key.heap_bytes() + entry.replicas.heap_bytes();
        let removed = Removed {
            tenant: entry.tenant,
            len: entry.len,
            generation: entry.generation,
            complete: entry.is_complete(),
            leases: entry.leases_left(),
            replicas: core::mem::replace(&mut entry.replicas, Placements::NONE),
        };
        *entry = Entry::VACANT;
        if let Some(page) = self.slots.give_back(index) {
            self.entries.close(page);
            self.nodes.close(page);
        }
        removed
    }

    /// Forgets the replica on a segment; returns whether any replica is left.
    pub(crate) fn drop_segment(&mut self, index: u32, segment: SegmentNo) -> bool {
        self.note_change(index);
        let entry = &mut self.entries[index];
        let usage = &mut self.usage[entry.tenant.index()];
        usage.bytes -= entry.charge();
        self.heap_bytes -= entry.replicas.heap_bytes();
        let left = entry.replicas.drop_segment(segment);
        self.heap_bytes += entry.replicas.heap_bytes();
        usage.bytes += entry.charge();
        left
    }

    /// Adds a replica to a complete object, which must have fewer than the limit.
    pub(crate) fn add_replica(&mut self, index: u32, placed: Placed) {
        self.note_change(index);
        let entry = &mut self.entries[index];
        let usage = &mut self.usage[entry.tenant.index()];
        usage.bytes -= entry.charge();
        self.heap_bytes -= entry.replicas.heap_bytes();
        let mut all: crate::codec::Short<Placed, { crate::message::REPLICAS_MAX }> =
            crate::codec::Short::new();
        for placed in entry.replicas.as_slice().iter().chain([&placed]) {
            // The caller has checked that there is room.
            let _ = all.push(*placed);
        }
        entry.replicas = Placements::new(&all);
        self.heap_bytes += entry.replicas.heap_bytes();
        usage.bytes += entry.charge();
    }

    /// Forgets the place on a disk, if the object has one.
    pub(crate) fn forget_disk(&mut self, index: u32, disk: SegmentNo) {
        if self.entries[index].replicas.as_slice().iter().any(|placed| placed.segment == disk) {
            self.drop_segment(index, disk);
        }
    }

    /// Removes the replica on a segment.
    pub(crate) fn take_replica(&mut self, index: u32, segment: SegmentNo) -> Option<Placed> {
        let replicas = self.entries[index].replicas.as_slice();
        let placed = *replicas.iter().find(|placed| placed.segment == segment)?;
        self.drop_segment(index, segment);
        Some(placed)
    }

    /// What a get of the object returns is about to change, or has.
    fn note_change(&mut self, index: u32) {
        if self.changes.are_noted() {
            let key = self.entries[index].full_key();
            let hash = self.hash(key);
            self.changes.note(hash, key);
        }
    }

    /// The same for a key.
    pub(crate) fn note_key(&mut self, key: FullKey<'_>) {
        if self.changes.are_noted() {
            let hash = self.hash(key);
            self.changes.note(hash, key);
        }
    }

    /// The object whose put began first, of those that are being written.
    pub(crate) fn processing(&self) -> Option<u32> {
        self.lists[State::Processing as usize].front()
    }

    /// Number of objects that are being written.
    pub(crate) fn processing_len(&self) -> u32 {
        self.lists[State::Processing as usize].len()
    }

    /// Number of all objects, including those that are being written.
    pub(crate) fn len(&self) -> u32 {
        self.slots.taken()
    }

    pub(crate) fn processing_bytes(&self) -> u64 {
        self.processing_bytes
    }

    pub(crate) fn complete_bytes(&self) -> u64 {
        self.complete_bytes
    }

    /// Number of slots, vacant ones included; for iteration.
    pub(crate) fn slots(&self) -> u32 {
        self.slots.end()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.slots.memory_bytes()
            + self.entries.memory_bytes()
            + self.nodes.memory_bytes()
            + self.table.memory_bytes()
            + self.replacing.memory_bytes()
            + self.heap_bytes
            + self.orders.iter().map(|order| order.policy.memory_bytes()).sum::<usize>()
            + self.orders.capacity() * (size_of::<Order>() + size_of::<Usage>())
            + self.kept.allocation_size()
            + self.groups.memory_bytes()
            + (self.wakings.capacity() + self.expiries.capacity()) * size_of::<Reverse<(Instant, u64, u32)>>()
    }

    /// Memory of the existing objects without vacant slots: entry, node, slot of the table with its slack,
    /// block of an allocator, keys and further replicas. In O(1).
    pub(crate) fn live_bytes(&self) -> usize {
        const BLOCK_BYTES: usize = 32;
        const NODE_BYTES: usize = 16;
        let each = size_of::<Entry>() + NODE_BYTES + 2 * SLOT_BYTES + BLOCK_BYTES;
        self.len() as usize * each
            + self.heap_bytes
            + self.kept.len() * 2 * size_of::<(u32, Kept)>()
            + self.groups.live_bytes()
    }

    /// Whether a table is too large, so that [`Self::tidy`] has work to do.
    pub(crate) fn is_shrinking(&self) -> bool {
        self.table.is_shrinking() || self.replacing.is_shrinking()
    }

    /// Returns some of the memory that is no longer needed.
    pub(crate) fn tidy(&mut self) {
        self.table.shrink(BUCKETS_PER_TIMEOUT);
        self.replacing.shrink(BUCKETS_PER_TIMEOUT);
        trim_map(&mut self.kept);
        trim_heap(&mut self.wakings);
        trim_heap(&mut self.expiries);
        self.groups.tidy();
        self.orders.iter_mut().for_each(|order| order.policy.tidy());
    }

    fn hash(&self, key: FullKey<'_>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key.key);
        // Keys of the default tenant are hashed alone; an odd factor spreads the other tenants.
        hasher.finish() ^ u64::from(key.tenant.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The bits of a hash that slots keep.
pub(crate) const fn short(hash: u64) -> u32 {
    (hash >> 32) as u32
}
