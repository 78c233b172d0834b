//! DLPack: tensors of other libraries in, views of leases out.
//!
//! The structures are those of `dlpack.h` 1.0, and the exchange is that of the Python array API: `__dlpack__`
//! returns a capsule `dltensor`, or `dltensor_versioned` when both sides know version 1. Memory of GPUs is
//! taken in by those callers that can use it, and never given out.
//!
//! ```text
//!   import:  capsule ──▶ Imported { tensor }    renames the capsule, and calls the tensor's deleter at the end
//!   export:  memory + type + shape ──▶ capsule  the deleter drops the memory; a capsule that was never used
//!                                               calls it, too
//! ```
#![allow(unsafe_code, reason = "exchanges structures of a C interface")]

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use te_core::{GpuVendor, Location};

use crate::errors::Fault;

const PLAIN: &CStr = c"dltensor";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// Most dimensions of a tensor.
const NDIM_MAX: i32 = 64;
/// `kDLCPU`.
pub(crate) const CPU: i32 = 1;
/// `kDLCUDA`, and `kDLROCM`.
const CUDA: i32 = 2;
const ROCM: i32 = 10;
/// `kDLCUDAHost`: page-locked host memory.
const CUDA_HOST: i32 = 3;
/// `kDLROCMHost`, likewise.
const ROCM_HOST: i32 = 11;
/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_COPIED`.
const COPIED: u64 = 2;

/// `DLDevice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    /// Elements of a vector: 1 for ordinary types.
    pub(crate) vector: u16,
}

/// One byte.
pub(crate) const BYTE: DataType = DataType { code: 1, bits: 8, vector: 1 };

/// `DLTensor`.
#[derive(Debug)]
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// A tensor of another library. Its deleter may need the GIL, so it is released with it.
pub(crate) struct Imported {
    addr: usize,
    len: usize,
    /// Of which vendor's GPU the memory is, and the producer's number of that GPU.
    device: Option<Location>,
    owner: Owner,
}

enum Owner {
    Plain(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

// SAFETY: the structure is only read, and deleted once, by the one owner of this value.
unsafe impl Send for Imported {}
// SAFETY: no method changes it through a shared reference.
unsafe impl Sync for Imported {}

impl Imported {
    pub(crate) const fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn device(&self) -> Option<Location> {
        self.device
    }

    /// Calls the tensor's deleter.
    pub(crate) fn release(self, _: Python<'_>) {
        match self.owner {
            // SAFETY: the capsule gave the tensor up to us (it was renamed), and this is the only call.
            Owner::Plain(managed) => unsafe {
                if let Some(deleter) = managed.as_ref().deleter {
                    deleter(managed.as_ptr());
                }
            },
            // SAFETY: as above.
            Owner::Versioned(managed) => unsafe {
                if let Some(deleter) = managed.as_ref().deleter {
                    deleter(managed.as_ptr());
                }
            },
        }
    }
}

/// Takes a tensor out of an object with `__dlpack__`. With `on_device`, it may be in memory of a GPU; the
/// producer is then told not to synchronise (stream -1), because the memory has to be ready.
///
/// # Errors
/// An invalid argument: the tensor is in memory that the caller cannot use, not contiguous, or read-only
/// where it is to be written; what `__dlpack__` raised.
pub(crate) fn import(object: &Bound<'_, PyAny>, writable: bool, on_device: bool) -> PyResult<Imported> {
    let py = object.py();
    let (device, number): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    let vendor = match device {
        CUDA => Some(GpuVendor::Nvidia),
        ROCM => Some(GpuVendor::Amd),
        _ => None,
    };
    let location = vendor.map(|vendor| Location::Device(vendor, u16::try_from(number).unwrap_or(u16::MAX)));
    let is_host = [CPU, CUDA_HOST, ROCM_HOST].contains(&device);
    if !is_host && (!on_device || location.is_none()) {
        let text = format!(
            "the tensor is on a device (DLPack device {device}, number {number}): copy it to host memory first"
        );
        return Err(Fault::argument(text).into_err(py));
    }
    let options = PyDict::new(py);
    options.set_item("max_version", (1, 0))?;
    if location.is_some() {
        options.set_item("stream", -1)?;
    }
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        // It knows no versions.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            options.del_item("max_version")?;
            object.call_method("__dlpack__", (), Some(&options))?
        }
        capsule => capsule?,
    };
    let capsule = capsule.cast_into::<PyCapsule>()?;
    let (taken, read_only) = take(&capsule)?;
    // What the tensor itself says counts: the CPU must not touch it.
    let on = |imported: &Imported| imported.device.map(Location::kind) == location.map(Location::kind);
    let (imported, why) = match taken {
        Ok(imported) if !on(&imported) => {
            (imported, "its device is not what __dlpack_device__ says".to_owned())
        }
        Ok(imported) if writable && read_only => {
            (imported, "it is read-only: pass a writable one".to_owned())
        }
        Ok(imported) => return Ok(imported),
        Err(refused) => refused,
    };
    imported.release(py);
    Err(Fault::argument(format!("the tensor cannot be used: {why}")).into_err(py))
}

type Taken = Result<Imported, (Imported, String)>;

/// Takes the tensor out of a capsule, which is renamed: from now on its deleter is ours to call.
fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<(Taken, bool)> {
    let py = capsule.py();
    if capsule.is_valid_checked(Some(VERSIONED)) {
        let managed: NonNull<ManagedVersioned> = capsule.pointer_checked(Some(VERSIONED))?.cast();
        rename(capsule, VERSIONED_USED)?;
        // SAFETY: a capsule of this name holds this structure.
        let (major, flags) = unsafe { (managed.as_ref().major, managed.as_ref().flags) };
        let owner = Owner::Versioned(managed);
        if major != 1 {
            // Only the deleter is where it is in every version.
            let why = format!("it has version {major} of DLPack, not 1");
            return Ok((Err((Imported { addr: 0, len: 0, device: None, owner }, why)), false));
        }
        // SAFETY: version 1 has this layout.
        let tensor = unsafe { &managed.as_ref().tensor };
        return Ok((describe(tensor, owner), flags & READ_ONLY != 0));
    }
    if capsule.is_valid_checked(Some(PLAIN)) {
        let managed: NonNull<Managed> = capsule.pointer_checked(Some(PLAIN))?.cast();
        rename(capsule, PLAIN_USED)?;
        // SAFETY: a capsule of this name holds this structure.
        let tensor = unsafe { &managed.as_ref().tensor };
        return Ok((describe(tensor, Owner::Plain(managed)), false));
    }
    Err(Fault::argument("__dlpack__ returned a capsule that is not an unused DLPack tensor").into_err(py))
}

fn rename(capsule: &Bound<'_, PyCapsule>, name: &'static CStr) -> PyResult<()> {
    // SAFETY: the name is static, as a capsule requires.
    match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) } {
        0 => Ok(()),
        _ => Err(PyErr::fetch(capsule.py())),
    }
}

/// Address and length of a tensor's bytes, or why they cannot be used.
fn describe(tensor: &Tensor, owner: Owner) -> Taken {
    let empty = |owner| Imported { addr: 0, len: 0, device: None, owner };
    let number = u16::try_from(tensor.device.id).unwrap_or(u16::MAX);
    let device = match tensor.device.kind {
        CPU | CUDA_HOST | ROCM_HOST => None,
        CUDA => Some(Location::Device(GpuVendor::Nvidia, number)),
        ROCM => Some(Location::Device(GpuVendor::Amd, number)),
        other => return Err((empty(owner), format!("it is on DLPack device {other}"))),
    };
    if !(0..=NDIM_MAX).contains(&tensor.ndim) {
        return Err((empty(owner), format!("it has {} dimensions", tensor.ndim)));
    }
    let ndim = tensor.ndim as usize;
    let shape: &[i64] = match (ndim, tensor.shape.is_null()) {
        (0, _) => &[],
        (_, true) => return Err((empty(owner), "it has no shape".into())),
        // SAFETY: a tensor has `ndim` lengths at `shape`.
        (_, false) => unsafe { std::slice::from_raw_parts(tensor.shape, ndim) },
    };
    let strides: Option<&[i64]> = match (ndim, tensor.strides.is_null()) {
        (0, _) | (_, true) => None,
        // SAFETY: as above, for its strides.
        (_, false) => Some(unsafe { std::slice::from_raw_parts(tensor.strides, ndim) }),
    };
    let bits = u64::from(tensor.dtype.bits) * u64::from(tensor.dtype.vector);
    let bytes = shape
        .iter()
        .try_fold(bits, |product, &len| product.checked_mul(u64::try_from(len).ok()?))
        .map(|bits| bits.div_ceil(8));
    let Some(len) = bytes.and_then(|bytes| usize::try_from(bytes).ok()) else {
        return Err((empty(owner), format!("its shape {shape:?} is impossible")));
    };
    if len > 0 && !is_contiguous(shape, strides) {
        let why = format!("its strides {strides:?} are not those of C order: call .contiguous() first");
        return Err((empty(owner), why));
    }
    let offset = usize::try_from(tensor.byte_offset).ok();
    match offset.and_then(|offset| (tensor.data as usize).checked_add(offset)) {
        Some(addr) if len == 0 || !tensor.data.is_null() => Ok(Imported { addr, len, device, owner }),
        _ => Err((empty(owner), "it has no memory".into())),
    }
}

/// Whether the elements follow each other in C order. The stride of a dimension of one element is irrelevant.
fn is_contiguous(shape: &[i64], strides: Option<&[i64]>) -> bool {
    let Some(strides) = strides else { return true };
    let mut expected = 1_i64;
    for (&len, &stride) in shape.iter().zip(strides).rev() {
        if len != 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(len);
    }
    true
}

/// What an exported tensor keeps: its memory and its shape.
struct Kept<M> {
    _memory: M,
    shape: Vec<i64>,
}

/// A view of memory to export. `memory` keeps the `addr` valid until it is dropped, which may happen on any
/// thread, with or without the GIL.
pub(crate) struct View<M> {
    pub(crate) memory: M,
    pub(crate) addr: *mut u8,
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<i64>,
}

/// The arguments of `__dlpack__`, checked.
pub(crate) struct Request {
    versioned: bool,
    copy: bool,
}

impl Request {
    /// Checks the arguments of `__dlpack__`.
    ///
    /// # Errors
    /// `BufferError`, as the array API says, for a stream or a device that host memory does not have.
    pub(crate) fn new(
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Self> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("host memory has no stream: pass stream=None"));
        }
        if device.is_some_and(|device| device != (CPU, 0)) {
            return Err(PyBufferError::new_err("the memory is host memory, DLPack device (1, 0)"));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        Ok(Self { versioned, copy: copy == Some(true) })
    }

    /// Whether the caller wants a copy of the bytes.
    pub(crate) const fn wants_copy(&self) -> bool {
        self.copy
    }
}

/// Makes the capsule of a view.
///
/// # Errors
/// No memory for the capsule.
pub(crate) fn export<'py, M: Send + 'static>(
    py: Python<'py>,
    view: View<M>,
    request: &Request,
) -> PyResult<Bound<'py, PyAny>> {
    let View { memory, addr, dtype, shape } = view;
    let mut kept = Box::new(Kept { _memory: memory, shape });
    let tensor = Tensor {
        data: addr.cast(),
        device: Device { kind: CPU, id: 0 },
        ndim: kept.shape.len() as i32,
        dtype,
        shape: kept.shape.as_mut_ptr(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let context = Box::into_raw(kept).cast();
    let (pointer, name, destructor): (*mut c_void, _, ffi::PyCapsule_Destructor) = if request.versioned {
        let flags = if request.copy { COPIED } else { 0 };
        let deleter = Some(delete_versioned::<M> as unsafe extern "C" fn(_));
        let managed = ManagedVersioned { major: 1, minor: 0, context, deleter, flags, tensor };
        (Box::into_raw(Box::new(managed)).cast(), VERSIONED, drop_versioned)
    } else {
        let deleter = Some(delete_plain::<M> as unsafe extern "C" fn(_));
        (Box::into_raw(Box::new(Managed { tensor, context, deleter })).cast(), PLAIN, drop_plain)
    };
    // SAFETY: the pointer is not null, and the name is static.
    let capsule = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor)) };
    if capsule.is_null() {
        // SAFETY: the capsule that would have owned them was not made.
        unsafe {
            if request.versioned {
                delete_versioned::<M>(pointer.cast())
            } else {
                delete_plain::<M>(pointer.cast())
            }
        }
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference to a capsule.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// The deleter of a tensor that [`export`] made.
///
/// # Safety
/// `managed` is what `export` made for memory of type `M`, or null; this is its only deletion.
unsafe extern "C" fn delete_plain<M>(managed: *mut Managed) {
    if !managed.is_null() {
        // SAFETY: both boxes were made by `export`.
        unsafe {
            let managed = Box::from_raw(managed);
            drop(Box::from_raw(managed.context.cast::<Kept<M>>()));
        }
    }
}

/// As [`delete_plain`].
///
/// # Safety
/// As [`delete_plain`].
unsafe extern "C" fn delete_versioned<M>(managed: *mut ManagedVersioned) {
    if !managed.is_null() {
        // SAFETY: both boxes were made by `export`.
        unsafe {
            let managed = Box::from_raw(managed);
            drop(Box::from_raw(managed.context.cast::<Kept<M>>()));
        }
    }
}

/// The destructor of a capsule: a tensor that no consumer has taken is deleted.
///
/// # Safety
/// Called by Python with a capsule of [`export`].
unsafe extern "C" fn drop_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: the name tells whether the capsule still owns the tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            let managed: *mut Managed = ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()).cast();
            if let Some(deleter) = managed.as_ref().and_then(|managed| managed.deleter) {
                deleter(managed);
            }
        }
    }
}

/// As [`drop_plain`].
///
/// # Safety
/// As [`drop_plain`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `drop_plain`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let managed: *mut ManagedVersioned =
                ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast();
            if let Some(deleter) = managed.as_ref().and_then(|managed| managed.deleter) {
                deleter(managed);
            }
        }
    }
}

/// The data types by name: DLPack's code and bits.
const TYPES: [(&str, u8, u8); 17] = [
    ("bool", 6, 8),
    ("int8", 0, 8),
    ("int16", 0, 16),
    ("int32", 0, 32),
    ("int64", 0, 64),
    ("uint8", 1, 8),
    ("uint16", 1, 16),
    ("uint32", 1, 32),
    ("uint64", 1, 64),
    ("float16", 2, 16),
    ("float32", 2, 32),
    ("float64", 2, 64),
    ("bfloat16", 4, 16),
    ("complex64", 5, 64),
    ("complex128", 5, 128),
    ("float8_e4m3fn", 10, 8),
    ("float8_e5m2", 12, 8),
];

/// The data type of this name; `None` if it is unknown.
pub(crate) fn data_type(name: &str) -> Option<DataType> {
    let &(_, code, bits) = TYPES.iter().find(|(known, _, _)| *known == name)?;
    Some(DataType { code, bits, vector: 1 })
}

/// All names, for error messages.
pub(crate) fn type_names() -> String {
    TYPES.map(|(name, _, _)| name).join(", ")
}
