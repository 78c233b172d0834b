//! One disk of a node: its announcements, orders and events.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use store_core::chunks::stored_len;
use store_core::disk::format::Stream;
use store_core::disk::{Adopted, Failure, Refused, Removed, State};
use store_core::message::{
    AdoptObjects, Adoption, DiskEnd, DiskOrder, DiskProof, DiskReady, EndDiskOrders, FetchDisk,
    FetchDiskOrders, FetchRequest, FoundObject, MountDisk, MountDisks, NodeProof, ReclaimExtents,
};
use store_core::{ErrorCode, Key, SegmentNo, TenantTag};

use super::gone::GonePlaces;
use super::lend::lend;
use super::packs::{self, Medium, ended, in_background, is_bucket};
use super::source::code_of;
use super::{DiskKind, DiskReport, DisksError, Place};
use crate::config::{DiskExport, NodeDiskConfig};
use crate::direct;
use crate::disk::{
    Caching, Demote, DiskError, DiskEvent, DiskFile, DiskOptions, DiskService, FormatOptions, Lent, NotDone,
    Room,
};
use crate::error::{ConnectError, RpcError};
use crate::node::tasks::Mounted;
use crate::rpc::RpcConnection;
use crate::stage::Exported;

/// Most orders at a time.
const ORDERS_MAX: u32 = 1_024;
/// Most bytes of objects that are being written at a time.
const WRITING_BYTES_MAX: u64 = 256 << 20;
/// How long a disk that is closed may take to write what it has accepted.
const CLOSE: Duration = Duration::from_secs(5);
/// Time between two tries to open a directory in a bucket.
const RETRY: Duration = Duration::from_secs(3);
/// How long a disk announces objects before the node's other disks have their turn.
const ANNOUNCING: Duration = Duration::from_millis(50);
/// Most reports in one request.
const REPORTS_MAX: usize = 1_024;

/// What has to be reported to the master.
enum Report {
    Demoted { generation: u64, result: Result<u64, ErrorCode> },
    Forgotten { generation: u64 },
    Cleared { ticket: u64 },
    Dropped { from: u64, to: u64 },
}

/// What a thread has done with the directory in a bucket.
enum Step {
    Opened(Medium),
    /// It is taken, as the disk with this number.
    #[cfg(feature = "s3")]
    Taken {
        disk: SegmentNo,
        service: DiskService,
        room: Room,
        refused: u64,
        gone: crate::disk::Gone,
    },
}

/// A disk and its state.
pub(super) struct NodeDisk {
    path: PathBuf,
    kind: DiskKind,
    /// What it is on, while the disk is not open.
    medium: Option<Medium>,
    /// Of a directory of packs.
    room: Option<Room>,
    refused: u64,
    /// It was the directory of another node.
    pub(super) adopted: bool,
    /// A thread opens the directory in a bucket, or takes it.
    background: Option<JoinHandle<Result<Step, DiskError>>>,
    not_before: Option<Instant>,
    extent_bytes: u64,
    /// Where readers reach it without this node.
    exported: Option<Arc<Exported>>,
    /// Packs in a bucket that no process can read.
    #[cfg(feature = "s3")]
    gone: Option<crate::disk::Gone>,
    service: Option<Arc<DiskService>>,
    /// Its number, once it is mounted.
    no: Option<SegmentNo>,
    ready: bool,
    /// Every object was announced by the disk.
    announced: bool,
    /// Objects to be announced to the master.
    found: VecDeque<Adopted>,
    /// Generations that are being written.
    writing: HashSet<u64>,
    /// Generations that are being forgotten.
    forgetting: HashSet<u64>,
    clearing: Option<u64>,
    reports: Vec<Report>,
    reclaims: Vec<u64>,
    gone_places: GonePlaces,
}

impl NodeDisk {
    /// Opens the file, or makes and formats it if it has a size and does not exist. If it is exported, the
    /// namespace has to be this disk; a target that does not answer is no reason not to start.
    pub(super) fn new(config: &NodeDiskConfig, export: Option<&DiskExport>) -> Result<Self, ConnectError> {
        if config.bytes.is_some() && !config.path.exists() {
            let bytes = config.bytes;
            let options = FormatOptions { bytes, ..FormatOptions::default() };
            format(config, options).map_err(ConnectError::Disk)?;
        }
        let file = DiskFile::open(&config.path, Caching::Direct).map_err(ConnectError::Disk)?;
        let exported = match export {
            Some(export) => Some(direct::exported(export, &file).map_err(ConnectError::Disk)?),
            None => None,
        };
        let this = Self::of(config.path.clone(), DiskKind::Local, Medium::File(file));
        Ok(Self { exported: exported.map(Arc::new), ..this })
    }

    /// Opens the directory of packs that the node has below a shared directory or in a bucket, or makes one.
    /// It is none of `except`.
    pub(super) fn shared(
        config: &NodeDiskConfig,
        cluster: &str,
        node: &str,
        except: &[PathBuf],
    ) -> Result<Self, ConnectError> {
        let packs = packs::own(config, cluster, node, except).map_err(ConnectError::Disk)?;
        Ok(Self::of(packs.path().to_owned(), DiskKind::Shared, packs))
    }

    /// Opens the directory of packs of a node that is gone.
    pub(super) fn adopted(path: &Path) -> Result<Self, DiskError> {
        let this = Self::of(path.to_owned(), DiskKind::Shared, Medium::open(DiskKind::Shared, path)?);
        Ok(Self { adopted: true, ..this })
    }

    fn of(path: PathBuf, kind: DiskKind, medium: Medium) -> Self {
        Self {
            path,
            kind,
            medium: Some(medium),
            room: None,
            refused: 0,
            adopted: false,
            background: None,
            not_before: None,
            extent_bytes: 1,
            exported: None,
            #[cfg(feature = "s3")]
            gone: None,
            service: None,
            no: None,
            ready: false,
            announced: false,
            found: VecDeque::new(),
            writing: HashSet::new(),
            forgetting: HashSet::new(),
            clearing: None,
            reports: Vec::new(),
            reclaims: Vec::new(),
            gone_places: GonePlaces::default(),
        }
    }

    /// Whether an error says that the directory of packs belongs to another node, or that the directory of a
    /// node that is gone cannot be used.
    pub(super) fn is_lost(&self, error: &DisksError) -> bool {
        let taken = error.is_taken() || matches!(error, DisksError::Disk(DiskError::Owned { .. }));
        self.kind == DiskKind::Shared && (taken || self.adopted && matches!(error, DisksError::Disk(_)))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A descriptor that is readable while the disk has something to tell.
    pub(super) fn fd(&self) -> Option<RawFd> {
        self.service.as_ref().map(|service| service.as_fd().as_raw_fd())
    }

    pub(super) fn report(&self) -> Option<DiskReport> {
        let stats = self.service.as_ref()?.stats();
        let Self { path, kind, ready, adopted, refused, .. } = self;
        let (path, kind, ready, adopted, refused) = (path.clone(), *kind, *ready, *adopted, *refused);
        Some(DiskReport { path, kind, ready, adopted, refused, stats })
    }

    /// The master does not know the disk any more: it is closed, to be opened and announced again.
    pub(super) fn forget_mount(&mut self, place: &Place) {
        self.close(place);
    }

    /// Ends the disk in order.
    pub(super) fn close(&mut self, place: &Place) {
        if let Some(no) = self.no.take() {
            place.sources.remove(no);
        }
        (self.ready, self.announced, self.clearing) = (false, false, None);
        // What the thread opens closes again.
        self.background = None;
        self.found.clear();
        self.writing.clear();
        self.forgetting.clear();
        self.reports.clear();
        self.reclaims.clear();
        self.gone_places = GonePlaces::default();
        let Some(service) = self.service.take() else { return };
        service.begin_close(CLOSE);
        let end = Instant::now() + CLOSE + Duration::from_secs(1);
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            match service.wait_event(left) {
                Some(DiskEvent::Closed { clean }) => {
                    if !clean {
                        let path = self.path.display();
                        log::warn!("node {}: the disk {path} was not closed in order", place.name);
                    }
                    return;
                }
                Some(event) => {
                    read_ended(place, &event);
                }
                None => return,
            }
        }
    }

    /// Asks again for what the master's answer to may have been lost.
    pub(super) fn repeat_reclaims(&self) {
        if let Some(service) = &self.service {
            // A full queue: the disk asks again when it is mounted again.
            let _ = service.repeat_reclaims();
        }
    }

    /// Handles what the disk has told.
    pub(super) fn handle_events(&mut self, place: &Place) {
        let Some(service) = self.service.clone() else { return };
        while let Some(event) = service.poll_event() {
            if let Some((locator, why)) = read_ended(place, &event) {
                let report = self.unread(locator, why);
                self.reports.extend(report);
            }
            match event {
                DiskEvent::Adopt { objects, .. } => self.found.extend(objects),
                DiskEvent::Ready => self.announced = true,
                DiskEvent::Distrusted => log::warn!(
                    "node {}: the disk {}: removals may be missing: nothing on it is used",
                    place.name,
                    self.path.display()
                ),
                DiskEvent::Demoted { id, locator, .. } => {
                    self.writing.remove(&id);
                    self.reports.push(Report::Demoted { generation: id, result: Ok(locator) });
                }
                DiskEvent::DemoteFailed { id, why, .. } => {
                    self.writing.remove(&id);
                    let result = Err(demotion_error(why));
                    self.reports.push(Report::Demoted { generation: id, result });
                }
                DiskEvent::Forgotten(removed) => {
                    self.forgetting.remove(&removed.generation);
                    self.reports.push(Report::Forgotten { generation: removed.generation });
                }
                DiskEvent::ForgetRefused { object, .. } => {
                    // The master gives the order again.
                    self.forgetting.remove(&object.generation);
                }
                DiskEvent::Reclaim { sequence } => self.reclaims.push(sequence),
                DiskEvent::Dropped { from, to } => self.reports.push(Report::Dropped { from, to }),
                DiskEvent::Cleared => {
                    self.forgetting.clear();
                    let ticket = self.clearing.take();
                    self.reports.extend(ticket.map(|ticket| Report::Cleared { ticket }));
                }
                DiskEvent::ClearRefused(_) => self.clearing = None,
                DiskEvent::Stopped(why) => {
                    log::error!("node {}: the disk {}: {why}", place.name, self.path.display());
                }
                DiskEvent::Staged { .. }
                | DiskEvent::ReadFailed { .. }
                | DiskEvent::BufferFree { .. }
                | DiskEvent::Closed { .. } => {}
            }
        }
    }

    /// What the master is told about an image that was not read, if no other reader could read it either.
    fn unread(&mut self, locator: u64, why: Unread) -> Option<Report> {
        let lost = match why {
            Unread::Failed => self.is_lost_for_good(locator),
            // The master may be about to learn what is not announced yet.
            Unread::Gone => self.ready && self.gone_places.admit(Instant::now(), locator),
        };
        lost.then(|| Report::Dropped { from: locator, to: locator.saturating_add(1) })
    }

    /// Whether an image that could not be read is not there. A store that does not answer has it still.
    fn is_lost_for_good(&self, locator: u64) -> bool {
        #[cfg(feature = "s3")]
        if let Some(gone) = &self.gone {
            return gone.has(locator / self.extent_bytes);
        }
        let _ = locator;
        true
    }

    /// Mounts and announces the disk, or reports and fetches. Returns whether there is work under way.
    pub(super) fn work(
        &mut self,
        rpc: &mut RpcConnection,
        mounted: &Mounted,
        place: &Place,
    ) -> Result<bool, DisksError> {
        let Some(no) = self.no else { return self.mount(rpc, mounted, place) };
        let node = NodeProof { node: mounted.node, key: mounted.key };
        let proof = DiskProof { node, disk: no };
        if !self.found.is_empty() {
            let begun = Instant::now();
            while !self.found.is_empty() && begun.elapsed() < ANNOUNCING {
                self.announce(rpc, &proof)?;
            }
            return Ok(true);
        }
        if self.announced && !self.ready {
            rpc.call::<DiskReady>(&proof, std::iter::empty())?;
            self.ready = true;
            let objects = self.service.as_ref().map_or(0, |service| service.stats().objects);
            let path = self.path.display();
            log::info!("node {}: the disk {path} is ready with {objects} objects, as {no}", place.name);
        }
        self.send_reports(rpc, &proof)?;
        self.fetch(rpc, mounted, no)
    }

    /// Takes in what the thread has done that opens or takes a directory in a bucket. `None`: it is open, and
    /// has to be mounted; else whether it is mounted.
    fn background_ended(&mut self, place: &Place) -> Result<Option<bool>, DisksError> {
        match ended(&mut self.background) {
            None => Ok(Some(false)),
            // Other disks do not wait for a store that is away.
            Some(Err(error)) if !self.adopted && !matches!(error, DiskError::Owned { .. }) => {
                log::warn!("node {}: {error}", place.name);
                self.not_before = Some(Instant::now() + RETRY);
                Ok(Some(false))
            }
            Some(Err(error)) => Err(error.into()),
            Some(Ok(Step::Opened(medium))) => {
                self.medium = Some(medium);
                Ok(None)
            }
            #[cfg(feature = "s3")]
            Some(Ok(Step::Taken { disk, service, room, refused, gone })) => {
                (self.room, self.refused, self.gone) = (Some(room), refused, Some(gone));
                self.mounted(disk, service, place);
                Ok(Some(true))
            }
        }
    }

    /// Opens the disk and mounts it.
    fn mount(
        &mut self,
        rpc: &mut RpcConnection,
        mounted: &Mounted,
        place: &Place,
    ) -> Result<bool, DisksError> {
        if self.background.is_some()
            && let Some(done) = self.background_ended(place)?
        {
            return Ok(done);
        }
        let lineage = rpc.welcome().lineage;
        let medium = match self.medium.take() {
            Some(medium) => medium,
            None if self.not_before.is_some_and(|at| at > Instant::now()) => return Ok(false),
            None if is_bucket(&self.path) => {
                let (kind, path) = (self.kind, self.path.clone());
                self.background = in_background(move || Medium::open(kind, &path).map(Step::Opened));
                return Ok(false);
            }
            None => Medium::open(self.kind, &self.path)?,
        };
        let (uuid, bytes, extent_bytes) = medium.identity()?;
        self.extent_bytes = extent_bytes.max(1);
        let shared = match self.kind {
            DiskKind::Local => "",
            DiskKind::Shared => self.path.to_str().unwrap_or_default(),
        };
        let mount = MountDisk {
            node: mounted.node,
            incarnation: mounted.incarnation,
            key: mounted.key,
            lineage,
            uuid,
            bytes,
            extent_bytes,
            shared,
            endpoint: &place.endpoint,
            stage: &place.stage,
            staging: place.staging,
        };
        let answer = rpc.call::<MountDisks>(&(), std::iter::once(mount));
        let answer = answer.and_then(|(_, mut items)| {
            items.next().unwrap_or(Err(ErrorCode::InternalError)).map_err(RpcError::Refused)
        });
        let disk = match answer {
            Ok(mounted) => mounted.disk,
            Err(error) => {
                self.medium = Some(medium);
                return Err(error.into());
            }
        };
        let service = match medium {
            Medium::File(file) => DiskService::open(file, DiskOptions::default(), lineage)?,
            Medium::Packs(mut packs) => {
                // The master has agreed: no other node that is alive has it.
                packs.take(&place.name)?;
                (self.room, self.refused) = (Some(packs.room()), packs.refused().len() as u64);
                DiskService::open_packs(packs, packs::options(), lineage)?
            }
            #[cfg(feature = "s3")]
            Medium::Bucket(packs) => {
                let node = place.name.clone();
                self.background = in_background(move || take(*packs, &node, lineage, disk));
                return Ok(false);
            }
        };
        self.mounted(disk, service, place);
        Ok(true)
    }

    fn mounted(&mut self, disk: SegmentNo, service: DiskService, place: &Place) {
        let service = Arc::new(service);
        if place.write_bytes_per_s_max > 0 && service.set_wear_limit(place.write_bytes_per_s_max).is_err() {
            log::error!("{}: the limit on bytes written per second does not hold", self.path.display());
        }
        place.sources.add(disk, Arc::clone(&service), self.exported.clone());
        (self.service, self.no) = (Some(service), Some(disk));
    }

    /// Announces objects that were found.
    fn announce(&mut self, rpc: &mut RpcConnection, proof: &DiskProof) -> Result<(), DisksError> {
        let count = self.found.len().min(REPORTS_MAX);
        let found = self.found.range(..count).map(|found| FoundObject {
            tenant: TenantTag(found.object.tenant),
            key: Key(&found.object.key),
            generation: found.object.generation,
            len: found.len.into(),
            crc32c: found.crc32c,
            locator: found.locator,
        });
        let (_, answers) = rpc.call::<AdoptObjects>(proof, found)?;
        let answers: Vec<Adoption> = answers.collect();
        for (found, answer) in self.found.drain(..count).zip(answers) {
            if answer == Adoption::Forget
                && let Some(service) = &self.service
            {
                // If the queue is full, the object is announced again after the next restart.
                let _ = service.forget(found.object, Some(found.locator));
            }
        }
        Ok(())
    }

    fn send_reports(&mut self, rpc: &mut RpcConnection, proof: &DiskProof) -> Result<(), DisksError> {
        while !self.reports.is_empty() {
            let count = self.reports.len().min(REPORTS_MAX);
            let ends = self.reports[..count].iter().map(|report| match *report {
                Report::Demoted { generation, result } => DiskEnd::Demoted { generation, result },
                Report::Forgotten { generation } => DiskEnd::Forgotten { generation },
                Report::Cleared { ticket } => DiskEnd::Cleared { ticket },
                Report::Dropped { from, to } => DiskEnd::Dropped { from, to },
            });
            rpc.call::<EndDiskOrders>(proof, ends)?;
            self.reports.drain(..count);
        }
        if !self.reclaims.is_empty() {
            rpc.call::<ReclaimExtents>(proof, self.reclaims.iter().copied())?;
            for sequence in self.reclaims.drain(..) {
                if let Some(service) = &self.service {
                    // If the queue is full, the disk asks again after the next connection.
                    let _ = service.reclaimed(sequence);
                }
            }
        }
        Ok(())
    }

    /// Fetches orders and passes them to the disk.
    fn fetch(
        &mut self,
        rpc: &mut RpcConnection,
        mounted: &Mounted,
        disk: SegmentNo,
    ) -> Result<bool, DisksError> {
        let Some(service) = self.service.clone() else { return Ok(false) };
        let Mounted { node, key, incarnation, .. } = *mounted;
        // What a node that is gone has left is read, and grows no more: this node has a directory of its own.
        let wanted = self.ready && !self.adopted && service.stats().state == State::Ready;
        let writable = wanted && self.room.as_mut().is_none_or(Room::is_there);
        let fetch = FetchDisk {
            fetch: FetchRequest { node, incarnation, count_max: ORDERS_MAX, key },
            disk,
            bytes_max: if writable { WRITING_BYTES_MAX } else { 0 },
        };
        let (_, orders) = rpc.call::<FetchDiskOrders>(&fetch, std::iter::empty())?;
        for order in orders {
            match order {
                DiskOrder::Demote { tenant, key, generation, len, crc32c, segment, addr, proven } => {
                    if !self.writing.insert(generation) {
                        continue;
                    }
                    let stream = if proven { Stream::Proven } else { Stream::Trial };
                    let source = source_of(mounted, segment, addr, stored_len(len));
                    let begun = source.is_some_and(|source| {
                        let (id, tenant, key) = (generation, tenant.0, key.0.into());
                        let demote = Demote { id, tenant, key, generation, len, crc32c, stream, source };
                        service.demote(demote).is_ok()
                    });
                    if !begun {
                        self.writing.remove(&generation);
                        let result = Err(ErrorCode::UnavailableInCurrentStatus);
                        self.reports.push(Report::Demoted { generation, result });
                    }
                }
                DiskOrder::Forget { tenant, key, generation, locator } => {
                    if self.forgetting.insert(generation) {
                        let removed = Removed { tenant: tenant.0, key: key.0.into(), generation };
                        if service.forget(removed, locator).is_err() {
                            self.forgetting.remove(&generation);
                        }
                    }
                }
                DiskOrder::Clear { ticket } => {
                    if self.clearing.is_none() && service.clear().is_ok() {
                        self.clearing = Some(ticket);
                    }
                }
            }
        }
        Ok(!self.writing.is_empty() || !self.reports.is_empty())
    }
}

/// Takes a directory in a bucket. The master has agreed: no other node that is alive has it.
#[cfg(feature = "s3")]
fn take(
    mut packs: crate::disk::PackBucket,
    node: &str,
    lineage: u64,
    disk: SegmentNo,
) -> Result<Step, DiskError> {
    packs.take(node)?;
    let (room, refused, gone) = (packs.room(), packs.refused().len() as u64, packs.gone());
    let service = DiskService::open_bucket(packs, packs::bucket_options(), lineage)?;
    Ok(Step::Taken { disk, service, room, refused, gone })
}

/// Why an image was not read.
enum Unread {
    /// The device reports an error.
    Failed,
    /// The disk says that nothing is there, and never will be.
    Gone,
}

/// A read has ended: its job is finished when nothing touches its buffer any more. Returns the locator if the
/// disk cannot read it.
fn read_ended(place: &Place, event: &DiskEvent) -> Option<(u64, Unread)> {
    match event {
        DiskEvent::Staged { id, .. } => {
            place.sources.ended(*id, Ok(()));
            None
        }
        DiskEvent::ReadFailed { id, why, buffer: Some(_) } => {
            let locator = place.sources.ended(*id, Err(code_of(*why)))?;
            match why {
                NotDone::Failed(Failure::Device) => Some((locator, Unread::Failed)),
                NotDone::Refused(Refused::Gone) => Some((locator, Unread::Gone)),
                _ => None,
            }
        }
        DiskEvent::BufferFree { id, .. } => {
            place.sources.ended(*id, Err(ErrorCode::UnavailableInCurrentStatus));
            None
        }
        _ => None,
    }
}

/// The memory of an object of this node.
fn source_of(mounted: &Mounted, segment: SegmentNo, addr: u64, bytes: u64) -> Option<Lent> {
    let memory = mounted.home.memory().filter(|_| segment == mounted.segment)?;
    lend(memory, addr, bytes)
}

/// What the master is told about a demotion that failed: whether anything of it may be on the disk.
const fn demotion_error(why: NotDone) -> ErrorCode {
    match why {
        NotDone::Refused(_) | NotDone::Memory | NotDone::Failed(Failure::Removed) => {
            ErrorCode::UnavailableInCurrentStatus
        }
        NotDone::Failed(_) | NotDone::Closed => ErrorCode::TransferFail,
    }
}

fn format(config: &NodeDiskConfig, options: FormatOptions) -> Result<(), DiskError> {
    let (file, geometry) = DiskFile::prepare(&config.path, options)?;
    let service = DiskService::format(file, geometry, DiskOptions::default(), 0)?;
    loop {
        match service.wait_event(CLOSE) {
            Some(DiskEvent::Ready) => break,
            Some(DiskEvent::Stopped(_)) | None => break,
            Some(_) => {}
        }
    }
    service.close(CLOSE);
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_reported_once_and_not_before_everything_is_announced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let options =
            FormatOptions { bytes: Some(16 << 20), caching: Caching::Buffered, ..Default::default() };
        let (file, _) = DiskFile::prepare(&path, options).unwrap();
        let mut disk = NodeDisk::of(path, DiskKind::Local, Medium::File(file));
        assert!(disk.unread(7, Unread::Gone).is_none(), "it may be announced yet");
        disk.ready = true;
        assert!(matches!(disk.unread(7, Unread::Gone), Some(Report::Dropped { from: 7, to: 8 })));
        assert!(disk.unread(7, Unread::Gone).is_none());
        for _ in 0..2 {
            assert!(matches!(disk.unread(7, Unread::Failed), Some(Report::Dropped { from: 7, to: 8 })));
        }
    }
}
