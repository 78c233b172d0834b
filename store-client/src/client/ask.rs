//! What is one call and one answer: whether, what and where, and forgetting.

use store_core::message::{
    Exists, List, ListPosition, ListQuery, Listed, ReadStats, Removal, Remove, Segments as AskSegments,
};
use store_core::{ErrorCode, Key, Stats};

use super::{Client, chunks, one};
use crate::error::StoreError;

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
    pub node: u64,
    /// Which life of the node's exports.
    pub incarnation: u64,
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

impl Client {
    /// Whether a get would find it. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn exists(&mut self, key: &[u8]) -> Result<bool, StoreError> {
        Ok(self.batch_exists(&[key])?.first().copied().unwrap_or(false))
    }

    /// Whether gets would find them.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        self.rpc.begin_trace();
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<Exists>(&(), keys.iter().map(|key| Key(key)))?;
            found.extend(answers);
        }
        self.note_connection();
        Ok(found)
    }

    /// Forgets an object; with `force` even under a lease or while it is written. Gives `false` when there was none.
    ///
    /// # Errors
    /// `ObjectHasLease`, `ReplicaIsNotReady`; a master that cannot be asked.
    pub fn remove(&mut self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        match one(self.batch_remove(&[key], force)?) {
            Ok(()) => Ok(true),
            Err(ErrorCode::KeyNotFound) => Ok(false),
            Err(code) => Err(code.into()),
        }
    }

    /// Forgets many.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        force: bool,
    ) -> Result<Vec<Result<(), ErrorCode>>, StoreError> {
        self.rpc.begin_trace();
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let removals = keys.iter().map(|key| Removal { key: Key(key), force });
            let (_, answers) = self.rpc.call::<Remove>(&(), removals)?;
            results.extend(answers);
        }
        self.note_connection();
        Ok(results)
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
        self.note_connection();
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
        self.note_connection();
        Ok(entries)
    }

    /// The master's counters and gauges.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn stats(&mut self) -> Result<Stats, StoreError> {
        self.rpc.begin_trace();
        let (stats, _) = self.rpc.call::<ReadStats>(&(), std::iter::empty())?;
        self.note_connection();
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
