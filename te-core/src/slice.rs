//! The unit of work: one contiguous piece of a request, and its end.

use crate::{Error, RegionId, SegmentId, Token};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// From the remote segment into the local region.
    Read,
    /// From the local region into the remote segment.
    Write,
}

/// One contiguous piece of a transfer, local range to remote range. 48 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Names the slice in its completion.
    pub token: Token,
    /// Local region and byte offset into it.
    pub local: (RegionId, u64),
    /// Attached segment and byte offset into it.
    pub remote: (SegmentId, u64),
    /// Bytes; never 0.
    pub len: u32,
    /// Which way.
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
}

impl Completion {
    /// It worked.
    #[must_use]
    pub const fn applied(token: Token) -> Self {
        Self { token, result: Ok(()), outcome: Outcome::Applied, fence_needed: false }
    }

    /// It failed and touched nothing that matters.
    #[must_use]
    pub const fn not_applied(token: Token, error: Error) -> Self {
        Self { token, result: Err(error), outcome: Outcome::NotApplied, fence_needed: false }
    }

    /// A WRITE that ended here, but may still land there.
    #[must_use]
    pub const fn unknown(token: Token, error: Error) -> Self {
        Self { token, result: Err(error), outcome: Outcome::Unknown, fence_needed: true }
    }
}

const _: () = assert!(size_of::<Completion>() <= 24);
