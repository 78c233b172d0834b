//! What the tests of fabrics share: memory at a fixed address, transports with one region each, a clock that
//! can be moved, pairs for the conformance suite, child processes, and waiting for an event.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod block;
mod ends;
mod export;
mod node;
mod process;
mod wait;

pub use block::{Block, pattern};
pub use ends::{Ends, EndsConfig, EndsMemory, Fabric};
pub use export::export;
pub use node::{
    ALL, Node, PATIENCE, REGION, REMOTE, drive, finish, kind, linger, now, read, skip, slice, write,
};
pub use process::{Complaint, Process, bytes_of, fork_and, hex, in_a_child};
pub use wait::eventually;
