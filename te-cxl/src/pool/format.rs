//! The layout of a pool, and the lines that describe it. All numbers are little-endian. Every line is 64
//! bytes long, is written by one host alone, and ends with the CRC-32C of its first 60 bytes.
//!
//! ```text
//!   page 0               superblock (its first line)
//!   page 1 + e           extent e: line 0 its owner; lines 1 to 47 regions that begin in the extent;
//!                        lines 48 to 63 identities that the owner has expelled. Written by the owner.
//!   page 1 + extents + p peer p: line 0 who it is; line 1 what it is using. Written by that peer.
//!   from the next multiple of 2 MiB on: the extents
//! ```

use te_core::Access;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::PoolError;

/// The bytes of a page, which is the unit that one host writes.
pub const PAGE: u64 = 4096;
/// The version of the layout.
pub const VERSION: u32 = 1;
/// The least bytes of an extent, and what their number is a multiple of.
pub const EXTENT_BYTES_MIN: u64 = 2 << 20;
/// The most peers that a pool can have.
pub const PEERS_MAX: u32 = 1024;
/// The most regions that can begin in one extent.
pub const ROWS_MAX: u32 = 47;
/// The most identities that an owner can have expelled.
pub const EXPELLED_MAX: usize = EXPELLED_LINES as usize * EXPELLED_PER_LINE;

pub(crate) const EXPELLED_LINES: u32 = 16;
pub(crate) const EXPELLED_PER_LINE: usize = 7;

const MAGIC: [u8; 8] = *b"SNOWCXL\0";
const LINE: u64 = crate::lines::LINE;
const LINE_BYTES: usize = LINE as usize;
/// Lines of an extent's page before the expelled identities.
const EXPELLED_AT: u64 = LINE * (1 + ROWS_MAX as u64);

/// The bytes of one line.
pub type LineBytes = [u8; LINE_BYTES];

/// Why a line was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineError {
    /// Its checksum is wrong: it was never written, is being written, or is damaged.
    Crc,
    /// It is a line of another kind, or holds a value that none has.
    Kind,
}

/// The first line of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The pool's random name.
    pub uuid: [u8; 16],
    /// The bytes of the device or file that the pool uses.
    pub size: u64,
    /// The bytes of an extent.
    pub extent_bytes: u64,
    /// The number of extents.
    pub extents: u32,
    /// The number of peers that can use the pool at a time.
    pub peers: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSuperblock {
    magic: [u8; 8],
    version: U32,
    extents: U32,
    uuid: [u8; 16],
    size: U64,
    extent_bytes: U64,
    peers: U32,
    reserved: [u8; 8],
    crc: U32,
}

/// Who owns an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerRecord {
    /// The pool.
    pub uuid: [u8; 16],
    /// The extent.
    pub extent: u32,
    /// Whether it has an owner. Without one, the rest tells who the last one was.
    pub owned: bool,
    /// The incarnation of the owner.
    pub incarnation: u64,
    /// The epoch in which the master gave the extent to it. It only grows.
    pub epoch: u64,
    /// The hash of the key in the exports of the owner.
    pub key_hash: [u8; 16],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawOwner {
    magic: [u8; 4],
    state: U32,
    uuid: [u8; 16],
    incarnation: U64,
    epoch: U64,
    key_hash: [u8; 16],
    extent: U32,
    crc: U32,
}

/// Who uses a peer page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerRecord {
    /// The pool.
    pub uuid: [u8; 16],
    /// The number of the peer's page.
    pub slot: u32,
    /// Whether the peer uses the pool. If not, the rest tells who the last one was.
    pub present: bool,
    /// By what owners expel it.
    pub identity: u64,
    /// The epoch in which the master gave the page to it. It only grows.
    pub epoch: u64,
    /// A number that changes while the peer is polled.
    pub beat: u64,
    /// The [lock domain](super::Pool::lock_domain) of its process, which holds the lock on the page there; 0:
    /// it holds none.
    pub domain: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawPeer {
    magic: [u8; 4],
    state: U32,
    uuid: [u8; 16],
    identity: U64,
    epoch: U64,
    beat: U64,
    domain: U64,
    slot: U32,
    crc: U32,
}

/// A region that its owner exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whether peers may use the region.
    pub granted: bool,
    /// The rights of peers.
    pub rights: Access,
    /// A random number that no other region has.
    pub number: u64,
    /// Where the region begins in the pool, in bytes.
    pub base: u64,
    /// The length of the region, in bytes.
    pub len: u64,
    /// The number of identities that the owner has expelled.
    pub expelled: u32,
    /// The epoch of the owner that has written it.
    pub epoch: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawRow {
    magic: [u8; 4],
    state: U32,
    number: U64,
    base: U64,
    len: U64,
    expelled: U32,
    rights: u8,
    reserved: [u8; 15],
    epoch: U64,
    crc: U32,
}

/// Identities that an owner has expelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expelled {
    /// The identities; 0 where there is none.
    pub identities: [u64; EXPELLED_PER_LINE],
    /// The lower half of the epoch of the owner that has written the line, which has no room for all of it.
    pub epoch: u32,
}

/// What a peer is using: the region, and the extents that it lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// The number of the region.
    pub number: u64,
    /// The first extent of the region.
    pub first: u32,
    /// The number of its extents.
    pub count: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawUse {
    magic: [u8; 4],
    first: U32,
    number: U64,
    count: U32,
    reserved: [u8; 40],
    crc: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawExpelled {
    identities: [U64; EXPELLED_PER_LINE],
    epoch: U32,
    crc: U32,
}

const OWNER: [u8; 4] = *b"CXLo";
const PEER: [u8; 4] = *b"CXLp";
const ROW: [u8; 4] = *b"CXLr";
const USE: [u8; 4] = *b"CXLu";

/// The line of a raw structure, with its checksum.
fn sealed<T: IntoBytes + Immutable>(raw: &T) -> LineBytes {
    let mut line = [0; LINE_BYTES];
    line.copy_from_slice(raw.as_bytes());
    let crc = crc32c::crc32c(&line[..LINE_BYTES - 4]);
    line[LINE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    line
}

/// The raw structure of a line whose checksum is right.
fn opened<T: FromBytes + KnownLayout + Immutable + Unaligned>(line: &LineBytes) -> Result<T, LineError> {
    let (body, crc) = line.split_at(LINE_BYTES - 4);
    if crc32c::crc32c(body).to_le_bytes() != crc {
        return Err(LineError::Crc);
    }
    T::read_from_bytes(line).map_err(|_| LineError::Kind)
}

const fn flag(state: u32) -> Result<bool, LineError> {
    match state {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(LineError::Kind),
    }
}

fn are_zero(bytes: &[u8]) -> Result<(), LineError> {
    if bytes.iter().all(|&byte| byte == 0) { Ok(()) } else { Err(LineError::Kind) }
}

impl Superblock {
    /// The layout of a pool in `size` bytes.
    ///
    /// # Errors
    /// `Setting` for a size of extents or a number of peers that no pool has; `TooSmall`.
    pub fn of(uuid: [u8; 16], size: u64, extent_bytes: u64, peers: u32) -> Result<Self, PoolError> {
        let wrong = |what, value| Err(PoolError::Setting { what, value });
        if extent_bytes < EXTENT_BYTES_MIN || !extent_bytes.is_multiple_of(EXTENT_BYTES_MIN) {
            return wrong("extent_bytes", extent_bytes);
        }
        if peers == 0 || peers > PEERS_MAX {
            return wrong("peers", u64::from(peers));
        }
        let most = u32::try_from(size / extent_bytes).unwrap_or(u32::MAX - PEERS_MAX - 1);
        let mut block = Self { uuid, size, extent_bytes, extents: most.min(u32::MAX - PEERS_MAX - 1), peers };
        // At most one extent per 512 pages of records has to go.
        while block.extents > 0 && block.end().is_none_or(|end| end > size) {
            block.extents -= 1;
        }
        if block.extents == 0 {
            let needed = front_bytes(1, peers).saturating_add(extent_bytes);
            return Err(PoolError::TooSmall { bytes: size, needed });
        }
        Ok(block)
    }

    /// Parses the first line of a pool that has `size` bytes here.
    ///
    /// # Errors
    /// `NotAPool`, `Version`, `Crc`; `Layout` for values that no pool has; `TooSmall` when the pool is larger
    /// than `size`.
    pub fn parse(line: &LineBytes, size: u64) -> Result<Self, PoolError> {
        if line[..8] != MAGIC {
            return Err(PoolError::NotAPool);
        }
        let raw = RawSuperblock::read_from_bytes(line).map_err(|_| PoolError::NotAPool)?;
        if raw.version.get() != VERSION {
            return Err(PoolError::Version { found: raw.version.get() });
        }
        let raw: RawSuperblock = opened(line).map_err(|_| PoolError::Crc)?;
        let block = Self {
            uuid: raw.uuid,
            size: raw.size.get(),
            extent_bytes: raw.extent_bytes.get(),
            extents: raw.extents.get(),
            peers: raw.peers.get(),
        };
        are_zero(&raw.reserved).map_err(|_| PoolError::Layout)?;
        // A pool of this size has these extents, and no others.
        if Self::of(block.uuid, block.size, block.extent_bytes, block.peers).ok() != Some(block) {
            return Err(PoolError::Layout);
        }
        if block.size > size {
            return Err(PoolError::TooSmall { bytes: size, needed: block.size });
        }
        Ok(block)
    }

    /// The line.
    #[must_use]
    pub fn write(&self) -> LineBytes {
        sealed(&RawSuperblock {
            magic: MAGIC,
            version: U32::new(VERSION),
            extents: U32::new(self.extents),
            uuid: self.uuid,
            size: U64::new(self.size),
            extent_bytes: U64::new(self.extent_bytes),
            peers: U32::new(self.peers),
            reserved: [0; 8],
            crc: U32::ZERO,
        })
    }

    /// Where the extents begin, in bytes.
    #[must_use]
    pub fn front_bytes(&self) -> u64 {
        front_bytes(self.extents, self.peers)
    }

    fn end(&self) -> Option<u64> {
        self.front_bytes().checked_add(u64::from(self.extents).checked_mul(self.extent_bytes)?)
    }

    /// Where an extent begins, in bytes.
    #[must_use]
    pub fn extent_at(&self, extent: u32) -> u64 {
        self.front_bytes() + u64::from(extent) * self.extent_bytes
    }

    /// The first extent of a range and the number of extents that it touches; `None` when it does not lie in
    /// the extents.
    #[must_use]
    pub fn extents_of(&self, base: u64, len: u64) -> Option<(u32, u32)> {
        let from = base.checked_sub(self.front_bytes())?;
        let last = from.checked_add(len)?.checked_sub(1)? / self.extent_bytes;
        let first = from / self.extent_bytes;
        let inside = len > 0 && last < u64::from(self.extents);
        inside.then_some((first as u32, (last - first + 1) as u32))
    }

    /// Where the record of an extent's owner is, in bytes.
    pub(crate) fn owner_at(&self, extent: u32) -> u64 {
        PAGE * (1 + u64::from(extent))
    }

    pub(crate) fn row_at(&self, extent: u32, row: u32) -> u64 {
        self.owner_at(extent) + LINE * (1 + u64::from(row))
    }

    pub(crate) fn expelled_at(&self, extent: u32, line: u32) -> u64 {
        self.owner_at(extent) + EXPELLED_AT + LINE * u64::from(line)
    }

    pub(crate) fn peer_at(&self, slot: u32) -> u64 {
        PAGE * (1 + u64::from(self.extents) + u64::from(slot))
    }

    pub(crate) fn use_at(&self, slot: u32) -> u64 {
        self.peer_at(slot) + LINE
    }
}

/// Where extents begin: devices with pages of 2 MiB can be protected from there on.
fn front_bytes(extents: u32, peers: u32) -> u64 {
    (PAGE * (1 + u64::from(extents) + u64::from(peers))).next_multiple_of(EXTENT_BYTES_MIN)
}

impl OwnerRecord {
    /// Parses the record of an owner.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn parse(line: &LineBytes) -> Result<Self, LineError> {
        let raw: RawOwner = opened(line)?;
        if raw.magic != OWNER {
            return Err(LineError::Kind);
        }
        Ok(Self {
            uuid: raw.uuid,
            extent: raw.extent.get(),
            owned: flag(raw.state.get())?,
            incarnation: raw.incarnation.get(),
            epoch: raw.epoch.get(),
            key_hash: raw.key_hash,
        })
    }

    /// The line.
    #[must_use]
    pub fn write(&self) -> LineBytes {
        sealed(&RawOwner {
            magic: OWNER,
            state: U32::new(u32::from(self.owned)),
            uuid: self.uuid,
            incarnation: U64::new(self.incarnation),
            epoch: U64::new(self.epoch),
            key_hash: self.key_hash,
            extent: U32::new(self.extent),
            crc: U32::ZERO,
        })
    }
}

impl PeerRecord {
    /// Parses the record of a peer.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn parse(line: &LineBytes) -> Result<Self, LineError> {
        let raw: RawPeer = opened(line)?;
        if raw.magic != PEER {
            return Err(LineError::Kind);
        }
        Ok(Self {
            uuid: raw.uuid,
            slot: raw.slot.get(),
            present: flag(raw.state.get())?,
            identity: raw.identity.get(),
            epoch: raw.epoch.get(),
            beat: raw.beat.get(),
            domain: raw.domain.get(),
        })
    }

    /// The line.
    #[must_use]
    pub fn write(&self) -> LineBytes {
        sealed(&RawPeer {
            magic: PEER,
            state: U32::new(u32::from(self.present)),
            uuid: self.uuid,
            identity: U64::new(self.identity),
            epoch: U64::new(self.epoch),
            beat: U64::new(self.beat),
            domain: U64::new(self.domain),
            slot: U32::new(self.slot),
            crc: U32::ZERO,
        })
    }
}

impl Row {
    /// A row that grants nothing.
    pub const FREE: Self =
        Self { granted: false, rights: Access::empty(), number: 0, base: 0, len: 0, expelled: 0, epoch: 0 };

    /// Parses the row of a region.
    ///
    /// # Errors
    /// [`LineError`].
    pub fn parse(line: &LineBytes) -> Result<Self, LineError> {
        let raw: RawRow = opened(line)?;
        if raw.magic != ROW {
            return Err(LineError::Kind);
        }
        are_zero(&raw.reserved)?;
        Ok(Self {
            granted: flag(raw.state.get())?,
            rights: Access::from_bits(raw.rights).ok_or(LineError::Kind)?,
            number: raw.number.get(),
            base: raw.base.get(),
            len: raw.len.get(),
            expelled: raw.expelled.get(),
            epoch: raw.epoch.get(),
        })
    }

    /// The line.
    #[must_use]
    pub fn write(&self) -> LineBytes {
        sealed(&RawRow {
            magic: ROW,
            state: U32::new(u32::from(self.granted)),
            number: U64::new(self.number),
            base: U64::new(self.base),
            len: U64::new(self.len),
            expelled: U32::new(self.expelled),
            rights: self.rights.bits(),
            reserved: [0; 15],
            epoch: U64::new(self.epoch),
            crc: U32::ZERO,
        })
    }
}

impl Use {
    /// The line of a peer that uses nothing.
    pub const NONE: LineBytes = [0; LINE_BYTES];

    /// Parses what a peer uses; `None`: nothing.
    ///
    /// # Errors
    /// [`LineError`]: the peer counts as using everything.
    pub fn parse(line: &LineBytes) -> Result<Option<Self>, LineError> {
        if *line == Self::NONE {
            return Ok(None);
        }
        let raw: RawUse = opened(line)?;
        if raw.magic != USE {
            return Err(LineError::Kind);
        }
        are_zero(&raw.reserved)?;
        Ok(Some(Self { number: raw.number.get(), first: raw.first.get(), count: raw.count.get() }))
    }

    /// The line.
    #[must_use]
    pub fn write(&self) -> LineBytes {
        sealed(&RawUse {
            magic: USE,
            first: U32::new(self.first),
            number: U64::new(self.number),
            count: U32::new(self.count),
            reserved: [0; 40],
            crc: U32::ZERO,
        })
    }

    /// Whether the region lies in one of `count` extents from `first` on.
    #[must_use]
    pub fn touches(&self, first: u32, count: u32) -> bool {
        let end = |first: u32, count: u32| u64::from(first) + u64::from(count);
        u64::from(self.first) < end(first, count) && u64::from(first) < end(self.first, self.count)
    }
}

/// Parses a line of expelled identities; 0 stands for none.
///
/// # Errors
/// [`LineError`].
pub fn parse_expelled(line: &LineBytes) -> Result<Expelled, LineError> {
    let raw: RawExpelled = opened(line)?;
    Ok(Expelled { identities: raw.identities.map(U64::get), epoch: raw.epoch.get() })
}

/// The line of expelled identities.
#[must_use]
pub fn write_expelled(expelled: Expelled) -> LineBytes {
    let Expelled { identities, epoch } = expelled;
    sealed(&RawExpelled { identities: identities.map(U64::new), epoch: U32::new(epoch), crc: U32::ZERO })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK: Superblock =
        Superblock { uuid: [7; 16], size: 64 << 20, extent_bytes: 2 << 20, extents: 31, peers: 64 };

    fn resealed(mut line: LineBytes) -> LineBytes {
        let crc = crc32c::crc32c(&line[..60]);
        line[60..].copy_from_slice(&crc.to_le_bytes());
        line
    }

    #[test]
    fn the_layout_fits_and_uses_what_is_there() {
        assert_eq!(Superblock::of([7; 16], 64 << 20, 2 << 20, 64).expect("room"), BLOCK);
        assert_eq!(BLOCK.front_bytes(), 2 << 20);
        for size in [4 << 20, (4 << 20) + 1, 1 << 30, 1 << 40, u64::MAX] {
            let block = Superblock::of([0; 16], size, 2 << 20, 1024).map_err(|error| error.to_string());
            let Ok(block) = block else {
                assert!(size < 8 << 20, "{block:?}");
                continue;
            };
            let end = block.end().expect("no overflow");
            assert!(end <= size && block.use_at(block.peers - 1) + LINE <= block.front_bytes());
            assert!(size - end < 3 * (2 << 20) || size > 1 << 50, "{size}: nothing is wasted");
        }
        for (extent_bytes, peers) in [(0, 1), (1 << 20, 1), ((2 << 20) + 1, 1), (2 << 20, 0), (2 << 20, 1025)]
        {
            let refused = Superblock::of([0; 16], 1 << 30, extent_bytes, peers);
            assert!(matches!(refused, Err(PoolError::Setting { .. })), "{extent_bytes} {peers}");
        }
        let small = Superblock::of([0; 16], (4 << 20) - 1, 2 << 20, 1);
        assert!(matches!(small, Err(PoolError::TooSmall { needed: 4_194_304, .. })), "{small:?}");
    }

    #[test]
    fn a_superblock_that_is_not_ours_is_refused_by_name() {
        let line = BLOCK.write();
        assert_eq!(Superblock::parse(&line, BLOCK.size).expect("just written"), BLOCK);
        let larger = Superblock::parse(&line, BLOCK.size - 1);
        assert!(matches!(larger, Err(PoolError::TooSmall { .. })), "{larger:?}");
        let mut other = line;
        other[8] = 2;
        assert!(matches!(Superblock::parse(&other, u64::MAX), Err(PoolError::Version { found: 2 })));
        assert!(matches!(Superblock::parse(&[0; 64], u64::MAX), Err(PoolError::NotAPool)));
        for at in 12..64 {
            let mut bent = line;
            bent[at] ^= 1;
            assert!(matches!(Superblock::parse(&bent, u64::MAX), Err(PoolError::Crc)), "byte {at}");
            // With a right checksum, only the name may differ.
            let parsed = Superblock::parse(&resealed(bent), u64::MAX);
            match at {
                16..32 => assert_ne!(parsed.expect("another pool").uuid, BLOCK.uuid),
                _ if at >= 60 => assert!(parsed.is_ok()),
                // A size, or a number of peers, that leaves the extents as they are.
                _ if parsed.is_ok() => assert!((32..40).contains(&at) || (48..52).contains(&at), "byte {at}"),
                _ => {}
            }
        }
        let huge = Superblock { size: u64::MAX, ..BLOCK };
        assert!(Superblock::parse(&huge.write(), u64::MAX).is_err());
    }

    #[test]
    fn a_range_is_in_the_extents_that_it_touches() {
        let (front, extent) = (BLOCK.front_bytes(), BLOCK.extent_bytes);
        assert_eq!(BLOCK.extents_of(front, 1), Some((0, 1)));
        assert_eq!(BLOCK.extents_of(front + extent - 1, 2), Some((0, 2)));
        assert_eq!(BLOCK.extents_of(front, 31 * extent), Some((0, 31)));
        for (base, len) in
            [(front, 31 * extent + 1), (front - 1, 2), (front, 0), (u64::MAX, 2), (front, u64::MAX), (0, 64)]
        {
            assert_eq!(BLOCK.extents_of(base, len), None, "{base} {len}");
        }
    }

    #[test]
    fn a_use_touches_the_extents_that_it_names() {
        let used = Use { number: 1, first: 3, count: 2 };
        assert!(used.touches(3, 1) && used.touches(4, 9) && used.touches(0, 4));
        assert!(!used.touches(0, 3) && !used.touches(5, 1) && !used.touches(3, 0));
        let all = Use { number: 1, first: u32::MAX, count: u32::MAX };
        assert!(!all.touches(0, 5));
    }

    proptest! {
        #[test]
        fn lines_come_back_and_every_bent_bit_is_noticed(
            uuid: [u8; 16], a: u64, b: u64, c: u64, number: u32, state: bool, hash: [u8; 16], bit in 0_usize..512,
        ) {
            let owner = OwnerRecord { uuid, extent: number, owned: state, incarnation: a, epoch: b, key_hash: hash };
            let peer = PeerRecord { uuid, slot: number, present: state, identity: a, epoch: b, beat: c, domain: a };
            let row = Row { granted: state, rights: Access::REMOTE_READ, number: a, base: b, len: c, expelled: number, epoch: c };
            let used = Use { number: a, first: number, count: number };
            let expelled = Expelled { identities: [a, b, c, 0, 0, 0, a], epoch: number };
            prop_assert_eq!(OwnerRecord::parse(&owner.write()), Ok(owner));
            prop_assert_eq!(PeerRecord::parse(&peer.write()), Ok(peer));
            prop_assert_eq!(Row::parse(&row.write()), Ok(row));
            prop_assert_eq!(Use::parse(&used.write()), Ok(Some(used)));
            prop_assert_eq!(parse_expelled(&write_expelled(expelled)), Ok(expelled));
            let bent = |mut line: LineBytes| { line[bit / 8] ^= 1 << (bit % 8); line };
            prop_assert_eq!(OwnerRecord::parse(&bent(owner.write())), Err(LineError::Crc));
            prop_assert_eq!(PeerRecord::parse(&bent(peer.write())), Err(LineError::Crc));
            prop_assert_eq!(Row::parse(&bent(row.write())), Err(LineError::Crc));
            prop_assert_eq!(Use::parse(&bent(used.write())), Err(LineError::Crc));
            prop_assert_eq!(parse_expelled(&bent(write_expelled(expelled))), Err(LineError::Crc));
            // A line of another kind has a good checksum, and is refused all the same.
            prop_assert_eq!(OwnerRecord::parse(&peer.write()), Err(LineError::Kind));
            prop_assert_eq!(PeerRecord::parse(&row.write()), Err(LineError::Kind));
            prop_assert_eq!(Row::parse(&owner.write()), Err(LineError::Kind));
            prop_assert_eq!(Use::parse(&row.write()), Err(LineError::Kind));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(line: [u8; 32], more: [u8; 32], seal: bool) {
            let mut bytes = [0; 64];
            bytes[..32].copy_from_slice(&line);
            bytes[32..].copy_from_slice(&more);
            let bytes = if seal { resealed(bytes) } else { bytes };
            let _ = (OwnerRecord::parse(&bytes), PeerRecord::parse(&bytes), Row::parse(&bytes), Use::parse(&bytes));
            bytes.iter().for_each(drop);
            prop_assert!(Superblock::parse(&bytes, u64::MAX).is_err());
        }
    }
}
