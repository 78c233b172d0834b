//! Messages about many objects at once: lists of keys, what a regular expression matches, what a tenant has.

use serde::{Deserialize, Serialize};

use crate::codec::Key;

/// Which keys to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListQuery<'a> {
    /// Keys that begin so; empty for all.
    #[serde(borrow)]
    pub prefix: Key<'a>,
    /// 0 to begin; then what the answer before gave.
    pub cursor: u64,
    /// Most keys in the answer; 512 at most. A page may have fewer, or none, and still not be the last.
    pub limit: u32,
}

/// Where the next page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListPosition {
    /// 0: that was all. A page may be short or empty and still not be the last.
    pub cursor: u64,
}

/// One key of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed<'a> {
    /// The key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes.
    pub len: u64,
    /// Copies.
    pub replicas: u8,
    /// Readable; else it is being written.
    pub complete: bool,
    /// Readers hold a lease.
    pub leased: bool,
}

/// What a tenant is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSetting<'a> {
    /// Its name, 1 to 64 bytes.
    pub name: &'a str,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub quota_bytes: Option<u64>,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub quota_objects: Option<u32>,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub guaranteed_bytes: u64,
    /// Its new secret, empty for none; none: as it was.
    #[serde(borrow)]
    pub secret: Option<Key<'a>>,
}

/// What a tenant uses and may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantUsage<'a> {
    /// Its name.
    pub name: &'a str,
    /// Most bytes; none: all there are.
    pub quota_bytes: Option<u64>,
    /// Most objects; none: as many as there can be.
    pub quota_objects: Option<u32>,
    /// Bytes that the puts of others do not take from it.
    pub guaranteed_bytes: u64,
    /// Its clients need a secret.
    pub has_secret: bool,
    /// Bytes of its objects, in grains of 64, each copy counted, those being written included.
    pub bytes: u64,
    /// Bytes that are held back for its readers and writers, and count as well.
    pub held_bytes: u64,
    /// Bytes that it has pinned for good, each object counted once.
    pub hard_pinned_bytes: u64,
    /// Its objects, those being written included.
    pub objects: u64,
    /// Objects of it that were evicted, for whomever.
    pub evictions_total: u64,
    /// Puts that its quota refused.
    pub refusals_total: u64,
}

/// Which keys to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindQuery<'a> {
    /// A regular expression, of at most 1,024 bytes, that matches anywhere in a key unless it is anchored. The syntax is
    /// that of the crate `regex`, on bytes: classes are ASCII. What is empty, compiles to too much or is too costly to search
    /// with is `InvalidPattern`.
    pub pattern: &'a str,
    /// 0 to begin; then what the answer before gave.
    pub cursor: u64,
    /// Most keys in the answer; 512 at most. A page may have fewer, or none, and still not be the last.
    pub limit: u32,
}

/// What to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveQuery<'a> {
    /// As in [`FindQuery`]; none: all objects.
    pub pattern: Option<&'a str>,
    /// 0 to begin; then what the answer before gave.
    pub cursor: u64,
    /// As in [`Removal`](super::Removal).
    pub force: bool,
}

/// What became of a page of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedPage {
    /// 0: that was all. A page may be empty and still not be the last.
    pub cursor: u64,
    /// Objects that are gone.
    pub removed: u32,
    /// Left, because somebody may be reading them.
    pub leased: u32,
    /// Left, because they are being written.
    pub unfinished: u32,
}
