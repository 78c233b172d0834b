//! [`Guess`]: how much room the next gets need.
//!
//! A get names its destination before it knows the length of the object. Blocks of one model have one length,
//! so the length of the last object is a good estimate. An object that is longer costs one question to the
//! master; a shorter one gives the rest back. A batch whose places would take much memory, or that follows
//! objects of several lengths, reads its first object alone and takes its length for the others: many short
//! objects in places for long ones would use a page each, and leave holes.

/// The first estimate, bytes.
const FIRST: u64 = 64 << 10;
/// The smallest estimate, bytes.
const LEAST: u64 = 4 << 10;
/// Most bytes of places that a batch gets without a probe.
const UNPROBED_MAX: u64 = 64 << 20;

/// The estimate.
#[derive(Debug)]
pub(crate) struct Guess {
    room: u64,
    /// Whether all objects of the last batch had this length.
    uniform: bool,
}

impl Guess {
    pub(crate) const fn new() -> Self {
        Self { room: FIRST, uniform: true }
    }

    /// Room for one object, bytes.
    pub(crate) fn room(&self) -> u64 {
        self.room.max(LEAST)
    }

    /// Room for each of so many objects when nothing is known of this batch.
    pub(crate) fn room_of(&self, objects: usize) -> u64 {
        self.room.min(UNPROBED_MAX / objects.max(1) as u64).max(LEAST)
    }

    /// Whether a batch of so many objects is to begin with one of them.
    pub(crate) const fn probes(&self, objects: usize) -> bool {
        objects > 1 && (!self.uniform || self.room.saturating_mul(objects as u64) > UNPROBED_MAX)
    }

    /// Records the shortest and the longest object of a batch, bytes.
    pub(crate) const fn saw(&mut self, shortest: u64, longest: u64) {
        self.room = longest;
        self.uniform = shortest == longest;
    }

    /// Smaller places to try when there is no room for one of `room` bytes, in order.
    pub(crate) fn smaller(room: u64) -> impl Iterator<Item = u64> {
        std::iter::successors(Some(room / 4), |room| Some(room / 4)).take_while(|&room| room >= LEAST)
    }
}
