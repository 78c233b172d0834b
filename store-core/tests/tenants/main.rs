//! Tenants: what one of them does is nothing to another.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
mod guarantees;
mod isolation;
mod quotas;
mod sessions;
