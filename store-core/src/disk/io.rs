//! Orders: what the driver reads, writes and syncs, and what is known about each until it has ended.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

/// Completions of an order in a row that moved nothing, after which it counts as failed.
const IDLE_ENDS_MAX: u32 = 8;

/// What the driver has to do, exactly once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Names the order in its completion. Never used twice.
    pub op: u64,
    /// Where it begins on the disk, bytes: a multiple of the logical block.
    pub offset: u64,
    /// What to do.
    pub work: Work,
}

/// The kinds of orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Write the pieces, one after the other: one contiguous write.
    Write(Vec<Piece>),
    /// Read.
    Read {
        /// Bytes to read: a multiple of the logical block.
        bytes: u32,
        /// Where to.
        into: Target,
    },
    /// Make durable what was written by all orders that had completed when this one was given out.
    Sync,
}

/// A piece of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These bytes, from this index on.
    Bytes(Arc<[u8]>, u32),
    /// Bytes of an object, from the place that the demotion named.
    Source {
        /// The token of the demotion.
        token: u64,
        /// Where to begin in the image: data and trailer.
        offset: u32,
        /// How many bytes.
        bytes: u32,
    },
    /// Zeros.
    Zeros(u32),
}

/// Where to read to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Into memory of the driver, which passes the bytes on with the completion.
    Completion,
    /// Into a buffer of a reader.
    Buffer {
        /// The token of the stage request.
        token: u64,
        /// Where to begin in the buffer, bytes.
        offset: u32,
    },
}

/// How an order ended. After its end nothing touches the memory that it named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End<'a> {
    /// So many bytes of it were read or written; 0 for a sync. Fewer than were ordered are not a failure:
    /// the rest is ordered again.
    Done {
        /// Bytes from the beginning of the order.
        bytes: u32,
        /// For [`Target::Completion`]: what was read.
        data: &'a [u8],
    },
    /// Nothing is known about what was read or written.
    Failed(IoError),
}

/// Why an order failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoError {
    /// The device failed: `EIO`, and every error that is not listed here.
    Device,
    /// There is no space: `ENOSPC`, on a file that was not allocated as a whole.
    NoSpace,
}

impl Piece {
    /// Bytes of the piece.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        match self {
            Self::Bytes(bytes, from) => bytes.len() as u32 - from,
            Self::Source { bytes, .. } | Self::Zeros(bytes) => *bytes,
        }
    }

    /// What is left of it behind its first `bytes` bytes.
    fn rest(&self, by: u32) -> Self {
        match self {
            Self::Bytes(bytes, from) => Self::Bytes(Arc::clone(bytes), from + by),
            Self::Source { token, offset, bytes } => {
                Self::Source { token: *token, offset: offset + by, bytes: bytes - by }
            }
            Self::Zeros(bytes) => Self::Zeros(bytes - by),
        }
    }
}

impl Work {
    /// Bytes to read or write; 0 for a sync.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        match self {
            Self::Write(pieces) => pieces.iter().map(Piece::bytes).sum(),
            Self::Read { bytes, .. } => *bytes,
            Self::Sync => 0,
        }
    }

    /// What is left behind the first `by` bytes.
    fn rest(&self, mut by: u32) -> Self {
        match self {
            Self::Write(pieces) => {
                let mut left = Vec::new();
                for piece in pieces {
                    let skipped = by.min(piece.bytes());
                    by -= skipped;
                    if skipped < piece.bytes() {
                        left.push(piece.rest(skipped));
                    }
                }
                Self::Write(left)
            }
            Self::Read { bytes, into } => {
                let into = match *into {
                    Target::Completion => Target::Completion,
                    Target::Buffer { token, offset } => Target::Buffer { token, offset: offset + by },
                };
                Self::Read { bytes: bytes - by, into }
            }
            Self::Sync => Self::Sync,
        }
    }
}

/// Orders that have not ended, each with its purpose `P`.
#[derive(Debug)]
pub(super) struct Ops<P> {
    next: u64,
    block_bytes: u32,
    in_flight: BTreeMap<u64, Flight<P>>,
    orders: VecDeque<Order>,
    pub(super) short_total: u64,
}

#[derive(Debug)]
struct Flight<P> {
    purpose: P,
    at: Instant,
    offset: u64,
    /// What is left to do.
    work: Work,
    read: Vec<u8>,
    idle_ends: u32,
}

impl<P> Ops<P> {
    pub(super) const fn new(block_bytes: u32) -> Self {
        Self { next: 1, block_bytes, in_flight: BTreeMap::new(), orders: VecDeque::new(), short_total: 0 }
    }

    pub(super) const fn set_block(&mut self, block_bytes: u32) {
        self.block_bytes = block_bytes;
    }

    pub(super) fn order(&mut self, now: Instant, purpose: P, offset: u64, work: Work) {
        let read = Vec::new();
        self.submit(Flight { purpose, at: now, offset, work, read, idle_ends: 0 });
    }

    fn submit(&mut self, flight: Flight<P>) {
        let op = self.next;
        self.next += 1;
        self.orders.push_back(Order { op, offset: flight.offset, work: flight.work.clone() });
        self.in_flight.insert(op, flight);
    }

    pub(super) fn poll(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Takes the end of an order. `None`: the order is not known, or its rest was ordered again.
    pub(super) fn complete(
        &mut self,
        now: Instant,
        op: u64,
        end: End<'_>,
    ) -> Option<(P, Result<Vec<u8>, IoError>)> {
        let mut flight = self.in_flight.remove(&op)?;
        let (bytes, data) = match end {
            End::Failed(error) => return Some((flight.purpose, Err(error))),
            End::Done { bytes, data } => (bytes, data),
        };
        let whole = flight.work.bytes();
        let done = if bytes < whole { bytes / self.block_bytes * self.block_bytes } else { whole };
        if matches!(flight.work, Work::Read { into: Target::Completion, .. }) {
            match data.get(..done as usize) {
                Some(data) => flight.read.extend_from_slice(data),
                None => return Some((flight.purpose, Err(IoError::Device))),
            }
        }
        if done == whole {
            return Some((flight.purpose, Ok(flight.read)));
        }
        self.short_total += 1;
        flight.idle_ends = if done == 0 { flight.idle_ends + 1 } else { 0 };
        if flight.idle_ends >= IDLE_ENDS_MAX {
            return Some((flight.purpose, Err(IoError::Device)));
        }
        flight.work = flight.work.rest(done);
        flight.offset += u64::from(done);
        flight.at = now;
        self.submit(flight);
        None
    }

    /// The time at which the oldest order was given out.
    fn oldest(&self) -> Option<Instant> {
        self.in_flight.first_key_value().map(|(_, flight)| flight.at)
    }

    /// When the oldest order will have been in flight for longer than `limit`.
    pub(super) fn stalls_at(&self, limit: Duration) -> Option<Instant> {
        self.oldest().map(|at| at + limit)
    }

    pub(super) fn purposes(&self) -> impl Iterator<Item = &P> {
        self.in_flight.values().map(|flight| &flight.purpose)
    }

    pub(super) fn purposes_mut(&mut self) -> impl Iterator<Item = &mut P> {
        self.in_flight.values_mut().map(|flight| &mut flight.purpose)
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }
}
