//! What CUDA alone has: contexts, the kernel, the batch call by version, attributes of devices.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};

use crate::faults;
use crate::memory::Device;
use crate::model::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, state};
use crate::stream::{Kernel, Work};

thread_local! {
    /// The devices whose contexts this thread has pushed.
    static CONTEXTS: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
}

const CONTEXT: usize = 0xC0DE_0000;
const COPY16: usize = 0xF0_0010;
const COPY1: usize = 0xF0_0001;

/// The device whose context is current.
pub(crate) fn current() -> Result<c_int, c_int> {
    CONTEXTS.with_borrow(|contexts| contexts.last().copied()).ok_or(INVALID_CONTEXT)
}

/// What a test compares before and after a call.
pub(crate) fn context_depth() -> u64 {
    CONTEXTS.with_borrow(|contexts| contexts.len() as u64)
}

fn context_of(device: c_int) -> *mut c_void {
    std::ptr::without_provenance_mut(CONTEXT + device as usize)
}

pub(crate) fn context_number(device: c_int) -> u64 {
    context_of(device).addr() as u64
}

/// Writes a value where the caller wants it.
pub(crate) fn put<T>(out: *mut T, value: T) -> Result<(), c_int> {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver's function owns the place.
    unsafe { out.write(value) };
    Ok(())
}

exports! {
    "cuGetProcAddress_v2" | "" fn get_proc_address(
        name: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        _flags: u64,
        status: *mut c_int,
    ) {
        // SAFETY: a C string, as the caller promised.
        let name = unsafe { CStr::from_ptr(name) };
        let driver = state().version;
        let found = match (name.to_bytes(), version) {
            (b"cuMemcpyBatchAsync", 13_000..) if driver >= 13_000 => batch_13 as *const () as *mut c_void,
            (b"cuMemcpyBatchAsync", 12_080..13_000) if driver >= 12_080 => {
                batch_12 as *const () as *mut c_void
            }
            _ => std::ptr::null_mut(),
        };
        put(status, i32::from(found.is_null()))?;
        put(out, found)?;
        if found.is_null() { Err(NOT_FOUND) } else { Ok(()) }
    }

    "cuDeviceGetAttribute" | "" fn device_attribute(out: *mut c_int, attribute: c_int, device: c_int) {
        let state = state();
        if device < 0 || device >= state.devices {
            return Err(INVALID_DEVICE);
        }
        let value = state.attributes.get(&attribute).copied().unwrap_or(match attribute {
            75 => 9,
            76 | 134 => 0,
            // Fabric handles: it says yes, and `cuMemCreate` refuses.
            102 | 103 | 116 | 122 | 124 | 125 | 128 => 1,
            118 => 100,
            _ => 0,
        });
        put(out, value)
    }

    "cuDevicePrimaryCtxRetain" | "" fn context_retain(out: *mut *mut c_void, device: c_int) {
        let mut state = state();
        if device < 0 || device >= state.devices {
            return Err(INVALID_DEVICE);
        }
        *state.retained.entry(device).or_default() += 1;
        put(out, context_of(device))
    }

    "cuDevicePrimaryCtxRelease_v2" | "" fn context_release(device: c_int) {
        let mut state = state();
        let count = state.retained.get_mut(&device).filter(|count| **count > 0).ok_or(INVALID_CONTEXT)?;
        *count -= 1;
        Ok(())
    }

    "cuCtxPushCurrent_v2" | "" fn context_push(context: *mut c_void) {
        let device = context.addr().checked_sub(CONTEXT).ok_or(INVALID_CONTEXT)? as c_int;
        if state().retained.get(&device).is_none_or(|count| *count == 0) {
            return Err(INVALID_CONTEXT);
        }
        CONTEXTS.with_borrow_mut(|contexts| contexts.push(device));
        Ok(())
    }

    "cuCtxPopCurrent_v2" | "" fn context_pop(out: *mut *mut c_void) {
        let popped = CONTEXTS.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        put(out, context_of(popped))
    }

    "cuCtxGetCurrent" | "" fn context_current(out: *mut *mut c_void) {
        put(out, current().map_or(std::ptr::null_mut(), context_of))
    }

    "cuModuleLoadDataEx" | "" fn module_load(
        out: *mut usize,
        text: *const c_void,
        _options: u32,
        _names: *mut c_int,
        _values: *mut *mut c_void,
    ) {
        current()?;
        // SAFETY: a text that ends with a NUL, as the caller promised.
        let text = unsafe { CStr::from_ptr(text.cast()) }.to_str().map_err(|_| 218)?;
        if !text.starts_with(".version") || text.matches(".visible .entry").count() != 2 {
            return Err(218);
        }
        let mut state = state();
        let module = state.id() as usize;
        state.modules.push(module);
        put(out, module)
    }

    "cuModuleGetFunction" | "" fn module_function(out: *mut usize, module: usize, name: *const c_char) {
        current()?;
        if !state().modules.contains(&module) {
            return Err(INVALID_HANDLE);
        }
        // SAFETY: a C string, as the caller promised.
        let name = unsafe { CStr::from_ptr(name) };
        match name.to_bytes() {
            b"copy16" => put(out, COPY16),
            b"copy1" => put(out, COPY1),
            _ => Err(NOT_FOUND),
        }
    }

    "cuModuleUnload" | "" fn module_unload(module: usize) {
        current()?;
        let mut state = state();
        let at = state.modules.iter().position(|loaded| *loaded == module).ok_or(INVALID_HANDLE)?;
        state.modules.remove(at);
        Ok(())
    }

    "cuLaunchKernel" | "" fn launch(
        function: usize,
        blocks: u32,
        blocks_y: u32,
        blocks_z: u32,
        threads: u32,
        threads_y: u32,
        threads_z: u32,
        _shared: u32,
        stream: usize,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) {
        current()?;
        let shape = [blocks_y, blocks_z, threads_y, threads_z];
        if shape != [1; 4] || blocks == 0 || threads != 1_024 || ![COPY16, COPY1].contains(&function) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: as many parameters as the entries have, each of its size, as the caller promised.
        let (kernel, split, ticket) = unsafe {
            let at = |nth: usize| *parameters.add(nth);
            let kernel = Kernel {
                is_16: function == COPY16,
                descriptors: at(0).cast::<u64>().read(),
                first: at(1).cast::<u32>().read(),
                mask: at(2).cast::<u32>().read(),
                count: at(3).cast::<u32>().read(),
                word: at(6).cast::<u64>().read(),
                sequence: at(7).cast::<u64>().read(),
            };
            (kernel, at(4).cast::<u32>().read(), at(5).cast::<u64>().read())
        };
        let mut state = state();
        let warps = blocks * threads / 32;
        if split == 0 || split > warps || crate::memory::find(&state, ticket).is_none() {
            return Err(INVALID_VALUE);
        }
        if !state.launched.contains(&function) {
            // It is placed on the device now.
            faults::may_block();
            state.launched.push(function);
        }
        state.streams.get(&stream).ok_or(INVALID_HANDLE)?.push(Work::Kernel(kernel));
        Ok(())
    }

    "cuMemcpyBatchAsync_v2" | "" fn batch_13(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        count: usize,
        attributes: *const c_int,
        _firsts: *const usize,
        attributes_count: usize,
        stream: usize,
    ) {
        batch((to, from, sizes, count), (attributes, attributes_count), stream)
    }

    "cuMemcpyBatchAsync" | "" fn batch_12(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        count: usize,
        attributes: *const c_int,
        _firsts: *const usize,
        attributes_count: usize,
        failed: *mut usize,
        stream: usize,
    ) {
        put(failed, usize::MAX)?;
        batch((to, from, sizes, count), (attributes, attributes_count), stream)
    }

    "cuStreamWaitValue64_v2" | "" fn stream_wait(stream: usize, at: u64, value: u64, flags: u32) {
        let state = state();
        let by_host = at.wrapping_sub(crate::memory::BY_DEVICE);
        if flags != 0 || !at.is_multiple_of(8) || !crate::memory::is_pinned(&state, by_host, 8) {
            return Err(INVALID_VALUE);
        }
        state.streams.get(&stream).ok_or(INVALID_HANDLE)?.push(Work::WaitUntil(at, value));
        Ok(())
    }

    "cuIpcOpenMemHandle_v2" | "" fn ipc_open(out: *mut u64, handle: IpcHandle, flags: u32) {
        let device = current()?;
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        put(out, crate::ipc::open(&mut state(), device, &handle.0)?)
    }

    "cuIpcCloseMemHandle" | "" fn ipc_close(at: u64) {
        current()?;
        crate::ipc::close(&mut state(), at)
    }

    "cuDeviceCanAccessPeer" | "" fn can_access_peer(out: *mut c_int, _from: c_int, _to: c_int) {
        put(out, state().attributes.get(&crate::model::PEER_ACCESS).copied().unwrap_or(1))
    }

    "cuMemcpyAsync" | "" fn copy_any(to: u64, from: u64, len: usize, stream: usize) {
        let here = current()?;
        let state = state();
        let stream = state.streams.get(&stream).filter(|stream| stream.device == here).ok_or(INVALID_HANDLE)?;
        check_ends(&state, (to, from, len))?;
        stream.push(Work::Copies(vec![(to, from, len)], Device::Both));
        Ok(())
    }

    "cuFlushGPUDirectRDMAWrites" | "" fn flush_writes(_target: c_int, _scope: c_int) {
        current().map(|_| ())
    }
}

/// `CUipcMemHandle`.
#[repr(C)]
pub(crate) struct IpcHandle([u8; 64]);

/// At least one end is memory of a device; the other is such memory, or memory of the host by its address.
fn check_ends(state: &crate::model::State, (to, from, len): (u64, u64, usize)) -> Result<(), c_int> {
    let is_device = |at: u64| crate::memory::find(state, at).is_some();
    if len == 0 || to.max(from) >= crate::memory::BY_DEVICE || !(is_device(to) || is_device(from)) {
        return Err(INVALID_VALUE);
    }
    for at in [to, from] {
        if !is_device(at) && !crate::memory::is_pinned(state, at, len) {
            // The driver stages it, or waits.
            faults::may_block();
        }
    }
    Ok(())
}

type Copies = (*const u64, *const u64, *const usize, usize);

fn batch(copies: Copies, (attributes, count): (*const c_int, usize), stream: usize) -> Result<(), c_int> {
    current()?;
    if count != 1 || stream == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: one structure, which begins with the order of access, as the caller promised.
    let order = unsafe { attributes.read() };
    let copies = crate::calls::copies(copies)?;
    let state = state();
    let to_device = copies.iter().all(|copy| crate::memory::find(&state, copy.0).is_some());
    let from_device = copies.iter().any(|copy| crate::memory::find(&state, copy.1).is_some());
    let is_mixed = copies.iter().any(|copy| crate::memory::find(&state, copy.0).is_some()) != to_device;
    if (to_device && from_device) || is_mixed {
        // Reading a device in any order would bring wrong bytes.
        if order != 1 {
            return Err(INVALID_VALUE);
        }
        copies.iter().try_for_each(|copy| check_ends(&state, *copy))?;
        state.streams.get(&stream).ok_or(INVALID_HANDLE)?.push(Work::Copies(copies, Device::Both));
        return Ok(());
    }
    // Reading a device before earlier work of the stream would bring wrong bytes.
    if order == 3 && !to_device {
        return Err(INVALID_VALUE);
    }
    let pinned = |(to, from, len): &(u64, u64, usize)| {
        crate::memory::is_pinned(&state, if to_device { *from } else { *to }, *len)
    };
    if copies.iter().any(|(to, from, _)| (*to).max(*from) >= crate::memory::BY_DEVICE) {
        return Err(INVALID_VALUE);
    }
    if !copies.iter().all(pinned) {
        faults::may_block();
    }
    let end = if to_device { Device::To } else { Device::From };
    state.streams.get(&stream).ok_or(INVALID_HANDLE)?.push(Work::Copies(copies, end));
    Ok(())
}
