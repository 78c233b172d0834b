//! Registered memory: the regions that our own slices use and that peers reach, and the device's keys for
//! them.

use std::collections::{HashSet, VecDeque};

use te_core::{Access, Error, ErrorKind, Location, RegionId, Slice};
use te_fabric::net::random_u64;

use crate::config::Config;
use crate::sys::registration;
use crate::sys::verbs::{MrAccess, Registration, Verbs};
use crate::wire::Chunking;

/// Registering again, to be rid of a key that peers may remember.
const KEY_ATTEMPTS_MAX: usize = 8;

/// The part of a region that is te-rdma's own.
#[derive(Debug)]
pub(crate) struct RegionExt {
    pub(crate) chunking: Chunking,
    pub(crate) chunks: Vec<Registration>,
    /// Memory of this process. Another device's the CPU cannot read.
    pub(crate) mapped: bool,
    /// Some peer has got its remote keys.
    pub(crate) shown: bool,
}

pub(crate) type Region = te_fabric::Region<RegionExt>;
type Regions = te_fabric::Regions<RegionExt>;

/// Memory of another device; see [`RdmaTransport::register_dmabuf`](crate::RdmaTransport::register_dmabuf).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dmabuf {
    /// The dma-buf's descriptor. May be closed when the call has returned.
    pub fd: i32,
    /// First byte, from the buffer's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What peers and work requests call the first byte.
    pub address: u64,
    /// Where the memory is; the export says so to peers.
    pub location: Location,
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

    /// Registers a region whose chunks `register` makes known to the device, all or none. It is called again
    /// when the device gave a key that peers may remember.
    ///
    /// # Errors
    /// What `register` returned, and `Full` when the device has no other key to give. Nothing is left behind,
    /// so the same call may be made again.
    pub(crate) fn register<V: Verbs>(
        &mut self,
        verbs: &V,
        (id, chunking, access, location): (RegionId, Chunking, Access, Location),
        register: impl Fn() -> Result<Vec<Registration>, Error>,
    ) -> Result<(), Error> {
        self.regions.vacant(id.index)?;
        let mut chunks = register()?;
        for _ in 0..KEY_ATTEMPTS_MAX {
            if !self.has_stale_key(&chunks, access) {
                break;
            }
            // The old ones go after the new ones have come, so that these get other keys.
            let other = register();
            undo(verbs, chunks);
            chunks = other?;
        }
        if self.has_stale_key(&chunks, access) {
            undo(verbs, chunks);
            return Err(ErrorKind::Full.into());
        }
        self.adopt(verbs, (id, chunking, access, location), chunks, true)
    }

    /// Registers memory of another device.
    ///
    /// # Errors
    /// The provider's; `Unsupported` when the device cannot.
    pub(crate) fn register_dmabuf<V: Verbs>(
        &mut self,
        verbs: &V,
        (id, chunking, access, location): (RegionId, Chunking, Access, Location),
        dmabuf: Dmabuf,
        mr_access: MrAccess,
    ) -> Result<(), Error> {
        self.regions.vacant(id.index)?;
        let Dmabuf { fd, offset, address, .. } = dmabuf;
        let mut chunks = Vec::new();
        for index in 0..chunking.count() {
            let (at, bytes) = chunking.chunk(index);
            match verbs.register_dmabuf(fd, offset + at, bytes, address + at, mr_access) {
                Ok(registration) => chunks.push(registration),
                Err(error) => {
                    undo(verbs, chunks);
                    return Err(error);
                }
            }
        }
        self.adopt(verbs, (id, chunking, access, location), chunks, false)
    }

    /// Deregisters a region. True: peers have got its keys.
    ///
    /// # Errors
    /// `NotFound`, `Stale`. `Busy`: slices use it. The provider's: the device has not let go of all of it,
    /// and the call is to be made again.
    pub(crate) fn deregister<V: Verbs>(&mut self, verbs: &V, id: RegionId) -> Result<bool, Error> {
        if self.regions.find(id)?.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        let Some(region) = self.regions.get_mut(id.index) else { return Err(ErrorKind::NotFound.into()) };
        region.closing = true;
        while let Some(&chunk) = region.ext.chunks.last() {
            // The device ends a peer's access before it says so. What it does not let go of stays ours; call
            // again.
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

    /// Lets go of every region, for good.
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

    /// Checks what a slice wants of its region, and keeps the region registered until [`Self::unpin`].
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `AccessDenied`, `OutOfRange`.
    #[inline]
    pub(crate) fn check(&self, slice: &Slice) -> Result<(), Error> {
        self.regions.check_local(slice).map(|_| ())
    }

    /// A slice uses the region from now on.
    #[inline]
    pub(crate) fn pin(&mut self, index: u32) {
        self.regions.pin(index);
    }

    /// A slice no longer uses the region.
    #[inline]
    pub(crate) fn unpin(&mut self, index: u32) {
        self.regions.unpin(index);
    }

    /// The region that a peer with this key may use. It is about to see the device's keys.
    ///
    /// # Errors
    /// As `te_fabric`'s `granted`: `NotFound`, `Stale`, `AccessDenied`.
    pub(crate) fn granted(&mut self, id: RegionId, key: u64) -> Result<&mut Region, ErrorKind> {
        self.regions.granted(id, key)
    }

    fn has_stale_key(&self, chunks: &[Registration], access: Access) -> bool {
        access.is_remote() && chunks.iter().any(|chunk| self.stale_keys.contains(chunk.remote_key))
    }

    /// Keeps a region that the device has.
    fn adopt<V: Verbs>(
        &mut self,
        verbs: &V,
        (id, chunking, access, location): (RegionId, Chunking, Access, Location),
        chunks: Vec<Registration>,
        mapped: bool,
    ) -> Result<(), Error> {
        let Ok(key) = random_u64() else {
            undo(verbs, chunks);
            return Err(ErrorKind::System.into());
        };
        self.registered_bytes += chunking.len;
        let ext = RegionExt { chunking, chunks, mapped, shown: false };
        self.regions.insert(id.index, Region::new(id, chunking.len, location, access, key, ext))
    }
}

/// What the device is to allow for a region with these rights.
pub(crate) fn mr_access(access: Access, config: &Config) -> MrAccess {
    registration::mr_access(access, config.relaxed_ordering)
}

/// How a region is cut into registrations.
///
/// # Errors
/// `InvalidArgument`: no rights, no bytes, or a range that wraps.
pub(crate) fn chunking(address: u64, len: u64, access: Access, config: &Config) -> Result<Chunking, Error> {
    if access.is_empty() {
        return Err(ErrorKind::InvalidArgument.into());
    }
    let chunk = config.registration_chunk_bytes;
    Chunking::new(address, len, chunk).ok_or_else(|| ErrorKind::InvalidArgument.into())
}

fn undo<V: Verbs>(verbs: &V, chunks: Vec<Registration>) {
    for chunk in chunks {
        if let Err(error) = verbs.deregister(chunk) {
            log::error!("a chunk of a failed registration could not be undone: {error}");
        }
    }
}

/// Remote keys that peers may still hold though their regions are gone. A device gives its 32-bit keys out
/// again, and a peer with an old one would reach the new region (L6): such a key is not used while it is
/// remembered.
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

    /// One region of `len` bytes at address 0x1_0000 that no device knows, in chunks of 4 KiB, with local key
    /// 7.
    pub(crate) fn memory(id: RegionId, len: u64) -> LocalMemory {
        let mut memory = LocalMemory::new(8);
        let chunking = Chunking::new(0x1_0000, len, 4_096).expect("a region");
        let chunk = Registration { handle: 1, local_key: 7, remote_key: 8 };
        let chunks = vec![chunk; chunking.count() as usize];
        let ext = RegionExt { chunking, chunks, mapped: true, shown: false };
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

        /// Chunks that no device knows, one key after the other.
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
            assert_eq!(memory.register(&verbs, what, || keys(&next)), Ok(()));
            let region = memory.find(ID).expect("registered");
            assert_eq!(region.ext.chunks[0].remote_key, KEY_ATTEMPTS_MAX as u32);
            assert_eq!(memory.registered_bytes(), 100);
            let busy = memory.register(&verbs, what, || keys(&next));
            assert_eq!(busy.map_err(|error| error.kind), Err(ErrorKind::Busy));
        }

        #[test]
        fn a_refused_registration_may_be_tried_again() {
            let verbs = SimFabric::new(1, SimConfig::IMMEDIATE).device(DeviceConfig::default());
            let chunking = Chunking::new(0x1000, 100, 4_096).expect("a region");
            let mut memory = LocalMemory::new(4);
            let refused = Error::with_code(ErrorKind::System, libc::ENOMEM);
            let what = (ID, chunking, RIGHTS, Location::Host);
            assert_eq!(memory.register(&verbs, what, || Err(refused)), Err(refused));
            assert_eq!((memory.registered_bytes(), memory.get(ID.index).is_none()), (0, true));
            let next = Cell::new(1);
            assert_eq!(memory.register(&verbs, what, || keys(&next)), Ok(()));
        }
    }
}
