//! The standby's side: repeats the commands of a leader.

use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::{Command, CommandError, Effect, FOLLOWS, Lsn, Recorder, SLOTS_MAX, SessionState, Slot};
use crate::message::Kind;
use crate::proof::CHALLENGE_BYTES;
use crate::session::Peer;
use crate::wire::{Frame, Header};
use crate::{ConfigError, Master, MasterConfig, Session};

/// A master that follows the command log of another one.
#[derive(Debug)]
pub struct Standby {
    pub(super) master: Master,
    /// The connections of the leader, by number less 1.
    pub(super) sessions: Vec<Option<Session>>,
    pub(super) lsn: Lsn,
    /// The time of the last command.
    pub(super) at: Instant,
    /// Responses, which are not needed: the buffer is used again.
    pub(super) out: Vec<u8>,
}

impl Standby {
    /// The standby of a master that begins with these settings. Every setting is the same as that of the
    /// leader, those included that the leader's process chose when it started.
    ///
    /// # Errors
    /// A setting is not within its limits.
    pub fn new(config: MasterConfig) -> Result<Self, ConfigError> {
        let master = Master::new(config)?;
        Ok(Self { master, sessions: Vec::new(), lsn: 0, at: Instant::ZERO, out: Vec::new() })
    }

    /// The position of the last command that was applied.
    #[must_use]
    pub const fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// The master as it is after that command.
    #[must_use]
    pub const fn master(&self) -> &Master {
        &self.master
    }

    /// The time of the last command.
    #[must_use]
    pub const fn time(&self) -> Instant {
        self.at
    }

    /// The master and its log, for the process that leads from here on. The log goes on with
    /// [`Command::TookOver`]. `handed_over`: the former leader has granted no lease that is not in the log,
    /// and grants none any more.
    #[must_use]
    pub fn lead(self, handed_over: bool) -> (Master, Recorder) {
        let Self { mut master, sessions, lsn, at, .. } = self;
        let mut recorder = Recorder::resume(&mut master, lsn, at);
        recorder.took_over(&mut master, at, handed_over, sessions.into_iter().flatten());
        (master, recorder)
    }

    /// Repeats commands, which are those that follow the ones before, as
    /// [`Recorder::take`](super::Recorder::take) returned them.
    ///
    /// # Errors
    /// A command cannot be repeated; the ones before it were. The state is no longer that of the leader.
    pub fn apply(&mut self, mut log: &[u8]) -> Result<(), CommandError> {
        while let Some((command, rest)) = Command::decode(log)? {
            self.repeat(command)?;
            self.lsn += 1;
            log = rest;
        }
        // The leader logs its own events.
        while self.master.poll_event().is_some() {}
        Ok(())
    }

    fn repeat(&mut self, command: Command<'_>) -> Result<(), CommandError> {
        match command {
            Command::Session { slot, state } => self.introduce(slot, state)?,
            Command::Tenant(name) => self.master.repeat_tenant(name).map_err(|_| CommandError::Tenant)?,
            Command::Request { after_ns, slot, kind, body } => self.request(after_ns, slot, kind, body.0)?,
            Command::Touched { after_ns, slot, get, objects } => {
                let now = self.after(after_ns);
                let session = session(&mut self.sessions, slot)?;
                let (items, []) = objects.0.as_chunks::<4>() else { return Err(CommandError::Damaged) };
                let touched = items.iter().map(|item| u32::from_le_bytes(*item));
                let touched = touched.map(|item| (item & !FOLLOWS, item & FOLLOWS != 0));
                self.master
                    .repeat_touches(now, session, get, touched)
                    .map_err(|index| CommandError::UnknownObject { index })?;
            }
            Command::Ended { after_ns, slot } => {
                let now = self.after(after_ns);
                session(&mut self.sessions, slot)?;
                if let Some(session) = self.sessions[slot as usize - 1].take() {
                    self.master.session_ended(now, session);
                }
            }
            Command::Timeout { after_ns } => {
                let now = self.after(after_ns);
                self.master.handle_timeout(now);
            }
            Command::TookOver { after_ns, handed_over } => {
                let now = self.after(after_ns);
                let sessions = core::mem::take(&mut self.sessions);
                self.master.took_over(now, handed_over, sessions.into_iter().flatten());
            }
            Command::Wall { after_ns, wall_ms } => {
                let now = self.after(after_ns);
                self.master.set_wall_ms(now, wall_ms);
            }
        }
        Ok(())
    }

    /// Numbers are given without gaps, so the list is never longer than the leader's.
    fn introduce(&mut self, slot: Slot, state: SessionState) -> Result<(), CommandError> {
        let unknown = CommandError::UnknownSlot { slot };
        let at = slot.checked_sub(1).filter(|_| slot <= SLOTS_MAX).ok_or(unknown)? as usize;
        if at > self.sessions.len() {
            return Err(unknown);
        }
        if at == self.sessions.len() {
            self.sessions.push(None);
        }
        // Only the leader uses the challenge.
        let fresh = || Session::new(Peer::Remote, [0; CHALLENGE_BYTES]);
        state.fill(self.sessions[at].get_or_insert_with(fresh));
        Ok(())
    }

    fn request(&mut self, after_ns: u64, slot: Slot, kind: u8, body: &[u8]) -> Result<(), CommandError> {
        let unknown = CommandError::UnknownKind { kind };
        if Kind::from_byte(kind).ok_or(unknown)?.effect() != Effect::Changes {
            return Err(unknown);
        }
        let now = self.after(after_ns);
        let session = session(&mut self.sessions, slot)?;
        let header = Header { kind, response: false, request_id: 0, status: 0 };
        self.out.clear();
        self.master.handle(now, session, &Frame { header, body }, &mut self.out);
        Ok(())
    }

    /// The time of a command.
    fn after(&mut self, after_ns: u64) -> Instant {
        self.at = self.at + Duration::from_nanos(after_ns);
        self.at
    }
}

fn session(sessions: &mut [Option<Session>], slot: Slot) -> Result<&mut Session, CommandError> {
    let at = (slot as usize).checked_sub(1);
    at.and_then(|at| sessions.get_mut(at)?.as_mut()).ok_or(CommandError::UnknownSlot { slot })
}
