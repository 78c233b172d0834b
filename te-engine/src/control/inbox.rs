//! The queue of notifications.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::vec::Vec;

use super::Answer;
use crate::config::ControlConfig;
use crate::request::Notification;

/// Notifications that have not been taken yet, within the limits of [`ControlConfig`].
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Notification>,
    bytes: u64,
}

impl Inbox {
    pub(crate) fn take(&self) -> Vec<Notification> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *waiting).queue.into()
    }

    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Puts a notification into the queue, or returns why it is refused.
    pub(super) fn put(&self, notification: Notification, limits: &ControlConfig) -> Answer {
        let answer = self.try_put(notification, limits);
        self.refused.fetch_add(u64::from(answer != Answer::Taken), Ordering::Relaxed);
        answer
    }

    fn try_put(&self, notification: Notification, limits: &ControlConfig) -> Answer {
        if limits.notifications_max == 0 {
            return Answer::TakesNone;
        }
        let bytes_max = limits.notification_bytes_max;
        let bytes = (notification.name.len() + notification.message.len()) as u64;
        if bytes > u64::from(bytes_max) {
            return Answer::TooLong { bytes_max };
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // An empty queue accepts one notification of any length that passed the check above.
        let fits = waiting.queue.is_empty() || waiting.bytes + bytes <= u64::from(limits.inbox_bytes_max);
        if waiting.queue.len() >= limits.notifications_max as usize || !fits {
            return Answer::InboxFull;
        }
        waiting.bytes += bytes;
        waiting.queue.push_back(notification);
        Answer::Taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: usize) -> Notification {
        Notification { name: "n".into(), message: vec![0; bytes - 1] }
    }

    #[test]
    fn notifications_are_bounded_in_number_and_in_bytes() {
        let limits = ControlConfig {
            notifications_max: 3,
            notification_bytes_max: 100,
            inbox_bytes_max: 150,
            ..ControlConfig::default()
        };
        let inbox = Inbox::default();
        assert_eq!(inbox.put(message(101), &limits), Answer::TooLong { bytes_max: 100 });
        assert_eq!(inbox.put(message(100), &limits), Answer::Taken);
        assert_eq!(inbox.put(message(51), &limits), Answer::InboxFull);
        assert_eq!(inbox.put(message(50), &limits), Answer::Taken);
        assert_eq!(inbox.put(message(1), &limits), Answer::InboxFull);
        assert_eq!(inbox.take().len(), 2);
        for _ in 0..3 {
            assert_eq!(inbox.put(message(1), &limits), Answer::Taken);
        }
        assert_eq!(inbox.put(message(1), &limits), Answer::InboxFull);
        assert_eq!(inbox.refused(), 4);
        let none = ControlConfig { notifications_max: 0, ..limits };
        assert_eq!(Inbox::default().put(message(1), &none), Answer::TakesNone);
    }
}
