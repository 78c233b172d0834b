//! An opened device with its protection domain and registrations: the part that threads share.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use te_core::{Error, ErrorKind, MemSpan};

use super::abi::{ibv_context, ibv_mr, ibv_pd};
use super::convert::{check, driver_error, last_errno};
use super::load::Library;
use crate::sys::verbs::{MrAccess, Registrar, Registration};

/// Owns the context, the protection domain and every registration, and ends them when it is dropped.
pub(super) struct Context {
    pub(super) library: &'static Library,
    pub(super) context: NonNull<ibv_context>,
    pub(super) pd: NonNull<ibv_pd>,
    registrations: Mutex<Registrations>,
}

#[derive(Default)]
struct Registrations {
    /// Handles count up, so that the handle of an ended registration names no other one.
    last_handle: u64,
    live: HashMap<u64, NonNull<ibv_mr>>,
}

// SAFETY: libibverbs is thread-safe (its documentation promises so for every verb); our own table is behind a
// lock.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes a protection domain on an opened device.
    ///
    /// # Errors
    /// The driver's; the device is closed again.
    ///
    /// # Safety
    /// `context` came from `library`'s `ibv_open_device` and has no other owner.
    pub(super) unsafe fn new(
        library: &'static Library,
        context: NonNull<ibv_context>,
    ) -> Result<Self, Error> {
        // SAFETY: the context is open (the caller's promise).
        let pd = unsafe { (library.ibv_alloc_pd)(context.as_ptr()) };
        let Some(pd) = NonNull::new(pd) else {
            let error = driver_error(last_errno());
            // SAFETY: nothing was made on it, and it is not used afterwards.
            unsafe { (library.ibv_close_device)(context.as_ptr()) };
            return Err(error);
        };
        Ok(Self { library, context, pd, registrations: Mutex::default() })
    }

    /// Whether the driver can register memory by its dma-buf.
    pub(super) fn takes_dmabuf(&self) -> bool {
        let Some(register) = self.library.reg_dmabuf_mr else { return false };
        // The descriptor -1 is never valid: a driver that has the call reports that, another one reports
        // that it lacks the call. SAFETY: the domain is ours; no memory is involved.
        let mr = unsafe { register(self.pd.as_ptr(), 0, 0, 0, -1, 0) };
        let errno = last_errno();
        if let Some(mr) = NonNull::new(mr) {
            // SAFETY: just made, and used by nothing else.
            unsafe { (self.library.ibv_dereg_mr)(mr.as_ptr()) };
            return true;
        }
        ![libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::ENOSYS, libc::ENOTTY].contains(&errno)
    }

    pub(super) fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        let (Some(register), Ok(len)) = (self.library.reg_dmabuf_mr, usize::try_from(len)) else {
            return Err(Error::new(ErrorKind::Unsupported));
        };
        let (pd, fd, access) = (self.pd.as_ptr(), fd.as_raw_fd(), access.bits() as i32);
        // SAFETY: the domain is ours, and the descriptor is open. The kernel keeps the dma-buf alive, and no
        // memory of this process is involved.
        let mr = unsafe { register(pd, offset, len, address, fd, access) };
        self.keep(mr)
    }

    pub(super) fn deregister(&self, registration: Registration) -> Result<(), Error> {
        // It leaves the table first, so that of two threads with the same handle only one gets it. If the
        // driver refuses, it is put back.
        let Some(mr) = self.registrations().live.remove(&registration.handle) else {
            return Err(driver_error(libc::EINVAL));
        };
        // SAFETY: it was in the table, so it was made here and not deregistered yet; nothing else has it now.
        let done = check(unsafe { (self.library.ibv_dereg_mr)(mr.as_ptr()) });
        if done.is_err() {
            self.registrations().live.insert(registration.handle, mr);
        }
        done
    }

    fn keep(&self, mr: *mut ibv_mr) -> Result<Registration, Error> {
        let mr = NonNull::new(mr).ok_or_else(|| driver_error(last_errno()))?;
        // SAFETY: a registration that was just made; its keys never change.
        let (local_key, remote_key) = unsafe { ((*mr.as_ptr()).lkey, (*mr.as_ptr()).rkey) };
        let mut registrations = self.registrations();
        registrations.last_handle += 1;
        let handle = registrations.last_handle;
        registrations.live.insert(handle, mr);
        Ok(Registration { handle, local_key, remote_key })
    }

    fn registrations(&self) -> std::sync::MutexGuard<'_, Registrations> {
        // A thread that panics while it holds the lock leaves the map consistent.
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registrar for Context {
    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error> {
        // From here on work requests and peers name the memory by its address as a number.
        let (addr, len) = (span.as_ptr().cast::<c_void>(), span.len());
        let iova = span.as_ptr().expose_provenance() as u64;
        let (pd, plain) = (self.pd.as_ptr(), access.difference(MrAccess::RELAXED_ORDERING));
        let mr = match self.library.reg_mr_iova2 {
            // The I/O address is the memory's own address: rxe refuses any other one.
            Some(register) if access.contains(MrAccess::RELAXED_ORDERING) => {
                // SAFETY: the domain is ours; the caller promises that the memory stays mapped and
                // unborrowed.
                unsafe { register(pd, addr, len, iova, access.bits()) }
            }
            _ => {
                // SAFETY: as above.
                unsafe { (self.library.ibv_reg_mr)(pd, addr, len, plain.bits() as i32) }
            }
        };
        self.keep(mr)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let live = std::mem::take(&mut self.registrations().live);
        // SAFETY: each registration was made here and not deregistered. `SystemVerbs` has destroyed the queue
        // pairs and the completion queue before, so the domain has no children, and then the device has none.
        // What cannot be destroyed ends with the device's file.
        unsafe {
            for mr in live.into_values() {
                (self.library.ibv_dereg_mr)(mr.as_ptr());
            }
            (self.library.ibv_dealloc_pd)(self.pd.as_ptr());
            (self.library.ibv_close_device)(self.context.as_ptr());
        }
    }
}
