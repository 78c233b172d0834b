//! The connection between tasks and the client's thread: a bounded queue for jobs, and one slot per result.
//!
//! A future sends its job when it is first polled, and waits while the queue is full. A future that is
//! dropped before its job began takes the job back; after that the job runs to its end with its buffers, and
//! its result is dropped.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use te_host::fork::Mark;

use crate::error::StoreError;

/// The queue of jobs from tasks to the client's thread.
#[derive(Debug)]
pub(super) struct Queue<J> {
    state: Mutex<State<J>>,
    arrived: Condvar,
    jobs_max: usize,
    /// Identifies the process that has the thread. A forked child takes no lock here: the thread that may
    /// hold it does not exist there.
    mark: Mark,
}

#[derive(Debug)]
struct State<J> {
    jobs: VecDeque<J>,
    /// Tasks that wait for room, in the order in which they will be woken.
    waiting: BTreeMap<u64, Waker>,
    next_waiter: u64,
    /// Set when no more jobs are accepted.
    closed: bool,
}

impl<J> Queue<J> {
    pub(super) fn new(jobs_max: usize) -> Self {
        let state = State { jobs: VecDeque::new(), waiting: BTreeMap::new(), next_waiter: 0, closed: false };
        Self { state: Mutex::new(state), arrived: Condvar::new(), jobs_max, mark: Mark::new() }
    }

    /// Takes all waiting jobs; sleeps while there are none. `None`: the queue is closed and empty.
    pub(super) fn take(&self) -> Option<VecDeque<J>> {
        let mut state = self.lock();
        while state.jobs.is_empty() {
            if state.closed {
                return None;
            }
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let jobs = std::mem::take(&mut state.jobs);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_values().for_each(Waker::wake);
        Some(jobs)
    }

    /// Whether this process is a fork of the process that has the thread.
    pub(super) fn is_forked(&self) -> bool {
        self.mark.is_forked()
    }

    /// Closes the queue. Waiting jobs still run.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.closed = true;
            std::mem::take(&mut state.waiting)
        };
        self.arrived.notify_all();
        waiting.into_values().for_each(Waker::wake);
    }

    /// Closes the queue and drops the waiting jobs, which reports `Stopped` to their tasks.
    pub(super) fn abandon(&self) {
        self.close();
        let jobs = std::mem::take(&mut self.lock().jobs);
        drop(jobs);
    }

    /// Sends a job even if the queue is full: one that frees memory. A closed queue drops it, because the
    /// memory is freed with the client.
    pub(super) fn send_anyway(&self, job: J) {
        let mut state = self.lock();
        if state.closed {
            // Dropping the job runs code of other modules, so the lock is released first.
            drop(state);
            return drop(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.arrived.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the job if there is room. Otherwise the job stays here, and the task is woken when there is
    /// room.
    fn send(&self, job: &mut Option<J>, waiter: &mut Option<u64>, context: &Context<'_>) -> Sent {
        let mut state = self.lock();
        if state.closed {
            return Sent::Closed;
        }
        if state.jobs.len() < self.jobs_max {
            if let Some(job) = job.take() {
                state.jobs.push_back(job);
            }
            drop(state);
            self.arrived.notify_one();
            return Sent::Yes;
        }
        let next = &mut state.next_waiter;
        let number = *waiter.get_or_insert_with(|| {
            *next += 1;
            *next
        });
        state.waiting.insert(number, context.waker().clone());
        Sent::Full
    }

    fn forget_waiter(&self, number: u64) {
        let waker = self.lock().waiting.remove(&number);
        drop(waker);
    }
}

enum Sent {
    Yes,
    Full,
    Closed,
}

/// Where the result of one job goes.
struct Answer<T> {
    slot: Mutex<Slot<T>>,
    /// Called with a value that no future took.
    unclaimed: Option<Unclaimed<T>>,
}

type Unclaimed<T> = Box<dyn Fn(T) + Send + Sync>;

#[derive(Debug)]
enum Slot<T> {
    Empty(Option<Waker>),
    Done(Result<T, StoreError>),
    /// The result was taken, or its future was dropped.
    Over,
}

impl<T> Answer<T> {
    fn lock(&self) -> MutexGuard<'_, Slot<T>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unclaimed(&self, result: Result<T, StoreError>) {
        if let (Ok(value), Some(unclaimed)) = (result, &self.unclaimed) {
            unclaimed(value);
        }
    }
}

/// The thread's end of a result. Dropping it without a result reports `Stopped`.
pub(super) struct Reply<T>(Arc<Answer<T>>);

impl<T> Reply<T> {
    /// Whether a future still waits for the result.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(*self.0.lock(), Slot::Empty(_))
    }

    pub(super) fn send(self, result: Result<T, StoreError>) {
        self.put(result);
    }

    fn put(&self, result: Result<T, StoreError>) {
        let mut slot = self.0.lock();
        if let Slot::Empty(waker) = &mut *slot {
            let waker = waker.take();
            *slot = Slot::Done(result);
            drop(slot);
            // Wakers run code of the executor, so no lock is held here.
            waker.into_iter().for_each(Waker::wake);
        } else {
            drop(slot);
            self.0.unclaimed(result);
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        self.put(Err(StoreError::Stopped));
    }
}

/// An operation of an [`AsyncClient`](crate::AsyncClient). It begins when it is first polled and works with
/// every executor.
///
/// Dropping it before it began undoes it; dropping it later lets it run to its end, which keeps its buffers
/// until then, and drops its result.
#[must_use = "nothing is done before it is polled"]
pub struct Pending<T> {
    answer: Arc<Answer<T>>,
    unsent: Option<Box<dyn Unsent + Send>>,
    mark: Mark,
}

/// A job of any kind that has not been sent yet.
trait Unsent {
    fn send(&mut self, context: &Context<'_>) -> Sent;
}

struct Waiting<J> {
    queue: Arc<Queue<J>>,
    job: Option<J>,
    waiter: Option<u64>,
}

impl<J> Unsent for Waiting<J> {
    fn send(&mut self, context: &Context<'_>) -> Sent {
        self.queue.send(&mut self.job, &mut self.waiter, context)
    }
}

impl<J> Drop for Waiting<J> {
    fn drop(&mut self) {
        if let Some(number) = self.waiter {
            self.queue.forget_waiter(number);
        }
    }
}

impl<T> Pending<T> {
    pub(super) fn new<J: Send + 'static>(queue: &Arc<Queue<J>>, job: impl FnOnce(Reply<T>) -> J) -> Self {
        Self::with(queue, None, job)
    }

    /// An operation whose value must not be lost: if its future is dropped before it took the value,
    /// `unclaimed` receives it.
    pub(super) fn or_back<J: Send + 'static>(
        queue: &Arc<Queue<J>>,
        unclaimed: impl Fn(T) + Send + Sync + 'static,
        job: impl FnOnce(Reply<T>) -> J,
    ) -> Self {
        Self::with(queue, Some(Box::new(unclaimed)), job)
    }

    /// An operation that has ended already.
    pub(super) fn ready(result: Result<T, StoreError>) -> Self {
        let answer = Arc::new(Answer { slot: Mutex::new(Slot::Done(result)), unclaimed: None });
        Self { answer, unsent: None, mark: Mark::new() }
    }

    fn with<J: Send + 'static>(
        queue: &Arc<Queue<J>>,
        unclaimed: Option<Unclaimed<T>>,
        job: impl FnOnce(Reply<T>) -> J,
    ) -> Self {
        let answer = Arc::new(Answer { slot: Mutex::new(Slot::Empty(None)), unclaimed });
        let job = Some(job(Reply(Arc::clone(&answer))));
        let waiting = Waiting { queue: Arc::clone(queue), job, waiter: None };
        Self { answer, unsent: Some(Box::new(waiting)), mark: queue.mark }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, StoreError>;

    /// # Panics
    /// When polled after it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.mark.is_forked() {
            return Poll::Ready(Err(StoreError::Forked));
        }
        // The waker is stored first: the result may arrive as soon as the job is sent.
        match &mut *self.answer.lock() {
            Slot::Empty(waker) => match waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            },
            slot @ Slot::Done(_) => {
                if let Slot::Done(result) = std::mem::replace(slot, Slot::Over) {
                    return Poll::Ready(result);
                }
            }
            Slot::Over => panic!("polled after it was ready"),
        }
        if let Some(unsent) = &mut self.unsent {
            match unsent.send(context) {
                Sent::Yes => self.unsent = None,
                Sent::Full => {}
                Sent::Closed => {
                    *self.answer.lock() = Slot::Over;
                    self.unsent = None;
                    return Poll::Ready(Err(StoreError::Stopped));
                }
            }
        }
        Poll::Pending
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if self.mark.is_forked() {
            // The job, and the memory that it would free, belong to the parent.
            std::mem::forget(self.unsent.take());
            std::mem::forget(Arc::clone(&self.answer));
            return;
        }
        let slot = std::mem::replace(&mut *self.answer.lock(), Slot::Over);
        // Outside the lock: dropping the result and the waker runs code of other modules.
        if let Slot::Done(result) = slot {
            self.answer.unclaimed(result);
        }
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("sent", &self.unsent.is_none()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Polls once; returns the result and how often the task has been woken.
    fn poll<T>(future: &mut Pending<T>, count: &Arc<Count>) -> Poll<Result<T, StoreError>> {
        let waker = Waker::from(Arc::clone(count));
        Pin::new(future).poll(&mut Context::from_waker(&waker))
    }

    fn pending(queue: &Arc<Queue<Reply<u32>>>) -> Pending<u32> {
        Pending::new(queue, |reply| reply)
    }

    #[test]
    fn an_answer_wakes_its_task_and_no_other() {
        let queue = Arc::new(Queue::new(4));
        let (mut one, mut two) = (pending(&queue), pending(&queue));
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        assert!(poll(&mut one, &counts[0]).is_pending() && poll(&mut two, &counts[1]).is_pending());
        let mut jobs = queue.take().unwrap();
        jobs.pop_front().unwrap().send(Ok(7));
        assert_eq!(counts.each_ref().map(|count| count.0.load(Ordering::Relaxed)), [1, 0]);
        assert!(matches!(poll(&mut one, &counts[0]), Poll::Ready(Ok(7))));
        // Dropping a reply reports a result, too.
        drop(jobs);
        assert!(matches!(poll(&mut two, &counts[1]), Poll::Ready(Err(StoreError::Stopped))));
    }

    #[test]
    fn a_full_queue_makes_tasks_wait_and_wakes_them_when_there_is_room() {
        let queue = Arc::new(Queue::new(1));
        let (mut one, mut two, mut three) = (pending(&queue), pending(&queue), pending(&queue));
        let count = Arc::new(Count::default());
        for _ in 0..3 {
            assert!(poll(&mut one, &count).is_pending());
            assert!(poll(&mut two, &count).is_pending());
            assert!(poll(&mut three, &count).is_pending());
        }
        assert_eq!(queue.lock().waiting.len(), 2, "each waits once, however often it is polled");
        drop(three);
        assert_eq!(queue.lock().waiting.len(), 1, "a dropped future does not wait any more");
        let jobs = queue.take().unwrap();
        assert_eq!((jobs.len(), count.0.load(Ordering::Relaxed)), (1, 1));
        assert!(poll(&mut two, &count).is_pending());
        assert_eq!(queue.take().unwrap().len(), 1);
    }

    #[test]
    fn a_dropped_future_wants_no_result_and_one_that_was_never_polled_was_never_sent() {
        let queue = Arc::new(Queue::new(4));
        drop(pending(&queue));
        assert!(queue.lock().jobs.is_empty());
        let count = Arc::new(Count::default());
        let mut future = pending(&queue);
        assert!(poll(&mut future, &count).is_pending());
        let job = queue.take().unwrap().pop_front().unwrap();
        assert!(job.is_wanted());
        drop(future);
        assert!(!job.is_wanted());
        job.send(Ok(1));
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_value_that_no_future_took_is_given_back_and_one_that_was_taken_is_not() {
        let queue = Arc::new(Queue::new(8));
        let (back, given) = std::sync::mpsc::channel();
        let answered = |polled_again: bool, dropped_first: bool, result| {
            let back = back.clone();
            let count = Arc::new(Count::default());
            let mut future = Pending::or_back(&queue, move |value| back.send(value).unwrap(), |reply| reply);
            assert!(poll(&mut future, &count).is_pending());
            let reply = queue.take().unwrap().pop_front().unwrap();
            if dropped_first {
                drop(future);
                return reply.send(result);
            }
            reply.send(result);
            assert!(!polled_again || poll(&mut future, &count).is_ready());
        };
        answered(true, false, Ok(1));
        answered(false, false, Ok(2));
        answered(false, true, Ok(3));
        answered(false, true, Err(StoreError::Stopped));
        answered(false, false, Err(StoreError::Stopped));
        assert_eq!(given.try_iter().collect::<Vec<u32>>(), [2, 3]);
    }

    #[test]
    fn a_job_that_frees_memory_needs_no_room() {
        let queue = Arc::new(Queue::new(1));
        queue.send_anyway(1);
        queue.send_anyway(2);
        assert_eq!(queue.take().unwrap(), [1, 2]);
        queue.close();
        queue.send_anyway(3);
        assert!(queue.take().is_none());
    }

    #[test]
    fn a_closed_queue_takes_nothing_more_and_ends_when_it_is_empty() {
        let queue = Arc::new(Queue::new(1));
        let count = Arc::new(Count::default());
        let (mut early, mut waiting, mut late) = (pending(&queue), pending(&queue), pending(&queue));
        assert!(poll(&mut early, &count).is_pending() && poll(&mut waiting, &count).is_pending());
        queue.close();
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "a task that waits for room is woken");
        assert!(matches!(poll(&mut waiting, &count), Poll::Ready(Err(StoreError::Stopped))));
        assert!(matches!(poll(&mut late, &count), Poll::Ready(Err(StoreError::Stopped))));
        queue.take().unwrap().pop_front().unwrap().send(Ok(3));
        assert!(queue.take().is_none());
        assert!(matches!(poll(&mut early, &count), Poll::Ready(Ok(3))));
        let mut lost = pending(&queue);
        queue.lock().closed = false;
        assert!(poll(&mut lost, &count).is_pending());
        queue.abandon();
        assert!(matches!(poll(&mut lost, &count), Poll::Ready(Err(StoreError::Stopped))));
    }
}
