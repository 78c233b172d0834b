//! Tenants: namespaces of keys.
//!
//! A tenant is a namespace with a number. Keys of two tenants never collide: the number is part of what an
//! object is found by. What a tenant may use, and what becomes of it, is decided by the master. Nodes lend
//! their memory to all tenants, so that every process that can reach a node's exports can read every tenant's
//! bytes: tenants separate users who share a store; they do not protect against attackers in its fabric.

use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use te_core::Secret;

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

/// A tenant on disks: the first 64 bits of the SHA-256 of its name, least significant byte first. The master
/// may number its tenants otherwise after a restart; objects on disks keep their tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TenantTag(pub u64);

impl TenantTag {
    /// The tag of the tenant with this name.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let digest = Sha256::digest(name);
        Self(digest.iter().take(8).rev().fold(0, |tag, byte| tag << 8 | u64::from(*byte)))
    }
}

impl fmt::Display for FullKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.tenant, Key(self.key))
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
    /// Most bytes of its objects on disks, trailers included. Above the limit, its objects are not copied to
    /// disks, and their eviction removes them; objects that a disk brings with it stay. Default none:
    /// unlimited.
    pub quota_disk_bytes: Option<u64>,
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
            quota_disk_bytes: None,
            guaranteed_bytes: 0,
            secret: Secret::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_part_of_the_format_of_disks_and_never_change() {
        // printf default | sha256sum, the first eight bytes.
        assert_eq!(
            TenantTag::of("default").0.to_le_bytes(),
            [0x37, 0xa8, 0xee, 0xc1, 0xce, 0x19, 0x68, 0x7d]
        );
        assert_ne!(TenantTag::of("a"), TenantTag::of("b"));
    }
}
