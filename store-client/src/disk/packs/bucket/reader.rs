//! A directory in a bucket as tools read it: nothing is put, and nothing is deleted.
//!
//! A request takes a hundred times as long as a read of a disk. So footers are fetched many at a time and
//! kept, and a pack that is verified is fetched as a whole, in ranges side by side.
//!
//! No lock says whether a node has the directory. It need not be refused, because packs do not change: what
//! its node has closed, given up or deleted meanwhile is found by listing the directory again at the end, and
//! damage in it does not count.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use store_core::disk::format::{DiskUuid, FIRST_EXTENT_AT, Superblock};

use super::parallel::each;
use super::slots::{Slot, Stage, locked};
use super::store::{BucketDirectory, Version};
use super::{Found, Objects, PackBucket, failed, read_owner};
use crate::disk::error::DiskError;
use crate::disk::packs::contents::{Closed, PAGES_BYTES, newest_superblock};
use crate::disk::packs::fault::BucketFault;
use crate::disk::packs::layout::pack_name;
use crate::disk::packs::names::is_uuid;
use crate::disk::packs::{PackFault, RefusedPack};
use crate::disk::survey::Damage;
use crate::disk::sys::AlignedBuffer;

/// Bytes of footers that are kept; others are fetched when they are needed.
const FOOTERS_BYTES_MAX: usize = 256 << 20;
/// Bytes of a range of a pack that is fetched as a whole.
const RANGE_BYTES: u64 = 8 << 20;
/// How often a request is tried, and the pause after the first try, which doubles each time.
pub(super) const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
/// Clusters below a prefix in which directories are looked for.
const CLUSTERS_MAX: usize = 64;

/// How far the opening has come: packs that were looked at, and all. `Break` ends it.
type Opening<'a> = &'a mut (dyn FnMut(u64, u64) -> ControlFlow<()> + Send);

/// A directory of packs in a bucket that is inspected or verified.
#[derive(Debug)]
pub struct PackBucketReader {
    packs: PackBucket,
    version: Version,
    /// What there was of each sequence.
    objects: BTreeMap<u64, Objects>,
    kept: Mutex<Kept>,
    /// Why the store could not be read.
    fault: Mutex<Option<BucketFault>>,
}

/// What was fetched of packs, by their slots.
#[derive(Debug, Default)]
struct Kept {
    footers: HashMap<u32, Vec<u8>>,
    /// The batches of one pack.
    whole: Option<(u32, Vec<u8>)>,
}

impl PackBucketReader {
    /// The directories of packs at an address: that one itself, those of a cluster, or those of all clusters
    /// below a prefix.
    ///
    /// # Errors
    /// The store refuses.
    pub fn find(path: &Path) -> Result<Vec<PathBuf>, DiskError> {
        let is_one = |path: &Path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_uuid);
        if is_one(path) {
            return Ok(vec![path.to_owned()]);
        }
        let (mut found, others): (Vec<_>, Vec<_>) =
            PackBucket::list(path)?.into_iter().partition(|path| is_one(path));
        for cluster in others.into_iter().take(CLUSTERS_MAX) {
            found.extend(PackBucket::list(&cluster)?.into_iter().filter(|path| is_one(path)));
        }
        Ok(found)
    }

    /// Opens a directory, and looks at all of its packs.
    ///
    /// # Errors
    /// As [`PackBucket::open`].
    pub fn open(path: &Path, progress: Opening<'_>) -> Result<Self, DiskError> {
        Self::open_in(BucketDirectory::open(path).map_err(|fault| failed(path, "open", fault))?, progress)
    }

    pub(super) fn open_in(directory: BucketDirectory, progress: Opening<'_>) -> Result<Self, DiskError> {
        let packs = PackBucket::open_in(directory)?;
        let (path, version) = (packs.path().to_owned(), packs.owner.1.clone());
        let (objects, kept, fault) = Default::default();
        let mut this = Self { packs, version, objects, kept, fault };
        this.look(progress).map_err(|fault| failed(&path, "read", fault))?;
        Ok(this)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.packs.path()
    }

    /// Its name for good.
    #[must_use]
    pub const fn uuid(&self) -> &DiskUuid {
        self.packs.uuid()
    }

    /// Bytes of all slots, as a disk counts them.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.packs.bytes()
    }

    /// Objects that are not packs of this directory, or not whole.
    #[must_use]
    pub fn refused(&self) -> &[RefusedPack] {
        self.packs.refused()
    }

    /// Lists the directory again. Damage in what its node has changed meanwhile is removed. Returns whether
    /// anything has changed.
    ///
    /// # Errors
    /// The store refuses.
    pub fn settle(&self, damage: &mut Vec<Damage>) -> Result<bool, DiskError> {
        let again = self.tried(|| {
            let (owner, version) = read_owner(&self.packs.slots.directory)?;
            let tokens = owner.before.iter().chain([&owner.token]);
            Ok((self.packs.objects_of(tokens)?.0, version))
        });
        let (now, version) = again.map_err(|fault| failed(self.path(), "list", fault))?;
        let sequences = self.objects.keys().chain(now.keys());
        let differs = |sequence: &&u64| self.objects.get(sequence) != now.get(sequence);
        let changed: BTreeSet<u64> = sequences.filter(differs).copied().collect();
        let any = version != self.version || !changed.is_empty();
        let of_slot = |slot: u32| self.packs.slots.sequence_in(slot);
        let geometry = self.packs.geometry();
        let is_stale = |damage: &Damage| match damage {
            Damage::Object(found) => changed.contains(&geometry.place(found.locator).0),
            Damage::Footer { slot } | Damage::Header { slot, .. } | Damage::Missing { slot, .. } => {
                of_slot(*slot).map_or(any, |sequence| changed.contains(&sequence))
            }
            Damage::Unreadable { at, .. } if *at >= FIRST_EXTENT_AT => {
                let slot = (at - FIRST_EXTENT_AT) / u64::from(geometry.extent_bytes());
                of_slot(slot as u32).is_some_and(|sequence| changed.contains(&sequence))
            }
            _ => false,
        };
        damage.retain(|damage| !is_stale(damage));
        Ok(any)
    }

    /// Repeats a request whose failure may pass.
    fn tried<T>(&self, mut request: impl FnMut() -> Result<T, BucketFault>) -> Result<T, BucketFault> {
        let mut pause = PAUSE;
        for _ in 1..TRIES {
            match request() {
                Err(fault) if fault.is_passing() => {
                    log::info!("{}: {fault}: another try", self.path().display());
                    self.packs.slots.spool.pause(pause);
                    pause *= 2;
                }
                result => return result,
            }
        }
        request()
    }

    fn look(&mut self, progress: Opening<'_>) -> Result<(), BucketFault> {
        let owner = &self.packs.owner.0;
        let tokens: Vec<String> = owner.before.iter().chain([&owner.token]).cloned().collect();
        let (mut objects, _) = self.tried(|| self.packs.objects_of(tokens.iter()))?;
        self.objects.clone_from(&objects);
        objects.retain(|sequence, of| !of.dead && !self.packs.owner.0.is_void(*sequence));
        let all: Vec<(&u64, &Objects)> = objects.iter().collect();
        let of = all.len() as u64;
        let seen = each(
            &all,
            |(sequence, objects)| self.tried(|| self.look_at(**sequence, objects)),
            |done| progress(done as u64, of),
        )?;
        let mut room = FOOTERS_BYTES_MAX;
        for ((sequence, of), (found, tail)) in all.into_iter().zip(seen) {
            let slot = match found {
                Found::Pack(Closed { slot, end, footer }) => {
                    if tail.len() <= room {
                        room -= tail.len();
                        locked(&self.kept).footers.insert(slot, tail);
                    }
                    Some((slot, Slot::new(*sequence, Stage::Pack { end, footer })))
                }
                Found::Refused(why) => {
                    self.refuse(*sequence, why);
                    continue;
                }
                Found::Cut => {
                    self.refuse(*sequence, PackFault::Cut);
                    self.tried(|| self.packs.restore(*sequence, of, true))?
                }
                Found::Missing => self.tried(|| self.packs.restore(*sequence, of, false))?,
            };
            if let Some((slot, file)) = slot {
                self.packs.slots.insert(slot, file);
            }
        }
        Ok(())
    }

    fn refuse(&mut self, sequence: u64, why: PackFault) {
        let path = self.path().join(pack_name(sequence));
        self.packs.refused.push(RefusedPack { path, why });
    }

    /// What there is of an extent, and its footer.
    fn look_at(&self, sequence: u64, of: &Objects) -> Result<(Found, Vec<u8>), BucketFault> {
        let Some(bytes) = of.pack else { return Ok((Found::Missing, Vec::new())) };
        let found = self.packs.examine(sequence, bytes)?;
        let Found::Pack(Closed { end, footer, .. }) = found else { return Ok((found, Vec::new())) };
        let range = u64::from(end)..u64::from(end) + u64::from(footer);
        match self.packs.slots.directory.read(&pack_name(sequence), range) {
            Ok(footer) => Ok((found, footer.as_ref().to_vec())),
            Err(BucketFault::Missing) => Ok((Found::Missing, Vec::new())),
            Err(fault) => Err(fault),
        }
    }

    pub(in crate::disk) fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        let pages = locked(&self.packs.slots.superblock);
        newest_superblock(&pages.bytes[..pages.bytes.len().min(PAGES_BYTES)], self.path())
    }

    pub(in crate::disk) fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        let kept = locked(&self.kept).fill(self, buffer, offset);
        if !kept {
            let read = self.packs.slots.read_into(buffer, offset, TRIES);
            read.inspect_err(|error| {
                if let Some(fault) = error.get_ref().and_then(|inner| inner.downcast_ref::<BucketFault>()) {
                    locked(&self.fault).get_or_insert_with(|| fault.clone());
                }
            })?;
        }
        Ok(buffer.len())
    }

    /// Whether there is no object of an extent.
    pub(in crate::disk) fn is_empty(&self, slot: u32) -> bool {
        self.packs.slots.sequence_in(slot).is_none()
    }

    /// Fetches all batches of a pack.
    pub(in crate::disk) fn will_read(&self, slot: u32) {
        locked(&self.kept).whole = None;
        let Some((sequence, Stage::Pack { end, .. })) = self.packs.slots.stage_of(slot) else { return };
        let end = u64::from(end);
        let from = (0..end).step_by(RANGE_BYTES as usize);
        let ranges: Vec<Range<u64>> = from.map(|from| from..(from + RANGE_BYTES).min(end)).collect();
        let (directory, name) = (&self.packs.slots.directory, pack_name(sequence));
        let read = |range: &Range<u64>| {
            self.tried(|| directory.read(&name, range.clone()).map(|bytes| bytes.as_ref().to_vec()))
        };
        match each(&ranges, read, |_| ControlFlow::Continue(())) {
            Ok(parts) => locked(&self.kept).whole = Some((slot, parts.concat())),
            // It is read part by part, so that what is there of it counts.
            Err(BucketFault::Missing | BucketFault::Short { .. }) => {}
            Err(fault) => drop(locked(&self.fault).get_or_insert(fault)),
        }
    }

    /// Whether everything could be read that is there.
    pub(in crate::disk) fn check(&self) -> Result<(), DiskError> {
        match &*locked(&self.fault) {
            Some(fault) => Err(failed(self.path(), "read", fault.clone())),
            None => Ok(()),
        }
    }
}

impl Kept {
    /// Fills a buffer, if all of it is here.
    fn fill(&self, of: &PackBucketReader, buffer: &mut [u8], offset: u64) -> bool {
        let geometry = of.packs.geometry();
        let Some(behind) = offset.checked_sub(FIRST_EXTENT_AT) else { return false };
        let extent_bytes = u64::from(geometry.extent_bytes());
        let (slot, within) = ((behind / extent_bytes) as u32, behind % extent_bytes);
        let to = within + buffer.len() as u64;
        let mut copy = |bytes: &[u8], at: u64| {
            let done = within >= at && to <= at + bytes.len() as u64;
            if done {
                buffer.copy_from_slice(&bytes[(within - at) as usize..(to - at) as usize]);
            }
            done
        };
        let whole = self.whole.as_ref().filter(|(of, _)| *of == slot);
        let footer = self.footers.get(&slot);
        whole.is_some_and(|(_, bytes)| copy(bytes, 0))
            || footer.is_some_and(|bytes| copy(bytes, extent_bytes - bytes.len() as u64))
    }
}
