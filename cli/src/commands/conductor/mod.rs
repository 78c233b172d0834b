//! `snowskin conductor`: placement of requests by the KV cache that engines hold.

mod bench_proxy;
mod client;
mod demo;
mod plot;
mod query;
mod replay;
mod serve;
mod sim;
mod what_if;

use crate::Outcome;
use crate::exit::EXIT_CODES;

/// Route requests to the engines that hold their prefixes, and simulate that
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Query(query::Args),
    Replay(replay::Args),
    BenchProxy(bench_proxy::Args),
    Demo(demo::Args),
    Serve(Box<serve::Args>),
    Sim(sim::Args),
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::Query(args) => query::run(args),
        What::Replay(args) => replay::run(args),
        What::BenchProxy(args) => bench_proxy::run(args),
        What::Demo(args) => demo::run(args),
        What::Serve(args) => serve::run(args),
        What::Sim(args) => sim::run(args),
    }
}
