//! Messages about clients, nodes and segments: greetings, mounts, heartbeats, expulsions.

use serde::{Deserialize, Serialize};

use super::HOSTS_MAX;
use crate::codec::{Key, Short};
use crate::ha::Reign;
use crate::tenant::DEFAULT_TENANT;
use crate::wire::VERSION;
use crate::{ErrorCode, Incarnation, MemoryLocation, NodeId, SegmentNo};

/// The greeting of a client or a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting<'a> {
    /// The client's version of the protocol.
    pub version: u16,
    /// The tenant that the connection acts for, 1 to 64 bytes; empty: none, as for a node.
    pub tenant: &'a str,
    /// Proof of the tenant's secret, if it has one: [`prove`](crate::prove). Empty or 32 bytes.
    #[serde(borrow)]
    pub tenant_proof: Key<'a>,
    /// Proof of the admin secret. Empty or 32 bytes.
    #[serde(borrow)]
    pub admin_proof: Key<'a>,
    /// Proof of the cluster secret, which nodes know. Empty or 32 bytes.
    #[serde(borrow)]
    pub cluster_proof: Key<'a>,
    /// The highest [reign](Welcome::reign) that this side has seen; zeros: none. A master whose own is lower
    /// was replaced without having learned of it, and this side would refuse its welcome. It proves nothing,
    /// and changes nothing but the response to this greeting.
    pub seen: Reign,
}

impl Greeting<'_> {
    /// Whether it contains a proof.
    #[must_use]
    pub const fn has_proof(&self) -> bool {
        !self.tenant_proof.0.is_empty() || !self.admin_proof.0.is_empty() || !self.cluster_proof.0.is_empty()
    }
}

/// A client of the default tenant, of this release, without proofs.
impl Default for Greeting<'_> {
    fn default() -> Self {
        let none = Key(&[]);
        Self {
            version: VERSION,
            tenant: DEFAULT_TENANT,
            tenant_proof: none,
            admin_proof: none,
            cluster_proof: none,
            seen: Reign::default(),
        }
    }
}

/// The response to a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The master's version of the protocol.
    pub version: u16,
    /// Which state: new when the state of the store was lost, and everything begins with nothing. When it
    /// changes, forget every segment, lease and generation of the previous one.
    pub lineage: u64,
    /// Which leader of this state, from 1. Segments, generations and leases outlive a change of it. A
    /// connection has one term: a master that leads under another one closes its connections first, so that
    /// every response and every order on a connection is of the term of its welcome. Refuse a welcome with a
    /// lower lineage, or with a lower term of the same, than one seen before.
    pub term: u64,
    /// Most keys per request.
    pub keys_per_batch_max: u32,
    /// Length limit of a key, bytes.
    pub key_bytes_max: u32,
    /// Most replicas per object.
    pub replicas_max: u8,
    /// How long a read may take, milliseconds.
    pub lease_ms: u32,
    /// A node that is silent for longer than this is given up, milliseconds.
    pub node_ttl_ms: u32,
    /// The challenge that the proofs of the next greeting on this connection have to be made with. Valid
    /// once.
    pub challenge: [u8; 32],
}

impl Welcome {
    /// Whose welcome it is: which leader of which state.
    #[must_use]
    pub const fn reign(&self) -> Reign {
        Reign { lineage: self.lineage, term: self.term }
    }
}

/// A segment to mount.
///
/// `incarnation` identifies the node's *export*. A node that restarts, that receives
/// [`NodeStatus::NeedRemount`] or [`MountResponse::Stale`], or that meets a master of another
/// [`Welcome::lineage`] than the one it exported for, first withdraws its export, so that no holder of the
/// old export can still write there; then it exports again and mounts under a higher incarnation. The wall
/// time of the export in nanoseconds is a good choice. A mount without a response is repeated unchanged, as
/// long as the master's lineage is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountSegment<'a> {
    /// The node. Chosen by the node, unique in the cluster (a random number will do).
    pub node: NodeId,
    /// The incarnation of the node's exports. A later one is higher.
    pub incarnation: Incarnation,
    /// The segment's name, unique in the cluster. A mount with a higher incarnation replaces the segment of
    /// this name.
    pub name: &'a str,
    /// The address of the node's transfer engine, `host:port`.
    pub endpoint: &'a str,
    /// Added to every offset in the segment to make a replica's address; 0 for engines that address exports
    /// by offset.
    pub base: u64,
    /// Length of the segment, bytes.
    pub len: u64,
    /// Where its memory is, and with that the kind of the memory.
    pub location: MemoryLocation,
    /// The export of the transfer engine that the segment is.
    pub export: Export,
    /// The master's [`Welcome::lineage`] when the memory was exported. A master of another lineage refuses
    /// the mount with `IllegalClient`, because clients of the previous one could still write to the memory.
    pub lineage: u64,
    /// A random number that the node chose when it started and sends only to the master. All later
    /// requests of the node carry it: it proves that they come from the node.
    pub key: u64,
    /// Take the name, or the node's number, from a node that is still alive. For an operator who knows that
    /// the other node must not have it.
    pub takeover: bool,
}

/// The result of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountResponse<'a> {
    /// The segment is mounted.
    Mounted(Mounted),
    /// A later incarnation of this name or node is known, as after a clock was set back. Nothing has changed:
    /// export again if the memory was mounted before, and mount under this incarnation or a higher one, at
    /// once.
    Stale {
        /// The lowest acceptable incarnation.
        incarnation_min: Incarnation,
    },
    /// Another live node has mounted the name. Nothing has changed: stop that node, choose another name, or
    /// request a takeover.
    Held {
        /// The endpoint of the other node.
        endpoint: &'a str,
        /// How long the other node has been silent, ms.
        silent_ms: u64,
    },
}

impl MountResponse<'_> {
    /// The mounted segment.
    ///
    /// # Errors
    /// `IllegalClient` for a stale incarnation, `SegmentAlreadyExists` for a name that is held.
    pub const fn mounted(&self) -> Result<Mounted, ErrorCode> {
        match self {
            Self::Mounted(mounted) => Ok(*mounted),
            Self::Stale { .. } => Err(ErrorCode::IllegalClient),
            Self::Held { .. } => Err(ErrorCode::SegmentAlreadyExists),
        }
    }
}

/// Distinguishes an export from others that had, or will have, the same endpoint and the same addresses.
///
/// The master passes it on. A client that has opened the endpoint compares it before it moves a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Export {
    /// The incarnation of the transfer engine.
    pub engine: u64,
    /// The number of the region; never used twice within one incarnation.
    pub region: u64,
}

/// A mounted segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// The segment's number.
    pub segment: SegmentNo,
    /// Longest interval between heartbeats, milliseconds; a third of it is a good choice.
    pub node_ttl_ms: u32,
}

/// A node unmounts a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmountSegment {
    /// The node that mounted it.
    pub node: NodeId,
    /// The incarnation of the node's exports that it was mounted for.
    pub incarnation: Incarnation,
    /// The segment.
    pub segment: SegmentNo,
    /// As in [`MountSegment::key`].
    pub key: u64,
}

impl UnmountSegment {
    /// The request of a node without a key.
    #[must_use]
    pub const fn new(node: NodeId, incarnation: Incarnation, segment: SegmentNo) -> Self {
        Self { node, incarnation, segment, key: 0 }
    }
}

/// A node reports that it is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// As in [`MountSegment::key`].
    pub key: u64,
}

/// Identifies and proves the node that sends a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProof {
    /// The node.
    pub node: NodeId,
    /// As in [`MountSegment::key`].
    pub key: u64,
}

/// An order to a node to cut off a writer: the writer's put was given up, and its space is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expulsion {
    /// Identifies this order.
    pub ticket: u64,
    /// The identity of the writer's transfer engine.
    pub writer: u64,
    /// Cut the writer off even if it is connected to the node. Otherwise a writer with a connection is left
    /// alone.
    pub force: bool,
}

/// The result of an expulsion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpulsionEnd {
    /// The order.
    pub ticket: u64,
    /// True: no write of this writer can land in the node's memory any more, and it is refused from now on.
    /// False: it was left alone, and the order is void until it is given again with force.
    pub gone: bool,
}

/// What the master knows about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeStatus {
    /// Its segments are mounted.
    Ok,
    /// Its segments are mounted, and there is work for it: [`FetchTasks`](super::FetchTasks),
    /// [`FetchExpulsions`](super::FetchExpulsions).
    Work,
    /// It has no segments here (never had, or was given up): export again and mount under a higher
    /// incarnation.
    NeedRemount,
}

/// What a segment is and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo<'a> {
    /// The segment's number.
    pub segment: SegmentNo,
    /// The node that mounted it.
    pub node: NodeId,
    /// The incarnation of that node's exports.
    pub incarnation: Incarnation,
    /// The segment's name.
    pub name: &'a str,
    /// The address of the node's transfer engine, `host:port`.
    pub endpoint: &'a str,
    /// Added to offsets to make addresses.
    pub base: u64,
    /// Length of the segment, bytes.
    pub len: u64,
    /// Where its memory is, and with that the kind of the memory.
    pub location: MemoryLocation,
    /// The export of the transfer engine that the segment is; for a disk, that of the memory which its
    /// objects are staged in.
    pub export: Export,
    /// For a disk, the address at which its node takes [`Stage`](super::Stage) requests, `host:port`; empty for
    /// memory.
    pub stage: &'a str,
    /// For a directory of packs, its path at its node: `ROOT/CLUSTER/UUID`. Readers that mount it read an
    /// object from it themselves, at its address. Empty for everything else.
    pub shared: &'a str,
    /// For a disk, bytes of an extent: an address divided by it is the sequence of the extent, or pack, and
    /// the rest is the offset in it. 0 for memory.
    pub extent_bytes: u64,
    /// Bytes that are allocated or pending release.
    pub used: u64,
    /// Length of the longest object for which there is room without eviction, bytes; slightly longer ones may
    /// fit.
    pub free_bytes_largest: u64,
}

/// A node or a segment whose hosts are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostQuery {
    /// A node.
    Node(NodeId),
    /// A segment.
    Segment(SegmentNo),
}

/// Hosts, each once: the part before the port of the segments' endpoints.
pub type Hosts<'a> = Short<&'a str, HOSTS_MAX>;

/// A node that has mounted memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// The node's number.
    pub node: NodeId,
    /// The incarnation of its exports.
    pub incarnation: Incarnation,
    /// Number of its mounted segments.
    pub segments: u32,
    /// Total length of its segments, bytes.
    pub capacity: u64,
    /// Bytes of its segments that are allocated or pending release.
    pub used: u64,
    /// How long it has been silent, ms.
    pub silent_ms: u64,
}
