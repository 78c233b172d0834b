//! Judges the responses of the master.

use std::collections::BTreeMap;
use std::time::Duration;

use store_core::chunks::stored_len;
use store_core::message::{
    Allocation, Beat, CancelTasks, ChangeRetention, Commit, CreateTasks, EndTasks, Existing, ExistsLeased,
    FetchTasks, Get, ListQuery, Mount, MountResponse, NewObject, NodeStatus, Operation, Pin, PutEnd,
    PutRequest, PutRevoke, PutStart, PutWindow, QueryTasks, Remove, Replica, ReplicaState, ReportReplicas,
    Retention, RetryTasks, TaskInfo, TaskState, Verdict,
};
use store_core::{ErrorCode, Event, Frame, FullKey, Items, Key, Kind, Master, SegmentNo, TaskId, TenantNo};

use crate::clock::DRIFT_PPM_MAX;
use crate::common::{Core, Party};
use crate::scenario::{CLIENTS, TENANTS, full_key};
use crate::shadow::{Claim, Range, Violation};

/// An object that the store has lost by itself: its key and its generation.
pub(crate) type Lost = (Vec<u8>, u64);

/// A readable object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) generation: u64,
}

/// One replica that a node has an order to make.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) generation: u64,
    pub(crate) range: Range,
    /// The replica counts.
    pub(crate) accepted: bool,
}

/// What tenants have, in the order of [`TENANTS`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    bytes: [u64; TENANTS.len()],
    evictions: [u64; TENANTS.len()],
}

impl Standing {
    pub(crate) fn of(master: &Master) -> Self {
        let mut this = Self::default();
        for (at, name) in TENANTS.iter().enumerate() {
            let usage = master.tenant(name).unwrap();
            (this.bytes[at], this.evictions[at]) = (usage.bytes, usage.evictions_total);
        }
        this
    }
}

impl Core {
    pub(crate) fn judge(&self, found: Result<(), Violation>) -> Result<(), Violation> {
        let hidden = |violation: &Violation| {
            !matches!(
                violation,
                Violation::WrongBytes(_)
                    | Violation::NotLinearizable(_)
                    | Violation::Leak(_)
                    | Violation::Stuck(_)
                    | Violation::Shown(_)
                    | Violation::Missed(_)
            )
        };
        found.or_else(
            |violation| if self.scenario.blind && hidden(&violation) { Ok(()) } else { Err(violation) },
        )
    }

    /// Compares what is readable with what was, and notes what was lost; returns the keys.
    pub(crate) fn note_losses(&mut self) -> Vec<Lost> {
        if self.master.stats().objects == self.visible.len() as u64 {
            return Vec::new();
        }
        let mut seen = BTreeMap::new();
        let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };
        for tenant in 0..TENANTS.len() {
            self.master.list_of(self.shown(), TenantNo::new(tenant as u16 + 1), &query, |listed| {
                if listed.complete {
                    let key = full_key(tenant, listed.key.0);
                    let known = self.visible.get(&key).copied();
                    seen.insert(key, known);
                }
                true
            });
        }
        let strange: Vec<_> = seen.iter().filter(|(_, known)| known.is_none()).map(|(key, _)| key).collect();
        assert!(
            strange.is_empty(),
            "objects are readable without a commit: {strange:?} of {:?}",
            self.visible
        );
        let gone = self.visible.iter().filter(|(key, _)| !seen.contains_key(*key));
        let lost: Vec<Lost> = gone.map(|(key, seen)| (key.clone(), seen.generation)).collect();
        for (key, _) in &lost {
            self.history.lost(key, self.now.as_nanos());
            self.vanish(key);
        }
        lost
    }

    /// Objects are lost when room is needed, or when their time or their node is over: not because an object
    /// is read or copied, or because a put ends. An object is not lost for the upsert that is to replace it.
    pub(crate) fn check_losses(
        &self,
        asker: Option<usize>,
        request: &Frame<'_>,
        lost: &[Lost],
    ) -> Result<(), Violation> {
        if lost.is_empty() {
            return Ok(());
        }
        let kind = Kind::from_byte(request.header.kind);
        if let (Some(Kind::PutStart), Some(tenant)) = (kind, asker) {
            let (put, asked) = PutStart::decode_request(request.body).unwrap();
            let keys: Vec<_> = asked.map(|new| full_key(tenant, new.key.0)).collect();
            let wanted = lost.iter().find(|(key, _)| keys.contains(key));
            // An object may be lost for an upsert of another one in the same batch.
            let alone = keys.len() == 1 && put.options.existing != Existing::Keep;
            if let Some((key, _)) = wanted.filter(|_| alone) {
                return Err(Violation::LostByUpsert(format!("{} at {:?}", Key(key), self.now)));
            }
            // One that is put again may be lost because its time is over.
            let pinned = |lost: &&Lost| self.pinned.contains(&lost.1) && !keys.contains(&lost.0);
            if let Some((key, _)) = lost.iter().find(pinned) {
                return Err(Violation::EvictedPinned(format!("{} at {:?}", Key(key), self.now)));
            }
        }
        let may = match kind {
            Some(Kind::PutStart | Kind::Remove | Kind::Mount | Kind::Unmount) => true,
            // What a report removes, or a request about many, is known by now.
            _ => false,
        };
        if may {
            return Ok(());
        }
        let text = format!("{} by a request of kind {} at {:?}", lost.len(), request.header.kind, self.now);
        Err(Violation::LostByTask(text))
    }

    /// Whether every tenant is within its quota, and none lost objects to another while it was within its
    /// guarantee.
    pub(crate) fn check_tenants(&mut self, before: &Standing, asker: Option<usize>) -> Result<(), Violation> {
        for (at, name) in TENANTS.iter().enumerate() {
            let usage = self.master.tenant(name).unwrap();
            let mut promise = self.promised[at];
            if !promise.holds(&usage) {
                return Err(Violation::OverQuota(format!("{usage:?}, {promise:?} at {:?}", self.now)));
            }
            if promise.is_above() {
                promise.settle(&usage, self.copied_bytes());
                self.promised[at] = promise;
            }
            if asker != Some(at)
                && usage.evictions_total > before.evictions[at]
                && before.bytes[at] <= promise.guaranteed_bytes
            {
                return Err(Violation::BelowGuarantee(format!(
                    "{usage:?}, before it {} bytes, at {:?}",
                    before.bytes[at], self.now
                )));
            }
        }
        Ok(())
    }

    /// Checks the master's events about nodes that it has given up.
    pub(crate) fn check_given_up(&mut self) -> Result<(), Violation> {
        let mut found = Ok(());
        while let Some(event) = self.master.poll_event() {
            let Event::NodeGivenUp { node, .. } = event else { continue };
            let Some((heard, _)) = self.heard.remove(&node.get()) else { continue };
            let silent = self.counted() - heard;
            if silent < Duration::from_millis(self.master.config().node_ttl_ms.into()) {
                let text =
                    format!("{event:?} at {:?}: the master was running for {silent:?} since", self.now);
                found = found.and(Err(Violation::GivenUpEarly(text)));
            }
        }
        found
    }

    /// Nothing is evicted for a put that is refused.
    pub(crate) fn check_refusal(&self, before: &Standing) -> Result<(), Violation> {
        let evicted = |standing: &Standing| standing.evictions.iter().sum::<u64>();
        let gone = evicted(&Standing::of(&self.master)) - evicted(before);
        if gone == 0 {
            return Ok(());
        }
        Err(Violation::EvictedForNothing(format!("{gone} objects at {:?}", self.now)))
    }

    pub(crate) fn observe(
        &mut self,
        (from, life): (Party, u64),
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let body = request.body;
        match Kind::from_byte(request.header.kind) {
            Some(Kind::PutStart) => {
                let (put, asked) = PutStart::decode_request(body).unwrap();
                let retained = put.options.retention != Retention::DEFAULT;
                self.report.retained += asked.len() as u64 * u64::from(retained);
                self.observe_put(from, &put, asked, PutStart::decode_response(response))?;
            }
            Some(Kind::PutRevoke) => {
                let (_, asked) = PutRevoke::decode_request(body).unwrap();
                for revocation in asked.filter(|revocation| revocation.quiet) {
                    self.shadow.ended(revocation.generation);
                }
            }
            Some(Kind::PutEnd) => self.observe_end(from, body, response),
            Some(Kind::Get) => self.observe_get((from, life), response)?,
            Some(Kind::ChangeRetention) => self.observe_change(from, body, response),
            Some(Kind::ExistsLeased) => self.observe_leases((from, life), body, response)?,
            Some(Kind::Remove) => self.observe_remove(from, request, response),
            Some(Kind::List | Kind::Find) => self.observe_page(from, request, response)?,
            Some(Kind::RemoveMany) => self.observe_sweep(from, request, response)?,
            Some(Kind::ClearReplicas) => self.observe_clearing(from, request, response)?,
            Some(Kind::Beat) => {
                if let Ok((NodeStatus::Ok | NodeStatus::Work, _)) = Beat::decode_response(response) {
                    self.hear(from, life);
                }
            }
            Some(Kind::Mount) => {
                if let Ok((MountResponse::Mounted(_), _)) = Mount::decode_response(response) {
                    self.hear(from, life);
                }
            }
            Some(Kind::CreateTasks) => self.observe_new_tasks(from, response)?,
            Some(Kind::QueryTasks) => {
                let (_, asked) = QueryTasks::decode_request(body).unwrap();
                self.observe_tasks(from, asked, QueryTasks::decode_response(response))?;
            }
            Some(Kind::CancelTasks) => {
                let (_, asked) = CancelTasks::decode_request(body).unwrap();
                self.observe_tasks(from, asked, CancelTasks::decode_response(response))?;
            }
            Some(Kind::RetryTasks) => {
                let (_, asked) = RetryTasks::decode_request(body).unwrap();
                self.observe_tasks(from, asked, RetryTasks::decode_response(response))?;
            }
            Some(Kind::FetchTasks) => self.observe_orders(from, response)?,
            Some(Kind::EndTasks) => self.observe_task_ends(from, body, response),
            Some(Kind::ReportReplicas) => self.observe_reports(from, request, response)?,
            _ => {}
        }
        Ok(())
    }

    fn observe_end(&mut self, from: Party, body: &[u8], response: &Frame<'_>) {
        let (_, asked) = PutEnd::decode_request(body).unwrap();
        for commit in asked {
            self.shadow.ended(commit.generation);
        }
        let Ok((_, answers)) = PutEnd::decode_response(response) else { return };
        for (Commit { key, generation, .. }, answer) in asked.zip(answers) {
            if answer.is_ok() {
                self.visible.insert(self.full_key(from, key.0), Seen { generation });
            }
        }
    }

    fn observe_remove(&mut self, from: Party, request: &Frame<'_>, response: &Frame<'_>) {
        let (_, mut asked) = Remove::decode_request(request.body).unwrap();
        let Ok((_, mut answers)) = Remove::decode_response(response) else { return };
        if let (Party::Client(client), Some(Ok(())), Some(removal)) = (from, answers.next(), asked.next()) {
            let key = self.full_key(from, removal.key.0);
            self.vanish(&key);
            if self.doubled.contains(&(client, request.header.request_id)) {
                self.history.lost(&key, self.now.as_nanos());
            }
        }
    }

    fn observe_new_tasks(&mut self, from: Party, response: &Frame<'_>) -> Result<(), Violation> {
        let Ok((_, answers)) = CreateTasks::decode_response(response) else { return Ok(()) };
        let tenant = self.tenant_of(from);
        for id in answers.flatten() {
            let known = *self.task_owners.entry(id).or_insert(tenant);
            if known != tenant {
                return Err(Violation::Foreign(format!("{from:?} was shown task {id:#x}")));
            }
        }
        Ok(())
    }

    fn observe_task_ends(&mut self, from: Party, body: &[u8], response: &Frame<'_>) {
        let (_, ends) = EndTasks::decode_request(body).unwrap();
        if let Party::Node(index) = from {
            // The node has stopped reading these sources, and the master has been told.
            for end in ends.filter(|end| end.quiet || end.result.is_ok()) {
                self.shadow.returned((CLIENTS + index, 0), end.attempt, 1);
            }
        }
        let Ok((_, answers)) = EndTasks::decode_response(response) else { return };
        for (end, answer) in ends.zip(answers) {
            // The response shows that this attempt was the latest, and the state that it was the last.
            let task = self.master.task(self.shown(), end.id);
            let done = task.is_ok_and(|task| task.state == TaskState::Done);
            if answer.is_ok() && end.result.is_ok() && done {
                let moved = task.is_ok_and(|task| task.source.is_some());
                self.accepted(end.attempt, moved);
            }
        }
    }

    fn hear(&mut self, from: Party, life: u64) {
        if let Party::Node(index) = from {
            self.heard.insert(index as u64 + 1, (self.counted(), life));
        }
    }

    /// A key with the tenant that the client really has.
    fn full_key(&self, from: Party, key: &[u8]) -> Vec<u8> {
        full_key(self.tenant_of(from), key)
    }

    fn observe_put<'a>(
        &mut self,
        from: Party,
        put: &PutRequest,
        asked: impl Iterator<Item = NewObject<'a>>,
        answer: Result<(PutWindow, Items<'_, Result<Allocation, ErrorCode>>), ErrorCode>,
    ) -> Result<(), Violation> {
        let Ok((_, answers)) = answer else { return Ok(()) };
        let mut found = Ok(());
        let mut admitted = false;
        for (NewObject { key, len }, allocation) in asked.zip(answers) {
            self.report.refused += u64::from(allocation == Err(ErrorCode::TenantQuotaExceeded));
            let Ok(allocation) = allocation else { continue };
            let order = self.starts.len() as u64 + 1;
            // A repeated start is the same start.
            let fresh = *self.starts.entry(allocation.generation).or_insert(order) == order;
            admitted |= fresh;
            let place = |replica: &Replica| (replica.segment, replica.addr, stored_len(len));
            let ranges = allocation.replicas.iter().map(place).collect();
            for replica in allocation.replicas.iter() {
                let range = (replica.segment, replica.addr, stored_len(len));
                let given = self.shadow.allocated(self.now, allocation.generation, range);
                self.shadow.own(allocation.generation, range);
                found = found.and(given);
                if fresh && self.closed.contains(&replica.segment) {
                    let text = format!("a put on segment {} at {:?}", replica.segment, self.now);
                    found = found.and(Err(Violation::NotDrained(text)));
                }
            }
            if fresh {
                let key = self.full_key(from, key.0);
                let replaces = put.options.existing != Existing::Keep;
                let claim = Claim { key, replaces, handle: allocation.handle, engine: put.writer, ranges };
                self.shadow.claims.insert(allocation.generation, claim);
            }
        }
        let tenant = self.tenant_of(from);
        let usage = self.master.tenant(TENANTS[tenant]).unwrap();
        if admitted
            && self.promised[tenant].quota_bytes.is_some_and(|quota| usage.bytes + usage.held_bytes > quota)
        {
            found = found.and(Err(Violation::OverQuota(format!("a put was accepted: {usage:?}"))));
        }
        found
    }

    fn observe_get(&mut self, (from, life): (Party, u64), response: &Frame<'_>) -> Result<(), Violation> {
        let Ok((lease, answers)) = Get::decode_response(response) else { return Ok(()) };
        let until = self.now + slowest(lease.lease_ms);
        let reader = if let Party::Client(client) = from { Some((client, life)) } else { None };
        for (no, object) in answers.flatten().enumerate() {
            let whose = reader.map(|(client, life)| (client, life, lease.first + no as u64));
            let segments = || object.replicas.iter().map(|replica| replica.segment);
            let twice = segments().enumerate().any(|(at, no)| segments().take(at).any(|other| other == no));
            if twice || object.replicas.len() > usize::from(self.master.config().replicas_max) {
                return Err(Violation::Books(format!(
                    "replicas that share a segment, or more of them than the limit: {:?}",
                    object.replicas
                )));
            }
            for replica in object.replicas.iter() {
                if self.dropped.contains(&(object.generation, replica.segment)) {
                    return Err(Violation::BadDrop(format!("{replica:?} is returned to readers again")));
                }
                let range = (replica.segment, replica.addr, stored_len(object.len));
                self.shadow.leased(object.generation, range, until, whose)?;
            }
        }
        Ok(())
    }

    /// Notes what was pinned for good after its put.
    fn observe_change(&mut self, from: Party, body: &[u8], response: &Frame<'_>) {
        let Ok((_, changed)) = ChangeRetention::decode_response(response) else { return };
        let (change, asked) = ChangeRetention::decode_request(body).unwrap();
        let changed = asked.zip(changed).filter(|(_, result)| result.is_ok());
        for (key, _) in changed.filter(|_| change.pin.is_some()) {
            let Some(seen) = self.visible.get(&self.full_key(from, key.0)) else { continue };
            if change.pin == Some(Pin::Hard) {
                self.report.pinned += 1;
                self.pinned.insert(seen.generation);
            } else {
                self.pinned.remove(&seen.generation);
            }
        }
    }

    /// What is said to exist with a lease must stay in place like what is read.
    fn observe_leases(
        &mut self,
        (from, life): (Party, u64),
        body: &[u8],
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let Ok((lease, found)) = ExistsLeased::decode_response(response) else { return Ok(()) };
        let (_, asked) = ExistsLeased::decode_request(body).unwrap();
        let until = self.now + slowest(lease.lease_ms);
        let there = asked.zip(found).filter(|(_, found)| *found);
        for (no, (key, _)) in there.enumerate() {
            self.report.promised += 1;
            let Party::Client(client) = from else { continue };
            let full = self.full_key(from, key.0);
            let Some(Seen { generation }) = self.visible.get(&full).copied() else {
                return Err(Violation::Shown(format!("{} at {:?}", Key(&full), self.now)));
            };
            let len = self.shadow.puts.get(&generation).map_or(0, |put| stored_len(put.len));
            let whose = Some((client, life, lease.first + no as u64));
            let tenant = TenantNo::new(self.tenant_of(from) as u16 + 1);
            let places = self.master.find_replicas(FullKey { tenant, key: key.0 }).unwrap_or_default();
            let complete = places.iter().filter(|replica| replica.state == ReplicaState::Complete);
            for replica in complete {
                self.shadow.leased(generation, (replica.segment, replica.addr, len), until, whose)?;
            }
        }
        Ok(())
    }

    /// No client sees, or changes, tasks of other tenants.
    fn observe_tasks(
        &mut self,
        from: Party,
        asked: impl Iterator<Item = TaskId>,
        answer: Result<((), Items<'_, Result<TaskInfo<'_>, ErrorCode>>), ErrorCode>,
    ) -> Result<(), Violation> {
        let Ok((_, answers)) = answer else { return Ok(()) };
        let tenant = self.tenant_of(from);
        for (id, answer) in asked.zip(answers) {
            if self.task_owners.get(&id).is_none_or(|owner| *owner == tenant) {
                continue;
            }
            self.report.foreign += 1;
            if answer != Err(ErrorCode::TaskNotFound) {
                return Err(Violation::Foreign(format!("{from:?} asked about task {id:#x}: {answer:?}")));
            }
        }
        Ok(())
    }

    /// Places are given to attempts as they are to puts, and sources are leased as they are to readers.
    fn observe_orders(&mut self, from: Party, response: &Frame<'_>) -> Result<(), Violation> {
        let Ok((lease, orders)) = FetchTasks::decode_response(response) else { return Ok(()) };
        let until = self.now + slowest(lease.lease_ms);
        let Party::Node(index) = from else { return Ok(()) };
        for order in orders {
            let range = (order.segment, order.addr, stored_len(order.len));
            let node = self.master.segment(order.segment).map(|info| info.node.get() as usize);
            if !matches!(from, Party::Node(index) if node == Some(index + 1)) {
                return Err(Violation::Foreign(format!("{from:?} was given the place {range:?}")));
            }
            self.report.orders += u64::from(!self.given.contains_key(&order.attempt));
            self.shadow.allocated(self.now, order.attempt, range)?;
            for source in order.sources.iter() {
                let from = (source.segment, source.addr, stored_len(order.len));
                let whose = Some((CLIENTS + index, 0, order.attempt));
                self.shadow.leased(order.generation, from, until, whose)?;
            }
            let given = Given { generation: order.generation, range, accepted: false };
            self.given.entry(order.attempt).or_insert(given);
        }
        Ok(())
    }

    /// A copy counts from here on.
    fn accepted(&mut self, attempt: u64, moved: bool) {
        let Some(given) = self.given.get_mut(&attempt).filter(|given| !given.accepted) else { return };
        given.accepted = true;
        let Given { generation, range, .. } = *given;
        self.shadow.own(generation, range);
        self.dropped.remove(&(generation, range.0));
        self.report.copies += 1;
        self.report.moves += u64::from(moved);
        self.fresh.push(attempt);
    }

    /// A dropped replica is bad, and objects that are gone with it were reported as gone.
    fn observe_reports(
        &mut self,
        from: Party,
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let (_, asked) = ReportReplicas::decode_request(request.body).unwrap();
        let Ok((_, answers)) = ReportReplicas::decode_response(response) else { return Ok(()) };
        for (bad, verdict) in asked.zip(answers) {
            let Ok(verdict @ (Verdict::Dropped | Verdict::Gone)) = verdict else { continue };
            if !self.shadow.is_flipped(bad.generation, bad.segment) {
                return Err(Violation::BadDrop(format!("{from:?} reported {bad:?}, which is intact")));
            }
            self.dropped.insert((bad.generation, bad.segment));
            if verdict == Verdict::Gone {
                let known = self.shadow.puts.get(&bad.generation).map(|put| put.key.clone());
                if let Some(key) = known {
                    self.vanish(&key);
                    self.history.lost(&key, self.now.as_nanos());
                }
            }
        }
        Ok(())
    }

    /// Whether a committed object has this generation.
    pub(crate) fn is_visible(&self, generation: u64) -> bool {
        let put = self.shadow.puts.get(&generation);
        put.and_then(|put| self.visible.get(&put.key)).is_some_and(|seen| seen.generation == generation)
    }

    /// A segment on which a tenant's object has a replica, if the object exists.
    pub(crate) fn source_of(&self, tenant: usize, key: &[u8]) -> Option<SegmentNo> {
        let found =
            self.master.find_replicas(FullKey { tenant: TenantNo::new(tenant as u16 + 1), key }).ok()?;
        found.first().map(|replica| replica.segment)
    }
}

/// How long a lease can last by the slowest clock.
fn slowest(lease_ms: u32) -> Duration {
    Duration::from_millis(lease_ms.into()).mul_f64(1.0 / (1.0 - DRIFT_PPM_MAX as f64 / 1e6))
}
