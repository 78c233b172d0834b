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
//! [`AsyncClient`] is a client on a thread of its own, for tasks. [`RpcConnection`] is the bare connection, for tools and for load.
//! [`LocalClient`] has neither engine nor fabric: it asks the node on its machine, which runs a [`LocalServer`] (module [`local`]).
//!
//! ```
//! use store_client::{BufferRange, Client, ClientConfig, Node, NodeConfig, PutOptions};
//! use store_master::{Config, MasterServer};
//!
//! // A master, a node and a client, as a rule three processes on three machines.
//! let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
//! let master = MasterServer::bind(config)?.spawn()?;
//! let address = master.rpc_addr();
//! let node = Node::start(NodeConfig::new("node-1", address.into(), 8 << 20))?;
//! let mut client = Client::connect(ClientConfig::new(address.into()))?;
//!
//! // Bytes in, bytes out.
//! assert!(client.put(b"prompt/0", b"the block's bytes", &PutOptions::default())?);
//! assert_eq!(client.get(b"prompt/0")?.as_deref(), Some(b"the block's bytes".as_slice()));
//! assert_eq!(client.get(b"prompt/1")?, None); // a miss is no error
//!
//! // Without a copy: from and into registered memory.
//! let blocks = client.alloc(1 << 20)?;
//! assert!(client.put_from(b"prompt/1", BufferRange::part(&blocks, 0, 4096), &PutOptions::default())?);
//! assert_eq!(client.get_into(b"prompt/1", BufferRange::part(&blocks, 4096, 4096))?, Some(4096));
//!
//! node.stop();
//! master.stop()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod async_client;
mod bounce;
mod checksum;
mod client;
mod config;
mod error;
mod fabric;
pub mod local;
mod memory;
mod metrics;
mod mover;
mod node;
mod quarantine;
mod rpc;
mod segments;
mod sys;

pub use async_client::{AsyncClient, Pending, QUEUE_JOBS_MAX, SharedPart};
pub use client::{
    BulkRemoval, Client, Counters, ListEntry, ListPage, ObjectInfo, PARTS_MAX, SegmentEntry, TaskEntry,
    TaskPage,
};
pub use config::{ClientConfig, NodeConfig};
pub use error::{ConnectError, RpcError, StoreError};
pub use local::{LocalBuffer, LocalClient, LocalServer};
pub use memory::{BufferRange, Fragment};
pub use metrics::{ClientMetrics, metrics_text_of};
pub use node::{Node, NodeStatusReport};
pub use rpc::{Address, Identity, RpcConfig, RpcConnection};
pub use store_core::Placement;
pub use store_core::message::{
    DrainInfo, Pin, PutOptions, ReplicaInfo, ReplicaState, Retention, SegmentState, TaskCause, TaskId,
    TaskReport, TaskState,
};
pub use store_core::{ErrorCode, SegmentNo, Stats, Trace};
pub use te_core::{MemSpan, RegionId};
pub use te_engine::{Fabrics, SharedRegion};
