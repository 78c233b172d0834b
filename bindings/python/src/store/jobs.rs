//! What callers ask of the client's thread, and the queue between them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use store_client::{PutOptions, RemoveMode};
use te_host::Spin;
use te_host::fork::Mark;

use super::worker::Worker;
use crate::buffers::{Readable, Writable};
use crate::errors::{Fault, Kind};
use crate::memory::Memory;
use crate::slot::Slot;

/// Most jobs that wait. More callers than this are refused.
const JOBS_MAX: usize = 65_536;

/// A key.
pub(crate) type Key = Box<[u8]>;

/// The result of a job, which its caller waits for.
pub(crate) type Answer<T> = Arc<Slot<Result<T, Fault>>>;

/// An object, or a part of it, to get.
pub(crate) struct Wanted {
    pub(crate) key: Key,
    /// First byte, and length (`None`: to the end). `None`: the whole object.
    pub(crate) part: Option<(u64, Option<u64>)>,
    /// The caller's memory; `None`: memory of the pool.
    pub(crate) into: Option<Writable>,
}

impl Wanted {
    /// The whole object, into memory of the pool.
    pub(crate) const fn whole(key: Key) -> Self {
        Self { key, part: None, into: None }
    }
}

/// How a get ended.
pub(crate) struct Fetched {
    pub(crate) key: Key,
    /// `None`: a miss.
    pub(crate) result: Result<Option<Value>, Fault>,
    /// The caller's memory, which comes back with the GIL.
    pub(crate) into: Option<Writable>,
}

/// What a get found.
pub(crate) enum Value {
    /// In memory of the pool.
    Memory(Memory),
    /// So many bytes in the caller's memory.
    Bytes(u64),
}

/// An object to put: its parts are joined.
pub(crate) struct Given {
    pub(crate) key: Key,
    pub(crate) parts: Vec<Readable>,
}

/// How a put ended.
pub(crate) struct Stored {
    /// Whether the object was stored; false: the key exists.
    pub(crate) result: Result<bool, Fault>,
    /// The caller's memory, which comes back with the GIL.
    pub(crate) parts: Vec<Readable>,
}

/// Something that the client's thread runs.
pub(super) type Call = Box<dyn FnOnce(&mut Worker) + Send>;

/// A request to the client's thread.
pub(super) enum Job {
    Get(Vec<Wanted>, Reply<Vec<Fetched>>),
    Put(Vec<Given>, PutOptions, Reply<Vec<Stored>>),
    Exists(Vec<Key>, Reply<Vec<bool>>),
    Remove(Vec<Key>, RemoveMode, Reply<Vec<Result<bool, Fault>>>),
    /// Anything else. Runs alone.
    Call(Call),
}

/// The thread's end of an answer. Dropping it without an answer reports that the store is closed.
pub(super) struct Reply<T>(Option<Answer<T>>);

impl<T> Reply<T> {
    pub(super) fn new() -> (Self, Answer<T>) {
        let slot = Slot::new();
        (Self(Some(Arc::clone(&slot))), slot)
    }

    /// Whether a caller still waits for it.
    pub(super) fn is_wanted(&self) -> bool {
        self.0.as_ref().is_some_and(|slot| Arc::strong_count(slot) > 1)
    }

    pub(super) fn send(mut self, result: Result<T, Fault>) {
        if let Some(slot) = self.0.take() {
            slot.set(result);
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.set(Err(Fault::closed("store")));
        }
    }
}

/// An answer that is there already.
pub(super) fn refused<T>(fault: Fault) -> Answer<T> {
    let slot = Slot::new();
    slot.set(Err(fault));
    slot
}

/// The jobs that wait for the client's thread.
pub(super) struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    /// Number of jobs, for a thread that spins.
    waiting: AtomicUsize,
    mark: Mark,
}

struct State {
    jobs: VecDeque<Job>,
    closed: bool,
    /// Whether the client's thread sleeps.
    asleep: bool,
}

impl Queue {
    pub(super) fn new() -> Arc<Self> {
        let state = Mutex::new(State { jobs: VecDeque::new(), closed: false, asleep: false });
        Arc::new(Self { state, arrived: Condvar::new(), waiting: AtomicUsize::new(0), mark: Mark::new() })
    }

    /// Whether this process is a fork of the one that has the thread.
    pub(super) fn is_forked(&self) -> bool {
        self.mark.is_forked()
    }

    /// Whether the store is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.is_forked() || self.lock().closed
    }

    /// Queues a job.
    ///
    /// # Errors
    /// The store is closed, or belongs to the parent process; too many jobs wait.
    pub(super) fn push(&self, job: Job) -> Result<(), Fault> {
        if self.is_forked() {
            return Err(Fault::forked());
        }
        let mut state = self.lock();
        if state.closed {
            return Err(Fault::closed("store"));
        }
        if state.jobs.len() >= JOBS_MAX {
            let text = format!("{JOBS_MAX} operations wait already: wait for some of them");
            return Err(Fault::new(Kind::NoSpace, "too_many_operations", text).retryable());
        }
        state.jobs.push_back(job);
        self.waiting.store(state.jobs.len(), Ordering::Release);
        let asleep = state.asleep;
        drop(state);
        if asleep {
            self.arrived.notify_one();
        }
        Ok(())
    }

    /// Takes all jobs. Waits while there are none: spins as long as `spin` allows, then sleeps. `None`: the
    /// queue is closed and empty.
    pub(super) fn take(&self, spin: &mut Spin) -> Option<VecDeque<Job>> {
        while self.waiting.load(Ordering::Acquire) == 0 && spin.again() {}
        spin.reset();
        let mut state = self.lock();
        while state.jobs.is_empty() {
            if state.closed {
                return None;
            }
            state.asleep = true;
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep = false;
        }
        self.waiting.store(0, Ordering::Release);
        Some(std::mem::take(&mut state.jobs))
    }

    /// Refuses further jobs. Those that wait are still carried out.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_one();
    }

    /// As [`close`](Self::close), and drops the jobs that wait.
    pub(super) fn abandon(&self) {
        self.close();
        let jobs = std::mem::take(&mut self.lock().jobs);
        drop(jobs);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
