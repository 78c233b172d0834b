//! The Transfer Engine: bytes between registered memory of processes, over whatever fabric both sides have.
//!
//! ```text
//!   threads                    Transfer ◄──────────── ended: wait, poll, .await
//!     │  submit, cancel, register, open_segment           ▲
//!     ▼                                                   │
//!   TransferEngine ══ mailbox, bell ══► worker ── owns ── Engine ◄── or one thread owns and polls it itself
//!                                                         │
//!      regions: what is ours, by address, who uses it ────┤
//!      segments: what is a peer's, by name and address ───┤
//!      batches: requests ► slices, six statuses, deadlines┤
//!                                                         ▼
//!                         MultiTransport under a route: the nearest rail that reaches the segment
//!                            │             │             │           │
//!                          local          shm        rdma × ports   tcp
//!                       same process    same host     elsewhere   elsewhere
//!                          memcpy     memfd + memcpy   te-rdma     te-tcp
//!
//!   control port (one thread): descriptor?  notify  probe     ◄── peers' open_segment, notify, probe
//! ```
//!
//! * **A segment is a peer's exported memory**, called by the `host:port` of its control port, or by a name that a directory
//!   knows ([`metadata`]). Opening it asks the peer for its
//!   descriptor: regions by address, rights, what each fabric needs, and the *incarnation* of the process. After a restart
//!   the old handle is refused ([`SegmentError::Restarted`]), not misread.
//! * **Remote addresses are the owner's own**, as [`SharedRegion::addr`] gives them; a request lies in one region.
//! * **When a transfer has ended, nothing touches its local memory** (law L2 of [`te_core::Transport`]), whichever way it ended.
//!   What cannot be drained in time is quarantined: reported, counted, its region stays `Busy`, and its segment cannot be fenced
//!   until it has drained after all.
//! * **Two ways to own memory.** [`TransferEngine::register`] takes raw memory on the caller's word, and `unregister` refuses while
//!   requests use it. [`TransferEngine::register_buffer`] takes the owner apart; `read` and `write` move the buffer into
//!   the [`Transfer`], which gives it back.
//! * **Who polls.** A [`TransferEngine`]'s worker spins for `spin_us` after the last work and then sleeps on the fabrics'
//!   descriptors: idle, it burns no CPU. An [`Engine`] is polled by its one owner: no thread hop, and no progress, not even for
//!   peers, while it is not polled.
//! * **Who may ask.** With a [`cluster_secret`](Config::cluster_secret) the control port tells what it exports only to who proves to
//!   know it, and an engine believes only owners that do. A peer that is not wanted any more is [expelled](TransferEngine::expel):
//!   once it is gone, nothing of it lands in our memory.
//! * **A child after a fork** hears `Forked` at each call, and nothing of its parent's is touched: see [`te_host::fork`].
//!
//! Features: `tcp` and `rdma` (both default; libibverbs is loaded at run time), `uring` (io_uring under TCP). A [`Transfer`] is a
//! `Future`, of any runtime. `local` and `shm` are always there. [`fabrics`](fn@fabrics) lists what there is, [`Fabrics`]
//! chooses, and [`start_with_fabrics`](TransferEngine::start_with_fabrics) adds one that is not in this crate.
//!
//! # Example
//!
//! Two engines, here in one process, and bytes there and back over each fabric.
//!
//! ```
//! use std::time::Duration;
//! use te_core::{Access, Op};
//! use te_engine::{Config, Fabrics, TransferEngine, TransferRequest};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let timeout = Some(Duration::from_secs(10));
//!     // Those that every host has.
//!     let everywhere = te_engine::fabrics().iter().filter(|entry| entry.is_built() && entry.name != "rdma");
//!     for fabrics in everywhere.map(Fabrics::of) {
//!         let config = Config { fabrics, ..Config::default() };
//!         let (here, there) = (TransferEngine::start(config.clone())?, TransferEngine::start(config)?);
//!
//!         // The target exports memory. Its name and the address are all that we need to know.
//!         let remote = there.alloc_shared(1 << 20, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
//!         let segment = here.open_segment(there.name())?;
//!
//!         // Raw requests: as many as fit a batch, each between a registered local range and a remote one.
//!         let local = here.alloc_shared(1 << 20, Access::LOCAL)?;
//!         local.write(0, b"kv cache")?;
//!         let write =
//!             TransferRequest { op: Op::Write, local: (local.id(), 0).into(), segment, remote_addr: remote.addr(), len: 8 };
//!         here.submit(&[write], timeout)?.wait(None)?;
//!
//!         // Owned buffers: the transfer holds the buffer, and gives it back.
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
mod handle;
pub mod metadata;
mod payload;
mod region;
mod request;
mod secret;
mod tiers;
mod transfer;
mod worker;

pub use affinity::Affinity;
pub use config::{Config, ControlConfig, MetadataConfig, TopologySource};
pub use descriptor::{Descriptor, RegionDescriptor};
pub use engine::{Engine, FenceHandle};
pub use error::{
    ExpelError, GivenBack, RegisterError, RequestProblem, SegmentError, StartError, TransferError,
};
pub use fabrics::{Cause, Fabric, FabricContext, FabricEntry, Fabrics, Rail, Tier, UnknownFabric, fabrics};
pub use handle::TransferEngine;
pub use metadata::{
    Directory, Located, Metadata, MetadataError, MetadataSource, PeerToPeer, Registration, SourceError,
};
pub use payload::Payload;
pub use region::SharedRegion;
pub use request::{
    BatchReport, Expulsion, Liveness, LocalAddr, Notification, RailStats, RemoteRegion, RequestStatus,
    SegmentHandle, Stats, TransferRequest,
};
pub use secret::Secret;
pub use te_fabric::ConfigError;
pub use transfer::Transfer;
