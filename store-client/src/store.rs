//! [`Store`]: what every client of the store can do, whichever way it goes.

use store_core::message::PutOptions;

use crate::error::StoreError;
use crate::item::{Get, Put, Source, Tally};

/// Objects in, objects out.
///
/// | Implemented by | Moves the bytes |
/// |---|---|
/// | [`Client`](crate::Client) | with an engine of its own, on the calling thread |
/// | [`LocalClient`](crate::LocalClient) | by way of the node on this machine, without an engine |
/// | [`BlockingClient`](crate::BlockingClient) | with an `AsyncClient` that threads and tasks share |
///
/// A batch is the natural form: one question to the master, one flight of transfers. Each item has its own
/// result, and an item that fails does so alone. [`get`](Self::get), [`put`](Self::put) and their like are
/// batches of one. The batch forms make the trait usable as `dyn Store`.
///
/// A miss is not an error: a key that is not found, or not found intact and in time, is `None`.
///
/// [`AsyncClient`](crate::AsyncClient) has the same verbs with futures for results. They are not a trait: an
/// operation whose future may be dropped at any time has to own its keys and its memory, and here they are
/// borrowed.
pub trait Store {
    /// Reads many objects, or parts of them. Allocates nothing itself but what
    /// [`Sink::Vec`](crate::Sink::Vec) asks for.
    fn batch_get(&mut self, items: &mut [Get<'_>]) -> Tally;

    /// Stores many objects. An item whose key is taken ends `false`, and leaves the object there as it is.
    fn batch_put(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally;

    /// Whether gets would find the objects. Neither leases them nor counts as a use.
    ///
    /// # Errors
    /// The master, or the node on this machine, cannot be asked.
    fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError>;

    /// Forgets many objects; with `force` even under a lease or while they are written. `false`: there was
    /// none.
    ///
    /// # Errors
    /// The master, or the node on this machine, cannot be asked. For an item `ObjectHasLease`,
    /// `ReplicaIsNotReady`.
    fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        force: bool,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError>;

    /// Reads an object. `None` is a miss.
    ///
    /// # Errors
    /// A value over `value_bytes_max`, or a master or node that cannot be asked. A key that no object can
    /// have is a miss.
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let mut value = Vec::new();
        let read = self.get_with(Get::new(key, &mut value))?;
        Ok(read.map(|_| value))
    }

    /// Reads one object, or a part of it, to where the item says; gives the number of bytes. `None` is a
    /// miss.
    ///
    /// # Errors
    /// `TooLong` when the object, or the part, is longer than the sink; `BeyondEnd` and `BadRange` for a part
    /// that is not there; `Unregistered`, `ForeignMemory`, `Held` for memory that cannot be used; a master or
    /// node that cannot be asked.
    fn get_with(&mut self, item: Get<'_>) -> Result<Option<u64>, StoreError> {
        let mut items = [item];
        let _ = self.batch_get(&mut items);
        let [item] = items;
        item.into_result()
    }

    /// Stores one object. Gives `false` when the key is taken, and leaves the object there as it is.
    ///
    /// # Errors
    /// No room, an invalid key, no value, or nobody to write to; `Unregistered`, `ForeignMemory`, `Held` for
    /// memory that cannot be used; a master or node that cannot be asked.
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

    /// Whether a get would find the object. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// As [`batch_exists`](Self::batch_exists).
    fn exists(&mut self, key: &[u8]) -> Result<bool, StoreError> {
        Ok(self.batch_exists(&[key])?.first().copied().unwrap_or(false))
    }

    /// Forgets an object; with `force` even under a lease or while it is written. Gives `false` when there
    /// was none.
    ///
    /// # Errors
    /// `ObjectHasLease`, `ReplicaIsNotReady`; as [`batch_remove`](Self::batch_remove).
    fn remove(&mut self, key: &[u8], force: bool) -> Result<bool, StoreError> {
        let removed = self.batch_remove(&[key], force)?;
        removed.into_iter().next().unwrap_or(Ok(false))
    }
}
