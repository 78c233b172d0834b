//! Where a segment's memory is, on the wire.

use core::fmt;

use serde::{Deserialize, Serialize};
use te_core::{GpuVendor, Location};

use crate::ErrorCode;

/// A [`Location`] on the wire. Host memory by default. A location that this release does not know decodes, so
/// that a mount of such memory is refused with an error of its own: `NotSupported`.
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
const UNKNOWN: u8 = u8::MAX;

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

/// As [`Location`]: `*`, `cpu:0`, `cuda:3`; or `unknown`.
impl fmt::Display for MemoryLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Location::try_from(*self) {
            Ok(location) => location.fmt(f),
            Err(_) => f.write_str("unknown"),
        }
    }
}

/// # Errors
/// `NotSupported`: this release does not know memory of this kind.
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
        let unknown: MemoryLocation = postcard::from_bytes(&[6, 0]).unwrap();
        assert_eq!(Location::try_from(unknown), Err(ErrorCode::NotSupported));
        assert_eq!(Location::try_from(MemoryLocation::default()), Ok(Location::Host));
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
        let unknown = MountSegment { location: MemoryLocation { kind: 6, number: 0 }, ..segment };
        assert_eq!(master.mount(Instant::ZERO, &unknown), Err(ErrorCode::NotSupported));
        let mounted = master.mount(Instant::ZERO, &segment).unwrap().mounted().unwrap();
        assert_eq!(master.segment(mounted.segment).unwrap().location, location);
        // The same memory mounted again is the same segment; memory elsewhere is another one.
        assert_eq!(master.mount(Instant::ZERO, &segment).unwrap().mounted(), Ok(mounted));
        let moved = MountSegment { location: Location::Numa(0).into(), ..segment };
        assert_eq!(master.mount(Instant::ZERO, &moved), Err(ErrorCode::SegmentAlreadyExists));
    }
}
