//! How a node that starts waits for a master that is away.

use std::thread;
use std::time::{Duration, Instant};

use crate::config::NodeConfig;
use crate::error::ConnectError;

/// Between two questions whether to give up.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two tries.
const RETRY: Duration = Duration::from_millis(200);
/// Between two lines in the log.
const LINE: Duration = Duration::from_secs(10);

/// The patience of one node.
pub(super) struct Waiting<G> {
    name: String,
    began: Instant,
    /// `None`: for ever.
    limit: Option<Duration>,
    said: Option<Instant>,
    gives_up: G,
}

impl<G: FnMut() -> bool> Waiting<G> {
    pub(super) fn new(config: &NodeConfig, gives_up: G) -> Self {
        let limit = (config.wait_master_ms != NodeConfig::FOR_EVER)
            .then(|| Duration::from_millis(config.wait_master_ms.into()));
        Self { name: config.name.clone(), began: Instant::now(), limit, said: None, gives_up }
    }

    /// Tries until it succeeds, or fails in a way that waiting does not change.
    pub(super) fn until<T>(
        &mut self,
        mut attempt: impl FnMut() -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        loop {
            let error = match attempt() {
                Err(error) if error.is_transient() => error,
                ended => return ended,
            };
            let next = Instant::now() + RETRY;
            if self.is_over(next) {
                return Err(error);
            }
            self.say(&error);
            while Instant::now() < next {
                if (self.gives_up)() {
                    return Err(error);
                }
                thread::sleep(PAUSE.min(next.saturating_duration_since(Instant::now())));
            }
        }
    }

    fn is_over(&self, at: Instant) -> bool {
        self.limit.is_some_and(|limit| at - self.began > limit)
    }

    fn say(&mut self, error: &ConnectError) {
        if self.said.is_some_and(|said| said.elapsed() < LINE) {
            return;
        }
        self.said = Some(Instant::now());
        let limit = match self.limit {
            Some(limit) => format!("for {} ms at most", limit.as_millis()),
            None => "for as long as it takes".to_owned(),
        };
        log::warn!("node {}: waiting for the master, {limit}: {error}", self.name);
    }
}
