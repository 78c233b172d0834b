//! The only unsafe code of the crate: memory that callers registered.
#![allow(
    unsafe_code,
    reason = "registered memory is reached by address; the contract is that of Client::register"
)]

use te_core::{Error, VolatileSpan};
use te_engine::MemSpan;

/// Copies bytes out of registered memory.
pub(crate) fn read(span: MemSpan, offset: u64, out: &mut [u8]) -> Result<(), Error> {
    // SAFETY: `span` was passed to `Client::register`, whose contract keeps it mapped, and free of references to what a
    // fabric may write, until it is unregistered; the table that it came from forgets it then.
    let span = unsafe { VolatileSpan::new(span) };
    span.read(offset, out)
}
