//! The Conductor as a server: subscriptions to engines, HTTP, an OpenAI proxy, metrics.
//!
//! Every decision is made in [`conductor_core`]; sockets, clocks and threads are here.
//!
//! ```text
//!   engines, stores              one thread                                      one thread
//!   ───────────────      ┌───────────────────────────┐                   ┌──────────────────────────┐
//!    PUB    ── events ──▶│ poll ▶ zmtp ▶ stream ▶    │   short writes    │ /query /query_by_hash    │◀── routers
//!    ROUTER ◀─ replays ─▶│        decode ▶ apply ────┼──▶ knowledge ◀────┤ /schedule /register      │◀── engines
//!                        └───────────────────────────┘      reads        │ /metrics, status page    │◀── people
//!                          every 60 s: snapshot file                     └──────────────────────────┘
//! ```
//!
//! ```
//! let config = conductor::Config { listen: "127.0.0.1:0".parse()?, ..Default::default() };
//! config.validate()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod compare;
mod config;
pub mod demo;
mod directory;
mod discovery;
#[cfg(feature = "gateway")]
mod gateway;
mod hot;
mod http;
mod io;
mod keeper;
mod kinds;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod metrics;
pub mod mock;
mod place;
mod placing;
pub mod proxy;
mod publisher;
mod registry;
mod replicas;
mod service;
mod shared;
mod snapshot;
mod traffic;
mod turns;

pub use config::{
    BLOCK_TOKENS_MAX, Config, ConfigError, DP_RANKS_MAX, Endpoint, EngineConfig, EngineKind, GatewayConfig,
    KubernetesConfig, LimitsConfig, NAME_BYTES_MAX, PolicyName, Role, ScheduleConfig, StoreConfig,
    StreamsConfig,
};
pub use publisher::Publisher;
pub use registry::RegisterError;
pub use service::{Conductor, ConductorHandle, StartError};
