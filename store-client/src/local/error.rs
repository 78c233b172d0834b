//! Errors of local clients, and of the start of their server.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::PathBuf;

use store_core::{ErrorCode, WireError};

use super::protocol::Refusal;
use crate::error::FORKED;

/// Why a request to the node on this machine has no usable answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum LocalError {
    /// No node listens at the path.
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The node runs as a user that is not trusted.
    UntrustedUser {
        /// Path of the socket.
        path: PathBuf,
        /// User id of the node.
        uid: u32,
    },
    /// The node refused this client.
    Refused(Refusal),
    /// The node closed the connection before it answered the hello: it is being stopped, has no time for this
    /// client, or is of a release whose frames have another version.
    Unanswered {
        /// The error of the operating system.
        source: io::Error,
    },
    /// The connection broke; whether the node carried out the request is not known.
    Lost {
        /// The error of the operating system.
        source: io::Error,
    },
    /// No answer arrived in time; whether the node carried out the request is not known. The arena was given
    /// up.
    TimedOut {
        /// How long the caller waited, milliseconds.
        call_ms_max: u32,
    },
    /// The request could not be encoded, or the answer could not be decoded.
    Wire(WireError),
    /// The arena could not be mapped.
    Map {
        /// The error of the operating system.
        source: io::Error,
    },
    /// This process is a fork of the process that connected. The arena belongs to the parent.
    Forked,
}

/// Why a server for local clients did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum LocalStartError {
    /// A field of the configuration has an invalid value.
    Config {
        /// Name of the field.
        field: &'static str,
        /// The values that the field may have.
        need: &'static str,
    },
    /// Another server listens at the path.
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The socket could not be created.
    Bind {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The operating system did not create a thread or a poller.
    System(io::Error),
}

impl LocalError {
    /// The store's error code for this error.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(Refusal::Store(code)) => *code,
            Self::TimedOut { .. } => ErrorCode::RpcTimeout,
            Self::Refused(Refusal::Version { .. }) => ErrorCode::InvalidVersion,
            Self::Forked => ErrorCode::Forked,
            Self::Refused(_) => ErrorCode::UnavailableInCurrentStatus,
            Self::Wire(error) => error.code(),
            Self::Connect { .. }
            | Self::UntrustedUser { .. }
            | Self::Unanswered { .. }
            | Self::Lost { .. }
            | Self::Map { .. } => ErrorCode::RpcFail,
        }
    }
}

impl fmt::Display for LocalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect { path, source } => write!(
                f,
                "no node at {}: {source}: start a node with a local socket (`snowskin node --local`) and use the same \
                 path on both sides",
                path.display()
            ),
            Self::UntrustedUser { path, uid } => write!(
                f,
                "the node at {} runs as user {uid}, who is not trusted: use a node that runs as this user, or, in a \
                 program that embeds the client, add {uid} to `LocalConfig::trusted_uids`",
                path.display()
            ),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Unanswered { source } => write!(
                f,
                "the node closed the connection before it answered: {source}: try again; if that fails too, run the \
                 same release on both sides"
            ),
            Self::Lost { source } => write!(f, "the connection to the node broke: {source}: try again"),
            Self::TimedOut { call_ms_max } => write!(
                f,
                "the node did not answer within {call_ms_max} ms: check its load, or raise `call_ms_max`; then allocate \
                 new buffers"
            ),
            Self::Wire(error) => error.fmt(f),
            Self::Map { source } => {
                write!(f, "the node's arena cannot be mapped: {source}: check the limits on memory")
            }
            Self::Forked => f.write_str(FORKED),
        }
    }
}

impl StdError for LocalError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Connect { source, .. }
            | Self::Unanswered { source }
            | Self::Lost { source }
            | Self::Map { source } => Some(source),
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
                    "cannot listen at {}: {source}: choose a path of at most 107 bytes in a directory that this user \
                     may write",
                    path.display()
                )
            }
            Self::System(error) => {
                write!(
                    f,
                    "the operating system did not create a thread or a poller: {error}: check its limits"
                )
            }
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
