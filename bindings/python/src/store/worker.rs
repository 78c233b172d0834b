//! [`Worker`]: the thread of a store, which owns its client.
//!
//! ```text
//!   threads ── get, put ──▶ ┌───────┐   all that wait    ┌──────────────────────┐
//!   tasks ──── get, put ──▶ │ Queue │ ─────────────────▶ │ Worker: one batch of │ ──▶ the client
//!                           └───────┘                    │ gets, one of puts    │
//!      ▲                                                 └───────┬──────────────┘
//!      └───────────────────────── answers ───────────────────────┘
//! ```
//!
//! A thread of its own has three reasons. A caller can stop waiting (Ctrl-C, a timeout, a cancelled task)
//! although the operation cannot stop: the operation keeps its buffers here until its end. Operations that
//! wait at the same time form one batch, with one request to the master. And no Python thread ever holds a
//! lock for as long as an operation takes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use store_client::{BufferRange, Prefetched, Put, PutOptions, RegionId, RemoveMode, Source, StoreError};
use te_host::Spin;

use super::backend::Backend;
use super::jobs::{Call, Fetched, Given, Job, Key, Queue, Reply, Stored, Wanted};
use super::reading::Reading;
use crate::buffers::{Readable, Writable};
use crate::errors::Fault;
use crate::guess::Guess;
use crate::memory::Place;
use crate::pool::Block;

/// How long the thread spins for a job before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// How long memory that a transfer may still write is kept from being used.
const PARKED: Duration = Duration::from_secs(30);

/// The client's thread.
pub(crate) struct Worker {
    pub(super) backend: Backend,
    queue: Arc<Queue>,
    pub(super) guess: Guess,
    /// Memory that a transfer that was given up may still write, and until when it is not used.
    parked: VecDeque<(Instant, Block)>,
    /// Memory of GPUs that a device that hangs may still touch. Its objects are kept until it does not.
    pub(super) held: Vec<(RegionId, Kept)>,
}

/// What keeps memory of a GPU in place.
pub(super) enum Kept {
    Read(#[expect(dead_code, reason = "kept for its drop")] Readable),
    Written(#[expect(dead_code, reason = "kept for its drop")] Writable),
}

/// The memory of one put that has parts in memory of a GPU.
#[derive(Default)]
struct OnDevice {
    ranges: Vec<BufferRange>,
    /// The registrations of its parts, by their numbers.
    regions: Vec<(usize, RegionId)>,
    /// Copies of its other parts.
    copies: Vec<Place>,
}

/// Items of a job, and where their results go.
type Asked<I, R> = (Vec<I>, Reply<Vec<R>>);

/// Jobs that wait, by kind.
#[derive(Default)]
struct Gathered {
    gets: Vec<Asked<Wanted, Fetched>>,
    puts: Vec<(PutOptions, Asked<Given, Stored>)>,
    exists: Vec<Asked<Key, bool>>,
    /// Removals without force, and with force.
    removes: [Vec<Asked<Key, Result<bool, Fault>>>; 2],
    calls: Vec<Call>,
}

/// Puts of several jobs with the same options: the items, and how many of them each job has.
struct Group {
    options: PutOptions,
    items: Vec<Given>,
    replies: Vec<(usize, Reply<Vec<Stored>>)>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Also after a panic: every caller gets an answer.
        self.queue.abandon();
    }
}

impl Worker {
    pub(super) const fn new(backend: Backend, queue: Arc<Queue>) -> Self {
        Self { backend, queue, guess: Guess::new(), parked: VecDeque::new(), held: Vec::new() }
    }

    pub(super) fn run(mut self) {
        let mut spin = Spin::new(SPIN);
        while let Some(jobs) = self.queue.take(&mut spin) {
            self.unpark();
            self.carry_out(gather(jobs));
        }
    }

    fn carry_out(&mut self, gathered: Gathered) {
        let Gathered { gets, puts, exists, removes, calls } = gathered;
        for (keys, reply) in exists {
            reply.send(self.exists(&keys));
        }
        for (mode, removes) in [RemoveMode::Unused, RemoveMode::Force].into_iter().zip(removes) {
            for (keys, reply) in removes {
                reply.send(self.remove(&keys, mode));
            }
        }
        self.answer_gets(gets);
        self.answer_puts(puts);
        for call in calls {
            call(self);
        }
    }

    /// Whether the objects exist.
    ///
    /// # Errors
    /// No answer from the master.
    pub(crate) fn exists(&mut self, keys: &[Key]) -> Result<Vec<bool>, Fault> {
        let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        Ok(self.backend.store().batch_exists(&keys)?)
    }

    /// Where objects are; those that are on disks alone are promoted.
    ///
    /// # Errors
    /// No answer from the master.
    pub(crate) fn prefetch(&mut self, keys: &[Key]) -> Result<Vec<Prefetched>, Fault> {
        let keys: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        Ok(self.backend.store().batch_prefetch(&keys)?)
    }

    /// Removes objects.
    ///
    /// # Errors
    /// No answer from the master.
    pub(crate) fn remove(
        &mut self,
        keys: &[Key],
        mode: RemoveMode,
    ) -> Result<Vec<Result<bool, Fault>>, Fault> {
        let slices: Vec<&[u8]> = keys.iter().map(|key| &**key).collect();
        let removed = self.backend.store().batch_remove(&slices, mode)?;
        let of_key = |(removed, key): (Result<bool, StoreError>, &Key)| {
            removed.map_err(|error| Fault::from(error).of_key(key))
        };
        Ok(removed.into_iter().zip(keys).map(of_key).collect())
    }

    /// Reads objects: the gets of all jobs in one batch.
    fn answer_gets(&mut self, jobs: Vec<Asked<Wanted, Fetched>>) {
        let (mut items, mut replies) = (Vec::new(), Vec::new());
        for (wanted, reply) in jobs {
            replies.push((wanted.len(), reply));
            items.extend(wanted);
        }
        let mut fetched = self.get(items).into_iter();
        for (count, reply) in replies {
            reply.send(Ok(fetched.by_ref().take(count).collect()));
        }
    }

    /// Reads objects. The results are in the order of the items.
    pub(crate) fn get(&mut self, items: Vec<Wanted>) -> Vec<Fetched> {
        if items.is_empty() {
            return Vec::new();
        }
        Reading::new(self, items).run()
    }

    /// Stores objects: the puts of all jobs with the same options in one batch.
    fn answer_puts(&mut self, jobs: Vec<(PutOptions, Asked<Given, Stored>)>) {
        let mut groups: Vec<Group> = Vec::new();
        for (options, (given, reply)) in jobs {
            let count = given.len();
            match groups.iter_mut().find(|group| group.options == options) {
                Some(group) => {
                    group.items.extend(given);
                    group.replies.push((count, reply));
                }
                None => groups.push(Group { options, items: given, replies: vec![(count, reply)] }),
            }
        }
        for Group { options, items, replies } in groups {
            let mut stored = self.put(items, &options).into_iter();
            for (count, reply) in replies {
                reply.send(Ok(stored.by_ref().take(count).collect()));
            }
        }
    }

    /// Stores objects. The results are in the order of the items.
    pub(crate) fn put(&mut self, items: Vec<Given>, options: &PutOptions) -> Vec<Stored> {
        let slices: Vec<Vec<&[u8]>> = items.iter().map(slices_of).collect();
        let on_device: Vec<_> = items.iter().map(|item| self.on_device(item)).collect();
        let sources = slices.iter().zip(&on_device).map(|(parts, on_device)| match (on_device, &parts[..]) {
            (Some(Ok(memory)), _) => Some(Source::Regions(&memory.ranges)),
            (Some(Err(_)), _) => None,
            // A value in one piece may be moved directly from where it is.
            (None, [only]) => Some(Source::Bytes(only)),
            (None, _) => Some(Source::Slices(parts)),
        });
        let mut puts: Vec<Put<'_>> = items
            .iter()
            .zip(sources)
            .filter_map(|(item, source)| Some(Put::new(&*item.key, source?)))
            .collect();
        self.backend.put(&mut puts, options);
        let mut moved = puts.into_iter().map(Put::into_result);
        let refused = |memory: &Option<Result<OnDevice, StoreError>>| match memory {
            Some(Err(error)) => Some(Err(error.clone())),
            _ => None,
        };
        let results: Vec<_> = on_device
            .iter()
            .map(|memory| refused(memory).or_else(|| moved.next()).unwrap_or(Err(StoreError::Stopped)))
            .collect();
        drop(moved);
        drop(slices);
        if results.iter().any(|result| matches!(result, Err(StoreError::Expelled))) {
            self.backend.revive();
        }
        let stored = |(item, result): (Given, Result<bool, StoreError>)| Stored {
            result: result.map_err(|error| Fault::from(error).of_key(&item.key)),
            parts: item.parts,
        };
        let items: Vec<Given> =
            items.into_iter().zip(on_device).map(|(item, memory)| self.take_back(item, memory)).collect();
        items.into_iter().zip(results).map(stored).collect()
    }

    /// Registers the parts of an item that are memory of GPUs, and copies its other parts to registered
    /// memory. `None`: it has no such part.
    #[allow(unsafe_code, reason = "registers memory that Python lends")]
    fn on_device(&mut self, item: &Given) -> Option<Result<OnDevice, StoreError>> {
        item.parts.iter().find_map(Readable::on_device)?;
        let mut memory = OnDevice::default();
        let mut failed = None;
        for (at, part) in item.parts.iter().enumerate().filter(|(_, part)| part.len() > 0) {
            let len = part.len() as u64;
            // SAFETY: the item keeps the memory, and `take_back` keeps it on if the registration does not
            // end.
            let registered = part.on_device().map(|span| unsafe { self.backend.register(span) });
            match registered {
                Some(Ok(region)) => {
                    memory.regions.push((at, region));
                    memory.ranges.push(BufferRange { region, offset: 0, len });
                }
                Some(Err(error)) => failed = Some(error),
                None => match self.backend.registered_copy(part.bytes()) {
                    Ok((copy, range)) => {
                        memory.copies.push(copy);
                        memory.ranges.push(range);
                    }
                    Err(_) => failed = Some(StoreError::Held),
                },
            }
            if failed.is_some() {
                break;
            }
        }
        let Some(error) = failed else { return Some(Ok(memory)) };
        // Nothing has been moved.
        memory.regions.iter().for_each(|(_, region)| _ = self.backend.unregister(*region));
        Some(Err(error))
    }

    /// Ends the registrations of an item. Parts that a device may still touch stay here.
    fn take_back(&mut self, mut item: Given, memory: Option<Result<OnDevice, StoreError>>) -> Given {
        let Some(Ok(memory)) = memory else { return item };
        for (at, region) in memory.regions.into_iter().rev() {
            if !self.backend.unregister(region) {
                self.held.push((region, Kept::Read(item.parts.remove(at))));
            }
        }
        item
    }

    /// Keeps memory from being used for a while: a transfer may still write it.
    pub(super) fn park(&mut self, block: Block) {
        self.parked.push_back((Instant::now() + PARKED, block));
    }

    fn unpark(&mut self) {
        let backend = &mut self.backend;
        self.held.retain(|(region, _)| !backend.unregister(*region));
        while self.parked.front().is_some_and(|(until, _)| Instant::now() >= *until) {
            self.parked.pop_front();
        }
    }
}

/// Sorts jobs by kind, and drops those whose callers are gone.
fn gather(jobs: VecDeque<Job>) -> Gathered {
    let mut all = Gathered::default();
    for job in jobs {
        match job {
            Job::Get(items, reply) if reply.is_wanted() => all.gets.push((items, reply)),
            Job::Put(items, options, reply) if reply.is_wanted() => all.puts.push((options, (items, reply))),
            Job::Exists(keys, reply) if reply.is_wanted() => all.exists.push((keys, reply)),
            Job::Remove(keys, mode, reply) if reply.is_wanted() => {
                let force = mode == RemoveMode::Force;
                all.removes[usize::from(force)].push((keys, reply));
            }
            Job::Call(call) => all.calls.push(call),
            // Its caller is gone.
            _ => {}
        }
    }
    all
}

fn slices_of(item: &Given) -> Vec<&[u8]> {
    item.parts.iter().map(Readable::bytes).collect()
}
