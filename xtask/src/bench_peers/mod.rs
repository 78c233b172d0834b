//! Compares Snowskin with similar programs at the same work, interleaved in one run, so that noise of the
//! machine affects all.
//!
//! ```text
//!   install    Mooncake and NIXL from PyPI into a virtual environment in target/, the others from Debian,
//!              and the wheels of this repository, for the rows that call the package `mooncake`
//!   contest    the rows: the work, the participants, the ratios with bounds
//!   peer       the processes: two ends each, kept for the whole run where starting them is slow
//!   report     medians and ratios (median, min, max), as tables and as JSON
//! ```
//!
//! A round runs each contestant of each row once, one after the other; ratios are computed within a round.
//! The two ends are always two processes of this machine over loopback, with the same congestion control: the
//! run takes place in its own network namespace, where that can be set without changing the host's. CPU
//! seconds count both ends and servers. GB is 10^9 bytes, GiB is 2^30.

mod contest;
mod install;
mod peer;
mod report;

use crate::cmd::Cmd;
use crate::host::Host;
use anyhow::{Context as _, Result, ensure};
use contest::{Contestant, Row};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// Set in the environment of the process that runs inside the namespace.
const INSIDE: &str = "SNOWSKIN_BENCH_PEERS_INSIDE";

/// Options of `cargo xtask bench-peers`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of rounds; figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Congestion control of every connection.
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// Only rows whose name has one of these words: transfer, store, master, conductor, python, 4KiB, ...
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these contestants, besides Snowskin.
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Install nothing; programs that are missing are left out and named.
    #[arg(long)]
    no_install: bool,
    /// Write all results to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Print the tables as Markdown.
    #[arg(long)]
    markdown: bool,
    /// The `snowskin` binary; built with `--release` when not given.
    #[arg(long)]
    snowskin: Option<PathBuf>,
}

/// The result of one contestant at one row in one round. Values that it does not report are 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Throughput, 10^9 bytes per second.
    pub(crate) gb_s: f64,
    /// Requests, objects or keys per second.
    pub(crate) items_s: f64,
    /// Median latency of one call, microseconds.
    pub(crate) p50_us: f64,
    /// CPU time of all participating processes per 2^30 bytes, seconds.
    pub(crate) cpu_s_per_gib: f64,
    /// Items per second of the service's CPU time.
    pub(crate) items_per_cpu_s: f64,
    /// Memory of the master per object, bytes.
    pub(crate) bytes_per_object: f64,
}

/// All results: by row, by contestant, one sample per round.
pub(crate) type Samples = BTreeMap<String, BTreeMap<Contestant, Vec<Sample>>>;

/// Runs the comparison and prints it. Missed bounds are shown but are not failures, because they depend on
/// the machine.
///
/// # Errors
/// There is no program to compare with, or one fails to run.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 0.0, "--rounds and --seconds must be more than 0");
    let host = Host::probe()?;
    if std::env::var_os(INSIDE).is_none() {
        let peers = if args.no_install { install::present(&host) } else { install::install(&host)? };
        for (name, why) in &peers.missing {
            eprintln!("left out: {name}: {why}");
        }
        if !args.no_install && rows(args).iter().any(|row| matches!(row, Row::Python { .. })) {
            install::install_ours(&host)?;
        }
        if args.snowskin.is_none() {
            let build = Cmd::new("cargo build --quiet --release -p cli");
            eprintln!("$ {build}");
            build.run(&host.root, None).context("snowskin does not build")?;
        }
        return enter_namespace(&args.congestion);
    }

    let snowskin = args.snowskin.clone().unwrap_or_else(|| host.target_dir.join("release/snowskin"));
    let peers = install::present(&host);
    let mut rows = rows(args);
    ensure!(!rows.is_empty(), "--only names no row");
    // Its script needs packages that come with Dynamo's.
    rows.retain(|row| !matches!(row, Row::Conductor { op: "index" }) || peers.has(Contestant::Dynamo));
    let takes_part = |contestant: Contestant| match contestant {
        ours if ours.is_our_package() => peers.our_python.is_some(),
        ours if ours.is_ours() => true,
        peer => {
            peers.has(peer)
                && (args.against.is_empty() || args.against.iter().any(|name| name == peer.program()))
        }
    };
    let mut bench = peer::Bench::new(&host, &peers, snowskin, args.seconds);
    let mut samples = Samples::new();
    let mut failed = BTreeMap::new();
    for round in 1..=args.rounds {
        for row in &rows {
            for contestant in row.contestants().into_iter().filter(|&one| takes_part(one)) {
                if failed.contains_key(&(row.name(), contestant)) {
                    continue;
                }
                let sample = bench.sample(row, contestant);
                let sample = match sample {
                    // Another program that fails at a row is left out there; if Snowskin fails, the run
                    // fails.
                    Err(error) if !contestant.is_ours() => {
                        eprintln!("round {round}: {}: {contestant} failed: {error:#}", row.name());
                        failed.insert((row.name(), contestant), format!("{error:#}"));
                        bench.forget(contestant);
                        continue;
                    }
                    sample => sample.with_context(|| format!("measuring {contestant} at {}", row.name()))?,
                };
                eprintln!(
                    "round {round}/{}  {:<34} {:<14} {:>8.3} GB/s {:>10.0} /s {:>9.1} us {:>8.3} CPU-s/GiB",
                    args.rounds,
                    row.name(),
                    contestant.to_string(),
                    sample.gb_s,
                    sample.items_s,
                    sample.p50_us,
                    sample.cpu_s_per_gib
                );
                samples.entry(row.name()).or_default().entry(contestant).or_default().push(sample);
            }
        }
    }
    drop(bench);
    let report = report::Report { args, rows: &rows, samples: &samples, failed: &failed, peers: &peers };
    report.print();
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", report.json()))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The rows that `args` select.
fn rows(args: &Args) -> Vec<Row> {
    let chosen =
        |row: &Row| args.only.is_empty() || args.only.iter().any(|word| row.name().contains(word.as_str()));
    contest::rows().into_iter().filter(chosen).collect()
}

/// Runs this command again in its own network namespace with this congestion control.
///
/// Without the right to create one, the run uses the host's network, if that has this congestion control
/// already.
fn enter_namespace(congestion: &str) -> Result<()> {
    const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
    let own = std::env::current_exe().context("cannot find this program")?;
    let inside = "ip link set lo up && \
                  echo \"$0\" > /proc/sys/net/ipv4/tcp_congestion_control && exec \"$@\"";
    let possible =
        Command::new("unshare").args(["--net", "true"]).output().is_ok_and(|out| out.status.success());
    let mut command = if possible {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", inside, congestion]).arg(own);
        command
    } else {
        let host = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
        ensure!(
            host.trim() == congestion,
            "this host uses the congestion control `{}` and this user may not create a network namespace: \
            run as root, or pass --congestion {}",
            host.trim(),
            host.trim()
        );
        Command::new(own)
    };
    // A namespace may only choose among the algorithms that the host allows to everyone. This one is added
    // during the run.
    let before = std::fs::read_to_string(ALLOWED).unwrap_or_default();
    let widened = possible && !before.split_whitespace().any(|name| name == congestion);
    if widened {
        std::fs::write(ALLOWED, format!("{} {congestion}", before.trim()))
            .with_context(|| format!("the kernel does not know the congestion control `{congestion}`"))?;
    }
    let status = command.args(std::env::args_os().skip(1)).env(INSIDE, "1").status();
    if widened {
        std::fs::write(ALLOWED, before).with_context(|| format!("cannot write {ALLOWED} back"))?;
    }
    let status = status.context("cannot start this program again")?;
    ensure!(status.success(), "the comparison ended with {status}");
    Ok(())
}
