//! `snowskin admin`: inspects and administers a running master.

mod config;
mod evict;
mod list;
mod masters;
mod pools;
mod tasks;
mod tenants;

pub(crate) use list::{SegmentRow, ask_segments, called, segment_table, share};
pub(crate) use masters::{Said as MastersSaid, ask_masters, masters_table};
pub(crate) use tasks::{TaskRow, ask_tasks, drain_one, task_table};

use crate::Outcome;
use crate::exit::EXIT_CODES;

/// Inspect and administer a running master
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Segments(list::Segments),
    Nodes(list::Nodes),
    Pools(pools::Args),
    Config(Box<config::Args>),
    Masters(masters::Masters),
    Switchover(masters::Switchover),
    Evict(evict::Args),
    Drain(tasks::Drain),
    Tasks(tasks::Tasks),
    Copy(tasks::Copy),
    Move(tasks::Move),
    Tenants(tenants::Args),
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::Segments(args) => list::segments(args),
        What::Nodes(args) => list::nodes(args),
        What::Pools(args) => pools::run(args),
        What::Config(args) => config::run(args),
        What::Masters(args) => masters::masters(args),
        What::Switchover(args) => masters::switchover(args),
        What::Evict(args) => evict::run(args),
        What::Drain(args) => tasks::drain(args),
        What::Tasks(args) => tasks::list(args),
        What::Copy(args) => tasks::copy(args),
        What::Move(args) => tasks::move_(args),
        What::Tenants(args) => tenants::run(args),
    }
}
