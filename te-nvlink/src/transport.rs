//! The transport: slices that wait for their memory, and copies that run.

mod share;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use te_core::device::{Devices, HopEnd};
use te_core::grant::Want;
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, Location,
    MemSpan, Memory, MemoryKinds, Op, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::net::advertised;
use te_fabric::operation::accept_prefix;
use te_fabric::{
    Epoll, OpenError, Operation, Operations, Queue, Region, Regions, RemoteBytes, RemoteRegion, RemoteRegions,
};
use te_gpu::{Block, Copy, CopyQueue, Gpu, HostPin, Place};
use te_host::control::boot_id;
use te_host::fork::Mark;
use te_host::keys;

use crate::channel::Tag;
use crate::config::Config;
use crate::export::Export;
use crate::memory::{Own, is_written};
use crate::not_exported::{NotExported, Reasons};
use crate::owner::Owner;
use crate::peers::{Peers, Target};
use crate::sys::{Lasting, start};
use crate::worker::{Done, Job, Worker};

/// Longest slice, bytes.
const SLICE_BYTES_MAX: u32 = 64 << 20;
/// Size from which on longer slices are no faster, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;
/// Regions, and remote regions.
const ROWS_MAX: u32 = 1 << 16;
/// Fences whose completions were not fetched.
const FENCES_MAX: u32 = 64;
/// Events taken from the kernel in one call.
const EVENTS_MAX: usize = 16;
/// Copies that are started in one call of a queue.
const COPIES_MAX: usize = 512;

/// Copies between memory of devices and memory of other processes of the host.
///
/// Dropping it ends its copies, closes the memory of its owners, and waits up to a second for the peers that
/// have its own memory mapped.
pub struct NvlinkTransport {
    gpu: Gpu,
    kinds: MemoryKinds,
    mark: Mark,
    config: Config,
    identity: u64,
    /// The name of this host.
    host: [u8; 16],
    /// Where peers of other hosts reach this transport; empty: they do not.
    addresses: Vec<SocketAddr>,
    /// Name of this transport's listener.
    socket: [u8; 16],
    epoll: Epoll,
    owner: Owner,
    peers: Peers,
    /// Started with the first attachment.
    worker: Option<Worker>,
    regions: Regions<Local>,
    remote_regions: RemoteRegions<Link>,
    operations: Operations<Ext>,
    /// Slices whose copies were not started.
    waiting: Queue,
    /// One for each device that copies.
    queues: Vec<DeviceQueue>,
    /// Slices whose copies run.
    running: u32,
    fences: u32,
    /// Whether a slice waits that can be started when a queue has room.
    is_full: bool,
    /// Whether a slice waits that the next poll ends.
    has_failed: bool,
    quarantined: u64,
    /// Why regions were not exported so far.
    reasons: Reasons,
    activity: u64,
    now: Instant,
}

/// A device's queue, and the copies that it gets next.
struct DeviceQueue {
    queue: CopyQueue,
    next: Vec<Copy>,
    room: usize,
}

/// What is kept of a region beside its rights.
struct Local {
    span: MemSpan,
    device: Option<OnDevice>,
    /// The pages of host memory, once a slice has needed them.
    pin: Pinning,
    key: [u8; 16],
    exported: Result<(), NotExported>,
    /// Whether processes of other hosts can map it, too.
    across_hosts: Result<(), NotExported>,
}

struct OnDevice {
    block: Block,
    place: Place,
    /// The count of registrations at which the memory was known to be the same.
    as_of: u64,
}

enum Pinning {
    Not,
    Asked,
    Done(Arc<HostPin>),
    Failed(Error),
}

#[derive(Clone, Copy)]
struct Link {
    link: u32,
    is_device: bool,
}

/// What is kept of a slice.
#[derive(Clone, Copy)]
struct Ext {
    local_offset: u64,
    /// The mapping that its copy uses, while it runs.
    import: Option<u32>,
}

impl NvlinkTransport {
    /// A transport without regions over the devices of `gpu`. The driver is loaded when device memory is
    /// registered, or memory of a peer is attached. It listens from the first region on that can be exported.
    ///
    /// # Errors
    /// A setting outside its range; a host whose boot id cannot be read; an address that cannot be listened
    /// on; no file descriptor or no random numbers from the system.
    pub fn new(config: Config, gpu: Gpu) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let random = |error: Error| {
            OpenError::step("get random numbers")(std::io::Error::from_raw_os_error(error.code))
        };
        let identity = if config.identity == 0 { keys::identity() } else { Ok(config.identity) };
        let identity = identity.map_err(random)?;
        let host = config.host.map_or_else(boot_id, Ok).map_err(OpenError::step("read the boot id"))?;
        let epoll = Epoll::new(EVENTS_MAX).map_err(OpenError::step("create an epoll instance"))?;
        let mut owner = Owner::new(&config);
        let mut addresses = Vec::new();
        if config.across_hosts {
            let listens = owner.listen_across_hosts(&epoll, &config);
            let bound = listens.map_err(OpenError::step("listen for processes of other hosts"))?;
            let ips = advertised(config.advertise, bound.ip());
            addresses = ips.into_iter().map(|ip| SocketAddr::new(ip, bound.port())).collect();
        }
        Ok(Self {
            kinds: gpu.kinds() | MemoryKinds::HOST,
            gpu,
            mark: Mark::new(),
            identity,
            host,
            addresses,
            socket: keys::random().map_err(random)?,
            epoll,
            owner,
            peers: Peers::new(identity, &config),
            worker: None,
            regions: Regions::new(ROWS_MAX),
            remote_regions: RemoteRegions::new(ROWS_MAX),
            operations: Operations::new(config.inflight_max, FENCES_MAX),
            waiting: Queue::new(),
            queues: Vec::new(),
            running: 0,
            fences: 0,
            is_full: false,
            has_failed: false,
            quarantined: 0,
            reasons: Reasons::default(),
            activity: 0,
            now: Instant::ZERO,
            config,
        })
    }

    /// How peers identify this transport.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.identity
    }

    /// Why a region cannot be exported; `None` when it can.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub fn not_exported(&self, id: RegionId) -> Result<Option<NotExported>, Error> {
        Ok(self.regions.find(id)?.ext.exported.err())
    }

    /// Why processes of other hosts cannot map a region of device memory that processes of this host can;
    /// `None` when they can, and where no region is shared with other hosts.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub fn not_across_hosts(&self, id: RegionId) -> Result<Option<NotExported>, Error> {
        Ok(self.regions.find(id)?.ext.across_hosts.err())
    }

    /// Slices whose copies may never have ended, because their device failed. Their regions, and the memory
    /// of their owners, stay in use until the process ends.
    #[must_use]
    pub const fn quarantined(&self) -> u64 {
        self.quarantined
    }

    fn check(&self, slice: &Slice) -> Result<(), Error> {
        if slice.len == 0 || slice.len > SLICE_BYTES_MAX {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let region = self.regions.check_local(slice)?;
        let remote = self.remote_regions.check_remote(slice)?;
        // Two sides of host memory are served by other fabrics of the host.
        if region.ext.device.is_none() && !remote.ext.is_device {
            return Err(ErrorKind::Unreachable.into());
        }
        Ok(())
    }

    /// The memory of a region was not freed since it was registered, as far as can be known.
    fn look_at_memory(&mut self, index: u32) -> Result<(), Error> {
        let registrations = self.gpu.registrations();
        let Some(Region { ext: Local { device: Some(device), .. }, .. }) = self.regions.get_mut(index) else {
            return Ok(());
        };
        if device.as_of != registrations {
            self.gpu
                .recheck(&device.block)
                .map_err(|error| Error::with_code(ErrorKind::Stale, error.code))?;
            device.as_of = registrations;
        }
        Ok(())
    }

    fn accept(&mut self, slice: &Slice) -> Result<(), Error> {
        self.check(slice)?;
        self.look_at_memory(slice.local.region.index)?;
        let link = self.remote_regions.find(slice.remote.region)?.ext.link;
        let ext = Ext { local_offset: slice.local.offset, import: None };
        let slot = self.operations.insert(Operation::new(slice, link, ext)).ok_or(ErrorKind::Full)?;
        self.operations.push_back(&mut self.waiting, slot);
        self.regions.pin(slice.local.region.index);
        self.remote_regions.pin(slice.remote.region.index);
        Ok(())
    }

    /// Ends a slice that has left its queue.
    fn end(&mut self, slot: u32, error: Option<Error>, remote: RemoteBytes) {
        let Some(mut operation) = self.operations.remove(slot) else { return };
        operation.error = error;
        self.regions.unpin(operation.region);
        self.remote_regions.unpin(operation.remote_region);
        self.operations.complete(operation.completion(remote));
        self.activity += 1;
    }

    fn end_waiting(&mut self, slot: u32, error: Error) {
        self.operations.unlink(&mut self.waiting, slot);
        self.end(slot, Some(error), RemoteBytes::Untouched);
    }

    /// Starts the copies of slices whose memory is there. Slices that cannot be carried out end in `poll`
    /// alone, after it has learned why: an owner that ends revokes its memory first.
    fn pump(&mut self, is_poll: bool) {
        (self.is_full, self.has_failed) = (false, false);
        if self.waiting.is_empty() {
            return;
        }
        for device in &mut self.queues {
            device.next.clear();
            device.room = device.queue.room().min(COPIES_MAX);
        }
        let mut next = self.waiting.first();
        while let Some(slot) = next {
            if self.queues.iter().all(|device| device.next.len() >= device.room) {
                self.is_full = true;
                break;
            }
            next = self.operations.after(slot);
            match self.prepare(slot) {
                Ok(true) => self.operations.unlink(&mut self.waiting, slot),
                Ok(false) => {}
                Err(error) if is_poll => self.end_waiting(slot, error),
                Err(_) => self.has_failed = true,
            }
        }
        for at in 0..self.queues.len() {
            let device = &mut self.queues[at];
            if device.next.is_empty() {
                continue;
            }
            let started = start(&mut device.queue, &device.next);
            let count = started.unwrap_or(0);
            self.running += count as u32;
            for nth in count..self.queues[at].next.len() {
                let slot = self.queues[at].next[nth].token.0 as u32;
                let import = self.operations.get_mut(slot).and_then(|operation| operation.ext.import.take());
                if let Some(import) = import {
                    self.peers.leave(import);
                }
                match started {
                    Ok(_) => self.operations.push_back(&mut self.waiting, slot),
                    Err(error) => self.end(slot, Some(error), RemoteBytes::Untouched),
                }
            }
        }
    }

    /// Puts the copy of a slice where it is started next, and says to the owner that its memory is in use.
    /// False: it has to wait.
    fn prepare(&mut self, slot: u32) -> Result<bool, Error> {
        let Some(operation) = self.operations.get(slot).copied() else { return Ok(false) };
        let Some(target) = self.peers.target(operation.peer)? else { return Ok(false) };
        let Some((here, kernel)) = self.local_place(operation.region, &target)? else { return Ok(false) };
        let device = self.queues.iter_mut().find(|device| device.queue.location() == target.via);
        let device = device.ok_or(ErrorKind::Unreachable)?;
        if device.next.len() >= device.room {
            self.is_full = true;
            return Ok(false);
        }
        self.peers.enter(target.import)?;
        let here = here.plus(operation.ext.local_offset);
        let there = target.place.plus(operation.remote_offset);
        let (to, from) = if operation.op == Op::Write { (there, here) } else { (here, there) };
        let kernel = kernel && target.kernel;
        device.next.push(Copy { token: Token(slot.into()), to, from, len: operation.len, kernel });
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.ext.import = Some(target.import);
        }
        Ok(true)
    }

    /// Where a local region is, for the device that copies; `None`: its pages are not locked yet.
    fn local_place(&mut self, index: u32, target: &Target) -> Result<Option<(Place, bool)>, Error> {
        let region = self.regions.get_mut(index).ok_or(ErrorKind::NotFound)?;
        if let Some(device) = &region.ext.device {
            let kernel = device.block.is_own_context && device.block.location == target.via;
            return Ok(Some((device.place, kernel)));
        }
        match &region.ext.pin {
            Pinning::Done(pin) => Ok(Some((pin.place(region.ext.span)?, pin.allows_kernel()))),
            Pinning::Asked => Ok(None),
            Pinning::Failed(error) => Err(*error),
            Pinning::Not => {
                let worker = self.worker.as_ref().ok_or(ErrorKind::Unreachable)?;
                let memory = Lasting(region.ext.span);
                let writable = is_written(region.access);
                worker.send(Job::Pin { region: index, device: target.via, memory, writable });
                region.ext.pin = Pinning::Asked;
                Ok(None)
            }
        }
    }

    /// Takes the ends of copies.
    fn reap(&mut self) {
        if self.running == 0 {
            return;
        }
        let mut out = [HopEnd { token: Token(0), result: Ok(()) }; 64];
        for at in 0..self.queues.len() {
            loop {
                let count = self.queues[at].queue.poll(&mut out);
                let is_dead = self.queues[at].queue.is_dead();
                for end in &out[..count] {
                    self.copied(end, is_dead);
                }
                if count < out.len() {
                    break;
                }
            }
        }
    }

    fn copied(&mut self, end: &HopEnd, is_dead: bool) {
        let slot = end.token.0 as u32;
        self.running -= 1;
        let Some(import) = self.operations.get(slot).and_then(|operation| operation.ext.import) else {
            return;
        };
        if is_dead {
            // What a failed device still does is not known: both sides of the slice stay in use.
            self.quarantined += 1;
            let Some(mut operation) = self.operations.remove(slot) else { return };
            operation.error = Some(end.result.err().unwrap_or(ErrorKind::Rail.into()));
            self.operations.complete(operation.completion(RemoteBytes::InDoubt));
            return;
        }
        self.peers.leave(import);
        // A copy that failed may have written some of its bytes, and writes no more.
        self.end(slot, end.result.err(), RemoteBytes::Written);
    }

    /// Handles what has arrived on the sockets, and what the worker has done.
    fn events(&mut self) {
        if self.mark.is_forked() {
            return;
        }
        let count = self.epoll.ready().unwrap_or(0);
        for at in 0..count {
            match Tag::from_bits(self.epoll.event(at).token) {
                Tag::Listener => self.owner.accept(&self.epoll),
                Tag::HostsListener => self.owner.accept_across_hosts(&self.epoll, self.now),
                Tag::Holder(index) => self.owner.receive(&self.epoll, &self.gpu, &self.socket, index),
                Tag::Host(index) => {
                    if let Some(worker) = &self.worker {
                        self.peers.receive(&self.epoll, worker, index);
                    }
                }
                Tag::Worker => self.worker_done(),
            }
        }
    }

    fn worker_done(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        worker.was_heard();
        while let Some(done) = worker.next() {
            match done {
                Done::Pinned { region, pin } => {
                    if let Some(region) = self.regions.get_mut(region) {
                        region.ext.pin = pin.map_or_else(Pinning::Failed, Pinning::Done);
                    }
                }
                done => self.peers.done(&self.epoll, worker, done),
            }
        }
    }

    /// The queue of a device; makes it at the first need.
    fn need_queue(&mut self, device: Location) -> Result<(), Error> {
        if self.queues.iter().all(|known| known.queue.location() != device) {
            let queue = self.gpu.copy_queue(device)?;
            self.queues.push(DeviceQueue { queue, next: Vec::with_capacity(COPIES_MAX), room: 0 });
        }
        Ok(())
    }

    /// The device that copies to and from memory at `home`: that device, if this process has memory of it or
    /// of none that reaches it.
    fn via(&self, home: Option<Location>) -> Option<Location> {
        let mut local = self.queues.iter().map(|device| device.queue.location());
        match home {
            None => local.next().or_else(|| self.gpu.devices().ok()?.first().map(|device| device.location)),
            Some(home) if local.clone().any(|device| device == home) => Some(home),
            Some(home) => Some(local.find(|device| self.gpu.reaches(*device, home)).unwrap_or(home)),
        }
    }

    fn examine(&self, span: MemSpan) -> Result<Option<OnDevice>, Error> {
        if span.location().kind() == MemoryKinds::HOST {
            return Ok(None);
        }
        let as_of = self.gpu.registrations();
        let block = self.gpu.examine(span).map_err(|error| match error.kind {
            ErrorKind::NotFound => ErrorKind::InvalidArgument.into(),
            _ => error,
        })?;
        if block.location != span.location() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        Ok(Some(OnDevice { block, place: self.gpu.place(span), as_of }))
    }
}

impl Memory for NvlinkTransport {
    #[allow(unsafe_code, reason = "the trait's method; its promise is passed to `sys`")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        span.require(self.kinds)?;
        if span.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        self.regions.vacant(id.index)?;
        let device = self.examine(span)?;
        if let Some(device) = &device {
            self.need_queue(device.block.location)?;
        }
        let (exported, across_hosts) = (Ok(()), Ok(()));
        let mut local = Local { span, device, pin: Pinning::Not, key: [0; 16], exported, across_hosts };
        self.share(id, &mut local, access)?;
        self.regions.insert(id.index, Region::new(id, span.len() as u64, span.location(), access, 0, local))
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        let region = self.regions.find(id)?;
        if region.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        let is_exported = region.ext.exported.is_ok();
        // Releases and the death of peers are noticed first, and pages that were locked meanwhile.
        self.events();
        let region = self.regions.get_mut(id.index).ok_or(ErrorKind::NotFound)?;
        region.closing = true;
        let is_pinning = matches!(region.ext.pin, Pinning::Asked);
        if is_exported {
            Own::forget(self.socket, id);
        }
        if (is_exported && !self.owner.unshare(&self.epoll, id)) || is_pinning {
            return Err(ErrorKind::Busy.into());
        }
        self.regions.remove(id.index);
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        let region = self.regions.find(id)?;
        if region.closing {
            return Err(ErrorKind::AccessDenied.into());
        }
        if let Err(why) = region.ext.exported {
            return Err(why.error());
        }
        let devices = self.gpu.devices().unwrap_or_default();
        let uuid = |location| devices.iter().find(|of| of.location == location).map(|of| of.uuid);
        let gpu = region.ext.device.as_ref().and_then(|device| uuid(device.block.location));
        let export = Export {
            host: self.host,
            gpu,
            socket: self.socket,
            region: id,
            key: region.ext.key,
            len: region.len,
            access: region.access,
            addresses: self.addresses_of(region),
        };
        let bytes = export.to_bytes();
        out.get_mut(..bytes.len()).ok_or(ErrorKind::OutOfRange)?.copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        self.remote_regions.vacant(id.index)?;
        let Export { host, gpu, socket, region, key, len, access, addresses } = Export::parse(blob)?;
        let is_across_hosts = host != self.host;
        // Fabric handles are of memory of devices.
        if is_across_hosts && (!self.config.across_hosts || addresses.is_empty() || gpu.is_none()) {
            return Err(ErrorKind::Unreachable.into());
        }
        let devices = self.gpu.devices().map_err(|_| ErrorKind::Unreachable)?;
        let seen = gpu.filter(|_| !is_across_hosts);
        let home =
            seen.map(|gpu| devices.iter().find(|device| device.uuid == gpu).map(|device| device.location));
        // A device of this host that this process does not see cannot be opened here.
        let home = home.map(|home| home.ok_or(ErrorKind::Unreachable)).transpose()?;
        let via = self.via(home).ok_or(ErrorKind::Unreachable)?;
        self.need_queue(via).map_err(|error| Error::with_code(ErrorKind::Unreachable, error.code))?;
        let worker = match &mut self.worker {
            Some(worker) => worker,
            none => none.insert(Worker::start(&self.gpu, &self.epoll)?),
        };
        let want = Want { region, key, len, access };
        let with = (&self.epoll, &self.gpu, &*worker);
        let addresses = is_across_hosts.then_some(&addresses[..]);
        let link = self.peers.attach(with, (socket, addresses), want, (gpu.is_some(), via))?;
        let remote = RemoteRegion {
            generation: id.generation,
            peer: 0,
            region: region.index,
            region_generation: region.generation,
            key: 0,
            len,
            location: home.unwrap_or(Location::Host),
            access,
            pins: 0,
            ext: Link { link, is_device: gpu.is_some() },
        };
        self.remote_regions.insert(id.index, remote)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        let remote = self.remote_regions.detach(id)?;
        if let Some(worker) = &self.worker {
            self.peers.detach(&self.epoll, worker, remote.ext.link);
        }
        Ok(())
    }
}

impl Transport for NvlinkTransport {
    fn name(&self) -> &'static str {
        "nvlink"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ | Features::WRITE | Features::TWO_SIDED_PROGRESS)
            .with_slice_bytes(SLICE_BYTES_PREFERRED, SLICE_BYTES_MAX)
            .with_inflight_max(self.config.inflight_max)
            .with_export_bytes_max(self.export_bytes_max())
            .with_memory(self.kinds)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        let room = self.operations.room();
        let accepted = accept_prefix(batch, room, |slice| self.accept(slice))?;
        self.pump(false);
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        if self.mark.is_forked() {
            return 0;
        }
        self.now = now;
        self.reap();
        self.events();
        self.owner.poll(&self.epoll, now);
        if let Some(worker) = &self.worker {
            self.peers.poll(&self.epoll, worker, now);
        }
        self.pump(true);
        let count = self.operations.fetch(out);
        if !self.operations.has_completions() {
            self.fences = 0;
        }
        count
    }

    fn poll_at(&self) -> Option<Instant> {
        if self.running > 0 || self.is_full || self.has_failed || self.operations.has_completions() {
            return Some(self.now);
        }
        self.owner.poll_at(self.now).into_iter().chain(self.peers.poll_at()).min()
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.epoll.raw_fd()))
    }

    fn activity(&self) -> u64 {
        self.activity
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        match self.operations.position(|operation| operation.token == token) {
            Some(slot) => {
                // A copy that runs ends by itself, and soon.
                if self.operations.get(slot).is_some_and(Operation::is_queued) {
                    self.end_waiting(slot, ErrorKind::Canceled.into());
                }
                Ok(())
            }
            None if self.operations.is_completed(token) => Ok(()),
            None => Err(ErrorKind::NotFound.into()),
        }
    }

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        self.remote_regions.find(remote)?;
        if self.fences >= FENCES_MAX {
            return Err(ErrorKind::Full.into());
        }
        self.fences += 1;
        // A slice ends when its copy has: nothing of it lands later, unless its device has failed.
        self.operations.complete(match self.quarantined {
            0 => Completion::applied(token),
            _ => Completion::unknown(token, ErrorKind::Rail.into()),
        });
        Ok(())
    }

    fn why_not_exported(&self, region: RegionId) -> Option<String> {
        self.why_not_shared(region)
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.owner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        if peer == 0 {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if self.mark.is_forked() {
            return Err(ErrorKind::Forked.into());
        }
        if mode == ExpelMode::SpareConnected && self.is_connected(peer) {
            return Err(ErrorKind::Busy.into());
        }
        // Releases and the death of peers are noticed first. A peer that waits to be accepted is, so that it
        // can be expelled.
        self.events();
        self.owner.expel(&self.epoll, peer)
    }
}

impl fmt::Debug for NvlinkTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvlinkTransport").field("running", &self.running).finish_non_exhaustive()
    }
}
