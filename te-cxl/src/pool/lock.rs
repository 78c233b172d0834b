//! Locks of the kernel on parts of a pool: how processes of one host know of each other whether they have
//! ended.
//!
//! A lock belongs to the open file that a mapping of the pool keeps open: it ends when the last mapping, and
//! the last descriptor, are gone, so no process that could store into the pool has it then. It says nothing
//! about other hosts, and nothing to a process that opened another node of the same device.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::fstat;
use sha2::{Digest, Sha256};

use super::{Pool, PoolError};

/// Where the locks of pages and of extents begin. No pool is so long.
const PAGES_AT: i64 = 1 << 60;
const EXTENTS_AT: i64 = 1 << 61;
/// Lets two boots of one kernel, and different kernels, differ.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// What is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The page of a peer.
    Page(u32),
    /// Extents: the first one, and their number.
    Extents(u32, u32),
}

impl Part {
    const fn lock(self, kind: i32) -> libc::flock {
        let (start, len) = match self {
            Self::Page(slot) => (PAGES_AT + slot as i64, 1),
            Self::Extents(first, count) => (EXTENTS_AT + first as i64, count as i64),
        };
        let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
        libc::flock { l_type, l_whence, l_start: start, l_len: len, l_pid: 0 }
    }
}

impl Pool {
    /// Takes the lock on a part, until the pool is not mapped here any more, or it is
    /// [unlocked](Self::unlock). Returns whether it is this mapping's: `false` when another process of this
    /// host has it, or another mapping of this process.
    ///
    /// # Errors
    /// `NoSuch`: nothing cannot be locked. `System`.
    pub fn lock(&self, part: Part) -> Result<bool, PoolError> {
        if let Part::Extents(first, 0) = part {
            return Err(PoolError::NoSuch { what: "extent", number: first.into(), count: 0 });
        }
        match fcntl(&self.file, FcntlArg::F_OFD_SETLK(&part.lock(libc::F_WRLCK))) {
            Ok(_) => {
                if let Part::Page(slot) = part {
                    self.pages_locked().insert(slot);
                }
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(errno) => Err(PoolError::system("lock a part of the pool", errno)),
        }
    }

    /// Gives the lock on a part back.
    ///
    /// # Errors
    /// `System`.
    pub fn unlock(&self, part: Part) -> Result<(), PoolError> {
        if let Part::Page(slot) = part {
            self.pages_locked().remove(&slot);
        }
        fcntl(&self.file, FcntlArg::F_OFD_SETLK(&part.lock(libc::F_UNLCK)))
            .map(|_| ())
            .map_err(|errno| PoolError::system("unlock a part of the pool", errno))
    }

    /// Whether another mapping has the lock on some of a part.
    ///
    /// # Errors
    /// `System`.
    pub fn is_locked(&self, part: Part) -> Result<bool, PoolError> {
        let mut lock = part.lock(libc::F_WRLCK);
        fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock))
            .map_err(|errno| PoolError::system("look for locks on the pool", errno))?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    /// A number that two processes share if they see each other's locks: a hash of the boot of the kernel and
    /// of the inode. It is not 0.
    ///
    /// # Errors
    /// `System`.
    pub fn lock_domain(&self) -> Result<u64, PoolError> {
        if self.domain != 0 { Ok(self.domain) } else { domain(&self.file) }
    }

    /// Whether this mapping has the lock on a page.
    pub(super) fn has_locked(&self, slot: u32) -> bool {
        self.pages_locked().contains(&slot)
    }

    fn pages_locked(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As [`Pool::lock_domain`].
pub(super) fn domain(file: &OwnedFd) -> Result<u64, PoolError> {
    let boot = std::fs::read(BOOT)
        .map_err(|source| PoolError::System { what: "read the number of this boot", source })?;
    let stat = fstat(file).map_err(|errno| PoolError::system("look at the pool", errno))?;
    let mut digest = Sha256::new();
    digest.update(boot);
    digest.update(stat.st_dev.to_le_bytes());
    digest.update(stat.st_ino.to_le_bytes());
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(digest.finalize());
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]).max(1))
}

/// The same open file once more.
pub(super) fn kept(file: &impl AsFd) -> Result<OwnedFd, PoolError> {
    let kept = file.as_fd().try_clone_to_owned();
    kept.map_err(|source| PoolError::System { what: "keep the pool open", source })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Coherence, FormatOptions};

    fn open(path: &std::path::Path) -> Arc<Pool> {
        Pool::open(path, Coherence::Hardware, None).unwrap()
    }

    #[test]
    fn a_lock_is_seen_by_other_mappings_of_the_same_file_and_ends_with_its_own() {
        let path = std::env::temp_dir().join(format!("snowskin-locks-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        Pool::format(&path, FormatOptions::default()).unwrap();
        let (ours, theirs) = (open(&path), open(&path));
        assert_eq!(ours.lock_domain().unwrap(), theirs.lock_domain().unwrap());
        for part in [Part::Page(3), Part::Extents(1, 2)] {
            assert!(ours.lock(part).unwrap() && ours.lock(part).unwrap());
            assert!(!theirs.lock(part).unwrap() && theirs.is_locked(part).unwrap());
            assert!(!ours.is_locked(part).unwrap(), "by another one");
        }
        assert!(theirs.lock(Part::Page(2)).unwrap() && theirs.lock(Part::Extents(3, 1)).unwrap());
        assert!(!theirs.lock(Part::Extents(0, 2)).unwrap(), "they overlap");
        assert!(matches!(ours.lock(Part::Extents(1, 0)), Err(PoolError::NoSuch { .. })));
        ours.unlock(Part::Page(3)).unwrap();
        assert!(theirs.lock(Part::Page(3)).unwrap());
        drop(ours);
        assert!(theirs.lock(Part::Extents(1, 2)).unwrap());

        let copy = path.with_extension("copy");
        std::fs::copy(&path, &copy).unwrap();
        assert_ne!(open(&copy).lock_domain().unwrap(), theirs.lock_domain().unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_file(&copy).unwrap();
    }
}
