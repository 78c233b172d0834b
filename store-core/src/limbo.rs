//! Limbo: bytes that belong to no object any more, but must not be given out yet.
//!
//! Two things bring them here. A writer that never said it is quiet may still have writes under way in the fabric (*zombie*);
//! its bytes come back when it says so, or at the release timeout. And a reader may still be copying under a lease that
//! outlives the object (*leased*); its bytes come back when the lease is over, whatever anybody says.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use te_core::Instant;

use crate::TenantNo;
use crate::blocks::stored_len;
use crate::objects::{Placements, Removed, charge};
use crate::segments::Segments;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Zombie,
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
}

/// What is held back, by the generation of the put that it was allocated to.
#[derive(Debug)]
pub(crate) struct Limbo {
    held: HashMap<u64, Held, FixedState>,
    /// One entry for each put that was held. It may name what is gone or was put off; `held` decides.
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    bytes: [u64; 2],
    /// By tenant, as its quota counts them.
    charged: Vec<u64>,
}

impl Limbo {
    pub(crate) fn new() -> Self {
        Self {
            held: HashMap::with_hasher(FixedState::with_seed(0)),
            queue: BinaryHeap::new(),
            bytes: [0; 2],
            charged: Vec::new(),
        }
    }

    /// Holds the replicas of a put back until `until`.
    pub(crate) fn hold(&mut self, segments: &mut Segments, removed: Removed, until: Instant, reason: Reason) {
        let Removed { tenant, generation, replicas, len, .. } = removed;
        let len = stored_len(len);
        let bytes: u64 = replicas.as_slice().iter().map(|placed| segments.hold(placed, len)).sum();
        self.bytes[reason as usize] += bytes;
        if self.charged.len() <= usize::from(tenant) {
            self.charged.resize(usize::from(tenant) + 1, 0);
        }
        self.charged[usize::from(tenant)] += charge(len, replicas.as_slice().len());
        self.held.insert(generation, Held { tenant, replicas, len, until, reason });
        self.queue.push(Reverse((until, generation)));
    }

    /// The writer of this put is quiet: its bytes come back now. Gives whether they were here.
    pub(crate) fn release_zombie(
        &mut self,
        segments: &mut Segments,
        tenant: TenantNo,
        generation: u64,
    ) -> bool {
        let ours = |held: &Held| held.reason == Reason::Zombie && held.tenant == tenant;
        let here = self.held.get(&generation).is_some_and(ours);
        if here {
            self.release(segments, generation);
        }
        here
    }

    /// The writer of this put lives and may still write. Gives whether its bytes are here.
    pub(crate) fn put_off_zombie(&mut self, tenant: TenantNo, generation: u64, until: Instant) -> bool {
        let ours = |held: &&mut Held| held.reason == Reason::Zombie && held.tenant == tenant;
        let Some(held) = self.held.get_mut(&generation).filter(ours) else {
            return false;
        };
        // Its entry in the queue stays: `settle` puts it off when it gets there. A writer that says so again and again
        // must not make the queue grow.
        held.until = held.until.max(until);
        true
    }

    /// Gives back what is due.
    pub(crate) fn settle(&mut self, segments: &mut Segments, now: Instant) {
        while let Some(&Reverse((until, generation))) = self.queue.peek() {
            if until > now {
                return;
            }
            self.queue.pop();
            match self.held.get(&generation) {
                Some(held) if held.until > now => self.queue.push(Reverse((held.until, generation))),
                Some(_) => self.release(segments, generation),
                None => {}
            }
        }
    }

    /// A segment is going away, and with it what was held back there. Called while it is still mounted.
    pub(crate) fn drop_segment(&mut self, no: u32, rounded: impl Fn(u64) -> u64) {
        let (bytes, charged) = (&mut self.bytes, &mut self.charged);
        self.held.retain(|_, held| {
            if held.replicas.as_slice().iter().all(|placed| placed.segment != no) {
                return true;
            }
            bytes[held.reason as usize] -= rounded(held.len);
            charged[usize::from(held.tenant)] -= charge(held.len, 1);
            held.replicas.drop_segment(no)
        });
    }

    /// When something is due, at the earliest. What was put off may make it too early.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.queue.peek().map(|Reverse((until, _))| *until)
    }

    pub(crate) fn bytes(&self, reason: Reason) -> u64 {
        self.bytes[reason as usize]
    }

    /// Bytes of a tenant's that are held back, as its quota counts them.
    pub(crate) fn charged(&self, tenant: TenantNo) -> u64 {
        self.charged.get(usize::from(tenant)).copied().unwrap_or(0)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.held.allocation_size() + self.queue.capacity() * size_of::<Reverse<(Instant, u64)>>()
    }

    fn release(&mut self, segments: &mut Segments, generation: u64) {
        if let Some(held) = self.held.remove(&generation) {
            let bytes: u64 = held.replicas.as_slice().iter().map(|placed| segments.free(placed)).sum();
            self.bytes[held.reason as usize] -= bytes;
            self.charged[usize::from(held.tenant)] -= charge(held.len, held.replicas.as_slice().len());
        }
    }
}
