//! The engine of a client, polled by the thread that uses the client. In unit tests it can be made to
//! misbehave.

#[cfg(test)]
mod faulty;

use te_core::{BatchHandle, Status};
use te_engine::{Config, StartError};

#[cfg(test)]
pub(crate) use faulty::{Engine, PanicAt};
#[cfg(not(test))]
pub(crate) use te_engine::Engine;

/// Starts an engine that computes checksums while it copies.
pub(crate) fn start(mut config: Config) -> Result<Engine, StartError> {
    sole_writer(&mut config);
    let mut engine = Engine::start(config)?;
    engine.checksum_copies(true);
    Ok(engine)
}

/// Allocations of the master begin and end at lines of the cache
/// ([`store_core::allocator::GRAIN_BYTES`]), and one process writes one: in pools without coherent caches, it
/// may write parts of lines.
#[cfg_attr(not(feature = "cxl"), allow(clippy::missing_const_for_fn, reason = "not where it is built"))]
pub(crate) fn sole_writer(config: &mut Config) {
    #[cfg(feature = "cxl")]
    {
        config.cxl.sole_writer = true;
    }
    let _ = config;
}

/// Whether a batch has ended. A batch that was freed has ended.
pub(crate) fn is_over(engine: &Engine, batch: BatchHandle) -> bool {
    engine.is_done(batch).unwrap_or(true)
}

/// Whether a fabric may still touch local memory of a batch.
pub(crate) fn is_quarantined(engine: &Engine, batch: BatchHandle) -> bool {
    engine.report(batch).is_ok_and(|report| report.quarantined)
}

/// Whether a request with this status moved all its bytes.
pub(crate) const fn is_complete(status: &te_engine::RequestStatus) -> bool {
    matches!(status.status, Status::Completed)
}

/// Frees a batch that is over.
pub(crate) fn free(engine: &mut Engine, batch: BatchHandle) {
    if let Err(error) = engine.free(batch) {
        log::debug!("a batch could not be freed: {error}");
    }
}
