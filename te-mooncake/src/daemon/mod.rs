//! The handshake port: answers requests for the descriptor, notifications, probes, and refuses the queue
//! pairs of RDMA engines.
//!
//! A Mooncake engine serves one handshake after the other, so that a silent client stalls all others for five
//! seconds. Here they are served at the same time, each with a deadline.

mod inbox;
mod session;

pub(crate) use inbox::Inbox;

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use te_fabric::net::Listener;

use self::session::Session;
use crate::config::Config;
use crate::frame::{self, Frame, Kind};
use crate::message;
use crate::published::Published;
use crate::server::{Limits, Protocol, Server, Turn};

/// Why queue pairs are refused.
const NO_QUEUE_PAIRS: &str =
    "this engine serves its memory over TCP alone and has no queue pairs: set MC_FORCE_TCP=1";
/// Bytes of incomplete requests of all connections together, in longest frames.
const FRAMES_BUFFERED_MAX: usize = 32;

/// Serves handshakes on `listener`.
///
/// # Errors
/// The system refused a thread or a file descriptor.
pub(crate) fn start(
    listener: Listener,
    config: &Config,
    published: Arc<Published>,
    inbox: Arc<Inbox>,
) -> io::Result<Server> {
    let desk = Desk {
        frame_bytes_max: config.frame_bytes_max,
        patience: Duration::from_millis(config.handshake_ms_max.into()),
        published,
        inbox,
        buffered: 0,
    };
    let handshakes_max = config.handshakes_max as usize;
    let limits = Limits {
        peers: config.peers.clone(),
        connections_max: handshakes_max,
        per_peer_max: handshakes_max,
        silence_ms: config.silence_ms_max,
    };
    Server::start("mooncake-handshakes", listener, limits, desk)
}

/// What the answers are made from.
struct Desk {
    frame_bytes_max: u32,
    /// For a request, and again for its answer.
    patience: Duration,
    published: Arc<Published>,
    inbox: Arc<Inbox>,
    /// Bytes of incomplete requests.
    buffered: usize,
}

impl Desk {
    /// The bytes of the answer; `None`: the connection is closed without one, as a Mooncake engine does.
    fn answer(&self, request: Frame<'_>) -> Option<Vec<u8>> {
        if let Err(error) = message::check(request.body) {
            log::debug!("a handshake is closed: {error}");
            return None;
        }
        let body = match request.kind {
            Kind::Connection | Kind::Untyped => message::connection_refused(NO_QUEUE_PAIRS),
            Kind::Metadata => return Some(frame::write(request.kind, &self.published.json())),
            Kind::Notify => message::notify_answer(self.take(request.body)),
            Kind::Probe => message::ALIVE.to_vec(),
        };
        Some(frame::write(request.kind, &body))
    }

    /// Whether a notification is taken.
    fn take(&self, body: &[u8]) -> bool {
        match message::parse_notify(body) {
            Ok(notification) => self.inbox.put(notification),
            Err(error) => {
                log::debug!("a notification is refused: {error}");
                false
            }
        }
    }

    /// Counts `bytes` more of incomplete requests. False: there are too many.
    fn buffer(&mut self, bytes: usize) -> bool {
        self.buffered += bytes;
        self.buffered <= FRAMES_BUFFERED_MAX * self.frame_bytes_max as usize
    }
}

impl Protocol for Desk {
    type Session = Session;

    fn opened(&mut self, _: u64, stream: TcpStream, now: Instant) -> Session {
        Session::new(stream, now + self.patience)
    }

    fn stream(session: &Session) -> &TcpStream {
        session.stream()
    }

    fn drive(&mut self, session: &mut Session, now: Instant) -> Turn {
        session.drive(self, now)
    }

    fn deadline(&self, session: &Session) -> Option<Instant> {
        Some(session.deadline())
    }

    /// One whose request is incomplete: of those, the oldest.
    fn idle_since(&self, session: &Session) -> Option<Instant> {
        session.is_asking().then(|| session.deadline())
    }

    fn closed(&mut self, session: Session) {
        self.buffered -= session.buffered();
    }
}
