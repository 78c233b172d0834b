//! The forms of some methods for asyncio: they begin an operation and return an `asyncio.Future`.
//!
//! Operations run on the thread of the store's asynchronous client, which gathers those that are waiting into
//! batches. No thread waits for a result, and no thread of the client attaches to the interpreter.

use std::sync::{Arc, PoisonError};

use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyString};
use store_client::{AsyncClient, OwnedSource, PutOptions};

use snowskin_compat::codes;
use snowskin_compat::store::ReplicateConfig as Config;

use super::bytes::copied;
use super::{INVALID_PARAMS, This, store_of};
use crate::slot::Filled;
use crate::{aio, buffers, gil};

/// The bytes of a key.
fn key_of(key: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = key.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes().to_vec());
    }
    if key.is_instance_of::<PyBytes>() || key.is_instance_of::<PyByteArray>() {
        return key.extract();
    }
    Err(PyTypeError::new_err(format!("a key is str, not {}", key.get_type())))
}

/// The client for asyncio: the one that is known, or the one that another thread connects. `None`: the store
/// has none, because it is not set up, or because the node on this machine acts for it.
fn client_of(slf: &This<'_>) -> PyResult<impl Future<Output = Option<AsyncClient>> + Send + use<>> {
    let cell = Arc::clone(&slf.get().client);
    let known = cell.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let connecting = match known {
        Some(_) => None,
        None => {
            let store = store_of(slf);
            let connect = move || {
                let client = store.client();
                cell.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&client);
                client
            };
            Some(Filled(gil::spawn(connect).map_err(|fault| fault.into_err(slf.py()))?))
        }
    };
    Ok(async move {
        match connecting {
            // `None` as well after a panic.
            Some(connecting) => connecting.await.unwrap_or_default(),
            None => known,
        }
    })
}

/// Carries an operation out on a thread of its own.
async fn apart<T: Send + 'static>(run: impl FnOnce() -> Result<T, i32> + Send + 'static) -> Result<T, i32> {
    match gil::spawn(run) {
        Ok(running) => Filled(running).await.unwrap_or(Err(codes::store::INTERNAL_ERROR)),
        Err(fault) => {
            log::error!("an operation of the store: {fault}");
            Err(codes::store::INTERNAL_ERROR)
        }
    }
}

/// `get`.
pub(super) fn get<'py>(slf: &This<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let (py, key) = (slf.py(), key_of(key)?);
    let (store, client) = (store_of(slf), client_of(slf)?);
    let reading = async move {
        match client.await {
            Some(client) => client.get(key).await.map_err(|error| codes::of_store_error(&error)),
            None => apart(move || store.get(&key)).await.map(Some),
        }
    };
    aio::future(py, reading, |py, read| {
        let value = match &read {
            Ok(Some(value)) => value.as_slice(),
            Ok(None) | Err(_) => &[],
        };
        Ok(copied(py, value)?.into_any().unbind())
    })
}

/// `is_exist`.
pub(super) fn is_exist<'py>(slf: &This<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let (py, key) = (slf.py(), key_of(key)?);
    let (store, client) = (store_of(slf), client_of(slf)?);
    let asking = async move {
        match client.await {
            Some(client) => {
                let found = client.exists_leased(key).await;
                found.map_or_else(|error| codes::of_store_error(&error), i32::from)
            }
            None => {
                let asked = apart(move || Ok(store.exists(&[key]).pop().unwrap_or(INVALID_PARAMS))).await;
                asked.unwrap_or_else(|code| code)
            }
        }
    };
    aio::future(py, asking, |py, code| code.into_py_any(py))
}

/// `put`, of the bytes at the moment of the call.
pub(super) fn put<'py>(
    slf: &This<'py>,
    key: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
    config: Option<Config>,
) -> PyResult<Bound<'py, PyAny>> {
    let (py, key) = (slf.py(), key_of(key)?);
    let (store, client) = (store_of(slf), client_of(slf)?);
    let value = buffers::Readable::of(value)?;
    let bytes = value.bytes().to_vec();
    value.release(py);
    let putting = async move {
        // What is configured names places, which the asynchronous client does not look up.
        let client = if config.is_none() && !bytes.is_empty() { client.await } else { None };
        let Some(client) = client else {
            let config = config.unwrap_or_default();
            return apart(move || Ok(store.put(&key, &bytes, &config))).await.unwrap_or_else(|code| code);
        };
        let stored = client.put(key, OwnedSource::Plain(vec![bytes]), &PutOptions::DEFAULT).await;
        match stored.map_or_else(|error| codes::of_store_error(&error), |_| codes::OK) {
            // The first value stays.
            codes::store::OBJECT_ALREADY_EXISTS => codes::OK,
            code => code,
        }
    };
    aio::future(py, putting, |py, code| code.into_py_any(py))
}
