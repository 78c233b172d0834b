//! The server of the control port: one thread, one `poll`, a bounded number of connections.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::vec::Vec;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::Secret;
use te_host::keys::random;

use super::inbox::Inbox;
use super::proof::{Side, Word, is_proved, prove};
use super::{Answer, HEADER_BYTES, Malformed, Request, body, body_len, frame};
use crate::config::ControlConfig;
use crate::descriptor::Published;
use crate::request::Notification;

/// A connection is closed this many times `timeout_ms` after the last request that was served.
const IDLE_TIMEOUTS: u32 = 12;
/// How long not to accept after a connection could not be accepted.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// Connections accepted before the others are served again.
const ACCEPTED_MAX: usize = 16;

/// The control port of one engine. Stops when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `published` on `listener`; if `secret` is set, to peers that prove to know it.
    pub(crate) fn start(
        listener: TcpListener,
        config: ControlConfig,
        secret: Secret,
        published: Arc<Published>,
        inbox: Arc<Inbox>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let stop = Arc::new(EventFd::from_flags(flags).map_err(io::Error::from)?);
        let desk = Desk { config, secret, published, inbox };
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("te-control".into())
            .spawn(move || serve(&listener, &desk, &stopped))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // This fails only when the counter is full, and then the descriptor is readable anyway.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the control port's thread panicked");
        }
    }
}

/// What the answers are made from.
struct Desk {
    config: ControlConfig,
    secret: Secret,
    published: Arc<Published>,
    inbox: Arc<Inbox>,
}

struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes of `output` that are sent.
    sent: usize,
    /// When it is closed unless another request is served. A probe does not count.
    idle_deadline: Instant,
    /// When it is closed unless the frame that has begun makes progress.
    frame_deadline: Instant,
    /// When the last request was served, or the connection accepted.
    served_at: Instant,
    /// The challenge for the next proof; each is used once.
    challenge: Option<Word>,
    /// It is closed after the answer is sent.
    last: bool,
}

fn serve(listener: &TcpListener, desk: &Desk, stop: &EventFd) {
    let mut connections: Vec<Connection> = Vec::new();
    // While the process has no file descriptor left, waiting connections would end each `poll` at once.
    let mut backoff_until: Option<Instant> = None;
    loop {
        let mut polled = Vec::with_capacity(connections.len() + 2);
        polled.push(PollFd::new(stop.as_fd(), PollFlags::POLLIN));
        let listens = if backoff_until.is_none() { PollFlags::POLLIN } else { PollFlags::empty() };
        polled.push(PollFd::new(listener.as_fd(), listens));
        for connection in &connections {
            let wanted = if connection.answers() { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            polled.push(PollFd::new(connection.stream.as_fd(), wanted));
        }
        let next = connections.iter().map(Connection::deadline).chain(backoff_until).min();
        let timeout = next.map_or(PollTimeout::NONE, |next| {
            let millis = next.saturating_duration_since(Instant::now()).as_millis() + 1;
            PollTimeout::try_from(u32::try_from(millis).unwrap_or(u32::MAX).min(60_000))
                .unwrap_or(PollTimeout::MAX)
        });
        if let Err(errno) = poll(&mut polled, timeout)
            && errno != Errno::EINTR
        {
            log::warn!("control port: waiting failed: {errno}");
            std::thread::sleep(Duration::from_millis(10));
        }
        let ready: Vec<bool> =
            polled.iter().map(|fd| fd.revents().is_some_and(|events| !events.is_empty())).collect();
        if ready[0] {
            return;
        }
        let now = Instant::now();
        let mut index = 2;
        connections.retain_mut(|connection| {
            let ready = ready[index];
            index += 1;
            if ready { connection.step(desk, now) } else { now < connection.deadline() }
        });
        backoff_until = backoff_until.filter(|&until| now < until);
        if ready[1] && backoff_until.is_none() && !accept(listener, desk, &mut connections, now) {
            backoff_until = Some(now + ACCEPT_BACKOFF);
        }
    }
}

/// Accepts connections, at most `ACCEPTED_MAX`. False: accepting failed.
fn accept(listener: &TcpListener, desk: &Desk, connections: &mut Vec<Connection>, now: Instant) -> bool {
    for _ in 0..ACCEPTED_MAX {
        match listener.accept() {
            Ok((stream, peer)) => {
                if connections.len() >= desk.config.connections_max as usize {
                    log::debug!("control port: {peer} replaces the connection that has been silent longest");
                    close_longest_silent(connections);
                }
                if stream.set_nonblocking(true).is_err() {
                    continue;
                }
                // Without it, answers are only slower.
                let _ = stream.set_nodelay(true);
                connections.push(Connection {
                    stream,
                    input: Vec::new(),
                    output: Vec::new(),
                    sent: 0,
                    idle_deadline: now + desk.timeout(),
                    frame_deadline: now,
                    served_at: now,
                    challenge: None,
                    last: false,
                });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // For example, no file descriptor is left: that of a silent connection is freed.
                log::warn!("control port: accepting failed: {error}");
                close_longest_silent(connections);
                return false;
            }
        }
    }
    true
}

/// Closes the connection whose last request is the oldest; one that is being answered only if all are.
fn close_longest_silent(connections: &mut Vec<Connection>) {
    let silent = |(_, connection): &(usize, &Connection)| (connection.answers(), connection.served_at);
    if let Some((index, _)) = connections.iter().enumerate().min_by_key(silent) {
        connections.swap_remove(index);
    }
}

impl Connection {
    fn answers(&self) -> bool {
        self.sent < self.output.len()
    }

    fn deadline(&self) -> Instant {
        match (self.answers(), self.input.is_empty()) {
            (true, _) => self.frame_deadline,
            (false, true) => self.idle_deadline,
            (false, false) => self.frame_deadline.min(self.idle_deadline),
        }
    }

    /// Receives or sends what is possible now. False: the connection is to be closed.
    fn step(&mut self, desk: &Desk, now: Instant) -> bool {
        if self.answers() {
            return self.send(desk, now);
        }
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => {
                if self.input.is_empty() {
                    self.frame_deadline = now + desk.timeout();
                }
                self.input.extend_from_slice(&bytes[..count]);
            }
            Err(error) => return is_temporary(&error) && now < self.deadline(),
        }
        match self.request(desk) {
            Ok(None) => now < self.deadline(),
            Ok(Some(request)) => {
                self.output = frame(&self.answer(desk, request, now));
                self.sent = 0;
                self.frame_deadline = now + desk.timeout();
                self.send(desk, now)
            }
            Err(bad) => {
                log::warn!("control port: a connection is closed: it sent an invalid request ({bad:?})");
                false
            }
        }
    }

    fn send(&mut self, desk: &Desk, now: Instant) -> bool {
        while self.answers() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(0) => return false,
                Ok(count) => {
                    self.sent += count;
                    self.frame_deadline = now + desk.timeout();
                }
                Err(error) => return is_temporary(&error) && now < self.deadline(),
            }
        }
        self.output = Vec::new();
        self.sent = 0;
        // Input before the answer violates the protocol; and no event would announce it later.
        !self.last && self.input.is_empty() && now < self.deadline()
    }

    /// Takes a request off the input, if it is complete.
    fn request(&mut self, desk: &Desk) -> Result<Option<Request>, Malformed> {
        let Some(header) = self.input.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        // Room for the other fields, and for a message that is a little too long, which gets an answer
        // instead of a closed connection.
        let end = HEADER_BYTES + body_len(header, desk.config.notification_bytes_max as usize + 1024)?;
        if self.input.len() < end {
            return Ok(None);
        }
        let request = body(&self.input[HEADER_BYTES..end])?;
        self.input.drain(..end);
        Ok(Some(request))
    }

    fn answer(&mut self, desk: &Desk, request: Request, now: Instant) -> Answer {
        match request {
            Request::Probe => return desk.answer(Request::Probe),
            Request::Challenge => {
                let Ok(challenge) = random() else {
                    self.last = true;
                    return Answer::WrongProof;
                };
                self.challenge = Some(challenge);
                return Answer::Challenge(challenge);
            }
            Request::Proven { nonce, request, proof } => {
                let proved = self.challenge.take().filter(|challenge| {
                    is_proved(&proof, &desk.secret, Side::Requester, challenge, &nonce, &request)
                });
                let Some(challenge) = proved else {
                    let peer = self.stream.peer_addr();
                    log::warn!(
                        "control port: {peer:?} sent a wrong proof of the cluster secret, and is refused"
                    );
                    self.last = true;
                    return Answer::WrongProof;
                };
                let answer = match body(&request) {
                    Ok(request) => desk.answer(request),
                    Err(_) => Answer::WrongProof,
                };
                let answer = postcard::to_allocvec(&answer).unwrap_or_default();
                let proof = prove(&desk.secret, Side::Owner, &challenge, &nonce, &answer);
                self.served(desk, now);
                return Answer::Proven { answer, proof };
            }
            _ if desk.secret.is_set() => {
                self.last = true;
                return Answer::NeedsProof;
            }
            Request::Descriptor | Request::Notify { .. } => {}
        }
        self.served(desk, now);
        desk.answer(request)
    }

    /// A request other than a probe was served: the connection may stay open longer.
    fn served(&mut self, desk: &Desk, now: Instant) {
        self.served_at = now;
        self.idle_deadline = now + desk.timeout() * IDLE_TIMEOUTS;
    }
}

impl Desk {
    fn timeout(&self) -> Duration {
        Duration::from_millis(u64::from(self.config.timeout_ms))
    }

    fn answer(&self, request: Request) -> Answer {
        let own = self.published.incarnation;
        match request {
            Request::Descriptor => Answer::Descriptor(self.published.descriptor().to_bytes()),
            Request::Probe => Answer::Alive { incarnation: own },
            Request::Notify { incarnation, .. } if incarnation != own => Answer::Restarted { found: own },
            Request::Notify { name, message, .. } => {
                self.inbox.put(Notification { name, message }, &self.config)
            }
            // Within a proof, these make no sense.
            Request::Challenge | Request::Proven { .. } => Answer::WrongProof,
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
