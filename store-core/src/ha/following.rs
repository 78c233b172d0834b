//! A member that has the leader's state, or is about to have it.

use alloc::vec::Vec;

use te_core::Instant;

use super::{MemberId, Message, Reign};
use crate::command_log::{Command, CommandError, Lsn, Standby};

/// A member that repeats the commands of a leader.
#[derive(Debug)]
pub(super) struct Following {
    pub(super) reign: Reign,
    pub(super) leader: MemberId,
    pub(super) standby: Standby,
    /// All commands from the first on.
    pub(super) history: Vec<u8>,
    /// The positions at which parts of the history end, and where those are in it.
    pub(super) marks: Vec<(Lsn, usize)>,
    /// When the leader was last heard of.
    pub(super) heard: Instant,
    /// The leader has said that this member may take over.
    pub(super) trusted: bool,
    /// The member has promised to take no more commands of this reign.
    pub(super) promised: bool,
}

impl Following {
    pub(super) fn new(now: Instant, reign: Reign, leader: MemberId, standby: Standby) -> Self {
        let (history, marks) = (Vec::new(), Vec::new());
        Self { reign, leader, standby, history, marks, heard: now, trusted: false, promised: false }
    }

    /// Takes commands that follow the one at `after`. Commands that are here already are skipped; returns
    /// without effect if some between are missing.
    ///
    /// # Errors
    /// The commands cannot be repeated: the state is not that of the leader.
    pub(super) fn append(&mut self, after: Lsn, commands: &[u8]) -> Result<(), CommandError> {
        let lsn = self.standby.lsn();
        if after > lsn {
            return Ok(());
        }
        let mut rest = commands;
        for _ in after..lsn {
            match Command::decode(rest)? {
                Some((_, left)) => rest = left,
                None => return Ok(()),
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
        self.standby.apply(rest)?;
        self.history.extend_from_slice(rest);
        self.marks.push((self.standby.lsn(), self.history.len()));
        Ok(())
    }

    pub(super) fn ack(&self, life: u64, beat: u64) -> Message {
        Message::Ack { reign: self.reign, life, lsn: self.standby.lsn(), beat }
    }
}
