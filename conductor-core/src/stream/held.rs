//! Messages that wait for a replay, and the digests of those that were applied last.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::Settings;

/// Messages whose digests are kept: a duplicate of one of them is recognized.
const RECENT_MESSAGES: usize = 256;

/// The digests of the last messages that were applied, which have consecutive numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    /// The number after the last one.
    next: u64,
    digests: VecDeque<u64>,
}

impl Recent {
    pub(super) fn push(&mut self, seq: u64, digest: u64) {
        if self.next != seq {
            self.digests.clear();
        }
        if self.digests.len() == RECENT_MESSAGES {
            self.digests.pop_front();
        }
        self.digests.push_back(digest);
        self.next = seq.wrapping_add(1);
    }

    pub(super) fn digest(&self, seq: u64) -> Option<u64> {
        let back = usize::try_from(self.next.checked_sub(seq)?).ok()?;
        self.digests.get(self.digests.len().checked_sub(back)?).copied()
    }

    pub(super) fn clear(&mut self) {
        self.digests.clear();
    }
}

/// A message that waits.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) seq: u64,
    pub(super) digest: u64,
    pub(super) payload: Vec<u8>,
}

/// What became of a message that was to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offered {
    Held,
    /// It waits already.
    Duplicate,
    /// Later ones had arrived. They were dropped, in case that the numbers began again.
    Reordered,
    /// There is no room. A replay has to bring it.
    Full,
    /// Another message with its number waited, and was dropped with all others.
    Conflict,
}

/// Messages of a connection that wait until a replay has brought what is missing before them, in the order of
/// their numbers, in which they also arrived.
#[derive(Debug)]
pub(super) struct Held {
    messages: VecDeque<Message>,
    bytes: usize,
    messages_max: usize,
    bytes_max: usize,
    /// The number after the highest that arrived or was dropped.
    seen: u64,
}

impl Held {
    pub(super) fn new(settings: &Settings) -> Self {
        let Settings { held_messages_max: messages_max, held_bytes_max: bytes_max, .. } = *settings;
        Self { messages: VecDeque::new(), bytes: 0, messages_max, bytes_max, seen: 0 }
    }

    pub(super) fn clear(&mut self) {
        self.messages.clear();
        self.bytes = 0;
        self.seen = 0;
    }

    /// Nothing waits, and nothing that was dropped is missing before the number `next`.
    pub(super) fn is_settled(&self, next: u64) -> bool {
        self.messages.is_empty() && self.seen <= next
    }

    /// The number of the last one.
    pub(super) fn last(&self) -> Option<u64> {
        self.messages.back().map(|last| last.seq)
    }

    /// The digest of one that waits.
    pub(super) fn digest(&self, seq: u64) -> Option<u64> {
        let at = self.messages.binary_search_by_key(&seq, |message| message.seq).ok()?;
        Some(self.messages[at].digest)
    }

    /// What was dropped does not have to be brought by a replay any more.
    pub(super) fn forget_dropped(&mut self) {
        self.seen = self.messages.back().map_or(0, |last| last.seq + 1);
    }

    pub(super) fn offer(&mut self, seq: u64, digest: u64, payload: &[u8]) -> Offered {
        let mut offered = Offered::Held;
        if let Ok(at) = self.messages.binary_search_by_key(&seq, |message| message.seq) {
            if self.messages[at].digest == digest {
                return Offered::Duplicate;
            }
            self.clear();
            offered = Offered::Conflict;
        }
        while self.messages.back().is_some_and(|last| last.seq > seq) {
            self.pop_back();
            offered = Offered::Reordered;
        }
        self.seen = self.seen.max(seq + 1);
        if self.messages.len() >= self.messages_max || self.bytes + payload.len() > self.bytes_max {
            return Offered::Full;
        }
        self.bytes += payload.len();
        self.messages.push_back(Message { seq, digest, payload: payload.to_vec() });
        offered
    }

    /// The first one, if `takes` its number.
    pub(super) fn pop_if(&mut self, takes: impl FnOnce(u64) -> bool) -> Option<Message> {
        if !takes(self.messages.front()?.seq) {
            return None;
        }
        let message = self.messages.pop_front()?;
        self.bytes -= message.payload.len();
        Some(message)
    }

    fn pop_back(&mut self) {
        if let Some(message) = self.messages.pop_back() {
            self.bytes -= message.payload.len();
        }
    }
}
