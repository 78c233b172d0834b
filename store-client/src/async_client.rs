//! [`AsyncClient`]: a [`Client`] on its own thread, for asynchronous tasks.
//!
//! ```text
//!   task ── put(…).await ──▶ ┌───────────────┐     takes all waiting jobs   ┌────────────────────┐
//!   task ── get(…).await ──▶ │ bounded queue │ ───────────────────────────▶ │ thread: a Client   │
//!   task ── get(…).await ──▶ └───────────────┘  one batch of each kind      │ one call per batch │
//!     ▲                                                                     └─────────┬──────────┘
//!     └──────────────────────────── wakers ───────────────────────────────────────────┘
//! ```
//!
//! It is fast because it gathers: operations that wait when the thread returns form one batch per kind, with
//! one request to the master and all transfers under way together, whichever tasks they come from. A single
//! operation pays two thread switches instead. A caller that needs the lowest latency for one operation at a
//! time uses a [`Client`].
//!
//! # Dropped futures
//! An operation owns its buffers: `Vec`s, and handles of regions. Dropping a future before its operation
//! began undoes it. Dropping it later does not stop the operation: it ends like any other, its buffers are
//! held until then, and nothing touches them afterwards. A put whose future was dropped may or may not have
//! happened. Memory that was allocated for a dropped future is freed.
//!
//! The futures work with every executor: they only use wakers.

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

use store_core::message::{Prefetched, PutOptions};
use te_engine::SharedRegion;

pub use blocking::BlockingClient;
pub use queue::Pending;
use queue::{Queue, Reply};
use worker::Worker;

use crate::client::{Client, Counters};
use crate::error::StoreError;
use crate::item::{Part, part};
use crate::memory::{BufferRange, Fragment};
use crate::store::RemoveMode;

/// Default limit on waiting operations. While it is reached, tasks with further operations wait.
pub const QUEUE_JOBS_MAX: usize = 4096;

/// A handle of a [`Client`] that runs on its own thread. It is cheap to clone. The thread ends when the last
/// handle is dropped and all operations are done.
#[derive(Clone)]
pub struct AsyncClient {
    handle: Arc<Handle>,
}

struct Handle {
    queue: Arc<Queue<Job>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// A range of a region that [`AsyncClient::alloc`] allocated. It keeps the region alive.
#[derive(Clone)]
pub struct SharedPart {
    /// The region.
    pub region: SharedRegion,
    /// Offset in the region, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl SharedPart {
    /// A whole region.
    #[must_use]
    pub fn all(region: &SharedRegion) -> Self {
        Self::part(region, 0, region.len() as u64)
    }

    /// `len` bytes of a region at `offset`.
    #[must_use]
    pub fn part(region: &SharedRegion, offset: u64, len: u64) -> Self {
        Self { region: region.clone(), offset, len }
    }
}

/// The bytes of an object to put, in memory that the operation owns until it is over.
#[derive(Clone)]
#[non_exhaustive]
pub enum OwnedSource {
    /// Plain memory, joined in order.
    Plain(Vec<Vec<u8>>),
    /// Registered memory, joined in order.
    Shared(Vec<SharedPart>),
}

/// A request to the thread.
enum Job {
    Put(PutJob),
    Get(GetJob),
    /// Whether the object is leased, and its key.
    Exists(bool, Vec<u8>, Reply<bool>),
    Prefetch(Vec<u8>, Reply<Prefetched>),
    Remove(Vec<u8>, RemoveMode, Reply<bool>),
    Alloc(usize, Reply<SharedRegion>),
    Release(SharedRegion, Reply<()>),
    /// Memory that was allocated for a future that was dropped.
    GiveBack(SharedRegion),
    Counters(Reply<Counters>),
    /// Any code, which sends its own reply.
    With(Box<dyn FnOnce(&mut Client) + Send>),
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

/// The memory that a put reads.
enum Origin {
    Plain(Vec<Vec<u8>>),
    Memory(Vec<OwnRange>),
}

/// The memory that a get writes, and where its result goes.
enum To {
    Plain(Reply<Option<Vec<u8>>>),
    Memory(Vec<OwnRange>, Reply<Option<u64>>),
    Fragments(Vec<Fragment>, Reply<Option<u64>>),
}

/// A range of registered memory. It holds the region, unless the range was named by a caller that borrows the
/// client's memory.
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
    /// Moves a client to its own thread. (Connecting a client blocks, so do that where blocking is allowed.)
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub fn start(client: Client) -> io::Result<Self> {
        Self::with_queue(client, QUEUE_JOBS_MAX)
    }

    /// As [`start`](Self::start), with another limit on waiting operations: at least 1.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub fn with_queue(client: Client, jobs_max: usize) -> io::Result<Self> {
        let queue = Arc::new(Queue::new(jobs_max.max(1)));
        let worker = Worker { client, queue: Arc::clone(&queue) };
        let thread = thread::Builder::new().name("snowskin-client".into()).spawn(move || worker.run())?;
        Ok(Self { handle: Arc::new(Handle { queue, thread: Mutex::new(Some(thread)) }) })
    }

    /// The same client with a blocking interface: a [`Store`](crate::Store) that threads share by cloning it.
    #[must_use]
    pub fn blocking(&self) -> BlockingClient {
        BlockingClient::new(self.clone())
    }

    /// Stores an object from plain memory (a `Vec<u8>`, or several that are joined) or from registered memory
    /// ([`SharedPart`], or several), without a copy. The result is `false` when the key exists.
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

    /// Reads an object, or a part of it, directly into registered memory, filling the parts in order. The
    /// result is the number of bytes.
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

    /// Whether a get would find the object.
    pub fn exists(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.ask(|reply| Job::Exists(false, key, reply))
    }

    /// Whether a get would find the object, which is leased if it is there. See
    /// [`Store::batch_exists_leased`](crate::Store::batch_exists_leased).
    pub fn exists_leased(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let key = key.into();
        self.ask(|reply| Job::Exists(true, key, reply))
    }

    /// Where an object is; one that is on a disk alone is promoted. See
    /// [`Store::batch_prefetch`](crate::Store::batch_prefetch).
    pub fn prefetch(&self, key: impl Into<Vec<u8>>) -> Pending<Prefetched> {
        let key = key.into();
        self.ask(|reply| Job::Prefetch(key, reply))
    }

    /// Removes an object. The result is `false` if there was no such object. See
    /// [`Store::remove`](crate::Store::remove).
    pub fn remove(&self, key: impl Into<Vec<u8>>, mode: RemoveMode) -> Pending<bool> {
        let key = key.into();
        self.ask(|reply| Job::Remove(key, mode, reply))
    }

    /// Allocates registered memory. If the future is dropped before it returned the region, the region is
    /// freed.
    pub fn alloc(&self, len: usize) -> Pending<SharedRegion> {
        let queue = Arc::clone(&self.handle.queue);
        let give_back = move |region| queue.send_anyway(Job::GiveBack(region));
        Pending::or_back(&self.handle.queue, give_back, |reply| Job::Alloc(len, reply))
    }

    /// Ends the registration of memory that [`alloc`](Self::alloc) allocated.
    pub fn unregister(&self, region: SharedRegion) -> Pending<()> {
        self.ask(|reply| Job::Release(region, reply))
    }

    /// The client's counters.
    pub fn counters(&self) -> Pending<Counters> {
        self.ask(Job::Counters)
    }

    /// Runs any code with the client, on its thread: for everything that has no method here, as
    /// [`Client::master`] or put sessions. The code runs between batches; operations whose futures were not
    /// awaited before may begin earlier or later. Every other operation waits meanwhile, so the code should
    /// not take long. A panic in it ends the thread.
    pub fn with<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Client) -> Result<T, StoreError> + Send + 'static,
    ) -> Pending<T> {
        self.ask(|reply: Reply<T>| {
            Job::With(Box::new(move |client| {
                // Not if its future was dropped.
                if reply.is_wanted() {
                    reply.send(run(client));
                }
            }))
        })
    }

    /// Refuses further operations from all handles, carries out those that wait, and ends the thread. Blocks
    /// until then.
    pub fn stop(self) {
        if self.handle.queue.is_forked() {
            // The thread belongs to the parent.
            return;
        }
        self.handle.queue.close();
        let thread = self.handle.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A thread that panicked has reported that to every waiting task.
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
