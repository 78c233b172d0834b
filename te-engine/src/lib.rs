//! The Transfer Engine: moves bytes between registered memory of processes, over the nearest fabric that both
//! sides have.
//!
//! ```text
//!   threads                    Transfer ◄──────────── ended: wait, poll, .await
//!     │  submit, cancel, register, open_segment           ▲
//!     ▼                                                   │
//!   TransferEngine ══ mailbox, bell ══► worker ─ polls ── Engine ◄── or a thread of the caller calls and polls it
//!                                                         │
//!      regions: local memory, by address, with its users ─┤
//!      segments: memory of peers, by name and address ────┤
//!      batches: requests ► slices, six statuses, deadlines┤
//!                                                         ▼
//!                         MultiTransport under a route: the nearest rail that reaches the segment
//!               │           │            │           │           │          │         │
//!             local        shm        nvlink        cxl    rdma × ports   tcp     nvmeof
//!          same process same host   same host   shared pool  elsewhere elsewhere elsewhere
//!             memcpy   memfd, memcpy te-nvlink     te-cxl     te-rdma   te-tcp   te-nvmeof
//!
//!   control port (one thread): descriptor, notify, probe      ◄── open_segment, notify, probe of peers
//! ```
//!
//! * **A segment is the memory that a peer exports.** Its name is `host:port` of the peer's control port, or
//!   a name that a directory has ([`metadata`]). Opening it fetches the peer's descriptor: regions by
//!   address, rights, the exports of each fabric, and the *incarnation* of the process. After a restart of
//!   the peer the old handle is refused ([`SegmentError::Restarted`]).
//! * **Each region of a segment becomes a *remote region*** of the rails that reach it. Their number is
//!   limited by [`remote_regions_max`](Config::remote_regions_max).
//! * **Remote addresses are addresses in the owner's address space**, as [`SharedRegion::addr`] returns them;
//!   a request lies in one region.
//! * **After a transfer has ended, nothing touches its local memory** (law L2 of [`te_core::Transport`]),
//!   however it ended. What cannot be drained in time is quarantined: it is reported and counted, its region
//!   stays `Busy`, and its segment cannot be fenced until it has drained.
//! * **Two kinds of local memory.** [`TransferEngine::register`] takes raw memory, which the caller promises
//!   to keep mapped; `unregister` refuses while requests use it. [`TransferEngine::register_buffer`] takes a
//!   buffer; `read` and `write` move it into the [`Transfer`], which returns it.
//! * **Foreign segments** belong to other systems: a [`Metadata`] of the caller describes them, and a rail of
//!   the caller reaches them ([`start_with_parts`](TransferEngine::start_with_parts)). They have no control
//!   port; the metadata carries notifications and probes, or refuses them ([`SegmentError::Foreign`]).
//! * **Options of a batch** ([`SubmitOptions`]): a timeout, the fabric that carries it, and a notification
//!   that is sent to the owner when the batch has completed.
//! * **Polling.** The worker of a [`TransferEngine`] spins for `spin_us` after the last work and then sleeps
//!   on the file descriptors of the fabrics: an idle engine uses no CPU. An [`Engine`] is polled by a thread
//!   of its caller: without a thread hop, and without any progress, even for peers, while it is not polled.
//! * **Access.** With a [`cluster_secret`](Config::cluster_secret) the control port sends descriptors only to
//!   peers that prove to know the secret, and the engine accepts only owners that prove it. A peer can be
//!   [expelled](TransferEngine::expel): once it is gone, no write of it lands in this engine's memory.
//! * **Fork.** In a child process every call returns `Forked`, and nothing of the parent is touched: see
//!   [`te_host::fork`].
//!
//! Features: `tcp` and `rdma` (both default; libibverbs is loaded at run time), `nvlink`, `cxl`, `nvmeof`,
//! `cuda` and `hip` (memory of GPUs; their drivers' libraries are loaded at run time), `uring` (io_uring for
//! TCP). `local` and `shm` are always built. A [`Transfer`] is a `Future` for any runtime. [`fabrics`](fn@fabrics)
//! lists the fabrics, [`Fabrics`] chooses among them, and
//! [`start_with_fabrics`](TransferEngine::start_with_fabrics) adds one that is not in this crate.
//!
//! # Example
//!
//! Two engines, here in one process, and bytes copied there and back over each fabric.
//!
//! ```
//! use std::time::Duration;
//! use te_core::{Access, Op};
//! use te_engine::{Config, Fabrics, TransferEngine, TransferRequest};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let timeout = Some(Duration::from_secs(10));
//!     // The fabrics that need no device, and no multiples of a granule.
//!     let everywhere = te_engine::fabrics().iter();
//!     let everywhere = everywhere.filter(|entry| entry.is_built() && entry.auto && entry.name != "rdma");
//!     for fabrics in everywhere.map(Fabrics::of) {
//!         let config = Config { fabrics, ..Config::default() };
//!         let (here, there) = (TransferEngine::start(config.clone())?, TransferEngine::start(config)?);
//!
//!         // The target exports memory. The initiator needs only the target's name and the address.
//!         let remote = there.alloc_shared(1 << 20, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
//!         let segment = here.open_segment(there.name())?;
//!
//!         // Raw requests: a batch of them, each between a registered local range and a remote one.
//!         let local = here.alloc_shared(1 << 20, Access::LOCAL)?;
//!         local.write(0, b"kv cache")?;
//!         let write =
//!             TransferRequest { op: Op::Write, local: (local.id(), 0).into(), segment, remote_addr: remote.addr(), len: 8 };
//!         here.submit(&[write], timeout)?.wait(None)?;
//!
//!         // Owned buffers: the transfer holds the buffer, and returns it.
//!         let buffer = here.register_buffer(vec![0u8; 8], Access::LOCAL)?;
//!         let (report, buffer) = here.read(buffer, 0..8, segment, remote.addr(), timeout)?.join();
//!         assert_eq!(report?.bytes, 8);
//!         let buffer = here.unregister_buffer(buffer.expect("it ended"))?;
//!         assert_eq!(buffer, b"kv cache");
//!     }
//!     Ok(())
//! }
//! ```
#![deny(unsafe_code)]

mod affinity;
mod config;
mod control;
mod descriptor;
mod engine;
mod error;
mod fabrics;
#[cfg(fuzzing)]
pub mod fuzzing;
mod gpu;
mod handle;
pub mod metadata;
mod notifier;
#[cfg(not(loom))]
mod ordered;
#[cfg(loom)]
pub mod ordered;
mod payload;
mod pools;
mod region;
mod request;
mod tiers;
mod transfer;
mod worker;

pub use affinity::Affinity;
pub use config::{Config, ControlConfig, MetadataConfig, TopologySource};
pub use descriptor::{Descriptor, RegionDescriptor};
pub use engine::{Engine, FenceHandle};
#[cfg(feature = "nvmeof")]
pub use engine::{MountedStorage, Storage};
pub use error::{
    AtIndex, ExpelError, GivenBack, RegisterError, RequestProblem, SegmentError, StartError, TransferError,
};
pub use fabrics::{
    Cause, Fabric, FabricContext, FabricEntry, Fabrics, HostNeed, Rail, Tier, UnknownFabric, fabrics,
};
pub use gpu::devices;
pub use handle::TransferEngine;
pub use metadata::{
    Directory, Located, Metadata, MetadataError, MetadataSource, PeerToPeer, Registration, SourceError,
};
pub use payload::Payload;
pub use region::{Populate, SharedRegion};
pub use request::{
    BatchReport, Expulsion, LeftOut, Liveness, LocalAddr, Notification, RailStats, RemoteRegion,
    RequestStatus, SegmentHandle, Stats, SubmitOptions, TransferRequest,
};
#[cfg(feature = "cxl")]
pub use te_cxl as cxl;
pub use te_fabric::ConfigError;
#[cfg(feature = "nvmeof")]
pub use te_nvmeof as nvmeof;
pub use transfer::Transfer;
