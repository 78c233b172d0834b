//! The connections of the serving thread: which of them has a place, and when it gets its turn.

use std::io;
use std::time::{Duration, Instant};

use mio::{Registry, Token};
use store_core::{Peer, Session};
use tracing::debug;

use crate::Config;
use crate::connection::{Connection, Handler, Pumped, Stream, TurnLimits};
use crate::places::{Place, Source, Sources};
use crate::turns::{Class, Turns};

/// How often all connections are checked, while there are any.
pub(crate) const SWEEP: Duration = Duration::from_millis(500);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: Limits,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    sources: Sources,
    turns: Turns,
    open: usize,
    /// Memory of the buffers of all connections.
    buffered_bytes: usize,
    sweep_at: Option<Instant>,
    totals: Totals,
    /// Those that hold answers, and some that did.
    holding: Vec<usize>,
}

/// Limits on connections.
#[derive(Debug)]
struct Limits {
    connections_max: usize,
    turn: Duration,
    backlog_bytes_max: usize,
    buffered_bytes_max: usize,
    stall: Duration,
    greet: Duration,
    idle: Duration,
}

/// Counts of connections since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) accepted: u64,
    /// Refused, because no other connection could be closed.
    pub(crate) refused: u64,
    /// Closed for a new connection.
    pub(crate) displaced: u64,
    /// Closed because they were silent for too long.
    pub(crate) silent: u64,
}

/// What happened to a new connection.
#[derive(Debug)]
pub(crate) enum Entered {
    Yes,
    /// All places are in use: the caller answers with the reason.
    Full(Stream),
    Failed(io::Error),
}

impl Connections {
    pub(crate) fn new(config: &Config) -> Self {
        let ms = |ms: u32| Duration::from_millis(ms.into());
        let limits = Limits {
            connections_max: config.connections_max as usize,
            turn: Duration::from_micros(config.turn_us_max.into()),
            backlog_bytes_max: config.backlog_bytes_max as usize,
            buffered_bytes_max: (config.buffered_mib_max as usize) << 20,
            stall: ms(config.stall_ms_max),
            greet: ms(config.greet_ms_max),
            idle: if config.idle_ms_max == 0 { Duration::MAX } else { ms(config.idle_ms_max) },
        };
        Self {
            limits,
            connections: Vec::new(),
            free: Vec::new(),
            sources: Sources::default(),
            turns: Turns::default(),
            open: 0,
            buffered_bytes: 0,
            sweep_at: None,
            totals: Totals::default(),
            holding: Vec::new(),
        }
    }

    /// Number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Whether no connection waits for a turn.
    pub(crate) fn is_idle(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether a node waits for a turn.
    pub(crate) fn nodes_wait(&self) -> bool {
        self.turns.is_waiting(Class::Node)
    }

    /// When [`Self::sweep`] is due.
    pub(crate) fn sweep_at(&self) -> Option<Instant> {
        self.sweep_at
    }

    /// Whether any connection has answers that are not written yet.
    pub(crate) fn is_owing(&self) -> bool {
        self.connections.iter().flatten().any(|connection| connection.backlog_bytes() > 0)
    }

    /// Accepts a new connection; another one is closed for it if necessary.
    pub(crate) fn enter(
        &mut self,
        stream: Stream,
        peer: Peer,
        source: Source,
        registry: &Registry,
        handler: &mut impl Handler,
    ) -> Entered {
        let now = handler.clock();
        if self.open >= self.limits.connections_max {
            let Some(spared) = self.spare(source, now) else {
                self.totals.refused += 1;
                return Entered::Full(stream);
            };
            debug!(index = spared, "connection closed: its place is needed");
            self.totals.displaced += 1;
            self.close(spared, handler);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let mut connection = Box::new(Connection::new(stream, peer, source, now));
        if let Err(error) = connection.register(registry, Token(index)) {
            self.free.push(index);
            return Entered::Failed(error);
        }
        self.connections[index] = Some(connection);
        self.sources.add(source);
        self.open += 1;
        self.totals.accepted += 1;
        self.sweep_at.get_or_insert(now + SWEEP);
        self.enqueue(index);
        Entered::Yes
    }

    /// Records an event of the poller.
    pub(crate) fn ready(&mut self, index: usize, readable: bool, writable: bool, ended: bool) {
        if let Some(Some(connection)) = self.connections.get_mut(index) {
            connection.ready(readable, writable, ended);
            self.enqueue(index);
        }
    }

    /// Gives turns to the connections that wait for one, until none waits or `round` is over. `now` was read
    /// after the connections' input, as far as that has been read.
    pub(crate) fn serve(&mut self, now: Instant, round: Duration, handler: &mut impl Handler) {
        let end = now + round;
        let mut began = now;
        while let Some(turn) = self.turns.next() {
            let may_buffer = self.buffered_bytes < self.limits.buffered_bytes_max;
            let Some(Some(connection)) = self.connections.get_mut(turn.index) else { continue };
            if connection.waits != Some(turn.ticket) {
                continue;
            }
            connection.waits = None;
            let (alone, short_turn) = (self.turns.is_empty(), self.turns.short_turn(turn.class));
            let before = connection.buffered_bytes();
            let limits = TurnLimits {
                turn: match turn.class {
                    // A connection that is alone may take a longer turn.
                    Class::Node | Class::Short if !alone => short_turn,
                    _ => self.limits.turn,
                },
                backlog_bytes_max: self.limits.backlog_bytes_max,
                may_buffer,
            };
            let pumped = connection.pump(began, turn.class, &limits, handler);
            let ended = handler.clock();
            let took = ended.saturating_duration_since(began);
            began = ended;
            self.turns.ended(&turn, &mut connection.account, took);
            handler.turn_ended(took);
            self.buffered_bytes += connection.buffered_bytes();
            self.buffered_bytes -= before;
            if connection.begins_to_hold() {
                self.holding.push(turn.index);
            }
            match pumped {
                Pumped::Idle => {}
                Pumped::More => self.enqueue(turn.index),
                Pumped::Closed => self.close(turn.index, handler),
            }
            if ended >= end {
                break;
            }
        }
    }

    /// More is confirmed: connections that hold answers get a turn.
    pub(crate) fn release(&mut self) {
        for index in std::mem::take(&mut self.holding) {
            if let Some(Some(connection)) = self.connections.get_mut(index) {
                connection.look_again();
                self.enqueue(index);
            }
        }
    }

    /// Number of answers that wait to be confirmed.
    pub(crate) fn held(&self) -> usize {
        let holding = self.holding.iter().filter_map(|index| self.connections.get(*index)?.as_ref());
        holding.map(|connection| connection.held()).sum()
    }

    /// The state that the master keeps for each open connection.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.connections.iter().flatten().map(|connection| connection.session())
    }

    /// From now on every connection only sends its remaining answers. Each is queued for that.
    pub(crate) fn close_gracefully(&mut self) {
        for index in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[index] {
                connection.close_gracefully();
                self.enqueue(index);
            }
        }
    }

    /// Closes every connection at once, with whatever was not sent.
    pub(crate) fn close_all(&mut self, handler: &mut impl Handler) {
        for index in 0..self.connections.len() {
            self.close(index, handler);
        }
        self.holding.clear();
    }

    /// Gives every connection a turn, whether or not its socket is ready.
    pub(crate) fn wake_all(&mut self) {
        (0..self.connections.len()).for_each(|index| self.enqueue(index));
    }

    /// Closes connections that stall or are silent for too long, and frees large buffers of idle ones.
    pub(crate) fn sweep(&mut self, handler: &mut impl Handler) {
        let now = handler.clock();
        self.sweep_at = (self.open > 0).then(|| now + SWEEP);
        for index in 0..self.connections.len() {
            let Some(connection) = &mut self.connections[index] else { continue };
            let unmuted = connection.may_speak_again(now);
            let still = now.saturating_duration_since(connection.last_progress());
            let age = now.saturating_duration_since(connection.since());
            if connection.is_new() && age >= self.limits.greet {
                debug!(index, ?age, "connection closed: it sent no request in time");
                self.totals.silent += 1;
                self.close(index, handler);
            } else if still >= self.limits.idle || (connection.is_stuck() && still >= self.limits.stall) {
                debug!(index, ?still, "connection closed: it was silent or stalled for too long");
                self.totals.silent += 1;
                self.close(index, handler);
            } else if still >= SWEEP && still < SWEEP * 3 {
                self.buffered_bytes -= connection.buffered_bytes();
                connection.shrink();
                self.buffered_bytes += connection.buffered_bytes();
            }
            if unmuted {
                self.enqueue(index);
            }
        }
        self.make_room(handler);
    }

    /// Closes connections when all together hold too much memory: those that have completed no frame for the
    /// longest time. The others continue.
    fn make_room(&mut self, handler: &mut impl Handler) {
        if self.buffered_bytes >= self.limits.buffered_bytes_max {
            let mut stuck: Vec<(Instant, usize)> = Vec::new();
            for (index, connection) in self.connections.iter().enumerate() {
                stuck.extend(
                    connection
                        .as_ref()
                        .filter(|each| each.is_stuck())
                        .map(|each| (each.frame_since(), index)),
                );
            }
            stuck.sort_unstable();
            for (_, index) in stuck {
                if self.buffered_bytes < self.limits.buffered_bytes_max / 2 {
                    break;
                }
                debug!(index, "connection closed: the connections' memory has reached its limit");
                self.close(index, handler);
            }
        }
        for index in 0..self.connections.len() {
            if self.connections[index].as_ref().is_some_and(|connection| connection.is_starved()) {
                self.enqueue(index);
            }
        }
    }

    /// The connection to close for a new one, if any.
    fn spare(&self, newcomer: Source, now: Instant) -> Option<usize> {
        let places = self.connections.iter().enumerate().filter_map(|(index, connection)| {
            let connection = connection.as_ref()?;
            let silent = if connection.waits.is_some() {
                Duration::ZERO
            } else {
                now.saturating_duration_since(connection.heard())
            };
            Some(Place { index, source: connection.source(), standing: connection.standing(), silent })
        });
        self.sources.spare(newcomer, self.limits.connections_max, places)
    }

    fn enqueue(&mut self, index: usize) {
        if let Some(Some(connection)) = self.connections.get_mut(index)
            && connection.waits.is_none()
        {
            connection.waits = Some(self.turns.join(index, connection.class(), &connection.account));
        }
    }

    fn close(&mut self, index: usize, handler: &mut impl Handler) {
        // Closing the file descriptor removes it from the poller.
        if let Some(connection) = self.connections[index].take() {
            self.buffered_bytes -= connection.buffered_bytes();
            self.sources.remove(connection.source());
            self.free.push(index);
            self.open -= 1;
            handler.left(connection.into_session());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;
