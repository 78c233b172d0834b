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
pub struct Room {
    pub(super) directory: PathBuf,
    pub(super) full: Arc<Fullness>,
    /// Bytes that have to be free.
    pub(super) wanted: u64,
    pub(super) known: Option<(Instant, bool)>,
}

impl Room {
    /// Whether objects should be written now.
    pub fn is_there(&mut self) -> bool {
        if self.full.is_recent() {
            return false;
        }
        match self.known {
            Some((at, there)) if at.elapsed() < FRESH => there,
            _ => {
                // A file system that does not say is tried.
                let there = sys::free_bytes(&self.directory).is_none_or(|free| free >= self.wanted);
                self.known = Some((Instant::now(), there));
                there
            }
        }
    }
}
