//! [`Record`]: what is remembered of requests: how they ended, and which engines failed them.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use conductor_core::InstanceId;
use hyper::StatusCode;
use tokio::time::Instant;

use crate::traffic::{GatewayTraffic, Outcome};

/// Failures that are remembered; the oldest one makes room.
const FAILURES_MAX: usize = 1_024;
/// How long a failure is remembered: a gateway's retries come sooner.
const FAILURE_KEPT: Duration = Duration::from_secs(60);

/// What the gateway's requests leave behind.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) traffic: GatewayTraffic,
    pub(crate) failures: Failures,
}

/// How a request ended that was refused with this status.
pub(crate) fn refused(status: StatusCode) -> Outcome {
    match status.as_u16() {
        429 => Outcome::Overloaded,
        500.. => Outcome::Unavailable,
        _ => Outcome::Wrong,
    }
}

/// Engines that failed requests lately, by the requests' `x-request-id`. A gateway that sends a request again
/// asks anew, in a stream of its own, under the same one.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// Keyed hashes of ids, the oldest first.
    latest: Mutex<VecDeque<(u64, InstanceId, Instant)>>,
    hasher: RandomState,
}

impl Failures {
    /// The name of a request; `None` without an id.
    pub(crate) fn name(&self, id: &[u8]) -> Option<u64> {
        (!id.is_empty()).then(|| self.hasher.hash_one(id))
    }

    /// An engine failed a request.
    pub(crate) fn note(&self, request: u64, engine: InstanceId, now: Instant) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.len() >= FAILURES_MAX {
            latest.pop_front();
        }
        latest.push_back((request, engine, now));
    }

    /// The engines that failed a request.
    pub(crate) fn of(&self, request: u64, now: Instant) -> Vec<InstanceId> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        while latest.front().is_some_and(|(.., at)| now - *at > FAILURE_KEPT) {
            latest.pop_front();
        }
        latest.iter().filter(|(of, ..)| *of == request).map(|(_, engine, _)| *engine).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn failures_are_remembered_for_a_minute_and_are_bounded() {
        let (failures, now) = (Failures::default(), Instant::now());
        assert_eq!(failures.name(b""), None);
        let [one, two] = [b"one".as_slice(), b"two"].map(|id| failures.name(id).unwrap());
        failures.note(one, InstanceId(7), now);
        failures.note(one, InstanceId(8), now);
        assert_eq!(
            (failures.of(one, now), failures.of(two, now)),
            (vec![InstanceId(7), InstanceId(8)], vec![])
        );
        let later = now + FAILURE_KEPT + Duration::from_secs(1);
        assert_eq!(failures.of(one, later), []);
        (0..5_000).for_each(|at| failures.note(at, InstanceId(1), later));
        assert_eq!(failures.latest.lock().unwrap().len(), FAILURES_MAX);
        assert_eq!((failures.of(4_999, later).len(), failures.of(0, later).len()), (1, 0));
    }
}
