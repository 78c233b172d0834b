//! A simulated client: the shell around `GetOp` and `PutOp`, with what can go wrong in one.

use std::collections::HashMap;

use store_core::client::{Action, ClientConfig, GetItem, GetOp, PutItem, PutOp, Transfer, TransferEnd};
use store_core::message::{
    Exists, Get, Object, Operation, Pin, PutAsk, PutOptions, PutStart, Removal, Remove, Retention,
};
use store_core::{ErrorCode, Frame, Key, SegmentNo};
use te_core::sim::{Rng, SimTransport};
use te_core::{
    Completion, ErrorKind, Instant, Memory as _, Op, Outcome, RegionId, SegmentId, Slice, Token, Transport,
};

use crate::memory::{Memory, checksum, content};
use crate::shadow::{Put, Violation};
use crate::world::{Core, LATE_MAX, Lies};

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
    floor: u64,
    len: u64,
    number: u64,
    object: Option<Object>,
    generation: Option<u64>,
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
    pub(crate) fn new(index: usize, mut transport: SimTransport, life: u64) -> Self {
        let memory = Memory::new((ITEMS_MAX * OBJECT_BYTES_MAX) as usize, 0xcc);
        // SAFETY: `memory` outlives `transport` by the order of the fields, and is only touched through volatile views.
        unsafe { transport.register(REGION, memory.span(), te_core::Access::LOCAL) }.unwrap();
        Self {
            index,
            transport,
            memory,
            life,
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
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.running == Running::Nothing
    }

    pub(crate) fn describe(&self) -> String {
        format!("client {} {:?} since {:?}", self.index, self.running, self.began)
    }

    pub(crate) fn poll_timeout(&self, lies: Lies) -> Option<Instant> {
        match self.running {
            Running::Get if !lies.contains(Lies::CLOCK) => self.get.poll_timeout(),
            Running::Put => self.put.poll_timeout(),
            _ => None,
        }
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        match self.running {
            Running::Get => self.get.handle_timeout(now),
            Running::Put => self.put.handle_timeout(now),
            _ => {}
        }
    }

    /// Starts something at random.
    pub(crate) fn start(&mut self, core: &mut Core, rng: &mut Rng) {
        self.began = core.now;
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
            let floor = core.shadow.floor(&key);
            self.asked.push(Asked { key, floor, len, number, object: None, generation: None });
        }
        if dice < 45 {
            self.running = Running::Get;
            let items = self.asked.iter().map(|asked| GetItem {
                key: &asked.key,
                capacity: OBJECT_BYTES_MAX,
                len_min: 1,
            });
            self.get.start(items, &[]);
        } else if dice < 85 {
            self.running = Running::Put;
            let mut items = Vec::new();
            for (slot, asked) in self.asked.iter().enumerate() {
                let bytes = content(asked.number, asked.len);
                self.memory.write(slot as u64 * OBJECT_BYTES_MAX, &bytes);
                items.push(PutItem { key: &asked.key, len: asked.len, checksum: checksum(&bytes) });
            }
            let retention = if core.scenario.retention { random_retention(rng) } else { Retention::DEFAULT };
            let replicas = 1 + rng.below(2) as u8;
            let options = PutOptions { replicas, retention, ..PutOptions::DEFAULT };
            self.put.start(items, PutAsk { nonce: 1 + rng.below(u32::MAX.into()) as u32, options });
        } else {
            let request_id = self.next_id();
            let mut out = Vec::new();
            let key = Key(&self.asked[0].key);
            if dice < 94 {
                let force = rng.below(2) == 0;
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
        loop {
            let mut out = Vec::new();
            let request_id = self.next_id();
            let lying = core.lies.contains(Lies::CLOCK);
            let action = match self.running {
                Running::Get => {
                    self.get.poll(if lying { self.began } else { core.now }, request_id, &mut out)
                }
                Running::Put => self.put.poll(core.now, request_id, &mut out),
                _ => None,
            };
            match action {
                Some(Action::Call) => {
                    self.call = request_id;
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
                        let put = Put { key: asked.key.clone(), number: asked.number, len: asked.len };
                        core.shadow.puts.insert(allocation.generation, put);
                    }
                }
                self.put.handle_response(core.now, &frame);
            }
            Running::Remove { request_id, .. } if request_id == frame.header.request_id => {
                if let Ok((_, mut results)) = Remove::decode_response(&frame)
                    && results.next() == Some(Ok(()))
                {
                    core.report.removes += 1;
                    let removed = core.removed.get(&(self.index, request_id)).copied().unwrap_or(0);
                    core.shadow.raise_floor(&self.asked[0].key, removed + 1);
                }
                self.running = Running::Nothing;
                return true;
            }
            Running::Exists { request_id } if request_id == frame.header.request_id => {
                self.running = Running::Nothing;
                return true;
            }
            _ => {}
        }
        false
    }

    /// A call got no answer in time.
    pub(crate) fn call_failed(&mut self, request_id: u64) -> bool {
        match self.running {
            Running::Get => self.get.handle_call_failed(request_id, ErrorCode::RpcTimeout),
            Running::Put => self.put.handle_call_failed(request_id, ErrorCode::RpcTimeout),
            Running::Remove { request_id: mine, .. } | Running::Exists { request_id: mine }
                if mine == request_id =>
            {
                self.running = Running::Nothing;
                return true;
            }
            _ => {}
        }
        false
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
            if core.lies.contains(Lies::CLOCK) { self.began } else { core.now },
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
                    core.report.failed_reads += u64::from(error != ErrorCode::ObjectNotFound);
                    core.report.lost += u64::from(asked.floor > 0 && error == ErrorCode::ObjectNotFound);
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
            if put.key != asked.key || bytes != content(put.number, put.len) {
                return Err(Violation::WrongBytes(format!(
                    "{key}: not the bytes of {:#x} at {:?}",
                    fetched.generation, core.now
                )));
            }
            if fetched.generation < asked.floor {
                return Err(Violation::Stale(format!(
                    "{key}: {:#x} below {:#x}",
                    fetched.generation, asked.floor
                )));
            }
        }
        Ok(())
    }

    fn note_put(&mut self, core: &mut Core) {
        for (item, asked) in self.asked.iter().enumerate() {
            match self.put.result(item) {
                Some(Ok(generation)) => {
                    core.report.puts += 1;
                    core.shadow.raise_floor(&asked.key, generation);
                }
                Some(Err(_)) => core.report.failed_puts += 1,
                None => {}
            }
        }
    }

    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
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
