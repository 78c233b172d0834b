//! What a proxy counts.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Place;
use super::session::{Attempt, Session, Stop};

/// Requests whose first token was timed that are remembered.
const TIMED_MAX: usize = 4_096;

/// Counters of a proxy since its start.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) requests: AtomicU64,
    pub(crate) done: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) continued: AtomicU64,
    pub(crate) broken: AtomicU64,
    overloaded: AtomicU64,
    unavailable: AtomicU64,
    wrong: AtomicU64,
    added_us: AtomicU64,
    timed: Mutex<Timed>,
}

#[derive(Debug, Default)]
struct Timed {
    next: usize,
    /// Predicted and actual time to the first token.
    pairs: Vec<(Duration, Duration)>,
}

/// Counters at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Requests that came.
    pub requests: u64,
    /// Requests that were answered to their end.
    pub done: u64,
    /// Times that an engine failed a request, which went elsewhere.
    pub retries: u64,
    /// Outputs that were continued by another engine after their first token.
    pub continued: u64,
    /// Streams that ended with an error event.
    pub broken: u64,
    /// Answers 429.
    pub overloaded: u64,
    /// Answers 5xx before a stream began.
    pub unavailable: u64,
    /// Other refusals: the request was wrong.
    pub wrong: u64,
    /// Time that the proxy added until an engine was asked to generate, over all requests, microseconds.
    pub added_us: u64,
    /// Predicted and actual time to the first token of the last requests with streams.
    pub first_tokens: Vec<(Duration, Duration)>,
}

impl Counters {
    pub(crate) fn refused(&self, stop: &Stop) {
        let (Stop::Own { status, .. } | Stop::Engine { status, .. }) = stop;
        let counter = match status.as_u16() {
            429 => &self.overloaded,
            500.. => &self.unavailable,
            _ => &self.wrong,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the time since a request came during which no engine worked for it.
    pub(crate) fn added<P: Place>(&self, session: &Session<P>) {
        let added = session.received.elapsed().saturating_sub(session.with_engines);
        self.added_us.fetch_add(added.as_micros() as u64, Ordering::Relaxed);
    }

    pub(crate) fn first_token<P: Place>(&self, attempt: &Attempt<P>) {
        let pair = (attempt.placed.ttft, attempt.decided.elapsed());
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        let at = timed.next;
        timed.next = (at + 1) % TIMED_MAX;
        match timed.pairs.get_mut(at) {
            Some(place) => *place = pair,
            None => timed.pairs.push(pair),
        }
    }

    pub(crate) fn figures(&self) -> Figures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Figures {
            requests: read(&self.requests),
            done: read(&self.done),
            retries: read(&self.retries),
            continued: read(&self.continued),
            broken: read(&self.broken),
            overloaded: read(&self.overloaded),
            unavailable: read(&self.unavailable),
            wrong: read(&self.wrong),
            added_us: read(&self.added_us),
            first_tokens: self.timed.lock().unwrap_or_else(PoisonError::into_inner).pairs.clone(),
        }
    }
}
