//! A listener and its connections, served by one thread: who may connect, how many, until when. What is
//! spoken is a [`Protocol`].
//!
//! ```text
//!   start ──▶ thread:  wait ─▶ ready ─▶ accept ──▶ opened
//!                        ▲               │         drive   ─▶ Turn::Wait, Turn::Close
//!                        └── deadlines ◀─┴── resumed
//!   wake, stop ──▶ eventfd
//! ```
//!
//! A connection of an address that is not allowed is closed before a byte of it is read. When there are as
//! many connections as there may be, a further one replaces the one that has been idle for longest, and is
//! refused when none is idle.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_fabric::net::{Accepted, Listener, canonical, set_liveness};
use te_fabric::{Epoll, Interest, Slab};
use te_host::fork::Mark;

use crate::cidr::Cidr;

/// The names of the listener and of the eventfd in the poller.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
/// Connections that are accepted before others are served.
const ACCEPTED_MAX: usize = 16;
const EVENTS_MAX: usize = 256;
/// The longest time between two looks at the deadlines while there are any.
const LOOK: Duration = Duration::from_millis(250);

/// Who may connect, and how often.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) peers: Vec<Cidr>,
    pub(crate) connections_max: usize,
    pub(crate) per_peer_max: usize,
    /// The time after which the kernel asks a silent peer whether it is alive, ms.
    pub(crate) silence_ms: u32,
}

/// What to do with a connection after it was worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Work on it again when it is ready in this manner.
    Wait(Interest),
    /// Close it.
    Close,
}

/// What is spoken on the connections of a server.
pub(crate) trait Protocol: Send + 'static {
    /// The state of one connection.
    type Session: Send;

    /// A connection of an allowed peer. `name` identifies it in [`resumed`](Self::resumed).
    fn opened(&mut self, name: u64, stream: TcpStream, now: Instant) -> Self::Session;

    /// The socket of a connection.
    fn stream(session: &Self::Session) -> &TcpStream;

    /// Works on a connection as far as that is possible without waiting.
    fn drive(&mut self, session: &mut Self::Session, now: Instant) -> Turn;

    /// When to close the connection, as things are.
    fn deadline(&self, session: &Self::Session) -> Option<Instant>;

    /// Since when it does nothing that closing it would disturb.
    fn idle_since(&self, session: &Self::Session) -> Option<Instant>;

    /// A connection is closed.
    fn closed(&mut self, session: Self::Session);

    /// A connection that waited for something other than its peer, and can go on.
    fn resumed(&mut self, _now: Instant) -> Option<u64> {
        None
    }
}

/// What a server has counted.
#[derive(Debug, Default)]
struct Counters {
    open: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
    replaced: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    wake: EventFd,
    counters: Counters,
}

/// A running server. It stops when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    mark: Mark,
}

/// Counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Connections that are open.
    pub open: u64,
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were refused: of an address that is not allowed, or too many.
    pub refused: u64,
    /// Idle connections that were closed for others.
    pub replaced: u64,
}

impl Server {
    /// Serves `protocol` on `listener`.
    ///
    /// # Errors
    /// The system refused a thread or a file descriptor.
    pub(crate) fn start<P: Protocol>(
        name: &'static str,
        listener: Listener,
        limits: Limits,
        protocol: P,
    ) -> io::Result<Self> {
        let address = listener.local_address()?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_flags(flags).map_err(io::Error::from)?;
        let epoll = Epoll::new(EVENTS_MAX)?;
        epoll.add(&listener, LISTENER, Interest::READ)?;
        epoll.add(&wake, WAKE, Interest::READ)?;
        let shared = Arc::new(Shared { stop: AtomicBool::new(false), wake, counters: Counters::default() });
        let serving = Serving {
            name,
            listener,
            limits,
            protocol,
            epoll,
            shared: shared.clone(),
            connections: Slab::new(),
            per_peer: HashMap::new(),
            epoch: Instant::now(),
            look_at: None,
            warned: false,
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || serving.serve())?;
        Ok(Self { address, shared, thread: Some(thread), mark: Mark::new() })
    }

    /// The address on which it listens.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Works on every connection once.
    pub(crate) fn wake(&self) {
        // This fails only when the counter is full, and then the descriptor is readable anyway.
        let _ = self.shared.wake.write(1);
    }

    pub(crate) fn stats(&self) -> ServerStats {
        let Counters { open, accepted, refused, replaced } = &self.shared.counters;
        let get = |of: &AtomicU64| of.load(Ordering::Relaxed);
        ServerStats {
            open: get(open),
            accepted: get(accepted),
            refused: get(refused),
            replaced: get(replaced),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A child shares the eventfd with its parent, whose server goes on; it has no thread of its own.
        if self.mark.is_forked() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of {} has panicked", self.address);
        }
    }
}

/// The thread's side.
struct Serving<P: Protocol> {
    name: &'static str,
    listener: Listener,
    limits: Limits,
    protocol: P,
    epoll: Epoll,
    shared: Arc<Shared>,
    connections: Slab<Connection<P::Session>>,
    per_peer: HashMap<IpAddr, usize>,
    epoch: Instant,
    /// When to look at the deadlines next.
    look_at: Option<Instant>,
    /// A refused peer was logged as a warning.
    warned: bool,
}

struct Connection<S> {
    session: S,
    peer: IpAddr,
    interest: Interest,
}

impl<P: Protocol> Serving<P> {
    fn serve(mut self) {
        // Looked at after `work` has read the eventfd: the wake-up of a stop may be read together with
        // another.
        while !self.shared.stop.load(Ordering::Acquire) {
            let count = match self.epoll.ready() {
                Ok(0) => {
                    let timeout = self.look_at.map(|at| at.saturating_duration_since(Instant::now()));
                    te_host::park([self.epoll.raw_fd()], timeout);
                    self.epoll.ready().unwrap_or(0)
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => {
                    log::error!("{}: waiting for peers failed, and it stops: {error}", self.name);
                    return;
                }
            };
            let now = Instant::now();
            self.work(count, now);
            if self.look_at.is_some_and(|at| now >= at) {
                self.look(now);
            }
            // What was closed or completed may have made room for others.
            while let Some(name) = self.protocol.resumed(now) {
                let found = self.connections.index(name);
                debug_assert!(found.is_some(), "a connection that waits is open");
                found.into_iter().for_each(|index| self.drive(index, now));
            }
        }
    }

    fn work(&mut self, count: usize, now: Instant) {
        let mut accepts = false;
        for at in 0..count {
            match self.epoll.event(at).token {
                LISTENER => accepts = true,
                WAKE => {
                    // Another thread may have read it: nothing is lost.
                    let _ = self.shared.wake.read();
                    (0..self.connections.bound()).for_each(|index| self.drive(index, now));
                }
                name => {
                    // A connection that was closed in this round has another name by now.
                    if let Some(index) = self.connections.index(name) {
                        self.drive(index, now);
                    }
                }
            }
        }
        if accepts {
            self.accept(now);
        }
    }

    fn drive(&mut self, index: u32, now: Instant) {
        let Some(mut connection) = self.connections.take(index) else { return };
        let turn = self.protocol.drive(&mut connection.session, now);
        let kept = match turn {
            Turn::Close => false,
            Turn::Wait(interest) if interest == connection.interest => true,
            Turn::Wait(interest) => {
                connection.interest = interest;
                let stream = P::stream(&connection.session);
                self.epoll.modify(stream, self.connections.name(index), interest).is_ok()
            }
        };
        if kept {
            self.note_deadline(&connection.session, now);
            self.connections.put(index, connection);
        } else {
            self.close(index, connection);
        }
    }

    /// Ends a connection that was taken out of its slot.
    fn close(&mut self, index: u32, connection: Connection<P::Session>) {
        self.connections.release(index);
        if let Some(count) = self.per_peer.get_mut(&connection.peer) {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&connection.peer);
            }
        }
        self.shared.counters.open.store(self.connections.len() as u64, Ordering::Relaxed);
        self.protocol.closed(connection.session);
    }

    fn note_deadline(&mut self, session: &P::Session, now: Instant) {
        if let Some(deadline) = self.protocol.deadline(session) {
            let at = deadline.min(now + LOOK);
            self.look_at = Some(self.look_at.map_or(at, |look| look.min(at)));
        }
    }

    /// Closes the connections whose deadline has passed, and listens again after a pause.
    fn look(&mut self, now: Instant) {
        self.look_at = None;
        for index in 0..self.connections.bound() {
            let Some(connection) = self.connections.get(index) else { continue };
            match self.protocol.deadline(&connection.session) {
                Some(deadline) if now >= deadline => {
                    if let Some(connection) = self.connections.take(index) {
                        self.close(index, connection);
                    }
                }
                Some(deadline) => {
                    let at = deadline.min(now + LOOK);
                    self.look_at = Some(self.look_at.map_or(at, |look| look.min(at)));
                }
                None => {}
            }
        }
        let core_now = te_core::Instant::ZERO + (now - self.epoch);
        if self.listener.is_pause_over(core_now) {
            self.listener.resume();
            let watched = self.epoll.modify(&self.listener, LISTENER, Interest::READ);
            watched.unwrap_or_else(|error| log::error!("{}: no longer listens: {error}", self.name));
        } else if self.listener.paused_until().is_some() {
            self.look_at = Some(self.look_at.map_or(now + LOOK, |look| look.min(now + LOOK)));
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTED_MAX {
            match self.listener.accept() {
                Accepted::Connection(stream) => self.admit(stream, now),
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    let core_now = te_core::Instant::ZERO + (now - self.epoch);
                    self.listener.pause(core_now, &error, self.limits.connections_max as u32);
                    let _ = self.epoll.modify(&self.listener, LISTENER, Interest::NONE);
                    self.look_at = Some(now + LOOK);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, now: Instant) {
        let Ok(peer) = stream.peer_addr().map(|address| canonical(address).ip()) else { return };
        if !self.limits.peers.iter().any(|network| network.contains(peer)) {
            self.refuse(peer, "is not in `peers`");
            return;
        }
        let of_peer = self.per_peer.get(&peer).copied().unwrap_or(0);
        let makes_room = if of_peer >= self.limits.per_peer_max {
            self.replace(Some(peer))
        } else {
            self.connections.len() < self.limits.connections_max || self.replace(None)
        };
        if !makes_room {
            self.refuse(peer, "has too many connections, or there are too many of all peers");
            return;
        }
        // Without these, answers are slower, and a host that vanished is noticed later.
        let _ = stream.set_nodelay(true).and(set_liveness(&stream, self.limits.silence_ms));
        let (index, name) = self.connections.reserve();
        if self.epoll.add(stream.as_fd(), name, Interest::READ).is_err() {
            self.connections.release(index);
            return;
        }
        let session = self.protocol.opened(name, stream, now);
        self.note_deadline(&session, now);
        self.connections.put(index, Connection { session, peer, interest: Interest::READ });
        *self.per_peer.entry(peer).or_insert(0) += 1;
        let counters = &self.shared.counters;
        counters.accepted.fetch_add(1, Ordering::Relaxed);
        counters.open.store(self.connections.len() as u64, Ordering::Relaxed);
    }

    fn refuse(&mut self, peer: IpAddr, why: &str) {
        self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
        if std::mem::replace(&mut self.warned, true) {
            log::debug!("{}: {peer} is refused: it {why}", self.name);
        } else {
            log::warn!("{}: {peer} is refused: it {why} (further ones are logged for debugging)", self.name);
        }
    }

    /// Closes the connection, of `peer` if there is one, that has been idle for longest. False: none is idle.
    fn replace(&mut self, peer: Option<IpAddr>) -> bool {
        let idle = (0..self.connections.bound()).filter_map(|index| {
            let connection = self.connections.get(index)?;
            let fits = peer.is_none_or(|peer| peer == connection.peer);
            Some((self.protocol.idle_since(&connection.session).filter(|_| fits)?, index))
        });
        let Some((_, index)) = idle.min() else { return false };
        if let Some(connection) = self.connections.take(index) {
            self.close(index, connection);
            self.shared.counters.replaced.fetch_add(1, Ordering::Relaxed);
        }
        true
    }
}

/// Listens on `address`, or, when its port is 0, on one of the ports from `min` to `max`, in an order that
/// begins at random. Both 0: any port.
///
/// # Errors
/// The last error of the system.
pub(crate) fn listen(address: SocketAddr, min: u16, max: u16) -> io::Result<Listener> {
    if address.port() != 0 || max == 0 {
        return Listener::bind(address);
    }
    let count = u32::from(max - min) + 1;
    let first = te_fabric::net::random_u64()? % u64::from(count);
    let mut last = None;
    for i in 0..count {
        let port = u32::from(min) + (first as u32 + i) % count;
        match Listener::bind(SocketAddr::new(address.ip(), port as u16)) {
            // Port 0 of a range that begins there stands for any port.
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc::channel;

    use super::*;

    struct Silent;

    impl Protocol for Silent {
        type Session = TcpStream;

        fn opened(&mut self, _name: u64, stream: TcpStream, _now: Instant) -> TcpStream {
            stream
        }

        fn stream(session: &TcpStream) -> &TcpStream {
            session
        }

        fn drive(&mut self, _session: &mut TcpStream, _now: Instant) -> Turn {
            Turn::Close
        }

        fn deadline(&self, _session: &TcpStream) -> Option<Instant> {
            None
        }

        fn idle_since(&self, _session: &TcpStream) -> Option<Instant> {
            None
        }

        fn closed(&mut self, _session: TcpStream) {}
    }

    #[test]
    fn a_server_that_is_woken_while_it_is_stopped_stops() {
        let (stopped, each) = channel();
        std::thread::spawn(move || {
            let spin = |times: u32| (0..times).for_each(|_| std::hint::spin_loop());
            for round in 0..3_000 {
                let listener = listen((Ipv4Addr::LOCALHOST, 0).into(), 0, 0).unwrap();
                let limits =
                    Limits { connections_max: 1, per_peer_max: 1, silence_ms: 1_000, peers: Vec::new() };
                let server = Server::start("test", listener, limits, Silent).unwrap();
                // Until it waits; then it is stopped at another moment of its turn in each round.
                spin(5_000);
                server.wake();
                spin(round % 100 * 20);
                drop(server);
                stopped.send(()).unwrap();
            }
        });
        for round in 0..3_000 {
            assert!(each.recv_timeout(Duration::from_secs(30)).is_ok(), "it does not stop, round {round}");
        }
    }
}
