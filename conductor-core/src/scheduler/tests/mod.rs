//! Decisions on small clusters, by hand.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::*;
use crate::InstanceMatch;

mod random;
mod rules;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

/// Prefill instances `0..prefills`, decode instances `100..100 + decodes`, in one rack.
fn cluster(config: SchedulerConfig, prefills: u32, decodes: u32) -> Scheduler {
    let mut scheduler = Scheduler::new(config);
    let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
    for i in 0..prefills {
        scheduler.add_instance(InstanceSpec::new(InstanceId(i), Role::Prefill, kind)).expect("a free name");
    }
    for i in 0..decodes {
        scheduler
            .add_instance(InstanceSpec::new(InstanceId(100 + i), Role::Decode, kind))
            .expect("a free name");
    }
    scheduler
}

fn ask(tokens: u32, matches: &[InstanceMatch]) -> Ask<'_> {
    Ask {
        model: 0,
        tokens,
        block_tokens: 512,
        matches,
        store_blocks: 0,
        keys: &[],
        expected_output: Some(200),
        slo: Slo::NONE,
    }
}

fn has(instance: u32, blocks: u32) -> InstanceMatch {
    InstanceMatch { instance: InstanceId(instance), dp_rank: 0, gpu: 0, cpu: blocks, disk: blocks }
}

#[test]
fn an_idle_cluster_prefills_where_the_prefix_is() {
    let mut scheduler = cluster(SchedulerConfig::default(), 4, 2);
    let decision = scheduler.decide(at(0), &ask(10_000, &[has(2, 15)])).expect("an idle cluster");
    assert_eq!((decision.prefill, decision.reuse_blocks, decision.fetch), (InstanceId(2), 15, None));
    let prefill = CostModel::LLAMA3_70B_A800.prefill.time(10_000, 15 * 512);
    assert_eq!(decision.prefill_time, prefill);
}

#[test]
fn a_request_is_sent_only_to_instances_that_it_may_be_sent_to() {
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 3);
    let only = |id| move |instance| instance == InstanceId(id);
    for id in [100, 102, 101, 102] {
        let decision = scheduler.decide_among(at(0), &ask(10_000, &[has(1, 15)]), &[], only(id), &[]);
        let decision = decision.expect("an instance that decodes");
        assert_eq!(decision.decode, InstanceId(id));
        assert!(decision.prefill < InstanceId(2), "who only prefills is not asked about");
    }
    let refused = scheduler.decide_among(at(0), &ask(10_000, &[]), &[], only(7), &[]).unwrap_err();
    assert_eq!(refused.reason, Reason::NoDecode);
    assert!(scheduler.decide(at(0), &ask(10_000, &[])).is_ok(), "the next decision is free again");

    let mut both = Scheduler::new(SchedulerConfig::default());
    let kind = both.add_kind(CostModel::LLAMA3_70B_A800);
    for id in 0..3 {
        both.add_instance(InstanceSpec::new(InstanceId(id), Role::Both, kind)).expect("a free name");
    }
    for id in [2, 0, 1] {
        let decision =
            both.decide_among(at(0), &ask(10_000, &[has(1, 15)]), &[], only(id), &[]).expect("an instance");
        assert_eq!((decision.prefill, decision.decode), (InstanceId(id), InstanceId(id)));
    }
    let refused = both.decide_among(at(0), &ask(10_000, &[]), &[], |_| false, &[]).unwrap_err();
    assert_eq!(refused.reason, Reason::NoPrefill);
}

#[test]
fn an_instance_that_failed_is_used_only_where_no_other_one_is_there() {
    let avoiding = |scheduler: &mut Scheduler, avoid: &[u32]| {
        let avoid: Vec<_> = avoid.iter().map(|id| InstanceId(*id)).collect();
        // Whatever its prefix is worth.
        let decision = scheduler.decide_among(at(0), &ask(100_000, &[has(1, 190)]), &[], |_| true, &avoid);
        decision.map(|decision| (decision.prefill.0, decision.decode.0))
    };
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 2);
    assert_eq!(avoiding(&mut scheduler, &[1, 100]), Ok((0, 101)));
    let decision = scheduler.decide(at(0), &ask(100_000, &[has(1, 190)])).expect("placed");
    assert_eq!(decision.prefill, InstanceId(1), "the next decision avoids none");
    assert_eq!(avoiding(&mut scheduler, &[0, 101]), Ok((1, 100)));
    // All that prefill have failed: the ones that decode and have not are still preferred, and the reverse.
    let (prefill, decode) = avoiding(&mut scheduler, &[0, 1, 100]).expect("those that failed try again");
    assert!(prefill < 2 && decode == 101);
    let (prefill, decode) = avoiding(&mut scheduler, &[1, 100, 101]).expect("those that failed try again");
    assert!(prefill == 0 && decode >= 100);
    assert!(avoiding(&mut scheduler, &[0, 1, 100, 101]).is_ok());
    assert_eq!(scheduler.counters().refused_other, 0, "what was tried in between is no refusal");

    let mut both = Scheduler::new(SchedulerConfig::default());
    let kind = both.add_kind(CostModel::LLAMA3_70B_A800);
    for id in 0..2 {
        both.add_instance(InstanceSpec::new(InstanceId(id), Role::Both, kind)).expect("a free name");
    }
    assert_eq!(avoiding(&mut both, &[1]), Ok((0, 0)));
    assert!(avoiding(&mut both, &[0, 1]).is_ok());
    both.instance_lost(at(0), InstanceId(0));
    both.instance_lost(at(0), InstanceId(1));
    assert_eq!(avoiding(&mut both, &[0, 1]).unwrap_err().reason, Reason::NoPrefill);
    assert_eq!(both.counters().refused_other, 1);
}

#[test]
fn a_queue_at_the_holder_sends_the_request_elsewhere_with_a_fetch() {
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 2);
    let matches = vec![has(0, 60)];
    scheduler.decide(at(0), &ask(100_000, &[has(0, 1)])).expect("placed");
    let decision = scheduler.decide(at(0), &ask(32_000, &matches)).expect("placed");
    assert_eq!(decision.prefill, InstanceId(1));
    let fetch = decision.fetch.expect("a fetch");
    assert_eq!((fetch.from, fetch.first_block, fetch.blocks), (Source::Instance(InstanceId(0)), 0, 60));
}

#[test]
fn a_life_leaves_nothing_behind() {
    let mut scheduler = cluster(SchedulerConfig::default(), 2, 2);
    let ids: Vec<_> =
        (0..8).map(|_| scheduler.decide(at(0), &ask(8_000, &[])).expect("placed").reservation).collect();
    for (i, id) in ids.into_iter().enumerate() {
        let t = 1_000 * (i as u64 + 1);
        assert_eq!(scheduler.prefill_started(at(t), id), Ok(()));
        assert_eq!(scheduler.prefill_done(at(t + 900), id), Ok(()));
        assert_eq!(scheduler.transfer_done(at(t + 950), id), Ok(()));
        assert_eq!(scheduler.first_token(at(t + 960), id), Ok(()));
        assert_eq!(scheduler.output_tokens(at(t + 1_500), id, 10), Ok(()));
        assert_eq!(scheduler.done(at(t + 2_000), id, 20), Ok(()));
        assert_eq!(scheduler.done(at(t + 2_000), id, 20), Err(Stale));
    }
    assert!(scheduler.is_balanced());
    assert_eq!((scheduler.counters().done, scheduler.counters().stale), (8, 8));
}

#[test]
fn a_promise_that_would_be_missed_is_refused_with_the_prediction() {
    let mut scheduler = cluster(SchedulerConfig::default(), 1, 1);
    let slo = Slo { ttft: Duration::from_secs(30), tbt: Duration::from_millis(100) };
    let asked = Ask { slo, ..ask(100_000, &[]) };
    scheduler.decide(at(0), &asked).expect("an idle cluster");
    let refusal = scheduler.decide(at(0), &asked).expect_err("the second would take twice as long");
    assert_eq!(refusal.reason, Reason::Ttft);
    let excess = refusal.ttft - slo.ttft;
    assert!(refusal.retry_after >= excess && refusal.retry_after < excess + Duration::from_secs(1));
}
