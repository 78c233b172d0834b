//! The liveness of the serving thread, which other threads read without a request to it.
//!
//! The thread has a counter: it becomes odd when the thread begins to work, and even when it waits for input.
//! A reader that wants to know whether the thread is alive reads the counter twice. The counter of a busy
//! thread changes within milliseconds; that of a thread that is stuck does not.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use store_core::Stats;

/// A thread whose counter does not change for this long is stuck.
const STUCK: Duration = Duration::from_secs(2);
/// Time between two reads of the counter.
const LOOK: Duration = Duration::from_millis(10);
/// Shortest time between two publications of the facts.
pub(crate) const PUBLISH_EVERY: Duration = Duration::from_millis(100);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Liveness {
    beats: AtomicU64,
    ready: AtomicBool,
    started: Instant,
    facts: Mutex<Facts>,
}

/// What `/health` reports; it may be a few times [`PUBLISH_EVERY`] old.
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    epoch: u32,
    nodes: u64,
    segments: u64,
    objects: u64,
    capacity_bytes: u64,
    allocated_bytes: u64,
    connections: u64,
}

impl Liveness {
    pub(crate) fn new(epoch: u32) -> Self {
        Self {
            beats: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            started: Instant::now(),
            facts: Mutex::new(Facts { epoch, ..Facts::default() }),
        }
    }

    /// Records that the serving thread begins to work.
    pub(crate) fn works(&self) {
        // Only this thread writes the counter.
        self.beats.store((self.beats.load(Ordering::Relaxed) + 1) | 1, Ordering::Release);
    }

    /// Records that the serving thread is about to wait for input.
    pub(crate) fn waits(&self) {
        self.beats.store((self.beats.load(Ordering::Relaxed) | 1) + 1, Ordering::Release);
    }

    /// Records whether puts can succeed.
    pub(crate) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// This process leads a store of this epoch from here on.
    pub(crate) fn set_epoch(&self, epoch: u32) {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).epoch = epoch;
    }

    /// Publishes the facts. Returns whether that was possible without waiting for a reader.
    pub(crate) fn publish(&self, stats: &Stats, connections: usize) -> bool {
        let Ok(mut facts) = self.facts.try_lock() else { return false };
        *facts = Facts {
            epoch: facts.epoch,
            nodes: stats.nodes,
            segments: stats.segments,
            objects: stats.objects,
            capacity_bytes: stats.capacity_bytes,
            allocated_bytes: stats.used_bytes,
            connections: connections as u64,
        };
        true
    }

    /// Whether the serving thread is alive. Takes [`STUCK`] to find that it is not, and one or two reads
    /// otherwise.
    pub(crate) async fn is_alive(&self) -> bool {
        let seen = self.beats.load(Ordering::Acquire);
        if seen.is_multiple_of(2) {
            return true;
        }
        // The reads are counted, not timed: if the whole process was stopped, the elapsed time says nothing
        // about the other thread.
        for _ in 0..STUCK.as_millis() / LOOK.as_millis() {
            tokio::time::sleep(LOOK).await;
            if self.beats.load(Ordering::Acquire) != seen {
                return true;
            }
        }
        false
    }

    /// The body of `/health` while the thread is alive.
    pub(crate) fn health(&self) -> String {
        let facts = *self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        format!(
            "{{\"status\":\"ok\",\"epoch\":{},\"uptime_s\":{:.3},\"nodes\":{},\"segments\":{},\"objects\":{},\
             \"capacity_bytes\":{},\"allocated_bytes\":{},\"connections\":{}}}\n",
            facts.epoch,
            self.started.elapsed().as_secs_f64(),
            facts.nodes,
            facts.segments,
            facts.objects,
            facts.capacity_bytes,
            facts.allocated_bytes,
            facts.connections,
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Runs with time that advances by itself when every task waits.
    fn asked(liveness: &Liveness, meanwhile: impl AsyncFnOnce()) -> bool {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async { tokio::join!(liveness.is_alive(), meanwhile()).0 })
    }

    #[test]
    fn a_thread_that_waits_for_work_is_alive_and_one_that_hangs_in_it_is_not() {
        let liveness = Liveness::new(1);
        assert!(asked(&liveness, async || {}));
        liveness.works();
        assert!(!asked(&liveness, async || {}));
        liveness.waits();
        assert!(asked(&liveness, async || {}));
    }

    #[test]
    fn busy_is_not_stuck() {
        let liveness = Liveness::new(1);
        liveness.works();
        // The thread never waits for work, and takes a second per turn.
        let alive = asked(&liveness, async || {
            tokio::time::sleep(Duration::from_secs(1)).await; // timing: virtual time
            liveness.works();
        });
        assert!(alive);
    }
}
