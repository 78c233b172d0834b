//! A disk in a file of the temporary directory, and an owner that keeps the books.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use store_client::disk::{
    AlignedBuffer, Caching, Demote, DiskEvent, DiskFile, DiskOptions, DiskService, FormatOptions, Lent,
    NotDone, Stage, image_of, is_intact,
};
use store_core::disk::format::Stream;
use store_core::disk::{Adopted, DiskConfig, Removed};
use store_core::{bound, unbound};
use te_core::testkit::pattern;

pub(crate) const MIB: u64 = 1 << 20;
/// Longest time that anything may take here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// An object, and what the master keeps about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) generation: u64,
    pub(crate) seed: u64,
    pub(crate) len: u64,
    /// Bound to key and generation.
    pub(crate) checksum: u32,
    pub(crate) locator: u64,
}

/// A directory for disks: real storage, because many systems have memory in /tmp.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Direct I/O where the file system has it.
pub(crate) fn caching(path: &Path) -> Caching {
    let probe = path.parent().unwrap().join("probe");
    let options = FormatOptions { bytes: Some(16 * MIB), ..FormatOptions::default() };
    let direct = DiskFile::prepare(&probe, options).is_ok();
    let _ = std::fs::remove_file(&probe);
    if direct { Caching::Direct } else { Caching::Buffered }
}

pub(crate) fn options() -> DiskOptions {
    let mut options = DiskOptions::default();
    options.disk = DiskConfig { batch_wait_ms: 5, sync_wait_ms: 50, ..DiskConfig::default() };
    options
}

pub(crate) fn format(path: &Path, bytes: u64, extent_bytes: u32) -> DiskService {
    let wanted = FormatOptions {
        bytes: Some(bytes),
        extent_bytes: Some(extent_bytes),
        force: false,
        caching: caching(path),
    };
    let (file, geometry) = DiskFile::prepare(path, wanted).unwrap();
    DiskService::format(file, geometry, options(), 7).unwrap()
}

pub(crate) fn open(path: &Path) -> DiskService {
    let end = Instant::now() + PATIENCE;
    loop {
        // After a kill, the lock is held until the kernel has ended the operations of the process.
        match DiskFile::open(path, caching(path)) {
            Ok(file) => return DiskService::open(file, options(), 7).unwrap(),
            Err(store_client::disk::DiskError::InUse(_)) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5)); // timing: the lock is released soon
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A disk and the places on it.
pub(crate) struct Owner {
    pub(crate) disk: DiskService,
    pub(crate) places: BTreeMap<Box<[u8]>, Placed>,
    pub(crate) next: u64,
}

impl Owner {
    /// Waits until the disk is ready; takes what it announces.
    pub(crate) fn new(disk: DiskService) -> Self {
        let mut owner = Self { disk, places: BTreeMap::new(), next: 1 };
        loop {
            match owner.event() {
                DiskEvent::Adopt { objects, lineage: 7 } => owner.places.extend(Self::placed(objects)),
                DiskEvent::Ready => return owner,
                other => panic!("{other:?}"),
            }
        }
    }

    /// As [`Self::new`], of a disk on which a recovery may not trust anything.
    pub(crate) fn new_after_damage(disk: DiskService) -> Self {
        match disk.wait_event(PATIENCE).expect("the disk answers") {
            DiskEvent::Distrusted => Self::new(disk),
            DiskEvent::Ready => Self { disk, places: BTreeMap::new(), next: 1 },
            DiskEvent::Adopt { lineage: 7, objects } => {
                let first = Self::placed(objects);
                let mut owner = Self::new(disk);
                owner.places.extend(first);
                owner
            }
            other => panic!("{other:?}"),
        }
    }

    fn placed(objects: Vec<Adopted>) -> BTreeMap<Box<[u8]>, Placed> {
        let placed = |adopted: Adopted| {
            let Removed { generation, key, .. } = adopted.object;
            let checksum = bound(adopted.crc32c, &key, generation);
            let (len, locator) = (adopted.len.into(), adopted.locator);
            (key, Placed { generation, seed: generation, len, checksum, locator })
        };
        objects.into_iter().map(placed).collect()
    }

    /// The next event; reclaims are answered at once.
    pub(crate) fn event(&mut self) -> DiskEvent {
        loop {
            match self.disk.wait_event(PATIENCE).expect("the disk answers") {
                DiskEvent::Reclaim { sequence } => {
                    let extent_bytes = u64::from(self.disk.stats().geometry.extent_bytes());
                    self.places.retain(|_, placed| placed.locator / extent_bytes != sequence);
                    self.disk.reclaimed(sequence).unwrap();
                }
                event => return event,
            }
        }
    }

    /// Demotes an object whose bytes follow from its generation.
    pub(crate) fn demote(&mut self, key: &str, len: u64) {
        let generation = self.next;
        self.next += 1;
        let (crc32c, source) = image_of(&pattern(generation, len as usize));
        let key: Box<[u8]> = key.as_bytes().into();
        let checksum = bound(crc32c, &key, generation);
        let placed = Placed { generation, seed: generation, len, checksum, locator: u64::MAX };
        self.places.insert(key.clone(), placed);
        let stream = if generation.is_multiple_of(3) { Stream::Proven } else { Stream::Trial };
        let request = Demote { id: generation, tenant: 1, key, generation, len, crc32c, stream, source };
        self.disk.demote(request).unwrap();
    }

    /// Waits for the answers to `count` demotions.
    pub(crate) fn demoted(&mut self, mut count: usize) {
        while count > 0 {
            match self.event() {
                DiskEvent::Demoted { id, locator, source } => {
                    assert!(source.into_buffer().is_some(), "the memory comes back");
                    for placed in self.places.values_mut().filter(|placed| placed.generation == id) {
                        placed.locator = locator;
                    }
                    count -= 1;
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Reads an object as a reader does: `None` unless the checksum that is bound to key and generation is
    /// right.
    pub(crate) fn read(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let placed = self.places.get(key)?.clone();
        let geometry = self.disk.stats().geometry;
        let buffer = Lent::buffer(AlignedBuffer::new(geometry.image_bytes(placed.len) as usize));
        let (id, deadline) = (self.next, Instant::now() + PATIENCE);
        self.next += 1;
        let Placed { locator, len, .. } = placed;
        self.disk.stage(Stage { id, locator, len, deadline, buffer }).unwrap();
        match self.event() {
            DiskEvent::Staged { id: answered, buffer } => {
                assert_eq!(answered, id);
                let buffer = buffer.into_buffer().unwrap();
                let crc32c = unbound(placed.checksum, key, placed.generation);
                is_intact(&buffer, len, crc32c).then(|| buffer[..len as usize].to_vec())
            }
            DiskEvent::ReadFailed { id: answered, why: NotDone::Refused(_), buffer } => {
                assert!(answered == id && buffer.is_some());
                None
            }
            other => panic!("{other:?}"),
        }
    }

    /// Every object that is known here is read, and has its bytes, unless its extent is given up meanwhile.
    pub(crate) fn verify_all(&mut self) {
        for (key, placed) in self.places.clone() {
            let bytes = self.read(&key);
            let right = bytes.is_some_and(|bytes| bytes == pattern(placed.seed, placed.len as usize));
            assert!(right || !self.places.contains_key(&key), "{placed:?}");
        }
    }
}
