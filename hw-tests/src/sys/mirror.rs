//! Memory that is kept the same in two processes: what changes in one is carried to the other.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use te_core::{MemSpan, VolatileSpan};

/// One end of it: the memory, and what both ends last agreed on.
#[derive(Debug)]
pub(crate) struct Mirror {
    span: MemSpan,
    agreed: Vec<u8>,
    seen: Vec<u8>,
}

impl Mirror {
    /// Both ends begin with zeroes: what is there already counts as a change.
    ///
    /// # Safety
    /// `span` stays mapped as long as the value lives, and no reference to its bytes exists.
    pub(crate) unsafe fn new(span: MemSpan) -> Self {
        Self { span, agreed: vec![0; span.len()], seen: vec![0; span.len()] }
    }

    /// What it is made of.
    pub(crate) fn span(&self) -> MemSpan {
        self.span
    }

    /// The other end has begun anew, with zeroes.
    pub(crate) fn forget(&mut self) {
        self.agreed.fill(0);
    }

    /// The bytes that have changed here since both ends agreed; from now on they are agreed. Allocates nothing.
    pub(crate) fn changed(&mut self) -> Option<(usize, &[u8])> {
        // SAFETY: mapped, and nobody holds a reference: the promise of `new`.
        let view = unsafe { VolatileSpan::new(self.span) };
        view.read(0, &mut self.seen).ok()?;
        let first = self.seen.iter().zip(&self.agreed).position(|(seen, agreed)| seen != agreed)?;
        let last = self.seen.iter().zip(&self.agreed).rposition(|(seen, agreed)| seen != agreed)?;
        self.agreed[first..=last].copy_from_slice(&self.seen[first..=last]);
        Some((first, &self.agreed[first..=last]))
    }

    /// Where bytes from the other end are to be put before [`apply`](Self::apply); `None`: not inside.
    pub(crate) fn room(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.agreed.get_mut(range)
    }

    /// Bytes from the other end take effect here.
    pub(crate) fn apply(&mut self, range: Range<usize>) {
        // SAFETY: as in `changed`.
        let view = unsafe { VolatileSpan::new(self.span) };
        if let Some(bytes) = self.agreed.get(range.clone()) {
            // The range lies inside.
            let _ = view.write(range.start as u64, bytes);
        }
    }
}

/// Zeroed memory on page boundaries, to which no reference ever exists.
#[derive(Debug)]
pub(crate) struct Pages {
    span: MemSpan,
    layout: Layout,
}

impl Pages {
    /// `None`: so many bytes do not make sense.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes, 4_096).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Some(Self { span: MemSpan::new(start, bytes), layout })
    }

    /// All of it.
    pub(crate) fn span(&self) -> MemSpan {
        self.span
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.span.as_ptr(), self.layout) };
    }
}
