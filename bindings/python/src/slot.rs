//! [`Slot`]: one result that one thread sets and another waits for, asleep or as a future.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use te_host::Spin;

/// A result that is set once.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    ready: AtomicBool,
    state: Mutex<State<T>>,
    filled: Condvar,
}

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// Number of threads that sleep on `filled`.
    asleep: u32,
}

impl<T> Slot<T> {
    pub(crate) fn new() -> Arc<Self> {
        let state = State { value: None, waker: None, asleep: 0 };
        Arc::new(Self { ready: AtomicBool::new(false), state: Mutex::new(state), filled: Condvar::new() })
    }

    /// Sets the result, unless it has been set.
    pub(crate) fn set(&self, value: T) {
        let mut state = self.lock();
        if self.ready.load(Ordering::Relaxed) {
            drop(state);
            return drop(value);
        }
        state.value = Some(value);
        self.ready.store(true, Ordering::Release);
        let (waker, asleep) = (state.waker.take(), state.asleep);
        drop(state);
        if asleep > 0 {
            self.filled.notify_all();
        }
        // A waker runs code of the event loop, so no lock is held here.
        waker.into_iter().for_each(Waker::wake);
    }

    /// Whether the result has been set.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Takes the result. `None`: it has not been set, or was taken.
    pub(crate) fn take(&self) -> Option<T> {
        if self.is_ready() { self.lock().value.take() } else { None }
    }

    /// Waits until the result is set, at most `timeout`: spins as long as `spin` allows, then sleeps. Returns
    /// whether it has been set.
    pub(crate) fn wait(&self, spin: &mut Spin, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        while !self.is_ready() {
            if !spin.again() {
                break;
            }
        }
        if self.is_ready() {
            spin.reset();
            return true;
        }
        let mut state = self.lock();
        state.asleep += 1;
        while !self.is_ready() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.filled.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.asleep -= 1;
        self.is_ready()
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot as a future.
#[derive(Debug)]
pub(crate) struct Filled<T>(pub(crate) Arc<Slot<T>>);

impl<T> Future for Filled<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.0.lock();
        match state.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                match &mut state.waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    None => state.waker = Some(context.waker().clone()),
                }
                Poll::Pending
            }
        }
    }
}
