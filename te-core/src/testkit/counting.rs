//! A global allocator that counts, so that a test can assert that nothing was allocated.
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait")]

use alloc::boxed::Box;
use core::alloc::{GlobalAlloc, Layout};

/// Counts allocations and forwards them. With `std` each thread has its own count, so tests do not disturb
/// each other.
///
/// ```
/// use std::alloc::System;
/// use te_core::testkit::{CountingAlloc, allocations};
///
/// #[global_allocator]
/// static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);
///
/// fn main() {
///     let before = allocations();
///     let boxed = Box::new(1);
///     assert_eq!(allocations() - before, 1);
///     # drop(boxed);
/// }
/// ```
#[derive(Debug, Default)]
pub struct CountingAlloc<A>(A);

impl<A> CountingAlloc<A> {
    /// Counts the allocations of `inner`.
    pub const fn new(inner: A) -> Self {
        Self(inner)
    }
}

// SAFETY: every call goes unchanged to `A`, which keeps the contract of `GlobalAlloc`; counting allocates
// nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAlloc<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count::one_more();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count::one_more();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count::one_more();
        // SAFETY: the caller's promise, passed on.
        unsafe { self.0.realloc(ptr, layout, new_size) }
    }
}

/// The number of allocations and reallocations so far, of this thread (with `std`) or of all threads.
#[must_use]
pub fn allocations() -> u64 {
    count::so_far()
}

/// Whether a [`CountingAlloc`] is this program's global allocator.
#[must_use]
pub fn is_counting() -> bool {
    let before = allocations();
    drop(core::hint::black_box(Box::new(0u64)));
    allocations() != before
}

#[cfg(feature = "std")]
mod count {
    use core::cell::Cell;

    std::thread_local! {
        // Const and without a destructor: reading it allocates nothing, even while a thread starts or ends.
        static COUNT: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn one_more() {
        let _thread_is_ending = COUNT.try_with(|count| count.set(count.get() + 1));
    }

    pub(super) fn so_far() -> u64 {
        COUNT.try_with(Cell::get).unwrap_or(0)
    }
}

#[cfg(not(feature = "std"))]
mod count {
    use core::sync::atomic::{AtomicUsize, Ordering};

    static COUNT: AtomicUsize = AtomicUsize::new(0);

    pub(super) fn one_more() {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn so_far() -> u64 {
        COUNT.load(Ordering::Relaxed) as u64
    }
}
