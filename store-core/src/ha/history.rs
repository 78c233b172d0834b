//! The commands that members may still need.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::command_log::Lsn;

/// The latest commands of a leader, in parts that are sent whole.
#[derive(Debug)]
pub(super) struct History {
    parts: VecDeque<Part>,
    /// The position of the last command before the first part, and the number of bytes before it.
    begins: (Lsn, u64),
}

#[derive(Debug)]
struct Part {
    /// The position of its last command.
    ends: Lsn,
    /// Number of bytes of all commands up to its end.
    offset: u64,
    commands: Vec<u8>,
}

impl History {
    pub(super) fn new(lsn: Lsn) -> Self {
        Self { parts: VecDeque::new(), begins: (lsn, 0) }
    }

    fn last(&self) -> (Lsn, u64) {
        self.parts.back().map_or(self.begins, |part| (part.ends, part.offset))
    }

    /// The position of the last command.
    pub(super) fn ends(&self) -> Lsn {
        self.last().0
    }

    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> u64 {
        self.last().1 - self.begins.1
    }

    pub(super) fn push(&mut self, ends: Lsn, commands: Vec<u8>) {
        let offset = self.last().1 + commands.len() as u64;
        self.parts.push_back(Part { ends, offset, commands });
    }

    /// The index of the part that begins after `after`; `None`: it is not kept, or none does.
    fn at(&self, after: Lsn) -> Option<usize> {
        if after == self.begins.0 {
            return Some(0);
        }
        self.parts.binary_search_by_key(&after, |part| part.ends).ok().map(|at| at + 1)
    }

    /// Whether the commands after `after` are kept, and `after` is the end of a part.
    pub(super) fn has(&self, after: Lsn) -> bool {
        self.at(after).is_some()
    }

    /// Number of bytes from the end of `after` to the end of all; `None` as for [`Self::has`].
    pub(super) fn behind(&self, after: Lsn) -> Option<u64> {
        Some(self.last().1 - self.offset(after)?)
    }

    /// Number of bytes between two positions.
    pub(super) fn between(&self, from: Lsn, to: Lsn) -> Option<u64> {
        Some(self.offset(to)?.saturating_sub(self.offset(from)?))
    }

    fn offset(&self, after: Lsn) -> Option<u64> {
        match self.at(after)? {
            0 => Some(self.begins.1),
            at => self.parts.get(at - 1).map(|part| part.offset),
        }
    }

    /// Commands after `after`, and the position of the last of them: about `bytes_max`, or one part.
    pub(super) fn after(&self, after: Lsn, bytes_max: usize) -> Option<(Vec<u8>, Lsn)> {
        let from = self.at(after)?;
        let (mut commands, mut ends) = (Vec::new(), after);
        for part in self.parts.range(from..) {
            if !commands.is_empty() && commands.len() + part.commands.len() > bytes_max {
                break;
            }
            commands.extend_from_slice(&part.commands);
            ends = part.ends;
        }
        Some((commands, ends))
    }

    /// Forgets the parts that end at `lsn` or before.
    pub(super) fn forget(&mut self, lsn: Lsn) {
        while let Some(part) = self.parts.front().filter(|part| part.ends <= lsn) {
            self.begins = (part.ends, part.offset);
            self.parts.pop_front();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn parts_are_returned_whole_and_forgotten_from_the_front() {
        let mut history = History::new(10);
        assert_eq!((history.ends(), history.bytes(), history.has(10), history.has(9)), (10, 0, true, false));
        history.push(12, alloc::vec![1, 1]);
        history.push(13, alloc::vec![2]);
        history.push(20, alloc::vec![3; 7]);
        assert_eq!((history.ends(), history.bytes()), (20, 10));
        assert_eq!(history.after(10, 1), Some((alloc::vec![1, 1], 12)), "at least one part");
        assert_eq!(history.after(10, 3), Some((alloc::vec![1, 1, 2], 13)));
        assert_eq!(history.after(13, 100).unwrap().1, 20);
        assert_eq!(history.after(20, 100), Some((Vec::new(), 20)));
        assert!(history.after(11, 100).is_none(), "within a part");
        assert_eq!((history.behind(12), history.between(12, 20)), (Some(8), Some(8)));
        history.forget(12);
        assert_eq!((history.bytes(), history.has(10), history.behind(12)), (8, false, Some(8)));
        history.forget(99);
        assert_eq!((history.bytes(), history.ends(), history.has(20)), (0, 20, true));
    }
}
