//! Writers: who is at which unfinished put, and which of them nodes are to cut off.
//!
//! A writer moves its bytes one-sided, so that only the node it writes to can tell whether anything of it can still land. As
//! long as the writer says nothing, its space is given to nobody else; when it seems to be gone (its connection to the master
//! has ended) or is too slow, the nodes are told to cut it off, and their word frees the space.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::TenantNo;
use crate::slab::trim_map;

/// A put that is not finished.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Put {
    /// The identity of the writer's transfer engine; 0: unknown.
    pub(crate) writer: u64,
    /// The connection that began it; 0: none.
    session: u64,
    tenant: TenantNo,
    /// The object's entry.
    pub(crate) index: u32,
}

/// What a node is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    pub(crate) ticket: u64,
    pub(crate) force: bool,
    /// Puts up to this generation are meant.
    pub(crate) generation_max: u64,
    /// What the writer held on the node when the order was given, bytes.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Writers {
    /// Unfinished puts, by generation.
    puts: HashMap<u64, Put, FixedState>,
    by_session: HashMap<u64, u32, FixedState>,
    by_tenant: Vec<u32>,
    /// Writers that are known, and the generations of what they hold: unfinished puts, and what is in limbo for them.
    holdings: BTreeSet<(u64, u64)>,
    /// By node and writer.
    orders: BTreeMap<(u64, u64), Order>,
    ordered_bytes: u64,
    tickets: u64,
}

impl Writers {
    pub(crate) fn new() -> Self {
        Self {
            puts: HashMap::with_hasher(FixedState::with_seed(0)),
            by_session: HashMap::with_hasher(FixedState::with_seed(0)),
            by_tenant: Vec::new(),
            holdings: BTreeSet::new(),
            orders: BTreeMap::new(),
            ordered_bytes: 0,
            tickets: 0,
        }
    }

    /// Unfinished puts of a connection and of a tenant.
    pub(crate) fn count(&self, session: u64, tenant: TenantNo) -> (u32, u32) {
        (self.of_session(session), self.by_tenant.get(usize::from(tenant)).copied().unwrap_or(0))
    }

    /// Unfinished puts of a connection.
    pub(crate) fn of_session(&self, session: u64) -> u32 {
        if session == 0 { 0 } else { self.by_session.get(&session).copied().unwrap_or(0) }
    }

    pub(crate) fn began(&mut self, generation: u64, writer: u64, session: u64, tenant: TenantNo, index: u32) {
        if session != 0 {
            *self.by_session.entry(session).or_default() += 1;
        }
        if self.by_tenant.len() <= usize::from(tenant) {
            self.by_tenant.resize(usize::from(tenant) + 1, 0);
        }
        self.by_tenant[usize::from(tenant)] += 1;
        if writer != 0 {
            self.holdings.insert((writer, generation));
        }
        self.puts.insert(generation, Put { writer, session, tenant, index });
    }

    /// A put is unfinished no more. What it holds stays its writer's until [`Self::let_go`].
    pub(crate) fn ended(&mut self, generation: u64) -> Option<Put> {
        let put = self.puts.remove(&generation)?;
        if let Some(count) = self.by_session.get_mut(&put.session) {
            *count -= 1;
            if *count == 0 {
                self.by_session.remove(&put.session);
            }
        }
        self.by_tenant[usize::from(put.tenant)] -= 1;
        Some(put)
    }

    /// The writer holds nothing of this put any more.
    pub(crate) fn let_go(&mut self, writer: u64, generation: u64) {
        if writer != 0 {
            self.holdings.remove(&(writer, generation));
        }
    }

    pub(crate) fn put(&self, generation: u64) -> Option<&Put> {
        self.puts.get(&generation)
    }

    /// Generations of what a writer holds.
    pub(crate) fn holdings(&self, writer: u64) -> impl Iterator<Item = u64> {
        self.holdings.range((writer, 0)..=(writer, u64::MAX)).map(|(_, generation)| *generation)
    }

    /// Gives a node an order, or makes more of the one that it has. One that says no more keeps its ticket.
    pub(crate) fn order(&mut self, node: u64, writer: u64, force: bool, generation_max: u64, bytes: u64) {
        let old = self.orders.get(&(node, writer)).copied();
        let same = old.is_some_and(|old| old.force || !force);
        let ticket = match old.filter(|_| same) {
            Some(old) => old.ticket,
            None => {
                self.tickets += 1;
                self.tickets
            }
        };
        let force = force || old.is_some_and(|old| old.force);
        self.ordered_bytes += bytes;
        self.ordered_bytes -= old.map_or(0, |old| old.bytes);
        self.orders.insert((node, writer), Order { ticket, force, generation_max, bytes });
    }

    /// What a node is to do, by writer.
    pub(crate) fn orders(&self, node: u64) -> impl Iterator<Item = (u64, &Order)> {
        self.orders.range((node, 0)..=(node, u64::MAX)).map(|((_, writer), order)| (*writer, order))
    }

    pub(crate) fn has_orders(&self, node: u64) -> bool {
        // The steady state is that there is none at all.
        !self.orders.is_empty() && self.orders(node).next().is_some()
    }

    /// Takes the order with this ticket away.
    pub(crate) fn take(&mut self, node: u64, ticket: u64) -> Option<(u64, Order)> {
        let (writer, order) = self.orders(node).find(|(_, order)| order.ticket == ticket)?;
        let found = (writer, *order);
        self.orders.remove(&(node, writer));
        self.ordered_bytes -= found.1.bytes;
        Some(found)
    }

    /// A node is gone, and with it what it was to do.
    pub(crate) fn forget_node(&mut self, node: u64) {
        let tickets: Vec<u64> = self.orders(node).map(|(_, order)| order.ticket).collect();
        for ticket in tickets {
            self.take(node, ticket);
        }
    }

    /// What nodes are to free, as it was when they were told, bytes.
    pub(crate) const fn ordered_bytes(&self) -> u64 {
        self.ordered_bytes
    }

    /// Gives memory back that is not needed any more.
    pub(crate) fn tidy(&mut self) {
        trim_map(&mut self.puts);
        trim_map(&mut self.by_session);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        // A tree's nodes are half full at least.
        self.puts.allocation_size()
            + self.by_session.allocation_size()
            + self.by_tenant.capacity() * size_of::<u32>()
            + self.holdings.len() * 2 * size_of::<(u64, u64)>()
            + self.orders.len() * 2 * (size_of::<(u64, u64)>() + size_of::<Order>())
    }

    /// The same as far as it is needed now.
    pub(crate) fn live_bytes(&self) -> usize {
        self.puts.len() * (size_of::<(u64, Put)>() + 2) + self.holdings.len() * 2 * size_of::<(u64, u64)>()
    }
}
