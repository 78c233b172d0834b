//! The Transport contract and its laws.
//!
//! Every fabric implements [`Transport`]; everything above is written against it. The laws below bind implementers and are
//! what callers may rely on. One conformance suite (feature `testkit`) checks them for every transport.
//!
//! * **L1 One completion.** An accepted slice yields exactly one completion. A slice that was not accepted yields none.
//! * **L2 No late local access.** After a slice's completion the fabric never again touches its local memory.
//!   [`Outcome`](crate::Outcome) says whether the remote bytes are `Applied`, `NotApplied` or `Unknown`. A checksum that it
//!   reports ([`Completion::crc32c`]) is that of the bytes which the slice stored at its destination, in the order of their
//!   addresses, or is absent; a slice that did not end `Applied` and a fence report none. That holds while nothing else writes
//!   the source or the destination range between `submit` and the completion. If something does, the bytes stored are a mix of
//!   old and new ones, and the checksum may be that of another mix: it may then not fit what lies there, but is never made to fit.
//! * **L3 Cancel ends.** `cancel` starts the end of a slice; it still completes exactly once. When the fabric cannot stop
//!   it at once (posted RDMA work), it drains or flushes first. What cannot be drained by the deadline is *quarantined*:
//!   counted, reported, and its memory is not handed back.
//! * **L4 No waiting.** `submit` and `poll` never block, allocate, or read a clock. Fullness is not an error.
//! * **L5 Fences are the target's word.** Ending our side of a connection does not end the other: bytes on the wire or in
//!   the target's socket buffer can still land. A fence completes `Applied` when the *target* said that nothing older will.
//!   Until then the remote outcome is `Unknown`. Sending the *same* bytes to the *same* range again needs no fence;
//!   moving different bytes there, or giving the range to someone else, does. A target that cannot be reached is fenced
//!   when its incarnation has changed. A target can also end an initiator that does not ask for a fence any more
//!   ([`expel`](Transport::expel)): its word is the same, and the initiator is refused from then on.
//! * **L6 Only what was exported.** A peer reaches only what was exported, with the rights it was given: out of range, stale
//!   generation or a wrong key is refused before a byte moves, and the connection survives.
//! * **L7 No references.** Peer-writable bytes are never a `&[u8]`: they are read through a
//!   [`VolatileSpan`](crate::VolatileSpan), or copied out.
//! * **L8 Memory is what it says.** A transport touches memory only of the kinds that it declares
//!   ([`Capabilities::memory`]): registering a span of any other kind is `Unsupported`, before a byte of it is read or
//!   written, and nothing is left behind. A slice whose remote offset or length is not a multiple of
//!   [`Capabilities::granule_bytes`] is `InvalidArgument`, before a byte moves.
#![allow(unsafe_code, reason = "declares and forwards `register`, whose promise only the caller can make")]

use alloc::boxed::Box;

use crate::{
    Access, Completion, Error, ErrorKind, Instant, MemSpan, MemoryKinds, RegionId, RemoteRegionId, Slice,
    Token,
};

bitflags::bitflags! {
    /// What a transport can do, for whoever chooses one or calls it. The conformance suite skips, by name, what is not offered:
    /// for that it reads `READ`, `WRITE`, `FENCE` and `CALLER_DRIVEN`. An engine reads `CALLER_DRIVEN`. `CHECKSUM` and `TWO_SIDED_PROGRESS` are
    /// for people and embedders: they say what a deployment can rely on, or has to arrange.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// One-sided reads.
        const READ = 1;
        /// One-sided writes.
        const WRITE = 1 << 1;
        /// A WRITE can end `Unknown`; fences do real work. Without it every outcome is known and a fence ends at once.
        const FENCE = 1 << 2;
        /// Payloads are checked end to end by the transport itself. Not what [`set_checksums`](Transport::set_checksums) asks for.
        const CHECKSUM = 1 << 3;
        /// The peer's process takes part in the copy; it must be polled for progress.
        const TWO_SIDED_PROGRESS = 1 << 4;
        /// Local memory of the host is touched inside the owner's own calls alone, a cancelled slice of it ends in the next poll that
        /// has room for it, and registering it pins nothing: it can be registered for a single operation. Memory of a device is not
        /// meant: whatever copies it does so at its own time.
        const CALLER_DRIVEN = 1 << 5;
    }
}

/// What a transport offers, and its limits. Constant over its life.
///
/// ```
/// use te_core::{Capabilities, Features, MemoryKinds};
///
/// let capabilities = Capabilities::new(Features::READ | Features::WRITE)
///     .with_slice_bytes(64 << 10, 1 << 30)
///     .with_inflight_max(4096)
///     .with_export_bytes_max(64);
/// assert_eq!((capabilities.memory, capabilities.granule_bytes), (MemoryKinds::HOST, 1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Optional abilities.
    pub features: Features,
    /// Longest slice, bytes.
    pub slice_bytes_max: u32,
    /// The length at which one more cut no longer pays on this fabric, bytes.
    pub slice_bytes_preferred: u32,
    /// Slices accepted and not yet completed, at most.
    pub inflight_max: u32,
    /// Length of an export, bytes, at most.
    pub export_bytes_max: u32,
    /// Kinds of memory that it can touch: those that [`Memory::register`] takes (L8).
    pub memory: MemoryKinds,
    /// Remote offsets and lengths of slices are multiples of this, bytes (L8). A power of two; 1: any.
    pub granule_bytes: u32,
}

impl Capabilities {
    /// These features over host memory, at any offset. Slices of up to `u32::MAX` bytes, cut to 64 KiB; one in flight; exports of
    /// no bytes.
    #[must_use]
    pub const fn new(features: Features) -> Self {
        Self {
            features,
            slice_bytes_max: u32::MAX,
            slice_bytes_preferred: 64 << 10,
            inflight_max: 1,
            export_bytes_max: 0,
            memory: MemoryKinds::HOST,
            granule_bytes: 1,
        }
    }

    /// The length at which one more cut no longer pays, and the longest slice, bytes.
    #[must_use]
    pub const fn with_slice_bytes(mut self, preferred: u32, max: u32) -> Self {
        (self.slice_bytes_preferred, self.slice_bytes_max) = (preferred, max);
        self
    }

    /// Slices accepted and not yet completed, at most.
    #[must_use]
    pub const fn with_inflight_max(mut self, slices: u32) -> Self {
        self.inflight_max = slices;
        self
    }

    /// Length of an export, bytes, at most.
    #[must_use]
    pub const fn with_export_bytes_max(mut self, bytes: u32) -> Self {
        self.export_bytes_max = bytes;
        self
    }

    /// The kinds of memory that it can touch, all of them.
    #[must_use]
    pub const fn with_memory(mut self, kinds: MemoryKinds) -> Self {
        self.memory = kinds;
        self
    }

    /// What remote offsets and lengths are multiples of, bytes; a power of two.
    #[must_use]
    pub const fn with_granule_bytes(mut self, bytes: u32) -> Self {
        self.granule_bytes = bytes;
        self
    }
}

/// A file descriptor that becomes readable when `poll` has something to do. For parking an idle poller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSource(pub i32);

/// Registration of local memory and attachment of remote memory. Control path: may allocate, may take microseconds.
pub trait Memory {
    /// Makes a span usable as the local side of slices and, with remote rights, exportable.
    ///
    /// # Errors
    /// `Unsupported` for memory of a kind that it does not declare (L8), `InvalidArgument` for an empty span, `Busy` when the
    /// index is taken, `Full`, `System`.
    ///
    /// # Safety
    /// Until [`deregister`](Self::deregister) returned `Ok` for `id`, `span` stays mapped, and no `&` or `&mut` exists to
    /// bytes that a peer (remote rights) or an operation in flight (local rights) may write.
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error>;

    /// Ends a registration. Afterwards neither we nor any peer touch the span through this transport.
    ///
    /// # Errors
    /// `Busy` while slices or a peer's running operation refer to it; `NotFound`, `Stale`.
    fn deregister(&mut self, id: RegionId) -> Result<(), Error>;

    /// Writes what a peer needs to [`attach`](Self::attach) the region into `out`; gives the number of bytes written.
    ///
    /// # Errors
    /// `AccessDenied` for a region without remote rights, `OutOfRange` when `out` is too short, `NotFound`, `Stale`.
    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error>;

    /// Makes a peer's export addressable as `id`. Does not wait for the peer.
    ///
    /// # Errors
    /// `InvalidArgument` when the blob does not parse or is of another version, `Busy` when the index is taken,
    /// `Unreachable` when this transport cannot reach that peer at all, `Full`.
    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error>;

    /// Forgets an attached segment.
    ///
    /// # Errors
    /// `Busy` while slices or fences refer to it; `NotFound`, `Stale`.
    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error>;
}

/// Moves bytes between registered memory and attached segments. One rail, one `Transport`.
///
/// # For callers
/// Submit a batch, then poll until every token has completed. A short count means "full": poll, then submit the rest.
/// A transport has one owner at a time, and must be polled for progress, its own and (`TWO_SIDED_PROGRESS`) its peers'.
///
/// # For implementers
/// You may complete in any order and from any call of `poll`. You may not complete inside `submit`. You may not touch a
/// slice's memory after its completion (L2). Tokens are the caller's: do not read meaning into them.
pub trait Transport: Memory {
    /// Short, constant, lower case: `tcp`, `shm`, `sim`. Metrics and exports carry it.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Accepts a prefix of `batch` and gives its length. Fewer than all means full: poll and submit the rest.
    ///
    /// # Errors
    /// The first slice that can never be accepted ends the prefix; when it is the very first, the call gives its error and
    /// nothing was accepted: `InvalidArgument`, `NotFound`, `Stale`, `OutOfRange`, `AccessDenied`, `Unreachable`.
    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error>;

    /// Makes progress and writes completions into `out`; gives how many. `now` never goes back.
    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize;

    /// When `poll` must run even if nothing arrives; `None`: only events matter.
    fn poll_at(&self) -> Option<Instant>;

    /// What to wait on between polls. `None`: poll in a loop, or at `poll_at`.
    fn event_source(&self) -> Option<EventSource> {
        None
    }

    /// Grows whenever `poll` moved something, for us or for a peer; the unit is the transport's affair. A poller that sees
    /// it grow polls again before it parks. A transport that never serves peers may leave it at 0.
    fn activity(&self) -> u64 {
        0
    }

    /// Asks for the CRC-32C of what slices move, in [`Completion::crc32c`], from the next `poll` on; or, with false, no longer
    /// asks. A wish: a transport reports a checksum where it comes by one for little, and may leave out any slice's, or all.
    /// Without the wish it spends nothing on checksums. The default has none to report.
    fn set_checksums(&mut self, wanted: bool) {
        let _ = wanted;
    }

    /// Starts the end of a slice (L3). Its completion still comes, `Canceled` or with whatever end was faster.
    ///
    /// # Errors
    /// `NotFound` when no slice in flight has this token.
    fn cancel(&mut self, token: Token) -> Result<(), Error>;

    /// Starts a fence (L5) that completes under `token`: `Applied` when the target has said that no slice to `segment`'s
    /// owner that completed before this call can change its memory any more. Slices still in flight are not covered
    /// and not disturbed. Without [`Features::FENCE`] it completes at the next poll.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Full`.
    fn fence(&mut self, token: Token, segment: RemoteRegionId) -> Result<(), Error>;

    /// Whether an initiator with this identity has a connection to us, or maps our memory. Identities are random and belong to one
    /// life of one process's engine; 0 belongs to nobody. One that was [expelled](Self::expel) is not connected.
    fn is_connected(&self, peer: u64) -> bool {
        let _ = peer;
        false
    }

    /// Ends what the initiator with this identity can do to the memory that *we* exported, and refuses it from now on
    /// ([`ErrorKind::Expelled`](crate::ErrorKind::Expelled) is what it is told). Its connections are closed once what had
    /// arrived is applied or dropped, and what it was granted is revoked and seen not to be in use. `Ok(true)`: nothing of
    /// it can land any more. `Ok(false)`: the end has begun; poll, then call again. Others are not disturbed. What it does as
    /// a target for us, and its memory, are not touched.
    ///
    /// # Errors
    /// `Busy` for an initiator that [is connected](Self::is_connected) when `mode` spares it: nothing has
    /// changed. `Full` when [`EXPELLED_MAX`] initiators are refused already: nothing has changed.
    /// `InvalidArgument` for identity 0. `Unsupported`.
    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        let _ = (peer, mode);
        Err(Error::new(ErrorKind::Unsupported))
    }
}

/// What [`Transport::expel`] does about an initiator that is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpelMode {
    /// Leave it alone, and report `Busy`.
    SpareConnected,
    /// Close its connections, too.
    Force,
}

/// The largest number of initiators that a transport refuses because they were [expelled](Transport::expel).
pub const EXPELLED_MAX: usize = 65_536;

macro_rules! forward {
    ($($ty:ty),*) => {$(
        impl<T: Transport + ?Sized> Memory for $ty {
            unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
                // SAFETY: the caller's promise, passed on.
                unsafe { (**self).register(id, span, access) }
            }
            fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
                (**self).deregister(id)
            }
            fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
                (**self).export(id, out)
            }
            fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
                (**self).attach(id, blob)
            }
            fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
                (**self).detach(id)
            }
        }

        impl<T: Transport + ?Sized> Transport for $ty {
            fn name(&self) -> &'static str {
                (**self).name()
            }
            fn capabilities(&self) -> Capabilities {
                (**self).capabilities()
            }
            fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
                (**self).submit(batch)
            }
            fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
                (**self).poll(now, out)
            }
            fn poll_at(&self) -> Option<Instant> {
                (**self).poll_at()
            }
            fn event_source(&self) -> Option<EventSource> {
                (**self).event_source()
            }
            fn activity(&self) -> u64 {
                (**self).activity()
            }
            fn set_checksums(&mut self, wanted: bool) {
                (**self).set_checksums(wanted);
            }
            fn cancel(&mut self, token: Token) -> Result<(), Error> {
                (**self).cancel(token)
            }
            fn fence(&mut self, token: Token, segment: RemoteRegionId) -> Result<(), Error> {
                (**self).fence(token, segment)
            }
            fn is_connected(&self, peer: u64) -> bool {
                (**self).is_connected(peer)
            }
            fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
                (**self).expel(peer, mode)
            }
        }
    )*};
}

forward!(&mut T, Box<T>);
