//! One connection: what waits to be sent, and where received bytes go. It handles bytes without knowing their
//! meaning: frames are written and parsed by `initiator` and `target`.
//!
//! ```text
//!   frames ──▶ heads (byte ring) ─┐
//!                                 ├─▶ items ──▶ one sendmsg for up to 1,024 of them         outbox
//!   registered memory ────────────┘
//!
//!   one readv ──▶ [rest of the announced payloads: registered memory][buffer: the heads that follow]   inbox
//! ```
//!
//! Payloads are announced by the head before them, so their bytes go from the socket straight to their
//! destination. Only payload bytes that arrive in the same read as a head pass through the buffer.

mod inbox;
mod name;
mod outbox;
#[cfg(feature = "uring")]
pub(crate) mod shared_receive;

pub(crate) use inbox::{Destination, Inbox, Reading, Received};
pub(crate) use name::{ConnectionName, OwnName, PeerName};
pub(crate) use outbox::{Outbox, Progress, Source};

use te_core::Instant;
use te_fabric::Interest;

use crate::sys::Socket;

/// One connection. `R` is the state that its side adds: the initiator's or the target's.
#[derive(Debug)]
pub(crate) struct Connection<R> {
    pub(crate) socket: Socket,
    /// The identifier that events of this connection carry.
    pub(crate) name: u64,
    pub(crate) outbox: Outbox,
    pub(crate) inbox: Inbox,
    /// The socket took fewer bytes than it was offered: nothing is sent until it is writable again.
    pub(crate) blocked: bool,
    /// The connection is not read, because there would be no room for the answers.
    pub(crate) paused: bool,
    /// The peer has finished sending: the end of the stream follows what is left in the socket, and the
    /// poller reports no further change.
    pub(crate) finished: bool,
    /// Reads that are still made without asking the poller whether the socket is readable. A read that finds
    /// nothing uses one up.
    pub(crate) eager_reads: u16,
    /// The interest that the poller currently has for this connection.
    pub(crate) interest: Interest,
    /// When the connection is closed if what it waits for has not happened: the end of the handshake, or the
    /// sending of its last frame.
    pub(crate) deadline: Option<Instant>,
    pub(crate) role: R,
}

impl<R> Connection<R> {
    /// A connection whose events carry `name`. The poller watches it for `interest`.
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

    /// A read without asking the poller first has found nothing, or would have.
    pub(crate) const fn read_nothing(&mut self) {
        self.eager_reads = self.eager_reads.saturating_sub(1);
    }
}
