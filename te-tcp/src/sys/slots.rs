//! The slots of one device's stager, as memory that can be sent from and received into.

use te_core::Error;
use te_core::device::{Hop, HopEnd, Stager, StagingSlot};

use super::mem::Pinned;

/// A stager, whose slots are lent one by one.
pub(crate) struct Slots(Box<dyn Stager>);

impl Slots {
    pub(crate) fn new(stager: Box<dyn Stager>) -> Self {
        Self(stager)
    }

    /// Length of a slot, bytes.
    pub(crate) fn slot_bytes(&self) -> u32 {
        self.0.slot_bytes()
    }

    /// A free slot, and its memory, which is valid until the slot is given back.
    pub(crate) fn take(&mut self) -> Option<(StagingSlot, Pinned)> {
        let slot = self.0.take()?;
        // SAFETY: the stager keeps its slots mapped and lends each to one taker at a time; `Staging` uses the
        // memory of a slot only while it holds the slot, and no reference to it is made.
        let memory = unsafe { Pinned::new(slot.span) };
        Some((slot, memory))
    }

    pub(crate) fn give_back(&mut self, slot: StagingSlot) {
        self.0.give_back(slot);
    }

    /// See [`Stager::start`].
    pub(crate) fn start(&mut self, hops: &[Hop]) -> Result<usize, Error> {
        self.0.start(hops)
    }

    pub(crate) fn poll(&mut self, out: &mut [HopEnd]) -> usize {
        self.0.poll(out)
    }
}
