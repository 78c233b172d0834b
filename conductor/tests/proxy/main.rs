//! The proxy in front of mock engines: what clients get, also when engines die.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
mod deaths;
mod events;
mod hostile;
mod requests;
mod whole;
