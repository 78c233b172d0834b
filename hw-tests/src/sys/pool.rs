//! Memory of a CXL pool, which other processes and hosts may write at any time: registered, copied out and
//! in, and reported as damaged.

use anyhow::{Context as _, Result};
use nix::sys::mman::{MmapAdvise, madvise};
use std::ptr::NonNull;
use te_core::{Access, Error, MemSpan, Memory as _, RegionId, VolatileSpan};
use te_cxl::{CxlTransport, Pool};

/// Registers a part of a pool that this process has claimed.
///
/// # Errors
/// The transport's.
pub(crate) fn register_part(
    transport: &mut CxlTransport,
    id: RegionId,
    part: MemSpan,
    access: Access,
) -> Result<(), Error> {
    // SAFETY: `part` lies in a mapping that the transport's own mount keeps, and is only reached by copies.
    unsafe { transport.register(id, part, access) }
}

/// Copies bytes out of a part of `pool`, as other hosts have left them.
///
/// # Errors
/// When the span does not lie in the pool.
pub(crate) fn peek(pool: &Pool, span: MemSpan) -> Result<Vec<u8>> {
    pool.refresh(span)?;
    let mut bytes = vec![0; span.len()];
    // SAFETY: `refresh` has found the span in the mapping, which the caller's pool keeps; no reference into
    // it exists.
    unsafe { VolatileSpan::new(span) }.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Copies bytes into a part of `pool`, for other hosts to see.
///
/// # Errors
/// When the span does not lie in the pool.
pub(crate) fn poke(pool: &Pool, span: MemSpan, bytes: &[u8]) -> Result<()> {
    pool.refresh(span)?;
    // SAFETY: as in `peek`.
    unsafe { VolatileSpan::new(span) }.write(0, bytes)?;
    Ok(pool.write_back(span)?)
}

/// Has the kernel treat the page at the beginning of `span`, in a pool, as damaged (`madvise(2)`,
/// `MADV_HWPOISON`).
///
/// # Errors
/// The system's: it takes CAP_SYS_ADMIN and a kernel with memory failure.
pub(crate) fn poison(span: MemSpan) -> Result<()> {
    const PAGE: usize = 4_096;
    let page = NonNull::new(span.as_ptr()).context("no address")?;
    // SAFETY: a page of a mapping whose bytes only copy routines touch that survive a fault.
    unsafe { madvise(page.cast(), PAGE, MmapAdvise::MADV_HWPOISON) }.context("madvise(MADV_HWPOISON)")
}
