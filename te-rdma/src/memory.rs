//! Registered memory: the regions that our own slices use and that peers reach, and the device's keys for
//! them.

use std::collections::{HashSet, VecDeque};
use std::os::fd::AsFd as _;

use te_core::device::{Devices, DmaBuf};
use te_core::{Access, Error, ErrorKind, GpuVendor, Location, MemSpan, MemoryKinds, RegionId, Slice};
use te_fabric::net::random_u64;

use crate::config::{CHUNKS_MAX, Config};
use crate::sys::registration;
use crate::sys::verbs::{DeviceFeatures, DeviceInfo, MrAccess, Registration, Verbs};
use crate::wire::Chunking;

/// log2 of the length of a page of the host, bytes: what a NIC translates.
const PAGE_SHIFT: u32 = 12;
/// How often a region is registered again to avoid a key that peers may remember.
const KEY_ATTEMPTS_MAX: usize = 8;

/// The part of a region that is specific to te-rdma.
#[derive(Debug)]
pub(crate) struct RegionExt {
    pub(crate) chunking: Chunking,
    /// The registration of each chunk, in the order of addresses.
    pub(crate) chunks: Vec<Registration>,
    /// How the NIC reaches the memory. Descriptors of dma-bufs are closed when the region is dropped.
    pub(crate) backing: Backing,
    /// Some peer has received its remote keys.
    pub(crate) shown: bool,
}

pub(crate) type Region = te_fabric::Region<RegionExt>;
type Regions = te_fabric::Regions<RegionExt>;

/// How the NIC reaches the memory of a region.
#[derive(Debug)]
pub(crate) enum Backing {
    /// Host memory, by its address. The CPU can read it.
    Host,
    /// Memory of a GPU, by its address: a kernel module translates (`nvidia_peermem`, `amdgpu`).
    PeerDirect,
    /// Memory of a GPU, by its dma-bufs, in the order of addresses. They are kept open while the region is
    /// registered.
    Dmabufs(Vec<DmaBuf>),
}

impl Backing {
    /// How a NIC with these `features` reaches `span`. Nothing of the span is touched.
    ///
    /// # Errors
    /// `Unsupported`: the NIC cannot reach it. `InvalidArgument`: the span is not in one allocation of the
    /// device that it names. Those of [`Devices::dmabufs`].
    pub(crate) fn of(
        span: MemSpan,
        devices: Option<&dyn Devices>,
        features: DeviceFeatures,
    ) -> Result<Self, Error> {
        if is_host(span) {
            return Ok(Self::Host);
        }
        let devices = devices.ok_or(ErrorKind::Unsupported)?;
        if devices.locate(span.as_ptr(), span.len()) != Some(span.location()) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if features.contains(DeviceFeatures::DMABUF) {
            match devices.dmabufs(span) {
                Ok(parts) => return Ok(Self::Dmabufs(parts)),
                // The NIC may still reach the memory by its address.
                Err(error) if error.kind == ErrorKind::Unsupported => {}
                Err(error) => return Err(error),
            }
        }
        match devices.is_peer_direct(span.location()) {
            true => Ok(Self::PeerDirect),
            false => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// How the region is divided: no chunk lies in two dma-bufs.
    ///
    /// # Errors
    /// `Unsupported`: dma-bufs meet in the middle of a page. `Full`: more than [`CHUNKS_MAX`] chunks.
    pub(crate) fn divided(&self, chunking: Chunking) -> Result<Chunking, Error> {
        let Self::Dmabufs(parts) = self else { return Ok(chunking) };
        let starts = parts.iter().skip(1).map(|part| part.span.as_ptr().addr().trailing_zeros());
        let shift = starts.fold(chunking.shift, u32::min);
        if shift < PAGE_SHIFT {
            return Err(ErrorKind::Unsupported.into());
        }
        let finer = Chunking { shift, ..chunking };
        if finer.count() > u64::from(CHUNKS_MAX) { Err(ErrorKind::Full.into()) } else { Ok(finer) }
    }

    /// Whether the CPU can read the memory, so that its bytes can be carried in a work request.
    #[inline]
    pub(crate) const fn is_cpu_readable(&self) -> bool {
        matches!(self, Self::Host)
    }
}

/// The kinds of memory that a transport on this NIC can register: host memory, and that of `devices` which
/// the NIC can reach.
pub(crate) fn kinds(devices: Option<&dyn Devices>, info: &DeviceInfo) -> MemoryKinds {
    let Some(devices) = devices else { return MemoryKinds::HOST };
    let takes_dmabuf = info.features.contains(DeviceFeatures::DMABUF);
    // A kernel module serves all GPUs of a vendor, or none: the first one is checked.
    let reaches = |vendor| takes_dmabuf || devices.is_peer_direct(Location::Device(vendor, 0));
    let vendors = GpuVendor::ALL.into_iter().filter(|vendor| reaches(*vendor));
    let reached = vendors.fold(MemoryKinds::empty(), |kinds, vendor| kinds | vendor.kind());
    MemoryKinds::HOST | (reached & devices.kinds())
}

fn is_host(span: MemSpan) -> bool {
    MemoryKinds::HOST.contains(span.location().kind())
}

/// All regions of one transport.
#[derive(Debug)]
pub(crate) struct LocalMemory {
    regions: Regions,
    stale_keys: StaleKeys,
    registered_bytes: u64,
}

impl LocalMemory {
    pub(crate) fn new(regions_max: u32) -> Self {
        Self { regions: Regions::new(regions_max), stale_keys: StaleKeys::default(), registered_bytes: 0 }
    }

    pub(crate) const fn registered_bytes(&self) -> u64 {
        self.registered_bytes
    }

    /// Adds a region whose chunks `register` registers with the NIC, all or none. `register` is called again
    /// when the NIC gave a key that peers may remember.
    ///
    /// # Errors
    /// `Full`, `Busy`: no region can have this id. What `register` returned, and `Full` when the NIC has no
    /// other key to give. Nothing is left behind, so the same call may be made again.
    pub(crate) fn register<V: Verbs>(
        &mut self,
        verbs: &V,
        (id, chunking, access, location): (RegionId, Chunking, Access, Location),
        backing: Backing,
        register: impl Fn(&Backing) -> Result<Vec<Registration>, Error>,
    ) -> Result<(), Error> {
        self.regions.vacant(id.index)?;
        let mut chunks = register(&backing)?;
        for _ in 0..KEY_ATTEMPTS_MAX {
            if !self.has_stale_key(&chunks, access) {
                break;
            }
            // The old registrations end after the new ones exist, so that these get other keys.
            let other = register(&backing);
            undo(verbs, chunks);
            chunks = other?;
        }
        if self.has_stale_key(&chunks, access) {
            undo(verbs, chunks);
            return Err(ErrorKind::Full.into());
        }
        let Ok(key) = random_u64() else {
            undo(verbs, chunks);
            return Err(ErrorKind::System.into());
        };
        self.registered_bytes += chunking.len;
        let ext = RegionExt { chunking, chunks, backing, shown: false };
        self.regions.insert(id.index, Region::new(id, chunking.len, location, access, key, ext))
    }

    /// Deregisters a region. True: some peer has received its keys.
    ///
    /// # Errors
    /// `NotFound`, `Stale`. `Busy`: slices use it. The provider's: the NIC has not released all of it, and
    /// the call is to be made again.
    pub(crate) fn deregister<V: Verbs>(&mut self, verbs: &V, id: RegionId) -> Result<bool, Error> {
        if self.regions.find(id)?.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        let Some(region) = self.regions.get_mut(id.index) else { return Err(ErrorKind::NotFound.into()) };
        region.closing = true;
        while let Some(&chunk) = region.ext.chunks.last() {
            // When this returns `Ok`, the NIC has ended the access of every peer. A chunk that it does not
            // release stays in the list, for the next call.
            verbs.deregister(chunk)?;
            region.ext.chunks.pop();
            if region.ext.shown {
                self.stale_keys.add(chunk.remote_key);
            }
        }
        let Some(region) = self.regions.remove(id.index) else { return Err(ErrorKind::NotFound.into()) };
        self.registered_bytes -= region.len;
        Ok(region.ext.shown)
    }

    /// Deregisters every region, for good.
    pub(crate) fn deregister_all<V: Verbs>(&mut self, verbs: &V) {
        for index in 0..self.regions.bound() {
            if let Some(region) = self.regions.remove(index) {
                for chunk in region.ext.chunks {
                    let _ = verbs.deregister(chunk);
                }
            }
        }
    }

    /// The region with this id.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub(crate) fn find(&self, id: RegionId) -> Result<&Region, Error> {
        self.regions.find(id)
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&Region> {
        self.regions.get(index)
    }

    /// Checks the local range of a slice: its region, the region's rights, the bounds.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `AccessDenied`, `OutOfRange`.
    #[inline]
    pub(crate) fn check(&self, slice: &Slice) -> Result<(), Error> {
        self.regions.check_local(slice).map(|_| ())
    }

    /// Counts one more slice that uses the region, which stays registered until [`Self::unpin`].
    #[inline]
    pub(crate) fn pin(&mut self, index: u32) {
        self.regions.pin(index);
    }

    /// Counts one slice less that uses the region.
    #[inline]
    pub(crate) fn unpin(&mut self, index: u32) {
        self.regions.unpin(index);
    }

    /// The region that a peer with this key may use.
    ///
    /// # Errors
    /// As `te_fabric`'s `granted`: `NotFound`, `Stale`, `AccessDenied`.
    pub(crate) fn granted(&mut self, id: RegionId, key: u64) -> Result<&mut Region, ErrorKind> {
        self.regions.granted(id, key)
    }

    fn has_stale_key(&self, chunks: &[Registration], access: Access) -> bool {
        access.is_remote() && chunks.iter().any(|chunk| self.stale_keys.contains(chunk.remote_key))
    }
}

/// What the NIC is to allow for a region with these rights.
pub(crate) fn mr_access(access: Access, config: &Config) -> MrAccess {
    registration::mr_access(access, config.relaxed_ordering)
}

/// How a region is divided into registrations.
///
/// # Errors
/// `InvalidArgument`: no rights, no bytes, or a range that wraps around the address space. `Full`: more than
/// [`CHUNKS_MAX`] chunks.
pub(crate) fn chunking(address: u64, len: u64, access: Access, config: &Config) -> Result<Chunking, Error> {
    if access.is_empty() {
        return Err(ErrorKind::InvalidArgument.into());
    }
    let chunk = config.registration_chunk_bytes;
    let chunking = Chunking::new(address, len, chunk).ok_or(ErrorKind::InvalidArgument)?;
    if chunking.count() > u64::from(CHUNKS_MAX) {
        return Err(ErrorKind::Full.into());
    }
    Ok(chunking)
}

/// Registers the chunks of a region by its dma-bufs, all or none. Each chunk lies in one of them
/// ([`Backing::divided`]).
///
/// # Errors
/// `OutOfRange`: the dma-bufs leave a gap. The provider's. Nothing is registered then.
pub(crate) fn register_dmabufs<V: Verbs>(
    verbs: &V,
    parts: &[DmaBuf],
    access: MrAccess,
    chunking: Chunking,
) -> Result<Vec<Registration>, Error> {
    let mut chunks = Vec::new();
    for index in 0..chunking.count() {
        let (at, bytes) = chunking.chunk(index);
        let address = chunking.base + at;
        let part = parts.iter().find_map(|part| {
            let inside = address.checked_sub(part.span.as_ptr().addr() as u64)?;
            part.span.contains(inside, bytes).then(|| (part.fd.as_fd(), part.offset + inside))
        });
        let registered = match part {
            Some((fd, offset)) => verbs.register_dmabuf(fd, offset, bytes, address, access),
            None => Err(ErrorKind::OutOfRange.into()),
        };
        match registered {
            Ok(registration) => chunks.push(registration),
            Err(error) => {
                undo(verbs, chunks);
                return Err(error);
            }
        }
    }
    Ok(chunks)
}

fn undo<V: Verbs>(verbs: &V, chunks: Vec<Registration>) {
    for chunk in chunks {
        if let Err(error) = verbs.deregister(chunk) {
            log::error!("a chunk of a failed registration cannot be deregistered: {error}");
        }
    }
}

/// Remote keys that peers may still hold although their regions are gone. A device gives its 32-bit keys out
/// again, and a peer with an old key would reach the new region (L6): a key in this list is not used.
#[derive(Debug, Default)]
struct StaleKeys {
    order: VecDeque<u32>,
    keys: HashSet<u32>,
}

impl StaleKeys {
    const KEYS_MAX: usize = 65_536;

    fn add(&mut self, key: u32) {
        if self.keys.insert(key) {
            self.order.push_back(key);
            if self.order.len() > Self::KEYS_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.keys.remove(&oldest);
            }
        }
    }

    fn contains(&self, key: u32) -> bool {
        self.keys.contains(&key)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// One region of `len` bytes at address 0x1_0000 that is not registered with any device, in chunks of 4
    /// KiB, with local key 7.
    pub(crate) fn memory(id: RegionId, len: u64) -> LocalMemory {
        let mut memory = LocalMemory::new(8);
        let chunking = Chunking::new(0x1_0000, len, 4_096).expect("a region");
        let chunk = Registration { handle: 1, local_key: 7, remote_key: 8 };
        let chunks = vec![chunk; chunking.count() as usize];
        let ext = RegionExt { chunking, chunks, backing: Backing::Host, shown: false };
        let region = Region::new(id, len, Location::Host, Access::all(), 99, ext);
        memory.regions.insert(id.index, region).expect("an empty table");
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_keys_are_forgotten_oldest_first() {
        let mut stale = StaleKeys::default();
        (0..=StaleKeys::KEYS_MAX as u32).for_each(|key| stale.add(key));
        assert!(!stale.contains(0) && stale.contains(1) && stale.contains(StaleKeys::KEYS_MAX as u32));
    }

    #[cfg(feature = "sim")]
    mod with_a_device {
        use super::*;
        use crate::sim::{DeviceConfig, SimConfig, SimFabric};
        use std::cell::Cell;

        const ID: RegionId = RegionId::new(2, 1);
        const RIGHTS: Access = Access::REMOTE_WRITE;

        /// Chunks that are not registered with any device, with consecutive keys.
        fn keys(next: &Cell<u32>) -> Result<Vec<Registration>, Error> {
            let key = next.get();
            next.set(key + 1);
            Ok(vec![Registration { handle: u64::from(key), local_key: key, remote_key: key }])
        }

        #[test]
        fn a_key_that_peers_may_hold_is_not_given_to_another_region() {
            let verbs = SimFabric::new(1, SimConfig::IMMEDIATE).device(DeviceConfig::default());
            let chunking = Chunking::new(0x1000, 100, 4_096).expect("a region");
            let mut memory = LocalMemory::new(4);
            let what = (ID, chunking, RIGHTS, Location::Host);
            (0..KEY_ATTEMPTS_MAX as u32).for_each(|key| memory.stale_keys.add(key));
            let next = Cell::new(0);
            assert_eq!(memory.register(&verbs, what, Backing::Host, |_| keys(&next)), Ok(()));
            let region = memory.find(ID).expect("registered");
            assert_eq!(region.ext.chunks[0].remote_key, KEY_ATTEMPTS_MAX as u32);
            assert_eq!(memory.registered_bytes(), 100);
            let busy = memory.register(&verbs, what, Backing::Host, |_| keys(&next));
            assert_eq!(busy.map_err(|error| error.kind), Err(ErrorKind::Busy));
        }

        #[test]
        fn a_refused_registration_may_be_tried_again() {
            let verbs = SimFabric::new(1, SimConfig::IMMEDIATE).device(DeviceConfig::default());
            let chunking = Chunking::new(0x1000, 100, 4_096).expect("a region");
            let mut memory = LocalMemory::new(4);
            let refused = Error::with_code(ErrorKind::System, libc::ENOMEM);
            let what = (ID, chunking, RIGHTS, Location::Host);
            assert_eq!(memory.register(&verbs, what, Backing::Host, |_| Err(refused)), Err(refused));
            assert_eq!((memory.registered_bytes(), memory.get(ID.index).is_none()), (0, true));
            let next = Cell::new(1);
            assert_eq!(memory.register(&verbs, what, Backing::Host, |_| keys(&next)), Ok(()));
        }
    }
}
