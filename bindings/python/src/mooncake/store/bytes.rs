//! Objects as Python objects.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use snowskin_compat::store::{Bytes, ReplicateConfig as Config, Span, Store};

use super::super::buffer::BufferHandle;
use super::super::convert::Key;
use super::super::signature::{Arguments, Call, Parameter, Signature};
use super::{Given, INVALID_PARAMS, This, by_hand, config, detached};
use crate::buffers::Readable;

/// From this size on, bytes are copied without the GIL.
const DETACHED_BYTES: usize = 256 << 10;

/// The memory of an argument.
fn readable(given: &Given<'_, '_>, at: usize, value: &Bound<'_, PyAny>) -> PyResult<Readable> {
    let py = value.py();
    Readable::of(value).map_err(|error| {
        if error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) {
            given.refuse(at, value, "Buffer")
        } else {
            // It has memory, which cannot be taken as it is: the error names the remedy.
            error
        }
    })
}

fn span(value: &Readable) -> Span {
    Span { addr: value.addr() as u64, len: value.len() as u64 }
}

/// Stores or replaces one object that consists of parts.
fn write_one(slf: &This<'_>, key: &Key, parts: &[Readable], config: &Config, upsert: bool) -> i32 {
    let spans: Vec<Span> = parts.iter().map(span).collect();
    let run = |store: &Store| {
        // SAFETY: `parts` has the exports of the memory, and lives until this call has returned.
        #[allow(unsafe_code, reason = "the memory of exported buffers")]
        unsafe {
            if upsert {
                store.upsert_parts(key.as_ref(), &spans, config)
            } else {
                store.put_parts(key.as_ref(), &spans, config)
            }
        }
    };
    detached(slf, run)
}

fn write(slf: &This<'_>, given: &Given<'_, '_>, upsert: bool) -> PyResult<i32> {
    let (key, config) = (given.key(0)?, config(given, 2)?);
    let value = readable(given, 1, given.required(1)?)?;
    let code = if value.len() == 0 {
        // An object without bytes is refused here; one without parts is not (`put_parts`).
        log::error!("an object has at least one byte");
        INVALID_PARAMS
    } else {
        write_one(slf, &key, std::slice::from_ref(&value), &config, upsert)
    };
    value.release(slf.py());
    Ok(code)
}

pub(super) fn put(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    write(slf, given, false)
}

pub(super) fn upsert(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    write(slf, given, true)
}

pub(super) fn put_parts(slf: &This<'_>, call: Call<'_, '_>) -> PyResult<i32> {
    static ONE: [&Signature; 1] = [by_hand!(
        "put_parts",
        ["key": "str", "config": "mooncake.store.ReplicateConfig" = "..."],
        Some(1)
    )];
    write_parts(slf, &Arguments::bind(&ONE, 0, call)?, false)
}

pub(super) fn upsert_parts(slf: &This<'_>, call: Call<'_, '_>) -> PyResult<i32> {
    static ONE: [&Signature; 1] = [by_hand!(
        "upsert_parts",
        ["key": "str", "config": "mooncake.store.ReplicateConfig" = "..."],
        Some(1)
    )];
    write_parts(slf, &Arguments::bind(&ONE, 0, call)?, true)
}

fn write_parts(slf: &This<'_>, given: &Given<'_, '_>, upsert: bool) -> PyResult<i32> {
    let (key, config) = (given.key(0)?, config(given, 1)?);
    let part = |value: Bound<'_, PyAny>| {
        let buffer = PyUntypedBuffer::get(&value)?;
        let is_bytes = buffer.dimensions() == 1 && buffer.item_size() == 1;
        buffer.release(slf.py());
        if !is_bytes {
            return Err(PyRuntimeError::new_err("parts must be 1-D bytes-like"));
        }
        Readable::of(&value)
    };
    let parts: Vec<Readable> = given.rest().map(part).collect::<PyResult<_>>()?;
    let code = write_one(slf, &key, &parts, &config, upsert);
    parts.into_iter().for_each(|part| part.release(slf.py()));
    Ok(code)
}

fn write_batch(slf: &This<'_>, given: &Given<'_, '_>, upsert: bool) -> PyResult<i32> {
    let (keys, config) = (given.keys(0)?, config(given, 2)?);
    let values: Vec<Readable> =
        given.objects(1)?.iter().map(|value| readable(given, 1, value)).collect::<PyResult<_>>()?;
    let parts: Vec<Vec<Span>> = values.iter().map(|value| vec![span(value)]).collect();
    let codes = detached(slf, |store| {
        // SAFETY: `values` has the exports of the memory, and lives until this call has returned.
        #[allow(unsafe_code, reason = "the memory of exported buffers")]
        unsafe {
            if upsert {
                store.batch_upsert(&keys, &parts, &config)
            } else {
                store.batch_put(&keys, &parts, &config)
            }
        }
    });
    values.into_iter().for_each(|value| value.release(slf.py()));
    Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0))
}

pub(super) fn put_batch(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    write_batch(slf, given, false)
}

pub(super) fn upsert_batch(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    write_batch(slf, given, true)
}

/// A copy as Python's bytes.
pub(super) fn copied<'py>(py: Python<'py>, value: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    if value.len() < DETACHED_BYTES {
        return Ok(PyBytes::new(py, value));
    }
    PyBytes::new_with(py, value.len(), |bytes| {
        py.detach(|| bytes.copy_from_slice(value));
        Ok(())
    })
}

pub(super) fn get<'py>(slf: &This<'py>, given: &Given<'_, 'py>) -> PyResult<Bound<'py, PyBytes>> {
    let key = given.key(0)?;
    match detached(slf, |store| store.get(key.as_ref())) {
        Ok(value) => copied(slf.py(), &value),
        Err(_) => Ok(PyBytes::new(slf.py(), b"")),
    }
}

pub(super) fn get_batch<'py>(slf: &This<'py>, given: &Given<'_, 'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let keys = given.keys(0)?;
    let values = detached(slf, |store| store.batch_get(&keys));
    let bytes = |value: Result<Bytes, i32>| {
        value.map_or_else(|_| Ok(PyBytes::new(slf.py(), b"")), |value| copied(slf.py(), &value))
    };
    values.into_iter().map(bytes).collect()
}

pub(super) fn get_buffer(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Option<BufferHandle>> {
    let key = given.key(0)?;
    Ok(detached(slf, |store| store.get(key.as_ref())).ok().map(BufferHandle::new))
}

pub(super) fn batch_get_buffer(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<Option<BufferHandle>>> {
    let keys = given.keys(0)?;
    let values = detached(slf, |store| store.batch_get(&keys));
    Ok(values.into_iter().map(|value| value.ok().map(BufferHandle::new)).collect())
}

pub(super) fn get_size(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i64> {
    let key = given.key(0)?;
    Ok(detached(slf, |store| store.size(key.as_ref())))
}

pub(super) fn is_exist(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let keys = [given.key(0)?];
    let codes = detached(slf, |store| store.exists(&keys));
    Ok(codes.first().copied().unwrap_or(INVALID_PARAMS))
}

pub(super) fn batch_is_exist(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let keys = given.keys(0)?;
    Ok(detached(slf, |store| store.exists(&keys)))
}

pub(super) fn remove(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (key, force) = (given.key(0)?, given.bool_or(1, false)?);
    Ok(detached(slf, |store| store.remove(key.as_ref(), force)))
}

pub(super) fn batch_remove(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<Vec<i32>> {
    let (keys, force) = (given.keys(0)?, given.bool_or(1, false)?);
    Ok(detached(slf, |store| store.batch_remove(&keys, force)))
}

pub(super) fn remove_by_regex(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i64> {
    let (pattern, force) = (given.text(0)?, given.bool_or(1, false)?);
    Ok(detached(slf, |store| store.remove_by_regex(&pattern, force)))
}

pub(super) fn remove_all(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i64> {
    let force = given.bool_or(0, false)?;
    Ok(detached(slf, |store| store.remove_all(force)))
}

pub(super) fn batch_replica_clear<'py>(
    slf: &This<'py>,
    given: &Given<'_, 'py>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let (keys, segment) = (given.keys(0)?, given.text_or(1, "")?);
    let cleared = detached(slf, |store| store.replica_clear(&keys, &segment));
    // The keys as the caller passed them.
    let names = given.objects(0)?;
    Ok(cleared.into_iter().filter_map(|index| names.get(index).cloned()).collect())
}
