//! Host memory of a caller that devices copy by themselves.

use std::sync::{Arc, Weak};

use te_core::{Error, ErrorKind, Location, MemSpan};

use super::abi::{
    DevicePtr, HOST_MEMORY_ALREADY_REGISTERED, HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE,
    HOST_REGISTER_READ_ONLY, INVALID_VALUE, MEMORY_TYPE_HOST, POINTER_MEMORY_TYPE, SUCCESS,
};
use super::channel::Place;
use super::device::Device;
use crate::Gpu;

const PAGE: usize = 4_096;

/// Host memory that is page-locked until the value is dropped: whole pages, and perhaps more than was asked
/// for.
pub struct HostPin {
    device: Arc<Device>,
    start: usize,
    len: usize,
    writable: bool,
    by_device: DevicePtr,
    /// Whether this value registered it. Otherwise the application had done so, and keeps it.
    is_own: bool,
}

impl Gpu {
    /// Page-locks the pages of host memory, so that devices copy it by themselves. Spans of
    /// the same pages share the lock. It takes time in proportion to the length.
    ///
    /// # Errors
    /// `Unsupported` when there is no such device, or another part of the process has locked a part of the
    /// pages; `System`.
    ///
    /// # Safety
    /// The span stays mapped until the last value for it is dropped; it is mapped writable if it is to be
    /// `writable`.
    pub unsafe fn pin(
        &self,
        location: Location,
        span: MemSpan,
        writable: bool,
    ) -> Result<Arc<HostPin>, Error> {
        let mut pins = self.pins();
        pins.retain(|pin| pin.strong_count() > 0);
        // Pages of another span, which may be unmapped earlier, are not relied on.
        let known = pins.iter().filter_map(Weak::upgrade).find(|pin| pin.is_of(span, writable));
        if let Some(pin) = known {
            return Ok(pin);
        }
        // SAFETY: the caller's promise.
        let pin = Arc::new(unsafe { HostPin::new(&self.device(location)?, span, writable)? });
        pins.push(Arc::downgrade(&pin));
        Ok(pin)
    }
}

impl HostPin {
    /// Registers the pages of a span.
    ///
    /// # Safety
    /// The span stays mapped until the value is dropped; it is mapped writable if it is to be `writable`.
    pub(crate) unsafe fn new(device: &Arc<Device>, span: MemSpan, writable: bool) -> Result<Self, Error> {
        let at = span.as_ptr().expose_provenance();
        let (start, len) = pages_of(span)?;
        let _entered = device.enter()?;
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP;
        let pages = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: mapped memory, which the caller keeps until the value is dropped.
        let register = |flags| unsafe { (device.driver.host_register)(pages, len, flags) };
        let mut code = register(flags);
        if code == INVALID_VALUE && !writable {
            // It is mapped without the right to write. Not every device has the other way.
            code = register(flags | HOST_REGISTER_READ_ONLY);
        }
        let is_own = code != HOST_MEMORY_ALREADY_REGISTERED;
        if is_own {
            device.check(code)?;
        } else if !is_pinned(device, at) || !is_pinned(device, at + span.len() - 1) {
            // Only a part of it is registered.
            return Err(Error::with_code(ErrorKind::Unsupported, code));
        }
        let mut pin = Self { device: Arc::clone(device), start, len, writable, by_device: 0, is_own };
        // The first page may be another one's, with another first address.
        let first = if is_own { start } else { at };
        // SAFETY: registered; writes one address.
        let code = unsafe {
            let first = std::ptr::with_exposed_provenance_mut(first);
            (device.driver.host_device_pointer)(&raw mut pin.by_device, first, 0)
        };
        device.check(code)?;
        pin.by_device -= (first - start) as u64;
        Ok(pin)
    }

    /// Where a byte of the memory is, by its address.
    ///
    /// # Errors
    /// `OutOfRange` when it is not in the memory.
    pub fn place(&self, span: MemSpan) -> Result<Place, Error> {
        match self.covers(span) {
            true => {
                let at = span.as_ptr().addr();
                Ok(Place { at: at as u64, by_kernel: self.by_device + (at - self.start) as u64 })
            }
            false => Err(ErrorKind::OutOfRange.into()),
        }
    }

    /// Whether the kernel may copy the memory. Memory that the application has registered by itself may cease
    /// to be registered: a copy engine then waits, and a kernel would fault.
    #[must_use]
    pub const fn allows_kernel(&self) -> bool {
        self.is_own
    }

    /// Whether these are the pages of a span, which devices may write if they must.
    pub(crate) fn is_of(&self, span: MemSpan, writable: bool) -> bool {
        let pages = pages_of(span).is_ok_and(|pages| pages == (self.start, self.len));
        self.is_own && pages && (self.writable || !writable)
    }

    fn covers(&self, span: MemSpan) -> bool {
        let at = span.as_ptr().addr();
        at >= self.start && at.checked_add(span.len()).is_some_and(|end| end <= self.start + self.len)
    }
}

impl std::fmt::Debug for HostPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPin")
            .field("len", &self.len)
            .field("is_own", &self.is_own)
            .finish_non_exhaustive()
    }
}

impl Drop for HostPin {
    fn drop(&mut self) {
        if !self.is_own {
            return;
        }
        let Ok(_entered) = self.device.enter_to_free() else { return };
        let pages = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: registered in `new`; nothing of the device uses it any more.
        self.device.gave_back("page-locked memory", unsafe { (self.device.driver.host_unregister)(pages) });
    }
}

/// The first address and the length of the pages that a span lies in.
fn pages_of(span: MemSpan) -> Result<(usize, usize), Error> {
    let at = span.as_ptr().addr();
    let start = at / PAGE * PAGE;
    let end = at.checked_add(span.len()).and_then(|end| end.checked_next_multiple_of(PAGE));
    Ok((start, end.ok_or(ErrorKind::OutOfRange)? - start))
}

fn is_pinned(device: &Device, at: usize) -> bool {
    let mut kind = 0_u32;
    let (name, place) = (POINTER_MEMORY_TYPE, (&raw mut kind).cast());
    // SAFETY: one name and one place of its size; the address is not accessed.
    let code =
        unsafe { (device.driver.pointer_attributes)(1, &raw const name, &raw const place, at as DevicePtr) };
    code == SUCCESS && kind == MEMORY_TYPE_HOST
}
