//! The process's handler of SIGBUS. It acts on faults inside the copy routines alone; every other signal goes
//! to the handler that was there before.

use std::mem::MaybeUninit;
use std::sync::OnceLock;

use libc::{c_int, c_void, siginfo_t, ucontext_t};

unsafe extern "C" {
    // Labels in `copy.rs`, of which only the addresses are used.
    static te_cxl_copies_begin: u8;
    static te_cxl_copies_end: u8;
    static te_cxl_copies_avx: u8;
    static te_cxl_fixup: u8;
    static te_cxl_fixup_avx: u8;
}

/// The code of SIGBUS for memory that the hardware has reported as damaged, when it was accessed.
pub(super) const BUS_MCEERR_AR: usize = 4;
/// The code for an address behind which there is nothing.
const BUS_ADRERR: usize = 2;

/// The handler that was there before. Set before ours is installed.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once per process.
///
/// # Errors
/// The system's.
pub(super) fn install() -> std::io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let number = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: `before` is writable; no new handler is given.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
            return Err(number());
        }
        // SAFETY: the call has filled it in.
        let _ = BEFORE.set(unsafe { before.assume_init() });
        // SAFETY: zeroes are a valid `sigaction`.
        let mut ours = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_bus;
        ours.sa_sigaction = handler as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: `ours` is filled in; the handler does only what a signal handler may do.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(number()),
        }
    });
    installed.map_err(std::io::Error::from_raw_os_error)
}

/// Runs in the thread that faulted, between two instructions of it: nothing here allocates or locks.
extern "C" fn on_bus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes valid pointers to a handler with `SA_SIGINFO`.
    if unsafe { fix(info, context.cast()) } {
        return;
    }
    let Some(before) = BEFORE.get() else { return };
    match before.sa_sigaction {
        // SAFETY: as above.
        libc::SIG_DFL => unsafe { end_by_default(signal, info) },
        // An access that failed cannot be ignored; a signal that was sent can.
        // SAFETY: as above.
        libc::SIG_IGN if unsafe { (*info).si_code } > 0 => unsafe { end_by_default(signal, info) },
        libc::SIG_IGN => {}
        // SAFETY: the address of a handler that was installed with these flags.
        address => unsafe {
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                type WithInfo = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
                std::mem::transmute::<usize, WithInfo>(address)(signal, info, context);
            } else {
                std::mem::transmute::<usize, extern "C" fn(c_int)>(address)(signal);
            }
        },
    }
}

/// Continues a copy routine at its fixup, when the signal is a fault of one.
///
/// # Safety
/// Both are what the kernel passed to the handler.
unsafe fn fix(info: *mut siginfo_t, context: *mut ucontext_t) -> bool {
    // SAFETY: the caller's promise; of the labels only the addresses are taken.
    unsafe {
        let code = (*info).si_code as usize;
        if code != BUS_MCEERR_AR && code != BUS_ADRERR {
            return false;
        }
        let registers = &mut (*context).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize] as usize;
        let (begin, end) = ((&raw const te_cxl_copies_begin).addr(), (&raw const te_cxl_copies_end).addr());
        if at < begin || at >= end {
            return false;
        }
        let fixup = match at >= (&raw const te_cxl_copies_avx).addr() {
            true => (&raw const te_cxl_fixup_avx).addr(),
            false => (&raw const te_cxl_fixup).addr(),
        };
        registers[libc::REG_R8 as usize] = ((*info).si_addr().addr() << 8 | code) as i64;
        registers[libc::REG_RIP as usize] = fixup as i64;
        true
    }
}

/// Gives the signal to the system's own handler, which ends the process: a fault is raised again by the
/// instruction, a signal that was sent is sent again.
///
/// # Safety
/// `info` is what the kernel passed to the handler.
unsafe fn end_by_default(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: zeroes with `SIG_DFL` are a valid `sigaction`; `raise` may be called in a handler.
    unsafe {
        let default = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        libc::sigaction(signal, &raw const default, std::ptr::null_mut());
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}
