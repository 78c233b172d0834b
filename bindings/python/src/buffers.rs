//! Memory of Python objects that native code reads or writes.
//!
//! A [`Readable`] or [`Writable`] holds an export (`Py_buffer`, or a DLPack tensor). As long as it lives, the
//! object keeps its memory where it is: a `bytearray` refuses to change its length, an array is not freed. It
//! moves into the operation and comes back with its result, or, if no caller waits any more, is handed to the
//! thread that may release it.
//!
//! | Object | Taken through |
//! |---|---|
//! | `bytes`, `bytearray`, `memoryview`, `array`, `mmap`, NumPy arrays, ctypes, leases | the buffer protocol |
//! | torch and JAX tensors, others with `__dlpack__` | DLPack |
//! | arrays of a CUDA device without DLPack | `__cuda_array_interface__` |
//!
//! Memory of a GPU is taken by what moves it through slots of host memory ([`Readable::anywhere`],
//! [`Writable::anywhere`]), and refused elsewhere. It has to be ready: what writes it has ended, and nothing
//! is enqueued that uses it before the operation has ended.
//!
//! Python code that changes the bytes while an operation reads them makes that operation store a mixture of
//! old and new bytes; readers of the object then see a checksum that does not match, and a miss. It cannot
//! make native code touch other memory.
#![allow(unsafe_code, reason = "lends memory whose lifetime Python's buffer protocol guarantees")]

use std::mem::{ManuallyDrop, MaybeUninit};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;

use te_core::{GpuVendor, Location, MemSpan};

use crate::attendant;
use crate::cuda_array;
use crate::dlpack::{self, Imported};
use crate::errors::Fault;

/// What keeps the memory in place.
pub(crate) enum Export {
    Buffer(View),
    Tensor(Imported),
    /// An array of a device, which its object keeps.
    Array(Py<PyAny>),
}

impl Export {
    /// Ends the export.
    pub(crate) fn release(self, py: Python<'_>) {
        match self {
            Self::Buffer(view) => view.release(),
            Self::Tensor(tensor) => tensor.release(py),
            Self::Array(object) => drop(object.into_bound(py)),
        }
    }
}

/// A `Py_buffer`, which its exporter may have made self-referential: it stays where it is. (pyo3's type
/// refuses exporters that leave out the strides, such as ctypes.)
pub(crate) struct View(Box<ffi::Py_buffer>);

// SAFETY: the buffer protocol has no thread affinity; only `get` and `release`, which have the GIL, call
// Python.
unsafe impl Send for View {}
// SAFETY: as above; the fields are only read.
unsafe impl Sync for View {}

impl View {
    fn get(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::<MaybeUninit<ffi::Py_buffer>>::new(MaybeUninit::zeroed());
        // SAFETY: `view` is memory for the structure, which Python fills.
        match unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), ffi::PyBUF_FULL_RO) } {
            // SAFETY: filled by Python; a box of `MaybeUninit<T>` has the layout of a box of `T`.
            0 => Ok(Self(unsafe { Box::from_raw(Box::into_raw(view).cast()) })),
            _ => Err(PyErr::fetch(object.py())),
        }
    }

    fn is_contiguous(&self) -> bool {
        // SAFETY: a view that Python filled.
        unsafe { ffi::PyBuffer_IsContiguous(&raw const *self.0, b'C' as std::ffi::c_char) == 1 }
    }

    /// The lengths at `first`, one per dimension; empty where the exporter leaves them out.
    fn lengths(&self, first: *const ffi::Py_ssize_t) -> &[ffi::Py_ssize_t] {
        if first.is_null() {
            return &[];
        }
        // SAFETY: an array of the view with one element per dimension.
        unsafe { std::slice::from_raw_parts(first, self.0.ndim.max(0) as usize) }
    }

    fn release(mut self) {
        // SAFETY: released once; the caller has the GIL.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
    }
}

/// Memory of a Python object, for as long as this value lives.
struct Lent {
    addr: usize,
    len: usize,
    /// Of which vendor's GPU it is, and the producer's number of that GPU; `None`: host memory.
    device: Option<Location>,
    export: ManuallyDrop<Export>,
}

impl Lent {
    fn span(&self) -> MemSpan {
        MemSpan::new(self.addr as *mut u8, self.len).at(self.device.unwrap_or_default())
    }

    fn on_device(&self) -> Option<MemSpan> {
        self.device.map(|_| self.span())
    }

    /// Ends the export with the GIL.
    fn release(self, py: Python<'_>) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used again nor dropped.
        unsafe { ManuallyDrop::take(&mut this.export) }.release(py);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: taken once, here; the value is not used afterwards.
        let export = unsafe { ManuallyDrop::take(&mut self.export) };
        attendant::get().release(export);
    }
}

/// Memory to read from.
pub(crate) struct Readable(Lent);

/// Memory to write to.
pub(crate) struct Writable(Lent);

impl Readable {
    /// Borrows the memory of an object.
    ///
    /// # Errors
    /// `TypeError`: the object has neither the buffer protocol nor `__dlpack__`. An invalid argument: the
    /// bytes are not contiguous, or not in host memory.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        borrow(object, false, false).map(Self)
    }

    /// As [`of`](Self::of), for memory that may be that of a GPU.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(crate) fn anywhere(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        borrow(object, false, true).map(Self)
    }

    /// The memory, if it is that of a GPU.
    pub(crate) fn on_device(&self) -> Option<MemSpan> {
        self.0.on_device()
    }

    /// The memory, with its location.
    pub(crate) fn span(&self) -> MemSpan {
        self.0.span()
    }

    /// Address of the first byte.
    pub(crate) const fn addr(&self) -> usize {
        self.0.addr
    }

    /// Length, bytes (`nbytes`, not the number of elements).
    pub(crate) const fn len(&self) -> usize {
        self.0.len
    }

    /// The bytes, for the client, which copies, sums and sends them; none of memory of a GPU. Python code may
    /// change them meanwhile; no decision of the client depends on their values.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.0.len == 0 || self.0.device.is_some() {
            return &[];
        }
        // SAFETY: the export keeps `len` bytes at `addr` mapped for as long as `self` lives. Every value of a
        // byte is valid, and what reads them goes to system calls, copies and checksums.
        unsafe { std::slice::from_raw_parts(self.0.addr as *const u8, self.0.len) }
    }

    /// Ends the export with the GIL. (Dropping it elsewhere hands it to the thread that has the GIL later.)
    pub(crate) fn release(self, py: Python<'_>) {
        self.0.release(py);
    }
}

impl Writable {
    /// As [`Readable::anywhere`], for memory that may be written.
    ///
    /// # Errors
    /// As [`Readable::of`]; an invalid argument: the object is read-only.
    pub(crate) fn anywhere(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        borrow(object, true, true).map(Self)
    }

    /// The memory, if it is that of a GPU.
    pub(crate) fn on_device(&self) -> Option<MemSpan> {
        self.0.on_device()
    }

    /// The memory, with its location.
    pub(crate) fn span(&self) -> MemSpan {
        self.0.span()
    }

    /// Address of the first byte.
    pub(crate) const fn addr(&self) -> usize {
        self.0.addr
    }

    /// Length, bytes.
    pub(crate) const fn len(&self) -> usize {
        self.0.len
    }

    /// The bytes; none of memory of a GPU.
    ///
    /// # Safety
    /// No other native code has a reference to a part of them (`overlap::Occupied` sees to it for the gets of
    /// a batch). What Python code does with them meanwhile is as for [`Readable::bytes`].
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        if self.0.len == 0 || self.0.device.is_some() {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the export is writable.
        unsafe { std::slice::from_raw_parts_mut(self.0.addr as *mut u8, self.0.len) }
    }

    /// As [`Readable::release`].
    pub(crate) fn release(self, py: Python<'_>) {
        self.0.release(py);
    }
}

fn borrow(object: &Bound<'_, PyAny>, writable: bool, on_device: bool) -> PyResult<Lent> {
    let py = object.py();
    if object.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("a value is bytes, not str: encode it first"));
    }
    let view = match View::get(object) {
        Ok(view) => view,
        Err(_) if object.hasattr("__dlpack__")? => {
            let tensor = dlpack::import(object, writable, on_device)?;
            let (addr, len, device) = (tensor.addr(), tensor.len(), tensor.device());
            return Ok(Lent { addr, len, device, export: ManuallyDrop::new(Export::Tensor(tensor)) });
        }
        Err(_) if on_device && object.hasattr(cuda_array::NAME)? => {
            let (addr, len) = cuda_array::describe(object, writable)?;
            // The number of the device is not part of the interface; the driver knows it.
            let device = Some(Location::Device(GpuVendor::Nvidia, 0));
            let export = Export::Array(object.clone().unbind());
            return Ok(Lent { addr, len, device, export: ManuallyDrop::new(export) });
        }
        Err(error) => {
            let kind = object.get_type().name()?;
            let text = format!("{kind} has neither the buffer protocol nor __dlpack__: {}", error.value(py));
            return Err(PyTypeError::new_err(text));
        }
    };
    let kind = || object.get_type().name();
    let refusal = if !view.is_contiguous() {
        format!(
            "the buffer of shape {:?} and strides {:?} is not C-contiguous: copy it first, for example with \
             numpy.ascontiguousarray",
            view.lengths(view.0.shape),
            view.lengths(view.0.strides)
        )
    } else if writable && view.0.readonly != 0 {
        format!("{} is read-only: pass a writable buffer, such as a bytearray or a NumPy array", kind()?)
    } else {
        let (addr, len) = (view.0.buf as usize, view.0.len.max(0) as usize);
        return Ok(Lent { addr, len, device: None, export: ManuallyDrop::new(Export::Buffer(view)) });
    };
    view.release();
    Err(Fault::argument(refusal).into_err(py))
}
