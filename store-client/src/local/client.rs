//! [`LocalClient`]: objects in, objects out, by way of the node on this machine.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use store_core::message::PutOptions;
use store_core::{DEFAULT_TENANT, ErrorCode, FrameBuffer, Key, WireError};
use te_host::BorrowedMemory;
use te_host::fork::Mark;

use super::arena::{Arena, LocalBuffer, LocalRange};
use super::error::LocalError;
use super::protocol::{
    Answer, FRAME_BYTES_MAX, Got, Item, KEY_BYTES_PER_REQUEST_MAX, KEYS_PER_REQUEST_MAX, Refusal, Request,
    Span, VERSION, encode,
};

/// What a [`LocalClient`] can be told.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// Where the node listens.
    pub path: PathBuf,
    /// On whose behalf; the node acts for one tenant. Default the default tenant.
    pub tenant: String,
    /// Memory to share with the node, bytes; the node may give less. Pages count when they are first used. A value that does not
    /// fit makes the client ask for more by itself, as long as it holds no buffer. Default 64 MiB.
    pub arena_bytes: u64,
    /// How long an answer may take, milliseconds: longer than the node's own limits on an operation. Default 30,000.
    pub call_ms_max: u32,
    /// How long the greeting may take, milliseconds. Default 2,000.
    pub connect_ms_max: u32,
    /// How long a caller spins before it sleeps in the kernel, microseconds. Default 50.
    pub spin_us: u32,
    /// Users beside our own and root whose node is trusted with our objects. Default none.
    pub trusted_uids: Vec<u32>,
}

impl LocalConfig {
    /// The defaults, for the node there.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            tenant: DEFAULT_TENANT.to_owned(),
            arena_bytes: 64 << 20,
            call_ms_max: 30_000,
            connect_ms_max: 2_000,
            spin_us: 50,
            trusted_uids: Vec::new(),
        }
    }
}

/// A client of the node on this machine: no engine, no fabric, no thread. One owner at a time. See the [module](super).
///
/// A key that is not found, or not found intact and in time, is a miss: `None`. A connection that was lost is made anew by the
/// next call, with a new arena: buffers of the old one can be read, but not put or got into.
#[derive(Debug)]
pub struct LocalClient {
    config: LocalConfig,
    connection: Option<Connection>,
    id: u64,
    /// How long the value was that was read last: the next is probably as long.
    guess_bytes: u64,
    /// The longest arena that the node gives, as far as is known.
    arena_bytes_max: u64,
    mark: Mark,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    input: FrameBuffer,
    out: Vec<u8>,
    arena: Arc<Arena>,
}

/// Room for a value of unknown length, at first.
const GUESS_BYTES: u64 = 64 << 10;
const READ_BYTES: usize = 16 << 10;

impl LocalClient {
    /// Connects and gets an arena.
    ///
    /// # Errors
    /// Nobody there, somebody else's node, or one that refuses.
    pub fn connect(config: LocalConfig) -> Result<Self, LocalError> {
        let (guess_bytes, arena_bytes_max) = (GUESS_BYTES, u64::MAX);
        let mut this =
            Self { config, connection: None, id: 0, guess_bytes, arena_bytes_max, mark: Mark::new() };
        this.connection()?;
        Ok(this)
    }

    /// Bytes of the arena; 0 while there is no connection.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.connection.as_ref().map_or(0, |connection| connection.arena.len())
    }

    /// Takes a part of the arena, for [`put_from`](Self::put_from) and [`get_into`](Self::get_into). Its contents are whatever was there.
    ///
    /// # Errors
    /// `ArenaFull`; a connection that cannot be made.
    pub fn alloc(&mut self, len: u64) -> Result<LocalBuffer, LocalError> {
        let arena = Arc::clone(&self.connection()?.arena);
        arena.alloc(len)
    }

    /// As [`alloc`](Self::alloc), for a value that the caller does not hold in the arena. One that is longer than the arena has
    /// the arena exchanged for a longer one, unless somebody holds a buffer of it.
    fn alloc_value(&mut self, len: u64) -> Result<LocalBuffer, LocalError> {
        let arena = Arc::clone(&self.connection()?.arena);
        let idle = Arc::strong_count(&arena) == 2;
        if len <= arena.len() || len > self.arena_bytes_max || !idle {
            return arena.alloc(len);
        }
        drop(arena);
        // First, so that a node that lends little has room for the other.
        self.connection = None;
        let larger = LocalConfig { arena_bytes: len, ..self.config.clone() };
        let deadline = Instant::now() + Duration::from_millis(self.config.connect_ms_max.into());
        let opened = loop {
            match Connection::open(&larger) {
                // It may not have seen yet that the other is gone.
                Err(LocalError::Refused(Refusal::Clients { .. } | Refusal::Memory { .. }))
                    if Instant::now() < deadline =>
                {
                    thread::sleep(EXCHANGE_PAUSE);
                }
                opened => break opened?,
            }
        };
        let given = opened.arena.len();
        if given < len {
            self.arena_bytes_max = given;
        }
        self.connection.insert(opened).arena.alloc(len)
    }

    /// Stores a copy of `value`. Gives `false` when the key is taken, and leaves the object there as it is.
    ///
    /// # Errors
    /// No room, an invalid key, no value, a value longer than the arena that the node lends, or a node that cannot be asked.
    pub fn put(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<bool, LocalError> {
        let buffer = self.filled(value)?;
        self.put_from(key, buffer.all(), options)
    }

    /// Stores many. An item that fails does so alone; one whose key is taken ends `ObjectAlreadyExists`.
    pub fn batch_put(
        &mut self,
        items: &[(&[u8], &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        while results.len() < items.len() {
            let rest = &items[results.len()..];
            // As many as the arena has room for now.
            let mut buffers = Vec::new();
            let mut failed = None;
            for (_, value) in rest.iter().take(KEYS_PER_REQUEST_MAX) {
                match self.filled(value) {
                    Ok(buffer) => buffers.push(buffer),
                    Err(error) => {
                        failed = Some(error.code());
                        break;
                    }
                }
            }
            if let (true, Some(code)) = (buffers.is_empty(), failed) {
                results.push(Err(code));
                continue;
            }
            let items: Vec<_> =
                rest.iter().zip(&buffers).map(|((key, _), buffer)| (*key, buffer.all())).collect();
            results.extend(self.batch_put_from(&items, options));
        }
        results
    }

    /// Stores an object straight from the arena. Gives `false` when the key is taken.
    ///
    /// # Errors
    /// As [`put`](Self::put); `OtherArena`, `OutOfRange`; `Held` while something may still write the buffer. Without an answer the
    /// node may still store what is in the buffer, so that nothing can be written to it any more.
    pub fn put_from(
        &mut self,
        key: &[u8],
        range: LocalRange<'_>,
        options: &PutOptions,
    ) -> Result<bool, LocalError> {
        match self.put_request(&[(key, range)], options)?.pop() {
            Some(Ok(())) => Ok(true),
            Some(Err(ErrorCode::ObjectAlreadyExists)) => Ok(false),
            Some(Err(code)) => Err(code.into()),
            None => Err(ErrorCode::InternalError.into()),
        }
    }

    /// Stores many objects straight from the arena.
    pub fn batch_put_from(
        &mut self,
        items: &[(&[u8], LocalRange<'_>)],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0) {
            match self.put_request(items, options) {
                Ok(answers) => results.extend(answers),
                Err(error) => results.extend(items.iter().map(|_| Err(error.code()))),
            }
        }
        results
    }

    /// Reads a value. `None` is a miss.
    ///
    /// # Errors
    /// An invalid key, a value longer than the arena that the node lends, or a node that cannot be asked.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, LocalError> {
        self.get_buffer(key)?.map(|buffer| buffer.to_vec()).transpose()
    }

    /// Reads a value and leaves it in the arena, where it is as long as the buffer lives. `None` is a miss.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn get_buffer(&mut self, key: &[u8]) -> Result<Option<LocalBuffer>, LocalError> {
        let guess_bytes = self.guess_bytes;
        let mut first = Some(Arc::clone(&self.connection()?.arena).alloc_up_to(guess_bytes)?);
        let mut room = guess_bytes;
        for _ in 0..LENGTH_TRIES {
            let mut buffer = match first.take() {
                Some(buffer) => buffer,
                None => self.alloc_value(room)?,
            };
            match self.get_request(&[(key, buffer.all())])?.pop() {
                Some(Got::Read(len)) => {
                    self.guess_bytes = len.max(1);
                    buffer.truncate(len);
                    return Ok(Some(buffer));
                }
                Some(Got::TooLong(len)) => room = len,
                Some(Got::Miss | Got::Held) => return Ok(None),
                Some(Got::Failed(code)) => return Err(code.into()),
                None => return Err(ErrorCode::InternalError.into()),
            }
        }
        // Whoever writes this key makes it longer each time: what was there before is gone.
        Ok(None)
    }

    /// Reads many values.
    pub fn batch_get(&mut self, keys: &[&[u8]]) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
        let mut results = Vec::with_capacity(keys.len());
        while results.len() < keys.len() {
            let rest = &keys[results.len()..];
            let buffers: Result<Vec<_>, _> = self.some_of(rest.len().min(KEYS_PER_REQUEST_MAX));
            let buffers = match buffers {
                Ok(buffers) => buffers,
                Err(error) => {
                    results.push(Err(error.code()));
                    continue;
                }
            };
            let items: Vec<_> = rest.iter().zip(&buffers).map(|(key, buffer)| (*key, buffer.all())).collect();
            // One request may carry fewer; the others have their turn.
            let Some(items) = chunks(&items, |item| item.0).next() else { break };
            let answers = match self.get_request(items) {
                Ok(answers) => answers,
                Err(error) => {
                    results.extend(items.iter().map(|_| Err(error.code())));
                    continue;
                }
            };
            let mut longer = Vec::new();
            let first = results.len();
            for ((index, got), (_, range)) in answers.into_iter().enumerate().zip(items) {
                results.push(match got {
                    Got::Read(len) => {
                        self.guess_bytes = len.max(1);
                        let mut bytes = vec![0; len as usize];
                        range.buffer.read(0, &mut bytes).map(|()| Some(bytes)).map_err(|error| error.code())
                    }
                    Got::TooLong(_) => {
                        longer.push(index);
                        Ok(None)
                    }
                    Got::Miss | Got::Held => Ok(None),
                    Got::Failed(code) => Err(code),
                });
            }
            // These want more room each, which the others' buffers may take up.
            drop(buffers);
            for index in longer {
                results[first + index] = self.get(rest[index]).map_err(|error| error.code());
            }
        }
        results
    }

    /// Reads an object straight into the arena; gives its length. `None` is a miss; the memory may have been written all the
    /// same.
    ///
    /// # Errors
    /// As [`put_from`](Self::put_from), and `BufferOverflow` when the object is longer than the range.
    pub fn get_into(&mut self, key: &[u8], range: LocalRange<'_>) -> Result<Option<u64>, LocalError> {
        let got = self.get_request(&[(key, range)])?.pop();
        got.map_or(Err(ErrorCode::InternalError), fetched).map_err(LocalError::from)
    }

    /// Reads many objects straight into the arena. Ranges must not overlap: what does is read with mixed bytes, and the
    /// checksum makes it a miss.
    pub fn batch_get_into(
        &mut self,
        items: &[(&[u8], LocalRange<'_>)],
    ) -> Vec<Result<Option<u64>, ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0) {
            match self.get_request(items) {
                Ok(answers) => results.extend(answers.into_iter().map(fetched)),
                Err(error) => results.extend(items.iter().map(|_| Err(error.code()))),
            }
        }
        results
    }

    /// Whether a get would find it. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// A node, or a master, that cannot be asked.
    pub fn exists(&mut self, key: &[u8]) -> Result<bool, LocalError> {
        Ok(self.batch_exists(&[key])?.first().copied().unwrap_or(false))
    }

    /// Whether gets would find them.
    ///
    /// # Errors
    /// As [`exists`](Self::exists).
    pub fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, LocalError> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key) {
            let request = Request::Exists { keys: keys.iter().map(|key| Key(key)).collect() };
            match self.ask(&request)? {
                Answer::Whether(answers) if answers.len() == keys.len() => found.extend(answers),
                other => return Err(self.nonsense(other)),
            }
        }
        Ok(found)
    }

    /// Forgets an object; with `force` even under a lease or while it is written. Gives `false` when there was none.
    ///
    /// # Errors
    /// `ObjectHasLease`, `ReplicaIsNotReady`; a node, or a master, that cannot be asked.
    pub fn remove(&mut self, key: &[u8], force: bool) -> Result<bool, LocalError> {
        match self.batch_remove(&[key], force)?.pop() {
            Some(Ok(())) => Ok(true),
            Some(Err(ErrorCode::KeyNotFound)) => Ok(false),
            Some(Err(code)) => Err(code.into()),
            None => Err(ErrorCode::InternalError.into()),
        }
    }

    /// Forgets many.
    ///
    /// # Errors
    /// As [`exists`](Self::exists).
    pub fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        force: bool,
    ) -> Result<Vec<Result<(), ErrorCode>>, LocalError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key) {
            let request = Request::Remove { force, keys: keys.iter().map(|key| Key(key)).collect() };
            match self.ask(&request)? {
                Answer::Done(answers) if answers.len() == keys.len() => results.extend(answers),
                other => return Err(self.nonsense(other)),
            }
        }
        Ok(results)
    }

    fn put_request(
        &mut self,
        items: &[(&[u8], LocalRange<'_>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<(), ErrorCode>>, LocalError> {
        let named = self.name(items)?;
        let request = Request::Put { options: *options, items: named };
        let answer = match self.ask(&request) {
            Ok(Answer::Done(answers)) if answers.len() == items.len() => Ok(answers),
            Ok(other) => Err(self.nonsense(other)),
            Err(error) => Err(error),
        };
        if answer.is_err() && self.connection.is_none() {
            // Without an answer nobody knows whether the node will still store what is in them.
            items.iter().for_each(|(_, range)| range.buffer.set_asked());
        }
        answer
    }

    fn get_request(&mut self, items: &[(&[u8], LocalRange<'_>)]) -> Result<Vec<Got>, LocalError> {
        let request = Request::Get { items: self.name(items)? };
        let answer = match self.ask(&request) {
            Ok(Answer::Got(answers)) if answers.len() == items.len() => Ok(answers),
            Ok(other) => Err(self.nonsense(other)),
            Err(error) => Err(error),
        };
        match &answer {
            Ok(answers) => {
                for (got, (_, range)) in answers.iter().zip(items) {
                    let claimed = match got {
                        Got::Read(len) => *len,
                        _ => 0,
                    };
                    if claimed > range.len {
                        return Err(self.broken(WireError::Body.into()));
                    }
                    if *got == Got::Held {
                        range.buffer.set_held(true);
                    }
                }
            }
            // Without an answer nobody knows whether the node still reads into them.
            Err(_) if self.connection.is_none() => {
                items.iter().for_each(|(_, range)| range.buffer.set_held(true));
            }
            Err(_) => {}
        }
        answer
    }

    /// The ranges as a request names them.
    fn name<'a>(&mut self, items: &[(&'a [u8], LocalRange<'_>)]) -> Result<Vec<Item<'a>>, LocalError> {
        let arena = Arc::clone(&self.connection()?.arena);
        let mut named = Vec::with_capacity(items.len());
        for (key, range) in items {
            if !range.buffer.is_of(&arena) {
                return Err(LocalError::OtherArena);
            }
            if range.buffer.is_held() && !self.settle(range.buffer)? {
                return Err(LocalError::Held);
            }
            let span = range.in_arena().ok_or(LocalError::OutOfRange)?;
            named.push(Item { key: Key(key), span });
        }
        Ok(named)
    }

    /// Whether nothing writes a buffer any more that was held.
    fn settle(&mut self, buffer: &LocalBuffer) -> Result<bool, LocalError> {
        let over = self.ask_settled(vec![buffer.in_arena()])?.first() == Some(&true);
        if over {
            buffer.set_held(false);
        }
        Ok(over)
    }

    /// Takes back what held buffers left behind, as far as it is not written any more.
    fn sweep(&mut self) -> Result<(), LocalError> {
        let Some(connection) = &self.connection else { return Ok(()) };
        let arena = Arc::clone(&connection.arena);
        let held = arena.held();
        for held in held.chunks(KEYS_PER_REQUEST_MAX) {
            let over = self.ask_settled(held.to_vec())?;
            let over: Vec<Span> =
                held.iter().zip(over).filter(|(_, over)| *over).map(|(span, _)| *span).collect();
            arena.settled(&over);
        }
        Ok(())
    }

    fn ask_settled(&mut self, ranges: Vec<Span>) -> Result<Vec<bool>, LocalError> {
        let count = ranges.len();
        match self.ask(&Request::Settled { ranges })? {
            Answer::Whether(answers) if answers.len() == count => Ok(answers),
            other => Err(self.nonsense(other)),
        }
    }

    /// A buffer with these bytes.
    fn filled(&mut self, value: &[u8]) -> Result<LocalBuffer, LocalError> {
        let buffer = self.alloc_value(value.len() as u64)?;
        buffer.write(0, value)?;
        Ok(buffer)
    }

    /// Buffers for values of unknown length: at least one, at most `count`.
    fn some_of(&mut self, count: usize) -> Result<Vec<LocalBuffer>, LocalError> {
        let arena = Arc::clone(&self.connection()?.arena);
        let mut buffers = vec![arena.alloc_up_to(self.guess_bytes)?];
        while buffers.len() < count
            && let Ok(buffer) = arena.alloc(self.guess_bytes)
        {
            buffers.push(buffer);
        }
        Ok(buffers)
    }

    /// The connection; makes one when there is none.
    fn connection(&mut self) -> Result<&mut Connection, LocalError> {
        self.check_process()?;
        if self.connection.is_none() {
            self.connection = Some(Connection::open(&self.config)?);
        } else if self.connection.as_ref().is_some_and(|connection| !connection.arena.held().is_empty()) {
            self.sweep()?;
        }
        self.connection.as_mut().ok_or(LocalError::Lost { source: ErrorKind::NotConnected.into() })
    }

    fn check_process(&self) -> Result<(), LocalError> {
        if self.mark.is_forked() { Err(LocalError::Forked) } else { Ok(()) }
    }

    fn ask(&mut self, request: &Request<'_>) -> Result<Answer, LocalError> {
        self.check_process()?;
        self.id += 1;
        if self.connection.is_none() {
            self.connection = Some(Connection::open(&self.config)?);
        }
        let Some(connection) = &mut self.connection else {
            return Err(LocalError::Lost { source: ErrorKind::NotConnected.into() });
        };
        encode(&mut connection.out, self.id, false, request)?;
        match connection.exchange(self.id, &self.config) {
            Ok(Answer::Failed(code)) => Err(code.into()),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// The connection is of no more use, and nor is its arena.
    fn broken(&mut self, error: LocalError) -> LocalError {
        self.connection = None;
        error
    }

    fn nonsense(&mut self, answer: Answer) -> LocalError {
        match answer {
            Answer::Refused(refusal) => self.broken(LocalError::Refused(refusal)),
            _ => self.broken(WireError::Body.into()),
        }
    }
}

/// Between two tries to exchange an arena for a longer one.
const EXCHANGE_PAUSE: Duration = Duration::from_millis(5);

/// Times that the room for a value of unknown length is adapted.
const LENGTH_TRIES: u32 = 3;

impl Connection {
    fn open(config: &LocalConfig) -> Result<Self, LocalError> {
        let failed = |source| LocalError::Connect { path: config.path.clone(), source };
        let mut stream = UnixStream::connect(&config.path).map_err(failed)?;
        check_peer(&stream, config)?;
        let deadline = Instant::now() + Duration::from_millis(config.connect_ms_max.into());
        let mut out = Vec::new();
        let hello =
            Request::Hello { version: VERSION, tenant: &config.tenant, arena_bytes: config.arena_bytes };
        encode(&mut out, 1, false, &hello)?;
        // A node that turns us away says why before it reads anything, and may have hung up by now.
        let hung_up = match stream.write_all(&out) {
            Ok(()) => None,
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Some(error)
            }
            Err(error) => return Err(failed(error)),
        };
        let mut input = FrameBuffer::new();
        let (answer, lent) = match (greet(&stream, &mut input, deadline, config), hung_up) {
            (Err(LocalError::Lost { .. }), Some(error)) => return Err(failed(error)),
            (greeted, _) => greeted?,
        };
        let arena_bytes = match answer {
            Answer::Welcome { arena_bytes } => arena_bytes,
            Answer::Refused(refusal) => return Err(LocalError::Refused(refusal)),
            _ => return Err(WireError::Body.into()),
        };
        let lent = lent.ok_or(LocalError::Wire(WireError::Body))?;
        let memory =
            BorrowedMemory::map(lent.as_fd(), arena_bytes).map_err(|source| LocalError::Map { source })?;
        stream.set_nonblocking(true).map_err(failed)?;
        out.clear();
        Ok(Self { stream, input, out, arena: Arc::new(Arena::new(memory)) })
    }

    /// Sends what is queued and waits for the answer to request `id`.
    fn exchange(&mut self, id: u64, config: &LocalConfig) -> Result<Answer, LocalError> {
        let deadline = Instant::now() + Duration::from_millis(config.call_ms_max.into());
        self.send(deadline, config)?;
        let spin_end = Instant::now() + Duration::from_micros(config.spin_us.into());
        loop {
            if let Some(frame) = self.input.next_frame()? {
                // One request at a time is under way.
                if frame.header.request_id != id {
                    return Err(WireError::Body.into());
                }
                return Ok(Answer::decode(&frame)?);
            }
            if self.input.pending_bytes() > FRAME_BYTES_MAX {
                return Err(WireError::TooLong { bytes: self.input.pending_bytes() }.into());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(LocalError::TimedOut { call_ms_max: config.call_ms_max });
            }
            match self.stream.read(self.input.spare_mut(READ_BYTES)) {
                Ok(0) => return Err(lost(ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.input.filled(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if now < spin_end {
                        // Should the node wait for this very core, let it have it.
                        thread::yield_now();
                    } else {
                        self.sleep(deadline - now)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
    }

    fn send(&mut self, deadline: Instant, config: &LocalConfig) -> Result<(), LocalError> {
        let mut written = 0;
        while written < self.out.len() {
            match self.stream.write(&self.out[written..]) {
                Ok(len) => written += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(LocalError::TimedOut { call_ms_max: config.call_ms_max });
                    }
                    thread::sleep(FULL_PAUSE);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(error)),
            }
        }
        self.out.clear();
        Ok(())
    }

    /// Sleeps until something arrives, at most `timeout`, and takes it.
    fn sleep(&mut self, timeout: Duration) -> Result<(), LocalError> {
        let stream = &mut self.stream;
        // Zero would mean for ever.
        stream.set_read_timeout(Some(timeout.max(Duration::from_micros(1)))).map_err(lost)?;
        stream.set_nonblocking(false).map_err(lost)?;
        let result = stream.read(self.input.spare_mut(READ_BYTES));
        stream.set_nonblocking(true).map_err(lost)?;
        match result {
            Ok(0) => Err(lost(ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                self.input.filled(len);
                Ok(())
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(lost(error)),
        }
    }
}

/// How long to wait when the socket is full.
const FULL_PAUSE: Duration = Duration::from_micros(50);

/// A node that runs as somebody else could read all that we store.
fn check_peer(stream: &UnixStream, config: &LocalConfig) -> Result<(), LocalError> {
    let failed = |source| LocalError::Connect { path: config.path.clone(), source };
    let uid = te_host::peer_uid(stream.as_fd()).map_err(failed)?;
    if uid == 0 || uid == te_host::own_uid() || config.trusted_uids.contains(&uid) {
        return Ok(());
    }
    Err(LocalError::Stranger { path: config.path.clone(), uid })
}

/// The answer to a hello, and what came with it.
fn greet(
    stream: &UnixStream,
    input: &mut FrameBuffer,
    deadline: Instant,
    config: &LocalConfig,
) -> Result<(Answer, Option<OwnedFd>), LocalError> {
    let mut lent = None;
    loop {
        if let Some(frame) = input.next_frame()? {
            return Ok((Answer::decode(&frame)?, lent));
        }
        if input.pending_bytes() > FRAME_BYTES_MAX {
            return Err(WireError::TooLong { bytes: input.pending_bytes() }.into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(LocalError::TimedOut { call_ms_max: config.connect_ms_max });
        }
        stream.set_read_timeout(Some(left)).map_err(lost)?;
        match te_host::recv_with_fd(stream.as_fd(), input.spare_mut(READ_BYTES)) {
            Ok((0, _)) => return Err(lost(ErrorKind::UnexpectedEof.into())),
            Ok((len, fd)) => {
                input.filled(len);
                lent = lent.or(fd);
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(lost(error)),
        }
    }
}

fn lost(source: io::Error) -> LocalError {
    LocalError::Lost { source }
}

fn fetched(got: Got) -> Result<Option<u64>, ErrorCode> {
    match got {
        Got::Read(len) => Ok(Some(len)),
        Got::Miss | Got::Held => Ok(None),
        Got::TooLong(_) => Err(ErrorCode::BufferOverflow),
        Got::Failed(code) => Err(code),
    }
}

/// Cuts a batch into what one request can carry.
fn chunks<'a, T>(
    mut items: &'a [T],
    key: impl for<'t> Fn(&'t T) -> &'t [u8],
) -> impl Iterator<Item = &'a [T]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |item: &&T| {
            bytes += key(item).len();
            bytes <= KEY_BYTES_PER_REQUEST_MAX
        };
        let count = items.iter().take(KEYS_PER_REQUEST_MAX).take_while(fits).count().max(1).min(items.len());
        let (chunk, rest) = items.split_at(count);
        items = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// Whether somebody listens there.
pub(super) fn answers(path: &Path) -> bool {
    UnixStream::connect(path).is_ok()
}
