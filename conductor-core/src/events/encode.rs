//! Writes what engines and stores publish: for a simulated engine, the store's publisher, and tests.

use alloc::vec::Vec;

use super::msgpack::{Reader, Writer};
use super::{Event, Extra, LoadStat, Removed, Source, Stored, load};
use crate::{EngineHash, Tier};

/// A layout of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// vLLM until 0.23: arrays of every field.
    VllmArrays,
    /// vLLM 0.33: maps without defaults, the header of stored events in three bytes.
    VllmMaps,
    /// `SGLang` 0.5.23: maps without defaults, signed hashes.
    Sglang,
    /// The events of Mooncake's store (RFC 1527), with object keys where there are any, and with the names
    /// that readers of engines' events look for (`emit_legacy_compat_fields`).
    Mooncake,
}

/// Appends the payload of a batch to `out`. `published` is in seconds since 1970, in milliseconds for
/// [`Layout::Mooncake`].
///
/// What a layout has no field for is left out: extra keys in `SGLang`'s, and everything of [`Source`] but in
/// Mooncake's.
pub fn encode(layout: Layout, published: f64, dp_rank: Option<u32>, events: &[Event<'_>], out: &mut Vec<u8>) {
    let mut writer = Writer { out };
    writer.array(3);
    #[allow(clippy::cast_possible_truncation, reason = "a time of milliseconds fits")]
    match layout {
        Layout::Mooncake => writer.signed(published as i64),
        _ => writer.float(published),
    }
    writer.array(events.len());
    for event in events {
        match layout {
            Layout::VllmArrays => vllm_array(&mut writer, event),
            Layout::VllmMaps => vllm_map(&mut writer, event),
            Layout::Sglang => sglang(&mut writer, event),
            Layout::Mooncake => mooncake(&mut writer, event, published),
        }
    }
    // The store has no ranks and says 0.
    number_or_nil(&mut writer, dp_rank.or((layout == Layout::Mooncake).then_some(0)));
}

/// Appends the payload of a report of load to `out`.
pub fn encode_load(load: &LoadStat, out: &mut Vec<u8>) {
    load::write(load, out);
}

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";
/// What a group is said to be. A batch has groups that keep whole prefixes only.
const GROUP_KIND: &str = "full_attention";

fn vllm_array(writer: &mut Writer<'_>, event: &Event<'_>) {
    match event {
        Event::Cleared(_) => {
            writer.array(1);
            writer.text(CLEARED);
        }
        Event::Removed(removed) => {
            writer.array(4);
            writer.text(REMOVED);
            hashes(writer, removed.hashes);
            writer.text(old_medium(removed.tier));
            number_or_nil(writer, removed.group);
        }
        Event::Stored(stored) => {
            writer.array(12);
            writer.text(STORED);
            hashes(writer, stored.hashes);
            parent(writer, stored.parent);
            tokens(writer, stored.tokens);
            writer.unsigned(u64::from(stored.block_tokens));
            writer.nil();
            writer.text(old_medium(stored.tier));
            text_or_nil(writer, stored.lora);
            if has_extra_keys(stored) {
                extra_keys(writer, stored)
            } else {
                writer.nil()
            }
            number_or_nil(writer, stored.group);
            text_or_nil(writer, stored.group.map(|_| GROUP_KIND));
            writer.nil();
        }
    }
}

fn vllm_map(writer: &mut Writer<'_>, event: &Event<'_>) {
    match event {
        Event::Cleared(_) => cleared(writer),
        Event::Removed(removed) => {
            let remote = removed.tier == Tier::Store;
            writer.map(3 + usize::from(removed.group.is_some()) + usize::from(remote));
            writer.text("type");
            writer.text(REMOVED);
            writer.text("block_hashes");
            hashes(writer, removed.hashes);
            writer.text("medium");
            writer.text(medium(removed.tier));
            named_number(writer, "group_idx", removed.group);
            named_text(writer, "locality", remote.then_some("REMOTE"));
        }
        Event::Stored(stored) => {
            let (extra, remote) = (has_extra_keys(stored), stored.tier == Tier::Store);
            let groups = if stored.group.is_some() { 2 } else { 0 };
            writer.map16(8 + u16::from(extra) + groups + u16::from(remote));
            stored_fields(writer, stored);
            writer.text("medium");
            writer.text(medium(stored.tier));
            writer.text("lora_name");
            text_or_nil(writer, stored.lora);
            if extra {
                writer.text("extra_keys");
                extra_keys(writer, stored);
            }
            named_number(writer, "group_idx", stored.group);
            named_text(writer, "kv_cache_spec_kind", stored.group.map(|_| GROUP_KIND));
            named_text(writer, "locality", remote.then_some("REMOTE"));
        }
    }
}

/// The six fields that vLLM and `SGLang` begin a stored event with.
fn stored_fields(writer: &mut Writer<'_>, stored: &Stored<'_>) {
    writer.text("type");
    writer.text(STORED);
    writer.text("block_hashes");
    hashes(writer, stored.hashes);
    writer.text("parent_block_hash");
    parent(writer, stored.parent);
    writer.text("token_ids");
    tokens(writer, stored.tokens);
    writer.text("block_size");
    writer.unsigned(u64::from(stored.block_tokens));
    writer.text("lora_id");
    writer.nil();
}

fn cleared(writer: &mut Writer<'_>) {
    writer.map(1);
    writer.text("type");
    writer.text(CLEARED);
}

fn sglang(writer: &mut Writer<'_>, event: &Event<'_>) {
    let name = |tier| match tier {
        Tier::Gpu => "GPU",
        Tier::Cpu => "CPU_PINNED",
        Tier::Disk => "DISK",
        Tier::Store => "EXTERNAL",
    };
    match event {
        Event::Cleared(_) => cleared(writer),
        Event::Removed(removed) => {
            writer.map(3);
            writer.text("type");
            writer.text(REMOVED);
            writer.text("block_hashes");
            signed_hashes(writer, removed.hashes);
            writer.text("medium");
            writer.text(name(removed.tier));
        }
        Event::Stored(stored) => {
            writer.map(7 + usize::from(stored.salt.is_some()) + usize::from(stored.lora.is_some()));
            writer.text("type");
            writer.text(STORED);
            writer.text("block_hashes");
            signed_hashes(writer, stored.hashes);
            writer.text("parent_block_hash");
            match stored.parent {
                Some(EngineHash(hash)) => writer.signed(hash.cast_signed()),
                None => writer.nil(),
            }
            writer.text("token_ids");
            if stored.extra.looks_ahead() {
                pairs(writer, stored.tokens);
            } else {
                tokens(writer, stored.tokens);
            }
            writer.text("block_size");
            writer.unsigned(u64::from(stored.block_tokens));
            writer.text("lora_id");
            writer.nil();
            writer.text("medium");
            writer.text(name(stored.tier));
            named_text(writer, "cache_salt", stored.salt);
            named_text(writer, "lora_name", stored.lora);
        }
    }
}

/// The fields in the order of `kv_event_publisher.cpp`.
fn mooncake(writer: &mut Writer<'_>, event: &Event<'_>, published: f64) {
    let (source, kind, legacy_kind) = match event {
        Event::Stored(stored) => (&stored.source, "stored", STORED),
        Event::Removed(removed) => (&removed.source, "removed", REMOVED),
        Event::Cleared(source) => (source, "cleared", CLEARED),
    };
    let object = usize::from(source.object.is_some());
    writer.map(match event {
        Event::Stored(stored) => 19 + object + usize::from(stored.group.is_some()),
        Event::Removed(removed) => 16 + object + usize::from(removed.group.is_some()),
        Event::Cleared(_) => 12,
    });
    writer.text("event_id");
    writer.unsigned(source.event_id.unwrap_or_default());
    writer.text("timestamp");
    #[allow(clippy::cast_possible_truncation, reason = "a time of milliseconds fits")]
    writer.signed(published as i64);
    writer.text("event_type");
    writer.text(kind);
    writer.text("type");
    writer.text(legacy_kind);
    writer.text("model_name");
    text_or_nil(writer, source.model);
    let (block_tokens, salt, lora) = match event {
        Event::Stored(stored) => (stored.block_tokens, stored.salt, stored.lora),
        Event::Removed(_) | Event::Cleared(_) => (0, None, None),
    };
    writer.text("block_size");
    number_or_nil(writer, (block_tokens > 0).then_some(block_tokens));
    writer.text("additional_salt");
    text_or_nil(writer, salt);
    writer.text("lora_name");
    text_or_nil(writer, lora);
    writer.text("tenant_id");
    text_or_nil(writer, source.tenant);
    writer.text("backend_id");
    text_or_nil(writer, source.backend);
    match event {
        Event::Stored(Stored { tier, group, hashes, .. })
        | Event::Removed(Removed { tier, group, hashes, .. }) => {
            mooncake_blocks(writer, source, *tier, *group, hashes);
        }
        Event::Cleared(_) => {
            writer.text("medium");
            writer.nil();
            writer.text("dp_rank");
            number_or_nil(writer, source.dp_rank);
            return;
        }
    }
    writer.text("base_block_idx");
    match event {
        Event::Stored(stored) => {
            number_or_nil(writer, source.base_block);
            writer.text("parent_hash");
            parent(writer, stored.parent);
            writer.text("token_ids");
            if stored.tokens.is_empty() {
                writer.nil()
            } else {
                tokens(writer, stored.tokens)
            }
            writer.text("parent_block_hash");
            match stored.parent {
                Some(EngineHash(hash)) => writer.signed(hash.cast_signed()),
                None => writer.nil(),
            }
        }
        Event::Removed(_) | Event::Cleared(_) => number_or_nil(writer, source.base_block),
    }
}

fn mooncake_blocks(
    writer: &mut Writer<'_>,
    source: &Source<'_>,
    tier: Tier,
    group: Option<u32>,
    blocks: &[EngineHash],
) {
    writer.text("group_id");
    writer.nil();
    named_number(writer, "group_idx", group);
    writer.text("medium");
    writer.text(source.medium.unwrap_or(match tier {
        Tier::Gpu => "gpu",
        Tier::Cpu => "G2",
        Tier::Disk => "G3",
        Tier::Store => "cpu",
    }));
    writer.text("dp_rank");
    number_or_nil(writer, source.dp_rank);
    named_text(writer, "object_key", source.object);
    writer.text("seq_hashes");
    hashes(writer, blocks);
    writer.text("block_hashes");
    signed_hashes(writer, blocks);
}

/// The names of media until vLLM 0.26.
const fn old_medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Gpu => "GPU",
        Tier::Cpu => "CPU",
        Tier::Disk => "FS",
        Tier::Store => "OBJ",
    }
}

/// The names of media since vLLM 0.27; a store is remote storage.
const fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::Gpu => "GPU",
        Tier::Cpu => "CPU",
        Tier::Disk | Tier::Store => "STORAGE",
    }
}

fn hashes(writer: &mut Writer<'_>, hashes: &[EngineHash]) {
    writer.array(hashes.len());
    for EngineHash(hash) in hashes {
        writer.unsigned(*hash);
    }
}

fn signed_hashes(writer: &mut Writer<'_>, hashes: &[EngineHash]) {
    writer.array(hashes.len());
    for EngineHash(hash) in hashes {
        writer.signed(hash.cast_signed());
    }
}

fn parent(writer: &mut Writer<'_>, parent: Option<EngineHash>) {
    match parent {
        Some(EngineHash(hash)) => writer.unsigned(hash),
        None => writer.nil(),
    }
}

fn tokens(writer: &mut Writer<'_>, tokens: &[u32]) {
    writer.array(tokens.len());
    for token in tokens {
        writer.unsigned(u64::from(*token));
    }
}

/// Each token with the one behind it; behind the last one comes 0.
fn pairs(writer: &mut Writer<'_>, tokens: &[u32]) {
    writer.array(tokens.len());
    let behind = tokens.iter().skip(1).chain(core::iter::once(&0));
    for (token, behind) in tokens.iter().zip(behind) {
        writer.array(2);
        writer.unsigned(u64::from(*token));
        writer.unsigned(u64::from(*behind));
    }
}

fn text_or_nil(writer: &mut Writer<'_>, text: Option<&str>) {
    match text {
        Some(text) => writer.text(text),
        None => writer.nil(),
    }
}

fn number_or_nil(writer: &mut Writer<'_>, number: Option<u32>) {
    match number {
        Some(number) => writer.unsigned(u64::from(number)),
        None => writer.nil(),
    }
}

fn named_text(writer: &mut Writer<'_>, name: &str, text: Option<&str>) {
    if let Some(text) = text {
        writer.text(name);
        writer.text(text);
    }
}

fn named_number(writer: &mut Writer<'_>, name: &str, number: Option<u32>) {
    if let Some(number) = number {
        writer.text(name);
        writer.unsigned(u64::from(number));
    }
}

/// Whether a block has anything but tokens in it, in the words of vLLM.
fn has_extra_keys(stored: &Stored<'_>) -> bool {
    stored.lora.is_some() || first_salt(stored).is_some() || !stored.extra.is_empty()
}

/// The salt, where vLLM has it: with the first block of a prompt.
fn first_salt<'a>(stored: &Stored<'a>) -> Option<&'a str> {
    stored.salt.filter(|_| stored.parent.is_none())
}

/// The extra keys of each block: adapter, images, salt, embeddings. The order of the two in the middle is not
/// kept where a block has both images and embeddings; readers sort them out by type. They take the first text
/// behind the adapter for the salt, so other texts come behind it.
fn extra_keys(writer: &mut Writer<'_>, stored: &Stored<'_>) {
    writer.array(stored.hashes.len());
    for block in 0..stored.hashes.len() {
        let own = stored.extra.of(block);
        let salt = first_salt(stored).filter(|_| block == 0);
        let items = usize::from(stored.lora.is_some()) + usize::from(salt.is_some()) + values(own);
        let (before, behind) = if salt.is_some() { own.split_at(first_text(own)) } else { (own, &[][..]) };
        if items == 0 {
            writer.nil();
            continue;
        }
        writer.array(items);
        if let Some(lora) = stored.lora {
            writer.text(lora);
        }
        writer.out.extend_from_slice(before);
        if let Some(salt) = salt {
            writer.text(salt);
        }
        writer.out.extend_from_slice(behind);
    }
}

/// Where the first text begins; the end if there is none.
fn first_text(extra: &[u8]) -> usize {
    let mut reader = Reader::new(extra);
    while reader.left() > 0 {
        let start = reader.at();
        if reader.text().is_ok() || reader.skip().is_err() {
            return start;
        }
    }
    extra.len()
}

/// How many values a block's extra keys are. [`Extra`] has whole ones only.
fn values(extra: &[u8]) -> usize {
    let mut reader = Reader::new(extra);
    let mut count = 0;
    while reader.left() > 0 && reader.skip().is_ok() {
        count += 1;
    }
    count
}

impl<'a> Extra<'a> {
    /// The extra keys of blocks whose bytes end in `bytes` at `ends`. `None` unless the ends rise to the
    /// length of `bytes` and each block's bytes are whole msgpack values.
    #[must_use]
    pub fn new(ends: &'a [u32], bytes: &'a [u8]) -> Option<Self> {
        let mut start = 0;
        for &end in ends {
            let mut reader = Reader::new(bytes.get(start..end as usize)?);
            while reader.left() > 0 {
                reader.skip().ok()?;
            }
            start = end as usize;
        }
        (start == bytes.len()).then_some(Self { ends, bytes, looks_ahead: false })
    }
}
