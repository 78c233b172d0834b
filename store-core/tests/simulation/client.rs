//! A simulated client: the code around `GetOp` and `PutOp`, with what can go wrong in it. Moving and
//! verifying bytes is in `moving`.

use std::collections::HashMap;

use store_core::chunks::trailer_len;
use store_core::client::{Action, ClientConfig, GetItem, GetOp, PutItem, PutOp};
use store_core::message::{
    CancelTasks, ChangeRetention, CreateTasks, Existing, Exists, ExistsLeased, Get, Inherit, InheritPin,
    LeaseRange, NewTask, Object, Operation, Pin, PutEnd, PutOptions, PutRequest, PutStart, QueryTasks,
    Removal, Remove, ReportReplicas, Retention, RetentionChange, RetryTasks, ReturnLeases, TaskQuery,
    TaskState, TtlChange,
};
use store_core::{ErrorCode, Frame, Key, Kind, NodeId, Placement, SegmentNo, TaskId};
use te_core::sim::SimTransport;
use te_core::testkit::Rng;
use te_core::{Instant, Memory as _, Outcome, RegionId, RemoteRegionId, Slice, Token, Transport};

use crate::bulk::Bulk;
use crate::checker::{Id, Request, Response};
use crate::clock::Clock;
use crate::common::{Core, Party};
use crate::memory::{Memory, content, sums};
use crate::moving::{Moving, What};
use crate::scenario::{CHILD, Lies, full_key, tenant_of};
use crate::sessions::{Session, Stage};
use crate::shadow::{Put, Violation};

pub(crate) const ITEMS_MAX: u64 = 3;
pub(crate) const REGION: RegionId = RegionId::new(0, 1);

pub(crate) struct Client {
    pub(crate) index: usize,
    /// Dropped before the memory that it moves.
    pub(crate) transport: SimTransport,
    pub(crate) memory: Memory,
    /// Bytes of memory per item.
    pub(crate) slot_bytes: u64,
    /// Counts its incarnations.
    pub(crate) life: u64,
    /// The client and incarnation whose connection to the master it uses: its own, unless it is a twin that
    /// lies.
    pub(crate) speaks_as: (usize, u64),
    /// The identity that nodes know it by.
    pub(crate) engine: u64,
    /// A node has reported that it was cut off: it needs another engine.
    pub(crate) expelled: bool,
    pub(crate) clock: Clock,
    /// Stopped, as by a signal: it does nothing, and its fabric continues.
    pub(crate) stopped: bool,
    /// It read its clock just before it was stopped, and acts on that time now.
    stale: Option<Instant>,
    /// What it had not written yet when it was stopped during a write.
    pub(crate) unsent: Vec<(u64, Slice)>,
    /// The nonce of its latest put, and whether that is an upsert.
    nonce: u32,
    pub(crate) replaces: bool,
    /// The operation of its parent when it was forked.
    inherited: Option<Inherited>,
    pub(crate) running: Running,
    pub(crate) session: Option<Session>,
    pub(crate) get: GetOp,
    pub(crate) put: PutOp,
    pub(crate) asked: Vec<Asked>,
    /// Items of the latest start.
    starting: Vec<usize>,
    pub(crate) began: Instant,
    pub(crate) segments: HashMap<SegmentNo, RemoteRegionId>,
    pub(crate) transfers: HashMap<u64, Moving>,
    pub(crate) tokens: HashMap<Token, What>,
    next: u64,
    /// The latest request of the running operation.
    call: u64,
    /// The latest put of each key that it read, for clients that lie about it.
    cache: HashMap<Vec<u8>, u64>,
    /// The request about many objects that it is carrying out.
    pub(crate) bulk: Option<Bulk>,
    /// The keys of its previous listing, for clients that show them again.
    pub(crate) former: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Running {
    Nothing,
    Get,
    Put,
    /// Puts that are written range by range; see `sessions`.
    Session(Stage),
    Remove {
        request_id: u64,
        force: bool,
    },
    /// With a lease, or without.
    Exists {
        request_id: u64,
        leased: bool,
    },
    /// A listing, or a removal of many; see `bulk`.
    Bulk,
    /// A request about tasks or replicas: the client ignores the response.
    Word {
        request_id: u64,
    },
}

/// What a process that was forked during a put has in its memory: the keys, the lengths, whether the put
/// replaces, and its nonce, or the next one that every process with the same random state will draw.
struct Inherited {
    items: Vec<(Vec<u8>, u64)>,
    nonce: u32,
    replaces: bool,
}

pub(crate) struct Asked {
    pub(crate) key: Vec<u8>,
    pub(crate) len: u64,
    pub(crate) number: u64,
    pub(crate) object: Option<Object>,
    pub(crate) generation: Option<u64>,
    /// The wanted part: offset and length; `None`: up to the end.
    pub(crate) part: Option<(u64, Option<u64>)>,
    /// Its commit was sent.
    pub(crate) ending: bool,
    recorded: Option<Id>,
}

impl Client {
    pub(crate) fn new(
        index: usize,
        mut transport: SimTransport,
        life: u64,
        clock: Clock,
        slot_bytes: u64,
    ) -> Self {
        let memory = Memory::new((ITEMS_MAX * slot_bytes) as usize, 0xcc);
        // SAFETY: `memory` outlives `transport` by the order of the fields, and is only touched through
        // volatile views.
        unsafe { transport.register(REGION, memory.span(), te_core::Access::LOCAL) }.unwrap();
        Self {
            index,
            engine: transport.identity(),
            transport,
            memory,
            slot_bytes,
            life,
            speaks_as: (index, life),
            expelled: false,
            clock,
            stopped: false,
            stale: None,
            unsent: Vec::new(),
            nonce: 0,
            replaces: false,
            inherited: None,
            running: Running::Nothing,
            session: None,
            get: GetOp::new(ClientConfig::default()),
            put: PutOp::new(ClientConfig::default()),
            asked: Vec::new(),
            starting: Vec::new(),
            began: Instant::ZERO,
            segments: HashMap::new(),
            transfers: HashMap::new(),
            tokens: HashMap::new(),
            next: life << 32,
            call: 0,
            cache: HashMap::new(),
            bulk: None,
            former: Vec::new(),
        }
    }

    /// The result of `fork` for a client during a put: another process with the same numbers in its memory.
    ///
    /// It has noticed the fork, leaves its parent's connection and engine alone, and continues the put with
    /// its own. One that lies continues with its parent's.
    /// lies goes on with its parent's.
    pub(crate) fn fork(&self, mut transport: SimTransport, life: u64, lies: Lies) -> Self {
        let lying = lies.contains(Lies::TWIN);
        if lying {
            transport.set_identity(self.engine);
        }
        let mut child = Self::new(CHILD, transport, life, self.clock, self.slot_bytes);
        if lying {
            child.speaks_as = self.speaks_as;
            child.next = self.next;
        }
        let items = self.asked.iter().map(|asked| (asked.key.clone(), asked.len)).collect();
        child.inherited = Some(Inherited { items, nonce: self.nonce, replaces: self.replaces });
        child
    }

    /// Whether it waits for a put's place, or writes.
    pub(crate) fn is_putting(&self) -> bool {
        self.running == Running::Put
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running == Running::Nothing
    }

    pub(crate) fn describe(&self) -> String {
        format!("client {} {:?} since {:?}", self.index, self.running, self.began)
    }

    /// In true time.
    pub(crate) fn poll_timeout(&self, lies: Lies) -> Option<Instant> {
        let due = match self.running {
            _ if self.stopped => None,
            Running::Get if !lies.contains(Lies::CLOCK) => self.get.poll_timeout(),
            Running::Put | Running::Session(_) => self.put.poll_timeout(),
            _ => None,
        };
        due.map(|shown| self.clock.when(shown))
    }

    /// Continues after a stop.
    pub(crate) fn resume(&mut self, stopped_at: Instant) {
        self.stopped = false;
        self.stale = Some(self.clock.shows(stopped_at));
    }

    /// Continues an interrupted write: a copy does not look at a clock.
    pub(crate) fn write_on(&mut self, core: &mut Core) {
        for (number, slice) in std::mem::take(&mut self.unsent) {
            if !self.submit(number, slice) {
                self.slice_ended(core, number, Outcome::NotApplied, false);
            }
        }
    }

    /// Whether the fabric accepts it.
    pub(crate) fn submit(&mut self, number: u64, slice: Slice) -> bool {
        let taken = matches!(self.transport.submit(&[slice]), Ok(1));
        if taken {
            if let Some(moving) = self.transfers.get_mut(&number) {
                moving.tokens.push(slice.token);
            }
            self.tokens.insert(slice.token, What::Slice(number));
        }
        taken
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let now = self.clock.shows(now);
        match self.running {
            Running::Get => self.get.handle_timeout(now),
            Running::Put | Running::Session(_) => self.put.handle_timeout(now),
            _ => {}
        }
    }

    /// Starts a random operation.
    // Long because: it is one choice among all operations, with a branch for each.
    pub(crate) fn start(&mut self, core: &mut Core, rng: &mut Rng) {
        self.began = self.clock.shows(core.now);
        self.asked.clear();
        if std::mem::take(&mut self.expelled) {
            self.engine = rng.next() | 1;
            self.transport.set_identity(self.engine);
        }
        let inherited = self.inherited.take();
        let dice = if inherited.is_some() { 45 } else { rng.below(107) };
        let in_ranges = inherited.is_none() && rng.below(100) < core.scenario.sessions_pct;
        let nonce = inherited.as_ref().map_or_else(|| 1 + rng.below(u32::MAX.into()) as u32, |it| it.nonce);
        let replaces =
            inherited.as_ref().map_or_else(|| rng.below(100) < core.scenario.upserts_pct, |it| it.replaces);
        let count = if (85..103).contains(&dice) { 1 } else { 1 + rng.below(ITEMS_MAX) };
        let random = |_| (core.random_key(rng), core.scenario.random_len(rng));
        let items = inherited.map_or_else(|| (0..count).map(random).collect(), |it| it.items);
        for (key, len) in items {
            if self.asked.iter().any(|asked| asked.key == key) {
                continue;
            }
            let number = core.next_put();
            self.asked.push(Asked {
                key,
                len,
                number,
                object: None,
                generation: None,
                part: None,
                ending: false,
                recorded: None,
            });
        }
        if dice < 45 {
            self.running = Running::Get;
            self.record(core, |_| Request::Get);
            if dice < 15 {
                let longest = core.scenario.random_len(rng);
                self.asked.iter_mut().for_each(|asked| asked.part = Some(random_part(rng, longest)));
            }
            let items = self.asked.iter().map(|asked| GetItem {
                key: &asked.key,
                capacity: self.slot_bytes,
                len_min: asked.part.map_or(1, |(start, count)| start + count.unwrap_or(1)),
            });
            self.get.start(items, &[]);
        } else if dice < 85 {
            self.running = Running::Put;
            self.record(core, |asked| match replaces {
                true => Request::Upsert(asked.number),
                false => Request::Put(asked.number),
            });
            let mut items = Vec::new();
            for (slot, asked) in self.asked.iter().enumerate() {
                let bytes = content(asked.number, asked.len);
                let sums = sums(&bytes);
                let at = slot as u64 * self.slot_bytes;
                self.memory.write(at, &bytes);
                self.memory.write(at + asked.len, sums.trailer());
                items.push(PutItem { key: &asked.key, len: asked.len, checksum: sums.whole() });
            }
            let retention = if core.scenario.retention { random_retention(rng) } else { Retention::DEFAULT };
            let replicas = 1 + rng.below(2) as u8;
            let placement = random_placement(rng);
            let existing = if replaces { Existing::Replace(random_inherit(rng)) } else { Existing::Keep };
            let options = PutOptions { replicas, placement, retention, existing };
            (self.nonce, self.replaces) = (nonce, replaces);
            let request = PutRequest { nonce, options, writer: self.engine };
            if in_ranges {
                self.put.open(items, request);
                self.running = Running::Session(Stage::Opening);
                self.session = Some(Session::new(rng.fork(), self.asked.len()));
            } else {
                self.put.start(items, request);
            }
        } else if (100..103).contains(&dice) {
            self.running = Running::Bulk;
            self.start_bulk(core, rng, dice == 102);
        } else if dice >= 103 {
            let request_id =
                if dice < 105 { self.clear_replicas(core, rng) } else { self.change_retention(core, rng) };
            self.running = Running::Word { request_id };
        } else if dice >= 95 && core.scenario.tasks {
            self.ask_for_tasks(core, rng);
        } else {
            self.remove_or_look(core, rng.below(2) == 0, dice < 92);
        }
    }

    /// Removes its first key, or checks whether it exists.
    fn remove_or_look(&mut self, core: &mut Core, force: bool, remove: bool) {
        let request_id = self.next_id();
        let mut out = Vec::new();
        self.record(core, |_| if remove { Request::Remove { force } } else { Request::Exists });
        let key = Key(&self.asked[0].key);
        // The same dice for both.
        let leased = force;
        if remove {
            Remove::encode_request(&mut out, request_id, &(), [Removal { key, force }].into_iter()).unwrap();
            self.running = Running::Remove { request_id, force };
        } else {
            match leased {
                true => ExistsLeased::encode_request(&mut out, request_id, &(), [key].into_iter()),
                false => Exists::encode_request(&mut out, request_id, &(), [key].into_iter()),
            }
            .unwrap();
            self.running = Running::Exists { request_id, leased };
        }
        core.send_call((self.index, self.life), self.speaks_as, request_id, out);
    }

    /// Carries out the actions of the running operation; returns true when it has just ended.
    pub(crate) fn drive(&mut self, core: &mut Core) -> Result<bool, Violation> {
        if self.stopped {
            return Ok(false);
        }
        let now = self.stale.take().unwrap_or_else(|| self.clock.shows(core.now));
        loop {
            if self.stopped {
                return Ok(false);
            }
            let mut out = Vec::new();
            let request_id = self.next_id();
            let lying = core.lies.contains(Lies::CLOCK);
            let action = match self.running {
                Running::Get => self.get.poll(if lying { self.began } else { now }, request_id, &mut out),
                Running::Put | Running::Session(_) => self.put.poll(now, request_id, &mut out),
                _ => None,
            };
            match action {
                Some(Action::Call) => {
                    self.call = request_id;
                    self.note_ends(&out);
                    self.note_starts(&out);
                    core.send_call((self.index, self.life), self.speaks_as, request_id, out);
                }
                Some(Action::Transfer(transfer)) => self.transfer(core, transfer)?,
                Some(Action::Cancel { transfer }) => {
                    let moving = self.transfers.values().filter(|moving| moving.transfer.id == transfer);
                    for token in moving.flat_map(|moving| moving.tokens.clone()).collect::<Vec<_>>() {
                        // A slice that has ended already is not there any more.
                        let _ = self.transport.cancel(token);
                    }
                }
                Some(Action::Fence { segment }) => self.fence(core, segment),
                None => match self.running {
                    Running::Session(stage) if self.put.is_done() => {
                        if self.next_stage(core, stage) {
                            self.running = Running::Nothing;
                            return Ok(true);
                        }
                    }
                    _ => break,
                },
            }
        }
        match self.running {
            Running::Get if self.get.is_done() => {
                self.judge_get(core)?;
                self.return_leases(core);
                if self.get.mismatches() > 0 {
                    self.report_bad(core);
                    return Ok(false);
                }
            }
            Running::Put if self.put.is_done() => self.note_put(core),
            _ => return Ok(false),
        }
        self.running = Running::Nothing;
        Ok(true)
    }

    /// Notes the items of a start: those that request another place are some of them.
    fn note_starts(&mut self, request: &[u8]) {
        let (frame, _) = Frame::parse(request).unwrap().unwrap();
        if frame.header.kind == Kind::PutStart as u8 {
            let (_, items) = PutStart::decode_request(frame.body).unwrap();
            let of = |key: Key<'_>| self.asked.iter().position(|asked| asked.key == key.0).unwrap();
            self.starting = items.map(|item| of(item.key)).collect();
        }
    }

    /// Whether an object is there, with a lease that is returned, or left to run out.
    fn leased(&mut self, core: &mut Core, frame: &Frame<'_>) -> Option<bool> {
        let (lease, mut found) = ExistsLeased::decode_response(frame).ok()?;
        let found = found.next()?;
        if found && core.below(2) == 0 {
            self.return_range(core, LeaseRange { first: lease.first, count: 1 });
        }
        Some(found)
    }

    /// Returns the leases of an operation that has ended.
    fn return_leases(&mut self, core: &mut Core) {
        if let Some(range) = self.get.leases() {
            self.return_range(core, range);
        }
    }

    fn return_range(&mut self, core: &mut Core, range: LeaseRange) {
        core.shadow.returned(self.speaks_as, range.first, range.count);
        let id = self.next_id();
        let mut out = Vec::new();
        ReturnLeases::encode_request(&mut out, id, &(), core::iter::once(range)).unwrap();
        core.send(Party::Client(self.speaks_as.0), self.speaks_as.1, out);
    }

    /// Processes a frame from the master.
    pub(crate) fn receive(&mut self, core: &mut Core, bytes: &[u8]) -> Result<bool, Violation> {
        let (frame, _) = Frame::parse(bytes).unwrap().unwrap();
        // A response may come late, when another operation is running.
        let current = frame.header.request_id == self.call;
        match self.running {
            Running::Get => {
                if let (true, Ok((_, objects))) = (current, Get::decode_response(&frame)) {
                    self.asked.iter_mut().zip(objects).for_each(|(asked, object)| asked.object = object.ok());
                }
                self.get.handle_response(&frame);
            }
            Running::Put | Running::Session(_) => {
                if let (true, Ok((_, allocations))) = (current, PutStart::decode_response(&frame)) {
                    for (item, allocation) in self.starting.iter().zip(allocations) {
                        let Ok(allocation) = allocation else { continue };
                        let asked = &mut self.asked[*item];
                        asked.generation = Some(allocation.generation);
                        core.note_start(asked.number, allocation.generation);
                        let key = full_key(tenant_of(self.index), &asked.key);
                        let put = Put { key, number: asked.number, len: asked.len };
                        core.shadow.puts.insert(allocation.generation, put);
                    }
                }
                self.put.handle_response(self.clock.shows(core.now), &frame);
            }
            Running::Remove { request_id, .. } if request_id == frame.header.request_id => {
                let result = Remove::decode_response(&frame).ok().and_then(|(_, mut results)| results.next());
                let answer = match result {
                    Some(Ok(())) => Response::Done,
                    Some(Err(ErrorCode::KeyNotFound)) => Response::NotFound,
                    Some(Err(ErrorCode::ObjectHasLease)) => Response::Found,
                    Some(Err(ErrorCode::ReplicaIsNotReady)) => Response::NotReady,
                    _ => Response::Failed,
                };
                core.report.removes += u64::from(answer == Response::Done);
                self.answer(core, 0, answer);
                self.running = Running::Nothing;
                return Ok(true);
            }
            Running::Exists { request_id, leased } if request_id == frame.header.request_id => {
                let result = if leased {
                    self.leased(core, &frame)
                } else {
                    Exists::decode_response(&frame).ok().and_then(|(_, mut results)| results.next())
                };
                let answer = match result {
                    Some(true) => Response::Found,
                    Some(false) => Response::NotFound,
                    None => Response::Failed,
                };
                self.answer(core, 0, answer);
                self.running = Running::Nothing;
                return Ok(true);
            }
            Running::Word { request_id } if request_id == frame.header.request_id => {
                self.running = Running::Nothing;
                return Ok(true);
            }
            Running::Bulk if self.asks_for_page(frame.header.request_id) => {
                let last = self.page_came(core, &frame)?;
                self.running = if last { Running::Nothing } else { Running::Bulk };
                return Ok(last);
            }
            _ => {}
        }
        Ok(false)
    }

    /// A request got no response in time.
    pub(crate) fn call_failed(&mut self, core: &mut Core, request_id: u64) -> Result<bool, Violation> {
        match self.running {
            Running::Get => self.get.handle_call_failed(request_id, ErrorCode::RpcTimeout),
            Running::Put | Running::Session(_) => {
                self.put.handle_call_failed(request_id, ErrorCode::RpcTimeout);
            }
            Running::Remove { request_id: mine, .. }
            | Running::Exists { request_id: mine, .. }
            | Running::Word { request_id: mine }
                if mine == request_id =>
            {
                if core.lies.contains(Lies::ANSWER) && matches!(self.running, Running::Remove { .. }) {
                    self.answer(core, 0, Response::Done);
                }
                self.running = Running::Nothing;
                return Ok(true);
            }
            Running::Bulk if self.asks_for_page(request_id) => {
                self.page_failed(core)?;
                self.running = Running::Nothing;
                return Ok(true);
            }
            _ => {}
        }
        Ok(false)
    }

    /// The process dies: what it has not requested to be committed never will be.
    pub(crate) fn die(&mut self, core: &mut Core) {
        if matches!(self.running, Running::Put | Running::Session(_)) {
            for item in 0..self.asked.len() {
                // An item that could not be opened has its answer.
                let known = self.session.as_ref().is_some_and(|session| session.is_refused(item));
                if !self.asked[item].ending && !known {
                    self.answer(core, item, Response::Failed);
                }
            }
        }
    }

    fn record(&mut self, core: &mut Core, request: impl Fn(&Asked) -> Request) {
        let many = !matches!(request(&self.asked[0]), Request::Remove { .. } | Request::Exists);
        for asked in self.asked.iter_mut().take(if many { ITEMS_MAX as usize } else { 1 }) {
            let request = request(asked);
            asked.recorded = Some(core.history.called(
                self.index,
                &full_key(tenant_of(self.index), &asked.key),
                request,
                core.now.as_nanos(),
            ));
        }
    }

    pub(crate) fn answer(&self, core: &mut Core, item: usize, answer: Response) {
        if let Some(id) = self.asked[item].recorded {
            core.history.answered(id, answer, core.now.as_nanos());
        }
    }

    /// Notes the items that a request commits.
    fn note_ends(&mut self, request: &[u8]) {
        let (frame, _) = Frame::parse(request).unwrap().unwrap();
        if frame.header.kind != Kind::PutEnd as u8 {
            return;
        }
        let (_, commits) = PutEnd::decode_request(frame.body).unwrap();
        for commit in commits {
            let ends = self.asked.iter_mut().filter(|asked| asked.key == commit.key.0);
            ends.for_each(|asked| asked.ending = true);
        }
    }

    fn judge_get(&mut self, core: &mut Core) -> Result<(), Violation> {
        core.report.mismatches += u64::from(self.get.mismatches());
        for bad in self.get.bad_replicas() {
            if !core.shadow.is_flipped(bad.generation, bad.segment) {
                let text = format!("{bad:?} for client {} at {:?}", self.index, core.now);
                core.judge(Err(Violation::Damaged(text)))?;
            }
        }
        for (item, asked) in self.asked.iter().enumerate() {
            core.report.gets += 1;
            let fetched = match self.get.result(item) {
                Some(Ok(fetched)) => fetched,
                Some(Err(error)) => {
                    core.report.lease_expired += u64::from(error == ErrorCode::LeaseExpired);
                    let nothing = [ErrorCode::ObjectNotFound, ErrorCode::ReplicaIsNotReady].contains(&error);
                    // An object that ends before the wanted part has no bytes to return either.
                    let short = error == ErrorCode::InvalidParams && asked.part.is_some();
                    core.report.failed_reads += u64::from(!nothing && !short);
                    self.answer(core, item, if nothing { Response::NotFound } else { Response::Failed });
                    continue;
                }
                None => return Err(Violation::Stuck(self.describe())),
            };
            core.report.hits += 1;
            let key = Key(&asked.key);
            let Some(put) = core.shadow.puts.get(&fetched.generation) else {
                return Err(Violation::WrongBytes(format!(
                    "{key}: generation {:#x} was never allocated",
                    fetched.generation
                )));
            };
            let (start, count) = asked.part.unwrap_or((0, None));
            let end = count.map_or(fetched.len, |count| start + count);
            let bytes = self.memory.read(item as u64 * self.slot_bytes + start, end - start);
            let right = content(put.number, put.len);
            core.report.parts += u64::from(asked.part.is_some());
            core.report.parts_of_many += u64::from(asked.part.is_some() && trailer_len(fetched.len) > 0);
            if put.key != full_key(tenant_of(self.index), &asked.key)
                || put.len != fetched.len
                || bytes != right[start as usize..end as usize]
            {
                return Err(Violation::WrongBytes(format!(
                    "{key}: the bytes are not those of {:#x} at {:?}",
                    fetched.generation, core.now
                )));
            }
            let fresh = put.number;
            let number = match self.cache.insert(asked.key.clone(), fresh) {
                Some(known) if core.lies.contains(Lies::CACHE) => known,
                _ => fresh,
            };
            self.answer(core, item, Response::Object(Some(number)));
        }
        Ok(())
    }

    fn note_put(&mut self, core: &mut Core) {
        for (item, asked) in self.asked.iter().enumerate() {
            match self.put.result(item) {
                Some(Ok(_)) => {
                    core.report.puts += 1;
                    core.report.upserts += u64::from(self.replaces);
                    self.answer(core, item, Response::Done);
                }
                Some(Err(_)) if core.lies.contains(Lies::ANSWER) && asked.generation.is_some() => {
                    self.answer(core, item, Response::Done);
                }
                Some(Err(_)) => {
                    core.report.failed_puts += 1;
                    // Once its commit was sent, the put may have been committed, or will be.
                    if !asked.ending {
                        self.answer(core, item, Response::Failed);
                    }
                }
                None => {}
            }
        }
    }

    /// Requests copies and moves, and their state.
    fn ask_for_tasks(&mut self, core: &mut Core, rng: &mut Rng) {
        let request_id = self.next_id();
        let tenant = core.tenant_of(Party::Client(self.index));
        let mut out = Vec::new();
        // Sometimes a task of another tenant.
        let foreign = rng.below(8) == 0;
        let whose = |owner: &usize| foreign || *owner == tenant;
        let latest = core.task_owners.iter().rev().take(16).filter(|(_, owner)| whose(owner));
        let known: Vec<TaskId> = latest.map(|(id, _)| *id).collect();
        // Preferably one that a node is carrying out.
        let mut id = known.get(rng.index(known.len())).copied();
        let query = TaskQuery { cursor: 0, limit: 1, state: Some(TaskState::Processing) };
        core.master.list_tasks(core.shown(), &query, |task| {
            let own = core.task_owners.get(&task.id).is_some_and(whose);
            id = if own { Some(task.id) } else { id };
            true
        });
        match (rng.below(16), id) {
            (0..2, Some(id)) => CancelTasks::encode_request(&mut out, request_id, &(), [id].into_iter()),
            (2..4, Some(id)) => RetryTasks::encode_request(&mut out, request_id, &(), [id].into_iter()),
            (4, Some(id)) => QueryTasks::encode_request(&mut out, request_id, &(), [id].into_iter()),
            _ => {
                let wanted: Vec<NewTask<'_>> = self
                    .asked
                    .iter()
                    .map(|asked| NewTask {
                        key: Key(&asked.key),
                        source: if rng.below(3) == 0 { None } else { core.source_of(tenant, &asked.key) },
                        target: if rng.below(2) == 0 { None } else { core.random_segment(rng) },
                    })
                    .collect();
                CreateTasks::encode_request(&mut out, request_id, &(), wanted.into_iter())
            }
        }
        .unwrap();
        self.running = Running::Word { request_id };
        core.send_call((self.index, self.life), self.speaks_as, request_id, out);
    }

    /// Changes how long its keys are kept.
    fn change_retention(&mut self, core: &mut Core, rng: &mut Rng) -> u64 {
        let request_id = self.next_id();
        let pin = [None, Some(Pin::None), Some(Pin::Soft), Some(Pin::Hard)][rng.index(4)];
        let soft_pin_ttl_ms =
            (pin == Some(Pin::Soft) && rng.below(2) == 0).then(|| 1 + rng.below(6_000) as u32);
        let ttl = match rng.below(4) {
            0 => TtlChange::Never,
            1 if core.scenario.retention => TtlChange::After(1 + rng.below(10_000) as u32),
            _ => TtlChange::Keep,
        };
        let change = RetentionChange { pin, soft_pin_ttl_ms, ttl };
        let mut out = Vec::new();
        let keys: Vec<_> = self.asked.iter().map(|asked| Key(&asked.key)).collect();
        ChangeRetention::encode_request(&mut out, request_id, &change, keys.into_iter()).unwrap();
        core.send_call((self.index, self.life), self.speaks_as, request_id, out);
        request_id
    }

    /// Reports the bad replicas that it found.
    fn report_bad(&mut self, core: &mut Core) {
        let request_id = self.next_id();
        let mut out = Vec::new();
        let reporter = self.life << 8 | self.index as u64;
        core.report.reported_bad += u64::from(self.get.mismatches());
        ReportReplicas::encode_request(&mut out, request_id, &reporter, self.get.bad_replicas()).unwrap();
        self.running = Running::Word { request_id };
        core.send_call((self.index, self.life), self.speaks_as, request_id, out);
    }

    pub(crate) fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// From a random offset, to the end or not.
fn random_part(rng: &mut Rng, longest: u64) -> (u64, Option<u64>) {
    let start = rng.below(longest / 2 + 1);
    (start, (rng.below(3) > 0).then(|| 1 + rng.below(longest / 2 + 1)))
}

/// Preferences of all kinds, of segments and nodes that exist and others.
fn random_placement(rng: &mut Rng) -> Placement {
    let mut placement = Placement { distinct_nodes: rng.below(4) == 0, ..Placement::ANY };
    match rng.below(8) {
        0 => placement.near = Some(NodeId::new(rng.below(4))),
        1 => placement = Placement::on(SegmentNo::new(rng.below(8) as u32)),
        2 => placement.excluded.push(SegmentNo::new(rng.below(8) as u32)).unwrap(),
        _ => {}
    }
    placement
}

/// Usually none; else a pin, a time to live, a group, or several of them.
fn random_retention(rng: &mut Rng) -> Retention {
    let one_in = |rng: &mut Rng, n: u64| rng.below(n) == 0;
    let pin = match rng.below(32) {
        0 => Pin::Hard,
        1..5 => Pin::Soft,
        _ => Pin::None,
    };
    let ttl_ms = one_in(rng, 8).then(|| 1 + rng.below(10_000) as u32);
    let group = one_in(rng, 6).then(|| rng.below(4));
    let soft_pin_ttl_ms = (pin == Pin::Soft && one_in(rng, 2)).then(|| 1 + rng.below(6_000) as u32);
    Retention { pin, soft_pin_ttl_ms, ttl_ms, group, ..Retention::DEFAULT }
}

/// What an upsert takes over.
fn random_inherit(rng: &mut Rng) -> Inherit {
    let pins = [InheritPin::No, InheritPin::Hard, InheritPin::Stronger];
    Inherit { pin: pins[rng.index(pins.len())], group: rng.below(2) == 0 }
}
