//! `BufferPool`: registered memory for the buffers of transfers, taken and given back.
//!
//! ```text
//!   acquire(size) ──▶ a free region that is large enough ──▶ BufferLease ──▶ .buffer (views)
//!        │                        ▲                               │
//!        └─▶ mmap, register ──────┴────────── release ◀───────────┘
//! ```
//!
//! Registering memory costs more than a transfer of it, so a region that is given back stays registered, and
//! serves the next lease of its size class. When the pool has reached its size, free regions of other classes
//! make room. A lease ends with `release`, with its `with` block, or with the object; as long as there are
//! views of its memory, `release` refuses.
#![allow(unsafe_code, reason = "maps memory, and lends it through Python's buffer protocol")]

use std::ffi::c_int;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView, PyTuple};

use snowskin_compat::store::Store;

use super::buffer;
use super::signature::{Arguments, Call, Parameter, Signature, default_of, python_methods};
use crate::gil;

/// Longest time between two looks at signals while a lease is waited for.
const SLICE: Duration = Duration::from_millis(50);
const SIZE_CLASS_MIN: u64 = 64 << 10;
const ALIGNMENT: u64 = 8 << 20;
const PAGE: usize = 4096;

/// Memory of the pool. The store that it is registered with lives as long as the pool.
struct Region {
    addr: NonNull<u8>,
    len: usize,
    /// The mapping, which is longer where the alignment is larger than a page.
    map_addr: NonNull<std::ffi::c_void>,
    map_len: usize,
}

// SAFETY: the value only owns the address range; nothing of it is bound to a thread.
unsafe impl Send for Region {}

impl Region {
    fn map(len: usize, alignment: usize) -> Option<Self> {
        let slack = alignment.saturating_sub(PAGE);
        let map_len = len.checked_next_multiple_of(PAGE)?.checked_add(slack)?;
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let map_addr = unsafe { mmap_anonymous(None, NonZeroUsize::new(map_len)?, rights, flags) }.ok()?;
        let skipped = map_addr.as_ptr().align_offset(alignment);
        // SAFETY: `skipped` is at most `slack`, because mappings begin at a page, so the address is in the
        // mapping, `len` bytes before its end at least.
        let addr = unsafe { map_addr.cast::<u8>().add(skipped) };
        Some(Self { addr, len, map_addr, map_len })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, unmapped once. Leases hold the region, so no view of it is left; it was
        // unregistered before, or never registered.
        let unmapped = unsafe { munmap(self.map_addr, self.map_len) };
        debug_assert!(unmapped.is_ok(), "munmap of a region of a pool");
    }
}

struct State {
    free: Vec<Region>,
    /// Bytes of all regions, those included that are being registered.
    bytes: u64,
    leases: usize,
    is_closed: bool,
}

struct Pool {
    store: Store,
    limits: Limits,
    state: Mutex<State>,
    given_back: Condvar,
}

#[derive(Clone, Copy)]
struct Limits {
    bytes_max: u64,
    class_min: u64,
    class_max: u64,
    alignment: usize,
    leases_max: usize,
}

/// Why there is no lease.
enum Refusal {
    Full,
    Closed,
    Memory(String),
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The length of the region for a buffer of this size: a power of two, or the size itself when it is
    /// larger than the largest class. `None`: the pool can never have it.
    fn class_of(&self, size: u64) -> Option<u64> {
        let least = size.max(1);
        let class = least.checked_next_power_of_two()?.max(self.limits.class_min);
        let class = if class > self.limits.class_max { least } else { class };
        (class <= self.limits.bytes_max).then_some(class)
    }

    /// A region of this class. Registering takes its time: not with the GIL.
    fn take(&self, class: u64) -> Result<Region, Refusal> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(Refusal::Closed);
        }
        if state.leases >= self.limits.leases_max {
            return Err(Refusal::Full);
        }
        if let Some(at) = state.free.iter().position(|region| region.len as u64 == class) {
            state.leases += 1;
            return Ok(state.free.swap_remove(at));
        }
        let mut surplus = Vec::new();
        while state.bytes.saturating_add(class) > self.limits.bytes_max {
            let Some(region) = state.free.pop() else { break };
            state.bytes -= region.len as u64;
            surplus.push(region);
        }
        let fits = state.bytes.saturating_add(class) <= self.limits.bytes_max;
        if fits {
            state.bytes += class;
            state.leases += 1;
        }
        drop(state);
        surplus.into_iter().for_each(|region| self.unregister(region));
        if !fits {
            return Err(Refusal::Full);
        }
        self.new_region(class).inspect_err(|_| {
            let mut state = self.lock();
            state.bytes -= class;
            state.leases -= 1;
            self.given_back.notify_all();
        })
    }

    fn new_region(&self, class: u64) -> Result<Region, Refusal> {
        let memory = || Refusal::Memory(format!("{class} bytes for a buffer could not be mapped"));
        let len = usize::try_from(class).map_err(|_| memory())?;
        let region = Region::map(len, self.limits.alignment).ok_or_else(memory)?;
        // SAFETY: the region stays mapped until `unregister` or, when the store is closed, until it is
        // dropped, which the store's own end precedes.
        let code = unsafe { self.store.register(region.addr.as_ptr() as u64, class) };
        if code == 0 {
            return Ok(region);
        }
        Err(Refusal::Memory(format!("a buffer of {class} bytes could not be registered: code {code}")))
    }

    fn unregister(&self, region: Region) {
        let code = self.store.unregister(region.addr.as_ptr() as u64);
        if code != 0 && self.store.is_set_up() {
            // Peers and transfers may still use it: it is never unmapped.
            log::error!("a buffer of {} bytes stays registered: code {code}", region.len);
            std::mem::forget(region);
        }
    }

    fn give_back(&self, region: Region) {
        let mut state = self.lock();
        state.leases -= 1;
        // What is larger than the largest class serves one lease.
        let is_kept = !state.is_closed && region.len as u64 <= self.limits.class_max;
        let surplus = if is_kept {
            state.free.push(region);
            None
        } else {
            state.bytes -= region.len as u64;
            Some(region)
        };
        drop(state);
        self.given_back.notify_all();
        surplus.into_iter().for_each(|region| self.unregister(region));
    }

    /// Ends the pool. `false`: there are leases.
    fn close(&self) -> bool {
        let mut state = self.lock();
        if state.leases > 0 {
            return false;
        }
        state.is_closed = true;
        let free = std::mem::take(&mut state.free);
        state.bytes = 0;
        drop(state);
        self.given_back.notify_all();
        free.into_iter().for_each(|region| self.unregister(region));
        true
    }

    /// Waits until something was given back, or a slice of time has passed.
    fn wait(&self, slice: Duration) {
        let state = self.lock();
        drop(self.given_back.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Registered memory for buffers, up to `max_bytes`.
///
/// `max_bytes` 0 means twice the store's local buffer. Buffers have the next power of two as their size
/// class, from `min_size_class` to `max_size_class`; larger ones are freed when they are given back. When the
/// pool is full, `acquire` waits, or raises RuntimeError.
///
#[doc = concat!(
    "__init__(self: mooncake.store.BufferPool, store: object, max_bytes: int = 0, ",
    "min_size_class: int = 65536, max_size_class: object = None, alignment: int = ",
    "8388608, block_on_exhaustion: bool = True, default_timeout: object = None, ",
    "max_regions: object = None, prewarm_size: object = None, prewarm_count: int = 0)",
    " -> None",
)]
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct BufferPool {
    pool: Arc<Pool>,
    waits: bool,
    timeout: Option<f64>,
    /// Keeps the store from being closed by its destructor.
    _owner: Py<PyAny>,
}

type This<'py> = Bound<'py, BufferPool>;
type Given<'a, 'py> = Arguments<'a, 'py>;

const NEW: Signature = Signature {
    name: "__init__",
    class: "mooncake.store.BufferPool",
    parameters: &[
        Parameter { name: "store", kind: "object", default: None },
        Parameter { name: "max_bytes", kind: "int", default: Some("0") },
        Parameter { name: "min_size_class", kind: "int", default: Some("65536") },
        Parameter { name: "max_size_class", kind: "object", default: Some("None") },
        Parameter { name: "alignment", kind: "int", default: Some("8388608") },
        Parameter { name: "block_on_exhaustion", kind: "bool", default: Some("True") },
        Parameter { name: "default_timeout", kind: "object", default: Some("None") },
        Parameter { name: "max_regions", kind: "object", default: Some("None") },
        Parameter { name: "prewarm_size", kind: "object", default: Some("None") },
        Parameter { name: "prewarm_count", kind: "int", default: Some("0") },
    ],
    rest_after: None,
    returns: "None",
};

fn error(text: impl Into<String>) -> PyErr {
    PyRuntimeError::new_err(text.into())
}

/// An argument that may be `None`.
fn optional<T>(given: &Given<'_, '_>, at: usize, value: impl FnOnce() -> PyResult<T>) -> PyResult<Option<T>> {
    match given.get(at) {
        Some(argument) if !argument.is_none() => value().map(Some),
        _ => Ok(None),
    }
}

fn seconds(given: &Given<'_, '_>, at: usize) -> PyResult<Option<f64>> {
    let read = || {
        let value = given.required(at)?;
        value.extract::<f64>().map_err(|_| given.refuse(at, value, "float or None"))
    };
    optional(given, at, read)
}

/// The store of an object: one of ours, or one that gives its own out.
fn store_of(object: &Bound<'_, PyAny>) -> PyResult<Store> {
    const METHOD: &str = "_get_pyclient_capsule";
    if !object.is_none() && !object.hasattr(METHOD)? {
        let kind = object.get_type();
        return Err(error(format!("BufferPool needs a MooncakeDistributedStore, not {kind}")));
    }
    let capsule = if object.is_none() { object.clone() } else { object.call_method0(METHOD)? };
    if capsule.is_none() {
        return Err(error("MooncakeDistributedStore is not initialized"));
    }
    let capsule = capsule.cast::<PyCapsule>().map_err(|_| error("the store gave out no capsule"))?;
    super::store::of_capsule(capsule).ok_or_else(|| error("the capsule is that of another library"))
}

fn limits(given: &Given<'_, '_>, local: u64) -> PyResult<Limits> {
    let (class_min, alignment) = (given.uint_or(2, SIZE_CLASS_MIN)?, given.uint_or(4, ALIGNMENT)?);
    if class_min == 0 || alignment == 0 {
        return Err(error("min_size_class and alignment must be positive"));
    }
    let is_usable = alignment.is_power_of_two() && alignment >= 8;
    let alignment = usize::try_from(alignment).ok().filter(|_| is_usable);
    let alignment = alignment
        .ok_or_else(|| error("alignment must be a power of two and at least the size of a pointer"))?;
    let bytes_max = match given.uint_or(1, 0)? {
        0 => local.saturating_mul(2),
        bytes => bytes.max(local),
    };
    Ok(Limits {
        bytes_max,
        class_min,
        class_max: optional(given, 3, || given.uint(3))?.unwrap_or(bytes_max),
        alignment,
        leases_max: optional(given, 7, || given.uint(7))?
            .map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX)),
    })
}

fn acquire(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<BufferLease> {
    let this = slf.get();
    let size = given.uint(0)?;
    let waits = optional(given, 1, || given.bool_or(1, true))?.unwrap_or(this.waits);
    let timeout = seconds(given, 2)?.or(this.timeout);
    let until = match timeout {
        None => None,
        Some(timeout) => {
            let timeout = Duration::try_from_secs_f64(timeout);
            let timeout = timeout.map_err(|_| error("timeout must be non-negative"))?;
            Instant::now().checked_add(timeout)
        }
    };
    let Some(class) = this.pool.class_of(size) else {
        let most = this.pool.limits.bytes_max;
        return Err(error(format!("requested buffer size {size} exceeds pool capacity {most}")));
    };
    let py = slf.py();
    loop {
        match py.detach(|| this.pool.take(class)) {
            Ok(region) => return Ok(BufferLease::new(Arc::clone(&this.pool), region, size)),
            Err(Refusal::Closed) => return Err(error("buffer pool is closed")),
            Err(Refusal::Memory(why)) => return Err(error(why)),
            Err(Refusal::Full) if !waits => return Err(error("buffer pool is exhausted")),
            Err(Refusal::Full) => {}
        }
        let left = until.map_or(SLICE, |until| until.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Err(error("timed out waiting for buffer"));
        }
        py.detach(|| this.pool.wait(left.min(SLICE)));
        py.check_signals()?;
    }
}

fn prewarm(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<()> {
    warm(slf.py(), slf.get(), given.uint(0)?, given.uint(1)?)
}

/// Registers buffers in advance, as many as there is room for.
fn warm(py: Python<'_>, pool: &BufferPool, size: u64, count: u64) -> PyResult<()> {
    let Some(class) = pool.pool.class_of(size).filter(|class| *class <= pool.pool.limits.class_max) else {
        return Ok(());
    };
    py.detach(|| {
        let regions: Vec<Region> = (0..count).map_while(|_| pool.pool.take(class).ok()).collect();
        regions.into_iter().for_each(|region| pool.pool.give_back(region));
    });
    py.check_signals()
}

fn close(slf: &This<'_>, _: &Given<'_, '_>) -> PyResult<()> {
    let pool = &slf.get().pool;
    let is_closed = slf.py().detach(|| pool.close());
    if is_closed { Ok(()) } else { Err(error("cannot close buffer pool with active leases")) }
}

python_methods! {
    impl BufferPool as "mooncake.store.BufferPool" {
        #[new]
        #[pyo3(
            signature = (*args, **kwargs),
            text_signature = "(store, max_bytes=0, min_size_class=65536, max_size_class=None, \
                alignment=8388608, block_on_exhaustion=True, default_timeout=None, max_regions=None, \
                prewarm_size=None, prewarm_count=0)"
        )]
        fn new(args: &Bound<'_, PyTuple>, kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
            let given = Arguments::bind(&[&NEW], 0, Call { owner: args.as_any(), args, kwargs })?;
            let owner = given.required(0)?;
            let store = store_of(owner)?;
            let local = store.local_buffer();
            if local == 0 {
                return Err(error("BufferPool requires a store configured with a local buffer"));
            }
            let limits = limits(&given, local)?;
            let state = State { free: Vec::new(), bytes: 0, leases: 0, is_closed: false };
            let pool = Pool { store, limits, state: Mutex::new(state), given_back: Condvar::new() };
            let this = Self {
                pool: Arc::new(pool),
                waits: given.bool_or(5, true)?,
                timeout: seconds(&given, 6)?,
                _owner: owner.clone().unbind(),
            };
            if let Some(size) = optional(&given, 8, || given.uint(8))? {
                warm(args.py(), &this, size, given.uint_or(9, 0)?)?;
            }
            Ok(this)
        }
    }

    /// Takes a buffer of `size` bytes. Raises RuntimeError when there is none, or none within `timeout`
    /// seconds.
    fn acquire(size: "int", block: "object" = "None", timeout: "object" = "None")
        -> "mooncake.store.BufferLease" => acquire;

    /// As `acquire`.
    fn buffer(size: "int", block: "object" = "None", timeout: "object" = "None")
        -> "mooncake.store.BufferLease" => acquire;

    /// Registers `count` buffers of this size in advance, as many as there is room for.
    fn prewarm(size: "int", count: "int") -> "None" => prewarm;

    /// Ends the pool. Raises RuntimeError as long as there are leases.
    fn close() -> "None" => close;
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        let pool = Arc::clone(&self.pool);
        // Leases keep what they have; the last of them finds the pool closed.
        gil::later(move || {
            pool.lock().is_closed = true;
            let free = std::mem::take(&mut pool.lock().free);
            free.into_iter().for_each(|region| pool.unregister(region));
        });
    }
}

/// What a lease and the views of its memory share.
struct Lent {
    pool: Arc<Pool>,
    region: Mutex<Option<Region>>,
    size: u64,
    views: AtomicUsize,
}

impl Lent {
    fn addr(&self) -> PyResult<usize> {
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let addr = region.as_ref().map(|region| region.addr.as_ptr() as usize);
        addr.ok_or_else(|| error("buffer lease is closed"))
    }

    /// Adds a view, and returns the address of its bytes. Views are counted under the lock, so no lease ends
    /// between the two.
    fn view(&self) -> PyResult<usize> {
        let region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        let region = region.as_ref().ok_or_else(|| error("buffer lease is closed"))?;
        self.views.fetch_add(1, Ordering::AcqRel);
        Ok(region.addr.as_ptr() as usize)
    }

    /// Ends the lease. `false`: there are views.
    fn end(&self) -> bool {
        let mut region = self.region.lock().unwrap_or_else(PoisonError::into_inner);
        if region.is_some() && self.views.load(Ordering::Acquire) > 0 {
            return false;
        }
        let region = region.take();
        if let Some(region) = region {
            self.pool.give_back(region);
        }
        true
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let region = self.region.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(region) = region {
            let pool = Arc::clone(&self.pool);
            // Unregistering a region that the pool does not keep may take its time.
            gil::later(move || pool.give_back(region));
        }
    }
}

/// A buffer of a pool, until it is released.
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct BufferLease(Arc<Lent>);

impl BufferLease {
    fn new(pool: Arc<Pool>, region: Region, size: u64) -> Self {
        Self(Arc::new(Lent { pool, region: Mutex::new(Some(region)), size, views: AtomicUsize::new(0) }))
    }
}

#[pymethods]
impl BufferLease {
    /// The address of the first byte.
    #[getter]
    fn ptr(&self) -> PyResult<usize> {
        self.0.addr()
    }

    /// How many bytes there are.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size
    }

    /// A memoryview of the bytes. As long as it lives, the lease cannot be released.
    #[getter]
    fn buffer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(Bound::new(py, BufferLeaseView::new(&self.0)?)?.as_any())
    }

    /// release(self: mooncake.store.BufferLease) -> None
    ///
    /// Gives the buffer back. Raises RuntimeError while there are views of it.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        if py.detach(|| self.0.end()) {
            return Ok(());
        }
        Err(error("cannot release buffer while exported views exist"))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.release(py)
    }
}

/// A view of a leased buffer.
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct BufferLeaseView {
    lent: Arc<Lent>,
    addr: usize,
}

impl BufferLeaseView {
    fn new(lent: &Arc<Lent>) -> PyResult<Self> {
        Ok(Self { addr: lent.view()?, lent: Arc::clone(lent) })
    }
}

impl Drop for BufferLeaseView {
    fn drop(&mut self) {
        self.lent.views.fetch_sub(1, Ordering::AcqRel);
    }
}

#[pymethods]
impl BufferLeaseView {
    /// A memoryview of the bytes.
    #[getter]
    fn buffer<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf.as_any())
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let (addr, len) = (this.addr as *mut std::ffi::c_void, this.lent.size as usize);
        // SAFETY: Python passes a view to fill. The region is not given back as long as this object, which
        // the view holds, counts among the views of the lease.
        unsafe { buffer::fill(view, flags, addr, len, c"B".as_ptr().cast_mut(), slf.into_any()) }
    }
}

/// Adds the classes to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BufferPool>()?;
    module.add_class::<BufferLease>()?;
    module.add_class::<BufferLeaseView>()
}
