//! `snowskin conductor demo`: a cluster of mock engines, the Conductor and its proxy in one process, with a
//! workload of conversations, beside the same workload in turn.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use conductor::mock::{Flavor, MockConfig, MockEngine, MockEngines, Role, Seen, Workload};
use conductor::proxy::{ConnectionLimits, Figures, Limits, ProxyServer};
use conductor::{Conductor, Config, EngineConfig, EngineKind, PolicyName, ScheduleConfig};
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
/// placed in turn. The table has the part of prompt tokens that was reused, times to the first token as clients
/// measure them, how far they were from the prediction, and where requests went. Times are simulated: those of
/// LLaMA3-70B on 8 A800, divided by --speed. Ctrl-C ends it early.
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
    /// |predicted − actual| / actual of the time to the first token.
    prediction_error: Quantiles,
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
    let cluster = Cluster::start(args, PolicyName::Cost)?;
    let ready = Ready {
        ready: "demo",
        proxy: cluster.proxy.to_string(),
        conductor: cluster.conductor.to_string(),
        engines: cluster.engines.engines().iter().map(|engine| engine.http().to_string()).collect(),
    };
    announce(args.json, &ready, || {
        let (proxy, conductor) = (&ready.proxy, &ready.conductor);
        let engines = ready.engines.len();
        format!("proxy at http://{proxy}/v1, Conductor at http://{conductor}/, {engines} engines; Ctrl-C ends it\n")
    });
    wait_for_signal();
    tracing::info!("stopping");
    Ok(Exit::Ok)
}

/// All running parts. Fields are dropped from the top.
struct Cluster {
    parts: Box<dyn Running>,
    proxy: SocketAddr,
    conductor: SocketAddr,
    engines: MockEngines,
}

/// The proxy and the Conductor behind it.
trait Running {
    fn figures(&self) -> Figures;
}

struct Parts<P: conductor::proxy::Place> {
    proxy: ProxyServer<P>,
    _conductor: conductor::ConductorHandle,
}

impl<P: conductor::proxy::Place> Running for Parts<P> {
    fn figures(&self) -> Figures {
        self.proxy.figures()
    }
}

impl Cluster {
    fn start(args: &Args, policy: PolicyName) -> anyhow::Result<Self> {
        let config = MockConfig { flavor: args.flavor.into(), load_beside_events: true, ..args.engine.config()? };
        let with = |role| MockConfig { role, ..config.clone() };
        let roles = (0..args.prefill).map(|_| Role::Prefill).chain((0..args.decode).map(|_| Role::Decode));
        let engines =
            MockEngines::start(roles.map(with).collect()).context("cannot start the mock engines")?;
        let settings = Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            engines: engines.engines().iter().enumerate().map(|(at, engine)| registered(at, engine)).collect(),
            // Nothing is refused: the two workloads are to be the same.
            schedule: ScheduleConfig { policy, ttft_slo_ms: 0, tbt_slo_ms: 0, ..ScheduleConfig::default() },
            ..Config::default()
        };
        let serving = Conductor::bind(settings).and_then(Conductor::spawn).map_err(no_start)?;
        let conductor = serving.addr();
        let place = serving.place();
        let proxy =
            ProxyServer::start(args.listen, place, Limits::default(), ConnectionLimits::default(), 1)
                .with_context(|| format!("cannot listen at {}", args.listen))?;
        let addr = proxy.addr();
        Ok(Self { parts: Box::new(Parts { proxy, _conductor: serving }), proxy: addr, conductor, engines })
    }
}

/// An engine as the Conductor's settings name it.
pub(super) fn registered(at: usize, engine: &MockEngine) -> EngineConfig {
    let config = engine.config();
    let endpoint = |addr: Option<SocketAddr>| addr.map(|addr| format!("tcp://{addr}")).unwrap_or_default();
    EngineConfig {
        instance: name(at, engine),
        kind: if config.flavor == Flavor::Sglang { EngineKind::Sglang } else { EngineKind::Vllm },
        endpoint: endpoint(engine.events()),
        replay_endpoint: endpoint(engine.replay()),
        model: config.model.clone(),
        block_tokens: config.block_tokens,
        role: match config.role {
            Role::Prefill => conductor::Role::Prefill,
            Role::Decode => conductor::Role::Decode,
            Role::Both => conductor::Role::Both,
        },
        http: engine.http().to_string(),
        bootstrap_port: engine.http().port(),
        ..EngineConfig::default()
    }
}

fn name(at: usize, engine: &MockEngine) -> String {
    let role = if engine.config().role == Role::Prefill { "prefill" } else { "decode" };
    format!("{role}-{at}")
}

fn measure(args: &Args, policy: PolicyName) -> anyhow::Result<Measured> {
    let cluster = Cluster::start(args, policy)?;
    let speed = args.engine.speed().max(0.001);
    let workload = Workload {
        conversations: args.conversations,
        turns: args.turns,
        // A pause of four simulated seconds.
        think: Duration::from_secs_f64((4.0 / speed).min(4.0)),
        ..Workload::default()
    };
    let ended = Arc::new(AtomicBool::new(false));
    let (until, proxy) = (Arc::clone(&ended), cluster.proxy);
    let clients = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok::<_, std::io::Error>(runtime.block_on(workload.run(proxy, until)))
    });
    // Returns early at Ctrl-C.
    let _ = sys::wait_for_interrupt(Some(Duration::from_secs(args.seconds)));
    ended.store(true, Ordering::Relaxed);
    let Ok(seen) = clients.join() else { return fail(Failure::failed("the clients panicked")) };
    Ok(measured(policy, &cluster, seen.context("cannot start the clients")?))
}

fn measured(policy: PolicyName, cluster: &Cluster, seen: Seen) -> Measured {
    if let Some(why) = &seen.last_failure {
        tracing::warn!(why, "a request was not answered");
    }
    let figures = cluster.parts.figures();
    let engines = cluster.engines.engines();
    let (computed, reused) = engines.iter().map(MockEngine::prompt_tokens).fold((0, 0), |sum, engine| {
        (sum.0 + engine.0, sum.1 + engine.1)
    });
    let error = |&(predicted, actual): &(Duration, Duration)| {
        let (predicted, actual) = (predicted.as_secs_f64(), actual.as_secs_f64());
        (predicted - actual).abs() / actual.max(1e-6)
    };
    let requests = engines.iter().enumerate().map(|(at, engine)| (name(at, engine), engine.requests().0));
    Measured {
        policy: policy.name(),
        requests: seen.done,
        refused: seen.refused,
        failed: seen.failed,
        hit_rate: output::rounded(reused as f64 / (computed + reused).max(1) as f64),
        ttft_ms: Quantiles::of(seen.first_tokens.iter().map(|ttft| ttft.as_secs_f64() * 1e3).collect()),
        prediction_error: Quantiles::of(figures.first_tokens.iter().map(error).collect()),
        added_us: output::rounded(figures.added_us as f64 / figures.requests.max(1) as f64),
        engines: requests.collect(),
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
            format!("{:.0} %", measured.prediction_error.p50 * 100.0),
            each.join(" "),
        ]);
    }
    format!(
        "Simulated: {} prefill and {} decode engines, {} conversations at a time, {} times faster than they are\n\n{}",
        args.prefill,
        args.decode,
        args.conversations,
        args.engine.speed(),
        table.render()
    )
}
