//! Clients that put, read and remove objects, and the node whose memory they use. No byte is moved here: what
//! counts is where the master says that bytes are.

use std::collections::HashMap;
use std::time::Duration;

use store_core::chunks::stored_len;
use store_core::message::{
    Commit, DiskCopy, Existing, Get, LeaseWanted, NewObject, Operation, Pin, Prefetch, PutEnd, PutOptions,
    PutRequest, PutStart, Removal, Remove, Replica, Retention,
};
use store_core::{ErrorCode, Frame, Key, Kind, SegmentNo, bound};
use te_core::Instant;

use crate::checker::{Id, PutId, Request, Response};
use crate::nodes::LEN;
use crate::report::Violation;
use crate::world::{CLIENTS, Event, MEMBERS, World};

const KEYS: u64 = 20;
const KEYS_ON_DISKS: u64 = 60;
/// A request that has no answer by then is repeated at another member.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, Debug)]
enum Phase {
    Start,
    End { generation: u64, handle: u64 },
    Get,
    Remove,
}

#[derive(Clone, Debug)]
struct Op {
    key: Vec<u8>,
    len: u64,
    options: PutOptions,
    /// The lineage when it began.
    lineage: u64,
    phase: Phase,
    id: Id,
    put: PutId,
    nonce: u32,
    /// The request of this phase was sent before, and may have been carried out then.
    repeated: bool,
    /// The latest request was not carried out, because the member does not lead.
    refused: bool,
    sent: Instant,
    began: Instant,
}

impl Op {
    const fn is_get(&self) -> bool {
        matches!(self.phase, Phase::Get)
    }
}

#[derive(Debug)]
pub(crate) struct Client {
    index: usize,
    op: Option<Op>,
    member: usize,
    connection: u64,
    /// The number of the latest request.
    call: u64,
    /// Puts by generation.
    puts: HashMap<u64, PutId>,
}

impl Client {
    pub(crate) fn new(index: usize) -> Self {
        Self { index, op: None, member: index % MEMBERS, connection: 0, call: 0, puts: HashMap::new() }
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.op.is_none()
    }

    pub(crate) fn describe(&self) -> String {
        format!("{self:?}")
    }

    fn request(&self, op: &Op) -> Vec<u8> {
        let mut out = Vec::new();
        let (key, call) = (Key(&op.key), self.call);
        match op.phase {
            Phase::Start => {
                let head = PutRequest { nonce: op.nonce, options: op.options, writer: self.index as u64 + 1 };
                let item = NewObject { key, len: op.len };
                PutStart::encode_request(&mut out, call, &head, [item].into_iter()).unwrap();
            }
            Phase::End { generation, handle } => {
                let checksum = bound(generation as u32, &op.key, generation);
                let item = Commit { key, generation, handle, checksum };
                PutEnd::encode_request(&mut out, call, &(), [item].into_iter()).unwrap();
            }
            Phase::Get => {
                // Every third one is long.
                let wanted = if call % 3 == 0 { LeaseWanted::Lasting } else { LeaseWanted::Quick };
                Get::encode_request(&mut out, call, &wanted, [key].into_iter()).unwrap();
            }
            Phase::Remove => {
                let item = Removal { key, force: true };
                Remove::encode_request(&mut out, call, &(), [item].into_iter()).unwrap();
            }
        }
        out
    }
}

/// What a put request came to.
enum Ended {
    Done(Response),
    Goes(Phase),
}

impl World {
    pub(crate) fn wake(&mut self, client: usize, call: u64) -> Result<(), Violation> {
        let this = &mut self.clients[client];
        if this.call != call {
            return Ok(());
        }
        if this.op.is_some() {
            // No answer: another member may lead.
            self.move_on(client);
            return Ok(());
        }
        if self.now >= self.phase_end(2) {
            return Ok(());
        }
        // Some keys are requested more often than others.
        let key = if self.has_disks {
            let few = if self.rng.below(2) == 0 { 12 } else { KEYS_ON_DISKS };
            // Disks keep the objects of an earlier lineage, and not removals that they had not confirmed.
            format!("key-{}-{}", self.lineage, self.rng.below(few)).into_bytes()
        } else {
            let few = if self.rng.below(2) == 0 { 3 } else { KEYS };
            format!("key-{}", self.rng.below(few)).into_bytes()
        };
        self.keys.insert(key.clone());
        let put = self.number();
        let (phase, request) = match self.rng.below(20) {
            // What is evicted is not there any more, though no client has removed it.
            0..7 if self.has_disks => (Phase::Start, Request::Upsert(put)),
            0..7 => (Phase::Start, Request::Put(put)),
            7..16 => (Phase::Get, Request::Get),
            _ => (Phase::Remove, Request::Remove { force: true }),
        };
        if request != Request::Get {
            self.settled.remove(&key);
        }
        if self.has_disks && self.rng.below(8) == 0 {
            self.prefetch(client, &key);
        }
        let id = self.history.called(client, &key, request, self.now.as_nanos());
        let (len, nonce) = (1 + self.rng.below(3_000), 1 + self.rng.below(u64::from(u32::MAX)) as u32);
        let (sent, lineage) = (self.now, self.lineage);
        let len = if self.has_disks { LEN } else { len };
        let options = self.put_options();
        self.clients[client].op = Some(Op {
            key,
            len,
            options,
            lineage,
            phase,
            id,
            put,
            nonce,
            repeated: false,
            refused: false,
            sent,
            began: sent,
        });
        self.send_request(client);
        Ok(())
    }

    /// Asks for an object to be in memory. No client waits for the answer, which comes on a connection of its
    /// own.
    fn prefetch(&mut self, client: usize, key: &[u8]) {
        let (number, connection, member) = (self.number(), self.number(), self.clients[client].member);
        let mut bytes = Vec::new();
        Prefetch::encode_request(&mut bytes, number, &(), [Key(key)].into_iter()).unwrap();
        self.report.prefetches += 1;
        self.call(client, member, connection, bytes);
    }

    fn put_options(&mut self) -> PutOptions {
        if self.has_disks {
            let replaces = self.rng.below(3) == 0;
            let existing = if replaces { Existing::REPLACE } else { Existing::Keep };
            let disk = [DiskCopy::Auto, DiskCopy::Auto, DiskCopy::Now, DiskCopy::Never][self.rng.index(4)];
            let retention = Retention { disk, ..Retention::DEFAULT };
            return PutOptions { existing, retention, ..PutOptions::DEFAULT };
        }
        // Nothing is evicted: an object that is gone was removed, or lost.
        let retention = Retention { pin: Pin::Hard, ..Retention::DEFAULT };
        PutOptions { retention, ..PutOptions::DEFAULT }
    }

    /// Sends the request of the current phase.
    fn send_request(&mut self, client: usize) {
        let number = self.number();
        let now = self.now;
        let this = &mut self.clients[client];
        this.call = number;
        let Some(op) = &mut this.op else { return };
        (op.sent, op.refused) = (now, false);
        let op = op.clone();
        let bytes = this.request(&op);
        let (member, connection) = (this.member, this.connection);
        self.call(client, member, connection, bytes);
        self.after(CALL_TIMEOUT, Event::Wake { client, call: number });
    }

    /// Asks another member, over a new connection.
    fn move_on(&mut self, client: usize) {
        self.report.repeated += 1;
        let connection = self.number();
        let this = &mut self.clients[client];
        let (member, old) = (this.member, this.connection);
        this.member = (this.member + 1) % MEMBERS;
        this.connection = connection;
        if let Some(op) = &mut this.op {
            op.repeated |= !op.refused;
            if let (Phase::Remove, false) = (op.phase, op.refused) {
                // A second try could remove another object.
                self.history.answered(op.id, Response::NotKnown, self.now.as_nanos());
                self.doubts.insert(op.key.clone(), self.now);
                this.op = None;
            }
        }
        self.hang_up(member, client, old);
        if self.clients[client].op.is_some() {
            self.send_request(client);
        } else {
            let call = self.clients[client].call;
            let pause = self.us(100, 60_000);
            self.after(pause, Event::Wake { client, call });
        }
    }

    pub(crate) fn answer(
        &mut self,
        client: usize,
        connection: u64,
        bytes: Option<Vec<u8>>,
    ) -> Result<(), Violation> {
        if client >= CLIENTS + self.nodes.len() {
            return self.pool_answered(client - CLIENTS - self.nodes.len(), connection, bytes);
        }
        if client >= CLIENTS {
            return self.node_answered(client - CLIENTS, connection, bytes);
        }
        let this = &self.clients[client];
        if this.connection != connection || this.op.is_none() {
            return Ok(());
        }
        let Some(bytes) = bytes else {
            // Not the leader: another member is asked.
            let call = this.call;
            self.clients[client].op.as_mut().unwrap().refused = true;
            let pause = self.us(1_000, 20_000);
            self.after(pause, Event::Wake { client, call });
            return Ok(());
        };
        let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
        if frame.header.request_id != this.call {
            return Ok(());
        }
        let op = this.op.clone().unwrap();
        match self.ended(client, &op, &frame)? {
            Ended::Goes(phase) => {
                let op = self.clients[client].op.as_mut().unwrap();
                (op.phase, op.repeated) = (phase, false);
                self.send_request(client);
            }
            Ended::Done(response) => {
                self.history.answered(op.id, response, self.now.as_nanos());
                if response == Response::NotKnown {
                    self.doubts.insert(op.key.clone(), self.now);
                }
                let this = &mut self.clients[client];
                this.op = None;
                let call = this.call;
                let pause = self.us(100, 60_000);
                self.after(pause, Event::Wake { client, call });
            }
        }
        Ok(())
    }

    fn ended(&mut self, client: usize, op: &Op, frame: &Frame<'_>) -> Result<Ended, Violation> {
        Ok(match op.phase {
            Phase::Start => {
                let answer = PutStart::decode_response(frame).map(|(_, mut answers)| answers.next().unwrap());
                match answer {
                    Ok(Ok(allocation)) => {
                        let generation = allocation.generation;
                        self.clients[client].puts.insert(generation, op.put);
                        self.history.started(op.put, generation);
                        let replica = allocation.replicas[0];
                        self.memory.insert((replica.segment, replica.addr), generation);
                        Ended::Goes(Phase::End { generation, handle: allocation.handle })
                    }
                    // It was not started; or it was, and another master does not know it: it never ends.
                    _ => Ended::Done(Response::Failed),
                }
            }
            Phase::End { generation, .. } => {
                let answer = PutEnd::decode_response(frame).map(|(_, mut answers)| answers.next().unwrap());
                match answer {
                    Ok(Ok(())) => {
                        self.report.puts += 1;
                        self.settles(client, op, generation);
                        Ended::Done(Response::Done)
                    }
                    // It may have ended at the first try, and been removed since.
                    _ if op.repeated => Ended::Done(Response::NotKnown),
                    _ => Ended::Done(Response::Failed),
                }
            }
            Phase::Get => {
                let answer = Get::decode_response(frame).map(|(_, mut answers)| answers.next().unwrap());
                match answer {
                    // The disks of an earlier lineage have other numbers.
                    Ok(Ok(_)) if self.has_disks && op.lineage != self.lineage => {
                        Ended::Done(Response::Failed)
                    }
                    Ok(Ok(object)) if self.read(&op.key, &object)?.is_none() => Ended::Done(Response::Failed),
                    Ok(Ok(object)) => {
                        self.report.hits += 1;
                        let put = self.clients.iter().find_map(|c| c.puts.get(&object.generation).copied());
                        Ended::Done(Response::Object(put))
                    }
                    Ok(Err(ErrorCode::ObjectNotFound)) => {
                        self.report.misses += 1;
                        Ended::Done(if self.has_disks { Response::Failed } else { Response::NotFound })
                    }
                    _ => Ended::Done(Response::Failed),
                }
            }
            Phase::Remove => {
                let answer = Remove::decode_response(frame).map(|(_, mut answers)| answers.next().unwrap());
                match answer {
                    Ok(Ok(())) => {
                        self.report.removes += 1;
                        Ended::Done(Response::Done)
                    }
                    Ok(Err(ErrorCode::KeyNotFound)) => Ended::Done(Response::NotFound),
                    _ => Ended::Done(Response::NotKnown),
                }
            }
        })
    }

    /// The key has this object, until something else is asked for; unless another client changes it now,
    /// or it is not known what became of a change.
    fn settles(&mut self, client: usize, op: &Op, generation: u64) {
        let changes = |other: &Client| {
            other.index != client && other.op.as_ref().is_some_and(|it| it.key == op.key && !it.is_get())
        };
        let doubtful = self.doubts.get(&op.key).is_some_and(|at| op.began < *at + Duration::from_secs(5));
        if !self.clients.iter().any(changes) && !doubtful {
            self.settled.insert(op.key.clone(), generation);
        }
    }

    /// What a leader gives out must be free, and what it says where an object is may be read from then on.
    pub(crate) fn check_space(
        &mut self,
        client: usize,
        connection: u64,
        answer: &[u8],
    ) -> Result<(), Violation> {
        let (frame, _) = Frame::parse(answer).unwrap().unwrap();
        let now = self.now;
        self.leases.retain(|(.., until)| now < *until);
        // No client takes an answer on a connection that was given up.
        let client = self.clients.get(client).filter(|client| client.connection == connection);
        let Some(op) = client.and_then(|client| client.op.as_ref()) else { return Ok(()) };
        if frame.header.kind == Kind::PutStart as u8
            && let Ok((_, mut answers)) = PutStart::decode_response(&frame)
            && let Some(Ok(allocation)) = answers.next()
        {
            let Replica { segment, addr: start, .. } = allocation.replicas[0];
            let len = stored_len(op.len);
            let overlaps = |(on, at, of, _): &&(SegmentNo, u64, u64, Instant)| {
                *on == segment && *at < start + len && start < at + of
            };
            if let Some(leased) = self.leases.iter().find(overlaps) {
                let text = format!("{start}, {len} bytes, at {now:?}: {leased:?}");
                return Err(Violation::GivenWhileLeased(text));
            }
        }
        if frame.header.kind == Kind::Get as u8
            && let Ok((lease, mut answers)) = Get::decode_response(&frame)
            && let Some(Ok(object)) = answers.next()
        {
            // A reader counts from when it sent the request.
            let until = op.sent + Duration::from_millis(lease.lease_ms.into());
            let Replica { segment, addr, .. } = object.replicas[0];
            if !self.disks.contains_key(&segment) {
                self.leases.push((segment, addr, stored_len(object.len), until));
            }
        }
        Ok(())
    }
}
