//! A source of tests: objects in a map.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use store_core::chunks::{CHUNK_BYTES, ChunkSums};
use store_core::{ErrorCode, SegmentNo};

use super::{StageJob, StageSource};
use crate::sys;

/// Objects in memory that are read as if from a disk, by a thread. For tests.
#[derive(Debug)]
pub struct MapSource {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Jobs that were begun.
    jobs: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Images, with their lengths without the trailer.
    objects: HashMap<(SegmentNo, u64), (u64, Vec<u8>)>,
    waiting: Vec<(Instant, StageJob)>,
    delay: Duration,
    held: bool,
    fails: Option<ErrorCode>,
    damages: bool,
    drops: bool,
    stop: bool,
}

impl Default for MapSource {
    fn default() -> Self {
        Self::new()
    }
}

impl MapSource {
    /// An empty source.
    ///
    /// # Panics
    /// When the system refuses a thread.
    #[must_use]
    #[allow(clippy::expect_used, reason = "a source of tests")]
    pub fn new() -> Self {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let run = move || of_thread.run();
        let thread = thread::Builder::new().name("map-source".into()).spawn(run).expect("a thread");
        Self { shared, thread: Some(thread) }
    }

    /// Puts an object on a disk.
    pub fn insert(&self, disk: SegmentNo, locator: u64, data: &[u8]) {
        let mut sums = ChunkSums::default();
        for chunk in data.chunks(CHUNK_BYTES as usize) {
            sums.push(te_host::crc32c_of(0, chunk), chunk.len() as u64);
        }
        let image = [data, sums.trailer()].concat();
        self.change(|state| state.objects.insert((disk, locator), (data.len() as u64, image)));
    }

    /// Delays every job by this much.
    pub fn delay(&self, delay: Duration) {
        self.change(|state| state.delay = delay);
    }

    /// Keeps all jobs, until it is called with `false`.
    pub fn hold(&self, held: bool) {
        self.change(|state| state.held = held);
    }

    /// Ends every job with this error.
    pub fn fail(&self, error: Option<ErrorCode>) {
        self.change(|state| state.fails = error);
    }

    /// Reads other bytes than those that were inserted.
    pub fn damage(&self, damages: bool) {
        self.change(|state| state.damages = damages);
    }

    /// Drops every job unfinished.
    pub fn drop_jobs(&self, drops: bool) {
        self.change(|state| state.drops = drops);
    }

    /// Number of jobs so far.
    #[must_use]
    pub fn jobs(&self) -> u64 {
        self.shared.jobs.load(Ordering::Relaxed)
    }

    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) {
        change(&mut self.shared.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.changed.notify_all();
    }
}

impl StageSource for MapSource {
    fn stage(&self, job: StageJob) {
        self.shared.jobs.fetch_add(1, Ordering::Relaxed);
        self.change(|state| {
            let due = Instant::now() + state.delay;
            state.waiting.push((due, job));
        });
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.stop {
            let now = Instant::now();
            let ready = state.waiting.iter().position(|(due, _)| *due <= now).filter(|_| !state.held);
            let Some(ready) = ready else {
                let next = state.waiting.iter().map(|(due, _)| *due).min().filter(|_| !state.held);
                let wait = next.map_or(Duration::from_secs(1), |next| next.saturating_duration_since(now));
                state = match self.changed.wait_timeout(state, wait) {
                    Ok((state, _)) => state,
                    Err(poisoned) => poisoned.into_inner().0,
                };
                continue;
            };
            // In the order in which they came.
            let (_, job) = state.waiting.remove(ready);
            state.carry_out(job);
        }
    }
}

impl State {
    fn carry_out(&self, job: StageJob) {
        if self.drops {
            return drop(job);
        }
        let result = match (self.fails, self.objects.get(&(job.disk(), job.locator()))) {
            (Some(error), _) => Err(error),
            (None, None) if !self.objects.keys().any(|(disk, _)| *disk == job.disk()) => {
                Err(ErrorCode::SegmentNotFound)
            }
            (None, Some((len, image))) if *len == job.len() => {
                let other: Vec<u8>;
                let bytes = if self.damages {
                    other = image.iter().map(|byte| byte ^ 1).collect();
                    &other
                } else {
                    image
                };
                sys::write_job(&job, bytes)
            }
            (None, _) => Err(ErrorCode::ObjectNotFound),
        };
        job.finish(result);
    }
}

impl Drop for MapSource {
    fn drop(&mut self) {
        self.change(|state| {
            state.stop = true;
            state.held = false;
        });
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
