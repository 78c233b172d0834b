//! Values of arguments: texts, numbers, lists of them, as the interface that is replaced converts them.
//!
//! | Type | What is accepted |
//! |---|---|
//! | `str` | `str`, `bytes`, `bytearray` (UTF-8, where a text is needed; keys may be any bytes) |
//! | `int` | what has `__index__`, within the range |
//! | `bool` | `bool`, what has `__bool__`, `None` as false |
//! | `list[...]` | any iterable except `str`, `bytes` and mappings |
//!
//! A number out of range is a `TypeError`, as there.

use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyList, PyString, PyTuple};

use super::signature::Arguments;

/// A key of an object: the bytes of a Python object, without a copy.
#[derive(Debug)]
pub(super) enum Key {
    Text(PyBackedStr),
    Bytes(PyBackedBytes),
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// A list of lists of numbers.
pub(super) type Nested = Vec<Vec<u64>>;

impl<'py> Arguments<'_, 'py> {
    /// A text.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn text(&self, at: usize) -> PyResult<String> {
        self.text_of(at, self.required(at)?)
    }

    /// A text, or this default.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn text_or(&self, at: usize, default: &str) -> PyResult<String> {
        self.get(at).map_or_else(|| Ok(default.to_owned()), |value| self.text_of(at, value))
    }

    fn text_of(&self, at: usize, value: &Bound<'py, PyAny>) -> PyResult<String> {
        let key = self.key_of(at, value)?;
        let text = std::str::from_utf8(key.as_ref()).map(str::to_owned);
        text.map_err(|_| self.refuse(at, value, "str: its bytes are not UTF-8"))
    }

    /// A key.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn key(&self, at: usize) -> PyResult<Key> {
        self.key_of(at, self.required(at)?)
    }

    /// A list of keys.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn keys(&self, at: usize) -> PyResult<Vec<Key>> {
        self.list(at, self.required(at)?, "list[str]", Self::key_of)
    }

    /// A list of lists of keys.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn key_lists(&self, at: usize) -> PyResult<Vec<Vec<Key>>> {
        self.list(at, self.required(at)?, "list[list[str]]", |this, at, value| {
            this.list(at, value, "list[str]", Self::key_of)
        })
    }

    /// A list of texts.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn texts(&self, at: usize) -> PyResult<Vec<String>> {
        self.list(at, self.required(at)?, "list[str]", Self::text_of)
    }

    fn key_of(&self, at: usize, value: &Bound<'py, PyAny>) -> PyResult<Key> {
        if let Ok(text) = value.cast::<PyString>() {
            // A text with lone surrogates has no UTF-8.
            let text = PyBackedStr::try_from(text.clone());
            return text.map(Key::Text).map_err(|_| self.refuse(at, value, "str that UTF-8 can encode"));
        }
        if value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyByteArray>() {
            return value.extract().map(Key::Bytes).map_err(PyErr::from);
        }
        Err(self.refuse(at, value, "str"))
    }

    /// A number that is not negative: an address, a size, a count.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn uint(&self, at: usize) -> PyResult<u64> {
        self.uint_of(at, self.required(at)?)
    }

    /// As [`uint`](Self::uint), or this default.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn uint_or(&self, at: usize, default: u64) -> PyResult<u64> {
        self.get(at).map_or(Ok(default), |value| self.uint_of(at, value))
    }

    fn uint_of(&self, at: usize, value: &Bound<'py, PyAny>) -> PyResult<u64> {
        value.extract().map_err(|_| self.refuse(at, value, "int from 0 to 2**64 - 1"))
    }

    /// A number of 32 bits, or this default.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn int_or(&self, at: usize, default: i32) -> PyResult<i32> {
        self.get(at).map_or(Ok(default), |value| {
            value.extract().map_err(|_| self.refuse(at, value, "int of 32 bits"))
        })
    }

    /// A list of numbers.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn uints(&self, at: usize) -> PyResult<Vec<u64>> {
        self.uints_of(at, self.required(at)?)
    }

    /// A list of lists of numbers.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn uint_lists(&self, at: usize) -> PyResult<Nested> {
        self.list(at, self.required(at)?, "list[list[int]]", Self::uints_of)
    }

    /// A list of lists of lists of numbers.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn uint_list_lists(&self, at: usize) -> PyResult<Vec<Nested>> {
        self.list(at, self.required(at)?, "list[list[list[int]]]", |this, at, value| {
            this.list(at, value, "list[list[int]]", Self::uints_of)
        })
    }

    fn uints_of(&self, at: usize, value: &Bound<'py, PyAny>) -> PyResult<Vec<u64>> {
        self.list(at, value, "list[int]", Self::uint_of)
    }

    /// A truth value, or this default.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn bool_or(&self, at: usize, default: bool) -> PyResult<bool> {
        let Some(value) = self.get(at) else { return Ok(default) };
        if let Ok(value) = value.cast::<PyBool>() {
            return Ok(value.is_true());
        }
        if value.is_none() {
            return Ok(false);
        }
        // A text or a list has a length, and no `__bool__`: it is more likely a mistake than a truth value.
        if value.hasattr("__bool__")? { value.is_truthy() } else { Err(self.refuse(at, value, "bool")) }
    }

    /// The elements of a list, each converted.
    fn list<T>(
        &self,
        at: usize,
        value: &Bound<'py, PyAny>,
        wanted: &str,
        convert: impl Fn(&Self, usize, &Bound<'py, PyAny>) -> PyResult<T>,
    ) -> PyResult<Vec<T>> {
        if let Ok(list) = value.cast::<PyList>() {
            return list.iter().map(|item| convert(self, at, &item)).collect();
        }
        if let Ok(tuple) = value.cast::<PyTuple>() {
            return tuple.iter().map(|item| convert(self, at, &item)).collect();
        }
        let is_text = value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>();
        if is_text || value.is_instance_of::<PyByteArray>() || value.is_instance_of::<PyDict>() {
            return Err(self.refuse(at, value, wanted));
        }
        let items = value.try_iter().map_err(|_| self.refuse(at, value, wanted))?;
        items.map(|item| convert(self, at, &item?)).collect()
    }

    /// The elements of a list as they are.
    ///
    /// # Errors
    /// `TypeError`.
    pub(super) fn objects(&self, at: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.list(at, self.required(at)?, "list", |_, _, value| Ok(value.clone()))
    }
}
