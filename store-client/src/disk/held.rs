//! The memory that the owner of a disk has lent.

use std::collections::HashMap;
use std::sync::Arc;

use super::request::{DiskEvent, NotDone};
use super::sys::Lent;

/// What memory is lent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// It is written to the disk.
    Source,
    /// It is read into.
    Buffer,
}

/// Memory of a request that was accepted.
struct Held {
    /// What the owner calls the request.
    id: u64,
    memory: Arc<Lent>,
    bytes: u64,
    used: Use,
    /// The owner was told that the request failed, and waits for the memory.
    answered: bool,
}

/// By the number that the core knows as id and token of the request.
#[derive(Default)]
pub(super) struct LentMemory {
    held: HashMap<u64, Held>,
    next: u64,
    /// Bytes of requests that were not answered.
    pub(super) queue_bytes: u64,
    /// Bytes of buffers.
    pub(super) staging_bytes: u64,
}

impl LentMemory {
    /// Takes the memory of a request. Returns its number.
    pub(super) fn hold(&mut self, id: u64, memory: Lent, bytes: u64, used: Use) -> u64 {
        self.next += 1;
        self.queue_bytes += bytes;
        self.staging_bytes += staging(&memory, used);
        self.held.insert(self.next, Held { id, memory: Arc::new(memory), bytes, used, answered: false });
        self.next
    }

    /// A share of the memory, for an operation.
    pub(super) fn share(&self, token: u64) -> Option<Arc<Lent>> {
        self.held.get(&token).map(|held| Arc::clone(&held.memory))
    }

    /// Gives up the memory of a request. `None`: an operation in the kernel has it still.
    pub(super) fn release(&mut self, token: u64) -> Option<Lent> {
        let Held { memory, bytes, used, .. } = self.held.remove(&token)?;
        self.queue_bytes -= bytes;
        self.staging_bytes -= staging(&memory, used);
        Arc::into_inner(memory)
    }

    /// The owner knows that the request has failed. It gets the memory later.
    pub(super) fn answered(&mut self, token: u64) {
        if let Some(held) = self.held.get_mut(&token) {
            held.answered = true;
        }
    }

    /// What the owner calls the request.
    pub(super) fn id_of(&self, token: u64) -> u64 {
        self.held.get(&token).map_or(0, |held| held.id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Ends all requests. Memory that is still used by an operation goes with that operation.
    pub(super) fn close(&mut self) -> impl Iterator<Item = DiskEvent> + use<> {
        let why = NotDone::Closed;
        std::mem::take(&mut self.held).into_values().filter_map(move |held| {
            let (id, memory) = (held.id, Arc::into_inner(held.memory));
            match (held.used, held.answered) {
                (Use::Buffer, true) => memory.map(|buffer| DiskEvent::BufferFree { id, buffer }),
                (Use::Buffer, false) => Some(DiskEvent::ReadFailed { id, why, buffer: memory }),
                (Use::Source, _) => Some(DiskEvent::DemoteFailed { id, why, source: memory }),
            }
        })
    }
}

fn staging(memory: &Lent, used: Use) -> u64 {
    if used == Use::Buffer { memory.span().len() as u64 } else { 0 }
}
