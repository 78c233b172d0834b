//! The life of a store: setup, close, and what it says of itself.
#![allow(unsafe_code, reason = "takes a store out of a capsule that this module has made")]

use std::ffi::CStr;
use std::sync::PoisonError;

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use snowskin_compat::store::{SetupOptions, Store};

use super::super::engine::{InnerTransferEngine, Kept, TransferEngine};
use super::super::signature::{Arguments, Call, Parameter, Signature};
use super::{Given, INVALID_PARAMS, This, by_hand, detached, store_of};
use crate::{gil, lifecycle};

/// The name of our capsules. No other library uses it, so what such a capsule holds is known.
const CAPSULE: &CStr = c"snowskin.mooncake.store";
const CLIENT_HTTP_PORT: i32 = 9300;
const TENANT: &str = "default";

/// `setup`, with arguments or with a dictionary.
pub(super) fn setup(slf: &This<'_>, call: Call<'_, '_>) -> PyResult<i32> {
    static BOTH: [&Signature; 2] = [
        by_hand!(
            "setup",
            [
                "local_hostname": "str",
                "metadata_server": "str",
                "global_segment_size": "int",
                "local_buffer_size": "int",
                "protocol": "str",
                "rdma_devices": "str",
                "master_server_addr": "str",
                "engine": "object" = "None",
                "enable_ssd_offload": "bool" = "False",
                "ssd_offload_path": "str" = "''",
                "tenant_id": "str" = "'default'",
                "enable_client_http_server": "bool" = "False",
                "client_http_port": "int" = "9300"
            ],
            None
        ),
        by_hand!("setup", ["config": "dict"], None),
    ];
    let is_named = |name: &str| call.kwargs.is_some_and(|kwargs| kwargs.contains(name).unwrap_or(false));
    let is_dict = call.args.get_item(0).is_ok_and(|first| first.is_instance_of::<PyDict>());
    let choice = usize::from(is_dict || is_named("config"));
    let given = Arguments::bind(&BOTH, choice, call)?;
    let (options, engine) = if choice == 1 { (of_dict(&given)?, None) } else { of_arguments(&given)? };
    let code = match options {
        Ok(options) => start(slf, move |store| store.setup(&options))?,
        Err(code) => code,
    };
    if code == 0 {
        keep(slf, engine);
    }
    Ok(code)
}

/// Keeps an engine until the store is closed.
fn keep(slf: &This<'_>, engine: Option<Kept>) {
    let before =
        std::mem::replace(&mut *slf.get().engine.lock().unwrap_or_else(PoisonError::into_inner), engine);
    drop(before);
}

/// The options, and the engine that was given with them.
fn of_arguments(given: &Given<'_, '_>) -> PyResult<(Result<SetupOptions, i32>, Option<Kept>)> {
    let mut kept = None;
    let mut options = SetupOptions::default();
    options.local_hostname = given.text(0)?;
    options.metadata_server = given.text(1)?;
    options.global_segment_size = given.uint(2)?;
    options.local_buffer_size = given.uint(3)?;
    options.protocol = given.text(4)?;
    options.rdma_devices = given.text(5)?;
    options.master_server_addr = given.text(6)?;
    if let Some(engine) = given.get(7).filter(|engine| !engine.is_none()) {
        let session = match engine.cast::<InnerTransferEngine>() {
            Ok(inner) => Some(inner.get().0.clone()),
            // The object whose `get_engine` it is means the same.
            Err(_) => engine.cast::<TransferEngine>().ok().and_then(|engine| engine.get().kept()),
        };
        let wanted = "the result of TransferEngine.get_engine() of an initialized engine";
        // The store has an engine of its own. This one runs until the store is closed, as its caller expects.
        kept = Some(session.ok_or_else(|| given.refuse(7, engine, wanted))?);
    }
    options.enable_ssd_offload = given.bool_or(8, false)?;
    options.ssd_offload_path = given.text_or(9, "")?;
    options.tenant_id = given.text_or(10, TENANT)?;
    options.enable_client_http_server = given.bool_or(11, false)?;
    let port = given.int_or(12, CLIENT_HTTP_PORT)?;
    options.client_http_port =
        u16::try_from(port).map_err(|_| given.error(format!("client_http_port: {port} is no port")))?;
    Ok((Ok(options), kept))
}

/// The options in a dictionary, or the code for one that lacks something.
fn of_dict(given: &Given<'_, '_>) -> PyResult<Result<SetupOptions, i32>> {
    let value = given.required(0)?;
    let dict = value.cast::<PyDict>().map_err(|_| given.refuse(0, value, "dict"))?;
    let pair = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        Ok((name.str()?.extract::<String>()?, value.str()?.extract::<String>()?))
    };
    let pairs: Vec<(String, String)> = dict.iter().map(pair).collect::<PyResult<_>>()?;
    Ok(SetupOptions::from_pairs(pairs).map_err(|error| {
        log::error!("setup: {error}");
        INVALID_PARAMS
    }))
}

/// Sets the store up on another thread: it may take seconds, and Ctrl-C ends the wait.
fn start(slf: &This<'_>, call: impl FnOnce(&Store) -> i32 + Send + 'static) -> PyResult<i32> {
    let store = store_of(slf);
    forget_client(slf);
    let started = store.clone();
    let code = gil::blocking(slf.py(), move || call(&started))?;
    if code == 0 {
        let registered = lifecycle::at_exit(move |left| {
            store.close_within(left);
        });
        *slf.get().exit.lock().unwrap_or_else(PoisonError::into_inner) = Some(registered);
    }
    Ok(code)
}

/// The client for asyncio is that of one setup.
fn forget_client(slf: &This<'_>) {
    slf.get().client.lock().unwrap_or_else(PoisonError::into_inner).take();
}

pub(super) fn setup_dummy(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (pool, buffer, address) = (given.uint(0)?, given.uint(1)?, given.text(2)?);
    start(slf, move |store| store.setup_dummy(pool, buffer, &address))
}

pub(super) fn init_all(slf: &This<'_>, given: &Given<'_, '_>) -> PyResult<i32> {
    let (protocol, device, size) = (given.text(0)?, given.text(1)?, given.uint(2)?);
    start(slf, move |store| store.init_all(&protocol, &device, size))
}

pub(super) fn close(slf: &This<'_>, _: &Given<'_, '_>) -> PyResult<i32> {
    let registered = slf.get().exit.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(registered);
    forget_client(slf);
    let store = store_of(slf);
    let code = gil::blocking(slf.py(), move || store.close())?;
    keep(slf, None);
    Ok(code)
}

pub(super) fn health_check(slf: &This<'_>, _: &Given<'_, '_>) -> PyResult<i32> {
    Ok(detached(slf, Store::health))
}

pub(super) fn get_hostname(slf: &This<'_>, _: &Given<'_, '_>) -> PyResult<String> {
    Ok(store_of(slf).hostname())
}

pub(super) fn get_offload_rpc_read_count(_: &This<'_>, _: &Given<'_, '_>) -> PyResult<u64> {
    // Nodes of this store read each other's disks as they read each other's memory: there is no such call.
    Ok(0)
}

/// A capsule with the store, for other native code of this module.
pub(super) fn capsule<'py>(slf: &This<'py>, _: &Given<'_, 'py>) -> PyResult<Option<Bound<'py, PyCapsule>>> {
    let store = store_of(slf);
    if !store.is_set_up() {
        return Ok(None);
    }
    PyCapsule::new_with_value(slf.py(), store, CAPSULE).map(Some)
}

/// The store in a capsule of [`capsule`]. `None`: it is the capsule of another library.
pub(in super::super) fn of_capsule(capsule: &Bound<'_, PyCapsule>) -> Option<Store> {
    let store = capsule.pointer_checked(Some(CAPSULE)).ok()?.cast::<Store>();
    // SAFETY: capsules of this name are made by `capsule` alone, with a `Store`, which lives as long as the
    // capsule. Nothing changes it, so it may be borrowed.
    Some(unsafe { store.as_ref() }.clone())
}
