//! Objects: a hash table of slab indices, and three lists that run through the slab.
//!
//! ```text
//!   table  hash ─▶ index          9 bytes a slot; carries 32 bits of the hash, so it grows without touching entries
//!   slab   [entry][entry][entry]… 104 bytes: key (inline to 38 bytes), length, checksum, generation, replica, links
//!   lists  processing   being written, oldest start first
//!          leased       read lately, oldest first: eviction leaves them alone
//!          idle         the rest, least recently used first: eviction takes from the front
//! ```
//!
//! A get of an object that is leased already only moves its lease on and marks it; [`Objects::settle`] looks at the front
//! of the leased list alone, sends marked ones to the back once, and moves those whose lease is over to `idle`. So neither
//! a get nor an eviction ever walks over objects that cannot be evicted.

use alloc::boxed::Box;

use core::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use hashbrown::HashTable;
use te_core::Instant;

use crate::Key;
use crate::segments::Placed;
use crate::slab::{Chunks, NIL};

/// Which list an entry is on, that is what state it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Being written. `time` is when it was started.
    Processing,
    /// Readable, and a reader may be at it until `time`.
    Leased,
    /// Readable, nobody at it.
    Idle,
    /// No object.
    Vacant,
}

/// One object. 104 bytes.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: KeyBytes,
    pub(crate) generation: u64,
    pub(crate) len: u64,
    /// See [`State`].
    pub(crate) time: Instant,
    pub(crate) replicas: Placements,
    before: u32,
    after: u32,
    pub(crate) checksum: u32,
    pub(crate) state: State,
    /// Leased again since it was put at its place of the list.
    renewed: bool,
}

const _: () = assert!(size_of::<Entry>() <= 104);

impl Entry {
    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.state, State::Leased | State::Idle)
    }

    pub(crate) fn is_leased(&self, now: Instant) -> bool {
        self.state == State::Leased && now < self.time
    }
}

/// The bytes of a key, inline as long as they are few.
#[derive(Debug)]
pub(crate) enum KeyBytes {
    Inline { len: u8, bytes: [u8; Self::INLINE_MAX] },
    Heap(Box<[u8]>),
}

impl KeyBytes {
    const INLINE_MAX: usize = 38;
    const EMPTY: Self = Self::Inline { len: 0, bytes: [0; Self::INLINE_MAX] };

    fn new(key: &[u8]) -> Self {
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

    fn heap_bytes(&self) -> usize {
        match self {
            Self::Inline { .. } => 0,
            Self::Heap(bytes) => bytes.len(),
        }
    }
}

/// Where an object's bytes are. One replica is the rule and needs no allocation.
#[derive(Debug)]
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

    /// Forgets the replica on a segment; gives whether any is left.
    pub(crate) fn drop_segment(&mut self, segment: u32) -> bool {
        let left: crate::codec::Short<Placed, { crate::message::REPLICAS_MAX }> = {
            let mut left = crate::codec::Short::new();
            for placed in self.as_slice().iter().filter(|placed| placed.segment != segment) {
                // There were no more than fit.
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

#[derive(Clone, Copy, Debug)]
struct Slot {
    index: u32,
    hash: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
    len: u32,
}

/// All objects.
#[derive(Debug)]
pub(crate) struct Objects {
    entries: Chunks<Entry>,
    /// First of the vacant entries, linked by `after`.
    vacant: u32,
    table: HashTable<Slot>,
    hasher: FixedState,
    /// Indexed by `State`; `Vacant` has none.
    lists: [List; 3],
    heap_bytes: usize,
    /// Bytes of complete objects, each counted once.
    complete_bytes: u64,
}

impl Objects {
    pub(crate) fn new(hash_seed: u64) -> Self {
        Self {
            entries: Chunks::new(),
            vacant: NIL,
            table: HashTable::new(),
            hasher: FixedState::with_seed(hash_seed),
            lists: [List { head: NIL, tail: NIL, len: 0 }; 3],
            heap_bytes: 0,
            complete_bytes: 0,
        }
    }

    pub(crate) fn find(&self, key: &[u8]) -> Option<u32> {
        let hash = self.hash(key);
        let same = |slot: &Slot| slot.hash == hash && self.entries[slot.index].key.as_slice() == key;
        self.table.find(spread(hash), same).map(|slot| slot.index)
    }

    /// Touches what looking the keys up will touch. The loads of one key do not wait for those of another, as they would
    /// with the work of an operation between them.
    pub(crate) fn warm<'a>(&self, keys: impl Iterator<Item = Key<'a>>) {
        let mut sum = 0;
        for key in keys {
            let hash = self.hash(key.0);
            if let Some(slot) = self.table.find(spread(hash), |slot| slot.hash == hash) {
                // The two ends of an entry lie in two cache lines.
                let entry = &self.entries[slot.index];
                sum ^= u64::from(entry.key.first()) ^ u64::from(entry.checksum);
            }
        }
        core::hint::black_box(sum);
    }

    pub(crate) fn entry(&self, index: u32) -> &Entry {
        &self.entries[index]
    }

    /// The index that the next [`Self::insert`] will give.
    pub(crate) fn next_index(&self) -> u32 {
        if self.vacant == NIL { self.entries.len() } else { self.vacant }
    }

    /// Adds an object that is being written. The key must not be there.
    pub(crate) fn insert(
        &mut self,
        key: &[u8],
        len: u64,
        generation: u64,
        now: Instant,
        replicas: Placements,
    ) -> u32 {
        let hash = self.hash(key);
        let key = KeyBytes::new(key);
        self.heap_bytes += key.heap_bytes() + replicas.heap_bytes();
        let entry = Entry {
            key,
            generation,
            len,
            time: now,
            replicas,
            before: NIL,
            after: NIL,
            checksum: 0,
            state: State::Processing,
            renewed: false,
        };
        let index = if self.vacant == NIL {
            self.entries.push(entry)
        } else {
            let index = self.vacant;
            self.vacant = self.entries[index].after;
            self.entries[index] = entry;
            index
        };
        self.table.insert_unique(spread(hash), Slot { index, hash }, |slot| spread(slot.hash));
        self.push_back(index);
        index
    }

    /// Takes an object out; gives what it held.
    pub(crate) fn remove(&mut self, index: u32) -> (State, Instant, Placements) {
        self.unlink(index);
        let hash = self.hash(self.entries[index].key.as_slice());
        if let Ok(slot) = self.table.find_entry(spread(hash), |slot| slot.index == index) {
            slot.remove();
        }
        let entry = &mut self.entries[index];
        if entry.is_complete() {
            self.complete_bytes -= entry.len;
        }
        self.heap_bytes -= entry.key.heap_bytes() + entry.replicas.heap_bytes();
        let state = core::mem::replace(&mut entry.state, State::Vacant);
        entry.key = KeyBytes::EMPTY;
        let replicas = core::mem::replace(&mut entry.replicas, Placements::NONE);
        entry.after = core::mem::replace(&mut self.vacant, index);
        (state, entry.time, replicas)
    }

    /// What was written is complete.
    pub(crate) fn complete(&mut self, index: u32, checksum: u32) {
        self.unlink(index);
        let entry = &mut self.entries[index];
        entry.checksum = checksum;
        entry.state = State::Idle;
        self.complete_bytes += entry.len;
        self.push_back(index);
    }

    /// Leases a complete object until `until`, or longer if it is leased longer.
    pub(crate) fn lease(&mut self, index: u32, until: Instant) {
        let entry = &mut self.entries[index];
        if entry.state == State::Leased {
            entry.time = entry.time.max(until);
            entry.renewed = true;
            return;
        }
        self.unlink(index);
        let entry = &mut self.entries[index];
        (entry.time, entry.renewed, entry.state) = (until, false, State::Leased);
        self.push_back(index);
    }

    /// Forgets the replica on a segment; gives whether any is left.
    pub(crate) fn drop_segment(&mut self, index: u32, segment: u32) -> bool {
        let replicas = &mut self.entries[index].replicas;
        self.heap_bytes -= replicas.heap_bytes();
        let left = replicas.drop_segment(segment);
        self.heap_bytes += replicas.heap_bytes();
        left
    }

    /// Moves objects whose lease is over to the idle list.
    pub(crate) fn settle(&mut self, now: Instant) {
        while let Some(index) = self.front(State::Leased) {
            let entry = &mut self.entries[index];
            let over = entry.time <= now;
            if !over && !entry.renewed {
                return;
            }
            entry.renewed = false;
            self.unlink(index);
            self.entries[index].state = if over { State::Idle } else { State::Leased };
            self.push_back(index);
        }
    }

    /// The oldest of a list.
    pub(crate) fn front(&self, state: State) -> Option<u32> {
        let head = self.lists[state as usize].head;
        (head != NIL).then_some(head)
    }

    /// How many are on a list.
    pub(crate) fn count(&self, state: State) -> u32 {
        self.lists[state as usize].len
    }

    /// All objects, those being written included.
    pub(crate) fn len(&self) -> u32 {
        self.lists.iter().map(|list| list.len).sum()
    }

    pub(crate) fn complete_bytes(&self) -> u64 {
        self.complete_bytes
    }

    /// Slots, vacant ones included; for walking.
    pub(crate) fn slots(&self) -> u32 {
        self.entries.len()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.entries.memory_bytes() + self.table.allocation_size() + self.heap_bytes
    }

    fn hash(&self, key: &[u8]) -> u32 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key);
        (hasher.finish() >> 32) as u32
    }

    fn push_back(&mut self, index: u32) {
        let list = &mut self.lists[self.entries[index].state as usize];
        let tail = core::mem::replace(&mut list.tail, index);
        list.len += 1;
        if tail == NIL {
            list.head = index;
        } else {
            self.entries[tail].after = index;
        }
        let entry = &mut self.entries[index];
        (entry.before, entry.after) = (tail, NIL);
    }

    fn unlink(&mut self, index: u32) {
        let Entry { before, after, state, .. } = self.entries[index];
        let list = &mut self.lists[state as usize];
        list.len -= 1;
        if before == NIL {
            list.head = after;
        }
        if after == NIL {
            list.tail = before;
        }
        if before != NIL {
            self.entries[before].after = after;
        }
        if after != NIL {
            self.entries[after].before = before;
        }
    }
}

/// 64 bits for the table out of the 32 that slots keep: it takes the bucket from the low end and the tag from the high.
const fn spread(hash: u32) -> u64 {
    (hash as u64) << 32 | hash as u64
}
