//! Bytes of device memory cross to the host and back through staging slots: which slots are taken, and which
//! hops run.
//!
//! Initiator and target have one `Staging` each, with stagers of their own, so neither waits for slots of the
//! other: a target with free slots lets its peers' WRITEs end, whatever its own slices wait for.
//!
//! ```text
//!   take ──▶ a slot ──▶ start ──▶ hop ──▶ next_end ──▶ give_back
//! ```

#[cfg(test)]
mod tests;

use core::num::NonZeroU16;
use std::collections::VecDeque;

use te_core::device::{Devices, Hop, HopDirection, HopEnd, StagingSlot};
use te_core::{Error, ErrorKind, Location, MemSpan, Token};

use crate::sys::{Pinned, Slots};

/// Slots that may be taken at the same time.
const SLOTS_MAX: usize = u16::MAX as usize;
/// Ends of hops taken from a stager in one call.
const ENDS_MAX: usize = 32;

/// Names a slot from when it is taken until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId(NonZeroU16);

impl SlotId {
    fn new(at: u16) -> Option<Self> {
        NonZeroU16::new(at.wrapping_add(1)).map(Self)
    }

    fn at(self) -> usize {
        usize::from(self.0.get() - 1)
    }
}

/// Slots and hops of one side. `T` is the record that the side attaches to a hop and gets back when the hop
/// has ended.
pub(crate) struct Staging<T> {
    /// One pool for each location of registered device memory.
    pools: Vec<Pool>,
    /// The slots that are taken, by id.
    taken: Vec<Option<Taken<T>>>,
    /// Ids that are not in use.
    free: Vec<u16>,
    /// Hops that were started and whose ends [`Self::next_end`] has not returned.
    hops: usize,
    /// Ends that [`Self::next_end`] has not returned.
    ends: VecDeque<(u16, Result<(), Error>)>,
}

struct Pool {
    location: Location,
    slots: Slots,
    /// Hops that wait for room in the copy queue.
    waiting: VecDeque<Hop>,
    /// Hops that the stager has.
    running: usize,
    /// Slots that are free.
    free: usize,
}

struct Taken<T> {
    pool: usize,
    slot: StagingSlot,
    memory: Pinned,
    /// The number that [`Staging::take_share`] was called with.
    holder: Option<u32>,
    hop: Option<T>,
}

/// The end of a hop.
pub(crate) struct Ended<T> {
    pub(crate) slot: SlotId,
    pub(crate) tag: T,
    pub(crate) result: Result<(), Error>,
}

impl<T> Staging<T> {
    pub(crate) const fn new() -> Self {
        Self { pools: Vec::new(), taken: Vec::new(), free: Vec::new(), hops: 0, ends: VecDeque::new() }
    }

    /// Whether no device memory was ever registered.
    #[inline]
    pub(crate) fn is_unused(&self) -> bool {
        self.pools.is_empty()
    }

    /// Makes a stager for memory at this location, unless there is one.
    ///
    /// # Errors
    /// Those of [`Devices::stager`]; `Full` when the stager has no slot.
    pub(crate) fn prepare(&mut self, location: Location, devices: &dyn Devices) -> Result<(), Error> {
        if self.pool(location).is_some() {
            return Ok(());
        }
        let mut slots = Slots::new(devices.stager(location)?);
        let count = count(&mut slots);
        if count == 0 {
            return Err(ErrorKind::Full.into());
        }
        // Nothing allocates later.
        self.taken.reserve(count);
        self.free.reserve(count);
        self.ends.reserve(count);
        self.pools.push(Pool {
            location,
            slots,
            waiting: VecDeque::with_capacity(count),
            running: 0,
            free: count,
        });
        Ok(())
    }

    /// Length of a slot for memory at this location, bytes; 0 when there is no stager.
    pub(crate) fn slot_bytes(&self, location: Location) -> u32 {
        self.pool(location).map_or(0, |pool| self.pools[pool].slots.slot_bytes())
    }

    /// Takes a free slot for memory at this location. `None`: all are taken.
    pub(crate) fn take(&mut self, location: Location) -> Option<SlotId> {
        let pool = self.pool(location)?;
        self.take_from(pool, None)
    }

    /// Takes a free slot for memory at this location within the share of `holder`: one that has slots gets
    /// another only while it has fewer than twice as many as are free, and never the last one. So no holder
    /// of several slots keeps all of them from the others, however long it holds its own; in a pool of one
    /// slot the holders take turns.
    pub(crate) fn take_share(&mut self, location: Location, holder: u32) -> Option<SlotId> {
        let pool = self.pool(location)?;
        let free = self.pools[pool].free;
        let is_its = |taken: &&Taken<T>| taken.pool == pool && taken.holder == Some(holder);
        let held = self.taken.iter().flatten().filter(is_its).count();
        if held > 0 && (free < 2 || held >= 2 * free) {
            return None;
        }
        self.take_from(pool, Some(holder))
    }

    fn take_from(&mut self, pool: usize, holder: Option<u32>) -> Option<SlotId> {
        if self.free.is_empty() && self.taken.len() == SLOTS_MAX {
            return None;
        }
        let (slot, memory) = self.pools[pool].slots.take()?;
        self.pools[pool].free -= 1;
        let id = self.free.pop().unwrap_or_else(|| {
            self.taken.push(None);
            (self.taken.len() - 1) as u16
        });
        self.taken[usize::from(id)] = Some(Taken { pool, slot, memory, holder, hop: None });
        SlotId::new(id)
    }

    /// The first `len` bytes of the slot.
    #[inline(never)]
    pub(crate) fn memory(&self, slot: SlotId, len: u64) -> Option<Pinned> {
        self.taken.get(slot.at())?.as_ref()?.memory.part(0, len).ok()
    }

    /// Gives back a slot that no hop uses.
    #[inline(never)]
    pub(crate) fn give_back(&mut self, id: SlotId) {
        if let Some(Taken { pool, slot, hop, .. }) = self.taken.get_mut(id.at()).and_then(Option::take) {
            debug_assert!(hop.is_none(), "a hop uses the slot");
            self.pools[pool].slots.give_back(slot);
            self.pools[pool].free += 1;
            self.free.push(id.at() as u16);
        } else {
            debug_assert!(false, "a slot is given back once");
        }
    }

    /// Queues a hop between the beginning of the slot and `device`; [`Self::flush`] hands it to the stager.
    pub(crate) fn start(&mut self, slot: SlotId, device: MemSpan, direction: HopDirection, tag: T) {
        let Some(taken) = self.taken.get_mut(slot.at()).and_then(Option::as_mut) else { return };
        debug_assert!(taken.hop.is_none(), "one hop at a time uses a slot");
        taken.hop = Some(tag);
        let hop =
            Hop { token: Token(slot.at() as u64), slot: taken.slot.index, offset: 0, device, direction };
        self.pools[taken.pool].waiting.push_back(hop);
        self.hops += 1;
    }

    /// Hands the waiting hops to the stagers, as far as their copy queues have room.
    pub(crate) fn flush(&mut self) {
        for pool in &mut self.pools {
            while !pool.waiting.is_empty() {
                match pool.slots.start(pool.waiting.make_contiguous()) {
                    Ok(0) => break,
                    Ok(count) => {
                        pool.waiting.drain(..count);
                        pool.running += count;
                    }
                    Err(error) => {
                        // The error is about the first hop, which can never be started.
                        let first = pool.waiting.pop_front();
                        self.ends.extend(first.map(|hop| (hop.token.0 as u16, Err(error))));
                    }
                }
            }
        }
    }

    /// Takes the ends of hops from the stagers; [`Self::next_end`] returns them.
    pub(crate) fn collect(&mut self) {
        let mut ends = [HopEnd { token: Token(0), result: Ok(()) }; ENDS_MAX];
        for pool in self.pools.iter_mut().filter(|pool| pool.running > 0) {
            let count = pool.slots.poll(&mut ends);
            pool.running -= count;
            self.ends.extend(ends[..count].iter().map(|end| (end.token.0 as u16, end.result)));
        }
    }

    /// The next end of a hop. Its slot is still taken.
    pub(crate) fn next_end(&mut self) -> Option<Ended<T>> {
        loop {
            let (id, result) = self.ends.pop_front()?;
            let taken = self.taken.get_mut(usize::from(id)).and_then(Option::as_mut);
            if let Some(tag) = taken.and_then(|taken| taken.hop.take()) {
                self.hops -= 1;
                return Some(Ended { slot: SlotId::new(id)?, tag, result });
            }
            debug_assert!(false, "a hop ends once");
        }
    }

    /// Whether hops have not ended.
    pub(crate) const fn is_hopping(&self) -> bool {
        self.hops > 0
    }

    /// The records of the hops that have not ended.
    pub(crate) fn hops(&self) -> impl Iterator<Item = &T> {
        self.taken.iter().flatten().filter_map(|taken| taken.hop.as_ref())
    }

    /// Slots that are taken.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn slots_taken(&self) -> usize {
        self.taken.iter().flatten().count()
    }

    fn pool(&self, location: Location) -> Option<usize> {
        self.pools.iter().position(|pool| pool.location == location)
    }
}

/// Counts the slots of a stager whose slots are all free.
fn count(slots: &mut Slots) -> usize {
    let mut all = Vec::new();
    while all.len() < SLOTS_MAX
        && let Some((slot, _)) = slots.take()
    {
        all.push(slot);
    }
    let count = all.len();
    all.into_iter().for_each(|slot| slots.give_back(slot));
    count
}

/// Checks that `span` is memory of these devices, at the location that it states.
///
/// # Errors
/// `InvalidArgument` when it is not.
pub(crate) fn check(devices: &dyn Devices, span: MemSpan) -> Result<(), Error> {
    match devices.locate(span.as_ptr(), span.len()) {
        Some(location) if location == span.location() => Ok(()),
        _ => Err(ErrorKind::InvalidArgument.into()),
    }
}
