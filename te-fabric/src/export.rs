//! The export: the bytes from which a peer can reach a region.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use te_core::{Error, ErrorKind, GpuVendor, Location, RegionId};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::handshake::FrameError;
use crate::region::Region;

/// The largest number of addresses in one export.
pub const EXPORT_ADDRESSES_MAX: usize = 4;
/// The length of the longest export, in bytes.
pub const EXPORT_BYTES_MAX: usize = size_of::<Head>() + 16 * EXPORT_ADDRESSES_MAX;

/// The first bytes of an export. The addresses follow, 16 bytes each; IPv4 is written as IPv4-mapped IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: U16,
    rights: u8,
    addresses: u8,
    incarnation: U64,
    region: U32,
    generation: U32,
    key: U64,
    len: U64,
    location_kind: u8,
    reserved: [u8; 3],
    location_number: U16,
    port: U16,
}

/// What distinguishes the exports of one fabric from those of other fabrics and other releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportFormat {
    /// The first four bytes of every export.
    pub magic: [u8; 4],
    /// The version of the layout of the fabric's exports. Layouts with a [`Location`] begin with version 3.
    pub version: u16,
}

/// What a peer needs to reach an exported region.
///
/// On the wire: the fabric's magic (4 bytes), version (2), rights (1: 4 = read, 8 = write), number of
/// addresses (1), incarnation (8), region index (4), generation (4), key (8), length (8), kind of the
/// location (1), zero (3), number of the location (2), port (2), then 1 to 4 addresses (16 each).
///
/// | kind | location | number |
/// |---|---|---|
/// | 0 | [`Location::Host`] | 0 |
/// | 1 | [`Location::Numa`] | the NUMA node |
/// | 2, 3, 4 | [`Location::Device`] of NVIDIA, AMD, Intel | the device |
/// | 5 | [`Location::Pool`] | 0 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// The magic and the version of the fabric that wrote it.
    pub format: ExportFormat,
    /// The bits of [`te_core::Access`] that the peer has.
    pub rights: u8,
    /// Where the target listens; the first `address_count` of them are meant.
    pub addresses: [IpAddr; EXPORT_ADDRESSES_MAX],
    /// The number of addresses, 1 to [`EXPORT_ADDRESSES_MAX`].
    pub address_count: u8,
    /// The TCP port of the target's listener, not 0.
    pub port: u16,
    /// The incarnation of the transport that exported it.
    pub incarnation: u64,
    /// The index of the region at the target.
    pub region: u32,
    /// The generation of the region at the target.
    pub generation: u32,
    /// The random number that an initiator has to state to use the region.
    pub key: u64,
    /// The length of the region, in bytes; not 0.
    pub len: u64,
    /// Where the memory of the region is, as its owner registered it.
    pub location: Location,
}

impl Export {
    /// The offset of the port, which the addresses follow, in bytes.
    pub const ADDRESSES_AT: usize = size_of::<Head>() - 2;
    /// The offset of the key, in bytes. The key is 8 bytes long.
    pub const KEY_AT: usize = 24;

    /// Writes the export into `out`; returns its length, or `None` when `out` is too short.
    #[must_use]
    pub fn write(&self, out: &mut [u8]) -> Option<usize> {
        let count = usize::from(self.address_count).min(EXPORT_ADDRESSES_MAX);
        let (location_kind, location_number) = location_to_wire(self.location);
        let head = Head {
            magic: self.format.magic,
            version: U16::new(self.format.version),
            rights: self.rights,
            addresses: count as u8,
            incarnation: U64::new(self.incarnation),
            region: U32::new(self.region),
            generation: U32::new(self.generation),
            key: U64::new(self.key),
            len: U64::new(self.len),
            location_kind,
            reserved: [0; 3],
            location_number: U16::new(location_number),
            port: U16::new(self.port),
        };
        let total = size_of::<Head>() + 16 * count;
        let out = out.get_mut(..total)?;
        let (first, rest) = out.split_at_mut(size_of::<Head>());
        first.copy_from_slice(head.as_bytes());
        for (to, address) in rest.chunks_exact_mut(16).zip(&self.addresses) {
            let v6 = match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => *v6,
            };
            to.copy_from_slice(&v6.octets());
        }
        Some(total)
    }

    /// Parses an export of this format.
    ///
    /// # Errors
    /// `Magic` and `Version`: another format. `Reserved`. `Length`: too short, too long, or no address.
    /// `Location`: memory of a kind that this release does not know. `Range`: no port, an empty region, which
    /// no transport exports, or a number for a location that has no number.
    pub fn parse(format: ExportFormat, bytes: &[u8]) -> Result<Self, FrameError> {
        let (head, rest) = Head::read_from_prefix(bytes).map_err(|_| FrameError::Length)?;
        if head.magic != format.magic {
            return Err(FrameError::Magic);
        }
        if head.version.get() != format.version {
            return Err(FrameError::Version(head.version.get()));
        }
        if head.reserved != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let count = usize::from(head.addresses);
        if count == 0 || count > EXPORT_ADDRESSES_MAX || rest.len() != 16 * count {
            return Err(FrameError::Length);
        }
        if head.port.get() == 0 || head.len.get() == 0 {
            return Err(FrameError::Range);
        }
        let location = location_from_wire(head.location_kind, head.location_number.get())?;
        let mut addresses = [IpAddr::V6(Ipv6Addr::UNSPECIFIED); EXPORT_ADDRESSES_MAX];
        for (to, from) in addresses.iter_mut().zip(rest.chunks_exact(16)) {
            let mut octets = [0; 16];
            octets.copy_from_slice(from);
            *to = IpAddr::V6(Ipv6Addr::from(octets)).to_canonical();
        }
        Ok(Self {
            format,
            rights: head.rights,
            addresses,
            address_count: head.addresses,
            port: head.port.get(),
            incarnation: head.incarnation.get(),
            region: head.region.get(),
            generation: head.generation.get(),
            key: head.key.get(),
            len: head.len.get(),
            location,
        })
    }
}

/// The kind and the number of a location. One that is missing in this table gets a kind that every peer
/// refuses.
const fn location_to_wire(location: Location) -> (u8, u16) {
    match location {
        Location::Host => (0, 0),
        Location::Numa(node) => (1, node),
        Location::Device(GpuVendor::Nvidia, device) => (2, device),
        Location::Device(GpuVendor::Amd, device) => (3, device),
        Location::Device(GpuVendor::Intel, device) => (4, device),
        Location::Pool => (5, 0),
        _ => (u8::MAX, 0),
    }
}

const fn location_from_wire(kind: u8, number: u16) -> Result<Location, FrameError> {
    match kind {
        0 if number != 0 => Err(FrameError::Range),
        0 => Ok(Location::Host),
        1 => Ok(Location::Numa(number)),
        2 => Ok(Location::Device(GpuVendor::Nvidia, number)),
        3 => Ok(Location::Device(GpuVendor::Amd, number)),
        4 => Ok(Location::Device(GpuVendor::Intel, number)),
        5 if number == 0 => Ok(Location::Pool),
        _ => Err(FrameError::Location(kind)),
    }
}

/// What peers learn about this transport: its incarnation, its identity and where it listens.
#[derive(Debug)]
pub struct LocalEnd {
    /// A random number: a restarted process has another one.
    pub incarnation: u64,
    /// The number by which peers expel this initiator: the same for all transports of an engine, never 0.
    pub identity: u64,
    /// The address of the listener.
    pub address: SocketAddr,
    format: ExportFormat,
    advertised: Vec<IpAddr>,
}

impl LocalEnd {
    /// A transport with a new incarnation that listens at `address`. `identity` 0 stands for a random one.
    /// Exports carry the address `advertise`, or, where it is `None`, those that
    /// [`advertised`](crate::net::advertised) finds.
    ///
    /// # Errors
    /// When the system returns no random numbers.
    pub fn new(
        format: ExportFormat,
        identity: u64,
        address: SocketAddr,
        advertise: Option<IpAddr>,
    ) -> std::io::Result<Self> {
        let identity = if identity == 0 { crate::net::random_u64()?.max(1) } else { identity };
        let advertised = crate::net::advertised(advertise, address.ip());
        Ok(Self { incarnation: crate::net::random_u64()?, identity, address, format, advertised })
    }

    /// Writes the export of a region into `out`; returns its length.
    ///
    /// # Errors
    /// `AccessDenied` when no peer may use the region, or it is being deregistered. `OutOfRange` when `out`
    /// is too short.
    pub fn export<X>(&self, id: RegionId, region: &Region<X>, out: &mut [u8]) -> Result<usize, Error> {
        if !region.access.is_remote() || region.closing {
            return Err(ErrorKind::AccessDenied.into());
        }
        let mut addresses = [self.address.ip(); EXPORT_ADDRESSES_MAX];
        let count = self.advertised.len().min(EXPORT_ADDRESSES_MAX);
        addresses[..count].copy_from_slice(&self.advertised[..count]);
        let export = Export {
            format: self.format,
            rights: region.remote_rights(),
            addresses,
            address_count: count as u8,
            port: self.address.port(),
            incarnation: self.incarnation,
            region: id.index,
            generation: id.generation,
            key: region.key,
            len: region.len,
            location: region.location,
        };
        export.write(out).ok_or_else(|| ErrorKind::OutOfRange.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use proptest::prelude::*;
    use te_core::Access;

    /// The offset of the location's kind.
    const LOCATION_AT: usize = 40;

    fn location() -> impl Strategy<Value = Location> {
        let device = (0..GpuVendor::ALL.len(), any::<u16>());
        prop_oneof![
            Just(Location::Host),
            any::<u16>().prop_map(Location::Numa),
            device.prop_map(|(vendor, number)| Location::Device(GpuVendor::ALL[vendor], number)),
        ]
    }

    fn written(export: &Export) -> Vec<u8> {
        let mut bytes = vec![0; EXPORT_BYTES_MAX];
        let len = export.write(&mut bytes).expect("room for the longest");
        bytes.truncate(len);
        bytes
    }

    proptest! {
        #[test]
        fn an_export_comes_back(
            rights: u8, count in 1_u8..=4, port in 1_u16.., incarnation: u64, region: u32, key: u64, len in 1_u64..,
            octets: [[u8; 4]; 4], location in location(),
        ) {
            let mut addresses = octets.map(IpAddr::from);
            for unused in &mut addresses[usize::from(count)..] {
                *unused = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
            }
            let export = Export {
                rights, addresses, address_count: count, port, incarnation, region, key, len, location,
                ..testing::export()
            };
            prop_assert_eq!(Export::parse(export.format, &written(&export)), Ok(export));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..EXPORT_BYTES_MAX + 2)) {
            let _ = Export::parse(testing::export().format, &bytes);
        }
    }

    #[test]
    fn exports_that_no_transport_writes_are_refused() {
        let export = testing::export();
        let parse = |export: &Export| Export::parse(testing::export().format, &written(export));
        assert_eq!(parse(&Export { len: 0, ..export }), Err(FrameError::Range), "an empty region");
        assert_eq!(parse(&Export { port: 0, ..export }), Err(FrameError::Range), "no port");
        assert_eq!(parse(&Export { address_count: 0, ..export }), Err(FrameError::Length), "no address");
        let other = ExportFormat { magic: *b"othr", ..export.format };
        assert_eq!(parse(&Export { format: other, ..export }), Err(FrameError::Magic));
        let newer = ExportFormat { version: 9, ..export.format };
        assert_eq!(parse(&Export { format: newer, ..export }), Err(FrameError::Version(9)));
        let mut bytes = written(&export);
        bytes.pop();
        assert_eq!(Export::parse(export.format, &bytes), Err(FrameError::Length));
        let mut bytes = written(&export);
        bytes[LOCATION_AT + 1] = 1;
        assert_eq!(Export::parse(export.format, &bytes), Err(FrameError::Reserved));
    }

    #[test]
    fn an_export_of_memory_of_an_unknown_kind_is_refused() {
        let cuda = Export { location: Location::Device(GpuVendor::Nvidia, 3), ..testing::export() };
        let mut bytes = written(&cuda);
        assert_eq!(bytes[LOCATION_AT..LOCATION_AT + 6], [2, 0, 0, 0, 3, 0]);
        for kind in 5..=u8::MAX {
            bytes[LOCATION_AT] = kind;
            assert_eq!(Export::parse(cuda.format, &bytes), Err(FrameError::Location(kind)));
        }
        bytes[LOCATION_AT] = 0;
        assert_eq!(Export::parse(cuda.format, &bytes), Err(FrameError::Range), "host memory has no number");
        for cut in 0..bytes.len() {
            assert_eq!(Export::parse(cuda.format, &bytes[..cut]), Err(FrameError::Length), "{cut} bytes");
        }
    }

    #[test]
    fn a_transport_exports_what_peers_may_use_with_its_incarnation() {
        let address = SocketAddr::from(([127, 0, 0, 1], 4_321));
        let end = LocalEnd::new(testing::export().format, 0, address, None).expect("random numbers");
        assert!(end.identity != 0);
        let id = RegionId::new(2, 7);
        let mut region = Region::new(id, 64, Location::Numa(1), Access::all(), 5, ());
        let mut out = [0; EXPORT_BYTES_MAX];
        let len = end.export(id, &region, &mut out).expect("room enough");
        let export = Export::parse(testing::export().format, &out[..len]).expect("just written");
        assert_eq!((export.incarnation, export.region, export.generation), (end.incarnation, 2, 7));
        assert_eq!((export.port, export.addresses[0], export.address_count), (4_321, address.ip(), 1));
        assert_eq!((export.rights, export.key, export.len), (12, 5, 64));
        assert_eq!(export.location, Location::Numa(1));
        assert_eq!(out[Export::KEY_AT..Export::KEY_AT + 8], 5_u64.to_le_bytes());
        assert_eq!(end.export(id, &region, &mut out[..len - 1]), Err(ErrorKind::OutOfRange.into()));
        region.closing = true;
        assert_eq!(end.export(id, &region, &mut out), Err(ErrorKind::AccessDenied.into()));
        let private = Region::new(id, 64, Location::Host, Access::LOCAL, 5, ());
        assert_eq!(end.export(id, &private, &mut out), Err(ErrorKind::AccessDenied.into()));
    }
}
