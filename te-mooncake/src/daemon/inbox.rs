//! The queue of notifications.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::config::Config;
use crate::message::Notification;

/// Notifications that have not been taken yet.
#[derive(Debug)]
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    count_max: usize,
    bytes_max: usize,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Notification>,
    bytes: usize,
}

impl Inbox {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            waiting: Mutex::default(),
            count_max: config.notifications_max as usize,
            bytes_max: config.notification_bytes_max as usize,
            refused: AtomicU64::new(0),
        }
    }

    /// All notifications, oldest first.
    pub(crate) fn take(&self) -> Vec<Notification> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *waiting).queue.into()
    }

    /// Puts a notification into the queue. False: there is no room.
    pub(crate) fn put(&self, notification: Notification) -> bool {
        let bytes = notification.bytes();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.queue.len() >= self.count_max || waiting.bytes + bytes > self.bytes_max {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        waiting.bytes += bytes;
        waiting.queue.push_back(notification);
        true
    }

    /// The number of notifications for which there was no room.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_are_bounded_in_number_and_in_bytes() {
        let config = Config { notifications_max: 3, notification_bytes_max: 10, ..Config::default() };
        let inbox = Inbox::new(&config);
        let put = |bytes: usize| inbox.put(Notification { name: "n".into(), message: "m".repeat(bytes - 1) });
        assert_eq!([put(6), put(5), put(4), put(1)], [true, false, true, false]);
        assert_eq!(inbox.take().len(), 2);
        assert_eq!([put(1), put(1), put(1), put(1)], [true, true, true, false]);
        assert_eq!((inbox.refused(), inbox.take().len(), inbox.take().len()), (3, 3, 0));
    }
}
