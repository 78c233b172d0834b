//! What a stage service reads from.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mio::Waker;
use store_core::message::ExportedDisk;
use store_core::{ErrorCode, SegmentNo};
use te_core::MemSpan;
use te_engine::SharedRegion;

use std::sync::Arc;

/// The disks of a node, as its stage service sees them.
pub trait StageSource: Send + Sync {
    /// Begins to read an object, and returns at once. The service's thread calls it, so it must not block.
    ///
    /// A job that cannot be taken, because a queue is full or because nothing is at its locator, is
    /// [finished](StageJob::finish) with an error before the call returns.
    fn stage(&self, job: StageJob);

    /// Where readers reach a disk without its node, and where the extents with these sequences begin on it,
    /// bytes. `None`: it is not exported, as no disk is by default.
    fn locate(&self, disk: SegmentNo, sequences: &[u64]) -> Option<(Arc<Exported>, Vec<Option<u64>>)> {
        let _ = (disk, sequences);
        None
    }
}

/// A disk that readers reach without its node: what [`ExportedDisk`] says, which explains the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// [`ExportedDisk::uuid`].
    pub uuid: [u8; 16],
    /// [`ExportedDisk::bytes`].
    pub bytes: u64,
    /// [`ExportedDisk::extent_bytes`].
    pub extent_bytes: u32,
    /// [`ExportedDisk::address`].
    pub address: SocketAddr,
    /// [`ExportedDisk::nqn`].
    pub nqn: String,
    /// [`ExportedDisk::nsid`].
    pub nsid: u32,
    /// [`ExportedDisk::offset`].
    pub offset: u64,
}

impl Exported {
    /// What a node says. `None`: it cannot be.
    #[cfg_attr(not(feature = "nvmeof"), allow(dead_code, reason = "for the reader of namespaces"))]
    pub(crate) fn of(said: &ExportedDisk<'_>) -> Option<Self> {
        let ExportedDisk { uuid, bytes, extent_bytes, nsid, offset, .. } = *said;
        let address = said.address.parse().ok()?;
        let this = Self { uuid, bytes, extent_bytes, address, nqn: said.nqn.to_owned(), nsid, offset };
        (extent_bytes > 0 && offset.checked_add(bytes).is_some()).then_some(this)
    }
}

/// An object that is to be read from a disk into a buffer.
///
/// The owner of the job may write the buffer until it [finishes](Self::finish) the job, and nothing else
/// touches it meanwhile. The buffer stays mapped as long as the job exists, even if the service has stopped.
/// Readers may have read permission to it: they are told where it is only after the job was finished.
pub struct StageJob {
    disk: SegmentNo,
    locator: u64,
    len: u64,
    deadline: Instant,
    buffer: MemSpan,
    number: u64,
    /// `None`: the job was finished.
    hub: Option<Arc<Hub>>,
}

impl StageJob {
    pub(super) const fn new(
        (disk, locator, len): (SegmentNo, u64, u64),
        deadline: Instant,
        buffer: MemSpan,
        number: u64,
        hub: Arc<Hub>,
    ) -> Self {
        Self { disk, locator, len, deadline, buffer, number, hub: Some(hub) }
    }

    /// The disk's number.
    #[must_use]
    pub const fn disk(&self) -> SegmentNo {
        self.disk
    }

    /// Where the object is on the disk, as the reader says.
    #[must_use]
    pub const fn locator(&self) -> u64 {
        self.locator
    }

    /// Bytes of its data, as the reader says. Its trailer follows ([`store_core::chunks`]).
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the object has no data. No such job is made.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// When the reader stops waiting. A read that was not begun by then need not begin.
    #[must_use]
    pub const fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Where data and trailer go. Its address and its length are multiples of
    /// [`STAGE_ALIGNMENT`](super::STAGE_ALIGNMENT); the length is at least that of data and trailer.
    #[must_use]
    pub const fn buffer(&self) -> MemSpan {
        self.buffer
    }

    /// Ends the job: data and trailer are in the buffer, or the reason why not. Call it when nothing of the
    /// job, and no device, touches the buffer any more, however late that is. Any thread may call it.
    ///
    /// `SegmentNotFound`: there is no such disk; `ObjectNotFound`: nothing is at the locator;
    /// `InvalidParams`: the object there has another length; `UnavailableInCurrentStatus`: the disk is too
    /// busy; `TransferFail`: the disk failed.
    pub fn finish(mut self, result: Result<(), ErrorCode>) {
        if let Some(hub) = self.hub.take() {
            hub.end(self.number, result.map_or_else(JobEnd::Failed, |()| JobEnd::Read));
        }
    }
}

impl Drop for StageJob {
    fn drop(&mut self) {
        if let Some(hub) = self.hub.take() {
            hub.end(self.number, JobEnd::Lost);
        }
    }
}

impl fmt::Debug for StageJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { disk, locator, len, deadline, buffer, number, hub: _ } = self;
        f.debug_struct("StageJob")
            .field("number", number)
            .field("disk", disk)
            .field("locator", locator)
            .field("len", len)
            .field("deadline", deadline)
            .field("buffer", buffer)
            .finish()
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobEnd {
    Read,
    Failed(ErrorCode),
    /// It was dropped: something may still write the buffer.
    Lost,
}

/// Where jobs report their end. It keeps the staging memory as long as there are jobs.
pub(super) struct Hub {
    ended: Mutex<Vec<(u64, JobEnd)>>,
    waker: Waker,
    region: SharedRegion,
}

impl Hub {
    pub(super) const fn new(waker: Waker, region: SharedRegion) -> Self {
        Self { ended: Mutex::new(Vec::new()), waker, region }
    }

    pub(super) const fn region(&self) -> &SharedRegion {
        &self.region
    }

    pub(super) fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            log::warn!("the stage service's thread cannot be woken: {error}");
        }
    }

    fn end(&self, number: u64, end: JobEnd) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push((number, end));
        // The first one wakes the thread, which takes all.
        let first = ended.len() == 1;
        drop(ended);
        if first {
            self.wake();
        }
    }

    /// Moves the jobs that have ended to `into`, which is empty.
    pub(super) fn take_ended(&self, into: &mut Vec<(u64, JobEnd)>) {
        std::mem::swap(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner), into);
    }
}
