//! `snowskin master`: one process that knows where every object is.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use store_core::EvictionPolicy;
use store_master::{Config, MasterServer};

use crate::commands::cluster::MasterReady;
use crate::commands::eviction_parser;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::{Outcome, output, sys};

const AFTER_HELP: &str = "Examples:
  snowskin master                                        on this machine alone
  snowskin master --listen 10.0.0.5:50051 --http 10.0.0.5:9003
  curl -s localhost:9003/health; curl -s localhost:9003/metrics
  snowskin master --lease-ms 2000 --evict-above 0.9";

/// Run the master: it knows where every object is
///
/// Runs in the foreground until Ctrl-C or SIGTERM, which stop it in order (exit code 0). It keeps metadata
/// only, in memory; nodes lend the bytes (`snowskin node`).
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Where nodes and clients connect; port 0 picks one.
    #[arg(long, env = "SNOWSKIN_LISTEN", default_value = "127.0.0.1:50051", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// A Unix socket for clients on this host, besides --listen.
    #[arg(long, env = "SNOWSKIN_UNIX", value_name = "PATH")]
    unix: Option<PathBuf>,
    /// Where /health, /ready and /metrics are served, or `none`.
    #[arg(long, env = "SNOWSKIN_HTTP", default_value = "127.0.0.1:9003", value_name = "ADDR:PORT")]
    http: HttpListen,
    /// Serve /metadata there as well, where engines register and look up names of segments (--metadata elsewhere).
    #[arg(long, env = "SNOWSKIN_METADATA_SERVER", default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    metadata_server: bool,
    /// How long a reader is protected from eviction, milliseconds.
    #[arg(long, env = "SNOWSKIN_LEASE_MS", default_value_t = 5000, value_name = "MS")]
    lease_ms: u32,
    /// Eviction begins when this share of the pool is used.
    #[arg(long, env = "SNOWSKIN_EVICT_ABOVE", default_value_t = 0.95, value_name = "SHARE")]
    evict_above: f64,
    /// How the object to evict is chosen; `snowskin replay --simulate` says which suits your requests.
    #[arg(long, env = "SNOWSKIN_EVICTION", default_value_t, value_name = "POLICY", value_parser = eviction_parser())]
    eviction: EvictionPolicy,
    /// How long a soft pin holds after the last read, milliseconds.
    #[arg(long, env = "SNOWSKIN_SOFT_PIN_TTL_MS", default_value_t = 1_800_000, value_name = "MS")]
    soft_pin_ttl_ms: u32,
    /// A node that is silent for longer is given up, milliseconds.
    #[arg(long, env = "SNOWSKIN_NODE_TTL_MS", default_value_t = 10_000, value_name = "MS")]
    node_ttl_ms: u32,
    /// How long it polls before it sleeps, microseconds; 0 never spins.
    #[arg(long, env = "SNOWSKIN_SPIN_US", default_value_t = 50, value_name = "µs")]
    spin_us: u32,
    /// Say where it listens as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// An address, or none.
#[derive(Clone, Copy, Debug)]
struct HttpListen(Option<SocketAddr>);

impl std::str::FromStr for HttpListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            text => {
                text.parse().map(|addr| Self(Some(addr))).map_err(|_| "write ADDR:PORT, or none".to_owned())
            }
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    let mut config = Config {
        rpc_listen: args.listen,
        rpc_unix: args.unix.clone(),
        http_listen: args.http.0,
        metadata_server: args.metadata_server,
        spin_us: args.spin_us,
        ..Config::default()
    };
    config.store.lease_ttl_ms = args.lease_ms;
    config.store.node_ttl_ms = args.node_ttl_ms;
    config.store.eviction = args.eviction;
    config.store.soft_pin_ttl_ms = args.soft_pin_ttl_ms;
    config.store.eviction_high_watermark = args.evict_above;
    config.store.eviction_ratio = config.store.eviction_ratio.min(args.evict_above);
    config.store.validate().map_err(|error| Failure::usage(error.to_string()))?;
    let server = MasterServer::bind(config)?;
    let ready = MasterReady {
        ready: "master".to_owned(),
        rpc: server.rpc_addr().to_string(),
        http: server.http_addr().map(|addr| addr.to_string()),
    };
    let serving = server.spawn()?;
    announce(args.json, &ready, || {
        let http =
            ready.http.as_ref().map(|http| format!(", metrics at http://{http}/metrics")).unwrap_or_default();
        format!("master ready at {}{http}\n", ready.rpc)
    });
    wait_for_signal();
    tracing::info!("stopping");
    serving.stop().context("the master did not stop in order")?;
    Ok(Exit::Ok)
}

/// Says that a daemon serves. That nobody listens is no reason to end.
pub(crate) fn announce(json: bool, ready: &impl serde::Serialize, text: impl FnOnce() -> String) {
    let said = if json { output::print_json(ready) } else { output::print(&text()) };
    if said.is_err() {
        tracing::info!("nobody reads stdout");
    }
}

/// Sleeps until Ctrl-C or SIGTERM.
pub(crate) fn wait_for_signal() {
    while sys::wait_for_interrupt(None).is_none() {}
}
