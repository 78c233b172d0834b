//! Where a segment's owner is: asked itself by its address, or looked up by a name.
//!
//! A name with a colon is an address, `host:port` of the owner's control port, and nobody else is asked about it. Any other
//! name (`node-7`, `prefill/3`) is looked up in a [`Directory`]: a server over HTTP, Redis, or etcd. There each name has an
//! [`Entry`]: endpoint and incarnation of its owner. What the owner exports is not kept there. It is asked for it, as ever:
//! exports change with every registration and may be megabytes long, and the answer proves that the owner lives. When another
//! incarnation answers at the endpoint than the entry says, opening ends with [`SegmentError::Restarted`].
//!
//! # What is stored
//! Under the key `snowskin/segment/NAME`, the entry as JSON, at most [`ENTRY_BYTES_MAX`] bytes:
//!
//! ```json
//! {"v":1,"name":"node-7","endpoint":"10.0.0.7:7400","incarnation":1792023600000000}
//! ```
//!
//! `v` is the form's version: another one is refused as another release's. Members that are not known are ignored.
//!
//! * The entry has a time to live, [`MetadataConfig::ttl_ms`](crate::MetadataConfig), which its owner renews at a third of it. The
//!   entry of an owner that died is gone after that time at the latest; one that stops in order takes it away.
//! * Every write is a compare-and-set against what was read. A higher incarnation takes the name at once, a lower one never
//!   while the higher one's entry is there.
//! * HTTP: `ETag`, `If-Match`, `If-None-Match` and `ttl_ms=` (served by the store's master under `/metadata`). Redis: `SET …
//!   PX`, and scripts that compare and set. etcd: its JSON gateway, transactions on `mod_revision`, and a lease.
//!
//! Nothing of it is on the data path: names are looked up on the thread that opens a segment, and a thread of its own keeps
//! the entry alive. A server that does not answer is left alone for a while, longer each time; meanwhile whoever asks
//! is told at once.

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

use crate::config::Config;
use crate::control::{Answer, Asker, Request, call};
use crate::descriptor::Descriptor;
use crate::error::SegmentError;
use crate::secret::Secret;

pub use directory::Directory;
pub(crate) use entry::is_segment_name;
pub use entry::{ENTRY_BYTES_MAX, Entry};
pub use error::{MetadataError, SourceError};
pub use keeper::Registration;
pub(crate) use keeper::{Keeper, KeeperState};
pub use source::MetadataSource;

/// A way from a segment's name to its owner. Called on the thread that opens a segment; may block.
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
    /// Which life of it registered; `None`: whoever answers there.
    pub incarnation: Option<u64>,
}

/// No server: the name of a segment is `host:port`, and its owner is asked itself.
#[derive(Clone, Debug)]
pub struct PeerToPeer {
    /// How long one request may take.
    pub timeout: Duration,
    /// Longest descriptor, bytes.
    pub frame_bytes_max: u32,
    /// What to prove to owners, and to have proved by them.
    pub cluster_secret: Secret,
}

impl PeerToPeer {
    /// As an engine of this configuration asks.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self {
            timeout: Duration::from_millis(config.control.timeout_ms.into()),
            frame_bytes_max: config.control.frame_bytes_max,
            cluster_secret: config.cluster_secret.clone(),
        }
    }

    pub(crate) fn asker(&self) -> Asker<'_> {
        Asker { timeout: self.timeout, frame_bytes_max: self.frame_bytes_max, secret: &self.cluster_secret }
    }

    /// The descriptor of the engine at `endpoint`, as it is now.
    ///
    /// # Errors
    /// `Name`, `Unreachable`, `Protocol`; `Refused` when one of us does not know the other's cluster secret.
    pub fn fetch(&self, endpoint: &str) -> Result<Descriptor, SegmentError> {
        let protocol = |what| SegmentError::Protocol { name: String::from(endpoint), what };
        match call(endpoint, &Request::Descriptor, self.asker())? {
            Answer::Descriptor(bytes) => Descriptor::parse(&bytes).map_err(protocol),
            _ => Err(protocol("it answers another question than it was asked")),
        }
    }

    /// Finds the owner of the segment `name` and asks it for its descriptor. Gives its endpoint, too.
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

    /// As [`describe`](Self::describe), of a segment whose owner was at `endpoint`. The directory is asked only when nobody
    /// answers there.
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

/// An endpoint's error, told of the segment that was looked up.
fn at(name: &str, endpoint: &str, error: SegmentError) -> SegmentError {
    match error {
        SegmentError::Unreachable { reason, .. } if name != endpoint => {
            SegmentError::Unreachable { name: name.into(), reason: std::format!("at {endpoint}: {reason}") }
        }
        SegmentError::Protocol { what, .. } => SegmentError::Protocol { name: name.into(), what },
        other => other,
    }
}
