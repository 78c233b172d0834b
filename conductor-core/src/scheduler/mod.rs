//! Where requests run: prefill instance, what it fetches, decode instance; or a refusal.
//!
//! ```text
//!   Ask (lengths, matches) ─▶ candidates, holders ─▶ Policy ─▶ prediction ─▶ decode ─▶ admission ─▶ Decision
//!                                  ▲                              ▲            ▲                      │
//!                                  │ queues, NICs as booked       │ cost       │ projections          │
//!                                  └──────────────────────────────┴────────────┴──────────────────────┘
//!   prefill_started, prefill_done, transfer_done, first_token, output_tokens, done, load_report
//! ```
//!
//! The scheduler never sees tokens, sockets or a clock. [`decide`](Scheduler::decide) and the reports of a
//! reservation's life allocate nothing: everything is allocated for the [`Limits`] beforehand.

mod book;
mod cluster;
mod config;
mod decay;
mod decide;
mod decode;
mod lengths;
mod life;
mod nics;
mod policy;
mod projection;
mod replicate;
mod types;
mod view;

use alloc::boxed::Box;

use te_core::Instant;

pub use config::{Limits, ReplicationConfig, SchedulerConfig, TierCost};
pub use life::Stale;
pub use policy::{
    Algorithm1, AlphaBeta, CacheAware, Cost, Dynamo, LeastRequests, LeastTime, Local, MaxHit, Policy,
    PolicyKind, PowerOfTwo, Preble, Random, RoundRobin, TwoTier, UnknownPolicy,
};
pub use types::{
    Ask, Decision, Fetch, InstanceError, InstanceSpec, KindId, LoadReport, Orphan, Reason, Refusal,
    Replicate, ReservationId, Role, Slo, Source,
};
pub use view::{Candidate, Estimate, Holder, Placement, View};

use self::cluster::{Cluster, State};
use crate::InstanceId;
use crate::cost::{CostModel, ErrorHistogram, OnlineFit};

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Decisions, those of requests that were placed again included.
    pub decided: u64,
    /// Of them, those of requests that were placed again.
    pub rescheduled: u64,
    /// Of them, those whose KV is restored from the store.
    pub restored: u64,
    /// Decisions with a fetch.
    pub fetches: u64,
    /// Tokens of the prompts that were placed.
    pub tokens: u64,
    /// Of them, tokens that are reused.
    pub reused_tokens: u64,
    /// Of them, tokens that are fetched.
    pub fetched_tokens: u64,
    /// Refusals because the time to the first token would be missed.
    pub refused_ttft: u64,
    /// Refusals because the time between tokens would be missed.
    pub refused_tbt: u64,
    /// Refusals for other reasons.
    pub refused_other: u64,
    /// Reservations that ended as reported.
    pub done: u64,
    /// Reservations that were released.
    pub released: u64,
    /// Reservations that ended because nothing was reported.
    pub expired: u64,
    /// Reports about reservations that do not exist any more.
    pub stale: u64,
    /// Requests that were taken out of a queue because their engine has no work.
    pub phantoms: u64,
    /// Copies of hot prefixes that were asked for.
    pub replicated: u64,
    /// Copies of hot prefixes that no caller took in time.
    pub replicates_dropped: u64,
}

/// Instances, their load as booked, and the decisions. See the module.
#[derive(Debug)]
pub struct Scheduler {
    cluster: Cluster,
    policy: Box<dyn Policy>,
    scratch: decide::Scratch,
}

impl Scheduler {
    /// Without instances; allocates for its limits.
    #[must_use]
    pub fn new(config: SchedulerConfig) -> Self {
        let policy = config.policy.build(config.seed);
        let scratch = decide::Scratch::new(&config.limits);
        Self { cluster: Cluster::new(config), policy, scratch }
    }

    /// A kind of instance. At most 65,536 are told apart.
    pub fn add_kind(&mut self, model: CostModel) -> KindId {
        self.cluster.add_kind(model)
    }

    /// A kind begins anew with a model: what was learnt of it is forgotten.
    pub fn renew_kind(&mut self, kind: KindId, model: CostModel) {
        self.cluster.renew_kind(kind, model);
    }

    /// Forgets how long the outputs of a model are.
    pub fn forget_model(&mut self, model: u32) {
        self.cluster.lengths.forget(model);
    }

    /// Adds an instance, up and without work.
    ///
    /// # Errors
    ///
    /// [`InstanceError`]: the limit, the name, the kind or the rack.
    pub fn add_instance(&mut self, spec: InstanceSpec) -> Result<(), InstanceError> {
        self.cluster.add_instance(spec)
    }

    /// Places nothing more on an instance; it is forgotten once its last request ended. `false`: unknown.
    pub fn drain(&mut self, id: InstanceId) -> bool {
        let Some(slot) = self.cluster.slot(id) else { return false };
        let instance = self.cluster.instance_mut(slot);
        if instance.state == State::Up {
            instance.state = State::Draining;
        }
        self.cluster.vacate_if_drained(slot);
        true
    }

    /// Bytes per second from a rack to another (or itself), as measured. `false`: 0, or a rack above the
    /// limit.
    pub fn set_bandwidth(&mut self, from: u16, to: u16, bytes_per_s: u64) -> bool {
        self.cluster.set_bandwidth(from, to, bytes_per_s)
    }

    /// The costs of a kind, as fitted by now; `None`: no such kind.
    #[must_use]
    pub fn cost(&self, kind: KindId) -> Option<&CostModel> {
        self.cluster.kinds.get(usize::from(kind.0)).map(|kind| &kind.model)
    }

    /// The fit of a kind's prefills, with the errors of its predictions; `None` without a fit.
    #[must_use]
    pub fn prefill_fit(&self, kind: KindId) -> Option<&OnlineFit<4>> {
        Some(self.cluster.kinds.get(usize::from(kind.0))?.prefill.as_ref()?.fit())
    }

    /// The errors of the predicted times to the first token.
    #[must_use]
    pub const fn ttft_errors(&self) -> &ErrorHistogram {
        &self.cluster.ttft_errors
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.cluster.counters
    }

    /// Reservations in progress.
    #[must_use]
    pub fn reservations(&self) -> u32 {
        self.cluster.book.in_use()
    }

    /// Requests in the queue of an instance and nanoseconds until it has drained; `None`: unknown.
    #[must_use]
    pub fn queue(&self, id: InstanceId, now: Instant) -> Option<(u32, u64)> {
        let instance = self.cluster.instance(self.cluster.slot(id)?);
        Some((instance.queue.len(), instance.wait(now.as_nanos())))
    }

    /// Requests that an instance decodes or will, and the tokens of KV that they will have; `None`: unknown.
    #[must_use]
    pub fn decoding(&self, id: InstanceId, now: Instant) -> Option<(u64, u64)> {
        let instance = self.cluster.instance(self.cluster.slot(id)?);
        let kv = u64::try_from(instance.projection.at(now).kv).unwrap_or(0);
        Some((instance.projection.requests(), kv))
    }

    /// The next copy of a hot prefix to make, if any.
    pub fn next_replicate(&mut self) -> Option<Replicate> {
        self.cluster.replication.as_mut()?.next()
    }

    /// Hands out a reservation whose instance was lost, each once.
    pub fn next_orphan(&mut self) -> Option<Orphan> {
        let slot = self.cluster.book.pop_orphan()?;
        let r = self.cluster.book.get(slot);
        Some(Orphan {
            reservation: self.cluster.book.id(slot),
            prefilled: r.prefilled_before_loss,
            output: r.output,
            arrival: r.arrival,
        })
    }

    /// Sums over reservations are what the instances have.
    #[cfg(test)]
    fn assert_consistent(&self) {
        let cluster = &self.cluster;
        for (slot, instance) in cluster.instances.iter().enumerate() {
            let slot = slot as u32;
            let all = || (0..cluster.book.capacity()).map(|r| cluster.book.get(r));
            let queued = || all().filter(|r| r.in_queue() && r.prefill == slot);
            assert_eq!(queued().count() as u32, instance.queue.len());
            assert_eq!(queued().map(|r| u64::from(r.uncached)).sum::<u64>(), instance.queued_tokens);
            let counted = all().filter(|r| r.counted.is_some() && r.decode == slot).count();
            assert_eq!(counted as u64, instance.projection.requests());
            let bookings = || all().flat_map(|r| r.fetch.iter().chain(&r.ship));
            assert_eq!(bookings().filter(|b| b.from == slot).count() as u32, instance.egress.outstanding());
            assert_eq!(bookings().filter(|b| b.to == slot).count() as u32, instance.ingress.outstanding());
            let pending =
                all().filter(|r| r.decode == slot).filter_map(|r| r.ship_pending).map(|ship| ship.span);
            assert_eq!(pending.sum::<u64>(), instance.arrivals.total());
        }
    }

    #[cfg(test)]
    fn is_balanced(&self) -> bool {
        self.cluster.book.in_use() == 0
            && self.cluster.instances.iter().all(|instance| {
                instance.queue.len() == 0
                    && instance.queued_tokens == 0
                    && instance.egress.outstanding() == 0
                    && instance.ingress.outstanding() == 0
                    && instance.arrivals.is_empty()
                    && instance.projection.is_empty()
            })
    }
}

#[cfg(test)]
mod tests;
