//! One RPC connection: bytes in, frames to the handler, bytes out.
//!
//! Nothing here blocks. A connection is *pumped* when its socket may have something and its turn has come: it reads what is
//! there, hands complete frames on for as long as the turn lasts, and writes all answers of that turn with one call. A peer
//! that does not read its answers is not read from either, once `backlog_bytes_max` of them wait.
//!
//! The clock is read after bytes were read and before their frames are handled, so that what is promised for a time is promised
//! from a moment at which the request had been sent; and again after whatever may have taken long.

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};
use store_core::wire::{Frame, FrameBuffer, FrameWriter, Header, WireError};
use store_core::{CHALLENGE_BYTES, Kind, Peer, Session};

use crate::places::{Source, Standing};
use crate::turns::{Account, Class, Ticket};

/// Bytes asked of the socket at a time.
const READ_BYTES: usize = 64 << 10;
/// A peer that owes us something has to move so much before the master loses patience.
const PROGRESS_BYTES: usize = 64 << 10;
/// Frames up to this length are read whatever all connections hold together.
const STARVED_BYTES_MAX: usize = 16 << 10;
/// Bytes of one connection read before the others get their turn.
const ROUND_BYTES_MAX: usize = 256 << 10;
/// Longest body of a short request, bytes: some hundred keys.
const SHORT_BYTES_MAX: usize = 4 << 10;
/// Requests and answers handled, in bytes, before the clock is read again.
const CLOCK_BYTES: usize = 4 << 10;
/// Capacity that an output buffer keeps when it is empty.
const KEEP_BYTES_MAX: usize = 256 << 10;
/// Bytes of a broken stream that are read and dropped, so that the peer sees why rather than a reset.
const DISCARD_BYTES_MAX: usize = 16 << 20;

/// What answers requests.
pub(crate) trait Handler {
    /// Reads the clock; what is handled from now on is handled at this time.
    fn clock(&mut self) -> Instant;
    /// Answers one frame of somebody from `source` by appending to `out`; a frame may need no answer.
    fn frame(
        &mut self,
        session: &mut Session,
        source: Source,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Verdict;
    /// A stream is broken; the connection closes after an answer that says so.
    fn broken(&mut self, error: WireError);
    /// A turn is over and took so long.
    fn turn_ended(&mut self, took: Duration);
    /// A connection is gone.
    fn left(&mut self, session: Session);
}

/// What becomes of a connection after a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Answered,
    /// The frame was not looked at, and nothing of this connection is before then.
    Later(Instant),
    /// No more requests are taken.
    Last,
}

/// How far a turn came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handled {
    /// Every complete frame is handled.
    All,
    /// The turn is over, or too many answers wait.
    Some,
    /// It is not listened to for now.
    Muted,
}

/// What a turn is held to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnLimits {
    /// How long it lasts. One request more may begin before it is over.
    pub(crate) turn: Duration,
    pub(crate) backlog_bytes_max: usize,
    /// Whether long frames are read, and answers need not wait for one another.
    pub(crate) may_buffer: bool,
}

/// A connected socket of either kind.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// What a pump left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pumped {
    /// Wait for the socket.
    Idle,
    /// Its turn is over, but there is more: pump again soon.
    More,
    /// Over; drop it.
    Closed,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    session: Session,
    source: Source,
    since: Instant,
    /// When a whole request was handled last.
    heard: Instant,
    input: FrameBuffer,
    out: Vec<u8>,
    /// Bytes of `out` that are written.
    out_written: usize,
    readable: bool,
    writable: bool,
    state: State,
    pub(crate) account: Account,
    /// Its place in the line of those that wait for a turn, if it does.
    pub(crate) waits: Option<Ticket>,
    /// Its source was wrong too often: nothing of it is looked at before.
    muted_until: Option<Instant>,
    /// Not read from, because all connections together hold too much.
    starved: bool,
    /// The peer closed its side, or is gone. What it sent before may still be read.
    ended: bool,
    /// When a frame was last begun or finished, answers were taken to the last byte, or much moved.
    last_progress: Instant,
    /// Bytes that moved since then, either way.
    moved: usize,
    /// When the frame that is read was begun, or the one before it finished.
    frame_since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// No more requests are taken; what is in `out` goes out, then `Discarding`.
    Closing,
    /// Our side is shut; what the peer still sends is dropped until it closes, too.
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

    /// The poll says so.
    pub(crate) fn ready(&mut self, readable: bool, writable: bool, ended: bool) {
        self.readable |= readable || ended;
        self.writable |= writable || ended;
        self.ended |= ended;
    }

    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Since when it has been there.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// When a whole request was handled last; at the beginning, when it came.
    pub(crate) fn heard(&self) -> Instant {
        self.heard
    }

    /// Whether it is not listened to for now.
    fn is_muted(&self, now: Instant) -> bool {
        self.muted_until.is_some_and(|until| now < until)
    }

    /// Whether that is over, once.
    pub(crate) fn may_speak_again(&mut self, now: Instant) -> bool {
        self.muted_until.take_if(|until| *until <= now).is_some()
    }

    /// Whether it has brought no whole request yet.
    pub(crate) fn is_new(&self) -> bool {
        !self.account.is_known()
    }

    /// What speaks for it when places are few.
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

    /// Answers that wait to be written, bytes.
    pub(crate) fn backlog_bytes(&self) -> usize {
        self.out.len() - self.out_written
    }

    /// Since when it has not brought a whole frame.
    pub(crate) fn frame_since(&self) -> Instant {
        self.frame_since
    }

    /// Memory that it holds, bytes.
    pub(crate) fn buffered_bytes(&self) -> usize {
        self.input.memory_bytes() + self.out.capacity()
    }

    /// Whether it is to be pumped again although its socket says nothing new.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Takes no further requests; what is answered already still goes out.
    pub(crate) fn close_gracefully(&mut self) {
        if self.state == State::Open {
            self.state = State::Closing;
        }
    }

    /// Whether the peer owes us something: the rest of a frame, or room for its answers.
    pub(crate) fn is_stuck(&self) -> bool {
        self.input.pending_bytes() > 0 || self.backlog_bytes() > 0 || self.state != State::Open
    }

    pub(crate) fn last_progress(&self) -> Instant {
        self.last_progress
    }

    /// Gives back buffers that one large message made large.
    pub(crate) fn shrink(&mut self) {
        if self.input.pending_bytes() == 0 {
            self.input = FrameBuffer::new();
        }
        if self.out.is_empty() {
            self.out = Vec::new();
        }
    }

    /// What it waits with, as far as it has been read.
    pub(crate) fn class(&self) -> Class {
        match self.input.peek_frame() {
            Ok(Some((frame, _))) if is_long(&frame) => Class::Long,
            _ if self.session.is_node() => Class::Node,
            _ => Class::Short,
        }
    }

    /// One turn: reads, handles, writes. `now` is what the handler's clock said last.
    pub(crate) fn pump(
        &mut self,
        mut now: Instant,
        class: Class,
        limits: &TurnLimits,
        handler: &mut impl Handler,
    ) -> Pumped {
        // The end has to be found; what comes before it is no more than a socket holds.
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
                Ok(0) => return self.peer_closed(),
                Ok(len) => {
                    // Not before: the process may have been stopped since.
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
        if self.flush(now).is_err() {
            return Pumped::Closed;
        }
        let backlogged = self.backlog_bytes() >= backlog_bytes_max;
        match self.state {
            // Whoever is backlogged waits for the socket to take something, not for its turn.
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
                // Nobody waits for the answer, and others of its source wait for their turn.
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
                    answer_broken(error, &mut self.out);
                    self.state = State::Closing;
                    return Handled::All;
                }
            }
        }
        Handled::Some
    }

    /// Bytes that come one by one are no progress, or a peer could owe us the rest of a frame for ever.
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
                // A stream that gave less than was asked is drained; the next edge tells of more.
                // But for its end: that edge may have been the same.
                self.readable = *len == asked || *len == 0 || self.ended;
            }
            Err(_) => self.readable = false,
        }
        result
    }

    /// Answers of a peer that shut only its sending side still go out.
    fn peer_closed(&mut self) -> Pumped {
        self.readable = false;
        if self.backlog_bytes() == 0 {
            return Pumped::Closed;
        }
        self.state = State::Discarding { bytes: DISCARD_BYTES_MAX };
        let gone = self.flush(self.last_progress).is_err();
        if gone || self.backlog_bytes() == 0 { Pumped::Closed } else { Pumped::Idle }
    }

    fn flush(&mut self, now: Instant) -> io::Result<()> {
        while self.writable && self.out_written < self.out.len() {
            match self.stream.write(&self.out[self.out_written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => {
                    self.out_written += len;
                    self.moved(now, len, self.out_written == self.out.len());
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

    /// The end of a connection that we close: the last answer out, our side shut, the rest of theirs dropped.
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
    getrandom::fill(&mut bytes).expect("the system gives random numbers");
    bytes
}

/// Whether a request may take long, as far as its head tells.
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

/// The last frame on a broken stream: its status says what was wrong with it.
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
    // An empty body is never too long.
    let _ = FrameWriter::begin(out, &header).finish();
}
