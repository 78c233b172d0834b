//! One publisher as the event thread has it: its sockets, its stream, and when it is connected to again.

use std::net::SocketAddr;
use std::time::Duration;

use conductor_core::events::{Decoder, Dialect, decode_load};
use conductor_core::knowledge::{PublisherId, Said};
use conductor_core::stream::{self, FenceReason, Position, Sink, Stream};
use conductor_core::zmtp::{Event, Message};
use mio::net::TcpListener;
use te_core::Instant;
use tracing::{debug, info};

use super::intake::Intake;
use super::peer::Peer;
use crate::config::{Endpoint, EngineKind, StreamsConfig};
use crate::shared::Shared;

/// Reads from one socket before others get their turn.
const READS_PER_TURN: u32 = 16;
/// Blocks and hashes of another Conductor that are recorded in one turn to write.
const ADOPTED_PER_TURN: usize = 4_096;
/// Messages that a publisher's history is expected to hold at most: held while a replay is under way.
const HELD_MESSAGES_MAX: usize = 65_536;

/// What is subscribed to.
#[derive(Clone, Debug)]
pub(crate) struct Subscription {
    pub(crate) id: PublisherId,
    /// `INSTANCE/RANK`, for the log.
    pub(crate) name: String,
    pub(crate) kind: EngineKind,
    pub(crate) endpoint: Endpoint,
    pub(crate) replay: Option<Endpoint>,
    pub(crate) bind: bool,
    pub(crate) topic: String,
    /// Where the events of a snapshot end.
    pub(crate) position: Option<Position>,
}

/// A publisher.
#[derive(Debug)]
pub(super) struct Publisher {
    pub(super) what: Subscription,
    pub(super) stream: Stream,
    decoder: Decoder,
    pub(super) listener: Option<TcpListener>,
    pub(super) events: Option<Peer>,
    pub(super) replay: Option<Replay>,
    /// The number from which the next replay is to be asked for, on a new connection.
    pub(super) ask_from: Option<u64>,
    /// When the events' socket is to be opened again; `None` while it is open or its name is looked up.
    pub(super) connect_at: Option<Instant>,
    pub(super) backoff: Duration,
    pub(super) totals: Totals,
}

/// Counts of a publisher beside those of its stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Bytes of payloads.
    pub(crate) bytes: u64,
    /// Messages with other parts than topic, number and payload.
    pub(crate) malformed: u64,
    /// Reports of load.
    pub(crate) loads: u64,
}

/// What became of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing is left to read.
    Done,
    /// There is more to read.
    More,
    /// The connection is lost, and why.
    Lost(String),
}

/// A replay that is asked for.
#[derive(Debug)]
pub(super) struct Replay {
    pub(super) peer: Peer,
    /// The number from which it is asked for, until the question was sent.
    pub(super) from: Option<u64>,
}

impl Publisher {
    pub(super) fn new(
        what: Subscription,
        decoder: Decoder,
        streams: &StreamsConfig,
        bytes_max: usize,
        now: Instant,
    ) -> Self {
        let settings = stream::Settings {
            first_seq: u64::from(what.kind.dialect() == Dialect::Mooncake),
            replay: what.replay.is_some(),
            snapshots: what.kind == EngineKind::Snowskin,
            replay_timeout: Duration::from_millis(streams.replay_ms_max.into()),
            stale_after: Duration::from_millis(streams.lost_ms.into()),
            held_messages_max: HELD_MESSAGES_MAX,
            held_bytes_max: bytes_max.saturating_mul(4),
            ..stream::Settings::default()
        };
        Self {
            stream: Stream::new(settings, what.position),
            decoder,
            listener: None,
            events: None,
            replay: None,
            ask_from: None,
            connect_at: Some(now),
            backoff: Duration::from_millis(streams.reconnect_ms_min.into()),
            totals: Totals::default(),
            what,
        }
    }

    /// When something is due: a new connection, a heartbeat, a timeout of the stream.
    pub(super) fn due_at(&self) -> Option<Instant> {
        let peers = self.events.iter().chain(self.replay.as_ref().map(|replay| &replay.peer));
        let ticks = peers.filter_map(|peer| peer.zmtp.tick_at());
        self.connect_at.into_iter().chain(self.stream.tick_at()).chain(ticks).min()
    }

    /// Reads what the events' socket brought.
    pub(super) fn serve_events(&mut self, now: Instant, shared: &Shared, intake: &mut Intake) -> Turn {
        let Self { events: Some(peer), stream, decoder, totals, what, ask_from, backoff, .. } = self else {
            return Turn::Done;
        };
        let mut sink = Applier { shared, what, totals, decoder, intake, ask: None };
        let turn = peer.pump(now, READS_PER_TURN, |event| {
            match event {
                Event::Ready { .. } => {
                    debug!(publisher = sink.what.name, "connected");
                    *backoff = Duration::from_millis(shared.config.streams.reconnect_ms_min.into());
                    stream.connected(now, &mut sink);
                }
                Event::Message(message) if message.part(0) == Some(b"load") => sink.load(&message),
                Event::Message(message) => match parts(&message) {
                    Some((seq, payload)) => stream.live(now, seq, payload, &mut sink),
                    None => sink.totals.malformed += 1,
                },
                Event::Subscribed(_) | Event::Unsubscribed(_) => {}
            }
            None
        });
        sink.flush();
        *ask_from = sink.ask.take().or(*ask_from);
        if let Turn::Lost(why) = &turn {
            info!(publisher = what.name, why, "the connection to a publisher is lost");
        }
        turn
    }

    /// Reads what the replay socket brought.
    pub(super) fn serve_replay(&mut self, now: Instant, shared: &Shared, intake: &mut Intake) -> Turn {
        let Self { replay: Some(replay), stream, decoder, totals, what, ask_from, .. } = self else {
            return Turn::Done;
        };
        let mut sink = Applier { shared, what, totals, decoder, intake, ask: None };
        let mut ended = false;
        let turn = replay.peer.pump(now, READS_PER_TURN, |event| {
            match event {
                Event::Ready { .. } => return replay.from.take().map(u64::to_be_bytes),
                // After a new question, what still comes belongs to the former one.
                Event::Message(_) if sink.ask.is_some() || ended => {}
                Event::Message(message) => match parts(&message) {
                    Some((seq, payload)) => {
                        ended = seq == stream::REPLAY_END;
                        stream.replayed(now, seq, payload, &mut sink);
                    }
                    None => sink.totals.malformed += 1,
                },
                Event::Subscribed(_) | Event::Unsubscribed(_) => {}
            }
            None
        });
        sink.flush();
        *ask_from = sink.ask.take().or(*ask_from);
        if ended { Turn::Lost("its end has arrived".to_owned()) } else { turn }
    }

    /// Calls the stream with a sink, and remembers the replay that it asks for.
    pub(super) fn with_stream(
        &mut self,
        shared: &Shared,
        intake: &mut Intake,
        call: impl FnOnce(&mut Stream, &mut Applier<'_>),
    ) {
        let Self { stream, decoder, totals, what, ask_from, .. } = self;
        let mut sink = Applier { shared, what, totals, decoder, intake, ask: None };
        call(stream, &mut sink);
        sink.flush();
        *ask_from = sink.ask.take().or(*ask_from);
    }

    /// Sends heartbeats. Returns which connections are lost: that of events, that of a replay.
    pub(super) fn tick_peers(&mut self, now: Instant) -> [bool; 2] {
        [self.events.as_mut(), self.replay.as_mut().map(|replay| &mut replay.peer)]
            .map(|peer| peer.is_some_and(|peer| peer.zmtp.tick(now).is_err() || peer.flush().is_err()))
    }

    /// The wait before the next attempt to connect; it doubles with each.
    pub(super) fn next_backoff(&mut self, streams: &StreamsConfig) -> Duration {
        let wait = self.backoff;
        self.backoff = (wait * 2).min(Duration::from_millis(streams.reconnect_ms_max.into()));
        wait
    }

    /// The address of an endpoint that needs no look-up.
    pub(super) fn literal(endpoint: &Endpoint) -> Option<SocketAddr> {
        let ip = endpoint.host.parse().ok()?;
        Some(SocketAddr::new(ip, endpoint.port))
    }
}

/// Number and payload of a message: the last two of its parts, whatever is before them.
fn parts<'a>(message: &Message<'a>) -> Option<(u64, &'a [u8])> {
    let seq_at = message.len().checked_sub(2)?;
    // Topic (live), delimiter, or both (replay).
    (1..=2).contains(&seq_at).then_some(())?;
    let seq = message.part(seq_at)?.try_into().ok()?;
    Some((u64::from_be_bytes(seq), message.part(seq_at + 1)?))
}

/// What a stream does to the knowledge of engines.
pub(super) struct Applier<'a> {
    shared: &'a Shared,
    what: &'a Subscription,
    totals: &'a mut Totals,
    decoder: &'a mut Decoder,
    /// Messages that were passed on and are not applied yet. Nothing else is done to the knowledge before.
    intake: &'a mut Intake,
    /// The replay that was asked for last.
    ask: Option<u64>,
}

impl Applier<'_> {
    /// Records what another Conductor knows, in turns between which readers come.
    pub(super) fn adopt(&mut self, said: &Said) -> bool {
        self.flush();
        let mut step = 0;
        while step < said.steps() {
            let next = self.shared.knowledge.write().adopt(self.what.id, said, step, ADOPTED_PER_TURN);
            let Some(next) = next else { return false };
            step = next;
        }
        true
    }

    fn flush(&mut self) {
        self.intake.apply(self.shared, self.what.id);
    }

    /// A report of load, which SGLang publishes beside its events.
    fn load(&mut self, message: &Message<'_>) {
        let stat = message.part(2).and_then(|payload| decode_load(payload).ok());
        match stat {
            Some(stat) => {
                self.totals.loads += 1;
                self.shared.report_load(self.what.id, &stat);
            }
            None => self.totals.malformed += 1,
        }
    }
}

impl Sink for Applier<'_> {
    fn apply(&mut self, _seq: u64, payload: &[u8]) -> bool {
        self.totals.bytes += payload.len() as u64;
        let readable = self.intake.decode(self.decoder, payload);
        if readable && self.shared.replicas.follows(self.what.kind) {
            self.shared.replicas.heard(self.what.id, self.intake.latest());
        }
        if self.intake.is_full() {
            self.flush();
        }
        readable
    }

    fn fence(&mut self, reason: FenceReason) {
        info!(publisher = self.what.name, %reason, "what a publisher said is forgotten");
        self.flush();
        self.decoder.restart();
        self.shared.replicas.forget(self.what.id);
        self.shared.knowledge.write().fence(self.what.id, reason);
    }

    fn serve(&mut self, served: bool) {
        self.flush();
        self.shared.knowledge.write().serve(self.what.id, served);
        self.shared.serve(self.what.id, served);
    }

    fn ask(&mut self, from: u64) {
        self.ask = Some(from);
    }
}
