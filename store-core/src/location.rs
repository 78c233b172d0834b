//! Where a segment is, on the wire.

use core::fmt;

use serde::{Deserialize, Serialize};
use te_core::{GpuVendor, Location};

use crate::ErrorCode;

/// Where a segment is, on the wire: memory at a [`Location`], or [storage](Self::storage). Host memory by
/// default. A location that this release does not know decodes, so that a mount of such a segment is refused
/// with an error of its own: `NotSupported`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MemoryLocation {
    kind: u8,
    number: u16,
}

const HOST: u8 = 0;
const NUMA: u8 = 1;
const CUDA: u8 = 2;
const HIP: u8 = 3;
const XPU: u8 = 4;
const POOL: u8 = 5;
const STORAGE: u8 = 6;
const UNKNOWN: u8 = u8::MAX;

/// The smallest and the largest granule of storage, bytes.
pub const STORAGE_GRANULES: core::ops::RangeInclusive<u32> = 512..=65_536;

impl MemoryLocation {
    /// Storage, which is read and written in multiples of `granule_bytes`, at multiples of it. `None`: that
    /// is no power of two, or not in [`STORAGE_GRANULES`].
    #[must_use]
    pub fn storage(granule_bytes: u32) -> Option<Self> {
        let valid = granule_bytes.is_power_of_two() && STORAGE_GRANULES.contains(&granule_bytes);
        valid.then(|| Self { kind: STORAGE, number: granule_bytes.trailing_zeros() as u16 })
    }

    /// What offsets and lengths of reads and writes are multiples of, bytes: 1 for memory.
    #[must_use]
    pub fn granule_bytes(self) -> u32 {
        match self.kind {
            STORAGE => 1_u32.checked_shl(self.number.into()).unwrap_or(1),
            _ => 1,
        }
    }

    /// Whether it is storage, not memory.
    #[must_use]
    pub const fn is_storage(self) -> bool {
        self.kind == STORAGE
    }

    /// Checks that this release knows it.
    ///
    /// # Errors
    /// `NotSupported`.
    pub(crate) fn check(self) -> Result<(), ErrorCode> {
        match self.kind {
            STORAGE if Self::storage(self.granule_bytes()) == Some(self) => Ok(()),
            STORAGE => Err(ErrorCode::NotSupported),
            _ => Location::try_from(self).map(drop),
        }
    }
}

impl From<Location> for MemoryLocation {
    fn from(location: Location) -> Self {
        let (kind, number) = match location {
            Location::Host => (HOST, 0),
            Location::Numa(number) => (NUMA, number),
            Location::Device(GpuVendor::Nvidia, number) => (CUDA, number),
            Location::Device(GpuVendor::Amd, number) => (HIP, number),
            Location::Device(GpuVendor::Intel, number) => (XPU, number),
            Location::Pool => (POOL, 0),
            _ => (UNKNOWN, 0),
        };
        Self { kind, number }
    }
}

/// As [`Location`]: `*`, `cpu:0`, `cuda:3`; or `storage`, or `unknown`.
impl fmt::Display for MemoryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Location::try_from(*self) {
            Ok(location) => location.fmt(f),
            Err(_) if self.is_storage() => f.write_str("storage"),
            Err(_) => f.write_str("unknown"),
        }
    }
}

/// # Errors
/// `NotSupported`: this release does not know memory of this kind, or it is storage.
impl TryFrom<MemoryLocation> for Location {
    type Error = ErrorCode;

    fn try_from(location: MemoryLocation) -> Result<Self, ErrorCode> {
        let MemoryLocation { kind, number } = location;
        match kind {
            HOST => Ok(Self::Host),
            NUMA => Ok(Self::Numa(number)),
            CUDA => Ok(Self::Device(GpuVendor::Nvidia, number)),
            HIP => Ok(Self::Device(GpuVendor::Amd, number)),
            XPU => Ok(Self::Device(GpuVendor::Intel, number)),
            POOL => Ok(Self::Pool),
            _ => Err(ErrorCode::NotSupported),
        }
    }
}

#[cfg(test)]
mod tests {
    use te_core::Instant;

    use super::*;
    use crate::allocator::{Allocator as _, AllocatorKind};
    use crate::message::MountSegment;
    use crate::{Incarnation, Master, MasterConfig, NodeId};

    #[test]
    fn every_location_survives_the_wire_and_an_unknown_kind_is_refused() {
        let devices = GpuVendor::ALL.map(|vendor| Location::Device(vendor, 7));
        for location in [Location::Host, Location::Numa(3), Location::Pool].into_iter().chain(devices) {
            let bytes = postcard::to_allocvec(&MemoryLocation::from(location)).unwrap();
            let back: MemoryLocation = postcard::from_bytes(&bytes).unwrap();
            assert_eq!(Location::try_from(back), Ok(location));
        }
        let unknown: MemoryLocation = postcard::from_bytes(&[7, 0]).unwrap();
        assert_eq!(Location::try_from(unknown), Err(ErrorCode::NotSupported));
        assert_eq!(Location::try_from(MemoryLocation::default()), Ok(Location::Host));
    }

    #[test]
    fn storage_has_a_granule_and_memory_has_none() {
        let storage = MemoryLocation::storage(4096).unwrap();
        assert_eq!((storage.granule_bytes(), &*storage.to_string()), (4096, "storage"));
        assert_eq!(storage.check(), Ok(()));
        for wrong in [0, 1, 256, 4095, 131_072] {
            assert_eq!(MemoryLocation::storage(wrong), None, "{wrong}");
        }
        for number in [0, 8, 17, 32, 40_000] {
            let odd = MemoryLocation { kind: STORAGE, number };
            assert_eq!(odd.check(), Err(ErrorCode::NotSupported), "{number}");
        }
        let memory = MemoryLocation::from(Location::Numa(12));
        assert_eq!((memory.granule_bytes(), memory.is_storage()), (1, false));
    }

    #[test]
    fn objects_on_storage_begin_and_end_at_granules() {
        for allocator in AllocatorKind::ALL {
            let config = MasterConfig { allocator: *allocator, ..MasterConfig::default() };
            let mut master = Master::new(config).unwrap();
            let segment = MountSegment {
                node: NodeId::new(1),
                incarnation: Incarnation::new(1),
                name: "s",
                endpoint: "h:1",
                base: 1 << 63,
                len: 1 << 20,
                location: MemoryLocation::storage(4096).unwrap(),
                ..MountSegment::default()
            };
            let odd = MountSegment { base: 512, ..segment };
            assert_eq!(master.mount(Instant::ZERO, &odd), Err(ErrorCode::InvalidParams));
            let odd = MountSegment { len: 5_000, ..segment };
            assert_eq!(master.mount(Instant::ZERO, &odd), Err(ErrorCode::InvalidParams));
            let mounted = master.mount(Instant::ZERO, &segment).unwrap().mounted().unwrap();
            assert_eq!(master.segment(mounted.segment).unwrap().location, segment.location);
            assert_eq!(master.mount(Instant::ZERO, &segment).unwrap().mounted(), Ok(mounted));
            let allocator = &mut master.segments.list[0].allocator;
            let mut used = 0;
            for len in [1, 100, 4096, 4097, 70_000] {
                let (_, offset) = allocator.allocate(len, 0).unwrap();
                assert!(offset.is_multiple_of(4096), "{len} at {offset}");
                used += len.next_multiple_of(4096);
                assert_eq!(allocator.used_bytes(), used);
            }
        }
    }

    #[test]
    fn a_segment_keeps_its_location_and_one_of_an_unknown_kind_is_not_mounted() {
        let mut master = Master::new(MasterConfig::default()).unwrap();
        let location = Location::Device(GpuVendor::Nvidia, 3).into();
        let segment = MountSegment {
            node: NodeId::new(1),
            incarnation: Incarnation::new(1),
            name: "s",
            endpoint: "h:1",
            len: 4096,
            location,
            ..MountSegment::default()
        };
        let unknown = MountSegment { location: MemoryLocation { kind: 7, number: 0 }, ..segment };
        assert_eq!(master.mount(Instant::ZERO, &unknown), Err(ErrorCode::NotSupported));
        let mounted = master.mount(Instant::ZERO, &segment).unwrap().mounted().unwrap();
        assert_eq!(master.segment(mounted.segment).unwrap().location, location);
        // The same memory mounted again is the same segment; memory elsewhere is another one.
        assert_eq!(master.mount(Instant::ZERO, &segment).unwrap().mounted(), Ok(mounted));
        let moved = MountSegment { location: Location::Numa(0).into(), ..segment };
        assert_eq!(master.mount(Instant::ZERO, &moved), Err(ErrorCode::SegmentAlreadyExists));
    }
}
