//! A simulated cluster: prefill in order of placement, NICs that send one transfer after the other, decode in
//! steps of the whole batch. Its truth is never shown to the scheduler, but for the reports that engines
//! give.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use conductor_core::cost::{CostModel, PrefillWork};
use conductor_core::scheduler::{
    Ask, Decision, InstanceSpec, PolicyKind, Refusal, Role, Scheduler, SchedulerConfig, Slo, Source,
};
use conductor_core::{BlockKey, InstanceId, InstanceMatch};
use te_core::Instant;
use te_core::testkit::Rng;

pub(crate) const BLOCK_TOKENS: u32 = 512;

/// What is simulated.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) prefills: u32,
    pub(crate) decodes: u32,
    pub(crate) requests: usize,
    /// Requests per second.
    pub(crate) rate: f64,
    /// Prefixes that requests share, and their blocks.
    pub(crate) prefixes: u64,
    pub(crate) prefix_blocks: u32,
    /// Prefixes that an instance keeps.
    pub(crate) kept: usize,
    /// Tokens after the prefix, and tokens of output, on average.
    pub(crate) suffix: u32,
    pub(crate) output: u32,
    pub(crate) bytes_per_s: u64,
    /// KV goes to decode instances over the same NICs.
    pub(crate) ships: bool,
    pub(crate) slo: Slo,
    /// The truth of the engines, and what the scheduler believes at the beginning.
    pub(crate) truth: CostModel,
    pub(crate) prior: CostModel,
    /// Times of engines differ by up to this part.
    pub(crate) noise: f64,
    pub(crate) config: SchedulerConfig,
}

impl Setup {
    /// Eight prefill and eight decode instances, about three quarters busy.
    pub(crate) fn new(policy: PolicyKind) -> Self {
        Self {
            seed: 1,
            prefills: 8,
            decodes: 8,
            requests: 3_000,
            rate: 6.0,
            prefixes: 120,
            prefix_blocks: 24,
            kept: 30,
            suffix: 5_000,
            output: 150,
            bytes_per_s: 87_000_000_000,
            ships: false,
            slo: Slo::NONE,
            truth: CostModel::LLAMA3_70B_A800,
            prior: CostModel::LLAMA3_70B_A800,
            noise: 0.0,
            config: SchedulerConfig { policy, admission: false, ..SchedulerConfig::default() },
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Seconds to the first token, by request; refused ones are missing.
    pub(crate) ttft: Vec<f64>,
    /// Per request, seconds per token: the mean of its longest tenth of gaps.
    pub(crate) tbt: Vec<f64>,
    /// Seconds at which requests were refused, and accepted.
    pub(crate) refused: Vec<f64>,
    pub(crate) accepted: Vec<f64>,
    /// Predicted seconds to the first token, in the order of `ttft`.
    pub(crate) predicted: Vec<f64>,
    pub(crate) replicates: u64,
}

impl Outcome {
    pub(crate) fn mean_ttft(&self) -> f64 {
        self.ttft.iter().sum::<f64>() / self.ttft.len() as f64
    }

    /// The part of the accepted requests that had their first token in time.
    pub(crate) fn in_time(&self, limit: f64) -> f64 {
        self.ttft.iter().filter(|&&ttft| ttft <= limit).count() as f64 / self.ttft.len() as f64
    }

    /// The quantile of the relative errors of the predictions, after the first `skip` requests.
    pub(crate) fn prediction_error(&self, q: f64, skip: usize) -> f64 {
        let pairs = self.ttft.iter().zip(&self.predicted).skip(skip);
        let mut errors: Vec<f64> = pairs.map(|(ttft, predicted)| (ttft - predicted).abs() / ttft).collect();
        errors.sort_by(f64::total_cmp);
        errors[((errors.len() - 1) as f64 * q) as usize]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(usize),
    FetchDone(usize),
    PrefillDone(usize),
    ShipDone(usize),
    Step(usize),
}

#[derive(Debug)]
struct Request {
    arrival: u64,
    prefix: u64,
    tokens: u32,
    output: u32,
    decision: Option<Decision>,
    fetched: bool,
    shipped: bool,
    prefilled: bool,
    produced: u32,
    gaps: Vec<f64>,
}

#[derive(Debug, Default)]
struct Engine {
    queue: VecDeque<usize>,
    busy: bool,
    /// Prefixes, the least recent first.
    kept: VecDeque<u64>,
    egress: u64,
    ingress: u64,
    batch: Vec<usize>,
    joining: Vec<usize>,
    stepping: bool,
}

#[derive(Debug)]
struct World {
    setup: Setup,
    rng: Rng,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    scheduler: Scheduler,
    requests: Vec<Request>,
    /// Prefill instances, then decode instances; the index is the name.
    engines: Vec<Engine>,
    outcome: Outcome,
    matches: Vec<InstanceMatch>,
}

/// Uniform in `0..1`.
fn uniform(rng: &mut Rng) -> f64 {
    rng.below(1 << 53) as f64 / (1_u64 << 53) as f64
}

fn exponential(rng: &mut Rng, mean: f64) -> f64 {
    -mean * (1.0 - uniform(rng)).ln()
}

/// Runs to the end.
pub(crate) fn run(setup: Setup) -> (Outcome, Scheduler) {
    let mut world = World::new(setup);
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        world.now = at;
        world.handle(event);
    }
    assert_eq!(world.scheduler.reservations(), 0);
    (world.outcome, world.scheduler)
}

impl World {
    fn new(setup: Setup) -> Self {
        let mut rng = Rng::new(setup.seed);
        let mut config = setup.config.clone();
        config.bandwidth_bytes_per_s = setup.bytes_per_s;
        config.ships = setup.ships;
        let mut scheduler = Scheduler::new(config);
        let kind = scheduler.add_kind(setup.prior);
        for i in 0..setup.prefills + setup.decodes {
            let role = if i < setup.prefills { Role::Prefill } else { Role::Decode };
            scheduler.add_instance(InstanceSpec::new(InstanceId(i), role, kind)).expect("a free name");
        }
        let mut at = 0.0;
        let mut requests = Vec::new();
        for _ in 0..setup.requests {
            at += exponential(&mut rng, 1.0 / setup.rate);
            // Popular prefixes: the square of a uniform number.
            let u = uniform(&mut rng);
            requests.push(Request {
                arrival: (at * 1e9) as u64,
                prefix: (u * u * setup.prefixes as f64) as u64,
                tokens: setup.prefix_blocks * BLOCK_TOKENS
                    + 1
                    + exponential(&mut rng, f64::from(setup.suffix)) as u32,
                output: 1 + exponential(&mut rng, f64::from(setup.output)) as u32,
                decision: None,
                fetched: true,
                shipped: false,
                prefilled: false,
                produced: 0,
                gaps: Vec::new(),
            });
        }
        let engines = (0..setup.prefills + setup.decodes).map(|_| Engine::default()).collect();
        let mut world = Self {
            rng,
            now: 0,
            events: BinaryHeap::new(),
            count: 0,
            scheduler,
            requests,
            engines,
            outcome: Outcome::default(),
            matches: Vec::new(),
            setup,
        };
        for i in 0..world.requests.len() {
            world.after_at(world.requests[i].arrival, Event::Arrival(i));
        }
        world
    }

    fn time(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn after_at(&mut self, at: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((at, self.count, event)));
    }

    fn noisy(&mut self, seconds: f64) -> u64 {
        let factor = 1.0 + self.setup.noise * (2.0 * uniform(&mut self.rng) - 1.0);
        (seconds * factor * 1e9) as u64
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(i) => self.arrival(i),
            Event::FetchDone(i) => {
                self.requests[i].fetched = true;
                self.start_prefill(self.prefill_of(i));
            }
            Event::PrefillDone(i) => self.prefill_done(i),
            Event::ShipDone(i) => {
                self.requests[i].shipped = true;
                self.arrive(i);
            }
            Event::Step(d) => self.step(d),
        }
    }

    fn prefill_of(&self, i: usize) -> usize {
        self.requests[i].decision.as_ref().map_or(0, |decision| decision.prefill.0 as usize)
    }

    fn arrival(&mut self, i: usize) {
        let request = &self.requests[i];
        let (tokens, prefix) = (request.tokens, request.prefix);
        self.matches.clear();
        let blocks = self.setup.prefix_blocks;
        for (id, engine) in self.engines.iter().enumerate().take(self.setup.prefills as usize) {
            if engine.kept.contains(&prefix) {
                let instance = InstanceId(id as u32);
                self.matches.push(InstanceMatch { instance, dp_rank: 0, gpu: 0, cpu: blocks, disk: blocks });
            }
        }
        let keys: Vec<_> = (0..blocks).map(|block| BlockKey(prefix << 32 | u64::from(block))).collect();
        let ask = Ask {
            model: 0,
            tokens,
            block_tokens: BLOCK_TOKENS,
            matches: &self.matches,
            store_blocks: 0,
            keys: &keys,
            expected_output: None,
            slo: self.setup.slo,
        };
        let seconds = self.now as f64 / 1e9;
        match self.scheduler.decide(Instant::from_nanos(self.now), &ask) {
            Ok(decision) => self.accept(i, decision),
            Err(Refusal { .. }) => self.outcome.refused.push(seconds),
        }
        while self.scheduler.next_replicate().is_some() {
            self.outcome.replicates += 1;
        }
    }

    fn accept(&mut self, i: usize, decision: Decision) {
        self.outcome.accepted.push(self.now as f64 / 1e9);
        self.requests[i].decision = Some(decision);
        let to = decision.prefill.0 as usize;
        self.keep(to, self.requests[i].prefix);
        if let Some(fetch) = decision.fetch {
            let Source::Instance(from) = fetch.from else { panic!("there is no store here") };
            self.requests[i].fetched = false;
            let end = self.transfer(from.0 as usize, to, fetch.blocks * BLOCK_TOKENS);
            self.after_at(end, Event::FetchDone(i));
        }
        self.engines[to].queue.push_back(i);
        self.start_prefill(to);
    }

    fn keep(&mut self, engine: usize, prefix: u64) {
        let kept = &mut self.engines[engine].kept;
        kept.retain(|&other| other != prefix);
        kept.push_back(prefix);
        if kept.len() > self.setup.kept {
            kept.pop_front();
        }
    }

    /// Asks for a transfer now; returns when it ends.
    fn transfer(&mut self, from: usize, to: usize, tokens: u32) -> u64 {
        let bytes = f64::from(tokens) * self.setup.truth.kv_bytes_per_token as f64;
        let span = (bytes * 1e9 / self.setup.bytes_per_s as f64) as u64;
        let sent = self.now.max(self.engines[from].egress);
        let end = sent.max(self.engines[to].ingress) + span;
        self.engines[from].egress = sent + span;
        self.engines[to].ingress = end;
        end
    }

    fn start_prefill(&mut self, p: usize) {
        let engine = &self.engines[p];
        let Some(&i) = engine.queue.front().filter(|&&i| !engine.busy && self.requests[i].fetched) else {
            return;
        };
        self.engines[p].busy = true;
        let decision = self.requests[i].decision.expect("it was placed");
        let now = self.time();
        self.scheduler.prefill_started(now, decision.reservation).expect("in progress");
        let work = PrefillWork::of(self.requests[i].tokens, decision.reuse_blocks * BLOCK_TOKENS);
        let end = self.now + self.noisy(self.setup.truth.prefill.seconds(&work));
        self.after_at(end, Event::PrefillDone(i));
        if self.setup.ships && self.setup.config.layerwise {
            self.ship(i, decision);
        }
    }

    fn ship(&mut self, i: usize, decision: Decision) {
        let (from, to) = (decision.prefill.0 as usize, decision.decode.0 as usize);
        let end = self.transfer(from, to, self.requests[i].tokens);
        self.after_at(end, Event::ShipDone(i));
    }

    fn prefill_done(&mut self, i: usize) {
        let decision = self.requests[i].decision.expect("it was placed");
        let now = self.time();
        self.scheduler.prefill_done(now, decision.reservation).expect("in progress");
        let p = decision.prefill.0 as usize;
        self.engines[p].busy = false;
        self.engines[p].queue.pop_front();
        self.requests[i].prefilled = true;
        if !self.setup.ships {
            self.requests[i].shipped = true;
        } else if !self.setup.config.layerwise {
            self.ship(i, decision);
        }
        self.arrive(i);
        self.start_prefill(p);
    }

    /// The request begins to decode once its prefill and its transfer have ended.
    fn arrive(&mut self, i: usize) {
        if !self.requests[i].prefilled || !self.requests[i].shipped {
            return;
        }
        let decision = self.requests[i].decision.expect("it was placed");
        let now = self.time();
        self.scheduler.first_token(now, decision.reservation).expect("in progress");
        self.outcome.ttft.push((self.now - self.requests[i].arrival) as f64 / 1e9);
        self.outcome.predicted.push(decision.ttft.as_secs_f64());
        let d = decision.decode.0 as usize;
        self.engines[d].joining.push(i);
        if !self.engines[d].stepping {
            self.begin_step(d);
        }
    }

    fn begin_step(&mut self, d: usize) {
        let engine = &mut self.engines[d];
        engine.batch.append(&mut engine.joining);
        engine.stepping = !engine.batch.is_empty();
        if !engine.stepping {
            return;
        }
        let context: u32 =
            engine.batch.iter().map(|&i| self.requests[i].tokens + self.requests[i].produced).sum();
        let step = self.setup.truth.decode.seconds(engine.batch.len() as f64, f64::from(context));
        engine.batch.iter().for_each(|&i| self.requests[i].gaps.push(step));
        let end = self.now + self.noisy(step);
        self.after_at(end, Event::Step(d));
    }

    fn step(&mut self, d: usize) {
        let now = self.time();
        let batch = std::mem::take(&mut self.engines[d].batch);
        for i in batch {
            let request = &mut self.requests[i];
            request.produced += 1;
            let id = request.decision.expect("it was placed").reservation;
            if request.produced < request.output {
                if request.produced.is_multiple_of(32) {
                    self.scheduler.output_tokens(now, id, request.produced).expect("in progress");
                }
                self.engines[d].batch.push(i);
                continue;
            }
            self.scheduler.done(now, id, request.produced).expect("in progress");
            request.gaps.sort_by(f64::total_cmp);
            let longest = &request.gaps[request.gaps.len() - request.gaps.len().div_ceil(10)..];
            self.outcome.tbt.push(longest.iter().sum::<f64>() / longest.len() as f64);
            request.gaps = Vec::new();
        }
        self.begin_step(d);
    }
}

/// The largest autocorrelation of the numbers of events per `bin` seconds, over lags of one to `lags` bins.
pub(crate) fn autocorrelation(at: &[f64], from: f64, to: f64, bin: f64, lags: usize) -> f64 {
    let bins = ((to - from) / bin) as usize;
    let mut counts = vec![0.0; bins];
    for &at in at.iter().filter(|&&at| at >= from) {
        if let Some(count) = counts.get_mut(((at - from) / bin) as usize) {
            *count += 1.0;
        }
    }
    let mean = counts.iter().sum::<f64>() / bins as f64;
    let variance: f64 = counts.iter().map(|count| (count - mean) * (count - mean)).sum();
    let at_lag = |lag: usize| {
        let sum: f64 = counts.iter().zip(&counts[lag..]).map(|(a, b)| (a - mean) * (b - mean)).sum();
        sum / variance
    };
    (1..=lags).map(at_lag).fold(f64::MIN, f64::max)
}
