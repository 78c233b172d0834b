//! The client's side of the arena: which buffers use which parts of it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use store_core::allocator::{Allocator as _, Block, OffsetAllocator};
use te_core::MemSpan;
use te_host::BorrowedMemory;
use te_host::fork::Mark;

use super::protocol::Span;
use crate::error::StoreError;

/// Memory that the node shares with one connection.
#[derive(Debug)]
pub(super) struct Arena {
    memory: BorrowedMemory,
    rows: Mutex<Rows>,
    /// Identifies the process that the arena was shared with. A forked child has the mapping, but must not
    /// use it.
    mark: Mark,
}

#[derive(Debug)]
struct Rows {
    allocator: OffsetAllocator,
    /// Parts whose buffer was dropped while the node might still write them. They are not handed out again
    /// before the node reports that they have settled.
    held: Vec<(Block, Span)>,
}

impl Arena {
    pub(super) fn new(memory: BorrowedMemory) -> Self {
        let allocator = OffsetAllocator::new(memory.span().len() as u64);
        Self { memory, rows: Mutex::new(Rows { allocator, held: Vec::new() }), mark: Mark::new() }
    }

    pub(super) fn len(&self) -> u64 {
        self.memory.span().len() as u64
    }

    /// Whether this process is a fork of the process that the arena was shared with.
    pub(super) fn is_forked(&self) -> bool {
        self.mark.is_forked()
    }

    pub(super) fn alloc(self: &Arc<Self>, len: u64) -> Result<LocalBuffer, StoreError> {
        if self.is_forked() {
            return Err(StoreError::Forked);
        }
        let mut rows = self.rows();
        match rows.allocator.allocate(len.max(1), 0) {
            Some((block, offset)) => {
                let arena = Arc::clone(self);
                Ok(LocalBuffer {
                    arena,
                    block,
                    span: Span { offset, len },
                    held: AtomicBool::new(false),
                    asked: AtomicBool::new(false),
                })
            }
            None => Err(StoreError::ArenaFull {
                wanted: len,
                largest_free: rows.allocator.largest_free(),
                arena_bytes: self.len(),
            }),
        }
    }

    /// Allocates `wanted` bytes, or the longest free part if that is shorter.
    pub(super) fn alloc_up_to(self: &Arc<Self>, wanted: u64) -> Result<LocalBuffer, StoreError> {
        let largest_free = self.rows().allocator.largest_free();
        self.alloc(wanted.min(largest_free.max(1)))
    }

    /// Parts without a buffer that may still be written.
    pub(super) fn held(&self) -> Vec<Span> {
        self.rows().held.iter().map(|&(_, span)| span).collect()
    }

    /// Frees these held parts: the node reports that nothing writes them any more.
    pub(super) fn settled(&self, spans: &[Span]) {
        let mut rows = self.rows();
        let Rows { allocator, held } = &mut *rows;
        held.retain(|(block, span)| {
            let over = spans.contains(span);
            if over {
                allocator.free(*block);
            }
            !over
        });
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of a local client's arena. The node copies objects from and into it directly and can write it at
/// any time, so its bytes are copied in and out and never borrowed (L7). Dropping the buffer frees the part.
/// The buffer may outlive its client.
pub struct LocalBuffer {
    arena: Arc<Arena>,
    block: Block,
    span: Span,
    /// Whether the node may still write the buffer for an operation that is over.
    held: AtomicBool,
    /// Whether a put from the buffer got no answer: the node may still carry it out, with the contents that
    /// the buffer has then. This never ends, because the connection is gone.
    asked: AtomicBool,
}

/// A range of a [`LocalBuffer`].
#[derive(Clone, Copy, Debug)]
pub struct LocalRange<'a> {
    pub(super) buffer: &'a LocalBuffer,
    /// Offset in the buffer, bytes.
    pub(super) offset: u64,
    /// Length, bytes.
    pub(super) len: u64,
}

impl LocalBuffer {
    /// Length, bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.span.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.span.len == 0
    }

    /// The whole buffer.
    #[must_use]
    pub const fn all(&self) -> LocalRange<'_> {
        LocalRange { buffer: self, offset: 0, len: self.span.len }
    }

    /// `len` bytes at `offset`. A range that does not lie inside the buffer is refused where it is used.
    #[must_use]
    pub const fn part(&self, offset: u64, len: u64) -> LocalRange<'_> {
        LocalRange { buffer: self, offset, len }
    }

    /// Copies bytes out of the buffer.
    ///
    /// # Errors
    /// `Unregistered` when the range does not lie inside the buffer; `Held` while the node may still write
    /// the buffer. Nothing was copied then.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), StoreError> {
        let len = out.len() as u64;
        let at = self.at(offset, len)?;
        self.arena.memory.view().read(at, out).map_err(|_| StoreError::Unregistered { offset, len })
    }

    /// Copies bytes into the buffer.
    ///
    /// # Errors
    /// As [`read`](Self::read). After a put from the buffer that got no answer, always `Held`: the node may
    /// still carry the put out, and would store the bytes that are written here.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if self.asked.load(Ordering::Acquire) {
            return Err(StoreError::Held);
        }
        let len = bytes.len() as u64;
        let at = self.at(offset, len)?;
        self.arena.memory.view().write(at, bytes).map_err(|_| StoreError::Unregistered { offset, len })
    }

    /// A copy of the whole buffer.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn to_vec(&self) -> Result<Vec<u8>, StoreError> {
        let mut bytes = vec![0; self.span.len as usize];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// The address of the buffer. It stays mapped as long as the buffer lives. After a put from the buffer
    /// that got no answer, do not write there: the node may still carry the put out, and would store the
    /// bytes that it finds.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        let whole = self.arena.memory.span();
        MemSpan::new(whole.as_ptr().wrapping_add(self.span.offset as usize), self.span.len as usize)
    }

    pub(super) fn is_of(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    pub(super) fn set_held(&self, held: bool) {
        self.held.store(held, Ordering::Release);
    }

    /// Records that a put from the buffer got no answer.
    pub(super) fn set_asked(&self) {
        self.asked.store(true, Ordering::Release);
    }

    pub(super) const fn in_arena(&self) -> Span {
        self.span
    }

    /// Shortens the buffer to its first `len` bytes.
    pub(super) fn truncate(&mut self, len: u64) {
        self.span.len = self.span.len.min(len);
    }

    fn at(&self, offset: u64, len: u64) -> Result<u64, StoreError> {
        if self.arena.is_forked() {
            return Err(StoreError::Forked);
        }
        if self.is_held() {
            return Err(StoreError::Held);
        }
        self.all().sub(offset, len).ok_or(StoreError::Unregistered { offset, len })
    }
}

impl LocalRange<'_> {
    /// Length, bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The range as requests name it.
    ///
    /// # Errors
    /// `Unregistered` when the range does not lie inside its buffer.
    pub(super) fn named(&self) -> Result<Span, StoreError> {
        self.in_arena().ok_or(StoreError::Unregistered { offset: self.offset, len: self.len })
    }

    /// Offset in the arena of `len` bytes at `offset` of the range; `None` when they do not lie inside the
    /// range.
    fn sub(&self, offset: u64, len: u64) -> Option<u64> {
        (offset.checked_add(len)? <= self.len).then_some(self.buffer.span.offset + self.offset + offset)
    }

    /// The range as requests name it; `None` when it does not lie inside its buffer.
    fn in_arena(&self) -> Option<Span> {
        let inside = self.offset.checked_add(self.len)? <= self.buffer.span.len;
        inside.then_some(Span { offset: self.buffer.span.offset + self.offset, len: self.len })
    }
}

impl Drop for LocalBuffer {
    fn drop(&mut self) {
        if self.arena.mark.is_forked() {
            return;
        }
        let mut rows = self.arena.rows();
        if self.held.load(Ordering::Acquire) {
            rows.held.push((self.block, self.span));
        } else {
            rows.allocator.free(self.block);
        }
    }
}

impl fmt::Debug for LocalBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBuffer")
            .field("offset", &self.span.offset)
            .field("len", &self.span.len)
            .field("held", &self.is_held())
            .finish()
    }
}
