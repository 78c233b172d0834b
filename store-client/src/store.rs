//! [`Store`]: the trait that all clients of the store implement.

use std::thread;
use std::time::Duration;

use store_core::message::{Existing, Prefetched, PutOptions, RetentionChange};

use crate::error::StoreError;
use crate::item::{Get, Put, Source, Tally};
use crate::prefetching::Prefetching;

/// Which objects a removal may remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoveMode {
    /// Objects that are neither leased nor being written. Others are kept.
    #[default]
    Unused,
    /// All objects, even if they are leased or being written.
    Force,
}

impl RemoveMode {
    /// `Force` if `force` is set, otherwise `Unused`: for a flag of a command line or of a protocol.
    #[must_use]
    pub const fn forced(force: bool) -> Self {
        if force { Self::Force } else { Self::Unused }
    }

    pub(crate) const fn is_force(self) -> bool {
        matches!(self, Self::Force)
    }
}

/// A key-value store of objects.
///
/// | Implemented by | Moves the bytes |
/// |---|---|
/// | [`Client`](crate::Client) | with its own engine, on the calling thread |
/// | [`LocalClient`](crate::LocalClient) | through the node on this machine, without an engine |
/// | [`BlockingClient`](crate::BlockingClient) | with an `AsyncClient` that threads and tasks share |
///
/// A batch is the natural form: one request to the master, and all transfers under way together. Each item
/// has its own result, and a failed item does not affect the others. [`get`](Self::get), [`put`](Self::put)
/// and the other single forms are batches of one item. The batch forms make the trait usable as `dyn Store`.
///
/// A miss is not an error: a key that is not found, or not found intact and in time, gives `None`.
///
/// [`AsyncClient`](crate::AsyncClient) has the same operations as futures. It does not implement a trait: an
/// operation whose future may be dropped at any time has to own its keys and its memory, and here they are
/// borrowed.
pub trait Store {
    /// Reads many objects, or parts of them. Allocates only for [`Sink::Vec`](crate::Sink::Vec).
    fn batch_get(&mut self, items: &mut [Get<'_>]) -> Tally;

    /// Stores many objects. An item whose key exists ends with `false`, and the existing object stays
    /// unchanged.
    fn batch_put(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally;

    /// Stores many objects and replaces those that exist ([`Existing::Replace`]; what the options say about
    /// existing objects counts if they say it). An object that is replaced can be read until the new one is
    /// stored, and stays as it is if that fails. No item ends with `false`.
    fn batch_upsert(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally {
        self.batch_put(items, &replacing(options))
    }

    /// Whether gets would find the objects. Neither leases them nor counts as a use.
    ///
    /// # Errors
    /// No answer from the master, or from the node on this machine.
    fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError>;

    /// As [`batch_exists`](Self::batch_exists), and leases the objects that are there, as gets do: until the
    /// master's lease time has passed they are neither evicted nor removed without
    /// [`Force`](RemoveMode::Force). Does not count as a use.
    ///
    /// # Errors
    /// No answer from the master, or from the node on this machine.
    fn batch_exists_leased(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError>;

    /// Where objects are. Those that are on disks alone are promoted: copied into memory, if there is room
    /// that costs nothing. Those in memory are leased, as [`batch_exists_leased`](Self::batch_exists_leased)
    /// leases them. Returns at once; [`prefetch`](Self::prefetch) waits.
    ///
    /// # Errors
    /// No answer from the master, or from the node on this machine.
    fn batch_prefetch(&mut self, keys: &[&[u8]]) -> Result<Vec<Prefetched>, StoreError>;

    /// Copies objects that are on disks alone into memory, and waits until they are there, for as long as
    /// `deadline` at most: the blocks of a request that will be read soon. The result of a key is whether a
    /// get would find it in memory now; it is leased then, so that it stays for a while. What is not in
    /// memory by then may come later.
    ///
    /// # Errors
    /// No answer from the master, or from the node on this machine.
    fn prefetch(&mut self, keys: &[&[u8]], deadline: Duration) -> Result<Vec<bool>, StoreError> {
        let mut waiting = Prefetching::new(keys.len(), deadline);
        loop {
            let asked: Vec<&[u8]> = waiting.left().iter().map(|at| keys[*at]).collect();
            let Some(pause) = waiting.heard(&self.batch_prefetch(&asked)?) else { break };
            thread::sleep(pause);
        }
        Ok(waiting.into_there())
    }

    /// Changes how long many objects are kept. The result of an item is `false` if there was no such object.
    ///
    /// # Errors
    /// No answer from the master, or from the node on this machine. For an item: see
    /// [`Master::change_retention`](store_core::Master::change_retention).
    fn batch_change_retention(
        &mut self,
        keys: &[&[u8]],
        change: &RetentionChange,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError>;

    /// Removes many objects. The result of an item is `false` if there was no such object.
    ///
    /// # Errors
    /// No answer from the master, or from the node on this machine. For an item: `ObjectHasLease`,
    /// `ReplicaIsNotReady`, both without [`Force`](RemoveMode::Force).
    fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        mode: RemoveMode,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError>;

    /// Reads an object. `None` is a miss.
    ///
    /// # Errors
    /// A value longer than `value_bytes_max`; no answer from the master or node. An invalid key is a miss,
    /// because no object can have it.
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let mut value = Vec::new();
        let read = self.get_with(Get::new(key, &mut value))?;
        Ok(read.map(|_| value))
    }

    /// Reads one object, or a part of it, into the item's sink, and returns the number of bytes. `None` is a
    /// miss.
    ///
    /// # Errors
    /// `TooLong` when the object, or the part, is longer than the sink; `BeyondEnd` and `BadRange` for a part
    /// that the object does not have; `Unregistered`, `ForeignMemory` and `Held` for memory that cannot be
    /// used; no answer from the master or node.
    fn get_with(&mut self, item: Get<'_>) -> Result<Option<u64>, StoreError> {
        let mut items = [item];
        let _ = self.batch_get(&mut items);
        let [item] = items;
        item.into_result()
    }

    /// Stores one object. Returns `false` when the key exists, and leaves the existing object unchanged.
    ///
    /// # Errors
    /// No space, an invalid key, an empty value, or no reachable segment; `Unregistered`, `ForeignMemory` and
    /// `Held` for memory that cannot be used; no answer from the master or node.
    fn put<'a>(
        &mut self,
        key: &[u8],
        value: impl Into<Source<'a>>,
        options: &PutOptions,
    ) -> Result<bool, StoreError>
    where
        Self: Sized,
    {
        let mut items = [Put { key, source: value.into(), result: Ok(false) }];
        let _ = self.batch_put(&mut items, options);
        let [item] = items;
        item.into_result()
    }

    /// Stores one object and replaces the one that exists, if there is one; see
    /// [`batch_upsert`](Self::batch_upsert).
    ///
    /// # Errors
    /// As [`put`](Self::put); the object that exists is unchanged then, unless the error is one of the
    /// connection to the master or node: the outcome is then unknown.
    fn upsert<'a>(
        &mut self,
        key: &[u8],
        value: impl Into<Source<'a>>,
        options: &PutOptions,
    ) -> Result<(), StoreError>
    where
        Self: Sized,
    {
        self.put(key, value, &replacing(options)).map(drop)
    }

    /// Whether a get would find the object. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// As [`batch_exists`](Self::batch_exists).
    fn exists(&mut self, key: &[u8]) -> Result<bool, StoreError> {
        Ok(self.batch_exists(&[key])?.first().copied().unwrap_or(false))
    }

    /// Removes an object. Returns `false` if there was no such object.
    ///
    /// # Errors
    /// As [`batch_remove`](Self::batch_remove), whose errors of an item are returned.
    fn remove(&mut self, key: &[u8], mode: RemoveMode) -> Result<bool, StoreError> {
        let removed = self.batch_remove(&[key], mode)?;
        removed.into_iter().next().unwrap_or(Ok(false))
    }
}

/// The options of an upsert: those that replace nothing replace everything.
fn replacing(options: &PutOptions) -> PutOptions {
    match options.existing {
        Existing::Keep => PutOptions { existing: Existing::REPLACE, ..*options },
        Existing::Replace(_) => *options,
    }
}
