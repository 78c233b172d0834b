//! Growing arrays that never move or double: chunks of fixed length, indexed by `u32`.
//!
//! A `Vec` of a million entries wastes up to half its memory and copies all of it when it grows; this wastes at most one
//! chunk and copies nothing. What a free slot looks like is the user's business.

use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

const CHUNK_BITS: u32 = 10;
const CHUNK_LEN: usize = 1 << CHUNK_BITS;

/// No slot.
pub(crate) const NIL: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Chunks<T> {
    chunks: Vec<Vec<T>>,
    len: u32,
}

impl<T> Chunks<T> {
    pub(crate) const fn new() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }

    /// Slots in use or free.
    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// Appends a slot and gives its index.
    pub(crate) fn push(&mut self, value: T) -> u32 {
        let index = self.len;
        if (index as usize).is_multiple_of(CHUNK_LEN) {
            self.chunks.push(Vec::with_capacity(CHUNK_LEN));
        }
        if let Some(chunk) = self.chunks.last_mut() {
            chunk.push(value);
        }
        self.len += 1;
        index
    }

    /// Memory that the chunks take, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.len() * CHUNK_LEN * size_of::<T>() + self.chunks.capacity() * size_of::<Vec<T>>()
    }
}

impl<T> Index<u32> for Chunks<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        &self.chunks[(index >> CHUNK_BITS) as usize][index as usize % CHUNK_LEN]
    }
}

impl<T> IndexMut<u32> for Chunks<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.chunks[(index >> CHUNK_BITS) as usize][index as usize % CHUNK_LEN]
    }
}
