//! The functions of `store_c.h`.
//!
//! Each checks what C passes (NULL, lengths, numbers), runs under [`guard`], and returns a number. What the
//! addresses have to satisfy is in the header; it is the contract of every `unsafe` block below.
#![allow(unsafe_code, reason = "the functions of a C interface take addresses")]
#![allow(unreachable_pub, reason = "the functions are exported to C by their names")]
#![allow(clippy::missing_safety_doc, reason = "the header states what the caller has to promise")]

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use snowskin_compat::codes::OK;
use snowskin_compat::ffi::{array, array_out, bytes, guard, log_to_stderr, text, text_out};
use snowskin_compat::store::{Fill, ReplicateConfig, SetupOptions, SoftPin, Span, Store};

/// A store, as callers hold it.
type Handle = *mut c_void;

/// What every function returns for NULL where an object is needed, and for a panic.
const INVALID: c_int = -1;

#[repr(C)]
pub struct Replicate {
    replica_num: usize,
    with_soft_pin: c_int,
    with_hard_pin: c_int,
    preferred_segments: *mut *const c_char,
    preferred_segments_count: usize,
}

const _: () = {
    assert!(size_of::<Replicate>() == 32);
    assert!(std::mem::offset_of!(Replicate, with_soft_pin) == 8);
    assert!(std::mem::offset_of!(Replicate, with_hard_pin) == 12);
    assert!(std::mem::offset_of!(Replicate, preferred_segments) == 16);
    assert!(std::mem::offset_of!(Replicate, preferred_segments_count) == 24);
};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_create() -> Handle {
    guard(ptr::null_mut(), || {
        log_to_stderr();
        Box::into_raw(Box::new(Store::new())).cast()
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_destroy(store: Handle) {
    guard((), || {
        if !store.is_null() {
            // SAFETY: the header asks for a handle of `mooncake_store_create` that is not in use any more.
            drop(unsafe { Box::from_raw(store.cast::<Store>()) });
        }
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_setup(
    store: Handle,
    local_hostname: *const c_char,
    metadata_server: *const c_char,
    global_segment_size: u64,
    local_buffer_size: u64,
    protocol: *const c_char,
    device_name: *const c_char,
    master_server_addr: *const c_char,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for NULL or texts that end with a NUL.
        let or = |given: *const c_char, default: &str| unsafe {
            if given.is_null() { Some(default.to_owned()) } else { text(given).map(str::to_owned) }
        };
        let mut options = SetupOptions::default();
        let places = [
            (&mut options.local_hostname, local_hostname, ""),
            (&mut options.metadata_server, metadata_server, "P2PHANDSHAKE"),
            (&mut options.protocol, protocol, "tcp"),
            (&mut options.rdma_devices, device_name, ""),
            (&mut options.master_server_addr, master_server_addr, "127.0.0.1:50051"),
        ];
        for (place, given, default) in places {
            match or(given, default) {
                Some(text) => *place = text,
                None => return INVALID,
            }
        }
        (options.global_segment_size, options.local_buffer_size) = (global_segment_size, local_buffer_size);
        store.setup(&options)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_init_all(
    store: Handle,
    protocol: *const c_char,
    device_name: *const c_char,
    mount_segment_size: u64,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for NULL or texts that end with a NUL.
        let (protocol, device) = unsafe { (text(protocol), text(device_name)) };
        store.init_all(protocol.unwrap_or("tcp"), device.unwrap_or_default(), mount_segment_size)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_health_check(store: Handle) -> c_int {
    with(store, INVALID, Store::health)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_put(
    store: Handle,
    key: *const c_char,
    value: *const c_void,
    size: usize,
    config: *const Replicate,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for a text, for `size` readable bytes, and for NULL or a configuration.
        let (key, value, config) =
            unsafe { (bytes(key), array(value.cast::<u8>(), size), config_of(config)) };
        match (key, value, config) {
            (Some(key), Some(value), Some(config)) => store.put(key, value, &config),
            _ => INVALID,
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_put_from(
    store: Handle,
    key: *const c_char,
    buffer: *mut c_void,
    size: usize,
    config: *const Replicate,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for a text, and for NULL or a configuration.
        let (key, config) = unsafe { (bytes(key), config_of(config)) };
        let (Some(key), Some(config), false) = (key, config, buffer.is_null() && size > 0) else {
            return INVALID;
        };
        // SAFETY: the header asks for `size` readable bytes that do not change meanwhile.
        let stored = unsafe { store.batch_put(&[key], &[vec![span(buffer, size)]], &config) };
        stored.first().copied().unwrap_or(INVALID)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_batch_put_from(
    store: Handle,
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    config: *const Replicate,
    results_out: *mut c_int,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for arrays of `count` items, and for NULL or a configuration.
        let (batch, results, config) = unsafe {
            (batch_of(keys, buffers, sizes, count), results(results_out, count), config_of(config))
        };
        let (Some((keys, spans)), Some(results), Some(config)) = (batch, results, config) else {
            return INVALID;
        };
        // SAFETY: the header asks for readable bytes that do not change meanwhile.
        put_all(results, unsafe { store.batch_put(&keys, &spans, &config) }, INVALID)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_get_into(
    store: Handle,
    key: *const c_char,
    buffer: *mut c_void,
    size: usize,
) -> i64 {
    with(store, INVALID.into(), |store| {
        // SAFETY: the header asks for a text.
        let key = unsafe { bytes(key) };
        let (Some(key), false) = (key, buffer.is_null() && size > 0) else { return INVALID.into() };
        // SAFETY: the header asks for `size` writable bytes that nothing else accesses meanwhile.
        let read = unsafe { store.batch_get_into(&[key], &[vec![span(buffer, size)]], Fill::Any) };
        read.first().copied().unwrap_or(INVALID.into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_batch_get_into(
    store: Handle,
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    results_out: *mut i64,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for arrays of `count` items.
        let (batch, results) =
            unsafe { (batch_of(keys, buffers, sizes, count), results(results_out, count)) };
        let (Some((keys, spans)), Some(results)) = (batch, results) else { return INVALID };
        // SAFETY: the header asks for writable bytes that nothing else accesses meanwhile.
        put_all(results, unsafe { store.batch_get_into(&keys, &spans, Fill::Any) }, INVALID.into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_is_exist(store: Handle, key: *const c_char) -> c_int {
    // SAFETY: the header asks for a text.
    with_key(store, key, INVALID, |store, key| store.exists(&[key]).first().copied().unwrap_or(INVALID))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_batch_is_exist(
    store: Handle,
    keys: *mut *const c_char,
    count: usize,
    results_out: *mut c_int,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for arrays of `count` items.
        let (keys, results) = unsafe { (keys_of(keys, count), results(results_out, count)) };
        match (keys, results) {
            (Some(keys), Some(results)) => put_all(results, store.exists(&keys), INVALID),
            _ => INVALID,
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_get_size(store: Handle, key: *const c_char) -> i64 {
    with_key(store, key, INVALID.into(), Store::size)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_get_hostname(
    store: Handle,
    buf_out: *mut c_char,
    buf_len: usize,
) -> c_int {
    with(store, INVALID, |store| {
        // SAFETY: the header asks for `buf_len` writable bytes.
        if unsafe { text_out(&store.hostname(), buf_out, buf_len) } { OK } else { INVALID }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_remove(store: Handle, key: *const c_char, force: c_int) -> c_int {
    with_key(store, key, INVALID, |store, key| store.remove(key, force != 0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_remove_by_regex(
    store: Handle,
    pattern: *const c_char,
    force: c_int,
) -> i64 {
    with(store, INVALID.into(), |store| {
        // SAFETY: the header asks for a text.
        unsafe { text(pattern) }.map_or(INVALID.into(), |pattern| store.remove_by_regex(pattern, force != 0))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_remove_all(store: Handle, force: c_int) -> i64 {
    with(store, INVALID.into(), |store| store.remove_all(force != 0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_register_buffer(
    store: Handle,
    buffer: *mut c_void,
    size: usize,
) -> c_int {
    with(store, INVALID, |store| {
        if buffer.is_null() || size == 0 {
            return INVALID;
        }
        // SAFETY: the header asks for memory that stays mapped until it is unregistered.
        unsafe { store.register(buffer.addr() as u64, size as u64) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mooncake_store_unregister_buffer(store: Handle, buffer: *mut c_void) -> c_int {
    with(store, INVALID, |store| store.unregister(buffer.addr() as u64))
}

/// Runs `run` on the store of a handle; `failed` for NULL and for a panic.
fn with<T: Copy>(store: Handle, failed: T, run: impl FnOnce(&Store) -> T) -> T {
    guard(failed, || {
        // SAFETY: every function of the header asks for NULL or a handle that is not destroyed meanwhile.
        match unsafe { store.cast::<Store>().as_ref() } {
            Some(store) => run(store),
            None => {
                log::error!("the store is NULL");
                failed
            }
        }
    })
}

/// As [`with`], with a key.
fn with_key<T: Copy>(
    store: Handle,
    key: *const c_char,
    failed: T,
    run: impl FnOnce(&Store, &[u8]) -> T,
) -> T {
    // SAFETY: every function of the header asks for NULL or a text that ends with a NUL.
    with(store, failed, |store| unsafe { bytes(key) }.map_or(failed, |key| run(store, key)))
}

fn span(buffer: *mut c_void, size: usize) -> Span {
    Span { addr: buffer.addr() as u64, len: size as u64 }
}

/// The options of a put; NULL stands for the default. `None`: one of the names is not UTF-8.
///
/// # Safety
/// `config` is NULL or the address of a configuration whose array of names is valid.
unsafe fn config_of(config: *const Replicate) -> Option<ReplicateConfig> {
    // SAFETY: the caller's promise.
    let Some(config) = (unsafe { config.as_ref() }) else { return Some(ReplicateConfig::default()) };
    let mut options =
        ReplicateConfig { replica_num: config.replica_num as u64, ..ReplicateConfig::default() };
    if config.with_soft_pin != 0 {
        options.soft_pin_action = SoftPin::Enable;
    }
    options.with_hard_pin = config.with_hard_pin != 0;
    if !config.preferred_segments.is_null() {
        // SAFETY: the caller's promise.
        let names = unsafe { array(config.preferred_segments, config.preferred_segments_count) }?;
        for name in names.iter().filter(|name| !name.is_null()) {
            // SAFETY: the caller's promise.
            options.preferred_segments.push(unsafe { text(*name) }?.to_owned());
        }
    }
    Some(options)
}

/// The keys of a batch. `None` if the array or one of them is NULL.
///
/// # Safety
/// `keys` is NULL or an array of `count` texts that outlive `'a`.
unsafe fn keys_of<'a>(keys: *mut *const c_char, count: usize) -> Option<Vec<&'a [u8]>> {
    if keys.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { array(keys, count)?.iter().map(|key| bytes(*key)).collect() }
}

/// The keys of a batch, and the memory of each.
type Batch<'a> = (Vec<&'a [u8]>, Vec<Vec<Span>>);

/// The keys and the memory of a batch. `None` if something is NULL that must not be.
///
/// # Safety
/// Each is NULL or an array of `count` items; the texts outlive `'a`.
unsafe fn batch_of<'a>(
    keys: *mut *const c_char,
    buffers: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
) -> Option<Batch<'a>> {
    if buffers.is_null() || sizes.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let (keys, buffers, sizes) =
        unsafe { (keys_of(keys, count)?, array(buffers, count)?, array(sizes, count)?) };
    let spans = buffers
        .iter()
        .zip(sizes)
        .map(|(&buffer, &size)| (!buffer.is_null() || size == 0).then(|| vec![span(buffer, size)]));
    Some((keys, spans.collect::<Option<_>>()?))
}

/// The places for the results of a batch. `None` if the array is NULL.
///
/// # Safety
/// `out` is NULL or an array of `count` writable items.
unsafe fn results<'a, T>(out: *mut T, count: usize) -> Option<&'a mut [MaybeUninit<T>]> {
    if out.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { array_out(out, count) }
}

/// Writes one result per key, and returns 0.
fn put_all<T: Copy>(places: &mut [MaybeUninit<T>], results: Vec<T>, missing: T) -> c_int {
    for (at, place) in places.iter_mut().enumerate() {
        place.write(results.get(at).copied().unwrap_or(missing));
    }
    OK
}
