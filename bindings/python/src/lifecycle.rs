//! The end of the process: what is open is closed, in bounded time.
//!
//! At exit the interpreter calls [`close_everything`] (through `atexit`). Each open store and engine is
//! closed on a thread of its own, all within [`EXIT_MAX`] together: a master that does not answer must not
//! keep a process from ending. What is not closed by then is left to the kernel, and to the leases of the
//! peers. After that, nothing attaches to the interpreter any more.
//!
//! In a child after a fork nothing of the parent is closed: the list belongs to the process that made it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use te_host::Spin;
use te_host::fork::{Mark, PerProcess};

use crate::attendant;
use crate::slot::Slot;

/// Longest time that all closing at exit takes together: the interpreter has to end within 2 s.
const EXIT_MAX: Duration = Duration::from_millis(1_800);
/// Of this, kept for the last log messages.
const LOGS_MAX: Duration = Duration::from_millis(200);

type Close = Box<dyn FnOnce(Duration) + Send>;

#[derive(Default)]
struct Open {
    next: u64,
    closes: BTreeMap<u64, Close>,
}

static OPEN: PerProcess<Mutex<Open>> = PerProcess::new();
/// In a child it is what it was in the parent, which is right: a child of an exiting process exits.
static EXITING: AtomicBool = AtomicBool::new(false);

/// Whether the interpreter is exiting: nothing may attach to it any more.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Something that is closed at exit, until this value is dropped.
#[derive(Debug)]
pub(crate) struct Registered {
    number: u64,
    mark: Mark,
}

/// Has `close` called at exit, with the time that it may take, on a thread of its own.
pub(crate) fn at_exit(close: impl FnOnce(Duration) + Send + 'static) -> Registered {
    let mut open = open();
    open.next += 1;
    let number = open.next;
    open.closes.insert(number, Box::new(close));
    Registered { number, mark: Mark::new() }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.mark.is_forked() {
            let close = open().closes.remove(&self.number);
            // What it holds is dropped without the lock.
            drop(close);
        }
    }
}

fn open() -> MutexGuard<'static, Open> {
    OPEN.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called by `atexit`.
#[pyfunction]
pub(crate) fn close_everything(py: Python<'_>) {
    let until = Instant::now() + EXIT_MAX;
    py.detach(|| {
        let closes = std::mem::take(&mut open().closes);
        let time = EXIT_MAX - LOGS_MAX;
        let closed: Vec<_> = closes.into_values().filter_map(|close| closing(close, time)).collect();
        for slot in closed {
            slot.wait(
                &mut Spin::new(Duration::ZERO),
                until.saturating_duration_since(Instant::now() + LOGS_MAX),
            );
        }
        attendant::get().close(until);
    });
    EXITING.store(true, Ordering::Release);
}

fn closing(close: Close, time: Duration) -> Option<std::sync::Arc<Slot<()>>> {
    let slot = Slot::new();
    let filled = std::sync::Arc::clone(&slot);
    let run = move || {
        close(time);
        filled.set(());
    };
    thread::Builder::new().name("snowskin-exit".into()).spawn(run).ok().map(|_| slot)
}
