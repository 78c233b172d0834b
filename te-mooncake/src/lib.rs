//! Mooncake's wire: transfers from and to engines of Mooncake over TCP, in both directions.
//!
//! Mooncake's Transfer Engine has a *handshake port*, which describes memory, takes notifications and answers
//! probes, a *data port*, which reads and writes that memory, and *metadata*, by which engines find each
//! other. This crate speaks all three, as initiator and as target, so that a cluster can be moved from one
//! system to the other host by host. It needs no part of Mooncake.
//!
//! ```text
//!   an engine's own transfers                          Mooncake peers' transfers and handshakes
//!            │                                                        │
//!   ┌────────▼────────────────────────────┐          ┌────────────────▼────────────────────────┐
//!   │ fabric     MooncakeFabric, Metadata │          │ service    Service: exports, entries    │
//!   │    │                                │          │    │                                    │
//!   │ transport  MooncakeTransport        │          │ target     data port    daemon  hand-   │
//!   │    │                                │          │    │       ranges, room    │    shakes  │
//!   │ initiator  exchanges, connections   │          │    └────────┬─────────────┘    inbox   │
//!   │    │                                │          │          server   one thread per port   │
//!   └────┼────────────────────────────────┘          └─────────────┼───────────────────────────┘
//!        │       client  handshakes with peers       metadata  entries of engines, or none
//!        │                   │                           │
//!      header  24 and 8 bytes   frame  length, type    descriptor, message  JSON    export  for the rail
//!                             sys     sockets from and into raw memory: the only unsafe code
//! ```
//!
//! The codecs ([`frame`], [`header`], [`descriptor`], [`message`], [`export`]) do no I/O.
//!
//! # What the protocol cannot do
//!
//! * **No authentication.** Every process that reaches the data port can read and write every byte that is
//!   exported. So everything is off by default; a target needs an address to listen on and a list of networks
//!   that may connect; nothing is exported because it is registered; and one warning at the start says so.
//! * **No fence.** A WRITE that was cut short, by a time limit, a cancel or a broken connection, ends
//!   `Unknown`, and stays so: nothing tells when its bytes can no longer land. One that was cut short before
//!   the first byte of its payload was handed to the socket ends `NotApplied`. The rail therefore does not
//!   declare [`FENCE`](te_core::Features::FENCE). The contract says that a transport without it knows every
//!   outcome, which this protocol does not allow; so a fence succeeds while no WRITE to the peer has ended in
//!   doubt, and fails with `Unsupported` afterwards, for as long as that peer lives.
//! * **No acknowledgement in version 1.** A WRITE to a peer that speaks version 1 alone is refused, unless
//!   [`Config::allow_unacknowledged_v1`] is set; then it ends `Applied` with `fence_needed` when the socket
//!   has taken its last byte, which means no more than that it was sent.
//! * **No incarnations.** A peer that restarted is noticed by its data port, which Mooncake draws at random:
//!   when a peer refuses a range or cannot be reached, its descriptor is fetched again, once, and slices end
//!   with `PeerRestarted` if it is another's.
//! * **A refusal costs a connection**, since a target closes it; other connections are not affected (law L6
//!   asks that the connection survives).
//!
//! # Capabilities of the rail
//!
//! | | |
//! |---|---|
//! | `READ`, `WRITE` | yes; a WRITE of version 2 is `Applied` when the target has confirmed that its last byte is in place |
//! | `FENCE` | no, see above |
//! | `CALLER_DRIVEN` | yes; a cancelled slice has ended by the next poll, and its connection is closed |
//! | `CHECKSUM`, expel | no |
//! | memory | the host's |
//! | slices | one exchange on one connection, up to [`Config::connections`] at a time per peer |
//!
//! # Limits
//!
//! Linux. IPv4 and IPv6. TCP alone: RDMA engines are refused with a reason. Limits of the target: connections
//! in all and per address, bytes of operations that are served at the same time, time for a request and
//! without progress, length of handshakes; see [`Config`].
//!
//! # Example
//!
//! A range is exported to the processes of this host, and found and read as a Mooncake peer would.
//!
//! ```
//! use std::io::{Read, Write};
//! use te_core::{Access, MemSpan, Op};
//! use te_mooncake::header::{Request, Status, Version};
//! use te_mooncake::{Client, Config, MetadataString, Mode, Service};
//!
//! let config = Config {
//!     mode: Mode::Both,
//!     bind: Some("127.0.0.1".parse()?),
//!     peers: vec!["127.0.0.0/8".parse()?],
//!     ..Config::default()
//! };
//! let service = Service::start(config, &MetadataString::peer_to_peer())?;
//! let mut memory = *b"kv cache";
//! // SAFETY: the array outlives the export, and is not written while peers may read it.
//! unsafe { service.export(MemSpan::new(memory.as_mut_ptr(), 8), Access::REMOTE_READ)? };
//!
//! let client = Client::new(service.config(), &MetadataString::peer_to_peer())?;
//! let segment = client.descriptor(service.name())?;
//! client.notify(service.name(), "step", "done")?;
//! assert_eq!(service.take_notifications()[0].message, "done");
//!
//! let mut socket = std::net::TcpStream::connect(("127.0.0.1", segment.data_port))?;
//! let request = Request { op: Op::Read, version: Version::V2, addr: segment.buffers[0].addr, len: 8 };
//! socket.write_all(&request.to_bytes())?;
//! let mut answer = [0; 16];
//! socket.read_exact(&mut answer)?;
//! assert_eq!((&answer[..8], &answer[8..]), (&Status::Done.to_bytes()[..], &b"kv cache"[..]));
//! service.withdraw(segment.buffers[0].addr)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! An engine that reaches Mooncake peers is started with the fabric and the metadata of this crate: see
//! [`MooncakeFabric`] and [`MooncakeMetadata`].
#![deny(unsafe_code)]

mod cidr;
mod client;
mod config;
mod daemon;
pub mod descriptor;
mod error;
pub mod export;
mod fabric;
pub mod frame;
pub mod header;
mod initiator;
pub mod message;
mod metadata;
mod published;
mod server;
mod service;
mod sys;
mod target;
mod transport;

pub use cidr::{Cidr, CidrError};
pub use client::Client;
pub use config::{CONNECTIONS_PER_PEER_MAX, Config, Mode, ModeError};
pub use descriptor::{Buffer, Native, SegmentDescriptor};
pub use error::{ExportError, MetadataStringError, PeerError, StartError, WithdrawError};
pub use fabric::{MooncakeFabric, MooncakeMetadata};
pub use initiator::{InitiatorStats, Lookup};
pub use message::Notification;
pub use metadata::MetadataString;
pub use server::ServerStats;
pub use service::{Service, ServiceStats};
pub use target::TargetStats;
pub use transport::{MooncakeTransport, RAIL};
