//! What is on the disk: superblocks, extents, batches, footers, and how they are encoded.
//!
//! ```text
//!   0        4 KiB    8 KiB       1 MiB
//!   [superblock 0][superblock 1] … [extent 0][extent 1] … [extent n-1]
//!
//!   extent   [batch][batch] … [batch]   free   [footer]        the footer ends where the extent ends
//!   batch    [header][image][image] … [image]                  padded to 4 KiB
//!   header   position, marks, entries, dead list, CRC-32C      a multiple of 4 KiB
//!   image    data ‖ trailer, as in memory                      padded to the logical block of the disk
//!   footer   entries and dead lists of all batches ‖ tail      a multiple of 4 KiB
//! ```
//!
//! All numbers are little endian. Every header and footer names the disk, the slot of its extent, the
//! sequence of the extent and its own offset, so that one which was written or read at another place is not
//! taken for the right one. Decoding verifies everything that later code relies on; bytes that do not decode
//! are the same as bytes that were never written.

mod batch;
mod bytes;
mod footer;
mod lists;
mod superblock;

use core::fmt;

use crate::chunks::stored_len;

pub use batch::BatchHeader;
pub use footer::{Footer, TAIL_BYTES};
pub use lists::{Dead, Entry, Lists};
pub use superblock::{BAD_MAX, Superblock};

/// Version of the format.
pub const VERSION: u16 = 1;
/// Batches, headers, footers and superblocks are multiples of this, bytes.
pub const PAGE_BYTES: u32 = 4_096;
/// Where the first extent begins, bytes.
pub const FIRST_EXTENT_AT: u64 = 1 << 20;
/// The shortest extent, bytes. In service an extent has 16 MiB or more; shorter ones are for tests.
pub const EXTENT_BYTES_MIN: u32 = 128 << 10;
/// The longest extent, bytes.
pub const EXTENT_BYTES_MAX: u32 = 1 << 30;
/// The fewest extents of a disk.
pub const EXTENTS_MIN: u32 = 8;
/// The most extents of a disk.
pub const EXTENTS_MAX: u32 = 1 << 22;
/// Shorter objects are not stored on disks, bytes: their headers would cost more than they do.
pub const OBJECT_BYTES_MIN: u64 = 4_096;

/// Names a disk for good: random, written when it is formatted.
pub type DiskUuid = [u8; 16];

/// The size of a disk, of its extents and of its logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    extents: u32,
    extent_bytes: u32,
    block_bytes: u32,
}

impl Geometry {
    /// A disk of `disk_bytes` bytes in extents of `extent_bytes` (a multiple of 4 KiB), whose logical blocks
    /// have `block_bytes` (512 or 4,096).
    ///
    /// # Errors
    /// The first value that is out of its range.
    pub fn new(disk_bytes: u64, extent_bytes: u32, block_bytes: u32) -> Result<Self, GeometryError> {
        if !matches!(block_bytes, 512 | 4_096) {
            return Err(GeometryError::Block(block_bytes));
        }
        let valid = (EXTENT_BYTES_MIN..=EXTENT_BYTES_MAX).contains(&extent_bytes);
        if !valid || !extent_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(GeometryError::Extent(extent_bytes));
        }
        let extents = disk_bytes.saturating_sub(FIRST_EXTENT_AT) / u64::from(extent_bytes);
        match u32::try_from(extents) {
            Ok(extents) if (EXTENTS_MIN..=EXTENTS_MAX).contains(&extents) => {
                Ok(Self { extents, extent_bytes, block_bytes })
            }
            _ => Err(GeometryError::Disk { disk_bytes, extent_bytes }),
        }
    }

    /// Number of extents.
    #[must_use]
    pub const fn extents(&self) -> u32 {
        self.extents
    }

    /// Bytes of an extent.
    #[must_use]
    pub const fn extent_bytes(&self) -> u32 {
        self.extent_bytes
    }

    /// Bytes of a logical block: what images are padded to.
    #[must_use]
    pub const fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The longest object, bytes: its image takes at most half of an extent.
    #[must_use]
    pub const fn object_bytes_max(&self) -> u64 {
        // The trailer of an object takes less than a thousandth of it, and padding less than a page.
        let half = self.extent_bytes as u64 / 2 - PAGE_BYTES as u64;
        half - half / 1_024
    }

    /// Bytes that the image of an object of `len` bytes takes: data, trailer and padding. 0: no disk of this
    /// geometry stores objects of this length.
    #[must_use]
    pub const fn image_bytes(&self, len: u64) -> u32 {
        if len < OBJECT_BYTES_MIN || len > self.object_bytes_max() {
            return 0;
        }
        stored_len(len).next_multiple_of(self.block_bytes as u64) as u32
    }

    /// Where an extent begins on the disk, bytes.
    #[must_use]
    pub const fn extent_at(&self, slot: u32) -> u64 {
        FIRST_EXTENT_AT + slot as u64 * self.extent_bytes as u64
    }

    /// The locator of a place: the sequence of its extent, and its offset in it. Locators are never used
    /// twice, because sequences are not.
    #[must_use]
    pub const fn locator(&self, sequence: u64, offset: u32) -> u64 {
        sequence.saturating_mul(self.extent_bytes as u64).saturating_add(offset as u64)
    }

    /// Whether an extent can have this sequence: the locators of what is in it, and the next sequence, exist.
    pub(super) const fn has_locators(&self, sequence: u64) -> bool {
        sequence != 0 && sequence < u64::MAX / self.extent_bytes as u64
    }

    /// The sequence of the extent and the offset in it that a locator names.
    #[must_use]
    pub const fn place(&self, locator: u64) -> (u64, u32) {
        let bytes = self.extent_bytes as u64;
        (locator / bytes, (locator % bytes) as u32)
    }
}

/// Why a geometry is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeometryError {
    /// Bytes of a logical block.
    Block(u32),
    /// Bytes of an extent.
    Extent(u32),
    /// Too few or too many extents.
    Disk {
        /// Bytes of the disk.
        disk_bytes: u64,
        /// Bytes of an extent.
        extent_bytes: u32,
    },
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(bytes) => {
                write!(f, "a logical block of {bytes} bytes is not supported: use a disk with 512 or 4,096")
            }
            Self::Extent(bytes) => write!(
                f,
                "an extent of {bytes} bytes is not possible: choose a multiple of {PAGE_BYTES} from \
                 {EXTENT_BYTES_MIN} to {EXTENT_BYTES_MAX}"
            ),
            Self::Disk { disk_bytes, extent_bytes } => write!(
                f,
                "a disk of {disk_bytes} bytes does not have {EXTENTS_MIN} to {EXTENTS_MAX} extents of \
                 {extent_bytes} bytes: choose another length of extents"
            ),
        }
    }
}

impl core::error::Error for GeometryError {}

/// Which of the two open extents an object is written to. Extents of objects on trial are given up three
/// times as early.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    /// Objects that were not read since their put.
    #[default]
    Trial,
    /// Objects that were read after their put.
    Proven,
}

impl Stream {
    /// Both, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Trial, Self::Proven];

    const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Trial),
            1 => Some(Self::Proven),
            _ => None,
        }
    }

    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

/// What an extent contains at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The disk that it is on.
    pub disk: DiskUuid,
    /// The lineage of the master whose tenants and generations its entries name.
    pub lineage: u64,
    /// Its place among the extents of the disk.
    pub slot: u32,
    /// Its number, never used twice on this disk.
    pub sequence: u64,
    /// Which objects it is for.
    pub stream: Stream,
}

/// Up to where a stream was synced when the header with this mark was built: all extents of the stream with
/// a lower sequence, and this extent below the offset. With offset 0 there need not be such an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// Sequence of an extent.
    pub sequence: u64,
    /// Offset in it.
    pub offset: u32,
}

impl Mark {
    /// Whether what ends at `end` in an extent was synced.
    #[must_use]
    pub const fn covers(&self, sequence: u64, end: u32) -> bool {
        sequence < self.sequence || (sequence == self.sequence && end <= self.offset)
    }
}

/// The marks of both streams, and the number of the batch or superblock that carries them: those with the
/// highest number are the current ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Counts everything that carries marks.
    pub serial: u64,
    /// By number of the stream.
    pub streams: [Mark; 2],
}

impl Marks {
    const BYTES: usize = 8 + 2 * 12;

    fn put(&self, out: &mut alloc::vec::Vec<u8>) {
        use bytes::Append;
        out.put_u64(self.serial);
        for mark in self.streams {
            out.put_u64(mark.sequence);
            out.put_u32(mark.offset);
        }
    }

    fn take(from: &mut bytes::Reader<'_>) -> Option<Self> {
        let serial = from.counter()?;
        let mut mark = || Some(Mark { sequence: from.u64()?, offset: from.u32()? });
        Some(Self { serial, streams: [mark()?, mark()?] })
    }

    /// The newer of two.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if other.serial > self.serial { other } else { self }
    }
}

impl Extent {
    const BYTES: usize = 16 + 8 + 4 + 4 + 8;

    fn put(&self, out: &mut alloc::vec::Vec<u8>) {
        use bytes::Append;
        out.extend_from_slice(&self.disk);
        out.put_u64(self.lineage);
        out.put_u32(self.slot);
        out.put_u32(self.stream as u32);
        out.put_u64(self.sequence);
    }

    fn take(from: &mut bytes::Reader<'_>) -> Option<Self> {
        let (disk, lineage, slot) = (from.array()?, from.u64()?, from.u32()?);
        let stream = Stream::from_number(from.u32()?)?;
        Some(Self { disk, lineage, slot, stream, sequence: from.u64()? })
    }
}
