//! [`Memory`]: the bytes of one lease, in the pool or in the arena of the node on this machine.

use store_client::LocalBuffer;

use crate::pool::Block;

/// The bytes of an object that was read. They belong to the lease alone, until it is dropped.
pub(crate) struct Memory {
    place: Place,
    len: usize,
}

/// Where the bytes are.
pub(crate) enum Place {
    Block(Block),
    Arena(LocalBuffer),
}

impl Memory {
    /// The first `len` bytes of a place.
    pub(crate) const fn new(place: Place, len: usize) -> Self {
        Self { place, len }
    }

    /// Address of the first byte. It is valid as long as this value lives.
    pub(crate) fn addr(&self) -> *mut u8 {
        match &self.place {
            Place::Block(block) => block.addr() as *mut u8,
            Place::Arena(buffer) => buffer.span().as_ptr(),
        }
    }

    /// Length of the object, or of the part that was read, bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }
}
