//! One enum for each area: the connection to the master, operations on objects, start-up.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use store_core::wire::VERSION;
use store_core::{ErrorCode, Trace, WireError};
use te_engine::{RegisterError, StartError};

/// Why the master gave no (good) answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum RpcError {
    /// Not an address.
    Address {
        /// What was given.
        text: String,
    },
    /// Nobody there.
    Connect {
        /// Where.
        address: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The connection broke; whether the request was carried out is not known.
    Lost {
        /// The system's reason.
        source: io::Error,
    },
    /// There is no connection; the request was not sent.
    Disconnected,
    /// No answer in time; whether the request was carried out is not known.
    TimedOut {
        /// How long it was waited for.
        call_ms_max: u32,
        /// The operation, as the master's log names it.
        trace: Trace,
    },
    /// The master speaks another version.
    Version {
        /// Which.
        theirs: u16,
    },
    /// The request cannot be sent, or the answer cannot be read.
    Wire(WireError),
    /// The master does not know the tenant, or not with this secret.
    Tenant {
        /// Its name.
        tenant: String,
    },
    /// A secret that was given is not the master's.
    Secret,
    /// The master refused.
    Refused(ErrorCode),
    /// This process is a fork of the one that connected.
    Forked,
}

/// What a child hears that goes on using what its parent made.
pub(crate) const FORKED: &str = "this process was forked: connect anew in the child";

/// Why an operation on an object did not succeed. A miss is not an error.
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The master, or the operation, said no.
    Refused(ErrorCode),
    /// The master could not be asked.
    Rpc(RpcError),
    /// Memory could not be registered or allocated.
    Memory(RegisterError),
    /// The thread of the [`AsyncClient`](crate::AsyncClient) has ended; whether the operation was carried out is not known.
    Stopped,
    /// This process is a fork of the one that connected. What was under way is the parent's.
    Forked,
    /// Nodes cut this client off: it was stopped for longer than they wait, and its space is somebody else's by now.
    Expelled,
}

/// Why a client or a node did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConnectError {
    /// A field of the configuration cannot be.
    Config {
        /// Which.
        field: &'static str,
        /// What it may be.
        need: &'static str,
    },
    /// The master could not be reached.
    Rpc(RpcError),
    /// This process is a fork of the one that started the node.
    Forked,
    /// Another node that lives has the name.
    Held {
        /// Which.
        name: String,
        /// Where the other is.
        endpoint: String,
        /// How long the master has not heard of it, milliseconds.
        silent_ms: u64,
    },
    /// The transfer engine did not start.
    Engine(StartError),
    /// Its memory could not be allocated or registered.
    Memory(RegisterError),
    /// No thread.
    System(io::Error),
}

impl RpcError {
    /// As one of the store's codes.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(code) => *code,
            Self::Tenant { .. } => ErrorCode::TenantNotRegistered,
            Self::Secret => ErrorCode::PermissionDenied,
            Self::TimedOut { .. } => ErrorCode::RpcTimeout,
            Self::Version { .. } => ErrorCode::InvalidVersion,
            Self::Wire(error) => error.code(),
            Self::Forked => ErrorCode::Forked,
            Self::Address { .. } | Self::Connect { .. } | Self::Lost { .. } | Self::Disconnected => {
                ErrorCode::RpcFail
            }
        }
    }

    /// Whether waiting may change it: nobody is there yet, or the master is starting.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::Lost { .. }
                | Self::Disconnected
                | Self::TimedOut { .. }
                | Self::Refused(ErrorCode::UnavailableInCurrentStatus)
        )
    }

    /// Whether the connection is of no more use, and a new one might do better.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Disconnected | Self::Connect { .. })
    }
}

impl ConnectError {
    /// Whether waiting may change it: the master is away, or starting.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(self, Self::Rpc(error) if error.is_transient())
    }
}

impl StoreError {
    /// The store's code of it, under Mooncake's number.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(code) => *code,
            Self::Rpc(error) => error.code(),
            Self::Memory(_) => ErrorCode::InvalidParams,
            Self::Forked => ErrorCode::Forked,
            Self::Expelled => ErrorCode::Expelled,
            Self::Stopped => ErrorCode::UnavailableInCurrentStatus,
        }
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { text } => write!(f, "`{text}` is no address: write host:port, or unix:/path"),
            Self::Connect { address, source } => {
                write!(f, "no master at {address}: {source}: check that it runs, and its address")
            }
            Self::Lost { source } => write!(f, "the connection to the master broke: {source}: try again"),
            Self::Disconnected => f.write_str("not connected to the master: try again"),
            Self::TimedOut { call_ms_max, trace } => {
                write!(
                    f,
                    "the master did not answer operation {trace} within {call_ms_max} ms: check its load, or raise \
                     `call_ms_max`"
                )
            }
            Self::Version { theirs } => {
                write!(
                    f,
                    "the master speaks protocol {theirs}, this client {VERSION}: run the same release on both sides"
                )
            }
            Self::Wire(error) => error.fmt(f),
            Self::Tenant { tenant } => write!(
                f,
                "the master does not let tenant `{}` in: check its name and secret, or add it to the master's tenants",
                tenant.escape_debug()
            ),
            Self::Secret => f.write_str(
                "the master refused a secret that was given: compare the cluster secret and the admin secret with the master's",
            ),
            Self::Refused(code) => code.fmt(f),
            Self::Forked => f.write_str(FORKED),
        }
    }
}

impl StdError for RpcError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Connect { source, .. } | Self::Lost { source } => Some(source),
            Self::Wire(error) => Some(error),
            Self::Refused(code) => Some(code),
            _ => None,
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(code) => code.fmt(f),
            Self::Rpc(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Stopped => f.write_str("the client was stopped, or its thread has died: start a new one"),
            Self::Forked => f.write_str(FORKED),
            Self::Expelled => f.write_str(
                "nodes cut this client off, because it was stopped for longer than they wait: connect a new one, and \
                 register its memory there",
            ),
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Refused(code) => Some(code),
            Self::Rpc(error) => Some(error),
            Self::Memory(error) => Some(error),
            Self::Stopped | Self::Forked | Self::Expelled => None,
        }
    }
}

impl From<ErrorCode> for StoreError {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::Forked => Self::Forked,
            ErrorCode::Expelled => Self::Expelled,
            code => Self::Refused(code),
        }
    }
}

impl From<RpcError> for StoreError {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Refused(code) => Self::Refused(code),
            RpcError::Forked => Self::Forked,
            error => Self::Rpc(error),
        }
    }
}

impl From<RegisterError> for StoreError {
    fn from(error: RegisterError) -> Self {
        match error {
            RegisterError::Forked => Self::Forked,
            error => Self::Memory(error),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { field, need } => write!(f, "configuration: {field} {need}"),
            Self::Rpc(error) => error.fmt(f),
            Self::Forked => f.write_str(FORKED),
            Self::Held { name, endpoint, silent_ms } => write!(
                f,
                "the name `{}` is held by the node at {}, which the master heard of {silent_ms} ms ago: stop that node, \
                 choose another name, or take the name over",
                name.escape_debug(),
                endpoint.escape_debug()
            ),
            Self::Engine(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::System(error) => write!(f, "the system refused: {error}"),
        }
    }
}

impl StdError for ConnectError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Config { .. } | Self::Held { .. } | Self::Forked => None,
            Self::Rpc(error) => Some(error),
            Self::Engine(error) => Some(error),
            Self::Memory(error) => Some(error),
            Self::System(error) => Some(error),
        }
    }
}

impl From<RpcError> for ConnectError {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Forked => Self::Forked,
            error => Self::Rpc(error),
        }
    }
}

impl From<StartError> for ConnectError {
    fn from(error: StartError) -> Self {
        Self::Engine(error)
    }
}

impl From<RegisterError> for ConnectError {
    fn from(error: RegisterError) -> Self {
        Self::Memory(error)
    }
}
