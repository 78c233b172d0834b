//! Our transfers beside iperf3 and memcpy, interleaved, in one run.

use anyhow::{Result, bail};

/// Options of `cargo xtask bench-iperf`.
#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_args: &Args) -> Result<()> {
    bail!("not here yet")
}
