//! An open-addressed table whose slots are in the order of their hashes.
//!
//! A hash's home is its share of the segment (`hash * homes >> bits`), which keeps the order of hashes, and
//! slots of one cluster are kept sorted. So growth is one sequential copy, a cursor that is a hash survives
//! every insertion and removal, and a range of hashes is a range of slots. The table is divided into segments
//! by the hash's highest byte that grow one by one: growth copies a 256th of the table at a time, and the
//! memory of two generations never exists at once.

use alloc::vec::Vec;

use super::BUCKETS;

/// What a table keeps: a copyable value with a hash.
pub(crate) trait Slot: Copy {
    /// A slot that holds nothing. Its hash is `u64::MAX`.
    const VACANT: Self;

    /// The hash.
    fn hash(&self) -> u64;

    /// Whether it holds nothing.
    fn vacant(&self) -> bool;
}

/// The multiplier and its inverse modulo 2^64.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const INVERSE: u64 = {
    // Newton: every step doubles the bits that are right, from three.
    let mut inverse = MULTIPLIER;
    let mut step = 0;
    while step < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(MULTIPLIER.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
};

/// Spreads a key over all bits; one to one, so that the table keeps no key beside it.
#[inline]
pub(crate) const fn spread(key: u64) -> u64 {
    let mut hash = key ^ (key >> 32);
    hash = hash.wrapping_mul(MULTIPLIER);
    hash ^= hash >> 29;
    hash = hash.wrapping_mul(MULTIPLIER);
    hash ^ (hash >> 32)
}

/// The key of a hash.
#[inline]
pub(crate) const fn unspread(hash: u64) -> u64 {
    let mut key = hash ^ (hash >> 32);
    key = key.wrapping_mul(INVERSE);
    key = key ^ (key >> 29) ^ (key >> 58);
    key = key.wrapping_mul(INVERSE);
    key ^ (key >> 32)
}

/// The segment of a hash.
#[inline]
pub(crate) const fn segment_of(hash: u64) -> usize {
    (hash >> 56) as usize
}

/// A slot's position; valid until the next insertion or removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    segment: usize,
    index: usize,
}

/// Asks for the cache line at which a value begins.
#[inline]
#[allow(unsafe_code, reason = "the instruction takes an address")]
fn prefetch<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has the instruction; it has no effect but on caches, and does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(value).cast()) };
    }
    // Elsewhere a plain read does it, with less room for others under way.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    core::hint::black_box(value);
}

/// Slots between a hash's home and its place. Beyond it insertion is refused, so that keys made to collide
/// cost a bounded time.
const DISPLACEMENT_MAX: usize = 4096;
const HOMES_MIN: usize = 16;
/// The mean distance from a home to the end of a search, in slots.
const TOUCHED_AHEAD: usize = 4;

#[derive(Debug)]
struct Segment<S> {
    slots: Vec<S>,
    homes: usize,
    used: usize,
}

impl<S: Slot> Segment<S> {
    const fn new() -> Self {
        Self { slots: Vec::new(), homes: 0, used: 0 }
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        // The highest byte chose the segment; the next 24 bits are a fraction of it. So hashes with the same
        // upper half have the same home.
        let fraction = (hash << 8) >> 40;
        ((fraction * self.homes as u64) >> 24) as usize
    }

    /// The first slot from the hash's home whose hash is not smaller, or that is vacant.
    #[inline]
    fn lower_bound(&self, hash: u64) -> usize {
        let mut index = self.home(hash);
        while self.slots[index].hash() < hash {
            index += 1;
        }
        index
    }

    /// Copies into as many homes as are asked for; sequential reads and writes, and no branch that depends on
    /// what is read.
    fn rebuild(&mut self, homes: usize) {
        let mut slots = Vec::new();
        let slots_len = homes + 16 + homes / 64;
        slots.reserve_exact(slots_len);
        slots.resize(slots_len, S::VACANT);
        let old = core::mem::replace(self, Self { slots, homes, used: self.used });
        let mut next = 0;
        for slot in &old.slots {
            let place = if slot.vacant() { next } else { next.max(self.home(slot.hash())) };
            // The last slot stays vacant: it ends every search.
            if place + 1 >= self.slots.len() {
                self.slots.push(S::VACANT);
            }
            self.slots[place] = *slot;
            next = place + usize::from(!slot.vacant());
        }
    }

    /// Adds a slot at its lower bound.
    fn insert(&mut self, slot: S, lower_bound: Option<usize>) -> Option<usize> {
        let mut known = lower_bound;
        // A load of 27/32: beyond it clusters become long.
        if (self.used + 1) * 32 > self.homes * 27 {
            self.rebuild((self.homes + self.homes / 4).max(HOMES_MIN));
            known = None;
        }
        loop {
            let index = known.take().unwrap_or_else(|| self.lower_bound(slot.hash()));
            let mut vacancy = index;
            while !self.slots[vacancy].vacant() {
                vacancy += 1;
            }
            if vacancy - self.home(slot.hash()) > DISPLACEMENT_MAX {
                return None;
            }
            if vacancy + 1 < self.slots.len() {
                self.slots.copy_within(index..vacancy, index + 1);
                self.slots[index] = slot;
                self.used += 1;
                return Some(index);
            }
            // More homes would not move slots that all want the last ones.
            let longer = self.slots.len() + HOMES_MIN + self.homes / 64;
            self.slots.reserve_exact(longer - self.slots.len());
            self.slots.resize(longer, S::VACANT);
        }
    }

    fn remove(&mut self, index: usize) {
        let mut end = index + 1;
        while !self.slots[end].vacant() && self.home(self.slots[end].hash()) < end {
            end += 1;
        }
        self.slots.copy_within(index + 1..end, index);
        self.slots[end - 1] = S::VACANT;
        self.used -= 1;
        if self.used == 0 {
            *self = Self::new();
        } else if self.homes > 4 * HOMES_MIN && self.used * 3 < self.homes {
            self.rebuild(self.used + self.used / 2);
        }
    }
}

/// The table.
#[derive(Debug)]
pub(crate) struct Table<S> {
    segments: Vec<Segment<S>>,
    len: usize,
}

impl<S: Slot> Table<S> {
    pub(crate) fn new() -> Self {
        Self { segments: (0..BUCKETS).map(|_| Segment::new()).collect(), len: 0 }
    }

    /// Slots in use.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Slots in use in one segment.
    pub(crate) fn segment_len(&self, segment: usize) -> usize {
        self.segments[segment].used
    }

    pub(crate) fn bytes(&self) -> usize {
        let slots: usize = self.segments.iter().map(|segment| segment.slots.capacity()).sum();
        slots * size_of::<S>() + self.segments.capacity() * size_of::<Segment<S>>()
    }

    /// The first slot with this hash.
    #[inline]
    pub(crate) fn find(&self, hash: u64) -> Option<At> {
        self.find_or_place(hash).ok()
    }

    /// The first slot with this hash, or where it would be.
    #[inline]
    pub(crate) fn find_or_place(&self, hash: u64) -> Result<At, Option<At>> {
        let segment = segment_of(hash);
        let of = &self.segments[segment];
        if of.homes == 0 {
            return Err(None);
        }
        let index = of.lower_bound(hash);
        let slot = &of.slots[index];
        let at = At { segment, index };
        if slot.hash() == hash && !slot.vacant() { Ok(at) } else { Err(Some(at)) }
    }

    /// Lets the processor fetch the homes of hashes that are about to be looked up: these reads do not wait
    /// for each other, while those of look-ups do.
    #[inline]
    pub(crate) fn touch(&self, hashes: &[u64]) {
        for hash in hashes {
            let of = &self.segments[segment_of(*hash)];
            let home = of.home(*hash);
            for index in [home, home + TOUCHED_AHEAD] {
                of.slots.get(index).into_iter().for_each(prefetch);
            }
        }
    }

    /// The slot with this hash, which was at `hint` a while ago.
    #[inline]
    pub(crate) fn find_near(&self, hint: At, hash: u64) -> Option<At> {
        match self.segments[hint.segment].slots.get(hint.index) {
            Some(slot) if slot.hash() == hash && !slot.vacant() => Some(hint),
            _ => self.find(hash),
        }
    }

    /// The first slot whose hash is not smaller, when the cluster of the hash's home has one.
    pub(crate) fn first_in_cluster(&self, hash: u64) -> Option<At> {
        let segment = segment_of(hash);
        let of = &self.segments[segment];
        if of.homes == 0 {
            return None;
        }
        let index = of.lower_bound(hash);
        (!of.slots[index].vacant()).then_some(At { segment, index })
    }

    /// The slot after `at`, when it follows within the same cluster.
    pub(crate) fn next_in_cluster(&self, at: At) -> Option<At> {
        let index = at.index + 1;
        self.segments[at.segment].slots.get(index).filter(|slot| !slot.vacant())?;
        Some(At { index, ..at })
    }

    /// The first slot whose hash is not smaller, over all segments.
    pub(crate) fn at_or_after(&self, hash: u64) -> Option<At> {
        let first = segment_of(hash);
        for segment in first..BUCKETS {
            let of = &self.segments[segment];
            if of.used == 0 {
                continue;
            }
            let start = if segment == first { of.home(hash) } else { 0 };
            let found = of.slots[start..].iter().position(|slot| !slot.vacant() && slot.hash() >= hash);
            if let Some(index) = found {
                return Some(At { segment, index: start + index });
            }
        }
        None
    }

    #[inline]
    pub(crate) fn get(&self, at: At) -> S {
        self.segments[at.segment].slots[at.index]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, at: At) -> &mut S {
        &mut self.segments[at.segment].slots[at.index]
    }

    /// Adds a slot, before those with the same hash. Refused when too many slots want the same place.
    pub(crate) fn insert(&mut self, slot: S) -> Option<At> {
        self.insert_at(None, slot)
    }

    /// Adds a slot at the place that [`Table::find_or_place`] named; nothing was added or removed since.
    pub(crate) fn insert_at(&mut self, place: Option<At>, slot: S) -> Option<At> {
        let segment = segment_of(slot.hash());
        let index = self.segments[segment].insert(slot, place.map(|at| at.index))?;
        self.len += 1;
        Some(At { segment, index })
    }

    pub(crate) fn remove(&mut self, at: At) {
        self.segments[at.segment].remove(at.index);
        self.len -= 1;
    }

    /// The slots of a segment in the order of their hashes.
    pub(crate) fn segment(&self, segment: usize) -> impl Iterator<Item = &S> + '_ {
        self.segments[segment].slots.iter().filter(|slot| !slot.vacant())
    }

    /// The slots of a segment, to change anything but their hashes.
    pub(crate) fn segment_mut(&mut self, segment: usize) -> impl Iterator<Item = &mut S> + '_ {
        self.segments[segment].slots.iter_mut().filter(|slot| !slot.vacant())
    }

    /// Fills an empty segment with slots in the order of their hashes. False, and the segment is empty, when
    /// they are not of this segment or not in order, or when too many want the same place.
    pub(crate) fn fill(&mut self, segment: usize, slots: &[S]) -> bool {
        let ordered = slots.windows(2).all(|pair| pair[0].hash() <= pair[1].hash());
        if !ordered || slots.iter().any(|slot| segment_of(slot.hash()) != segment || slot.vacant()) {
            return false;
        }
        if slots.is_empty() {
            return true;
        }
        let mut filled = Segment { slots: slots.to_vec(), homes: 0, used: slots.len() };
        filled.rebuild((slots.len() + slots.len() / 3).max(HOMES_MIN));
        let displaced = |(index, slot): (usize, &S)| {
            !slot.vacant() && index - filled.home(slot.hash()) > DISPLACEMENT_MAX
        };
        if filled.slots.iter().enumerate().any(displaced) {
            return false;
        }
        self.len += slots.len();
        self.segments[segment] = filled;
        true
    }
}
