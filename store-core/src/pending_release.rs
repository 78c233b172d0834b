//! Pending release: space that belongs to no object any more and must not be given out yet.
//!
//! There are three reasons. A writer that never reported that it is quiet may still have writes under way in
//! the fabric; its space is released when it reports that it is quiet, or when the node reports that it has
//! cut the writer off. Time alone releases nothing; it only decides when the node is told to. A node may
//! still read into the place of a copy that was given up; that space is released when the node reports that
//! it is quiet, or after the release timeout, since the memory is the node's own. And a reader may still be
//! copying under a lease that outlives the object; that space is released at the end of the lease, or when
//! the last reader has returned its lease, and not before.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use foldhash::fast::FixedState;
use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::chunks::stored_len;
use crate::map::Map;
use crate::objects::{Placements, Removed, charge};
use crate::segments::{Placed, Segments};
use crate::slab::{trim_heap, trim_map};
use crate::{SegmentNo, TenantNo};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reason {
    /// A writer may still write there.
    Writer,
    /// A node may still copy to it.
    Copy,
    /// A reader may still read it.
    Leased,
}

#[derive(Debug, Serialize, Deserialize)]
struct Held {
    /// The tenant that is charged for the space, and that alone can release it.
    tenant: TenantNo,
    replicas: Placements,
    /// The length that was allocated, bytes.
    len: u64,
    until: Instant,
    reason: Reason,
    /// The writer that may still write; 0: unknown.
    writer: u64,
    /// Number of leases that were not returned; 0: it is unknown, and the space is held until they end.
    leases: u8,
    /// No node can report whether that writer is gone.
    unknown: bool,
}

/// Space that is pending release, by the generation of the put that it was allocated to.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PendingRelease {
    held: Map<u64, Held, FixedState>,
    /// One entry per put that was added. It may name a put that was released or postponed since; `held`
    /// decides.
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    bytes: [u64; 3],
    /// Bytes of unknown writers and of writers that no node can report about.
    unknown_bytes: u64,
    /// Per tenant: bytes as its quota counts them.
    charged: Vec<u64>,
}

impl PendingRelease {
    pub(crate) fn new() -> Self {
        Self {
            held: Map::with_seed(0),
            queue: BinaryHeap::new(),
            bytes: [0; 3],
            unknown_bytes: 0,
            charged: Vec::new(),
        }
    }

    /// Adds the replicas of a put, to be released at `until` or later.
    pub(crate) fn hold(
        &mut self,
        segments: &mut Segments,
        removed: Removed,
        until: Instant,
        reason: Reason,
        writer: u64,
    ) {
        let Removed { tenant, generation, replicas, len, leases, .. } = removed;
        let len = stored_len(len);
        let bytes: u64 = replicas.as_slice().iter().map(|placed| segments.hold(placed, len)).sum();
        self.bytes[reason as usize] += bytes;
        if self.charged.len() <= tenant.index() {
            self.charged.resize(tenant.index() + 1, 0);
        }
        self.charged[tenant.index()] += charge(len, replicas.as_slice().len());
        let unknown = false;
        self.held.insert(generation, Held { tenant, replicas, len, until, reason, writer, leases, unknown });
        self.queue.push(Reverse((until, generation)));
    }

    /// The writer of this put is quiet: its space is released now. Returns the writer, if there was such
    /// space.
    pub(crate) fn release_writer(
        &mut self,
        segments: &mut Segments,
        tenant: TenantNo,
        generation: u64,
    ) -> Option<u64> {
        let ours = |held: &&Held| held.reason != Reason::Leased && held.tenant == tenant;
        let writer = self.held.get(&generation).filter(ours)?.writer;
        self.release(segments, generation);
        Some(writer)
    }

    /// A reader returns a lease on an object that is gone. With the last lease its space is released. Returns
    /// whether it is.
    pub(crate) fn return_lease(&mut self, segments: &mut Segments, generation: u64) -> bool {
        let leased = |held: &&mut Held| held.reason == Reason::Leased && held.leases > 0;
        let Some(held) = self.held.get_mut(&generation).filter(leased) else { return false };
        held.leases -= 1;
        let last = held.leases == 0;
        if last {
            self.release(segments, generation);
        }
        last
    }

    /// The writer that may still write to the space of this put.
    pub(crate) fn writer(&self, generation: u64) -> Option<u64> {
        self.held.get(&generation).map(|held| held.writer)
    }

    /// The space of this put: the replicas, and the requested bytes per replica.
    pub(crate) fn get(&self, generation: u64) -> Option<(&Placements, u64)> {
        self.held.get(&generation).map(|held| (&held.replicas, held.len))
    }

    /// Marks the space of this put as one about whose writer no node can report.
    pub(crate) fn note_unknown(&mut self, generation: u64) {
        if let Some(held) = self.held.get_mut(&generation).filter(|held| !held.unknown) {
            held.unknown = true;
            self.unknown_bytes += charge(held.len, held.replicas.as_slice().len());
        }
    }

    /// Releases the space of this put on some segments. Returns the bytes, and whether any space is left.
    pub(crate) fn release_on(
        &mut self,
        segments: &mut Segments,
        generation: u64,
        on: impl Fn(&Segments, SegmentNo) -> bool,
    ) -> (u64, bool) {
        let Some(held) = self.held.get_mut(&generation) else { return (0, false) };
        let mut freed = 0;
        let mut left = true;
        let gone: crate::codec::Short<Placed, { crate::message::REPLICAS_MAX }> = {
            let mut gone = crate::codec::Short::new();
            let there = held.replicas.as_slice().iter().filter(|placed| on(segments, placed.segment));
            // The list has room for all replicas of one object.
            for placed in there {
                let _ = gone.push(*placed);
            }
            gone
        };
        for placed in gone.iter() {
            freed += segments.free(placed);
            left = held.replicas.drop_segment(placed.segment);
        }
        self.bytes[held.reason as usize] -= freed;
        self.charged[held.tenant.index()] -= charge(held.len, gone.len());
        if held.unknown {
            self.unknown_bytes -= charge(held.len, gone.len());
        }
        if !left {
            self.held.remove(&generation);
        }
        (freed, left)
    }

    /// The writer of this put is alive and may still write. Returns whether the put's space is pending
    /// release.
    pub(crate) fn put_off_writer(&mut self, tenant: TenantNo, generation: u64, until: Instant) -> bool {
        let ours = |held: &&mut Held| held.reason != Reason::Leased && held.tenant == tenant;
        let Some(held) = self.held.get_mut(&generation).filter(ours) else {
            return false;
        };
        // The old entry of the queue stays: `settle` postpones it when it is due. A writer that repeats its
        // report must not make the queue grow.
        held.until = held.until.max(until);
        true
    }

    /// Releases what is due, except for space that writers may still write to: returns the generations of
    /// those.
    pub(crate) fn settle(&mut self, segments: &mut Segments, now: Instant) -> Vec<u64> {
        let mut due = Vec::new();
        while let Some(&Reverse((until, generation))) = self.queue.peek() {
            if until > now {
                break;
            }
            self.queue.pop();
            match self.held.get(&generation) {
                Some(held) if held.until > now => self.queue.push(Reverse((held.until, generation))),
                Some(held) if held.reason == Reason::Writer => due.push(generation),
                Some(_) => self.release(segments, generation),
                None => {}
            }
        }
        due
    }

    /// A segment is about to be unmounted, and its space with it. Called while it is still mounted. Returns
    /// writers and generations of which no space is left.
    pub(crate) fn drop_segment(&mut self, no: SegmentNo, rounded: impl Fn(u64) -> u64) -> Vec<(u64, u64)> {
        let mut gone = Vec::new();
        let (bytes, charged, unknown) = (&mut self.bytes, &mut self.charged, &mut self.unknown_bytes);
        self.held.retain(|generation, held| {
            if held.replicas.as_slice().iter().all(|placed| placed.segment != no) {
                return true;
            }
            bytes[held.reason as usize] -= rounded(held.len);
            charged[held.tenant.index()] -= charge(held.len, 1);
            if held.unknown {
                *unknown -= charge(held.len, 1);
            }
            let left = held.replicas.drop_segment(no);
            if !left {
                gone.push((held.writer, *generation));
            }
            left
        });
        gone
    }

    /// The earliest time at which something is due. It may be too early, when something was postponed.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.queue.peek().map(|Reverse((until, _))| *until)
    }

    pub(crate) fn bytes(&self, reason: Reason) -> u64 {
        self.bytes[reason as usize]
    }

    /// Bytes that are pending release for any reason.
    pub(crate) fn bytes_in_all(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Bytes of unknown writers and of writers that no node can report about.
    pub(crate) const fn unknown_bytes(&self) -> u64 {
        self.unknown_bytes
    }

    /// Bytes of a tenant that are pending release, as its quota counts them.
    pub(crate) fn charged(&self, tenant: TenantNo) -> u64 {
        self.charged.get(tenant.index()).copied().unwrap_or(0)
    }

    /// Returns memory that is no longer needed.
    pub(crate) fn tidy(&mut self) {
        trim_map(&mut self.held);
        trim_heap(&mut self.queue);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.held.allocation_size() + self.queue.capacity() * size_of::<Reverse<(Instant, u64)>>()
    }

    fn release(&mut self, segments: &mut Segments, generation: u64) {
        if let Some(held) = self.held.remove(&generation) {
            let bytes: u64 = held.replicas.as_slice().iter().map(|placed| segments.free(placed)).sum();
            self.bytes[held.reason as usize] -= bytes;
            if held.unknown {
                self.unknown_bytes -= charge(held.len, held.replicas.as_slice().len());
            }
            self.charged[held.tenant.index()] -= charge(held.len, held.replicas.as_slice().len());
        }
    }
}
