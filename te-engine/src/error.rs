//! One error enum for each area of the API. Every message says what to do next.

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
    /// A field of [`Config`](crate::Config) cannot be.
    Config {
        /// Which.
        field: &'static str,
        /// What it may be.
        need: &'static str,
    },
    /// A setting of a fabric is out of its limits.
    Setting {
        /// The fabric.
        fabric: &'static str,
        /// Which, and what it may be.
        source: ConfigError,
    },
    /// The control port could not be opened.
    Listen {
        /// `Config::listen`.
        addr: std::net::SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// A fabric that was asked for did not start.
    Fabric {
        /// Its name.
        name: &'static str,
        /// Why.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The priority matrix that the configuration names is none.
    Topology(MatrixFileError),
    /// The system gave no thread, descriptor or randomness.
    System(io::Error),
}

/// Why a peer was not [expelled](crate::TransferEngine::expel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExpelError {
    /// No peer has this identity: it is 0, or this engine's own.
    Identity,
    /// As many peers are refused as can be; nothing has changed.
    Full,
    /// A rail failed at it; others may have cut the peer off.
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
    /// No bytes.
    Empty,
    /// Bytes of it are registered already.
    Overlap {
        /// First address of the region in the way.
        addr: u64,
        /// Its length, bytes.
        len: u64,
    },
    /// `regions_max` regions are registered.
    Full {
        /// `Config::regions_max`.
        regions_max: u32,
    },
    /// No such region, or it was unregistered.
    NotFound,
    /// Transfers in flight use it.
    Busy {
        /// How many requests; 0 when it is a peer's operation.
        requests: u32,
    },
    /// The system has no such memory to give.
    Alloc(i32),
    /// Every rail refused it; this is the last refusal.
    Rails(Error),
    /// This process is a fork of the one that started the engine.
    Forked,
    /// The engine has shut down.
    Closed,
}

/// Why a segment is not, or no longer, usable.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SegmentError {
    /// The handle names nothing: never opened, or closed.
    NotFound,
    /// The name is neither `host:port` nor one that is looked up here.
    Name(String),
    /// The directory knows no segment of this name.
    Unknown {
        /// The segment.
        name: String,
        /// Which directory was asked.
        server: String,
    },
    /// The directory could not tell.
    Metadata(MetadataError),
    /// The owner could not be asked for its descriptor.
    Unreachable {
        /// The segment.
        name: String,
        /// What the system said.
        reason: String,
    },
    /// What answered is not an engine of this release, or is broken.
    Protocol {
        /// The segment.
        name: String,
        /// What was wrong.
        what: &'static str,
    },
    /// Another process answers under this name now.
    Restarted {
        /// The segment.
        name: String,
        /// The incarnation that was opened.
        expected: u64,
        /// The one that answers.
        found: u64,
    },
    /// Too many remote regions are attached.
    Full {
        /// `Config::segments_max`.
        segments_max: u32,
    },
    /// No fabric that both sides have reaches it.
    NoRail {
        /// The segment.
        name: String,
        /// The last fabric's reason.
        source: Error,
    },
    /// Transfers in flight use it.
    Busy,
    /// The owner refused (a notification that is too long, or one too many).
    Refused {
        /// The segment.
        name: String,
        /// Why.
        what: &'static str,
    },
    /// This process is a fork of the one that started the engine.
    Forked,
    /// The engine has shut down.
    Closed,
}

/// Why a batch was not accepted, or how it ended if not well.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransferError {
    /// A batch holds between 1 and `requests_per_batch_max` requests.
    BatchLength {
        /// How many it holds.
        requests: usize,
        /// `Config::requests_per_batch_max`.
        requests_per_batch_max: u32,
    },
    /// The request cannot be carried out as it stands; nothing was moved.
    Request {
        /// Its index in the batch.
        index: usize,
        /// What is wrong with it.
        problem: RequestProblem,
    },
    /// Its segment is not usable; nothing was moved.
    Segment {
        /// Index of the request in the batch.
        index: usize,
        /// Why not.
        source: SegmentError,
    },
    /// Too many batches or commands are outstanding: wait for some, free them, then try again.
    Full,
    /// The handle names nothing: the batch was freed.
    NotFound,
    /// It has not ended yet: wait, or cancel it and wait.
    Busy,
    /// The wait timed out; the batch goes on.
    WaitTimedOut,
    /// It ended, and not as `Completed`.
    Ended {
        /// How.
        status: Status,
        /// Requests that did not complete.
        requests_failed: u32,
        /// The first such request's error.
        error: Error,
        /// Whether bytes of it may still land at the target: fence before the range gets another owner.
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
    /// It moves no bytes.
    Empty,
    /// Its local range lies in no registered region, or in more than one.
    LocalRange,
    /// Its remote range lies in no region that the segment's owner exports, or in more than one.
    RemoteRange,
    /// The local region's access rights do not allow it.
    LocalAccess,
    /// The owner does not export the remote region for this direction.
    RemoteAccess,
    /// The local region is a [`Registered`](te_core::Registered) buffer, which only the owned API may move.
    Owned,
}

/// An error, and the buffer that the call had taken.
pub struct GivenBack<E, B> {
    /// What went wrong.
    pub error: E,
    /// What was to be used; as it was before the call.
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
    /// The setting at fault, as a configuration names it below the engine's, and what it may be.
    #[must_use]
    pub fn setting(&self) -> Option<(String, String)> {
        match self {
            Self::Config { field, need } => Some(((*field).into(), (*need).into())),
            Self::Setting { fabric, source: ConfigError { field, min, max, .. } } => {
                // What a field means is in brackets behind it.
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
                    "control port {addr}: {source}: choose another `listen`, or port 0 to have one picked"
                )
            }
            Self::Fabric { name, source } => {
                write!(f, "fabric {name} did not start: {source}: repair it, or turn it off in `fabrics`")
            }
            Self::Topology(source) => write!(f, "{source}: repair it, or set `topology` to \"auto\""),
            Self::System(source) => write!(f, "the system refused: {source}"),
        }
    }
}

/// Each sentence says its cause: told as a source as well, it would be read twice in a chain. So it is for the others here.
impl StdError for StartError {}

impl fmt::Display for ExpelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Identity => {
                f.write_str("no peer has this identity: 0 is nobody's, and an engine cannot expel itself")
            }
            Self::Full => {
                write!(f, "{} peers are refused already: restart this process", te_core::EXPELLED_MAX)
            }
            Self::Rails(error) => write!(f, "a fabric could not cut the peer off: {error}"),
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
            Self::NotFound => f.write_str("no such region: it was never registered, or is unregistered"),
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
            Self::NotFound => f.write_str("no such segment: it was never opened, or is closed"),
            Self::Name(name) => {
                write!(
                    f,
                    "segment name {name:?} is not host:port: use the name its owner prints, and say in `metadata` where \
                     others are looked up"
                )
            }
            Self::Unknown { name, server } => write!(
                f,
                "nobody has registered a segment {name:?}: {server}: check the name, and that its owner runs and uses the \
                 same directory"
            ),
            Self::Metadata(error) => write!(f, "looking the segment up: {error}"),
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
            Self::Full { segments_max } => {
                write!(
                    f,
                    "{segments_max} remote regions are attached: close segments, or raise `segments_max`"
                )
            }
            Self::NoRail { name, source } => {
                write!(f, "no fabric reaches segment {name:?}: {source}: switch on one that both sides have")
            }
            Self::Busy => {
                f.write_str("transfers in flight use the segment: wait for or cancel them, then try again")
            }
            Self::Refused { name, what } => write!(f, "segment {name:?} refused: {what}"),
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
                    f.write_str("; fence the segment before the range gets other bytes or another owner")?;
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
            Self::Empty => "moves no bytes: give it a length",
            Self::LocalRange => "the local range does not lie in one registered region: register it first",
            Self::RemoteRange => {
                "the remote range does not lie in one exported region: check the address, or refresh the segment"
            }
            Self::LocalAccess => "the local region is not registered for this direction",
            Self::RemoteAccess => "the owner does not export the remote region for this direction",
            Self::Owned => "the local region is an owned buffer: use `read` and `write` with the buffer itself",
        })
    }
}

/// This process is a fork of the one that something belongs to. Becomes the error of whatever was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forked;

/// Why nobody answers any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Silent {
    Closed,
    Forked,
}

macro_rules! gone {
    ($($error:ty),*) => {$(
        impl From<Forked> for $error {
            fn from(_: Forked) -> Self {
                Self::Forked
            }
        }

        impl From<Silent> for $error {
            fn from(silent: Silent) -> Self {
                match silent {
                    Silent::Closed => Self::Closed,
                    Silent::Forked => Self::Forked,
                }
            }
        }
    )*};
}
gone!(RegisterError, SegmentError, TransferError, ExpelError);

/// What a child hears that goes on using its parent's engine.
const FORKED: &str = "this process is a fork of the one that started the engine: start an engine of its own after the fork, \
                      or exec";

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
