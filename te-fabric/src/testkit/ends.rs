//! Two transports of one process as a pair for the conformance suite.

use core::ops::Range;
use core::time::Duration;
use std::rc::Rc;

use te_core::testkit::{ByPointer, Hook, Pair, PeekPoke, Side, WallClock};
use te_core::{Instant, MemSpan, Transport};

use crate::Export;

/// What a pair needs of a network transport beyond the contract. The tests of a fabric implement it.
pub trait Fabric {
    /// The fabric's transport.
    type Transport: Transport;

    /// Opens the target again, at the address that it had.
    fn reopen(&mut self) -> Self::Transport;
    /// The identity that the transport states to its peers.
    fn identity(transport: &Self::Transport) -> u64;
    /// Closes all connections of the transport.
    fn cut(transport: &mut Self::Transport);
    /// Lets the fabric see the time, for fabrics whose devices are simulated.
    fn advance(&mut self, _now: Instant) {}
}

/// The time limits of a pair.
#[derive(Clone, Copy, Debug)]
pub struct EndsConfig {
    /// How long the suite waits for an event that must happen.
    pub patience: Duration,
    /// How late a write may land after its initiator was cut off.
    pub late_max: Duration,
}

/// Memory of a pair that is not on the heap: that of a device.
pub trait EndsMemory: PeekPoke {
    /// Memory for one side, as [`Pair::allocate`].
    fn allocate(&self, side: Side, bytes: usize) -> Option<MemSpan>;
}

/// An initiator and a target in this process.
pub struct Ends<R: Fabric> {
    initiator: R::Transport,
    target: Option<R::Transport>,
    fabric: R,
    config: EndsConfig,
    clock: WallClock,
    memory: Option<Rc<dyn EndsMemory>>,
}

impl<R: Fabric> Ends<R> {
    /// A pair of these two transports.
    #[must_use]
    pub fn new(initiator: R::Transport, target: R::Transport, fabric: R, config: EndsConfig) -> Self {
        let clock = WallClock::new(Duration::ZERO);
        Self { initiator, target: Some(target), fabric, config, clock, memory: None }
    }

    /// The same pair, with buffers in `memory`.
    #[must_use]
    pub fn with_memory(self, memory: Rc<dyn EndsMemory>) -> Self {
        Self { memory: Some(memory), ..self }
    }
}

impl<R: Fabric> Pair for Ends<R> {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.target.as_mut().expect("the suite does not use a target that it has killed")
    }

    fn tick(&mut self) -> Instant {
        let now = self.clock.tick();
        self.fabric.advance(now);
        now
    }

    fn patience(&self) -> Duration {
        self.config.patience
    }

    fn late_max(&self) -> Duration {
        self.config.late_max
    }

    fn allocate(&mut self, side: Side, bytes: usize) -> Option<MemSpan> {
        self.memory.as_ref()?.allocate(side, bytes)
    }

    fn peek_poke(&self) -> Rc<dyn PeekPoke> {
        match &self.memory {
            Some(memory) => Rc::<dyn EndsMemory>::clone(memory),
            None => Rc::new(ByPointer),
        }
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(R::identity(&self.initiator))
    }

    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        Export::ADDRESSES_AT..export.len()
    }

    fn key_bytes(&self, _export: &[u8]) -> Option<Range<usize>> {
        Some(Export::KEY_AT..Export::KEY_AT + 8)
    }

    fn kill_target(&mut self) -> Hook {
        // The system does the same to the sockets and queue pairs of a killed process.
        self.target = None;
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        self.target = Some(self.fabric.reopen());
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // Only the suite polls the target. A device continues.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        if let Some(target) = &mut self.target {
            R::cut(target);
        }
        Hook::Done
    }
}
