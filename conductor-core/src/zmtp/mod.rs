//! ZMTP 3.1, the protocol of ZeroMQ sockets over a byte stream: the subset that engines and stores use to
//! publish events and to replay them. Bytes in, events out; messages in, bytes out.
//!
//! ```text
//!   socket ─ space()/filled() ─▶ input ─▶ next() ─▶ Ready · Message(parts) · Subscribed
//!   socket ◀─ output()/wrote() ─ output ◀─ send(parts) · subscribe(topic)
//!                                  ▲
//!                                tick(now): PING, lost peers
//! ```
//!
//! Spoken are the greeting, the NULL mechanism, SUB, PUB, REQ, DEALER and ROUTER, multipart messages,
//! subscriptions as commands (3.1) and as messages (3.0), and heartbeats. Who connects and who binds makes no
//! difference on the wire. Not spoken: CURVE and PLAIN, UDP, and versions before 3.0.
//!
//! A [`Connection`] is one byte stream. ROUTER sockets have one connection per peer; the caller answers on
//! the connection on which it was asked, so no identity is prepended to a message. REQ and ROUTER put an
//! empty delimiter before the message; here it is an ordinary first part.
//!
//! Source: ZeroMQ RFC 23 (ZMTP 3.0) and 37 (ZMTP 3.1); libzmq 4.3.5.

mod connection;
mod wire;

use core::fmt;
use core::time::Duration;

pub use connection::{Connection, Event, Message, Parts, Sent};
pub use wire::{GREETING_BYTES, greeting, put_message};

/// The kind of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Publishes messages to those that subscribed to them.
    Pub,
    /// Receives what it subscribed to.
    Sub,
    /// Asks, without waiting for the answer to the question before.
    Dealer,
    /// Answers.
    Router,
    /// Asks one question at a time.
    Req,
}

impl Kind {
    /// The name of the kind in READY.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Dealer => "DEALER",
            Self::Router => "ROUTER",
            Self::Req => "REQ",
        }
    }

    /// Whether a socket of this kind may talk to a socket whose READY names `peer`.
    const fn talks_to(self, peer: &[u8]) -> bool {
        match self {
            Self::Pub => matches!(peer, b"SUB" | b"XSUB"),
            Self::Sub => matches!(peer, b"PUB" | b"XPUB"),
            Self::Dealer => matches!(peer, b"DEALER" | b"ROUTER" | b"REP"),
            Self::Router => matches!(peer, b"DEALER" | b"ROUTER" | b"REQ"),
            Self::Req => matches!(peer, b"ROUTER" | b"REP"),
        }
    }

    /// Whether READY carries an identity.
    const fn has_identity(self) -> bool {
        matches!(self, Self::Dealer | Self::Router | Self::Req)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a connection may use, and how it notices that its peer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one part of a message.
    pub part_bytes_max: usize,
    /// Bytes of all parts of a message.
    pub message_bytes_max: usize,
    /// Parts of a message.
    pub parts_max: usize,
    /// Bytes that wait to be written. A message that does not fit is not sent.
    pub output_bytes_max: usize,
    /// Topics to which one peer may subscribe.
    pub subscriptions_max: usize,
    /// The time until the peer's READY has arrived.
    pub handshake_timeout: Duration,
    /// The time between two PINGs; zero for none.
    pub heartbeat_interval: Duration,
    /// The time without a byte of the peer, after a PING, after which it counts as lost.
    pub heartbeat_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            part_bytes_max: 64 << 20,
            message_bytes_max: 64 << 20,
            parts_max: 16,
            output_bytes_max: 64 << 20,
            subscriptions_max: 1_024,
            handshake_timeout: Duration::from_secs(10),
            heartbeat_interval: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(3),
        }
    }
}

/// Why a connection has to be closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The first bytes are not those of ZMTP.
    NotZmtp,
    /// The peer speaks a version before 3.0.
    Version {
        /// The major version of its greeting.
        major: u8,
    },
    /// The peer demands a mechanism other than NULL; its name, up to 20 bytes.
    Mechanism([u8; 20]),
    /// A frame has flags that the protocol does not define, or that do not fit its place.
    Flags(u8),
    /// A part, or all parts of a message, have more bytes than the limit.
    TooLong {
        /// Bytes announced so far.
        bytes: u64,
        /// The limit.
        bytes_max: usize,
    },
    /// A message has more parts than the limit.
    TooManyParts {
        /// The limit.
        parts_max: usize,
    },
    /// A command is cut off or malformed.
    Command(&'static str),
    /// The peer's READY names a kind of socket that does not go with ours.
    Peer {
        /// Our kind.
        ours: Kind,
        /// The first bytes of the kind that it named.
        theirs: [u8; 8],
    },
    /// The peer refused the connection with ERROR.
    Refused,
    /// The peer subscribed to more topics than the limit.
    TooManySubscriptions {
        /// The limit.
        subscriptions_max: usize,
    },
    /// The handshake did not end in time.
    HandshakeTimeout,
    /// The peer sent nothing after a PING.
    Lost,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotZmtp => {
                f.write_str("the peer does not speak ZMTP: check that the port is a ZeroMQ socket")
            }
            Self::Version { major } => {
                write!(f, "the peer speaks ZMTP {major}; 3.0 or later is needed (libzmq 4.0 or later)")
            }
            Self::Mechanism(name) => {
                let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                let name = name[..end].escape_ascii();
                write!(f, "the peer demands the mechanism {name}; only NULL is supported: turn it off there")
            }
            Self::Flags(flags) => write!(f, "a frame has the flags {flags:#04x}, which are not valid here"),
            Self::TooLong { bytes, bytes_max } => {
                write!(
                    f,
                    "a message has {bytes} bytes or more; at most {bytes_max} are accepted: raise the limit"
                )
            }
            Self::TooManyParts { parts_max } => {
                write!(f, "a message has more than {parts_max} parts: raise the limit, or check the peer")
            }
            Self::Command(what) => write!(f, "a command is malformed: {what}"),
            Self::Peer { ours, theirs } => {
                let end = theirs.iter().position(|byte| *byte == 0).unwrap_or(theirs.len());
                let theirs = theirs[..end].escape_ascii();
                write!(f, "the peer is a {theirs} socket, which does not go with {ours}: check the port")
            }
            Self::Refused => f.write_str("the peer refused the connection: see its log"),
            Self::TooManySubscriptions { subscriptions_max } => {
                write!(f, "the peer subscribed to more than {subscriptions_max} topics: raise the limit")
            }
            Self::HandshakeTimeout => {
                f.write_str("the peer did not complete the handshake in time: connect again")
            }
            Self::Lost => f.write_str("the peer sent nothing after a heartbeat: connect again"),
        }
    }
}

impl core::error::Error for Error {}

#[cfg(test)]
mod tests;
