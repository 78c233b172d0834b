//! `snowskin.Peer`: the memory that another engine exports.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use te_core::Access;
use te_engine::{Liveness, SegmentHandle, TransferEngine};

use super::batch::Batch;
use super::shared::Shared;
use crate::errors::Fault;
use crate::gil;
use crate::options::deadline;

/// Memory that a peer exports.
///
/// ``addr`` is what the peer's ``Region.addr`` is there, and what :meth:`Region.read_from` takes.
#[pyclass(frozen, eq, get_all, module = "snowskin")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteRegion {
    /// First address, in the peer's address space.
    addr: u64,
    /// Length, bytes.
    nbytes: u64,
    /// Whether it can be read.
    readable: bool,
    /// Whether it can be written.
    writable: bool,
    /// Where the memory is: ``"*"``, ``"cpu:0"``, ``"cuda:3"``.
    location: String,
}

#[pymethods]
impl RemoteRegion {
    fn __repr__(&self) -> String {
        let rights = match (self.readable, self.writable) {
            (true, true) => "readwrite",
            (false, true) => "write",
            _ => "read",
        };
        format!("<snowskin.RemoteRegion addr={:#x} nbytes={} {rights}>", self.addr, self.nbytes)
    }
}

/// Another engine, opened by its name.
///
/// Made by :meth:`Engine.open`. ``with`` closes it.
#[pyclass(frozen, weakref, module = "snowskin")]
pub(crate) struct Peer {
    shared: Arc<Shared>,
    name: String,
    handle: Mutex<Option<SegmentHandle>>,
}

impl Peer {
    pub(super) const fn new(shared: Arc<Shared>, name: String, handle: SegmentHandle) -> Self {
        Self { shared, name, handle: Mutex::new(Some(handle)) }
    }

    /// The handle, for batches of the same engine.
    ///
    /// # Errors
    /// The peer is closed, or was opened with another engine.
    pub(super) fn handle(&self, py: Python<'_>, shared: &Arc<Shared>) -> PyResult<SegmentHandle> {
        if !Arc::ptr_eq(&self.shared, shared) {
            let text = "the peer was opened with another engine: open it with the engine of the region";
            return Err(Fault::argument(text).into_err(py));
        }
        self.open(py)
    }

    fn open(&self, py: Python<'_>) -> PyResult<SegmentHandle> {
        let handle = *self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        handle.ok_or_else(|| Fault::closed("peer").into_err(py))
    }

    /// Runs something that may wait for the peer.
    fn ask<T: Send + 'static>(
        &self,
        py: Python<'_>,
        ask: impl FnOnce(&TransferEngine, SegmentHandle) -> Result<T, Fault> + Send + 'static,
    ) -> PyResult<T> {
        let handle = self.open(py)?;
        let engine = self.shared.engine().map_err(|fault| fault.into_err(py))?;
        gil::blocking(py, move || ask(&engine, handle))?.map_err(|fault| fault.into_err(py))
    }
}

#[pymethods]
impl Peer {
    /// The name under which it was opened.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The regions that it exports, as they were when it was opened or refreshed, by address.
    #[getter]
    fn regions(&self, py: Python<'_>) -> PyResult<Vec<RemoteRegion>> {
        let regions = self.ask(py, |engine, handle| Ok(engine.segment_regions(handle)?))?;
        let region = |region: te_engine::RemoteRegion| RemoteRegion {
            addr: region.addr,
            nbytes: region.len,
            readable: region.access.contains(Access::REMOTE_READ),
            writable: region.access.contains(Access::REMOTE_WRITE),
            location: region.location.to_string(),
        };
        Ok(regions.into_iter().map(region).collect())
    }

    /// Asks the peer again what it exports. :exc:`PeerUnreachable` with the code ``peer_restarted`` when
    /// another process answers: open it again.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        self.ask(py, |engine, handle| Ok(engine.refresh_segment(handle)?))
    }

    /// Sends a message to the peer, which receives it with :meth:`Engine.notifications`.
    fn notify(&self, py: Python<'_>, name: String, message: Vec<u8>) -> PyResult<()> {
        self.ask(py, move |engine, handle| Ok(engine.notify(handle, &name, &message)?))
    }

    /// ``"alive"``, ``"restarted"`` (another process answers: open it again) or ``"unreachable"`` (no answer
    /// within ``timeout`` seconds).
    #[pyo3(signature = (timeout=1.0))]
    fn probe(&self, py: Python<'_>, timeout: f64) -> PyResult<&'static str> {
        let until = deadline(py, Some(timeout))?;
        let limit = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
        let liveness = self.ask(py, move |engine, handle| Ok(engine.probe(handle, limit)?))?;
        Ok(match liveness {
            Liveness::Alive { .. } => "alive",
            Liveness::Restarted { .. } => "restarted",
            _ => "unreachable",
        })
    }

    /// A fence: when the batch has completed, no write that ended before can still land at the peer.
    #[pyo3(signature = (*, timeout=None))]
    fn fence(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Batch> {
        let limit = deadline(py, timeout)?.map(|until| until.saturating_duration_since(Instant::now()));
        let transfer = self.ask(py, move |engine, handle| Ok(engine.fence(handle, limit)?))?;
        Ok(Batch::of(Arc::clone(&self.shared), transfer))
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Closes the peer. Batches in flight continue.
    fn close(&self) {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(handle), Ok(engine)) = (handle, self.shared.engine()) else { return };
        gil::later(move || {
            if let Err(error) = engine.close_segment(handle) {
                log::debug!("a segment was not closed: {error}");
            }
        });
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.close();
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { " closed" } else { "" };
        format!("<snowskin.Peer {}{state}>", self.name)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.close();
    }
}
