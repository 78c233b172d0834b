//! Copies of hot prefixes in the store: what the scheduler asks for becomes tasks of the store's master.
//!
//! ```text
//!   decision ─▶ hot prefix ─▶ queue ─▶ keys ─▶ engines' hashes ─▶ names of objects ─▶ master ─▶ nodes copy
//!                                │ off, full     (learnt)           (the store's events)  │
//!                                └── refused, by reason ◀──── enough, gone, limits ───────┘
//! ```
//!
//! Copies that engines should have of each other's blocks are not made here: an engine that a request is
//! placed on fetches what the decision says, and no engine can be told to send blocks to another.

mod copier;
mod names;

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conductor_core::events::Batch;
use conductor_core::knowledge::PublisherId;
use conductor_core::scheduler::Replicate;
use conductor_core::{BlockKey, ContextId};
use store_core::DEFAULT_TENANT;

use crate::config::{Config, EngineKind};
use crate::traffic::{CopyTraffic, Kept};
pub(crate) use copier::Copier;
use names::Names;

/// Prefixes that wait to be copied.
const WANTED_MAX: usize = 64;

/// A prefix to copy.
#[derive(Debug)]
struct Wanted {
    context: ContextId,
    keys: Vec<BlockKey>,
}

#[derive(Debug, Default)]
struct Queue {
    wanted: VecDeque<Wanted>,
    stopped: bool,
}

/// What decisions and the event thread leave for the [`Copier`].
#[derive(Debug)]
pub(crate) struct Replicas {
    /// `None`: the settings name no master.
    names: Option<Mutex<Names>>,
    queue: Mutex<Queue>,
    filled: Condvar,
    pub(crate) traffic: CopyTraffic,
}

impl Replicas {
    pub(crate) fn new(config: &Config) -> Self {
        let tenant = match config.store_identity.tenant.as_str() {
            "" => DEFAULT_TENANT,
            tenant => tenant,
        };
        let bytes_max = (config.store.names_mib_max as usize) << 20;
        let is_on = !config.store.master.is_empty();
        Self {
            names: is_on.then(|| Mutex::new(Names::new(tenant, bytes_max))),
            queue: Mutex::default(),
            filled: Condvar::new(),
            traffic: CopyTraffic::default(),
        }
    }

    /// Whether the names of what a publisher says are kept: a stream of it then begins with everything.
    pub(crate) fn follows(&self, kind: EngineKind) -> bool {
        self.names.is_some() && kind == EngineKind::Snowskin
    }

    /// Events of a publisher that is [followed](Self::follows).
    pub(crate) fn heard(&self, id: PublisherId, events: &Batch) {
        if let Some(mut names) = self.names() {
            names.heard(id, events);
        }
    }

    /// What a publisher said is void.
    pub(crate) fn forget(&self, id: PublisherId) {
        if let Some(mut names) = self.names() {
            names.forget(id);
        }
    }

    /// The scheduler asks for a copy of the beginning of a prompt with these blocks.
    pub(crate) fn ask(&self, context: ContextId, action: &Replicate, keys: &[BlockKey]) {
        let Some(keys) = keys.get(..action.blocks as usize).filter(|keys| keys.last() == Some(&action.key))
        else {
            return;
        };
        let many = keys.len() as u64;
        if self.names.is_none() {
            return self.traffic.keep(Kept::Off, many);
        }
        let mut queue = self.queue();
        if queue.wanted.len() >= WANTED_MAX {
            return self.traffic.keep(Kept::Busy, many);
        }
        queue.wanted.push_back(Wanted { context, keys: keys.to_vec() });
        self.filled.notify_one();
    }

    /// Objects whose name is known, the bytes of the names, and objects for which there was no memory.
    pub(crate) fn size(&self) -> (u64, u64, u64) {
        self.names().map_or((0, 0, 0), |names| names.size())
    }

    fn names(&self) -> Option<MutexGuard<'_, Names>> {
        Some(self.names.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next prefix to copy, if one comes in time; `Err`: the end.
    fn next(&self, time: Duration) -> Result<Option<Wanted>, ()> {
        let idle = |queue: &mut Queue| queue.wanted.is_empty() && !queue.stopped;
        let waited = self.filled.wait_timeout_while(self.queue(), time, idle);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if queue.stopped { Err(()) } else { Ok(queue.wanted.pop_front()) }
    }

    fn stop(&self) {
        self.queue().stopped = true;
        self.filled.notify_one();
    }
}
