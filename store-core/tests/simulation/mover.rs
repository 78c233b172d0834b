//! What a simulated node does when the master has tasks for it: it reads replicas of other nodes into its own
//! memory.
//!
//! It works as `store-client` does: fetch the orders, read each from one source after the other while the
//! lease is valid, verify what has arrived, report damaged replicas, report the end of each attempt, and
//! fetch again until there is nothing left. A read that takes too long is given up while it may still write.
//! A report that was lost is repeated, and the place is not touched.

use std::collections::HashMap;
use std::time::Duration;

use store_core::chunks::stored_len;
use store_core::message::{
    BadReplica, EndTasks, FetchRequest, FetchTasks, NodeProof, Operation, Replica, ReportReplicas, TaskEnd,
};
use store_core::{ErrorCode, Frame, Incarnation, Key, Kind, NodeId, SegmentNo, TaskId, bound};
use te_core::sim::SimTransport;
use te_core::{
    Completion, Instant, Memory as _, Op, Outcome, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
    Slice, Token, Transport,
};

use crate::clock::Clock;
use crate::common::{Core, Event, Party, slice_bytes};
use crate::memory::{Memory, sums};
use crate::scenario::{CALL_TIMEOUT, CLIENTS, LATE_MAX, Lies};
use crate::shadow::Violation;

/// Most orders at once.
const ORDERS_MAX: u32 = 4;
/// Reads that are given up before they have ended, per million.
const HASTE_PPM: u32 = 60_000;
/// Probability that a node dies while it carries out an order, per million.
const DEATH_PPM: u32 = 20_000;

/// The segment that a node has mounted.
#[derive(Clone, Copy)]
pub(crate) struct Mounted {
    pub(crate) region: RegionId,
    pub(crate) segment: SegmentNo,
    pub(crate) incarnation: u64,
}

/// The node's fabric and memory.
pub(crate) struct Hands<'a> {
    pub(crate) transport: &'a mut SimTransport,
    pub(crate) memory: &'a Memory,
}

pub(crate) struct Mover {
    node: usize,
    life: u64,
    /// The key of the node.
    key: u64,
    clock: Clock,
    /// The request that it waits for: its kind, its id, and the time it was sent.
    call: Option<(Kind, u64, Instant)>,
    mounted: Option<Mounted>,
    /// When it requested the orders, and when they have to be carried out, by its own clock.
    asked: Instant,
    until: Instant,
    orders: Vec<Order>,
    /// The phase before which it pauses, if it does.
    asleep: Option<Before>,
    reads: HashMap<u64, Read>,
    tokens: HashMap<Token, u64>,
    attached: HashMap<SegmentNo, RemoteRegionId>,
    /// Reports that the master may not have received, by attempt.
    reported: HashMap<u64, TaskEnd>,
    next: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Reading,
    Telling,
}

/// One replica to make.
struct Order {
    id: TaskId,
    attempt: u64,
    key: Vec<u8>,
    generation: u64,
    len: u64,
    checksum: u32,
    addr: u64,
    sources: Vec<Replica>,
    /// Number of sources tried.
    tried: usize,
    bad: Vec<SegmentNo>,
    end: Option<TaskEnd>,
}

/// One read of a source into its place.
struct Read {
    /// The attempt; `None`: it was given up.
    attempt: Option<u64>,
    left: usize,
    failed: bool,
}

impl Mover {
    pub(crate) fn new(node: usize, life: u64, clock: Clock, key: u64) -> Self {
        Self {
            node,
            life,
            key,
            clock,
            call: None,
            mounted: None,
            asked: Instant::ZERO,
            until: Instant::ZERO,
            orders: Vec::new(),
            asleep: None,
            reads: HashMap::new(),
            tokens: HashMap::new(),
            attached: HashMap::new(),
            reported: HashMap::new(),
            next: life << 32,
        }
    }

    pub(crate) fn clock_mut(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// Whether it is carrying out a copy.
    pub(crate) fn is_copying(&self) -> bool {
        self.orders.iter().any(|order| order.end.is_none())
    }

    /// Its memory is withdrawn. Reads in progress are void.
    pub(crate) fn forget(&mut self) {
        (self.call, self.mounted) = (None, None);
        self.orders.clear();
        self.asleep = None;
        self.reported.clear();
        self.reads.values_mut().for_each(|read| read.attempt = None);
    }

    /// There is work, according to the master.
    pub(crate) fn wake(&mut self, core: &mut Core, mounted: Mounted) {
        if self.call.is_none() && self.orders.is_empty() {
            self.mounted = Some(mounted);
            self.fetch(core);
        }
    }

    /// Gives up waiting for a response.
    pub(crate) fn tick(&mut self, core: &mut Core) {
        let Some((kind, ..)) = self.call.filter(|(.., since)| *since + CALL_TIMEOUT <= core.now) else {
            return;
        };
        self.call = None;
        match kind {
            Kind::ReportReplicas => self.emit(core),
            // The next heartbeat reports whether there is work.
            _ => self.orders.clear(),
        }
    }

    pub(crate) fn receive(
        &mut self,
        core: &mut Core,
        frame: &Frame<'_>,
        hands: &mut Hands<'_>,
    ) -> Result<(), Violation> {
        let Some((kind, ..)) = self.call.filter(|(_, id, _)| *id == frame.header.request_id) else {
            return Ok(());
        };
        self.call = None;
        match kind {
            Kind::FetchTasks => {
                let Ok((lease, orders)) = FetchTasks::decode_response(frame) else { return Ok(()) };
                self.until = self.asked + Duration::from_millis(lease.lease_ms.into());
                let here = self.mounted.map(|mounted| mounted.segment);
                for order in orders.filter(|order| Some(order.segment) == here) {
                    self.orders.push(Order {
                        id: order.id,
                        attempt: order.attempt,
                        key: order.key.0.to_vec(),
                        generation: order.generation,
                        len: order.len,
                        checksum: order.checksum,
                        addr: order.addr,
                        sources: order.sources.to_vec(),
                        tried: 0,
                        bad: Vec::new(),
                        end: None,
                    });
                }
                // Attempts that are not listed any more have ended.
                let orders = &self.orders;
                self.reported.retain(|attempt, _| orders.iter().any(|order| order.attempt == *attempt));
                if self.orders.is_empty() || !self.sleeps(core, Before::Reading) {
                    self.begin(core, hands)?;
                }
            }
            Kind::ReportReplicas => self.emit(core),
            Kind::EndTasks => {
                if frame.header.result().is_ok() {
                    self.reported.clear();
                }
                self.orders.clear();
                self.fetch(core);
            }
            _ => {}
        }
        Ok(())
    }

    /// It was slow, and continues.
    pub(crate) fn wake_up(&mut self, core: &mut Core, hands: &mut Hands<'_>) -> Result<(), Violation> {
        match self.asleep.take() {
            Some(Before::Reading) => self.begin(core, hands)?,
            Some(Before::Telling) => self.report(core),
            None => {}
        }
        Ok(())
    }

    /// Whether it is slow now.
    fn sleeps(&mut self, core: &mut Core, before: Before) -> bool {
        let (ppm, most_ms) = match before {
            Before::Reading => (250_000, 150),
            Before::Telling => (100_000, 2_000),
        };
        let sleeps = core.scenario.faults && !core.is_silent() && core.chance_ppm(ppm);
        if sleeps {
            self.asleep = Some(before);
            // A source may be unmounted meanwhile.
            let sources = self.orders.iter().flat_map(|order| &order.sources);
            let nodes =
                sources.filter_map(|source| core.master.segment(source.segment).map(|info| info.node));
            let nodes: Vec<usize> = nodes.map(|node| node.get() as usize - 1).collect();
            if before == Before::Telling && core.below(3) == 0 {
                let node = nodes.get(core.below(nodes.len() as u64) as usize).copied();
                node.into_iter().for_each(|node| core.at(core.now, Event::CrashNode(node)));
            }
            let until = core.now + Duration::from_micros(core.below(most_ms * 1_000));
            core.at(until, Event::GoOn { node: self.node, life: self.life });
        }
        sleeps
    }

    /// Begins to carry out the orders.
    fn begin(&mut self, core: &mut Core, hands: &mut Hands<'_>) -> Result<(), Violation> {
        for at in 0..self.orders.len() {
            let known = self.reported.get(&self.orders[at].attempt).copied();
            if let Some(end) = known.filter(|_| !core.lies.contains(Lies::AGAIN)) {
                core.report.reported_again += 1;
                self.orders[at].end = Some(end);
            } else {
                self.read_next(core, at, hands)?;
            }
        }
        if self.is_copying() && core.scenario.faults && core.chance_ppm(DEATH_PPM) {
            // Most reads end within this time, but not all.
            core.at(core.now + Duration::from_micros(100), Event::CrashNode(self.node));
        }
        self.go_on(core);
        Ok(())
    }

    /// Takes completions from the fabric.
    pub(crate) fn reap(&mut self, core: &mut Core, hands: &mut Hands<'_>) -> Result<(), Violation> {
        if self.tokens.is_empty() {
            return Ok(());
        }
        let mut done = [Completion::applied(Token(0)); 16];
        loop {
            let count = hands.transport.poll(core.now, &mut done);
            for completion in &done[..count] {
                let number = self.tokens.remove(&completion.token).expect("a completion of a known token");
                let read = self.reads.get_mut(&number).expect("a running read");
                read.failed |= completion.outcome != Outcome::Applied;
                read.left -= 1;
                if read.left == 0 {
                    self.read_ended(core, number, hands)?;
                }
            }
            if count < done.len() {
                return Ok(());
            }
        }
    }

    fn fetch(&mut self, core: &mut Core) {
        let Some(mounted) = self.mounted else { return };
        let fetch = FetchRequest {
            node: NodeId::new(self.node as u64 + 1),
            incarnation: Incarnation::new(mounted.incarnation),
            count_max: ORDERS_MAX,
            key: self.key,
        };
        self.asked = self.clock.shows(core.now);
        self.call(core, Kind::FetchTasks, |out, id| {
            FetchTasks::encode_request(out, id, &fetch, core::iter::empty()).unwrap();
        });
    }

    fn go_on(&mut self, core: &mut Core) {
        let busy = self.call.is_some() || self.asleep.is_some() || self.is_copying();
        if !busy && !self.orders.is_empty() && !self.sleeps(core, Before::Telling) {
            self.report(core);
        }
    }

    /// All orders are carried out. Bad replicas are reported first, as long as the node has an order for
    /// their object.
    fn report(&mut self, core: &mut Core) {
        let bad: Vec<BadReplica<'_>> = self
            .orders
            .iter()
            .flat_map(|order| order.bad.iter().map(move |segment| (order, *segment)))
            .map(|(order, segment)| BadReplica {
                key: Key(&order.key),
                generation: order.generation,
                segment,
            })
            .collect();
        if bad.is_empty() {
            return self.emit(core);
        }
        core.report.reported_bad += bad.len() as u64;
        let reporter = u64::MAX - self.life;
        let mut out = Vec::new();
        self.next += 1;
        ReportReplicas::encode_request(&mut out, self.next, &reporter, bad.into_iter()).unwrap();
        self.call = Some((Kind::ReportReplicas, self.next, core.now));
        core.send(Party::Node(self.node), self.life, out);
    }

    /// Reports the end of all attempts.
    fn emit(&mut self, core: &mut Core) {
        let ends: Vec<TaskEnd> = self.orders.iter().filter_map(|order| order.end).collect();
        self.reported.extend(ends.iter().map(|end| (end.attempt, *end)));
        let proof = NodeProof { node: NodeId::new(self.node as u64 + 1), key: self.key };
        self.call(core, Kind::EndTasks, |out, id| {
            EndTasks::encode_request(out, id, &proof, ends.into_iter()).unwrap();
        });
    }

    fn call(&mut self, core: &mut Core, kind: Kind, encode: impl FnOnce(&mut Vec<u8>, u64)) {
        self.next += 1;
        let mut out = Vec::new();
        encode(&mut out, self.next);
        self.call = Some((kind, self.next, core.now));
        core.send(Party::Node(self.node), self.life, out);
    }

    /// Begins to read the next source of an order, or ends it.
    fn read_next(&mut self, core: &mut Core, at: usize, hands: &mut Hands<'_>) -> Result<(), Violation> {
        let Some(mounted) = self.mounted else { return Ok(()) };
        loop {
            let late = self.clock.shows(core.now) >= self.until;
            let order = &mut self.orders[at];
            let end =
                |error| TaskEnd { id: order.id, attempt: order.attempt, result: Err(error), quiet: true };
            if late {
                order.end = Some(end(ErrorCode::LeaseExpired));
                return Ok(());
            }
            let Some(source) = order.sources.get(order.tried).copied() else {
                let damaged = !order.bad.is_empty();
                let error = if damaged { ErrorCode::ChecksumMismatch } else { ErrorCode::TransferFail };
                order.end = Some(end(error));
                return Ok(());
            };
            order.tried += 1;
            let (attempt, addr, len) = (order.attempt, order.addr, stored_len(order.len));
            let Some(segment) = self.attached(core, source.segment, hands) else { continue };
            self.next += 1;
            let number = self.next;
            let writer = (CLIENTS + self.node, number);
            let range = (mounted.segment, addr, len);
            let begun = core.shadow.write_begins(core.now, writer, 0, attempt, (range, range));
            core.judge(begun)?;
            let mut read = Read { attempt: Some(attempt), left: 0, failed: false };
            let step = slice_bytes(len);
            for offset in (0..len).step_by(step as usize) {
                self.next += 1;
                let token = Token(self.next);
                let slice = Slice {
                    token,
                    local: RegionOffset::new(mounted.region, addr + offset),
                    remote: RemoteOffset::new(segment, source.addr + offset),
                    len: step.min(len - offset) as u32,
                    op: Op::Read,
                };
                match hands.transport.submit(&[slice]) {
                    Ok(1) => {
                        self.tokens.insert(token, number);
                        read.left += 1;
                    }
                    Ok(_) | Err(_) => read.failed = true,
                }
            }
            if read.left == 0 {
                core.shadow.write_ends(writer, None);
                continue;
            }
            // Some reads are given up early.
            if !core.is_silent() && core.chance_ppm(HASTE_PPM) {
                core.report.given_up += 1;
                read.attempt = None;
                core.shadow.write_ends(writer, Some(core.now + LATE_MAX));
                let order = &mut self.orders[at];
                let quiet = core.lies.contains(Lies::QUIET);
                let result = Err(ErrorCode::TransferFail);
                order.end = Some(TaskEnd { id: order.id, attempt, result, quiet });
            }
            self.reads.insert(number, read);
            return Ok(());
        }
    }

    fn read_ended(&mut self, core: &mut Core, number: u64, hands: &mut Hands<'_>) -> Result<(), Violation> {
        let Some(read) = self.reads.remove(&number) else { return Ok(()) };
        let Some(attempt) = read.attempt else { return Ok(()) };
        core.shadow.write_ends((CLIENTS + self.node, number), None);
        let Some(at) = self.orders.iter().position(|order| order.attempt == attempt) else { return Ok(()) };
        if read.failed {
            self.read_next(core, at, hands)?;
        } else {
            let order = &mut self.orders[at];
            let bytes = hands.memory.read(order.addr, stored_len(order.len));
            let (data, trailer) = bytes.split_at(order.len as usize);
            let sums = sums(data);
            let found = bound(sums.whole(), &order.key, order.generation);
            let intact = found == order.checksum && sums.trailer() == trailer;
            if intact || core.lies.contains(Lies::VERIFY) {
                let result = if self.clock.shows(core.now) >= self.until {
                    Err(ErrorCode::LeaseExpired)
                } else {
                    Ok(order.checksum)
                };
                order.end = Some(TaskEnd { id: order.id, attempt, result, quiet: true });
            } else {
                if self.clock.shows(core.now) < self.until {
                    order.bad.push(order.sources[order.tried - 1].segment);
                }
                self.read_next(core, at, hands)?;
            }
        }
        self.go_on(core);
        Ok(())
    }

    fn attached(&mut self, core: &Core, segment: SegmentNo, hands: &mut Hands<'_>) -> Option<RemoteRegionId> {
        if let Some(id) = self.attached.get(&segment) {
            return Some(*id);
        }
        let id = RemoteRegionId::new(segment.get(), 1);
        hands.transport.attach(id, core.export_of(segment)?).ok()?;
        self.attached.insert(segment, id);
        Some(id)
    }
}
