//! `snowskin up`: a whole store in one process, in the foreground: for trials, for development, or for one
//! machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use serde::Serialize;
use store_client::local::make_default_path;
use store_client::{Address, LocalServer, Masters, Node};

use crate::commands::available_memory;
use crate::commands::cluster::NodeReady;
use crate::commands::gateway::Gateway;
use crate::commands::master::announce;
use crate::commands::node::{enough, local_server_config, warn_of_address};
use crate::config::{FlagsOfUp, Origin, Settings};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};

const AFTER_HELP: &str = "Examples:
  snowskin up
  snowskin up --memory 8GiB --nodes 2
  snowskin up --listen 127.0.0.1:0 --http 127.0.0.1:0 --gateway 127.0.0.1:0 --json
  snowskin up --gateway none --local none
  snowskin up --config /etc/snowskin.toml                see `snowskin config reference`

Other commands on this machine use it without further options:
  snowskin put greeting hello.txt && snowskin get greeting --local auto && curl localhost:9005/v1/objects/greeting";

/// Run a whole store in one process: master, nodes, HTTP gateway, local server
///
/// Runs in the foreground until Ctrl-C or SIGTERM, and then stops all parts in order (exit code 0). Use it
/// for trials, for development, or for a single machine. All addresses are on loopback by default. Everything
/// else can be set by a settings file and variables, as for `snowskin master`, `snowskin node` and clients.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Memory that each node lends [default: 1GiB].
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Number of nodes, each with its own memory.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Address of the master; port 0 picks a free port [default: 127.0.0.1:50051].
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// Address of the master's status page and /metrics, or none [default: 127.0.0.1:9003].
    #[arg(long, value_name = "ADDR:PORT")]
    http: Option<OrNone<SocketAddr>>,
    /// Address of the HTTP gateway, without authentication, or none [default: 127.0.0.1:9005].
    #[arg(long, value_name = "ADDR:PORT")]
    gateway: Option<OrNone<SocketAddr>>,
    /// Socket for local clients of this user: a path, auto for the default path, or none [default: auto].
    #[arg(long, value_name = "PATH|auto")]
    local: Option<OrNone<PathBuf>>,
    #[command(flatten)]
    flags: FlagsOfUp,
    /// Print all addresses as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// A value, or the word `none`.
#[derive(Clone, Debug)]
struct OrNone<T>(Option<T>);

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        if text == "none" { Ok(Self(None)) } else { text.parse().map(|value| Self(Some(value))) }
    }
}

/// The line that is printed when all parts serve.
#[derive(Debug, Serialize)]
struct Ready {
    ready: &'static str,
    rpc: String,
    http: Option<String>,
    nodes: Vec<NodeReady>,
    gateway: Option<String>,
    local: Option<PathBuf>,
}

/// All running parts. Fields are dropped from the top: the users of the store before its nodes and its
/// master.
struct Running {
    gateway: Option<Gateway>,
    local: Option<LocalServer>,
    nodes: Vec<Node>,
    master: store_master::MasterHandle,
}

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let mut settings = args.flags.settings().clone();
    let wanted = merge(args, &mut settings);
    let bytes = settings.node.node.capacity_bytes;
    room_for(args.nodes, bytes)?;
    let (running, ready) = {
        let text = format!("starting a master and {} × {}", args.nodes, ByteSize(bytes));
        let _bar = Bar::spinner(text, global.quiet);
        start(args, &settings, wanted)?
    };
    announce(args.json, &ready, || said(&ready, bytes));
    settings.cluster.master = Address::Tcp(ready.rpc.clone()).into();
    for node in &ready.nodes {
        warn_of_address(&settings, &node.name, &node.endpoint);
    }
    crate::commands::master::wait_for_end(&running.master);
    tracing::info!("stopping");
    running.stop()?;
    Ok(Exit::Ok)
}

/// Where clients connect, besides the master.
struct Access {
    gateway: Option<SocketAddr>,
    local: Option<PathBuf>,
}

/// Applies flags over settings, and settings over the defaults of this command.
fn merge(args: &Args, settings: &mut Settings) -> Access {
    let given = |key| *args.flags.loaded.origin(key) != Origin::Default;
    if let Some(memory) = args.memory {
        settings.node.node.capacity_bytes = memory.bytes();
    }
    if let Some(listen) = args.listen {
        settings.master.rpc_listen = listen;
    }
    if let Some(OrNone(http)) = args.http {
        settings.master.http_listen = http;
    }
    let gateway = match args.gateway {
        Some(OrNone(gateway)) => gateway,
        None if given("node.gateway") => settings.node.gateway,
        None => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, GATEWAY_PORT))),
    };
    let local = match &args.local {
        Some(OrNone(local)) => local.clone(),
        None if given("node.local") => settings.node.local.clone(),
        None => Some(PathBuf::from("auto")),
    };
    Access { gateway, local }
}

/// The default port of `snowskin gateway`.
const GATEWAY_PORT: u16 = 9005;

fn room_for(nodes: u16, bytes: u64) -> anyhow::Result<()> {
    enough(bytes)?;
    let all = bytes.saturating_mul(u64::from(nodes));
    match available_memory() {
        Some(available) if all > available => fail(
            Failure::failed(format!(
                "--memory {} for each of {nodes} nodes: this machine has only {} available",
                ByteSize(bytes),
                ByteSize(available).approximate()
            ))
            .hint("lend less, or free memory first"),
        ),
        _ => Ok(()),
    }
}

fn start(args: &Args, settings: &Settings, wanted: Access) -> anyhow::Result<(Running, Ready)> {
    let server = crate::commands::master::bind(settings.master.clone())?;
    let rpc = server.rpc_addr();
    let http = server.http_addr().map(|addr| addr.to_string());
    let master = server.spawn().context("cannot start the master's thread")?;
    let address: Masters = reachable(rpc).to_string().parse()?;
    let mut running = Running { gateway: None, local: None, nodes: Vec::new(), master };
    let mut store = settings.client.clone();
    store.master = address.clone();
    store.engine.listen.set_ip(settings.node.node.engine.listen.ip());
    store.engine.advertise_host.clone_from(&settings.node.node.engine.advertise_host);
    store.engine.fabrics = settings.node.node.engine.fabrics;
    // Started before the nodes, whose memory takes a while: a client that waits for the first node finds the
    // gateway and the socket open.
    running.gateway =
        wanted.gateway.map(|addr| Gateway::start(addr, &store)).transpose().context("--gateway")?;
    if let Some(path) = wanted.local {
        let path = match path.as_os_str() == "auto" {
            true => make_default_path(&address)
                .context("--local auto: cannot create the directory of the socket")?,
            false => path,
        };
        running.local = Some(LocalServer::start(local_server_config(path, store)).context("--local")?);
    }
    let mut nodes = Vec::new();
    for index in 1..=args.nodes {
        if let Some(exit) = sys::interrupted() {
            return fail(Failure::silent(exit));
        }
        let mut config = settings.node.node.clone();
        config.master = address.clone();
        config.name = match args.nodes {
            1 => config.name,
            _ => format!("{}-{index}", config.name),
        };
        if index > 1 {
            config.engine.listen.set_port(0);
        }
        let (name, memory_bytes) = (config.name.clone(), config.capacity_bytes);
        let node = crate::commands::node::start(config)?;
        nodes.push(NodeReady {
            ready: "node".to_owned(),
            name,
            endpoint: node.endpoint().to_owned(),
            memory_bytes,
            http: None,
            local: None,
            gateway: None,
        });
        running.nodes.push(node);
    }
    let ready = Ready {
        ready: "up",
        rpc: rpc.to_string(),
        http,
        nodes,
        gateway: running.gateway.as_ref().map(|gateway| gateway.addr().to_string()),
        local: running.local.as_ref().map(|local| local.path().to_owned()),
    };
    Ok((running, ready))
}

impl Running {
    /// Stops the users of the store, then all nodes at the same time, then the master.
    fn stop(self) -> anyhow::Result<()> {
        drop(self.gateway);
        drop(self.local);
        std::thread::scope(|scope| {
            for node in self.nodes {
                scope.spawn(move || node.stop());
            }
        });
        self.master.stop().context("the master did not stop in order")
    }
}

/// The address at which clients on this machine reach the listener.
fn reachable(addr: SocketAddr) -> SocketAddr {
    let ip = match addr.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, addr.port())
}

/// The text of the ready line.
fn said(ready: &Ready, bytes: u64) -> String {
    let part = |what: &str, at: Option<String>| at.map(|at| format!(", {what} {at}")).unwrap_or_default();
    let nodes = match ready.nodes.len() {
        1 => ByteSize(bytes).to_string(),
        nodes => format!("{nodes} × {}", ByteSize(bytes)),
    };
    format!(
        "snowskin is up: {nodes}, master {}{}{}{}; Ctrl-C ends it\n",
        ready.rpc,
        part("page", ready.http.as_ref().map(|http| format!("http://{http}/"))),
        part("gateway", ready.gateway.as_ref().map(|addr| format!("http://{addr}/v1/objects"))),
        part("local clients", ready.local.as_ref().map(|path| path.display().to_string())),
    )
}
