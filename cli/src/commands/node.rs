//! `snowskin node`: a process that lends memory to the store.

use std::net::ToSocketAddrs as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use store_client::local::{LocalServerConfig, make_default_path};
use store_client::{Address, ClientConfig, LocalServer, Masters, Node, NodeConfig, RpcConnection};
use store_core::message::SegmentState;

use crate::commands::admin::drain_one;
use crate::commands::cluster::NodeReady;
use crate::commands::gateway::Gateway;
use crate::commands::master::announce;
use crate::commands::{available_memory, no_master};
use crate::config::{FlagsOfNode, Origin, Settings};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::http::{NodeHttp, Running};
use crate::output::thousands;
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin node --memory 8GiB
  snowskin node --memory 64GiB --master 10.0.0.5:50051 --listen 10.0.0.7:0
  snowskin node --listen 0.0.0.0:7400 --advertise node-7.example
  snowskin node --disk /mnt/nvme0/kv:500GiB               objects that no longer fit into memory go to the disk
  snowskin node --shared /mnt/kv:2TiB                     a directory that all hosts mount: readers need no node
  snowskin node --shared s3://kv-cache/prod:2TiB          the same in a bucket (feature s3; AWS_… in the environment)
  snowskin node --local auto        and then: snowskin get greeting --local auto
  snowskin node --gateway 127.0.0.1:9005
  snowskin node --drain-on-stop=300                      move all objects to other nodes before it stops
  snowskin node --http 10.0.0.7:9004                     /health, /ready, /metrics
  snowskin node --config /etc/snowskin.toml              see `snowskin config reference`";

/// Run a node, which lends its memory to the store
///
/// Runs in the foreground until Ctrl-C or SIGTERM, and then stops in order (exit code 0). Clients read and
/// write its memory directly over the fabric. When the node stops, its objects in memory are gone, unless
/// --drain-on-stop moves them to other nodes first. When the master restarts, the node mounts its memory
/// again, empty. If the master does not listen when the node starts, the node waits for it.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    #[command(flatten)]
    flags: FlagsOfNode,
    /// On SIGTERM or Ctrl-C, move all objects to other nodes first, and wait for that at most this many
    /// seconds; 60 without a value, which is less than the stop timeout of a systemd service.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "60", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    drain_on_stop: Option<u32>,
    /// Print the addresses as one line of JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let mut config = args.flags.settings().node.node.clone();
    if *args.flags.loaded.origin("node.wait_master_ms") == Origin::Default {
        // Service managers may start the master and the node in any order.
        config.wait_master_ms = NodeConfig::FOR_EVER;
    }
    let drain_for = match args.drain_on_stop {
        Some(seconds) => Duration::from_secs(seconds.into()),
        None => Duration::from_millis(config.drain_on_stop_ms.into()),
    };
    let (name, bytes) = (config.name.clone(), config.capacity_bytes);
    let memory = ByteSize(bytes);
    enough(bytes)?;
    available(bytes)?;
    let http = match args.flags.settings().node.http_listen {
        Some(addr) => Some(NodeHttp::start(addr).map_err(|error| {
            Failure::failed(format!("--http {addr}: {error}"))
                .hint("choose another address, or stop the process that listens there")
        })?),
        None => None,
    };
    let node = {
        let _bar = Bar::spinner(format!("mounting {}", memory), global.quiet);
        Arc::new(start(config)?)
    };
    let running = |local: Option<&Arc<LocalServer>>, gateway: Option<&Gateway>| {
        if let Some(http) = &http {
            http.running(Running {
                node: Arc::clone(&node),
                local: local.cloned(),
                gateway: gateway.map(|gateway| gateway.client_metrics().to_vec()).unwrap_or_default(),
            });
        }
    };
    running(None, None);
    let (local, gateway) = local_and_gateway(args)?;
    let local = local.map(Arc::new);
    running(local.as_ref(), gateway.as_ref());
    let ready = NodeReady {
        ready: "node".to_owned(),
        name,
        endpoint: node.endpoint().to_owned(),
        memory_bytes: bytes,
        http: http.as_ref().map(|http| http.addr().to_string()),
        local: local.as_ref().map(|local| local.path().to_owned()),
        gateway: gateway.as_ref().map(|gateway| gateway.addr().to_string()),
    };
    announce(args.json, &ready, || {
        let local = ready.local.as_ref().map(|path| format!(", local clients at {}", path.display()));
        let gateway = ready.gateway.as_ref().map(|addr| format!(", HTTP without authentication at {addr}"));
        let (local, gateway) = (local.unwrap_or_default(), gateway.unwrap_or_default());
        format!("node {} ready at {}: lends {}{local}{gateway}\n", ready.name, ready.endpoint, memory)
    });
    warn_of_address(args.flags.settings(), &ready.name, &ready.endpoint);
    watch(&node);
    tracing::info!("stopping");
    if let Some(http) = &http {
        http.stopping();
    }
    let drained = match drain_for {
        Duration::ZERO => Exit::Ok,
        timeout => drain(args.flags.settings(), &node, timeout),
    };
    // Requests through the gateway may still read from this node.
    drop(gateway);
    drop(local);
    // Unmounts. A request that still holds the node delays that until it ends.
    drop(node);
    Ok(drained)
}

/// Reports when the node is unmounted and mounted again, until a signal requests the end.
fn watch(node: &Node) {
    let mut mounted = true;
    while sys::wait_for_interrupt(Some(Duration::from_secs(1))).is_none() {
        let now = node.status().segment.is_some();
        match (mounted, now) {
            (false, true) => tracing::warn!("mounted again"),
            (true, false) => {
                tracing::warn!("not mounted: the master does not answer or has removed this node");
            }
            _ => {}
        }
        mounted = now;
    }
}

/// Starts and mounts a node; Ctrl-C ends the wait for a master.
pub(crate) fn start(config: NodeConfig) -> anyhow::Result<Node> {
    Node::start_unless(config, || sys::interrupted().is_some()).map_err(|error| match sys::interrupted() {
        Some(exit) => Failure::silent(exit).into(),
        None => crate::commands::no_start(error),
    })
}

/// Moves all objects to other nodes before the node stops. What could not be moved is reported, and the exit
/// code says so.
fn drain(settings: &Settings, node: &Node, timeout: Duration) -> Exit {
    let Some(segment) = node.status().segment else { return Exit::Ok };
    let limit = timeout.as_secs();
    tracing::info!(
        "moving all objects to other nodes, for at most {limit} s; a second signal ends the node at once"
    );
    let identity = &settings.node.node.identity;
    let (master, rpc) = (settings.cluster.master.clone(), settings.node.node.rpc);
    let rpc = RpcConnection::connect_as(master, rpc, identity.clone());
    let drained = rpc.map_err(no_master).and_then(|mut rpc| drain_one(&mut rpc, segment, timeout));
    let left = match drained {
        Ok(info) if info.state == SegmentState::Drained => return Exit::Ok,
        Ok(info) => info,
        Err(error) => {
            eprintln!("snowskin: not drained: {error:#}; objects without a replica on another node are lost");
            return Exit::Failed;
        }
    };
    let why = match (left.left_no_room, left.left_bad) {
        (0, 0) => format!("{limit} s were too short: raise --drain-on-stop"),
        (0, bad) => format!("{} are damaged", thousands(bad)),
        (no_room, _) => format!("{} do not fit on other nodes", thousands(no_room)),
    };
    let size = ByteSize(left.used_bytes).approximate();
    eprintln!(
        "snowskin: not drained: {size} were not moved ({why}); objects without a replica on another node are \
        lost"
    );
    Exit::Failed
}

/// Warns about a node that other machines cannot reach although its master can be reached from them, and
/// about a node that other machines can reach without a secret.
pub(crate) fn warn_of_address(settings: &Settings, name: &str, endpoint: &str) {
    let node = &settings.node.node;
    let master = &settings.cluster.master;
    if !node.engine.listen.ip().is_loopback() && settings.cluster.cluster_secret.is_empty() {
        tracing::warn!(
            "node {name} listens at {endpoint} without a cluster secret: any process that reaches it can \
            read and write its memory. Give the master, all nodes and all clients a --cluster-secret-file, \
            or restrict access with a firewall"
        );
    }
    if node.engine.listen.ip().is_loopback() && node.engine.advertise_host.is_none() && is_remote(master) {
        tracing::warn!(
            "node {name} listens at {endpoint}, which only this machine reaches, but clients on other \
            machines can get that address from the master at {master}: give --listen ADDR:0 with an address \
            of this machine, or --advertise HOST"
        );
    }
}

/// Whether other machines can reach a master there. Those of a cluster in etcd are meant for that.
fn is_remote(masters: &Masters) -> bool {
    let listed = masters.listed();
    listed.is_empty()
        || listed.iter().any(|master| match master {
            Address::Unix(_) => false,
            Address::Tcp(address) => {
                address.to_socket_addrs().is_ok_and(|mut addrs| addrs.any(|addr| !addr.ip().is_loopback()))
            }
        })
}

/// The local server and the gateway, if they are configured.
fn local_and_gateway(args: &Args) -> anyhow::Result<(Option<LocalServer>, Option<Gateway>)> {
    let settings = args.flags.settings();
    let node = &settings.node.node;
    let mut store = settings.client.clone();
    // Other nodes must be able to reach the memory of these clients at the address at which they reach this
    // node.
    store.engine.listen.set_ip(node.engine.listen.ip());
    store.engine.advertise_host.clone_from(&node.engine.advertise_host);
    store.engine.fabrics = node.engine.fabrics;
    let local = match &settings.node.local {
        None => None,
        Some(path) => {
            let path = if path.as_os_str() == "auto" {
                make_default_path(&store.master)
                    .context("--local auto: cannot create the directory of the socket")?
            } else {
                path.clone()
            };
            Some(LocalServer::start(local_server_config(path, store.clone())).context("--local")?)
        }
    };
    let gateway = settings.node.gateway;
    let gateway = gateway.map(|addr| Gateway::start(addr, &store).context("--gateway")).transpose()?;
    Ok((local, gateway))
}

/// Refuses less memory than an object needs.
pub(crate) fn enough(bytes: u64) -> anyhow::Result<()> {
    match bytes {
        MEMORY_BYTES_MIN.. => Ok(()),
        _ => fail(
            Failure::usage(format!(
                "--memory {}: lend at least {}",
                ByteSize(bytes),
                ByteSize(MEMORY_BYTES_MIN)
            ))
            .hint("write sizes as 64MiB or 8GiB; a number without a unit is bytes"),
        ),
    }
}

/// Refuses more memory than the machine has available.
fn available(bytes: u64) -> anyhow::Result<()> {
    match available_memory() {
        Some(available) if bytes > available => fail(
            Failure::failed(format!(
                "--memory {}: this machine has only {} available",
                ByteSize(bytes),
                ByteSize(available).approximate()
            ))
            .hint("lend less, or free memory first"),
        ),
        _ => Ok(()),
    }
}

/// The least memory that a node lends: one page, bytes.
const MEMORY_BYTES_MIN: u64 = 4096;

/// Configuration of the local server in a node's process. One object may be as long as all arenas together.
pub(crate) fn local_server_config(path: PathBuf, store: ClientConfig) -> LocalServerConfig {
    let mut config = LocalServerConfig::new(path, store);
    config.arena_bytes_max = config.arenas_bytes_max;
    config
}
