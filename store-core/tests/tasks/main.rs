//! Copying, moving, draining: a master, and nodes that carry out its tasks, or fail to.
#![allow(clippy::unwrap_used, reason = "tests")]

mod copies;
mod drains;
mod history;
mod hot;
mod store;
