//! What this crate orders by hand, each in a separate type that loom checks (`tests/loom_ordered.rs`):
//!
//! * [`Parking`]: a worker that is about to sleep, and callers that hand it work at the same time.
//! * [`Ending`]: a result that is set once, and the thread or the waker that waits for it.
//!
//! Everything else that threads share here is behind a mutex, is published once, or is a counter that is only
//! reported.

#![cfg_attr(not(loom), allow(unreachable_pub, reason = "public for the models in tests/loom_ordered.rs"))]

mod ending;
mod parking;

pub use ending::Ending;
pub use parking::Parking;

/// The standard library's types, or loom's.
mod sync {
    #[cfg(loom)]
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    #[cfg(loom)]
    pub(super) use loom::sync::{Condvar, Mutex};
    #[cfg(not(loom))]
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    #[cfg(not(loom))]
    pub(super) use std::sync::{Condvar, Mutex, OnceLock};

    /// `std::sync::OnceLock` with a flag whose orderings loom sees. Without it, loom would take every `get`
    /// for up to date.
    #[cfg(loom)]
    #[derive(Debug)]
    pub(super) struct OnceLock<T> {
        is_set: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    #[cfg(loom)]
    impl<T> OnceLock<T> {
        pub(super) fn new() -> Self {
            Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        pub(super) fn get(&self) -> Option<&T> {
            self.is_set.load(Ordering::Acquire).then(|| self.value.get()).flatten()
        }

        pub(super) fn set(&self, value: T) -> Result<(), T> {
            self.value.set(value)?;
            self.is_set.store(true, Ordering::Release);
            Ok(())
        }
    }
}
