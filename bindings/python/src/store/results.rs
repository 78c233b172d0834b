//! Results of the client's thread as Python objects.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyBool, PyBytes, PyDict, PyList, PyString, PyTuple};
use store_client::ListEntry;

use super::jobs::{Fetched, Given, Key, Stored, Value, Wanted};
use crate::buffers::{Readable, Writable};
use crate::errors::Fault;
use crate::gil;
use crate::keys;
use crate::lease::Lease;
use crate::options::refused;

/// Most parts of one object.
const PARTS_MAX: usize = store_client::PARTS_MAX;

/// Whether an object was stored.
///
/// ``stored`` is false when the key existed; the object that was there is unchanged. A result is true in a
/// condition when it was stored.
///
/// >>> store.put("twice", b"first"), store.put("twice", b"second")
/// (PutResult(stored=True), PutResult(stored=False))
/// >>> bytes(store.get("twice"))
/// b'first'
#[pyclass(frozen, eq, module = "snowskin")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PutResult {
    /// Whether the object was stored; false: the key existed.
    #[pyo3(get)]
    pub(crate) stored: bool,
}

#[pymethods]
impl PutResult {
    const fn __bool__(&self) -> bool {
        self.stored
    }

    fn __repr__(&self) -> String {
        format!("PutResult(stored={})", if self.stored { "True" } else { "False" })
    }

    fn __hash__(&self) -> isize {
        isize::from(self.stored)
    }
}

/// What the master knows about an object.
#[pyclass(frozen, module = "snowskin")]
pub(crate) struct ObjectInfo {
    key: Key,
    /// Length of the object, bytes.
    #[pyo3(get)]
    nbytes: u64,
    /// Number of replicas; ``None`` when it was not asked for.
    #[pyo3(get)]
    replicas: Option<u32>,
    /// Whether the object can be read; otherwise it is being written.
    #[pyo3(get)]
    complete: bool,
    /// Whether a reader holds a lease of the master on it; ``None`` when it was not asked for.
    #[pyo3(get)]
    leased: Option<bool>,
    /// CRC-32C of the bytes; ``None`` when it was not asked for.
    #[pyo3(get)]
    checksum: Option<u32>,
}

impl ObjectInfo {
    pub(crate) fn listed(entry: ListEntry) -> Self {
        let ListEntry { key, len, replicas, complete, leased, .. } = entry;
        let key = key.into_boxed_slice();
        Self {
            key,
            nbytes: len,
            replicas: Some(replicas.into()),
            complete,
            leased: Some(leased),
            checksum: None,
        }
    }

    pub(crate) const fn looked_up(key: Key, nbytes: u64, checksum: u32) -> Self {
        Self { key, nbytes, replicas: None, complete: true, leased: None, checksum: Some(checksum) }
    }
}

#[pymethods]
impl ObjectInfo {
    /// The key.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        keys::to_python(py, &self.key)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let key = keys::to_python(py, &self.key)?.repr()?;
        Ok(format!("ObjectInfo(key={key}, nbytes={})", self.nbytes))
    }
}

/// Keys from a sequence or another iterable.
pub(crate) fn keys_of(keys: &Bound<'_, PyAny>) -> PyResult<Vec<Key>> {
    if keys.is_instance_of::<PyString>() || keys.is_instance_of::<PyBytes>() {
        return Err(PyTypeError::new_err("keys is a list of keys, not one key"));
    }
    let key = |(at, key): (usize, PyResult<Bound<'_, PyAny>>)| {
        gil::breathe(keys.py(), at);
        keys::from_python(&key?)
    };
    keys.try_iter()?.enumerate().map(key).collect()
}

/// An object to put: a buffer, or a list or tuple of buffers that are joined.
pub(crate) fn given(key: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<Given> {
    let py = key.py();
    let key = keys::from_python(key)?;
    let parts = if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        value.try_iter()?.map(|part| Readable::anywhere(&part?)).collect::<PyResult<Vec<_>>>()?
    } else {
        vec![Readable::anywhere(value)?]
    };
    let refusal = if parts.len() > PARTS_MAX {
        format!("a value has at most {PARTS_MAX} parts, not {}", parts.len())
    } else if parts.iter().all(|part| part.len() == 0) {
        "an object has at least one byte: a value of 0 bytes cannot be stored".to_owned()
    } else {
        return Ok(Given { key, parts });
    };
    parts.into_iter().for_each(|part| part.release(py));
    Err(refused(py, refusal))
}

/// Objects to put: a mapping, or pairs of key and value.
pub(crate) fn many_given(items: &Bound<'_, PyAny>) -> PyResult<Vec<Given>> {
    let pairs = if items.hasattr("items")? { items.call_method0("items")? } else { items.clone() };
    let pair = |(at, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        gil::breathe(items.py(), at);
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
        given(&key, &value)
    };
    pairs.try_iter()?.enumerate().map(pair).collect()
}

/// A get into a caller's buffer.
pub(crate) fn wanted_into(
    key: &Bound<'_, PyAny>,
    buffer: &Bound<'_, PyAny>,
    part: Option<(u64, Option<u64>)>,
) -> PyResult<Wanted> {
    let key = keys::from_python(key)?;
    Ok(Wanted { key, part, into: Some(Writable::anywhere(buffer)?) })
}

/// Gets into callers' buffers: a mapping of keys to buffers, or pairs.
pub(crate) fn many_into(items: &Bound<'_, PyAny>) -> PyResult<Vec<Wanted>> {
    let pairs = if items.hasattr("items")? { items.call_method0("items")? } else { items.clone() };
    let pair = |(at, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        gil::breathe(items.py(), at);
        let (key, buffer): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
        wanted_into(&key, &buffer, None)
    };
    pairs.try_iter()?.enumerate().map(pair).collect()
}

/// The part of an object that `offset` and `length` name; `None`: all of it.
pub(crate) fn part(py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<Option<(u64, Option<u64>)>> {
    match (offset, length) {
        (0, None) => Ok(None),
        (_, Some(0)) => Err(refused(py, "length is None or at least 1 byte")),
        part => Ok(Some(part)),
    }
}

/// A value that a get found.
pub(crate) fn value<'py>(py: Python<'py>, key: Key, value: Option<Value>) -> PyResult<Bound<'py, PyAny>> {
    match value {
        None => Ok(py.None().into_bound(py)),
        Some(Value::Memory(memory)) => Ok(Bound::new(py, Lease::new(key, memory))?.into_any()),
        Some(Value::Bytes(len)) => Ok(len.into_pyobject(py)?.into_any()),
    }
}

/// The result of a get, and the release of the caller's memory.
pub(crate) fn fetched<'py>(py: Python<'py>, fetched: Fetched) -> Result<Bound<'py, PyAny>, Failed> {
    let Fetched { key, result, into } = fetched;
    if let Some(into) = into {
        into.release(py);
    }
    Ok(value(py, key, result?)?)
}

/// The result of a put, and the release of the caller's memory.
pub(crate) fn stored(py: Python<'_>, stored: Stored) -> Result<PutResult, Fault> {
    stored.parts.into_iter().for_each(|part| part.release(py));
    stored.result.map(|stored| PutResult { stored })
}

/// A fault of an item, or an exception while its result was made.
pub(crate) enum Failed {
    Fault(Fault),
    Err(PyErr),
}

impl From<Fault> for Failed {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<PyErr> for Failed {
    fn from(error: PyErr) -> Self {
        Self::Err(error)
    }
}

impl Failed {
    pub(crate) fn into_err(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Fault(fault) => fault.into_err(py),
            Self::Err(error) => error,
        }
    }
}

/// The results of a batch: one value per item, and the errors by index.
pub(crate) struct Batch<'py> {
    values: Bound<'py, PyList>,
    errors: Bound<'py, PyDict>,
}

impl<'py> Batch<'py> {
    pub(crate) fn new(py: Python<'py>) -> Self {
        Self { values: PyList::empty(py), errors: PyDict::new(py) }
    }

    /// Appends the result of an item. A fault is recorded, and `missing` takes its place.
    ///
    /// # Errors
    /// An exception that is not that of an item.
    pub(crate) fn push(
        &self,
        result: Result<Bound<'py, PyAny>, Failed>,
        missing: impl FnOnce() -> Bound<'py, PyAny>,
    ) -> PyResult<()> {
        let py = self.values.py();
        match result {
            Ok(value) => self.values.append(value),
            Err(Failed::Fault(fault)) => {
                self.errors.set_item(self.values.len(), fault.into_exception(py)?)?;
                self.values.append(missing())
            }
            Err(Failed::Err(error)) => Err(error),
        }
    }

    /// As [`push`](Self::push), for a yes or no.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(crate) fn push_bool(&self, result: Result<bool, Fault>) -> PyResult<()> {
        let bool_of = |value| PyBool::new(self.values.py(), value).to_owned().into_any();
        self.push(result.map(bool_of).map_err(Failed::from), || bool_of(false))
    }

    /// Takes the last value back; its error stays.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn drop_last(&self) -> PyResult<()> {
        self.values.del_item(self.values.len().saturating_sub(1))
    }

    /// As a `snowskin.Results`.
    pub(crate) fn finish(self) -> PyResult<Bound<'py, PyAny>> {
        self.values.py().import("snowskin._results")?.getattr("Results")?.call1((self.values, self.errors))
    }

    /// As a pair, for the results of a part of a batch.
    pub(crate) fn pair(self) -> PyResult<Bound<'py, PyAny>> {
        let py = self.values.py();
        Ok((self.values, self.errors).into_pyobject(py)?.into_any())
    }
}
