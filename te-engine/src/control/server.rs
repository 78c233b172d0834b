//! The server: one thread, one `poll`, a bounded number of connections.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::vec::Vec;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{Answer, HEADER_BYTES, Malformed, Request, body, body_len, frame};
use crate::config::ControlConfig;
use crate::descriptor::Published;
use crate::request::Notification;

/// A connection that asks nothing for so many times `timeout_ms` is closed.
const IDLE_TIMEOUTS: u32 = 12;

/// The control port of one engine. Stops when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

/// Notifications that wait to be taken.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    queue: Mutex<VecDeque<Notification>>,
    refused: AtomicU64,
}

impl Inbox {
    pub(crate) fn take(&self) -> Vec<Notification> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }

    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    fn put(&self, notification: Notification, notifications_max: usize) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let room = queue.len() < notifications_max;
        if room {
            queue.push_back(notification);
        } else {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        room
    }
}

impl Server {
    /// Serves `published` on `listener`.
    pub(crate) fn start(
        listener: TcpListener,
        config: ControlConfig,
        published: Arc<Published>,
        inbox: Arc<Inbox>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let stop = Arc::new(EventFd::from_flags(flags).map_err(io::Error::from)?);
        let desk = Desk { config, published, inbox };
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("te-control".into())
            .spawn(move || serve(&listener, &desk, &stopped))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It can only fail when the counter is full: then it is readable anyway.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the control port's thread panicked");
        }
    }
}

/// What answering needs.
struct Desk {
    config: ControlConfig,
    published: Arc<Published>,
    inbox: Arc<Inbox>,
}

struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes of `output` that are sent.
    sent: usize,
    /// When it is closed unless something moves.
    deadline: Instant,
}

fn serve(listener: &TcpListener, desk: &Desk, stop: &EventFd) {
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        let mut polled = Vec::with_capacity(connections.len() + 2);
        polled.push(PollFd::new(stop.as_fd(), PollFlags::POLLIN));
        polled.push(PollFd::new(listener.as_fd(), PollFlags::POLLIN));
        for connection in &connections {
            let wanted = if connection.answers() { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            polled.push(PollFd::new(connection.stream.as_fd(), wanted));
        }
        let next = connections.iter().map(|connection| connection.deadline).min();
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
            if ready { connection.step(desk, now) } else { now < connection.deadline }
        });
        if ready[1] {
            accept(listener, desk, &mut connections, now);
        }
    }
}

fn accept(listener: &TcpListener, desk: &Desk, connections: &mut Vec<Connection>, now: Instant) {
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                if connections.len() >= desk.config.connections_max as usize {
                    log::warn!(
                        "control port: {} connections are open; {peer} is turned away",
                        connections.len()
                    );
                    continue;
                }
                if stream.set_nonblocking(true).is_err() {
                    continue;
                }
                // A delayed answer is a slow one, not a wrong one.
                let _ = stream.set_nodelay(true);
                connections.push(Connection {
                    stream,
                    input: Vec::new(),
                    output: Vec::new(),
                    sent: 0,
                    deadline: now + desk.timeout(),
                });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                // Out of descriptors, for one. The connection stays in the backlog: do not spin on it.
                log::warn!("control port: accepting failed: {error}");
                std::thread::sleep(Duration::from_millis(10));
                return;
            }
        }
    }
}

impl Connection {
    fn answers(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Moves what can be moved. False: it is over.
    fn step(&mut self, desk: &Desk, now: Instant) -> bool {
        if self.answers() {
            return self.send(desk, now);
        }
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes) {
            Ok(0) => return false,
            Ok(count) => {
                if self.input.is_empty() {
                    self.deadline = now + desk.timeout();
                }
                self.input.extend_from_slice(&bytes[..count]);
            }
            Err(error) => return is_temporary(&error) && now < self.deadline,
        }
        match self.request(desk) {
            Ok(None) => now < self.deadline,
            Ok(Some(request)) => {
                self.output = frame(&desk.answer(request));
                self.sent = 0;
                self.deadline = now + desk.timeout();
                self.send(desk, now)
            }
            Err(bad) => {
                log::warn!("control port: a connection is closed: not a request ({bad:?})");
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
                    self.deadline = now + desk.timeout();
                }
                Err(error) => return is_temporary(&error) && now < self.deadline,
            }
        }
        self.output = Vec::new();
        self.sent = 0;
        // A request that came in one piece with the last one would not wake us: that is not this protocol.
        self.deadline = now + desk.timeout() * IDLE_TIMEOUTS;
        self.input.is_empty()
    }

    /// Takes a request off the input, if it is all there.
    fn request(&mut self, desk: &Desk) -> Result<Option<Request>, Malformed> {
        let Some(header) = self.input.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        // Room for the fields beside the message, and to tell a message that is a little too long so.
        let end = HEADER_BYTES + body_len(header, desk.config.notification_bytes_max as usize + 1024)?;
        if self.input.len() < end {
            return Ok(None);
        }
        let request = body(&self.input[HEADER_BYTES..end])?;
        self.input.drain(..end);
        Ok(Some(request))
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
                let bytes_max = self.config.notification_bytes_max;
                if name.len() + message.len() > bytes_max as usize {
                    Answer::TooLong { bytes_max }
                } else if self
                    .inbox
                    .put(Notification { name, message }, self.config.notifications_max as usize)
                {
                    Answer::Taken
                } else {
                    Answer::InboxFull
                }
            }
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
