//! Clients and nodes of the store.
//!
//! There are three kinds of clients with one trait, [`Store`]. All of them get and put [items](Get), each
//! with its key, its [`Source`] or [`Sink`] and its own result, and all report one error type,
//! [`StoreError`].
//!
//! ```text
//!                       Store: get put exists remove, in batches
//!      ┌────────────────────────┬──────────────────────────┐
//!   Client                BlockingClient              LocalClient
//!   its own engine        threads and tasks share     no engine: uses the node on
//!      │                  one Client (AsyncClient)    this machine (LocalServer)
//!      ▼                        │                          │
//!   ┌───────────────────────┐ ◄─┴──────────────────────────┘ ┌───────────────────────┐
//!   │ GetOp, PutOp          │                                 │ Node                  │
//!   │  (store_core::client) │                                 │ heartbeat ─────────┐  │
//!   │   │              │    │  bytes                          │ memory (exported)  │  │
//!   │ RpcConnection  mover ═╪═══════ te_engine ═══════════════╪══▶                 │  │
//!   └───┼───────────────────┘                                 └────────────────────┼──┘
//!       │ which replicas, where, under which lease                     mount, beat │
//!       └──────────────────────────────▶ the master ◀──────────────────────────────┘
//! ```
//!
//! [`Client`] runs the state machines of [`store_core::client`] on the calling thread: it sends requests to
//! the master, moves the bytes itself, and verifies every checksum and lease. [`Node`] lends memory to the
//! store. [`AsyncClient`] is a client on its own thread, for asynchronous tasks, and [`BlockingClient`] is
//! its blocking interface for threads. [`LocalClient`] has neither engine nor fabric: it sends its requests
//! to the node on its machine, which runs a [`LocalServer`] (module [`local`]). [`MasterClient`] has the
//! requests that concern the master alone: which objects exist and where, tasks, drains. [`RpcConnection`] is
//! the bare connection, for tools and load generators.
//!
//! Memory of a GPU is a source and a destination like other registered memory ([`Client::register`]). The CPU
//! never touches it: its bytes pass through slots of page-locked host memory, where they are summed.
//!
//! ```
//! use store_client::{BufferRange, Client, ClientConfig, Get, Node, NodeConfig, Put, PutOptions, Store as _};
//! use store_master::{Config, MasterServer};
//!
//! // A master, a node and a client, usually three processes on three machines.
//! let config = Config { rpc_listen: "127.0.0.1:0".parse()?, http_listen: None, ..Config::default() };
//! let master = MasterServer::bind(config)?.spawn()?;
//! let address = master.rpc_addr();
//! let node = Node::start(NodeConfig::new("node-1", address.into(), 8 << 20))?;
//! let mut client = Client::connect(ClientConfig::new(address.into()))?;
//!
//! // Bytes in, bytes out.
//! assert!(client.put(b"prompt/0", b"the block's bytes", &PutOptions::default())?);
//! assert_eq!(client.get(b"prompt/0")?.as_deref(), Some(b"the block's bytes".as_slice()));
//! assert_eq!(client.get(b"prompt/1")?, None); // a miss is not an error
//!
//! // Many items in one call, without a copy: from and into registered memory. Each item has its own result.
//! let blocks = client.alloc(1 << 20)?;
//! let range = |block: u64| BufferRange::part(&blocks, block * 4096, 4096);
//! let mut puts = [Put::new("prompt/1", range(0)), Put::new("prompt/2", range(1))];
//! assert!(client.batch_put(&mut puts, &PutOptions::default()).is_complete());
//!
//! let (mut part, mut whole) = ([0; 5], Vec::new());
//! let mut gets = [
//!     Get::new("prompt/1", range(2)),
//!     Get::new("prompt/0", &mut part).range(4..9),
//!     Get::new("prompt/0", &mut whole),
//!     Get::new("prompt/3", range(3)),
//! ];
//! let tally = client.batch_get(&mut gets);
//! assert_eq!((tally.done, tally.missed, tally.failed), (3, 1, 0));
//! assert_eq!((gets[0].result()?, gets[3].result()?), (Some(4096), None));
//! assert_eq!((&part, whole.len()), (b"block", 17));
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
mod direct;
pub mod disk;
mod engine;
mod error;
mod item;
pub mod local;
mod master;
mod memory;
mod metrics;
mod mover;
mod node;
mod packs;
mod pools;
mod prefetching;
mod quarantine;
mod rpc;
mod segments;
pub mod stage;
mod store;
mod sys;

pub use async_client::{AsyncClient, BlockingClient, OwnedSource, Pending, QUEUE_JOBS_MAX, SharedPart};
pub use client::{Client, Counters, PutRange};
pub use config::{
    ClientConfig, DiskExport, DiskExportList, DiskList, NamespacePlace, Nguid, NodeConfig, NodeCxlConfig,
    NodeDiskConfig, NodeStorageConfig, UnknownDisk, UnknownExport, UnknownNamespace, UnknownNguid,
};
pub use direct::NotDirect;
pub use error::{ConnectError, DeviceError, RpcError, StoreError};
pub use item::{Get, PARTS_MAX, Put, Sink, Source, Tally};
pub use local::{LocalBuffer, LocalClient, LocalRange, LocalServer};
pub use master::{
    BulkRemoval, ListEntry, ListPage, Located, MasterClient, ObjectInfo, ReplicaEntry, ReplicasOfEach,
    SegmentEntry, TaskEntry, TaskPage,
};
pub use memory::{BufferRange, Fragment};
pub use metrics::{ClientMetrics, metrics_text_of};
pub use node::{DiskKind, DiskReport, Node, NodeStatusReport};
pub use prefetching::Prefetching;
pub use rpc::{Address, Identity, LeaderHint, Masters, RpcConfig, RpcConnection};
pub use store::{RemoveMode, Store};
pub use store_core::Placement;
pub use store_core::message::{
    DiskCopy, DrainInfo, Existing, Inherit, InheritPin, Pin, Prefetched, PutOptions, ReplicaInfo,
    ReplicaState, Retention, RetentionChange, SegmentState, TaskCause, TaskReport, TaskState, TtlChange,
};
pub use store_core::{ErrorCode, Incarnation, NodeId, SegmentNo, Stats, TaskId, Trace};
pub use te_core::{MemSpan, RegionId};
pub use te_engine::{Fabrics, SharedRegion};
