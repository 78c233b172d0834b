//! The serving thread: one loop around one poller, one [`Master`](store_core::Master) and its connections.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, UnixListener};
use mio::{Events, Poll, Token};
use store_core::command_log::Lsn;
use store_core::ha::{HandOverError, MemberId};
use store_core::message::{ChangeConfig, Operation, TenantSet, TenantSetting};
use store_core::{
    ChangeHow, ConfigChange, ConfigChanges, ErrorCode, Frame, Key, MasterConfig, Peer, Session,
};
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use crate::Config;
use crate::answering::Answering;
use crate::connection::{Handler as _, Stream, answer_status};
use crate::connections::{Connections, Entered};
use crate::error::ServeError;
use crate::ha::Ha;
use crate::http::{Inspected, Question};
use crate::journal::Journal;
use crate::keeper::Keeper;
use crate::kv_events::Feed;
use crate::liveness::{Liveness, PUBLISH_EVERY};
use crate::metrics::{self, Snapshot};
use crate::places::Source;
use crate::reclaim::Reclaim;
use crate::server::Next;
use crate::sys;

pub(crate) const TCP: Token = Token(usize::MAX);
pub(crate) const UNIX: Token = Token(usize::MAX - 1);
pub(crate) const WAKE: Token = Token(usize::MAX - 2);
/// A yield that takes this long has given the core to a thread that computes. Spinning then pauses.
const CROWDED: Duration = Duration::from_micros(500);
const CROWDED_PAUSE: Duration = Duration::from_millis(100);

const EVENTS_PER_POLL_MAX: usize = 1024;
/// How long turns are given before the poller is read again.
const ROUND: Duration = Duration::from_millis(1);
/// Most connections that are accepted before others get their turn.
const ACCEPTS_MAX: usize = 64;
/// Pause after a connection could not be accepted because no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Timeouts are handled after the requests of nodes that wait for their turn, but no later than this.
const TIMEOUTS_LATE_MAX: Duration = Duration::from_secs(1);

/// Shortest time until what is due is looked at again.
const DUE_MIN: Duration = Duration::from_micros(200);
/// Longest wait for other masters during a stop before the deadline is looked at.
const LEAVE_STEP: Duration = Duration::from_millis(10);

/// State of the serving thread.
pub(crate) struct Service {
    pub(crate) config: Config,
    pub(crate) answering: Answering,
    /// Tells followers which objects are where.
    pub(crate) feed: Option<Feed>,
    pub(crate) connections: Connections,
    pub(crate) poll: Poll,
    pub(crate) tcp: Option<TcpListener>,
    pub(crate) unix: Option<(UnixListener, PathBuf)>,
    pub(crate) questions: Option<Receiver<Question>>,
    /// When to accept connections again: a listener has, or may have, connections that were not accepted yet.
    pub(crate) accept_at: Option<Instant>,
    /// Whether there may be questions that are not answered yet.
    pub(crate) asked: bool,
    pub(crate) liveness: Arc<Liveness>,
    /// Since when the published facts may be out of date.
    pub(crate) unpublished: Option<Instant>,
    pub(crate) reclaim: Reclaim,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) next: Next,
    /// Wall time of the start of the process, seconds since the Unix epoch.
    pub(crate) started_s: f64,
    /// Answers to questions that wait to be confirmed, in the order of the commands that they depend on.
    pub(crate) late: VecDeque<(Lsn, Late)>,
    /// The last command that was confirmed when answers were last given.
    pub(crate) confirmed: Option<Lsn>,
}

/// The answer to a question, and where it goes.
pub(crate) enum Late {
    Call(oneshot::Sender<Vec<u8>>, Vec<u8>),
    Inspect(oneshot::Sender<Vec<Result<Inspected, ErrorCode>>>, Vec<Result<Inspected, ErrorCode>>),
}

impl Late {
    fn send(self) {
        // The receiver may have given up.
        match self {
            Self::Call(to, answer) => drop(to.send(answer)),
            Self::Inspect(to, answer) => drop(to.send(answer)),
        }
    }
}

impl Service {
    pub(crate) fn run(&mut self) -> Result<(), ServeError> {
        let mut events = Events::with_capacity(EVENTS_PER_POLL_MAX);
        let spin = Duration::from_micros(self.config.spin_us.into());
        let mut now = self.answering.clock();
        let (mut spin_until, mut crowded_until) = (now, now);
        let mut tells = false;
        if let (Some(feed), Keeper::Memory(master) | Keeper::Journal(master, _)) =
            (&mut self.feed, &mut self.answering.keeper)
        {
            feed.begin(master);
        }
        while !self.stop.load(Ordering::Acquire) {
            let waits = self.connections.is_idle() && !self.asked && !tells;
            let spins = waits && now < spin_until;
            let timeout = if !waits {
                Some(Duration::ZERO)
            } else if spins {
                // The next client may be waiting for this core.
                thread::yield_now();
                Some(Duration::ZERO)
            } else {
                self.park_timeout(now)
            };
            self.wait(&mut events, timeout)?;
            let before = std::mem::replace(&mut now, self.answering.clock());
            if spins && now - before >= CROWDED {
                // Another thread computes on this core, and the scheduler gives it milliseconds. A thread
                // that sleeps goes first when woken.
                (spin_until, crowded_until) = (now, now + CROWDED_PAUSE);
            }
            self.dispatch(&events, now);
            self.reload();
            // Input is handled before timeouts: when this process was stopped for a while, nodes that seem to
            // have been silent for too long have sent heartbeats in the meantime.
            let mut busy = !self.connections.is_idle();
            self.connections.serve(now, ROUND, &mut self.answering);
            self.timeouts();
            // Answers wait for what other masters say, so it counts as a request does.
            busy |= self.confirm()?;
            self.snapshot_if_due(now);
            self.answering.log_events();
            tells = self.feed.as_mut().is_some_and(|feed| feed.turn(self.answering.keeper.master_mut()));
            if busy {
                now = self.answering.time.last();
                spin_until = if now < crowded_until { now } else { now + spin };
                self.unpublished.get_or_insert(now);
            }
            self.publish(now);
        }
        self.drain(&mut events)
    }

    /// Hands commands to the journal's writer, or to other masters, and gives the answers whose commands are
    /// confirmed. Returns whether another master has said something.
    fn confirm(&mut self) -> Result<bool, ServeError> {
        let heard = match &mut self.answering.keeper {
            Keeper::Memory(_) => return Ok(false),
            Keeper::Journal(_, journal) => {
                journal.submit();
                if !journal.confirm().map_err(ServeError::Journal)? {
                    return Ok(false);
                }
                false
            }
            Keeper::Masters(_) => self.turn(),
        };
        let withheld = std::mem::take(&mut self.answering.withheld);
        let confirmed = self.answering.confirmed();
        if confirmed.is_none() || (confirmed == self.confirmed && !withheld) {
            self.answering.withheld |= withheld;
            return Ok(heard);
        }
        self.confirmed = confirmed;
        self.connections.release();
        while self.late.front().is_some_and(|(lsn, _)| confirmed.is_some_and(|confirmed| *lsn <= confirmed))
            && let Some((_, late)) = self.late.pop_front()
        {
            late.send();
        }
        Ok(heard)
    }

    /// One of several masters hears the others, and does what is due. Returns whether one has said something.
    fn turn(&mut self) -> bool {
        let now = {
            self.answering.clock();
            self.answering.now()
        };
        let Keeper::Masters(ha) = &mut self.answering.keeper else { return false };
        let turned = ha.turn(now, self.poll.registry(), self.connections.sessions());
        if turned.deposed {
            if let Some(feed) = &mut self.feed {
                feed.end();
            }
            // Before anything else: an answer of this reign would be one too many.
            self.connections.close_all(&mut self.answering);
            self.late.clear();
            self.unpublished.get_or_insert(self.answering.time.last());
        }
        if let Some(reign) = turned.leads {
            if let Some(feed) = &mut self.feed {
                feed.begin(self.answering.keeper.master_mut());
            }
            self.liveness.set_epoch(u32::try_from(reign.lineage).unwrap_or(u32::MAX));
            self.answering.set_wall();
            self.unpublished.get_or_insert(self.answering.time.last());
        }
        turned.heard
    }

    /// A leader that stops hands over first, so that the others need not wait until it is missed.
    fn leave(&mut self, events: &mut Events, deadline: Instant) -> Result<(), ServeError> {
        let now = self.answering.now();
        let Some(ha) = self.answering.keeper.ha_mut().filter(|ha| ha.leads()) else { return Ok(()) };
        if let Err(error) = ha.hand_over(now, None) {
            info!(%error, "no other master takes over");
            return Ok(());
        }
        while self.answering.keeper.ha().is_some_and(|ha| ha.leads() && !ha.is_serving()) {
            let now = self.answering.clock();
            if now >= deadline {
                break;
            }
            self.wait(events, Some(LEAVE_STEP))?;
            self.dispatch(events, now);
            self.connections.serve(now, ROUND, &mut self.answering);
            self.confirm()?;
        }
        Ok(())
    }

    fn snapshot_if_due(&mut self, now: Instant) {
        let Keeper::Journal(master, journal) = &mut self.answering.keeper else { return };
        journal.snapshot_if_due(now, master, self.connections.sessions());
    }

    /// Gives the answer to a question when what it depends on is confirmed.
    fn answer_late(&mut self, late: Late) {
        let changed = self.answering.keeper.changed();
        if self.answering.confirmed().is_some_and(|confirmed| changed <= confirmed) {
            late.send();
        } else {
            self.late.push_back((changed, late));
        }
    }

    /// Accepts no more requests, and sends the pending answers.
    fn drain(&mut self, events: &mut Events) -> Result<(), ServeError> {
        info!(connections = self.connections.open(), "master stops");
        self.tcp = None;
        if let Some((unix, path)) = self.unix.take() {
            drop(unix);
            let _ = fs::remove_file(path);
        }
        let mut now = self.answering.clock();
        let deadline = now + Duration::from_millis(self.config.stop_ms_max.into());
        self.leave(events, deadline)?;
        // Requests that had arrived before the stop get turns, for a limited time. Then each connection is
        // closed after its last answer.
        let last_request = now + Duration::from_millis(self.config.stop_ms_max.into()) / 4;
        self.connections.wake_all();
        while !self.connections.is_idle() && now < last_request {
            self.connections.serve(now, ROUND, &mut self.answering);
            self.confirm()?;
            now = self.answering.clock();
            self.liveness.works();
        }
        self.connections.close_gracefully();
        loop {
            self.confirm()?;
            while !self.connections.is_idle() && now < deadline {
                self.connections.serve(now, ROUND, &mut self.answering);
                self.confirm()?;
                now = self.answering.clock();
                self.liveness.works();
            }
            // The stop is complete when all answers are written; it does not wait for peers to close.
            if !self.connections.is_owing() || now >= deadline {
                return Ok(());
            }
            self.wait(events, Some(deadline - now))?;
            now = self.answering.clock();
            self.dispatch(events, now);
        }
    }

    fn wait(&mut self, events: &mut Events, timeout: Option<Duration>) -> Result<(), ServeError> {
        let sleeps = timeout != Some(Duration::ZERO);
        if sleeps {
            self.liveness.waits();
        }
        self.answering.time.waits(timeout);
        let result = match self.poll.poll(events, timeout) {
            // Events are read nevertheless: a process that was stopped is interrupted when it continues.
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
        };
        self.liveness.works();
        result
    }

    /// Time until the next timeout. `None`: there is none.
    fn park_timeout(&self, now: Instant) -> Option<Duration> {
        // What is due is not looked for again at once.
        let master = self.answering.keeper.due().map(|at| (at - self.answering.now()).max(DUE_MIN));
        let until = |at: Instant| at.saturating_duration_since(now);
        let sweep = self.connections.sweep_at().map(until);
        let accept = self.accept_at.map(until);
        let publish = self.unpublished.map(|since| until(since + PUBLISH_EVERY));
        [master, sweep, accept, publish].into_iter().flatten().min()
    }

    fn dispatch(&mut self, events: &Events, now: Instant) {
        let mut accepts = self.accept_at.is_some_and(|at| at <= now);
        for event in events {
            match event.token() {
                TCP | UNIX => accepts = true,
                WAKE => self.asked = true,
                Token(index) if index >= Ha::TOKENS => {
                    let closed = event.is_error() || event.is_read_closed();
                    self.answering.keeper.ha_mut().into_iter().for_each(|ha| ha.readable(index, closed));
                }
                Token(index) => {
                    let ended = event.is_error() || event.is_read_closed() || event.is_write_closed();
                    self.connections.ready(index, event.is_readable(), event.is_writable(), ended);
                }
            }
        }
        if accepts {
            self.accept_at = None;
            self.accept(now);
        }
        if self.asked {
            self.answer_questions(now);
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            // The Unix socket first: connections over TCP must not keep the admin out.
            let accepted = match self.accept_unix() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.accept_tcp(),
                accepted => accepted,
            };
            let (stream, peer, source) = match accepted {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer was gone before it was accepted; other connections may wait behind it.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) =>
                {
                    continue;
                }
                Err(error) => {
                    warn!(%error, "connections cannot be accepted: raise the limit of open files");
                    self.accept_at = Some(now + ACCEPT_PAUSE);
                    return;
                }
            };
            match self.connections.enter(stream, peer, source, self.poll.registry(), &mut self.answering) {
                Entered::Yes => {}
                Entered::Full(mut stream) => {
                    debug!(
                        connections_max = self.config.connections_max,
                        "connection refused: all places are in use"
                    );
                    let mut answer = Vec::new();
                    answer_status(0, 0, ErrorCode::TooManyConnections, &mut answer);
                    let _ = io::Write::write(&mut stream, &answer);
                }
                Entered::Failed(error) => warn!(%error, "a connection cannot be registered with the poller"),
            }
        }
        // There may be more connections to accept, after the turns of others.
        self.accept_at = Some(now);
    }

    fn accept_tcp(&self) -> io::Result<(Stream, Peer, Source)> {
        let (stream, from) = self.tcp.as_ref().ok_or(io::ErrorKind::WouldBlock)?.accept()?;
        let _ = stream.set_nodelay(true);
        let peer = if from.ip().is_loopback() { Peer::Local } else { Peer::Remote };
        Ok((Stream::Tcp(stream), peer, Source::of(from.ip())))
    }

    fn accept_unix(&self) -> io::Result<(Stream, Peer, Source)> {
        let (unix, _) = self.unix.as_ref().ok_or(io::ErrorKind::WouldBlock)?;
        let (stream, _) = unix.accept()?;
        Ok((Stream::Unix(stream), Peer::Local, Source::Unix))
    }

    fn timeouts(&mut self) {
        let core_now = self.answering.now();
        let keeper = &self.answering.keeper;
        if let Some(due) = keeper.due().filter(|at| *at <= core_now && keeper.ha().is_none())
            && (!self.connections.nodes_wait() || core_now - due > TIMEOUTS_LATE_MAX)
        {
            self.answering.timeout();
            self.unpublished.get_or_insert(self.answering.time.last());
        }
        if self.connections.sweep_at().is_some_and(|at| at <= self.answering.time.last()) {
            self.connections.sweep(&mut self.answering);
            self.answering.set_wall();
            self.answering.summarize(self.connections.open());
        }
    }

    /// Publishes the facts for other threads.
    fn publish(&mut self, now: Instant) {
        let keeper = &self.answering.keeper;
        self.liveness.set_ready(keeper.is_serving() && keeper.master().segments_len() > 0);
        if self.unpublished.is_some_and(|since| now.saturating_duration_since(since) >= PUBLISH_EVERY) {
            let stats = self.answering.keeper.master().stats();
            let published = self.liveness.publish(&stats, self.connections.open());
            self.unpublished = (!published).then_some(now);
            if self.reclaim.is_due(now, stats.memory_bytes) {
                sys::trim();
            }
        }
    }

    /// Answers questions for a limited time; the rest follow after the next turns.
    fn answer_questions(&mut self, now: Instant) {
        while let Some(Ok(question)) = self.questions.as_ref().map(Receiver::try_recv) {
            // The receiver may have given up.
            match question {
                Question::Snapshot(answer) => drop(answer.send(Box::new(self.snapshot()))),
                Question::Call(request, tenant, answer) => {
                    let called = self.call(&request, tenant.as_deref());
                    self.answer_late(Late::Call(answer, called));
                }
                Question::Inspect(tenant, keys, answer) => {
                    let inspected = self.answering.inspect(&tenant, &keys);
                    self.answer_late(Late::Inspect(answer, inspected));
                }
                Question::WrongBearer => self.answering.wrong_bearer(),
                Question::HandOver(to, answer) => drop(answer.send(self.hand_over(to))),
            }
            if self.answering.clock().saturating_duration_since(now) >= ROUND {
                return;
            }
        }
        self.asked = false;
    }

    fn hand_over(&mut self, to: Option<MemberId>) -> Result<MemberId, HandOverError> {
        let now = self.answering.now();
        self.answering.keeper.ha_mut().ok_or(HandOverError::Alone)?.hand_over(now, to)
    }

    /// The answer to a frame with the rights of an admin, and those of a tenant, if one is named.
    fn call(&mut self, request: &[u8], tenant: Option<&str>) -> Vec<u8> {
        let mut out = Vec::new();
        let Ok(Some((frame, _))) = Frame::parse(request) else { return out };
        let session = match tenant {
            _ if !self.answering.keeper.is_serving() => Err(ErrorCode::NotLeader),
            None => Ok(Session::owner()),
            Some(tenant) => self.answering.keeper.master_mut().owner_for(tenant),
        };
        match session {
            Ok(mut session) => {
                self.answering.frame(&mut session, Source::Unix, &frame, &mut out);
                self.answering.left(session);
            }
            Err(code) => answer_status(frame.header.kind, frame.header.request_id, code, &mut out),
        }
        out
    }

    /// Takes the settings that were given while it served.
    fn reload(&mut self) {
        let Some(next) = self.next.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let before = self.config.store.clone();
        let MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, .. } = before;
        // The HTTP server and the links have the secrets of the start.
        let (admin_secret, cluster_secret) = (before.admin_secret.clone(), before.cluster_secret.clone());
        let next = MasterConfig {
            epoch,
            started_wall_ms,
            handle_key,
            hash_seed,
            admin_secret,
            cluster_secret,
            ..*next
        };
        let (how, changes) = (ChangeHow::Start, ConfigChanges::between(&before, &next));
        if let Some(ha) = self.answering.keeper.ha_mut() {
            ha.set_config(&next);
        }
        if !self.answering.keeper.is_serving() {
            info!("this master does not lead: it uses its settings when it takes over");
            self.config.store = next;
            return;
        }
        match self.order::<ChangeConfig>(&ConfigChange { how, changes }) {
            Ok(()) => info!(settings = ?changes.names().collect::<Vec<_>>(), "settings have changed"),
            Err(error) => {
                warn!(%error, settings = ?changes.names().collect::<Vec<_>>(), "settings are as they were");
                return;
            }
        }
        for tenant in next.tenants.iter().filter(|tenant| !before.tenants.contains(tenant)) {
            let setting = TenantSetting {
                name: &tenant.name,
                quota_bytes: tenant.quota_bytes,
                quota_objects: tenant.quota_objects,
                quota_disk_bytes: tenant.quota_disk_bytes,
                guaranteed_bytes: tenant.guaranteed_bytes,
                secret: Some(Key(tenant.secret.bytes())),
            };
            match self.order::<TenantSet>(&setting) {
                Ok(()) => info!(tenant = tenant.name, "the limits of a tenant have changed"),
                Err(error) => warn!(%error, tenant = tenant.name, "the limits of a tenant are as they were"),
            }
        }
        self.config.store = next;
    }

    /// Carries out an operation of the master's own.
    fn order<O: Operation>(&mut self, request: &O::Request<'_>) -> Result<(), ErrorCode> {
        let mut frame = Vec::new();
        O::encode_request(&mut frame, 1, request, std::iter::empty())
            .map_err(|_| ErrorCode::InternalError)?;
        let answer = self.call(&frame, None);
        match Frame::parse(&answer) {
            Ok(Some((frame, _))) => frame.header.result(),
            _ => Err(ErrorCode::InternalError),
        }
    }

    fn snapshot(&self) -> Snapshot {
        let keeper = &self.answering.keeper;
        let master = keeper.master();
        Snapshot {
            uptime: self.answering.time.uptime(),
            epoch: master.config().epoch,
            stats: master.stats(),
            eviction: master.eviction(),
            requests: self.answering.requests.clone(),
            segments: metrics::segments::of(master),
            pools: metrics::pools::of(master, self.answering.time.core()),
            tenants: metrics::tenants(master),
            tasks: master.task_report(),
            drains: metrics::drains(master),
            connections: self.connections.open() as u64,
            totals: self.connections.totals(),
            refusals: self.answering.refusals,
            journal: keeper.journal().map(Journal::stats),
            kv_events: self.feed.as_ref().map(Feed::stats),
            ha: keeper.ha().map(Ha::stats),
            answers_held: self.connections.held() as u64 + self.late.len() as u64,
            names_held_total: self.answering.events.names_held_total,
            names_taken_over_total: self.answering.events.taken_over_total,
            started_s: self.started_s,
            metadata_bytes_max: master.config().metadata_bytes_max,
        }
    }
}
