//! Everything the scheduler knows, but for the policy: instances, their queues and NICs, reservations.

use alloc::boxed::Box;
use alloc::vec::Vec;

use hashbrown::HashMap;
use te_core::Instant;

use super::Counters;
use super::book::{Book, Booking, List, NONE, PendingShip, Stage};
use super::config::SchedulerConfig;
use super::decay::{Fading, Steps};
use super::decode::limit;
use super::lengths::Lengths;
use super::nics::{Arrivals, Direction};
use super::projection::{Load, Projection};
use super::replicate::Replication;
use super::types::{InstanceError, InstanceSpec, KindId, LoadReport, Role};
use crate::cost::{CostModel, ErrorHistogram, OnlineFit, PrefillCost, PrefillFit, PrefillWindow, StepFit};
use crate::{InstanceId, Tier};

/// Predictions of the time to the first token that count in the error metric.
const ERROR_MEMORY: u32 = 1_000;
/// No engine is believed to have more work of others than this: ten minutes.
const FOREIGN_NS_MAX: u64 = 600_000_000_000;

#[derive(Debug)]
pub(super) struct Kind {
    pub model: CostModel,
    pub prefill: Option<PrefillFit>,
    pub step: Option<StepFit>,
    /// Seconds from the end of a prefill elsewhere to the first token here: a constant, and those per token.
    pub handover: OnlineFit<2>,
}

impl Kind {
    fn new(model: CostModel, config: &SchedulerConfig) -> Self {
        let fit = config.online_fit;
        Self {
            model,
            prefill: fit.map(|fit| PrefillFit::new(&model.prefill, fit)),
            step: fit.map(|fit| StepFit::new(&model.decode, fit)),
            handover: OnlineFit::new([0.0; 2], fit.unwrap_or_default()),
        }
    }
}

/// Whether an instance takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The slot is not in use.
    Vacant,
    Up,
    /// Ends what it has, and gets nothing new.
    Draining,
    Lost,
}

#[derive(Debug)]
pub(super) struct Instance {
    pub spec: InstanceSpec,
    pub state: State,
    /// The decision that is being made must not use it.
    pub left_out: bool,
    /// Nanoseconds per byte of its NICs.
    nic_ns_per_byte: f64,

    /// Requests whose prefill has not ended, in the order in which they will run.
    pub queue: List,
    pub queued_tokens: u64,
    /// When the queue will have drained, and when its first request should end, in nanoseconds.
    pub free_at: u64,
    pub head_end: u64,
    /// Nanoseconds of prefill that the engine reported beyond what we placed.
    pub foreign_ns: u64,

    pub egress: Direction,
    pub ingress: Direction,
    /// When the last KV of its queue will have been shipped.
    pub ship_free_at: u64,
    pub arrivals: Arrivals,

    pub projection: Projection,
    /// Requests that it decodes and that we did not place.
    pub foreign: Load,

    /// Nanoseconds of prefill that it was given, halved every minute.
    pub recent_ns: f64,
    pub cached_tokens: f64,
    pub window: PrefillWindow,
    /// When the last prefill here ended, as a proxy saw it.
    pub prefilled_at: Option<Instant>,
}

impl Instance {
    pub(super) fn new(spec: InstanceSpec) -> Self {
        Self {
            nic_ns_per_byte: ns_per_byte(spec.nic_bytes_per_s),
            spec,
            state: State::Up,
            left_out: false,
            queue: List::EMPTY,
            queued_tokens: 0,
            free_at: 0,
            head_end: 0,
            foreign_ns: 0,
            egress: Direction::default(),
            ingress: Direction::default(),
            ship_free_at: 0,
            arrivals: Arrivals::new(),
            projection: Projection::new(),
            foreign: Load::default(),
            recent_ns: 0.0,
            cached_tokens: 0.0,
            window: PrefillWindow::default(),
            prefilled_at: None,
        }
    }

    pub(super) fn prefills(&self, model: u32) -> bool {
        let serves = self.spec.role != Role::Decode && !self.left_out;
        serves && self.state == State::Up && self.spec.model == model
    }

    pub(super) const fn nic_ns_per_byte(&self) -> f64 {
        self.nic_ns_per_byte
    }

    /// Nanoseconds until the queue has drained. A first request that should have ended delays all others.
    #[inline]
    pub(super) fn wait(&self, now: u64) -> u64 {
        if self.queue.len() == 0 {
            return self.foreign_ns;
        }
        let late = now.saturating_sub(self.head_end);
        self.free_at.saturating_add(late).saturating_sub(now).saturating_add(self.foreign_ns)
    }

    /// The part of the recent time for which prefills were placed here; above 1 when they pile up.
    pub(super) fn utilisation(&self) -> f64 {
        Fading::MINUTE.utilisation(self.recent_ns)
    }

    pub(super) fn give(&mut self, prefill_ns: u64, tokens: u32) {
        self.recent_ns += prefill_ns as f64;
        self.cached_tokens += f64::from(tokens);
    }
}

fn ns_per_byte(bytes_per_s: u64) -> f64 {
    if bytes_per_s == 0 { 0.0 } else { 1e9 / bytes_per_s as f64 }
}

#[derive(Debug)]
pub(super) struct Cluster {
    pub config: SchedulerConfig,
    pub kinds: Vec<Kind>,
    pub instances: Vec<Instance>,
    vacant: Vec<u32>,
    slots: HashMap<InstanceId, u32, foldhash::fast::FixedState>,
    /// Nanoseconds per byte from rack to rack.
    rack_ns_per_byte: Box<[f64]>,
    store_ns_per_byte: f64,
    tier_ns_per_byte: [f64; 4],
    tier_latency_ns: [u64; 4],
    pub book: Book,
    pub lengths: Lengths,
    pub replication: Option<Replication>,
    pub counters: Counters,
    pub ttft_errors: ErrorHistogram,
    steps: Steps,
    pub refusing_ttft: bool,
    pub refusing_tbt: bool,
}

impl Cluster {
    pub(super) fn new(config: SchedulerConfig) -> Self {
        let limits = config.limits;
        let racks = usize::from(limits.racks.max(1));
        let rate = ns_per_byte(config.bandwidth_bytes_per_s);
        Self {
            kinds: Vec::new(),
            instances: Vec::with_capacity(limits.instances as usize),
            vacant: Vec::with_capacity(limits.instances as usize),
            slots: HashMap::with_capacity_and_hasher(
                limits.instances as usize,
                foldhash::fast::FixedState::default(),
            ),
            rack_ns_per_byte: (0..racks * racks).map(|_| rate).collect(),
            store_ns_per_byte: rate,
            tier_ns_per_byte: config.tiers.map(|tier| ns_per_byte(tier.bytes_per_s)),
            tier_latency_ns: config.tiers.map(|tier| limit(tier.latency)),
            book: Book::new(limits.reservations),
            lengths: Lengths::new(limits.models, config.output_tokens_first, config.output_quantile),
            replication: config.replication.map(Replication::new),
            counters: Counters::default(),
            ttft_errors: ErrorHistogram::new(ERROR_MEMORY),
            steps: Steps::default(),
            refusing_ttft: false,
            refusing_tbt: false,
            config,
        }
    }

    /// What was long ago weighs less.
    pub(super) fn fade(&mut self, now: Instant) {
        let steps = self.steps.until(now);
        if steps == 0 {
            return;
        }
        let (prefill, nic) = (Fading::MINUTE.after(steps), Fading::TEN_SECONDS.after(steps));
        for instance in &mut self.instances {
            instance.recent_ns *= prefill;
            instance.egress.fade(nic);
            instance.ingress.fade(nic);
        }
    }

    pub(super) fn add_kind(&mut self, model: CostModel) -> KindId {
        self.kinds.push(Kind::new(model, &self.config));
        KindId((self.kinds.len() - 1) as u16)
    }

    pub(super) fn renew_kind(&mut self, kind: KindId, model: CostModel) {
        if let Some(known) = self.kinds.get_mut(usize::from(kind.0)) {
            *known = Kind::new(model, &self.config);
        }
    }

    pub(super) fn add_instance(&mut self, spec: InstanceSpec) -> Result<(), InstanceError> {
        let racks = self.config.limits.racks.max(1);
        if self.slots.contains_key(&spec.id) {
            return Err(InstanceError::Exists(spec.id));
        }
        if usize::from(spec.kind.0) >= self.kinds.len() {
            return Err(InstanceError::UnknownKind(spec.kind));
        }
        if spec.rack >= racks {
            return Err(InstanceError::BadRack { rack: spec.rack, max: racks });
        }
        let id = spec.id;
        let slot = if let Some(slot) = self.vacant.pop() {
            self.instances[slot as usize] = Instance::new(spec);
            slot
        } else {
            let max = self.config.limits.instances;
            if self.instances.len() >= max as usize {
                return Err(InstanceError::TooMany { max });
            }
            self.instances.push(Instance::new(spec));
            self.instances.len() as u32 - 1
        };
        self.slots.insert(id, slot);
        Ok(())
    }

    /// The slot of an instance that has no reservation any more may be used again.
    pub(super) fn vacate(&mut self, slot: u32) {
        let instance = &mut self.instances[slot as usize];
        instance.state = State::Vacant;
        self.slots.remove(&instance.spec.id);
        self.vacant.push(slot);
    }

    #[inline]
    pub(super) fn slot(&self, id: InstanceId) -> Option<u32> {
        self.slots.get(&id).copied()
    }

    #[inline]
    pub(super) fn instance(&self, slot: u32) -> &Instance {
        &self.instances[slot as usize]
    }

    pub(super) fn instance_mut(&mut self, slot: u32) -> &mut Instance {
        &mut self.instances[slot as usize]
    }

    #[inline]
    pub(super) fn model(&self, instance: &Instance) -> &CostModel {
        &self.kinds[usize::from(instance.spec.kind.0)].model
    }

    pub(super) fn prefill_cost(&self, instance: &Instance) -> &PrefillCost {
        &self.model(instance).prefill
    }

    pub(super) fn kv_bytes_per_token(&self, instance: &Instance) -> f64 {
        self.model(instance).kv_bytes_per_token as f64
    }

    pub(super) fn set_bandwidth(&mut self, from: u16, to: u16, bytes_per_s: u64) -> bool {
        let racks = self.config.limits.racks.max(1);
        if from >= racks || to >= racks || bytes_per_s == 0 {
            return false;
        }
        self.rack_ns_per_byte[usize::from(from) * usize::from(racks) + usize::from(to)] =
            ns_per_byte(bytes_per_s);
        true
    }

    pub(super) fn tier_ns_per_byte(&self, tier: Tier) -> f64 {
        self.tier_ns_per_byte[tier as usize]
    }

    pub(super) fn tier_latency_ns(&self, tier: Tier) -> u64 {
        self.tier_latency_ns[tier as usize]
    }

    /// Nanoseconds per byte between two instances; [`NONE`] sends for the store.
    #[inline]
    pub(super) fn ns_per_byte(&self, from: u32, to: u32, tier: Option<Tier>) -> f64 {
        let receiver = self.instance(to);
        let tier = tier.map_or(0.0, |tier| self.tier_ns_per_byte(tier));
        let rate = receiver.nic_ns_per_byte.max(tier);
        if from == NONE {
            return rate.max(self.store_ns_per_byte);
        }
        let sender = self.instance(from);
        let racks = usize::from(self.config.limits.racks.max(1));
        let rack = usize::from(sender.spec.rack) * racks + usize::from(receiver.spec.rack);
        rate.max(sender.nic_ns_per_byte).max(self.rack_ns_per_byte[rack])
    }

    /// Books a transfer that may begin at `earliest`; returns when it should end. The sender is free for
    /// others while the receiver still waits for its turn.
    pub(super) fn book_transfer(&mut self, from: u32, to: u32, earliest: u64, span: u64) -> Booking {
        let mut sent = earliest.saturating_add(span);
        if from != NONE {
            let egress = &mut self.instance_mut(from).egress;
            sent = egress.free(earliest).saturating_add(span);
            egress.book(sent, span);
        }
        let ingress = &mut self.instance_mut(to).ingress;
        let end = ingress.free(sent - span).saturating_add(span);
        ingress.book(end, span);
        Booking { from, to, span, sent, end }
    }

    pub(super) fn release_transfer(&mut self, booking: Booking, now: u64) {
        let Booking { from, to, span, sent, end } = booking;
        if to != NONE {
            self.instance_mut(to).ingress.release(end, span, now);
        }
        if from != NONE {
            // It has left the sender if it has arrived; when, is not reported.
            self.instance_mut(from).egress.release(sent, span, now.min(sent));
        }
    }

    /// Times of every request in the queue of `slot`, again: after a report, or when one left.
    pub(super) fn recompute(&mut self, slot: u32, now: u64) {
        let layerwise = self.config.layerwise;
        let Self { instances, book, .. } = self;
        let instance = &mut instances[slot as usize];
        let (mut free_at, mut ship_free_at, mut head_end) = (now, instance.egress.free(now), None);
        let mut at = instance.queue.head();
        while let Some(member) = at {
            let r = book.get_mut(member);
            let start = match r.started {
                Some(started) => started.as_nanos(),
                None => free_at.max(r.ready),
            };
            let end = start.saturating_add(r.prefill_ns).max(now);
            (r.start, r.end) = (start, end);
            free_at = free_at.max(start.saturating_add(r.occupancy_ns));
            head_end.get_or_insert(end);
            if let Some(ship) = r.ship_pending {
                ship_free_at = ship_end(ship_free_at, start, end, ship.span, layerwise);
            }
            at = book.next(member);
        }
        instance.free_at = free_at;
        instance.ship_free_at = ship_free_at;
        instance.head_end = head_end.unwrap_or(now);
    }

    /// Takes `slot` out of the queue of its prefill instance.
    pub(super) fn leave_queue(&mut self, slot: u32, now: u64) {
        let r = self.book.get(slot);
        let (prefill, uncached) = (r.prefill, r.uncached);
        if !r.in_queue() || prefill == NONE {
            return;
        }
        let Self { instances, book, .. } = self;
        let instance = &mut instances[prefill as usize];
        book.unlink_queue(&mut instance.queue, slot);
        instance.queued_tokens = instance.queued_tokens.saturating_sub(u64::from(uncached));
        self.recompute(prefill, now);
    }

    /// Removes everything that `slot` has booked; the reservation itself stays.
    pub(super) fn unbook(&mut self, slot: u32, now: Instant) {
        let nanos = now.as_nanos();
        self.leave_queue(slot, nanos);
        let r = self.book.get_mut(slot);
        r.stage = Stage::Prefilled;
        let (fetch, ship, pending, counted) =
            (r.fetch.take(), r.ship.take(), r.ship_pending.take(), r.counted.take());
        let decode = r.decode;
        for booking in fetch.into_iter().chain(ship) {
            self.release_transfer(booking, nanos);
        }
        if decode == NONE {
            return;
        }
        let instance = self.instance_mut(decode);
        if let Some(PendingShip { span, step }) = pending {
            instance.arrivals.advance(now);
            instance.arrivals.remove(step, span);
        }
        if let Some(entry) = counted {
            instance.projection.advance(now);
            instance.projection.remove(entry);
        }
    }

    /// Ends a reservation.
    pub(super) fn end(&mut self, slot: u32, now: Instant) {
        if self.book.get(slot).stage == Stage::Orphan {
            self.book.drop_orphan(slot);
        }
        let r = self.book.get(slot);
        let (prefill, decode) = (r.prefill, r.decode);
        self.unbook(slot, now);
        self.book.give_back(slot);
        self.vacate_if_drained(prefill);
        self.vacate_if_drained(decode);
    }

    pub(super) fn vacate_if_drained(&mut self, slot: u32) {
        if slot == NONE {
            return;
        }
        let instance = self.instance(slot);
        let idle = instance.queue.len() == 0
            && instance.projection.requests() == 0
            && instance.egress.outstanding() == 0
            && instance.ingress.outstanding() == 0;
        if instance.state == State::Draining && idle {
            self.vacate(slot);
        }
    }

    /// What an engine says corrects what we believe.
    pub(super) fn load_report(&mut self, now: Instant, slot: u32, report: &LoadReport) {
        let queue = self.instance(slot).queue;
        let idle = queue.len() == 0;
        let kind = usize::from(self.instance(slot).spec.kind.0);
        let (per_token, requests) = {
            let instance = self.instance(slot);
            (self.prefill_cost(instance).per_token, instance.projection.requests())
        };
        let instance = &mut self.instances[slot as usize];
        if let Some(waiting) = report.waiting_uncached_tokens {
            // More than we placed: others place there, too. Less may still be on its way to the engine.
            let others = report.waiting.is_none_or(|requests| requests > queue.len());
            let foreign = if others { waiting.saturating_sub(instance.queued_tokens) } else { 0 };
            instance.foreign_ns = crate::cost::nanos(per_token * foreign as f64).min(FOREIGN_NS_MAX);
        }
        if let Some(max) = report.kv_tokens_max {
            instance.spec.kv_tokens_max = max;
        }
        instance.projection.advance(now);
        let known = instance.projection.at(now);
        if let (Some(running), true) = (report.running, instance.spec.role != Role::Prefill) {
            instance.foreign.sequences = (i64::from(running) - requests as i64).max(0);
            if let Some(tokens) = report.kv_tokens {
                let foreign = i64::try_from(tokens).unwrap_or(i64::MAX).saturating_sub(known.kv).max(0);
                let foreign = if instance.foreign.sequences > 0 { foreign } else { 0 };
                (instance.foreign.context, instance.foreign.kv) = (foreign, foreign);
            }
        }
        // Times that a proxy sees have what the counters do not have: what it waits for beside them.
        let counters = report.counters.filter(|_| instance.prefilled_at.is_none());
        let pair = counters.and_then(|counters| instance.window.report(counters, idle));
        let kind = &mut self.kinds[kind];
        if let (Some((work, time)), Some(fit)) = (pair, &mut kind.prefill) {
            fit.observe(&work, time);
            kind.model.prefill = fit.cost();
        }
        if let (Some(step), Some(b), Some(tokens), Some(fit)) =
            (report.step, report.running, report.kv_tokens, &mut kind.step)
        {
            fit.observe(b, tokens, step);
            kind.model.decode = fit.cost();
        }
        if report.running == Some(0) && report.waiting == Some(0) {
            self.drop_phantoms(slot, now);
        }
    }

    /// An engine without work has ended, or never got, what should have begun a while ago: its time is given
    /// back.
    fn drop_phantoms(&mut self, slot: u32, now: Instant) {
        /// Between our decision and the engine's report that it has the request.
        const GRACE_NS: u64 = 2_000_000_000;
        let mut at = self.instance(slot).queue.head();
        while let Some(member) = at {
            at = self.book.next(member);
            let r = self.book.get(member);
            if now.nanos_since(r.placed) > GRACE_NS && now.as_nanos() > r.ready.saturating_add(GRACE_NS) {
                self.leave_queue(member, now.as_nanos());
                self.forget_prefill(member, now);
                self.counters.phantoms += 1;
            }
        }
    }

    /// The prefill of `slot` is over for its instance: nothing is booked for it there any more.
    pub(super) fn forget_prefill(&mut self, slot: u32, now: Instant) {
        let r = self.book.get_mut(slot);
        (r.stage, r.prefill) = (Stage::Prefilled, NONE);
        let (pending, decode) = (r.ship_pending.take(), r.decode);
        let (fetch, ship) = (r.fetch.take(), r.ship.take());
        for booking in fetch.into_iter().chain(ship) {
            self.release_transfer(booking, now.as_nanos());
        }
        if let (Some(PendingShip { span, step }), true) = (pending, decode != NONE) {
            let instance = self.instance_mut(decode);
            instance.arrivals.advance(now);
            instance.arrivals.remove(step, span);
        }
    }
}

/// When KV that is shipped after (or, layer by layer, during) a prefill from `start` to `end` has arrived, if
/// the NIC is free from `free_at` on.
#[inline]
pub(super) fn ship_end(free_at: u64, start: u64, end: u64, span: u64, layerwise: bool) -> u64 {
    let earliest = if layerwise { start } else { end };
    free_at.max(earliest).saturating_add(span).max(end)
}
