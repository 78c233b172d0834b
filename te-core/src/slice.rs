//! The unit of work: one contiguous piece of a request, and its end.

use core::fmt;

use crate::{Error, RegionId, RemoteRegionId, Token};

/// Which way the bytes go.
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
    /// Bytes from the region's beginning.
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
    /// Bytes from the region's beginning.
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
    /// Names the slice in its completion.
    pub token: Token,
    /// Local region and byte offset into it.
    pub local: RegionOffset,
    /// Attached segment and byte offset into it.
    pub remote: RemoteOffset,
    /// Bytes; never 0.
    pub len: u32,
    /// Read or write.
    pub op: Op,
}

const _: () = assert!(size_of::<Slice>() <= 48);

/// What is known about the destination of an operation when it has ended.
///
/// A READ never changes remote bytes: it ends `Applied` (the local range holds the remote bytes) or `NotApplied`
/// (the local range holds anything; nothing will touch it any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// All bytes are in place; for a WRITE the target said so.
    Applied,
    /// No byte was written and none will be.
    NotApplied,
    /// Some, all or none of the bytes are in place, and more may still land until a fence (L5).
    Unknown,
}

/// The one end of one slice or fence (L1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the slice or fence.
    pub token: Token,
    /// `Ok` exactly when `outcome` is `Applied`; else why it failed.
    pub result: Result<(), Error>,
    /// What is known about the destination.
    pub outcome: Outcome,
    /// A copy of these bytes may still land at the target, late. Fence the segment before the range gets other bytes
    /// or another owner (L5). Always set with `Unknown`; set with `Applied` when a WRITE succeeded on one rail after
    /// another rail had lost sight of it.
    pub fence_needed: bool,
    /// CRC-32C of the bytes that the slice stored at its destination, where the transport came by it on the way; only with
    /// `Applied`, and never of a fence. See [`set_checksums`](crate::Transport::set_checksums).
    pub crc32c: Option<Crc32c>,
}

/// A CRC-32C (RFC 3720). Four bytes of alignment 1, which keep [`Completion`] at 24 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Crc32c([u8; 4]);

impl Crc32c {
    /// The checksum with this value.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value.to_ne_bytes())
    }

    /// Its value.
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
    /// It worked.
    #[must_use]
    pub const fn applied(token: Token) -> Self {
        Self { token, result: Ok(()), outcome: Outcome::Applied, fence_needed: false, crc32c: None }
    }

    /// The same, with the checksum of what was stored.
    #[must_use]
    pub const fn with_crc32c(self, value: u32) -> Self {
        Self { crc32c: Some(Crc32c::new(value)), ..self }
    }

    /// It failed and touched nothing that matters.
    #[must_use]
    pub const fn not_applied(token: Token, error: Error) -> Self {
        Self { token, result: Err(error), outcome: Outcome::NotApplied, fence_needed: false, crc32c: None }
    }

    /// A WRITE that ended here, but may still land there.
    #[must_use]
    pub const fn unknown(token: Token, error: Error) -> Self {
        Self { token, result: Err(error), outcome: Outcome::Unknown, fence_needed: true, crc32c: None }
    }
}

const _: () = assert!(size_of::<Completion>() <= 24);
