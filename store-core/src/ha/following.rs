//! A member that has the leader's state.

use te_core::Instant;

use super::{MemberId, Message, Reign};
use crate::command_log::{Command, CommandError, Lsn, Standby};

/// A member that repeats the commands of a leader.
#[derive(Debug)]
pub(super) struct Following {
    pub(super) reign: Reign,
    pub(super) leader: MemberId,
    pub(super) standby: Standby,
    /// When the leader was last heard of.
    pub(super) heard: Instant,
    /// The latest beat that was heard.
    pub(super) beat: u64,
    /// Since when the member takes no more commands of this reign, if it does not.
    pub(super) promised: Option<Instant>,
    /// It has promised because the leader hands over.
    pub(super) invited: bool,
}

/// What commands have come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Appended {
    /// They are here.
    Yes,
    /// Some before them are not.
    Gap,
}

impl Following {
    pub(super) const fn new(now: Instant, reign: Reign, leader: MemberId, standby: Standby) -> Self {
        Self { reign, leader, standby, heard: now, beat: 0, promised: None, invited: false }
    }

    /// Takes commands that follow the one at `after`. Commands that are here already are skipped; without
    /// effect if some between are missing.
    ///
    /// # Errors
    /// The commands cannot be repeated: the state is not that of the leader.
    pub(super) fn append(&mut self, after: Lsn, commands: &[u8]) -> Result<Appended, CommandError> {
        let lsn = self.standby.lsn();
        if after > lsn {
            return Ok(Appended::Gap);
        }
        let mut rest = commands;
        for _ in after..lsn {
            match Command::decode(rest)? {
                Some((_, left)) => rest = left,
                None => return Ok(Appended::Yes),
            }
        }
        if !rest.is_empty() {
            self.standby.apply(rest)?;
        }
        Ok(Appended::Yes)
    }

    pub(super) fn ack(&self, life: u64, beat: u64, gap: bool) -> Message {
        Message::Ack { reign: self.reign, life, lsn: self.standby.lsn(), beat, gap }
    }
}
