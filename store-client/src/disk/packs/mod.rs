//! A directory of packs: a disk whose extents are files that other hosts can read.
//!
//! ```text
//!   ROOT/CLUSTER/UUID/superblock              what the disk is: two pages, as on every disk
//!                     lock, owner             who writes here
//!                     0000000000000041.pack   a closed extent: batches ‖ footer; immutable
//!                     0000000000000042.open   an extent that its owner appends to
//!                     0000000000000012.dead   given up; the file goes when its room is used again
//! ```
//!
//! The core ([`store_core::disk`]) is the same as for a local disk; only the driver differs. It gives each
//! extent a file. When the core writes the footer of an extent, the file is complete: it is synced, renamed,
//! and its directory is synced. When the core destroys an extent, its file is renamed, so that no recovery
//! finds it; readers with a lease find it under the other name. The size is that of all slots. Extents have
//! no holes in their files, so an extent that was closed early takes the room of what is in it.
//!
//! # One writer
//!
//! See [`owner`]. Where locks are not carried between hosts, an owner that was stopped for longer than the
//! master waits may, after its successor has taken the directory, still carry out the step that it had
//! begun. What that step can do, and why it does not matter:
//!
//! | The step | What happens |
//! |---|---|
//! | write to the superblock, or to an open file | it has the former file open; its successor has copies of these under the names |
//! | rename an open file to a pack | the file under that name is its successor's copy, whose own rename fails: the extent is given up |
//! | make a file | its sequence lies between the highest that its successor has found and the first that the successor uses: these are *void*, and deleted when the directory is taken again |
//! | rename or delete a pack | the objects in it are misses |
//!
//! # Damage
//!
//! A file that is not a pack of this directory (no header, another version, another directory) is refused,
//! reported, and left as it is. A pack whose footer is missing or damaged was truncated: it counts as open,
//! so that the recovery keeps what is intact in it.

mod address;
#[cfg(any(feature = "s3", fuzzing, test))]
mod answers;
#[cfg(feature = "s3")]
mod bucket;
mod contents;
mod fault;
#[cfg(any(fuzzing, test))]
#[cfg_attr(test, allow(unreachable_pub, reason = "in tests nothing else uses it"))]
pub mod fuzzing;
#[cfg(any(feature = "s3", fuzzing, test))]
mod layout;
mod names;
mod owner;
mod room;
mod slots;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use store_core::disk::format::{DiskUuid, Geometry, PAGE_BYTES, Superblock};

use super::driver::{Completion, Io};
use super::error::DiskError;
use super::file::geometry;
use super::sys::AlignedBuffer;
use super::threads::Medium;
pub(crate) use address::BucketAddress;
#[cfg(feature = "s3")]
pub(crate) use bucket::{BucketDirectory, Gone};
#[cfg(feature = "s3")]
pub use bucket::{PackBucket, PackBucketReader};
use contents::{Closed, Expected, PAGES_BYTES, Renewed, newest_superblock};
pub use fault::BucketFault;
#[cfg(feature = "s3")]
pub(crate) use layout::pack_name;
pub use names::PackNames;
use names::{Kind, SUPERBLOCK, uuid_text};
use owner::{Lock, Owner};
pub use room::Room;
use slots::{Slot, Slots, Stage, first_bytes, sync_directory};

/// Whether a path is meant to be the address of a bucket.
#[must_use]
pub fn is_bucket(path: &Path) -> bool {
    BucketAddress::is_meant(path)
}

/// Whether this program can use a path, if that is meant to be the address of a bucket.
///
/// # Errors
/// It is none, or this program was built without buckets.
pub fn check_bucket(path: &Path) -> Result<(), DiskError> {
    if !BucketAddress::is_meant(path) {
        return Ok(());
    }
    // Without the text, which may have credentials in it.
    let failed = |fault| DiskError::Bucket { path: "s3://".into(), action: "use it", fault };
    if cfg!(not(feature = "s3")) {
        return Err(failed(BucketFault::NoFeature));
    }
    let address = BucketAddress::parse(path);
    address.map(|_| ()).map_err(|error| failed(BucketFault::Settings(error.to_string())))
}

/// Blocks of files: what images are padded to.
const BLOCK_BYTES: u32 = 512;
/// Extents that have to fit into the file system before objects are written.
const FREE_EXTENTS: u64 = 2;

/// A directory of packs.
#[derive(Debug)]
pub struct PackDirectory {
    slots: Slots,
    lock: Option<Lock>,
    refused: Vec<RefusedPack>,
}

/// A file that is not a pack of its directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedPack {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub why: PackFault,
}

/// Why a file is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackFault {
    /// It does not begin as a pack does.
    Foreign,
    /// It has a version of the format that this release cannot read.
    Version(u16),
    /// It belongs to another directory.
    OtherDirectory,
    /// It was renamed: it is another pack than its name says.
    Renamed,
    /// It cannot be read.
    Unreadable,
    /// It was truncated, or its footer is damaged. What is intact in it is used.
    Cut,
}

impl fmt::Display for RefusedPack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        if self.why == PackFault::Cut {
            return write!(f, "{path}: truncated or damaged: what is intact in it is used");
        }
        write!(f, "{path}: not used: ")?;
        match self.why {
            PackFault::Cut => Ok(()),
            PackFault::Foreign => f.write_str("it is not a pack: move it away"),
            PackFault::Version(version) => write!(
                f,
                "the format has version {version}, and this release reads {}: use a later release",
                store_core::disk::format::VERSION
            ),
            PackFault::OtherDirectory => f.write_str("it belongs to another directory: move it back"),
            PackFault::Renamed => f.write_str("it is another pack than its name says: rename it back"),
            PackFault::Unreadable => f.write_str("it cannot be read: look for errors of the file system"),
        }
    }
}

/// What a file was found to be.
enum Found {
    Extent {
        slot: u32,
        stage: Stage,
    },
    Refused(PackFault),
    /// Nothing was ever written to it.
    Empty,
}

impl PackDirectory {
    /// Makes a directory for `bytes` bytes below that of a cluster, and takes it for a node.
    /// [`DiskService::format_packs`](super::DiskService::format_packs) makes a disk of it.
    ///
    /// # Errors
    /// See [`DiskError`]: the size is not possible, or the directory cannot be made.
    pub fn create(
        cluster: &Path,
        bytes: u64,
        extent_bytes: Option<u32>,
        node: &str,
    ) -> Result<Self, DiskError> {
        let geometry = geometry(bytes, extent_bytes, BLOCK_BYTES)?;
        let uuid = random().map_err(DiskError::System)?;
        let path = cluster.join(uuid_text(&uuid));
        fs::create_dir_all(&path).map_err(|error| DiskError::io(&path, "create", error))?;
        let lock = Lock::take(&path)?;
        let token = token()?;
        let owner = Owner { node: node.to_owned(), token: token.clone(), ..Owner::default() };
        owner.write(&path).map_err(|error| DiskError::io(&path, "write", error))?;
        let superblock = path.join(SUPERBLOCK);
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&superblock);
        let file = file.map_err(|error| DiskError::io(&superblock, "create", error))?;
        sync_directory(&path)
            .and_then(|()| sync_directory(cluster))
            .map_err(|error| DiskError::io(&path, "sync", error))?;
        let mut slots = Slots::new(path, uuid, geometry, file, Arc::default());
        slots.token = Some(token);
        Ok(Self { slots, lock: Some(lock), refused: Vec::new() })
    }

    /// Opens a directory, and locks it. Nothing in it changes before it is [taken](Self::take).
    ///
    /// # Errors
    /// `Owned` when another process has it; `NotADisk`, `Version`, `Foreign`.
    pub fn open(path: &Path) -> Result<Self, DiskError> {
        if !path.is_dir() {
            return Err(DiskError::NoDirectory(path.to_owned()));
        }
        if !path.join(SUPERBLOCK).exists() {
            return Err(DiskError::NotADisk(path.to_owned()));
        }
        let lock = Lock::take(path)?;
        let mut this = Self::open_plain(path)?;
        this.lock = Some(lock);
        Ok(this)
    }

    /// Opens a directory to look at it, also while a node writes to it.
    ///
    /// # Errors
    /// As [`open`](Self::open), but for `Owned`.
    pub fn open_to_read(path: &Path) -> Result<Self, DiskError> {
        let mut this = Self::open_plain(path)?;
        this.scan(None)?;
        Ok(this)
    }

    fn open_plain(path: &Path) -> Result<Self, DiskError> {
        let file = File::open(path.join(SUPERBLOCK)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DiskError::NotADisk(path.to_owned()),
            _ => DiskError::io(path, "open", error),
        })?;
        let (superblock, _) = superblocks(&file, path)?;
        let named = path.canonicalize().ok();
        let name = named.as_deref().unwrap_or(path).file_name().and_then(|name| name.to_str());
        if name != Some(&uuid_text(&superblock.disk)) {
            return Err(DiskError::Foreign(path.to_owned()));
        }
        let Superblock { disk, geometry, .. } = superblock;
        let slots = Slots::new(path.to_owned(), disk, geometry, file, Arc::default());
        Ok(Self { slots, lock: None, refused: Vec::new() })
    }

    /// The directories of a cluster, in the order of their names.
    #[must_use]
    pub fn list(cluster: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(cluster).into_iter().flatten().flatten();
        let mut found: Vec<PathBuf> =
            entries.map(|entry| entry.path()).filter(|path| path.join(SUPERBLOCK).is_file()).collect();
        found.sort();
        found
    }

    /// The node that took a directory last; empty: unknown.
    #[must_use]
    pub fn owner_of(path: &Path) -> String {
        Owner::read(path).map(|owner| owner.node).unwrap_or_default()
    }

    /// Whether no process has a directory locked, as far as the file system says.
    #[must_use]
    pub fn is_free(path: &Path) -> bool {
        Lock::is_free(path)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.slots.directory
    }

    /// Its name for good.
    #[must_use]
    pub const fn uuid(&self) -> &DiskUuid {
        &self.slots.uuid
    }

    /// Its slots.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        self.slots.geometry
    }

    /// Bytes of all slots, as a disk counts them.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.slots.geometry.extent_at(self.slots.geometry.extents())
    }

    /// Files that are not packs of this directory.
    #[must_use]
    pub fn refused(&self) -> &[RefusedPack] {
        &self.refused
    }

    /// Whether there is room for what is written.
    #[must_use]
    pub fn room(&self) -> Room {
        let wanted = FREE_EXTENTS * u64::from(self.slots.geometry.extent_bytes());
        Room::of_directory(self.slots.directory.clone(), Arc::clone(&self.slots.full), wanted)
    }

    /// The current superblock, and how many of the two are valid.
    ///
    /// # Errors
    /// `NotADisk`, `Version`, or the read failed.
    pub(super) fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        superblocks(&self.slots.superblock, self.path())
    }

    /// Whether there is no file of an extent.
    pub(super) fn is_empty(&self, slot: u32) -> bool {
        self.slots.sequence_in(slot).is_none()
    }

    /// Reads what a disk would have at this offset.
    ///
    /// # Errors
    /// The read failed.
    pub(super) fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        self.slots.read_into(buffer, offset).map(|()| buffer.len())
    }

    /// From here on this process writes here, as this node, and no former owner does. The master has to have
    /// agreed before.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn take(&mut self, node: &str) -> Result<(), DiskError> {
        let path = self.path().to_owned();
        let failed = |action| move |error| DiskError::io(&path, action, error);
        let mut owner = Owner::read(self.path()).unwrap_or_default();
        (owner.node, owner.token) = (node.to_owned(), token()?);
        owner.write(self.path()).map_err(failed.clone()("write"))?;
        let (bad, end) = self.renew_superblock(&owner.token).map_err(failed.clone()("write"))?;
        self.slots.token = Some(owner.token.clone());
        let sequences = self.scan(Some((&owner, &bad)))?;
        owner.void_unused(&sequences, end);
        owner.write(self.path()).and_then(|()| sync_directory(self.path())).map_err(failed("write"))?;
        for refused in &self.refused {
            log::warn!("{refused}");
        }
        Ok(())
    }

    /// Gives the superblock a new file, so that a former owner does not have it open. Slots in which a write
    /// failed are used again, and what they contain is deleted. Returns these, and the first sequence that
    /// was never reserved.
    fn renew_superblock(&mut self, token: &str) -> io::Result<(BTreeSet<u32>, u64)> {
        let Renewed { bytes, bad, end } = Renewed::of(&first_bytes(&self.slots.superblock, PAGES_BYTES)?);
        let (new, path) = (self.path().join(format!("{SUPERBLOCK}.{token}")), self.path().join(SUPERBLOCK));
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&new)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        sync_directory(self.path())?;
        self.slots.superblock = file;
        Ok((bad, end))
    }

    /// Looks at every file. `taken`: the owner, and slots whose content is void; files that do not count are
    /// deleted then, and open ones are copied. Returns the sequences that names say.
    fn scan(&mut self, taken: Option<(&Owner, &BTreeSet<u32>)>) -> Result<BTreeSet<u64>, DiskError> {
        let path = self.path().to_owned();
        let failed = |action| {
            let path = path.clone();
            move |error| DiskError::io(&path, action, error)
        };
        let mut files: BTreeMap<u64, Kind> = BTreeMap::new();
        self.refused.clear();
        for entry in fs::read_dir(&path).map_err(failed("list"))? {
            let name = entry.map_err(failed("list"))?.file_name();
            let Some((sequence, kind)) = name.to_str().and_then(names::parse) else { continue };
            let void = taken.is_some_and(|(owner, _)| owner.is_void(sequence));
            if void || kind == Kind::Dead {
                if taken.is_some() {
                    let _ = fs::remove_file(self.slots.path(sequence, kind));
                }
                continue;
            }
            // A crash between two steps may leave an open file beside its pack.
            let known = files.entry(sequence).or_insert(kind);
            *known = kind.max(*known);
        }
        let mut sequences = BTreeSet::new();
        for (sequence, kind) in files {
            let file = self.slots.path(sequence, kind);
            match self.examine(&file, sequence) {
                Found::Extent { slot, .. } if taken.is_some_and(|(_, bad)| bad.contains(&slot)) => {
                    fs::remove_file(&file).map_err(failed("delete"))?;
                    continue;
                }
                Found::Extent { slot, stage } => {
                    if taken.is_none() && kind == Kind::Pack && stage == Stage::Open {
                        self.refused.push(RefusedPack { path: file, why: PackFault::Cut });
                    }
                    self.found(sequence, kind, (slot, stage), taken.is_some()).map_err(failed("renew"))?;
                }
                Found::Empty if taken.is_some() => {
                    fs::remove_file(&file).map_err(failed("delete"))?;
                    continue;
                }
                Found::Empty => continue,
                Found::Refused(why) => self.refused.push(RefusedPack { path: file, why }),
            }
            sequences.insert(sequence);
        }
        Ok(sequences)
    }

    fn examine(&self, path: &Path, sequence: u64) -> Found {
        let read = || -> io::Result<(AlignedBuffer, AlignedBuffer, u64)> {
            let file = File::open(path)?;
            let bytes = file.metadata()?.len();
            let head = first_bytes(&file, PAGE_BYTES as usize)?;
            let mut tail = AlignedBuffer::new(PAGE_BYTES as usize);
            if let Some(at) = bytes.checked_sub(u64::from(PAGE_BYTES)) {
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut tail, at)?;
            }
            Ok((head, tail, bytes))
        };
        let Ok((head, tail, bytes)) = read() else { return Found::Refused(PackFault::Unreadable) };
        let expected = Expected { disk: &self.slots.uuid, geometry: &self.slots.geometry, sequence };
        let found = match expected.closed(&tail, bytes) {
            Some(closed) => closed.map(|Closed { slot, end, footer }| Found::Extent {
                slot,
                stage: Stage::Pack { end, footer },
            }),
            None if bytes <= u64::from(PAGE_BYTES) && head.iter().all(|byte| *byte == 0) => Ok(Found::Empty),
            None => expected.begun(&head).map(|slot| Found::Extent { slot, stage: Stage::Open }),
        };
        found.unwrap_or_else(Found::Refused)
    }

    /// Takes an extent in. A complete file becomes a pack, an incomplete one an open file, whatever its name
    /// was.
    fn found(&self, sequence: u64, kind: Kind, (slot, stage): (u32, Stage), taken: bool) -> io::Result<()> {
        if taken {
            let (open, pack) = (self.slots.path(sequence, Kind::Open), self.slots.path(sequence, Kind::Pack));
            match (kind, stage) {
                (Kind::Open, Stage::Pack { .. }) => {
                    File::open(&open)?.sync_all()?;
                    fs::rename(open, pack)?;
                }
                (_, Stage::Open) => {
                    let from = if kind == Kind::Pack { &pack } else { &open };
                    if kind == Kind::Pack {
                        log::warn!(
                            "{}: truncated or damaged: what is intact in it is kept, and the rest is dropped",
                            pack.display()
                        );
                    }
                    // A former owner may have this file open.
                    let copy = open.with_extension("copy");
                    fs::copy(from, &copy)?;
                    File::open(&copy)?.sync_all()?;
                    fs::rename(&copy, &open)?;
                    if kind == Kind::Pack {
                        fs::remove_file(&pack)?;
                    }
                }
                _ => {}
            }
        } else if kind == Kind::Pack && stage == Stage::Open {
            // It is read under the name that it has, up to where its headers end.
            let bytes = fs::metadata(self.slots.path(sequence, kind))?.len();
            let end = u32::try_from(bytes).unwrap_or(u32::MAX).min(self.slots.geometry.extent_bytes());
            self.slots.insert(slot, Slot::new(sequence, Stage::Pack { end, footer: 0 }));
            return Ok(());
        }
        let other = self.slots.sequence_in(slot);
        // Files are in the order of their sequences: the older one's room was used again.
        if let Some(old) = other.filter(|_| taken) {
            Kind::ALL.into_iter().for_each(|kind| drop(fs::remove_file(self.slots.path(old, kind))));
        }
        self.slots.insert(slot, Slot::new(sequence, stage));
        Ok(())
    }
}

impl Medium for PackDirectory {
    const NAME: &'static str = Slots::NAME;

    fn accept(&self, io: &Io) {
        self.slots.accept(io);
    }

    fn carry_out(&self, io: Io) -> Completion {
        self.slots.carry_out(io)
    }
}

fn superblocks(file: &File, path: &Path) -> Result<(Superblock, u32), DiskError> {
    let bytes = first_bytes(file, PAGES_BYTES).map_err(|error| DiskError::io(path, "read", error))?;
    newest_superblock(&bytes, path)
}

fn random() -> io::Result<DiskUuid> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn token() -> Result<String, DiskError> {
    let bytes = random().map_err(DiskError::System)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
