//! [`Publisher`]: what engines are to the Conductor, in this process: a PUB socket and a replay port over
//! real ZMTP. For tests, and for `snowskin conductor replay`, which measures with it.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use conductor_core::stream::{History, REPLAY_END};
use conductor_core::zmtp::{Connection, Event, Kind, Limits, Sent};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use te_core::Instant;

const WAKE: Token = Token(0);
const EVENTS: Token = Token(1);
const REPLAYS: Token = Token(2);
const FIRST_PEER: usize = 3;
/// Messages that wait for the thread; [`Publisher::publish`] waits for a place.
const QUEUE_MAX: usize = 1_024;
/// Bytes of a message queue towards one subscriber, beyond which the publisher waits for it.
const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// Bytes of messages that are kept for replays.
const HISTORY_BYTES_MAX: usize = 1 << 30;
/// Messages taken from the queue before sockets get their turn.
const BURST: usize = 64;

/// A publisher of events. Dropping it ends it, with its connections.
///
/// ```
/// let publisher = conductor::Publisher::start("127.0.0.1:0".parse()?, 0, 100)?;
/// publisher.publish(&[0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90])?; // an empty batch at time 0
/// println!("{} {}", publisher.endpoint(), publisher.replay_endpoint());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Publisher {
    events: SocketAddr,
    replays: SocketAddr,
    messages: Option<SyncSender<Message>>,
    waker: Arc<Waker>,
    shared: Arc<Flags>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Message {
    /// Publish this.
    Payload(Vec<u8>),
    /// Number this, keep it for replays, and do not publish it: the network loses it.
    Lost(Vec<u8>),
    /// Number nothing: as a publisher does whose own queue was full.
    Skip,
}

#[derive(Debug, Default)]
struct Flags {
    stop: AtomicBool,
    subscribers: AtomicU64,
    sent: AtomicU64,
    error: Mutex<Option<io::Error>>,
}

impl Publisher {
    /// Listens on two ports: `addr` for subscribers, and a port that the system chooses for replays. The
    /// first message gets the number `first_seq`; `history` messages are kept.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn start(addr: SocketAddr, first_seq: u64, history: usize) -> io::Result<Self> {
        Self::start_at(addr, SocketAddr::new(addr.ip(), 0), first_seq, history)
    }

    /// As [`start`](Self::start), with the port for replays.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn start_at(
        events: SocketAddr,
        replays: SocketAddr,
        first_seq: u64,
        history: usize,
    ) -> io::Result<Self> {
        Self::new(events, replays, None, first_seq, history)
    }

    /// A publisher that connects to a subscriber which listens, once.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn connect(subscriber: SocketAddr, first_seq: u64, history: usize) -> io::Result<Self> {
        let any = SocketAddr::new(subscriber.ip(), 0);
        Self::new(any, any, Some(std::net::TcpStream::connect(subscriber)?), first_seq, history)
    }

    fn new(
        events: SocketAddr,
        replays: SocketAddr,
        subscriber: Option<std::net::TcpStream>,
        first_seq: u64,
        history: usize,
    ) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let mut events = TcpListener::bind(events)?;
        let mut replays = TcpListener::bind(replays)?;
        poll.registry().register(&mut events, EVENTS, Interest::READABLE)?;
        poll.registry().register(&mut replays, REPLAYS, Interest::READABLE)?;
        let addresses = (events.local_addr()?, replays.local_addr()?);
        let (messages, received) = sync_channel(QUEUE_MAX);
        let shared = Arc::new(Flags::default());
        let mut service = Service {
            poll,
            events,
            replays,
            received,
            peers: HashMap::new(),
            next_peer: FIRST_PEER,
            history: History::new(first_seq, history, HISTORY_BYTES_MAX),
            shared: Arc::clone(&shared),
            started: std::time::Instant::now(),
        };
        if let Some(stream) = subscriber {
            stream.set_nonblocking(true)?;
            service.enter(TcpStream::from_std(stream), Kind::Pub);
        }
        let thread = thread::Builder::new().name("snowskin-publisher".into()).spawn(move || {
            if let Err(error) = service.run() {
                *service.shared.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        })?;
        let (events, replays) = addresses;
        Ok(Self { events, replays, messages: Some(messages), waker, shared, thread: Some(thread) })
    }

    /// Where subscribers connect, `tcp://ADDR:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("tcp://{}", self.events)
    }

    /// Where replays are asked for.
    #[must_use]
    pub fn replay_endpoint(&self) -> String {
        format!("tcp://{}", self.replays)
    }

    /// Subscribers that are connected.
    #[must_use]
    pub fn subscribers(&self) -> u64 {
        self.shared.subscribers.load(Ordering::Acquire)
    }

    /// Messages that were handed to connections, or had no subscriber.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Acquire)
    }

    /// Publishes a batch. Waits while the queue is full, as engines do.
    ///
    /// # Errors
    /// The publisher has failed.
    pub fn publish(&self, payload: &[u8]) -> io::Result<()> {
        self.put(Message::Payload(payload.to_vec()))
    }

    /// Numbers a batch and keeps it for replays, but sends it to no subscriber.
    ///
    /// # Errors
    /// The publisher has failed.
    pub fn lose(&self, payload: &[u8]) -> io::Result<()> {
        self.put(Message::Lost(payload.to_vec()))
    }

    /// Lets a number pass without a message, and forgets what was before: no replay can bring it.
    ///
    /// # Errors
    /// The publisher has failed.
    pub fn skip(&self) -> io::Result<()> {
        self.put(Message::Skip)
    }

    fn put(&self, message: Message) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.messages.as_ref().ok_or_else(gone)?.send(message).map_err(|_| gone())?;
        self.waker.wake()
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        drop(self.messages.take());
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Peer {
    stream: TcpStream,
    zmtp: Connection,
    is_subscriber: bool,
}

struct Service {
    poll: Poll,
    events: TcpListener,
    replays: TcpListener,
    received: Receiver<Message>,
    peers: HashMap<usize, Peer>,
    next_peer: usize,
    history: History,
    shared: Arc<Flags>,
    started: std::time::Instant,
}

impl Service {
    fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(64);
        let mut more = false;
        while !self.shared.stop.load(Ordering::Acquire) {
            let timeout =
                if more { Some(Duration::from_micros(100)) } else { Some(Duration::from_millis(500)) };
            match self.poll.poll(&mut events, timeout) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            self.accept();
            for event in &events {
                self.serve(event.token().0);
            }
            more = self.publish();
            let now = self.now();
            self.peers.retain(|_, peer| peer.zmtp.tick(now).is_ok() && flush(peer).is_ok());
            let subscribers =
                self.peers.values().filter(|peer| peer.is_subscriber && peer.zmtp.is_subscribed(b""));
            self.shared.subscribers.store(subscribers.count() as u64, Ordering::Release);
        }
        Ok(())
    }

    fn now(&self) -> Instant {
        Instant::ZERO + self.started.elapsed()
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.events.accept() {
            self.enter(stream, Kind::Pub);
        }
        while let Ok((stream, _)) = self.replays.accept() {
            self.enter(stream, Kind::Router);
        }
    }

    fn enter(&mut self, mut stream: TcpStream, kind: Kind) {
        let token = Token(self.next_peer);
        let both = Interest::READABLE | Interest::WRITABLE;
        if self.poll.registry().register(&mut stream, token, both).is_err() {
            return;
        }
        let _ = stream.set_nodelay(true);
        let limits = Limits { output_bytes_max: OUTPUT_BYTES_MAX, ..Limits::default() };
        let zmtp = Connection::new(kind, limits, b"", self.now());
        self.peers.insert(self.next_peer, Peer { stream, zmtp, is_subscriber: kind == Kind::Pub });
        self.next_peer += 1;
    }

    fn serve(&mut self, token: usize) {
        let now = self.now();
        let Some(mut peer) = self.peers.remove(&token) else { return };
        if self.pump(&mut peer, now).is_ok() {
            self.peers.insert(token, peer);
        }
    }

    fn pump(&self, peer: &mut Peer, now: Instant) -> io::Result<()> {
        loop {
            flush(peer)?;
            match peer.stream.read(peer.zmtp.space()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => peer.zmtp.filled(now, len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            loop {
                let asked = match peer.zmtp.next().map_err(io::Error::other)? {
                    None => break,
                    Some(Event::Message(message)) => message.part(1).and_then(|from| from.try_into().ok()),
                    Some(_) => None,
                };
                if let Some(from) = asked {
                    self.replay(peer, u64::from_be_bytes(from))?;
                }
            }
        }
    }

    /// Answers a question for a replay: the messages, then the end.
    fn replay(&self, peer: &mut Peer, from: u64) -> io::Result<()> {
        for (seq, payload) in self.history.since(from) {
            while peer.zmtp.send(&[b"", b"", &seq.to_be_bytes(), payload]) == Sent::Full {
                flush(peer)?;
                thread::yield_now();
            }
        }
        peer.zmtp.send(&[b"", b"", &REPLAY_END.to_be_bytes(), b""]);
        Ok(())
    }

    /// Sends what waits in the queue. Returns whether there may be more.
    fn publish(&mut self) -> bool {
        for _ in 0..BURST {
            let message = match self.received.try_recv() {
                Ok(message) => message,
                Err(_) => return false,
            };
            let (seq, payload) = match message {
                Message::Payload(payload) => (self.history.push(&payload), payload),
                Message::Lost(payload) => {
                    self.history.push(&payload);
                    continue;
                }
                Message::Skip => {
                    self.history.skip();
                    continue;
                }
            };
            for peer in self.peers.values_mut().filter(|peer| peer.is_subscriber) {
                // A slow subscriber makes the publisher wait, so that a measurement measures the subscriber.
                while peer.zmtp.send(&[b"", &seq.to_be_bytes(), &payload]) == Sent::Full {
                    if flush(peer).is_err() || self.shared.stop.load(Ordering::Acquire) {
                        break;
                    }
                    thread::yield_now();
                }
            }
            self.shared.sent.fetch_add(1, Ordering::Release);
        }
        true
    }
}

/// Writes what waits, as far as the system takes it.
fn flush(peer: &mut Peer) -> io::Result<()> {
    while !peer.zmtp.output().is_empty() {
        match peer.stream.write(peer.zmtp.output()) {
            Ok(len) => peer.zmtp.wrote(len),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
