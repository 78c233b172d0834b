//! `snowskin doctor`: facts about this machine, a verdict on each, and how to fix it.
//!
//! ```text
//!   source ──▶ facts ──▶ checks ──▶ render, or JSON
//!   files      plain     pure functions
//!   (or a      data      from facts to verdicts
//!    copy)
//! ```

mod checks;
mod facts;
mod render;
mod source;

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;

use crate::args::Global;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::{Outcome, fail, output, progress};
use checks::{Finding, Verdict};
use facts::Fabric;
use source::Source;

const AFTER_HELP: &str =
    "Verdicts: ok · warn (works, but slower or less) · fail (something will not work) · skip (unknown, or does not apply). \
RDMA that is not there is skipped; RDMA that is there and cannot be used fails. --fabric changes both.

Examples:
  snowskin doctor                             this machine
  snowskin doctor --fabric rdma               and whether RDMA would work
  snowskin doctor --master 10.0.0.5:50051     and whether that master answers
  snowskin doctor --json | jq '.checks[] | select(.verdict == \"fail\" or .verdict == \"warn\")'";

/// Look for what would make this machine slow or fail, and say how to fix it
///
/// Looks at CPUs, NUMA nodes, memory and its limits, TCP and its ports, RDMA (library, devices, ports, GIDs, MTU, errors) and GPUs,
/// and says for each whether it is fine, why it matters and what to change. Changes nothing itself. Ends with 1 when a check
/// fails, with 0 when all pass or only warn.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// The fabric that is meant to be used.
    #[arg(long, value_enum, default_value_t)]
    fabric: Fabric,
    /// Also check that this master answers.
    #[arg(long, env = "SNOWSKIN_MASTER", hide_env_values = true, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Ports that `master` and `node` should find free.
    #[arg(long, value_delimiter = ',', default_values_t = [50051, 9003], value_name = "PORT,…")]
    ports: Vec<u16>,
    /// Judge another machine by a copy of its /proc, /sys, /dev, /etc and /usr/lib in this directory.
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    verdict: Verdict,
    failed: usize,
    warned: usize,
    checks: &'a [Finding],
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    let source = match &args.root {
        None => Source::this_machine(),
        Some(root) if root.is_dir() => Source::copy_at(root),
        Some(root) => return fail(Failure::usage(format!("--root: {} is not a directory", root.display()))),
    };
    let facts = {
        let _bar = progress::Bar::spinner("looking at this machine", global.quiet);
        facts::gather(&source, args.fabric, &args.ports, args.master.as_deref())
    };
    let findings = checks::run(&facts);
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    let (failed, warned) = (count(Verdict::Fail), count(Verdict::Warn));
    let verdict = findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Ok);
    if args.json {
        output::print_json(&Report { verdict, failed, warned, checks: &findings })?;
    } else {
        output::print(&render::render(&findings))?;
    }
    Ok(if failed > 0 { Exit::Failed } else { Exit::Ok })
}

/// Where `address` listens, for whoever only wants to know whether it is a socket address at all.
fn resolve(address: &str) -> std::io::Result<SocketAddr> {
    use std::net::ToSocketAddrs as _;
    address.to_socket_addrs()?.next().ok_or_else(|| std::io::Error::other("the name has no address"))
}
