//! The driver for Linux with io_uring (feature `uring`): one ring per disk, and no thread of its own.
//!
//! Operations are named by their place in a table, never by address. An entry of the table owns, or shares,
//! all memory of its operation until the kernel has ended it. No memory is registered with the ring: objects
//! are anywhere in the segments of a node, which are longer than a registration may be.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::thread;

use io_uring::{IoUring, opcode, squeue, types};

use super::bell::Bell;
use super::driver::{Completion, Driver, Io, IoWork};
use super::file::DiskFile;
use super::sys::{Ring, Transfer};

/// The driver. `None` only while it is dropped.
pub(super) struct Uring(Option<Operations>);

/// A ring, and the operations in it.
struct Operations {
    ring: Ring,
    file: Arc<DiskFile>,
    /// Operations that the kernel has. Their pieces do not move.
    slots: Vec<Option<Transfer>>,
    free: Vec<usize>,
    waiting: VecDeque<Io>,
    ended: VecDeque<Completion>,
}

impl Uring {
    pub(super) fn start(file: Arc<DiskFile>, depth: u32, bell: &Bell) -> io::Result<Self> {
        let ring = IoUring::new(depth.next_power_of_two())?;
        ring.submitter().register_eventfd(bell.event().as_raw_fd())?;
        let depth = depth as usize;
        Ok(Self(Some(Operations {
            ring: Ring::new(ring),
            file,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            ended: VecDeque::new(),
        })))
    }
}

impl Operations {
    fn request(transfer: &Transfer, file: &DiskFile) -> squeue::Entry {
        let fd = types::Fd(file.file().as_raw_fd());
        let pieces = transfer.first_pieces();
        let (at, count) = (pieces.as_ptr(), pieces.len() as u32);
        match &transfer.io().work {
            IoWork::Write(_) => opcode::Writev::new(fd, at, count).offset(transfer.io().offset).build(),
            IoWork::Read(_) => opcode::Readv::new(fd, at, count).offset(transfer.io().offset).build(),
            IoWork::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        }
    }

    /// Hands as many operations to the kernel as may be in flight.
    fn begin(&mut self) {
        while !self.waiting.is_empty()
            && let Some(slot) = self.free.pop()
        {
            let Some(io) = self.waiting.pop_front() else { return };
            let transfer = Transfer::new(io, self.file.alignment());
            let request = Self::request(&transfer, &self.file).user_data(slot as u64);
            self.slots[slot] = Some(transfer);
            if let Err(error) = self.ring.push(&request)
                && let Some(transfer) = self.slots[slot].take()
            {
                self.free.push(slot);
                self.ended.push_back(transfer.end(Err(error)));
            }
        }
        if !self.ring.is_empty()
            && let Err(error) = self.ring.submit()
        {
            log::warn!("io_uring does not take operations of a disk: {error}");
        }
    }

    fn is_idle(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    fn reap(&mut self) {
        while let Some((slot, result)) = self.ring.next() {
            let Some(transfer) = self.slots.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let result = match u32::try_from(result) {
                Ok(bytes) => Ok(bytes),
                Err(_) => Err(io::Error::from_raw_os_error(-result)),
            };
            let is_sync = matches!(transfer.io().work, IoWork::Sync);
            let result = match result {
                // Nothing was read or written: the core orders it again.
                Err(error) if !is_sync && is_transient(&error) => Ok(0),
                result => result,
            };
            self.ended.push_back(transfer.end(result));
        }
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

/// Operations that outlive their driver. They are never freed while the kernel has one of them.
struct Kept(Option<Operations>);

impl Kept {
    fn finish(&mut self) {
        while let Some(operations) = &mut self.0 {
            operations.reap();
            if operations.is_idle() {
                self.0 = None;
            } else if let Err(error) = operations.ring.wait() {
                log::error!("io_uring does not return operations of a closed disk: {error}");
                return;
            }
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        std::mem::forget(self.0.take());
    }
}

impl Driver for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn submit(&mut self, io: Io) {
        if let Some(operations) = &mut self.0 {
            operations.waiting.push_back(io);
        }
    }

    fn flush(&mut self) {
        if let Some(operations) = &mut self.0 {
            operations.begin();
        }
    }

    fn poll(&mut self) -> Option<Completion> {
        let operations = self.0.as_mut()?;
        if operations.ended.is_empty() {
            operations.reap();
            operations.begin();
        }
        operations.ended.pop_front()
    }
}

impl Drop for Uring {
    /// Where operations are in flight, a thread keeps them, their memory and the file until the kernel has
    /// ended them.
    fn drop(&mut self) {
        let Some(mut operations) = self.0.take() else { return };
        operations.waiting.clear();
        operations.reap();
        if operations.is_idle() {
            return;
        }
        log::warn!("a disk was closed with operations in the kernel: their memory is kept until they end");
        // Dropped with the closure where no thread can be started; then it is kept for good.
        let mut kept = Kept(Some(operations));
        let ending = move || kept.finish();
        if let Err(error) = thread::Builder::new().name("disk-io-end".into()).spawn(ending) {
            log::error!("no thread can wait for the operations of a closed disk: {error}");
        }
    }
}
