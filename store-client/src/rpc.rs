//! A connection to the master: blocking calls and pipelines, with timeouts and reconnection.
//!
//! ```text
//!   call::<Get>(…)                          one question, its answer, retried
//!   queue::<Exists>(…)… flush() recv()…     many questions under way; answers carry the request's id
//! ```
//!
//! # What is retried
//! A call whose answer was lost is sent again, once reconnected: doing any of them twice does no harm. Why not is said with
//! the messages, in [`store_core::message`].

mod address;
mod stream;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use store_core::message::{Greeting, Hello, LeaseRange, Operation, ReturnLeases, Welcome};
use store_core::wire::{HEADER_BYTES, VERSION};
use store_core::{
    CHALLENGE_BYTES, DEFAULT_TENANT, ErrorCode, Frame, Items, Key, Role, Secret, Trace, WireError, prove,
};
use te_host::Spin;
use te_host::fork::Mark;

pub use address::Address;

use crate::error::RpcError;
use stream::Stream;

const READ_BYTES: usize = 64 << 10;
/// Questions that wait to be written, bytes, before `queue` writes by itself.
const QUEUE_BYTES_MAX: usize = 256 << 10;
/// Batches of leases that wait to be given back.
const RETURNS_MAX: usize = 64;
/// So many leases are given back together by gets, at least.
const RETURNED_MIN: u32 = 8;
const BACKOFF_MIN: Duration = Duration::from_millis(2);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// The times that a connection takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RpcConfig {
    /// How long an answer may take, milliseconds. Default 5,000.
    pub call_ms_max: u32,
    /// How long connecting may take, greeting included, milliseconds. Default 2,000.
    pub connect_ms_max: u32,
    /// How long a call waits for a master that is away, trying again and again, milliseconds. Default 1,000.
    pub reconnect_ms_max: u32,
    /// How long a caller spins before it sleeps in the kernel, microseconds. Default 50.
    pub spin_us: u32,
}

impl Default for RpcConfig {
    fn default() -> Self {
        Self { call_ms_max: 5_000, connect_ms_max: 2_000, reconnect_ms_max: 1_000, spin_us: 50 }
    }
}

/// Who connects, to a master that has tenants. The default is the default tenant, without a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Identity {
    /// Whose objects the connection is about, 1 to 64 bytes; empty: nobody's, which is enough for a node.
    pub tenant: String,
    /// The tenant's secret, if it has one.
    pub secret: Secret,
    /// The admin's secret: whoever administers a master that has one needs it. It does for a node, too.
    pub admin: Secret,
    /// The secret that nodes, and the other servers of a cluster, share with their master and with each other. Nodes need it, or
    /// the admin's, when the master has either; and clients need it to reach nodes that have it.
    pub cluster: Secret,
}

impl Identity {
    fn has_secrets(&self) -> bool {
        self.secret.is_set() || self.admin.is_set() || self.cluster.is_set()
    }

    /// As engines want it.
    pub(crate) fn cluster_secret(&self) -> te_engine::Secret {
        te_engine::Secret::new(self.cluster.bytes())
    }
}

impl Default for Identity {
    fn default() -> Self {
        let none = Secret::default;
        Self { tenant: DEFAULT_TENANT.to_owned(), secret: none(), admin: none(), cluster: none() }
    }
}

/// A connection to a master. See the module.
#[derive(Debug)]
pub struct RpcConnection {
    address: Address,
    config: RpcConfig,
    identity: Identity,
    stream: Option<Stream>,
    welcome: Welcome,
    input: Input,
    out: Vec<u8>,
    written: usize,
    id: u64,
    connects_total: u64,
    backoff: Duration,
    spin: Spin,
    /// Leases of this connection that nobody needs any more: given back in front of the next request.
    returns: Vec<LeaseRange>,
    /// How many those are.
    returned: u32,
    mark: Mark,
}

/// What has arrived and is not yet consumed.
#[derive(Debug, Default)]
struct Input {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl RpcConnection {
    /// Connects and greets as the default tenant.
    ///
    /// # Errors
    /// Nobody there, or not a master of this release.
    pub fn connect(address: Address, config: RpcConfig) -> Result<Self, RpcError> {
        Self::connect_as(address, config, Identity::default())
    }

    /// Connects and greets.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and `Tenant` when the master will not have this tenant.
    pub fn connect_as(address: Address, config: RpcConfig, identity: Identity) -> Result<Self, RpcError> {
        let mut this = Self {
            address,
            config,
            identity,
            stream: None,
            welcome: Welcome {
                version: 0,
                epoch: 0,
                keys_per_batch_max: 0,
                key_bytes_max: 0,
                replicas_max: 0,
                lease_ms: 0,
                node_ttl_ms: 0,
                challenge: [0; CHALLENGE_BYTES],
            },
            input: Input::default(),
            out: Vec::new(),
            written: 0,
            id: Trace::random(RandomState::new().build_hasher().finish()).base(),
            connects_total: 0,
            backoff: BACKOFF_MIN,
            spin: Spin::new(Duration::from_micros(config.spin_us.into())),
            returns: Vec::new(),
            returned: 0,
            mark: Mark::new(),
        };
        this.dial()?;
        Ok(this)
    }

    /// Who is at the other end, as it introduced itself when last connected. A new `epoch` is a master that has forgotten
    /// everything.
    #[must_use]
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The master's address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// How often a connection was made; more than 1: it was lost in between.
    #[must_use]
    pub fn connects_total(&self) -> u64 {
        self.connects_total
    }

    /// Begins an operation: requests carry its number from here on, and the master's logs show it.
    pub fn begin_trace(&mut self) -> Trace {
        self.id = self.trace().next().base();
        self.trace()
    }

    /// The number of the operation that requests belong to now.
    #[must_use]
    pub fn trace(&self) -> Trace {
        Trace::of(self.id)
    }

    /// Asks and waits for the answer; reconnects, and asks again (see the module).
    ///
    /// Answers to what was [`queue`](Self::queue)d before and not received are dropped.
    ///
    /// # Errors
    /// `Refused` when the master answered with an error; else why there is no answer.
    pub fn call<'a, O: Operation>(
        &mut self,
        ask: &O::Ask<'_>,
        items: impl ExactSizeIterator<Item = O::AskItem<'a>> + Clone,
    ) -> Result<(O::Answer<'_>, Items<'_, O::AnswerItem<'_>>), RpcError> {
        let mut tries_left = 3;
        let len = loop {
            tries_left -= 1;
            let fresh = self.ensure_connected()?;
            let attempt = self.queue::<O>(ask, items.clone()).and_then(|id| {
                self.flush()?;
                let deadline = self.call_deadline();
                self.wait_for(id, deadline)
            });
            match attempt {
                Ok(len) => break len,
                // A connection that idled may be found dead only now; a request that never left is sent again, too.
                Err(error) if error.is_lost() => {
                    self.disconnect();
                    if tries_left == 0 || fresh && tries_left < 2 {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        };
        let frame = self.input.take(len).ok_or(RpcError::Wire(WireError::Body))?;
        O::decode_response(&frame).map_err(RpcError::Refused)
    }

    /// Appends a request to those that go out with the next [`flush`](Self::flush) or [`recv`](Self::recv); gives its id.
    ///
    /// # Errors
    /// It is too large, or the connection is gone.
    pub fn queue<'a, O: Operation>(
        &mut self,
        ask: &O::Ask<'_>,
        items: impl ExactSizeIterator<Item = O::AskItem<'a>>,
    ) -> Result<u64, RpcError> {
        let (id, out) = self.queue_raw();
        O::encode_request(out, id, ask, items).map_err(RpcError::Wire)?;
        if self.out.len() - self.written > QUEUE_BYTES_MAX {
            self.flush()?;
        }
        Ok(id)
    }

    /// A fresh id, and the buffer to append a request with it to. For state machines that encode by themselves. Leases that were
    /// [given back](Self::return_leases) go in front of it.
    pub fn queue_raw(&mut self) -> (u64, &mut Vec<u8>) {
        if self.returned > 0 && self.stream.is_some() {
            let id = self.next_id();
            self.returned = 0;
            // A handful of numbers always fits a frame.
            let _ = ReturnLeases::encode_request(&mut self.out, id, &(), self.returns.drain(..));
        }
        (self.next_id(), &mut self.out)
    }

    /// The same for a get. It goes alone as long as few leases are to be given back: for one after each small get, the master
    /// would work half as much again.
    pub(crate) fn queue_get(&mut self) -> (u64, &mut Vec<u8>) {
        if self.returned >= RETURNED_MIN { self.queue_raw() } else { (self.next_id(), &mut self.out) }
    }

    /// Gives leases back that this connection was granted, in front of its next request or when it is dropped; a client's gets take
    /// eight or more together. Their objects may be evicted or removed from then on. Call it when nothing reads there any more.
    /// Those of a connection that is lost run out.
    pub fn return_leases(&mut self, leases: LeaseRange) {
        if self.stream.is_none() {
            return;
        }
        let room = self.returns.len() < RETURNS_MAX;
        match self.returns.last_mut() {
            Some(last) if last.first + u64::from(last.count) == leases.first => last.count += leases.count,
            _ if room => self.returns.push(leases),
            // What does not fit runs out by itself.
            _ => return,
        }
        self.returned += leases.count;
    }

    fn next_id(&mut self) -> u64 {
        self.id = self.id.wrapping_add(1).max(1);
        self.id
    }

    /// Writes what is queued.
    ///
    /// # Errors
    /// The connection is gone, or the master reads nothing for `call_ms_max`.
    pub fn flush(&mut self) -> Result<(), RpcError> {
        if self.written == self.out.len() {
            return Ok(());
        }
        self.check_process()?;
        let deadline = self.call_deadline();
        let stream = self.stream.as_mut().ok_or(RpcError::Disconnected)?;
        while self.written < self.out.len() {
            match stream.write_some(&self.out[self.written..]) {
                Ok(0) => return Err(lost(ErrorKind::WriteZero.into())),
                Ok(len) => self.written += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // The master does not read because we do not: take its answers meanwhile.
                    let room = self.input.room(READ_BYTES);
                    match stream.read_some(room) {
                        Ok(0) => return Err(lost(ErrorKind::UnexpectedEof.into())),
                        Ok(len) => self.input.end += len,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
                        Err(error) => return Err(lost(error)),
                    }
                    if Instant::now() >= deadline {
                        return Err(self.timed_out());
                    }
                }
                Err(error) => return Err(lost(error)),
            }
        }
        self.out.clear();
        self.written = 0;
        Ok(())
    }

    /// The next answer, whichever request it belongs to; writes what is queued first.
    ///
    /// # Errors
    /// `TimedOut` after `call_ms_max`; the connection is gone; the stream makes no sense.
    pub fn recv(&mut self) -> Result<Frame<'_>, RpcError> {
        self.flush()?;
        let deadline = self.call_deadline();
        let len = self.wait_frame(deadline)?;
        self.input.take(len).ok_or(RpcError::Wire(WireError::Body))
    }

    /// An answer that is here, or can be had without waiting.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), but for the timeout.
    pub fn try_recv(&mut self) -> Result<Option<Frame<'_>>, RpcError> {
        let len = match self.input.frame_len()? {
            Some(len) => len,
            None => {
                if !self.fill_once()? {
                    return Ok(None);
                }
                match self.input.frame_len()? {
                    Some(len) => len,
                    None => return Ok(None),
                }
            }
        };
        Ok(self.input.take(len))
    }

    /// Makes sure that there is a connection; waits for a master that is away at most `reconnect_ms_max`. Whether it is a
    /// new one.
    ///
    /// # Errors
    /// It stayed away.
    pub fn ensure_connected(&mut self) -> Result<bool, RpcError> {
        if self.stream.is_some() {
            return Ok(false);
        }
        let deadline = Instant::now() + Duration::from_millis(self.config.reconnect_ms_max.into());
        loop {
            match self.dial() {
                Ok(()) => {
                    self.backoff = BACKOFF_MIN;
                    return Ok(true);
                }
                // Waiting changes nothing about these.
                Err(
                    error @ (RpcError::Version { .. }
                    | RpcError::Address { .. }
                    | RpcError::Tenant { .. }
                    | RpcError::Secret
                    | RpcError::Forked),
                ) => return Err(error),
                Err(error) => {
                    if Instant::now() + self.backoff >= deadline {
                        return Err(error);
                    }
                    thread::sleep(self.backoff);
                    self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
                }
            }
        }
    }

    /// Notices a connection that the master closed meanwhile, and makes a new one. Cheap when all is well.
    ///
    /// # Errors
    /// As [`ensure_connected`](Self::ensure_connected).
    pub fn refresh(&mut self) -> Result<bool, RpcError> {
        if self.stream.is_some() && self.fill_once().is_err() {
            self.disconnect();
        }
        self.ensure_connected()
    }

    /// Writes what is queued and waits for the answer to request `id`; other answers are dropped.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn exchange(&mut self, id: u64) -> Result<Frame<'_>, RpcError> {
        self.flush()?;
        let deadline = self.call_deadline();
        let len = self.wait_for(id, deadline)?;
        self.input.take(len).ok_or(RpcError::Wire(WireError::Body))
    }

    /// Drops the connection, and with it every request under way.
    pub fn disconnect(&mut self) {
        self.stream = None;
        self.returns.clear();
        self.returned = 0;
        self.out.clear();
        self.written = 0;
        (self.input.start, self.input.end) = (0, 0);
    }

    /// What a child would say on the connection, its parent would have said; and whatever came back first would be taken for the
    /// answer to the other's question.
    fn check_process(&self) -> Result<(), RpcError> {
        if self.mark.is_forked() { Err(RpcError::Forked) } else { Ok(()) }
    }

    fn dial(&mut self) -> Result<(), RpcError> {
        self.check_process()?;
        self.disconnect();
        let deadline = Instant::now() + Duration::from_millis(self.config.connect_ms_max.into());
        self.stream = Some(Stream::connect(&self.address, deadline)?);
        let greeting = self.greet(deadline);
        if greeting.is_err() {
            self.disconnect();
        }
        self.welcome = greeting?;
        self.connects_total += 1;
        Ok(())
    }

    /// Says who connects. Whoever has secrets asks for the challenge first, and gives the proofs then: no secret travels.
    fn greet(&mut self, deadline: Instant) -> Result<Welcome, RpcError> {
        let identity = self.identity.clone();
        let tenant = identity.tenant.as_str();
        if !identity.has_secrets() {
            return self.hello(&Greeting { tenant, ..Greeting::default() }, deadline);
        }
        let challenge = self.hello(&Greeting { tenant: "", ..Greeting::default() }, deadline)?.challenge;
        let proof =
            |secret: &Secret, role| secret.is_set().then(|| prove(secret.bytes(), role, &challenge, tenant));
        let proofs = [
            proof(&identity.secret, Role::Tenant),
            proof(&identity.admin, Role::Admin),
            proof(&identity.cluster, Role::Cluster),
        ];
        let [tenant_proof, admin_proof, cluster_proof] =
            proofs.each_ref().map(|proof| Key(proof.as_ref().map_or(&[], |proof| proof.as_slice())));
        let greeting = Greeting { tenant, tenant_proof, admin_proof, cluster_proof, ..Greeting::default() };
        self.hello(&greeting, deadline).map_err(|error| match error {
            RpcError::Refused(ErrorCode::PermissionDenied) => RpcError::Secret,
            error => error,
        })
    }

    fn hello(&mut self, greeting: &Greeting<'_>, deadline: Instant) -> Result<Welcome, RpcError> {
        let (id, out) = {
            self.id += 1;
            (self.id, &mut self.out)
        };
        Hello::encode_request(out, id, greeting, std::iter::empty()).map_err(RpcError::Wire)?;
        self.flush()?;
        let len = self.wait_for(id, deadline)?;
        let frame = self.input.take(len).ok_or(RpcError::Wire(WireError::Body))?;
        let welcome = Hello::decode_response(&frame).map_err(|code| refused(code, &self.identity.tenant))?.0;
        if welcome.version == VERSION {
            Ok(welcome)
        } else {
            Err(RpcError::Version { theirs: welcome.version })
        }
    }

    fn timed_out(&self) -> RpcError {
        RpcError::TimedOut { call_ms_max: self.config.call_ms_max, trace: self.trace() }
    }

    fn call_deadline(&self) -> Instant {
        Instant::now() + Duration::from_millis(self.config.call_ms_max.into())
    }

    /// Drops frames until the one with this id lies at the front; its length.
    fn wait_for(&mut self, id: u64, deadline: Instant) -> Result<usize, RpcError> {
        loop {
            let len = self.wait_frame(deadline)?;
            let front = self.input.peek(len).map(|frame| frame.header);
            match front {
                Some(header) if header.request_id == id => return Ok(len),
                // Id 0 is the master speaking about the connection itself: it is about to close it.
                Some(header) if header.request_id == 0 => {
                    self.input.take(len);
                    self.stream = None;
                    return Err(RpcError::Refused(header.result().err().unwrap_or(ErrorCode::InternalError)));
                }
                _ => {
                    self.input.take(len);
                }
            }
        }
    }

    /// Waits for a complete frame at the front; its length.
    fn wait_frame(&mut self, deadline: Instant) -> Result<usize, RpcError> {
        if let Some(len) = self.input.frame_len()? {
            return Ok(len);
        }
        self.spin.reset();
        loop {
            if !self.fill_once()? {
                // Should the master wait for this very core, it has it meanwhile.
                if self.spin.again() {
                    continue;
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(self.timed_out());
                }
                self.stream.as_ref().ok_or(RpcError::Disconnected)?.wait(left);
                continue;
            }
            if let Some(len) = self.input.frame_len()? {
                return Ok(len);
            }
        }
    }

    /// Reads what is there. Whether anything was.
    fn fill_once(&mut self) -> Result<bool, RpcError> {
        self.check_process()?;
        let stream = self.stream.as_mut().ok_or(RpcError::Disconnected)?;
        let room = self.input.room(READ_BYTES);
        match stream.read_some(room) {
            Ok(0) => Err(lost(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.end += len;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(lost(error)),
        }
    }
}

/// Leases that wait to be given back are, as far as that costs no waiting: whoever connects for one read leaves none behind.
impl Drop for RpcConnection {
    fn drop(&mut self) {
        if self.returns.is_empty() || !self.out.is_empty() || self.mark.is_forked() {
            return;
        }
        let id = self.next_id();
        let Some(stream) = &mut self.stream else { return };
        // What cannot be sent now runs out by itself.
        if ReturnLeases::encode_request(&mut self.out, id, &(), self.returns.drain(..)).is_ok() {
            let _ = stream.write_some(&self.out);
        }
    }
}

impl Input {
    /// At least `bytes_min` writable bytes at the end.
    fn room(&mut self, bytes_min: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.bytes.len() - self.end < bytes_min {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.bytes.len() - self.end < bytes_min {
                self.bytes.resize(self.end + bytes_min, 0);
            }
        }
        &mut self.bytes[self.end..]
    }

    /// Length of the frame at the front, once it is complete.
    fn frame_len(&self) -> Result<Option<usize>, RpcError> {
        if self.end - self.start < HEADER_BYTES {
            return Ok(None);
        }
        match Frame::parse(&self.bytes[self.start..self.end]) {
            Ok(frame) => Ok(frame.map(|(_, len)| len)),
            Err(WireError::Version { theirs, .. }) => Err(RpcError::Version { theirs }),
            Err(error) => Err(RpcError::Wire(error)),
        }
    }

    fn peek(&self, len: usize) -> Option<Frame<'_>> {
        let bytes = self.bytes.get(self.start..self.start + len)?;
        Frame::parse(bytes).ok().flatten().map(|(frame, _)| frame)
    }

    fn take(&mut self, len: usize) -> Option<Frame<'_>> {
        let start = self.start;
        self.start = (start + len).min(self.end);
        let bytes = self.bytes.get(start..self.start)?;
        Frame::parse(bytes).ok().flatten().map(|(frame, _)| frame)
    }
}

/// The master says no to the greeting.
fn refused(code: ErrorCode, tenant: &str) -> RpcError {
    match code {
        ErrorCode::TenantNotRegistered => RpcError::Tenant { tenant: tenant.to_owned() },
        code => RpcError::Refused(code),
    }
}

fn lost(source: io::Error) -> RpcError {
    RpcError::Lost { source }
}
