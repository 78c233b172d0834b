//! An engine for tests: it can report batches as not drained, and panic in the middle of an operation. No
//! real fabric does either on demand.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use te_core::{BatchHandle, Op, Outcome, Status};
use te_engine::{BatchReport, Config, RequestStatus, StartError, TransferError, TransferRequest};

/// A real engine, and the faults that it simulates.
pub(crate) struct Engine {
    engine: te_engine::Engine,
    stick: Option<Op>,
    stuck: Vec<BatchHandle>,
    panics: Option<PanicAt>,
}

/// Where the next operation panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PanicAt {
    /// Before the first request is submitted.
    Submit,
    /// While requests are under way.
    Poll,
}

impl Engine {
    pub(crate) fn start(config: Config) -> Result<Self, StartError> {
        let engine = te_engine::Engine::start(config)?;
        Ok(Self { engine, stick: None, stuck: Vec::new(), panics: None })
    }

    /// Makes the next operation panic.
    pub(crate) fn panic_next(&mut self, at: PanicAt) {
        self.panics = Some(at);
    }

    /// Makes the next batch of this kind end as if it could not be drained.
    pub(crate) fn stick_next(&mut self, op: Op) {
        self.stick = Some(op);
    }

    /// Reports all stuck batches as drained.
    pub(crate) fn unstick(&mut self) {
        while let Some(batch) = self.stuck.pop() {
            while !self.engine.is_done(batch).unwrap_or(true) {
                self.engine.poll();
            }
        }
    }

    pub(crate) fn is_caller_driven(&self) -> bool {
        self.stick.is_none() && self.stuck.is_empty() && self.engine.is_caller_driven()
    }

    pub(crate) fn submit(
        &mut self,
        requests: &[TransferRequest],
        timeout: Option<Duration>,
    ) -> Result<BatchHandle, TransferError> {
        self.panic_if(PanicAt::Submit);
        let batch = self.engine.submit(requests, timeout)?;
        if self.stick.is_some_and(|op| requests.iter().any(|request| request.op == op)) {
            self.stick = None;
            self.stuck.push(batch);
        }
        Ok(batch)
    }

    pub(crate) fn poll(&mut self) -> usize {
        self.panic_if(PanicAt::Poll);
        self.engine.poll()
    }

    pub(crate) fn is_done(&self, batch: BatchHandle) -> Result<bool, TransferError> {
        if self.stuck.contains(&batch) { Ok(true) } else { self.engine.is_done(batch) }
    }

    pub(crate) fn report(&self, batch: BatchHandle) -> Result<BatchReport, TransferError> {
        let report = self.engine.report(batch)?;
        Ok(BatchReport { quarantined: report.quarantined || self.stuck.contains(&batch), ..report })
    }

    pub(crate) fn request_status(
        &self,
        batch: BatchHandle,
        index: usize,
    ) -> Result<RequestStatus, TransferError> {
        if self.stuck.contains(&batch) {
            return Ok(RequestStatus {
                status: Status::TimedOut,
                bytes: 0,
                error: None,
                outcome: Outcome::Unknown,
                fence_needed: true,
                crc32c: None,
            });
        }
        self.engine.request_status(batch, index)
    }

    fn panic_if(&mut self, at: PanicAt) {
        let under_way = self.engine.stats().batches > 0;
        if self.panics == Some(at) && (at == PanicAt::Submit || under_way) {
            self.panics = None;
            panic!("requested by the test");
        }
    }
}

impl Deref for Engine {
    type Target = te_engine::Engine;

    fn deref(&self) -> &te_engine::Engine {
        &self.engine
    }
}

impl DerefMut for Engine {
    fn deref_mut(&mut self) -> &mut te_engine::Engine {
        &mut self.engine
    }
}
