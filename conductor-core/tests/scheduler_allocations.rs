//! Decisions of the scheduler, and the reports of what it placed, allocate nothing.

use std::alloc::System;
use std::time::Duration;

use conductor_core::cost::CostModel;
use conductor_core::scheduler::{
    Ask, InstanceSpec, LoadReport, PolicyKind, Role, Scheduler, SchedulerConfig, Slo,
};
use conductor_core::{BlockKey, InstanceId, InstanceMatch};
use te_core::Instant;
use te_core::testkit::{CountingAlloc, Rng, allocations, is_counting};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

const INSTANCES: u32 = 128;

fn cluster(policy: PolicyKind) -> Scheduler {
    let mut scheduler = Scheduler::new(SchedulerConfig { policy, ..SchedulerConfig::default() });
    let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
    for i in 0..INSTANCES {
        let role = if i % 2 == 0 { Role::Prefill } else { Role::Decode };
        let mut spec = InstanceSpec::new(InstanceId(i), role, kind);
        spec.rack = (i % 4) as u16;
        spec.nic_bytes_per_s = 3_000_000_000;
        scheduler.add_instance(spec).expect("a free name");
    }
    scheduler
}

#[test]
fn neither_decisions_nor_reports_allocate() {
    assert!(is_counting());
    let keys: Vec<_> = (0..2_000).map(BlockKey).collect();
    for policy in PolicyKind::ALL {
        let mut scheduler = cluster(policy);
        let mut rng = Rng::new(1);
        let mut matches = Vec::with_capacity(INSTANCES as usize);
        let (mut placed, mut refused, mut now) = (0, 0, Instant::ZERO);
        let mut live = Vec::with_capacity(4_096);
        let before = allocations();
        for i in 0..3_000_u32 {
            now = now + Duration::from_millis(rng.below(40));
            matches.clear();
            for instance in (0..INSTANCES).step_by(2) {
                let cpu = rng.below(700) as u32;
                let (instance, disk) = (InstanceId(instance), cpu + 20);
                matches.push(InstanceMatch { instance, dp_rank: 0, gpu: cpu / 2, cpu, disk });
            }
            let ask = Ask {
                model: 0,
                tokens: 500 + rng.below(30_000) as u32,
                block_tokens: 16,
                matches: &matches,
                store_blocks: rng.below(900) as u32,
                keys: &keys,
                expected_output: None,
                slo: Slo { ttft: Duration::from_secs(4), tbt: Duration::from_millis(100) },
            };
            match scheduler.decide(now, &ask) {
                Ok(decision) => live.push(decision.reservation),
                Err(_) => refused += 1,
            }
            placed = scheduler.counters().decided;
            if i % 3 > 0 && !live.is_empty() {
                let id = live.swap_remove(rng.index(live.len()));
                scheduler.prefill_started(now, id).expect("in progress");
                scheduler.prefill_done(now + Duration::from_millis(1), id).expect("in progress");
                scheduler.first_token(now + Duration::from_millis(2), id).expect("in progress");
                scheduler.output_tokens(now + Duration::from_millis(3), id, 100).expect("in progress");
                scheduler.done(now + Duration::from_millis(4), id, 200).expect("in progress");
            }
            let report = LoadReport { running: Some(3), kv_tokens: Some(9_000), ..LoadReport::default() };
            scheduler.load_report(now, InstanceId(i % INSTANCES), &report);
            scheduler.next_replicate();
            scheduler.expire(now, 4);
        }
        assert_eq!(allocations() - before, 0, "{policy}");
        assert!(placed > 100 && refused > 0, "{policy}: {placed} placed, {refused} refused");
    }
}
