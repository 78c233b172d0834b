//! Memory that the CPU cannot touch: who knows where it is, and how its bytes cross to the host and back.
//!
//! A fabric over sockets or block devices moves host memory. To move memory of a GPU it is given a [`Stager`], which copies
//! between device memory and *slots* of pinned host memory. Both ends of a transfer stage, each for its own memory; the peer does not
//! notice.
//!
//! ```text
//!   initiator                                                  target
//!   device memory ──hop──► slot ──socket──►  ... ──socket──► slot ──hop──► device memory
//!                  Stager                                           Stager
//! ```
//!
//! [`Devices`] is the control path: it says where an address is ([`Devices::locate`]), shares memory with a NIC
//! (`Devices::dmabuf`) and makes stagers. The laws of a stager mirror those of a [`Transport`](crate::Transport):
//!
//! * **S1 One end.** Each hop that [`start`](Stager::start) accepted ends exactly once, in any order. A hop that was not
//!   accepted never ends.
//! * **S2 No late access.** After its end, a hop touches neither its slot nor its device memory. Before its end, the bytes at its
//!   destination are undefined, and those at its source are not to be changed. A stager that is dropped waits for its hops.
//! * **S3 Hops end by themselves.** There is no cancel: a hop waits for nothing but the device's copy queue, and ends within
//!   milliseconds. A fabric that cancels a slice keeps the slice's slot until the hop has ended.
//! * **S4 No waiting.** `take`, `give_back`, `start` and `poll` never block, allocate, or read a clock. No free slot and a
//!   short count are not errors.
//!
//! The feature `testkit` has an implementation over memory that the CPU really cannot touch, slow and out of order
//! (`testkit::FakeDevices`), and checks for implementations (`testkit::stager_conformance`).

use alloc::boxed::Box;

use crate::{Error, Location, MemSpan, MemoryKinds, Token};

/// Knows memory of devices. Control path: may block and allocate.
pub trait Devices: Send + Sync {
    /// Where the `len` bytes at `ptr` are. `None` when they are not in one allocation of one device: host memory, or unmapped.
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location>;

    /// The kinds of memory of these devices: those for which [`stager`](Self::stager) makes stagers. Constant.
    fn kinds(&self) -> MemoryKinds;

    /// A dma-buf that covers the span: a file descriptor of the caller's own, and the offset of the span's first byte in it.
    ///
    /// # Errors
    /// `Unsupported` when the device or its driver does not export memory, `NotFound` for a span that is not the device's, `System`.
    #[cfg(all(feature = "std", unix))]
    fn dmabuf(&self, span: MemSpan) -> Result<(std::os::fd::OwnedFd, u64), Error> {
        let _ = span;
        Err(Error::new(crate::ErrorKind::Unsupported))
    }

    /// Whether a NIC can register memory there by its address alone, without a dma-buf (`nvidia_peermem`, `amdgpu`).
    fn is_peer_direct(&self, location: Location) -> bool {
        let _ = location;
        false
    }

    /// A stager for memory there, for one owner.
    ///
    /// # Errors
    /// `Unsupported` for a location that is no device of these, `Full` without memory for its slots, `System`.
    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error>;
}

/// Copies between device memory and slots of pinned host memory. The laws S1–S4 are in the [module's documentation](self).
pub trait Stager: Send {
    /// Length of every slot, bytes. Constant.
    fn slot_bytes(&self) -> u32;

    /// A free slot, the caller's until it is given back. `None`: all are taken.
    fn take(&mut self) -> Option<StagingSlot>;

    /// Takes a slot back. Every hop that uses it has ended.
    fn give_back(&mut self, slot: StagingSlot);

    /// Starts a prefix of `hops` and gives its length; fewer than all means that the copy queue is full.
    ///
    /// # Errors
    /// For the first hop, if it can never be started: `OutOfRange` when it leaves its slot, `NotFound` when the slot is not taken,
    /// `InvalidArgument` when it has no bytes or its span is not memory of this device. Nothing was started then.
    fn start(&mut self, hops: &[Hop]) -> Result<usize, Error>;

    /// Writes ends of hops into `out`; gives how many.
    fn poll(&mut self, out: &mut [HopEnd]) -> usize;
}

/// A slot of pinned host memory, on loan from a [`Stager`].
#[derive(Debug, PartialEq, Eq)]
pub struct StagingSlot {
    /// Which one.
    pub index: u32,
    /// Its memory, [`slot_bytes`](Stager::slot_bytes) long.
    pub span: MemSpan,
}

/// One copy between a slot and device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The caller's name for it, which its end carries.
    pub token: Token,
    /// Index of the slot.
    pub slot: u32,
    /// First byte in the slot.
    pub offset: u32,
    /// The device memory; as many bytes are copied.
    pub device: MemSpan,
    /// Which way.
    pub direction: HopDirection,
}

/// Which way a [`Hop`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HopDirection {
    /// From the slot to device memory.
    ToDevice,
    /// From device memory to the slot.
    ToHost,
}

/// The end of a [`Hop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HopEnd {
    /// The hop's.
    pub token: Token,
    /// `Ok`: all bytes are at their destination. `System`: some may be.
    pub result: Result<(), Error>,
}
