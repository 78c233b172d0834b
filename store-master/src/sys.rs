//! What the standard library does not offer.
#![allow(unsafe_code, reason = "calls of the C library")]

/// Gives memory that was freed back to the system, as far as the allocator kept it. With another allocator than glibc's it
/// does nothing. Takes some milliseconds for each 100 MiB.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim(3) may be called at any time, from any thread; it touches nothing that is allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}
