//! Why memory cannot be exported over this fabric.

use std::fmt;

use te_core::{Error, ErrorKind};
use te_gpu::NotShared;

/// Why a region with remote rights cannot be exported over this fabric. Its memory can still be the local
/// side of slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotExported {
    /// It has no remote rights.
    Private,
    /// The driver shares it with no other process.
    Device(NotShared),
    /// It is host memory that is not in a memory file.
    NotSharedMemory,
    /// It is shared memory that peers may not write, with the right to write.
    NotWritable,
}

impl NotExported {
    /// The error that `export` returns for it.
    pub(crate) const fn error(&self) -> Error {
        match self {
            Self::Private => Error::new(ErrorKind::AccessDenied),
            Self::Device(why) => why.error(),
            Self::NotSharedMemory | Self::NotWritable => Error::new(ErrorKind::Unsupported),
        }
    }
}

impl fmt::Display for NotExported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Private => f.write_str("the region has no remote rights: register it with REMOTE_READ or REMOTE_WRITE"),
            Self::Device(why) => why.fmt(f),
            Self::NotSharedMemory => {
                f.write_str("host memory that is not in a memory file: allocate it with SharedMemory")
            }
            Self::NotWritable => f.write_str(
                "peers may not write this shared memory: allocate it with peers_may_write, or register it for reading",
            ),
        }
    }
}

impl std::error::Error for NotExported {}
