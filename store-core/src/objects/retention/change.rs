//! Changes of an object's retention after its put.
//!
//! The object moves to the list of its new pin, or to the policy. Within a group that changes what the group
//! can do: a group with a pinned member has no lead, and gets one when its last pin is gone.

use core::time::Duration;

use te_core::Instant;

use super::{Kept, Objects};
use crate::eviction::Place;
use crate::message::{Pin, Retention, RetentionChange, TtlChange, is_soft_pin_ttl};
use crate::objects::{Entry, State};

impl Objects {
    /// The pin that a complete object has after a change. `None`: the change is invalid for it.
    pub(crate) fn changed_pin(&self, index: u32, change: &RetentionChange) -> Option<Pin> {
        let pin = change.pin.unwrap_or_else(|| self.kept_of(index).map_or(Pin::None, |kept| kept.pin));
        let ttl_fits = change.ttl != TtlChange::After(0);
        (ttl_fits && is_soft_pin_ttl(pin, change.soft_pin_ttl_ms)).then_some(pin)
    }

    /// The pin that a put or a change has given an object, whether or not it has run out.
    pub(crate) fn pin_of(&self, index: u32) -> Pin {
        self.kept_of(index).map_or(Pin::None, |kept| kept.pin)
    }

    /// Changes the retention of a complete object, to `pin` and as [`Self::changed_pin`] has permitted.
    pub(crate) fn change(&mut self, now: Instant, index: u32, pin: Pin, change: &RetentionChange) {
        if *change == RetentionChange::default() {
            return;
        }
        if !self.entries[index].has(Entry::KEPT) {
            let kept = self.new_kept(index, &Retention::DEFAULT);
            self.kept.insert(index, kept);
            self.entries[index].marks |= Entry::KEPT;
        }
        if change.pin.is_some() || change.soft_pin_ttl_ms.is_some() {
            self.change_pin(now, index, pin, change.soft_pin_ttl_ms);
        }
        match change.ttl {
            TtlChange::Keep => {}
            TtlChange::Never => self.change_ttl(now, index, None),
            TtlChange::After(ms) => self.change_ttl(now, index, Some(Duration::from_millis(ms.into()))),
        }
        self.forget_plain(index);
    }

    fn change_pin(&mut self, now: Instant, index: u32, pin: Pin, soft_ttl_ms: Option<u32>) {
        let default_ttl = self.soft_pin_ttl;
        let Entry { len, tenant, state, .. } = self.entries[index];
        let Some(kept) = self.kept.get_mut(&index) else { return };
        let was = core::mem::replace(&mut kept.pin, pin);
        kept.soft_ttl = match soft_ttl_ms {
            Some(ms) => Duration::from_millis(ms.into()),
            None if was == Pin::Soft => kept.soft_ttl,
            None => default_ttl,
        };
        kept.soft_until = now + kept.soft_ttl;
        let (group, until, wakes) = (kept.group, kept.soft_until, kept.wakes);
        let hard = |pin: Pin| if pin == Pin::Hard { len } else { 0 };
        let own = &mut self.usage[tenant.index()].hard_bytes;
        *own = *own - hard(was) + hard(pin);
        self.hard_bytes = self.hard_bytes - hard(was) + hard(pin);
        match (pin, state) {
            (Pin::Soft, State::Soft) => {
                // A later end is found when the queued time has come.
                if until < wakes {
                    self.wake_at(until, index);
                }
            }
            (Pin::Hard, State::Hard) => {}
            (Pin::None, State::Soft | State::Hard) => {
                self.detach(index);
                self.release(index, Place { returning: true, ..Place::ALONE });
                self.wake(group);
            }
            (Pin::None, _) => {}
            (Pin::Soft | Pin::Hard, _) => {
                if let Some(id) = group {
                    self.rest(id);
                }
                self.detach(index);
                let state = if pin == Pin::Soft { State::Soft } else { State::Hard };
                self.attach(index, state);
                if pin == Pin::Soft {
                    self.wake_at(until, index);
                }
                // Without its hard pin, the group may still be held by others.
                self.wake(group);
            }
        }
    }

    fn change_ttl(&mut self, now: Instant, index: u32, ttl: Option<Duration>) {
        let generation = self.entries[index].generation;
        let Some(kept) = self.kept.get_mut(&index) else { return };
        let expires = ttl.map(|ttl| now + ttl);
        kept.ttl = ttl;
        let had = core::mem::replace(&mut kept.expires, expires);
        self.mortal = self.mortal - u32::from(had.is_some()) + u32::from(expires.is_some());
        if let Some(expires) = expires {
            self.expire_at(expires, generation, index);
        }
    }

    fn kept_of(&self, index: u32) -> Option<&Kept> {
        self.kept.get(&index).filter(|_| self.entries[index].has(Entry::KEPT))
    }
}
