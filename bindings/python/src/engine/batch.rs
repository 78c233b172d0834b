//! `snowskin.Batch`: requests that are submitted together and end together.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use te_core::{Op, Status};
use te_engine::{BatchReport, Transfer, TransferError, TransferRequest};

use super::peer::Peer;
use super::region::{Region, Registration};
use super::shared::{Event, Happens, Shared};
use crate::errors::{Fault, Kind};
use crate::options::{deadline, refused};
use crate::{aio, gil};

/// Longest time between two looks at the signals that have arrived.
const SLICE: Duration = Duration::from_millis(50);

/// For a call on a batch that another thread submits at this moment.
const SUBMITTING: &str = "another thread submits the batch at this moment: share its result instead";

/// The remote address of a request, its length (`None`: to the end of the region) and its offset in the
/// region.
pub(super) type Place = (u64, Option<u64>, u64);

/// A batch in flight. It keeps the regions that its requests use registered.
pub(super) struct Flight {
    transfer: Mutex<Option<Arc<Transfer>>>,
    over: Arc<Event>,
    end: OnceLock<Result<Report, Fault>>,
    regions: Mutex<Vec<Arc<Registration>>>,
}

/// How a batch ended.
///
/// ``nbytes`` have arrived at their destinations. ``failed`` requests have not completed. While
/// ``fence_needed`` is set, bytes may still land at the peer: call :meth:`Peer.fence` before its memory is
/// used for anything else.
#[pyclass(frozen, eq, get_all, module = "snowskin")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    /// Bytes that have arrived.
    nbytes: u64,
    /// Requests that did not complete.
    failed: u32,
    /// Bytes of a request may still land at the peer.
    fence_needed: bool,
    /// A rail may still write local memory of the batch: its region stays registered.
    quarantined: bool,
}

#[pymethods]
impl Report {
    fn __repr__(&self) -> String {
        let Self { nbytes, failed, fence_needed, quarantined } = self;
        let text = |value: bool| if value { "True" } else { "False" };
        format!(
            "Report(nbytes={nbytes}, failed={failed}, fence_needed={}, quarantined={})",
            text(*fence_needed),
            text(*quarantined)
        )
    }
}

impl From<BatchReport> for Report {
    fn from(report: BatchReport) -> Self {
        Self {
            nbytes: report.bytes,
            failed: report.requests_failed,
            fence_needed: report.fence_needed,
            quarantined: report.quarantined,
        }
    }
}

impl Flight {
    /// Watches a transfer.
    pub(super) fn new(mut transfer: Transfer, regions: Vec<Arc<Registration>>) -> Arc<Self> {
        let over = Event::new();
        let waker = Waker::from(Arc::clone(&over));
        if Pin::new(&mut transfer).poll(&mut Context::from_waker(&waker)).is_ready() {
            over.set();
        }
        let transfer = Mutex::new(Some(Arc::new(transfer)));
        Arc::new(Self { transfer, over, end: OnceLock::new(), regions: Mutex::new(regions) })
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.has_happened()
    }

    /// Cancels the transfer, and lets go of its engine.
    pub(super) fn give_up(&self) {
        let transfer = self.lock().take();
        if let Some(transfer) = transfer {
            let _ = self.end.set(match transfer.wait(Some(Duration::ZERO)) {
                Err(TransferError::WaitTimedOut) => Err(Fault::closed("engine")),
                end => end.map(Report::from).map_err(Fault::from),
            });
            // Dropping it cancels what is in flight.
            drop(transfer);
        }
        self.over.set();
    }

    /// How it ended; `None`: it has not.
    fn end(&self) -> Option<Result<Report, Fault>> {
        if let Some(end) = self.end.get() {
            return Some(end.clone());
        }
        if !self.is_over() {
            return None;
        }
        let transfer = self.lock().take()?;
        let end = transfer.wait(Some(Duration::ZERO)).map(Report::from).map_err(Fault::from);
        let end = self.end.get_or_init(|| end).clone();
        // Nothing touches the regions any more, unless they are quarantined: then they stay `Busy`.
        let regions = std::mem::take(&mut *self.regions.lock().unwrap_or_else(PoisonError::into_inner));
        drop((transfer, regions));
        Some(end)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Transfer>>> {
        self.transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let transfer = self.transfer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let regions = std::mem::take(self.regions.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Some(transfer) = transfer {
            // Dropping it cancels what is in flight, and may do work of the engine: not with the GIL. The
            // regions are not unregistered before that.
            gil::later(move || drop((transfer, regions)));
        }
    }
}

/// Requests that are submitted together and end together.
///
/// Made by :meth:`Engine.batch`. :meth:`read` and :meth:`write` add requests, and nothing happens before
/// :meth:`submit`, :meth:`wait` or ``await``.
///
/// A ``timeout`` of :meth:`submit` is the limit of the transfer: what has not ended by then is cancelled. A
/// ``timeout`` of :meth:`wait` is the limit of the wait: the batch goes on after it, and can be waited for
/// again. Dropping a batch cancels it; its regions stay registered until nothing touches them any more.
#[pyclass(frozen, weakref, module = "snowskin")]
pub(crate) struct Batch {
    shared: Arc<Shared>,
    state: Mutex<State>,
}

enum State {
    Building(Vec<TransferRequest>, Vec<Arc<Registration>>),
    /// A thread submits it at this moment. No lock is held while the engine works.
    Submitting,
    Submitted(Arc<Flight>),
}

impl Batch {
    pub(super) const fn new(shared: Arc<Shared>) -> Self {
        Self { shared, state: Mutex::new(State::Building(Vec::new(), Vec::new())) }
    }

    /// A batch that is in flight.
    pub(super) fn of(shared: Arc<Shared>, transfer: Transfer) -> Self {
        let flight = Flight::new(transfer, Vec::new());
        shared.began(&flight);
        Self { shared, state: Mutex::new(State::Submitted(flight)) }
    }

    /// Adds a request.
    pub(super) fn add(
        &self,
        py: Python<'_>,
        op: Op,
        region: &Region,
        peer: &Peer,
        (addr, nbytes, offset): Place,
    ) -> PyResult<()> {
        let registration = region.registration(py)?;
        let rest = registration.len().checked_sub(offset);
        let len = match (nbytes, rest) {
            (None, Some(rest)) => rest,
            (Some(len), Some(rest)) if len <= rest => len,
            _ => {
                let text = format!(
                    "{} bytes at offset {offset} do not lie inside the region of {} bytes",
                    nbytes.unwrap_or(1),
                    registration.len()
                );
                return Err(refused(py, text));
            }
        };
        if len == 0 {
            return Err(refused(py, "a request has at least one byte"));
        }
        if op == Op::Read && !registration.is_writable() {
            return Err(refused(py, "the region is over read-only memory: a read cannot be stored there"));
        }
        let segment = peer.handle(py, &self.shared)?;
        let local = (registration.id(), offset).into();
        let request = TransferRequest { op, local, segment, remote_addr: addr, len };
        match &mut *self.lock() {
            State::Building(requests, regions) => {
                requests.push(request);
                if !regions.iter().any(|known| Arc::ptr_eq(known, &registration)) {
                    regions.push(registration);
                }
                Ok(())
            }
            State::Submitting => Err(refused(py, SUBMITTING)),
            State::Submitted(_) => Err(refused(py, "the batch was submitted: make another one")),
        }
    }

    /// Submits the requests, unless they are in flight.
    pub(super) fn begin(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Arc<Flight>> {
        let limit = deadline(py, timeout)?.map(|until| until.saturating_duration_since(Instant::now()));
        let (requests, regions) = {
            let mut state = self.lock();
            match std::mem::replace(&mut *state, State::Submitting) {
                State::Building(requests, regions) if requests.is_empty() => {
                    *state = State::Building(requests, regions);
                    return Err(refused(py, "the batch has no request: add some with read() and write()"));
                }
                State::Building(requests, regions) => (requests, regions),
                State::Submitting => return Err(refused(py, SUBMITTING)),
                State::Submitted(flight) => {
                    *state = State::Submitted(Arc::clone(&flight));
                    return Ok(flight);
                }
            }
        };
        let begun = gil::detached(py, || -> Result<Transfer, Fault> {
            Ok(self.shared.engine()?.submit(&requests, limit)?)
        });
        match begun {
            Ok(transfer) => {
                let flight = Flight::new(transfer, regions);
                self.shared.began(&flight);
                *self.lock() = State::Submitted(Arc::clone(&flight));
                Ok(flight)
            }
            Err(fault) => {
                // It can be submitted again, for example when the engine has room.
                *self.lock() = State::Building(requests, regions);
                Err(fault.into_err(py))
            }
        }
    }

    fn flight(&self) -> Option<Arc<Flight>> {
        match &*self.lock() {
            State::Submitted(flight) => Some(Arc::clone(flight)),
            State::Building(..) | State::Submitting => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Batch {
    /// Adds a request that reads ``nbytes`` at ``addr`` of the peer into ``region``. Without ``nbytes``, all
    /// of the region from ``offset`` on is filled. Returns the batch.
    #[pyo3(signature = (region, peer, addr, nbytes=None, *, offset=0))]
    fn read(
        slf: &Bound<'_, Self>,
        region: &Bound<'_, Region>,
        peer: &Bound<'_, Peer>,
        addr: u64,
        nbytes: Option<u64>,
        offset: u64,
    ) -> PyResult<Py<Self>> {
        slf.get().add(slf.py(), Op::Read, region.get(), peer.get(), (addr, nbytes, offset))?;
        Ok(slf.clone().unbind())
    }

    /// Adds a request that writes ``nbytes`` of ``region`` to ``addr`` of the peer. Returns the batch.
    #[pyo3(signature = (region, peer, addr, nbytes=None, *, offset=0))]
    fn write(
        slf: &Bound<'_, Self>,
        region: &Bound<'_, Region>,
        peer: &Bound<'_, Peer>,
        addr: u64,
        nbytes: Option<u64>,
        offset: u64,
    ) -> PyResult<Py<Self>> {
        slf.get().add(slf.py(), Op::Write, region.get(), peer.get(), (addr, nbytes, offset))?;
        Ok(slf.clone().unbind())
    }

    /// Submits the requests. With ``timeout``, what has not ended after so many seconds is cancelled. Returns
    /// the batch.
    #[pyo3(signature = (*, timeout=None))]
    fn submit(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<Self>> {
        slf.get().begin(slf.py(), timeout)?;
        Ok(slf.clone().unbind())
    }

    /// Waits until the batch has ended; submits it if it was not.
    ///
    /// :exc:`Timeout` after ``timeout`` seconds: the batch goes on, and can be waited for again or cancelled.
    /// Any other :exc:`SnowskinError` says why the batch did not complete.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Report> {
        let until = deadline(py, timeout)?;
        let flight = self.begin(py, None)?;
        loop {
            if let Some(end) = flight.end() {
                return end.map_err(|fault| fault.into_err(py));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let transfer = flight.lock().clone();
            if let Some(transfer) = transfer {
                // This thread helps the engine, spins and sleeps; the waker of the transfer says that it has
                // ended, which may be a moment later.
                let end = py.detach(|| transfer.wait(Some(slice)));
                if !matches!(end, Err(TransferError::WaitTimedOut)) {
                    flight.over.set();
                    continue;
                }
            }
            py.check_signals()?;
            if left.is_some_and(|left| left <= slice) {
                let text = "the batch has not ended yet: it goes on; wait again, or cancel it";
                return Err(Fault::new(Kind::Timeout, "timeout", text).retryable().into_err(py));
            }
        }
    }

    /// Cancels the batch. It still ends exactly once: cancelled, or with the end that came first.
    fn cancel(&self, py: Python<'_>) {
        let transfer = self.flight().and_then(|flight| flight.lock().clone());
        if let Some(transfer) = transfer {
            gil::detached(py, || transfer.cancel());
        }
    }

    /// Whether the batch has ended.
    #[getter]
    fn done(&self) -> bool {
        self.flight().is_some_and(|flight| flight.is_over())
    }

    /// ``"new"``, ``"pending"``, or how it ended: ``"completed"``, ``"failed"``, ``"cancelled"``,
    /// ``"timed_out"``.
    #[getter]
    fn status(&self) -> &'static str {
        let Some(flight) = self.flight() else { return "new" };
        if let Some(end) = flight.end() {
            return match end {
                Ok(_) => "completed",
                Err(fault) if fault.code == "cancelled" => "cancelled",
                Err(fault) if fault.kind == Kind::Timeout => "timed_out",
                Err(_) => "failed",
            };
        }
        let status = flight.lock().as_ref().map(|transfer| transfer.status());
        match status {
            Some(Status::Completed) => "completed",
            _ => "pending",
        }
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let flight = self.begin(py, None)?;
        let happens = Happens(Arc::clone(&flight.over));
        let future = aio::future(py, happens, move |py, ()| match flight.end() {
            Some(Ok(report)) => Ok(Py::new(py, report)?.into_any()),
            Some(Err(fault)) => Err(fault.into_err(py)),
            None => Err(Fault::closed("engine").into_err(py)),
        })?;
        future.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        format!("<snowskin.Batch {}>", self.status())
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            // The transfer belongs to the parent.
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::replace(state, State::Submitting));
        }
    }
}
