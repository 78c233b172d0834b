//! Connections on which other members send: the serving thread reads them.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};
use store_core::ha::{MESSAGE_BYTES_MAX, MemberId, Message};
use tracing::{debug, warn};

/// How long a member may leave a message unfinished.
const STALL_MAX: Duration = Duration::from_secs(2);
/// What is read from one connection before requests are served again, bytes.
const READ_MAX: usize = 4 << 20;
/// Room for what one call reads, bytes.
const CALL_BYTES: usize = 64 << 10;
/// The length in front of a message.
const HEAD: usize = 4;
/// A buffer that is empty is given back when it is longer than this.
const KEPT_BYTES: usize = 1 << 20;

/// The place of a connection among those that were accepted.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// One more, if there are fewer than `most`.
    pub(super) fn enter(accepted: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let less = |count| (count < most).then_some(count + 1);
        let entered = accepted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        entered.is_ok().then(|| Self(Arc::clone(accepted)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection whose other side has proved who it is.
#[derive(Debug)]
pub(crate) struct Incoming {
    from: MemberId,
    stream: TcpStream,
    /// What was read and not heard yet is `bytes[start..end]`.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// There may be more to read or to hear.
    ready: bool,
    /// The other side sends nothing any more.
    closed: bool,
    /// When the message was begun that is not complete.
    begun: Option<Instant>,
    _counted: Counted,
}

impl Incoming {
    pub(super) fn new(from: MemberId, stream: std::net::TcpStream, counted: Counted) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let stream = TcpStream::from_std(stream);
        let bytes = Vec::new();
        let (ready, closed, begun, _counted) = (true, false, None, counted);
        Ok(Self { from, stream, bytes, start: 0, end: 0, ready, closed, begun, _counted })
    }

    /// Hands what has arrived to `hear`, until that returns false. Returns whether there may be more.
    ///
    /// # Errors
    /// The connection has ended, or what comes is no message: nothing more is read.
    pub(super) fn hear(
        &mut self,
        now: Instant,
        mut hear: impl FnMut(MemberId, Message) -> bool,
    ) -> io::Result<bool> {
        let (mut left, mut drained) = (READ_MAX, false);
        loop {
            while let Some(len) = self.complete()? {
                let body = self.start + HEAD;
                let message = Message::decode(&self.bytes[body..body + len]).map_err(io::Error::other)?;
                self.start = body + len;
                self.begun = None;
                if !hear(self.from, message) {
                    return Ok(true);
                }
            }
            if drained {
                break;
            }
            if left == 0 {
                return Ok(true);
            }
            let (read, all) = self.read()?;
            (left, drained) = (left.saturating_sub(read), all);
        }
        self.ready = false;
        if self.start == self.end {
            self.begun = None;
        } else if now.saturating_duration_since(*self.begun.get_or_insert(now)) > STALL_MAX {
            return Err(io::Error::other("a message is left unfinished"));
        }
        Ok(false)
    }

    /// The length of the first message, if all of it is here.
    fn complete(&self) -> io::Result<Option<usize>> {
        let Some((head, body)) = self.bytes[self.start..self.end].split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*head) as usize;
        if len > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("a message is too long"));
        }
        Ok((body.len() >= len).then_some(len))
    }

    /// Reads what is there, as far as there is room for it. Returns how much, and whether that is all: a
    /// socket that gives less than it could is empty, and the poller tells when it is not any more.
    fn read(&mut self) -> io::Result<(usize, bool)> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == 0 && self.bytes.len() > KEPT_BYTES {
            self.bytes = Vec::new();
        }
        if self.bytes.len() < self.end + CALL_BYTES {
            self.bytes.resize(2 * self.end + CALL_BYTES, 0);
        }
        let room = self.bytes.len() - self.end;
        let read = loop {
            match self.stream.read(&mut self.bytes[self.end..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => break read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok((0, true)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        };
        self.end += read;
        Ok((read, read < room && !self.closed))
    }

    /// Whether it has to be looked at now.
    fn is_due(&self, now: Instant) -> bool {
        self.ready || self.begun.is_some_and(|begun| now.saturating_duration_since(begun) > STALL_MAX)
    }
}

/// The connections on which other members send.
#[derive(Debug, Default)]
pub(super) struct AllIncoming {
    of: Vec<Option<Incoming>>,
}

impl AllIncoming {
    /// The token of the first connection.
    pub(super) const FIRST: usize = usize::MAX / 2;

    pub(super) fn add(&mut self, registry: &Registry, mut incoming: Incoming) {
        let free = self.of.iter().position(Option::is_none).unwrap_or(self.of.len());
        let token = Token(Self::FIRST + free);
        if let Err(error) = registry.register(&mut incoming.stream, token, Interest::READABLE) {
            warn!(%error, "a connection of another master cannot be registered with the poller");
            return;
        }
        if free == self.of.len() {
            self.of.push(None);
        }
        self.of[free] = Some(incoming);
    }

    pub(super) fn ready(&mut self, token: usize, closed: bool) {
        if let Some(Some(incoming)) = token.checked_sub(Self::FIRST).and_then(|at| self.of.get_mut(at)) {
            incoming.ready = true;
            incoming.closed |= closed;
        }
    }

    /// Hands what has arrived to `hear`, until that returns false. Returns whether there may be more.
    pub(super) fn hear(&mut self, now: Instant, mut hear: impl FnMut(MemberId, Message) -> bool) -> bool {
        let (mut more, mut goes_on) = (false, true);
        for place in &mut self.of {
            let Some(incoming) = place.as_mut().filter(|incoming| incoming.is_due(now)) else { continue };
            if !goes_on {
                return true;
            }
            let heard = incoming.hear(now, |from, message| {
                goes_on = hear(from, message);
                goes_on
            });
            match heard {
                Ok(left) => more |= left,
                Err(error) => {
                    debug!(master = incoming.from.0, %error, "a connection of another master has ended");
                    *place = None;
                }
            }
        }
        more
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use store_core::ha::Reign;

    use super::*;

    /// A connection, and where the other side writes.
    fn pair() -> (Incoming, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let counted = Counted::enter(&Arc::default(), 1).unwrap();
        let incoming = Incoming::new(MemberId(7), listener.accept().unwrap().0, counted).unwrap();
        (incoming, theirs)
    }

    fn encoded(message: &Message) -> Vec<u8> {
        let mut bytes = vec![0; HEAD];
        message.encode(&mut bytes);
        let len = (bytes.len() - HEAD) as u32;
        bytes[..HEAD].copy_from_slice(&len.to_le_bytes());
        bytes
    }

    /// Hears until there are so many messages, or an error.
    fn hear(incoming: &mut Incoming, many: usize) -> io::Result<Vec<Message>> {
        let mut heard = Vec::new();
        let end = Instant::now() + Duration::from_secs(10);
        while heard.len() < many && Instant::now() < end {
            incoming.hear(Instant::now(), |from, message| {
                assert_eq!(from, MemberId(7));
                heard.push(message);
                heard.len() < many
            })?;
        }
        Ok(heard)
    }

    #[test]
    fn messages_that_come_in_pieces_or_together_are_heard_in_order() {
        let (mut incoming, mut theirs) = pair();
        let reign = Reign { lineage: 1, term: 2 };
        let long = vec![9; 3 << 20];
        let long = Message::Append { reign, after: 3, commands: long, beat: 4, digest: None };
        let messages = [Message::Empty { version: 1 }, long, Message::Empty { version: 2 }];
        let bytes: Vec<u8> = messages.iter().flat_map(encoded).collect();
        let writer = std::thread::spawn(move || {
            for piece in [&bytes[..1], &bytes[1..3], &bytes[3..9], &bytes[9..]] {
                theirs.write_all(piece).unwrap();
            }
            theirs
        });
        assert_eq!(hear(&mut incoming, 3).unwrap(), messages);
        drop(writer.join().unwrap());
        incoming.closed = true;
        let ended = hear(&mut incoming, 1).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        let too_long = ((MESSAGE_BYTES_MAX + 1) as u32).to_le_bytes().to_vec();
        let unknown = [&4_u32.to_le_bytes()[..], &[0xff; 4]].concat();
        let empty = 0_u32.to_le_bytes().to_vec();
        for bytes in [too_long, unknown, empty] {
            let (mut incoming, mut theirs) = pair();
            theirs.write_all(&bytes).unwrap();
            assert!(hear(&mut incoming, 1).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_message_that_is_left_unfinished_ends_the_connection() {
        let (mut incoming, mut theirs) = pair();
        theirs.write_all(&encoded(&Message::Empty { version: 1 })[..3]).unwrap();
        let now = Instant::now();
        while incoming.begun.is_none() {
            assert!(!incoming.hear(now, |_, _| true).unwrap());
        }
        assert!(!incoming.is_due(now));
        let late = now + STALL_MAX + Duration::from_millis(1);
        assert!(incoming.is_due(late));
        assert!(incoming.hear(late, |_, _| true).is_err());
    }

    #[test]
    fn there_are_no_more_connections_than_may_be() {
        let accepted = Arc::default();
        let first = Counted::enter(&accepted, 1);
        assert!(first.is_some() && Counted::enter(&accepted, 1).is_none());
        drop(first);
        assert!(Counted::enter(&accepted, 1).is_some());
    }
}
