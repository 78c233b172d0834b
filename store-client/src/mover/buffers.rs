//! The memory that the items of an operation name.

use te_core::{Access, MemSpan};

use crate::item::{Get, Put, Source};
use crate::memory::BufferRange;

/// The items of an operation, as the caller passed them.
pub(crate) enum Buffers<'i, 'a> {
    Put(&'i [Put<'a>]),
    Get(&'i mut [Get<'a>]),
    /// Ranges of open puts.
    Write(&'i [RangeWrite<'a>]),
    /// The trailers of open puts that end; empty for objects without one.
    Close(&'i [[&'a [u8]; 1]]),
}

/// A range of an open put that is written.
pub(crate) struct RangeWrite<'a> {
    /// Offset in the object, bytes.
    pub(crate) offset: u64,
    pub(crate) source: Source<'a>,
}

impl<'a> Buffers<'_, 'a> {
    /// The ranges of an item, if a whole object moves directly from or into registered memory.
    pub(crate) fn ranges(&self, item: usize) -> Option<&[BufferRange]> {
        match self {
            Self::Put(items) => items[item].source.ranges(),
            Self::Write(items) => items[item].source.ranges(),
            Self::Get(items) => items[item].sink.ranges().filter(|_| items[item].part.is_none()),
            Self::Close(_) => None,
        }
    }

    /// Whether exactly the bytes of a transfer are written, and the offset of an item's first byte in its
    /// object then. `None`: the trailer is written behind them.
    pub(super) fn range_offset(&self, item: usize) -> Option<u64> {
        match self {
            Self::Write(items) => items.get(item).map(|write| write.offset),
            Self::Close(_) => Some(0),
            Self::Put(_) | Self::Get(_) => None,
        }
    }

    /// Calls `copy` for the plain memory of an item that holds bytes `at..at + len` of the `total` bytes of
    /// the get. See [`Sink::fill`](crate::item::Sink::fill).
    pub(super) fn fill(
        &mut self,
        item: usize,
        total: u64,
        at: u64,
        len: u64,
        copy: impl FnMut(u64, &mut [u8]),
    ) {
        if let Self::Get(items) = self {
            items[item].sink.fill(total, at, len, copy);
        }
    }

    /// The plain memory of an item, if a whole object is in one piece, and the access that a transfer needs.
    pub(crate) fn lendable(&mut self, item: usize) -> Option<(MemSpan, Access)> {
        match self {
            Self::Put(items) => items[item].source.lendable(),
            Self::Write(items) => items[item].source.lendable(),
            Self::Get(items) if items[item].part.is_none() => items[item].sink.lendable(),
            Self::Get(_) | Self::Close(_) => None,
        }
    }

    /// The plain memory of an item of a put.
    pub(crate) fn slices(&self, item: usize) -> Option<&[&[u8]]> {
        match self {
            Self::Put(items) => items[item].source.slices(),
            Self::Write(items) => items[item].source.slices(),
            Self::Close(items) => Some(&items[item]),
            Self::Get(_) => None,
        }
    }

    /// The item, if the operation is a get.
    pub(super) fn get(&self, item: usize) -> Option<&Get<'a>> {
        match self {
            Self::Get(items) => items.get(item),
            Self::Put(_) | Self::Write(_) | Self::Close(_) => None,
        }
    }
}

/// Finds the part that contains an offset, among parts that are joined in order. It remembers its position,
/// because offsets usually increase.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    index: usize,
    start: u64,
}

impl Cursor {
    /// The index of the part that contains byte `at`, and the offset in that part. `None`: beyond the end.
    pub(super) fn seek<T>(&mut self, parts: &[T], at: u64, len: impl Fn(&T) -> u64) -> Option<(usize, u64)> {
        if at < self.start {
            *self = Self::default();
        }
        loop {
            let part = len(parts.get(self.index)?);
            if at - self.start < part {
                return Some((self.index, at - self.start));
            }
            self.start += part;
            self.index += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_finds_every_byte_and_passes_empty_parts() {
        let parts = [0_u64, 3, 0, 0, 1, 2, 0];
        let whole: Vec<(usize, u64)> =
            (0..parts.len()).flat_map(|part| (0..parts[part]).map(move |at| (part, at))).collect();
        let mut cursor = Cursor::default();
        for at in [0, 1, 2, 3, 4, 5, 3, 0, 5, 1] {
            assert_eq!(cursor.seek(&parts, at, |len| *len), Some(whole[at as usize]), "{at}");
        }
        assert_eq!(cursor.seek(&parts, 6, |len| *len), None);
        assert_eq!(cursor.seek(&parts, 2, |len| *len), Some((1, 2)), "the cursor goes back from the end");
    }
}
