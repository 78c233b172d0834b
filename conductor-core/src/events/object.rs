//! Keys of objects in a store, by which engines keep blocks there.
//!
//! An engine keeps a block as several objects: one per rank and attention group, and per layer where the
//! connector cuts so. The block can be read when all of them are there.

use crate::EngineHash;

/// What the key of an object says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectKey<'a> {
    /// Who makes such keys.
    pub layout: ObjectLayout,
    /// The hash of the block, as 64 bits: the last 8 bytes of vLLM's digest, the first 8 of `SGLang`'s.
    pub hash: EngineHash,
    /// What stands in front of the model or, in `SGLang`'s keys, of the digest.
    pub prefix: Option<&'a str>,
    /// The model, as the connector names it.
    pub model: Option<&'a str>,
    /// The rank of tensor parallelism.
    pub tp_rank: Option<u32>,
    /// The rank of prefill context parallelism.
    pub pcp_rank: Option<u32>,
    /// The rank of decode context parallelism.
    pub dcp_rank: Option<u32>,
    /// The rank of pipeline parallelism.
    pub pp_rank: Option<u32>,
    /// The attention group.
    pub group: Option<u32>,
    /// The layer, where each has an object of its own.
    pub layer: Option<u32>,
    /// Which part of a block's data the object is: `cache_role` or `cache_family` of vLLM (the last that is
    /// given), the component of `SGLang`.
    pub component: Option<&'a str>,
}

/// The layouts of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectLayout {
    /// `[prefix@]model@tp_rank:N@pcpN@dcpN@pp_rank:N[@group:N][@cache_role:..][@cache_family:..]@hash`.
    Vllm,
    /// `model@pcpN@dcpN@head_or_tp_rank:N[@pp_rank:N][@group:N][@layer_id:N]@hash`, of vLLM on Ascend; with
    /// `@hash@layer` at the end in former releases.
    Ascend,
    /// `model@[group@]hash@rank`.
    Compact,
    /// `[prefix_]64 hexadecimal digits[_component]`, of `SGLang`.
    Sglang,
    /// The hash as a decimal number, or a hexadecimal one behind `0x`: the only layout that Mooncake's master
    /// itself reads.
    Number,
}

impl<'a> ObjectKey<'a> {
    /// Reads a key; `None` if it has no hash in one of the layouts.
    #[must_use]
    pub fn parse(key: &'a str) -> Option<Self> {
        if key.contains('@') { parted(key) } else { number(key).or_else(|| sglang(key)) }
    }

    const fn new(layout: ObjectLayout, hash: EngineHash) -> Self {
        Self {
            layout,
            hash,
            prefix: None,
            model: None,
            tp_rank: None,
            pcp_rank: None,
            dcp_rank: None,
            pp_rank: None,
            group: None,
            layer: None,
            component: None,
        }
    }
}

/// Keys with `@`. Names may have one, too, so they are read from the end.
fn parted(key: &str) -> Option<ObjectKey<'_>> {
    let (rest, last) = key.rsplit_once('@')?;
    if let Some(hash) = digest(last) {
        return ranked(rest, hash);
    }
    // A number behind the hash: the layer in Ascend's keys of before `layer_id`, the rank in compact ones.
    let number = last.parse().ok()?;
    let (rest, last) = rest.rsplit_once('@')?;
    let hash = digest(last)?;
    if let Some(found) = ranked(rest, hash).filter(|found| found.layout == ObjectLayout::Ascend) {
        return Some(ObjectKey { layer: Some(number), ..found });
    }
    compact(rest, hash, number)
}

/// What is in front of the hash, with the rank by name.
fn ranked(mut rest: &str, hash: EngineHash) -> Option<ObjectKey<'_>> {
    let mut found = ObjectKey::new(ObjectLayout::Vllm, hash);
    while let Some((before, part)) = rest.rsplit_once('@') {
        if !labelled(part, &mut found)? {
            break;
        }
        rest = before;
    }
    if found.tp_rank.is_none() || rest.is_empty() {
        return None;
    }
    match rest.rsplit_once('@') {
        Some((prefix, model)) if found.layout == ObjectLayout::Vllm => {
            (found.prefix, found.model) = (Some(prefix), Some(model));
        }
        _ => found.model = Some(rest),
    }
    found.model.is_some_and(|model| !model.is_empty()).then_some(found)
}

/// Reads `label:N` or `labelN` into its field. `Some(false)` if the part is no label, `None` if its number is
/// none.
fn labelled<'a>(part: &'a str, found: &mut ObjectKey<'a>) -> Option<bool> {
    if let Some((label, value)) = part.split_once(':') {
        match label {
            "tp_rank" => found.tp_rank = Some(value.parse().ok()?),
            "head_or_tp_rank" => {
                found.layout = ObjectLayout::Ascend;
                found.tp_rank = Some(value.parse().ok()?);
            }
            "pp_rank" => found.pp_rank = Some(value.parse().ok()?),
            "group" => found.group = Some(value.parse().ok()?),
            "layer_id" => found.layer = Some(value.parse().ok()?),
            "cache_role" | "cache_family" => found.component = found.component.or(Some(value)),
            _ => return Some(false),
        }
        return Some(true);
    }
    let field = match part.get(..3) {
        Some("pcp") => &mut found.pcp_rank,
        Some("dcp") => &mut found.dcp_rank,
        _ => return Some(false),
    };
    let Ok(rank) = part[3..].parse() else { return Some(false) };
    *field = Some(rank);
    Some(true)
}

/// `model[@group]`, in front of `@hash@rank`.
fn compact(rest: &str, hash: EngineHash, tp_rank: u32) -> Option<ObjectKey<'_>> {
    let mut found = ObjectKey::new(ObjectLayout::Compact, hash);
    (found.model, found.tp_rank) = (Some(rest), Some(tp_rank));
    if let Some((model, part)) = rest.rsplit_once('@') {
        if let Ok(group) = part.parse() {
            (found.model, found.group) = (Some(model), Some(group));
        } else if labelled(part, &mut ObjectKey::new(ObjectLayout::Compact, hash)) != Some(false) {
            // Compact keys have no labels: this is one of another layout, with a part too many.
            return None;
        }
    }
    found.model.is_some_and(|model| !model.is_empty()).then_some(found)
}

/// The last 64 bits of a digest in hexadecimal: of 8 to 64 bytes, with or without `0x` in front.
pub(super) fn digest(text: &str) -> Option<EngineHash> {
    let text = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    let bytes = text.as_bytes();
    let plausible = bytes.len() >= 16 && bytes.len() <= 128 && bytes.len().is_multiple_of(2);
    if !plausible || !bytes.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u64::from_str_radix(&text[bytes.len() - 16..], 16).ok().map(EngineHash)
}

fn number(key: &str) -> Option<ObjectKey<'_>> {
    let digits = |text: &str, hexadecimal: bool| {
        let plain =
            text.bytes().all(|byte| byte.is_ascii_digit() || (hexadecimal && byte.is_ascii_hexdigit()));
        if plain { u64::from_str_radix(text, if hexadecimal { 16 } else { 10 }).ok() } else { None }
    };
    let hash = match key.strip_prefix("0x").or_else(|| key.strip_prefix("0X")) {
        Some(hexadecimal) => digits(hexadecimal, true)?,
        None => digits(key, false)?,
    };
    Some(ObjectKey::new(ObjectLayout::Number, EngineHash(hash)))
}

/// `[prefix_]64 hexadecimal digits[_component]`: the first part that is a digest, since components are words.
fn sglang(key: &str) -> Option<ObjectKey<'_>> {
    const DIGITS: usize = 64;
    let mut start = 0;
    for part in key.split('_') {
        let end = start + part.len();
        if part.len() == DIGITS && part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            let hash = u64::from_str_radix(&part[..16], 16).ok()?;
            let mut found = ObjectKey::new(ObjectLayout::Sglang, EngineHash(hash));
            found.prefix = start.checked_sub(1).map(|end| &key[..end]);
            found.component = key.get(end + 1..);
            return Some(found);
        }
        start = end + 1;
    }
    None
}
