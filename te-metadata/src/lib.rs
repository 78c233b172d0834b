//! Names of segments on a server: the directory in which transfer engines find each other, over HTTP, Redis
//! and etcd.
//!
//! ```text
//!   connection string ──▶ MetadataSource ─┬─▶ Directory   entries of segments: compare-and-set, time to live
//!                                         │      └── Keeper   a thread that keeps one entry registered
//!                                         ├─▶ KeyValue    plain keys and values, as other systems keep them
//!                                         └─▶ Registers   etcd alone: values with versions, no leases
//!                                                │
//!                        backoff: a server that did not answer is not asked for a while
//!                                                │
//!                           HTTP (ETag)     Redis (scripts)     etcd (JSON gateway)
//! ```
//!
//! # What a directory stores
//! Under the key `snowskin/segment/NAME`, the entry as JSON, at most [`ENTRY_BYTES_MAX`] bytes:
//!
//! ```json
//! {"v":1,"name":"node-7","endpoint":"10.0.0.7:7400","incarnation":1792023600000000}
//! ```
//!
//! `v` is the version of this format; an entry with another version is refused. Unknown members are ignored.
//!
//! * The entry has a time to live, which its owner renews after a third of it. The entry of an owner that
//!   died is gone after that time at the latest; an owner that stops in order removes it.
//! * Every write is a compare-and-set against what was read. A higher incarnation takes the name at once; a
//!   lower one is refused while the entry of the higher one is there.
//! * HTTP: `ETag`, `If-Match`, `If-None-Match` and `ttl_ms=` (served by the store's master under
//!   `/metadata`). Redis: `SET … PX`, and scripts that compare and set. etcd: its JSON gateway, transactions
//!   on `mod_revision`, and a lease.
//!
//! After a server did not answer, it is not asked during a backoff, which grows each time; requests fail at
//! once meanwhile.
//!
//! ```
//! use te_metadata::{Entry, MetadataSource};
//!
//! let source: MetadataSource = "http://10.0.0.5:9003/metadata".parse()?;
//! assert!(!source.is_peer_to_peer() && source.missing_feature().is_none());
//!
//! let entry = Entry { name: "node-7".into(), endpoint: "10.0.0.7:7400".into(), incarnation: 7 };
//! assert_eq!(Entry::parse("node-7", &entry.to_bytes()), Ok(entry));
//! # Ok::<(), te_metadata::SourceError>(())
//! ```
#![deny(unsafe_code)]

mod backoff;
mod directory;
mod entry;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod http;
mod keeper;
mod key_value;
#[cfg(feature = "redis")]
mod leader_view;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "etcd")]
mod register;
mod source;

pub use directory::Directory;
pub use entry::{ENTRY_BYTES_MAX, Entry, is_segment_name};
pub use error::{MetadataError, SourceError};
pub use keeper::{Keeper, KeeperState, Registration};
pub use key_value::{KEY_BYTES_MAX, KeyValue, VALUE_BYTES_MAX};
#[cfg(feature = "redis")]
pub use leader_view::LeaderView;
#[cfg(feature = "etcd")]
pub use register::{REGISTER_BYTES_MAX, REGISTERS_MAX, Register, Registers, Swapped};
pub use source::MetadataSource;
