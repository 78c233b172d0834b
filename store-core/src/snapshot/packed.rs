//! The large tables: pages of entries, each of which is written as one string of bytes, because a million
//! entries that are serialised field by field take too long.

use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

use serde::de::{DeserializeSeed, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::fields::bytes;
use crate::slab::{PAGE_LEN, Values};

/// An entry of a table.
pub(crate) trait Packed: Sized {
    /// What free slots read as.
    const VACANT: Self;

    fn pack(&self, to: &mut Vec<u8>);

    /// `None`: the bytes are no entry.
    fn unpack(from: &mut &[u8]) -> Option<Self>;
}

/// Splits a number off the beginning of `from`.
macro_rules! take {
    ($number:ty, $from:expr) => {{
        let (number, rest) = $from.split_first_chunk()?;
        *$from = rest;
        <$number>::from_le_bytes(*number)
    }};
}
pub(crate) use take;

/// Implements [`Packed`] for a struct of numbers.
macro_rules! packed {
    ($name:ident, $vacant:expr, $($field:ident: $number:ty),+ $(,)?) => {
        impl crate::snapshot::Packed for $name {
            const VACANT: Self = $vacant;

            fn pack(&self, to: &mut alloc::vec::Vec<u8>) {
                let Self { $($field),+ } = *self;
                $(to.extend_from_slice(&<$number>::from($field).to_le_bytes());)+
            }

            fn unpack(from: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: crate::snapshot::take!($number, from).into()),+ })
            }
        }
    };
}
pub(crate) use packed;

impl<T: Packed> Serialize for Values<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.pages().iter().map(|page| Page(page)))
    }
}

/// A page; no bytes: it is not allocated.
struct Page<'a, T>(&'a [T]);

impl<T: Packed> Serialize for Page<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut packed = Vec::with_capacity(size_of_val(self.0));
        self.0.iter().for_each(|entry| entry.pack(&mut packed));
        serializer.serialize_bytes(&packed)
    }
}

impl<'de, T: Packed> Deserialize<'de> for Values<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pages<T>(PhantomData<T>);
        impl<'de, T: Packed> Visitor<'de> for Pages<T> {
            type Value = Values<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the pages of a table")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Values<T>, A::Error> {
                // Pages are filled without gaps, so at most one is not full. Without this rule a page of a
                // few bytes would allocate a whole one.
                let (mut pages, mut short) = (Vec::new(), 0);
                while let Some(page) = from.next_element_seed(Unpack(PhantomData))? {
                    short += usize::from((1..PAGE_LEN).contains(&page.len()));
                    if short > 1 {
                        return Err(A::Error::custom("a table has several pages that are not full"));
                    }
                    pages.push(page);
                }
                Ok(Values::of_pages(T::VACANT, pages))
            }
        }
        deserializer.deserialize_seq(Pages(PhantomData))
    }
}

struct Unpack<T>(PhantomData<T>);

impl<'de, T: Packed> DeserializeSeed<'de> for Unpack<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        bytes(deserializer, |mut from| {
            let mut page = Vec::new();
            if !from.is_empty() {
                page.reserve_exact(PAGE_LEN);
            }
            while !from.is_empty() {
                if page.len() == PAGE_LEN {
                    return None;
                }
                page.push(T::unpack(&mut from)?);
            }
            Some(page)
        })?
        .ok_or_else(|| D::Error::custom("a page of a table is damaged"))
    }
}
