//! `snowskin.Lease`: an object that was read, and views of its bytes without a copy.
//!
//! ```text
//!   Lease ──┐
//!   memoryview, NumPy array ──┤ each holds the memory;     Memory ──▶ the pool
//!   DLPack tensor ──┘          the last one gives it back
//! ```
#![allow(unsafe_code, reason = "the buffer protocol is made of raw pointers")]

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyTuple};

use crate::dlpack::{self, DataType, Request, View};
use crate::errors::Fault;
use crate::keys;
use crate::memory::Memory;

/// The bytes of an object that was read, in registered memory of the store's pool.
///
/// A lease lends views without a copy: ``memoryview(lease)``, :meth:`numpy`, :meth:`tensor`, and DLPack
/// (``numpy.from_dlpack(lease)``, ``torch.from_dlpack(lease)``). The bytes belong to the reader alone:
/// nothing else writes them, and writing them changes no stored object.
///
/// ``with`` releases the lease; so does the garbage collector. After that no further view can be made. Views
/// that exist keep the memory until they are gone, so no view ever shows the bytes of another object.
///
/// >>> store.put("greeting", b"hello").stored
/// True
/// >>> with store.get("greeting") as lease:
/// ...     bytes(lease), len(lease), lease.numpy("u1").sum().item()
/// (b'hello', 5, 532)
#[pyclass(frozen, weakref, module = "snowskin")]
pub(crate) struct Lease {
    key: Box<[u8]>,
    /// `None` once it is released. Views hold the memory, too.
    memory: Mutex<Option<Arc<Memory>>>,
    len: usize,
}

impl Lease {
    pub(crate) fn new(key: Box<[u8]>, memory: Memory) -> Self {
        let len = memory.len();
        Self { key, memory: Mutex::new(Some(Arc::new(memory))), len }
    }

    fn memory(&self) -> PyResult<Arc<Memory>> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner).clone();
        memory.ok_or_else(|| PyBufferError::new_err("the lease was released: get the object again"))
    }

    /// The memory from `offset` on, as elements of `dtype` and of this shape.
    fn view(
        &self,
        py: Python<'_>,
        dtype: DataType,
        shape: Vec<i64>,
        offset: usize,
    ) -> PyResult<View<Arc<Memory>>> {
        let bytes = shape
            .iter()
            .try_fold(u64::from(dtype.bits) / 8, |bytes, &len| bytes.checked_mul(u64::try_from(len).ok()?))
            .and_then(|bytes| usize::try_from(bytes).ok());
        let fits = bytes.and_then(|bytes| bytes.checked_add(offset)).is_some_and(|end| end <= self.len);
        if !fits {
            let text = format!(
                "shape {shape:?} at offset {offset} does not fit the {} bytes of the object",
                self.len
            );
            return Err(Fault::argument(text).into_err(py));
        }
        let memory = self.memory()?;
        let addr = memory.addr().wrapping_add(offset);
        Ok(View { memory, addr, dtype, shape })
    }
}

#[pymethods]
impl Lease {
    /// The key of the object.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        keys::to_python(py, &self.key)
    }

    /// Length of the object, or of the part that was read, bytes.
    #[getter]
    const fn nbytes(&self) -> usize {
        self.len
    }

    /// Whether the lease was released.
    #[getter]
    fn released(&self) -> bool {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// A writable memoryview of the bytes, without a copy.
    #[getter]
    fn memoryview<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf.as_any())
    }

    /// A NumPy array of the bytes, without a copy.
    ///
    /// ``dtype`` is everything that NumPy accepts; ``offset`` is in bytes. Without ``shape``, the array has
    /// one dimension and all elements that follow ``offset``.
    ///
    /// >>> store.put("floats", np.arange(6, dtype="f4")).stored
    /// True
    /// >>> store.get("floats").numpy("f4", (2, 3))
    /// array([[0., 1., 2.],
    ///        [3., 4., 5.]], dtype=float32)
    #[pyo3(signature = (dtype=None, shape=None, offset=0))]
    fn numpy<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        shape: Option<&Bound<'py, PyAny>>,
        offset: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        as_array(slf.as_any(), dtype, shape, offset)
    }

    /// A view with a type and a shape for other libraries, without a copy: ``torch.from_dlpack(view)``.
    ///
    /// ``dtype`` is a name such as ``float32`` or ``bfloat16``; types that NumPy lacks are possible. Without
    /// ``shape``, the view has one dimension and all elements that follow ``offset`` bytes.
    #[pyo3(signature = (dtype, shape=None, offset=0))]
    fn tensor(
        slf: &Bound<'_, Self>,
        dtype: &str,
        shape: Option<Vec<i64>>,
        offset: usize,
    ) -> PyResult<TensorView> {
        let (py, this) = (slf.py(), slf.get());
        let Some(kind) = dlpack::data_type(dtype) else {
            let text = format!("unknown dtype {dtype:?}: use one of {}", dlpack::type_names());
            return Err(Fault::argument(text).into_err(py));
        };
        let element = usize::from(kind.bits) / 8;
        let shape = shape.unwrap_or_else(|| vec![(this.len.saturating_sub(offset) / element) as i64]);
        // Refused here rather than when the view is used.
        this.view(py, kind, shape.clone(), offset)?;
        Ok(TensorView { lease: slf.clone().unbind(), dtype: dtype.to_owned(), kind, shape, offset })
    }

    /// A copy of the bytes.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let memory = self.memory()?;
        // SAFETY: the memory is mapped as long as `memory` lives. Python code that writes a view on another
        // thread meanwhile changes bytes of this copy, as with any buffer.
        let bytes = unsafe { std::slice::from_raw_parts(memory.addr(), self.len) };
        Ok(PyBytes::new(py, bytes))
    }

    /// Gives the memory back, unless a view exists: then with the last view. Can be called again.
    fn release(&self) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Without the lock: this may give memory back to the pool.
        drop(memory);
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.tobytes(py)
    }

    const fn __len__(&self) -> usize {
        self.len
    }

    const fn __bool__(&self) -> bool {
        true
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let key = keys::to_python(py, &self.key)?.repr()?;
        let state = if self.released() { " released" } else { "" };
        Ok(format!("<snowskin.Lease key={key} nbytes={}{state}>", self.len))
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.release();
    }

    /// The array API's export of the bytes, as one dimension of ``uint8``.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = Request::new(stream, max_version, dl_device, copy)?;
        let view = self.view(py, dlpack::BYTE, vec![self.len as i64], 0)?;
        give(py, view, &request)
    }

    /// ``(1, 0)``: host memory.
    const fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU, 0)
    }

    /// # Safety
    /// Called by Python with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get().memory()?;
        let len = slf.get().len as ffi::Py_ssize_t;
        // SAFETY: `view` is Python's; the memory stays mapped until `__releasebuffer__` drops the reference
        // that is put into `internal`, and `view` holds the lease.
        unsafe {
            if ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.addr().cast(), len, 0, flags) != 0 {
                return Err(PyErr::fetch(slf.py()));
            }
            (*view).internal = Arc::into_raw(memory).cast_mut().cast();
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
                drop(Arc::from_raw(internal.cast::<Memory>().cast_const()));
            }
        }
    }
}

/// A view of a lease with a type and a shape, for ``from_dlpack`` of other libraries.
#[pyclass(frozen, module = "snowskin")]
pub(crate) struct TensorView {
    lease: Py<Lease>,
    dtype: String,
    kind: DataType,
    shape: Vec<i64>,
    offset: usize,
}

#[pymethods]
impl TensorView {
    /// Name of the data type.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    /// The shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The lease.
    #[getter]
    fn lease(&self, py: Python<'_>) -> Py<Lease> {
        self.lease.clone_ref(py)
    }

    /// The array API's export.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = Request::new(stream, max_version, dl_device, copy)?;
        let view = self.lease.get().view(py, self.kind, self.shape.clone(), self.offset)?;
        give(py, view, &request)
    }

    /// ``(1, 0)``: host memory.
    const fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU, 0)
    }

    fn __repr__(&self) -> String {
        format!("<snowskin.TensorView dtype={} shape={:?}>", self.dtype, self.shape)
    }
}

/// A NumPy array over the buffer of an object. Elements behind those of the shape are not part of it.
pub(crate) fn as_array<'py>(
    object: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
    shape: Option<&Bound<'py, PyAny>>,
    offset: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let numpy = py.import("numpy")?;
    let options = PyDict::new(py);
    options.set_item("offset", offset)?;
    match dtype {
        Some(dtype) => options.set_item("dtype", dtype)?,
        None => options.set_item("dtype", "u1")?,
    }
    if let Some(shape) = shape {
        let count = numpy.call_method1("prod", (shape,))?.call_method0("item")?;
        options.set_item("count", count.call_method0("__int__")?)?;
    }
    let array = numpy.call_method("frombuffer", (object,), Some(&options))?;
    match shape {
        Some(shape) => array.call_method1("reshape", (shape,)),
        None => Ok(array),
    }
}

/// Exports a view, or a copy of it if the consumer asks for one.
fn give<'py>(py: Python<'py>, view: View<Arc<Memory>>, request: &Request) -> PyResult<Bound<'py, PyAny>> {
    if !request.wants_copy() {
        return dlpack::export(py, view, request);
    }
    let View { memory, addr, dtype, shape } = view;
    let elements: i64 = shape.iter().product();
    let len = elements as usize * usize::from(dtype.bits) / 8;
    // SAFETY: `Lease::view` has checked that the range lies inside the memory, which `memory` keeps.
    let mut bytes = unsafe { std::slice::from_raw_parts(addr, len) }.to_vec();
    drop(memory);
    let addr = bytes.as_mut_ptr();
    // Moving a vector does not move its bytes.
    dlpack::export(py, View { memory: bytes, addr, dtype, shape }, request)
}
