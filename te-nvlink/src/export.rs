//! The export: what leads a peer to a region. Handles of the memory are not in it: who shows the key over the
//! control connection gets them.
//!
//! 83 bytes: `version u8 = 1 | boot id 16 | GPU UUID 16, or zeroes for host memory | socket 16 | region u64 |
//! key 16 | len u64 | rights u8 | reserved u8 = 0`.

use te_core::{Access, Error, ErrorKind, RegionId};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const VERSION: u8 = 1;
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// An export of this fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// The boot of the host that the memory is in.
    pub boot: [u8; 16],
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
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Bytes {
    version: u8,
    boot: [u8; 16],
    gpu: [u8; 16],
    socket: [u8; 16],
    region: U64,
    key: [u8; 16],
    len: U64,
    access: u8,
    reserved: u8,
}

impl Export {
    /// The length of an export, bytes.
    pub const BYTES: usize = size_of::<Bytes>();
    /// Where the key begins.
    pub const KEY_AT: usize = std::mem::offset_of!(Bytes, key);
    /// Where the bytes begin, and end, that say where the owner is.
    pub const ADDRESS: std::ops::Range<usize> =
        std::mem::offset_of!(Bytes, boot)..std::mem::offset_of!(Bytes, region);

    /// The bytes of the export.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let bytes = Bytes {
            version: VERSION,
            boot: self.boot,
            gpu: self.gpu.unwrap_or_default(),
            socket: self.socket,
            region: self.region.to_bits().into(),
            key: self.key,
            len: self.len.into(),
            access: self.access.intersection(REMOTE).bits(),
            reserved: 0,
        };
        zerocopy::transmute!(bytes)
    }

    /// Parses an export.
    ///
    /// # Errors
    /// `InvalidArgument` for another length or version, for a length of 0, and for rights that are none.
    pub fn parse(blob: &[u8]) -> Result<Self, Error> {
        let invalid = Error::new(ErrorKind::InvalidArgument);
        let bytes = Bytes::read_from_bytes(blob).map_err(|_| invalid)?;
        let access =
            Access::from_bits(bytes.access).filter(|access| access.is_remote() && REMOTE.contains(*access));
        if bytes.version != VERSION || bytes.reserved != 0 || bytes.len.get() == 0 {
            return Err(invalid);
        }
        Ok(Self {
            boot: bytes.boot,
            gpu: (bytes.gpu != [0; 16]).then_some(bytes.gpu),
            socket: bytes.socket,
            region: RegionId::from_bits(bytes.region.get()),
            key: bytes.key,
            len: bytes.len.get(),
            access: access.ok_or(invalid)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn export() -> Export {
        Export {
            boot: [1; 16],
            gpu: Some([2; 16]),
            socket: [3; 16],
            region: RegionId::new(4, 5),
            key: [6; 16],
            len: 7,
            access: Access::REMOTE_READ,
        }
    }

    #[test]
    fn an_export_survives_and_says_what_is_wrong_with_others() {
        for export in [export(), Export { gpu: None, access: REMOTE, ..export() }] {
            assert_eq!(Export::parse(&export.to_bytes()), Ok(export));
        }
        let good = export().to_bytes();
        assert_eq!((good.len(), &good[Export::KEY_AT..Export::KEY_AT + 16]), (83, &[6; 16][..]));
        for (at, value) in [(0, 2), (81, 0), (81, 1), (81, 0x10), (82, 1), (73, 0)] {
            let mut bad = good;
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

    proptest! {
        #[test]
        fn any_bytes_are_an_export_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 80..86)) {
            if let Ok(export) = Export::parse(&bytes) {
                prop_assert_eq!(&export.to_bytes()[..], &bytes[..]);
            }
        }
    }
}
