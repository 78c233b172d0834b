//! Memory of devices crosses to the host and back through slots: which slots are out, and which hops run.
//!
//! Initiator and target have one of these each, with stagers of their own. So neither waits for slots of the
//! other: a target that has slots lets its peers' WRITEs end, whatever its own slices wait for.
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

/// Slots that are out at the same time, at most.
const SLOTS_MAX: usize = u16::MAX as usize;
/// Ends of hops that are taken at a time.
const ENDS_MAX: usize = 32;

/// A slot that was taken. It can be named until it is given back.
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

/// Slots and hops of one side. `T` is what that side wants to know when a hop has ended.
pub(crate) struct Staging<T> {
    /// One for each location that a region is at.
    pools: Vec<Pool>,
    /// Slots that are out, by their ids.
    out: Vec<Option<Out<T>>>,
    /// Ids that name nothing.
    free: Vec<u16>,
    /// Hops that were started here and whose ends were not handed out.
    hops: usize,
    /// Ends that were not handed out.
    ends: VecDeque<(u16, Result<(), Error>)>,
}

struct Pool {
    location: Location,
    slots: Slots,
    /// Hops for which the copy queue has had no room.
    waiting: VecDeque<Hop>,
    /// Hops that the stager has.
    running: usize,
}

struct Out<T> {
    pool: usize,
    slot: StagingSlot,
    memory: Pinned,
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
        Self { pools: Vec::new(), out: Vec::new(), free: Vec::new(), hops: 0, ends: VecDeque::new() }
    }

    /// Whether no region is at any device.
    #[inline]
    pub(crate) fn is_unused(&self) -> bool {
        self.pools.is_empty()
    }

    /// Makes a stager for memory there, unless there is one.
    ///
    /// # Errors
    /// Those of [`Devices::stager`]; `Full` when that has no slot.
    pub(crate) fn prepare(&mut self, location: Location, devices: &dyn Devices) -> Result<(), Error> {
        if self.pool(location).is_some() {
            return Ok(());
        }
        let mut slots = Slots::new(devices.stager(location)?);
        let count = count(&mut slots);
        if count == 0 {
            return Err(ErrorKind::Full.into());
        }
        // Later, nothing allocates.
        self.out.reserve(count);
        self.free.reserve(count);
        self.ends.reserve(count);
        self.pools.push(Pool { location, slots, waiting: VecDeque::with_capacity(count), running: 0 });
        Ok(())
    }

    /// Length of a slot for memory there, bytes.
    pub(crate) fn slot_bytes(&self, location: Location) -> u32 {
        self.pool(location).map_or(0, |pool| self.pools[pool].slots.slot_bytes())
    }

    /// A free slot for memory there. `None`: all are out.
    pub(crate) fn take(&mut self, location: Location) -> Option<SlotId> {
        let pool = self.pool(location)?;
        if self.free.is_empty() && self.out.len() == SLOTS_MAX {
            return None;
        }
        let (slot, memory) = self.pools[pool].slots.take()?;
        let id = self.free.pop().unwrap_or_else(|| {
            self.out.push(None);
            (self.out.len() - 1) as u16
        });
        self.out[usize::from(id)] = Some(Out { pool, slot, memory, hop: None });
        SlotId::new(id)
    }

    /// The first `len` bytes of the slot.
    #[inline(never)]
    pub(crate) fn memory(&self, slot: SlotId, len: u64) -> Option<Pinned> {
        self.out.get(slot.at())?.as_ref()?.memory.part(0, len).ok()
    }

    /// Takes a slot back that no hop uses.
    #[inline(never)]
    pub(crate) fn give_back(&mut self, id: SlotId) {
        if let Some(Out { pool, slot, hop, .. }) = self.out.get_mut(id.at()).and_then(Option::take) {
            debug_assert!(hop.is_none(), "a hop uses the slot");
            self.pools[pool].slots.give_back(slot);
            self.free.push(id.at() as u16);
        } else {
            debug_assert!(false, "a slot is given back once");
        }
    }

    /// Starts a hop between the beginning of the slot and `device`; [`Self::flush`] sets it going.
    pub(crate) fn start(&mut self, slot: SlotId, device: MemSpan, direction: HopDirection, tag: T) {
        let Some(out) = self.out.get_mut(slot.at()).and_then(Option::as_mut) else { return };
        debug_assert!(out.hop.is_none(), "one hop at a time uses a slot");
        out.hop = Some(tag);
        let hop = Hop { token: Token(slot.at() as u64), slot: out.slot.index, offset: 0, device, direction };
        self.pools[out.pool].waiting.push_back(hop);
        self.hops += 1;
    }

    /// Hands the hops that wait to the copy queues, as far as those have room.
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
                        // It is about the first, which can never be started.
                        let first = pool.waiting.pop_front();
                        self.ends.extend(first.map(|hop| (hop.token.0 as u16, Err(error))));
                    }
                }
            }
        }
    }

    /// Takes in the ends of hops, to be handed out by [`Self::next_end`].
    pub(crate) fn collect(&mut self) {
        let mut ends = [HopEnd { token: Token(0), result: Ok(()) }; ENDS_MAX];
        for pool in self.pools.iter_mut().filter(|pool| pool.running > 0) {
            let count = pool.slots.poll(&mut ends);
            pool.running -= count;
            self.ends.extend(ends[..count].iter().map(|end| (end.token.0 as u16, end.result)));
        }
    }

    /// The next end of a hop. Its slot is still out.
    pub(crate) fn next_end(&mut self) -> Option<Ended<T>> {
        loop {
            let (id, result) = self.ends.pop_front()?;
            let out = self.out.get_mut(usize::from(id)).and_then(Option::as_mut);
            if let Some(tag) = out.and_then(|out| out.hop.take()) {
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

    /// The hops that have not ended.
    pub(crate) fn hops(&self) -> impl Iterator<Item = &T> {
        self.out.iter().flatten().filter_map(|out| out.hop.as_ref())
    }

    /// Slots that are out.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn slots_out(&self) -> usize {
        self.out.iter().flatten().count()
    }

    fn pool(&self, location: Location) -> Option<usize> {
        self.pools.iter().position(|pool| pool.location == location)
    }
}

/// Slots that the stager has, all of them free.
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

/// Checks that `span` is memory of these devices.
///
/// # Errors
/// `InvalidArgument` when it is not.
pub(crate) fn check(devices: &dyn Devices, span: MemSpan) -> Result<(), Error> {
    match devices.locate(span.as_ptr(), span.len()) {
        Some(location) if location == span.location() => Ok(()),
        _ => Err(ErrorKind::InvalidArgument.into()),
    }
}
