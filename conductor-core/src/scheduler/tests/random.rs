//! Random sequences of calls: whatever comes in whatever order, the books stay balanced.

use te_core::testkit::{Rng, on_all_cores};

use super::*;
use crate::BlockKey;
use crate::cost::PrefillCounters;

/// The scheduler, and what it should have in progress.
struct Play {
    rng: Rng,
    now: u64,
    scheduler: Scheduler,
    kind: KindId,
    instances: Vec<(InstanceId, Role)>,
    named: u32,
    live: Vec<ReservationId>,
    gone: Vec<ReservationId>,
    orphans: Vec<ReservationId>,
    ended: u64,
    begun: u64,
}

impl Play {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let config = SchedulerConfig {
            limits: Limits {
                instances: 12,
                racks: 3,
                reservations: 40,
                queue_per_instance: 8,
                ..Limits::default()
            },
            policy: PolicyKind::ALL[rng.index(PolicyKind::ALL.len())],
            seed,
            admission: rng.chance_ppm(700_000),
            first_token_after_transfer: rng.chance_ppm(500_000),
            layerwise: rng.chance_ppm(500_000),
            bandwidth_bytes_per_s: 1 + rng.below(20_000_000_000),
            reservation_ttl: Duration::from_secs(1 + rng.below(100)),
            ..SchedulerConfig::default()
        };
        let mut scheduler = Scheduler::new(config);
        let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
        let (instances, live, gone, orphans) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut play = Self {
            rng,
            now: 0,
            scheduler,
            kind,
            instances,
            named: 0,
            live,
            gone,
            orphans,
            ended: 0,
            begun: 0,
        };
        (0..6).for_each(|_| play.add());
        play
    }

    fn time(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn add(&mut self) {
        let role = [Role::Prefill, Role::Decode, Role::Both][self.rng.index(3)];
        let mut spec = InstanceSpec::new(InstanceId(self.named), role, self.kind);
        spec.rack = self.rng.below(3) as u16;
        spec.nic_bytes_per_s = self.rng.below(2) * 10_000_000_000;
        spec.kv_tokens_max = self.rng.below(3) * 200_000;
        spec.sequences_max = self.rng.below(3) as u32 * 8;
        spec.stages = 1 + self.rng.below(3) as u32;
        spec.chunk_tokens = self.rng.below(2) as u32 * 2_048;
        if self.scheduler.add_instance(spec).is_ok() {
            self.instances.push((spec.id, role));
            self.named += 1;
        }
    }

    fn instance(&mut self) -> Option<InstanceId> {
        (!self.instances.is_empty()).then(|| self.instances[self.rng.index(self.instances.len())].0)
    }

    /// A request, some of them nonsense.
    fn with_ask<R>(&mut self, call: impl FnOnce(&mut Scheduler, Instant, &Ask<'_>) -> R) -> R {
        let tokens = self.rng.below(40_000) as u32;
        let block_tokens = [512, 512, 16, 1, 0, u32::MAX][self.rng.index(6)];
        let mut matches = Vec::new();
        for _ in 0..self.rng.below(5) {
            let blocks = self.rng.below(100) as u32;
            let more = self.rng.below(3) as u32 * 20;
            matches.push(InstanceMatch {
                instance: InstanceId(self.rng.below(u64::from(self.named) + 1) as u32),
                dp_rank: 0,
                gpu: blocks / 2,
                cpu: blocks,
                disk: if self.rng.below(20) == 0 { 0 } else { blocks + more },
            });
        }
        let keys: Vec<_> = (0..80).map(BlockKey).collect();
        let mut slo = Slo::NONE;
        if self.rng.chance_ppm(500_000) {
            slo.ttft = Duration::from_millis(self.rng.below(20_000));
            slo.tbt = Duration::from_millis(self.rng.below(200));
        }
        let ask = Ask {
            model: u32::from(self.rng.below(30) == 0),
            tokens,
            block_tokens,
            matches: &matches,
            store_blocks: if self.rng.below(3) == 0 { self.rng.below(100) as u32 * 1_000 } else { 0 },
            keys: &keys,
            expected_output: [None, Some(0), Some(100), Some(u32::MAX)][self.rng.index(4)],
            slo,
        };
        let now = self.time();
        call(&mut self.scheduler, now, &ask)
    }

    fn decide(&mut self) {
        if let Ok(decision) = self.with_ask(|scheduler, now, ask| scheduler.decide(now, ask)) {
            let up = |id, roles: [Role; 2]| {
                self.instances.iter().any(|&(i, role)| i == id && roles.contains(&role))
            };
            assert!(up(decision.prefill, [Role::Prefill, Role::Both]), "{decision:?}");
            assert!(up(decision.decode, [Role::Decode, Role::Both]), "{decision:?}");
            self.live.push(decision.reservation);
            self.begun += 1;
        }
    }

    fn report(&mut self) {
        let Some(&id) = (!self.live.is_empty()).then(|| &self.live[self.rng.index(self.live.len())]) else {
            return;
        };
        let now = self.time();
        let tokens = self.rng.below(600) as u32;
        let scheduler = &mut self.scheduler;
        let ends = match self.rng.below(8) {
            0 | 1 => scheduler.prefill_started(now, id).map(|()| false),
            2 => scheduler.prefill_done(now, id).map(|()| false),
            3 => scheduler.transfer_done(now, id).map(|()| false),
            4 => scheduler.first_token(now, id).map(|()| false),
            5 => scheduler.output_tokens(now, id, tokens).map(|()| false),
            6 => scheduler.done(now, id, tokens).map(|()| true),
            _ => scheduler.release(now, id).map(|()| true),
        };
        if ends.expect("it is in progress") {
            self.live.retain(|&other| other != id);
            self.orphans.retain(|&other| other != id);
            self.gone.push(id);
            self.ended += 1;
        }
    }

    fn change_instances(&mut self) {
        let Some(id) = self.instance() else { return self.add() };
        let now = self.time();
        match self.rng.below(6) {
            0 => assert!(self.scheduler.instance_lost(now, id)),
            5 => {
                assert!(self.scheduler.drain(id));
                self.forget_vacated();
            }
            1 | 2 => assert!(self.scheduler.instance_back(id)),
            3 => {
                assert!(self.scheduler.remove_instance(now, id));
                self.instances.retain(|&(other, _)| other != id);
            }
            _ => self.add(),
        }
    }

    /// Drained instances are forgotten when their last request ends.
    fn forget_vacated(&mut self) {
        self.instances.retain(|&(id, _)| self.scheduler.cluster.slot(id).is_some());
    }

    fn load_report(&mut self) {
        let Some(id) = self.instance() else { return };
        let rng = &mut self.rng;
        let mut maybe = |max: u64| if rng.below(2) == 0 { None } else { Some(rng.below(max)) };
        let report = LoadReport {
            running: maybe(3).map(|n| n as u32),
            waiting: maybe(3).map(|n| n as u32),
            waiting_uncached_tokens: maybe(u64::MAX),
            kv_tokens: maybe(500_000),
            kv_tokens_max: maybe(500_000),
            counters: maybe(1_000_000).map(|n| PrefillCounters { uncached_tokens: n, busy_us: n }),
            step: maybe(1_000_000_000).map(Duration::from_nanos),
        };
        let now = self.time();
        assert!(self.scheduler.load_report(now, id, &report));
    }

    fn reschedule(&mut self) {
        while let Some(orphan) = self.scheduler.next_orphan() {
            assert!(self.live.contains(&orphan.reservation));
            self.orphans.push(orphan.reservation);
        }
        if self.orphans.is_empty() {
            return;
        }
        let id = self.orphans[self.rng.index(self.orphans.len())];
        if let Ok(decision) = self.with_ask(|scheduler, now, ask| scheduler.reschedule(now, id, ask)) {
            self.orphans.retain(|&other| other != id);
            self.live.retain(|&other| other != id);
            self.gone.push(id);
            self.live.push(decision.reservation);
        }
    }

    fn stale(&mut self) {
        let Some(&id) = (!self.gone.is_empty()).then(|| &self.gone[self.rng.index(self.gone.len())]) else {
            return;
        };
        let now = self.time();
        assert_eq!(self.scheduler.prefill_done(now, id), Err(Stale));
        assert_eq!(self.scheduler.done(now, id, 1), Err(Stale));
        let drawn = ReservationId::from_u64(self.rng.next() | 1 << 40);
        assert_eq!(self.scheduler.release(now, drawn), Err(Stale));
        let refused = self.with_ask(|scheduler, now, ask| scheduler.reschedule(now, id, ask));
        assert_eq!(refused.map_err(|refusal| refusal.reason), Err(Reason::Stale));
    }

    fn expire(&mut self) {
        self.now += self.rng.below(20_000_000_000);
        let now = self.time();
        let expired = self.scheduler.expire(now, 3);
        if expired > 0 {
            // Which ones is theirs to know: those that are not known any more.
            let book = &self.scheduler.cluster.book;
            let (live, gone): (Vec<_>, Vec<_>) = self.live.iter().partition(|&&id| book.find(id).is_some());
            assert_eq!(gone.len(), expired as usize);
            self.orphans.retain(|id| live.contains(id));
            self.live = live;
            self.gone.extend(gone);
            self.ended += u64::from(expired);
        }
    }

    fn step(&mut self) {
        self.now += self.rng.below(500_000_000);
        match self.rng.below(20) {
            0..=5 => self.decide(),
            6..=13 => self.report(),
            14 => self.change_instances(),
            15 => self.load_report(),
            16 => self.reschedule(),
            17 => self.stale(),
            18 => drop(self.scheduler.next_replicate()),
            _ => self.expire(),
        }
        self.forget_vacated();
        assert_eq!(self.scheduler.reservations() as usize, self.live.len());
        assert_eq!(self.begun, self.ended + self.live.len() as u64);
        let counters = self.scheduler.counters();
        assert_eq!(counters.decided - counters.rescheduled, self.begun);
        assert_eq!(counters.done + counters.released + counters.expired, self.ended);
        self.scheduler.assert_consistent();
    }
}

#[test]
fn random_calls_keep_the_books_balanced() {
    on_all_cores(0..1_000, |seed| {
        let mut play = Play::new(seed);
        for _ in 0..400 {
            play.step();
        }
        let now = play.time();
        for id in core::mem::take(&mut play.live) {
            assert_eq!(play.scheduler.release(now, id), Ok(()), "seed {seed}");
        }
        assert!(play.scheduler.is_balanced(), "seed {seed}");
    });
}
