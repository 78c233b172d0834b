//! Promotion: an object that is read from a disk gets a replica in memory again. Its copy on the disk stays,
//! so that its next eviction costs nothing.
//!
//! ```text
//!   gets find it on a disk ──▶ a wish ──▶ an entry whose only replica is on the disk, and a task that copies it
//!                                              into memory ──▶ the replica in memory is the only one of the entry
//! ```
//!
//! An object is promoted when a get finds it behind another object of the same request, for then a prefix is
//! read from a disk and the next request of its kind will want all of it; otherwise when it is found a second
//! time. Only objects whose eviction loses nothing, or that the policy has given up, are evicted for it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::Master;
use super::tasks::Wish;
use crate::eviction::{BatchOrder, Place};
use crate::message::{Prefetched, Retention, TaskCause, TaskState};
use crate::objects::{KeyBytes, New, Placements};
use crate::segments::Placed;
use crate::session::Leases;
use crate::{ErrorCode, FullKey, SegmentNo, TaskId, TenantNo};

/// Wishes that wait; further ones are not noted.
const WISHES_MAX: usize = 4_096;
/// Unfinished promotions.
const UNFINISHED_MAX: u32 = 1_024;
/// Objects that are evicted for one promotion.
const EVICTIONS_MAX: u32 = 4;
/// How often a disk has to be hit, if the object does not follow another one.
const HITS_MIN: u8 = 2;

/// What is to be promoted.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Promotions {
    /// Records, with the generations of their objects.
    wishes: VecDeque<(u32, u64)>,
    /// The first object of the latest request, if it was found on a disk.
    first: Option<(u32, u64)>,
    /// Promotions that have not ended.
    pub(super) unfinished: u32,
}

impl Promotions {
    fn wish(&mut self, wish: (u32, u64)) {
        if self.wishes.len() < WISHES_MAX && self.wishes.back() != Some(&wish) {
            self.wishes.push_back(wish);
        }
    }

    fn has_work(&self) -> bool {
        !self.wishes.is_empty() && self.unfinished < UNFINISHED_MAX
    }
}

impl Master {
    /// A get has found an object on a disk alone.
    pub(super) fn note_disk_hit(&mut self, record: u32, order: BatchOrder) {
        let hits = self.shelf.hit(record);
        let wish = (record, self.shelf.record(record).generation);
        if order == BatchOrder::Follows {
            let first = self.promotions.first.take();
            first.into_iter().for_each(|first| self.promotions.wish(first));
            self.promotions.wish(wish);
        } else if hits >= HITS_MIN {
            self.promotions.wish(wish);
        } else {
            self.promotions.first = Some(wish);
        }
    }

    /// Where an object is, which is leased if it is in memory. One that is on a disk alone is promoted as
    /// soon as there is time and room.
    pub fn prefetch<'k>(&mut self, now: Instant, key: impl Into<FullKey<'k>>) -> Prefetched {
        self.find_or_promote(now, key.into()).map_or_else(|elsewhere| elsewhere, |_| Prefetched::InMemory)
    }

    /// As [`Self::prefetch`], for a connection that can return the lease.
    pub(crate) fn prefetch_for(&mut self, now: Instant, key: FullKey<'_>, leases: &mut Leases) -> Prefetched {
        match self.find_or_promote(now, key) {
            Ok(index) => {
                leases.note(now, index, self.objects.entry(index).generation, now + self.lease());
                Prefetched::InMemory
            }
            Err(elsewhere) => elsewhere,
        }
    }

    /// Leases an object that is in memory, and returns its index.
    ///
    /// # Errors
    /// It is somewhere else.
    fn find_or_promote(&mut self, now: Instant, key: FullKey<'_>) -> Result<u32, Prefetched> {
        let Some(index) = self.objects.find(key) else {
            let record = self.readable_record(key).ok_or(Prefetched::Absent)?;
            self.promotions.wish((record, self.shelf.record(record).generation));
            return Err(Prefetched::Coming);
        };
        if !self.vouches_for(index) || self.objects.is_expired(now, index) {
            return Err(Prefetched::Absent);
        }
        let mut replicas = self.objects.entry(index).replicas.as_slice().iter();
        if !replicas.any(|placed| self.segments.get(placed.segment).is_some()) {
            // It is being promoted.
            return Err(Prefetched::Coming);
        }
        self.objects.hold(now, index, now + self.lease(), false);
        Ok(index)
    }

    /// When [`Self::promote`] has something to do: at once, or not.
    pub(super) fn promotions_due(&self) -> Option<Instant> {
        self.promotions.has_work().then_some(Instant::ZERO)
    }

    /// Begins the promotions that were wished for.
    pub(super) fn promote(&mut self, now: Instant) {
        while self.promotions.has_work()
            && let Some((record, generation)) = self.promotions.wishes.pop_front()
        {
            if self.shelf.record(record).generation == generation {
                self.promote_one(now, record);
            }
        }
    }

    fn promote_one(&mut self, now: Instant, index: u32) {
        let record = self.shelf.record(index);
        let key = FullKey { tenant: record.tenant, key: record.key.as_slice() };
        let readable = self.disks.get(record.disk).is_some_and(crate::disks::Disk::is_here);
        if !readable || self.objects.find(key).is_some() || self.is_metadata_full() {
            return;
        }
        let (len, generation, checksum) = (u64::from(record.len), record.generation, record.checksum);
        let (tenant, key) = (record.tenant, KeyBytes::new(key.key));
        let on_disk = Placed::on_disk(record.disk, record.locator);
        let place = Place { returning: true, ..Place::ALONE };
        let new = New {
            key: FullKey { tenant, key: key.as_slice() },
            len,
            generation,
            nonce: 0,
            replicas: Placements::new(&[on_disk]),
            place,
            retention: Retention::DEFAULT,
            replaces: false,
        };
        let entry = self.objects.insert(now, new);
        self.objects.complete(now, entry, checksum, false);
        let wish = Wish { index: entry, source: None, target: None, cause: TaskCause::Promotion };
        for _ in 0..=EVICTIONS_MAX {
            match self.add_task(now, wish) {
                Ok(_) => {
                    self.promotions.unfinished += 1;
                    self.stats.promotions_total += 1;
                    return;
                }
                Err(error) if error.is_no_room() && self.evict_clean(now, tenant) => {}
                Err(_) => break,
            }
        }
        self.drop_from_memory(entry, None);
    }

    /// Evicts an object whose eviction loses nothing, or that the policy has given up. Returns whether there
    /// was one.
    fn evict_clean(&mut self, now: Instant, tenant: TenantNo) -> bool {
        if self.has_unknown_leases(now) {
            return false;
        }
        let gives = if self.objects.is_single() { Some(tenant) } else { self.objects.furthest_over(now) };
        let victim = gives.and_then(|gives| Some((gives, self.objects.clean_victim(now, gives)?)));
        victim.map(|(gives, index)| self.evict_at(gives, index)).is_some()
    }

    /// A disk is gone, or has another number now: what was being promoted from it is on the disk alone again.
    pub(super) fn promotions_lost_disk(&mut self, now: Instant, disk: SegmentNo) {
        if self.promotions.unfinished == 0 {
            return;
        }
        let mut lost = Vec::new();
        for (id, task) in self.tasks.from(TaskId::new(0)) {
            let of_disk = || {
                let entry = self.objects.entry(task.index);
                entry.replicas.as_slice().iter().any(|placed| placed.segment == disk)
            };
            let unfinished = task.cause == TaskCause::Promotion && !task.state.is_finished();
            if unfinished && self.is_there(task.index, task.generation) && of_disk() {
                lost.push((id, task.state == TaskState::Pending));
            }
        }
        for (id, quiet) in lost {
            self.end_attempt(now, id, ErrorCode::SegmentNotFound, quiet);
            self.finish_task(now, id, TaskState::Failed);
        }
    }

    /// A promotion has ended. Without a replica in memory, the object is on the disk alone again.
    pub(super) fn promotion_ended(&mut self, index: u32, generation: u64) {
        self.promotions.unfinished = self.promotions.unfinished.saturating_sub(1);
        if self.is_there(index, generation) {
            for disk in self.disks.iter() {
                self.objects.forget_disk(index, disk.no);
            }
            if self.objects.entry(index).replicas.as_slice().is_empty() {
                self.drop_from_memory(index, None);
            }
        }
    }
}
