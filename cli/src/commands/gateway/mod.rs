//! `snowskin gateway`: the store over HTTP, for programs without a client library and for manual inspection.
//!
//! ```text
//!   HTTP ──▶ HttpServer (one thread: connections, limits, timeouts) ──▶ objects (the API)
//!                                                                      │ jobs, a short queue
//!                                                                      ▼
//!                                                                   pool: threads, one store client each
//! ```
//!
//! Values are held in memory as a whole, and verified as by any client. There is no authentication: any
//! process that reaches the port can read, store and remove objects.

mod objects;
mod parse;
mod pool;
mod room;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use store_client::{ClientConfig, ClientMetrics};
use store_master::{HttpLimits, HttpServer};

use crate::commands::master::{announce, wait_for_signal};
use crate::commands::no_start;
use crate::commands::waiting::wait_for_master;
use crate::config::FlagsOfClient;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::size::ByteSize;
use crate::{Outcome, fail, sys};
use objects::{App, Counters};
use pool::{Pool, Threads};
use room::{BodyLimits, Rooms};

const AFTER_HELP: &str =
    "It has NO AUTHENTICATION: any process that reaches its port can read, store and remove objects. Keep it \
    on loopback, or behind a proxy that authenticates its clients.

Examples:
  snowskin gateway
  curl -T block.kv localhost:9005/v1/objects/chat/7/0?ttl_ms=600000
  curl -r 0-1023 localhost:9005/v1/objects/chat/7/0
  curl localhost:9005/v1/objects?prefix=chat/
  curl localhost:9005/openapi.json";

/// Run an HTTP gateway: objects over PUT, GET, HEAD and DELETE
///
/// Runs in the foreground until Ctrl-C or SIGTERM, and then stops in order (exit code 0). `snowskin node
/// --gateway` runs the same gateway within a node. If the master does not listen when the gateway starts, the
/// gateway waits for it.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Address to listen on; port 0 picks a free port.
    #[arg(
        long,
        env = "SNOWSKIN_GATEWAY_LISTEN",
        hide_env_values = true,
        default_value = "127.0.0.1:9005",
        value_name = "ADDR:PORT"
    )]
    listen: SocketAddr,
    #[command(flatten)]
    flags: FlagsOfClient,
    #[command(flatten)]
    limits: LimitArgs,
    /// Print the address as one line of JSON.
    #[arg(long)]
    json: bool,
}

/// Limits of a gateway.
#[derive(Clone, Copy, Debug, clap::Args)]
struct LimitArgs {
    /// Clients of the store, each with a thread and an engine: the number of requests that are served at the
    /// same time.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: u16,
    /// Most connections at the same time; further ones wait.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    connections_max: u16,
    /// Longest object.
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    body_bytes_max: ByteSize,
    /// Memory for objects in transit, half of it for uploads and half for downloads.
    #[arg(long, default_value = "1GiB", value_name = "SIZE")]
    buffered_bytes: ByteSize,
    /// Timeout for the head of a request, and for an idle connection, milliseconds.
    #[arg(long, default_value_t = 10_000, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    head_ms_max: u32,
    /// Timeout for the body of a request, milliseconds.
    #[arg(long, default_value_t = 60_000, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    body_ms_max: u32,
    /// Timeout for each 64 KiB of a body that a client sends, or of a response that it reads, milliseconds.
    #[arg(long, default_value_t = 30_000, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    stall_ms_max: u32,
}

impl Default for LimitArgs {
    fn default() -> Self {
        Self {
            clients: 2,
            connections_max: 256,
            body_bytes_max: ByteSize(256 << 20),
            buffered_bytes: ByteSize(1 << 30),
            head_ms_max: 10_000,
            body_ms_max: 60_000,
            stall_ms_max: 30_000,
        }
    }
}

impl LimitArgs {
    /// The length of the longest object, and the memory for all, bytes.
    fn checked(&self) -> anyhow::Result<(u64, u64)> {
        let (body, buffered) = (self.body_bytes_max.bytes(), self.buffered_bytes.bytes());
        if body == 0 || buffered / 2 < body || buffered > BUFFERED_BYTES_MAX {
            let message = format!(
                "--body-bytes-max {} and --buffered-bytes {}: there must be memory for at least two of the \
                longest objects, one per direction",
                self.body_bytes_max, self.buffered_bytes
            );
            return fail(
                Failure::usage(message)
                    .hint("--body-bytes-max is at least 1 B, --buffered-bytes at most 1 TiB"),
            );
        }
        Ok((body, buffered))
    }
}

/// The line that a gateway prints when it serves.
#[derive(Serialize)]
struct Ready {
    ready: &'static str,
    http: String,
}

/// A running gateway. Dropping it stops it; requests in progress get a short time to finish.
pub(crate) struct Gateway {
    metrics: Vec<ClientMetrics>,
    server: Option<HttpServer>,
    threads: Option<Threads>,
    addr: SocketAddr,
}

/// Time for requests in progress to finish when a gateway stops.
const GRACE: Duration = Duration::from_secs(5);

impl Gateway {
    /// Connects to the store, and listens and serves with the default limits.
    ///
    /// # Errors
    /// No master answers, or the address cannot be bound.
    pub(crate) fn start(listen: SocketAddr, store: &ClientConfig) -> anyhow::Result<Self> {
        Self::start_with(listen, store, LimitArgs::default())
    }

    fn start_with(listen: SocketAddr, store: &ClientConfig, limits: LimitArgs) -> anyhow::Result<Self> {
        let (body, buffered) = limits.checked()?;
        let mut store = store.clone();
        store.value_bytes_max = body;
        let (pool, threads) =
            Pool::start(&store, limits.clients, usize::from(limits.connections_max)).map_err(no_start)?;
        let metrics = pool.metrics().to_vec();
        let app = App {
            pool,
            counters: Arc::new(Counters::default()),
            rooms: Rooms::new(
                buffered,
                BodyLimits {
                    time_max: Duration::from_millis(limits.body_ms_max.into()),
                    stall_max: Duration::from_millis(limits.stall_ms_max.into()),
                },
            ),
            body_bytes_max: body,
            own_hosts_only: listen.ip().is_loopback(),
        };
        let mut http = HttpLimits::default();
        http.connections_max = limits.connections_max.into();
        http.head_ms_max = limits.head_ms_max;
        http.stall_ms_max = limits.stall_ms_max;
        let mut server = HttpServer::bind(listen).map_err(|error| {
            Failure::failed(format!("cannot listen at {listen}: {error}"))
                .hint("stop the process that listens there, or choose another address")
        })?;
        server.serve(objects::router(app), http, GRACE).context("cannot start the gateway's thread")?;
        let addr = server.addr();
        if !addr.ip().is_loopback() {
            tracing::warn!("the gateway at {addr} has no authentication, and is not on loopback");
        }
        Ok(Self { metrics, server: Some(server), threads: Some(threads), addr })
    }

    /// Metrics of its clients of the store.
    pub(crate) fn client_metrics(&self) -> &[ClientMetrics] {
        &self.metrics
    }

    /// The address that it listens on.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// The largest value of --buffered-bytes, bytes.
const BUFFERED_BYTES_MAX: u64 = 1 << 40;

impl Drop for Gateway {
    fn drop(&mut self) {
        // The server holds handles of the pool; when they are dropped, the pool's threads end.
        drop(self.server.take());
        if let Some(threads) = self.threads.take() {
            threads.join();
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::catch_interrupts();
    sys::lift_file_limit();
    args.limits.checked()?;
    wait_for_master(&args.flags.settings().client)?;
    let gateway = Gateway::start_with(args.listen, &args.flags.settings().client, args.limits)?;
    let ready = Ready { ready: "gateway", http: gateway.addr().to_string() };
    announce(args.json, &ready, || {
        format!("gateway ready at http://{}/v1/objects: no authentication\n", ready.http)
    });
    wait_for_signal();
    tracing::info!("stopping");
    drop(gateway);
    Ok(Exit::Ok)
}
