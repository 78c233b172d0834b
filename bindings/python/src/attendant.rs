//! The thread `snowskin-python`: the only thread of this module that attaches to the interpreter.
//!
//! It releases buffers that were dropped on threads without the GIL, and hands log messages to Python's
//! `logging`. Its queue is the only thing that other threads share with it, so the GIL, for which it may wait
//! long, delays nothing else. It starts with the first message and ends with the interpreter.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use pyo3::prelude::*;
use te_host::fork::PerProcess;

use crate::buffers::Export;
use crate::lifecycle;
use crate::logging::{self, Message};

/// Most log messages that wait. Further ones are counted and dropped.
const MESSAGES_MAX: usize = 10_000;

#[derive(Default)]
pub(crate) struct Attendant {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    exports: Vec<Export>,
    messages: Vec<Message>,
    /// Messages that were dropped because the queue was full.
    lost: u64,
    running: bool,
    /// Whether the thread is between taking messages and having delivered them.
    busy: bool,
    /// Set when the thread is to end.
    closed: bool,
}

static ATTENDANT: PerProcess<Attendant> = PerProcess::new();

/// The attendant of this process.
pub(crate) fn get() -> &'static Attendant {
    ATTENDANT.get()
}

impl Attendant {
    /// Releases a buffer as soon as the thread has the GIL. After the end of the interpreter the buffer is
    /// leaked, like everything else that Python owned.
    pub(crate) fn release(&'static self, export: Export) {
        let mut state = self.lock();
        if state.closed {
            drop(state);
            return std::mem::forget(export);
        }
        state.exports.push(export);
        self.start(state);
    }

    /// Queues a log message.
    pub(crate) fn log(&'static self, message: Message) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        if state.messages.len() >= MESSAGES_MAX {
            state.lost += 1;
            return;
        }
        state.messages.push(message);
        self.start(state);
    }

    /// Waits until everything that is queued has been delivered, at most until `until`, and ends the thread.
    /// The caller does not have the GIL, which the thread needs.
    pub(crate) fn close(&self, until: Instant) {
        let mut state = self.lock();
        state.closed = true;
        self.arrived.notify_all();
        while state.running && (state.busy || !state.messages.is_empty() || !state.exports.is_empty()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        // What the thread did not reach.
        std::mem::forget(std::mem::take(&mut state.exports));
        state.messages.clear();
    }

    /// Wakes the thread, and starts it if it does not run.
    fn start(&'static self, mut state: MutexGuard<'_, State>) {
        if state.running {
            drop(state);
            return self.arrived.notify_all();
        }
        state.running = true;
        drop(state);
        let started = thread::Builder::new().name("snowskin-python".into()).spawn(|| self.run());
        if started.is_err() {
            // The next message tries again. (A log message about it would come back here.)
            self.lock().running = false;
        }
    }

    fn run(&self) {
        loop {
            let mut state = self.lock();
            while state.exports.is_empty() && state.messages.is_empty() {
                if state.closed {
                    state.running = false;
                    drop(state);
                    return self.arrived.notify_all();
                }
                state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let exports = std::mem::take(&mut state.exports);
            let messages = std::mem::take(&mut state.messages);
            let lost = std::mem::take(&mut state.lost);
            state.busy = true;
            drop(state);
            deliver(exports, messages, lost);
            self.lock().busy = false;
            self.arrived.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn deliver(exports: Vec<Export>, messages: Vec<Message>, lost: u64) {
    if lifecycle::is_exiting() {
        return std::mem::forget(exports);
    }
    let mut exports = Some(exports);
    Python::try_attach(|py| {
        exports.take().into_iter().flatten().for_each(|export| export.release(py));
        if !messages.is_empty() || lost > 0 {
            logging::deliver(py, &messages, lost);
        }
    });
    // The interpreter is going away, and with it what the buffers keep alive.
    std::mem::forget(exports);
}
