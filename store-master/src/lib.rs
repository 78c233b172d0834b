//! The master of the store: who has which bytes of whose memory.
//!
//! A shell around [`store_core::Master`], which decides everything; here are sockets, a clock and a thread.
//!
//! ```text
//!   nodes, clients                  one thread                         one thread
//!   ──────────────      ┌──────────────────────────────┐       ┌──────────────────────┐
//!    TCP, Unix   ──────▶│ poll ▶ Connection ▶ Frame ─┐  │       │ /health /ready       │◀── people,
//!    sockets     ◀──────│        one write a round   ▼  │       │ /metrics             │    Prometheus
//!                       │  store_core::Master (&mut) ───┼──────▶│ (a copy, when asked) │
//!                       └──────────────────────────────┘       └──────────────────────┘
//! ```
//!
//! - `/metadata` on the HTTP port is a small server of names, for engines that look each other up; the master itself does not use
//!   it. `metadata_server: false` leaves it out.
//! - Nobody else touches the master, so nothing is locked. Requests that arrived together are answered with one write.
//! - It spins for `spin_us` after the last request, then sleeps in the kernel: an idle master burns no CPU.
//! - [`HttpServer`] is what serves HTTP here, with limits on who is silent or slow; nodes and gateways serve their routes by it, too.
//! - Whatever a peer sends, the worst is the end of its own connection, after an answer that says why.
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
//! let stopper = server.stopper(); // give it to a signal handler
//! println!("clients connect to {}", server.rpc_addr());
//! let master = server.spawn()?; // or `server.run()`, on this thread
//! # drop(stopper);
//! master.stop()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod admin;
mod answering;
mod ballast;
mod clock;
mod config;
mod connection;
mod epoch;
mod error;
mod events;
mod floor;
mod hosts;
mod http;
mod http_places;
mod http_server;
mod metadata;
mod metrics;
mod places;
mod proofs;
mod pulse;
mod seldom;
mod server;
mod service;
mod sys;
mod turns;

pub use config::{Config, HttpLimits, MetadataLimits};
pub use error::{BindError, ConfigError, ServeError};
pub use http_server::{HttpServer, is_own_host};
pub use server::{MasterHandle, MasterServer, Stopper};
