//! A pair for the conformance suite whose target is in another process.

use super::{Link, Near, Remote};
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

/// How a target elsewhere is started and ended.
pub(crate) trait Elsewhere {
    /// The initiator's type.
    type Transport: Transport;

    /// Starts a target at the address where the one before was; returns the way to it.
    ///
    /// # Errors
    /// It does not start.
    fn start(&mut self) -> Result<TcpStream>;

    /// Ends the target's process, which `link` leads to.
    ///
    /// # Errors
    /// It does not end.
    fn kill(&mut self, link: &Link) -> Result<()>;

    /// The identity that it states to its peers.
    fn identity(transport: &Self::Transport) -> u64;
}

/// An initiator here and a target elsewhere.
pub(crate) struct Apart<E: Elsewhere> {
    initiator: Near<E::Transport>,
    target: Remote,
    link: Rc<RefCell<Link>>,
    elsewhere: E,
    config: EndsConfig,
    clock: WallClock,
}

impl<E: Elsewhere> Apart<E> {
    /// `initiator`, and the target that `stream` leads to.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(
        initiator: E::Transport,
        stream: TcpStream,
        elsewhere: E,
        config: EndsConfig,
    ) -> Result<Self> {
        let link = Rc::new(RefCell::new(Link::new(stream)?));
        let capabilities = initiator.capabilities();
        Ok(Self {
            initiator: Near::new(initiator, Rc::clone(&link)),
            target: Remote::new(Rc::clone(&link), capabilities),
            link,
            elsewhere,
            config,
            clock: WallClock::new(Duration::ZERO),
        })
    }
}

impl<E: Elsewhere> Pair for Apart<E> {
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
        if let Err(error) = self.elsewhere.kill(&self.link.borrow()) {
            panic!("the target does not end: {error:#}");
        }
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        let started = self.elsewhere.start();
        if let Err(error) = started.and_then(|stream| self.link.borrow_mut().renew(stream)) {
            panic!("the target does not come back: {error:#}");
        }
        self.initiator.linked = true;
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // A device goes on; the target's process polls only when the suite asks it to.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        self.link.borrow_mut().sever();
        Hook::Done
    }
}
