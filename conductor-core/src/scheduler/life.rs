//! What happens to a reservation after its decision, and to instances.
//!
//! ```text
//!   decide ─▶ queued ─▶ prefilling ─▶ prefilled ─▶ decoding ─▶ done
//!               └───────────┴─────┬───────┴────────────┤
//!                                 │ instance lost      │ released, or no report for its time
//!                                 ▼                    ▼
//!                              orphan ─▶ reschedule   ended
//! ```
//!
//! Every report may come twice or late: a step that was passed changes nothing, and a report with the name of
//! a reservation that ended, or that was placed anew, is refused.

use core::fmt;
use core::time::Duration;

use te_core::Instant;

use super::Scheduler;
use super::book::{NONE, Stage};
use super::cluster::{Cluster, Instance, State};
use super::decode::limit;
use super::projection::Load;
use super::types::{Ask, Decision, Fetch, LoadReport, Reason, Refusal, ReservationId, Role, Source};
use super::view::Prefill;
use crate::{InstanceId, Tier};

/// A report about a reservation that ended, or that was placed anew under another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale;

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reservation ended, or was placed anew under another name: drop the report")
    }
}

impl core::error::Error for Stale {}

/// Beyond the expected output, another quarter is expected.
const MORE_OUTPUT: u32 = 4;

impl Scheduler {
    fn find(&mut self, now: Instant, id: ReservationId) -> Result<u32, Stale> {
        let Some(slot) = self.cluster.book.find(id) else {
            self.cluster.counters.stale += 1;
            return Err(Stale);
        };
        self.cluster.book.touch(slot, now);
        Ok(slot)
    }

    /// The prefill began (its KV to reuse has arrived).
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn prefill_started(&mut self, now: Instant, id: ReservationId) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        self.cluster.prefill_started(now, slot);
        Ok(())
    }

    /// The prefill ended: its KV begins to be shipped.
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn prefill_done(&mut self, now: Instant, id: ReservationId) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        self.cluster.prefill_done(now, slot);
        Ok(())
    }

    /// The KV has reached the decode instance.
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn transfer_done(&mut self, now: Instant, id: ReservationId) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        self.cluster.transfer_done(now, slot);
        Ok(())
    }

    /// The first token was seen; the prefill and the transfer have ended, too.
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn first_token(&mut self, now: Instant, id: ReservationId) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        self.cluster.first_token(now, slot);
        Ok(())
    }

    /// `output` tokens were seen in all; need not be reported for every token.
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn output_tokens(&mut self, now: Instant, id: ReservationId, output: u32) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        self.cluster.first_token(now, slot);
        self.cluster.output_tokens(now, slot, output);
        Ok(())
    }

    /// The request ended after `output` tokens in all.
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn done(&mut self, now: Instant, id: ReservationId, output: u32) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        if self.cluster.book.get(slot).stage != Stage::Orphan {
            self.cluster.first_token(now, slot);
        }
        let model = self.cluster.book.get(slot).model;
        self.cluster.lengths.learn(model, output);
        self.cluster.end(slot, now);
        self.cluster.counters.done += 1;
        Ok(())
    }

    /// The request failed or was cancelled: nothing is learnt from it.
    ///
    /// # Errors
    ///
    /// [`Stale`].
    pub fn release(&mut self, now: Instant, id: ReservationId) -> Result<(), Stale> {
        let slot = self.find(now, id)?;
        self.cluster.end(slot, now);
        self.cluster.counters.released += 1;
        Ok(())
    }

    /// Ends at most `budget` reservations about which nothing was reported for their time; returns how many.
    pub fn expire(&mut self, now: Instant, budget: u32) -> u32 {
        let ttl = limit(self.cluster.config.reservation_ttl);
        let mut expired = 0;
        while expired < budget
            && let Some(slot) = self.cluster.book.least_recent()
            && now.nanos_since(self.cluster.book.get(slot).touched_at) >= ttl
        {
            self.cluster.end(slot, now);
            expired += 1;
        }
        self.cluster.counters.expired += u64::from(expired);
        expired
    }

    /// A decode step on an instance took this long, on average, as a client saw it. `false`: unknown
    /// instance, or one without requests.
    pub fn step_seen(&mut self, now: Instant, id: InstanceId, step: Duration) -> bool {
        let Some(slot) = self.cluster.slot(id) else { return false };
        let cluster = &mut self.cluster;
        let instance = cluster.instance_mut(slot);
        instance.projection.advance(now);
        let load = instance.projection.at(now);
        let sequences = load.sequences.saturating_add(instance.foreign.sequences);
        let context = load.context.saturating_add(instance.foreign.context);
        let (Ok(sequences), Ok(context)) = (u32::try_from(sequences), u64::try_from(context)) else {
            return false;
        };
        let kind = usize::from(instance.spec.kind.0);
        let kind = &mut cluster.kinds[kind];
        let Some(fit) = kind.step.as_mut().filter(|_| sequences > 0) else { return false };
        let used = fit.observe(sequences, context, step);
        kind.model.decode = fit.cost();
        used
    }

    /// What an engine says about itself. `false`: unknown instance.
    pub fn load_report(&mut self, now: Instant, id: InstanceId, report: &LoadReport) -> bool {
        let Some(slot) = self.cluster.slot(id) else { return false };
        self.cluster.load_report(now, slot, report);
        true
    }

    /// An instance died: nothing is placed there, and what needs it becomes an
    /// [orphan](Scheduler::next_orphan). `false`: unknown.
    pub fn instance_lost(&mut self, now: Instant, id: InstanceId) -> bool {
        let Some(slot) = self.cluster.slot(id) else { return false };
        self.cluster.instance_lost(now, slot);
        true
    }

    /// A lost or draining instance is up again, without work and without blocks. `false`: unknown.
    pub fn instance_back(&mut self, id: InstanceId) -> bool {
        let Some(slot) = self.cluster.slot(id) else { return false };
        self.cluster.instance_mut(slot).state = State::Up;
        true
    }

    /// Forgets an instance; what needs it becomes an orphan. `false`: unknown.
    pub fn remove_instance(&mut self, now: Instant, id: InstanceId) -> bool {
        let Some(slot) = self.cluster.slot(id) else { return false };
        self.cluster.instance_lost(now, slot);
        self.cluster.vacate(slot);
        true
    }

    /// Places a request anew whose instance was lost, with what is left of its promise: it was accepted, so
    /// that a promise that can no longer be kept does not refuse it. After its first token, `ask` has the
    /// output so far as part of the prompt; if the store has all of its full blocks, a decode instance
    /// restores it without a prefill. The former name of the reservation has no effect from then on.
    ///
    /// # Errors
    ///
    /// [`Refusal`]: it is no orphan ([`Reason::Stale`]), no instance, no room. It stays an orphan: try again,
    /// or [`release`](Scheduler::release) it.
    pub fn reschedule(
        &mut self,
        now: Instant,
        id: ReservationId,
        ask: &Ask<'_>,
    ) -> Result<Decision, Refusal> {
        let Some(slot) =
            self.cluster.book.find(id).filter(|&slot| self.cluster.book.get(slot).stage == Stage::Orphan)
        else {
            self.cluster.counters.stale += 1;
            return Err(Refusal::of(Reason::Stale, Duration::MAX));
        };
        self.cluster.book.drop_orphan(slot);
        let r = self.cluster.book.get(slot);
        let (stage, prefilled) = (r.stage, r.prefilled_before_loss);
        debug_assert_eq!(stage, Stage::Orphan);
        if prefilled && let Some(decision) = self.cluster.restore(now, slot, ask) {
            return Ok(decision);
        }
        let left = self.cluster.slo_left(now, slot, ask);
        self.cluster.book.fence(slot);
        let decision = self.place(now, &left, slot, false);
        match decision {
            Ok(_) => {
                self.cluster.book.touch(slot, now);
                self.cluster.counters.rescheduled += 1;
            }
            Err(_) => {
                // The name that the caller knows stays valid.
                self.cluster.book.get_mut(slot).generation = id.generation;
                self.cluster.counters.refused_other += 1;
            }
        }
        decision
    }
}

impl Cluster {
    fn prefill_started(&mut self, now: Instant, slot: u32) {
        let r = self.book.get_mut(slot);
        if r.stage != Stage::Queued {
            return;
        }
        let prefill = r.prefill;
        (r.stage, r.started) = (Stage::Prefilling, Some(now));
        if let Some(fetch) = r.fetch.take() {
            self.release_transfer(fetch, now.as_nanos());
        }
        // Engines may begin in another order than ours.
        let Self { instances, book, .. } = self;
        book.get_mut(slot).stage = Stage::Queued;
        book.requeue_before_waiting(&mut instances[prefill as usize].queue, slot);
        book.get_mut(slot).stage = Stage::Prefilling;
        if self.config.layerwise {
            self.begin_ship(now, slot);
        }
        self.recompute(prefill, now.as_nanos());
    }

    fn prefill_done(&mut self, now: Instant, slot: u32) {
        let r = self.book.get(slot);
        if !r.in_queue() {
            return;
        }
        let (prefill, work, started) = (r.prefill, r.work, r.started);
        if let Some(fetch) = self.book.get_mut(slot).fetch.take() {
            self.release_transfer(fetch, now.as_nanos());
        }
        self.begin_ship(now, slot);
        self.leave_queue(slot, now.as_nanos());
        self.book.get_mut(slot).stage = Stage::Prefilled;
        self.instance_mut(prefill).window.done(&work);
        self.book.get_mut(slot).prefilled = Some(now);
        let started = started.or_else(|| self.begun(slot, prefill, now));
        if self.book.get(slot).ship.is_none() {
            self.leave_prefill(slot);
        }
        let Some(started) = started.filter(|&started| started < now) else { return };
        let spec = &self.instance(prefill).spec;
        // A pipeline's time is not that of the formula.
        let (kind, alone) = (usize::from(spec.kind.0), spec.stages <= 1);
        let kind = &mut self.kinds[kind];
        if let (Some(fit), true) = (&mut kind.prefill, alone) {
            fit.observe(&work, now - started);
            kind.model.prefill = fit.cost();
        }
    }

    /// When the prefill of `slot`, which ends now, began, as far as a proxy can tell: an engine runs one at a
    /// time, in the order in which they came.
    fn begun(&mut self, slot: u32, prefill: u32, now: Instant) -> Option<Instant> {
        if !self.config.reports_of_proxy {
            return None;
        }
        let ready = Instant::from_nanos(self.book.get(slot).ready);
        let before = self.instance_mut(prefill).prefilled_at.replace(now);
        Some(before.map_or(ready, |before| before.max(ready)))
    }

    /// The first token of `slot`, which another instance than that of its prefill gives, came now.
    fn handed_over(&mut self, slot: u32, now: Instant) {
        let r = self.book.get(slot);
        let (decode, tokens, prefilled) = (r.decode, r.tokens, r.prefilled);
        let Some(prefilled) = prefilled.filter(|&prefilled| prefilled < now) else { return };
        if self.config.reports_of_proxy && decode != NONE && r.prefill != decode {
            let kind = usize::from(self.instance(decode).spec.kind.0);
            let seconds = (now - prefilled).as_secs_f64();
            self.kinds[kind].handover.observe(&[1.0, f64::from(tokens)], seconds);
        }
    }

    /// The KV of `slot` begins to be shipped: what was expected is booked.
    fn begin_ship(&mut self, now: Instant, slot: u32) {
        let r = self.book.get_mut(slot);
        let (prefill, decode) = (r.prefill, r.decode);
        let Some(pending) = r.ship_pending.take() else { return };
        let arrivals = &mut self.instance_mut(decode).arrivals;
        arrivals.advance(now);
        arrivals.remove(pending.step, pending.span);
        let booking = self.book_transfer(prefill, decode, now.as_nanos(), pending.span);
        self.book.get_mut(slot).ship = Some(booking);
    }

    /// Nothing of `slot` is on its prefill instance any more.
    fn leave_prefill(&mut self, slot: u32) {
        let prefill = core::mem::replace(&mut self.book.get_mut(slot).prefill, NONE);
        self.vacate_if_drained(prefill);
    }

    fn transfer_done(&mut self, now: Instant, slot: u32) {
        if matches!(self.book.get(slot).stage, Stage::Orphan | Stage::Free) {
            return;
        }
        self.prefill_done(now, slot);
        if let Some(ship) = self.book.get_mut(slot).ship.take() {
            self.release_transfer(ship, now.as_nanos());
            self.leave_prefill(slot);
        }
    }

    fn first_token(&mut self, now: Instant, slot: u32) {
        if matches!(self.book.get(slot).stage, Stage::Decoding | Stage::Orphan) {
            return;
        }
        self.handed_over(slot, now);
        self.transfer_done(now, slot);
        let r = self.book.get_mut(slot);
        r.stage = Stage::Decoding;
        let actual = now.nanos_since(r.placed);
        self.ttft_errors.record(crate::cost::seconds(r.ttft_predicted), crate::cost::seconds(actual));
        self.expect_end(now, slot);
    }

    fn output_tokens(&mut self, now: Instant, slot: u32, output: u32) {
        let r = self.book.get_mut(slot);
        if r.stage != Stage::Decoding || output <= r.output {
            return;
        }
        r.output = output;
        if r.output >= r.output_expected {
            r.output_expected = r.output.saturating_add(r.output / MORE_OUTPUT).saturating_add(1);
        }
        self.expect_end(now, slot);
    }

    /// Counts `slot` on its decode instance from now to its expected end.
    fn expect_end(&mut self, now: Instant, slot: u32) {
        let r = self.book.get_mut(slot);
        let left = u64::from(r.output_expected.saturating_sub(r.output));
        let finish = Instant::from_nanos(now.as_nanos().saturating_add(left.saturating_mul(r.step_ns)));
        let (decode, counted) = (r.decode, r.counted.as_mut());
        if let (Some(entry), true) = (counted, decode != NONE) {
            let projection = &mut self.instances[decode as usize].projection;
            projection.advance(now);
            projection.move_to(entry, now, finish);
        }
    }

    fn instance_lost(&mut self, now: Instant, slot: u32) {
        self.instance_mut(slot).state = State::Lost;
        for member in 0..self.book.capacity() {
            let r = self.book.get(member);
            if matches!(r.stage, Stage::Free | Stage::Orphan) {
                continue;
            }
            if r.prefill == slot || r.decode == slot {
                let prefilled = matches!(r.stage, Stage::Prefilled | Stage::Decoding);
                self.unbook(member, now);
                let r = self.book.get_mut(member);
                (r.stage, r.prefill, r.decode) = (Stage::Orphan, NONE, NONE);
                r.prefilled_before_loss = prefilled;
                self.book.push_orphan(member);
            } else if let Some(fetch) = r.fetch.filter(|fetch| fetch.from == slot) {
                // Its engine computes what it does not get.
                self.book.get_mut(member).fetch = None;
                self.release_transfer(fetch, now.as_nanos());
            }
        }
        let instance = self.instance_mut(slot);
        debug_assert_eq!(instance.queue.len(), 0);
        let spec = instance.spec;
        *instance = Instance::new(spec);
        instance.state = State::Lost;
    }

    /// What is left of the promise of `slot`.
    fn slo_left<'a>(&self, now: Instant, slot: u32, ask: &Ask<'a>) -> Ask<'a> {
        let r = self.book.get(slot);
        let mut left = *ask;
        let gone = Duration::from_nanos(now.nanos_since(r.arrival));
        left.slo = r.slo;
        left.slo.ttft = r.slo.ttft.saturating_sub(gone);
        left
    }

    /// Places `slot` on a decode instance that reads the KV from the store, if all full blocks are there.
    fn restore(&mut self, now: Instant, slot: u32, ask: &Ask<'_>) -> Option<Decision> {
        let blocks = ask.tokens.checked_sub(1)?.checked_div(ask.block_tokens)?;
        if blocks == 0 || ask.store_blocks < blocks {
            return None;
        }
        let output = ask.expected_output.unwrap_or_else(|| self.lengths.expected(ask.model)).max(1);
        let kv = i64::from(ask.tokens) + i64::from(output);
        let load = Load { sequences: 1, context: kv - i64::from(output / 2), kv };
        let nanos = now.as_nanos();
        let mut best: Option<((u64, u64), Restore)> = None;
        for to in 0..self.instances.len() as u32 {
            let instance = self.instance_mut(to);
            let serves = instance.spec.model == ask.model && instance.spec.role != Role::Prefill;
            if instance.state != State::Up || !serves {
                continue;
            }
            instance.projection.advance(now);
            let instance = self.instance(to);
            let bytes = f64::from(blocks * ask.block_tokens) * self.kv_bytes_per_token(instance);
            let span = (bytes * self.ns_per_byte(NONE, to, Some(Tier::Store))) as u64;
            let begin = instance.ingress.free(nanos).saturating_add(self.tier_latency_ns(Tier::Store));
            let cost = self.prefill_cost(instance);
            let prefill = Prefill::new(&instance.spec, cost, ask.tokens, ask.block_tokens).latency(blocks);
            let ready = begin.saturating_add(span).saturating_add(prefill);
            let (step, fits) = self.with(to, Instant::from_nanos(ready), load);
            if fits && best.as_ref().is_none_or(|(least, _)| (ready, step) < *least) {
                best = Some(((ready, step), Restore { to, begin, span, prefill, ready, step }));
            }
        }
        let (_, Restore { to, begin, span, prefill, ready, step }) = best?;
        let ship = self.book_transfer(NONE, to, begin, span);
        let finish = ready.saturating_add(step.saturating_mul(u64::from(output)));
        let projection = &mut self.instance_mut(to).projection;
        let counted = projection.add(load, Instant::from_nanos(ready), Instant::from_nanos(finish));
        self.book.fence(slot);
        let r = self.book.get_mut(slot);
        (r.stage, r.prefill, r.decode, r.placed, r.tokens) = (Stage::Prefilled, NONE, to, now, ask.tokens);
        (r.ship, r.counted, r.load, r.step_ns) = (Some(ship), Some(counted), load, step);
        (r.output, r.output_expected, r.ttft_predicted) = (0, output, ready - nanos);
        self.book.touch(slot, now);
        self.counters.decided += 1;
        self.counters.rescheduled += 1;
        self.counters.restored += 1;
        let id = self.instance(to).spec.id;
        Some(Decision {
            reservation: self.book.id(slot),
            prefill: id,
            reuse_blocks: blocks,
            fetch: Some(Fetch { from: Source::Store, tier: Tier::Store, first_block: 0, blocks }),
            decode: id,
            restored: true,
            ttft: Duration::from_nanos(ready - nanos),
            tbt: Duration::from_nanos(step),
            wait: Duration::from_nanos(ready - nanos - prefill),
            prefill_time: Duration::from_nanos(prefill),
        })
    }
}

/// A decode instance that could restore a request: when its transfer begins, and what it takes.
#[derive(Clone, Copy, Debug)]
struct Restore {
    to: u32,
    begin: u64,
    span: u64,
    prefill: u64,
    ready: u64,
    step: u64,
}
