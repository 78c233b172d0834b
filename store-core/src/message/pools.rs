//! Messages about pools of CXL memory: who owns which extents, and which page each peer writes.
//!
//! A process can prove that another one has ended without the master: both take the kernel's lock on what
//! they use, on the same file. Processes that see each other's locks have the same *lock domain*: the same
//! kernel, and the same inode. See DESIGN.md, "CXL pools".

use serde::{Deserialize, Serialize};

use crate::NodeId;

/// Most pages of a pool.
pub const POOL_PAGES_MAX: u32 = 1_024;

/// By how many epochs of the master ([`MasterConfig::epoch`](crate::MasterConfig::epoch), which counts
/// seconds) the epochs that a request states may be ahead of it: about a year. Each has 2^31 epochs of
/// pools. Higher ones are refused, unless this master has given them: no request uses up the epochs of a
/// pool.
pub const POOL_EPOCHS_AHEAD: u64 = 366 * 24 * 3_600;

/// A node wants to own extents of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentsWanted<'a> {
    /// The node, which need not have mounted anything yet.
    pub node: NodeId,
    /// As in [`MountSegment::key`](super::MountSegment::key).
    pub key: u64,
    /// The master's [`Welcome::lineage`](super::Welcome::lineage) when the records of the pool were read. A
    /// master of another lineage refuses the request: extents may have been given since.
    pub lineage: u64,
    /// The node's name, 1 to 256 bytes, which others are told.
    pub name: &'a str,
    /// The name of the pool.
    pub pool: [u8; 16],
    /// The first extent.
    pub first: u32,
    /// The number of extents, at least 1.
    pub count: u32,
    /// The incarnation that the node writes into the pool. Another one is another claim.
    pub incarnation: u64,
    /// The lock domain of the node's process; 0: unknown.
    pub domain: u64,
    /// The process holds the lock on the extents in its domain. Without it nothing is given, but the answer
    /// says who has them.
    pub locked: bool,
    /// The highest epoch that the node found in the pool's records of the extents.
    pub above: u64,
    /// The records say that a process of another domain owns some of the extents.
    pub owned_elsewhere: bool,
    /// Take the extents from a process of which it is not proved that it has ended. For an operator who knows
    /// that it can write the pool no more.
    pub takeover: bool,
}

/// The answer to [`ExtentsWanted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExtentsGiven<'a> {
    /// The extents are the node's.
    Given {
        /// The epoch: higher than every earlier one of the pool.
        epoch: u64,
    },
    /// Another process has some of them, and it is not proved that it has ended.
    Held {
        /// The first extent of its claim; as asked for when this master does not know the process.
        first: u32,
        /// The number of extents of its claim.
        count: u32,
        /// The name of its node; empty when this master does not know the process, but the pool says that
        /// there was one.
        name: &'a str,
        /// Whether the master counts that node as alive.
        alive: bool,
    },
}

/// A node gives extents back: nothing of it writes them any more, and no peer uses them through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentsReleased {
    /// The node.
    pub node: NodeId,
    /// As in [`MountSegment::key`](super::MountSegment::key).
    pub key: u64,
    /// The name of the pool.
    pub pool: [u8; 16],
    /// The first extent.
    pub first: u32,
    /// The number of extents.
    pub count: u32,
    /// The epoch in which they were given.
    pub epoch: u64,
}

/// A process wants a page of a pool, so that it can reach memory in it. The items are the pages that it found
/// in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageWanted {
    /// As in [`ExtentsWanted::lineage`].
    pub lineage: u64,
    /// The name of the pool.
    pub pool: [u8; 16],
    /// The number of pages of the pool, 1 to 1,024.
    pub pages: u32,
    /// The identity of the process' transfer engine, as it is written into the page; not 0.
    pub identity: u64,
    /// The lock domain of the process; 0: unknown.
    pub domain: u64,
}

/// A page that the sender of [`PageWanted`] found in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFound {
    /// The number of the page.
    pub slot: u32,
    /// The epoch in the page; 0: it has no record.
    pub epoch: u64,
    /// The identity in the page.
    pub identity: u64,
    /// The lock domain in the page, whose process held the lock on it; 0: unknown.
    pub domain: u64,
    /// The record says that its process uses the page no more.
    pub left: bool,
    /// Another process of the sender's lock domain holds the lock on it.
    pub locked: bool,
}

/// The answer to [`PageWanted`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageGiven {
    /// The page is the process'. It takes the lock on it before it writes there; when it cannot, it asks
    /// again and names the page as locked.
    Given {
        /// The number of the page.
        slot: u32,
        /// The epoch: higher than every earlier one of the pool, unless the process has the page already.
        epoch: u64,
    },
    /// Every page belongs to a process of which it is not proved that it has ended.
    Full {
        /// The number of pages that belong to processes of another lock domain, or an unknown one.
        elsewhere: u32,
    },
    /// The connection, or its tenant, has as many pages of the pool as it may have.
    Limited {
        /// Whether it is the connection's limit, and not the tenant's.
        of_connection: bool,
        /// The limit, pages.
        pages_max: u32,
    },
}

/// A page of a pool that an administrator knows to be unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFreed {
    /// The name of the pool.
    pub pool: [u8; 16],
    /// The number of the page.
    pub slot: u32,
    /// The epoch in which it was given to the process that does not use it any more.
    pub epoch: u64,
}

/// What the master knows of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolEntry<'a> {
    /// Extents that belong to a process.
    Extents {
        /// The name of the pool.
        pool: [u8; 16],
        /// The first extent.
        first: u32,
        /// The number of extents.
        count: u32,
        /// The node.
        node: NodeId,
        /// The node's name.
        name: &'a str,
        /// The epoch in which they were given.
        epoch: u64,
        /// Whether the master counts the node as alive.
        alive: bool,
    },
    /// A page that belongs to a process.
    Page {
        /// The name of the pool.
        pool: [u8; 16],
        /// The number of the page.
        slot: u32,
        /// The identity of the process; 0: unknown.
        identity: u64,
        /// The epoch in which it was given.
        epoch: u64,
        /// Its process has given it back, or an administrator has freed it.
        free: bool,
    },
}
