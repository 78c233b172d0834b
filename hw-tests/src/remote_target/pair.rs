//! A pair for the conformance suite whose target is in another process.

use super::{Link, RemoteTarget, SyncedInitiator};
use anyhow::Result;
use core::ops::Range;
use core::time::Duration;
use std::cell::RefCell;
use std::net::TcpStream;
use std::rc::Rc;
use te_core::testkit::{Hook, Pair, WallClock};
use te_core::{Instant, Transport};
use te_fabric::Export;
use te_fabric::testkit::EndsConfig;

/// How a target in another process is started and ended.
pub(crate) trait TargetProcess {
    /// The initiator's type.
    type Transport: Transport;

    /// Starts a target at the address of its predecessor; returns the connection to it.
    ///
    /// # Errors
    /// When the target does not start.
    fn start(&mut self) -> Result<TcpStream>;

    /// Ends the target's process, at the other end of `link`.
    ///
    /// # Errors
    /// When the target does not end.
    fn kill(&mut self, link: &Link) -> Result<()>;

    /// The identity that the transport sends to its peers.
    fn identity(transport: &Self::Transport) -> u64;
}

/// An initiator in this process and a target in another.
pub(crate) struct RemotePair<E: TargetProcess> {
    initiator: SyncedInitiator<E::Transport>,
    target: RemoteTarget,
    link: Rc<RefCell<Link>>,
    process: E,
    config: EndsConfig,
    clock: WallClock,
}

impl<E: TargetProcess> RemotePair<E> {
    /// `initiator`, and the target at the other end of `stream`.
    ///
    /// # Errors
    /// When the stream does not accept its options.
    pub(crate) fn new(
        initiator: E::Transport,
        stream: TcpStream,
        process: E,
        config: EndsConfig,
    ) -> Result<Self> {
        let link = Rc::new(RefCell::new(Link::new(stream)?));
        let capabilities = initiator.capabilities();
        Ok(Self {
            initiator: SyncedInitiator::new(initiator, Rc::clone(&link)),
            target: RemoteTarget::new(Rc::clone(&link), capabilities),
            link,
            process,
            config,
            clock: WallClock::new(Duration::ZERO),
        })
    }
}

impl<E: TargetProcess> Pair for RemotePair<E> {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        &mut self.target
    }

    fn tick(&mut self) -> Instant {
        if self.initiator.linked {
            self.link.borrow_mut().sync();
        }
        self.clock.tick()
    }

    fn patience(&self) -> Duration {
        self.config.patience
    }

    fn late_max(&self) -> Duration {
        self.config.late_max
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(E::identity(&self.initiator.transport))
    }

    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        Export::ADDRESSES_AT..export.len()
    }

    fn key_bytes(&self, _export: &[u8]) -> Option<Range<usize>> {
        Some(Export::KEY_AT..Export::KEY_AT + 8)
    }

    fn kill_target(&mut self) -> Hook {
        self.initiator.linked = false;
        if let Err(error) = self.process.kill(&self.link.borrow()) {
            panic!("the target does not end: {error:#}");
        }
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        let started = self.process.start();
        if let Err(error) = started.and_then(|stream| self.link.borrow_mut().renew(stream)) {
            panic!("the target does not start again: {error:#}");
        }
        self.initiator.linked = true;
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // A device works on without polls, and the target's process polls only at the suite's request.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        self.link.borrow_mut().sever();
        Hook::Done
    }
}
