//! One decision: candidates and holders from the matches, the policy's choice, its prediction, the decode
//! instance, admission, and the books.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::book::{NONE, PendingShip, Stage};
use super::cluster::{Cluster, Instance, State, ship_end};
use super::config::Limits;
use super::decode::{Chosen, Need, limit};
use super::replicate::Noted;
use super::types::{Ask, Decision, Fetch, Reason, Refusal, Role, Source};
use super::view::{Candidate, Estimate, Holder, Placement, Prefill, View};
use super::{Policy, PolicyKind, Scheduler};
use crate::cost::PrefillWork;
use crate::{InstanceId, InstanceMatch, Tier};

/// When to ask again after a refusal that no prediction goes with.
const RETRY: Duration = Duration::from_secs(1);

/// Buffers of a decision, allocated once.
#[derive(Debug)]
pub(super) struct Scratch {
    candidates: Vec<Candidate>,
    holders: Vec<Holder>,
    /// Holders by falling number of blocks, without those that another one of their rack equals in
    /// everything.
    sorted: Vec<Holder>,
    order: Vec<u64>,
    /// Per rack and tier: the holder so far that is free first.
    soonest: Vec<Soonest>,
    /// Per slot of an instance: what it has.
    matches: Vec<InstanceMatch>,
    /// Per slot of an instance: blocks in its memory.
    held: Vec<u32>,
    /// How busy the candidates have been, on average.
    utilisation: f64,
}

impl Scratch {
    pub(super) fn new(limits: &Limits) -> Self {
        let instances = limits.instances as usize;
        Self {
            candidates: Vec::with_capacity(instances),
            // Memory and disk of every instance, and the store.
            holders: Vec::with_capacity(2 * instances + 1),
            sorted: Vec::with_capacity(2 * instances + 1),
            order: Vec::with_capacity(2 * instances + 1),
            soonest: vec![Soonest::default(); (usize::from(limits.racks.max(1)) + 1) * Tier::ALL.len()],
            matches: Vec::with_capacity(instances),
            held: Vec::with_capacity(instances),
            utilisation: 0.0,
        }
    }
}

/// A holder's NIC.
#[derive(Clone, Copy, Debug, Default)]
struct Soonest {
    wait: u64,
    ns_per_byte: f64,
}

/// The part of a decision that concerns the prefill.
#[derive(Clone, Copy, Debug)]
struct Plan {
    candidate: Candidate,
    estimate: Estimate,
    own_blocks: u32,
    from: Option<Holder>,
    /// Nanoseconds that the fetch occupies NICs, and when it may begin.
    fetch_span: u64,
    fetch_earliest: u64,
}

impl Scheduler {
    /// Places a request, and books what it will use.
    ///
    /// # Errors
    ///
    /// [`Refusal`]: no instance, no room, a limit; or, with `admission`, a promise that would be missed,
    /// with the prediction.
    pub fn decide(&mut self, now: Instant, ask: &Ask<'_>) -> Result<Decision, Refusal> {
        self.decide_with(now, ask, &[])
    }

    /// As [`decide_with`](Self::decide_with), where the request may be sent only to instances for which `may`
    /// is true: those that decode, or do both. Instances that only prefill are not asked about. Instances of
    /// `avoid`, which failed this request, get it only where no other one is up that may: they are avoided
    /// for the prefill and for the decode, each as long as there is another one.
    ///
    /// # Errors
    ///
    /// As [`decide`](Self::decide).
    pub fn decide_among(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        coming: &[InstanceMatch],
        may: impl Fn(InstanceId) -> bool,
        avoid: &[InstanceId],
    ) -> Result<Decision, Refusal> {
        let leave_out = |cluster: &mut Cluster, avoided: &dyn Fn(Role) -> bool| {
            for Instance { spec, left_out, .. } in &mut cluster.instances {
                let barred = spec.role != Role::Prefill && !may(spec.id);
                *left_out = barred || (avoided(spec.role) && avoid.contains(&spec.id));
            }
        };
        leave_out(&mut self.cluster, &|_| true);
        let mut decision = self.try_decide(now, ask, coming);
        let (mut prefills, mut decodes) = (true, true);
        while !avoid.is_empty()
            && let Err(Refusal { reason, .. }) = decision
        {
            // No other one is there for this part: those that failed have to try again.
            match reason {
                Reason::NoPrefill if prefills => prefills = false,
                Reason::NoDecode if decodes => decodes = false,
                _ => break,
            }
            leave_out(&mut self.cluster, &|role| match role {
                Role::Prefill => prefills,
                Role::Decode => decodes,
                Role::Both => prefills && decodes,
            });
            decision = self.try_decide(now, ask, coming);
        }
        for instance in &mut self.cluster.instances {
            instance.left_out = false;
        }
        self.counted(decision)
    }

    /// As [`decide`](Self::decide), where instances will have `coming` of the prompt when their queues have
    /// drained: what [`Ask::matches`] says, and the blocks that earlier decisions let them compute or
    /// fetch. A prefill there reuses them, as it runs after those decisions' prefills; nothing is fetched
    /// from there before it is in [`Ask::matches`].
    ///
    /// # Errors
    ///
    /// As [`decide`](Self::decide).
    pub fn decide_with(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        coming: &[InstanceMatch],
    ) -> Result<Decision, Refusal> {
        let decision = self.try_decide(now, ask, coming);
        self.counted(decision)
    }

    fn counted(&mut self, decision: Result<Decision, Refusal>) -> Result<Decision, Refusal> {
        match decision {
            Err(Refusal { reason: Reason::Ttft, .. }) => self.cluster.counters.refused_ttft += 1,
            Err(Refusal { reason: Reason::Tbt, .. }) => self.cluster.counters.refused_tbt += 1,
            Err(_) => self.cluster.counters.refused_other += 1,
            Ok(_) => {}
        }
        decision
    }

    fn try_decide(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        coming: &[InstanceMatch],
    ) -> Result<Decision, Refusal> {
        self.cluster.check(ask)?;
        if self.cluster.book.is_full() {
            return Err(Refusal::of(Reason::Full, RETRY));
        }
        let (plan, chosen) = self.choose(now, ask, coming, self.cluster.config.admission)?;
        let slot = self.cluster.book.take(now).ok_or(Refusal::of(Reason::Full, RETRY))?;
        let r = self.cluster.book.get_mut(slot);
        (r.arrival, r.slo) = (now, ask.slo);
        Ok(self.cluster.commit(now, ask, slot, &plan, &chosen))
    }

    /// Where `ask` would run. With `admission`, an error if that would miss its promises.
    pub(super) fn place(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        slot: u32,
        admission: bool,
    ) -> Result<Decision, Refusal> {
        self.cluster.check(ask)?;
        let (plan, chosen) = self.choose(now, ask, &[], admission)?;
        Ok(self.cluster.commit(now, ask, slot, &plan, &chosen))
    }

    fn choose(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        coming: &[InstanceMatch],
        admission: bool,
    ) -> Result<(Plan, Chosen), Refusal> {
        let Self { cluster, policy, scratch } = self;
        cluster.fade(now);
        scratch.fill(cluster, now, ask, coming);
        if scratch.candidates.is_empty() {
            return Err(Refusal::of(Reason::NoPrefill, RETRY));
        }
        let plan =
            scratch.plan(cluster, policy.as_mut(), now, ask).ok_or(Refusal::of(Reason::NoPrefill, RETRY))?;
        let output_expected = ask.expected_output.unwrap_or_else(|| cluster.lengths.expected(ask.model));
        let end = now.as_nanos().saturating_add(plan.estimate.total);
        let need = Need {
            prefill: plan.candidate.slot,
            start: end.saturating_sub(plan.estimate.prefill),
            end,
            output_expected,
        };
        let tbt_max = cluster.threshold(limit(ask.slo.tbt), cluster.refusing_tbt);
        let chosen = match cluster.choose_decode(now, ask, &scratch.held, &need, tbt_max, admission) {
            Ok(chosen) => chosen,
            Err(refusal) => {
                cluster.refusing_tbt |= refusal.reason == Reason::Tbt;
                return Err(Refusal { ttft: Duration::from_nanos(plan.estimate.total), ..refusal });
            }
        };
        cluster.refusing_tbt = false;
        let ttft = cluster.ttft(now, ask, &plan, &chosen);
        let ttft_max = cluster.threshold(limit(ask.slo.ttft), cluster.refusing_ttft);
        if admission && ttft > ttft_max {
            cluster.refusing_ttft = true;
            return Err(Refusal {
                reason: Reason::Ttft,
                ttft: Duration::from_nanos(ttft),
                tbt: Duration::from_nanos(chosen.step),
                retry_after: Duration::from_nanos(ttft - ttft_max),
            });
        }
        cluster.refusing_ttft = false;
        scratch.note_hot(cluster, now, ask, &plan);
        Ok((plan, chosen))
    }
}

impl Cluster {
    fn check(&self, ask: &Ask<'_>) -> Result<(), Refusal> {
        if ask.tokens == 0 || ask.block_tokens == 0 || ask.tokens > self.config.limits.tokens_max {
            return Err(Refusal::of(Reason::BadAsk, Duration::MAX));
        }
        Ok(())
    }

    /// The bound of a prediction. After a refusal it is lower by the hysteresis.
    fn threshold(&self, max: u64, refusing: bool) -> u64 {
        if refusing && max < u64::MAX {
            (max as f64 * (1.0 - self.config.hysteresis.clamp(0.0, 1.0))) as u64
        } else {
            max
        }
    }

    fn ttft(&self, now: Instant, ask: &Ask<'_>, plan: &Plan, chosen: &Chosen) -> u64 {
        if self.config.first_token_after_transfer && chosen.ship > 0 {
            return chosen.arrived.saturating_sub(now.as_nanos());
        }
        if self.config.reports_of_proxy && chosen.slot != plan.candidate.slot {
            let kind = usize::from(self.instance(chosen.slot).spec.kind.0);
            let seconds = self.kinds[kind].handover.predict(&[1.0, f64::from(ask.tokens)]);
            return plan.estimate.total.saturating_add(crate::cost::nanos(seconds));
        }
        plan.estimate.total
    }

    /// Books everything for `slot`, whose arrival and promises are set.
    fn commit(&mut self, now: Instant, ask: &Ask<'_>, slot: u32, plan: &Plan, chosen: &Chosen) -> Decision {
        let nanos = now.as_nanos();
        let prefill = plan.candidate.slot;
        let reused = plan.estimate.blocks * ask.block_tokens;
        let work = PrefillWork::of(ask.tokens, reused);
        let blocks = plan.estimate.blocks;
        let (prefill_ns, occupancy_ns) = (plan.estimate.prefill, plan.candidate.prefill.occupancy(blocks));
        let ttft = self.ttft(now, ask, plan, chosen);
        let fetch = plan
            .from
            .map(|holder| self.book_transfer(holder.slot, prefill, plan.fetch_earliest, plan.fetch_span));
        let end = nanos.saturating_add(plan.estimate.total);
        let start = end.saturating_sub(plan.estimate.prefill);
        let output_expected = ask.expected_output.unwrap_or_else(|| self.lengths.expected(ask.model)).max(1);
        let finish = chosen.arrived.saturating_add(chosen.step.saturating_mul(u64::from(output_expected)));
        let layerwise = self.config.layerwise;
        let decode = self.instance_mut(chosen.slot);
        let ship_at = if layerwise { start } else { end };
        let ship_pending = (chosen.ship > 0)
            .then(|| PendingShip { span: chosen.ship, step: decode.arrivals.add(ship_at, chosen.ship) });
        let (arrived, finish) = (Instant::from_nanos(chosen.arrived), Instant::from_nanos(finish));
        let counted = decode.projection.add(chosen.load, arrived, finish);
        let uncached = ask.tokens - reused;
        let r = self.book.get_mut(slot);
        (r.stage, r.prefilled) = (Stage::Queued, None);
        (r.model, r.tokens, r.output_expected, r.placed) = (ask.model, ask.tokens, output_expected, now);
        (r.prefill, r.decode, r.ttft_predicted, r.step_ns) = (prefill, chosen.slot, ttft, chosen.step);
        (r.work, r.prefill_ns, r.occupancy_ns, r.uncached) = (work, prefill_ns, occupancy_ns, uncached);
        (r.ready, r.start, r.end, r.started) = (nanos.saturating_add(plan.estimate.ready), start, end, None);
        (r.fetch, r.ship, r.ship_pending) = (fetch, None, ship_pending);
        (r.load, r.counted) = (chosen.load, Some(counted));
        let instance = &mut self.instances[prefill as usize];
        let first = instance.queue.len() == 0;
        self.book.push_queue(&mut instance.queue, slot);
        instance.queued_tokens += u64::from(uncached);
        instance.head_end = if first { end } else { instance.head_end };
        instance.free_at = start.saturating_add(occupancy_ns);
        if let Some(ship) = ship_pending {
            let free_at = instance.ship_free_at.max(instance.egress.free(nanos));
            instance.ship_free_at = ship_end(free_at, start, end, ship.span, layerwise);
        }
        instance.give(prefill_ns, ask.tokens - plan.own_blocks * ask.block_tokens);
        self.counters.decided += 1;
        self.counters.fetches += u64::from(plan.from.is_some());
        self.counters.tokens += u64::from(ask.tokens);
        self.counters.reused_tokens += u64::from(reused);
        let fetched = plan.from.map_or(0, |_| plan.estimate.blocks - plan.own_blocks);
        self.counters.fetched_tokens += u64::from(fetched * ask.block_tokens);
        Decision {
            reservation: self.book.id(slot),
            prefill: plan.candidate.id,
            reuse_blocks: plan.estimate.blocks,
            fetch: plan.from.map(|holder| Fetch {
                from: holder.instance.map_or(Source::Store, Source::Instance),
                tier: holder.tier,
                first_block: plan.own_blocks,
                blocks: fetched,
            }),
            decode: self.instance(chosen.slot).spec.id,
            restored: false,
            ttft: Duration::from_nanos(ttft),
            tbt: Duration::from_nanos(chosen.step),
            wait: Duration::from_nanos(ttft.saturating_sub(plan.estimate.prefill)),
            prefill_time: Duration::from_nanos(plan.estimate.prefill),
        }
    }
}

impl Scratch {
    /// Candidates and holders of `ask`.
    fn fill(&mut self, cluster: &Cluster, now: Instant, ask: &Ask<'_>, coming: &[InstanceMatch]) {
        // At least one token is computed, so that there are logits to draw the first token from.
        let blocks_max = (ask.tokens - 1) / ask.block_tokens;
        self.matches.clear();
        self.matches.resize(cluster.instances.len(), InstanceMatch::default());
        self.held.clear();
        self.held.resize(cluster.instances.len(), 0);
        for found in ask.matches {
            let Some(slot) = cluster.slot(found.instance) else { continue };
            if matches!(cluster.instance(slot).state, State::Up | State::Draining) {
                let gpu = found.gpu.min(blocks_max);
                let cpu = found.cpu.min(blocks_max).max(gpu);
                let disk = found.disk.min(blocks_max).max(cpu);
                self.matches[slot as usize] = InstanceMatch { gpu, cpu, disk, ..*found };
                self.held[slot as usize] = cpu;
            }
        }
        self.fill_candidates(cluster, now, ask);
        self.fill_holders(cluster, now, ask.store_blocks.min(blocks_max));
        self.expect(cluster, coming, blocks_max);
    }

    /// Candidates have what is coming to them, too.
    fn expect(&mut self, cluster: &Cluster, coming: &[InstanceMatch], blocks_max: u32) {
        if coming.is_empty() {
            return;
        }
        for found in coming {
            let Some(slot) = cluster.slot(found.instance) else { continue };
            let own = &mut self.matches[slot as usize];
            own.gpu = own.gpu.max(found.gpu.min(blocks_max));
            own.cpu = own.cpu.max(found.cpu.min(blocks_max)).max(own.gpu);
            own.disk = own.disk.max(found.disk.min(blocks_max)).max(own.cpu);
        }
        for candidate in &mut self.candidates {
            let own = &self.matches[candidate.slot as usize];
            (candidate.gpu, candidate.cpu, candidate.disk) = (own.gpu, own.cpu, own.disk);
        }
    }

    fn fill_candidates(&mut self, cluster: &Cluster, now: Instant, ask: &Ask<'_>) {
        self.candidates.clear();
        let nanos = now.as_nanos();
        let queue_max = cluster.config.limits.queue_per_instance;
        let mut busy = 0.0;
        for (slot, instance) in cluster.instances.iter().enumerate() {
            if !instance.prefills(ask.model) || instance.queue.len() >= queue_max {
                continue;
            }
            let found = &self.matches[slot];
            let model = cluster.model(instance);
            let decodes = instance.spec.role == Role::Both;
            let decoding = if decodes { instance.projection.requests() as u32 } else { 0 };
            let egress = instance.egress.free(nanos).max(instance.ship_free_at);
            busy += instance.utilisation();
            self.candidates.push(Candidate {
                slot: slot as u32,
                prefill: Prefill::new(&instance.spec, &model.prefill, ask.tokens, ask.block_tokens),
                block_bytes: f64::from(ask.block_tokens) * model.kv_bytes_per_token as f64,
                egress_wait: egress - nanos,
                ingress_wait: instance.ingress.free(nanos) - nanos,
                ingress_utilisation: instance.ingress.utilisation(),
                id: instance.spec.id,
                rack: instance.spec.rack,
                decodes,
                gpu: found.gpu,
                cpu: found.cpu,
                disk: found.disk,
                wait: instance.wait(nanos),
                // A request that it will decode is counted there from its placement on.
                requests: if decodes { decoding } else { instance.queue.len() },
                queued_tokens: instance.queued_tokens,
                decode_tokens: if decodes { instance.projection.at(now).kv.max(0) as u64 } else { 0 },
                cached_tokens: instance.cached_tokens as u64,
                recent_ns: instance.recent_ns as u64,
            });
        }
        self.utilisation = busy / self.candidates.len().max(1) as f64;
    }

    fn fill_holders(&mut self, cluster: &Cluster, now: Instant, store_blocks: u32) {
        self.holders.clear();
        let nanos = now.as_nanos();
        // A policy that does not know what is booked takes the holder that comes first.
        let blind = cluster.config.policy == PolicyKind::CostBlind;
        let holders = if cluster.config.fetches { &self.matches[..] } else { &[] };
        for (slot, found) in holders.iter().enumerate() {
            if found.disk == 0 {
                continue;
            }
            let instance = &cluster.instances[slot];
            let holder = |tier, blocks| Holder {
                slot: slot as u32,
                rack: instance.spec.rack,
                instance: Some(instance.spec.id),
                tier,
                blocks,
                wait: if blind { 0 } else { instance.egress.free(nanos) - nanos },
                utilisation: instance.egress.utilisation(),
            };
            if found.cpu > 0 {
                let tier = if found.cpu > found.gpu { Tier::Cpu } else { Tier::Gpu };
                self.holders.push(holder(tier, found.cpu));
            }
            if found.disk > found.cpu {
                self.holders.push(holder(Tier::Disk, found.disk));
            }
        }
        if store_blocks > 0 {
            let (tier, blocks) = (Tier::Store, store_blocks);
            self.holders.push(Holder {
                slot: NONE,
                rack: 0,
                instance: None,
                tier,
                blocks,
                wait: 0,
                utilisation: 0.0,
            });
        }
        self.order.clear();
        self.order
            .extend(self.holders.iter().zip(0_u64..).map(|(holder, i)| u64::from(!holder.blocks) << 32 | i));
        self.order.sort_unstable();
        self.soonest.fill(Soonest { wait: u64::MAX, ns_per_byte: f64::INFINITY });
        self.sorted.clear();
        for &key in &self.order {
            let holder = self.holders[(key & u64::from(u32::MAX)) as usize];
            let store = holder.slot == NONE;
            let ns_per_byte = if store { 0.0 } else { cluster.instance(holder.slot).nic_ns_per_byte() };
            // The store has a network of its own, after those of the racks.
            let rack = if store {
                usize::from(cluster.config.limits.racks.max(1))
            } else {
                usize::from(holder.rack)
            };
            let sooner = &mut self.soonest[rack * Tier::ALL.len()..(rack + 1) * Tier::ALL.len()];
            let tier = holder.tier as usize;
            let equalled = |other: &Soonest| other.wait <= holder.wait && other.ns_per_byte <= ns_per_byte;
            if sooner[..=tier].iter().any(equalled) {
                continue;
            }
            if holder.wait <= sooner[tier].wait {
                sooner[tier] = Soonest { wait: holder.wait, ns_per_byte };
            }
            self.sorted.push(holder);
        }
    }

    fn view<'a>(&'a self, cluster: &'a Cluster, now: Instant, ask: &'a Ask<'a>) -> View<'a> {
        View {
            cluster,
            now,
            ask,
            candidates: &self.candidates,
            holders: &self.sorted,
            blocks_max: (ask.tokens - 1) / ask.block_tokens,
            utilisation: self.utilisation,
        }
    }

    /// The policy's choice, and what it will take.
    fn plan(&self, cluster: &Cluster, policy: &mut dyn Policy, now: Instant, ask: &Ask<'_>) -> Option<Plan> {
        let view = self.view(cluster, now, ask);
        let Placement { candidate, fetch } = policy.place(&view)?;
        let candidate = *self.candidates.get(candidate)?;
        let own = view.own(&candidate);
        let mut plan = Plan {
            candidate,
            estimate: own,
            own_blocks: own.blocks,
            from: None,
            fetch_span: 0,
            fetch_earliest: now.as_nanos(),
        };
        if let Some((holder, blocks)) = fetch {
            let holder = *self.sorted.get(holder)?;
            if blocks > own.blocks && holder.blocks > own.blocks {
                plan.estimate = view.fetched(&candidate, &own, &holder, blocks, true);
                plan.from = Some(holder);
                plan.fetch_earliest = now.as_nanos().saturating_add(view.fetch_begin(&candidate, &holder));
                plan.fetch_span = view.fetch_span(&candidate, &own, &holder, plan.estimate.blocks) as u64;
            }
        }
        Some(plan)
    }
}

impl Scratch {
    /// Adds up how long NICs are busy with what `ask` fetches from the store: at its full length, and at each
    /// power of two below it, so that requests which share only their beginning add up.
    fn note_store(cluster: &mut Cluster, now: Instant, ask: &Ask<'_>, plan: &Plan) {
        let (first, blocks) = (plan.own_blocks, plan.estimate.blocks);
        let Some(holder) = plan.from.filter(|holder| holder.slot == NONE && blocks > first) else { return };
        let Some(replication) = cluster.replication.as_mut() else { return };
        debug_assert!(holder.blocks >= blocks);
        let shorter = (0..blocks.ilog2() + 1).rev().map(|bit| 1 << bit).filter(|depth| *depth < blocks);
        let mut copied = false;
        for depth in core::iter::once(blocks).chain(shorter).take_while(|depth| *depth > first) {
            let Some(&key) = ask.keys.get(depth as usize - 1) else { continue };
            if copied {
                replication.covered(key);
                continue;
            }
            let busy = (plan.fetch_span as f64 * f64::from(depth - first) / f64::from(blocks - first)) as u64;
            match replication.lost(now, key, depth, busy, Source::Store, plan.candidate.id) {
                Noted::Counted => {}
                Noted::Asked => {
                    cluster.counters.replicated += 1;
                    copied = true;
                }
                Noted::Dropped => cluster.counters.replicates_dropped += 1,
            }
        }
    }

    /// Adds up what `ask` lost because the NIC of the instance with the longest prefix was busy.
    fn note_hot(&self, cluster: &mut Cluster, now: Instant, ask: &Ask<'_>, plan: &Plan) {
        Self::note_store(cluster, now, ask, plan);
        let longest = self.sorted.iter().find(|holder| holder.instance.is_some());
        let Some(holder) = longest.filter(|holder| holder.wait > 0) else {
            return;
        };
        let (Some(from), Some(&key)) = (holder.instance, ask.keys.get(holder.blocks as usize - 1)) else {
            return;
        };
        let view = self.view(cluster, now, ask);
        // What the best instance could have done if the NIC had been free.
        let mut free = u64::MAX;
        for candidate in view.candidates().iter().filter(|candidate| Some(candidate.id) != holder.instance) {
            let fetches = view.fetches(candidate, &view.own(candidate), holder, false);
            let soonest = fetches.into_iter().flatten().map(|fetched| fetched.total).min();
            free = free.min(soonest.unwrap_or(u64::MAX));
        }
        let lost = plan.estimate.total.saturating_sub(free);
        let idle = self.candidates.iter().filter(|candidate| candidate.disk < holder.blocks);
        let Some(to) = idle.min_by_key(|candidate| (candidate.recent_ns, candidate.slot)) else { return };
        let Some(replication) = cluster.replication.as_mut().filter(|_| lost > 0) else { return };
        match replication.lost(now, key, holder.blocks, lost, Source::Instance(from), to.id) {
            Noted::Counted => {}
            Noted::Asked => cluster.counters.replicated += 1,
            Noted::Dropped => cluster.counters.replicates_dropped += 1,
        }
    }
}
