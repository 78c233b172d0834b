//! The RPC server: one thread, one poll, one [`Master`].

use std::collections::VecDeque;
use std::fmt::Display;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, UnixListener};
use mio::{Events, Interest, Poll, Token, Waker};
use store_core::{ErrorCode, Frame, Kind, Master, Peer, Session, Trace, WireError};
use tracing::{debug, info, warn};

use crate::Config;
use crate::connection::{Connection, Handler, Pumped, Stream, answer_status};
use crate::epoch;
use crate::error::{BindError, ConfigError, ServeError};
use crate::http::{Http, Question};
use crate::metadata;
use crate::metrics::{self, RequestCounters, Snapshot};

const TCP: Token = Token(usize::MAX);
const UNIX: Token = Token(usize::MAX - 1);
const WAKE: Token = Token(usize::MAX - 2);
/// A yield that takes this long has waited for somebody who computes; then spinning pauses.
const CROWDED: Duration = Duration::from_micros(500);
const CROWDED_PAUSE: Duration = Duration::from_millis(100);

const EVENTS_PER_POLL_MAX: usize = 1024;
/// How often connections are checked for stalling. Only while there are any.
const SWEEP: Duration = Duration::from_millis(500);
/// How long accepting pauses when the system has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A master that is bound to its addresses, and serves when it is [`run`](Self::run) or [`spawn`](Self::spawn)ed.
#[derive(Debug)]
pub struct MasterServer {
    config: Config,
    master: Master,
    poll: Poll,
    tcp: TcpListener,
    unix: Option<(UnixListener, PathBuf)>,
    rpc_addr: SocketAddr,
    http: Option<Http>,
    questions: Option<Receiver<Question>>,
    stopper: Stopper,
}

/// Stops a master from any thread, gracefully. Clones stop the same one.
#[derive(Clone, Debug)]
pub struct Stopper {
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

/// A master on a thread of its own. Dropping it stops it.
#[derive(Debug)]
pub struct MasterHandle {
    rpc_addr: SocketAddr,
    http_addr: Option<SocketAddr>,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl MasterServer {
    /// Opens everything that can fail to open. Nothing is answered before [`run`](Self::run).
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(mut config: Config) -> Result<Self, BindError> {
        config.validate()?;
        let poll = Poll::new()?;
        let mut tcp =
            TcpListener::bind(config.rpc_listen).map_err(listen_error("rpc_listen", &config.rpc_listen))?;
        let rpc_addr = tcp.local_addr()?;
        poll.registry().register(&mut tcp, TCP, Interest::READABLE)?;
        let unix = match config.rpc_unix.clone() {
            Some(path) => {
                let mut unix = bind_unix(&path).map_err(listen_error("rpc_unix", &path.display()))?;
                poll.registry().register(&mut unix, UNIX, Interest::READABLE)?;
                Some((unix, path))
            }
            None => None,
        };
        let stopper = Stopper {
            stop: Arc::new(AtomicBool::new(false)),
            waker: Arc::new(Waker::new(poll.registry(), WAKE)?),
        };
        let (http, questions) = match config.http_listen {
            Some(addr) => {
                let (waker, stopping) = (Arc::clone(&stopper.waker), Arc::clone(&stopper.stop));
                let secret = config.store.admin_secret.clone();
                let (http, questions) = Http::bind(addr, config.http, waker, stopping, secret)
                    .map_err(listen_error("http_listen", &addr))?;
                (Some(http), Some(questions))
            }
            None => (None, None),
        };
        epoch::fill(&mut config.store);
        let master = Master::new(config.store.clone()).map_err(|error| ConfigError {
            field: error.setting,
            need: "is out of its limits: see store_core::MasterConfig",
        })?;
        Ok(Self { config, master, poll, tcp, unix, rpc_addr, http, questions, stopper })
    }

    /// Where nodes and clients connect.
    #[must_use]
    pub fn rpc_addr(&self) -> SocketAddr {
        self.rpc_addr
    }

    /// Where `/health`, `/ready` and `/metrics` are, if they are served.
    #[must_use]
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(Http::addr)
    }

    /// What stops it.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Serves on the calling thread until the [`stopper`](Self::stopper) says so. Then it accepts no more, answers what it
    /// has read, hands the answers out for at most `stop_ms_max`, and closes.
    ///
    /// # Errors
    /// See [`ServeError`].
    pub fn run(self) -> Result<(), ServeError> {
        let mut http = self.http;
        if let Some(http) = &mut http {
            let metadata = self.config.metadata_server.then(|| metadata::router(self.config.metadata));
            http.start(metadata.unwrap_or_default()).map_err(ServeError::Poll)?;
        }
        info!(rpc = %self.rpc_addr, "master serves");
        let now = Instant::now();
        let mut service = Service {
            backlog_bytes_max: self.config.backlog_bytes_max as usize,
            buffered_bytes_max: (self.config.buffered_mib_max as usize) << 20,
            buffered_bytes: 0,
            started: now,
            answering: Answering {
                master: self.master,
                requests: RequestCounters::default(),
                now: te_core::Instant::ZERO,
                slow: slow_ms(self.config.slow_request_ms),
                turn: Turn::default(),
            },
            config: self.config,
            poll: self.poll,
            tcp: Some(self.tcp),
            unix: self.unix,
            connections: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            open: 0,
            refused_total: 0,
            accepted_total: 0,
            questions: self.questions,
            accept_pending: false,
            sweep_at: now + SWEEP,
            stop: self.stopper.stop,
        };
        let result = service.run();
        drop(http);
        result
    }

    /// Serves on a thread of its own.
    ///
    /// # Errors
    /// `System` when there is no thread to be had.
    pub fn spawn(self) -> Result<MasterHandle, BindError> {
        let (rpc_addr, http_addr, stopper) = (self.rpc_addr, self.http_addr(), self.stopper());
        let thread = thread::Builder::new().name("snowskin-master".into()).spawn(move || self.run())?;
        Ok(MasterHandle { rpc_addr, http_addr, stopper, thread: Some(thread) })
    }
}

impl Stopper {
    /// Begins a graceful stop; does not wait for it.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        // A waker fails only when its poll is gone; then there is nothing to stop.
        let _ = self.waker.wake();
    }
}

impl MasterHandle {
    /// Where nodes and clients connect.
    #[must_use]
    pub fn rpc_addr(&self) -> SocketAddr {
        self.rpc_addr
    }

    /// Where `/health`, `/ready` and `/metrics` are, if they are served.
    #[must_use]
    pub fn http_addr(&self) -> Option<SocketAddr> {
        self.http_addr
    }

    /// What stops it.
    #[must_use]
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Stops it gracefully and waits for the end.
    ///
    /// # Errors
    /// Why it had ended before, or did not end well.
    pub fn stop(mut self) -> Result<(), ServeError> {
        self.stopper.stop();
        self.join()
    }

    fn join(&mut self) -> Result<(), ServeError> {
        match self.thread.take() {
            Some(thread) => thread.join().map_err(|_| ServeError::Panicked)?,
            None => Ok(()),
        }
    }
}

impl Drop for MasterHandle {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Err(error) = self.join() {
            warn!(%error, "master ended");
        }
    }
}

/// Everything the serving thread owns.
struct Service {
    config: Config,
    backlog_bytes_max: usize,
    buffered_bytes_max: usize,
    /// What all connections hold.
    buffered_bytes: usize,
    started: Instant,
    answering: Answering,
    poll: Poll,
    tcp: Option<TcpListener>,
    unix: Option<(UnixListener, PathBuf)>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    /// Connections to pump; each is in it once.
    ready: VecDeque<usize>,
    open: usize,
    refused_total: u64,
    accepted_total: u64,
    questions: Option<Receiver<Question>>,
    /// A listener has, or may have, connections that were not accepted for want of descriptors.
    accept_pending: bool,
    sweep_at: Instant,
    stop: Arc<AtomicBool>,
}

/// The part that answers; apart from the connections, so that both can be borrowed.
struct Answering {
    master: Master,
    requests: RequestCounters,
    now: te_core::Instant,
    /// What takes longer is logged.
    slow: Duration,
    turn: Turn,
}

/// What one connection asked in its turn.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    requests: u32,
    /// The last one.
    kind: u8,
    request_id: u64,
    /// It was logged already.
    told: bool,
}

impl Service {
    fn run(&mut self) -> Result<(), ServeError> {
        let mut events = Events::with_capacity(EVENTS_PER_POLL_MAX);
        let spin = Duration::from_micros(self.config.spin_us.into());
        let mut now = Instant::now();
        let (mut spin_until, mut crowded_until) = (now, now);
        while !self.stop.load(Ordering::Acquire) {
            let spins = self.ready.is_empty() && now < spin_until;
            let timeout = if !self.ready.is_empty() {
                Some(Duration::ZERO)
            } else if spins {
                // Should the next asker wait for this very core, let it have it.
                thread::yield_now();
                Some(Duration::ZERO)
            } else {
                self.park_timeout(now)
            };
            self.wait(&mut events, timeout)?;
            let before = std::mem::replace(&mut now, Instant::now());
            if spins && now - before >= CROWDED {
                // Somebody computes on this core, and the scheduler gives that one milliseconds. Who sleeps goes first when woken.
                (spin_until, crowded_until) = (now, now + CROWDED_PAUSE);
            }
            self.dispatch(&events, now);
            // What has arrived counts before what has run out: when this process was stopped for a while, the nodes whose
            // time seems to be over have long said that they live.
            let busy = !self.ready.is_empty();
            let ended = self.pump_ready(now);
            self.timeouts(now);
            if busy {
                now = ended;
                spin_until = if now < crowded_until { now } else { now + spin };
            }
        }
        self.drain(&mut events)
    }

    /// Takes no more; hands out what is answered.
    fn drain(&mut self, events: &mut Events) -> Result<(), ServeError> {
        info!(connections = self.open, "master stops");
        self.tcp = None;
        if let Some((unix, path)) = self.unix.take() {
            drop(unix);
            let _ = fs::remove_file(path);
        }
        let mut now = Instant::now();
        let deadline = now + Duration::from_millis(self.config.stop_ms_max.into());
        // One more round for what had arrived before the stop; then each connection is shut behind its last answer.
        for index in 0..self.connections.len() {
            self.enqueue(index);
        }
        self.pump_ready(now);
        for index in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[index] {
                connection.close_gracefully();
                self.enqueue(index);
            }
        }
        loop {
            self.pump_ready(now);
            // A peer need not close its side for us to be done: it has its answers.
            let waiting = self.connections.iter().flatten().any(|connection| connection.backlog_bytes() > 0);
            now = Instant::now();
            if !waiting || now >= deadline {
                return Ok(());
            }
            self.wait(events, Some(deadline - now))?;
            self.dispatch(events, Instant::now());
        }
    }

    fn wait(&mut self, events: &mut Events, timeout: Option<Duration>) -> Result<(), ServeError> {
        match self.poll.poll(events, timeout) {
            // Not without a look at what has arrived: a process that was stopped is interrupted when it goes on.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                match self.poll.poll(events, Some(Duration::ZERO)) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                        events.clear();
                        Ok(())
                    }
                    result => result.map_err(ServeError::Poll),
                }
            }
            result => result.map_err(ServeError::Poll),
        }
    }

    /// How long nothing needs to be done. `None`: until something arrives.
    fn park_timeout(&self, now: Instant) -> Option<Duration> {
        let master = self.answering.master.poll_timeout().map(|at| at - self.core_instant(now));
        let sweep = (self.open > 0).then(|| self.sweep_at.saturating_duration_since(now));
        let accept = self.accept_pending.then_some(ACCEPT_PAUSE);
        [master, sweep, accept].into_iter().flatten().min()
    }

    fn core_instant(&self, now: Instant) -> te_core::Instant {
        te_core::Instant::ZERO + now.saturating_duration_since(self.started)
    }

    fn dispatch(&mut self, events: &Events, now: Instant) {
        if self.accept_pending {
            self.accept_pending = false;
            self.accept(now);
        }
        for event in events {
            match event.token() {
                TCP | UNIX => self.accept(now),
                WAKE => self.answer_questions(now),
                Token(index) => {
                    if let Some(Some(connection)) = self.connections.get_mut(index) {
                        let ended = event.is_error() || event.is_read_closed() || event.is_write_closed();
                        connection.ready(event.is_readable(), event.is_writable(), ended);
                        self.enqueue(index);
                    }
                }
            }
        }
    }

    fn enqueue(&mut self, index: usize) {
        if let Some(Some(connection)) = self.connections.get_mut(index)
            && !connection.queued
        {
            connection.queued = true;
            self.ready.push_back(index);
        }
    }

    /// Gives each ready connection one turn; the time when the last one was over.
    fn pump_ready(&mut self, now: Instant) -> Instant {
        let mut began = now;
        self.answering.now = self.core_instant(now);
        for _ in 0..self.ready.len() {
            let Some(index) = self.ready.pop_front() else { break };
            let Some(Some(connection)) = self.connections.get_mut(index) else { continue };
            connection.queued = false;
            let before = connection.buffered_bytes();
            let may_buffer = self.buffered_bytes < self.buffered_bytes_max;
            let pumped = connection.pump(now, self.backlog_bytes_max, may_buffer, &mut self.answering);
            self.buffered_bytes += connection.buffered_bytes();
            self.buffered_bytes -= before;
            match pumped {
                Pumped::Idle => {}
                Pumped::More => self.enqueue(index),
                Pumped::Closed => self.close(index),
            }
            let ended = Instant::now();
            self.answering.turn_ended(ended.saturating_duration_since(began));
            began = ended;
        }
        began
    }

    fn close(&mut self, index: usize) {
        // Closing the descriptor takes it out of the poll.
        if let Some(connection) = self.connections[index].take() {
            self.buffered_bytes -= connection.buffered_bytes();
            self.free.push(index);
            self.open -= 1;
        }
    }

    fn accept(&mut self, now: Instant) {
        loop {
            let accepted = match &self.tcp {
                Some(tcp) => tcp.accept().map(|(stream, from)| {
                    let _ = stream.set_nodelay(true);
                    let peer = if from.ip().is_loopback() { Peer::Local } else { Peer::Remote };
                    (Stream::Tcp(stream), peer)
                }),
                None => return,
            };
            if !self.admit(accepted, now) {
                break;
            }
        }
        loop {
            let accepted = match &self.unix {
                Some((unix, _)) => unix.accept().map(|(stream, _)| (Stream::Unix(stream), Peer::Local)),
                None => return,
            };
            if !self.admit(accepted, now) {
                break;
            }
        }
    }

    /// Whether to go on accepting.
    fn admit(&mut self, accepted: io::Result<(Stream, Peer)>, now: Instant) -> bool {
        let (mut stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            // The peer was gone before it was accepted; others may wait behind it.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) =>
            {
                return true;
            }
            Err(error) => {
                warn!(%error, "cannot accept connections: raise the limit of open files");
                self.accept_pending = true;
                return false;
            }
        };
        if self.open >= self.config.connections_max as usize {
            self.refused_total += 1;
            debug!(connections_max = self.config.connections_max, "connection refused");
            let mut answer = Vec::new();
            answer_status(0, 0, ErrorCode::UnavailableInCurrentStatus, &mut answer);
            let _ = io::Write::write(&mut stream, &answer);
            return true;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let mut connection = Connection::new(stream, peer, now);
        match connection.register(self.poll.registry(), Token(index)) {
            Ok(()) => {
                self.connections[index] = Some(connection);
                self.open += 1;
                self.accepted_total += 1;
                self.enqueue(index);
            }
            Err(error) => {
                warn!(%error, "cannot poll a connection");
                self.free.push(index);
            }
        }
        true
    }

    fn timeouts(&mut self, now: Instant) {
        let core_now = self.core_instant(now);
        if self.answering.master.poll_timeout().is_some_and(|at| at <= core_now) {
            self.answering.master.handle_timeout(core_now);
        }
        if self.open > 0 && now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.sweep(now);
        }
    }

    /// Closes connections that stall or sleep too long; takes large buffers from those that rest.
    fn sweep(&mut self, now: Instant) {
        let stall = Duration::from_millis(self.config.stall_ms_max.into());
        let idle = match self.config.idle_ms_max {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms.into()),
        };
        for index in 0..self.connections.len() {
            let Some(connection) = &mut self.connections[index] else { continue };
            let still = now.saturating_duration_since(connection.last_progress());
            if still >= idle || (connection.is_stuck() && still >= stall) {
                debug!(index, ?still, "connection closed for silence");
                self.close(index);
            } else if still >= SWEEP && still < SWEEP * 3 {
                self.buffered_bytes -= connection.buffered_bytes();
                connection.shrink();
                self.buffered_bytes += connection.buffered_bytes();
            }
        }
        self.make_room();
    }

    /// When connections together hold too much, those go that have brought no whole frame for the longest time; the others
    /// go on.
    fn make_room(&mut self) {
        if self.buffered_bytes >= self.buffered_bytes_max {
            let mut stuck: Vec<(Instant, usize)> = Vec::new();
            for (index, connection) in self.connections.iter().enumerate() {
                stuck.extend(
                    connection
                        .as_ref()
                        .filter(|each| each.is_stuck())
                        .map(|each| (each.frame_since(), index)),
                );
            }
            stuck.sort_unstable();
            for (_, index) in stuck {
                if self.buffered_bytes < self.buffered_bytes_max / 2 {
                    break;
                }
                debug!(index, "connection closed: all connections together hold too much");
                self.close(index);
            }
        }
        for index in 0..self.connections.len() {
            if self.connections[index].as_ref().is_some_and(Connection::is_starved) {
                self.enqueue(index);
            }
        }
    }

    fn answer_questions(&mut self, now: Instant) {
        while let Some(Ok(question)) = self.questions.as_ref().map(Receiver::try_recv) {
            // The asker may have given up.
            match question {
                Question::Snapshot(answer) => drop(answer.send(Box::new(self.snapshot(now)))),
                Question::Call(request, answer) => {
                    let mut out = Vec::new();
                    self.answering.now = self.core_instant(now);
                    if let Ok(Some((frame, _))) = Frame::parse(&request) {
                        self.answering.frame(&mut Session::owner(), frame, &mut out);
                    }
                    drop(answer.send(out));
                }
            }
        }
    }

    fn snapshot(&self, now: Instant) -> Snapshot {
        Snapshot {
            uptime: now.saturating_duration_since(self.started),
            epoch: self.answering.master.config().epoch,
            stats: self.answering.master.stats(),
            eviction: self.answering.master.eviction(),
            requests: self.answering.requests.clone(),
            segments: metrics::segments(&self.answering.master),
            tenants: metrics::tenants(&self.answering.master),
            tasks: self.answering.master.task_report(),
            drains: metrics::drains(&self.answering.master),
            connections: self.open as u64,
            accepted_total: self.accepted_total,
            refused_total: self.refused_total,
        }
    }
}

impl Handler for Answering {
    fn frame(&mut self, session: &mut Session, frame: Frame<'_>, out: &mut Vec<u8>) {
        let start = out.len();
        let (kind, request_id) = (frame.header.kind, frame.header.request_id);
        let timed = self.requests.is_timed(kind).then(Instant::now);
        self.master.handle(self.now, session, &frame, out);
        let status = self.requests.count(kind, out.get(start..).unwrap_or_default());
        let mut told = false;
        if let Some(began) = timed {
            let took = began.elapsed();
            self.requests.time(kind, took);
            told = took >= self.slow;
            if told {
                tell_slow(kind, request_id, 1, took);
            }
        }
        let requests = self.turn.requests + 1;
        self.turn = Turn { requests, kind, request_id, told: told | self.turn.told };
        debug!(op = name(kind), trace = %Trace::of(request_id), status, "request");
    }

    fn broken(&mut self, error: WireError) {
        debug!(%error, "stream broken");
        self.requests.count_broken();
    }
}

impl Answering {
    /// A connection had its turn: requests that are not timed one by one are judged together.
    fn turn_ended(&mut self, took: Duration) {
        let turn = std::mem::take(&mut self.turn);
        if took >= self.slow && turn.requests > 0 && !turn.told {
            tell_slow(turn.kind, turn.request_id, turn.requests, took);
        }
    }
}

/// A threshold; 0 is none.
fn slow_ms(ms: u32) -> Duration {
    if ms == 0 { Duration::MAX } else { Duration::from_millis(ms.into()) }
}

fn name(kind: u8) -> &'static str {
    Kind::from_byte(kind).map_or("unknown", Kind::name)
}

/// `requests` arrived together and took this long; `kind` is that of the last.
#[cold]
fn tell_slow(kind: u8, request_id: u64, requests: u32, took: Duration) {
    let took_ms = took.as_millis() as u64;
    warn!(op = name(kind), trace = %Trace::of(request_id), requests, took_ms, "slow request");
}

/// Says which address it was.
fn listen_error(field: &'static str, addr: &dyn Display) -> impl FnOnce(io::Error) -> BindError + use<> {
    let addr = addr.to_string();
    move |source| BindError::Listen { field, addr, source }
}

/// Binds; replaces a socket that nobody listens on.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
            if !is_socket || std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        result => result,
    }
}
