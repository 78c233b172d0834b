//! Keys: bytes in the store, `str` or `bytes` in Python.
//!
//! A `str` is encoded as UTF-8. Keys that come back are `str`; bytes that are not UTF-8 become surrogates, as
//! in the names of files (PEP 383), and such a `str` means the same bytes again when it is used as a key.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::Fault;

/// Longest key that is accepted here, bytes; the master may have a lower limit.
const KEY_BYTES_MAX: usize = 1 << 16;

/// The key that a caller gave.
///
/// # Errors
/// `TypeError` for other types; an invalid argument for a key that is empty or too long.
pub(crate) fn from_python(key: &Bound<'_, PyAny>) -> PyResult<Box<[u8]>> {
    let bytes: Box<[u8]> = if let Ok(text) = key.cast::<PyString>() {
        match text.to_str() {
            Ok(text) => text.as_bytes().into(),
            Err(_) => {
                let encoded = text.call_method1("encode", ("utf-8", "surrogateescape"))?;
                encoded.cast::<PyBytes>()?.as_bytes().into()
            }
        }
    } else if let Ok(bytes) = key.cast::<PyBytes>() {
        bytes.as_bytes().into()
    } else {
        let kind = key.get_type().name()?;
        return Err(PyTypeError::new_err(format!("a key is str or bytes, not {kind}")));
    };
    if bytes.is_empty() || bytes.len() > KEY_BYTES_MAX {
        let message = format!("a key has 1 to {KEY_BYTES_MAX} bytes, not {}", bytes.len());
        return Err(Fault::argument(message).into_err(key.py()));
    }
    Ok(bytes)
}

/// As [`from_python`], for a prefix, which may be empty.
pub(crate) fn prefix(prefix: &Bound<'_, PyAny>) -> PyResult<Box<[u8]>> {
    if prefix.len().is_ok_and(|len| len == 0) { Ok(Box::default()) } else { from_python(prefix) }
}

/// A key as `str`.
pub(crate) fn to_python<'py>(py: Python<'py>, key: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    match std::str::from_utf8(key) {
        Ok(text) => Ok(PyString::new(py, text).into_any()),
        Err(_) => PyBytes::new(py, key).call_method1("decode", ("utf-8", "surrogateescape")),
    }
}
