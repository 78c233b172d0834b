//! What the threads of a Conductor share: what it knows, names, and the scheduler.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use conductor_core::InstanceId;
use conductor_core::cost::{CostModel, PrefillCounters};
use conductor_core::events::LoadStat;
use conductor_core::index::IndexLimits;
use conductor_core::knowledge::{self, Knowledge, PublisherId};
use conductor_core::scheduler::{
    KindId, Limits, LoadReport, PolicyKind, ReservationId, Scheduler, SchedulerConfig,
};
use te_core::Instant;

use crate::config::Config;
use crate::directory::Directory;
use crate::hot::Hot;
use crate::turns::Turns;

/// Most instances; the scheduler's memory is allocated for them.
const INSTANCES_MAX: u32 = 4_096;
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
    /// The one kind of engine: its costs are fitted to what engines report.
    pub(crate) kind: KindId,
    models: HashMap<(String, String), u32>,
    /// Reservations without a first token, and what was predicted for them.
    predicted: HashMap<u64, Predicted>,
    /// Latest pairs of predicted and actual time to the first token.
    pub(crate) ttfts: VecDeque<(Duration, Duration)>,
    /// Output tokens of reservations that were reported by differences.
    outputs: HashMap<u64, u32>,
}

#[derive(Clone, Copy, Debug)]
struct Predicted {
    at: Instant,
    ttft: Duration,
}

impl Schedule {
    fn new(config: &Config) -> Self {
        let policy = config.schedule.policy.name().parse::<PolicyKind>().unwrap_or(PolicyKind::Cost);
        let mut scheduler = Scheduler::new(SchedulerConfig {
            limits: Limits {
                instances: INSTANCES_MAX.min(config.limits.publishers_max),
                reservations: config.limits.reservations_max,
                models: config.limits.contexts_max,
                ..Limits::default()
            },
            policy,
            reservation_ttl: Duration::from_millis(config.schedule.reservation_ms_max.into()),
            ..SchedulerConfig::default()
        });
        let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
        Self {
            scheduler,
            kind,
            models: HashMap::new(),
            predicted: HashMap::new(),
            ttfts: VecDeque::with_capacity(TTFTS_SHOWN),
            outputs: HashMap::new(),
        }
    }

    /// The number of a tenant's model.
    pub(crate) fn model(&mut self, tenant: &str, model: &str) -> u32 {
        let next = u32::try_from(self.models.len()).unwrap_or(u32::MAX);
        *self.models.entry((tenant.to_owned(), model.to_owned())).or_insert(next)
    }

    /// A decision was made.
    pub(crate) fn decided(&mut self, now: Instant, id: ReservationId, ttft: Duration) {
        self.predicted.insert(id.to_u64(), Predicted { at: now, ttft });
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
    pub(crate) fn more_output(&mut self, id: ReservationId, more: u32) -> u32 {
        if self.outputs.len() > 4 * self.scheduler.reservations() as usize + 1_024 {
            // Those of reservations that ended without a report.
            self.outputs.clear();
        }
        let output = self.outputs.entry(id.to_u64()).or_default();
        *output = output.saturating_add(more);
        *output
    }

    /// A request has ended. Returns its output tokens.
    pub(crate) fn ended(&mut self, id: ReservationId) -> u32 {
        self.predicted.remove(&id.to_u64());
        self.outputs.remove(&id.to_u64()).unwrap_or_default()
    }
}

/// Limits of what is known.
pub(crate) fn knowledge_settings(config: &Config) -> knowledge::Settings {
    let limits = &config.limits;
    knowledge::Settings {
        seed: config.seed,
        publishers_max: limits.publishers_max as usize,
        contexts_max: limits.contexts_max as usize,
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
