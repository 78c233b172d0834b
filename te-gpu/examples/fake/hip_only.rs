//! What HIP alone has: a current device per thread, and a batch call without attributes.

use std::cell::Cell;
use std::ffi::{c_int, c_void};

use crate::memory::Device;
use crate::model::{INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, state};
use crate::stream::Work;

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// The device that is current.
#[allow(clippy::unnecessary_wraps, reason = "as in the other fake, where a thread may have none")]
pub(crate) fn current() -> Result<c_int, c_int> {
    Ok(DEVICE.get())
}

/// What a test compares before and after a call.
pub(crate) fn context_depth() -> u64 {
    DEVICE.get() as u64
}

pub(crate) fn context_number(_device: c_int) -> u64 {
    0
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
    "" | "hipGetDevice" fn device_current(out: *mut c_int) {
        put(out, DEVICE.get())
    }

    "" | "hipSetDevice" fn device_set(device: c_int) {
        if device < 0 || device >= state().devices {
            return Err(INVALID_DEVICE);
        }
        DEVICE.set(device);
        Ok(())
    }

    "" | "hipMemcpyBatchAsync" fn batch(
        to: *const u64,
        from: *const u64,
        sizes: *const usize,
        count: usize,
        _attributes: *const c_void,
        _firsts: *const usize,
        attributes_count: usize,
        failed: *mut usize,
        stream: usize,
    ) {
        // Releases before 7.13 refuse attributes.
        if attributes_count != 0 {
            return Err(INVALID_VALUE);
        }
        put(failed, usize::MAX)?;
        let copies = crate::calls::copies((to, from, sizes, count))?;
        if copies.iter().any(|(to, from, _)| (*to).max(*from) >= crate::memory::BY_DEVICE) {
            return Err(INVALID_VALUE);
        }
        let state = state();
        let to_device = copies.iter().all(|copy| crate::memory::find(&state, copy.0).is_some());
        let end = if to_device { Device::To } else { Device::From };
        state.streams.get(&stream).ok_or(INVALID_HANDLE)?.push(Work::Copies(copies, end));
        Ok(())
    }
}
