//! [`Client`]: objects in, objects out.

use std::time::{Duration, Instant};

use store_core::client::{Action, GetItem, GetOp, PutItem, PutOp};
use store_core::message::{
    Exists, List, ListPosition, ListQuery, PutOptions, ReadStats, Removal, Remove, Segments as AskSegments,
};
use store_core::{ErrorCode, Key, Stats};
use te_engine::{MemSpan, Op, RegionId, SharedRegion};

use crate::bounce::Bounce;
use crate::config::ClientConfig;
use crate::error::{ConnectError, RpcError, StoreError};
use crate::fabric::Fabric;
use crate::memory::{BufferRange, Held, Memory};
use crate::mover::{Buffers, Mover};
use crate::rpc::RpcConnection;
use crate::segments::Segments;

/// A client of the store. One owner at a time; it needs no thread of its own, because whoever calls also polls.
///
/// A key that is not found, or not found intact and in time, is a miss: `None`, and a line in [`counters`](Self::counters).
/// Errors are for what a caller should look into.
pub struct Client {
    config: ClientConfig,
    rpc: RpcConnection,
    rpc_connects: u64,
    get: GetOp,
    put: PutOp,
    fabric: Fabric,
    memory: Memory,
    mover: Mover,
    segments: Segments,
    started: Instant,
    counters: Counters,
}

/// What a client has seen since it connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Keys that were read, intact.
    pub hits: u64,
    /// Keys that were not, for whichever reason that is no error.
    pub misses: u64,
    /// Replicas whose bytes were not those that were committed.
    pub checksum_mismatches: u64,
    /// Misses because reading took longer than the lease.
    pub lease_misses: u64,
    /// Reads that went on to another replica.
    pub replica_failovers: u64,
    /// Misses because no replica could be read.
    pub transfer_misses: u64,
    /// Keys that were committed.
    pub puts: u64,
    /// Keys whose put failed, those that existed not counted.
    pub put_failures: u64,
    /// Bytes of values read.
    pub read_bytes: u64,
    /// Bytes of values committed, each counted once.
    pub written_bytes: u64,
    /// Pieces of memory kept from use, at least for a while, because a fabric might still touch them.
    pub quarantined_pieces: u64,
    /// Connections made to the master.
    pub connects: u64,
}

/// A page of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The keys, in no particular order.
    pub entries: Vec<ListEntry>,
    /// Where the next page begins; 0: that was all.
    pub cursor: u64,
}

/// One key of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The key.
    pub key: Vec<u8>,
    /// Bytes.
    pub len: u64,
    /// Copies.
    pub replicas: u8,
    /// Readable; else it is being written.
    pub complete: bool,
    /// Readers hold a lease.
    pub leased: bool,
}

/// One segment of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentEntry {
    /// Its number, for [`Placement`](store_core::Placement).
    pub segment: store_core::SegmentNo,
    /// The node that contributes it.
    pub node: u64,
    /// Which life of the node's exports.
    pub incarnation: u64,
    /// Its name.
    pub name: String,
    /// Where the engine finds it.
    pub endpoint: String,
    /// Bytes.
    pub len: u64,
    /// Bytes that are allocated or held back.
    pub used: u64,
    /// Longest object for which there is room without eviction, bytes; a little more may fit.
    pub free_bytes_largest: u64,
}

impl Client {
    /// Connects to the master and starts an engine.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(config: ClientConfig) -> Result<Self, ConnectError> {
        config.validate()?;
        let rpc = RpcConnection::connect(config.master.clone(), config.rpc)?;
        let mut fabric = Fabric::start(config.engine.clone())?;
        let bounce = Bounce::new(fabric.alloc_shared(config.bounce_bytes)?);
        let op = store_core::client::ClientConfig { rpc_tries_max: config.rpc_tries_max };
        let mut this = Self {
            rpc,
            rpc_connects: 0,
            get: GetOp::new(op),
            put: PutOp::new(op),
            fabric,
            memory: Memory::default(),
            mover: Mover::new(bounce),
            segments: Segments::default(),
            started: Instant::now(),
            counters: Counters::default(),
            config,
        };
        this.note_connection();
        Ok(this)
    }

    /// Stores a copy of `value`. Gives `false` when the key is taken, and leaves the object there as it is.
    ///
    /// # Errors
    /// No room, an invalid key, no value, or nobody to write to.
    pub fn put(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<bool, StoreError> {
        stored(self.batch_put(&[(key, value)], options))
    }

    /// Stores many. An item that fails does so alone; one whose key is taken ends `ObjectAlreadyExists`.
    pub fn batch_put(
        &mut self,
        items: &[(&[u8], &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            let wanted =
                items.iter().map(|&(key, value)| PutItem { key, len: value.len() as u64, checksum: 0 });
            self.put.start(wanted, *options);
            self.run_put(items.len(), Buffers::Sources(items), &mut results);
        }
        results
    }

    /// Reads a value. `None` is a miss.
    ///
    /// # Errors
    /// An invalid key, a value over `value_bytes_max`, or a master that cannot be asked.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        one(self.batch_get(&[key])).map_err(StoreError::from)
    }

    /// Reads many values.
    pub fn batch_get(&mut self, keys: &[&[u8]]) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
        let capacity = self.config.value_bytes_max;
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            self.get.start(keys.iter().map(|&key| GetItem { key, capacity }), &[]);
            let mut sinks = vec![None; keys.len()];
            self.run_get(keys.len(), Buffers::Sinks(&mut sinks));
            for (item, sink) in sinks.into_iter().enumerate() {
                // A result without a sink would be an object without bytes, which there is not.
                results.push(self.fetched(item).map(|len| len.and(sink)));
            }
        }
        results
    }

    /// Allocates registered memory, for [`put_from`](Self::put_from) and [`get_into`](Self::get_into). It goes with the
    /// client, or with [`unregister`](Self::unregister).
    ///
    /// # Errors
    /// The system has none to give.
    pub fn alloc(&mut self, len: usize) -> Result<SharedRegion, StoreError> {
        let region = self.fabric.alloc_shared(len)?;
        self.memory.insert(region.id(), Held::Shared(region.clone()));
        Ok(region)
    }

    /// Registers the caller's memory, for [`put_from`](Self::put_from) and [`get_into`](Self::get_into).
    ///
    /// # Errors
    /// It overlaps what is registered, or the fabrics refuse it.
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) returned `Ok` for the region, or the client is gone, `span` stays mapped,
    /// readable and writable, and while an operation names a part of it, no `&` or `&mut` to that part exists.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register(&mut self, span: MemSpan) -> Result<RegionId, StoreError> {
        // SAFETY: the caller's promise, which is what the engine asks for.
        let region = unsafe { self.fabric.register(span)? };
        self.memory.insert(region, Held::Raw(span));
        Ok(region)
    }

    /// Ends a registration. After `Ok` nothing touches the memory any more.
    ///
    /// # Errors
    /// `Busy` while something might; `NotFound`.
    pub fn unregister(&mut self, region: RegionId) -> Result<(), StoreError> {
        self.fabric.unregister(region)?;
        self.memory.remove(region);
        Ok(())
    }

    /// Stores an object straight from registered memory. Gives `false` when the key is taken.
    ///
    /// # Errors
    /// As [`put`](Self::put), `InvalidParams` for a range that is not registered, `UnavailableInCurrentStatus` for one that a
    /// fabric may still write, because a read into it was given up and has not drained: try again, or use other memory.
    pub fn put_from(
        &mut self,
        key: &[u8],
        range: BufferRange,
        options: &PutOptions,
    ) -> Result<bool, StoreError> {
        stored(self.batch_put_from(&[(key, range)], options))
    }

    /// Stores many objects straight from registered memory.
    pub fn batch_put_from(
        &mut self,
        items: &[(&[u8], BufferRange)],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        if let Some(results) = self.refuse_ranges(items) {
            return results;
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            let wanted = items.iter().map(|&(key, range)| PutItem { key, len: range.len, checksum: 0 });
            self.put.start(wanted, *options);
            self.run_put(items.len(), Buffers::Ranges(items), &mut results);
        }
        results
    }

    /// Reads an object straight into registered memory; gives its length. `None` is a miss; the memory may have been written
    /// all the same.
    ///
    /// # Errors
    /// As [`put_from`](Self::put_from), and `BufferOverflow` when the object is longer than the range.
    pub fn get_into(&mut self, key: &[u8], range: BufferRange) -> Result<Option<u64>, StoreError> {
        one(self.batch_get_into(&[(key, range)])).map_err(StoreError::from)
    }

    /// Reads many objects straight into registered memory. Ranges must not overlap: what does is read with mixed bytes, and
    /// the checksum makes it a miss.
    pub fn batch_get_into(&mut self, items: &[(&[u8], BufferRange)]) -> Vec<Result<Option<u64>, ErrorCode>> {
        if let Some(results) = self.refuse_ranges(items) {
            return results;
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.get.start(items.iter().map(|&(key, range)| GetItem { key, capacity: range.len }), &[]);
            self.run_get(items.len(), Buffers::Ranges(items));
            results.extend((0..items.len()).map(|item| self.fetched(item)));
        }
        results
    }

    /// Whether a get would find it. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn exists(&mut self, key: &[u8]) -> Result<bool, StoreError> {
        Ok(self.batch_exists(&[key])?.first().copied().unwrap_or(false))
    }

    /// Whether gets would find them.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<Exists>(&(), keys.iter().map(|key| Key(key)))?;
            found.extend(answers);
        }
        self.note_connection();
        Ok(found)
    }

    /// Forgets an object; with `force` even under a lease or while it is written. Gives `false` when there was none.
    ///
    /// # Errors
    /// `ObjectHasLease`, `ReplicaIsNotReady`; a master that cannot be asked.
    pub fn remove(&mut self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        match one(self.batch_remove(&[key], force)?) {
            Ok(()) => Ok(true),
            Err(ErrorCode::ObjectNotFound) => Ok(false),
            Err(code) => Err(code.into()),
        }
    }

    /// Forgets many.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        force: bool,
    ) -> Result<Vec<Result<(), ErrorCode>>, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let removals = keys.iter().map(|key| Removal { key: Key(key), force });
            let (_, answers) = self.rpc.call::<Remove>(&(), removals)?;
            results.extend(answers);
        }
        self.note_connection();
        Ok(results)
    }

    /// A page of at most `limit` keys that begin with `prefix`. `cursor` is 0 to begin with, then what the page before gave.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn list(&mut self, prefix: &[u8], cursor: u64, limit: u32) -> Result<ListPage, StoreError> {
        let query = ListQuery { prefix: Key(prefix), cursor, limit };
        let (ListPosition { cursor }, listed) = self.rpc.call::<List>(&query, std::iter::empty())?;
        let entries = listed
            .map(|entry| ListEntry {
                key: entry.key.0.to_vec(),
                len: entry.len,
                replicas: entry.replicas,
                complete: entry.complete,
                leased: entry.leased,
            })
            .collect();
        self.note_connection();
        Ok(ListPage { entries, cursor })
    }

    /// The segments of the store.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn segments(&mut self) -> Result<Vec<SegmentEntry>, StoreError> {
        let (_, infos) = self.rpc.call::<AskSegments>(&(), std::iter::empty())?;
        let entries = infos.filter_map(Result::ok).map(|info| SegmentEntry {
            segment: info.segment,
            node: info.node,
            incarnation: info.incarnation,
            name: info.name.to_owned(),
            endpoint: info.endpoint.to_owned(),
            len: info.len,
            used: info.used,
            free_bytes_largest: info.free_bytes_largest,
        });
        let entries = entries.collect();
        self.note_connection();
        Ok(entries)
    }

    /// The master's counters and gauges.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn stats(&mut self) -> Result<Stats, StoreError> {
        let (stats, _) = self.rpc.call::<ReadStats>(&(), std::iter::empty())?;
        self.note_connection();
        Ok(stats)
    }

    /// This client's own counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            quarantined_pieces: self.mover.quarantined_total(),
            connects: self.rpc.connects_total(),
            ..self.counters
        }
    }

    /// Counters of the engine and its rails.
    #[must_use]
    pub fn engine_stats(&self) -> te_engine::Stats {
        self.fabric.stats()
    }

    #[cfg(test)]
    pub(crate) fn fabric_mut(&mut self) -> &mut Fabric {
        &mut self.fabric
    }

    fn run_get(&mut self, items: usize, mut buffers: Buffers<'_>) {
        self.mover.begin(items);
        let deadline = self.begin_operation();
        loop {
            self.get_actions();
            if self.get.is_done() {
                break;
            }
            let busy = self.pump(&mut buffers, deadline);
            let now = self.now();
            while let Some((transfer, end)) = self.mover.next_ended() {
                self.get.handle_transfer(now, transfer.id, end);
            }
            let due = self.get.poll_timeout();
            if due.is_some_and(|at| now >= at) {
                self.get.handle_timeout(now);
            } else if !busy {
                self.wait(due, deadline);
            }
        }
        self.counters.checksum_mismatches += u64::from(self.get.mismatches());
        self.end_operation();
    }

    fn get_actions(&mut self) {
        loop {
            let now = self.now();
            let (id, out) = self.rpc.queue_raw();
            match self.get.poll(now, id, out) {
                Some(Action::Call) => match self.rpc.exchange(id) {
                    Ok(frame) => self.get.handle_response(&frame),
                    Err(error) => {
                        let code = self.call_failed(error);
                        self.get.handle_call_failed(id, code);
                    }
                },
                Some(Action::Transfer(transfer)) => {
                    if self.start_transfer(transfer) {
                        self.counters.replica_failovers += 1;
                    }
                }
                Some(Action::Cancel { transfer }) => self.mover.cancel(transfer, &mut self.fabric),
                // A get writes nothing, so there is nothing to fence.
                Some(Action::Fence { .. }) => {}
                None => return,
            }
        }
    }

    fn run_put(&mut self, items: usize, mut buffers: Buffers<'_>, results: &mut Vec<Result<(), ErrorCode>>) {
        self.mover.begin(items);
        let deadline = self.begin_operation();
        loop {
            self.put_actions();
            if self.put.is_done() {
                break;
            }
            let busy = self.pump(&mut buffers, deadline);
            while let Some((transfer, end)) = self.mover.next_ended() {
                let item = transfer.item as usize;
                self.put.set_checksum(item, self.mover.checksum(item));
                self.put.handle_transfer(transfer.id, end);
            }
            let now = self.now();
            let due = self.put.poll_timeout();
            if due.is_some_and(|at| now >= at) {
                self.put.handle_timeout(now);
            } else if !busy {
                self.wait(due, deadline);
            }
        }
        self.end_operation();
        for item in 0..items {
            let result = self.put.result(item).unwrap_or(Err(ErrorCode::InternalError));
            match result {
                Ok(_) => {
                    self.counters.puts += 1;
                    self.counters.written_bytes += buffers.len(item);
                }
                Err(ErrorCode::ObjectAlreadyExists) => {}
                Err(_) => self.counters.put_failures += 1,
            }
            results.push(result.map(|_generation| ()));
        }
    }

    fn put_actions(&mut self) {
        loop {
            let now = self.now();
            let (id, out) = self.rpc.queue_raw();
            match self.put.poll(now, id, out) {
                Some(Action::Call) => match self.rpc.exchange(id) {
                    Ok(frame) => {
                        let now = te_core::Instant::ZERO + self.started.elapsed();
                        self.put.handle_response(now, &frame);
                    }
                    Err(error) => {
                        let code = self.call_failed(error);
                        self.put.handle_call_failed(id, code);
                    }
                },
                Some(Action::Transfer(transfer)) => {
                    self.start_transfer(transfer);
                }
                Some(Action::Cancel { transfer }) => self.mover.cancel(transfer, &mut self.fabric),
                Some(Action::Fence { segment }) => {
                    let timeout = Duration::from_millis(self.config.transfer_ms_max.into());
                    let handle = self.segments.handle(segment).filter(|_| self.mover.can_fence(segment));
                    let held = handle.is_some_and(|handle| self.fabric.fence(handle, timeout));
                    self.put.handle_fence(segment, held);
                }
                None => return,
            }
        }
    }

    /// Whether it is not the first of its item.
    fn start_transfer(&mut self, transfer: store_core::client::Transfer) -> bool {
        let shun = Duration::from_millis(self.config.unreachable_ms.into());
        let handle = self.segments.open(transfer.segment, &mut self.rpc, &mut self.fabric, shun);
        self.mover.start(transfer, handle) && transfer.op == Op::Read
    }

    /// A connection that the master closed meanwhile is noticed here rather than by a put's start, which is not repeated.
    fn begin_operation(&mut self) -> Instant {
        self.mover.settle(&mut self.fabric);
        match self.rpc.refresh() {
            Ok(_) => self.note_connection(),
            // The operation's first call will find the same, and say so for each item.
            Err(error) => log::debug!("{error}"),
        }
        Instant::now() + Duration::from_millis(self.config.transfer_ms_max.into())
    }

    fn end_operation(&mut self) {
        let shun = Duration::from_millis(self.config.unreachable_ms.into());
        while let Some(segment) = self.mover.next_failed_segment() {
            self.segments.failed(segment, &mut self.fabric, shun);
        }
    }

    fn pump(&mut self, buffers: &mut Buffers<'_>, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.mover.pump(&mut self.fabric, &self.memory, buffers, left)
    }

    fn wait(&mut self, due: Option<te_core::Instant>, deadline: Instant) {
        let due = due.map(|at| self.started + Duration::from_nanos(at.as_nanos()));
        self.mover.wait(&mut self.fabric, due.unwrap_or(deadline));
    }

    fn call_failed(&mut self, error: RpcError) -> ErrorCode {
        log::debug!("{error}");
        let code = error.code();
        // Refusals of the connection as a whole, timeouts and breaks alike: the next call starts afresh.
        self.rpc.disconnect();
        match self.rpc.ensure_connected() {
            Ok(_) => self.note_connection(),
            Err(error) => log::debug!("{error}"),
        }
        code
    }

    fn note_connection(&mut self) {
        if self.rpc_connects != self.rpc.connects_total() {
            self.rpc_connects = self.rpc.connects_total();
            self.segments.reconnected(self.rpc.welcome().epoch, &mut self.fabric);
        }
    }

    /// The result of an item of a get, counted.
    fn fetched(&mut self, item: usize) -> Result<Option<u64>, ErrorCode> {
        let result = self.get.result(item).unwrap_or(Err(ErrorCode::InternalError));
        match result {
            Ok(fetched) => {
                self.counters.hits += 1;
                self.counters.read_bytes += fetched.len;
                return Ok(Some(fetched.len));
            }
            Err(ErrorCode::LeaseExpired) => self.counters.lease_misses += 1,
            Err(ErrorCode::TransferFail | ErrorCode::SegmentNotFound) => self.counters.transfer_misses += 1,
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady | ErrorCode::ChecksumMismatch) => {}
            Err(code) => return Err(code),
        }
        self.counters.misses += 1;
        Ok(None)
    }

    fn refuse_ranges<T>(&mut self, items: &[(&[u8], BufferRange)]) -> Option<Vec<Result<T, ErrorCode>>> {
        self.mover.settle(&mut self.fabric);
        let refused = if items.iter().any(|(_, range)| !self.memory.contains(*range)) {
            ErrorCode::InvalidParams
        } else if items.iter().any(|(_, range)| self.mover.is_quarantined(*range)) {
            ErrorCode::UnavailableInCurrentStatus
        } else {
            return None;
        };
        Some(items.iter().map(|_| Err(refused)).collect())
    }

    fn now(&self) -> te_core::Instant {
        te_core::Instant::ZERO + self.started.elapsed()
    }
}

/// Most keys, and most bytes of keys, in one request: well inside a frame.
const KEYS_PER_CALL_MAX: usize = 1024;
const KEY_BYTES_PER_CALL_MAX: usize = 1 << 20;

/// Cuts a batch into what one request can carry.
fn chunks<T>(mut items: &[T], key_bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |item: &&T| {
            bytes += key_bytes(item);
            bytes <= KEY_BYTES_PER_CALL_MAX
        };
        let count = items.iter().take(KEYS_PER_CALL_MAX).take_while(fits).count().max(1).min(items.len());
        let (chunk, rest) = items.split_at(count);
        items = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

fn one<T>(results: Vec<Result<T, ErrorCode>>) -> Result<T, ErrorCode> {
    results.into_iter().next().unwrap_or(Err(ErrorCode::InternalError))
}

fn stored(results: Vec<Result<(), ErrorCode>>) -> Result<bool, StoreError> {
    match one(results) {
        Ok(()) => Ok(true),
        Err(ErrorCode::ObjectAlreadyExists) => Ok(false),
        Err(code) => Err(code.into()),
    }
}
