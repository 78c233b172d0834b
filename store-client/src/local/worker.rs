//! One worker of a local server: a thread, an engine, and the connections that it serves in turn.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::net::UnixStream;
use mio::{Events, Interest, Poll, Token};
use store_core::allocator::GRAIN_BYTES;
use store_core::{ErrorCode, FrameBuffer, WireError};
use te_engine::SharedRegion;

use super::protocol::{Answer, FRAME_BYTES_MAX, Got, KIND, Refusal, Request, Span, VERSION, Wanted, encode};
use super::server::{LocalServerConfig, Shared, WAKE};
use crate::client::Client;
use crate::error::StoreError;
use crate::item::{Get, Put, Sink, Source};
use crate::memory::BufferRange;
use crate::store::{RemoveMode, Store as _};

pub(super) struct Worker {
    config: LocalServerConfig,
    poll: Poll,
    newcomers: Receiver<std::os::unix::net::UnixStream>,
    /// Number of connections of this worker, for the acceptor.
    load: Arc<AtomicU32>,
    shared: Arc<Shared>,
    client: Option<Client>,
    connections: Vec<Option<Connection>>,
    /// Connections that may have bytes to read or a complete request; each is listed once.
    ready: VecDeque<usize>,
    /// Arenas of closed connections that the engine has not released yet.
    ending: Vec<SharedRegion>,
}

struct Connection {
    stream: UnixStream,
    input: FrameBuffer,
    /// Answers that are not sent yet; nothing more is read while there are any.
    out: Vec<u8>,
    written: usize,
    arena: Option<SharedRegion>,
    since: Instant,
    queued: bool,
    /// Whether the connection waits until it can write, instead of until it can read.
    write_blocked: bool,
    /// Whether the client was refused: the connection is closed once the reason has been sent.
    refused: bool,
    /// Whether the last read filled the buffer: the kernel may not report the remaining bytes again.
    unread: bool,
    /// Whether the peer has closed its side: everything that is left is read, however short the reads are.
    closing: bool,
}

/// What to do with a connection next.
enum Next {
    /// Serve it again in the next turn.
    Again,
    /// Wait until the poller reports an event.
    Wait,
    Close,
}

/// A connection that cannot continue.
struct Broken;

const EVENTS_MAX: usize = 64;
const READ_BYTES: usize = 16 << 10;
/// How often arenas of closed connections, and clients without a hello, are checked.
const TICK: Duration = Duration::from_millis(50);
/// How long a worker that stops waits for arenas that a fabric might still touch. Arenas that are left then
/// are released with the engine, which does not free memory that is in use.
const END_MAX: Duration = Duration::from_secs(2);

impl Worker {
    pub(super) fn new(
        config: LocalServerConfig,
        poll: Poll,
        newcomers: Receiver<std::os::unix::net::UnixStream>,
        load: Arc<AtomicU32>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            config,
            poll,
            newcomers,
            load,
            shared,
            client: None,
            connections: Vec::new(),
            ready: VecDeque::new(),
            ending: Vec::new(),
        }
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(EVENTS_MAX);
        let spin = Duration::from_micros(self.config.spin_us.into());
        let mut spin_end = Instant::now();
        while !self.shared.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            let spins = now < spin_end;
            let timeout = if !self.ready.is_empty() || spins {
                Some(Duration::ZERO)
            } else if self.has_deadlines() {
                Some(TICK)
            } else {
                None
            };
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    log::error!(
                        "a worker for local clients ends: its poller failed: {error}: restart the node"
                    );
                    break;
                }
                _ => {}
            }
            for event in &events {
                match event.token() {
                    WAKE => self.adopt(),
                    Token(index) => self.note(index, event.is_read_closed()),
                }
            }
            let served = self.turn();
            if served {
                spin_end = Instant::now() + spin;
            } else if spins && events.is_empty() {
                // A client may be waiting for this core.
                thread::yield_now();
            }
            self.tidy();
        }
        self.end();
    }

    /// Whether there is something to check even if no event arrives.
    fn has_deadlines(&self) -> bool {
        !self.ending.is_empty()
            || self.connections.iter().flatten().any(|connection| connection.arena.is_none())
    }

    fn adopt(&mut self) {
        while let Ok(stream) = self.newcomers.try_recv() {
            let index = self.connections.iter().position(Option::is_none).unwrap_or(self.connections.len());
            let registered = stream.set_nonblocking(true).and_then(|()| {
                let mut stream = UnixStream::from_std(stream);
                self.poll.registry().register(&mut stream, Token(index), Interest::READABLE)?;
                Ok(stream)
            });
            match registered {
                Ok(stream) => {
                    if index == self.connections.len() {
                        self.connections.push(None);
                    }
                    self.connections[index] = Some(Connection {
                        stream,
                        input: FrameBuffer::new(),
                        out: Vec::new(),
                        written: 0,
                        arena: None,
                        since: Instant::now(),
                        queued: false,
                        write_blocked: false,
                        refused: false,
                        unread: false,
                        closing: false,
                    });
                    self.note(index, false);
                }
                Err(error) => {
                    log::warn!("a local client cannot be registered with the poller: {error}");
                    self.count_out();
                }
            }
        }
    }

    /// Puts a connection into the queue after an event.
    fn note(&mut self, index: usize, closing: bool) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        connection.closing |= closing;
        if !connection.queued {
            connection.queued = true;
            self.ready.push_back(index);
        }
    }

    /// Serves one request of each connection in the queue. Returns whether any was served.
    fn turn(&mut self) -> bool {
        let mut served = false;
        for _ in 0..self.ready.len() {
            let Some(index) = self.ready.pop_front() else { break };
            let Some(mut connection) = self.connections.get_mut(index).and_then(Option::take) else {
                continue;
            };
            connection.queued = false;
            let next = self.serve(index, &mut connection, &mut served);
            match next {
                Next::Close => {
                    self.close(connection);
                    continue;
                }
                Next::Again => {
                    connection.queued = true;
                    self.ready.push_back(index);
                }
                Next::Wait => {}
            }
            self.connections[index] = Some(connection);
        }
        served
    }

    /// Serves one request, if a complete one has arrived.
    fn serve(&mut self, index: usize, connection: &mut Connection, served: &mut bool) -> Next {
        let next = self.try_serve(index, connection, served);
        next.unwrap_or_else(|Broken| {
            self.shared.broken_total.fetch_add(1, Ordering::Relaxed);
            Next::Close
        })
    }

    fn try_serve(
        &mut self,
        index: usize,
        connection: &mut Connection,
        served: &mut bool,
    ) -> Result<Next, Broken> {
        if !connection.flush() {
            return self.set_write_blocked(index, connection, true);
        }
        self.set_write_blocked(index, connection, false)?;
        let mut input = std::mem::take(&mut connection.input);
        let pending_bytes = input.pending_bytes();
        let answered = match input.next_frame() {
            Ok(Some(frame)) => match Request::decode(&frame) {
                Ok(request) => {
                    let id = frame.header.request_id;
                    Some(self.answer(connection, id, &request))
                }
                Err(error) => Some(Err(broken(error))),
            },
            Ok(None) if pending_bytes > FRAME_BYTES_MAX => {
                Some(Err(broken(WireError::TooLong { bytes: pending_bytes })))
            }
            Ok(None) => None,
            // The hello of another release. Its frame cannot be decoded, but it can be answered.
            Err(error @ WireError::Version { theirs, request_id, kind: KIND })
                if connection.arena.is_none() =>
            {
                Some(self.refuse(connection, request_id, Refusal::Version { theirs }, &error))
            }
            Err(error) => Some(Err(broken(error))),
        };
        connection.input = input;
        match answered {
            Some(answered) => {
                answered?;
                *served = true;
                if connection.refused {
                    // One try: a client without room for the refusal is not waited for.
                    connection.flush();
                    return Ok(Next::Close);
                }
                self.shared.requests_total.fetch_add(1, Ordering::Relaxed);
                if !connection.flush() {
                    return self.set_write_blocked(index, connection, true);
                }
                // A client that sends one request at a time has not sent the next one yet.
                let more = connection.input.pending_bytes() > 0 || connection.unread || connection.closing;
                Ok(if more { Next::Again } else { Next::Wait })
            }
            None => connection.fill(),
        }
    }

    /// Makes the poller report when the connection can be written, or else when it can be read.
    fn set_write_blocked(
        &self,
        index: usize,
        connection: &mut Connection,
        write_blocked: bool,
    ) -> Result<Next, Broken> {
        if write_blocked != connection.write_blocked {
            let interest = if write_blocked { Interest::WRITABLE } else { Interest::READABLE };
            let registry = self.poll.registry();
            registry.reregister(&mut connection.stream, Token(index), interest).map_err(|error| {
                log::warn!("a local client is disconnected: the poller failed: {error}");
                Broken
            })?;
            connection.write_blocked = write_blocked;
        }
        Ok(Next::Wait)
    }

    fn answer(&mut self, connection: &mut Connection, id: u64, request: &Request<'_>) -> Result<(), Broken> {
        if let Request::Hello { version, tenant, arena_bytes } = *request {
            return self.greet(connection, id, version, tenant, arena_bytes);
        }
        // Every connection begins with a hello.
        let arena = connection.arena.clone().ok_or(Broken)?;
        let client = self.client.as_mut().ok_or(Broken)?;
        #[cfg(test)]
        {
            if self.shared.stick.swap(false, Ordering::SeqCst) {
                client.engine_mut().stick_next(te_core::Op::Read);
            }
            if self.shared.unstick.swap(false, Ordering::SeqCst) {
                client.engine_mut().unstick();
            }
        }
        let answer = carry_out(client, &arena, request);
        encode(&mut connection.out, id, true, &answer).map_err(broken)
    }

    fn greet(
        &mut self,
        connection: &mut Connection,
        id: u64,
        version: u16,
        tenant: &str,
        arena_bytes: u64,
    ) -> Result<(), Broken> {
        if connection.arena.is_some() {
            return Err(Broken);
        }
        match self.lend(version, tenant, arena_bytes) {
            Ok(arena) => {
                let arena_bytes = arena.len() as u64;
                connection.arena = Some(arena);
                encode(&mut connection.out, id, true, &Answer::Welcome { arena_bytes }).map_err(broken)?;
                connection.send_arena()
            }
            Err(refusal) => self.refuse(connection, id, refusal, &refusal),
        }
    }

    /// Queues the refusal, after which the connection is closed; `why` is what the log says.
    fn refuse(
        &self,
        connection: &mut Connection,
        id: u64,
        refusal: Refusal,
        why: &dyn fmt::Display,
    ) -> Result<(), Broken> {
        self.shared.refused_total.fetch_add(1, Ordering::Relaxed);
        log::warn!("a local client was refused: {why}");
        connection.refused = true;
        encode(&mut connection.out, id, true, &Answer::Refused(refusal)).map_err(broken)
    }

    fn lend(&mut self, version: u16, tenant: &str, arena_bytes: u64) -> Result<SharedRegion, Refusal> {
        if version != VERSION {
            return Err(Refusal::Version { theirs: version });
        }
        if tenant != self.config.client.identity.tenant {
            return Err(Refusal::Tenant);
        }
        if self.client.is_none() {
            let mut client = Client::connect(self.config.client.clone()).map_err(|error| {
                log::warn!("local clients cannot be served: {error}");
                Refusal::Store(ErrorCode::RpcFail)
            })?;
            #[cfg(test)]
            self.shared
                .identities
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(client.engine_mut().identity());
            let metrics = client.metrics_handle();
            self.shared.metrics.lock().unwrap_or_else(PoisonError::into_inner).push(metrics);
            self.client = Some(client);
        }
        let Some(client) = &mut self.client else { return Err(Refusal::Store(ErrorCode::InternalError)) };
        // A part of a grain could never be handed out, and an arena as long as one value must have room for
        // the value.
        let bytes_max = self.config.arena_bytes_max / GRAIN_BYTES * GRAIN_BYTES;
        let bytes = arena_bytes.clamp(1, bytes_max).next_multiple_of(GRAIN_BYTES);
        let total = self.config.arenas_bytes_max;
        let taken = self.shared.arenas_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
            taken.checked_add(bytes).filter(|sum| *sum <= total)
        });
        if let Err(taken) = taken {
            return Err(Refusal::Memory { bytes_left: total.saturating_sub(taken) });
        }
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        client.alloc_lent(len).map_err(|error| {
            self.shared.arenas_bytes.fetch_sub(bytes, Ordering::Relaxed);
            log::warn!("an arena of {bytes} bytes for a local client cannot be allocated: {error}");
            Refusal::Memory { bytes_left: 0 }
        })
    }

    fn close(&mut self, mut connection: Connection) {
        if let Err(error) = self.poll.registry().deregister(&mut connection.stream) {
            log::debug!("a local client that has gone cannot be deregistered: {error}");
        }
        self.ending.extend(connection.arena.take());
        self.count_out();
    }

    fn count_out(&self) {
        self.shared.clients.fetch_sub(1, Ordering::Relaxed);
        self.load.fetch_sub(1, Ordering::Relaxed);
    }

    /// Unregisters arenas of closed connections, and disconnects clients that did not send a hello in time.
    fn tidy(&mut self) {
        if self.client.as_ref().is_some_and(Client::is_expelled) {
            // This engine, and the arenas that are registered with it, cannot be used any more. Local clients
            // reconnect and get arenas of a new engine.
            log::warn!(
                "nodes cut this worker off: its local clients are disconnected, and it connects with a new engine"
            );
            self.hang_up();
            let bytes: u64 = self.ending.drain(..).map(|arena| arena.len() as u64).sum();
            self.shared.arenas_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.client = None;
        }
        if let Some(client) = &mut self.client {
            #[cfg(test)]
            if self.shared.unstick.swap(false, Ordering::SeqCst) {
                client.engine_mut().unstick();
            }
            let shared = &self.shared;
            self.ending.retain(|arena| {
                // A transfer that was given up keeps its arena until it has drained.
                let busy = client.is_held(BufferRange::all(arena)) || client.unregister(arena.id()).is_err();
                if !busy {
                    shared.arenas_bytes.fetch_sub(arena.len() as u64, Ordering::Relaxed);
                }
                busy
            });
        }
        let hello = Duration::from_millis(self.config.hello_ms_max.into());
        for slot in &mut self.connections {
            if slot.as_ref().is_some_and(|silent| silent.arena.is_none() && silent.since.elapsed() > hello)
                && let Some(mut silent) = slot.take()
            {
                log::warn!(
                    "a local client is disconnected: it sent no hello within {} ms",
                    self.config.hello_ms_max
                );
                let _ = self.poll.registry().deregister(&mut silent.stream);
                self.shared.broken_total.fetch_add(1, Ordering::Relaxed);
                self.shared.clients.fetch_sub(1, Ordering::Relaxed);
                self.load.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn hang_up(&mut self) {
        for index in 0..self.connections.len() {
            if let Some(connection) = self.connections[index].take() {
                self.close(connection);
            }
        }
    }

    fn end(&mut self) {
        self.hang_up();
        let deadline = Instant::now() + END_MAX;
        loop {
            self.tidy();
            if self.ending.is_empty() || Instant::now() >= deadline {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        if !self.ending.is_empty() {
            log::warn!(
                "{} arenas of local clients may still be touched; they are released with the engine",
                self.ending.len()
            );
        }
    }
}

impl Connection {
    /// Reads the bytes that have arrived.
    fn fill(&mut self) -> Result<Next, Broken> {
        let room = self.input.spare_mut(READ_BYTES);
        let asked = room.len();
        match self.stream.read(room) {
            Ok(0) => Ok(Next::Close),
            Ok(len) => {
                self.input.filled(len);
                self.unread = len == asked;
                Ok(Next::Again)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Next::Wait),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Next::Again),
            Err(error) => {
                log::debug!("reading {asked} bytes from a local client: {error}");
                Ok(Next::Close)
            }
        }
    }

    /// Sends pending answers. Returns whether all of them were sent. A closed peer is noticed when the
    /// connection is read.
    fn flush(&mut self) -> bool {
        while self.written < self.out.len() {
            match self.stream.write(&self.out[self.written..]) {
                Ok(len) => self.written += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.closing = true;
                    break;
                }
            }
        }
        self.out.clear();
        self.written = 0;
        true
    }

    /// Sends the welcome, with the arena's file descriptor at its first byte.
    fn send_arena(&mut self) -> Result<(), Broken> {
        let arena = self.arena.as_ref().ok_or(Broken)?;
        let sent = arena.lend().and_then(|lent| {
            te_host::send_with_fd(self.stream.as_fd(), &self.out[self.written..], lent.as_fd())
        });
        match sent {
            Ok(len) => {
                self.written += len;
                Ok(())
            }
            Err(error) => {
                log::warn!("an arena cannot be handed to a local client: {error}");
                Err(Broken)
            }
        }
    }
}

fn broken(error: WireError) -> Broken {
    log::warn!("a local client is disconnected: {error}");
    Broken
}

/// Carries out a request of a client after its hello.
fn carry_out(client: &mut Client, arena: &SharedRegion, request: &Request<'_>) -> Answer {
    let place = |span: Span| BufferRange { region: arena.id(), offset: span.offset, len: span.len };
    match request {
        // The caller of this function refuses it.
        Request::Hello { .. } => Answer::Failed(ErrorCode::InvalidParams),
        Request::Put { options, items } => {
            let mut items: Vec<_> =
                items.iter().map(|item| Put::new(item.key.0, Source::Region(place(item.span)))).collect();
            let _ = client.batch_put(&mut items, options);
            Answer::Done(
                items.iter().map(|item| plain(item.result(), ErrorCode::ObjectAlreadyExists)).collect(),
            )
        }
        Request::Get { items } => {
            let mut gets: Vec<_> = items.iter().map(|item| get(item, place(item.span))).collect();
            let _ = client.batch_get(&mut gets);
            let results = gets.into_iter().map(Get::into_result);
            Answer::Got(
                results
                    .zip(items)
                    .map(|(result, item)| got(client, item, place(item.span), result))
                    .collect(),
            )
        }
        Request::Exists { leased, keys } => {
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.0).collect();
            let found = if *leased { client.batch_exists_leased(&keys) } else { client.batch_exists(&keys) };
            found.map_or_else(|error| Answer::Failed(error.code()), Answer::Whether)
        }
        Request::Prefetch { keys } => {
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.0).collect();
            let found = client.batch_prefetch(&keys);
            found.map_or_else(|error| Answer::Failed(error.code()), Answer::Prefetched)
        }
        Request::Retain { change, keys } => {
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.0).collect();
            match client.batch_change_retention(&keys, change) {
                Ok(changed) => Answer::Done(
                    changed.into_iter().map(|changed| plain(changed, ErrorCode::ObjectNotFound)).collect(),
                ),
                Err(error) => Answer::Failed(error.code()),
            }
        }
        Request::Remove { force, keys } => {
            let keys: Vec<&[u8]> = keys.iter().map(|key| key.0).collect();
            match client.batch_remove(&keys, RemoveMode::forced(*force)) {
                Ok(removed) => Answer::Done(
                    removed.into_iter().map(|removed| plain(removed, ErrorCode::KeyNotFound)).collect(),
                ),
                Err(error) => Answer::Failed(error.code()),
            }
        }
        Request::Settled { ranges } => {
            Answer::Whether(ranges.iter().map(|span| !client.is_held(place(*span))).collect())
        }
    }
}

/// A result as it is sent: `no` is the code for `false`.
fn plain(result: Result<bool, StoreError>, no: ErrorCode) -> Result<(), ErrorCode> {
    match result {
        Ok(true) => Ok(()),
        Ok(false) => Err(no),
        Err(error) => Err(error.code()),
    }
}

fn get<'a>(item: &Wanted<'a>, range: BufferRange) -> Get<'a> {
    Get { key: item.key.0, part: item.part, sink: Sink::Region(range), result: Ok(None) }
}

fn got(
    client: &mut Client,
    item: &Wanted<'_>,
    range: BufferRange,
    result: Result<Option<u64>, StoreError>,
) -> Got {
    match result {
        Ok(Some(len)) => Got::Read(len),
        // The read was given up and may not have drained: the client must not use the range.
        Ok(None) | Err(StoreError::Held) if client.is_held(range) => Got::Held,
        Ok(None) => Got::Miss,
        Err(StoreError::TooLong { .. }) => match client.master().look_up(item.key.0) {
            Ok(Some(object)) => Got::TooLong(get(item, range).bytes_of(object.len)),
            Ok(None) => Got::Miss,
            Err(error) => Got::Failed(error.code()),
        },
        Err(error) => Got::Failed(error.code()),
    }
}
