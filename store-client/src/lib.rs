//! Clients and nodes of the store.
//!
//! ```text
//!            Client                                               Node
//!   put ───▶ ┌──────────────────────┐          ┌───────────────────────┐
//!   get ◀─── │ GetOp, PutOp         │          │ heartbeat ─────────┐  │
//!            │  (store_core::client)│          │ memory (exported)  │  │
//!            │   │              │   │  bytes   │   ▲                │  │
//!            │ RpcConnection  Mover ═╪══════════╪═══╝ te_engine      │  │
//!            └───┼──────────────────┘          └────────────────────┼──┘
//!                │ who has it, where, under which lease              │ mount, beat
//!                └──────────────────▶ the master ◀───────────────────┘
//! ```
//!
//! [`Client`] runs the state machines of [`store_core::client`] on the calling thread: it asks the master, moves the bytes
//! itself, checks them, and believes nothing that it has not checked. [`Node`] lends memory to the store.
//! [`RpcConnection`] is the bare connection, for tools and for load.
#![deny(unsafe_code)]

mod bounce;
mod checksum;
mod client;
mod config;
mod error;
mod fabric;
mod memory;
mod mover;
mod node;
mod rpc;
mod segments;
mod sys;

pub use client::{Client, Counters, ListEntry, ListPage, SegmentEntry};
pub use config::{ClientConfig, NodeConfig};
pub use error::{ConnectError, RpcError, StoreError};
pub use memory::BufferRange;
pub use node::{Node, NodeStatusReport};
pub use rpc::{Address, RpcConfig, RpcConnection};
pub use store_core::message::PutOptions;
pub use store_core::{ErrorCode, SegmentNo, Stats};
pub use te_engine::{Fabrics, MemSpan, RegionId, SharedRegion};
