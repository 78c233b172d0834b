//! [`Descriptor`]: what an engine sends to its peers about the memory that it exports.

use std::collections::BTreeMap;
use std::string::String;
use std::sync::{Mutex, PoisonError};
use std::vec::Vec;

use serde::{Deserialize, Serialize};
use te_core::{Access, Location};

/// The memory that one engine exports, as a peer may use it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// The name of the owner: `host:port` of its control port.
    pub name: String,
    /// The incarnation of the owner.
    pub incarnation: u64,
    /// Grows with each change of `regions`.
    pub version: u64,
    /// The exported regions, in the order of their addresses.
    pub regions: Vec<RegionDescriptor>,
}

/// One exported region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionDescriptor {
    /// The owner's id of the region.
    pub region: u64,
    /// First byte, in the owner's address space.
    pub addr: u64,
    /// Length, bytes.
    pub len: u64,
    /// Bits of [`Access`]; remote rights only.
    pub access: u8,
    /// Where the memory is, as the text of a [`Location`]: `*`, `cpu:0`, `cuda:3`.
    pub location: String,
    /// The export of the region, as `MultiTransport` writes it.
    pub export: Vec<u8>,
}

/// Maximum length of the export of a region, bytes.
pub(crate) const EXPORT_BYTES_MAX: usize = 16 << 10;
/// Maximum length of the text of a location, bytes.
const LOCATION_BYTES_MAX: usize = 64;

impl Descriptor {
    /// Parses bytes that a peer sent.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let (this, rest) =
            postcard::take_from_bytes::<Self>(bytes).map_err(|_| "its descriptor does not parse")?;
        if rest.is_empty() { this.checked() } else { Err("bytes follow its descriptor") }
    }

    /// The descriptor of a foreign segment, for [`Metadata::describe`](crate::Metadata::describe), with its
    /// regions in any order. `incarnation` is a number for one life of the owner. A refresh of the segment
    /// always applies it.
    ///
    /// # Errors
    /// What is wrong with the regions: some overlap, or reach past the last address.
    pub fn new(
        name: impl Into<String>,
        incarnation: u64,
        regions: Vec<RegionDescriptor>,
    ) -> Result<Self, &'static str> {
        Self { name: name.into(), incarnation, version: 0, regions }.checked()
    }

    /// Sorts the regions, and checks each of them and that they do not overlap.
    fn checked(mut self) -> Result<Self, &'static str> {
        let this = &mut self;
        this.regions.sort_unstable_by_key(|region| region.addr);
        let mut end = 0;
        for region in &this.regions {
            let too_long =
                region.export.len() > EXPORT_BYTES_MAX || region.location.len() > LOCATION_BYTES_MAX;
            if region.len == 0 || too_long {
                return Err("its descriptor lists an impossible region");
            }
            if region.addr < end {
                return Err("its descriptor lists regions that overlap");
            }
            end = region
                .addr
                .checked_add(region.len)
                .ok_or("its descriptor lists a region past the last address")?;
            let access = Access::from_bits(region.access);
            if access.is_none_or(|access| !access.is_remote() || access.intersects(Access::LOCAL)) {
                return Err("its descriptor lists rights that do not exist");
            }
        }
        Ok(self)
    }

    /// The bytes that [`parse`](Self::parse) accepts.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serialising this type into memory cannot fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }
}

impl RegionDescriptor {
    /// A region of a foreign segment: `len` bytes at `addr` in its owner's address space, with the remote
    /// rights of `access`. `exports` has the export of each rail that reaches it, under the name of the
    /// rail's transport; the rail gets it as [`Memory::attach`](te_core::Memory::attach) does.
    ///
    /// # Errors
    /// The region is empty, has no remote right, or no exports; or these are longer than 16 KiB together.
    pub fn new(addr: u64, len: u64, access: Access, exports: &[(&str, &[u8])]) -> Result<Self, &'static str> {
        let access = access.intersection(Access::REMOTE_READ | Access::REMOTE_WRITE);
        if len == 0 || access.is_empty() || exports.is_empty() {
            return Err("a region needs at least one byte, one remote right and one export");
        }
        let export = te_core::joined_exports(exports).filter(|export| export.len() <= EXPORT_BYTES_MAX);
        let export =
            export.ok_or("the exports of a region are longer than 16 KiB, or have too long names")?;
        Ok(Self { region: addr, addr, len, access: access.bits(), location: "*".into(), export })
    }

    pub(crate) fn access(&self) -> Access {
        Access::from_bits_truncate(self.access)
    }

    /// A location that this build does not know counts as host memory of an unknown node: it matters only for
    /// the choice of a rail.
    pub(crate) fn location(&self) -> Location {
        self.location.parse().unwrap_or_default()
    }
}

/// The descriptor of this engine, which the engine changes and the control port serves.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) name: String,
    pub(crate) incarnation: u64,
    regions: Mutex<(u64, BTreeMap<u64, RegionDescriptor>)>,
}

impl Published {
    pub(crate) fn new(name: String, incarnation: u64) -> Self {
        Self { name, incarnation, regions: Mutex::default() }
    }

    /// Lists regions, in one step for peers.
    pub(crate) fn insert(&self, new: impl IntoIterator<Item = RegionDescriptor>) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        for region in new {
            regions.0 += 1;
            regions.1.insert(region.addr, region);
        }
    }

    /// Lists the regions at these addresses no more, in one step for peers.
    pub(crate) fn remove(&self, addrs: &[u64]) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        for addr in addrs {
            regions.0 += u64::from(regions.1.remove(addr).is_some());
        }
    }

    pub(crate) fn descriptor(&self) -> Descriptor {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        Descriptor {
            name: self.name.clone(),
            incarnation: self.incarnation,
            version: regions.0,
            regions: regions.1.values().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region(addr: u64, len: u64, access: Access) -> RegionDescriptor {
        RegionDescriptor {
            region: 0,
            addr,
            len,
            access: access.bits(),
            location: "cpu:1".into(),
            export: vec![1, 2, 3],
        }
    }

    #[test]
    fn a_descriptor_survives_the_wire() {
        let published = Published::new("node-7:1234".into(), 9);
        published.insert([
            region(0x2000, 0x1000, Access::REMOTE_READ),
            region(0x1000, 0x1000, Access::REMOTE_WRITE),
        ]);
        let sent = published.descriptor();
        assert_eq!((sent.version, sent.regions[0].addr), (2, 0x1000));
        assert_eq!(Descriptor::parse(&sent.to_bytes()), Ok(sent));
        published.remove(&[0x2000, 0x9000]);
        assert_eq!((published.descriptor().version, published.descriptor().regions.len()), (3, 1));
    }

    #[test]
    fn a_location_is_sent_along_and_an_unknown_one_counts_as_host_memory() {
        let at = |location: &str| RegionDescriptor {
            location: location.into(),
            ..region(0, 1, Access::REMOTE_READ)
        };
        assert_eq!(at("cpu:1").location(), Location::Numa(1));
        assert_eq!(at("cuda:3").location(), Location::Device(te_core::GpuVendor::Nvidia, 3));
        assert_eq!(at("tpu:0").location(), Location::Host);
    }

    #[test]
    fn impossible_descriptors_are_refused() {
        let bytes =
            |regions: Vec<RegionDescriptor>| Descriptor { regions, ..Descriptor::default() }.to_bytes();
        let read = Access::REMOTE_READ;
        for bad in [
            bytes(vec![region(0x1000, 0, read)]),
            bytes(vec![region(u64::MAX, 2, read)]),
            bytes(vec![region(0x1000, 0x1001, read), region(0x2000, 1, read)]),
            bytes(vec![region(0x1000, 1, Access::LOCAL)]),
            bytes(vec![region(0x1000, 1, read | Access::LOCAL_WRITE)]),
            bytes(vec![RegionDescriptor { access: 0x80, ..region(0x1000, 1, read) }]),
            bytes(vec![RegionDescriptor { location: "c".repeat(65), ..region(0x1000, 1, read) }]),
        ] {
            assert!(Descriptor::parse(&bad).is_err());
        }
    }

    #[test]
    fn a_foreign_descriptor_is_sorted_and_checked_like_one_that_a_peer_sent() {
        let at = |addr, len| {
            RegionDescriptor::new(addr, len, Access::all(), &[("mooncake", b"export".as_slice())]).unwrap()
        };
        let new = |regions| Descriptor::new("other:1", 7, regions);
        let both_rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let both = new(vec![at(0x2000, 0x1000), at(0x1000, 0x1000)]).unwrap();
        assert_eq!((both.regions[0].addr, both.regions[0].access()), (0x1000, both_rights));
        assert_eq!(Descriptor::parse(&both.to_bytes()), Ok(both));
        assert!(new(vec![at(0x1000, 0x1001), at(0x2000, 1)]).is_err(), "they overlap");
        assert!(new(vec![at(u64::MAX, 2)]).is_err(), "it reaches past the last address");
        let region = |len, access, exports: &[(&str, &[u8])]| RegionDescriptor::new(1, len, access, exports);
        assert!(region(0, Access::all(), &[("a", b"")]).is_err());
        assert!(region(1, Access::LOCAL, &[("a", b"")]).is_err());
        assert!(region(1, Access::all(), &[]).is_err());
        assert!(region(1, Access::all(), &[("a", &[0; EXPORT_BYTES_MAX])]).is_err());
        assert!(region(1, Access::all(), &[(&"a".repeat(256), b"")]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_descriptor_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = Descriptor::parse(&bytes);
        }
    }
}
