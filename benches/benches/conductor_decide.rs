//! Decisions of the Conductor's scheduler on 64 prefill and 64 decode instances, with matches given: the
//! whole of `decide`, and the reports that end what it booked. Quantiles of single decisions are printed
//! before.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::black_box;
use std::time::{Duration, Instant as Clock};

use conductor_core::cost::CostModel;
use conductor_core::scheduler::{
    Ask, InstanceSpec, LoadReport, PolicyKind, ReservationId, Role, Scheduler, SchedulerConfig, Slo,
};
use conductor_core::{InstanceId, InstanceMatch};
use criterion::{Criterion, criterion_group, criterion_main};
use te_core::Instant;
use te_core::testkit::Rng;

const PREFILLS: u32 = 64;
const DECODES: u32 = 64;
const BLOCK_TOKENS: u32 = 16;
const SLO: Slo = Slo { ttft: Duration::from_secs(30), tbt: Duration::from_millis(100) };

/// A loaded cluster, with requests that come and go as predicted.
struct Load {
    scheduler: Scheduler,
    rng: Rng,
    now_ns: u64,
    /// When the next report of a request is due, and which one it is.
    due: BinaryHeap<Reverse<(u64, ReservationId, u8)>>,
    matches: Vec<InstanceMatch>,
    tokens: u32,
    store_blocks: u32,
}

impl Load {
    fn new(policy: PolicyKind) -> Self {
        let mut scheduler = Scheduler::new(SchedulerConfig { policy, ..SchedulerConfig::default() });
        let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
        for i in 0..PREFILLS + DECODES {
            let role = if i < PREFILLS { Role::Prefill } else { Role::Decode };
            let mut spec = InstanceSpec::new(InstanceId(i), role, kind);
            spec.rack = (i % 8) as u16;
            spec.nic_bytes_per_s = 25_000_000_000;
            scheduler.add_instance(spec).expect("a free name");
        }
        let (rng, due, matches) = (Rng::new(1), BinaryHeap::new(), Vec::new());
        let mut load = Self { scheduler, rng, now_ns: 0, due, matches, tokens: 0, store_blocks: 0 };
        for _ in 0..5_000 {
            load.draw();
            load.decide();
        }
        load
    }

    /// The next request: 12,000 tokens on average, 60 per second, which 64 instances can just serve; every
    /// instance has the first block, half have more.
    fn draw(&mut self) {
        self.now_ns += self.rng.below(33_000_000);
        self.tokens = 1_000 + self.rng.below(22_000) as u32;
        let blocks = self.tokens / BLOCK_TOKENS;
        self.store_blocks = self.rng.below(u64::from(blocks)) as u32;
        self.matches.clear();
        for i in 0..PREFILLS {
            let cpu = if i % 2 == 0 { 1 + self.rng.below(u64::from(blocks)) as u32 } else { 1 };
            let disk = cpu + self.rng.below(64) as u32;
            self.matches.push(InstanceMatch { instance: InstanceId(i), dp_rank: 0, gpu: cpu / 4, cpu, disk });
        }
        self.report();
    }

    /// Reports what is due: prefills begin and end, tokens come.
    fn report(&mut self) {
        while let Some(&Reverse((at, id, stage))) = self.due.peek().filter(|due| due.0.0 <= self.now_ns) {
            self.due.pop();
            let now = Instant::from_nanos(at);
            let (known, after_ms) = match stage {
                0 => (self.scheduler.prefill_started(now, id), 1 + self.rng.below(1_000)),
                1 => (self.scheduler.prefill_done(now, id), 1 + self.rng.below(300)),
                2 => (self.scheduler.first_token(now, id), 1 + self.rng.below(20_000)),
                _ => (self.scheduler.done(now, id, 300), 0),
            };
            known.expect("it is in progress");
            if stage < 3 {
                self.due.push(Reverse((at + after_ms * 1_000_000, id, stage + 1)));
            }
        }
    }

    fn decide(&mut self) {
        let ask = Ask {
            model: 0,
            tokens: self.tokens,
            block_tokens: BLOCK_TOKENS,
            matches: &self.matches,
            store_blocks: self.store_blocks,
            keys: &[],
            expected_output: None,
            slo: SLO,
        };
        if let Ok(decision) =
            black_box(self.scheduler.decide(Instant::from_nanos(self.now_ns), black_box(&ask)))
        {
            let begin = decision.ttft.saturating_sub(decision.prefill_time).as_nanos() as u64;
            self.due.push(Reverse((self.now_ns + begin, decision.reservation, 0)));
        }
    }
}

fn quantiles(load: &mut Load) -> [Duration; 3] {
    let mut times: Vec<_> = (0..20_000)
        .map(|_| {
            load.draw();
            let begin = Clock::now();
            load.decide();
            begin.elapsed()
        })
        .collect();
    times.sort_unstable();
    [50, 99, 999].map(|q| times[if q > 100 { times.len() * q / 1_000 } else { times.len() * q / 100 }])
}

fn decide(c: &mut Criterion) {
    let mut group = c.benchmark_group("conductor_decide");
    for policy in [PolicyKind::Cost, PolicyKind::Algorithm1 { threshold: 1.0 }, PolicyKind::Dynamo] {
        let mut load = Load::new(policy);
        let [p50, p99, p999] = quantiles(&mut load);
        let counters = *load.scheduler.counters();
        println!(
            "{policy}: p50 {p50:?} p99 {p99:?} p99.9 {p999:?}; {} placed, {} with a fetch, {} refused",
            counters.decided,
            counters.fetches,
            counters.refused_ttft + counters.refused_tbt + counters.refused_other
        );
        group.bench_function(policy.to_string(), |bench| {
            bench.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    load.draw();
                    let begin = Clock::now();
                    load.decide();
                    total += begin.elapsed();
                }
                total
            });
        });
    }
    let mut load = Load::new(PolicyKind::Cost);
    group.bench_function("load_report", |bench| {
        let report =
            LoadReport { running: Some(12), waiting: Some(3), kv_tokens: Some(90_000), ..Default::default() };
        let now = Instant::from_nanos(load.now_ns);
        bench.iter(|| load.scheduler.load_report(now, InstanceId(PREFILLS + 3), black_box(&report)));
    });
    group.finish();
}

criterion_group!(benches, decide);
criterion_main!(benches);
