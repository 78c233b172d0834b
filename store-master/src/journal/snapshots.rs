//! Snapshots on disk. The serving thread produces one in one go; another thread writes it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use store_core::command_log::{Lsn, Recorder};
use store_core::{Master, Session};
use tracing::warn;

use super::files::{snapshot_name, sync_dir};
use super::writer::lock;
use super::{FILE_MODE, JournalError, TERM, crc32c};

/// The ending of the name of a file that is not finished.
pub(super) const UNFINISHED: &str = "new";
/// Chunks that may wait for the disk: 64 MiB.
const CHUNKS_MAX: usize = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Snapshots {
    dir: PathBuf,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// The latest one, which the caller has not learned of.
    finished: Option<Lsn>,
    stats: SnapshotStats,
}

/// Counters, and gauges of the latest snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SnapshotStats {
    pub(crate) taken_total: u64,
    pub(crate) failed_total: u64,
    /// Its length, bytes.
    pub(crate) bytes: u64,
    /// How long the serving thread stood still for it, seconds.
    pub(crate) pause_s: f64,
    /// How long it took until it was on disk, seconds.
    pub(crate) took_s: f64,
}

impl Snapshots {
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.into(), state: Arc::default() }
    }

    pub(super) fn is_busy(&self) -> bool {
        lock(&self.state).busy
    }

    /// The position of a snapshot that is on disk, once.
    pub(super) fn finished(&self) -> Option<Lsn> {
        lock(&self.state).finished.take()
    }

    pub(super) fn stats(&self) -> SnapshotStats {
        lock(&self.state).stats
    }

    /// Takes a snapshot before the master serves, and waits for the disk.
    pub(super) fn write_now(&self, master: &Master, recorder: &Recorder) -> Result<(), JournalError> {
        let began = Instant::now();
        let mut file = Unfinished::create(&self.dir, recorder.lsn())?;
        let none = std::iter::empty();
        let sink = &mut |chunk: &[u8]| file.file.write_all(chunk);
        let written = recorder.snapshot(master, none, TERM, crc32c, sink).map_err(|error| {
            JournalError::Write { path: self.dir.clone(), source: io::Error::other(error.to_string()) }
        })?;
        file.finish()?;
        let stats = &mut lock(&self.state).stats;
        stats.taken_total += 1;
        (stats.bytes, stats.took_s) = (written.bytes, began.elapsed().as_secs_f64());
        Ok(())
    }

    /// Takes a snapshot; it is on disk when [`Self::finished`] says so.
    pub(super) fn begin<'a>(
        &self,
        master: &Master,
        recorder: &Recorder,
        sessions: impl Iterator<Item = &'a Session>,
    ) -> Result<(), JournalError> {
        let began = Instant::now();
        let lsn = recorder.lsn();
        let file = Unfinished::create(&self.dir, lsn)?;
        let (sender, receiver) = sync_channel(CHUNKS_MAX);
        let (used, reused) = channel();
        let state = Arc::clone(&self.state);
        lock(&self.state).busy = true;
        let thread = thread::Builder::new().name("snowskin-snapshot".into()).spawn(move || {
            let done = file.write(&receiver, &used);
            let mut state = lock(&state);
            state.busy = false;
            match done {
                Ok(()) => {
                    state.finished = Some(lsn);
                    state.stats.taken_total += 1;
                    state.stats.took_s = began.elapsed().as_secs_f64();
                }
                Err(error) => {
                    state.stats.failed_total += 1;
                    warn!(%error, "a snapshot was not written: the journal grows until the next one");
                }
            }
        });
        if let Err(source) = thread {
            lock(&self.state).busy = false;
            return Err(JournalError::File { path: self.dir.clone(), source });
        }
        let sink = &mut |chunk: &[u8]| {
            // Memory that was used before is faster than fresh memory, which the system has to clear.
            let mut buffer: Vec<u8> = reused.try_recv().unwrap_or_default();
            buffer.clear();
            buffer.extend_from_slice(chunk);
            sender.send(Part::Chunk(buffer)).map_err(|_| "writing failed")
        };
        // When it fails the other thread says why, and finds that the end is missing.
        if let Ok(written) = recorder.snapshot(master, sessions, TERM, crc32c, sink) {
            let _ = sender.send(Part::End);
            let stats = &mut lock(&self.state).stats;
            (stats.bytes, stats.pause_s) = (written.bytes, began.elapsed().as_secs_f64());
        }
        Ok(())
    }
}

enum Part {
    Chunk(Vec<u8>),
    End,
}

/// A file that gets its name when it is complete.
struct Unfinished {
    dir: PathBuf,
    path: PathBuf,
    lsn: Lsn,
    file: File,
}

impl Unfinished {
    fn create(dir: &Path, lsn: Lsn) -> Result<Self, JournalError> {
        let path = dir.join(snapshot_name(lsn)).with_extension(UNFINISHED);
        let file = File::options().write(true).create(true).truncate(true).mode(FILE_MODE).open(&path);
        match file {
            Ok(file) => Ok(Self { dir: dir.into(), path, lsn, file }),
            Err(source) => Err(JournalError::File { path, source }),
        }
    }

    /// Writes the parts that arrive, and gives their buffers back.
    fn write(mut self, parts: &Receiver<Part>, used: &Sender<Vec<u8>>) -> Result<(), JournalError> {
        loop {
            let written = match parts.recv() {
                Ok(Part::Chunk(chunk)) => {
                    let written = self.file.write_all(&chunk);
                    let _ = used.send(chunk);
                    written
                }
                Ok(Part::End) => return self.finish(),
                Err(_) => Err(io::Error::other("the snapshot was not completed")),
            };
            if let Err(source) = written {
                let _ = fs::remove_file(&self.path);
                return Err(JournalError::File { path: self.path, source });
            }
        }
    }

    fn finish(self) -> Result<(), JournalError> {
        let Self { dir, path, lsn, file } = self;
        let finish = || {
            file.sync_all()?;
            fs::rename(&path, dir.join(snapshot_name(lsn)))?;
            sync_dir(&dir)
        };
        finish().map_err(|source| JournalError::File { path: path.clone(), source })
    }
}
