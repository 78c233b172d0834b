//! Queries over many objects, and bulk removal: the master answers page by page, and the loop over the pages
//! is here.

use store_core::message::{
    ChangeRetention, ClearReplicas, Find, FindQuery, HostQuery, ListPosition, QueryHosts, RemoveMany,
    RemoveQuery, RetentionChange,
};
use store_core::{ErrorCode, Key, SegmentNo};

use super::{ListPage, MasterClient, listed};
use crate::client::chunks;
use crate::error::StoreError;
use crate::store::RemoveMode;

/// Result of a bulk removal, in objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BulkRemoval {
    /// Objects that were removed.
    pub removed: u64,
    /// Objects that were kept because a reader holds a lease.
    pub leased: u64,
    /// Objects that were kept because they are being written.
    pub unfinished: u64,
}

impl MasterClient<'_> {
    /// Lists at most `limit` keys that match a regular expression. It matches anywhere in the key unless it
    /// is anchored; classes are ASCII. `cursor` is 0 for the first page, then the cursor of the page before.
    /// A page may be empty without being the last.
    ///
    /// # Errors
    /// `InvalidParams` for an invalid expression, one that is longer than 1,024 bytes or one that compiles to
    /// too large a program; no answer from the master.
    pub fn find(&mut self, pattern: &str, cursor: u64, limit: u32) -> Result<ListPage, StoreError> {
        let query = FindQuery { pattern, cursor, limit };
        let (ListPosition { cursor }, found) = self.rpc.call::<Find>(&query, std::iter::empty())?;
        let entries = found.map(listed).collect();
        Ok(ListPage { entries, cursor })
    }

    /// Removes every object whose key matches a regular expression, as [`remove`](crate::Store::remove) does.
    /// Objects that are put meanwhile may stay.
    ///
    /// # Errors
    /// As [`find`](Self::find). Objects that were removed before the error are gone.
    pub fn remove_matching(&mut self, pattern: &str, mode: RemoveMode) -> Result<BulkRemoval, StoreError> {
        self.remove_pages(Some(pattern), mode)
    }

    /// Removes every object of the connection's tenant, as [`remove`](crate::Store::remove) does. Objects
    /// that are put meanwhile may stay.
    ///
    /// # Errors
    /// No answer from the master. Objects that were removed before the error are gone.
    pub fn remove_all(&mut self, mode: RemoveMode) -> Result<BulkRemoval, StoreError> {
        self.remove_pages(None, mode)
    }

    /// The hosts of nodes or segments, at most eight per node.
    ///
    /// # Errors
    /// No answer from the master; `ClientNotFound` or `SegmentNotFound` for an item.
    pub fn batch_hosts(
        &mut self,
        of: &[HostQuery],
    ) -> Result<Vec<Result<Vec<String>, ErrorCode>>, StoreError> {
        let mut hosts = Vec::with_capacity(of.len());
        for of in of.chunks(1_024) {
            let (_, answers) = self.rpc.call::<QueryHosts>(&(), of.iter().copied())?;
            hosts.extend(
                answers
                    .map(|answer| answer.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect())),
            );
        }
        Ok(hosts)
    }

    /// Changes how long objects are kept.
    ///
    /// # Errors
    /// No answer from the master. For an item: see
    /// [`Master::change_retention`](store_core::Master::change_retention).
    pub fn change_retention(
        &mut self,
        keys: &[&[u8]],
        change: &RetentionChange,
    ) -> Result<Vec<Result<(), ErrorCode>>, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<ChangeRetention>(change, keys.iter().map(|key| Key(key)))?;
            results.extend(answers);
        }
        Ok(results)
    }

    /// Drops the replicas that objects have on a segment; `None`: all their replicas. An object without
    /// replicas is removed.
    ///
    /// # Errors
    /// No answer from the master. For an item: `KeyNotFound`, `ObjectHasLease`, `ReplicaIsNotReady` while
    /// the object is being written, `ReplicaNotFound`.
    pub fn batch_clear_replicas(
        &mut self,
        keys: &[&[u8]],
        segment: Option<SegmentNo>,
    ) -> Result<Vec<Result<(), ErrorCode>>, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<ClearReplicas>(&segment, keys.iter().map(|key| Key(key)))?;
            results.extend(answers);
        }
        Ok(results)
    }

    fn remove_pages(&mut self, pattern: Option<&str>, mode: RemoveMode) -> Result<BulkRemoval, StoreError> {
        let mut sum = BulkRemoval::default();
        let mut cursor = 0;
        loop {
            let query = RemoveQuery { pattern, cursor, force: mode.is_force() };
            let (page, _) = self.rpc.call::<RemoveMany>(&query, std::iter::empty())?;
            sum.removed += u64::from(page.removed);
            sum.leased += u64::from(page.leased);
            sum.unfinished += u64::from(page.unfinished);
            cursor = page.cursor;
            if cursor == 0 {
                return Ok(sum);
            }
        }
    }
}
