//! Objects that leave: the policy has chosen them ahead of their eviction, so that there is time to copy them
//! to a disk. Eviction takes those that have their copy, or need none, and never waits for a disk.

use te_core::Instant;

use super::{Objects, Order, State};
use crate::TenantNo;
use crate::eviction::{Eviction as _, Standing};

/// Objects that leave and are examined for one victim that has its copy.
const LEAVING_LOOKS_MAX: usize = 64;

impl Objects {
    /// Bytes of objects that leave, each object counted once.
    pub(crate) const fn leaving_bytes(&self) -> u64 {
        self.leaving_bytes
    }

    /// Takes the policy's next choice that is not leased: it leaves. Examines at most `looks_max` candidates.
    pub(crate) fn leave_next(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        looks_max: u32,
    ) -> Option<(u32, Standing)> {
        let index = self.coldest(now, tenant, looks_max)?;
        let (order, nodes) = self.order(index);
        let standing = order.policy.standing(nodes, index);
        order.policy.remove(nodes, index);
        order.leaving.push_back(nodes, index);
        nodes.node_mut(index).marked = false;
        let entry = &mut self.entries[index];
        entry.state = State::Leaving;
        self.leaving_bytes += entry.len;
        Some((index, standing))
    }

    /// Notes whether an object that leaves waits for its copy. Another object is not changed.
    pub(crate) fn await_copy(&mut self, index: u32, awaits: bool) {
        if self.entries[index].state == State::Leaving {
            self.nodes.node_mut(index).marked = awaits;
        }
    }

    /// As [`Self::await_copy`], if the entry still has this object.
    pub(crate) fn await_copy_of(&mut self, index: u32, generation: u64, awaits: bool) {
        if self.entries[index].generation == generation {
            self.await_copy(index, awaits);
        }
    }

    /// The first object that leaves, is not leased, and does not wait for its copy, if there is one among the
    /// first ones.
    pub(crate) fn clean_victim(&mut self, now: Instant, tenant: TenantNo) -> Option<u32> {
        self.first_leaving(now, tenant).0
    }

    /// As [`Self::clean_victim`]; if there is none, the first object that leaves and is not leased.
    pub(super) fn leaving_victim(&mut self, now: Instant, tenant: TenantNo) -> Option<u32> {
        let (clean, waits) = self.first_leaving(now, tenant);
        clean.or(waits)
    }

    fn first_leaving(&mut self, now: Instant, tenant: TenantNo) -> (Option<u32>, Option<u32>) {
        let leaving = self.orders[tenant.index()].leaving;
        let mut waits = None;
        let mut looks = 0;
        let mut found = None;
        for index in leaving.iter(&self.nodes).take(LEAVING_LOOKS_MAX) {
            looks += 1;
            if self.lease_end(index) > now {
                continue;
            }
            if !self.nodes.node(index).marked {
                found = Some(index);
                break;
            }
            waits = waits.or(Some(index));
        }
        (0..looks).for_each(|_| self.nodes.look());
        (found, waits)
    }

    /// An object that leaves becomes a candidate again.
    pub(super) fn stay(&mut self, index: u32) {
        self.unlist_leaving(index);
        self.entries[index].state = State::Candidate;
        let (order, nodes) = self.order(index);
        order.policy.put_back(nodes, index);
        self.fed(index);
    }

    /// Removes an object from the list of those that leave. Its state is meaningless until it is set again.
    pub(super) fn unlist_leaving(&mut self, index: u32) {
        let (Order { leaving, .. }, nodes) = self.order(index);
        leaving.unlink(nodes, index);
        nodes.node_mut(index).marked = false;
        self.leaving_bytes -= self.entries[index].len;
    }
}
