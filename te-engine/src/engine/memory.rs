//! Registering local memory.

use std::collections::HashSet;
use std::string::ToString as _;
use std::sync::Arc;
use std::time::Duration;
use std::vec::Vec;

use te_core::device::Devices;
use te_core::{Access, ErrorKind, Features, Instant, Location, MemSpan, Memory, RegionId, Transport};
use te_host::{AllocOptions, SharedMemory, node_of};

use super::Engine;
use super::regions::Region;
use crate::descriptor::{EXPORT_BYTES_MAX, RegionDescriptor};
use crate::error::{AtIndex, RegisterError};
use crate::region::SharedRegion;
use crate::request::LeftOut;

/// Regions of this size or more are registered with several rails in parallel, bytes: pinning takes about 100
/// ms per GiB.
const PARALLEL_BYTES_MIN: usize = 64 << 20;
/// Maximum number of threads that register one region.
const THREADS_MAX: usize = 8;
/// Time until a region is first registered again with a rail that refused it. The time doubles up to
/// `REJOIN_MAX`.
const REJOIN_MIN: Duration = Duration::from_secs(1);
const REJOIN_MAX: Duration = Duration::from_secs(60);
/// Time between two attempts to unregister quarantined regions.
const RELEASE: Duration = Duration::from_millis(200);

impl Engine {
    /// Registers memory that the caller keeps mapped. With remote rights it becomes part of this engine's
    /// segment.
    ///
    /// # Errors
    /// `Empty`, `Overlap` with a registered region, `Full`, or the fabrics' refusal.
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) returned `Ok` for the region, or the engine is gone, `span`
    /// stays mapped, and no `&` or `&mut` exists to bytes that a peer (remote rights) or a transfer in flight
    /// (local rights) may write.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register(&mut self, span: MemSpan, access: Access) -> Result<RegionId, RegisterError> {
        let id = self.reserve_region()?;
        // SAFETY: the caller's promise.
        unsafe { self.register_as(id, span, access, false, None) }.map(|()| id)
    }

    /// Registers several regions: all of them, or none. Peers see all of them at once.
    ///
    /// # Errors
    /// As [`register`](Self::register), of the first region that was refused; a region that overlaps an
    /// earlier one of the list is refused, too.
    ///
    /// # Safety
    /// As [`register`](Self::register), for each span.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register_many(
        &mut self,
        regions: &[(MemSpan, Access)],
    ) -> Result<Vec<RegionId>, AtIndex<RegisterError>> {
        let mut ids = Vec::with_capacity(regions.len());
        let mut exports = Vec::new();
        for (index, &(span, access)) in regions.iter().enumerate() {
            let registered = self.reserve_region().and_then(|id| {
                // SAFETY: the caller's promise.
                unsafe { self.register_unpublished(id, span, access, false, None) }.map(|export| (id, export))
            });
            match registered {
                Ok((id, export)) => {
                    ids.push(id);
                    exports.extend(export);
                }
                Err(error) => {
                    for id in ids {
                        let undone = self.unregister(id);
                        debug_assert!(undone.is_ok(), "nothing uses a region that was never published");
                    }
                    return Err(AtIndex { index, error });
                }
            }
        }
        self.published.insert(exports);
        Ok(ids)
    }

    /// Whether every rail touches local memory only inside calls of this engine
    /// ([`Features::CALLER_DRIVEN`]). Memory can then be registered for a single operation at almost no cost,
    /// and is unused when the operation has ended.
    #[must_use]
    pub fn is_caller_driven(&self) -> bool {
        self.rails.capabilities().features.contains(Features::CALLER_DRIVEN)
    }

    /// The devices whose memory this build knows; `None`: it knows of none. For a caller that copies between
    /// device memory and host memory itself.
    #[must_use]
    pub fn devices(&self) -> Option<Arc<dyn Devices>> {
        self.gpus.devices()
    }

    /// The span, at the device on which its first or last byte is; host memory stays as it is.
    #[must_use]
    pub fn located(&self, span: MemSpan) -> MemSpan {
        self.gpus.located(span)
    }

    /// Reserves an id for [`register_as`](Self::register_as).
    pub(crate) fn reserve_region(&mut self) -> Result<RegionId, RegisterError> {
        self.here()?;
        self.regions.reserve()
    }

    /// Registers memory under a reserved id, which is freed on an error.
    ///
    /// # Safety
    /// As [`register`](Self::register). With `memory`, the engine keeps the memory mapped; with `owned`, a
    /// `Registered` buffer does.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub(crate) unsafe fn register_as(
        &mut self,
        id: RegionId,
        span: MemSpan,
        access: Access,
        owned: bool,
        memory: Option<Arc<SharedMemory>>,
    ) -> Result<(), RegisterError> {
        // SAFETY: the caller's promise.
        let export = unsafe { self.register_unpublished(id, span, access, owned, memory) }?;
        self.published.insert(export);
        Ok(())
    }

    /// As [`register_as`](Self::register_as), without listing the region in this engine's descriptor: returns
    /// its entry there.
    ///
    /// # Safety
    /// As [`register_as`](Self::register_as).
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    unsafe fn register_unpublished(
        &mut self,
        id: RegionId,
        span: MemSpan,
        access: Access,
        owned: bool,
        memory: Option<Arc<SharedMemory>>,
    ) -> Result<Option<RegionDescriptor>, RegisterError> {
        // Buffers and memory that the engine keeps are host memory.
        let is_known = owned || memory.is_some();
        let span = if is_known { span } else { self.pools.located(self.gpus.located(span)) };
        let registered = self.regions.check(span).and_then(|()| {
            // SAFETY: the caller's promise lasts until `unregister` returned `Ok`, which it does only after
            // `deregister`.
            let registered = unsafe {
                self.rails.register_with(id, span, access, |rails, results| {
                    register_each(rails, results, id, span, access)
                })
            };
            registered.map_err(RegisterError::Rails)?;
            if let Some((rail, error)) = self.rails.left_out() {
                let (fabric, device) = (self.rails.rails()[rail].name(), &self.devices[rail]);
                log::warn!(
                    "region {id} of {} bytes is not registered with {fabric} {device}: {error}",
                    span.len()
                );
                self.rejoin_at = Some((self.clock.now() + REJOIN_MIN, REJOIN_MIN));
                let (device, why) = (device.clone(), error.to_string());
                self.left_out.push(LeftOut { region: id, fabric, device, registered: false, why });
            }
            // After the rails have registered it, for those that pin pages have allocated them; and before it
            // is published.
            let location = self.locate(span);
            let penalties = self.affinity.penalties(location, &self.devices);
            self.rails.route_mut().set_region_penalties(id, penalties.as_deref());
            self.exported(id, span, location, access).inspect_err(|_| {
                let undone = self.rails.deregister(id);
                debug_assert!(undone.is_ok(), "no peer uses a region that was never exported");
            })
        });
        match registered {
            Ok(export) => {
                let region = Region {
                    span,
                    access,
                    owned,
                    requests: 0,
                    closing: false,
                    quarantined: false,
                    _memory: memory,
                };
                self.regions.insert(id, region);
                Ok(export)
            }
            Err(error) => {
                self.left_out.retain(|left_out| left_out.region != id);
                self.regions.release(id);
                Err(error)
            }
        }
    }

    /// The regions that a rail has refused for its own reason, such as a limit of locked memory, or does not
    /// export, such as memory of a device that its driver shares with no other process: by region. Looks at
    /// every region.
    #[must_use]
    pub fn left_out(&self) -> Vec<LeftOut> {
        if self.here().is_err() {
            return Vec::new();
        }
        let mut all = self.left_out.clone();
        for (region, _) in self.regions.ids().filter(|(_, is_remote)| *is_remote) {
            for (rail, device) in self.rails.rails().iter().zip(&self.devices) {
                let (fabric, device) = (rail.name(), device.clone());
                let why = rail.why_not_exported(region);
                all.extend(why.map(|why| LeftOut { region, fabric, device, registered: true, why }));
            }
        }
        all.sort_by_key(|left_out| left_out.region.index);
        all
    }

    /// Where memory is: as the caller declared it, or its NUMA node if the choice of a rail depends on it.
    fn locate(&self, span: MemSpan) -> Location {
        match span.location() {
            Location::Host if self.affinity.depends_on_node(&self.devices) => match node_of(span) {
                Ok(node) => node.map_or(Location::Host, Location::Numa),
                Err(error) => {
                    log::debug!("the NUMA node of memory is unknown: move_pages: {error}");
                    Location::Host
                }
            },
            location => location,
        }
    }

    /// The entry of a region in this engine's descriptor; `None` if it has no remote rights or cannot be
    /// exported.
    pub(super) fn exported(
        &self,
        id: RegionId,
        span: MemSpan,
        location: Location,
        access: Access,
    ) -> Result<Option<RegionDescriptor>, RegisterError> {
        if !access.is_remote() {
            return Ok(None);
        }
        let mut export = vec![0; EXPORT_BYTES_MAX];
        match self.rails.export(id, &mut export) {
            Ok(len) => export.truncate(len),
            // Shared memory, if it is the only fabric, cannot export this memory. It still serves as local
            // memory.
            Err(error) if error.kind == ErrorKind::Unsupported => {
                log::warn!(
                    "region {id} of {} bytes is not exported: no fabric of this engine can export such memory",
                    span.len()
                );
                return Ok(None);
            }
            Err(error) => return Err(RegisterError::Rails(error)),
        }
        Ok(Some(RegionDescriptor {
            region: id.to_bits(),
            addr: span.as_ptr().addr() as u64,
            len: span.len() as u64,
            access: access.intersection(Access::REMOTE_READ | Access::REMOTE_WRITE).bits(),
            location: location.to_string(),
            export,
        }))
    }

    /// Ends a registration. After `Ok` neither this engine nor a peer touches the memory any more.
    ///
    /// # Errors
    /// `Busy` while requests in flight use the region, or while an operation of a peer does: then new
    /// operations are refused, and the call is to be repeated after [`poll`](Self::poll). `NotFound`.
    pub fn unregister(&mut self, id: RegionId) -> Result<(), RegisterError> {
        self.here()?;
        let region = self.regions.region_mut(id).ok_or(RegisterError::NotFound)?;
        if region.requests > 0 {
            return Err(RegisterError::Busy { requests: region.requests });
        }
        region.closing = true;
        if region.access.is_remote() {
            self.published.remove(&[region.span.as_ptr().addr() as u64]);
        }
        self.deregister(id)
    }

    /// Ends several registrations: none of them if one is unknown, is listed twice, or is used by requests in
    /// flight. The regions that no operation of a peer uses are then unregistered.
    ///
    /// # Errors
    /// As [`unregister`](Self::unregister), of the first region that is still registered. After `Busy` with
    /// no requests, some of the others are not: they are `NotFound` from then on.
    pub fn unregister_many(&mut self, ids: &[RegionId]) -> Result<(), AtIndex<RegisterError>> {
        self.unregister_left(&mut ids.iter().copied().enumerate().collect())
    }

    /// As [`unregister_many`](Self::unregister_many), of regions with their indices; leaves those in the list
    /// that are still registered.
    pub(crate) fn unregister_left(
        &mut self,
        left: &mut Vec<(usize, RegionId)>,
    ) -> Result<(), AtIndex<RegisterError>> {
        let mut seen = HashSet::new();
        for &(index, id) in left.iter() {
            let at = |error| AtIndex { index, error };
            self.here().map_err(|forked| at(forked.into()))?;
            let region = self.regions.region(id).filter(|_| seen.insert(id));
            let region = region.ok_or(at(RegisterError::NotFound))?;
            if region.requests > 0 {
                return Err(at(RegisterError::Busy { requests: region.requests }));
            }
        }
        let mut addrs = Vec::with_capacity(left.len());
        for &(_, id) in left.iter() {
            let Some(region) = self.regions.region_mut(id) else { continue };
            region.closing = true;
            if region.access.is_remote() {
                addrs.push(region.span.as_ptr().addr() as u64);
            }
        }
        self.published.remove(&addrs);
        let mut first = Ok(());
        left.retain(|&(index, id)| match self.deregister(id) {
            Ok(()) => false,
            Err(error) => {
                if first.is_ok() {
                    first = Err(AtIndex { index, error });
                }
                true
            }
        });
        first
    }

    /// Ends a registration that is closing.
    fn deregister(&mut self, id: RegionId) -> Result<(), RegisterError> {
        match self.rails.deregister(id) {
            Ok(()) => {
                self.left_out.retain(|left_out| left_out.region != id);
                self.regions.remove(id);
                Ok(())
            }
            Err(error) if error.kind == ErrorKind::Busy => Err(RegisterError::Busy { requests: 0 }),
            Err(error) => Err(RegisterError::Rails(error)),
        }
    }

    /// Registers the memory of a [`SharedRegion`] again after its registration has ended, under a new id and
    /// new keys. Nothing is allocated or touched, and the contents stay. Keys and grants of the earlier
    /// registration do not reach it.
    ///
    /// # Errors
    /// As [`register`](Self::register): `Overlap` while it is still registered. `Unsupported` for memory of a
    /// CXL pool.
    pub fn reregister(
        &mut self,
        region: &SharedRegion,
        access: Access,
    ) -> Result<SharedRegion, RegisterError> {
        let memory = region.memory().ok_or(RegisterError::Rails(ErrorKind::Unsupported.into()))?;
        self.register_shared(memory.clone(), access)
    }

    /// Registers extents of a pool of this engine that this process has claimed: their memory becomes part of
    /// this engine's segment. In the mode `flush` only the fabric of pools serves it, and this process reads
    /// and writes it with [`SharedRegion::read`] and [`SharedRegion::write`] alone.
    ///
    /// # Errors
    /// As [`register`](Self::register). `Unsupported` for a pool that is mapped to be read, and for a pool or
    /// extents that this engine does not have.
    #[cfg(feature = "cxl")]
    pub fn register_claimed(
        &mut self,
        pool: &Arc<te_cxl::Pool>,
        span: MemSpan,
        access: Access,
    ) -> Result<SharedRegion, RegisterError> {
        let known = self.pools.all().iter().any(|known| Arc::ptr_eq(known, pool));
        if !known || !pool.is_writable() || !pool.has(span) {
            return Err(RegisterError::Rails(ErrorKind::Unsupported.into()));
        }
        let id = self.reserve_region()?;
        #[allow(unsafe_code, reason = "registers memory whose promise this crate keeps")]
        // SAFETY: the span lies in a pool that this engine keeps mapped, and no reference to its bytes is
        // ever made (see `te_cxl::Pool`).
        unsafe {
            self.register_as(id, span, access, false, None)?;
        }
        Ok(SharedRegion::in_pool(id, pool.clone(), span))
    }

    /// Quarantines shared memory for which [`unregister`](Self::unregister) returns `Busy` because a stopped
    /// peer may be in the middle of a copy. Its pages are returned to the system at once, and their contents
    /// are lost. Its addresses and its place among `regions_max` are freed when the peer continues or is
    /// gone; until then it counts in [`Stats::quarantined_regions`](crate::Stats). No peer is granted it any
    /// more.
    ///
    /// # Errors
    /// `Busy` while requests of this engine use it; `NotFound`.
    pub fn quarantine_shared(&mut self, shared: SharedRegion) -> Result<(), RegisterError> {
        match self.unregister(shared.id()) {
            Err(RegisterError::Busy { requests: 0 }) => {}
            other => return other,
        }
        if let Err(error) = shared.discard() {
            // Memory that peers may only read is sealed against this, and keeps its pages until they are
            // gone.
            log::warn!(
                "quarantined region {} of {} bytes keeps its pages: {error}",
                shared.id(),
                shared.len()
            );
        }
        let region = self.regions.region_mut(shared.id()).ok_or(RegisterError::NotFound)?;
        if !std::mem::replace(&mut region.quarantined, true) {
            log::warn!(
                "region {} of {} bytes is quarantined: a stopped peer may be in the middle of a copy",
                shared.id(),
                shared.len()
            );
            self.quarantine.push(shared.id());
            self.release_at = Some(self.clock.now() + RELEASE);
        }
        Ok(())
    }

    /// Unregisters quarantined regions that no peer's operation uses any more.
    pub(super) fn release(&mut self, now: Instant) {
        if self.release_at.is_none_or(|at| now < at) {
            return;
        }
        let mut quarantine = std::mem::take(&mut self.quarantine);
        quarantine.retain(|&id| matches!(self.unregister(id), Err(RegisterError::Busy { .. })));
        self.quarantine = quarantine;
        self.release_at = (!self.quarantine.is_empty()).then_some(now + RELEASE);
    }

    /// Registers regions with rails that refused them earlier, and publishes the new exports.
    pub(super) fn rejoin(&mut self, now: Instant) {
        let Some((at, wait)) = self.rejoin_at else { return };
        if now < at {
            return;
        }
        let mut joined = Vec::new();
        let count = self.rails.rejoin(|id| joined.push(id));
        for id in joined {
            self.left_out.retain(|left_out| left_out.region != id);
            let Some(region) = self.regions.region(id).filter(|region| !region.closing) else { continue };
            let (span, access) = (region.span, region.access);
            let location = self.locate(span);
            let export = self.exported(id, span, location, access);
            self.published.insert(export.ok().flatten());
        }
        if count > 0 {
            log::info!("{count} registrations with rails that had refused them were made");
        }
        let wait = if count > 0 { REJOIN_MIN } else { (wait * 2).min(REJOIN_MAX) };
        self.rejoin_at = self.rails.is_missing_rails().then_some((now + wait, wait));
    }

    /// The number of quarantined regions, and their bytes.
    pub(super) fn quarantined_regions(&self) -> (u32, u64) {
        let bytes = |id: &RegionId| self.regions.region(*id).map_or(0, |region| region.span.len() as u64);
        (self.quarantine.len() as u32, self.quarantine.iter().map(bytes).sum())
    }

    /// Whether this engine registered the owned buffer at `span` under `id`.
    pub(crate) fn owns(&self, id: RegionId, span: MemSpan) -> bool {
        self.regions.region(id).is_some_and(|region| region.owned && region.span == span)
    }

    /// Allocates and registers zeroed memory that processes on this host can share: page-aligned, reachable
    /// over `shm`.
    ///
    /// # Errors
    /// As [`register`](Self::register), and `Alloc`.
    pub fn alloc_shared(&mut self, len: usize, access: Access) -> Result<SharedRegion, RegisterError> {
        self.alloc_as(len, access, access.contains(Access::REMOTE_WRITE))
    }

    /// As [`alloc_shared`](Self::alloc_shared), for memory that is [lent](SharedRegion::lend) to a process on
    /// this host that has no engine. Whatever `access` is, that process can write the memory at any time:
    /// bytes that are read from it have to be verified.
    ///
    /// # Errors
    /// As [`alloc_shared`](Self::alloc_shared).
    pub fn alloc_lent(&mut self, len: usize, access: Access) -> Result<SharedRegion, RegisterError> {
        self.alloc_as(len, access, true)
    }

    fn alloc_as(
        &mut self,
        len: usize,
        access: Access,
        peers_may_write: bool,
    ) -> Result<SharedRegion, RegisterError> {
        self.here()?;
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let options = AllocOptions { peers_may_write, populate: false, huge_pages: true };
        let memory = SharedMemory::new(len, options).map_err(RegisterError::alloc)?;
        self.register_shared(memory, access)
    }

    pub(crate) fn register_shared(
        &mut self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<SharedRegion, RegisterError> {
        let id = self.reserve_region()?;
        #[allow(unsafe_code, reason = "registers memory whose promise this crate keeps")]
        // SAFETY: the region's row keeps `memory` mapped until it is unregistered, and no reference to its
        // bytes is ever made (see `SharedMemory`).
        unsafe {
            self.register_as(id, memory.span(), access, false, Some(memory.clone()))?;
        }
        Ok(SharedRegion::new(id, memory))
    }
}

/// Registers a region with each rail; with several rails in parallel if more than one pins pages and the
/// region is large.
///
/// # Safety
/// As [`Memory::register`].
#[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
unsafe fn register_each(
    rails: &mut [Box<dyn Transport + Send>],
    results: &mut [Result<(), te_core::Error>],
    id: RegionId,
    span: MemSpan,
    access: Access,
) {
    let some = |rails: &mut [Box<dyn Transport + Send>], results: &mut [Result<(), te_core::Error>]| {
        for (rail, result) in rails.iter_mut().zip(results) {
            // SAFETY: the caller's promise.
            *result = unsafe { rail.register(id, span, access) };
        }
    };
    let pinning = rails.iter().filter(|rail| !rail.capabilities().features.contains(Features::CALLER_DRIVEN));
    if span.len() < PARALLEL_BYTES_MIN || pinning.count() < 2 {
        return some(rails, results);
    }
    let share = rails.len().div_ceil(THREADS_MAX);
    std::thread::scope(|scope| {
        for (rails, results) in rails.chunks_mut(share).zip(results.chunks_mut(share)) {
            // If the system refuses a thread, its rails do not have the region until they rejoin.
            results.fill(Err(te_core::Error::with_code(ErrorKind::System, nix::libc::EAGAIN)));
            let thread = std::thread::Builder::new().name("te-register".into());
            if let Err(error) = thread.spawn_scoped(scope, move || some(rails, results)) {
                log::warn!(
                    "registering a region of {} bytes: the system refused a thread: {error}",
                    span.len()
                );
            }
        }
    });
}
