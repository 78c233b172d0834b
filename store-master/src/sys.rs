//! System calls that the standard library does not offer.
#![allow(unsafe_code, reason = "calls of the C library")]

/// Gives freed memory that the allocator has kept back to the operating system. Without glibc's allocator it
/// does nothing. Takes some milliseconds per 100 MiB.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim(3) may be called at any time, from any thread; it does not touch allocated memory.
    unsafe {
        libc::malloc_trim(0);
    }
}
