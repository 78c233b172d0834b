//! [`Copier`]: the thread that asks the store's master for copies, and follows them.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use conductor_core::knowledge::PARTS;
use conductor_core::{BlockKey, EngineHash};
use store_client::{ErrorCode, Masters, RpcConfig, RpcConnection, RpcError, TaskId};
use store_core::Key;
use store_core::message::{CreateTasks, FindReplicas, NewTask, QueryTasks, TaskState};
use tracing::{info, warn};

use super::Wanted;
use crate::config::StoreConfig;
use crate::shared::Shared;
use crate::traffic::Kept;

/// How often copies in progress are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long the thread sleeps when there is nothing to look at.
const REST: Duration = Duration::from_secs(5);
/// Objects per request.
const OBJECTS_PER_CALL: usize = 256;
/// Waits before a master that does not answer is asked again: the first one, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// The thread. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Copier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Copier {
    /// Starts what the settings ask for.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Option<Self>> {
        let config = &shared.config.store;
        let Ok(masters) = config.master.parse::<Masters>() else { return Ok(None) };
        let mut work = Work {
            limits: Limits::new(config, Instant::now()),
            master: Master { masters, rpc: None, again_at: None, wait: BACKOFF.0 },
            shared: Arc::clone(shared),
        };
        let thread = std::thread::Builder::new().name("snowskin-copies".into()).spawn(move || work.run())?;
        Ok(Some(Self { shared: Arc::clone(shared), thread: Some(thread) }))
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.shared.replicas.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that copies hot prefixes panicked");
        }
    }
}

struct Work {
    shared: Arc<Shared>,
    master: Master,
    limits: Limits,
}

impl Work {
    fn run(&mut self) {
        loop {
            let time = if self.limits.in_flight.is_empty() { REST } else { LOOK_EVERY };
            match self.shared.replicas.next(time) {
                Ok(Some(wanted)) => self.copy(&wanted),
                Ok(None) => {}
                Err(()) => return,
            }
            self.look();
        }
    }

    /// Asks for one more replica of each object of a prefix.
    fn copy(&mut self, wanted: &Wanted) {
        let shared = Arc::clone(&self.shared);
        let traffic = &shared.replicas.traffic;
        let names = self.objects(wanted);
        for names in names.chunks(OBJECTS_PER_CALL) {
            let Some(rpc) = self.master.connected(&shared) else {
                traffic.keep(Kept::Unreachable, names.len() as u64);
                continue;
            };
            let keys = || names.iter().map(|name| Key(name.as_bytes()));
            let found = rpc.call::<FindReplicas>(&(), keys()).map(|(_, found)| {
                found.map(|found| found.map(|replicas| replicas.len())).collect::<Vec<_>>()
            });
            let Some(found) = self.master.answered(found, names.len(), traffic) else { continue };
            let mut few = Vec::new();
            for (name, replicas) in names.iter().zip(found) {
                let kept = match replicas {
                    Ok(0) => Some(Kept::Gone),
                    Ok(replicas) if replicas >= shared.config.store.replicas_max as usize => {
                        Some(Kept::Enough)
                    }
                    Ok(_) if shared.config.store.dry_run => Some(Kept::DryRun),
                    Ok(_) => self.limits.admit(few.len(), Instant::now()),
                    Err(code) => Some(reason(code)),
                };
                match kept {
                    Some(kept) => traffic.keep(kept, 1),
                    None => few.push(NewTask { key: Key(name.as_bytes()), source: None, target: None }),
                }
            }
            if !few.is_empty() {
                self.create(&few);
            }
        }
    }

    fn create(&mut self, tasks: &[NewTask<'_>]) {
        let traffic = &self.shared.replicas.traffic;
        let Some(rpc) = self.master.connected(&self.shared) else { return };
        let created = rpc.call::<CreateTasks>(&(), tasks.iter().copied());
        let created = created.map(|(_, created)| created.collect::<Vec<_>>());
        let Some(created) = self.master.answered(created, tasks.len(), traffic) else { return };
        for created in created {
            match created {
                // While one is in progress, the master names the same again.
                Ok(id) if self.limits.in_flight.insert(id) => _ = traffic.asked.inc(),
                Ok(_) => traffic.keep(Kept::InFlight, 1),
                Err(code) => traffic.keep(reason(code), 1),
            }
        }
        traffic.in_flight(self.limits.in_flight.len());
    }

    /// Looks which copies are over.
    fn look(&mut self) {
        let traffic = &self.shared.replicas.traffic;
        let all: Vec<TaskId> = self.limits.in_flight.iter().copied().collect();
        for ids in all.chunks(OBJECTS_PER_CALL) {
            let Some(rpc) = self.master.connected(&self.shared) else { return };
            let states = rpc.call::<QueryTasks>(&(), ids.iter().copied());
            let states =
                states.map(|(_, found)| found.map(|task| task.map(|it| it.state)).collect::<Vec<_>>());
            let Some(states) = self.master.answered(states, 0, traffic) else { return };
            for (id, state) in ids.iter().zip(states) {
                match state {
                    Ok(TaskState::Done) => traffic.done.inc(),
                    Ok(TaskState::Pending | TaskState::Processing) => continue,
                    // Also of a master that began anew, which knows no such task.
                    Ok(TaskState::Failed | TaskState::Canceled) | Err(_) => traffic.failed.inc(),
                };
                self.limits.in_flight.remove(id);
            }
        }
        traffic.in_flight(self.limits.in_flight.len());
    }

    /// The names of a prefix's objects, in the order of its blocks. Blocks of which none is known are
    /// counted.
    fn objects(&self, wanted: &Wanted) -> Vec<String> {
        let keys: HashSet<BlockKey> = wanted.keys.iter().copied().collect();
        let mut pairs = Vec::new();
        for part in 0..PARTS {
            // The index is needed by others: it is not held for long.
            let knowledge = self.shared.knowledge.read();
            knowledge.hashes_of(wanted.context, part, |key| keys.contains(&key), &mut pairs);
        }
        let mut hashes: HashMap<BlockKey, Vec<EngineHash>> = HashMap::new();
        for (key, hash) in pairs {
            hashes.entry(key).or_default().push(hash);
        }
        let Some(names) = self.shared.replicas.names() else { return Vec::new() };
        let mut objects = Vec::new();
        let mut unknown = 0;
        for key in &wanted.keys {
            let before = objects.len();
            let of = hashes.get(key).into_iter().flatten();
            objects.extend(of.flat_map(|hash| names.of(*hash)).map(str::to_owned));
            unknown += u64::from(objects.len() == before);
        }
        drop(names);
        self.shared.replicas.traffic.keep(Kept::Unknown, unknown);
        objects
    }
}

/// Why the master makes no copy.
const fn reason(code: ErrorCode) -> Kept {
    match code {
        ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady | ErrorCode::ReplicaNotFound => Kept::Gone,
        ErrorCode::NoAvailableHandle | ErrorCode::TenantQuotaExceeded => Kept::NoRoom,
        ErrorCode::KeysUltraLimit | ErrorCode::ReplicaAlreadyExists => Kept::Enough,
        ErrorCode::ObjectHasReplicationTask | ErrorCode::TaskPendingLimitExceeded => Kept::InFlight,
        _ => Kept::Refused,
    }
}

/// The connection to the master.
struct Master {
    masters: Masters,
    rpc: Option<RpcConnection>,
    /// When it is connected to again.
    again_at: Option<Instant>,
    wait: Duration,
}

impl Master {
    /// The connection, made if there is none and it is time.
    fn connected(&mut self, shared: &Shared) -> Option<&mut RpcConnection> {
        if self.rpc.is_none() {
            if self.again_at.is_some_and(|at| Instant::now() < at) {
                return None;
            }
            // The thread also has to be able to stop.
            let mut config = RpcConfig::default();
            (config.call_ms_max, config.connect_ms_max) = (2_000, 1_000);
            (config.reconnect_ms_max, config.failover_ms_max) = (0, 2_000);
            let identity = shared.config.store_identity.clone();
            match RpcConnection::connect_as(self.masters.clone(), config, identity) {
                Ok(rpc) => {
                    info!(master = %self.masters, "connected to the store, for copies of hot prefixes");
                    (self.rpc, self.again_at, self.wait) = (Some(rpc), None, BACKOFF.0);
                }
                Err(error) => self.lost(&error),
            }
        }
        self.rpc.as_mut()
    }

    /// The answer; without one, the objects that it was about are counted.
    fn answered<T>(
        &mut self,
        answer: Result<T, RpcError>,
        objects: usize,
        traffic: &super::CopyTraffic,
    ) -> Option<T> {
        match answer {
            Ok(answer) => Some(answer),
            Err(error) => {
                let is_refusal = matches!(error, RpcError::Refused(_));
                traffic.keep(if is_refusal { Kept::Refused } else { Kept::Unreachable }, objects as u64);
                self.lost(&error);
                None
            }
        }
    }

    fn lost(&mut self, error: &RpcError) {
        warn!(
            master = %self.masters, %error,
            "the store copies no hot prefixes now: check conductor.store.master, and the secrets of [cluster]"
        );
        (self.rpc, self.again_at) = (None, Some(Instant::now() + self.wait));
        self.wait = (self.wait * 2).min(BACKOFF.1);
    }
}

/// How many copies may be begun.
#[derive(Debug)]
struct Limits {
    in_flight: HashSet<TaskId>,
    in_flight_max: usize,
    per_min_max: u32,
    /// The current minute's beginning, and the copies of it.
    minute: (Instant, u32),
}

impl Limits {
    fn new(config: &StoreConfig, now: Instant) -> Self {
        Self {
            in_flight: HashSet::new(),
            in_flight_max: config.copies_max as usize,
            per_min_max: config.copies_per_min_max,
            minute: (now, 0),
        }
    }

    /// Whether a copy may be begun after `more` that are about to be; if so, counts it.
    fn admit(&mut self, more: usize, now: Instant) -> Option<Kept> {
        if self.in_flight.len() + more >= self.in_flight_max {
            return Some(Kept::InFlight);
        }
        if now - self.minute.0 >= Duration::from_secs(60) {
            self.minute = (now, 0);
        }
        if self.minute.1 >= self.per_min_max {
            return Some(Kept::Rate);
        }
        self.minute.1 += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_limited_at_a_time_and_per_minute() {
        let config = StoreConfig { copies_max: 3, copies_per_min_max: 5, ..StoreConfig::default() };
        let now = Instant::now();
        let mut limits = Limits::new(&config, now);
        let kept = |limits: &mut Limits, more, now| limits.admit(more, now);
        assert_eq!(
            [0, 1, 2, 3].map(|more| kept(&mut limits, more, now)),
            [None, None, None, Some(Kept::InFlight)]
        );
        limits.in_flight.extend([1, 2].map(TaskId::new));
        assert_eq!((kept(&mut limits, 0, now), kept(&mut limits, 1, now)), (None, Some(Kept::InFlight)));
        limits.in_flight.clear();
        assert_eq!((kept(&mut limits, 0, now), kept(&mut limits, 0, now)), (None, Some(Kept::Rate)));
        assert_eq!(kept(&mut limits, 0, now + Duration::from_secs(60)), None);
    }
}
