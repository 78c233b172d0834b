//! Tenants: namespaces of keys.
//!
//! A tenant is a namespace with a number. Keys of two tenants never collide: the number is part of what an
//! object is found by. What a tenant may use, and what becomes of it, is decided by the master. Nodes lend
//! their memory to all tenants, so that every process that can reach a node's exports can read every tenant's
//! bytes: tenants separate users who share a store; they do not protect against attackers in its fabric.

use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};
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
