//! Checks the files in `deploy/` against the program. No container engine, systemd or Prometheus needs to run
//! for it.
//!
//! ```text
//!   program    the built binary: its commands and flags
//!   compose    compose.yaml: services, what they refer to, how they are restricted
//!   units      the units of systemd, and the files beside them
//!   scrape     the files of Prometheus and Grafana
//! ```
//!
//! `cargo xtask image` starts the services and uses them.

pub(crate) mod compose;
pub(crate) mod program;
pub(crate) mod scrape;
pub(crate) mod units;
mod yaml;

use crate::host;
use anyhow::{Context as _, Result, bail};
use compose::Compose;
use program::Program;
use std::path::{Path, PathBuf};

/// Options of `cargo xtask deploy`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The built program; by default that of the release profile.
    #[arg(long)]
    binary: Option<PathBuf>,
}

/// Prints the findings.
///
/// # Errors
/// There are findings.
pub(crate) fn run(args: &Args) -> Result<()> {
    let deploy = host::workspace_root().join("deploy");
    let program = Program::new(&binary(args.binary.as_deref())?)?;
    let compose = Compose::read(&deploy.join("compose.yaml"))?;
    let mut findings = compose.judge(&program, &deploy);
    findings.extend(scrape::judge(&deploy, &compose)?);

    let systemd = deploy.join("systemd");
    let units = units::read(&systemd)?;
    findings.extend(units.iter().flat_map(|unit| unit.judge(&program)));
    findings.extend(units::judge_sysctl(&systemd.join("sysctl.conf"))?);
    if let Err(error) =
        program.run(&["config", "check", &systemd.join("snowskin.toml").display().to_string()])
    {
        findings.push(format!("snowskin.toml: {error:#}"));
    }
    let scratch = tempfile::tempdir()?;
    match units::judge_by_systemd(&systemd, &units, scratch.path())? {
        None => println!("      not checked with systemd: systemd-analyze is not installed"),
        Some(said) => findings.extend(said),
    }

    match scrape::judge_by_promtool(&deploy, scratch.path())? {
        None => println!("      not checked with promtool: it is not installed"),
        Some(said) => findings.extend(said),
    }

    findings.iter().for_each(|finding| println!("      {finding}"));
    match findings.len() {
        0 => Ok(()),
        count => bail!("{count} findings in deploy/"),
    }
}

/// The given program, or the one that `cargo build --release` makes.
///
/// # Errors
/// It does not build.
pub(crate) fn binary(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(named) = named {
        return Ok(named.to_path_buf());
    }
    let host = host::Host::probe()?;
    let build = crate::cmd::Cmd::new("cargo build --quiet --release --package cli --bin snowskin");
    println!("      $ {build}");
    build.run(&host.root, None).context("the program does not build")?;
    Ok(host.target_dir.join("release/snowskin"))
}
