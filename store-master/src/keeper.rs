//! Who must confirm a command before the answers are given that depend on it: no one, a journal, or other
//! masters.

use store_core::command_log::Lsn;
use store_core::ha::NotLeading;
use store_core::{Frame, Instant, Master, Session};

use crate::ha::Ha;
use crate::journal::Journal;

/// A master, and what keeps its state besides it. Every call that changes the master goes through it.
#[derive(Debug)]
pub(crate) enum Keeper {
    /// Nothing does.
    Memory(Box<Master>),
    /// A journal on disk.
    Journal(Box<Master>, Box<Journal>),
    /// Other masters.
    Masters(Box<Ha>),
}

impl Keeper {
    pub(crate) fn master(&self) -> &Master {
        match self {
            Self::Memory(master) | Self::Journal(master, _) => master,
            Self::Masters(ha) => ha.master(),
        }
    }

    /// For what changes no state, and for events.
    pub(crate) fn master_mut(&mut self) -> &mut Master {
        match self {
            Self::Memory(master) | Self::Journal(master, _) => master,
            Self::Masters(ha) => ha.master_mut(),
        }
    }

    /// Whether requests are carried out.
    pub(crate) fn is_serving(&self) -> bool {
        match self {
            Self::Memory(_) | Self::Journal(..) => true,
            Self::Masters(ha) => ha.is_serving(),
        }
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        if let Self::Journal(_, journal) = self { Some(journal) } else { None }
    }

    pub(crate) fn ha(&self) -> Option<&Ha> {
        if let Self::Masters(ha) = self { Some(ha) } else { None }
    }

    pub(crate) fn ha_mut(&mut self) -> Option<&mut Ha> {
        if let Self::Masters(ha) = self { Some(ha) } else { None }
    }

    /// As [`Master::handle`]; returns the command that the answer depends on.
    ///
    /// # Errors
    /// This master does not lead: the answer says so.
    pub(crate) fn handle(
        &mut self,
        now: Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Lsn, NotLeading> {
        match self {
            Self::Memory(master) => master.handle(now, session, frame, out),
            Self::Journal(master, journal) => return Ok(journal.handle(master, now, session, frame, out)),
            Self::Masters(ha) => return ha.handle(now, session, frame, out),
        }
        Ok(0)
    }

    /// As [`Master::handle_timeout`]. One of several masters does so itself.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        match self {
            Self::Memory(master) => master.handle_timeout(now),
            Self::Journal(master, journal) => journal.handle_timeout(master, now),
            Self::Masters(_) => {}
        }
    }

    /// When [`Self::handle_timeout`], or the turn of one of several masters, is due next.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self {
            Self::Memory(master) | Self::Journal(master, _) => master.poll_timeout(),
            Self::Masters(ha) => Some(ha.due()),
        }
    }

    /// As [`Master::set_wall_ms`].
    pub(crate) fn set_wall_ms(&mut self, now: Instant, wall_ms: u64) {
        match self {
            Self::Memory(master) => master.set_wall_ms(now, wall_ms),
            Self::Journal(master, journal) => journal.set_wall_ms(master, now, wall_ms),
            Self::Masters(ha) => ha.set_wall_ms(now, wall_ms),
        }
    }

    /// As [`Master::session_ended`].
    pub(crate) fn session_ended(&mut self, now: Instant, session: Session) {
        match self {
            Self::Memory(master) => master.session_ended(now, session),
            Self::Journal(master, journal) => journal.session_ended(master, now, session),
            Self::Masters(ha) => ha.session_ended(now, session),
        }
    }

    /// The master's time, where `now` is that of this process.
    pub(crate) fn master_time(&mut self, now: Instant) -> Instant {
        match self {
            Self::Memory(_) | Self::Journal(..) => now,
            Self::Masters(ha) => ha.master_time(now),
        }
    }

    /// The last command that has changed anything.
    pub(crate) fn changed(&self) -> Lsn {
        match self {
            Self::Memory(_) => 0,
            Self::Journal(_, journal) => journal.changed(),
            Self::Masters(ha) => ha.changed(),
        }
    }

    /// The last command that is confirmed at this moment; `None`: no answer may be given.
    pub(crate) fn confirmed(&mut self, now: Instant) -> Option<Lsn> {
        match self {
            Self::Memory(_) => Some(Lsn::MAX),
            Self::Journal(_, journal) => Some(journal.confirmed()),
            Self::Masters(ha) => ha.ready(now),
        }
    }

    /// The same as far as it is certain without looking: what is not is looked at when answers are sent.
    pub(crate) fn surely_confirmed(&self) -> Option<Lsn> {
        match self {
            Self::Memory(_) => Some(Lsn::MAX),
            Self::Journal(_, journal) => Some(journal.confirmed()),
            Self::Masters(ha) => (!ha.leads()).then_some(Lsn::MAX),
        }
    }
}
