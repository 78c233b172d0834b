//! The copy kernel, loaded into a context.

use std::ptr;
use std::sync::Arc;

use te_core::{Error, ErrorKind};

use super::abi::{DevicePtr, Opaque};
use super::buffer::copy_in;
use super::device::Device;
use crate::kernel::{COPY1, COPY16, PTX};

/// Where one channel's ticket begins after another's: they do not share a cache line.
pub(crate) const TICKET_BYTES: usize = 128;

/// The entries of the kernel, and the tickets of two channels.
pub(crate) struct Kernels {
    device: Arc<Device>,
    module: Opaque,
    pub(crate) copy16: Opaque,
    pub(crate) copy1: Opaque,
    pub(crate) tickets: DevicePtr,
}

// SAFETY: modules and functions are used by any thread.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Loads the kernel, which makes the driver compile it. The caller has entered the device.
    pub(crate) fn load(device: &Arc<Device>) -> Result<Self, Error> {
        let driver = &device.driver;
        let (Some(load), Some(_)) = (driver.module_load, driver.launch) else {
            return Err(ErrorKind::Unsupported.into());
        };
        let (mut module, none) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the text ends with a NUL; there are no options.
        let code = unsafe { load(&raw mut module, PTX.as_ptr().cast(), 0, none, ptr::null_mut()) };
        device.check(code)?;
        let (copy16, copy1) = (ptr::null_mut(), ptr::null_mut());
        let mut kernels = Self { device: Arc::clone(device), module, copy16, copy1, tickets: 0 };
        kernels.copy16 = kernels.function(COPY16)?;
        kernels.copy1 = kernels.function(COPY1)?;
        // SAFETY: writes one address.
        device.check(unsafe { (driver.mem_alloc)(&raw mut kernels.tickets, 2 * TICKET_BYTES) })?;
        let zeroes = [0_u8; 2 * TICKET_BYTES];
        copy_in(device, kernels.tickets, &zeroes)?;
        Ok(kernels)
    }

    fn function(&self, name: &std::ffi::CStr) -> Result<Opaque, Error> {
        let find = self.device.driver.module_function.ok_or(ErrorKind::Unsupported)?;
        let mut function = ptr::null_mut();
        // SAFETY: a C string and a module of this context.
        self.device.check(unsafe { find(&raw mut function, self.module, name.as_ptr()) })?;
        Ok(function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter_to_free() else { return };
        let driver = &self.device.driver;
        if self.tickets != 0 {
            // SAFETY: allocated in `load`; no kernel runs any more.
            self.device.gave_back("memory", unsafe { (driver.mem_free)(self.tickets) });
        }
        if let Some(unload) = driver.module_unload {
            // SAFETY: loaded in `load`; no kernel runs any more.
            self.device.gave_back("a module", unsafe { unload(self.module) });
        }
    }
}
