//! [`Ending`]: a result that is set once, and the thread or the waker that waits for it.

use std::sync::PoisonError;
use std::task::Waker;
use std::time::Instant;

use super::sync::{AtomicBool, Condvar, Mutex, OnceLock, Ordering};

/// A result that is set once, and what waits for it.
///
/// Setter and waiter each end with a read-modify-write of one flag, and these have one order. If the waiter's
/// comes first, the setter learns that it has to wake; if the setter's comes first, the waiter sees the
/// result. Without a waiter, nothing is locked and nothing is woken.
#[derive(Debug)]
pub struct Ending<T> {
    value: OnceLock<T>,
    /// A thread or a waker waits, or waited once; or the result is set.
    awaited: AtomicBool,
    waker: Mutex<Option<Waker>>,
    ended: Condvar,
}

impl<T> Ending<T> {
    /// Not set yet.
    pub fn new() -> Self {
        Self {
            value: OnceLock::new(),
            awaited: AtomicBool::new(false),
            waker: Mutex::new(None),
            ended: Condvar::new(),
        }
    }

    /// The result, once it is set.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// Sets the result; to be called once. Returns whether [`wake`](Self::wake) must be called.
    #[must_use]
    pub fn set(&self, value: T) -> bool {
        let first = self.value.set(value).is_ok();
        debug_assert!(first, "the result is set once");
        self.awaited.swap(true, Ordering::AcqRel)
    }

    /// Wakes all that wait for the result. Runs a user's waker, so no lock may be held.
    pub fn wake(&self) {
        // A thread that found no result under this lock is in `Condvar::wait` once the lock is free.
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.ended.notify_all();
        waker.into_iter().for_each(Waker::wake);
    }

    /// Sleeps until the result is set, at most until `until`. Returns the result if it is set.
    pub fn wait_until(&self, until: Option<Instant>) -> Option<&T> {
        self.announce();
        let mut guard = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        while self.get().is_none() {
            guard = match until {
                None => self.ended.wait(guard).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    self.ended.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        drop(guard);
        self.get()
    }

    /// Registers `waker` in place of an earlier one. The caller then checks [`get`](Self::get) once more: a
    /// result that was set before the registration wakes no waker.
    pub fn set_waker(&self, waker: &Waker) {
        let lock = || self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        if lock().as_ref().is_none_or(|old| !old.will_wake(waker)) {
            // Cloned and dropped outside the lock: both run a user's code.
            let new = waker.clone();
            let old = lock().replace(new);
            drop(old);
        }
        self.announce();
    }

    /// Drops the waker, if one is registered.
    pub fn forget_waker(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Outside the lock: a waker's `Drop` is a user's code.
        drop(waker);
    }

    /// From here on, `set` reports that it must wake; or it has been called, and its result is visible.
    fn announce(&self) {
        self.awaited.swap(true, Ordering::AcqRel);
    }
}

impl<T> Default for Ending<T> {
    fn default() -> Self {
        Self::new()
    }
}
