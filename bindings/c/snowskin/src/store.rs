//! The store: `snowskin_store_*`.
#![allow(unsafe_code, reason = "the functions of a C interface take addresses")]
#![allow(unreachable_pub, reason = "the functions are exported to C by their names")]
#![allow(clippy::missing_safety_doc, reason = "the header states what the caller has to promise")]

use std::ffi::{c_char, c_void};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::time::Duration;

use snowskin_compat::clients::{Clients, Lent, Place, Span, overlap, total};
use snowskin_compat::ffi::{array, array_out};
use store_client::{ClientConfig, Get, Pin, Put, PutOptions, RemoveMode, Retention, Store as _};
use store_core::message::Existing;

use crate::fault::{Code, Fault, answer, fabrics, free, object, option, options, place};

/// What `snowskin_store *` points to.
pub struct Store {
    clients: Clients,
}

/// How long a close waits for calls that are under way.
const CLOSE_MAX: Duration = Duration::from_secs(10);
/// Most replicas of an object.
const REPLICAS_MAX: u32 = store_core::message::REPLICAS_MAX as u32;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct StoreOptions {
    size: usize,
    master: *const c_char,
    host: *const c_char,
    fabrics: *const c_char,
    tenant: *const c_char,
    tenant_secret: *const c_char,
    cluster_secret: *const c_char,
}

impl StoreOptions {
    const DEFAULT: Self = Self {
        size: size_of::<Self>(),
        master: ptr::null(),
        host: ptr::null(),
        fabrics: ptr::null(),
        tenant: ptr::null(),
        tenant_secret: ptr::null(),
        cluster_secret: ptr::null(),
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct StorePutOptions {
    size: usize,
    replicas: u32,
    pin: u32,
    ttl_ms: u32,
    replace: u32,
}

impl StorePutOptions {
    const DEFAULT: Self = Self { size: size_of::<Self>(), replicas: 1, pin: 0, ttl_ms: 0, replace: 0 };

    fn parse(self) -> Result<PutOptions, Fault> {
        if self.replicas > REPLICAS_MAX {
            return Err(Fault::argument(format!(
                "{} replicas: ask for at most {REPLICAS_MAX}",
                self.replicas
            )));
        }
        let pin = match self.pin {
            0 => Pin::None,
            1 => Pin::Soft,
            2 => Pin::Hard,
            other => return Err(Fault::argument(format!("{other} is not a pin: use SNOWSKIN_PIN_..."))),
        };
        let ttl_ms = (self.ttl_ms > 0).then_some(self.ttl_ms);
        Ok(PutOptions {
            replicas: self.replicas.max(1) as u8,
            retention: Retention { pin, ttl_ms, ..Retention::DEFAULT },
            existing: if self.replace == 0 { Existing::Keep } else { Existing::REPLACE },
            ..PutOptions::DEFAULT
        })
    }
}

#[repr(C)]
pub struct PutItem {
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
    /// Results: what the caller left there is not read.
    code: MaybeUninit<Code>,
    stored: MaybeUninit<bool>,
}

#[repr(C)]
pub struct GetItem {
    key: *const c_void,
    key_length: usize,
    buffer: *mut c_void,
    room: usize,
    /// Results: what the caller left there is not read.
    length: MaybeUninit<usize>,
    code: MaybeUninit<Code>,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Bytes {
    bytes: *const c_void,
    length: usize,
}

const _: () = {
    assert!(size_of::<StoreOptions>() == 56);
    assert!(size_of::<StorePutOptions>() == 24);
    assert!(size_of::<PutItem>() == 40 && std::mem::offset_of!(PutItem, stored) == 36);
    assert!(size_of::<GetItem>() == 48 && std::mem::offset_of!(GetItem, code) == 40);
    assert!(size_of::<Bytes>() == 16);
};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_connect(
    given: *const StoreOptions,
    store: *mut *mut Store,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a place for a handle, and for NULL or options.
        let (out, given) = unsafe { (place(store), options(given, StoreOptions::DEFAULT)?) };
        let out = out.ok_or_else(|| Fault::null("store"))?;
        // SAFETY: the header asks for NULL or texts.
        let config = unsafe { config_of(&given)? };
        let clients = Clients::connect(config)?;
        out.write(Box::into_raw(Box::new(Store { clients })));
        Ok(Code::Ok)
    })
}

/// The settings of a client.
///
/// # Safety
/// The texts of `given` are NULL or end with a NUL.
unsafe fn config_of(given: &StoreOptions) -> Result<ClientConfig, Fault> {
    // SAFETY: the caller's promise.
    let (master, host, names) = unsafe {
        (
            option(given.master, "master")?.unwrap_or("127.0.0.1:50051"),
            option(given.host, "host")?.unwrap_or("127.0.0.1"),
            option(given.fabrics, "fabrics")?,
        )
    };
    let master = master.parse().map_err(|error| Fault::argument(format!("`master`: {error}")))?;
    let mut config = ClientConfig::new(master).fabrics(fabrics(names)?);
    (config.engine.listen, config.engine.advertise_host) = listen(host, 0);
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(tenant) = option(given.tenant, "tenant")? {
            config.identity.tenant = tenant.to_owned();
        }
        config.identity.secret = option(given.tenant_secret, "tenant_secret")?.unwrap_or_default().into();
        config.identity.cluster = option(given.cluster_secret, "cluster_secret")?.unwrap_or_default().into();
    }
    Ok(config)
}

/// Where to listen so that peers that know `host` reach this process: at the address, if it is one; at every
/// address for a name.
pub(crate) fn listen(host: &str, port: u16) -> (SocketAddr, Option<String>) {
    let ip = match host.parse::<IpAddr>() {
        Ok(ip) => ip,
        Err(_) if host == "localhost" => IpAddr::from([127, 0, 0, 1]),
        Err(_) => IpAddr::from([0, 0, 0, 0]),
    };
    (SocketAddr::new(ip, port), Some(host.to_owned()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_close(store: *mut Store) {
    let _ = answer(ptr::null_mut(), || {
        // SAFETY: the header asks for NULL or a handle that is not used any more.
        if let Some(store) = unsafe { store.as_ref() } {
            store.clients.close(CLOSE_MAX);
        }
        Ok(Code::Ok)
    });
    // SAFETY: as above.
    unsafe { free(store) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_put(
    store: *mut Store,
    key: *const c_void,
    key_length: usize,
    value: *const c_void,
    value_length: usize,
    given: *const StorePutOptions,
    stored: *mut bool,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        let (code, result) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let items = [PutItem { key, key_length, value, value_length, code, stored: result }];
        // SAFETY: the header asks for a handle, NULL or options, readable bytes, and NULL or a place.
        unsafe {
            let options = options(given, StorePutOptions::DEFAULT)?.parse()?;
            let results = put_items(object(store, "store")?, &items, &options)?;
            let result = results.into_iter().next().unwrap_or(Ok(false))?;
            if let Some(out) = place(stored) {
                out.write(result);
            }
        }
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_put_many(
    store: *mut Store,
    items: *mut PutItem,
    count: usize,
    given: *const StorePutOptions,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, NULL or options, and an array of items with readable bytes.
        let results = unsafe {
            let options = options(given, StorePutOptions::DEFAULT)?.parse()?;
            let items = array(items, count).ok_or_else(|| Fault::null("items"))?;
            put_items(object(store, "store")?, items, &options)?
        };
        // SAFETY: as above; the shared borrow of the items is over.
        let places = unsafe { array_out(items, count) }.ok_or_else(|| Fault::null("items"))?;
        for (place, result) in places.iter_mut().zip(results) {
            // SAFETY: the caller has initialised the items, but for the results, which may be anything.
            let item = unsafe { place.assume_init_mut() };
            let (code, stored) = match result {
                Ok(stored) => (Code::Ok, stored),
                Err(fault) => (fault.code, false),
            };
            item.code.write(code);
            item.stored.write(stored);
        }
        Ok(Code::Ok)
    })
}

/// Stores objects.
///
/// # Safety
/// The bytes of the items are readable, and nothing writes them meanwhile.
unsafe fn put_items(
    store: &Store,
    items: &[PutItem],
    options: &PutOptions,
) -> Result<Vec<Result<bool, Fault>>, Fault> {
    let mut keys = Vec::with_capacity(items.len());
    let mut spans = Vec::with_capacity(items.len());
    for item in items {
        // SAFETY: the caller's promise.
        keys.push(unsafe { key_of(item.key, item.key_length)? });
        spans.push(span_of(item.value.addr(), item.value_length, "value")?);
    }
    let mut worker = store.clients.lend()?;
    // SAFETY: the caller's promise; the worker is returned before this call returns.
    let lent = unsafe { worker.lend_devices(spans.iter().map(std::slice::from_ref)) };
    lent.map_err(|error| fault(&mut worker, error))?;
    let places: Vec<Place> = spans.iter().map(|span| Place::of(&worker, &[*span])).collect();
    // SAFETY: the caller's promise.
    let slices: Vec<Vec<&[u8]>> = places.iter().map(|place| unsafe { place.slices() }).collect();
    let sources = places.iter().zip(&slices).map(|(place, slices)| place.source(slices));
    let mut puts: Vec<Put<'_>> =
        keys.iter().zip(sources).map(|(key, source)| Put::new(*key, source)).collect();
    let _ = worker.client.batch_put(&mut puts, options);
    let results: Vec<_> = puts.into_iter().map(Put::into_result).collect();
    Ok(results.into_iter().map(|result| result.map_err(|error| fault(&mut worker, error))).collect())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_get(
    store: *mut Store,
    key: *const c_void,
    key_length: usize,
    buffer: *mut c_void,
    room: usize,
    length: *mut usize,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        let (result, code) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        let items = [GetItem { key, key_length, buffer, room, length: result, code }];
        // SAFETY: the header asks for a handle, writable bytes, and a place for a length.
        unsafe {
            let out = place(length).ok_or_else(|| Fault::null("length"))?;
            let results = get_items(object(store, "store")?, &items)?;
            out.write(results.into_iter().next().unwrap_or_else(|| Err(missing(&[])))?);
        }
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_get_many(
    store: *mut Store,
    items: *mut GetItem,
    count: usize,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, and for an array of items with writable bytes.
        let results = unsafe {
            let items = array(items, count).ok_or_else(|| Fault::null("items"))?;
            get_items(object(store, "store")?, items)?
        };
        // SAFETY: as above; the shared borrow of the items is over.
        let places = unsafe { array_out(items, count) }.ok_or_else(|| Fault::null("items"))?;
        for (place, result) in places.iter_mut().zip(results) {
            // SAFETY: the caller has initialised the items, but for the results, which may be anything.
            let item = unsafe { place.assume_init_mut() };
            let (code, length) = match result {
                Ok(length) => (Code::Ok, length),
                Err(fault) => (fault.code, 0),
            };
            item.code.write(code);
            item.length.write(length);
        }
        Ok(Code::Ok)
    })
}

/// Reads objects.
///
/// # Safety
/// The buffers of the items are writable, and nothing else accesses them meanwhile.
unsafe fn get_items(store: &Store, items: &[GetItem]) -> Result<Vec<Result<usize, Fault>>, Fault> {
    let mut keys: Vec<&[u8]> = Vec::with_capacity(items.len());
    let mut spans = Vec::with_capacity(items.len());
    for item in items {
        // SAFETY: the caller's promise.
        keys.push(unsafe { key_of(item.key, item.key_length)? });
        spans.push(span_of(item.buffer.addr(), item.room, "buffer")?);
    }
    if overlap(spans.iter().copied()) {
        return Err(Fault::argument("buffers of two items overlap: give each item its own".to_owned()));
    }
    let mut worker = store.clients.lend()?;
    // SAFETY: the caller's promise; the worker is returned before this call returns.
    let lent = unsafe { worker.lend_devices(spans.iter().map(std::slice::from_ref)) };
    lent.map_err(|error| fault(&mut worker, error))?;
    let places: Vec<Place> = spans.iter().map(|span| Place::of(&worker, &[*span])).collect();
    // SAFETY: the caller's promise.
    let mut slices: Vec<Vec<&mut [u8]>> = places.iter().map(|place| unsafe { place.slices_mut() }).collect();
    let sinks = places.iter().zip(&mut slices).map(|(place, slices)| place.sink(slices));
    let mut gets: Vec<Get<'_>> = keys.iter().zip(sinks).map(|(key, sink)| Get::new(*key, sink)).collect();
    let _ = worker.client.batch_get(&mut gets);
    let results: Vec<_> = gets.into_iter().map(Get::into_result).collect();
    let length = |(result, key): (Result<Option<u64>, store_client::StoreError>, &[u8])| match result {
        Ok(Some(length)) => Ok(length as usize),
        Ok(None) => Err(missing(key)),
        Err(error) => Err(fault(&mut worker, error)),
    };
    Ok(results.into_iter().zip(keys).map(length).collect())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_get_new(
    store: *mut Store,
    key: *const c_void,
    key_length: usize,
    value: *mut *mut c_void,
    length: *mut usize,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, a key, and two places.
        let (store, key, value, length) =
            unsafe { (object(store, "store")?, key_of(key, key_length)?, place(value), place(length)) };
        let (Some(value), Some(length)) = (value, length) else {
            return Err(Fault::null("value, or length,"));
        };
        let mut worker = store.clients.lend()?;
        let read = worker.client.get(key).map_err(|error| fault(&mut worker, error))?;
        let bytes = read.ok_or_else(|| missing(key))?;
        // SAFETY: `malloc` and its result, which is checked and has room for the bytes.
        unsafe {
            let copy = libc::malloc(bytes.len().max(1));
            if copy.is_null() {
                return Err(Fault::new(
                    Code::NoSpace,
                    format!("there is no memory for {} bytes", bytes.len()),
                ));
            }
            ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len());
            value.write(copy);
        }
        length.write(bytes.len());
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_exists(
    store: *mut Store,
    keys: *const Bytes,
    count: usize,
    results: *mut bool,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, an array of keys, and as many places.
        let (store, keys, places) = unsafe {
            let keys = array(keys, count).ok_or_else(|| Fault::null("keys"))?;
            let keys = keys.iter().map(|key| key_of(key.bytes, key.length)).collect::<Result<Vec<_>, _>>()?;
            let places = array_out(results, count).ok_or_else(|| Fault::null("results"))?;
            (object(store, "store")?, keys, places)
        };
        let mut worker = store.clients.lend()?;
        let found = worker.client.batch_exists(&keys).map_err(|error| fault(&mut worker, error))?;
        for (place, found) in places.iter_mut().zip(found) {
            place.write(found);
        }
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_remove(
    store: *mut Store,
    key: *const c_void,
    key_length: usize,
    force: bool,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle and a key.
        let (store, key) = unsafe { (object(store, "store")?, key_of(key, key_length)?) };
        let mut worker = store.clients.lend()?;
        let removed = worker.client.remove(key, RemoveMode::forced(force));
        match removed.map_err(|error| fault(&mut worker, error))? {
            true => Ok(Code::Ok),
            false => Err(missing(key)),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_register(
    store: *mut Store,
    memory: *mut c_void,
    length: usize,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle, and for memory that stays mapped until it is unregistered or
        // the store is closed.
        unsafe { object(store, "store")?.clients.add_buffer(memory.addr() as u64, length as u64)? };
        Ok(Code::Ok)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn snowskin_store_unregister(
    store: *mut Store,
    memory: *mut c_void,
    error: *mut *mut Fault,
) -> Code {
    answer(error, || {
        // SAFETY: the header asks for a handle.
        unsafe { object(store, "store")? }.clients.remove_buffer(memory.addr() as u64, || {})?;
        Ok(Code::Ok)
    })
}

/// The bytes of a key.
///
/// # Safety
/// `key` is NULL or the address of `length` readable bytes that do not change during `'a`.
unsafe fn key_of<'a>(key: *const c_void, length: usize) -> Result<&'a [u8], Fault> {
    // SAFETY: the caller's promise.
    unsafe { array(key.cast::<u8>(), length) }.ok_or_else(|| Fault::null("key"))
}

fn span_of(addr: usize, len: usize, what: &str) -> Result<Span, Fault> {
    let span = Span { addr: addr as u64, len: len as u64 };
    total(&[span]).map(|_| span).ok_or_else(|| Fault::null(what))
}

fn missing(key: &[u8]) -> Fault {
    Fault::new(Code::NotFound, format!("there is no object `{}`", key.escape_ascii()))
}

fn fault(worker: &mut Lent<'_>, error: store_client::StoreError) -> Fault {
    worker.note(&error);
    error.into()
}
