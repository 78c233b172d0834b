//! What the threads of a Conductor share: what it knows, names, and the scheduler.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use conductor_core::InstanceId;
use conductor_core::cost::PrefillCounters;
use conductor_core::events::LoadStat;
use conductor_core::index::IndexLimits;
use conductor_core::knowledge::{self, Knowledge, PublisherId};
use conductor_core::scheduler::{
    Decision, KindId, Limits, LoadReport, PolicyKind, ReplicationConfig, ReservationId, Role, Scheduler,
    SchedulerConfig,
};
use te_core::Instant;

use crate::config::Config;
use crate::directory::Directory;
use crate::hot::Hot;
use crate::kinds::Kinds;
use crate::proxy;
use crate::replicas::Replicas;
use crate::traffic::Traffic;
use crate::turns::Turns;

/// Most instances; the scheduler's memory is allocated for them.
const INSTANCES_MAX: u32 = 4_096;
/// Tokens over which the time of a decode step is averaged.
const STEPS_SEEN: u32 = 8;
/// Pairs of predicted and actual times to the first token that the status page shows.
const TTFTS_SHOWN: usize = 256;

/// What the threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    started: std::time::Instant,
    /// The event thread writes; queries read.
    pub(crate) knowledge: Turns<Knowledge>,
    directory: RwLock<Directory>,
    schedule: Mutex<Schedule>,
    pub(crate) counts: Counts,
    hot: Mutex<Hot>,
    /// Instances that did not answer, and when requests are placed on them again.
    suspects: Mutex<Vec<(Instant, InstanceId)>>,
    /// What the proxy counts.
    pub(crate) proxy: Arc<proxy::Counters>,
    pub(crate) traffic: Traffic,
    pub(crate) replicas: Replicas,
}

/// Counts of requests.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Queries by tokens or hashes.
    pub(crate) queries: AtomicU64,
    /// Tokens of their prompts, in full blocks.
    pub(crate) tokens: AtomicU64,
    /// Of them, tokens that some instance has.
    pub(crate) hit_tokens: AtomicU64,
    /// Prompts that were placed without knowing their length.
    pub(crate) unknown_prompts: AtomicU64,
    /// Requests whose body was refused.
    pub(crate) bad_requests: AtomicU64,
    /// Requests with a wrong secret, or from another host without one.
    pub(crate) forbidden: AtomicU64,
    /// Comparisons with the other Conductor.
    pub(crate) peer_rounds: AtomicU64,
    /// Comparisons that failed.
    pub(crate) peer_failures: AtomicU64,
    /// Owners that differed from those of the other Conductor.
    pub(crate) peer_differences: AtomicU64,
    /// Publishers of which what the other Conductor knew was taken over.
    pub(crate) peer_adoptions: AtomicU64,
    /// Times that it was not taken over.
    pub(crate) peer_refusals: AtomicU64,
    /// Snapshots written.
    pub(crate) snapshots: AtomicU64,
    /// Snapshots that could not be written.
    pub(crate) snapshot_failures: AtomicU64,
}

impl Counts {
    /// Adds to a count.
    pub(crate) fn add(count: &AtomicU64, more: u64) {
        count.fetch_add(more, Ordering::Relaxed);
    }
}

/// The scheduler, and what is kept beside it.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) scheduler: Scheduler,
    pub(crate) kinds: Kinds,
    /// Reservations without a first token, and what was predicted for them.
    predicted: HashMap<u64, Predicted>,
    /// Latest pairs of predicted and actual time to the first token.
    pub(crate) ttfts: VecDeque<(Duration, Duration)>,
    /// Output of reservations, which is reported by differences.
    outputs: HashMap<u64, Output>,
}

/// What a reservation's request has given so far.
#[derive(Clone, Copy, Debug)]
struct Output {
    tokens: u32,
    decode: InstanceId,
    /// When it had given how many tokens: steps are counted from there.
    since: (Instant, u32),
}

#[derive(Clone, Copy, Debug)]
struct Predicted {
    at: Instant,
    ttft: Duration,
}

impl Schedule {
    fn new(config: &Config) -> Self {
        let policy = config.schedule.policy.name().parse::<PolicyKind>().unwrap_or(PolicyKind::Cost);
        let with_proxy = config.proxy_listen.is_some();
        let scheduler = Scheduler::new(SchedulerConfig {
            limits: Limits {
                instances: INSTANCES_MAX.min(config.limits.publishers_max),
                reservations: config.limits.reservations_max,
                models: config.limits.contexts_max,
                tokens_max: config.limits.tokens_max,
                ..Limits::default()
            },
            policy,
            fetches: config.schedule.fetch && !with_proxy,
            // What the network gives is not known, but seen in the times to the first token.
            ships: false,
            reports_of_proxy: true,
            replication: Some(ReplicationConfig {
                wait_min: Duration::from_millis(config.store.hot_ms.into()),
                ..ReplicationConfig::default()
            }),
            reservation_ttl: Duration::from_millis(config.schedule.reservation_ms_max.into()),
            ..SchedulerConfig::default()
        });
        Self {
            scheduler,
            kinds: Kinds::new(config.limits.contexts_max),
            predicted: HashMap::new(),
            ttfts: VecDeque::with_capacity(TTFTS_SHOWN),
            outputs: HashMap::new(),
        }
    }

    /// An engine comes: the numbers of its model and of its kind.
    pub(crate) fn join(&mut self, of: (&str, &str), role: Role, class: &str) -> (u32, KindId) {
        self.kinds.join(&mut self.scheduler, of, role, class)
    }

    /// A decision was made.
    pub(crate) fn decided(&mut self, now: Instant, decision: &Decision) {
        let (id, ttft) = (decision.reservation, decision.ttft);
        self.predicted.insert(id.to_u64(), Predicted { at: now, ttft });
        self.outputs.insert(id.to_u64(), Output { tokens: 0, decode: decision.decode, since: (now, 0) });
        // Reservations end by themselves, without a report; their numbers are never used again.
        if self.predicted.len() as u64 > 2 * u64::from(self.scheduler.reservations()) + 1_024 {
            self.predicted.retain(|_, predicted| now - predicted.at < Duration::from_secs(600));
        }
    }

    /// The first token of a request was seen.
    pub(crate) fn first_token(&mut self, now: Instant, id: ReservationId) {
        if let Some(Predicted { at, ttft }) = self.predicted.remove(&id.to_u64()) {
            if self.ttfts.len() >= TTFTS_SHOWN {
                self.ttfts.pop_front();
            }
            self.ttfts.push_back((ttft, now - at));
        }
    }

    /// More output tokens of a request were seen. Returns how many there are in all.
    pub(crate) fn more_output(&mut self, now: Instant, id: ReservationId, more: u32) -> u32 {
        if self.outputs.len() > 4 * self.scheduler.reservations() as usize + 1_024 {
            // Those of reservations that ended without a report.
            self.outputs.retain(|_, output| now - output.since.0 < Duration::from_secs(600));
        }
        let Some(output) = self.outputs.get_mut(&id.to_u64()) else { return more };
        output.tokens = output.tokens.saturating_add(more);
        let (at, tokens) = output.since;
        let steps = output.tokens - tokens;
        if tokens == 0 {
            output.since = (now, output.tokens);
        } else if steps >= STEPS_SEEN {
            output.since = (now, output.tokens);
            self.scheduler.step_seen(now, output.decode, (now - at) / steps);
        }
        output.tokens
    }

    /// A request has ended. Returns its output tokens.
    pub(crate) fn ended(&mut self, id: ReservationId) -> u32 {
        self.predicted.remove(&id.to_u64());
        self.outputs.remove(&id.to_u64()).map_or(0, |output| output.tokens)
    }
}

/// Limits of what is known.
pub(crate) fn knowledge_settings(config: &Config) -> knowledge::Settings {
    let limits = &config.limits;
    knowledge::Settings {
        seed: config.seed,
        publishers_max: limits.publishers_max as usize,
        contexts_max: limits.contexts_max as usize,
        context_idle: match limits.context_idle_s {
            0 => Duration::MAX,
            seconds => Duration::from_secs(seconds.into()),
        },
        learned_max: 2 * limits.blocks_max as usize,
        index: IndexLimits { blocks_max: limits.blocks_max as usize, ..IndexLimits::default() },
        ..knowledge::Settings::default()
    }
}

impl Shared {
    pub(crate) fn new(config: Config) -> Self {
        let knowledge = Knowledge::new(knowledge_settings(&config));
        Self::with(config, knowledge)
    }

    /// With what a snapshot had.
    pub(crate) fn with(config: Config, knowledge: Knowledge) -> Self {
        Self {
            started: std::time::Instant::now(),
            knowledge: Turns::new(knowledge),
            directory: RwLock::default(),
            schedule: Mutex::new(Schedule::new(&config)),
            counts: Counts::default(),
            hot: Mutex::default(),
            suspects: Mutex::default(),
            proxy: Arc::default(),
            traffic: Traffic::default(),
            replicas: Replicas::new(&config),
            config,
        }
    }

    /// The time since the start.
    pub(crate) fn now(&self) -> Instant {
        Instant::ZERO + self.started.elapsed()
    }

    /// The names. A thread that panicked is no reason to stop.
    pub(crate) fn directory(&self) -> RwLockReadGuard<'_, Directory> {
        self.directory.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn directory_mut(&self) -> RwLockWriteGuard<'_, Directory> {
        self.directory.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prefixes that are asked for often.
    pub(crate) fn hot(&self) -> MutexGuard<'_, Hot> {
        self.hot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A publisher's blocks are part of answers from now on, or not any more. An instance of which nothing is
    /// heard gets no requests.
    pub(crate) fn serve(&self, id: PublisherId, served: bool) {
        let mut directory = self.directory_mut();
        let Some(publisher) = directory.publishers.get_mut(&id) else { return };
        publisher.served = served;
        let instance = publisher.instance;
        let heard = directory.is_heard(instance);
        drop(directory);
        self.set_up(instance, heard);
    }

    /// Whether requests are placed on an instance.
    pub(crate) fn set_up(&self, instance: InstanceId, up: bool) {
        let mut schedule = self.schedule();
        match up {
            true => schedule.scheduler.instance_back(instance),
            false => schedule.scheduler.instance_lost(self.now(), instance),
        };
    }

    /// Requests are placed on an instance again from then on, if it is heard.
    pub(crate) fn look_again(&self, instance: InstanceId, at: Instant) {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        suspects.retain(|(_, suspect)| *suspect != instance);
        suspects.push((at, instance));
    }

    /// Instances on which nothing is placed for a while.
    pub(crate) fn suspects(&self) -> Vec<InstanceId> {
        let suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        suspects.iter().map(|(_, instance)| *instance).collect()
    }

    fn end_suspicions(&self, now: Instant) {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        let ended: Vec<_> = suspects.extract_if(.., |(at, _)| *at <= now).collect();
        drop(suspects);
        for (_, instance) in ended {
            let heard = self.directory().is_heard(instance);
            self.set_up(instance, heard);
        }
    }

    /// A publisher reported its load.
    pub(crate) fn report_load(&self, id: PublisherId, stat: &LoadStat) {
        let directory = self.directory();
        let Some(publisher) = directory.publishers.get(&id) else { return };
        let instance = publisher.instance;
        drop(directory);
        let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let report = LoadReport {
            running: Some(number(stat.running_requests)),
            waiting: Some(number(stat.waiting_requests)),
            waiting_uncached_tokens: Some(stat.waiting_uncached_tokens),
            kv_tokens: Some(stat.used_tokens),
            kv_tokens_max: (stat.capacity_tokens > 0).then_some(stat.capacity_tokens),
            counters: (stat.prefill_busy_us > 0).then_some(PrefillCounters {
                uncached_tokens: stat.prefilled_tokens,
                busy_us: stat.prefill_busy_us,
            }),
            step: None,
        };
        self.schedule().scheduler.load_report(self.now(), instance, &report);
    }

    /// Cleans up what was fenced, assumed for too long or not reported for too long: at most `budget`
    /// entries. Returns when to come again, if there may be something to do.
    pub(crate) fn keep_house(&self, now: Instant, budget: usize) -> Option<Instant> {
        const AGAIN_WHILE_DIRTY: Duration = Duration::from_millis(20);
        const AGAIN: Duration = Duration::from_secs(1);
        self.end_suspicions(now);
        let swept = self.knowledge.write().tick(now, budget);
        self.schedule().scheduler.expire(now, 1_024);
        Some(now + if swept > 0 { AGAIN_WHILE_DIRTY } else { AGAIN })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use conductor_core::InstanceMatch;
    use conductor_core::cost::{DecodeCost, PrefillCost, PrefillWork};
    use conductor_core::scheduler::{Ask, InstanceSpec, Slo};
    use te_core::testkit::Rng;

    const PREFILLS: u32 = 3;
    /// About 200 times as fast as what the Conductor begins with, and of another shape.
    const PREFILL: PrefillCost =
        PrefillCost { per_prompt: 1e-3, per_token: 7e-7, per_square: 2e-12, per_reused: 2e-8 };
    const DECODE: DecodeCost = DecodeCost { per_step: 2e-4, per_sequence: 2e-5, per_context_token: 1e-10 };

    /// A factor around 1 with a standard deviation of 10 %.
    fn noise(rng: &mut Rng) -> f64 {
        let sum: f64 = (0..4).map(|_| rng.below(1_000_001) as f64 / 1e6 - 0.5).sum();
        1.0 + 0.1 * sum * 3.0_f64.sqrt()
    }

    #[derive(Clone, Copy)]
    enum Report {
        Prefilled,
        FirstToken,
        Tokens(u32),
        Done,
    }

    /// 3 prefill and 2 decode engines in simulated time, as a proxy reports them. Returns the median errors
    /// of the times to the first token, of so many requests at a time.
    // Long because: one loop of a simulation, whose steps share all of its state.
    fn errors(seed: u64, config: &Config, requests: u64) -> Vec<f64> {
        let (mut rng, mut schedule) = (Rng::new(seed), Schedule::new(config));
        for number in 0..5 {
            let role = if number < PREFILLS { Role::Prefill } else { Role::Decode };
            let (model, kind) = schedule.join(("default", "m"), role, "");
            let spec = InstanceSpec::new(InstanceId(number), role, kind);
            schedule.scheduler.add_instance(InstanceSpec { model, ..spec }).unwrap();
        }
        let model = schedule.kinds.model("default", "m").unwrap();
        let (mut free, mut medians) = ([Instant::ZERO; PREFILLS as usize], Vec::new());
        let mut reports: std::collections::BTreeMap<(Instant, u64, u8), (ReservationId, Report)> =
            std::collections::BTreeMap::new();
        let mut now = Instant::ZERO;
        for request in 0..requests {
            now = now + Duration::from_nanos(rng.below(3_000_000));
            while let Some(entry) = reports.first_entry().filter(|entry| entry.key().0 <= now) {
                let ((at, ..), (id, report)) = entry.remove_entry();
                match report {
                    Report::Prefilled => schedule.scheduler.prefill_done(at, id).unwrap(),
                    Report::FirstToken => {
                        schedule.first_token(at, id);
                        schedule.scheduler.first_token(at, id).unwrap();
                    }
                    Report::Tokens(more) => {
                        let output = schedule.more_output(at, id, more);
                        schedule.scheduler.output_tokens(at, id, output).unwrap();
                    }
                    Report::Done => {
                        let output = schedule.ended(id);
                        schedule.scheduler.done(at, id, output).unwrap();
                    }
                }
            }
            let tokens = 500 + rng.below(8_000) as u32;
            let has = rng.below(u64::from(tokens) / 16) as u32;
            let matched = |number| InstanceMatch {
                instance: InstanceId(number),
                gpu: has,
                cpu: has,
                disk: has,
                ..InstanceMatch::default()
            };
            let matches = [matched(rng.below(u64::from(PREFILLS)) as u32)];
            let ask = Ask {
                model,
                tokens,
                block_tokens: 16,
                matches: &matches,
                store_blocks: 0,
                keys: &[],
                expected_output: Some(16),
                slo: Slo::NONE,
            };
            let decision = schedule.scheduler.decide(now, &ask).unwrap();
            schedule.decided(now, &decision);
            let work = PrefillWork::of(tokens, decision.reuse_blocks * 16);
            let takes = Duration::from_secs_f64(PREFILL.seconds(&work) * noise(&mut rng));
            let free = &mut free[decision.prefill.0 as usize];
            let prefilled = (*free).max(now) + takes;
            *free = prefilled;
            // The transfer to the decode engine.
            let first =
                prefilled + Duration::from_secs_f64((3e-4 + 2e-8 * f64::from(tokens)) * noise(&mut rng));
            let step = DECODE.time(4, 16_000);
            let id = decision.reservation;
            reports.insert((prefilled, request, 0), (id, Report::Prefilled));
            reports.insert((first, request, 1), (id, Report::FirstToken));
            reports.insert((first, request, 2), (id, Report::Tokens(1)));
            reports.insert((first + step * 10, request, 3), (id, Report::Tokens(10)));
            reports.insert((first + step * 15, request, 4), (id, Report::Done));
            if request % 250 == 249 {
                let relative = |(predicted, actual): &(Duration, Duration)| {
                    (predicted.as_secs_f64() - actual.as_secs_f64()).abs() / actual.as_secs_f64()
                };
                let mut errors: Vec<f64> = schedule.ttfts.iter().rev().take(200).map(relative).collect();
                errors.sort_by(f64::total_cmp);
                medians.push(errors[errors.len() / 2]);
            }
        }
        medians
    }

    #[test]
    fn first_tokens_of_engines_of_unknown_speed_are_predicted_within_ten_percent_after_500_requests() {
        let config = Config { proxy_listen: Some(([127, 0, 0, 1], 0).into()), ..Config::default() };
        for seed in 0..10 {
            let medians = errors(seed, &config, 1_000);
            println!("seed {seed}: simulated median errors {medians:.3?}");
            assert!(medians[2..].iter().all(|&error| error <= 0.1), "seed {seed}: {medians:?}");
        }
    }

    #[test]
    fn a_prompt_of_unknown_length_is_placed_and_counted() {
        let shared = Shared::new(Config::default());
        assert_eq!(shared.prompt_tokens(&[]), 1_024);
        assert_eq!(shared.prompt_tokens(&[1; 7]), 7);
        assert_eq!(shared.counts.unknown_prompts.load(Ordering::Relaxed), 1);
        let small = config_with_tokens_max(5);
        assert_eq!(Shared::new(small).prompt_tokens(&[1; 7]), 5);
    }

    fn config_with_tokens_max(tokens_max: u32) -> Config {
        let limits = crate::config::LimitsConfig { tokens_max, ..Default::default() };
        Config { limits, ..Config::default() }
    }
}
