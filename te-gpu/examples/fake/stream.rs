//! Streams: threads that do one thing after the other, late.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::memory::{self, Device};
use crate::model::{ILLEGAL_ADDRESS, MISALIGNED_ADDRESS, state};

/// One entry of a stream.
pub(crate) enum Work {
    Copies(Vec<(u64, u64, usize)>, Device),
    Store(u64, u64),
    WaitUntil(u64, u64),
    Kernel(Kernel),
    Nothing,
}

/// A launch of the copy kernel.
pub(crate) struct Kernel {
    pub(crate) is_16: bool,
    pub(crate) descriptors: u64,
    pub(crate) first: u32,
    pub(crate) mask: u32,
    pub(crate) count: u32,
    pub(crate) word: u64,
    pub(crate) sequence: u64,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Entries that were put in, and that are done.
    begun: u64,
    done: u64,
    ends: bool,
}

pub(crate) struct Stream {
    pub(crate) device: c_int,
    queue: Mutex<Queue>,
    changed: Condvar,
    random: AtomicU64,
}

/// Entries that the driver's queue holds before a call may wait.
const ENTRIES_MAX: usize = 1_000;

impl Stream {
    pub(crate) fn start(device: c_int, seed: u64) -> Arc<Self> {
        let random = AtomicU64::new(seed | 1);
        let stream = Arc::new(Self { device, queue: Mutex::default(), changed: Condvar::new(), random });
        let runs = Arc::clone(&stream);
        std::thread::spawn(move || runs.run());
        stream
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an entry; returns its number.
    pub(crate) fn push(&self, work: Work) -> u64 {
        let mut queue = self.lock();
        if queue.work.len() >= ENTRIES_MAX {
            crate::faults::may_block();
        }
        queue.work.push_back(work);
        queue.begun += 1;
        self.changed.notify_one();
        queue.begun
    }

    /// Whether the first `count` entries are done.
    pub(crate) fn has_done(&self, count: u64) -> bool {
        self.lock().done >= count
    }

    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.lock();
        queue.done == queue.begun
    }

    /// What was put in before still runs.
    pub(crate) fn end(&self) {
        self.lock().ends = true;
        self.changed.notify_one();
    }

    fn random(&self) -> u64 {
        let mut x = self.random.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random.store(x, Ordering::Relaxed);
        x
    }

    fn run(&self) {
        loop {
            let work = {
                let mut queue = self.lock();
                loop {
                    if let Some(work) = queue.work.pop_front() {
                        break work;
                    }
                    if queue.ends {
                        return;
                    }
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            self.delay();
            self.execute(work);
            self.lock().done += 1;
        }
    }

    fn delay(&self) {
        let (delay, stalled) = {
            let state = state();
            (state.delay_us_max, state.is_stalled)
        };
        if delay > 0 && self.random().is_multiple_of(4) {
            std::thread::sleep(Duration::from_micros(self.random() % delay));
        }
        let mut stalled = stalled;
        while stalled {
            std::thread::sleep(Duration::from_micros(200));
            stalled = state().is_stalled;
        }
    }

    fn execute(&self, work: Work) {
        let mut state = state();
        // Nothing runs in a context that has ended.
        if state.sticky != 0 {
            return;
        }
        match work {
            Work::Copies(copies, device) => {
                for (to, from, len) in copies {
                    if !memory::copy(&state, to, from, len, device) {
                        state.sticky = ILLEGAL_ADDRESS;
                        return;
                    }
                }
            }
            Work::Store(at, value) => store(at, value),
            Work::WaitUntil(at, value) => {
                drop(state);
                while load(at) < value && crate::model::state().sticky == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
            Work::Kernel(kernel) => {
                for nth in 0..kernel.count {
                    let at =
                        kernel.descriptors + u64::from(kernel.first.wrapping_add(nth) & kernel.mask) * 24;
                    let (to, from, len) = (load(at), load(at + 8), load(at + 16) as u32 as usize);
                    let place = |at: u64| match memory::find(&state, at) {
                        Some(_) => Some(at),
                        None => at.checked_sub(memory::BY_DEVICE),
                    };
                    let (Some(to), Some(from)) = (place(to), place(from)) else {
                        state.sticky = ILLEGAL_ADDRESS;
                        return;
                    };
                    if kernel.is_16 && !(to ^ from).is_multiple_of(16) {
                        state.sticky = MISALIGNED_ADDRESS;
                        return;
                    }
                    // One end is device memory.
                    let known = memory::find(&state, to).or(memory::find(&state, from)).is_some();
                    let device = if known { Device::Both } else { Device::Any };
                    if !known || !memory::copy(&state, to, from, len, device) {
                        state.sticky = ILLEGAL_ADDRESS;
                        return;
                    }
                }
                if kernel.word != 0 {
                    store(kernel.word, kernel.sequence);
                }
            }
            Work::Nothing => {}
        }
    }
}

fn word<'a>(at: u64) -> &'a AtomicU64 {
    // SAFETY: a word of page-locked memory by its address on the device, which the caller of the driver's
    // function keeps.
    unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>((at - memory::BY_DEVICE) as usize) }
}

fn store(at: u64, value: u64) {
    word(at).store(value, Ordering::Release);
}

fn load(at: u64) -> u64 {
    word(at).load(Ordering::Acquire)
}
