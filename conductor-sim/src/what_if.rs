//! Answers to "what if the cluster was another one?".

use serde::Serialize;

use crate::cluster::run;
use crate::outcome::{Outcome, Record};
use crate::setup::Setup;
use crate::trace::Trace;

/// What a simulated cluster does with a trace. Times are of the requests that were served.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Always true.
    pub simulated: bool,
    /// Nodes that prefill, in groups.
    pub prefill_nodes: usize,
    /// Nodes that decode.
    pub decode_nodes: usize,
    /// How requests were placed.
    pub policy: String,
    /// How many times as fast as it was recorded the trace was replayed.
    pub speed: f64,
    /// Requests of the trace.
    pub requests: usize,
    /// Requests that were refused at the door.
    pub rejected: usize,
    /// Share of all requests that were served within both limits, %.
    pub effective_pct: f64,
    /// Requests per second that were served within both limits.
    pub effective_per_s: f64,
    /// Time to first token, seconds.
    pub ttft_s: Spread,
    /// Time between tokens (the mean of the longest tenth of a request's gaps), milliseconds.
    pub tbt_ms: Spread,
    /// Share of the prompts' tokens whose KV was reused, %.
    pub hit_pct: f64,
    /// Share of the prompts' tokens whose KV came from another node, %.
    pub fetched_pct: f64,
    /// Prefill time per request, seconds of one node's GPUs.
    pub prefill_gpu_s: f64,
    /// Share of time in which the average node's NICs sent, %.
    pub nic_use_pct: f64,
    /// Half of the predictions of the time to first token were wrong by less than this, %.
    pub prediction_error_pct: f64,
}

/// A mean, and quantiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// Half of the requests have at most this.
    pub p50: f64,
    /// 90 % have at most this.
    pub p90: f64,
    /// 99 % have at most this.
    pub p99: f64,
}

/// The limits within which a request counts as served well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Time to first token, seconds.
    pub ttft_s: f64,
    /// Time between tokens, seconds.
    pub tbt_s: f64,
}

impl Report {
    /// Simulates a cluster.
    #[must_use]
    pub fn of(trace: &Trace, setup: &Setup, limits: Limits) -> Self {
        let outcome = run(trace, setup);
        let nanos = |seconds: f64| (seconds * 1e9) as u64;
        let effective = outcome.effective(nanos(limits.ttft_s), nanos(limits.tbt_s));
        let last_ns = trace.requests().last().map_or(0, |request| request.bin_ms * 1_000_000);
        let span_s = (last_ns.max(1) as f64 / setup.speed / 1e9).max(1.0);
        let fetched = outcome.mean(|record| u64::from(record.fetched_tokens));
        let served = outcome.served().count().max(1) as f64;
        let error = |record: &Record| {
            let wrong = record.ttft_ns.abs_diff(record.predicted_ttft_ns);
            (wrong as f64 / record.ttft_ns.max(1) as f64 * 1e6) as u64
        };
        Self {
            simulated: true,
            prefill_nodes: setup.groups * setup.group_nodes as usize,
            decode_nodes: setup.decoders,
            policy: setup.policy.to_string(),
            speed: setup.speed,
            requests: outcome.records.len(),
            rejected: outcome.rejected(),
            effective_pct: rounded(effective * 100.0),
            effective_per_s: rounded(effective * outcome.records.len() as f64 / span_s),
            ttft_s: Spread::of(&outcome, 1e9, |record| record.ttft_ns),
            tbt_ms: Spread::of(&outcome, 1e6, |record| record.tbt_ns),
            hit_pct: rounded(outcome.hit_rate() * 100.0),
            fetched_pct: rounded(fetched * served / outcome.prompt_tokens.max(1) as f64 * 100.0),
            prefill_gpu_s: rounded(outcome.prefill_s()),
            nic_use_pct: rounded(outcome.nic_use() * 100.0),
            prediction_error_pct: rounded(outcome.quantile(0.5, error) as f64 / 1e4),
        }
    }

    /// Simulates every split of the nodes into prefill groups and decode instances, the fewest prefill groups
    /// first.
    #[must_use]
    pub fn of_splits(trace: &Trace, setup: &Setup, limits: Limits) -> Vec<Self> {
        let nodes = setup.groups * setup.group_nodes as usize + setup.decoders;
        let groups = 1..=nodes.saturating_sub(1) / setup.group_nodes.max(1) as usize;
        let split = |groups: usize| {
            let decoders = nodes - groups * setup.group_nodes as usize;
            Self::of(trace, &Setup { groups, decoders, ..setup.clone() }, limits)
        };
        groups.map(split).collect()
    }

    /// The index of the best of several splits: the most requests within both limits; among equals to a
    /// tenth of a percent, the least mean time to first token.
    #[must_use]
    pub fn best(splits: &[Self]) -> Option<usize> {
        let most = splits.iter().map(|split| split.effective_pct).fold(0.0, f64::max);
        let close = splits.iter().enumerate().filter(|(_, split)| split.effective_pct >= most - 0.1);
        close.min_by(|(_, a), (_, b)| a.ttft_s.mean.total_cmp(&b.ttft_s.mean)).map(|(nth, _)| nth)
    }
}

impl Spread {
    fn of(outcome: &Outcome, unit: f64, figure: impl Fn(&Record) -> u64) -> Self {
        let at = |share| rounded(outcome.quantile(share, &figure) as f64 / unit);
        Self { mean: rounded(outcome.mean(&figure) / unit), p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
