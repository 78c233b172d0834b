//! Shares: per tenant, what it uses, its limits, and which of its objects may be evicted.
//!
//! Every tenant has an eviction policy of its own, over nodes that all tenants share, so that nothing that
//! one tenant does moves an object of another tenant in its order. The numbers in [`Usage`], one cache line
//! per tenant, decide which tenant has to give when room is needed for all: with one tenant there is nothing
//! to decide, with a thousand it takes as long as reading 64 KiB.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::{Entry, Objects};
use crate::allocator::GRAIN_BYTES;
use crate::chunks::stored_len;
use crate::eviction::{Eviction as _, EvictionPolicy, List, Policy};
use crate::{TenantConfig, TenantNo};

/// The order in which a tenant's objects are evicted.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) policy: Policy,
    /// Softly pinned objects, the oldest renewal first.
    pub(super) soft: List,
    /// Objects that leave, the first choice first.
    pub(super) leaving: List,
}

impl Order {
    fn new(policy: EvictionPolicy) -> Self {
        Self { policy: policy.build(), soft: List::EMPTY, leaving: List::EMPTY }
    }
}

/// What a tenant uses, and its limits.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// Bytes of its objects, as [`charge`] counts them.
    pub(crate) bytes: u64,
    pub(crate) guaranteed_bytes: u64,
    /// The tenant had nothing that could be evicted, and is not examined again before this time.
    starved_until: Instant,
    pub(crate) quota_bytes: u64,
    /// Bytes of objects that are pinned for good, each object counted once.
    pub(crate) hard_bytes: u64,
    pub(crate) evictions_total: u64,
    pub(crate) refusals_total: u64,
    pub(crate) objects: u32,
    pub(crate) quota_objects: u32,
    /// Bytes of its objects on disks, as they are stored.
    pub(crate) disk_bytes: u64,
    pub(crate) quota_disk_bytes: u64,
}

const _: () = assert!(size_of::<Usage>() <= 80);

impl Usage {
    const UNLIMITED: Self = Self {
        bytes: 0,
        guaranteed_bytes: 0,
        starved_until: Instant::ZERO,
        quota_bytes: u64::MAX,
        hard_bytes: 0,
        evictions_total: 0,
        refusals_total: 0,
        objects: 0,
        quota_objects: u32::MAX,
        disk_bytes: 0,
        quota_disk_bytes: u64::MAX,
    };

    /// Whether the tenant may have more on disks.
    pub(crate) const fn has_disk_room(&self) -> bool {
        self.disk_bytes < self.quota_disk_bytes
    }

    /// Whether the tenant may have one more object of `bytes`, besides `held` bytes that are charged to it
    /// and belong to no object.
    pub(crate) fn has_room(&self, bytes: u64, held: u64) -> bool {
        self.objects < self.quota_objects && self.has_bytes(bytes, held)
    }

    /// Whether the tenant's objects may take `bytes` more.
    pub(crate) fn has_bytes(&self, bytes: u64, held: u64) -> bool {
        self.bytes.saturating_add(held).saturating_add(bytes) <= self.quota_bytes
    }

    /// Whether the tenant has to give when room is needed for all.
    pub(super) fn gives(&self) -> bool {
        self.over() > 0
    }

    /// Bytes above the tenant's guarantee.
    fn over(&self) -> u64 {
        self.bytes.saturating_sub(self.guaranteed_bytes)
    }
}

/// The bytes that an object is charged to its tenant: its stored length in whole grains, per replica.
pub(crate) fn charge(len: u64, replicas: usize) -> u64 {
    len.checked_next_multiple_of(GRAIN_BYTES).unwrap_or(len).saturating_mul(replicas as u64)
}

impl Entry {
    pub(super) fn charge(&self) -> u64 {
        charge(stored_len(self.len), self.replicas.as_slice().len())
    }
}

impl Objects {
    /// Makes room for tenants up to this one.
    pub(crate) fn add_share(&mut self, tenant: TenantNo, policy: EvictionPolicy) {
        while self.orders.len() <= tenant.index() {
            self.orders.push(Order::new(policy));
            self.usage.push(Usage::UNLIMITED);
        }
    }

    /// A tenant without objects was removed, and its number is free.
    pub(crate) fn clear_share(&mut self, tenant: TenantNo, policy: EvictionPolicy) {
        self.orders[tenant.index()] = Order::new(policy);
        self.usage[tenant.index()] = Usage::UNLIMITED;
    }

    pub(crate) fn limit(&mut self, tenant: TenantNo, config: &TenantConfig) {
        let usage = &mut self.usage[tenant.index()];
        usage.quota_bytes = config.quota_bytes.unwrap_or(u64::MAX);
        usage.quota_objects = config.quota_objects.unwrap_or(u32::MAX);
        usage.guaranteed_bytes = config.guaranteed_bytes;
        usage.quota_disk_bytes = config.quota_disk_bytes.unwrap_or(u64::MAX);
    }

    pub(crate) fn usage(&self, tenant: TenantNo) -> &Usage {
        &self.usage[tenant.index()]
    }

    pub(crate) fn usage_mut(&mut self, tenant: TenantNo) -> &mut Usage {
        &mut self.usage[tenant.index()]
    }

    /// The usage of all tenants.
    pub(crate) fn usages(&self) -> &[Usage] {
        &self.usage
    }

    /// What tenants with a quota of disk bytes may still have on disks.
    pub(crate) fn disk_rooms(&self) -> impl Iterator<Item = (TenantNo, u64)> + '_ {
        let limited = |(no, usage): (usize, &Usage)| {
            let room = usage.quota_disk_bytes.saturating_sub(usage.disk_bytes);
            (usage.quota_disk_bytes != u64::MAX).then_some((TenantNo::new(no as u16), room))
        };
        self.usage.iter().enumerate().filter_map(limited)
    }

    /// Number of candidates and of softly pinned objects of a tenant.
    pub(crate) fn may_go(&self, tenant: TenantNo) -> (u32, u32) {
        let order = &self.orders[tenant.index()];
        (order.policy.len() + order.leaving.len(), order.soft.len())
    }

    /// The tenant that has to give when room is needed for all: the one furthest above its guarantee that has
    /// something to give, as far as is known. `None`: every tenant is within its guarantee, or has nothing to
    /// give.
    pub(crate) fn furthest_over(&self, now: Instant) -> Option<TenantNo> {
        let with_something =
            |(no, usage): (usize, &Usage)| (usage.starved_until <= now).then_some((usage.over(), no));
        let (over, no) = self
            .usage
            .iter()
            .enumerate()
            .filter_map(with_something)
            .max_by_key(|(over, no)| (*over, !*no))?;
        (over > 0).then_some(TenantNo::new(no as u16))
    }

    /// The tenants that are above their guarantees, furthest first.
    pub(crate) fn givers(&self) -> Vec<TenantNo> {
        let over = self.usage.iter().enumerate().filter(|(_, usage)| usage.gives());
        let mut givers: Vec<(u64, TenantNo)> =
            over.map(|(no, usage)| (usage.over(), TenantNo::new(no as u16))).collect();
        givers.sort_unstable_by_key(|(over, no)| (core::cmp::Reverse(*over), *no));
        givers.into_iter().map(|(_, no)| no).collect()
    }

    /// The charge of an object and of everything that is evicted with it.
    pub(crate) fn charge_with_group(&self, index: u32) -> u64 {
        match self.members(index) {
            Some(members) => members.iter().map(|member| self.entries[*member].charge()).sum(),
            None => self.entries[index].charge(),
        }
    }

    /// The tenant has nothing to give until then.
    pub(crate) fn starve(&mut self, tenant: TenantNo, until: Instant) {
        self.usage[tenant.index()].starved_until = until;
    }

    /// Whether the default tenant is the only one.
    pub(crate) fn is_single(&self) -> bool {
        self.usage.len() == 1
    }

    pub(super) fn order(&mut self, index: u32) -> (&mut Order, &mut crate::eviction::Nodes) {
        let tenant = self.entries[index].tenant;
        (&mut self.orders[tenant.index()], &mut self.nodes)
    }

    /// The tenant has something to give again.
    pub(super) fn fed(&mut self, index: u32) {
        self.usage[self.entries[index].tenant.index()].starved_until = Instant::ZERO;
    }
}
