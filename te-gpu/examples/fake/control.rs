//! What tests call besides the driver's functions.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use crate::faults;
use crate::memory;
use crate::model::state;

/// Sets how the driver behaves.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_set(name: *const c_char, value: i64) -> c_int {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let mut state = state();
    match name {
        b"version" => state.version = value as c_int,
        b"devices" => state.devices = value as c_int,
        b"seed" => state.seed = value as u64,
        b"delay_us_max" => state.delay_us_max = value as u64,
        b"stalled" => state.is_stalled = value != 0,
        b"few_attributes" => state.has_few_attributes = value != 0,
        b"capturing" => state.is_capturing = value != 0,
        b"foreign" => state.is_foreign = value != 0,
        b"private" => state.is_private = value != 0,
        b"domain" => state.domain = value as u64,
        b"peer_access" => _ = state.attributes.insert(crate::model::PEER_ACCESS, value as c_int),
        b"sticky" => state.sticky = value as c_int,
        b"stream_writes" => _ = state.attributes.insert(122, value as c_int),
        b"dma_bufs" => _ = state.attributes.insert(124, value as c_int),
        b"virtual_memory" => _ = state.attributes.insert(102, value as c_int),
        b"ordering" => _ = state.attributes.insert(118, value as c_int),
        _ => return 1,
    }
    0
}

/// Lets the `nth` call of a function from now fail with `code`; 0: all calls, or none when `code` is 0, too.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_fail(name: *const c_char, nth: u64, code: c_int) {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    faults::fail(&name, nth, code);
}

/// How often a function was called.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    faults::count(&name)
}

/// Writes the name of the function at this place of all that were called; its length, 0: there is none.
///
/// # Safety
/// `out` has room for 64 bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_name(nth: usize, out: *mut u8) -> usize {
    let Some(name) = faults::name(nth) else { return 0 };
    let len = name.len().min(64);
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(name.as_ptr(), out, len) };
    len
}

/// Calls that may have waited, so far.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_blocking() -> u64 {
    faults::blocking()
}

/// Calls of this thread that may have waited, so far.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_blocking_here() -> u64 {
    faults::blocking_here()
}

/// What the thread has as its current context or device, as a number.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_context() -> u64 {
    crate::vendor::context_depth()
}

/// Calls that gave back what was not there.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_wrong() -> u64 {
    faults::wrong()
}

/// Memory that was freed while another process had it open.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_freed_while_open() -> u64 {
    faults::freed_while_open_so_far()
}

/// How the thread's calls act on captures.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_capture_mode() -> u64 {
    crate::calls::CAPTURE_MODE.get() as u64
}

/// Objects that were made and not given back; prints them.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_live() -> usize {
    let live = state().live();
    for (what, count) in live.iter().filter(|(_, count)| *count > 0) {
        eprintln!("{count} {what} live");
    }
    live.iter().map(|(_, count)| count).sum()
}

/// Allocates memory of a device; 0: it failed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_allocate(device: c_int, bytes: usize, is_managed: c_int) -> u64 {
    let mut state = state();
    state.is_initialized = true;
    memory::allocate(&mut state, device, bytes, is_managed != 0).unwrap_or(0)
}

/// Frees what `fake_allocate` returned.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_free(at: u64) -> c_int {
    memory::free(&mut state(), at).err().unwrap_or(0)
}

/// Reads device memory.
///
/// # Safety
/// `out` has room for `len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_peek(at: u64, out: *mut u8, len: usize) -> c_int {
    let is_there = memory::copy(&state(), out.expose_provenance() as u64, at, len, memory::Device::From);
    c_int::from(!is_there)
}

/// Writes device memory.
///
/// # Safety
/// `bytes` has `len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_poke(at: u64, bytes: *const u8, len: usize) -> c_int {
    let is_there = memory::copy(&state(), at, bytes.expose_provenance() as u64, len, memory::Device::To);
    c_int::from(!is_there)
}
