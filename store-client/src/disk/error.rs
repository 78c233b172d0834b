//! [`DiskError`]: why a disk cannot be formatted, opened or read.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use store_core::disk::OpenError;
use store_core::disk::format::GeometryError;

use super::packs::BucketFault;

/// Why a disk cannot be formatted, opened or read.
#[derive(Debug)]
#[non_exhaustive]
pub enum DiskError {
    /// A system call on the path failed.
    Io {
        /// The path.
        path: PathBuf,
        /// What was to be done: "open", "read".
        action: &'static str,
        /// The error.
        error: io::Error,
    },
    /// There is nothing at this path.
    Missing(PathBuf),
    /// The path is neither a regular file nor a block device.
    NotAFile(PathBuf),
    /// Another process, or another part of this one, has it open, or it is mounted.
    InUse(PathBuf),
    /// There is no such directory.
    NoDirectory(PathBuf),
    /// Another node has the directory of packs.
    Owned {
        /// The directory.
        path: PathBuf,
        /// The node: "node a".
        by: String,
    },
    /// A bucket did not do what was asked of it.
    Bucket {
        /// Its address.
        path: PathBuf,
        /// What was to be done: "open", "list".
        action: &'static str,
        /// Why it was not.
        fault: BucketFault,
    },
    /// The file system or the device does not support direct I/O.
    NoDirectIo(PathBuf),
    /// Direct I/O needs blocks that are longer than 4,096 bytes.
    Block {
        /// The path.
        path: PathBuf,
        /// Bytes of a block.
        bytes: u32,
    },
    /// The file system cannot reserve space for a file.
    NoFallocate(PathBuf),
    /// There is not enough space.
    NoSpace {
        /// The path.
        path: PathBuf,
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// Fewer bytes were allocated than were asked for.
    NotAllocated {
        /// The path.
        path: PathBuf,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that were allocated.
        allocated: u64,
    },
    /// The block device is shorter than the size that was asked for.
    TooShort {
        /// The path.
        path: PathBuf,
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes of the device.
        available: u64,
    },
    /// No size was given for a file that has none yet.
    NoSize(PathBuf),
    /// It contains something that is not a disk of Snowskin.
    Foreign(PathBuf),
    /// There is no superblock: it was never formatted.
    NotADisk(PathBuf),
    /// The superblock is of a later version.
    Version {
        /// The path.
        path: PathBuf,
        /// The version that it has.
        version: u16,
    },
    /// The file is shorter than the superblock says.
    Truncated {
        /// The path.
        path: PathBuf,
        /// Bytes that the superblock says.
        expected: u64,
        /// Bytes that there are.
        bytes: u64,
    },
    /// The namespace that the disk is said to be is not this disk.
    NotExported {
        /// The disk.
        path: PathBuf,
        /// What is wrong with the namespace, and with which one.
        why: String,
    },
    /// A size is not possible.
    Geometry(GeometryError),
    /// A setting is not possible.
    Open(OpenError),
    /// Threads or descriptors of this process could not be made.
    System(io::Error),
}

impl DiskError {
    pub(super) fn io(path: &Path, action: &'static str, error: io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, error }
    }
}

impl fmt::Display for DiskError {
    // Long because: one text per error.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, action, error } => write!(f, "{}: cannot {action}: {error}", path.display()),
            Self::Missing(path) => {
                write!(f, "{}: there is no such file: `snowskin disk format` makes one", path.display())
            }
            Self::NotAFile(path) => {
                write!(f, "{}: neither a regular file nor a block device: name one of these", path.display())
            }
            Self::InUse(path) => {
                write!(f, "{}: in use: stop the node that has it open, or unmount it", path.display())
            }
            Self::NoDirectory(path) => {
                write!(f, "{}: there is no such directory: mount or make it", path.display())
            }
            Self::Owned { path, by } => write!(
                f,
                "{}: {by} writes to this directory of packs: stop it, or give this node a name of its own",
                path.display()
            ),
            Self::Bucket { path, action, fault } => {
                write!(f, "{}: cannot {action}: {fault}", path.display())
            }
            Self::NotExported { path, why } => write!(
                f,
                "{}: its export is wrong: {why}: name the namespace that is this disk, and where the disk begins \
                 in it, in `disk_exports`",
                path.display()
            ),
            Self::NoDirectIo(path) => write!(
                f,
                "{}: this file system does not support direct I/O (O_DIRECT): use ext4, XFS or a block device",
                path.display()
            ),
            Self::Block { path, bytes } => write!(
                f,
                "{}: direct I/O needs blocks of {bytes} bytes here, and at most 4,096 are supported: use \
                 another device",
                path.display()
            ),
            Self::NoFallocate(path) => write!(
                f,
                "{}: this file system cannot reserve space for a file (fallocate): use ext4, XFS or a block \
                 device",
                path.display()
            ),
            Self::NoSpace { path, bytes } => write!(
                f,
                "{}: the file system has no room for {bytes} bytes: choose a smaller size, or free space",
                path.display()
            ),
            Self::NotAllocated { path, bytes, allocated } => write!(
                f,
                "{}: only {allocated} of {bytes} bytes were allocated, so that the disk could become full \
                 later: use ext4, XFS or a block device",
                path.display()
            ),
            Self::TooShort { path, bytes, available } => write!(
                f,
                "{}: the device has {available} bytes, fewer than the {bytes} asked for: leave the size out \
                 to use all of it",
                path.display()
            ),
            Self::NoSize(path) => {
                write!(f, "{}: the size of a new file is needed: 64GiB, for example", path.display())
            }
            Self::Foreign(path) => write!(
                f,
                "{}: contains something that is not a disk of Snowskin: check the path; --force overwrites it",
                path.display()
            ),
            Self::NotADisk(path) => write!(
                f,
                "{}: not a disk of Snowskin: no valid superblock; check the path, or format it",
                path.display()
            ),
            Self::Version { path, version } => write!(
                f,
                "{}: the format has version {version}, and this release reads {}: use a later release, or \
                 format it",
                path.display(),
                store_core::disk::format::VERSION
            ),
            Self::Truncated { path, expected, bytes } => write!(
                f,
                "{}: the file has {bytes} of the {expected} bytes that its superblock says: it was truncated; \
                 restore or format it",
                path.display()
            ),
            Self::Geometry(error) => error.fmt(f),
            Self::Open(error) => error.fmt(f),
            Self::System(error) => write!(f, "the threads of the disk cannot be started: {error}"),
        }
    }
}

impl std::error::Error for DiskError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { error, .. } | Self::System(error) => Some(error),
            Self::Geometry(error) => Some(error),
            Self::Open(error) => Some(error),
            Self::Bucket { fault, .. } => Some(fault),
            _ => None,
        }
    }
}
