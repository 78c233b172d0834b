//! System calls that the standard library does not wrap. This is the only unsafe code of the crate.
#![allow(unsafe_code, reason = "system calls; every block states what it relies on")]

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use te_core::{Access, MemSpan, RegionId};
use te_engine::{Engine, RegisterError, TransferEngine};

use crate::exit::Exit;

static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// SIGHUP has come, where it means to read settings again.
static RELOAD: AtomicBool = AtomicBool::new(false);
/// An eventfd that the signal handler raises to wake sleepers; -1 before [`catch_interrupts`].
static EVENT: AtomicI32 = AtomicI32::new(-1);

/// From now on Ctrl-C, SIGTERM and SIGHUP are recorded; [`interrupted`] returns them. A second signal ends
/// the process at once, and its children with it ([`die_with_parent`]).
pub(crate) fn catch_interrupts() {
    extern "C" fn note(signal: libc::c_int) {
        SIGNAL.store(signal, Ordering::Relaxed);
        let one = 1u64;
        // SAFETY: `write` is async-signal-safe, and `one` outlives it. Without an event the call fails, which
        // has no effect; with one it cannot change errno, because an eventfd that holds at most three is
        // never full.
        unsafe { libc::write(EVENT.load(Ordering::Relaxed), (&raw const one).cast(), size_of::<u64>()) };
    }
    // SAFETY: no memory is involved; the descriptor is open for the rest of the process's life.
    EVENT.store(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }, Ordering::Relaxed);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `old` outlives the call, which either fills it or leaves it zeroed.
        let ignored = unsafe {
            let mut old: libc::sigaction = MaybeUninit::zeroed().assume_init();
            libc::sigaction(signal, std::ptr::null(), &raw mut old);
            old.sa_sigaction == libc::SIG_IGN
        };
        // A process started by `nohup` keeps ignoring SIGHUP.
        if ignored && signal == libc::SIGHUP {
            continue;
        }
        // SAFETY: the zeroed struct is a valid sigaction with an empty mask, and the handler only calls what
        // is async-signal-safe. Without SA_RESTART, blocking system calls return EINTR and their callers
        // check [`interrupted`].
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = note as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// From now on SIGHUP means that settings are to be read again: [`takes_reload`] says so.
pub(crate) fn catch_reloads() {
    extern "C" fn note(_: libc::c_int) {
        RELOAD.store(true, Ordering::Relaxed);
    }
    // SAFETY: the zeroed struct is a valid sigaction with an empty mask, and the handler only stores to an
    // atomic. Without SA_RESTART, [`wait_for_interrupt`] returns.
    unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        action.sa_sigaction = note as *const () as libc::sighandler_t;
        libc::sigaction(libc::SIGHUP, &raw const action, std::ptr::null_mut());
    }
}

/// Whether SIGHUP has come since the last call.
pub(crate) fn takes_reload() -> bool {
    RELOAD.swap(false, Ordering::Relaxed)
}

/// How to end, if a signal has requested it.
pub(crate) fn interrupted() -> Option<Exit> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => None,
        libc::SIGINT => Some(Exit::Interrupted),
        _ => Some(Exit::Terminated),
    }
}

/// Columns and lines of the terminal, if stdout is one.
pub(crate) fn terminal_size() -> Option<(usize, usize)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ (ioctl_tty(2)) writes one `winsize`, which outlives the call.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (result == 0 && size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col.into(), size.ws_row.into()))
}

/// Whether stderr is a terminal whose foreground process group is another one.
pub(crate) fn is_in_background() -> bool {
    // SAFETY: neither call involves memory. Without a terminal the first returns -1.
    let (front, own) = unsafe { (libc::tcgetpgrp(libc::STDERR_FILENO), libc::getpgrp()) };
    front > 0 && front != own
}

/// Sleeps until a signal requests the end of the process, at most `timeout`, without using the CPU. Returns
/// how to end, if it came.
pub(crate) fn wait_for_interrupt(timeout: Option<Duration>) -> Option<Exit> {
    let mut event = libc::pollfd { fd: EVENT.load(Ordering::Relaxed), events: libc::POLLIN, revents: 0 };
    let timeout_ms = timeout.map_or(-1, |timeout| i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
    // SAFETY: one pollfd, which outlives the call. A signal ends the wait early, and so does an event that
    // was raised before.
    unsafe { libc::poll(&raw mut event, 1, timeout_ms) };
    interrupted()
}

/// Puts the terminal on stdin into a mode in which keys are delivered one by one and not echoed, until this
/// is dropped.
pub(crate) struct KeyMode {
    before: libc::termios,
}

impl KeyMode {
    /// `None` when stdin is not a terminal that this process may change.
    pub(crate) fn enter() -> Option<Self> {
        if is_in_background() {
            return None;
        }
        let mut before = MaybeUninit::<libc::termios>::uninit();
        // SAFETY: `before` is large enough, and is read only after the call succeeded and filled it.
        let before = unsafe {
            if libc::tcgetattr(libc::STDIN_FILENO, before.as_mut_ptr()) != 0 {
                return None;
            }
            before.assume_init()
        };
        let mut keys = before;
        // Signals are unchanged: Ctrl-C still ends the process.
        keys.c_lflag &= !(libc::ICANON | libc::ECHO);
        // Ctrl-Z is delivered as a key, because the terminal's mode has to be restored before the process
        // stops.
        keys.c_cc[libc::VSUSP] = libc::_POSIX_VDISABLE;
        keys.c_cc[libc::VMIN] = 0;
        keys.c_cc[libc::VTIME] = 0;
        // SAFETY: `keys` outlives the call.
        let set = unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const keys) } == 0;
        set.then_some(Self { before })
    }

    /// Sleeps until a key is pressed or a signal requests the end of the process, at most `timeout`. Returns
    /// how many bytes the terminal sent; 0 without a key.
    pub(crate) fn wait(&self, timeout: Duration, bytes: &mut [u8]) -> usize {
        let event = EVENT.load(Ordering::Relaxed);
        let wanted = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [wanted(event), wanted(libc::STDIN_FILENO)];
        let timeout_ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: two pollfds, which outlive the call.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout_ms) };
        if ready <= 0 || fds[1].revents == 0 {
            return 0;
        }
        // SAFETY: the call writes at most as many bytes as the slice has, and the slice outlives it.
        let read = unsafe { libc::read(libc::STDIN_FILENO, bytes.as_mut_ptr().cast(), bytes.len()) };
        usize::try_from(read).unwrap_or(0)
    }
}

impl Drop for KeyMode {
    fn drop(&mut self) {
        // SAFETY: `before` is the mode that was read in `enter`; it outlives the call.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const self.before) };
    }
}

/// Stops this process as Ctrl-Z does, until the shell continues it.
pub(crate) fn suspend() {
    // SAFETY: no memory is involved; the signal is delivered before the call returns.
    unsafe { libc::raise(libc::SIGTSTP) };
}

/// Makes the kernel send SIGKILL to the child that `command` starts when the thread that starts it ends, for
/// whatever reason. The child leads its own process group, so that Ctrl-C reaches only the parent, which then
/// stops its children in order.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = std::process::id().cast_signed();
    command.process_group(0);
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call above; then no signal would ever arrive.
            if libc::getppid() != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// Sends SIGTERM to a child of this process.
pub(crate) fn terminate(pid: u32) {
    // SAFETY: no memory is involved. The caller has not yet waited for the child, so the process id is not
    // reused.
    unsafe { libc::kill(pid.cast_signed(), libc::SIGTERM) };
}

/// CPU time of this process with all its threads, user and system.
pub(crate) fn own_cpu() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or_default()
}

/// CPU time of another process with all its threads, user and system. `None` when the process does not exist.
pub(crate) fn process_cpu(pid: u32) -> Option<Duration> {
    let mut id: libc::clockid_t = 0;
    // SAFETY: `id` outlives the call.
    let failed = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut id) } != 0;
    if failed { None } else { clock(id) }
}

fn clock(id: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    (unsafe { libc::clock_gettime(id, &raw mut time) } == 0).then(|| duration(time))
}

fn duration(time: libc::timespec) -> Duration {
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Soft and hard limit of a resource; `u64::MAX` means unlimited.
pub(crate) fn limit(resource: libc::__rlimit_resource_t) -> Option<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    (unsafe { libc::getrlimit(resource, &raw mut limit) } == 0).then_some((limit.rlim_cur, limit.rlim_max))
}

/// Raises the soft limit of open files to the hard limit, as servers commonly do. A failure changes nothing.
pub(crate) fn lift_file_limit() {
    if let Some((soft, hard)) = limit(libc::RLIMIT_NOFILE)
        && soft < hard
    {
        let limit = libc::rlimit { rlim_cur: hard, rlim_max: hard };
        // SAFETY: `limit` outlives the call.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Bytes that may still be written to the file system at `path`.
pub(crate) fn available_bytes(path: &str) -> Option<u64> {
    let path = CString::new(path).ok()?;
    let mut stat = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` ends with NUL, `stat` is large enough, and it is read only after the call succeeded and
    // filled it.
    let stat = unsafe {
        if libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Whether the kernel can create memory files (memfd).
pub(crate) fn try_memfd() -> Result<(), io::Error> {
    // SAFETY: the name ends with NUL; only this function has the descriptor, and closes it at once.
    unsafe {
        let fd = libc::memfd_create(c"snowskin-doctor".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::close(fd);
    }
    Ok(())
}

/// Whether the kernel can create an io_uring.
pub(crate) fn try_io_uring() -> Result<(), io::Error> {
    /// Bytes of `struct io_uring_params`.
    const PARAMS_BYTES: usize = 120;
    let mut params = [0u64; PARAMS_BYTES / 8];
    // SAFETY: the kernel reads and writes exactly one zeroed `io_uring_params`; only this function has the
    // descriptor, and closes it.
    unsafe {
        let fd = libc::syscall(libc::SYS_io_uring_setup, 4u32, params.as_mut_ptr());
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::close(fd as i32);
    }
    Ok(())
}

/// Loads a shared library, which stays loaded, and returns whether it has `symbol`, or why it cannot be
/// loaded.
pub(crate) fn library_has(library: &CStr, symbol: &CStr) -> Result<bool, String> {
    // SAFETY: both names end with NUL. Loading runs the library's constructors, which the caller of this
    // function intends, and the library is not unloaded. The text of `dlerror` is copied before any other
    // call of that family.
    unsafe {
        let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() {
            let text = libc::dlerror();
            return Err(if text.is_null() {
                "cannot be loaded".to_owned()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            });
        }
        Ok(!libc::dlsym(handle, symbol.as_ptr()).is_null())
    }
}

/// Registers memory of a GPU, whose owner drops it after the engine or unregisters it before.
pub(crate) fn register(
    engine: &mut Engine,
    span: MemSpan,
    access: Access,
) -> Result<RegionId, RegisterError> {
    // SAFETY: the CPU has no references to memory of a GPU. `bench::memory::Buffer` keeps it longer than the
    // registration lasts.
    unsafe { engine.register(span, access) }
}

/// As [`register`], for an engine that serves by itself; also of a CXL pool, which stays mapped while the
/// engine has it.
pub(crate) fn register_with(
    engine: &TransferEngine,
    span: MemSpan,
    access: Access,
) -> Result<RegionId, RegisterError> {
    // SAFETY: as in `register`.
    unsafe { engine.register(span, access) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_their_symbols_are_found_or_it_is_said_why_not() {
        assert_eq!(library_has(c"libc.so.6", c"printf"), Ok(true));
        assert_eq!(library_has(c"libc.so.6", c"no_such_symbol"), Ok(false));
        assert!(library_has(c"libno-such.so.1", c"x").is_err_and(|why| why.contains("libno-such.so.1")));
    }

    #[test]
    fn cpu_time_of_this_process_is_the_same_from_both_sides_and_grows() {
        let before = own_cpu();
        let mut x = 1u64;
        while own_cpu() - before < Duration::from_millis(2) {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        let outside = process_cpu(std::process::id()).unwrap();
        assert!(outside >= before + Duration::from_millis(2));
    }

    #[test]
    fn limits_and_space_are_told() {
        let (soft, hard) = limit(libc::RLIMIT_NOFILE).unwrap();
        assert!(soft > 0 && soft <= hard);
        assert!(available_bytes("/").is_some());
        assert!(available_bytes("/no/such/place").is_none());
    }
}
