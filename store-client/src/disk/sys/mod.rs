//! System calls and raw memory of the disk driver: all of its unsafe code.
//!
//! Two contracts carry it. Memory that a caller has lent ([`Lent`]) is mapped until its owner is dropped, and
//! an operation holds a share of that owner until the kernel has ended it. Buffers of the driver belong to
//! the operation that uses them.
#![allow(unsafe_code, reason = "system calls and raw memory; the contracts are in this module's header")]

mod buffer;
mod event;
mod file;
mod lent;
#[cfg(all(feature = "uring", target_os = "linux"))]
mod ring;
mod transfer;

pub use buffer::AlignedBuffer;
pub(super) use event::EventFd;
#[cfg(feature = "s3")]
pub(super) use file::memory_file;
pub(super) use file::{Alignment, Kind, alignment, fallocate, free_bytes, kind_of, punch_back, sync_data};
pub use lent::Lent;
#[cfg(all(feature = "uring", target_os = "linux"))]
pub(super) use ring::Ring;
pub(super) use transfer::Transfer;
