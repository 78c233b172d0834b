//! The directories of packs of a node: its own, and those of nodes that are gone.
//!
//! A directory in a bucket is opened by a thread of its own, because a store may let its caller wait.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use store_core::disk::DiskConfig;

use super::DiskKind;
use super::disk::NodeDisk;
use crate::config::NodeDiskConfig;
#[cfg(feature = "s3")]
use crate::disk::PackBucket;
use crate::disk::{
    BucketAddress, Caching, DiskError, DiskEvent, DiskFile, DiskOptions, DiskService, PackDirectory,
};

/// How often directories of nodes that are gone are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// How long a directory that cannot be used is left alone.
const UNUSABLE: Duration = Duration::from_secs(10);
/// The same for one that the master did not grant: its node is gone, and soon the master knows that, too.
const REFUSED: Duration = Duration::from_secs(1);
/// The same for buckets, in which only the master knows whose node is gone, and each look is a request.
const LOOK_IN_BUCKETS: Duration = Duration::from_secs(5);
const REFUSED_IN_BUCKETS: Duration = Duration::from_secs(60);
/// Directories of buckets that are being opened at a time.
const OPENING_MAX: usize = 4;
/// How long a new directory may take to be made.
const FORMAT: Duration = Duration::from_secs(10);
/// Most directories of other nodes that a node takes over.
const ADOPTED_MAX: usize = 64;

/// What a disk is on.
pub(super) enum Medium {
    File(DiskFile),
    Packs(PackDirectory),
    #[cfg(feature = "s3")]
    Bucket(Box<PackBucket>),
}

/// Whether a path is the address of a bucket.
pub(super) fn is_bucket(path: &Path) -> bool {
    BucketAddress::is_meant(path)
}

#[cfg(not(feature = "s3"))]
fn no_feature(path: &Path) -> DiskError {
    let fault = crate::disk::BucketFault::NoFeature;
    DiskError::Bucket { path: path.to_owned(), action: "open", fault }
}

impl Medium {
    pub(super) fn open(kind: DiskKind, path: &Path) -> Result<Self, DiskError> {
        match kind {
            DiskKind::Local => DiskFile::open(path, Caching::Direct).map(Self::File),
            #[cfg(feature = "s3")]
            DiskKind::Shared if is_bucket(path) => {
                PackBucket::open(path).map(|packs| Self::Bucket(Box::new(packs)))
            }
            #[cfg(not(feature = "s3"))]
            DiskKind::Shared if is_bucket(path) => Err(no_feature(path)),
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
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => Ok((*packs.uuid(), packs.bytes(), packs.geometry().extent_bytes().into())),
        }
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::File(file) => file.path(),
            Self::Packs(packs) => packs.path(),
            #[cfg(feature = "s3")]
            Self::Bucket(packs) => packs.path(),
        }
    }
}

/// How a directory of packs is driven.
pub(super) fn options() -> DiskOptions {
    // Errors of a server come in swarms, and pass.
    DiskOptions { disk: DiskConfig { errors_max: 1_024, ..DiskConfig::default() }, ..DiskOptions::default() }
}

/// How a directory in a bucket is driven: requests take longer than those to a file system, cost, and are
/// repeated below.
#[cfg(feature = "s3")]
pub(super) fn bucket_options() -> DiskOptions {
    let disk =
        DiskConfig { errors_max: u32::MAX, sync_wait_ms: 2_000, stall_ms: 60_000, ..DiskConfig::default() };
    DiskOptions { disk, ..DiskOptions::default() }
}

/// The directory that the node has below a shared directory or in a bucket, other than these; it is made if
/// there is none and a size is given.
pub(super) fn own(
    config: &NodeDiskConfig,
    cluster: &str,
    node: &str,
    except: &[PathBuf],
) -> Result<Medium, DiskError> {
    if !is_bucket(&config.path) {
        return own_directory(config, cluster, node).map(Medium::Packs);
    }
    #[cfg(feature = "s3")]
    return own_bucket(config, cluster, node, except).map(|packs| Medium::Bucket(Box::new(packs)));
    #[cfg(not(feature = "s3"))]
    {
        let _ = except;
        Err(no_feature(&config.path))
    }
}

#[cfg(feature = "s3")]
fn own_bucket(
    config: &NodeDiskConfig,
    cluster: &str,
    node: &str,
    except: &[PathBuf],
) -> Result<PackBucket, DiskError> {
    let cluster = config.path.join(cluster);
    for path in PackBucket::list(&cluster)? {
        if !except.contains(&path) && PackBucket::owner_of(&path)? == node {
            match PackBucket::open(&path) {
                // Nothing was ever written to it.
                Err(DiskError::NotADisk(_)) => {}
                result => return result,
            }
        }
    }
    let bytes = config.bytes.ok_or_else(|| DiskError::NoSize(config.path.clone()))?;
    let packs = PackBucket::create(&cluster, bytes, None, node)?;
    let path = packs.path().to_owned();
    let service = DiskService::format_bucket(packs, bucket_options(), 0)?;
    format(service);
    PackBucket::open(&path)
}

fn own_directory(config: &NodeDiskConfig, cluster: &str, node: &str) -> Result<PackDirectory, DiskError> {
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
    format(service);
    PackDirectory::open(&path)
}

fn format(service: DiskService) {
    let end = Instant::now() + FORMAT;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        match service.wait_event(left) {
            Some(DiskEvent::Ready | DiskEvent::Stopped(_)) | None => break,
            Some(_) => {}
        }
    }
    service.close(FORMAT);
}

/// Starts work that may have to wait for a store.
pub(super) fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name("snowskin-bucket".into()).spawn(work);
    thread.inspect_err(|error| log::warn!("a bucket is not opened: no thread: {error}")).ok()
}

/// Takes the result of work that has ended.
pub(super) fn ended<T>(thread: &mut Option<JoinHandle<T>>) -> Option<T> {
    thread.take_if(|thread| thread.is_finished())?.join().ok()
}

/// Looks for directories whose nodes are gone.
pub(super) struct Orphans {
    clusters: Vec<PathBuf>,
    buckets: InBuckets,
    /// How long no node must have written to one; `None`: none is taken.
    after: Option<Duration>,
    looked: Instant,
    /// Since when they are known to be free, or until when they are left alone.
    free_since: HashMap<PathBuf, Instant>,
    not_before: HashMap<PathBuf, Instant>,
}

type Opened = Result<NodeDisk, DiskError>;

/// Directories in buckets: what was found the last time, and those that are being opened.
#[derive(Default)]
struct InBuckets {
    clusters: Vec<PathBuf>,
    found: Vec<PathBuf>,
    looking: Option<JoinHandle<Vec<PathBuf>>>,
    looked: Option<Instant>,
    opening: Vec<(PathBuf, Option<JoinHandle<Opened>>)>,
}

impl Orphans {
    pub(super) fn new(shared: &[NodeDiskConfig], cluster: &str, adopt_ms: u32) -> Self {
        let after = (adopt_ms > 0).then(|| Duration::from_millis(adopt_ms.into()));
        let clusters = shared.iter().map(|config| config.path.join(cluster));
        let (in_buckets, clusters) = clusters.partition(|path| is_bucket(path));
        let buckets = InBuckets { clusters: in_buckets, ..InBuckets::default() };
        let (free_since, not_before) = (HashMap::new(), HashMap::new());
        Self { clusters, buckets, after, looked: Instant::now(), free_since, not_before }
    }

    /// Opens directories that no node has written to for long enough. The master decides who has them.
    pub(super) fn look(&mut self, disks: &[NodeDisk]) -> Vec<NodeDisk> {
        let Some(after) = self.after else { return Vec::new() };
        let nothing = self.clusters.is_empty() && self.buckets.clusters.is_empty();
        if nothing || self.looked.elapsed() < LOOK {
            return Vec::new();
        }
        let now = Instant::now();
        self.looked = now;
        let mut taken = Vec::new();
        for (path, result) in self.buckets.opened() {
            match result {
                Ok(disk) => taken.push(disk),
                Err(error) => {
                    log::info!("a directory of packs is not taken over: {error}");
                    self.leave(path, UNUSABLE);
                }
            }
        }
        self.buckets.look(now);
        self.not_before.retain(|_, until| *until > now);
        let adopted = disks.iter().filter(|disk| disk.adopted).count();
        let known = |path: &Path| {
            disks.iter().chain(&taken).any(|disk| disk.path() == path) || self.buckets.is_opening(path)
        };
        let found = self.clusters.iter().flat_map(|cluster| PackDirectory::list(cluster));
        let found = found.chain(self.buckets.found.iter().cloned());
        let found: Vec<PathBuf> = found.filter(|path| !known(path)).collect();
        self.free_since.retain(|path, _| found.contains(path));
        for path in found {
            let in_bucket = is_bucket(&path);
            if !in_bucket && !PackDirectory::is_free(&path) {
                self.free_since.remove(&path);
                continue;
            }
            let since = *self.free_since.entry(path.clone()).or_insert(now);
            if now - since < after
                || self.not_before.contains_key(&path)
                || adopted + taken.len() + self.buckets.opening.len() >= ADOPTED_MAX
            {
                continue;
            }
            if in_bucket {
                self.buckets.open(path);
                continue;
            }
            match NodeDisk::adopted(&path) {
                Ok(disk) => taken.push(disk),
                Err(error) => {
                    log::info!("a directory of packs is not taken over: {error}");
                    self.leave(path, UNUSABLE);
                }
            }
        }
        taken
    }

    /// Leaves a directory alone for a while. `by_master`: the master says that another node has it. Otherwise
    /// it cannot be used.
    pub(super) fn refused(&mut self, path: PathBuf, by_master: bool) {
        self.leave(path, if by_master { REFUSED } else { UNUSABLE });
    }

    fn leave(&mut self, path: PathBuf, pause: Duration) {
        let pause = if is_bucket(&path) { REFUSED_IN_BUCKETS } else { pause };
        self.not_before.insert(path, Instant::now() + pause);
    }
}

impl InBuckets {
    fn is_opening(&self, path: &Path) -> bool {
        self.opening.iter().any(|(opening, _)| opening == path)
    }

    /// Begins a look when the last one is long enough ago, and takes what it has found when it has ended.
    fn look(&mut self, now: Instant) {
        if let Some(found) = ended(&mut self.looking) {
            self.found = found;
        }
        let due = self.looked.is_none_or(|at| now - at >= LOOK_IN_BUCKETS);
        if self.clusters.is_empty() || !due || self.looking.is_some() {
            return;
        }
        self.looked = Some(now);
        let clusters = self.clusters.clone();
        self.looking = in_background(move || list(&clusters));
    }

    fn open(&mut self, path: PathBuf) {
        if self.opening.len() < OPENING_MAX {
            let at = path.clone();
            self.opening.push((path, in_background(move || NodeDisk::adopted(&at))));
        }
    }

    /// What was opened since the last call.
    fn opened(&mut self) -> Vec<(PathBuf, Opened)> {
        let mut opened = Vec::new();
        self.opening.retain_mut(|(path, thread)| {
            if let Some(result) = ended(thread) {
                opened.push((path.clone(), result));
            }
            thread.is_some()
        });
        opened
    }
}

/// The directories in buckets; those of one that does not answer are not among them.
fn list(clusters: &[PathBuf]) -> Vec<PathBuf> {
    #[cfg(feature = "s3")]
    let found = clusters.iter().flat_map(|cluster| {
        PackBucket::list(cluster).inspect_err(|error| log::debug!("{error}")).unwrap_or_default()
    });
    #[cfg(not(feature = "s3"))]
    let found = clusters.iter().take(0).cloned();
    found.collect()
}
