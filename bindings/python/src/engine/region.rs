//! `snowskin.Region`: memory that is registered with an engine.
#![allow(unsafe_code, reason = "registers memory that Python lends, and lends memory to Python")]

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyTuple};
use te_core::{Access, MemSpan, MemoryKinds, Op, RegionId};
use te_engine::SharedRegion;

use super::batch::{Batch, Place};
use super::mooncake::Export;
use super::peer::Peer;
use super::shared::Shared;
use crate::buffers::{Readable, Writable};
use crate::errors::Fault;
use crate::gil;
use crate::lease::as_array;
use crate::options::refused;

/// A registration. When this is dropped, it ends in the background; the memory stays where it is until then.
pub(super) struct Registration {
    shared: Arc<Shared>,
    id: RegionId,
    len: u64,
    writable: bool,
    /// `None` once the registration is to end.
    memory: Mutex<Option<Kept>>,
    /// Held while an export ends, which waits for peers: the memory is not given back meanwhile. Locked
    /// before `memory`.
    withdrawing: Mutex<()>,
}

/// Registered memory. It stays where it is for as long as this value, or what it holds, exists.
pub(super) struct Kept {
    /// The export to Mooncake peers. Dropped before the memory.
    pub(super) export: Option<Export>,
    held: Held,
}

/// What keeps the memory in place.
enum Held {
    /// An object of the caller that can be written.
    Writable(#[expect(dead_code, reason = "kept for its drop")] Writable),
    /// An object of the caller that is read-only.
    Readable(#[expect(dead_code, reason = "kept for its drop")] Readable),
    /// Memory of the engine.
    Own(SharedRegion),
}

impl Registration {
    fn new(shared: &Arc<Shared>, id: RegionId, len: u64, writable: bool, memory: Held) -> Arc<Self> {
        let memory = Mutex::new(Some(Kept { export: None, held: memory }));
        let of = Arc::clone(shared);
        let this = Arc::new(Self { shared: of, id, len, writable, memory, withdrawing: Mutex::default() });
        shared.registered(&this);
        this
    }

    pub(super) const fn id(&self) -> RegionId {
        self.id
    }

    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    pub(super) const fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes the memory, of which the caller takes care: the engine is being closed.
    pub(super) fn give_up(&self) -> Option<Kept> {
        let _withdrawn = self.withdrawing.lock().unwrap_or_else(PoisonError::into_inner);
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The engine's own memory, if that is what is registered.
    fn own(&self) -> Option<SharedRegion> {
        match &*self.memory.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Kept { held: Held::Own(region), .. }) => Some(region.clone()),
            _ => None,
        }
    }

    /// Lets Mooncake peers access the memory at `addr`, which is that of this registration.
    ///
    /// # Errors
    /// It is exported already; the registration has ended; the engine has no ports for Mooncake peers.
    fn export(&self, addr: u64, access: Access) -> Result<(), Fault> {
        let service = self.shared.mooncake()?;
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = memory.as_mut().ok_or_else(|| Fault::closed("region"))?;
        if kept.export.is_some() {
            let text =
                "the region is exported to Mooncake peers already: end that with withdraw_mooncake() first";
            return Err(Fault::argument(text));
        }
        let span = MemSpan::new(addr as *mut u8, self.len as usize);
        // SAFETY: `kept` holds the memory, and drops the export, which withdraws the range, before it. No
        // reference to the bytes exists: Python accesses them by address.
        unsafe { service.export(span, access) }?;
        kept.export = Some(Export::new(service, addr));
        Ok(())
    }

    /// Ends the export. Returns whether there was one. Waits until no peer uses the memory.
    fn withdraw(&self) -> bool {
        let _withdrawing = self.withdrawing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let export = memory.as_mut().and_then(|kept| kept.export.take());
        // A thread with the GIL may ask for the memory, and must not wait for peers.
        drop(memory);
        let was_exported = export.is_some();
        drop(export);
        was_exported
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(memory) = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        if self.shared.is_forked() {
            // In the parent it is still registered.
            return std::mem::forget(memory);
        }
        self.shared.unregister(self.id, memory);
    }
}

/// Memory that is registered with an engine: the local side of transfers, and, with remote rights, memory
/// that peers reach.
///
/// Made by :meth:`Engine.register`, for memory of an object, which stays exported as long as it is registered
/// (a ``bytearray`` cannot change its length), or by :meth:`Engine.alloc`, for memory of the engine, which
/// processes on this host reach without a socket.
///
/// ``with`` ends the registration; so does :meth:`close`, and the garbage collector. It ends when no transfer
/// uses the memory any more.
#[pyclass(frozen, weakref, module = "snowskin")]
pub(crate) struct Region {
    shared: Arc<Shared>,
    registration: Mutex<Option<Arc<Registration>>>,
    addr: u64,
    len: u64,
    /// Whether it is memory of a GPU.
    is_device: bool,
    /// The registered object; `None` for memory of the engine.
    object: Option<Py<PyAny>>,
}

/// What peers may do: `None`, `"read"`, `"write"`, `"readwrite"`.
pub(super) fn remote_access(py: Python<'_>, remote: Option<&str>) -> PyResult<Access> {
    match remote {
        None => Ok(Access::empty()),
        Some("read") => Ok(Access::REMOTE_READ),
        Some("write") => Ok(Access::REMOTE_WRITE),
        Some("readwrite") => Ok(Access::REMOTE_READ | Access::REMOTE_WRITE),
        Some(other) => {
            let text = format!("remote is None, \"read\", \"write\" or \"readwrite\", not {other:?}");
            Err(refused(py, text))
        }
    }
}

impl Region {
    /// Registers the memory of an object.
    pub(super) fn of(shared: &Arc<Shared>, object: &Bound<'_, PyAny>, remote: Access) -> PyResult<Self> {
        let py = object.py();
        let (held, span) = match Writable::anywhere(object) {
            Ok(memory) => {
                let span = memory.span();
                (Held::Writable(memory), span)
            }
            Err(_) => {
                let memory = Readable::anywhere(object)?;
                let span = memory.span();
                (Held::Readable(memory), span)
            }
        };
        let len = span.len();
        let writable = matches!(held, Held::Writable(_));
        if !writable && remote.contains(Access::REMOTE_WRITE) {
            return Err(refused(py, "the object is read-only: peers cannot get the right to write it"));
        }
        let local = if writable { Access::LOCAL } else { Access::LOCAL_READ };
        let engine = shared.engine().map_err(|fault| fault.into_err(py))?;
        let of = Arc::clone(shared);
        // The registration is made here, on the thread that registers: when Ctrl-C ends the wait, it is
        // dropped there, and ends as any other does.
        let register = move || {
            // SAFETY: `held` keeps the memory mapped, and moves into the registration, which lets go of it
            // only after `unregister` returned `Ok` or the engine is gone. No reference to the bytes exists:
            // Python accesses them by address.
            let id = unsafe { engine.register(span, local | remote) }?;
            Ok(Registration::new(&of, id, len as u64, writable, held))
        };
        let registered: Result<_, Fault> = gil::blocking(py, register)?;
        let registration = registered.map_err(|fault| fault.into_err(py))?;
        Ok(Self {
            shared: Arc::clone(shared),
            registration: Mutex::new(Some(registration)),
            addr: span.as_ptr().addr() as u64,
            len: len as u64,
            is_device: span.location().kind() != MemoryKinds::HOST,
            object: Some(object.clone().unbind()),
        })
    }

    /// Registers memory of the engine.
    pub(super) fn own(shared: &Arc<Shared>, region: SharedRegion) -> Self {
        let (addr, len) = (region.addr(), region.len() as u64);
        let registration = Registration::new(shared, region.id(), len, true, Held::Own(region));
        let (shared, registration) = (Arc::clone(shared), Mutex::new(Some(registration)));
        Self { shared, registration, addr, len, is_device: false, object: None }
    }

    /// The registration.
    ///
    /// # Errors
    /// It has ended; this process is a fork.
    pub(super) fn registration(&self, py: Python<'_>) -> PyResult<Arc<Registration>> {
        if self.shared.is_forked() {
            return Err(Fault::forked().into_err(py));
        }
        let registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner).clone();
        registration.ok_or_else(|| Fault::closed("region").into_err(py))
    }

    fn transfer(
        &self,
        py: Python<'_>,
        op: Op,
        peer: &Bound<'_, Peer>,
        place: Place,
        timeout: Option<f64>,
    ) -> PyResult<Batch> {
        let batch = Batch::new(Arc::clone(&self.shared));
        batch.add(py, op, self, peer.get(), place)?;
        batch.begin(py, timeout)?;
        Ok(batch)
    }
}

#[pymethods]
impl Region {
    /// Address of the first byte: what peers pass as ``addr``.
    #[getter]
    const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length, bytes.
    #[getter]
    const fn nbytes(&self) -> u64 {
        self.len
    }

    /// The object whose memory is registered; ``None`` for memory of the engine.
    #[getter]
    fn obj(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.object.as_ref().map(|object| object.clone_ref(py))
    }

    /// A memoryview of the bytes, without a copy.
    #[getter]
    fn memoryview<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf.as_any())
    }

    /// A NumPy array of the bytes, without a copy, as :meth:`Lease.numpy`.
    #[pyo3(signature = (dtype=None, shape=None, offset=0))]
    fn numpy<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        shape: Option<&Bound<'py, PyAny>>,
        offset: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        as_array(slf.as_any(), dtype, shape, offset)
    }

    /// Whether the registration has ended, or is about to.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed() || self.registration.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Reads ``nbytes`` at ``addr`` of the peer into this region, from ``offset`` on. The batch is submitted;
    /// ``timeout`` is the limit of the transfer.
    #[pyo3(signature = (peer, addr, nbytes=None, *, offset=0, timeout=None))]
    fn read_from(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        addr: u64,
        nbytes: Option<u64>,
        offset: u64,
        timeout: Option<f64>,
    ) -> PyResult<Batch> {
        self.transfer(py, Op::Read, peer, (addr, nbytes, offset), timeout)
    }

    /// Writes ``nbytes`` of this region, from ``offset`` on, to ``addr`` of the peer.
    #[pyo3(signature = (peer, addr, nbytes=None, *, offset=0, timeout=None))]
    fn write_to(
        &self,
        py: Python<'_>,
        peer: &Bound<'_, Peer>,
        addr: u64,
        nbytes: Option<u64>,
        offset: u64,
        timeout: Option<f64>,
    ) -> PyResult<Batch> {
        self.transfer(py, Op::Write, peer, (addr, nbytes, offset), timeout)
    }

    /// Lets engines of Mooncake read this memory, write it, or both, without any authentication: every
    /// process of the networks of ``Engine(mooncake_peers=…)``. Ends with :meth:`withdraw_mooncake`, and with
    /// the registration. Nothing is exported because it is registered, and ``remote`` does not count here.
    #[pyo3(signature = (read=true, write=false))]
    fn export_mooncake(&self, py: Python<'_>, read: bool, write: bool) -> PyResult<()> {
        let registration = self.registration(py)?;
        if !(read || write) {
            return Err(refused(py, "export_mooncake needs read=True, write=True or both"));
        }
        if self.is_device {
            let text = "memory of a GPU cannot be exported to engines of Mooncake: export host memory";
            return Err(refused(py, text));
        }
        if write && !registration.is_writable() {
            return Err(refused(py, "the object is read-only: peers cannot get the right to write it"));
        }
        let mut access = Access::empty();
        access.set(Access::REMOTE_READ, read);
        access.set(Access::REMOTE_WRITE, write);
        let addr = self.addr;
        let exported = gil::blocking(py, move || registration.export(addr, access))?;
        exported.map_err(|fault| fault.into_err(py))
    }

    /// Ends what :meth:`export_mooncake` began. When it returns, no engine of Mooncake accesses the memory.
    /// Returns whether it was exported.
    fn withdraw_mooncake(&self, py: Python<'_>) -> PyResult<bool> {
        let registration = self.registration(py)?;
        gil::blocking(py, move || registration.withdraw())
    }

    /// Ends the registration as soon as no batch uses it, in the background: peers lose the memory, and the
    /// object is given back. Can be called again.
    fn close(&self) {
        let registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(registration);
    }

    const fn __len__(&self) -> usize {
        self.len as usize
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { " closed" } else { "" };
        format!("<snowskin.Region addr={:#x} nbytes={}{state}>", self.addr, self.len)
    }

    /// # Safety
    /// Called by Python with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        if let Some(object) = &this.object {
            // SAFETY: hands Python's request on; the object becomes the exporter.
            return match unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), view, flags) } {
                0 => Ok(()),
                _ => Err(PyErr::fetch(py)),
            };
        }
        let registration = this.registration.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let region = registration.and_then(|registration| registration.own());
        let Some(region) = region else {
            return Err(PyBufferError::new_err("the region is closed: allocate another"));
        };
        let (pointer, len) = (region.span().as_ptr(), region.len() as ffi::Py_ssize_t);
        // SAFETY: `view` is Python's. The clone of the region in `internal` keeps the memory mapped until
        // `__releasebuffer__`, also after the registration has ended.
        unsafe {
            if ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pointer.cast(), len, 0, flags) != 0 {
                return Err(PyErr::fetch(py));
            }
            (*view).internal = Box::into_raw(Box::new(region)).cast();
        }
        Ok(())
    }

    /// # Safety
    /// Called by Python with a `view` that `__getbuffer__` filled, once.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `__getbuffer__` put it there.
        unsafe {
            let internal = std::mem::replace(&mut (*view).internal, std::ptr::null_mut());
            if !internal.is_null() {
                drop(Box::from_raw(internal.cast::<SharedRegion>()));
            }
        }
    }
}
