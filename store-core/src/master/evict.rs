//! The master's part in eviction: when, how much, and what becomes of the space. Whom is the policy's affair.
//!
//! Two things start it. Above the high watermark, puts evict a little and timeouts the bulk, down to the low mark; and a put
//! that finds no room evicts until it fits where a victim was. Neither costs the whole cache for an object that cannot fit.

use core::time::Duration;

use te_core::Instant;

use super::Master;
use crate::blocks::stored_len;
use crate::codec::Short;
use crate::message::{EvictionReport, Kept, NextVictim, Pin};
use crate::objects::{Placements, charge};
use crate::placement::Ask;
use crate::segments::Placed;
use crate::{ErrorCode, FullKey, Key, Placement, TenantNo};

/// How long the watermark waits after it found nothing to evict, before it looks again.
const EVICTION_RETRY: Duration = Duration::from_millis(10);

impl Master {
    /// How many keys of a batch to be put, from its beginning, came back soon after they were evicted: all up to the last
    /// that did, for it could not have been read without those before it. See [`Place::returning`](crate::Place::returning).
    pub fn returning<'a>(&self, keys: impl Iterator<Item = impl Into<FullKey<'a>>>) -> usize {
        self.objects.returning(keys.map(Into::into))
    }

    /// What eviction did and would do, and what keeps objects from it: counters and gauges, in O(1).
    #[must_use]
    pub fn eviction(&self) -> EvictionReport {
        let census = self.objects.census();
        EvictionReport {
            policy: self.config.eviction,
            candidates: census.candidates.into(),
            kept_leased: census.aside.into(),
            kept_soft_pinned: census.soft.into(),
            kept_hard_pinned: census.hard.into(),
            kept_by_group: census.held_by_group.into(),
            kept_unfinished: self.objects.processing_len().into(),
            hard_pinned_bytes: census.hard_bytes,
            groups: census.groups as u64,
            used_bytes: self.segments.used_bytes(),
            high_mark_bytes: self.high_mark() as u64,
            low_mark_bytes: self.low_mark(),
            evictions_total: self.stats.evictions_total,
            evicted_bytes_total: self.stats.evicted_bytes_total,
            starved_total: self.stats.evictions_starved_total,
            looks_total: census.looks,
            kept_leased_total: census.why.leased_total,
            kept_soft_pinned_total: census.why.soft_kept_total,
            soft_pins_decayed_total: census.why.soft_decayed_total,
            soft_pins_revived_total: census.why.soft_revived_total,
            returned_total: census.why.returned_total,
            ..self.report
        }
    }

    /// Calls `each` for the objects of a tenant that would be evicted next, first the first, until it gives false. Some of them may be
    /// leased: they would be set aside.
    pub fn next_victims<'a>(
        &'a self,
        now: Instant,
        tenant: TenantNo,
        mut each: impl FnMut(NextVictim<'a>) -> bool,
    ) {
        self.objects.preview(tenant, &mut |index| {
            let entry = self.objects.entry(index);
            each(NextVictim {
                key: Key(entry.key.as_slice()),
                len: entry.len,
                company: self.objects.company(index),
                leased: self.objects.lease_end(index) > now,
            })
        });
    }

    /// Why an object cannot be evicted now; `None` if it can.
    ///
    /// # Errors
    /// `ObjectNotFound`.
    pub fn kept<'k>(&self, now: Instant, key: impl Into<FullKey<'k>>) -> Result<Option<Kept>, ErrorCode> {
        let index = self.objects.find(key.into()).ok_or(ErrorCode::ObjectNotFound)?;
        let entry = self.objects.entry(index);
        let kept = match self.objects.hold_of(index) {
            _ if !entry.is_complete() => Some(Kept::Unfinished),
            (Pin::Hard, _) => Some(Kept::HardPinned),
            (Pin::Soft, _) => Some(Kept::SoftPinned),
            (Pin::None, true) => Some(Kept::Group),
            (Pin::None, false) => None,
        };
        Ok(kept.or((self.objects.lease_end(index) > now).then_some(Kept::Leased)))
    }

    /// Whether a tenant may pin so many bytes more for good. Its own share is of its quota; and of what all may pin, what is
    /// guaranteed to the others remains theirs.
    pub(super) fn may_pin(&self, tenant: TenantNo, len: u64) -> bool {
        let share = self.config.hard_pin_share_max;
        let capacity = self.segments.capacity_bytes();
        let most = |bytes: u64| bytes.min(capacity) as f64 * share;
        let own = self.objects.usage(tenant);
        let pinned = own.hard_bytes.saturating_add(len) as f64;
        if pinned > most(own.quota_bytes) {
            return false;
        }
        if self.objects.is_single() || pinned <= most(own.guaranteed_bytes) {
            return pinned <= most(capacity);
        }
        let others = self.objects.usages().iter().enumerate().filter(|(no, _)| *no != usize::from(tenant));
        let taken: f64 =
            others.map(|(_, usage)| (usage.hard_bytes as f64).max(most(usage.guaranteed_bytes))).sum();
        taken + pinned <= most(capacity)
    }

    /// Evicts a tenant's own objects until it may have another of `len` bytes.
    ///
    /// # Errors
    /// `TenantQuotaExceeded`: nothing more of it can go, or the object is larger than all it may have.
    pub(super) fn keep_quota(&mut self, now: Instant, tenant: TenantNo, len: u64) -> Result<(), ErrorCode> {
        let bytes = charge(stored_len(len), 1);
        if self.has_quota(tenant, bytes) {
            return Ok(());
        }
        let usage = self.objects.usage(tenant);
        if bytes <= usage.quota_bytes && usage.quota_objects > 0 {
            for _ in 0..self.config.evictions_per_call_max {
                self.objects.settle(now);
                if self.evict_from(now, tenant).is_none() {
                    break;
                }
                if self.has_quota(tenant, bytes) {
                    return Ok(());
                }
            }
        }
        self.objects.usage_mut(tenant).refusals_total += 1;
        Err(ErrorCode::TenantQuotaExceeded)
    }

    /// Whether a tenant may have another object of so many bytes, all copies together.
    pub(super) fn has_quota(&self, tenant: TenantNo, bytes: u64) -> bool {
        let held = self.limbo.charged(tenant) + self.tasks.reserved(tenant);
        self.objects.usage(tenant).has_room(bytes, held)
    }

    /// Evicts until an object of `len` bytes fits where the last victim was; if nothing can go, takes whatever place is left.
    pub(super) fn place_by_eviction(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        len: u64,
        placement: &Placement,
    ) -> Option<Placed> {
        if !self.segments.could_hold(len) {
            return None;
        }
        // An object that does not fit because the free space is scattered must not cost the whole cache; one that does fit,
        // but where it should not go or not yet, must not cost what would not help.
        let share = (self.segments.capacity_bytes() as f64 * self.config.eviction_ratio) as u64;
        let mut spoilt = self.segments.has_room_elsewhere(len);
        let mut budget = share.max(len.saturating_mul(4));
        let ask = |tag| Ask { now, len, tag, placement, near: Short::of(0), at_any_price: true };
        for _ in 0..self.config.evictions_per_call_max {
            if spoilt && !self.victim_would_serve(now, tenant, &ask(0)) {
                let place = self.segments.place(&ask(self.objects.next_index()), &[]);
                if place.is_some() {
                    return place;
                }
                spoilt = false;
            }
            let Some(victim) = self.evict(now, Some(tenant)) else { break };
            self.report.evicted_for_room_total += victim.objects;
            let ask = ask(self.objects.next_index());
            let mut place =
                victim.replicas.as_slice().iter().find_map(|was| self.segments.place_on(was.segment, &ask));
            if victim.objects > 1 {
                place = place.or_else(|| self.segments.place(&ask, &[]));
            }
            if place.is_some() {
                return place;
            }
            let Some(left) = budget.checked_sub(victim.bytes) else { break };
            budget = left;
        }
        self.segments.place(&ask(self.objects.next_index()), &[])
    }

    /// Whether the next victim lies where the replica could go, and nobody asked to spare it.
    fn victim_would_serve(&mut self, now: Instant, tenant: TenantNo, ask: &Ask<'_>) -> bool {
        self.objects.settle(now);
        let gives = self.objects.furthest_over(now).unwrap_or(tenant);
        let victim = self.objects.victim(now, gives, self.config.evictions_per_call_max);
        let victim = victim.filter(|index| self.objects.hold_of(*index).0 == Pin::None);
        let replicas = victim.map(|index| self.objects.entry(index).replicas.as_slice());
        replicas.is_some_and(|replicas| {
            replicas.iter().any(|placed| self.segments.would_serve(placed.segment, ask))
        })
    }

    fn high_mark(&self) -> f64 {
        self.segments.capacity_bytes() as f64 * self.config.eviction_high_watermark
    }

    fn low_mark(&self) -> u64 {
        let low = self.config.eviction_high_watermark - self.config.eviction_ratio;
        (self.segments.capacity_bytes() as f64 * low) as u64
    }

    pub(super) fn is_over_watermark(&self) -> bool {
        self.segments.used_bytes() as f64 > self.high_mark()
    }

    pub(super) fn evict_to_watermark(&mut self, now: Instant, count_max: u32) {
        if !self.evicting && !self.is_over_watermark() {
            return;
        }
        self.evicting = true;
        let low = self.low_mark();
        for _ in 0..count_max {
            if self.segments.used_bytes() <= low {
                self.evicting = false;
                return;
            }
            if self.evict(now, None).is_none() {
                // Everything is leased, pinned or being written. What keeps the mark passed may also be held back: then
                // the next put or timeout tries again.
                self.evicting = false;
                self.evict_again_at = now + EVICTION_RETRY;
                return;
            }
        }
    }

    pub(super) fn evict_one(&mut self, now: Instant, tenant: TenantNo) -> bool {
        // An extra replica that goes leaves as many objects.
        self.objects.settle(now);
        let victim = if self.objects.is_single() {
            self.evict_from(now, 0)
        } else {
            self.evict_fairly(now, Some(tenant))
        };
        victim.is_some()
    }

    /// Objects and bytes of what was evicted, with its group.
    pub(super) fn evict_next(&mut self, now: Instant) -> Option<(u64, u64)> {
        self.evict(now, None).map(|victim| (victim.objects, victim.bytes))
    }

    /// Evicts from the tenant that is furthest above what is guaranteed to it; if none is, from the one whose put it is for.
    fn evict(&mut self, now: Instant, tenant: Option<TenantNo>) -> Option<Victim> {
        self.objects.settle(now);
        if let Some(placed) = self.shed_extra(now) {
            let replicas = Placements::new(&[placed.0]);
            return Some(Victim { replicas, bytes: placed.1, objects: 0 });
        }
        let victim =
            if self.objects.is_single() { self.evict_from(now, 0) } else { self.evict_fairly(now, tenant) };
        if victim.is_none() {
            self.stats.evictions_starved_total += u64::from(!self.starved);
            self.starved = true;
        }
        victim
    }

    fn evict_fairly(&mut self, now: Instant, tenant: Option<TenantNo>) -> Option<Victim> {
        while let Some(most) = self.objects.furthest_over(now) {
            if let Some(victim) = self.evict_from(now, most) {
                return Some(victim);
            }
            self.objects.starve(most, now + EVICTION_RETRY);
        }
        self.evict_from(now, tenant?)
    }

    /// Evicts what the tenant's policy wants to go first and nobody may be reading, with its group.
    fn evict_from(&mut self, now: Instant, tenant: TenantNo) -> Option<Victim> {
        let index = self.objects.victim(now, tenant, self.config.evictions_per_call_max)?;
        self.starved = false;
        self.report.soft_pinned_evicted_total += u64::from(self.objects.hold_of(index).0 == Pin::Soft);
        let mut victim = Victim { replicas: Placements::NONE, bytes: 0, objects: 0 };
        let segments = &mut self.segments;
        self.objects.evict(index, |removed| {
            removed.replicas.as_slice().iter().for_each(|placed| {
                segments.free(placed);
            });
            victim.bytes += removed.len;
            victim.objects += 1;
            if victim.objects == 1 {
                victim.replicas = removed.replicas;
            }
        });
        self.objects.usage_mut(tenant).evictions_total += victim.objects;
        self.stats.evictions_total += victim.objects;
        self.stats.evicted_bytes_total += victim.bytes;
        self.report.groups_evicted_total += u64::from(victim.objects > 1);
        Some(victim)
    }
}

/// What was evicted.
#[derive(Debug)]
struct Victim {
    /// Where the first of it was.
    replicas: Placements,
    bytes: u64,
    objects: u64,
}
