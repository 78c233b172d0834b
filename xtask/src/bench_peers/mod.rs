//! The same work done by us and by our peers, in one run: interleaved, so that a noisy machine is noisy for all.
//!
//! ```text
//!   install    Mooncake and NIXL from PyPI into a virtual environment of this project, the others from Debian
//!   contest    every row: who takes part, what they do, which ratios are judged
//!   peer       the processes: kept over the whole run where starting them is slow, two ends each
//!   report     medians and ratios (median, least, greatest), as tables and as JSON
//! ```
//!
//! A round runs each contestant of each row once, one after the other; ratios are taken within a round. Two ends always are
//! two processes of this machine over loopback, under the same congestion control: the run takes place in a network
//! namespace of its own, where that is set without touching the host's. CPU seconds count both ends, and servers.
//! GB is 10^9 bytes, GiB is 2^30.

mod contest;
mod install;
mod peer;
mod report;

use crate::cmd::Cmd;
use crate::host::Host;
use anyhow::{Context as _, Result, ensure};
use contest::Contestant;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// Set in the environment of the process that runs inside the namespace.
const INSIDE: &str = "SNOWSKIN_BENCH_PEERS_INSIDE";

/// Options of `cargo xtask bench-peers`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rounds; figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds for each measurement.
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// Congestion control of every connection.
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// Only rows whose name contains one of these words: transfer, store, master, 4KiB, ...
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these contestants beside ourselves.
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Install nothing; leave out who is missing, by name.
    #[arg(long)]
    no_install: bool,
    /// Write everything that was measured, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Print the tables as Markdown.
    #[arg(long)]
    markdown: bool,
    /// The `snowskin` binary; built with `--release` when not given.
    #[arg(long)]
    snowskin: Option<PathBuf>,
}

/// One run of one contestant at one row. What it does not tell is 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// 10^9 bytes a second.
    pub(crate) gb_s: f64,
    /// Requests, objects or keys a second.
    pub(crate) items_s: f64,
    /// Median latency of one call, microseconds.
    pub(crate) p50_us: f64,
    /// CPU time of all processes that took part, for each 2^30 bytes.
    pub(crate) cpu_s_per_gib: f64,
    /// Memory of the master for each object.
    pub(crate) bytes_per_object: f64,
}

/// What was measured: by row, by contestant, a sample a round.
pub(crate) type Samples = BTreeMap<String, BTreeMap<Contestant, Vec<Sample>>>;

/// Runs the comparison and prints it. Missed bounds are shown, not failed: they depend on the machine.
///
/// # Errors
/// When nobody can be compared with, or one side fails to run.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 0.0, "--rounds and --seconds must be more than 0");
    let host = Host::probe()?;
    if std::env::var_os(INSIDE).is_none() {
        let peers = if args.no_install { install::present(&host) } else { install::install(&host)? };
        for (name, why) in &peers.missing {
            eprintln!("left out: {name}: {why}");
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
    let rows: Vec<_> = contest::rows()
        .into_iter()
        .filter(|row| args.only.is_empty() || args.only.iter().any(|word| row.name().contains(word.as_str())))
        .collect();
    ensure!(!rows.is_empty(), "--only names no row");
    let takes_part = |contestant: Contestant| {
        contestant.is_ours()
            || (peers.has(contestant)
                && (args.against.is_empty() || args.against.iter().any(|name| name == contestant.program())))
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
                    // A peer that fails at one row is left out there; that we do not is what the run is about.
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

/// Runs this command again in a network namespace of its own, whose congestion control is set.
///
/// Without the right to make one, the run takes place on the host's network, if that already has it.
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
            "this host uses the congestion control `{}` and this user may make no network namespace: run as root, or pass \
             --congestion {}",
            host.trim(),
            host.trim()
        );
        Command::new(own)
    };
    // A namespace may only choose among what the host allows to everybody. For the time of the run, that is one more.
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
