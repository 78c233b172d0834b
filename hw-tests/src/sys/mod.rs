//! The only unsafe code: mapping a device-DAX node, and a rail that passes promises about memory on.
#![allow(unsafe_code, reason = "a device is mapped by a system call; `Memory::register` is an unsafe method")]

mod dax;
mod saboteur;

pub(crate) use dax::DevDax;
pub(crate) use saboteur::Saboteur;
