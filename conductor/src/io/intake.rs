//! Messages of a publisher that are decoded and wait to be applied. Decoding needs no lock, so that turns to
//! write are short, and queries come between them.

use conductor_core::events::{Batch, BatchError, Decoded, Decoder};
use conductor_core::knowledge::{PublisherId, is_readable};

use crate::shared::Shared;

/// Messages that wait at most.
const MESSAGES_MAX: usize = 64;
/// Bytes of these, beyond which they are applied, and their memory is not kept.
const BYTES_MAX: usize = 1 << 20;

/// Messages of one publisher. Their memory is used again.
#[derive(Debug, Default)]
pub(super) struct Intake {
    /// As many as ever waited.
    batches: Vec<Batch>,
    decoded: Vec<Result<Decoded, BatchError>>,
    bytes: usize,
}

impl Intake {
    /// Decodes a message, which waits behind the others. Returns whether it could be read.
    pub(super) fn decode(&mut self, decoder: &mut Decoder, payload: &[u8]) -> bool {
        let at = self.decoded.len();
        if self.batches.len() == at {
            self.batches.push(Batch::new());
        }
        let decoded = decoder.decode(payload, &mut self.batches[at]);
        let readable = is_readable(&decoded);
        if !readable {
            // When it is applied, everything that the publisher said is forgotten.
            decoder.restart();
        }
        self.decoded.push(decoded);
        self.bytes += payload.len();
        readable
    }

    /// The events of the message that was decoded last.
    ///
    /// # Panics
    /// Nothing waits.
    pub(super) fn latest(&self) -> &Batch {
        &self.batches[self.decoded.len() - 1]
    }

    /// Whether what waits is to be applied before more is decoded.
    pub(super) fn is_full(&self) -> bool {
        self.decoded.len() >= MESSAGES_MAX || self.bytes >= BYTES_MAX
    }

    /// Applies what waits, in a turn to write that ends when a reader waits.
    pub(super) fn apply(&mut self, shared: &Shared, id: PublisherId) {
        let mut turn = None;
        for (decoded, batch) in self.decoded.drain(..).zip(&self.batches) {
            if shared.knowledge.is_wanted() {
                turn = None;
            }
            turn.get_or_insert_with(|| shared.knowledge.write()).apply_decoded(id, &decoded, batch);
        }
        drop(turn);
        if std::mem::take(&mut self.bytes) > BYTES_MAX {
            self.batches.clear();
        }
    }
}
