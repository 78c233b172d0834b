//! One connection: received bytes that are not parsed yet, where announced data goes, and what waits to be
//! sent. It knows PDUs by their lengths alone.

use std::collections::VecDeque;
use std::io;

use crate::pdu::{Agreed, DIGEST_BYTES, Data};
use crate::stats::Stats;
use crate::sys::{Buffers, IOV_MAX, Incoming, Outgoing, Pinned, Socket};

/// Size of the buffer of a queue that carries admin commands alone, bytes.
pub(crate) const BUFFER_BYTES: usize = 32 << 10;
/// The same where small data comes in numbers: one system call takes that much of it.
pub(crate) const DATA_BUFFER_BYTES: usize = 128 << 10;
/// Heads and payloads that may wait on one connection.
const ITEMS_MAX: usize = 1_024;
/// Bytes of heads that may wait on one connection.
const RING_BYTES: usize = 64 << 10;
/// The largest number of bytes that one head and its digest take.
const HEAD_BYTES: usize = 260;
/// Bytes offered to the kernel in one call, so that other connections get their turn.
const SEND_BYTES_MAX: usize = 4 << 20;

/// Where the bytes of a queued payload come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The connection itself: heads, and copies that it holds.
    Connection,
    /// A WRITE at the initiator, by its command's index.
    Command(u16),
    /// A region that a host reads, by its index.
    Region(u32),
}

/// Announced data that is arriving.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    /// `None`: it is discarded.
    pub(crate) memory: Option<Pinned>,
    pub(crate) len: u32,
    done: u32,
    digest: bool,
    crc: u32,
    /// The command, or the transfer, that it belongs to.
    pub(crate) user: u16,
    /// Whether it is the last data of its command.
    pub(crate) last: bool,
    /// Whether its end completes the command.
    pub(crate) success: bool,
}

/// Data that has arrived whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    pub(crate) payload: Payload,
    /// Its digest matches, or it has none.
    pub(crate) intact: bool,
}

impl Payload {
    pub(crate) const fn new(memory: Option<Pinned>, data: Data, user: u16) -> Self {
        Self {
            memory,
            len: data.len,
            done: 0,
            digest: data.digest,
            crc: 0,
            user,
            last: false,
            success: false,
        }
    }

    fn advance(&mut self, n: u32) {
        if let (true, Some(memory)) = (self.digest, self.memory) {
            self.crc = memory.part(self.done.into(), n.into()).map_or(0, |fresh| fresh.crc32c(self.crc));
        }
        self.done += n;
    }
}

#[derive(Debug)]
enum Body {
    /// Bytes of the ring from this position on.
    Head(u64),
    Memory(Pinned),
    Detached(Box<[u8]>),
}

#[derive(Debug)]
struct Item {
    body: Body,
    len: usize,
    source: Source,
}

/// A socket, its inbox and its outbox.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) socket: Socket,
    pub(crate) agreed: Agreed,
    buffer: Box<[u8]>,
    head: usize,
    tail: usize,
    payload: Option<Payload>,
    items: VecDeque<Item>,
    /// Bytes of the first item that are already sent.
    first_sent: usize,
    ring: Box<[u8]>,
    /// Positions in the ring only grow; the index is the remainder by its length.
    ring_head: u64,
    ring_tail: u64,
    queued: u64,
    /// Whether the socket took less than it was offered: it has to become writable first.
    pub(crate) blocked: bool,
}

impl Stream {
    pub(crate) fn new(socket: Socket, buffer_bytes: usize) -> Self {
        Self {
            socket,
            agreed: Agreed::default(),
            buffer: vec![0; buffer_bytes].into(),
            head: 0,
            tail: 0,
            payload: None,
            items: VecDeque::with_capacity(ITEMS_MAX),
            first_sent: 0,
            ring: vec![0; RING_BYTES].into(),
            ring_head: 0,
            ring_tail: 0,
            queued: 0,
            blocked: false,
        }
    }

    // Receiving.

    /// Bytes that have arrived and are not parsed.
    pub(crate) fn unparsed(&self) -> &[u8] {
        &self.buffer[self.head..self.tail]
    }

    pub(crate) fn take(&mut self, bytes: usize) {
        self.head = (self.head + bytes).min(self.tail);
        if self.head == self.tail {
            (self.head, self.tail) = (0, 0);
        }
    }

    /// Data that lies in the buffer whole, behind a head of `head` bytes; `None` while some of it has not
    /// arrived. Its digest is checked. The caller takes `head` and the returned number of bytes.
    pub(crate) fn collected(&self, head: usize, data: Data) -> Option<(&[u8], bool, usize)> {
        let digest = if data.digest { DIGEST_BYTES } else { 0 };
        let whole = data.len as usize + digest;
        let bytes = self.unparsed().get(head..head + whole)?;
        let (data_bytes, digest_bytes) = bytes.split_at(data.len as usize);
        let intact = !data.digest || crc32c::crc32c(data_bytes).to_le_bytes() == *digest_bytes;
        Some((data_bytes, intact, whole))
    }

    /// Whether data of this length fits into the buffer beside its head.
    pub(crate) const fn can_collect(len: u32) -> bool {
        len as usize + 1_024 <= BUFFER_BYTES
    }

    pub(crate) const fn is_receiving_data(&self) -> bool {
        self.payload.is_some()
    }

    pub(crate) fn announce(&mut self, payload: Payload) {
        debug_assert!(self.payload.is_none(), "data of one PDU at a time");
        self.payload = Some(payload);
    }

    /// Discards announced data of `user` from now on; returns whether there was some.
    pub(crate) fn redirect(&mut self, user: u16) -> bool {
        match &mut self.payload {
            Some(payload) if payload.user == user => {
                payload.memory = None;
                true
            }
            _ => false,
        }
    }

    /// The announced data when it has arrived whole; moves what lies in the buffer to its place first.
    pub(crate) fn arrived(&mut self) -> Option<Arrived> {
        let payload = self.payload.as_mut()?;
        if payload.done < payload.len && self.head < self.tail {
            let n = (payload.len - payload.done).min((self.tail - self.head) as u32);
            if let Some(memory) = payload.memory {
                let from = &self.buffer[self.head..self.head + n as usize];
                memory.tail(payload.done.into()).fill_from(from);
            }
            payload.advance(n);
            self.take(n as usize);
        }
        let payload = self.payload.filter(|payload| payload.done >= payload.len)?;
        let mut intact = true;
        if payload.digest {
            let digest = self.unparsed().get(..DIGEST_BYTES)?;
            intact = payload.memory.is_none() || payload.crc.to_le_bytes() == *digest;
            self.take(DIGEST_BYTES);
        }
        self.payload = None;
        Some(Arrived { payload, intact })
    }

    /// Receives once. Returns the bytes, and whether the socket had no more. The end of the stream is the
    /// error `UnexpectedEof`.
    pub(crate) fn receive(&mut self, buffers: &mut Buffers, stats: &mut Stats) -> io::Result<(usize, bool)> {
        if self.head > 0 && self.tail > self.buffer.len() / 2 {
            self.buffer.copy_within(self.head..self.tail, 0);
            (self.head, self.tail) = (0, self.tail - self.head);
        }
        let into = self.payload.as_ref().filter(|payload| payload.done < payload.len).map(|payload| {
            match payload.memory {
                Some(memory) => Incoming::Memory(memory.tail(payload.done.into())),
                None => Incoming::Discard((payload.len - payload.done) as usize),
            }
        });
        let (bytes, offered) = self.socket.receive(buffers, into, &mut self.buffer[self.tail..])?;
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut left = bytes;
        if let Some(payload) = &mut self.payload {
            let n = left.min((payload.len - payload.done) as usize);
            payload.advance(n as u32);
            left -= n;
        }
        self.tail += left;
        stats.receives += 1;
        stats.bytes_received += bytes as u64;
        Ok((bytes, bytes < offered))
    }

    // Sending.

    /// Bytes that wait to be sent.
    pub(crate) const fn queued(&self) -> u64 {
        self.queued
    }

    pub(crate) fn is_sent(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether `pdus` more PDUs with data fit.
    pub(crate) fn has_room(&self, pdus: usize) -> bool {
        let used = (self.ring_tail - self.ring_head) as usize;
        self.items.len() + 3 * pdus <= ITEMS_MAX && used + (pdus + 1) * 2 * HEAD_BYTES <= RING_BYTES
    }

    /// Appends bytes that the connection keeps. The caller has checked [`Self::has_room`].
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if bytes.len() > HEAD_BYTES {
            self.push_detached(bytes.into());
            return;
        }
        let cap = self.ring.len() as u64;
        let place = self.ring_tail % cap;
        let skipped = if place + bytes.len() as u64 > cap { cap - place } else { 0 };
        let at = self.ring_tail + skipped;
        let to = (at % cap) as usize;
        self.ring[to..to + bytes.len()].copy_from_slice(bytes);
        self.ring_tail = at + bytes.len() as u64;
        self.queued += bytes.len() as u64;
        match self.items.back_mut() {
            Some(Item { body: Body::Head(before), len, .. })
                if *before + *len as u64 == at && !at.is_multiple_of(cap) =>
            {
                *len += bytes.len();
            }
            _ => self.items.push_back(Item {
                body: Body::Head(at),
                len: bytes.len(),
                source: Source::Connection,
            }),
        }
    }

    /// Appends a copy.
    pub(crate) fn push_detached(&mut self, bytes: Box<[u8]>) {
        self.queued += bytes.len() as u64;
        let len = bytes.len();
        self.items.push_back(Item { body: Body::Detached(bytes), len, source: Source::Connection });
    }

    /// Appends data and its digest.
    pub(crate) fn push_memory(&mut self, memory: Pinned, source: Source) {
        self.queued += memory.len() as u64;
        self.items.push_back(Item { body: Body::Memory(memory), len: memory.len(), source });
        if self.agreed.data_digest {
            self.push(&memory.crc32c(0).to_le_bytes());
        }
    }

    /// Appends data that is copied, and its digest.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.push_detached(bytes.into());
        if self.agreed.data_digest {
            self.push(&crc32c::crc32c(bytes).to_le_bytes());
        }
    }

    /// Offers what waits to the socket, and calls `sent` for each payload that was sent whole. Returns
    /// whether something was sent.
    pub(crate) fn flush(
        &mut self,
        buffers: &mut Buffers,
        stats: &mut Stats,
        mut sent: impl FnMut(Source),
    ) -> io::Result<bool> {
        let mut moved = false;
        while !self.items.is_empty() {
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
                    Body::Detached(bytes) => Outgoing::Bytes(&bytes[from..]),
                })
            });
            let (bytes, offered) = match self.socket.send(buffers, pieces) {
                Ok(result) => result,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(moved);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            moved = true;
            stats.sends += 1;
            stats.bytes_sent += bytes as u64;
            self.advance(bytes, &mut sent);
            if bytes < offered {
                self.blocked = true;
                return Ok(moved);
            }
        }
        self.blocked = false;
        Ok(moved)
    }

    /// Unsent bytes of the payloads from `source`.
    pub(crate) fn unsent(&self, source: Source) -> u64 {
        let mut sum = 0;
        for (i, item) in self.items.iter().enumerate().filter(|(_, item)| item.source == source) {
            sum += (item.len - if i == 0 { self.first_sent } else { 0 }) as u64;
        }
        sum
    }

    /// Replaces the unsent payloads from `source` by copies: the memory is not read again.
    pub(crate) fn detach(&mut self, source: Source) {
        for (i, item) in self.items.iter_mut().enumerate().filter(|(_, item)| item.source == source) {
            let from = if i == 0 { std::mem::take(&mut self.first_sent) } else { 0 };
            if let Body::Memory(memory) = item.body {
                let bytes: Box<[u8]> = memory.tail(from as u64).to_vec().into();
                *item = Item { len: bytes.len(), body: Body::Detached(bytes), source: Source::Connection };
            } else if i == 0 {
                self.first_sent = from;
            }
        }
    }

    /// Forgets announced data, and what waits to be sent if some of it is memory that is given up.
    pub(crate) fn forget(&mut self) {
        self.payload = None;
        if self.items.iter().any(|item| matches!(item.body, Body::Memory(_))) {
            self.items.clear();
            (self.first_sent, self.queued) = (0, 0);
            self.ring_head = self.ring_tail;
        }
    }

    /// The sources of all payloads that wait.
    pub(crate) fn sources(&self) -> impl Iterator<Item = Source> + '_ {
        self.items.iter().map(|item| item.source)
    }

    fn advance(&mut self, mut bytes: usize, sent: &mut impl FnMut(Source)) {
        self.queued -= bytes as u64;
        while let Some(first) = self.items.front() {
            let left = first.len - self.first_sent;
            if bytes < left {
                self.first_sent += bytes;
                return;
            }
            bytes -= left;
            self.first_sent = 0;
            if let Body::Head(at) = first.body {
                self.ring_head = at + first.len as u64;
            }
            sent(first.source);
            self.items.pop_front();
        }
        self.ring_head = self.ring_tail;
    }
}
