//! What network fabrics share below their protocols. A fabric is a `Transport` that is built from these parts
//! and a wire protocol.
//!
//! This crate holds mechanisms, not policy. It has no connection, no protocol and no `Transport`: each fabric
//! decides how bytes travel, how many connections there are and when one is closed. What two fabrics would
//! otherwise write twice, and fix twice, is here once, with its tests.
//!
//! ```text
//!                    submit                     poll                        poll_at
//!                      │                         ▲                             ▲
//!  ┌───────────────────▼─────────────────────────┴─────────────────────────────┴──────┐
//!  │ region   Regions, RemoteRegions: ids,      operation  Operations, Queue: slices  │
//!  │          rights, ranges, pins, closing                in flight, completions     │
//!  │    │                                          │                                  │
//!  │ export   Export, LocalEnd: the bytes       peer       Contact: addresses and     │
//!  │          that lead a peer to a region                 backoff; fences, expelled  │
//!  │    │                                          │                                  │
//!  │ handshake  HELLO and WELCOME, statuses,    timers     Timers: now, deadlines,    │
//!  │          parser steps and errors                      when to poll again         │
//!  │    │                                          │                                  │
//!  │ table    Table (caller's numbers), Slab (own numbers and names)                  │
//!  └──────────────────────────────────────┬───────────────────────────────────────────┘
//!         net   sockets, Listener, addresses, errors       epoll   readiness
//! ```
//!
//! | module | what it defines for every fabric |
//! |---|---|
//! | [`operation`] | a slab of slices that does not allocate, queues through it, completions in order |
//! | [`region`] | what an id refers to, which rights a slice or a peer needs (L6), when a region may be deregistered |
//! | [`export`] | the layout of exports, and what a parser refuses |
//! | [`handshake`] | magic and version first, refusals that state the reason, the errors of a parser |
//! | [`peer`] | a peer is its incarnation; when an address, a restart or an expulsion counts; how long a backoff is |
//! | [`timers`] | when a transport has to be polled again, and when silence counts against a peer |
//! | [`net`], [`epoll`] | sockets that do not block, a listener that can be paused, errors of the peer and of the system |
//! | [`config`] | the limits of settings, and one error for them |
//!
//! Feature `testkit` adds what the tests of fabrics share.
//!
//! # Limits
//!
//! Linux only. An export has up to 4 addresses. 4,096 incarnations are remembered; with more, every
//! incarnation counts as met.
//!
//! # Example
//!
//! Accepting a slice: the region and the remote region are checked, the operation takes a slot and waits in
//! its peer's queue.
//!
//! ```
//! use te_core::{Access, Completion, Location, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token};
//! use te_fabric::operation::{Operation, Operations, Queue, RemoteBytes, accept_prefix};
//! use te_fabric::region::{Region, Regions, RemoteRegion, RemoteRegions};
//! # use te_fabric::export::{Export, ExportFormat};
//! # let export = Export {
//! #     format: ExportFormat { magic: *b"demo", version: 1 }, rights: Access::REMOTE_WRITE.bits(),
//! #     addresses: [[127, 0, 0, 1].into(); 4], address_count: 1, port: 1, incarnation: 7, region: 0, generation: 1,
//! #     key: 99, len: 4096, location: Location::Host,
//! # };
//! let (mut regions, mut remote_regions) = (Regions::new(8), RemoteRegions::new(8));
//! let (mut operations, mut pending) = (Operations::new(16, 4), Queue::new());
//! let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! regions.insert(region.index, Region::new(region, 4096, Location::Host, Access::LOCAL, 0, ()))?;
//! remote_regions.insert(remote.index, RemoteRegion::new(remote, 0, &export, ()))?;
//!
//! let slice = |len| Slice { token: Token(1), local: RegionOffset::new(region, 0), remote: RemoteOffset::new(remote, 0), len, op: Op::Write };
//! let accepted = accept_prefix(&[slice(4096), slice(4097)], operations.room(), |slice| {
//!     regions.check_local(slice)?;
//!     let peer = remote_regions.check_remote(slice)?.peer;
//!     let slot = operations.insert(Operation::new(slice, peer, ())).ok_or(te_core::ErrorKind::Full)?;
//!     operations.push_back(&mut pending, slot);
//!     regions.pin(slice.local.region.index);
//!     remote_regions.pin(slice.remote.region.index);
//!     Ok(())
//! })?;
//! assert_eq!(accepted, 1);
//!
//! // The peer has acknowledged it.
//! let slot = pending.first().expect("accepted");
//! operations.unlink(&mut pending, slot);
//! let done = operations.remove(slot).expect("in flight");
//! regions.unpin(done.region);
//! remote_regions.unpin(done.remote_region);
//! operations.complete(done.completion(RemoteBytes::Written));
//!
//! let mut out = [Completion::applied(Token(0)); 4];
//! assert_eq!((operations.fetch(&mut out), out[0]), (1, Completion::applied(Token(1))));
//! # Ok::<(), te_core::Error>(())
//! ```
#![deny(unsafe_code)]

pub mod config;
pub mod epoll;
pub mod export;
pub mod handshake;
pub mod net;
mod open_error;
pub mod operation;
pub mod peer;
pub mod region;
pub mod table;
#[cfg(feature = "testkit")]
pub mod testkit;
pub mod timers;

pub use config::ConfigError;
pub use epoll::{Epoll, Event, Interest};
pub use export::{EXPORT_ADDRESSES_MAX, EXPORT_BYTES_MAX, Export, ExportFormat, LocalEnd};
pub use handshake::{FrameError, Protocol, Step, Welcome};
pub use open_error::OpenError;
pub use operation::{Operation, Operations, Queue, RemoteBytes};
pub use region::{Region, Regions, RemoteRegion, RemoteRegions};
pub use table::{Slab, Table};
pub use timers::Timers;

/// For `statuses!`.
#[doc(hidden)]
pub use te_core;

#[cfg(test)]
mod testing {
    use crate::{Export, ExportFormat};

    pub(crate) fn export() -> Export {
        crate::testkit::export(ExportFormat { magic: *b"test", version: 1 })
    }
}
