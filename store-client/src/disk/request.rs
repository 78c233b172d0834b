//! What a disk is asked, and what it answers.

use std::time::Instant;

use store_core::disk::format::Stream;
use store_core::disk::{Adopted, Failure, Refused, Removed, Why};

use super::sys::Lent;

/// Asks for an object to be written to the disk.
#[derive(Debug)]
pub struct Demote {
    /// Names the request in its answer: chosen by the caller.
    pub id: u64,
    /// The object's tenant: a number that means the same after a restart of the master.
    pub tenant: u64,
    /// The object's key, 1 to 1,024 bytes.
    pub key: Box<[u8]>,
    /// The object's generation.
    pub generation: u64,
    /// Bytes of its data, without the trailer.
    pub len: u64,
    /// CRC-32C of its data, not bound to key and generation.
    pub crc32c: u32,
    /// Whether it was read since its put.
    pub stream: Stream,
    /// Data and trailer. They must not change until the answer, which returns the memory.
    pub source: Lent,
}

/// Asks for the image of an object to be read.
#[derive(Debug)]
pub struct Stage {
    /// Names the request in its answer: chosen by the caller.
    pub id: u64,
    /// Where the object is.
    pub locator: u64,
    /// Bytes of its data, without the trailer.
    pub len: u64,
    /// When the reader stops waiting.
    pub deadline: Instant,
    /// Where to read it to: at least as long as the [image](store_core::disk::format::Geometry::image_bytes).
    /// Memory that is aligned to [`memory_align`](super::DiskFile::memory_align) is read into without a copy.
    pub buffer: Lent,
}

/// What a disk has to tell. Every request is answered exactly once, with the memory that it lent.
#[derive(Debug)]
pub enum DiskEvent {
    /// These objects are on the disk. All of them are announced between the opening and [`Self::Ready`].
    Adopt {
        /// The lineage of the master that knew them.
        lineage: u64,
        /// At most 1,024 objects.
        objects: Vec<Adopted>,
    },
    /// Every object was announced, and objects can be written.
    Ready,
    /// Recovery found that tombstones are missing: nothing on the disk was announced, or will be.
    /// [`Self::Ready`] follows when that is durable.
    Distrusted,
    /// The object was written. It becomes durable with the next sync, which is not announced.
    Demoted {
        /// The id of the request.
        id: u64,
        /// Where the object is.
        locator: u64,
        /// What the request lent.
        source: Lent,
    },
    /// The object was not written.
    DemoteFailed {
        /// The id of the request.
        id: u64,
        /// Why.
        why: NotDone,
        /// What the request lent. `None`: only where the disk was closed while the kernel had not ended the
        /// write. The memory must not be reused; its owner is dropped when the write has ended.
        source: Option<Lent>,
    },
    /// The image is in the buffer. Whether it is the right one is for the reader to verify.
    Staged {
        /// The id of the request.
        id: u64,
        /// What the request lent.
        buffer: Lent,
    },
    /// The image was not read.
    ReadFailed {
        /// The id of the request.
        id: u64,
        /// Why.
        why: NotDone,
        /// What the request lent. `None`: the read has not ended, and the buffer must not be reused.
        /// [`Self::BufferFree`] follows when it has, unless the disk is closed before.
        buffer: Option<Lent>,
    },
    /// The read of a request that was answered before has ended.
    BufferFree {
        /// The id of the request.
        id: u64,
        /// What the request lent.
        buffer: Lent,
    },
    /// The removal is durable: the object will not be announced again. The master can forget its tombstone.
    Forgotten(Removed),
    /// The removal was not recorded.
    ForgetRefused {
        /// The object.
        object: Removed,
        /// Why.
        why: Refused,
    },
    /// The extent is to be given up. The master drops all places with a locator in this extent, waits until
    /// no reader uses them, and answers with [`reclaimed`](super::DiskService::reclaimed).
    Reclaim {
        /// The sequence of the extent.
        sequence: u64,
    },
    /// Nothing with a locator from `from` on and below `to` may be on the disk any more.
    Dropped {
        /// The first locator.
        from: u64,
        /// The locator behind the last one.
        to: u64,
    },
    /// The disk was cleared, as it was told to: no object that was on it will be announced again.
    Cleared,
    /// The disk was not cleared.
    ClearRefused(Refused),
    /// Nothing is written to the disk any more, or it could not be opened.
    Stopped(Why),
    /// The last event: the thread of the disk has ended.
    Closed {
        /// Whether everything that was written is durable, and no operation is left in the kernel.
        clean: bool,
    },
}

/// Why a request that was accepted was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotDone {
    /// It was refused before anything was ordered.
    Refused(Refused),
    /// It failed.
    Failed(Failure),
    /// The lent memory is shorter than the object, or cannot be reached by the kernel.
    Memory,
    /// The disk was closed.
    Closed,
}

impl std::fmt::Display for NotDone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) => why.fmt(f),
            Self::Failed(Failure::Device) => f.write_str("the disk reported an error: use another replica"),
            Self::Failed(Failure::Deadline) => f.write_str("the deadline passed before the disk answered"),
            Self::Failed(Failure::Abandoned) => {
                f.write_str("the disk became read-only, or was cleared, before the object was written")
            }
            Self::Failed(Failure::Removed) => f.write_str("the object was removed meanwhile"),
            Self::Memory => f.write_str("the lent memory is too short for the object, or not host memory"),
            Self::Closed => f.write_str("the disk was closed"),
        }
    }
}

/// A request that was not accepted, because the queue of the disk is full or the disk is closed. It is
/// returned as it was.
#[derive(Debug)]
pub struct Unsent<T> {
    /// The request.
    pub request: T,
    /// Whether trying again later can help.
    pub closed: bool,
}

impl<T> std::fmt::Display for Unsent<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.closed {
            true => "the disk is closed",
            false => "the queue of the disk is full: try again later",
        })
    }
}

impl<T: std::fmt::Debug> std::error::Error for Unsent<T> {}
