//! The provider of verbs that real devices have: libibverbs, found at run time.
//!
//! ```text
//!   device.rs    Device::list, Device::open
//!   provider.rs  SystemVerbs: queue pairs, posting, polling, events    convert.rs  the library's numbers ⇄ ours
//!   context.rs   the opened device and its registrations, shared by threads
//!   load.rs      table of functions, or why there is none              sysfs.rs    what only sysfs knows
//!   abi.rs       structures and constants of verbs.h                   layout.rs   their sizes, as the C compiler sees them
//! ```
//!
//! All `unsafe` of real devices is in this directory. Its contract with libibverbs is that of the manual pages: objects are
//! used after they were made and before they are destroyed, children are destroyed before their parents, every event that
//! was taken is acknowledged, and all calls may come from any thread.
#![allow(unsafe_code, reason = "calls into a C library")]

mod abi;
mod context;
mod convert;
mod device;
#[cfg(test)]
mod fake;
mod layout;
mod load;
mod provider;
mod sysfs;

pub use device::{Device, OpenError, PortState, survives_fork};
pub use load::NoRdma;
pub use provider::SystemVerbs;
