//! Events of callers, and a gate that holds a caller's stream.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, ptr};

use te_core::{Error, ErrorKind, Location};

use super::abi::{NOT_READY, Opaque, SUCCESS, WAIT_VALUE_GEQ};
use super::device::Device;
use super::ring::Pinned;
use crate::after::Over;
use crate::gpu::Gpu;

/// An event of the caller's (`cudaEvent_t`, `CUevent`, `hipEvent_t`), which is only ever asked.
pub struct ForeignEvent {
    device: Arc<Device>,
    event: Opaque,
}

// SAFETY: events are asked by any thread.
unsafe impl Send for ForeignEvent {}

impl Over for ForeignEvent {
    fn is_over(&self) -> Result<bool, Error> {
        let _entered = self.device.enter()?;
        // SAFETY: an event that the caller of `Gpu::event` keeps.
        match unsafe { (self.device.driver.event_query)(self.event) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => self.device.check(code).map(|()| true),
        }
    }
}

impl fmt::Debug for ForeignEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ForeignEvent").field(&self.event).finish()
    }
}

/// Words for the gates of a device. A word that comes back goes on from its last value, so a stream that
/// still waits for an old value is not held by the next gate.
pub(crate) struct GatePage {
    device: Arc<Device>,
    pinned: Pinned,
    /// Where the free words are, and the value for which nothing has waited yet.
    free: Mutex<Vec<(usize, u64)>>,
}

/// Gates of a device at a time.
const GATES_MAX: usize = 1_024;
/// Words do not share a cache line.
const GATE_BYTES: usize = 64;

impl GatePage {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, Error> {
        let _entered = device.enter()?;
        let pinned = Pinned::new(device, GATES_MAX * GATE_BYTES)?;
        let free = (0..GATES_MAX).rev().map(|nth| (nth * GATE_BYTES, 1)).collect();
        Ok(Self { device: Arc::clone(device), pinned, free: Mutex::new(free) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(usize, u64)>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Holds a caller's stream back until a transfer is complete, without a thread that waits.
///
/// The caller's work goes into its stream before the transfer has ended; the stream waits for a word that
/// [`open`](Self::open) stores. A gate that is dropped opens, so that no stream waits for ever.
pub struct Gate {
    page: Arc<GatePage>,
    word: usize,
    /// What streams that are held wait for.
    next: u64,
}

impl Gate {
    pub(crate) fn new(page: Arc<GatePage>) -> Result<Self, Error> {
        if page.device.driver.stream_wait.is_none() {
            return Err(ErrorKind::Unsupported.into());
        }
        let (word, next) = page.lock().pop().ok_or(ErrorKind::Full)?;
        Ok(Self { page, word, next })
    }

    /// Lets everything that is put into `stream` from now on wait until the gate [opens](Self::open).
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// `stream` is a stream of this device (`cudaStream_t`, `CUstream`), and lives until the call returns.
    /// Everything that is in the stream then is over before the last [`Gpu`](crate::Gpu) is dropped that
    /// knows the device.
    pub unsafe fn hold(&mut self, stream: usize) -> Result<(), Error> {
        let device = &self.page.device;
        let wait = device.driver.stream_wait.ok_or(ErrorKind::Unsupported)?;
        let _entered = device.enter()?;
        let stream = ptr::with_exposed_provenance_mut(stream);
        let word = self.page.pinned.by_device(self.word);
        // SAFETY: the caller's promise; the word is page-locked memory.
        device.check(unsafe { wait(stream, word, self.next, WAIT_VALUE_GEQ) })
    }

    /// The transfer is complete, or has failed: streams that were held go on. Never blocks.
    pub fn open(&mut self) {
        // A fork has no streams that wait, and the page is not mapped there.
        if self.page.device.is_forked() {
            return;
        }
        self.page.pinned.word(self.word).store(self.next, Ordering::Release);
        self.next += 1;
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if self.page.device.is_forked() {
            return;
        }
        self.open();
        self.page.lock().push((self.word, self.next));
    }
}

impl Gpu {
    /// An event of the caller's, by its `cudaEvent_t`, `CUevent` or `hipEvent_t`: the first half of "transfer
    /// this *after* that work".
    ///
    /// # Errors
    /// `Unsupported` when there is no such device; `System`.
    ///
    /// # Safety
    /// `event` is an event of the device, and is not destroyed before the value is dropped.
    pub unsafe fn event(&self, location: Location, event: usize) -> Result<ForeignEvent, Error> {
        Ok(ForeignEvent { device: self.device(location)?, event: ptr::with_exposed_provenance_mut(event) })
    }
}
