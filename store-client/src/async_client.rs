//! [`AsyncClient`]: a [`Client`] on a thread of its own, for tasks.
//!
//! ```text
//!   task ── put(…).await ──▶ ┌───────────────┐     takes all that waits     ┌────────────────────┐
//!   task ── get(…).await ──▶ │ bounded queue │ ───────────────────────────▶ │ thread: a Client   │
//!   task ── get(…).await ──▶ └───────────────┘  one batch of each kind      │  one call a batch  │
//!     ▲                                                                     └─────────┬──────────┘
//!     └──────────────────────────── wakers ───────────────────────────────────────────┘
//! ```
//!
//! Its speed is that it gathers: operations that wait when the thread comes back become one batch of their kind, with one
//! question to the master and one flight of transfers, whichever tasks they are from. An operation alone pays two thread
//! switches instead; whoever wants the lowest latency for one operation at a time owns a [`Client`].
//!
//! # What a dropped future leaves behind
//! An operation owns its buffers: `Vec`s, and handles of regions. A future that is dropped before its operation began undoes
//! it. One that is dropped later does not stop it: the operation ends as any other, its buffers are held until then, and
//! nothing touches them afterwards. A put whose future was dropped may have happened, or not. Memory that was allocated for
//! a future that nobody waits for is given back.
//!
//! No runtime is needed or known: the futures are woken by wakers alone.

mod queue;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use store_core::ErrorCode;
use store_core::message::PutOptions;
use te_core::RegionId;
use te_engine::SharedRegion;

pub use queue::Pending;
use queue::{Queue, Reply};

use crate::client::{Client, Counters, PARTS_MAX, Part, part};
use crate::error::StoreError;
use crate::memory::BufferRange;

/// Operations that wait at most; further ones make their tasks wait.
pub const QUEUE_JOBS_MAX: usize = 4096;

/// A handle of a [`Client`] that runs on a thread of its own. Cheap to clone; the thread ends when the last one is gone and
/// everything that was asked for is done.
#[derive(Clone)]
pub struct AsyncClient {
    handle: Arc<Handle>,
}

struct Handle {
    queue: Arc<Queue<Job>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A part of a region that [`AsyncClient::alloc`] gave. Holds the region.
#[derive(Clone)]
pub struct SharedPart {
    /// The region.
    pub region: SharedRegion,
    /// Where in it, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl SharedPart {
    /// All of a region.
    #[must_use]
    pub fn all(region: &SharedRegion) -> Self {
        Self::part(region, 0, region.len() as u64)
    }

    /// `len` bytes of a region from `offset` on.
    #[must_use]
    pub fn part(region: &SharedRegion, offset: u64, len: u64) -> Self {
        Self { region: region.clone(), offset, len }
    }
}

/// What the thread is asked to do.
enum Job {
    Put(Put<Vec<Vec<u8>>>),
    PutFrom(Put<Vec<SharedPart>>),
    Get(Vec<u8>, Reply<Option<Vec<u8>>>),
    GetRange(Vec<u8>, Part, Reply<Option<Vec<u8>>>),
    GetInto(Vec<u8>, Vec<SharedPart>, Reply<Option<u64>>),
    Exists(Vec<u8>, Reply<bool>),
    Remove(Vec<u8>, bool, Reply<bool>),
    Alloc(usize, Reply<SharedRegion>),
    Release(SharedRegion, Reply<()>),
    /// What was allocated, and nobody came for.
    GiveBack(SharedRegion),
    Counters(Reply<Counters>),
    #[cfg(test)]
    Run(Box<dyn FnOnce(&mut Client) + Send>, Reply<()>),
}

struct Put<B> {
    key: Vec<u8>,
    from: B,
    options: PutOptions,
    reply: Reply<bool>,
}

impl AsyncClient {
    /// Moves a client to a thread of its own. (Connecting blocks, so do that where blocking is no harm.)
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(client: Client) -> io::Result<Self> {
        Self::with_queue(client, QUEUE_JOBS_MAX)
    }

    /// The same, with a queue of another length: operations that wait at most, 1 at least.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn with_queue(client: Client, jobs_max: usize) -> io::Result<Self> {
        let queue = Arc::new(Queue::new(jobs_max.max(1)));
        let worker = Worker { client, queue: Arc::clone(&queue) };
        let thread = thread::Builder::new().name("snowskin-client".into()).spawn(move || worker.run())?;
        Ok(Self { handle: Arc::new(Handle { queue, thread: Mutex::new(Some(thread)) }) })
    }

    /// Stores a value. Gives `false` when the key is taken.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: Vec<u8>, options: &PutOptions) -> Pending<bool> {
        self.put_parts(key, vec![value], options)
    }

    /// Stores one object that is the parts end to end. See [`Client::put_parts`].
    pub fn put_parts(
        &self,
        key: impl Into<Vec<u8>>,
        from: Vec<Vec<u8>>,
        options: &PutOptions,
    ) -> Pending<bool> {
        let (key, options) = (key.into(), *options);
        self.ask(|reply| Job::Put(Put { key, from, options, reply }))
    }

    /// Stores one object straight from registered memory: the parts end to end. See [`Client::put_from_buffers`].
    pub fn put_from(
        &self,
        key: impl Into<Vec<u8>>,
        from: Vec<SharedPart>,
        options: &PutOptions,
    ) -> Pending<bool> {
        let (key, options) = (key.into(), *options);
        self.ask(|reply| Job::PutFrom(Put { key, from, options, reply }))
    }

    /// Reads a value. `None` is a miss.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Pending<Option<Vec<u8>>> {
        let key = key.into();
        self.ask(|reply| Job::Get(key, reply))
    }

    /// Reads a part of an object. See [`Client::get_range`].
    pub fn get_range(
        &self,
        key: impl Into<Vec<u8>>,
        range: impl RangeBounds<u64>,
    ) -> Pending<Option<Vec<u8>>> {
        let key = key.into();
        // An empty range is refused like one that ends beyond the object, which this one does.
        let part = part(range).unwrap_or((u64::MAX, None));
        self.ask(|reply| Job::GetRange(key, part, reply))
    }

    /// Reads an object straight into registered memory, filling the parts one after the other; gives its length. See
    /// [`Client::get_into_buffers`].
    pub fn get_into(&self, key: impl Into<Vec<u8>>, into: Vec<SharedPart>) -> Pending<Option<u64>> {
        let key = key.into();
        self.ask(|reply| Job::GetInto(key, into, reply))
    }

    /// Whether a get would find it.
    pub fn exists(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.ask(|reply| Job::Exists(key, reply))
    }

    /// Forgets an object. Gives `false` when there was none. See [`Client::remove`].
    pub fn remove(&self, key: impl Into<Vec<u8>>, force: bool) -> Pending<bool> {
        let key = key.into();
        self.ask(|reply| Job::Remove(key, force, reply))
    }

    /// Allocates registered memory. When the future is dropped before it gave the region, that is given back.
    pub fn alloc(&self, len: usize) -> Pending<SharedRegion> {
        let queue = Arc::clone(&self.handle.queue);
        let give_back = move |region| queue.send_anyway(Job::GiveBack(region));
        Pending::or_back(&self.handle.queue, give_back, |reply| Job::Alloc(len, reply))
    }

    /// Ends the registration of memory that [`alloc`](Self::alloc) gave.
    pub fn unregister(&self, region: SharedRegion) -> Pending<()> {
        self.ask(|reply| Job::Release(region, reply))
    }

    /// What the client has seen since it connected.
    pub fn counters(&self) -> Pending<Counters> {
        self.ask(Job::Counters)
    }

    /// Takes no more operations, of no handle, does those that wait, and ends the thread. Blocks until then.
    pub fn stop(self) {
        if self.handle.queue.is_forked() {
            // The thread is the parent's.
            return;
        }
        self.handle.queue.close();
        let thread = self.handle.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // One that panicked has told everybody who waited.
        thread.into_iter().for_each(|thread| drop(thread.join()));
    }

    fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Pending<T> {
        Pending::new(&self.handle.queue, job)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.queue.is_forked() {
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(thread.take());
            return;
        }
        self.queue.close();
    }
}

impl fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient").finish_non_exhaustive()
    }
}

/// What the thread owns. Dropped, in a panic too, it lets nobody wait for it.
struct Worker {
    client: Client,
    queue: Arc<Queue<Job>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.abandon();
    }
}

/// Questions of one kind, each with the place of its answer.
type Asked<A, T> = Vec<(A, Reply<T>)>;

/// What waited, by kind.
#[derive(Default)]
struct Gathered {
    puts: Vec<Put<Vec<Vec<u8>>>>,
    puts_from: Vec<Put<Vec<SharedPart>>>,
    gets: Asked<Vec<u8>, Option<Vec<u8>>>,
    ranges: Asked<(Vec<u8>, Part), Option<Vec<u8>>>,
    gets_into: Asked<(Vec<u8>, Vec<SharedPart>), Option<u64>>,
    exists: Asked<Vec<u8>, bool>,
    /// Without and with force.
    removes: [Asked<Vec<u8>, bool>; 2],
}

impl Worker {
    fn run(mut self) {
        while let Some(jobs) = self.queue.take() {
            let gathered = self.gather(jobs);
            self.carry_out(gathered);
        }
    }

    /// Sorts jobs by kind, drops those that nobody waits for, and does those that do not wait for anything at once.
    fn gather(&mut self, jobs: VecDeque<Job>) -> Gathered {
        let mut all = Gathered::default();
        for job in jobs {
            match job {
                Job::Put(put) if put.reply.is_wanted() => all.puts.push(put),
                Job::PutFrom(put) if put.reply.is_wanted() => all.puts_from.push(put),
                Job::Get(key, reply) if reply.is_wanted() => all.gets.push((key, reply)),
                Job::GetRange(key, part, reply) if reply.is_wanted() => all.ranges.push(((key, part), reply)),
                Job::GetInto(key, into, reply) if reply.is_wanted() => {
                    all.gets_into.push(((key, into), reply))
                }
                Job::Exists(key, reply) if reply.is_wanted() => all.exists.push((key, reply)),
                Job::Remove(key, force, reply) if reply.is_wanted() => {
                    all.removes[usize::from(force)].push((key, reply));
                }
                Job::Alloc(len, reply) if reply.is_wanted() => reply.send(self.client.alloc(len)),
                Job::Release(region, reply) if reply.is_wanted() => {
                    let known = self.client.allocated(&region);
                    reply.send(if known {
                        self.client.unregister(region.id())
                    } else {
                        Err(ErrorCode::InvalidParams.into())
                    });
                }
                // Nobody has ever used it, so nothing can be in its way.
                Job::GiveBack(region) => drop(self.client.unregister(region.id())),
                Job::Counters(reply) => reply.send(Ok(self.client.counters())),
                #[cfg(test)]
                Job::Run(run, reply) => {
                    run(&mut self.client);
                    reply.send(Ok(()));
                }
                // Its future was dropped.
                _ => {}
            }
        }
        all
    }

    fn carry_out(&mut self, gathered: Gathered) {
        let Gathered { puts, puts_from, gets, ranges, gets_into, exists, removes } = gathered;
        self.exists(exists);
        for (force, removes) in [false, true].into_iter().zip(removes) {
            self.remove(removes, force);
        }
        let (keys, replies): (Vec<_>, Vec<_>) = gets.into_iter().unzip();
        answer(replies, self.client.batch_get(&slices(&keys)));
        let (asks, replies): (Vec<_>, Vec<_>) = ranges.into_iter().unzip();
        let items: Vec<_> = asks.iter().map(|(key, part)| (key.as_slice(), *part)).collect();
        answer(replies, self.client.batch_get_part(&items));
        self.get_into(gets_into);
        self.put(puts);
        self.put_from(puts_from);
    }

    fn exists(&mut self, asks: Asked<Vec<u8>, bool>) {
        if asks.is_empty() {
            return;
        }
        let (keys, replies): (Vec<_>, Vec<_>) = asks.into_iter().unzip();
        match self.client.batch_exists(&slices(&keys)) {
            Ok(found) => answer(replies, found.into_iter().map(Ok).collect()),
            Err(error) => refuse(replies, error.code()),
        }
    }

    fn remove(&mut self, asks: Asked<Vec<u8>, bool>, force: bool) {
        if asks.is_empty() {
            return;
        }
        let (keys, replies): (Vec<_>, Vec<_>) = asks.into_iter().unzip();
        let removed = |result| match result {
            Ok(()) => Ok(true),
            Err(ErrorCode::KeyNotFound) => Ok(false),
            Err(code) => Err(code),
        };
        match self.client.batch_remove(&slices(&keys), force) {
            Ok(results) => answer(replies, results.into_iter().map(removed).collect()),
            Err(error) => refuse(replies, error.code()),
        }
    }

    /// Those that go to the same memory would spoil each other in one batch, and do not one after the other.
    fn get_into(&mut self, mut gets: Asked<(Vec<u8>, Vec<SharedPart>), Option<u64>>) {
        while !gets.is_empty() {
            let (mut items, mut replies, mut later) = (Vec::new(), Vec::new(), Vec::new());
            let mut occupied = Occupied::default();
            for ((key, into), reply) in gets {
                match self.own(&into) {
                    Ok(own) if occupied.add(&own) => {
                        items.push((key, own));
                        replies.push(reply);
                    }
                    Ok(_) => later.push(((key, into), reply)),
                    Err(code) => reply.send(Err(code.into())),
                }
            }
            let asks: Vec<_> = items.iter().map(|(key, own)| (key.as_slice(), own.as_slice())).collect();
            answer(replies, self.client.batch_get_into_buffers(&asks));
            gets = later;
        }
    }

    fn put(&mut self, puts: Vec<Put<Vec<Vec<u8>>>>) {
        for (options, puts) in by_options(puts) {
            let (mut items, mut replies) = (Vec::new(), Vec::new());
            for put in puts {
                if put.from.len() > PARTS_MAX {
                    put.reply.send(Err(ErrorCode::InvalidParams.into()));
                    continue;
                }
                items.push((put.key, put.from));
                replies.push(put.reply);
            }
            let parts: Vec<Vec<&[u8]>> = items.iter().map(|(_, from)| slices(from)).collect();
            let asks: Vec<_> = items
                .iter()
                .zip(&parts)
                .map(|((key, _), parts)| (key.as_slice(), parts.as_slice()))
                .collect();
            answer_puts(replies, self.client.batch_put_parts(&asks, &options));
        }
    }

    fn put_from(&mut self, puts: Vec<Put<Vec<SharedPart>>>) {
        for (options, puts) in by_options(puts) {
            let (mut items, mut replies) = (Vec::new(), Vec::new());
            for put in puts {
                match self.own(&put.from) {
                    Ok(own) => {
                        items.push((put.key, own));
                        replies.push(put.reply);
                    }
                    Err(code) => put.reply.send(Err(code.into())),
                }
            }
            let asks: Vec<_> = items.iter().map(|(key, own)| (key.as_slice(), own.as_slice())).collect();
            answer_puts(replies, self.client.batch_put_from_buffers(&asks, &options));
        }
    }

    /// Parts as the client knows them, if it may use them now. The client holds what it has registered, whoever lets go of it.
    fn own(&mut self, parts: &[SharedPart]) -> Result<Vec<BufferRange>, ErrorCode> {
        let foreign = parts.iter().any(|part| !self.client.allocated(&part.region));
        if foreign || parts.len() > PARTS_MAX {
            return Err(ErrorCode::InvalidParams);
        }
        let own: Vec<_> =
            parts.iter().map(|part| BufferRange::part(&part.region, part.offset, part.len)).collect();
        match self.client.refuse(own.iter().copied()) {
            Some(code) => Err(code),
            None => Ok(own),
        }
    }
}

/// Memory that some read of a batch goes to.
#[derive(Default)]
struct Occupied {
    /// Where ranges begin and end, by region.
    ranges: HashMap<RegionId, BTreeMap<u64, u64>>,
}

impl Occupied {
    /// Adds ranges unless some of their memory is occupied; whether it was not.
    fn add(&mut self, ranges: &[BufferRange]) -> bool {
        let taken = |range: &BufferRange| {
            let before = |taken: &BTreeMap<u64, u64>| {
                let (_, end) = taken.range(..range.offset.saturating_add(range.len)).next_back()?;
                Some(*end > range.offset)
            };
            range.len > 0 && self.ranges.get(&range.region).and_then(before).unwrap_or(false)
        };
        if ranges.iter().any(taken) {
            return false;
        }
        for range in ranges.iter().filter(|range| range.len > 0) {
            let of_region = self.ranges.entry(range.region).or_default();
            let end = of_region.entry(range.offset).or_default();
            *end = (*end).max(range.offset + range.len);
        }
        true
    }
}

fn by_options<B>(puts: Vec<Put<B>>) -> Vec<(PutOptions, Vec<Put<B>>)> {
    let mut groups: Vec<(PutOptions, Vec<Put<B>>)> = Vec::new();
    for put in puts {
        match groups.iter_mut().find(|(options, _)| *options == put.options) {
            Some((_, group)) => group.push(put),
            None => groups.push((put.options, vec![put])),
        }
    }
    groups
}

fn slices(bytes: &[Vec<u8>]) -> Vec<&[u8]> {
    bytes.iter().map(Vec::as_slice).collect()
}

fn answer<T>(replies: Vec<Reply<T>>, results: Vec<Result<T, ErrorCode>>) {
    for (reply, result) in replies.into_iter().zip(results) {
        reply.send(result.map_err(StoreError::from));
    }
}

fn answer_puts(replies: Vec<Reply<bool>>, results: Vec<Result<(), ErrorCode>>) {
    let stored = |result| match result {
        Ok(()) => Ok(true),
        Err(ErrorCode::ObjectAlreadyExists) => Ok(false),
        Err(code) => Err(code),
    };
    answer(replies, results.into_iter().map(stored).collect());
}

fn refuse<T>(replies: Vec<Reply<T>>, code: ErrorCode) {
    replies.into_iter().for_each(|reply| reply.send(Err(code.into())));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::pin::Pin;
    use std::sync::mpsc::channel;
    use std::task::{Context, Poll, Waker};

    use store_master::{Config, MasterHandle, MasterServer};

    use super::*;
    use crate::{ClientConfig, Node, NodeConfig};

    fn store() -> (MasterHandle, Node, AsyncClient) {
        let config =
            Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
        let master = MasterServer::bind(config).unwrap().spawn().unwrap();
        let address = master.rpc_addr();
        let node = Node::start(NodeConfig::new("a", address.into(), 8 << 20)).unwrap();
        let client = Client::connect(ClientConfig::new(address.into())).unwrap();
        (master, node, AsyncClient::start(client).unwrap())
    }

    fn poll<T>(future: &mut Pending<T>) -> Poll<Result<T, StoreError>> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Sends it; it must not be done by then.
    fn begun<T>(mut future: Pending<T>) -> Pending<T> {
        assert!(poll(&mut future).is_pending());
        future
    }

    fn wait<T>(mut future: Pending<T>) -> Result<T, StoreError> {
        loop {
            match poll(&mut future) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::yield_now(),
            }
        }
    }

    impl AsyncClient {
        fn run(&self, run: impl FnOnce(&mut Client) + Send + 'static) -> Pending<()> {
            self.ask(|reply| Job::Run(Box::new(run), reply))
        }

        /// Holds the thread up until what this gives is dropped.
        fn busy(&self) -> (std::sync::mpsc::Sender<()>, Pending<()>) {
            let (release, released) = channel::<()>();
            let (entered, enters) = channel::<()>();
            let busy = begun(self.run(move |_| {
                drop(entered);
                let _ = released.recv();
            }));
            let _ = enters.recv();
            (release, busy)
        }
    }

    #[test]
    fn when_the_thread_dies_whoever_waits_is_told() {
        let (_master, _node, client) = store();
        let other = client.clone();
        let (release, busy) = client.busy();
        let waits = begun(client.get(b"k"));
        let panics = begun(client.run(|_| panic!("the test wants it so")));
        let behind = begun(other.put(b"k", vec![1; 100], &PutOptions::default()));
        drop(release);
        wait(busy).unwrap();
        assert!(matches!(wait(panics), Err(StoreError::Stopped)));
        assert!(matches!(wait(waits), Err(StoreError::Stopped)));
        assert!(matches!(wait(behind), Err(StoreError::Stopped)));
        assert!(matches!(wait(other.get(b"k")), Err(StoreError::Stopped)));
        client.stop();
    }

    #[test]
    fn a_future_that_is_dropped_before_its_turn_undoes_its_operation() {
        let (_master, _node, client) = store();
        let (release, busy) = client.busy();
        let options = PutOptions::default();
        drop(begun(client.put(b"dropped", vec![1; 100], &options)));
        let kept = begun(client.put(b"kept", vec![1; 100], &options));
        drop(release);
        wait(busy).unwrap();
        assert!(wait(kept).unwrap());
        assert!(wait(client.exists(b"kept")).unwrap());
        assert!(!wait(client.exists(b"dropped")).unwrap());
        client.stop();
    }

    #[test]
    fn memory_that_nobody_came_for_is_given_back() {
        let (_master, _node, client) = store();
        let regions = || {
            let (tell, told) = channel();
            wait(client.run(move |client| tell.send(client.engine_stats().regions).unwrap())).unwrap();
            told.recv().unwrap()
        };
        let before = regions();
        let unclaimed = begun(client.alloc(4096));
        // Operations of this kind are done in their order.
        assert_eq!(regions(), before + 1);
        drop(unclaimed);
        assert_eq!(regions(), before);
        let claimed = wait(client.alloc(4096)).unwrap();
        assert_eq!(regions(), before + 1, "what was taken stays");
        wait(client.unregister(claimed)).unwrap();
        assert_eq!(regions(), before);
        client.stop();
    }

    #[test]
    fn reads_into_the_same_memory_do_not_spoil_each_other() {
        let (_master, _node, client) = store();
        let options = PutOptions::default();
        let region = wait(client.alloc(300_000)).unwrap();
        for key in [1_u8, 2] {
            assert!(wait(client.put([key], vec![key; 300_000], &options)).unwrap());
        }
        let (release, busy) = client.busy();
        let reads: Vec<_> = (0..20)
            .map(|i| {
                let part = SharedPart::part(&region, i % 3 * 1000, 300_000 - i % 3 * 1000);
                let bad = i % 3 != 0;
                (bad, begun(client.get_into([1 + (i % 2) as u8], vec![part])))
            })
            .collect();
        drop(release);
        wait(busy).unwrap();
        for (bad, read) in reads {
            match wait(read) {
                Ok(found) => assert_eq!((found, bad), (Some(300_000), false)),
                Err(error) => assert_eq!((error.code(), bad), (ErrorCode::BufferOverflow, true)),
            }
        }
        let counters = wait(client.counters()).unwrap();
        assert_eq!((counters.misses, counters.checksum_mismatches), (0, 0));
        client.stop();
    }

    #[test]
    fn what_waits_when_the_client_is_stopped_is_done_first() {
        let (_master, _node, client) = store();
        let (release, busy) = client.busy();
        let put = begun(client.put(b"k", vec![1; 100], &PutOptions::default()));
        let other = client.clone();
        let stopping = thread::spawn(move || client.stop());
        drop(release);
        stopping.join().unwrap();
        wait(busy).unwrap();
        assert!(wait(put).unwrap());
        assert!(matches!(wait(other.exists(b"k")), Err(StoreError::Stopped)));
    }

    #[test]
    fn memory_of_another_client_is_refused() {
        let (master, _node, client) = store();
        let mut other = Client::connect(ClientConfig::new(master.rpc_addr().into())).unwrap();
        let (own, foreign) = (wait(client.alloc(4096)).unwrap(), other.alloc(4096).unwrap());
        assert!(wait(client.put_from(b"k", vec![SharedPart::all(&own)], &PutOptions::default())).unwrap());
        let code = |error: StoreError| error.code();
        let put = wait(client.put_from(b"l", vec![SharedPart::all(&foreign)], &PutOptions::default()));
        assert_eq!(put.map_err(code), Err(ErrorCode::InvalidParams));
        let get = wait(client.get_into(b"k", vec![SharedPart::all(&foreign)]));
        assert_eq!(get.map_err(code), Err(ErrorCode::InvalidParams));
        assert_eq!(wait(client.unregister(foreign)).map_err(code), Err(ErrorCode::InvalidParams));
        wait(client.unregister(own.clone())).unwrap();
        let get = wait(client.get_into(b"k", vec![SharedPart::all(&own)]));
        assert_eq!(get.map_err(code), Err(ErrorCode::InvalidParams));
        client.stop();
    }

    #[test]
    fn occupied_memory_is_told_from_free() {
        let (_master, _node, client) = store();
        let region = wait(client.alloc(4096)).unwrap();
        let part = |offset, len| BufferRange::part(&region, offset, len);
        let mut occupied = Occupied::default();
        assert!(occupied.add(&[part(100, 100), part(300, 100), part(350, 0)]));
        for (offset, len, free) in [
            (0, 101, false),
            (199, 1, false),
            (150, 10, false),
            (0, 4096, false),
            (399, 1, false),
            (100, 1, false),
        ] {
            assert_eq!(occupied.add(&[part(offset, len)]), free, "{offset}+{len}");
        }
        assert!(occupied.add(&[part(0, 100), part(200, 100), part(400, 10)]));
        client.stop();
    }
}
