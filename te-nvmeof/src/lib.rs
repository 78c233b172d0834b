//! NVMe over Fabrics on TCP.
#![deny(unsafe_code)]

pub mod command;
mod config;
mod context;
mod controller;
mod export;
mod fence;
pub mod identify;
mod initiator;
mod namespace;
pub mod pdu;
mod queue;
mod stats;
mod stream;
mod sys;
mod target;
mod transport;

pub use namespace::Namespace;
pub use config::{Config, DEPTH_MAX, QUEUES_MAX};
pub use stats::Stats;
pub use te_fabric::{ConfigError, OpenError};
pub use transport::NvmeofTransport;
