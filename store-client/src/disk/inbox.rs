//! Requests on their way to the thread of a disk.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use store_core::disk::Removed;

use super::request::{Demote, Stage, Unsent};

/// So many requests may wait for the thread.
const COMMANDS_MAX: usize = 4_096;

/// What the owner asks for.
pub(super) enum Command {
    Demote(Box<Demote>),
    Stage(Stage),
    Forget(Removed, Option<u64>),
    Reclaimed(u64),
    RepeatReclaims,
    Clear,
    Lineage(u64),
    Wear(u64),
}

/// A bounded queue. Its lock is held for as long as it takes to move one request.
#[derive(Default)]
pub(super) struct Inbox(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Command>,
    closed: bool,
    refused: u64,
}

impl Inbox {
    /// Appends a request, or returns it.
    pub(super) fn push<T>(&self, request: T, command: impl FnOnce(T) -> Command) -> Result<(), Unsent<T>> {
        let mut queue = self.locked();
        if queue.closed || queue.waiting.len() >= COMMANDS_MAX {
            let closed = queue.closed;
            queue.refused += 1;
            return Err(Unsent { request, closed });
        }
        queue.waiting.push_back(command(request));
        Ok(())
    }

    pub(super) fn pop(&self) -> Option<Command> {
        self.locked().waiting.pop_front()
    }

    /// Accepts no further request.
    pub(super) fn begin_close(&self) {
        self.locked().closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.locked().closed
    }

    /// Accepts no further request, and returns those that wait.
    pub(super) fn close(&self) -> VecDeque<Command> {
        let mut queue = self.locked();
        queue.closed = true;
        std::mem::take(&mut queue.waiting)
    }

    /// Requests that were not accepted.
    pub(super) fn refused(&self) -> u64 {
        self.locked().refused
    }

    fn locked(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
