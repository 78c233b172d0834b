//! How the owner of a segment is found: by its address, or by a name that a directory has.
//!
//! A name with a colon is an address, `host:port` of the owner's control port; no directory is used for it.
//! Any other name (`node-7`, `prefill/3`) is looked up in a [`Directory`]: a server over HTTP, Redis, or
//! etcd. There each name has an [`Entry`]: endpoint and incarnation of its owner. What the owner exports is
//! not stored there but always fetched from the owner: exports change with every registration and may be
//! megabytes long, and the answer proves that the owner is alive. If the incarnation that answers at the
//! endpoint is not that of the entry, opening ends with [`SegmentError::Restarted`]. What is stored, and how,
//! is in the crate `te-metadata`.
//!
//! A [`Metadata`] may also [describe](Metadata::describe) a segment itself, when its owner is no engine of
//! this project: a *foreign* segment. It has no control port, and the same metadata carries notifications
//! and probes to its owner, or refuses them.
//!
//! None of this is on the data path: names are looked up on the thread that opens a segment, and a separate
//! thread renews the entry. After a server did not answer, it is not asked during a backoff, which grows each
//! time; requests fail at once meanwhile.

use std::string::String;
use std::time::Duration;

use te_core::Secret;

use crate::config::Config;
use crate::control::{Answer, Request, Requester, call};
use crate::descriptor::Descriptor;
use crate::error::SegmentError;
use crate::request::Liveness;

pub use te_metadata::{
    Directory, ENTRY_BYTES_MAX, Entry, KeyValue, MetadataError, MetadataSource, Registration, SourceError,
};
pub(crate) use te_metadata::{Keeper, KeeperState, is_segment_name};

/// Finds the owner of a segment by the segment's name. Called on the thread that opens a segment; may block.
pub trait Metadata: Send + Sync {
    /// Where the owner of the segment `name` is now.
    ///
    /// # Errors
    /// `Name`, `Unknown`, `Metadata`.
    fn locate(&self, name: &str) -> Result<Located, SegmentError>;

    /// The descriptor of the segment `name`, if this metadata makes it itself: the segment is foreign then,
    /// and [`locate`](Self::locate) is not called. `None`: its owner is located, and asked for it.
    ///
    /// The descriptor has the exports of the rails that reach the owner. Its incarnation stands for one life
    /// of the owner: when [`refresh_segment`](crate::TransferEngine::refresh_segment) finds another one, the
    /// segment has restarted.
    fn describe(&self, name: &str) -> Option<Result<Descriptor, SegmentError>> {
        let _ = name;
        None
    }

    /// Sends a notification to the owner of the foreign segment `segment`, within a time limit of its own.
    ///
    /// # Errors
    /// `Foreign` if its owner accepts none, as by default; why it was not sent.
    fn notify(&self, segment: &str, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        let _ = (name, message);
        Err(SegmentError::Foreign { name: segment.into() })
    }

    /// Whether the owner of the foreign segment `segment` is alive; waits at most `timeout`.
    ///
    /// # Errors
    /// `Foreign` if that cannot be found out, as by default.
    fn probe(&self, segment: &str, timeout: Duration) -> Result<Liveness, SegmentError> {
        let _ = timeout;
        Err(SegmentError::Foreign { name: segment.into() })
    }
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

    /// Finds the owner of the segment `name` and fetches its descriptor. Returns its endpoint, too, unless
    /// the segment is foreign.
    pub(crate) fn describe(
        &self,
        metadata: &dyn Metadata,
        name: &str,
    ) -> Result<(Option<String>, Descriptor), SegmentError> {
        if let Some(described) = metadata.describe(name) {
            return described.map(|descriptor| (None, descriptor));
        }
        let Located { endpoint, incarnation } = metadata.locate(name)?;
        let descriptor = self.fetch(&endpoint).map_err(|error| at(name, &endpoint, error))?;
        match incarnation {
            Some(expected) if expected != descriptor.incarnation => {
                Err(SegmentError::Restarted { name: name.into(), expected, found: descriptor.incarnation })
            }
            _ => Ok((Some(endpoint), descriptor)),
        }
    }

    /// As [`describe`](Self::describe), of a segment whose owner was at `endpoint`. Uses the directory only
    /// if no process answers there.
    pub(crate) fn describe_again(
        &self,
        metadata: &dyn Metadata,
        name: &str,
        endpoint: Option<&str>,
    ) -> Result<Descriptor, SegmentError> {
        let Some(endpoint) = endpoint else { return Ok(self.describe(metadata, name)?.1) };
        match self.fetch(endpoint) {
            Err(SegmentError::Unreachable { .. }) if name != endpoint => Ok(self.describe(metadata, name)?.1),
            other => other.map_err(|error| at(name, endpoint, error)),
        }
    }
}

impl Metadata for Directory {
    fn locate(&self, name: &str) -> Result<Located, SegmentError> {
        if name.contains(':') {
            return Ok(Located { endpoint: name.into(), incarnation: None });
        }
        if !is_segment_name(name) {
            return Err(SegmentError::Name(name.into()));
        }
        match self.lookup(name).map_err(SegmentError::Metadata)? {
            Some(entry) => Ok(Located { endpoint: entry.endpoint, incarnation: Some(entry.incarnation) }),
            None => Err(SegmentError::Unknown { name: name.into(), server: self.server() }),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_a_colon_are_addresses_and_are_not_looked_up() {
        // No server listens there: a look-up would fail.
        let source = "http://127.0.0.1:1/metadata".parse().unwrap();
        let directory = Directory::open(&source, Duration::from_secs(5)).unwrap().unwrap();
        let located = directory.locate("10.0.0.7:7400").unwrap();
        assert_eq!(located, Located { endpoint: "10.0.0.7:7400".into(), incarnation: None });
        assert_eq!(directory.locate("a b"), Err(SegmentError::Name("a b".into())));
        let unknown = directory.locate("node-7").unwrap_err();
        assert!(matches!(unknown, SegmentError::Metadata(MetadataError::Unreachable { .. })), "{unknown}");
    }
}
