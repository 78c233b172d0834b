//! A store with snapshots, over a network that loses messages and cuts connections, by seed.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;
use te_core::testkit::Rng;

use super::super::*;

const SEEDS: u64 = 300;
const STEPS: u64 = 300;
const STEPS_TO_RECOVER: u64 = 200;
/// The first number of an epoch is a multiple of it.
const EPOCH: u64 = 1 << 20;
const ADD: u8 = 0;
const REMOVE: u8 = 1;
const CLEAR: u8 = 2;

type Messages = VecDeque<(u64, Vec<u8>)>;

fn apply(objects: &mut BTreeSet<u8>, payload: &[u8]) {
    match payload[8] {
        ADD => _ = objects.insert(payload[9]),
        REMOVE => _ = objects.remove(&payload[9]),
        _ => objects.clear(),
    }
}

/// A master that publishes what it has; its numbers differ from epoch to epoch.
#[derive(Default)]
struct Store {
    next: u64,
    stamp: u64,
    objects: BTreeSet<u8>,
    kept: Messages,
    /// What it had before each number.
    truths: BTreeMap<u64, BTreeSet<u8>>,
}

impl Store {
    fn payload(&mut self, what: u8, object: u8) -> Vec<u8> {
        self.stamp += 1;
        let mut payload = self.stamp.to_be_bytes().to_vec();
        payload.extend([what, object]);
        payload
    }

    fn publish(&mut self, what: u8, object: u8) -> (u64, Vec<u8>) {
        let payload = self.payload(what, object);
        apply(&mut self.objects, &payload);
        let message = (self.next, payload);
        self.kept.push_back(message.clone());
        self.next += 1;
        self.truths.insert(self.next, self.objects.clone());
        if self.kept.len() > 12 {
            self.kept.pop_front();
        }
        message
    }

    fn begin(&mut self) -> (u64, Vec<u8>) {
        self.next = (self.next / EPOCH + 1) * EPOCH;
        self.kept.clear();
        self.publish(CLEAR, 0)
    }

    fn answer(&mut self, from: u64) -> Messages {
        let kept = self.kept.front().map_or(self.next, |(number, _)| *number);
        let mut answer: Messages = if from < kept {
            let mut pages = vec![self.payload(CLEAR, 0)];
            let objects: Vec<u8> = self.objects.iter().copied().collect();
            pages.extend(objects.into_iter().map(|object| self.payload(ADD, object)));
            (self.next - pages.len() as u64..).zip(pages).collect()
        } else {
            self.kept.iter().filter(|(number, _)| *number >= from).cloned().collect()
        };
        answer.push_back((REPLAY_END, Vec::new()));
        answer
    }
}

#[derive(Default)]
struct Follower {
    objects: BTreeSet<u8>,
    asked: Option<u64>,
}

impl Sink for Follower {
    fn apply(&mut self, _: u64, payload: &[u8]) -> bool {
        apply(&mut self.objects, payload);
        true
    }

    fn fence(&mut self, _: FenceReason) {
        self.objects.clear();
    }

    fn serve(&mut self, _: bool) {}

    fn ask(&mut self, from: u64) {
        self.asked = Some(from);
    }
}

/// Returns the snapshots that the stream took.
fn follow(seed: u64) -> u64 {
    let mut rng = Rng::new(seed);
    let settings = Settings {
        first_seq: 1,
        snapshots: true,
        held_messages_max: [3, 1_000][rng.index(2)],
        ..Settings::default()
    };
    let (mut store, mut follower) = (Store::default(), Follower::default());
    let mut stream = Stream::new(settings, None);
    let (mut live, mut replay) = (None::<Messages>, None::<Messages>);
    store.begin();
    for step in 0..STEPS + STEPS_TO_RECOVER {
        let now = Instant::ZERO + Duration::from_millis(step * 100);
        let calm = step >= STEPS;
        let mut fault = |one_in: usize| !calm && rng.index(one_in) == 0;
        let (restarts, cut, cut_replay, late) = (fault(80), fault(40), fault(20), fault(10));
        let mut said = Vec::new();
        if restarts {
            (live, replay) = (live.map(|_| Messages::new()), None);
            said.push(store.begin());
        }
        for _ in 0..rng.index(4) {
            let (what, object) = ([ADD, ADD, REMOVE][rng.index(3)], rng.index(20) as u8);
            said.push(store.publish(what, object));
        }
        if restarts || cut {
            live = None;
            stream.disconnected(now, &mut follower);
        }
        if let Some(live) = &mut live {
            live.extend(said.into_iter().filter(|_| calm || rng.index(20) != 0));
        } else if rng.index(2) == 0 {
            live = Some(Messages::new());
            stream.connected(now, &mut follower);
        }
        if cut_replay && replay.take().is_some() {
            stream.replay_failed(now, &mut follower);
        }
        for _ in 0..rng.index(8) {
            // A replay of before is closed before anything more of it arrives.
            if let Some(from) = follower.asked.take() {
                replay = Some(store.answer(from));
            }
            let from_live = rng.index(2) == 0 && !late;
            let wire = if from_live { &mut live } else { &mut replay };
            if let Some((number, payload)) = wire.as_mut().and_then(Messages::pop_front) {
                match from_live {
                    true => stream.live(now, number, &payload, &mut follower),
                    false => stream.replayed(now, number, &payload, &mut follower),
                }
            }
            if let Some(Position { next, .. }) = stream.position().filter(|_| stream.state() == State::Live) {
                let (known, truth) = (&follower.objects, &store.truths[&next]);
                let right = if stream.is_whole() { known == truth } else { known.is_subset(truth) };
                assert!(right, "seed {seed}, step {step}: {known:?}, true is {truth:?}: {stream:?}");
            }
        }
        stream.tick(now, &mut follower);
        if let Some(from) = follower.asked.take() {
            replay = Some(store.answer(from));
        }
    }
    let whole = stream.is_whole() || stream.counters().given_up > 0;
    assert!(stream.state() == State::Live && whole, "seed {seed}: {stream:?}");
    stream.counters().snapshots
}

#[test]
fn what_is_known_of_a_store_with_snapshots_is_what_it_had() {
    let snapshots: u64 = (0..SEEDS).map(follow).sum();
    assert!(snapshots > 10 * SEEDS, "{snapshots} snapshots");
}
