//! [`EngineError`]: why a call of a session failed, and Mooncake's number for it.

use std::fmt;

use te_engine::{RegisterError, SegmentError, StartError, TransferError};

use te_mooncake::{ExportError, PeerError};

use crate::codes;
use crate::config::ConfigError;

/// Why a call of a [`Session`](super::Session) failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum EngineError {
    /// An argument is invalid: a sentence that names it and says what to do.
    Argument(String),
    /// The metadata string, or another setting, is invalid.
    Config(ConfigError),
    /// The engine did not start.
    Start(StartError),
    /// Mooncake's ports were not opened, or the metadata server did not take this engine's entries.
    Wire(te_mooncake::StartError),
    /// The memory was not exported to Mooncake peers.
    Export(ExportError),
    /// The operating system refused what the session needs.
    System(std::io::Error),
    /// The memory overlaps memory that is registered.
    Overlap {
        /// First address of the registered memory.
        addr: u64,
        /// Its length, bytes.
        len: u64,
    },
    /// No registered memory begins at this address.
    NotRegistered {
        /// The address.
        addr: u64,
    },
    /// A fabric or the operating system refused the memory.
    Memory(RegisterError),
    /// The peer, or the metadata server, did not answer a question, or not as it should.
    Peer(PeerError),
    /// The peer, or the metadata server, could not be reached, or it has no such segment.
    Segment {
        /// The name of the segment.
        name: String,
        /// Why.
        source: SegmentError,
    },
    /// There is no batch with this id, or it has been freed.
    UnknownBatch {
        /// The id.
        batch: u64,
    },
    /// The batch has no room for the requests.
    BatchFull {
        /// Requests that the batch was allocated for.
        capacity: usize,
        /// Requests that are in it.
        used: usize,
    },
    /// The batch has not ended.
    BatchBusy {
        /// The id.
        batch: u64,
    },
    /// The maximum number of batches is in use.
    TooManyBatches {
        /// That number.
        batches_max: usize,
    },
    /// A transfer did not complete.
    Transfer(TransferError),
}

impl EngineError {
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::Argument(what.into())
    }

    /// Mooncake's number for functions that return 0 or a negative number ([`codes::engine`]).
    #[must_use]
    pub fn code(&self) -> i32 {
        use codes::engine as code;
        match self {
            Self::Overlap { .. } => code::ADDRESS_OVERLAPPED,
            Self::NotRegistered { .. } => code::ADDRESS_NOT_REGISTERED,
            Self::Memory(RegisterError::Busy { .. }) | Self::BatchBusy { .. } => code::BATCH_BUSY,
            Self::Memory(RegisterError::NotFound) => code::ADDRESS_NOT_REGISTERED,
            Self::Memory(RegisterError::Overlap { .. }) => code::ADDRESS_OVERLAPPED,
            Self::Memory(RegisterError::Empty) => code::INVALID_ARGUMENT,
            Self::Export(ExportError::Metadata(_)) => code::METADATA,
            Self::Memory(_) | Self::Export(_) => code::MEMORY,
            Self::Segment { .. } | Self::Peer(_) => code::METADATA,
            Self::BatchFull { .. } | Self::TooManyBatches { .. } => code::TOO_MANY_REQUESTS,
            Self::Argument(_)
            | Self::Config(_)
            | Self::Start(_)
            | Self::Wire(_)
            | Self::System(_)
            | Self::UnknownBatch { .. }
            | Self::Transfer(_) => code::INVALID_ARGUMENT,
        }
    }

    /// Mooncake's number for functions that take a batch and return 0 or a positive number
    /// ([`codes::status`]).
    #[must_use]
    pub fn status(&self) -> i32 {
        use codes::status as code;
        match self {
            Self::Overlap { .. } | Self::Memory(RegisterError::Overlap { .. }) => code::ADDRESS_OVERLAPPED,
            Self::NotRegistered { .. } | Self::Memory(RegisterError::NotFound) => {
                code::ADDRESS_NOT_REGISTERED
            }
            Self::Export(ExportError::Metadata(_)) => code::METADATA,
            Self::Memory(_) | Self::Export(_) => code::MEMORY,
            Self::BatchBusy { .. } => code::BATCH_BUSY,
            Self::BatchFull { .. } | Self::TooManyBatches { .. } => code::TOO_MANY_REQUESTS,
            Self::Segment { source: SegmentError::NoRail { .. }, .. } => code::NOT_SUPPORTED_TRANSPORT,
            Self::Segment { .. } | Self::Peer(_) => code::METADATA,
            Self::Argument(_)
            | Self::Config(_)
            | Self::Start(_)
            | Self::Wire(_)
            | Self::System(_)
            | Self::UnknownBatch { .. }
            | Self::Transfer(_) => code::INVALID_ARGUMENT,
        }
    }
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Argument(what) => f.write_str(what),
            Self::Config(error) => error.fmt(f),
            Self::Start(error) => error.fmt(f),
            Self::Wire(error) => error.fmt(f),
            Self::Export(error) => error.fmt(f),
            Self::Peer(error) => error.fmt(f),
            Self::System(error) => write!(f, "the system refused: {error}"),
            Self::Overlap { addr, len } => write!(
                f,
                "the memory overlaps the {len} bytes that are registered at {addr:#x}: use those, or unregister them \
                 first"
            ),
            Self::NotRegistered { addr } => write!(
                f,
                "no registered memory begins at {addr:#x}: it was never registered, or has been unregistered"
            ),
            Self::Memory(error) => error.fmt(f),
            Self::Segment { source, .. } => source.fmt(f),
            Self::UnknownBatch { batch } => {
                write!(f, "there is no batch {batch:#x}: it was never allocated, or has been freed")
            }
            Self::BatchFull { capacity, used } => write!(
                f,
                "the batch was allocated for {capacity} requests and has {used} already: allocate a larger one"
            ),
            Self::BatchBusy { batch } => {
                write!(f, "batch {batch:#x} has not ended: wait for its requests, then free it")
            }
            Self::TooManyBatches { batches_max } => {
                write!(f, "{batches_max} batches are in use: free those that have ended")
            }
            Self::Transfer(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for EngineError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Start(error) => Some(error),
            Self::Wire(error) => Some(error),
            Self::Export(error) => Some(error),
            Self::Peer(error) => Some(error),
            Self::System(error) => Some(error),
            Self::Memory(error) => Some(error),
            Self::Segment { source, .. } => Some(source),
            Self::Transfer(error) => Some(error),
            _ => None,
        }
    }
}

impl From<ConfigError> for EngineError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error)
    }
}

impl From<StartError> for EngineError {
    fn from(error: StartError) -> Self {
        Self::Start(error)
    }
}

impl From<TransferError> for EngineError {
    fn from(error: TransferError) -> Self {
        Self::Transfer(error)
    }
}

impl From<te_mooncake::StartError> for EngineError {
    fn from(error: te_mooncake::StartError) -> Self {
        Self::Wire(error)
    }
}

impl From<ExportError> for EngineError {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Overlap { addr, len } => Self::Overlap { addr, len },
            error => Self::Export(error),
        }
    }
}

impl From<RegisterError> for EngineError {
    fn from(error: RegisterError) -> Self {
        match error {
            RegisterError::Overlap { addr, len } => Self::Overlap { addr, len },
            error => Self::Memory(error),
        }
    }
}
