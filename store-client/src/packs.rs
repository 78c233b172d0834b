//! Reads of packs by clients: straight from the files, without their node.
//!
//! ```text
//!   the client's thread ── want ──▶ a bounded queue ──▶ a few threads ── open, pread ──▶ the mounted directory
//!                       ◀── image, or why not ─────────┘
//! ```
//!
//! A file system that does not answer holds a thread, never the client: what has not come by the deadline is
//! a miss. The image is verified as everything that is read. From packs in a bucket the same threads read,
//! with a request for each image.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::direct::NotDirect;
use crate::disk::{AlignedBuffer, BucketAddress, PackNames};

#[cfg(feature = "s3")]
mod bucket;
#[cfg(not(feature = "s3"))]
#[path = "packs/no_bucket.rs"]
mod bucket;

use bucket::Buckets;

/// Threads at most; they are started when there is something to read.
const THREADS_MAX: usize = 8;
/// Reads that wait at most.
const QUEUE_MAX: usize = 4_096;
/// Packs that a thread keeps open, and for how long.
const FILES_MAX: usize = 16;
const FILE_FRESH: Duration = Duration::from_secs(5);
/// Where buckets can be read, TLS is in the frames of a thread.
const STACK_BYTES: usize = if cfg!(feature = "s3") { 1 << 20 } else { 128 << 10 };

/// An object in a pack.
#[derive(Clone, Debug)]
pub(crate) struct PackRead {
    /// Comes back with the end.
    pub(crate) id: u64,
    pub(crate) directory: Arc<Path>,
    pub(crate) sequence: u64,
    pub(crate) offset: u64,
    /// Bytes of the image.
    pub(crate) bytes: usize,
}

/// Why an image was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotRead {
    /// The directory is not mounted here, or the bucket cannot be reached from here.
    NotMounted,
    /// The directory is there, and the pack is not.
    Vanished,
    /// The pack ends before the image does.
    Short,
    /// The file system or the store reports an error; or a bucket has no such pack, which may not be closed
    /// yet.
    Failed,
    /// An object on an exported disk was not read there ([`crate::direct`]).
    #[cfg_attr(not(feature = "nvmeof"), allow(dead_code, reason = "for the reader of namespaces"))]
    Direct(NotDirect),
}

pub(crate) type PackEnd = (u64, Result<AlignedBuffer, NotRead>);

/// The threads of a client that read packs.
pub(crate) struct PackReader {
    shared: Arc<Shared>,
    sender: Sender<PackEnd>,
    ended: Receiver<PackEnd>,
    threads: usize,
    in_flight: usize,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    buckets: Buckets,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<PackRead>,
    idle: usize,
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PackReader {
    pub(crate) fn new() -> Self {
        let (sender, ended) = channel();
        Self { shared: Arc::default(), sender, ended, threads: 0, in_flight: 0 }
    }

    /// Reads an image. Returns whether it was accepted.
    pub(crate) fn want(&mut self, read: PackRead) -> bool {
        let mut queue = self.shared.lock();
        if queue.waiting.len() >= QUEUE_MAX {
            return false;
        }
        let start = queue.idle <= queue.waiting.len() && self.threads < THREADS_MAX;
        queue.waiting.push_back(read);
        drop(queue);
        if start {
            let (shared, sender) = (Arc::clone(&self.shared), self.sender.clone());
            let thread = std::thread::Builder::new().name("snowskin-packs".into()).stack_size(STACK_BYTES);
            match thread.spawn(move || serve(&shared, &sender)) {
                Ok(_) => self.threads += 1,
                Err(error) if self.threads == 0 => {
                    log::warn!("packs cannot be read: no thread: {error}");
                    self.shared.lock().waiting.clear();
                    return false;
                }
                Err(_) => {}
            }
        }
        self.shared.wake.notify_one();
        self.in_flight += 1;
        true
    }

    /// Where another reader sends the end of one read, which is waited for with those of packs.
    pub(crate) fn lend(&mut self) -> Sender<PackEnd> {
        self.in_flight += 1;
        self.sender.clone()
    }

    /// A read that was to be sent elsewhere was not.
    pub(crate) const fn take_back(&mut self) {
        self.in_flight -= 1;
    }

    /// The next read that has ended.
    pub(crate) fn poll(&mut self) -> Option<PackEnd> {
        let end = self.ended.try_recv().ok()?;
        self.in_flight -= 1;
        Some(end)
    }

    /// Waits for the next end, at most until then.
    pub(crate) fn wait(&mut self, until: Instant) -> Option<PackEnd> {
        let left = until.saturating_duration_since(Instant::now());
        let end = self.ended.recv_timeout(left).ok()?;
        self.in_flight -= 1;
        Some(end)
    }

    /// Whether nothing is being read.
    #[cfg(test)]
    pub(crate) const fn is_idle(&self) -> bool {
        self.in_flight == 0
    }
}

impl Drop for PackReader {
    /// Threads that a file system holds end when it lets them go.
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        (queue.closed, queue.waiting) = (true, VecDeque::new());
        drop(queue);
        self.shared.wake.notify_all();
    }
}

fn serve(shared: &Shared, ended: &Sender<PackEnd>) {
    let mut files = Files::default();
    loop {
        let mut queue = shared.lock();
        let read = loop {
            if queue.closed {
                return;
            }
            if let Some(read) = queue.waiting.pop_front() {
                break read;
            }
            queue.idle += 1;
            let (woken, timeout) =
                shared.wake.wait_timeout(queue, FILE_FRESH).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if timeout.timed_out() {
                // Packs that were given up take no room any longer.
                files.0.clear();
            }
        };
        drop(queue);
        let image = match BucketAddress::is_meant(&read.directory) {
            true => shared.buckets.read(&read),
            false => files.read(&read),
        };
        if ended.send((read.id, image)).is_err() {
            return;
        }
    }
}

/// Packs that are open. They do not change, so that an open one is as good as one that is opened anew.
#[derive(Default)]
struct Files(VecDeque<(PathBuf, File, Instant)>);

impl Files {
    fn read(&mut self, read: &PackRead) -> Result<AlignedBuffer, NotRead> {
        let path = PackNames::pack(&read.directory, read.sequence);
        self.0.retain(|(.., at)| at.elapsed() < FILE_FRESH);
        if let Some((_, file, _)) = self.0.iter().find(|(known, ..)| *known == path)
            && let Ok(image) = image(file, read)
        {
            return Ok(image);
        }
        self.0.retain(|(known, ..)| *known != path);
        let open = PackNames::open(&read.directory, read.sequence);
        let dead = PackNames::dead(&read.directory, read.sequence);
        // Its owner may rename it between two tries.
        for (name, is_pack) in [(&path, true), (&open, false), (&path, true), (&dead, false)] {
            match File::open(name) {
                Ok(file) => {
                    let image = image(&file, read);
                    if is_pack {
                        if self.0.len() >= FILES_MAX {
                            self.0.pop_front();
                        }
                        self.0.push_back((path.clone(), file, Instant::now()));
                    }
                    return image;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    log::debug!("{}: {error}", name.display());
                    return Err(NotRead::Failed);
                }
            }
        }
        let there = PackNames::superblock(&read.directory).is_file();
        Err(if there { NotRead::Vanished } else { NotRead::NotMounted })
    }
}

fn image(file: &File, read: &PackRead) -> Result<AlignedBuffer, NotRead> {
    let mut image = AlignedBuffer::new(read.bytes);
    match file.read_exact_at(&mut image, read.offset) {
        Ok(()) => Ok(image),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(NotRead::Short),
        Err(error) => {
            log::debug!("{}: {error}", read.directory.display());
            Err(NotRead::Failed)
        }
    }
}

/// Where this host has the directory that a node names, below another root: the last two parts of the path
/// are the cluster and the name of the directory.
pub(crate) fn below(root: &Path, named: &str) -> Option<PathBuf> {
    let mut parts = Path::new(named).components().rev();
    let (uuid, cluster) = (parts.next()?, parts.next()?);
    let is_name = |part: &std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
    (is_name(&uuid) && is_name(&cluster)).then(|| root.join(cluster).join(uuid))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn read(
        reader: &mut PackReader,
        directory: &Path,
        sequence: u64,
        offset: u64,
        bytes: usize,
    ) -> Result<Vec<u8>, NotRead> {
        assert!(reader.want(PackRead { id: 7, directory: directory.into(), sequence, offset, bytes }));
        let (id, image) = reader.wait(Instant::now() + Duration::from_secs(20)).unwrap();
        assert_eq!((id, reader.is_idle()), (7, true));
        image.map(|image| image.to_vec())
    }

    #[test]
    fn an_image_is_found_under_every_name_and_what_is_missing_is_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path();
        let mut reader = PackReader::new();
        assert_eq!(read(&mut reader, directory, 1, 0, 4), Err(NotRead::NotMounted));
        std::fs::write(PackNames::superblock(directory), b"there").unwrap();
        assert_eq!(read(&mut reader, directory, 1, 0, 4), Err(NotRead::Vanished));
        std::fs::write(PackNames::open(directory, 1), b"01234567").unwrap();
        assert_eq!(read(&mut reader, directory, 1, 2, 4), Ok(b"2345".to_vec()));
        std::fs::rename(PackNames::open(directory, 1), PackNames::pack(directory, 1)).unwrap();
        assert_eq!(read(&mut reader, directory, 1, 0, 8), Ok(b"01234567".to_vec()));
        assert_eq!(read(&mut reader, directory, 1, 2, 8), Err(NotRead::Short));
        std::fs::rename(PackNames::pack(directory, 1), PackNames::dead(directory, 1)).unwrap();
        assert_eq!(read(&mut reader, directory, 1, 4, 4), Ok(b"4567".to_vec()));
    }

    #[test]
    fn a_directory_is_found_below_another_root() {
        let of = |named| below(Path::new("/here"), named);
        assert_eq!(of("/there/kv/blue/0123"), Some("/here/blue/0123".into()));
        assert_eq!(of("blue/0123"), Some("/here/blue/0123".into()));
        for odd in ["/0123", "0123", "", "/a/../b", "/a/b/.."] {
            assert_eq!(of(odd), None, "{odd}");
        }
    }
}
