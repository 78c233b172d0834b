//! The thread of a stage service: sockets, frames, and the calls of the source.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use store_core::message::{
    ExportedDisk, Hello, Kind, LocateExtents, Operation as _, ReleaseStaged, Stage, StageWindow,
    encode_failure,
};
use store_core::{ErrorCode, Frame, FrameBuffer, WireError};
use te_core::Secret;

use super::config::StageConfig;
use super::desk::{Answer, Asked, Desk, Order};
use super::greeting::Door;
use super::server::Shared;
use super::source::{Hub, StageJob, StageSource};

pub(super) const LISTENER: mio::Token = Token(0);
pub(super) const WAKE: mio::Token = Token(1);
/// Tokens from here on are numbers of connections.
const CONNECTIONS: usize = 2;

/// Most objects, or tickets, in one request.
pub(super) const ITEMS_MAX: usize = 4096;
/// Longest frame that a reader sends, bytes: a request with that many objects is shorter.
const FRAME_BYTES_MAX: usize = 256 << 10;
/// A reader that leaves more bytes of answers unread is cut off.
const UNREAD_BYTES_MAX: usize = 1 << 20;
const READ_BYTES: usize = 16 << 10;
/// How long a connection may take to greet.
const GREETING: Duration = Duration::from_secs(5);
/// How often connections without a greeting are looked for.
const SWEEP: Duration = Duration::from_secs(1);

/// State of the thread.
pub(super) struct Serving {
    config: StageConfig,
    cluster: Secret,
    listener: TcpListener,
    poll: Poll,
    source: Arc<dyn StageSource>,
    hub: Arc<Hub>,
    shared: Arc<Shared>,
    desk: Desk,
    connections: HashMap<usize, Connection>,
    /// The token of the next connection.
    next: usize,
    orders: Vec<Order>,
    swept: Instant,
}

struct Connection {
    stream: TcpStream,
    door: Door,
    since: Instant,
    input: FrameBuffer,
    out: Vec<u8>,
    written: usize,
    /// Requests that are not answered.
    asked: u32,
    /// It is closed when everything is written.
    closing: bool,
}

impl Serving {
    pub(super) fn new(
        config: StageConfig,
        cluster: Secret,
        listener: TcpListener,
        poll: Poll,
        source: Arc<dyn StageSource>,
        hub: Arc<Hub>,
        shared: Arc<Shared>,
    ) -> Self {
        let region = hub.region();
        let desk = Desk::new(config.clone(), region.addr(), region.len() as u64);
        Self {
            config,
            cluster,
            listener,
            poll,
            source,
            hub,
            shared,
            desk,
            connections: HashMap::new(),
            next: CONNECTIONS,
            orders: Vec::new(),
            swept: Instant::now(),
        }
    }

    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        let mut ended = Vec::new();
        self.publish();
        while !self.shared.stop.load(Ordering::Acquire) {
            let wait = self.desk.due_at().map(|at| at.saturating_duration_since(Instant::now()));
            // Rounded up: the system counts in milliseconds, and an early return would spin.
            let wait = wait.map_or(SWEEP, |wait| (wait + Duration::from_millis(1)).min(SWEEP));
            if let Err(error) = self.poll.poll(&mut events, Some(wait))
                && error.kind() != ErrorKind::Interrupted
            {
                log::error!("the stage service ends: waiting for its connections failed: {error}");
                return;
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept(),
                    WAKE => {}
                    Token(token) => self.serve(token),
                }
            }
            self.hub.take_ended(&mut ended);
            for (number, end) in ended.drain(..) {
                let answer = self.desk.job_ended(Instant::now(), number, end);
                self.answer(answer);
            }
            let now = Instant::now();
            while let Some(answer) = self.desk.expire(now) {
                self.answer(Some(answer));
            }
            self.sweep(now);
            self.publish();
        }
    }

    fn publish(&self) {
        let counters =
            super::StageCounters { connections: self.connections.len() as u64, ..self.desk.counted() };
        *self.shared.counters.lock().unwrap_or_else(PoisonError::into_inner) = counters;
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if let Err(error) = self.greet_newcomer(stream) {
                        log::debug!("a reader could not be accepted: {error}");
                        self.desk.counters.connections_refused_total += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    // For example too many open files. The listener reports again when the next one comes.
                    log::warn!("the stage service cannot accept a reader: {error}");
                    return;
                }
            }
        }
    }

    fn greet_newcomer(&mut self, mut stream: TcpStream) -> io::Result<()> {
        if self.connections.len() >= self.config.connections_max as usize {
            let mut out = Vec::new();
            // Id 0 is about the connection itself.
            encode_failure(&mut out, 0, 0, ErrorCode::TooManyConnections);
            let _ = stream.write(&out)?;
            return Err(io::Error::other("there are connections_max connections"));
        }
        stream.set_nodelay(true)?;
        let door = Door::new().map_err(|error| io::Error::from_raw_os_error(error.code))?;
        let token = self.next;
        self.poll.registry().register(&mut stream, Token(token), Interest::READABLE | Interest::WRITABLE)?;
        self.next += 1;
        let connection = Connection {
            stream,
            door,
            since: Instant::now(),
            input: FrameBuffer::new(),
            out: Vec::new(),
            written: 0,
            asked: 0,
            closing: false,
        };
        self.connections.insert(token, connection);
        // What came with the connection may not be reported again.
        self.serve(token);
        Ok(())
    }

    /// Reads and answers what has arrived, and writes what could not be written before.
    fn serve(&mut self, token: usize) {
        let Some(mut connection) = self.connections.remove(&token) else { return };
        let mut goes_on = self.read(token, &mut connection);
        if let Err(error) = &mut goes_on {
            log::debug!("a reader of the stage service is cut off: {error}");
        }
        if goes_on.is_ok() && connection.write() {
            self.connections.insert(token, connection);
        } else {
            self.desk.connection_ended(Instant::now(), token as u64);
        }
    }

    /// # Errors
    /// The connection is to be closed.
    fn read(&mut self, token: usize, connection: &mut Connection) -> io::Result<()> {
        loop {
            match connection.stream.read(connection.input.spare_mut(READ_BYTES)) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => connection.input.filled(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            // The requests in the buffer are moved out while they are carried out.
            let mut input = std::mem::take(&mut connection.input);
            let done = self.frames(token, connection, &mut input);
            let waiting = input.pending_bytes();
            connection.input = input;
            if connection.closing {
                return Ok(());
            }
            if let Err(error) = done {
                self.desk.counters.broken_total += 1;
                if let WireError::Version { request_id, kind, .. } = error {
                    encode_failure(&mut connection.out, kind, request_id, error.code());
                    connection.closing = true;
                    return Ok(());
                }
                return Err(io::Error::other(error));
            }
            if waiting > FRAME_BYTES_MAX || connection.out.len() - connection.written > UNREAD_BYTES_MAX {
                self.desk.counters.broken_total += 1;
                return Err(io::Error::other("a frame is too long, or answers are not read"));
            }
        }
    }

    fn frames(
        &mut self,
        token: usize,
        connection: &mut Connection,
        input: &mut FrameBuffer,
    ) -> Result<(), WireError> {
        while !connection.closing
            && let Some(frame) = input.next_frame()?
        {
            let start = connection.out.len();
            if let Err(error) = self.carry_out(token, connection, &frame) {
                connection.out.truncate(start);
                encode_failure(&mut connection.out, frame.header.kind, frame.header.request_id, error);
            }
        }
        Ok(())
    }

    fn carry_out(
        &mut self,
        token: usize,
        connection: &mut Connection,
        frame: &Frame<'_>,
    ) -> Result<(), ErrorCode> {
        if frame.header.response {
            return Err(ErrorCode::InvalidParams);
        }
        let id = frame.header.request_id;
        let kind = Kind::from_byte(frame.header.kind).ok_or(ErrorCode::NotSupported)?;
        if kind == Kind::Hello {
            let (greeting, _) = Hello::decode_request(frame.body)?;
            let welcome = connection.door.greet(&greeting, &self.cluster, self.config.window_ms);
            if welcome.is_err() {
                self.desk.counters.connections_refused_total += 1;
                connection.closing = true;
            }
            return Ok(Hello::encode_response(&mut connection.out, id, &welcome?, std::iter::empty())?);
        }
        if !connection.door.is_open() {
            return Err(ErrorCode::PermissionDenied);
        }
        match kind {
            Kind::Stage => self.stage(token, connection, frame),
            Kind::ReleaseStaged => {
                let ((), tickets) = ReleaseStaged::decode_request(frame.body)?;
                tickets.for_each(|ticket| self.desk.release(token as u64, ticket));
                Ok(ReleaseStaged::encode_response(&mut connection.out, id, &(), std::iter::empty())?)
            }
            Kind::LocateExtents => self.locate(connection, frame),
            _ => Err(ErrorCode::NotSupported),
        }
    }

    fn locate(&self, connection: &mut Connection, frame: &Frame<'_>) -> Result<(), ErrorCode> {
        let (disk, sequences) = LocateExtents::decode_request(frame.body)?;
        if sequences.len() > ITEMS_MAX {
            return Err(ErrorCode::KeysUltraLimit);
        }
        let sequences: Vec<u64> = sequences.collect();
        let (exported, extents) = self.source.locate(disk, &sequences).ok_or(ErrorCode::NotSupported)?;
        let said = ExportedDisk {
            uuid: exported.uuid,
            bytes: exported.bytes,
            extent_bytes: exported.extent_bytes,
            address: &exported.address.to_string(),
            nqn: &exported.nqn,
            nsid: exported.nsid,
            offset: exported.offset,
        };
        let extents = extents.into_iter().map(|at| at.ok_or(ErrorCode::ObjectNotFound));
        Ok(LocateExtents::encode_response(&mut connection.out, frame.header.request_id, &said, extents)?)
    }

    fn stage(
        &mut self,
        token: usize,
        connection: &mut Connection,
        frame: &Frame<'_>,
    ) -> Result<(), ErrorCode> {
        let (head, items) = Stage::decode_request(frame.body)?;
        if items.len() > ITEMS_MAX {
            return Err(ErrorCode::KeysUltraLimit);
        }
        if connection.asked >= self.config.requests_max {
            self.desk.counters.refused_total += items.len() as u64;
            return Err(ErrorCode::UnavailableInCurrentStatus);
        }
        let asked =
            Asked { connection: token as u64, id: frame.header.request_id, deadline_ms: head.deadline_ms };
        let answer = self.desk.request(Instant::now(), &asked, items, &mut self.orders);
        match answer {
            Some(answer) => answer.encode(&mut connection.out),
            None => connection.asked += 1,
        }
        for Order { number, object, place, deadline } in self.orders.drain(..) {
            // The place lies inside the memory.
            if let Ok(buffer) = self.hub.region().span().part(place.offset, place.bytes) {
                self.source.stage(StageJob::new(object, deadline, buffer, number, Arc::clone(&self.hub)));
            }
        }
        Ok(())
    }

    /// Sends an answer, if its connection is still there.
    fn answer(&mut self, answer: Option<Answer>) {
        let Some(answer) = answer else { return };
        let token = answer.connection as usize;
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.asked = connection.asked.saturating_sub(1);
        answer.encode(&mut connection.out);
        if !connection.write() {
            self.connections.remove(&token);
            self.desk.connection_ended(Instant::now(), token as u64);
        }
    }

    /// Closes connections that have not greeted in time.
    fn sweep(&mut self, now: Instant) {
        if now < self.swept + SWEEP {
            return;
        }
        self.swept = now;
        let is_late = |(token, connection): (&usize, &Connection)| {
            (!connection.door.is_open() && now >= connection.since + GREETING).then_some(*token)
        };
        let late: Vec<usize> = self.connections.iter().filter_map(is_late).collect();
        for token in late {
            self.connections.remove(&token);
            self.desk.counters.connections_refused_total += 1;
            self.desk.connection_ended(now, token as u64);
        }
    }
}

impl Connection {
    /// Writes as much as the socket takes. Returns whether the connection goes on.
    fn write(&mut self) -> bool {
        while self.written < self.out.len() {
            match self.stream.write(&self.out[self.written..]) {
                Ok(0) => return false,
                Ok(len) => self.written += len,
                // The socket is reported when it takes more.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        self.out.clear();
        self.written = 0;
        !self.closing
    }
}

impl Answer {
    fn encode(&self, out: &mut Vec<u8>) {
        let window = StageWindow { window_ms: self.window_ms };
        let items = self.items.iter().copied();
        if let Err(error) = Stage::encode_response(out, self.id, &window, items) {
            encode_failure(out, Kind::Stage as u8, self.id, error.code());
        }
    }
}
