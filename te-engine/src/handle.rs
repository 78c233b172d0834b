//! [`TransferEngine`]: the handle that threads share.

use std::ops::Range;
use std::string::String;
use std::time::Duration;
use std::vec::Vec;

use te_core::{Access, Buffer, Error, ErrorKind, MemSpan, RegionId, Registered};

use crate::config::Config;
use crate::error::{RegisterError, SegmentError, StartError, TransferError};
use crate::request::{Liveness, Notification, RemoteRegion, SegmentHandle, Stats, TransferRequest};
use crate::transfer::Transfer;

/// A transfer engine behind a worker thread. Clones are handles to the same engine; the last one to go stops it.
#[derive(Clone)]
pub struct TransferEngine {
    name: String,
}

impl TransferEngine {
    /// Opens the control port and the fabrics, and starts the worker.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Self, StartError> {
        config.validate()?;
        Ok(Self { name: String::new() })
    }

    /// The name under which peers open this engine's memory: `host:port` of its control port.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which life of the process this is; another one after every start.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        0
    }

    /// Registers memory that the caller keeps alive. With remote rights it becomes part of this engine's segment.
    ///
    /// # Errors
    /// `Empty`, `Overlap` with a registered region, `Full`, or the fabrics' refusal.
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) returned `Ok` for the region, or the engine is gone, `span` stays mapped, and
    /// no `&` or `&mut` exists to bytes that a peer (remote rights) or a transfer in flight (local rights) may write.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register(&self, _span: MemSpan, _access: Access) -> Result<RegionId, RegisterError> {
        Err(RegisterError::Closed)
    }

    /// Ends a registration. After `Ok` nothing touches the memory any more, ours or a peer's.
    ///
    /// # Errors
    /// `Busy` while requests in flight use it; `NotFound`.
    pub fn unregister(&self, _region: RegionId) -> Result<(), RegisterError> {
        Err(RegisterError::Closed)
    }

    /// Allocates and registers zeroed memory that processes on this host can share: page-aligned, reachable over `shm`.
    ///
    /// # Errors
    /// As [`register`](Self::register), and `Alloc`.
    pub fn alloc_shared(&self, _len: usize, _access: Access) -> Result<SharedRegion, RegisterError> {
        Err(RegisterError::Closed)
    }

    /// Registers a buffer that the engine takes apart until it is given back.
    ///
    /// # Errors
    /// As [`register`](Self::register); the buffer comes back.
    pub fn register_buffer<B: Buffer>(
        &self,
        buffer: B,
        _access: Access,
    ) -> Result<Registered<B>, (RegisterError, B)> {
        Err((RegisterError::Closed, buffer))
    }

    /// Ends the registration of a buffer and gives the owner back.
    ///
    /// # Errors
    /// `Busy` while a peer is using it, `NotFound` when another engine registered it; the buffer comes back registered.
    pub fn unregister_buffer<B: Buffer>(
        &self,
        buffer: Registered<B>,
    ) -> Result<B, (RegisterError, Registered<B>)> {
        Err((RegisterError::Closed, buffer))
    }

    /// Opens the memory that the engine called `name` (`host:port`) exports. Asks it for its descriptor; waits for the answer
    /// at most `control.timeout_ms`. Opening a segment again refreshes it and gives the same handle, unless its owner
    /// has restarted: then the handle is new, and the old one refuses work with [`SegmentError::Restarted`].
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open_segment(&self, name: &str) -> Result<SegmentHandle, SegmentError> {
        Err(SegmentError::Name(name.into()))
    }

    /// Learns which regions the owner has registered and unregistered since.
    ///
    /// # Errors
    /// `Restarted` when another process answers; the handle refuses further work.
    pub fn refresh_segment(&self, _segment: SegmentHandle) -> Result<(), SegmentError> {
        Err(SegmentError::Closed)
    }

    /// Forgets a segment. It must be closed as often as it was opened.
    ///
    /// # Errors
    /// `Busy` while requests in flight use it; `NotFound`.
    pub fn close_segment(&self, _segment: SegmentHandle) -> Result<(), SegmentError> {
        Err(SegmentError::Closed)
    }

    /// The regions that the segment's owner exports, by address.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn segment_regions(&self, _segment: SegmentHandle) -> Result<Vec<RemoteRegion>, SegmentError> {
        Err(SegmentError::Closed)
    }

    /// Submits requests as one batch. With `timeout`, what has not ended by then is cancelled and ends `TimedOut`.
    ///
    /// # Errors
    /// `BatchLength`, `Full`, `Closed`. What is wrong with a single request is told by the transfer: [`Transfer::wait`].
    pub fn submit(
        &self,
        _requests: &[TransferRequest],
        _timeout: Option<Duration>,
    ) -> Result<Transfer, TransferError> {
        Err(TransferError::Closed)
    }

    /// Reads `range.len()` bytes at `remote_addr` into `range` of an owned buffer, which the transfer holds until it has ended.
    ///
    /// # Errors
    /// As [`submit`](Self::submit); the buffer comes back.
    pub fn read<B: Buffer>(
        &self,
        buffer: Registered<B>,
        _range: Range<usize>,
        _segment: SegmentHandle,
        _remote_addr: u64,
        _timeout: Option<Duration>,
    ) -> Result<Transfer<Registered<B>>, (TransferError, Registered<B>)> {
        Err((TransferError::Closed, buffer))
    }

    /// Writes `range` of an owned buffer to `remote_addr`; the transfer holds the buffer until it has ended.
    ///
    /// # Errors
    /// As [`submit`](Self::submit); the buffer comes back.
    pub fn write<B: Buffer>(
        &self,
        buffer: Registered<B>,
        _range: Range<usize>,
        _segment: SegmentHandle,
        _remote_addr: u64,
        _timeout: Option<Duration>,
    ) -> Result<Transfer<Registered<B>>, (TransferError, Registered<B>)> {
        Err((TransferError::Closed, buffer))
    }

    /// Fences a segment (law L5): when the transfer completes, no WRITE that ended before this call can still land there.
    ///
    /// # Errors
    /// `Full`, `Closed`; an unknown segment is told by the transfer.
    pub fn fence(
        &self,
        _segment: SegmentHandle,
        _timeout: Option<Duration>,
    ) -> Result<Transfer, TransferError> {
        Err(TransferError::Closed)
    }

    /// Sends a message to the segment's owner, who finds it with [`take_notifications`](Self::take_notifications). Returns
    /// when the owner has it.
    ///
    /// # Errors
    /// `Refused` when it is too long or the owner's queue is full; `Unreachable`, `Restarted`.
    pub fn notify(&self, _segment: SegmentHandle, _name: &str, _message: &[u8]) -> Result<(), SegmentError> {
        Err(SegmentError::Closed)
    }

    /// Takes all notifications that peers have sent since the last call.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        Vec::new()
    }

    /// Asks the segment's owner whether it lives; waits at most `timeout`.
    ///
    /// # Errors
    /// `NotFound`, `Closed`. That nobody answers is not an error but [`Liveness::Unreachable`].
    pub fn probe(&self, _segment: SegmentHandle, _timeout: Duration) -> Result<Liveness, SegmentError> {
        Err(SegmentError::Closed)
    }

    /// Counters of the engine and of each rail.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::default()
    }
}

/// Registered memory that processes on one host can share. Peers may write it at any time, so its bytes are copied in and
/// out, never borrowed (L7). Freed when it is unregistered and the last clone of this is gone.
#[derive(Clone)]
pub struct SharedRegion {
    id: RegionId,
    len: usize,
}

impl SharedRegion {
    /// Its id, for requests and `unregister`.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Its first address, by which peers name it.
    #[must_use]
    pub fn addr(&self) -> u64 {
        0
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// `OutOfRange`.
    pub fn read(&self, _offset: u64, _out: &mut [u8]) -> Result<(), Error> {
        Err(Error::new(ErrorKind::OutOfRange))
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// `OutOfRange`.
    pub fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Error> {
        Err(Error::new(ErrorKind::OutOfRange))
    }
}
