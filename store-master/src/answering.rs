//! Passes frames to the state machine with the current time, and counts and logs the results.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use store_core::command_log::Lsn;
use store_core::message::{self, Greeting, MountResponse, Operation as _, ReplicaInfo, ReplicaState};
use store_core::{ErrorCode, Frame, Kind, Role, Session, Stats, Trace, WireError};
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::connection::{Handler, Verdict};
use crate::events::Events;
use crate::http::Inspected;
use crate::keeper::Keeper;
use crate::log_limit::LogLimit;
use crate::metrics::RequestCounters;
use crate::places::Source;
use crate::proofs::Proofs;

/// Time between two log lines with a summary.
const SUMMARY_EVERY: Duration = Duration::from_secs(60);

/// Answers requests. It is separate from the connections, so that both can be borrowed.
pub(crate) struct Answering {
    pub(crate) keeper: Keeper,
    /// The last command that the latest answer depends on.
    depends_on: Lsn,
    /// Answers were not sent because none may be, whatever they depend on.
    pub(crate) withheld: bool,
    pub(crate) requests: RequestCounters,
    pub(crate) time: Clock,
    pub(crate) events: Events,
    pub(crate) refusals: Refusals,
    proofs: Proofs,
    wrong_proofs: LogLimit,
    refused_mounts: LogLimit,
    /// Requests that take longer are logged.
    slow: Duration,
    turn: Turn,
    /// Time of the latest summary, and the counters at that time.
    summary: (Instant, Stats),
}

/// Number of refusals since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refusals {
    /// Wrong proofs of a tenant's secret, the admin secret and the cluster secret.
    pub(crate) proofs: [u64; 3],
    /// Mounts with an incarnation that has ended, or that is too far in the future.
    pub(crate) incarnations: u64,
    /// Mounts without a proof, or with a wrong key.
    pub(crate) mounts_unproved: u64,
}

/// The requests of one connection in its turn.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    requests: u32,
    /// Kind of the last request.
    kind: u8,
    request_id: u64,
    /// Whether a slow request was logged already.
    logged: bool,
}

impl Answering {
    /// Answers from the master of `keeper`, whose time is `at`.
    pub(crate) fn new(keeper: Keeper, at: store_core::Instant, slow_request_ms: u32) -> Self {
        let now = Instant::now();
        Self {
            summary: (now, keeper.master().stats()),
            keeper,
            depends_on: 0,
            withheld: false,
            requests: RequestCounters::default(),
            time: Clock::new(now, at),
            events: Events::default(),
            refusals: Refusals::default(),
            proofs: Proofs::default(),
            wrong_proofs: LogLimit::default(),
            refused_mounts: LogLimit::default(),
            slow: slow_ms(slow_request_ms),
            turn: Turn::default(),
        }
    }

    /// The time of the calls to the keeper: one of several masters sees that of the clock, because its lease
    /// ends also while the process is stopped, and it decides itself how much of it its master counts.
    pub(crate) fn now(&self) -> store_core::Instant {
        match &self.keeper {
            Keeper::Masters(_) => store_core::Instant::ZERO + self.time.uptime(),
            _ => self.time.core(),
        }
    }

    /// Handles the timeouts that are due.
    pub(crate) fn timeout(&mut self) {
        let now = self.now();
        self.keeper.handle_timeout(now);
        if self.events.is_draining() {
            self.events.drains(self.keeper.master());
        }
    }

    /// Logs the events since the last call.
    pub(crate) fn log_events(&mut self) {
        self.events.log(self.keeper.master_mut(), self.time.last());
    }

    /// Updates the wall clock, which may be set, and which continues while this process is stopped.
    pub(crate) fn set_wall(&mut self) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Ok(wall_ms @ 1..) = u64::try_from(since.as_millis()) {
            let now = self.now();
            self.keeper.set_wall_ms(now, wall_ms);
        }
    }

    /// Logs a summary once per minute, while there are connections.
    pub(crate) fn summarize(&mut self, connections: usize) {
        let now = self.time.last();
        let took = now.saturating_duration_since(self.summary.0);
        if took < SUMMARY_EVERY || connections == 0 {
            return;
        }
        let stats = self.keeper.master().stats();
        let before = std::mem::replace(&mut self.summary, (now, stats)).1;
        // Another master's counters, after it has taken over, are not those of this one.
        let gets = stats.gets_total.saturating_sub(before.gets_total);
        let hits = stats.get_hits_total.saturating_sub(before.get_hits_total);
        info!(
            nodes = stats.nodes,
            segments = stats.segments,
            objects = stats.objects,
            bytes = stats.object_bytes,
            used_bytes = stats.used_bytes,
            capacity_bytes = stats.capacity_bytes,
            gets,
            hit_rate = %format_args!("{:.3}", if gets == 0 { 0.0 } else { hits as f64 / gets as f64 }),
            puts = stats.put_ends_total.saturating_sub(before.put_ends_total),
            evictions = stats.evictions_total.saturating_sub(before.evictions_total),
            objects_lost = stats.objects_lost_total.saturating_sub(before.objects_lost_total),
            connections,
            over_s = took.as_secs(),
            "summary"
        );
    }

    /// Looks at objects of a tenant, which does not count as a use.
    pub(crate) fn inspect(&mut self, tenant: &str, keys: &[Vec<u8>]) -> Vec<Result<Inspected, ErrorCode>> {
        let now = self.now();
        let now = self.keeper.master_time(now);
        let (master, serves) = (self.keeper.master(), self.keeper.is_serving());
        let one = |key: &Vec<u8>| {
            if !serves {
                return Err(ErrorCode::NotLeader);
            }
            let (listed, replicas) = master.inspect(now, tenant, key)?;
            let readable = replicas.iter().filter(|replica| replica.state == ReplicaState::Complete);
            let place = |replica: &ReplicaInfo| {
                Some((replica.addr, master.segment(replica.segment)?.endpoint.to_owned()))
            };
            let replicas: Vec<_> = readable.filter_map(place).collect();
            if replicas.is_empty() {
                return Err(ErrorCode::ReplicaIsNotReady);
            }
            Ok(Inspected { len: listed.len, replicas })
        };
        keys.iter().map(one).collect()
    }

    /// Counts an HTTP request with a wrong admin secret.
    pub(crate) fn wrong_bearer(&mut self) {
        self.refusals.proofs[Role::Admin as usize - 1] += 1;
        if let Some(suppressed) = self.wrong_proofs.may(self.time.last()) {
            warn!(suppressed, "wrong admin secret over HTTP");
        }
    }

    /// The role that a Hello tries to prove, if any.
    fn proves(frame: &Frame<'_>) -> Option<Role> {
        if frame.header.kind != Kind::Hello as u8 {
            return None;
        }
        let greeting: Greeting<'_> = message::Hello::decode_request(frame.body).ok()?.0;
        if !greeting.admin_proof.0.is_empty() {
            Some(Role::Admin)
        } else if !greeting.cluster_proof.0.is_empty() {
            Some(Role::Cluster)
        } else {
            greeting.has_proof().then_some(Role::Tenant)
        }
    }

    /// Counts and logs a mount that was refused.
    fn mount_answered(&mut self, source: Source, frame: &Frame<'_>, answer: &[u8], status: i32) {
        let Ok((asked, _)) = message::Mount::decode_request(frame.body) else { return };
        let (name, endpoint) = (asked.name, asked.endpoint);
        if status == ErrorCode::IncarnationTooHigh.code() {
            // Logged as an event.
            self.refusals.incarnations += 1;
        }
        if status == ErrorCode::PermissionDenied.code() || status == ErrorCode::IllegalClient.code() {
            self.refusals.mounts_unproved += 1;
            if let Some(suppressed) = self.refused_mounts.may(self.time.last()) {
                let why = ErrorCode::from_code(status).map(|code| code.to_string()).unwrap_or_default();
                warn!(name, endpoint, %source, suppressed, why, "mount refused");
            }
        }
        let Ok(Some((answer, _))) = Frame::parse(answer) else { return };
        if let Ok((MountResponse::Stale { incarnation_min }, _)) = message::Mount::decode_response(&answer) {
            self.refusals.incarnations += 1;
            debug!(name, endpoint, %incarnation_min, "mount refused: the incarnation has ended");
        }
    }
}

impl Handler for Answering {
    fn clock(&mut self) -> Instant {
        self.time.read()
    }

    fn frame(
        &mut self,
        session: &mut Session,
        source: Source,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Verdict {
        let start = out.len();
        let (kind, request_id) = (frame.header.kind, frame.header.request_id);
        let proves = Self::proves(frame);
        if proves.is_some()
            && let Some(at) = self.proofs.wait(source, self.time.last())
        {
            return Verdict::Later(at);
        }
        let failed = session.proofs_failed();
        let timed = self.requests.is_timed(kind).then(Instant::now);
        let now = self.now();
        let handled = self.keeper.handle(now, session, frame, out);
        self.depends_on = handled.unwrap_or(0);
        let answer = out.get(start..).unwrap_or_default();
        let status = self.requests.count(kind, answer);
        let mut logged = false;
        if let Some(began) = timed {
            let took = began.elapsed();
            self.requests.time(kind, took);
            logged = took >= self.slow;
            if logged {
                log_slow(kind, request_id, 1, took);
            }
        }
        let requests = self.turn.requests + 1;
        self.turn = Turn { requests, kind, request_id, logged: logged | self.turn.logged };
        debug!(op = name(kind), trace = %Trace::of(request_id), status, "request");
        match Kind::from_byte(kind) {
            Some(Kind::Mount) => self.mount_answered(source, frame, answer, status),
            Some(Kind::OrderSegments) => self.events.drains(self.keeper.master()),
            _ => {}
        }
        if handled.is_err() {
            // What it will be is another connection: this one was never welcomed, or by an earlier reign.
            return Verdict::Last;
        }
        let Some(role) = proves.filter(|_| session.proofs_failed() > failed) else {
            return Verdict::Answered;
        };
        self.proofs.was_wrong(source, self.time.last());
        self.refusals.proofs[role as usize - 1] += 1;
        if let Some(suppressed) = self.wrong_proofs.may(self.time.last()) {
            warn!(%source, ?role, suppressed, "wrong secret: connection closed");
        }
        Verdict::Last
    }

    fn broken(&mut self, error: WireError) {
        debug!(%error, "a connection sent an invalid frame");
        self.requests.count_broken();
    }

    fn depends_on(&self) -> Lsn {
        self.depends_on
    }

    fn confirmed(&mut self) -> Option<Lsn> {
        if let Keeper::Masters(_) = &self.keeper {
            // A lease may have ended since the request was handled.
            self.time.read();
        }
        let now = self.now();
        let confirmed = self.keeper.confirmed(now);
        self.withheld |= confirmed.is_none();
        confirmed
    }

    fn surely_confirmed(&self) -> Option<Lsn> {
        self.keeper.surely_confirmed()
    }

    /// Requests that are not timed one by one are judged together, by the time of their turn.
    fn turn_ended(&mut self, took: Duration) {
        let turn = std::mem::take(&mut self.turn);
        if took >= self.slow && turn.requests > 0 && !turn.logged {
            log_slow(turn.kind, turn.request_id, turn.requests, took);
        }
    }

    fn left(&mut self, session: Session) {
        let now = self.now();
        self.keeper.session_ended(now, session);
    }
}

/// A threshold in milliseconds; 0: none.
fn slow_ms(ms: u32) -> Duration {
    if ms == 0 { Duration::MAX } else { Duration::from_millis(ms.into()) }
}

fn name(kind: u8) -> &'static str {
    Kind::from_byte(kind).map_or("unknown", Kind::name)
}

/// Logs that `requests` that arrived together took this long; `kind` is that of the last.
#[cold]
fn log_slow(kind: u8, request_id: u64, requests: u32, took: Duration) {
    let took_ms = took.as_millis() as u64;
    warn!(op = name(kind), trace = %Trace::of(request_id), requests, took_ms, "slow request");
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::message::MountSegment;
    use store_core::{Incarnation, MasterConfig, NodeId};

    use super::*;

    #[test]
    fn mounts_of_an_incarnation_that_has_ended_or_is_far_ahead_are_counted() {
        let master = store_core::Master::new(MasterConfig::default()).unwrap();
        let mut answering = Answering::new(Keeper::Memory(Box::new(master)), store_core::Instant::ZERO, 0);
        answering.set_wall();
        let mut session = Session::owner();
        let mut refused_after = |incarnation: u64| {
            let segment = MountSegment {
                node: NodeId::new(1),
                incarnation: Incarnation::new(incarnation),
                name: "n1",
                endpoint: "h:1",
                len: 1 << 20,
                key: 9,
                ..MountSegment::default()
            };
            let mut request = Vec::new();
            message::Mount::encode_request(&mut request, 1, &segment, std::iter::empty()).unwrap();
            let frame = Frame::parse(&request).unwrap().unwrap().0;
            answering.frame(&mut session, Source::Unix, &frame, &mut Vec::new());
            answering.refusals.incarnations
        };
        assert_eq!(refused_after(2), 0, "the first mount");
        assert_eq!(refused_after(1), 1, "an incarnation that has ended");
        assert_eq!(refused_after(u64::MAX), 2, "an incarnation that is centuries ahead");
        assert_eq!(refused_after(3), 2, "a later incarnation");
    }
}
