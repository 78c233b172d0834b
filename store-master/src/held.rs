//! Answers of a connection that wait until their commands are confirmed: by the journal, or by other masters.

use std::collections::VecDeque;

use store_core::command_log::Lsn;

/// Answers that wait until the commands that they depend on are confirmed. Answers of one connection keep
/// their order, so one that depends on nothing waits behind one that does.
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

    /// More is confirmed.
    pub(crate) fn look_again(&mut self) {
        self.listed = false;
    }

    /// Number of answers that wait.
    pub(crate) fn answers(&self) -> usize {
        if self.list.is_empty() { 0 } else { self.answers }
    }

    /// Adds the answer from `start` to `end`. Commands up to `confirmed` are; `None`: no answer may be given.
    pub(crate) fn add(&mut self, start: usize, end: usize, depends_on: Lsn, confirmed: Option<Lsn>) {
        let goes = confirmed.is_some_and(|confirmed| depends_on <= confirmed);
        if start == end || (self.list.is_empty() && goes) {
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
    pub(crate) fn begins(&mut self, confirmed: Option<Lsn>) -> Option<usize> {
        let goes = |lsn: Lsn| confirmed.is_some_and(|confirmed| lsn <= confirmed);
        while let Some(&(_, end)) = self.list.front().filter(|(lsn, _)| goes(*lsn)) {
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
        held.add(0, 10, 5, Some(5));
        held.add(10, 10, 9, Some(5));
        assert!(
            held.is_empty() && held.begins(Some(5)).is_none(),
            "what it depends on is on disk, or there is no answer"
        );
        held.add(10, 20, 7, Some(5));
        held.add(20, 30, 0, Some(5));
        held.add(30, 40, 9, Some(5));
        held.add(40, 50, 8, Some(5));
        assert_eq!((held.answers(), held.begins(Some(6))), (4, Some(10)));
        assert!(held.begins_to_hold() && !held.begins_to_hold(), "it is listed once");
        assert_eq!(held.begins(Some(7)), Some(30));
        assert_eq!(held.begins(Some(8)), Some(30), "the last one waits behind the one before it");
        assert_eq!((held.begins(Some(9)), held.answers()), (None, 0));
        held.look_again();
        assert!(!held.begins_to_hold());
        held.add(0, 4, 12, Some(9));
        assert_eq!((held.answers(), held.begins(Some(11)), held.begins(Some(12))), (1, Some(0), None));
        // Without a lease nothing goes, whatever it depends on.
        held.add(0, 4, 0, None);
        assert_eq!((held.begins(None), held.begins(Some(0))), (Some(0), None));
    }
}
