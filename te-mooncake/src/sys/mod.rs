//! The only unsafe code of this crate besides the functions that take a caller's promise: raw memory, and
//! socket I/O directly from and into it.
#![allow(unsafe_code, reason = "system calls and raw memory live here and nowhere else in the crate")]

mod exported;
mod memory;
mod socket;

pub(crate) use exported::ExportedRange;
pub(crate) use memory::Memory;
pub(crate) use socket::{receive, send};
