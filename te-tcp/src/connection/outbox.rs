//! What waits to be sent on one connection, in order: heads in a byte ring, payloads in the memory where they
//! are.

use std::collections::VecDeque;
use std::io;

use crate::frame::{HEAD_BYTES_MAX, OPERATION_LEN_AT};
use crate::staging::SlotId;
use crate::sys::{Buffers, IOV_MAX, Outgoing, Pinned, Socket};

/// Heads and payloads that may wait on one connection.
const ITEMS_MAX: usize = 2_048;
/// Bytes of heads that may wait on one connection.
const HEADS_BYTES: usize = 64 << 10;
/// Bytes offered to the kernel in one call, so that other connections get their turn.
const SEND_BYTES_MAX: usize = 4 << 20;

const _: () = assert!(HEADS_BYTES > 4 * HEAD_BYTES_MAX);

/// Where the bytes of a queued item come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The connection itself: the head of a frame, or a copy that the connection holds.
    Connection,
    /// A piece of a WRITE at the initiator, by its sequence number.
    Piece(u64),
    /// A region that a peer reads, by its index.
    Region(u32),
    /// A staging slot with bytes of a region that a peer reads.
    Slot(SlotId),
}

/// How much of a payload has been sent: a part, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Started,
    Finished,
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

/// What waits to be sent, in order.
#[derive(Debug)]
pub(crate) struct Outbox {
    items: VecDeque<Item>,
    /// Bytes of the first item that are already sent.
    first_sent: usize,
    ring: Box<[u8]>,
    /// Positions in the ring only grow; the index is the remainder by its length.
    ring_head: u64,
    ring_tail: u64,
    queued: u64,
}

impl Outbox {
    pub(super) fn new() -> Self {
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

    /// Whether a frame with `payloads` payloads and the longest possible head fits.
    pub(crate) fn has_room(&self, payloads: usize) -> bool {
        let used = (self.ring_tail - self.ring_head) as usize;
        self.items.len() + 1 + payloads <= ITEMS_MAX && used + 2 * HEAD_BYTES_MAX <= HEADS_BYTES
    }

    /// Appends a head made of `parts`; returns its position. The caller has checked [`Self::has_room`].
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
            _ => self.items.push_back(Item { body: Body::Head(at), len, source: Source::Connection }),
        }
        at
    }

    /// Appends a payload. The caller has checked [`Self::has_room`].
    pub(crate) fn push_payload(&mut self, memory: Pinned, source: Source) {
        self.queued += memory.len() as u64;
        self.items.push_back(Item { body: Body::Memory(memory), len: memory.len(), source });
    }

    /// Offers what waits to the socket, and calls `progress` for each item of which something was sent.
    /// Returns the bytes sent, and whether the socket took all that it was offered.
    pub(crate) fn flush(
        &mut self,
        socket: &Socket,
        buffers: &mut Buffers,
        progress: impl FnMut(Source, Progress),
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
                Body::Detached(bytes) => Outgoing::Bytes(&bytes[from..]),
            })
        });
        let (sent, offered) = socket.send(buffers, pieces)?;
        self.advance(sent, progress);
        Ok((sent, sent == offered))
    }

    /// Whether no byte from position `at` of the ring on has been sent.
    pub(crate) fn is_unsent(&self, at: u64) -> bool {
        let next = self.items.iter().enumerate().find_map(|(i, item)| match item.body {
            Body::Head(from) => Some(from + if i == 0 { self.first_sent as u64 } else { 0 }),
            _ => None,
        });
        next.is_some_and(|next| next <= at)
    }

    /// Takes back an operation whose entry at `at` is unsent: its length becomes 0, and its payload is
    /// removed.
    pub(crate) fn void(&mut self, at: u64, source: Source) {
        let place = (at % self.ring.len() as u64) as usize + OPERATION_LEN_AT;
        self.ring[place..place + 8].fill(0);
        for item in self.items.iter_mut().filter(|item| item.source == source) {
            self.queued -= item.len as u64;
            *item = Item { body: Body::Detached(Box::new([])), len: 0, source: Source::Connection };
        }
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

    /// The sources of all items that wait.
    pub(crate) fn sources(&self) -> impl Iterator<Item = Source> + '_ {
        self.items.iter().map(|item| item.source)
    }

    fn advance(&mut self, mut sent: usize, mut progress: impl FnMut(Source, Progress)) {
        self.queued -= sent as u64;
        while let Some(first) = self.items.front() {
            let left = first.len - self.first_sent;
            if sent < left {
                self.first_sent += sent;
                if sent > 0 {
                    progress(first.source, Progress::Started);
                }
                return;
            }
            sent -= left;
            self.first_sent = 0;
            if let Body::Head(at) = first.body {
                self.ring_head = at + first.len as u64;
            }
            progress(first.source, Progress::Finished);
            self.items.pop_front();
        }
        self.ring_head = self.ring_tail;
    }
}
