//! Settings of a node's stage service.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use store_core::wire::KEYS_PER_BATCH_MAX;

use super::STAGE_ALIGNMENT;

/// Settings of a [`StageServer`](super::StageServer).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct StageConfig {
    /// Where the service listens; readers have to reach it. Port 0: any free port. Default `127.0.0.1:0`.
    pub listen: SocketAddr,
    /// Bytes of memory into which objects are read from disks, and from which readers fetch them. At least
    /// 1 MiB. Default 256 MiB.
    pub memory_bytes: u64,
    /// How long a staged object may be read, milliseconds; the deadline of the request is added. 100 to
    /// 600,000. Default 5,000.
    pub window_ms: u32,
    /// How much longer than that its memory is kept, milliseconds. 1 to 600,000. Default 500.
    pub guard_ms: u32,
    /// Most connections at a time. 1 to 65,536. Default 1,024.
    pub connections_max: u32,
    /// Most requests of one connection that are not answered. 1 to 4,096. Default 64.
    pub requests_max: u32,
    /// Most objects that are being read from disks, those in quarantine included. At least 1. Default 1,024.
    pub queue_items_max: u32,
    /// Most bytes that are being read from disks, those in quarantine included. A longer object is read
    /// alone. At least 1. Default 128 MiB.
    pub queue_bytes_max: u64,
}

impl Default for StageConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            memory_bytes: 256 << 20,
            window_ms: 5_000,
            guard_ms: 500,
            connections_max: 1_024,
            requests_max: 64,
            queue_items_max: 1_024,
            queue_bytes_max: 128 << 20,
        }
    }
}

impl StageConfig {
    /// Checks everything that can be checked before anything is opened.
    ///
    /// # Errors
    /// [`StageError::Config`] with the field and the values that it may have.
    pub fn validate(&self) -> Result<(), StageError> {
        let wrong = |field, need| Err(StageError::Config { field, need });
        if self.memory_bytes < 1 << 20 || usize::try_from(self.memory_bytes).is_err() {
            return wrong("memory_bytes", "must be at least 1048576");
        }
        if !(100..=600_000).contains(&self.window_ms) {
            return wrong("window_ms", "must be 100 to 600000");
        }
        if !(1..=600_000).contains(&self.guard_ms) {
            return wrong("guard_ms", "must be 1 to 600000");
        }
        if !(1..=65_536).contains(&self.connections_max) {
            return wrong("connections_max", "must be 1 to 65536");
        }
        if !(1..=KEYS_PER_BATCH_MAX as u32).contains(&self.requests_max) {
            return wrong("requests_max", "must be 1 to 4096");
        }
        if self.queue_items_max == 0 {
            return wrong("queue_items_max", "must be at least 1");
        }
        if self.queue_bytes_max == 0 {
            return wrong("queue_bytes_max", "must be at least 1");
        }
        Ok(())
    }

    pub(super) fn guard(&self) -> Duration {
        Duration::from_millis(self.guard_ms.into())
    }
}

/// Why a [`StageServer`](super::StageServer) did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StageError {
    /// A setting is invalid.
    Config {
        /// The field of [`StageConfig`].
        field: &'static str,
        /// The values that it may have.
        need: &'static str,
    },
    /// The staging memory cannot be used.
    Memory {
        /// Its address.
        addr: u64,
        /// Its length, bytes.
        len: u64,
    },
    /// The address cannot be listened at.
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The system refused a thread or a descriptor.
    System(io::Error),
}

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { field, need } => write!(f, "the stage service's `{field}` {need}"),
            Self::Memory { addr, len } => write!(
                f,
                "staging memory of {len} bytes at {addr:#x} cannot be used: it must begin at a multiple of \
                 {STAGE_ALIGNMENT} and hold at least one such block"
            ),
            Self::Listen { address, source } => write!(
                f,
                "the stage service cannot listen at {address}: {source}: choose another address or port"
            ),
            Self::System(source) => {
                write!(
                    f,
                    "the stage service cannot start: {source}: check the limits on threads and open files"
                )
            }
        }
    }
}

impl std::error::Error for StageError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Listen { source, .. } | Self::System(source) => Some(source),
            Self::Config { .. } | Self::Memory { .. } => None,
        }
    }
}
