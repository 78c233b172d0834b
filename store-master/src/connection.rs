//! One RPC connection: bytes in, frames to the handler, bytes out.
//!
//! Nothing here blocks. A connection is *pumped* when its socket may have bytes and its turn has come: it
//! reads the bytes that have arrived, passes complete frames on for as long as the turn lasts, and writes all
//! answers of that turn with one call. A peer that does not read its answers is write-blocked: its requests
//! are not read while `backlog_bytes_max` of answers wait.
//!
//! The clock is read after bytes were read and before their frames are handled, so that a lease begins after
//! its request had been sent; and again after anything that may have taken long.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};
use store_core::command_log::Lsn;
use store_core::wire::{Frame, FrameBuffer, FrameWriter, Header, WireError};
use store_core::{CHALLENGE_BYTES, Kind, Peer, Session};

use crate::held::Held;
use crate::places::{Source, Standing};
use crate::turns::{Account, Class, Ticket};

/// Room for each read from the socket, bytes.
const READ_BYTES: usize = 64 << 10;
/// How much a peer that keeps the master waiting must transfer before `stall_ms_max` has passed, bytes.
const PROGRESS_BYTES: usize = 64 << 10;
/// Frames up to this length are read even when all connections together have reached their limit, bytes.
const STARVED_BYTES_MAX: usize = 16 << 10;
/// Most bytes of one connection that are read before others get their turn.
const ROUND_BYTES_MAX: usize = 256 << 10;
/// Longest body of a short request, bytes: some hundred keys.
const SHORT_BYTES_MAX: usize = 4 << 10;
/// Bytes of requests and answers after which the clock is read again.
const CLOCK_BYTES: usize = 4 << 10;
/// Capacity that an empty output buffer keeps, bytes.
const KEEP_BYTES_MAX: usize = 256 << 10;
/// Most bytes of a broken connection that are read and dropped, so that the peer receives the reason instead
/// of a reset.
const DISCARD_BYTES_MAX: usize = 16 << 20;

/// Answers requests.
pub(crate) trait Handler {
    /// Reads the clock. Requests that follow are handled at this time.
    fn clock(&mut self) -> Instant;
    /// Answers one frame of a peer from `source` by appending to `out`; some frames have no answer.
    fn frame(
        &mut self,
        session: &mut Session,
        source: Source,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Verdict;
    /// A frame was invalid; the connection is closed after an answer with the reason.
    fn broken(&mut self, error: WireError);
    /// The last command that the latest answer depends on: it is sent when that is confirmed.
    fn depends_on(&self) -> Lsn;
    /// Every command up to this one is confirmed at this moment; `None`: no answer may be sent.
    fn confirmed(&mut self) -> Option<Lsn>;
    /// The same as far as it is certain without looking.
    fn surely_confirmed(&self) -> Option<Lsn>;
    /// A turn is over and took this long.
    fn turn_ended(&mut self, took: Duration);
    /// A connection is closed.
    fn left(&mut self, session: Session);
}

/// What happens to a connection after a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Answered,
    /// The frame was not examined, and nothing of this connection is until this time.
    Later(Instant),
    /// No further requests are accepted.
    Last,
}

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handled {
    /// Every complete frame was handled.
    All,
    /// The time is over, or too many answers wait.
    Some,
    /// The connection is muted for now.
    Muted,
}

/// Limits of a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnLimits {
    /// Its length. A request that has begun is finished.
    pub(crate) turn: Duration,
    pub(crate) backlog_bytes_max: usize,
    /// Whether long frames are read, and several answers may wait.
    pub(crate) may_buffer: bool,
}

/// A connected socket of either kind.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// What to do with a connection after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pumped {
    /// Wait until its socket is ready.
    Idle,
    /// Give it another turn: it has more requests.
    More,
    /// Drop it.
    Closed,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    session: Session,
    source: Source,
    since: Instant,
    /// When a complete request was last handled.
    heard: Instant,
    input: FrameBuffer,
    out: Vec<u8>,
    /// Bytes of `out` that have been written.
    out_written: usize,
    held: Held,
    readable: bool,
    writable: bool,
    state: State,
    pub(crate) account: Account,
    /// Its ticket while it waits for a turn.
    pub(crate) waits: Option<Ticket>,
    /// Until when nothing of this connection is examined, because its source sent too many wrong proofs.
    muted_until: Option<Instant>,
    /// Whether it is not read from because all connections together have reached their limit.
    starved: bool,
    /// Whether the peer has closed its side, or is gone. Bytes that it sent before may still be read.
    ended: bool,
    /// When a frame was last begun or finished, the last byte of the answers was written, or `PROGRESS_BYTES`
    /// were transferred.
    last_progress: Instant,
    /// Bytes transferred since then in both directions.
    moved: usize,
    /// When the incomplete frame was begun, or the frame before it finished.
    frame_since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// No more requests are accepted; the answers in `out` are sent, then `Discarding`.
    Closing,
    /// This side is shut; bytes of the peer are dropped until it closes, too.
    Discarding {
        bytes: usize,
    },
}

impl Connection {
    pub(crate) fn new(stream: Stream, peer: Peer, source: Source, now: Instant) -> Self {
        Self {
            stream,
            session: Session::new(peer, challenge()),
            source,
            since: now,
            heard: now,
            input: FrameBuffer::new(),
            out: Vec::new(),
            out_written: 0,
            held: Held::default(),
            readable: true,
            writable: true,
            state: State::Open,
            account: Account::default(),
            waits: None,
            muted_until: None,
            starved: false,
            ended: false,
            last_progress: now,
            moved: 0,
            frame_since: now,
        }
    }

    pub(crate) fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        match &mut self.stream {
            Stream::Tcp(stream) => registry.register(stream, token, interest),
            Stream::Unix(stream) => registry.register(stream, token, interest),
        }
    }

    /// Records an event of the poller.
    pub(crate) fn ready(&mut self, readable: bool, writable: bool, ended: bool) {
        self.readable |= readable || ended;
        self.writable |= writable || ended;
        self.ended |= ended;
    }

    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// When it was accepted.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// When a complete request was last handled, or else when it was accepted.
    pub(crate) fn heard(&self) -> Instant {
        self.heard
    }

    /// Whether it is muted now.
    fn is_muted(&self, now: Instant) -> bool {
        self.muted_until.is_some_and(|until| now < until)
    }

    /// Whether its mute has ended; returns `true` once.
    pub(crate) fn may_speak_again(&mut self, now: Instant) -> bool {
        self.muted_until.take_if(|until| *until <= now).is_some()
    }

    /// Whether it has sent no complete request yet.
    pub(crate) fn is_new(&self) -> bool {
        !self.account.is_known()
    }

    /// How worthy of a place it is when places are few.
    pub(crate) fn standing(&self) -> Standing {
        if self.is_new() || self.muted_until.is_some() {
            Standing::New
        } else if self.session.is_node() || self.session.is_admin() || self.source == Source::Unix {
            Standing::Kept
        } else if self.session.holds() {
            Standing::Holder
        } else {
            Standing::Guest
        }
    }

    pub(crate) fn into_session(self) -> Session {
        self.session
    }

    /// The state that the master keeps for it.
    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Whether it has answers that wait to be confirmed. Returns `true` once until [`Self::look_again`].
    pub(crate) fn begins_to_hold(&mut self) -> bool {
        self.held.begins_to_hold()
    }

    /// More is confirmed.
    pub(crate) fn look_again(&mut self) {
        self.held.look_again();
    }

    /// Answers that wait to be confirmed.
    pub(crate) fn held(&self) -> usize {
        self.held.answers()
    }

    /// Answers that wait to be written, bytes.
    pub(crate) fn backlog_bytes(&self) -> usize {
        self.out.len() - self.out_written
    }

    /// Since when it has completed no frame.
    pub(crate) fn frame_since(&self) -> Instant {
        self.frame_since
    }

    /// Memory of its buffers, bytes.
    pub(crate) fn buffered_bytes(&self) -> usize {
        self.input.memory_bytes() + self.out.capacity()
    }

    /// Whether it is to be pumped again even without an event.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Accepts no further requests; answers are still sent.
    pub(crate) fn close_gracefully(&mut self) {
        if self.state == State::Open {
            self.state = State::Closing;
        }
    }

    /// Whether the peer keeps the master waiting: for the rest of a frame, or for room to write answers.
    pub(crate) fn is_stuck(&self) -> bool {
        let unread = self.backlog_bytes() > 0 && self.held.is_empty();
        self.input.pending_bytes() > 0 || unread || self.state != State::Open
    }

    pub(crate) fn last_progress(&self) -> Instant {
        self.last_progress
    }

    /// Frees buffers that one large message made large.
    pub(crate) fn shrink(&mut self) {
        if self.input.pending_bytes() == 0 {
            self.input = FrameBuffer::new();
        }
        if self.out.is_empty() {
            self.out = Vec::new();
        }
    }

    /// The class of its next request, as far as it has been read.
    pub(crate) fn class(&self) -> Class {
        match self.input.peek_frame() {
            Ok(Some((frame, _))) if is_long(&frame) => Class::Long,
            _ if self.session.is_node() => Class::Node,
            _ => Class::Short,
        }
    }

    /// One turn: reads, handles, writes. `now` is the latest reading of the handler's clock.
    pub(crate) fn pump(
        &mut self,
        mut now: Instant,
        class: Class,
        limits: &TurnLimits,
        handler: &mut impl Handler,
    ) -> Pumped {
        // The end of an ended connection has to be found; no more than a socket buffer precedes it.
        let may_buffer = limits.may_buffer || self.ended;
        let backlog_bytes_max = if may_buffer { limits.backlog_bytes_max } else { 1 };
        let end = now + limits.turn;
        let mut round_bytes = 0;
        let mut more = false;
        self.starved = false;
        while self.state == State::Open {
            let handled = self.handle_frames(&mut now, end, class, backlog_bytes_max, handler);
            if handled == Handled::Some || (handled == Handled::All && round_bytes >= ROUND_BYTES_MAX) {
                more = true;
                break;
            }
            if handled == Handled::Muted || self.state != State::Open || !self.readable {
                break;
            }
            if !may_buffer && self.input.pending_bytes() > STARVED_BYTES_MAX {
                self.starved = true;
                break;
            }
            let begins = self.input.pending_bytes() == 0;
            match self.read() {
                Ok(0) => return self.peer_closed(handler.confirmed()),
                Ok(len) => {
                    // Read after the bytes: the process may have been stopped meanwhile.
                    now = handler.clock();
                    round_bytes += len;
                    self.moved(now, len, begins);
                    if begins {
                        self.frame_since = now;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return Pumped::Closed,
            }
        }
        if self.flush(now, handler.confirmed()).is_err() {
            return Pumped::Closed;
        }
        let backlogged = self.backlog_bytes() >= backlog_bytes_max;
        match self.state {
            // A write-blocked connection waits for its socket, not for a turn.
            State::Open if more && !backlogged => Pumped::More,
            State::Open => Pumped::Idle,
            State::Closing | State::Discarding { .. } => self.finish(),
        }
    }

    fn handle_frames(
        &mut self,
        now: &mut Instant,
        end: Instant,
        class: Class,
        backlog_bytes_max: usize,
        handler: &mut impl Handler,
    ) -> Handled {
        if self.is_muted(*now) {
            if self.ended {
                // The peer does not wait for the answer, and other connections of its source wait to be
                // examined.
                self.state = State::Closing;
            }
            return Handled::Muted;
        }
        let mut unclocked = 0;
        while self.out.len() - self.out_written < backlog_bytes_max {
            match self.input.peek_frame() {
                Ok(Some((frame, len))) => {
                    let long = is_long(&frame);
                    if long && class != Class::Long {
                        return Handled::Some;
                    }
                    let before = self.out.len();
                    match handler.frame(&mut self.session, self.source, &frame, &mut self.out) {
                        Verdict::Answered => {}
                        Verdict::Later(at) => {
                            self.muted_until = Some(at);
                            return Handled::Muted;
                        }
                        Verdict::Last => self.state = State::Closing,
                    }
                    let (depends_on, confirmed) = (handler.depends_on(), handler.surely_confirmed());
                    self.held.add(before, self.out.len(), depends_on, confirmed);
                    unclocked += len + self.out.len() - before;
                    self.input.consume(len);
                    self.account.is_known_now();
                    self.heard = *now;
                    (self.last_progress, self.moved, self.frame_since) = (*now, 0, *now);
                    if self.state != State::Open {
                        return Handled::All;
                    }
                    if long || unclocked >= CLOCK_BYTES {
                        unclocked = 0;
                        *now = handler.clock();
                        if *now >= end {
                            return Handled::Some;
                        }
                    }
                }
                Ok(None) => return Handled::All,
                Err(error) => {
                    handler.broken(error);
                    let before = self.out.len();
                    answer_broken(error, &mut self.out);
                    self.held.add(before, self.out.len(), 0, Some(0));
                    self.state = State::Closing;
                    return Handled::All;
                }
            }
        }
        Handled::Some
    }

    /// Records progress. Single bytes do not count as progress, or else a peer could keep an incomplete frame
    /// without limit.
    fn moved(&mut self, now: Instant, bytes: usize, begins_or_ends: bool) {
        self.moved += bytes;
        if begins_or_ends || self.moved >= PROGRESS_BYTES {
            (self.last_progress, self.moved) = (now, 0);
        }
    }

    fn read(&mut self) -> io::Result<usize> {
        let room = self.input.spare_mut(READ_BYTES);
        let asked = room.len();
        let result = loop {
            match self.stream.read(room) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        match &result {
            Ok(len) => {
                self.input.filled(*len);
                // A read that returned less than requested has drained the socket; the next edge reports
                // further bytes. The end of the stream is the exception: its edge may have been the same one.
                self.readable = *len == asked || *len == 0 || self.ended;
            }
            Err(_) => self.readable = false,
        }
        result
    }

    /// Answers are still sent to a peer that shut only its sending side.
    fn peer_closed(&mut self, confirmed: Option<Lsn>) -> Pumped {
        self.readable = false;
        if self.backlog_bytes() == 0 {
            return Pumped::Closed;
        }
        self.state = State::Discarding { bytes: DISCARD_BYTES_MAX };
        let gone = self.flush(self.last_progress, confirmed).is_err();
        if gone || self.backlog_bytes() == 0 { Pumped::Closed } else { Pumped::Idle }
    }

    fn flush(&mut self, now: Instant, confirmed: Option<Lsn>) -> io::Result<()> {
        let end = self.held.begins(confirmed).unwrap_or(self.out.len());
        while self.writable && self.out_written < end {
            match self.stream.write(&self.out[self.out_written..end]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => {
                    self.out_written += len;
                    self.moved(now, len, self.out_written == end);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.out_written == self.out.len() {
            self.out.clear();
            self.out_written = 0;
            self.out.shrink_to(KEEP_BYTES_MAX);
        }
        Ok(())
    }

    /// Ends a connection from this side: sends the last answer, shuts this side, and drops the rest of the
    /// peer's bytes.
    fn finish(&mut self) -> Pumped {
        if self.backlog_bytes() > 0 {
            return Pumped::Idle;
        }
        if self.state == State::Closing {
            let shut = match &self.stream {
                Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
                Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
            };
            if shut.is_err() {
                return Pumped::Closed;
            }
            self.input = FrameBuffer::new();
            self.state = State::Discarding { bytes: 0 };
        }
        let mut scrap = [0; 4096];
        while let State::Discarding { bytes } = self.state {
            if bytes >= DISCARD_BYTES_MAX {
                return Pumped::Closed;
            }
            match self.stream.read(&mut scrap) {
                Ok(0) => return Pumped::Closed,
                Ok(len) => self.state = State::Discarding { bytes: bytes + len },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Pumped::Idle,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Pumped::Closed,
            }
        }
        Pumped::Idle
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buf),
            Self::Unix(stream) => stream.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(buf),
            Self::Unix(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// 32 random bytes.
fn challenge() -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    #[expect(clippy::expect_used, reason = "a system without random numbers cannot keep a secret")]
    getrandom::fill(&mut bytes).expect("the system provides random numbers");
    bytes
}

/// Whether a request may take long, judged by its header and its length.
fn is_long(frame: &Frame<'_>) -> bool {
    let short = matches!(
        Kind::from_byte(frame.header.kind),
        Some(
            Kind::Hello
                | Kind::Beat
                | Kind::PutStart
                | Kind::PutEnd
                | Kind::PutRevoke
                | Kind::Get
                | Kind::Exists
                | Kind::Remove
                | Kind::FetchTasks
                | Kind::EndTasks
                | Kind::ReportReplicas
                | Kind::ReturnLeases
                | Kind::ReportSegments
                | Kind::FetchExpulsions
                | Kind::EndExpulsions
        ) | None
    );
    !short || frame.body.len() > SHORT_BYTES_MAX
}

/// The last frame on a broken connection: its status is the reason.
fn answer_broken(error: WireError, out: &mut Vec<u8>) {
    let (kind, request_id) = match error {
        WireError::Version { request_id, kind, .. } => (kind, request_id),
        _ => (0, 0),
    };
    answer_status(kind, request_id, error.code(), out);
}

/// A response without a body.
pub(crate) fn answer_status(kind: u8, request_id: u64, code: store_core::ErrorCode, out: &mut Vec<u8>) {
    let header = Header { kind, response: true, request_id, status: code.code() };
    // An empty body never exceeds the limit.
    let _ = FrameWriter::begin(out, &header).finish();
}
