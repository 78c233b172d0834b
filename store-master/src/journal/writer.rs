//! The thread that writes the journal: what has gathered while the disk was busy is written at once.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use mio::Waker;
use store_core::Times;
use store_core::command_log::Lsn;

use super::files::{Listing, header, journal_name, push_record, sync_dir};
use super::{FILE_MODE, JournalError};

/// A file that is longer is not continued, bytes.
const FILE_BYTES: u64 = 64 << 20;
/// Memory that the buffer for a record keeps, bytes.
const KEEP_BYTES: usize = 4 << 20;

/// The writer, for the serving thread. Dropping it ends the thread, after what was submitted is on disk.
#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What both threads use.
#[derive(Debug)]
pub(super) struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    /// Every command up to this one is on disk.
    durable: AtomicU64,
    /// Bytes that were written.
    bytes: AtomicU64,
    records: AtomicU64,
    syncs: Mutex<Times>,
    failed: Mutex<Option<JournalError>>,
}

#[derive(Debug, Default)]
struct Queue {
    commands: Vec<u8>,
    after: Lsn,
    last: Lsn,
    /// The next command begins another file.
    rotate: bool,
    /// Files that only have commands up to this one are not needed.
    prune: Option<Lsn>,
    stop: bool,
}

/// A copy of the counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriterStats {
    pub(crate) durable: Lsn,
    pub(crate) bytes: u64,
    pub(crate) records: u64,
    pub(crate) syncs: Times,
}

impl Writer {
    /// Begins a file after command `lsn`, and a thread that continues it.
    pub(super) fn start(dir: &Path, lineage: u64, lsn: Lsn, waker: Arc<Waker>) -> Result<Self, JournalError> {
        let file = Current::begin(dir, lineage, lsn)?;
        Self::with_file(file, lsn, waker).map_err(|source| JournalError::File { path: dir.into(), source })
    }

    fn with_file(mut file: Current, lsn: Lsn, waker: Arc<Waker>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue { after: lsn, last: lsn, ..Queue::default() }),
            more: Condvar::new(),
            durable: AtomicU64::new(lsn),
            bytes: AtomicU64::new(0),
            records: AtomicU64::new(0),
            syncs: Mutex::new(Times::default()),
            failed: Mutex::new(None),
        });
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new().name("snowskin-journal".into()).spawn(move || {
            if let Err(error) = theirs.write(&mut file, &waker) {
                // Nothing that was not confirmed is confirmed from here on: after a failed sync the system
                // may have dropped what it did not write, and a later sync would not say so.
                *lock(&theirs.failed) = Some(error);
                let _ = waker.wake();
            }
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Adds commands that follow those before; `last` is the last of them.
    pub(super) fn submit(&self, commands: Vec<u8>, last: Lsn) {
        let mut queue = lock(&self.shared.queue);
        if queue.commands.is_empty() {
            queue.commands = commands;
        } else {
            queue.commands.extend_from_slice(&commands);
        }
        queue.last = last;
        self.shared.more.notify_one();
    }

    /// Begins another file with the next command.
    pub(super) fn rotate(&self) {
        lock(&self.shared.queue).rotate = true;
        self.shared.more.notify_one();
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Every command up to this one is on disk.
    pub(super) fn durable(&self) -> Lsn {
        self.shared.durable.load(Ordering::Acquire)
    }

    /// Why nothing is written any more.
    pub(super) fn failure(&self) -> Option<JournalError> {
        lock(&self.shared.failed).take()
    }

    pub(super) fn stats(&self) -> WriterStats {
        WriterStats {
            durable: self.durable(),
            bytes: self.shared.bytes(),
            records: self.shared.records.load(Ordering::Relaxed),
            syncs: *lock(&self.shared.syncs),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        lock(&self.shared.queue).stop = true;
        self.shared.more.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Bytes that were written.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// A snapshot of the state after `lsn` is on disk.
    pub(super) fn prune(&self, lsn: Lsn) {
        lock(&self.queue).prune = Some(lsn);
        self.more.notify_one();
    }

    fn write(&self, file: &mut Current, waker: &Waker) -> Result<(), JournalError> {
        let mut record = Vec::new();
        loop {
            let (commands, after, last, rotate, prune) = {
                let mut queue = lock(&self.queue);
                while queue.commands.is_empty() && !queue.rotate && queue.prune.is_none() {
                    if queue.stop {
                        return Ok(());
                    }
                    queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
                let Queue { commands, after, last, rotate, prune, .. } = &mut *queue;
                let taken = (std::mem::take(commands), *after, *last);
                *after = *last;
                (taken.0, taken.1, taken.2, std::mem::take(rotate), prune.take())
            };
            if !commands.is_empty() {
                record.clear();
                push_record(&mut record, after, last, &commands);
                let began = Instant::now();
                file.append(&record)?;
                let took = began.elapsed();
                lock(&self.syncs).record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
                self.bytes.fetch_add(record.len() as u64, Ordering::Relaxed);
                self.records.fetch_add(1, Ordering::Relaxed);
                self.durable.store(last, Ordering::Release);
                // Waking fails only when the poller is gone, and then nothing waits.
                let _ = waker.wake();
                record.shrink_to(KEEP_BYTES);
            }
            if rotate || file.len > FILE_BYTES {
                *file = Current::begin(&file.dir, file.lineage, last)?;
            }
            if let Some(lsn) = prune {
                file.prune(lsn);
            }
        }
    }
}

/// The file that is being written.
#[derive(Debug)]
struct Current {
    dir: PathBuf,
    path: PathBuf,
    lineage: u64,
    file: File,
    len: u64,
}

impl Current {
    fn begin(dir: &Path, lineage: u64, after: Lsn) -> Result<Self, JournalError> {
        let path = dir.join(journal_name(after));
        let begin = || {
            // One with this name has no whole record: every record of it would have been repeated.
            let mut file =
                File::options().write(true).create(true).truncate(true).mode(FILE_MODE).open(&path)?;
            file.write_all(&header(lineage, after))?;
            file.sync_all()?;
            sync_dir(dir)?;
            Ok(file)
        };
        match begin() {
            Ok(file) => Ok(Self { dir: dir.into(), path, lineage, file, len: 0 }),
            Err(source) => Err(JournalError::File { path, source }),
        }
    }

    fn append(&mut self, record: &[u8]) -> Result<(), JournalError> {
        self.len += record.len() as u64;
        let written = self.file.write_all(record).and_then(|()| self.file.sync_data());
        written.map_err(|source| JournalError::Write { path: self.path.clone(), source })
    }

    /// Removes files whose commands are all in a snapshot of the state after `lsn`, and older snapshots. What
    /// cannot be removed is tried again after the next snapshot.
    fn prune(&self, lsn: Lsn) {
        let Ok(listing) = Listing::of(&self.dir) else { return };
        let old = |pair: &&[(Lsn, PathBuf)]| pair[1].0 <= lsn;
        let journals = listing.journals.windows(2).filter(old).map(|pair| &pair[0].1);
        let snapshots = listing.snapshots.iter().filter(|(of, _)| *of < lsn).map(|(_, path)| path);
        for path in journals.chain(snapshots) {
            if let Err(error) = fs::remove_file(path) {
                let path = path.display();
                tracing::warn!(%error, %path, "a file that the journal does not need cannot be removed");
            }
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use mio::{Poll, Token};
    use te_fabric::testkit::eventually;

    use super::*;

    #[test]
    fn when_the_disk_is_full_nothing_is_confirmed_any_more_and_the_error_says_so() {
        let poll = Poll::new().unwrap();
        let waker = Arc::new(Waker::new(poll.registry(), Token(0)).unwrap());
        let path = PathBuf::from("/dev/full");
        let file = File::options().write(true).open(&path).unwrap();
        let file = Current { dir: "/dev".into(), path, lineage: 1, file, len: 0 };
        let writer = Writer::with_file(file, 7, waker).unwrap();
        writer.submit(vec![1, 2, 3], 8);
        let mut failure = None;
        eventually("the writer fails", || {
            failure = writer.failure();
            failure.is_some()
        });
        let failure = failure.unwrap().to_string();
        assert!(failure.contains("/dev/full") && failure.contains("No space"), "{failure}");
        assert_eq!(writer.durable(), 7);
        // What comes later is not written either.
        writer.submit(vec![1], 9);
        drop(poll);
        let shared = Arc::clone(writer.shared());
        drop(writer);
        assert_eq!(shared.durable.load(Ordering::Acquire), 7);
    }
}
