//! [`MasterClient`]: what is asked of the master alone.

mod queries;
mod tasks;

use store_core::message::{Get, List, ListPosition, ListQuery, Listed, ReadStats, Segments as AskSegments};
use store_core::{ErrorCode, Key, Stats, unbound};

use crate::error::StoreError;
use crate::rpc::RpcConnection;

pub use queries::BulkRemoval;
pub use tasks::{TaskEntry, TaskPage};

/// What is asked of the master alone, and moves no bytes here: what there is and where, tasks, drains,
/// counters.
///
/// A view of a connection: of a client's ([`Client::master`](crate::Client::master)), or of a bare one, which
/// needs no engine.
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

/// What the master knows of an object. The bytes are another question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Bytes.
    pub len: u64,
    /// CRC-32C of all bytes.
    pub checksum: u32,
    /// Which put of this key it is from.
    pub generation: u64,
}

/// A page of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The keys, in no particular order.
    pub entries: Vec<ListEntry>,
    /// Where the next page begins; 0: that was all.
    pub cursor: u64,
}

/// One key of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The key.
    pub key: Vec<u8>,
    /// Bytes.
    pub len: u64,
    /// Copies.
    pub replicas: u8,
    /// Readable; else it is being written.
    pub complete: bool,
    /// Readers hold a lease.
    pub leased: bool,
}

/// One segment of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentEntry {
    /// Its number, for [`Placement`](store_core::Placement).
    pub segment: store_core::SegmentNo,
    /// The node that contributes it.
    pub node: store_core::NodeId,
    /// Which life of the node's exports.
    pub incarnation: store_core::Incarnation,
    /// Its name.
    pub name: String,
    /// Where the engine finds it.
    pub endpoint: String,
    /// Bytes.
    pub len: u64,
    /// Bytes that are allocated or held back.
    pub used: u64,
    /// Longest object for which there is room without eviction, bytes; a little more may fit.
    pub free_bytes_largest: u64,
}

impl<'c> MasterClient<'c> {
    /// Asks over this connection, as the tenant that it was made for.
    #[must_use]
    pub const fn new(rpc: &'c mut RpcConnection) -> Self {
        Self { rpc }
    }

    /// What an object is. It is leased as by a get, so that a get that follows at once finds it. `None` is a
    /// miss.
    ///
    /// # Errors
    /// An invalid key; a master that cannot be asked.
    pub fn look_up(&mut self, key: &[u8]) -> Result<Option<ObjectInfo>, StoreError> {
        let (_, answers) = self.rpc.call::<Get>(&(), std::iter::once(Key(key)))?;
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

    /// A page of at most `limit` keys that begin with `prefix`. `cursor` is 0 to begin with, then what the page before gave.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn list(&mut self, prefix: &[u8], cursor: u64, limit: u32) -> Result<ListPage, StoreError> {
        self.rpc.begin_trace();
        let query = ListQuery { prefix: Key(prefix), cursor, limit };
        let (ListPosition { cursor }, listed) = self.rpc.call::<List>(&query, std::iter::empty())?;
        let entries = listed.map(self::listed).collect();
        Ok(ListPage { entries, cursor })
    }

    /// The segments of the store.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn segments(&mut self) -> Result<Vec<SegmentEntry>, StoreError> {
        self.rpc.begin_trace();
        let (_, infos) = self.rpc.call::<AskSegments>(&(), std::iter::empty())?;
        let entries = infos.filter_map(Result::ok).map(|info| SegmentEntry {
            segment: info.segment,
            node: info.node,
            incarnation: info.incarnation,
            name: info.name.to_owned(),
            endpoint: info.endpoint.to_owned(),
            len: info.len,
            used: info.used,
            free_bytes_largest: info.free_bytes_largest,
        });
        let entries = entries.collect();
        Ok(entries)
    }

    /// The master's counters and gauges.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn stats(&mut self) -> Result<Stats, StoreError> {
        self.rpc.begin_trace();
        let (stats, _) = self.rpc.call::<ReadStats>(&(), std::iter::empty())?;
        Ok(stats)
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
