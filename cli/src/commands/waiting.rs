//! Waiting for a store that is just being started: a master or a local server that nobody listens at yet, a first node.

use std::fmt::Display;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use store_client::local::LocalError;
use store_client::{ConnectError, RpcError};

/// How long a command waits for a store that is being started.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct WaitArg {
    /// How long to wait for a store that is only just starting, seconds: this long for its first node, and 2 s of it at most for a
    /// master or local server that is not there yet; 0: fail at once.
    #[arg(long, env = "SNOWSKIN_WAIT", hide_env_values = true, default_value = "10", value_name = "S", value_parser = seconds)]
    wait: Seconds,
}

#[derive(Clone, Copy, Debug)]
struct Seconds(Duration);

/// A server that is starting listens within this time; one that does not is not starting.
const LISTEN_MAX: Duration = Duration::from_secs(2);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// A wait that is shorter is not worth a word.
const SILENT: Duration = Duration::from_millis(300);

impl WaitArg {
    /// Calls `attempt` until it succeeds or fails for another reason than that nobody listens yet.
    pub(crate) fn for_listener<T, E: NobodyListens>(
        self,
        what: impl Display,
        attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        self.retry(self.wait.0.min(LISTEN_MAX), what, attempt, |error, _| error.nobody_listens())
    }

    /// Calls `attempt` as long as `worth` says of its error that it may pass.
    pub(crate) fn for_node<T, E>(
        self,
        attempt: impl FnMut() -> Result<T, E>,
        worth: impl FnMut(&E, Duration) -> bool,
    ) -> Result<T, E> {
        self.retry(self.wait.0, "a first node: none lends memory yet", attempt, worth)
    }

    /// `worth` is told the error and the time that is left.
    fn retry<T, E>(
        self,
        limit: Duration,
        what: impl Display,
        mut attempt: impl FnMut() -> Result<T, E>,
        mut worth: impl FnMut(&E, Duration) -> bool,
    ) -> Result<T, E> {
        let started = Instant::now();
        let mut said = false;
        loop {
            let error = match attempt() {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let left = limit.saturating_sub(started.elapsed());
            if left.is_zero() || !worth(&error, left) {
                return Err(error);
            }
            if !said && started.elapsed() >= SILENT.min(limit) {
                said = true;
                eprintln!("snowskin: waiting up to {} s for {what} (--wait)", limit.as_secs_f64());
            }
            std::thread::sleep(PAUSE.min(left));
        }
    }
}

/// Whether an error says that nobody listens there, which passes when somebody is only just starting.
pub(crate) trait NobodyListens {
    /// See the trait.
    fn nobody_listens(&self) -> bool;
}

impl NobodyListens for std::io::Error {
    fn nobody_listens(&self) -> bool {
        matches!(self.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
    }
}

impl NobodyListens for RpcError {
    fn nobody_listens(&self) -> bool {
        // A socket's file that is not there yet may come; a host's name will not.
        matches!(self, Self::Connect { source, address }
            if source.nobody_listens() && (source.kind() == ErrorKind::ConnectionRefused || address.starts_with("unix:")))
    }
}

impl NobodyListens for ConnectError {
    fn nobody_listens(&self) -> bool {
        matches!(self, Self::Rpc(error) if error.nobody_listens())
    }
}

impl NobodyListens for LocalError {
    fn nobody_listens(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.nobody_listens())
    }
}

fn seconds(text: &str) -> Result<Seconds, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    let wrong = || format!("`{text}` is no number of seconds: choose 0 to 86400");
    seconds.map(|seconds| Seconds(Duration::from_secs_f64(seconds))).ok_or_else(wrong)
}
