//! Retention: what keeps an object (leases, pins, groups), its time to live, and which object is evicted
//! next.
//!
//! ```text
//!                 ┌── no pin ──▶ Candidate ◀───────────────▶ Leased
//!                 │                 ▲   │      leased when its turn came; back when the lease is over
//!                 │           decay │   │ read
//!   Processing ───┼── soft pin ─▶ Soft ◀┘        evicted when there are no candidates left
//!                 │
//!                 └── hard pin ─▶ Hard           never evicted
//!
//!   Candidate ── its turn comes soon ──▶ Leaving   copied to a disk, then evicted; back when it is read
//!
//!   of a group, unless pinned itself:  Member    one member is Candidate or Leased and stands for all
//! ```
//!
//! `change.rs` moves objects between these lists on request.
//!
//! A lease is kept in the entry alone: a get stores its end and, if it is the first one, moves the object in
//! the policy's order. Nothing is done when a lease ends, unless it kept the object from eviction.

mod change;

use alloc::collections::BTreeSet;
use core::cmp::Reverse;
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::groups::GroupId;
use super::{Entry, Objects, Order, Placements, State};
use crate::eviction::Eviction as _;
use crate::eviction::Place;
use crate::message::{DiskCopy, Inherit, InheritPin, Pin, Retention};
use crate::{FullKey, TenantNo};

/// Limit on the members of a group: it is evicted at once.
pub(crate) const GROUP_MEMBERS_MAX: usize = 4_096;
/// Softly pinned objects that are examined for one victim.
const SOFT_LOOKS_MAX: u32 = 16;
/// Queued times that may name objects that are gone, before they are sorted out.
const TIMES_SLACK: usize = 64;

/// Properties that most objects do not have.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pin: Pin,
    /// How long a soft pin is valid after a read.
    soft_ttl: Duration,
    ttl: Option<Duration>,
    expires: Option<Instant>,
    soft_until: Instant,
    /// The queued time at which the soft pin is looked at; not after `soft_until`.
    wakes: Instant,
    group: Option<GroupId>,
    /// The position in the list of the group's members.
    at: u32,
    disk: DiskCopy,
}

impl Kept {
    /// The object has no property that most objects do not have.
    fn is_plain(&self) -> bool {
        self.pin == Pin::None && self.ttl.is_none() && self.group.is_none() && self.disk == DiskCopy::Auto
    }
}

/// An object that was removed.
#[derive(Debug)]
pub(crate) struct Removed {
    pub(crate) tenant: TenantNo,
    pub(crate) len: u64,
    pub(crate) generation: u64,
    /// Whether it was readable.
    pub(crate) complete: bool,
    /// Number of leases that may be valid and were not returned; 0: none, or an unknown number.
    pub(crate) leases: u8,
    pub(crate) replicas: Placements,
}

/// Counters of why objects were kept.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Why {
    /// Objects that entered the leased set.
    pub(crate) leased_total: u64,
    /// Softly pinned objects that were passed over because of a lease, or of other members of their group.
    pub(crate) soft_kept_total: u64,
    /// Soft pins that ran out.
    pub(crate) soft_decayed_total: u64,
    /// Soft pins that a read renewed after they had run out.
    pub(crate) soft_revived_total: u64,
    /// Keys that were put again while the policy remembered them.
    pub(crate) returned_total: u64,
}

/// Numbers of objects by state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) candidates: u32,
    pub(crate) leased_set: u32,
    pub(crate) soft: u32,
    pub(crate) hard: u32,
    pub(crate) held_by_group: u32,
    pub(crate) groups: usize,
    pub(crate) leased: u32,
    pub(crate) hard_bytes: u64,
    pub(crate) looks: u64,
    pub(crate) why: Why,
}

impl Objects {
    /// The object was written completely. `follows`: after another one of the same batch.
    pub(crate) fn complete(&mut self, now: Instant, index: u32, checksum: u32, follows: bool) {
        self.note_change(index);
        self.detach(index);
        let entry = &mut self.entries[index];
        entry.checksum = checksum;
        entry.time = now;
        self.complete_bytes += entry.len;
        self.processing_bytes -= entry.len;
        let place = Place { follows, last: entry.has(Entry::LAST), returning: entry.has(Entry::RETURNING) };
        self.why.returned_total += u64::from(place.returning);
        let generation = entry.generation;
        let Some(kept) = self.kept_mut(index) else { return self.release(index, place) };
        kept.soft_until = now + kept.soft_ttl;
        kept.expires = kept.ttl.map(|ttl| now + ttl);
        let kept = *kept;
        if let Some(expires) = kept.expires {
            self.mortal += 1;
            self.expire_at(expires, generation, index);
        }
        match kept.pin {
            Pin::None => self.release(index, place),
            Pin::Soft => {
                self.attach(index, State::Soft);
                self.wake_at(kept.soft_until, index);
            }
            Pin::Hard => self.attach(index, State::Hard),
        }
        self.wake(kept.group);
    }

    /// Leases a complete object until `until`, or longer if it is leased longer.
    pub(crate) fn lease(&mut self, now: Instant, index: u32, until: Instant, follows: bool) {
        let entry = &mut self.entries[index];
        let before = entry.leased_until();
        let until = before.max(until);
        entry.time = until;
        entry.count_lease(before <= now);
        self.leases.moved(now, before, until);
        if entry.has(Entry::KEPT) {
            return self.lease_kept(now, index, until, follows);
        }
        self.used(index, before <= now, follows);
    }

    /// Holds a complete object until `until`, as a lease does, without counting as a use. `again`: an
    /// existing hold is extended, and still ends with one return.
    pub(crate) fn hold(&mut self, now: Instant, index: u32, until: Instant, again: bool) {
        let entry = &mut self.entries[index];
        let before = entry.leased_until();
        let until = before.max(until);
        entry.time = until;
        // A hold whose last return came early is counted anew, because an end that is counted needs a lease.
        if !again || before == Instant::ZERO {
            entry.count_lease(before <= now);
        }
        self.leases.moved(now, before, until);
        if let Some(id) = self.group_of(index) {
            self.groups.with(id, |group| group.leased_until = group.leased_until.max(until));
        }
    }

    /// A reader returns a lease that has not run out, or a node returns a hold. With the last of them the
    /// object's lease is over. The lease of a group as a whole stays until it runs out. Returns whether the
    /// object is still there.
    pub(crate) fn return_lease(&mut self, now: Instant, index: u32, generation: u64) -> bool {
        let entry = &mut self.entries[index];
        if entry.generation != generation {
            return false;
        }
        let left = entry.leases_left();
        if !entry.is_leased(now) || left == 0 {
            return true;
        }
        if left > 1 {
            entry.marks -= Entry::LEASE;
            return true;
        }
        let end = core::mem::replace(&mut entry.time, now);
        entry.marks -= Entry::LEASE;
        self.leases.ended(end);
        if self.entries[index].state == State::Leased && self.lease_end(index) <= now {
            self.settle_one(now, index);
        }
        true
    }

    /// When the last lease of an object and of the members of its group ends.
    pub(crate) fn lease_end(&self, index: u32) -> Instant {
        match self.group_of(index).and_then(|id| self.groups.get(id)) {
            Some(group) => group.leased_until,
            None => self.entries[index].leased_until(),
        }
    }

    /// Returns the objects whose lease or soft pin is over to the policy.
    pub(crate) fn settle(&mut self, now: Instant) {
        self.leases.advance(now);
        while let Some(&Reverse((at, generation, index))) = self.wakings.peek() {
            if at > now {
                return;
            }
            self.wakings.pop();
            if self.is_waking(at, generation, index) {
                self.settle_one(now, index);
            }
        }
    }

    fn settle_one(&mut self, now: Instant, index: u32) {
        let end = match self.entries[index].state {
            State::Leased => self.lease_end(index),
            State::Soft => self.kept.get(&index).map_or(now, |kept| kept.soft_until),
            _ => return,
        };
        if end > now {
            // The object was read since.
            return self.wake_at(end, index);
        }
        match self.entries[index].state {
            State::Leased => {
                self.leased -= 1;
                self.entries[index].state = State::Candidate;
                let (order, nodes) = self.order(index);
                order.policy.put_back(nodes, index);
                self.fed(index);
            }
            _ => {
                self.detach(index);
                self.why.soft_decayed_total += 1;
                self.release(index, Place { returning: true, ..Place::ALONE });
                self.wake(self.group_of(index));
            }
        }
    }

    /// The next object of a tenant to evict. Examines at most `looks_max` candidates and moves those that are
    /// leased to the leased set.
    pub(crate) fn victim(&mut self, now: Instant, tenant: TenantNo, looks_max: u32) -> Option<u32> {
        if let Some(index) = self.leaving_victim(now, tenant) {
            return Some(index);
        }
        if let Some(index) = self.coldest(now, tenant, looks_max) {
            return Some(index);
        }
        let left = self.orders[tenant.index()].policy.len();
        if left > 0 { None } else { self.soft_victim(now, tenant) }
    }

    /// The policy's next choice that is not leased. Those before it move to the leased set.
    pub(super) fn coldest(&mut self, now: Instant, tenant: TenantNo, looks_max: u32) -> Option<u32> {
        for _ in 0..looks_max {
            let order = &mut self.orders[tenant.index()];
            let index = order.policy.victim(&mut self.nodes)?;
            let end = self.lease_end(index);
            if end <= now {
                return Some(index);
            }
            let order = &mut self.orders[tenant.index()];
            order.policy.remove(&mut self.nodes, index);
            self.entries[index].state = State::Leased;
            self.leased += 1;
            self.wake_at(end, index);
            self.why.leased_total += 1;
        }
        None
    }

    /// Evicts an object with its group.
    pub(crate) fn evict(&mut self, index: u32, mut each: impl FnMut(Removed)) {
        match self.group_of(index).and_then(|id| self.groups.get(id)) {
            None => each(self.evict_one(index)),
            Some(group) => {
                for member in group.members.clone() {
                    each(self.evict_one(member));
                }
            }
        }
    }

    /// How many keys of a batch of one tenant, from its beginning, were put again soon after their eviction:
    /// all keys up to the last such key.
    pub(crate) fn returning<'a>(&self, keys: impl Iterator<Item = FullKey<'a>>) -> usize {
        let mut keys = keys.peekable();
        let Some(first) = keys.peek() else { return 0 };
        let policy = &self.orders[first.tenant.index()].policy;
        // The policy remembers nothing, or has not evicted yet.
        if policy.memory_bytes() == 0 {
            return 0;
        }
        let known = |key: FullKey<'a>| policy.remembers(self.hash(key));
        keys.enumerate().filter(|(_, key)| known(*key)).last().map_or(0, |(at, _)| at + 1)
    }

    /// Whether a group has room for one more member.
    pub(crate) fn has_room(&self, tenant: TenantNo, retention: &Retention) -> bool {
        let group = retention.group.and_then(|id| self.groups.get(GroupId { tenant, id }));
        group.is_none_or(|group| group.members.len() < GROUP_MEMBERS_MAX)
    }

    /// Whether an object's time to live is over.
    pub(crate) fn is_expired(&self, now: Instant, index: u32) -> bool {
        self.entries[index].has(Entry::KEPT)
            && self.kept.get(&index).and_then(|kept| kept.expires).is_some_and(|at| at <= now)
    }

    /// An object whose time to live is over. Remove it before the next call.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<u32> {
        while let Some(&Reverse((at, generation, index))) = self.expiries.peek() {
            if at > now {
                return None;
            }
            self.expiries.pop();
            if self.is_expiry(at, generation, index) {
                return Some(index);
            }
        }
        None
    }

    /// The earliest end of a time to live.
    pub(crate) fn expiry(&self) -> Option<Instant> {
        self.expiries.peek().map(|Reverse((at, ..))| *at)
    }

    /// When there will be something to evict for all tenants, as far as leases decide it.
    pub(crate) fn evictable_at(&self) -> Option<Instant> {
        let leased = self.wakings.peek().filter(|_| self.leased > 0).map(|Reverse((at, ..))| *at);
        let mut soonest = leased;
        for (order, usage) in self.orders.iter().zip(&self.usage) {
            if !self.is_single() && !usage.gives() {
                continue;
            }
            if order.policy.len() + order.leaving.len() > 0 {
                return Some(Instant::ZERO);
            }
            let soft = order.soft.front().map(|index| self.lease_end(index));
            soonest = [soonest, soft].into_iter().flatten().min();
        }
        soonest
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            candidates: self.orders.iter().map(|order| order.policy.len() + order.leaving.len()).sum(),
            leased_set: self.leased,
            soft: self.soft,
            hard: self.lists[State::Hard as usize].len(),
            held_by_group: self.groups.held(),
            groups: self.groups.len(),
            leased: self.leases.count(),
            hard_bytes: self.hard_bytes,
            looks: self.nodes.looks(),
            why: self.why,
        }
    }

    /// Calls `each` with a tenant's candidates in the order of eviction, until it returns false.
    pub(crate) fn preview(&self, tenant: TenantNo, each: &mut dyn FnMut(u32) -> bool) {
        let order = &self.orders[tenant.index()];
        if order.leaving.iter(&self.nodes).all(&mut *each) {
            order.policy.preview(&self.nodes, each);
        }
    }

    /// Calls `each` with all objects of a tenant that could be evicted but for leases, in the order of
    /// eviction, until it returns false: the candidates, then softly pinned objects.
    pub(crate) fn preview_all(&self, tenant: TenantNo, each: &mut dyn FnMut(u32) -> bool) {
        let order = &self.orders[tenant.index()];
        let mut goes_on = true;
        self.preview(tenant, &mut |index| {
            goes_on = each(index);
            goes_on
        });
        // A group is listed once, however many of its members are pinned.
        let mut groups = BTreeSet::new();
        for index in order.soft.iter(&self.nodes) {
            let id = self.group_of(index);
            let stays =
                id.and_then(|id| self.groups.get(id)).is_some_and(|group| group.hard + group.unfinished > 0);
            if !goes_on {
                return;
            }
            if !stays && id.is_none_or(|id| groups.insert(id.id)) {
                goes_on = each(index);
            }
        }
    }

    /// The members of an object's group, if it has one.
    pub(super) fn members(&self, index: u32) -> Option<&[u32]> {
        self.group_of(index).and_then(|id| self.groups.get(id)).map(|group| &*group.members)
    }

    /// The number of objects that are evicted with an object, itself included.
    pub(crate) fn company(&self, index: u32) -> u32 {
        self.group_of(index).and_then(|id| self.groups.get(id)).map_or(1, |group| group.members.len() as u32)
    }

    /// The pin that holds an object now, and whether its group holds it.
    pub(crate) fn hold_of(&self, index: u32) -> (Pin, bool) {
        let group = self.group_of(index).and_then(|id| self.groups.get(id));
        let held = group.is_some_and(|group| !group.is_free());
        match self.entries[index].state {
            State::Soft => (Pin::Soft, held),
            State::Hard => (Pin::Hard, held),
            _ => (Pin::None, held),
        }
    }

    /// The retention of an upsert that asks for `wanted` and is to replace this object.
    pub(crate) fn inherited(
        &self,
        now: Instant,
        index: u32,
        inherit: Inherit,
        wanted: Retention,
    ) -> Retention {
        let Some(kept) = self.kept.get(&index).filter(|_| self.entries[index].has(Entry::KEPT)) else {
            return wanted;
        };
        // A soft pin that has run out may not have been noticed yet.
        let pin = if kept.pin == Pin::Soft && kept.soft_until <= now { Pin::None } else { kept.pin };
        let takes_pin = match inherit.pin {
            InheritPin::No => false,
            InheritPin::Hard => pin == Pin::Hard,
            InheritPin::Stronger => pin > wanted.pin,
        };
        let mut retention = wanted;
        if takes_pin {
            let soft_ttl_ms = u32::try_from(kept.soft_ttl.as_millis()).ok();
            retention.pin = pin;
            retention.soft_pin_ttl_ms = soft_ttl_ms.filter(|_| pin == Pin::Soft);
        }
        if inherit.group && retention.group.is_none() {
            retention.group = kept.group.map(|group| group.id);
        }
        retention
    }

    /// The properties of an object that is in no group's list yet.
    fn new_kept(&self, index: u32, retention: &Retention) -> Kept {
        let soft_ttl_ms = retention.soft_pin_ttl_ms;
        Kept {
            pin: retention.pin,
            soft_ttl: soft_ttl_ms.map_or(self.soft_pin_ttl, |ms| Duration::from_millis(ms.into())),
            ttl: retention.ttl_ms.map(|ms| Duration::from_millis(ms.into())),
            expires: None,
            soft_until: Instant::ZERO,
            wakes: Instant::ZERO,
            group: retention.group.map(|id| GroupId { tenant: self.entries[index].tenant, id }),
            at: 0,
            disk: retention.disk,
        }
    }

    /// Whether a complete object is to be copied to a disk now; asked once.
    pub(crate) fn takes_copy(&mut self, index: u32) -> bool {
        let now = |kept: &&mut Kept| kept.disk == DiskCopy::Now;
        let Some(kept) = self.kept_mut(index).filter(now) else { return false };
        kept.disk = DiskCopy::Auto;
        self.forget_plain(index);
        true
    }

    /// An object whose properties are those of most objects has no entry in `kept`.
    fn forget_plain(&mut self, index: u32) {
        if self.kept.get(&index).is_some_and(Kept::is_plain) {
            self.kept.remove(&index);
            self.entries[index].marks &= !Entry::KEPT;
        }
    }

    /// Stores the properties of a new object that most objects do not have.
    pub(super) fn keep(&mut self, index: u32, retention: &Retention) {
        let mut kept = self.new_kept(index, retention);
        if retention.pin == Pin::Hard {
            let Entry { len, tenant, .. } = self.entries[index];
            self.hard_bytes += len;
            self.usage[tenant.index()].hard_bytes += len;
        }
        if let Some(id) = kept.group {
            self.rest(id);
            self.groups.with(id, |group| {
                kept.at = group.members.len() as u32;
                group.members.push(index);
                group.unfinished += 1;
            });
        }
        self.kept.insert(index, kept);
    }

    /// Removes an object from its list, for good.
    pub(super) fn leave(&mut self, index: u32) {
        self.detach(index);
        if !self.entries[index].has(Entry::KEPT) {
            return;
        }
        let Some(kept) = self.kept.remove(&index) else { return };
        self.mortal -= u32::from(kept.expires.is_some());
        if kept.pin == Pin::Hard {
            let Entry { len, tenant, .. } = self.entries[index];
            self.hard_bytes -= len;
            self.usage[tenant.index()].hard_bytes -= len;
        }
        if let Some(id) = kept.group {
            let moved = self.groups.with(id, |group| {
                group.members.swap_remove(kept.at as usize);
                group.members.get(kept.at as usize).copied()
            });
            if let Some(moved) = moved.and_then(|moved| self.kept.get_mut(&moved)) {
                moved.at = kept.at;
            }
            self.wake(Some(id));
        }
    }

    fn lease_kept(&mut self, now: Instant, index: u32, until: Instant, follows: bool) {
        let Some(kept) = self.kept_mut(index) else { return };
        kept.soft_until = now + kept.soft_ttl;
        let kept = *kept;
        let mut fresh = true;
        if let Some(id) = kept.group {
            let before = self.groups.with(id, |group| {
                let before = group.leased_until;
                group.leased_until = before.max(until);
                before
            });
            fresh = before <= now;
        }
        if kept.pin == Pin::Soft && self.entries[index].state != State::Soft {
            if let Some(id) = kept.group {
                self.rest(id);
            }
            self.detach(index);
            self.attach(index, State::Soft);
            self.wake_at(kept.soft_until, index);
            self.why.soft_revived_total += 1;
            return;
        }
        let lead = kept.group.and_then(|id| self.groups.get(id)?.lead).unwrap_or(index);
        self.used(lead, fresh, follows);
        if lead != index {
            self.used(index, false, follows);
        }
    }

    /// An object is read. `fresh`: no other lease on it is valid.
    fn used(&mut self, index: u32, fresh: bool, follows: bool) {
        match self.entries[index].state {
            State::Candidate if fresh => {
                let (order, nodes) = self.order(index);
                order.policy.touch(nodes, index, follows);
            }
            State::Leaving => {
                self.stay(index);
                let (order, nodes) = self.order(index);
                order.policy.touch(nodes, index, follows);
            }
            State::Soft => self.entries[index].marks |= Entry::RENEWED,
            _ => {}
        }
    }

    fn soft_victim(&mut self, now: Instant, tenant: TenantNo) -> Option<u32> {
        for _ in 0..SOFT_LOOKS_MAX {
            let index = self.orders[tenant.index()].soft.front()?;
            self.nodes.look();
            let group = self.group_of(index).and_then(|id| self.groups.get(id));
            let stays = group.is_some_and(|group| group.hard > 0 || group.unfinished > 0);
            let renewed = self.entries[index].has(Entry::RENEWED);
            if !stays && !renewed && self.lease_end(index) <= now {
                return Some(index);
            }
            self.why.soft_kept_total += 1;
            self.entries[index].marks &= !Entry::RENEWED;
            self.rotate_soft(index);
        }
        None
    }

    fn rotate_soft(&mut self, index: u32) {
        let (Order { soft, .. }, nodes) = self.order(index);
        soft.unlink(nodes, index);
        soft.push_back(nodes, index);
    }

    fn evict_one(&mut self, index: u32) -> Removed {
        if self.entries[index].state == State::Leaving {
            self.stay(index);
        }
        if self.entries[index].state == State::Candidate {
            let hash = self.hash(self.entries[index].full_key());
            let (order, nodes) = self.order(index);
            order.policy.evict(nodes, index, hash);
            self.entries[index].state = State::Member;
            self.lead_lost(index);
        }
        self.remove(index)
    }

    /// The object may be evicted: alone, or with its group after [`Self::wake`].
    fn release(&mut self, index: u32, place: Place) {
        if self.group_of(index).is_some() {
            self.entries[index].state = State::Member;
            return;
        }
        let hash = self.hash(self.entries[index].full_key());
        self.entries[index].state = State::Candidate;
        let (order, nodes) = self.order(index);
        order.policy.insert(nodes, index, hash, place);
        self.fed(index);
    }

    /// Chooses a lead for a group that can be evicted.
    fn wake(&mut self, id: Option<GroupId>) {
        let Some(id) = id else { return };
        let Some(group) = self.groups.get(id).filter(|group| group.is_free() && group.lead.is_none()) else {
            return;
        };
        let Some(&lead) = group.members.first() else { return };
        self.groups.with(id, |group| group.lead = Some(lead));
        let hash = self.hash(self.entries[lead].full_key());
        self.entries[lead].state = State::Candidate;
        let (order, nodes) = self.order(lead);
        order.policy.insert(nodes, lead, hash, Place { returning: true, ..Place::ALONE });
        self.fed(lead);
    }

    /// Removes the lead of a group: the group cannot be evicted.
    fn rest(&mut self, id: GroupId) {
        if let Some(lead) = self.groups.get(id).and_then(|group| group.lead) {
            self.detach(lead);
            self.entries[lead].state = State::Member;
        }
    }

    /// Puts a readable object on the list of a state.
    fn attach(&mut self, index: u32, state: State) {
        let entry = &mut self.entries[index];
        entry.state = state;
        entry.marks &= !Entry::RENEWED;
        if state == State::Soft {
            let (order, nodes) = self.order(index);
            order.soft.push_back(nodes, index);
            self.soft += 1;
            self.fed(index);
        } else {
            self.lists[state as usize].push_back(&mut self.nodes, index);
        }
        if let Some(id) = self.group_of(index) {
            self.groups.with(id, |group| match state {
                State::Soft => group.soft += 1,
                State::Hard => group.hard += 1,
                _ => {}
            });
        }
    }

    /// Removes an object from its list. Its state is meaningless until it is set again.
    fn detach(&mut self, index: u32) {
        let state = self.entries[index].state;
        match state {
            State::Processing | State::Replacing => {
                self.lists[State::Processing as usize].unlink(&mut self.nodes, index);
            }
            State::Hard => self.lists[State::Hard as usize].unlink(&mut self.nodes, index),
            State::Leased => self.leased -= 1,
            State::Soft => {
                let (order, nodes) = self.order(index);
                order.soft.unlink(nodes, index);
                self.soft -= 1;
            }
            State::Candidate => {
                let (order, nodes) = self.order(index);
                order.policy.remove(nodes, index);
            }
            State::Leaving => self.unlist_leaving(index),
            State::Member | State::Vacant => {}
        }
        if let Some(id) = self.group_of(index) {
            self.groups.with(id, |group| match state {
                State::Processing | State::Replacing => group.unfinished -= 1,
                State::Soft => group.soft -= 1,
                State::Hard => group.hard -= 1,
                _ => {}
            });
            self.lead_lost(index);
        }
    }

    fn lead_lost(&mut self, index: u32) {
        if let Some(id) = self.group_of(index) {
            self.groups.with(id, |group| group.lead = group.lead.filter(|lead| *lead != index));
        }
    }

    fn group_of(&self, index: u32) -> Option<GroupId> {
        if !self.entries[index].has(Entry::KEPT) {
            return None;
        }
        self.kept.get(&index)?.group
    }

    fn kept_mut(&mut self, index: u32) -> Option<&mut Kept> {
        if !self.entries[index].has(Entry::KEPT) {
            return None;
        }
        self.kept.get_mut(&index)
    }

    /// Queues the end of an object's time to live. Sorts out objects that are gone, and times that were
    /// changed, before they outnumber the others.
    fn expire_at(&mut self, at: Instant, generation: u64, index: u32) {
        if self.expiries.len() >= TIMES_SLACK + 2 * self.mortal as usize {
            let mut expiries = core::mem::take(&mut self.expiries);
            expiries.retain(|Reverse((at, generation, index))| self.is_expiry(*at, *generation, *index));
            self.expiries = expiries;
        }
        self.expiries.push(Reverse((at, generation, index)));
    }

    /// Queues the earliest end of a lease or a soft pin.
    fn wake_at(&mut self, at: Instant, index: u32) {
        if self.entries[index].state == State::Soft
            && let Some(kept) = self.kept_mut(index)
        {
            kept.wakes = at;
        }
        let sleeping = self.leased + self.soft;
        if self.wakings.len() >= TIMES_SLACK + 2 * sleeping as usize {
            let mut wakings = core::mem::take(&mut self.wakings);
            wakings.retain(|Reverse((at, generation, index))| self.is_waking(*at, *generation, *index));
            self.wakings = wakings;
        }
        self.wakings.push(Reverse((at, self.entries[index].generation, index)));
    }

    /// Whether a queued time is that of a lease or a soft pin of this object, and of its present one.
    fn is_waking(&self, at: Instant, generation: u64, index: u32) -> bool {
        let entry = &self.entries[index];
        entry.generation == generation
            && match entry.state {
                State::Leased => true,
                State::Soft => self.kept.get(&index).is_some_and(|kept| kept.wakes == at),
                _ => false,
            }
    }

    /// Whether a queued time is that at which this object is removed.
    fn is_expiry(&self, at: Instant, generation: u64, index: u32) -> bool {
        let entry = &self.entries[index];
        entry.is_complete()
            && entry.generation == generation
            && entry.has(Entry::KEPT)
            && self.kept.get(&index).is_some_and(|kept| kept.expires == Some(at))
    }
}
