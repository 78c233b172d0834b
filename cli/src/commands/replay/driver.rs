//! Replays one request after the other: looks up the prefix, reads and verifies it, stores what is missing,
//! and counts everything.

use std::fmt;
use std::time::Instant;

use crate::content::{Content, Mismatch};
use crate::histogram::Histogram;

/// What the replay needs from a store. The cluster implements it; the tests use a map.
pub(super) trait BlockStore {
    /// Most blocks per get or put: the number of slots in the buffer.
    fn slots(&self) -> usize;
    /// Size of a block, and of a slot, bytes.
    fn block_bytes(&self) -> usize;
    /// Copies the beginning of a slot to `out`.
    fn read_slot(&self, index: usize, out: &mut [u8]) -> anyhow::Result<()>;
    /// Writes `block` into a slot.
    fn write_slot(&mut self, index: usize, block: &[u8]) -> anyhow::Result<()>;
    /// Reports which of the blocks exist.
    fn exists(&mut self, ids: &[u64], found: &mut Vec<bool>) -> anyhow::Result<()>;
    /// Reads block `i` into slot `i`.
    fn get(&mut self, ids: &[u64], results: &mut Vec<Got>) -> anyhow::Result<()>;
    /// Writes slot `i` as block `i`.
    fn put(&mut self, ids: &[u64], results: &mut Vec<Put>) -> anyhow::Result<()>;
}

/// The result of reading one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Got {
    /// The slot holds this many bytes of the block.
    Bytes(usize),
    /// The block does not exist any more.
    Miss,
    /// The store could not read it: a node ended, or a lease expired.
    Failed,
}

/// The result of writing one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// The block is readable.
    Stored,
    /// The block exists already.
    Exists,
    /// There is no space, even after eviction.
    NoRoom,
    /// The store could not write it.
    Failed,
}

/// Counts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) requests: u64,
    pub(super) block_refs: u64,
    pub(super) blocks_hit: u64,
    pub(super) blocks_put: u64,
    pub(super) verify_failures: u64,
    /// Blocks that existed at the lookup but not at the read.
    pub(super) get_misses: u64,
    pub(super) get_failures: u64,
    pub(super) put_exists: u64,
    pub(super) put_no_room: u64,
    pub(super) put_failures: u64,
    pub(super) bytes_read: u64,
    pub(super) bytes_written: u64,
}

impl Counters {
    /// Share of block references that were read correctly.
    pub(super) fn hit_rate(&self) -> f64 {
        self.hit_rate_since(&Self::default())
    }

    /// The same of the requests after those that `before` counts.
    pub(super) fn hit_rate_since(&self, before: &Self) -> f64 {
        let refs = self.block_refs - before.block_refs;
        if refs == 0 { 0.0 } else { (self.blocks_hit - before.blocks_hit) as f64 / refs as f64 }
    }
}

/// Latencies of batch calls.
#[derive(Clone, Debug, Default)]
pub(super) struct Latencies {
    pub(super) exists: Histogram,
    pub(super) get: Histogram,
    pub(super) put: Histogram,
}

/// The first wrong byte of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrongBlock {
    id: u64,
    len: usize,
    expected_len: usize,
    mismatch: Option<Mismatch>,
}

impl fmt::Display for WrongBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, len, expected_len, mismatch } = *self;
        match mismatch {
            Some(Mismatch { offset, expected, found }) => {
                write!(f, "block {id}, byte {offset}: {found:#04x} instead of {expected:#04x}")
            }
            None => write!(f, "block {id} has {len} bytes instead of {expected_len}"),
        }
    }
}

/// Replays requests against a store.
#[derive(Debug)]
pub(super) struct Driver<S> {
    store: S,
    content: Content,
    counters: Counters,
    latencies: Latencies,
    first_wrong: Option<WrongBlock>,
    block: Vec<u8>,
    present: Vec<bool>,
    missing: Vec<u64>,
    got: Vec<Got>,
    put: Vec<Put>,
}

impl<S: BlockStore> Driver<S> {
    /// A driver that has not replayed anything yet.
    pub(super) fn new(store: S, content: Content) -> Self {
        let block = vec![0; store.block_bytes()];
        Self {
            store,
            content,
            block,
            counters: Counters::default(),
            latencies: Latencies::default(),
            first_wrong: None,
            present: Vec::new(),
            missing: Vec::new(),
            got: Vec::new(),
            put: Vec::new(),
        }
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    pub(super) fn first_mismatch(&self) -> Option<WrongBlock> {
        self.first_wrong
    }

    pub(super) fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// Replays one request.
    pub(super) fn request(&mut self, ids: &[u64]) -> anyhow::Result<()> {
        self.counters.requests += 1;
        self.counters.block_refs += ids.len() as u64;
        if ids.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        self.store.exists(ids, &mut self.present)?;
        self.latencies.exists.record(started.elapsed());
        let prefix = self.present.iter().take_while(|present| **present).count();
        let hit = self.read_prefix(&ids[..prefix])?;
        self.counters.blocks_hit += hit as u64;

        // Existing blocks behind the prefix are kept: after an eviction, only the hole is filled.
        self.missing.clear();
        let wanted = ids[hit..].iter().zip(&self.present[hit..]).enumerate();
        self.missing.extend(
            wanted.filter(|(i, (_, present))| hit + i < prefix || !**present).map(|(_, (id, _))| *id),
        );
        self.store_missing()
    }

    /// Reads and verifies blocks until one is missing or wrong; returns how many were right.
    fn read_prefix(&mut self, ids: &[u64]) -> anyhow::Result<usize> {
        let mut hit = 0;
        for batch in ids.chunks(self.store.slots()) {
            let started = Instant::now();
            self.store.get(batch, &mut self.got)?;
            self.latencies.get.record(started.elapsed());
            let mut good = 0;
            for (slot, (&id, &got)) in batch.iter().zip(&self.got).enumerate() {
                match got {
                    Got::Bytes(len) => {
                        self.counters.bytes_read += len as u64;
                        if check(
                            &self.store,
                            &self.content,
                            slot,
                            id,
                            len,
                            &mut self.block,
                            &mut self.first_wrong,
                        )? {
                            // Right blocks behind a hole do not count, because a prefix has no holes.
                            good += usize::from(good == slot);
                        } else {
                            self.counters.verify_failures += 1;
                        }
                    }
                    Got::Miss => self.counters.get_misses += 1,
                    Got::Failed => self.counters.get_failures += 1,
                }
            }
            hit += good;
            if good < batch.len() {
                break;
            }
        }
        Ok(hit)
    }

    fn store_missing(&mut self) -> anyhow::Result<()> {
        for batch in self.missing.chunks(self.store.slots()) {
            for (slot, &id) in batch.iter().enumerate() {
                self.content.fill(id, &mut self.block);
                self.store.write_slot(slot, &self.block)?;
            }
            let started = Instant::now();
            self.store.put(batch, &mut self.put)?;
            self.latencies.put.record(started.elapsed());
            for put in &self.put {
                match put {
                    Put::Stored => {
                        self.counters.blocks_put += 1;
                        self.counters.bytes_written += self.block.len() as u64;
                    }
                    Put::Exists => self.counters.put_exists += 1,
                    Put::NoRoom => self.counters.put_no_room += 1,
                    Put::Failed => self.counters.put_failures += 1,
                }
            }
        }
        Ok(())
    }
}

/// Whether slot `slot` holds exactly the content of block `id`.
fn check<S: BlockStore>(
    store: &S,
    content: &Content,
    slot: usize,
    id: u64,
    len: usize,
    block: &mut [u8],
    first_wrong: &mut Option<WrongBlock>,
) -> anyhow::Result<bool> {
    let expected_len = block.len();
    let mismatch = if len == expected_len {
        store.read_slot(slot, block)?;
        content.verify(id, block).err()
    } else {
        None
    };
    if len == expected_len && mismatch.is_none() {
        return Ok(true);
    }
    first_wrong.get_or_insert(WrongBlock { id, len, expected_len, mismatch });
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, VecDeque};

    const BLOCK: usize = 100;

    /// A store of `capacity` blocks that forgets the oldest.
    struct Fake {
        slots: Vec<[u8; BLOCK]>,
        blocks: HashMap<u64, [u8; BLOCK]>,
        order: VecDeque<u64>,
        capacity: usize,
        evicted: u64,
        corrupt: Option<u64>,
        /// A block that exists at the lookup but not at the read.
        vanishing: Option<u64>,
    }

    impl Fake {
        fn driver(slots: usize, capacity: usize) -> Driver<Self> {
            let fake = Self {
                slots: vec![[0; BLOCK]; slots],
                blocks: HashMap::new(),
                order: VecDeque::new(),
                capacity,
                evicted: 0,
                corrupt: None,
                vanishing: None,
            };
            Driver::new(fake, Content::new(5))
        }
    }

    impl BlockStore for Fake {
        fn slots(&self) -> usize {
            self.slots.len()
        }
        fn block_bytes(&self) -> usize {
            BLOCK
        }
        fn read_slot(&self, index: usize, out: &mut [u8]) -> anyhow::Result<()> {
            out.copy_from_slice(&self.slots[index]);
            Ok(())
        }
        fn write_slot(&mut self, index: usize, block: &[u8]) -> anyhow::Result<()> {
            self.slots[index].copy_from_slice(block);
            Ok(())
        }
        fn exists(&mut self, ids: &[u64], found: &mut Vec<bool>) -> anyhow::Result<()> {
            found.clear();
            found.extend(ids.iter().map(|id| self.blocks.contains_key(id)));
            Ok(())
        }
        fn get(&mut self, ids: &[u64], results: &mut Vec<Got>) -> anyhow::Result<()> {
            results.clear();
            for (slot, id) in ids.iter().enumerate() {
                let block = self.blocks.get(id).filter(|_| self.vanishing != Some(*id));
                results.push(block.map_or(Got::Miss, |block| {
                    self.slots[slot] = *block;
                    self.slots[slot][BLOCK / 2] ^= u8::from(self.corrupt == Some(*id));
                    Got::Bytes(BLOCK)
                }));
            }
            Ok(())
        }
        fn put(&mut self, ids: &[u64], results: &mut Vec<Put>) -> anyhow::Result<()> {
            results.clear();
            for (slot, id) in ids.iter().enumerate() {
                let fresh = self.blocks.insert(*id, self.slots[slot]).is_none();
                results.push(if fresh { Put::Stored } else { Put::Exists });
                if fresh {
                    self.order.push_back(*id);
                }
                if self.order.len() > self.capacity {
                    self.blocks.remove(&self.order.pop_front().unwrap());
                    self.evicted += 1;
                }
            }
            Ok(())
        }
    }

    #[test]
    fn a_shared_prefix_hits_and_the_rest_is_put_once() {
        let mut driver = Fake::driver(2, 100);
        for ids in [&[1, 2, 3, 4, 5][..], &[1, 2, 3, 9], &[7], &[], &[1, 2, 3, 9, 10]] {
            driver.request(ids).unwrap();
        }
        let counters = *driver.counters();
        assert_eq!((counters.requests, counters.block_refs), (5, 15));
        assert_eq!((counters.blocks_hit, counters.blocks_put), (3 + 4, 5 + 1 + 1 + 1));
        assert_eq!(counters.bytes_read, 7 * BLOCK as u64);
        assert_eq!(counters.bytes_written, 8 * BLOCK as u64);
        assert_eq!((counters.verify_failures, driver.latencies().get.count()), (0, 2 + 2));
    }

    #[test]
    fn a_wrong_byte_is_found_named_and_no_hit() {
        let mut driver = Fake::driver(8, 100);
        driver.request(&[1, 2, 3, 4]).unwrap();
        driver.store_mut().corrupt = Some(3);
        driver.request(&[1, 2, 3, 4]).unwrap();
        let counters = driver.counters();
        assert_eq!((counters.verify_failures, counters.blocks_hit), (1, 2));
        let text = driver.first_mismatch().unwrap().to_string();
        assert!(text.starts_with("block 3, byte 50: "), "{text}");
    }

    #[test]
    fn what_vanishes_between_lookup_and_read_ends_the_prefix_and_is_put_again() {
        let mut driver = Fake::driver(2, 100);
        driver.request(&[1, 2, 3, 4, 5]).unwrap();
        driver.store_mut().vanishing = Some(2);
        driver.request(&[1, 2, 3, 4, 5]).unwrap();
        let counters = driver.counters();
        assert_eq!((counters.blocks_hit, counters.get_misses), (1, 1));
        // 2 to 5 are put again; the fake still has all of them.
        assert_eq!(counters.put_exists, 4);
    }

    #[test]
    fn a_small_store_evicts_and_still_never_lies() {
        let mut driver = Fake::driver(16, 50);
        for request in crate::workload::Workload::new(1, Default::default()).take(300) {
            driver.request(&request.hash_ids).unwrap();
        }
        assert!(driver.store_mut().evicted > 0);
        let counters = driver.counters();
        assert_eq!(counters.verify_failures, 0);
        assert!(counters.blocks_hit > 0 && counters.blocks_hit < counters.block_refs);
    }
}
