//! The one state behind all handles: nodes, links, operations, packets in the air, and the events that move them.
//!
//! An *operation* is what an initiator waits for; a *packet* is what travels. They end independently: an operation that is
//! given up leaves its packet in the air as an *orphan*, and an orphaned WRITE lands later unless a fence finds it first.
#![allow(
    unsafe_code,
    reason = "copies between the memories of nodes, which only their registrations describe"
)]

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
    Access, Completion, EXPELLED_MAX, Error, ErrorKind, Features, Instant, MemSpan, Op, Outcome, RegionId,
    RemoteOffset, RemoteRegionId, Slice, Token,
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
    /// Payload buffers at rest.
    buffers: Vec<Vec<u8>>,
}

pub(super) struct Node {
    pub(super) incarnation: u64,
    /// What its targets know it by.
    pub(super) identity: u64,
    /// Identities that it lets do nothing any more.
    expelled: BTreeSet<u64>,
    pub(super) alive: bool,
    stalled: bool,
    slowness: u32,
    pub(super) regions: BTreeMap<u32, Region>,
    pub(super) segments: BTreeMap<u32, Segment>,
    in_flight: u32,
    fences: u32,
    /// Ended, not yet polled.
    done: VecDeque<Done>,
    /// Arrived while stalled.
    inbox: Vec<Key>,
}

pub(super) struct Region {
    pub(super) generation: u32,
    pub(super) span: MemSpan,
    pub(super) access: Access,
    pub(super) key: u64,
    local_users: u32,
    remote_users: u32,
}

pub(super) struct Segment {
    pub(super) generation: u32,
    pub(super) export: Export,
    pub(super) users: u32,
}

#[derive(Clone, Copy)]
struct Done {
    completion: Completion,
    region: Option<RegionId>,
    segment: RemoteRegionId,
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
    segment: RemoteRegionId,
    local: MemSpan,
    packet: Option<Key>,
    departs: u64,
    expires: u64,
    expiry_set: bool,
}

struct Packet {
    initiator: u32,
    /// The initiator's identity when it was sent; the node may be somebody else by now.
    identity: u64,
    target: u32,
    kind: Kind,
    export: Export,
    offset: u64,
    len: u32,
    operation: Option<Key>,
    /// Orphans: when it became one, against the counter that fences read. Fences: the counter at their start.
    orphan_count: u64,
    /// Orphaned WRITEs carry their bytes; the source may be gone.
    payload: Vec<u8>,
    /// A READ that holds the target's region until the answer has left.
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
            segments: BTreeMap::new(),
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

    // What an initiator asks for.

    pub(super) fn submit(&mut self, node: NodeId, slice: &Slice) -> Result<bool, Error> {
        let me = &self.nodes[node.0 as usize];
        let region = me.regions.get(&slice.local.region.index).ok_or(ErrorKind::NotFound)?;
        let segment = me.segments.get(&slice.remote.region.index).ok_or(ErrorKind::NotFound)?;
        if region.generation != slice.local.region.generation
            || segment.generation != slice.remote.region.generation
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
        if !region.access.contains(local_right) || !segment.export.access.contains(remote_right) {
            return Err(ErrorKind::AccessDenied.into());
        }
        let local = region.span.part(slice.local.offset, u64::from(slice.len))?;
        let end = slice.remote.offset.checked_add(u64::from(slice.len)).ok_or(ErrorKind::OutOfRange)?;
        if end > segment.export.len {
            return Err(ErrorKind::OutOfRange.into());
        }
        if me.in_flight >= self.config.inflight_max {
            return Ok(false);
        }
        let export = segment.export;
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
        let segment = me.segments.get(&id.index).ok_or(ErrorKind::NotFound)?;
        if segment.generation != id.generation {
            return Err(ErrorKind::Stale.into());
        }
        if me.fences >= self.config.inflight_max {
            return Err(ErrorKind::Full.into());
        }
        let export = segment.export;
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
            true => Ok(()), // it has ended and only waits to be polled
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
                    region.local_users -= 1;
                }
            } else {
                me.fences -= 1;
            }
            if let Some(segment) = me.segments.get_mut(&done.segment.index) {
                segment.users -= 1;
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
        let region = Region { generation: id.generation, span, access, key, local_users: 0, remote_users: 0 };
        self.nodes[node.0 as usize].regions.insert(id.index, region);
        Ok(())
    }

    pub(super) fn deregister(&mut self, node: NodeId, id: RegionId) -> Result<(), Error> {
        let regions = &mut self.nodes[node.0 as usize].regions;
        let region = regions.get(&id.index).ok_or(ErrorKind::NotFound)?;
        if region.generation != id.generation {
            return Err(ErrorKind::Stale.into());
        }
        if region.local_users + region.remote_users > 0 {
            return Err(ErrorKind::Busy.into());
        }
        regions.remove(&id.index);
        Ok(())
    }

    /// Whether a node that lives has this identity and has attached memory of `node` as it is now.
    pub(super) fn is_connected(&self, node: NodeId, peer: u64) -> bool {
        let incarnation = self.nodes[node.0 as usize].incarnation;
        let ours =
            |segment: &Segment| (segment.export.node, segment.export.incarnation) == (node.0, incarnation);
        let peers = self.nodes.iter().filter(|other| other.alive && other.identity == peer);
        let expelled = self.nodes[node.0 as usize].expelled.contains(&peer);
        peer != 0 && !expelled && peers.flat_map(|other| other.segments.values()).any(ours)
    }

    /// What arrives from `peer` from now on is refused, what is on its way included: nothing of it can land.
    pub(super) fn expel(&mut self, node: NodeId, peer: u64, force: bool) -> Result<bool, Error> {
        if peer == 0 {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let connected = self.is_connected(node, peer);
        let expelled = &mut self.nodes[node.0 as usize].expelled;
        if expelled.contains(&peer) {
            return Ok(true);
        }
        if connected && !force {
            return Err(ErrorKind::Busy.into());
        }
        if expelled.len() >= EXPELLED_MAX {
            return Err(ErrorKind::Full.into());
        }
        expelled.insert(peer);
        Ok(true)
    }

    // What happens to nodes and links.

    pub(super) fn kill(&mut self, node: NodeId) {
        self.counters.killed += u64::from(self.nodes[node.0 as usize].alive);
        while let Some((key, _)) = self.operations.next_where(0, |op| op.initiator == node.0) {
            self.end(key, Some(ErrorKind::PeerDead), Outcome::Unknown);
        }
        let me = &mut self.nodes[node.0 as usize];
        me.alive = false;
        me.stalled = false;
        me.regions.clear();
        me.segments.clear();
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

    /// The connection breaks: what waits on it ends, what is in the air may still land.
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

    // How an operation travels.

    #[allow(clippy::too_many_arguments, reason = "one private constructor of the two halves of an operation")]
    fn start(
        &mut self,
        initiator: u32,
        token: Token,
        kind: Kind,
        local: Option<(RegionId, MemSpan)>,
        remote: RemoteOffset,
        export: Export,
        len: u32,
    ) {
        let target = export.node;
        let outbound = if kind == Kind::Write { u64::from(len) } else { 0 };
        let link = *self.link(initiator, target);
        let (departs, gone) = self.transmit(initiator, target, outbound);
        let operation = self.operations.insert(Operation {
            initiator,
            target,
            target_incarnation: export.incarnation,
            token,
            kind,
            region: local.map(|(id, _)| id),
            segment: remote.region,
            local: local.map_or(MemSpan::new(core::ptr::null_mut(), 0), |(_, span)| span),
            packet: None,
            departs,
            expires: departs + nanos(self.config.timeout),
            expiry_set: false,
        });
        let me = &mut self.nodes[initiator as usize];
        if let Some(region) = local.and_then(|(id, _)| me.regions.get_mut(&id.index)) {
            region.local_users += 1;
            me.in_flight += 1;
        } else {
            me.fences += 1;
        }
        if let Some(segment) = me.segments.get_mut(&remote.region.index) {
            segment.users += 1;
        }
        if !link.up {
            let outcome = if kind == Kind::Fence { Outcome::Unknown } else { Outcome::NotApplied };
            self.schedule(nanos(self.config.detect), What::End(operation, Some(ErrorKind::Rail), outcome));
            return;
        }
        let mut arrives = gone + self.latency(&link.config);
        if self.rng.chance_ppm(link.config.loss_ppm) {
            self.counters.lost += 1;
            if kind != Kind::Write || !self.rng.chance_ppm(link.config.late_ppm) {
                self.give_up_on(operation);
                return;
            }
            arrives =
                departs + nanos(self.config.timeout) + self.rng.range(0..nanos(link.config.late_max) + 1);
        }
        let identity = self.nodes[initiator as usize].identity;
        let packet = self.packets.insert(Packet {
            initiator,
            identity,
            target,
            kind,
            export,
            offset: remote.offset,
            len,
            operation: Some(operation),
            orphan_count: self.orphan_count,
            payload: Vec::new(),
            answering: false,
            answer_lost: false,
        });
        if let Some(op) = self.operations.find_mut(operation) {
            op.packet = Some(packet);
            if arrives > op.expires {
                self.give_up_on(operation);
            }
        }
        self.schedule(arrives - self.now, What::Arrive(packet));
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Arrive(packet) => self.arrive(packet),
            What::Answer(packet) => self.answer(packet),
            What::End(operation, error, outcome) => self.end(operation, error, outcome),
            What::Expire(operation) => {
                let Some(op) = self.operations.find(operation) else { return };
                let target = &self.nodes[op.target as usize];
                let error = match () {
                    () if !target.alive => ErrorKind::PeerDead,
                    () if target.incarnation != op.target_incarnation => ErrorKind::PeerRestarted,
                    () if self.links.get(&(op.initiator, op.target)).is_some_and(|link| !link.up) => {
                        ErrorKind::Rail
                    }
                    () => ErrorKind::TimedOut,
                };
                self.end(operation, Some(error), Outcome::Unknown);
            }
            What::Link(a, b, up) => self.set_link_up(NodeId(a), NodeId(b), up),
        }
    }

    /// A request reaches its target.
    fn arrive(&mut self, key: Key) {
        let Some(packet) = self.packets.find(key) else { return };
        let (initiator, target, operation) = (packet.initiator, packet.target, packet.operation);
        let (kind, orphan_count, identity) = (packet.kind, packet.orphan_count, packet.identity);
        if !self.link(initiator, target).up {
            self.counters.lost += 1;
            self.drop_packet(key);
            operation.into_iter().for_each(|op| self.give_up_on(op));
            return;
        }
        let node = &mut self.nodes[target as usize];
        if !node.alive {
            self.counters.lost += 1;
            self.drop_packet(key);
            if let Some(op) = operation {
                self.schedule(
                    nanos(self.config.detect),
                    What::End(op, Some(ErrorKind::PeerDead), Outcome::Unknown),
                );
            }
            return;
        }
        if node.stalled {
            node.inbox.push(key);
            operation.into_iter().for_each(|op| self.give_up_on(op));
            return;
        }
        if node.expelled.contains(&identity) {
            self.counters.refused += 1;
            self.drop_packet(key);
            self.reply(operation, Err(ErrorKind::Expelled));
            return;
        }
        match kind {
            Kind::Write => {
                let landed = self.land(key);
                self.drop_packet(key);
                self.reply(operation, landed);
            }
            Kind::Fence => {
                self.flush_orphans(initiator, target, orphan_count);
                self.drop_packet(key);
                self.reply(operation, Ok(()));
            }
            Kind::Read => self.begin_answer(key),
        }
    }

    /// The target's own checks, which trust nothing in the packet (L6).
    fn check(&self, packet: &Packet, right: Access) -> Result<MemSpan, ErrorKind> {
        let node = &self.nodes[packet.target as usize];
        if node.incarnation != packet.export.incarnation {
            return Err(ErrorKind::PeerRestarted);
        }
        let region = node.regions.get(&packet.export.region.index).ok_or(ErrorKind::Stale)?;
        if region.generation != packet.export.region.generation {
            return Err(ErrorKind::Stale);
        }
        if region.key != packet.export.key || !region.access.contains(right) {
            return Err(ErrorKind::AccessDenied);
        }
        region.span.part(packet.offset, u64::from(packet.len)).map_err(|error| error.kind)
    }

    fn land(&mut self, key: Key) -> Result<(), ErrorKind> {
        let Some(packet) = self.packets.find(key) else { return Ok(()) };
        let checked = self.check(packet, Access::REMOTE_WRITE);
        let Ok(to) = checked else {
            self.counters.refused += 1;
            return checked.map(|_| ());
        };
        let from = match packet.operation.and_then(|key| self.operations.find(key)) {
            Some(op) => op.local.as_ptr().cast_const(),
            None => {
                self.counters.landed_late += 1;
                packet.payload.as_ptr()
            }
        };
        // SAFETY: `to` passed the target's check, so it lies in a registered span; `from` is the source of an operation
        // still in flight, hence registered, or the packet's own copy; both are `packet.len` long. They may overlap.
        unsafe { core::ptr::copy(from, to.as_ptr(), to.len()) };
        self.counters.bytes += to.len() as u64;
        Ok(())
    }

    fn begin_answer(&mut self, key: Key) {
        let Some(packet) = self.packets.find(key) else { return };
        let (initiator, target, len) = (packet.initiator, packet.target, packet.len);
        let (export, operation) = (packet.export, packet.operation);
        let checked = self.check(packet, Access::REMOTE_READ);
        let local = operation.and_then(|key| self.operations.find(key)).map(|op| op.local);
        let (Ok(from), Some(to)) = (checked, local) else {
            self.counters.refused += u64::from(checked.is_err());
            self.drop_packet(key);
            self.reply(operation, checked.map(|_| ()));
            return;
        };
        if self.rng.chance_ppm(250_000) {
            let some = self.rng.index(len as usize);
            // SAFETY: as in `answer`; a fabric may fill the destination of a READ in pieces until it completes.
            unsafe { core::ptr::copy(from.as_ptr(), to.as_ptr(), some) };
        }
        if let Some(region) = self.nodes[target as usize].regions.get_mut(&export.region.index) {
            region.remote_users += 1;
        }
        let link = *self.link(target, initiator);
        let (_, gone) = self.transmit(target, initiator, u64::from(len));
        let arrives = gone + self.latency(&link.config);
        let lost = !link.up || self.rng.chance_ppm(link.config.loss_ppm);
        self.counters.lost += u64::from(lost);
        if let Some(packet) = self.packets.find_mut(key) {
            packet.answering = true;
            packet.answer_lost = lost;
        }
        let expires = operation.and_then(|key| self.operations.find(key)).map_or(0, |op| op.expires);
        if lost || arrives > expires {
            operation.into_iter().for_each(|op| self.give_up_on(op));
        }
        self.schedule(arrives - self.now, What::Answer(key));
    }

    /// The bytes of a READ reach its initiator.
    fn answer(&mut self, key: Key) {
        let Some(packet) = self.packets.find(key) else { return };
        let (lost, operation, len) = (packet.answer_lost, packet.operation, packet.len as usize);
        let from = self.check(packet, Access::REMOTE_READ);
        self.drop_packet(key);
        let Some((operation, to)) =
            operation.and_then(|key| self.operations.find(key).map(|op| (key, op.local)))
        else {
            return;
        };
        match from {
            Ok(from) if !lost => {
                // SAFETY: `from` passed the target's check just now; `to` belongs to an operation still in flight, so
                // its region is registered; both are `len` long. They may overlap.
                unsafe { core::ptr::copy(from.as_ptr(), to.as_ptr(), len) };
                self.counters.bytes += len as u64;
                self.end(operation, None, Outcome::Applied);
            }
            // Lost, or the target died under it.
            _ => self.give_up_on(operation),
        }
    }

    fn reply(&mut self, operation: Option<Key>, result: Result<(), ErrorKind>) {
        let Some((key, op)) = operation.and_then(|key| self.operations.find(key).map(|op| (key, op))) else {
            return;
        };
        let (initiator, target, expires) = (op.initiator, op.target, op.expires);
        let link = *self.link(target, initiator);
        if !link.up || self.rng.chance_ppm(link.config.loss_ppm) {
            self.counters.lost += 1;
            self.give_up_on(key);
            return;
        }
        let after = self.latency(&link.config);
        if self.now + after > expires {
            self.give_up_on(key);
        }
        let outcome = if result.is_ok() { Outcome::Applied } else { Outcome::NotApplied };
        self.schedule(after, What::End(key, result.err(), outcome));
    }

    /// Nothing will come for this operation in time.
    fn give_up_on(&mut self, key: Key) {
        let now = self.now;
        if let Some(op) = self.operations.find_mut(key).filter(|op| !op.expiry_set) {
            op.expiry_set = true;
            let after = op.expires.saturating_sub(now);
            self.schedule(after, What::Expire(key));
        }
    }

    fn end(&mut self, key: Key, error: Option<ErrorKind>, outcome: Outcome) {
        let Some(op) = self.operations.remove(key) else { return };
        let departed = op.departs <= self.now;
        if let Some(packet_key) = op.packet {
            if op.kind == Kind::Write && departed {
                self.orphan(packet_key, op.local);
            } else if self.packets.find(packet_key).is_some_and(|packet| packet.answering) {
                self.packets.find_mut(packet_key).into_iter().for_each(|packet| packet.operation = None);
            } else {
                self.drop_packet(packet_key);
            }
        }
        let error = error.map(Error::new);
        let completion = match (error, outcome, op.kind) {
            (None, _, _) => Completion::applied(op.token),
            (Some(error), Outcome::Unknown, Kind::Write) if departed => Completion::unknown(op.token, error),
            (Some(error), _, Kind::Fence) => Completion::unknown(op.token, error),
            (Some(error), _, _) => Completion::not_applied(op.token, error),
        };
        match completion.outcome {
            Outcome::Applied => self.counters.applied += 1,
            Outcome::NotApplied => self.counters.not_applied += 1,
            Outcome::Unknown => self.counters.unknown += 1,
        }
        let done = Done { completion, region: op.region, segment: op.segment };
        self.nodes[op.initiator as usize].done.push_back(done);
    }

    /// The initiator no longer waits for this WRITE; its bytes stay on the wire.
    fn orphan(&mut self, key: Key, source: MemSpan) {
        let mut payload = self.buffers.pop().unwrap_or_default();
        let Some(packet) = self.packets.find_mut(key) else {
            self.buffers.push(payload);
            return;
        };
        payload.resize(source.len(), 0);
        // SAFETY: the operation ends in this call and not before, so its source is still registered; `payload` is ours.
        unsafe { crate::copy_bytes(source.as_ptr(), payload.as_mut_ptr(), source.len()) };
        self.orphan_count += 1;
        packet.operation = None;
        packet.orphan_count = self.orphan_count;
        packet.payload = payload;
    }

    /// The target settles every orphan up to `count`: half land now, half never.
    fn flush_orphans(&mut self, initiator: u32, target: u32, count: u64) {
        let mut from = 0;
        let older = |packet: &Packet| {
            packet.kind == Kind::Write
                && packet.operation.is_none()
                && (packet.initiator, packet.target) == (initiator, target)
                && packet.orphan_count <= count
        };
        while let Some((key, next)) = self.packets.next_where(from, older) {
            from = next;
            let identity = self.packets.find(key).map(|packet| packet.identity);
            if identity.is_some_and(|identity| self.nodes[target as usize].expelled.contains(&identity)) {
                // It was cut off since, and may be somebody else by now who fences.
                self.counters.refused += 1;
            } else if self.rng.chance_ppm(500_000) {
                let _refused_or_not = self.land(key);
            } else {
                self.counters.fenced_off += 1;
            }
            self.drop_packet(key);
        }
    }

    fn drop_packet(&mut self, key: Key) {
        let Some(packet) = self.packets.remove(key) else { return };
        if packet.payload.capacity() > 0 {
            self.buffers.push(packet.payload);
        }
        let node = &mut self.nodes[packet.target as usize];
        if packet.answering && node.incarnation == packet.export.incarnation {
            // The user count kept the region registered, or a kill took it and all the others with it.
            if let Some(region) = node.regions.get_mut(&packet.export.region.index) {
                region.remote_users -= 1;
            }
        }
    }

    fn link(&mut self, from: u32, to: u32) -> &mut Link {
        let config = self.config.link;
        self.links.entry((from, to)).or_insert(Link { config, up: true, busy_until: 0 })
    }

    /// When `bytes` begin and end to leave.
    fn transmit(&mut self, from: u32, to: u32, bytes: u64) -> (u64, u64) {
        let slowness = self.nodes[from as usize].slowness.max(self.nodes[to as usize].slowness);
        let now = self.now;
        let link = self.link(from, to);
        let wire = u128::from(bytes + 64) * 1_000_000_000 * u128::from(slowness);
        let begin = link.busy_until.max(now);
        link.busy_until = begin + (wire / u128::from(link.config.bytes_per_s.max(1))) as u64;
        (begin, link.busy_until)
    }

    fn latency(&mut self, config: &LinkConfig) -> u64 {
        let mut latency = self.rng.range(nanos(config.latency_min)..nanos(config.latency_max) + 1);
        if self.rng.chance_ppm(config.reorder_ppm) {
            latency += self.rng.range(0..nanos(config.reorder_max) + 1);
        }
        latency
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
