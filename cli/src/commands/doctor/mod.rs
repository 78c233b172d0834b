//! `snowskin doctor`: facts about this machine, a verdict on each, and how to fix problems.
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

use crate::commands::FabricParser;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::{Outcome, fail, output, progress};
use checks::{Finding, Verdict};
use source::Source;
use te_engine::Fabrics;

const AFTER_HELP: &str =
    "Verdicts: ok · warn (works, but slower or restricted) · fail (something does not work) · skip (unknown, \
    or not relevant). Missing RDMA is skipped; RDMA that is present but unusable fails. --fabric changes \
    both.

Examples:
  snowskin doctor                             this machine
  snowskin doctor --fabric rdma               check that RDMA works
  snowskin doctor --master 10.0.0.5:50051     also check that this master answers
  snowskin doctor --disk /mnt/nvme0           check a place for `snowskin node --disk`
  snowskin doctor --pool /dev/dax0.0          check a pool of CXL memory
  snowskin doctor --ha etcd://10.0.0.9:2379   check the arbiter of several masters
  snowskin doctor --json | jq '.checks[] | select(.verdict == \"fail\" or .verdict == \"warn\")'";

/// Find what makes this machine slow or fail, and explain how to fix it
///
/// Checks CPUs, NUMA nodes, memory and its limits, TCP and its ports, RDMA (library, devices, ports, GIDs,
/// MTU, errors), GPUs and CXL memory, and places for disks, pools and an arbiter that are named. For each, it
/// reports the verdict, why it matters and what to change. It changes nothing itself. The exit code is 1 when
/// a check fails, and 0 when all pass or only warn.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// The fabrics to use. What a named fabric needs and this machine lacks is a failure; with auto, it is
    /// skipped.
    #[arg(long, default_value_t, value_parser = FabricParser, value_name = "FABRIC,…")]
    fabric: Fabrics,
    /// Also check that this master answers.
    #[arg(long, env = "SNOWSKIN_MASTER", hide_env_values = true, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Ports that should be free for `master` and `node`.
    #[arg(long, value_delimiter = ',', default_values_t = [50051, 9003], value_name = "PORT,…")]
    ports: Vec<u16>,
    /// Also check this place for a disk: a directory, a file or a block device. May be repeated.
    #[arg(long, value_name = "PATH")]
    disk: Vec<PathBuf>,
    /// Also check this pool of CXL memory: a devdax device or a file. May be repeated.
    #[arg(long, value_name = "PATH")]
    pool: Vec<PathBuf>,
    /// Also check that the arbiter of several masters answers, as in `snowskin master --ha`.
    #[arg(long, value_name = "URL")]
    ha: Option<String>,
    /// The cluster whose masters the arbiter is asked about.
    #[arg(long, value_name = "NAME", default_value = "default")]
    cluster_id: String,
    /// Check another machine by a copy of its /proc, /sys, /dev, /etc and /usr/lib in this directory.
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
        let _bar = progress::Bar::spinner("examining this machine", global.quiet);
        let asked = facts::Asked {
            fabrics: args.fabric,
            ports: &args.ports,
            master: args.master.as_deref(),
            disks: &args.disk,
            pools: &args.pool,
            arbiter: args.ha.as_deref().map(|arbiter| (arbiter, args.cluster_id.as_str())),
        };
        facts::gather(&source, &asked)
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

/// Resolves `address`, to find out whether it is a socket address at all.
fn resolve(address: &str) -> std::io::Result<SocketAddr> {
    use std::net::ToSocketAddrs as _;
    address.to_socket_addrs()?.next().ok_or_else(|| std::io::Error::other("the name has no address"))
}
