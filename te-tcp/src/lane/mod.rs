//! One connection: what waits to be sent, and where received bytes go. Knows bytes, not meanings: who reads and who
//! writes is the business of `initiator` and `target`.
//!
//! ```text
//!   frames ──▶ heads (byte ring) ─┐
//!                                 ├─▶ items ──▶ one sendmsg for up to 1,024 of them
//!   registered memory ────────────┘
//!
//!   one readv ──▶ [rest of the announced payloads: registered memory][stage: the heads that follow]
//! ```
//!
//! Payloads are announced by the head before them, so their bytes go from the socket to their place without a stop. Only
//! what shares a read with a head passes through the stage.

use std::collections::VecDeque;
use std::io;

use te_core::Instant;
use te_fabric::Interest;

use crate::frame::{ENTRIES_MAX, HEAD_BYTES_MAX, OPERATION_LEN_AT};
use crate::sys::{AsIncoming, Buffers, IOV_MAX, Incoming, Job, Outgoing, Pinned, Socket};

/// Pieces that wait to be sent on one lane, at most.
const ITEMS_MAX: usize = 2_048;
/// Heads that wait to be sent on one lane, bytes.
const HEADS_BYTES: usize = 64 << 10;
/// The stage, bytes. Small, so that little of a large payload is copied twice.
const STAGE_BYTES: usize = 16 << 10;
/// Offered to the kernel in one call, bytes, at most: other lanes want their turn.
const SEND_BYTES_MAX: usize = 4 << 20;

const _: () = assert!(STAGE_BYTES > HEAD_BYTES_MAX && HEADS_BYTES > 4 * HEAD_BYTES_MAX);

/// What a payload on its way belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Nobody: a frame's head, or bytes of the lane's own.
    Lane,
    /// An initiator's piece of a WRITE: its sequence number.
    Piece(u64),
    /// A target's region that is being read.
    Region(u32),
}

/// How far a payload got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Started,
    Finished,
}

#[derive(Debug)]
enum Body {
    /// In the byte ring, from this position on.
    Head(u64),
    Memory(Pinned),
    Aside(Box<[u8]>),
}

#[derive(Debug)]
struct Item {
    body: Body,
    len: usize,
    owner: Owner,
}

/// What waits to be sent, in order.
#[derive(Debug)]
pub(crate) struct Outbox {
    items: VecDeque<Item>,
    /// Bytes of the first item that are gone.
    first_sent: usize,
    ring: Box<[u8]>,
    /// Positions in the byte ring grow for ever; the place is the remainder.
    ring_head: u64,
    ring_tail: u64,
    queued: u64,
}

impl Outbox {
    fn new() -> Self {
        Self {
            items: VecDeque::with_capacity(ITEMS_MAX),
            first_sent: 0,
            ring: vec![0; HEADS_BYTES].into(),
            ring_head: 0,
            ring_tail: 0,
            queued: 0,
        }
    }

    /// Bytes not yet sent.
    pub(crate) const fn queued(&self) -> u64 {
        self.queued
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether a frame with `payloads` payloads and the longest head fits.
    pub(crate) fn has_room(&self, payloads: usize) -> bool {
        let used = (self.ring_tail - self.ring_head) as usize;
        self.items.len() + 1 + payloads <= ITEMS_MAX && used + 2 * HEAD_BYTES_MAX <= HEADS_BYTES
    }

    /// Appends a head made of `parts`; gives its position. The caller has asked [`Self::has_room`].
    pub(crate) fn push_head(&mut self, parts: &[&[u8]]) -> u64 {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let cap = self.ring.len() as u64;
        let place = self.ring_tail % cap;
        let skipped = if place + len as u64 > cap { cap - place } else { 0 };
        let at = self.ring_tail + skipped;
        let mut to = (at % cap) as usize;
        for part in parts {
            self.ring[to..to + part.len()].copy_from_slice(part);
            to += part.len();
        }
        self.ring_tail = at + len as u64;
        self.queued += len as u64;
        match self.items.back_mut() {
            Some(Item { body: Body::Head(before), len: known, .. })
                if *before + *known as u64 == at && !at.is_multiple_of(cap) =>
            {
                *known += len
            }
            _ => self.items.push_back(Item { body: Body::Head(at), len, owner: Owner::Lane }),
        }
        at
    }

    /// Appends a payload. The caller has asked [`Self::has_room`].
    pub(crate) fn push_payload(&mut self, memory: Pinned, owner: Owner) {
        self.queued += memory.len() as u64;
        self.items.push_back(Item { body: Body::Memory(memory), len: memory.len(), owner });
    }

    /// Offers what waits to the socket, and tells `progress` what got how far. True when the socket took all it was given.
    pub(crate) fn flush(
        &mut self,
        socket: &Socket,
        buffers: &mut Buffers,
        progress: impl FnMut(Owner, Progress),
    ) -> io::Result<(usize, bool)> {
        let (ring, mut skip, mut budget) = (&self.ring, self.first_sent, SEND_BYTES_MAX);
        let pieces = self.items.iter().take(IOV_MAX).map_while(|item| {
            let from = std::mem::take(&mut skip);
            if budget == 0 {
                return None;
            }
            budget = budget.saturating_sub(item.len - from);
            Some(match &item.body {
                Body::Head(at) => {
                    let place = (*at % ring.len() as u64) as usize;
                    Outgoing::Bytes(&ring[place + from..place + item.len])
                }
                Body::Memory(memory) => Outgoing::Memory(memory.tail(from as u64)),
                Body::Aside(bytes) => Outgoing::Bytes(&bytes[from..]),
            })
        });
        let (sent, offered) = socket.send(buffers, pieces)?;
        self.advance(sent, progress);
        Ok((sent, sent == offered))
    }

    /// Whether the head bytes from `at` on are all still here.
    pub(crate) fn is_unsent(&self, at: u64) -> bool {
        let next = self.items.iter().enumerate().find_map(|(i, item)| match item.body {
            Body::Head(from) => Some(from + if i == 0 { self.first_sent as u64 } else { 0 }),
            _ => None,
        });
        next.is_some_and(|next| next <= at)
    }

    /// Takes back an operation whose entry at `at` is unsent: its length becomes 0, its payload goes.
    pub(crate) fn void(&mut self, at: u64, owner: Owner) {
        let place = (at % self.ring.len() as u64) as usize + OPERATION_LEN_AT;
        self.ring[place..place + 8].fill(0);
        for item in self.items.iter_mut().filter(|item| item.owner == owner) {
            self.queued -= item.len as u64;
            *item = Item { body: Body::Aside(Box::new([])), len: 0, owner: Owner::Lane };
        }
    }

    /// Unsent bytes of `owner`'s payloads.
    pub(crate) fn unsent(&self, owner: Owner) -> u64 {
        let mut sum = 0;
        for (i, item) in self.items.iter().enumerate().filter(|(_, item)| item.owner == owner) {
            sum += (item.len - if i == 0 { self.first_sent } else { 0 }) as u64;
        }
        sum
    }

    /// Copies `owner`'s unsent payloads aside: its memory is not read again.
    pub(crate) fn detach(&mut self, owner: Owner) {
        for (i, item) in self.items.iter_mut().enumerate().filter(|(_, item)| item.owner == owner) {
            let from = if i == 0 { std::mem::take(&mut self.first_sent) } else { 0 };
            if let Body::Memory(memory) = item.body {
                let bytes: Box<[u8]> = memory.tail(from as u64).to_vec().into();
                *item = Item { len: bytes.len(), body: Body::Aside(bytes), owner: Owner::Lane };
            } else if i == 0 {
                self.first_sent = from;
            }
        }
    }

    /// Every payload that still waits.
    pub(crate) fn owners(&self) -> impl Iterator<Item = Owner> + '_ {
        self.items.iter().map(|item| item.owner)
    }

    fn advance(&mut self, mut sent: usize, mut progress: impl FnMut(Owner, Progress)) {
        self.queued -= sent as u64;
        while let Some(first) = self.items.front() {
            let left = first.len - self.first_sent;
            if sent < left {
                self.first_sent += sent;
                if sent > 0 {
                    progress(first.owner, Progress::Started);
                }
                return;
            }
            sent -= left;
            self.first_sent = 0;
            if let Body::Head(at) = first.body {
                self.ring_head = at + first.len as u64;
            }
            progress(first.owner, Progress::Finished);
            self.items.pop_front();
        }
        self.ring_head = self.ring_tail;
    }
}

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
    pub(crate) owner: u32,
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
    stage: Box<[u8]>,
    head: usize,
    tail: usize,
    plan: Vec<Destination>,
    /// The first of `plan` that is not complete.
    at: usize,
}

/// What a lane is to be read with: not at all, by itself, or first by what somebody else received for it.
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
    fn new() -> Self {
        Self {
            stage: vec![0; STAGE_BYTES].into(),
            head: 0,
            tail: 0,
            plan: Vec::with_capacity(ENTRIES_MAX),
            at: 0,
        }
    }

    /// What has arrived and is not yet taken.
    pub(crate) fn staged(&self) -> &[u8] {
        &self.stage[self.head..self.tail]
    }

    pub(crate) fn take(&mut self, bytes: usize) {
        self.head = (self.head + bytes).min(self.tail);
        if self.head == self.tail {
            (self.head, self.tail) = (0, 0);
        }
    }

    /// What has arrived, and the list to which payloads are to be announced.
    pub(crate) fn split(&mut self) -> (&[u8], &mut Vec<Destination>) {
        (&self.stage[self.head..self.tail], &mut self.plan)
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
    pub(crate) fn redirect(&mut self, owner: u32, status: u32) {
        for destination in &mut self.plan[self.at..] {
            if destination.owner == owner && destination.memory.is_some() {
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
                memory.tail(destination.done).fill_from(&self.stage[self.head..self.head + n as usize]);
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

    /// Receives once: announced payloads to their places, the rest into the stage. End of stream is `UnexpectedEof`.
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
            "the stage goes into the plan before the socket does"
        );
        if self.head > 0 && self.tail > STAGE_BYTES / 2 {
            self.stage.copy_within(self.head..self.tail, 0);
            (self.head, self.tail) = (0, self.tail - self.head);
        }
        let (into, stage) = (&self.plan[self.at..], &mut self.stage[self.tail..]);
        Job { socket, into, stage, offered: 0, result: Ok(0) }
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

/// One connection, either role.
#[derive(Debug)]
pub(crate) struct Lane<R> {
    pub(crate) socket: Socket,
    pub(crate) outbox: Outbox,
    pub(crate) inbox: Inbox,
    /// The socket took less than it was offered; wait until it says that it is writable.
    pub(crate) blocked: bool,
    /// Do not read: what answers would have no room.
    pub(crate) paused: bool,
    /// The peer has finished sending: the end of the stream is behind what is left, and no change will tell of it.
    pub(crate) finished: bool,
    /// Worth reading without asking first; counts down with each vain attempt.
    pub(crate) heat: u16,
    /// What epoll was told last.
    pub(crate) interest: Interest,
    /// When to give up on what this lane waits for (handshake, last words).
    pub(crate) deadline: Option<Instant>,
    pub(crate) role: R,
}

impl<R> Lane<R> {
    pub(crate) fn new(socket: Socket, interest: Interest, role: R) -> Self {
        Self {
            socket,
            outbox: Outbox::new(),
            inbox: Inbox::new(),
            blocked: false,
            paused: false,
            finished: false,
            heat: 0,
            interest,
            deadline: None,
            role,
        }
    }
}
