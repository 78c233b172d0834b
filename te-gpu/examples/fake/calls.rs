//! The functions that both drivers have.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};

use crate::faults;
use crate::memory::{self, Device};
use crate::model::{
    ALREADY_REGISTERED, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NO_DEVICE, NOT_READY, NOT_SUPPORTED,
    state,
};
use crate::stream::{Stream, Work};
use crate::vendor::{current, put};

thread_local! {
    /// How the thread's calls act on captures: 0, globally; 2, not at all.
    pub(crate) static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

/// What hides devices.
const VISIBLE: &str = if crate::IS_CUDA { "CUDA_VISIBLE_DEVICES" } else { "HIP_VISIBLE_DEVICES" };

exports! {
    "cuInit" | "hipInit" fn init(flags: u32) {
        let mut state = state();
        let hidden = std::env::var_os(VISIBLE).is_some_and(|visible| visible.is_empty());
        if flags != 0 || state.devices == 0 || hidden {
            return Err(NO_DEVICE);
        }
        state.is_initialized = true;
        Ok(())
    }

    "cuDriverGetVersion" | "hipDriverGetVersion" fn driver_version(out: *mut c_int) {
        put(out, state().version)
    }

    "cuGetErrorName" | "hipDrvGetErrorName" fn error_name(code: c_int, out: *mut *const c_char) {
        let name = match code {
            2 => c"FAKE_ERROR_OUT_OF_MEMORY",
            100 => c"FAKE_ERROR_NO_DEVICE",
            800 => c"FAKE_ERROR_NOT_PERMITTED",
            999 => c"FAKE_ERROR_UNKNOWN",
            _ => return Err(INVALID_VALUE),
        };
        put(out, name.as_ptr())
    }

    "cuDeviceGetCount" | "hipGetDeviceCount" fn device_count(out: *mut c_int) {
        put(out, state().devices)
    }

    "cuDeviceGet" | "hipDeviceGet" fn device_get(out: *mut c_int, ordinal: c_int) {
        if ordinal < 0 || ordinal >= state().devices {
            return Err(INVALID_DEVICE);
        }
        put(out, ordinal)
    }

    "cuDeviceGetPCIBusId" | "hipDeviceGetPCIBusId" fn device_pci(out: *mut c_char, len: c_int, device: c_int) {
        // The first device is the last on the bus.
        let text = format!("00000000:{:02X}:00.0\0", 0xC0 - 0x10 * device);
        if len < text.len() as c_int {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `len` bytes of the caller.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
        Ok(())
    }

    "cuDeviceGetUuid_v2" | "hipDeviceGetUuid" fn device_uuid(out: *mut [u8; 16], device: c_int) {
        put(out, [device as u8 + 1; 16])
    }

    "cuPointerGetAttributes" | "hipDrvPointerGetAttributes" fn pointer_attributes(
        count: u32,
        names: *const c_int,
        places: *const *mut c_void,
        at: u64,
    ) {
        let state = state();
        let found = memory::find(&state, at);
        let pinned = memory::is_pinned(&state, at, 1);
        for nth in 0..count as usize {
            // SAFETY: `count` entries in each array, as the caller promised.
            let (name, place) = unsafe { (names.add(nth).read(), places.add(nth).read()) };
            if (18..=20).contains(&name) && (!crate::IS_CUDA || state.has_few_attributes) {
                return Err(INVALID_VALUE);
            }
            let value = match (name, &found) {
                (1, Some((_, mapping))) if !mapping.is_legacy => 0,
                (1, Some((_, mapping))) if mapping.is_foreign => 0xF0E1,
                (1, Some((_, mapping))) => crate::vendor::context_number(mapping.device),
                (2, Some((_, mapping))) => if mapping.is_managed { 4 } else { 2 },
                (2, None) => u64::from(pinned),
                (7, Some((_, mapping))) => mapping.buffer_id,
                (8, Some((_, mapping))) => u64::from(mapping.is_managed),
                (9, Some((_, mapping))) => mapping.device as u64,
                (9, None) => if pinned { 0 } else { u64::from(u32::MAX - 1) },
                (10, Some((_, mapping))) => u64::from(mapping.is_legacy && !mapping.is_private && crate::IS_CUDA),
                (11, Some((_, mapping))) => mapping.range.0,
                (12, Some((_, mapping))) => mapping.range.1 as u64,
                (14, Some((_, mapping))) => mapping.handle_types.into(),
                (15, Some((_, mapping))) => mapping.gpu_direct.into(),
                // Whole pages, which other allocations may share.
                (18, Some((_, mapping))) => mapping.bytes.next_multiple_of(memory::PAGE) as u64,
                (19, Some((base, _))) => *base,
                (20, Some((_, mapping))) => mapping.block_id,
                _ => 0,
            };
            // SAFETY: a place of the attribute's size.
            unsafe {
                match name {
                    // ROCm writes 32 bits.
                    12 if !crate::IS_CUDA => place.cast::<u32>().write(value as u32),
                    1 | 7 | 11 | 12 | 18..=20 => place.cast::<u64>().write(value),
                    _ => place.cast::<u32>().write(value as u32),
                }
            }
        }
        Ok(())
    }

    "cuPointerSetAttribute" | "hipPointerSetAttribute" fn pointer_set(
        _value: *const c_void,
        name: c_int,
        at: u64,
    ) {
        if name == 6 && memory::find(&state(), at).is_some() { Ok(()) } else { Err(INVALID_VALUE) }
    }

    "cuMemHostRegister_v2" | "hipHostRegister" fn host_register(at: usize, bytes: usize, flags: u32) {
        current()?;
        let mut state = state();
        if !at.is_multiple_of(memory::PAGE) || bytes == 0 || flags & !8 != 3 {
            return Err(INVALID_VALUE);
        }
        let before = state.pinned.range(..at + bytes).next_back();
        if before.is_some_and(|(base, (len, _))| base + len > at) {
            return Err(ALREADY_REGISTERED);
        }
        if flags & 8 == 0 && !memory::is_mapped_writable(at) {
            return Err(INVALID_VALUE);
        }
        state.pinned.insert(at, (bytes, flags & 8 != 0));
        Ok(())
    }

    "cuMemHostUnregister" | "hipHostUnregister" fn host_unregister(at: usize) {
        current()?;
        state().pinned.remove(&at).map(|_| ()).ok_or(INVALID_VALUE)
    }

    "cuMemHostGetDevicePointer_v2" | "hipHostGetDevicePointer" fn host_device_pointer(
        out: *mut u64,
        at: usize,
        _flags: u32,
    ) {
        match memory::is_pinned(&state(), at as u64, 1) {
            true => put(out, at as u64 + memory::BY_DEVICE),
            false => Err(INVALID_VALUE),
        }
    }

    "cuThreadExchangeStreamCaptureMode" | "hipThreadExchangeStreamCaptureMode" fn capture_mode(
        mode: *mut c_int,
    ) {
        // SAFETY: a number of the caller.
        let new = unsafe { mode.read() };
        put(mode, CAPTURE_MODE.replace(new))
    }

    "cuMemAlloc_v2" | "hipMalloc" fn mem_alloc(out: *mut u64, bytes: usize) {
        let device = current()?;
        let mut state = state();
        put(out, memory::allocate(&mut state, device, bytes, false)?)
    }

    "cuMemFree_v2" | "hipFree" fn mem_free(at: u64) {
        current()?;
        memory::free(&mut state(), at)
    }

    "cuMemGetAddressRange_v2" | "hipMemGetAddressRange" fn address_range(
        base: *mut u64,
        bytes: *mut usize,
        at: u64,
    ) {
        let state = state();
        let (start, mapping) = memory::find(&state, at).ok_or(INVALID_VALUE)?;
        put(base, start)?;
        put(bytes, mapping.bytes)
    }

    "cuStreamCreateWithPriority" | "hipStreamCreateWithPriority" fn stream_create(
        out: *mut usize,
        flags: u32,
        _priority: c_int,
    ) {
        let device = current()?;
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        let mut state = state();
        let id = state.id() as usize;
        let stream = Stream::start(device, state.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ id as u64);
        state.streams.insert(id, stream);
        put(out, id)
    }

    "cuStreamDestroy_v2" | "hipStreamDestroy" fn stream_destroy(stream: usize) {
        let stream = state().streams.remove(&stream).ok_or(INVALID_HANDLE)?;
        stream.end();
        Ok(())
    }

    "cuStreamQuery" | "hipStreamQuery" fn stream_query(stream: usize) {
        let state = state();
        let stream = state.streams.get(&stream).ok_or(INVALID_HANDLE)?;
        if stream.is_idle() { Ok(()) } else { Err(NOT_READY) }
    }

    "cuStreamWriteValue64_v2" | "hipStreamWriteValue64" fn stream_write(
        stream: usize,
        at: u64,
        value: u64,
        flags: u32,
    ) {
        current()?;
        let state = state();
        if state.attributes.get(&122) == Some(&0) {
            return Err(NOT_SUPPORTED);
        }
        let by_host = at.wrapping_sub(memory::BY_DEVICE);
        if flags != 0 || !at.is_multiple_of(8) || !memory::is_pinned(&state, by_host, 8) {
            return Err(INVALID_VALUE);
        }
        state.streams.get(&stream).ok_or(INVALID_HANDLE)?.push(Work::Store(at, value));
        Ok(())
    }

    "cuEventCreate" | "hipEventCreateWithFlags" fn event_create(out: *mut usize, _flags: u32) {
        current()?;
        let mut state = state();
        let id = state.id() as usize;
        state.events.insert(id, None);
        put(out, id)
    }

    "cuEventRecord" | "hipEventRecord" fn event_record(event: usize, stream: usize) {
        current()?;
        let mut state = state();
        let stream = state.streams.get(&stream).cloned().ok_or(INVALID_HANDLE)?;
        let recorded = state.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        let entry = stream.push(Work::Nothing);
        *recorded = Some((stream, entry));
        Ok(())
    }

    "cuEventQuery" | "hipEventQuery" fn event_query(event: usize) {
        match state().events.get(&event).ok_or(INVALID_HANDLE)? {
            Some((stream, entry)) if !stream.has_done(*entry) => Err(NOT_READY),
            _ => Ok(()),
        }
    }

    "cuEventDestroy_v2" | "hipEventDestroy" fn event_destroy(event: usize) {
        state().events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    "cuMemcpyHtoDAsync_v2" | "hipMemcpyHtoDAsync" fn copy_to_device(
        to: u64,
        from: u64,
        len: usize,
        stream: usize,
    ) {
        copy((to, from, len), from, Device::To, stream)
    }

    "cuMemcpyDtoHAsync_v2" | "hipMemcpyDtoHAsync" fn copy_to_host(
        to: u64,
        from: u64,
        len: usize,
        stream: usize,
    ) {
        copy((to, from, len), to, Device::From, stream)
    }

    "cuMemcpyHtoD_v2" | "hipMemcpyHtoD" fn copy_in(to: u64, from: u64, len: usize) {
        current()?;
        let mut state = state();
        let inside = |at: u64| memory::find(&state, at).is_some();
        if len == 0 || !inside(to) || !inside(to + len as u64 - 1) {
            return Err(INVALID_VALUE);
        }
        // The bytes are read now, and arrive when something waits for them.
        // SAFETY: `len` bytes of the caller.
        let bytes = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(from as usize), len) };
        state.pending.push((to, bytes.to_vec()));
        Ok(())
    }

    "cuMemcpyDtoH_v2" | "hipMemcpyDtoH" fn copy_out(to: u64, from: u64, len: usize) {
        current()?;
        memory::settle(&mut state());
        if memory::copy(&state(), to, from, len, Device::From) { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

/// Puts one copy into a stream. `host`: the end that is host memory.
fn copy(copy: (u64, u64, usize), host: u64, device: Device, stream: usize) -> Result<(), c_int> {
    let here = current()?;
    let state = state();
    let stream = state.streams.get(&stream).ok_or(INVALID_HANDLE)?;
    let there = if matches!(device, Device::To) { copy.0 } else { copy.1 };
    if memory::find(&state, there).is_none() || stream.device != here {
        return Err(INVALID_VALUE);
    }
    if host >= memory::BY_DEVICE {
        return Err(INVALID_VALUE);
    }
    if !memory::is_pinned(&state, host, copy.2) {
        // The driver stages it, or waits.
        faults::may_block();
    }
    stream.push(Work::Copies(vec![copy], device));
    Ok(())
}

/// The copies of a batch.
pub(crate) fn copies(
    (to, from, sizes, count): (*const u64, *const u64, *const usize, usize),
) -> Result<Vec<(u64, u64, usize)>, c_int> {
    if count == 0 || to.is_null() || from.is_null() || sizes.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: `count` entries in each array, as the caller promised.
    Ok((0..count)
        .map(|at| unsafe { (to.add(at).read(), from.add(at).read(), sizes.add(at).read()) })
        .collect())
}
