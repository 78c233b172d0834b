//! One-sided reads and writes of registered memory over TCP: the fabric that every machine has.
//!
//! A [`TcpTransport`] is both ends at once. It cuts its owner's slices into frames and sends them to peers
//! (*initiator*), and it serves the regions that it exports to peers (*target*). It is one object with one
//! owner, has no threads, and makes progress only in [`poll`](te_core::Transport::poll).
//!
//! ```text
//!               submit                 poll                       peers' connections
//!                 │                     │                               │
//!   ┌─────────────▼─────────────────────▼───────────────────────────────▼───────────┐
//!   │ transport   TcpTransport: owns the parts, decides whose turn it is            │
//!   │    │                                                                  │       │
//!   │ initiator   our own slices                     target   peers' operations     │
//!   │    slices     accepted, settled, completed        admission  who has a connection   │
//!   │    framing    pieces ▶ frames                     serving    checks, answers  │
//!   │    answers    what targets say                    connection       whose it is      │
//!   │    connection       pieces without an answer            staged   on devices │       │
//!   │    staged     pieces on devices get slots                             │       │
//!   │    │                                                                  │       │
//!   │ peers       each peer: addresses, pauses, queues, fences, pulse       │       │
//!   │    │                                                                  │       │
//!   │    └──────────────────────┬───────────────────────────────────────────┘       │
//!   │ io       listener, poller, which connection is read next                            │
//!   │ connection     one connection: outbox and inbox          frame   bytes on the wire  │
//!   │ region   keys, rights, who uses what               operation   a slice here   │
//!   │ staging  slots and hops, for memory that the CPU cannot touch                 │
//!   └───────────────────────────┬───────────────────────────────────────────────────┘
//!                              sys     sockets, io_uring, registered memory: the only unsafe
//! ```
//!
//! Arrows point down: no module knows one above it. `initiator` and `target` do not know each other; what
//! both need is lent to them for each call (`context`). The slab, the tables, contacts and pauses, exports,
//! the handshake, timers, the listener and epoll are [`te_fabric`]'s.
//!
//! Payloads go from registered memory to the socket and from the socket to registered memory without a stop:
//! a frame announces its payloads, so the receiver knows where each byte belongs before it reads it. One
//! `sendmsg` takes up to 1,024 heads and payloads; one `readv` takes all payloads of a frame and the heads
//! that follow. The protocol is described byte by byte in [`frame`].
//!
//! # Capabilities
//!
//! | | |
//! |---|---|
//! | `READ`, `WRITE` | yes; a WRITE is `Applied` when the target has said that its last byte is in place |
//! | `FENCE` | yes; the target drops older connections, with what is unread in them, and says so |
//! | `CHECKSUM` | with [`Config::checksum`]: CRC32C over each payload, checked where it arrives |
//! | `TWO_SIDED_PROGRESS` | yes: a target serves only while it is polled |
//! | memory | the host's; with [`TcpTransport::with_devices`] that of GPUs, too |
//! | expel | yes, at once but for hops that run: by the identity in each HELLO; without force it leaves alone who has a connection |
//! | cancel | at once, or when hops to and from a device's memory have ended; a WRITE whose bytes have begun to leave ends `Unknown` |
//! | longest slice | [`Config::slice_bytes_max`]; what is longer than a piece rides on all connections |
//! | parking | [`event_source`](te_core::Transport::event_source) is readable only while there is work |
//!
//! # Memory of devices
//!
//! Bytes of a GPU go through *slots* of pinned host memory, at each end that has such memory; the other does
//! not notice. A [`Stager`](te_core::device::Stager) copies between the two (a *hop*). Initiator and target
//! have stagers of their own, so neither direction waits for the other's slots. Without a free slot a slice
//! waits here, and a peer's connection is not read. A READ's piece has ended when its hop has, a WRITE is
//! acknowledged when its last hop has ended, and so is a fence or an expulsion that concerns it. Checksums
//! are computed over slots: a target that answers a READ longer than a slot brings the bytes to the host
//! twice. A peer's connection that moves nothing for a second, and has slots for which others wait, is
//! closed; so is one whose hop fails, or whose READ is in its middle when its region is withdrawn.
//!
//! # Drivers and latency
//!
//! With epoll, a connection that has just had something to say is read without asking first, so a caller that
//! polls in a loop pays one system call an answer; connections gone cold cost one `epoll_wait` for all. With
//! feature `uring` and `Driver::Uring` asking costs no system call, and one call receives for up to 16
//! connections. Either way no request to the kernel outlives the `poll` that made it, so a cancel takes
//! effect at once.
//!
//! Spinning between polls wins latency where each process has a core to itself and loses it where they share
//! one. On one host, BBR's pacing costs up to half of the throughput; see [`Config::congestion`].
//!
//! # Limits
//!
//! Every table and queue has one; see [`Config`]. A connection holds about 200 KiB. The transport
//! authenticates by the random key of each export and does not encrypt: it is made for a cluster's own
//! network.
//!
//! Whoever reaches the port may open connections, so silence holds none: when [`Config::connections_max`] is
//! reached, connections that have never carried anything make room, then those of the address or the process
//! that holds the most, then idle ones. The initiator of a connection that goes opens another, and its slices
//! do not notice.
//!
//! # Example
//!
//! ```
//! use te_core::{
//!     Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RemoteRegionId, RegionOffset, RemoteOffset, Slice, Token, Transport,
//! };
//! use te_tcp::{Config, TcpTransport};
//!
//! let (mut here, mut there) = (vec![7_u8; 4096], vec![0_u8; 4096]);
//! let mut target = TcpTransport::new(Config::default())?;
//! let mut initiator = TcpTransport::new(Config::default())?;
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
//! let (local, remote) = (RegionOffset::new(region, 0), RemoteOffset::new(segment, 100));
//! let slice = Slice { token: Token(1), local, remote, len: 1000, op: Op::Write };
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
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod config;
mod connection;
mod context;
pub mod frame;
mod initiator;
mod io;
mod operation;
mod peers;
mod region;
mod staging;
mod stats;
mod sys;
mod target;
mod transport;

pub use config::{CONNECTIONS_PER_PEER_MAX, Config, Driver};
pub use stats::Stats;
pub use te_fabric::{ConfigError, OpenError};
#[cfg(feature = "testkit")]
pub use transport::RegionUsers;
pub use transport::TcpTransport;
