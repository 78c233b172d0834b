//! How fields are written whose types do not say it themselves.

/// Arrays, and boxed arrays, of any length.
pub(crate) mod array {
    use core::fmt;
    use core::marker::PhantomData;

    use serde::de::{Error, SeqAccess, Visitor};
    use serde::ser::SerializeTuple;
    use serde::{Deserializer, Serializer};

    /// An array of arrays of numbers, of any depth.
    pub(crate) trait Numbers {
        const LEN: usize;
        fn zero() -> Self;
        fn each(&self, to: &mut impl FnMut(u32));
        fn fill(&mut self, from: &mut impl FnMut() -> u32);
    }

    impl Numbers for u32 {
        const LEN: usize = 1;

        fn zero() -> Self {
            0
        }

        fn each(&self, to: &mut impl FnMut(u32)) {
            to(*self);
        }

        fn fill(&mut self, from: &mut impl FnMut() -> u32) {
            *self = from();
        }
    }

    impl<T: Numbers + Copy, const N: usize> Numbers for [T; N] {
        const LEN: usize = N * T::LEN;

        fn zero() -> Self {
            [T::zero(); N]
        }

        fn each(&self, to: &mut impl FnMut(u32)) {
            self.iter().for_each(|item| item.each(to));
        }

        fn fill(&mut self, from: &mut impl FnMut() -> u32) {
            self.iter_mut().for_each(|item| item.fill(from));
        }
    }

    impl<T: Numbers> Numbers for alloc::boxed::Box<T> {
        const LEN: usize = T::LEN;

        fn zero() -> Self {
            Self::new(T::zero())
        }

        fn each(&self, to: &mut impl FnMut(u32)) {
            (**self).each(to);
        }

        fn fill(&mut self, from: &mut impl FnMut() -> u32) {
            (**self).fill(from);
        }
    }

    pub(crate) fn serialize<T: Numbers, S: Serializer>(
        numbers: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(T::LEN)?;
        let mut done = Ok(());
        numbers.each(&mut |number| {
            if done.is_ok() {
                done = tuple.serialize_element(&number);
            }
        });
        done?;
        tuple.end()
    }

    pub(crate) fn deserialize<'de, T: Numbers, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        struct All<T>(PhantomData<T>);
        impl<'de, T: Numbers> Visitor<'de> for All<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} numbers", T::LEN)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<T, A::Error> {
                let (mut all, mut done) = (T::zero(), Ok(()));
                all.fill(&mut || match from.next_element::<u32>() {
                    Ok(Some(number)) => number,
                    Ok(None) => {
                        done = Err(A::Error::custom("an array is too short"));
                        0
                    }
                    Err(error) => {
                        done = Err(error);
                        0
                    }
                });
                done.map(|()| all)
            }
        }
        deserializer.deserialize_tuple(T::LEN, All(PhantomData))
    }
}

/// Lists of 128-bit words, as bytes.
pub(crate) mod words {
    use alloc::vec::Vec;

    use serde::de::Error;
    use serde::{Deserializer, Serializer};

    use super::bytes;

    pub(crate) fn serialize<S: Serializer>(words: &[u128], serializer: S) -> Result<S::Ok, S::Error> {
        let mut all = Vec::with_capacity(size_of_val(words));
        words.iter().for_each(|word| all.extend_from_slice(&word.to_le_bytes()));
        serializer.serialize_bytes(&all)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u128>, D::Error> {
        bytes(deserializer, |all| match all.as_chunks() {
            (words, []) => Some(words.iter().map(|word| u128::from_le_bytes(*word)).collect()),
            _ => None,
        })?
        .ok_or_else(|| D::Error::custom("a list of words is cut short"))
    }
}

/// Secrets, which do not serialise themselves.
pub(crate) mod secret {
    use serde::{Deserializer, Serializer};
    use te_core::Secret;

    pub(crate) fn serialize<S: Serializer>(secret: &Secret, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(secret.bytes())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
        super::bytes(deserializer, Secret::new)
    }
}

/// Locations, as on the wire, of a kind that this release knows.
pub(crate) mod location {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::MemoryLocation;

    pub(crate) fn serialize<S: Serializer>(
        location: &MemoryLocation,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        location.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<MemoryLocation, D::Error> {
        let location = MemoryLocation::deserialize(deserializer)?;
        location.check().map_err(|_| D::Error::custom("a location is unknown"))?;
        Ok(location)
    }
}

/// Error codes, as on the wire; 0: none.
pub(crate) mod error {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::ErrorCode;

    pub(crate) fn serialize<S: Serializer>(
        error: &Option<ErrorCode>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_i32(error.map_or(0, ErrorCode::code))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<ErrorCode>, D::Error> {
        match i32::deserialize(deserializer)? {
            0 => Ok(None),
            code => match ErrorCode::from_code(code) {
                Some(error) => Ok(Some(error)),
                None => Err(D::Error::custom("an error code is unknown")),
            },
        }
    }
}

/// Byte strings; `make` gets what was read.
pub(crate) fn bytes<'de, D, T>(deserializer: D, make: impl FnOnce(&[u8]) -> T) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
{
    struct Bytes<F>(F);
    impl<T, F: FnOnce(&[u8]) -> T> serde::de::Visitor<'_> for Bytes<F> {
        type Value = T;

        fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E>(self, bytes: &[u8]) -> Result<T, E> {
            Ok(self.0(bytes))
        }
    }
    deserializer.deserialize_byte_buf(Bytes(make))
}
