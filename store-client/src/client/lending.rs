//! Plain memory of the caller's, registered for the length of one operation.
//!
//! Where every rail moves bytes in our own calls ([`Fabric::is_inline`](crate::fabric::Fabric::is_inline)), registering costs
//! about as much as copying a few KiB, and what is cancelled is let go of at once. So long values go straight from or to where
//! they are. Over other rails, which pin memory or go on by themselves, plain bytes pass through the bounce buffer.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use te_engine::RegisterError;

use super::Client;
use crate::memory::{BufferRange, Held};
use crate::mover::Buffers;
use crate::sys;

/// Values that are shorter than this are copied.
const LENT_BYTES_MIN: usize = 32 << 10;

/// A client, and memory that is registered with it until this is dropped.
pub(super) struct Lending<'c, 'b> {
    client: &'c mut Client,
    _borrowed: PhantomData<&'b mut [u8]>,
}

impl<'c, 'b> Lending<'c, 'b> {
    /// Registers what is worth it of the `items` of an operation that the mover has [begun](crate::mover::Mover::begin).
    pub(super) fn new(client: &'c mut Client, items: usize, buffers: &mut Buffers<'b>) -> Self {
        let this = Self { client, _borrowed: PhantomData };
        if !this.client.fabric.is_inline() {
            return this;
        }
        for item in 0..items {
            let Some((span, access)) = buffers.plain(item).filter(|(span, _)| span.len() >= LENT_BYTES_MIN)
            else {
                continue;
            };
            #[allow(unsafe_code, reason = "registers what is borrowed for longer than this lives")]
            // SAFETY: `buffers` borrows the memory for 'b, which outlives this, and dropping this unregisters it. Until then the
            // mover looks at the range it is given here, not at `buffers`.
            let registered = unsafe { sys::lend(&mut this.client.fabric, span, access) };
            // Memory that overlaps what is registered already, say. It is copied.
            let Ok(region) = registered else { continue };
            // First of all, since this is what is taken back from.
            this.client.mover.lend(item, BufferRange { region, offset: 0, len: span.len() as u64 });
            this.client.memory.insert(region, Held::Raw(span));
        }
        this
    }
}

impl Drop for Lending<'_, '_> {
    fn drop(&mut self) {
        let client = &mut *self.client;
        let mut abandoned = false;
        while let Some(BufferRange { region, .. }) = client.mover.take_back() {
            client.memory.remove(region);
            loop {
                match client.fabric.unregister(region) {
                    Ok(()) | Err(RegisterError::NotFound) => break,
                    Err(RegisterError::Busy { .. }) => {
                        // Only a panic leaves something under way.
                        if !std::mem::replace(&mut abandoned, true) {
                            client.mover.abandon(&mut client.fabric);
                        }
                        client.fabric.poll();
                    }
                    Err(error) => {
                        // To go on would leave a fabric with memory that is about to be somebody else's.
                        log::error!("borrowed memory cannot be unregistered: {error}");
                        std::process::abort();
                    }
                }
            }
        }
    }
}

impl Deref for Lending<'_, '_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.client
    }
}

impl DerefMut for Lending<'_, '_> {
    fn deref_mut(&mut self) -> &mut Client {
        self.client
    }
}
