//! [`Secret`]: bytes that only the processes of one cluster or tenant know.

use alloc::boxed::Box;
use core::fmt;
use core::hint::black_box;

/// Secret bytes. `Debug` and serialisation leave them out, and comparison takes a time that depends on
/// nothing but lengths. Empty: no secret is set.
#[derive(Clone, Default, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(from = "alloc::string::String"))]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// A secret with these bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Whether a secret is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        !self.0.is_empty()
    }

    /// Length of the secret, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no secret is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes, to make a proof with.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether these are the secret's bytes. Takes the same time for every wrong guess of one length.
    #[must_use]
    pub fn matches(&self, guess: &[u8]) -> bool {
        let differ = self.0.iter().zip(guess).fold(0, |differ, (a, b)| black_box(differ | (a ^ b)));
        self.0.len() == guess.len() && differ == 0
    }
}

/// In constant time, as [`Secret::matches`].
impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.matches(&other.0)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self::new(text.as_bytes())
    }
}

impl From<alloc::string::String> for Secret {
    fn from(text: alloc::string::String) -> Self {
        Self::new(text.as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "Secret(…)" } else { "Secret(none)" })
    }
}

/// Always an empty string: a configuration that is printed contains no secret and cannot be read back with
/// one.
#[cfg(feature = "serde")]
impl serde::Serialize for Secret {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn secrets_are_equal_when_all_their_bytes_are_and_none_is_missing() {
        let secret = Secret::new(b"open sesame");
        for other in [b"open sesamf".as_slice(), b"ppen sesame", b"open sesam", b"open sesame!", b""] {
            assert!(secret != Secret::new(other) && !secret.matches(other), "{other:?}");
        }
        assert!(secret == Secret::from("open sesame") && secret.matches(b"open sesame"));
        assert!(Secret::default() == Secret::new(b""));
        assert!(!format!("{secret:?}").contains("sesame"));
    }
}
