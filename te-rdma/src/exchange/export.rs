//! What people and programs carry from the owner of a region to whoever shall reach it.

use core::net::{IpAddr, Ipv6Addr};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{FrameError, VERSION};

/// Addresses in one export, at most.
pub const EXPORT_ADDRESSES_MAX: usize = 4;
/// The longest export, bytes.
pub const EXPORT_BYTES_MAX: usize = size_of::<ExportHead>() + 16 * EXPORT_ADDRESSES_MAX;

/// First bytes of an export. The addresses follow, 16 bytes each; IPv4 is written as IPv4-mapped IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ExportHead {
    magic: [u8; 4],
    version: U16,
    rights: u8,
    addresses: u8,
    incarnation: U64,
    region: U32,
    generation: U32,
    key: U64,
    len: U64,
    reserved: [u8; 6],
    port: U16,
}

const EXPORT_MAGIC: [u8; 4] = *b"srdm";

/// What a peer needs to reach an exported region: where to ask for its remote keys, and the key that opens them.
///
/// On the wire: magic `srdm` (4 bytes), version (2), rights (1: 4 = read, 8 = write), number of addresses (1), incarnation
/// (8), region index (4), generation (4), key (8), length (8), zero (6), port (2), then 1 to 4 addresses (16 each).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// The bits of [`te_core::Access`] that the peer has.
    pub rights: u8,
    /// Where the target's side channel listens; the first `address_count` count.
    pub addresses: [IpAddr; EXPORT_ADDRESSES_MAX],
    /// How many addresses there are.
    pub address_count: u8,
    /// TCP port of the side channel.
    pub port: u16,
    /// Who exported it.
    pub incarnation: u64,
    /// Region index at the target.
    pub region: u32,
    /// Region generation at the target.
    pub generation: u32,
    /// The key.
    pub key: u64,
    /// Bytes of the region.
    pub len: u64,
}

impl Export {
    /// Where the addresses are in an export.
    pub const ADDRESSES_AT: usize = size_of::<ExportHead>() - 2;
    /// Where the key is in an export; it has 8 bytes.
    pub const KEY_AT: usize = 24;

    /// Writes the export into `out`; gives its length, or `None` when `out` is too short.
    #[must_use]
    pub fn write(&self, out: &mut [u8]) -> Option<usize> {
        let count = usize::from(self.address_count).min(EXPORT_ADDRESSES_MAX);
        let head = ExportHead {
            magic: EXPORT_MAGIC,
            version: U16::new(VERSION),
            rights: self.rights,
            addresses: count as u8,
            incarnation: U64::new(self.incarnation),
            region: U32::new(self.region),
            generation: U32::new(self.generation),
            key: U64::new(self.key),
            len: U64::new(self.len),
            reserved: [0; 6],
            port: U16::new(self.port),
        };
        let total = size_of::<ExportHead>() + 16 * count;
        let out = out.get_mut(..total)?;
        let (first, rest) = out.split_at_mut(size_of::<ExportHead>());
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
}

/// Parses an export.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_export(bytes: &[u8]) -> Result<Export, FrameError> {
    let (head, rest) = ExportHead::read_from_prefix(bytes).map_err(|_| FrameError::Length)?;
    if head.magic != EXPORT_MAGIC {
        return Err(FrameError::Magic);
    }
    if head.version.get() != VERSION {
        return Err(FrameError::Version(head.version.get()));
    }
    if head.reserved != [0; 6] {
        return Err(FrameError::Reserved);
    }
    let count = usize::from(head.addresses);
    if count == 0 || count > EXPORT_ADDRESSES_MAX || rest.len() != 16 * count {
        return Err(FrameError::Length);
    }
    if head.port.get() == 0 || head.len.get() == 0 {
        return Err(FrameError::Range);
    }
    let mut addresses = [IpAddr::V6(Ipv6Addr::UNSPECIFIED); EXPORT_ADDRESSES_MAX];
    for (to, from) in addresses.iter_mut().zip(rest.chunks_exact(16)) {
        let mut octets = [0; 16];
        octets.copy_from_slice(from);
        *to = IpAddr::V6(Ipv6Addr::from(octets)).to_canonical();
    }
    Ok(Export {
        rights: head.rights,
        addresses,
        address_count: head.addresses,
        port: head.port.get(),
        incarnation: head.incarnation.get(),
        region: head.region.get(),
        generation: head.generation.get(),
        key: head.key.get(),
        len: head.len.get(),
    })
}
