//! Entries and dead lists: what headers and footers say about objects.

use alloc::vec::Vec;

use super::bytes::{Append, Reader};
use super::{Geometry, OBJECT_BYTES_MIN};
use crate::wire::KEY_BYTES_MAX;

const ENTRY_BYTES: usize = 8 + 8 + 4 + 4 + 4 + 2;
const DEAD_BYTES: usize = 8 + 8 + 8 + 2;

/// An object in an extent: what a master needs to adopt it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its tenant: a number that means the same after a restart of the master.
    pub tenant: u64,
    /// Its key, 1 to 1,024 bytes.
    pub key: &'a [u8],
    /// Its generation.
    pub generation: u64,
    /// Bytes of its data, without the trailer.
    pub len: u32,
    /// CRC-32C of its data, not bound to key and generation.
    pub crc32c: u32,
    /// Where its image begins in the extent.
    pub offset: u32,
}

/// A tombstone: this generation of the key was removed, and images of it may be in extents up to `upto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dead<'a> {
    /// The tenant of the object.
    pub tenant: u64,
    /// Its key, 1 to 1,024 bytes.
    pub key: &'a [u8],
    /// Its generation.
    pub generation: u64,
    /// The last sequence whose extent may contain an image of it.
    pub upto: u64,
}

impl Dead<'_> {
    /// Bytes that this tombstone takes in a dead list.
    #[must_use]
    pub const fn bytes(key_bytes: usize) -> usize {
        DEAD_BYTES + key_bytes
    }
}

impl Entry<'_> {
    /// Bytes that this entry takes in a list.
    #[must_use]
    pub const fn bytes(key_bytes: usize) -> usize {
        ENTRY_BYTES + key_bytes
    }
}

/// Encoded entries and dead lists of a batch or of an extent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    entries: u32,
    dead: u32,
    entry_bytes: Vec<u8>,
    dead_bytes: Vec<u8>,
}

impl Lists {
    /// Empty lists.
    #[must_use]
    pub const fn new() -> Self {
        Self { entries: 0, dead: 0, entry_bytes: Vec::new(), dead_bytes: Vec::new() }
    }

    /// Appends an entry. Its key has 1 to 1,024 bytes, and its offset is higher than those before.
    pub fn push(&mut self, entry: &Entry<'_>) {
        self.entries += 1;
        let out = &mut self.entry_bytes;
        out.put_u64(entry.tenant);
        out.put_u64(entry.generation);
        out.put_u32(entry.len);
        out.put_u32(entry.crc32c);
        out.put_u32(entry.offset);
        out.put_u16(entry.key.len() as u16);
        out.extend_from_slice(entry.key);
    }

    /// Appends a tombstone. Its key has 1 to 1,024 bytes.
    pub fn push_dead(&mut self, dead: &Dead<'_>) {
        self.dead += 1;
        let out = &mut self.dead_bytes;
        out.put_u64(dead.tenant);
        out.put_u64(dead.generation);
        out.put_u64(dead.upto);
        out.put_u16(dead.key.len() as u16);
        out.extend_from_slice(dead.key);
    }

    /// Appends those of a later batch.
    pub fn append(&mut self, later: &Self) {
        self.entries += later.entries;
        self.dead += later.dead;
        self.entry_bytes.extend_from_slice(&later.entry_bytes);
        self.dead_bytes.extend_from_slice(&later.dead_bytes);
    }

    /// Bytes of both lists.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.entry_bytes.len() + self.dead_bytes.len()
    }

    /// Number of entries.
    #[must_use]
    pub const fn entries(&self) -> u32 {
        self.entries
    }

    /// Number of tombstones.
    #[must_use]
    pub const fn dead(&self) -> u32 {
        self.dead
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.entry_bytes);
        out.extend_from_slice(&self.dead_bytes);
    }
}

/// Decodes `counts` entries and tombstones; images have to be in order and within `from..to`.
pub(super) fn take<'a>(
    bytes: &'a [u8],
    counts: (u32, u32),
    geometry: &Geometry,
    (mut from, to): (u32, u32),
) -> Option<(Vec<Entry<'a>>, Vec<Dead<'a>>)> {
    let (entries, dead) = (counts.0 as usize, counts.1 as usize);
    let least = entries.checked_mul(ENTRY_BYTES + 1)?.checked_add(dead.checked_mul(DEAD_BYTES + 1)?)?;
    if least > bytes.len() {
        return None;
    }
    let mut reader = Reader(bytes);
    let mut images = Vec::with_capacity(entries);
    for _ in 0..entries {
        let (tenant, generation) = (reader.u64()?, reader.u64()?);
        let (len, crc32c, offset) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let key = key(&mut reader)?;
        let image_bytes = geometry.image_bytes(u64::from(len));
        let end = offset.checked_add(image_bytes)?;
        let short = u64::from(len) < OBJECT_BYTES_MIN || image_bytes == 0;
        if short || offset < from || end > to || !offset.is_multiple_of(geometry.block_bytes) {
            return None;
        }
        from = end;
        images.push(Entry { tenant, key, generation, len, crc32c, offset });
    }
    let mut removed = Vec::with_capacity(dead);
    for _ in 0..dead {
        let (tenant, generation, upto) = (reader.u64()?, reader.u64()?, reader.u64()?);
        removed.push(Dead { tenant, key: key(&mut reader)?, generation, upto });
    }
    Some((images, removed))
}

fn key<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let len = usize::from(reader.u16()?);
    if (1..=KEY_BYTES_MAX).contains(&len) { reader.bytes(len) } else { None }
}
