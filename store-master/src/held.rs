//! Answers of a connection that wait for the journal.

use std::collections::VecDeque;

use store_core::command_log::Lsn;

/// Answers that wait until the commands that they depend on are on disk. Answers of one connection keep their
/// order, so one that depends on nothing waits behind one that does.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The last command that some answers depend on, and where they end in the output.
    list: VecDeque<(Lsn, usize)>,
    /// Where the first of them begins.
    begins: usize,
    answers: usize,
    /// The connection is on the list of those that hold answers.
    listed: bool,
}

impl Held {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Whether answers wait. Returns `true` once until [`Self::look_again`].
    pub(crate) fn begins_to_hold(&mut self) -> bool {
        !self.is_empty() && !std::mem::replace(&mut self.listed, true)
    }

    /// More is on disk.
    pub(crate) fn look_again(&mut self) {
        self.listed = false;
    }

    /// Number of answers that wait.
    pub(crate) fn answers(&self) -> usize {
        if self.list.is_empty() { 0 } else { self.answers }
    }

    /// Adds the answer from `start` to `end`.
    pub(crate) fn add(&mut self, start: usize, end: usize, depends_on: Lsn, durable: Lsn) {
        if start == end || (self.list.is_empty() && depends_on <= durable) {
            return;
        }
        if self.list.is_empty() {
            (self.begins, self.answers) = (start, 0);
        }
        self.answers += 1;
        match self.list.back_mut() {
            Some((lsn, to)) if depends_on <= *lsn => *to = end,
            _ => self.list.push_back((depends_on, end)),
        }
    }

    /// Where the first answer begins that waits; `None`: none does.
    pub(crate) fn begins(&mut self, durable: Lsn) -> Option<usize> {
        while let Some(&(_, end)) = self.list.front().filter(|(lsn, _)| *lsn <= durable) {
            self.list.pop_front();
            self.begins = end;
        }
        (!self.list.is_empty()).then_some(self.begins)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_wait_for_their_commands_and_for_the_answers_before_them() {
        let mut held = Held::default();
        held.add(0, 10, 5, 5);
        held.add(10, 10, 9, 5);
        assert!(
            held.is_empty() && held.begins(5).is_none(),
            "what it depends on is on disk, or there is no answer"
        );
        held.add(10, 20, 7, 5);
        held.add(20, 30, 0, 5);
        held.add(30, 40, 9, 5);
        held.add(40, 50, 8, 5);
        assert_eq!((held.answers(), held.begins(6)), (4, Some(10)));
        assert!(held.begins_to_hold() && !held.begins_to_hold(), "it is listed once");
        assert_eq!(held.begins(7), Some(30));
        assert_eq!(held.begins(8), Some(30), "the last one waits behind the one before it");
        assert_eq!((held.begins(9), held.answers()), (None, 0));
        held.look_again();
        assert!(!held.begins_to_hold());
        held.add(0, 4, 12, 9);
        assert_eq!((held.answers(), held.begins(11), held.begins(12)), (1, Some(0), None));
    }
}
