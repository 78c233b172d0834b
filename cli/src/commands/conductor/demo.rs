//! `snowskin conductor demo`: a cluster of mock engines, the Conductor and its proxy in one process, with a
//! workload of conversations, beside the same workload in turn.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use conductor::PolicyName;
use conductor::demo::{Cluster, Demo, DemoError, Ran};
use conductor::mock::{MockConfig, MockEngine, Role, Workload};
use serde::Serialize;

use super::serve::no_start;
use crate::commands::master::{announce, wait_for_signal};
use crate::commands::mock_engine::{EngineArgs, FlavorArg};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{self, Align, Table};
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin conductor demo
  snowskin conductor demo --prefill 4 --decode 4 --seconds 20 --speed 10
  snowskin conductor demo --flavor sglang --json
  snowskin conductor demo --serve --listen 127.0.0.1:8080
  curl localhost:8080/v1/completions -d '{\"model\":\"mock\",\"prompt\":\"hello\",\"stream\":true}'";

/// Run engines without GPUs, the Conductor and its proxy in one process, with a workload
///
/// Conversations with several turns go through the proxy for some seconds, placed by the Conductor, and then
/// placed in turn. The table has the part of prompt tokens that was reused, times to the first token as
/// clients measure them, how far they were from the prediction, and where requests went. Times are simulated:
/// those of LLaMA3-70B on 8 A800, divided by --speed. Ctrl-C ends it early.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"), mut_arg("speed", |arg| arg.default_value("20")))]
pub(super) struct Args {
    /// Prefill engines.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    prefill: u32,
    /// Decode engines.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    decode: u32,
    /// How long each of the two workloads takes.
    #[arg(long, default_value_t = 5, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// Conversations at a time.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4_096))]
    conversations: u32,
    /// Turns per conversation.
    #[arg(long, default_value_t = 6, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    turns: u32,
    /// Whose interfaces the engines have.
    #[arg(long, default_value = "vllm")]
    flavor: FlavorArg,
    #[command(flatten)]
    engine: EngineArgs,
    /// Keep the cluster running, without a workload, until Ctrl-C.
    #[arg(long)]
    serve: bool,
    /// Address of the proxy; port 0 picks a free port.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// The line that is printed when the cluster serves.
#[derive(Serialize)]
struct Ready {
    ready: &'static str,
    proxy: String,
    conductor: String,
    engines: Vec<String>,
}

/// What one workload gave. All times are simulated, in milliseconds as clients measured them.
#[derive(Debug, Serialize)]
struct Measured {
    policy: &'static str,
    requests: u64,
    refused: u64,
    failed: u64,
    /// Part of the prompt tokens that was reused.
    hit_rate: f64,
    ttft_ms: Quantiles,
    /// Median of |predicted − actual| / actual of the time to the first token.
    prediction_error: f64,
    /// Time that the proxy added per request, microseconds.
    added_us: f64,
    /// Requests of each engine.
    engines: Vec<(String, u64)>,
}

#[derive(Debug, Serialize)]
struct Quantiles {
    p50: f64,
    p90: f64,
    p99: f64,
}

impl Quantiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |q: f64| {
            let last = values.len().saturating_sub(1) as f64;
            output::rounded(values.get((q * last).round() as usize).copied().unwrap_or(0.0))
        };
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    if args.serve {
        return serve(args);
    }
    let mut all = Vec::new();
    for policy in [PolicyName::Cost, PolicyName::RoundRobin] {
        if let Some(exit) = sys::interrupted() {
            return fail(Failure::silent(exit));
        }
        all.push(measure(args, policy)?);
    }
    if args.json {
        output::print_json(&all)?;
    } else {
        output::print(&rendered(args, &all))?;
    }
    if let Some(exit) = sys::interrupted() {
        return fail(Failure::silent(exit));
    }
    match all.iter().find(|measured| measured.failed > 0) {
        Some(measured) => fail(Failure::failed(format!(
            "{} of the requests that were placed by {} failed",
            measured.failed, measured.policy
        ))),
        None => Ok(Exit::Ok),
    }
}

fn serve(args: &Args) -> Outcome {
    let cluster = start(args, PolicyName::Cost)?;
    let ready = Ready {
        ready: "demo",
        proxy: cluster.proxy().to_string(),
        conductor: cluster.conductor().to_string(),
        engines: cluster.engines().iter().map(|engine| engine.http().to_string()).collect(),
    };
    announce(args.json, &ready, || {
        let (proxy, conductor) = (&ready.proxy, &ready.conductor);
        let engines = ready.engines.len();
        format!(
            "proxy at http://{proxy}/v1, Conductor at http://{conductor}/, {engines} engines; Ctrl-C ends it\n"
        )
    });
    wait_for_signal();
    tracing::info!("stopping");
    Ok(Exit::Ok)
}

fn start(args: &Args, policy: PolicyName) -> anyhow::Result<Cluster> {
    let engine = MockConfig { flavor: args.flavor.into(), ..args.engine.config()? };
    let (prefill, decode, listen) = (args.prefill, args.decode, args.listen);
    Cluster::start(&Demo { prefill, decode, engine, policy, listen }).map_err(|error| match error {
        DemoError::Conductor(error) => no_start(error),
        error => error.into(),
    })
}

fn measure(args: &Args, policy: PolicyName) -> anyhow::Result<Measured> {
    let cluster = start(args, policy)?;
    let speed = args.engine.config()?.speed.max(0.001);
    let workload = Workload {
        conversations: args.conversations,
        turns: args.turns,
        // A pause of four simulated seconds.
        think: Duration::from_secs_f64((4.0 / speed).min(4.0)),
        ..Workload::default()
    };
    let wait = || {
        // Returns early at Ctrl-C.
        let _ = sys::wait_for_interrupt(Some(Duration::from_secs(args.seconds)));
    };
    let ran = cluster.run(workload, wait).context("cannot start the clients")?;
    Ok(measured(policy, &cluster, &ran))
}

fn measured(policy: PolicyName, cluster: &Cluster, ran: &Ran) -> Measured {
    if let Some(why) = &ran.seen.last_failure {
        tracing::warn!(why, "a request was not answered");
    }
    let figures = cluster.figures();
    let name = |(at, engine): (usize, &MockEngine)| match engine.config().role {
        Role::Prefill => format!("prefill-{at}"),
        Role::Decode | Role::Both => format!("decode-{at}"),
    };
    let names = cluster.engines().iter().enumerate().map(name);
    let ttfts = ran.seen.first_tokens.iter().map(|ttft| ttft.as_secs_f64() * 1e3);
    Measured {
        policy: policy.name(),
        requests: ran.seen.done,
        refused: ran.seen.refused,
        failed: ran.seen.failed,
        hit_rate: output::rounded(ran.hit_rate),
        ttft_ms: Quantiles::of(ttfts.collect()),
        prediction_error: output::rounded(ran.prediction_error(usize::MAX)),
        added_us: output::rounded(figures.added_us as f64 / figures.requests.max(1) as f64),
        engines: names.zip(ran.requests.iter().copied()).collect(),
    }
}

fn rendered(args: &Args, all: &[Measured]) -> String {
    let mut table = Table::new(&[
        ("placed by", Align::Left),
        ("requests", Align::Right),
        ("reused", Align::Right),
        ("TTFT p50 ms", Align::Right),
        ("p90", Align::Right),
        ("p99", Align::Right),
        ("prediction off, p50", Align::Right),
        ("requests per engine", Align::Left),
    ]);
    for measured in all {
        let each: Vec<String> = measured.engines.iter().map(|(_, requests)| requests.to_string()).collect();
        let ttft = &measured.ttft_ms;
        table.row([
            measured.policy.to_owned(),
            measured.requests.to_string(),
            format!("{:.1} %", measured.hit_rate * 100.0),
            output::figure(ttft.p50),
            output::figure(ttft.p90),
            output::figure(ttft.p99),
            format!("{:.0} %", measured.prediction_error * 100.0),
            each.join(" "),
        ]);
    }
    format!(
        "Simulated: {} prefill and {} decode engines, {} conversations at a time, {} times faster than they are\n\n{}",
        args.prefill,
        args.decode,
        args.conversations,
        args.engine.speed,
        table.render()
    )
}
