//! The store as pure state machines: no I/O, no clock, no randomness, no threads.
//!
//! ```text
//!      a client's process                     the wire                       the master's process
//!   sockets, buffers, fabric                                                 sockets, clock
//!  ┌───────────────────────┐                                              ┌───────────────────┐
//!  │ client::GetOp, PutOp  │ ── request ─▶ ┌──────────────────┐ ────────▶ │ Master            │
//!  │  what to call, move,  │               │ wire: frames     │           │  objects  leases  │
//!  │  fence, verify        │ ◀─ response ─ │ message: bodies  │ ◀──────── │  segments  nodes  │
//!  └──────────┬────────────┘               └──────────────────┘           │ pending release   │
//!             │ bytes, one-sided                                          │ eviction          │
//!             │                                                           └─────────▲─────────┘
//!             ▼                                                                     │ mount, heartbeat
//!   ┌───────────────────────────────────────────────────────────────────────────────┴─────────┐
//!   │ nodes: memory, exported through te-core                                                 │
//!   └─────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The life of an object: `put_start` reserves space on distinct segments, the writer moves its bytes
//! straight to the nodes, `put_end` commits them with a checksum, and from then on `get` returns where they
//! are, under a lease. No byte of an object passes through the master. Three rules ensure that a reader never
//! accepts wrong bytes:
//!
//! * **Space is reused only when no process can touch it any more.** Not while a lease is valid, and not
//!   while a writer's bytes may still land: the writer committed, or reported that it is quiet (every write
//!   has ended, or was fenced by its target), or the node reported that it has cut the writer off. See
//!   [`Master`].
//! * **Readers verify.** The bytes count only if their checksum, bound to key and generation ([`bound`]), is
//!   the committed one and the lease had not run out on the reader's own clock. Everything else is a miss.
//!   See [`client::GetOp`].
//! * **Nothing is named twice.** Generations and segment numbers are never reused, not even after a restart
//!   of the master.
//!
//! Beside the master and its clients there are three more state machines:
//! [`command_log`] repeats a master's changes in another process, [`ha`] decides which process leads, and
//! [`disk`] keeps objects on a node's SSD.
//!
//! Every call takes the time as an argument, so the whole store runs in one thread, with every fault, from
//! one seed: `tests/simulation`.
//!
//! # Limits
//!
//! | What | Limit | Where |
//! |---|---|---|
//! | Frame | 4 MiB | [`wire::FRAME_BYTES_MAX`] |
//! | Keys in a request | 4,096 | [`wire::KEYS_PER_BATCH_MAX`] |
//! | Key | 1 to 1,024 bytes | [`wire::KEY_BYTES_MAX`], [`MasterConfig::key_bytes_max`] |
//! | Replicas of an object | 8 | [`message::REPLICAS_MAX`], [`MasterConfig::replicas_max`] |
//! | Object | 1 byte to one segment, its trailer included | [`chunks`] |
//! | Segment | 64 bytes to 64 TiB | [`allocator::GRAIN_BYTES`], [`MasterConfig::segment_bytes_max`] |
//! | Segments, nodes | 4,096 each | [`MasterConfig::segments_max`], [`MasterConfig::nodes_max`] |
//! | Members of a group | 4,096 | [`message::Retention::group`] |
//! | Bytes pinned for good | half of all | [`MasterConfig::hard_pin_share_max`] |
//! | Objects | 100 million by default, at most 2^31 | [`MasterConfig::objects_max`] |
//! | Master memory per object | about 160 bytes with keys up to 38 bytes and one replica | `tests/memory.rs` |
//! | Tenants | 1,024 by default, at most 4,096 | [`MasterConfig::tenants_max`] |
//! | Name or endpoint of a segment | 256 bytes | [`message::NAME_BYTES_MAX`] |
//!
//! # Example
//!
//! One put and one get, with a `Vec` in place of the fabric and the node:
//!
//! ```
//! use store_core::client::{Action, ClientConfig, GetItem, GetOp, PutItem, PutOp, TransferEnd};
//! use store_core::message::{MountSegment, PutRequest};
//! use store_core::{Frame, Incarnation, Master, MasterConfig, NodeId, Session};
//! use te_core::Instant;
//!
//! let now = Instant::from_millis(1);
//! let mut master = Master::new(MasterConfig::default())?;
//! let mut session = Session::default();
//! let mut memory = vec![0u8; 4096];
//! let segment = MountSegment {
//!     node: NodeId::new(1),
//!     incarnation: Incarnation::new(1),
//!     name: "n1",
//!     endpoint: "n1:9000",
//!     len: 4096,
//!     ..MountSegment::default()
//! };
//! master.mount(now, &segment)?.mounted()?;
//!
//! let mut put = PutOp::new(ClientConfig::default());
//! put.start([PutItem { key: b"greeting", len: 5, checksum: 42 }], PutRequest { writer: 1, ..PutRequest::default() });
//! let (mut request, mut response) = (Vec::new(), Vec::new());
//! let mut request_id = 0;
//! while !put.is_done() {
//!     request_id += 1;
//!     match put.poll(now, request_id, &mut request) {
//!         Some(Action::Call) => {
//!             master.handle(now, &mut session, &Frame::parse(&request)?.expect("whole").0, &mut response);
//!             put.handle_response(now, &Frame::parse(&response)?.expect("whole").0);
//!             (request.clear(), response.clear());
//!         }
//!         Some(Action::Transfer(write)) => {
//!             memory[write.addr as usize..][..5].copy_from_slice(b"hello");
//!             put.handle_transfer(write.id, TransferEnd::written());
//!         }
//!         other => panic!("nothing goes wrong here: {other:?}"),
//!     }
//! }
//! assert!(put.result(0).expect("done").is_ok());
//!
//! let mut get = GetOp::new(ClientConfig::default());
//! get.start([GetItem { key: b"greeting", capacity: 64, len_min: 1 }], &[]);
//! let mut buffer = Vec::new();
//! while !get.is_done() {
//!     request_id += 1;
//!     match get.poll(now, request_id, &mut request) {
//!         Some(Action::Call) => {
//!             master.handle(now, &mut session, &Frame::parse(&request)?.expect("whole").0, &mut response);
//!             get.handle_response(&Frame::parse(&response)?.expect("whole").0);
//!         }
//!         Some(Action::Transfer(read)) => {
//!             buffer = memory[read.addr as usize..][..read.len as usize].to_vec();
//!             get.handle_transfer(now, read.id, TransferEnd::read(42)); // 42: the checksum of `buffer`
//!         }
//!         other => panic!("nothing goes wrong here: {other:?}"),
//!     }
//! }
//! assert!(get.result(0).expect("done").is_ok());
//! assert_eq!(buffer, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod allocator;
mod bound;
pub mod chunks;
pub mod client;
mod codec;
pub mod command_log;
mod config;
pub mod disk;
mod disks;
mod error;
mod event;
mod eviction;
pub mod ha;
mod handle;
mod ids;
mod kv_events;
mod location;
mod map;
mod master;
pub mod message;
mod nodes;
mod objects;
mod pattern;
mod pending_release;
pub mod placement;
mod pools;
mod proof;
mod read_rates;
mod room;
mod segments;
mod serve;
mod session;
mod shelf;
mod slab;
pub mod snapshot;
mod stats;
mod tasks;
mod tenant;
mod times;
mod trace;
pub mod wire;
mod writers;

pub use allocator::AllocatorKind;
pub use bound::{bound, unbound};
pub use codec::{Items, Key, Short};
pub use config::{ChangeHow, ConfigChange, ConfigChanges, ConfigError, MasterConfig, QUICK_LEASE_MS};
pub use error::ErrorCode;
pub use event::Event;
pub use eviction::{BatchOrder, EvictionPolicy, Place, UnknownPolicy};
pub use ids::{Incarnation, NodeId, SegmentNo, TaskId, TenantNo};
pub use kv_events::{KvEvent, KvEvents, KvEventsLost, KvTier};
pub use location::{MemoryLocation, STORAGE_GRANULES};
pub use master::Master;
pub use message::{Kind, Operation};
pub use placement::{AllocationStrategy, Placement, UnknownStrategy};
pub use proof::{CHALLENGE_BYTES, PROOF_BYTES, Role, is_proved, prove};
pub use read_rates::{ReplicationConfig, ReplicationMode};
pub use session::{Peer, Session};
pub use stats::Stats;
pub use tasks::TaskConfig;
/// The time that every operation takes, because nothing here has a clock.
pub use te_core::Instant;
pub use te_core::Secret;
pub use tenant::{DEFAULT_TENANT, FullKey, SECRET_BYTES_MAX, TENANT_BYTES_MAX, TenantConfig, TenantTag};
pub use times::Times;
pub use trace::Trace;
pub use wire::{Frame, FrameBuffer, FrameWriter, Header, WireError};
