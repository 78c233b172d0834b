//! Test programs of other crates, run on the machine that has the devices.

use crate::host::{Host, Need};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::process::{Command, Stdio};

pub(super) const TESTS: &[Test] = &[Test {
    name: "the_test_programs_for_these_devices_pass_here",
    needs: &[Need::Suites],
    run: suites_pass,
}];

fn suites_pass(host: &Host) -> Result<()> {
    for program in &host.suites {
        println!("    {}", program.display());
        // Indented, so that its results are not counted with those of this program.
        let output = Command::new(program).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot start {}", program.display()))?;
        for line in String::from_utf8_lossy(&output.stdout)
            .lines()
            .chain(String::from_utf8_lossy(&output.stderr).lines())
        {
            println!("      {line}");
        }
        ensure!(output.status.success(), "{}: {}", program.display(), output.status);
    }
    Ok(())
}
