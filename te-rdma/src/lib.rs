//! One-sided reads and writes of registered memory over RDMA.
//!
//! ```text
//!   Verbs    one opened port: registrations, queue pairs, completions
//!    │
//!   sys (libibverbs at run time)     sim (feature `sim`)
//! ```
//!
//! ```
//! use te_rdma::Config;
//! assert!(Config { qps: 4, ..Config::default() }.validate().is_ok());
//! ```
#![deny(unsafe_code)]

mod channel;
mod complete;
mod config;
mod connection;
mod device;
mod drive;
mod endpoint;
pub mod exchange;
mod link;
mod net;
mod operation;
mod port;
mod post;
mod reach;
mod region;
mod registration;
mod sieve;
#[cfg(feature = "sim")]
pub mod sim;
mod slab;
mod stats;
pub mod sys;
mod target;
mod transport;
pub mod verbs;

pub use config::{CHUNKS_MAX, Config, ConfigError, Progress, QPS_MAX, SGES_MAX};
pub use device::{DeviceSummary, NoRdma};
pub use stats::Stats;
pub use transport::{Dmabuf, OpenError, RdmaTransport};
