//! One disk, its driver, and the master's half of the protocol, in one thread.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use store_core::disk::format::{BatchHeader, FIRST_EXTENT_AT, Geometry, PAGE_BYTES};
use store_core::disk::{Adopted, Disk, Event, Failure, State};
use te_core::Instant;
use te_core::testkit::Rng;

use crate::driver::{self, Fate, Running};
use crate::judge::{Held, Object, Violation};
use crate::scenario::{Lies, Report, Scenario};
use crate::sim_disk::SimDisk;

const UUID: [u8; 16] = *b"a simulated disk";
const LINEAGE: u64 = 7;
const TICK: Duration = Duration::from_millis(2);

/// By generation.
pub(crate) type Objects = BTreeMap<u64, Object>;

#[derive(Debug)]
pub(crate) enum What {
    Ended(Running),
    Tick,
    AnswerReclaim(u64),
}

/// What the master knows about a generation, as long as it exists or its removal is not confirmed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    pub(crate) in_memory: bool,
    pub(crate) place: Option<u64>,
    pub(crate) demoting: bool,
    /// It has more than one place.
    pub(crate) twice: bool,
    /// It may be on the disk although no place is known.
    pub(crate) maybe: bool,
}

#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) generation: u64,
    pub(crate) buffer: Vec<u8>,
    pub(crate) answered: bool,
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    /// Whether the disk reports its errors during the whole run.
    pub(crate) honest: bool,
    pub(crate) rng: Rng,
    pub(crate) now: Instant,
    pub(crate) queue: BTreeMap<(Instant, u64), What>,
    pub(crate) queued: u64,
    pub(crate) sim: SimDisk,
    pub(crate) core: Disk,
    pub(crate) geometry: Geometry,
    pub(crate) block_bytes: u32,
    pub(crate) objects: Objects,
    /// The generation of each key.
    pub(crate) current: BTreeMap<(u64, Vec<u8>), u64>,
    pub(crate) known: BTreeMap<u64, Known>,
    /// Removed generations that may be on the disk, and whether this incarnation of the node was told.
    pub(crate) tombstones: BTreeMap<u64, bool>,
    /// Removed generations, and those with a place, at the time of a request to clear the disk.
    pub(crate) clearing: Option<(Vec<u64>, Vec<u64>)>,
    pub(crate) next_generation: u64,
    pub(crate) next_id: u64,
    pub(crate) demotions: BTreeMap<u64, u64>,
    pub(crate) reads: BTreeMap<u64, Reading>,
    /// What readers guess does not change what happens otherwise.
    pub(crate) guesses: Rng,
    /// Locators that the disk has said are gone, in this life.
    pub(crate) gone: BTreeSet<u64>,
    /// Generations and their places before the last crash.
    pub(crate) former: Vec<(u64, u64)>,
    /// Of every extent that was ever opened.
    pub(crate) slots: BTreeMap<u64, u32>,
    pub(crate) held: Held,
    pub(crate) ticks: u64,
    few_tombstones: bool,
    /// A write failed since the last restart: that of a footer, perhaps.
    write_failed: bool,
    /// Prints what happens: `SNOWSKIN_TALK=1`.
    pub(crate) talks: bool,
    pub(crate) report: Report,
}

impl World {
    pub(crate) fn new(seed: u64, scenario: Scenario) -> Self {
        let mut rng = Rng::new(seed);
        let block_bytes = [512, 4_096][rng.index(2)];
        let extent_bytes = [128 << 10, 256 << 10][rng.index(2)];
        let extents = 9 + rng.below(8);
        let bytes = FIRST_EXTENT_AT + extents * u64::from(extent_bytes);
        let geometry = Geometry::new(bytes, extent_bytes, block_bytes).unwrap();
        let few_tombstones = rng.below(4) == 0;
        let config = Scenario::config(&mut rng, few_tombstones);
        let now = Instant::from_millis(1_000);
        let core = Disk::format(now, config, geometry, UUID, LINEAGE).unwrap();
        Self {
            honest: scenario.is_honest(),
            scenario,
            rng,
            now,
            queue: BTreeMap::new(),
            queued: 0,
            sim: SimDisk::new(bytes),
            core,
            geometry,
            block_bytes,
            objects: BTreeMap::new(),
            current: BTreeMap::new(),
            known: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            clearing: None,
            next_generation: 1,
            next_id: 1,
            demotions: BTreeMap::new(),
            reads: BTreeMap::new(),
            guesses: Rng::new(!seed),
            gone: BTreeSet::new(),
            former: Vec::new(),
            slots: BTreeMap::new(),
            held: Held::default(),
            ticks: 0,
            few_tombstones,
            write_failed: false,
            talks: std::env::var_os("SNOWSKIN_TALK").is_some(),
            report: Report::default(),
        }
    }

    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        self.format()?;
        self.later(TICK, What::Tick);
        while self.ticks < self.scenario.ticks {
            self.step()?;
        }
        self.heal()?;
        self.count();
        Ok(self.report)
    }

    /// Formatting is repeated until it succeeds: a disk without a superblock is no disk.
    fn format(&mut self) -> Result<(), Violation> {
        let faults = std::mem::replace(&mut self.scenario, Scenario::calm());
        self.drain()?;
        while self.core.state() != State::Ready {
            self.step()?;
        }
        self.scenario = Scenario { lies: faults.lies, ..faults };
        Ok(())
    }

    pub(crate) fn talk(&self, what: impl FnOnce() -> String) {
        if self.talks {
            println!("{:>12} ns  {}", self.now.as_nanos(), what());
        }
    }

    pub(crate) fn later(&mut self, after: Duration, what: What) {
        self.queued += 1;
        self.queue.insert((self.now + after, self.queued), what);
    }

    fn step(&mut self) -> Result<(), Violation> {
        let first = self.queue.first_key_value().map(|((at, _), _)| *at);
        let due = self.core.poll_at();
        if let Some(due) = due.filter(|due| first.is_none_or(|first| *due < first)) {
            if due < self.now {
                return Err(Violation::Stuck(format!("{due:?} is before {:?}", self.now)));
            }
            self.now = due;
            self.core.handle_timeout(due);
            if self.core.poll_at().is_some_and(|at| at <= due) {
                return Err(Violation::Stuck(format!("it is {due:?}, and something is due still")));
            }
        } else if let Some(((at, _), what)) = self.queue.pop_first() {
            self.now = at;
            match what {
                What::Ended(running) => self.ended(running)?,
                What::Tick => self.tick()?,
                What::AnswerReclaim(sequence) => self.answer_reclaim(sequence),
            }
        }
        self.drain()
    }

    fn drain(&mut self) -> Result<(), Violation> {
        loop {
            let mut idle = true;
            while let Some(order) = self.core.poll_order() {
                idle = false;
                if let Some((sequence, slot)) = driver::extent_of(&order, &UUID, &self.geometry) {
                    self.slots.insert(sequence, slot);
                }
                let (running, micros) = driver::begin(&self.scenario, &mut self.rng, &self.sim, order);
                self.talk(|| format!("{running}"));
                self.report.stalls += u64::from(micros >= 100_000);
                self.later(Duration::from_micros(micros), What::Ended(running));
            }
            while let Some(event) = self.core.poll_event() {
                idle = false;
                self.on_event(event)?;
            }
            if idle {
                return self.bounded();
            }
        }
    }

    fn bounded(&self) -> Result<(), Violation> {
        let limit = 64 * self.geometry.extents() as usize + 16 * self.objects.len() + 4_096;
        let bytes = self.core.memory_bytes();
        if bytes > limit + 64 * 128 || self.core.orders_in_flight() > 128 || self.core.tombstones() > 4_096 {
            return Err(Violation::Memory(format!("{bytes} bytes, limit {limit}")));
        }
        Ok(())
    }

    fn ended(&mut self, running: Running) -> Result<(), Violation> {
        let op = running.order.op;
        self.write_failed |= matches!(running.fate, Fate::Fails(_));
        let (now, lies) = (self.now, self.scenario.lies);
        let view = (&self.objects, &self.held);
        let told = driver::end((now, lies), running, &mut self.sim, &mut self.rng, view, &mut self.report)?;
        if let Some((token, offset)) = told.buffer
            && let Some(reading) = self.reads.get_mut(&token)
        {
            let at = offset as usize;
            reading.buffer[at..at + told.data.len()].copy_from_slice(&told.data);
        }
        self.core.complete(now, op, told.end());
        Ok(())
    }

    fn tick(&mut self) -> Result<(), Violation> {
        self.ticks += 1;
        self.later(TICK, What::Tick);
        if self.rng.chance_ppm(self.scenario.rot_ppm) {
            self.sim.rot(FIRST_EXTENT_AT, &mut self.rng);
        }
        let stopped = matches!(self.core.state(), State::ReadOnly(_) | State::Failed(_));
        let odds = if stopped { 60_000 } else { 5_000 };
        if self.scenario.crashes && self.rng.chance_ppm(odds) {
            self.crash()?;
        }
        self.tell_tombstones();
        if self.guesses.below(3) == 0 {
            self.guess();
        }
        for _ in 0..1 + self.rng.below(3) {
            match self.rng.below(20) {
                0..6 => self.put(),
                6..13 => self.demote(),
                13..18 => self.get(),
                _ => self.remove(),
            }
        }
        Ok(())
    }

    fn on_event(&mut self, event: Event) -> Result<(), Violation> {
        self.talk(|| format!("{event:?}"));
        match event {
            Event::Adopt { lineage, objects } => {
                assert_eq!(lineage, LINEAGE);
                for adopted in &objects {
                    self.adopt(adopted)?;
                }
            }
            Event::Ready => self.ready(),
            Event::Distrusted => {
                self.report.distrusted += 1;
                let excused = self.few_tombstones || self.write_failed;
                if self.honest && self.scenario.lies == Lies::NONE && !excused {
                    return Err(Violation::Distrusted(format!("at {:?}", self.now)));
                }
            }
            Event::Demoted { id, locator } => {
                let generation = self.demotion(id)?;
                self.report.demoted += 1;
                self.not_gone(locator)?;
                self.placed(generation, locator);
            }
            Event::DemoteFailed { id, why } => {
                let generation = self.demotion(id)?;
                self.report.demote_failed += 1;
                self.known.get_mut(&generation).unwrap().maybe |= why != Failure::Removed;
            }
            Event::Staged { id } => self.staged(id)?,
            Event::ReadFailed { id, why, buffer_free } => self.read_failed(id, why, buffer_free)?,
            Event::BufferFree { token } => {
                if !self.reads.remove(&token).is_some_and(|reading| reading.answered) {
                    return Err(Violation::Answers(format!("buffer {token} was not taken")));
                }
            }
            Event::Forgotten(removed) => {
                self.report.forgotten += 1;
                self.tombstones.remove(&removed.generation);
            }
            Event::Reclaim { sequence } => {
                self.report.reclaimed += 1;
                if self.scenario.lies.contains(Lies::RECLAIM) {
                    self.core.reclaimed(self.now, sequence);
                }
                let after = Duration::from_micros(100 + self.rng.below(30_000));
                self.later(after, What::AnswerReclaim(sequence));
            }
            Event::Dropped { from, to } => {
                self.report.dropped += 1;
                self.drop_places(from..to, true);
            }
            Event::Cleared => {
                self.report.cleared += 1;
                let (removed, placed) = self.clearing.take().unwrap_or_default();
                self.tombstones.retain(|generation, _| !removed.contains(generation));
                for generation in placed {
                    self.known.get_mut(&generation).unwrap().maybe = false;
                }
            }
            Event::Stopped(_) => match self.core.state() {
                State::ReadOnly(_) => self.report.read_only += 1,
                _ => self.report.failed += 1,
            },
        }
        Ok(())
    }

    pub(crate) fn demotion(&mut self, id: u64) -> Result<u64, Violation> {
        let generation = self.demotions.remove(&id);
        let generation =
            generation.ok_or_else(|| Violation::Answers(format!("demotion {id} was answered before")))?;
        self.known.get_mut(&generation).unwrap().demoting = false;
        Ok(generation)
    }

    fn crash(&mut self) -> Result<(), Violation> {
        if matches!(self.core.state(), State::Opening) && self.rng.below(2) == 0 {
            return Ok(());
        }
        self.report.crashes += 1;
        self.talk(|| format!("crash, {:?}", self.core.state()));
        let queue = std::mem::take(&mut self.queue);
        for (at, what) in queue {
            match what {
                What::Ended(running) => {
                    driver::interrupt(&running, &mut self.sim, &mut self.rng, &self.objects);
                }
                What::AnswerReclaim(_) => {}
                tick @ What::Tick => {
                    self.queue.insert(at, tick);
                }
            }
        }
        if self.rng.below(3) > 0 {
            self.report.power_losses += 1;
            self.sim.lose_power(&mut self.rng);
        }
        self.sim.restart();
        self.count();
        self.reads.clear();
        self.demotions.clear();
        self.held.clear();
        self.clearing = None;
        self.gone.clear();
        let known = self.known.iter().filter_map(|(generation, known)| Some((*generation, known.place?)));
        self.former = known.collect();
        for known in self.known.values_mut() {
            known.maybe |= known.place.is_some() || known.demoting;
            (known.in_memory, known.place, known.demoting) = (false, None, false);
            known.twice = false;
        }
        let known = &self.known;
        self.current.retain(|_, generation| known[generation].maybe);
        self.tombstones.values_mut().for_each(|told| *told = false);
        self.restart()
    }

    fn restart(&mut self) -> Result<(), Violation> {
        self.write_failed = false;
        let config = Scenario::config(&mut self.rng, self.few_tombstones);
        let bytes = self.sim.bytes();
        self.core = Disk::open(self.now, config, bytes, self.block_bytes, LINEAGE).unwrap();
        if self.scenario.lies.contains(Lies::ADOPT) {
            self.announce_early()?;
        }
        Ok(())
    }

    /// What a hasty driver would announce: whatever first headers say.
    fn announce_early(&mut self) -> Result<(), Violation> {
        for slot in 0..self.geometry.extents() {
            let page = self.sim.read(self.geometry.extent_at(slot), PAGE_BYTES as usize);
            let Some(header) = BatchHeader::decode(&page, &UUID, &self.geometry, slot, 0) else { continue };
            for entry in header.entries {
                let locator = self.geometry.locator(header.extent.sequence, entry.offset);
                let removed = self.removed(entry.generation);
                let (len, crc32c) = (entry.len, entry.crc32c);
                self.adopt(&Adopted { object: removed, len, crc32c, locator })?;
            }
        }
        Ok(())
    }

    /// Without further faults everything that was accepted is answered, and the disk works.
    fn heal(&mut self) -> Result<(), Violation> {
        let lies = self.scenario.lies;
        self.scenario = Scenario { lies, ..Scenario::calm() };
        self.queue.retain(|_, what| !matches!(what, What::Tick));
        for _ in 0..4 {
            self.rest()?;
            // Orders that were begun before may still fail.
            if matches!(self.core.state(), State::ReadOnly(_) | State::Failed(_)) {
                self.crash()?;
                self.drain()?;
            }
            self.tell_tombstones();
        }
        self.rest()?;
        let ready = self.core.state() == State::Ready;
        let failed = matches!(self.core.state(), State::Failed(_)) && !self.honest;
        // A disk that has lost most of its extents to errors has no room left.
        let usable = self.geometry.extents() as usize - self.core.superblock().bad.len();
        let waits = self.demotions.len() + self.reads.len() + self.tombstones.len();
        if usable >= 7 && !failed && (!ready || waits > 0 && self.clearing.is_none()) {
            let told: BTreeSet<bool> = self.tombstones.values().copied().collect();
            return Err(Violation::Stuck(format!(
                "{:?}: {} demotions, {} reads, {} tombstones ({told:?}) wait; {} extents are free",
                self.core.state(),
                self.demotions.len(),
                self.reads.len(),
                self.tombstones.len(),
                self.core.free_extents(),
            )));
        }
        Ok(())
    }

    /// Lets everything end that has begun.
    fn rest(&mut self) -> Result<(), Violation> {
        self.drain()?;
        let end = self.now + Duration::from_secs(2);
        while self.now < end && (!self.queue.is_empty() || self.core.poll_at().is_some()) {
            self.step()?;
        }
        Ok(())
    }

    fn count(&mut self) {
        let counters = self.core.counters();
        self.report.torn += counters.torn_total;
        self.report.syncs += counters.syncs_total;
        let bad = self.core.superblock().bad.len() as u64;
        self.report.bad_extents = self.report.bad_extents.max(bad);
    }
}
