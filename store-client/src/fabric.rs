//! The engine, as the client needs it: one owner, who polls.

use std::time::{Duration, Instant};

use store_core::message::Export;
use te_core::{Access, BatchHandle, MemSpan, RegionId, Status};
use te_engine::{
    Config, Engine, PeerToPeer, RegisterError, RequestStatus, SegmentError, SegmentHandle, SharedRegion,
    StartError, Stats, TransferError, TransferRequest,
};
use te_host::Spin;

/// One engine with one owner.
pub(crate) struct Fabric {
    engine: Engine,
    spin: Spin,
    descriptors: PeerToPeer,
    #[cfg(test)]
    stuck: Stuck,
}

/// Batches that look as if they did not drain: no real fabric can be made to do that on demand.
#[cfg(test)]
#[derive(Default)]
struct Stuck {
    next: Option<te_core::Op>,
    batches: Vec<BatchHandle>,
    panics: Option<PanicAt>,
}

/// Where the next operation panics.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PanicAt {
    /// Before what was cut is sent.
    Submit,
    /// After something was sent.
    Poll,
}

#[cfg(test)]
impl Fabric {
    /// The next operation panics there.
    pub(crate) fn panic_next(&mut self, at: PanicAt) {
        self.stuck.panics = Some(at);
    }

    fn panic_if(&mut self, at: PanicAt) {
        let under_way = self.engine.stats().batches > 0;
        if self.stuck.panics == Some(at) && (at == PanicAt::Submit || under_way) {
            self.stuck.panics = None;
            panic!("the test wants it so");
        }
    }

    /// The next batch of this kind ends as if it could not be drained.
    pub(crate) fn stick_next(&mut self, op: te_core::Op) {
        self.stuck.next = Some(op);
    }

    /// Where its engine is asked what it exports.
    pub(crate) fn name(&self) -> &str {
        self.engine.name()
    }

    /// They have drained.
    pub(crate) fn unstick(&mut self) {
        while let Some(batch) = self.stuck.batches.pop() {
            while !self.engine.is_done(batch).unwrap_or(true) {
                self.engine.poll();
            }
        }
    }
}

impl Fabric {
    pub(crate) fn start(config: Config) -> Result<Self, StartError> {
        let spin = Spin::new(Duration::from_micros(config.spin_us.into()));
        let descriptors = PeerToPeer::of(&config);
        let mut engine = Engine::start(config)?;
        engine.checksum_copies(true);
        Ok(Self {
            engine,
            spin,
            descriptors,
            #[cfg(test)]
            stuck: Stuck::default(),
        })
    }

    /// What nodes know this engine by.
    pub(crate) fn identity(&self) -> u64 {
        self.engine.identity()
    }

    pub(crate) fn alloc_shared(&mut self, len: usize) -> Result<SharedRegion, RegisterError> {
        self.engine.alloc_shared(len, Access::LOCAL)
    }

    pub(crate) fn alloc_lent(&mut self, len: usize) -> Result<SharedRegion, RegisterError> {
        self.engine.alloc_lent(len, Access::LOCAL)
    }

    /// # Safety
    /// As [`Engine::register`].
    #[allow(unsafe_code, reason = "passes the caller's promise on")]
    pub(crate) unsafe fn register(
        &mut self,
        span: MemSpan,
        access: Access,
    ) -> Result<RegionId, RegisterError> {
        // SAFETY: the caller's promise.
        unsafe { self.engine.register(span, access) }
    }

    /// Whether memory can be registered for a single operation.
    pub(crate) fn is_inline(&self) -> bool {
        #[cfg(test)]
        if self.stuck.next.is_some() || !self.stuck.batches.is_empty() {
            return false;
        }
        self.engine.is_inline()
    }

    pub(crate) fn unregister(&mut self, region: RegionId) -> Result<(), RegisterError> {
        self.engine.unregister(region)
    }

    /// Opens what an endpoint exports, if the export is still `wanted` one; `None`: it is another.
    pub(crate) fn open_export(
        &mut self,
        endpoint: &str,
        wanted: Export,
    ) -> Result<Option<SegmentHandle>, SegmentError> {
        let descriptor = self.descriptors.fetch(endpoint)?;
        let there = descriptor.incarnation == wanted.engine
            && descriptor.regions.iter().any(|region| region.region == wanted.region);
        if there { self.engine.attach_segment(endpoint, &descriptor).map(Some) } else { Ok(None) }
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
    ) -> Result<BatchHandle, TransferError> {
        #[cfg(test)]
        self.panic_if(PanicAt::Submit);
        let batch = self.engine.submit(requests, Some(timeout))?;
        #[cfg(test)]
        if self.stuck.next.is_some_and(|op| requests.iter().any(|request| request.op == op)) {
            self.stuck.next = None;
            self.stuck.batches.push(batch);
        }
        Ok(batch)
    }

    /// Fences a segment and waits. Whether the target said so.
    pub(crate) fn fence(&mut self, segment: SegmentHandle, timeout: Duration) -> bool {
        let Ok(fence) = self.engine.fence(segment, Some(timeout)) else { return false };
        let held = self.engine.wait_fence(fence, Some(timeout)).is_ok();
        // It is known: it was made above.
        let _ = self.engine.free_fence(fence);
        held
    }

    /// Moves things on, without waiting.
    pub(crate) fn poll(&mut self) {
        #[cfg(test)]
        self.panic_if(PanicAt::Poll);
        self.engine.poll();
    }

    /// Polls until something has moved, at most until `deadline`; spins first, then sleeps.
    pub(crate) fn wait(&mut self, deadline: Instant) {
        loop {
            if self.engine.poll() > 0 {
                return self.spin.reset();
            }
            let now = Instant::now();
            if now >= deadline {
                return self.spin.reset();
            }
            if !self.spin.again() {
                return self.engine.park(Some((deadline - now).min(PARK_MAX)));
            }
        }
    }

    pub(crate) fn is_over(&self, batch: BatchHandle) -> bool {
        #[cfg(test)]
        if self.stuck.batches.contains(&batch) {
            return true;
        }
        self.engine.is_done(batch).unwrap_or(true)
    }

    /// How request `index` of a batch that is over ended.
    pub(crate) fn request(&self, batch: BatchHandle, index: usize) -> Option<RequestStatus> {
        #[cfg(test)]
        if self.stuck.batches.contains(&batch) {
            return Some(RequestStatus {
                status: Status::TimedOut,
                bytes: 0,
                error: None,
                outcome: te_core::Outcome::Unknown,
                fence_needed: true,
                crc32c: None,
            });
        }
        self.engine.request_status(batch, index).ok()
    }

    /// Whether local memory of the batch may still be touched.
    pub(crate) fn is_quarantined(&self, batch: BatchHandle) -> bool {
        #[cfg(test)]
        if self.stuck.batches.contains(&batch) {
            return true;
        }
        self.engine.report(batch).is_ok_and(|report| report.quarantined)
    }

    pub(crate) fn cancel(&mut self, batch: BatchHandle) {
        // One that has been freed needs no cancelling.
        let _ = self.engine.cancel(batch);
    }

    /// Gives a batch that is over back.
    pub(crate) fn free(&mut self, batch: BatchHandle) {
        if let Err(error) = self.engine.free(batch) {
            log::debug!("freeing a batch: {error}");
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        self.engine.stats()
    }
}

/// The longest sleep, should an event get lost.
const PARK_MAX: Duration = Duration::from_millis(100);

/// Whether a request that ended like this moved all of its bytes.
pub(crate) const fn is_complete(status: &RequestStatus) -> bool {
    matches!(status.status, Status::Completed)
}
