//! All unsafe code of this crate but the trait's own `register`, behind types that are safe to use.
//!
//! It relies on two contracts. A mapping of a pool lives as long as its [`Map`], every access checks its
//! range, and an access that the memory fails (SIGBUS) ends in a [`Fault`](crate::lines::Fault): the copy
//! routines are the only code that touches it. Memory that callers registered stays mapped until
//! `deregister` has returned `Ok`, and the transport uses it only while a slice pins its region.
#![allow(unsafe_code, reason = "mappings, copies and a signal handler; the contracts are in this header")]

mod copy;
mod local;
mod map;
mod native;
#[cfg(target_arch = "x86_64")]
mod reports;
#[cfg(target_arch = "x86_64")]
mod signal;

pub use local::Local;
pub(crate) use local::Pinned;
pub(crate) use map::{Access, Map, Opened};
pub(crate) use native::{NativeLines, can_flush};
