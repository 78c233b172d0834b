//! A directory of packs in a bucket of an S3-compatible store.
//!
//! ```text
//!   batches ──▶ memory ── a sync ────▶ parts       what is durable of an extent that is open
//!                 │  ── the footer ──▶ the pack    one conditional put; then the parts go
//!                 ▼
//!        readers, by their node                    readers, by a range of the pack, without the node
//! ```
//!
//! The core ([`store_core::disk`]) and the format are those of every disk. A bucket has no append and no
//! rename, so an open extent is in memory. What the core has synced is in the bucket nevertheless: a sync
//! puts what was written since the last one as *parts*. So a removal that was confirmed is never undone, and
//! what a crash costs are the objects of the last seconds, which were not synced. The price is that the bytes
//! of an extent are put up to twice.
//!
//! # One writer
//!
//! The master mounts a directory for one node that is alive at a time. A node *takes* it after the master has
//! agreed: it replaces the object `owner` under the condition that this is the one that it has read. The
//! token in it is read before each request that changes something. One request of a former owner may be under
//! way meanwhile, for any time. What it can do:
//!
//! | The request | What happens |
//! |---|---|
//! | put the superblock | it is refused: the version is another one since the directory was taken |
//! | put a part | its name has the token of the former owner, whose parts do not count any more |
//! | put the pack of an extent that was open | it is refused, or its successor, which closes all open extents before it announces anything, replaces it |
//! | put the pack of a later extent | its sequence is *void*, and it is deleted when the directory is taken again |
//! | delete a pack, or put the mark of a dead one | the objects in it are misses |
//!
//! # Errors of the store
//!
//! Requests that change something, and those of a recovery, are repeated until they succeed, with a pause of
//! up to ten seconds: a store that is away comes back, and the disk with it. Meanwhile no object is written,
//! readers miss, and memory is not affected. A read that has a reader is repeated once.

mod http;
mod parallel;
mod reader;
mod slots;
mod spool;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use store_core::disk::format::{BatchHeader, DiskUuid, Geometry, PAGE_BYTES, Superblock};

use super::contents::{Closed, Expected, PAGES_BYTES, Renewed, newest_superblock};
use super::fault::BucketFault;
use super::layout::{Name, PartName, dead_name, pack_name};
use super::names::{OWNER, SUPERBLOCK, uuid_text};
use super::owner::{BYTES_MAX as OWNER_BYTES_MAX, Owner};
use super::{BLOCK_BYTES, PackFault, RefusedPack, Room, random, token};
use crate::disk::driver::{Completion, Io};
use crate::disk::error::DiskError;
use crate::disk::file::geometry;
use crate::disk::threads::Medium;
use parallel::each;
pub use reader::PackBucketReader;
use slots::{OpenExtent, Pages, Slot, Slots, Stage, locked};
pub(super) use spool::Spool;
pub(crate) use store::BucketDirectory;
use store::{Put, Version};

/// The pages, and the token of who has put them.
const SUPERBLOCK_BYTES: usize = PAGES_BYTES + 32;
/// Owners in a row whose parts count.
const BEFORE_MAX: usize = 256;

/// Sequences whose packs no process can read: the node tells the master.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gone(Arc<Mutex<BTreeSet<u64>>>);

impl Gone {
    /// Whether the pack with this sequence is not there.
    pub(crate) fn has(&self, sequence: u64) -> bool {
        locked(&self.0).contains(&sequence)
    }
}

/// A directory of packs in a bucket.
#[derive(Debug)]
pub struct PackBucket {
    slots: Slots,
    owner: (Owner, Version),
    refused: Vec<RefusedPack>,
}

/// What is there of an extent.
enum Found {
    Pack(Closed),
    /// A pack without a footer: it was cut.
    Cut,
    Refused(PackFault),
    /// It went meanwhile.
    Missing,
}

/// The objects of a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Objects {
    pack: Option<u64>,
    dead: bool,
    parts: Vec<(PartName, u64)>,
}

impl PackBucket {
    /// Makes a directory for `bytes` bytes below that of a cluster, and takes it for a node.
    /// [`DiskService::format_bucket`](crate::disk::DiskService::format_bucket) makes a disk of it.
    ///
    /// # Errors
    /// The size is not possible, or the store refuses.
    pub fn create(
        cluster: &Path,
        bytes: u64,
        extent_bytes: Option<u32>,
        node: &str,
    ) -> Result<Self, DiskError> {
        let cluster = BucketDirectory::open(cluster).map_err(|fault| failed(cluster, "open", fault))?;
        Self::create_in(&cluster, bytes, extent_bytes, node)
    }

    fn create_in(
        cluster: &BucketDirectory,
        bytes: u64,
        extent_bytes: Option<u32>,
        node: &str,
    ) -> Result<Self, DiskError> {
        let geometry = geometry(bytes, extent_bytes, BLOCK_BYTES)?;
        let uuid = random().map_err(DiskError::System)?;
        let path = cluster.path().join(uuid_text(&uuid));
        let directory = cluster.at(&path).map_err(|fault| failed(&path, "open", fault))?;
        let owner = Owner { node: node.to_owned(), token: token()?, ..Owner::default() };
        let version = directory.put(OWNER, owner.text().into_bytes(), &Put::New);
        let version = version.map_err(|fault| failed(&path, "make", fault))?;
        let tried = directory.try_conditions(OWNER, owner.text().as_bytes());
        tried.map_err(|fault| failed(&path, "make", fault))?;
        let mut slots = Slots::new(directory, uuid, geometry, Pages::default());
        slots.token = Some(owner.token.clone());
        Ok(Self { slots, owner: (owner, version), refused: Vec::new() })
    }

    /// Opens a directory. Nothing in it changes before it is [taken](Self::take).
    ///
    /// # Errors
    /// `NotADisk`, `Version`, `Foreign`, or the store refuses.
    pub fn open(path: &Path) -> Result<Self, DiskError> {
        let directory = BucketDirectory::open(path).map_err(|fault| failed(path, "open", fault))?;
        Self::open_in(directory)
    }

    fn open_in(directory: BucketDirectory) -> Result<Self, DiskError> {
        let path = directory.path().to_owned();
        let read = directory.read_all(SUPERBLOCK, SUPERBLOCK_BYTES as u64);
        let (bytes, version) = read.map_err(|fault| match fault {
            BucketFault::Missing => DiskError::NotADisk(path.clone()),
            fault => failed(&path, "read the superblock", fault),
        })?;
        let owner = read_owner(&directory).map_err(|fault| failed(&path, "read the owner", fault))?;
        let pages = &bytes[..bytes.len().min(PAGES_BYTES)];
        let (Superblock { disk, geometry, .. }, _) = newest_superblock(pages, &path)?;
        if path.file_name().and_then(|name| name.to_str()) != Some(&uuid_text(&disk)) {
            return Err(DiskError::Foreign(path));
        }
        let pages = Pages { bytes, version: Some(version), ..Pages::default() };
        Ok(Self { slots: Slots::new(directory, disk, geometry, pages), owner, refused: Vec::new() })
    }

    /// The directories of a cluster, in the order of their names.
    ///
    /// # Errors
    /// The store refuses.
    pub fn list(cluster: &Path) -> Result<Vec<PathBuf>, DiskError> {
        let directory = BucketDirectory::open(cluster).and_then(|directory| directory.list());
        let listing = directory.map_err(|fault| failed(cluster, "list", fault))?;
        let mut found: Vec<PathBuf> = listing.directories.iter().map(|name| cluster.join(name)).collect();
        found.sort();
        Ok(found)
    }

    /// The node that took a directory last; empty: unknown.
    ///
    /// # Errors
    /// The store refuses.
    pub fn owner_of(path: &Path) -> Result<String, DiskError> {
        let owner = BucketDirectory::open(path).and_then(|directory| read_owner(&directory));
        match owner {
            Ok((owner, _)) => Ok(owner.node),
            Err(BucketFault::Missing) => Ok(String::new()),
            Err(fault) => Err(failed(path, "read the owner", fault)),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.slots.directory.path()
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

    /// Objects that are not packs of this directory.
    #[must_use]
    pub fn refused(&self) -> &[RefusedPack] {
        &self.refused
    }

    /// Whether the store keeps up with what is written.
    #[must_use]
    pub fn room(&self) -> Room {
        Room::of_spool(Arc::clone(&self.slots.spool))
    }

    /// What no process can read any more.
    pub(crate) fn gone(&self) -> Gone {
        self.slots.gone.clone()
    }

    /// From here on this process writes here, as this node, and no former owner does. The master has to have
    /// agreed before.
    ///
    /// # Errors
    /// `Owned` when another process has taken it since it was opened; or the store refuses.
    pub fn take(&mut self, node: &str) -> Result<(), DiskError> {
        let path = self.path().to_owned();
        // A node that may not list, or reads only, fails before it has changed anything.
        self.slots.directory.list().map_err(|fault| failed(&path, "list", fault))?;
        let (mut owner, version) = self.owner.clone();
        if owner.before.len() >= BEFORE_MAX {
            return Err(failed(&path, "take", BucketFault::Unfinished(owner.before.len())));
        }
        // Its parts count until they are those of this owner.
        owner.before.push(std::mem::replace(&mut owner.token, token()?));
        node.clone_into(&mut owner.node);
        let put = self.slots.directory.put(OWNER, owner.text().into_bytes(), &Put::Over(version));
        let version = put.map_err(|fault| match fault {
            BucketFault::Changed | BucketFault::Missing => {
                let by = read_owner(&self.slots.directory).map(|(owner, _)| owner.name());
                DiskError::Owned { path: path.clone(), by: by.unwrap_or_else(|_| "another process".into()) }
            }
            fault => failed(&path, "take", fault),
        })?;
        self.slots.token = Some(owner.token.clone());
        self.owner = (owner, version);
        self.taken().map_err(|fault| failed(&path, "take", fault))
    }

    fn taken(&mut self) -> Result<(), BucketFault> {
        let (bad, end) = self.renew_superblock()?;
        let sequences = self.scan(&bad)?;
        // What was in parts of others is in parts of this owner now, or in none.
        self.slots.sync()?;
        let (mut owner, version) = self.owner.clone();
        let before = std::mem::take(&mut owner.before);
        owner.void_unused(&sequences, end);
        let put = self.slots.directory.put(OWNER, owner.text().into_bytes(), &Put::Over(version));
        let version = put.map_err(|fault| match fault {
            BucketFault::Changed => BucketFault::Lost,
            fault => fault,
        })?;
        self.owner = (owner, version);
        if let Err(fault) = self.delete_parts(&before) {
            // They do not count, and go when the directory is taken the next time.
            log::warn!("{}: parts of former owners are not deleted: {fault}", self.path().display());
        }
        for refused in &self.refused {
            log::warn!("{refused}");
        }
        Ok(())
    }

    /// Puts the superblock anew, so that a former owner cannot put it any more. Slots in which a write failed
    /// are used again, and what they contain is deleted. Returns these, and the first sequence that was never
    /// reserved.
    fn renew_superblock(&mut self) -> Result<(BTreeSet<u32>, u64), BucketFault> {
        let found = locked(&self.slots.superblock).bytes.clone();
        let Renewed { bytes, bad, end } = Renewed::of(&found);
        self.slots.set_superblock(bytes);
        self.slots.put_superblock()?;
        Ok((bad, end))
    }

    /// Looks at every object. Those that do not count are deleted. Returns the sequences that names say.
    fn scan(&mut self, bad: &BTreeSet<u32>) -> Result<BTreeSet<u64>, BucketFault> {
        self.refused.clear();
        self.slots.clear();
        let (mut objects, stale) = self.objects_of(self.owner.0.before.iter())?;
        // Put too late, or left behind.
        stale.iter().for_each(|name| drop(self.slots.directory.delete(name)));
        objects.retain(|sequence, of| {
            let counts = !of.dead && !self.owner.0.is_void(*sequence);
            if !counts {
                self.delete(*sequence, of);
            }
            counts
        });
        let mut sequences = BTreeSet::new();
        let found = self.examine_all(&objects)?;
        // In the order of their sequences: where two have the same slot, the older one's room was used again.
        let mut by_slot: BTreeMap<u32, u64> = BTreeMap::new();
        for (sequence, of) in &objects {
            let slot = match found.get(sequence) {
                Some(Found::Pack(Closed { slot, end, footer })) => {
                    let stage = Stage::Pack { end: *end, footer: *footer };
                    Some((*slot, Slot::new(*sequence, stage)))
                }
                Some(Found::Refused(why)) => {
                    let path = self.path().join(pack_name(*sequence));
                    self.refused.push(RefusedPack { path, why: *why });
                    sequences.insert(*sequence);
                    continue;
                }
                Some(Found::Cut) => self.restore(*sequence, of, true)?,
                Some(Found::Missing) | None => self.restore(*sequence, of, false)?,
            };
            let Some((slot, file)) = slot.filter(|(slot, _)| !bad.contains(slot)) else {
                self.delete(*sequence, of);
                continue;
            };
            sequences.insert(*sequence);
            self.slots.insert(slot, file);
            if let Some(older) = by_slot.insert(slot, *sequence)
                && let Some(of) = objects.get(&older)
            {
                self.delete(older, of);
            }
        }
        Ok(sequences)
    }

    /// The objects of each sequence, and parts that do not count, because no owner with one of these tokens
    /// has put them.
    fn objects_of<'t>(
        &self,
        tokens: impl Iterator<Item = &'t String> + Clone,
    ) -> Result<(BTreeMap<u64, Objects>, Vec<String>), BucketFault> {
        let mut objects: BTreeMap<u64, Objects> = BTreeMap::new();
        let (mut stale, mut unknown, mut example) = (Vec::new(), 0, String::new());
        for (name, bytes) in self.slots.directory.list()?.objects {
            match Name::parse(&name) {
                Some(Name::Pack(sequence)) => objects.entry(sequence).or_default().pack = Some(bytes),
                Some(Name::Dead(sequence)) => objects.entry(sequence).or_default().dead = true,
                Some(Name::Part(part)) if tokens.clone().any(|token| *token == part.token) => {
                    objects.entry(part.sequence).or_default().parts.push((part, bytes));
                }
                Some(Name::Part(_)) => stale.push(name),
                None if name == OWNER || name == SUPERBLOCK => {}
                None => {
                    unknown += 1;
                    example = name;
                }
            }
        }
        if unknown > 0 {
            let path = self.path().display();
            log::warn!("{path}: {unknown} objects are not ours, {example} for example: they are left alone");
        }
        for of in objects.values_mut() {
            of.parts.sort_by_key(|(part, _)| part.serial);
        }
        Ok((objects, stale))
    }

    /// What does not count goes, as far as the store is willing; the mark of a dead pack goes last.
    fn delete(&self, sequence: u64, of: &Objects) {
        let parts = of.parts.iter().map(|(part, _)| part.text());
        let pack = of.pack.map(|_| pack_name(sequence));
        let dead = of.dead.then(|| dead_name(sequence));
        for name in parts.chain(pack).chain(dead) {
            if let Err(fault) = self.slots.directory.delete(&name) {
                log::warn!("{}: {name} is not deleted: {fault}", self.path().display());
                return;
            }
        }
    }

    /// Deletes the parts of former owners, which do not count any more.
    fn delete_parts(&self, before: &[String]) -> Result<(), BucketFault> {
        for (name, _) in self.slots.directory.list()?.objects {
            if let Some(Name::Part(part)) = Name::parse(&name)
                && before.contains(&part.token)
            {
                self.slots.directory.delete(&name)?;
            }
        }
        Ok(())
    }

    /// Examines the packs, many at a time.
    fn examine_all(&self, objects: &BTreeMap<u64, Objects>) -> Result<BTreeMap<u64, Found>, BucketFault> {
        let packs: Vec<(u64, u64)> =
            objects.iter().filter_map(|(sequence, of)| Some((*sequence, of.pack?))).collect();
        let examine = |(sequence, bytes): &(u64, u64)| self.examine(*sequence, *bytes);
        let found = each(&packs, examine, |_| ControlFlow::Continue(()))?;
        Ok(packs.into_iter().map(|(sequence, _)| sequence).zip(found).collect())
    }

    fn examine(&self, sequence: u64, bytes: u64) -> Result<Found, BucketFault> {
        let page = u64::from(PAGE_BYTES);
        let read = |range| match self.slots.directory.read(&pack_name(sequence), range) {
            Ok(bytes) => Ok(Some(bytes.as_ref().to_vec())),
            Err(BucketFault::Missing) => Ok(None),
            Err(fault) => Err(fault),
        };
        let expected = Expected { disk: &self.slots.uuid, geometry: &self.slots.geometry, sequence };
        if bytes < page {
            return Ok(Found::Refused(PackFault::Foreign));
        }
        let Some(tail) = read(bytes - page..bytes)? else { return Ok(Found::Missing) };
        let found = match expected.closed(&tail, bytes) {
            Some(closed) => closed.map(Found::Pack),
            None => match read(0..page)? {
                Some(head) => expected.begun(&head).map(|_| Found::Cut),
                None => Ok(Found::Missing),
            },
        };
        Ok(found.unwrap_or_else(Found::Refused))
    }

    /// Brings an extent that is not closed back into memory: what there is of a pack that was cut, and the
    /// parts. Returns its slot, or `None` if nothing was ever written to it.
    fn restore(&self, sequence: u64, of: &Objects, cut: bool) -> Result<Option<(u32, Slot)>, BucketFault> {
        let odd = |error: io::Error| BucketFault::Odd(error.to_string());
        let extent_bytes = u64::from(self.slots.geometry.extent_bytes());
        let open = OpenExtent::new(&self.slots.spool).map_err(odd)?;
        let mut header = None;
        let mut put = |from: u32, bytes: &[u8]| {
            if from == 0 {
                header = bytes.get(..PAGE_BYTES as usize).and_then(BatchHeader::extent_of);
            }
            open.restore(from, bytes).map_err(odd)
        };
        if let Some(bytes) = of.pack.filter(|_| cut) {
            let name = pack_name(sequence);
            log::warn!(
                "{}/{name}: truncated or damaged: what is intact in it is kept, and the rest is dropped",
                self.path().display()
            );
            let read = self.slots.directory.read(&name, 0..bytes.min(extent_bytes))?;
            put(0, read.as_ref())?;
        }
        for (part, bytes) in &of.parts {
            if u64::from(part.from).saturating_add(*bytes) > extent_bytes {
                continue;
            }
            let read = match self.slots.directory.read(&part.text(), 0..*bytes) {
                Err(BucketFault::Missing) => continue,
                read => read?,
            };
            put(part.from, read.as_ref())?;
        }
        let slot = header.filter(|extent| {
            extent.disk == self.slots.uuid
                && extent.sequence == sequence
                && extent.slot < self.slots.geometry.extents()
        });
        Ok(slot.map(|extent| (extent.slot, Slot::open(sequence, open))))
    }
}

impl Medium for PackBucket {
    const NAME: &'static str = Slots::NAME;
    const STACK_BYTES: usize = Slots::STACK_BYTES;

    fn accept(&self, io: &Io) {
        self.slots.accept(io);
    }

    fn carry_out(&self, io: Io) -> Completion {
        self.slots.carry_out(io)
    }

    fn close(&self) {
        Medium::close(&self.slots);
    }
}

/// Who writes to a directory.
fn read_owner(directory: &BucketDirectory) -> Result<(Owner, Version), BucketFault> {
    let (text, version) = directory.read_all(OWNER, OWNER_BYTES_MAX)?;
    Ok((Owner::parse(&String::from_utf8_lossy(&text)), version))
}

fn failed(path: &Path, action: &'static str, fault: BucketFault) -> DiskError {
    DiskError::Bucket { path: path.to_owned(), action, fault }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
