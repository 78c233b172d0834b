//! Where the bytes of an operation's items come from or go to.

use te_core::{Access, MemSpan};

use crate::memory::{BufferRange, Fragment};

/// One form for all items of an operation. Each item stands beside its key, because that is how callers have them.
pub(crate) enum Buffers<'a> {
    /// Registered memory, either way: one range an item.
    Range(&'a [(&'a [u8], BufferRange)]),
    /// Registered memory, either way: the ranges of an item end to end.
    Ranges(&'a [(&'a [u8], &'a [BufferRange])]),
    /// Plain bytes to put.
    Bytes(&'a [(&'a [u8], &'a [u8])]),
    /// Plain bytes to put, end to end.
    Slices(&'a [(&'a [u8], &'a [&'a [u8]])]),
    /// Plain bytes to get, made when their length is known.
    Made(&'a mut [Option<Vec<u8>>]),
    /// The caller's plain bytes to get into.
    Filled(&'a mut [&'a mut [u8]]),
    /// Parts of objects to get into registered memory.
    Fragments(&'a [(&'a [u8], &'a [Fragment])]),
    /// A part of each object to get, from an offset on, up to a length or to its end; plain bytes, made when it is known.
    Part(&'a [(u64, Option<u64>)], &'a mut [Option<Vec<u8>>]),
}

impl Buffers<'_> {
    /// Bytes of an item that is put.
    pub(crate) fn len(&self, item: usize) -> u64 {
        match self {
            Self::Bytes(_) | Self::Slices(_) => {
                self.slices(item).unwrap_or_default().iter().map(|part| part.len() as u64).sum()
            }
            _ => self.ranges(item).unwrap_or_default().iter().map(|part| part.len).sum(),
        }
    }

    /// The ranges of an item, where whole objects go straight from or into registered memory.
    pub(crate) fn ranges(&self, item: usize) -> Option<&[BufferRange]> {
        match self {
            Self::Range(items) => Some(std::slice::from_ref(&items[item].1)),
            Self::Ranges(items) => Some(items[item].1),
            _ => None,
        }
    }

    /// The plain memory that an item of this length is read into, where whole objects are.
    pub(super) fn sink(&mut self, item: usize, len: u64) -> Option<&mut [u8]> {
        match self {
            Self::Made(sinks) => Some(sinks[item].get_or_insert_with(|| vec![0; len as usize])),
            Self::Filled(sinks) => Some(&mut *sinks[item]),
            _ => None,
        }
    }

    /// The plain memory of an item that is in one piece, and what is done to it.
    pub(crate) fn plain(&mut self, item: usize) -> Option<(MemSpan, Access)> {
        match self {
            Self::Bytes(items) => {
                let bytes = items[item].1;
                Some((MemSpan::new(bytes.as_ptr().cast_mut(), bytes.len()), Access::LOCAL_READ))
            }
            Self::Filled(sinks) => {
                let bytes = &mut *sinks[item];
                Some((MemSpan::new(bytes.as_mut_ptr(), bytes.len()), Access::LOCAL))
            }
            _ => None,
        }
    }

    /// The plain bytes of an item that is put.
    pub(crate) fn slices(&self, item: usize) -> Option<&[&[u8]]> {
        match self {
            Self::Bytes(items) => Some(std::slice::from_ref(&items[item].1)),
            Self::Slices(items) => Some(items[item].1),
            _ => None,
        }
    }
}

/// Which of several parts, end to end, an offset lies in. Remembers where it was, because offsets go up as a rule.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    index: usize,
    start: u64,
}

impl Cursor {
    /// The part that has byte `at` of all, and where in it. `None`: beyond the end.
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
        assert_eq!(cursor.seek(&parts, 2, |len| *len), Some((1, 2)), "it comes back from the end");
    }
}
