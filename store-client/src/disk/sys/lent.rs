//! Memory that a caller lends to a disk.

use std::any::Any;
use std::fmt;

use te_core::{Location, MemSpan};

use super::AlignedBuffer;

/// Memory that belongs to the disk from a request until its answer, which returns it.
///
/// It consists of an address and an *owner*: whatever keeps the memory mapped. The owner is kept until
/// nothing touches the memory any more: if the disk does not answer, and even if the disk is closed
/// meanwhile, until the kernel has ended the last operation on it.
pub struct Lent {
    span: MemSpan,
    owner: Box<dyn Any + Send + Sync>,
}

impl Lent {
    /// Lends a buffer, which is moved in and comes back with [`Self::into_buffer`].
    #[must_use]
    pub fn buffer(buffer: AlignedBuffer) -> Self {
        Self { span: buffer.span(), owner: Box::new(buffer) }
    }

    /// Lends memory by address.
    ///
    /// Beyond safety: the source of a demotion must not change until the answer, else wrong bytes are
    /// written, which every reader will find out by their checksum. The content of a buffer for reads is
    /// undefined until the answer.
    ///
    /// # Safety
    /// `span` is host memory. Until `owner` is dropped it is mapped and can be read; where it is given to
    /// [`stage`](crate::disk::DiskService::stage), it can be written as well, and no reference to it exists
    /// until it comes back.
    #[must_use]
    pub unsafe fn new(span: MemSpan, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { span, owner }
    }

    /// Where the memory is.
    #[must_use]
    pub const fn span(&self) -> MemSpan {
        self.span
    }

    /// Gives the owner back.
    #[must_use]
    pub fn into_owner(self) -> Box<dyn Any + Send + Sync> {
        self.owner
    }

    /// Gives the buffer back that was lent with [`Self::buffer`]; `None` if it was other memory.
    #[must_use]
    pub fn into_buffer(self) -> Option<AlignedBuffer> {
        self.owner.downcast().ok().map(|buffer| *buffer)
    }

    /// Whether `bytes` bytes can be read or written by the kernel.
    pub(in crate::disk) fn holds(&self, bytes: u64) -> bool {
        self.span.location() == Location::Host && self.span.contains(0, bytes)
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("bytes", &self.span.len()).finish_non_exhaustive()
    }
}
