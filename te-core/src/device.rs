//! Memory that the CPU cannot touch: where it is, and how its bytes are copied to and from host memory.
//!
//! A fabric over sockets or block devices moves host memory. To move memory of a GPU it is given a
//! [`Stager`], which copies between device memory and *staging slots* of page-locked host memory; one such
//! copy is a *hop*. Each end of a transfer stages its own memory. The peer does not notice.
//!
//! ```text
//!   initiator                                                  target
//!   device memory ──hop──► slot ──socket──►  ... ──socket──► slot ──hop──► device memory
//!                  Stager                                           Stager
//! ```
//!
//! [`Devices`] is the control path: it finds the device of an address ([`Devices::locate`]), shares memory
//! with a NIC (`Devices::dmabuf`) and makes stagers. The laws of a stager mirror those of a
//! [`Transport`](crate::Transport):
//!
//! * **S1 One end.** Each hop that [`start`](Stager::start) accepted ends exactly once, in any order. A hop
//!   that was not accepted never ends.
//! * **S2 No late access.** After its end, a hop touches neither its slot nor its device memory. Before its
//!   end, the bytes at its destination are undefined, and those at its source are not to be changed. A stager
//!   that is dropped waits for its hops.
//! * **S3 Hops end by themselves.** There is no cancel: a hop waits for nothing but the device's copy queue,
//!   and ends within milliseconds. A fabric that cancels a slice keeps the slice's staging slot until the hop
//!   has ended.
//! * **S4 No waiting.** `take`, `give_back`, `start` and `poll` never block, allocate, or read a clock. No
//!   free slot and a short count are not errors.
//!
//! The feature `testkit` has an implementation over memory that the CPU really cannot touch, slow and out of
//! order (`testkit::FakeDevices`), and checks for implementations (`testkit::stager_conformance`).
#![allow(unsafe_code, reason = "declares `Stager`, whose promise only an implementation can make")]

use alloc::boxed::Box;

use crate::{Error, Location, MemSpan, MemoryKinds, Token};

/// One allocation of device memory, at one time. Two values that are equal are the same allocation: memory
/// that is freed and allocated again at the same address has another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Where it is.
    pub location: Location,
    /// The address of its first byte.
    pub base: usize,
    /// Its length, in bytes.
    pub bytes: usize,
    /// Numbers that the driver gives to no other allocation of this process; zeros when it has none.
    pub id: [u64; 2],
}

/// A part of device memory as a dma-buf.
#[cfg(all(feature = "std", unix))]
#[derive(Debug)]
pub struct DmaBuf {
    /// The file descriptor, which the caller owns.
    pub fd: std::os::fd::OwnedFd,
    /// Where the part begins in the dma-buf, in bytes.
    pub offset: u64,
    /// The part.
    pub span: MemSpan,
}

/// The devices of one vendor or driver, and their memory. Control path: calls may block and allocate.
pub trait Devices: Send + Sync {
    /// The location of the `len` bytes at `ptr`. `None` when they do not lie in one allocation of one device:
    /// they are host memory, or not mapped.
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location>;

    /// The allocation that the span lies in; the first one for memory that was mapped piece by piece. A
    /// caller that keeps the answer finds out later whether the memory was freed meanwhile. The default knows
    /// no allocations: the answer is the span itself.
    ///
    /// # Errors
    /// `NotFound` when it is not memory of these devices, `OutOfRange` when it leaves its allocation,
    /// `System`.
    fn allocation(&self, span: MemSpan) -> Result<Allocation, Error> {
        let (first, bytes) = (span.as_ptr(), span.len());
        match self.locate(first, bytes) {
            Some(location) => Ok(Allocation { location, base: first.addr(), bytes, id: [0; 2] }),
            None if self.locate(first, 1).is_some() => Err(crate::ErrorKind::OutOfRange.into()),
            None => Err(crate::ErrorKind::NotFound.into()),
        }
    }

    /// The kinds of memory that these devices have. Constant. [`stager`](Self::stager) makes stagers for
    /// them, and a fabric that registers device memory itself needs a dma-buf or a peer-direct driver.
    fn kinds(&self) -> MemoryKinds;

    /// A dma-buf that covers the span, and the offset of the span's first byte in it, in bytes. The caller
    /// owns the file descriptor.
    ///
    /// # Errors
    /// `Unsupported` when the device or its driver does not export memory, `NotFound` for a span that is not
    /// memory of these devices, `System`.
    #[cfg(all(feature = "std", unix))]
    fn dmabuf(&self, span: MemSpan) -> Result<(std::os::fd::OwnedFd, u64), Error> {
        let _ = span;
        Err(Error::new(crate::ErrorKind::Unsupported))
    }

    /// The span as dma-bufs, in the order of addresses: one for most memory, one per mapping for memory that
    /// was mapped piece by piece.
    ///
    /// # Errors
    /// As [`dmabuf`](Self::dmabuf).
    #[cfg(all(feature = "std", unix))]
    fn dmabufs(&self, span: MemSpan) -> Result<alloc::vec::Vec<DmaBuf>, Error> {
        self.dmabuf(span).map(|(fd, offset)| alloc::vec![DmaBuf { fd, offset, span }])
    }

    /// Whether a NIC can register memory at `location` by its address alone, without a dma-buf
    /// (`nvidia_peermem`, `amdgpu`).
    fn is_peer_direct(&self, location: Location) -> bool {
        let _ = location;
        false
    }

    /// A new stager for memory at `location`, with slots that no other stager has.
    ///
    /// # Errors
    /// `Unsupported` when these devices have no such location, `Full` when there is no memory for the slots,
    /// `System`.
    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error>;
}

/// Copies between device memory and staging slots of page-locked host memory. The laws S1 to S4 are in the
/// [module's documentation](self).
///
/// # Safety
/// A caller sends from the memory of a slot and receives into it by its address. For each slot that
/// [`take`](Self::take) returned, until the caller gives it back or drops the stager, an implementation
/// guarantees:
///
/// * [`StagingSlot::span`] is host memory, [`slot_bytes`](Self::slot_bytes) long, which stays mapped at that
///   address, readable and writable.
/// * The span overlaps no other slot that is taken and no memory that something else uses, and no `&` or
///   `&mut` to its bytes exists.
/// * Only hops that the caller started touch it: each only the bytes that it names, and none after its end
///   (S2).
///
/// A hop touches no device memory but [`Hop::device`], and that not after its end.
pub unsafe trait Stager: Send {
    /// Length of every slot, in bytes. Constant.
    fn slot_bytes(&self) -> u32;

    /// Takes a free slot, which the caller has until it gives it back. `None` when all slots are taken.
    fn take(&mut self) -> Option<StagingSlot>;

    /// Returns a slot that was taken. The caller has seen the end of every hop that uses it.
    fn give_back(&mut self, slot: StagingSlot);

    /// Starts a prefix of `hops` and returns its length; a shorter prefix means that the copy queue is full.
    ///
    /// # Errors
    /// When the first hop can never be started, and then nothing was started: `OutOfRange` when it does not
    /// lie inside its slot, `NotFound` when the slot is not taken, `InvalidArgument` when the hop has no
    /// bytes or its span is not memory of this device.
    fn start(&mut self, hops: &[Hop]) -> Result<usize, Error>;

    /// Writes the ends of hops into `out` and returns their number.
    fn poll(&mut self, out: &mut [HopEnd]) -> usize;
}

/// A staging slot that a caller [took](Stager::take) from a [`Stager`].
#[derive(Debug, PartialEq, Eq)]
pub struct StagingSlot {
    /// The number of the slot, from 0.
    pub index: u32,
    /// The memory of the slot, [`slot_bytes`](Stager::slot_bytes) long.
    pub span: MemSpan,
}

/// One copy between a staging slot and device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The caller's name for the hop; its [`HopEnd`] carries it.
    pub token: Token,
    /// [`StagingSlot::index`] of the slot.
    pub slot: u32,
    /// Where the bytes begin in the slot, in bytes.
    pub offset: u32,
    /// The device memory. Its length is the number of bytes to copy.
    pub device: MemSpan,
    /// The direction of the copy.
    pub direction: HopDirection,
}

/// The direction in which a [`Hop`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HopDirection {
    /// From the slot to device memory.
    ToDevice,
    /// From device memory to the slot.
    ToHost,
}

/// The one end of a [`Hop`] (S1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopEnd {
    /// [`Hop::token`].
    pub token: Token,
    /// `Ok` when all bytes are at their destination; after `System` any part of them may be.
    pub result: Result<(), Error>,
}
