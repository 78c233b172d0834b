//! How a node that starts waits for a master that does not answer, or for the release of its name.

use std::thread;
use std::time::{Duration, Instant};

use crate::config::NodeConfig;
use crate::error::ConnectError;

/// Time between two calls of `gives_up`.
const PAUSE: Duration = Duration::from_millis(50);
/// Time between two tries.
const RETRY: Duration = Duration::from_millis(200);
/// Tolerance in the comparison of the master's report and our clock about when a node was last heard from.
const HEARD_SLACK: Duration = Duration::from_millis(150);
/// Shortest time between two log lines.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// The wait of one node.
pub(super) struct Waiting<G> {
    name: String,
    began: Instant,
    /// `None`: no limit.
    limit: Option<Duration>,
    logged: Option<Instant>,
    gives_up: G,
    /// The endpoint of the node that holds the name, and since when it has been silent.
    holder: Option<(String, Instant)>,
}

impl<G: FnMut() -> bool> Waiting<G> {
    pub(super) fn new(config: &NodeConfig, gives_up: G) -> Self {
        let limit = (config.wait_master_ms != NodeConfig::FOR_EVER)
            .then(|| Duration::from_millis(config.wait_master_ms.into()));
        let name = config.name.clone();
        Self { name, began: Instant::now(), limit, logged: None, gives_up, holder: None }
    }

    /// Tries until it succeeds, or fails with an error that waiting does not change.
    pub(super) fn until<T>(
        &mut self,
        mut attempt: impl FnMut() -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        loop {
            let next = Instant::now() + RETRY;
            let error = match attempt() {
                Err(error) if error.is_transient() && !self.is_over(next) => error,
                // The master bounds this wait: it gives the holder up, or receives a heartbeat of it.
                Err(error) if self.may_be_dead(&error) => error,
                ended => return ended,
            };
            self.log(&error);
            while Instant::now() < next {
                if (self.gives_up)() {
                    return Err(error);
                }
                thread::sleep(PAUSE.min(next.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Whether the holder of the name has been silent since it was first met here. A holder that sends
    /// heartbeats is alive, and waiting for it is useless.
    fn may_be_dead(&mut self, error: &ConnectError) -> bool {
        let ConnectError::Held { endpoint, silent_ms, .. } = error else { return false };
        let silent = Duration::from_millis(*silent_ms);
        let since = Instant::now().checked_sub(silent).unwrap_or(self.began);
        match &self.holder {
            Some((holder, known)) if holder == endpoint => since <= *known + HEARD_SLACK,
            _ => {
                self.holder = Some((endpoint.clone(), since));
                true
            }
        }
    }

    fn is_over(&self, at: Instant) -> bool {
        self.limit.is_some_and(|limit| at - self.began > limit)
    }

    fn log(&mut self, error: &ConnectError) {
        if self.logged.is_some_and(|logged| logged.elapsed() < LOG_PAUSE) {
            return;
        }
        self.logged = Some(Instant::now());
        let limit = match self.limit {
            Some(limit) => format!("for {} ms at most", limit.as_millis()),
            None => "without limit".to_owned(),
        };
        match error {
            ConnectError::Held { .. } | ConnectError::Storage { .. } => {
                log::warn!("node {}: waiting until its name is free: {error}", self.name);
            }
            error => log::warn!("node {}: waiting for the master, {limit}: {error}", self.name),
        }
    }
}
