//! The bytes that lead a peer to a region of a pool. 88 bytes, all numbers little-endian:
//!
//! ```text
//!   version u8 = 1 | coherence u8 | rights u8 | 0 u8 | row u32 | pool 16 | first u32 | count u32 | base u64
//!   len u64 | incarnation u64 | epoch u64 | key 16 | number u64
//! ```

use te_core::{Access, Error, ErrorKind};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Coherence;
use crate::pool::format::ROWS_MAX;

const VERSION: u8 = 1;
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// An export.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// How the owner maps the pool: a peer has to do the same.
    pub coherence: Coherence,
    /// The rights of peers; at least one.
    pub rights: Access,
    /// The number of the region's row in the page of its first extent.
    pub row: u32,
    /// The pool.
    pub uuid: [u8; 16],
    /// The first extent of the region.
    pub first: u32,
    /// The number of its extents; not 0.
    pub count: u32,
    /// Where the region begins in the pool, in bytes.
    pub base: u64,
    /// The length of the region, in bytes; not 0.
    pub len: u64,
    /// The incarnation of the owner.
    pub incarnation: u64,
    /// The epoch in which the master gave the extents to the owner.
    pub epoch: u64,
    /// The key that the master gave with them.
    pub key: [u8; 16],
    /// The random number of the region.
    pub number: u64,
}

/// Without the key.
impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export")
            .field("extents", &(self.first, self.count))
            .field("base", &self.base)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Raw {
    version: u8,
    coherence: u8,
    rights: u8,
    reserved: u8,
    row: U32,
    uuid: [u8; 16],
    first: U32,
    count: U32,
    base: U64,
    len: U64,
    incarnation: U64,
    epoch: U64,
    key: [u8; 16],
    number: U64,
}

impl Export {
    /// The length of an export, in bytes.
    pub const BYTES: usize = size_of::<Raw>();
    /// The offset of the key, in bytes. The key is 16 bytes long.
    pub const KEY_AT: usize = 64;

    /// Writes the export into `out`; returns its length, or `None` when `out` is too short.
    #[must_use]
    pub fn write(&self, out: &mut [u8]) -> Option<usize> {
        let raw = Raw {
            version: VERSION,
            coherence: match self.coherence {
                Coherence::Flush => 0,
                Coherence::Hardware => 1,
            },
            rights: self.rights.bits(),
            reserved: 0,
            row: U32::new(self.row),
            uuid: self.uuid,
            first: U32::new(self.first),
            count: U32::new(self.count),
            base: U64::new(self.base),
            len: U64::new(self.len),
            incarnation: U64::new(self.incarnation),
            epoch: U64::new(self.epoch),
            key: self.key,
            number: U64::new(self.number),
        };
        out.get_mut(..Self::BYTES)?.copy_from_slice(raw.as_bytes());
        Some(Self::BYTES)
    }

    /// Parses an export.
    ///
    /// # Errors
    /// `InvalidArgument`: another length or version, rights that no export grants, a row that no extent has,
    /// or an empty or overflowing range.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let invalid = Error::new(ErrorKind::InvalidArgument);
        let raw = Raw::read_from_bytes(bytes).map_err(|_| invalid)?;
        let coherence = match raw.coherence {
            0 => Coherence::Flush,
            1 => Coherence::Hardware,
            _ => return Err(invalid),
        };
        let rights =
            Access::from_bits(raw.rights).filter(|rights| rights.is_remote() && REMOTE.contains(*rights));
        let export = Self {
            coherence,
            rights: rights.ok_or(invalid)?,
            row: raw.row.get(),
            uuid: raw.uuid,
            first: raw.first.get(),
            count: raw.count.get(),
            base: raw.base.get(),
            len: raw.len.get(),
            incarnation: raw.incarnation.get(),
            epoch: raw.epoch.get(),
            key: raw.key,
            number: raw.number.get(),
        };
        let range_ok = export.len > 0 && export.base.checked_add(export.len).is_some();
        let extents_ok = export.count > 0 && export.first.checked_add(export.count).is_some();
        let rest_ok = raw.version == VERSION && raw.reserved == 0 && export.row < ROWS_MAX;
        if range_ok && extents_ok && rest_ok { Ok(export) } else { Err(invalid) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EXPORT: Export = Export {
        coherence: Coherence::Flush,
        rights: REMOTE,
        row: 3,
        uuid: [9; 16],
        first: 4,
        count: 2,
        base: 12 << 20,
        len: 3 << 20,
        incarnation: 77,
        epoch: 5,
        key: [0xAB; 16],
        number: 1234,
    };

    fn written(export: &Export) -> [u8; Export::BYTES] {
        let mut bytes = [0; Export::BYTES];
        assert_eq!(export.write(&mut bytes), Some(Export::BYTES));
        bytes
    }

    #[test]
    fn an_export_has_its_documented_layout() {
        let bytes = written(&EXPORT);
        assert_eq!(bytes[Export::KEY_AT..Export::KEY_AT + 16], EXPORT.key);
        assert_eq!((bytes.len(), bytes[0], bytes[2]), (88, VERSION, 12));
        assert_eq!(EXPORT.write(&mut [0; Export::BYTES - 1]), None);
        assert!(!format!("{EXPORT:?}").to_lowercase().contains("ab, ab"), "the key is not printed");
    }

    #[test]
    fn exports_that_no_owner_writes_are_refused() {
        assert_eq!(Export::parse(&written(&EXPORT)), Ok(EXPORT));
        for bad in [
            Export { rights: Access::empty(), ..EXPORT },
            Export { rights: Access::all(), ..EXPORT },
            Export { rights: Access::LOCAL, ..EXPORT },
            Export { row: ROWS_MAX, ..EXPORT },
            Export { count: 0, ..EXPORT },
            Export { first: u32::MAX, ..EXPORT },
            Export { len: 0, ..EXPORT },
            Export { len: u64::MAX, ..EXPORT },
            Export { base: u64::MAX, ..EXPORT },
        ] {
            assert!(Export::parse(&written(&bad)).is_err(), "{bad:?}");
        }
        let bytes = written(&EXPORT);
        for len in 0..bytes.len() {
            assert!(Export::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        for (at, value) in [(0, 0), (0, 2), (1, 2), (3, 1)] {
            let mut bent = bytes;
            bent[at] = value;
            assert!(Export::parse(&bent).is_err(), "{value} at {at}");
        }
        let mut long = bytes.to_vec();
        long.push(0);
        assert!(Export::parse(&long).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..100), known: bool) {
            let mut bytes = bytes;
            if known && bytes.len() >= 8 {
                bytes.resize(Export::BYTES, 1);
                bytes[..8].copy_from_slice(&[VERSION, 0, 4, 0, 1, 0, 0, 0]);
            }
            if let Ok(export) = Export::parse(&bytes) {
                prop_assert_eq!(&written(&export)[..], &bytes[..]);
            }
        }
    }
}
