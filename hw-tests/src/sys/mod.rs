//! The unsafe code of the program: a mapped device-DAX node, memory under test, and an implementation of
//! `Verbs` around another.
#![allow(unsafe_code, reason = "a device is mapped by a system call; `Verbs::post` is an unsafe method")]

mod breakable;
mod dax;
mod mirror;
mod pool;

pub(crate) use breakable::Breakable;
pub(crate) use dax::DevDax;
pub(crate) use mirror::{Mirror, Pages};
pub(crate) use pool::{peek, poison, poke, register_part};
