//! `BufferHandle`: the bytes of an object in memory of its own.
#![allow(unsafe_code, reason = "lends memory through Python's buffer protocol")]

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use snowskin_compat::store::Bytes;

/// The bytes of an object.
///
/// It has the buffer protocol: one dimension, one byte per element (format 'b'), writable. The bytes belong
/// to this object; writing them does not change what is stored.
#[pyclass(module = "mooncake.store", frozen)]
pub(super) struct BufferHandle {
    addr: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the value owns the bytes. It touches them in `drop` alone; views of them are used with the rules of
// Python's buffer protocol, as those of a `bytearray`.
unsafe impl Send for BufferHandle {}
// SAFETY: as above.
unsafe impl Sync for BufferHandle {}

impl BufferHandle {
    pub(super) fn new(value: Bytes) -> Self {
        let mut value = ManuallyDrop::new(value);
        let (len, capacity) = (value.len(), value.capacity());
        // A `Vec` has an address even when it is empty.
        let addr = NonNull::new(value.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self { addr, len, capacity }
    }
}

impl Drop for BufferHandle {
    fn drop(&mut self) {
        // SAFETY: the parts of the `Vec` that `new` took apart, put together once. Views hold this object.
        drop(unsafe { Bytes::from_raw_parts(self.addr.as_ptr(), self.len, self.capacity) });
    }
}

#[pymethods]
impl BufferHandle {
    /// ptr(self: mooncake.store.BufferHandle) -> int
    ///
    /// The address of the first byte; 0 when there is none.
    fn ptr(&self) -> usize {
        if self.len == 0 { 0 } else { self.addr.as_ptr() as usize }
    }

    /// size(self: mooncake.store.BufferHandle) -> int
    ///
    /// How many bytes there are.
    fn size(&self) -> usize {
        self.len
    }

    fn __len__(&self) -> usize {
        self.len
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (addr, len) = (slf.get().addr.as_ptr(), slf.get().len);
        // SAFETY: Python passes a view to fill; the bytes live as long as the object, which the view holds.
        unsafe { fill(view, flags, addr.cast(), len, c"b".as_ptr().cast_mut(), slf.into_any()) }
    }
}

/// Fills a view of one dimension over `len` writable bytes at `addr`.
///
/// # Safety
/// `view` is null or can be written. The bytes stay mapped for as long as `owner` lives.
pub(super) unsafe fn fill(
    view: *mut ffi::Py_buffer,
    flags: c_int,
    addr: *mut c_void,
    len: usize,
    format: *mut std::ffi::c_char,
    owner: Bound<'_, PyAny>,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("there is no view to fill"));
    }
    let len =
        isize::try_from(len).map_err(|_| PyBufferError::new_err("the memory is too long for a view"))?;
    // SAFETY: `view` can be written. Pointers to its own fields stay valid as long as the view, which Python
    // does not move; `owner` keeps the memory, and is released with the view.
    unsafe {
        (*view).buf = addr;
        (*view).len = len;
        (*view).readonly = 0;
        (*view).itemsize = 1;
        (*view).format =
            if flags & ffi::PyBUF_FORMAT == ffi::PyBUF_FORMAT { format } else { ptr::null_mut() };
        (*view).ndim = 1;
        (*view).shape =
            if flags & ffi::PyBUF_ND == ffi::PyBUF_ND { &raw mut (*view).len } else { ptr::null_mut() };
        (*view).strides = if flags & ffi::PyBUF_STRIDES == ffi::PyBUF_STRIDES {
            &raw mut (*view).itemsize
        } else {
            ptr::null_mut()
        };
        (*view).suboffsets = ptr::null_mut();
        (*view).internal = ptr::null_mut();
        (*view).obj = owner.into_ptr();
    }
    Ok(())
}

/// Adds the class to the module.
pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BufferHandle>()
}
