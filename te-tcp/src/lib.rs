//! Reads and writes of a peer's registered memory over TCP.
#![deny(unsafe_code)]

mod config;
mod connections;
mod endpoint;
pub mod frame;
mod initiator;
mod lane;
mod operation;
mod region;
mod stats;
mod sys;
mod target;
mod transport;

pub use config::{Config, ConfigError, LANES_MAX};
pub use stats::Stats;
pub use transport::{OpenError, TcpTransport};
