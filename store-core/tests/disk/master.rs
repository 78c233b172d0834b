//! The master's half of the protocol, and what readers do.

use std::time::Duration;

use store_core::disk::format::Stream;
use store_core::disk::{Adopted, Demote, Failure, Refused, Removed, Stage, State};

use crate::judge::{Object, Violation};
use crate::scenario::Lies;
use crate::world::{Known, Reading, What, World};

const KEYS: u64 = 24;
/// The generation of a read whose reader did not ask the master.
pub(crate) const GUESSED: u64 = u64::MAX;

impl World {
    pub(super) fn key(&mut self) -> (u64, Vec<u8>) {
        let n = self.rng.below(KEYS);
        (n % 2, format!("key-{}", n / 2).into_bytes())
    }

    pub(super) fn put(&mut self) {
        let (tenant, key) = self.key();
        let max = self.geometry.object_bytes_max();
        let share = if self.rng.below(4) == 0 { 1 } else { 8 };
        let len = 4_096 + self.rng.below((max - 4_096) / share);
        let generation = self.next_generation;
        self.next_generation += 1;
        self.take_away(&(tenant, key.clone()));
        self.objects.insert(generation, Object::new(tenant, key.clone(), generation, len));
        self.current.insert((tenant, key), generation);
        self.known.insert(generation, Known { in_memory: true, ..Known::default() });
        self.report.puts += 1;
    }

    pub(super) fn remove(&mut self) {
        let key = self.key();
        self.take_away(&key);
    }

    /// Removes the object of a key, if there is one.
    pub(super) fn take_away(&mut self, key: &(u64, Vec<u8>)) {
        let Some(generation) = self.current.remove(key) else { return };
        self.report.removes += 1;
        self.objects.get_mut(&generation).unwrap().removed = true;
        let known = self.known[&generation];
        self.talk(|| format!("generation {generation} is removed: {known:?}"));
        // The master knows that it is not on the disk only if it never was, or was given up.
        if known.place.is_some() || known.demoting || known.maybe {
            self.tombstones.insert(generation, false);
            self.tell_tombstones();
        }
    }

    pub(super) fn removed(&self, generation: u64) -> Removed {
        let object = &self.objects[&generation];
        Removed { generation, tenant: object.tenant, key: object.key.clone().into() }
    }

    pub(super) fn tell_tombstones(&mut self) {
        if self.clearing.is_some() {
            return;
        }
        let untold: Vec<u64> =
            self.tombstones.iter().filter(|(_, told)| !**told).map(|(it, _)| *it).collect();
        for generation in untold {
            if self.scenario.lies.contains(Lies::TOMBSTONE) {
                self.tombstones.remove(&generation);
            }
            let place = self.known[&generation].place;
            let removed = self.removed(generation);
            match self.core.forget(self.now, removed, place) {
                Ok(()) => {
                    self.tombstones.entry(generation).and_modify(|told| *told = true);
                }
                Err(Refused::TombstonesFull) => {
                    self.clear();
                    return;
                }
                Err(Refused::Busy | Refused::ReadOnly) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    /// All places are dropped; removals up to now are confirmed by the answer.
    pub(super) fn clear(&mut self) {
        if !self.reads.is_empty() || self.core.clear(self.now).is_err() {
            return;
        }
        self.held.clear();
        // Until the answer, what was on the disk may be announced again.
        let mut placed = Vec::new();
        for (generation, known) in &mut self.known {
            if known.place.take().is_some() {
                known.maybe = true;
                placed.push(*generation);
            }
        }
        self.clearing = Some((self.tombstones.keys().copied().collect(), placed));
    }

    pub(super) fn demote(&mut self) {
        let free = |generation: &&u64| {
            let known = &self.known[*generation];
            known.in_memory && known.place.is_none() && !known.demoting
        };
        let candidates: Vec<u64> = self.current.values().filter(free).copied().collect();
        if candidates.is_empty() {
            return;
        }
        let generation = candidates[self.rng.index(candidates.len())];
        let id = self.next_id;
        self.next_id += 1;
        let object = &self.objects[&generation];
        let request = Demote {
            id,
            tenant: object.tenant,
            key: object.key.clone().into(),
            generation,
            len: object.len,
            crc32c: object.crc32c,
            stream: Stream::ALL[self.rng.index(2)],
            token: generation,
        };
        match self.core.demote(self.now, request) {
            Ok(()) => {
                self.talk(|| format!("demotion {id} of generation {generation}"));
                self.demotions.insert(id, generation);
                self.known.get_mut(&generation).unwrap().demoting = true;
            }
            Err(Refused::Busy) => self.report.busy += 1,
            Err(Refused::ReadOnly) => {}
            Err(other) => panic!("{other:?}"),
        }
    }

    pub(super) fn get(&mut self) {
        let key = self.key();
        let Some(generation) = self.current.get(&key).copied() else { return };
        let Some(locator) = self.known[&generation].place else { return };
        let id = self.next_id;
        self.next_id += 1;
        let len = self.objects[&generation].len;
        let deadline = self.now + Duration::from_millis(10 + self.rng.below(40));
        match self.core.stage(self.now, Stage { id, locator, len, token: id, deadline }) {
            Ok(()) => {
                let bytes = self.geometry.image_bytes(len) as usize;
                let reading = Reading { generation, buffer: vec![0xee; bytes], answered: false };
                self.reads.insert(id, reading);
            }
            Err(Refused::Gone) => {
                self.report.gone += 1;
                self.gone.insert(locator);
                // Its node has told the master.
                self.drop_places(locator..locator + 1, true);
            }
            Err(Refused::Absent) => self.report.gone += 1,
            Err(Refused::Busy) => self.report.busy += 1,
            Err(other) => panic!("{other:?}"),
        }
    }

    /// A reader asks for what it makes up. Of an object that is there, nothing but its absence counts as
    /// gone.
    pub(super) fn guess(&mut self) {
        let known = self.known.iter().filter_map(|(generation, known)| Some((*generation, known.place?)));
        let places: Vec<(u64, u64)> = known.chain(self.former.iter().copied()).collect();
        if places.is_empty() {
            return;
        }
        let (generation, near) = places[self.guesses.index(places.len())];
        let (extent_bytes, len) = (u64::from(self.geometry.extent_bytes()), self.objects[&generation].len);
        let (locator, len) = match self.guesses.below(4) {
            0 => (near, len + self.guesses.below(2 * extent_bytes)),
            1 => (near + 512 * self.guesses.below(64), len),
            2 => (near + self.guesses.below(3) * extent_bytes, len),
            _ => (near, len),
        };
        let id = self.next_id;
        self.next_id += 1;
        let deadline = self.now + Duration::from_millis(20);
        match self.core.stage(self.now, Stage { id, locator, len, token: id, deadline }) {
            Ok(()) => {
                let bytes = self.geometry.image_bytes(len) as usize;
                let reading = Reading { generation: GUESSED, buffer: vec![0xee; bytes], answered: false };
                self.reads.insert(id, reading);
            }
            Err(Refused::Gone) => {
                self.gone.insert(locator);
            }
            Err(Refused::Absent | Refused::OtherLength | Refused::Busy) => {}
            Err(other) => panic!("{other:?}"),
        }
    }

    /// The node tells the master what is gone, so nothing may be there any more: neither what is written nor
    /// what is announced in the same life.
    pub(super) fn not_gone(&self, locator: u64) -> Result<(), Violation> {
        match self.gone.contains(&locator) {
            true => Err(Violation::CameBack(format!("{locator}"))),
            false => Ok(()),
        }
    }

    pub(super) fn offset_of(&self, locator: u64) -> (u64, u64) {
        let (sequence, offset) = self.geometry.place(locator);
        (sequence, self.geometry.extent_at(self.slots[&sequence]) + u64::from(offset))
    }

    pub(super) fn placed(&mut self, generation: u64, locator: u64) {
        let (sequence, at) = self.offset_of(locator);
        self.held.add(sequence, at, self.geometry.image_bytes(self.objects[&generation].len).into());
        let known = self.known.get_mut(&generation).unwrap();
        known.twice |= known.place.is_some();
        known.place = Some(locator);
    }

    pub(super) fn drop_places(&mut self, locators: std::ops::Range<u64>, maybe: bool) {
        for known in self.known.values_mut() {
            if known.place.is_some_and(|place| locators.contains(&place)) {
                known.place = None;
                known.maybe |= maybe;
            }
        }
    }

    /// What the master does when it is asked for an extent: it drops the places, waits for readers, answers.
    pub(super) fn answer_reclaim(&mut self, sequence: u64) {
        let extent_bytes = u64::from(self.geometry.extent_bytes());
        let range = sequence * extent_bytes..(sequence + 1) * extent_bytes;
        self.drop_places(range, false);
        if self.reads.is_empty() {
            self.held.answered(sequence);
            self.core.reclaimed(self.now, sequence);
        } else {
            self.later(Duration::from_millis(1), What::AnswerReclaim(sequence));
        }
    }

    pub(super) fn staged(&mut self, id: u64) -> Result<(), Violation> {
        let reading = self.reads.remove(&id).filter(|reading| !reading.answered);
        let reading = reading.ok_or_else(|| Violation::Answers(format!("read {id} was answered before")))?;
        if reading.generation == GUESSED {
            return Ok(());
        }
        let object = &self.objects[&reading.generation];
        if self.scenario.lies.contains(Lies::CHECKSUM) || object.verifies(&reading.buffer) {
            self.report.hits += 1;
            if !object.is(&reading.buffer) {
                return Err(Violation::WrongBytes(format!("{object:?}")));
            }
            return Ok(());
        }
        self.report.mismatches += 1;
        if self.honest {
            return Err(Violation::Rubbish(format!("{object:?}")));
        }
        self.unreadable(reading.generation);
        Ok(())
    }

    /// The master drops a place that could not be read.
    pub(super) fn unreadable(&mut self, generation: u64) {
        let known = self.known.get_mut(&generation).unwrap();
        (known.place, known.maybe) = (None, true);
    }

    pub(super) fn read_failed(&mut self, id: u64, why: Failure, buffer_free: bool) -> Result<(), Violation> {
        let Some(reading) = self.reads.get_mut(&id).filter(|reading| !reading.answered) else {
            return Err(Violation::Answers(format!("read {id} was answered before")));
        };
        reading.answered = true;
        let generation = reading.generation;
        if buffer_free {
            self.reads.remove(&id);
        }
        if generation == GUESSED {
            return Ok(());
        }
        if why == Failure::Deadline {
            self.report.expired += 1;
        } else {
            self.report.read_failed += 1;
            self.unreadable(generation);
        }
        Ok(())
    }

    /// The master's decision about an object that was found.
    pub(super) fn adopt(&mut self, adopted: &Adopted) -> Result<(), Violation> {
        if self.core.state() == State::Opening {
            return Err(Violation::AnnouncedEarly(format!("{adopted:?}")));
        }
        self.not_gone(adopted.locator)?;
        let generation = adopted.object.generation;
        let Some(object) = self.objects.get(&generation).cloned() else {
            return Err(Violation::AnnouncedRubbish(format!("{adopted:?} was never put")));
        };
        let trusting = self.scenario.lies.contains(Lies::GENERATION);
        let expected = self.tombstones.contains_key(&generation) && !trusting;
        if self.honest {
            let (_, at) = self.offset_of(adopted.locator);
            let bytes = self.sim.read(at, self.geometry.image_bytes(object.len) as usize);
            if adopted.crc32c != object.crc32c || !object.is(&bytes) {
                return Err(Violation::AnnouncedRubbish(format!("{object:?}")));
            }
            if object.removed && !expected {
                return Err(Violation::Resurrected(format!("{object:?}")));
            }
        }
        if object.removed {
            self.report.refused += 1;
            self.known.get_mut(&generation).unwrap().place = Some(adopted.locator);
            self.tombstones.entry(generation).and_modify(|told| *told = false);
            return Ok(());
        }
        self.report.adopted += 1;
        self.placed(generation, adopted.locator);
        Ok(())
    }

    /// What was not announced is not there, and will not be announced.
    pub(super) fn ready(&mut self) {
        for (key, generation) in std::mem::take(&mut self.current) {
            let known = self.known.get_mut(&generation).unwrap();
            known.maybe = known.twice;
            if known.in_memory || known.place.is_some() {
                self.current.insert(key, generation);
            }
        }
    }
}
