//! The initiator's side of a connection: its handshake, and the pieces on it that have no answer yet.

use std::collections::VecDeque;

use te_core::{Error, ErrorKind, Op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::connection::{Connection, Progress, Source};
use crate::frame::{ENTRIES_MAX, Header, Hello, Kind, MAGIC, Status, VERSION};
use crate::operation::{Piece, Stage};

/// Pieces without an answer that one connection may have.
const PIECES_MAX: usize = 1_024;
/// A connection takes further WRITEs while fewer bytes than this wait for its socket. What is not framed yet
/// can still be taken back.
const UNSENT_BYTES_MAX: u64 = 2 << 20;
/// Window within one host: a short queue stays in the processor's caches, and there is no delay to fill.
const WINDOW_BYTES_SAME_HOST: u32 = 2 << 20;
/// Window between hosts: enough for 100 Gbit/s over half a millisecond.
const WINDOW_BYTES_ELSEWHERE: u32 = 8 << 20;

/// What the HELLO of each connection says about this transport.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greeting {
    /// Random, one for each transport.
    pub(crate) session: u64,
    pub(crate) incarnation: u64,
    pub(crate) identity: u64,
}

/// State of a connection's handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Connecting,
    Greeting,
    Live,
}

/// Why a connection ended, and what follows for its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// The connection broke, or the peer closed it.
    Lost(Error),
    /// The target refused the handshake.
    Refused(Error),
    /// The target closes the connection to make room for another one. It has answered everything that it
    /// accepted.
    GoAway,
}

impl ConnectionEnd {
    /// The target broke the protocol.
    pub(super) const PROTOCOL: Self = Self::Lost(Error::new(ErrorKind::Protocol));

    pub(super) const fn error(self) -> Error {
        match self {
            Self::Lost(error) | Self::Refused(error) => error,
            Self::GoAway => Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET),
        }
    }
}

/// A connection that this transport opened.
pub(super) type OwnConnection = Connection<Own>;

/// The initiator's side of a connection.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) peer: u32,
    /// The connection's number among those to the same peer.
    pub(super) number: u8,
    /// The number of the peer's address that it is connected to.
    pub(super) address: u8,
    pub(super) generation: u32,
    pub(super) phase: Phase,
    /// Pieces without an answer, in the order in which the answers will arrive.
    pieces: VecDeque<Piece>,
    /// Sequence number of the first of these pieces.
    first: u64,
    /// Bytes of these pieces.
    outstanding: u64,
    /// The connection takes further pieces while `outstanding` is below this, bytes.
    window: u64,
    /// A PING has no answer yet.
    pinged: bool,
    /// Bytes that the peer's kernel had not acknowledged at the last check.
    unacknowledged: u64,
}

impl Own {
    /// Connection `number` to a peer, towards the peer's address number `address`.
    pub(super) fn new(peer: u32, number: u8, address: u8, generation: u32) -> Self {
        Self {
            peer,
            number,
            address,
            generation,
            phase: Phase::Connecting,
            pieces: VecDeque::with_capacity(PIECES_MAX),
            first: 0,
            outstanding: 0,
            window: 0,
            pinged: false,
            unacknowledged: 0,
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.phase == Phase::Live
    }

    /// Whether the TCP connection is established, so that it can be read and written.
    pub(super) fn is_up(&self) -> bool {
        self.phase != Phase::Connecting
    }

    /// Whether an answer of any kind is due.
    pub(super) fn is_awaited(&self) -> bool {
        !self.pieces.is_empty() || self.phase != Phase::Live || self.pinged
    }

    /// Pieces without an answer, the oldest first.
    pub(super) const fn pieces(&self) -> &VecDeque<Piece> {
        &self.pieces
    }

    /// Sequence number of the oldest piece without an answer.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }

    /// Sequence number of the piece that is framed next.
    pub(super) fn next(&self) -> u64 {
        self.first + self.pieces.len() as u64
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.outstanding += u64::from(piece.len);
        self.pieces.push_back(piece);
    }

    /// The pieces from sequence number `seq` on.
    pub(super) fn pieces_from(&mut self, seq: u64) -> impl Iterator<Item = &mut Piece> {
        self.pieces.range_mut((seq - self.first) as usize..)
    }

    /// Removes the oldest piece, which has its answer.
    pub(super) fn pop(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_front()?;
        self.first += 1;
        self.outstanding -= u64::from(piece.len);
        Some(piece)
    }

    /// Notes how much of a payload has been sent.
    pub(super) fn progress(&mut self, source: Source, progress: Progress) {
        if let Source::Piece(seq) = source
            && let Some(piece) = self.pieces.get_mut(seq.wrapping_sub(self.first) as usize)
        {
            piece.stage = match progress {
                Progress::Started => Stage::Started,
                Progress::Finished => Stage::Sent,
            };
        }
    }

    /// The PING was answered.
    pub(super) const fn ponged(&mut self) {
        self.pinged = false;
    }
}

impl OwnConnection {
    /// Whether there is room for another frame of this kind.
    pub(super) fn takes(&self, op: Op) -> bool {
        self.role.outstanding < self.role.window
            && (op == Op::Read || self.outbox.queued() < UNSENT_BYTES_MAX)
            && self.role.phase == Phase::Live
            && self.role.pieces.len() + ENTRIES_MAX <= PIECES_MAX
            && self.outbox.has_room(ENTRIES_MAX)
    }

    /// Bytes on this connection that have no answer.
    pub(super) const fn load(&self) -> u64 {
        self.role.outstanding
    }

    /// Begins the handshake with the incarnation `target`. The TCP connection is established.
    pub(super) fn greet(&mut self, us: &Greeting, target: u64, same_host: bool, window: Option<u32>) {
        let fitting = if same_host { WINDOW_BYTES_SAME_HOST } else { WINDOW_BYTES_ELSEWHERE };
        self.role.window = u64::from(window.unwrap_or(fitting));
        let hello = Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            connection: U16::new(u16::from(self.role.number)),
            connection_generation: U32::new(self.role.generation),
            session: U64::new(us.session),
            initiator: U64::new(us.incarnation),
            target: U64::new(target),
            identity: U64::new(us.identity),
        };
        self.outbox.push_head(&[hello.as_bytes()]);
        self.role.phase = Phase::Greeting;
    }

    /// Sends a PING unless one is unanswered. Returns true when the peer's kernel has acknowledged bytes
    /// since the last call.
    pub(super) fn keep_alive(&mut self) -> bool {
        let unacknowledged = self.socket.unacknowledged();
        let takes = unacknowledged < self.role.unacknowledged;
        self.role.unacknowledged = unacknowledged;
        if self.role.phase == Phase::Live && !self.role.pinged && self.outbox.has_room(0) {
            self.role.pinged = true;
            self.outbox.push_head(&[Header::new(Kind::Ping, 0, 0, 0).as_bytes()]);
        }
        takes
    }

    /// Makes the connection stop using the memory of the slice in `slot`. Up to `detached_bytes_max` unsent
    /// bytes are copied for that.
    pub(super) fn cut(&mut self, slot: u32, op: Op, detached_bytes_max: u32) -> Cut {
        let Connection { outbox, inbox, role, .. } = self;
        if op == Op::Read {
            inbox.redirect(slot, Status::Ok as u32);
        }
        let first = role.first;
        let (mut detached, mut touched) = (0, false);
        for (i, piece) in role.pieces.iter_mut().enumerate().filter(|(_, piece)| piece.slot == slot) {
            let source = Source::Piece(first + i as u64);
            if piece.stage == Stage::Framed && outbox.is_unsent(piece.entry_at) {
                outbox.void(piece.entry_at, source);
                piece.stage = Stage::Void;
                continue;
            }
            if op == Op::Read {
                continue;
            }
            touched = true;
            detached += outbox.unsent(source);
            if detached > u64::from(detached_bytes_max) {
                return Cut { touched, usable: false };
            }
            if piece.stage != Stage::Sent {
                outbox.detach(source);
                // The copy belongs to the connection and is sent before an answer can arrive.
                piece.stage = Stage::Sent;
            }
        }
        Cut { touched, usable: true }
    }
}

/// What happened to a slice's pieces when a connection stopped using the slice's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Some bytes of a WRITE have been sent, or will be.
    pub(super) touched: bool,
    /// The connection can continue. Otherwise the copy would have exceeded its limit, and the connection must
    /// be closed.
    pub(super) usable: bool,
}
