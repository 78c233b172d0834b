//! Items of gets and puts: a key, the memory that the bytes come from or go to, and the result.

use std::ops::{Bound, RangeBounds};

use te_core::{Access, MemSpan};

use crate::error::StoreError;
use crate::local::LocalRange;
use crate::memory::{BufferRange, Fragment};

/// Most parts of one item: slices or ranges of registered memory that make up an object or receive it, or
/// fragments of an object that are read together.
pub const PARTS_MAX: usize = 1024;

/// Where the bytes of an object to put come from.
///
/// Plain memory (`Bytes`, `Slices`) works with every client. A client moves its own registered memory without
/// a copy, memory of a GPU through page-locked host memory ([`Client::register`](crate::Client::register)), and
/// refuses memory of another client with [`StoreError::ForeignMemory`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Source<'a> {
    /// Plain memory.
    Bytes(&'a [u8]),
    /// Plain memory in several places, joined in order; empty slices are skipped. At most [`PARTS_MAX`].
    Slices(&'a [&'a [u8]]),
    /// A range of memory that is registered with the client.
    Region(BufferRange),
    /// Several ranges of registered memory, joined in order; they may belong to different regions, and empty
    /// ranges are skipped. At most [`PARTS_MAX`].
    Regions(&'a [BufferRange]),
    /// A range of a [`LocalClient`](crate::LocalClient)'s arena.
    Local(LocalRange<'a>),
}

/// Where the bytes of an object to get go.
///
/// After an item that ended as a miss or an error the memory may have been written nevertheless; only a `Vec`
/// is then empty. Sinks of one batch must not overlap: their bytes would mix, and the checksums would turn
/// the items into misses.
#[derive(Debug)]
#[non_exhaustive]
pub enum Sink<'a> {
    /// A vector whose contents are replaced by the bytes that are read, at most `value_bytes_max`. Its
    /// allocation is reused if it is large enough.
    Vec(&'a mut Vec<u8>),
    /// Plain memory, filled from its beginning.
    Bytes(&'a mut [u8]),
    /// Plain memory in several places, filled in order. At most [`PARTS_MAX`].
    Slices(&'a mut [&'a mut [u8]]),
    /// A range of memory that is registered with the client, filled from its beginning.
    Region(BufferRange),
    /// Several ranges of registered memory, filled in order; they may belong to different regions. At most
    /// [`PARTS_MAX`].
    Regions(&'a [BufferRange]),
    /// Several parts of the object, each with its own destination in registered memory: 1 to [`PARTS_MAX`].
    /// The parts may overlap in the object. Either all of them are read or none, and no checksum chunk
    /// is read twice.
    Fragments(&'a [Fragment]),
    /// A range of a [`LocalClient`](crate::LocalClient)'s arena, filled from its beginning.
    Local(LocalRange<'a>),
}

/// An object to put, and whether it was stored.
#[derive(Debug)]
pub struct Put<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) source: Source<'a>,
    pub(crate) result: Result<bool, StoreError>,
}

/// An object, or a part of it, to get; where its bytes go, and whether it was read.
#[derive(Debug)]
pub struct Get<'a> {
    pub(crate) key: &'a [u8],
    /// `None`: the whole object.
    pub(crate) part: Option<Part>,
    pub(crate) sink: Sink<'a>,
    pub(crate) result: Result<Option<u64>, StoreError>,
}

/// Offset of a part, and its length; `None`: to the end. A length of 0 is refused.
pub(crate) type Part = (u64, Option<u64>);

/// How many items of a batch ended in which way; each item has its own result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "items may have failed"]
#[non_exhaustive]
pub struct Tally {
    /// Items that were stored or read.
    pub done: usize,
    /// Items whose key existed (puts), or that were not found intact and in time (gets).
    pub missed: usize,
    /// Items that ended with an error.
    pub failed: usize,
}

impl<'a> Put<'a> {
    /// An item that stores the contents of `source` under `key`. Nothing happens before
    /// [`batch_put`](crate::Store::batch_put).
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized), source: impl Into<Source<'a>>) -> Self {
        Self { key: key.as_ref(), source: source.into(), result: Ok(false) }
    }

    /// Key of the object.
    #[must_use]
    pub const fn key(&self) -> &'a [u8] {
        self.key
    }

    /// Whether the object was stored; `false` when the key existed, and before the put.
    ///
    /// # Errors
    /// Why the object was not stored.
    pub fn result(&self) -> Result<bool, StoreError> {
        self.result.clone()
    }

    /// The result, without a clone.
    ///
    /// # Errors
    /// As [`result`](Self::result).
    pub fn into_result(self) -> Result<bool, StoreError> {
        self.result
    }

    /// The checks that do not depend on the client.
    pub(crate) const fn check(&self) -> Result<(), StoreError> {
        self.source.check()
    }
}

impl<'a> Get<'a> {
    /// An item that reads the whole object `key` into `sink`. Nothing happens before
    /// [`batch_get`](crate::Store::batch_get) or [`get_with`](crate::Store::get_with).
    #[must_use]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized), sink: impl Into<Sink<'a>>) -> Self {
        Self { key: key.as_ref(), part: None, sink: sink.into(), result: Ok(None) }
    }

    /// Restricts the get to this range of the object: `100..200`, or `100..` up to the end.
    ///
    /// Only the checksum chunks of 64 KiB that the range touches and the trailer are read, and the range is
    /// verified as reliably as the whole object ([`store_core::chunks`]). A range that is empty or ends
    /// beyond the object is an error of the item. [`Sink::Fragments`] carries its own ranges and allows no
    /// range here.
    #[must_use]
    pub fn range(mut self, range: impl RangeBounds<u64>) -> Self {
        self.part = part(range);
        self
    }

    /// Key of the object.
    #[must_use]
    pub const fn key(&self) -> &'a [u8] {
        self.key
    }

    /// The number of bytes that were read. `None` is a miss: the key was not found, or not intact and in
    /// time; it is also the value before the get.
    ///
    /// # Errors
    /// Why the object was not read.
    pub fn result(&self) -> Result<Option<u64>, StoreError> {
        self.result.clone()
    }

    /// The result, without a clone.
    ///
    /// # Errors
    /// As [`result`](Self::result).
    pub fn into_result(self) -> Result<Option<u64>, StoreError> {
        self.result
    }

    /// The checks that do not depend on the client.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        if let Some((start, Some(0))) = self.part {
            return Err(StoreError::BadRange { start, len: 0 });
        }
        match &self.sink {
            Sink::Slices(slices) => check_parts(slices.len()),
            Sink::Regions(ranges) => check_parts(ranges.len()),
            Sink::Fragments(parts) => {
                check_parts(parts.len())?;
                if let Some((start, len)) = self.part {
                    return Err(StoreError::BadRange { start, len: len.unwrap_or(0) });
                }
                if parts.is_empty() {
                    return Err(StoreError::BadRange { start: 0, len: 0 });
                }
                let bad = parts.iter().find(|part| part.end().is_none());
                bad.map_or(Ok(()), |part| {
                    Err(StoreError::BadRange { start: part.offset, len: part.into.len })
                })
            }
            Sink::Vec(_) | Sink::Bytes(_) | Sink::Region(_) | Sink::Local(_) => Ok(()),
        }
    }

    /// Length that the object must have at least; `None`: any length will do.
    pub(crate) fn end(&self) -> Option<u64> {
        match (&self.sink, self.part) {
            (Sink::Fragments(parts), _) => parts.iter().filter_map(Fragment::end).max(),
            (_, Some((start, Some(len)))) => Some(start.saturating_add(len)),
            (_, Some((start, None))) => Some(start.saturating_add(1)),
            (_, None) => None,
        }
    }

    /// How many bytes are read from an object of this length.
    pub(crate) fn bytes_of(&self, object_len: u64) -> u64 {
        match (&self.sink, self.part) {
            (Sink::Fragments(parts), _) => parts.iter().map(|part| part.into.len).sum(),
            (_, Some((_, Some(len)))) => len,
            (_, Some((start, None))) => object_len.saturating_sub(start),
            (_, None) => object_len,
        }
    }

    /// Sets the result. A `Vec` of an item that was not read is emptied.
    pub(crate) fn end_with(&mut self, result: Result<Option<u64>, StoreError>) {
        if let (Sink::Vec(bytes), Ok(None) | Err(_)) = (&mut self.sink, &result) {
            bytes.clear();
        }
        self.result = result;
    }
}

impl Tally {
    /// Whether every item was stored or read.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.missed == 0 && self.failed == 0
    }

    pub(crate) const fn put(&mut self, result: &Result<bool, StoreError>) {
        match result {
            Ok(true) => self.done += 1,
            Ok(false) => self.missed += 1,
            Err(_) => self.failed += 1,
        }
    }

    pub(crate) const fn get(&mut self, result: &Result<Option<u64>, StoreError>) {
        match result {
            Ok(Some(_)) => self.done += 1,
            Ok(None) => self.missed += 1,
            Err(_) => self.failed += 1,
        }
    }
}

impl Source<'_> {
    /// The checks that do not depend on the client.
    pub(crate) const fn check(&self) -> Result<(), StoreError> {
        match self {
            Self::Slices(slices) => check_parts(slices.len()),
            Self::Regions(ranges) => check_parts(ranges.len()),
            Self::Bytes(_) | Self::Region(_) | Self::Local(_) => Ok(()),
        }
    }

    /// Total length, bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Slices(slices) => slices.iter().map(|slice| slice.len() as u64).sum(),
            Self::Region(range) => range.len,
            Self::Regions(ranges) => ranges.iter().map(|range| range.len).sum(),
            Self::Local(range) => range.len(),
        }
    }

    /// The ranges of registered memory, if the source is registered memory.
    pub(crate) const fn ranges(&self) -> Option<&[BufferRange]> {
        match self {
            Self::Region(range) => Some(std::slice::from_ref(range)),
            Self::Regions(ranges) => Some(ranges),
            _ => None,
        }
    }

    /// The slices, if the source is plain memory.
    pub(crate) const fn slices(&self) -> Option<&[&[u8]]> {
        match self {
            Self::Bytes(bytes) => Some(std::slice::from_ref(bytes)),
            Self::Slices(slices) => Some(slices),
            _ => None,
        }
    }

    /// The plain memory, if it is in one piece, and the access that a transfer needs.
    pub(crate) const fn lendable(&self) -> Option<(MemSpan, Access)> {
        match self {
            Self::Bytes(bytes) => {
                Some((MemSpan::new(bytes.as_ptr().cast_mut(), bytes.len()), Access::LOCAL_READ))
            }
            _ => None,
        }
    }
}

impl Sink<'_> {
    /// Bytes that fit; `None`: no limit.
    pub(crate) fn room(&self) -> Option<u64> {
        match self {
            Self::Vec(_) => None,
            Self::Bytes(bytes) => Some(bytes.len() as u64),
            Self::Slices(slices) => Some(slices.iter().map(|slice| slice.len() as u64).sum()),
            Self::Region(range) => Some(range.len),
            Self::Regions(ranges) => Some(ranges.iter().map(|range| range.len).fold(0, u64::saturating_add)),
            Self::Fragments(parts) => {
                Some(parts.iter().map(|part| part.into.len).fold(0, u64::saturating_add))
            }
            Self::Local(range) => Some(range.len()),
        }
    }

    /// The ranges of registered memory that are filled in order, if the sink is one of these.
    pub(crate) const fn ranges(&self) -> Option<&[BufferRange]> {
        match self {
            Self::Region(range) => Some(std::slice::from_ref(range)),
            Self::Regions(ranges) => Some(ranges),
            _ => None,
        }
    }

    /// The plain memory, if it is in one piece and allocated already, and the access that a transfer needs.
    pub(crate) const fn lendable(&mut self) -> Option<(MemSpan, Access)> {
        match self {
            Self::Bytes(bytes) => Some((MemSpan::new(bytes.as_mut_ptr(), bytes.len()), Access::LOCAL)),
            _ => None,
        }
    }

    /// Calls `copy` for each contiguous stretch of plain memory that holds bytes `at..at + len` of the
    /// `total` bytes of the get, with the stretch's distance from `at`. Memory that is not plain, or does not
    /// exist, is skipped.
    pub(crate) fn fill(&mut self, total: u64, at: u64, len: u64, mut copy: impl FnMut(u64, &mut [u8])) {
        let wanted = at as usize..(at + len) as usize;
        match self {
            Self::Vec(bytes) => {
                let total = total as usize;
                if bytes.len() != total {
                    if bytes.capacity() < total {
                        // Zeroed memory comes from the system and costs nothing until it is written.
                        **bytes = vec![0; total];
                    }
                    bytes.resize(total, 0);
                }
                if let Some(place) = bytes.get_mut(wanted) {
                    copy(0, place);
                }
            }
            Self::Bytes(bytes) => {
                if let Some(place) = bytes.get_mut(wanted) {
                    copy(0, place);
                }
            }
            Self::Slices(slices) => {
                let mut start = 0;
                for slice in slices.iter_mut() {
                    let end = start + slice.len() as u64;
                    let (from, to) = (at.max(start), (at + len).min(end));
                    if from < to {
                        copy(from - at, &mut slice[(from - start) as usize..(to - start) as usize]);
                    }
                    start = end;
                }
            }
            Self::Region(_) | Self::Regions(_) | Self::Fragments(_) | Self::Local(_) => {}
        }
    }
}

const fn check_parts(parts: usize) -> Result<(), StoreError> {
    if parts > PARTS_MAX { Err(StoreError::TooManyParts { parts }) } else { Ok(()) }
}

/// Converts a range. `None`: the whole object. A range that holds no byte, or goes beyond the largest offset,
/// becomes a part of length 0.
pub(crate) fn part(range: impl RangeBounds<u64>) -> Option<Part> {
    let start = match range.start_bound() {
        Bound::Included(start) => Some(*start),
        Bound::Excluded(before) => before.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.checked_add(1),
        Bound::Excluded(end) => Some(*end),
        Bound::Unbounded => {
            return match start {
                Some(0) => None,
                Some(start) => Some((start, None)),
                None => Some((u64::MAX, Some(0))),
            };
        }
    };
    let (Some(start), Some(end)) = (start, end) else { return Some((start.unwrap_or(u64::MAX), Some(0))) };
    Some((start, Some(end.saturating_sub(start))))
}

macro_rules! into {
    ($($from:ty => $to:ident::$variant:ident;)*) => {$(
        impl<'a> From<$from> for $to<'a> {
            fn from(from: $from) -> Self {
                Self::$variant(from)
            }
        }
    )*};
}

into! {
    &'a [u8] => Source::Bytes;
    &'a Vec<u8> => Source::Bytes;
    &'a [&'a [u8]] => Source::Slices;
    &'a Vec<&'a [u8]> => Source::Slices;
    BufferRange => Source::Region;
    &'a [BufferRange] => Source::Regions;
    &'a Vec<BufferRange> => Source::Regions;
    LocalRange<'a> => Source::Local;
    &'a mut Vec<u8> => Sink::Vec;
    &'a mut [u8] => Sink::Bytes;
    &'a mut [&'a mut [u8]] => Sink::Slices;
    BufferRange => Sink::Region;
    &'a [BufferRange] => Sink::Regions;
    &'a Vec<BufferRange> => Sink::Regions;
    &'a [Fragment] => Sink::Fragments;
    &'a Vec<Fragment> => Sink::Fragments;
    LocalRange<'a> => Sink::Local;
}

macro_rules! array_into {
    ($($from:ty => $to:ident::$variant:ident;)*) => {$(
        impl<'a, const N: usize> From<$from> for $to<'a> {
            fn from(from: $from) -> Self {
                Self::$variant(from)
            }
        }
    )*};
}

array_into! {
    &'a [u8; N] => Source::Bytes;
    &'a [&'a [u8]; N] => Source::Slices;
    &'a [BufferRange; N] => Source::Regions;
    &'a mut [u8; N] => Sink::Bytes;
    &'a mut [&'a mut [u8]; N] => Sink::Slices;
    &'a [BufferRange; N] => Sink::Regions;
    &'a [Fragment; N] => Sink::Fragments;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_a_part_and_what_holds_no_byte_is_one_of_no_bytes() {
        assert_eq!(part(..), None);
        assert_eq!(part(0..), None);
        assert_eq!(part(7..), Some((7, None)));
        assert_eq!(part(7..9), Some((7, Some(2))));
        assert_eq!(part(..=9), Some((0, Some(10))));
        for none in [part(5..5), part(..=u64::MAX), part((Bound::Excluded(u64::MAX), Bound::Unbounded))] {
            assert!(matches!(none, Some((_, Some(0)))), "{none:?}");
        }
        #[allow(clippy::reversed_empty_ranges, reason = "such a range is what is tested")]
        let reversed = part(9..7);
        assert!(matches!(reversed, Some((_, Some(0)))));
    }

    #[test]
    fn plain_sinks_are_filled_wherever_the_pieces_end() {
        let bytes: Vec<u8> = (0..100).collect();
        for step in [1, 7, 30, 100] {
            let (mut a, mut b, mut c) = ([0; 10], [0; 0], [0; 95]);
            let mut slices = [&mut a[..], &mut b[..], &mut c[..]];
            let (mut whole, mut vec) = ([0; 101], vec![9; 3]);
            for sink in [Sink::from(&mut slices), Sink::from(&mut whole), Sink::from(&mut vec)] {
                let mut sink = sink;
                for (at, piece) in bytes.chunks(step).enumerate() {
                    sink.fill(100, (at * step) as u64, piece.len() as u64, |skip, place| {
                        place.copy_from_slice(&piece[skip as usize..][..place.len()]);
                    });
                }
            }
            assert_eq!([&a[..], &c[..90]].concat(), bytes);
            assert_eq!((&whole[..100], whole[100], &vec), (&bytes[..], 0, &bytes));
        }
    }

    #[test]
    fn a_vec_with_room_is_used_again_and_one_that_was_not_read_is_empty() {
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(b"what was there before");
        let place = bytes.as_ptr();
        let mut item = Get::new(b"k", &mut bytes);
        item.sink.fill(5, 0, 5, |_, place| place.copy_from_slice(b"value"));
        item.end_with(Ok(Some(5)));
        assert!(matches!(item.into_result(), Ok(Some(5))));
        assert_eq!((&bytes[..], bytes.as_ptr()), (&b"value"[..], place));
        Get::new(b"k", &mut bytes).end_with(Ok(None));
        assert!(bytes.is_empty());
    }
}
