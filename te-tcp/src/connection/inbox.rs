//! Received bytes of one connection that are not yet parsed, and where the announced payloads go.

use std::io;

use crate::frame::{ENTRIES_MAX, HEAD_BYTES_MAX};
use crate::sys::{AsIncoming, Buffers, Incoming, Job, Pinned, Socket};

/// Size of the buffer for heads, bytes. It is small, so that little of a large payload passes through it.
const HEAD_BUFFER_BYTES: usize = 16 << 10;

const _: () = assert!(HEAD_BUFFER_BYTES > HEAD_BYTES_MAX);

/// Where one announced payload goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Destination {
    /// `None`: the payload is discarded.
    pub(crate) memory: Option<Pinned>,
    pub(crate) len: u64,
    pub(crate) done: u64,
    /// The checksum that came with the payload, and the checksum of the bytes that have arrived so far.
    pub(crate) checksum: Option<(u32, u32)>,
    /// The wire status of this payload: the initiator received it, the target will send it.
    pub(crate) status: u32,
    /// Slot of the operation (initiator) or index of the region (target), by which [`Inbox::redirect`] finds
    /// the payload.
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

    /// Whether the payload matches the checksum that came with it. A discarded payload is not checked.
    pub(crate) fn is_intact(&self) -> bool {
        self.memory.is_none() || self.checksum.is_none_or(|(want, have)| want == have)
    }
}

/// Received bytes that are not yet parsed, and the payloads that have been announced.
#[derive(Debug)]
pub(crate) struct Inbox {
    buffer: Box<[u8]>,
    head: usize,
    tail: usize,
    plan: Vec<Destination>,
    /// Index in `plan` of the first payload that is not complete.
    at: usize,
}

/// Whether a connection is to be read: not at all, by a system call of its own, or starting with the result
/// of a receive that was made for several connections together.
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

    /// The result of a receive that was made for several connections together. It is returned once.
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
    /// The socket had no more bytes than these.
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

    /// Bytes that have arrived and are not yet parsed.
    pub(crate) fn unparsed(&self) -> &[u8] {
        &self.buffer[self.head..self.tail]
    }

    pub(crate) fn take(&mut self, bytes: usize) {
        self.head = (self.head + bytes).min(self.tail);
        if self.head == self.tail {
            (self.head, self.tail) = (0, 0);
        }
    }

    /// The bytes that have arrived, and the list to which the parser adds the payloads that a head announces.
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

    /// Discards every announced payload that belongs to `user` from now on, and sets its status.
    pub(crate) fn redirect(&mut self, user: u32, status: u32) {
        for destination in &mut self.plan[self.at..] {
            if destination.user == user && destination.memory.is_some() {
                destination.memory = None;
                destination.status = status;
            }
        }
    }

    /// The next announced payload when it is complete; `None` when it is not, or when there is none.
    ///
    /// Bytes of it that lie in the buffer are copied to its destination first.
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

    /// Whether a payload of the current frame is still to come.
    pub(crate) fn expects_payload(&self) -> bool {
        self.at < self.plan.len()
    }

    /// Payloads that are announced and not complete.
    pub(crate) fn open_payloads(&self) -> &[Destination] {
        &self.plan[self.at..]
    }

    /// Forgets the current frame. All its payloads have arrived.
    pub(crate) fn clear_plan(&mut self) {
        self.plan.clear();
        self.at = 0;
    }

    /// Receives once: announced payloads into their destinations, what follows into the buffer. The end of
    /// the stream is the error `UnexpectedEof`.
    pub(crate) fn receive(&mut self, socket: &Socket, buffers: &mut Buffers) -> io::Result<Received> {
        let mut job = self.job(socket);
        job.run(buffers);
        let Job { offered, result, .. } = job;
        self.arrived(offered, result)
    }

    /// The next receive, which may be combined with those of other connections. [`Self::arrived`] takes in
    /// its result.
    pub(crate) fn job<'a>(&'a mut self, socket: &'a Socket) -> Job<'a, Destination> {
        debug_assert!(
            self.at == self.plan.len() || self.head == self.tail,
            "buffered bytes are moved to their destinations before the socket is read"
        );
        if self.head > 0 && self.tail > HEAD_BUFFER_BYTES / 2 {
            self.buffer.copy_within(self.head..self.tail, 0);
            (self.head, self.tail) = (0, self.tail - self.head);
        }
        let (into, buffer) = (&self.plan[self.at..], &mut self.buffer[self.tail..]);
        Job { socket, into, buffer, offered: 0, result: Ok(0) }
    }

    /// Takes in the result of a receive that had room for `offered` bytes.
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
