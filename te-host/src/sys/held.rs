//! Registered memory, and the guard under which it may be accessed.

use std::marker::PhantomData;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use te_core::{Error, ErrorKind, MemSpan};

use super::crc;

/// Set when a gate is shut: no entry succeeds any more.
const SHUT: u64 = 1 << 63;

/// Counts the guards inside. After it was shut, it reports when the last one has left. `tests/loom_held.rs`
/// checks its memory orderings.
#[derive(Debug, Default)]
pub struct Gate {
    /// The number of guards inside, and [`SHUT`].
    state: AtomicU64,
}

/// A guard: it counts as inside while it lives.
#[derive(Debug)]
pub struct Inside<'a>(&'a Gate);

/// A registered span, shared by everything that may access it. Each access takes a guard, and ending the
/// registration succeeds only when there is no guard.
#[derive(Debug)]
pub struct HeldSpan {
    span: MemSpan,
    gate: Gate,
}

/// The right to access a [`HeldSpan`]'s memory while it lives.
#[derive(Debug)]
pub struct Use<'a> {
    span: MemSpan,
    _inside: Inside<'a>,
}

/// How memory is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// It can be read.
    ReadOnly,
    /// It can be read and written.
    ReadWrite,
}

/// Memory that may be accessed for `'a`.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    ptr: *mut u8,
    len: u64,
    protection: Protection,
    _alive: PhantomData<&'a ()>,
}

impl Gate {
    /// Enters; `None` when the gate is shut.
    #[must_use]
    pub fn enter(&self) -> Option<Inside<'_>> {
        // Acquire pairs with no write to the memory; it keeps the accesses of the caller after the check.
        let guard = (self.state.fetch_add(1, Ordering::Acquire), Inside(self));
        (guard.0 & SHUT == 0).then_some(guard.1)
    }

    /// Shuts the gate: no entry succeeds any more. Returns true when no guard is inside.
    #[must_use]
    pub fn shut(&self) -> bool {
        // Acquire pairs with the Release of each guard's drop: the accesses of its holder have happened.
        self.state.fetch_or(SHUT, Ordering::AcqRel) & !SHUT == 0
    }

    /// Whether it is shut.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.state.load(Ordering::Relaxed) & SHUT != 0
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

impl HeldSpan {
    /// Memory that was registered.
    ///
    /// # Safety
    /// The promise of `Memory::register` holds for `span` until [`revoke`](Self::revoke) has returned true.
    #[must_use]
    pub unsafe fn new(span: MemSpan) -> Self {
        Self { span, gate: Gate::default() }
    }

    /// Takes a guard; `None` when the registration is ending.
    #[must_use]
    pub fn enter(&self) -> Option<Use<'_>> {
        self.gate.enter().map(|inside| Use { span: self.span, _inside: inside })
    }

    /// Gives out no more guards. Returns true when there is none, and the memory is no longer accessed.
    #[must_use]
    pub fn revoke(&self) -> bool {
        self.gate.shut()
    }

    /// Address and length.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        self.span
    }
}

impl Use<'_> {
    /// The memory, for as long as this guard is borrowed.
    #[must_use]
    pub fn window(&self) -> Window<'_> {
        let span = self.span;
        Window {
            ptr: span.as_ptr(),
            len: span.len() as u64,
            protection: Protection::ReadWrite,
            _alive: PhantomData,
        }
    }
}

impl<'a> Window<'a> {
    /// Memory that is mapped in this process, for example a peer's.
    ///
    /// # Safety
    /// `len` bytes at `ptr` are mapped with this `protection` for `'a`, and no `&`
    /// or `&mut` to them exists in that time.
    #[must_use]
    pub unsafe fn new(ptr: *mut u8, len: u64, protection: Protection) -> Self {
        Self { ptr, len, protection, _alive: PhantomData }
    }

    fn at(self, offset: u64, len: u64) -> Result<*mut u8, Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.ptr.wrapping_add(offset as usize)),
            _ => Err(Error::new(ErrorKind::OutOfRange)),
        }
    }
}

/// Copies `len` bytes; the ranges may overlap.
///
/// # Errors
/// `OutOfRange` when a range does not lie in its window, `AccessDenied` when `to` is read-only; nothing was
/// copied.
pub(crate) fn copy(
    from: Window<'_>,
    from_at: u64,
    to: Window<'_>,
    to_at: u64,
    len: u64,
) -> Result<(), Error> {
    let (from, to_ptr) = (from.at(from_at, len)?, to.at(to_at, len)?);
    if to.protection == Protection::ReadOnly {
        return Err(Error::new(ErrorKind::AccessDenied));
    }
    // SAFETY: both ranges lie inside their windows, which are mapped and free of references while they live
    // (the contract of `Window::new`, and of `HeldSpan::new` under its guard). `copy` allows overlap. Peers
    // may change the bytes meanwhile: this is the opaque copy that `te_core::copy_bytes` describes.
    unsafe { std::ptr::copy(from.cast_const(), to_ptr, len as usize) };
    Ok(())
}

/// As [`copy`], and returns the CRC-32C of what was written. With `past_cache`, the bytes are stored past the
/// cache because they are unlikely to be read soon; when a peer changes the source during the copy, the
/// checksum does not match what was written.
///
/// # Errors
/// As [`copy`].
pub(crate) fn copy_summed(
    from: Window<'_>,
    from_at: u64,
    to: Window<'_>,
    to_at: u64,
    len: u64,
    past_cache: bool,
) -> Result<u32, Error> {
    let (source, place) = (from.at(from_at, len)?, to.at(to_at, len)?);
    if source.addr().abs_diff(place.addr()) < len as usize {
        copy(from, from_at, to, to_at, len)?;
        // SAFETY: the range lies inside its window (the contract of `Window::new`).
        return Ok(unsafe { crc::crc32c_at(0, place, len as usize) });
    }
    if to.protection == Protection::ReadOnly {
        return Err(Error::new(ErrorKind::AccessDenied));
    }
    // SAFETY: as in `copy`; the ranges do not overlap.
    Ok(unsafe {
        if past_cache {
            crc::copy_past_cache(source, place, len as usize)
        } else {
            crc::copy(source, place, len as usize)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(bytes: &mut [u8]) -> HeldSpan {
        // SAFETY: the tests access the bytes only through windows while the span is held.
        unsafe { HeldSpan::new(MemSpan::new(bytes.as_mut_ptr(), bytes.len())) }
    }

    #[test]
    fn a_revoked_span_gives_out_no_guard_and_waits_for_those_inside() {
        let mut bytes = [0; 8];
        let span = held(&mut bytes);
        let inside = span.enter().unwrap();
        assert!(!span.revoke());
        assert!(span.enter().is_none());
        assert!(!span.revoke(), "a refused entry does not change the number of guards");
        drop(inside);
        assert!(span.revoke());
    }

    #[test]
    fn a_copy_stays_inside_its_windows() {
        let (mut a, mut b) = ([1u8; 8], [0u8; 8]);
        {
            let (a, b) = (held(&mut a), held(&mut b));
            let (a, b) = (a.enter().unwrap(), b.enter().unwrap());
            copy(a.window(), 0, b.window(), 4, 4).unwrap();
            for (from_at, to_at, len) in [(5, 0, 4), (0, 5, 4), (u64::MAX, 0, 2), (0, 0, 9)] {
                let error = copy(a.window(), from_at, b.window(), to_at, len).unwrap_err();
                assert_eq!(error.kind, ErrorKind::OutOfRange);
            }
        }
        assert_eq!(b, [0, 0, 0, 0, 1, 1, 1, 1]);
    }

    #[test]
    fn a_summed_copy_obeys_the_same_rules_and_sums_what_it_wrote() {
        for past_cache in [false, true] {
            let mut bytes = *b"123456789..........";
            {
                let held = held(&mut bytes);
                let inside = held.enter().unwrap();
                let window = inside.window();
                let summed =
                    |from_at, to_at, len| copy_summed(window, from_at, window, to_at, len, past_cache);
                assert_eq!(summed(0, 10, 9).unwrap(), 0xe306_9283, "RFC 3720's check value");
                assert_eq!(summed(10, 9, 9).unwrap(), 0xe306_9283, "overlapping");
                assert_eq!(summed(0, 11, 9).unwrap_err().kind, ErrorKind::OutOfRange);
                // SAFETY: as in `held`; the test checks that a read-only window is not written.
                let read_only = unsafe { Window::new(held.span().as_ptr(), 4, Protection::ReadOnly) };
                let error = copy_summed(window, 8, read_only, 0, 4, past_cache).unwrap_err();
                assert_eq!(error.kind, ErrorKind::AccessDenied);
            }
            assert_eq!(&bytes[9..18], b"123456789");
        }
    }
}
