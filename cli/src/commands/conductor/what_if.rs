//! `snowskin conductor sim --what-if`: another cluster than the paper's.

use std::path::PathBuf;

use conductor_sim::what_if::{Limits, Report, Spread};
use conductor_sim::{Calibration, PolicyKind, Setup, Shipping, Trace};

use super::sim::trace_of;
use crate::exit::{Exit, Failure};
use crate::output::{self, Align, Table};
use crate::{Outcome, fail};

/// Most nodes of a cluster.
const NODES_MAX: u16 = 256;

/// The cluster of `--what-if`. Without a flag it is the paper's.
#[derive(Debug, clap::Args)]
pub(super) struct ClusterArgs {
    /// The trace: one JSON object per line, as in `snowskin replay --trace`.
    #[arg(long, value_name = "FILE", requires = "what_if")]
    trace: Option<PathBuf>,
    /// Nodes of the cluster.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=i64::from(NODES_MAX)))]
    nodes: u16,
    /// Nodes that prefill; the others decode [default: half of the nodes].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    prefill: Option<u16>,
    /// Nodes per prefill group: a prompt's chunks pass them as a pipeline.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    group_nodes: u16,
    /// Bandwidth per node, Gbit/s [default: the paper's, about 695].
    #[arg(long, value_name = "GBIT")]
    bandwidth_gbps: Option<f64>,
    /// Tokens of KV that each node caches.
    #[arg(long, default_value_t = 3_000_000, value_name = "TOKENS")]
    cache_tokens: u64,
    /// Limit on the time to first token, seconds.
    #[arg(long, default_value_t = 30.0, value_name = "S")]
    ttft_slo_s: f64,
    /// Limit on the time between tokens, milliseconds.
    #[arg(long, default_value_t = 100.0, value_name = "MS")]
    tbt_slo_ms: f64,
    /// Refuse requests at the door when they would miss the limits.
    #[arg(long)]
    admission: bool,
    /// Send KV to decode nodes layer by layer, while it is computed.
    #[arg(long)]
    layerwise: bool,
    /// Replay the trace X times as fast as it was recorded.
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    speed: f64,
    /// Simulate every split into prefill and decode nodes, and name the best.
    #[arg(long, conflicts_with = "prefill", requires = "what_if")]
    find_split: bool,
}

pub(super) fn run(
    args: &ClusterArgs,
    calibration: &Calibration,
    policy: Option<PolicyKind>,
    seed: u64,
    json: bool,
) -> Outcome {
    let setup = setup(args, calibration, policy, seed)?;
    // clap requires the trace with --what-if.
    let Some(file) = &args.trace else { return fail(Failure::usage("--what-if needs --trace FILE")) };
    let trace = trace_of(file, None)?;
    let limits = Limits { ttft_s: args.ttft_slo_s, tbt_s: args.tbt_slo_ms / 1e3 };
    if args.find_split {
        return splits(&trace, &setup, limits, json);
    }
    let report = Report::of(&trace, &setup, limits);
    if json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(Exit::Ok)
}

fn setup(
    args: &ClusterArgs,
    calibration: &Calibration,
    policy: Option<PolicyKind>,
    seed: u64,
) -> anyhow::Result<Setup> {
    let positive = |flag: &str, value: f64, most: f64| {
        if value > 0.0 && value <= most {
            return Ok(());
        }
        fail(Failure::usage(format!("{flag} {value}: choose a number above 0, at most {most}")))
    };
    positive("--speed", args.speed, 1_000.0)?;
    positive("--bandwidth-gbps", args.bandwidth_gbps.unwrap_or(1.0), 1e6)?;
    positive("--ttft-slo-s", args.ttft_slo_s, 1e6)?;
    positive("--tbt-slo-ms", args.tbt_slo_ms, 1e9)?;
    let prefill = args.prefill.unwrap_or((args.nodes / 2).max(args.group_nodes));
    let groups = prefill / args.group_nodes;
    if prefill >= args.nodes || groups == 0 || !prefill.is_multiple_of(args.group_nodes) {
        return fail(Failure::usage(format!(
            "{prefill} prefill nodes in groups of {}, out of {} nodes: choose a multiple of the group's nodes that \
             leaves one node to decode",
            args.group_nodes, args.nodes
        )));
    }
    let paper = Setup::paper(usize::from(groups), calibration, seed);
    Ok(Setup {
        group_nodes: u32::from(args.group_nodes),
        decoders: usize::from(args.nodes - prefill),
        nic_bytes_per_s: args.bandwidth_gbps.map_or(paper.nic_bytes_per_s, |gbits| gbits * 1e9 / 8.0),
        cache_tokens: args.cache_tokens,
        policy: policy.unwrap_or(paper.policy),
        shipping: if args.layerwise { Shipping::LayerWise } else { Shipping::AfterPrefill },
        ttft_s_max: args.admission.then_some(args.ttft_slo_s),
        tbt_s_max: args.admission.then_some(args.tbt_slo_ms / 1e3),
        speed: args.speed,
        ..paper
    })
}

fn text(report: &Report) -> String {
    let mut table = Table::new(&[
        ("", Align::Left),
        ("mean", Align::Right),
        ("p50", Align::Right),
        ("p90", Align::Right),
        ("p99", Align::Right),
    ]);
    let mut spread = |name: &str, spread: &Spread, decimals: usize| {
        let numbers = [spread.mean, spread.p50, spread.p90, spread.p99];
        table.row([name.to_owned()].into_iter().chain(numbers.map(|number| format!("{number:.decimals$}"))));
    };
    spread("time to first token, s", &report.ttft_s, 3);
    spread("time between tokens, ms", &report.tbt_ms, 1);
    format!(
        "Simulated: {} prefill and {} decode nodes, policy {}, {} requests at {} times their speed\n\n{}\n\
         within both limits       {:.1} % ({:.3} requests per second)\n\
         refused at the door      {}\n\
         tokens reused            {:.1} %, of them from other nodes {:.1} % of all\n\
         prefill per request      {:.3} s of one node's GPUs\n\
         NICs send                {:.2} % of the time\n\
         prediction of the first token off by less than {:.1} % for half of the requests\n",
        report.prefill_nodes,
        report.decode_nodes,
        report.policy,
        report.requests,
        report.speed,
        table.render(),
        report.effective_pct,
        report.effective_per_s,
        report.rejected,
        report.hit_pct,
        report.fetched_pct,
        report.prefill_gpu_s,
        report.nic_use_pct,
        report.prediction_error_pct,
    )
}

fn splits(trace: &Trace, setup: &Setup, limits: Limits, json: bool) -> Outcome {
    let splits = Report::of_splits(trace, setup, limits);
    if json {
        output::print_json(&splits)?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[
        ("prefill", Align::Right),
        ("decode", Align::Right),
        ("effective %", Align::Right),
        ("refused", Align::Right),
        ("TTFT mean s", Align::Right),
        ("TTFT p99 s", Align::Right),
        ("TBT mean ms", Align::Right),
        ("TBT p99 ms", Align::Right),
        ("", Align::Left),
    ]);
    let best = Report::best(&splits);
    for (nth, split) in splits.iter().enumerate() {
        table.row([
            split.prefill_nodes.to_string(),
            split.decode_nodes.to_string(),
            format!("{:.1}", split.effective_pct),
            split.rejected.to_string(),
            format!("{:.3}", split.ttft_s.mean),
            format!("{:.3}", split.ttft_s.p99),
            format!("{:.1}", split.tbt_ms.mean),
            format!("{:.1}", split.tbt_ms.p99),
            if best == Some(nth) { "best".to_owned() } else { String::new() },
        ]);
    }
    output::print(&format!("Simulated: {} requests\n\n{}", trace.requests().len(), table.render()))?;
    Ok(Exit::Ok)
}
