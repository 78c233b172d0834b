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

use store_client::{Prefetched, Put, PutOptions, RemoveMode, Source, StoreError};
use te_host::Spin;

use super::backend::Backend;
use super::jobs::{Call, Fetched, Given, Job, Key, Queue, Reply, Stored, Wanted};
use super::reading::Reading;
use crate::buffers::Readable;
use crate::errors::Fault;
use crate::guess::Guess;
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
        Self { backend, queue, guess: Guess::new(), parked: VecDeque::new() }
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
        let sources = slices.iter().map(|parts| match parts[..] {
            // A value in one piece may be moved directly from where it is.
            [only] => Source::Bytes(only),
            _ => Source::Slices(parts),
        });
        let mut puts: Vec<Put<'_>> =
            items.iter().zip(sources).map(|(item, source)| Put::new(&*item.key, source)).collect();
        self.backend.put(&mut puts, options);
        let results: Vec<_> = puts.into_iter().map(Put::into_result).collect();
        drop(slices);
        if results.iter().any(|result| matches!(result, Err(StoreError::Expelled))) {
            self.backend.revive();
        }
        let stored = |(item, result): (Given, Result<bool, StoreError>)| Stored {
            result: result.map_err(|error| Fault::from(error).of_key(&item.key)),
            parts: item.parts,
        };
        items.into_iter().zip(results).map(stored).collect()
    }

    /// Keeps memory from being used for a while: a transfer may still write it.
    pub(super) fn park(&mut self, block: Block) {
        self.parked.push_back((Instant::now() + PARKED, block));
    }

    fn unpark(&mut self) {
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
