//! Connections in a snapshot.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{Recorder, SessionState, Standby};
use crate::proof::CHALLENGE_BYTES;
use crate::session::{Leases, Peer};
use crate::snapshot::{self, Crc32c, SnapshotError, Written};
use crate::{ConfigError, Instant, Master, MasterConfig, Session};

/// What the log knows of a connection.
#[derive(Serialize, Deserialize)]
pub(crate) struct SessionRecord<L = Leases> {
    state: SessionState,
    no: u64,
    puts: u32,
    writer: u64,
    leases: L,
}

impl<'a> SessionRecord<&'a Leases> {
    fn of(session: &'a Session) -> Self {
        let Session { no, puts, writer, leases, .. } = session;
        Self { state: SessionState::of(session), no: *no, puts: *puts, writer: *writer, leases }
    }
}

impl SessionRecord {
    fn into_session(self) -> Session {
        let Self { state, no, puts, writer, leases } = self;
        // Only the leader uses the challenge, and counts wrong proofs.
        let mut session = Session::new(Peer::Remote, [0; CHALLENGE_BYTES]);
        state.fill(&mut session);
        (session.no, session.puts, session.writer, session.leases) = (no, puts, writer, leases);
        session
    }
}

impl Standby {
    /// Writes a [snapshot](crate::snapshot) to `sink`, in chunks. `term` is the caller's: it is what
    /// [`restore`](crate::snapshot::restore) returns.
    ///
    /// # Errors
    /// That of `sink`.
    pub fn snapshot<E>(
        &self,
        term: u64,
        crc32c: Crc32c,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Written, SnapshotError<E>> {
        let sessions: Vec<_> = self.sessions.iter().map(|it| it.as_ref().map(SessionRecord::of)).collect();
        snapshot::write(&self.master, (term, self.lsn, self.at), &sessions, crc32c, sink)
    }

    /// Takes other settings, before this process [leads](Self::lead). The epoch, the hash seed, the key of
    /// handles and the wall time of the start stay. Returns whether anything has changed: the log that goes
    /// on then begins with a snapshot, because no command says so.
    ///
    /// # Errors
    /// A setting is not within its limits, or cannot be changed.
    pub fn reconfigure(&mut self, config: MasterConfig) -> Result<bool, ConfigError> {
        self.master.reconfigure(self.at, config)
    }

    /// What a snapshot contains.
    pub(crate) fn restored(
        master: Master,
        sessions: Vec<Option<SessionRecord>>,
        lsn: super::Lsn,
        at: Instant,
    ) -> Self {
        let sessions = sessions.into_iter().map(|it| it.map(SessionRecord::into_session)).collect();
        Self { master, sessions, lsn, at, out: Vec::new() }
    }
}

impl Recorder {
    /// Writes a [snapshot](crate::snapshot) of the leader to `sink`, in chunks, as it is after the last
    /// command: [`Self::take`] has returned all of them. `sessions` are all open connections, and `term` is
    /// the caller's.
    ///
    /// # Errors
    /// That of `sink`.
    pub fn snapshot<'a, E>(
        &self,
        master: &Master,
        sessions: impl Iterator<Item = &'a Session>,
        term: u64,
        crc32c: Crc32c,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Written, SnapshotError<E>> {
        debug_assert!(self.log.is_empty(), "commands were not taken");
        let mut named: Vec<_> = (0..self.slots.len).map(|_| None).collect();
        for session in sessions.filter(|session| session.slot != 0) {
            if let Some(place) = named.get_mut(session.slot as usize - 1) {
                *place = Some(SessionRecord::of(session));
            }
        }
        snapshot::write(master, (term, self.lsn, self.at), &named, crc32c, sink)
    }
}
