//! Two transports of one process as a pair for the conformance suite.

use core::ops::Range;
use core::time::Duration;

use te_core::testkit::{Hook, Pair, WallClock};
use te_core::{Instant, Transport};

use crate::Export;

/// What a pair needs to know of a network transport beyond the contract. A fabric's tests implement it for a type of theirs.
pub trait Fabric {
    /// The transport.
    type Transport: Transport;

    /// Opens the target anew, at the address where it was.
    fn reopen(&mut self) -> Self::Transport;
    /// The identity that it states to its peers.
    fn identity(transport: &Self::Transport) -> u64;
    /// Closes all its connections.
    fn cut(transport: &mut Self::Transport);
    /// Time has gone on. For fabrics whose devices are simulated.
    fn advance(&mut self, _now: Instant) {}
}

/// How long a pair takes.
#[derive(Clone, Copy, Debug)]
pub struct EndsConfig {
    /// How long the suite waits for something that must happen.
    pub patience: Duration,
    /// How late a write may land whose initiator was cut off.
    pub late_max: Duration,
}

/// An initiator and a target in this process.
#[derive(Debug)]
pub struct Ends<R: Fabric> {
    initiator: R::Transport,
    target: Option<R::Transport>,
    fabric: R,
    config: EndsConfig,
    clock: WallClock,
}

impl<R: Fabric> Ends<R> {
    /// A pair of these.
    #[must_use]
    pub fn new(initiator: R::Transport, target: R::Transport, fabric: R, config: EndsConfig) -> Self {
        Self { initiator, target: Some(target), fabric, config, clock: WallClock::new(Duration::ZERO) }
    }
}

impl<R: Fabric> Pair for Ends<R> {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.target.as_mut().expect("the suite uses no target that it has killed")
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
        // What the system does to the sockets and queue pairs of a killed process.
        self.target = None;
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        self.target = Some(self.fabric.reopen());
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // Nothing but the suite polls it. A device goes on.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        if let Some(target) = &mut self.target {
            R::cut(target);
        }
        Hook::Done
    }
}
