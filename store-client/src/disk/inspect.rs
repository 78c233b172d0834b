//! What is on a disk, without changing it: for tools.
//!
//! A recovery writes: it gives footers to extents that have none. This reads the same structures and leaves
//! everything as it is, and it looks for damage where a recovery only looks for what can still be used.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;

use store_core::disk::Removed;
use store_core::disk::format::{
    BatchHeader, Dead, Entry, Extent, Footer, Geometry, Marks, PAGE_BYTES, Superblock,
};

use super::error::DiskError;
use super::file::DiskFile;
use super::image::is_intact;
#[cfg(feature = "s3")]
use super::packs::PackBucketReader;
use super::packs::PackDirectory;
use super::survey::{Damage, FoundObject, Progress, Survey, Verified};
use super::sys::AlignedBuffer;

/// Neighbouring images are read together up to so many bytes.
const RUN_BYTES: u32 = 8 << 20;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// What can be inspected: a disk, or a directory of packs.
pub trait Volume: sealed::Sealed {
    /// The current superblock, and how many of the two are valid.
    ///
    /// # Errors
    /// See [`DiskError`]: there is no valid one.
    fn superblocks(&self) -> Result<(Superblock, u32), DiskError>;

    /// Reads until the buffer is full, or the volume ends. Returns the bytes that were read.
    ///
    /// # Errors
    /// The read failed.
    fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize>;

    /// Whether every read is a request to another host: then headers of extents that have a footer are read
    /// only where every byte is.
    fn is_remote(&self) -> bool {
        false
    }

    /// Whether nothing was ever written to an extent, as far as that is known without reading it.
    fn is_empty(&self, _slot: u32) -> bool {
        false
    }

    /// All of an extent is about to be read.
    fn will_read(&self, _slot: u32) {}

    /// Whether what is there could be read so far; a volume may be out of reach.
    ///
    /// # Errors
    /// Why not.
    fn check(&self) -> Result<(), DiskError> {
        Ok(())
    }
}

impl sealed::Sealed for DiskFile {}

impl Volume for DiskFile {
    fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        Self::superblocks(self)
    }

    fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        Self::read_at(self, buffer, offset)
    }
}

impl sealed::Sealed for PackDirectory {}

impl Volume for PackDirectory {
    fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        Self::superblocks(self)
    }

    fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        Self::read_at(self, buffer, offset)
    }

    fn is_empty(&self, slot: u32) -> bool {
        Self::is_empty(self, slot)
    }
}

#[cfg(feature = "s3")]
impl sealed::Sealed for PackBucketReader {}

#[cfg(feature = "s3")]
impl Volume for PackBucketReader {
    fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        Self::superblocks(self)
    }

    fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        Self::read_at(self, buffer, offset)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn is_empty(&self, slot: u32) -> bool {
        Self::is_empty(self, slot)
    }

    fn will_read(&self, slot: u32) {
        Self::will_read(self, slot);
    }

    fn check(&self) -> Result<(), DiskError> {
        Self::check(self)
    }
}

/// The lists of one extent.
struct Lists {
    extent: Extent,
    has_footer: bool,
    end: u32,
    objects: Vec<(FoundObject, u32)>,
    dead: Vec<(Removed, u64)>,
}

struct Reader<'a> {
    file: &'a dyn Volume,
    superblock: Superblock,
    marks: Marks,
    damage: Vec<Damage>,
    /// Headers are read where a footer says the same.
    thorough: bool,
}

/// Reads superblocks, footers and headers of a disk.
///
/// # Errors
/// See [`DiskError`]: there is no valid superblock.
pub fn inspect(file: &dyn Volume) -> Result<Survey, DiskError> {
    let mut reader = Reader::new(file)?;
    let (survey, _) = reader.survey();
    file.check()?;
    Ok(Survey { damage: reader.damage, ..survey })
}

/// Reads everything that [`inspect`] reads, and the image of every object, and verifies their checksums.
/// `progress` is called often, and ends it with `Break`.
///
/// # Errors
/// As [`inspect`].
pub fn verify(
    file: &dyn Volume,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Verified, DiskError> {
    let mut reader = Reader::new(file)?;
    let (survey, dead) = reader.survey();
    file.check()?;
    reader.thorough = true;
    let mut so_far = Progress { objects: 0, of: survey.objects, damaged: 0, bytes: 0 };
    let mut damage = std::mem::take(&mut reader.damage);
    let mut complete = true;
    for slot in 0..survey.superblock.geometry.extents() {
        file.will_read(slot);
        let Some(lists) = reader.lists(slot) else { continue };
        if reader.verify(&lists, &dead, &mut so_far, &mut progress).is_break() {
            complete = false;
            break;
        }
        file.check()?;
    }
    // The lists were read a second time: only what concerns objects is new.
    let is_new = |damage: &Damage| matches!(damage, Damage::Object(_));
    let (objects, again): (Vec<_>, Vec<_>) = reader.damage.into_iter().partition(is_new);
    let fresh: Vec<_> = again.into_iter().filter(|other| !damage.contains(other)).collect();
    damage.extend(objects);
    damage.extend(fresh);
    let Progress { objects, damaged, bytes, .. } = so_far;
    Ok(Verified { survey: Survey { damage, ..survey }, objects, damaged, bytes, complete })
}

impl<'a> Reader<'a> {
    fn new(file: &'a dyn Volume) -> Result<Self, DiskError> {
        let (superblock, valid) = file.superblocks()?;
        // A disk that was just formatted has written one of them.
        let both = valid == 2 || superblock.serial <= 1;
        let damage = if both { Vec::new() } else { vec![Damage::Superblock] };
        Ok(Self { file, marks: superblock.marks, superblock, damage, thorough: !file.is_remote() })
    }

    /// Reads all lists once. Returns the tombstones, with the last sequence that each concerns.
    fn survey(&mut self) -> (Survey, BTreeMap<Removed, u64>) {
        let mut survey = Survey {
            superblock: self.superblock.clone(),
            closed: 0,
            open: 0,
            free: 0,
            bad: 0,
            objects: 0,
            object_bytes: 0,
            removed: 0,
            tombstones: 0,
            lineages: BTreeMap::new(),
            newest: None,
            damage: Vec::new(),
        };
        let mut dead: BTreeMap<Removed, u64> = BTreeMap::new();
        let mut ends = BTreeMap::new();
        for slot in 0..self.superblock.geometry.extents() {
            if self.superblock.bad.contains(&slot) {
                survey.bad += 1;
                continue;
            }
            let Some(lists) = self.lists(slot) else {
                survey.free += 1;
                continue;
            };
            *(if lists.has_footer { &mut survey.closed } else { &mut survey.open }) += 1;
            ends.insert(lists.extent.sequence, (lists.end, slot));
            if survey.newest.is_none_or(|newest| newest.sequence < lists.extent.sequence) {
                survey.newest = Some(lists.extent);
            }
            for (object, upto) in lists.dead {
                let known = dead.entry(object).or_default();
                *known = upto.max(*known);
            }
        }
        survey.tombstones = dead.len() as u64;
        self.count(&mut survey, &dead);
        for mark in self.marks.streams {
            let reached = ends.get(&mark.sequence).map_or(0, |(end, _)| *end);
            if mark.offset > reached && mark.sequence >= self.superblock.floor {
                let slot = ends.get(&mark.sequence).map_or(u32::MAX, |(_, slot)| *slot);
                self.damage.push(Damage::Missing { slot, synced_to: mark.offset });
            }
        }
        (survey, dead)
    }

    /// Counts objects, now that all tombstones are known. Lists are read again, so that a disk of any size
    /// needs little memory.
    fn count(&mut self, survey: &mut Survey, dead: &BTreeMap<Removed, u64>) {
        let known = std::mem::take(&mut self.damage);
        for slot in 0..self.superblock.geometry.extents() {
            let Some(lists) = self.lists(slot) else { continue };
            for (found, _) in &lists.objects {
                if is_dead(dead, &found.object, lists.extent.sequence) {
                    survey.removed += 1;
                } else {
                    survey.objects += 1;
                    survey.object_bytes += u64::from(found.len);
                    *survey.lineages.entry(lists.extent.lineage).or_default() += 1;
                }
            }
        }
        self.damage = known;
    }

    fn read(&mut self, at: u64, bytes: u32) -> Option<AlignedBuffer> {
        let mut buffer = AlignedBuffer::new(bytes as usize);
        match self.file.read_at(&mut buffer, at) {
            Ok(read) if read == buffer.len() => Some(buffer),
            Ok(_) => None,
            Err(error) => {
                self.damage.push(Damage::Unreadable { at, error: error.to_string() });
                None
            }
        }
    }

    /// The lists of the extent in a slot. `None`: there is nothing valid.
    fn lists(&mut self, slot: u32) -> Option<Lists> {
        if self.superblock.bad.contains(&slot) || self.file.is_empty(slot) {
            return None;
        }
        let footer = self.footer(slot);
        let walked = match &footer {
            Some(_) if !self.thorough => None,
            footer => self.walk(slot, footer.as_ref()),
        };
        let newest = |lists: &Lists| (lists.extent.sequence, lists.has_footer);
        let lists = footer.into_iter().chain(walked).max_by_key(newest)?;
        (lists.extent.sequence >= self.superblock.floor).then_some(lists)
    }

    fn footer(&mut self, slot: u32) -> Option<Lists> {
        let (uuid, geometry) = (self.superblock.disk, self.superblock.geometry);
        let end = geometry.extent_at(slot) + u64::from(geometry.extent_bytes());
        let page = self.read(end - u64::from(PAGE_BYTES), PAGE_BYTES)?;
        let Some(tail) = Footer::decode_tail(&page, &uuid, &geometry, slot) else {
            if is_damaged_tail(&page) {
                self.damage.push(Damage::Footer { slot });
            }
            return None;
        };
        let bytes = self.read(end - u64::from(tail.footer_bytes), tail.footer_bytes)?;
        let Some(footer) = Footer::decode(&bytes, &uuid, &geometry, slot) else {
            self.damage.push(Damage::Footer { slot });
            return None;
        };
        self.marks = self.marks.max(footer.marks);
        let (mut objects, mut dead) = (Vec::new(), Vec::new());
        take(&geometry, &footer.extent, footer.end, &footer.entries, &footer.dead, &mut objects, &mut dead);
        Some(Lists { extent: footer.extent, has_footer: true, end: footer.end, objects, dead })
    }

    /// Follows the headers of an extent. Where there is a footer, all of them have to be there.
    fn walk(&mut self, slot: u32, footer: Option<&Lists>) -> Option<Lists> {
        let (uuid, geometry) = (self.superblock.disk, self.superblock.geometry);
        let mut lists: Option<Lists> = None;
        let mut at = 0;
        while at < geometry.extent_bytes() {
            let bytes = self.header_bytes(slot, at)?;
            let header = BatchHeader::decode(&bytes, &uuid, &geometry, slot, at);
            let wanted = lists.as_ref().map(|lists| lists.extent);
            let header = header.filter(|header| wanted.is_none_or(|extent| extent == header.extent));
            let Some(header) = header else { break };
            self.marks = self.marks.max(header.marks);
            let extent = header.extent;
            let new = || Lists { extent, has_footer: false, end: 0, objects: Vec::new(), dead: Vec::new() };
            let lists = lists.get_or_insert_with(new);
            at += header.batch_bytes;
            lists.end = at;
            let Lists { objects, dead, .. } = lists;
            take(&geometry, &extent, at, &header.entries, &header.dead, objects, dead);
        }
        let same = |footer: &&Lists| lists.as_ref().is_none_or(|it| it.extent == footer.extent);
        match footer.filter(same) {
            Some(footer) if at < footer.end && footer.extent.sequence >= self.superblock.floor => {
                self.damage.push(Damage::Header { slot, offset: at });
            }
            Some(_) => {}
            None => self.look_behind(slot, at, lists.as_ref().map(|lists| lists.extent)),
        }
        lists
    }

    /// Whether there is a header behind the place where the headers of an extent without a footer end.
    fn look_behind(&mut self, slot: u32, end: u32, extent: Option<Extent>) {
        let (uuid, geometry) = (self.superblock.disk, self.superblock.geometry);
        let mut at = end;
        while at + PAGE_BYTES <= geometry.extent_bytes() {
            let bytes = (geometry.extent_bytes() - at).min(RUN_BYTES);
            let Some(run) = self.read(geometry.extent_at(slot) + u64::from(at), bytes) else { return };
            for from in (0..bytes).step_by(PAGE_BYTES as usize) {
                let rest = &run[from as usize..];
                let header = BatchHeader::decode(rest, &uuid, &geometry, slot, at + from);
                let later = |header: &BatchHeader<'_>| match extent {
                    Some(extent) => header.extent == extent,
                    // Without a first header: something newer than what was given up.
                    None => self.marks.streams.iter().any(|mark| header.extent.sequence >= mark.sequence),
                };
                if header.filter(later).is_some() {
                    return self.damage.push(Damage::Header { slot, offset: end });
                }
            }
            at += bytes;
        }
    }

    fn header_bytes(&mut self, slot: u32, at: u32) -> Option<AlignedBuffer> {
        let geometry = self.superblock.geometry;
        let from = geometry.extent_at(slot) + u64::from(at);
        let page = self.read(from, PAGE_BYTES)?;
        match BatchHeader::announced_bytes(&page, &geometry) {
            Some(bytes) if bytes > PAGE_BYTES && bytes <= geometry.extent_bytes() - at => {
                self.read(from, bytes)
            }
            _ => Some(page),
        }
    }

    /// Verifies the objects of an extent.
    fn verify(
        &mut self,
        lists: &Lists,
        dead: &BTreeMap<Removed, u64>,
        so_far: &mut Progress,
        progress: &mut impl FnMut(Progress) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let geometry = self.superblock.geometry;
        let base = geometry.extent_at(lists.extent.slot);
        let live = lists.objects.iter().filter(|(it, _)| !is_dead(dead, &it.object, lists.extent.sequence));
        let live: Vec<&(FoundObject, u32)> = live.collect();
        let image = |it: &(FoundObject, u32)| geometry.image_bytes(it.0.len.into());
        let mut from = 0;
        while from < live.len() {
            let begin = live[from].1;
            let fits = |it: &&&(FoundObject, u32)| it.1 + image(it) - begin <= RUN_BYTES;
            let count = live[from..].iter().take_while(fits).count().max(1);
            let run = &live[from..from + count];
            from += count;
            let end = run.last().map_or(begin, |it| it.1 + image(it));
            let bytes = self.read(base + u64::from(begin), end - begin);
            so_far.bytes += u64::from(end - begin);
            for it in run {
                let own;
                let image = match &bytes {
                    Some(bytes) => bytes.get((it.1 - begin) as usize..).unwrap_or_default(),
                    // One of them cannot be read: each by itself.
                    None => {
                        own = self.read(base + u64::from(it.1), image(it));
                        own.as_deref().unwrap_or_default()
                    }
                };
                so_far.objects += 1;
                if !is_intact(image, it.0.len.into(), it.0.crc32c) {
                    so_far.damaged += 1;
                    self.damage.push(Damage::Object(it.0.clone()));
                }
            }
            progress(*so_far)?;
        }
        ControlFlow::Continue(())
    }
}

fn take(
    geometry: &Geometry,
    extent: &Extent,
    end: u32,
    entries: &[Entry<'_>],
    removed: &[Dead<'_>],
    objects: &mut Vec<(FoundObject, u32)>,
    dead: &mut Vec<(Removed, u64)>,
) {
    for Entry { tenant, key, generation, len, crc32c, offset } in entries.iter().copied() {
        let object = Removed { generation, tenant, key: key.into() };
        let locator = geometry.locator(extent.sequence, offset);
        if offset < end {
            objects.push((FoundObject { object, len, crc32c, locator }, offset));
        }
    }
    for Dead { tenant, key, generation, upto } in removed {
        dead.push((Removed { generation: *generation, tenant: *tenant, key: (*key).into() }, *upto));
    }
}

fn is_dead(dead: &BTreeMap<Removed, u64>, object: &Removed, sequence: u64) -> bool {
    dead.get(object).is_some_and(|upto| *upto >= sequence)
}

/// Whether a last page that has no valid tail should have one: those of extents that are not full, or were
/// given up, are zeros, and what is left of an earlier format is valid by itself.
fn is_damaged_tail(page: &[u8]) -> bool {
    let Some((_, tail)) = page.split_last_chunk::<{ store_core::disk::format::TAIL_BYTES }>() else {
        return false;
    };
    let Some((body, crc)) = tail.split_last_chunk::<4>() else { return false };
    let whole = te_host::crc32c_of(0, body) == u32::from_le_bytes(*crc);
    let named = body.iter().zip(b"SnowFoot").filter(|(a, b)| a != b).count() <= 1;
    !whole && named
}
