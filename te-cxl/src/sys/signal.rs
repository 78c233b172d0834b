//! The process's handler of SIGBUS. It acts on faults inside the copy routines, and on the kernel's reports
//! that memory of a pool is damaged; every other signal goes to the handler that was there before.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::reports;
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
/// The code for damaged memory that this thread has not accessed.
const BUS_MCEERR_AO: c_int = 5;
/// The code for an address behind which there is nothing.
const BUS_ADRERR: usize = 2;

/// The handler that gets what is not ours: its address, and in the highest bit whether it wants `siginfo_t`.
/// Set before ours is installed, and again when another one has replaced ours.
static NEXT: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
/// The handler that was there before ours was installed the first time.
static FIRST: OnceLock<usize> = OnceLock::new();
const WITH_INFO: usize = 1 << 63;

thread_local! {
    /// Whether this thread is in the next handler: one that replaced ours may pass signals on to ours.
    static PASSING_ON: Cell<bool> = const { Cell::new(false) };
}

/// Installs the handler, unless it is there.
///
/// # Errors
/// The system's.
pub(super) fn install() -> std::io::Result<()> {
    // Two threads must not take each other's handler for a foreign one.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if install_now() { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Installs the handler where it is not, and keeps the one that is there for what is not ours. Returns
/// whether that worked. A signal handler may call it once the handler was installed.
fn install_now() -> bool {
    let mut found = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: `found` is writable; no new handler is given.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), found.as_mut_ptr()) } != 0 {
        return false;
    }
    // SAFETY: the call has filled it in.
    let found = unsafe { found.assume_init() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_bus;
    if found.sa_sigaction == handler as usize {
        return true;
    }
    let with_info = if found.sa_flags & libc::SA_SIGINFO != 0 { WITH_INFO } else { 0 };
    let next = found.sa_sigaction | with_info;
    FIRST.get_or_init(|| next);
    NEXT.store(next, Ordering::SeqCst);
    // SAFETY: zeroes are a valid `sigaction`.
    let mut ours = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    ours.sa_sigaction = handler as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `ours` is filled in; the handler does only what a signal handler may do.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) == 0 }
}

/// Runs in the thread that faulted, between two instructions of it: nothing here allocates or locks.
extern "C" fn on_bus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes valid pointers to a handler with `SA_SIGINFO`.
    if unsafe { fix(info, context.cast()) } {
        return;
    }
    let again = PASSING_ON.replace(true);
    let first = || FIRST.get().copied().unwrap_or(libc::SIG_DFL);
    let next = if again { first() } else { NEXT.load(Ordering::SeqCst) };
    // SAFETY: as above; the address is that of a handler that was installed.
    let is_over = unsafe { pass_on(next, signal, info, context) };
    PASSING_ON.set(again);
    if !is_over {
        // The handler of std takes itself away when a signal is none of its own, and ours with it. From then
        // on the system's own handler is the next one.
        install_now();
    }
}

/// Gives a signal to the next handler. Returns whether that is the system's own, which is installed now and
/// ends the process.
///
/// # Safety
/// The pointers are what the kernel passed to the handler; `next` is what [`install_now`] found.
unsafe fn pass_on(next: usize, signal: c_int, info: *mut siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    let code = unsafe { (*info).si_code };
    // A signal that was sent, or that reports damage elsewhere: no instruction has failed.
    let was_sent = code <= 0 || code == BUS_MCEERR_AO;
    match next & !WITH_INFO {
        // An access that failed cannot be ignored; a signal that was sent can.
        libc::SIG_IGN if was_sent => return false,
        libc::SIG_DFL | libc::SIG_IGN => {
            end_by_default(signal, was_sent);
            return true;
        }
        // SAFETY: the address of a handler that was installed with these flags.
        address => unsafe {
            if next & WITH_INFO != 0 {
                type WithInfo = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
                std::mem::transmute::<usize, WithInfo>(address)(signal, info, context);
            } else {
                std::mem::transmute::<usize, extern "C" fn(c_int)>(address)(signal);
            }
        },
    }
    false
}

/// Continues a copy routine at its fixup, when the signal is a fault of one; takes a report about a pool.
///
/// # Safety
/// Both are what the kernel passed to the handler.
unsafe fn fix(info: *mut siginfo_t, context: *mut ucontext_t) -> bool {
    // SAFETY: the caller's promise; of the labels only the addresses are taken.
    unsafe {
        if (*info).si_code == BUS_MCEERR_AO {
            // No instruction has failed: what the memory is used for ends when it is touched again.
            return reports::report((*info).si_addr().addr());
        }
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
fn end_by_default(signal: c_int, was_sent: bool) {
    // SAFETY: zeroes with `SIG_DFL` are a valid `sigaction`; `raise` may be called in a handler.
    unsafe {
        let default = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        libc::sigaction(signal, &raw const default, std::ptr::null_mut());
        if was_sent {
            libc::raise(signal);
        }
    }
}
