//! A load of verified transfers that goes on while something breaks.
//!
//! One thread uses chunks of the target's memory in turn. In each round it reads a chunk back and compares it
//! with what it wrote there last, writes new bytes, reads those back and compares. Memory that an ended
//! operation must not touch any more is filled with a canary: the destination of each read as soon as the
//! read has ended, successfully or not, and the destination of a write that may still land (it failed, or was
//! sent over a second route) after the target has acknowledged a fence. Canaries in local memory are checked
//! when their place is needed again or the load ends, those at the target when the load ends.

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

/// Bytes per chunk. One round moves a chunk three times.
const CHUNK_BYTES: u64 = 256 << 10;
/// Requests per chunk: with a single request in flight, the nearest rail would do all the work.
const PIECES: u64 = 8;
/// Chunks of the target's memory, and of the local memory that is read into.
const CHUNKS: u64 = 24;
/// Pause after a failure, so that the load does not saturate a dead link with attempts.
const PAUSE: Duration = Duration::from_millis(150);

/// How the load reaches the target.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    /// `tcp`, `rdma`, …: an argument of [`crate::engines::start`].
    pub(crate) fabric: &'static str,
    /// The address where the engine of this process listens.
    pub(crate) ours: String,
    /// The address where the target's engine listens, the same after a restart.
    pub(crate) theirs: String,
    /// Time limit of one transfer or one fence.
    pub(crate) transfer_max: Duration,
}

/// A running load. Dropping it stops the load.
pub(crate) struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
    engine: TransferEngine,
    peer: Peer,
    ends: Ends,
}

/// The results of a load, from start to end.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// The time when each round was verified.
    pub(crate) verified: Vec<Instant>,
    /// The time and the text of each failure.
    pub(crate) failures: Vec<(Instant, String)>,
    /// Number of canaries in local memory, one per read, and at the target.
    pub(crate) canaries: (usize, usize),
    /// Wrong bytes and canaries that were overwritten: each is a violation of a guarantee.
    pub(crate) broken: Vec<String>,
}

struct Shared {
    stop: AtomicBool,
    target: Mutex<Target>,
    findings: Mutex<Findings>,
}

/// The process that owns the memory; a new one after each restart.
struct Target {
    process: Option<Process>,
    name: String,
    addr: u64,
    /// Counts the processes from 1.
    incarnation: u64,
}

/// The state of the load's thread.
struct Worker {
    shared: Arc<Shared>,
    engine: TransferEngine,
    transfer_max: Duration,
    source: SharedRegion,
    sink: SharedRegion,
    /// The target's incarnation, its open segment and the address of the memory.
    segment: Option<(u64, SegmentHandle, u64)>,
    seed: u64,
    chunks: Vec<Chunk>,
    /// Chunks of `sink` that may be read into.
    free: VecDeque<u64>,
    /// Chunks of `sink` with a canary, oldest first.
    watched: VecDeque<u64>,
}

/// The content of a chunk of the target's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Chunk {
    /// Unknown bytes, and no write may still land.
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

    /// Waits until a round that began after `since` was verified; returns the time from `since`.
    ///
    /// # Errors
    /// When no round is verified within `limit`, or the load has ended.
    pub(crate) fn verified_since(&self, since: Instant, limit: Duration) -> Result<Duration> {
        let give_up = since + limit;
        loop {
            {
                let findings = self.shared.findings();
                ensure!(findings.broken.is_empty(), "{}", findings.broken.join("; "));
                // The first round that ends may have begun before `since`; the second has not.
                if let Some(first) = findings.verified.iter().filter(|verified| **verified > since).nth(1) {
                    return Ok(*first - since);
                }
                if Instant::now() > give_up {
                    let last = findings.failures.last().map_or("none", |(_, why)| why);
                    bail!("no transfer was verified within {limit:?}; the last failure: {last}");
                }
            }
            ensure!(self.thread.as_ref().is_some_and(|thread| !thread.is_finished()), "the load has ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Bytes that each rail to other machines has moved since the start, by device or fabric.
    pub(crate) fn rail_bytes(&self) -> Vec<(String, u64)> {
        rail_bytes(&self.engine)
    }

    /// The statistics of every rail, for the report of a rail that carries nothing.
    pub(crate) fn rail_details(&self) -> String {
        self.engine.stats().rails.iter().map(|rail| format!("\n{rail:?}")).collect()
    }

    /// Number of failures since the start.
    pub(crate) fn failures(&self) -> usize {
        self.shared.findings().failures.len()
    }

    /// Sends SIGKILL to the target's process.
    ///
    /// # Errors
    /// When the agent does not report its end.
    pub(crate) fn kill_target(&self) -> Result<()> {
        let process = self.shared.target().process.take();
        process.context("the target has been killed already")?.kill()
    }

    /// Starts another process at the target's address.
    ///
    /// # Errors
    /// When the process does not start.
    pub(crate) fn restart_target(&self) -> Result<()> {
        let incarnation = self.shared.target().incarnation + 1;
        let target = Target::start(&self.peer, &self.ends, incarnation)?;
        *self.shared.target() = target;
        Ok(())
    }

    /// Ends the load, checks every canary, and returns the results.
    ///
    /// # Errors
    /// When the load itself failed.
    pub(crate) fn finish(mut self) -> Result<Findings> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("the load was finished twice")?;
        thread.join().map_err(|_| anyhow::anyhow!("the load panicked"))??;
        Ok(std::mem::take(&mut *self.shared.findings()))
    }
}

/// Bytes moved by each rail that leaves the host, by device or fabric.
pub(crate) fn rail_bytes(engine: &TransferEngine) -> Vec<(String, u64)> {
    let within_host =
        |rail: &RailStats| fabrics().iter().any(|entry| entry.name == rail.name && entry.tier <= Tier::Shm);
    let rails = engine.stats().rails.into_iter().filter(|rail| !within_host(rail));
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
        self.verified.len() as u64 * 3 * CHUNK_BYTES
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

    fn broke(&self, violation: String) {
        self.findings().broken.push(violation);
    }
}

impl Target {
    fn start(peer: &Peer, ends: &Ends, incarnation: u64) -> Result<Self> {
        let bytes = (CHUNKS * CHUNK_BYTES).to_string();
        let mut process = peer.start(&["self", "helper", "target", ends.fabric, &ends.theirs, &bytes])?;
        let ready = process.receive()?;
        let words: Vec<&str> = ready.split_whitespace().collect();
        let ["ready", name, addr] = words[..] else { bail!("the target printed `{ready}` at its start") };
        Ok(Self { name: name.to_owned(), addr: addr.parse()?, process: Some(process), incarnation })
    }
}

impl Worker {
    fn new(shared: Arc<Shared>, engine: TransferEngine, ends: &Ends) -> Result<Self> {
        let source = engine.alloc_shared(CHUNK_BYTES as usize, Access::LOCAL)?;
        let sink = engine.alloc_shared((CHUNKS * CHUNK_BYTES) as usize, Access::LOCAL)?;
        Ok(Self {
            shared,
            engine,
            transfer_max: ends.transfer_max,
            source,
            sink,
            segment: None,
            seed: CANARY + 1,
            chunks: vec![Chunk::Blank; CHUNKS as usize],
            free: (0..CHUNKS).collect(),
            watched: VecDeque::new(),
        })
    }

    fn run(&mut self) -> Result<()> {
        let mut next = 0;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            // A chunk to which a write may still land comes first: it needs a fence and a canary.
            let unknown = self.chunks.iter().position(|chunk| *chunk == Chunk::Unknown);
            match self.round(unknown.unwrap_or(next))? {
                true => self.shared.findings().verified.push(Instant::now()),
                false if began.elapsed() < PAUSE => std::thread::sleep(PAUSE),
                false => {}
            }
            next = (next + 1) % CHUNKS as usize;
            if !self.shared.findings().broken.is_empty() {
                break;
            }
        }
        self.check_canaries()
    }

    /// One round on a chunk; returns whether bytes were verified.
    fn round(&mut self, chunk: usize) -> Result<bool> {
        let Some((segment, addr)) = self.segment() else { return Ok(false) };
        let remote = addr + chunk as u64 * CHUNK_BYTES;
        match self.chunks[chunk] {
            // The canary stays until the end of the load.
            Chunk::Canary => return Ok(false),
            Chunk::Unknown => {
                if self.fence(segment) {
                    self.plant_canary(chunk);
                }
                return Ok(false);
            }
            // Only every other chunk, so that a fault meets reads first at some chunks and writes first at
            // others.
            Chunk::Holds(seed) if chunk.is_multiple_of(2) => {
                if !self.read_back(segment, remote, seed, "a chunk changed after its write had completed")? {
                    return Ok(false);
                }
            }
            Chunk::Holds(_) | Chunk::Blank => {}
        }
        self.seed += 1;
        let seed = self.seed;
        fill(&self.source, seed, 0, CHUNK_BYTES as usize)?;
        let fence_needed = match self.transfer(Op::Write, (&self.source, 0), segment, remote) {
            Ok(fence_needed) => fence_needed,
            Err(error) => {
                self.chunks[chunk] = match error {
                    TransferError::Ended { fence_needed: false, .. } => Chunk::Blank,
                    _ => Chunk::Unknown,
                };
                self.shared.failed("write", &error);
                return Ok(false);
            }
        };
        // A copy of these bytes may still land: other bytes are written only after a fence.
        self.chunks[chunk] = if fence_needed { Chunk::Unknown } else { Chunk::Holds(seed) };
        self.read_back(segment, remote, seed, "a chunk does not hold what a completed write wrote")
    }

    /// Reads a chunk and compares it with the pattern of `seed`; a difference is reported as `violation`.
    /// Returns whether the chunk could be read.
    fn read_back(&mut self, segment: SegmentHandle, remote: u64, seed: u64, violation: &str) -> Result<bool> {
        let place = self.sink_chunk()?;
        let offset = place * CHUNK_BYTES;
        let len = CHUNK_BYTES as usize;
        if let Err(error) = self.transfer(Op::Read, (&self.sink, offset), segment, remote) {
            self.shared.failed("read", &error);
            self.watch(place)?;
            return Ok(false);
        }
        if let Some(at) = first_difference(&self.sink, seed, offset, len)? {
            self.shared.broke(format!("{violation}: byte {} of the chunk", at - offset));
        }
        self.watch(place)?;
        Ok(true)
    }

    /// Fills a place with a canary: the read into it has ended, and nothing may be written there any more.
    fn watch(&mut self, place: u64) -> Result<()> {
        fill(&self.sink, CANARY, place * CHUNK_BYTES, CHUNK_BYTES as usize)?;
        self.watched.push_back(place);
        self.shared.findings().canaries.0 += 1;
        Ok(())
    }

    /// Moves a chunk; returns whether a fence is needed before other bytes are written to its destination.
    fn transfer(
        &self,
        op: Op,
        (region, offset): (&SharedRegion, u64),
        segment: SegmentHandle,
        remote_addr: u64,
    ) -> Result<bool, TransferError> {
        let len = CHUNK_BYTES / PIECES;
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

    /// A chunk of `sink` to read into. When three quarters of the chunks hold canaries, the oldest canary is
    /// checked and its chunk is used again.
    fn sink_chunk(&mut self) -> Result<u64> {
        if self.free.len() as u64 <= CHUNKS / 4
            && let Some(oldest) = self.watched.pop_front()
        {
            self.check_own_canary(oldest)?;
            self.free.push_back(oldest);
        }
        self.free.pop_front().context("no chunk to read into")
    }

    fn fence(&self, segment: SegmentHandle) -> bool {
        let fenced = self.engine.fence(segment, Some(self.transfer_max)).and_then(|fence| fence.wait(None));
        fenced.inspect_err(|error| self.shared.failed("fence", error)).is_ok()
    }

    /// Makes the target's process fill the chunk with a canary: nothing may be written there any more.
    fn plant_canary(&mut self, chunk: usize) {
        let offset = chunk as u64 * CHUNK_BYTES;
        let mut target = self.shared.target();
        if self.segment.is_none_or(|(known, ..)| known != target.incarnation) {
            return;
        }
        // A target that is being killed does not answer.
        let planted = target
            .process
            .as_mut()
            .map(|process| process.request(&format!("fill {CANARY} {offset} {CHUNK_BYTES}")));
        if let Some(Ok(_)) = planted {
            // Chunks with canaries take no part in the load: at most half of all may hold one.
            let few =
                self.chunks.iter().filter(|chunk| **chunk == Chunk::Canary).count() < self.chunks.len() / 2;
            self.chunks[chunk] = if few { Chunk::Canary } else { Chunk::Blank };
            drop(target);
            self.shared.findings().canaries.1 += 1;
        }
    }

    /// The segment of the target's present process, opened if the process is new, and the address of its
    /// memory.
    fn segment(&mut self) -> Option<(SegmentHandle, u64)> {
        let (incarnation, name, addr) = {
            let target = self.shared.target();
            (target.incarnation, target.name.clone(), target.addr)
        };
        if let Some((known, segment, addr)) = self.segment {
            if known == incarnation {
                return Some((segment, addr));
            }
            // Another process: its memory is blank, and writes that may still land in the old process do no
            // harm.
            self.chunks.fill(Chunk::Blank);
            self.segment = None;
            if let Err(error) = self.engine.close_segment(segment) {
                self.shared.failed("close", &error);
            }
        }
        match self.engine.open_segment(&name) {
            Ok(segment) => {
                self.segment = Some((incarnation, segment, addr));
                Some((segment, addr))
            }
            Err(error) => {
                self.shared.failed("open", &error);
                None
            }
        }
    }

    fn check_canaries(&mut self) -> Result<()> {
        while let Some(place) = self.watched.pop_front() {
            self.check_own_canary(place)?;
        }
        let mut target = self.shared.target();
        let Some(process) = target.process.as_mut() else { return Ok(()) };
        for (index, _) in self.chunks.iter().enumerate().filter(|(_, chunk)| **chunk == Chunk::Canary) {
            let offset = index as u64 * CHUNK_BYTES;
            let answer = process.request(&format!("check {CANARY} {offset} {CHUNK_BYTES}"))?;
            if answer != "ok" {
                self.shared.broke(format!("the target's memory was written after a fence: {answer}"));
            }
        }
        Ok(())
    }

    fn check_own_canary(&self, place: u64) -> Result<()> {
        let offset = place * CHUNK_BYTES;
        if let Some(at) = first_difference(&self.sink, CANARY, offset, CHUNK_BYTES as usize)? {
            self.shared
                .broke(format!("a read wrote after it had ended, at byte {} of its chunk", at - offset));
        }
        Ok(())
    }
}
