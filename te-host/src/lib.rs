//! What a process uses of the host that it runs on: two fabrics that copy, the memory that they copy between,
//! and the distances between the host's memory, NICs and GPUs.
//!
//! ```text
//!            submit                       poll                    a peer, in this process or another
//!              │                           ▲                                             ▲
//!  ┌───────────▼───────────────────────────┴─────────────────────────────┐               │
//!  │ copier   Copier<R>: regions, remote regions, queue, cancels, copies │               │
//!  └───────────┬──────────────────────────────────┬──────────────────────┘               │
//!              │ Reach: finds the memory          │ carry_out: memcpy, with CRC-32C      │
//!    ┌─────────┴─────────┐                        ▼                                      │
//!    │ Local       Shm   │   HeldSpan ── registered memory, and the copies inside it     │
//!    │ a table     files │   SharedMemory ── memory whose file another process can map ──┘
//!    └─────────┬─────────┘
//!              │ Shm: te_core::grant decides which process may map what, and revokes it
//!              ▼
//!         sockets that carry file descriptors
//!
//!   fork  what a child does not inherit      lend  memory for a process without an engine
//!   control  sockets, ledgers and mappings for other fabrics whose memory is granted
//!   topology  sysfs, hwloc, files            Spin, park  waiting
//! ```
//!
//! | | [`LocalTransport`] | [`ShmTransport`] |
//! |---|---|---|
//! | reaches | transports of the same process | processes of the same host |
//! | one-sided READ and WRITE | yes | yes |
//! | exports | any host memory | [`SharedMemory`] |
//! | the owner has to poll | no | to grant a region; not for copies |
//! | fences | end at once, because nothing is ever late | the same |
//! | expulsion | yes | yes |
//! | checksums during the copy | CRC-32C | CRC-32C |
//!
//! A slice is copied within one call of `poll`, by the calling thread, or not at all: its outcome is always
//! known. Another fabric within a host, for example over a CXL pool, is another [`Reach`]; the documentation
//! of that trait contains one that compiles.
//!
//! # Limits
//!
//! Linux. Slices of up to 2 MiB; 4,096 slices in flight; 65,536 regions and 65,536 remote regions; one call
//! of `poll` copies about 1 MiB. Shared memory: see [`ShmConfig`], and 1,024 grants for each peer.
//!
//! # Example
//!
//! One process writes into memory that another one exports. In this example both are the same process, which
//! uses shared memory all the same.
//!
//! ```
//! use te_core::{
//!     Access, Completion, Instant, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice,
//!     Token, Transport,
//! };
//! use te_host::{AllocOptions, SharedMemory, ShmConfig, ShmTransport};
//!
//! let options = AllocOptions { peers_may_write: true, ..AllocOptions::default() };
//! let (here, there) = (SharedMemory::new(4096, options)?, SharedMemory::new(4096, options)?);
//! here.view().write(0, b"kv cache")?;
//! let open = || ShmTransport::new(ShmConfig::default());
//! let (mut peer, mut owner) = (open()?, open()?);
//! let (region, remote_region) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both stay mapped until they are deregistered, and no reference to them is made.
//! unsafe {
//!     peer.register(region, here.span(), Access::LOCAL)?;
//!     owner.register(region, there.span(), Access::REMOTE_WRITE)?;
//! }
//! let mut export = [0; 128];
//! let len = owner.export(region, &mut export)?;
//! peer.attach(remote_region, &export[..len])?;
//!
//! let (local, remote) = (RegionOffset::new(region, 0), RemoteOffset::new(remote_region, 100));
//! peer.submit(&[Slice { token: Token(1), local, remote, len: 8, op: Op::Write }])?;
//! let mut ended = [Completion::applied(Token(0))];
//! // The owner grants the region while it polls.
//! while peer.poll(Instant::ZERO, &mut ended) == 0 {
//!     owner.poll(Instant::ZERO, &mut []);
//! }
//! assert_eq!(ended[0], Completion::applied(Token(1)));
//! let mut seen = [0; 8];
//! there.view().read(100, &mut seen)?;
//! assert_eq!(&seen, b"kv cache");
//! peer.deregister(region)?;
//! owner.deregister(region)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

pub mod control;
mod copier;
pub mod fork;
pub mod keys;
mod lend;
mod local;
mod reach;
mod shm;

mod spin;
mod sys;
pub mod topology;

pub use copier::{Copier, carry_out, rights};
pub use lend::{BorrowedMemory, peer_uid, recv_with_fd, send_with_fd};
pub use local::{Config as LocalConfig, Local, LocalTransport};
pub use reach::{Checksum, Copied, EXPORT_BYTES_MAX, Reach};
pub use shm::{Shm, ShmConfig, ShmTransport};
pub use spin::Spin;
pub use sys::{
    AllocOptions, Gate, HeldSpan, Inside, Protection, SharedMemory, Use, Window, crc32c_at, crc32c_of,
    node_of, own_uid, park, wait_readable,
};
pub use te_fabric::OpenError;
