//! `snowskin node`: one process that lends memory to the store.

use std::net::SocketAddr;
use std::time::Duration;

use store_client::{Node, NodeConfig};

use crate::args::Global;
use crate::commands::cluster::NodeReady;
use crate::commands::master::announce;
use crate::commands::metadata::MetadataArg;
use crate::commands::{FabricChoice, MasterArg, available_memory};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin node --memory 8GiB
  snowskin node --memory 64GiB --master 10.0.0.5:50051 --listen 10.0.0.7:0
  snowskin node --listen 0.0.0.0:7400 --advertise node-7.example";

/// Run a node: it lends its memory to the store
///
/// Runs in the foreground until Ctrl-C or SIGTERM, which stop it in order (exit code 0). Clients read and
/// write its memory over the fabric without asking it. When it stops, its objects are gone; when the master
/// restarts, it mounts its memory again, empty.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Memory to lend.
    #[arg(long, env = "SNOWSKIN_MEMORY", default_value = "1GiB", value_name = "SIZE")]
    memory: ByteSize,
    /// Its name, unique in the cluster [default: host name and process id].
    #[arg(long, env = "SNOWSKIN_NODE_NAME")]
    name: Option<String>,
    #[command(flatten)]
    master: MasterArg,
    /// Where clients reach its memory; port 0 picks one.
    #[arg(long, env = "SNOWSKIN_NODE_LISTEN", default_value = "127.0.0.1:0", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The host under which clients find it, when --listen is a wildcard such as 0.0.0.0.
    #[arg(long, env = "SNOWSKIN_ADVERTISE", value_name = "HOST")]
    advertise: Option<String>,
    #[command(flatten)]
    metadata: MetadataArg,
    /// Name under which its memory is registered there, for engines that use it without the store.
    #[arg(long, env = "SNOWSKIN_SEGMENT", value_name = "NAME")]
    segment: Option<String>,
    /// How its memory may be reached.
    #[arg(long, value_enum, env = "SNOWSKIN_FABRIC", default_value_t = FabricChoice::Auto)]
    fabric: FabricChoice,
    /// Say where it listens as one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let bytes = args.memory.bytes();
    if let Some(available) = available_memory()
        && bytes > available
    {
        return fail(
            Failure::failed(format!(
                "--memory {}: this machine has {} available",
                args.memory,
                ByteSize(available).approximate()
            ))
            .hint("lend less, or end something else first"),
        );
    }
    let name = args.name.clone().unwrap_or_else(default_name);
    let mut config = NodeConfig::new(&name, args.master.address()?, bytes).fabrics(args.fabric.fabrics());
    config.engine.listen = args.listen;
    config.engine.advertise_host = args.advertise.clone();
    config.engine.metadata = args.metadata.config_of(args.segment.as_deref())?;
    let node = {
        let _bar = Bar::spinner(format!("mounting {}", args.memory), global.quiet);
        Node::start(config).map_err(crate::commands::no_start)?
    };
    let endpoint = node.endpoint().to_owned();
    let ready = NodeReady { ready: "node".to_owned(), name, endpoint, memory_bytes: bytes };
    announce(args.json, &ready, || {
        format!("node {} ready at {}: lends {}\n", ready.name, ready.endpoint, args.memory)
    });
    let mut mounted = true;
    while sys::wait_for_interrupt(Some(Duration::from_secs(1))).is_none() {
        let now = node.status().segment.is_some();
        if now != mounted {
            tracing::warn!(
                "{}",
                if now { "mounted again" } else { "not mounted: the master is away or gave this node up" }
            );
        }
        mounted = now;
    }
    tracing::info!("stopping");
    node.stop();
    Ok(Exit::Ok)
}

fn default_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    format!("{}-{}", if host.is_empty() { "node" } else { host }, std::process::id())
}
