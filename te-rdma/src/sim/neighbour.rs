//! Address resolution of RoCE neighbours, which may not answer: connecting a queue pair waits for it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use te_core::Error;

use super::config::errno;

/// How long a call waits for an answer that does not come.
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Default)]
pub(super) struct Neighbour(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    silent: bool,
    waiting: u32,
}

impl Neighbour {
    pub(super) fn answers(&self) -> bool {
        !self.state().silent
    }

    pub(super) fn waiting(&self) -> u32 {
        self.state().waiting
    }

    pub(super) fn set(&self, answers: bool) {
        self.state().silent = !answers;
        self.0.1.notify_all();
    }

    pub(super) fn wait(&self) -> Result<(), Error> {
        let mut state = self.state();
        if !state.silent {
            return Ok(());
        }
        state.waiting += 1;
        let waited = self.0.1.wait_timeout_while(state, TIMEOUT, |state| state.silent);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        if timeout.timed_out() { Err(errno(libc::ETIMEDOUT)) } else { Ok(()) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panics while it holds the lock leaves the state consistent.
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
