//! A standby that follows the master's command log, and must have the same state. Now and then it is replaced
//! by one that a snapshot of it, or of the master, is restored to.

use store_core::command_log::{Command, Recorder, Standby};
use store_core::message::Operation;
use store_core::{Frame, Instant, Master, Session, snapshot};
use te_core::testkit::Rng;

use crate::common::Core;
use crate::scenario::Lies;
use crate::shadow::Violation;

/// Number of times the log was applied between two comparisons of all state.
const COMPARED_EVERY: u64 = 256;
/// The same between two snapshots, at most.
const SNAPSHOT_WITHIN: u64 = 2_048;

/// What does not change the master behind the log's back.
const TRUE: [Lies; 4] = [Lies::NONE, Lies::UNTOUCHED, Lies::UNTIMED, Lies::UNENDED];

pub(crate) struct Follower {
    pub(crate) recorder: Recorder,
    standby: Option<Standby>,
    applied: u64,
    /// When the next snapshot is taken, as `applied` counts.
    snapshot_at: u64,
    rng: Rng,
}

impl Follower {
    /// Follows a master that has no state yet.
    pub(crate) fn new(master: &mut Master, lies: Lies) -> Self {
        let recorder = Recorder::new(master);
        let standby = TRUE.contains(&lies).then(|| Standby::new(master.config().clone()).unwrap());
        let mut rng = Rng::new(master.config().hash_seed ^ u64::from(master.config().epoch));
        let snapshot_at = rng.range(0..SNAPSHOT_WITHIN);
        Self { recorder, standby, applied: 0, snapshot_at, rng }
    }
}

impl Core {
    /// The master carries out a request.
    pub(crate) fn request(&mut self, session: &mut Session, frame: &Frame<'_>, out: &mut Vec<u8>) {
        let now = self.shown();
        self.follower.recorder.handle(&mut self.master, now, session, frame, out);
    }

    /// The standby repeats what the master did, and must be as the master is.
    pub(crate) fn follow(&mut self) -> Result<(), Violation> {
        let log = self.follower.recorder.take();
        let Some(standby) = &mut self.follower.standby else { return Ok(()) };
        if log.is_empty() {
            return Ok(());
        }
        let left_out = |command: &Command<'_>| match command {
            Command::Touched { .. } => self.lies.contains(Lies::UNTOUCHED),
            Command::Ended { .. } => self.lies.contains(Lies::UNENDED),
            Command::Timeout { .. } => self.lies.contains(Lies::UNTIMED),
            _ => false,
        };
        let mut kept = Vec::new();
        let mut rest = &log[..];
        while let Some((command, left)) = Command::decode(rest).unwrap() {
            if !left_out(&command) {
                command.encode(&mut kept);
            }
            rest = left;
        }
        self.report.log_bytes += log.len() as u64;
        let applied = standby.apply(&kept);
        let diverged = |what: String| Err(Violation::Diverged(format!("{what} at {:?}", self.now)));
        if let Err(error) = applied {
            return diverged(error.to_string());
        }
        // What differs shows here in most cases.
        let glance = |master: &Master| (master.poll_timeout(), master.segments_len(), master.nodes_len());
        if glance(standby.master()) != glance(&self.master) {
            return diverged(format!("what is due after command {}", standby.lsn()));
        }
        self.follower.applied += 1;
        if self.follower.applied >= self.follower.snapshot_at {
            self.follower.snapshot_at += 1 + self.follower.rng.range(0..SNAPSHOT_WITHIN);
            self.restore()?;
        }
        if self.follower.applied.is_multiple_of(COMPARED_EVERY) { self.compare() } else { Ok(()) }
    }

    /// Continues with a standby that a snapshot is restored to.
    pub(crate) fn restore(&mut self) -> Result<(), Violation> {
        let of_master = self.follower.rng.range(0..2) == 0;
        let Some(standby) = &self.follower.standby else { return Ok(()) };
        let mut bytes = Vec::new();
        let mut sink = |chunk: &[u8]| -> Result<(), ()> {
            bytes.extend_from_slice(chunk);
            Ok(())
        };
        let digest = standby.master().digest();
        if of_master {
            let sessions = self.sessions.values().chain(self.intruders.iter().flatten());
            self.follower.recorder.snapshot(&self.master, sessions, 1, crc32c::crc32c, &mut sink).unwrap();
        } else {
            standby.snapshot(1, crc32c::crc32c, &mut sink).unwrap();
        }
        let mut rest = &bytes[..];
        let (restored, position) =
            snapshot::restore(crc32c::crc32c, &mut |to| std::io::Read::read(&mut rest, to)).unwrap();
        let at = (restored.lsn(), restored.time());
        if (position.lsn, at) != (standby.lsn(), (standby.lsn(), standby.time()))
            || restored.master().digest() != digest
        {
            let lsn = position.lsn;
            return Err(Violation::Diverged(format!("a snapshot after command {lsn} at {:?}", self.now)));
        }
        self.report.snapshots += 1;
        self.follower.standby = Some(restored);
        Ok(())
    }

    /// Compares all state of the standby with that of the master.
    pub(crate) fn compare(&mut self) -> Result<(), Violation> {
        let Some(standby) = &self.follower.standby else { return Ok(()) };
        self.report.compared += 1;
        if standby.master().digest() == self.master.digest() && standby.lsn() > 0 {
            return Ok(());
        }
        Err(Violation::Diverged(format!("state after command {} at {:?}", standby.lsn(), self.now)))
    }
}

/// Carries out an operator's request, over a connection of its own.
pub(crate) fn operate<'a, O: Operation>(
    recorder: &mut Recorder,
    master: &mut Master,
    now: Instant,
    head: &O::Request<'_>,
    items: impl ExactSizeIterator<Item = O::RequestItem<'a>>,
) -> Vec<u8> {
    let (mut request, mut out) = (Vec::new(), Vec::new());
    O::encode_request(&mut request, 1, head, items).unwrap();
    let (frame, _) = Frame::parse(&request).unwrap().unwrap();
    let mut session = Session::owner();
    recorder.handle(master, now, &mut session, &frame, &mut out);
    recorder.session_ended(master, now, session);
    out
}
