//! Packs in buckets, as clients read them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{NotRead, PackRead};
use crate::disk::{AlignedBuffer, BucketAddress, BucketDirectory, BucketFault, pack_name};

/// Directories whose connections are kept.
const DIRECTORIES_MAX: usize = 256;
/// How long a pack that was not there is not asked for again, and how many are known: its node has it.
const ABSENT: Duration = Duration::from_secs(1);
const ABSENT_MAX: usize = 4_096;
/// Shortest time between two log lines.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// The buckets that this client reads from, with the settings of its environment.
#[derive(Default)]
pub(super) struct Buckets(Mutex<State>);

#[derive(Default)]
struct State {
    directories: HashMap<Arc<Path>, BucketDirectory>,
    absent: HashMap<(Arc<Path>, u64), Instant>,
    logged: Option<Instant>,
}

impl Buckets {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read(&self, read: &PackRead) -> Result<AlignedBuffer, NotRead> {
        let key = (Arc::clone(&read.directory), read.sequence);
        if self.lock().absent.get(&key).is_some_and(|at| at.elapsed() < ABSENT) {
            return Err(NotRead::Failed);
        }
        let image = self.directory(&read.directory).and_then(|directory| {
            let range = read.offset..read.offset + read.bytes as u64;
            let bytes = directory.read(&pack_name(read.sequence), range)?;
            let mut image = AlignedBuffer::new(read.bytes);
            image.copy_from_slice(bytes.as_ref());
            Ok(image)
        });
        image.map_err(|fault| {
            if fault == BucketFault::Missing {
                let absent = &mut self.lock().absent;
                if absent.len() >= ABSENT_MAX {
                    absent.retain(|_, at| at.elapsed() < ABSENT);
                }
                if absent.len() < ABSENT_MAX {
                    absent.insert(key, Instant::now());
                }
                return NotRead::Failed;
            }
            self.complain(&read.directory, &fault);
            match fault {
                BucketFault::Short { .. } => NotRead::Short,
                BucketFault::Slow | BucketFault::Timeout | BucketFault::Server(..) => NotRead::Failed,
                // Its node may have what this client has not.
                _ => NotRead::NotMounted,
            }
        })
    }

    fn directory(&self, path: &Arc<Path>) -> Result<BucketDirectory, BucketFault> {
        let mut state = self.lock();
        if let Some(known) = state.directories.get(path) {
            return Ok(known.clone());
        }
        let bucket = |path: &Path| BucketAddress::parse(path).map(|address| address.bucket).ok();
        let same = state.directories.iter().find(|(known, _)| bucket(known) == bucket(path));
        let directory = match same {
            Some((_, known)) => known.at(path)?,
            None => BucketDirectory::open(path)?,
        };
        if state.directories.len() >= DIRECTORIES_MAX {
            state.directories.clear();
        }
        state.directories.insert(Arc::clone(path), directory.clone());
        Ok(directory)
    }

    fn complain(&self, path: &Path, fault: &BucketFault) {
        let mut state = self.lock();
        if state.logged.is_none_or(|at| at.elapsed() >= LOG_PAUSE) {
            state.logged = Some(Instant::now());
            log::warn!("{}: cannot read a pack: {fault}", path.display());
        }
    }
}
