//! Access through the node on this machine, over a Unix socket and shared memory: no engine, no fabric, no
//! thread.
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
//! * **Copied once.** The arena is registered with the worker's engine, which moves bytes between it and the
//!   nodes' memory directly. `put` and `get` of plain memory copy once more, between the caller's memory and
//!   the arena.
//! * **Verified once.** The worker's [`Client`](crate::Client) verifies checksum and lease before it answers.
//! * **A client can reach** its own arena and nothing else: requests name ranges of it. A client that changes
//!   its arena while a put reads it stores an object whose checksum does not match. Every reader treats that
//!   object as a miss, so the client harms only itself. The file is sealed, so that neither side can cause a
//!   fault in the other by shortening it.
//! * **Admission.** The socket's mode (`0600` unless configured) decides who can connect; of these, the node
//!   accepts its own user, root, and the user ids in `allowed_uids`. The kernel reports the peer's user. The
//!   client in turn accepts a node that runs as its own user, as root, or as one of its `trusted_uids`.
//! * **When a client dies**, its operation runs to its end, which the store's own timeouts bound. Then its
//!   arena is unregistered, and the memory is unmapped only after the engine has confirmed that nothing
//!   touches it (law L2).
//! * **When a node dies**, or does not answer in time, the client gives the arena up. Buffers that were being
//!   read into stay held: if the node is alive after all, its late write lands in memory that is not used.
//!
//! A worker serves one request at a time, and each client is assigned to one worker: an operation that waits
//! for a dead node delays the other clients of its worker. Each further worker costs an engine.

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

use std::fmt;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;

pub use arena::{LocalBuffer, LocalRange};
pub use client::{LocalClient, LocalConfig};
pub use error::{LocalError, LocalStartError};
pub use protocol::Refusal;
pub use server::{LocalServer, LocalServerConfig, LocalStats};

/// The default path of a node's socket, for this user and this master: in `$XDG_RUNTIME_DIR/snowskin`, or in
/// `/tmp/snowskin-UID`, named after the master's address. Clients of one cluster therefore do not meet the
/// node of another.
#[must_use]
pub fn default_path(master: &impl fmt::Display) -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let dir = match runtime {
        Some(dir) => PathBuf::from(dir).join("snowskin"),
        None => std::env::temp_dir().join(format!("snowskin-{}", te_host::own_uid())),
    };
    let name: String =
        master.to_string().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    // A socket's path has at most 107 bytes. The end of a long address is the part that distinguishes it.
    let from = name.len().saturating_sub(48);
    dir.join(format!("{}.sock", &name[from..]))
}

/// As [`default_path`], and creates its directory, accessible to this user alone.
///
/// # Errors
/// The directory cannot be created, belongs to another user, or is accessible to others.
pub fn make_default_path(master: &impl fmt::Display) -> io::Result<PathBuf> {
    let path = default_path(master);
    let Some(dir) = path.parent() else { return Ok(path) };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Another user may have created the directory first: in `/tmp` every user can create any name.
    let meta = std::fs::symlink_metadata(dir)?;
    if !meta.is_dir() || meta.uid() != te_host::own_uid() || meta.mode() & 0o077 != 0 {
        let text = format!(
            "{} must be a directory of this user with mode 0700: correct its owner or remove it",
            dir.display()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(path)
}

/// Parsers of the local protocol, for `fuzz/`. Only with `--cfg fuzzing`.
#[cfg(fuzzing)]
pub mod fuzzing {
    /// Parses the body of a request, and of an answer.
    ///
    /// # Panics
    /// When a parsed message does not encode and parse to the same message.
    pub fn message(bytes: &[u8]) {
        super::protocol::round_trip(bytes);
    }
}
