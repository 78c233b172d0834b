//! The names of this fabric: exports, NQNs, hosts and namespaces.

use core::net::{IpAddr, Ipv6Addr};
use core::ops::Range;

use te_core::{Access, Location};
use te_fabric::{EXPORT_ADDRESSES_MAX, Export, ExportFormat};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::{NQN_BYTES_MAX, nqn_of};
use crate::namespace::{Namespace, Superblock};

/// The magic and the version of exports of regions that our target serves. `region` is the namespace,
/// `generation` that of the region.
pub(crate) const EXPORT_FORMAT: ExportFormat = ExportFormat { magic: *b"nvmo", version: 3 };
/// The first bytes of exports of adopted ranges.
const ADOPTED_MAGIC: [u8; 4] = *b"nvmx";
const ADOPTED_VERSION: u16 = 1;
/// The length of the longest export, in bytes.
pub(crate) const EXPORT_BYTES_MAX: usize =
    size_of::<AdoptedHead>() + 16 * EXPORT_ADDRESSES_MAX + NQN_BYTES_MAX;

/// The NQN of the subsystem of one incarnation of our target.
pub(crate) fn target_nqn(incarnation: u64) -> String {
    format!("nqn.2026-11.io.snowskin:te:{incarnation:016x}")
}

/// The NQN of a host with this identity.
pub(crate) fn host_nqn(identity: u64) -> String {
    format!("nqn.2026-11.io.snowskin:host:{identity:016x}")
}

/// The identifier of a host with this identity.
pub(crate) fn host_id(identity: u64) -> [u8; 16] {
    let mut id = *b"\0\0\0\0\0\0\0\0snowskin";
    id[..8].copy_from_slice(&identity.to_le_bytes());
    id
}

/// The NGUID of a namespace of our target.
pub(crate) fn nguid(incarnation: u64, nsid: u32, generation: u32) -> [u8; 16] {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&incarnation.to_be_bytes());
    id[8..12].copy_from_slice(&nsid.to_be_bytes());
    id[12..].copy_from_slice(&generation.to_be_bytes());
    id
}

/// Where a remote region is: what its export says beyond the fields that all fabrics have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The subsystem.
    pub(crate) nqn: String,
    pub(crate) nsid: u32,
    pub(crate) nguid: [u8; 16],
    /// Where the region begins in the namespace, in bytes.
    pub(crate) first: u64,
    /// It is served by our own target: keys, incarnations and resets mean something there.
    pub(crate) ours: bool,
    /// The namespace is reserved for hosts with a registered key.
    pub(crate) reserved: bool,
}

impl Place {
    pub(crate) fn of_ours(export: &Export) -> Self {
        Self {
            nqn: target_nqn(export.incarnation),
            nsid: export.region,
            nguid: nguid(export.incarnation, export.region, export.generation),
            first: 0,
            ours: true,
            reserved: false,
        }
    }
}

/// The first bytes of the export of an adopted range. Addresses follow, 16 bytes each, then the NQN.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct AdoptedHead {
    magic: [u8; 4],
    version: U16,
    rights: u8,
    addresses: u8,
    port: U16,
    nqn_len: u8,
    flags: u8,
    nsid: U32,
    epoch: U32,
    granule: U32,
    incarnation: U64,
    nguid: [u8; 16],
    first: U64,
    bytes: U64,
}

/// FLAGS: the namespace is reserved for hosts with a registered key.
const RESERVED: u8 = 1;

/// What a peer needs to reach an adopted range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdoptedExport {
    pub(crate) nqn: String,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) port: u16,
    pub(crate) access: Access,
    pub(crate) nsid: u32,
    pub(crate) nguid: [u8; 16],
    /// The incarnation of the owner, and the number of times that it has made the range anew.
    pub(crate) incarnation: u64,
    pub(crate) epoch: u32,
    /// The range with its superblock, in bytes.
    pub(crate) first: u64,
    pub(crate) bytes: u64,
    /// The length of the superblock; 0: there is none.
    pub(crate) granule: u32,
    pub(crate) reserved: bool,
}

impl AdoptedExport {
    /// A range of a namespace that no owner has marked, in bytes.
    pub(crate) fn unmarked(namespace: &Namespace, range: &Range<u64>, access: Access) -> Self {
        Self {
            nqn: namespace.nqn.clone(),
            addresses: namespace.addresses.clone(),
            port: namespace.port,
            access,
            nsid: namespace.nsid,
            nguid: namespace.nguid,
            incarnation: 0,
            epoch: 0,
            first: range.start,
            bytes: range.end.saturating_sub(range.start),
            granule: 0,
            reserved: false,
        }
    }

    pub(crate) fn superblock(&self) -> Superblock {
        Superblock::new(self.nguid, self.incarnation, self.epoch, self.first, self.bytes)
    }

    /// Where the region is, behind its superblock.
    pub(crate) fn place(&self) -> Place {
        Place {
            nqn: self.nqn.clone(),
            nsid: self.nsid,
            nguid: self.nguid,
            first: self.first + u64::from(self.granule),
            ours: false,
            reserved: self.reserved,
        }
    }

    /// The same as an export that all fabrics know.
    pub(crate) fn contact(&self) -> Export {
        let mut addresses = [IpAddr::V6(Ipv6Addr::UNSPECIFIED); EXPORT_ADDRESSES_MAX];
        for (to, from) in addresses.iter_mut().zip(&self.addresses) {
            *to = *from;
        }
        Export {
            format: EXPORT_FORMAT,
            rights: self.access.bits(),
            addresses,
            address_count: self.addresses.len().min(EXPORT_ADDRESSES_MAX) as u8,
            port: self.port,
            incarnation: self.incarnation,
            region: self.nsid,
            generation: self.epoch,
            key: 0,
            len: self.bytes - u64::from(self.granule),
            location: Location::Host,
        }
    }

    /// Whether all its fields are possible.
    pub(crate) fn is_valid(&self) -> bool {
        let granule = u64::from(self.granule);
        granule.is_power_of_two()
            && self.bytes > granule
            && self.nguid != [0; 16]
            && self.is_range_of(self.granule)
    }

    /// Whether it is a range of a namespace, in multiples of `granule`.
    pub(crate) fn is_range_of(&self, granule: u32) -> bool {
        let whole = self.first.is_multiple_of(granule.into())
            && self.bytes.is_multiple_of(granule.into())
            && self.bytes > 0
            && self.first.checked_add(self.bytes).is_some();
        let places = (1..=EXPORT_ADDRESSES_MAX).contains(&self.addresses.len()) && self.port != 0;
        let ids = self.nsid != 0 && self.nsid != u32::MAX;
        whole && places && ids && nqn_of(self.nqn.as_bytes()) == Some(self.nqn.as_str())
    }

    /// Writes the export; returns its length, or `None` when `out` is too short.
    pub(crate) fn write(&self, out: &mut [u8]) -> Option<usize> {
        let head = AdoptedHead {
            magic: ADOPTED_MAGIC,
            version: U16::new(ADOPTED_VERSION),
            rights: self.access.bits(),
            addresses: self.addresses.len() as u8,
            port: U16::new(self.port),
            nqn_len: self.nqn.len() as u8,
            flags: if self.reserved { RESERVED } else { 0 },
            nsid: U32::new(self.nsid),
            epoch: U32::new(self.epoch),
            granule: U32::new(self.granule),
            incarnation: U64::new(self.incarnation),
            nguid: self.nguid,
            first: U64::new(self.first),
            bytes: U64::new(self.bytes),
        };
        let total = size_of::<AdoptedHead>() + 16 * self.addresses.len() + self.nqn.len();
        let (first, rest) = out.get_mut(..total)?.split_at_mut(size_of::<AdoptedHead>());
        first.copy_from_slice(head.as_bytes());
        let (addresses, nqn) = rest.split_at_mut(16 * self.addresses.len());
        for (to, address) in addresses.chunks_exact_mut(16).zip(&self.addresses) {
            let v6 = match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => *v6,
            };
            to.copy_from_slice(&v6.octets());
        }
        nqn.copy_from_slice(self.nqn.as_bytes());
        Some(total)
    }

    /// Whether bytes claim to be the export of an adopted range.
    pub(crate) fn is_meant(bytes: &[u8]) -> bool {
        bytes.starts_with(&ADOPTED_MAGIC)
    }

    /// Parses an export; `None` when it is not one.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = AdoptedHead::read_from_prefix(bytes).ok()?;
        let count = usize::from(head.addresses);
        let lengths = count * 16 + usize::from(head.nqn_len);
        if head.magic != ADOPTED_MAGIC
            || head.version.get() != ADOPTED_VERSION
            || head.flags & !RESERVED != 0
            || count > EXPORT_ADDRESSES_MAX
            || rest.len() != lengths
        {
            return None;
        }
        let (addresses, nqn) = rest.split_at(16 * count);
        let address = |octets: &[u8]| {
            <[u8; 16]>::try_from(octets).ok().map(|octets| IpAddr::from(octets).to_canonical())
        };
        let export = Self {
            nqn: nqn_of(nqn)?.to_owned(),
            addresses: addresses.chunks_exact(16).filter_map(address).collect(),
            port: head.port.get(),
            access: Access::from_bits(head.rights)?,
            nsid: head.nsid.get(),
            nguid: head.nguid,
            incarnation: head.incarnation.get(),
            epoch: head.epoch.get(),
            first: head.first.get(),
            bytes: head.bytes.get(),
            granule: head.granule.get(),
            reserved: head.flags & RESERVED != 0,
        };
        export.is_valid().then_some(export)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export() -> AdoptedExport {
        AdoptedExport {
            nqn: "nqn.2014-08.org.example:box".into(),
            addresses: vec![IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])],
            port: 4420,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            nsid: 3,
            nguid: [7; 16],
            incarnation: 9,
            epoch: 1,
            first: 1 << 20,
            bytes: 1 << 30,
            granule: 4096,
            reserved: true,
        }
    }

    fn written(export: &AdoptedExport) -> Vec<u8> {
        let mut bytes = vec![0; EXPORT_BYTES_MAX];
        let len = export.write(&mut bytes).expect("room for the longest");
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn the_export_of_an_adopted_range_comes_back() {
        let bytes = written(&export());
        assert_eq!(AdoptedExport::parse(&bytes), Some(export()));
        for cut in 0..bytes.len() {
            assert_eq!(AdoptedExport::parse(&bytes[..cut]), None, "{cut} bytes");
        }
        assert_eq!(AdoptedExport::parse(&[bytes, vec![0]].concat()), None, "a byte more");
    }

    #[test]
    fn impossible_exports_are_refused() {
        let good = export();
        let cases = [
            AdoptedExport { port: 0, ..good.clone() },
            AdoptedExport { addresses: vec![], ..good.clone() },
            AdoptedExport { nqn: "two words".into(), ..good.clone() },
            AdoptedExport { nguid: [0; 16], ..good.clone() },
            AdoptedExport { nsid: u32::MAX, ..good.clone() },
            AdoptedExport { first: 5, ..good.clone() },
            AdoptedExport { bytes: 4096, ..good.clone() },
            AdoptedExport { first: 0_u64.wrapping_sub(1 << 20), ..good.clone() },
            AdoptedExport { granule: 0, ..good.clone() },
        ];
        for case in cases {
            assert_eq!(AdoptedExport::parse(&written(&case)), None, "{case:?}");
        }
        assert_eq!(good.contact().len, (1 << 30) - 4096);
        assert_eq!(good.place().first, (1 << 20) + 4096);
    }
}
