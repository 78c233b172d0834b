//! How the serving thread is, as it says itself: other threads read it and ask nothing.
//!
//! The thread counts: up to an odd number when it begins to work, to an even one when it waits for something to arrive. Who
//! wants to know whether it lives looks twice. A busy thread moves on within milliseconds; one that is stuck does not,
//! however long one looks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use store_core::Stats;

/// A thread that does not move for so long is stuck.
const STUCK: Duration = Duration::from_secs(2);
/// How often to look.
const LOOK: Duration = Duration::from_millis(10);
/// Facts are published no more often.
pub(crate) const PUBLISH_EVERY: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub(crate) struct Pulse {
    beats: AtomicU64,
    ready: AtomicBool,
    started: Instant,
    facts: Mutex<Facts>,
}

/// What `/health` tells beside that the thread lives; as old as a few [`PUBLISH_EVERY`].
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

impl Pulse {
    pub(crate) fn new(epoch: u32) -> Self {
        Self {
            beats: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            started: Instant::now(),
            facts: Mutex::new(Facts { epoch, ..Facts::default() }),
        }
    }

    /// The serving thread begins to work.
    pub(crate) fn works(&self) {
        // Nobody else writes it.
        self.beats.store((self.beats.load(Ordering::Relaxed) + 1) | 1, Ordering::Release);
    }

    /// The serving thread is about to wait for something to arrive.
    pub(crate) fn waits(&self) {
        self.beats.store((self.beats.load(Ordering::Relaxed) | 1) + 1, Ordering::Release);
    }

    /// Whether puts can succeed, as the serving thread knows.
    pub(crate) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Publishes what the thread knows. Whether that was possible without waiting for a reader.
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

    /// Whether the serving thread lives. Takes [`STUCK`] to find out that it does not, and one look or two otherwise.
    pub(crate) async fn is_alive(&self) -> bool {
        let seen = self.beats.load(Ordering::Acquire);
        if seen.is_multiple_of(2) {
            return true;
        }
        // Not by a clock: when the whole process was stopped, this thread must not judge the other by that.
        for _ in 0..STUCK.as_millis() / LOOK.as_millis() {
            tokio::time::sleep(LOOK).await;
            if self.beats.load(Ordering::Acquire) != seen {
                return true;
            }
        }
        false
    }

    /// The `/health` body of one that lives.
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

    /// With time that passes by itself when everybody waits.
    fn asked(pulse: &Pulse, meanwhile: impl AsyncFnOnce()) -> bool {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async { tokio::join!(pulse.is_alive(), meanwhile()).0 })
    }

    #[test]
    fn who_waits_for_work_lives_and_who_hangs_in_it_does_not() {
        let pulse = Pulse::new(1);
        assert!(asked(&pulse, async || {}));
        pulse.works();
        assert!(!asked(&pulse, async || {}));
        pulse.waits();
        assert!(asked(&pulse, async || {}));
    }

    #[test]
    fn busy_is_not_stuck() {
        let pulse = Pulse::new(1);
        pulse.works();
        // It never waits for work, and takes a second for each round.
        let alive = asked(&pulse, async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            pulse.works();
        });
        assert!(alive);
    }
}
