//! The choice of the decode instance, at the time at which the prefill ends.

use core::time::Duration;

use te_core::Instant;

use super::cluster::{Cluster, State, ship_end};
use super::projection::{Load, STEP_NS};
use super::types::{Ask, Reason, Refusal, Role};
use super::view::whole;
use crate::cost::nanos;

/// Transfers whose ends differ by less than this part of a second are equal: instances are then told apart by
/// their load.
const TRANSFER_GRAIN_NS: u64 = 10_000_000;

/// What is to be decoded, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Need {
    /// The instance of the prefill.
    pub prefill: u32,
    /// When the prefill begins and ends.
    pub start: u64,
    pub end: u64,
    pub output_expected: u32,
}

/// A decode instance, and what it means.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    pub slot: u32,
    /// Nanoseconds that the KV occupies the NICs; 0: it stays where it is.
    pub ship: u64,
    /// When the KV has arrived.
    pub arrived: u64,
    /// Nanoseconds per decode step with this request.
    pub step: u64,
    pub load: Load,
    /// Whether there is room.
    pub fits: bool,
}

/// Nanoseconds of a limit.
pub(super) fn limit(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Cluster {
    /// Among the instances that have room and keep `tbt_max`: the one with the least `Δstep + transfer`;
    /// among equals one of the same rack, then the one with the shortest step. Without `admission` an
    /// instance that is too slow is better than none.
    pub(super) fn choose_decode(
        &mut self,
        now: Instant,
        ask: &Ask<'_>,
        held: &[u32],
        need: &Need,
        tbt_max: u64,
        admission: bool,
    ) -> Result<Chosen, Refusal> {
        let load = Load {
            sequences: 1,
            context: i64::from(ask.tokens) + i64::from(need.output_expected / 2),
            kv: i64::from(ask.tokens) + i64::from(need.output_expected),
        };
        let rack = self.instance(need.prefill).spec.rack;
        let mut best: Option<((bool, u64, bool, u64), Chosen)> = None;
        let (mut step_least, mut any, mut room) = (u64::MAX, false, false);
        for slot in 0..self.instances.len() as u32 {
            if !self.can_decode(slot, ask.model, need.prefill) {
                continue;
            }
            any = true;
            let (chosen, growth) = self.decode_on(now, slot, ask, held, need, load);
            let fits = chosen.fits;
            let step_fits = chosen.step <= tbt_max;
            room |= fits;
            if !fits || (admission && !step_fits) {
                step_least = if fits { step_least.min(chosen.step) } else { step_least };
                continue;
            }
            let transfer = chosen.arrived.saturating_sub(need.end) / TRANSFER_GRAIN_NS;
            let growth = growth / 1_000 + transfer.saturating_mul(TRANSFER_GRAIN_NS / 1_000);
            let other_rack = self.instance(slot).spec.rack != rack;
            let key = (!step_fits, growth, other_rack, chosen.step);
            if best.as_ref().is_some_and(|(least, _)| key >= *least) {
                continue;
            }
            if admission {
                // Those that were accepted for later must not suffer either.
                let (peak, fits) = self.peak(slot, &chosen, need.output_expected);
                step_least = step_least.min(peak);
                if peak > tbt_max || !fits {
                    continue;
                }
            }
            best = Some((key, chosen));
        }
        if let Some((_, chosen)) = best {
            return Ok(chosen);
        }
        if !any {
            return Err(Refusal::of(Reason::NoDecode, Duration::from_nanos(STEP_NS)));
        }
        let mut retry_least = u64::MAX;
        for slot in 0..self.instances.len() as u32 {
            if self.can_decode(slot, ask.model, need.prefill) {
                let (chosen, _) = self.decode_on(now, slot, ask, held, need, load);
                retry_least = retry_least.min(self.retry_decode(now, slot, &chosen, tbt_max));
            }
        }
        let retry_after = Duration::from_nanos(if retry_least == u64::MAX { STEP_NS } else { retry_least });
        let reason = if room { Reason::Tbt } else { Reason::KvFull };
        let tbt = Duration::from_nanos(step_least);
        Err(Refusal { tbt, ..Refusal::of(reason, retry_after) })
    }

    #[inline]
    fn can_decode(&self, slot: u32, model: u32, prefill: u32) -> bool {
        // An instance that does both decodes what it prefills, and nothing else.
        if self.instance(prefill).spec.role == Role::Both {
            return slot == prefill;
        }
        let instance = self.instance(slot);
        let is_up = instance.state == State::Up && !instance.left_out;
        is_up && instance.spec.role == Role::Decode && instance.spec.model == model
    }

    /// What decoding on `slot` means, and by how much its step grows.
    #[inline]
    fn decode_on(
        &mut self,
        now: Instant,
        slot: u32,
        ask: &Ask<'_>,
        held: &[u32],
        need: &Need,
        load: Load,
    ) -> (Chosen, u64) {
        let layerwise = self.config.layerwise;
        let instance = self.instance_mut(slot);
        instance.projection.advance(now);
        instance.arrivals.advance(now);
        let (mut ship, mut arrived) = (0, need.end);
        if slot != need.prefill && self.config.ships {
            let there = held.get(slot as usize).copied().unwrap_or(0).saturating_mul(ask.block_tokens);
            let tokens = ask.tokens.saturating_sub(there);
            let sender = self.instance(need.prefill);
            let rate = self.ns_per_byte(need.prefill, slot, None) * self.kv_bytes_per_token(sender);
            ship = whole(f64::from(tokens) * rate);
            let egress = sender.ship_free_at.max(sender.egress.free(now.as_nanos()));
            let earliest = if layerwise { need.start } else { need.end };
            let instance = self.instance(slot);
            let ingress = instance.arrivals.begin(instance.ingress.free(now.as_nanos()), earliest);
            arrived = ship_end(egress.max(ingress), need.start, need.end, ship, layerwise);
        }
        let (step, fits) = self.with(slot, Instant::from_nanos(arrived), load);
        let cost = &self.model(self.instance(slot)).decode;
        let growth = whole(1e9 * (cost.per_sequence + cost.per_context_token * load.context as f64));
        (Chosen { slot, ship, arrived, step, load, fits }, growth)
    }

    /// Nanoseconds per step on `slot` at `at` with `load`, and whether there is room for it.
    #[inline]
    pub(super) fn with(&self, slot: u32, at: Instant, load: Load) -> (u64, bool) {
        let instance = self.instance(slot);
        let mut with = instance.projection.at(at);
        with += instance.foreign;
        with += load;
        let step = 1e9 * self.model(instance).decode.seconds(with.sequences as f64, with.context as f64);
        (whole(step), has_room(instance.spec.kv_tokens_max, instance.spec.sequences_max, with))
    }

    /// The longest step, in nanoseconds, while `chosen` is decoded on `slot`, and whether there is always
    /// room.
    fn peak(&self, slot: u32, chosen: &Chosen, output_expected: u32) -> (u64, bool) {
        let instance = self.instance(slot);
        let cost = &self.model(instance).decode;
        let (kv_max, sequences_max) = (instance.spec.kv_tokens_max, instance.spec.sequences_max);
        let finish = chosen.arrived.saturating_add(chosen.step.saturating_mul(u64::from(output_expected)));
        let (mut peak, mut room) = (0.0_f64, true);
        for mut with in
            instance.projection.between(Instant::from_nanos(chosen.arrived), Instant::from_nanos(finish))
        {
            with += instance.foreign;
            with += chosen.load;
            peak = peak.max(cost.seconds(with.sequences as f64, with.context as f64));
            room &= has_room(kv_max, sequences_max, with);
        }
        (whole(1e9 * peak), room)
    }

    /// Nanoseconds until `slot` could decode the request if nothing else arrived.
    fn retry_decode(&self, now: Instant, slot: u32, chosen: &Chosen, tbt_max: u64) -> u64 {
        let instance = self.instance(slot);
        let cost = self.model(instance).decode;
        let (kv_max, sequences_max) = (instance.spec.kv_tokens_max, instance.spec.sequences_max);
        let arrived = Instant::from_nanos(chosen.arrived);
        let first = instance.projection.first(arrived, |mut with| {
            with += instance.foreign;
            with += chosen.load;
            has_room(kv_max, sequences_max, with)
                && nanos(cost.seconds(with.sequences as f64, with.context as f64)) <= tbt_max
        });
        first.map_or(u64::MAX, |at| at.nanos_since(arrived.max(now)).max(STEP_NS))
    }
}

fn has_room(kv_max: u64, sequences_max: u32, with: Load) -> bool {
    (kv_max == 0 || with.kv <= i64::try_from(kv_max).unwrap_or(i64::MAX))
        && (sequences_max == 0 || with.sequences <= i64::from(sequences_max))
}
