//! [`MasterClient`]: requests that concern the master alone.

mod locate;
mod queries;
mod tasks;

use store_core::message::{
    Get, LeaseWanted, List, ListPosition, ListQuery, Listed, ReadStats, SegmentInfo, Segments as AskSegments,
};
use store_core::{ErrorCode, Key, SegmentNo, Stats, unbound};

use crate::error::StoreError;
use crate::rpc::RpcConnection;

pub use locate::Located;
pub use queries::BulkRemoval;
pub use tasks::{ReplicaEntry, ReplicasOfEach, TaskEntry, TaskPage};

/// Requests that concern the master alone and move no bytes here: which objects and segments exist and where,
/// tasks, drains, counters.
///
/// It borrows a connection: that of a client ([`Client::master`](crate::Client::master)), or a bare one,
/// which needs no engine.
///
/// ```no_run
/// # use store_client::{MasterClient, RpcConfig, RpcConnection};
/// let mut rpc = RpcConnection::connect("127.0.0.1:50051".parse()?, RpcConfig::default())?;
/// println!("{} objects", MasterClient::new(&mut rpc).stats()?.objects);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MasterClient<'c> {
    rpc: &'c mut RpcConnection,
}

/// What the master knows about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectInfo {
    /// Length of the object, bytes.
    pub len: u64,
    /// CRC-32C of the object's bytes.
    pub checksum: u32,
    /// Number of the put that stored the object.
    pub generation: u64,
}

/// One page of a listing of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListPage {
    /// The keys, in no particular order.
    pub entries: Vec<ListEntry>,
    /// Where the next page begins; 0: this was the last page.
    pub cursor: u64,
}

/// One key of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListEntry {
    /// The key.
    pub key: Vec<u8>,
    /// Length of the object, bytes.
    pub len: u64,
    /// Number of replicas.
    pub replicas: u8,
    /// Whether the object is readable; otherwise it is being written.
    pub complete: bool,
    /// Whether a reader holds a lease.
    pub leased: bool,
}

/// One segment of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentEntry {
    /// Number of the segment, as [`Placement`](store_core::Placement) names it.
    pub segment: SegmentNo,
    /// The node that contributes it.
    pub node: store_core::NodeId,
    /// Incarnation of the node's exports.
    pub incarnation: store_core::Incarnation,
    /// Name of the segment.
    pub name: String,
    /// Address at which the engine opens it.
    pub endpoint: String,
    /// Length, bytes.
    pub len: u64,
    /// Where its memory is. `None`: it is storage, or a kind of memory that this release does not know.
    pub location: Option<te_core::Location>,
    /// Bytes that are allocated or pending release.
    pub used: u64,
    /// Length of the longest object that fits without eviction, bytes; a slightly longer one may fit.
    pub free_bytes_largest: u64,
}

impl<'c> MasterClient<'c> {
    /// Requests over this connection, for the tenant that the connection was made for.
    #[must_use]
    pub const fn new(rpc: &'c mut RpcConnection) -> Self {
        Self { rpc }
    }

    /// Looks an object up. The lookup leases the object as a get does, so that a get that follows soon finds
    /// it. `None` is a miss.
    ///
    /// # Errors
    /// An invalid key, or no answer from the master.
    pub fn look_up(&mut self, key: &[u8]) -> Result<Option<ObjectInfo>, StoreError> {
        let (_, answers) = self.rpc.call::<Get>(&LeaseWanted::Quick, std::iter::once(Key(key)))?;
        let found = answers.into_iter().next().unwrap_or(Err(ErrorCode::InternalError));
        match found {
            Ok(object) => Ok(Some(ObjectInfo {
                len: object.len,
                checksum: unbound(object.checksum, key, object.generation),
                generation: object.generation,
            })),
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady) => Ok(None),
            Err(code) => Err(code.into()),
        }
    }

    /// Lists at most `limit` keys that begin with `prefix`. `cursor` is 0 for the first page, then the cursor
    /// of the page before.
    ///
    /// # Errors
    /// No answer from the master.
    pub fn list(&mut self, prefix: &[u8], cursor: u64, limit: u32) -> Result<ListPage, StoreError> {
        self.rpc.begin_trace();
        let query = ListQuery { prefix: Key(prefix), cursor, limit };
        let (ListPosition { cursor }, listed) = self.rpc.call::<List>(&query, std::iter::empty())?;
        let entries = listed.map(self::listed).collect();
        Ok(ListPage { entries, cursor })
    }

    /// Lists the segments of the store.
    ///
    /// # Errors
    /// No answer from the master.
    pub fn segments(&mut self) -> Result<Vec<SegmentEntry>, StoreError> {
        self.rpc.begin_trace();
        let (_, infos) = self.rpc.call::<AskSegments>(&(), std::iter::empty())?;
        // Disks are in the list as well.
        let memory = infos.flatten().filter(|info| info.extent_bytes == 0);
        Ok(memory.map(segment).collect())
    }

    /// The mounted segment that has this name.
    ///
    /// # Errors
    /// `SegmentNotFound`; no answer from the master.
    pub fn segment_named(&mut self, name: &str) -> Result<SegmentEntry, StoreError> {
        let (_, infos) = self.rpc.call::<AskSegments>(&(), std::iter::empty())?;
        let named = infos.flatten().find(|info| info.extent_bytes == 0 && info.name == name).map(segment);
        named.ok_or_else(|| ErrorCode::SegmentNotFound.into())
    }

    /// Those of these segments that are mounted, in the order of `wanted`.
    fn segments_of(&mut self, wanted: &[SegmentNo]) -> Result<Vec<SegmentEntry>, StoreError> {
        let mut entries = Vec::with_capacity(wanted.len());
        for wanted in wanted.chunks(1_024) {
            let (_, infos) = self.rpc.call::<AskSegments>(&(), wanted.iter().copied())?;
            entries.extend(infos.flatten().map(segment));
        }
        Ok(entries)
    }

    /// The master's counters and gauges.
    ///
    /// # Errors
    /// No answer from the master.
    pub fn stats(&mut self) -> Result<Stats, StoreError> {
        self.rpc.begin_trace();
        let (stats, _) = self.rpc.call::<ReadStats>(&(), std::iter::empty())?;
        Ok(stats)
    }
}

fn segment(info: SegmentInfo<'_>) -> SegmentEntry {
    SegmentEntry {
        segment: info.segment,
        node: info.node,
        incarnation: info.incarnation,
        name: info.name.to_owned(),
        endpoint: info.endpoint.to_owned(),
        len: info.len,
        location: info.location.try_into().ok(),
        used: info.used,
        free_bytes_largest: info.free_bytes_largest,
    }
}

pub(super) fn listed(entry: Listed<'_>) -> ListEntry {
    ListEntry {
        key: entry.key.0.to_vec(),
        len: entry.len,
        replicas: entry.replicas,
        complete: entry.complete,
        leased: entry.leased,
    }
}
