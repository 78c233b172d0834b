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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use core::time::Duration;

    use super::*;
    use crate::MasterConfig;
    use crate::snapshot::CHUNK_BYTES_MAX;

    fn crc32c(bytes: &[u8]) -> u32 {
        ::crc32c::crc32c(bytes)
    }

    /// A snapshot in many chunks: the chunks of a real one, in small pieces.
    fn stored() -> (Arc<Stored>, Reign) {
        let standby = Standby::new(MasterConfig { epoch: 7, ..MasterConfig::default() }).unwrap();
        let mut bytes = Vec::new();
        let mut sink = |chunk: &[u8]| -> Result<(), ()> {
            bytes.extend_from_slice(chunk);
            Ok(())
        };
        standby.snapshot(3, crc32c, &mut sink).unwrap();
        let chunks = bytes.chunks(16).map(Arc::from).collect();
        (Arc::new(Stored { lsn: 0, chunks }), Reign { lineage: 7, term: 3 })
    }

    #[test]
    fn a_snapshot_arrives_whole_though_chunks_are_lost_and_doubled_and_for_a_while_none_arrives() {
        let (stored, reign) = stored();
        let (limits, at) = (Limits::default(), Instant::from_millis);
        let (mut sending, chunks) = (Sending::new(at(0), Arc::clone(&stored)), stored.chunks.len() as u32);
        let mut receiving = Receiving::begin(MemberId(1), reign, 0, chunks, &limits).unwrap();
        let (mut sent, mut ms) = (0, 0);
        while !receiving.is_whole() {
            ms += 10;
            assert!(ms < 100_000, "it does not end");
            sending.stalls(at(ms), Duration::from_millis(40));
            while let Some(message) = sending.next(reign, 5, 3) {
                sent += 1;
                let Message::Chunk { number, bytes, .. } = message else { panic!("{message:?}") };
                assert!(number < sending.progress().0 + 3, "more is under way than may be");
                // Every fifth is lost, and for a while all are.
                if sent % 5 == 0 || (200..600).contains(&ms) {
                    continue;
                }
                let taken = receiving.take(number, Arc::clone(&bytes), &limits);
                assert_eq!(receiving.take(number, bytes, &limits), taken, "a second copy");
                if sent % 7 != 0 {
                    sending.taken(at(ms), taken);
                }
            }
        }
        assert!(sent > chunks, "nothing was lost");
        let restored = receiving.restore(crc32c).unwrap();
        let same = Standby::new(MasterConfig { epoch: 7, ..MasterConfig::default() }).unwrap();
        assert_eq!(restored.master().digest(), same.master().digest());
    }

    #[test]
    fn a_snapshot_of_another_state_or_beyond_the_limits_is_refused() {
        let (stored, reign) = stored();
        let chunks = stored.chunks.len() as u32;
        let limits = Limits::default();
        let whole = |reign: Reign, lsn| {
            let mut receiving = Receiving::begin(MemberId(1), reign, lsn, chunks, &limits).unwrap();
            for (number, chunk) in stored.chunks.iter().enumerate() {
                receiving.take(number as u32, Arc::clone(chunk), &limits);
            }
            receiving.restore(crc32c)
        };
        assert!(whole(reign, 0).is_some());
        assert!(whole(Reign { lineage: 8, ..reign }, 0).is_none(), "another lineage");
        assert!(whole(reign, 1).is_none(), "another position");

        let small = Limits { snapshot_bytes: 40, ..limits };
        let many = (small.snapshot_bytes / CHUNK_BYTES_MAX as u64 + 2) as u32;
        assert!(Receiving::begin(MemberId(1), reign, 0, many, &small).is_none());
        let mut receiving = Receiving::begin(MemberId(1), reign, 0, 1, &small).unwrap();
        assert_eq!(receiving.take(0, [0; 41].into(), &small), 0, "more bytes than are accepted");
        assert!(!receiving.is_whole());
    }
}
