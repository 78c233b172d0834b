//! What a node does for the master: it makes replicas, by reading them from other nodes into its own memory.
//!
//! ```text
//!   heartbeat: there is work ──▶ FetchTasks ──▶ READ every order's source into its place (all at once, over the fabrics)
//!        ▲                                        │ verify: every block, the trailer, the whole
//!        └────── nothing left ◀── EndTasks ◀──────┘ or read the next source, while the lease runs
//! ```
//!
//! It happens on a thread of its own, so that a slow source does not keep the node from saying that it lives. What comes back
//! from EndTasks does not matter: an order whose end the master has not heard is in the next answer to FetchTasks, and is told
//! to have ended as before. It is not carried out again: the end that seems lost may be on its way, and with it the place
//! becomes a replica, or somebody else's.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use store_core::blocks::{BLOCK_BYTES, BlockSums, stored_len};
use store_core::message::{
    BadReplica, EndTasks, FetchAsk, FetchTasks, NodeProof, Replica, ReportReplicas, Segments, TaskEnd, TaskOrder,
};
use store_core::{ErrorCode, Key, SegmentNo, bound};
use te_engine::{Op, SegmentHandle, SharedRegion, Transfer, TransferEngine, TransferRequest};

use super::Shared;
use crate::config::NodeConfig;
use crate::error::{ConnectError, RpcError};
use crate::rpc::RpcConnection;
use crate::sys;

/// Replicas that are made at once.
const ORDERS_MAX: u32 = 16;
/// Segments of others that are kept open.
const OPEN_MAX: usize = 64;

/// What the node has mounted.
#[derive(Clone)]
pub(super) struct Mounted {
    pub(super) node: u64,
    pub(super) key: u64,
    pub(super) incarnation: u64,
    pub(super) segment: SegmentNo,
    pub(super) region: SharedRegion,
}

/// The thread that does the work.
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

    /// There is something to do.
    pub(super) fn wake(&self, mounted: Mounted) {
        if let Some(wake) = &self.wake {
            // One that is told already will look.
            let _ = wake.try_send(mounted);
        }
    }

    /// Waits until the round that runs is over. There is no other: what would be moved here goes with us.
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

/// What the thread owns.
struct Work {
    name: String,
    engine: TransferEngine,
    rpc: RpcConnection,
    shared: Arc<Shared>,
    reporter: u64,
    open: HashMap<SegmentNo, SegmentHandle>,
    /// Ends that were told and that the master may not have heard, by attempt.
    told: HashMap<u64, TaskEnd>,
}

/// A [`TaskOrder`] of our own.
struct Order {
    id: u64,
    attempt: u64,
    key: Vec<u8>,
    generation: u64,
    len: u64,
    checksum: u32,
    /// In our region.
    offset: u64,
    sources: Vec<Replica>,
}

/// Works whenever it is woken. A node that never has anything to do needs no second connection.
fn run(
    config: &NodeConfig,
    engine: &TransferEngine,
    shared: &Arc<Shared>,
    woken: &Receiver<Mounted>,
    stopping: &AtomicBool,
) {
    let mut work = None;
    while let Ok(mounted) = woken.recv() {
        let done = match &mut work {
            Some(work) => Work::work(work, &mounted, stopping),
            None => Work::connect(config, engine.clone(), Arc::clone(shared))
                .and_then(|connected| work.insert(connected).work(&mounted, stopping)),
        };
        if let Err(error) = done {
            // The next heartbeat wakes us again.
            log::debug!("node {}: tasks: {error}", config.name);
            work.iter_mut().for_each(|work| work.rpc.disconnect());
        }
    }
}

impl Work {
    fn connect(config: &NodeConfig, engine: TransferEngine, shared: Arc<Shared>) -> Result<Self, RpcError> {
        let rpc = RpcConnection::connect_as(config.master.clone(), config.rpc, config.identity.clone())?;
        let (name, reporter) = (config.name.clone(), super::random());
        Ok(Self { name, engine, rpc, shared, reporter, open: HashMap::new(), told: HashMap::new() })
    }

    /// Until there is nothing left to do, or the node stops.
    fn work(&mut self, mounted: &Mounted, stopping: &AtomicBool) -> Result<(), RpcError> {
        while !stopping.load(Ordering::Relaxed) && self.round(mounted)? > 0 {}
        Ok(())
    }

    /// Carries out what there is to do; gives how many orders there were.
    fn round(&mut self, mounted: &Mounted) -> Result<usize, RpcError> {
        let asked = Instant::now();
        let ask = FetchAsk {
            node: mounted.node,
            incarnation: mounted.incarnation,
            count_max: ORDERS_MAX,
            key: mounted.key,
        };
        let (lease, orders) = self.rpc.call::<FetchTasks>(&ask, std::iter::empty())?;
        let until = asked + Duration::from_millis(lease.lease_ms.into());
        let here = |order: &TaskOrder<'_>| order.segment == mounted.segment;
        let orders: Vec<Order> =
            orders.filter(here).filter_map(|order| Order::new(&order, &mounted.region)).collect();
        // What is not told any more has ended.
        self.told.retain(|attempt, _| orders.iter().any(|order| order.attempt == *attempt));
        if orders.is_empty() {
            return Ok(0);
        }
        // All are under way before the first is waited for.
        let first: Vec<_> = orders
            .iter()
            .map(|order| self.read(order, order.sources.first(), &mounted.region, until))
            .collect();
        let mut bad = Vec::new();
        let mut ends = Vec::with_capacity(orders.len());
        for (index, transfer) in first.into_iter().enumerate() {
            if let Some(told) = self.told.get(&orders[index].attempt) {
                ends.push(*told);
                continue;
            }
            let end = self.finish(index, &orders[index], transfer, &mounted.region, until, &mut bad);
            let counter = if end.result.is_ok() { &self.shared.copies } else { &self.shared.copy_failures };
            counter.fetch_add(1, Ordering::Relaxed);
            ends.push(end);
        }
        // Before the end: of objects that are not its tenant's, a node may report those alone that it is told to copy.
        if !bad.is_empty() {
            let bad = bad.iter().map(|&(order, segment): &(usize, SegmentNo)| {
                let order = &orders[order];
                BadReplica { key: Key(&order.key), generation: order.generation, segment }
            });
            if let Err(error) = self.rpc.call::<ReportReplicas>(&self.reporter, bad) {
                log::debug!("node {}: reporting bad replicas: {error}", self.name);
            }
        }
        self.told.extend(ends.iter().map(|end| (end.attempt, *end)));
        let proof = NodeProof { node: mounted.node, key: mounted.key };
        self.rpc.call::<EndTasks>(&proof, ends.into_iter())?;
        // From here on the master does not hand these attempts out again.
        self.told.clear();
        Ok(orders.len())
    }

    /// Begins to read a source into its place.
    fn read(
        &mut self,
        order: &Order,
        source: Option<&Replica>,
        region: &SharedRegion,
        until: Instant,
    ) -> Option<Transfer> {
        // The place may be a replica by now, or somebody else's, or still be written by a read that was given up.
        let source = source.filter(|_| !self.told.contains_key(&order.attempt))?;
        let segment = self.open(source.segment)?;
        let request = TransferRequest {
            op: Op::Read,
            local: (region.id(), order.offset).into(),
            segment,
            remote_addr: source.addr,
            len: stored_len(order.len),
        };
        let left = until.saturating_duration_since(Instant::now());
        self.engine.submit(&[request], Some(left)).ok()
    }

    /// Waits for the first source, tries the others, and says how it went.
    fn finish(
        &mut self,
        index: usize,
        order: &Order,
        first: Option<Transfer>,
        region: &SharedRegion,
        until: Instant,
        bad: &mut Vec<(usize, SegmentNo)>,
    ) -> TaskEnd {
        let end = |result, quiet| TaskEnd { id: order.id, attempt: order.attempt, result, quiet };
        let mut transfer = first;
        let mut error = ErrorCode::TransferFail;
        for (at, source) in order.sources.iter().enumerate() {
            let transfer = match transfer.take() {
                Some(transfer) => Some(transfer),
                None if at > 0 => self.read(order, Some(source), region, until),
                None => None,
            };
            let Some(transfer) = transfer else { continue };
            // Its own timeout bounds it.
            let ended = transfer.wait(None);
            if transfer.report().quarantined {
                return end(Err(ErrorCode::TransferFail), false);
            }
            if let Err(failure) = ended {
                log::debug!("node {}: reading from segment {}: {failure}", self.name, source.segment);
                self.close(source.segment);
                continue;
            }
            let found = checksum(order, region).map(|crc| bound(crc, &order.key, order.generation));
            if Instant::now() >= until {
                return end(Err(ErrorCode::LeaseExpired), true);
            }
            if found == Some(order.checksum) {
                return end(Ok(order.checksum), true);
            }
            log::warn!("node {}: {} on segment {} is damaged", self.name, Key(&order.key), source.segment);
            bad.push((index, source.segment));
            error = ErrorCode::ChecksumMismatch;
        }
        end(Err(error), true)
    }

    /// The handle of a segment, opened now if need be. Should something else be exported there by now, the checksum tells.
    fn open(&mut self, segment: SegmentNo) -> Option<SegmentHandle> {
        if let Some(handle) = self.open.get(&segment) {
            return Some(*handle);
        }
        let endpoint = {
            let (_, mut infos) = self.rpc.call::<Segments>(&(), std::iter::once(segment)).ok()?;
            infos.next()?.ok()?.endpoint.to_owned()
        };
        if self.open.len() >= OPEN_MAX {
            let others: Vec<SegmentNo> = self.open.keys().copied().collect();
            others.into_iter().for_each(|segment| self.close(segment));
        }
        let handle = self.engine.open_segment(&endpoint).ok()?;
        self.open.insert(segment, handle);
        Some(handle)
    }

    fn close(&mut self, segment: SegmentNo) {
        if let Some(Err(error)) = self.open.remove(&segment).map(|handle| self.engine.close_segment(handle)) {
            // Something else still reads there; it goes with the engine.
            log::debug!("node {}: closing segment {segment}: {error}", self.name);
        }
    }
}

impl Order {
    /// `None` when the place is not in our region.
    fn new(order: &TaskOrder<'_>, region: &SharedRegion) -> Option<Self> {
        let offset = order.addr.checked_sub(region.addr())?;
        let end = offset.checked_add(stored_len(order.len))?;
        (end <= region.len() as u64).then(|| Self {
            id: order.id,
            attempt: order.attempt,
            key: order.key.0.to_vec(),
            generation: order.generation,
            len: order.len,
            checksum: order.checksum,
            offset,
            sources: order.sources.to_vec(),
        })
    }
}

/// The checksum of what lies in an order's place; `None` when the trailer is not that of the bytes before it.
fn checksum(order: &Order, region: &SharedRegion) -> Option<u32> {
    let mut sums = BlockSums::default();
    while sums.len() < order.len {
        let len = (order.len - sums.len()).min(BLOCK_BYTES);
        let sum = sys::checksum_span(0, region.span(), order.offset + sums.len(), len)?;
        sums.push(sum, len);
    }
    let mut trailer = vec![0; sums.trailer().len()];
    region.read(order.offset + order.len, &mut trailer).ok()?;
    (trailer == sums.trailer()).then(|| sums.whole())
}
