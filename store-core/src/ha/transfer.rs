//! Snapshots on their way to a member.

use alloc::sync::Arc;
use alloc::vec::Vec;

use te_core::Instant;

use super::{Limits, MemberId, Message, Reign};
use crate::command_log::{Lsn, Standby};
use crate::snapshot::{self, Crc32c};

/// A snapshot of the leader.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) lsn: Lsn,
    pub(super) chunks: Vec<Arc<[u8]>>,
}

/// What a member is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) stored: Arc<Stored>,
    /// Chunks that were sent, and that the member has.
    sent: u32,
    taken: u32,
    /// When the member last had more than before, or something was sent again.
    moved: Instant,
}

impl Sending {
    pub(super) const fn new(now: Instant, stored: Arc<Stored>) -> Self {
        Self { stored, sent: 0, taken: 0, moved: now }
    }

    pub(super) fn progress(&self) -> (u32, u32) {
        (self.taken, self.chunks())
    }

    fn chunks(&self) -> u32 {
        u32::try_from(self.stored.chunks.len()).unwrap_or(u32::MAX)
    }

    /// The member has every chunk before this one.
    pub(super) fn taken(&mut self, now: Instant, chunks: u32) {
        if chunks > self.taken && chunks <= self.chunks() {
            (self.taken, self.moved) = (chunks, now);
            self.sent = self.sent.max(chunks);
        }
    }

    /// Nothing was heard for too long: what is not known to have arrived is sent again.
    pub(super) fn stalls(&mut self, now: Instant, patience: core::time::Duration) {
        if now >= self.moved + patience && self.sent > self.taken {
            (self.sent, self.moved) = (self.taken, now);
        }
    }

    /// The next chunk to send, if one may be.
    pub(super) fn next(&mut self, reign: Reign, life: u64, window: u32) -> Option<Message> {
        if self.sent >= self.taken.saturating_add(window.max(1)) {
            return None;
        }
        let bytes = Arc::clone(self.stored.chunks.get(self.sent as usize)?);
        let (number, chunks, lsn) = (self.sent, self.chunks(), self.stored.lsn);
        self.sent += 1;
        Some(Message::Chunk { reign, life, lsn, number, chunks, bytes })
    }
}

/// What a member has of a snapshot that it is being sent.
#[derive(Debug)]
pub(super) struct Receiving {
    pub(super) from: MemberId,
    pub(super) reign: Reign,
    pub(super) lsn: Lsn,
    chunks: u32,
    taken: Vec<Arc<[u8]>>,
    bytes: u64,
}

impl Receiving {
    /// `None`: the snapshot is longer than this member takes.
    pub(super) fn begin(
        from: MemberId,
        reign: Reign,
        lsn: Lsn,
        chunks: u32,
        limits: &Limits,
    ) -> Option<Self> {
        let fits = u64::from(chunks) <= limits.chunks();
        fits.then(|| Self { from, reign, lsn, chunks, taken: Vec::new(), bytes: 0 })
    }

    pub(super) fn is_of(&self, from: MemberId, reign: Reign, lsn: Lsn, chunks: u32) -> bool {
        (self.from, self.reign, self.lsn, self.chunks) == (from, reign, lsn, chunks)
    }

    /// Takes a chunk if it is the next one. Returns how many are here.
    pub(super) fn take(&mut self, number: u32, bytes: Arc<[u8]>, limits: &Limits) -> u32 {
        let have = u32::try_from(self.taken.len()).unwrap_or(u32::MAX);
        let fits = self.bytes + bytes.len() as u64 <= limits.snapshot_bytes;
        if number != have || !fits {
            return have;
        }
        self.bytes += bytes.len() as u64;
        self.taken.push(bytes);
        have + 1
    }

    pub(super) fn is_whole(&self) -> bool {
        self.taken.len() == self.chunks as usize
    }

    /// The state; `None`: it is not usable.
    pub(super) fn restore(self, crc32c: Crc32c) -> Option<Standby> {
        let mut chunks = self.taken.into_iter();
        let (mut chunk, mut at): (Arc<[u8]>, _) = (Arc::from([]), 0);
        let mut source = |to: &mut [u8]| -> Result<usize, core::convert::Infallible> {
            while at == chunk.len() {
                // Each chunk is freed as soon as it was read.
                match chunks.next() {
                    Some(next) => (chunk, at) = (next, 0),
                    None => return Ok(0),
                }
            }
            let len = to.len().min(chunk.len() - at);
            to[..len].copy_from_slice(&chunk[at..at + len]);
            at += len;
            Ok(len)
        };
        let (standby, position) = snapshot::restore(crc32c, &mut source).ok()?;
        let is_it = position.lsn == self.lsn && position.lineage == self.reign.lineage;
        is_it.then_some(standby)
    }
}
