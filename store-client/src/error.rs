//! One enum for each area: the connection to the master, operations of every client, start-up.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use store_core::wire::VERSION;
use store_core::{ErrorCode, Trace, WireError};
use te_engine::{RegisterError, StartError};

use crate::item::PARTS_MAX;
use crate::local::LocalError;

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

/// Why an operation of a client did not succeed, of whichever client and of one item or a batch. A miss is
/// not an error.
///
/// Cheap to clone: what fails a whole request is the result of each of its items.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The master, or the operation, said no.
    Refused(ErrorCode),
    /// The master could not be asked.
    Rpc(Arc<RpcError>),
    /// The node on this machine could not be asked.
    Local(Arc<LocalError>),
    /// Memory could not be registered or allocated.
    Memory(RegisterError),
    /// What is to be read is longer than its sink.
    TooLong {
        /// Bytes that the sink has room for.
        room: u64,
    },
    /// The object ends before the part that is to be read.
    BeyondEnd {
        /// The object would have to have so many bytes, at least.
        end: u64,
    },
    /// A part of an object that has no byte, or goes beyond the largest offset; or a range together with
    /// [`Sink::Fragments`](crate::Sink::Fragments), which name their own.
    BadRange {
        /// Where in the object it begins.
        start: u64,
        /// Bytes.
        len: u64,
    },
    /// More parts than an item may have.
    TooManyParts {
        /// How many.
        parts: usize,
    },
    /// The range does not lie inside memory that is registered with this client; or not inside its buffer.
    Unregistered {
        /// Where it begins, bytes from the beginning of the region or buffer.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The memory is of another client, or of a connection that is gone.
    ForeignMemory,
    /// A fabric, or a node that was given up, may still write the memory, or store what is in it.
    Held,
    /// The arena of a local client has no room for it.
    ArenaFull {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes of the longest free part.
        largest_free: u64,
        /// Bytes of the arena.
        arena_bytes: u64,
    },
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
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(code) => *code,
            Self::Rpc(error) => error.code(),
            Self::Local(error) => error.code(),
            Self::TooLong { .. } | Self::ArenaFull { .. } => ErrorCode::BufferOverflow,
            Self::Memory(_)
            | Self::BeyondEnd { .. }
            | Self::BadRange { .. }
            | Self::TooManyParts { .. }
            | Self::Unregistered { .. }
            | Self::ForeignMemory => ErrorCode::InvalidParams,
            Self::Forked => ErrorCode::Forked,
            Self::Expelled => ErrorCode::Expelled,
            Self::Held | Self::Stopped => ErrorCode::UnavailableInCurrentStatus,
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
            Self::Local(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::TooLong { room } => write!(
                f,
                "what is to be read is longer than the {room} bytes that there is room for: ask for the object's \
                 size, then pass a larger buffer, or read a part"
            ),
            Self::BeyondEnd { end } => {
                write!(f, "the object ends before byte {end}: ask for its size, and read a part that it has")
            }
            Self::BadRange { start, len } => write!(
                f,
                "a part of {len} bytes from byte {start} on cannot be read: give it at least one byte and an end \
                 that an object can have, and name no range beside fragments"
            ),
            Self::TooManyParts { parts } => {
                write!(f, "{parts} parts of one item are too many: pass {PARTS_MAX} at most")
            }
            Self::Unregistered { offset, len } => write!(
                f,
                "{len} bytes from offset {offset} on do not lie inside the registered memory that they name: check \
                 offset and length, and that the memory is still registered with this client"
            ),
            Self::ForeignMemory => f.write_str(
                "the buffer is of another client, or of a connection that is gone: allocate another with this \
                 client, and fill it again",
            ),
            Self::Held => f.write_str(
                "a transfer that was given up may still use the buffer: try again later, or use another buffer",
            ),
            Self::ArenaFull { wanted, largest_free, arena_bytes } => write!(
                f,
                "{wanted} bytes do not fit the arena: of {arena_bytes} bytes, {largest_free} are free in one piece: drop \
                 buffers, or ask for a larger arena"
            ),
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
            Self::Rpc(error) => Some(&**error),
            Self::Local(error) => Some(&**error),
            Self::Memory(error) => Some(error),
            _ => None,
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
            error => Self::Rpc(Arc::new(error)),
        }
    }
}

impl From<LocalError> for StoreError {
    fn from(error: LocalError) -> Self {
        match error {
            LocalError::Forked => Self::Forked,
            error => Self::Local(Arc::new(error)),
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
