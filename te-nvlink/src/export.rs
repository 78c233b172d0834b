//! The export: what leads a peer to a region. Handles of the memory are not in it: who shows the key over the
//! control connection gets them.
//!
//! `version u8 = 2 | host 16 | GPU UUID 16, or zeroes for host memory | socket 16 | region u64 | key 16 |
//! len u64 | rights u8 | addresses u8`, which is 83 bytes; then, where processes of other hosts may map the
//! memory, `port u16` and up to 4 addresses of 16 bytes, IPv4 as mapped to IPv6.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use te_core::{Access, Error, ErrorKind, RegionId};
use te_fabric::EXPORT_ADDRESSES_MAX;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const VERSION: u8 = 2;
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// An export of this fabric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The name of the host that the memory is in: by default, the id of its boot.
    pub host: [u8; 16],
    /// The GPU that has the memory; `None` for host memory.
    pub gpu: Option<[u8; 16]>,
    /// The name of the owner's listener.
    pub socket: [u8; 16],
    /// The region, by its owner's id.
    pub region: RegionId,
    /// What a peer has to show.
    pub key: [u8; 16],
    /// The length, bytes.
    pub len: u64,
    /// The rights of peers.
    pub access: Access,
    /// Where processes of other hosts reach the owner; empty: they cannot map the memory.
    pub addresses: Vec<SocketAddr>,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Bytes {
    version: u8,
    host: [u8; 16],
    gpu: [u8; 16],
    socket: [u8; 16],
    region: U64,
    key: [u8; 16],
    len: U64,
    access: u8,
    addresses: u8,
}

impl Export {
    /// The length of an export without addresses, bytes.
    pub const BYTES: usize = size_of::<Bytes>();
    /// The length of the longest export, bytes.
    pub const BYTES_MAX: usize = Self::BYTES + 2 + 16 * EXPORT_ADDRESSES_MAX;
    /// Where the key begins.
    pub const KEY_AT: usize = std::mem::offset_of!(Bytes, key);
    /// Where the bytes begin, and end, that say where the owner is.
    pub const ADDRESS: std::ops::Range<usize> =
        std::mem::offset_of!(Bytes, host)..std::mem::offset_of!(Bytes, region);

    /// The bytes of the export, with up to 4 addresses, which have the port of the first one.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let addresses = &self.addresses[..self.addresses.len().min(EXPORT_ADDRESSES_MAX)];
        let bytes = Bytes {
            version: VERSION,
            host: self.host,
            gpu: self.gpu.unwrap_or_default(),
            socket: self.socket,
            region: self.region.to_bits().into(),
            key: self.key,
            len: self.len.into(),
            access: self.access.intersection(REMOTE).bits(),
            addresses: addresses.len() as u8,
        };
        let mut blob = bytes.as_bytes().to_vec();
        if let Some(first) = addresses.first() {
            blob.extend_from_slice(&first.port().to_le_bytes());
        }
        for address in addresses {
            let ip = match address.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            blob.extend_from_slice(&ip.octets());
        }
        blob
    }

    /// Parses an export.
    ///
    /// # Errors
    /// `InvalidArgument` for another length or version, for a length of 0, for rights that are none, and for
    /// addresses that lead nowhere.
    pub fn parse(blob: &[u8]) -> Result<Self, Error> {
        let invalid = Error::new(ErrorKind::InvalidArgument);
        let (bytes, rest) = Bytes::read_from_prefix(blob).map_err(|_| invalid)?;
        let access =
            Access::from_bits(bytes.access).filter(|access| access.is_remote() && REMOTE.contains(*access));
        if bytes.version != VERSION || bytes.len.get() == 0 {
            return Err(invalid);
        }
        Ok(Self {
            addresses: addresses(bytes.addresses.into(), rest).ok_or(invalid)?,
            host: bytes.host,
            gpu: (bytes.gpu != [0; 16]).then_some(bytes.gpu),
            socket: bytes.socket,
            region: RegionId::from_bits(bytes.region.get()),
            key: bytes.key,
            len: bytes.len.get(),
            access: access.ok_or(invalid)?,
        })
    }
}

/// So many addresses with one port, and nothing else.
fn addresses(count: usize, rest: &[u8]) -> Option<Vec<SocketAddr>> {
    if count == 0 {
        return rest.is_empty().then(Vec::new);
    }
    let (port, rest) = rest.split_first_chunk::<2>()?;
    let (port, (each, left)) = (u16::from_le_bytes(*port), rest.as_chunks::<16>());
    if port == 0 || count > EXPORT_ADDRESSES_MAX || each.len() != count || !left.is_empty() {
        return None;
    }
    let address = |octets: &[u8; 16]| {
        let ip = Ipv6Addr::from(*octets).to_canonical();
        (!ip.is_unspecified() && !ip.is_multicast()).then(|| SocketAddr::new(ip, port))
    };
    each.iter().map(address).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn export() -> Export {
        Export {
            host: [1; 16],
            gpu: Some([2; 16]),
            socket: [3; 16],
            region: RegionId::new(4, 5),
            key: [6; 16],
            len: 7,
            access: Access::REMOTE_READ,
            addresses: Vec::new(),
        }
    }

    fn across_hosts() -> Export {
        let at = |ip: &str| SocketAddr::new(ip.parse().expect("an address"), 4_711);
        Export { addresses: vec![at("10.0.0.1"), at("fd00::2")], ..export() }
    }

    #[test]
    fn an_export_survives_and_says_what_is_wrong_with_others() {
        for export in [export(), Export { gpu: None, access: REMOTE, ..export() }, across_hosts()] {
            assert_eq!(Export::parse(&export.to_bytes()), Ok(export));
        }
        let good = export().to_bytes();
        assert_eq!((good.len(), &good[Export::KEY_AT..Export::KEY_AT + 16]), (83, &[6; 16][..]));
        for (at, value) in [(0, 1), (81, 0), (81, 1), (81, 0x10), (82, 1), (82, 255), (73, 0)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(
                Export::parse(&bad).map_err(|error| error.kind),
                Err(ErrorKind::InvalidArgument),
                "{at}"
            );
        }
        assert!((0..83).all(|len| Export::parse(&good[..len]).is_err()));
        assert!(Export::parse(&[&good[..], &[0]].concat()).is_err());
    }

    #[test]
    fn addresses_are_as_many_as_are_told_and_lead_somewhere() {
        let good = across_hosts().to_bytes();
        assert_eq!(good.len(), 83 + 2 + 2 * 16);
        assert!((0..good.len()).all(|len| Export::parse(&good[..len]).is_err()));
        assert!(Export::parse(&[&good[..], &[0]].concat()).is_err());
        for change in [
            |bad: &mut Vec<u8>| bad[82] = 1,
            |bad: &mut Vec<u8>| bad[82] = 3,
            |bad: &mut Vec<u8>| bad[82] = 0,
            |bad: &mut Vec<u8>| bad[83..85].fill(0),
            |bad: &mut Vec<u8>| bad[85..101].fill(0),
            |bad: &mut Vec<u8>| bad[85] = 0xFF,
        ] {
            let mut bad = good.clone();
            change(&mut bad);
            assert!(Export::parse(&bad).is_err(), "{bad:?}");
        }
        let many = Export { addresses: vec![across_hosts().addresses[0]; 9], ..export() };
        assert_eq!(many.to_bytes().len(), Export::BYTES_MAX);
        assert_eq!(Export::parse(&many.to_bytes()).map(|parsed| parsed.addresses.len()), Ok(4));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_export_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 80..152)) {
            if let Ok(export) = Export::parse(&bytes) {
                prop_assert_eq!(&export.to_bytes()[..], &bytes[..]);
            }
        }
    }
}
