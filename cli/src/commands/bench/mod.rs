//! `snowskin bench`: reproducible measurements.

mod allocator;
mod copies;
mod local;
mod master;
mod memory;
mod pool;
mod store;
mod target;
mod tier;
mod transfer;

use std::time::Duration;

use crate::Outcome;
use crate::exit::{EXIT_CODES, Failure};
use crate::global::Global;
use crate::output::thousands;
use crate::size::GIB;

const AFTER_HELP: &str =
    "Every benchmark starts the processes it needs and stops them. GB = 10⁹ bytes, GiB = 2³⁰ bytes; \
    latencies in µs are per batch, and CPU time is that of all participating processes.

Examples:
  snowskin bench transfer --fabric shm --block 1MiB
  snowskin bench store --value 4KiB,1MiB --op get
  snowskin bench master --op put --batch 1,128 --clients 2
  snowskin bench allocator --workload cluster";

/// Measure transfers, the store, the master, or allocation
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

/// The benchmarks.
#[derive(Debug, clap::Subcommand)]
enum What {
    Transfer(transfer::Args),
    Store(store::Args),
    Master(master::Args),
    Allocator(allocator::Args),
    Local(local::Args),
    Target(target::Args),
    Tier(tier::Args),
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    match &args.what {
        What::Transfer(args) => transfer::run(args, global),
        What::Store(args) => store::run(args, global),
        What::Master(args) => master::run(args, global),
        What::Allocator(args) => allocator::run(args, global),
        What::Local(args) => local::run(args, global),
        What::Target(args) => target::run(args),
        What::Tier(args) => tier::run(args, global),
    }
}

/// Refuses to measure a store that other programs use.
fn not_ours(address: &str, foreign: u64) -> Failure {
    let what = match foreign {
        0 => "has nodes that were not started by a benchmark".to_owned(),
        1 => "holds an object that was not stored by a benchmark, and that this one may evict".to_owned(),
        n => {
            format!(
                "holds {} objects that were not stored by a benchmark, and that this one may evict",
                thousands(n)
            )
        }
    };
    Failure::failed(format!("the store at {address} {what}"))
        .hint("without --master, a store is started for the benchmark; --yes measures this one")
}

/// CPU seconds per GiB.
fn cpu_s_per_gib(cpu: Duration, bytes: u64) -> f64 {
    if bytes == 0 { 0.0 } else { cpu.as_secs_f64() / (bytes as f64 / GIB) }
}
