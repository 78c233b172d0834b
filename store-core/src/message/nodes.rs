//! Messages about who is there: clients and nodes that introduce themselves, segments that come and go.

use serde::{Deserialize, Serialize};

use super::{HOSTS_MAX, SegmentNo};
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
    /// The tenant's secret, if it has one; 256 bytes at most.
    #[serde(borrow)]
    pub secret: Key<'a>,
    /// The admin's secret, of those who may say it; 256 bytes at most.
    #[serde(borrow)]
    pub admin: Key<'a>,
}

/// A client of the default tenant, of this release.
impl Default for Greeting<'_> {
    fn default() -> Self {
        Self { version: VERSION, tenant: DEFAULT_TENANT, secret: Key(&[]), admin: Key(&[]) }
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
}

/// A piece of a node's memory.
///
/// `incarnation` belongs to the node's *export*. A node that restarts, that is told [`NodeStatus::NeedRemount`] or
/// `IllegalClient`, or that meets a master of another [`Welcome::epoch`] than the one it exported for, first tears down what
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
}

/// A node says that it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Which node.
    pub node: u64,
    /// Which life of it.
    pub incarnation: u64,
}

/// What the master knows about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeStatus {
    /// Its segments are mounted.
    Ok,
    /// They are, and there are tasks for it: [`FetchTasks`](super::FetchTasks).
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
