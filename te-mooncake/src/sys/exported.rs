//! A range of memory that peers may read or write, and its end.

use te_core::{Access, MemSpan};
use te_host::Gate;

use super::memory::Memory;

/// An exported range. Each access takes a guard for the time of one system call that does not block; after
/// the range was revoked there are no more guards.
#[derive(Debug)]
pub(crate) struct ExportedRange {
    span: MemSpan,
    access: Access,
    gate: Gate,
}

impl ExportedRange {
    /// # Safety
    /// `span` is host memory, and the promise of [`te_core::Memory::register`] holds for it until
    /// [`revoke`](Self::revoke) has returned true.
    pub(crate) unsafe fn new(span: MemSpan, access: Access) -> Self {
        Self { span, access, gate: Gate::default() }
    }

    /// The first address.
    pub(crate) fn addr(&self) -> u64 {
        self.span.as_ptr().addr() as u64
    }

    /// The length, in bytes.
    pub(crate) const fn len(&self) -> u64 {
        self.span.len() as u64
    }

    /// What peers may do.
    pub(crate) const fn access(&self) -> Access {
        self.access
    }

    /// Calls `io` with at most `len_max` bytes from `offset` on. `None`: the range was revoked, and `io` was
    /// not called.
    pub(crate) fn access_part<T>(
        &self,
        offset: u64,
        len_max: u64,
        io: impl FnOnce(Memory) -> T,
    ) -> Option<T> {
        let _inside = self.gate.enter()?;
        // SAFETY: host memory whose promise holds while `_inside` keeps `revoke` from returning true (`new`).
        // `io` gets the memory for the time of the call; the callers in this crate do not keep it.
        let memory = unsafe { Memory::new(self.span) };
        Some(io(memory.from(offset, len_max)))
    }

    /// Gives out no more guards. Returns true when there is none: the memory is no longer accessed.
    pub(crate) fn revoke(&self) -> bool {
        self.gate.shut()
    }

    /// Whether it was revoked.
    pub(crate) fn is_revoked(&self) -> bool {
        self.gate.is_shut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revoked_range_is_not_accessed_and_one_in_use_is_not_revoked_yet() {
        let mut bytes = [0_u8; 8];
        // SAFETY: the bytes outlive the range and are not referred to meanwhile.
        let range = unsafe { ExportedRange::new(MemSpan::new(bytes.as_mut_ptr(), 8), Access::REMOTE_READ) };
        assert_eq!(range.access_part(3, 9, Memory::len), Some(5));
        assert_eq!(range.access_part(0, 9, |_| range.revoke()), Some(false), "it is in use");
        assert!(range.is_revoked() && range.revoke());
        assert_eq!(range.access_part(0, 9, Memory::len), None);
    }
}
