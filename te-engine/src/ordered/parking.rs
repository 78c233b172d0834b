//! [`Parking`]: a worker sleeps without missing a wake-up, and callers wake it only when it sleeps.

use super::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// Whether a worker sleeps, and until when. The worker and its callers also share a mailbox, a bell that ends
/// the worker's sleep, and a lock under which one of them at a time takes a turn.
///
/// ```text
///   worker                                        caller
///     lock { announce(until) }                      push into the mailbox
///     mailbox still empty? ── sleep on the bell     lock { turn }, or the lock is held
///     leave                                         must_ring? ── ring the bell
/// ```
///
/// Each side writes, passes a fence, and then reads what the other side writes. So either the worker sees
/// what was pushed, or the caller sees that the worker sleeps.
#[derive(Debug)]
pub struct Parking {
    /// The worker sleeps, or is about to. Every write is an exchange, so that each comes after the one before
    /// it for every thread.
    parked: AtomicBool,
    /// When the parked worker wakes without a bell, nanoseconds on the engine's clock.
    until: AtomicU64,
}

impl Parking {
    /// A worker that is awake.
    pub fn new() -> Self {
        Self { parked: AtomicBool::new(false), until: AtomicU64::new(0) }
    }

    /// The worker is about to sleep until `until` (`u64::MAX`: until the bell). It calls this under the lock,
    /// so that a caller that takes a turn later sees `until`; then it checks for work once more, and sleeps
    /// only when there is none.
    pub fn announce(&self, until: u64) {
        self.until.store(until, Ordering::Relaxed);
        self.parked.swap(true, Ordering::Relaxed);
        // Pairs with the fence in `must_ring`.
        fence(Ordering::SeqCst);
    }

    /// The worker is awake.
    pub fn leave(&self) {
        self.parked.swap(false, Ordering::Relaxed);
    }

    /// Whether this caller must ring the bell, after it has pushed work. At most one caller per sleep gets
    /// `true`.
    #[must_use]
    pub fn must_ring(&self) -> bool {
        // Pairs with the fence in `announce`.
        fence(Ordering::SeqCst);
        self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::Relaxed)
    }

    /// Whether a parked worker would sleep past `due`. For a caller after its turn under the lock.
    #[must_use]
    pub fn sleeps_past(&self, due: u64) -> bool {
        due < self.until.load(Ordering::Relaxed)
    }
}

impl Default for Parking {
    fn default() -> Self {
        Self::new()
    }
}
