//! Tenants: nothing that one of them does affects another.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
mod guarantees;
mod isolation;
mod quotas;
mod sessions;
