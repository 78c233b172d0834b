//! Puts and upserts: space for new objects, and what becomes of it.
//!
//! ```text
//!   put                                            upsert
//!   the key is free, or its put's time is over     whatever the key has
//!        │ start                                        │ start
//!        ▼                                              ▼
//!   has the key, not readable                      has no key yet, the object that has it is served
//!        │ end                                          │ end
//!        ▼                                              ▼
//!   readable                                       takes the key: an object that had it is dropped, now or
//!                                                  when its leases are over; a put that had it is over
//! ```

use alloc::collections::VecDeque;
use core::time::Duration;

use foldhash::fast::FixedState;
use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::{Master, millis, replicas_of};
use crate::chunks::stored_len;
use crate::eviction::{BatchOrder, Place};
use crate::handle::handle_of;
use crate::map::Map;
use crate::message::{
    Allocation, Existing, Inherit, Pin, PutOptions, PutRequest, Replicas, Retention, WriterState,
};
use crate::objects::{Entry, New, Placements};
use crate::pending_release::Reason;
use crate::{ErrorCode, FullKey};

/// Objects that one put evicts while the watermark is passed; most are evicted by [`Master::handle_timeout`].
const EVICTIONS_PER_PUT: u32 = 8;
/// How long an object is held so that it is not evicted for the upsert that is to replace it: only within one
/// call, in which the time does not change.
const MOMENT: Duration = Duration::from_nanos(1);
/// Upserts that have ended and are remembered.
const ENDED_MAX: usize = 4_096;

/// A put that may have its space, if there is any.
struct Admitted<'k> {
    key: FullKey<'k>,
    len: u64,
    retention: Retention,
    place: Place,
    session: u64,
    /// It is an upsert.
    replaces: bool,
}

/// The latest upserts that have ended, by numbers that identify them.
///
/// The start of an upsert may arrive a second time when the upsert is over, on a connection that its
/// client has given up. Nothing in the store would refuse it, as an object refuses the second start of a
/// put: space would be allocated that no client writes to, and after the release timeout the nodes would
/// be told to cut off a writer that is alive.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ended {
    order: VecDeque<u64>,
    numbers: Map<u64, (), FixedState>,
}

impl Ended {
    pub(super) fn new() -> Self {
        Self { order: VecDeque::new(), numbers: Map::with_seed(0) }
    }

    fn note(&mut self, number: u64) {
        if self.numbers.insert(number, ()).is_some() {
            return;
        }
        self.order.push_back(number);
        if self.order.len() > ENDED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.numbers.remove(&oldest);
        }
    }

    fn contains(&self, number: u64) -> bool {
        self.numbers.contains_key(&number)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.order.capacity() * size_of::<u64>() + self.numbers.allocation_size()
    }
}

impl Master {
    /// Allocates space for a new object that is alone in its batch. The request is not repeatable.
    ///
    /// # Errors
    /// `InvalidKey`, `InvalidParams`, `ObjectAlreadyExists` unless it [replaces](Existing::Replace) what
    /// exists, `TenantQuotaExceeded`, `KeysUltraLimit`, `TooManyPuts`, `MetadataFull`, one of
    /// [`ErrorCode::is_no_room`]. A put that fails evicts nothing.
    pub fn put_start<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        len: u64,
        options: &PutOptions,
    ) -> Result<Allocation, ErrorCode> {
        self.put_start_in(now, key, len, &PutRequest::once(*options), Place::ALONE)
    }

    /// Allocates space for one object of a batch; `place` is its position, which eviction uses. Repeated by
    /// the same writer with the same nonce while the put is unfinished, it returns the same space.
    ///
    /// # Errors
    /// As [`Self::put_start`]; `PutIsOver` for an upsert that is repeated after its end.
    pub fn put_start_in<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        len: u64,
        request: &PutRequest,
        place: Place,
    ) -> Result<Allocation, ErrorCode> {
        self.put_start_from(now, key.into(), len, request, place, 0)
    }

    /// As [`Self::put_start_in`], for the connection with this number; 0: there is none.
    pub(crate) fn put_start_from(
        &mut self,
        now: Instant,
        key: FullKey<'_>,
        len: u64,
        request: &PutRequest,
        place: Place,
        session: u64,
    ) -> Result<Allocation, ErrorCode> {
        self.check_key(key.key)?;
        let PutOptions { replicas, retention, existing, .. } = request.options;
        if len == 0 || replicas == 0 || replicas > self.config.replicas_max || !retention.is_valid() {
            return Err(ErrorCode::InvalidParams);
        }
        let found = self.objects.find(key);
        if let Existing::Replace(inherit) = existing {
            let put = Admitted { key, len, retention, place, session, replaces: true };
            return self.upsert_start(now, put, request, found, inherit);
        }
        let same = found.filter(|index| self.is_repeated(self.objects.entry(*index), len, request));
        if let Some(index) = same {
            return Ok(self.allocated(index));
        }
        let put = Admitted { key, len, retention, place, session, replaces: false };
        self.admit(&put)?;
        if let Some(index) = found {
            self.displace(now, index)?;
        } else if self.readable_record(key).is_some() {
            self.stats.puts_exist_total += 1;
            return Err(ErrorCode::ObjectAlreadyExists);
        }
        self.begin(now, put, request)
    }

    /// As [`Self::put_start_from`], for an upsert. `found` has the key.
    fn upsert_start(
        &mut self,
        now: Instant,
        mut put: Admitted<'_>,
        request: &PutRequest,
        found: Option<u32>,
        inherit: Inherit,
    ) -> Result<Allocation, ErrorCode> {
        let (key, nonce) = (put.key, request.nonce);
        let same = self.objects.find_upsert(key, |entry| self.is_repeated(entry, put.len, request));
        if let Some(index) = same {
            return Ok(self.allocated(index));
        }
        if nonce != 0 && self.ended_upserts.contains(self.upsert_number(key, nonce, request.writer)) {
            return Err(ErrorCode::PutIsOver);
        }
        let old = found.filter(|index| {
            self.objects.entry(*index).is_complete() && !self.objects.is_expired(now, *index)
        });
        let Some(old) = old else {
            self.admit(&put)?;
            return self.begin(now, put, request);
        };
        put.retention = self.objects.inherited(now, old, inherit, put.retention);
        self.admit(&put)?;
        // Held, it is not evicted, whatever the put needs: if the put fails the object must be there.
        let generation = self.objects.entry(old).generation;
        self.objects.hold(now, old, now + MOMENT, false);
        let begun = self.begin(now, put, request);
        self.objects.return_lease(now, old, generation);
        begun
    }

    /// Checks the limits that are independent of where there is room.
    fn admit(&mut self, put: &Admitted<'_>) -> Result<(), ErrorCode> {
        let Admitted { key, len, retention, session, .. } = put;
        if !self.objects.has_room(key.tenant, retention) {
            return Err(ErrorCode::KeysUltraLimit);
        }
        let (of_session, of_tenant) = self.writers.count(*session, key.tenant);
        if of_session >= self.config.session_puts_max || of_tenant >= self.config.tenant_puts_max {
            return Err(ErrorCode::TooManyPuts);
        }
        if retention.pin == Pin::Hard && !self.may_pin(key.tenant, *len) {
            self.stats.puts_no_room_total += 1;
            return Err(ErrorCode::PinnedShareReached);
        }
        Ok(())
    }

    /// Makes room for a put, and allocates it.
    fn begin(
        &mut self,
        now: Instant,
        put: Admitted<'_>,
        request: &PutRequest,
    ) -> Result<Allocation, ErrorCode> {
        let Admitted { key, len, retention, place, session, replaces } = put;
        let options = &request.options;
        // Nothing is evicted before the put is sure of its place.
        let over = self.evicting || self.is_over_watermark();
        let price = self.price(now, key.tenant, len)?;
        let placed = self
            .place(now, key.tenant, stored_len(len), options, &price)
            .inspect_err(|_| self.stats.puts_no_room_total += 1)?;
        self.pay(now, key.tenant, len, &price);
        if over {
            self.evict_to_watermark(now, EVICTIONS_PER_PUT);
        }
        if placed.len() < usize::from(options.replicas) {
            self.stats.puts_partial_total += 1;
        }
        self.generation += 1;
        let replicas = Placements::new(&placed);
        let (generation, nonce) = (self.generation, request.nonce);
        let new = New { key, len, generation, nonce, replicas, place, retention, replaces };
        let index = self.objects.insert(now, new);
        // An eviction may have freed a slot since, which the object has now.
        placed.iter().for_each(|placed| self.segments.own(placed, index));
        let allocation = self.allocation(generation, replicas_of(&placed));
        self.writers.began(&allocation, request.writer, session, key.tenant, index);
        self.stats.put_starts_total += 1;
        Ok(allocation)
    }

    /// Commits a put; the object is readable from here. The caller vouches that no write of this put is under
    /// way. A repetition has no effect.
    ///
    /// # Errors
    /// `PutIsOver` when there is no such put any more (it was displaced, removed or replaced, or its segments
    /// are gone), `InvalidWrite` when it is committed with another checksum.
    pub fn put_end<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        generation: u64,
        checksum: u32,
    ) -> Result<(), ErrorCode> {
        self.put_end_in(now, key, generation, checksum, BatchOrder::First)
    }

    /// As [`Self::put_end`], for one object of a batch.
    ///
    /// # Errors
    /// As [`Self::put_end`].
    pub fn put_end_in<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        generation: u64,
        checksum: u32,
        order: BatchOrder,
    ) -> Result<(), ErrorCode> {
        let key = key.into();
        let Some(index) = self.find_generation(key, generation) else {
            self.release_writer(key.tenant, generation);
            return Err(ErrorCode::PutIsOver);
        };
        let entry = self.objects.entry(index);
        if entry.is_complete() {
            return if entry.checksum == checksum { Ok(()) } else { Err(ErrorCode::InvalidWrite) };
        }
        self.stats.put_bytes_total += entry.len;
        if !entry.has_key() {
            self.supersede(now, key, index);
        }
        // What the key had on a disk: an older object, which was out of reach or is replaced.
        self.unshelve(key, |record| record.generation != generation);
        self.objects.complete(now, index, checksum, order == BatchOrder::Follows);
        if self.objects.takes_copy(index) {
            self.queue_copy(index, false);
        }
        self.writers.ended(generation);
        self.stats.put_ends_total += 1;
        Ok(())
    }

    /// Gives a put up. With [`WriterState::Quiet`] the caller vouches that no write of it can land any more,
    /// and the space is freed at once; otherwise the space is pending release until the nodes report that the
    /// writer is cut off. A repetition has no effect.
    ///
    /// # Errors
    /// `PutIsOver` when there is no such put, `InvalidWrite` when it is committed.
    pub fn put_revoke<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        generation: u64,
        writer: WriterState,
    ) -> Result<(), ErrorCode> {
        let key = key.into();
        let quiet = writer == WriterState::Quiet;
        let release = now + millis(self.config.put_start_release_timeout_ms);
        if let Some(index) = self.find_generation(key, generation) {
            if self.objects.entry(index).is_complete() {
                return Err(ErrorCode::InvalidWrite);
            }
            self.note_end(key, index);
            self.drop_object(index, (!quiet).then_some((release, Reason::Writer)));
            self.stats.put_revokes_total += 1;
            return Ok(());
        }
        let here = if quiet {
            self.release_writer(key.tenant, generation)
        } else {
            self.pending_release.put_off_writer(key.tenant, generation, release)
        };
        if here { Ok(()) } else { Err(ErrorCode::PutIsOver) }
    }

    /// An upsert is committed: it gets its key, and what had the key is dropped. The space of an object that
    /// readers hold leases to is free when they end.
    fn supersede(&mut self, now: Instant, key: FullKey<'_>, index: u32) {
        self.note_end(key, index);
        self.stats.upserts_total += 1;
        if let Some(old) = self.objects.find(key) {
            if self.objects.is_expired(now, old) {
                self.drop_expired(now, old);
            } else {
                let complete = self.objects.entry(old).is_complete();
                let replaced = if complete {
                    &mut self.stats.objects_replaced_total
                } else {
                    &mut self.stats.puts_abandoned_total
                };
                *replaced += 1;
                self.drop_object(old, self.holds(now, old));
            }
        }
        self.objects.take_key(index);
    }

    /// Remembers that an unfinished upsert ends.
    fn note_end(&mut self, key: FullKey<'_>, index: u32) {
        let entry = self.objects.entry(index);
        let (nonce, generation) = (entry.checksum, entry.generation);
        if !entry.has_key()
            && nonce != 0
            && let Some(writer) = self.writers.put(generation).map(|put| put.writer)
        {
            self.ended_upserts.note(self.upsert_number(key, nonce, writer));
        }
    }

    /// A number that identifies an upsert, as its client does: by key, nonce and writer.
    fn upsert_number(&self, key: FullKey<'_>, nonce: u32, writer: u64) -> u64 {
        self.objects.key_number(key) ^ writer.rotate_left(17) ^ u64::from(nonce).rotate_left(41)
    }

    fn check_key(&self, key: &[u8]) -> Result<(), ErrorCode> {
        if key.is_empty() || key.len() > self.config.key_bytes_max as usize {
            return Err(ErrorCode::InvalidKey);
        }
        Ok(())
    }

    /// The entry of a put, or of the object that it has stored.
    pub(super) fn find_generation(&self, key: FullKey<'_>, generation: u64) -> Option<u32> {
        let is_it = |index: &u32| self.objects.entry(*index).generation == generation;
        let found = self.objects.find(key).filter(is_it);
        found.or_else(|| self.objects.find_upsert(key, |entry| entry.generation == generation))
    }

    /// Whether a request is a repetition of the one that began an unfinished put. A nonce alone can be
    /// guessed, and two processes may draw the same one; the identity of the writer is random, and only the
    /// master and the nodes learn it.
    fn is_repeated(&self, entry: &Entry, len: u64, request: &PutRequest) -> bool {
        let same =
            request.nonce != 0 && !entry.is_complete() && entry.checksum == request.nonce && entry.len == len;
        same && self.writers.put(entry.generation).is_some_and(|put| put.writer == request.writer)
    }

    /// The allocation of an unfinished put.
    fn allocated(&self, index: u32) -> Allocation {
        let entry = self.objects.entry(index);
        self.allocation(entry.generation, replicas_of(entry.replicas.as_slice()))
    }

    fn allocation(&self, generation: u64, replicas: Replicas) -> Allocation {
        Allocation { generation, handle: handle_of(self.config.handle_key, generation), replicas }
    }

    /// Whether the request comes from the writer that began this put. A put that is over gives the same error
    /// as a wrong handle.
    pub(crate) fn check_handle(&self, generation: u64, handle: u64) -> Result<(), ErrorCode> {
        let put = self.writers.put(generation).map(|put| put.handle);
        let began = put.unwrap_or_else(|| handle_of(self.config.handle_key, generation)) == handle;
        if began { Ok(()) } else { Err(ErrorCode::PutIsOver) }
    }

    /// Ends the put that has the key, if its writer's time is over, so that a new put can have the key.
    fn displace(&mut self, now: Instant, index: u32) -> Result<(), ErrorCode> {
        if self.objects.is_expired(now, index) {
            self.drop_expired(now, index);
            return Ok(());
        }
        let entry = self.objects.entry(index);
        let since = entry.time;
        let taken = entry.is_complete() || now < since + millis(self.config.put_start_discard_timeout_ms);
        if taken {
            self.stats.puts_exist_total += 1;
            return Err(ErrorCode::ObjectAlreadyExists);
        }
        let until = since + millis(self.config.put_start_release_timeout_ms);
        self.drop_object(index, Some((until, Reason::Writer)));
        self.stats.puts_abandoned_total += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_ends_are_remembered_each_once() {
        let mut ended = Ended::new();
        for number in (0..2 * ENDED_MAX as u64).flat_map(|number| [number, number]) {
            ended.note(number);
            assert!(ended.contains(number));
        }
        assert_eq!((ended.order.len(), ended.numbers.len()), (ENDED_MAX, ENDED_MAX));
        assert!(!ended.contains(ENDED_MAX as u64 - 1) && ended.contains(ENDED_MAX as u64));
    }
}
