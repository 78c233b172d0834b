//! The driver that works everywhere: threads that each carry out one operation at a time.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::bell::Bell;
use super::driver::{Completion, Driver, Io};
use super::file::DiskFile;
use super::sys::Transfer;

/// What threads read and write.
pub(super) trait Medium: Send + Sync + 'static {
    /// What the driver is called in metrics.
    const NAME: &'static str;
    /// Bytes of the stack of a thread.
    const STACK_BYTES: usize = STACK_BYTES;

    /// Told of every operation before any of those that follow is carried out.
    fn accept(&self, io: &Io);

    /// Carries an operation out on the calling thread. Its memory was given back when this returns.
    fn carry_out(&self, io: Io) -> Completion;

    /// Nothing more is ordered, and no caller waits for what is under way: it ends soon.
    fn close(&self) {}
}

impl Medium for DiskFile {
    const NAME: &'static str = "threads";

    fn accept(&self, _: &Io) {}

    fn carry_out(&self, io: Io) -> Completion {
        let transfer = Transfer::new(io, self.alignment());
        let result = transfer.run(self.file());
        transfer.end(result)
    }
}

const STACK_BYTES: usize = 128 << 10;

/// As many threads as the queue depth, which read and write with `preadv2` and `pwritev2`.
pub(super) struct Threads<M: Medium> {
    pool: Arc<Pool<M>>,
    threads: Vec<JoinHandle<()>>,
    /// Operations whose completions were not returned yet.
    in_flight: usize,
    /// Completions that were taken from the pool together.
    ended: VecDeque<Completion>,
}

struct Pool<M> {
    medium: Arc<M>,
    bell: Bell,
    queue: Mutex<Queue>,
    wake: Condvar,
    ended: Mutex<VecDeque<Completion>>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Io>,
    idle: usize,
    closed: bool,
}

impl<M: Medium> Threads<M> {
    pub(super) fn start(medium: Arc<M>, depth: u32, bell: Bell) -> io::Result<Self> {
        let pool = Arc::new(Pool {
            medium,
            bell,
            queue: Mutex::default(),
            wake: Condvar::new(),
            ended: Mutex::default(),
        });
        let mut driver = Self { pool, threads: Vec::new(), in_flight: 0, ended: VecDeque::new() };
        for at in 0..depth {
            let pool = Arc::clone(&driver.pool);
            let thread = thread::Builder::new().name(format!("disk-io-{at}")).stack_size(M::STACK_BYTES);
            driver.threads.push(thread.spawn(move || pool.serve())?);
        }
        Ok(driver)
    }
}

impl<M: Medium> Driver for Threads<M> {
    fn name(&self) -> &'static str {
        M::NAME
    }

    fn submit(&mut self, io: Io) {
        self.in_flight += 1;
        self.pool.medium.accept(&io);
        let mut queue = locked(&self.pool.queue);
        queue.waiting.push_back(io);
        let wake = queue.idle > 0;
        drop(queue);
        if wake {
            self.pool.wake.notify_one();
        }
    }

    fn poll(&mut self) -> Option<Completion> {
        if self.ended.is_empty() {
            std::mem::swap(&mut self.ended, &mut *locked(&self.pool.ended));
        }
        let completion = self.ended.pop_front()?;
        self.in_flight -= 1;
        Some(completion)
    }
}

impl<M: Medium> Drop for Threads<M> {
    /// Idle threads end at once, and the file is closed with its lock. Where operations are in flight nothing
    /// waits for them: their threads end after them, and keep the memory of the operations and the file.
    fn drop(&mut self) {
        let mut queue = locked(&self.pool.queue);
        queue.closed = true;
        queue.waiting.clear();
        drop(queue);
        self.pool.wake.notify_all();
        self.pool.medium.close();
        if self.in_flight == 0 {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl<M: Medium> Pool<M> {
    fn serve(&self) {
        while let Some(io) = self.next() {
            let completion = self.medium.carry_out(io);
            locked(&self.ended).push_back(completion);
            self.bell.ring();
        }
    }

    fn next(&self) -> Option<Io> {
        let mut queue = locked(&self.queue);
        loop {
            if queue.closed {
                return None;
            }
            if let Some(io) = queue.waiting.pop_front() {
                return Some(io);
            }
            queue.idle += 1;
            queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
