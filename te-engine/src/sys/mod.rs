//! All unsafe code of this crate, behind types that are safe to use.
//!
//! Two contracts carry it. Memory that callers registered: their promise to `register` holds until the [`HeldSpan`] made
//! from it was revoked, and every access goes through a guard that `revoke` waits for. Memory that we mapped: the mapping
//! lives as long as its owner here, and its file is sealed against shrinking, so no access can fault.
#![allow(
    unsafe_code,
    reason = "raw memory, descriptors from the kernel; the contracts are in this module's header"
)]

mod crc;
mod held;
mod memory;
mod numa;
mod park;
mod socket;
mod wipe;

pub use crc::{crc32c_at, crc32c_of};
pub(crate) use held::{Gate, HeldSpan, Use, Window, copy, copy_summed};
pub(crate) use memory::{AllocOptions, Ledger, Mapping, Revoked, SharedMemory};
pub(crate) use numa::node_of;
pub(crate) use park::park;
pub use park::wait_readable;
pub(crate) use socket::{Process, SeqSocket, own_uid, peer_uid, recv_with_fd, send_with_fd};
pub(crate) use wipe::{Own, PerProcess, wiped_on_fork};
