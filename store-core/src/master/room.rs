//! Room for a new object: where it can be placed, and what can be evicted for it.
//!
//! Nothing is evicted before it is known that the put will get a place. So a put that cannot succeed (every
//! segment is excluded, or closed, or too small; the quota is pinned; the objects that could be evicted are
//! on other segments) changes nothing, and the error says why.
//!
//! ```text
//!   any segment that the put allows?  ─ no ─▶ the error
//!        │ yes
//!   free space ─▶ the next victim, where it makes room ─▶ space that is spared (slow start, out of reach)
//!                      ─▶ victims in the order of eviction, of which some make a range that is long enough
//!        │ a place                                                       │ none
//!   quota and count: the tenant's own objects, if enough can go          ▼
//!                                                              nothing was evicted: no room for now
//! ```

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use te_core::Instant;

use super::Master;
use crate::allocator::clearing::{Clearing, makes_room_alone};
use crate::allocator::{Allocator, Block};
use crate::chunks::stored_len;
use crate::codec::Short;
use crate::event::Event;
use crate::message::{Pin, PutOptions, REPLICAS_MAX};
use crate::objects::charge;
use crate::placement::{PlaceRequest, Spared};
use crate::segments::{HELD, Placed, Segments};
use crate::{ErrorCode, Placement, SegmentNo, TenantNo};

/// Objects that are examined, in the order of eviction, to find some that make a range together.
const LOOKS_MAX: u32 = 4_096;

/// Limit on the bytes of passed-over objects that are evicted, as a multiple of the length that had no room.
/// Long objects that follow short ones then mostly find free room, and a put examines few objects that
/// earlier puts have examined without success.
const PASSED_FACTOR: u64 = 3;
/// A further limit on these bytes, as a part of the capacity.
const PASSED_POOL_DIVISOR: u64 = 64;

/// Objects that one put evicts because the limit on objects or on metadata is reached: keys differ in length.
const EVICTIONS_FOR_COUNT_MAX: usize = 8;

/// What a put still has to evict, once it has a place, so that its tenant and the store stay within their
/// limits.
#[derive(Debug, Default)]
pub(super) struct Price {
    /// Objects of the tenant, with their generations, that are enough for its quota. Empty: the quota has
    /// room.
    own: Vec<(u32, u64)>,
    /// The limit on objects or on metadata is reached.
    count: bool,
}

/// The eviction that makes room for a put for which no single object does.
struct Cleared {
    /// The segment that gets room.
    no: SegmentNo,
    /// Blocks of the segment that make room when they are freed.
    blocks: Vec<Block>,
    /// Objects before the last of these in the policy's order, with their generations.
    passed: Vec<(u32, u64)>,
}

impl Price {
    const fn is_own(&self) -> bool {
        !self.own.is_empty()
    }
}

impl Master {
    /// Determines what has to be evicted for the quota and the number of objects, and whether it can be.
    /// Nothing is evicted yet.
    ///
    /// # Errors
    /// `TenantQuotaExceeded`: the object is larger than the quota, or not enough of the tenant's objects can
    /// be evicted; `KeysUltraLimit`, `MetadataFull`: a limit is reached, and nothing can be evicted.
    pub(super) fn price(&mut self, now: Instant, tenant: TenantNo, len: u64) -> Result<Price, ErrorCode> {
        let bytes = charge(stored_len(len), 1);
        let own = if self.has_quota(tenant, bytes) {
            Some(Vec::new())
        } else {
            self.own_to_give(now, tenant, bytes)
        };
        let Some(own) = own else {
            self.objects.usage_mut(tenant).refusals_total += 1;
            return Err(ErrorCode::TenantQuotaExceeded);
        };
        let full = self.is_metadata_full();
        let count = full || self.objects.len() >= self.config.objects_max;
        if count && own.is_empty() && self.next_victim(now, Some(tenant)).is_none() {
            if !full {
                return Err(ErrorCode::KeysUltraLimit);
            }
            self.stats.puts_metadata_full_total += 1;
            if !core::mem::replace(&mut self.metadata_reported, true) {
                let (bytes, bytes_max) = (self.metadata_bytes(), self.config.metadata_bytes_max);
                self.emit(|| Event::MetadataFull { bytes, bytes_max });
            }
            return Err(ErrorCode::MetadataFull);
        }
        self.metadata_reported &= full;
        Ok(Price { own, count })
    }

    /// Evicts what [`Self::price`] determined, now that the put has its place.
    pub(super) fn pay(&mut self, now: Instant, tenant: TenantNo, len: u64, price: &Price) {
        let bytes = charge(stored_len(len), 1);
        for (index, generation) in &price.own {
            if self.has_quota(tenant, bytes) {
                break;
            }
            // Some of them may have been evicted already, to make room for the put.
            if self.is_there(*index, *generation) {
                self.evict_at(tenant, *index);
            }
        }
        for _ in 0..EVICTIONS_FOR_COUNT_MAX {
            let over = self.objects.len() >= self.config.objects_max || self.is_metadata_full();
            if !price.count || !over || !self.evict_one(now, tenant) {
                break;
            }
        }
    }

    /// Memory of objects, unfinished puts and leases that can be returned, bytes.
    fn metadata_bytes(&self) -> u64 {
        (self.objects.live_bytes() + self.shelf.live_bytes() + self.writers.live_bytes() + self.lease_bytes)
            as u64
    }

    pub(super) fn is_metadata_full(&self) -> bool {
        self.metadata_bytes() >= self.config.metadata_bytes_max
    }

    /// Places for the replicas of a new object; at least one.
    ///
    /// # Errors
    /// One of [`ErrorCode::is_no_room`]. Nothing was evicted then.
    pub(super) fn place(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        len: u64,
        options: &PutOptions,
        price: &Price,
    ) -> Result<Short<Placed, REPLICAS_MAX>, ErrorCode> {
        let placement = &options.placement;
        let mut near = Short::of(SegmentNo::NONE);
        if let Some(node) = placement.near.and_then(|node| self.nodes.get(node)) {
            // The first segments are enough: a node usually has one.
            let _ = node.segments.iter().try_for_each(|no| near.push(*no));
        }
        let mut request = PlaceRequest { now, len, tag: HELD, placement, near, spared: Spared::Alone };
        let mut placed = Short::new();
        let first = match self.segments.place(&request, &[]) {
            Some(first) => first,
            None => self.place_by_eviction(now, tenant, len, placement, price)?,
        };
        let _ = placed.push(first);
        // Further replicas are optional: nothing is evicted for them.
        while placed.len() < usize::from(options.replicas)
            && self.has_quota(tenant, charge(len, placed.len() + 1))
        {
            request.spared = Spared::Alone;
            let mut next = self.segments.place(&request, &placed);
            if next.is_none() {
                request.spared = Spared::New;
                next = self.segments.place(&request, &placed);
            }
            let Some(next) = next else { break };
            let _ = placed.push(next);
        }
        Ok(placed)
    }

    fn place_by_eviction(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        len: u64,
        placement: &Placement,
        price: &Price,
    ) -> Result<Placed, ErrorCode> {
        self.segments.could_hold(len, placement)?;
        let request = |spared| PlaceRequest {
            now,
            len,
            tag: HELD,
            placement,
            near: Short::of(SegmentNo::NONE),
            spared,
        };
        if let Some(placed) = self.place_at_next_victim(now, tenant, &request(Spared::Alone), price) {
            return Ok(placed);
        }
        // Space that should be spared is better than an eviction that would not help.
        if let Some(placed) = self.segments.place(&request(Spared::New), &[]) {
            return Ok(placed);
        }
        if let Some(Cleared { no, blocks, passed }) = self.clearing(now, tenant, &request(Spared::New), price)
        {
            self.evict_blocks(now, no, &blocks);
            if let Some(placed) = self.segments.place_on(no, &request(Spared::New)) {
                self.evict_passed(now, no, len, &passed);
                return Ok(placed);
            }
        }
        self.segments.place(&request(Spared::All), &[]).ok_or(ErrorCode::NoAvailableHandle)
    }

    /// The usual case, a store that is full of objects of similar length: the next victim alone makes room.
    /// If there is an extra replica that is not leased, it is the next victim.
    fn place_at_next_victim(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        request: &PlaceRequest<'_>,
        price: &Price,
    ) -> Option<Placed> {
        if let Some((was, _)) = self.shed_extra(now, |segments, extra| makes_room(segments, extra, request)) {
            return self.segments.place_on(was.segment, request);
        }
        // A tenant that has to give up an object of its own in any case gives it here.
        let own = price.is_own().then_some(tenant);
        let (gives, index) = match own {
            Some(own) => (own, self.victim_of(now, own)?),
            None => match self.next_victim(now, Some(tenant)) {
                Some(next) => next,
                None => {
                    self.note_starved();
                    return None;
                }
            },
        };
        if self.objects.hold_of(index).0 != Pin::None {
            return None;
        }
        let mut replicas = self.objects.entry(index).replicas.as_slice().iter();
        let no = replicas.find(|placed| makes_room(&self.segments, placed, request))?.segment;
        let victim = self.evict_at(gives, index);
        self.report.evicted_for_room_total += victim.objects;
        self.segments.place_on(no, request)
    }

    /// Blocks of one segment, of objects that can be evicted for this tenant's put, that make room when they
    /// are freed, and the objects that were looked at before the last of them, wherever they are.
    fn clearing(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        request: &PlaceRequest<'_>,
        price: &Price,
    ) -> Option<Cleared> {
        if self.has_unknown_leases(now) {
            return None;
        }
        self.objects.settle(now);
        // First the tenant's own objects, if it has to give in any case; then those of the tenants furthest
        // above their guarantees.
        let mut givers = Vec::new();
        if price.is_own() {
            givers.push(tenant);
        }
        givers
            .extend(self.objects.givers().into_iter().filter(|giver| !(price.is_own() && *giver == tenant)));
        if !givers.contains(&tenant) {
            givers.push(tenant);
        }
        let mut clearings: BTreeMap<SegmentNo, Clearing> = BTreeMap::new();
        let mut looks = LOOKS_MAX.min(self.config.evictions_per_call_max);
        let mut passed = Vec::new();
        for giver in givers {
            let mut left = self.spare(giver, tenant);
            let mut found = None;
            self.objects.preview_all(giver, &mut |index| {
                if looks == 0 {
                    return false;
                }
                looks -= 1;
                if self.objects.lease_end(index) > now {
                    return true;
                }
                let Some(rest) = left.checked_sub(self.objects.charge_with_group(index)) else { return true };
                left = rest;
                for placed in self.objects.entry(index).replicas.as_slice() {
                    if !self.segments.would_serve(placed.segment, request) {
                        continue;
                    }
                    let Some(allocator) = self.segments.allocator(placed.segment) else { continue };
                    let clearing = clearings.entry(placed.segment).or_default();
                    found = clearing
                        .add(allocator, placed.block(), request.len)
                        .map(|blocks| (placed.segment, blocks));
                    if found.is_some() {
                        return false;
                    }
                }
                passed.push((index, self.objects.entry(index).generation));
                true
            });
            if let Some((no, blocks)) = found {
                return Some(Cleared { no, blocks, passed });
            }
            if looks == 0 {
                return None;
            }
        }
        None
    }

    fn evict_blocks(&mut self, now: Instant, no: SegmentNo, blocks: &[Block]) {
        for block in blocks {
            // An object that was evicted with its group is gone.
            let Some(index) = self.segments.allocator(no).and_then(|allocator| allocator.tag(*block)) else {
                continue;
            };
            debug_assert!(self.objects.lease_end(index) <= now, "a leased object was chosen");
            let victim = self.evict_at(self.objects.entry(index).tenant, index);
            self.report.evicted_for_room_total += victim.objects;
        }
    }

    /// Evicts what [`Self::clearing`] passed over on this segment, in the policy's order, up to a limit in
    /// bytes. These objects are the next victims in any case, and each further put of this length would
    /// examine them again.
    fn evict_passed(&mut self, now: Instant, no: SegmentNo, len: u64, passed: &[(u32, u64)]) {
        let of_pool = self.segments.capacity_bytes() / PASSED_POOL_DIVISOR;
        let mut left = len.saturating_mul(PASSED_FACTOR).min(of_pool);
        for (index, generation) in passed {
            if !self.is_there(*index, *generation) {
                continue;
            }
            // A pinned object is evicted only for a put that needs its space.
            if self.objects.hold_of(*index).0 != Pin::None {
                continue;
            }
            let entry = self.objects.entry(*index);
            if entry.replicas.as_slice().iter().all(|placed| placed.segment != no) {
                continue;
            }
            debug_assert!(self.objects.lease_end(*index) <= now, "a leased object was passed over");
            let Some(rest) = left.checked_sub(self.objects.charge_with_group(*index)) else { return };
            left = rest;
            let victim = self.evict_at(entry.tenant, *index);
            self.report.evicted_for_room_total += victim.objects;
        }
    }

    /// Bytes that a tenant can lose to a put of `asker`: exactly its guarantee stays, except for its own
    /// puts.
    pub(super) fn spare(&self, giver: TenantNo, asker: TenantNo) -> u64 {
        let usage = self.objects.usage(giver);
        if giver == asker || self.objects.is_single() {
            usage.bytes
        } else {
            usage.bytes.saturating_sub(usage.guaranteed_bytes)
        }
    }

    /// Objects of a tenant that can be evicted, enough for `bytes` more and one more object.
    fn own_to_give(&mut self, now: Instant, tenant: TenantNo, bytes: u64) -> Option<Vec<(u32, u64)>> {
        let usage = *self.objects.usage(tenant);
        if bytes > usage.quota_bytes || usage.quota_objects == 0 || self.has_unknown_leases(now) {
            return None;
        }
        self.objects.settle(now);
        let held = self.pending_release.charged(tenant) + self.tasks.reserved(tenant);
        let wanted = usage.bytes.saturating_add(held).saturating_add(bytes);
        let (mut given, mut objects) = (0u64, 0u32);
        let mut looks = self.config.evictions_per_call_max;
        let (mut own, mut enough) = (Vec::new(), false);
        self.objects.preview_all(tenant, &mut |index| {
            looks = looks.saturating_sub(1);
            if self.objects.lease_end(index) <= now {
                own.push((index, self.objects.entry(index).generation));
                given += self.objects.charge_with_group(index);
                objects += self.objects.company(index);
                enough = wanted.saturating_sub(given) <= usage.quota_bytes
                    && usage.objects.saturating_sub(objects) < usage.quota_objects;
            }
            !enough && looks > 0
        });
        enough.then_some(own)
    }
}

/// Whether there is room for the request when this replica alone is dropped.
fn makes_room(segments: &Segments, placed: &Placed, request: &PlaceRequest<'_>) -> bool {
    segments.would_serve(placed.segment, request)
        && segments
            .allocator(placed.segment)
            .is_some_and(|allocator| makes_room_alone(allocator, placed.block(), request.len))
}
