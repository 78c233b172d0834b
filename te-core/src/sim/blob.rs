//! The export of a node. Little-endian:
//!
//! ```text
//! 0 "SSIM"  4 version (1)  5 access  6 node u32  10 region index u32  14 region generation u32
//! 18 length u64  26 key u64  34 incarnation u64  42 end
//! ```

use crate::{Access, Error, ErrorKind, RegionId};

pub(super) const BLOB_BYTES: usize = 42;
const MAGIC: &[u8; 4] = b"SSIM";
const VERSION: u8 = 1;

/// A peer's region as its export describes it. The target does not trust it and checks again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Export {
    pub(super) node: u32,
    pub(super) region: RegionId,
    pub(super) access: Access,
    pub(super) len: u64,
    pub(super) key: u64,
    pub(super) incarnation: u64,
}

impl Export {
    pub(super) fn encode(&self) -> [u8; BLOB_BYTES] {
        let mut blob = [0; BLOB_BYTES];
        blob[..4].copy_from_slice(MAGIC);
        blob[4] = VERSION;
        blob[5] = self.access.bits();
        blob[6..10].copy_from_slice(&self.node.to_le_bytes());
        blob[10..14].copy_from_slice(&self.region.index.to_le_bytes());
        blob[14..18].copy_from_slice(&self.region.generation.to_le_bytes());
        blob[18..26].copy_from_slice(&self.len.to_le_bytes());
        blob[26..34].copy_from_slice(&self.key.to_le_bytes());
        blob[34..42].copy_from_slice(&self.incarnation.to_le_bytes());
        blob
    }

    pub(super) fn parse(blob: &[u8]) -> Result<Self, Error> {
        let invalid = Error::new(ErrorKind::InvalidArgument);
        let blob: &[u8; BLOB_BYTES] = blob.try_into().map_err(|_| invalid)?;
        if &blob[..4] != MAGIC || blob[4] != VERSION {
            return Err(invalid);
        }
        let u32_at = |at: usize| u32::from_le_bytes(core::array::from_fn(|i| blob[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| blob[at + i]));
        Ok(Self {
            node: u32_at(6),
            region: RegionId::new(u32_at(10), u32_at(14)),
            access: Access::from_bits(blob[5]).ok_or(invalid)?,
            len: u64_at(18),
            key: u64_at(26),
            incarnation: u64_at(34),
        })
    }
}
