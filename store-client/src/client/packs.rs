//! Reads of objects that are in packs or on exported disks: this client reads them itself ([`crate::packs`],
//! [`crate::direct`]), and asks their node only for those that it cannot read.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use store_core::SegmentNo;
use store_core::chunks::stored_len;
use store_core::client::Transfer;
use te_engine::SegmentHandle;

use super::Client;
use super::staging::MISSED;
use crate::config::ClientConfig;
use crate::direct::{DirectRead, DirectReader, DiskName, NotDirect};
use crate::disk::AlignedBuffer;
use crate::mover::Buffers;
use crate::packs::{NotRead, PackEnd, PackRead, PackReader, below};
use crate::segments::{PackPlace, Place};

/// How long a directory that is not mounted here is not looked for again.
const SHUN: Duration = Duration::from_secs(10);

/// The objects of an operation that are read from packs, and from exported disks.
pub(super) struct Packs {
    reader: PackReader,
    direct: DirectReader,
    /// Another place of the shared directory than the nodes'.
    root: Option<Box<Path>>,
    last: u64,
    waiting: Vec<Waiting>,
    /// Ends that were waited for.
    ended: Vec<PackEnd>,
    /// Transfers whose image has come, and from where.
    images: Vec<(u32, Origin)>,
    not_mounted: HashMap<Arc<Path>, Instant>,
    /// Until when disks are not read past their nodes.
    not_direct: HashMap<SegmentNo, Instant>,
    directories: HashMap<u32, Arc<Path>>,
}

/// What an image is read from.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    /// A directory of packs.
    Packs(Arc<Path>),
    /// An exported disk: where its node reads instead.
    Disk { staging: SegmentHandle, service: u32 },
}

/// A read that waits for a file, or for a target.
struct Waiting {
    id: u64,
    transfer: Transfer,
    deadline: Instant,
    origin: Origin,
    /// It is worthless: its item is over.
    canceled: bool,
}

impl Packs {
    pub(super) fn new(config: &ClientConfig) -> Self {
        let root = Some(config.shared.as_str()).filter(|root| !root.is_empty() && *root != "none");
        Self {
            reader: PackReader::new(),
            direct: DirectReader::new(config.rpc, config.identity.cluster_secret(), config.exported_disks),
            root: root.map(|root| Path::new(root).into()),
            last: 0,
            waiting: Vec::new(),
            ended: Vec::new(),
            images: Vec::new(),
            not_mounted: HashMap::new(),
            not_direct: HashMap::new(),
            directories: HashMap::new(),
        }
    }

    /// Nothing of the operation before is waited for any more.
    pub(super) fn forget(&mut self) {
        self.waiting.clear();
        self.images.clear();
        self.ended.clear();
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Stops waiting for the file that a transfer waits for, at the next turn.
    pub(super) fn cancel(&mut self, id: u32) {
        for waiting in self.waiting.iter_mut().filter(|waiting| waiting.transfer.id == id) {
            waiting.canceled = true;
        }
    }

    /// What the image of a transfer was read from, if it was an image.
    pub(super) fn take_image(&mut self, id: u32) -> Option<Origin> {
        let at = self.images.iter().position(|(image, _)| *image == id)?;
        Some(self.images.swap_remove(at).1)
    }

    /// Whether a disk is not to be read past its node for a time.
    fn is_indirect(&mut self, disk: SegmentNo) -> bool {
        match self.not_direct.get(&disk) {
            Some(until) if *until > Instant::now() => true,
            Some(_) => {
                self.not_direct.remove(&disk);
                false
            }
            None => false,
        }
    }

    /// Waits for a file, until the next deadline at most.
    pub(super) fn wait(&mut self, until: Instant) {
        let deadlines = self.waiting.iter().map(|waiting| waiting.deadline);
        let until = deadlines.chain([until]).min().unwrap_or(until);
        if self.waiting.iter().all(|waiting| !waiting.canceled) {
            self.ended.extend(self.reader.wait(until));
        }
    }

    fn directory(&mut self, packs: u32, place: &PackPlace) -> Option<Arc<Path>> {
        if let Some(known) = self.directories.get(&packs) {
            return Some(Arc::clone(known));
        }
        let path: Arc<Path> = match &self.root {
            None => Path::new(&place.directory).into(),
            Some(root) => below(root, &place.directory)?.into(),
        };
        self.directories.insert(packs, Arc::clone(&path));
        Some(path)
    }

    fn is_shunned(&mut self, directory: &Arc<Path>) -> bool {
        match self.not_mounted.get(directory) {
            Some(until) if *until > Instant::now() => true,
            Some(_) => {
                self.not_mounted.remove(directory);
                false
            }
            None => false,
        }
    }

    /// The next read that has ended, or whose time is over.
    fn next(&mut self) -> Option<(Waiting, Option<Result<AlignedBuffer, NotRead>>)> {
        while let Some((id, result)) = self.ended.pop().or_else(|| self.reader.poll()) {
            // One that is not waited for any more came too late.
            if let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) {
                return Some((self.waiting.swap_remove(at), Some(result)));
            }
        }
        let now = Instant::now();
        let over = |waiting: &Waiting| waiting.canceled || waiting.deadline <= now;
        let at = self.waiting.iter().position(over)?;
        Some((self.waiting.swap_remove(at), None))
    }
}

impl Client {
    /// Reads an object from a pack. Returns whether the read is not the first transfer of its item, as far as
    /// it has begun.
    pub(super) fn read_from_packs(
        &mut self,
        transfer: Transfer,
        packs: u32,
        buffers: &Buffers<'_, '_>,
    ) -> bool {
        if !self.get.handle_disk(transfer.id) {
            return false;
        }
        let now = Instant::now();
        let patience = self.staging.patience;
        let deadline = *self.staging.deadline.get_or_insert(now + patience);
        if deadline <= now {
            self.staging.note(transfer.item, MISSED);
            return self.mover.start(transfer, None, buffers);
        }
        let Some(place) = self.segments.packs(packs) else {
            return self.mover.start(transfer, None, buffers);
        };
        let (sequence, offset) = (transfer.addr / place.extent_bytes, transfer.addr % place.extent_bytes);
        let state = &mut self.staging.packs;
        if let Some(directory) = state.directory(packs, place)
            && let Ok(bytes) = usize::try_from(stored_len(transfer.len))
            && !state.is_shunned(&directory)
        {
            state.last += 1;
            let id = state.last;
            let read = PackRead { id, directory: Arc::clone(&directory), sequence, offset, bytes };
            if state.reader.want(read) {
                let origin = Origin::Packs(directory);
                state.waiting.push(Waiting { id, transfer, deadline, origin, canceled: false });
                return false;
            }
        }
        self.stage_pack(transfer, buffers).unwrap_or_else(|| {
            self.staging.note(transfer.item, MISSED);
            self.mover.start(transfer, None, buffers)
        })
    }

    /// Reads an object from an exported disk, past its node. Returns whether it has begun.
    pub(super) fn read_exported(&mut self, transfer: Transfer, staging: SegmentHandle, service: u32) -> bool {
        let patience = self.staging.patience;
        let state = &mut self.staging.packs;
        if state.direct.is_off() || state.is_indirect(transfer.segment) {
            return false;
        }
        let Ok(bytes) = usize::try_from(stored_len(transfer.len)) else { return false };
        let now = Instant::now();
        let end = *self.staging.deadline.get_or_insert(now + patience);
        // The other half is for the node.
        let deadline = now + end.saturating_duration_since(now) / 2;
        if deadline <= now {
            return false;
        }
        state.last += 1;
        let disk = DiskName { no: transfer.segment, service: self.segments.service(service).into() };
        let read = DirectRead { id: state.last, disk, locator: transfer.addr, bytes, deadline };
        let ended = state.reader.lend();
        if !state.direct.want(read, ended) {
            state.reader.take_back();
            return false;
        }
        let origin = Origin::Disk { staging, service };
        state.waiting.push(Waiting { id: state.last, transfer, deadline, origin, canceled: false });
        true
    }

    /// An object was not read past the node of its disk: it is counted, and the disk may be left alone for a
    /// time.
    pub(super) fn not_direct(&mut self, transfer: &Transfer, why: NotDirect) {
        if let Some(at) = NotDirect::COUNTED.iter().position(|counted| *counted == why) {
            self.counters.direct_fallbacks[at] += 1;
        }
        log::debug!("operation {}: disk {}: {}", self.trace(), transfer.segment, why.name());
        if why.shun().is_zero() {
            return;
        }
        let until = Instant::now() + why.shun();
        let known = self.staging.packs.not_direct.insert(transfer.segment, until);
        if known.is_none() && why != NotDirect::NotExported {
            log::info!(
                "disk {} is exported, but {}: its node reads it for {} s",
                transfer.segment,
                why.text(),
                why.shun().as_secs()
            );
        }
    }

    /// Has the node of a directory of packs read an object. `None`: there is none.
    fn stage_pack(&mut self, transfer: Transfer, buffers: &Buffers<'_, '_>) -> Option<bool> {
        let shun = Duration::from_millis(self.config.unreachable_ms.into());
        let place = self.segments.open_staging(transfer.segment, &mut self.rpc, &mut self.engine, shun);
        match place {
            Some(Place::Disk { staging, service }) => Some(self.stage(transfer, staging, service, buffers)),
            _ => None,
        }
    }

    /// Starts the moves of images that have come. Returns whether anything happened.
    pub(super) fn pump_packs(&mut self, buffers: &Buffers<'_, '_>) -> bool {
        let mut any = false;
        while let Some((Waiting { transfer, origin, canceled, .. }, result)) = self.staging.packs.next() {
            any = true;
            if let Origin::Disk { staging, service } = origin
                && !canceled
                && !matches!(result, Some(Ok(_)))
            {
                let why = match result {
                    Some(Err(NotRead::Direct(why))) => why,
                    _ => NotDirect::Late,
                };
                self.not_direct(&transfer, why);
                self.stage(transfer, staging, service, buffers);
                continue;
            }
            let failed = match result {
                Some(Ok(image)) if !canceled => {
                    self.staging.packs.images.push((transfer.id, origin));
                    if self.mover.start_image(transfer, image, buffers) {
                        self.counters.replica_failovers += 1;
                    }
                    continue;
                }
                Some(Err(failed)) if !canceled => failed,
                _ => {
                    self.staging.note(transfer.item, MISSED);
                    self.mover.start(transfer, None, buffers);
                    continue;
                }
            };
            let Origin::Packs(directory) = origin else { continue };
            log::debug!("operation {}: {}: {failed:?}", self.trace(), directory.display());
            if failed == NotRead::NotMounted {
                let packs = &mut self.staging.packs.not_mounted;
                if packs.insert(Arc::clone(&directory), Instant::now() + SHUN).is_none() {
                    log::info!(
                        "{}: not mounted here, or out of reach: its node reads it",
                        directory.display()
                    );
                }
            }
            // A file system may show what its node has just written later than the node does.
            if self.stage_pack(transfer, buffers).is_some() {
                continue;
            }
            if matches!(failed, NotRead::Vanished | NotRead::Short) {
                self.counters.shared_lost += 1;
                self.get.handle_vanished(transfer.id, transfer.segment);
            }
            self.staging.note(transfer.item, MISSED);
            self.mover.start(transfer, None, buffers);
        }
        any
    }
}
