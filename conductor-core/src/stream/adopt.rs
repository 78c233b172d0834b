//! What another Conductor knows of a publisher takes the place of what was applied here.
//!
//! ```text
//!   theirs   0 ───────────────────────── n-1          everything up to the message n-1, and its digest
//!   here             m ──────── n-1 ── n ─ n+1        the same message arrived here, or is replayed
//!   then     0 ───────────────────────── n-1 ─ n ─ n+1
//! ```
//!
//! A message is the link: with the number and the digest of the last message that the other one applied, it
//! is known of which run that is and where it ends. A publisher with replays is asked for it, as after a
//! restart with a snapshot, and its blocks are not served before it has answered. Of one without replays the
//! message has to have arrived here: those that follow are held from [`Stream::prepare`] on.

use te_core::Instant;

use super::held::Offered;
use super::{Adoption, FenceReason, Position, Sink, State, Stream};

impl Stream {
    /// What another Conductor knows is about to be fetched: messages of a publisher without replays are held
    /// from now on, until it is adopted or the time of a replay has passed. Returns whether it may be
    /// fetched.
    pub fn prepare(&mut self, now: Instant) -> bool {
        if self.settings.replay || self.settings.snapshots {
            return !self.settings.snapshots;
        }
        let is_live = self.connected && self.state == State::Live;
        if is_live {
            self.awaits_until = Some(now + self.settings.replay_timeout);
        }
        is_live
    }

    /// Offers what another Conductor knows, up to `position`. `take` records it, after what was known has
    /// been forgotten, and returns whether it could.
    pub fn adopt<S: Sink>(
        &mut self,
        now: Instant,
        position: Position,
        sink: &mut S,
        take: impl FnOnce(&mut S) -> bool,
    ) -> Adoption {
        let Some(last) = position.next.checked_sub(1).filter(|last| position.begin <= *last) else {
            return Adoption::Refused;
        };
        if self.settings.snapshots || position.begin < self.settings.first_seq {
            return Adoption::Refused;
        }
        if self.settings.replay {
            self.replay = None;
            self.bound = false;
            (self.attempts, self.restarts, self.hole_at) = (0, 0, None);
            let taken = self.replace(position, sink, take);
            self.serve(false, sink);
            if self.connected {
                self.state = State::Replaying;
                self.ask(now, sink);
            }
            return if taken { Adoption::Adopted } else { Adoption::Refused };
        }
        if self.awaits_until.is_none() {
            return Adoption::Refused;
        }
        let known = self.recent.digest(last).or_else(|| self.held.digest(last));
        let arrived = self.held.last().or_else(|| self.begin.and(self.next.checked_sub(1)));
        match known {
            Some(digest) if digest == position.digest && position.next >= self.next => {
                let taken = self.replace(position, sink, take);
                if taken {
                    while self.held.pop_if(|seq| seq < position.next).is_some() {}
                }
                self.go_on(sink);
                if taken { Adoption::Adopted } else { Adoption::Refused }
            }
            None if arrived.is_none_or(|arrived| arrived < last) => Adoption::Later,
            _ => {
                self.go_on(sink);
                Adoption::Refused
            }
        }
    }

    fn replace<S: Sink>(
        &mut self,
        position: Position,
        sink: &mut S,
        take: impl FnOnce(&mut S) -> bool,
    ) -> bool {
        self.void(FenceReason::Replaced, sink);
        let taken = take(sink);
        (self.begin, self.next) = (Some(position.begin), position.next);
        self.recent.push(position.next - 1, position.digest);
        if !taken {
            // A part of it may have been recorded.
            self.void(FenceReason::Replaced, sink);
        }
        taken
    }

    /// Applies what is held, and waits no more.
    pub(super) fn go_on(&mut self, sink: &mut impl Sink) {
        self.awaits_until = None;
        self.alone(sink);
    }

    /// Holds a message that comes while [`Self::adopt`] is waited for. Returns whether that is all that is to
    /// be done with it.
    pub(super) fn holds_back(&mut self, seq: u64, digest: u64, payload: &[u8], sink: &mut impl Sink) -> bool {
        if self.awaits_until.is_none() {
            return false;
        }
        if self.recent.digest(seq).or_else(|| self.held.digest(seq)) == Some(digest) {
            self.counters.duplicates += 1;
            return true;
        }
        let expected = self.held.last().map(|last| last + 1).or_else(|| self.begin.map(|_| self.next));
        let follows = expected.is_none_or(|expected| expected == seq);
        if follows && self.held.offer(seq, digest, payload) == Offered::Held {
            return true;
        }
        self.go_on(sink);
        false
    }
}
