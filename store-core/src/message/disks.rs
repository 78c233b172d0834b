//! Messages about the disks of nodes: what is on them, what is written to them, and how their objects are
//! read.
//!
//! ```text
//!        node                                        master
//!   opens its disk      ── MountDisk ──────────────▶  a number for the disk
//!   announces objects   ── Adopt, DiskReady ───────▶  knows them, or has them forgotten
//!                       ── FetchDiskOrders ────────▶
//!   writes, forgets     ◀── DiskOrder ─────────────   demotes what is about to be evicted
//!                       ── EndDiskOrders ──────────▶  places, confirmed removals
//!   gives extents up    ── ReclaimExtents ─────────▶  drops the places in them
//!
//!        client                                      node
//!   wants an object     ── Stage ──────────────────▶  reads it into memory that is exported
//!   reads it one-sided  ── ReleaseStaged ──────────▶  uses that memory again
//!   reads past the node ── LocateExtents ──────────▶  says where extents are in its exported disk
//! ```

use serde::{Deserialize, Serialize};

use super::{Export, FetchRequest, NodeProof};
use crate::codec::Key;
use crate::{ErrorCode, Incarnation, MemoryLocation, NodeId, SegmentNo, TenantTag};

/// A disk to mount. Its node must have mounted memory before, under the same incarnation.
///
/// The uuid identifies the disk over restarts of its node. A disk that was away, because its node was gone,
/// is known again when it is mounted; the places of objects that its node does not announce are dropped
/// when the node reports [`DiskReady`](super::DiskReady).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountDisk<'a> {
    /// The node.
    pub node: NodeId,
    /// The incarnation of the node's exports.
    pub incarnation: Incarnation,
    /// As in [`MountSegment::key`](super::MountSegment::key).
    pub key: u64,
    /// As in [`MountSegment::lineage`](super::MountSegment::lineage).
    pub lineage: u64,
    /// Identifies the disk.
    pub uuid: [u8; 16],
    /// Bytes for objects.
    pub bytes: u64,
    /// Bytes of an extent: a locator divided by it is the sequence of its extent.
    pub extent_bytes: u64,
    /// The address of the node's transfer engine, `host:port`.
    pub endpoint: &'a str,
    /// The address at which the node takes [`Stage`](super::Stage) requests, `host:port`.
    pub stage: &'a str,
    /// The memory that objects are staged in.
    pub staging: Staging,
    /// Where its packs are, if it is a directory that other hosts mount, too: the path at the node. Readers
    /// may read them there themselves. Empty: a disk of the node alone.
    pub shared: &'a str,
}

/// Memory of a node that objects of its disks are read into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staging {
    /// Added to every offset in the memory to make an address.
    pub base: u64,
    /// Its length, bytes.
    pub len: u64,
    /// Where it is, and with that the kind of the memory.
    pub location: MemoryLocation,
    /// The export of the transfer engine that it is.
    pub export: Export,
}

/// A mounted disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedDisk {
    /// The disk's number: it names the disk in replicas, as that of a segment does. Another one after each
    /// mount.
    pub disk: SegmentNo,
}

/// Identifies a disk of a node, and proves that the node sends the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskProof {
    /// The node.
    pub node: NodeProof,
    /// The disk's number.
    pub disk: SegmentNo,
}

/// An object that recovery has found on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundObject<'a> {
    /// The tenant.
    pub tenant: TenantTag,
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// The put that stored it.
    pub generation: u64,
    /// Bytes of data.
    pub len: u64,
    /// CRC-32C of the data, not bound to key and generation.
    pub crc32c: u32,
    /// Where it is on the disk.
    pub locator: u64,
}

/// What the master makes of an object that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Adoption {
    /// It is known, and can be read.
    Adopted,
    /// It was removed or replaced: forget it.
    Forget,
    /// It is not wanted, for instance because its tenant is unknown or the master has no memory for it. It
    /// stays on the disk, and may be announced again.
    Refused(ErrorCode),
}

/// A node requests the work for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchDisk {
    /// The node, and the most orders in the response, including those that it has already.
    pub fetch: FetchRequest,
    /// The disk's number.
    pub disk: SegmentNo,
    /// Bytes of objects that may be demoted, including the orders that the node has already; 0: none, for
    /// instance because the disk is read-only.
    pub bytes_max: u64,
}

/// Work for the disk of a node. An order is given again until its end is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskOrder<'a> {
    /// Write an object of the node's memory to the disk. The memory is held for a lease from the request on;
    /// what was written later than that does not count.
    Demote {
        /// The tenant.
        tenant: TenantTag,
        /// The object's key.
        #[serde(borrow)]
        key: Key<'a>,
        /// The put that stored it.
        generation: u64,
        /// Bytes of data; the trailer follows them.
        len: u64,
        /// CRC-32C of the data, not bound to key and generation.
        crc32c: u32,
        /// The node's segment that the object is in.
        segment: SegmentNo,
        /// Its address in the segment's export.
        addr: u64,
        /// It was read since its put.
        proven: bool,
    },
    /// The object was removed: it must not be announced again.
    Forget {
        /// The tenant.
        tenant: TenantTag,
        /// The object's key.
        #[serde(borrow)]
        key: Key<'a>,
        /// The put that stored it.
        generation: u64,
        /// Where it is, if the master knows.
        locator: Option<u64>,
    },
    /// Every object that was written before is void.
    Clear {
        /// The number of this order.
        ticket: u64,
    },
}

/// The end of an order for a disk, or something that happened to an object on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskEnd<'a> {
    /// [`DiskOrder::Demote`]: where the object is, or why it was not written.
    Demoted {
        /// The put that stored the object.
        generation: u64,
        /// The locator.
        result: Result<u64, ErrorCode>,
    },
    /// [`DiskOrder::Forget`]: the object will not be announced any more.
    Forgotten {
        /// The put that stored the object.
        generation: u64,
    },
    /// [`DiskOrder::Clear`].
    Cleared {
        /// The number of the order.
        ticket: u64,
    },
    /// The object cannot be read: its place is to be dropped.
    Lost {
        /// The tenant.
        tenant: TenantTag,
        /// The object's key.
        #[serde(borrow)]
        key: Key<'a>,
        /// The put that stored it.
        generation: u64,
    },
    /// No reader can read anything at these locators: places there are to be dropped. The disk has dropped
    /// what it wrote lately, because a sync failed; or the device reports an error; or a reader was refused,
    /// because nothing is there any more.
    Dropped {
        /// The first locator.
        from: u64,
        /// The locator behind the last one.
        to: u64,
    },
}

/// A reader asks a node for objects of its disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageRequest {
    /// How long the reader waits, ms from when the node receives the request. What was not read by then is
    /// answered with an error.
    pub deadline_ms: u32,
}

/// One object to be read from a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageItem {
    /// The disk.
    pub disk: SegmentNo,
    /// Where it is on the disk.
    pub locator: u64,
    /// Bytes of data; the trailer follows them.
    pub len: u64,
}

/// How long staged objects may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageWindow {
    /// Milliseconds from the moment that the response was *sent by the node*. The reader counts from when it
    /// received the response, less the time that the fabric may take, or returns the memory earlier:
    /// [`ReleaseStaged`](super::ReleaseStaged).
    pub window_ms: u32,
}

/// An object in the staging memory of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staged {
    /// Names it in [`ReleaseStaged`](super::ReleaseStaged).
    pub ticket: u64,
    /// The first byte's address in the export of the disk's segment.
    pub addr: u64,
}

/// A disk of a node that readers can reach themselves, as a namespace of a target of NVMe over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedDisk<'a> {
    /// The disk's name, which is in the headers of its extents.
    pub uuid: [u8; 16],
    /// Bytes from the beginning of the disk to the end of its last extent.
    pub bytes: u64,
    /// Bytes of an extent.
    pub extent_bytes: u32,
    /// Where the target listens, `ADDR:PORT`.
    pub address: &'a str,
    /// The NQN of the subsystem.
    pub nqn: &'a str,
    /// The number of the namespace.
    pub nsid: u32,
    /// Where the disk begins in the namespace, bytes.
    pub offset: u64,
}
