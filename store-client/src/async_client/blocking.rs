//! [`BlockingClient`]: the blocking interface of an [`AsyncClient`].

use std::future::Future as _;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use store_core::message::{Prefetched, PutOptions, RetentionChange};

use super::queue::Pending;
use super::{AsyncClient, GetJob, Job, Origin, OwnRange, To};
use crate::client::Client;
use crate::error::StoreError;
use crate::item::{Get, Put, Sink, Source, Tally};
use crate::store::{RemoveMode, Store};

/// The blocking interface of an [`AsyncClient`]: many threads share one engine, each with a clone of this.
///
/// Operations that wait at the same time form one batch, whichever threads they come from. An operation runs
/// on another thread and has to own its memory: plain memory is copied once more than with a
/// [`Client`](crate::Client). Registered memory is not.
#[derive(Clone, Debug)]
pub struct BlockingClient {
    client: AsyncClient,
}

impl BlockingClient {
    pub(super) const fn new(client: AsyncClient) -> Self {
        Self { client }
    }

    /// Runs any code with the client, on its thread. See [`AsyncClient::with`].
    ///
    /// # Errors
    /// That of the code; `Stopped` when the client has ended, `Forked` in a fork of its process.
    pub fn with<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Client) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        Waiter::new().wait(self.client.with(run))
    }

    fn begin_get(&self, item: &Get<'_>) -> Result<Begun, StoreError> {
        item.check()?;
        let (key, part) = (item.key.to_vec(), item.part);
        let ranges = match &item.sink {
            Sink::Vec(_) | Sink::Bytes(_) | Sink::Slices(_) => {
                return Ok(Begun::Plain(self.client.get_plain(key, part)));
            }
            Sink::Fragments(parts) => {
                let parts = parts.to_vec();
                let job = |reply| Job::Get(GetJob { key, part, to: To::Fragments(parts, reply) });
                return Ok(Begun::Memory(self.client.ask(job)));
            }
            Sink::Region(range) => vec![OwnRange::from(*range)],
            Sink::Regions(ranges) => ranges.iter().copied().map(OwnRange::from).collect(),
            Sink::Local(_) => return Err(StoreError::ForeignMemory),
        };
        let job = |reply| Job::Get(GetJob { key, part, to: To::Memory(ranges, reply) });
        Ok(Begun::Memory(self.client.ask(job)))
    }

    fn begin_put(&self, item: &Put<'_>, options: &PutOptions) -> Result<Pending<bool>, StoreError> {
        item.check()?;
        let from = match item.source {
            Source::Bytes(bytes) => Origin::Plain(vec![bytes.to_vec()]),
            Source::Slices(slices) => Origin::Plain(slices.iter().map(|slice| slice.to_vec()).collect()),
            Source::Region(range) => Origin::Memory(vec![range.into()]),
            Source::Regions(ranges) => Origin::Memory(ranges.iter().copied().map(OwnRange::from).collect()),
            Source::Local(_) => return Err(StoreError::ForeignMemory),
        };
        Ok(self.client.put_job(item.key.to_vec(), from, options))
    }
}

/// A get under way.
enum Begun {
    Plain(Pending<Option<Vec<u8>>>),
    Memory(Pending<Option<u64>>),
}

impl Store for BlockingClient {
    fn batch_get(&mut self, items: &mut [Get<'_>]) -> Tally {
        let mut waiter = Waiter::new();
        let mut begun: Vec<_> = items.iter().map(|item| self.begin_get(item)).collect();
        // All operations are sent before the first result is waited for.
        for begun in begun.iter_mut().flatten() {
            match begun {
                Begun::Plain(pending) => waiter.send(pending),
                Begun::Memory(pending) => waiter.send(pending),
            }
        }
        let mut tally = Tally::default();
        for (item, begun) in items.iter_mut().zip(begun) {
            match begun {
                Ok(Begun::Plain(pending)) => deliver(item, waiter.wait(pending)),
                Ok(Begun::Memory(pending)) => item.end_with(waiter.wait(pending)),
                Err(error) => item.end_with(Err(error)),
            }
            tally.get(&item.result);
        }
        tally
    }

    fn batch_put(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally {
        let mut waiter = Waiter::new();
        let mut begun: Vec<_> = items.iter().map(|item| self.begin_put(item, options)).collect();
        begun.iter_mut().flatten().for_each(|pending| waiter.send(pending));
        let mut tally = Tally::default();
        for (item, begun) in items.iter_mut().zip(begun) {
            item.result = begun.and_then(|pending| waiter.wait(pending));
            tally.put(&item.result);
        }
        tally
    }

    fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        Waiter::new().all(keys.iter().map(|key| self.client.exists(*key)).collect()).into_iter().collect()
    }

    fn batch_exists_leased(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        let pending = keys.iter().map(|key| self.client.exists_leased(*key)).collect();
        Waiter::new().all(pending).into_iter().collect()
    }

    fn batch_prefetch(&mut self, keys: &[&[u8]]) -> Result<Vec<Prefetched>, StoreError> {
        let pending = keys.iter().map(|key| self.client.prefetch(*key)).collect();
        Waiter::new().all(pending).into_iter().collect()
    }

    fn batch_change_retention(
        &mut self,
        keys: &[&[u8]],
        change: &RetentionChange,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        let (keys, change): (Vec<Vec<u8>>, _) = (keys.iter().map(|key| key.to_vec()).collect(), *change);
        self.with(move |client| {
            let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            client.batch_change_retention(&keys, &change)
        })
    }

    fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        mode: RemoveMode,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        Ok(Waiter::new().all(keys.iter().map(|key| self.client.remove(*key, mode)).collect()))
    }
}

/// Moves the bytes that were read to the item's sink.
fn deliver(item: &mut Get<'_>, read: Result<Option<Vec<u8>>, StoreError>) {
    let result = match (read, &mut item.sink) {
        (Ok(Some(value)), Sink::Vec(place)) => {
            let len = value.len() as u64;
            **place = value;
            Ok(Some(len))
        }
        (Ok(Some(value)), sink) => {
            let (len, room) = (value.len() as u64, sink.room().unwrap_or(u64::MAX));
            if len <= room {
                sink.fill(len, 0, len, |skip, place| {
                    place.copy_from_slice(&value[skip as usize..][..place.len()]);
                });
                Ok(Some(len))
            } else {
                Err(StoreError::TooLong { room })
            }
        }
        (Ok(None), _) => Ok(None),
        (Err(error), _) => Err(error),
    };
    item.end_with(result);
}

/// The calling thread, which sleeps until its waker is called.
struct Waiter(Waker);

impl Waiter {
    fn new() -> Self {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        Self(Waker::from(Arc::new(Unpark(thread::current()))))
    }

    /// Sends an operation if the queue has room.
    fn send<T>(&mut self, pending: &mut Pending<T>) {
        if let Poll::Ready(result) = Pin::new(&mut *pending).poll(&mut Context::from_waker(&self.0)) {
            *pending = Pending::ready(result);
        }
    }

    fn wait<T>(&mut self, pending: Pending<T>) -> Result<T, StoreError> {
        let mut pending = pin!(pending);
        let mut context = Context::from_waker(&self.0);
        loop {
            match pending.as_mut().poll(&mut context) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }

    fn all<T>(&mut self, mut pending: Vec<Pending<T>>) -> Vec<Result<T, StoreError>> {
        pending.iter_mut().for_each(|pending| self.send(pending));
        pending.into_iter().map(|pending| self.wait(pending)).collect()
    }
}
