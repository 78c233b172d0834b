//! The master of the store: it knows which objects exist and which segments hold their bytes.
//!
//! This crate is a shell around [`store_core::Master`], which makes every decision; sockets, a clock and a
//! thread are here.
//!
//! ```text
//!   nodes, clients                  one thread                         one thread
//!   ──────────────      ┌──────────────────────────────┐       ┌──────────────────────┐
//!    TCP, Unix   ──────▶│ poll ▶ Connection ▶ Frame ─┐  │       │ /health /ready       │◀── people,
//!    sockets     ◀──────│      one write per turn     ▼  │       │ /metrics             │    Prometheus
//!                       │  store_core::Master (&mut) ───┼──────▶│ (copies, on request) │
//!                       └──────────────────────────────┘       └──────────────────────┘
//! ```
//!
//! - `/metadata` on the HTTP port is a small server of names, for engines that look each other up; the master
//!   itself does not use it. `metadata_server: false` turns it off.
//! - The HTTP port also answers under the names of Mooncake's master (`/get_all_segments`, `/query_key`,
//!   drain jobs, …), and `mooncake_metadata_listen` adds the metadata server of Mooncake's engines on a port
//!   of its own ([`mooncake_metadata`]).
//! - One thread uses the master, so there are no locks. Requests that arrived together are answered with one
//!   write.
//! - The thread spins for `spin_us` after the last request, then sleeps in the kernel: an idle master uses no
//!   CPU time.
//! - [`HttpServer`] serves HTTP here, with limits on silent and slow clients; nodes and gateways use it, too.
//! - Invalid input of a peer ends that peer's connection, after an answer with the reason, and has no other
//!   effect.
//!
//! ```
//! use store_master::{Config, MasterServer};
//!
//! let config = Config {
//!     rpc_listen: "127.0.0.1:0".parse()?,
//!     http_listen: Some("127.0.0.1:0".parse()?),
//!     ..Config::default()
//! };
//! let server = MasterServer::bind(config)?;
//! let stopper = server.stopper(); // for a signal handler
//! println!("clients connect to {}", server.rpc_addr());
//! let master = server.spawn()?; // or `server.run()`, on this thread
//! # drop(stopper);
//! master.stop()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod admin;
mod answering;
mod clock;
mod config;
mod connection;
mod connections;
mod epoch;
mod error;
mod events;
mod ha;
mod held;
mod hosts;
mod http;
mod http_places;
mod http_server;
mod journal;
mod keeper;
#[cfg(feature = "kubernetes")]
#[doc(hidden)] // for the Conductor
pub mod kubernetes;
mod kv_events;
mod liveness;
mod log_limit;
mod metadata;
mod metrics;
mod mooncake;
mod places;
mod proofs;
mod reclaim;
mod server;
mod service;
mod sys;
mod turns;

pub use config::{Config, HaConfig, HttpLimits, MetadataLimits};
pub use error::{BindError, ConfigError, ServeError};
pub use ha::ArbiterReport;
pub use hosts::is_allowed as is_allowed_host;
pub use http_server::{HttpServer, is_own_host};
pub use journal::JournalError;
pub use kv_events::KvEventsConfig;
pub use mooncake::metadata::{SameRpcMeta, mooncake_metadata};
pub use server::{MasterHandle, MasterServer, Stopper};
