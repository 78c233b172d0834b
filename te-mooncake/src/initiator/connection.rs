//! One data connection to a peer.

use std::net::TcpStream;

use te_core::Instant;
use te_fabric::Interest;

use super::exchange::Exchange;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: TcpStream,
    /// The number of the peer.
    pub(super) peer: u32,
    /// Which address of the peer it leads to.
    pub(super) address: u8,
    pub(super) phase: Phase,
    /// What the poller watches for.
    pub(super) interest: Interest,
    /// When bytes moved last; before that, when it was opened.
    pub(super) moved_at: Instant,
    /// An exchange was completed on it. The peer may close such a connection at any time.
    pub(super) used: bool,
}

#[derive(Debug)]
pub(super) enum Phase {
    Connecting,
    Idle,
    Busy(Exchange),
}

impl Connection {
    pub(super) const fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Idle)
    }

    pub(super) const fn is_connecting(&self) -> bool {
        matches!(self.phase, Phase::Connecting)
    }

    /// What the poller has to watch for.
    pub(super) const fn wanted(&self, wants_write: bool) -> Interest {
        match self.phase {
            Phase::Connecting => Interest::BOTH,
            Phase::Busy(_) if wants_write => Interest::BOTH,
            Phase::Busy(_) | Phase::Idle => Interest::READ,
        }
    }
}
