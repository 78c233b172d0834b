//! A model of hosts that share memory and whose caches do not know of each other, as on a CXL pool without
//! coherence in hardware. Whatever the hardware may do, the model does at random: at every step lines are
//! evicted, prefetched, and leave write buffers.
//!
//! ```text
//!   host 0                 host 1
//!    loads, stores          loads, stores          Steps: 16 bytes, or one flush
//!    ┌───────┐ ┌────────┐   ┌───────┐ ┌────────┐
//!    │ cache │ │ buffer │   │ cache │ │ buffer │   stores past the cache wait in the buffer
//!    └───┬───┘ └───┬────┘   └───┬───┘ └───┬────┘
//!        └─────────┴──── memory ┴─────────┘
//! ```
//!
//! The rules are those of x86, at their weakest: a store past the cache stays in the buffer until it leaves
//! by itself or a fence empties the buffer; a fence of stores orders what leaves, and empties nothing; a
//! flush happens by itself some time later, or at a fence of everything; an evicted dirty line replaces all
//! 64 bytes in memory.
//!
//! A processor moves 16 bytes at once: loads and stores of more are several steps, between which other hosts
//! see a part of a line, and a part of a line may leave the buffer.
//!
//! What it does not model: stores that have left the buffer and are still on their way to the memory, where
//! another host's load does not see them yet (writes to a device are posted); loads that are carried out
//! ahead of earlier ones, but for lines that are prefetched; the order of stores through the cache, which are
//! in the cache at once; levels of caches and several processors of one host; stores of less than 16 bytes
//! that tear, and memory that fails.
//!
//! Code under test calls [`Steps`]; a [`Process`] carries it out one step at a time, so that the steps of
//! several hosts interleave. It does so by running the code again from its beginning and giving it the
//! answers that it has seen before: the code must do the same when it gets the same answers.
//!
//! ```
//! use te_core::testkit::Rng;
//! use te_core::testkit::coldcache::{ColdCache, Order, Process};
//!
//! let mut model = ColdCache::new(Rng::new(7), 2, 128);
//! let mut writer = Process::new(0, |steps| {
//!     steps.nt_store(64, &[5; 64]);
//!     steps.fence(Order::Stores);
//! });
//! while !writer.step(&mut model) {}
//! model.publish(0);
//! let mut reader = Process::new(1, |steps| {
//!     steps.flush(64, 64);
//!     steps.fence(Order::All);
//!     let mut seen = [0; 64];
//!     steps.load(64, &mut seen);
//!     seen
//! });
//! while !reader.step(&mut model) {}
//! assert_eq!(reader.result(), Some(&[5; 64]));
//! ```

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use super::Rng;

/// The bytes of a line.
pub const LINE_BYTES: usize = 64;
/// The bytes that are loaded or stored at once.
pub const PART_BYTES: usize = 16;

type Line = [u8; LINE_BYTES];

/// What a fence orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Stores before it leave the write buffer before those after it.
    Stores,
    /// The write buffer is empty and every flush has happened before the next step.
    All,
}

/// Memory, and the hosts that cache it.
#[derive(Clone, Debug)]
pub struct ColdCache {
    memory: Vec<Line>,
    hosts: Vec<Host>,
    rng: Rng,
}

#[derive(Clone, Debug, Default)]
struct Host {
    cache: Vec<Cached>,
    buffer: Vec<Buffered>,
    /// The number of fences of stores so far.
    fences: u32,
    /// Lines to be flushed.
    flushes: Vec<usize>,
}

#[derive(Clone, Debug)]
struct Cached {
    line: usize,
    bytes: Line,
    dirty: bool,
}

#[derive(Clone, Debug)]
struct Buffered {
    line: usize,
    bytes: Line,
    /// Which parts of the line were stored.
    parts: [bool; LINE_BYTES / PART_BYTES],
    /// The number of fences of stores before it.
    after: u32,
}

impl ColdCache {
    /// Memory of `bytes` zeroes, a multiple of 64, and hosts whose caches are empty.
    #[must_use]
    pub fn new(rng: Rng, hosts: usize, bytes: usize) -> Self {
        Self {
            memory: vec![[0; LINE_BYTES]; bytes.div_ceil(LINE_BYTES)],
            hosts: vec![Host::default(); hosts],
            rng,
        }
    }

    /// The host announces what it has written, for example in a message. A message is a store, too: what the
    /// host has stored before its last fence is in memory before the message arrives.
    pub fn publish(&mut self, host: usize) {
        let fences = self.hosts[host].fences;
        while let Some(at) = self.hosts[host].buffer.iter().position(|entry| entry.after < fences) {
            self.drain(host, at);
        }
    }

    /// Everything that the hosts still hold reaches the memory, in a random order.
    pub fn settle(&mut self) {
        loop {
            let holds = |host: &Host| !host.buffer.is_empty() || !host.cache.is_empty();
            let holders: Vec<usize> = (0..self.hosts.len()).filter(|at| holds(&self.hosts[*at])).collect();
            let Some(host) = holders.get(self.rng.index(holders.len())).copied() else { return };
            match self.hosts[host].cache.len() {
                0 => self.drain_any(host),
                cached => {
                    let at = self.rng.index(cached);
                    self.evict(host, at);
                }
            }
        }
    }

    /// The bytes in memory, whatever caches hold.
    #[must_use]
    pub fn memory(&self, at: usize, len: usize) -> Vec<u8> {
        (at..at + len).map(|at| self.memory[at / LINE_BYTES][at % LINE_BYTES]).collect()
    }

    /// What the hardware does by itself between two steps.
    fn stir(&mut self) {
        for host in 0..self.hosts.len() {
            let dice = self.rng.next();
            if dice & 3 == 0 && !self.hosts[host].cache.is_empty() {
                let at = self.rng.index(self.hosts[host].cache.len());
                self.evict(host, at);
            }
            if dice >> 2 & 3 == 0 && self.hosts[host].cache.len() < self.memory.len() {
                let line = self.rng.index(self.memory.len());
                // What waits in the buffer is newer than memory.
                if !self.hosts[host].buffer.iter().any(|entry| entry.line == line) {
                    self.fill(host, line);
                }
            }
            if dice >> 4 & 3 == 0 && !self.hosts[host].buffer.is_empty() {
                self.drain_any(host);
            }
            if dice >> 6 & 3 == 0 && !self.hosts[host].flushes.is_empty() {
                let at = self.rng.index(self.hosts[host].flushes.len());
                let line = self.hosts[host].flushes.swap_remove(at);
                self.flush_now(host, line);
            }
        }
    }

    /// The index in the cache of a line, which is filled from memory if it is not there.
    fn fill(&mut self, host: usize, line: usize) -> usize {
        let Host { cache, .. } = &mut self.hosts[host];
        match cache.iter().position(|cached| cached.line == line) {
            Some(at) => at,
            None => {
                cache.push(Cached { line, bytes: self.memory[line], dirty: false });
                cache.len() - 1
            }
        }
    }

    fn evict(&mut self, host: usize, at: usize) {
        let Cached { line, bytes, dirty } = self.hosts[host].cache.swap_remove(at);
        if dirty {
            self.memory[line] = bytes;
        }
    }

    fn drop_line(&mut self, host: usize, line: usize) {
        if let Some(at) = self.hosts[host].cache.iter().position(|cached| cached.line == line) {
            self.evict(host, at);
        }
    }

    fn drain(&mut self, host: usize, at: usize) {
        let Buffered { line, bytes, parts, .. } = self.hosts[host].buffer.remove(at);
        self.drop_line(host, line);
        for part in (0..parts.len()).filter(|part| parts[*part]) {
            let range = part * PART_BYTES..(part + 1) * PART_BYTES;
            self.memory[line][range.clone()].copy_from_slice(&bytes[range]);
        }
    }

    /// One of the entries that may leave next.
    fn drain_any(&mut self, host: usize) {
        let buffer = &self.hosts[host].buffer;
        let Some(least) = buffer.iter().map(|entry| entry.after).min() else { return };
        let may_leave = buffer.iter().filter(|entry| entry.after == least).count();
        let chosen = self.rng.index(may_leave);
        let at = self.hosts[host].buffer.iter().enumerate().filter(|(_, entry)| entry.after == least);
        if let Some(at) = at.map(|(at, _)| at).nth(chosen) {
            self.drain(host, at);
        }
    }

    /// A host that looks at a line which it has stored past the cache sees what it has stored. What has to
    /// leave before that line leaves before it.
    fn drain_line(&mut self, host: usize, line: usize) {
        while self.hosts[host].buffer.iter().any(|entry| entry.line == line) {
            self.drain_any(host);
        }
    }

    fn flush_now(&mut self, host: usize, line: usize) {
        self.drain_line(host, line);
        self.drop_line(host, line);
    }

    fn load(&mut self, host: usize, line: usize) -> Line {
        self.drain_line(host, line);
        let at = self.fill(host, line);
        self.hosts[host].cache[at].bytes
    }

    fn store(&mut self, host: usize, at: usize, bytes: &[u8]) {
        let line = at / LINE_BYTES;
        self.drain_line(host, line);
        let cached = self.fill(host, line);
        let cached = &mut self.hosts[host].cache[cached];
        cached.bytes[at % LINE_BYTES..at % LINE_BYTES + bytes.len()].copy_from_slice(bytes);
        cached.dirty = true;
    }

    /// Stores one part of a line past the cache.
    fn nt_store(&mut self, host: usize, at: usize, bytes: &[u8]) {
        let line = at / LINE_BYTES;
        self.drop_line(host, line);
        let Host { buffer, fences, .. } = &mut self.hosts[host];
        let after = *fences;
        let found = buffer.iter().position(|entry| entry.line == line && entry.after == after);
        let found = found.unwrap_or_else(|| {
            buffer.push(Buffered { line, bytes: [0; LINE_BYTES], parts: Default::default(), after });
            buffer.len() - 1
        });
        buffer[found].bytes[at % LINE_BYTES..][..PART_BYTES].copy_from_slice(bytes);
        buffer[found].parts[at % LINE_BYTES / PART_BYTES] = true;
    }

    fn fence(&mut self, host: usize, order: Order) {
        self.hosts[host].fences += 1;
        if order == Order::Stores {
            return;
        }
        while !self.hosts[host].buffer.is_empty() {
            self.drain_any(host);
        }
        while let Some(line) = self.hosts[host].flushes.pop() {
            self.flush_now(host, line);
        }
    }
}

/// What a process has done so far.
#[derive(Clone, Debug, Default)]
struct Log {
    steps: usize,
    loads: Vec<Line>,
}

/// What the code of a process calls: each call is one step per part of a line, or per line for a flush.
#[derive(Debug)]
pub struct Steps<'a> {
    model: &'a mut ColdCache,
    host: usize,
    log: &'a mut Log,
    /// The steps of this run so far, of which those in the log are only repeated.
    at: usize,
    loads_at: usize,
    /// Whether the run has done its one new step.
    moved: bool,
    /// Whether it has reached another step after that: what it does from here on has no effect.
    stopped: bool,
}

/// What to do with the next step of a run.
enum Turn {
    Repeat,
    Do,
    Stop,
}

impl Steps<'_> {
    fn turn(&mut self) -> Turn {
        if self.stopped || self.at == self.log.steps && self.moved {
            self.stopped = true;
            return Turn::Stop;
        }
        self.at += 1;
        if self.at <= self.log.steps {
            return Turn::Repeat;
        }
        self.moved = true;
        self.log.steps += 1;
        self.model.stir();
        Turn::Do
    }

    /// The units of a range, each with its part of the range.
    fn parts(unit: usize, at: usize, len: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut done = 0;
        core::iter::from_fn(move || {
            let (from, here) = (done, at + done);
            let part = (unit - here % unit).min(len - done);
            done += part;
            (part > 0).then_some((from, here, part))
        })
    }

    /// Reads through the cache.
    pub fn load(&mut self, at: usize, out: &mut [u8]) {
        for (from, here, part) in Self::parts(PART_BYTES, at, out.len()) {
            let bytes = match self.turn() {
                Turn::Stop => return,
                Turn::Repeat => self.log.loads[self.loads_at],
                Turn::Do => {
                    let bytes = self.model.load(self.host, here / LINE_BYTES);
                    self.log.loads.push(bytes);
                    bytes
                }
            };
            self.loads_at += 1;
            out[from..from + part].copy_from_slice(&bytes[here % LINE_BYTES..][..part]);
        }
    }

    /// Writes into the cache.
    pub fn store(&mut self, at: usize, bytes: &[u8]) {
        for (from, here, part) in Self::parts(PART_BYTES, at, bytes.len()) {
            if let Turn::Do = self.turn() {
                self.model.store(self.host, here, &bytes[from..from + part]);
            }
        }
    }

    /// Writes whole lines past the cache.
    ///
    /// # Panics
    /// For a range that is not made of whole lines.
    pub fn nt_store(&mut self, at: usize, bytes: &[u8]) {
        assert!(at.is_multiple_of(LINE_BYTES) && bytes.len().is_multiple_of(LINE_BYTES), "whole lines");
        for (from, here, part) in Self::parts(PART_BYTES, at, bytes.len()) {
            if let Turn::Do = self.turn() {
                self.model.nt_store(self.host, here, &bytes[from..from + part]);
            }
        }
    }

    /// Drops lines from the cache, some time later.
    pub fn flush(&mut self, at: usize, len: usize) {
        for (_, here, _) in Self::parts(LINE_BYTES, at, len) {
            if let Turn::Do = self.turn() {
                self.model.hosts[self.host].flushes.push(here / LINE_BYTES);
            }
        }
    }

    /// Orders what is before it and what is after it.
    pub fn fence(&mut self, order: Order) {
        if let Turn::Do = self.turn() {
            self.model.fence(self.host, order);
        }
    }
}

/// Code that one host runs.
pub struct Process<'p, R> {
    host: usize,
    body: Box<dyn FnMut(&mut Steps<'_>) -> R + 'p>,
    log: Log,
    result: Option<R>,
}

impl<R> fmt::Debug for Process<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("host", &self.host)
            .field("steps", &self.log.steps)
            .finish_non_exhaustive()
    }
}

impl<'p, R> Process<'p, R> {
    /// A process of this host that has not begun.
    #[must_use]
    pub fn new(host: usize, body: impl FnMut(&mut Steps<'_>) -> R + 'p) -> Self {
        Self { host, body: Box::new(body), log: Log::default(), result: None }
    }

    /// Does one step, if the process has not ended. Returns whether it has.
    pub fn step(&mut self, model: &mut ColdCache) -> bool {
        if self.result.is_some() {
            return true;
        }
        let (host, log) = (self.host, &mut self.log);
        let mut steps = Steps { model, host, log, at: 0, loads_at: 0, moved: false, stopped: false };
        let result = (self.body)(&mut steps);
        if !steps.stopped {
            self.result = Some(result);
        }
        self.result.is_some()
    }

    /// Does all its steps.
    pub fn finish(mut self, model: &mut ColdCache) -> R {
        loop {
            self.step(model);
            if let Some(result) = self.result {
                return result;
            }
        }
    }

    /// What it returned, once it has ended.
    #[must_use]
    pub fn result(&self) -> Option<&R> {
        self.result.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<R>(model: &mut ColdCache, host: usize, body: impl FnMut(&mut Steps<'_>) -> R) -> R {
        Process::new(host, body).finish(model)
    }

    fn seen(model: &mut ColdCache, host: usize, fresh: bool) -> u8 {
        run(model, host, |steps| {
            if fresh {
                steps.flush(0, LINE_BYTES);
                steps.fence(Order::All);
            }
            let mut byte = [0];
            steps.load(0, &mut byte);
            byte[0]
        })
    }

    /// How often, of 1000 seeds, a load of host 1 sees what host 0 has written.
    fn hits(fresh: bool, write: impl Fn(&mut ColdCache)) -> u32 {
        let sees = |seed| {
            let mut model = ColdCache::new(Rng::new(seed), 2, 256);
            seen(&mut model, 1, false);
            write(&mut model);
            u32::from(seen(&mut model, 1, fresh) == 9)
        };
        (0..1000).map(sees).sum()
    }

    #[test]
    fn a_fenced_store_past_the_cache_is_seen_by_a_fresh_load_and_not_always_by_another() {
        let write = |model: &mut ColdCache| {
            run(model, 0, |steps| {
                steps.nt_store(0, &[9; LINE_BYTES]);
                steps.fence(Order::Stores);
            });
            model.publish(0);
        };
        assert_eq!(hits(true, write), 1000);
        let stale = 1000 - hits(false, write);
        assert!((100..1000).contains(&stale), "{stale} stale loads");
    }

    #[test]
    fn a_store_that_is_not_fenced_or_is_cached_may_come_late() {
        let unfenced = |model: &mut ColdCache| {
            run(model, 0, |steps| steps.nt_store(0, &[9; LINE_BYTES]));
            model.publish(0);
        };
        let cached = |model: &mut ColdCache| {
            run(model, 0, |steps| {
                steps.store(0, &[9]);
                steps.fence(Order::All);
            });
            model.publish(0);
        };
        for (name, hits) in [("unfenced", hits(true, unfenced)), ("cached", hits(true, cached))] {
            assert!((1..1000).contains(&hits), "{name}: {hits} of 1000 loads see it");
        }
    }

    #[test]
    fn another_host_may_see_a_part_of_a_store() {
        let torn = |seed| {
            let mut model = ColdCache::new(Rng::new(seed), 2, LINE_BYTES);
            let mut writer = Process::new(0, |steps| {
                steps.nt_store(0, &[1; LINE_BYTES]);
                steps.fence(Order::All);
            });
            (0..2).for_each(|_| assert!(!writer.step(&mut model)));
            let line = run(&mut model, 1, |steps| {
                let mut line = [0; LINE_BYTES];
                steps.load(0, &mut line);
                line
            });
            while !writer.step(&mut model) {}
            assert_eq!(model.memory(0, LINE_BYTES), [1; LINE_BYTES], "in the end all of it is there");
            u32::from(line.contains(&1) && line.contains(&0))
        };
        let torn: u32 = (0..1000).map(torn).sum();
        assert!((100..=1000).contains(&torn), "{torn} of 1000 loads saw a part");
    }

    #[test]
    fn a_dirty_line_replaces_its_neighbours_bytes() {
        let lost = |seed| {
            let mut model = ColdCache::new(Rng::new(seed), 2, LINE_BYTES);
            run(&mut model, 0, |steps| steps.store(0, &[1; 32]));
            run(&mut model, 1, |steps| steps.store(32, &[2; 32]));
            model.settle();
            u32::from(model.memory(0, LINE_BYTES) != [[1; 32], [2; 32]].concat())
        };
        let lost: u32 = (0..1000).map(lost).sum();
        assert!((100..1000).contains(&lost), "one of the two was lost in {lost} runs");
    }

    #[test]
    fn a_host_sees_its_own_stores_in_order() {
        for seed in 0..200 {
            let mut model = ColdCache::new(Rng::new(seed), 2, 256);
            let own = run(&mut model, 0, |steps| {
                let mut seen = [[0; 100]; 3];
                steps.store(10, &[1; 100]);
                steps.load(10, &mut seen[0]);
                steps.nt_store(0, &[2; 128]);
                steps.load(10, &mut seen[1]);
                steps.store(10, &[3; 100]);
                steps.load(10, &mut seen[2]);
                seen
            });
            assert_eq!(own, [[1; 100], [2; 100], [3; 100]], "seed {seed}");
            model.settle();
            assert_eq!(model.memory(9, 3), [2, 3, 3], "seed {seed}");
        }
    }

    #[test]
    fn processes_interleave_and_each_step_happens_once() {
        let mut model = ColdCache::new(Rng::new(3), 2, 4 * LINE_BYTES);
        let mut first = Process::new(0, |steps| {
            let mut bytes = [0; 2 * LINE_BYTES];
            steps.load(0, &mut bytes);
            steps.nt_store(0, &[7; 2 * LINE_BYTES]);
            steps.fence(Order::All);
            bytes
        });
        for step in 1..=17 {
            assert_eq!(first.step(&mut model), step == 17, "two lines read, two written, a fence");
            if step <= 8 {
                continue;
            }
            // Another host writes the same line meanwhile, and is overtaken.
            run(&mut model, 1, |steps| {
                steps.nt_store(0, &[8; LINE_BYTES]);
                steps.fence(Order::All);
            });
        }
        assert!(first.step(&mut model) && first.step(&mut model));
        let expected: Vec<u8> = [[0; LINE_BYTES], [0; LINE_BYTES]].concat();
        assert_eq!(first.result().map(|bytes| bytes.to_vec()), Some(expected));
        assert_eq!(model.memory(64, 1), [7]);
    }
}
