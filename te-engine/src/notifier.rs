//! [`Notifier`]: the threads that send the notifications of transfers that have completed.
//!
//! A notification is a request to the control port of a peer, and may take as long as a timeout. So neither
//! the worker nor a caller makes it:
//!
//! ```text
//!   worker ── push ──▶ waiting ──▶ a thread per busy owner ──▶ owner ──▶ the transfer ends
//! ```
//!
//! Notifications for one owner are sent one after the other, in the order in which their transfers completed;
//! an owner that does not answer delays no other. Threads are started when they are needed and end when they
//! have had nothing to do for a while: an engine that never notifies has none.

use std::boxed::Box;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::string::String;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::vec::Vec;

/// Most threads, and so most owners that do not answer and yet delay no other.
const THREADS_MAX: usize = 8;
/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(1);

/// Sends notifications. Clones send through the same threads.
#[derive(Clone, Default)]
pub(crate) struct Notifier(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// Owners that are being sent a notification.
    busy: Vec<String>,
    threads: usize,
    /// Threads without work.
    idle: usize,
    /// No further job is accepted.
    closed: bool,
}

/// A notification that waits to be sent.
struct Job {
    owner: String,
    /// Sends it, and returns what is to be done once its owner is not busy any more.
    send: Box<dyn FnOnce() -> Then + Send>,
}

/// Ends a transfer; runs a user's waker.
type Then = Box<dyn FnOnce()>;

impl Notifier {
    /// Hands over a notification for `owner`. `send` sends it, and returns what its thread does after that,
    /// when the next notification for the owner may be sent. False, and `send` is dropped: the notifier is
    /// closed, or the system refused the first thread.
    pub(crate) fn push<T: FnOnce() + 'static>(
        &self,
        owner: String,
        send: impl FnOnce() -> T + Send + 'static,
    ) -> bool {
        let mut queue = self.0.queue();
        if queue.closed {
            return false;
        }
        if queue.needs_thread(&owner) {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("te-notify".into());
            match thread.spawn(move || shared.run()) {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    log::error!("a notification is not sent: the system refused a thread: {error}");
                    return false;
                }
                // The threads that are there send it.
                Err(_) => {}
            }
        }
        queue.waiting.push_back(Job { owner, send: Box::new(|| Box::new(send())) });
        drop(queue);
        self.0.changed.notify_all();
        true
    }

    /// Waits until all notifications are sent, at most `timeout`, and accepts no further ones. Those that are
    /// left then are dropped, unless they are being sent.
    pub(crate) fn close(&self, timeout: Duration) {
        let until = Instant::now().checked_add(timeout);
        let mut queue = self.0.queue();
        while !(queue.waiting.is_empty() && queue.busy.is_empty()) {
            let left = until.map_or(IDLE, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                log::warn!("{} notifications of completed transfers were not sent", queue.waiting.len());
                break;
            }
            queue = self.0.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.closed = true;
        let left = std::mem::take(&mut queue.waiting);
        drop(queue);
        self.0.changed.notify_all();
        // Outside the lock: it drops what a user gave.
        drop(left);
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What each thread runs.
    fn run(&self) {
        let mut queue = self.queue();
        loop {
            if let Some(job) = queue.next() {
                queue.busy.push(job.owner.clone());
                drop(queue);
                let sent = catch_unwind(AssertUnwindSafe(job.send));
                let mut free = self.queue();
                let at = free.busy.iter().position(|busy| *busy == job.owner);
                at.map(|at| free.busy.swap_remove(at));
                drop(free);
                // For `close`, and for a thread that found only jobs of this owner.
                self.changed.notify_all();
                let ended = sent.and_then(|then| catch_unwind(AssertUnwindSafe(then)));
                if ended.is_err() {
                    log::error!("a thread that sends notifications panicked, or a waker that it called");
                }
                queue = self.queue();
                continue;
            }
            if queue.closed {
                break;
            }
            queue.idle += 1;
            let (woken, timeout) =
                self.changed.wait_timeout(queue, IDLE).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if timeout.timed_out() && queue.waiting.is_empty() {
                break;
            }
        }
        queue.threads -= 1;
    }
}

impl Queue {
    /// Whether a job for `owner` could be sent now if there were another thread.
    fn needs_thread(&self, owner: &String) -> bool {
        let can_begin = |job: &&Job| !self.busy.contains(&job.owner);
        let behind = self.busy.contains(owner) || self.waiting.iter().any(|job| job.owner == *owner);
        // A thread that was woken counts as idle until it has taken its job.
        let spoken_for = self.waiting.iter().filter(can_begin).count();
        !behind && self.idle <= spoken_for && self.threads < THREADS_MAX
    }

    /// The first job whose owner is not busy.
    fn next(&mut self) -> Option<Job> {
        let at = self.waiting.iter().position(|job| !self.busy.contains(&job.owner))?;
        self.waiting.remove(at)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_follows_a_notification_may_wait_for_the_next_one_of_the_same_owner() {
        let notifier = Notifier::default();
        let (say, heard) = channel();
        let (next, told) = (notifier.clone(), say.clone());
        notifier.push("a:1".into(), || {
            move || {
                let (sent, ended) = channel();
                next.push("a:1".into(), || move || sent.send(()).unwrap());
                told.send(ended.recv_timeout(LONG)).unwrap();
            }
        });
        assert_eq!(heard.recv_timeout(LONG).unwrap(), Ok(()));
        // A panic ends neither the thread nor the owner's turn.
        notifier.push("a:1".into(), || || panic!("a user's waker"));
        notifier.push("a:1".into(), || move || say.send(Ok(())).unwrap());
        assert_eq!(heard.recv_timeout(LONG).unwrap(), Ok(()));
    }

    /// A job that says that it has begun, and ends when it is told to.
    fn blocked(notifier: &Notifier, owner: &str) -> (Receiver<()>, Sender<()>) {
        let ((began, beginning), (end, ending)) = (channel(), channel());
        let job = move || {
            began.send(()).unwrap();
            ending.recv_timeout(LONG).unwrap();
            || ()
        };
        assert!(notifier.push(owner.into(), job));
        (beginning, end)
    }

    #[test]
    fn an_owner_that_does_not_answer_delays_no_other_and_keeps_the_order_of_its_own() {
        let notifier = Notifier::default();
        let (began, end) = blocked(&notifier, "a:1");
        began.recv_timeout(LONG).unwrap();
        let (say, heard) = channel();
        for number in 0..50 {
            let say = say.clone();
            notifier.push("a:1".into(), move || {
                say.send(number).unwrap();
                || ()
            });
        }
        let (other, answered) = channel();
        notifier.push("b:1".into(), || move || other.send(()).unwrap());
        answered.recv_timeout(LONG).expect("sent while the other owner does not answer");
        assert!(heard.try_recv().is_err());
        end.send(()).unwrap();
        let order: Vec<i32> = (0..50).map(|_| heard.recv_timeout(LONG).unwrap()).collect();
        assert_eq!(order, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn threads_are_bounded_and_what_is_beyond_them_waits() {
        let notifier = Notifier::default();
        let blocked: Vec<_> =
            (0..THREADS_MAX).map(|owner| blocked(&notifier, &std::format!("{owner}:1"))).collect();
        blocked.iter().for_each(|(began, _)| began.recv_timeout(LONG).unwrap());
        let (say, heard) = channel();
        notifier.push("more:1".into(), || move || say.send(()).unwrap());
        assert_eq!(notifier.0.queue().threads, THREADS_MAX);
        assert!(heard.try_recv().is_err());
        blocked[3].1.send(()).unwrap();
        heard.recv_timeout(LONG).unwrap();
        for (_, end) in &blocked {
            // One of them has ended already.
            let _ = end.send(());
        }
    }

    #[test]
    fn closing_waits_for_what_is_under_way_and_accepts_no_more() {
        let notifier = Notifier::default();
        let (say, heard) = channel();
        for number in 0..20 {
            let say = say.clone();
            assert!(notifier.push("a:1".into(), move || {
                say.send(number).unwrap();
                || ()
            }));
        }
        notifier.close(LONG);
        assert_eq!(heard.try_iter().count(), 20);
        assert!(!notifier.push("a:1".into(), || || unreachable!("it is closed")));
        // What does not end in time does not hold up the close, and what waits for it is dropped.
        let notifier = Notifier::default();
        let (began, end) = blocked(&notifier, "a:1");
        began.recv_timeout(LONG).unwrap();
        let waits = Arc::new(());
        let held = Arc::clone(&waits);
        notifier.push("a:1".into(), || move || drop(held));
        notifier.close(Duration::ZERO);
        assert_eq!(Arc::strong_count(&waits), 1);
        end.send(()).unwrap();
    }
}
