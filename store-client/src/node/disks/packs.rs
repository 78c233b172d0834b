//! The directories of packs of a node: its own, and those of nodes that are gone.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use store_core::disk::DiskConfig;

use super::DiskKind;
use super::disk::NodeDisk;
use crate::config::NodeDiskConfig;
use crate::disk::{Caching, DiskError, DiskEvent, DiskFile, DiskOptions, DiskService, PackDirectory};

/// How often directories of nodes that are gone are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// How long a directory that the master did not grant is left alone.
const REFUSED: Duration = Duration::from_secs(10);
/// How long a new directory may take to be made.
const FORMAT: Duration = Duration::from_secs(10);
/// Most directories of other nodes that a node takes over.
const ADOPTED_MAX: usize = 64;

/// What a disk is on.
pub(super) enum Medium {
    File(DiskFile),
    Packs(PackDirectory),
}

impl Medium {
    pub(super) fn open(kind: DiskKind, path: &Path) -> Result<Self, DiskError> {
        match kind {
            DiskKind::Local => DiskFile::open(path, Caching::Direct).map(Self::File),
            DiskKind::Shared => PackDirectory::open(path).map(Self::Packs),
        }
    }

    /// Its name, its bytes, and bytes of an extent.
    pub(super) fn identity(&self) -> Result<([u8; 16], u64, u64), DiskError> {
        match self {
            Self::File(file) => {
                let superblock = file.superblock()?;
                Ok((superblock.disk, file.bytes(), superblock.geometry.extent_bytes().into()))
            }
            Self::Packs(packs) => Ok((*packs.uuid(), packs.bytes(), packs.geometry().extent_bytes().into())),
        }
    }
}

/// How a directory of packs is driven.
pub(super) fn options() -> DiskOptions {
    // Errors of a server come in swarms, and pass.
    DiskOptions { disk: DiskConfig { errors_max: 1_024, ..DiskConfig::default() }, ..DiskOptions::default() }
}

/// The directory that the node has below a shared directory; it is made if there is none and a size is given.
pub(super) fn own(config: &NodeDiskConfig, cluster: &str, node: &str) -> Result<PackDirectory, DiskError> {
    // A directory that does not exist is a file system that is not mounted.
    if !config.path.is_dir() {
        return Err(DiskError::NoDirectory(config.path.clone()));
    }
    let cluster = config.path.join(cluster);
    for path in PackDirectory::list(&cluster) {
        if PackDirectory::owner_of(&path) == node {
            match PackDirectory::open(&path) {
                // A node may have several, which nodes that are gone have left.
                Err(DiskError::NotADisk(_)) => {}
                result => return result,
            }
        }
    }
    let bytes = config.bytes.ok_or_else(|| DiskError::NoSize(config.path.clone()))?;
    let packs = PackDirectory::create(&cluster, bytes, None, node)?;
    let path = packs.path().to_owned();
    let service = DiskService::format_packs(packs, options(), 0)?;
    let end = Instant::now() + FORMAT;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        match service.wait_event(left) {
            Some(DiskEvent::Ready | DiskEvent::Stopped(_)) | None => break,
            Some(_) => {}
        }
    }
    service.close(FORMAT);
    PackDirectory::open(&path)
}

/// Looks for directories whose nodes are gone.
pub(super) struct Orphans {
    clusters: Vec<PathBuf>,
    /// How long no node must have written to one; `None`: none is taken.
    after: Option<Duration>,
    looked: Instant,
    /// Since when they are known to be free, or until when they are left alone.
    free_since: HashMap<PathBuf, Instant>,
    not_before: HashMap<PathBuf, Instant>,
}

impl Orphans {
    pub(super) fn new(shared: &[NodeDiskConfig], cluster: &str, adopt_ms: u32) -> Self {
        let after = (adopt_ms > 0).then(|| Duration::from_millis(adopt_ms.into()));
        let clusters = shared.iter().map(|config| config.path.join(cluster)).collect();
        let (free_since, not_before) = (HashMap::new(), HashMap::new());
        Self { clusters, after, looked: Instant::now(), free_since, not_before }
    }

    /// Opens directories that no node has written to for long enough. The master decides who has them.
    pub(super) fn look(&mut self, disks: &[NodeDisk]) -> Vec<NodeDisk> {
        let Some(after) = self.after else { return Vec::new() };
        if self.clusters.is_empty() || self.looked.elapsed() < LOOK {
            return Vec::new();
        }
        let now = Instant::now();
        self.looked = now;
        self.not_before.retain(|_, until| *until > now);
        let adopted = disks.iter().filter(|disk| disk.adopted).count();
        let known = |path: &Path| disks.iter().any(|disk| disk.path() == path);
        let found = self.clusters.iter().flat_map(|cluster| PackDirectory::list(cluster));
        let found: Vec<PathBuf> = found.filter(|path| !known(path)).collect();
        self.free_since.retain(|path, _| found.contains(path));
        let mut taken = Vec::new();
        for path in found {
            if !PackDirectory::is_free(&path) {
                self.free_since.remove(&path);
                continue;
            }
            let since = *self.free_since.entry(path.clone()).or_insert(now);
            if now - since < after
                || self.not_before.contains_key(&path)
                || adopted + taken.len() >= ADOPTED_MAX
            {
                continue;
            }
            match NodeDisk::adopted(&path) {
                Ok(disk) => taken.push(disk),
                Err(error) => {
                    log::info!("a directory of packs is not taken over: {error}");
                    self.refused(path);
                }
            }
        }
        taken
    }

    /// Another node has it, or it cannot be used.
    pub(super) fn refused(&mut self, path: PathBuf) {
        self.not_before.insert(path, Instant::now() + REFUSED);
    }
}
