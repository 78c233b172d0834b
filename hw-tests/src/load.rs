//! A load of verified transfers that goes on while something breaks.
//!
//! One thread owns blocks of the target's memory and goes round them. In each round it reads a block back and compares it with
//! what it wrote there last, writes new bytes, reads those back and compares. Memory that an ended operation must not touch any
//! more is filled with a canary: the destination of each read as soon as that has ended, well or not, and the destination of
//! a write that may still land (it failed, or took a second way) after the target has acknowledged a fence. Our canaries are
//! looked at when their place is needed again or the load ends, the target's when the load ends.

use crate::content::{CANARY, fill, first_difference};
use crate::remote::{Peer, Process};
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use te_core::{Access, Op};
use te_engine::{
    RailStats, SegmentHandle, SharedRegion, Tier, TransferEngine, TransferError, TransferRequest, fabrics,
};

/// One round moves a block three times.
const BLOCK_BYTES: u64 = 256 << 10;
/// A block goes in so many requests: with one alone in flight the nearest rail would do all the work.
const PIECES: u64 = 8;
/// Blocks of the target's memory, and of ours for reading.
const BLOCKS: u64 = 24;
/// After a failure, so that a dead link is not hammered.
const PAUSE: Duration = Duration::from_millis(150);

/// How the load reaches the target.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    /// `tcp`, `rdma`, …: as [`crate::engines::start`] knows it.
    pub(crate) fabric: &'static str,
    /// Our address.
    pub(crate) ours: String,
    /// The target's control port: the same after a restart.
    pub(crate) theirs: String,
    /// One transfer, or one fence, may take so long.
    pub(crate) transfer_max: Duration,
}

/// The load, under way. Dropping it stops it.
pub(crate) struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
    engine: TransferEngine,
    peer: Peer,
    ends: Ends,
}

/// What the load found, from start to end.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// When each round was verified.
    pub(crate) verified: Vec<Instant>,
    /// What failed, and when.
    pub(crate) failures: Vec<(Instant, String)>,
    /// Canaries that were watched: ours, one for each read, and the target's.
    pub(crate) canaries: (usize, usize),
    /// Bytes that were not as they should be, and canaries that were written. Each is a broken promise.
    pub(crate) broken: Vec<String>,
}

struct Shared {
    stop: AtomicBool,
    target: Mutex<Target>,
    findings: Mutex<Findings>,
}

/// The process that owns the memory; another after each restart.
struct Target {
    process: Option<Process>,
    name: String,
    addr: u64,
    life: u64,
}

/// The thread's own.
struct Worker {
    shared: Arc<Shared>,
    engine: TransferEngine,
    transfer_max: Duration,
    source: SharedRegion,
    sink: SharedRegion,
    segment: Option<(u64, SegmentHandle, u64)>,
    seed: u64,
    blocks: Vec<Block>,
    /// Blocks of `sink` that may be read into.
    free: VecDeque<u64>,
    /// Blocks of `sink` with a canary, oldest first.
    watched: VecDeque<u64>,
}

/// What a block of the target's memory holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    /// Nothing that we know.
    Blank,
    /// The pattern of this seed.
    Holds(u64),
    /// A write to it failed and may still land.
    Unknown,
    /// A canary, after a fence.
    Canary,
}

impl Load {
    /// Starts the target's process and the load.
    ///
    /// # Errors
    /// When either does not start.
    pub(crate) fn start(engine: TransferEngine, peer: &Peer, ends: Ends) -> Result<Self> {
        let target = Mutex::new(Target::start(peer, &ends, 1)?);
        let shared = Shared { stop: AtomicBool::new(false), target, findings: Mutex::default() };
        let shared = Arc::new(shared);
        let mut worker = Worker::new(Arc::clone(&shared), engine.clone(), &ends)?;
        let thread = std::thread::Builder::new().name("load".into()).spawn(move || worker.run())?;
        Ok(Self { shared, thread: Some(thread), engine, peer: peer.clone(), ends })
    }

    /// Waits until a round that ended after `since` was verified; gives the time from `since`.
    ///
    /// # Errors
    /// When there is none within `limit`, or the load has ended.
    pub(crate) fn verified_since(&self, since: Instant, limit: Duration) -> Result<Duration> {
        let give_up = since + limit;
        loop {
            {
                let findings = self.shared.findings();
                ensure!(findings.broken.is_empty(), "{}", findings.broken.join("; "));
                // The first round that ends may have begun before; the second has not.
                if let Some(first) = findings.verified.iter().filter(|verified| **verified > since).nth(1) {
                    return Ok(*first - since);
                }
                if Instant::now() > give_up {
                    let last = findings.failures.last().map_or("nothing failed, either", |(_, why)| why);
                    bail!("no transfer is verified within {limit:?}; the last failure: {last}");
                }
            }
            ensure!(self.thread.as_ref().is_some_and(|thread| !thread.is_finished()), "the load has ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Bytes that each rail to other machines has moved so far, by its device or fabric.
    pub(crate) fn rail_bytes(&self) -> Vec<(String, u64)> {
        rail_bytes(&self.engine)
    }

    /// What the route makes of each rail, for whoever wonders why one carries nothing.
    pub(crate) fn rails_at_length(&self) -> String {
        self.engine.stats().rails.iter().map(|rail| format!("\n{rail:?}")).collect()
    }

    /// Failures so far.
    pub(crate) fn failures(&self) -> usize {
        self.shared.findings().failures.len()
    }

    /// SIGKILL to the target's process.
    ///
    /// # Errors
    /// When the agent does not report its end.
    pub(crate) fn kill_target(&self) -> Result<()> {
        let process = self.shared.target().process.take();
        process.context("the target is dead already")?.kill()
    }

    /// Another process with the target's address.
    ///
    /// # Errors
    /// When it does not start.
    pub(crate) fn restart_target(&self) -> Result<()> {
        let life = self.shared.target().life + 1;
        let target = Target::start(&self.peer, &self.ends, life)?;
        *self.shared.target() = target;
        Ok(())
    }

    /// Ends the load, looks at every canary, and gives what was found.
    ///
    /// # Errors
    /// When the load itself failed.
    pub(crate) fn finish(mut self) -> Result<Findings> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it ends once")?;
        thread.join().map_err(|_| anyhow::anyhow!("the load panicked"))??;
        Ok(std::mem::take(&mut *self.shared.findings()))
    }
}

/// Bytes of each rail that leaves the host, by its device or fabric.
pub(crate) fn rail_bytes(engine: &TransferEngine) -> Vec<(String, u64)> {
    let within =
        |rail: &RailStats| fabrics().iter().any(|entry| entry.name == rail.name && entry.tier <= Tier::Shm);
    let rails = engine.stats().rails.into_iter().filter(|rail| !within(rail));
    rails
        .map(|rail| (if rail.device.is_empty() { rail.name.to_owned() } else { rail.device }, rail.bytes))
        .collect()
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Findings {
    /// The longest time between two verified rounds.
    pub(crate) fn longest_gap(&self) -> Duration {
        self.verified.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
    }

    /// Bytes that were moved and verified.
    pub(crate) fn bytes(&self) -> u64 {
        self.verified.len() as u64 * 3 * BLOCK_BYTES
    }
}

impl Shared {
    fn findings(&self) -> MutexGuard<'_, Findings> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn target(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, what: &str, why: &dyn std::fmt::Display) {
        self.findings().failures.push((Instant::now(), format!("{what}: {why}")));
    }

    fn broke(&self, promise: String) {
        self.findings().broken.push(promise);
    }
}

impl Target {
    fn start(peer: &Peer, ends: &Ends, life: u64) -> Result<Self> {
        let bytes = (BLOCKS * BLOCK_BYTES).to_string();
        let mut process = peer.start(&["self", "helper", "target", ends.fabric, &ends.theirs, &bytes])?;
        let ready = process.hear()?;
        let words: Vec<&str> = ready.split_whitespace().collect();
        let ["ready", name, addr] = words[..] else { bail!("the target says `{ready}`") };
        Ok(Self { name: name.to_owned(), addr: addr.parse()?, process: Some(process), life })
    }
}

impl Worker {
    fn new(shared: Arc<Shared>, engine: TransferEngine, ends: &Ends) -> Result<Self> {
        let source = engine.alloc_shared(BLOCK_BYTES as usize, Access::LOCAL)?;
        let sink = engine.alloc_shared((BLOCKS * BLOCK_BYTES) as usize, Access::LOCAL)?;
        Ok(Self {
            shared,
            engine,
            transfer_max: ends.transfer_max,
            source,
            sink,
            segment: None,
            seed: CANARY + 1,
            blocks: vec![Block::Blank; BLOCKS as usize],
            free: (0..BLOCKS).collect(),
            watched: VecDeque::new(),
        })
    }

    fn run(&mut self) -> Result<()> {
        let mut next = 0;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            // A write that may still land is what the canary is for: it comes before everything else.
            let unknown = self.blocks.iter().position(|block| *block == Block::Unknown);
            match self.turn(unknown.unwrap_or(next))? {
                true => self.shared.findings().verified.push(Instant::now()),
                false if began.elapsed() < PAUSE => std::thread::sleep(PAUSE),
                false => {}
            }
            next = (next + 1) % BLOCKS as usize;
            if !self.shared.findings().broken.is_empty() {
                break;
            }
        }
        self.look_at_canaries()
    }

    /// One block's turn; says whether bytes were verified.
    fn turn(&mut self, block: usize) -> Result<bool> {
        let Some((segment, addr)) = self.segment() else { return Ok(false) };
        let remote = addr + block as u64 * BLOCK_BYTES;
        match self.blocks[block] {
            // Its canary stands until the end; with too many of them there would be nothing left to do.
            Block::Canary => return Ok(false),
            Block::Unknown => {
                if self.fence(segment) {
                    self.plant_canary(block);
                }
                return Ok(false);
            }
            // Of every other block only: what fails first in a fault shall be a read here and a write there.
            Block::Holds(seed) if block.is_multiple_of(2) => {
                if !self.read_back(segment, remote, seed, "a block changed after its write had completed")? {
                    return Ok(false);
                }
            }
            Block::Holds(_) | Block::Blank => {}
        }
        self.seed += 1;
        let seed = self.seed;
        fill(&self.source, seed, 0, BLOCK_BYTES as usize)?;
        let fence_needed = match self.transfer(Op::Write, (&self.source, 0), segment, remote) {
            Ok(fence_needed) => fence_needed,
            Err(error) => {
                self.blocks[block] = match error {
                    TransferError::Ended { fence_needed: false, .. } => Block::Blank,
                    _ => Block::Unknown,
                };
                self.shared.failed("write", &error);
                return Ok(false);
            }
        };
        // A copy of these bytes may still land: other bytes come after a fence.
        self.blocks[block] = if fence_needed { Block::Unknown } else { Block::Holds(seed) };
        self.read_back(segment, remote, seed, "a completed write is not what was written")
    }

    /// Reads a block and compares; says whether it could be read.
    fn read_back(&mut self, segment: SegmentHandle, remote: u64, seed: u64, promise: &str) -> Result<bool> {
        let place = self.sink_block()?;
        let offset = place * BLOCK_BYTES;
        let len = BLOCK_BYTES as usize;
        if let Err(error) = self.transfer(Op::Read, (&self.sink, offset), segment, remote) {
            self.shared.failed("read", &error);
            self.watch(place)?;
            return Ok(false);
        }
        if let Some(at) = first_difference(&self.sink, seed, offset, len)? {
            self.shared.broke(format!("{promise}: byte {} of the block", at - offset));
        }
        self.watch(place)?;
        Ok(true)
    }

    /// The read into this place has ended: from now on nobody writes there.
    fn watch(&mut self, place: u64) -> Result<()> {
        fill(&self.sink, CANARY, place * BLOCK_BYTES, BLOCK_BYTES as usize)?;
        self.watched.push_back(place);
        self.shared.findings().canaries.0 += 1;
        Ok(())
    }

    /// Moves a block; says whether a fence has to come before its destination gets other bytes.
    fn transfer(
        &self,
        op: Op,
        (region, offset): (&SharedRegion, u64),
        segment: SegmentHandle,
        remote_addr: u64,
    ) -> Result<bool, TransferError> {
        let len = BLOCK_BYTES / PIECES;
        let piece = |at: u64| TransferRequest {
            op,
            local: (region.id(), offset + at).into(),
            segment,
            remote_addr: remote_addr + at,
            len,
        };
        let requests: [TransferRequest; PIECES as usize] =
            std::array::from_fn(|index| piece(index as u64 * len));
        self.engine.submit(&requests, Some(self.transfer_max))?.wait(None).map(|report| report.fence_needed)
    }

    /// A place to read into. When most are watched, the oldest canary has stood for long enough: it is looked at and given up.
    fn sink_block(&mut self) -> Result<u64> {
        if self.free.len() as u64 <= BLOCKS / 4
            && let Some(oldest) = self.watched.pop_front()
        {
            self.check_own_canary(oldest)?;
            self.free.push_back(oldest);
        }
        self.free.pop_front().context("no block to read into")
    }

    fn fence(&self, segment: SegmentHandle) -> bool {
        let fenced = self.engine.fence(segment, Some(self.transfer_max)).and_then(|fence| fence.wait(None));
        fenced.inspect_err(|error| self.shared.failed("fence", error)).is_ok()
    }

    /// The target's owner fills the block; from now on nobody writes it.
    fn plant_canary(&mut self, block: usize) {
        let offset = block as u64 * BLOCK_BYTES;
        let mut target = self.shared.target();
        if self.segment.is_none_or(|(life, ..)| life != target.life) {
            return;
        }
        // A target that is being killed does not answer.
        let planted = target
            .process
            .as_mut()
            .map(|process| process.ask(&format!("fill {CANARY} {offset} {BLOCK_BYTES}")));
        if let Some(Ok(_)) = planted {
            let few =
                self.blocks.iter().filter(|block| **block == Block::Canary).count() < self.blocks.len() / 2;
            self.blocks[block] = if few { Block::Canary } else { Block::Blank };
            drop(target);
            self.shared.findings().canaries.1 += 1;
        }
    }

    /// The segment of the target's present life, opened if it is new.
    fn segment(&mut self) -> Option<(SegmentHandle, u64)> {
        let (life, name, addr) = {
            let target = self.shared.target();
            (target.life, target.name.clone(), target.addr)
        };
        if let Some((known, segment, addr)) = self.segment {
            if known == life {
                return Some((segment, addr));
            }
            // Another process: its memory is blank, and whatever was written to the old one is gone with it.
            self.blocks.fill(Block::Blank);
            self.segment = None;
            if let Err(error) = self.engine.close_segment(segment) {
                self.shared.failed("close", &error);
            }
        }
        match self.engine.open_segment(&name) {
            Ok(segment) => {
                self.segment = Some((life, segment, addr));
                Some((segment, addr))
            }
            Err(error) => {
                self.shared.failed("open", &error);
                None
            }
        }
    }

    fn look_at_canaries(&mut self) -> Result<()> {
        while let Some(place) = self.watched.pop_front() {
            self.check_own_canary(place)?;
        }
        let mut target = self.shared.target();
        let Some(process) = target.process.as_mut() else { return Ok(()) };
        for (index, _) in self.blocks.iter().enumerate().filter(|(_, block)| **block == Block::Canary) {
            let offset = index as u64 * BLOCK_BYTES;
            let answer = process.ask(&format!("check {CANARY} {offset} {BLOCK_BYTES}"))?;
            if answer != "ok" {
                self.shared.broke(format!("the target's memory was written after a fence: {answer}"));
            }
        }
        Ok(())
    }

    fn check_own_canary(&self, place: u64) -> Result<()> {
        let offset = place * BLOCK_BYTES;
        if let Some(at) = first_difference(&self.sink, CANARY, offset, BLOCK_BYTES as usize)? {
            self.shared
                .broke(format!("a read wrote after it had ended, at byte {} of its block", at - offset));
        }
        Ok(())
    }
}
