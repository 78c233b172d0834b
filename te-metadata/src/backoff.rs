//! [`Guard`]: requests to one server, which is not asked for a while after it did not answer.

use std::string::String;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::MetadataError;

/// Backoff after a server did not answer: at first, and at most.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Why a request to a server failed. The fields are described at [`MetadataError`].
#[derive(Debug)]
pub(crate) enum Fault {
    Unreachable(String),
    Refused(String),
    Garbage(&'static str),
}

/// The server's name in errors, and its backoff.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Kind and address, without passwords.
    pub(crate) server: String,
    backoff: Mutex<Backoff>,
}

/// The backoff after the server did not answer.
#[derive(Debug, Default)]
struct Backoff {
    /// Length of the last backoff.
    pause: Duration,
    /// When it ends, and the error of requests until then.
    until: Option<(Instant, MetadataError)>,
}

impl Guard {
    pub(crate) fn new(server: String) -> Self {
        Self { server, backoff: Mutex::default() }
    }

    /// Makes a request about `key`, unless the server is in backoff.
    pub(crate) fn request<T>(
        &self,
        key: &str,
        request: impl FnOnce() -> Result<T, Fault>,
    ) -> Result<T, MetadataError> {
        if let Some((until, error)) = &self.backoff().until
            && Instant::now() < *until
        {
            return Err(error.clone());
        }
        let answer = request();
        let server = self.server.clone();
        let mut backoff = self.backoff();
        let error = match answer {
            Err(Fault::Unreachable(reason)) => MetadataError::Unreachable { server, reason },
            answered => {
                *backoff = Backoff::default();
                return answered.map_err(|fault| match fault {
                    Fault::Garbage(what) => MetadataError::Garbage { server, key: key.into(), what },
                    Fault::Refused(reason) | Fault::Unreachable(reason) => {
                        MetadataError::Refused { server, reason }
                    }
                });
            }
        };
        backoff.pause = (backoff.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        backoff.until = Some((Instant::now() + backoff.pause, error.clone()));
        Err(error)
    }

    fn backoff(&self) -> MutexGuard<'_, Backoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_server_that_does_not_answer_is_not_asked_during_a_backoff() {
        let guard = Guard::new("memory".into());
        let (requests, gone) = (Cell::new(0), Cell::new(true));
        let ask = || {
            guard.request("node-7", || {
                requests.set(requests.get() + 1);
                if gone.get() { Err(Fault::Unreachable("gone".into())) } else { Ok(7) }
            })
        };
        let first = ask().unwrap_err();
        assert_eq!(
            std::string::ToString::to_string(&first),
            "memory does not answer (gone): check that it runs and that the address is right"
        );
        // A long backoff, so that the test does not depend on the clock.
        guard.backoff().until.as_mut().unwrap().0 = Instant::now() + Duration::from_secs(3600);
        for _ in 0..100 {
            assert_eq!(ask(), Err(first.clone()));
        }
        assert_eq!(requests.get(), 1);
        // The backoff grows, up to its limit, and the first answer ends it.
        for _ in 0..8 {
            guard.backoff().until.as_mut().unwrap().0 = Instant::now();
            ask().unwrap_err();
        }
        assert_eq!((guard.backoff().pause, requests.get()), (PAUSE_MAX, 9));
        gone.set(false);
        guard.backoff().until.as_mut().unwrap().0 = Instant::now();
        assert_eq!(ask(), Ok(7));
        assert_eq!(guard.backoff().pause, Duration::ZERO);
    }
}
