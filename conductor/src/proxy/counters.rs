//! What a proxy counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;

use super::Place;
use super::session::{Attempt, Session, Stop};

/// Requests whose first token was timed that are remembered.
const TIMED_MAX: usize = 4_096;
/// Upper bounds of the histogram of times to the first token, seconds.
const TTFT_BUCKETS: [f64; 14] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0];

/// Counters of a proxy since its start.
#[derive(Debug)]
pub struct Counters {
    pub(crate) requests: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) done: AtomicU64,
    pub(crate) left: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) continued: AtomicU64,
    pub(crate) broken: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) output_tokens: AtomicU64,
    /// From the arrival of a request to the first token of its stream, seconds.
    pub(crate) ttft: Histogram,
    overloaded: AtomicU64,
    unavailable: AtomicU64,
    wrong: AtomicU64,
    added_us: AtomicU64,
    timed: Mutex<Timed>,
}

impl Default for Counters {
    fn default() -> Self {
        let zero = AtomicU64::default;
        Self {
            requests: zero(),
            in_flight: zero(),
            done: zero(),
            left: zero(),
            retries: zero(),
            continued: zero(),
            broken: zero(),
            prompt_tokens: zero(),
            output_tokens: zero(),
            ttft: Histogram::new(TTFT_BUCKETS),
            overloaded: zero(),
            unavailable: zero(),
            wrong: zero(),
            added_us: zero(),
            timed: Mutex::default(),
        }
    }
}

/// A request that the proxy answers. One that is dropped before its outcome was counted was left by its
/// client.
#[derive(Debug)]
pub(crate) struct Ticket {
    counters: Arc<Counters>,
    is_settled: bool,
}

impl Ticket {
    /// A request came.
    pub(crate) fn new(counters: &Arc<Counters>) -> Self {
        Counters::add(&counters.requests, 1);
        Counters::add(&counters.in_flight, 1);
        Self { counters: Arc::clone(counters), is_settled: false }
    }

    /// Its outcome was counted.
    pub(crate) fn settle(mut self) {
        self.is_settled = true;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.counters.in_flight.fetch_sub(1, Ordering::Relaxed);
        Counters::add(&self.counters.left, u64::from(!self.is_settled));
    }
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
    /// Requests that are being answered.
    pub in_flight: u64,
    /// Requests that were answered to their end.
    pub done: u64,
    /// Requests whose client left before that.
    pub left: u64,
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
    /// Tokens of the prompts whose tokens are known.
    pub prompt_tokens: u64,
    /// Tokens of the outputs, as far as engines tell how many there are.
    pub output_tokens: u64,
    /// Time that the proxy added until an engine was asked to generate, over all requests, microseconds.
    pub added_us: u64,
    /// Predicted and actual time to the first token of the last requests with streams.
    pub first_tokens: Vec<(Duration, Duration)>,
}

impl Counters {
    /// Adds to a count.
    pub(crate) fn add(count: &AtomicU64, more: u64) {
        count.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn refused(&self, stop: &Stop) {
        let (Stop::Own { status, .. } | Stop::Engine { status, .. }) = stop;
        let counter = match status.as_u16() {
            429 => &self.overloaded,
            500.. => &self.unavailable,
            _ => &self.wrong,
        };
        Self::add(counter, 1);
    }

    /// Counts the time since a request came during which no engine worked for it.
    pub(crate) fn added<P: Place>(&self, session: &Session<P>) {
        let added = session.received.elapsed().saturating_sub(session.with_engines);
        Self::add(&self.added_us, added.as_micros() as u64);
    }

    pub(crate) fn first_token<P: Place>(&self, session: &Session<P>, attempt: &Attempt<P>) {
        self.ttft.observe(session.began.elapsed().as_secs_f64());
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
            in_flight: read(&self.in_flight),
            done: read(&self.done),
            left: read(&self.left),
            retries: read(&self.retries),
            continued: read(&self.continued),
            broken: read(&self.broken),
            overloaded: read(&self.overloaded),
            unavailable: read(&self.unavailable),
            wrong: read(&self.wrong),
            prompt_tokens: read(&self.prompt_tokens),
            output_tokens: read(&self.output_tokens),
            added_us: read(&self.added_us),
            first_tokens: self.timed.lock().unwrap_or_else(PoisonError::into_inner).pairs.clone(),
        }
    }
}
