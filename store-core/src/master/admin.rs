//! Operations for admins: evicting on request, listing nodes.

use te_core::Instant;

use super::Master;
use crate::allocator::Allocator;
use crate::message::{Evict, Evicted, NodeInfo};

impl Master {
    /// Evicts now, whatever the watermarks are, in the order of the policy: until no more is left than
    /// `leave` says, or nothing more can be evicted. One call evicts at most
    /// [`MasterConfig::evictions_per_call_max`](crate::MasterConfig::evictions_per_call_max); if there is
    /// more to do, [`Evicted::more`] is set.
    pub fn evict_now(&mut self, now: Instant, leave: Evict) -> Evicted {
        let mut evicted = Evicted::default();
        for _ in 0..self.config.evictions_per_call_max {
            let objects = u64::from(self.objects.len() - self.objects.processing_len());
            if objects <= leave.objects_max && self.segments.used_bytes() <= leave.used_bytes_max {
                return Evicted { more: false, ..evicted };
            }
            let Some((objects, bytes)) = self.evict_next(now) else {
                return Evicted { more: false, ..evicted };
            };
            evicted.objects += objects;
            evicted.bytes += bytes;
        }
        Evicted { more: true, ..evicted }
    }

    /// Every node with a mounted segment, by number.
    pub fn nodes(&self, now: Instant) -> impl Iterator<Item = NodeInfo> {
        self.nodes.all().into_iter().map(move |(node, known)| {
            let held = known.segments.iter().filter_map(|no| self.segments.get(*no));
            let (capacity, used) = held.fold((0, 0), |(capacity, used), segment| {
                (capacity + segment.allocator.capacity_bytes(), used + segment.allocator.used_bytes())
            });
            NodeInfo {
                node,
                incarnation: known.incarnation,
                segments: known.segments.len() as u32,
                capacity,
                used,
                silent_ms: (now - known.seen).as_millis() as u64,
            }
        })
    }
}
