//! Runs libFuzzer on every parser of input from peers, files and users.
//!
//! The targets are in `fuzz/`, a separate workspace with the layout of cargo-fuzz, so `cargo fuzz run NAME`
//! works there too. This runner does not need cargo-fuzz: it builds them with the same instrumentation and
//! starts several at a time.

use crate::cmd::Cmd;
use crate::host::Host;
use anyhow::{Context as _, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Coverage for libFuzzer, AddressSanitizer, and checks that release builds leave out: the flags of
/// cargo-fuzz.
const INSTRUMENTATION: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
    -Zsanitizer=address -Ccodegen-units=1 --cfg fuzzing";

/// Memory per target, MiB, and time per input, seconds: more of either is a finding.
const RSS_MIB_MAX: u32 = 2048;
const INPUT_SECONDS_MAX: u32 = 10;
/// Longest input, bytes.
const INPUT_BYTES_MAX: u32 = 64 * 1024;
/// Lines of a target's log that are shown after a finding.
const LOG_LINES_SHOWN: usize = 60;

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args, Clone)]
pub(crate) struct Args {
    /// Targets to run; all by default.
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// Seconds per target.
    #[arg(long, default_value_t = 60)]
    pub(crate) seconds: u64,
    /// Targets that run at the same time; one per core by default.
    #[arg(long)]
    jobs: Option<usize>,
    /// List the targets without running them.
    #[arg(long)]
    list: bool,
}

impl Args {
    /// All targets for `seconds` each, but at most `seconds_total` of wall time for `count` of them.
    pub(crate) fn within(seconds: u64, seconds_total: u64, count: usize) -> Self {
        let rounds = count.div_ceil(jobs(None)).max(1) as u64;
        let seconds = seconds.min(seconds_total / rounds).max(1);
        Self { targets: Vec::new(), seconds, jobs: None, list: false }
    }
}

/// Names of the targets: the files in `fuzz/fuzz_targets`.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn targets(root: &Path) -> Result<Vec<String>> {
    let dir = root.join("fuzz/fuzz_targets");
    let mut names = Vec::new();
    for entry in
        fs::read_dir(&dir).with_context(|| format!("no fuzz targets: cannot read {}", dir.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// Builds the targets and runs them.
///
/// # Errors
/// There is no nightly toolchain, the build fails, or a target has a finding.
pub(crate) fn run(args: &Args) -> Result<()> {
    let host = Host::probe()?;
    let known = targets(&host.root)?;
    if args.list {
        known.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    for name in &args.targets {
        ensure!(known.contains(name), "no fuzz target `{name}`; there are: {}", known.join(", "));
    }
    ensure!(
        host.nightly,
        "fuzzing needs a nightly toolchain for the sanitizer: `rustup toolchain install nightly`"
    );
    let chosen = if args.targets.is_empty() { &known } else { &args.targets };

    let binaries = build(&host)?;
    let mut waiting = chosen.iter();
    let mut running: Vec<Run> = Vec::new();
    let mut failed = Vec::new();
    loop {
        while running.len() < jobs(args.jobs) {
            let Some(name) = waiting.next() else { break };
            running.push(Run::start(&host, &binaries, name, args.seconds)?);
        }
        if running.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
        let mut still_running = Vec::new();
        for mut run in running {
            match run.child.try_wait()? {
                None => still_running.push(run),
                Some(status) if status.success() => println!("      {}: ok, {}", run.name, run.summary()),
                Some(status) => {
                    println!("      {}: FAILED ({status})\n{}", run.name, run.log_tail());
                    failed.push(run.name);
                }
            }
        }
        running = still_running;
    }
    if failed.is_empty() {
        return Ok(());
    }
    let what = failed.join(", ");
    bail!("{what}: the input is in fuzz/artifacts/<target>/; add it as a test before fixing the bug")
}

/// A running target.
struct Run {
    name: String,
    child: Child,
    log: File,
}

impl Run {
    fn start(host: &Host, binaries: &Path, name: &str, seconds: u64) -> Result<Self> {
        let found = fuzz_state(host).join("corpus").join(name);
        let artifacts = host.root.join("fuzz/artifacts").join(name);
        fs::create_dir_all(&found)?;
        fs::create_dir_all(&artifacts)?;
        let log_path = fuzz_state(host).join(format!("{name}.log"));
        let log = File::options().create(true).truncate(true).read(true).write(true).open(&log_path)?;

        let mut cmd = Cmd::default()
            .arg(binaries.join(name).display().to_string())
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-rss_limit_mb={RSS_MIB_MAX}"))
            .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
            .arg(format!("-max_len={INPUT_BYTES_MAX}"))
            .arg("-print_final_stats=1")
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            // New inputs are written to the first directory; the second, in the tree, is only read.
            .arg(found.display().to_string());
        let seeds = host.root.join("fuzz/corpus").join(name);
        if seeds.is_dir() {
            cmd = cmd.arg(seeds.display().to_string());
        }
        println!("      $ {cmd}");
        let child = cmd
            .command(&host.root)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log.try_clone()?)
            .spawn()
            .with_context(|| format!("cannot start {name}: is it a [[bin]] in fuzz/Cargo.toml?"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    fn log_text(&self) -> String {
        let mut bytes = Vec::new();
        // A log that cannot be read is shown as empty; the result is the exit code.
        let mut log = &self.log;
        let read = log.seek(SeekFrom::Start(0)).and_then(|_| log.read_to_end(&mut bytes));
        read.map(|_| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn summary(&self) -> String {
        let text = self.log_text();
        let stat = |name: &str| {
            let line = text.lines().rev().find(|line| line.contains(name))?;
            line.split_whitespace().last().map(str::to_owned)
        };
        let coverage = text.lines().rev().find_map(|line| {
            let mut words = line.split_whitespace().skip_while(|word| *word != "cov:");
            words.nth(1).map(str::to_owned)
        });
        let runs = stat("stat::number_of_executed_units").unwrap_or_else(|| "?".to_owned());
        format!("{runs} runs, {} edges covered", coverage.unwrap_or_else(|| "?".to_owned()))
    }

    fn log_tail(&self) -> String {
        let text = self.log_text();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }
}

/// Builds all targets; returns the directory of the binaries.
fn build(host: &Host) -> Result<PathBuf> {
    let build_dir = fuzz_state(host).join("build");
    let cmd = Cmd::new("cargo +nightly build --release --bins --manifest-path fuzz/Cargo.toml --locked")
        // With an explicit target, build scripts and proc macros are not instrumented.
        .arg(format!("--target={}", host.host_target))
        .env("RUSTFLAGS", INSTRUMENTATION)
        .env("CARGO_TARGET_DIR", build_dir.display().to_string());
    println!("      $ {cmd}");
    cmd.run(&host.root, None).context(
        "the fuzz targets do not build; if only their lock file is out of date, run \
         `cargo update --workspace --manifest-path fuzz/Cargo.toml`",
    )?;
    Ok(build_dir.join(&host.host_target).join("release"))
}

/// Directory of logs, binaries and inputs found so far: outside of the tree, and kept between runs.
fn fuzz_state(host: &Host) -> PathBuf {
    host.target_dir.join("fuzz")
}

fn jobs(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_targets_share_the_time_that_there_is() {
        let one_round = jobs(None);
        assert_eq!(Args::within(60, 240, one_round).seconds, 60);
        assert_eq!(Args::within(60, 240, one_round * 8).seconds, 30);
        assert_eq!(Args::within(60, 1, one_round * 8).seconds, 1);
    }
}
