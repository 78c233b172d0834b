//! The Transport contract and its laws.
//!
//! Every fabric implements [`Transport`], and all code above fabrics is written against it. The laws below
//! bind implementers, and callers may rely on them. One conformance suite (feature `testkit`) checks them for
//! every transport.
//!
//! * **L1 One completion.** An accepted slice yields exactly one completion. A slice that was not accepted
//!   yields none.
//! * **L2 No late local access.** After a slice's completion the fabric never again touches its local memory.
//!   [`Outcome`](crate::Outcome) states whether the remote bytes are `Applied`, `NotApplied` or `Unknown`. A
//!   checksum that it reports ([`Completion::crc32c`]) is that of the bytes which the slice stored at its
//!   destination, in the order of their addresses, or is absent; a slice that did not end `Applied` and a
//!   fence report none. That holds while nothing else writes the source or the destination range between
//!   `submit` and the completion. If something does, the stored bytes are a mix of old and new ones, and the
//!   checksum may be that of another mix: it may then not match the bytes that lie there, and is
//!   not adjusted to match them.
//! * **L3 Cancel ends.** `cancel` starts the end of a slice, which still completes exactly once. When the
//!   fabric cannot stop it at once (posted RDMA work), it drains or flushes first. Memory that cannot be
//!   drained by the deadline is *quarantined*: counted, reported, and not handed back.
//! * **L4 No waiting.** `submit` and `poll` never block, allocate, or read a clock. Being full is not an
//!   error.
//! * **L5 Fences are the target's word.** Ending our end of a connection does not end the other: bytes on the
//!   wire or in the target's socket buffer can still land. A fence completes `Applied` when the *target* has
//!   confirmed that nothing older will land. Until then the remote outcome is `Unknown`. Sending the *same*
//!   bytes to the *same* range again needs no fence; moving different bytes there, or giving the range to
//!   another owner, does. A target that cannot be reached is fenced when its incarnation has changed. A
//!   target can also end an initiator that no longer fences by itself ([`expel`](Transport::expel)): that is
//!   the same confirmation, and the initiator is refused from then on.
//! * **L6 Only what was exported.** A peer reaches only what was exported, with the rights that it was given.
//!   An operation out of range, with a stale generation or with a wrong key is refused before a byte moves,
//!   and the connection survives.
//! * **L7 No references.** Peer-writable bytes are never a `&[u8]`: they are read through a
//!   [`VolatileSpan`](crate::VolatileSpan), or copied out.
//! * **L8 Memory is of a declared kind.** A transport touches memory only of the kinds that it declares
//!   ([`Capabilities::memory`]): registering a span of any other kind is `Unsupported`, before a byte of it
//!   is read or written, and leaves no trace. A slice whose remote offset or length is not a multiple of
//!   [`Capabilities::granule_bytes`] is `InvalidArgument`, before a byte moves.
#![allow(unsafe_code, reason = "declares and forwards `register`, whose promise only the caller can make")]

use alloc::boxed::Box;
use alloc::string::String;

use crate::{
    Access, Completion, Error, ErrorKind, Instant, MemSpan, MemoryKinds, RegionId, RemoteRegionId, Slice,
    Token,
};

bitflags::bitflags! {
    /// What a transport can do. The conformance suite skips, by name, what is not offered: it reads `READ`,
    /// `WRITE`, `FENCE` and `CALLER_DRIVEN` for that. An engine reads `CALLER_DRIVEN`. `CHECKSUM` and
    /// `TWO_SIDED_PROGRESS` are for people and embedders: what a deployment can rely on, and what it has to
    /// arrange.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// One-sided reads.
        const READ = 1;
        /// One-sided writes.
        const WRITE = 1 << 1;
        /// A WRITE can end `Unknown`, and fences do work. Without it every outcome is known, and a fence ends
        /// at once.
        const FENCE = 1 << 2;
        /// The transport itself checks payloads end to end. This is not what
        /// [`set_checksums`](Transport::set_checksums) requests.
        const CHECKSUM = 1 << 3;
        /// The peer's process takes part in the copy; it must be polled for progress.
        const TWO_SIDED_PROGRESS = 1 << 4;
        /// The transport touches local memory of the host only inside the caller's own calls, a cancelled
        /// slice of it ends in the next poll that has room for its completion, and `register` pins no pages:
        /// memory can be registered for a single operation. Memory of a device is not included: a stager
        /// copies it in its own time.
        const CALLER_DRIVEN = 1 << 5;
    }
}

/// What a transport offers, and its limits. Constant while the transport exists.
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
    /// The longest slice, in bytes.
    pub slice_bytes_max: u32,
    /// The length up to which it pays on this fabric to make slices longer, in bytes.
    pub slice_bytes_preferred: u32,
    /// The largest number of slices that are accepted and have not completed.
    pub inflight_max: u32,
    /// The length of the longest export, in bytes.
    pub export_bytes_max: u32,
    /// The kinds of memory that it can touch, which [`Memory::register`] accepts (L8).
    pub memory: MemoryKinds,
    /// Remote offsets and lengths of slices are multiples of this, in bytes (L8). A power of two; 1 for any.
    pub granule_bytes: u32,
}

impl Capabilities {
    /// These features over host memory, at any offset. Slices of up to `u32::MAX` bytes, 64 KiB preferred;
    /// one in flight; exports of 0 bytes.
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

    /// Sets the preferred and the largest length of a slice, in bytes.
    #[must_use]
    pub const fn with_slice_bytes(mut self, preferred: u32, max: u32) -> Self {
        (self.slice_bytes_preferred, self.slice_bytes_max) = (preferred, max);
        self
    }

    /// Sets the largest number of slices in flight.
    #[must_use]
    pub const fn with_inflight_max(mut self, slices: u32) -> Self {
        self.inflight_max = slices;
        self
    }

    /// Sets the length of the longest export, in bytes.
    #[must_use]
    pub const fn with_export_bytes_max(mut self, bytes: u32) -> Self {
        self.export_bytes_max = bytes;
        self
    }

    /// Sets the kinds of memory that it can touch.
    #[must_use]
    pub const fn with_memory(mut self, kinds: MemoryKinds) -> Self {
        self.memory = kinds;
        self
    }

    /// Sets the granule of remote offsets and lengths, in bytes; a power of two.
    #[must_use]
    pub const fn with_granule_bytes(mut self, bytes: u32) -> Self {
        self.granule_bytes = bytes;
        self
    }
}

/// A file descriptor that becomes readable when `poll` has something to do. An idle polling thread waits on
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventSource(pub i32);

/// Registration of local memory and attachment of remote memory. Control path: calls may allocate and may
/// take microseconds.
pub trait Memory {
    /// Makes a span usable as the local memory of slices and, with remote rights, exportable.
    ///
    /// # Errors
    /// `Unsupported` for memory of a kind that the transport does not declare (L8), `InvalidArgument` for an
    /// empty span, `Busy` when the index is in use, `Full`, `System`.
    ///
    /// # Safety
    /// Until [`deregister`](Self::deregister) returned `Ok` for `id`, `span` stays mapped, and no `&` or
    /// `&mut` exists to bytes that a peer (remote rights) or an operation in flight (local rights) may write.
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error>;

    /// Ends a registration. After `Ok`, neither this transport nor a peer through it touches the span.
    ///
    /// # Errors
    /// `Busy` while slices or a peer's operation use it; `NotFound`, `Stale`.
    fn deregister(&mut self, id: RegionId) -> Result<(), Error>;

    /// Writes the export of a region into `out`, from which a peer can [`attach`](Self::attach) it; returns
    /// the number of bytes.
    ///
    /// # Errors
    /// `AccessDenied` for a region without remote rights, `OutOfRange` when `out` is too short, `NotFound`,
    /// `Stale`.
    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error>;

    /// Makes the region of a peer's export addressable as `id`. Does not wait for the peer.
    ///
    /// # Errors
    /// `InvalidArgument` when the export does not parse or is of another version, `Busy` when the index is in
    /// use, `Unreachable` when this transport cannot reach that peer at all, `Full`.
    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error>;

    /// Detaches a remote region.
    ///
    /// # Errors
    /// `Busy` while slices or fences use it; `NotFound`, `Stale`.
    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error>;
}

/// Moves bytes between registered memory and remote regions. Each rail is one `Transport`.
///
/// # For callers
/// Submit a batch, then poll until every token has completed. A short count means "full": poll, then submit
/// the rest. One thread at a time calls a transport, and must poll it for progress, of its own slices and,
/// with `TWO_SIDED_PROGRESS`, of those of its peers.
///
/// # For implementers
/// Complete slices in any order and from any call of `poll`, but not inside `submit`. Do not touch a slice's
/// memory after its completion (L2). Tokens belong to the caller: do not interpret them.
pub trait Transport: Memory {
    /// A short, constant name in lower case: `tcp`, `shm`, `sim`. Metrics and exports carry it.
    fn name(&self) -> &'static str;

    /// What the transport can do, and its limits.
    fn capabilities(&self) -> Capabilities;

    /// Accepts a prefix of `batch` and returns its length. Fewer than all means full: poll and submit the
    /// rest.
    ///
    /// # Errors
    /// The first slice that can never be accepted ends the prefix. When that is the very first slice, its
    /// error is returned and nothing was accepted: `InvalidArgument`, `NotFound`, `Stale`, `OutOfRange`,
    /// `AccessDenied`, `Unreachable`.
    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error>;

    /// Makes progress, writes completions into `out` and returns their number. `now` never goes back.
    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize;

    /// When `poll` must be called even if nothing arrives; `None` when only events matter.
    fn poll_at(&self) -> Option<Instant>;

    /// What to wait on between polls. `None`: poll in a loop, or at `poll_at`.
    fn event_source(&self) -> Option<EventSource> {
        None
    }

    /// A number that grows whenever `poll` moved something, for us or for a peer; each transport chooses the
    /// unit. A polling thread that sees it grow polls again before it parks. A transport that never serves
    /// peers may leave it at 0.
    fn activity(&self) -> u64 {
        0
    }

    /// Requests the CRC-32C of what slices move, in [`Completion::crc32c`], from the next `poll` on; `false`
    /// ends the request. A transport reports a checksum where it costs little, and may leave out any or all
    /// of them. Without the request it spends nothing on checksums. The default reports none.
    fn set_checksums(&mut self, wanted: bool) {
        let _ = wanted;
    }

    /// Starts the end of a slice (L3). Its completion still comes: `Canceled`, or another end that was
    /// faster.
    ///
    /// # Errors
    /// `NotFound` when no slice in flight has this token.
    fn cancel(&mut self, token: Token) -> Result<(), Error>;

    /// Starts a fence (L5) that completes under `token`: `Applied` when the target has confirmed that no
    /// slice to the owner of `remote` that completed before this call can change its memory any more. Slices
    /// in flight are neither covered nor disturbed. Without [`Features::FENCE`] it completes at the next
    /// poll.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Full`.
    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error>;

    /// Why a region that is registered with remote rights is not exported over this fabric, or not to all
    /// peers that its settings are for; for people. `None` when it is, and for a fabric that does not say.
    /// Control path, as [`Memory::export`].
    fn why_not_exported(&self, region: RegionId) -> Option<String> {
        let _ = region;
        None
    }

    /// The transport by its own type, for a caller that knows it and what it alone can do. `None`: it can do
    /// nothing else.
    fn as_any(&mut self) -> Option<&mut dyn core::any::Any> {
        None
    }

    /// Whether an initiator with this identity has a connection to us, or maps our memory. An identity is a
    /// random number for one life of one engine; no engine has 0. An initiator that was
    /// [expelled](Self::expel) is not connected.
    fn is_connected(&self, peer: u64) -> bool {
        let _ = peer;
        false
    }

    /// Ends what the initiator with this identity can do to the memory that *we* exported, and refuses it
    /// from now on with [`ErrorKind::Expelled`](crate::ErrorKind::Expelled). Its connections are closed once
    /// everything that had arrived is applied or dropped, and its grants are revoked and seen not to be in
    /// use. `Ok(true)`: none of its operations can land any more. `Ok(false)`: the expulsion has begun; poll,
    /// then call again. Other initiators are not disturbed. What it does as a target for us, and its memory,
    /// are not affected.
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
            fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
                (**self).fence(token, remote)
            }
            fn why_not_exported(&self, region: RegionId) -> Option<String> {
                (**self).why_not_exported(region)
            }
            fn as_any(&mut self) -> Option<&mut dyn core::any::Any> {
                (**self).as_any()
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
