//! Copying, moving, draining: a master, and nodes that do what it says, or do not.
#![allow(clippy::unwrap_used, reason = "tests")]

mod copies;
mod drains;
mod hot;
mod history;
mod store;
