//! What another fabric of one host needs to grant memory as [`ShmTransport`](crate::ShmTransport) does:
//! sockets that carry file descriptors, the ledger between two processes, mappings of a peer's memory files,
//! the end of a process, and the names that exports contain.
//!
//! ```
//! use te_host::control::{boot_id, socket_name};
//!
//! assert_eq!(boot_id()?, boot_id()?);
//! assert!(socket_name(&[0xA5; 16]).ends_with(b"a5a5a5a5"));
//! # Ok::<(), std::io::Error>(())
//! ```

pub use crate::shm::{boot_id, socket_name};
pub use crate::sys::{Ledger, Mapping, Process, SeqSocket};
