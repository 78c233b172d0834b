//! Received bytes of one connection that are not yet understood, and where the payloads that have been
//! announced go.

use std::io;

use crate::frame::{ENTRIES_MAX, HEAD_BYTES_MAX};
use crate::sys::{AsIncoming, Buffers, Incoming, Job, Pinned, Socket};

/// The stage, bytes. Small, so that little of a large payload is copied twice.
const HEAD_BUFFER_BYTES: usize = 16 << 10;

const _: () = assert!(HEAD_BUFFER_BYTES > HEAD_BYTES_MAX);

/// Where one announced payload goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Destination {
    /// `None`: discarded.
    pub(crate) memory: Option<Pinned>,
    pub(crate) len: u64,
    pub(crate) done: u64,
    /// The checksum that came with it, and the one of what has arrived.
    pub(crate) checksum: Option<(u32, u32)>,
    /// A frame's status for it, as it will be or was sent.
    pub(crate) status: u32,
    /// Slot of the operation (initiator) or region index (target); says who may turn it into a discard.
    pub(crate) user: u32,
}

impl AsIncoming for Destination {
    fn incoming(&self) -> Incoming {
        match self.memory {
            Some(memory) => Incoming::Memory(memory.tail(self.done)),
            None => Incoming::Discard((self.len - self.done) as usize),
        }
    }
}

impl Destination {
    fn advance(&mut self, n: u64) {
        if let (Some(memory), Some((_, crc))) = (self.memory, &mut self.checksum) {
            *crc = memory.part(self.done, n).map_or(0, |fresh| fresh.crc32c(*crc));
        }
        self.done += n;
    }

    pub(crate) const fn is_complete(&self) -> bool {
        self.done >= self.len
    }

    /// Whether the payload has the checksum that it came with. A discarded one is not looked at.
    pub(crate) fn is_intact(&self) -> bool {
        self.memory.is_none() || self.checksum.is_none_or(|(want, have)| want == have)
    }
}

/// Received bytes that are not yet understood, and the payloads that have been announced.
#[derive(Debug)]
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    head: usize,
    tail: usize,
    plan: Vec<Destination>,
    /// The first of `plan` that is not complete.
    at: usize,
}

/// What a connection is to be read with: not at all, by itself, or first by what somebody else received for
/// it.
#[derive(Debug)]
pub(crate) enum Reading {
    No,
    Yes,
    #[cfg(feature = "uring")]
    Arrived(io::Result<Received>),
}

impl Reading {
    pub(crate) const fn of(readable: bool) -> Self {
        if readable { Self::Yes } else { Self::No }
    }

    pub(crate) const fn is_wanted(&self) -> bool {
        !matches!(self, Self::No)
    }

    /// What somebody else received, once.
    pub(crate) fn take(&mut self) -> Option<io::Result<Received>> {
        match std::mem::replace(self, Self::Yes) {
            #[cfg(feature = "uring")]
            Self::Arrived(result) => Some(result),
            _ => None,
        }
    }
}

/// What one receive brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) bytes: usize,
    /// The socket held no more than this.
    pub(crate) drained: bool,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            buffer: vec![0; HEAD_BUFFER_BYTES].into(),
            head: 0,
            tail: 0,
            plan: Vec::with_capacity(ENTRIES_MAX),
            at: 0,
        }
    }

    /// What has arrived and is not yet taken.
    pub(crate) fn unparsed(&self) -> &[u8] {
        &self.buffer[self.head..self.tail]
    }

    pub(crate) fn take(&mut self, bytes: usize) {
        self.head = (self.head + bytes).min(self.tail);
        if self.head == self.tail {
            (self.head, self.tail) = (0, 0);
        }
    }

    /// What has arrived, and the list to which payloads are to be announced.
    pub(crate) fn split(&mut self) -> (&[u8], &mut Vec<Destination>) {
        (&self.buffer[self.head..self.tail], &mut self.plan)
    }

    /// Every payload of the current frame.
    pub(crate) fn announced(&self) -> &[Destination] {
        &self.plan
    }

    /// Sets the status of the payload that was completed last.
    pub(crate) fn set_status(&mut self, status: u32) {
        if let Some(last) = self.at.checked_sub(1) {
            self.plan[last].status = status;
        }
    }

    /// Turns every announced payload of `owner` into a discard with this status, from this instant on.
    pub(crate) fn redirect(&mut self, user: u32, status: u32) {
        for destination in &mut self.plan[self.at..] {
            if destination.user == user && destination.memory.is_some() {
                destination.memory = None;
                destination.status = status;
            }
        }
    }

    /// The next announced payload that is complete; `None` when the next is not, or there are no more.
    ///
    /// Copies from the stage as far as it goes.
    pub(crate) fn next_complete(&mut self) -> Option<Destination> {
        let destination = self.plan.get_mut(self.at)?;
        if !destination.is_complete() && self.head < self.tail {
            let n = (destination.len - destination.done).min((self.tail - self.head) as u64);
            if let Some(memory) = destination.memory {
                memory.tail(destination.done).fill_from(&self.buffer[self.head..self.head + n as usize]);
            }
            destination.advance(n);
            let complete = destination.is_complete();
            self.take(n as usize);
            if !complete {
                return None;
            }
        } else if !destination.is_complete() {
            return None;
        }
        self.at += 1;
        Some(self.plan[self.at - 1])
    }

    /// Whether a payload is still to come.
    pub(crate) fn expects_payload(&self) -> bool {
        self.at < self.plan.len()
    }

    /// Payloads that are announced and not complete.
    pub(crate) fn open_payloads(&self) -> &[Destination] {
        &self.plan[self.at..]
    }

    /// Forgets the frame whose payloads are all in.
    pub(crate) fn clear_plan(&mut self) {
        self.plan.clear();
        self.at = 0;
    }

    /// Receives once: announced payloads to their places, the rest into the stage. End of stream is
    /// `UnexpectedEof`.
    pub(crate) fn receive(&mut self, socket: &Socket, buffers: &mut Buffers) -> io::Result<Received> {
        let mut job = self.job(socket);
        job.run(buffers);
        let Job { offered, result, .. } = job;
        self.arrived(offered, result)
    }

    /// The next receive, to be run by whoever can; [`Self::arrived`] takes its end.
    pub(crate) fn job<'a>(&'a mut self, socket: &'a Socket) -> Job<'a, Destination> {
        debug_assert!(
            self.at == self.plan.len() || self.head == self.tail,
            "the buffer goes into the plan before the socket does"
        );
        if self.head > 0 && self.tail > HEAD_BUFFER_BYTES / 2 {
            self.buffer.copy_within(self.head..self.tail, 0);
            (self.head, self.tail) = (0, self.tail - self.head);
        }
        let (into, buffer) = (&self.plan[self.at..], &mut self.buffer[self.tail..]);
        Job { socket, into, buffer, offered: 0, result: Ok(0) }
    }

    /// A receive with room for `offered` bytes has ended.
    pub(crate) fn arrived(&mut self, offered: usize, result: io::Result<usize>) -> io::Result<Received> {
        let bytes = result?;
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut left = bytes as u64;
        for destination in &mut self.plan[self.at..] {
            let n = left.min(destination.len - destination.done);
            destination.advance(n);
            left -= n;
            if left == 0 {
                break;
            }
        }
        self.tail += left as usize;
        Ok(Received { bytes, drained: bytes < offered })
    }
}
