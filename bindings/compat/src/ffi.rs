//! What the C interfaces share: no panic leaves a function, texts in and out, a logger.
//!
//! It is for the crates in `bindings/c`, and for any other interface to a foreign language.
#![allow(unsafe_code, reason = "reads texts and arrays that callers in C pass by address")]

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::env::Env;

/// Longest text that a caller may pass, bytes.
pub const TEXT_BYTES_MAX: usize = 1 << 20;

/// Runs `run`, and returns `failed` if it panics. The panic is logged; what was being changed stays usable,
/// because every lock below recovers from poisoning.
pub fn guard<T>(failed: T, run: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        log::error!("a bug: the call panicked: {}", message_of(&*panic));
        failed
    })
}

/// The message of a panic.
#[must_use]
pub fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown")
}

/// The text at `text`. `None`: NULL, or not UTF-8.
///
/// # Safety
/// `text` is NULL or the address of a text that a NUL ends and that does not change during `'a`.
#[must_use]
pub unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { bytes(text) }.and_then(|bytes| std::str::from_utf8(bytes).ok())
}

/// The bytes of the text at `text`, without its NUL. `None`: NULL, or longer than [`TEXT_BYTES_MAX`].
///
/// # Safety
/// As [`text`].
#[must_use]
pub unsafe fn bytes<'a>(text: *const c_char) -> Option<&'a [u8]> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes();
    (bytes.len() <= TEXT_BYTES_MAX).then_some(bytes)
}

/// The array of `len` items at `items`. `None`: NULL, misaligned, or longer than the address space. An
/// array of no items may be NULL.
///
/// # Safety
/// `items` is NULL or the address of `len` valid items that do not change during `'a`.
#[must_use]
pub unsafe fn array<'a, T>(items: *const T, len: usize) -> Option<&'a [T]> {
    if len == 0 {
        return Some(&[]);
    }
    let size = size_of::<T>().checked_mul(len)?;
    if items.is_null() || !items.is_aligned() || isize::try_from(size).is_err() {
        return None;
    }
    // SAFETY: the caller's promise; the address and the length were checked.
    Some(unsafe { std::slice::from_raw_parts(items, len) })
}

/// As [`array()`], of items to be written. Their values before are never read.
///
/// # Safety
/// `items` is NULL or the address of `len` writable items that nothing else accesses during `'a`.
#[must_use]
pub unsafe fn array_out<'a, T>(items: *mut T, len: usize) -> Option<&'a mut [std::mem::MaybeUninit<T>]> {
    if len == 0 {
        return Some(&mut []);
    }
    let size = size_of::<T>().checked_mul(len)?;
    if items.is_null() || !items.is_aligned() || isize::try_from(size).is_err() {
        return None;
    }
    // SAFETY: the caller's promise; the address and the length were checked, and any bytes are valid
    // `MaybeUninit`.
    Some(unsafe { std::slice::from_raw_parts_mut(items.cast(), len) })
}

/// Writes `text` and a NUL to a buffer of `len` bytes. Returns whether they fit. If they do not, the buffer
/// has an empty text.
///
/// # Safety
/// `out` is NULL or the address of `len` writable bytes that nothing else accesses meanwhile.
#[must_use]
pub unsafe fn text_out(text: &str, out: *mut c_char, len: usize) -> bool {
    // SAFETY: the caller's promise.
    let Some(out) = (unsafe { array_out(out.cast::<u8>(), len) }) else { return false };
    let fits = text.len() < out.len() && !text.as_bytes().contains(&0);
    let text = if fits { text.as_bytes() } else { &[] };
    for (place, byte) in out.iter_mut().zip(text.iter().chain(&[0])) {
        place.write(*byte);
    }
    fits
}

/// Lets the messages of this library appear on standard error, unless its process has another logger. The
/// level is that of `MC_LOG_LEVEL`, by default `WARNING`.
pub fn log_to_stderr() {
    // The second call, and a process with a logger of its own, keep what there is.
    if log::set_logger(&StandardError).is_ok() {
        log::set_max_level(Env::of_process().log_level.unwrap_or(log::LevelFilter::Warn));
    }
}

/// Writes messages to standard error, one line each.
struct StandardError;

impl log::Log for StandardError {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = format!("snowskin {} {}: {}\n", record.level(), record.target(), record.args());
            // There is nowhere to report that standard error is closed.
            let _ = std::io::stderr().lock().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_the_value_for_failures() {
        assert_eq!(guard(-1, || 7), 7);
        assert_eq!(guard(-1, || panic!("on purpose")), -1);
        assert_eq!(guard(-1, || panic!("on purpose {}", 2)), -1);
    }

    #[test]
    fn texts_and_arrays_by_address() {
        // SAFETY: the addresses are NULL, or those of constants.
        unsafe {
            assert_eq!(text(std::ptr::null()), None);
            assert_eq!(text(c"abc".as_ptr()), Some("abc"));
            assert_eq!((text(c"\xff".as_ptr()), bytes(c"\xff".as_ptr())), (None, Some(&[0xff_u8][..])));
            assert_eq!(array::<u64>(std::ptr::null(), 0), Some(&[][..]));
            assert_eq!(array::<u64>(std::ptr::null(), 1), None);
            let items = [1_u64, 2];
            assert_eq!(array(items.as_ptr(), 2), Some(&items[..]));
            assert_eq!(array(items.as_ptr(), usize::MAX), None);
            assert_eq!(array(items.as_ptr().byte_add(1), 1), None);
        }
    }

    #[test]
    fn a_text_that_does_not_fit_leaves_an_empty_one() {
        let mut buffer = [1_u8; 4];
        let out = buffer.as_mut_ptr().cast();
        // SAFETY: `buffer` has at least the stated lengths.
        unsafe {
            assert!(text_out("abc", out, 4) && buffer == *b"abc\0");
            assert!(!text_out("abcd", out, 4) && buffer[0] == 0);
            assert!(text_out("", out, 1));
            assert!(!text_out("", out, 0) && !text_out("a", std::ptr::null_mut(), 4));
            assert!(!text_out("a\0b", out, 4));
        }
    }
}
