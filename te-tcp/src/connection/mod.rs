//! One connection: what waits to be sent, and where received bytes go. A connection knows bytes and not what
//! they mean: frames are written and understood by `initiator` and `target`.
//!
//! ```text
//!   frames ──▶ heads (byte ring) ─┐
//!                                 ├─▶ items ──▶ one sendmsg for up to 1,024 of them         outbox
//!   registered memory ────────────┘
//!
//!   one readv ──▶ [rest of the announced payloads: registered memory][stage: the heads that follow]   inbox
//! ```
//!
//! Payloads are announced by the head before them, so their bytes go from the socket to their place without a
//! stop. Only what shares a read with a head passes through the stage.

mod inbox;
mod name;
mod outbox;

pub(crate) use inbox::{Destination, Inbox, Reading, Received};
pub(crate) use name::{ConnectionName, OwnName, PeerName};
pub(crate) use outbox::{Outbox, Progress, Source};

use te_core::Instant;
use te_fabric::Interest;

use crate::sys::Socket;

/// One connection. `R` is what its side keeps beside: the initiator's or the target's.
#[derive(Debug)]
pub(crate) struct Connection<R> {
    pub(crate) socket: Socket,
    /// What its events carry.
    pub(crate) name: u64,
    pub(crate) outbox: Outbox,
    pub(crate) inbox: Inbox,
    /// The socket took less than it was offered; wait until it says that it is writable.
    pub(crate) blocked: bool,
    /// Do not read: what answers would have no room.
    pub(crate) paused: bool,
    /// The peer has finished sending: the end of the stream is behind what is left, and no change will tell
    /// of it.
    pub(crate) finished: bool,
    /// Worth reading without asking first; counts down with each vain attempt.
    pub(crate) eager_reads: u16,
    /// What the poller was told last.
    pub(crate) interest: Interest,
    /// When to give up on what this connection waits for (handshake, last words).
    pub(crate) deadline: Option<Instant>,
    pub(crate) role: R,
}

impl<R> Connection<R> {
    /// A connection whose events carry `name`, and of which the poller is to tell `interest`.
    pub(crate) fn new(socket: Socket, name: u64, interest: Interest, role: R) -> Self {
        Self {
            socket,
            name,
            outbox: Outbox::new(),
            inbox: Inbox::new(),
            blocked: false,
            paused: false,
            finished: false,
            eager_reads: 0,
            interest,
            deadline: None,
            role,
        }
    }

    /// Whether it is worth reading without asking the poller first.
    pub(crate) const fn is_active(&self) -> bool {
        self.eager_reads > 0
    }

    /// Reading it without asking first would have been in vain.
    pub(crate) const fn read_nothing(&mut self) {
        self.eager_reads = self.eager_reads.saturating_sub(1);
    }
}
