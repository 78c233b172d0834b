//! The journal: the master's commands on disk, so that a master that was killed continues where it was.
//!
//! ```text
//!   serving thread                         writer thread                disk
//!     request ──▶ Recorder ── commands ──▶ gathers, one record ───────▶ journal-….log, fdatasync
//!     answer is held                                                       │
//!     answer is sent ◀─────── wakes: durable up to this command ◀──────────┘
//!
//!     every so often: Recorder::snapshot ── chunks ──▶ a thread of its own ──▶ snapshot-….snap
//! ```
//!
//! The commands are those that followers would get ([`store_core::command_log`]), and answers are held as
//! they are for followers: [`Dependence`] says which command an answer depends on. So a journal is the one
//! follower of a master that is alone. The serving thread never waits for the disk, except while a snapshot
//! is taken and the disk takes less than the master produces.
//!
//! A restart loads the snapshot, repeats the commands after it, and goes on as another leader would
//! ([`Standby::lead`]): with the same epoch, so that nodes and clients keep what they have.

mod files;
mod snapshots;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
mod writer;

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::Waker;
use store_core::command_log::{CommandError, Dependence, Lsn, Recorder, Standby};
use store_core::snapshot::{self, SnapshotError};
use store_core::{Frame, Master, MasterConfig, Session};
use tracing::{info, warn};

use crate::Config;
use crate::epoch;
use files::{Listing, replay};
pub(crate) use snapshots::SnapshotStats;
use snapshots::Snapshots;
use writer::Writer;
pub(crate) use writer::WriterStats;

/// Only the owner reads: the files contain the secrets of tenants.
const FILE_MODE: u32 = 0o600;
const DIR_MODE: u32 = 0o700;
/// The term in snapshots: a master alone has one.
const TERM: u64 = 1;
/// Commands of gets that wait for a command that changes something, bytes.
const LEASES_BYTES: usize = 64 << 10;
/// The journal may be as long as a snapshot, divided by this: then repeating it takes about as long as
/// loading the snapshot does.
const SNAPSHOT_SHARE: u64 = 4;

/// CRC-32C of bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    ::crc32c::crc32c(bytes)
}

/// A store that was read from a directory, or begun in it.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) master: Master,
    recorder: Recorder,
    /// The time of the last command.
    pub(crate) at: store_core::Instant,
    dir: PathBuf,
    /// Held as long as the directory is used.
    lock: File,
    /// Whether a snapshot has to be written before anything else.
    fresh: bool,
    /// Bytes of the journal that a restart would repeat.
    behind_bytes: u64,
}

impl Opened {
    /// Opens a directory: continues the store in it, or begins one with these settings.
    pub(crate) fn open(dir: &Path, store: &mut MasterConfig) -> Result<Self, JournalError> {
        let began = Instant::now();
        DirBuilder::new().recursive(true).mode(DIR_MODE).create(dir).map_err(at_path(dir))?;
        let lock = lock_dir(dir)?;
        remove_unfinished(dir)?;
        let listing = Listing::of(dir)?;
        let dir = dir.to_path_buf();
        let Some((_, newest)) = listing.snapshots.last() else {
            if let Some((_, path)) = listing.journals.first() {
                return Err(JournalError::NoSnapshot { path: path.clone() });
            }
            epoch::fill(store);
            let mut master = Master::new(store.clone()).map_err(JournalError::Config)?;
            let recorder = Recorder::new(&mut master);
            let at = store_core::Instant::ZERO;
            return Ok(Self { master, recorder, at, dir, lock, fresh: true, behind_bytes: 0 });
        };
        let mut standby = load(newest)?;
        let loaded = standby.lsn();
        let lineage = standby.master().config().epoch.into();
        let mut behind_bytes = 0;
        // A file that the next one begins before the snapshot's end of has nothing that is needed.
        for (at, (_, path)) in listing.journals.iter().enumerate() {
            let next = listing.journals.get(at + 1);
            if next.is_some_and(|(after, _)| *after <= loaded) {
                continue;
            }
            behind_bytes += fs::metadata(path).map_err(at_path(path))?.len();
            replay(path, next.is_none(), lineage, &mut standby)?;
        }
        let changed = standby.reconfigure(store.clone()).map_err(JournalError::Config)?;
        let at = standby.time();
        let (master, recorder) = standby.lead(false);
        *store = master.config().clone();
        info!(
            dir = %dir.display(),
            objects = master.stats().objects,
            commands = recorder.lsn() - loaded,
            lsn = recorder.lsn(),
            settings_changed = changed,
            took_ms = began.elapsed().as_millis() as u64,
            "the store continues"
        );
        Ok(Self { master, recorder, at, dir, lock, fresh: changed, behind_bytes })
    }

    /// Begins to write.
    pub(crate) fn start(
        mut self,
        config: &Config,
        waker: Arc<Waker>,
    ) -> Result<(Master, Journal), JournalError> {
        let lineage = self.master.config().epoch.into();
        let lsn = self.recorder.lsn();
        let first = self.recorder.take();
        let snapshots = Snapshots::new(&self.dir);
        if self.fresh {
            snapshots.write_now(&self.master, &self.recorder)?;
            self.behind_bytes = 0;
        }
        // The command of the take-over is repeated by no one who begins with a snapshot that has it.
        let before = if self.fresh || first.is_empty() { lsn } else { lsn - 1 };
        let writer = Writer::start(&self.dir, lineage, before, waker)?;
        if before < lsn {
            writer.submit(first, lsn);
        }
        let dependence = Dependence::new(&mut self.master, lsn);
        let journal = Journal {
            recorder: self.recorder,
            dependence,
            writer,
            snapshots,
            confirmed: before,
            submitted: lsn,
            snapshot_bytes: u64::from(config.journal_snapshot_mib) << 20,
            snapshot_every: Duration::from_secs(config.journal_snapshot_s.into()),
            behind_bytes: self.behind_bytes,
            snapshot_mark: 0,
            snapshot_at: Instant::now(),
            snapshot_lsn: lsn,
            _lock: self.lock,
        };
        if self.fresh {
            journal.writer.shared().prune(lsn);
        }
        Ok((self.master, journal))
    }
}

/// The journal of a master that serves.
#[derive(Debug)]
pub(crate) struct Journal {
    recorder: Recorder,
    dependence: Dependence,
    writer: Writer,
    snapshots: Snapshots,
    /// The last command that [`Self::confirm`] has returned.
    confirmed: Lsn,
    /// The last command that the writer was handed.
    submitted: Lsn,
    snapshot_bytes: u64,
    snapshot_every: Duration,
    /// Bytes of the journal before this process that a restart would repeat.
    behind_bytes: u64,
    /// Bytes that were written when the last snapshot was taken.
    snapshot_mark: u64,
    snapshot_at: Instant,
    snapshot_lsn: Lsn,
    _lock: File,
}

/// Counters and gauges of a journal.
#[derive(Clone, Debug)]
pub(crate) struct JournalStats {
    pub(crate) lsn: Lsn,
    pub(crate) writer: WriterStats,
    pub(crate) snapshots: SnapshotStats,
}

impl Journal {
    /// As [`Master::handle`]; returns the command that the answer depends on.
    pub(crate) fn handle(
        &mut self,
        master: &mut Master,
        now: store_core::Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Lsn {
        self.recorder.handle(master, now, session, frame, out);
        self.dependence.executed(master, frame, self.recorder.lsn());
        self.dependence.of(master, session, frame)
    }

    /// As [`Master::handle_timeout`].
    pub(crate) fn handle_timeout(&mut self, master: &mut Master, now: store_core::Instant) {
        self.recorder.handle_timeout(master, now);
        self.dependence.note(master, self.recorder.lsn());
    }

    /// As [`Master::set_wall_ms`].
    pub(crate) fn set_wall_ms(&mut self, master: &mut Master, now: store_core::Instant, wall_ms: u64) {
        self.recorder.set_wall_ms(master, now, wall_ms);
    }

    /// As [`Master::session_ended`].
    pub(crate) fn session_ended(&mut self, master: &mut Master, now: store_core::Instant, session: Session) {
        self.recorder.session_ended(master, now, session);
        self.dependence.note(master, self.recorder.lsn());
    }

    /// The last command that has changed anything.
    pub(crate) const fn changed(&self) -> Lsn {
        self.dependence.changed()
    }

    /// The last command that is known to be on disk.
    pub(crate) const fn confirmed(&self) -> Lsn {
        self.confirmed
    }

    /// Hands commands to the writer, if any of them has changed anything. Which objects gets have leased can
    /// wait: the process that continues after a crash keeps every object for as long as a lease lasts.
    pub(crate) fn submit(&mut self) {
        if self.dependence.awaited() > self.submitted || self.recorder.pending_bytes() >= LEASES_BYTES {
            self.submit_all();
        }
    }

    fn submit_all(&mut self) {
        self.submitted = self.recorder.lsn();
        let commands = self.recorder.take();
        if !commands.is_empty() {
            self.writer.submit(commands, self.recorder.lsn());
        }
    }

    /// Asks the writer what is on disk. Returns whether more is than before.
    ///
    /// # Errors
    /// Why nothing will be on disk any more.
    pub(crate) fn confirm(&mut self) -> Result<bool, JournalError> {
        if let Some(error) = self.writer.failure() {
            return Err(error);
        }
        let durable = self.writer.durable();
        if durable == self.confirmed {
            return Ok(false);
        }
        self.confirmed = durable;
        self.dependence.confirm(durable);
        Ok(true)
    }

    /// Takes a snapshot if it is time to. `sessions` are all open connections.
    pub(crate) fn snapshot_if_due<'a>(
        &mut self,
        now: Instant,
        master: &Master,
        sessions: impl Iterator<Item = &'a Session>,
    ) {
        if let Some(lsn) = self.snapshots.finished() {
            self.writer.shared().prune(lsn);
        }
        let bytes = self.writer.shared().bytes();
        let since = bytes - self.snapshot_mark + self.behind_bytes;
        let waited = now.saturating_duration_since(self.snapshot_at);
        let long = self.snapshot_bytes.max(self.snapshots.stats().bytes / SNAPSHOT_SHARE);
        let is_due = since >= long || waited >= self.snapshot_every;
        if !is_due || self.recorder.lsn() == self.snapshot_lsn || self.snapshots.is_busy() {
            return;
        }
        self.submit_all();
        self.writer.rotate();
        self.snapshot_at = now;
        match self.snapshots.begin(master, &self.recorder, sessions) {
            Ok(()) => {
                self.snapshot_lsn = self.recorder.lsn();
                (self.snapshot_mark, self.behind_bytes) = (bytes, 0);
            }
            Err(error) => warn!(%error, "no snapshot was taken: the journal grows until the next one"),
        }
    }

    pub(crate) fn stats(&self) -> JournalStats {
        JournalStats {
            lsn: self.recorder.lsn(),
            writer: self.writer.stats(),
            snapshots: self.snapshots.stats(),
        }
    }
}

/// Locks a directory until the file is dropped.
fn lock_dir(dir: &Path) -> Result<File, JournalError> {
    let path = dir.join("lock");
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE)
        .open(&path)
        .map_err(at_path(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(JournalError::Locked { dir: dir.into() }),
        Err(fs::TryLockError::Error(source)) => Err(JournalError::File { path, source }),
    }
}

/// Removes what a crash has left of snapshots.
fn remove_unfinished(dir: &Path) -> Result<(), JournalError> {
    for entry in fs::read_dir(dir).map_err(at_path(dir))? {
        let path = entry.map_err(at_path(dir))?.path();
        if path.extension().is_some_and(|extension| extension == snapshots::UNFINISHED) {
            fs::remove_file(&path).map_err(at_path(&path))?;
        }
    }
    Ok(())
}

fn load(path: &Path) -> Result<Standby, JournalError> {
    let mut file = File::open(path).map_err(at_path(path))?;
    let restored = snapshot::restore(crc32c, &mut |to| io::Read::read(&mut file, to));
    match restored {
        Ok((standby, _)) => Ok(standby),
        Err(error) => Err(JournalError::Snapshot { path: path.into(), error }),
    }
}

/// Adds the path to an error.
fn at_path(path: &Path) -> impl FnOnce(io::Error) -> JournalError + use<> {
    let path = path.to_path_buf();
    move |source| JournalError::File { path, source }
}

/// Why a journal cannot be used.
#[derive(Debug)]
#[non_exhaustive]
pub enum JournalError {
    /// A file or directory cannot be opened, read or made.
    File {
        /// Which.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Another master uses the directory.
    Locked {
        /// Which.
        dir: PathBuf,
    },
    /// A file is damaged before its end.
    Damaged {
        /// Which.
        path: PathBuf,
        /// Where the damage begins, bytes.
        offset: u64,
    },
    /// Commands are missing.
    Gap {
        /// The file that begins too late.
        path: PathBuf,
        /// The first command that is missing.
        from: Lsn,
        /// The last one.
        to: Lsn,
    },
    /// A file is of another store.
    Foreign {
        /// Which.
        path: PathBuf,
    },
    /// A file is of a release that executes commands differently.
    Release {
        /// Which.
        path: PathBuf,
        /// The version of its format.
        version: u16,
        /// Its behaviour, see [`store_core::command_log::BEHAVIOUR`].
        behaviour: u32,
    },
    /// There are files of a journal, and no snapshot to begin with.
    NoSnapshot {
        /// One of these files.
        path: PathBuf,
    },
    /// The snapshot is not usable.
    Snapshot {
        /// Which.
        path: PathBuf,
        /// Why.
        error: SnapshotError<io::Error>,
    },
    /// A command cannot be repeated.
    Command {
        /// The file with it.
        path: PathBuf,
        /// The last command before the record that it is in.
        after: Lsn,
        /// Why.
        error: CommandError,
    },
    /// A setting is refused.
    Config(store_core::ConfigError),
    /// Writing to a file, or making it durable, has failed.
    Write {
        /// Which.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ELSE: &str =
            "restore the directory from a copy, or begin with an empty one: then the store is empty";
        match self {
            Self::File { path, source } => {
                write!(f, "the journal's {} cannot be used: {source}", path.display())
            }
            Self::Locked { dir } => write!(
                f,
                "another master uses the journal in {}: stop it, or choose another directory",
                dir.display()
            ),
            Self::Damaged { path, offset } => {
                write!(f, "{} is damaged at byte {offset}, and commands follow: {ELSE}", path.display())
            }
            Self::Gap { path, from, to } => {
                write!(f, "the commands {from} to {to} are missing before {}: {ELSE}", path.display())
            }
            Self::Foreign { path } => {
                write!(f, "{} belongs to another store than the snapshot: {ELSE}", path.display())
            }
            Self::Release { path, version, behaviour } => write!(
                f,
                "{} is of a release with format {version} and behaviour {behaviour}: start that release, or begin \
                 with an empty directory: then the store is empty",
                path.display()
            ),
            Self::NoSnapshot { path } => {
                write!(f, "there is {}, and no snapshot to begin with: {ELSE}", path.display())
            }
            Self::Snapshot { path, error } => write!(f, "{}: {error}. {ELSE}", path.display()),
            Self::Command { path, after, error } => {
                write!(f, "{} after command {after}: {error}. {ELSE}", path.display())
            }
            Self::Config(error) => error.fmt(f),
            Self::Write { path, source } => write!(
                f,
                "the journal cannot be written to {}: {source}. The master stops, because it cannot keep what it \
                 would acknowledge: check the disk and the space on it, and start the master again",
                path.display()
            ),
        }
    }
}

impl std::error::Error for JournalError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::File { source, .. } | Self::Write { source, .. } => Some(source),
            Self::Snapshot { error, .. } => Some(error),
            Self::Command { error, .. } => Some(error),
            Self::Config(error) => Some(error),
            _ => None,
        }
    }
}
