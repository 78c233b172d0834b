//! Waiting for a store that is just being started: a master or a local server that nobody listens at yet, a first node.

use std::fmt::Display;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use store_client::local::LocalError;
use store_client::{ClientConfig, ConnectError, RpcConnection, RpcError};

use crate::exit::Failure;

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
        mut attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut turns = Turns::new(self.wait.0.min(LISTEN_MAX));
        loop {
            match attempt() {
                Err(error) if error.nobody_listens() && turns.next(&what) => {}
                other => return other,
            }
        }
    }

    /// Calls `put` again when it said that no node lends memory, as soon as `has_node` says that one does: the master counts
    /// puts that fail.
    pub(crate) fn for_node<C, T, E>(
        self,
        client: &mut C,
        mut put: impl FnMut(&mut C) -> Result<T, E>,
        no_node: impl Fn(&E) -> bool,
        mut has_node: impl FnMut(&mut C) -> bool,
    ) -> Result<T, E> {
        let mut turns = Turns::new(self.wait.0);
        loop {
            let error = match put(client) {
                Err(error) if no_node(&error) => error,
                other => return other,
            };
            while turns.next("a first node: none lends memory yet") {
                if has_node(client) {
                    break;
                }
            }
            if turns.is_over() {
                return Err(error);
            }
        }
    }
}

/// A wait that is said once, when it is long enough to be noticed.
struct Turns {
    limit: Duration,
    started: Instant,
    said: bool,
}

impl Turns {
    fn new(limit: Duration) -> Self {
        Self { limit, started: Instant::now(), said: false }
    }

    fn is_over(&self) -> bool {
        self.started.elapsed() >= self.limit
    }

    /// Sleeps for a turn; false when there is none left.
    fn next(&mut self, what: impl Display) -> bool {
        let elapsed = self.started.elapsed();
        let left = self.limit.saturating_sub(elapsed);
        if left.is_zero() {
            return false;
        }
        if !self.said && elapsed >= SILENT.min(self.limit / 2) {
            self.said = true;
            eprintln!("snowskin: waiting up to {} s for {what} (--wait)", self.limit.as_secs_f64());
        }
        std::thread::sleep(PAUSE.min(left));
        true
    }
}

/// Waits for a master that nobody listens at yet, until it is there or we are told to end; for servers, which are started in any order.
///
/// # Errors
/// Any other reason that it cannot be asked, and a silent end.
pub(crate) fn wait_for_master(config: &ClientConfig) -> anyhow::Result<()> {
    let mut warned: Option<Instant> = None;
    loop {
        let (master, identity) = (config.master.clone(), config.identity.clone());
        match RpcConnection::connect_as(master, config.rpc, identity) {
            Ok(_) => return Ok(()),
            Err(error) if error.nobody_listens() => {}
            Err(error) => return Err(super::no_master(error)),
        }
        if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            warned = Some(Instant::now());
            tracing::warn!("nobody listens at the master's address {} yet: waiting for it", config.master);
        }
        if let Some(exit) = crate::sys::wait_for_interrupt(Some(PAUSE)) {
            return Err(Failure::silent(exit).into());
        }
    }
}

/// How often a server that waits for its master says so.
const WARN_EVERY: Duration = Duration::from_secs(10);

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
