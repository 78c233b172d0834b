//! [`Publisher`]: the thread that numbers, keeps and sends the messages.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Event, Extra, ObjectKey, Removed, Source, Stored};
use conductor_core::zmtp::{self, Connection, Kind, Sent};
use conductor_core::{EngineHash, Tier};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use store_core::KvTier;
use tracing::{debug, warn};

use super::feed::{Batch, Entry, Feed, Told};
use super::{KvEventsConfig, Shared};

const PUB: Token = Token(0);
const ROUTER: Token = Token(1);
const WAKE: Token = Token(2);
/// Tokens from here on are connections.
const FOLLOWERS: usize = 3;
/// Events in a message.
const EVENTS_PER_MESSAGE_MAX: usize = 256;
/// Bits of a number that count the messages of an epoch; the others are the wall time of its beginning, ms.
const COUNT_BITS: u32 = 20;
/// The number that ends a replay.
const END: [u8; 8] = [0xff; 8];
/// Bytes of one follower's output above which a replay waits.
const REPLAY_OUTPUT_BYTES: usize = 1 << 20;
const EVENTS_PER_POLL_MAX: usize = 256;
/// The longest pause between two looks at heartbeats.
const TICK: Duration = Duration::from_millis(500);

/// The publisher, bound to its addresses; its thread is stopped when it is dropped.
#[derive(Debug)]
pub(crate) struct Publisher {
    addr: SocketAddr,
    replay_addr: SocketAddr,
    stop: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

/// A message, which several followers may be sent.
type Payload = Arc<[u8]>;

#[derive(Debug)]
struct Follower {
    stream: TcpStream,
    zmtp: Connection,
    /// Messages of a replay that are not in the output yet, and the end marker.
    replay: VecDeque<(u64, Option<Payload>)>,
    /// It asked for what is not in the buffer.
    waits: bool,
    writable: bool,
}

struct Thread {
    config: KvEventsConfig,
    poll: Poll,
    listeners: [TcpListener; 2],
    followers: HashMap<usize, Follower>,
    next_token: usize,
    from: Receiver<Told>,
    master: Arc<Waker>,
    shared: Arc<Shared>,
    stop: Arc<AtomicBool>,
    began: Instant,
    /// The number of the next message.
    next: u64,
    kept: VecDeque<(u64, Payload)>,
    kept_bytes: usize,
    /// The snapshot that is being made, from its first page on.
    pages: Option<Vec<Payload>>,
}

impl Publisher {
    /// Listens and starts the thread. `master` wakes the serving thread. `None` without `listen`.
    pub(crate) fn start(config: &KvEventsConfig, master: Arc<Waker>) -> io::Result<Option<(Self, Feed)>> {
        let (Some(listen), Some(replays)) = (config.listen, config.replays()) else { return Ok(None) };
        let (to, from) = channel();
        let (mut thread, waker) = Thread::bind(config.clone(), [listen, replays], from, master)?;
        let [addr, replay_addr] = [thread.listeners[0].local_addr()?, thread.listeners[1].local_addr()?];
        let (stop, shared) = (Arc::clone(&thread.stop), Arc::clone(&thread.shared));
        let thread = thread::Builder::new().name("kv-events".into()).spawn(move || thread.run())?;
        let feed = Feed::new(to, Arc::clone(&waker), shared);
        Ok(Some((Self { addr, replay_addr, stop, waker, thread: Some(thread) }, feed)))
    }

    /// Where followers subscribe.
    pub(crate) const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where they ask for what they missed.
    pub(crate) const fn replay_addr(&self) -> SocketAddr {
        self.replay_addr
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Thread {
    /// Listens for subscribers, and for those who ask again. The waker is of the thread.
    fn bind(
        config: KvEventsConfig,
        [listen, replays]: [SocketAddr; 2],
        from: Receiver<Told>,
        master: Arc<Waker>,
    ) -> io::Result<(Self, Arc<Waker>)> {
        let poll = Poll::new()?;
        let mut listeners = [TcpListener::bind(listen)?, TcpListener::bind(replays)?];
        let [publishes, routes] = &mut listeners;
        poll.registry().register(publishes, PUB, Interest::READABLE)?;
        poll.registry().register(routes, ROUTER, Interest::READABLE)?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let mut this = Self {
            config,
            poll,
            listeners,
            followers: HashMap::new(),
            next_token: FOLLOWERS,
            from,
            master,
            shared: Arc::default(),
            stop: Arc::default(),
            began: Instant::now(),
            next: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            pages: None,
        };
        // Until this master leads, nothing is found.
        this.begin();
        Ok((this, waker))
    }

    fn now(&self) -> te_core::Instant {
        te_core::Instant::ZERO + self.began.elapsed()
    }

    fn run(&mut self) {
        let mut events = Events::with_capacity(EVENTS_PER_POLL_MAX);
        while !self.stop.load(Ordering::Acquire) {
            if let Err(error) = self.poll.poll(&mut events, Some(TICK)) {
                if error.kind() != ErrorKind::Interrupted {
                    warn!(%error, "the publisher of KV events ends: polling failed");
                    return;
                }
                continue;
            }
            for event in &events {
                match event.token() {
                    WAKE => {}
                    PUB => self.accept(0),
                    ROUTER => self.accept(1),
                    Token(token) => {
                        if let Some(follower) = self.followers.get_mut(&token) {
                            follower.writable |= event.is_writable();
                        }
                        if event.is_readable() {
                            self.read(token);
                        }
                    }
                }
            }
            loop {
                match self.from.try_recv() {
                    Ok(told) => self.take(told),
                    Err(TryRecvError::Empty) => break,
                    // The serving thread has ended.
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            self.write();
        }
    }

    fn accept(&mut self, which: usize) {
        loop {
            let (mut stream, peer) = match self.listeners[which].accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    debug!(%error, "a follower of KV events could not be accepted");
                    return;
                }
            };
            // Half of the places are for each kind of socket, so that neither keeps the other out.
            let kind = if which == 0 { Kind::Pub } else { Kind::Router };
            let same = self.followers.values().filter(|follower| follower.zmtp.kind() == kind).count();
            if same >= self.config.followers_max as usize {
                Shared::add(&self.shared.refused_total, 1);
                debug!(%peer, "a follower of KV events was refused: kv_events.followers_max are connected");
                continue;
            }
            let token = self.next_token;
            self.next_token += 1;
            let both = Interest::READABLE | Interest::WRITABLE;
            if self.poll.registry().register(&mut stream, Token(token), both).is_err() {
                continue;
            }
            let limits = zmtp::Limits { part_bytes_max: 4 << 10, ..zmtp::Limits::default() };
            let zmtp = Connection::new(kind, limits, b"", self.now());
            let follower = Follower { stream, zmtp, replay: VecDeque::new(), waits: false, writable: true };
            self.followers.insert(token, follower);
            self.count_followers();
        }
    }

    fn count_followers(&self) {
        let subscribed = self.followers.values().filter(|follower| follower.zmtp.kind() == Kind::Pub);
        self.shared.followers.store(subscribed.count() as u64, Ordering::Relaxed);
    }

    fn lose(&mut self, token: usize, why: &dyn std::fmt::Display) {
        if let Some(mut follower) = self.followers.remove(&token) {
            debug!(%why, "a follower of KV events is gone");
            let _ = self.poll.registry().deregister(&mut follower.stream);
            self.count_followers();
        }
    }

    fn read(&mut self, token: usize) {
        let now = self.now();
        loop {
            let Some(follower) = self.followers.get_mut(&token) else { return };
            match follower.stream.read(follower.zmtp.space()) {
                Ok(0) => return self.lose(token, &"the connection was closed"),
                Ok(len) => follower.zmtp.filled(now, len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return self.lose(token, &error),
            }
            if let Err(error) = self.hear(token) {
                return self.lose(token, &error);
            }
        }
    }

    /// Takes what a follower has sent: the numbers from which on it wants messages again.
    fn hear(&mut self, token: usize) -> Result<(), zmtp::Error> {
        loop {
            let Some(follower) = self.followers.get_mut(&token) else { return Ok(()) };
            let asked = match follower.zmtp.next()? {
                None => return Ok(()),
                Some(zmtp::Event::Message(message)) => {
                    let number = message.part(1).and_then(|part| <[u8; 8]>::try_from(part).ok());
                    // As vLLM's publisher: whatever else is asked has no answer.
                    number.filter(|_| message.iter().count() == 2).map(u64::from_be_bytes)
                }
                Some(_) => None,
            };
            if let Some(from) = asked.filter(|_| follower.zmtp.kind() == Kind::Router) {
                self.replay(token, from);
            }
        }
    }

    fn replay(&mut self, token: usize, from: u64) {
        Shared::add(&self.shared.replays_total, 1);
        let Some(follower) = self.followers.get_mut(&token) else { return };
        if !follower.replay.is_empty() || follower.waits {
            // One question at a time.
            return;
        }
        let oldest = self.kept.front().map_or(self.next, |(number, _)| *number);
        if from < oldest {
            follower.waits = true;
            self.shared.snapshot_wanted.store(true, Ordering::Release);
            let _ = self.master.wake();
            return;
        }
        let missed = self.kept.iter().filter(|(number, _)| *number >= from);
        follower.replay.extend(missed.map(|(number, payload)| (*number, Some(Arc::clone(payload)))));
        follower.replay.push_back((0, None));
    }

    fn take(&mut self, told: Told) {
        match told {
            Told::Begin => self.begin(),
            Told::Changes(batch) => {
                self.taken(&batch);
                for payload in self.encode(&batch) {
                    // It may remove what a page of the snapshot that is being made has told.
                    if let Some(pages) = &mut self.pages {
                        pages.push(Arc::clone(&payload));
                    }
                    self.publish(payload);
                }
            }
            Told::Page(batch) => {
                self.taken(&batch);
                let payloads = self.encode(&batch);
                self.pages.get_or_insert_default().extend(payloads);
            }
            Told::SnapshotEnd => self.answer_waiting(),
        }
    }

    fn taken(&self, batch: &Batch) {
        self.shared.queued_bytes.fetch_sub(batch.bytes(), Ordering::AcqRel);
    }

    /// Begins an epoch.
    fn begin(&mut self) {
        Shared::add(&self.shared.epochs_total, 1);
        self.next = self.next.max(wall_ms() << COUNT_BITS);
        self.kept.clear();
        self.kept_bytes = 0;
        self.pages = None;
        let cleared = self.cleared();
        self.publish(cleared);
    }

    fn cleared(&self) -> Payload {
        let source = Source { backend: Some(&self.config.backend_id), ..Source::default() };
        let mut payload = Vec::new();
        encode(Layout::Mooncake, wall_ms() as f64, None, &[Event::Cleared(source)], &mut payload);
        payload.into()
    }

    /// The messages of a batch.
    fn encode(&self, batch: &Batch) -> Vec<Payload> {
        let entries: Vec<Entry<'_>> = batch.iter().collect();
        let hash_of = |entry: &Entry<'_>| ObjectKey::parse(entry.key).map(|key| key.hash);
        let hashes: Vec<Option<EngineHash>> = entries.iter().map(hash_of).collect();
        let backend = Some(&*self.config.backend_id);
        let events: Vec<Event<'_>> = entries
            .iter()
            .zip(&hashes)
            .map(|(entry, hash)| {
                let medium = match entry.tier {
                    KvTier::Memory => "cpu",
                    KvTier::Disk => "disk",
                };
                let source = Source {
                    backend,
                    tenant: Some(entry.tenant),
                    medium: Some(medium),
                    object: Some(entry.key),
                    ..Source::default()
                };
                let (hashes, tier) = (hash.as_slice(), Tier::Store);
                if entry.stored {
                    // As Mooncake's publisher: every object stands alone.
                    let source = Source { base_block: Some(0), ..source };
                    Event::Stored(Stored {
                        hashes,
                        parent: None,
                        tokens: &[],
                        block_tokens: 0,
                        lora: None,
                        salt: None,
                        extra: Extra::default(),
                        tier,
                        group: None,
                        source,
                    })
                } else {
                    Event::Removed(Removed { hashes, tier, source, group: None })
                }
            })
            .collect();
        let payload = |events: &[Event<'_>]| {
            let mut payload = Vec::new();
            encode(Layout::Mooncake, wall_ms() as f64, None, events, &mut payload);
            payload.into()
        };
        events.chunks(EVENTS_PER_MESSAGE_MAX).map(payload).collect()
    }

    /// Sends a message to everybody, and keeps it.
    fn publish(&mut self, payload: Payload) {
        let number = self.next;
        self.next += 1;
        Shared::add(&self.shared.messages_total, 1);
        for follower in self.followers.values_mut().filter(|follower| follower.zmtp.kind() == Kind::Pub) {
            if follower.zmtp.send(&[b"", &number.to_be_bytes(), &payload]) == Sent::Full {
                Shared::add(&self.shared.missed_total, 1);
            }
        }
        self.kept_bytes += payload.len();
        self.kept.push_back((number, payload));
        let bytes_max = (self.config.buffer_mib as usize) << 20;
        while self.kept_bytes > bytes_max
            && let Some((_, payload)) = self.kept.pop_front()
        {
            self.kept_bytes -= payload.len();
        }
    }

    /// What is found, from nothing on.
    fn snapshot(&mut self) -> Vec<Payload> {
        let mut pages = vec![self.cleared()];
        pages.extend(self.pages.take().into_iter().flatten());
        pages
    }

    /// Answers those who wait for a snapshot: what is found, numbered so that the latest message is its last.
    fn answer_waiting(&mut self) {
        let pages = self.snapshot();
        let first = self.next - pages.len() as u64;
        for follower in self.followers.values_mut().filter(|follower| follower.waits) {
            Shared::add(&self.shared.snapshots_total, 1);
            follower.waits = false;
            let numbered = pages.iter().zip(first..);
            follower.replay.extend(numbered.map(|(page, number)| (number, Some(Arc::clone(page)))));
            follower.replay.push_back((0, None));
        }
    }

    /// Moves replays into the outputs, and outputs to the followers.
    fn write(&mut self) {
        let now = self.now();
        let mut gone = Vec::new();
        for (token, follower) in &mut self.followers {
            let ended = follower.zmtp.tick(now).map_err(|error| error.to_string());
            let ended = ended.and_then(|()| follower.write().map_err(|error| error.to_string()));
            if let Err(why) = ended {
                gone.push((*token, why));
            }
        }
        for (token, why) in gone {
            self.lose(token, &why);
        }
    }
}

impl Follower {
    /// Writes what the peer takes now.
    fn write(&mut self) -> io::Result<()> {
        loop {
            while self.zmtp.output().len() < REPLAY_OUTPUT_BYTES
                && let Some((number, payload)) = self.replay.front()
            {
                let sent = match payload {
                    Some(payload) => self.zmtp.send(&[b"", b"", &number.to_be_bytes(), payload]),
                    None => self.zmtp.send(&[b"", b"", &END, b""]),
                };
                if sent != Sent::Queued {
                    break;
                }
                self.replay.pop_front();
            }
            if self.zmtp.output().is_empty() || !self.writable {
                return Ok(());
            }
            match self.stream.write(self.zmtp.output()) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => self.zmtp.wrote(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeSet;

    use conductor_core::events::{Batch as Events, Decoder, Dialect};
    use store_core::KvEvent;

    use super::*;

    fn batch(events: &[(&str, bool)]) -> Batch {
        let mut batch = Batch::default();
        for (key, stored) in events {
            let (tenant, key, tier) = ("default", key.as_bytes(), KvTier::Memory);
            batch.push(KvEvent { tenant, key, tier, stored: *stored });
        }
        batch
    }

    /// What a follower knows after these messages.
    fn found(payloads: &[Payload]) -> BTreeSet<String> {
        let (mut decoder, mut events) = (Decoder::new(Dialect::Mooncake), Events::new());
        let mut found = BTreeSet::new();
        for payload in payloads {
            decoder.decode(payload, &mut events).unwrap();
            for event in events.events() {
                match event {
                    Event::Stored(stored) => drop(found.insert(stored.source.object.unwrap().to_owned())),
                    Event::Removed(removed) => drop(found.remove(removed.source.object.unwrap())),
                    Event::Cleared(_) => found.clear(),
                }
            }
        }
        found
    }

    #[test]
    fn a_snapshot_has_what_changed_between_its_pages() {
        let poll = Poll::new().unwrap();
        let master = Arc::new(Waker::new(poll.registry(), WAKE).unwrap());
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (_to, from) = channel();
        let (mut thread, _waker) = Thread::bind(KvEventsConfig::default(), [any, any], from, master).unwrap();
        // The first page has no object; then one is put in the place that it has looked at.
        thread.take(Told::Page(Batch::default()));
        thread.take(Told::Changes(batch(&[("1", true)])));
        thread.take(Told::Page(batch(&[("2", true), ("3", true)])));
        thread.take(Told::Changes(batch(&[("2", false), ("4", true)])));
        thread.take(Told::Page(batch(&[("5", true)])));
        let snapshot = thread.snapshot();
        assert_eq!(found(&snapshot), ["1", "3", "4", "5"].map(str::to_owned).into());
        // Changes after its end are not part of the next one.
        thread.take(Told::Changes(batch(&[("6", true)])));
        assert_eq!(found(&thread.snapshot()), BTreeSet::new());
    }
}
