//! Events of engines and stores: which blocks they stored, removed and cleared.
//!
//! ```text
//!   payload of a frame ──▶ Decoder ──▶ Batch ──▶ Event::{Stored, Removed, Cleared}
//!   (msgpack, by dialect)     │          └── arenas that are reused: no allocation per event
//!                             └── Decoded: what was skipped, and whether removals may be lost
//! ```
//!
//! One event that cannot be read is skipped and counted; the rest of its batch is used. The [`encode`] module
//! writes what the [`Decoder`] reads.

mod batch;
mod decode;
pub mod encode;
mod event;
mod load;
mod media;
mod msgpack;
mod object;

pub use batch::Batch;
pub use decode::{BatchError, Decoded, Decoder, Limits, Skipped};
pub use load::{LoadStat, NotALoad, decode_load};
pub use object::{ObjectKey, ObjectLayout};

use crate::{EngineHash, Tier};

/// Who speaks. The layouts are told apart by their content; the dialect decides what names mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM, any release with events: arrays until 0.23, maps since.
    Vllm,
    /// `SGLang`: arrays until 0.5.18, maps in 0.5.20 and since.
    Sglang,
    /// Mooncake's store (`kv_event_publisher.cpp`), and every other publisher of the events of RFC 1527.
    Mooncake,
}

/// One event. It borrows from its [`Batch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// Blocks are now kept.
    Stored(Stored<'a>),
    /// Blocks are no longer kept.
    Removed(Removed<'a>),
    /// Nothing is kept any more.
    Cleared(Source<'a>),
}

/// Consecutive blocks of one prompt that are now kept on a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored<'a> {
    /// The engine's hash of each block, in the prompt's order. At least one.
    pub hashes: &'a [EngineHash],
    /// The hash of the block before the first; `None` if that is the first of its prompt.
    pub parent: Option<EngineHash>,
    /// The tokens of all blocks: `hashes.len() * block_tokens`, or none at all if the publisher has only
    /// hashes.
    pub tokens: &'a [u32],
    /// Tokens per block; 0 without tokens.
    pub block_tokens: u32,
    /// The LoRA adapter's name.
    pub lora: Option<&'a str>,
    /// What separates this prompt's blocks from those of other prompts with equal tokens. Engines that chain
    /// it say it with the first block only (`parent` is `None`).
    pub salt: Option<&'a str>,
    /// What else decides the content of each block.
    pub extra: Extra<'a>,
    /// Where the blocks are kept.
    pub tier: Tier,
    /// The attention group of a hybrid model; `None` for models that have one. Groups that do not keep a
    /// whole prefix (sliding windows, state space models, encoders) never appear.
    pub group: Option<u32>,
    /// Where the event came from, if it says so.
    pub source: Source<'a>,
}

/// Blocks that are no longer kept on a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed<'a> {
    /// The engine's hashes. At least one.
    pub hashes: &'a [EngineHash],
    /// Where the blocks were kept.
    pub tier: Tier,
    /// The attention group, as in [`Stored::group`].
    pub group: Option<u32>,
    /// Where the event came from, if it says so.
    pub source: Source<'a>,
}

/// What standard events and those of a store say of themselves. Engines say nothing: all fields are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Source<'a> {
    /// The event's number in its stream.
    pub event_id: Option<u64>,
    /// Whose cache it is: a worker or a store (`backend_id`).
    pub backend: Option<&'a str>,
    /// The tenant (`tenant_id`).
    pub tenant: Option<&'a str>,
    /// The model (`model_name`).
    pub model: Option<&'a str>,
    /// The medium in the publisher's words. Several media of a store are one [`Tier::Store`], and an object
    /// may be on more than one of them.
    pub medium: Option<&'a str>,
    /// The data-parallel rank of this event; that of the batch is [`Batch::dp_rank`].
    pub dp_rank: Option<u32>,
    /// The object's key in the store; [`ObjectKey::parse`] reads it. Such an event has one hash: that in the
    /// key.
    pub object: Option<&'a str>,
    /// How many blocks are in front of the first of this event (`base_block_idx`).
    pub base_block: Option<u32>,
}

/// Per block, what decides its content besides tokens, adapter and salt: images by identifier and offset,
/// embeddings by digest. The bytes are those of the event (msgpack values, one after the other), so equal
/// content has equal bytes within one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extra<'a> {
    /// Where each block's bytes end in `bytes`. Empty if no block has any.
    ends: &'a [u32],
    bytes: &'a [u8],
    looks_ahead: bool,
}

impl<'a> Extra<'a> {
    /// Without extra keys, of an engine that [looks ahead](Self::looks_ahead).
    #[must_use]
    pub const fn ahead() -> Self {
        Self { ends: &[], bytes: &[], looks_ahead: true }
    }

    /// Whether the token behind a block decides its content, too, as with a drafter (EAGLE, MTP). Which one
    /// it is, is not part of the event's blocks.
    #[must_use]
    pub const fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    /// The bytes of a block, counted from the event's first; empty if it has none.
    #[must_use]
    pub fn of(&self, block: usize) -> &'a [u8] {
        let Some(&end) = self.ends.get(block) else { return &[] };
        let start = if block == 0 { 0 } else { self.ends[block - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Whether no block has any.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[cfg(test)]
mod tests;
