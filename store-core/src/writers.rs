//! Writers: which writer has which unfinished puts, and which writers the nodes have to cut off.
//!
//! Writers write one-sided, so only the node that they write to can tell whether a write can still land. As
//! long as the writer does not report that it is quiet, its space is not given out again. When the writer
//! seems to be gone (its connection to the master has ended) or is too slow, the nodes are told to cut it
//! off, and their confirmation releases the space.
//!
//! Every put passes here twice, so everything that it needs is found without hashing: unfinished puts lie in
//! a ring in the order of their generations, and refer to their connection and their writer by slots. The
//! unfinished puts of a writer form a list through the ring. Space of a writer that is pending release, which
//! is rare, is in a tree.
//!
//! ```text
//!   by generation   ┌────┬────┬────┬────┬────┐        slots of connections    puts
//!   (ring)          │put │  – │put │put │  – │ ──┬──▶ slots of writers        puts, first, last
//!                   └─┬──┴────┴▲─┬─┴▲───┴────┘   │
//!                     └────────┘ └──┘  one writer's
//! ```

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use foldhash::fast::FixedState;

use crate::map::Map;
use crate::message::Allocation;
use crate::slab::{trim_map, trim_queue};
use crate::{NodeId, TenantNo};
use serde::{Deserialize, Serialize};

/// Index of no slot.
const NONE: u32 = u32::MAX;

/// A ring that is longer than this and at most an eighth full moves its oldest puts to a table, so that one
/// put that stays unfinished for minutes costs one entry of that table and not a ring of everything since.
const RING_MIN: usize = 1_024;

/// A put that is not finished.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Put {
    /// The identity of the writer's transfer engine; 0: unknown.
    pub(crate) writer: u64,
    /// The handle that the end of the put has to carry.
    pub(crate) handle: u64,
    /// Index of the object's entry.
    pub(crate) index: u32,
    tenant: TenantNo,
    /// Slots of the connection and of the writer; [`NONE`]: no connection, an unknown writer.
    session_slot: u32,
    writer_slot: u32,
    /// Generations of the writer's previous and next put; 0: there is none.
    before: u64,
    after: u64,
}

/// An order to a node to cut off a writer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) ticket: u64,
    pub(crate) force: bool,
    /// The order applies to puts up to this generation.
    pub(crate) generation_max: u64,
    /// Bytes that the writer held on the node when the order was given.
    pub(crate) bytes: u64,
}

/// Number of unfinished puts of one connection, or of one writer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Slot {
    whose: u64,
    puts: u32,
    /// Of a writer: the generations of its oldest and its latest put.
    first: u64,
    last: u64,
}

/// Slots of the connections or writers with unfinished puts, and of the one that had the last such put.
#[derive(Debug, Serialize, Deserialize)]
struct Slots {
    list: Vec<Slot>,
    vacant: Vec<u32>,
    places: Map<u64, u32, FixedState>,
    /// The slot that began a put last: usually it begins the next one, too.
    latest: u32,
}

impl Slots {
    fn new() -> Self {
        Self { list: Vec::new(), vacant: Vec::new(), places: Map::with_seed(0), latest: NONE }
    }

    fn is_latest(&self, whose: u64) -> bool {
        self.list.get(self.latest as usize).is_some_and(|slot| slot.whose == whose)
    }

    fn get(&self, whose: u64) -> Option<&Slot> {
        let at = if self.is_latest(whose) { self.latest } else { *self.places.get(&whose)? };
        self.list.get(at as usize)
    }

    /// Counts a put of a connection or writer; returns its slot, [`NONE`] for the number 0.
    fn enter(&mut self, whose: u64) -> u32 {
        if whose == 0 {
            return NONE;
        }
        if !self.is_latest(whose) {
            let was = core::mem::replace(&mut self.latest, NONE);
            self.leave(was);
            let fresh = Slot { whose, puts: 0, first: 0, last: 0 };
            let (list, vacant) = (&mut self.list, &mut self.vacant);
            self.latest = *self.places.entry(whose).or_insert_with(|| match vacant.pop() {
                Some(at) => {
                    list[at as usize] = fresh;
                    at
                }
                None => {
                    list.push(fresh);
                    (list.len() - 1) as u32
                }
            });
        }
        self.list[self.latest as usize].puts += 1;
        self.latest
    }

    /// A put has ended.
    fn exit(&mut self, at: u32) {
        if let Some(slot) = self.list.get_mut(at as usize) {
            slot.puts -= 1;
            self.leave(at);
        }
    }

    /// Removes a slot without puts, unless it began the latest one.
    fn leave(&mut self, at: u32) {
        if let Some(slot) = self.list.get(at as usize).filter(|slot| slot.puts == 0 && at != self.latest) {
            self.places.remove(&slot.whose);
            self.vacant.push(at);
        }
    }

    fn memory_bytes(&self) -> usize {
        self.list.capacity() * size_of::<Slot>()
            + self.vacant.capacity() * size_of::<u32>()
            + self.places.allocation_size()
    }
}

/// Puts by generation.
#[derive(Debug, Serialize, Deserialize)]
struct Ring {
    /// The generation of the ring's first place.
    first: u64,
    list: VecDeque<Option<Put>>,
    len: usize,
    /// Puts that were moved out of the ring.
    older: Map<u64, Put, FixedState>,
}

impl Ring {
    fn new() -> Self {
        Self { first: 0, list: VecDeque::new(), len: 0, older: Map::with_seed(0) }
    }

    fn get(&self, generation: u64) -> Option<&Put> {
        match generation.checked_sub(self.first) {
            Some(at) => self.list.get(at as usize)?.as_ref(),
            None => self.older.get(&generation),
        }
    }

    fn get_mut(&mut self, generation: u64) -> Option<&mut Put> {
        match generation.checked_sub(self.first) {
            Some(at) => self.list.get_mut(at as usize)?.as_mut(),
            None => self.older.get_mut(&generation),
        }
    }

    /// Appends a put; generations grow.
    fn push(&mut self, generation: u64, put: Put) {
        if self.list.is_empty() {
            self.first = generation;
        }
        // Copies consume generations, too.
        let gap = (generation - self.first) as usize - self.list.len();
        if gap > RING_MIN {
            self.move_to_table(self.list.len());
            self.first = generation;
        } else {
            (0..gap).for_each(|_| self.list.push_back(None));
        }
        self.list.push_back(Some(put));
        self.len += 1;
        if self.list.len() > RING_MIN && self.len * 8 < self.list.len() {
            self.move_to_table(self.list.len() / 2);
        }
    }

    fn remove(&mut self, generation: u64) -> Option<Put> {
        let Some(at) = generation.checked_sub(self.first) else { return self.older.remove(&generation) };
        let put = self.list.get_mut(at as usize)?.take()?;
        self.len -= 1;
        while let Some(None) = self.list.front() {
            self.list.pop_front();
            self.first += 1;
        }
        Some(put)
    }

    /// Moves the first `count` puts to the table.
    fn move_to_table(&mut self, count: usize) {
        for _ in 0..count {
            if let Some(put) = self.list.pop_front().flatten() {
                self.older.insert(self.first, put);
                self.len -= 1;
            }
            self.first += 1;
        }
    }

    fn live(&self) -> usize {
        self.len + self.older.len()
    }

    fn memory_bytes(&self) -> usize {
        self.list.capacity() * size_of::<Option<Put>>() + self.older.allocation_size()
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Writers {
    puts: Ring,
    sessions: Slots,
    writers: Slots,
    by_tenant: Vec<u32>,
    /// Known writers, and the generations of their space that is pending release.
    held: BTreeSet<(u64, u64)>,
    /// Orders by node and writer.
    orders: BTreeMap<(NodeId, u64), Order>,
    ordered_bytes: u64,
    tickets: u64,
}

impl Writers {
    pub(crate) fn new() -> Self {
        Self {
            puts: Ring::new(),
            sessions: Slots::new(),
            writers: Slots::new(),
            by_tenant: Vec::new(),
            held: BTreeSet::new(),
            orders: BTreeMap::new(),
            ordered_bytes: 0,
            tickets: 0,
        }
    }

    /// Number of unfinished puts of a connection and of a tenant.
    pub(crate) fn count(&self, session: u64, tenant: TenantNo) -> (u32, u32) {
        (self.of_session(session), self.by_tenant.get(tenant.index()).copied().unwrap_or(0))
    }

    /// Number of unfinished puts of a connection.
    pub(crate) fn of_session(&self, session: u64) -> u32 {
        self.sessions.get(session).map_or(0, |slot| slot.puts)
    }

    /// A put has begun. Its generation is the highest so far.
    pub(crate) fn began(
        &mut self,
        allocation: &Allocation,
        writer: u64,
        session: u64,
        tenant: TenantNo,
        index: u32,
    ) {
        let Allocation { generation, handle, .. } = *allocation;
        if self.by_tenant.len() <= tenant.index() {
            self.by_tenant.resize(tenant.index() + 1, 0);
        }
        self.by_tenant[tenant.index()] += 1;
        let session_slot = self.sessions.enter(session);
        let writer_slot = self.writers.enter(writer);
        let mut before = 0;
        if let Some(slot) = self.writers.list.get_mut(writer_slot as usize) {
            before = core::mem::replace(&mut slot.last, generation);
            if before == 0 {
                slot.first = generation;
            } else if let Some(put) = self.puts.get_mut(before) {
                put.after = generation;
            }
        }
        let put = Put { writer, handle, index, tenant, session_slot, writer_slot, before, after: 0 };
        self.puts.push(generation, put);
    }

    /// A put was committed, or is over and holds no space for its writer.
    pub(crate) fn ended(&mut self, generation: u64) {
        self.remove(generation);
    }

    /// A put is over, and its space is held until its writer is known to be gone. Returns the writer; 0:
    /// unknown.
    pub(crate) fn ended_pending_release(&mut self, generation: u64) -> u64 {
        let writer = self.remove(generation).map_or(0, |put| put.writer);
        if writer != 0 {
            self.held.insert((writer, generation));
        }
        writer
    }

    fn remove(&mut self, generation: u64) -> Option<Put> {
        let put = self.puts.remove(generation)?;
        self.by_tenant[put.tenant.index()] -= 1;
        if let Some(slot) = self.writers.list.get_mut(put.writer_slot as usize) {
            match self.puts.get_mut(put.before) {
                Some(before) => before.after = put.after,
                None => slot.first = put.after,
            }
            match self.puts.get_mut(put.after) {
                Some(after) => after.before = put.before,
                None => slot.last = put.before,
            }
        }
        self.sessions.exit(put.session_slot);
        self.writers.exit(put.writer_slot);
        Some(put)
    }

    /// No space of this put is pending release for its writer any more.
    pub(crate) fn let_go(&mut self, writer: u64, generation: u64) {
        if writer != 0 {
            self.held.remove(&(writer, generation));
        }
    }

    pub(crate) fn put(&self, generation: u64) -> Option<&Put> {
        self.puts.get(generation)
    }

    /// Generations of what a writer holds: its space that is pending release, and its unfinished puts.
    pub(crate) fn holdings(&self, writer: u64) -> impl Iterator<Item = u64> {
        let held = self.held.range((writer, 0)..=(writer, u64::MAX)).map(|(_, generation)| *generation);
        let first = self.writers.get(writer).map_or(0, |slot| slot.first);
        let unfinished = core::iter::successors((first != 0).then_some(first), |generation| {
            self.puts.get(*generation).map(|put| put.after).filter(|after| *after != 0)
        });
        held.chain(unfinished)
    }

    /// Gives an order to a node, or extends the node's order for that writer. An order that is not extended
    /// keeps its ticket.
    pub(crate) fn order(&mut self, node: NodeId, writer: u64, force: bool, generation_max: u64, bytes: u64) {
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

    /// The orders of a node, with their writers.
    pub(crate) fn orders(&self, node: NodeId) -> impl Iterator<Item = (u64, &Order)> {
        self.orders.range((node, 0)..=(node, u64::MAX)).map(|((_, writer), order)| (*writer, order))
    }

    pub(crate) fn has_orders(&self, node: NodeId) -> bool {
        // Usually there are no orders at all.
        !self.orders.is_empty() && self.orders(node).next().is_some()
    }

    /// Removes the order with this ticket.
    pub(crate) fn take(&mut self, node: NodeId, ticket: u64) -> Option<(u64, Order)> {
        let (writer, order) = self.orders(node).find(|(_, order)| order.ticket == ticket)?;
        let found = (writer, *order);
        self.orders.remove(&(node, writer));
        self.ordered_bytes -= found.1.bytes;
        Some(found)
    }

    /// A node is gone, and its orders with it.
    pub(crate) fn forget_node(&mut self, node: NodeId) {
        let tickets: Vec<u64> = self.orders(node).map(|(_, order)| order.ticket).collect();
        for ticket in tickets {
            self.take(node, ticket);
        }
    }

    /// Bytes that the nodes' orders will release, as counted when the orders were given.
    pub(crate) const fn ordered_bytes(&self) -> u64 {
        self.ordered_bytes
    }

    /// Returns memory that is no longer needed.
    pub(crate) fn tidy(&mut self) {
        trim_queue(&mut self.puts.list);
        trim_map(&mut self.puts.older);
        trim_map(&mut self.sessions.places);
        trim_map(&mut self.writers.places);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        // A tree's nodes are at least half full.
        self.puts.memory_bytes()
            + self.sessions.memory_bytes()
            + self.writers.memory_bytes()
            + self.by_tenant.capacity() * size_of::<u32>()
            + self.held.len() * 2 * size_of::<(u64, u64)>()
            + self.orders.len() * 2 * (size_of::<(u64, u64)>() + size_of::<Order>())
    }

    /// As [`Self::memory_bytes`], but only what the present entries need.
    pub(crate) fn live_bytes(&self) -> usize {
        self.puts.live() * size_of::<Option<Put>>() + self.held.len() * 2 * size_of::<(u64, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        /// Generations to skip before a put begins.
        Begin {
            gap: u64,
            writer: u64,
            session: u64,
            tenant: TenantNo,
        },
        End {
            which: prop::sample::Index,
            pending_release: bool,
        },
        LetGo {
            which: prop::sample::Index,
        },
    }

    fn given(generation: u64) -> Allocation {
        Allocation { generation, handle: !generation, replicas: Default::default() }
    }

    fn step() -> impl Strategy<Value = Step> {
        let gap = prop_oneof![20 => Just(1u64), 3 => 2u64..6, 1 => 100u64..3_000];
        prop_oneof![
            5 => (gap, 0u64..4, 0u64..4, 0u16..3)
                .prop_map(|(gap, writer, session, tenant)| Step::Begin { gap, writer, session, tenant: TenantNo::new(tenant) }),
            4 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2))
                .prop_map(|(which, pending_release)| Step::End { which, pending_release }),
            1 => any::<prop::sample::Index>().prop_map(|which| Step::LetGo { which }),
        ]
    }

    proptest! {
        #[test]
        fn they_are_what_plain_lists_would_be(steps in prop::collection::vec(step(), 1..400)) {
            let mut writers = Writers::new();
            // Generation, writer, session and tenant of unfinished puts; then what is pending release.
            let mut puts: Vec<(u64, u64, u64, TenantNo)> = Vec::new();
            let mut held: Vec<(u64, u64)> = Vec::new();
            let mut generation = 0;
            for step in steps {
                match step {
                    Step::Begin { gap, writer, session, tenant } => {
                        generation += gap;
                        writers.began(&given(generation), writer, session, tenant, generation as u32);
                        puts.push((generation, writer, session, tenant));
                    }
                    Step::End { which, pending_release } if !puts.is_empty() => {
                        let (generation, writer, ..) = puts.remove(which.index(puts.len()));
                        if pending_release {
                            prop_assert_eq!(writers.ended_pending_release(generation), writer);
                            held.extend((writer != 0).then_some((writer, generation)));
                        } else {
                            writers.ended(generation);
                        }
                        prop_assert!(writers.put(generation).is_none());
                    }
                    Step::LetGo { which } if !held.is_empty() => {
                        let (writer, generation) = held.remove(which.index(held.len()));
                        writers.let_go(writer, generation);
                    }
                    _ => {}
                }
                for (generation, writer, ..) in &puts {
                    let put = writers.put(*generation);
                    let same = put.is_some_and(|put| put.index == *generation as u32 && put.writer == *writer && put.handle == !generation);
                    prop_assert!(same, "{:?} of {}", put, generation);
                }
                for who in 0..4 {
                    let of_session = puts.iter().filter(|put| who != 0 && put.2 == who).count();
                    let of_tenant = puts.iter().filter(|put| u64::from(put.3.get()) == who).count();
                    prop_assert_eq!(
                        writers.count(who, TenantNo::new(who as u16)),
                        (of_session as u32, of_tenant as u32)
                    );
                    let mut wanted: Vec<u64> =
                        puts.iter().filter(|put| who != 0 && put.1 == who).map(|put| put.0).collect();
                    wanted.extend(held.iter().filter(|held| held.0 == who).map(|held| held.1));
                    let mut found: Vec<u64> = writers.holdings(who).collect();
                    wanted.sort_unstable();
                    found.sort_unstable();
                    prop_assert_eq!(found, wanted);
                }
            }
        }
    }

    #[test]
    fn a_put_that_stays_costs_no_ring_of_those_after_it() {
        let mut writers = Writers::new();
        writers.began(&given(1), 7, 7, TenantNo::new(0), 1);
        for generation in 2..200_000 {
            writers.began(&given(generation), 7, 7, TenantNo::new(0), 1);
            writers.ended(generation);
        }
        assert!(writers.memory_bytes() < 1 << 20, "{} bytes", writers.memory_bytes());
        assert_eq!(writers.holdings(7).collect::<Vec<_>>(), [1]);
        assert_eq!(writers.count(7, TenantNo::new(0)), (1, 1));
        assert_eq!(writers.ended_pending_release(1), 7);
        assert_eq!(writers.live_bytes(), 2 * size_of::<(u64, u64)>());
    }
}
