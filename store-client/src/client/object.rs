//! What the ways into a node need beside puts and gets: what an object is, and memory that is lent.

use store_core::message::Get;
use store_core::{ErrorCode, Key, unbound};
use te_engine::SharedRegion;

use super::{Client, one};
use crate::error::StoreError;
use crate::memory::{BufferRange, Held};

/// What the master knows of an object. The bytes are another question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Bytes.
    pub len: u64,
    /// CRC-32C of all bytes.
    pub checksum: u32,
    /// Which put of this key it is from.
    pub generation: u64,
}

impl Client {
    /// What an object is. It is leased as by a get, so that a get that follows at once finds it. `None` is a miss.
    ///
    /// # Errors
    /// An invalid key; a master that cannot be asked.
    pub fn look_up(&mut self, key: &[u8]) -> Result<Option<ObjectInfo>, StoreError> {
        let (_, answers) = self.rpc.call::<Get>(&(), std::iter::once(Key(key)))?;
        let found = one(answers.collect());
        self.note_connection();
        match found {
            Ok(object) => Ok(Some(ObjectInfo {
                len: object.len,
                checksum: unbound(object.checksum, key, object.generation),
                generation: object.generation,
            })),
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady) => Ok(None),
            Err(code) => Err(code.into()),
        }
    }

    /// Allocates registered memory that can be lent to a process on this host.
    pub(crate) fn alloc_lent(&mut self, len: usize) -> Result<SharedRegion, StoreError> {
        self.check_process()?;
        let region = self.fabric.alloc_lent(len)?;
        self.memory.insert(region.id(), Held::Shared(region.clone()));
        Ok(region)
    }

    /// Whether nodes have cut its engine off: whoever holds memory of it connects a new client.
    pub(crate) fn is_expelled(&self) -> bool {
        self.mover.is_expelled()
    }

    /// Whether a fabric may still write to some of the range, on behalf of an operation that is over.
    pub(crate) fn is_held(&mut self, range: BufferRange) -> bool {
        self.mover.settle(&mut self.fabric);
        self.mover.is_quarantined(range)
    }
}
