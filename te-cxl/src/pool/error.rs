//! Why a pool could not be made, opened or used.

use core::fmt;
use std::io;

use super::format::{EXTENT_BYTES_MIN, PEERS_MAX, VERSION};

/// Why a pool could not be made, opened or used.
#[derive(Debug)]
#[non_exhaustive]
pub enum PoolError {
    /// The path is neither a devdax device nor a regular file.
    NotMappable,
    /// There is no pool on the device or in the file.
    NotAPool,
    /// There is a pool already, which is not overwritten.
    Formatted {
        /// The name of the pool.
        uuid: [u8; 16],
    },
    /// The pool has another layout.
    Version {
        /// The version that it has.
        found: u32,
    },
    /// The checksum of the superblock is wrong.
    Crc,
    /// The superblock holds values that no pool has.
    Layout,
    /// It is another pool than the one that was asked for.
    Foreign {
        /// The name of the pool.
        found: [u8; 16],
        /// The name that was asked for.
        wanted: [u8; 16],
    },
    /// The device or file has too few bytes.
    TooSmall {
        /// The bytes that it has.
        bytes: u64,
        /// The bytes that it needs.
        needed: u64,
    },
    /// A setting of a new pool is out of its range.
    Setting {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A transport and its pool see other hosts' writes in different ways.
    OtherCoherence,
    /// A span of memory does not lie in the pool.
    Outside,
    /// The extents were not claimed, or not as one range, or in another epoch.
    NotClaimed {
        /// The first extent.
        first: u32,
        /// The number of extents.
        count: u32,
        /// The epoch that was given.
        epoch: u64,
    },
    /// This processor cannot do what the mode `flush` needs.
    NoFlush,
    /// There is no extent, or no peer, with this number.
    NoSuch {
        /// What there is not.
        what: &'static str,
        /// Its number.
        number: u64,
        /// How many there are.
        count: u64,
    },
    /// An extent, or a peer's page, belongs to a process that the master named later.
    Stale {
        /// The extent or the page.
        number: u32,
        /// The epoch in the pool.
        found: u64,
        /// The epoch that was given.
        given: u64,
    },
    /// A peer is still using an extent.
    InUse {
        /// The number of the peer.
        peer: u32,
    },
    /// The memory of the pool failed.
    Memory(te_core::Error),
    /// The system refused a step.
    System {
        /// What was tried, to be read after "could not".
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl PoolError {
    pub(crate) fn system(what: &'static str, errno: nix::errno::Errno) -> Self {
        Self::System { what, source: errno.into() }
    }

    /// The error for callers of a transport.
    #[must_use]
    pub fn kind(&self) -> te_core::ErrorKind {
        use te_core::ErrorKind;
        match self {
            Self::Stale { .. } => ErrorKind::Stale,
            Self::InUse { .. } => ErrorKind::Busy,
            Self::NotClaimed { .. } => ErrorKind::NotFound,
            Self::Outside => ErrorKind::OutOfRange,
            Self::NoSuch { .. } | Self::Setting { .. } | Self::OtherCoherence => ErrorKind::InvalidArgument,
            Self::NoFlush => ErrorKind::Unsupported,
            Self::Memory(error) => error.kind,
            Self::System { .. } => ErrorKind::System,
            _ => ErrorKind::Unreachable,
        }
    }
}

impl From<te_core::Error> for PoolError {
    fn from(error: te_core::Error) -> Self {
        Self::Memory(error)
    }
}

impl From<crate::lines::Fault> for PoolError {
    fn from(fault: crate::lines::Fault) -> Self {
        Self::Memory(fault.into())
    }
}

/// The name of a pool, as people read it.
pub(crate) struct Uuid<'a>(pub(crate) &'a [u8; 16]);

impl fmt::Display for Uuid<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotMappable => {
                f.write_str("it is neither a DAX device nor a file: name /dev/daxN.M, or a file")
            }
            Self::NotAPool => f.write_str("there is no pool: make one with `snowskin cxl format`"),
            Self::Formatted { uuid } => write!(
                f,
                "there is a pool already, {}: name another device, or force it; its contents are then lost",
                Uuid(uuid)
            ),
            Self::Version { found } => write!(
                f,
                "the pool has layout {found}, and this release reads {VERSION}: run the same release on all hosts"
            ),
            Self::Crc => f.write_str(
                "the checksum of the superblock is wrong: look for memory errors, then format the pool again",
            ),
            Self::Layout => {
                f.write_str("the superblock holds values that no pool has: format the pool again")
            }
            Self::Foreign { found, wanted } => write!(
                f,
                "it is the pool {}, not {}: name the device of that pool",
                Uuid(found),
                Uuid(wanted)
            ),
            Self::TooSmall { bytes, needed } => {
                write!(f, "it has {bytes} bytes, and {needed} are needed: name a larger device or file")
            }
            Self::Setting { what: "peers", value } => {
                write!(f, "peers is {value}: set it to a value from 1 to {PEERS_MAX}")
            }
            Self::Setting { what, value } => {
                write!(f, "{what} is {value}: set it to a multiple of {EXTENT_BYTES_MIN}")
            }
            Self::OtherCoherence => {
                f.write_str("the pool was opened for another coherence: use that of the transport's settings")
            }
            Self::Outside => f.write_str("the memory does not lie in this mapping of the pool"),
            Self::NotClaimed { first, count, epoch } => write!(
                f,
                "extents {first} to {} were not claimed together in epoch {epoch}: name a whole claim",
                u64::from(*first) + u64::from(*count).saturating_sub(1)
            ),
            Self::NoFlush => f.write_str(
                "coherence `flush` needs an x86_64 processor with CLFLUSH and cache lines of 64 bytes: set it to \
                 `hardware` if the hardware keeps the caches coherent",
            ),
            Self::NoSuch { what, number, count } => {
                write!(f, "there is no {what} {number}: the pool has {count}, from 0 on")
            }
            Self::Stale { number, found, given } => write!(
                f,
                "{number} was given away in epoch {found}, after epoch {given}: ask the master again"
            ),
            Self::InUse { peer } => {
                write!(f, "peer {peer} is still using it: try again, or give its page to a new process")
            }
            Self::Memory(error) => write!(f, "the memory of the pool failed: {error}"),
            Self::System { what, source } => write!(f, "could not {what}: {source}"),
        }
    }
}

impl std::error::Error for PoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::System { source, .. } => Some(source),
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}
