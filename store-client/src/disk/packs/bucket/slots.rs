//! The objects behind the slots of a directory in a bucket: how reads and writes of a disk become requests.
//!
//! ```text
//!   the core     [batch][batch] … [batch]        free        [footer]
//!   memory       [batch][batch] … [batch]                              until it is closed
//!   parts        [......][.......][.....]                              put at each sync, deleted afterwards
//!   the pack     [batch][batch] … [batch][footer]                      put as a whole: immutable
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use store_core::disk::format::{BatchHeader, DiskUuid, FIRST_EXTENT_AT, Footer, Geometry, PAGE_BYTES};

use super::spool::Spool;
use super::store::{BucketDirectory, Payload, Put, Version};
use super::{Gone, SUPERBLOCK_BYTES, read_owner};
use crate::disk::driver::{Completion, Destination, Io, IoWork, Part};
use crate::disk::packs::fault::BucketFault;
use crate::disk::packs::layout::{PartName, dead_name, pack_name};
use crate::disk::packs::names::SUPERBLOCK;
use crate::disk::sys::{Alignment, Transfer, memory_file};
use crate::disk::threads::Medium;

const ALIGNMENT: Alignment = Alignment { memory: 1, block: 512 };
/// The pause after a request that failed, which doubles each time.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Shortest time between two log lines about a failure that persists.
const LOG_PAUSE: Duration = Duration::from_secs(10);
/// Tries of a read whose reader has a deadline.
const READ_TRIES: u32 = 2;

/// What there is of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing yet.
    New,
    /// Memory that batches are written to, and parts in the bucket.
    Open,
    /// A pack: where its batches end, and bytes of its footer.
    Pack { end: u32, footer: u32 },
    /// It is given up; what there was of it is still there.
    Dead { end: u32, footer: u32 },
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) sequence: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    stage: Stage,
    open: Option<Arc<OpenExtent>>,
    /// Whose room this one takes: its objects go first.
    replaced: Option<Arc<Slot>>,
}

/// An extent in memory.
#[derive(Debug)]
pub(super) struct OpenExtent {
    file: File,
    spool: Arc<Spool>,
    state: Mutex<OpenState>,
}

#[derive(Debug, Default)]
struct OpenState {
    /// Bytes of the spool.
    taken: u64,
    /// What was written since the last sync.
    dirty: Option<Range<u32>>,
    /// Its parts in the bucket.
    parts: Vec<String>,
    serial: u32,
}

impl OpenExtent {
    pub(super) fn new(spool: &Arc<Spool>) -> io::Result<Self> {
        Ok(Self { file: memory_file()?, spool: Arc::clone(spool), state: Mutex::default() })
    }

    /// Room up to this offset.
    fn reserve(&self, to: u64) -> io::Result<()> {
        let more = to.saturating_sub(locked(&self.state).taken);
        if more > 0 {
            self.spool.take(more)?;
            locked(&self.state).taken += more;
        }
        Ok(())
    }

    fn wrote(&self, range: Range<u32>) {
        let dirty = &mut locked(&self.state).dirty;
        *dirty = Some(match dirty.take() {
            Some(dirty) => dirty.start.min(range.start)..dirty.end.max(range.end),
            None => range,
        });
    }

    /// Puts bytes there that were found in the bucket.
    pub(super) fn restore(&self, from: u32, bytes: &[u8]) -> io::Result<()> {
        self.reserve(u64::from(from) + bytes.len() as u64)?;
        self.file.write_all_at(bytes, from.into())?;
        self.wrote(from..from + bytes.len() as u32);
        Ok(())
    }
}

impl Drop for OpenExtent {
    fn drop(&mut self) {
        self.spool.give(locked(&self.state).taken);
    }
}

impl Slot {
    pub(super) fn new(sequence: u64, stage: Stage) -> Self {
        Self { sequence, inner: Mutex::new(Inner { stage, open: None, replaced: None }) }
    }

    pub(super) fn open(sequence: u64, open: OpenExtent) -> Self {
        let inner = Inner { stage: Stage::Open, open: Some(Arc::new(open)), replaced: None };
        Self { sequence, inner: Mutex::new(inner) }
    }
}

/// The superblock as it is to be in the bucket, and the version that is there.
#[derive(Debug, Default)]
pub(super) struct Pages {
    pub(super) bytes: Vec<u8>,
    pub(super) version: Option<Version>,
    pub(super) dirty: bool,
}

/// The objects of a directory.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) directory: BucketDirectory,
    pub(super) uuid: DiskUuid,
    pub(super) geometry: Geometry,
    /// Who has taken it; `None`: nothing is written.
    pub(super) token: Option<String>,
    pub(super) superblock: Mutex<Pages>,
    pub(super) spool: Arc<Spool>,
    pub(super) gone: Gone,
    map: Mutex<HashMap<u32, Arc<Slot>>>,
    logged: Mutex<Option<Instant>>,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slots {
    pub(super) fn new(directory: BucketDirectory, uuid: DiskUuid, geometry: Geometry, pages: Pages) -> Self {
        let (spool, gone, map, logged) = Default::default();
        Self {
            directory,
            uuid,
            geometry,
            token: None,
            superblock: Mutex::new(pages),
            spool,
            gone,
            map,
            logged,
        }
    }

    pub(super) fn insert(&self, slot: u32, file: Slot) -> Option<Arc<Slot>> {
        locked(&self.map).insert(slot, Arc::new(file))
    }

    pub(super) fn clear(&self) {
        locked(&self.map).clear();
    }

    fn get(&self, slot: u32) -> Option<Arc<Slot>> {
        locked(&self.map).get(&slot).cloned()
    }

    pub(super) fn sequence_in(&self, slot: u32) -> Option<u64> {
        self.get(slot).map(|slot| slot.sequence)
    }

    /// The sequence of the extent in a slot, and what there is of it.
    pub(super) fn stage_of(&self, slot: u32) -> Option<(u64, Stage)> {
        self.get(slot).map(|slot| (slot.sequence, locked(&slot.inner).stage))
    }

    /// The slot of an offset, and the offset in it.
    fn place(&self, offset: u64) -> (u32, u32) {
        let (behind, bytes) = (offset - FIRST_EXTENT_AT, u64::from(self.geometry.extent_bytes()));
        ((behind / bytes) as u32, (behind % bytes) as u32)
    }

    /// Whether this process is still the one that writes here. Before each request that changes something.
    fn check(&self) -> Result<(), BucketFault> {
        let Some(token) = &self.token else { return Err(BucketFault::Lost) };
        match read_owner(&self.directory) {
            Ok((owner, _)) if owner.token == *token => Ok(()),
            Ok(_) | Err(BucketFault::Missing) => Err(BucketFault::Lost),
            Err(fault) => Err(fault),
        }
    }

    /// Does something that has to be done, as often as it takes: a store that is away comes back. Ends when
    /// another node has taken the directory, or the disk is closed.
    fn persist<T>(
        &self,
        what: &str,
        mut step: impl FnMut() -> Result<T, BucketFault>,
    ) -> Result<T, BucketFault> {
        let mut pause = PAUSE_MIN;
        loop {
            let fault = match self.check().and_then(|()| step()) {
                Ok(value) => return Ok(value),
                Err(BucketFault::Lost) => return Err(BucketFault::Lost),
                // The step goes on differently.
                Err(BucketFault::Exists) => continue,
                Err(fault) => fault,
            };
            self.complain(what, &fault);
            pause = if fault.is_passing() { (2 * pause).min(PAUSE_MAX) } else { PAUSE_MAX };
            if self.spool.pause(jittered(pause)) {
                return Err(BucketFault::Closed);
            }
        }
    }

    fn complain(&self, what: &str, fault: &BucketFault) {
        let mut logged = locked(&self.logged);
        if logged.is_none_or(|at| at.elapsed() >= LOG_PAUSE) {
            *logged = Some(Instant::now());
            log::warn!("{}: cannot {what}, will try again: {fault}", self.directory.path().display());
        }
    }

    /// Everything of an extent goes; the mark that it does not count goes last.
    fn delete(&self, slot: &Slot) -> Result<(), BucketFault> {
        let parts = locked(&slot.inner).open.as_ref().map(|open| locked(&open.state).parts.clone());
        let names = parts.into_iter().flatten().chain([pack_name(slot.sequence), dead_name(slot.sequence)]);
        for name in names {
            self.persist("delete", || self.directory.delete(&name))?;
        }
        Ok(())
    }

    /// The memory of a slot that is written to.
    fn writable(&self, no: u32) -> io::Result<(Arc<Slot>, Arc<OpenExtent>)> {
        let slot = self.get(no).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        let mut inner = locked(&slot.inner);
        match (inner.stage, &inner.open) {
            (Stage::Open, Some(open)) => {
                let open = Arc::clone(open);
                drop(inner);
                Ok((slot, open))
            }
            (Stage::New, _) => {
                if let Some(old) = inner.replaced.take() {
                    // Its room is free: the master has dropped its places, and no reader has a lease.
                    self.delete(&old).map_err(io::Error::other)?;
                }
                let open = Arc::new(OpenExtent::new(&self.spool)?);
                (inner.open, inner.stage) = (Some(Arc::clone(&open)), Stage::Open);
                drop(inner);
                Ok((slot, open))
            }
            _ => Err(io::Error::other("a closed pack is not written to")),
        }
    }

    fn write(&self, io: Io) -> Completion {
        let Io { op, offset, work } = io;
        let IoWork::Write(parts) = &work else { return ended(op, Err(io::ErrorKind::InvalidInput.into())) };
        let bytes = work.bytes();
        if offset < FIRST_EXTENT_AT {
            return ended(op, self.write_superblock(offset, parts).map(|()| bytes));
        }
        let (no, within) = self.place(offset);
        if parts.iter().all(|part| matches!(part, Part::Zeros(_))) {
            // The core destroys the first header and the footer of an extent that it gives up.
            let given_up = if within == 0 { self.give_up(no) } else { Ok(()) };
            return ended(op, given_up.map(|()| bytes));
        }
        let ends_extent = within.checked_add(bytes) == Some(self.geometry.extent_bytes());
        if let (Some(Part::Bytes(footer, 0)), true) = (parts.first(), ends_extent)
            && let Some(tail) = Footer::decode_any_tail(footer, &self.uuid, &self.geometry)
        {
            return ended(op, self.close(no, footer, tail.end, tail.footer_bytes).map(|()| bytes));
        }
        let open = self.writable(no).and_then(|(_, open)| {
            open.reserve(u64::from(within) + u64::from(bytes))?;
            Ok(open)
        });
        match open {
            Err(error) => ended(op, Err(error)),
            Ok(open) => {
                let transfer = Transfer::new(Io { op, offset: within.into(), work }, ALIGNMENT);
                let result = transfer.run(&open.file);
                if let Ok(bytes) = result {
                    open.wrote(within..within + bytes);
                }
                transfer.end(result)
            }
        }
    }

    fn write_superblock(&self, offset: u64, parts: &[Part]) -> io::Result<()> {
        let mut pages = locked(&self.superblock);
        pages.bytes.resize(SUPERBLOCK_BYTES, 0);
        let mut at = offset as usize;
        for part in parts {
            let bytes = match part {
                Part::Bytes(bytes, from) => bytes.get(*from as usize..).unwrap_or_default(),
                Part::Lent { .. } | Part::Zeros(_) => return Err(io::ErrorKind::InvalidInput.into()),
            };
            let to = pages.bytes.get_mut(at..at + bytes.len());
            to.filter(|_| at + bytes.len() <= 2 * PAGE_BYTES as usize)
                .ok_or(io::ErrorKind::InvalidInput)?
                .copy_from_slice(bytes);
            at += bytes.len();
        }
        pages.dirty = true;
        Ok(())
    }

    /// Puts the superblock over the version that this owner has written or taken, and over no other.
    pub(super) fn put_superblock(&self) -> Result<(), BucketFault> {
        let (bytes, when) = {
            let mut pages = locked(&self.superblock);
            if !std::mem::take(&mut pages.dirty) {
                return Ok(());
            }
            // Versions tell contents apart, so the content says whose it is.
            let token = self.token.as_deref().unwrap_or_default().as_bytes();
            pages.bytes.truncate(2 * PAGE_BYTES as usize);
            pages.bytes.extend_from_slice(token);
            (pages.bytes.clone(), pages.version.clone().map_or(Put::New, Put::Over))
        };
        let payload = Payload::from(bytes.clone());
        let put = self.persist("write the superblock", || {
            match self.directory.put(SUPERBLOCK, payload.clone(), &when) {
                Err(BucketFault::Changed | BucketFault::Exists) => {
                    // A try that had no answer may have succeeded.
                    match self.directory.read_all(SUPERBLOCK, SUPERBLOCK_BYTES as u64) {
                        Ok((found, version)) if found == bytes => Ok(version),
                        // Such a try is still under way.
                        Ok((_, version)) if matches!(&when, Put::Over(old) if *old == version) => {
                            Err(BucketFault::Server(409, "Conflict".into()))
                        }
                        Ok(_) | Err(BucketFault::Missing) => Err(BucketFault::Lost),
                        Err(fault) => Err(fault),
                    }
                }
                result => result,
            }
        });
        let mut pages = locked(&self.superblock);
        match put {
            Ok(version) => {
                pages.version = Some(version);
                Ok(())
            }
            Err(fault) => {
                pages.dirty = true;
                Err(fault)
            }
        }
    }

    /// The superblock has to be put at the next sync.
    pub(super) fn set_superblock(&self, bytes: Vec<u8>) {
        let mut pages = locked(&self.superblock);
        (pages.bytes, pages.dirty) = (bytes, true);
    }

    /// Puts an extent into the bucket as a pack, with its footer behind the last batch.
    fn close(&self, no: u32, footer: &[u8], end: u32, footer_bytes: u32) -> io::Result<()> {
        let (slot, open) = self.writable(no)?;
        let mut bytes = vec![0; end as usize + footer.len()];
        let (batches, rest) = bytes.split_at_mut(end as usize);
        // What was never written is zeros.
        open.file.set_len(self.geometry.extent_bytes().into())?;
        open.file.read_exact_at(batches, 0)?;
        rest.copy_from_slice(footer);
        let (name, payload, mut when) = (pack_name(slot.sequence), Payload::from(bytes), Put::New);
        // The first try does not replace what another owner has made of the extent. Where the token says
        // that there is no other, the object is one of a try that had no answer, or of a former owner that
        // came late.
        let put = self.persist("write a pack", || {
            let put = self.directory.put(&name, payload.clone(), &when);
            if put == Err(BucketFault::Exists) {
                when = Put::Always;
            }
            put
        });
        put.map_err(io::Error::other)?;
        let mut inner = locked(&slot.inner);
        (inner.stage, inner.open) = (Stage::Pack { end, footer: footer_bytes }, None);
        drop(inner);
        let mut state = locked(&open.state);
        state.dirty = None;
        let parts = std::mem::take(&mut state.parts);
        drop(state);
        // Parts beside a pack do not count; the next owner deletes those that are left.
        parts.iter().for_each(|part| drop(self.directory.delete(part)));
        Ok(())
    }

    /// The extent does not count any more. Readers that have a lease still find its bytes.
    fn give_up(&self, no: u32) -> io::Result<()> {
        let Some(slot) = self.get(no) else { return Ok(()) };
        let stage = locked(&slot.inner).stage;
        let dead = match stage {
            Stage::Pack { end, footer } => Stage::Dead { end, footer },
            Stage::Open => Stage::Dead { end: self.geometry.extent_bytes(), footer: 0 },
            Stage::New | Stage::Dead { .. } => return Ok(()),
        };
        let name = dead_name(slot.sequence);
        self.persist("give up a pack", || self.directory.put(&name, b"dead\n".to_vec(), &Put::Always))
            .map_err(io::Error::other)?;
        locked(&slot.inner).stage = dead;
        Ok(())
    }

    /// Puts everything into the bucket that was written since the last time.
    pub(super) fn sync(&self) -> Result<(), BucketFault> {
        let slots: Vec<(u32, Arc<Slot>)> =
            locked(&self.map).iter().map(|(no, slot)| (*no, Arc::clone(slot))).collect();
        for (_, slot) in slots {
            let open = locked(&slot.inner).open.clone();
            if let Some(open) = open {
                self.put_part(slot.sequence, &open)?;
            }
        }
        self.put_superblock()
    }

    fn put_part(&self, sequence: u64, open: &OpenExtent) -> Result<(), BucketFault> {
        let token = self.token.clone().unwrap_or_default();
        let (dirty, name) = {
            let mut state = locked(&open.state);
            let Some(dirty) = state.dirty.take() else { return Ok(()) };
            let name = PartName { sequence, serial: state.serial, from: dirty.start, token }.text();
            state.serial += 1;
            (dirty, name)
        };
        let mut bytes = vec![0; (dirty.end - dirty.start) as usize];
        let read = open.file.read_exact_at(&mut bytes, dirty.start.into());
        let put = read.map_err(|error| BucketFault::Odd(error.to_string())).and_then(|()| {
            let payload = Payload::from(bytes);
            self.persist("write a part", || self.directory.put(&name, payload.clone(), &Put::Always))
        });
        match put {
            Ok(_) => locked(&open.state).parts.push(name),
            Err(fault) => {
                open.wrote(dirty);
                return Err(fault);
            }
        }
        Ok(())
    }

    /// Reads from a pack, with so many tries.
    fn read_pack(&self, sequence: u64, at: u64, buffer: &mut [u8], tries_max: u32) -> io::Result<()> {
        let name = pack_name(sequence);
        let mut pause = PAUSE_MIN;
        for tries in 1.. {
            let fault = match self.directory.read(&name, at..at + buffer.len() as u64) {
                Ok(bytes) => {
                    buffer.copy_from_slice(bytes.as_ref());
                    return Ok(());
                }
                Err(fault) => fault,
            };
            if matches!(fault, BucketFault::Missing | BucketFault::Short { .. }) {
                // No reader can read it.
                locked(&self.gone.0).insert(sequence);
                return Err(io::ErrorKind::NotFound.into());
            }
            self.complain("read a pack", &fault);
            if tries >= tries_max || self.spool.pause(jittered(pause)) {
                return Err(io::Error::other(fault));
            }
            pause = (2 * pause).min(PAUSE_MAX);
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Fills a buffer with what a disk would have at this offset. What is nowhere is zeros.
    pub(super) fn read_into(&self, buffer: &mut [u8], offset: u64, tries_max: u32) -> io::Result<()> {
        buffer.fill(0);
        if offset < FIRST_EXTENT_AT {
            let pages = locked(&self.superblock);
            let from = pages.bytes.get(offset as usize..).unwrap_or_default();
            let from = &from[..from
                .len()
                .min(buffer.len())
                .min((2 * PAGE_BYTES as usize).saturating_sub(offset as usize))];
            buffer[..from.len()].copy_from_slice(from);
            return Ok(());
        }
        let (no, within) = self.place(offset);
        let extent_bytes = self.geometry.extent_bytes();
        let last = u64::from(within) + buffer.len() as u64;
        if last > u64::from(extent_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let Some(slot) = self.get(no) else { return Ok(()) };
        let (stage, open) = {
            let inner = locked(&slot.inner);
            (inner.stage, inner.open.clone())
        };
        if let Some(open) = open {
            return read_part(&open.file, buffer, within.into());
        }
        let (Stage::Pack { end, footer } | Stage::Dead { end, footer }) = stage else { return Ok(()) };
        let (from, to) = (within, last as u32);
        if from < end {
            let count = (to.min(end) - from) as usize;
            self.read_pack(slot.sequence, from.into(), &mut buffer[..count], tries_max)?;
        }
        let foot = extent_bytes - footer;
        if footer > 0 && to > foot {
            let begin = from.max(foot);
            let at = u64::from(end) + u64::from(begin - foot);
            self.read_pack(slot.sequence, at, &mut buffer[(begin - from) as usize..], tries_max)?;
        }
        Ok(())
    }
}

impl Medium for Slots {
    const NAME: &'static str = "bucket";
    /// TLS is in the frames of the threads.
    const STACK_BYTES: usize = 1 << 20;

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
        match io.work {
            IoWork::Write(_) => self.write(io),
            IoWork::Sync => ended(io.op, self.sync().map(|()| 0).map_err(io::Error::other)),
            IoWork::Read(Destination::Buffer(mut buffer)) => {
                let bytes = buffer.len() as u32;
                // Of a recovery: what it does not read now, it would take for lost.
                let result = self.read_into(&mut buffer, io.offset, u32::MAX).map(|()| bytes);
                Completion { op: io.op, result: result.map_err(Into::into), data: Some(buffer) }
            }
            IoWork::Read(Destination::Lent { .. }) => {
                let (offset, bytes) = (io.offset, io.work.bytes());
                let mut transfer = Transfer::received(io);
                let result = self.read_into(transfer.received_bytes(), offset, READ_TRIES).map(|()| bytes);
                transfer.end(result)
            }
        }
    }

    fn close(&self) {
        self.spool.close();
    }
}

fn ended(op: u64, result: io::Result<u32>) -> Completion {
    if let Err(error) = &result {
        log::warn!("a bucket: {error}");
    }
    Completion { op, result: result.map_err(Into::into), data: None }
}

/// Between one and one and a half times as long, so that nodes do not ask all at once.
fn jittered(pause: Duration) -> Duration {
    let random = super::random().map_or(0, |bytes| bytes[0]);
    pause + pause * u32::from(random) / 512
}

/// Reads until the buffer is full or the file ends.
fn read_part(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64)? {
            0 => return Ok(()),
            bytes => done += bytes,
        }
    }
    Ok(())
}
