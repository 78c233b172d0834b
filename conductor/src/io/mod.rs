//! The event thread: every socket to a publisher, on one poller.
//!
//! ```text
//!   commands (add, remove, report) ──▶┐
//!   names that were looked up ───────▶│ poll ─▶ read ─▶ stream ─▶ decode ─▶ knowledge (a short write)
//!   sockets, timers ─────────────────▶┘                    └─ ask ─▶ a replay's connection
//! ```
//!
//! A publisher has at most one connection for events and one for a replay. A lost one is opened again after a
//! wait that doubles with each failure. With nothing to read the thread sleeps in the kernel until the next
//! heartbeat is due.

mod intake;
mod peer;
mod publisher;
mod resolver;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use conductor_core::knowledge::{PublisherId, Said};
use conductor_core::stream::{Adoption, Counters, Position, Sink as _, State};
use conductor_core::zmtp::{Kind, Limits};
use mio::net::TcpListener;
use mio::{Events, Interest, Poll, Token, Waker};
use te_core::Instant;
use tokio::sync::oneshot;
use tracing::{debug, error, warn};

use crate::shared::Shared;
use intake::Intake;
use peer::Peer;
use publisher::{Publisher, Replay, Turn};
pub(crate) use publisher::{Subscription, Totals};
use resolver::{Question, Resolver};

const WAKE: Token = Token(usize::MAX);
const EVENTS_PER_POLL_MAX: usize = 1_024;
/// Tokens per publisher: events, replay, listener.
const PARTS: usize = 4;
const EVENTS: usize = 0;
const REPLAY: usize = 1;
const LISTENER: usize = 2;
/// Most connections that one listener accepts before others get their turn.
const ACCEPTS_MAX: usize = 16;
/// Housekeeping of the knowledge (sweeping, expiry) happens about this often while there is something to do.
const HOUSEKEEPING_EVERY: Duration = Duration::from_millis(20);
/// Entries that one round of housekeeping visits: about a millisecond.
const SWEEP_BUDGET: usize = 8_192;

/// What the event thread is told.
pub(crate) enum Command {
    /// Subscribe to a publisher.
    Add(Box<Subscription>),
    /// Forget a publisher. The answer comes when nothing of it will be applied any more.
    Remove(PublisherId, oneshot::Sender<()>),
    /// The state of all publishers.
    Report(oneshot::Sender<Vec<Report>>),
    /// The index, with the positions of all streams.
    Snapshot(oneshot::Sender<Vec<u8>>),
    /// What a publisher said, with the position of its stream; none: it is a store, or said nothing.
    Said(PublisherId, oneshot::Sender<Option<Said>>),
    /// What the other Conductor knows of a publisher is about to be fetched. The answer says whether it may
    /// be.
    Prepare(PublisherId, oneshot::Sender<bool>),
    /// What the other Conductor knows of a publisher.
    Adopt(PublisherId, Arc<Said>, oneshot::Sender<Adoption>),
    /// Forget what a publisher said, and ask it for everything.
    ReadAnew(PublisherId),
    /// The address of a publisher's events or replay endpoint was looked up.
    Resolved(PublisherId, Part, Option<SocketAddr>),
}

/// Which connection of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// That of its events.
    Events,
    /// That of a replay.
    Replay,
}

/// A publisher's state.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) id: PublisherId,
    pub(crate) state: State,
    pub(crate) counters: Counters,
    pub(crate) totals: Totals,
    /// Where it is, for a snapshot.
    pub(crate) position: Option<Position>,
    /// Whether everything that it ever said was applied.
    pub(crate) is_whole: bool,
}

/// Tells the event thread what to do.
#[derive(Clone, Debug)]
pub(crate) struct Commander {
    commands: Sender<Command>,
    waker: Arc<Waker>,
    stop: Arc<AtomicBool>,
}

impl Commander {
    /// Sends a command. Returns false when the thread has ended.
    pub(crate) fn send(&self, command: Command) -> bool {
        self.commands.send(command).is_ok() && self.waker.wake().is_ok()
    }

    /// Ends the thread.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            error!(%error, "the event thread cannot be woken");
        }
    }
}

/// The event thread. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct EventThread {
    commander: Commander,
    thread: Option<JoinHandle<()>>,
}

impl EventThread {
    /// What is needed before the thread exists.
    ///
    /// # Errors
    /// The operating system has no poller.
    pub(crate) fn prepare() -> io::Result<(Commander, Prepared)> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let (commands, received) = channel();
        let commander = Commander { commands, waker, stop: Arc::default() };
        Ok((commander.clone(), Prepared { poll, received, commander }))
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub(crate) fn start(prepared: Prepared, shared: Arc<Shared>) -> io::Result<Self> {
        let commander = prepared.commander.clone();
        let answers = prepared.commander.clone();
        let resolver = Resolver::start(move |(id, part), found| {
            answers.send(Command::Resolved(id, part, found));
        })?;
        let mut service = Service {
            limits: zmtp_limits(&shared),
            poll: prepared.poll,
            received: prepared.received,
            stop: Arc::clone(&prepared.commander.stop),
            resolver,
            publishers: Vec::new(),
            intake: Intake::default(),
            more: Vec::new(),
            due_at: Instant::ZERO,
            housekeeping_at: Some(Instant::ZERO),
            shared,
        };
        let thread = thread::Builder::new().name("snowskin-events".into()).spawn(move || {
            if let Err(error) = service.run() {
                error!(%error, "the event thread has failed");
            }
        })?;
        Ok(Self { commander, thread: Some(thread) })
    }

    /// Whether the thread has ended by itself.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for EventThread {
    fn drop(&mut self) {
        self.commander.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the event thread panicked");
        }
    }
}

/// An event thread that is not started.
#[derive(Debug)]
pub(crate) struct Prepared {
    poll: Poll,
    received: Receiver<Command>,
    commander: Commander,
}

/// State of the event thread.
struct Service {
    shared: Arc<Shared>,
    limits: Limits,
    poll: Poll,
    received: Receiver<Command>,
    stop: Arc<AtomicBool>,
    resolver: Resolver<(PublisherId, Part)>,
    /// By slot, which tokens name.
    publishers: Vec<Option<Publisher>>,
    intake: Intake,
    /// Tokens of sockets that have more to read than a turn allowed.
    more: Vec<usize>,
    /// When the timers are looked at next.
    due_at: Instant,
    /// When the knowledge is cleaned up next; `None` while there is nothing to do.
    housekeeping_at: Option<Instant>,
}

impl Service {
    fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS_PER_POLL_MAX);
        let mut turns = Vec::new();
        while !self.stop.load(Ordering::Acquire) {
            let timeout = self.timeout();
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            let now = self.shared.now();
            turns.append(&mut self.more);
            turns.extend(
                events
                    .iter()
                    .map(mio::event::Event::token)
                    .filter(|token| *token != WAKE)
                    .map(|token| token.0),
            );
            turns.sort_unstable();
            turns.dedup();
            for token in turns.drain(..) {
                self.turn(token, now);
            }
            self.commands(now);
            if now >= self.due_at {
                self.timers(now);
            }
            self.keep_house(now);
        }
        Ok(())
    }

    /// How long to sleep.
    fn timeout(&self) -> Option<Duration> {
        if !self.more.is_empty() {
            return Some(Duration::ZERO);
        }
        let at = self.housekeeping_at.map_or(self.due_at, |at| at.min(self.due_at));
        (at != Instant::from_nanos(u64::MAX)).then(|| at - self.shared.now())
    }

    fn turn(&mut self, token: usize, now: Instant) {
        let (slot, part) = (token / PARTS, token % PARTS);
        let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
        let turn = match part {
            EVENTS => publisher.serve_events(now, &self.shared, &mut self.intake),
            REPLAY => publisher.serve_replay(now, &self.shared, &mut self.intake),
            _ => return self.accept(slot, now),
        };
        match turn {
            Turn::Done => {}
            Turn::More => self.more.push(token),
            Turn::Lost(_) if part == EVENTS => self.lost_events(slot, now),
            Turn::Lost(_) => self.lost_replay(slot, now),
        }
        self.after(slot, now);
    }

    /// The connection of events is lost: another one is opened later.
    fn lost_events(&mut self, slot: usize, now: Instant) {
        let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
        publisher.events = None;
        publisher.replay = None;
        publisher.ask_from = None;
        let wait = publisher.next_backoff(&self.shared.config.streams);
        publisher.connect_at = publisher.listener.is_none().then(|| now + wait);
        publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| stream.disconnected(now, sink));
    }

    /// The connection of a replay is at its end, in order or not.
    fn lost_replay(&mut self, slot: usize, now: Instant) {
        let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
        publisher.replay = None;
        if publisher.ask_from.is_none() {
            // After its end this has no effect.
            publisher
                .with_stream(&self.shared, &mut self.intake, |stream, sink| stream.replay_failed(now, sink));
        }
    }

    /// Opens the connection of a replay that was asked for, and looks when this publisher is due.
    fn after(&mut self, slot: usize, now: Instant) {
        // A replay that cannot be asked for may lead to another one; the stream limits how often.
        while let Some(Some(publisher)) = self.publishers.get_mut(slot)
            && let Some(from) = publisher.ask_from
        {
            publisher.replay = None;
            let Some(endpoint) = publisher.what.replay.clone() else {
                publisher.ask_from = None;
                break;
            };
            match Publisher::literal(&endpoint) {
                Some(addr) => self.open_replay(slot, addr, from, now),
                None => {
                    let of = (publisher.what.id, Part::Replay);
                    self.resolver.ask(Question { of, endpoint });
                    break;
                }
            }
        }
        if let Some(Some(publisher)) = self.publishers.get(slot)
            && let Some(at) = publisher.due_at()
        {
            self.due_at = self.due_at.min(at);
        }
        self.housekeeping_at.get_or_insert(now + HOUSEKEEPING_EVERY);
    }

    fn open_replay(&mut self, slot: usize, addr: SocketAddr, from: u64, now: Instant) {
        let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
        publisher.ask_from = None;
        let token = Token(slot * PARTS + REPLAY);
        match Peer::connect(addr, Kind::Dealer, self.limits, now, self.poll.registry(), token) {
            Ok(peer) => publisher.replay = Some(Replay { peer, from: Some(from) }),
            Err(error) => {
                debug!(publisher = publisher.what.name, %error, "a replay cannot be asked for");
                publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| {
                    stream.replay_failed(now, sink)
                });
            }
        }
    }

    fn open_events(&mut self, slot: usize, addr: SocketAddr, now: Instant) {
        let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
        publisher.connect_at = None;
        let token = Token(slot * PARTS + EVENTS);
        match Peer::connect(addr, Kind::Sub, self.limits, now, self.poll.registry(), token) {
            Ok(mut peer) => {
                peer.zmtp.subscribe(publisher.what.topic.as_bytes());
                publisher.events = Some(peer);
            }
            Err(error) => {
                debug!(publisher = publisher.what.name, %error, "a publisher cannot be connected to");
                let wait = publisher.next_backoff(&self.shared.config.streams);
                publisher.connect_at = Some(now + wait);
            }
        }
    }

    /// Listens, for a publisher that connects by itself.
    fn listen(&mut self, slot: usize, addr: SocketAddr, now: Instant) {
        let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
        publisher.connect_at = None;
        let listening = TcpListener::bind(addr).and_then(|mut listener| {
            let token = Token(slot * PARTS + LISTENER);
            self.poll.registry().register(&mut listener, token, Interest::READABLE)?;
            Ok(listener)
        });
        match listening {
            Ok(listener) => publisher.listener = Some(listener),
            Err(error) => {
                warn!(publisher = publisher.what.name, %addr, %error, "cannot listen for a publisher");
                let wait = publisher.next_backoff(&self.shared.config.streams);
                publisher.connect_at = Some(now + wait);
            }
        }
    }

    /// Accepts the publisher's connection. A new one takes the place of the former: its publisher has
    /// restarted.
    fn accept(&mut self, slot: usize, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
            let Some(listener) = &publisher.listener else { return };
            let Ok((stream, _)) = listener.accept() else { return };
            if publisher.events.is_some() {
                self.lost_events(slot, now);
            }
            let Some(Some(publisher)) = self.publishers.get_mut(slot) else { return };
            let token = Token(slot * PARTS + EVENTS);
            match Peer::accepted(stream, Kind::Sub, self.limits, now, self.poll.registry(), token) {
                Ok(mut peer) => {
                    peer.zmtp.subscribe(publisher.what.topic.as_bytes());
                    publisher.events = Some(peer);
                    self.more.push(token.0);
                }
                Err(error) => debug!(publisher = publisher.what.name, %error, "a connection is lost"),
            }
            self.after(slot, now);
        }
        self.more.push(slot * PARTS + LISTENER);
    }

    fn commands(&mut self, now: Instant) {
        while let Ok(command) = self.received.try_recv() {
            match command {
                Command::Add(what) => {
                    let bytes_max = self.shared.config.limits.message_bytes_max as usize;
                    let decoder = self.shared.knowledge.read().decoder(what.id);
                    // It may have been taken out meanwhile.
                    let Some(decoder) = decoder else { continue };
                    let streams = &self.shared.config.streams;
                    let publisher = Publisher::new(*what, decoder, streams, bytes_max, now);
                    match self.publishers.iter().position(Option::is_none) {
                        Some(slot) => self.publishers[slot] = Some(publisher),
                        None => self.publishers.push(Some(publisher)),
                    }
                    self.due_at = now;
                }
                Command::Remove(id, done) => {
                    if let Some(slot) = self.slot(id) {
                        if let Some(publisher) = &mut self.publishers[slot] {
                            publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| {
                                stream.died(now, sink);
                                sink.serve(false);
                            });
                        }
                        self.publishers[slot] = None;
                    }
                    let _ = done.send(());
                }
                Command::Report(to) => {
                    let reports = self.publishers.iter().flatten().map(|publisher| Report {
                        id: publisher.what.id,
                        state: publisher.stream.state(),
                        counters: *publisher.stream.counters(),
                        totals: publisher.totals,
                        position: publisher.stream.position(),
                        is_whole: publisher.stream.is_whole(),
                    });
                    let _ = to.send(reports.collect());
                }
                Command::Snapshot(to) => {
                    let mut bytes = Vec::new();
                    let position = |id| {
                        let mut publishers = self.publishers.iter().flatten();
                        publishers.find(|it| it.what.id == id).and_then(|it| it.stream.position())
                    };
                    self.shared.knowledge.read().snapshot(position, &mut bytes);
                    let _ = to.send(bytes);
                }
                Command::Said(id, to) => {
                    let position = self.publisher(id).and_then(|publisher| publisher.stream.position());
                    let said = position.and_then(|at| self.shared.knowledge.read().said_by(id, at));
                    let _ = to.send(said);
                }
                Command::Prepare(id, to) => {
                    let prepared = self.publisher(id).is_some_and(|publisher| publisher.stream.prepare(now));
                    self.due_at = now;
                    let _ = to.send(prepared);
                }
                Command::Adopt(id, said, to) => {
                    let adoption = self.adopt(id, &said, now);
                    let _ = to.send(adoption);
                }
                Command::ReadAnew(id) => {
                    if let Some(slot) = self.slot(id) {
                        if let Some(publisher) = &mut self.publishers[slot] {
                            publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| {
                                stream.died(now, sink)
                            });
                        }
                        self.lost_events(slot, now);
                        self.due_at = now;
                    }
                }
                Command::Resolved(id, part, found) => self.resolved(id, part, found, now),
            }
        }
    }

    fn resolved(&mut self, id: PublisherId, part: Part, found: Option<SocketAddr>, now: Instant) {
        let Some(slot) = self.slot(id) else { return };
        let Some(publisher) = &mut self.publishers[slot] else { return };
        match (part, found) {
            (Part::Events, Some(addr)) if publisher.what.bind => self.listen(slot, addr, now),
            (Part::Events, Some(addr)) => self.open_events(slot, addr, now),
            (Part::Events, None) => {
                warn!(publisher = publisher.what.name, host = publisher.what.endpoint.host, "unknown host");
                let wait = publisher.next_backoff(&self.shared.config.streams);
                publisher.connect_at = Some(now + wait);
            }
            (Part::Replay, found) => {
                // Since the look-up began, the connection may have been lost.
                if let Some(from) = publisher.ask_from {
                    match found {
                        Some(addr) => self.open_replay(slot, addr, from, now),
                        None => {
                            publisher.ask_from = None;
                            publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| {
                                stream.replay_failed(now, sink);
                            });
                        }
                    }
                }
            }
        }
        self.after(slot, now);
    }

    /// Lets a stream go on where the other Conductor was.
    fn adopt(&mut self, id: PublisherId, said: &Said, now: Instant) -> Adoption {
        let Some(slot) = self.slot(id) else { return Adoption::Refused };
        let Some(publisher) = &mut self.publishers[slot] else { return Adoption::Refused };
        let mut adoption = Adoption::Refused;
        publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| {
            adoption = stream.adopt(now, said.position(), sink, |sink| sink.adopt(said));
        });
        self.after(slot, now);
        adoption
    }

    fn publisher(&mut self, id: PublisherId) -> Option<&mut Publisher> {
        let slot = self.slot(id)?;
        self.publishers[slot].as_mut()
    }

    fn slot(&self, id: PublisherId) -> Option<usize> {
        self.publishers.iter().position(|publisher| publisher.as_ref().is_some_and(|it| it.what.id == id))
    }

    /// Connections that are to be opened, heartbeats, and timeouts of streams.
    fn timers(&mut self, now: Instant) {
        self.due_at = Instant::from_nanos(u64::MAX);
        for slot in 0..self.publishers.len() {
            let Some(publisher) = &mut self.publishers[slot] else { continue };
            if publisher.due_at().is_some_and(|at| at <= now) {
                self.timer(slot, now);
            }
            if let Some(at) = self.publishers[slot].as_ref().and_then(Publisher::due_at) {
                self.due_at = self.due_at.min(at);
            }
        }
    }

    fn timer(&mut self, slot: usize, now: Instant) {
        let Some(publisher) = &mut self.publishers[slot] else { return };
        let [events_lost, replay_lost] = publisher.tick_peers(now);
        publisher.with_stream(&self.shared, &mut self.intake, |stream, sink| stream.tick(now, sink));
        if publisher.connect_at.is_some_and(|at| at <= now) {
            publisher.connect_at = None;
            let endpoint = publisher.what.endpoint.clone();
            match (Publisher::literal(&endpoint), publisher.what.bind) {
                (Some(addr), true) => self.listen(slot, addr, now),
                (Some(addr), false) => self.open_events(slot, addr, now),
                (None, _) => {
                    let of = (publisher.what.id, Part::Events);
                    self.resolver.ask(Question { of, endpoint });
                }
            }
        }
        if events_lost {
            self.lost_events(slot, now);
        } else if replay_lost {
            self.lost_replay(slot, now);
        }
        self.after(slot, now);
    }

    /// Cleans up the knowledge, a little at a time.
    fn keep_house(&mut self, now: Instant) {
        if self.housekeeping_at.is_some_and(|at| at <= now) {
            let next = self.shared.keep_house(now, SWEEP_BUDGET);
            self.housekeeping_at = next.map(|at| at.max(now + HOUSEKEEPING_EVERY));
        }
    }
}

/// Limits of every connection.
fn zmtp_limits(shared: &Shared) -> Limits {
    let bytes = shared.config.limits.message_bytes_max as usize;
    let streams = &shared.config.streams;
    Limits {
        part_bytes_max: bytes,
        message_bytes_max: bytes,
        parts_max: 8,
        output_bytes_max: 64 << 10,
        heartbeat_interval: Duration::from_millis(streams.heartbeat_ms.into()),
        heartbeat_timeout: Duration::from_millis(streams.silent_ms_max.into()),
        ..Limits::default()
    }
}
