//! All unsafe code of this crate, behind types that are safe to use.
//!
//! It relies on two contracts. For memory that callers registered, their promise to `register` holds until
//! the [`HeldSpan`] made from it was revoked, and every access takes a guard that `revoke` waits for. For
//! memory that this process mapped, the mapping lives as long as its owner here, and its file is sealed
//! against shrinking, so no access can fault.
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
pub use held::{Gate, HeldSpan, Inside, Protection, Use, Window};
pub(crate) use held::{copy, copy_summed};
pub use memory::{AllocOptions, Ledger, Mapping, SharedMemory};
pub use numa::node_of;
pub use park::{park, wait_readable};
pub use socket::{Process, SeqSocket, own_uid};
pub(crate) use socket::{peer_uid, recv_with_fd, send_with_fd};
pub(crate) use wipe::wiped_on_fork;
pub use wipe::{Own, PerProcess};
