//! `--local`: by way of the node on this machine, without an engine here.

use std::path::PathBuf;

use store_client::local::{LocalConfig, LocalError, default_path};
use store_client::{Address, LocalClient};
use store_core::ErrorCode;

use crate::exit::{Exit, Failure};

/// Enough for most values; pages that are not used cost nothing.
pub(crate) const ARENA_BYTES: u64 = 256 << 20;

/// Whether to ask the node on this machine, and where.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LocalArg {
    /// Ask the node on this machine, which moves the bytes: the path of its local socket, or `auto` for that of a node of
    /// yours that uses the same master.
    #[arg(long, env = "SNOWSKIN_LOCAL", value_name = "PATH|auto")]
    local: Option<PathBuf>,
}

impl LocalArg {
    /// A client with an arena of this size, if that is the way.
    ///
    /// # Errors
    /// Nobody there, or one that refuses.
    pub(crate) fn connect(&self, master: &Address, arena_bytes: u64) -> anyhow::Result<Option<LocalClient>> {
        let Some(path) = &self.local else { return Ok(None) };
        let path = if path.as_os_str() == "auto" { default_path(master) } else { path.clone() };
        let config = LocalConfig { arena_bytes, ..LocalConfig::new(path) };
        LocalClient::connect(config).map(Some).map_err(|error| failure("", &error).into())
    }
}

/// What a local client could not do with `key`.
pub(crate) fn failure(key: &str, error: &LocalError) -> Failure {
    let exit = match error.code() {
        ErrorCode::ObjectNotFound | ErrorCode::KeyNotFound => Exit::NotFound,
        ErrorCode::ChecksumMismatch => Exit::Verification,
        _ => Exit::Failed,
    };
    let of = if key.is_empty() { String::new() } else { format!("{}: ", crate::output::printable(key)) };
    Failure::new(exit, format!("{of}{error}"))
}
