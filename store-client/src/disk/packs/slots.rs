//! The files behind the slots of a directory of packs: how reads and writes of a disk become those of files.
//!
//! ```text
//!   the core           [batch][batch] … [batch]      free      [footer]
//!   <sequence>.open    [batch][batch] … [batch]                           appended to
//!   <sequence>.pack    [batch][batch] … [batch][footer]                   synced, then renamed: immutable
//! ```

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use store_core::disk::format::{BatchHeader, DiskUuid, FIRST_EXTENT_AT, Footer, Geometry};

use super::names::{Kind, file_name};
use super::owner::Owner;
use super::room::Fullness;
use crate::disk::driver::{Completion, Destination, Io, IoWork, Part};
use crate::disk::sys::{self, AlignedBuffer, Alignment, Transfer};
use crate::disk::threads::Medium;

/// The page cache copies, so memory needs no alignment.
const ALIGNMENT: Alignment = Alignment { memory: 1, block: 512 };

/// What there is of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No file yet.
    New,
    /// A file that batches are appended to.
    Open,
    /// A pack: where its batches end, and bytes of its footer.
    Pack { end: u32, footer: u32 },
    /// The same, given up.
    Dead { end: u32, footer: u32 },
}

#[derive(Debug)]
pub(super) struct Slot {
    sequence: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    stage: Stage,
    file: Option<Arc<File>>,
    /// Whose room this one takes: its file goes first.
    replaced: Option<Arc<Slot>>,
}

impl Slot {
    pub(super) fn new(sequence: u64, stage: Stage) -> Self {
        Self { sequence, inner: Mutex::new(Inner { stage, file: None, replaced: None }) }
    }
}

/// What was written since the last sync.
#[derive(Debug, Default)]
struct Dirty {
    superblock: bool,
    directory: bool,
    slots: HashSet<u32>,
}

/// The files of a directory, once it was taken or opened to be read.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) directory: PathBuf,
    pub(super) uuid: DiskUuid,
    pub(super) geometry: Geometry,
    /// Who has taken it; `None`: it is only read.
    pub(super) token: Option<String>,
    pub(super) superblock: File,
    pub(super) full: Arc<Fullness>,
    map: Mutex<HashMap<u32, Arc<Slot>>>,
    dirty: Mutex<Dirty>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost(directory: &Path) -> io::Error {
    io::Error::other(format!("{}: another node has taken this directory of packs", directory.display()))
}

impl Slots {
    pub(super) fn new(
        directory: PathBuf,
        uuid: DiskUuid,
        geometry: Geometry,
        superblock: File,
        full: Arc<Fullness>,
    ) -> Self {
        let (map, dirty) = (Mutex::default(), Mutex::default());
        Self { directory, uuid, geometry, token: None, superblock, full, map, dirty }
    }

    pub(super) fn insert(&self, slot: u32, file: Slot) -> Option<Arc<Slot>> {
        locked(&self.map).insert(slot, Arc::new(file))
    }

    fn get(&self, slot: u32) -> Option<Arc<Slot>> {
        locked(&self.map).get(&slot).cloned()
    }

    pub(super) fn sequence_in(&self, slot: u32) -> Option<u64> {
        self.get(slot).map(|slot| slot.sequence)
    }

    pub(super) fn path(&self, sequence: u64, kind: Kind) -> PathBuf {
        self.directory.join(file_name(sequence, kind))
    }

    /// The slot of an offset, and the offset in it.
    fn place(&self, offset: u64) -> (u32, u32) {
        let (behind, bytes) = (offset - FIRST_EXTENT_AT, u64::from(self.geometry.extent_bytes()));
        ((behind / bytes) as u32, (behind % bytes) as u32)
    }

    /// Whether this process is still the one that writes here. Before each step that changes names.
    fn check(&self) -> io::Result<()> {
        let Some(token) = &self.token else { return Err(lost(&self.directory)) };
        let owner = Owner::read(&self.directory)?;
        if owner.token == *token { Ok(()) } else { Err(lost(&self.directory)) }
    }

    /// A write that is more than a write to a file; `None`: it is none.
    fn write(&self, offset: u64, bytes: u32, parts: &[Part]) -> Option<io::Result<u32>> {
        if offset < FIRST_EXTENT_AT {
            return match self.check() {
                // The same offset.
                Ok(()) => None,
                Err(error) => Some(Err(error)),
            };
        }
        let (slot, within) = self.place(offset);
        if parts.iter().all(|part| matches!(part, Part::Zeros(_))) {
            // The core destroys the first header and the footer of an extent that it gives up.
            let given_up = if within == 0 { self.give_up(slot) } else { Ok(()) };
            return Some(given_up.map(|()| bytes));
        }
        let ends_extent = within.checked_add(bytes) == Some(self.geometry.extent_bytes());
        match parts.first() {
            Some(Part::Bytes(footer, from)) if ends_extent => Some(self.close(slot, footer, *from)),
            _ => None,
        }
    }

    /// The file of a slot that is written to, and whether it was made now.
    fn writable(&self, no: u32) -> io::Result<Arc<File>> {
        let slot = self.get(no).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let mut inner = locked(&slot.inner);
        match inner.stage {
            Stage::Open => {
                if inner.file.is_none() {
                    let file = OpenOptions::new()
                        .read(true)
                        .write(true)
                        .open(self.path(slot.sequence, Kind::Open))?;
                    inner.file = Some(Arc::new(file));
                }
            }
            Stage::New => {
                self.check()?;
                if let Some(old) = inner.replaced.take() {
                    // Its room is free: the master has dropped its places.
                    Kind::ALL
                        .into_iter()
                        .for_each(|kind| drop(fs::remove_file(self.path(old.sequence, kind))));
                }
                let path = self.path(slot.sequence, Kind::Open);
                let file =
                    OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
                (inner.file, inner.stage) = (Some(Arc::new(file)), Stage::Open);
                locked(&self.dirty).directory = true;
            }
            Stage::Pack { .. } | Stage::Dead { .. } => {
                return Err(io::Error::other("a closed pack is not written to"));
            }
        }
        inner.file.clone().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Appends the footer to an open file, makes all of it durable, and gives it the name of a pack.
    fn close(&self, no: u32, footer: &[u8], from: u32) -> io::Result<u32> {
        let tail = Footer::decode_any_tail(footer, &self.uuid, &self.geometry);
        let tail = tail.ok_or_else(|| io::Error::other("not a footer"))?;
        let file = self.writable(no)?;
        let slot = self.get(no).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let (end, from) = (u64::from(tail.end), from as usize);
        // Behind the last batch may be what a crash has torn.
        file.set_len(end + from as u64)?;
        let rest = footer.get(from..).unwrap_or_default();
        file.write_all_at(rest, end + from as u64)?;
        file.sync_all()?;
        self.check()?;
        fs::rename(self.path(slot.sequence, Kind::Open), self.path(slot.sequence, Kind::Pack))?;
        let mut inner = locked(&slot.inner);
        (inner.stage, inner.file) = (Stage::Pack { end: tail.end, footer: tail.footer_bytes }, None);
        drop(inner);
        locked(&self.dirty).slots.remove(&no);
        sync_directory(&self.directory)?;
        Ok(rest.len() as u32)
    }

    /// The pack does not count any more. Readers that have a lease still find its bytes.
    fn give_up(&self, no: u32) -> io::Result<()> {
        let Some(slot) = self.get(no) else { return Ok(()) };
        self.check()?;
        let mut inner = locked(&slot.inner);
        let (kind, stage) = match inner.stage {
            Stage::Pack { end, footer } => (Kind::Pack, Stage::Dead { end, footer }),
            Stage::Open => (Kind::Open, Stage::Dead { end: u32::MAX, footer: 0 }),
            Stage::New | Stage::Dead { .. } => return Ok(()),
        };
        match fs::rename(self.path(slot.sequence, kind), self.path(slot.sequence, Kind::Dead)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        (inner.stage, inner.file) = (stage, None);
        locked(&self.dirty).directory = true;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let Dirty { superblock, directory, slots } = std::mem::take(&mut *locked(&self.dirty));
        if superblock {
            sys::sync_data(&self.superblock)?;
        }
        for no in slots {
            let file = self.get(no).and_then(|slot| locked(&slot.inner).file.clone());
            if let Some(file) = file {
                file.sync_all()?;
            }
        }
        if directory { sync_directory(&self.directory) } else { Ok(()) }
    }

    /// The file to read an extent from, where its batches end, and bytes of its footer.
    fn readable(&self, no: u32) -> io::Result<Option<(Arc<File>, u32, u32)>> {
        let Some(slot) = self.get(no) else { return Ok(None) };
        let inner = locked(&slot.inner);
        let (kind, end, footer) = match inner.stage {
            Stage::New => return Ok(None),
            Stage::Open => (Kind::Open, self.geometry.extent_bytes(), 0),
            Stage::Pack { end, footer } => (Kind::Pack, end, footer),
            Stage::Dead { end, footer } => (Kind::Dead, end.min(self.geometry.extent_bytes()), footer),
        };
        if let Some(file) = &inner.file {
            return Ok(Some((Arc::clone(file), end, footer)));
        }
        let path = self.path(slot.sequence, kind);
        drop(inner);
        Ok(Some((Arc::new(File::open(path)?), end, footer)))
    }

    /// Fills a buffer with what a disk would have at this offset. What no file has is zeros.
    pub(super) fn read_into(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        buffer.fill(0);
        if offset < FIRST_EXTENT_AT {
            return read_part(&self.superblock, buffer, offset);
        }
        let (no, within) = self.place(offset);
        let extent_bytes = self.geometry.extent_bytes();
        let last = u64::from(within) + buffer.len() as u64;
        if last > u64::from(extent_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let Some((file, end, footer)) = self.readable(no)? else { return Ok(()) };
        let (from, to) = (within, last as u32);
        if from < end {
            let count = (to.min(end) - from) as usize;
            read_part(&file, &mut buffer[..count], from.into())?;
        }
        let foot = extent_bytes - footer;
        if footer > 0 && to > foot {
            let begin = from.max(foot);
            let at = u64::from(end) + u64::from(begin - foot);
            read_part(&file, &mut buffer[(begin - from) as usize..], at)?;
        }
        Ok(())
    }

    fn note_end(&self, offset: u64, result: &io::Result<u32>) {
        match result {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)) => {
                self.full.note();
            }
            Err(error) => log::warn!("{}: {error}", self.directory.display()),
            Ok(_) if offset < FIRST_EXTENT_AT => locked(&self.dirty).superblock = true,
            Ok(_) => {
                locked(&self.dirty).slots.insert(self.place(offset).0);
            }
        }
    }

    /// A write at the same place of a file: to the superblock, or to an open file.
    fn write_through(&self, io: Io) -> Completion {
        let Io { op, offset, work } = io;
        let (file, at) = if offset < FIRST_EXTENT_AT {
            (None, offset)
        } else {
            let (slot, within) = self.place(offset);
            match self.writable(slot) {
                Ok(file) => (Some(file), within.into()),
                Err(error) => {
                    let result = Err(error);
                    self.note_end(offset, &result);
                    return Completion { op, result: result.map_err(Into::into), data: None };
                }
            }
        };
        let transfer = Transfer::new(Io { op, offset: at, work }, ALIGNMENT);
        let result = transfer.run(file.as_deref().unwrap_or(&self.superblock));
        self.note_end(offset, &result);
        transfer.end(result)
    }

    fn read_lent(&self, io: Io) -> Completion {
        let Io { op, offset, work } = io;
        let (no, within) = self.place(offset);
        let bytes = work.bytes();
        let found = self.readable(no).and_then(|found| {
            let found = found.filter(|(_, end, _)| within.checked_add(bytes).is_some_and(|to| to <= *end));
            found.ok_or_else(|| io::ErrorKind::NotFound.into())
        });
        match found {
            Err(error) => Completion { op, result: Err(error.into()), data: None },
            Ok((file, ..)) => {
                let transfer = Transfer::new(Io { op, offset: within.into(), work }, ALIGNMENT);
                let result = transfer.run(&file);
                transfer.end(result)
            }
        }
    }
}

impl Medium for Slots {
    const NAME: &'static str = "packs";

    fn accept(&self, io: &Io) {
        let IoWork::Write(parts) = &io.work else { return };
        let Some(Part::Bytes(header, 0)) = parts.first() else { return };
        if io.offset < FIRST_EXTENT_AT || self.place(io.offset).1 != 0 {
            return;
        }
        let Some(extent) = BatchHeader::extent_of(header) else { return };
        let mut map = locked(&self.map);
        if map.get(&extent.slot).is_some_and(|slot| slot.sequence == extent.sequence) {
            // The rest of a write that ended early.
            return;
        }
        let slot = Slot::new(extent.sequence, Stage::New);
        locked(&slot.inner).replaced = map.get(&extent.slot).cloned();
        map.insert(extent.slot, Arc::new(slot));
    }

    fn carry_out(&self, io: Io) -> Completion {
        let Io { op, offset, work } = io;
        match work {
            IoWork::Sync => {
                let result = self.sync().map(|()| 0);
                if let Err(error) = &result {
                    log::warn!("{}: {error}", self.directory.display());
                }
                Completion { op, result: result.map_err(Into::into), data: None }
            }
            IoWork::Read(Destination::Buffer(mut buffer)) => {
                let bytes = buffer.len() as u32;
                let result = self.read_into(&mut buffer, offset).map(|()| bytes);
                Completion { op, result: result.map_err(Into::into), data: Some(buffer) }
            }
            IoWork::Read(Destination::Lent { .. }) => self.read_lent(Io { op, offset, work }),
            IoWork::Write(ref parts) => match self.write(offset, work.bytes(), parts) {
                Some(result) => {
                    if result.is_err() {
                        self.note_end(offset, &result);
                    }
                    Completion { op, result: result.map_err(Into::into), data: None }
                }
                None => self.write_through(Io { op, offset, work }),
            },
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn read_part(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => return Ok(()),
            Ok(bytes) => done += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes names durable. Where a file system does not sync directories, its renames are durable as they are.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    match File::open(directory)?.sync_all() {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EBADF | libc::EOPNOTSUPP)) => {
            Ok(())
        }
        result => result,
    }
}

/// The first bytes of a file; fewer where it is shorter.
pub(super) fn first_bytes(file: &File, bytes: usize) -> io::Result<AlignedBuffer> {
    let mut buffer = AlignedBuffer::new(bytes);
    read_part(file, &mut buffer, 0)?;
    Ok(buffer)
}
