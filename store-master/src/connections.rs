//! The connections of the serving thread: who has a place, and whose turn it is.

use std::io;
use std::time::{Duration, Instant};

use mio::{Registry, Token};
use store_core::Peer;
use tracing::debug;

use crate::Config;
use crate::connection::{Connection, Handler, Pumped, Stream, TurnLimits};
use crate::places::{Place, Source, Sources};
use crate::turns::{Class, Turns};

/// How often connections are looked through. Only while there are any.
pub(crate) const SWEEP: Duration = Duration::from_millis(500);

/// See the module.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: Limits,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    sources: Sources,
    turns: Turns,
    open: usize,
    /// What all connections hold.
    buffered_bytes: usize,
    sweep_at: Option<Instant>,
    totals: Totals,
}

/// What connections are held to.
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

/// Connections since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) accepted: u64,
    /// Turned away, because nobody could be spared.
    pub(crate) refused: u64,
    /// Closed to make way for another.
    pub(crate) displaced: u64,
    /// Closed for having said nothing.
    pub(crate) silent: u64,
}

/// What became of a newcomer.
#[derive(Debug)]
pub(crate) enum Entered {
    Yes,
    /// It is to be told so.
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
        }
    }

    /// Connections that are open.
    pub(crate) fn open(&self) -> usize {
        self.open
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Whether nobody waits for a turn.
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

    /// Whether anybody has not taken its answers.
    pub(crate) fn is_owing(&self) -> bool {
        self.connections.iter().flatten().any(|connection| connection.backlog_bytes() > 0)
    }

    /// A newcomer; somebody who can be spared makes way if need be.
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
            debug!(index = spared, "connection closed: its place is wanted");
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

    /// The poll says so.
    pub(crate) fn ready(&mut self, index: usize, readable: bool, writable: bool, ended: bool) {
        if let Some(Some(connection)) = self.connections.get_mut(index) {
            connection.ready(readable, writable, ended);
            self.enqueue(index);
        }
    }

    /// Gives turns to those who wait for one, until nobody does or `round` is over. `now` was read after what waits was read from
    /// its socket, if any of it was.
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
                    // Who is alone need not hurry.
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

    /// From now on only answers go out; everybody gets the turn for it.
    pub(crate) fn close_gracefully(&mut self) {
        for index in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[index] {
                connection.close_gracefully();
                self.enqueue(index);
            }
        }
    }

    /// Everybody gets a turn, whether or not its socket says so.
    pub(crate) fn wake_all(&mut self) {
        (0..self.connections.len()).for_each(|index| self.enqueue(index));
    }

    /// Closes connections that stall, say nothing or sleep too long; takes large buffers from those that rest.
    pub(crate) fn sweep(&mut self, handler: &mut impl Handler) {
        let now = handler.clock();
        self.sweep_at = (self.open > 0).then(|| now + SWEEP);
        for index in 0..self.connections.len() {
            let Some(connection) = &mut self.connections[index] else { continue };
            let speaks_again = connection.may_speak_again(now);
            let still = now.saturating_duration_since(connection.last_progress());
            let age = now.saturating_duration_since(connection.since());
            if connection.is_new() && age >= self.limits.greet {
                debug!(index, ?age, "connection closed: it has said nothing");
                self.totals.silent += 1;
                self.close(index, handler);
            } else if still >= self.limits.idle || (connection.is_stuck() && still >= self.limits.stall) {
                debug!(index, ?still, "connection closed for silence");
                self.totals.silent += 1;
                self.close(index, handler);
            } else if still >= SWEEP && still < SWEEP * 3 {
                self.buffered_bytes -= connection.buffered_bytes();
                connection.shrink();
                self.buffered_bytes += connection.buffered_bytes();
            }
            if speaks_again {
                self.enqueue(index);
            }
        }
        self.make_room(handler);
    }

    /// When connections together hold too much, those go that have brought no whole frame for the longest time; the others
    /// go on.
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
                debug!(index, "connection closed: all connections together hold too much");
                self.close(index, handler);
            }
        }
        for index in 0..self.connections.len() {
            if self.connections[index].as_ref().is_some_and(|connection| connection.is_starved()) {
                self.enqueue(index);
            }
        }
    }

    /// Who makes way for a newcomer.
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
        // Closing the descriptor takes it out of the poll.
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
