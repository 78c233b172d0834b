//! Connecting queue pairs outside of `poll`: on RoCE the kernel resolves the neighbour's address, and blocks
//! while there is no answer.
//!
//! ```text
//!   poll ── push ──▶ tasks, one per offer of queue pairs ──▶ up to four threads, made on demand
//!     ▲                                                             │
//!     └── take ◀── ends, and a file descriptor that is readable ◀───┘
//! ```
//!
//! A thread runs the provider's jobs and reports their results; it does not use the transport. The provider
//! refuses to destroy the queue pairs of a task meanwhile, so their destruction is tried again when the end
//! of the task is reported.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::Error;

use crate::sys::verbs::ConnectJob;

/// The most threads, and so the most neighbours that are resolved at the same time.
const THREADS_MAX: usize = 4;
/// The most offers of queue pairs that wait for a thread.
const TASKS_MAX: usize = 256;

/// The part of the transport that a task belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requester {
    /// The initiator, for our queue pairs to this peer.
    Initiator { peer: u32 },
    /// The target, for the queue pairs of a peer: its session, and the name of its control connection.
    Target { session: u64, connection: u32 },
}

/// The queue pairs of one offer, each with the number by which the requester knows it.
pub(crate) struct Task {
    pub(crate) requester: Requester,
    pub(crate) jobs: Vec<(u32, ConnectJob)>,
}

/// The results of a task.
pub(crate) struct End {
    pub(crate) requester: Requester,
    pub(crate) ends: Vec<(u32, Result<(), Error>)>,
}

struct Shared {
    state: Mutex<State>,
    more: Condvar,
    /// Readable while there are ends to take.
    ready: EventFd,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    ends: Vec<End>,
    idle: usize,
    stopped: bool,
}

/// The threads, and the state that they share with `poll`.
pub(crate) struct Connects {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Tasks of which the end was not taken.
    open: usize,
    /// The process that has the threads. A fork has none.
    process: u32,
}

impl Connects {
    pub(crate) fn new() -> io::Result<Self> {
        let ready = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let shared = Shared { state: Mutex::default(), more: Condvar::new(), ready };
        Ok(Self { shared: Arc::new(shared), threads: Vec::new(), open: 0, process: std::process::id() })
    }

    /// Whether there are tasks of which the end was not taken.
    pub(crate) fn is_busy(&self) -> bool {
        self.open > 0
    }

    /// Readable while there are ends to take.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.ready.as_fd()
    }

    /// Passes a task to the threads.
    ///
    /// # Errors
    /// Returns the task unchanged: there are too many, or the system refuses a thread.
    pub(crate) fn push(&mut self, task: Task) -> Result<(), Task> {
        let mut state = self.shared.lock();
        if state.tasks.len() >= TASKS_MAX {
            return Err(task);
        }
        if state.idle <= state.tasks.len() && self.threads.len() < THREADS_MAX {
            let shared = Arc::clone(&self.shared);
            let name = String::from("rdma-connect");
            match std::thread::Builder::new().name(name).spawn(move || shared.work()) {
                Ok(thread) => self.threads.push(thread),
                Err(error) => log::warn!("no thread can be started to connect queue pairs: {error}"),
            }
        }
        if self.threads.is_empty() {
            return Err(task);
        }
        state.tasks.push_back(task);
        self.open += 1;
        self.shared.more.notify_one();
        Ok(())
    }

    /// The tasks that have ended since the last call. Does not block.
    pub(crate) fn take(&mut self) -> Vec<End> {
        let mut state = self.shared.lock();
        if state.ends.is_empty() {
            return Vec::new();
        }
        // It is readable, and nothing else reads it, so this cannot fail.
        let _ = self.shared.ready.read();
        self.open -= state.ends.len();
        std::mem::take(&mut state.ends)
    }

    /// Drops the tasks that have not begun, and waits for the others. Called before all queue pairs are
    /// destroyed.
    pub(crate) fn stop(&mut self) {
        if self.process != std::process::id() {
            self.threads.drain(..).for_each(std::mem::forget);
            return;
        }
        let waiting = {
            let mut state = self.shared.lock();
            state.stopped = true;
            std::mem::take(&mut state.tasks)
        };
        drop(waiting);
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked uses no queue pair any more.
            let _ = thread.join();
        }
    }
}

impl Drop for Connects {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panics while it holds the lock leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        while !state.stopped {
            let Some(task) = state.tasks.pop_front() else {
                state.idle += 1;
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            let end = run(task);
            state = self.lock();
            state.ends.push(end);
            // Fails only when its 64-bit counter would overflow.
            let _ = self.ready.write(1);
        }
    }
}

/// Connects the queue pairs one by one. All have the same neighbour: when one fails, the others would as
/// well.
fn run(task: Task) -> End {
    let mut failed = None;
    let ends = task.jobs.into_iter().map(|(number, job)| {
        let end = match failed {
            Some(error) => Err(error),
            None => job(),
        };
        failed = failed.or(end.err());
        (number, end)
    });
    End { requester: task.requester, ends: ends.collect() }
}
