//! io_uring (feature `uring`): readiness that is read from memory, and the receives of many connections in
//! one system call.
//!
//! Each socket has one multishot poll. It tells *changes*, so whoever stops before a socket is empty must
//! come back by itself. Receives are submitted against non-blocking sockets: each has ended, with bytes or
//! `WouldBlock`, when the call returns, and no request that names memory of a caller ever outlives it (L2).

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, cqueue, opcode, types};
use te_fabric::Event;

use super::socket::{AsIncoming, Buffers, Job};

/// Requests that one submission takes.
const ENTRIES: u32 = 256;
/// Receives in one call, at most.
pub(crate) const JOBS_MAX: usize = 16;

/// Tells the completion of a poll from that of a receive.
const POLL: u64 = 1 << 63;
/// A completion that nobody waits for.
const IGNORED: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, Default)]
struct Watch {
    fd: RawFd,
    name: u64,
    /// Which poll of this slot is the current one: late completions of others are dropped.
    serial: u32,
    used: bool,
}

impl Watch {
    fn user_data(self, slot: usize) -> u64 {
        POLL | u64::from(self.serial & 0x3fff_ffff) << 32 | slot as u64
    }
}

/// An io_uring instance, what it watches, and room for one batch of receives.
pub(crate) struct Ring {
    ring: ManuallyDrop<IoUring>,
    /// Whose it is: a fork has its descriptor, and not its memory.
    process: u32,
    watches: Vec<Watch>,
    events: Vec<Event>,
    /// How many of them `ready` has told of; the others came up during receives.
    told: usize,
    buffers: Vec<Buffers>,
}

impl Ring {
    pub(crate) fn new(sockets_max: usize) -> io::Result<Self> {
        // One completion for each change of each socket; those that do not fit wait in the kernel.
        let completions = (sockets_max as u32).saturating_mul(2).clamp(1_024, 32_768).next_power_of_two();
        let ring = IoUring::builder().setup_cqsize(completions).build(ENTRIES)?;
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            process: std::process::id(),
            watches: Vec::new(),
            events: Vec::with_capacity(sockets_max.min(4_096)),
            told: 0,
            buffers: (0..JOBS_MAX).map(|_| Buffers::new()).collect(),
        })
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// Watches a socket from the next [`Self::ready`] on, until [`Self::remove`].
    pub(crate) fn add(&mut self, fd: RawFd, name: u64) -> io::Result<()> {
        let slot = slot_of(name);
        if slot >= self.watches.len() {
            self.watches.resize(slot + 1, Watch::default());
        }
        let serial = self.watches[slot].serial.wrapping_add(1);
        self.watches[slot] = Watch { fd, name, serial, used: true };
        self.arm(slot)
    }

    /// Stops watching. To be called before the socket is closed: a poll keeps its file open.
    pub(crate) fn remove(&mut self, name: u64) {
        let slot = slot_of(name);
        let Some(watch) = self.watches.get_mut(slot).filter(|watch| watch.used && watch.name == name) else {
            return;
        };
        watch.used = false;
        let request = opcode::PollRemove::new(watch.user_data(slot)).build().user_data(IGNORED);
        if self.push(&request).is_ok() {
            let _ = self.submit(0);
        }
    }

    /// What has changed; gives how many, to be read with [`Self::event`]. Without news to the kernel this is
    /// no system call.
    pub(crate) fn ready(&mut self) -> io::Result<usize> {
        if !self.ring.submission().is_empty() || self.ring.submission().cq_overflow() {
            self.submit(0)?;
        }
        self.events.drain(..self.told);
        self.reap(&mut |_, _| {});
        self.told = self.events.len();
        Ok(self.told)
    }

    /// Whether changes have come up of which `ready` has not told yet. The descriptor does not show them any
    /// more.
    pub(crate) fn has_news(&self) -> bool {
        self.events.len() > self.told
    }

    pub(crate) fn event(&self, i: usize) -> Event {
        self.events[i]
    }

    /// Runs up to [`JOBS_MAX`] receives in one system call.
    pub(crate) fn receive_all<'a, T: AsIncoming + 'a>(&mut self, jobs: &mut [Option<Job<'a, T>>]) {
        let mut waiting = 0;
        for at in 0..jobs.len().min(JOBS_MAX) {
            let Some(job) = &mut jobs[at] else { continue };
            job.offered = self.buffers[at].gather(job.into.iter().map(AsIncoming::incoming), job.buffer);
            let message = self.buffers[at].message();
            let fd = types::Fd(job.socket.raw_fd());
            // Without the flag the kernel would rather wait than say that there is nothing.
            let request = opcode::RecvMsg::new(fd, message).flags(libc::MSG_DONTWAIT as u32);
            let request = request.build().user_data(at as u64);
            match self.push(&request) {
                Ok(()) => waiting += 1,
                Err(error) => job.result = Err(error),
            }
        }
        while waiting > 0 {
            // The memory of the jobs is borrowed until here returns: it must not before every one of them has
            // ended.
            match self.submit(waiting) {
                Ok(()) => {}
                Err(error) => {
                    // Nor may a panic leave here: whoever unwinds frees memory that the kernel may still
                    // fill.
                    log::error!("io_uring_enter failed with receives in flight: {error}");
                    std::process::abort();
                }
            }
            self.reap(&mut |at, result| {
                waiting -= 1;
                if let Some(Some(job)) = jobs.get_mut(at) {
                    job.result = match usize::try_from(result) {
                        Ok(bytes) => Ok(bytes),
                        Err(_) => Err(io::Error::from_raw_os_error(-result)),
                    };
                }
            });
        }
    }

    fn arm(&mut self, slot: usize) -> io::Result<()> {
        let watch = self.watches[slot];
        let mask = (libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP) as u32;
        let request = opcode::PollAdd::new(types::Fd(watch.fd), mask).multi(true);
        self.push(&request.build().user_data(watch.user_data(slot)))
    }

    fn push(&mut self, request: &io_uring::squeue::Entry) -> io::Result<()> {
        for _ in 0..2 {
            // SAFETY: polls name no memory. A receive names pieces that its job borrows until `receive_all`
            // has seen its completion, and an array of `self.buffers` that is not touched before.
            if unsafe { self.ring.submission().push(request) }.is_ok() {
                return Ok(());
            }
            self.submit(0)?;
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Hands the requests to the kernel and waits for so many completions.
    fn submit(&mut self, wait: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wait) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Completions have to be taken first.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes all completions: polls become events, receives go to `received`.
    fn reap(&mut self, received: &mut dyn FnMut(usize, i32)) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            let data = completion.user_data();
            if data & POLL == 0 {
                if data & IGNORED == 0 {
                    received(data as usize, completion.result());
                }
                continue;
            }
            let slot = (data & 0xffff_ffff) as usize;
            let Some(watch) = self.watches.get(slot).copied() else { continue };
            if !watch.used || watch.user_data(slot) != data {
                continue;
            }
            let bits = completion.result();
            let failed = bits < 0 || bits & i32::from(libc::POLLERR | libc::POLLHUP) != 0;
            self.events.push(Event {
                token: watch.name,
                readable: failed || bits & i32::from(libc::POLLIN | libc::POLLRDHUP) != 0,
                writable: failed || bits & i32::from(libc::POLLOUT) != 0,
                finished: failed || bits & i32::from(libc::POLLRDHUP) != 0,
            });
            if !cqueue::more(completion.flags()) {
                // The kernel has dropped it, say because the thread that armed it is gone.
                self.watches[slot].serial = watch.serial.wrapping_add(1);
                let _ = self.arm(slot);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The rings are not mapped in a child, what is mapped in their place is somebody else's, and the
            // requests behind the descriptor are the parent's. SAFETY: the descriptor is this process's copy,
            // which nothing uses any more: `ring` is never dropped.
            unsafe { libc::close(self.ring.as_raw_fd()) };
            return;
        }
        // The sockets are closed next, and must not be kept open by a poll.
        for slot in 0..self.watches.len() {
            if self.watches[slot].used {
                self.remove(self.watches[slot].name);
            }
        }
        // SAFETY: dropped here and nowhere else, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
    }
}

/// The listener's name is all ones; it takes the first slot.
fn slot_of(name: u64) -> usize {
    (name as u32).wrapping_add(1) as usize
}
