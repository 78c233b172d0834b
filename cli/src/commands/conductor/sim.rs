//! `snowskin conductor sim`: the figures of the FAST'25 paper from its traces, in a simulated cluster.

use crate::exit::{EXIT_CODES, Exit};
use crate::{Outcome, output};

const AFTER_HELP: &str = "Examples:
  snowskin conductor sim --figure 14      the cost model beside the paper's measurements";

/// Simulate the cluster of the FAST'25 paper, and compare with its figures
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// The figure.
    #[arg(long, default_value = "14", value_name = "FIGURE", value_parser = ["14"])]
    figure: String,
}

pub(super) fn run(args: &Args) -> Outcome {
    let rows = conductor_sim::FIGURE_14_NO_PREFIX;
    let lines =
        rows.iter().map(|(tokens, seconds)| format!("{tokens} tokens: prefill {seconds} s in the paper"));
    output::print(&format!("Figure {}\n{}\n", args.figure, lines.collect::<Vec<_>>().join("\n")))?;
    Ok(Exit::Ok)
}
