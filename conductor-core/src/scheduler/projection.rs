//! The future of a decode instance: how many requests it will have, in steps of half a second.
//!
//! Requests on their way count from the step in which their prefill should end; those that decode count until
//! the step in which their output should end. Looking up a time is one access; a change costs one pass over
//! the steps that follow. A request that has not ended in its step counts again until it is reported as
//! ended.

use alloc::boxed::Box;
use alloc::vec;
use core::ops::{AddAssign, SubAssign};

use te_core::Instant;

/// Nanoseconds per step.
pub(super) const STEP_NS: u64 = 500_000_000;
/// Steps that are looked ahead: 64 s.
const STEPS: usize = 128;

/// Requests that decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// How many.
    pub sequences: i64,
    /// Tokens of context, halfway through their output.
    pub context: i64,
    /// Tokens of KV at their end.
    pub kv: i64,
}

impl AddAssign for Load {
    fn add_assign(&mut self, other: Self) {
        self.sequences += other.sequences;
        self.context += other.context;
        self.kv += other.kv;
    }
}

impl SubAssign for Load {
    fn sub_assign(&mut self, other: Self) {
        self.sequences -= other.sequences;
        self.context -= other.context;
        self.kv -= other.kv;
    }
}

/// Where a request was counted; needed to change or remove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    load: Load,
    arrival: u64,
    finish: Option<u64>,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Projection {
    /// The step of now. Steps `head .. head + STEPS` are at their number modulo `STEPS`.
    head: u64,
    /// The load in each step.
    at: Box<[Load]>,
    /// What was counted as ended from each step on, and has not been reported as ended.
    finishing: Box<[Load]>,
    requests: u64,
}

const fn step_of(at: Instant) -> u64 {
    at.as_nanos() / STEP_NS
}

const fn index(step: u64) -> usize {
    (step % STEPS as u64) as usize
}

impl Projection {
    pub(super) fn new() -> Self {
        let empty = || vec![Load::default(); STEPS].into_boxed_slice();
        Self { head: 0, at: empty(), finishing: empty(), requests: 0 }
    }

    /// Makes the step of `now` the first one. Time that goes back changes nothing.
    #[inline]
    pub(super) fn advance(&mut self, now: Instant) {
        let to = step_of(now);
        if to > self.head {
            self.advance_to(to);
        }
    }

    fn advance_to(&mut self, to: u64) {
        if to > self.head + STEPS as u64 {
            // Everything that should have ended did not; everything that should have arrived has.
            let mut load = self.at[index(self.head + STEPS as u64 - 1)];
            for finishing in &mut *self.finishing {
                load += core::mem::take(finishing);
            }
            self.at.fill(load);
            self.head = to;
            return;
        }
        while self.head < to {
            let old = index(self.head);
            let late = core::mem::take(&mut self.finishing[old]);
            if late != Load::default() {
                self.at.iter_mut().for_each(|load| *load += late);
            }
            self.at[old] = self.at[index(self.head + STEPS as u64 - 1)];
            self.head += 1;
        }
    }

    /// The load in the step of `time`; the last step that is known when it is later.
    #[inline]
    pub(super) fn at(&self, time: Instant) -> Load {
        self.at[index(self.clamped(step_of(time)))]
    }

    /// The first step from that of `time` on in which `fits` holds: its beginning.
    pub(super) fn first(&self, time: Instant, mut fits: impl FnMut(Load) -> bool) -> Option<Instant> {
        let from = self.clamped(step_of(time));
        (from..self.head + STEPS as u64)
            .find(|&step| fits(self.at[index(step)]))
            .map(|step| Instant::from_nanos(step * STEP_NS))
    }

    /// The loads of the steps from that of `from` to that of `to`, as far as is looked ahead.
    pub(super) fn between(&self, from: Instant, to: Instant) -> impl Iterator<Item = Load> {
        (self.clamped(step_of(from))..=self.clamped(step_of(to))).map(|step| self.at[index(step)])
    }

    /// Requests that are counted, at any time.
    pub(super) const fn requests(&self) -> u64 {
        self.requests
    }

    /// Counts `load` from `arrival` to `finish`.
    pub(super) fn add(&mut self, load: Load, arrival: Instant, finish: Instant) -> Entry {
        let arrival = self.clamped(step_of(arrival));
        self.range(arrival, |at| *at += load);
        self.requests += 1;
        let mut entry = Entry { load, arrival, finish: None };
        self.count_finish(&mut entry, finish);
        entry
    }

    /// Removes what [`add`](Self::add) counted.
    pub(super) fn remove(&mut self, entry: Entry) {
        let load = entry.load;
        self.range(entry.arrival.max(self.head), |at| *at -= load);
        self.uncount_finish(entry);
        self.requests -= 1;
    }

    /// Counts another arrival.
    pub(super) fn move_to(&mut self, entry: &mut Entry, arrival: Instant, finish: Instant) {
        let (arrival, step) = (self.clamped(step_of(arrival)), step_of(finish));
        if entry.arrival.max(self.head) == arrival && entry.finish == Some(step) {
            return;
        }
        let load = entry.load;
        self.range(entry.arrival.max(self.head), |at| *at -= load);
        self.range(arrival, |at| *at += load);
        entry.arrival = arrival;
        self.uncount_finish(*entry);
        self.count_finish(entry, finish);
    }

    /// Whether nothing is counted anywhere.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let zero = |loads: &[Load]| loads.iter().all(|load| *load == Load::default());
        self.requests == 0 && zero(&self.at) && zero(&self.finishing)
    }

    fn clamped(&self, step: u64) -> u64 {
        step.clamp(self.head, self.head + STEPS as u64 - 1)
    }

    /// Every step from `from` on; `from` is not before `head`.
    fn range(&mut self, from: u64, change: impl Fn(&mut Load)) {
        let (first, head) = (index(from), index(self.head));
        if first >= head {
            self.at[first..].iter_mut().for_each(&change);
            self.at[..head].iter_mut().for_each(&change);
        } else {
            self.at[first..head].iter_mut().for_each(&change);
        }
    }

    /// An end beyond what is looked ahead is not counted: [`move_to`](Self::move_to) counts it once it is
    /// near.
    fn count_finish(&mut self, entry: &mut Entry, finish: Instant) {
        let step = step_of(finish);
        entry.finish = None;
        if step <= self.head || step >= self.head + STEPS as u64 || step <= entry.arrival {
            return;
        }
        let load = entry.load;
        self.range(step, |at| *at -= load);
        self.finishing[index(step)] += load;
        entry.finish = Some(step);
    }

    fn uncount_finish(&mut self, entry: Entry) {
        let Some(step) = entry.finish.filter(|&step| step >= self.head) else { return };
        let load = entry.load;
        self.range(step, |at| *at += load);
        self.finishing[index(step)] -= load;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use te_core::testkit::Rng;

    fn load(kv: i64) -> Load {
        Load { sequences: 1, context: kv / 2, kv }
    }

    fn at(step: u64) -> Instant {
        Instant::from_nanos(step * STEP_NS)
    }

    #[test]
    fn a_request_counts_from_its_arrival_to_its_end() {
        let mut projection = Projection::new();
        let entry = projection.add(load(100), at(4), at(10));
        let sequences = |p: &Projection, step| p.at(at(step)).sequences;
        assert_eq!([0, 3, 4, 9, 10, 500].map(|step| sequences(&projection, step)), [0, 0, 1, 1, 0, 0]);
        // It does not end in its step: from then on it counts.
        projection.advance(at(11));
        assert_eq!(sequences(&projection, 11), 1);
        projection.remove(entry);
        assert!(projection.is_empty());
    }

    #[test]
    fn the_first_step_with_room_is_found() {
        let mut projection = Projection::new();
        projection.add(load(100), at(0), at(7));
        assert_eq!(projection.first(at(2), |load| load.sequences == 0), Some(at(7)));
        assert_eq!(projection.first(at(2), |load| load.sequences == 2), None);
    }

    #[test]
    fn whatever_happens_the_books_are_balanced() {
        for seed in 0..1_000 {
            let mut rng = Rng::new(seed);
            let mut projection = Projection::new();
            let mut entries = Vec::new();
            let mut now = 0;
            for _ in 0..200 {
                match rng.below(4) {
                    0 => {
                        let arrival = now + rng.below(200);
                        let kv = rng.below(1_000) as i64;
                        entries.push(projection.add(load(kv), at(arrival), at(arrival + rng.below(200))));
                    }
                    1 if !entries.is_empty() => {
                        let entry = entries.swap_remove(rng.index(entries.len()));
                        projection.remove(entry);
                    }
                    2 if !entries.is_empty() => {
                        let i = rng.index(entries.len());
                        let arrival = now + rng.below(200);
                        projection.move_to(&mut entries[i], at(arrival), at(arrival + rng.below(200)));
                    }
                    _ => {
                        now += rng.below(20) + if rng.below(30) == 0 { 300 } else { 0 };
                        projection.advance(at(now));
                    }
                }
                let (count, least) =
                    (entries.len() as i64, projection.at.iter().map(|load| load.sequences).min());
                assert!(least >= Some(0), "seed {seed}");
                assert!(projection.at.iter().all(|load| load.sequences <= count), "seed {seed}");
            }
            entries.drain(..).for_each(|entry| projection.remove(entry));
            assert!(projection.is_empty(), "seed {seed}");
        }
    }
}
