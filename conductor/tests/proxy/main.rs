//! The proxy in front of mock engines: what clients get, also when engines die.

mod common;
mod deaths;
mod hostile;
mod requests;
