//! A rail whose queue pairs can be put into error from outside, as a device does when it has had enough of a peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use te_core::{
    Access, Capabilities, Completion, Error, EventSource, Instant, MemSpan, Memory, RegionId, SegmentId,
    Slice, Token, Transport,
};
use te_rdma::RdmaTransport;
use te_rdma::sys::SystemVerbs;
use te_rdma::verbs::{QpHandle, QpStep, Verbs as _};

/// Queue pairs that a transport makes for other purposes than those it counts (the proof of a GID).
const UNCOUNTED: u64 = 64;

/// An RDMA rail that obeys its owner and one button.
pub(crate) struct Saboteur {
    rail: RdmaTransport<SystemVerbs>,
    pressed: Arc<AtomicU32>,
    obeyed: u32,
}

impl Saboteur {
    /// Each time `pressed` counts up, every queue pair of `rail` goes to error at its next poll.
    pub(crate) fn new(rail: RdmaTransport<SystemVerbs>, pressed: Arc<AtomicU32>) -> Self {
        Self { rail, pressed, obeyed: 0 }
    }

    fn obey(&mut self) {
        let pressed = self.pressed.load(Ordering::Relaxed);
        if pressed == self.obeyed {
            return;
        }
        self.obeyed = pressed;
        let stats = self.rail.stats();
        let verbs = self.rail.provider();
        for handle in 0..stats.qps_made + stats.peer_qps_made + UNCOUNTED {
            // Handles count up and are not used again: many are gone.
            let _ = verbs.modify_qp(QpHandle(handle), QpStep::Error);
        }
    }
}

impl Memory for Saboteur {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.rail.register(id, span, access) }
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.rail.deregister(id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.rail.export(id, out)
    }

    fn attach(&mut self, id: SegmentId, blob: &[u8]) -> Result<(), Error> {
        self.rail.attach(id, blob)
    }

    fn detach(&mut self, id: SegmentId) -> Result<(), Error> {
        self.rail.detach(id)
    }
}

impl Transport for Saboteur {
    fn name(&self) -> &'static str {
        self.rail.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.rail.capabilities()
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        self.rail.submit(batch)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.obey();
        self.rail.poll(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.rail.poll_at()
    }

    fn event_source(&self) -> Option<EventSource> {
        self.rail.event_source()
    }

    fn activity(&self) -> u64 {
        self.rail.activity()
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.rail.cancel(token)
    }

    fn fence(&mut self, token: Token, segment: SegmentId) -> Result<(), Error> {
        self.rail.fence(token, segment)
    }
}
