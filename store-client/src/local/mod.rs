//! The light way in: a process asks the node on its machine, over a Unix socket and shared memory.
//!
//! ```text
//!   a program                                        a process with an engine: `snowskin node`, or yours
//!   ┌───────────────────┐   requests: keys, ranges   ┌──────────────────────────┐
//!   │ LocalClient       │ ─────── Unix socket ─────► │ LocalServer              │
//!   │   no engine       │ ◄────── answers ────────── │   workers, each a Client │ ◄──► the master
//!   │   no fabric       │                            │            │             │
//!   │   no thread       │        ┌─────────┐         │            ▼             │
//!   │ LocalBuffer ══════╪═══════►│  arena  │◄════════╪═══ te-engine ════════════╪══► the bytes, copied once
//!   └───────────────────┘        └─────────┘         └──────────────────────────┘
//!                          a memory file, sealed, mapped by both
//! ```
//!
//! * **Copied once.** The arena is registered with the worker's engine, which moves bytes between it and the nodes' memory
//!   without stopping anywhere. `put` and `get` of plain bytes copy once more, between the caller's memory and the arena.
//! * **Verified once.** The worker's [`Client`](crate::Client) checks checksum and lease before it answers, as for its own caller.
//! * **What a client can reach** is its own arena: a request names ranges of it, and nothing else. A client that changes its
//!   arena while a put reads it stores an object whose checksum does not fit, which every reader takes for a miss: it
//!   harms itself. The file is sealed, so neither side can make the other fault by cutting it.
//! * **Who may come in**: whoever the socket's mode lets in (`0600` unless configured), and of those the node's own user, root,
//!   and users that were allowed by number; the kernel says who it is. The client in turn talks to its own user, root, or
//!   users that it was told to trust.
//! * **When a client dies**, its operation runs to its end, which the store's own timeouts bound; then its arena is
//!   unregistered, and the memory is unmapped only after the engine has said that nothing touches it (law L2).
//! * **When a node dies**, or does not answer in time, the client's arena is given up: what it was reading into stays held,
//!   so that a late write of a node that lives after all lands in memory that nobody uses.
//!
//! A worker serves one request at a time, and each client belongs to one worker: an operation that waits for a dead node
//! delays the other clients of its worker. More workers cost an engine each.

mod arena;
mod client;
mod connection;
mod error;
mod protocol;
mod server;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
mod worker;

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;

pub use arena::{LocalBuffer, LocalRange};
pub use client::{LocalClient, LocalConfig};
pub use error::{LocalError, LocalStartError};
pub use protocol::Refusal;
pub use server::{LocalServer, LocalServerConfig, LocalStats};

use crate::rpc::Address;

/// Where the node of this user that uses this master listens, unless it was told otherwise: in `$XDG_RUNTIME_DIR/snowskin`,
/// or in `/tmp/snowskin-UID`, under the master's address. So clients of one cluster do not meet the node of another.
#[must_use]
pub fn default_path(master: &Address) -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let dir = match runtime {
        Some(dir) => PathBuf::from(dir).join("snowskin"),
        None => std::env::temp_dir().join(format!("snowskin-{}", te_host::own_uid())),
    };
    let name: String =
        master.to_string().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    // A socket's path has 107 bytes; the end of a long address is what tells it from others.
    let from = name.len().saturating_sub(48);
    dir.join(format!("{}.sock", &name[from..]))
}

/// As [`default_path`], and makes its directory, for this user alone.
///
/// # Errors
/// It cannot be made, or is somebody else's, or open to others.
pub fn make_default_path(master: &Address) -> io::Result<PathBuf> {
    let path = default_path(master);
    let Some(dir) = path.parent() else { return Ok(path) };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Somebody else may have been there first: in a directory for all, anybody can make any name.
    let meta = std::fs::symlink_metadata(dir)?;
    if !meta.is_dir() || meta.uid() != te_host::own_uid() || meta.mode() & 0o077 != 0 {
        let text =
            format!("{} must be a directory of this user's, closed to others (mode 0700)", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(path)
}

/// What a peer sends, for `fuzz/`. Only with `--cfg fuzzing`.
#[cfg(fuzzing)]
pub mod fuzzing {
    /// The body of a request, and of an answer.
    ///
    /// # Panics
    /// When what was understood does not come back the same.
    pub fn message(bytes: &[u8]) {
        super::protocol::round_trip(bytes);
    }
}
