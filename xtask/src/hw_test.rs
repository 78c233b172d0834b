//! `cargo xtask hw-test`: the tests that need hardware, on this host's devices or in the guests of the lab.

use crate::cmd::Cmd;
use crate::host::Host;
use crate::lab;
use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Test programs that run in the profiles of the lab. The whole workspace is selected for a crate with many
/// dependencies: what `cargo test --workspace` has built is used then.
const SUITES: [(&str, &str); 2] =
    [("rdma", "-p te-rdma --test verbs_device"), ("disk", "--workspace --test block_devices")];
/// The default filter of each profile. Profile `rdma` runs all tests.
const FILTERS: [(&str, &str); 4] =
    [("nvmeof", "namespace"), ("cxl", "cxl"), ("numa", "numa"), ("disk", "test_programs")];
/// The log of a disk's writes: the variable that names it, its name in the run's directory, and the time for
/// reading it, seconds.
const WRITE_LOG: &str = "SNOWSKIN_WRITE_LOG";
const WRITE_LOG_FILE: &str = "write-log";
const POWER_LOSS_S: u64 = 300;
/// Address of the agent in guest b, on the management network.
const AGENT: &str = "10.77.9.2:7077";

/// Options of `cargo xtask hw-test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run in guests with emulated devices instead of on this host.
    #[arg(long)]
    lab: bool,
    /// Profiles of the lab (repeat the option, or separate them with commas); `rdma` by default. `all`
    /// selects all.
    #[arg(long, value_delimiter = ',', value_name = "PROFILE", requires = "lab")]
    profile: Vec<String>,
    /// Wall time per profile, seconds.
    #[arg(long, default_value_t = 900, value_name = "SECONDS", requires = "lab")]
    limit_s: u64,
    #[command(flatten)]
    setup: lab::Setup,
    /// Arguments of the test runner: a filter, `--list`, …
    #[arg(last = true)]
    runner: Vec<String>,
}

/// Builds the tests and runs them.
///
/// # Errors
/// A test fails, no test ran, or a guest is lost.
pub(crate) fn run(args: &Args) -> Result<()> {
    let host = Host::probe()?;
    if args.lab { in_lab(args, &host) } else { here(args, &host) }
}

fn here(args: &Args, host: &Host) -> Result<()> {
    let program = build(host)?;
    let cmd =
        args.runner.iter().fold(Cmd::default().arg(program.display().to_string()), |cmd, word| cmd.arg(word));
    println!("hw-test: on this host; `--lab` runs in guests with emulated devices");
    cmd.run(&host.root, None)
}

fn in_lab(args: &Args, host: &Host) -> Result<()> {
    let all: Vec<String> = lab::names().map(str::to_owned).collect();
    let profiles = match args.profile.as_slice() {
        [] => vec!["rdma".to_owned()],
        [one] if one == "all" => all,
        some => some.to_vec(),
    };
    for profile in &profiles {
        lab::guests(profile)?;
    }
    lab::prepare(&args.setup)?;
    let program = build(host)?;
    // A mistyped filter is found here instead of after a minute of booting.
    let list =
        args.runner.iter().fold(Cmd::default().arg(program.display().to_string()), |cmd, word| cmd.arg(word));
    list.arg("--list")
        .stdout(&host.root)
        .context("the test runner does not take these arguments; see `-- --help`")?;
    let mut failed = Vec::new();
    for profile in &profiles {
        let suites = build_suites(host, profile)?;
        println!("\nhw-test: profile {profile}");
        if let Err(error) = in_profile(args, profile, &program, &suites) {
            println!("hw-test: profile {profile}: {error:#}");
            failed.push(profile.as_str());
        }
    }
    ensure!(failed.is_empty(), "failed in the lab: {}", failed.join(", "));
    Ok(())
}

fn in_profile(args: &Args, profile: &str, program: &Path, suites: &[PathBuf]) -> Result<()> {
    // The guests' networks are isolated; the token only distinguishes the callers of an agent.
    let mut settings = vec![
        "HW_TESTS_TOKEN=lab".to_owned(),
        "HW_TESTS_FAULTS=1".to_owned(),
        "RUST_BACKTRACE=1".to_owned(),
        format!("HW_TESTS_LAB={profile}"),
    ];
    let program = program.display().to_string();
    let in_env = |settings: &[String], words: &[&str]| -> Vec<String> {
        let env = std::iter::once("env".to_owned()).chain(settings.iter().cloned());
        env.chain(std::iter::once(program.clone()))
            .chain(words.iter().map(|word| (*word).to_owned()))
            .collect()
    };
    let peer = (lab::guests(profile)? > 1).then(|| in_env(&settings, &["agent", AGENT]));
    if peer.is_some() {
        settings.push(format!("HW_TESTS_PEER={AGENT}"));
    }
    match profile {
        "nvmeof" => {
            settings.push("HW_TESTS_NVMEOF=tcp 10.77.0.2 4420 lab;rdma 10.77.1.2 4421 lab".to_owned())
        }
        "disk" => {
            settings.push("SNOWSKIN_BLOCK_DEVICES=/dev/ram0 /dev/ram1 /dev/ram2".to_owned());
            settings.push(format!("{WRITE_LOG}=/run/lab/{WRITE_LOG_FILE}"));
        }
        _ => {}
    }
    if !suites.is_empty() {
        let suites: Vec<String> = suites.iter().map(|path| path.display().to_string()).collect();
        settings.push(format!("HW_TESTS_SUITES={}", suites.join(";")));
    }
    let mut command = in_env(&settings, &["--color", "never"]);
    match FILTERS.iter().find(|(name, _)| *name == profile) {
        Some((_, filter)) if args.runner.is_empty() => command.push((*filter).to_owned()),
        _ => command.extend(args.runner.iter().cloned()),
    }
    let dir = lab::run_in(profile, &args.setup, command, peer, Duration::from_secs(args.limit_s))?;
    if profile == "disk" && args.runner.is_empty() {
        lose_power(&dir, suites)?;
    }
    Ok(())
}

/// What the guest has recorded is tried out here, where processors are not emulated.
fn lose_power(dir: &Path, suites: &[PathBuf]) -> Result<()> {
    let log = dir.join(WRITE_LOG_FILE);
    ensure!(log.is_file(), "the guest has recorded no writes: {} is missing", log.display());
    println!("hw-test: on this host: loss of power after each recorded write and flush");
    for program in suites {
        let cmd = Cmd::default().arg(program.display().to_string()).arg("after_a_loss_of_power");
        cmd.env(WRITE_LOG, log.display().to_string()).run(dir, Some(POWER_LOSS_S))?;
    }
    // It is large.
    std::fs::remove_file(&log).with_context(|| format!("cannot remove {}", log.display()))
}

/// Builds the runner with the test profile: with checks, and some optimisation.
fn build(host: &Host) -> Result<PathBuf> {
    let cmd =
        Cmd::new("cargo build --quiet --profile test -p hw-tests --message-format json-render-diagnostics");
    let built = executables(host, &cmd)?;
    built.into_iter().next().context("cargo built no hw-tests")
}

/// Builds the test programs that run in a profile.
fn build_suites(host: &Host, profile: &str) -> Result<Vec<PathBuf>> {
    let mut programs = Vec::new();
    for (_, selection) in SUITES.iter().filter(|(of, _)| *of == profile) {
        let cmd = Cmd::new(&format!(
            "cargo test --quiet --no-run {selection} --message-format json-render-diagnostics"
        ));
        let built = executables(host, &cmd)?;
        if built.is_empty() {
            bail!("`{cmd}` built nothing");
        }
        programs.extend(built);
    }
    Ok(programs)
}

pub(crate) fn executables(host: &Host, cmd: &Cmd) -> Result<Vec<PathBuf>> {
    println!("hw-test: $ {cmd}");
    let output = cmd.command(&host.root).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start `{cmd}`"))?;
    ensure!(output.status.success(), "`{cmd}` failed");
    Ok(paths_in(&String::from_utf8_lossy(&output.stdout)))
}

/// Cargo prints one JSON object per line; artifacts that can be run have an `executable`.
fn paths_in(messages: &str) -> Vec<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_among_cargos_messages() {
        let messages = "{\"reason\":\"compiler-artifact\",\"executable\":null}\n\
                        {\"reason\":\"compiler-artifact\",\"executable\":\"/t/hw-tests\"}\nnoise\n";
        assert_eq!(paths_in(messages), [PathBuf::from("/t/hw-tests")]);
    }
}
