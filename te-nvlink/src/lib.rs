//! WIP
#![deny(unsafe_code)]

mod channel;
mod config;
mod export;
mod memory;
mod owner;
mod peers;
mod sys;
mod transport;
pub mod wire;
mod worker;

pub use config::Config;
pub use export::Export;
pub use te_fabric::OpenError;
pub use transport::{NotExported, NvlinkTransport};
