//! The Transport contract of Snowskin, the same for every fabric: how bytes move between registered memory
//! and a peer's memory. No I/O, no clock, no threads, no allocation on the data path; `no_std` with `alloc`.
//!
//! ```text
//!   TransferRequest ×N         what a caller asks for: op, local range, remote range, length
//!        │
//!      Batch                   BatchTable: a handle (slot + generation), six statuses
//!        │ one per request
//!       Task                   counters: bytes cut, in flight, done; the first error
//!        │ Slicer              64 KiB parts, cut when there is room for them, never kept as a list
//!      Slice                   ≤ 48 bytes: token, local, remote, length, op
//!        │
//!      Route                   HealthRoute: which rail would finish first, and which one is paused
//!        │ MultiTransport      sprays, pauses, fails over; is itself a Transport
//!    rail  rail  rail          one Transport each: submit ─► poll ─► poll ─► …
//!        │
//!    Completion                exactly one per slice: Applied, NotApplied or Unknown, and whether a fence is needed
//!        │
//!   Task ─► Batch ─► caller
//! ```
//!
//! * [`Transport`] and [`Memory`] are the contract; the laws L1 to L8 in their documentation bind every
//!   fabric. The most important: once a slice has ended, in whichever way, nothing touches its memory again.
//! * [`BatchTable`], [`Slicer`], [`MultiTransport`] and [`HealthRoute`] turn requests into slices on rails.
//! * [`grant`] is how an owner lets peers map its memory, and how it revokes that.
//! * [`topology`] describes how far memory and NICs are from each other.
//! * [`Registered`] owns a buffer while a peer may reach it; [`VolatileSpan`] reads and writes it meanwhile.
//! * [`Location`] says where memory is; [`device`] is how memory that the CPU cannot touch is found and
//!   staged.
//! * [`Mailbox`] hands work to the polling thread.
//! * [`Fault`], [`Trace`], [`Throttle`] and [`Delay`] wrap a transport, for tests and debugging.
//! * With feature `testkit`: `sim`, a simulated fabric with seeds and virtual time, and `testkit`, the
//!   conformance suite.
//!
//! A batch over a simulated fabric, from request to bytes:
//!
//! ```
//! # #[cfg(feature = "testkit")] {
//! use te_core::sim::{SimConfig, SimNet};
//! use te_core::*;
//!
//! let net = SimNet::new(7, SimConfig::CALM);
//! let (mut here, mut there) = (net.node(), net.node());
//!
//! // Memory: a private buffer here, and one at the other end that peers may write.
//! let local = Registered::new(vec![42u8; 200_000], RegionId::new(0, 1), Access::LOCAL);
//! let remote = Registered::new(vec![0u8; 200_000], RegionId::new(0, 1), Access::REMOTE_WRITE);
//! // SAFETY: both owners stay registered until `deregister` returns Ok, below.
//! unsafe {
//!     here.register(local.region(), local.span(), Access::LOCAL)?;
//!     there.register(remote.region(), remote.span(), Access::REMOTE_WRITE)?;
//! }
//! let mut export = [0; 64];
//! let export_bytes = there.export(remote.region(), &mut export)?;
//! let remote_region = RemoteRegionId::new(0, 1);
//! here.attach(remote_region, &export[..export_bytes])?;
//!
//! // One request, cut into slices of 64 KiB while the transport accepts them.
//! let mut table = BatchTable::new(8, 16);
//! let request = TransferRequest { op: Op::Write, local: RegionOffset::new(local.region(), 0), remote: RemoteOffset::new(remote_region, 0), len: 200_000 };
//! let batch = table.create([request].into_iter(), Slicer::default())?;
//! let mut slices = [Slice { token: Token(0), local: RegionOffset::new(local.region(), 0), remote: RemoteOffset::new(remote_region, 0), len: 0, op: Op::Read }; 8];
//! let mut ends = [Completion::applied(Token(0)); 8];
//! while !table.progress(batch)?.status.is_terminal() {
//!     let cut = table.next(batch, &mut slices)?;
//!     let accepted = here.submit(&slices[..cut])?;
//!     table.accepted(&slices[..accepted]);
//!     net.advance_to_next();
//!     let ended = here.poll(net.now(), &mut ends);
//!     for end in &ends[..ended] {
//!         table.complete(end);
//!     }
//! }
//! assert_eq!(table.progress(batch)?.status, Status::Completed);
//!
//! there.deregister(remote.region())?;
//! // SAFETY: the region is deregistered.
//! assert_eq!(unsafe { remote.into_inner() }, vec![42u8; 200_000]);
//! # here.deregister(local.region())?;
//! # drop(unsafe { local.into_inner() });
//! # }
//! # Ok::<(), te_core::Error>(())
//! ```
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod batch;
mod crc32c;
mod decorator;
pub mod device;
mod error;
pub mod grant;
mod id;
mod mailbox;
mod memory;
mod multi;
mod registered;
mod route;
mod secret;
#[cfg(feature = "testkit")]
pub mod sim;
mod slice;
mod slicer;
#[cfg(feature = "testkit")]
pub mod testkit;
mod time;
pub mod topology;
mod transport;

pub use batch::{BatchHandle, BatchTable, CancelReason, Progress, Status};
pub use crc32c::{crc32c_joined, crc32c_power};
pub use decorator::{Delay, Fault, FaultConfig, FaultCounters, Throttle, Trace, TraceEntry, TraceEvent};
pub use error::{Error, ErrorKind};
pub use id::{RegionId, RemoteRegionId, Token};
pub use mailbox::Mailbox;
pub use memory::{
    Access, GpuVendor, Location, LocationError, MemSpan, MemoryKinds, VolatileSpan, copy_bytes,
};
pub use multi::{MultiTransport, joined_exports};
pub use registered::{Buffer, Registered};
pub use route::{HealthConfig, HealthRoute, RAILS_MAX, RailHealth, RailState, Route};
pub use secret::Secret;
pub use slice::{Completion, Crc32c, Op, Outcome, RegionOffset, RemoteOffset, Slice};
pub use slicer::{Slicer, TransferRequest};
pub use time::Instant;
pub use transport::{Capabilities, EXPELLED_MAX, EventSource, ExpelMode, Features, Memory, Transport};
