//! All unsafe code of the crate: the seam to devices, the provider that real devices have (libibverbs, found
//! at run time), and registered memory.
//!
//! ```text
//!   verbs.rs         the interface: what the transport needs of a device
//!   registration.rs  registering memory with a device
//!   posting.rs       posting work requests
//!   dma.rs           memory of simulated devices (feature `sim`)
//!
//!   device.rs        Device::list, Device::open            open_error.rs  why a device cannot be used
//!   provider.rs      SystemVerbs: queue pairs, posting, polling, events
//!   context.rs       the opened device and its registrations, shared by threads
//!   load.rs          table of functions, or why there is none
//!   convert.rs       the library's numbers ⇄ ours          sysfs.rs       what only sysfs reports
//!   abi.rs           structures and constants of verbs.h   layout.rs      their sizes, as in C
//! ```
//!
//! The contract with libibverbs is that of its manual pages: an object is used only between its creation and
//! its destruction, children are destroyed before their parents, every event that was taken is acknowledged,
//! and any thread may make any call.
#![allow(unsafe_code, reason = "calls into a C library, and memory that peers write")]

mod abi;
mod context;
mod convert;
mod device;
#[cfg(feature = "sim")]
pub(crate) mod dma;
#[cfg(test)]
mod fake;
mod layout;
mod load;
mod open_error;
pub(crate) mod posting;
mod provider;
pub(crate) mod registration;
mod sysfs;
pub mod verbs;

pub use device::{Device, PortState, survives_fork};
pub use load::NoRdma;
pub use open_error::OpenError;
pub use provider::SystemVerbs;
