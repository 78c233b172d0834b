//! One-sided reads and writes over NVMe/TCP: an initiator in user space for namespaces anywhere, and a small
//! target that serves registered memory as namespaces.
//!
//! An [`NvmeofTransport`] is both ends at once. As *initiator* it carries slices out as Read and Write
//! commands of subsystems that it connects to by itself: no kernel driver, no root, no module. As *target* it
//! serves each region with remote rights as a namespace of its subsystem, to other transports of this kind
//! and, with [`Config::open_to_hosts`], to any host. It has no threads, is used by one thread at a time, and
//! makes progress only in [`poll`](te_core::Transport::poll).
//!
//! ```text
//!               submit                 poll                       hosts' connections
//!                 │                     │                               │
//!   ┌─────────────▼─────────────────────▼───────────────────────────────▼───────────┐
//!   │ transport   NvmeofTransport: holds the parts, runs the steps of a poll        │
//!   │    │                                                                  │       │
//!   │ initiator   slices ▶ commands                  target   hosts' commands       │
//!   │    slices       pieces, cancels, ends             admin       Connect, keys   │
//!   │    receive      data, R2Ts, responses             io          Read, Write     │
//!   │    association  connect, checks, keep-alive       reservation who may         │
//!   │    owner        adopted ranges                    connection  queues          │
//!   │    │                                                                  │       │
//!   │ queue       CIDs, R2Ts          controller  the life of an association        │
//!   │ fence       what may land       namespace   ranges, superblocks               │
//!   │    │                                                                  │       │
//!   │ stream      one connection: inbox and outbox       pdu, command, identify     │
//!   └───────────────────────────┬───────────────────────────────────────────────────┘
//!                              sys     sockets, registered memory: the only unsafe code
//! ```
//!
//! `pdu`, `command`, `identify`, `queue`, `controller`, `fence`, `namespace` and `reservation` do no I/O and
//! read no clock. Payloads go from registered memory to the socket and from the socket to registered memory:
//! C2HData names its command before the data, so the receiver knows where each byte belongs. A WRITE of up to
//! [`Config::in_capsule_bytes_max`] bytes travels in its capsule, a longer one waits for the target's R2T.
//!
//! # Capabilities
//!
//! | | |
//! |---|---|
//! | `READ`, `WRITE` | yes; a WRITE is `Applied` with its response |
//! | `FENCE` | yes, by the strongest proof that the target offers; see below |
//! | `CHECKSUM` | with [`Config::header_digest`] and [`Config::data_digest`]: CRC-32C, checked where data arrives |
//! | `TWO_SIDED_PROGRESS` | yes for our own target, which serves only while it is polled |
//! | memory | the host's, at any alignment |
//! | granule | [`Config::granule_bytes`]: offsets and lengths of remote regions are multiples; nothing is read, changed and written back |
//! | expel | of our own target, by the host's identity, at once; of adopted ranges by Preempt and Abort, where the target has reservations |
//! | cancel | at once; a WRITE that was begun ends `Unknown`, and its rest is sent from a copy |
//! | parking | [`event_source`](te_core::Transport::event_source) is readable only while there is work |
//!
//! # Remote memory
//!
//! A remote region is a range of blocks of a namespace. There are two kinds of exports:
//!
//! * Of a region that *our* target serves: addresses, incarnation, namespace, generation, length, rights,
//!   key. The NQN of the subsystem is made from the incarnation, the NGUID from incarnation, namespace and
//!   generation. The initiator states the key with a vendor-specific command (opcode C0h) before the first
//!   command; the target checks key, rights and range of everything.
//! * Of a range of a namespace of *another* target, that an owner [adopted](NvmeofTransport::adopt):
//!   addresses, NQN, namespace, NGUID or UUID, range, rights, incarnation of the owner, epoch. The first
//!   granule of the range holds a superblock.
//!
//! Attaching does not wait. Before the first command to a region, on each new association, the initiator
//! compares the namespace's identity, size of blocks and length, and the superblock, with the export. A
//! region that does not agree is `Stale`, and no byte of it is read or written.
//!
//! # Fences
//!
//! | | proof | when |
//! |---|---|---|
//! | F0 | every WRITE has its response | nothing is in doubt: the usual case, ends at once |
//! | F1 | Cross-Controller Reset (TP8028), carried out at once | the target states CCRL > 0, as ours does |
//! | F2 | Reservation Acquire, Preempt and Abort | `expel` by the owner of an adopted range; also fences a dead client |
//! | F3 | CC.EN = 0, CSTS.RDY = 0 | never: the kernel's target clears RDY while commands run |
//! | F4 | 2 × KATO (3 × with traffic-based keep-alive) and CQT, or [`Config::quiesce_ms`] | another vendor's target without F1 |
//!
//! A restart of our own target is a proof as well: its incarnation has changed. Where no proof exists, a
//! fence ends with an error. A reset that the target only has begun (bit 0 of the response is clear) counts
//! as no proof: the log page in which its end would be reported is not read.
//!
//! # Limits
//!
//! What L6 cannot promise: a target of another vendor knows no keys and no ranges. There, processes of ours
//! keep to the ranges that owners hand out, because our code checks them; other hosts are kept out only by
//! what the target's administrator set (host NQNs). A client that was preempted is refused by the target, but
//! a process that does not run our code could register its key again. A client whose key is not registered
//! is not fenced, since it may register later: [`expel`](te_core::Transport::expel) is `Unsupported` then,
//! also where the response to an earlier Preempt was lost. A client whose Register has no response, and whose
//! reservation has changed since, counts as `Expelled`. Among hosts that reach our own target,
//! one may claim the host identifier of another.
//!
//! There is no TLS, no DH-HMAC-CHAP, no RDMA, no metadata or protection information, no zoned namespaces, no
//! ANA; a namespace with metadata is `Unsupported`. Memory of devices is not moved. A region whose length is
//! not a multiple of the granule is served without its last bytes. An owner whose reservation is held by
//! another host cannot adopt the range (`AccessDenied`). With data digests, a READ of bytes that another peer
//! writes at the same time can end `Corrupt`. The target has at most 16 I/O queues per controller with 1,024
//! entries each; a connection needs about 250 KiB. Every table has a limit; see [`Config`].
//!
//! Hosts learn which namespaces our target has when they connect: it sends no events. After a restart it has
//! another NQN, which hosts have to discover.
//!
//! The fence by time (F4) is as good as [`Config::quiesce_ms`]: it has to be longer than the target's device
//! takes for a write, because the kernel's target waits for its device without a limit. A namespace that the
//! kernel's target has disabled fails slices with `PeerDead`, and is checked again with the next slice.
//!
//! Both halves were checked against the kernel's, Linux 6.1, in emulated machines: the crate's `LAB.md` says
//! what was seen. No figure compares this crate with the kernel's initiator or target, or with SPDK.
//!
//! # Example
//!
//! ```
//! use te_core::{
//!     Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
//!     Slice, Token, Transport,
//! };
//! use te_nvmeof::{Config, NvmeofTransport};
//!
//! let (mut here, mut there) = (vec![7_u8; 8192], vec![0_u8; 8192]);
//! let mut target = NvmeofTransport::new(Config::default())?;
//! let mut initiator = NvmeofTransport::new(Config::default())?;
//! let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both vectors outlive the registration and are not looked at before it has ended.
//! unsafe {
//!     target.register(region, MemSpan::new(there.as_mut_ptr(), 8192), Access::REMOTE_WRITE)?;
//!     initiator.register(region, MemSpan::new(here.as_mut_ptr(), 8192), Access::LOCAL)?;
//! }
//! let mut export = [0; 512];
//! let len = target.export(region, &mut export)?;
//! initiator.attach(remote, &export[..len])?;
//!
//! let (from, to) = (RegionOffset::new(region, 5), RemoteOffset::new(remote, 4096));
//! let slice = Slice { token: Token(1), local: from, remote: to, len: 4096, op: Op::Write };
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
//! assert_eq!(there[4095..4097], [0, 7]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

pub mod command;
mod config;
mod context;
mod controller;
mod discovery;
mod export;
mod fence;
pub mod identify;
mod initiator;
mod namespace;
pub mod pdu;
mod queue;
mod stats;
mod stream;
mod sys;
mod target;
mod transport;

pub use config::{Config, DEPTH_MAX, QUEUES_MAX};
pub use discovery::discover;
pub use namespace::Namespace;
pub use stats::Stats;
pub use te_fabric::{ConfigError, OpenError};
pub use transport::NvmeofTransport;
