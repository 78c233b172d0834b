//! Whether a directory of packs has room for what is written to it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::disk::sys;

/// How long nothing is written after a write found no room.
const PAUSE: Duration = Duration::from_secs(10);
/// How long an answer of the file system counts.
const FRESH: Duration = Duration::from_secs(1);

/// When a write found no room.
#[derive(Debug, Default)]
pub(super) struct Fullness(Mutex<Option<Instant>>);

impl Fullness {
    pub(super) fn note(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn is_recent(&self) -> bool {
        let at = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        at.is_some_and(|at| at.elapsed() < PAUSE)
    }
}

/// The room of a directory of packs. Others fill the same file system, so it is asked before objects are
/// taken; a quota shows only when a write fails.
#[derive(Clone, Debug)]
pub struct Room(Of);

#[derive(Clone, Debug)]
enum Of {
    Directory {
        directory: PathBuf,
        full: Arc<Fullness>,
        /// Bytes that have to be free.
        wanted: u64,
        known: Option<(Instant, bool)>,
    },
    /// Of a bucket: there is room where what was written before is in it.
    #[cfg(feature = "s3")]
    Spool(Arc<super::bucket::Spool>),
}

impl Room {
    pub(super) const fn of_directory(directory: PathBuf, full: Arc<Fullness>, wanted: u64) -> Self {
        Self(Of::Directory { directory, full, wanted, known: None })
    }

    #[cfg(feature = "s3")]
    pub(super) const fn of_spool(spool: Arc<super::bucket::Spool>) -> Self {
        Self(Of::Spool(spool))
    }

    /// Whether objects should be written now.
    pub fn is_there(&mut self) -> bool {
        match &mut self.0 {
            #[cfg(feature = "s3")]
            Of::Spool(spool) => spool.has_room(),
            Of::Directory { full, .. } if full.is_recent() => false,
            Of::Directory { known: Some((at, there)), .. } if at.elapsed() < FRESH => *there,
            Of::Directory { directory, wanted, known, .. } => {
                // A file system that does not say is tried.
                let there = sys::free_bytes(directory).is_none_or(|free| free >= *wanted);
                *known = Some((Instant::now(), there));
                there
            }
        }
    }
}
