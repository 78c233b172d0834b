//! Tenants: namespaces of keys.
//!
//! A tenant is a namespace with a number. Keys of two tenants never collide: the number is part of what an
//! object is found by. What a tenant may use, and what becomes of it, is decided by the master. Nodes lend
//! their memory to all tenants, so that every process that can reach a node's exports can read every tenant's
//! bytes: tenants separate users who share a store; they do not protect against attackers in its fabric.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::hint::black_box;

use serde::{Deserialize, Serialize, Serializer};

use crate::{Key, TenantNo};

/// The tenant of clients that name none.
pub const DEFAULT_TENANT: &str = "default";
/// Length limit of a tenant's name, bytes.
pub const TENANT_BYTES_MAX: usize = 64;
/// Length limit of a secret, bytes.
pub const SECRET_BYTES_MAX: usize = 256;

/// A key with its tenant. A byte string converts to a key of the default tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FullKey<'a> {
    /// The tenant.
    pub tenant: TenantNo,
    /// The key.
    pub key: &'a [u8],
}

impl<'a> From<&'a [u8]> for FullKey<'a> {
    fn from(key: &'a [u8]) -> Self {
        Self { tenant: TenantNo::DEFAULT, key }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for FullKey<'a> {
    fn from(key: &'a [u8; N]) -> Self {
        Self { tenant: TenantNo::DEFAULT, key }
    }
}

impl<'a> From<&'a Vec<u8>> for FullKey<'a> {
    fn from(key: &'a Vec<u8>) -> Self {
        Self { tenant: TenantNo::DEFAULT, key }
    }
}

impl<'a> From<Key<'a>> for FullKey<'a> {
    fn from(key: Key<'a>) -> Self {
        Self { tenant: TenantNo::DEFAULT, key: key.0 }
    }
}

impl fmt::Display for FullKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.tenant, Key(self.key))
    }
}

/// Secret bytes. `Debug` and serialisation leave them out, and comparison takes a time that depends on
/// nothing but lengths. Empty: no secret is set.
#[derive(Clone, Default, Eq, Deserialize)]
#[serde(from = "alloc::string::String")]
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

    /// The bytes, to make a proof with: [`prove`](crate::prove).
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
impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("")
    }
}

/// A tenant and what it may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TenantConfig {
    /// Its name, 1 to 64 bytes.
    pub name: alloc::string::String,
    /// Most bytes of its objects, each rounded up to 64 and counted once per replica, including those that
    /// are being written or are pending release. Above the limit, a put evicts objects of this tenant.
    /// Default none: unlimited.
    pub quota_bytes: Option<u64>,
    /// Most objects, including those that are being written. Default none: unlimited.
    pub quota_objects: Option<u32>,
    /// Bytes that puts of other tenants do not take from it, as long as another tenant has more than is
    /// guaranteed to it. Default 0.
    pub guaranteed_bytes: u64,
    /// The secret that its clients have to prove; empty: none is required. Default none.
    pub secret: Secret,
}

impl TenantConfig {
    /// Whether the lengths of its name and secret are within the limits, and its guarantee is within its
    /// quota.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        (1..=TENANT_BYTES_MAX).contains(&self.name.len())
            && self.secret.len() <= SECRET_BYTES_MAX
            && self.guaranteed_bytes <= self.quota_bytes.unwrap_or(u64::MAX)
    }
}

impl Default for TenantConfig {
    fn default() -> Self {
        Self {
            name: DEFAULT_TENANT.into(),
            quota_bytes: None,
            quota_objects: None,
            guaranteed_bytes: 0,
            secret: Secret::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_equal_when_all_their_bytes_are_and_none_is_missing() {
        let secret = Secret::new(b"open sesame");
        for other in [b"open sesamf".as_slice(), b"ppen sesame", b"open sesam", b"open sesame!", b""] {
            assert!(secret != Secret::new(other) && !secret.matches(other), "{other:?}");
        }
        assert!(secret == secret.clone() && secret.matches(b"open sesame"));
        assert!(Secret::default() == Secret::new(b""));
    }
}
