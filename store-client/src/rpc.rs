//! A connection to the master: blocking calls and pipelines, with timeouts and reconnection.
//!
//! ```text
//!   call::<Get>(…)                          one request and its answer, with retries
//!   queue::<Exists>(…)… flush() recv()…     many requests under way; answers carry the request's id
//! ```
//!
//! # Retries
//! A call whose answer was lost is sent again after the connection has been made again, until its time is
//! over. Carrying out any request twice is harmless, also by two leaders of the same lineage; the messages in
//! [`store_core::message`] document why.
//!
//! # Several masters
//! One of them leads. When a connection breaks, and when a master says that it does not lead, all masters are
//! tried at once, and the first that welcomes this side is used. A master that does not answer a request for
//! a while is not waited for if another one leads by now. Welcomes and answers of an earlier lineage, or of
//! an earlier term of the same, than one that was met before are refused.

mod address;
mod dialing;
mod directory;
mod masters;
mod search;
mod standing;
mod stream;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use store_core::message::{LeaseRange, Operation, ReturnLeases, Welcome};
use store_core::wire::Header;
use store_core::{
    CHALLENGE_BYTES, DEFAULT_TENANT, ErrorCode, Frame, FrameBuffer, Items, Secret, Trace, WireError,
};
use te_host::Spin;
use te_host::fork::Mark;

pub use address::Address;
pub use masters::Masters;
pub use search::LeaderHint;
pub(crate) use standing::Standing;

use crate::error::RpcError;
use search::{Dialer, Search, with_jitter};
use stream::Stream;

/// Room for each read from the socket, bytes.
const READ_BYTES: usize = 64 << 10;
/// Bytes of queued requests above which `queue` flushes.
const QUEUE_BYTES_MAX: usize = 256 << 10;
/// Most ranges of leases that wait to be returned.
const RETURNS_MAX: usize = 64;
/// Number of leases from which on a get returns them in a frame of its own.
const RETURNED_MIN: u32 = 8;
/// First and longest pause between two tries to connect. It doubles with each failure.
const BACKOFF_MIN: Duration = Duration::from_millis(2);
const BACKOFF_MAX: Duration = Duration::from_millis(100);
/// How long one of several masters may be silent before the others are asked whether one of them leads.
const SILENT: Duration = Duration::from_millis(250);
/// How often a call to a lone master is sent, the first time included.
const TRIES: u32 = 3;

/// Timeouts of a connection to the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RpcConfig {
    /// Longest wait for an answer, milliseconds. Default 5,000.
    pub call_ms_max: u32,
    /// Longest time to connect, handshake included, milliseconds. One of several masters gets at most 500.
    /// Default 2,000.
    pub connect_ms_max: u32,
    /// How long a call keeps trying to reconnect to a lone master that cannot be reached, milliseconds; 0:
    /// one try. Default 1,000.
    pub reconnect_ms_max: u32,
    /// How long a call looks for the one of several masters that leads, milliseconds, as far as its own time
    /// permits. Default 5,000.
    pub failover_ms_max: u32,
    /// How long a call spins before it sleeps in the kernel, microseconds; 0: it does not spin. Default 50.
    pub spin_us: u32,
}

impl Default for RpcConfig {
    fn default() -> Self {
        Self {
            call_ms_max: 5_000,
            connect_ms_max: 2_000,
            reconnect_ms_max: 1_000,
            failover_ms_max: 5_000,
            spin_us: 50,
        }
    }
}

/// Who connects to the master: a tenant and the secrets that prove its rights. The default is the default
/// tenant without a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Identity {
    /// Tenant whose objects this connection uses, 1 to 64 bytes; empty: no tenant, which is sufficient for a
    /// node.
    pub tenant: String,
    /// Secret of the tenant, if the tenant has one.
    pub secret: Secret,
    /// The admin secret. Administrative requests to a master that has one need it. It also authorises a node.
    pub admin: Secret,
    /// The cluster secret, which nodes and other servers of a cluster share with the master and with each
    /// other. If the master has an admin or a cluster secret, a node needs one of the two. Clients need it to
    /// reach nodes that have it.
    pub cluster: Secret,
}

impl Identity {
    fn has_secrets(&self) -> bool {
        self.secret.is_set() || self.admin.is_set() || self.cluster.is_set()
    }

    /// The cluster secret as the engine takes it.
    pub(crate) fn cluster_secret(&self) -> Secret {
        self.cluster.clone()
    }
}

impl Default for Identity {
    fn default() -> Self {
        let none = Secret::default;
        Self { tenant: DEFAULT_TENANT.to_owned(), secret: none(), admin: none(), cluster: none() }
    }
}

/// A connection to a master. See the module's documentation.
#[derive(Debug)]
pub struct RpcConnection {
    masters: Masters,
    dialer: Dialer,
    /// The master that it was connected to last.
    address: Address,
    /// Looks for the leader; `None` while one master alone is known.
    search: Option<Box<Search>>,
    /// A connection to a later leader, to be used next.
    successor: Option<Box<RpcConnection>>,
    stream: Option<Stream>,
    welcome: Welcome,
    /// The welcome is that of this connection.
    is_welcome: bool,
    /// When the reign was compared, as [`Standing::check`] counts.
    checked: u64,
    /// The end of a call that was lost, which it keeps when it is sent again.
    again: Option<Instant>,
    input: FrameBuffer,
    out: Vec<u8>,
    written: usize,
    id: u64,
    connects_total: u64,
    backoff: Duration,
    spin: Spin,
    /// Leases of this connection to return before the next request.
    returns: Vec<LeaseRange>,
    /// Number of leases in `returns`.
    returned: u32,
    mark: Mark,
}

impl RpcConnection {
    /// Connects as the default tenant.
    ///
    /// # Errors
    /// The master cannot be reached, or is of another release.
    pub fn connect(masters: Masters, config: RpcConfig) -> Result<Self, RpcError> {
        Self::connect_as(masters, config, Identity::default())
    }

    /// Connects as this identity. A lone master is tried once; several are tried for `connect_ms_max`.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and `Tenant` or `Secret` when the master refuses the identity.
    pub fn connect_as(masters: Masters, config: RpcConfig, identity: Identity) -> Result<Self, RpcError> {
        Self::connect_with(masters, config, identity, Standing::default())
    }

    /// As [`connect_as`](Self::connect_as), for one of several connections of a process to the same store.
    pub(crate) fn connect_with(
        masters: Masters,
        config: RpcConfig,
        identity: Identity,
        standing: Standing,
    ) -> Result<Self, RpcError> {
        let until = Instant::now() + Duration::from_millis(config.connect_ms_max.into());
        let mut this = Self::unconnected(masters, Dialer { config, identity, standing });
        this.dial(until)?;
        Ok(this)
    }

    fn unconnected(masters: Masters, dialer: Dialer) -> Self {
        let spin = Spin::new(Duration::from_micros(dialer.config.spin_us.into()));
        Self {
            address: masters.listed().first().cloned().unwrap_or_default(),
            masters,
            dialer,
            search: None,
            successor: None,
            stream: None,
            welcome: Welcome {
                version: 0,
                lineage: 0,
                term: 0,
                keys_per_batch_max: 0,
                key_bytes_max: 0,
                replicas_max: 0,
                lease_ms: 0,
                node_ttl_ms: 0,
                challenge: [0; CHALLENGE_BYTES],
            },
            is_welcome: false,
            checked: 0,
            again: None,
            input: FrameBuffer::new(),
            out: Vec::new(),
            written: 0,
            id: Trace::random(RandomState::new().build_hasher().finish()).base(),
            connects_total: 0,
            backoff: BACKOFF_MIN,
            spin,
            returns: Vec::new(),
            returned: 0,
            mark: Mark::new(),
        }
    }

    /// What the master sent when this connection was made. A new `lineage` means that the store has
    /// begun anew, without objects.
    #[must_use]
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The address of the master that it is, or was last, connected to.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Where the masters are, as it was told.
    #[must_use]
    pub fn masters(&self) -> &Masters {
        &self.masters
    }

    /// How often a connection was made. A value above 1 means that it was lost in between.
    #[must_use]
    pub fn connects_total(&self) -> u64 {
        self.connects_total
    }

    /// Begins an operation: from now on requests carry its number, which the master's logs show.
    pub fn begin_trace(&mut self) -> Trace {
        self.id = self.trace().next().base();
        self.again = None;
        self.trace()
    }

    /// The number of the operation that requests currently belong to.
    #[must_use]
    pub fn trace(&self) -> Trace {
        Trace::of(self.id)
    }

    /// Sends a request and waits for the answer; reconnects and sends it again if necessary (see the module's
    /// documentation).
    ///
    /// Answers to requests that were [queued](Self::queue) before and not received are dropped.
    ///
    /// # Errors
    /// `Refused` when the master answered with an error; otherwise why there is no answer.
    pub fn call<'a, O: Operation>(
        &mut self,
        ask: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'a>> + Clone,
    ) -> Result<(O::Response<'_>, Items<'_, O::ResponseItem<'_>>), RpcError> {
        self.again = Some(self.call_deadline());
        let answered = self.call_until_answered::<O>(ask, items);
        self.again = None;
        answered?;
        let frame = take(&mut self.input)?;
        O::decode_response(&frame).map_err(RpcError::Refused)
    }

    /// Sends a request, again where necessary, until its answer is at the front, or the time of `again` is
    /// over.
    fn call_until_answered<'a, O: Operation>(
        &mut self,
        ask: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'a>> + Clone,
    ) -> Result<(), RpcError> {
        let deadline = self.again.unwrap_or_else(|| self.call_deadline());
        let mut tries_left = TRIES;
        loop {
            tries_left = tries_left.saturating_sub(1);
            let fresh = self.ensure_connected()?;
            let attempt = self.queue::<O>(ask, items.clone()).and_then(|id| {
                self.flush()?;
                self.wait_for(id, deadline)
            });
            match attempt {
                // An idle connection may be found closed only now. A request that was never sent is sent
                // again, too.
                Err(error) if error.is_lost() => {
                    self.disconnect();
                    let again = if self.is_one_of_several() {
                        Instant::now() < deadline
                    } else {
                        tries_left > 0 && !(fresh && tries_left < 2)
                    };
                    if !again {
                        return Err(error);
                    }
                    if fresh && self.is_one_of_several() && self.successor.is_none() {
                        self.pause();
                    }
                }
                attempt => return attempt,
            }
        }
    }

    /// Appends a request to those that the next [`flush`](Self::flush) or [`recv`](Self::recv) sends, and
    /// returns its id.
    ///
    /// # Errors
    /// The request is too large, or the connection is lost.
    pub fn queue<'a, O: Operation>(
        &mut self,
        ask: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'a>>,
    ) -> Result<u64, RpcError> {
        let (id, out) = self.queue_raw();
        O::encode_request(out, id, ask, items).map_err(RpcError::Wire)?;
        if self.out.len() - self.written > QUEUE_BYTES_MAX {
            self.flush()?;
        }
        Ok(id)
    }

    /// A new id, and the buffer to append a request with that id to, for state machines that encode their
    /// requests themselves. Leases to [return](Self::return_leases) are sent before it.
    pub fn queue_raw(&mut self) -> (u64, &mut Vec<u8>) {
        if self.returned > 0 && self.stream.is_some() {
            let id = self.next_id();
            self.returned = 0;
            // A few numbers always fit a frame.
            let _ = ReturnLeases::encode_request(&mut self.out, id, &(), self.returns.drain(..));
        }
        (self.next_id(), &mut self.out)
    }

    /// As [`queue_raw`](Self::queue_raw), for a get. A few leases are kept back: returning one after each
    /// small get would increase the master's work by half.
    pub(crate) fn queue_get(&mut self) -> (u64, &mut Vec<u8>) {
        if self.returned >= RETURNED_MIN { self.queue_raw() } else { (self.next_id(), &mut self.out) }
    }

    /// Returns leases that this connection was granted, before its next request or when it is dropped; gets
    /// return eight or more at a time. Their objects may be evicted or removed from then on. Call it when
    /// nothing reads the objects any more. Leases of a lost connection expire.
    pub fn return_leases(&mut self, leases: LeaseRange) {
        if self.stream.is_none() {
            return;
        }
        let room = self.returns.len() < RETURNS_MAX;
        match self.returns.last_mut() {
            Some(last) if last.first + u64::from(last.count) == leases.first => last.count += leases.count,
            _ if room => self.returns.push(leases),
            // Leases beyond the limit expire.
            _ => return,
        }
        self.returned += leases.count;
    }

    fn next_id(&mut self) -> u64 {
        self.id = self.id.wrapping_add(1).max(1);
        self.id
    }

    /// Sends the queued requests.
    ///
    /// # Errors
    /// The connection is lost, or the master does not read for `call_ms_max`.
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
                    // The master does not read because this side does not: its answers are read meanwhile.
                    match stream.read_some(self.input.spare_mut(READ_BYTES)) {
                        Ok(0) => return Err(lost(ErrorKind::UnexpectedEof.into())),
                        Ok(len) => self.input.filled(len),
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

    /// Sends the queued requests and returns the next answer, whichever request it belongs to.
    ///
    /// # Errors
    /// `TimedOut` after `call_ms_max`; the connection is lost; the answer is invalid, or of a master that
    /// does not lead.
    pub fn recv(&mut self) -> Result<Frame<'_>, RpcError> {
        self.flush()?;
        let deadline = self.call_deadline();
        self.wait_frame(deadline)?;
        self.check_front()?;
        take(&mut self.input)
    }

    /// Returns an answer that has arrived, without waiting.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), except for the timeout.
    pub fn try_recv(&mut self) -> Result<Option<Frame<'_>>, RpcError> {
        if self.front()?.is_none() && !self.fill_once()? {
            return Ok(None);
        }
        if self.front()?.is_some() {
            self.check_front()?;
        }
        self.input.next_frame().map_err(unreadable)
    }

    /// Sleeps until bytes arrive, at most `timeout`. It may wake early, and does so without a connection.
    pub(crate) fn wait_readable(&self, timeout: Duration) {
        if let Some(stream) = &self.stream {
            stream.wait(timeout);
        }
    }

    /// Connects if there is no connection. A lone master that cannot be reached is tried again for at most
    /// `reconnect_ms_max`, several masters for `failover_ms_max`. Returns whether the connection is new.
    ///
    /// # Errors
    /// Why the latest try failed.
    pub fn ensure_connected(&mut self) -> Result<bool, RpcError> {
        if self.stream.is_some() {
            return Ok(false);
        }
        let end = |ms: u32| {
            let end = Instant::now() + Duration::from_millis(ms.into());
            self.again.map_or(end, |again| end.min(again))
        };
        let (lone, several) =
            (end(self.dialer.config.reconnect_ms_max), end(self.dialer.config.failover_ms_max));
        loop {
            let error = match self.dial(several) {
                Ok(()) => {
                    // One of several may welcome this side and then break off, again and again.
                    if !self.is_one_of_several() {
                        self.backoff = BACKOFF_MIN;
                    }
                    return Ok(true);
                }
                Err(error) => error,
            };
            let deadline = if self.is_one_of_several() { several } else { lone };
            // Waiting does not change some errors.
            if error.is_final() || Instant::now() + self.backoff >= deadline {
                return Err(error);
            }
            self.pause();
        }
    }

    fn pause(&mut self) {
        thread::sleep(with_jitter(self.backoff));
        self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
    }

    /// Whether other masters may lead than the one that it is connected to.
    fn is_one_of_several(&self) -> bool {
        self.search.is_some() || self.masters.lone().is_none()
    }

    /// Replaces a connection that the master has closed. Cheap while the connection is open. Returns whether
    /// the connection is new.
    ///
    /// # Errors
    /// As [`ensure_connected`](Self::ensure_connected).
    pub fn refresh(&mut self) -> Result<bool, RpcError> {
        if self.stream.is_some() && self.fill_once().is_err() {
            self.disconnect();
        }
        self.ensure_connected()
    }

    /// Sends the queued requests and waits for the answer to request `id`; other answers are dropped. A
    /// request that is sent once more after it was lost has no more time than it had, until the next trace
    /// begins.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn exchange(&mut self, id: u64) -> Result<Frame<'_>, RpcError> {
        let deadline = self.again.take().unwrap_or_else(|| self.call_deadline());
        let exchanged = self.flush().and_then(|()| self.wait_for(id, deadline));
        if let Err(error) = &exchanged
            && error.is_lost()
        {
            self.again = Some(deadline);
        }
        exchanged?;
        take(&mut self.input)
    }

    /// Closes the connection, which ends every request under way.
    pub fn disconnect(&mut self) {
        self.stream = None;
        self.is_welcome = false;
        self.returns.clear();
        self.returned = 0;
        self.out.clear();
        self.written = 0;
        self.input.consume(usize::MAX);
    }

    /// A forked child shares the parent's socket: its requests would look like the parent's, and each process
    /// could receive the other's answers.
    fn check_process(&self) -> Result<(), RpcError> {
        if self.mark.is_forked() { Err(RpcError::Forked) } else { Ok(()) }
    }

    fn timed_out(&self) -> RpcError {
        RpcError::TimedOut { call_ms_max: self.dialer.config.call_ms_max, trace: self.trace() }
    }

    fn call_deadline(&self) -> Instant {
        Instant::now() + Duration::from_millis(self.dialer.config.call_ms_max.into())
    }

    /// Drops frames until the answer to request `id` is at the front.
    fn wait_for(&mut self, id: u64, deadline: Instant) -> Result<(), RpcError> {
        loop {
            let header = self.wait_frame(deadline)?;
            if header.request_id == id {
                return self.check_front();
            }
            take(&mut self.input)?;
            // Id 0 is about the connection itself: the master is about to close it.
            if header.request_id == 0 {
                self.stream = None;
                return Err(RpcError::Refused(header.result().err().unwrap_or(ErrorCode::InternalError)));
            }
        }
    }

    /// Waits for a complete frame at the front. Returns its header.
    fn wait_frame(&mut self, deadline: Instant) -> Result<Header, RpcError> {
        if let Some(header) = self.front()? {
            return Ok(header);
        }
        self.spin.reset();
        let probes = self.is_welcome && self.is_one_of_several();
        let (mut asks, mut probe_at) = (true, Instant::now() + SILENT);
        loop {
            if !self.fill_once()? {
                // The master may be waiting for this core.
                if self.spin.again() {
                    continue;
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(self.timed_out());
                }
                let stream = self.stream.as_ref().ok_or(RpcError::Disconnected)?;
                if !probes {
                    stream.wait(left);
                    continue;
                }
                stream.wait(left.min(probe_at.saturating_duration_since(Instant::now())));
                if Instant::now() >= probe_at {
                    self.probe(asks)?;
                    // Answers to the question are looked for soon.
                    asks = !asks;
                    probe_at = Instant::now() + if asks { SILENT } else { SILENT / 10 };
                }
                continue;
            }
            if let Some(header) = self.front()? {
                return Ok(header);
            }
        }
    }

    /// The header of the frame at the front, if that is complete.
    fn front(&self) -> Result<Option<Header>, RpcError> {
        let front = self.input.peek_frame().map_err(unreadable)?;
        Ok(front.map(|(frame, _)| frame.header))
    }

    /// Reads the bytes that have arrived. Returns whether there were any.
    fn fill_once(&mut self) -> Result<bool, RpcError> {
        self.check_process()?;
        let stream = self.stream.as_mut().ok_or(RpcError::Disconnected)?;
        match stream.read_some(self.input.spare_mut(READ_BYTES)) {
            Ok(0) => Err(lost(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.filled(len);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(lost(error)),
        }
    }
}

/// Leases that wait to be returned are sent, as far as that does not block: a client that connects for one
/// read leaves none behind.
impl Drop for RpcConnection {
    fn drop(&mut self) {
        if self.returns.is_empty() || !self.out.is_empty() || self.mark.is_forked() {
            return;
        }
        let id = self.next_id();
        let Some(stream) = &mut self.stream else { return };
        // Leases that cannot be returned now expire.
        if ReturnLeases::encode_request(&mut self.out, id, &(), self.returns.drain(..)).is_ok() {
            let _ = stream.write_some(&self.out);
        }
    }
}

/// Takes the complete frame at the front.
fn take(input: &mut FrameBuffer) -> Result<Frame<'_>, RpcError> {
    input.next_frame().map_err(unreadable)?.ok_or(RpcError::Wire(WireError::Body))
}

/// The error for a stream that cannot be read.
fn unreadable(error: WireError) -> RpcError {
    match error {
        WireError::Version { theirs, .. } => RpcError::Version { theirs },
        error => RpcError::Wire(error),
    }
}

fn lost(source: io::Error) -> RpcError {
    RpcError::Lost { source }
}
