//! Work that a node does for the master: it copies replicas from other nodes into its own memory, and cuts
//! writers off ([`super::expulsions`]).
//!
//! ```text
//!   heartbeat: work is waiting ▶ ┌─▶ EndTasks: what has ended since ── FetchTasks: further orders
//!                                │                                        │
//!      half of them have ended, │                  at most 64 MiB at a time, below the operator's limit
//!      or a lease is half over ─┘                                         ▼
//!                                └── verify: chunks, trailer and object ◀── READ the source into its place
//!                                    or read the next source, while the lease runs
//! ```
//!
//! Bytes that a fabric cannot put into their place are read into other memory and brought there once they are
//! verified: memory of a pool whose hosts have no coherent caches is written past the cache, and storage
//! ([`super::storage`]) by a WRITE of this node to its own segment. Storage is read and written in whole
//! granules.
//!
//! A source on a disk is read into the memory of its node first ([`crate::stage`]); the orders that wait for
//! disks do not delay those that do not.
//!
//! It runs on a thread of its own, so that a slow source does not delay the node's heartbeats. The answer to
//! EndTasks may be lost: an order whose end the master has not received is in the next answer to FetchTasks,
//! and its end is reported again. The order is not carried out again: the report that seems lost may still be
//! under way, and when it arrives, the place becomes a replica or is given to another put.
//!
//! Orders are identified by their attempt: an order that is fetched again while it is under way only has its
//! lease renewed.

mod writes;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use store_core::chunks::{CHUNK_BYTES, ChunkSums, stored_len};
use store_core::message::{
    BadReplica, EndTasks, FetchRequest, FetchTasks, NodeProof, Replica, ReportReplicas, Segments, StageItem,
    TaskEnd, TaskOrder,
};
use store_core::{ErrorCode, Incarnation, Key, NodeId, SegmentNo, TaskId, bound};
use te_core::{Access, Error, Op, Status};
use te_engine::{
    BatchReport, RegisterError, SegmentHandle, SharedRegion, Transfer, TransferEngine, TransferRequest,
};

use super::Shared;
use super::expulsions::Expulsions;
use super::home::{Home, Writing};
use super::share::Share;
use crate::config::NodeConfig;
use crate::error::{ConnectError, RpcError};
use crate::pools::Pages;
use crate::rpc::RpcConnection;
use crate::stage::{StageConnections, StageEnd, StagedAt, Wanted};
use crate::sys;
use writes::is_quiet;

/// Most orders at a time, under way or waiting.
const ORDERS_MAX: u32 = 64;
/// Most bytes of orders under way. A longer object is read alone.
const FLIGHT_BYTES_MAX: u64 = 64 << 20;
/// Most segments of other nodes that are kept open.
const OPEN_MAX: usize = 64;
/// How long to wait for the oldest read before the others are checked.
const WAIT: Duration = Duration::from_millis(2);
/// How long to wait for a disk that has a source, and how long to leave it alone when it cannot be reached.
const DISK_DEADLINE: Duration = Duration::from_secs(2);
const DISK_SHUN: Duration = Duration::from_millis(500);
/// How long to keep asking after the last order, and the pause between two questions: a drain produces
/// further orders soon, and the next heartbeat is seconds away.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_PAUSE: Duration = Duration::from_millis(5);

/// What the node has mounted.
#[derive(Clone)]
pub(super) struct Mounted {
    pub(super) node: NodeId,
    pub(super) key: u64,
    pub(super) incarnation: Incarnation,
    pub(super) segment: SegmentNo,
    pub(super) home: Home,
}

/// Handle of the thread that does the work.
pub(super) struct Worker {
    wake: Option<SyncSender<Mounted>>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(
        config: &NodeConfig,
        engine: TransferEngine,
        shared: Arc<Shared>,
    ) -> Result<Self, ConnectError> {
        let (wake, woken) = sync_channel(1);
        let config = config.clone();
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let thread = thread::Builder::new()
            .name("snowskin-node-tasks".into())
            .spawn(move || run(&config, &engine, &shared, &woken, &stop))
            .map_err(ConnectError::System)?;
        Ok(Self { wake: Some(wake), stopping, thread: Some(thread) })
    }

    /// Signals that work is waiting.
    pub(super) fn wake(&self, mounted: Mounted) {
        if let Some(wake) = &self.wake {
            // If a signal is pending already, this one is not needed.
            let _ = wake.try_send(mounted);
        }
    }

    /// Ends the work under way and waits for its end. Copies into this node are useless once it is unmounted.
    pub(super) fn stop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// State of the thread.
struct Work {
    name: String,
    engine: TransferEngine,
    rpc: RpcConnection,
    shared: Arc<Shared>,
    reporter: u64,
    open: HashMap<SegmentNo, Source>,
    /// The node's own segment, if it was opened to write storage, and the mount for which that was.
    own: Option<(Incarnation, SegmentHandle)>,
    /// Pages of CXL pools.
    pages: Pages,
    disks: StageConnections<Staging>,
    share: Share,
    expulsions: Expulsions,
    /// Orders that have not begun.
    waiting: VecDeque<Order>,
    flights: Vec<Flight>,
    /// Memory of reads that have ended which a fabric may still write.
    spent: Vec<SharedRegion>,
    /// Orders that have ended and whose end the master may not know, by attempt.
    ends: HashMap<u64, TaskEnd>,
    /// Number of these that have never been reported.
    unreported: u32,
    /// Damaged replicas that were found.
    bad: Vec<Bad>,
    /// Number of orders after the latest question to the master.
    orders: usize,
    /// When to ask the master again, before a lease ends.
    renew_at: Instant,
}

/// A [`TaskOrder`] that owns its data.
struct Order {
    id: TaskId,
    attempt: u64,
    key: Vec<u8>,
    generation: u64,
    len: u64,
    /// The checksum, bound to the key and the generation.
    checksum: u32,
    /// Offset of its place in what the node has mounted.
    offset: u64,
    sources: Vec<Replica>,
    /// Until when the sources are leased.
    until: Instant,
    /// Number of sources that were tried.
    tried: usize,
    /// Why the latest source failed.
    error: ErrorCode,
}

/// An order whose source is being read, or was read and is being written to storage.
struct Flight {
    order: Order,
    source: SegmentNo,
    transfer: Transfer,
    /// What it is read into, if not into its place.
    apart: Option<SharedRegion>,
    /// Where the source was staged, if it is on a disk.
    staged: Option<StagedAt>,
    /// `Some`: the verified bytes are being written to this node's storage.
    writing: Option<Writing>,
}

/// An order whose source is being read by its disk.
struct Staging {
    order: Order,
    source: SegmentNo,
    handle: SegmentHandle,
}

/// Where a source is read.
#[derive(Clone, Copy)]
struct ReadAt {
    source: SegmentNo,
    handle: SegmentHandle,
    addr: u64,
    /// What the length of the read is a multiple of, bytes.
    granule: u64,
}

/// A segment that is open.
#[derive(Clone, Copy)]
struct Source {
    handle: SegmentHandle,
    /// The number of its stage service, if it is a disk.
    disk: Option<usize>,
    /// What reads of it are multiples of, bytes.
    granule: u64,
}

/// A damaged replica.
struct Bad {
    key: Vec<u8>,
    generation: u64,
    segment: SegmentNo,
}

/// The thread. It connects to the master when there is work for the first time: most nodes need no second
/// connection.
fn run(
    config: &NodeConfig,
    engine: &TransferEngine,
    shared: &Arc<Shared>,
    woken: &Receiver<Mounted>,
    stopping: &AtomicBool,
) {
    let mut work = None;
    while let Ok(mounted) = woken.recv() {
        let connected = match work.take() {
            Some(work) => Ok(work),
            None => Work::connect(config, engine.clone(), Arc::clone(shared)),
        };
        let done = connected.and_then(|connected| {
            let work = work.insert(connected);
            let done = work.work(mounted, woken, stopping);
            work.abandon();
            done
        });
        if let Err(error) = done {
            // The next heartbeat wakes the thread again.
            log::debug!("node {}: the master's orders cannot be carried out now: {error}", config.name);
            work.iter_mut().for_each(|work: &mut Work| work.rpc.disconnect());
        }
    }
}

impl Work {
    fn connect(config: &NodeConfig, engine: TransferEngine, shared: Arc<Shared>) -> Result<Self, RpcError> {
        let rpc = super::connect(config, &shared.standing)?;
        Ok(Self {
            name: config.name.clone(),
            reporter: super::random(&engine),
            engine,
            rpc,
            shared,
            open: HashMap::new(),
            own: None,
            pages: Pages::default(),
            disks: StageConnections::new(config.rpc, config.identity.cluster_secret(), DISK_SHUN),
            share: Share::new(config.copy_bytes_per_s_max),
            expulsions: Expulsions::default(),
            waiting: VecDeque::new(),
            flights: Vec::new(),
            spent: Vec::new(),
            ends: HashMap::new(),
            unreported: 0,
            bad: Vec::new(),
            orders: 0,
            renew_at: Instant::now(),
        })
    }

    /// Works until there has been nothing to do for a while, or the node stops.
    fn work(
        &mut self,
        mut mounted: Mounted,
        woken: &Receiver<Mounted>,
        stopping: &AtomicBool,
    ) -> Result<(), RpcError> {
        let mut idle_since = None;
        self.expulsions.fetch(&mut self.rpc, &mounted)?;
        self.ask(&mounted)?;
        while !stopping.load(Ordering::Relaxed) {
            match woken.try_recv() {
                Ok(now) if now.incarnation != mounted.incarnation => {
                    // The orders were for memory that is not mounted any more.
                    self.abandon();
                    self.ends.clear();
                    mounted = now;
                    self.expulsions.fetch(&mut self.rpc, &mounted)?;
                    self.ask(&mounted)?;
                }
                Ok(_) => self.expulsions.fetch(&mut self.rpc, &mounted)?,
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            self.expulsions.go_on(&self.engine, &mut self.rpc, &mounted)?;
            self.begin(&mounted);
            self.read_staged(&mounted);
            self.reap(&mounted);
            let under_way = self.under_way();
            if under_way * 2 <= self.orders && self.unreported > 0 || Instant::now() >= self.renew_at {
                self.ask(&mounted)?;
                continue;
            }
            if under_way > 0 {
                idle_since = None;
                self.wait();
                continue;
            }
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= LINGER && self.expulsions.is_empty() {
                return Ok(());
            }
            match woken.recv_timeout(LINGER_PAUSE) {
                Ok(now) => {
                    mounted = now;
                    self.expulsions.fetch(&mut self.rpc, &mounted)?;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
            self.ask(&mounted)?;
        }
        Ok(())
    }

    /// Reports what has ended, and fetches further orders.
    fn ask(&mut self, mounted: &Mounted) -> Result<(), RpcError> {
        self.report(mounted)?;
        let asked = Instant::now();
        let count_max = self.share.orders_max(ORDERS_MAX);
        let Mounted { node, key, incarnation, .. } = *mounted;
        let ask = FetchRequest { node, incarnation, count_max, key };
        let (lease, orders) = self.rpc.call::<FetchTasks>(&ask, std::iter::empty())?;
        let lease = Duration::from_millis(lease.lease_ms.into());
        let until = asked + lease;
        let mut given = Vec::new();
        for order in orders.filter(|order| order.segment == mounted.segment) {
            given.push(order.attempt);
            let flying = self.flights.iter_mut().map(|flight| &mut flight.order);
            let flying = flying.chain(self.disks.whats().map(|staging| &mut staging.order));
            if let Some(known) = flying.chain(&mut self.waiting).find(|known| known.attempt == order.attempt)
            {
                known.until = until;
            } else if self.ends.contains_key(&order.attempt) {
                // The place may be a replica by now, or belong to another put: the end is reported again.
                self.unreported += 1;
            } else if let Some(order) = Order::new(&order, &mounted.home, until) {
                self.share.saw(stored_len(order.len));
                self.waiting.push_back(order);
            }
        }
        // An order that is not in the answer was cancelled, or its end has arrived.
        self.waiting.retain(|order| given.contains(&order.attempt));
        self.ends.retain(|attempt, _| given.contains(attempt));
        self.orders = self.under_way();
        self.renew_at = asked + lease / 2;
        Ok(())
    }

    fn report(&mut self, mounted: &Mounted) -> Result<(), RpcError> {
        // Before the ends: a node may report replicas of other tenants' objects only while it has an order to
        // copy them.
        if !self.bad.is_empty() {
            let bad = self.bad.iter().map(|bad| BadReplica {
                key: Key(&bad.key),
                generation: bad.generation,
                segment: bad.segment,
            });
            if let Err(error) = self.rpc.call::<ReportReplicas>(&self.reporter, bad) {
                log::debug!("node {}: bad replicas could not be reported: {error}", self.name);
            }
            self.bad.clear();
        }
        if self.unreported > 0 {
            let ends: Vec<TaskEnd> = self.ends.values().copied().collect();
            let proof = NodeProof { node: mounted.node, key: mounted.key };
            self.rpc.call::<EndTasks>(&proof, ends.into_iter())?;
            // From now on the master does not hand out these attempts again.
            self.ends.clear();
            self.unreported = 0;
        }
        Ok(())
    }

    /// Begins as many reads as may be under way.
    fn begin(&mut self, mounted: &Mounted) {
        let mut bytes: u64 = self.flights.iter().map(|flight| stored_len(flight.order.len)).sum();
        bytes += self.disks.whats().map(|staging| stored_len(staging.order.len)).sum::<u64>();
        while let Some(order) = self.waiting.front() {
            let len = stored_len(order.len);
            if bytes > 0 && bytes + len > FLIGHT_BYTES_MAX || !self.share.take(len) {
                return;
            }
            bytes += len;
            if let Some(order) = self.waiting.pop_front() {
                self.read_next(order, mounted);
            }
        }
    }

    /// Reads the next source of an order into its place, or ends it.
    fn read_next(&mut self, mut order: Order, mounted: &Mounted) {
        loop {
            let Some(source) = order.sources.get(order.tried).copied() else {
                let error = order.error;
                return self.end(&order, Err(error), true);
            };
            let left = order.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.end(&order, Err(ErrorCode::LeaseExpired), true);
            }
            order.tried += 1;
            let Some(Source { handle, disk, granule }) = self.open(source.segment) else { continue };
            let Replica { segment, addr, .. } = source;
            if let Some(service) = disk {
                let deadline = Instant::now() + left.min(DISK_DEADLINE);
                let item = StageItem { disk: segment, locator: addr, len: order.len };
                let what = Staging { order, source: segment, handle };
                return self.disks.want(service, Wanted { item, deadline, what });
            }
            match self.read(order, ReadAt { source: segment, handle, addr, granule }, mounted) {
                Ok(flight) => return self.flights.push(flight),
                Err(back) => order = back,
            }
        }
    }

    /// Begins to read the source of an order; gives the order back if that cannot be done.
    fn read(&mut self, order: Order, at: ReadAt, mounted: &Mounted) -> Result<Flight, Order> {
        let ReadAt { source, handle: segment, addr: remote_addr, granule } = at;
        let home = &mounted.home;
        let stored = stored_len(order.len);
        let len = stored.next_multiple_of(granule);
        let apart = match home.is_apart() || granule > 1 {
            false => None,
            true => match self.memory_for(len.max(stored.next_multiple_of(home.granule()))) {
                Some(apart) => Some(apart),
                None => return Err(order),
            },
        };
        let local = apart.as_ref().map_or((home.id(), order.offset), |apart| (apart.id(), 0));
        let request = TransferRequest { op: Op::Read, local: local.into(), segment, remote_addr, len };
        let left = order.until.saturating_duration_since(Instant::now());
        match self.engine.submit(&[request], Some(left)) {
            Ok(transfer) => Ok(Flight { order, source, transfer, apart, staged: None, writing: None }),
            Err(_) => {
                self.spent.extend(apart);
                self.free_spent();
                Err(order)
            }
        }
    }

    /// Memory for a read that does not go to its place.
    fn memory_for(&self, len: u64) -> Option<SharedRegion> {
        self.engine.alloc_shared(usize::try_from(len).ok()?, Access::LOCAL).ok()
    }

    /// Gives memory of reads back that nothing uses any more.
    fn free_spent(&mut self) {
        let engine = &self.engine;
        self.spent.retain(|region| matches!(engine.unregister(region.id()), Err(RegisterError::Busy { .. })));
    }

    /// Reads what disks have staged, and the next sources of what they have not.
    fn read_staged(&mut self, mounted: &Mounted) {
        let mut ends = Vec::new();
        self.disks.poll(&mut ends);
        self.staged(ends, mounted);
    }

    fn staged(&mut self, ends: Vec<StageEnd<Staging>>, mounted: &Mounted) {
        for StageEnd { what: Staging { mut order, source, handle }, result } in ends {
            match result {
                Ok(staged) => {
                    let at = ReadAt { source, handle, addr: staged.addr, granule: 1 };
                    match self.read(order, at, mounted) {
                        Ok(flight) => self.flights.push(Flight { staged: Some(staged), ..flight }),
                        Err(order) => {
                            self.disks.release(&staged, true);
                            self.read_next(order, mounted);
                        }
                    }
                }
                Err(error) => {
                    log::debug!("node {}: disk {source} does not deliver an object: {error}", self.name);
                    if error == ErrorCode::SegmentNotFound {
                        self.close(source);
                    }
                    order.error = error;
                    self.read_next(order, mounted);
                }
            }
        }
    }

    /// Whether what was read counts, if it was read from a disk: it was not read too late.
    fn counts(&mut self, staged: Option<&StagedAt>, read: bool, mounted: &Mounted) -> bool {
        let Some(staged) = staged else { return true };
        let mut ends = Vec::new();
        let valid = self.disks.is_valid(staged, &mut ends);
        self.disks.release(staged, read);
        self.disks.flush();
        self.staged(ends, mounted);
        valid
    }

    /// Number of orders that have not ended.
    fn under_way(&mut self) -> usize {
        self.flights.len() + self.waiting.len() + self.disks.whats().count()
    }

    /// Waits for the oldest read, or until the limit on the copy rate allows the next.
    fn wait(&mut self) {
        match self.flights.first() {
            // Its own timeout bounds the wait; its result is examined when it is reaped.
            Some(flight) => drop(flight.transfer.wait(Some(WAIT))),
            None if !self.disks.is_idle() => self.disks.wait(Instant::now() + WAIT),
            None => thread::sleep(WAIT),
        }
    }

    /// Verifies the reads that have ended, and ends the orders whose writes have.
    fn reap(&mut self, mounted: &Mounted) {
        let mut at = 0;
        while at < self.flights.len() {
            let report = self.flights[at].transfer.report();
            if report.status == Status::Pending {
                at += 1;
                continue;
            }
            let flight = self.flights.remove(at);
            match flight.writing {
                Some(_) => self.wrote(flight, &report),
                None => self.has_read(flight, &report, mounted),
            }
        }
        self.free_spent();
    }

    /// A source was read: verifies it, and brings it to its place.
    fn has_read(&mut self, flight: Flight, report: &BatchReport, mounted: &Mounted) {
        let Flight { mut order, source, transfer, apart, staged, .. } = flight;
        let counts = self.counts(staged.as_ref(), report.status == Status::Completed, mounted);
        if report.quarantined {
            self.end(&order, Err(ErrorCode::TransferFail), apart.is_some());
        } else if report.status != Status::Completed {
            let failure = transfer.wait(None).err();
            log::debug!("node {}: reading from segment {source}: {failure:?}", self.name);
            self.close(source);
            self.read_next(order, mounted);
        } else {
            let read = match &apart {
                Some(apart) => checksum(order.len, apart, 0),
                None => mounted.home.memory().and_then(|memory| checksum(order.len, memory, order.offset)),
            };
            let found = read.map(|crc32c| bound(crc32c, &order.key, order.generation));
            if Instant::now() >= order.until {
                self.end(&order, Err(ErrorCode::LeaseExpired), true);
            } else if !counts {
                self.read_next(order, mounted);
            } else if found == Some(order.checksum) {
                return self.place(order, source, apart, mounted);
            } else {
                log::warn!("node {}: {} on segment {source} is damaged", self.name, Key(&order.key));
                let (key, generation) = (order.key.clone(), order.generation);
                self.bad.push(Bad { key, generation, segment: source });
                order.error = ErrorCode::ChecksumMismatch;
                self.read_next(order, mounted);
            }
        }
        self.spent.extend(apart);
    }

    /// Brings verified bytes to their place, if they are not there yet. The order ends when they are.
    fn place(&mut self, order: Order, source: SegmentNo, apart: Option<SharedRegion>, mounted: &Mounted) {
        let Some(apart) = apart else { return self.end(&order, Ok(order.checksum), true) };
        let Some(memory) = mounted.home.memory() else {
            return self.write(order, source, apart, mounted);
        };
        let moved = move_in(&order, &apart, memory).map_err(|error| {
            log::warn!("node {}: its memory cannot be written: {error}", self.name);
            ErrorCode::TransferFail
        });
        self.end(&order, moved.map(|()| order.checksum), true);
        self.spent.push(apart);
    }

    fn end(&mut self, order: &Order, result: Result<u32, ErrorCode>, quiet: bool) {
        let counter = if result.is_ok() { &self.shared.copies } else { &self.shared.copy_failures };
        counter.fetch_add(1, Ordering::Relaxed);
        self.ends.insert(order.attempt, TaskEnd { id: order.id, attempt: order.attempt, result, quiet });
        self.unreported += 1;
    }

    /// Ends the work under way and waits for its end. The ends are reported if the same orders are fetched
    /// again.
    fn abandon(&mut self) {
        self.waiting.clear();
        let mut staging = Vec::new();
        self.disks.give_up(ErrorCode::UnavailableInCurrentStatus, |_| true, &mut staging);
        for StageEnd { what, result } in staging {
            if let Ok(staged) = result {
                self.disks.release(&staged, true);
            }
            self.end(&what.order, Err(ErrorCode::UnavailableInCurrentStatus), true);
        }
        for flight in &self.flights {
            flight.transfer.cancel();
        }
        for flight in std::mem::take(&mut self.flights) {
            // The transfer's own timeout bounds the wait.
            let _ = flight.transfer.wait(None);
            let report = flight.transfer.report();
            let quiet = match (&flight.writing, &flight.apart) {
                (Some(_), _) => is_quiet(&report),
                (None, Some(_)) => true,
                (None, None) => !report.quarantined,
            };
            if let Some(staged) = &flight.staged {
                self.disks.release(staged, quiet);
            }
            self.end(&flight.order, Err(ErrorCode::UnavailableInCurrentStatus), quiet);
            self.spent.extend(flight.apart);
        }
        self.free_spent();
        self.disks.flush();
        // These ends are reported when the master repeats the orders.
        self.unreported = 0;
    }

    /// The handle of a segment, which is opened if necessary. If it exports something else by now, the
    /// checksum will not match.
    fn open(&mut self, segment: SegmentNo) -> Option<Source> {
        if let Some(source) = self.open.get(&segment) {
            return Some(*source);
        }
        let (endpoint, stage, granule) = {
            let (_, mut infos) = self.rpc.call::<Segments>(&(), std::iter::once(segment)).ok()?;
            let info = infos.next()?.ok()?;
            (info.endpoint.to_owned(), info.stage.to_owned(), info.location.granule_bytes().into())
        };
        let disk = (!stage.is_empty()).then(|| self.disks.line(&stage));
        if self.open.len() >= OPEN_MAX {
            let others: Vec<SegmentNo> = self.open.keys().copied().collect();
            others.into_iter().for_each(|segment| self.close(segment));
        }
        self.pages.ensure_of_node(&mut self.rpc, &self.engine);
        let handle = self.engine.open_segment(&endpoint).ok()?;
        let source = Source { handle, disk, granule };
        self.open.insert(segment, source);
        Some(source)
    }

    fn close(&mut self, segment: SegmentNo) {
        if let Some(Err(error)) =
            self.open.remove(&segment).map(|source| self.engine.close_segment(source.handle))
        {
            // Another read still uses the segment; it is closed with the engine.
            log::debug!("node {}: segment {segment} cannot be closed: {error}", self.name);
        }
    }
}

impl Order {
    /// `None` when the place does not lie inside what the node has mounted, in whole granules.
    fn new(order: &TaskOrder<'_>, home: &Home, until: Instant) -> Option<Self> {
        let offset = order.addr.checked_sub(home.addr())?;
        let whole = stored_len(order.len).checked_next_multiple_of(home.granule())?;
        let inside = offset.is_multiple_of(home.granule()) && offset.checked_add(whole)? <= home.len();
        inside.then(|| Self {
            id: order.id,
            attempt: order.attempt,
            key: order.key.0.to_vec(),
            generation: order.generation,
            len: order.len,
            checksum: order.checksum,
            offset,
            sources: order.sources.to_vec(),
            until,
            tried: 0,
            error: ErrorCode::TransferFail,
        })
    }
}

/// The checksum of an object's bytes, which begin at `offset`; `None` when the trailer does not match them.
fn checksum(object_len: u64, region: &SharedRegion, offset: u64) -> Option<u32> {
    let mut sums = ChunkSums::default();
    while sums.len() < object_len {
        let len = (object_len - sums.len()).min(CHUNK_BYTES);
        let sum = sys::checksum_span(0, region.span(), offset + sums.len(), len)?;
        sums.push(sum, len);
    }
    let mut trailer = vec![0; sums.trailer().len()];
    region.read(offset + object_len, &mut trailer).ok()?;
    (trailer == sums.trailer()).then(|| sums.whole())
}

/// Copies what an order has read to its place, past the cache.
fn move_in(order: &Order, from: &SharedRegion, to: &SharedRegion) -> Result<(), Error> {
    let mut piece = vec![0; CHUNK_BYTES as usize];
    let (mut at, end) = (0, stored_len(order.len));
    while at < end {
        let piece = &mut piece[..(end - at).min(CHUNK_BYTES) as usize];
        from.read(at, piece)?;
        to.write(order.offset + at, piece)?;
        at += piece.len() as u64;
    }
    Ok(())
}
