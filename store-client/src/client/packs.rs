//! Reads of objects that are in packs: this client reads them itself ([`crate::packs`]), and asks their node
//! only for those that it cannot read.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use store_core::chunks::stored_len;
use store_core::client::Transfer;

use super::Client;
use super::staging::MISSED;
use crate::config::ClientConfig;
use crate::disk::AlignedBuffer;
use crate::mover::Buffers;
use crate::packs::{NotRead, PackEnd, PackRead, PackReader, below};
use crate::segments::{PackPlace, Place};

/// How long a directory that is not mounted here is not looked for again.
const SHUN: Duration = Duration::from_secs(10);

/// The objects of an operation that are read from packs.
pub(super) struct Packs {
    reader: PackReader,
    /// Another place of the shared directory than the nodes'.
    root: Option<Box<Path>>,
    last: u64,
    waiting: Vec<Waiting>,
    /// Ends that were waited for.
    ended: Vec<PackEnd>,
    /// Transfers whose image has come.
    images: Vec<u32>,
    not_mounted: HashMap<Arc<Path>, Instant>,
    directories: HashMap<u32, Arc<Path>>,
}

/// A read that waits for a file.
struct Waiting {
    id: u64,
    transfer: Transfer,
    deadline: Instant,
    directory: Arc<Path>,
    /// It is worthless: its item is over.
    canceled: bool,
}

impl Packs {
    pub(super) fn new(config: &ClientConfig) -> Self {
        let root = Some(config.shared.as_str()).filter(|root| !root.is_empty() && *root != "none");
        Self {
            reader: PackReader::new(),
            root: root.map(|root| Path::new(root).into()),
            last: 0,
            waiting: Vec::new(),
            ended: Vec::new(),
            images: Vec::new(),
            not_mounted: HashMap::new(),
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

    /// Whether a transfer was that of an image.
    pub(super) fn take_image(&mut self, id: u32) -> bool {
        let at = self.images.iter().position(|image| *image == id);
        at.map(|at| self.images.swap_remove(at)).is_some()
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
                state.waiting.push(Waiting { id, transfer, deadline, directory, canceled: false });
                return false;
            }
        }
        self.stage_pack(transfer, buffers).unwrap_or_else(|| {
            self.staging.note(transfer.item, MISSED);
            self.mover.start(transfer, None, buffers)
        })
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
        while let Some((Waiting { transfer, directory, canceled, .. }, result)) = self.staging.packs.next() {
            any = true;
            let failed = match result {
                Some(Ok(image)) if !canceled => {
                    self.staging.packs.images.push(transfer.id);
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
