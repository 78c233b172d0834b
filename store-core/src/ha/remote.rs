//! Another member, as the leader knows it.

use te_core::Instant;

use super::status::{Peer, Stage};
use super::transfer::Sending;
use super::{Limits, MemberId, Timing};
use crate::command_log::Lsn;

#[derive(Debug)]
pub(super) struct Remote {
    pub(super) life: u64,
    pub(super) has: Has,
    pub(super) acked: Lsn,
    pub(super) sent: Lsn,
    /// The beat after which it was last sent commands.
    pub(super) sent_beat: u64,
    /// The beat after which commands were last sent to it again.
    again_beat: u64,
    /// When it last acknowledged anything.
    pub(super) heard: Instant,
    /// When the latest beat was sent that it has acknowledged.
    pub(super) leased_from: Option<Instant>,
    /// Acknowledgements of beats up to this one are no lease: it may have promised since.
    pub(super) lease_after: u64,
    /// The leader waits for it as for a member in sync.
    pub(super) counted: bool,
    /// The record names it for what it had in an earlier life, or it is too far behind.
    pub(super) lost: bool,
}

/// What state a member has.
#[derive(Debug)]
pub(super) enum Has {
    /// None that the leader's commands continue.
    Nothing,
    /// Parts of a snapshot.
    Parts(Sending),
    /// That after the command that it has acknowledged.
    State,
}

impl Remote {
    /// A member without state. What the record says of it, if anything, is about an earlier life.
    pub(super) const fn new(now: Instant, life: u64, named: bool) -> Self {
        Self {
            life,
            has: Has::Nothing,
            acked: 0,
            sent: 0,
            sent_beat: 0,
            again_beat: 0,
            heard: now,
            leased_from: None,
            lease_after: 0,
            counted: named,
            lost: named,
        }
    }

    pub(super) const fn follows(&self) -> bool {
        matches!(self.has, Has::State)
    }

    pub(super) fn is_alive(&self, now: Instant, timing: &Timing) -> bool {
        self.follows() && now < self.heard + timing.silent
    }

    /// The position from which on it needs commands.
    pub(super) fn needs(&self) -> Lsn {
        match &self.has {
            Has::Nothing => Lsn::MAX,
            Has::Parts(sending) => sending.stored.lsn,
            Has::State => self.acked,
        }
    }

    /// It gets a snapshot, instead of commands that are not kept.
    pub(super) fn is_behind(&mut self, named: bool) {
        self.has = Has::Nothing;
        self.lost = named;
    }

    /// Notes an acknowledgement. Returns whether it has state now, and had none before.
    pub(super) fn has_acked(&mut self, now: Instant, lsn: Lsn, beat: u64, gap: bool) -> bool {
        self.heard = now;
        let begins = match &self.has {
            Has::Nothing => return false,
            Has::Parts(sending) if lsn < sending.stored.lsn => return false,
            Has::Parts(_) => true,
            Has::State => false,
        };
        if begins {
            self.has = Has::State;
            (self.acked, self.sent) = (lsn, lsn);
        }
        self.acked = self.acked.max(lsn);
        self.sent = self.sent.max(self.acked);
        // It has heard of a later beat, and not of the commands before it: they were lost.
        let lost = lsn < self.sent && beat > self.sent_beat;
        // Each gap is reported for every message after it.
        if lost || (gap && beat > self.again_beat) {
            self.again(beat);
        }
        begins
    }

    /// Sends again what is not known to have arrived.
    pub(super) fn again(&mut self, beat: u64) {
        self.sent = self.acked;
        self.again_beat = beat;
    }

    pub(super) fn peer(&self, id: MemberId, in_sync: bool) -> Peer {
        let stage = match &self.has {
            Has::Nothing => Stage::Waits,
            Has::Parts(sending) => {
                let (taken, chunks) = sending.progress();
                Stage::Receives { taken, chunks }
            }
            Has::State => Stage::Follows,
        };
        Peer { id, stage, acked: self.acked, in_sync: in_sync && !self.lost }
    }
}

/// Whether so much is missing that the leader does not wait for the member yet.
pub(super) const fn is_far(behind: Option<u64>, limits: &Limits) -> bool {
    match behind {
        Some(bytes) => bytes > limits.near_bytes,
        None => true,
    }
}
