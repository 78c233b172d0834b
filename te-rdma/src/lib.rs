//! One-sided reads and writes of registered memory over RDMA.
//!
//! An [`RdmaTransport`] is one port of one device, one rail. It is both ends at the same time: as *initiator*
//! it turns the caller's slices into work requests on queue pairs to peers, and as *target* it holds queue
//! pairs through which peers reach the regions that it exports. One polling thread calls it, and it makes
//! progress only in [`submit`](te_core::Transport::submit) and [`poll`](te_core::Transport::poll).
//!
//! ```text
//!         submit                      poll                     poll_at
//!           │                          ▲                          ▲
//!   ┌───────▼──────────────────────────┴──────────────────────────┴────────┐
//!   │ transport     joins the parts; drive: one poll                       │
//!   └───┬──────────────┬──────────────┬──────────────┬──────────────┬──────┘
//!       ▼              ▼              ▼              ▼              ▼
//!   initiator        peers         target         memory         timers
//!   own slices:      addresses,    peers'         regions,       (te_fabric)
//!   queue, cut,      backoff,      requests,      the device's
//!   merge, post,     control       queue pairs    keys
//!   complete,        connections   for them,
//!   requests         to them       fences
//!       │              │              │              │
//!       └──────┬───────┴──────┬───────┘              │
//!              ▼              ▼                      │
//!              io            wire                    │
//!   port, own queue pairs,   frames of control       │
//!   completions, sockets,    connections             │
//!   listener, epoll                                  │
//!              │                                     │
//!              ▼                                     ▼
//!   sys   verbs: the interface to devices · libibverbs, found at run time          sim (feature `sim`)
//! ```
//!
//! An arrow is an import; none points up. The initiator and the target do not know each other, and know peers
//! only by number. `env` lends both the parts that they share: io, memory, timers, settings. All unsafe code
//! is in `sys`, but for the `register` of the transport and of the simulated devices.
//!
//! The slab, the tables, addresses and backoff, exports, the handshake, timers, the listener and epoll are
//! those of [`te_fabric`].
//!
//! **Two planes.** Payload is moved by RDMA alone: READ and WRITE on reliable connections, straight between
//! registered memory. Everything else goes over a *control connection*, one TCP connection from initiator to
//! target (module [`wire`] describes every byte): it connects queue pairs, sends remote keys to peers that
//! have the key in the export, and carries fences. The initiator opens it. Two transports that reach each
//! other have two control connections, one in each direction.
//!
//! **Access control.** The export carries a random 64-bit key. The device's remote keys have 32 bits, many of
//! which can be guessed; they are sent only to peers that have the key of the export. The target's values of
//! rights and length replace those in the export. A queue pair belongs to the control connection over which
//! it was offered, and is destroyed with it. The initiator's queue pairs give peers no access: they are made
//! without remote rights. A remote key that was sent to a peer is not used for another region while it is
//! remembered.
//!
//! **Failures.** A queue pair fails as a whole. The slice that caused the failure ends with its error; the
//! other slices are sent again on a new queue pair, the same bytes to the same range, and their completions
//! report that a fence is needed. When the path or the port failed, all of them end, so that other rails can
//! take them.
//!
//! **Memory of GPUs.** With [`RdmaTransport::with_devices`] a region may be memory of a GPU, which the NIC
//! reads and writes without a copy. It is registered by file descriptors, one per mapping, which
//! [`Devices::dmabufs`](te_core::device::Devices::dmabufs) returns. Such bytes are never carried inside a work
//! request, because the CPU cannot read them. A NIC that cannot reach the memory refuses the region as
//! `Unsupported`.
//!
//! # Capabilities
//!
//! | | |
//! |---|---|
//! | `READ`, `WRITE` | yes; a WRITE is `Applied` when the target's device has acknowledged its last packet |
//! | `FENCE` | yes; the target destroys the queue pairs that the initiator does not use any more, and confirms it |
//! | `CHECKSUM` | no, only the link's own (ICRC). A caller that stores bytes has to check them end to end |
//! | `TWO_SIDED_PROGRESS` | no: transfers do not need the target's process. Connecting, the first use of a remote region, and fences do |
//! | memory | that of the host; with [`RdmaTransport::with_devices`] also that of GPUs that the NIC reaches |
//! | expel | yes, by the identity in each HELLO: the peer's queue pairs are destroyed. With `ExpelMode::SpareConnected`, a peer with a control connection is not expelled |
//! | cancel | at once while a slice waits; when it is posted, it drains for [`Config::cancel_drain_ms`], then its queue pair is flushed |
//! | longest slice | [`Config::slice_bytes_max`]; a slice that is longer than a message is spread over the queue pairs |
//! | parking | [`event_source`](te_core::Transport::event_source) is readable only while `poll` has work |
//!
//! # Latency
//!
//! For a slice, `submit` and `poll` make no system call but the `epoll_wait` of the control connections in
//! one of sixteen polls. Making and destroying queue pairs are calls into the kernel, tens of microseconds to
//! some milliseconds each, and happen inside `poll` when a peer is first reached, or reached again after a
//! failure. For peers, about sixteen queue pairs are made per poll, and they get at most half of the device's
//! queue pairs. Connecting a queue pair may block on the network (on RoCE the kernel resolves the neighbour's
//! address: up to a second without an answer), and is done by up to four threads; their results make the
//! event source readable. Opening a transport verifies its GID by a loopback, which takes at most
//! [`Config::proof_ms_max`] for each GID that is tried. Registering pins pages; long regions of
//! host memory are registered in chunks by several threads.
//!
//! # Limits
//!
//! All regions of a transport share the device's protection domain: a peer that has *one* export and guesses
//! the 32-bit remote key of *another* region reaches that region as well. Peers without an export are kept
//! out, because only peers with one get a queue pair.
//!
//! Every table and queue has a limit; see [`Config`]. An initiator's queue pair takes about
//! `qp_depth × sges × 12` bytes in addition to the allocations of the driver. Neither control connections nor
//! RDMA are encrypted: use them in a cluster's own network.
//!
//! # Example
//!
//! With a real device: `RdmaTransport::open(Config::default())`. With simulated devices (feature `sim`):
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
//! let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both vectors outlive the registration and are not accessed before it has ended.
//! unsafe {
//!     target.register(region, MemSpan::new(there.as_mut_ptr(), 4096), Access::REMOTE_WRITE)?;
//!     initiator.register(region, MemSpan::new(here.as_mut_ptr(), 4096), Access::LOCAL)?;
//! }
//! let mut export = [0; 256];
//! let len = target.export(region, &mut export)?;
//! initiator.attach(remote, &export[..len])?;
//!
//! let slice = Slice { token: Token(1), local: RegionOffset::new(region, 0), remote: RemoteOffset::new(remote, 100), len: 1000, op: Op::Write };
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
#[cfg(feature = "sim")]
pub mod sim;
mod stats;
pub mod sys;
mod target;
mod transport;
pub mod wire;

pub use config::{CHUNKS_MAX, Config, Progress, QPS_MAX, SGES_MAX};
pub use device::{ChosenPorts, DeviceSummary, choose_ports, devices};
pub use open_error::OpenError;
pub use stats::Stats;
pub use sys::verbs;
pub use sys::{NoRdma, SystemVerbs};
pub use te_fabric::ConfigError;
pub use transport::RdmaTransport;
