//! Registering memory with a device: in chunks, several at a time, all or none.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use te_core::{Access, Error, ErrorKind, MemSpan, MemoryKinds};

use super::verbs::{MrAccess, Registrar, Registration, Verbs};
use crate::config::Config;
use crate::wire::Chunking;

/// One log line per this many bytes of a long registration.
const LOG_EVERY_BYTES: u64 = 64 << 30;

/// What the device is to allow for a region with these rights. `relaxed`: it may reorder its writes.
pub(crate) fn mr_access(access: Access, relaxed: bool) -> MrAccess {
    let mut mr = MrAccess::empty();
    mr.set(MrAccess::LOCAL_WRITE, access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE));
    mr.set(MrAccess::REMOTE_READ, access.contains(Access::REMOTE_READ));
    mr.set(MrAccess::REMOTE_WRITE, access.contains(Access::REMOTE_WRITE));
    mr.set(MrAccess::RELAXED_ORDERING, relaxed);
    mr
}

/// Registers `span` in chunks. When one of them fails, the others are deregistered.
///
/// # Safety
/// As [`Registrar::register`], until every registration has ended.
///
/// # Errors
/// The provider's.
pub(crate) unsafe fn register<V: Verbs>(
    verbs: &V,
    span: MemSpan,
    access: MrAccess,
    chunking: Chunking,
    config: &Config,
) -> Result<Vec<Registration>, Error> {
    let count = chunking.count();
    if let Some(progress) = &config.progress {
        progress.requested(span.len() as u64);
    }
    let job = Job {
        registrar: verbs.registrar(),
        span,
        access,
        chunking,
        config,
        next: AtomicU64::new(0),
        done: Mutex::new((0, vec![None; count as usize])),
        failed: Mutex::new(None),
    };
    let threads = u64::from(config.registration_threads).min(count);
    if threads > 1 {
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // SAFETY: the caller's promise covers the span for longer than the scope.
                let work = || unsafe { job.work() };
                // If the system refuses a thread, the others do its share.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            // SAFETY: the caller's promise.
            unsafe { job.work() };
        });
    } else {
        // SAFETY: the caller's promise.
        unsafe { job.work() };
    }
    let made = job.done.into_inner().map_or_else(|poisoned| poisoned.into_inner().1, |done| done.1);
    let failed = job.failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    match failed {
        None => made.into_iter().collect::<Option<Vec<_>>>().ok_or_else(|| ErrorKind::System.into()),
        Some(error) => {
            for registration in made.into_iter().flatten() {
                if let Err(undo) = verbs.deregister(registration) {
                    // The caller takes the span back although the device may still reach it. The caller gets
                    // the first error; this one goes to the log.
                    log::error!("a chunk of a failed registration cannot be deregistered: {undo}");
                }
            }
            Err(error)
        }
    }
}

struct Job<'a> {
    registrar: &'a dyn Registrar,
    span: MemSpan,
    access: MrAccess,
    chunking: Chunking,
    config: &'a Config,
    next: AtomicU64,
    /// Bytes done, and each chunk's registration.
    done: Mutex<(u64, Vec<Option<Registration>>)>,
    failed: Mutex<Option<Error>>,
}

impl Job<'_> {
    /// Registers chunks until none is left or one has failed.
    ///
    /// # Safety
    /// As [`register`].
    unsafe fn work(&self) {
        while self.failed.lock().is_ok_and(|failed| failed.is_none()) {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.chunking.count() {
                return;
            }
            let (offset, len) = self.chunking.chunk(index);
            // SAFETY: the caller's promise covers every part of the span.
            let result = self.span.part(offset, len).and_then(|part| unsafe { self.chunk(part) });
            match result {
                Ok(registration) => self.note(index, len, registration),
                Err(error) => {
                    if let Ok(mut failed) = self.failed.lock() {
                        failed.get_or_insert(error);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`register`].
    unsafe fn chunk(&self, part: MemSpan) -> Result<Registration, Error> {
        let is_host = MemoryKinds::HOST.contains(part.location().kind());
        if self.config.populate && is_host {
            // SAFETY: the caller keeps the part mapped.
            unsafe { populate(part, self.access.contains(MrAccess::LOCAL_WRITE)) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.registrar.register(part, self.access) }
    }

    fn note(&self, index: u64, len: u64, registration: Registration) {
        if let Ok(mut done) = self.done.lock() {
            let before = done.0;
            done.0 += len;
            if let Some(slot) = done.1.get_mut(index as usize) {
                *slot = Some(registration);
            }
            if before / LOG_EVERY_BYTES != done.0 / LOG_EVERY_BYTES {
                log::info!("registered {} of {} GiB", done.0 >> 30, self.span.len() >> 30);
            }
        }
        if let Some(progress) = &self.config.progress {
            progress.done(len);
        }
    }
}

/// Faults in the pages that lie wholly inside, with the page size of the mapping. Kernels before 5.14 do not
/// know the advice, and some mappings refuse it; pinning then faults the pages in.
///
/// # Safety
/// `part` is mapped.
unsafe fn populate(part: MemSpan, writable: bool) {
    const PAGE: usize = 4_096;
    let start = (part.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (part.as_ptr() as usize + part.len()) / PAGE * PAGE;
    if start < end {
        let advice = if writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        // SAFETY: the range lies in `part`, which is mapped; populating changes no byte.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, advice) };
    }
}

/// Two cells of registered memory for the loopback proof. No export names them.
pub(crate) struct Scratch {
    cells: *mut [u64; 2],
    registration: Registration,
}

impl Scratch {
    pub(crate) fn new<V: Verbs>(verbs: &V) -> Result<Self, Error> {
        let cells = Box::into_raw(Box::new([0_u64; 2]));
        let span = MemSpan::new(cells.cast(), size_of::<[u64; 2]>());
        let access = MrAccess::LOCAL_WRITE | MrAccess::REMOTE_WRITE;
        // SAFETY: the box is reached only through `cells`, and freed after it was deregistered.
        match unsafe { verbs.register(span, access) } {
            Ok(registration) => Ok(Self { cells, registration }),
            Err(error) => {
                // SAFETY: made above, and not registered.
                drop(unsafe { Box::from_raw(cells) });
                Err(error)
            }
        }
    }

    /// Address of cell 0 or 1.
    pub(crate) fn address(&self, cell: u64) -> u64 {
        self.cells as u64 + 8 * cell
    }

    pub(crate) fn registration(&self) -> Registration {
        self.registration
    }

    pub(crate) fn set(&self, cell: usize, value: u64) {
        // SAFETY: mapped until `free`; no reference exists.
        unsafe { self.cells.cast::<u64>().add(cell.min(1)).write_volatile(value) };
    }

    pub(crate) fn get(&self, cell: usize) -> u64 {
        // SAFETY: as in `set`.
        unsafe { self.cells.cast::<u64>().add(cell.min(1)).read_volatile() }
    }

    /// Ends the registration and frees the cells; leaks them when the device does not release them.
    pub(crate) fn free<V: Verbs>(self, verbs: &V) {
        if verbs.deregister(self.registration).is_ok() {
            // SAFETY: made in `new`, freed once, and not registered any more.
            drop(unsafe { Box::from_raw(self.cells) });
        }
    }
}
