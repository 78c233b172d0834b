//! A simulated disk: sectors that are durable, and sectors that are not yet.

use std::collections::BTreeMap;

use te_core::Instant;
use te_core::testkit::Rng;

pub(crate) const SECTOR_BYTES: usize = 512;
type Sector = [u8; SECTOR_BYTES];

/// A written sector that was not synced.
#[derive(Clone, Debug)]
struct Volatile {
    bytes: Sector,
    /// Number of the write.
    write: u64,
    /// A sync failed: no later one makes it durable.
    doomed: bool,
    /// No sync before this time makes it durable.
    held_until: Instant,
}

#[derive(Clone, Debug)]
pub(crate) struct SimDisk {
    durable: Vec<u8>,
    volatile: BTreeMap<usize, Volatile>,
    writes: u64,
}

impl SimDisk {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { durable: vec![0; bytes as usize], volatile: BTreeMap::new(), writes: 0 }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.durable.len() as u64
    }

    /// The number of the last write: a sync concerns writes up to the one when it was ordered.
    pub(crate) const fn last_write(&self) -> u64 {
        self.writes
    }

    pub(crate) fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let first = offset as usize;
        let mut out = self.durable[first..first + bytes].to_vec();
        let sectors = first / SECTOR_BYTES..(first + bytes).div_ceil(SECTOR_BYTES);
        for (sector, volatile) in self.volatile.range(sectors) {
            let at = sector * SECTOR_BYTES - first;
            // The last sector may be read in part.
            let part = SECTOR_BYTES.min(bytes - at);
            out[at..at + part].copy_from_slice(&volatile.bytes[..part]);
        }
        out
    }

    /// Writes the sectors of `bytes` for which `which` is true.
    pub(crate) fn write(
        &mut self,
        offset: u64,
        bytes: &[u8],
        held_until: Instant,
        mut which: impl FnMut() -> bool,
    ) {
        self.writes += 1;
        let first = offset as usize / SECTOR_BYTES;
        for (at, bytes) in bytes.as_chunks().0.iter().enumerate().filter(|_| which()) {
            let volatile = Volatile { bytes: *bytes, write: self.writes, doomed: false, held_until };
            self.volatile.insert(first + at, volatile);
        }
    }

    /// Makes durable what was written up to `write`.
    pub(crate) fn sync(&mut self, now: Instant, write: u64) {
        let durable = &mut self.durable;
        self.volatile.retain(|sector, volatile| {
            let flush = volatile.write <= write && !volatile.doomed && volatile.held_until <= now;
            if flush {
                durable[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(&volatile.bytes);
            }
            !flush
        });
    }

    /// A sync fails: some of what was written is lost, although it can be read until the next crash.
    pub(crate) fn fail_sync(&mut self, rng: &mut Rng) {
        for volatile in self.volatile.values_mut() {
            volatile.doomed |= rng.below(2) == 0;
        }
    }

    /// The process ends. What a failed sync has lost is lost for readers, too: the driver reads past the
    /// cache of the operating system.
    pub(crate) fn restart(&mut self) {
        self.volatile.retain(|_, volatile| !volatile.doomed);
    }

    /// The power fails: any of the sectors that were not synced survive.
    pub(crate) fn lose_power(&mut self, rng: &mut Rng) {
        let percent = [0, 20, 50, 80, 100][rng.index(5)];
        for (sector, volatile) in std::mem::take(&mut self.volatile) {
            if !volatile.doomed && rng.below(100) < percent {
                self.durable[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(&volatile.bytes);
            }
        }
    }

    /// A bit flips.
    pub(crate) fn rot(&mut self, from: u64, rng: &mut Rng) {
        let at = rng.range(from..self.bytes()) as usize;
        self.durable[at] ^= 1 << rng.below(8);
    }
}

#[test]
fn what_is_synced_survives_and_what_is_not_may_be_torn() {
    let mut rng = Rng::new(1);
    let mut disk = SimDisk::new(64 << 10);
    disk.write(0, &[1; 4_096], Instant::ZERO, || true);
    let write = disk.last_write();
    disk.write(8_192, &[2; 32_768], Instant::ZERO, || true);
    disk.sync(Instant::ZERO, write);
    assert_eq!(disk.read(8_192, 1_024), [2; 1_024]);
    let mut torn = false;
    for _ in 0..20 {
        let mut crashed = disk.clone();
        crashed.lose_power(&mut rng);
        assert_eq!(crashed.read(0, 4_096), [1; 4_096]);
        let survived = crashed.read(8_192, 32_768).iter().filter(|byte| **byte == 2).count();
        torn |= (1..32_768).contains(&survived);
    }
    assert!(torn);
    disk.fail_sync(&mut rng);
    disk.sync(Instant::ZERO, u64::MAX);
    assert_eq!(disk.read(8_192, 1_024), [2; 1_024], "readable until the crash");
    disk.lose_power(&mut rng);
    assert!(disk.read(8_192, 32_768).contains(&0));
}
