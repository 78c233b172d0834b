//! From a payload to a [`Batch`].

use core::fmt;

use super::batch::{Batch, Kind};
use super::event::{Draft, Groups, Skip};
use super::msgpack::{Fault, Int, Reader};
use super::{Dialect, batch};

/// Decodes the payloads of one publisher. It remembers which attention groups of a hybrid model keep whole
/// prefixes: events that remove blocks say the number of the group only.
#[derive(Clone, Debug)]
pub struct Decoder {
    dialect: Dialect,
    limits: Limits,
    groups: Groups,
}

/// What a payload may have at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a payload. At most 1 GiB has an effect.
    pub payload_bytes_max: usize,
    /// Events per payload.
    pub events_max: usize,
    /// Blocks per event.
    pub blocks_max: usize,
    /// Tokens per block.
    pub block_tokens_max: u32,
    /// Bytes of a name, a salt or a key.
    pub text_bytes_max: usize,
    /// Bytes of the extra keys of a block.
    pub extra_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            payload_bytes_max: 16 << 20,
            events_max: 1 << 18,
            blocks_max: 1 << 18,
            block_tokens_max: 1 << 16,
            text_bytes_max: 4096,
            extra_bytes_max: 1 << 16,
        }
    }
}

/// What became of a payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Events that are in the batch.
    pub events: u32,
    /// Events that are not.
    pub skipped: Skipped,
    /// Whether an event that may have removed blocks could not be read. The publisher may then keep less than
    /// its events say: who relies on them has to forget what it knows of this publisher.
    pub removals_lost: bool,
}

/// Events that were skipped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// A field has another type than it should, or is missing.
    pub malformed: u32,
    /// The payload ends within an event. Counts 1, however many events were to follow.
    pub truncated: u32,
    /// A kind of event that is not known. It is taken to remove nothing.
    pub unknown_event: u32,
    /// A medium that is not known, or an object key of another layout.
    pub unknown_medium: u32,
    /// An attention group that does not keep whole prefixes. This is usual with hybrid models.
    pub other_group: u32,
    /// More than [`Limits`] allow.
    pub too_large: u32,
    /// The numbers of hashes, tokens and extra keys do not belong together.
    pub mismatch: u32,
    /// No hash at all.
    pub empty: u32,
    /// An object key without a hash of a known layout.
    pub unknown_object: u32,
}

impl Skipped {
    /// Every reason with its count, by the name that metrics use.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u32); 9] {
        [
            ("malformed", self.malformed),
            ("truncated", self.truncated),
            ("unknown_event", self.unknown_event),
            ("unknown_medium", self.unknown_medium),
            ("other_group", self.other_group),
            ("too_large", self.too_large),
            ("mismatch", self.mismatch),
            ("empty", self.empty),
            ("unknown_object", self.unknown_object),
        ]
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }

    fn count(&mut self, skip: Skip) {
        *match skip {
            Skip::Malformed => &mut self.malformed,
            Skip::Truncated => &mut self.truncated,
            Skip::UnknownEvent => &mut self.unknown_event,
            Skip::UnknownMedium => &mut self.unknown_medium,
            Skip::OtherGroup => &mut self.other_group,
            Skip::TooLarge => &mut self.too_large,
            Skip::Mismatch => &mut self.mismatch,
            Skip::Empty => &mut self.empty,
            Skip::UnknownObject => &mut self.unknown_object,
        } += 1;
    }
}

/// Why a whole payload cannot be used. What the publisher keeps is then unknown, as after
/// [`Decoded::removals_lost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchError {
    /// More bytes than [`Limits::payload_bytes_max`].
    TooLong {
        /// Bytes of the payload.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// More events than [`Limits::events_max`].
    TooMany {
        /// Events, as the payload says.
        events: usize,
        /// The limit.
        events_max: usize,
    },
    /// Neither `[time, [events], rank]` nor a map with these.
    NotABatch,
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { bytes, bytes_max } => write!(
                f,
                "a batch of events has {bytes} bytes, the limit is {bytes_max}: let the publisher send \
                 smaller batches, or raise payload_bytes_max"
            ),
            Self::TooMany { events, events_max } => write!(
                f,
                "a batch has {events} events, the limit is {events_max}: let the publisher send smaller \
                 batches, or raise events_max"
            ),
            Self::NotABatch => f.write_str(
                "the payload is not a batch of events ([time, [events], rank] in msgpack): check that the \
                 endpoint is that of a publisher of KV events",
            ),
        }
    }
}

impl core::error::Error for BatchError {}

impl Decoder {
    /// A decoder with the usual limits.
    #[must_use]
    pub fn new(dialect: Dialect) -> Self {
        Self::with_limits(dialect, Limits::default())
    }

    /// A decoder with these limits.
    #[must_use]
    pub fn with_limits(dialect: Dialect, limits: Limits) -> Self {
        Self { dialect, limits, groups: Groups::default() }
    }

    /// The dialect.
    #[must_use]
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Forgets what was learnt of attention groups: the publisher is a new process.
    pub fn restart(&mut self) {
        self.groups = Groups::default();
    }

    /// Replaces the content of `into` by the events of `payload`, the third frame of a message. Payloads are
    /// to be decoded in the order in which they were published.
    ///
    /// # Errors
    ///
    /// If the payload is not a batch at all, or too large. `into` is then empty.
    pub fn decode(&mut self, payload: &[u8], into: &mut Batch) -> Result<Decoded, BatchError> {
        into.clear();
        // Positions in the arenas have 32 bits; an arena has at most one entry per byte of the payload.
        let bytes_max = self.limits.payload_bytes_max.min(1 << 30);
        if payload.len() > bytes_max {
            return Err(BatchError::TooLong { bytes: payload.len(), bytes_max });
        }
        let mut decoded = Decoded::default();
        let mut reader = Reader::new(payload);
        match self.outer(&mut reader, into, &mut decoded) {
            Ok(()) => {}
            Err(Outer::Truncated) => {
                decoded.skipped.truncated += 1;
                decoded.removals_lost = true;
            }
            Err(Outer::Refused(error)) => {
                into.clear();
                return Err(error);
            }
        }
        decoded.events = u32::try_from(into.records.len()).unwrap_or(u32::MAX);
        Ok(decoded)
    }

    /// `[time, [events], rank?]`, or a map with the same.
    fn outer(
        &mut self,
        reader: &mut Reader<'_>,
        into: &mut Batch,
        decoded: &mut Decoded,
    ) -> Result<(), Outer> {
        let not_a_batch = |_| Outer::Refused(BatchError::NotABatch);
        if let Ok(count) = reader.array() {
            if count < 2 {
                return Err(not_a_batch(Fault::Type));
            }
            into.published = reader.number().map_err(not_a_batch)?;
            self.events(reader, into, decoded)?;
            if count > 2 {
                into.dp_rank = rank(reader).map_err(|_| Outer::Truncated)?;
            }
            return Ok(());
        }
        let pairs = reader.map().map_err(not_a_batch)?;
        let mut events = false;
        for _ in 0..pairs {
            match reader.text().map_err(not_a_batch)? {
                b"ts" | b"timestamp" => into.published = reader.number().map_err(not_a_batch)?,
                b"events" if !events => {
                    self.events(reader, into, decoded)?;
                    events = true;
                }
                b"data_parallel_rank" | b"attn_dp_rank" | b"dp_rank" => {
                    into.dp_rank = rank(reader).map_err(not_a_batch)?;
                }
                _ => reader.skip().map_err(not_a_batch)?,
            }
        }
        if events { Ok(()) } else { Err(not_a_batch(Fault::Type)) }
    }

    fn events(
        &mut self,
        reader: &mut Reader<'_>,
        into: &mut Batch,
        decoded: &mut Decoded,
    ) -> Result<(), Outer> {
        // A count that the bytes cannot hold says that the payload was cut, perhaps within the count.
        let events = reader.array().map_err(|fault| match fault {
            Fault::Broken => Outer::Truncated,
            Fault::Type => Outer::Refused(BatchError::NotABatch),
        })?;
        let events_max = self.limits.events_max;
        if events > events_max {
            return Err(Outer::Refused(BatchError::TooMany { events, events_max }));
        }
        for _ in 0..events {
            let start = *reader;
            let mut draft = Draft::new(self.dialect, &self.limits);
            let mark = batch::Mark::of(into);
            let skip = match draft.read(reader, into) {
                Ok(()) => match draft.finish(reader, into, &mut self.groups) {
                    Ok(record) => {
                        into.records.push(record);
                        continue;
                    }
                    Err(skip) => skip,
                },
                Err(skip) => {
                    *reader = start;
                    reader.skip().map_err(|_| Outer::Truncated)?;
                    skip
                }
            };
            into.truncate(mark);
            decoded.skipped.count(skip);
            decoded.removals_lost |= skip.loses() && draft.kind() != Some(Kind::Stored);
        }
        Ok(())
    }
}

/// Why [`Decoder::outer`] stopped.
enum Outer {
    /// Behind the events that were read there is nothing that can be read.
    Truncated,
    Refused(BatchError),
}

/// A data-parallel rank, or nil.
fn rank(reader: &mut Reader<'_>) -> Result<Option<u32>, Fault> {
    if reader.nil()? {
        return Ok(None);
    }
    match reader.int()? {
        Int::Unsigned(rank) => u32::try_from(rank).map(Some).map_err(|_| Fault::Type),
        Int::Negative(_) => Err(Fault::Type),
    }
}
