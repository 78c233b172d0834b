//! `--local`: requests through the node on this machine, without an engine in this process.

use std::path::PathBuf;

use store_client::local::{LocalConfig, default_path};
use store_client::{LocalClient, Masters, StoreError};
use store_core::ErrorCode;

use crate::commands::waiting::WaitArg;
use crate::exit::{Exit, Failure};
use crate::size::ByteSize;

/// Enough for most values. Pages that are not used cost nothing.
pub(crate) const ARENA_BYTES: u64 = 256 << 20;

/// Arena size in which one value of this length fits, whatever the allocator's granularity and bin sizes are.
pub(crate) fn arena_for(value_bytes: u64) -> u64 {
    value_bytes.saturating_add(value_bytes / 8).saturating_add(1 << 20).max(ARENA_BYTES)
}

/// Whether to use the node on this machine, and its socket.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LocalArg {
    /// Use the node on this machine, which moves the bytes: the path of its local socket, or `auto` for the
    /// socket of a node of the same user with the same master.
    #[arg(long, env = "SNOWSKIN_LOCAL", hide_env_values = true, value_name = "PATH|auto")]
    local: Option<PathBuf>,
}

impl LocalArg {
    /// Whether `--local` was given.
    pub(crate) fn is_given(&self) -> bool {
        self.local.is_some()
    }

    /// Connects a client with an arena of this size.
    ///
    /// # Errors
    /// No server listens at the socket, or it refuses the client.
    pub(crate) fn connect(
        &self,
        master: &Masters,
        arena_bytes: u64,
        wait: WaitArg,
    ) -> anyhow::Result<LocalClient> {
        let path = match &self.local {
            Some(path) if path.as_os_str() != "auto" => path.clone(),
            _ => default_path(master),
        };
        let what = format!("a local server at {}, which does not listen yet", path.display());
        let mut config = LocalConfig::new(path);
        config.arena_bytes = arena_bytes;
        let connected = wait.for_listener(what, || LocalClient::connect(config.clone()));
        connected.map_err(|error| failure("", &StoreError::from(error)).into())
    }
}

/// The failure of an operation of a local client on `key`.
pub(crate) fn failure(key: &str, error: &StoreError) -> Failure {
    let exit = match error.code() {
        ErrorCode::ObjectNotFound | ErrorCode::KeyNotFound => Exit::NotFound,
        ErrorCode::ChecksumMismatch => Exit::Verification,
        _ => Exit::Failed,
    };
    let of = if key.is_empty() { String::new() } else { format!("{}: ", crate::output::brief(key)) };
    let failure = Failure::new(exit, format!("{of}{error}"));
    match error {
        StoreError::ArenaFull { arena_bytes, .. } => failure.hint(format!(
            "this node gives a local client at most {}: use longer objects without --local",
            ByteSize(*arena_bytes).approximate()
        )),
        _ => failure,
    }
}
