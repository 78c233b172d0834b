//! Sockets: who is ready, whose turn it is, and the system calls that move bytes. It knows connections by
//! their names and does not know what they carry.
//!
//! With epoll, asking who is ready is a system call, so connections that had something to say a moment ago
//! (*hot*) are read without asking. With io_uring asking is free, and a connection is hot while there is
//! something left in its socket.

#[cfg(test)]
mod tests;

use core::net::SocketAddr;
use std::io;

use te_core::Instant;
use te_fabric::net::{Accepted, Listener, set_buffers, set_congestion};
use te_fabric::{Epoll, Event, Interest, OpenError, Timers};

use crate::config::{Config, Driver};
#[cfg(feature = "uring")]
use crate::connection::Destination;
use crate::connection::{Connection, Progress, Reading, Received, Source};
use crate::stats::Stats;
use crate::sys::{Buffers, Poller, Socket};
#[cfg(feature = "uring")]
use crate::sys::{JOBS_MAX, Job, Ring};

/// Received from one connection before the others get a turn, bytes.
pub(crate) const RECEIVE_BYTES_MAX: usize = 4 << 20;
/// Vain attempts after which a connection is no longer read without asking.
const EAGER_READS: u16 = 64;
/// Every so many polls the system is asked, however warm the connections are: new connections and cold
/// connections want their turn.
const ASK_EVERY: u32 = 16;
/// Events taken in one poll.
const EVENTS_MAX: usize = 64;
/// The name of the listener's events; no connection has it.
const LISTENER: u64 = u64::MAX;

/// The sockets of a transport: its poller, its listener, and which connections are read next.
pub(crate) struct Io {
    /// First, so that it lets go of the sockets before they are closed.
    poller: Poller,
    listener: Listener,
    /// Connections may be waiting to be accepted.
    listener_waits: bool,
    buffers: Buffers,
    /// Connections that are watched.
    connections: usize,
    /// Names of connections that are read without asking.
    active: Vec<u64>,
    /// Connections of which the poller is to tell when they can be written.
    waiting_to_write: u32,
    stats: Stats,
}

impl Io {
    /// Listens as `config` says, and prepares its driver.
    ///
    /// # Errors
    /// An address that cannot be bound, a congestion control or a driver that the kernel does not have.
    pub(crate) fn open(config: &Config) -> Result<Self, OpenError> {
        let step = OpenError::step;
        let listener = Listener::bind(config.listen()).map_err(step("listen on the address in `bind`"))?;
        if let Some(name) = &config.congestion {
            set_congestion(&listener, name).map_err(step("use the algorithm in `congestion`"))?;
        }
        let mut poller = match config.driver {
            Driver::Epoll => Poller::Epoll(Epoll::new(EVENTS_MAX).map_err(step("create an epoll instance"))?),
            #[cfg(feature = "uring")]
            Driver::Uring => {
                let ring = Ring::new(config.connections_max as usize);
                let what = step("set up io_uring, which the kernel may forbid (io_uring_disabled)");
                Poller::Ring(Box::new(ring.map_err(what)?))
            }
        };
        poller.add(&listener, LISTENER, Interest::READ).map_err(step("watch the listener"))?;
        Ok(Self {
            poller,
            listener,
            listener_waits: false,
            buffers: Buffers::new(),
            connections: 0,
            active: Vec::new(),
            waiting_to_write: 0,
            stats: Stats::default(),
        })
    }

    /// Where it listens.
    pub(crate) fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_address()
    }

    /// The descriptor that is readable while something is ready.
    pub(crate) fn raw_fd(&self) -> std::os::fd::RawFd {
        self.poller.raw_fd()
    }

    /// Connections of both sides that are open.
    pub(crate) const fn connections(&self) -> usize {
        self.connections
    }

    /// Bytes and system calls.
    pub(crate) const fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// Single connections.
impl Io {
    /// Starts to connect to `address`; that the socket becomes writable tells the end.
    pub(crate) fn connect(&self, address: SocketAddr, config: &Config) -> io::Result<Socket> {
        let socket = Socket::new(address)?;
        tune(&socket, config)?;
        socket.connect(address)?;
        Ok(socket)
    }

    /// Watches a connection from now on, for what its `interest` says.
    pub(crate) fn watch<R>(&mut self, connection: &Connection<R>) -> io::Result<()> {
        self.poller.add(&connection.socket, connection.name, connection.interest)?;
        self.waiting_to_write += u32::from(connection.interest.writable);
        self.connections += 1;
        Ok(())
    }

    /// A connection that was watched has ended. To be called before its socket is closed.
    pub(crate) fn forget<R>(&mut self, connection: &Connection<R>) {
        self.poller.remove(connection.name);
        self.waiting_to_write -= u32::from(connection.interest.writable);
        self.active.retain(|&known| known != connection.name);
        self.connections -= 1;
    }

    /// Sends what waits, and tells `progress` what got how far. True: something was sent.
    #[inline]
    pub(crate) fn send<R>(
        &mut self,
        connection: &mut Connection<R>,
        progress: impl FnMut(&mut R, Source, Progress),
    ) -> io::Result<bool> {
        // Most turns have nothing to send.
        if connection.blocked || connection.outbox.is_empty() {
            Ok(false)
        } else {
            self.send_some(connection, progress)
        }
    }

    fn send_some<R>(
        &mut self,
        connection: &mut Connection<R>,
        mut progress: impl FnMut(&mut R, Source, Progress),
    ) -> io::Result<bool> {
        let mut some = false;
        while !connection.blocked && !connection.outbox.is_empty() {
            let Connection { outbox, socket, role, .. } = connection;
            match outbox.flush(socket, &mut self.buffers, |source, how| progress(role, source, how)) {
                Ok((sent, all)) => {
                    self.stats.sends += 1;
                    self.stats.bytes_sent += sent as u64;
                    connection.blocked = !all;
                    some = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => connection.blocked = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(some)
    }

    /// Receives once, or takes what was received for the connection. `None`: there is nothing. The end of the
    /// stream is an error.
    #[inline]
    pub(crate) fn receive<R>(
        &mut self,
        connection: &mut Connection<R>,
        reading: &mut Reading,
    ) -> io::Result<Option<Received>> {
        loop {
            let result = reading
                .take()
                .unwrap_or_else(|| connection.inbox.receive(&connection.socket, &mut self.buffers));
            match result {
                Ok(received) => {
                    self.stats.receives += 1;
                    self.stats.bytes_received += received.bytes as u64;
                    return Ok(Some(received));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    connection.read_nothing();
                    return Ok(None);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// From now on the connection is read without asking, until that has been in vain for a while.
    #[inline]
    pub(crate) fn mark_active<R>(&mut self, connection: &mut Connection<R>) {
        if self.poller.tells_changes() {
            // Asking costs nothing there.
            return;
        }
        if connection.eager_reads == 0 {
            self.add_active(connection.name);
        }
        connection.eager_reads = EAGER_READS;
    }

    /// A connection was read, or may be read again, and there may be more (unless `drained`). Where changes
    /// are told and not states, it is up to us to come back.
    #[inline]
    pub(crate) fn stopped_reading<R>(
        &mut self,
        connection: &mut Connection<R>,
        drained: bool,
        timers: &mut Timers,
    ) {
        if self.poller.tells_changes() {
            connection.eager_reads = u16::from(!drained);
            if !drained {
                timers.wake();
                self.add_active(connection.name);
            }
        }
    }

    /// Tells the poller what a connection waits for, if that has changed.
    #[inline]
    pub(crate) fn settle_interest<R>(&mut self, connection: &mut Connection<R>) {
        let wanted = Interest { readable: !connection.paused, writable: connection.blocked };
        if wanted == connection.interest {
            return;
        }
        if self.poller.modify(&connection.socket, connection.name, wanted).is_ok() {
            self.waiting_to_write -= u32::from(connection.interest.writable);
            self.waiting_to_write += u32::from(wanted.writable);
            connection.interest = wanted;
        }
    }
}

/// Whose turn it is.
impl Io {
    /// Whether the poller tells changes rather than states.
    #[cfg(feature = "uring")]
    pub(crate) const fn tells_changes(&self) -> bool {
        self.poller.tells_changes()
    }

    /// Whether poll number `polls` asks the system who is ready rather than read the hot connections.
    #[inline]
    pub(crate) fn asks(&self, polls: u32) -> bool {
        self.active.is_empty() || self.waiting_to_write > 0 || polls.is_multiple_of(ASK_EVERY)
    }

    /// Asks the system who is ready; returns how many, to be read with [`Self::event`].
    pub(crate) fn ready(&mut self) -> usize {
        self.stats.waits += 1;
        self.poller.ready().unwrap_or(0)
    }

    /// Event `at` of those that the last [`Self::ready`] counted. `None`: the listener's, which is
    /// remembered.
    pub(crate) fn event(&mut self, at: usize) -> Option<Event> {
        let event = self.poller.event(at);
        if event.token == LISTENER {
            self.listener_waits = true;
            return None;
        }
        Some(event)
    }

    /// The hot connection at place `at`.
    #[inline]
    pub(crate) fn active(&self, at: usize) -> Option<u64> {
        self.active.get(at).copied()
    }

    /// The connection at place `at` of the hot ones has had its turn; it stays there if it is still `warm`.
    /// Returns the place of the next.
    #[inline]
    pub(crate) fn had_turn(&mut self, at: usize, name: u64, active: bool) -> usize {
        if active {
            return at + 1;
        }
        if self.active.get(at) == Some(&name) {
            self.active.swap_remove(at);
        }
        at
    }

    /// Keeps the hot connections of which `warm` is true. True: there are some, or changes have come up that
    /// were not told yet.
    #[cfg(feature = "uring")]
    pub(crate) fn retain_active(&mut self, active: impl Fn(u64) -> bool) -> bool {
        self.active.retain(|&name| active(name));
        !self.active.is_empty() || matches!(&self.poller, Poller::Ring(ring) if ring.has_news())
    }

    /// The hot connections from place `from` on, as many as one call receives for.
    #[cfg(feature = "uring")]
    pub(crate) fn active_from(&self, from: usize) -> &[u64] {
        let until = self.active.len().min(from + JOBS_MAX);
        self.active.get(from..until).unwrap_or(&[])
    }

    /// Receives for up to [`JOBS_MAX`] connections in one system call.
    #[cfg(feature = "uring")]
    pub(crate) fn receive_all(&mut self, jobs: &mut [Option<Job<'_, Destination>>]) {
        if let Poller::Ring(ring) = &mut self.poller {
            ring.receive_all(jobs);
        }
    }

    /// The connection is read in this poll.
    #[inline]
    pub(crate) fn add_active(&mut self, name: u64) {
        if !self.active.contains(&name) {
            self.active.push(name);
        }
    }
}

/// The listener.
impl Io {
    /// Whether connections may be waiting that can be accepted now. Asked once.
    pub(crate) fn takes_connections(&mut self) -> bool {
        std::mem::take(&mut self.listener_waits) && self.listener.rests_until().is_none()
    }

    /// The next connection.
    pub(crate) fn accept(&mut self) -> Accepted {
        self.listener.accept()
    }

    /// There may be more connections than were accepted, and not every driver says so twice.
    pub(crate) const fn accepts_more(&mut self) {
        self.listener_waits = true;
    }

    /// Accepting failed with `error`, and would fail again at once: the listener rests for a while.
    pub(crate) fn rest(&mut self, error: &io::Error, connections_max: u32, timers: &mut Timers) {
        if self.poller.modify(&self.listener, LISTENER, Interest::NONE).is_ok() {
            self.listener.rest(timers.now(), error, connections_max);
            timers.due_by(timers.now());
        }
    }

    /// Watches the listener again when its rest is over. Returns until when it rests.
    pub(crate) fn look_at_listener(&mut self, timers: &mut Timers) -> Option<Instant> {
        if self.listener.is_rested(timers.now())
            && self.poller.modify(&self.listener, LISTENER, Interest::READ).is_ok()
        {
            self.listener.resume();
            self.listener_waits = true;
            timers.wake();
        }
        self.listener.rests_until()
    }
}

/// Settings that every socket gets before it is used.
pub(crate) fn tune(socket: &Socket, config: &Config) -> io::Result<()> {
    socket.set_nodelay()?;
    set_buffers(socket, config.send_buffer_bytes, config.receive_buffer_bytes)?;
    match &config.congestion {
        Some(name) => set_congestion(socket, name),
        None => Ok(()),
    }
}

/// Settings that depend on who is at the other end of a connected socket. True: a process on this host.
pub(crate) fn tune_to_peer(socket: &Socket, config: &Config) -> bool {
    let (Ok(here), Ok(there)) = (socket.local_address(), socket.peer_address()) else { return false };
    let same_host = there.ip().is_loopback() || here.ip() == there.ip();
    if same_host && config.congestion.is_none() {
        // Pacing within one host only costs. A kernel without cubic keeps what it has.
        let _ = set_congestion(socket, "cubic");
    }
    same_host
}
