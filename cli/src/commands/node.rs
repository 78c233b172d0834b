//! `snowskin node`: one process that lends memory to the store.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use store_client::local::{LocalServerConfig, make_default_path};
use store_client::{ClientConfig, LocalServer, Node, NodeConfig};

use crate::args::Global;
use crate::commands::cluster::NodeReady;
use crate::commands::gateway::Gateway;
use crate::commands::master::announce;
use crate::commands::{FabricChoice, MasterArg, available_memory};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin node --memory 8GiB
  snowskin node --memory 64GiB --master 10.0.0.5:50051 --listen 10.0.0.7:0
  snowskin node --listen 0.0.0.0:7400 --advertise node-7.example
  snowskin node --local auto        and then: snowskin get greeting --local auto
  snowskin node --gateway 127.0.0.1:9004";

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
    /// How its memory may be reached.
    #[arg(long, value_enum, env = "SNOWSKIN_FABRIC", default_value_t = FabricChoice::Auto)]
    fabric: FabricChoice,
    /// Serve light clients on this machine at this Unix socket, for this user alone; `auto`: where they look by
    /// themselves.
    #[arg(long, env = "SNOWSKIN_NODE_LOCAL", value_name = "PATH|auto")]
    local: Option<PathBuf>,
    /// Serve the store over HTTP, without authentication; `snowskin gateway --help` says what.
    #[arg(long, env = "SNOWSKIN_NODE_GATEWAY", value_name = "ADDR:PORT")]
    gateway: Option<SocketAddr>,
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
    let node = {
        let _bar = Bar::spinner(format!("mounting {}", args.memory), global.quiet);
        Node::start(config).map_err(crate::commands::no_start)?
    };
    let (local, gateway) = ways_in(args)?;
    let ready = NodeReady {
        ready: "node".to_owned(),
        name,
        endpoint: node.endpoint().to_owned(),
        memory_bytes: bytes,
        local: local.as_ref().map(|local| local.path().to_owned()),
        gateway: gateway.as_ref().map(|gateway| gateway.addr().to_string()),
    };
    announce(args.json, &ready, || {
        let local = ready.local.as_ref().map(|path| format!(", local clients at {}", path.display()));
        let gateway = ready.gateway.as_ref().map(|addr| format!(", HTTP without authentication at {addr}"));
        let (local, gateway) = (local.unwrap_or_default(), gateway.unwrap_or_default());
        format!("node {} ready at {}: lends {}{local}{gateway}\n", ready.name, ready.endpoint, args.memory)
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
    // Whoever comes in by this node may still want to read from it.
    drop(gateway);
    drop(local);
    node.stop();
    Ok(Exit::Ok)
}

/// The local socket and the gateway, as far as they are wanted.
fn ways_in(args: &Args) -> anyhow::Result<(Option<LocalServer>, Option<Gateway>)> {
    let master = args.master.address()?;
    let mut store = ClientConfig::new(master.clone()).fabrics(args.fabric.fabrics());
    // Other nodes must be able to reach what they are asked to move bytes to, as they reach this one.
    store.engine.listen = SocketAddr::new(args.listen.ip(), 0);
    store.engine.advertise_host = args.advertise.clone();
    let local = match &args.local {
        None => None,
        Some(path) => {
            let path = if path.as_os_str() == "auto" {
                make_default_path(&master).context("--local auto: no place for the socket")?
            } else {
                path.clone()
            };
            Some(LocalServer::start(LocalServerConfig::new(path, store.clone())).context("--local")?)
        }
    };
    let gateway = args.gateway.map(|addr| Gateway::start(addr, &store).context("--gateway")).transpose()?;
    Ok((local, gateway))
}

fn default_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    format!("{}-{}", if host.is_empty() { "node" } else { host }, std::process::id())
}
