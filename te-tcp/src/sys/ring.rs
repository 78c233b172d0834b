//! io_uring (feature `uring`): readiness that is read from memory, and the receives of several connections in
//! one system call.
//!
//! Each socket has one multishot poll. It reports *changes*, so code that stops before a socket is empty must
//! come back without another event. Receives are submitted for non-blocking sockets: each has ended, with
//! bytes or `WouldBlock`, when the call returns, and no request that names memory of a caller outlives the
//! call (L2).

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, cqueue, opcode, types};
use te_fabric::Event;

use super::socket::{AsIncoming, Buffers, Job};

/// Requests that one submission can hold.
const ENTRIES: u32 = 256;
/// Receives in one call.
pub(crate) const JOBS_MAX: usize = 16;

/// Marks the completion of a poll, as opposed to one of a receive.
const POLL: u64 = 1 << 63;
/// Marks a completion that is ignored.
const IGNORED: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, Default)]
struct Watch {
    fd: RawFd,
    name: u64,
    /// Number of the slot's current poll. Late completions of earlier polls are ignored.
    serial: u32,
    used: bool,
}

impl Watch {
    fn user_data(self, slot: usize) -> u64 {
        POLL | u64::from(self.serial & 0x3fff_ffff) << 32 | slot as u64
    }
}

/// An io_uring instance, the sockets that it watches, and scratch space for one batch of receives.
pub(crate) struct Ring {
    ring: ManuallyDrop<IoUring>,
    /// The process that it belongs to: a fork has its descriptor, but not its memory.
    process: u32,
    watches: Vec<Watch>,
    events: Vec<Event>,
    /// How many of the events `ready` has returned; the others came up during receives.
    returned: usize,
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
            returned: 0,
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

    /// Stops watching a socket. Must be called before the socket is closed, because a poll keeps its file
    /// open.
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

    /// Collects the changes; returns their number for [`Self::event`]. This is no system call unless requests
    /// wait to be submitted.
    pub(crate) fn ready(&mut self) -> io::Result<usize> {
        if !self.ring.submission().is_empty() || self.ring.submission().cq_overflow() {
            self.submit(0)?;
        }
        self.events.drain(..self.returned);
        self.reap(&mut |_, _| {});
        self.returned = self.events.len();
        Ok(self.returned)
    }

    /// Whether there are changes that `ready` has not returned yet. The descriptor no longer shows them.
    pub(crate) fn has_news(&self) -> bool {
        self.events.len() > self.returned
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
            // Without the flag the kernel would wait for bytes instead of reporting that there are none.
            let request = opcode::RecvMsg::new(fd, message).flags(libc::MSG_DONTWAIT as u32);
            let request = request.build().user_data(at as u64);
            match self.push(&request) {
                Ok(()) => waiting += 1,
                Err(error) => job.result = Err(error),
            }
        }
        while waiting > 0 {
            // The memory of the jobs is borrowed until this function returns, so it must not return before
            // every receive has ended.
            match self.submit(waiting) {
                Ok(()) => {}
                Err(error) => {
                    // A panic must not leave this function either: unwinding would free memory that the
                    // kernel may still fill.
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
            // has seen its completion, and an array of `self.buffers` that is not touched before that.
            if unsafe { self.ring.submission().push(request) }.is_ok() {
                return Ok(());
            }
            self.submit(0)?;
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Submits the requests and waits for `wait` completions.
    fn submit(&mut self, wait: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wait) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Completions have to be taken before more can be submitted.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes all completions: polls become events, receives are passed to `received`.
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
                // The kernel has ended the poll, for example because the thread that armed it has exited.
                self.watches[slot].serial = watch.serial.wrapping_add(1);
                let _ = self.arm(slot);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A child process does not have the rings mapped; other memory may be in their place, and the
            // requests behind the descriptor are the parent's. SAFETY: the descriptor is this process's copy,
            // which nothing uses any more: `ring` is never dropped.
            unsafe { libc::close(self.ring.as_raw_fd()) };
            return;
        }
        // The sockets are closed next, and a poll would keep them open.
        for slot in 0..self.watches.len() {
            if self.watches[slot].used {
                self.remove(self.watches[slot].name);
            }
        }
        // SAFETY: dropped only here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
    }
}

/// The listener's name has all bits set; it takes the first slot.
fn slot_of(name: u64) -> usize {
    (name as u32).wrapping_add(1) as usize
}
