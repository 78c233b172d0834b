//! Reports of load, which `SGLang` publishes beside its events (`--load-publish-endpoint`).

use alloc::vec::Vec;
use core::fmt;

use super::msgpack::{Fault, Int, Reader, Writer};

/// The load of one data-parallel rank, as `LoadStat` of `load_publisher.py` has it (0.5.23). Counters are
/// zero where an earlier release does not send them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStat {
    /// Requests in the running batch.
    pub running_requests: u64,
    /// Requests in the queue.
    pub waiting_requests: u64,
    /// Tokens whose KV cache is in use.
    pub used_tokens: u64,
    /// Tokens that the KV cache can hold; 0 if not known.
    pub capacity_tokens: u64,
    /// The data-parallel rank.
    pub dp_rank: Option<u32>,
    /// Tokens of the queue that are not in the cache.
    pub waiting_uncached_tokens: u64,
    /// Tokens in use and in the queue.
    pub total_tokens: u64,
    /// How many requests may run at once; 0 if not known.
    pub running_requests_max: u64,
    /// Tokens that were prefilled since the start, without those from the cache.
    pub prefilled_tokens: u64,
    /// The time that this took, in microseconds.
    pub prefill_busy_us: u64,
}

/// A payload is no `LoadStat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotALoad;

impl fmt::Display for NotALoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the payload is not a report of load ([\"LoadStat\", ...] in msgpack): check that the endpoint is \
             that of --load-publish-endpoint",
        )
    }
}

impl core::error::Error for NotALoad {}

/// Reads the third frame of a message with the topic `load`. Fields behind those that are known are ignored.
///
/// # Errors
///
/// If it is not a `LoadStat` with at least the first four numbers.
pub fn decode_load(payload: &[u8]) -> Result<LoadStat, NotALoad> {
    read(&mut Reader::new(payload)).map_err(|_| NotALoad)
}

fn read(reader: &mut Reader<'_>) -> Result<LoadStat, Fault> {
    let count = reader.array()?;
    if count < 5 || reader.text()? != b"LoadStat" {
        return Err(Fault::Type);
    }
    let mut numbers = [None; 10];
    for number in numbers.iter_mut().take(count - 1) {
        if !reader.nil()? {
            // The tokens in use can be -1 in a release that does not know them.
            *number = Some(match reader.int()? {
                Int::Unsigned(value) => value,
                Int::Negative(_) => 0,
            });
        }
    }
    let [running, waiting, used, capacity, rank, uncached, total, running_max, prefilled, busy] = numbers;
    if running.is_none() || waiting.is_none() {
        return Err(Fault::Type);
    }
    Ok(LoadStat {
        running_requests: running.unwrap_or_default(),
        waiting_requests: waiting.unwrap_or_default(),
        used_tokens: used.unwrap_or_default(),
        capacity_tokens: capacity.unwrap_or_default(),
        dp_rank: rank.map(|rank| u32::try_from(rank).map_err(|_| Fault::Type)).transpose()?,
        waiting_uncached_tokens: uncached.unwrap_or_default(),
        total_tokens: total.unwrap_or_default(),
        running_requests_max: running_max.unwrap_or_default(),
        prefilled_tokens: prefilled.unwrap_or_default(),
        prefill_busy_us: busy.unwrap_or_default(),
    })
}

/// Appends the payload of a report.
pub(super) fn write(load: &LoadStat, out: &mut Vec<u8>) {
    let mut writer = Writer { out };
    writer.array(11);
    writer.text("LoadStat");
    for number in [load.running_requests, load.waiting_requests, load.used_tokens, load.capacity_tokens] {
        writer.unsigned(number);
    }
    match load.dp_rank {
        Some(rank) => writer.unsigned(u64::from(rank)),
        None => writer.nil(),
    }
    for number in [
        load.waiting_uncached_tokens,
        load.total_tokens,
        load.running_requests_max,
        load.prefilled_tokens,
        load.prefill_busy_us,
    ] {
        writer.unsigned(number);
    }
}
