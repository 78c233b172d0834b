//! The shelf: which objects are on disks, and where. The objects in memory are in [`crate::objects`]; an
//! object may be in both.
//!
//! ```text
//!   table  hash of the key ─▶ index
//!   slots  which are taken
//!   slab   [record][record]…     72 bytes: key (inline to 38 bytes), generation, length, checksum, disk, locator
//! ```
//!
//! There is at most one record per key. A record exists only when the object is written to the disk. It is
//! the only thing that the master stores about an object that is on a disk alone; 4 bytes more, in a list of
//! the disk, find the objects of an extent.

use alloc::vec::Vec;
use core::hash::{BuildHasher, Hasher};

use foldhash::quality::FixedState;
use serde::{Deserialize, Serialize};

use crate::chunks::stored_len;
use crate::objects::table::{BUCKETS_PER_TIMEOUT, SLOT_BYTES, Table};
use crate::objects::{KeyBytes, short};
use crate::slab::{Slots, Values};
use crate::snapshot::{Packed, take};
use crate::{FullKey, SegmentNo, TenantNo};

/// An object on a disk. 72 bytes.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) key: KeyBytes,
    pub(crate) generation: u64,
    pub(crate) locator: u64,
    pub(crate) len: u32,
    /// CRC-32C of the data, bound to key and generation.
    pub(crate) checksum: u32,
    pub(crate) disk: SegmentNo,
    pub(crate) tenant: TenantNo,
    /// How often it was read from the disk, as far as that was counted.
    pub(crate) hits: u8,
}

const _: () = assert!(size_of::<Record>() <= 72);

impl Record {
    /// What free slots read as.
    const VACANT: Self = Self {
        key: KeyBytes::EMPTY,
        generation: 0,
        locator: 0,
        len: 0,
        checksum: 0,
        disk: SegmentNo::NONE,
        tenant: TenantNo::DEFAULT,
        hits: 0,
    };

    pub(crate) fn full_key(&self) -> FullKey<'_> {
        FullKey { tenant: self.tenant, key: self.key.as_slice() }
    }

    pub(crate) fn is_vacant(&self) -> bool {
        self.disk == SegmentNo::NONE
    }
}

impl Packed for Record {
    const VACANT: Self = Self::VACANT;

    fn pack(&self, to: &mut Vec<u8>) {
        let Self { key, generation, locator, len, checksum, disk, tenant, hits } = self;
        to.extend_from_slice(&disk.get().to_le_bytes());
        if self.is_vacant() {
            return;
        }
        let key = key.as_slice();
        to.extend_from_slice(&generation.to_le_bytes());
        to.extend_from_slice(&locator.to_le_bytes());
        to.extend_from_slice(&len.to_le_bytes());
        to.extend_from_slice(&checksum.to_le_bytes());
        to.extend_from_slice(&tenant.get().to_le_bytes());
        to.push(*hits);
        to.extend_from_slice(&(key.len() as u16).to_le_bytes());
        to.extend_from_slice(key);
    }

    fn unpack(from: &mut &[u8]) -> Option<Self> {
        let disk = SegmentNo::new(take!(u32, from));
        if disk == SegmentNo::NONE {
            return Some(Self::VACANT);
        }
        let (generation, locator, len) = (take!(u64, from), take!(u64, from), take!(u32, from));
        let (checksum, tenant) = (take!(u32, from), TenantNo::new(take!(u16, from)));
        let (hits, key_len) = (take!(u8, from), take!(u16, from));
        let (key, rest) = from.split_at_checked(key_len.into())?;
        *from = rest;
        Some(Self { key: KeyBytes::new(key), generation, locator, len, checksum, disk, tenant, hits })
    }
}

/// All objects on disks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Shelf {
    slots: Slots,
    records: Values<Record>,
    #[serde(skip, default = "Table::new")]
    table: Table,
    #[serde(skip)]
    hasher: FixedState,
    heap_bytes: usize,
    /// Bytes of objects, as they are stored; indexed by tenant.
    bytes: Vec<u64>,
}

impl Shelf {
    pub(crate) fn new(hash_seed: u64) -> Self {
        Self {
            slots: Slots::new(),
            records: Values::new(Record::VACANT),
            table: Table::new(),
            hasher: FixedState::with_seed(hash_seed),
            heap_bytes: 0,
            bytes: Vec::new(),
        }
    }

    /// Makes the table that a snapshot leaves out.
    pub(crate) fn reindex(&mut self, hash_seed: u64) {
        self.hasher = FixedState::with_seed(hash_seed);
        self.table.reserve(self.slots.taken() as usize);
        for index in 0..self.slots.end() {
            let record = &self.records[index];
            if !record.is_vacant() {
                let hash = short(self.hash(record.full_key()));
                self.table.insert(hash, index);
            }
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.slots.taken() == 0
    }

    /// Number of objects.
    pub(crate) const fn len(&self) -> u32 {
        self.slots.taken()
    }

    /// One more than the highest slot that may be taken.
    pub(crate) const fn slots(&self) -> u32 {
        self.slots.end()
    }

    /// Bytes of a tenant's objects.
    pub(crate) fn bytes_of(&self, tenant: TenantNo) -> u64 {
        self.bytes.get(tenant.index()).copied().unwrap_or(0)
    }

    /// Bytes of all objects.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }

    pub(crate) fn find(&self, key: FullKey<'_>) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        self.table.find(short(self.hash(key)), |index| self.records[index].full_key() == key)
    }

    /// The record of one generation of a key.
    pub(crate) fn find_generation(&self, key: FullKey<'_>, generation: u64) -> Option<u32> {
        self.find(key).filter(|index| self.records[*index].generation == generation)
    }

    /// The record at an index. A free one reads as vacant.
    pub(crate) fn record(&self, index: u32) -> &Record {
        &self.records[index]
    }

    /// Adds a record. There must be none with its key.
    pub(crate) fn insert(&mut self, record: Record) -> u32 {
        debug_assert!(self.find(record.full_key()).is_none(), "a key has one record at most");
        let hash = short(self.hash(record.full_key()));
        self.heap_bytes += record.key.heap_bytes();
        let tenant = record.tenant.index();
        if self.bytes.len() <= tenant {
            self.bytes.resize(tenant + 1, 0);
        }
        self.bytes[tenant] += stored_len(record.len.into());
        let index = self.slots.take();
        self.records.put(index, record);
        self.table.insert(hash, index);
        index
    }

    /// Counts that an object was read from its disk; returns how often it was.
    pub(crate) fn hit(&mut self, index: u32) -> u8 {
        let record = &mut self.records[index];
        record.hits = record.hits.saturating_add(1);
        record.hits
    }

    /// The object is at another place now.
    pub(crate) fn moved(&mut self, index: u32, disk: SegmentNo, locator: u64) {
        let record = &mut self.records[index];
        (record.disk, record.locator) = (disk, locator);
    }

    /// Removes a record.
    pub(crate) fn remove(&mut self, index: u32) -> Record {
        let hash = short(self.hash(self.records[index].full_key()));
        self.table.remove(hash, index);
        let record = core::mem::replace(&mut self.records[index], Record::VACANT);
        self.heap_bytes -= record.key.heap_bytes();
        self.bytes[record.tenant.index()] -= stored_len(record.len.into());
        if let Some(page) = self.slots.give_back(index) {
            self.records.close(page);
        }
        record
    }

    /// Returns some of the memory that is no longer needed.
    pub(crate) fn tidy(&mut self) {
        self.table.shrink(BUCKETS_PER_TIMEOUT);
    }

    pub(crate) const fn is_shrinking(&self) -> bool {
        self.table.is_shrinking()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.slots.memory_bytes()
            + self.records.memory_bytes()
            + self.table.memory_bytes()
            + self.heap_bytes
            + self.bytes.capacity() * size_of::<u64>()
    }

    /// Memory of the existing records without vacant slots.
    pub(crate) fn live_bytes(&self) -> usize {
        const EXTENT_BYTES: usize = 2 * size_of::<u32>();
        self.len() as usize * (size_of::<Record>() + 2 * SLOT_BYTES + EXTENT_BYTES) + self.heap_bytes
    }

    fn hash(&self, key: FullKey<'_>) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(key.key);
        hasher.finish() ^ u64::from(key.tenant.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}
