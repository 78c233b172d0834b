//! One byte stream of ZMTP, from its greeting on.

use alloc::vec::Vec;
use core::ops::Range;
use core::time::Duration;

use te_core::Instant;

use super::wire::{
    self, COMMAND, CONTEXT_BYTES_MAX, GREETING_BYTES, IDENTITY_BYTES_MAX, MORE, put_command, put_message,
};
use super::{Error, Kind, Limits};

/// Bytes that [`Connection::space`] offers at least.
const READ_BYTES: usize = 64 << 10;
/// Bytes of a buffer that are kept when it is empty; a longer one is given back.
const KEPT_BYTES_MAX: usize = 1 << 20;
/// Bytes of commands and heads of frames that may be buffered beside a message.
const COMMAND_BYTES_MAX: usize = 64 << 10;
/// Bytes of a topic to which a peer subscribes.
const TOPIC_BYTES_MAX: usize = 4 << 10;

/// What the peer sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The handshake has ended: messages may be sent from now on.
    Ready {
        /// The identity that the peer chose; empty when it chose none.
        identity: &'a [u8],
    },
    /// A message is complete.
    Message(Message<'a>),
    /// The peer of a PUB socket subscribed to messages whose first part begins so.
    Subscribed(&'a [u8]),
    /// The peer of a PUB socket took back one such subscription.
    Unsubscribed(&'a [u8]),
}

/// The parts of a message, in the connection's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    bytes: &'a [u8],
    parts: &'a [Range<usize>],
}

impl<'a> Message<'a> {
    /// How many parts it has; not zero.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether it has no parts: never of a message that arrived.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The part at `index`.
    #[must_use]
    pub fn part(&self, index: usize) -> Option<&'a [u8]> {
        self.parts.get(index).and_then(|range| self.bytes.get(range.clone()))
    }

    /// The parts, in order.
    pub fn iter(&self) -> Parts<'a> {
        Parts { message: *self, next: 0 }
    }
}

impl<'a> IntoIterator for Message<'a> {
    type Item = &'a [u8];
    type IntoIter = Parts<'a>;

    fn into_iter(self) -> Parts<'a> {
        self.iter()
    }
}

/// Iterates over the parts of a [`Message`].
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    message: Message<'a>,
    next: usize,
}

impl<'a> Iterator for Parts<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let part = self.message.part(self.next)?;
        self.next += 1;
        Some(part)
    }
}

/// What became of a message that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It waits in [`Connection::output`].
    Queued,
    /// The peer has no subscription that fits; it was not queued.
    NotSubscribed,
    /// It does not fit into the output and was not queued: the peer reads too slowly, or not at all.
    Full,
    /// The handshake has not ended, or a SUB socket was to send; it was not queued.
    NotReady,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Handshake,
    Open,
}

/// What [`Connection::step`] found; ranges of the input buffer.
enum Found {
    Ready,
    Message,
    Subscribed(Range<usize>),
    Unsubscribed(Range<usize>),
}

/// A connection between two sockets. Two of them, back to back:
///
/// ```
/// use conductor_core::zmtp::{Connection, Event, Kind, Limits, Sent};
/// use te_core::Instant;
///
/// let (now, limits) = (Instant::ZERO, Limits::default());
/// let mut publisher = Connection::new(Kind::Pub, limits, b"", now);
/// let mut subscriber = Connection::new(Kind::Sub, limits, b"", now);
/// subscriber.subscribe(b"");
/// let mut received = 0;
/// for round in 0..4 {
///     if round == 2 {
///         assert_eq!(publisher.send(&[b"topic", b"payload"]), Sent::Queued);
///     }
///     for (from, to) in [(0, 1), (1, 0)] {
///         let ends = [&mut publisher, &mut subscriber];
///         let bytes = ends[from].output().to_vec();
///         ends[from].wrote(bytes.len());
///         ends[to].receive(now, &bytes);
///     }
///     while publisher.next().unwrap().is_some() {}
///     while let Some(event) = subscriber.next().unwrap() {
///         if let Event::Message(message) = event {
///             assert_eq!(message.part(1), Some(&b"payload"[..]));
///             received += 1;
///         }
///     }
/// }
/// assert_eq!(received, 1);
/// ```
#[derive(Debug)]
pub struct Connection {
    kind: Kind,
    limits: Limits,
    state: State,
    minor: u8,
    /// All of it may be read into; `start..end` arrived, `start..scanned` is consumed or part of a message.
    input: Vec<u8>,
    start: usize,
    scanned: usize,
    end: usize,
    /// Parts of the message under way, relative to `start`.
    parts: Vec<Range<usize>>,
    part_bytes: usize,
    /// The message in `parts` was handed out.
    taken: bool,
    output: Vec<u8>,
    written: usize,
    /// Of a PUB socket those of the peer, of a SUB socket ours.
    subscriptions: Vec<Vec<u8>>,
    identity: Vec<u8>,
    failed: Option<Error>,
    opened_at: Instant,
    heard_at: Instant,
    ping_at: Instant,
    /// When the first PING was sent after which nothing arrived.
    pinged_at: Option<Instant>,
    /// The peer demands to hear from us, and closes after this time. It also does so for us.
    peer_ttl: Option<Duration>,
}

impl Connection {
    /// A connection that was just opened, by either side. `identity` names a DEALER or REQ socket to its
    /// ROUTER; empty for none, cut at 255 bytes.
    #[must_use]
    pub fn new(kind: Kind, limits: Limits, identity: &[u8], now: Instant) -> Self {
        let mut output = Vec::new();
        output.extend_from_slice(&wire::greeting());
        wire::put_ready(&mut output, kind, &identity[..identity.len().min(IDENTITY_BYTES_MAX)]);
        Self {
            kind,
            limits,
            state: State::Greeting,
            minor: 0,
            input: Vec::new(),
            start: 0,
            scanned: 0,
            end: 0,
            parts: Vec::new(),
            part_bytes: 0,
            taken: false,
            output,
            written: 0,
            subscriptions: Vec::new(),
            identity: Vec::new(),
            failed: None,
            opened_at: now,
            heard_at: now,
            ping_at: now,
            pinged_at: None,
            peer_ttl: None,
        }
    }

    /// The kind of our socket.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the handshake has ended.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// When bytes of the peer arrived last; at first, when the connection was opened.
    #[must_use]
    pub const fn heard_at(&self) -> Instant {
        self.heard_at
    }

    /// Memory for the next bytes of the peer, at least 64 KiB; [`Self::filled`] says how many were read into
    /// it. It overwrites what [`Self::next`] returned. Call [`Self::next`] until it has no event before the
    /// next read, so that no more than one message and one read are buffered.
    pub fn space(&mut self) -> &mut [u8] {
        self.make_room(READ_BYTES);
        &mut self.input[self.end..]
    }

    /// Says that the first `len` bytes of [`Self::space`] arrived at `now`.
    pub fn filled(&mut self, now: Instant, len: usize) {
        self.end = (self.end + len).min(self.input.len());
        if len != 0 {
            self.heard_at = now;
            self.pinged_at = None;
        }
    }

    /// Takes bytes that are already elsewhere in memory.
    pub fn receive(&mut self, now: Instant, bytes: &[u8]) {
        self.make_room(bytes.len());
        self.input[self.end..self.end + bytes.len()].copy_from_slice(bytes);
        self.filled(now, bytes.len());
    }

    /// The next event, or `None` when more bytes are needed. The former event's memory may be reused.
    ///
    /// # Errors
    /// The connection has to be closed. Later calls return the same error.
    #[expect(clippy::should_implement_trait, reason = "an iterator cannot lend its items")]
    pub fn next(&mut self) -> Result<Option<Event<'_>>, Error> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let found = match self.step() {
            Ok(found) => found,
            Err(error) => {
                self.failed = Some(error.clone());
                return Err(error);
            }
        };
        Ok(found.map(|found| match found {
            Found::Ready => Event::Ready { identity: &self.identity },
            Found::Message => {
                Event::Message(Message { bytes: &self.input[self.start..self.scanned], parts: &self.parts })
            }
            Found::Subscribed(topic) => Event::Subscribed(&self.input[topic]),
            Found::Unsubscribed(topic) => Event::Unsubscribed(&self.input[topic]),
        }))
    }

    /// What has to be written to the peer.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        &self.output[self.written..]
    }

    /// Says that the first `len` bytes of [`Self::output`] were written.
    pub fn wrote(&mut self, len: usize) {
        self.written = (self.written + len).min(self.output.len());
        if self.written == self.output.len() {
            self.output.clear();
            self.output.shrink_to(KEPT_BYTES_MAX);
            self.written = 0;
        } else if self.written > self.output.len() / 2 {
            self.output.drain(..self.written);
            self.written = 0;
        }
    }

    /// Sends a message. Of a PUB socket it goes out only when the peer subscribed to its first part.
    pub fn send(&mut self, parts: &[&[u8]]) -> Sent {
        if self.state != State::Open || self.kind == Kind::Sub {
            return Sent::NotReady;
        }
        if self.kind == Kind::Pub && !self.is_subscribed(parts.first().copied().unwrap_or_default()) {
            return Sent::NotSubscribed;
        }
        if self.output().len() + wire::message_bytes(parts) > self.limits.output_bytes_max {
            return Sent::Full;
        }
        put_message(&mut self.output, parts);
        Sent::Queued
    }

    /// Whether the peer of this PUB socket subscribed to a topic that begins `topic`.
    #[must_use]
    pub fn is_subscribed(&self, topic: &[u8]) -> bool {
        self.subscriptions.iter().any(|subscription| topic.starts_with(subscription))
    }

    /// Subscribes to messages whose first part begins with `topic`; all of them when it is empty. May be
    /// called before the handshake has ended.
    pub fn subscribe(&mut self, topic: &[u8]) {
        self.subscriptions.push(topic.to_vec());
        if self.state == State::Open {
            put_subscription(&mut self.output, self.minor, topic);
        }
    }

    /// Sends heartbeats.
    ///
    /// # Errors
    /// [`Error::HandshakeTimeout`] and [`Error::Lost`]: the connection has to be closed.
    pub fn tick(&mut self, now: Instant) -> Result<(), Error> {
        if self.state != State::Open {
            let until = self.opened_at + self.limits.handshake_timeout;
            return if now < until { Ok(()) } else { Err(Error::HandshakeTimeout) };
        }
        let lost = self.pinged_at.is_some_and(|at| now >= at + self.limits.heartbeat_timeout)
            || self.peer_ttl.is_some_and(|ttl| now >= self.heard_at + ttl);
        if lost {
            return Err(Error::Lost);
        }
        if self.sends_pings() && now >= self.ping_at {
            self.ping_at = now + self.limits.heartbeat_interval;
            self.pinged_at.get_or_insert(now);
            let tenths = self.limits.heartbeat_timeout.as_millis().div_ceil(100);
            let ttl = u16::try_from(tenths).unwrap_or(u16::MAX);
            put_command(&mut self.output, "PING", &[&ttl.to_be_bytes()]);
        }
        Ok(())
    }

    /// When [`Self::tick`] has to be called next.
    #[must_use]
    pub fn tick_at(&self) -> Option<Instant> {
        if self.state != State::Open {
            return Some(self.opened_at + self.limits.handshake_timeout);
        }
        let lost = self.pinged_at.map(|at| at + self.limits.heartbeat_timeout);
        let ttl = self.peer_ttl.map(|ttl| self.heard_at + ttl);
        let ping = self.sends_pings().then_some(self.ping_at);
        [lost, ttl, ping].into_iter().flatten().min()
    }

    /// A peer of 3.0 that never sent a PING may not know what it is.
    fn sends_pings(&self) -> bool {
        !self.limits.heartbeat_interval.is_zero() && (self.minor >= 1 || self.peer_ttl.is_some())
    }

    /// Makes room for `bytes` behind `end`, by moving what is in use to the front or by growing.
    fn make_room(&mut self, bytes: usize) {
        self.release();
        if self.start == self.end {
            (self.start, self.scanned, self.end) = (0, 0, 0);
            if self.input.len() > KEPT_BYTES_MAX {
                self.input.truncate(READ_BYTES);
                self.input.shrink_to_fit();
            }
        }
        if self.input.len() - self.end >= bytes {
            return;
        }
        self.input.copy_within(self.start..self.end, 0);
        self.scanned -= self.start;
        self.end -= self.start;
        self.start = 0;
        let wanted = self.end + bytes;
        if self.input.len() < wanted {
            // Doubled: a long message arrives in steps of `bytes`.
            self.input.resize(wanted.max(self.input.len() * 2), 0);
        }
    }

    /// Forgets the message that was handed out.
    fn release(&mut self) {
        if self.taken {
            self.taken = false;
            self.parts.clear();
            self.part_bytes = 0;
        }
        if self.parts.is_empty() {
            self.start = self.scanned;
        }
    }

    fn step(&mut self) -> Result<Option<Found>, Error> {
        self.release();
        if self.state == State::Greeting {
            let Some(minor) = wire::parse_greeting(&self.input[self.start..self.end])? else {
                return Ok(None);
            };
            self.minor = minor;
            self.state = State::Handshake;
            self.scanned += GREETING_BYTES;
            self.start = self.scanned;
        }
        loop {
            let Some((flags, head, len)) = wire::parse_head(&self.input[self.scanned..self.end])? else {
                return Ok(None);
            };
            self.check_length(flags, len)?;
            let body = self.scanned + head;
            // The limits are in usize, so the length is, too.
            let body = body..body + len as usize;
            if body.end > self.end {
                return Ok(None);
            }
            self.scanned = body.end;
            let found = if flags & COMMAND != 0 { self.command(body)? } else { self.part(flags, body)? };
            if found.is_some() {
                return Ok(found);
            }
            if self.parts.is_empty() {
                self.start = self.scanned;
            }
        }
    }

    /// Refuses a frame by its head, before its body is buffered.
    fn check_length(&self, flags: u8, len: u64) -> Result<(), Error> {
        let Limits { part_bytes_max, message_bytes_max, parts_max, .. } = self.limits;
        if flags & COMMAND != 0 || self.state != State::Open {
            if flags & COMMAND == 0 {
                return Err(Error::Flags(flags));
            }
            // Commands between the parts of a message stay in the buffer until the message is complete.
            let between = self.scanned - self.start - self.part_bytes.min(self.scanned - self.start);
            let bytes = len.saturating_add(between as u64);
            let bytes_max = COMMAND_BYTES_MAX;
            return if bytes <= bytes_max as u64 { Ok(()) } else { Err(Error::TooLong { bytes, bytes_max }) };
        }
        if len > part_bytes_max as u64 {
            return Err(Error::TooLong { bytes: len, bytes_max: part_bytes_max });
        }
        let bytes = len.saturating_add(self.part_bytes as u64);
        if bytes > message_bytes_max as u64 {
            return Err(Error::TooLong { bytes, bytes_max: message_bytes_max });
        }
        if self.parts.len() >= parts_max {
            return Err(Error::TooManyParts { parts_max });
        }
        Ok(())
    }

    fn part(&mut self, flags: u8, body: Range<usize>) -> Result<Option<Found>, Error> {
        if self.kind == Kind::Pub {
            return self.subscription_message(flags, body);
        }
        self.part_bytes += body.len();
        self.parts.push(body.start - self.start..body.end - self.start);
        if flags & MORE != 0 {
            return Ok(None);
        }
        self.taken = true;
        Ok(Some(Found::Message))
    }

    /// Subscriptions of ZMTP 3.0: 1 or 0, and the topic. A PUB socket ignores other messages.
    fn subscription_message(&mut self, flags: u8, body: Range<usize>) -> Result<Option<Found>, Error> {
        let topic = (body.start + 1).min(body.end)..body.end;
        match self.input[body].first() {
            Some(1) if flags & MORE == 0 => self.subscribed(topic).map(Some),
            Some(0) if flags & MORE == 0 => Ok(Some(self.unsubscribed(topic))),
            _ => Ok(None),
        }
    }

    fn subscribed(&mut self, topic: Range<usize>) -> Result<Found, Error> {
        let subscriptions_max = self.limits.subscriptions_max;
        if self.subscriptions.len() >= subscriptions_max {
            return Err(Error::TooManySubscriptions { subscriptions_max });
        }
        if topic.len() > TOPIC_BYTES_MAX {
            return Err(Error::TooLong { bytes: topic.len() as u64, bytes_max: TOPIC_BYTES_MAX });
        }
        self.subscriptions.push(self.input[topic.clone()].to_vec());
        Ok(Found::Subscribed(topic))
    }

    fn unsubscribed(&mut self, topic: Range<usize>) -> Found {
        let bytes = &self.input[topic.clone()];
        if let Some(at) = self.subscriptions.iter().position(|subscription| subscription == bytes) {
            self.subscriptions.swap_remove(at);
        }
        Found::Unsubscribed(topic)
    }

    fn command(&mut self, body: Range<usize>) -> Result<Option<Found>, Error> {
        let (name, data) = wire::parse_command(&self.input[body.clone()])?;
        let data_at = body.end - data.len();
        match (self.state, name) {
            (_, b"ERROR") => Err(Error::Refused),
            (State::Handshake, b"READY") => {
                let (socket_type, identity) = wire::parse_ready(data)?;
                if !self.kind.talks_to(socket_type) {
                    let mut theirs = [0; 8];
                    let len = socket_type.len().min(8);
                    theirs[..len].copy_from_slice(&socket_type[..len]);
                    return Err(Error::Peer { ours: self.kind, theirs });
                }
                self.identity.extend_from_slice(identity);
                self.opened();
                Ok(Some(Found::Ready))
            }
            (State::Handshake, _) => Err(Error::Command("the first command is not READY")),
            (_, b"SUBSCRIBE") if self.kind == Kind::Pub => self.subscribed(data_at..body.end).map(Some),
            (_, b"CANCEL") if self.kind == Kind::Pub => Ok(Some(self.unsubscribed(data_at..body.end))),
            (_, b"PING") => self.ping(data_at..body.end).map(|()| None),
            // PONG counts as a sign of life like every byte. Later versions may have further commands.
            _ => Ok(None),
        }
    }

    fn opened(&mut self) {
        self.state = State::Open;
        self.ping_at = self.heard_at + self.limits.heartbeat_interval;
        if self.kind == Kind::Sub {
            for topic in &self.subscriptions {
                put_subscription(&mut self.output, self.minor, topic);
            }
        }
    }

    fn ping(&mut self, data: Range<usize>) -> Result<(), Error> {
        let Some((ttl, context)) = self.input[data].split_first_chunk::<2>() else {
            return Err(Error::Command("PING has no time to live"));
        };
        if context.len() > CONTEXT_BYTES_MAX {
            return Err(Error::Command("the context of PING has more than 16 bytes"));
        }
        let tenths = u64::from(u16::from_be_bytes(*ttl));
        self.peer_ttl = (tenths != 0).then(|| Duration::from_millis(tenths * 100));
        // A peer that sends PINGs and reads nothing gets no further answers.
        if self.output.len() - self.written < self.limits.output_bytes_max {
            put_command(&mut self.output, "PONG", &[context]);
        }
        Ok(())
    }
}

/// A subscription as the peer's version has it: a command since 3.1, a message before.
fn put_subscription(out: &mut Vec<u8>, minor: u8, topic: &[u8]) {
    if minor >= 1 {
        put_command(out, "SUBSCRIBE", &[topic]);
    } else {
        wire::put_head(out, 0, 1 + topic.len());
        out.push(1);
        out.extend_from_slice(topic);
    }
}
