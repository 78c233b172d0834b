//! One event: its fields, by name or by position, and what they have to be together.

use super::batch::{Batch, Kind, Part, Record, SourceParts};
use super::msgpack::{Fault, Int, Reader};
use super::{Dialect, Limits, ObjectKey, media, object};
use crate::{EngineHash, Tier};

/// Why an event is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Skip {
    Malformed,
    Truncated,
    UnknownEvent,
    UnknownMedium,
    OtherGroup,
    TooLarge,
    Mismatch,
    Empty,
    UnknownObject,
}

impl Skip {
    /// Whether an event that is skipped for this reason may have removed blocks that are known. What is
    /// removed from an unknown medium, from another group or under an unknown object key was never known.
    pub(super) const fn loses(self) -> bool {
        matches!(self, Self::Malformed | Self::Truncated | Self::TooLarge | Self::Mismatch)
    }
}

impl From<Fault> for Skip {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Broken => Self::Truncated,
            Fault::Type => Self::Malformed,
        }
    }
}

/// Which attention groups keep whole prefixes, as far as events have said it. Groups from 64 on never do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Groups {
    whole: u64,
    other: u64,
    /// Groups of which blocks were stored. What is said of them later does not take these blocks away.
    stored: u64,
}

impl Groups {
    /// Whether an event that stores blocks of `group` counts; `whole` is what it says of the group.
    fn stores(&mut self, group: Option<u32>, whole: Option<bool>) -> bool {
        let Some(group) = group else { return whole != Some(false) };
        let Some(bit) = 1_u64.checked_shl(group) else { return false };
        match whole {
            Some(true) => (self.whole, self.other) = (self.whole | bit, self.other & !bit),
            Some(false) => (self.whole, self.other) = (self.whole & !bit, self.other | bit),
            None => {}
        }
        // A release that does not say: models with one group number it 0.
        let counts = self.whole & bit != 0 || (group == 0 && self.other & bit == 0);
        self.stored |= if counts { bit } else { 0 };
        counts
    }

    /// Whether an event that removes blocks of `group` counts. It does if nothing is known of the group: to
    /// know of too few blocks is safe.
    fn removes(&self, group: Option<u32>) -> bool {
        let Some(group) = group else { return true };
        1_u64.checked_shl(group).is_some_and(|bit| self.other & bit == 0 || self.stored & bit != 0)
    }
}

/// What a field means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Type,
    Hashes,
    Parent,
    Tokens,
    BlockTokens,
    Medium,
    Lora,
    Salt,
    ExtraKeys,
    Group,
    GroupKind,
    Locality,
    /// Position 7 of `SGLang`'s arrays: a map of further fields. vLLM has the adapter's name there.
    LoraOrMore,
    EventId,
    Backend,
    Tenant,
    Model,
    DpRank,
    Object,
    ConnectorHash,
    BaseBlock,
    Lookahead,
    Ignored,
}

/// Positions in an array behind the tag. vLLM until 0.23, `kv_events.py`; `SGLang` until 0.5.18 has the first
/// seven.
const STORED: [Field; 11] = [
    Field::Hashes,
    Field::Parent,
    Field::Tokens,
    Field::BlockTokens,
    Field::Ignored, // lora_id: replaced by the name
    Field::Medium,
    Field::LoraOrMore,
    Field::ExtraKeys,
    Field::Group,
    Field::GroupKind,
    Field::Ignored, // kv_cache_spec_sliding_window
];
const REMOVED: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];

/// The field of a name, over all dialects: no name has two meanings.
fn field(name: &[u8]) -> Field {
    match name {
        b"type" | b"event_type" => Field::Type,
        b"block_hashes" | b"seq_hashes" => Field::Hashes,
        b"parent_block_hash" | b"parent_hash" => Field::Parent,
        b"token_ids" => Field::Tokens,
        b"block_size" => Field::BlockTokens,
        b"medium" => Field::Medium,
        b"lora_name" => Field::Lora,
        b"cache_salt" | b"additional_salt" => Field::Salt,
        b"extra_keys" => Field::ExtraKeys,
        b"group_idx" => Field::Group,
        b"kv_cache_spec_kind" => Field::GroupKind,
        b"locality" => Field::Locality,
        b"event_id" => Field::EventId,
        b"backend_id" => Field::Backend,
        b"tenant_id" => Field::Tenant,
        b"model_name" => Field::Model,
        b"dp_rank" => Field::DpRank,
        b"object_key" => Field::Object,
        b"connector_block_hash" => Field::ConnectorHash,
        b"base_block_idx" => Field::BaseBlock,
        b"lookahead_token_ids" => Field::Lookahead,
        _ => Field::Ignored,
    }
}

/// An event of which some fields were read.
#[derive(Debug)]
pub(super) struct Draft<'a> {
    dialect: Dialect,
    limits: &'a Limits,
    /// `Some(None)` is a kind that is not known.
    kind: Option<Option<Kind>>,
    hashes: Option<Part>,
    tokens: Part,
    block_tokens: u32,
    parent: Option<EngineHash>,
    /// The medium's own tier; `Some(None)` if it is not known.
    medium: Option<Option<Tier>>,
    remote: bool,
    group: Option<u32>,
    whole: Option<bool>,
    looks_ahead: bool,
    lora: Option<Part>,
    salt: Option<Part>,
    /// The extra keys as they are in the payload, if a block has any. Read when the adapter's name is known.
    extra_keys: Option<Part>,
    source: SourceParts,
    /// The hash of the object's block, where a store says it beside or in place of the object's key.
    connector_hash: Option<EngineHash>,
}

type Read<T> = Result<T, Skip>;

impl<'a> Draft<'a> {
    pub(super) fn new(dialect: Dialect, limits: &'a Limits) -> Self {
        Self {
            dialect,
            limits,
            kind: None,
            hashes: None,
            tokens: Part::default(),
            block_tokens: 0,
            parent: None,
            medium: None,
            remote: false,
            group: None,
            whole: None,
            looks_ahead: false,
            lora: None,
            salt: None,
            extra_keys: None,
            source: SourceParts::default(),
            connector_hash: None,
        }
    }

    /// The kind, if it was read and is known.
    pub(super) fn kind(&self) -> Option<Kind> {
        self.kind.flatten()
    }

    /// Reads the event, in either layout.
    pub(super) fn read(&mut self, reader: &mut Reader<'_>, into: &mut Batch) -> Read<()> {
        match reader.map() {
            Ok(pairs) => return self.pairs(pairs, reader, into),
            Err(Fault::Broken) => return Err(Skip::Truncated),
            Err(Fault::Type) => {}
        }
        let values = reader.array()?.checked_sub(1).ok_or(Skip::Malformed)?;
        self.value(Field::Type, reader, into)?;
        let order: &[Field] = match self.kind() {
            Some(Kind::Stored) => &STORED,
            Some(Kind::Removed) => &REMOVED,
            Some(Kind::Cleared) | None => &[],
        };
        for position in 0..values {
            let field = order.get(position).copied().unwrap_or(Field::Ignored);
            self.value(field, reader, into)?;
        }
        Ok(())
    }

    fn pairs(&mut self, pairs: usize, reader: &mut Reader<'_>, into: &mut Batch) -> Read<()> {
        for _ in 0..pairs {
            let field = field(reader.text()?);
            self.value(field, reader, into)?;
        }
        Ok(())
    }

    /// Reads the value of a field. Nil is as good as no value.
    fn value(&mut self, field: Field, reader: &mut Reader<'_>, into: &mut Batch) -> Read<()> {
        if reader.nil()? {
            return Ok(());
        }
        match field {
            Field::Type => self.kind = Some(kind(reader.text()?)),
            Field::Hashes => self.hashes = Some(self.hashes(reader, into)?),
            Field::Parent => self.parent = Some(self.hash(reader)?),
            Field::Tokens => self.tokens = self.tokens(reader, into)?,
            Field::BlockTokens => self.block_tokens = small(reader)?,
            Field::Medium => self.medium(reader, into)?,
            Field::Lora => self.lora = self.text(reader, into)?,
            Field::Salt => self.salt = self.text(reader, into)?,
            Field::ExtraKeys => self.extra_keys = extra_keys(reader)?,
            Field::Group => self.group = Some(small(reader)?),
            Field::GroupKind => self.whole = Some(keeps_whole_prefixes(reader.text()?)),
            Field::Locality => self.remote = reader.text()? == b"REMOTE",
            Field::LoraOrMore => match reader.map() {
                Ok(pairs) => self.pairs(pairs, reader, into)?,
                Err(Fault::Type) => self.lora = self.text(reader, into)?,
                Err(Fault::Broken) => return Err(Skip::Truncated),
            },
            Field::EventId => {
                self.source.event_id = match reader.int()? {
                    Int::Unsigned(id) => Some(id),
                    Int::Negative(_) => return Err(Skip::Malformed),
                }
            }
            Field::Backend => self.source.backend = self.text(reader, into)?,
            Field::Tenant => self.source.tenant = self.text(reader, into)?,
            Field::Model => self.source.model = self.text(reader, into)?,
            Field::DpRank => self.source.dp_rank = Some(small(reader)?),
            Field::Object => self.source.object = self.text(reader, into)?,
            // A text of another layout is as good as none: the event may have other hashes.
            Field::ConnectorHash => {
                let text = core::str::from_utf8(reader.text()?).unwrap_or_default();
                self.connector_hash = object::digest(text);
            }
            Field::BaseBlock => self.source.base_block = Some(small(reader)?),
            Field::Lookahead => {
                let start = *reader;
                self.looks_ahead |= reader.array().is_ok_and(|tokens| tokens > 0);
                *reader = start;
                reader.skip()?;
            }
            Field::Ignored => reader.skip()?,
        }
        Ok(())
    }

    fn hashes(&self, reader: &mut Reader<'_>, into: &mut Batch) -> Read<Part> {
        let count = reader.array()?;
        if count > self.limits.blocks_max {
            return Err(Skip::TooLarge);
        }
        let start = into.hashes.len();
        into.hashes.reserve(count);
        for _ in 0..count {
            let hash = self.hash(reader)?;
            into.hashes.push(hash);
        }
        Ok(Part::behind(start, into.hashes.len()))
    }

    /// A hash: an integer of 64 bits, signed or not, or the digest of which vLLM publishes the last 8 bytes
    /// otherwise, and `SGLang` the first 8.
    fn hash(&self, reader: &mut Reader<'_>) -> Read<EngineHash> {
        match reader.int() {
            Ok(Int::Unsigned(hash)) => return Ok(EngineHash(hash)),
            Ok(Int::Negative(hash)) => return Ok(EngineHash(hash.cast_unsigned())),
            Err(Fault::Broken) => return Err(Skip::Truncated),
            Err(Fault::Type) => {}
        }
        let digest = reader.binary()?;
        let eight = match self.dialect {
            Dialect::Sglang => digest.first_chunk(),
            Dialect::Vllm | Dialect::Mooncake => digest.last_chunk(),
        };
        eight.map(|eight| EngineHash(u64::from_be_bytes(*eight))).ok_or(Skip::Malformed)
    }

    fn tokens(&mut self, reader: &mut Reader<'_>, into: &mut Batch) -> Read<Part> {
        let count = reader.array()?;
        let start = into.tokens.len();
        let pairs = count > 0 && reader.marker()? == 0x92;
        if !pairs {
            reader.tokens(count, &mut into.tokens)?;
            return Ok(Part::behind(start, into.tokens.len()));
        }
        // SGLang with a drafter (EAGLE): each token with the one behind it. The first of each pair is the
        // prompt, and the second of the last one the token behind the event's blocks.
        self.looks_ahead = true;
        for _ in 0..count {
            if reader.array()? != 2 {
                return Err(Skip::Malformed);
            }
            reader.tokens(1, &mut into.tokens)?;
            reader.skip()?;
        }
        Ok(Part::behind(start, into.tokens.len()))
    }

    fn medium(&mut self, reader: &mut Reader<'_>, into: &mut Batch) -> Read<()> {
        let start = *reader;
        self.medium = Some(media::tier(self.dialect, reader.text()?));
        if self.dialect == Dialect::Mooncake {
            *reader = start;
            self.source.medium = self.text(reader, into)?;
        }
        Ok(())
    }

    fn text(&self, reader: &mut Reader<'_>, into: &mut Batch) -> Read<Option<Part>> {
        let text = reader.text()?;
        if text.len() > self.limits.text_bytes_max {
            return Err(Skip::TooLarge);
        }
        if core::str::from_utf8(text).is_err() {
            return Err(Skip::Malformed);
        }
        let start = into.bytes.len();
        into.bytes.extend_from_slice(text);
        Ok((!text.is_empty()).then(|| Part::behind(start, into.bytes.len())))
    }

    /// The event, if its fields belong together.
    pub(super) fn finish(
        &mut self,
        payload: &Reader<'_>,
        into: &mut Batch,
        groups: &mut Groups,
    ) -> Read<Record> {
        let kind = self.kind.ok_or(Skip::Malformed)?.ok_or(Skip::UnknownEvent)?;
        let mut record = Record {
            kind,
            tier: Tier::Gpu,
            block_tokens: 0,
            hashes: Part::default(),
            tokens: Part::default(),
            ends: Part::default(),
            extra: Part::default(),
            parent: None,
            group: None,
            looks_ahead: self.looks_ahead,
            lora: None,
            salt: None,
            source: self.source,
        };
        if kind == Kind::Cleared {
            return Ok(record);
        }
        record.hashes = self.named(into)?;
        let counts = match kind {
            Kind::Stored => groups.stores(self.group, self.whole),
            Kind::Removed | Kind::Cleared => groups.removes(self.group),
        };
        if !counts {
            return Err(Skip::OtherGroup);
        }
        record.group = self.group;
        record.tier = self.tier().ok_or(Skip::UnknownMedium)?;
        if kind == Kind::Removed {
            return Ok(record);
        }
        if self.tokens.len() > 0 {
            let blocks = u64::from(record.hashes.len());
            if blocks * u64::from(self.block_tokens) != u64::from(self.tokens.len()) {
                return Err(Skip::Mismatch);
            }
            if self.block_tokens > self.limits.block_tokens_max {
                return Err(Skip::TooLarge);
            }
            record.block_tokens = self.block_tokens;
            record.tokens = self.tokens;
        }
        record.parent = self.parent;
        if let Some(extra_keys) = self.extra_keys {
            (record.ends, record.extra) = self.extra(extra_keys, payload, into, record.hashes.len())?;
        }
        (record.lora, record.salt) = (self.lora, self.salt);
        Ok(record)
    }

    /// The hashes, or that of the object.
    fn named(&self, into: &mut Batch) -> Read<Part> {
        if let Some(hashes) = self.hashes.filter(|hashes| hashes.len() > 0) {
            return Ok(hashes);
        }
        let of_key = |object: Part| {
            let key = core::str::from_utf8(&into.bytes[object.range()]).unwrap_or_default();
            ObjectKey::parse(key).map(|key| key.hash)
        };
        let hash = match (self.connector_hash.or_else(|| self.source.object.and_then(of_key)), self.hashes) {
            (Some(hash), _) => hash,
            (None, _) if self.source.object.is_some() => return Err(Skip::UnknownObject),
            (None, Some(_)) => return Err(Skip::Empty),
            (None, None) => return Err(Skip::Malformed),
        };
        let start = into.hashes.len();
        into.hashes.push(hash);
        Ok(Part::behind(start, into.hashes.len()))
    }

    fn tier(&self) -> Option<Tier> {
        match self.medium {
            None if self.dialect == Dialect::Mooncake => Some(Tier::Store),
            None => Some(Tier::Gpu),
            // What a worker keeps at a place that it calls remote can be read by others, too.
            Some(Some(Tier::Cpu | Tier::Disk)) if self.remote => Some(Tier::Store),
            Some(tier) => tier,
        }
    }

    /// Sorts the extra keys of each block: the adapter's name and the salt of the first block are fields of
    /// their own, the rest is copied as it is.
    fn extra(
        &mut self,
        keys: Part,
        payload: &Reader<'_>,
        into: &mut Batch,
        blocks: u32,
    ) -> Read<(Part, Part)> {
        let mut reader = Reader::new(payload.between(keys.range().start, keys.range().end));
        let count = reader.array()?;
        if count != blocks as usize {
            return Err(Skip::Mismatch);
        }
        let (first_end, first_byte) = (into.ends.len(), into.bytes.len());
        let mut salt = None;
        for block in 0..count {
            let block_start = into.bytes.len();
            let items = if reader.nil()? { 0 } else { reader.array()? };
            for item in 0..items {
                let start = reader.at();
                match reader.text() {
                    Ok(text) if item == 0 && self.is_lora(text, into) => continue,
                    Ok(text) if block == 0 && self.parent.is_none() && salt.is_none() => {
                        // An empty text is no salt.
                        salt = Some(text).filter(|text| !text.is_empty());
                        continue;
                    }
                    Ok(_) => {}
                    Err(Fault::Broken) => return Err(Skip::Truncated),
                    Err(Fault::Type) => reader.skip()?,
                }
                into.bytes.extend_from_slice(reader.between(start, reader.at()));
            }
            if into.bytes.len() - block_start > self.limits.extra_bytes_max {
                return Err(Skip::TooLarge);
            }
            into.ends.push(u32::try_from(into.bytes.len() - first_byte).map_err(|_| Skip::TooLarge)?);
        }
        let extra = Part::behind(first_byte, into.bytes.len());
        if let Some(salt) = salt {
            if salt.len() > self.limits.text_bytes_max {
                return Err(Skip::TooLarge);
            }
            if core::str::from_utf8(salt).is_err() {
                return Err(Skip::Malformed);
            }
            let start = into.bytes.len();
            into.bytes.extend_from_slice(salt);
            self.salt = Some(Part::behind(start, into.bytes.len()));
        }
        if extra.len() == 0 {
            into.ends.truncate(first_end);
        }
        Ok((Part::behind(first_end, into.ends.len()), extra))
    }

    fn is_lora(&self, text: &[u8], into: &Batch) -> bool {
        self.lora.is_some_and(|lora| into.bytes[lora.range()] == *text)
    }
}

/// The kind of event of a name: of vLLM and `SGLang`, or of RFC 1527.
fn kind(name: &[u8]) -> Option<Kind> {
    match name {
        b"BlockStored" | b"stored" => Some(Kind::Stored),
        b"BlockRemoved" | b"removed" => Some(Kind::Removed),
        b"AllBlocksCleared" | b"cleared" => Some(Kind::Cleared),
        _ => None,
    }
}

/// Whether blocks of such a group hold everything from the prompt's beginning. vLLM, `KVCacheSpecKind`.
fn keeps_whole_prefixes(kind: &[u8]) -> bool {
    matches!(kind, b"full_attention" | b"mla_attention" | b"sink_full_attention")
}

/// The extra keys as a part of the payload; `None` if no block has any.
fn extra_keys(reader: &mut Reader<'_>) -> Read<Option<Part>> {
    let start = reader.at();
    let count = reader.array()?;
    let mut none = 0;
    while none < count && reader.nil()? {
        none += 1;
    }
    for _ in none..count {
        reader.skip()?;
    }
    Ok((none < count).then(|| Part::behind(start, reader.at())))
}

/// A number of 32 bits.
fn small(reader: &mut Reader<'_>) -> Read<u32> {
    match reader.int()? {
        Int::Unsigned(value) => u32::try_from(value).map_err(|_| Skip::TooLarge),
        Int::Negative(_) => Err(Skip::Malformed),
    }
}
