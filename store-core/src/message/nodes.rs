//! Messages about who is there: clients and nodes that introduce themselves, segments that come and go.

use serde::{Deserialize, Serialize};

use super::{HOSTS_MAX, SegmentNo};
use crate::ErrorCode;
use crate::codec::{Key, Short};
use crate::tenant::DEFAULT_TENANT;
use crate::wire::VERSION;

/// A client or a node introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting<'a> {
    /// The protocol's version there.
    pub version: u16,
    /// Whose objects the connection is about, 1 to 64 bytes; empty: nobody's, as a node's.
    pub tenant: &'a str,
    /// Proof of the tenant's secret, if it has one: [`prove`](crate::prove). Empty for none, else 32 bytes.
    #[serde(borrow)]
    pub tenant_proof: Key<'a>,
    /// Proof of the admin's secret, of those who know it. Empty for none, else 32 bytes.
    #[serde(borrow)]
    pub admin_proof: Key<'a>,
    /// Proof of the cluster's secret, which nodes know. Empty for none, else 32 bytes.
    #[serde(borrow)]
    pub cluster_proof: Key<'a>,
}

impl Greeting<'_> {
    /// Whether it proves, or tries to prove, anything.
    #[must_use]
    pub const fn has_proof(&self) -> bool {
        !self.tenant_proof.0.is_empty() || !self.admin_proof.0.is_empty() || !self.cluster_proof.0.is_empty()
    }
}

/// A client of the default tenant, of this release.
impl Default for Greeting<'_> {
    fn default() -> Self {
        let none = Key(&[]);
        Self {
            version: VERSION,
            tenant: DEFAULT_TENANT,
            tenant_proof: none,
            admin_proof: none,
            cluster_proof: none,
        }
    }
}

/// The master introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The protocol's version here.
    pub version: u16,
    /// Which life of the master this is. When it changes, forget every segment, lease and generation of the former one.
    pub epoch: u64,
    /// Most keys in a request.
    pub keys_per_batch_max: u32,
    /// Longest key, bytes.
    pub key_bytes_max: u32,
    /// Most replicas of an object.
    pub replicas_max: u8,
    /// How long a read may take.
    pub lease_ms: u32,
    /// A node that is silent for longer is given up.
    pub node_ttl_ms: u32,
    /// What the next greeting on this connection has to prove secrets with. Good for one greeting.
    pub challenge: [u8; 32],
}

/// A piece of a node's memory.
///
/// `incarnation` belongs to the node's *export*. A node that restarts, that is told [`NodeStatus::NeedRemount`] or
/// [`MountAnswer::Stale`], or that meets a master of another [`Welcome::epoch`] than the one it exported for, first tears down what
/// it exported, so that nobody who holds the old export can still write there; then it exports afresh and mounts under a
/// higher incarnation. Nanoseconds of wall time at the export are a good one. A mount that got no answer is repeated as it
/// was, as long as the master is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountSegment<'a> {
    /// Which node; chosen by it, unique in the cluster (a random number will do).
    pub node: u64,
    /// Which life of the node's exports. Later is higher.
    pub incarnation: u64,
    /// The segment's name, unique in the cluster. Mounting it with a higher incarnation replaces the old one.
    pub name: &'a str,
    /// Where the transfer engine finds it, `host:port`.
    pub endpoint: &'a str,
    /// Added to every offset in it to make a replica's address; 0 for engines that address exports by offset.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Which of the engine's exports it is.
    pub export: Export,
    /// The master's [`Welcome::epoch`] when the memory was exported. A master of another life refuses the mount with
    /// `IllegalClient`, because whoever acts on the word of the former one could still write there.
    pub epoch: u64,
    /// A random number that the node chose when it started and tells nobody but the master. Whatever else it says of
    /// itself carries the same one; who does not know it cannot speak for the node.
    pub key: u64,
    /// Take the name, or the node's number, from a holder that still lives. For the operator who knows that the holder
    /// must not have it.
    pub takeover: bool,
}

/// What became of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountAnswer<'a> {
    /// The memory is in the store.
    Mounted(Mounted),
    /// A later life of this name or node is known, as after a clock that went back. Nothing has changed: export afresh if
    /// the memory was mounted before, and mount under this incarnation or a higher one, at once.
    Stale {
        /// The least that will do.
        incarnation_min: u64,
    },
    /// Another node that lives has the name. Nothing has changed: stop that one, choose another name, or ask for a takeover.
    Held {
        /// Where the holder is.
        endpoint: &'a str,
        /// How long it has not been heard of, ms.
        silent_ms: u64,
    },
}

impl MountAnswer<'_> {
    /// What was mounted.
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

/// Tells an export from others that had, or will have, the same endpoint and the same addresses.
///
/// The master passes it on. A client that opened the endpoint compares before it moves a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Export {
    /// Which life of the engine.
    pub engine: u64,
    /// Which of its regions; never used twice in one life.
    pub region: u64,
}

/// A mounted segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// Its number.
    pub segment: SegmentNo,
    /// Send a heartbeat at least this often; a third of it is good.
    pub node_ttl_ms: u32,
}

/// A node takes a segment back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmountSegment {
    /// Whose.
    pub node: u64,
    /// Which life of the node's exports it was mounted for.
    pub incarnation: u64,
    /// Which.
    pub segment: SegmentNo,
    /// As in [`MountSegment::key`].
    pub key: u64,
}

/// A node says that it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Which node.
    pub node: u64,
    /// Which life of it.
    pub incarnation: u64,
    /// As in [`MountSegment::key`].
    pub key: u64,
}

/// A node speaks for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProof {
    /// Which node.
    pub node: u64,
    /// As in [`MountSegment::key`].
    pub key: u64,
}

/// A writer that a node is to cut off: its put was given up, and its space is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expulsion {
    /// Names this order.
    pub ticket: u64,
    /// The identity of the writer's transfer engine.
    pub writer: u64,
    /// Even if it is connected to the node. Without it, a writer that has a connection is left alone.
    pub force: bool,
}

/// How an expulsion went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpulsionEnd {
    /// Which order.
    pub ticket: u64,
    /// Nothing of this writer can land in the node's memory any more, and it is refused from now on. False: it was left
    /// alone, and the order stands no more until it is given again with force.
    pub gone: bool,
}

/// What the master knows about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeStatus {
    /// Its segments are mounted.
    Ok,
    /// They are, and there is something for it to do: [`FetchTasks`](super::FetchTasks),
    /// [`FetchExpulsions`](super::FetchExpulsions).
    Work,
    /// It has none here (never had, or was given up): export afresh and mount under a higher incarnation.
    NeedRemount,
}

/// What a segment is and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo<'a> {
    /// Its number.
    pub segment: SegmentNo,
    /// Whose.
    pub node: u64,
    /// Which life of that node's exports.
    pub incarnation: u64,
    /// Its name.
    pub name: &'a str,
    /// Where the transfer engine finds it, `host:port`.
    pub endpoint: &'a str,
    /// Added to offsets to make addresses.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Which of the engine's exports it is.
    pub export: Export,
    /// Bytes that are allocated or held back.
    pub used: u64,
    /// Longest object for which there is room without eviction, bytes; a little more may fit.
    pub free_bytes_largest: u64,
}

/// A node or a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Whereabouts {
    /// A node.
    Node(u64),
    /// A segment.
    Segment(SegmentNo),
}

/// Hosts, each once: what stands before the port in the endpoints of segments.
pub type Hosts<'a> = Short<&'a str, HOSTS_MAX>;

/// A node that has memory in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Which.
    pub node: u64,
    /// Which life of its exports.
    pub incarnation: u64,
    /// Segments that it has mounted.
    pub segments: u32,
    /// Bytes of them.
    pub capacity: u64,
    /// Bytes of them that are allocated or held back.
    pub used: u64,
    /// How long it has not been heard of, ms.
    pub silent_ms: u64,
}
