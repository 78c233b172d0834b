//! The engine, as the client needs it: batches that are polled by the caller.

use std::time::Duration;

use te_engine::{
    Access, Config, MemSpan, RegionId, RegisterError, RequestStatus, SegmentError, SegmentHandle,
    SharedRegion, StartError, Stats, Status, Transfer, TransferEngine, TransferError, TransferRequest,
};

/// One engine with one owner.
pub(crate) struct Fabric {
    engine: TransferEngine,
}

/// A batch on its way.
pub(crate) struct Ticket {
    transfer: Transfer,
}

impl Fabric {
    pub(crate) fn start(config: Config) -> Result<Self, StartError> {
        Ok(Self { engine: TransferEngine::start(config)? })
    }

    pub(crate) fn alloc_shared(&mut self, len: usize) -> Result<SharedRegion, RegisterError> {
        self.engine.alloc_shared(len, Access::LOCAL)
    }

    /// # Safety
    /// As [`TransferEngine::register`].
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(crate) unsafe fn register(&mut self, span: MemSpan) -> Result<RegionId, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.engine.register(span, Access::LOCAL) }
    }

    pub(crate) fn unregister(&mut self, region: RegionId) -> Result<(), RegisterError> {
        self.engine.unregister(region)
    }

    pub(crate) fn open_segment(&mut self, endpoint: &str) -> Result<SegmentHandle, SegmentError> {
        self.engine.open_segment(endpoint)
    }

    /// Transfers that still use it keep it open; it is then closed with the engine.
    pub(crate) fn close_segment(&mut self, segment: SegmentHandle) {
        if let Err(error) = self.engine.close_segment(segment) {
            log::debug!("closing a segment: {error}");
        }
    }

    pub(crate) fn submit(
        &mut self,
        requests: &[TransferRequest],
        timeout: Duration,
    ) -> Result<Ticket, TransferError> {
        self.engine.submit(requests, Some(timeout)).map(|transfer| Ticket { transfer })
    }

    /// Fences a segment and waits. Whether the target said so.
    pub(crate) fn fence(&mut self, segment: SegmentHandle, timeout: Duration) -> bool {
        match self.engine.fence(segment, Some(timeout)) {
            Ok(transfer) => transfer.wait(Some(timeout * 2)).is_ok(),
            Err(_) => false,
        }
    }

    /// Moves things on, without waiting.
    pub(crate) fn poll(&mut self) {}

    /// Waits until something may have moved, at most `timeout`.
    pub(crate) fn wait(&mut self, ticket: &Ticket, timeout: Duration) {
        let _ = ticket.transfer.wait(Some(timeout));
    }

    pub(crate) fn is_over(&mut self, ticket: &Ticket) -> bool {
        ticket.transfer.status().is_terminal()
    }

    /// How request `index` of a batch that is over ended.
    pub(crate) fn request(&mut self, ticket: &Ticket, index: usize) -> Option<RequestStatus> {
        ticket.transfer.request(index)
    }

    /// Whether local memory of the batch may still be touched.
    pub(crate) fn is_quarantined(&mut self, ticket: &Ticket) -> bool {
        ticket.transfer.report().quarantined
    }

    pub(crate) fn cancel(&mut self, ticket: &Ticket) {
        ticket.transfer.cancel();
    }

    /// Gives a batch that is over back.
    pub(crate) fn free(&mut self, ticket: Ticket) {
        drop(ticket);
    }

    pub(crate) fn stats(&self) -> Stats {
        self.engine.stats()
    }
}

/// Whether a request that ended like this moved all of its bytes.
pub(crate) const fn is_complete(status: &RequestStatus) -> bool {
    matches!(status.status, Status::Completed)
}
