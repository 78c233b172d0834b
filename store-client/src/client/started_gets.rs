//! Gets that are started once and read range by range: [`Client::start_gets`].

use std::collections::HashMap;
use std::time::Duration;

use store_core::client::GetItem;
use store_core::message::{Get as Look, Lease, LeaseRange, LeaseWanted, Object};
use store_core::{ErrorCode, Key};
use te_core::Instant;

use super::get::wanted;
use super::{Client, chunk_len, chunks};
use crate::error::{RpcError, StoreError};
use crate::item::{Get, Tally};

/// The started gets of a client, by key.
pub(super) type StartedGets = HashMap<Vec<u8>, Started>;

/// An object that was looked up, and its lease.
#[derive(Clone, Copy)]
pub(super) struct Started {
    /// `None`: it is gone, or another object has its key.
    object: Option<Object>,
    /// Number of the lease, and of the connection that granted it.
    lease: (u64, u64),
    lease_end: Instant,
    lease_ms: u32,
    /// How often the get was started, and not ended.
    users: u32,
}

impl Started {
    /// Whether the lease should be renewed before a read.
    fn is_late(&self, now: Instant) -> bool {
        self.object.is_some() && now + Duration::from_millis(u64::from(self.lease_ms) / 2) >= self.lease_end
    }
}

/// A lookup's result, with its lease.
type Looked = Result<(Object, u64), ErrorCode>;

impl Client {
    /// Looks objects up and leases them, to be read in any number of calls of
    /// [`batch_get_started`](Self::batch_get_started) without a further request to the master, until they are
    /// [ended](Self::end_gets). A get that was started twice is ended twice. The result of an item is the
    /// length of the object, bytes.
    ///
    /// A lease lasts as long as the master's `lease_ttl_ms`. Reads renew it when half of that has passed.
    /// Without a read it runs out, and the object may be gone at the next one.
    ///
    /// # Errors
    /// No answer from the master. For an item: `ObjectNotFound`; `ReplicaIsNotReady` while the object is
    /// being written.
    pub fn start_gets(&mut self, keys: &[&[u8]]) -> Vec<Result<u64, StoreError>> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let looked = self.usable().and_then(|()| {
                self.rpc.begin_trace();
                self.look_up(keys).map_err(StoreError::from)
            });
            match looked {
                Ok((looked, lease_end, lease_ms)) => {
                    for (key, looked) in keys.iter().zip(looked) {
                        let started = looked.map(|(object, no)| {
                            self.note_started(key, object, no, lease_end, lease_ms);
                            object.len
                        });
                        results.push(started.map_err(StoreError::from));
                    }
                }
                Err(error) => results.extend(keys.iter().map(|_| Err(error.clone()))),
            }
        }
        results
    }

    /// Looks objects up; returns them with the numbers of their leases, the end of the leases, and how long
    /// they last.
    fn look_up(&mut self, keys: &[&[u8]]) -> Result<(Vec<Looked>, Instant, u32), RpcError> {
        // Before the request is sent, perhaps again: the lease does not end earlier than it is taken for.
        let asked_at = self.now();
        let (lease, objects) =
            self.rpc.call::<Look>(&LeaseWanted::Lasting, keys.iter().map(|key| Key(key)))?;
        let Lease { lease_ms, first } = lease;
        let mut next = first;
        let looked = objects.map(|object| {
            object.map(|object| {
                next += 1;
                (object, next - 1)
            })
        });
        let looked: Vec<Looked> = looked.collect();
        self.note_connection();
        Ok((looked, asked_at + Duration::from_millis(lease_ms.into()), lease_ms))
    }

    fn note_started(&mut self, key: &[u8], object: Object, no: u64, lease_end: Instant, lease_ms: u32) {
        let lease = (no, self.rpc.connects_total());
        let fresh = Started { object: Some(object), lease, lease_end, lease_ms, users: 1 };
        if let Some(known) = self.gets.get_mut(key) {
            let users = known.users.saturating_add(1);
            let old = std::mem::replace(known, Started { users, ..fresh });
            self.return_started(&old);
        } else {
            self.gets.insert(key.to_vec(), fresh);
        }
    }

    /// As [`batch_get`](crate::Store::batch_get), for keys whose gets were started. An object that is not
    /// there any more, because its lease has run out meanwhile, is a miss.
    ///
    /// # Errors
    /// For an item: `NotStarted`; otherwise as [`batch_get`](crate::Store::batch_get).
    pub fn batch_get_started(&mut self, items: &mut [Get<'_>]) -> Tally {
        let mut tally = Tally::default();
        let mut left = items;
        while !left.is_empty() {
            let (items, rest) = left.split_at_mut(chunk_len(left, |item| item.key.len()));
            left = rest;
            match self.usable() {
                Ok(()) => self.get_started_chunk(items),
                Err(error) => items.iter_mut().for_each(|item| item.end_with(Err(error.clone()))),
            }
            items.iter().for_each(|item| tally.get(&item.result));
        }
        tally
    }

    fn get_started_chunk(&mut self, items: &mut [Get<'_>]) {
        self.settle();
        for item in items.iter_mut() {
            let started = self.gets.contains_key(item.key);
            let checked = if started { self.check_get(item) } else { Err(StoreError::NotStarted) };
            item.result = checked.map(|()| None);
        }
        self.renew(items);
        let value_bytes_max = self.config.value_bytes_max;
        let mut lease_end = None;
        let reads: Vec<(GetItem<'_>, Result<Object, ErrorCode>)> = items
            .iter()
            .map(|item| {
                let started = self.gets.get(item.key).filter(|_| item.result.is_ok());
                let object = started.and_then(|started| {
                    let soonest =
                        lease_end.map_or(started.lease_end, |end: Instant| end.min(started.lease_end));
                    started.object.inspect(|_| lease_end = Some(soonest))
                });
                (wanted(item, value_bytes_max), object.ok_or(ErrorCode::ObjectNotFound))
            })
            .collect();
        if items.iter().any(|item| item.result.is_ok()) {
            self.get.start_leased(&reads, lease_end.unwrap_or(Instant::ZERO), &[]);
            drop(reads);
            self.run_get(items);
        }
        self.finish_get(items);
    }

    /// Renews the leases of these items that have passed half of their time. An object that has gone, or that
    /// another one has replaced, is not read any more.
    fn renew(&mut self, items: &[Get<'_>]) {
        let now = self.now();
        let is_late = |item: &&Get<'_>| {
            item.result.is_ok() && self.gets.get(item.key).is_some_and(|started| started.is_late(now))
        };
        let mut keys: Vec<&[u8]> = items.iter().filter(is_late).map(|item| item.key).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() {
            return;
        }
        // Without an answer, what is left of the leases has to be enough.
        let (looked, lease_end, lease_ms) = match self.look_up(&keys) {
            Ok(looked) => looked,
            Err(error) => return log::debug!("operation {}: leases are not renewed: {error}", self.trace()),
        };
        let connection = self.rpc.connects_total();
        for (key, looked) in keys.into_iter().zip(looked) {
            let Some(started) = self.gets.get_mut(key) else { continue };
            let old = *started;
            let same = looked
                .ok()
                .filter(|(object, _)| old.object.is_some_and(|known| known.generation == object.generation));
            match same {
                Some((object, no)) => {
                    let lease = (no, connection);
                    *started = Started { object: Some(object), lease, lease_end, lease_ms, ..old };
                    self.return_started(&old);
                }
                None => {
                    started.object = None;
                    if let Ok((_, no)) = looked {
                        self.rpc.return_leases(LeaseRange { first: no, count: 1 });
                    }
                }
            }
        }
    }

    /// Ends started gets and returns their leases. The result of an item is `false` if no get of the key was
    /// started.
    pub fn end_gets(&mut self, keys: &[&[u8]]) -> Vec<bool> {
        let mut results = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(started) = self.gets.get_mut(*key) else {
                results.push(false);
                continue;
            };
            started.users -= 1;
            if started.users == 0
                && let Some(over) = self.gets.remove(*key)
            {
                self.return_started(&over);
            }
            results.push(true);
        }
        results
    }

    /// Returns a lease that is not needed any more. It is kept while a read that was given up may still be
    /// under way somewhere, so that its source does not change.
    fn return_started(&mut self, started: &Started) {
        let (no, connection) = started.lease;
        let ours = connection == self.rpc.connects_total() && self.now() < started.lease_end;
        if ours && self.check_process().is_ok() && !self.mover.has_quarantined() {
            self.rpc.return_leases(LeaseRange { first: no, count: 1 });
        }
    }
}
