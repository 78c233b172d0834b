//! Allocation through a whole master: `put_start`, with its table of objects, its placement and its
//! allocators.

use std::time::Duration;

use anyhow::Context as _;
use store_core::message::{MountSegment, PutOptions, WriterState};
use store_core::{
    AllocationStrategy, AllocatorKind, Incarnation, Instant, Master, MasterConfig, NodeId, SegmentNo,
};

use super::one::Rounds;
use super::{Measured, Random};
use crate::sys;

/// A store to fill.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cluster {
    pub(super) allocator: AllocatorKind,
    pub(super) strategy: AllocationStrategy,
    pub(super) segments: usize,
    pub(super) replicas: u8,
    /// Segments have 3/2 and 1/2 of the size in turn.
    pub(super) skewed: bool,
    pub(super) segment_bytes: u64,
}

/// A time at which all segments have been mounted for long.
const SETTLED: Instant = Instant::from_millis(100_000_000);
/// Share of all objects that are removed when a put finds no space.
const EVICTED_SHARE: f64 = 0.05;

impl Cluster {
    fn master(&self) -> anyhow::Result<Master> {
        let mut master = Master::new(MasterConfig {
            allocator: self.allocator,
            allocation_strategy: self.strategy,
            eviction_high_watermark: 1.0,
            eviction_ratio: 0.0,
            ..MasterConfig::default()
        })?;
        for segment in 0..self.segments {
            let len = match (self.skewed, segment % 2) {
                (false, _) => self.segment_bytes,
                (true, 0) => self.segment_bytes * 3 / 2,
                (true, _) => self.segment_bytes / 2,
            };
            mount(&mut master, Instant::ZERO, segment, len)?;
        }
        Ok(master)
    }

    /// Fills the store with rounds of objects and keeps it full: when a put finds no space for all its
    /// replicas, 5 % of all objects are removed at random. Utilisation is sampled then.
    pub(super) fn fill(&self, paired: bool, fills: u64) -> anyhow::Result<Measured> {
        let mut store = Store::new(self.master()?, self.replicas);
        let mut random = Random::new(2);
        let mut lens = Rounds::new(paired);
        let capacity = store.master.stats().capacity_bytes as f64;
        let (mut min, mut sum, mut refusals) = (1.0f64, 0.0, 0u32);
        let (mut elapsed, mut puts) = (Duration::ZERO, 0);
        let mut offered = 0;
        let mut started = sys::own_cpu();
        while offered < fills * capacity as u64 {
            let len = lens.next(&mut random);
            offered += len * u64::from(self.replicas);
            puts += 1;
            while !store.put(len)? {
                elapsed += sys::own_cpu() - started;
                let now = store.live_bytes as f64 / capacity;
                (min, sum, refusals) = (min.min(now), sum + now, refusals + 1);
                let count = (store.live.len() as f64 * EVICTED_SHARE) as usize;
                (0..count.max(1)).try_for_each(|_| store.drop_one(&mut random))?;
                started = sys::own_cpu();
            }
        }
        elapsed += sys::own_cpu() - started;
        let avg = if refusals == 0 { store.live_bytes as f64 / capacity } else { sum / f64::from(refusals) };
        Ok(Measured::new(min.min(avg), avg, elapsed, puts))
    }

    /// Nanoseconds per put with half of the space in use, and per removal and put with all other space in
    /// use.
    pub(super) fn scale(&self, puts: u64) -> anyhow::Result<(f64, f64)> {
        const LEN: u64 = 4096;
        let mut store = Store::new(self.master()?, 1);
        let mut random = Random::new(3);
        let capacity = store.master.stats().capacity_bytes;
        while store.live_bytes < capacity / 2 {
            store.put(LEN)?;
        }
        let puts = puts.min(capacity / LEN / 4).max(1);
        let started = sys::own_cpu();
        (0..puts).try_for_each(|_| store.put(LEN).map(drop))?;
        let roomy = sys::own_cpu() - started;
        while store.put(LEN)? {}
        let started = sys::own_cpu();
        for _ in 0..puts {
            store.drop_one(&mut random)?;
            anyhow::ensure!(store.put(LEN)?, "the only hole was not found");
        }
        let full = sys::own_cpu() - started;
        Ok((roomy.as_nanos() as f64 / puts as f64, full.as_nanos() as f64 / puts as f64))
    }

    /// A new, empty segment joins when each of the others has fill level `fill`. Returns its share of the
    /// next `puts` at these ages.
    pub(super) fn join(&self, fill: f64, ages_ms: &[u64], puts: u64) -> anyhow::Result<Vec<f64>> {
        const LEN: u64 = 64 << 10;
        ages_ms
            .iter()
            .map(|age| {
                let mut master = self.master()?;
                let count = (master.stats().capacity_bytes as f64 * fill) as u64 / LEN;
                for key in 0..count {
                    put_whole(&mut master, SETTLED, key, LEN)?;
                }
                let newcomer = mount(&mut master, SETTLED, self.segments, self.segment_bytes)?;
                let now = SETTLED + Duration::from_millis(*age);
                let mut landed = 0;
                for key in count..count + puts {
                    landed += u64::from(put_whole(&mut master, now, key, LEN)? == newcomer);
                }
                Ok(landed as f64 / puts as f64)
            })
            .collect()
    }
}

fn mount(master: &mut Master, now: Instant, index: usize, len: u64) -> anyhow::Result<SegmentNo> {
    let name = format!("segment-{index}");
    let segment = MountSegment {
        node: NodeId::new(index as u64),
        incarnation: Incarnation::new(1),
        name: &name,
        endpoint: "nowhere:9",
        len,
        ..MountSegment::default()
    };
    Ok(master.mount(now, &segment).context("cannot mount a segment")?.mounted()?.segment)
}

fn put_whole(master: &mut Master, now: Instant, key: u64, len: u64) -> anyhow::Result<SegmentNo> {
    let key = key.to_be_bytes();
    let started = master.put_start(now, &key, len, &PutOptions::DEFAULT)?;
    master.put_end(now, &key, started.generation, 0)?;
    Ok(started.replicas[0].segment)
}

/// A master whose objects are never committed, so that it evicts none of them.
struct Store {
    master: Master,
    options: PutOptions,
    keys: u64,
    live: Vec<Live>,
    live_bytes: u64,
}

#[derive(Clone, Copy)]
struct Live {
    key: u64,
    generation: u64,
    bytes: u64,
}

impl Store {
    fn new(master: Master, replicas: u8) -> Self {
        let options = PutOptions { replicas, ..PutOptions::DEFAULT };
        Self { master, options, keys: 0, live: Vec::new(), live_bytes: 0 }
    }

    /// Returns whether there was space for all replicas.
    fn put(&mut self, len: u64) -> anyhow::Result<bool> {
        self.keys += 1;
        let key = self.keys;
        let started = match self.master.put_start(SETTLED, &key.to_be_bytes(), len, &self.options) {
            Ok(started) => started,
            Err(code) if code.is_no_room() => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let bytes = len * started.replicas.len() as u64;
        self.live.push(Live { key, generation: started.generation, bytes });
        self.live_bytes += bytes;
        if started.replicas.len() < usize::from(self.options.replicas) {
            self.drop(self.live.len() - 1)?;
            return Ok(false);
        }
        Ok(true)
    }

    fn drop_one(&mut self, random: &mut Random) -> anyhow::Result<()> {
        anyhow::ensure!(!self.live.is_empty(), "an empty store refuses an object");
        self.drop(random.below(self.live.len() as u64) as usize)
    }

    fn drop(&mut self, at: usize) -> anyhow::Result<()> {
        let gone = self.live.swap_remove(at);
        self.live_bytes -= gone.bytes;
        Ok(self.master.put_revoke(SETTLED, &gone.key.to_be_bytes(), gone.generation, WriterState::Quiet)?)
    }
}
