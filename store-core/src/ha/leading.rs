//! The leader: which members have which commands, and which answers wait for them.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::history::History;
use super::remote::{Has, Remote, is_far};
use super::status::Peer;
use super::transfer::{Sending, Stored};
use super::{Action, HandOverError, Limits, MemberId, Message, Record, Reign, Rules, Timing};
use crate::command_log::{Dependence, Lsn, Recorder};
use crate::snapshot::SnapshotError;
use crate::wire::Frame;
use crate::{Master, Session};

/// Beats whose time of sending is remembered: more than are sent within a lease.
const BEATS_MAX: usize = 256;
/// A leader alone stops so long before another member may begin a new lineage.
const UNCLEAN_MARGIN: Duration = Duration::from_secs(2);
/// How often a leader alone has its record confirmed, per time after which another member may begin a new
/// lineage.
const CONFIRMATIONS: u32 = 5;
/// Most of the time between two calls that the master counts: when the process was stopped, no node could
/// show that it was alive.
const STEP_MAX: Duration = Duration::from_millis(250);
/// Beats without progress after which chunks of a snapshot are sent again.
const PATIENCE_BEATS: u32 = 8;
/// Commands that no answer waits for are sent when they are so long, bytes: some 150 gets.
const LEASES_BYTES: usize = 2 << 10;

#[derive(Debug)]
pub(super) struct Leading {
    pub(super) reign: Reign,
    pub(super) master: Master,
    recorder: Recorder,
    history: History,
    /// The record, as the arbiter last had it, and its version.
    pub(super) record: Record,
    pub(super) version: u64,
    /// The record that the arbiter was asked to have.
    pub(super) proposed: Option<Record>,
    remotes: BTreeMap<MemberId, Remote>,
    dependence: Dependence,
    /// The position up to which answers may have been given.
    released: Lsn,
    /// A time of the member's clock, and the time of the master then.
    clock: (Instant, Instant),
    beat: u64,
    next_beat: Instant,
    /// When the latest beats were sent, the last one first.
    sent_at: VecDeque<Instant>,
    rules: Rules,
    /// When the arbiter was asked for what it last confirmed.
    confirmed: Instant,
    /// Who is to lead instead, and until when it may begin to.
    handing: Option<(MemberId, Instant)>,
    /// When the state is compared next.
    compare_at: Instant,
}

/// What a leader begins with.
pub(super) struct Beginning {
    pub(super) reign: Reign,
    pub(super) master: Master,
    pub(super) recorder: Recorder,
    pub(super) record: Record,
    pub(super) version: u64,
    /// The position and the time of the last command of the former leader.
    pub(super) after: Lsn,
    pub(super) at: Instant,
    pub(super) rules: Rules,
    /// When the arbiter was asked for this reign.
    pub(super) asked_at: Instant,
}

impl Leading {
    pub(super) fn new(now: Instant, of: Beginning) -> Self {
        let Beginning { reign, mut master, mut recorder, record, version, after, rules, .. } = of;
        // Every other member gets a snapshot, which has the first command of this reign.
        drop(recorder.take());
        master.set_term(reign.term);
        // The answers of the former leader may depend on all that it has written.
        let dependence = Dependence::new(&mut master, after);
        Self {
            reign,
            history: History::new(recorder.lsn()),
            master,
            recorder,
            record,
            version,
            proposed: None,
            remotes: BTreeMap::new(),
            dependence,
            released: after,
            clock: (now, of.at),
            beat: 0,
            next_beat: now,
            sent_at: VecDeque::new(),
            rules,
            confirmed: of.asked_at,
            handing: None,
            compare_at: now + rules.timing.compare,
        }
    }

    /// The master's time.
    pub(super) fn shown(&mut self, now: Instant) -> Instant {
        let (last, shown) = self.clock;
        if now > last {
            self.clock = (now, shown + (now - last).min(STEP_MAX));
        }
        self.clock.1
    }

    pub(super) const fn lsn(&self) -> Lsn {
        self.recorder.lsn()
    }

    pub(super) const fn changed(&self) -> Lsn {
        self.dependence.changed()
    }

    pub(super) fn history_bytes(&self) -> u64 {
        self.history.bytes()
    }

    pub(super) fn peers(&self) -> Vec<Peer> {
        let peer = |(id, remote): (&MemberId, &Remote)| remote.peer(*id, self.record.has(*id));
        self.remotes.iter().map(peer).collect()
    }

    pub(super) const fn is_handing_over(&self) -> bool {
        self.handing.is_some()
    }

    /// Carries out a request. Returns the command that the answer depends on.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Lsn {
        let shown = self.shown(now);
        self.recorder.handle(&mut self.master, shown, session, frame, out);
        self.dependence.executed(&mut self.master, frame, self.recorder.lsn());
        if self.recorder.pending_bytes() >= self.rules.limits.append_bytes {
            self.record_commands();
        }
        self.dependence.of(&self.master, session, frame)
    }

    /// Notes what the last command has changed.
    fn note_changes(&mut self) {
        self.dependence.note(&mut self.master, self.recorder.lsn());
    }

    pub(super) fn session_ended(&mut self, now: Instant, session: Session) {
        let shown = self.shown(now);
        self.recorder.session_ended(&mut self.master, shown, session);
        self.note_changes();
    }

    pub(super) fn set_wall_ms(&mut self, now: Instant, wall_ms: u64) {
        let shown = self.shown(now);
        self.recorder.set_wall_ms(&mut self.master, shown, wall_ms);
    }

    /// Handles the master's timeouts.
    pub(super) fn master_timeout(&mut self, now: Instant) {
        let shown = self.shown(now);
        if self.master.poll_timeout().is_some_and(|due| due <= shown) {
            self.recorder.handle_timeout(&mut self.master, shown);
            self.note_changes();
        }
    }

    fn record_commands(&mut self) {
        let commands = self.recorder.take();
        if !commands.is_empty() {
            self.history.push(self.recorder.lsn(), commands);
        }
    }

    /// Sends new commands to the members that lack them, if an answer may wait for them. Others, such as the
    /// leases of gets, wait for a command that is sent at once, for the next beat, or until they are many:
    /// each message costs all processes more than a get does. Not until they are very many, because a
    /// follower that repeats thousands at a time may take a core from the leader for a while.
    pub(super) fn flush(&mut self, actions: &mut VecDeque<Action>) {
        let waits = self.dependence.awaited() > self.history.ends();
        if waits || self.handing.is_some() || self.recorder.pending_bytes() >= LEASES_BYTES {
            self.record_commands();
        }
        let ends = self.history.ends();
        let lacks = |remote: &Remote| remote.follows() && remote.sent < ends;
        let behind: Vec<MemberId> =
            self.remotes.iter().filter(|(_, remote)| lacks(remote)).map(|(id, _)| *id).collect();
        for member in behind {
            self.send_commands(member, actions);
        }
        self.forget();
    }

    /// Sends a member commands that it was not sent yet, as far as it may be sent more.
    fn send_commands(&mut self, member: MemberId, actions: &mut VecDeque<Action>) {
        let limits = self.rules.limits;
        while let Some(remote) = self.remotes.get(&member)
            && remote.follows()
            && remote.sent < self.history.ends()
        {
            let under_way = self.history.between(remote.acked, remote.sent);
            if under_way.is_some_and(|bytes| bytes >= limits.window_bytes) {
                return;
            }
            if !self.append(member, None, actions) {
                return;
            }
        }
    }

    /// Sends a member one message with commands that it was not sent yet, or none. Returns whether it could.
    fn append(&mut self, member: MemberId, digest: Option<u64>, actions: &mut VecDeque<Action>) -> bool {
        let (reign, beat, named) = (self.reign, self.beat, self.is_named(member));
        let Some(remote) = self.remotes.get_mut(&member) else { return false };
        let after = remote.sent;
        let Some((commands, ends)) = self.history.after(after, self.rules.limits.append_bytes) else {
            remote.is_behind(named);
            return false;
        };
        if after < ends {
            (remote.sent, remote.sent_beat) = (ends, beat);
        }
        let digest = digest.filter(|_| ends == self.recorder.lsn()).map(|digest| (ends, digest));
        let append = Message::Append { reign, after, commands, beat, digest };
        actions.push_back(Action::Send(member, append));
        true
    }

    fn send_chunks(&mut self, member: MemberId, actions: &mut VecDeque<Action>) {
        let (reign, window) = (self.reign, self.rules.limits.window_chunks);
        let Some(remote) = self.remotes.get_mut(&member) else { return };
        let life = remote.life;
        let Has::Parts(sending) = &mut remote.has else { return };
        while let Some(chunk) = sending.next(reign, life, window) {
            actions.push_back(Action::Send(member, chunk));
        }
    }

    /// Forgets commands that no member needs, and those beyond the limit.
    fn forget(&mut self) {
        let limit = self.rules.limits.history_bytes;
        loop {
            let needed = self.remotes.values().map(Remote::needs).min().unwrap_or(Lsn::MAX);
            self.history.forget(needed.min(self.history.ends()));
            if self.history.bytes() <= limit {
                return;
            }
            let proposed = self.proposed.as_ref();
            for (id, remote) in &mut self.remotes {
                if remote.needs() == needed {
                    remote.is_behind(self.record.has(*id) || proposed.is_some_and(|record| record.has(*id)));
                }
            }
        }
    }

    /// Sends beats, when they are due.
    pub(super) fn beat(&mut self, now: Instant, actions: &mut VecDeque<Action>) {
        let timing = self.rules.timing;
        if now < self.next_beat {
            return;
        }
        self.record_commands();
        self.next_beat = now + timing.beat;
        self.beat += 1;
        self.sent_at.push_front(now);
        self.sent_at.truncate(BEATS_MAX);
        let digest = self.digest(now);
        let members: Vec<MemberId> = self.remotes.keys().copied().collect();
        for member in members {
            let Some(remote) = self.remotes.get_mut(&member) else { continue };
            match &mut remote.has {
                Has::State => {
                    if now > remote.heard + timing.beat + timing.beat {
                        // Something was lost.
                        remote.again(self.beat);
                    }
                    self.append(member, digest, actions);
                    self.send_commands(member, actions);
                }
                Has::Parts(sending) => {
                    sending.stalls(now, timing.beat * PATIENCE_BEATS);
                    self.send_chunks(member, actions);
                    // It may have loaded all of them, and its word have been lost.
                    self.append_nothing(member, actions);
                }
                // It may still have the state of a while ago: then it shall not believe that no one leads.
                Has::Nothing => self.append_nothing(member, actions),
            }
        }
        self.invite(now, actions);
        self.forget();
    }

    fn append_nothing(&mut self, member: MemberId, actions: &mut VecDeque<Action>) {
        let (reign, beat, after) = (self.reign, self.beat, self.history.ends());
        let commands = Vec::new();
        let append = Message::Append { reign, after, commands, beat, digest: None };
        actions.push_back(Action::Send(member, append));
    }

    fn digest(&mut self, now: Instant) -> Option<u64> {
        let rules = self.rules;
        if now < self.compare_at || self.remotes.is_empty() {
            return None;
        }
        self.compare_at = now + rules.timing.compare;
        let small = self.master.stats().objects <= rules.limits.compare_objects;
        small.then(|| self.master.digest())
    }

    /// When something is due next.
    pub(super) fn due(&self) -> Instant {
        let silent = self.rules.timing.silent;
        // Nothing is done for a silent member while the arbiter has not answered.
        let watched = |remote: &&Remote| remote.counted && self.proposed.is_none();
        let silent = self.remotes.values().filter(watched).map(|remote| remote.heard + silent);
        let (from, shown) = self.clock;
        let master = self.master.poll_timeout().map(|due| from + (due - shown));
        silent.chain(master).chain([self.next_beat]).min().unwrap_or(self.next_beat)
    }

    /// A member without state has asked for it.
    pub(super) fn join(&mut self, now: Instant, member: MemberId, life: u64) {
        if self.remotes.get(&member).is_some_and(|remote| remote.life == life) {
            return;
        }
        let named = self.is_named(member);
        self.remotes.insert(member, Remote::new(now, life, named));
    }

    /// Whether a member waits for a snapshot.
    pub(super) fn wants_snapshot(&self) -> bool {
        self.remotes.values().any(|remote| matches!(remote.has, Has::Nothing) && !remote.lost)
    }

    /// Takes a snapshot for the members that wait for one, if none is there that can be used.
    pub(super) fn take_snapshot<'a>(
        &mut self,
        now: Instant,
        sessions: impl Iterator<Item = &'a Session>,
        actions: &mut VecDeque<Action>,
    ) -> Option<bool> {
        self.record_commands();
        let mut sent = self.remotes.values().filter_map(|remote| match &remote.has {
            Has::Parts(sending) => Some(&sending.stored),
            _ => None,
        });
        let used = sent.find(|stored| self.history.has(stored.lsn)).cloned();
        let taken = used.is_none();
        let stored = match used {
            Some(stored) => stored,
            None => {
                let mut chunks: Vec<Arc<[u8]>> = Vec::new();
                let mut sink = |chunk: &[u8]| -> Result<(), core::convert::Infallible> {
                    chunks.push(chunk.into());
                    Ok(())
                };
                let (term, crc32c) = (self.reign.term, self.rules.crc32c);
                let written = self.recorder.snapshot(&self.master, sessions, term, crc32c, &mut sink);
                match written {
                    Ok(_) => Arc::new(Stored { lsn: self.lsn(), chunks }),
                    Err(SnapshotError::Sink(never)) => match never {},
                    Err(_) => return None,
                }
            }
        };
        let waiting = |remote: &&mut Remote| matches!(remote.has, Has::Nothing) && !remote.lost;
        for remote in self.remotes.values_mut().filter(waiting) {
            remote.has = Has::Parts(Sending::new(now, Arc::clone(&stored)));
        }
        let members: Vec<MemberId> = self.remotes.keys().copied().collect();
        for member in members {
            self.send_chunks(member, actions);
        }
        Some(taken)
    }

    /// A member has chunks of a snapshot.
    pub(super) fn has_taken(
        &mut self,
        now: Instant,
        member: MemberId,
        (life, lsn, chunks): (u64, Lsn, u32),
        actions: &mut VecDeque<Action>,
    ) {
        let Some(remote) = self.remotes.get_mut(&member).filter(|remote| remote.life == life) else { return };
        let Has::Parts(sending) = &mut remote.has else { return };
        if sending.stored.lsn == lsn {
            sending.taken(now, chunks);
            self.send_chunks(member, actions);
        }
    }

    pub(super) fn has_acked(
        &mut self,
        now: Instant,
        member: MemberId,
        (life, lsn, beat, gap): (u64, Lsn, u64, bool),
        actions: &mut VecDeque<Action>,
    ) {
        let sent_at = self.beat.checked_sub(beat).and_then(|ago| self.sent_at.get(ago as usize).copied());
        let Some(remote) = self.remotes.get_mut(&member) else { return };
        if remote.life != life {
            // A late message of an earlier life may have hidden this one.
            if now >= remote.heard + self.rules.timing.silent {
                self.join(now, member, life);
            }
            return;
        }
        remote.has_acked(now, lsn, beat, gap);
        if beat > remote.lease_after {
            remote.leased_from = remote.leased_from.max(sent_at);
        }
        if remote.follows() && !self.history.has(remote.sent) {
            let named = self.is_named(member);
            if let Some(remote) = self.remotes.get_mut(&member) {
                remote.is_behind(named);
            }
        }
        self.send_commands(member, actions);
        self.invite(now, actions);
    }

    /// Whether the record, or the one that is proposed, names the member as in sync.
    fn is_named(&self, member: MemberId) -> bool {
        self.record.has(member) || self.proposed.as_ref().is_some_and(|proposed| proposed.has(member))
    }

    /// The members whose acknowledgements answers wait for, but for this one.
    fn counted(&self) -> impl Iterator<Item = Option<&Remote>> {
        let named = self.record.in_sync.iter().chain(self.proposed.iter().flat_map(|record| &record.in_sync));
        let named = named.filter(|id| **id != self.record.leader).map(|id| self.remotes.get(id));
        named.chain(self.remotes.values().filter(|remote| remote.counted).map(Some))
    }

    /// The position up to which every counted member has the log; `None` while no answer may be given.
    fn acked(&self, now: Instant) -> Option<Lsn> {
        if self.alone_until().is_some_and(|until| now >= until) {
            return None;
        }
        let mut acked = self.lsn();
        for remote in self.counted() {
            let leased_from = remote?.leased_from?;
            if now >= leased_from + self.rules.timing.lease {
                return None;
            }
            acked = acked.min(remote?.acked);
        }
        Some(acked)
    }

    /// The position up to which answers may be given.
    pub(super) fn ready(&mut self, now: Instant) -> Option<Lsn> {
        let acked = self.acked(now)?;
        self.released = self.released.max(acked);
        self.dependence.confirm(acked);
        Some(acked)
    }

    /// Until when a leader alone may give answers without a word of the arbiter: another member may begin a
    /// new lineage after that.
    fn alone_until(&self) -> Option<Instant> {
        let unclean = self.rules.timing.unclean.filter(|_| self.record.is_alone())?;
        Some(self.confirmed + unclean.saturating_sub(UNCLEAN_MARGIN))
    }

    /// The record that the arbiter should have, if it should have another one, or confirm this one.
    pub(super) fn wanted(&mut self, now: Instant) -> Option<Record> {
        if self.proposed.is_some() {
            return None;
        }
        let Rules { timing, limits, .. } = self.rules;
        let me = self.record.leader;
        for member in self.record.in_sync.iter().filter(|member| **member != me) {
            let remote = self.remotes.get(member);
            if remote.is_none_or(|remote| remote.lost || now >= remote.heard + timing.silent) {
                return Some(self.record.without(*member));
            }
        }
        for (member, remote) in &mut self.remotes {
            if self.record.has(*member) {
                continue;
            }
            let alive = remote.is_alive(now, &timing);
            // It is counted first. When it has all that was answered until then, the record may name it.
            if !remote.counted {
                remote.counted = alive && !is_far(self.history.behind(remote.acked), &limits);
            } else if !alive {
                remote.counted = false;
            } else if remote.acked >= self.released {
                return Some(self.record.with(*member));
            }
        }
        let alone = timing.unclean.filter(|_| self.record.is_alone());
        alone.filter(|unclean| now >= self.confirmed + *unclean / CONFIRMATIONS).map(|_| self.record.clone())
    }

    /// The arbiter has the record that was proposed; it was asked at `asked_at`.
    pub(super) fn recorded(&mut self, record: Record, version: u64, asked_at: Instant) {
        self.proposed = None;
        self.confirmed = asked_at;
        (self.record, self.version) = (record, version);
        for (member, remote) in &mut self.remotes {
            remote.counted = self.record.has(*member);
            remote.lost &= remote.counted;
        }
    }

    /// Begins to hand over, to a member or to the one that is least behind.
    pub(super) fn hand_over(
        &mut self,
        now: Instant,
        to: Option<MemberId>,
    ) -> Result<MemberId, HandOverError> {
        if self.handing.is_some() {
            return Err(HandOverError::UnderWay);
        }
        let may = |member: &MemberId| {
            let remote = self.remotes.get(member);
            self.record.has(*member) && remote.is_some_and(|remote| remote.follows() && !remote.lost)
        };
        let to = match to {
            Some(member) if may(&member) => member,
            Some(member) => return Err(HandOverError::NotInSync { member }),
            None => {
                let others = self.remotes.iter().filter(|(id, _)| may(id));
                let best = others.max_by_key(|(_, remote)| remote.acked);
                best.map(|(id, _)| *id).ok_or(HandOverError::Alone)?
            }
        };
        self.handing = Some((to, now + self.rules.timing.hand_over));
        Ok(to)
    }

    /// Asks the member that is to lead to take over, as soon as it has every command; after that the leader
    /// has no lease from it.
    pub(super) fn invite(&mut self, now: Instant, actions: &mut VecDeque<Action>) {
        let Some((member, until)) = self.handing else { return };
        let (reign, lsn, beat) = (self.reign, self.lsn(), self.beat);
        let Some(remote) = self.remotes.get_mut(&member) else {
            self.handing = None;
            return;
        };
        if now >= until || remote.lost || !remote.follows() || !self.record.has(member) {
            self.handing = None;
            return;
        }
        if remote.acked < lsn || self.proposed.is_some() || (remote.lease_after == beat && beat > 0) {
            return;
        }
        (remote.leased_from, remote.lease_after) = (None, beat);
        actions.push_back(Action::Send(member, Message::TakeOver { reign, lsn, beat }));
    }
}

impl Timing {
    /// What is inconsistent in these times, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        if self.beat.is_zero() || self.beat > STEP_MAX - STEP_MAX / 5 {
            return Some("beat must be 1 ms to 200 ms");
        }
        if self.silent < self.beat * 2 {
            return Some("silent must be at least two beats");
        }
        if self.lease < self.silent {
            return Some("lease must be at least silent");
        }
        if self.take_over < self.lease + self.lease / 5 {
            return Some("take_over must be longer than lease by a fifth: clocks run at different rates");
        }
        if self.unclean.is_some_and(|unclean| unclean < UNCLEAN_MARGIN * 2) {
            return Some("unclean must be at least 4 s");
        }
        None
    }
}

impl Limits {
    /// What is not possible in these limits, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        (self.history_bytes < self.window_bytes).then_some("history_bytes must be at least window_bytes")
    }
}
