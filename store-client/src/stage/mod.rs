//! Reads of objects that are on the disks of nodes.
//!
//! ```text
//!     reader: Client, or a node that copies               node: StageServer
//!
//!   StageConnections ── Stage[disk, locator, len] ──────▶ a place in the staging memory
//!     one connection     at most 32 objects, 8 MiB          │
//!     per node           per request, several under way     ▼
//!                                                        StageSource ── StageJob ──▶ the disk's thread
//!                                                           │                           │
//!   READ of memory, ◀── Staged{ticket, addr} or error ───── done ◀──────────────────────┘
//!   one-sided,           at latest at the deadline
//!   verified
//!      └─────────────── ReleaseStaged[ticket] ──────────▶ the place is free again
//! ```
//!
//! A node reads objects of its disks into *staging memory*, which its engine exports for reading, and a
//! reader reads them from there as it reads memory: one-sided, into the caller's buffer, verified against
//! the checksum that the master keeps.
//!
//! # What bounds a read
//! * The reader's *deadline*. A node answers at latest then: what was not read from the disk by then is
//!   refused with `UnavailableInCurrentStatus`, and a miss for the reader.
//! * The *queue* of the node, in objects and bytes, and its staging memory. What does not fit is refused at
//!   once; nothing waits for room.
//! * The *window* in which a staged object may be read. The node keeps the object for its window from the
//!   moment of the answer, plus a guard. The reader counts the window from the moment before it sent the
//!   request, so its window is over before the node's; what was read later does not count, and is not
//!   reported as damaged.
//!
//! The memory of an object is used again when its reader has released it, or when its window and the guard
//! are over. When the connection of a reader ends, the guard alone is waited for: a reader does not report
//! what it read after the loss of its connection.
//!
//! # Buffers of late reads
//! A disk cannot be told to forget a read: it may write into a buffer long after the reader has given up.
//! Such a buffer is in *quarantine* until [`StageJob`] has been finished. A job that is dropped without being
//! finished keeps its buffer for good.
//!
//! # Past the node
//! Where a disk is also a namespace of a target of NVMe over TCP, its node says where, and where extents are
//! on it (`LocateExtents`). Readers that can read it there ask for nothing else (`crate::direct`).
//!
//! # Who may read
//! If a node has a cluster secret, a connection has to prove it in its greeting, exactly as for requests to
//! the master; other connections can only say hello. This is the rule of the node's engine as well: a reader
//! that cannot prove the secret cannot read the staging memory either. A tenant is not checked. As with
//! memory, a process that may use the fabrics may read the objects of all tenants; the master alone tells
//! where they are. Tickets can be released only over the connection that received them.

mod config;
mod connections;
mod desk;
mod dialing;
mod greeting;
mod line;
mod room;
mod server;
mod serving;
mod source;
#[cfg(any(test, feature = "testkit"))]
mod testkit;
#[cfg(test)]
mod tests;

pub use config::{StageConfig, StageError};
pub(crate) use connections::{StageConnections, StageEnd, StagedAt, Wanted};
pub use server::{StageCounters, StageServer};
pub use source::{Exported, StageJob, StageSource};
#[cfg(any(test, feature = "testkit"))]
pub use testkit::MapSource;

/// Staged objects begin at multiples of this, and their buffers are multiples of it: what direct I/O needs.
pub const STAGE_ALIGNMENT: u64 = 4096;
