//! The client's thread: takes all waiting jobs and carries them out as one batch per kind.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use store_core::message::{Prefetched, PutOptions};
use te_core::RegionId;

use super::queue::{Queue, Reply};
use super::{GetJob, Job, Origin, OwnRange, PutJob, To};
use crate::client::Client;
use crate::error::StoreError;
use crate::item::{Get, Put, Sink, Source};
use crate::memory::BufferRange;
use crate::store::{RemoveMode, Store as _};

/// State of the thread. Dropping it, even in a panic, ends all waiting operations.
pub(super) struct Worker {
    pub(super) client: Client,
    pub(super) queue: Arc<Queue<Job>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.abandon();
    }
}

/// Requests of one kind, each with its reply.
type Asked<A, T> = Vec<(A, Reply<T>)>;

/// Waiting jobs, by kind.
#[derive(Default)]
struct Gathered {
    puts: Vec<PutJob>,
    gets: Vec<GetJob>,
    /// Without a lease, and with one.
    exists: [Asked<Vec<u8>, bool>; 2],
    prefetches: Asked<Vec<u8>, Prefetched>,
    /// Removals without force, and with force.
    removes: [Asked<Vec<u8>, bool>; 2],
}

impl GetJob {
    fn is_wanted(&self) -> bool {
        match &self.to {
            To::Plain(reply) => reply.is_wanted(),
            To::Memory(_, reply) | To::Fragments(_, reply) => reply.is_wanted(),
        }
    }

    fn answer(self, result: Result<Option<u64>, StoreError>, value: Vec<u8>) {
        match self.to {
            To::Plain(reply) => reply.send(result.map(|read| read.map(|_| value))),
            To::Memory(_, reply) | To::Fragments(_, reply) => reply.send(result),
        }
    }
}

impl Worker {
    pub(super) fn run(mut self) {
        while let Some(jobs) = self.queue.take() {
            let gathered = self.gather(jobs);
            self.carry_out(gathered);
        }
    }

    /// Sorts jobs by kind, drops those whose futures were dropped, and carries out at once those that do not
    /// block.
    fn gather(&mut self, jobs: VecDeque<Job>) -> Gathered {
        let mut all = Gathered::default();
        for job in jobs {
            match job {
                Job::Put(put) if put.reply.is_wanted() => all.puts.push(put),
                Job::Get(get) if get.is_wanted() => all.gets.push(get),
                Job::Exists(leased, key, reply) if reply.is_wanted() => {
                    all.exists[usize::from(leased)].push((key, reply));
                }
                Job::Prefetch(key, reply) if reply.is_wanted() => all.prefetches.push((key, reply)),
                Job::Remove(key, mode, reply) if reply.is_wanted() => {
                    all.removes[usize::from(mode.is_force())].push((key, reply));
                }
                Job::Alloc(len, reply) if reply.is_wanted() => reply.send(self.client.alloc(len)),
                Job::Release(region, reply) if reply.is_wanted() => {
                    let known = self.client.allocated(&region);
                    reply.send(if known {
                        self.client.unregister(region.id())
                    } else {
                        Err(StoreError::ForeignMemory)
                    });
                }
                // No operation has used this memory, so unregistering succeeds.
                Job::GiveBack(region) => drop(self.client.unregister(region.id())),
                Job::Counters(reply) => reply.send(Ok(self.client.counters())),
                Job::With(run) => run(&mut self.client),
                // Its future was dropped.
                _ => {}
            }
        }
        all
    }

    fn carry_out(&mut self, gathered: Gathered) {
        let Gathered { puts, gets, exists, prefetches, removes } = gathered;
        self.prefetch(prefetches);
        for (leased, exists) in [false, true].into_iter().zip(exists) {
            self.exists(exists, leased);
        }
        for (mode, removes) in [RemoveMode::Unused, RemoveMode::Force].into_iter().zip(removes) {
            self.remove(removes, mode);
        }
        self.get(gets);
        self.put(puts);
    }

    fn exists(&mut self, asks: Asked<Vec<u8>, bool>, leased: bool) {
        if asks.is_empty() {
            return;
        }
        let (keys, replies): (Vec<_>, Vec<_>) = asks.into_iter().unzip();
        let keys = slices(&keys);
        let found =
            if leased { self.client.batch_exists_leased(&keys) } else { self.client.batch_exists(&keys) };
        match found {
            Ok(found) => answer(replies, found.into_iter().map(Ok)),
            Err(error) => refuse(replies, &error),
        }
    }

    fn prefetch(&mut self, asks: Asked<Vec<u8>, Prefetched>) {
        if asks.is_empty() {
            return;
        }
        let (keys, replies): (Vec<_>, Vec<_>) = asks.into_iter().unzip();
        match self.client.batch_prefetch(&slices(&keys)) {
            Ok(found) => answer(replies, found.into_iter().map(Ok)),
            Err(error) => refuse(replies, &error),
        }
    }

    fn remove(&mut self, asks: Asked<Vec<u8>, bool>, mode: RemoveMode) {
        if asks.is_empty() {
            return;
        }
        let (keys, replies): (Vec<_>, Vec<_>) = asks.into_iter().unzip();
        match self.client.batch_remove(&slices(&keys), mode) {
            Ok(results) => answer(replies, results),
            Err(error) => refuse(replies, &error),
        }
    }

    /// Gets into the same memory would mix their bytes in one batch, so they are carried out one after the
    /// other.
    fn get(&mut self, mut gets: Vec<GetJob>) {
        while !gets.is_empty() {
            let (mut now, mut places, mut later) = (Vec::new(), Vec::new(), Vec::new());
            let mut occupied = Occupied::default();
            for get in gets {
                match self.places(&get) {
                    Ok(ranges) if occupied.add(&ranges) => {
                        now.push(get);
                        places.push(ranges);
                    }
                    Ok(_) => later.push(get),
                    Err(error) => get.answer(Err(error), Vec::new()),
                }
            }
            let mut values = vec![Vec::new(); now.len()];
            let mut items: Vec<_> = now.iter().zip(&places).zip(&mut values).map(item_of).collect();
            let _ = self.client.batch_get(&mut items);
            let results: Vec<_> = items.into_iter().map(Get::into_result).collect();
            for ((get, result), value) in now.into_iter().zip(results).zip(values) {
                get.answer(result, value);
            }
            gets = later;
        }
    }

    fn put(&mut self, puts: Vec<PutJob>) {
        for (options, puts) in by_options(puts) {
            let (mut now, mut plain, mut memory) = (Vec::new(), Vec::new(), Vec::new());
            for put in puts {
                let ranges = match &put.from {
                    Origin::Plain(_) => Ok(Vec::new()),
                    Origin::Memory(ranges) => self.own(ranges),
                };
                match ranges {
                    Ok(ranges) => {
                        memory.push(ranges);
                        now.push(put);
                    }
                    Err(error) => put.reply.send(Err(error)),
                }
            }
            plain.extend(now.iter().map(|put| match &put.from {
                Origin::Plain(parts) => slices(parts),
                Origin::Memory(_) => Vec::new(),
            }));
            let sources = now.iter().zip(&plain).zip(&memory).map(|((put, plain), memory)| {
                match (&put.from, &plain[..]) {
                    // A value in one piece may be moved directly from where it is.
                    (Origin::Plain(_), [only]) => Source::Bytes(only),
                    (Origin::Plain(_), parts) => Source::Slices(parts),
                    (Origin::Memory(_), _) => Source::Regions(memory),
                }
            });
            let mut items: Vec<_> =
                now.iter().zip(sources).map(|(put, source)| Put::new(&put.key, source)).collect();
            let _ = self.client.batch_put(&mut items, &options);
            let results: Vec<_> = items.into_iter().map(Put::into_result).collect();
            answer(now.into_iter().map(|put| put.reply), results);
        }
    }

    /// The registered memory that a get writes.
    fn places(&self, get: &GetJob) -> Result<Vec<BufferRange>, StoreError> {
        match &get.to {
            To::Plain(_) => Ok(Vec::new()),
            To::Memory(ranges, _) => self.own(ranges),
            To::Fragments(parts, _) => {
                let ranges: Vec<_> = parts.iter().map(|part| part.into).collect();
                self.client.check_ranges(ranges.iter().copied())?;
                Ok(ranges)
            }
        }
    }

    /// Ranges as the client names them, if they may be used now. The client keeps its registered memory even
    /// if all handles are dropped.
    fn own(&self, ranges: &[OwnRange]) -> Result<Vec<BufferRange>, StoreError> {
        if ranges
            .iter()
            .filter_map(|range| range.region.as_ref())
            .any(|region| !self.client.allocated(region))
        {
            return Err(StoreError::ForeignMemory);
        }
        let own: Vec<_> = ranges.iter().map(|range| range.range).collect();
        self.client.check_ranges(own.iter().copied())?;
        Ok(own)
    }
}

/// The item of a get.
fn item_of<'g>(((get, places), value): ((&'g GetJob, &'g Vec<BufferRange>), &'g mut Vec<u8>)) -> Get<'g> {
    let sink = match &get.to {
        To::Plain(_) => Sink::Vec(value),
        To::Memory(..) => Sink::Regions(places),
        To::Fragments(parts, _) => Sink::Fragments(parts),
    };
    Get { key: &get.key, part: get.part, sink, result: Ok(None) }
}

/// Memory that the gets of a batch write.
#[derive(Default)]
pub(super) struct Occupied {
    /// Start and end of ranges, by region.
    ranges: HashMap<RegionId, BTreeMap<u64, u64>>,
}

impl Occupied {
    /// Adds ranges unless a part of them is occupied. Returns whether they were added.
    pub(super) fn add(&mut self, ranges: &[BufferRange]) -> bool {
        let taken = |range: &BufferRange| {
            let before = |taken: &BTreeMap<u64, u64>| {
                let (_, end) = taken.range(..range.offset.saturating_add(range.len)).next_back()?;
                Some(*end > range.offset)
            };
            range.len > 0 && self.ranges.get(&range.region).and_then(before).unwrap_or(false)
        };
        if ranges.iter().any(taken) {
            return false;
        }
        for range in ranges.iter().filter(|range| range.len > 0) {
            let of_region = self.ranges.entry(range.region).or_default();
            let end = of_region.entry(range.offset).or_default();
            *end = (*end).max(range.offset + range.len);
        }
        true
    }
}

fn by_options(puts: Vec<PutJob>) -> Vec<(PutOptions, Vec<PutJob>)> {
    let mut groups: Vec<(PutOptions, Vec<PutJob>)> = Vec::new();
    for put in puts {
        match groups.iter_mut().find(|(options, _)| *options == put.options) {
            Some((_, group)) => group.push(put),
            None => groups.push((put.options, vec![put])),
        }
    }
    groups
}

fn slices(bytes: &[Vec<u8>]) -> Vec<&[u8]> {
    bytes.iter().map(Vec::as_slice).collect()
}

fn answer<T>(
    replies: impl IntoIterator<Item = Reply<T>>,
    results: impl IntoIterator<Item = Result<T, StoreError>>,
) {
    for (reply, result) in replies.into_iter().zip(results) {
        reply.send(result);
    }
}

fn refuse<T>(replies: Vec<Reply<T>>, error: &StoreError) {
    replies.into_iter().for_each(|reply| reply.send(Err(error.clone())));
}
