//! Devices and sockets: one port of one device, our queue pairs on it, its completions and events, the
//! listener, and the epoll instance that watches all of them. It does not know slices, regions or requests.
//!
//! ```text
//!   links     the states of our queue pairs           connection  the bytes of one control connection
//!   link      one queue pair, and its posted work     net         its socket
//!   port      the GID that we use, and its proof      connects    threads that connect queue pairs
//! ```

pub(crate) mod connection;
pub(crate) mod connects;
pub(crate) mod link;
pub(crate) mod links;
pub(crate) mod net;
pub(crate) mod port;

use std::io;
use std::net::{SocketAddr, TcpStream};

use te_core::{Error, ErrorKind, Instant};
use te_fabric::net::{Accepted, Listener};
use te_fabric::{Epoll, Event, Interest};

use crate::config::Config;
use crate::open_error::OpenError;
use crate::stats::Stats;
use crate::sys::posting;
use crate::sys::verbs::{
    AsyncEvent, Connecting, DeviceInfo, Path, Qp, QpConfig, Sge, Verbs, WorkCompletion, WorkRequest,
};
use connection::Connection;
use connects::{Connects, End, Task};
use link::Link;
use links::{Destroyed, FlushLimits, Links};
use port::LocalPort;

/// How often one poll reads from one socket before it serves the others.
pub(crate) const ROUNDS_MAX: u32 = 16;
/// The most file descriptors that one poll handles.
const POLLER_EVENTS_MAX: usize = 64;
/// After this many polls without a completion an event is requested, so that the polling thread may park.
const IDLE_POLLS_MAX: u32 = 64;

/// Token of the listener. No connection has it, nor the three that follow.
const LISTENER: u64 = u64::MAX;
/// Token of the completion channel.
const CQ: u64 = u64::MAX - 1;
/// Token of the device's asynchronous events.
const EVENTS: u64 = u64::MAX - 2;
/// Token of the threads that connect queue pairs.
const CONNECTS: u64 = u64::MAX - 3;
/// Set in the token of a peer's control connection, and not in that of one of ours. The low half of both is a
/// name in a table.
const INBOUND: u64 = 1 << 32;

/// A control connection that epoll watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// One that we opened, by its name in `Peers`.
    Outbound(u32),
    /// One that a peer opened, by its name in `Target`.
    Inbound(u32),
}

impl Watched {
    const fn token(self) -> u64 {
        match self {
            Self::Outbound(name) => name as u64,
            Self::Inbound(name) => INBOUND | name as u64,
        }
    }
}

/// Something that epoll reports as ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The listener has new connections.
    Listener,
    /// The device has completions or events.
    Device,
    /// The connecting of queue pairs has ended.
    Connects,
    /// A control connection; true: it can be read.
    Connection(Watched, bool),
}

impl Ready {
    const fn of(event: Event) -> Self {
        match event.token {
            LISTENER => Self::Listener,
            CQ | EVENTS => Self::Device,
            CONNECTS => Self::Connects,
            token if token & INBOUND != 0 => Self::Connection(Watched::Inbound(token as u32), event.readable),
            token => Self::Connection(Watched::Outbound(token as u32), event.readable),
        }
    }
}

/// Why the port carries no traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outage {
    /// The link is down, or the GID is gone. The port may come back.
    Port,
    /// The device or its completion queue is lost for good.
    Device,
}

impl Outage {
    /// The error of slices that end because of it.
    pub(crate) const fn error(self) -> Error {
        Error::new(ErrorKind::Rail)
    }
}

/// The state of the port after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortChange {
    /// The port carries traffic.
    Active {
        /// Its GID has changed, so packets no longer reach the old queue pairs.
        moved: bool,
    },
    /// The port carries no traffic.
    Lost,
}

/// The device and the sockets of one transport.
pub(crate) struct Io<V: Verbs> {
    verbs: V,
    epoll: Epoll,
    listener: Listener,
    port: LocalPort,
    /// Why nothing can be sent at the moment, or for good.
    outage: Option<Outage>,
    links: Links,
    connects: Connects,
    /// Polls in a row that found no completion.
    idle_polls: u32,
    /// An event was requested for the next completion.
    armed: bool,
    /// The provider has a file descriptor for completions.
    can_arm: bool,
    /// The process that opened the device.
    process: u32,
    completions: u64,
    arms: u64,
    events: u64,
}

impl<V: Verbs> Io<V> {
    /// Uses the port that `verbs` has opened, and listens; returns the address of the listener.
    ///
    /// # Errors
    /// An address that cannot be bound, a port that is down, no GID that works.
    pub(crate) fn open(mut verbs: V, config: &Config) -> Result<(Self, SocketAddr), OpenError> {
        let step = |what: &'static str| move |source: io::Error| OpenError::System { what, source };
        let port = LocalPort::open(&mut verbs, config).map_err(|error| match error.kind {
            ErrorKind::Rail => OpenError::PortDown,
            ErrorKind::Unreachable => OpenError::NoGid { code: error.code },
            _ => OpenError::Device { what: "query the port", source: error },
        })?;
        let listener = Listener::bind(config.listen()).map_err(step("listen for control connections"))?;
        let address = listener.local_address().map_err(step("query the address of the listener"))?;
        let epoll = Epoll::new(POLLER_EVENTS_MAX).map_err(step("create an epoll instance"))?;
        epoll.add(&listener, LISTENER, Interest::READ).map_err(step("watch the listener"))?;
        let [completions, events] = verbs.event_fds();
        for (fd, token) in [(completions, CQ), (events, EVENTS)] {
            if let Some(fd) = fd {
                epoll.add(fd, token, Interest::READ).map_err(step("watch the device's file descriptors"))?;
            }
        }
        let can_arm = completions.is_some();
        let connects = Connects::new().map_err(step("make an event descriptor"))?;
        epoll.add(connects.fd(), CONNECTS, Interest::READ).map_err(step("watch the event descriptor"))?;
        let io = Self {
            verbs,
            epoll,
            listener,
            port,
            outage: None,
            links: Links::default(),
            connects,
            idle_polls: 0,
            armed: false,
            can_arm,
            process: std::process::id(),
            completions: 0,
            arms: 0,
            events: 0,
        };
        Ok((io, address))
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        self.verbs.info()
    }

    pub(crate) const fn verbs(&self) -> &V {
        &self.verbs
    }

    /// The provider, for the queue pairs that are held for peers.
    pub(crate) const fn verbs_mut(&mut self) -> &mut V {
        &mut self.verbs
    }

    pub(crate) const fn port(&self) -> &LocalPort {
        &self.port
    }

    pub(crate) const fn outage(&self) -> Option<Outage> {
        self.outage
    }

    /// Whether this process opened the device. A fork shares the device's file with its parent.
    pub(crate) fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// Completions that were taken so far.
    pub(crate) const fn completions(&self) -> u64 {
        self.completions
    }

    pub(crate) const fn count(&self, stats: &mut Stats) {
        stats.completions = self.completions;
        stats.arms = self.arms;
        stats.events = self.events;
        self.links.count(stats);
    }

    /// Destroys our queue pairs. Connecting is stopped first, because a queue pair that is being connected
    /// cannot be destroyed.
    pub(crate) fn close(&mut self) {
        self.connects.stop();
        self.links.destroy_all(&mut self.verbs);
    }
}

/// The port and its state.
impl<V: Verbs> Io<V> {
    /// Queries the port after one of its events.
    pub(crate) fn refresh_port(&mut self, gid_index: Option<u32>) -> PortChange {
        match self.port.refresh(&self.verbs, gid_index) {
            Ok(moved) if self.port.info.active => {
                if moved {
                    log::info!("{}: the GID has index {} now", self.verbs.info().name, self.port.gid.index);
                }
                PortChange::Active { moved }
            }
            _ => PortChange::Lost,
        }
    }

    /// Notes that the port carries no traffic. False: that was known already.
    pub(crate) fn lose_port(&mut self, outage: Outage) -> bool {
        if self.outage == Some(Outage::Device) || self.outage == Some(outage) {
            return false;
        }
        let state = match outage {
            Outage::Port => "the port carries no traffic",
            Outage::Device => "the device is lost",
        };
        log::warn!("{}: {state}", self.verbs.info().name);
        self.outage = Some(outage);
        true
    }

    /// Notes that the port carries traffic. False: that was known already, or the device is lost.
    pub(crate) fn regain_port(&mut self) -> bool {
        if self.outage != Some(Outage::Port) {
            return false;
        }
        log::info!("{}: the port carries traffic again", self.verbs.info().name);
        self.outage = None;
        true
    }
}

/// Our queue pairs.
impl<V: Verbs> Io<V> {
    #[inline]
    pub(crate) const fn links(&self) -> &Links {
        &self.links
    }

    #[inline]
    pub(crate) const fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }

    /// As [`Links::make`], with a first packet number of `psn`.
    ///
    /// # Errors
    /// As [`Links::make`].
    pub(crate) fn make_link(&mut self, to: (u32, u8), shape: QpConfig, psn: u32) -> Result<&Link, Error> {
        self.links.make(&mut self.verbs, to, shape, (psn, self.port.mtu))
    }

    /// As [`Verbs::connect_qp`].
    ///
    /// # Errors
    /// As [`Verbs::connect_qp`].
    pub(crate) fn connect(&mut self, qp: Qp, path: Path) -> Result<Connecting, Error> {
        self.verbs.connect_qp(qp.handle, path)
    }

    /// As [`Links::fail`].
    pub(crate) fn fail_link(
        &mut self,
        index: u32,
        error: Option<Error>,
        now: Instant,
        config: &Config,
    ) -> Option<Instant> {
        let limits = self.flush_limits(now, config);
        self.links.fail(&mut self.verbs, index, error, limits)
    }

    /// As [`Links::destroy`].
    pub(crate) fn destroy_link(&mut self, index: u32, now: Instant, config: &Config) -> Destroyed {
        let limits = self.flush_limits(now, config);
        self.links.destroy(&mut self.verbs, index, limits)
    }

    fn flush_limits(&self, now: Instant, config: &Config) -> FlushLimits {
        let device_lost = self.outage == Some(Outage::Device);
        FlushLimits { now, flush_ms_max: config.flush_ms_max, device_lost }
    }

    /// Posts work requests on one of our queue pairs: see [`posting::post`] for the promise of `inline`.
    /// Returns how many it took, and the error that stopped it.
    #[inline]
    pub(crate) fn post(&mut self, qp: Qp, requests: &[WorkRequest], sges: &[Sge]) -> (usize, Option<Error>) {
        let (taken, error) = posting::post(&mut self.verbs, qp.handle, requests, sges);
        (taken.min(requests.len()), error)
    }
}

/// Completions and events.
impl<V: Verbs> Io<V> {
    /// Takes completions.
    ///
    /// # Errors
    /// The completion queue is lost.
    #[inline]
    pub(crate) fn poll_completions(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        let count = self.verbs.poll_cq(out)?;
        self.completions += count as u64;
        Ok(count)
    }

    /// Notes how many completions a poll found.
    #[inline]
    pub(crate) const fn polled(&mut self, count: usize) {
        self.idle_polls = if count == 0 { self.idle_polls.saturating_add(1) } else { 0 };
    }

    /// Whether an event was requested for the next completion.
    pub(crate) const fn is_armed(&self) -> bool {
        self.armed
    }

    /// Whether work is posted, and no event will report its completion.
    pub(crate) const fn must_poll(&self) -> bool {
        self.links.outstanding() > 0 && !self.armed
    }

    /// Whether to request an event: work is posted, and the last polls found nothing.
    pub(crate) const fn wants_event(&self) -> bool {
        self.can_arm && !self.armed && self.links.outstanding() > 0 && self.idle_polls >= IDLE_POLLS_MAX
    }

    /// Requests an event for the next completion. Poll once more afterwards: a completion that came in
    /// between raises none.
    ///
    /// # Errors
    /// The device is lost.
    pub(crate) fn arm(&mut self) -> Result<(), Error> {
        self.verbs.arm()?;
        self.armed = true;
        self.arms += 1;
        Ok(())
    }

    /// The next event of the device.
    pub(crate) fn next_event(&mut self) -> Option<AsyncEvent> {
        let event = self.verbs.next_event()?;
        self.events += 1;
        Some(event)
    }

    /// Notes that all events were taken, the requested one included.
    pub(crate) const fn disarm(&mut self) {
        self.armed = false;
    }
}

/// Sockets, and threads that connect.
impl<V: Verbs> Io<V> {
    pub(crate) fn raw_fd(&self) -> i32 {
        self.epoll.raw_fd()
    }

    /// Asks epoll what is ready; returns the number of reports, which [`Self::event`] returns one by one.
    pub(crate) fn ready(&mut self) -> usize {
        self.epoll.ready().unwrap_or(0)
    }

    /// Report number `at` of the last [`Self::ready`].
    pub(crate) fn event(&self, at: usize) -> Ready {
        Ready::of(self.epoll.event(at))
    }

    /// Whether `count` is the most that one call of epoll can report, so that there may be more.
    pub(crate) fn is_full(&self, count: usize) -> bool {
        count == self.epoll.events_max()
    }

    /// Watches a new control connection.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn watch(&self, stream: &TcpStream, as_what: Watched, interest: Interest) -> io::Result<()> {
        self.epoll.add(stream, as_what.token(), interest)
    }

    /// Updates the readiness that epoll watches a control connection for.
    pub(crate) fn settle_interest(&self, connection: &mut Connection, as_what: Watched) {
        let wanted = connection.wanted();
        if wanted != connection.interest
            && self.epoll.modify(&connection.stream, as_what.token(), wanted).is_ok()
        {
            connection.interest = wanted;
        }
    }

    /// Takes the next connection of a peer.
    pub(crate) fn accept(&mut self) -> Accepted {
        self.listener.accept()
    }

    /// Pauses the listener after an error of `accept`; returns the end of the pause.
    pub(crate) fn pause_listener(
        &mut self,
        now: Instant,
        error: &io::Error,
        config: &Config,
    ) -> Option<Instant> {
        self.epoll.modify(&self.listener, LISTENER, Interest::NONE).ok()?;
        Some(self.listener.pause(now, error, config.connections_max))
    }

    /// Ends the listener's pause when it is over.
    pub(crate) fn resume_listener(&mut self, now: Instant) {
        if self.listener.is_pause_over(now)
            && self.epoll.modify(&self.listener, LISTENER, Interest::READ).is_ok()
        {
            self.listener.resume();
        }
    }

    /// The end of the listener's pause.
    pub(crate) const fn listener_paused_until(&self) -> Option<Instant> {
        self.listener.paused_until()
    }

    /// As [`Connects::push`].
    pub(crate) fn push_connects(&mut self, task: Task) -> Result<(), Task> {
        self.connects.push(task)
    }

    /// Whether queue pairs are being connected.
    pub(crate) fn is_connecting(&self) -> bool {
        self.connects.is_busy()
    }

    /// As [`Connects::take`].
    pub(crate) fn take_connected(&mut self) -> Vec<End> {
        self.connects.take()
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::sim::{DeviceConfig, SimConfig, SimDevice, SimFabric};

    fn io() -> (SimFabric, Io<SimDevice>) {
        let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
        let config = Config { proof_ms_max: 0, ..Config::default() };
        let (io, address) =
            Io::open(fabric.device(DeviceConfig::default()), &config).expect("a port that works");
        assert_ne!(address.port(), 0);
        (fabric, io)
    }

    #[test]
    fn tokens_distinguish_connections_from_each_other_and_from_everything_else() {
        let event = |token| Event { token, readable: true, writable: false, finished: false };
        for name in [0, 7, u32::MAX] {
            for watched in [Watched::Outbound(name), Watched::Inbound(name)] {
                assert_eq!(Ready::of(event(watched.token())), Ready::Connection(watched, true));
            }
        }
        let others = [LISTENER, CQ, EVENTS, CONNECTS].map(|token| Ready::of(event(token)));
        assert_eq!(others, [Ready::Listener, Ready::Device, Ready::Device, Ready::Connects]);
    }

    #[test]
    fn a_port_that_comes_back_ends_its_outage_and_a_lost_device_stays_lost() {
        let (fabric, mut io) = io();
        let port = io.verbs().id();
        fabric.set_port_active(port, false);
        assert_eq!(io.refresh_port(None), PortChange::Lost);
        assert_eq!((io.lose_port(Outage::Port), io.lose_port(Outage::Port)), (true, false));
        fabric.set_port_active(port, true);
        assert_eq!(io.refresh_port(None), PortChange::Active { moved: false });
        assert_eq!((io.regain_port(), io.regain_port(), io.outage()), (true, false, None));
        assert!(io.lose_port(Outage::Device) && !io.lose_port(Outage::Port) && !io.regain_port());
        assert_eq!(io.outage(), Some(Outage::Device));
    }

    #[test]
    fn an_event_is_requested_when_polling_finds_nothing_and_work_is_posted() {
        let (_fabric, mut io) = io();
        (0..IDLE_POLLS_MAX).for_each(|_| io.polled(0));
        assert!(!io.wants_event(), "nothing is posted");
        io.links_mut().posted(1);
        assert!(io.wants_event() && io.must_poll());
        io.arm().expect("a device that works");
        assert!(!io.wants_event() && !io.must_poll() && io.is_armed());
        io.disarm();
        io.polled(1);
        assert!(!io.wants_event() && io.must_poll());
        let mut stats = Stats::default();
        io.count(&mut stats);
        assert_eq!((stats.arms, stats.completions), (1, 0));
    }

    #[test]
    fn a_listener_pauses_for_a_while() {
        let (_fabric, mut io) = io();
        let error = io::Error::from_raw_os_error(libc::EMFILE);
        let now = Instant::from_millis(10);
        let until = io.pause_listener(now, &error, &Config::default());
        assert!(until.is_some() && io.listener_paused_until() == until);
        io.resume_listener(now);
        assert_eq!(io.listener_paused_until(), until);
        io.resume_listener(until.unwrap_or(now));
        assert_eq!(io.listener_paused_until(), None);
    }
}
