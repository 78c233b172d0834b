//! Waiting without the GIL, and what needs the GIL on threads that do not have it.
//!
//! ```text
//!   a Python thread             a thread of this module
//!   wait(slot) ── detached ──▶  fills the slot            (client's thread, engine's waker, blocking())
//!     ▲  every 50 ms: signals
//!
//!   any thread, GIL unknown     snowskin-python           snowskin-cleanup
//!   release_later(export) ────▶ attaches, releases
//!   later(job) ──────────────────────────────────────────▶ runs what may block, without the GIL
//! ```
//!
//! * No thread that moves bytes ever attaches to the interpreter: a thread that holds the GIL for long would
//!   stop the transfers of the process.
//! * Python runs handlers of signals only in its main thread and only between calls. So a wait is cut into
//!   slices, and a signal is noticed within one of them. What was waited for continues without its caller and
//!   keeps its buffers until its end.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use te_host::Spin;
use te_host::fork::PerProcess;

use crate::errors::{Fault, Kind};
use crate::lifecycle;
use crate::slot::Slot;

/// Longest time between two looks at the signals that have arrived.
const SLICE: Duration = Duration::from_millis(50);
/// How long a wait spins before it sleeps: most results arrive within microseconds.
const SPIN: Duration = Duration::from_micros(40);
/// How long a thread of [`blocking`] waits for another job before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// Runs something short without the GIL. Whatever may take longer than about a millisecond goes through
/// [`blocking`] or [`wait`], where a signal ends the wait.
pub(crate) fn detached<T: Send>(py: Python<'_>, run: impl FnOnce() -> T + Send) -> T {
    py.detach(run)
}

/// Lets other threads run, in the middle of a long conversion: after each of so many items.
pub(crate) fn breathe(py: Python<'_>, items: usize) {
    const ITEMS: usize = 4096;
    if items % ITEMS == ITEMS - 1 {
        py.detach(thread::yield_now);
    }
}

/// Waits until the slot is filled, or `until` has passed (`None` is returned).
///
/// # Errors
/// What the handler of a signal raised; `KeyboardInterrupt` for Ctrl-C.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    slot: &Arc<Slot<T>>,
    until: Option<Instant>,
) -> PyResult<Option<T>> {
    let mut spin = Spin::new(SPIN);
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let slice = left.map_or(SLICE, |left| left.min(SLICE));
        py.detach(|| slot.wait(&mut spin, slice));
        if let Some(value) = slot.take() {
            return Ok(Some(value));
        }
        py.check_signals()?;
        if left.is_some_and(|left| left <= slice) {
            return Ok(slot.take());
        }
    }
}

/// Runs something that may block on another thread, and waits for it. A signal ends the wait alone: `run`
/// continues with what it owns, and its result is dropped on its thread.
///
/// # Errors
/// What the handler of a signal raised; that there is no thread for it.
pub(crate) fn blocking<T: Send + 'static>(
    py: Python<'_>,
    run: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let slot = spawn(run).map_err(|fault| fault.into_err(py))?;
    match wait(py, &slot, None)? {
        Some(Ok(value)) => Ok(value),
        Some(Err(Panicked)) => Err(Fault::from(Panicked).into_err(py)),
        // Only a wait with a limit ends without a value.
        None => Err(Fault::new(Kind::Other, "internal", "a wait without a limit ended").into_err(py)),
    }
}

/// A job has panicked, which its thread has reported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panicked;

impl From<Panicked> for Fault {
    fn from(Panicked: Panicked) -> Self {
        Self::new(Kind::Other, "internal", "a bug: the call panicked, see standard error")
    }
}

/// As [`blocking`], without the wait: the slot is filled at the end, also when `run` panics.
///
/// # Errors
/// There is no thread for it.
pub(crate) fn spawn<T: Send + 'static>(
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<Arc<Slot<Result<T, Panicked>>>, Fault> {
    let slot = Slot::new();
    let filled = Arc::clone(&slot);
    // What was being changed stays usable: every lock recovers from poisoning.
    let run = move || filled.set(catch_unwind(AssertUnwindSafe(run)).map_err(|_| Panicked));
    execute(Box::new(run))?;
    Ok(slot)
}

type Run = Box<dyn FnOnce() + Send>;

/// Threads that run jobs, as many as there are jobs at a time.
#[derive(Default)]
struct Threads {
    state: Mutex<Jobs>,
    arrived: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Run>,
    /// Threads that wait for a job.
    idle: usize,
}

static THREADS: PerProcess<Threads> = PerProcess::new();

/// Runs a job on a thread that is idle, or on a new one.
fn execute(run: Run) -> Result<(), Fault> {
    let threads = THREADS.get();
    let mut jobs = threads.lock();
    jobs.waiting.push_back(run);
    let is_served = jobs.idle >= jobs.waiting.len();
    drop(jobs);
    if is_served {
        threads.arrived.notify_one();
        return Ok(());
    }
    let started = thread::Builder::new().name("snowskin-call".into()).spawn(|| THREADS.get().work());
    match started {
        Ok(_) => Ok(()),
        // Unless another thread has taken the job meanwhile.
        Err(error) => match threads.lock().waiting.pop_back() {
            Some(_) => Err(no_thread(&error)),
            None => Ok(()),
        },
    }
}

impl Threads {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(run) = self.next() {
            run();
        }
    }

    /// The next job. `None`: there was none for [`IDLE`].
    fn next(&self) -> Option<Run> {
        let until = Instant::now() + IDLE;
        let mut jobs = self.lock();
        loop {
            if let Some(run) = jobs.waiting.pop_front() {
                return Some(run);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            jobs.idle += 1;
            jobs = self.arrived.wait_timeout(jobs, left).unwrap_or_else(PoisonError::into_inner).0;
            jobs.idle -= 1;
        }
    }
}

/// Runs something that may take long and that no caller waits for, without the GIL, on a thread of its own.
/// At exit, and when there is no thread, `run` is leaked: the kernel cleans up.
pub(crate) fn apart(run: impl FnOnce() + Send + 'static) {
    if lifecycle::is_exiting() {
        return std::mem::forget(run);
    }
    // It has been dropped if there is no thread.
    if let Err(fault) = execute(Box::new(run)) {
        log::warn!("{fault}");
    }
}

/// The thread that closes what was dropped without being closed.
#[derive(Default)]
struct Cleanup(Mutex<Option<Sender<Run>>>);

static CLEANUP: PerProcess<Cleanup> = PerProcess::new();

/// Runs something that may block for a short time on the cleanup thread, without the GIL: for `Drop`, which
/// Python calls with the GIL. When the interpreter is exiting, `run` is leaked: the kernel cleans up.
pub(crate) fn later(run: impl FnOnce() + Send + 'static) {
    let run: Run = Box::new(run);
    if lifecycle::is_exiting() {
        return std::mem::forget(run);
    }
    let mut known = CLEANUP.get().0.lock().unwrap_or_else(PoisonError::into_inner);
    let sender = match &*known {
        Some(sender) => sender,
        None => {
            let (sender, jobs) = channel::<Run>();
            let work = move || jobs.into_iter().for_each(|run| run());
            if let Err(error) = thread::Builder::new().name("snowskin-cleanup".into()).spawn(work) {
                log::warn!("{}: what was dropped is not closed", no_thread(&error));
                return std::mem::forget(run);
            }
            known.insert(sender)
        }
    };
    if let Err(back) = sender.send(run) {
        // The thread has panicked.
        std::mem::forget(back);
    }
}

fn no_thread(error: &std::io::Error) -> Fault {
    Fault::new(Kind::Other, "system", format!("the operating system did not create a thread: {error}"))
}
