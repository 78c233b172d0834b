//! A lock for one writer that writes often and briefly, and readers that come in between.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;

/// Most times that a writer lets readers go first before it takes its turn.
const YIELDS_MAX: u32 = 64;

/// A reader-writer lock whose writer lets waiting readers go first. The system's lock lets the thread that
/// has just released it take it again before a reader has woken up, and the event thread, which writes
/// thousands of times per second, would keep readers out for long.
#[derive(Debug, Default)]
pub(crate) struct Turns<T> {
    lock: RwLock<T>,
    waiting: AtomicU32,
}

impl<T> Turns<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { lock: RwLock::new(value), waiting: AtomicU32::new(0) }
    }

    /// Waits for a turn to read. A thread that panicked in its turn is no reason to stop: what it changed is
    /// counts and sets that are valid after each step.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        if let Ok(guard) = self.lock.try_read() {
            return guard;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.lock.read().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Whether a reader waits, so that the writer should end its turn.
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Waits for a turn to write.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        for _ in 0..YIELDS_MAX {
            if self.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            thread::yield_now();
        }
        self.lock.write().unwrap_or_else(PoisonError::into_inner)
    }
}
