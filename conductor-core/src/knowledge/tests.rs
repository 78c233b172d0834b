//! Publishers, one or two at a time. Random histories are in `tests/streams`.

use alloc::vec;
use alloc::vec::Vec;

use te_core::Instant;

use super::*;
use crate::events::encode::{Layout, encode};
use crate::events::{Dialect, Event, Extra, Removed, Source, Stored};
use crate::hash;
use crate::{EngineHash, Tier};

const BLOCK_TOKENS: u32 = 2;

fn engine(instance: &str, dp_rank: u32) -> Registration {
    Registration {
        instance: instance.into(),
        tenant: "t".into(),
        model: "m".into(),
        block_tokens: BLOCK_TOKENS,
        lora: None,
        salt: None,
        dp_rank,
        dialect: Dialect::Vllm,
        role: Role::Engine,
    }
}

fn store(objects_per_block: u32) -> Registration {
    let role = Role::Store { objects_per_block };
    Registration { role, dialect: Dialect::Mooncake, ..engine("store", 0) }
}

/// A knowledge whose publishers are served.
fn knowing(registrations: &[Registration]) -> (Knowledge, Vec<PublisherId>) {
    let mut knowledge = Knowledge::new(Settings::default());
    let ids =
        registrations.iter().map(|known| knowledge.register(known.clone()).unwrap()).collect::<Vec<_>>();
    ids.iter().for_each(|id| knowledge.serve(*id, true));
    (knowledge, ids)
}

fn hashes(numbers: &[u64]) -> Vec<EngineHash> {
    numbers.iter().map(|number| EngineHash(*number)).collect()
}

fn say(knowledge: &mut Knowledge, id: PublisherId, events: &[Event<'_>]) -> bool {
    let layout = match knowledge.publishers[&id].registration.dialect {
        Dialect::Mooncake => Layout::Mooncake,
        Dialect::Sglang => Layout::Sglang,
        Dialect::Vllm => Layout::VllmMaps,
    };
    let mut payload = Vec::new();
    encode(layout, 1.0, None, events, &mut payload);
    knowledge.apply(id, &payload)
}

fn stored<'a>(hashes: &'a [EngineHash], parent: Option<u64>, tokens: &'a [u32], tier: Tier) -> Stored<'a> {
    Stored {
        hashes,
        parent: parent.map(EngineHash),
        tokens,
        block_tokens: if tokens.is_empty() { 0 } else { BLOCK_TOKENS },
        lora: None,
        salt: None,
        extra: Extra::default(),
        tier,
        group: None,
        source: Source::default(),
    }
}

/// Stores blocks with the hashes `numbers` and the tokens of the prompt from block `from` on.
fn store_blocks(knowledge: &mut Knowledge, id: PublisherId, numbers: &[u64], from: usize, tier: Tier) {
    let prompt = prompt();
    let tokens = &prompt[from * 2..(from + numbers.len()) * 2];
    let parent = (from > 0).then(|| numbers[0] - 1);
    assert!(say(knowledge, id, &[Event::Stored(stored(&hashes(numbers), parent, tokens, tier))]));
}

fn remove(knowledge: &mut Knowledge, id: PublisherId, numbers: &[u64], tier: Tier) {
    let removed = Removed { hashes: &hashes(numbers), tier, group: None, source: Source::default() };
    assert!(say(knowledge, id, &[Event::Removed(removed)]));
}

fn prompt() -> Vec<u32> {
    (100..120).collect()
}

fn keys() -> Vec<BlockKey> {
    let mut keys = Vec::new();
    hash::keys(&prompt(), BLOCK_TOKENS, &Root::new(0), &mut keys);
    keys
}

fn ask(knowledge: &Knowledge) -> Matches {
    let mut matches = Matches::default();
    knowledge.query(ContextId(0), &keys(), false, &mut matches);
    matches
}

/// GPU, CPU and disk of the first instance, and the store.
fn matched(knowledge: &Knowledge) -> ([u32; 3], u32) {
    let matches = ask(knowledge);
    let first = matches.instances.first().copied().unwrap_or_default();
    ([first.gpu, first.cpu, first.disk], matches.store)
}

#[test]
fn tiers_count_together_and_ranks_apart() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("a", 1), engine("b", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    store_blocks(&mut knowledge, ids[0], &[4, 5], 3, Tier::Cpu);
    store_blocks(&mut knowledge, ids[0], &[6], 5, Tier::Disk);
    store_blocks(&mut knowledge, ids[1], &[1, 2, 3, 4], 0, Tier::Gpu);
    store_blocks(&mut knowledge, ids[2], &[901], 0, Tier::Disk);
    let matches = ask(&knowledge);
    let of = |instance, dp_rank, gpu, cpu, disk| crate::InstanceMatch {
        instance: InstanceId(instance),
        dp_rank,
        gpu,
        cpu,
        disk,
    };
    assert_eq!(matches.instances, [of(0, 1, 4, 5, 6), of(1, 0, 0, 0, 1)]);
    let ranks: Vec<_> =
        matches.ranks.iter().map(|rank| (rank.dp_rank, rank.gpu, rank.cpu, rank.disk)).collect();
    assert_eq!(ranks, [(0, 3, 5, 6), (1, 4, 4, 4), (0, 0, 0, 1)]);
    // The CPU loses its first block; the GPU gets it, so that the rest counts again.
    remove(&mut knowledge, ids[0], &[4], Tier::Cpu);
    assert_eq!(ask(&knowledge).ranks[0].cpu, 3);
    store_blocks(&mut knowledge, ids[0], &[4], 3, Tier::Gpu);
    assert_eq!((ask(&knowledge).ranks[0].gpu, ask(&knowledge).ranks[0].cpu), (4, 5));
}

#[test]
fn blocks_without_tokens_are_what_their_hashes_were_learnt_to_be() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    let unknown = hashes(&[1, 2]);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(stored(&unknown, None, &[], Tier::Cpu))]));
    assert_eq!(knowledge.counters(ids[0]).unwrap().orphans, 2);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(stored(&unknown, None, &[], Tier::Cpu))]));
    remove(&mut knowledge, ids[0], &[1, 2, 3], Tier::Gpu);
    assert_eq!(matched(&knowledge), ([0, 2, 2], 0));
    // A block whose parent is unknown is not stored.
    let far = hashes(&[77]);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(stored(&far, Some(76), &[1, 2], Tier::Gpu))]));
    assert_eq!(knowledge.counters(ids[0]).unwrap().orphans, 3);
}

#[test]
fn engines_whose_hashes_collide_do_not_share_blocks() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2], 0, Tier::Gpu);
    // The same hashes stand for other tokens at b, which then stores what follows.
    let other = hashes(&[1, 2]);
    assert!(say(&mut knowledge, ids[1], &[Event::Stored(stored(&other, None, &[7, 8, 9, 10], Tier::Gpu))]));
    assert!(say(
        &mut knowledge,
        ids[1],
        &[Event::Stored(stored(&hashes(&[3]), Some(2), &[11, 12], Tier::Gpu))]
    ));
    let mut keys = Vec::new();
    hash::keys(&[7, 8, 9, 10, 11, 12], BLOCK_TOKENS, &Root::new(0), &mut keys);
    let mut matches = Matches::default();
    knowledge.query(ContextId(0), &keys, false, &mut matches);
    assert_eq!(
        matches.instances.iter().map(|found| (found.instance.0, found.gpu)).collect::<Vec<_>>(),
        [(1, 3)]
    );
    remove(&mut knowledge, ids[0], &[2], Tier::Gpu);
    assert_eq!(matched(&knowledge).0, [1; 3]);
    knowledge.query(ContextId(0), &keys, false, &mut matches);
    assert_eq!(matches.instances[0].gpu, 3);
}

#[test]
fn attention_groups_have_to_agree() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    let prompt = prompt();
    for group in [0, 1] {
        let numbers = hashes(&[1, 2, 3]);
        let event = Stored { group: Some(group), ..stored(&numbers, None, &prompt[..6], Tier::Gpu) };
        assert!(say(&mut knowledge, ids[0], &[Event::Stored(event)]));
    }
    assert_eq!(matched(&knowledge).0, [3; 3]);
    let numbers = hashes(&[2]);
    let removed = Removed { hashes: &numbers, tier: Tier::Gpu, group: Some(1), source: Source::default() };
    assert!(say(&mut knowledge, ids[0], &[Event::Removed(removed)]));
    assert_eq!(matched(&knowledge).0, [1; 3]);
}

/// An event of a store about one object of a block.
fn object(knowledge: &mut Knowledge, id: PublisherId, hash: u64, rank: u32, removed: bool) {
    let key = alloc::format!("m@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@{hash:064x}");
    let numbers = hashes(&[hash]);
    let source = Source { object: Some(&key), ..Source::default() };
    let event = if removed {
        Event::Removed(Removed { hashes: &numbers, tier: Tier::Store, group: None, source })
    } else {
        Event::Stored(Stored { source, ..stored(&numbers, None, &[], Tier::Store) })
    };
    assert!(say(knowledge, id, &[event]));
}

#[test]
fn objects_of_a_store_count_once_an_engine_has_announced_their_block() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), store(1)]);
    (1..=2).for_each(|hash| object(&mut knowledge, ids[1], hash, 0, false));
    assert_eq!((matched(&knowledge), knowledge.waiting()), (([0; 3], 0), 2));
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    assert_eq!((matched(&knowledge), knowledge.waiting()), (([3; 3], 2), 0));
    object(&mut knowledge, ids[1], 3, 0, false);
    assert_eq!(matched(&knowledge).1, 3);
    // The engine evicts; the store still has them, and then does not.
    remove(&mut knowledge, ids[0], &[1, 2, 3], Tier::Gpu);
    assert_eq!(matched(&knowledge), ([0; 3], 3));
    object(&mut knowledge, ids[1], 2, 0, true);
    assert_eq!(matched(&knowledge).1, 1);
    knowledge.fence(ids[1], FenceReason::Lost);
    assert_eq!(matched(&knowledge).1, 0);
}

#[test]
fn a_block_of_a_store_counts_when_all_of_its_objects_are_there() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), store(2)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2], 0, Tier::Gpu);
    object(&mut knowledge, ids[1], 1, 0, false);
    object(&mut knowledge, ids[1], 1, 0, false);
    assert_eq!(matched(&knowledge).1, 0);
    object(&mut knowledge, ids[1], 1, 1, false);
    assert_eq!(matched(&knowledge).1, 1);
    object(&mut knowledge, ids[1], 1, 0, true);
    assert_eq!(matched(&knowledge).1, 0);
    object(&mut knowledge, ids[1], 1, 0, false);
    assert_eq!(matched(&knowledge).1, 1);
}

#[test]
fn what_waits_has_a_limit() {
    let mut knowledge = Knowledge::new(Settings { waiting_max: 3, ..Settings::default() });
    let id = knowledge.register(store(1)).unwrap();
    (1..=5).for_each(|hash| object(&mut knowledge, id, hash, 0, false));
    assert_eq!((knowledge.waiting(), knowledge.counters(id).unwrap().refused), (3, 2));
}

#[test]
fn what_is_assumed_counts_only_where_it_is_asked_for_and_ends() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1], 0, Tier::Gpu);
    let until = Instant::from_millis(10);
    assert_eq!(knowledge.assume(ContextId(0), InstanceId(0), 0, &keys()[..4], until), 3);
    assert_eq!(matched(&knowledge).0, [1; 3]);
    let mut matches = Matches::default();
    knowledge.query(ContextId(0), &keys(), true, &mut matches);
    assert_eq!(matches.instances[0].gpu, 4);
    knowledge.tick(until, 100);
    knowledge.query(ContextId(0), &keys(), true, &mut matches);
    assert_eq!(matches.instances[0].gpu, 1);
}

#[test]
fn the_dead_and_the_unserved_have_no_part_in_answers() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2], 0, Tier::Gpu);
    store_blocks(&mut knowledge, ids[1], &[1, 2, 3], 0, Tier::Gpu);
    knowledge.serve(ids[0], false);
    let instances = |knowledge: &Knowledge| {
        ask(knowledge).instances.iter().map(|found| (found.instance.0, found.gpu)).collect::<Vec<_>>()
    };
    assert_eq!(instances(&knowledge), [(1, 3)]);
    knowledge.serve(ids[0], true);
    assert_eq!(instances(&knowledge), [(0, 2), (1, 3)]);
    knowledge.died(InstanceId(1));
    assert_eq!(instances(&knowledge), [(0, 2)]);
    // Its own message that cannot be read voids the other.
    assert!(!knowledge.apply(ids[0], b"\xc1"));
    assert_eq!(instances(&knowledge), []);
    assert!(knowledge.unregister(ids[0]) && !knowledge.unregister(ids[0]));
    assert_eq!(knowledge.instance_name(InstanceId(0)), None);
    assert_eq!(knowledge.instance_name(InstanceId(1)), Some(("t", "b")));
}

#[test]
fn registrations_are_checked_and_idempotent() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    assert_eq!(knowledge.register(engine("a", 0)), Ok(ids[0]));
    let other = Registration { salt: Some("s".into()), ..engine("a", 0) };
    assert_eq!(knowledge.register(other), Err(RegisterError::Differs(ids[0])));
    let none = Registration { block_tokens: 0, ..engine("b", 0) };
    assert_eq!(
        knowledge.register(none).unwrap_err().to_string(),
        "`block_tokens` is missing or out of range: set it in the registration"
    );
    assert_eq!(knowledge.register(store(65)), Err(RegisterError::Field("objects_per_block")));
    let settings = Settings { publishers_max: 1, contexts_max: 1, ..Settings::default() };
    let mut knowledge = Knowledge::new(settings);
    knowledge.register(engine("a", 0)).unwrap();
    assert_eq!(knowledge.register(engine("b", 0)), Err(RegisterError::Full("publishers_max")));
}

#[test]
fn hashes_of_engines_can_be_asked_for() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    let mut found = Vec::new();
    knowledge.keys_of(ContextId(0), &hashes(&[1, 2, 3, 9, 3]), &mut found);
    assert_eq!(found, keys()[..3]);
    knowledge.keys_of(ContextId(5), &hashes(&[1]), &mut found);
    assert_eq!(found, []);
}

#[test]
fn a_snapshot_restores_everything_and_damage_is_refused() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 1), store(2)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    store_blocks(&mut knowledge, ids[1], &[51, 52], 0, Tier::Cpu);
    object(&mut knowledge, ids[2], 1, 0, false);
    let position = crate::stream::Position { begin: 0, next: 7, digest: 9 };
    let mut bytes = vec![0xaa];
    knowledge.snapshot(|id| (id != ids[1]).then_some(position), &mut bytes);
    let bytes = &bytes[1..];
    let (mut restored, positions) = Knowledge::restore(bytes, Settings::default()).unwrap();
    assert_eq!(positions, [(ids[0], Some(position)), (ids[1], None), (ids[2], Some(position))]);
    assert_eq!(ask(&restored).instances, []);
    ids.iter().for_each(|id| restored.serve(*id, true));
    // What b said is void, since nothing tells where its stream was.
    assert_eq!(matched(&restored), ([3; 3], 0));
    assert_eq!(ask(&restored).instances.len(), 1);
    object(&mut restored, ids[2], 1, 1, false);
    assert_eq!(matched(&restored).1, 1);
    remove(&mut restored, ids[0], &[2], Tier::Gpu);
    assert_eq!(matched(&restored).0, [1; 3]);
    let (digests, again) = (knowledge.digests(), Knowledge::restore(bytes, Settings::default()).unwrap().0);
    assert_eq!(digests[0], again.digests()[0]);
    for at in 0..bytes.len() {
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 1 << (at % 8);
        assert!(Knowledge::restore(&damaged, Settings::default()).is_err(), "byte {at}");
        assert!(Knowledge::restore(&bytes[..at], Settings::default()).is_err(), "{at} bytes");
    }
    let other = Settings { seed: 1, ..Settings::default() };
    let error = Knowledge::restore(bytes, other).unwrap_err();
    assert_eq!(error, SnapshotError::Seed { snapshot: 0, settings: 1 });
}

#[test]
fn forged_snapshots_never_panic() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), store(2)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    object(&mut knowledge, ids[1], 1, 0, false);
    let mut bytes = Vec::new();
    knowledge.snapshot(|_| None, &mut bytes);
    let content = bytes.len() - 8;
    for at in 8..content {
        for value in [0, 1, 0x7f, 0xff] {
            let mut forged = bytes.clone();
            forged[at] = value;
            let checksum = xxhash_rust::xxh3::xxh3_64(&forged[..content]);
            forged[content..].copy_from_slice(&checksum.to_le_bytes());
            if let Ok((mut restored, _)) = Knowledge::restore(&forged, Settings::default()) {
                ask(&restored);
                restored.tick(Instant::ZERO, 100);
            }
        }
    }
}

#[test]
fn hashes_of_blocks_that_are_gone_are_forgotten_in_steps_and_then_nothing_is_left_to_do() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    let numbers: Vec<u64> = (1..=10).collect();
    store_blocks(&mut knowledge, ids[0], &numbers, 0, Tier::Gpu);
    assert_eq!(knowledge.tick(Instant::ZERO, 3), 0);
    remove(&mut knowledge, ids[0], &numbers[4..], Tier::Gpu);
    let mut ticks = 0;
    while knowledge.tick(Instant::ZERO, 3) != 0 {
        ticks += 1;
        assert!(ticks < 100);
    }
    assert_eq!(knowledge.size(ContextId(0)).unwrap().1, 4);
    assert!(ticks > 1);
    assert_eq!(matched(&knowledge).0, [4; 3]);
    knowledge.fence(ids[0], FenceReason::Lost);
    while knowledge.tick(Instant::ZERO, 3) != 0 {}
    let (blocks, learnt, _) = knowledge.size(ContextId(0)).unwrap();
    assert_eq!((blocks, learnt), (0, 0));
}

/// How many blocks of a prompt of another tenant or model, told by a publisher, are known where it is
/// registered.
fn foreign(registration: Registration, source: Source<'_>, tier: Tier) -> (usize, u64) {
    let registration = Registration { dialect: Dialect::Mooncake, ..registration };
    let (mut knowledge, ids) = knowing(&[registration]);
    let (numbers, prompt) = (hashes(&[1, 2]), prompt());
    let event = Stored { source, ..stored(&numbers, None, &prompt[..4], tier) };
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(event)]));
    (knowledge.size(ContextId(0)).unwrap().0, knowledge.counters(ids[0]).unwrap().foreign)
}

#[test]
fn what_is_of_another_tenant_or_model_is_not_recorded() {
    for (registration, tier) in [(engine("a", 0), Tier::Gpu), (store(1), Tier::Store)] {
        let of = |tenant, model| Source { tenant, model, ..Source::default() };
        let known = |source| foreign(registration.clone(), source, tier);
        assert_eq!(known(of(Some("other"), None)), (0, 1), "{tier}");
        assert_eq!(known(of(Some("t"), Some("other"))), (0, 1), "{tier}");
        assert_eq!(known(of(Some("t"), Some("m"))), (2, 0), "{tier}");
        assert_eq!(known(of(None, None)), (2, 0), "{tier}");
    }
}

#[test]
fn an_object_of_another_model_is_not_of_the_registered_one() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), store(1)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2], 0, Tier::Gpu);
    // Engines of two models that have one seed name equal tokens by equal hashes.
    let key = alloc::format!("n@tp_rank:0@pcp0@dcp0@pp_rank:0@{:064x}", 1);
    let source = Source { object: Some(&key), ..Source::default() };
    let numbers = hashes(&[1]);
    let event = Stored { source, ..stored(&numbers, None, &[], Tier::Store) };
    assert!(say(&mut knowledge, ids[1], &[Event::Stored(event)]));
    assert_eq!((matched(&knowledge).1, knowledge.counters(ids[1]).unwrap().foreign), (0, 1));
}

#[test]
fn a_block_of_several_objects_is_not_there_with_the_first_that_has_tokens() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), store(2)]);
    let (numbers, prompt) = (hashes(&[1, 2]), prompt());
    let event = stored(&numbers, None, &prompt[..4], Tier::Store);
    assert!(say(&mut knowledge, ids[1], &[Event::Stored(event)]));
    assert_eq!(matched(&knowledge).1, 0);
}

#[test]
fn blocks_without_tokens_may_begin_anywhere_and_cannot_be_put_elsewhere() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    // vLLM's offloading names no parent.
    let tail = hashes(&[2, 3]);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(stored(&tail, None, &[], Tier::Cpu))]));
    remove(&mut knowledge, ids[0], &[2, 3], Tier::Gpu);
    assert_eq!(matched(&knowledge).0, [1, 3, 3]);
    // b has another prompt, and says that a block of a's follows that prompt's first one.
    let numbers = hashes(&[11]);
    assert!(say(&mut knowledge, ids[1], &[Event::Stored(stored(&numbers, None, &[1, 2], Tier::Gpu))]));
    let second = hashes(&[2]);
    assert!(say(&mut knowledge, ids[1], &[Event::Stored(stored(&second, Some(11), &[], Tier::Gpu))]));
    let ranks = ask(&knowledge).ranks.len();
    assert_eq!((ranks, matched(&knowledge).0), (1, [1, 3, 3]));
}

#[test]
fn a_removal_without_a_group_is_one_from_every_group() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    let (numbers, prompt) = (hashes(&[1, 2]), prompt());
    let event = stored(&numbers, None, &prompt[..4], Tier::Gpu);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(Stored { group: Some(1), ..event })]));
    remove(&mut knowledge, ids[0], &[2], Tier::Gpu);
    assert_eq!(matched(&knowledge).0, [1; 3]);
}

#[test]
fn what_is_assumed_is_assumed_of_the_groups_that_there_are() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 0)]);
    let (numbers, prompt) = (hashes(&[1, 2]), prompt());
    let until = Instant::from_millis(10);
    let group =
        |to: usize| Stored { group: Some(1), ..stored(&numbers[..to], None, &prompt[..to * 2], Tier::Gpu) };
    for id in &ids {
        assert!(say(&mut knowledge, *id, &[Event::Stored(group(1))]));
    }
    assert_eq!(knowledge.assume(ContextId(0), InstanceId(0), 0, &keys()[..3], until), 2);
    assert_eq!(matched(&knowledge).0, [1; 3]);
    let mut matches = Matches::default();
    knowledge.query(ContextId(0), &keys(), true, &mut matches);
    assert_eq!(matches.instances.iter().map(|found| found.gpu).collect::<Vec<_>>(), [3, 1]);
    // Before the first event, it is not known which groups there will be.
    let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
    let other = hashes(&[9]);
    let cpu = stored(&other, None, &[5, 5], Tier::Cpu);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(cpu)]));
    assert_eq!(knowledge.assume(ContextId(0), InstanceId(0), 0, &keys()[..1], until), 1);
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(group(2))]));
    assert_eq!(matched(&knowledge).0, [2; 3]);
}

#[test]
fn hashes_that_mean_two_blocks_are_followed_along_one_chain() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 0)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2], 0, Tier::Gpu);
    // b names another prompt's second block as a names its own.
    let other = hashes(&[11, 2]);
    assert!(say(&mut knowledge, ids[1], &[Event::Stored(stored(&other, None, &[7, 8, 9, 10], Tier::Gpu))]));
    remove(&mut knowledge, ids[0], &[2], Tier::Gpu);
    let found = |knowledge: &Knowledge, numbers: &[u64]| {
        let (mut keys, mut matches) = (Vec::new(), Matches::default());
        knowledge.keys_of(ContextId(0), &hashes(numbers), &mut keys);
        knowledge.query(ContextId(0), &keys, false, &mut matches);
        matches.instances.iter().map(|found| (found.instance.0, found.gpu)).collect::<Vec<_>>()
    };
    assert_eq!(found(&knowledge, &[1, 2]), [(0, 1)]);
    assert_eq!(found(&knowledge, &[11, 2]), [(1, 2)]);
    // The store has a block under that hash: it is not known which.
    assert_eq!(knowledge.register(store(1)), Ok(PublisherId(2)));
    knowledge.serve(PublisherId(2), true);
    object(&mut knowledge, PublisherId(2), 2, 0, false);
    store_blocks(&mut knowledge, ids[0], &[2], 1, Tier::Gpu);
    assert_eq!(knowledge.counters(PublisherId(2)).unwrap().stored, 0);
}

#[test]
fn learnt_hashes_of_dropped_blocks_make_room() {
    let index = crate::index::IndexLimits { blocks_max: 100, ..Default::default() };
    let settings = Settings { learned_max: 200, index, ..Settings::default() };
    let mut knowledge = Knowledge::new(settings);
    let id = knowledge.register(engine("a", 0)).unwrap();
    for number in 0..2_000_u32 {
        let numbers = hashes(&[u64::from(number) + 1]);
        let tokens = [number, 1];
        let event = stored(&numbers, None, &tokens, Tier::Gpu);
        let mut payload = Vec::new();
        encode(Layout::VllmMaps, 1.0, None, &[Event::Stored(event)], &mut payload);
        assert!(knowledge.apply(id, &payload));
        knowledge.tick(Instant::ZERO, 1_000);
    }
    assert_eq!(knowledge.counters(id).unwrap().refused, 0);
}

#[test]
fn a_snapshot_does_not_move_a_publisher_to_another_tenant_or_number() {
    let forge = |change: fn(&mut Knowledge, PublisherId)| {
        let (mut knowledge, ids) = knowing(&[engine("a", 0)]);
        store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
        change(&mut knowledge, ids[0]);
        let mut bytes = Vec::new();
        knowledge.snapshot(|_| None, &mut bytes);
        Knowledge::restore(&bytes, Settings::default()).map(|_| ())
    };
    assert_eq!(forge(|_, _| ()), Ok(()));
    let wrong = SnapshotError::Invalid("a publisher's context or instance is another's");
    let tenant = |knowledge: &mut Knowledge, id| {
        knowledge.publishers.get_mut(&id).unwrap().registration.tenant = "other".into();
    };
    assert_eq!(forge(tenant), Err(wrong.clone()));
    assert_eq!(
        forge(|knowledge, _| knowledge.contexts[0].context.tenant = "other".into()),
        Err(wrong.clone())
    );
    assert_eq!(forge(|knowledge, _| knowledge.instances[0].tenant = "other".into()), Err(wrong));
    let number = SnapshotError::Invalid("a publisher's number");
    assert_eq!(forge(|knowledge, _| knowledge.next_publisher = u32::MAX), Err(number));
    let places = |knowledge: &mut Knowledge, _| {
        let Settings { publishers_max, ranks_per_publisher_max, .. } = knowledge.settings;
        knowledge.contexts[0].ranks.resize_with(publishers_max * ranks_per_publisher_max + 1, || None);
    };
    assert_eq!(forge(places), Err(SnapshotError::Full("publishers_max")));
}

/// Where the stream of a publisher is.
const POSITION: crate::stream::Position = crate::stream::Position { begin: 0, next: 7, digest: 9 };

#[test]
fn the_last_block_of_an_engine_that_looks_ahead_does_not_count() {
    let drafts = Registration { dialect: Dialect::Sglang, ..engine("a", 0) };
    let (mut knowledge, ids) = knowing(&[drafts]);
    let prompt = prompt();
    // The token behind the third block is not the prompt's; the events' blocks do not have it.
    let (first, all) = (hashes(&[1]), hashes(&[1, 2, 3]));
    let ahead = |hashes, tokens| Stored { extra: Extra::ahead(), ..stored(hashes, None, tokens, Tier::Gpu) };
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(ahead(&first, &prompt[..2]))]));
    assert_eq!(ask(&knowledge).instances, [], "nothing shows that the token behind it is the prompt's");
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(ahead(&all, &prompt[..6]))]));
    assert_eq!(matched(&knowledge).0, [2; 3]);
    // Tiers count together: one block less in all.
    let below = Stored { tier: Tier::Cpu, parent: Some(EngineHash(3)), ..ahead(&all[..0], &[]) };
    let more = hashes(&[4, 5]);
    let below = Stored { hashes: &more, tokens: &prompt[6..10], block_tokens: BLOCK_TOKENS, ..below };
    assert!(say(&mut knowledge, ids[0], &[Event::Stored(below)]));
    assert_eq!(matched(&knowledge).0, [2, 4, 4]);
    // A snapshot and another Conductor know it, too.
    let mut bytes = Vec::new();
    knowledge.snapshot(|_| Some(POSITION), &mut bytes);
    let (mut restored, _) = Knowledge::restore(&bytes, Settings::default()).unwrap();
    restored.serve(ids[0], true);
    assert_eq!(matched(&restored).0, [2, 4, 4]);
    let said = knowledge.said_by(ids[0], POSITION).unwrap();
    let drafts = Registration { dialect: Dialect::Sglang, ..engine("a", 0) };
    let (mut other, others) = knowing(&[engine("b", 0), drafts]);
    assert_eq!(other.adopt(others[1], &said, 0, usize::MAX), Some(said.steps()));
    assert_eq!(matched(&other).0, [2, 4, 4]);
}

#[test]
fn what_one_publisher_said_is_handed_over_and_damage_is_refused() {
    let (mut knowledge, ids) = knowing(&[engine("a", 0), engine("b", 1), store(1)]);
    store_blocks(&mut knowledge, ids[0], &[1, 2, 3], 0, Tier::Gpu);
    store_blocks(&mut knowledge, ids[0], &[1, 2], 0, Tier::Cpu);
    store_blocks(&mut knowledge, ids[1], &[51, 52, 53, 54], 0, Tier::Gpu);
    assert_eq!(knowledge.said_by(ids[2], POSITION), None, "a store tells everything itself");
    assert_eq!(knowledge.said_by(PublisherId(9), POSITION), None);
    let said = knowledge.said_by(ids[0], POSITION).unwrap();
    let mut bytes = Vec::new();
    said.write(&mut bytes);
    assert_eq!(Said::read(&bytes).as_ref(), Ok(&said));
    assert_eq!((said.position(), said.registration()), (POSITION, &engine("a", 0)));
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        assert!(Said::read(&damaged).is_err(), "byte {at}");
        assert!(Said::read(&bytes[..at]).is_err(), "{at} bytes");
    }
    // With a right checksum: no panic, and no huge allocation.
    let end = bytes.len() - 8;
    for at in 12..end - 3 {
        for word in [0, 1, 0x7f, u32::MAX] {
            let mut forged = bytes.clone();
            forged[at..at + 4].copy_from_slice(&word.to_le_bytes());
            let checksum = xxhash_rust::xxh3::xxh3_64(&forged[..end]);
            forged[end..].copy_from_slice(&checksum.to_le_bytes());
            if let Ok(forged) = Said::read(&forged) {
                let (mut other, others) = knowing(&[engine("a", 0)]);
                other.adopt(others[0], &forged, 0, usize::MAX);
                ask(&other);
            }
        }
    }
    // In steps, beside what others said; then it goes on like its own.
    let (mut other, others) = knowing(&[engine("b", 1), engine("a", 0)]);
    store_blocks(&mut other, others[0], &[51], 0, Tier::Gpu);
    let mut step = 0;
    while step < said.steps() {
        step = other.adopt(others[1], &said, step, 2).unwrap();
    }
    let of_a = |matches: &Matches| matches.ranks.iter().find(|rank| rank.dp_rank == 0).copied();
    let counts = |rank: Option<RankMatch>| rank.map(|rank| [rank.gpu, rank.cpu, rank.disk]);
    assert_eq!(counts(of_a(&ask(&other))), Some([3; 3]));
    remove(&mut other, others[1], &[3], Tier::Gpu);
    assert_eq!(counts(of_a(&ask(&other))), Some([2; 3]));
    assert_eq!(other.adopt(others[0], &said, 0, 9), None, "of another publisher");
    let mut seeded = Knowledge::new(Settings { seed: 1, ..Settings::default() });
    let id = seeded.register(engine("a", 0)).unwrap();
    assert_eq!(seeded.adopt(id, &said, 0, 9), None, "keys of another seed");
    let mut small = Knowledge::new(Settings { learned_max: 2, ..Settings::default() });
    let id = small.register(engine("a", 0)).unwrap();
    assert_eq!(small.adopt(id, &said, 0, 9), None, "more than the limits allow");
}
