//! Checksums that a copy yields on the side.
//!
//! A rail that copies sums what it copies for next to nothing, while it waits for the memory. The contract
//! between rails and engine knows no checksums, so they go round it: rails copy inside `poll`, on the thread
//! that calls it, and note here what they copied. A note lives as long as that one call, so it cannot speak
//! of what was written later.

use std::cell::RefCell;

use te_core::{Op, RegionId};

/// What one slice moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    /// What it was.
    pub op: Op,
    /// The local region.
    pub region: RegionId,
    /// First byte in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// CRC-32C of what was written.
    pub crc32c: u32,
}

thread_local! {
    /// `None`: nobody asks.
    static NOTES: RefCell<Option<Vec<Note>>> = const { RefCell::new(None) };
}

/// Runs `poll` and notes what rails moved meanwhile, in place of what `notes` held.
pub fn noting<T>(notes: &mut Vec<Note>, poll: impl FnOnce() -> T) -> T {
    notes.clear();
    NOTES.set(Some(std::mem::take(notes)));
    let polled = poll();
    *notes = NOTES.take().unwrap_or_default();
    polled
}

/// Whether somebody asks.
pub(crate) fn wanted() -> bool {
    NOTES.with_borrow(Option::is_some)
}

/// Keeps what was moved, where somebody asks.
pub(crate) fn note(note: Note) {
    NOTES.with_borrow_mut(|notes| {
        if let Some(notes) = notes {
            notes.push(note);
        }
    });
}
