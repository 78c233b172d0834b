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

mod blocking;
mod queue;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
mod worker;

use std::fmt;
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use store_core::message::PutOptions;
use te_engine::SharedRegion;

pub use blocking::BlockingClient;
pub use queue::Pending;
use queue::{Queue, Reply};
use worker::Worker;

use crate::client::{Client, Counters};
use crate::item::{Part, part};
use crate::memory::{BufferRange, Fragment};

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

/// What an object is put from: memory that the operation owns until it is over.
#[derive(Clone)]
#[non_exhaustive]
pub enum OwnedSource {
    /// Plain memory, end to end.
    Plain(Vec<Vec<u8>>),
    /// Registered memory, end to end.
    Shared(Vec<SharedPart>),
}

/// What the thread is asked to do.
enum Job {
    Put(PutJob),
    Get(GetJob),
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

struct PutJob {
    key: Vec<u8>,
    from: Origin,
    options: PutOptions,
    reply: Reply<bool>,
}

struct GetJob {
    key: Vec<u8>,
    part: Option<Part>,
    to: To,
}

/// Where a put comes from.
enum Origin {
    Plain(Vec<Vec<u8>>),
    Memory(Vec<OwnRange>),
}

/// Where a get goes, and who waits for it.
enum To {
    Plain(Reply<Option<Vec<u8>>>),
    Memory(Vec<OwnRange>, Reply<Option<u64>>),
    Fragments(Vec<Fragment>, Reply<Option<u64>>),
}

/// A range of memory that the client has registered; and, unless the client's own caller named it, the region
/// that it is of.
struct OwnRange {
    range: BufferRange,
    region: Option<SharedRegion>,
}

impl From<SharedPart> for OwnRange {
    fn from(part: SharedPart) -> Self {
        let range = BufferRange::part(&part.region, part.offset, part.len);
        Self { range, region: Some(part.region) }
    }
}

impl From<BufferRange> for OwnRange {
    fn from(range: BufferRange) -> Self {
        Self { range, region: None }
    }
}

impl From<Vec<u8>> for OwnedSource {
    fn from(value: Vec<u8>) -> Self {
        Self::Plain(vec![value])
    }
}

impl From<Vec<Vec<u8>>> for OwnedSource {
    fn from(parts: Vec<Vec<u8>>) -> Self {
        Self::Plain(parts)
    }
}

impl From<SharedPart> for OwnedSource {
    fn from(part: SharedPart) -> Self {
        Self::Shared(vec![part])
    }
}

impl From<Vec<SharedPart>> for OwnedSource {
    fn from(parts: Vec<SharedPart>) -> Self {
        Self::Shared(parts)
    }
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

    /// The same client for code that waits: a [`Store`](crate::Store) that threads may share by cloning it.
    #[must_use]
    pub fn blocking(&self) -> BlockingClient {
        BlockingClient::new(self.clone())
    }

    /// Stores an object: plain memory (a `Vec<u8>`, or several, end to end), or registered memory
    /// ([`SharedPart`], or several), from which it goes without a copy. Gives `false` when the key is taken.
    pub fn put(
        &self,
        key: impl Into<Vec<u8>>,
        value: impl Into<OwnedSource>,
        options: &PutOptions,
    ) -> Pending<bool> {
        let from = match value.into() {
            OwnedSource::Plain(parts) => Origin::Plain(parts),
            OwnedSource::Shared(parts) => Origin::Memory(parts.into_iter().map(OwnRange::from).collect()),
        };
        self.put_job(key.into(), from, options)
    }

    /// Reads an object. `None` is a miss.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Pending<Option<Vec<u8>>> {
        self.get_range(key, ..)
    }

    /// Reads a part of an object. See [`Get::range`](crate::Get::range).
    pub fn get_range(
        &self,
        key: impl Into<Vec<u8>>,
        range: impl RangeBounds<u64>,
    ) -> Pending<Option<Vec<u8>>> {
        self.get_plain(key.into(), part(range))
    }

    /// Reads an object, or a part of it, straight into registered memory, filling the parts one after the
    /// other; gives the number of bytes.
    pub fn get_into(
        &self,
        key: impl Into<Vec<u8>>,
        range: impl RangeBounds<u64>,
        into: Vec<SharedPart>,
    ) -> Pending<Option<u64>> {
        let (key, part) = (key.into(), part(range));
        let into = into.into_iter().map(OwnRange::from).collect();
        self.ask(|reply| Job::Get(GetJob { key, part, to: To::Memory(into, reply) }))
    }

    /// Whether a get would find it.
    pub fn exists(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.ask(|reply| Job::Exists(key, reply))
    }

    /// Forgets an object. Gives `false` when there was none. See [`Store::remove`](crate::Store::remove).
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

    fn put_job(&self, key: Vec<u8>, from: Origin, options: &PutOptions) -> Pending<bool> {
        let options = *options;
        self.ask(|reply| Job::Put(PutJob { key, from, options, reply }))
    }

    fn get_plain(&self, key: Vec<u8>, part: Option<Part>) -> Pending<Option<Vec<u8>>> {
        self.ask(|reply| Job::Get(GetJob { key, part, to: To::Plain(reply) }))
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
