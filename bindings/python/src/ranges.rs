//! [`Ranges`]: which bytes of one piece of memory are free.
//!
//! The place for a get is chosen before the length of the object is known, and most of it is given back
//! afterwards. So this allocator can shorten a range in place, which those of `store_core` cannot.

use std::collections::{BTreeMap, BTreeSet};

/// Ranges begin at multiples of this, bytes: a cache line, and the alignment that DLPack asks for.
pub(crate) const ALIGN: u64 = 64;

/// The free ranges of `0..len`. The shortest range that fits is used, and neighbours are joined.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Length of each free range, by its offset.
    free: BTreeMap<u64, u64>,
    /// The same ranges by length.
    by_len: BTreeSet<(u64, u64)>,
    free_bytes: u64,
}

impl Ranges {
    /// All of `0..len` is free; `len` is rounded down to a multiple of [`ALIGN`].
    pub(crate) fn new(len: u64) -> Self {
        let mut this = Self { free: BTreeMap::new(), by_len: BTreeSet::new(), free_bytes: 0 };
        this.insert(0, len / ALIGN * ALIGN);
        this
    }

    /// Bytes that are free.
    pub(crate) const fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Takes a range for `len` bytes and returns its offset; `None`: no free range is as long, or `len` is 0.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        let len = rounded(len)?;
        let &(found, offset) = self.by_len.range((len, 0)..).next()?;
        self.remove(offset, found);
        self.insert(offset + len, found - len);
        Some(offset)
    }

    /// Shortens a taken range of `from` bytes to its first `to` bytes. A range never becomes longer.
    pub(crate) fn shorten(&mut self, offset: u64, from: u64, to: u64) {
        if let (Some(from), Some(to)) = (rounded(from), rounded(to.max(1)))
            && to < from
        {
            self.join(offset + to, from - to);
        }
    }

    /// Gives a taken range of `len` bytes back.
    pub(crate) fn give(&mut self, offset: u64, len: u64) {
        if let Some(len) = rounded(len) {
            self.join(offset, len);
        }
    }

    fn join(&mut self, mut offset: u64, mut len: u64) {
        if let Some((&before, &before_len)) = self.free.range(..offset).next_back()
            && before + before_len == offset
        {
            self.remove(before, before_len);
            (offset, len) = (before, before_len + len);
        }
        if let Some(&after_len) = self.free.get(&(offset + len)) {
            self.remove(offset + len, after_len);
            len += after_len;
        }
        self.insert(offset, len);
    }

    fn insert(&mut self, offset: u64, len: u64) {
        if len > 0 {
            self.free.insert(offset, len);
            self.by_len.insert((len, offset));
            self.free_bytes += len;
        }
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.free.remove(&offset);
        self.by_len.remove(&(len, offset));
        self.free_bytes -= len;
    }
}

/// The bytes that a range of `len` takes; `None` for 0 and for lengths near the largest number.
pub(crate) fn rounded(len: u64) -> Option<u64> {
    if len == 0 { None } else { len.checked_next_multiple_of(ALIGN) }
}
