//! Why a local client could not ask its node, or a server did not start.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::PathBuf;

use store_core::{ErrorCode, WireError};

use super::protocol::Refusal;
use crate::error::FORKED;

/// Why the node on this machine gave no (good) answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum LocalError {
    /// No node there.
    Connect {
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Somebody else's node.
    Stranger {
        /// Where.
        path: PathBuf,
        /// Whose.
        uid: u32,
    },
    /// The node does not take this client.
    Refused(Refusal),
    /// The connection broke; whether the request was carried out is not known.
    Lost {
        /// The system's reason.
        source: io::Error,
    },
    /// No answer in time; whether the request was carried out is not known. The arena was given up.
    TimedOut {
        /// How long it was waited for.
        call_ms_max: u32,
    },
    /// The request cannot be sent, or the answer cannot be read.
    Wire(WireError),
    /// The arena could not be mapped.
    Map {
        /// The system's reason.
        source: io::Error,
    },
    /// This process is a fork of the one that connected. The arena is the parent's.
    Forked,
}

/// Why a server for local clients did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum LocalStartError {
    /// A field of the configuration cannot be.
    Config {
        /// Which.
        field: &'static str,
        /// What it may be.
        need: &'static str,
    },
    /// Somebody serves there already.
    InUse {
        /// Where.
        path: PathBuf,
    },
    /// It cannot listen there.
    Bind {
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// No thread, or nothing to poll with.
    System(io::Error),
}

impl LocalError {
    /// As one of the store's codes.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(Refusal::Store(code)) => *code,
            Self::TimedOut { .. } => ErrorCode::RpcTimeout,
            Self::Refused(Refusal::Version { .. }) => ErrorCode::InvalidVersion,
            Self::Forked => ErrorCode::Forked,
            Self::Refused(_) => ErrorCode::UnavailableInCurrentStatus,
            Self::Wire(error) => error.code(),
            Self::Connect { .. } | Self::Stranger { .. } | Self::Lost { .. } | Self::Map { .. } => {
                ErrorCode::RpcFail
            }
        }
    }
}

impl fmt::Display for LocalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { path, source } => write!(
                f,
                "no node at {}: {source}: start one with a local socket (`snowskin node --local`), and name the same path",
                path.display()
            ),
            Self::Stranger { path, uid } => write!(
                f,
                "the node at {} runs as user {uid}: trust that user by number, or use a node of your own",
                path.display()
            ),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Lost { source } => write!(f, "the connection to the node broke: {source}: try again"),
            Self::TimedOut { call_ms_max } => write!(
                f,
                "the node did not answer within {call_ms_max} ms: check its load, or raise `call_ms_max`; buffers are to be \
                 allocated anew"
            ),
            Self::Wire(error) => error.fmt(f),
            Self::Map { source } => write!(f, "the node's arena cannot be mapped: {source}"),
            Self::Forked => f.write_str(FORKED),
        }
    }
}

impl StdError for LocalError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Connect { source, .. } | Self::Lost { source } | Self::Map { source } => Some(source),
            Self::Wire(error) => Some(error),
            Self::Refused(Refusal::Store(code)) => Some(code),
            _ => None,
        }
    }
}

impl From<WireError> for LocalError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl fmt::Display for LocalStartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { field, need } => write!(f, "configuration: {field} {need}"),
            Self::InUse { path } => {
                write!(f, "another node serves local clients at {}: choose another path", path.display())
            }
            Self::Bind { path, source } => {
                write!(
                    f,
                    "cannot listen at {}: {source}: choose a path in a directory that this user may write, of 107 \
                     bytes at most",
                    path.display()
                )
            }
            Self::System(error) => write!(f, "the system refused: {error}"),
        }
    }
}

impl StdError for LocalStartError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Bind { source, .. } | Self::System(source) => Some(source),
            _ => None,
        }
    }
}
