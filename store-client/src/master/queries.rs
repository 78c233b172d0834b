//! Questions about many objects at once, and bulk removal: the master answers page by page, and the loop is here.

use store_core::message::{
    ClearReplicas, Find, FindQuery, ListPosition, QueryHosts, RemoveMany, RemoveQuery, HostQuery,
};
use store_core::{ErrorCode, Key, SegmentNo};

use super::{ListPage, MasterClient, listed};
use crate::client::chunks;
use crate::error::StoreError;

/// What became of many objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BulkRemoval {
    /// Objects that are gone.
    pub removed: u64,
    /// Left, because somebody may be reading them.
    pub leased: u64,
    /// Left, because they are being written.
    pub unfinished: u64,
}

impl MasterClient<'_> {
    /// A page of at most `limit` keys that a regular expression matches, anywhere in the key unless it is anchored; classes
    /// are ASCII. `cursor` is 0 to begin with, then what the page before gave. A page may be empty and not the last.
    ///
    /// # Errors
    /// `InvalidParams` for what is no regular expression, or one that is longer than 1,024 bytes or compiles to too much; a
    /// master that cannot be asked.
    pub fn find(&mut self, pattern: &str, cursor: u64, limit: u32) -> Result<ListPage, StoreError> {
        let query = FindQuery { pattern, cursor, limit };
        let (ListPosition { cursor }, found) = self.rpc.call::<Find>(&query, std::iter::empty())?;
        let entries = found.map(listed).collect();
        Ok(ListPage { entries, cursor })
    }

    /// Forgets every object whose key a regular expression matches, as [`remove`](crate::Store::remove) does.
    /// What is put meanwhile may stay.
    ///
    /// # Errors
    /// As [`find`](Self::find). What was removed by then is gone.
    pub fn remove_matching(&mut self, pattern: &str, force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_pages(Some(pattern), force)
    }

    /// Forgets every object of the connection's tenant, as [`remove`](crate::Store::remove) does. What is put
    /// meanwhile may stay.
    ///
    /// # Errors
    /// A master that cannot be asked. What was removed by then is gone.
    pub fn remove_all(&mut self, force: bool) -> Result<BulkRemoval, StoreError> {
        self.remove_pages(None, force)
    }

    /// The hosts that nodes or segments are on, eight of a node at most.
    ///
    /// # Errors
    /// A master that cannot be asked; `ClientNotFound` or `SegmentNotFound` for an item.
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

    /// Drops the replicas that objects have on a segment; `None`: all of them. An object without replicas is gone.
    ///
    /// # Errors
    /// A master that cannot be asked; for an item `ObjectNotFound`, `ObjectHasLease`, `ReplicaIsNotReady` while it is
    /// written, `ReplicaNotFound`.
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

    fn remove_pages(&mut self, pattern: Option<&str>, force: bool) -> Result<BulkRemoval, StoreError> {
        let mut sum = BulkRemoval::default();
        let mut cursor = 0;
        loop {
            let query = RemoveQuery { pattern, cursor, force };
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
