//! Devices with memory that the CPU cannot address and a NIC reaches by a dma-buf.
//!
//! Each allocation is a file in memory, which the simulated NIC maps. Its address is one that no process has
//! mapped, so that code which uses it as a pointer faults.

use std::fs::File;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use te_core::device::{Devices, DmaBuf, Stager};
use te_core::testkit::PeekPoke;
use te_core::{Error, ErrorKind, Location, MemSpan, MemoryKinds};

/// The address of the first allocation.
const ADDRESSES: usize = usize::MAX << (usize::BITS - 8);
const PAGE: usize = 4_096;

/// Devices of one location. Clones share the memory.
#[derive(Clone)]
pub(crate) struct ExportingDevices {
    location: Location,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// First address, length and file of each allocation, by ascending address.
    allocations: Mutex<Vec<(usize, usize, File)>>,
    /// `dmabuf` fails with `Unsupported`.
    refuses: AtomicBool,
}

impl ExportingDevices {
    pub(crate) fn new(location: Location) -> Self {
        Self { location, state: Arc::default() }
    }

    /// Zeroed memory, aligned to a page, for as long as the devices exist.
    pub(crate) fn allocate(&self, bytes: usize) -> MemSpan {
        // SAFETY: a C string, and a new descriptor that is owned from here on.
        let file = unsafe {
            let fd = libc::memfd_create(c"dmabuf".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0, "memfd_create: {}", std::io::Error::last_os_error());
            File::from(OwnedFd::from_raw_fd(fd))
        };
        let whole = bytes.next_multiple_of(PAGE);
        file.set_len(whole as u64).unwrap();
        let mut allocations = self.lock();
        // The page between two allocations belongs to neither.
        let base = allocations.last().map_or(ADDRESSES, |(base, len, _)| base + len + PAGE);
        allocations.push((base, whole, file));
        MemSpan::new(std::ptr::without_provenance_mut(base), bytes).at(self.location)
    }

    /// As [`allocate`](Self::allocate), of several mappings at successive addresses, each with a dma-buf of its
    /// own. Their lengths are multiples of a page.
    pub(crate) fn allocate_in_pieces(&self, lengths: &[usize]) -> MemSpan {
        let pieces: Vec<MemSpan> = lengths.iter().map(|length| self.allocate(*length)).collect();
        let mut allocations = self.lock();
        let first = allocations.len() - pieces.len();
        let mut at = allocations[first].0.next_multiple_of(1 << 21);
        let base = at;
        for (allocation, length) in allocations[first..].iter_mut().zip(lengths) {
            allocation.0 = at;
            at += length;
        }
        MemSpan::new(std::ptr::without_provenance_mut(base), at - base).at(self.location)
    }

    /// From now on `dmabuf` is `Unsupported`, or it works again.
    pub(crate) fn refuse_dmabufs(&self, refuse: bool) {
        self.state.refuses.store(refuse, Ordering::Relaxed);
    }

    /// How many file descriptors of this process, besides the one of the devices, refer to the memory of
    /// `span`.
    pub(crate) fn descriptors(&self, span: MemSpan) -> usize {
        let (dev, ino) = self.with(span, |file, _| {
            let metadata = file.metadata().unwrap();
            (metadata.dev(), metadata.ino())
        });
        let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        // A descriptor of another thread may be closed meanwhile.
        let files = entries.filter_map(|entry| std::fs::metadata(entry.path()).ok());
        files.filter(|file| (file.dev(), file.ino()) == (dev, ino)).count() - 1
    }

    /// Calls `what` with the file that has the memory of `span`, and the offset in it.
    fn with<T>(&self, span: MemSpan, what: impl FnOnce(&File, u64) -> T) -> T {
        let allocations = self.lock();
        let (file, offset) = find(&allocations, span).expect("memory of these devices");
        what(file, offset)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(usize, usize, File)>> {
        self.state.allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find(allocations: &[(usize, usize, File)], span: MemSpan) -> Option<(&File, u64)> {
    let address = span.as_ptr().addr();
    let within = |(base, len, _): &&(usize, usize, File)| {
        address.checked_sub(*base).is_some_and(|at| at < *len && span.len() <= len - at)
    };
    allocations.iter().find(within).map(|(base, _, file)| (file, (address - base) as u64))
}

/// The parts of a span, one per mapping.
fn parts(allocations: &[(usize, usize, File)], span: MemSpan) -> Option<Vec<(&File, u64, MemSpan)>> {
    let (mut done, mut parts) = (0, Vec::new());
    while done < span.len() {
        let address = span.as_ptr().addr() + done;
        let (base, whole, file) =
            allocations.iter().find(|(base, whole, _)| (*base..*base + *whole).contains(&address))?;
        let len = (base + whole - address).min(span.len() - done);
        parts.push((file, (address - base) as u64, span.part(done as u64, len as u64).ok()?));
        done += len;
    }
    Some(parts)
}

impl Devices for ExportingDevices {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        parts(&self.lock(), MemSpan::new(ptr, len)).map(|_| self.location)
    }

    fn kinds(&self) -> MemoryKinds {
        self.location.kind()
    }

    fn dmabuf(&self, span: MemSpan) -> Result<(OwnedFd, u64), Error> {
        if self.state.refuses.load(Ordering::Relaxed) {
            return Err(ErrorKind::Unsupported.into());
        }
        let allocations = self.lock();
        let (file, offset) = find(&allocations, span).ok_or(ErrorKind::NotFound)?;
        Ok((file.try_clone().map_err(|_| ErrorKind::System)?.into(), offset))
    }

    fn dmabufs(&self, span: MemSpan) -> Result<Vec<DmaBuf>, Error> {
        if self.state.refuses.load(Ordering::Relaxed) {
            return Err(ErrorKind::Unsupported.into());
        }
        let allocations = self.lock();
        let parts = parts(&allocations, span).ok_or(ErrorKind::NotFound)?;
        let part = |(file, offset, span): (&File, u64, MemSpan)| {
            Ok(DmaBuf { fd: file.try_clone().map_err(|_| ErrorKind::System)?.into(), offset, span })
        };
        parts.into_iter().map(part).collect()
    }

    fn stager(&self, _location: Location) -> Result<Box<dyn Stager>, Error> {
        panic!("a NIC that reaches the memory needs no stager")
    }
}

impl PeekPoke for ExportingDevices {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        let allocations = self.lock();
        let mut out = out;
        for (file, offset, part) in parts(&allocations, span).expect("memory of these devices") {
            let (here, rest) = out.split_at_mut(part.len());
            file.read_exact_at(here, offset).unwrap();
            out = rest;
        }
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        let allocations = self.lock();
        let mut bytes = bytes;
        for (file, offset, part) in parts(&allocations, span).expect("memory of these devices") {
            let (here, rest) = bytes.split_at(part.len());
            file.write_all_at(here, offset).unwrap();
            bytes = rest;
        }
    }
}
