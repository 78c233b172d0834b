//! A simulated client: the shell around `GetOp` and `PutOp`, with what can go wrong in one.

use std::collections::HashMap;

use store_core::client::{Action, ClientConfig, GetItem, GetOp, PutItem, PutOp, Transfer, TransferEnd};
use store_core::message::{
    Exists, Get, Object, Operation, Pin, PutAsk, PutEnd, PutOptions, PutStart, Removal, Remove, Retention,
};
use store_core::{ErrorCode, Frame, Key, Kind, Placement, SegmentNo};
use te_core::sim::{Rng, SimTransport};
use te_core::{
    Completion, ErrorKind, Instant, Memory as _, Op, Outcome, RegionId, SegmentId, Slice, Token, Transport,
};

use crate::checker::{Answer, Ask, Id};
use crate::clock::Clock;
use crate::memory::{Memory, checksum, content};
use crate::shadow::{Put, Violation};
use crate::world::{Core, LATE_MAX, Lies, full_key, tenant_of};

pub(crate) const ITEMS_MAX: u64 = 3;
pub(crate) const OBJECT_BYTES_MAX: u64 = 3_000;
const SLICE_BYTES: u64 = 700;
const REGION: RegionId = RegionId::new(0, 1);

pub(crate) struct Client {
    pub(crate) index: usize,
    /// Dropped before the memory it moves.
    pub(crate) transport: SimTransport,
    memory: Memory,
    /// Counts its lives.
    pub(crate) life: u64,
    pub(crate) clock: Clock,
    /// Stopped, as by a signal: it does nothing, and its fabric goes on.
    pub(crate) stopped: bool,
    /// It looked at its clock just before it was stopped, and acts on that now.
    stale: Option<Instant>,
    running: Running,
    get: GetOp,
    put: PutOp,
    asked: Vec<Asked>,
    began: Instant,
    segments: HashMap<SegmentNo, SegmentId>,
    transfers: HashMap<u64, Moving>,
    tokens: HashMap<Token, What>,
    next: u64,
    /// The latest call of the running operation.
    call: u64,
    /// The latest put that was read of each key, for those who lie about it.
    cache: HashMap<Vec<u8>, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Running {
    Nothing,
    Get,
    Put,
    Remove { request_id: u64, force: bool },
    Exists { request_id: u64 },
}

struct Asked {
    key: Vec<u8>,
    len: u64,
    number: u64,
    object: Option<Object>,
    generation: Option<u64>,
    /// Its commit was sent.
    ending: bool,
    recorded: Option<Id>,
}

#[derive(Clone, Copy)]
enum What {
    Slice(u64),
    Fence(SegmentNo),
}

struct Moving {
    transfer: Transfer,
    tokens: Vec<Token>,
    left: usize,
    outcome: Outcome,
    fence_needed: bool,
}

impl Client {
    pub(crate) fn new(index: usize, mut transport: SimTransport, life: u64, clock: Clock) -> Self {
        let memory = Memory::new((ITEMS_MAX * OBJECT_BYTES_MAX) as usize, 0xcc);
        // SAFETY: `memory` outlives `transport` by the order of the fields, and is only touched through volatile views.
        unsafe { transport.register(REGION, memory.span(), te_core::Access::LOCAL) }.unwrap();
        Self {
            index,
            transport,
            memory,
            life,
            clock,
            stopped: false,
            stale: None,
            running: Running::Nothing,
            get: GetOp::new(ClientConfig::default()),
            put: PutOp::new(ClientConfig::default()),
            asked: Vec::new(),
            began: Instant::ZERO,
            segments: HashMap::new(),
            transfers: HashMap::new(),
            tokens: HashMap::new(),
            next: life << 32,
            call: 0,
            cache: HashMap::new(),
        }
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
            Running::Put => self.put.poll_timeout(),
            _ => None,
        };
        due.map(|shown| self.clock.when(shown))
    }

    /// Goes on after a stop.
    pub(crate) fn resume(&mut self, stopped_at: Instant) {
        self.stopped = false;
        self.stale = Some(self.clock.shows(stopped_at));
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let now = self.clock.shows(now);
        match self.running {
            Running::Get => self.get.handle_timeout(now),
            Running::Put => self.put.handle_timeout(now),
            _ => {}
        }
    }

    /// Starts something at random.
    pub(crate) fn start(&mut self, core: &mut Core, rng: &mut Rng) {
        self.began = self.clock.shows(core.now);
        self.asked.clear();
        let dice = rng.below(100);
        let count = if dice < 85 { 1 + rng.below(ITEMS_MAX) } else { 1 };
        for _ in 0..count {
            let key = core.random_key(rng);
            if self.asked.iter().any(|asked| asked.key == key) {
                continue;
            }
            let number = core.next_put();
            let len = 1 + rng.below(OBJECT_BYTES_MAX);
            self.asked.push(Asked {
                key,
                len,
                number,
                object: None,
                generation: None,
                ending: false,
                recorded: None,
            });
        }
        if dice < 45 {
            self.running = Running::Get;
            self.record(core, |_| Ask::Get);
            let items = self.asked.iter().map(|asked| GetItem {
                key: &asked.key,
                capacity: OBJECT_BYTES_MAX,
                len_min: 1,
            });
            self.get.start(items, &[]);
        } else if dice < 85 {
            self.running = Running::Put;
            self.record(core, |asked| Ask::Put(asked.number));
            let mut items = Vec::new();
            for (slot, asked) in self.asked.iter().enumerate() {
                let bytes = content(asked.number, asked.len);
                self.memory.write(slot as u64 * OBJECT_BYTES_MAX, &bytes);
                items.push(PutItem { key: &asked.key, len: asked.len, checksum: checksum(&bytes) });
            }
            let retention = if core.scenario.retention { random_retention(rng) } else { Retention::DEFAULT };
            let replicas = 1 + rng.below(2) as u8;
            let placement = random_placement(rng);
            let options = PutOptions { replicas, placement, retention };
            self.put.start(items, PutAsk { nonce: 1 + rng.below(u32::MAX.into()) as u32, options });
        } else {
            let request_id = self.next_id();
            let mut out = Vec::new();
            let force = rng.below(2) == 0;
            let remove = dice < 94;
            self.record(core, |_| if remove { Ask::Remove { force } } else { Ask::Exists });
            let key = Key(&self.asked[0].key);
            if remove {
                Remove::encode_request(&mut out, request_id, &(), [Removal { key, force }].into_iter())
                    .unwrap();
                self.running = Running::Remove { request_id, force };
            } else {
                Exists::encode_request(&mut out, request_id, &(), [key].into_iter()).unwrap();
                self.running = Running::Exists { request_id };
            }
            core.send_call(self.index, self.life, request_id, out);
        }
    }

    /// Does what the running operation asks for; true when it has just ended.
    pub(crate) fn drive(&mut self, core: &mut Core) -> Result<bool, Violation> {
        if self.stopped {
            return Ok(false);
        }
        let now = self.stale.take().unwrap_or_else(|| self.clock.shows(core.now));
        loop {
            let mut out = Vec::new();
            let request_id = self.next_id();
            let lying = core.lies.contains(Lies::CLOCK);
            let action = match self.running {
                Running::Get => self.get.poll(if lying { self.began } else { now }, request_id, &mut out),
                Running::Put => self.put.poll(now, request_id, &mut out),
                _ => None,
            };
            match action {
                Some(Action::Call) => {
                    self.call = request_id;
                    self.note_ends(&out);
                    core.send_call(self.index, self.life, request_id, out);
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
                None => break,
            }
        }
        match self.running {
            Running::Get if self.get.is_done() => self.judge_get(core)?,
            Running::Put if self.put.is_done() => self.note_put(core),
            _ => return Ok(false),
        }
        self.running = Running::Nothing;
        Ok(true)
    }

    /// Takes completions from the fabric.
    pub(crate) fn reap(&mut self, core: &mut Core) -> bool {
        let mut done = [Completion::applied(Token(0)); 16];
        let mut any = false;
        loop {
            let count = self.transport.poll(core.now, &mut done);
            for completion in &done[..count] {
                any = true;
                match self.tokens.remove(&completion.token) {
                    Some(What::Slice(number)) => {
                        self.slice_ended(core, number, completion.outcome, completion.fence_needed)
                    }
                    Some(What::Fence(segment)) => {
                        // A target that restarted is fenced, too.
                        let restarted = |error: te_core::Error| error.kind == ErrorKind::PeerRestarted;
                        let held = completion.result.is_ok() || completion.result.is_err_and(restarted);
                        if held {
                            core.shadow.fenced(self.index, segment);
                        }
                        core.report.fences += u64::from(held);
                        self.put.handle_fence(segment, held);
                    }
                    None => panic!("a completion that nobody asked for: {completion:?}"),
                }
            }
            if count < done.len() {
                return any;
            }
        }
    }

    /// A frame from the master.
    pub(crate) fn receive(&mut self, core: &mut Core, bytes: &[u8]) -> bool {
        let (frame, _) = Frame::parse(bytes).unwrap().unwrap();
        // An answer may come late, when another operation runs.
        let current = frame.header.request_id == self.call;
        match self.running {
            Running::Get => {
                if let (true, Ok((_, objects))) = (current, Get::decode_response(&frame)) {
                    self.asked.iter_mut().zip(objects).for_each(|(asked, object)| asked.object = object.ok());
                }
                self.get.handle_response(&frame);
            }
            Running::Put => {
                if let (true, Ok((_, allocations))) = (current, PutStart::decode_response(&frame)) {
                    for (asked, allocation) in self.asked.iter_mut().zip(allocations) {
                        let Ok(allocation) = allocation else { continue };
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
                    Some(Ok(())) => Answer::Done,
                    Some(Err(ErrorCode::ObjectNotFound)) => Answer::NotFound,
                    Some(Err(ErrorCode::ObjectHasLease)) => Answer::Found,
                    Some(Err(ErrorCode::ReplicaIsNotReady)) => Answer::NotReady,
                    _ => Answer::Failed,
                };
                core.report.removes += u64::from(answer == Answer::Done);
                self.answer(core, 0, answer);
                self.running = Running::Nothing;
                return true;
            }
            Running::Exists { request_id } if request_id == frame.header.request_id => {
                let result = Exists::decode_response(&frame).ok().and_then(|(_, mut results)| results.next());
                let answer = match result {
                    Some(true) => Answer::Found,
                    Some(false) => Answer::NotFound,
                    None => Answer::Failed,
                };
                self.answer(core, 0, answer);
                self.running = Running::Nothing;
                return true;
            }
            _ => {}
        }
        false
    }

    /// A call got no answer in time.
    pub(crate) fn call_failed(&mut self, core: &mut Core, request_id: u64) -> bool {
        match self.running {
            Running::Get => self.get.handle_call_failed(request_id, ErrorCode::RpcTimeout),
            Running::Put => self.put.handle_call_failed(request_id, ErrorCode::RpcTimeout),
            Running::Remove { request_id: mine, .. } | Running::Exists { request_id: mine }
                if mine == request_id =>
            {
                if core.lies.contains(Lies::ANSWER) && matches!(self.running, Running::Remove { .. }) {
                    self.answer(core, 0, Answer::Done);
                }
                self.running = Running::Nothing;
                return true;
            }
            _ => {}
        }
        false
    }

    /// The process dies: what it has not asked to be committed never will be.
    pub(crate) fn die(&mut self, core: &mut Core) {
        if self.running == Running::Put {
            for item in 0..self.asked.len() {
                if !self.asked[item].ending {
                    self.answer(core, item, Answer::Failed);
                }
            }
        }
    }

    fn record(&mut self, core: &mut Core, ask: impl Fn(&Asked) -> Ask) {
        let many = !matches!(ask(&self.asked[0]), Ask::Remove { .. } | Ask::Exists);
        for asked in self.asked.iter_mut().take(if many { ITEMS_MAX as usize } else { 1 }) {
            let ask = ask(asked);
            asked.recorded = Some(core.history.called(
                self.index,
                &full_key(tenant_of(self.index), &asked.key),
                ask,
                core.now.as_nanos(),
            ));
        }
    }

    fn answer(&self, core: &mut Core, item: usize, answer: Answer) {
        if let Some(id) = self.asked[item].recorded {
            core.history.answered(id, answer, core.now.as_nanos());
        }
    }

    /// Which items a request commits.
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

    fn transfer(&mut self, core: &mut Core, transfer: Transfer) -> Result<(), Violation> {
        let number = self.next_id();
        let slot = u64::from(transfer.item) * OBJECT_BYTES_MAX;
        if transfer.op == Op::Write {
            let generation = self.asked[transfer.item as usize].generation.unwrap_or(0);
            let begun = core.shadow.write_begins(
                (self.index, number),
                generation,
                (transfer.segment, transfer.addr, transfer.len),
            );
            core.judge(begun)?;
        }
        let mut moving =
            Moving { transfer, tokens: Vec::new(), left: 0, outcome: Outcome::Applied, fence_needed: false };
        let Some(segment) = self.attached(core, transfer.segment) else {
            moving.outcome = Outcome::NotApplied;
            self.transfers.insert(number, moving);
            self.transfer_ended(core, number);
            return Ok(());
        };
        for at in (0..transfer.len).step_by(SLICE_BYTES as usize) {
            let token = Token(self.next_id());
            let slice = Slice {
                token,
                local: (REGION, slot + at),
                remote: (segment, transfer.addr + at),
                len: SLICE_BYTES.min(transfer.len - at) as u32,
                op: transfer.op,
            };
            match self.transport.submit(&[slice]) {
                Ok(1) => {
                    moving.tokens.push(token);
                    moving.left += 1;
                    self.tokens.insert(token, What::Slice(number));
                }
                Ok(_) | Err(_) => moving.outcome = Outcome::NotApplied,
            }
        }
        let left = moving.left;
        self.transfers.insert(number, moving);
        if left == 0 {
            self.transfer_ended(core, number);
        }
        Ok(())
    }

    fn slice_ended(&mut self, core: &mut Core, number: u64, outcome: Outcome, fence_needed: bool) {
        let Some(moving) = self.transfers.get_mut(&number) else { return };
        moving.outcome = match (moving.outcome, outcome) {
            (Outcome::Unknown, _) | (_, Outcome::Unknown) => Outcome::Unknown,
            (Outcome::NotApplied, _) | (_, Outcome::NotApplied) => Outcome::NotApplied,
            _ => Outcome::Applied,
        };
        moving.fence_needed |= fence_needed;
        moving.left -= 1;
        if moving.left == 0 {
            self.transfer_ended(core, number);
        }
    }

    fn transfer_ended(&mut self, core: &mut Core, number: u64) {
        let Some(moving) = self.transfers.remove(&number) else { return };
        let Transfer { id, item, len, op, .. } = moving.transfer;
        let mut end = TransferEnd {
            outcome: moving.outcome,
            fence_needed: moving.fence_needed,
            ..TransferEnd::read(0)
        };
        if op == Op::Write {
            let loose = end.fence_needed || end.outcome == Outcome::Unknown;
            core.report.unknown_writes += u64::from(loose);
            core.shadow.write_ends((self.index, number), loose.then(|| core.now + LATE_MAX));
            if core.lies.contains(Lies::OUTCOME) && loose {
                end = TransferEnd::written();
            }
            self.put.handle_transfer(id, end);
            return;
        }
        if end.outcome == Outcome::Applied {
            end.checksum = checksum(&self.memory.read(u64::from(item) * OBJECT_BYTES_MAX, len));
        }
        let object = self.asked[item as usize].object;
        if let Some(object) = object.filter(|_| core.lies.contains(Lies::CHECKSUM)) {
            end.checksum = object.checksum;
        }
        self.get.handle_transfer(
            if core.lies.contains(Lies::CLOCK) { self.began } else { self.clock.shows(core.now) },
            id,
            end,
        );
    }

    fn fence(&mut self, core: &mut Core, segment: SegmentNo) {
        if core.lies.contains(Lies::FENCE) {
            return self.put.handle_fence(segment, true);
        }
        let token = Token(self.next_id());
        match self.segments.get(&segment).map(|id| self.transport.fence(token, *id)) {
            Some(Ok(())) => drop(self.tokens.insert(token, What::Fence(segment))),
            _ => self.put.handle_fence(segment, false),
        }
    }

    fn attached(&mut self, core: &Core, segment: SegmentNo) -> Option<SegmentId> {
        if let Some(id) = self.segments.get(&segment) {
            return Some(*id);
        }
        let info = core.master.segment(segment)?;
        let blob = core.directory.get(&(info.name.to_owned(), info.incarnation))?;
        let id = SegmentId::new(segment, 1);
        self.transport.attach(id, blob).ok()?;
        self.segments.insert(segment, id);
        Some(id)
    }

    fn judge_get(&mut self, core: &mut Core) -> Result<(), Violation> {
        core.report.mismatches += u64::from(self.get.mismatches());
        for (item, asked) in self.asked.iter().enumerate() {
            core.report.gets += 1;
            let fetched = match self.get.result(item) {
                Some(Ok(fetched)) => fetched,
                Some(Err(error)) => {
                    core.report.lease_expired += u64::from(error == ErrorCode::LeaseExpired);
                    let nothing = [ErrorCode::ObjectNotFound, ErrorCode::ReplicaIsNotReady].contains(&error);
                    core.report.failed_reads += u64::from(!nothing);
                    self.answer(core, item, if nothing { Answer::NotFound } else { Answer::Failed });
                    continue;
                }
                None => return Err(Violation::Stuck(self.describe())),
            };
            core.report.hits += 1;
            let key = Key(&asked.key);
            let Some(put) = core.shadow.puts.get(&fetched.generation) else {
                return Err(Violation::WrongBytes(format!(
                    "{key}: generation {:#x} was never given",
                    fetched.generation
                )));
            };
            let bytes = self.memory.read(item as u64 * OBJECT_BYTES_MAX, fetched.len);
            if put.key != full_key(tenant_of(self.index), &asked.key) || bytes != content(put.number, put.len)
            {
                return Err(Violation::WrongBytes(format!(
                    "{key}: not the bytes of {:#x} at {:?}",
                    fetched.generation, core.now
                )));
            }
            let fresh = put.number;
            let number = match self.cache.insert(asked.key.clone(), fresh) {
                Some(known) if core.lies.contains(Lies::CACHE) => known,
                _ => fresh,
            };
            self.answer(core, item, Answer::Object(Some(number)));
        }
        Ok(())
    }

    fn note_put(&mut self, core: &mut Core) {
        for (item, asked) in self.asked.iter().enumerate() {
            match self.put.result(item) {
                Some(Ok(_)) => {
                    core.report.puts += 1;
                    self.answer(core, item, Answer::Done);
                }
                Some(Err(_)) if core.lies.contains(Lies::ANSWER) && asked.generation.is_some() => {
                    self.answer(core, item, Answer::Done);
                }
                Some(Err(_)) => {
                    core.report.failed_puts += 1;
                    // Once its commit was sent, it may have been done, or will be.
                    if !asked.ending {
                        self.answer(core, item, Answer::Failed);
                    }
                }
                None => {}
            }
        }
    }

    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// Wishes of all kinds, of segments and nodes that are there and others.
fn random_placement(rng: &mut Rng) -> Placement {
    let mut placement = Placement { distinct_nodes: rng.below(4) == 0, ..Placement::ANY };
    match rng.below(8) {
        0 => placement.near = Some(rng.below(4)),
        1 => placement = Placement::on(rng.below(8) as u32),
        2 => placement.excluded.push(rng.below(8) as u32).unwrap(),
        _ => {}
    }
    placement
}

/// Mostly none; else a pin, a time to live, a group, or several of them.
fn random_retention(rng: &mut Rng) -> Retention {
    let one_in = |rng: &mut Rng, n: u64| rng.below(n) == 0;
    let pin = match rng.below(32) {
        0 => Pin::Hard,
        1..5 => Pin::Soft,
        _ => Pin::None,
    };
    let ttl_ms = one_in(rng, 8).then(|| 1 + rng.below(10_000) as u32);
    let group = one_in(rng, 6).then(|| rng.below(4));
    Retention { pin, ttl_ms, group }
}
