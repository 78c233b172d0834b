//! Messages about many objects at once: listings, searches by regular expression, tenants.

use serde::{Deserialize, Serialize};

use crate::codec::Key;

/// A request for a page of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListQuery<'a> {
    /// List only keys with this prefix; empty: all keys.
    #[serde(borrow)]
    pub prefix: Key<'a>,
    /// 0 for the first page; then the value of the previous response.
    pub cursor: u64,
    /// Most keys in the response, at most 512. A page may have fewer, or none, and still not be the last.
    pub limit: u32,
}

/// Where the next page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListPosition {
    /// The cursor of the next page; 0: this was the last one. A page may be short or empty and still not be
    /// the last.
    pub cursor: u64,
}

/// An object in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Length of the object, bytes.
    pub len: u64,
    /// Number of replicas.
    pub replicas: u8,
    /// Whether it is readable; otherwise it is being written.
    pub complete: bool,
    /// Whether it is leased.
    pub leased: bool,
}

/// A tenant to add or to change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSetting<'a> {
    /// Its name, 1 to 64 bytes.
    pub name: &'a str,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub quota_bytes: Option<u64>,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub quota_objects: Option<u32>,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub quota_disk_bytes: Option<u64>,
    /// As in [`TenantConfig`](crate::TenantConfig).
    pub guaranteed_bytes: u64,
    /// The new secret, empty for none. `None`: unchanged.
    #[serde(borrow)]
    pub secret: Option<Key<'a>>,
}

/// What a tenant uses, and its limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantUsage<'a> {
    /// The tenant's name.
    pub name: &'a str,
    /// Most bytes. `None`: unlimited.
    pub quota_bytes: Option<u64>,
    /// Most objects. `None`: unlimited.
    pub quota_objects: Option<u32>,
    /// Most bytes on disks. `None`: unlimited.
    pub quota_disk_bytes: Option<u64>,
    /// Bytes that puts of other tenants do not take from it.
    pub guaranteed_bytes: u64,
    /// Whether its clients have to prove a secret.
    pub has_secret: bool,
    /// Bytes of its objects, in grains of 64, per replica, including those that are being written.
    pub bytes: u64,
    /// Bytes pending release because of its readers and writers; its quota counts them as well.
    pub held_bytes: u64,
    /// Bytes that it has pinned for good, each object counted once.
    pub hard_pinned_bytes: u64,
    /// Its objects, including those that are being written.
    pub objects: u64,
    /// Bytes of its objects on disks, trailers included.
    pub disk_bytes: u64,
    /// Its objects that were evicted, for puts of any tenant.
    pub evictions_total: u64,
    /// Puts that its quota refused.
    pub refusals_total: u64,
}

/// A request for a page of keys that match a regular expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindQuery<'a> {
    /// A regular expression of at most 1,024 bytes that matches anywhere in a key unless it is anchored. The
    /// syntax is that of the crate `regex`, on bytes: classes are ASCII. A pattern that is empty, compiles to
    /// too much or is too costly to search with is refused with `InvalidPattern`.
    pub pattern: &'a str,
    /// 0 for the first page; then the value of the previous response.
    pub cursor: u64,
    /// Most keys in the response, at most 512. A page may have fewer, or none, and still not be the last.
    pub limit: u32,
}

/// A request to remove a page of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveQuery<'a> {
    /// As [`FindQuery::pattern`]. `None`: all objects.
    pub pattern: Option<&'a str>,
    /// 0 for the first page; then the value of the previous response.
    pub cursor: u64,
    /// As [`Removal::force`](super::Removal::force).
    pub force: bool,
}

/// The result of a page of removals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedPage {
    /// The cursor of the next page; 0: this was the last one. A page may be empty and still not be the last.
    pub cursor: u64,
    /// Objects that were removed.
    pub removed: u32,
    /// Objects that were kept because they are leased.
    pub leased: u32,
    /// Objects that were kept because they are being written.
    pub unfinished: u32,
}
