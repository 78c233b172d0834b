//! Connecting queue pairs off the poll: on RoCE the kernel looks for the neighbour, and waits for one that
//! does not answer.
//!
//! ```text
//!   poll ── push ──▶ tasks, one an offer of queue pairs ──▶ up to four threads, made as they are needed
//!     ▲                                                        │
//!     └── take ◀── ends, and a descriptor that becomes readable ◀┘
//! ```
//!
//! A thread knows nothing of the transport: it runs what the provider gave it and reports. The queue pairs of
//! a task cannot be destroyed meanwhile (the provider sees to it), so an owner that wants to destroy one
//! tries again when its end is reported.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::Error;

use crate::sys::verbs::ConnectJob;

/// Neighbours that may be waited for at the same time.
const THREADS_MAX: usize = 4;
/// Offers of queue pairs that wait for a thread, at most.
const TASKS_MAX: usize = 256;

/// Whose queue pairs a task connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// Ours, to this peer.
    Ours { peer: u32 },
    /// A peer's: its session, and the name of its control connection.
    Peers { session: u64, channel: u32 },
}

/// The queue pairs of one offer, each with the number that its owner knows it by.
pub(crate) struct Task {
    pub(crate) whose: Whose,
    pub(crate) jobs: Vec<(u32, ConnectJob)>,
}

/// What became of a task.
pub(crate) struct End {
    pub(crate) whose: Whose,
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

/// The threads and what passes between them and the poll.
pub(crate) struct Connects {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Tasks whose end has not been taken.
    open: usize,
    /// Whose threads they are: a fork has none.
    process: u32,
}

impl Connects {
    pub(crate) fn new() -> io::Result<Self> {
        let ready = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let shared = Shared { state: Mutex::default(), more: Condvar::new(), ready };
        Ok(Self { shared: Arc::new(shared), threads: Vec::new(), open: 0, process: std::process::id() })
    }

    /// Whether there are tasks whose end has not been taken.
    pub(crate) fn is_busy(&self) -> bool {
        self.open > 0
    }

    /// Becomes readable when there are ends to take.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.ready.as_fd()
    }

    /// Hands a task to the threads. `Err`, and nothing of it was begun: there are too many, or the system
    /// gives no thread.
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
                Err(error) => log::warn!("no thread to connect queue pairs on: {error}"),
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

    /// The tasks that have ended since the last call. Never waits.
    pub(crate) fn take(&mut self) -> Vec<End> {
        let mut state = self.shared.lock();
        if state.ends.is_empty() {
            return Vec::new();
        }
        // Nothing else reads it, so it cannot fail.
        let _ = self.shared.ready.read();
        self.open -= state.ends.len();
        std::mem::take(&mut state.ends)
    }

    /// Begins nothing more and waits for what is under way. Called before queue pairs are destroyed for good.
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
            // One that panicked has nothing under way.
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
        // No thread panics with half a change made.
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
            // It counts; it would have to overflow for this to fail.
            let _ = self.ready.write(1);
        }
    }
}

/// Connects one queue pair after the other. All have the same neighbour: where one fails, the others would.
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
    End { whose: task.whose, ends: ends.collect() }
}
