//! How the owner of a segment is found: by its address, or by a name that a directory has.
//!
//! A name with a colon is an address, `host:port` of the owner's control port; no directory is used for it.
//! Any other name (`node-7`, `prefill/3`) is looked up in a [`Directory`]: a server over HTTP, Redis, or
//! etcd. There each name has an [`Entry`]: endpoint and incarnation of its owner. What the owner exports is
//! not stored there but always fetched from the owner: exports change with every registration and may be
//! megabytes long, and the answer proves that the owner is alive. If the incarnation that answers at the
//! endpoint is not that of the entry, opening ends with [`SegmentError::Restarted`].
//!
//! # What is stored
//! Under the key `snowskin/segment/NAME`, the entry as JSON, at most [`ENTRY_BYTES_MAX`] bytes:
//!
//! ```json
//! {"v":1,"name":"node-7","endpoint":"10.0.0.7:7400","incarnation":1792023600000000}
//! ```
//!
//! `v` is the version of this format; an entry with another version is refused. Unknown members are ignored.
//!
//! * The entry has a time to live, [`MetadataConfig::ttl_ms`](crate::MetadataConfig), which its owner renews
//!   after a third of it. The entry of an owner that died is gone after that time at the latest; an owner
//!   that stops in order removes it.
//! * Every write is a compare-and-set against what was read. A higher incarnation takes the name at once; a
//!   lower one is refused while the entry of the higher one is there.
//! * HTTP: `ETag`, `If-Match`, `If-None-Match` and `ttl_ms=` (served by the store's master under
//!   `/metadata`). Redis: `SET … PX`, and scripts that compare and set. etcd: its JSON gateway, transactions
//!   on `mod_revision`, and a lease.
//!
//! None of this is on the data path: names are looked up on the thread that opens a segment, and a separate
//! thread renews the entry. After a server did not answer, it is not asked during a backoff, which grows each
//! time; requests fail at once meanwhile.

mod directory;
mod entry;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod http;
mod keeper;
#[cfg(feature = "redis")]
mod redis;
mod source;

use std::string::String;
use std::time::Duration;

use te_core::Secret;

use crate::config::Config;
use crate::control::{Answer, Request, Requester, call};
use crate::descriptor::Descriptor;
use crate::error::SegmentError;

pub use directory::Directory;
pub(crate) use entry::is_segment_name;
pub use entry::{ENTRY_BYTES_MAX, Entry};
pub use error::{MetadataError, SourceError};
pub use keeper::Registration;
pub(crate) use keeper::{Keeper, KeeperState};
pub use source::MetadataSource;

/// Finds the owner of a segment by the segment's name. Called on the thread that opens a segment; may block.
pub trait Metadata: Send + Sync {
    /// Where the owner of the segment `name` is now.
    ///
    /// # Errors
    /// `Name`, `Unknown`, `Metadata`.
    fn locate(&self, name: &str) -> Result<Located, SegmentError>;
}

/// Where a segment's owner is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// `host:port` of its control port.
    pub endpoint: String,
    /// The incarnation that must answer there; `None`: any.
    pub incarnation: Option<u64>,
}

/// Without a directory: the name of a segment is `host:port` of its owner.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PeerToPeer {
    /// How long one request may take.
    pub timeout: Duration,
    /// Maximum length of a descriptor, bytes.
    pub frame_bytes_max: u32,
    /// The secret that this engine and the owner prove to each other. Not set: no proof.
    pub cluster_secret: Secret,
}

impl PeerToPeer {
    /// With the limits and the secret of this configuration.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            timeout: Duration::from_millis(config.control.timeout_ms.into()),
            frame_bytes_max: config.control.frame_bytes_max,
            cluster_secret: config.cluster_secret.clone(),
        }
    }

    pub(crate) fn requester(&self) -> Requester<'_> {
        Requester {
            timeout: self.timeout,
            frame_bytes_max: self.frame_bytes_max,
            secret: &self.cluster_secret,
        }
    }

    /// Fetches the descriptor of the engine at `endpoint`.
    ///
    /// # Errors
    /// `Name`, `Unreachable`, `Protocol`; `Refused` when the two cluster secrets differ.
    pub fn fetch(&self, endpoint: &str) -> Result<Descriptor, SegmentError> {
        let protocol = |what| SegmentError::Protocol { name: String::from(endpoint), what };
        match call(endpoint, &Request::Descriptor, self.requester())? {
            Answer::Descriptor(bytes) => Descriptor::parse(&bytes).map_err(protocol),
            _ => Err(protocol("its answer is not one to this request")),
        }
    }

    /// Finds the owner of the segment `name` and fetches its descriptor. Returns its endpoint, too.
    pub(crate) fn describe(
        &self,
        metadata: &dyn Metadata,
        name: &str,
    ) -> Result<(String, Descriptor), SegmentError> {
        let Located { endpoint, incarnation } = metadata.locate(name)?;
        let descriptor = self.fetch(&endpoint).map_err(|error| at(name, &endpoint, error))?;
        match incarnation {
            Some(expected) if expected != descriptor.incarnation => {
                Err(SegmentError::Restarted { name: name.into(), expected, found: descriptor.incarnation })
            }
            _ => Ok((endpoint, descriptor)),
        }
    }

    /// As [`describe`](Self::describe), of a segment whose owner was at `endpoint`. Uses the directory only
    /// if no process answers there.
    pub(crate) fn describe_again(
        &self,
        metadata: &dyn Metadata,
        name: &str,
        endpoint: &str,
    ) -> Result<Descriptor, SegmentError> {
        match self.fetch(endpoint) {
            Err(SegmentError::Unreachable { .. }) if name != endpoint => Ok(self.describe(metadata, name)?.1),
            other => other.map_err(|error| at(name, endpoint, error)),
        }
    }
}

impl Metadata for PeerToPeer {
    fn locate(&self, name: &str) -> Result<Located, SegmentError> {
        Ok(Located { endpoint: name.into(), incarnation: None })
    }
}

/// An error of an endpoint, with the name of the segment that was looked up.
fn at(name: &str, endpoint: &str, error: SegmentError) -> SegmentError {
    match error {
        SegmentError::Unreachable { reason, .. } if name != endpoint => {
            SegmentError::Unreachable { name: name.into(), reason: std::format!("at {endpoint}: {reason}") }
        }
        SegmentError::Protocol { what, .. } => SegmentError::Protocol { name: name.into(), what },
        other => other,
    }
}
