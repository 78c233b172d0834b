//! Memory that another process or a device may write.
//!
//! Two rules hold for every byte that a peer can reach, and every `SAFETY` comment in the project relies on
//! them:
//!
//! 1. From `register` until `deregister` returned `Ok`, the span stays mapped.
//! 2. In that time there is no `&[u8]` or `&mut [u8]` to bytes that a peer may write. They are read through a
//!    [`VolatileSpan`], which copies them out.
#![allow(unsafe_code, reason = "this module is about raw memory; the two rules above are its contract")]

use alloc::string::String;
use core::fmt;

use crate::{Error, ErrorKind};

bitflags::bitflags! {
    /// The rights of local operations and of peers to a registered region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u8 {
        /// Local operations may read it (source of a WRITE).
        const LOCAL_READ = 1;
        /// Local operations may write it (destination of a READ).
        const LOCAL_WRITE = 1 << 1;
        /// A peer that holds the export may read it.
        const REMOTE_READ = 1 << 2;
        /// A peer that holds the export may write it.
        const REMOTE_WRITE = 1 << 3;
    }
}

impl Access {
    /// A private buffer: source and destination of local operations, never exported.
    pub const LOCAL: Self = Self::LOCAL_READ.union(Self::LOCAL_WRITE);

    /// Whether any peer can reach the region.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        self.intersects(Self::REMOTE_READ.union(Self::REMOTE_WRITE))
    }
}

bitflags::bitflags! {
    /// Kinds of memory, by what has to be able to touch them. A transport declares the kinds that it can
    /// touch ([`Capabilities::memory`](crate::Capabilities::memory)); a [`Location`] is of exactly one kind.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct MemoryKinds: u32 {
        /// Memory that the CPU loads from and stores to.
        const HOST = 1;
        /// Memory of an NVIDIA GPU.
        const CUDA = 1 << 1;
        /// Memory of an AMD GPU.
        const HIP = 1 << 2;
        /// Memory of an Intel GPU.
        const XPU = 1 << 3;
        /// Memory that several hosts map whose caches do not know of each other. The CPU can load and store
        /// it, but other hosts see that only after steps that a transport for such memory knows.
        const POOL = 1 << 4;
    }
}

/// The vendor of a GPU. The name of its memory begins with [`prefix`](Self::prefix).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum GpuVendor {
    /// NVIDIA; memory is named `cuda:N`.
    Nvidia,
    /// AMD; memory is named `hip:N`.
    Amd,
    /// Intel; memory is named `xpu:N`.
    Intel,
}

impl GpuVendor {
    /// All vendors.
    pub const ALL: [Self; 3] = [Self::Nvidia, Self::Amd, Self::Intel];

    /// The beginning of the name of its memory.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Nvidia => "cuda",
            Self::Amd => "hip",
            Self::Intel => "xpu",
        }
    }

    /// The kind of its memory.
    #[must_use]
    pub const fn kind(self) -> MemoryKinds {
        match self {
            Self::Nvidia => MemoryKinds::CUDA,
            Self::Amd => MemoryKinds::HIP,
            Self::Intel => MemoryKinds::XPU,
        }
    }

    /// The vendor with this PCI vendor id (<https://pcisig.com/membership/member-companies>).
    #[must_use]
    pub const fn from_pci(vendor: u16) -> Option<Self> {
        match vendor {
            0x10de => Some(Self::Nvidia),
            0x1002 => Some(Self::Amd),
            0x8086 => Some(Self::Intel),
            _ => None,
        }
    }
}

/// Where memory is. Written as `cpu:0`, `cuda:3`, or `*` for [`Host`](Self::Host).
///
/// ```
/// use te_core::{GpuVendor, Location, MemoryKinds};
///
/// let location: Location = "cuda:3".parse()?;
/// assert_eq!(location, Location::Device(GpuVendor::Nvidia, 3));
/// assert_eq!((location.kind(), Location::Numa(1).kind()), (MemoryKinds::CUDA, MemoryKinds::HOST));
/// assert_eq!(Location::Numa(1).to_string(), "cpu:1");
/// assert!("tpu:0".parse::<Location>().is_err());
/// # Ok::<(), te_core::LocationError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Location {
    /// Host memory whose NUMA node is unknown or irrelevant. In a priority matrix: every location without a
    /// row.
    #[default]
    Host,
    /// Host memory of the NUMA node with this number.
    Numa(u16),
    /// Memory of a GPU: the vendor, and the number of the GPU among the vendor's, in PCI order, from 0.
    Device(GpuVendor, u16),
    /// Memory of a pool that hosts share without coherent caches ([`MemoryKinds::POOL`]).
    Pool,
}

impl Location {
    /// The kind of memory at this location.
    #[must_use]
    pub const fn kind(self) -> MemoryKinds {
        match self {
            Self::Host | Self::Numa(_) => MemoryKinds::HOST,
            Self::Device(vendor, _) => vendor.kind(),
            Self::Pool => MemoryKinds::POOL,
        }
    }
}

/// Writes `cpu:0`, `cuda:3`, `pool` or `*`, which [`FromStr`](core::str::FromStr) parses.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("*"),
            Self::Numa(node) => write!(f, "cpu:{node}"),
            Self::Device(vendor, index) => write!(f, "{}:{index}", vendor.prefix()),
            Self::Pool => f.write_str("pool"),
        }
    }
}

impl core::str::FromStr for Location {
    type Err = LocationError;

    fn from_str(text: &str) -> Result<Self, LocationError> {
        let wrong = || LocationError(text.chars().take(LocationError::CHARS_MAX).collect());
        if text == "*" {
            return Ok(Self::Host);
        }
        if text == "pool" {
            return Ok(Self::Pool);
        }
        let (kind, number) = text.split_once(':').ok_or_else(wrong)?;
        // `parse` would accept "+1".
        if !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        let number = number.parse().map_err(|_| wrong())?;
        if kind == "cpu" {
            return Ok(Self::Numa(number));
        }
        let vendor = GpuVendor::ALL.into_iter().find(|vendor| vendor.prefix() == kind);
        vendor.map(|vendor| Self::Device(vendor, number)).ok_or_else(wrong)
    }
}

/// A text that is not a [`Location`]; holds its first 64 characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocationError(String);

impl LocationError {
    const CHARS_MAX: usize = 64;
}

impl fmt::Display for LocationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        write!(
            f,
            "{text:?} is not a location: write cpu:0, cuda:0, hip:0 or xpu:0 with the number of the node or device, pool for a CXL pool whose hosts are not coherent, or * for all other memory"
        )
    }
}

impl core::error::Error for LocationError {}

/// A range of bytes: address, length, location. An address, not a borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemSpan {
    ptr: *mut u8,
    len: usize,
    location: Location,
}

// SAFETY: a span is only an address; each use of the memory behind it is unsafe and justified where it
// happens.
unsafe impl Send for MemSpan {}
// SAFETY: as above; a shared span gives no access.
unsafe impl Sync for MemSpan {}

impl MemSpan {
    /// `len` bytes of host memory at `ptr`.
    #[must_use]
    pub const fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, location: Location::Host }
    }

    /// The same bytes at `location`.
    #[must_use]
    pub const fn at(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// The address of the first byte.
    #[must_use]
    pub const fn as_ptr(self) -> *mut u8 {
        self.ptr
    }

    /// The length, in bytes.
    #[must_use]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Where the memory is.
    #[must_use]
    pub const fn location(self) -> Location {
        self.location
    }

    /// Checks that the memory is of one of `kinds`. Each transport's `register` begins with this check (L8).
    ///
    /// # Errors
    /// `Unsupported` when it is of another kind.
    pub fn require(self, kinds: MemoryKinds) -> Result<(), Error> {
        match kinds.contains(self.location.kind()) {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Unsupported)),
        }
    }

    /// Whether `len` bytes from `offset` on lie inside the span.
    #[must_use]
    pub const fn contains(self, offset: u64, len: u64) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.len as u64,
            None => false,
        }
    }

    /// The part of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `OutOfRange` when the part does not lie inside the span.
    pub fn part(self, offset: u64, len: u64) -> Result<Self, Error> {
        if !self.contains(offset, len) {
            return Err(Error::new(ErrorKind::OutOfRange));
        }
        Ok(Self { ptr: self.ptr.wrapping_add(offset as usize), len: len as usize, location: self.location })
    }
}

/// A view of memory that a peer may be writing at the same time: bytes are copied in and out, never borrowed
/// (L7).
///
/// A copy that is taken while a peer writes holds a mix of old and new bytes, which a checksum detects. The
/// view never makes a reference, whose bytes the compiler could assume to be stable.
#[derive(Clone, Copy, Debug)]
pub struct VolatileSpan<'a> {
    span: MemSpan,
    _mapped: core::marker::PhantomData<&'a ()>,
}

impl VolatileSpan<'_> {
    /// No bytes.
    pub const EMPTY: Self =
        Self { span: MemSpan::new(core::ptr::null_mut(), 0), _mapped: core::marker::PhantomData };

    /// # Safety
    /// `span` is host memory, mapped readable and writable, for as long as the view lives, and no `&` or
    /// `&mut` to it exists.
    #[must_use]
    pub const unsafe fn new(span: MemSpan) -> Self {
        Self { span, _mapped: core::marker::PhantomData }
    }

    /// The length, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// Copies `out.len()` bytes from `offset` on into `out`.
    ///
    /// # Errors
    /// `OutOfRange` when they do not lie inside the view; nothing was copied.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let part = self.span.part(offset, out.len() as u64)?;
        // SAFETY: `part` lies inside memory that the caller of `new` keeps mapped; `out` is exclusively ours,
        // so they do not overlap.
        unsafe { copy_bytes(part.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `bytes` into the memory from `offset` on.
    ///
    /// # Errors
    /// `OutOfRange` when they do not fit; nothing was copied.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let part = self.span.part(offset, bytes.len() as u64)?;
        // SAFETY: as in `read`, in the other direction.
        unsafe { copy_bytes(bytes.as_ptr(), part.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Copies `len` bytes that a peer may be changing at the same time.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and the two do not overlap.
pub unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    // The copy is opaque to the optimiser for any length that is not a constant, and no reference is made.
    // `vm-memory` and the memory-mapped files of other crates rely on the same.
    // SAFETY: the caller's promise.
    unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
}
