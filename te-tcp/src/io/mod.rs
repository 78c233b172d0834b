//! Sockets: which are ready, which is served next, and the system calls that move bytes. This module knows
//! connections by their names, and does not know what they carry.
//!
//! With epoll, asking which sockets are ready is a system call, so connections on which something happened a
//! moment ago (*active*) are read without asking. With io_uring asking costs nothing, and a connection is
//! active while something is left in its socket.

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

/// Bytes received from one connection before the others get a turn.
pub(crate) const RECEIVE_BYTES_MAX: usize = 4 << 20;
/// Reads without a result after which a connection is no longer active.
const EAGER_READS: u16 = 64;
/// In every poll with a number divisible by this, the poller is asked even when connections are active, so
/// that new connections and those that are not active get a turn.
const ASK_EVERY: u32 = 16;
/// Events taken in one poll.
const EVENTS_MAX: usize = 64;
/// The name in the listener's events; no connection has it.
const LISTENER: u64 = u64::MAX;

/// The sockets of a transport: its poller, its listener, and the connections that are read next.
pub(crate) struct Io {
    /// The first field, so that it is dropped before the sockets are closed.
    poller: Poller,
    listener: Listener,
    /// The listener has reported connections that were not accepted yet.
    listener_waits: bool,
    buffers: Buffers,
    /// Number of connections that are watched.
    connections: usize,
    /// Names of the active connections.
    active: Vec<u64>,
    /// Connections for which the poller reports writability.
    waiting_to_write: u32,
    stats: Stats,
}

impl Io {
    /// Listens as `config` says, and prepares its driver.
    ///
    /// # Errors
    /// An address that is not available, a congestion control or a driver that the kernel does not have.
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

    /// The address that it listens on.
    pub(crate) fn local_address(&self) -> io::Result<SocketAddr> {
        self.listener.local_address()
    }

    /// A descriptor that is readable while something is ready.
    pub(crate) fn raw_fd(&self) -> std::os::fd::RawFd {
        self.poller.raw_fd()
    }

    /// Open connections: those that this transport opened and those of peers.
    pub(crate) const fn connections(&self) -> usize {
        self.connections
    }

    /// Counters of bytes and system calls.
    pub(crate) const fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// Single connections.
impl Io {
    /// Starts to connect to `address`. The socket becomes writable when that has succeeded or failed.
    pub(crate) fn connect(&self, address: SocketAddr, config: &Config) -> io::Result<Socket> {
        let socket = Socket::new(address)?;
        tune(&socket, config)?;
        socket.connect(address)?;
        Ok(socket)
    }

    /// Watches a connection from now on, for its `interest`.
    pub(crate) fn watch<R>(&mut self, connection: &Connection<R>) -> io::Result<()> {
        self.poller.add(&connection.socket, connection.name, connection.interest)?;
        self.waiting_to_write += u32::from(connection.interest.writable);
        self.connections += 1;
        Ok(())
    }

    /// Stops watching a connection. Must be called before its socket is closed.
    pub(crate) fn forget<R>(&mut self, connection: &Connection<R>) {
        self.poller.remove(connection.name);
        self.waiting_to_write -= u32::from(connection.interest.writable);
        self.active.retain(|&known| known != connection.name);
        self.connections -= 1;
    }

    /// Sends what waits, and calls `progress` for each item of which something was sent. Returns whether
    /// something was sent.
    #[inline]
    pub(crate) fn send<R>(
        &mut self,
        connection: &mut Connection<R>,
        progress: impl FnMut(&mut R, Source, Progress),
    ) -> io::Result<bool> {
        // Most calls have nothing to send.
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

    /// Receives once, or returns what was already received for the connection. `None`: there is nothing. The
    /// end of the stream is an error.
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

    /// Makes the connection active: it is read without asking until enough reads have found nothing.
    #[inline]
    pub(crate) fn mark_active<R>(&mut self, connection: &mut Connection<R>) {
        if self.poller.reports_changes() {
            // The io_uring driver asks at no cost.
            return;
        }
        if connection.eager_reads == 0 {
            self.add_active(connection.name);
        }
        connection.eager_reads = EAGER_READS;
    }

    /// Called when reading a connection has stopped or may begin again. Unless it is `drained`, there may be
    /// more to read, and a driver that reports changes will not report that again: the connection stays
    /// active.
    #[inline]
    pub(crate) fn stopped_reading<R>(
        &mut self,
        connection: &mut Connection<R>,
        drained: bool,
        timers: &mut Timers,
    ) {
        if self.poller.reports_changes() {
            connection.eager_reads = u16::from(!drained);
            if !drained {
                timers.wake();
                self.add_active(connection.name);
            }
        }
    }

    /// Changes the poller's interest to what the connection waits for, if it differs.
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

/// Which connections are served next.
impl Io {
    /// Whether the driver reports changes rather than states.
    #[cfg(feature = "uring")]
    pub(crate) const fn reports_changes(&self) -> bool {
        self.poller.reports_changes()
    }

    /// Whether poll number `polls` asks the poller which sockets are ready. Otherwise it reads the active
    /// connections.
    #[inline]
    pub(crate) fn asks(&self, polls: u32) -> bool {
        self.active.is_empty() || self.waiting_to_write > 0 || polls.is_multiple_of(ASK_EVERY)
    }

    /// Asks the poller which sockets are ready; returns the number of events for [`Self::event`].
    pub(crate) fn ready(&mut self) -> usize {
        self.stats.waits += 1;
        self.poller.ready().unwrap_or(0)
    }

    /// Event `at` of those that the last [`Self::ready`] counted. `None`: it was the listener's, which is
    /// noted.
    pub(crate) fn event(&mut self, at: usize) -> Option<Event> {
        let event = self.poller.event(at);
        if event.token == LISTENER {
            self.listener_waits = true;
            return None;
        }
        Some(event)
    }

    /// The active connection at position `at`.
    #[inline]
    pub(crate) fn active(&self, at: usize) -> Option<u64> {
        self.active.get(at).copied()
    }

    /// Notes that the connection at position `at` was read; it stays in the list while it is `active`.
    /// Returns the position of the next.
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

    /// Keeps the active connections for which `active` returns true. Returns whether there is one, or whether
    /// the driver has changes that were not returned yet.
    #[cfg(feature = "uring")]
    pub(crate) fn retain_active(&mut self, active: impl Fn(u64) -> bool) -> bool {
        self.active.retain(|&name| active(name));
        !self.active.is_empty() || matches!(&self.poller, Poller::Ring(ring) if ring.has_news())
    }

    /// The active connections from position `from` on, as many as one call can receive for.
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

    /// Adds a connection to those that are read without asking.
    #[inline]
    pub(crate) fn add_active(&mut self, name: u64) {
        if !self.active.contains(&name) {
            self.active.push(name);
        }
    }
}

/// The listener.
impl Io {
    /// Whether connections may wait that can be accepted now. The next call returns false unless the listener
    /// reports again.
    pub(crate) fn takes_connections(&mut self) -> bool {
        std::mem::take(&mut self.listener_waits) && self.listener.paused_until().is_none()
    }

    /// The next connection.
    pub(crate) fn accept(&mut self) -> Accepted {
        self.listener.accept()
    }

    /// Notes that more connections may wait than were accepted: not every driver reports that twice.
    pub(crate) const fn accepts_more(&mut self) {
        self.listener_waits = true;
    }

    /// Pauses the listener for a while: accepting failed with `error`, and would fail again at once.
    pub(crate) fn pause_listener(&mut self, error: &io::Error, connections_max: u32, timers: &mut Timers) {
        if self.poller.modify(&self.listener, LISTENER, Interest::NONE).is_ok() {
            self.listener.pause(timers.now(), error, connections_max);
            timers.due_by(timers.now());
        }
    }

    /// Watches the listener again when its pause is over. Returns when the pause ends.
    pub(crate) fn look_at_listener(&mut self, timers: &mut Timers) -> Option<Instant> {
        if self.listener.is_pause_over(timers.now())
            && self.poller.modify(&self.listener, LISTENER, Interest::READ).is_ok()
        {
            self.listener.resume();
            self.listener_waits = true;
            timers.wake();
        }
        self.listener.paused_until()
    }
}

/// Applies the settings that every socket gets before it is used.
pub(crate) fn tune(socket: &Socket, config: &Config) -> io::Result<()> {
    socket.set_nodelay()?;
    set_buffers(socket, config.send_buffer_bytes, config.receive_buffer_bytes)?;
    match &config.congestion {
        Some(name) => set_congestion(socket, name),
        None => Ok(()),
    }
}

/// Applies the settings that depend on the address at the other end of a connected socket. Returns whether
/// that is an address of this host.
pub(crate) fn tune_to_peer(socket: &Socket, config: &Config) -> bool {
    let (Ok(here), Ok(there)) = (socket.local_address(), socket.peer_address()) else { return false };
    let same_host = there.ip().is_loopback() || here.ip() == there.ip();
    if same_host && config.congestion.is_none() {
        // Within one host pacing gains nothing. A kernel without cubic keeps its default.
        let _ = set_congestion(socket, "cubic");
    }
    same_host
}
