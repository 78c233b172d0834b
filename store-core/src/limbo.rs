//! Limbo: bytes that belong to no object any more, but must not be given out yet.
//!
//! Three things bring them here. A writer that never said it is quiet may still have writes under way in the fabric; its bytes
//! come back when it says so, or when their node says that it has cut the writer off: time alone frees nothing, it only decides
//! when the node is asked. A node may still read into the place of a copy that was given up; its bytes come back when it says
//! that it is quiet, or after the release timeout, since it is its own memory. And a reader may still be copying under a lease
//! that outlives the object; its bytes come back when the lease is over, whatever anybody says.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use te_core::Instant;

use crate::blocks::stored_len;
use crate::objects::{Placements, Removed, charge};
use crate::segments::{Placed, Segments};
use crate::slab::{trim_heap, trim_map};
use crate::{SegmentNo, TenantNo};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// A writer may still write there.
    Writer,
    /// A node may still copy there.
    Copy,
    /// A reader may still read there.
    Leased,
}

#[derive(Debug)]
struct Held {
    /// Whose. Nobody else's word releases it.
    tenant: TenantNo,
    replicas: Placements,
    /// As allocated.
    len: u64,
    until: Instant,
    reason: Reason,
    /// Who may still write; 0: nobody knows.
    writer: u64,
    /// Nobody can be asked whether that writer is gone.
    unknown: bool,
}

/// What is held back, by the generation of the put that it was allocated to.
#[derive(Debug)]
pub(crate) struct Limbo {
    held: HashMap<u64, Held, FixedState>,
    /// One entry for each put that was held. It may name what is gone or was put off; `held` decides.
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    bytes: [u64; 3],
    /// Of writers', those that nobody can be asked about.
    unknown_bytes: u64,
    /// By tenant, as its quota counts them.
    charged: Vec<u64>,
}

impl Limbo {
    pub(crate) fn new() -> Self {
        Self {
            held: HashMap::with_hasher(FixedState::with_seed(0)),
            queue: BinaryHeap::new(),
            bytes: [0; 3],
            unknown_bytes: 0,
            charged: Vec::new(),
        }
    }

    /// Holds the replicas of a put back until `until`.
    pub(crate) fn hold(
        &mut self,
        segments: &mut Segments,
        removed: Removed,
        until: Instant,
        reason: Reason,
        writer: u64,
    ) {
        let Removed { tenant, generation, replicas, len, .. } = removed;
        let len = stored_len(len);
        let bytes: u64 = replicas.as_slice().iter().map(|placed| segments.hold(placed, len)).sum();
        self.bytes[reason as usize] += bytes;
        if self.charged.len() <= usize::from(tenant) {
            self.charged.resize(usize::from(tenant) + 1, 0);
        }
        self.charged[usize::from(tenant)] += charge(len, replicas.as_slice().len());
        self.held.insert(generation, Held { tenant, replicas, len, until, reason, writer, unknown: false });
        self.queue.push(Reverse((until, generation)));
    }

    /// The writer of this put is quiet: its bytes come back now. Gives who it was, if they were here.
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

    /// Who may still write to what is held under this name.
    pub(crate) fn writer(&self, generation: u64) -> Option<u64> {
        self.held.get(&generation).map(|held| held.writer)
    }

    /// What is held under this name: where, and how many bytes at each place, as they were asked for.
    pub(crate) fn get(&self, generation: u64) -> Option<(&Placements, u64)> {
        self.held.get(&generation).map(|held| (&held.replicas, held.len))
    }

    /// Nobody can be asked about the writer of this.
    pub(crate) fn note_unknown(&mut self, generation: u64) {
        if let Some(held) = self.held.get_mut(&generation).filter(|held| !held.unknown) {
            held.unknown = true;
            self.unknown_bytes += charge(held.len, held.replicas.as_slice().len());
        }
    }

    /// Frees what is held under this name on some segments. Gives how many bytes, and whether any are left.
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
            // There are no more than fit.
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
        self.charged[usize::from(held.tenant)] -= charge(held.len, gone.len());
        if held.unknown {
            self.unknown_bytes -= charge(held.len, gone.len());
        }
        if !left {
            self.held.remove(&generation);
        }
        (freed, left)
    }

    /// The writer of this put lives and may still write. Gives whether its bytes are here.
    pub(crate) fn put_off_writer(&mut self, tenant: TenantNo, generation: u64, until: Instant) -> bool {
        let ours = |held: &&mut Held| held.reason != Reason::Leased && held.tenant == tenant;
        let Some(held) = self.held.get_mut(&generation).filter(ours) else {
            return false;
        };
        // Its entry in the queue stays: `settle` puts it off when it gets there. A writer that says so again and again
        // must not make the queue grow.
        held.until = held.until.max(until);
        true
    }

    /// Gives back what is due, but for what writers may still write to: of that, the names.
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

    /// A segment is going away, and with it what was held back there. Called while it is still mounted.
    /// Gives writers and generations of which nothing is left.
    pub(crate) fn drop_segment(&mut self, no: u32, rounded: impl Fn(u64) -> u64) -> Vec<(u64, u64)> {
        let mut gone = Vec::new();
        let (bytes, charged, unknown) = (&mut self.bytes, &mut self.charged, &mut self.unknown_bytes);
        self.held.retain(|generation, held| {
            if held.replicas.as_slice().iter().all(|placed| placed.segment != no) {
                return true;
            }
            bytes[held.reason as usize] -= rounded(held.len);
            charged[usize::from(held.tenant)] -= charge(held.len, 1);
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

    /// When something is due, at the earliest. What was put off may make it too early.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.queue.peek().map(|Reverse((until, _))| *until)
    }

    pub(crate) fn bytes(&self, reason: Reason) -> u64 {
        self.bytes[reason as usize]
    }

    /// Bytes held back for whatever reason.
    pub(crate) fn bytes_in_all(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// Bytes of writers that nobody can be asked about.
    pub(crate) const fn unknown_bytes(&self) -> u64 {
        self.unknown_bytes
    }

    /// Bytes of a tenant's that are held back, as its quota counts them.
    pub(crate) fn charged(&self, tenant: TenantNo) -> u64 {
        self.charged.get(usize::from(tenant)).copied().unwrap_or(0)
    }

    /// Gives memory back that is not needed any more.
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
            self.charged[usize::from(held.tenant)] -= charge(held.len, held.replicas.as_slice().len());
        }
    }
}
