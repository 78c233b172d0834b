//! Waiting for a store that is being started: for a master or a local server to listen, and for a first node.

use std::fmt::Display;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use store_client::local::LocalError;
use store_client::{ClientConfig, ConnectError, RpcConnection, RpcError};

use crate::exit::Failure;

/// How long a command waits for a store that is being started.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct WaitArg {
    /// How long to wait for a store that is being started, seconds: this long for its first node, and at most
    /// 2 s for a master or local server that does not listen yet; 0: fail at once.
    #[arg(long, env = "SNOWSKIN_WAIT", hide_env_values = true, default_value = "10", value_name = "S", value_parser = seconds)]
    wait: Seconds,
}

#[derive(Clone, Copy, Debug)]
struct Seconds(Duration);

/// A server that is being started listens within this time.
const LISTEN_MAX: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// A shorter wait is not reported.
const SILENT: Duration = Duration::from_millis(300);

impl WaitArg {
    /// Calls `attempt` until it succeeds, or fails for another reason than a server that does not listen yet.
    pub(crate) fn for_listener<T, E: NotListening>(
        self,
        what: impl Display,
        mut attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut turns = Turns::new(self.wait.0.min(LISTEN_MAX));
        loop {
            match attempt() {
                Err(error) if error.is_not_listening() && turns.next(&what) => {}
                other => return other,
            }
        }
    }

    /// When `put` fails because no node lends memory, waits until `has_node` is true and calls it again.
    /// `has_node` is polled instead of `put`, because the master counts puts that fail.
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
            while turns.next("a first node: no node lends memory yet") {
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

/// A wait, which is reported once when it is long enough to be noticed.
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

    /// Sleeps until the next attempt; false when the time is over.
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

/// Waits until a master listens, or a signal ends the wait; for servers, which may be started in any order.
///
/// # Errors
/// Any other reason that the master cannot be reached; a silent failure when a signal came.
pub(crate) fn wait_for_master(config: &ClientConfig) -> anyhow::Result<()> {
    let mut warned: Option<Instant> = None;
    loop {
        let (master, identity) = (config.master.clone(), config.identity.clone());
        match RpcConnection::connect_as(master, config.rpc, identity) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_not_listening() => {}
            Err(error) => return Err(super::no_master(error)),
        }
        if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            warned = Some(Instant::now());
            tracing::warn!("no master listens at {} yet: waiting for it", config.master);
        }
        if let Some(exit) = crate::sys::wait_for_interrupt(Some(PAUSE)) {
            return Err(Failure::silent(exit).into());
        }
    }
}

/// How often a server that waits for its master logs that.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Whether an error means that no server listens at an address, as is the case while one is being started.
pub(crate) trait NotListening {
    /// See the trait.
    fn is_not_listening(&self) -> bool;
}

impl NotListening for std::io::Error {
    fn is_not_listening(&self) -> bool {
        matches!(self.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
    }
}

impl NotListening for RpcError {
    fn is_not_listening(&self) -> bool {
        // The file of a socket may appear soon; a host name that does not resolve will not.
        matches!(self, Self::Connect { source, address }
            if source.is_not_listening() && (source.kind() == ErrorKind::ConnectionRefused || address.starts_with("unix:")))
    }
}

impl NotListening for ConnectError {
    fn is_not_listening(&self) -> bool {
        matches!(self, Self::Rpc(error) if error.is_not_listening())
    }
}

impl NotListening for LocalError {
    fn is_not_listening(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if source.is_not_listening())
    }
}

fn seconds(text: &str) -> Result<Seconds, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    let wrong = || format!("`{text}` is not a number of seconds from 0 to 86400");
    seconds.map(|seconds| Seconds(Duration::from_secs_f64(seconds))).ok_or_else(wrong)
}
