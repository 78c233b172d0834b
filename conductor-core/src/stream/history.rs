//! The publisher's side of a stream: numbers, and the last messages for replays.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// The last messages of a publisher. A replay answers with those from the asked number on, and then with the
/// number [`REPLAY_END`](super::REPLAY_END) and an empty payload.
#[derive(Clone, Debug)]
pub struct History {
    next: u64,
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
    messages_max: usize,
    bytes_max: usize,
}

impl History {
    /// A history without messages; the first one gets the number `first_seq`. It keeps up to `messages_max`
    /// messages (vLLM: 10 000) with up to `bytes_max` bytes together.
    #[must_use]
    pub const fn new(first_seq: u64, messages_max: usize, bytes_max: usize) -> Self {
        Self { next: first_seq, messages: VecDeque::new(), bytes: 0, messages_max, bytes_max }
    }

    /// The number of the next message.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Keeps a message, and returns its number.
    pub fn push(&mut self, payload: &[u8]) -> u64 {
        self.bytes += payload.len();
        self.messages.push_back(payload.to_vec());
        while self.messages.len() > self.messages_max || self.bytes > self.bytes_max {
            let Some(oldest) = self.messages.pop_front() else { break };
            self.bytes -= oldest.len();
        }
        self.next += 1;
        self.next - 1
    }

    /// Lets a number pass without a message: what was to be published is lost, and subscribers have to
    /// notice.
    pub fn skip(&mut self) {
        self.messages.clear();
        self.bytes = 0;
        self.next += 1;
    }

    /// The messages that are kept, from the number `from` on.
    pub fn since(&self, from: u64) -> impl Iterator<Item = (u64, &[u8])> {
        let first = self.next - self.messages.len() as u64;
        let skipped = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        self.messages
            .iter()
            .enumerate()
            .skip(skipped)
            .map(move |(i, payload)| (first + i as u64, &payload[..]))
    }
}
