//! `__cuda_array_interface__`: arrays in memory of a CUDA device, of libraries without DLPack.
//!
//! Versions 2 and 3 of the interface. The entry `stream` is not waited for: the memory has to be ready.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Fault;

/// The name of the attribute.
pub(crate) const NAME: &str = "__cuda_array_interface__";
/// Most dimensions of an array.
const NDIM_MAX: usize = 64;

/// Address and length of an array's bytes.
///
/// # Errors
/// An invalid argument: the array is not contiguous, masked, or read-only where it is to be written.
pub(crate) fn describe(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<(usize, usize)> {
    let py = object.py();
    let refuse = |why: String| Fault::argument(format!("the array cannot be used: {why}")).into_err(py);
    let interface = object.getattr(NAME)?;
    let interface = interface.cast::<PyDict>().map_err(|_| refuse(format!("its {NAME} is no dictionary")))?;
    let entry = |name: &str| {
        let entry = interface.get_item(name)?;
        entry.ok_or_else(|| refuse(format!("its {NAME} has no entry `{name}`")))
    };
    let version: i64 = entry("version")?.extract()?;
    if version < 2 {
        return Err(refuse(format!("version {version} of {NAME} is older than 2")));
    }
    if interface.get_item("mask")?.is_some_and(|mask| !mask.is_none()) {
        return Err(refuse("it is masked: pass the array without its mask".to_owned()));
    }
    let shape: Vec<u64> = entry("shape")?.extract()?;
    let element = entry("typestr")?.extract::<String>()?;
    let element: u64 = element
        .trim_start_matches(|c: char| !c.is_ascii_digit())
        .parse()
        .map_err(|_| refuse(format!("its type {element:?} has no size")))?;
    let (addr, is_read_only): (usize, bool) = entry("data")?.extract()?;
    let bytes = shape.iter().try_fold(element, |bytes, len| bytes.checked_mul(*len));
    let len = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let len = len.filter(|len| shape.len() <= NDIM_MAX && isize::try_from(*len).is_ok());
    let len = len.ok_or_else(|| refuse(format!("its shape {shape:?} is impossible")))?;
    if let Some(strides) = interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
        let strides: Vec<i64> = strides.extract()?;
        if len > 0 && !is_contiguous(&shape, &strides, element) {
            return Err(refuse(format!("its strides {strides:?} are not those of C order: copy it first")));
        }
    }
    if writable && is_read_only {
        return Err(refuse("it is read-only: pass a writable one".to_owned()));
    }
    if len > 0 && (addr == 0 || addr.checked_add(len).is_none()) {
        return Err(refuse("it has no memory".to_owned()));
    }
    Ok((addr, len))
}

/// Whether the elements follow each other in C order. The stride of a dimension of one element is irrelevant.
fn is_contiguous(shape: &[u64], strides: &[i64], element: u64) -> bool {
    let mut expected = element;
    let each = shape.iter().zip(strides).rev().all(|(&len, &stride)| {
        let fits = len == 1 || u64::try_from(stride) == Ok(expected);
        expected = expected.saturating_mul(len);
        fits
    });
    each && shape.len() == strides.len()
}
