//! How a node that starts waits for a master that is away.

use std::thread;
use std::time::{Duration, Instant};

use crate::config::NodeConfig;
use crate::error::ConnectError;

/// Between two questions whether to give up.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two tries.
const RETRY: Duration = Duration::from_millis(200);
/// How exactly the master's word and our clock agree on when a node was last heard of.
const HEARD_SLACK: Duration = Duration::from_millis(150);
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
    /// Whoever holds the name, and since when it has been silent.
    holder: Option<(String, Instant)>,
}

impl<G: FnMut() -> bool> Waiting<G> {
    pub(super) fn new(config: &NodeConfig, gives_up: G) -> Self {
        let limit = (config.wait_master_ms != NodeConfig::FOR_EVER)
            .then(|| Duration::from_millis(config.wait_master_ms.into()));
        let name = config.name.clone();
        Self { name, began: Instant::now(), limit, said: None, gives_up, holder: None }
    }

    /// Tries until it succeeds, or fails in a way that waiting does not change.
    pub(super) fn until<T>(
        &mut self,
        mut attempt: impl FnMut() -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        loop {
            let next = Instant::now() + RETRY;
            let error = match attempt() {
                Err(error) if error.is_transient() && !self.is_over(next) => error,
                // The master bounds this: it gives the holder up, or hears of it.
                Err(error) if self.may_be_dead(&error) => error,
                ended => return ended,
            };
            self.say(&error);
            while Instant::now() < next {
                if (self.gives_up)() {
                    return Err(error);
                }
                thread::sleep(PAUSE.min(next.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// Whether the holder of the name has not been heard of since it was first met here: one that beats lives, and waiting for it is
    /// in vain.
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

    fn say(&mut self, error: &ConnectError) {
        if self.said.is_some_and(|said| said.elapsed() < LINE) {
            return;
        }
        self.said = Some(Instant::now());
        let limit = match self.limit {
            Some(limit) => format!("for {} ms at most", limit.as_millis()),
            None => "for as long as it takes".to_owned(),
        };
        match error {
            ConnectError::Held { .. } => {
                log::warn!("node {}: waiting to hear of who has its name: {error}", self.name)
            }
            error => log::warn!("node {}: waiting for the master, {limit}: {error}", self.name),
        }
    }
}
