//! [`LocalClient`]: gets and puts objects through the node on this machine.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use store_core::message::{Prefetched, PutOptions, RetentionChange};
use store_core::{DEFAULT_TENANT, ErrorCode, Key, WireError};
use te_host::fork::Mark;

use super::arena::{Arena, LocalBuffer, LocalRange};
use super::connection::{Connection, lost};
use super::error::LocalError;
use super::protocol::{
    Answer, Got, Item, KEY_BYTES_PER_REQUEST_MAX, KEYS_PER_REQUEST_MAX, Refusal, Request, Span, Wanted,
    encode,
};
use crate::client::{found, removed};
use crate::error::StoreError;
use crate::item::{Get, Part, Put, Sink, Source, Tally};
use crate::store::{RemoveMode, Store};

/// Settings of a [`LocalClient`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LocalConfig {
    /// Path of the node's socket.
    pub path: PathBuf,
    /// Tenant to act for. A node serves local clients of one tenant. Default: the default tenant.
    pub tenant: String,
    /// Memory to share with the node, bytes; the node may give less. A page uses memory from its first use
    /// on. A longer value makes the client request a longer arena, as long as the caller holds no buffer of
    /// the old one. Default 64 MiB.
    pub arena_bytes: u64,
    /// Longest wait for an answer, milliseconds. It should exceed the node's own limits on an operation.
    /// Default 30,000.
    pub call_ms_max: u32,
    /// Longest time for the handshake, milliseconds. Default 2,000.
    pub connect_ms_max: u32,
    /// How long a call spins before it sleeps in the kernel, microseconds. Default 50.
    pub spin_us: u32,
    /// User ids, beside our own and root, whose nodes are trusted with our objects. Default: none.
    pub trusted_uids: Vec<u32>,
}

impl LocalConfig {
    /// The defaults, for the node that listens at this path.
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

/// A client of the node on this machine: no engine, no fabric, no thread. It is used by one thread at a time.
/// Gets and puts are those of [`Store`]; see the [module](super).
///
/// A key that is not found, or not found intact and in time, is a miss: the result is `None`. After a
/// connection was lost, the next call makes a new one with a new arena. Buffers of the old arena can still be
/// read, but not used in gets and puts.
#[derive(Debug)]
pub struct LocalClient {
    config: LocalConfig,
    connection: Option<Connection>,
    id: u64,
    /// Length of the value that was read last: the estimate for the next one.
    guess_bytes: u64,
    /// The longest arena that the node gives, as far as known.
    arena_bytes_max: u64,
    mark: Mark,
}

/// The initial estimate of a value's length.
const GUESS_BYTES: u64 = 64 << 10;

impl LocalClient {
    /// Connects to the node and receives an arena.
    ///
    /// # Errors
    /// The node does not run, runs as an untrusted user, or refuses this client: see [`LocalError`].
    pub fn connect(config: LocalConfig) -> Result<Self, LocalError> {
        let (guess_bytes, arena_bytes_max) = (GUESS_BYTES, u64::MAX);
        let connection = Some(Connection::open(&config)?);
        Ok(Self { config, connection, id: 0, guess_bytes, arena_bytes_max, mark: Mark::new() })
    }

    /// Bytes of the arena; 0 while there is no connection.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.connection.as_ref().map_or(0, |connection| connection.arena.len())
    }

    /// Allocates a part of the arena, from and into which puts and gets move bytes without a copy here
    /// ([`LocalBuffer::part`]). Its contents are undefined.
    ///
    /// # Errors
    /// `ArenaFull`, or no connection to the node.
    pub fn alloc(&mut self, len: u64) -> Result<LocalBuffer, StoreError> {
        let arena = Arc::clone(&self.connection()?.arena);
        arena.alloc(len)
    }

    /// Reads a value and leaves it in the arena, for as long as the buffer lives. `None` is a miss.
    ///
    /// # Errors
    /// As [`get`](Store::get).
    pub fn get_buffer(&mut self, key: &[u8]) -> Result<Option<LocalBuffer>, StoreError> {
        self.read(key, None, u64::MAX)
    }

    /// As [`alloc`](Self::alloc), for a value that the caller does not hold in the arena. If the value is
    /// longer than the arena, the arena is replaced by a longer one, unless the caller holds a buffer of it.
    fn alloc_value(&mut self, len: u64) -> Result<LocalBuffer, StoreError> {
        let arena = Arc::clone(&self.connection()?.arena);
        let idle = Arc::strong_count(&arena) == 2;
        if len <= arena.len() || len > self.arena_bytes_max || !idle {
            return arena.alloc(len);
        }
        drop(arena);
        // The old connection is closed first, so that a node with a low limit has room for the new arena.
        self.connection = None;
        let larger = LocalConfig { arena_bytes: len, ..self.config.clone() };
        let deadline = Instant::now() + Duration::from_millis(self.config.connect_ms_max.into());
        let opened = loop {
            match Connection::open(&larger) {
                // The node may not have noticed yet that the old connection is closed.
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

    /// Reads an object or a part of it, at most `room` bytes, into a new buffer. `None` is a miss.
    fn read(&mut self, key: &[u8], part: Option<Part>, room: u64) -> Result<Option<LocalBuffer>, StoreError> {
        let mut wanted = part.and_then(|(_, len)| len);
        for _ in 0..LENGTH_TRIES {
            let mut buffer = match wanted {
                Some(len) if len > room => return Err(StoreError::TooLong { room }),
                Some(len) => self.alloc_value(len)?,
                None => {
                    let arena = Arc::clone(&self.connection()?.arena);
                    arena.alloc_up_to(self.guess_bytes.min(room))?
                }
            };
            match self.get_request(&[(key, part, buffer.all())])?.pop() {
                Some(Got::Read(len)) => {
                    if part.is_none() {
                        self.guess_bytes = len.max(1);
                    }
                    buffer.truncate(len);
                    return Ok(Some(buffer));
                }
                Some(Got::TooLong(len)) => wanted = Some(len),
                Some(other) => return fetched(other, end_of(part), room).map(|_| None),
                None => return Err(ErrorCode::InternalError.into()),
            }
        }
        // A writer replaced the object by a longer one at each try, and the version that was looked up is
        // gone.
        Ok(None)
    }

    /// Reads as many of the first items as fit the arena, at least one, and returns their number.
    fn get_some(&mut self, items: &mut [Get<'_>]) -> usize {
        let mut places = Vec::new();
        if items.len() > 1 {
            for item in items.iter().take(chunk_len(items, |item| item.key)) {
                match self.place_to_get(item, places.is_empty()) {
                    Ok(place) => places.push(place),
                    Err(_) => break,
                }
            }
        }
        if places.is_empty() {
            let read = self.get_alone(&items[0]);
            deliver(&mut items[0], read);
            return 1;
        }
        let asks: Vec<_> =
            items.iter().zip(&places).map(|(item, place)| (item.key, item.part, place.range())).collect();
        let answers = self.get_request(&asks);
        let count = asks.len();
        let answers = match answers {
            Ok(answers) => answers,
            Err(error) => {
                items[..count].iter_mut().for_each(|item| item.end_with(Err(error.clone())));
                return count;
            }
        };
        let mut longer = Vec::new();
        for (index, (got, place)) in answers.into_iter().zip(places).enumerate() {
            let item = &mut items[index];
            match (got, place) {
                (Got::TooLong(len), Place::Own(_)) if item.sink.room().is_none_or(|room| len <= room) => {
                    longer.push(index);
                }
                (got, place) => {
                    let read = self.read_of(item, got);
                    deliver(item, read.map(|len| len.map(|len| (place, len))));
                }
            }
        }
        // These need more room than estimated, which the buffers of the other items took up.
        for index in longer {
            let read = self.get_alone(&items[index]);
            deliver(&mut items[index], read);
        }
        count
    }

    /// Reads one item. Returns its place in the arena and its length.
    fn get_alone<'a>(&mut self, item: &Get<'a>) -> Result<Option<(Place<'a>, u64)>, StoreError> {
        item.check()?;
        if let Sink::Local(range) = item.sink {
            let got = self.get_request(&[(item.key, item.part, range)])?.pop();
            let len = self.read_of(item, got.unwrap_or(Got::Failed(ErrorCode::InternalError)))?;
            return Ok(len.map(|len| (Place::Theirs(range), len)));
        }
        let read = self.read(item.key, item.part, plain_room(&item.sink)?)?;
        Ok(read.map(|buffer| {
            let len = buffer.len();
            (Place::Own(buffer), len)
        }))
    }

    /// Chooses the place that one of several items is read into.
    fn place_to_get<'a>(&mut self, item: &Get<'a>, first: bool) -> Result<Place<'a>, StoreError> {
        item.check()?;
        let arena = Arc::clone(&self.connection()?.arena);
        if let Sink::Local(range) = item.sink {
            return self.name(&arena, range).map(|_| Place::Theirs(range));
        }
        let known = item.part.and_then(|(_, len)| len);
        let wanted = known.unwrap_or(self.guess_bytes).min(plain_room(&item.sink)?);
        // The first item uses the room that there is; its answer gives the length of the value.
        let buffer = if first { arena.alloc_up_to(wanted) } else { arena.alloc(wanted) };
        buffer.map(Place::Own)
    }

    /// Translates the answer for an item.
    fn read_of(&mut self, item: &Get<'_>, got: Got) -> Result<Option<u64>, StoreError> {
        if let (Got::Read(len), None) = (got, item.part) {
            self.guess_bytes = len.max(1);
        }
        fetched(got, item.end(), item.sink.room().unwrap_or(u64::MAX))
    }

    /// Stores as many of the first items as fit the arena, at least one, and returns their number.
    fn put_some(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> usize {
        let mut places = Vec::new();
        if items.len() > 1 {
            for item in items.iter().take(chunk_len(items, |item| item.key)) {
                match self.place_to_put(item) {
                    Ok(place) => places.push(place),
                    Err(_) => break,
                }
            }
        }
        if places.is_empty() {
            let item = &mut items[0];
            item.result = self.put_alone(item, options);
            return 1;
        }
        let asks: Vec<_> = items.iter().zip(&places).map(|(item, place)| (item.key, place.range())).collect();
        match self.put_request(&asks, options) {
            Ok(answers) => {
                for (item, answer) in items.iter_mut().zip(answers) {
                    item.result = stored(answer);
                }
            }
            Err(error) => {
                items.iter_mut().zip(&places).for_each(|(item, _)| item.result = Err(error.clone()))
            }
        }
        places.len()
    }

    fn put_alone(&mut self, item: &Put<'_>, options: &PutOptions) -> Result<bool, StoreError> {
        let place = self.place_to_put(item)?;
        let answer = self.put_request(&[(item.key, place.range())], options)?.pop();
        stored(answer.unwrap_or(Err(ErrorCode::InternalError)))
    }

    /// The place of an item's bytes in the arena. Bytes that are not there already are copied.
    fn place_to_put<'a>(&mut self, item: &Put<'a>) -> Result<Place<'a>, StoreError> {
        item.check()?;
        if let Source::Local(range) = item.source {
            let arena = Arc::clone(&self.connection()?.arena);
            return self.name(&arena, range).map(|_| Place::Theirs(range));
        }
        let slices = item.source.slices().ok_or(StoreError::ForeignMemory)?;
        let buffer = self.alloc_value(item.source.len())?;
        let mut at = 0;
        for slice in slices {
            buffer.write(at, slice)?;
            at += slice.len() as u64;
        }
        Ok(Place::Own(buffer))
    }

    fn put_request(
        &mut self,
        items: &[(&[u8], LocalRange<'_>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<(), ErrorCode>>, StoreError> {
        let arena = Arc::clone(&self.connection()?.arena);
        let mut named = Vec::with_capacity(items.len());
        for &(key, range) in items {
            named.push(Item { key: Key(key), span: self.name(&arena, range)? });
        }
        let request = Request::Put { options: *options, items: named };
        let answer = match self.ask(&request) {
            Ok(Answer::Done(answers)) if answers.len() == items.len() => Ok(answers),
            Ok(other) => Err(self.nonsense(other)),
            Err(error) => Err(error),
        };
        if answer.is_err() && self.connection.is_none() {
            // Without an answer it is unknown whether the node will still store the contents of the buffers.
            items.iter().for_each(|(_, range)| range.buffer.set_asked());
        }
        answer
    }

    fn get_request(&mut self, items: &[Ask<'_>]) -> Result<Vec<Got>, StoreError> {
        let arena = Arc::clone(&self.connection()?.arena);
        let mut named = Vec::with_capacity(items.len());
        for &(key, part, range) in items {
            named.push(Wanted { key: Key(key), span: self.name(&arena, range)?, part });
        }
        let answer = match self.ask(&Request::Get { items: named }) {
            Ok(Answer::Got(answers)) if answers.len() == items.len() => Ok(answers),
            Ok(other) => Err(self.nonsense(other)),
            Err(error) => Err(error),
        };
        match &answer {
            Ok(answers) => {
                for (got, (_, _, range)) in answers.iter().zip(items) {
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
            // Without an answer it is unknown whether the node still writes the buffers.
            Err(_) if self.connection.is_none() => {
                items.iter().for_each(|(_, _, range)| range.buffer.set_held(true));
            }
            Err(_) => {}
        }
        answer
    }

    /// The range as requests name it, if it can be used now.
    fn name(&mut self, arena: &Arc<Arena>, range: LocalRange<'_>) -> Result<Span, StoreError> {
        if !range.buffer.is_of(arena) {
            return Err(StoreError::ForeignMemory);
        }
        if range.buffer.is_held() && !self.settle(range.buffer)? {
            return Err(StoreError::Held);
        }
        range.named()
    }

    /// Asks the node about a held buffer. Returns whether nothing writes it any more.
    fn settle(&mut self, buffer: &LocalBuffer) -> Result<bool, StoreError> {
        let over = self.ask_settled(vec![buffer.in_arena()])?.first() == Some(&true);
        if over {
            buffer.set_held(false);
        }
        Ok(over)
    }

    /// Frees parts of dropped buffers that nothing writes any more.
    fn sweep(&mut self) -> Result<(), StoreError> {
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

    fn ask_settled(&mut self, ranges: Vec<Span>) -> Result<Vec<bool>, StoreError> {
        let count = ranges.len();
        match self.ask(&Request::Settled { ranges })? {
            Answer::Whether(answers) if answers.len() == count => Ok(answers),
            other => Err(self.nonsense(other)),
        }
    }

    /// The connection; it is made if there is none.
    fn connection(&mut self) -> Result<&mut Connection, StoreError> {
        self.check_process()?;
        if self.connection.is_none() {
            self.connection = Some(Connection::open(&self.config)?);
        } else if self.connection.as_ref().is_some_and(|connection| !connection.arena.held().is_empty()) {
            self.sweep()?;
        }
        self.connection.as_mut().ok_or_else(not_connected)
    }

    fn check_process(&self) -> Result<(), StoreError> {
        if self.mark.is_forked() { Err(StoreError::Forked) } else { Ok(()) }
    }

    fn ask(&mut self, request: &Request<'_>) -> Result<Answer, StoreError> {
        self.check_process()?;
        self.id += 1;
        if self.connection.is_none() {
            self.connection = Some(Connection::open(&self.config)?);
        }
        let connection = self.connection.as_mut().ok_or_else(not_connected)?;
        encode(&mut connection.out, self.id, false, request).map_err(LocalError::from)?;
        match connection.exchange(self.id, &self.config) {
            Ok(Answer::Failed(code)) => Err(code.into()),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.broken(error)),
        }
    }

    fn ask_exists(&mut self, keys: &[&[u8]], leased: bool) -> Result<Vec<bool>, StoreError> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key) {
            let request = Request::Exists { leased, keys: keys.iter().map(|key| Key(key)).collect() };
            match self.ask(&request)? {
                Answer::Whether(answers) if answers.len() == keys.len() => found.extend(answers),
                other => return Err(self.nonsense(other)),
            }
        }
        Ok(found)
    }

    /// Closes the connection after an error; its arena is not used any more.
    fn broken(&mut self, error: LocalError) -> StoreError {
        self.connection = None;
        error.into()
    }

    fn nonsense(&mut self, answer: Answer) -> StoreError {
        match answer {
            Answer::Refused(refusal) => self.broken(LocalError::Refused(refusal)),
            _ => self.broken(WireError::Body.into()),
        }
    }
}

impl Store for LocalClient {
    /// Plain memory is copied through the arena; parts of the arena ([`Sink::Local`]) are read into directly.
    fn batch_get(&mut self, items: &mut [Get<'_>]) -> Tally {
        let mut tally = Tally::default();
        let mut left = items;
        while !left.is_empty() {
            let count = self.get_some(left);
            let (done, rest) = left.split_at_mut(count);
            left = rest;
            done.iter().for_each(|item| tally.get(&item.result));
        }
        tally
    }

    /// Plain memory is copied through the arena; parts of the arena ([`Source::Local`]) are stored directly.
    /// Without an answer the node may still store the contents of the arena, so nothing can be written to
    /// those buffers any more.
    fn batch_put(&mut self, items: &mut [Put<'_>], options: &PutOptions) -> Tally {
        let mut tally = Tally::default();
        let mut left = items;
        while !left.is_empty() {
            let count = self.put_some(left, options);
            let (done, rest) = left.split_at_mut(count);
            left = rest;
            done.iter().for_each(|item| tally.put(&item.result));
        }
        tally
    }

    fn batch_exists(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        self.ask_exists(keys, false)
    }

    fn batch_exists_leased(&mut self, keys: &[&[u8]]) -> Result<Vec<bool>, StoreError> {
        self.ask_exists(keys, true)
    }

    fn batch_prefetch(&mut self, keys: &[&[u8]]) -> Result<Vec<Prefetched>, StoreError> {
        let mut found = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key) {
            let request = Request::Prefetch { keys: keys.iter().map(|key| Key(key)).collect() };
            match self.ask(&request)? {
                Answer::Prefetched(answers) if answers.len() == keys.len() => found.extend(answers),
                other => return Err(self.nonsense(other)),
            }
        }
        Ok(found)
    }

    fn batch_change_retention(
        &mut self,
        keys: &[&[u8]],
        change: &RetentionChange,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key) {
            let keys: Vec<_> = keys.iter().map(|key| Key(key)).collect();
            let wanted = keys.len();
            match self.ask(&Request::Retain { change: *change, keys })? {
                Answer::Done(answers) if answers.len() == wanted => {
                    results
                        .extend(answers.into_iter().map(|answer| found(answer, ErrorCode::ObjectNotFound)));
                }
                other => return Err(self.nonsense(other)),
            }
        }
        Ok(results)
    }

    fn batch_remove(
        &mut self,
        keys: &[&[u8]],
        mode: RemoveMode,
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key) {
            let request =
                Request::Remove { force: mode.is_force(), keys: keys.iter().map(|key| Key(key)).collect() };
            match self.ask(&request)? {
                Answer::Done(answers) if answers.len() == keys.len() => {
                    results.extend(answers.into_iter().map(removed));
                }
                other => return Err(self.nonsense(other)),
            }
        }
        Ok(results)
    }
}

/// Pause between two tries to replace the arena by a longer one.
const EXCHANGE_PAUSE: Duration = Duration::from_millis(5);

/// Number of tries with a new estimate of a value's length.
const LENGTH_TRIES: u32 = 3;

fn not_connected() -> StoreError {
    lost(ErrorKind::NotConnected.into()).into()
}

/// The place of an item's bytes in the arena.
enum Place<'a> {
    /// A buffer that was allocated for this item.
    Own(LocalBuffer),
    /// The caller's buffer.
    Theirs(LocalRange<'a>),
}

impl Place<'_> {
    const fn range(&self) -> LocalRange<'_> {
        match self {
            Self::Own(buffer) => buffer.all(),
            Self::Theirs(range) => *range,
        }
    }
}

/// A key, the requested part, and the destination.
type Ask<'a> = (&'a [u8], Option<Part>, LocalRange<'a>);

/// Bytes that fit the plain memory of a sink.
fn plain_room(sink: &Sink<'_>) -> Result<u64, StoreError> {
    match sink {
        Sink::Vec(_) => Ok(u64::MAX),
        Sink::Bytes(_) | Sink::Slices(_) => Ok(sink.room().unwrap_or(u64::MAX)),
        _ => Err(StoreError::ForeignMemory),
    }
}

/// Copies what was read to the item's plain memory, if that is its sink, and sets the result.
fn deliver(item: &mut Get<'_>, read: Result<Option<(Place<'_>, u64)>, StoreError>) {
    let result = match read {
        Ok(Some((Place::Own(buffer), len))) => {
            let mut copied = Ok(());
            item.sink.fill(len, 0, len, |skip, place| {
                if copied.is_ok() {
                    copied = buffer.read(skip, place);
                }
            });
            copied.map(|()| Some(len))
        }
        Ok(Some((Place::Theirs(_), len))) => Ok(Some(len)),
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };
    item.end_with(result);
}

/// Length that the object must have at least; `None`: any length will do.
fn end_of(part: Option<Part>) -> Option<u64> {
    part.map(|(start, len)| start.saturating_add(len.unwrap_or(1)))
}

/// Translates an answer; `end` is the end of the requested part in the object, and `room` the bytes that fit
/// the sink.
fn fetched(got: Got, end: Option<u64>, room: u64) -> Result<Option<u64>, StoreError> {
    match (got, end) {
        (Got::Read(len), _) => Ok(Some(len)),
        (Got::Miss | Got::Held, _) => Ok(None),
        (Got::TooLong(_), _) => Err(StoreError::TooLong { room }),
        (Got::Failed(ErrorCode::InvalidParams), Some(end)) => Err(StoreError::BeyondEnd { end }),
        (Got::Failed(code), _) => Err(code.into()),
    }
}

fn stored(answer: Result<(), ErrorCode>) -> Result<bool, StoreError> {
    match answer {
        Ok(()) => Ok(true),
        Err(ErrorCode::ObjectAlreadyExists) => Ok(false),
        Err(code) => Err(code.into()),
    }
}

/// Splits a batch into parts that fit one request each.
fn chunks<'a, T>(
    mut items: &'a [T],
    key: impl for<'t> Fn(&'t T) -> &'t [u8],
) -> impl Iterator<Item = &'a [T]> {
    std::iter::from_fn(move || {
        let (chunk, rest) = items.split_at(chunk_len(items, &key));
        items = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// How many of the first items fit one request.
fn chunk_len<T>(items: &[T], key: impl for<'t> Fn(&'t T) -> &'t [u8]) -> usize {
    let mut bytes = 0;
    let fits = |item: &&T| {
        bytes += key(item).len();
        bytes <= KEY_BYTES_PER_REQUEST_MAX
    };
    items.iter().take(KEYS_PER_REQUEST_MAX).take_while(fits).count().max(1).min(items.len())
}
