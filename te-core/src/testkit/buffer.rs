//! Memory under test: registered bytes between two guards, which must not change.
#![allow(
    unsafe_code,
    reason = "allocates raw memory, so that no reference to peer-writable bytes ever exists (L7)"
)]

use alloc::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use alloc::rc::Rc;
use alloc::vec;
use alloc::vec::Vec;

use super::{ByPointer, Pair, PeekPoke, Side, Skip};
use crate::{MemSpan, MemoryKinds, VolatileSpan};

/// The number of bytes of each guard, before and after the registered part.
pub(super) const GUARD_BYTES: usize = 4096;
const GUARD: u8 = 0xA5;

pub(super) struct Buffer {
    whole: MemSpan,
    bytes: usize,
    owned: Option<Layout>,
    access: Rc<dyn PeekPoke>,
}

impl Buffer {
    /// `bytes` to register, in memory that the pair allocates for `side`, or on the heap.
    pub(super) fn new(bytes: usize, pair: &mut dyn Pair, side: Side) -> Self {
        let given = pair.allocate(side, bytes + 2 * GUARD_BYTES);
        Self::within(bytes, given.map(|span| (span, pair.peek_poke())))
    }

    /// `bytes` to register, on the heap.
    pub(super) fn on_heap(bytes: usize) -> Self {
        Self::within(bytes, None)
    }

    fn within(bytes: usize, given: Option<(MemSpan, Rc<dyn PeekPoke>)>) -> Self {
        let whole_bytes = bytes + 2 * GUARD_BYTES;
        let (whole, owned, access) = match given {
            Some((span, access)) => {
                assert!(span.len() >= whole_bytes, "the harness gave {} bytes for {whole_bytes}", span.len());
                (span, None, access)
            }
            None => {
                let Ok(layout) = Layout::from_size_align(whole_bytes, 4096) else {
                    panic!("{whole_bytes} bytes do not fit into the address space")
                };
                // SAFETY: the layout is not empty; it has the guards.
                let ptr = unsafe { alloc_zeroed(layout) };
                if ptr.is_null() {
                    handle_alloc_error(layout);
                }
                (MemSpan::new(ptr, whole_bytes), Some(layout), Rc::new(ByPointer) as _)
            }
        };
        let buffer = Self { whole, bytes, owned, access };
        buffer.raw_write(0, &[GUARD; GUARD_BYTES]);
        buffer.raw_write(GUARD_BYTES + bytes, &[GUARD; GUARD_BYTES]);
        buffer
    }

    /// The span to register.
    pub(super) fn span(&self) -> MemSpan {
        MemSpan::new(self.whole.as_ptr().wrapping_add(GUARD_BYTES), self.bytes).at(self.whole.location())
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.bytes, "the suite reads inside its buffer");
        self.raw_read(GUARD_BYTES + offset, len)
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.bytes, "the suite writes inside its buffer");
        self.raw_write(GUARD_BYTES + offset, bytes);
    }

    pub(super) fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.bytes]);
    }

    pub(super) fn guards_intact(&self) -> bool {
        let intact = |at| self.raw_read(at, GUARD_BYTES).iter().all(|&byte| byte == GUARD);
        intact(0) && intact(GUARD_BYTES + self.bytes)
    }

    fn raw_read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: allocated by us or by the pair, until `self` drops; no reference to the bytes is ever made.
        unsafe { self.access.peek(self.part(at, len), &mut bytes) };
        bytes
    }

    fn raw_write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: as in `raw_read`.
        unsafe { self.access.poke(self.part(at, bytes.len()), bytes) };
    }

    fn part(&self, at: usize, len: usize) -> MemSpan {
        match self.whole.part(at as u64, len as u64) {
            Ok(part) => part,
            Err(error) => panic!("the suite uses bytes outside its buffer: {error}"),
        }
    }

    /// The whole buffer with its guards, as its owner reads and writes it.
    pub(super) fn volatile(&self) -> Result<VolatileSpan<'_>, Skip> {
        match self.whole.location().kind() {
            // SAFETY: mapped until `self` drops, by us or by the harness's promise; no reference to the bytes
            // is ever made.
            MemoryKinds::HOST | MemoryKinds::POOL => Ok(unsafe { VolatileSpan::new(self.whole) }),
            kind => Err(Skip(alloc::format!("the CPU does not touch memory of the kind {kind:?}"))),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(layout) = self.owned {
            // SAFETY: allocated in `new` with this layout; the rig has dropped the transports before its
            // buffers.
            unsafe { dealloc(self.whole.as_ptr(), layout) };
        }
    }
}
