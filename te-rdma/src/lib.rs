//! One-sided reads and writes of registered memory over RDMA.
//!
//! ```text
//!   Verbs    one opened port: registrations, queue pairs, completions
//!    │
//!   sys (libibverbs at run time)     sim (feature `sim`)
//! ```
//!
//! ```
//! use te_rdma::verbs::MrAccess;
//! assert!(MrAccess::all().contains(MrAccess::REMOTE_READ));
//! ```
#![deny(unsafe_code)]

#[cfg(feature = "sim")]
pub mod sim;
pub mod verbs;
