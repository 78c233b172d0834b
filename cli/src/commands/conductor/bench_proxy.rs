//! `snowskin conductor bench-proxy`: what a proxy adds, with engines that answer at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use conductor::demo::settings_of;
use conductor::mock::{MockEngines, Role, ask};
use conductor::proxy::{ConnectionLimits, Limits, Pool, ProxyServer};
use conductor::{Conductor, Config, PolicyName, ScheduleConfig};
use serde::Serialize;

use super::serve::no_start;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::output::{self, Align, Table};
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin conductor bench-proxy
  snowskin conductor bench-proxy --against 127.0.0.1:30000 --engine 127.0.0.1:18101 --engine 127.0.0.1:18102
  python -m sglang_router.launch_router --port 30000 --worker-urls http://127.0.0.1:18101 http://127.0.0.1:18102";

/// How long another proxy may take until it answers.
const START_TIME_MAX: Duration = Duration::from_secs(90);

/// Measure what the proxy adds to the time to the first token, and how many requests per second it serves
///
/// Mock engines answer at once. Each round measures requests to an engine itself, through the proxy, and
/// through another proxy in front of the same engines, if there is one; the table has the rounds' median.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Address of a mock engine; twice or more for several [default: two with free ports].
    #[arg(long, value_name = "ADDR:PORT")]
    engine: Vec<SocketAddr>,
    /// Another proxy to compare with, which has these engines; it is waited for.
    #[arg(long, value_name = "ADDR:PORT")]
    against: Option<SocketAddr>,
    /// Rounds.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// How long each measurement takes.
    #[arg(long, default_value_t = 1_000, value_name = "MS", value_parser = clap::value_parser!(u64).range(10..=600_000))]
    ms: u64,
    /// Requests at a time, where requests per second are measured.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4_096))]
    concurrency: u32,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4_096))]
    output_tokens: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What one way to an engine gave.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    what: &'static str,
    /// Time to the first token of one request at a time, median, microseconds.
    ttft_us: f64,
    /// Requests per second.
    per_s: f64,
    failed: u64,
}

pub(super) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let listen = if args.engine.is_empty() { vec![any; 2] } else { args.engine.clone() };
    let engine =
        |listen| conductor::mock::MockConfig { listen, speed: 0.0, role: Role::Both, ..Default::default() };
    let engines = MockEngines::start(listen.into_iter().map(engine).collect())
        .context("cannot start the mock engines")?;
    let settings = Config {
        listen: any,
        engines: engines.engines().iter().enumerate().map(|(at, engine)| settings_of(at, engine)).collect(),
        schedule: ScheduleConfig {
            policy: PolicyName::Cost,
            ttft_slo_ms: 0,
            tbt_slo_ms: 0,
            ..ScheduleConfig::default()
        },
        ..Config::default()
    };
    let serving = Conductor::bind(settings).and_then(Conductor::spawn).map_err(no_start)?;
    let proxy = ProxyServer::start(any, serving.place(), Limits::default(), ConnectionLimits::default(), 1)
        .context("cannot start the proxy")?;
    let [first, ..] = engines.engines() else { return fail(Failure::failed("no engine was started")) };
    let mut ways = vec![("engine itself", first.http()), ("snowskin proxy", proxy.addr())];
    ways.extend(args.against.map(|addr| ("other proxy", addr)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut rounds: Vec<Vec<Measured>> = Vec::new();
    let result: anyhow::Result<()> = runtime.block_on(async {
        if let Some(addr) = args.against {
            wait_for(addr, args).await?;
        }
        for _ in 0..args.rounds {
            let mut round = Vec::new();
            for &(what, addr) in &ways {
                if let Some(exit) = sys::interrupted() {
                    return fail(Failure::silent(exit));
                }
                round.push(measure(what, addr, args).await?);
            }
            rounds.push(round);
        }
        Ok(())
    });
    result?;
    let medians: Vec<Measured> = (0..ways.len()).map(|way| median(&rounds, way)).collect();
    if args.json {
        output::print_json(&medians)?;
    } else {
        output::print(&rendered(&medians))?;
    }
    Ok(Exit::Ok)
}

fn body(args: &Args, at: u64) -> hyper::body::Bytes {
    let text = format!("{at}: what is a horse?");
    let body = serde_json::json!({"model": "mock", "messages": [{"role": "user", "content": text}],
        "max_tokens": args.output_tokens, "stream": true});
    body.to_string().into()
}

const PATH: &str = "/v1/chat/completions";

async fn wait_for(addr: SocketAddr, args: &Args) -> anyhow::Result<()> {
    let (pool, begun) = (Pool::new(&addr.to_string())?, Instant::now());
    while begun.elapsed() < START_TIME_MAX {
        if ask(&pool, PATH, &body(args, 0)).await.is_ok_and(|answered| answered.is_done) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    fail(Failure::failed(format!("--against {addr}: it did not answer within {START_TIME_MAX:?}")))
}

async fn measure(what: &'static str, addr: SocketAddr, args: &Args) -> anyhow::Result<Measured> {
    let pool = Arc::new(Pool::new(&addr.to_string())?);
    let length = Duration::from_millis(args.ms);
    let (mut failed, mut at) = (0, 0);
    let mut firsts = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < length {
        at += 1;
        match ask(&pool, PATH, &body(args, at % 64)).await {
            Ok(answered) if answered.is_done => firsts.extend(answered.first_token),
            _ => failed += 1,
        }
    }
    firsts.sort_unstable();
    let ttft = firsts.get(firsts.len() / 2).copied().unwrap_or_default();
    let begun = Instant::now();
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..args.concurrency {
        let (pool, bodies) = (Arc::clone(&pool), (0..64).map(|at| body(args, at)).collect::<Vec<_>>());
        clients.spawn(async move {
            let (mut done, mut failed) = (0_u64, 0_u64);
            while begun.elapsed() < length {
                let body = &bodies[(client as usize + done as usize) % bodies.len()];
                match ask(&pool, PATH, body).await {
                    Ok(answered) if answered.is_done => done += 1,
                    _ => failed += 1,
                }
            }
            (done, failed)
        });
    }
    let mut done = 0;
    while let Some(client) = clients.join_next().await {
        let (its, bad) = client?;
        done += its;
        failed += bad;
    }
    let per_s = done as f64 / begun.elapsed().as_secs_f64();
    Ok(Measured { what, ttft_us: ttft.as_secs_f64() * 1e6, per_s, failed })
}

fn median(rounds: &[Vec<Measured>], way: usize) -> Measured {
    let of = |value: fn(&Measured) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(|round| value(&round[way])).collect();
        values.sort_by(f64::total_cmp);
        output::rounded(values[values.len() / 2])
    };
    Measured {
        what: rounds[0][way].what,
        ttft_us: of(|measured| measured.ttft_us),
        per_s: of(|measured| measured.per_s),
        failed: rounds.iter().map(|round| round[way].failed).sum(),
    }
}

fn rendered(all: &[Measured]) -> String {
    let columns = [
        ("requests to", Align::Left),
        ("TTFT p50 µs", Align::Right),
        ("added µs", Align::Right),
        ("requests/s", Align::Right),
        ("failed", Align::Right),
    ];
    let mut table = Table::new(&columns);
    for measured in all {
        table.row([
            measured.what.to_owned(),
            output::figure(measured.ttft_us),
            output::figure(measured.ttft_us - all[0].ttft_us),
            output::figure(measured.per_s),
            measured.failed.to_string(),
        ]);
    }
    table.render()
}
