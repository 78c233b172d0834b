//! Tests of every policy against a naive model: vectors that are searched, and the definition written down.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::{Eviction, EvictionPolicy, Nodes, Place, Policy};

/// An operation on a policy. Objects are identified by a small number, which is also their hash.
#[derive(Clone, Debug)]
enum Op {
    Insert(u32, Place),
    Touch(u32, bool),
    Remove(u32),
    PutBack(u32),
    Evict,
}

/// A policy written after its definition.
trait Model {
    fn insert(&mut self, object: u32, place: Place);
    fn touch(&mut self, object: u32, follows: bool);
    fn remove(&mut self, object: u32);
    fn put_back(&mut self, object: u32);
    fn victim(&mut self) -> Option<u32>;
    fn evict(&mut self, object: u32);
}

/// Oldest first.
#[derive(Default)]
struct Queue {
    list: Vec<u32>,
    by_use: bool,
}

impl Model for Queue {
    fn insert(&mut self, object: u32, _: Place) {
        self.list.push(object);
    }
    fn touch(&mut self, object: u32, _: bool) {
        if self.by_use {
            self.remove(object);
            self.list.push(object);
        }
    }
    fn remove(&mut self, object: u32) {
        self.list.retain(|other| *other != object);
    }
    fn put_back(&mut self, object: u32) {
        let at = if self.by_use { self.list.len() } else { 0 };
        self.list.insert(at, object);
    }
    fn victim(&mut self) -> Option<u32> {
        self.list.first().copied()
    }
    fn evict(&mut self, object: u32) {
        self.remove(object);
    }
}

/// `hand` is the object that is examined next; none: the oldest.
#[derive(Default)]
struct SieveModel {
    list: Vec<(u32, bool)>,
    hand: Option<usize>,
}

impl Model for SieveModel {
    fn insert(&mut self, object: u32, _: Place) {
        self.list.push((object, false));
    }
    fn touch(&mut self, object: u32, _: bool) {
        self.list.iter_mut().filter(|(other, _)| *other == object).for_each(|(_, bit)| *bit = true);
    }
    fn remove(&mut self, object: u32) {
        let at = self.list.iter().position(|(other, _)| *other == object).unwrap();
        self.list.remove(at);
        self.hand =
            self.hand.map(|hand| hand - usize::from(at < hand)).filter(|hand| *hand < self.list.len());
    }
    fn put_back(&mut self, object: u32) {
        self.list.insert(self.hand.unwrap_or(self.list.len()), (object, false));
        self.hand = self.hand.map(|hand| hand + 1);
    }
    fn victim(&mut self) -> Option<u32> {
        if self.list.is_empty() {
            return None;
        }
        loop {
            let hand = self.hand.unwrap_or(0);
            let (object, bit) = &mut self.list[hand];
            if !std::mem::take(bit) {
                self.hand = Some(hand);
                return Some(*object);
            }
            self.hand = Some(hand + 1).filter(|hand| *hand < self.list.len());
        }
    }
    fn evict(&mut self, object: u32) {
        self.remove(object);
    }
}

/// All objects with the time of their use and their class; the ghosts in lists as long as the sets of the
/// real ones.
#[derive(Default)]
struct TrialModel {
    /// The stamp, then the order among equal stamps: smaller is older.
    objects: BTreeMap<u32, (u64, i64, u64)>,
    /// Keys by set, newest first.
    ghosts: BTreeMap<u64, VecDeque<u32>>,
    sets: u64,
    clock: u64,
    /// Stamp and order of the latest object of the current batch, by factor.
    latest: BTreeMap<u64, (u32, u64, i64)>,
}

impl TrialModel {
    fn place(&mut self, object: u32, factor: u64, follows: bool) {
        if !follows {
            self.latest.clear();
        }
        self.clock += 1;
        let (stamp, at) = match self.latest.get(&factor) {
            Some((_, stamp, at)) => (*stamp, at - 1),
            None => (self.clock, 0),
        };
        self.latest.insert(factor, (object, stamp, at));
        self.objects.insert(object, (stamp, at, factor));
    }
    fn set_of(&self, object: u32) -> u64 {
        hash(object) as u32 as u64 % self.sets.max(1)
    }
    fn knows(&self, object: u32) -> bool {
        self.ghosts.get(&self.set_of(object)).is_some_and(|set| set.contains(&object))
    }
    fn remember(&mut self, object: u32) {
        let wanted = (self.objects.len() as u64).div_ceil(8).next_power_of_two();
        while self.sets < wanted {
            let before = self.sets;
            self.sets = if before == 0 { wanted } else { before * 2 };
            let copies: Vec<_> = self.ghosts.iter().map(|(set, keys)| (set + before, keys.clone())).collect();
            self.ghosts.extend(copies);
        }
        let set = self.set_of(object);
        let keys = self.ghosts.entry(set).or_default();
        keys.push_front(object);
        keys.truncate(8);
    }
    fn forget(&mut self, object: u32) {
        let set = self.set_of(object);
        self.ghosts.entry(set).or_default().retain(|other| *other != object);
    }
}

impl Model for TrialModel {
    fn insert(&mut self, object: u32, place: Place) {
        let proven = place.returning || self.knows(object);
        self.forget(object);
        self.place(
            object,
            if proven {
                1
            } else if place.last {
                32
            } else {
                3
            },
            place.follows,
        );
    }
    fn touch(&mut self, object: u32, follows: bool) {
        self.remove(object);
        self.place(object, 1, follows);
    }
    fn remove(&mut self, object: u32) {
        self.objects.remove(&object);
        self.latest.retain(|_, (latest, ..)| *latest != object);
    }
    fn put_back(&mut self, object: u32) {
        self.place(object, 1, false);
    }
    fn victim(&mut self) -> Option<u32> {
        // The oldest of each class, then the one that counts as the oldest; of equals the one that ages
        // faster.
        let oldest = |factor: u64| {
            let of = self.objects.iter().filter(|(_, (.., other))| *other == factor);
            of.min_by_key(|(_, (stamp, at, _))| (*stamp, *at))
                .map(|(object, (stamp, ..))| ((self.clock + 1 - stamp) * factor, factor, *object))
        };
        [1, 3, 32].into_iter().filter_map(oldest).max().map(|(.., object)| object)
    }
    fn evict(&mut self, object: u32) {
        if self.objects[&object].2 != 32 {
            self.remember(object);
        }
        self.remove(object);
    }
}

const OBJECTS: u32 = 40;

fn hash(object: u32) -> u64 {
    // Tags differ, sets coincide now and then.
    u64::from(object + 1) << 48 | u64::from(object % 5)
}

fn op() -> impl Strategy<Value = Op> {
    let place = (any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.1))
        .prop_map(|(follows, last, returning)| Place { follows, last, returning });
    prop_oneof![
        6 => (0..OBJECTS, place).prop_map(|(object, place)| Op::Insert(object, place)),
        6 => (0..OBJECTS, any::<bool>()).prop_map(|(object, follows)| Op::Touch(object, follows)),
        2 => (0..OBJECTS).prop_map(Op::Remove),
        2 => (0..OBJECTS).prop_map(Op::PutBack),
        4 => Just(Op::Evict),
    ]
}

fn agrees(mut policy: Policy, mut model: impl Model, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut nodes = Nodes::new();
    (0..OBJECTS).for_each(|object| nodes.put(object));
    let mut inside = [false; OBJECTS as usize];
    let mut parked = inside;
    for op in ops {
        match *op {
            Op::Insert(object, place) if !inside[object as usize] => {
                (inside[object as usize], parked[object as usize]) = (true, false);
                policy.insert(&mut nodes, object, hash(object), place);
                model.insert(object, place);
            }
            Op::PutBack(object) if parked[object as usize] => {
                parked[object as usize] = false;
                inside[object as usize] = true;
                policy.put_back(&mut nodes, object);
                model.put_back(object);
            }
            Op::Touch(object, follows) if inside[object as usize] => {
                policy.touch(&mut nodes, object, follows);
                model.touch(object, follows);
            }
            Op::Remove(object) if inside[object as usize] => {
                (inside[object as usize], parked[object as usize]) = (false, true);
                policy.remove(&mut nodes, object);
                model.remove(object);
            }
            Op::Evict => {
                let victim = policy.victim(&mut nodes);
                prop_assert_eq!(victim, policy.victim(&mut nodes), "two calls in a row");
                prop_assert_eq!(victim, model.victim());
                let Some(object) = victim else { continue };
                inside[object as usize] = false;
                policy.evict(&mut nodes, object, hash(object));
                model.evict(object);
            }
            _ => {}
        }
        let candidates = inside.iter().filter(|inside| **inside).count();
        prop_assert_eq!(policy.len() as usize, candidates);
        let mut seen = Vec::new();
        policy.preview(&nodes, &mut |index| {
            seen.push(index);
            true
        });
        prop_assert_eq!(
            seen.first().copied(),
            policy.victim(&mut nodes),
            "the preview begins with the victim"
        );
        model.victim();
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen.len(), candidates, "the preview names each candidate once");
    }
    Ok(())
}

proptest! {
    #[test]
    fn fifo_evicts_what_its_definition_evicts(ops in prop::collection::vec(op(), 1..400)) {
        agrees(EvictionPolicy::Fifo.build(), Queue::default(), &ops)?;
    }

    #[test]
    fn lru_evicts_what_its_definition_evicts(ops in prop::collection::vec(op(), 1..400)) {
        agrees(EvictionPolicy::Lru.build(), Queue { by_use: true, ..Queue::default() }, &ops)?;
    }

    #[test]
    fn sieve_evicts_what_its_definition_evicts(ops in prop::collection::vec(op(), 1..400)) {
        agrees(EvictionPolicy::Sieve.build(), SieveModel::default(), &ops)?;
    }

    #[test]
    fn trial_evicts_what_its_definition_evicts(ops in prop::collection::vec(op(), 1..400)) {
        agrees(EvictionPolicy::Trial.build(), TrialModel::default(), &ops)?;
    }
}

#[test]
fn a_name_is_read_back_and_a_wrong_one_lists_the_right_ones() {
    for policy in EvictionPolicy::ALL {
        assert_eq!(policy.name().parse(), Ok(*policy));
    }
    let text = "clock".parse::<EvictionPolicy>().unwrap_err().to_string();
    assert_eq!(text, "unknown eviction policy: choose one of trial lru sieve fifo");
}
