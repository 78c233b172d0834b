//! What a child process does not inherit: a word that is 0 in every process that was forked after it was set,
//! and values that depend on it.

use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::fork::Mark;

/// Address of the word, from the first call on. There is no lock: a fork in the middle of the first call must
/// not leave one held.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// The word on kernels before 4.14.
static PLAIN: AtomicU64 = AtomicU64::new(0);
const PAGE: NonZeroUsize = NonZeroUsize::new(4096).expect("not 0");

/// The word. Every call returns the same one.
pub(crate) fn wiped_on_fork() -> &'static AtomicU64 {
    let known = WORD.load(Ordering::Acquire);
    // SAFETY: `WORD` holds null, or what `made` returned: an aligned word, zero or set, that lives for ever.
    if let Some(word) = unsafe { known.as_ref() } {
        return word;
    }
    let ours = made();
    match WORD.compare_exchange(ptr::null_mut(), ours, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above.
        Ok(_) => unsafe { &*ours },
        Err(theirs) => {
            if !ptr::eq(ours, &raw const PLAIN)
                && let Some(page) = ptr::NonNull::new(ours.cast())
            {
                // SAFETY: `made` mapped it, and no other thread has seen it.
                let unmapped = unsafe { munmap(page, PAGE.get()) };
                debug_assert!(unmapped.is_ok(), "munmap of a page of this process");
            }
            // SAFETY: as above.
            unsafe { &*theirs }
        }
    }
}

/// A page that the kernel wipes in a child; where it cannot, a word that a handler of the C library's `fork`
/// wipes.
fn made() -> *mut AtomicU64 {
    let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the kernel picks the address, so nothing that exists is replaced.
    if let Ok(page) = unsafe { mmap_anonymous(None, PAGE, rights, MapFlags::MAP_PRIVATE) } {
        // SAFETY: a page of this process that nothing uses yet.
        if unsafe { madvise(page, PAGE.get(), MmapAdvise::MADV_WIPEONFORK) }.is_ok() {
            return page.as_ptr().cast();
        }
        // SAFETY: a page of this process that no other thread has seen.
        let unmapped = unsafe { munmap(page, PAGE.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of a page of this process");
    }
    // SAFETY: the handler only stores to an atomic, which is allowed in a child.
    let handled = unsafe { libc::pthread_atfork(None, None, Some(wipe_plain)) };
    if handled != 0 {
        log::warn!("a fork of this process cannot be noticed: do not use its engines in a child");
    }
    (&raw const PLAIN).cast_mut()
}

extern "C" fn wipe_plain() {
    PLAIN.store(0, Ordering::Relaxed);
}

/// A value of which each process has its own. A child makes a new one: the inherited value belongs to its
/// parent, and may be locked by a thread that the child does not have.
pub struct PerProcess<T> {
    made: AtomicPtr<(Mark, T)>,
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    /// Without a value: each process makes its own on first use.
    #[must_use]
    pub const fn new() -> Self {
        Self { made: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The value of this process.
    #[must_use]
    pub fn get(&self) -> &'static T {
        let known = self.made.load(Ordering::Acquire);
        // SAFETY: null, or a box that was leaked below.
        if let Some((mark, made)) = unsafe { known.as_ref() }
            && !mark.is_forked()
        {
            return made;
        }
        // The parent's value is leaked: this process must not drop it.
        let fresh = Box::into_raw(Box::new((Mark::new(), T::default())));
        match self.made.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: leaked above.
            Ok(_) => unsafe { &(*fresh).1 },
            Err(theirs) => {
                // SAFETY: no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: leaked above by another thread of this process, which changed `made` after this
                // thread had read it.
                unsafe { &(*theirs).1 }
            }
        }
    }
}

impl<T: Default + Send + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A value that is dropped only by the process that made it. A child leaks it: its threads do not run there,
/// and its sockets are the parent's.
pub struct Own<T> {
    mark: Mark,
    value: ManuallyDrop<T>,
}

impl<T> Own<T> {
    /// A value that belongs to this process.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self { mark: Mark::new(), value: ManuallyDrop::new(value) }
    }
}

impl<T> Deref for Own<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Own<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !self.mark.is_forked() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
