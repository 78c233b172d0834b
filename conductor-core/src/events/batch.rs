//! The events of one payload, in arenas that are used again for the next.

use alloc::vec::Vec;
use core::ops::Range;

use super::{Event, Extra, Removed, Source, Stored};
use crate::{EngineHash, Tier};

/// Entries of an arena that stay allocated. One huge payload does not keep its memory.
const ENTRIES_KEPT_MAX: usize = 1 << 20;

/// The events of one payload, in its order. [`Decoder::decode`](super::Decoder::decode) empties and fills it;
/// its memory grows to that of the largest batch and is then reused, but for that of very large ones.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(super) hashes: Vec<EngineHash>,
    pub(super) tokens: Vec<u32>,
    /// Texts and extra keys.
    pub(super) bytes: Vec<u8>,
    /// Of each event with extra keys: where those of each block end, from the event's first byte of them.
    pub(super) ends: Vec<u32>,
    pub(super) records: Vec<Record>,
    pub(super) published: f64,
    pub(super) dp_rank: Option<u32>,
}

/// A part of an arena. Payloads are shorter than 4 GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) start: u32,
    pub(super) end: u32,
}

impl Part {
    pub(super) fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    pub(super) const fn len(self) -> u32 {
        self.end - self.start
    }

    /// From a position to the end. The decoder refuses payloads for which they would not fit.
    #[allow(clippy::cast_possible_truncation, reason = "no arena has more entries than a payload has bytes")]
    pub(super) const fn behind(start: usize, end: usize) -> Self {
        Self { start: start as u32, end: end as u32 }
    }
}

/// How full the arenas are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    hashes: usize,
    tokens: usize,
    bytes: usize,
    ends: usize,
}

impl Mark {
    pub(super) fn of(batch: &Batch) -> Self {
        Self {
            hashes: batch.hashes.len(),
            tokens: batch.tokens.len(),
            bytes: batch.bytes.len(),
            ends: batch.ends.len(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Stored,
    Removed,
    Cleared,
}

/// An event, as parts of the arenas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) kind: Kind,
    pub(super) tier: Tier,
    pub(super) block_tokens: u32,
    pub(super) hashes: Part,
    pub(super) tokens: Part,
    pub(super) ends: Part,
    pub(super) extra: Part,
    pub(super) parent: Option<EngineHash>,
    pub(super) group: Option<u32>,
    pub(super) looks_ahead: bool,
    pub(super) lora: Option<Part>,
    pub(super) salt: Option<Part>,
    pub(super) source: SourceParts,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SourceParts {
    pub(super) event_id: Option<u64>,
    pub(super) backend: Option<Part>,
    pub(super) tenant: Option<Part>,
    pub(super) model: Option<Part>,
    pub(super) object: Option<Part>,
    pub(super) medium: Option<Part>,
    pub(super) dp_rank: Option<u32>,
    pub(super) base_block: Option<u32>,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The events, in their order.
    pub fn events(&self) -> impl ExactSizeIterator<Item = Event<'_>> {
        self.records.iter().map(|record| self.event(record))
    }

    /// How many events there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there is no event.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// When the publisher made the batch: seconds since 1970 by its clock (milliseconds in Mooncake's).
    #[must_use]
    pub const fn published(&self) -> f64 {
        self.published
    }

    /// The data-parallel rank of the publisher, if it says so.
    #[must_use]
    pub const fn dp_rank(&self) -> Option<u32> {
        self.dp_rank
    }

    pub(super) fn clear(&mut self) {
        empty(&mut self.hashes);
        empty(&mut self.tokens);
        empty(&mut self.bytes);
        empty(&mut self.ends);
        empty(&mut self.records);
        self.published = 0.0;
        self.dp_rank = None;
    }

    /// Takes away what came behind `mark`.
    pub(super) fn truncate(&mut self, mark: Mark) {
        self.hashes.truncate(mark.hashes);
        self.tokens.truncate(mark.tokens);
        self.bytes.truncate(mark.bytes);
        self.ends.truncate(mark.ends);
    }

    fn event(&self, record: &Record) -> Event<'_> {
        let source = self.source(&record.source);
        let hashes = &self.hashes[record.hashes.range()];
        match record.kind {
            Kind::Cleared => Event::Cleared(source),
            Kind::Removed => {
                Event::Removed(Removed { hashes, tier: record.tier, group: record.group, source })
            }
            Kind::Stored => Event::Stored(Stored {
                hashes,
                parent: record.parent,
                tokens: &self.tokens[record.tokens.range()],
                block_tokens: record.block_tokens,
                lora: self.text(record.lora),
                salt: self.text(record.salt),
                extra: Extra {
                    ends: &self.ends[record.ends.range()],
                    bytes: &self.bytes[record.extra.range()],
                    looks_ahead: record.looks_ahead,
                },
                tier: record.tier,
                group: record.group,
                source,
            }),
        }
    }

    fn source(&self, parts: &SourceParts) -> Source<'_> {
        Source {
            event_id: parts.event_id,
            backend: self.text(parts.backend),
            tenant: self.text(parts.tenant),
            model: self.text(parts.model),
            medium: self.text(parts.medium),
            dp_rank: parts.dp_rank,
            object: self.text(parts.object),
            base_block: parts.base_block,
        }
    }

    /// A text of the arena. It was checked to be UTF-8 when it was read.
    fn text(&self, part: Option<Part>) -> Option<&str> {
        part.map(|part| core::str::from_utf8(&self.bytes[part.range()]).unwrap_or_default())
    }
}

fn empty<T>(arena: &mut Vec<T>) {
    arena.clear();
    arena.shrink_to(ENTRIES_KEPT_MAX);
}
