//! One-sided reads and writes of registered memory over RDMA: the fabric that this project is for.
//!
//! An [`RdmaTransport`] is one port of one device, one rail. It is both ends at once: it turns its owner's
//! slices into work requests on queue pairs to peers (*initiator*), and it holds queue pairs through which
//! peers reach the regions that it exports (*target*). It is one object with one owner and makes progress
//! only in [`submit`](te_core::Transport::submit) and [`poll`](te_core::Transport::poll).
//!
//! ```text
//!         submit                      poll                     poll_at
//!           │                          ▲                          ▲
//!   ┌───────▼──────────────────────────┴──────────────────────────┴────────┐
//!   │ transport     where the parts meet; drive: one poll                  │
//!   └───┬──────────────┬──────────────┬──────────────┬──────────────┬──────┘
//!       ▼              ▼              ▼              ▼              ▼
//!   initiator        peers         target         memory         timers
//!   our slices:      contacts,     peers'         regions,       (te_fabric)
//!   queue, cut,      pauses,       questions,     the device's
//!   merge, post,     control       queue pairs    keys
//!   complete,        connections   for them,
//!   settle, ask      to them       fences
//!       │              │              │              │
//!       └──────┬───────┴──────┬───────┘              │
//!              ▼              ▼                      │
//!              io            wire                    │
//!   port, our queue pairs,   frames of control       │
//!   completions, sockets,    connections, byte       │
//!   listener, epoll          by byte                 │
//!              │                                     │
//!              ▼                                     ▼
//!   sys   verbs: the seam · libibverbs, found at run time · all unsafe code        sim (feature `sim`)
//! ```
//!
//! An arrow is an import; none points up. The initiator and the target know each other not at all, and peers
//! only by number. `env` lends both what they share: io, memory, timers, settings.
//!
//! The slab, the tables, addresses and pauses, exports, the handshake, timers, the listener and epoll are
//! [`te_fabric`]'s.
//!
//! **Two planes.** Payload goes by RDMA alone: READ and WRITE on reliable connections, straight between
//! registered memory. Everything else goes over a *control connection*, one TCP connection from initiator to
//! target that the transport owns (module [`wire`] has every byte): queue pairs are made to meet there,
//! remote keys are handed out against the key in the export, and fences are asked for and answered. A
//! connection has a direction: who wants to reach opens it. Two ends that open to each other at the same time
//! have two connections and no race.
//!
//! **Who may what.** The export carries a random 64-bit key. Remote keys of the device, which have 32 bits
//! and many of them guessable, are shown only to who has it, and the target's word about rights and length
//! counts, not the export's. A queue pair belongs to the control connection over which it was offered and
//! dies with it. No peer comes in through ours: they are initialised without remote rights. A device's key
//! that was shown once is not used for another region while it is remembered.
//!
//! **Who pays for a failure.** A queue pair fails as a whole. The slice at fault ends with its own error; its
//! neighbours are sent again on a new queue pair, the same bytes to the same range, and their completions say
//! that a fence is needed. When the path is at fault, or the port, all of them end, so that other rails may
//! take them.
//!
//! # Capabilities
//!
//! | | |
//! |---|---|
//! | `READ`, `WRITE` | yes; a WRITE is `Applied` when the target's device has acknowledged its last packet |
//! | `FENCE` | yes; the target destroys the queue pairs that we do not use any more, and says so |
//! | `CHECKSUM` | no: the link's own (ICRC) is all there is. Who stores bytes checks them end to end |
//! | `TWO_SIDED_PROGRESS` | no: transfers do not need the target. Connections, first use of a segment, and fences do |
//! | expel | yes, by the identity in each HELLO: the device destroys the peer's queue pairs. Without force who has a control connection is left alone |
//! | cancel | at once while a slice waits; once posted it drains for [`Config::cancel_drain_ms`], then its queue pair is flushed |
//! | longest slice | [`Config::slice_bytes_max`]; what is longer than a message is spread over the queue pairs |
//! | parking | [`event_source`](te_core::Transport::event_source) is readable only while there is something to do |
//!
//! # What takes time
//!
//! `submit` and `poll` make no system call on the way of a slice but the control connection's `epoll_wait`
//! every sixteenth poll. Making and destroying queue pairs are calls into the kernel, tens of microseconds to
//! some milliseconds each, and happen inside `poll` when a peer is first reached, or reached again after a
//! failure. For peers, about sixteen are made in one poll, and they hold at most half of what the device has.
//! Connecting them may wait for the network (on RoCE the kernel looks for the neighbour: up to a second when
//! none answers) and is done by up to four threads that exist only for that; `poll` learns of the end through
//! its event source. Opening proves the choice of GID by a loopback, at most [`Config::proof_ms_max`] for
//! each GID that is tried. Registering pins pages; long regions are registered in chunks by several threads.
//!
//! # Limits
//!
//! All regions of a transport share the device's protection domain: a peer that holds *one* export and
//! guesses the 32-bit device key of *another* region reaches that one too. What keeps strangers out is that
//! only holders of an export get a queue pair.
//!
//! Every table and queue has a limit; see [`Config`]. A queue pair of ours holds about `qp_depth × sges × 12`
//! bytes beside what the driver allocates. The control connection is not encrypted, and neither is RDMA: this
//! is made for a cluster's own network.
//!
//! # Example
//!
//! With a real device, `RdmaTransport::open(Config::default())`. On simulated ones (feature `sim`):
//!
//! ```
//! # #[cfg(feature = "sim")] {
//! use te_core::{Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RemoteRegionId, RegionOffset, RemoteOffset, Slice, Token, Transport};
//! use te_rdma::sim::{DeviceConfig, SimConfig, SimFabric};
//! use te_rdma::{Config, RdmaTransport};
//!
//! let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
//! let (mut here, mut there) = (vec![7_u8; 4096], vec![0_u8; 4096]);
//! let mut target = RdmaTransport::new(fabric.device(DeviceConfig::default()), Config::default())?;
//! let mut initiator = RdmaTransport::new(fabric.device(DeviceConfig::default()), Config::default())?;
//! let (region, segment) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both vectors outlive the registration and are not looked at before it has ended.
//! unsafe {
//!     target.register(region, MemSpan::new(there.as_mut_ptr(), 4096), Access::REMOTE_WRITE)?;
//!     initiator.register(region, MemSpan::new(here.as_mut_ptr(), 4096), Access::LOCAL)?;
//! }
//! let mut export = [0; 256];
//! let len = target.export(region, &mut export)?;
//! initiator.attach(segment, &export[..len])?;
//!
//! let slice = Slice { token: Token(1), local: RegionOffset::new(region, 0), remote: RemoteOffset::new(segment, 100), len: 1000, op: Op::Write };
//! assert_eq!(initiator.submit(&[slice])?, 1);
//! let start = std::time::Instant::now();
//! let mut out = [Completion::applied(Token(0)); 8];
//! loop {
//!     let now = Instant::ZERO + start.elapsed();
//!     target.poll(now, &mut []);
//!     if initiator.poll(now, &mut out) == 1 {
//!         break;
//!     }
//! }
//! assert_eq!(out[0], Completion::applied(Token(1)));
//! target.deregister(region)?;
//! assert_eq!(there[99..101], [0, 7]);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod config;
mod device;
mod env;
mod initiator;
mod io;
mod memory;
mod open_error;
mod peers;
mod settings;
#[cfg(feature = "sim")]
pub mod sim;
mod stats;
pub mod sys;
mod target;
mod transport;
pub mod wire;

pub use config::{CHUNKS_MAX, Config, Progress, QPS_MAX, SGES_MAX};
pub use device::{DeviceSummary, devices};
pub use memory::Dmabuf;
pub use open_error::OpenError;
pub use settings::Settings;
pub use stats::Stats;
pub use sys::verbs;
pub use sys::{NoRdma, SystemVerbs};
pub use te_fabric::ConfigError;
pub use transport::RdmaTransport;
