//! The master's part in eviction: when, how much, and what becomes of the space. The policy chooses the
//! objects.
//!
//! There are two reasons to evict. Above the high watermark, puts evict a little and timeouts the rest, down
//! to the low mark; and a put that finds no room evicts what makes room for it, see `room.rs`.

use core::time::Duration;

use te_core::Instant;

use super::Master;
use crate::message::{EvictionReport, Kept, NextVictim, Pin, RetentionChange, TtlChange};
use crate::{ErrorCode, FullKey, Key, TenantNo};

/// How long eviction at the watermark pauses after it found nothing to evict.
const EVICTION_RETRY: Duration = Duration::from_millis(10);

impl Master {
    /// How many keys of a batch to be put, from its beginning, were put again soon after their eviction: all
    /// keys up to the last such key, for it could not have been read without those before it. See
    /// [`Place::returning`](crate::Place::returning).
    pub fn returning<'a>(&self, keys: impl Iterator<Item = impl Into<FullKey<'a>>>) -> usize {
        self.objects.returning(keys.map(Into::into))
    }

    /// What eviction did and would do, and what keeps objects from it: counters and gauges, in O(1).
    #[must_use]
    pub fn eviction(&self) -> EvictionReport {
        let counts = self.objects.counts();
        EvictionReport {
            policy: self.config.eviction,
            candidates: counts.candidates.into(),
            kept_leased: counts.leased_set.into(),
            kept_soft_pinned: counts.soft.into(),
            kept_hard_pinned: counts.hard.into(),
            kept_by_group: counts.held_by_group.into(),
            kept_unfinished: self.objects.processing_len().into(),
            hard_pinned_bytes: counts.hard_bytes,
            groups: counts.groups as u64,
            used_bytes: self.segments.used_bytes(),
            high_mark_bytes: self.high_mark() as u64,
            low_mark_bytes: self.low_mark(),
            evictions_total: self.stats.evictions_total,
            evicted_bytes_total: self.stats.evicted_bytes_total,
            starved_total: self.stats.evictions_starved_total,
            looks_total: counts.looks,
            kept_leased_total: counts.why.leased_total,
            kept_soft_pinned_total: counts.why.soft_kept_total,
            soft_pins_decayed_total: counts.why.soft_decayed_total,
            soft_pins_revived_total: counts.why.soft_revived_total,
            returned_total: counts.why.returned_total,
            ..self.report
        }
    }

    /// Calls `each` with the objects of a tenant in the order of eviction, until it returns false. Some of
    /// them may be leased: they would move to the leased set.
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
                leased: self.objects.lease_end(index).max(self.lease_floor) > now,
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
        let leased = self.objects.lease_end(index).max(self.lease_floor) > now;
        Ok(kept.or(leased.then_some(Kept::Leased)))
    }

    /// Changes how long an object is kept.
    ///
    /// # Errors
    /// `ObjectNotFound`, also of an object that is on a disk alone; `ReplicaIsNotReady` while it is being
    /// written; `InvalidParams` for a time to live of
    /// 0 and for a validity of a soft pin that is 0, longer than 30 days, or of an object that has no soft
    /// pin then; `PinnedShareReached` when no more bytes may be pinned for good. The object is as before
    /// then.
    pub fn change_retention<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        change: &RetentionChange,
    ) -> Result<(), ErrorCode> {
        let key = key.into();
        let index = self.objects.find(key).filter(|index| !self.objects.is_expired(now, *index));
        let index = index.ok_or(ErrorCode::ObjectNotFound)?;
        let entry = self.objects.entry(index);
        if !entry.is_complete() {
            return Err(ErrorCode::ReplicaIsNotReady);
        }
        let pin = self.objects.changed_pin(index, change).ok_or(ErrorCode::InvalidParams)?;
        let pins = pin == Pin::Hard && self.objects.pin_of(index) != Pin::Hard;
        if pins && !self.may_pin(key.tenant, entry.len) {
            return Err(ErrorCode::PinnedShareReached);
        }
        if change.ttl != TtlChange::Keep {
            // A disk knows no times to live: a copy there would outlive the object.
            self.unshelve_at(index);
        }
        self.objects.change(now, index, pin, change);
        Ok(())
    }

    /// Whether a tenant may pin `len` bytes more for good. The tenant's share is taken of its quota; and of
    /// the share of all bytes, the guarantees of the others are kept.
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
        let others = self.objects.usages().iter().enumerate().filter(|(no, _)| *no != tenant.index());
        let taken: f64 =
            others.map(|(_, usage)| (usage.hard_bytes as f64).max(most(usage.guaranteed_bytes))).sum();
        taken + pinned <= most(capacity)
    }

    /// Whether a tenant may have one more object of `bytes`, all replicas together.
    pub(super) fn has_quota(&self, tenant: TenantNo, bytes: u64) -> bool {
        let held = self.pending_release.charged(tenant) + self.tasks.reserved(tenant);
        self.objects.usage(tenant).has_room(bytes, held)
    }

    fn high_mark(&self) -> f64 {
        self.segments.capacity_bytes() as f64 * self.config.eviction_high_watermark
    }

    pub(super) fn low_mark(&self) -> u64 {
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
                // Everything is leased, pinned or being written, or space above the mark is pending release:
                // the next put or timeout tries again.
                self.evicting = false;
                self.evict_again_at = now + EVICTION_RETRY;
                return;
            }
        }
    }

    /// Evicts one object, of the tenant that has to give. Dropping an extra replica does not change the
    /// number of objects.
    pub(super) fn evict_one(&mut self, now: Instant, tenant: TenantNo) -> bool {
        let victim = self.next_victim(now, Some(tenant));
        victim.map(|(gives, index)| self.evict_at(gives, index)).is_some()
    }

    /// Evicts one object with its group; returns objects and bytes.
    pub(super) fn evict_next(&mut self, now: Instant) -> Option<(u64, u64)> {
        self.evict(now, None).map(|victim| (victim.objects, victim.bytes))
    }

    /// Evicts from the tenant that is furthest above its guarantee; if none is above, from the tenant that
    /// the put is for.
    fn evict(&mut self, now: Instant, tenant: Option<TenantNo>) -> Option<Victim> {
        if let Some((_, bytes)) = self.shed_extra(now, |_, _| true) {
            return Some(Victim { bytes, objects: 0 });
        }
        let victim = self.next_victim(now, tenant);
        if victim.is_none() {
            self.note_starved();
        }
        victim.map(|(gives, index)| self.evict_at(gives, index))
    }

    /// Notes that eviction was wanted and nothing could be evicted.
    pub(super) fn note_starved(&mut self) {
        self.stats.evictions_starved_total += u64::from(!self.starved);
        self.starved = true;
    }

    /// The next object to evict, and its tenant: of the tenant that is furthest above its guarantee, as long
    /// as it does not fall below it; else of the tenant that the put is for. [`Self::evict_at`] evicts it.
    pub(super) fn next_victim(&mut self, now: Instant, tenant: Option<TenantNo>) -> Option<(TenantNo, u32)> {
        if self.has_unknown_leases(now) {
            return None;
        }
        self.objects.settle(now);
        if self.objects.is_single() {
            let only = TenantNo::DEFAULT;
            return Some((only, self.victim_of(now, only)?));
        }
        while let Some(most) = self.objects.furthest_over(now) {
            let asker = tenant.unwrap_or(TenantNo::MAX);
            let spare = self.spare(most, asker);
            let victim = self.victim_of(now, most);
            match victim.filter(|index| self.objects.charge_with_group(*index) <= spare) {
                Some(index) => return Some((most, index)),
                None => self.objects.starve(most, now + EVICTION_RETRY),
            }
        }
        let tenant = tenant?;
        Some((tenant, self.victim_of(now, tenant)?))
    }

    /// The object that a tenant's policy evicts next, of those that are not leased.
    pub(super) fn victim_of(&mut self, now: Instant, tenant: TenantNo) -> Option<u32> {
        if self.has_unknown_leases(now) {
            return None;
        }
        self.objects.victim(now, tenant, self.config.evictions_per_call_max)
    }

    /// Evicts an object with its group.
    pub(super) fn evict_at(&mut self, tenant: TenantNo, index: u32) -> Victim {
        self.starved = false;
        self.report.soft_pinned_evicted_total += u64::from(self.objects.hold_of(index).0 == Pin::Soft);
        let mut victim = Victim { bytes: 0, objects: 0 };
        self.stats.evictions_to_disk_total += u64::from(self.is_shelved(index));
        let segments = &mut self.segments;
        self.objects.evict(index, |removed| {
            removed.replicas.as_slice().iter().for_each(|placed| {
                segments.free(placed);
            });
            victim.bytes += removed.len;
            victim.objects += 1;
        });
        self.objects.usage_mut(tenant).evictions_total += victim.objects;
        self.stats.evictions_total += victim.objects;
        self.stats.evicted_bytes_total += victim.bytes;
        self.report.groups_evicted_total += u64::from(victim.objects > 1);
        victim
    }
}

/// The objects that were evicted together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Victim {
    pub(super) bytes: u64,
    pub(super) objects: u64,
}
