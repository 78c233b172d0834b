//! The state that all handles share: nodes, links, operations, packets on the wire, and the events that move
//! them.
//!
//! An *operation* is what an initiator waits for; a *packet* is what travels. They end independently: an
//! operation that has timed out leaves its packet on the wire as an *orphan*, and an orphaned WRITE lands
//! later unless a fence finds it first.

mod travel;

use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::time::Duration;

use super::blob::Export;
use super::config::{LinkConfig, SimConfig};
use super::slab::{Key, Slab};
use super::{NodeId, SimCounters};
use crate::testkit::Rng;
use crate::{
    Access, Completion, EXPELLED_MAX, Error, ErrorKind, ExpelMode, Features, Instant, MemSpan, Op, Outcome,
    RegionId, RemoteOffset, RemoteRegionId, Slice, Token,
};

pub(super) struct World {
    pub(super) now: u64,
    pub(super) rng: Rng,
    pub(super) config: SimConfig,
    pub(super) counters: SimCounters,
    pub(super) nodes: Vec<Node>,
    links: BTreeMap<(u32, u32), Link>,
    events: BinaryHeap<Reverse<Event>>,
    event_count: u64,
    operations: Slab<Operation>,
    packets: Slab<Packet>,
    orphan_count: u64,
    /// Payload buffers that are not in use.
    buffers: Vec<Vec<u8>>,
}

pub(super) struct Node {
    pub(super) incarnation: u64,
    /// The identity by which its targets know it.
    pub(super) identity: u64,
    /// The identities that it has expelled.
    expelled: BTreeSet<u64>,
    pub(super) alive: bool,
    stalled: bool,
    slowness: u32,
    pub(super) regions: BTreeMap<u32, Region>,
    pub(super) remote_regions: BTreeMap<u32, RemoteRegion>,
    in_flight: u32,
    fences: u32,
    /// Operations that have ended and were not polled yet.
    done: VecDeque<Done>,
    /// Packets that arrived while it was stalled.
    inbox: Vec<Key>,
}

pub(super) struct Region {
    pub(super) generation: u32,
    pub(super) span: MemSpan,
    pub(super) access: Access,
    pub(super) key: u64,
    local_pins: u32,
    remote_pins: u32,
}

pub(super) struct RemoteRegion {
    pub(super) generation: u32,
    pub(super) export: Export,
    pub(super) pins: u32,
}

#[derive(Clone, Copy)]
struct Done {
    completion: Completion,
    region: Option<RegionId>,
    remote_region: RemoteRegionId,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Fence,
}

struct Operation {
    initiator: u32,
    target: u32,
    target_incarnation: u64,
    token: Token,
    kind: Kind,
    region: Option<RegionId>,
    remote_region: RemoteRegionId,
    local: MemSpan,
    packet: Option<Key>,
    departs: u64,
    expires: u64,
    expiry_set: bool,
}

struct Packet {
    initiator: u32,
    /// The initiator's identity when the packet was sent; the node may have another one by now.
    identity: u64,
    target: u32,
    kind: Kind,
    export: Export,
    offset: u64,
    len: u32,
    operation: Option<Key>,
    /// Of an orphan: its number in the order in which they became orphans. Of a fence: the number of orphans
    /// at its start.
    orphan_count: u64,
    /// The bytes of an orphaned WRITE, whose source may not exist any more.
    payload: Vec<u8>,
    /// Whether this is a READ that pins the target's region until its response has left.
    answering: bool,
    answer_lost: bool,
}

#[derive(Clone, Copy)]
struct Link {
    config: LinkConfig,
    up: bool,
    busy_until: u64,
}

struct Event {
    at: u64,
    count: u64,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    Arrive(Key),
    Answer(Key),
    End(Key, Option<ErrorKind>, Outcome),
    Expire(Key),
    Link(u32, u32, bool),
}

impl World {
    pub(super) fn new(seed: u64, config: SimConfig) -> Self {
        Self {
            now: 0,
            rng: Rng::new(seed),
            config,
            counters: SimCounters::default(),
            nodes: Vec::new(),
            links: BTreeMap::new(),
            events: BinaryHeap::with_capacity(1024),
            event_count: 0,
            operations: Slab::new(),
            packets: Slab::new(),
            orphan_count: 0,
            buffers: Vec::new(),
        }
    }

    pub(super) fn add_node(&mut self) -> NodeId {
        let incarnation = self.rng.next() | 1;
        self.nodes.push(Node {
            incarnation,
            identity: incarnation,
            expelled: BTreeSet::new(),
            alive: true,
            stalled: false,
            slowness: 1,
            regions: BTreeMap::new(),
            remote_regions: BTreeMap::new(),
            in_flight: 0,
            fences: 0,
            done: VecDeque::with_capacity(2 * self.config.inflight_max as usize),
            inbox: Vec::new(),
        });
        NodeId(self.nodes.len() as u32 - 1)
    }

    pub(super) fn next_event(&self) -> Option<u64> {
        self.events.peek().map(|Reverse(event)| event.at)
    }

    pub(super) fn advance_to(&mut self, to: u64) {
        while let Some(at) = self.next_event().filter(|&at| at <= to) {
            self.now = self.now.max(at);
            if let Some(Reverse(event)) = self.events.pop() {
                self.happen(event.what);
            }
        }
        self.now = self.now.max(to);
    }

    // Calls of initiators.

    pub(super) fn submit(&mut self, node: NodeId, slice: &Slice) -> Result<bool, Error> {
        let me = &self.nodes[node.0 as usize];
        let region = me.regions.get(&slice.local.region.index).ok_or(ErrorKind::NotFound)?;
        let remote_region = me.remote_regions.get(&slice.remote.region.index).ok_or(ErrorKind::NotFound)?;
        if region.generation != slice.local.region.generation
            || remote_region.generation != slice.remote.region.generation
        {
            return Err(ErrorKind::Stale.into());
        }
        if slice.len == 0 || slice.len > self.config.slice_bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let (kind, local_right, remote_right) = match slice.op {
            Op::Read => (Kind::Read, Access::LOCAL_WRITE, Access::REMOTE_READ),
            Op::Write => (Kind::Write, Access::LOCAL_READ, Access::REMOTE_WRITE),
        };
        let feature = if slice.op == Op::Read { Features::READ } else { Features::WRITE };
        if !self.config.features.contains(feature) {
            return Err(ErrorKind::Unsupported.into());
        }
        if !region.access.contains(local_right) || !remote_region.export.access.contains(remote_right) {
            return Err(ErrorKind::AccessDenied.into());
        }
        let local = region.span.part(slice.local.offset, u64::from(slice.len))?;
        let end = slice.remote.offset.checked_add(u64::from(slice.len)).ok_or(ErrorKind::OutOfRange)?;
        if end > remote_region.export.len {
            return Err(ErrorKind::OutOfRange.into());
        }
        if me.in_flight >= self.config.inflight_max {
            return Ok(false);
        }
        let export = remote_region.export;
        self.counters.submitted += 1;
        self.start(
            node.0,
            slice.token,
            kind,
            Some((slice.local.region, local)),
            slice.remote,
            export,
            slice.len,
        );
        Ok(true)
    }

    pub(super) fn fence(&mut self, node: NodeId, token: Token, id: RemoteRegionId) -> Result<(), Error> {
        let me = &self.nodes[node.0 as usize];
        let remote_region = me.remote_regions.get(&id.index).ok_or(ErrorKind::NotFound)?;
        if remote_region.generation != id.generation {
            return Err(ErrorKind::Stale.into());
        }
        if me.fences >= self.config.inflight_max {
            return Err(ErrorKind::Full.into());
        }
        let export = remote_region.export;
        self.start(node.0, token, Kind::Fence, None, RemoteOffset::new(id, 0), export, 0);
        Ok(())
    }

    pub(super) fn cancel(&mut self, node: NodeId, token: Token) -> Result<(), Error> {
        let mine = |op: &Operation| op.initiator == node.0 && op.token == token && op.kind != Kind::Fence;
        if let Some((key, _)) = self.operations.next_where(0, mine) {
            let after = self.rng.range(0..nanos(self.config.cancel_max) + 1);
            self.schedule(after, What::End(key, Some(ErrorKind::Canceled), Outcome::Unknown));
            return Ok(());
        }
        let done = &self.nodes[node.0 as usize].done;
        match done.iter().any(|done| done.completion.token == token && done.region.is_some()) {
            true => Ok(()), // it has ended and was not polled yet
            false => Err(ErrorKind::NotFound.into()),
        }
    }

    pub(super) fn poll(&mut self, node: NodeId, out: &mut [Completion]) -> usize {
        let me = &mut self.nodes[node.0 as usize];
        let count = out.len().min(me.done.len());
        for (place, done) in out.iter_mut().zip(me.done.drain(..count)) {
            *place = done.completion;
            if let Some(id) = done.region {
                me.in_flight -= 1;
                if let Some(region) = me.regions.get_mut(&id.index) {
                    region.local_pins -= 1;
                }
            } else {
                me.fences -= 1;
            }
            if let Some(remote_region) = me.remote_regions.get_mut(&done.remote_region.index) {
                remote_region.pins -= 1;
            }
        }
        count
    }

    pub(super) fn poll_at(&self, node: NodeId) -> Option<Instant> {
        let me = &self.nodes[node.0 as usize];
        if !me.done.is_empty() {
            return Some(Instant::from_nanos(self.now));
        }
        (me.in_flight + me.fences > 0).then(|| self.next_event().map(Instant::from_nanos)).flatten()
    }

    pub(super) fn register(
        &mut self,
        node: NodeId,
        id: RegionId,
        span: MemSpan,
        access: Access,
    ) -> Result<(), Error> {
        if span.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if self.nodes[node.0 as usize].regions.contains_key(&id.index) {
            return Err(ErrorKind::Busy.into());
        }
        let key = self.rng.next();
        let region = Region { generation: id.generation, span, access, key, local_pins: 0, remote_pins: 0 };
        self.nodes[node.0 as usize].regions.insert(id.index, region);
        Ok(())
    }

    pub(super) fn deregister(&mut self, node: NodeId, id: RegionId) -> Result<(), Error> {
        let regions = &mut self.nodes[node.0 as usize].regions;
        let region = regions.get(&id.index).ok_or(ErrorKind::NotFound)?;
        if region.generation != id.generation {
            return Err(ErrorKind::Stale.into());
        }
        if region.local_pins + region.remote_pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        regions.remove(&id.index);
        Ok(())
    }

    /// Whether a living node has this identity and has attached memory of `node` in its current life.
    pub(super) fn is_connected(&self, node: NodeId, peer: u64) -> bool {
        let incarnation = self.nodes[node.0 as usize].incarnation;
        let ours = |remote_region: &RemoteRegion| {
            (remote_region.export.node, remote_region.export.incarnation) == (node.0, incarnation)
        };
        let peers = self.nodes.iter().filter(|other| other.alive && other.identity == peer);
        let expelled = self.nodes[node.0 as usize].expelled.contains(&peer);
        peer != 0 && !expelled && peers.flat_map(|other| other.remote_regions.values()).any(ours)
    }

    /// Refuses everything that arrives from `peer` from now on, and what is on its way: nothing of it can
    /// land.
    pub(super) fn expel(&mut self, node: NodeId, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        if peer == 0 {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let connected = self.is_connected(node, peer);
        let expelled = &mut self.nodes[node.0 as usize].expelled;
        if expelled.contains(&peer) {
            return Ok(true);
        }
        if connected && mode == ExpelMode::SpareConnected {
            return Err(ErrorKind::Busy.into());
        }
        if expelled.len() >= EXPELLED_MAX {
            return Err(ErrorKind::Full.into());
        }
        expelled.insert(peer);
        Ok(true)
    }

    // Changes of nodes and links.

    pub(super) fn kill(&mut self, node: NodeId) {
        self.counters.killed += u64::from(self.nodes[node.0 as usize].alive);
        while let Some((key, _)) = self.operations.next_where(0, |op| op.initiator == node.0) {
            self.end(key, Some(ErrorKind::PeerDead), Outcome::Unknown);
        }
        let me = &mut self.nodes[node.0 as usize];
        me.alive = false;
        me.stalled = false;
        me.regions.clear();
        me.remote_regions.clear();
        me.expelled.clear();
        me.done.clear();
        (me.in_flight, me.fences) = (0, 0);
        for key in core::mem::take(&mut me.inbox) {
            self.arrive(key);
        }
    }

    pub(super) fn restart(&mut self, node: NodeId) -> u64 {
        self.kill(node);
        let incarnation = self.rng.next() | 1;
        let me = &mut self.nodes[node.0 as usize];
        me.alive = true;
        me.incarnation = incarnation;
        me.identity = incarnation;
        incarnation
    }

    pub(super) fn stall(&mut self, node: NodeId, stalled: bool) {
        let me = &mut self.nodes[node.0 as usize];
        me.stalled = stalled;
        if !stalled {
            for key in core::mem::take(&mut me.inbox) {
                self.schedule(0, What::Arrive(key));
            }
        }
    }

    pub(super) fn set_slow(&mut self, node: NodeId, factor: u32) {
        self.nodes[node.0 as usize].slowness = factor.max(1);
    }

    pub(super) fn set_link(&mut self, from: NodeId, to: NodeId, config: LinkConfig) {
        self.link(from.0, to.0).config = config;
    }

    pub(super) fn set_link_up(&mut self, a: NodeId, b: NodeId, up: bool) {
        self.link(a.0, b.0).up = up;
        self.link(b.0, a.0).up = up;
    }

    pub(super) fn set_link_up_at(&mut self, a: NodeId, b: NodeId, up: bool, at: u64) {
        self.schedule(at.saturating_sub(self.now), What::Link(a.0, b.0, up));
    }

    /// Breaks the connection: operations that wait on it end, packets on the wire may still land.
    pub(super) fn cut(&mut self, a: NodeId, b: NodeId) {
        let between = |op: &Operation| {
            (op.initiator, op.target) == (a.0, b.0) || (op.initiator, op.target) == (b.0, a.0)
        };
        let mut from = 0;
        while let Some((key, next)) = self.operations.next_where(from, between) {
            self.schedule(0, What::End(key, Some(ErrorKind::Rail), Outcome::Unknown));
            from = next;
        }
    }

    pub(super) fn operations_in_flight(&self) -> usize {
        self.operations.iter().count()
    }

    pub(super) fn orphaned_writes(&self, to: NodeId) -> usize {
        let orphan = |packet: &Packet| {
            packet.kind == Kind::Write && packet.operation.is_none() && packet.target == to.0
        };
        self.packets.iter().filter(|(_, packet)| orphan(packet)).count()
    }

    fn schedule(&mut self, after: u64, what: What) {
        self.event_count += 1;
        self.events.push(Reverse(Event {
            at: self.now.saturating_add(after),
            count: self.event_count,
            what,
        }));
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.at, self.count).cmp(&(other.at, other.count))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4)
}
