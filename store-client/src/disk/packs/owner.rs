//! Who writes to a directory of packs, and that no other process does.
//!
//! Three things keep a second writer out, each for a case that the others do not cover:
//!
//! * a lock of the file `lock` (`flock`), which the kernel releases with the process: two nodes on one host,
//!   and on every file system that carries locks between hosts (NFS 4);
//! * the master, which mounts a directory for one node that is alive at a time: where the file system does
//!   not carry locks. A directory is *taken* after the master has agreed, and not before;
//! * the token in the file `owner`: who has taken the directory last. An owner that was given up by the
//!   master while it was stopped reads it before each step that changes names, and then writes nothing more.
//!
//! One step of such an owner may have been under way. It cannot do harm: see [`super`].

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::names::{LOCK, OWNER};
use crate::disk::error::DiskError;

/// How often a lock is tried, and the time between two tries: others look for a moment only.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);
/// Ranges of sequences that are void; beyond this the oldest are dropped.
const VOID_MAX: usize = 256;
/// Longest file that is read.
pub(super) const BYTES_MAX: u64 = 64 << 10;

/// What the file `owner` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner {
    /// The name of the node.
    pub(super) node: String,
    /// Random, another one each time that the directory is taken.
    pub(super) token: String,
    /// Sequences that no owner has used by the time that the directory was taken from it: files with these
    /// were written too late, and do not count.
    pub(super) void: Vec<Range<u64>>,
    /// In a bucket: former tokens. What was put with these counts as long as it was not put anew.
    pub(super) before: Vec<String>,
}

impl Owner {
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let mut text = String::new();
        File::open(directory.join(OWNER))?.take(BYTES_MAX).read_to_string(&mut text)?;
        Ok(Self::parse(&text))
    }

    pub(super) fn parse(text: &str) -> Self {
        let mut owner = Self::default();
        for line in text.lines() {
            let Some((name, value)) = line.trim_end_matches('\r').split_once('=') else { continue };
            match name {
                "node" => value.clone_into(&mut owner.node),
                "token" => value.clone_into(&mut owner.token),
                "before" => owner.before.push(value.to_owned()),
                "void" => {
                    let range = value
                        .split_once('-')
                        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
                    owner.void.extend(range);
                }
                _ => {}
            }
        }
        owner
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("node={}\ntoken={}\npid={}\n", self.node, self.token, std::process::id());
        for range in &self.void {
            text.push_str(&format!("void={}-{}\n", range.start, range.end));
        }
        for token in &self.before {
            text.push_str(&format!("before={token}\n"));
        }
        text
    }

    /// Replaces the file.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        let path = directory.join(format!("{OWNER}.{}", self.token));
        let mut file = File::create(&path)?;
        file.write_all(self.text().as_bytes())?;
        file.sync_all()?;
        fs::rename(&path, directory.join(OWNER))
    }

    /// Whether a file with this sequence does not count.
    pub(super) fn is_void(&self, sequence: u64) -> bool {
        self.void.iter().any(|range| range.contains(&sequence))
    }

    /// Files with these sequences do not count from now on. `oldest`: no file has a lower sequence.
    pub(super) fn add_void(&mut self, range: Range<u64>, oldest: u64) {
        // The new one is the last to be dropped, also where it was known.
        self.void.retain(|known| known.end > oldest && *known != range);
        if !range.is_empty() {
            self.void.push(range);
        }
        let excess = self.void.len().saturating_sub(VOID_MAX);
        self.void.drain(..excess);
    }

    /// The directory is taken: what was reserved and is not `found` is void. No sequence from `end` on was
    /// ever reserved, so that a file with such a name says nothing.
    pub(super) fn void_unused(&mut self, found: &BTreeSet<u64>, end: u64) {
        let oldest = found.range(..end).next().copied().unwrap_or(end);
        let unused = found.range(..end).next_back().map_or(1, |last| last + 1);
        self.add_void(unused..end.max(unused), oldest);
    }

    /// Who that is, for people.
    pub(super) fn name(&self) -> String {
        if self.node.is_empty() { "an unknown node".to_owned() } else { format!("node {}", self.node) }
    }
}

/// The lock of a directory, until it is dropped.
#[derive(Debug)]
pub(super) struct Lock(#[expect(dead_code, reason = "the lock ends with the file")] File);

impl Lock {
    /// Locks a directory.
    ///
    /// # Errors
    /// `Owned` with the name of the node that has it.
    pub(super) fn take(directory: &Path) -> Result<Self, DiskError> {
        let path = directory.join(LOCK);
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(|error| DiskError::io(&path, "open", error))?;
        for tries in 1.. {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if tries < TRIES => std::thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return Err(owned(directory)),
                Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                    log::warn!(
                        "{}: this file system has no locks ({error}): only the master keeps a second writer out",
                        directory.display()
                    );
                    break;
                }
                Err(TryLockError::Error(error)) => return Err(DiskError::io(&path, "lock", error)),
            }
        }
        Ok(Self(file))
    }

    /// Whether no process has locked a directory, as far as the file system says.
    pub(super) fn is_free(directory: &Path) -> bool {
        let Ok(file) = File::open(directory.join(LOCK)) else { return false };
        match file.try_lock_shared() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(error)) => is_unsupported(&error),
        }
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL))
}

fn owned(directory: &Path) -> DiskError {
    let by = Owner::read(directory).unwrap_or_default().name();
    DiskError::Owned { path: PathBuf::from(directory), by }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_read_as_it_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let mut owner = Owner { node: "a b".into(), token: "0123".into(), ..Owner::default() };
        owner.before = vec!["4567".into(), "89ab".into()];
        owner.add_void(5..5, 0);
        assert!(owner.void.is_empty(), "nothing is void");
        owner.add_void(5..9, 0);
        owner.add_void(12..80, 3);
        owner.write(directory.path()).unwrap();
        assert_eq!(Owner::read(directory.path()).unwrap(), owner);
        assert!(owner.is_void(5) && owner.is_void(8) && !owner.is_void(9) && !owner.is_void(4));
        owner.add_void(100..101, 9);
        assert_eq!(owner.void, [12..80, 100..101], "files that are gone need no range");
        for at in 0..2 * VOID_MAX as u64 {
            owner.add_void(200 + at..201 + at, 0);
        }
        assert_eq!(owner.void.len(), VOID_MAX);
    }

    #[test]
    fn a_directory_is_locked_once_and_free_again() {
        let directory = tempfile::tempdir().unwrap();
        Owner { node: "first".into(), ..Owner::default() }.write(directory.path()).unwrap();
        let lock = Lock::take(directory.path()).unwrap();
        assert!(!Lock::is_free(directory.path()));
        let error = Lock::take(directory.path()).unwrap_err().to_string();
        assert!(error.contains("node first"), "{error}");
        drop(lock);
        assert!(Lock::is_free(directory.path()));
        Lock::take(directory.path()).unwrap();
    }
}
