//! Memory that is kept equal in two processes: changes in one are copied to the other.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use te_core::{MemSpan, VolatileSpan};

/// One of the two copies: the memory, and the content on which both last agreed.
#[derive(Debug)]
pub(crate) struct Mirror {
    span: MemSpan,
    agreed: Vec<u8>,
    seen: Vec<u8>,
}

impl Mirror {
    /// A mirror of `span`. Both ends begin with zeroes: present bytes that are not zero count as a change.
    ///
    /// # Safety
    /// `span` stays mapped as long as the value lives, and no reference to its bytes exists.
    pub(crate) unsafe fn new(span: MemSpan) -> Self {
        Self { span, agreed: vec![0; span.len()], seen: vec![0; span.len()] }
    }

    /// The memory.
    pub(crate) fn span(&self) -> MemSpan {
        self.span
    }

    /// Begins again with zeroes: the other end is new.
    pub(crate) fn forget(&mut self) {
        self.agreed.fill(0);
    }

    /// The bytes that have changed here since both ends agreed, with their offset; they count as agreed from
    /// now on. Does not allocate.
    pub(crate) fn changed(&mut self) -> Option<(usize, &[u8])> {
        // SAFETY: the span is mapped and no reference to it exists: the contract of `new`.
        let view = unsafe { VolatileSpan::new(self.span) };
        view.read(0, &mut self.seen).ok()?;
        let first = self.seen.iter().zip(&self.agreed).position(|(seen, agreed)| seen != agreed)?;
        let last = self.seen.iter().zip(&self.agreed).rposition(|(seen, agreed)| seen != agreed)?;
        self.agreed[first..=last].copy_from_slice(&self.seen[first..=last]);
        Some((first, &self.agreed[first..=last]))
    }

    /// The buffer for bytes from the other end, to be filled before [`apply`](Self::apply); `None` if the
    /// range does not lie inside the memory.
    pub(crate) fn room(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.agreed.get_mut(range)
    }

    /// Copies bytes from the other end, which are in [`room`](Self::room), to the memory.
    pub(crate) fn apply(&mut self, range: Range<usize>) {
        // SAFETY: as in `changed`.
        let view = unsafe { VolatileSpan::new(self.span) };
        if let Some(bytes) = self.agreed.get(range.clone()) {
            // Cannot fail: the range lies inside.
            let _ = view.write(range.start as u64, bytes);
        }
    }
}

/// Zeroed, page-aligned memory to which no reference ever exists.
#[derive(Debug)]
pub(crate) struct Pages {
    span: MemSpan,
    layout: Layout,
}

impl Pages {
    /// Allocates; `None` if `bytes` is zero or longer than an allocation may be.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes, 4_096).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Some(Self { span: MemSpan::new(start, bytes), layout })
    }

    /// The whole memory.
    pub(crate) fn span(&self) -> MemSpan {
        self.span
    }

    /// Copies bytes to its beginning, as far as there is room.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        // SAFETY: the memory lives as long as `self`, and no reference to it exists.
        let view = unsafe { VolatileSpan::new(self.span) };
        // Cannot fail: the length fits.
        let _ = view.write(0, &bytes[..bytes.len().min(self.span.len())]);
    }

    /// Copies its first `len` bytes, or all of them.
    pub(crate) fn read(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.min(self.span.len())];
        // SAFETY: as in `write`.
        let view = unsafe { VolatileSpan::new(self.span) };
        // Cannot fail: the length fits.
        let _ = view.read(0, &mut bytes);
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.span.as_ptr(), self.layout) };
    }
}
