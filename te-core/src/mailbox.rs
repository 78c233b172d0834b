//! How callers hand work to the polling thread: a bounded, lock-free ring with many producers.
//!
//! Dmitry Vyukov's bounded queue: the sequence number of each slot decides whether a producer or the consumer
//! may use it next, so the two share a slot and nothing else. `push` and `pop` never wait for memory and
//! never allocate; a full mailbox returns the item. `tests/loom_mailbox.rs` checks its memory orderings.
//!
//! Other structures are ordered by hand, too: DESIGN.md lists them, and which of them loom checks.
//!
//! It is not a channel: `push` wakes no thread. The caller that pushes wakes the polling thread if it is
//! parked.
#![allow(
    unsafe_code,
    reason = "slots are uninitialised memory; the sequence numbers decide which thread owns each one"
)]

use alloc::boxed::Box;
use core::fmt;
use core::mem::MaybeUninit;

use self::sync::{AtomicUsize, Ordering, UnsafeCell};

/// A bounded ring with many producers. Share it by reference or in an `Arc`.
///
/// ```
/// let mailbox = te_core::Mailbox::new(2);
/// assert_eq!(mailbox.push(1), Ok(()));
/// assert_eq!(mailbox.push(2), Ok(()));
/// assert_eq!(mailbox.push(3), Err(3)); // full: drain it, then try again
/// assert_eq!(mailbox.pop(), Some(1));
/// ```
pub struct Mailbox<T> {
    slots: Box<[Slot<T>]>,
    mask: usize,
    /// The position of the next push.
    tail: CachePadded<AtomicUsize>,
    /// The position of the next pop.
    head: CachePadded<AtomicUsize>,
}

impl<T> Mailbox<T> {
    /// A mailbox with room for `capacity` items, rounded up to a power of two and to 2.
    ///
    /// # Panics
    /// When the address space has no room for so many slots.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(2).next_power_of_two();
        Self {
            slots: (0..capacity).map(Slot::new).collect(),
            mask: capacity - 1,
            tail: CachePadded(AtomicUsize::new(0)),
            head: CachePadded(AtomicUsize::new(0)),
        }
    }

    /// The number of items that fit.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The number of items inside. A snapshot: other threads may push and pop meanwhile.
    #[must_use]
    pub fn len(&self) -> usize {
        let head = self.head.0.load(Ordering::Relaxed);
        let tail = self.tail.0.load(Ordering::Relaxed);
        tail.wrapping_sub(head).min(self.capacity())
    }

    /// Whether the mailbox is empty. A snapshot, as [`len`](Self::len).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `item`.
    ///
    /// # Errors
    /// The item itself when the mailbox is full.
    pub fn push(&self, item: T) -> Result<(), T> {
        let mut position = self.tail.0.load(Ordering::Relaxed);
        loop {
            let slot = &self.slots[position & self.mask];
            // Acquire: the consumer's use of the slot happened before we reuse it.
            let sequence = slot.sequence.load(Ordering::Acquire);
            match sequence.wrapping_sub(position).cast_signed() {
                0 => match self.claim(&self.tail.0, position) {
                    Ok(()) => {
                        slot.value.with_mut(|value| {
                            // SAFETY: the sequence number showed that the slot is empty and for `position`,
                            // and the exchange made `position` ours; no other thread touches the slot before
                            // we publish the next number.
                            unsafe { (*value).write(item) };
                        });
                        // Release: the item is in place before the consumer sees the number.
                        slot.sequence.store(position.wrapping_add(1), Ordering::Release);
                        return Ok(());
                    }
                    Err(seen) => position = seen,
                },
                // One lap behind: the consumer has not emptied the slot.
                behind if behind < 0 => return Err(item),
                _ => position = self.tail.0.load(Ordering::Relaxed),
            }
        }
    }

    /// Takes the oldest item. It is made for one consumer; several are safe.
    pub fn pop(&self) -> Option<T> {
        let mut position = self.head.0.load(Ordering::Relaxed);
        loop {
            let slot = &self.slots[position & self.mask];
            // Acquire: the producer's write of the item happened before we read it.
            let sequence = slot.sequence.load(Ordering::Acquire);
            match sequence.wrapping_sub(position.wrapping_add(1)).cast_signed() {
                0 => match self.claim(&self.head.0, position) {
                    Ok(()) => {
                        let item = slot.value.with_mut(|value| {
                            // SAFETY: the sequence number showed that the slot holds the item of `position`,
                            // and the exchange made it ours to take, once.
                            unsafe { (*value).assume_init_read() }
                        });
                        // Release: we have finished with the slot before the producer one lap ahead sees the
                        // number.
                        slot.sequence.store(position.wrapping_add(self.capacity()), Ordering::Release);
                        return Some(item);
                    }
                    Err(seen) => position = seen,
                },
                behind if behind < 0 => return None,
                _ => position = self.head.0.load(Ordering::Relaxed),
            }
        }
    }

    /// Relaxed is enough: the position only decides which thread may try; the slot's sequence number orders
    /// the data.
    fn claim(&self, counter: &AtomicUsize, position: usize) -> Result<(), usize> {
        counter
            .compare_exchange_weak(position, position.wrapping_add(1), Ordering::Relaxed, Ordering::Relaxed)
            .map(|_| ())
    }
}

// SAFETY: items move between threads by value; the sequence numbers give each slot one owner at a time.
unsafe impl<T: Send> Send for Mailbox<T> {}
// SAFETY: as above; `&Mailbox` gives no reference to an item, so `T: Send` is enough.
unsafe impl<T: Send> Sync for Mailbox<T> {}

impl<T> Drop for Mailbox<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

impl<T> fmt::Debug for Mailbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox").field("len", &self.len()).field("capacity", &self.capacity()).finish()
    }
}

struct Slot<T> {
    /// `position` when the slot is empty and waits for the item of that position, `position + 1` when it
    /// holds that item.
    sequence: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Slot<T> {
    fn new(position: usize) -> Self {
        Self { sequence: AtomicUsize::new(position), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }
}

/// The positions of producers and consumer, each on its own pair of cache lines (the prefetcher loads pairs).
#[repr(align(128))]
struct CachePadded<T>(T);

#[cfg(loom)]
mod sync {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::sync::atomic::{AtomicUsize, Ordering};
}

#[cfg(not(loom))]
mod sync {
    pub(super) use core::sync::atomic::{AtomicUsize, Ordering};

    /// `core::cell::UnsafeCell` with the accessors of loom's.
    pub(super) struct UnsafeCell<T>(core::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(super) const fn new(value: T) -> Self {
            Self(core::cell::UnsafeCell::new(value))
        }

        pub(super) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::sync::Arc;
    use alloc::vec::Vec;

    #[test]
    fn items_come_out_in_order_and_a_full_mailbox_gives_them_back() {
        let mailbox = Mailbox::new(4);
        for lap in 0..5 {
            for i in 0..4 {
                assert_eq!(mailbox.push(lap * 10 + i), Ok(()));
            }
            assert_eq!(mailbox.push(99), Err(99));
            assert_eq!(mailbox.len(), 4);
            for i in 0..4 {
                assert_eq!(mailbox.pop(), Some(lap * 10 + i));
            }
            assert_eq!(mailbox.pop(), None);
            assert!(mailbox.is_empty());
        }
    }

    #[test]
    fn a_capacity_is_rounded_up_to_a_power_of_two() {
        assert_eq!(Mailbox::<u8>::new(0).capacity(), 2);
        assert_eq!(Mailbox::<u8>::new(5).capacity(), 8);
    }

    #[test]
    fn dropping_the_mailbox_drops_what_is_left() {
        let item = Arc::new(());
        let mailbox = Mailbox::new(4);
        for _ in 0..3 {
            mailbox.push(item.clone()).expect("room");
        }
        assert_eq!(Arc::strong_count(&item), 4);
        drop(mailbox);
        assert_eq!(Arc::strong_count(&item), 1);
    }

    #[test]
    fn nothing_is_lost_or_doubled_between_threads() {
        const EACH: u64 = if cfg!(miri) { 50 } else { 5_000 };
        let mailbox = Arc::new(Mailbox::new(16));
        let producers: Vec<_> = (0..3u64)
            .map(|p| {
                let mailbox = mailbox.clone();
                std::thread::spawn(move || {
                    for i in 0..EACH {
                        let mut item = p << 32 | i;
                        while let Err(back) = mailbox.push(item) {
                            item = back;
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut next = [0u64; 3];
        let mut got = 0;
        while got < 3 * EACH {
            let Some(item) = mailbox.pop() else {
                std::thread::yield_now();
                continue;
            };
            let producer = (item >> 32) as usize;
            assert_eq!(item & 0xffff_ffff, next[producer], "the items of each producer stay in order");
            next[producer] += 1;
            got += 1;
        }
        producers.into_iter().for_each(|p| p.join().expect("producer"));
        assert_eq!(mailbox.pop(), None);
    }
}
