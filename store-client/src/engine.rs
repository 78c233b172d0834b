//! The engine of a client: one owner, who polls. In unit tests it is one that can be told to misbehave.

#[cfg(test)]
mod faulty;

use te_core::{BatchHandle, Status};
use te_engine::{Config, StartError};

#[cfg(test)]
pub(crate) use faulty::{Engine, PanicAt};
#[cfg(not(test))]
pub(crate) use te_engine::Engine;

/// Starts an engine that checksums what it copies.
pub(crate) fn start(config: Config) -> Result<Engine, StartError> {
    let mut engine = Engine::start(config)?;
    engine.checksum_copies(true);
    Ok(engine)
}

/// Whether a batch has ended. One that was freed has.
pub(crate) fn is_over(engine: &Engine, batch: BatchHandle) -> bool {
    engine.is_done(batch).unwrap_or(true)
}

/// Whether local memory of a batch may still be touched.
pub(crate) fn is_quarantined(engine: &Engine, batch: BatchHandle) -> bool {
    engine.report(batch).is_ok_and(|report| report.quarantined)
}

/// Whether a request with this status moved all of its bytes.
pub(crate) const fn is_complete(status: &te_engine::RequestStatus) -> bool {
    matches!(status.status, Status::Completed)
}

/// Gives a batch that is over back.
pub(crate) fn free(engine: &mut Engine, batch: BatchHandle) {
    if let Err(error) = engine.free(batch) {
        log::debug!("freeing a batch: {error}");
    }
}
