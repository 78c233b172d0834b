//! Reports of damaged memory that come as a signal of their own (SIGBUS with `BUS_MCEERR_AO`): with
//! `vm.memory_failure_early_kill`, the kernel sends one to each process that has mapped a damaged page,
//! whatever it does at that time.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::pool::bad::BadGranules;

/// Mappings that are looked up. Reports about others go to the next handler.
const WATCHED_MAX: usize = 64;

/// A mapping, and where its damaged parts are noted; null: the place is free.
struct Watched {
    start: AtomicUsize,
    len: AtomicUsize,
    bad: AtomicPtr<BadGranules>,
}

static WATCHED: [Watched; WATCHED_MAX] = [const {
    Watched { start: AtomicUsize::new(0), len: AtomicUsize::new(0), bad: AtomicPtr::new(ptr::null_mut()) }
}; WATCHED_MAX];
/// Signal handlers that are looking a mapping up.
static LOOKING: AtomicUsize = AtomicUsize::new(0);
/// Who changes the table.
static CHANGING: Mutex<()> = Mutex::new(());

/// A mapping about which reports are noted, until the value drops.
#[derive(Debug)]
pub(super) struct Watch(usize);

impl Watch {
    /// Notes damaged memory of a mapping in `bad`, which must not move or end before the value drops. `None`
    /// when too many mappings are watched.
    pub(super) fn new(start: usize, len: usize, bad: &BadGranules) -> Option<Self> {
        let _one = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let at = WATCHED.iter().position(|watched| watched.bad.load(Ordering::SeqCst).is_null())?;
        let watched = &WATCHED[at];
        watched.start.store(start, Ordering::SeqCst);
        watched.len.store(len, Ordering::SeqCst);
        watched.bad.store(ptr::from_ref(bad).cast_mut(), Ordering::SeqCst);
        Some(Self(at))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _one = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        WATCHED[self.0].bad.store(ptr::null_mut(), Ordering::SeqCst);
        // A handler that has found the entry before may still use it.
        while LOOKING.load(Ordering::SeqCst) > 0 {
            std::hint::spin_loop();
        }
    }
}

/// Notes that the memory at `addr` is damaged. Returns whether it belongs to a mapping that is watched. A
/// signal handler may call it: it takes no lock.
pub(super) fn report(addr: usize) -> bool {
    LOOKING.fetch_add(1, Ordering::SeqCst);
    let mut found = false;
    for watched in &WATCHED {
        let bad = watched.bad.load(Ordering::SeqCst);
        let offset = addr.wrapping_sub(watched.start.load(Ordering::SeqCst));
        if !bad.is_null() && offset < watched.len.load(Ordering::SeqCst) {
            // SAFETY: the entry was there after `LOOKING` was increased, so `Watch::drop` waits for this call
            // before its owner frees what the pointer names; all references to that are shared.
            unsafe { &*bad }.mark(offset as u64);
            found = true;
        }
    }
    LOOKING.fetch_sub(1, Ordering::SeqCst);
    found
}
