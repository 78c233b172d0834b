//! Every check, in an order in which the fast ones that find most come first.
//!
//! A step is a name and some work. All steps run even when one fails. The table at the end has a line per
//! step, and the exit code reports whether any failed. A step that cannot run on this machine is skipped,
//! with the reason in the table.

use crate::cmd::Cmd;
use crate::host::Host;
use crate::{bindgen, fuzz, lab, stats, tidy, wheel};
use anyhow::{Result, bail, ensure};
use std::time::{Duration, Instant};

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these steps (repeat the option, or separate them with commas).
    #[arg(long, value_delimiter = ',', value_name = "STEP")]
    only: Vec<String>,
    /// Leave these steps out.
    #[arg(long, value_delimiter = ',', value_name = "STEP")]
    skip: Vec<String>,
    /// List the steps and their commands without running them.
    #[arg(long)]
    list: bool,
    /// Seconds per fuzz target; all of them together get no more than `--fuzz-seconds-total`.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    fuzz_seconds: u64,
    /// Seconds of wall time for all fuzz targets together.
    #[arg(long, default_value_t = 240, value_name = "SECONDS")]
    fuzz_seconds_total: u64,
}

/// A named check.
struct Step {
    name: &'static str,
    what: &'static str,
    /// Time limit for each command of the step, seconds; enforced by coreutils' `timeout` when `CI` is set.
    limit_s: u64,
    plan: Plan,
}

enum Plan {
    /// Commands and checks, all of which run, and a note for the table.
    Run(Vec<Work>, String),
    /// Not on this machine, and why.
    Skip(String),
}

impl Plan {
    /// Adds a note on features that are left out on this machine, and why.
    fn noting(self, host: &Host) -> Self {
        match (self, &host.without_linked) {
            (Self::Run(works, note), Some(why)) if note.is_empty() => Self::Run(works, why.clone()),
            (Self::Run(works, note), Some(why)) => Self::Run(works, format!("{note}; {why}")),
            (plan, _) => plan,
        }
    }
}

enum Work {
    Command(Cmd),
    Check(&'static str, Box<dyn Fn() -> Result<()>>),
}

/// The result of a step, for the table.
struct Ended {
    name: &'static str,
    result: &'static str,
    took: Duration,
    note: String,
}

/// Runs the steps that `args` select.
///
/// # Errors
/// A step failed, or `args` name a step that does not exist.
pub(crate) fn run(args: &Args) -> Result<()> {
    let host = Host::probe()?;
    let steps = steps(&host, args);
    for name in args.only.iter().chain(&args.skip) {
        let known = || steps.iter().map(|step| step.name).collect::<Vec<_>>().join(", ");
        ensure!(steps.iter().any(|step| step.name == name), "no step `{name}`; there are: {}", known());
    }
    if args.list {
        list(&steps);
        return Ok(());
    }

    let chosen = |step: &&Step| {
        let named = |names: &[String]| names.iter().any(|name| name == step.name);
        (args.only.is_empty() || named(&args.only)) && !named(&args.skip)
    };
    let unattended = std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false");
    let began = Instant::now();
    let ended: Vec<Ended> =
        steps.iter().filter(chosen).map(|step| run_step(&host, step, unattended)).collect();
    print_summary(&ended, began.elapsed());
    let failed: Vec<&str> =
        ended.iter().filter(|ended| ended.result == "FAILED").map(|ended| ended.name).collect();
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {}; repeat with `cargo xtask ci --only {}`", failed.join(", "), failed.join(","))
}

fn run_step(host: &Host, step: &Step, unattended: bool) -> Ended {
    println!("\n==> {}: {}", step.name, step.what);
    let began = Instant::now();
    let end = |result, note| Ended { name: step.name, result, took: began.elapsed(), note };
    let (works, note) = match &step.plan {
        Plan::Skip(reason) => {
            println!("    skipped: {reason}");
            return end("skipped", reason.clone());
        }
        Plan::Run(works, note) => (works, note),
    };
    let mut failures = Vec::new();
    for work in works {
        let outcome = match work {
            Work::Command(cmd) => {
                println!("    $ {cmd}");
                cmd.run(&host.root, unattended.then_some(step.limit_s))
            }
            Work::Check(what, check) => {
                println!("    - {what}");
                check()
            }
        };
        if let Err(error) = outcome {
            println!("    FAILED: {error:#}");
            let what = match work {
                Work::Command(cmd) => cmd.to_string(),
                Work::Check(what, _) => (*what).to_owned(),
            };
            failures.push(format!("{what}: {error:#}"));
        }
    }
    let (result, note) = match failures.first() {
        None => ("ok", note.clone()),
        Some(first) if failures.len() == 1 => ("FAILED", first.clone()),
        Some(first) => ("FAILED", format!("{first} (and {} more)", failures.len() - 1)),
    };
    let ended = end(result, note);
    println!("    {} after {}", ended.result, stats::duration(ended.took));
    ended
}

fn list(steps: &[Step]) {
    for step in steps {
        println!("{}: {}", step.name, step.what);
        match &step.plan {
            Plan::Skip(reason) => println!("    skipped here: {reason}"),
            Plan::Run(works, _) => works.iter().for_each(|work| match work {
                Work::Command(cmd) => println!("    $ {cmd}"),
                Work::Check(what, _) => println!("    - {what}"),
            }),
        }
    }
}

fn print_summary(ended: &[Ended], took: Duration) {
    let mut rows = vec![["step", "result", "time", "note"].map(str::to_owned).to_vec()];
    rows.extend(ended.iter().map(|ended| {
        vec![ended.name.to_owned(), ended.result.to_owned(), stats::duration(ended.took), ended.note.clone()]
    }));
    let count = |result| ended.iter().filter(|ended| ended.result == result).count();
    println!("\n{}\n", stats::table(&rows));
    println!(
        "{} steps in {}: {} ok, {} failed, {} skipped",
        ended.len(),
        stats::duration(took),
        count("ok"),
        count("FAILED"),
        count("skipped"),
    );
}

fn steps(host: &Host, args: &Args) -> Vec<Step> {
    let step = |name, what, limit_s, plan| Step { name, what, limit_s, plan };
    vec![
        step(
            "fmt",
            "formatting",
            60,
            commands(["cargo fmt --all --check", "cargo fmt --manifest-path fuzz/Cargo.toml --check"]),
        ),
        step("tidy", "house rules", 60, checks("sources, manifests, documents", tidy::run)),
        step("alerts", "Prometheus rules and their tests", 60, alerts(host)),
        step("bindgen", "the layout of libibverbs' structures agrees with its headers", 60, bindings()),
        step("clippy", "lints of all targets, with default features and with all features", 600, lints(host)),
        step("features", "each feature alone, and none", 600, feature_sets(host)),
        step("msrv", "the oldest supported compiler", 600, msrv(host)),
        step("doc", "documentation without warnings", 600, docs(host)),
        step("test", "unit, property, conformance and process tests", 900, tests(host, "--workspace")),
        step(
            "seeds",
            "simulations of several masters with disks, and of a disk that fails",
            900,
            simulations(),
        ),
        step("doctest", "examples in the documentation", 600, commands(["cargo test --workspace --doc"])),
        step(
            "test-features",
            "the fabrics again, with features that change how they work",
            900,
            tests_with_features(host, &["te-metadata", "te-host", "te-tcp"]),
        ),
        step("no-std", "te-core, store-core and conductor-core without std", 300, no_std(host)),
        step("loom", "every interleaving of what is ordered by hand", 900, loom(host)),
        step("bench-smoke", "each benchmark once", 600, commands(["cargo test --workspace --bench *"])),
        step("fuzz", "parsers of input from peers, files and users", 900, fuzzing(host, args)),
        step("miri", "undefined behaviour in te-core", 900, miri(host)),
        step("lab", "the fabrics on emulated devices, faults included", 1500, in_lab()),
        step("python", "the Python wheels, installed into a clean environment and tested", 1500, python()),
        step("deny", "licences, advisories, sources", 120, deny(host)),
        step(
            "replay",
            "the main use case, as the README starts it",
            600,
            commands(["cargo run --release -- replay --requests 100 --json"]),
        ),
        step(
            "soak-ha",
            "masters under load are killed and hand over; nothing acknowledged is lost",
            600,
            soak_ha(host),
        ),
        step("buckets", "packs in a bucket of a real S3 server", 900, buckets()),
        step("agreement", "a real replay has the hit rate of the simulation", 300, agreement(host)),
        step(
            "deploy",
            "the image, the compose file and the units, checked against the program",
            300,
            commands(["cargo xtask deploy", "cargo xtask image"]),
        ),
    ]
}

fn commands<const N: usize>(lines: [&str; N]) -> Plan {
    Plan::Run(lines.map(|line| Work::Command(Cmd::new(line))).into(), String::new())
}

fn checks(what: &'static str, check: fn() -> Result<()>) -> Plan {
    Plan::Run(vec![Work::Check(what, Box::new(check))], String::new())
}

/// Uses the trace that `SNOWSKIN_TRACE` names, or one beside the checkout. Without either, uses a generated
/// workload and only the two policies for which batches of puts make no difference in a small pool.
fn agreement(host: &Host) -> Plan {
    const BESIDE: &str = "../shared/traces/conversation_trace.jsonl";
    let named = std::env::var_os("SNOWSKIN_TRACE").map(std::path::PathBuf::from);
    let trace = named.unwrap_or_else(|| host.root.join(BESIDE));
    let replay = Cmd::new("cargo run --release -- replay --compare");
    let (command, note) = if trace.exists() {
        let all = replay.arg("--policies").arg("all").arg("--capacity-blocks").arg("10000,20000");
        (all.arg("--trace").arg(trace.display().to_string()), String::new())
    } else {
        let note = "generated requests, because there is no trace: set SNOWSKIN_TRACE".to_owned();
        (replay.arg("--policies").arg("trial,lru"), note)
    };
    Plan::Run(vec![Work::Command(command)], note)
}

/// With the programs as the tests are built, which is without the feature `etcd`: a directory is the arbiter.
fn soak_ha(host: &Host) -> Plan {
    let at = |path: &str| host.target_dir.join("debug").join(path).display().to_string();
    let soak = |words: &str| {
        let soak = Cmd::new(&format!("cargo xtask soak --ha --seed 1 {words}"));
        let soak = soak.arg("--binary").arg(at("snowskin"));
        Work::Command(soak.arg("--clients-binary").arg(at("examples/soak_ha")))
    };
    let build = Cmd::new("cargo build --profile test --workspace --bin snowskin --example soak_ha");
    let masters = soak("--disk --faults kill-leader,kill-standby,kill-node,switchover --kills 50");
    Plan::Run(vec![Work::Command(build), masters], "50 kills".to_owned())
}

/// The tests run fewer seeds of these. Other tests with the same names of files have no such tests.
fn simulations() -> Plan {
    let seeds = std::env::var("SNOWSKIN_SEEDS");
    let test = |line: &str, most: &str| {
        let test = Cmd::new(&format!("cargo test --workspace {line}"));
        Work::Command(test.env("SNOWSKIN_SEEDS", seeds.clone().unwrap_or_else(|_| most.to_owned())))
    };
    let works = vec![
        test("--test ha -- members_and_nodes_with_disks", "2000"),
        test("--test disk -- whatever_", "2000"),
    ];
    Plan::Run(works, "2,000 seeds of masters with nodes and disks, and of a disk that fails".to_owned())
}

fn alerts(host: &Host) -> Plan {
    if !host.promtool {
        return Plan::Skip("promtool is not installed: `apt-get install prometheus`".to_owned());
    }
    commands([
        "promtool check rules deploy/prometheus/alerts.yml",
        "promtool test rules deploy/prometheus/alerts_test.yml",
    ])
}

fn bindings() -> Plan {
    match bindgen::obstacle() {
        Some(obstacle) => Plan::Skip(obstacle),
        None => checks("cargo xtask bindgen --check", || bindgen::run(&bindgen::Args::check())),
    }
}

fn python() -> Plan {
    match wheel::obstacle() {
        Some(obstacle) => Plan::Skip(obstacle),
        None => checks("cargo xtask wheel --test", || wheel::run(&wheel::Args::tested())),
    }
}

fn tests(host: &Host, selection: &str) -> Plan {
    let runner = if host.nextest { "cargo nextest run" } else { "cargo test --tests" };
    let note = if host.nextest { "nextest" } else { "cargo test; nextest is not installed" };
    Plan::Run(vec![Work::Command(Cmd::new(&format!("{runner} {selection}")))], note.to_owned())
}

fn tests_with_features(host: &Host, packages: &[&str]) -> Plan {
    let selection = format!("-p {} {}", packages.join(" -p "), host.all_features(packages));
    tests(host, &selection).noting(host)
}

/// Packs in buckets, whose server is a dependency of these tests alone. With the whole workspace, so that
/// what was built for its tests is used again.
fn buckets() -> Plan {
    commands([
        "cargo test --workspace --features cli/s3-testkit --test bucket",
        "cargo test --workspace --features cli/s3-testkit --lib -- bucket",
    ])
}

fn lints(host: &Host) -> Plan {
    let all = host.all_features(&[]);
    let lines = ["", &all]
        .map(|features| format!("cargo clippy --workspace --all-targets {features} -- -D warnings"));
    commands(lines.each_ref().map(String::as_str)).noting(host)
}

fn docs(host: &Host) -> Plan {
    let cmd = Cmd::new(&format!("cargo doc --workspace --no-deps {}", host.all_features(&[])))
        .env("RUSTDOCFLAGS", "-D warnings");
    Plan::Run(vec![Work::Command(cmd)], String::new()).noting(host)
}

/// For each package with features: none of them, each alone, all. A feature of the command line alone is that
/// feature alone of each library that has it, too: those are linted with it.
fn feature_sets(host: &Host) -> Plan {
    let cli = host.packages.iter().find(|package| package.name == "cli");
    let of_cli: Vec<&str> = cli.into_iter().flat_map(|cli| host.features(cli)).collect();
    let mut works = Vec::new();
    for package in &host.packages {
        let is_below = ["te-engine", "store-client"].contains(&package.name.as_str());
        // What only tests have is built with all features.
        let features = host.features(package).filter(|feature| *feature != "s3-testkit");
        let features = features.filter(|feature| !is_below || !of_cli.contains(feature));
        let features: Vec<&str> = features.collect();
        if features.is_empty() {
            continue;
        }
        // The step clippy has all of them together: that is the only one alone where there is no other.
        let alone = if features.len() > 1 { &features[..] } else { &[] };
        let mut sets = vec!["--no-default-features".to_owned()];
        sets.extend(alone.iter().map(|feature| format!("--no-default-features --features {feature}")));
        works.extend(sets.into_iter().map(|set| {
            Work::Command(Cmd::new(&format!("cargo clippy --quiet -p {} {set} -- -D warnings", package.name)))
        }));
    }
    let note = format!("{} combinations", works.len());
    Plan::Run(works, note).noting(host)
}

/// Clippy's `incompatible_msrv` finds newer library functions; the compiler itself finds newer syntax as
/// well.
fn msrv(host: &Host) -> Plan {
    let version = &host.rust_version;
    if !host.rust_version_installed {
        return Plan::Skip(format!(
            "Rust {version} is not installed; clippy has checked the library functions"
        ));
    }
    let cmd = Cmd::new(&format!("cargo +{version} check --workspace {}", host.all_features(&[])))
        .env("CARGO_TARGET_DIR", host.target_dir.join("msrv").display().to_string());
    Plan::Run(vec![Work::Command(cmd)], String::new()).noting(host)
}

/// A build proves little on a host with std: the example is linked without it, and so are the bare-metal
/// targets.
fn no_std(host: &Host) -> Plan {
    const CRATES: &str = "-p te-core -p store-core -p conductor-core --lib --no-default-features";
    let mut works = vec![Work::Command(Cmd::new(&format!("cargo check {CRATES}")))];
    let example = host.root.join("te-core/examples/embed.rs");
    if example.exists() {
        works.extend(link_without_std(host).into_iter().map(Work::Command));
    }
    for target in &host.bare_metal_targets {
        works.push(Work::Command(Cmd::new(&format!("cargo check {CRATES} --target {target}"))));
    }
    let note = match host.bare_metal_targets.as_slice() {
        [] => "host only; no bare-metal target is installed".to_owned(),
        targets => targets.join(", "),
    };
    Plan::Run(works, note)
}

/// The example that embeds te-core: with std, and linked against the C library only. Both run.
fn link_without_std(host: &Host) -> Vec<Cmd> {
    let target_dir = host.target_dir.join("no-std");
    vec![
        Cmd::new("cargo run --quiet -p te-core --example embed"),
        Cmd::new("cargo rustc --quiet -p te-core --example embed --no-default-features --")
            .arg("-Cpanic=abort")
            .arg("-Clink-arg=-nostartfiles")
            .env("CARGO_TARGET_DIR", target_dir.display().to_string()),
        Cmd::default().arg(target_dir.join("debug/examples/embed").display().to_string()),
    ]
}

/// Another `--cfg` for the whole tree needs its own target directory, because it would rebuild everything in
/// the shared one.
fn loom(host: &Host) -> Plan {
    let cmd = Cmd::new("cargo test -p te-core -p te-host -p te-engine --release")
        .arg("--test=loom_mailbox")
        .arg("--test=loom_grant")
        .arg("--test=loom_held")
        .arg("--test=loom_ordered")
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", host.target_dir.join("loom").display().to_string())
        .env("CARGO_PROFILE_RELEASE_LTO", "off");
    Plan::Run(vec![Work::Command(cmd)], String::new())
}

fn fuzzing(host: &Host, args: &Args) -> Plan {
    if !host.nightly {
        return Plan::Skip("no nightly toolchain: `rustup toolchain install nightly`".to_owned());
    }
    let targets = match fuzz::targets(&host.root) {
        Ok(targets) if targets.is_empty() => return Plan::Skip("no fuzz targets".to_owned()),
        Ok(targets) => targets,
        Err(error) => return Plan::Skip(format!("{error:#}")),
    };
    let options = fuzz::Args::within(args.fuzz_seconds, args.fuzz_seconds_total, targets.len());
    let note = format!("{} targets, {} s each", targets.len(), options.seconds);
    Plan::Run(vec![Work::Check("cargo xtask fuzz", Box::new(move || fuzz::run(&options)))], note)
}

fn miri(host: &Host) -> Plan {
    if !host.miri {
        let hint = "`rustup +nightly component add miri`";
        return Plan::Skip(format!("Miri is not installed on a nightly toolchain: {hint}"));
    }
    let cmd = Cmd::new("cargo +nightly miri test -p te-core --lib")
        .env("CARGO_TARGET_DIR", host.target_dir.join("miri").display().to_string())
        .env("PROPTEST_CASES", "4");
    Plan::Run(vec![Work::Command(cmd)], String::new())
}

fn in_lab() -> Plan {
    match lab::missing_packages().as_slice() {
        [] => commands(["cargo xtask hw-test --lab --profile rdma,nvmeof,cxl,dax --limit-s 840"]),
        missing => Plan::Skip(format!("`apt-get install --no-install-recommends {}`", missing.join(" "))),
    }
}

fn deny(host: &Host) -> Plan {
    if !host.deny {
        return Plan::Skip("cargo-deny is not installed: `cargo install cargo-deny`".to_owned());
    }
    commands(["cargo deny --all-features check --hide-inclusion-graph bans licenses sources"])
}
