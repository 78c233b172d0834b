//! What a mock engine publishes over ZMTP: events of its cache (PUB), their replay (ROUTER), its load (PUB).
//!
//! ```text
//!   cache ── events ──▶ a batch with a number ──▶ kept for replays ──▶ every subscriber, past slow ones
//! ```

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{SystemTime, UNIX_EPOCH};

use conductor_core::events::encode::{Layout, encode, encode_load};
use conductor_core::events::{self, Extra, LoadStat, Removed, Source, Stored};
use conductor_core::zmtp::{Connection, Event as Said, Kind, Limits};
use conductor_core::{EngineHash, Tier};
use te_core::Instant;
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::broadcast;
use tokio::task::JoinSet;

use super::cache::Event;
use super::config::Flavor;

/// Messages that a subscriber may lag behind (libzmq's high-water mark); it loses those beyond.
const LAG_MAX: usize = 4_096;
/// Most connections of one socket.
const CONNECTIONS_MAX: usize = 256;
/// The end of a replay.
const END: [u8; 8] = [0xff; 8];

/// A message: its number and its payload.
pub(crate) type Message = (u64, Arc<[u8]>);

/// A stream of numbered messages, and what is kept of it.
#[derive(Debug)]
pub(crate) struct Publisher {
    topic: Arc<str>,
    layout: Layout,
    kept_max: usize,
    next: AtomicU64,
    kept: Mutex<VecDeque<Message>>,
    /// Messages with their topics.
    subscribers: broadcast::Sender<(Arc<str>, Message)>,
    /// Messages with these numbers are kept and not sent: tests lose them on purpose.
    lost: Mutex<Option<std::ops::Range<u64>>>,
}

impl Publisher {
    /// `kept_max`: batches that can be replayed.
    pub(crate) fn new(topic: &str, flavor: Flavor, kept_max: usize) -> Self {
        let layout = match flavor {
            Flavor::Vllm => Layout::VllmMaps,
            Flavor::VllmArrays => Layout::VllmArrays,
            Flavor::Sglang => Layout::Sglang,
        };
        Self {
            topic: topic.into(),
            layout,
            kept_max,
            next: AtomicU64::new(0),
            kept: Mutex::default(),
            subscribers: broadcast::Sender::new(LAG_MAX),
            lost: Mutex::default(),
        }
    }

    /// Publishes changes of the cache, as one batch.
    pub(crate) fn publish(&self, changes: &[Event], block_tokens: u32) {
        if changes.is_empty() {
            return;
        }
        let runs = runs(changes);
        let events: Vec<_> = runs.iter().map(|run| run.event(block_tokens)).collect();
        let mut payload = Vec::new();
        encode(self.layout, now_s(), Some(0), &events, &mut payload);
        self.send(payload);
    }

    /// Publishes the load. Returns the message.
    pub(crate) fn publish_load(&self, load: &LoadStat) -> (Arc<str>, Message) {
        let mut payload = Vec::new();
        encode_load(load, &mut payload);
        (Arc::clone(&self.topic), self.send(payload))
    }

    /// Sends a message of another publisher to the subscribers of this one.
    pub(crate) fn beside(&self, message: (Arc<str>, Message)) {
        let _ = self.subscribers.send(message);
    }

    /// The next messages with these numbers are not sent.
    pub(crate) fn lose(&self, many: u64) {
        let next = self.next.load(Ordering::Relaxed);
        *lock(&self.lost) = Some(next..next + many);
    }

    fn send(&self, payload: Vec<u8>) -> Message {
        let mut kept = lock(&self.kept);
        let message = (self.next.fetch_add(1, Ordering::Relaxed), Arc::from(payload));
        if self.kept_max > 0 {
            if kept.len() >= self.kept_max {
                kept.pop_front();
            }
            kept.push_back(message.clone());
        }
        drop(kept);
        if !lock(&self.lost).as_ref().is_some_and(|lost| lost.contains(&message.0)) {
            // Without a subscriber it is lost, as with every PUB socket.
            let _ = self.subscribers.send((Arc::clone(&self.topic), message.clone()));
        }
        message
    }

    /// Accepts subscribers until it is dropped.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener) -> io::Result<()> {
        let accepted = |stream, publisher: Arc<Self>| async move { publisher.subscriber(stream).await };
        accept(listener, self, accepted).await
    }

    /// Accepts those who ask for replays until it is dropped.
    pub(crate) async fn serve_replays(self: Arc<Self>, listener: TcpListener) -> io::Result<()> {
        let accepted = |stream, publisher: Arc<Self>| async move { publisher.replayer(stream).await };
        accept(listener, self, accepted).await
    }

    async fn subscriber(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut connection = Connection::new(Kind::Pub, Limits::default(), &[], now());
        let mut messages = self.subscribers.subscribe();
        loop {
            write(&mut stream, &mut connection).await?;
            tokio::select! {
                read = read(&mut stream, &mut connection) => {
                    read?;
                    while connection.next().map_err(io::Error::other)?.is_some() {}
                }
                message = messages.recv() => match message {
                    Ok((topic, (number, payload))) => {
                        connection.send(&[topic.as_bytes(), &number.to_be_bytes(), &payload]);
                    }
                    // It reads too slowly, and finds a gap.
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return Ok(()),
                },
            }
            connection.tick(now()).map_err(io::Error::other)?;
        }
    }

    async fn replayer(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut connection = Connection::new(Kind::Router, Limits::default(), &[], now());
        loop {
            write(&mut stream, &mut connection).await?;
            read(&mut stream, &mut connection).await?;
            let mut asked = Vec::new();
            while let Some(said) = connection.next().map_err(io::Error::other)? {
                // [empty, number]; anything else is ignored, as by vLLM.
                if let Said::Message(message) = said
                    && message.len() == 2
                    && let Some(from) = message.part(1).and_then(|part| part.try_into().ok())
                {
                    asked.push(u64::from_be_bytes(from));
                }
            }
            for from in asked {
                let kept: Vec<Message> = {
                    let kept = lock(&self.kept);
                    kept.iter().filter(|(number, _)| *number >= from).cloned().collect()
                };
                for (number, payload) in kept {
                    self.answer(&mut connection, &number.to_be_bytes(), &payload);
                    write(&mut stream, &mut connection).await?;
                }
                self.answer(&mut connection, &END, &[]);
            }
        }
    }

    /// One frame more since vLLM 0.26: the topic.
    fn answer(&self, connection: &mut Connection, number: &[u8; 8], payload: &[u8]) {
        match self.layout {
            Layout::VllmArrays => connection.send(&[&[], number, payload]),
            _ => connection.send(&[&[], self.topic.as_bytes(), number, payload]),
        };
    }
}

/// Events that are one event on the wire: a chain of blocks that were stored, or blocks that left one tier.
enum Run {
    Stored {
        tier: Tier,
        parent: Option<EngineHash>,
        hashes: Vec<EngineHash>,
        tokens: Vec<u32>,
        salt: Option<Arc<str>>,
    },
    Removed {
        tier: Tier,
        hashes: Vec<EngineHash>,
    },
    Cleared,
}

impl Run {
    fn event(&self, block_tokens: u32) -> events::Event<'_> {
        match self {
            Self::Stored { tier, parent, hashes, tokens, salt } => events::Event::Stored(Stored {
                hashes,
                parent: *parent,
                tokens,
                block_tokens,
                lora: None,
                // Engines say it with the first block of a prompt.
                salt: salt.as_deref().filter(|_| parent.is_none()),
                extra: Extra::default(),
                tier: *tier,
                group: None,
                source: Source::default(),
            }),
            Self::Removed { tier, hashes } => events::Event::Removed(Removed {
                hashes,
                tier: *tier,
                group: None,
                source: Source::default(),
            }),
            Self::Cleared => events::Event::Cleared(Source::default()),
        }
    }
}

fn runs(changes: &[Event]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for change in changes {
        match (change, runs.last_mut()) {
            (
                Event::Stored { tier, hash, parent, tokens, .. },
                Some(Run::Stored { tier: on, hashes, tokens: all, .. }),
            ) if tier == on && *parent == hashes.last().copied() => {
                hashes.push(*hash);
                all.extend_from_slice(tokens);
            }
            (Event::Removed { tier, hash }, Some(Run::Removed { tier: from, hashes })) if tier == from => {
                hashes.push(*hash);
            }
            (Event::Stored { tier, hash, parent, tokens, salt }, _) => runs.push(Run::Stored {
                tier: *tier,
                parent: *parent,
                hashes: vec![*hash],
                tokens: tokens.to_vec(),
                salt: salt.clone(),
            }),
            (Event::Removed { tier, hash }, _) => {
                runs.push(Run::Removed { tier: *tier, hashes: vec![*hash] });
            }
            (Event::Cleared, _) => runs.push(Run::Cleared),
        }
    }
    runs
}

async fn accept<F: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    publisher: Arc<Publisher>,
    accepted: impl Fn(TcpStream, Arc<Publisher>) -> F,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    loop {
        let (stream, from) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        if connections.len() >= CONNECTIONS_MAX {
            continue;
        }
        let _ = stream.set_nodelay(true);
        let work = accepted(stream, Arc::clone(&publisher));
        connections.spawn(async move {
            if let Err(error) = work.await {
                log_end(from, &error);
            }
        });
    }
}

fn log_end(from: SocketAddr, error: &io::Error) {
    tracing::debug!(%from, %error, "a subscriber of a mock engine left");
}

async fn write(stream: &mut TcpStream, connection: &mut Connection) -> io::Result<()> {
    while !connection.output().is_empty() {
        let bytes = connection.output();
        let write = |cx: &mut Context<'_>| Pin::new(&mut *stream).poll_write(cx, bytes);
        let written = std::future::poll_fn(write).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        connection.wrote(written);
    }
    Ok(())
}

async fn read(stream: &mut TcpStream, connection: &mut Connection) -> io::Result<()> {
    let len = std::future::poll_fn(|cx| {
        let mut buffer = ReadBuf::new(connection.space());
        ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
        Poll::Ready(io::Result::Ok(buffer.filled().len()))
    })
    .await?;
    connection.filled(now(), len);
    if len == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
}

/// Time for ZMTP, from an arbitrary beginning.
fn now() -> Instant {
    static BEGAN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    let began = BEGAN.get_or_init(std::time::Instant::now);
    Instant::ZERO + began.elapsed()
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
