//! Why memory cannot be exported over this fabric.

use std::fmt;
use std::mem::{Discriminant, discriminant};

use te_core::{Error, ErrorKind, RegionId};
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

/// Reasons that were reported, without the regions that they were of.
#[derive(Debug, Default)]
pub(crate) struct Reasons(Vec<(Discriminant<NotExported>, Option<Discriminant<NotShared>>)>);

impl Reasons {
    /// Writes why a region is not exported to the log: a warning, once for each reason.
    pub(crate) fn log(&mut self, id: RegionId, why: &NotExported) {
        if *why != NotExported::Private {
            self.write(id, "exported", why);
        }
    }

    /// The same, of a region that is exported to this host alone.
    pub(crate) fn log_across_hosts(&mut self, id: RegionId, why: &NotExported) {
        self.write(id, "exported to other hosts", why);
    }

    fn write(&mut self, id: RegionId, what: &str, why: &NotExported) {
        let device = if let NotExported::Device(why) = why { Some(discriminant(why)) } else { None };
        let reason = (discriminant(why), device);
        if self.0.contains(&reason) {
            log::info!("nvlink: region {id} is not {what}: {why}");
        } else {
            log::warn!("nvlink: region {id} is not {what}: {why}; others of this reason are told as info");
            self.0.push(reason);
        }
    }
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
