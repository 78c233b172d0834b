//! Message bodies: postcard, decoded in place.
//!
//! A body is a *head* (one postcard value) and a sequence of *items* (a postcard `Vec`: a varint count, then
//! the items). [`Items`] decodes the sequence lazily from the frame, so that a batch of thousands of keys
//! allocates nothing.

use alloc::vec::Vec;
use core::fmt::{self, Write};
use core::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::wire::{KEYS_PER_BATCH_MAX, WireError};

/// An object's key: bytes, not text. `Display` prints it as text and replaces what is not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key<'a>(pub &'a [u8]);

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            f.write_str(chunk.valid())?;
            if !chunk.invalid().is_empty() {
                f.write_char(char::REPLACEMENT_CHARACTER)?;
            }
        }
        Ok(())
    }
}

impl Serialize for Key<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Key<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        <&'a [u8]>::deserialize(deserializer).map(Key)
    }
}

/// Numbers that are as likely to be large as small: a count byte, then eight bytes, least significant first.
/// A varint would take ten bytes and five times as long to decode.
pub(crate) mod fixed {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&number.to_le_bytes())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let bytes = <&'de [u8]>::deserialize(deserializer)?;
        let wrong = || de::Error::invalid_length(bytes.len(), &"8 bytes");
        bytes.try_into().map(u64::from_le_bytes).map_err(|_| wrong())
    }
}

/// A sequence of `T` that was validated as a whole and is decoded item by item.
#[derive(Debug)]
pub struct Items<'a, T> {
    bytes: &'a [u8],
    left: usize,
    _item: PhantomData<fn() -> T>,
}

impl<T> Clone for Items<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Items<'_, T> {}

impl<'a, T: Deserialize<'a>> Items<'a, T> {
    /// Reads the count and checks that exactly that many items follow.
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, WireError> {
        let (count, bytes) = postcard::take_from_bytes::<u32>(body).map_err(|_| WireError::Body)?;
        let left = count as usize;
        if left > KEYS_PER_BATCH_MAX {
            return Err(WireError::TooManyKeys { keys: left });
        }
        let mut rest = bytes;
        for _ in 0..left {
            rest = postcard::take_from_bytes::<T>(rest).map_err(|_| WireError::Body)?.1;
        }
        if rest.is_empty() { Ok(Self { bytes, left, _item: PhantomData }) } else { Err(WireError::Body) }
    }
}

impl<T> Items<'_, T> {
    /// Number of items that are left.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.left
    }

    /// Whether no items are left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl<'a, T: Deserialize<'a>> Iterator for Items<'a, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        // `parse` has decoded these very bytes, so decoding them again does not fail.
        let (item, rest) = postcard::take_from_bytes(self.bytes).ok()?;
        self.bytes = rest;
        Some(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<'a, T: Deserialize<'a>> ExactSizeIterator for Items<'a, T> {}

/// A list of at most `N` items; on the wire a postcard `Vec`.
///
/// The items are stored in place, without an allocation: an object usually has one replica and never more
/// than eight.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Short<T, const N: usize> {
    len: u8,
    items: [T; N],
}

impl<T: Copy, const N: usize> Short<T, N> {
    /// An empty list; `unused` fills the places without an item.
    pub(crate) const fn of(unused: T) -> Self {
        Self { len: 0, items: [unused; N] }
    }
}

impl<T: Copy + Default, const N: usize> Short<T, N> {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::of(T::default())
    }

    /// Appends an item.
    ///
    /// # Errors
    /// The item itself, when the list is full.
    pub fn push(&mut self, item: T) -> Result<(), T> {
        match self.items.get_mut(usize::from(self.len)) {
            Some(slot) => {
                *slot = item;
                self.len += 1;
                Ok(())
            }
            None => Err(item),
        }
    }
}

impl<T: Copy + Default, const N: usize> Default for Short<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, const N: usize> core::ops::Deref for Short<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..usize::from(self.len)]
    }
}

impl<T, const N: usize> core::ops::DerefMut for Short<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..usize::from(self.len)]
    }
}

impl<T: fmt::Debug, const N: usize> fmt::Debug for Short<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: Serialize, const N: usize> Serialize for Short<T, N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de, T: Deserialize<'de> + Copy + Default, const N: usize> Deserialize<'de> for Short<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<T, const N: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de> + Copy + Default, const N: usize> de::Visitor<'de> for Visitor<T, N> {
            type Value = Short<T, N>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {N} items")
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut list = Short::new();
                while let Some(item) = seq.next_element()? {
                    list.push(item).map_err(|_| de::Error::invalid_length(N + 1, &self))?;
                }
                Ok(list)
            }
        }
        deserializer.deserialize_seq(Visitor(PhantomData))
    }
}

/// Appends the postcard encoding of `value`.
pub(crate) fn put<T: Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) -> Result<(), WireError> {
    struct Append<'v>(&'v mut Vec<u8>);
    impl postcard::ser_flavors::Flavor for Append<'_> {
        type Output = ();

        fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
            self.0.push(byte);
            Ok(())
        }

        fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
            self.0.extend_from_slice(bytes);
            Ok(())
        }

        fn finalize(self) -> postcard::Result<()> {
            Ok(())
        }
    }
    postcard::serialize_with_flavor(value, Append(out)).map_err(|_| WireError::Body)
}

/// Decodes one value from the front; returns it and the rest.
pub(crate) fn take<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<(T, &'a [u8]), WireError> {
    postcard::take_from_bytes(body).map_err(|_| WireError::Body)
}
