//! The tests, by subject.

pub(crate) mod conformance;
mod cxl;
mod dax;
mod devices;
mod faults;
mod numa;
mod nvmeof;
mod suites;
mod transfers;
mod verbs;

use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::process::Command;

/// All tests, those of the prerequisites first.
pub(crate) fn all() -> impl Iterator<Item = &'static Test> {
    [
        devices::TESTS,
        numa::TESTS,
        verbs::TESTS,
        conformance::TESTS,
        transfers::TESTS,
        faults::TESTS,
        suites::TESTS,
        cxl::TESTS,
        dax::TESTS,
    ]
    .into_iter()
    .flatten()
    .chain(nvmeof::tests())
}

/// Runs a program of this machine to its end; returns its stdout.
///
/// # Errors
/// When the program cannot be started, or fails.
fn run(argv: &[&str]) -> Result<String> {
    let (program, args) = argv.split_first().context("no program")?;
    let output =
        Command::new(program).args(args).output().with_context(|| format!("cannot start {program}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{}`: {}\n{text}{errors}", argv.join(" "), output.status);
    Ok(text)
}
