//! System calls, and copies between raw addresses and slices.
#![allow(unsafe_code, reason = "raw addresses are the currency of the interfaces that this crate serves")]

use std::io;

/// Whether the first and the last byte of `len` bytes at `addr` can be read by the CPU. Addresses that were
/// never mapped, and memory of a GPU that the CPU does not see, cannot. `true` where the system does not
/// tell.
pub(crate) fn is_readable(addr: u64, len: u64) -> bool {
    let Some(last) = len.checked_sub(1).and_then(|rest| addr.checked_add(rest)) else { return false };
    [addr, last].into_iter().all(|byte| match read_byte(byte) {
        Ok(()) => true,
        // EPERM and ENOSYS: a sandbox forbids the call. Then nothing is known.
        Err(error) => error.raw_os_error() != Some(libc::EFAULT),
    })
}

/// Reads one byte of this process with a system call, which returns an error where a load would be a fault.
fn read_byte(addr: u64) -> io::Result<()> {
    let mut byte = 0_u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: 1 };
    // SAFETY: `local` is one writable byte of this frame. The kernel checks `remote` and only reads it.
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    if read == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Copies `bytes` to `addr`. Returns whether it did: not to address 0.
///
/// # Safety
/// `bytes.len()` bytes at `addr` are mapped and writable, and nothing else accesses them meanwhile except
/// peers, whose accesses race with this copy as they do with the caller's own.
pub unsafe fn write_bytes(addr: u64, bytes: &[u8]) -> bool {
    if addr == 0 {
        return false;
    }
    // SAFETY: the caller's promise. Source and destination are distinct: nothing else has `bytes` mutably.
    unsafe { te_core::copy_bytes(bytes.as_ptr(), addr as *mut u8, bytes.len()) };
    true
}

/// Copies `len` bytes at `addr` out. `None`: the address is 0.
///
/// # Safety
/// `len` bytes at `addr` are mapped and readable, and nothing but peers writes them meanwhile.
#[must_use]
pub unsafe fn read_bytes(addr: u64, len: usize) -> Option<Vec<u8>> {
    if addr == 0 {
        return None;
    }
    let mut bytes = vec![0; len];
    // SAFETY: the caller's promise; `bytes` is fresh and has room for `len`.
    unsafe { te_core::copy_bytes(addr as *const u8, bytes.as_mut_ptr(), len) };
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_readable_and_other_addresses_are_not() {
        let bytes = vec![7_u8; 5000];
        assert!(is_readable(bytes.as_ptr().addr() as u64, 5000));
        assert!(!is_readable(0, 1));
        assert!(!is_readable(1 << 46, 1));
        assert!(!is_readable(u64::MAX, 2));
        assert!(!is_readable(bytes.as_ptr().addr() as u64, u64::MAX));
        assert!(!is_readable(bytes.as_ptr().addr() as u64, 0));
    }

    #[test]
    fn bytes_are_copied_in_and_out_and_address_0_is_refused() {
        let mut place = vec![0_u8; 8];
        let addr = place.as_mut_ptr().addr() as u64;
        // SAFETY: `place` has 8 bytes and is not used meanwhile.
        unsafe {
            assert!(write_bytes(addr + 2, b"abc"));
            assert_eq!(read_bytes(addr, 8).as_deref(), Some(b"\0\0abc\0\0\0".as_slice()));
            assert!(!write_bytes(0, b"x"));
            assert_eq!(read_bytes(0, 1), None);
            assert_eq!(read_bytes(addr, 0), Some(Vec::new()));
        }
    }
}
