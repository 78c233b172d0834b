//! The only unsafe code of this crate: raw memory, vectored socket I/O, io_uring. Its interface is safe,
//! provided that the promise which [`Pinned::new`] requires is kept.
#![allow(unsafe_code, reason = "system calls and raw memory live here and nowhere else in the crate")]

mod mem;
mod poller;
#[cfg(feature = "uring")]
mod ring;
mod slots;
mod socket;

pub(crate) use mem::{Memory, Pinned, Reach};
pub(crate) use poller::Poller;
#[cfg(feature = "uring")]
pub(crate) use ring::{JOBS_MAX, Ring};
pub(crate) use slots::Slots;
pub(crate) use socket::{AsIncoming, Buffers, IOV_MAX, Incoming, Job, Outgoing, Socket};
