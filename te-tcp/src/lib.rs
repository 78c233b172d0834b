//! One-sided reads and writes of registered memory over TCP: the fabric that every machine has.
//!
//! A [`TcpTransport`] is both ends at once. It cuts its caller's slices into frames and sends them to peers
//! (*initiator*), and it serves the regions that it exports to peers (*target*). It has no threads, is used
//! by one thread at a time, and makes progress only in [`poll`](te_core::Transport::poll).
//!
//! ```text
//!               submit                 poll                       peers' connections
//!                 │                     │                               │
//!   ┌─────────────▼─────────────────────▼───────────────────────────────▼───────────┐
//!   │ transport   TcpTransport: holds the parts, runs the steps of a poll           │
//!   │    │                                                                  │       │
//!   │ initiator   own slices                         target   peers' operations     │
//!   │    slices      accepted, settled, completed       admission   what is served  │
//!   │    framing     pieces ▶ frames                    serving     checks, answers │
//!   │    answers     taken in                           connection  state of a peer │
//!   │    connection  pieces without an answer           staged      on devices      │
//!   │    staged      pieces on devices get slots                            │       │
//!   │    │                                                                  │       │
//!   │ peers       each peer: addresses, backoff, queues, fences, liveness   │       │
//!   │    │                                                                  │       │
//!   │    └──────────────────────┬───────────────────────────────────────────┘       │
//!   │ io          listener, poller, which connection is read next                   │
//!   │ connection  one data connection: outbox and inbox  frame  bytes on the wire   │
//!   │ region      keys, rights, counts of users          operation  a slice here    │
//!   │ staging     slots and hops, for memory that the CPU cannot access             │
//!   └───────────────────────────┬───────────────────────────────────────────────────┘
//!                              sys     sockets, io_uring, registered memory: the only unsafe code
//! ```
//!
//! Arrows point down: no module knows one above it. `initiator` and `target` do not know each other; both
//! borrow what they share for each call (`context`). The slab, the tables, contacts and backoff, exports, the
//! handshake, timers, the listener and epoll are those of [`te_fabric`].
//!
//! Payloads go from registered memory to the socket and from the socket to registered memory without another
//! copy: a frame announces its payloads, so the receiver knows where each byte belongs before it reads it.
//! One `sendmsg` takes up to 1,024 heads and payloads; one `readv` takes all payloads of a frame and the
//! heads that follow. The protocol is described byte by byte in [`frame`].
//!
//! # Capabilities
//!
//! | | |
//! |---|---|
//! | `READ`, `WRITE` | yes; a WRITE is `Applied` when the target has confirmed that its last byte is in place |
//! | `FENCE` | yes; the target closes older connections, with what is unread in them, and confirms that |
//! | `CHECKSUM` | with [`Config::checksum`]: CRC32C over each payload, checked where it arrives |
//! | `TWO_SIDED_PROGRESS` | yes: a target serves only while it is polled |
//! | memory | the host's; with [`TcpTransport::with_devices`] also that of GPUs |
//! | expel | yes, by the identity in each HELLO, at once except for hops that run; without force, a peer with a connection is not expelled |
//! | cancel | at once, or when hops to and from a device's memory have ended; a WRITE ends `Unknown` when some of its bytes have been sent |
//! | longest slice | [`Config::slice_bytes_max`]; a slice that is longer than a piece uses all connections to the peer |
//! | parking | [`event_source`](te_core::Transport::event_source) is readable only while there is work |
//!
//! # Memory of devices
//!
//! Bytes of a GPU go through *slots* of page-locked host memory at each end that has such memory; the other
//! end sees no difference. A [`Stager`](te_core::device::Stager) copies between the two (a *hop*). Initiator
//! and target have stagers of their own, so neither direction waits for the other's slots. While no slot is
//! free, a slice waits here, and a peer's connection is not read. At the initiator, slices for a peer that
//! has slots get another slot only while the peer has fewer than twice as many as are free, and never the
//! last one; so a peer that answers slowly does not keep the slices for others waiting. A piece of a READ is
//! settled when its hop has ended; a WRITE is acknowledged when its last hop has ended, and so is a fence or
//! an expulsion that concerns it. Checksums are computed over slots: a target that answers a READ longer than
//! a slot brings the bytes to the host twice. While others wait for slots, a peer's connection that holds
//! some and moves nothing for a second is closed. A connection is also closed when one of its hops fails, or
//! when a region is withdrawn in the middle of a READ.
//!
//! # Drivers and latency
//!
//! With epoll, a connection on which something happened a moment ago is read without asking first, so a
//! caller that polls in a loop pays one system call per answer; all other connections together cost one
//! `epoll_wait`. With feature `uring` and `Driver::Uring`, asking costs no system call, and one call receives
//! from up to 16 connections. With either driver no request to the kernel outlives the `poll` that made it,
//! so a cancel takes effect at once.
//!
//! Spinning between polls lowers latency where each process has a core to itself, and raises it where
//! processes share one. On one host, BBR's pacing costs up to half of the throughput; see
//! [`Config::congestion`].
//!
//! # Limits
//!
//! Every table and queue has a limit; see [`Config`]. A connection needs about 200 KiB. The transport
//! authenticates by the random key of each export and does not encrypt: it is made for a cluster's internal
//! network.
//!
//! Any process that reaches the port may open connections, so a silent connection does not keep its place:
//! when [`Config::connections_max`] is reached, connections that have never carried anything make room, then
//! those of the address or the process that holds the most, then idle ones. The initiator of a closed idle
//! connection opens another, and its slices are not affected.
//!
//! # Example
//!
//! ```
//! use te_core::{
//!     Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
//!     Slice, Token, Transport,
//! };
//! use te_tcp::{Config, TcpTransport};
//!
//! let (mut here, mut there) = (vec![7_u8; 4096], vec![0_u8; 4096]);
//! let mut target = TcpTransport::new(Config::default())?;
//! let mut initiator = TcpTransport::new(Config::default())?;
//! let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both vectors outlive the registration and are not looked at before it has ended.
//! unsafe {
//!     target.register(region, MemSpan::new(there.as_mut_ptr(), 4096), Access::REMOTE_WRITE)?;
//!     initiator.register(region, MemSpan::new(here.as_mut_ptr(), 4096), Access::LOCAL)?;
//! }
//! let mut export = [0; 256];
//! let len = target.export(region, &mut export)?;
//! initiator.attach(remote, &export[..len])?;
//!
//! let (from, to) = (RegionOffset::new(region, 0), RemoteOffset::new(remote, 100));
//! let slice = Slice { token: Token(1), local: from, remote: to, len: 1000, op: Op::Write };
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
pub use transport::RegionPins;
pub use transport::TcpTransport;
