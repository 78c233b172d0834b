//! The store as pure state machines.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod client;
mod codec;
mod config;
mod error;
mod limbo;
mod master;
pub mod message;
mod nodes;
mod objects;
pub mod offset;
mod segments;
mod serve;
mod slab;
mod stats;
pub mod wire;

pub use codec::{Items, Key, Short};
pub use config::{ConfigError, MasterConfig};
pub use error::ErrorCode;
pub use master::Master;
pub use message::{Kind, Operation, SegmentNo};
pub use stats::Stats;
pub use wire::{Frame, FrameBuffer, FrameWriter, Header, WireError};
