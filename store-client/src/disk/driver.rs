//! [`Driver`]: carries out reads, writes and syncs without making its caller wait.

use std::io;
use std::sync::Arc;

use store_core::disk::IoError;

use super::sys::{AlignedBuffer, Lent};

/// Carries out reads, writes and syncs of one disk, many at a time.
///
/// Neither function waits. Each operation ends exactly once; when its [`Completion`] is returned, nothing
/// touches its memory any more. A driver that is dropped with operations in flight keeps their memory until
/// the kernel has ended them.
pub trait Driver: Send {
    /// What it is called in metrics: `threads`, `io_uring`.
    fn name(&self) -> &'static str;

    /// Begins an operation, or queues it: as many are in flight at a time as the queue depth allows.
    fn submit(&mut self, io: Io);

    /// Called after a number of submissions: passes them to the kernel in one call where that is possible.
    fn flush(&mut self) {}

    /// The next operation that has ended. Whenever there is a new one, the driver rings the
    /// [`Bell`](super::Bell) that it was made with.
    fn poll(&mut self) -> Option<Completion>;
}

/// A read, a write or a sync.
#[derive(Debug)]
pub struct Io {
    /// Names it in its completion.
    pub op: u64,
    /// Where it begins on the disk, bytes.
    pub offset: u64,
    /// What to do.
    pub work: IoWork,
}

/// The kinds of operations.
#[derive(Debug)]
pub enum IoWork {
    /// Write the parts, one after the other.
    Write(Vec<Part>),
    /// Read until the destination is full.
    Read(Destination),
    /// Make durable what was written before.
    Sync,
}

/// A part of a write.
#[derive(Debug)]
pub enum Part {
    /// These bytes, from this index on.
    Bytes(Arc<[u8]>, u32),
    /// Memory that a caller has lent.
    Lent {
        /// The memory.
        memory: Arc<Lent>,
        /// Where the part begins in it.
        offset: u32,
        /// Bytes of the part.
        bytes: u32,
    },
    /// Zeros.
    Zeros(u32),
}

/// Where a read goes to.
#[derive(Debug)]
pub enum Destination {
    /// To this buffer, which the completion returns.
    Buffer(AlignedBuffer),
    /// To memory that a caller has lent.
    Lent {
        /// The memory.
        memory: Arc<Lent>,
        /// Where to begin in it.
        offset: u32,
        /// Bytes to read.
        bytes: u32,
    },
}

/// How an operation ended.
#[derive(Debug)]
pub struct Completion {
    /// The operation.
    pub op: u64,
    /// Bytes that were read or written, from its beginning on; 0 for a sync.
    pub result: Result<u32, DriverError>,
    /// The buffer of a read into [`Destination::Buffer`].
    pub data: Option<AlignedBuffer>,
}

/// Why an operation failed: the kind that the core knows, and the number of the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// For the core.
    pub kind: IoError,
    /// `errno`, for the log; 0: unknown.
    pub errno: i32,
}

impl From<io::Error> for DriverError {
    fn from(error: io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(0);
        let kind = match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoError::NoSpace,
            _ => IoError::Device,
        };
        Self { kind, errno }
    }
}

impl IoWork {
    /// Bytes to read or write; 0 for a sync.
    pub(super) fn bytes(&self) -> u32 {
        let of_part = |part: &Part| match part {
            Part::Bytes(bytes, from) => bytes.len() as u32 - from,
            Part::Lent { bytes, .. } | Part::Zeros(bytes) => *bytes,
        };
        match self {
            Self::Write(parts) => parts.iter().map(of_part).sum(),
            Self::Read(Destination::Buffer(buffer)) => buffer.len() as u32,
            Self::Read(Destination::Lent { bytes, .. }) => *bytes,
            Self::Sync => 0,
        }
    }
}
