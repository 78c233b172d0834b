//! Rules, one by one.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::*;
use crate::BlockKey;
use crate::cost::PrefillCounters;
use te_core::testkit::Rng;

fn decide(scheduler: &mut Scheduler, ms: u64, ask: &Ask<'_>) -> Decision {
    scheduler.decide(at(ms), ask).expect("there is room")
}

/// Our rule, against the least cost of all placements, each computed on its own: every candidate, every
/// source, every cut.
#[derive(Debug)]
struct Checked;

/// The cost of a candidate with what it has, or with a fetch.
fn cost_of(view: &View<'_>, placement: &Placement) -> f64 {
    let candidate = &view.candidates()[placement.candidate];
    let own = view.own(candidate);
    let (estimate, others) = match placement.fetch {
        None => (own, 0.0),
        Some((h, blocks)) => {
            let holder = &view.holders()[h];
            let others =
                view.fetch_span(candidate, &own, holder, blocks) * view.fetch_price(candidate, holder);
            (view.fetched(candidate, &own, holder, blocks, true), others)
        }
    };
    let ship_wait = view.ship_wait(candidate, estimate.total);
    (estimate.total + ship_wait) as f64 + others + view.prefill_price() * estimate.prefill as f64
}

impl Policy for Checked {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let ours = Cost { booked: true }.place(view)?;
        let mut least = f64::INFINITY;
        for (candidate, i) in view.candidates().iter().zip(0..) {
            let own = view.own(candidate);
            least = least.min(cost_of(view, &Placement { candidate: i, fetch: None }));
            for (holder, h) in view.holders().iter().zip(0..) {
                if holder.instance != Some(candidate.id) {
                    for blocks in own.blocks + 1..=holder.blocks {
                        least =
                            least.min(cost_of(view, &Placement { candidate: i, fetch: Some((h, blocks)) }));
                    }
                }
            }
        }
        let cost = cost_of(view, &ours);
        // The best cut may lie within a block.
        let block = view.prefill(&view.candidates()[ours.candidate], 0) as f64 / f64::from(view.blocks());
        assert!(cost <= least + 2.0 * (1.0 + view.prefill_price()) * block, "{cost} {least} {ours:?}");
        FETCHES.fetch_add(u32::from(ours.fetch.is_some()), Relaxed);
        Some(ours)
    }
}

/// Fetches that were checked.
static FETCHES: AtomicU32 = AtomicU32::new(0);

#[test]
fn the_choice_is_as_good_as_the_best_of_all_candidates_sources_and_cuts() {
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let bandwidth_bytes_per_s = 2_000_000_000 + rng.below(30_000_000_000);
        // Without shipping: while KV would wait for the NIC anyway, a shorter fetch is as early, and cheaper.
        let config = SchedulerConfig {
            bandwidth_bytes_per_s,
            ships: false,
            admission: false,
            ..SchedulerConfig::default()
        };
        let mut scheduler = cluster(config, 4, 3);
        scheduler.policy = Box::new(Checked);
        for i in 0..20 {
            let tokens = 2_000 + rng.below(60_000) as u32;
            let blocks = u64::from(tokens / 512);
            let matches: Vec<_> = (0..4).map(|i| has(i, rng.below(blocks) as u32)).collect();
            let asked = Ask { store_blocks: rng.below(blocks) as u32, ..ask(tokens, &matches) };
            decide(&mut scheduler, 200 * i, &asked);
        }
    }
    assert!(FETCHES.load(Relaxed) > 500, "{FETCHES:?}");
}

#[test]
fn a_second_fetch_from_one_instance_waits_for_the_first() {
    let config = SchedulerConfig { bandwidth_bytes_per_s: 10_000_000_000, ..SchedulerConfig::default() };
    let mut scheduler = cluster(config, 3, 1);
    // The holder is busy for a long time, so that both fetch from it.
    decide(&mut scheduler, 0, &ask(120_000, &[has(0, 1)]));
    let first = decide(&mut scheduler, 0, &ask(32_000, &[has(0, 60)]));
    let second = decide(&mut scheduler, 0, &ask(32_000, &[has(0, 60)]));
    assert!(first.fetch.is_some() && second.fetch.is_some(), "{first:?} {second:?}");
    assert_ne!(first.prefill, second.prefill);
    let span = Duration::from_secs_f64(60.0 * 512.0 * 327_680.0 / 1e10);
    assert!(second.ttft - first.ttft >= span / 2, "{:?} {:?}", first.ttft, second.ttft);
}

#[test]
fn kv_that_is_at_a_decode_instance_is_not_shipped_again() {
    let config = SchedulerConfig { bandwidth_bytes_per_s: 1_000_000_000, ..SchedulerConfig::default() };
    let mut scheduler = cluster(config, 1, 3);
    let decision = decide(&mut scheduler, 0, &ask(20_000, &[has(102, 39)]));
    assert_eq!(decision.decode, InstanceId(102));
}

#[test]
fn equal_decode_instances_are_chosen_by_rack_then_by_load() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default());
    let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
    for (id, role, rack) in
        [(0, Role::Prefill, 1), (1, Role::Decode, 0), (2, Role::Decode, 1), (3, Role::Decode, 1)]
    {
        let spec = InstanceSpec { rack, ..InstanceSpec::new(InstanceId(id), role, kind) };
        scheduler.add_instance(spec).expect("a free name");
    }
    let decodes: Vec<_> =
        (0..4).map(|i| decide(&mut scheduler, 3_000 * i, &ask(4_000, &[])).decode.0).collect();
    assert_eq!(decodes, [2, 3, 2, 3]);
}

#[test]
fn room_for_kv_is_that_of_the_time_when_the_prefill_ends() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default());
    let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
    scheduler.add_instance(InstanceSpec::new(InstanceId(0), Role::Prefill, kind)).expect("a free name");
    let spec = InstanceSpec { kv_tokens_max: 12_000, ..InstanceSpec::new(InstanceId(1), Role::Decode, kind) };
    scheduler.add_instance(spec).expect("a free name");
    let short = Ask { expected_output: Some(20), ..ask(8_000, &[]) };
    let first = decide(&mut scheduler, 0, &short).reservation;
    // Its 20 tokens have ended long before a prefill of 8,000 tokens behind it does.
    let second = Ask { expected_output: Some(20), ..ask(11_000, &[]) };
    decide(&mut scheduler, 0, &second);
    // With 2,000 tokens it stays, and there is no room for both.
    let mut scheduler = {
        scheduler.release(at(0), first).expect("in progress");
        scheduler
    };
    let refusal = scheduler.decide(at(0), &Ask { expected_output: Some(2_000), ..ask(11_000, &[]) });
    assert_eq!(refusal.map_err(|refusal| refusal.reason), Err(Reason::KvFull));
}

#[test]
fn a_late_request_delays_those_behind_it() {
    let mut scheduler = cluster(SchedulerConfig::default(), 1, 1);
    let first = decide(&mut scheduler, 0, &ask(8_000, &[]));
    scheduler.prefill_started(at(0), first.reservation).expect("in progress");
    let (_, wait) = scheduler.queue(InstanceId(0), at(0)).expect("it exists");
    // At 5 s the prefill, which takes a second, has not ended: its wait is still what it was at its end,
    // zero.
    let (_, late) = scheduler.queue(InstanceId(0), at(5_000)).expect("it exists");
    assert!(wait > 900_000_000 && late == 0, "{wait} {late}");
    let second = decide(&mut scheduler, 5_000, &ask(8_000, &[]));
    scheduler.prefill_done(at(7_000), first.reservation).expect("in progress");
    let (queued, wait) = scheduler.queue(InstanceId(0), at(7_000)).expect("it exists");
    assert_eq!(queued, 1);
    let prefill = second.prefill_time.as_nanos() as u64;
    assert!(wait.abs_diff(prefill) < 1_000_000, "{wait} {prefill}");
}

#[test]
fn work_of_others_that_an_engine_reports_counts() {
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 2);
    let report = LoadReport { waiting_uncached_tokens: Some(50_000), ..LoadReport::default() };
    assert!(scheduler.load_report(at(0), InstanceId(0), &report));
    assert_eq!(decide(&mut scheduler, 0, &ask(8_000, &[])).prefill, InstanceId(1));
    let report = LoadReport { running: Some(30), kv_tokens: Some(300_000), ..LoadReport::default() };
    assert!(scheduler.load_report(at(0), InstanceId(100), &report));
    assert_eq!(decide(&mut scheduler, 5_000, &ask(8_000, &[])).decode, InstanceId(101));
    assert!(!scheduler.load_report(at(0), InstanceId(77), &report));
}

#[test]
fn requests_that_an_idle_engine_does_not_have_leave_its_queue() {
    let mut scheduler = cluster(SchedulerConfig::default(), 1, 1);
    let lost = decide(&mut scheduler, 0, &ask(80_000, &[]));
    let idle = LoadReport { running: Some(0), waiting: Some(0), ..LoadReport::default() };
    scheduler.load_report(at(1_000), InstanceId(0), &idle);
    assert_eq!(scheduler.queue(InstanceId(0), at(1_000)).map(|(queued, _)| queued), Some(1));
    scheduler.load_report(at(5_000), InstanceId(0), &idle);
    assert_eq!(scheduler.queue(InstanceId(0), at(5_000)), Some((0, 0)));
    // Its reservation lives on until it ends or expires.
    assert_eq!(scheduler.done(at(6_000), lost.reservation, 5), Ok(()));
    assert!(scheduler.is_balanced());
}

#[test]
fn counters_of_an_engine_teach_its_cost() {
    let mut scheduler = cluster(SchedulerConfig::default(), 1, 1);
    let truth = 3.0;
    let model = CostModel::LLAMA3_70B_A800.prefill;
    let mut counters = PrefillCounters::default();
    let mut rng = Rng::new(1);
    for i in 0..200_u64 {
        let now = at(10_000 * i);
        let report = LoadReport { counters: Some(counters), ..LoadReport::default() };
        scheduler.load_report(now, InstanceId(0), &report);
        let tokens = 1_000 + rng.below(20_000) as u32;
        let id = scheduler.decide(now, &ask(tokens, &[])).expect("placed").reservation;
        counters.uncached_tokens += u64::from(tokens);
        counters.busy_us += (truth * model.time(tokens, 0).as_secs_f64() * 1e6) as u64;
        // Without the time at which it began, only the counters tell how long it took.
        scheduler.first_token(now + Duration::from_secs(9), id).expect("in progress");
        scheduler.done(now + Duration::from_secs(9), id, 1).expect("in progress");
    }
    let fitted = scheduler.cost(KindId(0)).expect("the kind").prefill.time(10_000, 0).as_secs_f64();
    let exact = truth * model.time(10_000, 0).as_secs_f64();
    assert!((fitted - exact).abs() < 0.03 * exact, "{fitted} {exact}");
}

#[test]
fn a_lost_prefill_instance_means_another_one_with_the_rest_of_the_promise() {
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 1);
    let slo = Slo { ttft: Duration::from_secs(5), tbt: Duration::MAX };
    let asked = Ask { slo, ..ask(8_000, &[]) };
    let first = decide(&mut scheduler, 0, &asked);
    assert!(scheduler.instance_lost(at(4_900), first.prefill));
    let orphan = scheduler.next_orphan().expect("its request");
    assert_eq!((orphan.reservation, orphan.prefilled), (first.reservation, false));
    assert_eq!(scheduler.next_orphan(), None);
    // The promise is out of reach, but it was accepted.
    let second = scheduler.reschedule(at(4_900), first.reservation, &asked).expect("the other one");
    assert_ne!(second.prefill, first.prefill);
    assert_ne!(second.reservation, first.reservation);
    assert_eq!(scheduler.prefill_done(at(5_000), first.reservation), Err(Stale));
    assert_eq!(scheduler.first_token(at(6_000), second.reservation), Ok(()));
    assert_eq!(scheduler.done(at(7_000), second.reservation, 3), Ok(()));
    assert!(scheduler.is_balanced());
}

#[test]
fn a_lost_decode_instance_is_replaced_from_the_store_if_it_has_the_kv() {
    for store_blocks in [16, 15] {
        let mut scheduler = cluster(SchedulerConfig::default(), 1, 2);
        let first = decide(&mut scheduler, 0, &ask(8_000, &[]));
        scheduler.output_tokens(at(2_000), first.reservation, 400).expect("in progress");
        assert!(scheduler.instance_lost(at(2_000), first.decode));
        let orphan = scheduler.next_orphan().expect("its request");
        assert_eq!((orphan.prefilled, orphan.output), (true, 400));
        let again = Ask { store_blocks, ..ask(8_400, &[]) };
        let second = scheduler.reschedule(at(2_000), orphan.reservation, &again).expect("the other one");
        assert_eq!(second.restored, store_blocks == 16);
        assert_ne!(second.decode, first.decode);
        assert_eq!(scheduler.counters().restored, u64::from(second.restored));
        assert_eq!(scheduler.first_token(at(3_000), second.reservation), Ok(()));
        assert_eq!(scheduler.done(at(4_000), second.reservation, 600), Ok(()));
        assert!(scheduler.is_balanced());
    }
}

#[test]
fn what_no_engine_reports_about_expires() {
    let mut scheduler = cluster(SchedulerConfig::default(), 1, 1);
    let silent = decide(&mut scheduler, 0, &ask(8_000, &[])).reservation;
    let reported = decide(&mut scheduler, 0, &ask(8_000, &[])).reservation;
    scheduler.prefill_started(at(200_000), reported).expect("in progress");
    assert_eq!(scheduler.expire(at(299_999), 10), 0);
    assert_eq!(scheduler.expire(at(300_000), 10), 1);
    assert_eq!(scheduler.release(at(300_000), silent), Err(Stale));
    assert_eq!(scheduler.expire(at(500_000), 10), 1);
    assert!(scheduler.is_balanced());
}

#[test]
fn after_a_refusal_the_next_must_be_below_the_promise_by_the_hysteresis() {
    let config = SchedulerConfig { hysteresis: 0.1, ..SchedulerConfig::default() };
    let mut scheduler = cluster(config, 1, 1);
    let prefill = CostModel::LLAMA3_70B_A800.prefill.time(8_000, 0);
    let slo = |part: u32| Slo { ttft: prefill * part / 100 + Duration::from_millis(200), tbt: Duration::MAX };
    let asked = |part| Ask { slo: slo(part), ..ask(8_000, &[]) };
    assert!(scheduler.decide(at(0), &asked(50)).is_err());
    assert!(scheduler.decide(at(0), &asked(92)).is_err());
    let accepted = decide(&mut scheduler, 0, &asked(130));
    scheduler.done(at(0), accepted.reservation, 1).expect("in progress");
    decide(&mut scheduler, 0, &asked(92));
}

#[test]
fn limits_refuse() {
    let limits = Limits { instances: 2, reservations: 2, tokens_max: 9_000, ..Limits::default() };
    let mut scheduler = Scheduler::new(SchedulerConfig { limits, ..SchedulerConfig::default() });
    let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
    let reason = |result: Result<Decision, Refusal>| result.map_err(|refusal| refusal.reason);
    assert_eq!(reason(scheduler.decide(at(0), &ask(8_000, &[]))), Err(Reason::NoPrefill));
    let spec = |id, role| InstanceSpec::new(InstanceId(id), role, kind);
    scheduler.add_instance(spec(0, Role::Prefill)).expect("a free name");
    assert_eq!(reason(scheduler.decide(at(0), &ask(8_000, &[]))), Err(Reason::NoDecode));
    assert_eq!(scheduler.add_instance(spec(0, Role::Both)), Err(InstanceError::Exists(InstanceId(0))));
    let far = InstanceSpec { rack: 64, ..spec(1, Role::Decode) };
    assert_eq!(scheduler.add_instance(far), Err(InstanceError::BadRack { rack: 64, max: 64 }));
    scheduler.add_instance(spec(1, Role::Decode)).expect("a free name");
    assert_eq!(scheduler.add_instance(spec(2, Role::Both)), Err(InstanceError::TooMany { max: 2 }));
    assert_eq!(reason(scheduler.decide(at(0), &ask(9_001, &[]))), Err(Reason::BadAsk));
    assert_eq!(reason(scheduler.decide(at(0), &ask(0, &[]))), Err(Reason::BadAsk));
    decide(&mut scheduler, 0, &ask(9_000, &[]));
    decide(&mut scheduler, 0, &ask(9_000, &[]));
    assert_eq!(reason(scheduler.decide(at(0), &ask(8_000, &[]))), Err(Reason::Full));
}

#[test]
fn a_drained_instance_is_forgotten_after_its_last_request() {
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 1);
    let placed = decide(&mut scheduler, 0, &ask(8_000, &[has(0, 10)]));
    assert_eq!(placed.prefill, InstanceId(0));
    assert!(scheduler.drain(InstanceId(0)));
    assert_eq!(decide(&mut scheduler, 0, &ask(8_000, &[has(0, 15)])).prefill, InstanceId(1));
    assert!(scheduler.queue(InstanceId(0), at(0)).is_some());
    scheduler.done(at(1_000), placed.reservation, 1).expect("in progress");
    // The fetch from it may be under way still.
    let left = scheduler.queue(InstanceId(0), at(0)).is_some();
    assert_eq!(left, scheduler.counters().fetches > 0);
}

#[test]
fn a_long_prompt_is_faster_on_a_pipeline() {
    let mut scheduler = Scheduler::new(SchedulerConfig::default());
    let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
    scheduler.add_instance(InstanceSpec::new(InstanceId(0), Role::Prefill, kind)).expect("a free name");
    let group = InstanceSpec {
        stages: 4,
        chunk_tokens: 2_048,
        ..InstanceSpec::new(InstanceId(1), Role::Prefill, kind)
    };
    scheduler.add_instance(group).expect("a free name");
    scheduler.add_instance(InstanceSpec::new(InstanceId(2), Role::Decode, kind)).expect("a free name");
    let decision = decide(&mut scheduler, 0, &ask(65_536, &[]));
    let alone = CostModel::LLAMA3_70B_A800.prefill.time(65_536, 0);
    assert_eq!(decision.prefill, InstanceId(1));
    assert!(decision.prefill_time < alone / 3 && decision.prefill_time > alone / 4, "{decision:?}");
}

#[test]
fn a_prefix_whose_holder_is_busy_is_copied() {
    let bandwidth_bytes_per_s = 6_000_000_000;
    let config = SchedulerConfig {
        bandwidth_bytes_per_s,
        ships: false,
        admission: false,
        ..SchedulerConfig::default()
    };
    let mut scheduler = cluster(config, 4, 2);
    let keys: Vec<_> = (0..100).map(BlockKey).collect();
    let mut asked = None;
    for i in 0..40 {
        decide(&mut scheduler, 100 * i, &Ask { keys: &keys, ..ask(40_000, &[has(0, 70)]) });
        asked = asked.or(scheduler.next_replicate());
    }
    let asked = asked.expect("a copy");
    assert_eq!((asked.key, asked.blocks, asked.from), (BlockKey(69), 70, Source::Instance(InstanceId(0))));
    assert_ne!(asked.to, InstanceId(0));
}

#[test]
fn a_prefix_that_is_fetched_from_the_store_often_is_copied_there_as_far_as_requests_share_it() {
    let fetching = |hot: &mut Scheduler, ms, keys: &[BlockKey], store_blocks| {
        let decision = decide(hot, ms, &Ask { keys, store_blocks, ..ask(40_000, &[]) });
        assert_eq!(decision.fetch.map(|fetch| fetch.from), Some(Source::Store));
        hot.next_replicate()
    };
    let config = || SchedulerConfig {
        replication: Some(ReplicationConfig {
            wait_min: Duration::from_secs(1),
            ..ReplicationConfig::default()
        }),
        admission: false,
        ships: false,
        ..SchedulerConfig::default()
    };
    // The same prompt again and again: all of what the store has.
    let mut same = cluster(config(), 4, 2);
    let keys: Vec<_> = (0..78).map(BlockKey).collect();
    let asked: Vec<_> = (0..40).filter_map(|i| fetching(&mut same, 100 * i, &keys, 70)).collect();
    assert!(asked.len() >= 2, "{asked:?}");
    assert!(
        asked.iter().all(|it| (it.key, it.blocks, it.from) == (BlockKey(69), 70, Source::Store)),
        "{asked:?}"
    );
    // Prompts that share 40 blocks: the longest power of two below it.
    let mut shared = cluster(config(), 4, 2);
    let asked: Vec<_> = (0..40)
        .filter_map(|i| {
            let keys: Vec<_> =
                (0..78).map(|at| BlockKey(if at < 40 { at } else { 1_000 * (i + 1) + at })).collect();
            fetching(&mut shared, 100 * i, &keys, 70)
        })
        .collect();
    assert!(asked.iter().any(|it| (it.key, it.blocks) == (BlockKey(31), 32)), "{asked:?}");
    assert!(asked.iter().all(|it| it.blocks <= 32), "{asked:?}");
    // Seldom: never.
    let mut seldom = cluster(config(), 4, 2);
    assert!((0..40).all(|i| fetching(&mut seldom, 100_000 * i, &keys, 70).is_none()));
}
