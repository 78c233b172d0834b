//! The only unsafe code of this crate: raw memory and vectored socket I/O. Its interface is safe, provided
//! that the promise which [`Pinned::new`] requires is kept.
#![allow(unsafe_code, reason = "system calls and raw memory live here and nowhere else in the crate")]

mod mem;
mod register;
mod socket;

pub(crate) use mem::Pinned;
pub(crate) use socket::{Buffers, IOV_MAX, Incoming, Outgoing, Socket};
