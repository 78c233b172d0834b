//! The leader's side: calls the master and writes down what changes it.

use alloc::vec::Vec;

use te_core::Instant;

use super::{Command, Effect, FOLLOWS, Lsn, SLOTS_MAX, SessionState, Slot};
use crate::codec::Key;
use crate::message::Kind;
use crate::wire::Frame;
use crate::{Master, Session};

/// Writes the command log of a master.
///
/// While a master has a recorder, every call that changes it goes through the recorder.
#[derive(Debug)]
pub struct Recorder {
    /// Commands that were not taken yet.
    pub(super) log: Vec<u8>,
    pub(super) lsn: Lsn,
    /// The time of the last command.
    pub(super) at: Instant,
    pub(super) slots: Slots,
    /// The objects of the latest [`Command::Touched`]: the buffer is used again.
    objects: Vec<u8>,
}

/// The numbers of connections.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Number of slots that were given at least once.
    pub(super) len: u32,
    free: Vec<Slot>,
}

impl Slots {
    fn take(&mut self) -> Slot {
        self.free.pop().unwrap_or_else(|| {
            self.len += 1;
            self.len
        })
    }
}

impl Recorder {
    /// Begins the log of a master that is as [`Master::new`] made it.
    #[must_use]
    pub fn new(master: &mut Master) -> Self {
        Self::resume(master, 0, Instant::ZERO)
    }

    /// Continues a log.
    pub(super) fn resume(master: &mut Master, lsn: Lsn, at: Instant) -> Self {
        master.note_touches();
        Self { log: Vec::new(), lsn, at, slots: Slots::default(), objects: Vec::new() }
    }

    pub(super) fn took_over(
        &mut self,
        master: &mut Master,
        now: Instant,
        handed_over: bool,
        sessions: impl Iterator<Item = Session>,
    ) {
        let after_ns = self.after_ns(now);
        self.push(&Command::TookOver { after_ns, handed_over });
        master.took_over(now, handed_over, sessions);
    }

    /// The position of the last command.
    #[must_use]
    pub const fn lsn(&self) -> Lsn {
        self.lsn
    }

    /// Length of the commands that [`Self::take`] would return, bytes.
    #[must_use]
    pub const fn pending_bytes(&self) -> usize {
        self.log.len()
    }

    /// The commands since the last call, encoded one after the other.
    #[must_use]
    pub fn take(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.log)
    }

    /// As [`Master::handle`].
    pub fn handle(
        &mut self,
        master: &mut Master,
        now: Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) {
        let kind = Kind::from_byte(frame.header.kind).filter(|_| !frame.header.response);
        // What is no request is refused.
        match kind.map_or(Effect::Asks, Kind::effect) {
            Effect::Asks => master.handle(now, session, frame, out),
            Effect::Changes => {
                let slot = self.slot(session);
                let (kind, body) = (frame.header.kind, Key(frame.body));
                let after_ns = self.after_ns(now);
                self.push(&Command::Request { after_ns, slot, kind, body });
                master.handle(now, session, frame, out);
            }
            Effect::Leases => {
                master.handle(now, session, frame, out);
                self.touched(master, now, session, kind == Some(Kind::Get));
            }
            Effect::Greets => {
                let tenants = master.tenants_len();
                master.handle(now, session, frame, out);
                if master.tenants_len() > tenants {
                    self.push(&Command::Tenant(master.tenant_of(session)));
                }
                if session.slot != 0 {
                    self.introduce(session);
                }
            }
        }
    }

    /// As [`Master::handle_timeout`].
    pub fn handle_timeout(&mut self, master: &mut Master, now: Instant) {
        let after_ns = self.after_ns(now);
        self.push(&Command::Timeout { after_ns });
        master.handle_timeout(now);
    }

    /// As [`Master::set_wall_ms`].
    pub fn set_wall_ms(&mut self, master: &mut Master, now: Instant, wall_ms: u64) {
        let after_ns = self.after_ns(now);
        self.push(&Command::Wall { after_ns, wall_ms });
        master.set_wall_ms(now, wall_ms);
    }

    /// As [`Master::session_ended`].
    pub fn session_ended(&mut self, master: &mut Master, now: Instant, session: Session) {
        if session.slot != 0 {
            let after_ns = self.after_ns(now);
            self.push(&Command::Ended { after_ns, slot: session.slot });
            self.slots.free.push(session.slot);
        }
        master.session_ended(now, session);
    }

    /// The number of a connection in the log. The log introduces a connection before it names it.
    fn slot(&mut self, session: &mut Session) -> Slot {
        if session.slot == 0 {
            session.slot = self.slots.take();
            debug_assert!(session.slot <= SLOTS_MAX, "there are not so many descriptors");
            self.introduce(session);
        }
        session.slot
    }

    fn introduce(&mut self, session: &Session) {
        self.push(&Command::Session { slot: session.slot, state: SessionState::of(session) });
    }

    fn touched(&mut self, master: &mut Master, now: Instant, session: &mut Session, get: bool) {
        let mut objects = core::mem::take(&mut self.objects);
        objects.clear();
        for (index, follows) in master.take_touches() {
            objects.extend_from_slice(&(index | if follows { FOLLOWS } else { 0 }).to_le_bytes());
        }
        if !objects.is_empty() {
            let slot = self.slot(session);
            let after_ns = self.after_ns(now);
            self.push(&Command::Touched { after_ns, slot, get, objects: Key(&objects) });
        }
        self.objects = objects;
    }

    /// The time since the last command.
    fn after_ns(&mut self, now: Instant) -> u64 {
        let after_ns = now.nanos_since(self.at);
        debug_assert!(now >= self.at, "the master's time decreased");
        self.at = now;
        after_ns
    }

    fn push(&mut self, command: &Command<'_>) {
        command.encode(&mut self.log);
        self.lsn += 1;
    }
}
