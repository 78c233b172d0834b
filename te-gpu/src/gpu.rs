//! The devices of one vendor: what fabrics ask of them.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use te_core::device::{Allocation, Devices, DmaBuf, Stager};
use te_core::{Error, ErrorKind, Location, MemSpan, MemoryKinds};

use crate::affinity;
use crate::calibrate::calibrate;
use crate::config::{Config, SettingError};
use crate::plan::Plan;
use crate::sys::abi::{Api, DevicePtr};
use crate::sys::device::Device;
use crate::sys::load::Driver;
use crate::sys::order::GatePage;
use crate::sys::pointer::{self, Found};
use crate::sys::share;
use crate::sys::stager::{GpuStager, Scratch};
use crate::{
    CopyQueue, DeviceBuffer, DeviceInfo, Gate, HostPin, Imported, NoGpu, NotImported, NotShared, Place,
    SharedPart,
};

/// Mappings of a span that is shared; a span of more is refused.
pub(crate) const PARTS_MAX: usize = 4_096;

/// The devices of one vendor, as this process sees them. Clones share everything.
///
/// The driver is loaded and started at the first need: for a stager, an allocation, the list of devices, or
/// when an address is asked for in a process that has mapped the driver's library and started the driver. A
/// process that only moves host memory never loads it.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    api: Api,
    config: Config,
    kinds: MemoryKinds,
    loaded: OnceLock<Result<Vec<Entry>, NoGpu>>,
    /// Counts questions about addresses that were not answered by "host memory": they come with each
    /// registration of device memory.
    registrations: Arc<AtomicU64>,
    /// Host memory that is page-locked for devices.
    pins: Mutex<Vec<Weak<HostPin>>>,
}

/// A device, and what is found out about it once.
struct Entry {
    device: Arc<Device>,
    plan: OnceLock<Plan>,
    gates: Mutex<Option<Arc<GatePage>>>,
}

/// One allocation of device memory, at one time. [`Gpu::recheck`] tells whether it is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where it is.
    pub location: Location,
    /// The address of its first byte.
    pub base: usize,
    /// Its length, bytes.
    pub bytes: usize,
    /// Whether the older IPC interface can share it. It shares whole allocations.
    pub is_legacy_ipc: bool,
    /// Whether it can be exported as a file descriptor. HIP does not say: false.
    pub is_posix_fd: bool,
    /// Whether it can be exported by a fabric handle.
    pub is_fabric: bool,
    /// Whether the driver says that NICs can reach it.
    pub is_gpu_direct: bool,
    /// Whether it belongs to the context that this crate uses, or to none: kernels of that context reach it.
    pub is_own_context: bool,
    ids: (u64, u64),
}

impl Gpu {
    /// NVIDIA's devices, by the CUDA driver. Nothing is loaded yet.
    ///
    /// # Errors
    /// A setting that is outside its limits.
    #[cfg(feature = "cuda")]
    pub fn cuda(config: Config) -> Result<Self, SettingError> {
        Self::new(Api::Cuda, config)
    }

    /// AMD's devices, by HIP. Nothing is loaded yet.
    ///
    /// # Errors
    /// A setting that is outside its limits.
    #[cfg(feature = "hip")]
    pub fn hip(config: Config) -> Result<Self, SettingError> {
        Self::new(Api::Hip, config)
    }

    #[allow(dead_code, reason = "used with a feature")]
    fn new(api: Api, config: Config) -> Result<Self, SettingError> {
        config.validate()?;
        let vendor = api.vendor();
        let is_there = library(api, &config).is_some() || affinity::has_driver(&config.dev, vendor);
        let kinds = if is_there { vendor.kind() } else { MemoryKinds::empty() };
        let (loaded, registrations, pins) = (OnceLock::new(), Arc::default(), Mutex::default());
        Ok(Self { inner: Arc::new(Inner { api, config, kinds, loaded, registrations, pins }) })
    }

    /// What the devices are. Loads the driver.
    ///
    /// # Errors
    /// Why there is none.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, NoGpu> {
        Ok(self.entries()?.iter().map(|entry| entry.device.info.clone()).collect())
    }

    /// The version of the driver's interface: 13000 is 13.0. Loads the driver.
    ///
    /// # Errors
    /// Why there is none.
    pub fn driver_version(&self) -> Result<i32, NoGpu> {
        Ok(self.entries()?.first().map_or(0, |entry| entry.device.driver.version))
    }

    /// Whether the driver was loaded by this value or one of its clones.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.inner.loaded.get().is_some()
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// The allocation that a span lies in; the first one for memory that was mapped piece by piece.
    ///
    /// # Errors
    /// `NotFound` when it is not device memory (managed memory counts as host memory), `OutOfRange` when it
    /// leaves the allocation, `System`.
    pub fn examine(&self, span: MemSpan) -> Result<Block, Error> {
        let (device, found) = self.find(span)?;
        Ok(block(&device, &found))
    }

    /// Checks that the memory of `block` is still the same allocation. It does not allocate.
    ///
    /// # Errors
    /// `Stale` when it was freed and something else was allocated there, `NotFound` when it was freed,
    /// `System`.
    pub fn recheck(&self, block: &Block) -> Result<(), Error> {
        let base = std::ptr::without_provenance_mut(block.base);
        let now = self.look(MemSpan::new(base, 1)).map(|(device, found)| self::block(&device, &found));
        match now {
            Ok(now) if now.ids == block.ids && now.base == block.base && now.bytes == block.bytes => Ok(()),
            Ok(_) => Err(ErrorKind::Stale.into()),
            Err(error) => Err(error),
        }
    }

    /// The span as dma-bufs: one for most memory, one per mapping for memory that was mapped piece by piece.
    ///
    /// # Errors
    /// As [`examine`](Self::examine); `Unsupported` when the device or the driver exports none.
    pub fn dmabufs(&self, span: MemSpan) -> Result<Vec<DmaBuf>, Error> {
        let (device, _) = self.find(span)?;
        let (at, mut mappings) = (address(span), Vec::new());
        pointer::walk(&device.driver, at, span.len(), |found| mappings.push(found))?;
        let mut done = 0;
        let mut parts = Vec::with_capacity(mappings.len());
        for found in mappings {
            let from = at + done;
            let in_mapping = found.mapping + found.mapping_bytes as u64 - from;
            let len = in_mapping.min(span.len() as u64 - done);
            let (fd, offset) = share::dmabuf(&device, &found, from)?;
            parts.push(DmaBuf { fd, offset, span: span.part(done, len)?.at(device.info.location) });
            done += len;
        }
        Ok(parts)
    }

    /// Handles by which another process of the host maps the span: one for most memory, one per mapping for
    /// memory that was mapped piece by piece.
    ///
    /// # Errors
    /// The reason why it cannot be shared.
    pub fn share(&self, span: MemSpan) -> Result<Vec<SharedPart>, NotShared> {
        self.share_by(span, share::part)
    }

    /// Fabric handles by which processes of all hosts of the NVLink domain map the span, one per mapping.
    ///
    /// # Errors
    /// The reason why it cannot be shared with other hosts.
    pub fn share_across_hosts(&self, span: MemSpan) -> Result<Vec<SharedPart>, NotShared> {
        self.share_by(span, share::fabric_part)
    }

    fn share_by(
        &self,
        span: MemSpan,
        part: fn(&Device, &Found, DevicePtr, u64) -> Result<SharedPart, NotShared>,
    ) -> Result<Vec<SharedPart>, NotShared> {
        let (device, _) = self.find(span).map_err(NotShared::NotDeviceMemory)?;
        let (at, mut mappings) = (address(span), Vec::new());
        pointer::walk(&device.driver, at, span.len(), |found| mappings.push(found))
            .map_err(NotShared::NotDeviceMemory)?;
        if mappings.len() > PARTS_MAX {
            return Err(NotShared::TooManyParts { max: PARTS_MAX });
        }
        let (mut from, mut left, mut parts) = (at, span.len() as u64, Vec::with_capacity(mappings.len()));
        for found in mappings {
            let len = (found.mapping + found.mapping_bytes as u64 - from).min(left);
            parts.push(part(&device, &found, from, len)?);
            (from, left) = (from + len, left - len);
        }
        Ok(parts)
    }

    /// Maps memory of another process so that the device at `location` can copy to and from it, and only from
    /// it unless it is `writable`. The parts are those that the other process got from
    /// [`share`](Self::share).
    ///
    /// # Errors
    /// `InvalidArgument` for parts that do not fit together, `OutOfRange` for an allocation that is shorter
    /// than they say, `Unsupported`, `System`; each with the word whether some of it stays mapped.
    pub fn import(
        &self,
        location: Location,
        parts: &[SharedPart],
        writable: bool,
    ) -> Result<Imported, NotImported> {
        Imported::new(&self.device(location)?, parts, writable)
    }

    /// Whether the device at `from` can reach memory of the device at `to`.
    #[must_use]
    pub fn reaches(&self, from: Location, to: Location) -> bool {
        let (Ok(here), Ok(there)) = (self.device(from), self.device(to)) else { return false };
        from == to || here.can_access(&there)
    }

    /// A queue of copies that the device at `location` carries out.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or for HIP; `System`.
    pub fn copy_queue(&self, location: Location) -> Result<CopyQueue, Error> {
        CopyQueue::new(&self.device(location)?, &self.inner.config)
    }

    /// Where a byte of device memory of this process is, for [`CopyQueue`].
    #[must_use]
    pub fn place(&self, span: MemSpan) -> Place {
        Place { at: address(span), by_kernel: address(span) }
    }

    /// The locks of host memory that are known.
    pub(crate) fn pins(&self) -> MutexGuard<'_, Vec<Weak<HostPin>>> {
        self.inner.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that tells drivers apart within one process: memory of one is not memory of another. Loads
    /// the driver; 0 when there is none.
    #[must_use]
    pub fn driver_id(&self) -> u64 {
        let Ok([entry, ..]) = self.entries() else { return 0 };
        entry.device.driver.init as usize as u64
    }

    /// After a NIC wrote to memory of the device: makes the bytes visible to work that is submitted from now
    /// on. The owner of the memory calls it; on most devices there is nothing to do.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or it cannot; `System`.
    pub fn flush_writes(&self, location: Location) -> Result<(), Error> {
        share::flush_writes(&*self.device(location)?)
    }

    /// New memory of a device.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, `Full` when it has no memory, `System`.
    pub fn allocate(&self, location: Location, bytes: usize) -> Result<DeviceBuffer, Error> {
        DeviceBuffer::new(&self.device(location)?, bytes)
    }

    /// Which copy paths the device has, and which one is used when. `None` before the first stager.
    #[must_use]
    pub fn plan(&self, location: Location) -> Option<Plan> {
        self.entry(location).ok()?.plan.get().copied()
    }

    /// A gate, by which a caller's stream waits for a transfer: "*ready on* this stream".
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or its streams cannot wait for words; `Full` when there
    /// are 1,024 gates; `System`.
    pub fn gate(&self, location: Location) -> Result<Gate, Error> {
        let entry = self.entry(location)?;
        let mut page = entry.gates.lock().unwrap_or_else(PoisonError::into_inner);
        let page = match &*page {
            Some(page) => page,
            None => page.insert(Arc::new(GatePage::new(&entry.device)?)),
        };
        Gate::new(Arc::clone(page))
    }

    /// Stagers whose slots are never used again, because hops did not end in time or the device failed.
    #[must_use]
    pub fn stagers_quarantined(&self) -> u64 {
        let Some(Ok(entries)) = self.inner.loaded.get() else { return 0 };
        entries.iter().map(|entry| entry.device.quarantined.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn device(&self, location: Location) -> Result<Arc<Device>, Error> {
        Ok(Arc::clone(&self.entry(location)?.device))
    }

    fn entry(&self, location: Location) -> Result<&Entry, Error> {
        if location.kind() != self.inner.api.vendor().kind() {
            return Err(ErrorKind::Unsupported.into());
        }
        let entries = self.entries().map_err(|_| ErrorKind::Unsupported)?;
        let entry = entries.iter().find(|entry| entry.device.info.location == location);
        entry.ok_or(ErrorKind::Unsupported.into())
    }

    /// Loads the driver at the first call, which logs the reason if it fails.
    fn entries(&self) -> Result<&[Entry], NoGpu> {
        let Inner { api, config, loaded, .. } = &*self.inner;
        let loaded = loaded.get_or_init(|| {
            let listed = Driver::load(*api, library(*api, config))
                .and_then(|(driver, count)| Device::list(driver, count, &config.sysfs));
            if let Err(reason) = &listed {
                log::info!("{reason}");
            }
            let entry = |device| Entry { device, plan: OnceLock::new(), gates: Mutex::new(None) };
            Ok(listed?.into_iter().map(entry).collect())
        });
        loaded.as_deref().map_err(Clone::clone)
    }

    pub(crate) fn open_stager(&self, location: Location) -> Result<GpuStager, Error> {
        let entry = self.entry(location)?;
        let registrations = Arc::clone(&self.inner.registrations);
        let mut stager = GpuStager::new(&entry.device, &self.inner.config, registrations)?;
        let plan = self.plan_with(entry, &mut stager);
        if !stager.is_idle() {
            return Err(ErrorKind::TimedOut.into());
        }
        stager.set_plan(plan);
        Ok(stager)
    }

    /// Counts the questions about device memory that come with registrations. While it stays the same, no
    /// memory that was examined before it was read can have been replaced by other registered memory.
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.inner.registrations.load(Ordering::Relaxed)
    }

    /// The device of a span that is about to be registered.
    fn find(&self, span: MemSpan) -> Result<(Arc<Device>, Found), Error> {
        let found = self.look(span);
        // What stagers remember is of no interest to registrations of host memory.
        if !matches!(&found, Err(error) if error.kind == ErrorKind::NotFound) {
            self.inner.registrations.fetch_add(1, Ordering::Relaxed);
        }
        found
    }

    /// The device of a span.
    fn look(&self, span: MemSpan) -> Result<(Arc<Device>, Found), Error> {
        let Inner { api, config, loaded, .. } = &*self.inner;
        // A caller that allocated device memory has mapped the library and started the driver.
        if loaded.get().is_none() && !Driver::find_started(*api, library(*api, config)) {
            return Err(ErrorKind::NotFound.into());
        }
        let entries = self.entries().map_err(|_| ErrorKind::NotFound)?;
        pointer::device_of(entries.iter().map(|entry| &entry.device), address(span), span.len())
    }

    /// The plan of a device: set, or measured with this stager by the first call.
    fn plan_with(&self, entry: &Entry, stager: &mut GpuStager) -> Plan {
        *entry.plan.get_or_init(|| {
            let Config { paths, calibrate_ms_max, .. } = &self.inner.config;
            let plan = stager.plan();
            if paths.is_some() || *calibrate_ms_max == 0 {
                return plan;
            }
            let (start, limit) = (Instant::now(), Duration::from_millis((*calibrate_ms_max).into()));
            let Ok(scratch) = Scratch::new(&entry.device, stager.ring_bytes()) else { return plan };
            let mut left = || start.elapsed() < limit;
            let table = calibrate(&plan, &mut |path, size| stager.measure(&scratch, path, size), &mut left);
            log::debug!("{}: copy paths\n{table}", entry.device.info.location);
            if !stager.is_idle() {
                // The copies may still use the memory.
                scratch.abandon();
            }
            Plan::new(table, plan.offer())
        })
    }
}

impl Devices for Gpu {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        Some(self.find(MemSpan::new(ptr, len)).ok()?.0.info.location)
    }

    fn allocation(&self, span: MemSpan) -> Result<Allocation, Error> {
        let Block { location, base, bytes, ids: (buffer, block), .. } = self.examine(span)?;
        Ok(Allocation { location, base, bytes, id: [buffer, block] })
    }

    fn kinds(&self) -> MemoryKinds {
        self.inner.kinds
    }

    /// As [`Gpu::dmabufs`]; `Unsupported` for memory of several mappings.
    fn dmabuf(&self, span: MemSpan) -> Result<(OwnedFd, u64), Error> {
        let (device, found) = self.find(span)?;
        let at = address(span);
        if at + span.len() as u64 > found.mapping + found.mapping_bytes as u64 {
            return Err(ErrorKind::Unsupported.into());
        }
        share::dmabuf(&device, &found, at)
    }

    fn dmabufs(&self, span: MemSpan) -> Result<Vec<DmaBuf>, Error> {
        Self::dmabufs(self, span)
    }

    fn is_peer_direct(&self, location: Location) -> bool {
        let vendor = self.inner.api.vendor();
        location.kind() == vendor.kind() && affinity::is_peer_direct(&self.inner.config.sysfs, vendor)
    }

    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error> {
        Ok(Box::new(self.open_stager(location)?))
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.inner.loaded.get().map(|loaded| loaded.as_ref().map_or(0, Vec::len));
        f.debug_struct("Gpu").field("api", &self.inner.api).field("devices", &devices).finish()
    }
}

fn library(api: Api, config: &Config) -> Option<&FilePath> {
    match api {
        Api::Cuda => config.cuda_library.as_deref(),
        Api::Hip => config.hip_library.as_deref(),
    }
}

fn address(span: MemSpan) -> DevicePtr {
    span.as_ptr().addr() as DevicePtr
}

fn block(device: &Device, found: &Found) -> Block {
    use crate::sys::abi::{HANDLE_FABRIC, HANDLE_POSIX_FD};
    Block {
        location: device.info.location,
        base: found.mapping as usize,
        bytes: found.mapping_bytes,
        is_legacy_ipc: found.is_legacy,
        is_posix_fd: found.handle_types & HANDLE_POSIX_FD != 0,
        is_fabric: found.handle_types & HANDLE_FABRIC != 0,
        is_gpu_direct: found.gpu_direct,
        is_own_context: device.is_own_context(found.context),
        ids: found.ids,
    }
}
