//! One error enum per area of the API. Every message says what to do next.

use std::boxed::Box;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::string::String;

use te_core::{Error, Status};
use te_fabric::ConfigError;
use te_host::topology::MatrixFileError;

use crate::metadata::MetadataError;

/// Why an engine did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// A field of [`Config`](crate::Config) has an invalid value.
    Config {
        /// Path of the field, as a configuration file has it below the engine's section.
        field: &'static str,
        /// The condition that the value violates: a phrase that follows the field's name.
        need: &'static str,
    },
    /// A setting of a fabric is out of its limits.
    Setting {
        /// The fabric.
        fabric: &'static str,
        /// The setting and its limits.
        source: ConfigError,
    },
    /// The control port could not be opened.
    Listen {
        /// `Config::listen`.
        addr: std::net::SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// A fabric that must start did not.
    Fabric {
        /// The name of the fabric.
        name: &'static str,
        /// Why it did not start.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The configured topology file is not a valid priority matrix.
    Topology(MatrixFileError),
    /// A setting of the memory of GPUs is out of its limits.
    Gpu(Box<dyn StdError + Send + Sync>),
    /// The system refused a thread, a file descriptor or random bytes.
    System(io::Error),
}

/// Why a peer was not [expelled](crate::TransferEngine::expel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpelError {
    /// The identity is 0, or that of this engine.
    Identity,
    /// The maximum number of peers is expelled already; nothing has changed.
    Full,
    /// A rail failed to expel the peer; others may have expelled it.
    Rails(Error),
    /// This process is a fork of the one that started the engine.
    Forked,
    /// The engine has shut down.
    Closed,
}

/// Why memory was not registered, unregistered or allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterError {
    /// The memory has no bytes.
    Empty,
    /// Some of the bytes are registered already.
    Overlap {
        /// First address of the registered region.
        addr: u64,
        /// Length of the registered region, bytes.
        len: u64,
    },
    /// `regions_max` regions are registered.
    Full {
        /// `Config::regions_max`.
        regions_max: u32,
    },
    /// The region was never registered, or has been unregistered.
    NotFound,
    /// Operations in flight use the region.
    Busy {
        /// How many requests of this engine; 0 when it is an operation of a peer.
        requests: u32,
    },
    /// The system refused to allocate the memory, with this `errno`.
    Alloc(i32),
    /// Every rail refused the memory; this is the last refusal.
    Rails(Error),
    /// This process is a fork of the one that started the engine.
    Forked,
    /// The engine has shut down.
    Closed,
}

/// Why a segment cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SegmentError {
    /// The handle is not of an open segment: it was never opened, or has been closed.
    NotFound,
    /// The name is neither `host:port` nor a name that the directory accepts.
    Name(String),
    /// The directory has no segment of this name.
    Unknown {
        /// Name of the segment.
        name: String,
        /// The directory: kind and address.
        server: String,
    },
    /// The directory could not be read.
    Metadata(MetadataError),
    /// The owner of the segment did not answer.
    Unreachable {
        /// Name of the segment.
        name: String,
        /// The system's reason.
        reason: String,
    },
    /// The process that answered is not an engine of this release, or is broken.
    Protocol {
        /// Name of the segment.
        name: String,
        /// What was wrong with its answer.
        what: &'static str,
    },
    /// Another process answers under this name now.
    Restarted {
        /// Name of the segment.
        name: String,
        /// The incarnation that was opened.
        expected: u64,
        /// The incarnation that answers.
        found: u64,
    },
    /// The maximum number of remote regions is attached.
    Full {
        /// `Config::remote_regions_max`.
        remote_regions_max: u32,
    },
    /// No fabric that both sides have reaches the segment.
    NoRail {
        /// Name of the segment.
        name: String,
        /// The reason of the last fabric.
        source: Error,
    },
    /// Transfers in flight use the segment.
    Busy,
    /// The owner refused: the notification is too long, its queue is full, or the cluster secret is another
    /// one.
    Refused {
        /// Name of the segment.
        name: String,
        /// Why the owner refused.
        what: &'static str,
    },
    /// The segment is foreign: its [`Metadata`](crate::Metadata) describes it, and does not carry this
    /// operation to its owner.
    Foreign {
        /// Name of the segment.
        name: String,
    },
    /// This process is a fork of the one that started the engine.
    Forked,
    /// The engine has shut down.
    Closed,
}

/// Why a batch was not accepted, or how it ended if it did not complete.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransferError {
    /// The batch has no request, or more than `requests_per_batch_max`.
    BatchLength {
        /// Number of requests in the batch.
        requests: usize,
        /// `Config::requests_per_batch_max`.
        requests_per_batch_max: u32,
    },
    /// A request is invalid; no byte of the batch was moved.
    Request {
        /// Index of the request in the batch.
        index: usize,
        /// What is wrong with it.
        problem: RequestProblem,
    },
    /// The segment of a request cannot be used; no byte of the batch was moved.
    Segment {
        /// Index of the request in the batch.
        index: usize,
        /// Why the segment cannot be used.
        source: SegmentError,
    },
    /// Too many batches or commands are outstanding: wait for some, free them, then try again.
    Full,
    /// The batch was freed.
    NotFound,
    /// The batch has not ended: wait for it, or cancel it and wait.
    Busy,
    /// The wait timed out; the batch continues.
    WaitTimedOut,
    /// The batch ended other than `Completed`.
    Ended {
        /// The status with which it ended.
        status: Status,
        /// Requests that did not complete.
        requests_failed: u32,
        /// The error of the request that failed first.
        error: Error,
        /// Bytes of the batch may still land at the target: a fence is needed before the ranges are used for
        /// anything else.
        fence_needed: bool,
    },
    /// This process is a fork of the one that started the engine.
    Forked,
    /// The engine has shut down.
    Closed,
}

/// What is wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestProblem {
    /// Its length is 0.
    Empty,
    /// Its local range does not lie in one registered region.
    LocalRange,
    /// Its remote range does not lie in one region that the segment's owner exports.
    RemoteRange,
    /// The access rights of the local region do not allow this direction.
    LocalAccess,
    /// The owner does not export the remote region for this direction.
    RemoteAccess,
    /// The local region is a [`Registered`](te_core::Registered) buffer, which only `read` and `write` may
    /// move.
    Owned,
    /// No rail of the [fabric that the batch names](crate::SubmitOptions::fabric) has both the local region
    /// and the remote one.
    Fabric,
    /// Its remote offset in the region, or its length, is not a multiple of the
    /// [granule](te_core::Capabilities::granule_bytes) of any rail that reaches both regions: 64 bytes for CXL
    /// pools whose hosts are not coherent, `nvmeof.granule_bytes` for NVMe over TCP.
    Granule,
}

/// An error of one of several regions that were given together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AtIndex<E> {
    /// The index of the region among those that were given.
    pub index: usize,
    /// What is wrong with it.
    pub error: E,
}

impl<E: fmt::Display> fmt::Display for AtIndex<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "region {}: {}", self.index, self.error)
    }
}

impl<E: StdError> StdError for AtIndex<E> {}

/// An error, and the buffer that the call had taken.
pub struct GivenBack<E, B> {
    /// Why the call failed.
    pub error: E,
    /// The buffer, as it was before the call.
    pub buffer: B,
}

impl<E, B> GivenBack<E, B> {
    pub(crate) fn new(error: impl Into<E>, buffer: B) -> Self {
        Self { error: error.into(), buffer }
    }
}

impl<E: fmt::Debug, B> fmt::Debug for GivenBack<E, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GivenBack").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<E: fmt::Display, B> fmt::Display for GivenBack<E, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: StdError, B> StdError for GivenBack<E, B> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.error.source()
    }
}

impl StartError {
    /// The setting that is invalid, by its path below the engine's section of a configuration, and its
    /// allowed values.
    #[must_use]
    pub fn setting(&self) -> Option<(String, String)> {
        match self {
            Self::Config { field, need } => Some(((*field).into(), (*need).into())),
            Self::Setting { fabric, source: ConfigError { field, min, max, .. } } => {
                // A field's name may be followed by a note in parentheses.
                let (field, note) = field.find(" (").map_or((*field, ""), |at| field.split_at(at));
                Some((format!("{fabric}.{field}"), format!("must be {min} to {max}{note}")))
            }
            _ => None,
        }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { .. } | Self::Setting { .. } => {
                let (field, need) = self.setting().unwrap_or_default();
                write!(f, "configuration: {field} {need}")
            }
            Self::Listen { addr, source } => {
                write!(
                    f,
                    "control port {addr}: {source}: choose another address as `listen`, or port 0 for any free port"
                )
            }
            Self::Fabric { name, source } => {
                write!(f, "fabric {name} did not start: {source}: repair it, or leave it out of `fabrics`")
            }
            Self::Topology(source) => write!(f, "{source}: repair it, or set `topology` to \"auto\""),
            Self::Gpu(source) => write!(f, "gpu: {source}"),
            Self::System(source) => write!(f, "the system refused: {source}"),
        }
    }
}

/// Without `source`: each message contains its cause already, and a chain would print it twice. So do the
/// other errors here.
impl StdError for StartError {}

impl fmt::Display for ExpelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity => f.write_str(
                "no peer has this identity: it is 0, or that of this engine, which cannot expel itself",
            ),
            Self::Full => {
                write!(f, "{} peers are expelled already: restart this process", te_core::EXPELLED_MAX)
            }
            Self::Rails(error) => write!(f, "a fabric could not expel the peer: {error}"),
            Self::Forked => f.write_str(FORKED),
            Self::Closed => f.write_str("the engine has shut down: start another"),
        }
    }
}

impl StdError for ExpelError {}

impl From<io::Error> for StartError {
    fn from(source: io::Error) -> Self {
        Self::System(source)
    }
}

impl RegisterError {
    /// For `map_err` of an allocation.
    pub(crate) fn alloc(error: io::Error) -> Self {
        Self::Alloc(error.raw_os_error().unwrap_or(0))
    }
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a region needs at least one byte"),
            Self::Overlap { addr, len } => {
                write!(
                    f,
                    "overlaps the region of {len} bytes at {addr:#x}: use that one, or unregister it first"
                )
            }
            Self::Full { regions_max } => {
                write!(f, "{regions_max} regions are registered: unregister some, or raise `regions_max`")
            }
            Self::NotFound => {
                f.write_str("no such region: it was never registered, or has been unregistered")
            }
            Self::Busy { requests: 0 } => f.write_str("a peer is using the region: try again"),
            Self::Busy { requests } => {
                write!(
                    f,
                    "{requests} requests in flight use the region: wait for or cancel their batches, then try again"
                )
            }
            Self::Alloc(errno) => {
                write!(
                    f,
                    "cannot allocate shared memory: {}: ask for less",
                    io::Error::from_raw_os_error(*errno)
                )
            }
            Self::Rails(error) => write!(f, "every fabric refused the memory; the last one: {error}"),
            Self::Forked => f.write_str(FORKED),
            Self::Closed => f.write_str("the engine has shut down: start another"),
        }
    }
}

impl StdError for RegisterError {}

impl fmt::Display for SegmentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("no such segment: it was never opened, or has been closed"),
            Self::Name(name) => {
                write!(
                    f,
                    "segment name {name:?} is not host:port: use the address that its owner prints, or set \
                     `metadata.source` to the directory that has the name"
                )
            }
            Self::Unknown { name, server } => write!(
                f,
                "no segment {name:?} is registered: {server}: check the name, and that its owner runs and uses the same \
                 directory"
            ),
            Self::Metadata(error) => write!(f, "cannot look up the segment: {error}"),
            Self::Unreachable { name, reason } => {
                write!(
                    f,
                    "segment {name:?} does not answer ({reason}): check that its process runs and is reachable"
                )
            }
            Self::Protocol { name, what } => {
                write!(
                    f,
                    "segment {name:?}: {what}: check the address, and run the same release on both sides"
                )
            }
            Self::Restarted { name, expected, found } => {
                write!(
                    f,
                    "segment {name:?} restarted (incarnation {found}, expected {expected}): open it again"
                )
            }
            Self::Full { remote_regions_max } => {
                write!(
                    f,
                    "{remote_regions_max} remote regions are attached: close segments, or raise `remote_regions_max`"
                )
            }
            Self::NoRail { name, source } => {
                write!(f, "no fabric reaches segment {name:?}: {source}: enable one that both sides have")
            }
            Self::Busy => {
                f.write_str("transfers in flight use the segment: wait for or cancel them, then try again")
            }
            Self::Refused { name, what } => write!(f, "segment {name:?} refused: {what}"),
            Self::Foreign { name } => write!(
                f,
                "segment {name:?} belongs to another system, which cannot do this: move bytes only, or open a \
                 segment of an engine"
            ),
            Self::Forked => f.write_str(FORKED),
            Self::Closed => f.write_str("the engine has shut down: start another"),
        }
    }
}

impl StdError for SegmentError {}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BatchLength { requests, requests_per_batch_max } => {
                write!(f, "a batch holds 1 to {requests_per_batch_max} requests, not {requests}: split it")
            }
            Self::Request { index, problem } => write!(f, "request {index}: {problem}"),
            Self::Segment { index, source } => write!(f, "request {index}: {source}"),
            Self::Full => f.write_str("too many batches are outstanding: wait for some, then try again"),
            Self::NotFound => f.write_str("no such batch: it was freed"),
            Self::Busy => f.write_str("the batch has not ended: wait for it, or cancel it and wait"),
            Self::WaitTimedOut => f.write_str("the batch has not ended yet: wait longer, or cancel it"),
            Self::Ended { status, requests_failed, error, fence_needed } => {
                write!(f, "{requests_failed} requests ended {status:?}: {error}")?;
                if *fence_needed {
                    f.write_str("; fence the segment before its memory is used for anything else")?;
                }
                Ok(())
            }
            Self::Forked => f.write_str(FORKED),
            Self::Closed => f.write_str("the engine has shut down: start another"),
        }
    }
}

impl StdError for TransferError {}

impl fmt::Display for RequestProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => "its length is 0: give it a length of at least 1",
            Self::LocalRange => "the local range does not lie in one registered region: register it first",
            Self::RemoteRange => {
                "the remote range does not lie in one exported region: check the address, or refresh the segment"
            }
            Self::LocalAccess => "the local region is not registered for this direction: register it with the right for it",
            Self::RemoteAccess => {
                "the owner does not export the remote region for this direction: export it with the right for it"
            }
            Self::Owned => "the local region is an owned buffer: use `read` and `write` with the buffer itself",
            Self::Fabric => {
                "no rail of the named fabric reaches it: enable the fabric on both sides, or name none"
            }
            Self::Granule => {
                "its remote offset or its length is no multiple of the granule of the fabric that reaches it \
                 (CXL pools: 64 bytes; NVMe over TCP: nvmeof.granule_bytes): round both"
            }
        })
    }
}

/// This process is a fork of the one that started the engine. Becomes the `Forked` of each error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forked;

/// Why an engine cannot be called any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unavailable {
    Closed,
    Forked,
}

macro_rules! from_unavailable {
    ($($error:ty),*) => {$(
        impl From<Forked> for $error {
            fn from(_: Forked) -> Self {
                Self::Forked
            }
        }

        impl From<Unavailable> for $error {
            fn from(unavailable: Unavailable) -> Self {
                match unavailable {
                    Unavailable::Closed => Self::Closed,
                    Unavailable::Forked => Self::Forked,
                }
            }
        }
    )*};
}
from_unavailable!(RegisterError, SegmentError, TransferError, ExpelError);

/// The message of every `Forked`.
const FORKED: &str =
    "this process is a fork of the one that started the engine: start another engine after the fork, or exec";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_names_both_incarnations_and_what_to_do() {
        let error = SegmentError::Restarted { name: "node-7".into(), expected: 9, found: 12 };
        assert_eq!(
            std::string::ToString::to_string(&error),
            r#"segment "node-7" restarted (incarnation 12, expected 9): open it again"#
        );
    }
}
