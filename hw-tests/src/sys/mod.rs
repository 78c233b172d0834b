//! The only unsafe code: mapping a device-DAX node, memory under test, and a provider of verbs that passes promises about memory on.
#![allow(unsafe_code, reason = "a device is mapped by a system call; `Verbs::post` is an unsafe method")]

mod breakable;
mod dax;
mod mirror;

pub(crate) use breakable::Breakable;
pub(crate) use dax::DevDax;
pub(crate) use mirror::{Mirror, Pages};
