//! What the rail needs to reach one range of a Mooncake peer, as the export that an engine attaches.
//!
//! Mooncake has no exports. This one is made from a peer's descriptor and read in the same process, and never
//! sent. It ends with a tag that only this process can make: bytes that come from anywhere else, such as the
//! descriptor of a native peer, do not become an address to which this process connects.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `moon` |
//! | 4 | 1 | the version of this layout, 1 |
//! | 5 | 1 | rights: 4 = read, 8 = write |
//! | 6 | 1 | number of addresses, 1 to 4 |
//! | 7 | 1 | version of the peer's data port, 1 or 2 |
//! | 8 | 8 | first address of the range at the peer |
//! | 16 | 8 | length of the range |
//! | 24 | 8 | the peer's life ([`SegmentDescriptor::life`](crate::SegmentDescriptor::life)) |
//! | 32 | 2 | data port |
//! | 34 | 2 | length of the segment's name |
//! | 36 | 16 each | addresses; IPv4 as IPv4-mapped IPv6 |
//! | | | the segment's name |
//! | last | 8 | the tag |

use core::hash::BuildHasher as _;
use core::net::{IpAddr, Ipv6Addr};
use std::hash::RandomState;
use std::sync::OnceLock;

use te_core::Access;
use te_fabric::{EXPORT_ADDRESSES_MAX, FrameError};
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::header::Version;

/// The longest name of a segment that can be opened, bytes.
pub const SEGMENT_BYTES_MAX: usize = 512;
/// The length of the longest export, bytes.
pub const EXPORT_BYTES_MAX: usize = HEAD_BYTES + 16 * EXPORT_ADDRESSES_MAX + SEGMENT_BYTES_MAX + TAG_BYTES;

const MAGIC: [u8; 4] = *b"moon";
const LAYOUT: u8 = 1;
const HEAD_BYTES: usize = size_of::<Head>();
const TAG_BYTES: usize = 8;
const RIGHTS: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    layout: u8,
    rights: u8,
    addresses: u8,
    version: u8,
    addr: U64,
    len: U64,
    life: U64,
    port: U16,
    segment_bytes: U16,
}

/// One range of a Mooncake peer, and where the peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// What may be done: `REMOTE_READ`, `REMOTE_WRITE` or both.
    pub access: Access,
    /// The addresses of its data port, 1 to 4.
    pub addresses: Vec<IpAddr>,
    /// The data port; not 0.
    pub port: u16,
    /// The version of the data port's protocol.
    pub version: Version,
    /// The first address, in the peer's address space.
    pub addr: u64,
    /// The length, in bytes; not 0.
    pub len: u64,
    /// The peer's life.
    pub life: u64,
    /// The name under which the peer's descriptor is found again, of at most 512 bytes.
    pub segment: String,
}

impl Export {
    /// The bytes of the export.
    ///
    /// # Errors
    /// `Length` without an address, with more than 4, or with too long a name; `Range` without a port or a
    /// length, or with a range that ends after 2^64 - 1.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FrameError> {
        let count = self.addresses.len();
        if count == 0 || count > EXPORT_ADDRESSES_MAX || self.segment.len() > SEGMENT_BYTES_MAX {
            return Err(FrameError::Length);
        }
        if self.port == 0 || self.len == 0 || self.addr.checked_add(self.len).is_none() {
            return Err(FrameError::Range);
        }
        let head = Head {
            magic: MAGIC,
            layout: LAYOUT,
            rights: self.access.intersection(RIGHTS).bits(),
            addresses: count as u8,
            version: if self.version == Version::V2 { 2 } else { 1 },
            addr: U64::new(self.addr),
            len: U64::new(self.len),
            life: U64::new(self.life),
            port: U16::new(self.port),
            segment_bytes: U16::new(self.segment.len() as u16),
        };
        let mut bytes = head.as_bytes().to_vec();
        for address in &self.addresses {
            let v6 = match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => *v6,
            };
            bytes.extend_from_slice(&v6.octets());
        }
        bytes.extend_from_slice(self.segment.as_bytes());
        let tag = tag(&bytes);
        bytes.extend_from_slice(&tag);
        Ok(bytes)
    }

    /// Parses an export that this process has made.
    ///
    /// # Errors
    /// `Magic`, `Version`: another fabric or release. `Length`: cut off, or made by another process.
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        let (head, _) = Head::read_from_prefix(bytes).map_err(|_| FrameError::Length)?;
        if head.magic != MAGIC {
            return Err(FrameError::Magic);
        }
        if head.layout != LAYOUT {
            return Err(FrameError::Version(head.layout.into()));
        }
        let (count, segment_bytes) = (usize::from(head.addresses), usize::from(head.segment_bytes.get()));
        let whole = HEAD_BYTES + 16 * count + segment_bytes + TAG_BYTES;
        let (said, found) = bytes.split_last_chunk::<TAG_BYTES>().ok_or(FrameError::Length)?;
        if bytes.len() != whole || *found != tag(said) {
            return Err(FrameError::Length);
        }
        // From here on the bytes are those of `to_bytes`, in this process.
        let (addresses, segment) = said[HEAD_BYTES..].split_at(16 * count);
        let address = |octets: &[u8; 16]| IpAddr::V6(Ipv6Addr::from(*octets)).to_canonical();
        Ok(Self {
            access: Access::from_bits_truncate(head.rights),
            addresses: addresses.as_chunks::<16>().0.iter().map(address).collect(),
            port: head.port.get(),
            version: if head.version == 2 { Version::V2 } else { Version::V1 },
            addr: head.addr.get(),
            len: head.len.get(),
            life: head.life.get(),
            segment: String::from_utf8_lossy(segment).into_owned(),
        })
    }
}

/// SipHash of the bytes with a key that is drawn once per process.
fn tag(bytes: &[u8]) -> [u8; TAG_BYTES] {
    static KEY: OnceLock<RandomState> = OnceLock::new();
    KEY.get_or_init(RandomState::new).hash_one(bytes).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn export() -> Export {
        Export {
            access: Access::REMOTE_READ,
            addresses: vec![IpAddr::from([127, 0, 0, 1])],
            port: 9,
            version: Version::V2,
            addr: 0x7000_0000_0000,
            len: 1 << 20,
            life: 5,
            segment: "node:1".into(),
        }
    }

    #[test]
    fn every_bit_and_every_length_of_an_export_matters() {
        let bytes = export().to_bytes().expect("valid");
        assert_eq!(Export::parse(&bytes), Ok(export()));
        for len in 0..bytes.len() {
            assert!(Export::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(Export::parse(&[&bytes[..], &[0]].concat()).is_err());
        for bit in 0..8 * bytes.len() {
            let mut forged = bytes.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert!(Export::parse(&forged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_export_that_leads_nowhere_is_not_written() {
        let write = |export: Export| export.to_bytes().map(|_| ());
        let many = vec![IpAddr::from([127, 0, 0, 1]); EXPORT_ADDRESSES_MAX + 1];
        assert_eq!(write(Export { addresses: Vec::new(), ..export() }), Err(FrameError::Length));
        assert_eq!(write(Export { addresses: many, ..export() }), Err(FrameError::Length));
        let long = "x".repeat(SEGMENT_BYTES_MAX + 1);
        assert_eq!(write(Export { segment: long, ..export() }), Err(FrameError::Length));
        assert_eq!(write(Export { port: 0, ..export() }), Err(FrameError::Range));
        assert_eq!(write(Export { len: 0, ..export() }), Err(FrameError::Range));
        assert_eq!(write(Export { addr: u64::MAX, ..export() }), Err(FrameError::Range));
        let longest = Export {
            addresses: vec![IpAddr::from([127, 0, 0, 1]); EXPORT_ADDRESSES_MAX],
            segment: "x".repeat(SEGMENT_BYTES_MAX),
            ..export()
        };
        assert_eq!(longest.to_bytes().expect("valid").len(), EXPORT_BYTES_MAX);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..EXPORT_BYTES_MAX)) {
            prop_assert!(Export::parse(&bytes).is_err());
        }
    }
}
