//! Compares transfers with iperf3 and memcpy, interleaved in one run, so that noise of the machine affects
//! all.
//!
//! A round runs each measurement once, theirs and ours in turn. Figures are medians over the rounds; ratios
//! are computed within a round and given as median (min–max). GB is 10^9 bytes, GiB is 2^30.
//!
//! CPU seconds count both ends. For iperf3: the CPU time of its two processes, which this process starts and
//! waits for, from `/proc/self/stat`. For ours: as `snowskin bench transfer` reports it, for both processes.

use crate::cmd::Cmd;
use crate::host::Host;
use crate::stats::{self, Spread};
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::hint::black_box;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;
/// Time for an iperf3 server to listen, milliseconds.
const LISTEN_MS_MAX: u64 = 3_000;

/// Options of `cargo xtask bench-iperf`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of rounds; figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 3)]
    seconds: u32,
    /// Congestion control, the same at both ends.
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// Requests per batch in the 1 MiB measurements over TCP: enough to fill the connection, few enough to
    /// stay in the CPU's caches, as iperf3's single buffer does.
    #[arg(long, default_value_t = 2)]
    depth: u32,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    json: bool,
    /// The `snowskin` binary; built with `--release` when not given.
    #[arg(long)]
    snowskin: Option<PathBuf>,
}

/// The result of one measurement in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    gb_s: f64,
    p50_us: f64,
    cpu_s_per_gib: f64,
}

/// A measurement: its name, and how to get a sample.
struct Measurement {
    name: &'static str,
    what: &'static str,
    kind: Kind,
}

enum Kind {
    Iperf { reverse: bool },
    Ours { fabric: &'static str, op: &'static str, block: &'static str, batch: u32 },
    Memcpy,
}

/// A ratio of ours to theirs, with its bound.
struct Ratio {
    name: &'static str,
    of: fn(&Sample) -> f64,
    ours: &'static str,
    theirs: &'static str,
    bound: Bound,
}

enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    fn holds(&self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= *bound,
            Self::AtMost(bound) => value <= *bound,
        }
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(bound) => write!(f, ">= {bound}"),
            Self::AtMost(bound) => write!(f, "<= {bound}"),
        }
    }
}

/// Runs the comparison and prints it. Missed bounds are shown but are not failures, because they depend on
/// the machine.
///
/// # Errors
/// iperf3 is missing, or one of the programs fails.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 0, "--rounds and --seconds must be at least 1");
    let host = Host::probe()?;
    let iperf_version = Cmd::new("iperf3 --version")
        .stdout(&host.root)
        .context("iperf3 is not installed: `apt-get install iperf3`")?;
    let snowskin = match &args.snowskin {
        Some(path) => path.clone(),
        None => {
            let build = Cmd::new("cargo build --quiet --release -p cli");
            eprintln!("$ {build}");
            build.run(&host.root, None).context("snowskin does not build")?;
            host.target_dir.join("release/snowskin")
        }
    };
    let takes_congestion = Cmd::default()
        .arg(snowskin.display().to_string())
        .arg("bench")
        .arg("transfer")
        .arg("--help")
        .stdout(&host.root)
        .is_some_and(|help| help.contains("--congestion"));
    ensure!(
        takes_congestion || args.congestion == "cubic",
        "this snowskin has no `--congestion`: it uses cubic within a host"
    );
    let bench = Bench { host: &host, args, snowskin, takes_congestion };

    let measurements = measurements(args.depth);
    let mut samples: BTreeMap<&'static str, Vec<Sample>> = BTreeMap::new();
    for round in 1..=args.rounds {
        for measurement in &measurements {
            let sample =
                bench.sample(&measurement.kind).with_context(|| format!("measuring {}", measurement.name))?;
            eprintln!(
                "round {round}/{}  {:<18} {:>8.3} GB/s  {:>9.1} us  {:.4} CPU-s/GiB",
                args.rounds, measurement.name, sample.gb_s, sample.p50_us, sample.cpu_s_per_gib
            );
            samples.entry(measurement.name).or_default().push(sample);
        }
    }
    let report = Report { args, measurements: &measurements, samples: &samples };
    if args.json {
        let version = iperf_version.lines().next().unwrap_or_default();
        println!("{:#}", report.json(version));
    } else {
        report.print();
    }
    Ok(())
}

fn measurements(depth: u32) -> Vec<Measurement> {
    let ours = |fabric, op, block, batch| Kind::Ours { fabric, op, block, batch };
    let row = |name, what, kind| Measurement { name, what, kind };
    vec![
        row("iperf3-write", "iperf3, 1 MiB, one stream", Kind::Iperf { reverse: false }),
        row("tcp-write-1m", "tcp write 1 MiB, one connection", ours("tcp", "write", "1MiB", depth)),
        row("tcp-write-4k", "tcp write 4 KiB, batch 128", ours("tcp", "write", "4KiB", 128)),
        row("iperf3-read", "iperf3 -R, 1 MiB, one stream", Kind::Iperf { reverse: true }),
        row("tcp-read-1m", "tcp read 1 MiB, one connection", ours("tcp", "read", "1MiB", depth)),
        row("tcp-read-4k", "tcp read 4 KiB, batch 128", ours("tcp", "read", "4KiB", 128)),
        row("tcp-read-4k-one", "tcp read 4 KiB, batch 1", ours("tcp", "read", "4KiB", 1)),
        row("memcpy-1m", "memcpy 1 MiB", Kind::Memcpy),
        row("shm-write-1m", "shm write 1 MiB, batch 1", ours("shm", "write", "1MiB", 1)),
        row("shm-read-1m", "shm read 1 MiB, batch 1", ours("shm", "read", "1MiB", 1)),
        row("shm-read-4k-one", "shm read 4 KiB, batch 1", ours("shm", "read", "4KiB", 1)),
    ]
}

fn ratios() -> Vec<Ratio> {
    let ratio = |name, of, ours, theirs, bound| Ratio { name, of, ours, theirs, bound };
    let gb_s: fn(&Sample) -> f64 = |sample| sample.gb_s;
    let cpu: fn(&Sample) -> f64 = |sample| sample.cpu_s_per_gib;
    vec![
        ratio("1 MiB write, GB/s", gb_s, "tcp-write-1m", "iperf3-write", Bound::AtLeast(0.9)),
        ratio("1 MiB read, GB/s", gb_s, "tcp-read-1m", "iperf3-read", Bound::AtLeast(0.9)),
        ratio("1 MiB write, CPU-s/GiB", cpu, "tcp-write-1m", "iperf3-write", Bound::AtMost(1.15)),
        ratio("1 MiB read, CPU-s/GiB", cpu, "tcp-read-1m", "iperf3-read", Bound::AtMost(1.15)),
        ratio("4 KiB x 128 write, GB/s", gb_s, "tcp-write-4k", "iperf3-write", Bound::AtLeast(0.35)),
        ratio("4 KiB x 128 read, GB/s", gb_s, "tcp-read-4k", "iperf3-read", Bound::AtLeast(0.35)),
        ratio("shm 1 MiB write, GB/s", gb_s, "shm-write-1m", "memcpy-1m", Bound::AtLeast(0.8)),
        ratio("shm 1 MiB read, GB/s", gb_s, "shm-read-1m", "memcpy-1m", Bound::AtLeast(0.8)),
    ]
}

struct Bench<'a> {
    host: &'a Host,
    args: &'a Args,
    snowskin: PathBuf,
    takes_congestion: bool,
}

impl Bench<'_> {
    fn sample(&self, kind: &Kind) -> Result<Sample> {
        match *kind {
            Kind::Iperf { reverse } => self.iperf(reverse),
            Kind::Ours { fabric, op, block, batch } => self.ours(fabric, op, block, batch),
            Kind::Memcpy => Ok(memcpy(Duration::from_secs(u64::from(self.args.seconds)))),
        }
    }

    fn iperf(&self, reverse: bool) -> Result<Sample> {
        let (gb_s, cpu_s_per_gib) = iperf(self.host, self.args.seconds, &self.args.congestion, reverse)?;
        Ok(Sample { gb_s, p50_us: 0.0, cpu_s_per_gib })
    }

    fn ours(&self, fabric: &str, op: &str, block: &str, batch: u32) -> Result<Sample> {
        let seconds = self.args.seconds;
        let mut cmd = Cmd::default().arg(self.snowskin.display().to_string());
        let options = format!(
            "bench transfer --fabric {fabric} --op {op} --block {block} --batch {batch} --threads 1 \
             --duration {seconds} --json"
        );
        for word in options.split_whitespace() {
            cmd = cmd.arg(word);
        }
        if fabric == "tcp" && self.takes_congestion {
            cmd = cmd.arg("--congestion").arg(&self.args.congestion);
        }
        let output =
            cmd.stdout(&self.host.root).with_context(|| format!("`{cmd}` failed: run it by hand"))?;
        let rows: Value = serde_json::from_str(&output).with_context(|| format!("`{cmd}` gave no JSON"))?;
        let row = rows.get(0).with_context(|| format!("`{cmd}` gave no row"))?;
        let field = |name: &str| row[name].as_f64().with_context(|| format!("`{cmd}`: no field `{name}`"));
        Ok(Sample { gb_s: field("gb_s")?, p50_us: field("p50_us")?, cpu_s_per_gib: field("cpu_s_per_gib")? })
    }
}

/// Runs one stream of iperf3 between two processes of this host. Returns 10^9 bytes per second, and CPU
/// seconds per GiB.
///
/// # Errors
/// iperf3 does not start, or its report has an unknown format.
pub(crate) fn iperf(host: &Host, seconds: u32, congestion: &str, reverse: bool) -> Result<(f64, f64)> {
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let cpu_before = children_cpu_seconds(host)?;
    let mut server = Cmd::new(&format!("iperf3 -s -1 -B 127.0.0.1 -p {port}"))
        .command(&host.root)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("iperf3 does not start")?;
    let mut client =
        Cmd::new(&format!("iperf3 -c 127.0.0.1 -p {port} -J -l 1M -P 1 -t {seconds} -C {congestion}"));
    if reverse {
        client = client.arg("-R");
    }
    let output = wait_for_listener(port, &mut server, LISTEN_MS_MAX).and_then(|()| {
        let output = client.command(&host.root).stdin(Stdio::null()).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    });
    if output.is_err() {
        // An error is ignored: the server may have ended by itself.
        let _already_gone = server.kill();
    }
    server.wait()?;
    let cpu_s = children_cpu_seconds(host)? - cpu_before;

    let report: Value = serde_json::from_str(&output?).context("iperf3 gave no JSON")?;
    if let Some(error) = report["error"].as_str() {
        bail!("iperf3: {error}");
    }
    let received = &report["end"]["sum_received"];
    let bytes = received["bytes"].as_f64().context("no bytes in iperf3's report")?;
    let seconds = received["seconds"].as_f64().context("no seconds in iperf3's report")?;
    Ok((bytes / seconds / 1e9, cpu_s / (bytes / GIB)))
}

/// CPU time of the child processes that have ended, seconds.
///
/// # Errors
/// `/proc/self/stat` has an unknown format.
pub(crate) fn children_cpu_seconds(host: &Host) -> Result<f64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let ticks = ticks_at(&stat, 13).context("/proc/self/stat has an unknown format")?;
    Ok(ticks as f64 / ticks_per_second(host))
}

/// CPU time that a process has used, seconds.
///
/// # Errors
/// The process does not exist.
pub(crate) fn cpu_seconds_of(host: &Host, process: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    let ticks = ticks_at(&stat, 11).context("/proc/PID/stat has an unknown format")?;
    Ok(ticks as f64 / ticks_per_second(host))
}

/// `utime + stime`, fields 14 and 15 (`at` is 11), or `cutime + cstime`, fields 16 and 17 (13). Field 2, the
/// program's name, may contain spaces; it ends at the last parenthesis.
fn ticks_at(stat: &str, at: usize) -> Option<u64> {
    let mut after_name = stat.rsplit_once(')')?.1.split_whitespace().skip(at);
    let user: u64 = after_name.next()?.parse().ok()?;
    let system: u64 = after_name.next()?.parse().ok()?;
    Some(user + system)
}

fn ticks_per_second(host: &Host) -> f64 {
    let answer = Cmd::new("getconf CLK_TCK").stdout(&host.root);
    answer.and_then(|text| text.trim().parse().ok()).unwrap_or(100.0)
}

/// Waits until `port` has a listener, by the kernel's table: a connection would use up a server that serves
/// only one.
///
/// # Errors
/// The server has ended, or does not listen in time.
pub(crate) fn wait_for_listener(port: u16, server: &mut Child, listen_ms_max: u64) -> Result<()> {
    let local = format!(":{port:04X} 00000000:0000 0A");
    let local_v6 = format!(":{port:04X} {:032}:0000 0A", 0);
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(listen_ms_max) {
        if let Some(status) = server.try_wait()? {
            bail!("the server ended at once: {status}");
        }
        let tables =
            ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
        if tables[0].contains(&local) || tables[1].contains(&local_v6) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    bail!("the server did not listen in time")
}

/// Copies 1 MiB blocks from one buffer to another in one thread.
fn memcpy(time: Duration) -> Sample {
    let source = vec![0x5au8; MIB];
    let mut destination = vec![0u8; MIB];
    let mut nanos: Vec<f64> = Vec::new();
    let began = Instant::now();
    while began.elapsed() < time {
        let copy_began = Instant::now();
        black_box(&mut destination[..]).copy_from_slice(black_box(&source[..]));
        nanos.push(copy_began.elapsed().as_nanos() as f64);
    }
    let seconds = began.elapsed().as_secs_f64();
    let bytes = (nanos.len() * MIB) as f64;
    let p50_us = Spread::of(&nanos).median / 1e3;
    Sample { gb_s: bytes / seconds / 1e9, p50_us, cpu_s_per_gib: seconds / (bytes / GIB) }
}

struct Report<'a> {
    args: &'a Args,
    measurements: &'a [Measurement],
    samples: &'a BTreeMap<&'static str, Vec<Sample>>,
}

impl Report<'_> {
    fn spread(&self, name: &str, of: impl Fn(&Sample) -> f64) -> Spread {
        let figures: Vec<f64> = self.samples.get(name).into_iter().flatten().map(of).collect();
        Spread::of(&figures)
    }

    fn ratio(&self, ratio: &Ratio) -> Spread {
        let of = |name| self.samples.get(name).into_iter().flatten().map(ratio.of);
        let figures: Vec<f64> =
            of(ratio.ours).zip(of(ratio.theirs)).map(|(ours, theirs)| ours / theirs).collect();
        Spread::of(&figures)
    }

    fn print(&self) {
        let words = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
        let mut rows = vec![words(&["measurement", "GB/s (min-max)", "p50 us", "CPU-s/GiB"])];
        for measurement in self.measurements {
            let gb_s = self.spread(measurement.name, |sample| sample.gb_s);
            let p50 = self.spread(measurement.name, |sample| sample.p50_us).median;
            let cpu = self.spread(measurement.name, |sample| sample.cpu_s_per_gib).median;
            rows.push(vec![
                measurement.what.to_owned(),
                format!("{:.2} ({:.2}-{:.2})", gb_s.median, gb_s.min, gb_s.max),
                if p50 > 0.0 { format!("{p50:.1}") } else { "-".to_owned() },
                format!("{cpu:.3}"),
            ]);
        }
        println!(
            "\n{} rounds of {} s, congestion control {}\n",
            self.args.rounds, self.args.seconds, self.args.congestion
        );
        println!("{}\n", stats::table(&rows));

        let mut rows = vec![words(&["ours / theirs", "median (min-max)", "bound", ""])];
        for ratio in ratios() {
            let spread = self.ratio(&ratio);
            rows.push(vec![
                ratio.name.to_owned(),
                format!("{:.2} ({:.2}-{:.2})", spread.median, spread.min, spread.max),
                ratio.bound.to_string(),
                if ratio.bound.holds(spread.median) { "ok" } else { "missed" }.to_owned(),
            ]);
        }
        println!("{}", stats::table(&rows));
    }

    fn json(&self, iperf_version: &str) -> Value {
        let spread = |spread: Spread| json!({"median": spread.median, "min": spread.min, "max": spread.max});
        let measured = self.measurements.iter().map(|measurement| {
            let name = measurement.name;
            json!({
                "name": name,
                "what": measurement.what,
                "gb_s": spread(self.spread(name, |sample| sample.gb_s)),
                "p50_us": spread(self.spread(name, |sample| sample.p50_us)),
                "cpu_s_per_gib": spread(self.spread(name, |sample| sample.cpu_s_per_gib)),
            })
        });
        let compared = ratios().into_iter().map(|ratio| {
            let value = self.ratio(&ratio);
            json!({
                "name": ratio.name,
                "ours": ratio.ours,
                "theirs": ratio.theirs,
                "ratio": spread(value),
                "bound": ratio.bound.to_string(),
                "ok": ratio.bound.holds(value.median),
            })
        });
        json!({
            "rounds": self.args.rounds,
            "seconds": self.args.seconds,
            "congestion": self.args.congestion,
            "iperf3": iperf_version,
            "measurements": measured.collect::<Vec<_>>(),
            "ratios": compared.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_children_is_read_behind_a_name_with_spaces() {
        let stat = "42 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 20 0";
        assert_eq!(ticks_at(stat, 11), Some(11 + 12));
        assert_eq!(ticks_at(stat, 13), Some(13 + 14));
        assert_eq!(ticks_at("nothing", 13), None);
    }

    #[test]
    fn every_ratio_compares_two_measurements_that_are_made() {
        let made = measurements(16);
        for ratio in ratios() {
            for name in [ratio.ours, ratio.theirs] {
                assert!(made.iter().any(|measurement| measurement.name == name), "{name}");
            }
        }
    }

    #[test]
    fn bounds_hold_on_their_own_side() {
        assert!(Bound::AtLeast(0.9).holds(0.9) && !Bound::AtLeast(0.9).holds(0.89));
        assert!(Bound::AtMost(1.15).holds(1.15) && !Bound::AtMost(1.15).holds(1.16));
    }
}
