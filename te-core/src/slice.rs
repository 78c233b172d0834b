//! The unit of work: one contiguous piece of a request, and its completion.

use core::fmt;

use crate::{Error, RegionId, RemoteRegionId, Token};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// From the remote region into the local region.
    Read,
    /// From the local region into the remote region.
    Write,
}

/// A position in a local region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionOffset {
    /// The local region.
    pub region: RegionId,
    /// The offset from the region's beginning, in bytes.
    pub offset: u64,
}

impl RegionOffset {
    /// The position `offset` bytes into `region`.
    #[must_use]
    pub const fn new(region: RegionId, offset: u64) -> Self {
        Self { region, offset }
    }
}

/// A position in a peer's region that is attached here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteOffset {
    /// The attached region.
    pub region: RemoteRegionId,
    /// The offset from the region's beginning, in bytes.
    pub offset: u64,
}

impl RemoteOffset {
    /// The position `offset` bytes into `region`.
    #[must_use]
    pub const fn new(region: RemoteRegionId, offset: u64) -> Self {
        Self { region, offset }
    }
}

/// One contiguous piece of a transfer, local range to remote range. 48 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The caller's name for the slice, which its completion carries.
    pub token: Token,
    /// Where the slice begins in the local region.
    pub local: RegionOffset,
    /// Where the slice begins in the remote region.
    pub remote: RemoteOffset,
    /// The length, in bytes; never 0.
    pub len: u32,
    /// The direction.
    pub op: Op,
}

const _: () = assert!(size_of::<Slice>() <= 48);

/// What is known about the destination of an operation when it has ended.
///
/// A READ never changes remote bytes: it ends `Applied` (the local range holds the remote bytes) or
/// `NotApplied` (the local range holds anything; nothing will touch it any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// All bytes are in place; for a WRITE the target has confirmed it.
    Applied,
    /// No byte was written and none will be.
    NotApplied,
    /// Some, all or none of the bytes are in place, and more may still land until a fence (L5).
    Unknown,
}

/// The one end of a slice or fence (L1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the slice or fence.
    pub token: Token,
    /// `Ok` exactly when `outcome` is `Applied`; otherwise why it failed.
    pub result: Result<(), Error>,
    /// What is known about the destination.
    pub outcome: Outcome,
    /// A copy of these bytes may still land at the target, late. Fence the remote region before the range
    /// gets other bytes or another owner (L5). Always set with `Unknown`; set with `Applied` when a WRITE
    /// succeeded on one rail after it had ended `Unknown` on another.
    pub fence_needed: bool,
    /// The CRC-32C of the bytes that the slice stored at its destination, if the transport computed it
    /// anyway; only with `Applied`, and never of a fence. See
    /// [`set_checksums`](crate::Transport::set_checksums).
    pub crc32c: Option<Crc32c>,
}

/// A CRC-32C (RFC 3720). Four bytes with alignment 1, which keep [`Completion`] at 24 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Crc32c([u8; 4]);

impl Crc32c {
    /// The checksum with this value.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value.to_ne_bytes())
    }

    /// The value of the checksum.
    #[must_use]
    pub const fn get(self) -> u32 {
        u32::from_ne_bytes(self.0)
    }
}

impl fmt::Debug for Crc32c {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.get())
    }
}

impl Completion {
    /// A slice or fence that succeeded.
    #[must_use]
    pub const fn applied(token: Token) -> Self {
        Self { token, result: Ok(()), outcome: Outcome::Applied, fence_needed: false, crc32c: None }
    }

    /// The same with the checksum of the bytes that were stored.
    #[must_use]
    pub const fn with_crc32c(self, value: u32) -> Self {
        Self { crc32c: Some(Crc32c::new(value)), ..self }
    }

    /// A slice or fence that failed, after which no remote byte has changed or will change.
    #[must_use]
    pub const fn not_applied(token: Token, error: Error) -> Self {
        Self { token, result: Err(error), outcome: Outcome::NotApplied, fence_needed: false, crc32c: None }
    }

    /// A WRITE that ended here and whose bytes may still land at the target.
    #[must_use]
    pub const fn unknown(token: Token, error: Error) -> Self {
        Self { token, result: Err(error), outcome: Outcome::Unknown, fence_needed: true, crc32c: None }
    }
}

const _: () = assert!(size_of::<Completion>() <= 24);
