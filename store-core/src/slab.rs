//! Arrays of slots that never move, indexed by `u32`. They grow by pages of fixed length and free pages that
//! are empty.
//!
//! A `Vec` of a million entries wastes up to half of its memory, copies all of it when it grows, and never
//! shrinks. Here nothing is copied, and at most two pages are empty. The lowest free slot is taken first, so
//! that entries gather at the beginning and pages at the end become empty. Taking and freeing a slot look at
//! a few words, whatever the number of slots: nothing is ever done for many slots at once.
//!
//! ```text
//!   Slots    which slots are taken: bits       ▏1111▏1011▏    ▏0010▏     pages; the third is not allocated
//!   Values   what the slots contain            ▏████▏█ ██▏    ▏  █ ▏
//!   Slab     both
//! ```

use alloc::boxed::Box;
use alloc::collections::{BTreeSet, BinaryHeap, VecDeque};
use alloc::vec::Vec;
use core::hash::{BuildHasher, Hash};
use core::ops::{Index, IndexMut};

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::snapshot::Packed;

const PAGE_BITS: u32 = 10;
pub(crate) const PAGE_LEN: usize = 1 << PAGE_BITS;
const WORDS: usize = PAGE_LEN / 64;
/// An empty page stays allocated as long as there are fewer free slots than this, so that a few objects that
/// come and go do not allocate and free pages.
const SPARE_SLOTS: u32 = 2 * PAGE_LEN as u32;

/// Index of no slot.
pub(crate) const NIL: u32 = u32::MAX;

/// Which slots are taken.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Slots {
    pages: Vec<Option<Box<Page>>>,
    /// One bit per page: it has a free slot.
    open: Vec<u64>,
    /// No word before this one has a bit set.
    first_open: usize,
    /// Pages that were freed, except for those at the end.
    absent: BTreeSet<u32>,
    /// Number of free slots in allocated pages.
    free: u32,
    taken: u32,
}

/// Which slots of a page are free.
#[derive(Debug, Serialize, Deserialize)]
struct Page {
    words: [u64; WORDS],
    /// One bit per word: it has a bit set.
    open: u16,
    taken: u16,
}

impl Slots {
    pub(crate) const fn new() -> Self {
        Self {
            pages: Vec::new(),
            open: Vec::new(),
            first_open: 0,
            absent: BTreeSet::new(),
            free: 0,
            taken: 0,
        }
    }

    /// Number of taken slots.
    pub(crate) const fn taken(&self) -> u32 {
        self.taken
    }

    /// One more than the highest slot that may be taken.
    pub(crate) const fn end(&self) -> u32 {
        (self.pages.len() << PAGE_BITS) as u32
    }

    /// Takes the lowest free slot.
    pub(crate) fn take(&mut self) -> u32 {
        if self.free == 0 {
            self.add_page();
        }
        while self.open[self.first_open] == 0 {
            self.first_open += 1;
        }
        let page = self.first_open * 64 + self.open[self.first_open].trailing_zeros() as usize;
        let Some(slots) = &mut self.pages[page] else { unreachable!("an open page is allocated") };
        let word = slots.open.trailing_zeros() as usize;
        let bit = slots.words[word].trailing_zeros();
        slots.words[word] &= slots.words[word] - 1;
        slots.taken += 1;
        if slots.words[word] == 0 {
            slots.open &= !(1 << word);
            if slots.open == 0 {
                self.open[page / 64] &= !(1 << (page % 64));
            }
        }
        self.free -= 1;
        self.taken += 1;
        ((page << PAGE_BITS) + word * 64) as u32 + bit
    }

    /// Frees a slot. Returns the page that was freed with it, if one was.
    #[must_use]
    pub(crate) fn give_back(&mut self, index: u32) -> Option<usize> {
        let (page, at) = place(index);
        let slots = self.pages[page].as_mut()?;
        debug_assert!(slots.words[at / 64] & 1 << (at % 64) == 0, "a slot was freed twice");
        slots.words[at / 64] |= 1 << (at % 64);
        slots.open |= 1 << (at / 64);
        slots.taken -= 1;
        let empty = slots.taken == 0;
        self.open[page / 64] |= 1 << (page % 64);
        self.first_open = self.first_open.min(page / 64);
        self.free += 1;
        self.taken -= 1;
        if !empty || self.free < SPARE_SLOTS {
            return None;
        }
        self.pages[page] = None;
        self.open[page / 64] &= !(1 << (page % 64));
        self.free -= PAGE_LEN as u32;
        self.absent.insert(page as u32);
        while self.pages.last().is_some_and(Option::is_none) {
            self.pages.pop();
            self.absent.remove(&(self.pages.len() as u32));
        }
        trim_vec(&mut self.pages);
        Some(page)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        (self.pages.len() - self.absent.len()) * size_of::<Page>()
            + self.pages.capacity() * size_of::<Option<Box<Page>>>()
            + self.open.capacity() * size_of::<u64>()
            // A tree's nodes are at least half full.
            + self.absent.len() * 2 * size_of::<u32>()
    }

    fn add_page(&mut self) {
        let page = match self.absent.pop_first() {
            Some(page) => page as usize,
            None => {
                self.pages.push(None);
                self.pages.len() - 1
            }
        };
        if self.open.len() <= page / 64 {
            self.open.push(0);
        }
        self.pages[page] = Some(Box::new(Page { words: [u64::MAX; WORDS], open: u16::MAX, taken: 0 }));
        self.open[page / 64] |= 1 << (page % 64);
        self.first_open = self.first_open.min(page / 64);
        self.free += PAGE_LEN as u32;
    }
}

/// The contents of slots.
#[derive(Debug)]
pub(crate) struct Values<T> {
    pages: Vec<Vec<T>>,
    there: usize,
    /// What free slots and freed pages read as.
    vacant: T,
}

impl<T> Values<T> {
    /// `vacant` is what free slots read as.
    pub(crate) const fn new(vacant: T) -> Self {
        Self { pages: Vec::new(), there: 0, vacant }
    }

    /// All pages; one that is not allocated is empty.
    pub(crate) fn pages(&self) -> &[Vec<T>] {
        &self.pages
    }

    /// What [`Self::pages`] returned.
    pub(crate) fn of_pages(vacant: T, pages: Vec<Vec<T>>) -> Self {
        let there = pages.iter().filter(|page| page.capacity() > 0).count();
        Self { pages, there, vacant }
    }

    /// Fills a slot that [`Slots::take`] returned.
    pub(crate) fn put(&mut self, index: u32, value: T) {
        let (page, at) = place(index);
        if self.pages.len() <= page {
            self.pages.resize_with(page + 1, Vec::new);
        }
        let page = &mut self.pages[page];
        if let Some(slot) = page.get_mut(at) {
            *slot = value;
            return;
        }
        // The lowest slot is taken first, so that pages are filled without gaps.
        if page.capacity() == 0 {
            page.reserve_exact(PAGE_LEN);
            self.there += 1;
        }
        page.push(value);
    }

    /// Frees a page, as [`Slots::give_back`] returned it.
    pub(crate) fn close(&mut self, page: usize) {
        self.pages[page] = Vec::new();
        self.there -= 1;
        while self.pages.last().is_some_and(|page| page.capacity() == 0) {
            self.pages.pop();
        }
        trim_vec(&mut self.pages);
    }

    /// Memory of the pages, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.there * PAGE_LEN * size_of::<T>() + self.pages.capacity() * size_of::<Vec<T>>()
    }
}

impl<T> Index<u32> for Values<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        let (page, at) = place(index);
        self.pages.get(page).and_then(|page| page.get(at)).unwrap_or(&self.vacant)
    }
}

impl<T> IndexMut<u32> for Values<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        let (page, at) = place(index);
        &mut self.pages[page][at]
    }
}

/// Slots and their contents.
#[derive(Debug, Serialize, Deserialize)]
#[serde(bound = "T: Packed")]
pub(crate) struct Slab<T> {
    slots: Slots,
    values: Values<T>,
}

impl<T: Copy> Slab<T> {
    /// `vacant` is what free slots read as.
    pub(crate) const fn new(vacant: T) -> Self {
        Self { slots: Slots::new(), values: Values::new(vacant) }
    }

    pub(crate) fn insert(&mut self, value: T) -> u32 {
        let index = self.slots.take();
        self.values.put(index, value);
        index
    }

    pub(crate) fn remove(&mut self, index: u32) {
        self.values[index] = self.values.vacant;
        if let Some(page) = self.slots.give_back(index) {
            self.values.close(page);
        }
    }

    /// One more than the highest slot that may be taken.
    pub(crate) const fn end(&self) -> u32 {
        self.slots.end()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.slots.memory_bytes() + self.values.memory_bytes()
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        &self.values[index]
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.values[index]
    }
}

const fn place(index: u32) -> (usize, usize) {
    ((index >> PAGE_BITS) as usize, index as usize % PAGE_LEN)
}

/// Shrinking moves at most this many elements, so that no call takes long.
const TRIMMED_MAX: usize = 512;

/// Shrinks a map that had many more elements than it has.
pub(crate) fn trim_map<K: Eq + Hash, V, S: BuildHasher>(map: &mut HashMap<K, V, S>) {
    if map.len() <= TRIMMED_MAX && map.capacity() > 8 * TRIMMED_MAX {
        map.shrink_to(2 * TRIMMED_MAX);
    }
}

/// As [`trim_map`], for a heap.
pub(crate) fn trim_heap<T: Ord>(heap: &mut BinaryHeap<T>) {
    if heap.len() <= TRIMMED_MAX && heap.capacity() > 8 * TRIMMED_MAX {
        heap.shrink_to(2 * TRIMMED_MAX);
    }
}

/// As [`trim_map`], for a queue.
pub(crate) fn trim_queue<T>(queue: &mut VecDeque<T>) {
    if queue.len() <= TRIMMED_MAX && queue.capacity() > 8 * TRIMMED_MAX {
        queue.shrink_to(2 * TRIMMED_MAX);
    }
}

/// As [`trim_map`], for a list of pages.
fn trim_vec<T>(list: &mut Vec<T>) {
    if list.capacity() > 64 && list.len() < list.capacity() / 4 {
        list.shrink_to(2 * list.len());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_freed_one_by_one_in_any_order_gives_its_pages_back() {
        const MANY: u32 = 100_000;
        for stride in [1, 7_919, MANY - 1] {
            let mut slab = Slab::new(0u64);
            (0..MANY).for_each(|value| assert_eq!(slab.insert(value.into()), value));
            let full = slab.memory_bytes();
            for turn in 0..MANY {
                slab.remove((u64::from(turn) * u64::from(stride) % u64::from(MANY)) as u32);
            }
            let left = slab.memory_bytes();
            assert!(left <= 3 * PAGE_LEN * size_of::<u64>(), "{left} bytes of {full}, stride {stride}");
        }
    }

    #[test]
    fn one_that_comes_and_goes_makes_no_page_come_and_go() {
        let mut slab = Slab::new(0u8);
        for _ in 0..PAGE_LEN {
            slab.insert(1);
        }
        for _ in 0..100 {
            let index = slab.insert(2);
            let before = slab.memory_bytes();
            slab.remove(index);
            assert_eq!(slab.memory_bytes(), before);
        }
    }

    proptest! {
        #[test]
        fn a_slab_is_a_map_that_takes_the_lowest_free_slot_of_a_page_that_is_there(
            steps in prop::collection::vec((0u8..8, any::<u32>(), 1u32..3_000), 1..40),
        ) {
            let (mut slab, mut model) = (Slab::new(u32::MAX), alloc::collections::BTreeMap::new());
            let mut next = 0;
            for (what, pick, count) in steps {
                for turn in 0..count {
                    if what < 4 {
                        let index = slab.insert(next);
                        prop_assert_eq!(model.insert(index, next), None, "taken twice");
                        next += 1;
                    } else {
                        // Either single slots, or all slots from one on.
                        let from = if what < 6 { pick.wrapping_mul(turn.wrapping_add(7_919)) % slab.end().max(1) } else { pick % slab.end().max(1) };
                        let Some(index) = model.range(from..).next().map(|(index, _)| *index) else { break };
                        model.remove(&index);
                        slab.remove(index);
                        prop_assert_eq!(slab[index], u32::MAX);
                    }
                }
                for (index, value) in &model {
                    prop_assert_eq!(slab[*index], *value);
                }
                prop_assert_eq!(slab.slots.taken() as usize, model.len());
                prop_assert!(model.last_key_value().is_none_or(|(last, _)| *last < slab.end()));
                let pages: BTreeSet<u32> = model.keys().map(|index| index >> PAGE_BITS).collect();
                let there = slab.slots.pages.iter().flatten().count();
                prop_assert!(there <= pages.len() + 2, "{} pages for {} in use", there, pages.len());
                prop_assert_eq!(there, slab.values.there);
            }
        }
    }
}
