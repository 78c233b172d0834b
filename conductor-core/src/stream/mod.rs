//! The stream of one publisher: which of its messages are applied, in which order, and when nothing that it
//! said may be relied on any more. It decodes nothing.
//!
//! ```text
//!                 connected                 end of the replay, nothing missing
//!   Connecting ──────────────▶ Replaying ───────────────────────────────────────▶ Live
//!     ▲    │                      ▲  ▲                                            │  │
//!     │    │ stale_after          │  └── Gap ◀────── a number is missing ─────────┘  │
//!     │    ▼                      │       └─ not to be had: fence, and from the start, or from here on
//!     │  Stale ─── connected ─────┘                                                  │
//!     └───────────────────────── disconnected, from any state ───────────────────────┘
//! ```
//!
//! Messages are numbered; publishers keep the last ones and replay them when asked. On the wire nothing tells
//! one run of a publisher from the next, which counts from the beginning again. So every replay asks for one
//! message more than is missing, and the digest of that message has to be the one that was applied; and the
//! messages of a new connection are only applied once one of them was found in a replay. A batch has the time
//! at which it was made in it, so that two runs do not produce equal messages.
//!
//! A publisher with snapshots ([`Settings::snapshots`]) answers a replay of messages that it does not keep
//! with everything that is there, numbered up to the latest message. Then nothing is missing, although what
//! was applied is void.
//!
//! What holds at any time: the messages that were applied since the last [`Sink::fence`] are consecutive
//! messages of one run of the publisher. This relies on a connection not outliving the publisher's run: a
//! broker between them that survives a restart is noticed only when numbers go back.

mod adopt;
mod held;
mod history;
mod settings;
#[cfg(test)]
mod tests;

use te_core::Instant;
use xxhash_rust::xxh3::xxh3_64;

use held::{Held, Offered, Recent};
pub use history::History;
pub use settings::{Adoption, Counters, FenceReason, Position, Settings, State};

/// The number that marks the end of a replay; its payload is empty.
pub const REPLAY_END: u64 = u64::MAX;
/// Messages in a row whose numbers lie back, after which a publisher without a replay counts as restarted.
const LATE_MESSAGES_MAX: u32 = 16;
/// Times that a stream begins from the start without reaching [`State::Live`], before it does without
/// replays.
const RESTARTS_MAX: u32 = 3;

/// What a stream has done to its surroundings, in the order of the calls.
pub trait Sink {
    /// The next message of the publisher. Returns whether it could be read. If not, it may have removed
    /// blocks: then the sink has to forget the publisher's blocks, as after a [`Sink::fence`].
    fn apply(&mut self, seq: u64, payload: &[u8]) -> bool;

    /// Everything that was applied is void: the publisher's blocks are to be forgotten at once.
    fn fence(&mut self, reason: FenceReason);

    /// Whether the publisher's blocks may be part of answers. At first they may not.
    fn serve(&mut self, served: bool);

    /// A replay from the message `from` on is to be asked for, over a new connection to the publisher's
    /// replay port. Replay connections of before are closed, and nothing more is passed on from them.
    fn ask(&mut self, from: u64);
}

#[derive(Clone, Copy, Debug)]
struct Replay {
    /// The number of the next message in the answer.
    expected: u64,
    /// The first message has to have this digest, since it was applied before.
    overlap: Option<u64>,
    /// A message of the answer has arrived.
    begun: bool,
    /// The answer tells everything that is there, in place of the messages that are asked for.
    snapshot: bool,
    until: Instant,
}

/// The stream of one publisher.
#[derive(Debug)]
pub struct Stream {
    settings: Settings,
    state: State,
    connected: bool,
    /// Messages of the connection belong to the same run of the publisher as what was applied.
    bound: bool,
    served: bool,
    /// Where what was applied begins; `None` if nothing was applied since the last fence.
    begin: Option<u64>,
    /// The number of the next message to apply; the first one if nothing was applied.
    next: u64,
    recent: Recent,
    /// The number after the last message of a snapshot, which has told what the messages before it told.
    told_before: u64,
    held: Held,
    replay: Option<Replay>,
    /// Replays in a row that brought nothing new.
    attempts: u32,
    restarts: u32,
    /// The first number of the last answer that began behind what was asked for.
    hole_at: Option<u64>,
    late: u32,
    /// Until when messages are held for what another Conductor knows.
    awaits_until: Option<Instant>,
    lost_at: Instant,
    counters: Counters,
}

impl Stream {
    /// A stream that was never connected. With the `position` of a snapshot it goes on there, once the
    /// publisher's replay has shown that it is still the same run.
    #[must_use]
    pub fn new(settings: Settings, position: Option<Position>) -> Self {
        let mut recent = Recent::default();
        if let Some(position) = position {
            recent.push(position.next.wrapping_sub(1), position.digest);
        }
        Self {
            held: Held::new(&settings),
            state: State::Connecting,
            connected: false,
            bound: false,
            served: false,
            begin: position.map(|position| position.begin),
            next: position.map_or(settings.first_seq, |position| position.next),
            recent,
            told_before: 0,
            replay: None,
            attempts: 0,
            restarts: 0,
            hole_at: None,
            late: 0,
            awaits_until: None,
            lost_at: Instant::ZERO,
            counters: Counters::default(),
            settings,
        }
    }

    /// The state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Whether the publisher's blocks may be part of answers.
    #[must_use]
    pub const fn is_served(&self) -> bool {
        self.served
    }

    /// Whether everything that the publisher ever said was applied, and not only its latest messages.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        match self.begin {
            Some(begin) => begin == self.settings.first_seq,
            None => self.settings.replay && self.state == State::Live,
        }
    }

    /// What has to be kept in a snapshot; `None` when nothing was applied.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        let begin = self.begin?;
        let digest = self.recent.digest(self.next.checked_sub(1)?)?;
        Some(Position { begin, next: self.next, digest })
    }

    /// The counts.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The connection to the publisher is open, and subscribed.
    pub fn connected(&mut self, now: Instant, sink: &mut impl Sink) {
        self.counters.connections += 1;
        self.connected = true;
        self.bound = false;
        self.held.clear();
        self.late = 0;
        self.attempts = 0;
        self.restarts = 0;
        self.hole_at = None;
        self.awaits_until = None;
        if self.settings.replay {
            self.state = State::Replaying;
            self.ask(now, sink);
            return;
        }
        // Whether this is the same run, and whether messages are missing, cannot be known.
        self.void(FenceReason::Unverifiable, sink);
        self.alone(sink);
    }

    /// The connection to the publisher has ended.
    pub fn disconnected(&mut self, now: Instant, sink: &mut impl Sink) {
        if self.connected {
            self.connected = false;
            self.lost_at = now;
            self.replay = None;
            self.awaits_until = None;
            self.held.clear();
            self.state = State::Connecting;
        }
        self.tick(now, sink);
    }

    /// A message arrived over the connection that [`Self::connected`] announced.
    pub fn live(&mut self, now: Instant, seq: u64, payload: &[u8], sink: &mut impl Sink) {
        if !self.connected || seq == REPLAY_END {
            self.counters.unexpected += 1;
            return;
        }
        let digest = xxh3_64(payload);
        if !self.settings.replay {
            return self.live_alone(seq, digest, payload, sink);
        }
        let begins = self.begin.is_none() && seq == self.settings.first_seq && self.state == State::Live;
        self.bound |= begins;
        if self.bound && seq == self.next {
            self.apply(seq, digest, payload, sink);
            if self.state != State::Live {
                self.drain(sink);
                if self.held.is_settled(self.next) {
                    self.replay = None;
                    self.enter_live(sink);
                }
            }
            return;
        }
        if self.begin.is_some() && seq < self.next {
            return self.behind(now, seq, digest, payload, sink);
        }
        self.hold(now, seq, digest, payload, sink);
        if self.state == State::Live {
            self.counters.gaps += u64::from(seq > self.next);
            self.state = State::Gap;
            self.attempts = 0;
            self.ask(now, sink);
        }
    }

    /// A message of the replay that [`Sink::ask`] asked for last, [`REPLAY_END`] included.
    pub fn replayed(&mut self, now: Instant, seq: u64, payload: &[u8], sink: &mut impl Sink) {
        let Some(replay) = &mut self.replay else {
            self.counters.unexpected += 1;
            return;
        };
        replay.until = now + self.settings.replay_timeout;
        if seq == REPLAY_END {
            return self.replay_ended(now, sink);
        }
        let begins = !core::mem::replace(&mut replay.begun, true);
        let mut expected = replay.expected;
        if begins && self.settings.snapshots && seq != expected {
            self.begin_snapshot(seq, sink);
            expected = seq;
        }
        if seq < expected {
            self.counters.duplicates += 1;
            return;
        }
        let digest = xxh3_64(payload);
        if seq > expected && !self.accepts_hole(seq) {
            self.counters.holes += 1;
            self.hole_at = Some(seq);
            return self.ask_again(now, FenceReason::Lost, sink);
        }
        let overlap = self.replay.as_mut().and_then(|replay| {
            replay.expected = seq + 1;
            replay.overlap.take()
        });
        match overlap {
            // The connection was faster.
            None if self.begin.is_some() && seq < self.next => self.counters.duplicates += 1,
            None => {
                self.attempts = 0;
                self.apply(seq, digest, payload, sink);
                if self.replay.is_some_and(|replay| replay.snapshot) {
                    self.told_before = self.next;
                    while self.held.pop_if(|held| held <= seq).is_some() {}
                } else {
                    self.compare_held(now, seq, digest, sink);
                }
            }
            Some(before) if before == digest => self.compare_held(now, seq, digest, sink),
            Some(_) => self.begin_again(now, FenceReason::Restarted, sink),
        }
    }

    /// The replay's connection could not be opened, or ended before the end of the replay.
    pub fn replay_failed(&mut self, now: Instant, sink: &mut impl Sink) {
        if self.replay.is_some() {
            self.counters.replays_failed += 1;
            self.ask_again(now, FenceReason::NoReplay, sink);
        }
    }

    /// What time does: an answer that does not come, a publisher that does not come back.
    pub fn tick(&mut self, now: Instant, sink: &mut impl Sink) {
        if self.replay.is_some_and(|replay| now >= replay.until) {
            self.replay_failed(now, sink);
        }
        if self.awaits_until.is_some_and(|until| now >= until) {
            self.go_on(sink);
        }
        if !self.connected && self.served && now >= self.lost_at + self.settings.stale_after {
            self.counters.stale += 1;
            self.state = State::Stale;
            self.serve(false, sink);
        }
    }

    /// When [`Self::tick`] has something to do next.
    #[must_use]
    pub fn tick_at(&self) -> Option<Instant> {
        let stale = (!self.connected && self.served).then(|| self.lost_at + self.settings.stale_after);
        [self.replay.map(|replay| replay.until), self.awaits_until, stale].into_iter().flatten().min()
    }

    /// The publisher is known to be dead: its blocks are void at once. If its connection is open all the
    /// same, the stream begins again.
    pub fn died(&mut self, now: Instant, sink: &mut impl Sink) {
        self.void(FenceReason::Dead, sink);
        self.serve(false, sink);
        self.awaits_until = None;
        if !self.connected {
            self.state = State::Connecting;
        } else if self.settings.replay {
            self.begin_again(now, FenceReason::Dead, sink);
        } else {
            self.alone(sink);
        }
    }

    fn apply(&mut self, seq: u64, digest: u64, payload: &[u8], sink: &mut impl Sink) {
        self.begin.get_or_insert(seq);
        self.next = seq + 1;
        self.recent.push(seq, digest);
        self.counters.applied += 1;
        if !sink.apply(seq, payload) {
            self.counters.fences[FenceReason::Unreadable as usize] += 1;
            self.begin = Some(self.next);
        }
    }

    /// Forgets what was applied.
    fn void(&mut self, reason: FenceReason, sink: &mut impl Sink) {
        if self.begin.take().is_some() {
            self.counters.fences[reason as usize] += 1;
            sink.fence(reason);
        }
        self.next = self.settings.first_seq;
        self.told_before = 0;
        self.recent.clear();
    }

    /// An answer does not begin at what was asked for: it is a snapshot. Its numbers are those of messages
    /// that told other things, so that no message of the connection is applied before its end.
    fn begin_snapshot(&mut self, seq: u64, sink: &mut impl Sink) {
        self.void(FenceReason::Lost, sink);
        self.bound = false;
        (self.begin, self.next) = (Some(self.settings.first_seq), seq);
        if let Some(replay) = &mut self.replay {
            (replay.expected, replay.overlap, replay.snapshot) = (seq, None, true);
        }
        self.counters.snapshots += 1;
    }

    fn serve(&mut self, served: bool, sink: &mut impl Sink) {
        if self.served != served {
            self.served = served;
            sink.serve(served);
        }
    }

    fn enter_live(&mut self, sink: &mut impl Sink) {
        self.state = State::Live;
        (self.attempts, self.restarts, self.hole_at) = (0, 0, None);
        self.serve(true, sink);
    }

    /// From now on without what was before, and without a replay: nothing was applied, so that every message
    /// of the connection fits.
    fn alone(&mut self, sink: &mut impl Sink) {
        self.bound = true;
        self.enter_live(sink);
        while let Some(held) = self.held.pop_if(|_| true) {
            if self.begin.is_some() && held.seq != self.next {
                self.void(FenceReason::Lost, sink);
            }
            self.apply(held.seq, held.digest, &held.payload, sink);
        }
        self.held.clear();
    }

    fn ask(&mut self, now: Instant, sink: &mut impl Sink) {
        let last = self.begin.and_then(|_| self.recent.digest(self.next.wrapping_sub(1)));
        if last.is_none() {
            // What was applied, if anything was, cannot be shown to be of the same run.
            self.void(FenceReason::Unverifiable, sink);
        }
        // Under the number of a snapshot's last message the publisher keeps another one.
        let behind_snapshot = self.bound && self.told_before != 0 && self.told_before == self.next;
        let last = last.filter(|_| !behind_snapshot);
        let from = match last {
            Some(_) => self.next - 1,
            None if behind_snapshot => self.next,
            None => self.settings.first_seq,
        };
        let until = now + self.settings.replay_timeout;
        self.replay = Some(Replay { expected: from, overlap: last, begun: false, snapshot: false, until });
        self.counters.replays += 1;
        sink.ask(from);
    }

    /// Asks once more, unless that brought nothing too often.
    fn ask_again(&mut self, now: Instant, reason: FenceReason, sink: &mut impl Sink) {
        self.attempts += 1;
        if self.attempts < self.settings.replay_attempts_max {
            self.ask(now, sink);
        } else if self.begin.is_some() {
            self.begin_again(now, reason, sink);
        } else {
            self.counters.given_up += 1;
            self.replay = None;
            self.alone(sink);
        }
    }

    /// Forgets everything, and asks for all that the publisher has.
    fn begin_again(&mut self, now: Instant, reason: FenceReason, sink: &mut impl Sink) {
        self.void(reason, sink);
        self.serve(false, sink);
        self.bound = false;
        (self.attempts, self.hole_at) = (0, None);
        self.held.forget_dropped();
        self.restarts += 1;
        if self.restarts > RESTARTS_MAX {
            self.counters.given_up += 1;
            self.replay = None;
            return self.alone(sink);
        }
        self.state = State::Replaying;
        self.ask(now, sink);
    }

    /// An answer begins at `seq`, behind what was asked for. Without anything applied that is accepted when
    /// it happens twice: the publisher does not keep more. Otherwise messages were lost.
    fn accepts_hole(&self, seq: u64) -> bool {
        self.begin.is_none() && self.hole_at.is_some_and(|before| seq >= before)
    }

    fn replay_ended(&mut self, now: Instant, sink: &mut impl Sink) {
        self.counters.replays_ended += 1;
        if self.replay.is_some_and(|replay| replay.overlap.is_some()) {
            // The message that was applied last is unknown there. A lossy answer looks the same.
            if self.hole_at == Some(REPLAY_END) {
                return self.begin_again(now, FenceReason::Restarted, sink);
            }
            self.hole_at = Some(REPLAY_END);
            return self.ask_again(now, FenceReason::Restarted, sink);
        }
        // A snapshot's numbers are of this run alone: what follows it continues it.
        self.bound |= self.replay.is_some_and(|replay| replay.snapshot);
        if self.bound {
            self.drain(sink);
        }
        if self.held.is_settled(self.next) {
            self.replay = None;
            return self.enter_live(sink);
        }
        // Messages arrived since the replay was asked for that it does not have, or of which it is to show
        // that they are of the same run.
        self.ask_again(now, FenceReason::Lost, sink);
    }

    /// Applies what is held as far as it is next.
    fn drain(&mut self, sink: &mut impl Sink) {
        while let Some(held) = self.held.pop_if(|seq| seq <= self.next) {
            if held.seq == self.next {
                self.apply(held.seq, held.digest, &held.payload, sink);
            }
        }
    }

    /// The replay has the message `seq`: if it is held, too, it tells whether both are of one run.
    fn compare_held(&mut self, now: Instant, seq: u64, digest: u64, sink: &mut impl Sink) {
        while let Some(held) = self.held.pop_if(|held| held <= seq) {
            match if held.seq == seq { Some(digest) } else { self.recent.digest(held.seq) } {
                Some(replayed) if replayed == held.digest => self.bound = true,
                Some(_) => return self.begin_again(now, FenceReason::Conflict, sink),
                // The publisher does not keep it any more.
                None => {}
            }
        }
    }

    /// A message arrived whose number lies behind what was applied.
    fn behind(&mut self, now: Instant, seq: u64, digest: u64, payload: &[u8], sink: &mut impl Sink) {
        if seq < self.told_before {
            self.counters.duplicates += 1;
            return;
        }
        if self.recent.digest(seq) == Some(digest) {
            self.bound = true;
            self.counters.duplicates += 1;
            return;
        }
        self.counters.back += 1;
        self.held.clear();
        self.begin_again(now, FenceReason::Restarted, sink);
        self.hold(now, seq, digest, payload, sink);
    }

    fn hold(&mut self, now: Instant, seq: u64, digest: u64, payload: &[u8], sink: &mut impl Sink) {
        match self.held.offer(seq, digest, payload) {
            Offered::Held => {}
            Offered::Duplicate => self.counters.duplicates += 1,
            Offered::Reordered => self.counters.reordered += 1,
            Offered::Full => self.counters.overflows += 1,
            Offered::Conflict => {
                self.counters.back += 1;
                self.begin_again(now, FenceReason::Conflict, sink);
            }
        }
    }

    /// A message of a publisher that replays nothing.
    fn live_alone(&mut self, seq: u64, digest: u64, payload: &[u8], sink: &mut impl Sink) {
        if self.holds_back(seq, digest, payload, sink) {
            return;
        }
        if self.begin.is_some() && seq < self.next {
            let known = self.recent.digest(seq);
            if known == Some(digest) {
                self.counters.duplicates += 1;
                return;
            }
            self.late += 1;
            if known.is_none() && seq != self.settings.first_seq && self.late < LATE_MESSAGES_MAX {
                self.counters.reordered += 1;
                return;
            }
            self.counters.back += 1;
            self.void(FenceReason::Restarted, sink);
        } else if self.begin.is_some() && seq > self.next {
            self.counters.gaps += 1;
            self.void(FenceReason::NoReplay, sink);
        }
        self.late = 0;
        self.apply(seq, digest, payload, sink);
    }
}
