//! The fabric over a CXL pool.
#![deny(unsafe_code)]

mod config;
mod export;
pub mod ledger;
pub mod lines;
mod owner;
pub mod pool;
mod sys;
mod transport;

pub use config::{Coherence, Config};
pub use export::Export;
pub use ledger::{Grant, Guest};
pub use pool::{Claim, FormatOptions, Inspection, Pool, PoolError, Seat};
pub use te_fabric::OpenError;
pub use transport::{CxlTransport, Mount};

/// Random bytes that cannot be guessed.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(bytes)
}
