//! Events on their way from the thread of a disk to its owner.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::bell::Bell;
use super::request::DiskEvent;
use super::sys::EventFd;

/// So many events may wait before the thread takes no further requests, and recovery pauses.
const EVENTS_MAX: usize = 4_096;

/// A queue with a descriptor that is readable while there is something in it.
pub(super) struct Outbox {
    queue: Mutex<VecDeque<DiskEvent>>,
    event: EventFd,
    /// The thread of the disk, which may wait for room.
    bell: Bell,
}

impl Outbox {
    pub(super) fn new(bell: Bell) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { queue: Mutex::default(), event: EventFd::new()?, bell }))
    }

    /// Whether another event may be produced. Those that are inevitable are pushed all the same: their
    /// number is bounded by that of the requests.
    pub(super) fn has_room(&self) -> bool {
        self.locked().len() < EVENTS_MAX
    }

    pub(super) fn push(&self, event: DiskEvent) {
        let mut queue = self.locked();
        queue.push_back(event);
        if queue.len() == 1 {
            self.event.raise();
        }
    }

    pub(super) fn pop(&self) -> Option<DiskEvent> {
        let mut queue = self.locked();
        let event = queue.pop_front()?;
        if queue.is_empty() {
            self.event.lower();
        }
        let wake = queue.len() == EVENTS_MAX / 2;
        drop(queue);
        if wake {
            self.bell.ring();
        }
        Some(event)
    }

    /// The next event, after at most `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> Option<DiskEvent> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(event) = self.pop() {
                return Some(event);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.event.wait(Some(left));
        }
    }

    pub(super) const fn event(&self) -> &EventFd {
        &self.event
    }

    fn locked(&self) -> MutexGuard<'_, VecDeque<DiskEvent>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
