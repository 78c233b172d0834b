//! The leader: which members have which commands, and which answers wait for them.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::{Action, MemberId, Message, Record, Reign, Start, Timing};
use crate::command_log::{Dependence, Lsn, Recorder};
use crate::wire::Frame;
use crate::{Master, Session};

/// Beats whose time of sending is remembered: more than are sent within a lease.
const BEATS_MAX: usize = 256;

#[derive(Debug)]
pub(super) struct Leading {
    pub(super) reign: Reign,
    pub(super) start: Start,
    pub(super) master: Master,
    recorder: Recorder,
    /// All commands from the first on.
    history: Vec<u8>,
    /// The positions at which parts of the history end, and where those are in it. Begins with `(0, 0)`.
    marks: Vec<(Lsn, usize)>,
    /// The record, as the arbiter last had it, and its version.
    pub(super) record: Record,
    pub(super) version: u64,
    /// The record that the arbiter was asked to have.
    pub(super) proposed: Option<Record>,
    remotes: BTreeMap<MemberId, Remote>,
    /// Answers that wait, in the order of their requests.
    held: VecDeque<Held>,
    dependence: Dependence,
    /// The position up to which answers were given.
    released: Lsn,
    /// A time of the member's clock, and the time of the master then.
    clock: (Instant, Instant),
    beat: u64,
    next_beat: Instant,
    /// When the latest beats were sent, the last one first.
    sent_at: VecDeque<Instant>,
    timing: Timing,
    /// When the arbiter was asked for what it last confirmed.
    confirmed: Instant,
}

/// Another member, as the leader knows it.
#[derive(Debug)]
struct Remote {
    life: u64,
    /// It has said that it has the first state, by an acknowledgement.
    begun: bool,
    acked: Lsn,
    sent: Lsn,
    /// The beat after which it was last sent commands.
    sent_beat: u64,
    /// When it last acknowledged anything.
    heard: Instant,
    /// When the latest beat was sent that it has acknowledged.
    leased_from: Option<Instant>,
    /// The leader waits for it as for a member in sync.
    counted: bool,
    /// The record names it for what it had in an earlier life.
    lost: bool,
}

#[derive(Debug)]
struct Held {
    lsn: Lsn,
    token: u64,
    answer: Vec<u8>,
}

/// A leader alone stops so long before another member may begin a new lineage.
const UNCLEAN_MARGIN: Duration = Duration::from_secs(2);
/// How often a leader alone has its record confirmed, per time after which another member may begin a new
/// lineage.
const CONFIRMATIONS: u32 = 5;

/// What a leader begins with.
pub(super) struct Beginning {
    pub(super) reign: Reign,
    pub(super) start: Start,
    pub(super) master: Master,
    pub(super) recorder: Recorder,
    pub(super) history: Vec<u8>,
    pub(super) marks: Vec<(Lsn, usize)>,
    pub(super) record: Record,
    pub(super) version: u64,
    /// The time of the last command.
    pub(super) at: Instant,
    pub(super) timing: Timing,
    /// When the arbiter was asked for this reign.
    pub(super) asked_at: Instant,
}

impl Leading {
    pub(super) fn new(now: Instant, of: Beginning) -> Self {
        let Beginning {
            reign, start, mut master, mut recorder, mut history, mut marks, record, version, ..
        } = of;
        if marks.first().is_none_or(|(lsn, _)| *lsn > 0) {
            marks.insert(0, (0, 0));
        }
        // The answers of the former leader may depend on all that it has written.
        let released = marks.last().map_or(0, |(lsn, _)| *lsn);
        let begins = recorder.take();
        if !begins.is_empty() {
            history.extend_from_slice(&begins);
            marks.push((recorder.lsn(), history.len()));
        }
        let dependence = Dependence::new(&mut master, released);
        Self {
            reign,
            start,
            master,
            recorder,
            history,
            marks,
            record,
            version,
            proposed: None,
            remotes: BTreeMap::new(),
            held: VecDeque::new(),
            dependence,
            released,
            clock: (now, of.at),
            beat: 0,
            next_beat: now,
            sent_at: VecDeque::new(),
            timing: of.timing,
            confirmed: of.asked_at,
        }
    }

    /// The master's time.
    pub(super) fn shown(&self, now: Instant) -> Instant {
        let (from, shown) = self.clock;
        shown + (now - from)
    }

    pub(super) const fn lsn(&self) -> Lsn {
        self.recorder.lsn()
    }

    pub(super) fn request(
        &mut self,
        now: Instant,
        token: u64,
        session: &mut Session,
        frame: &Frame<'_>,
        actions: &mut VecDeque<Action>,
    ) {
        let shown = self.shown(now);
        let mut answer = Vec::new();
        self.recorder.handle(&mut self.master, shown, session, frame, &mut answer);
        self.dependence.executed(&mut self.master, frame, self.recorder.lsn());
        let lsn = self.dependence.of(&self.master, session, frame);
        if !answer.is_empty() && self.acked(now).is_some_and(|acked| lsn <= acked) {
            self.released = self.released.max(lsn);
            actions.push_back(Action::Release { token, answer });
        } else if !answer.is_empty() {
            self.held.push_back(Held { lsn, token, answer });
        }
        self.flush(now, actions);
    }

    /// Notes what the last command has changed.
    fn note_changes(&mut self) {
        self.dependence.note(&mut self.master, self.recorder.lsn());
    }

    pub(super) fn session_ended(&mut self, now: Instant, session: Session, actions: &mut VecDeque<Action>) {
        let shown = self.shown(now);
        self.recorder.session_ended(&mut self.master, shown, session);
        self.note_changes();
        self.flush(now, actions);
    }

    /// Handles the master's timeouts.
    pub(super) fn master_timeout(&mut self, now: Instant, actions: &mut VecDeque<Action>) {
        let shown = self.shown(now);
        if self.master.poll_timeout().is_some_and(|due| due <= shown) {
            self.recorder.handle_timeout(&mut self.master, shown);
            self.note_changes();
            self.flush(now, actions);
        }
    }

    /// Sends new commands to the members that lack them, and gives the answers that wait for none.
    fn flush(&mut self, now: Instant, actions: &mut VecDeque<Action>) {
        let commands = self.recorder.take();
        if !commands.is_empty() {
            self.history.extend_from_slice(&commands);
            self.marks.push((self.recorder.lsn(), self.history.len()));
        }
        let lsn = self.lsn();
        let behind: Vec<MemberId> =
            self.remotes.iter().filter(|(_, remote)| remote.sent < lsn).map(|(id, _)| *id).collect();
        for member in behind {
            self.send(member, actions);
        }
        self.release(now, actions);
    }

    /// Sends a member what it was not sent yet.
    fn send(&mut self, member: MemberId, actions: &mut VecDeque<Action>) {
        let lsn = self.lsn();
        let (reign, beat, start) = (self.reign, self.beat, self.start);
        let named = self.record.has(member);
        let Some(remote) = self.remotes.get_mut(&member) else { return };
        let trusted = named && !remote.lost;
        if !remote.begun {
            actions.push_back(Action::Send(member, Message::Begin { reign, life: remote.life, start }));
        }
        let after = remote.sent;
        // What a member acknowledges is the end of a part.
        let Ok(at) = self.marks.binary_search_by_key(&after, |(lsn, _)| *lsn) else { return };
        let commands = self.history[self.marks[at].1..].to_vec();
        if remote.sent < lsn {
            (remote.sent, remote.sent_beat) = (lsn, beat);
        }
        actions.push_back(Action::Send(member, Message::Append { reign, after, commands, beat, trusted }));
    }

    /// Sends beats, when they are due.
    pub(super) fn beat(&mut self, now: Instant, actions: &mut VecDeque<Action>) {
        let timing = self.timing;
        if now < self.next_beat {
            return;
        }
        self.next_beat = now + timing.beat;
        self.beat += 1;
        self.sent_at.push_front(now);
        self.sent_at.truncate(BEATS_MAX);
        let members: Vec<MemberId> = self.remotes.keys().copied().collect();
        for member in members {
            if let Some(remote) = self.remotes.get_mut(&member)
                && now > remote.heard + timing.beat + timing.beat
            {
                // Something was lost.
                remote.sent = remote.acked;
            }
            self.send(member, actions);
        }
    }

    /// When something is due next.
    pub(super) fn due(&self) -> Instant {
        let silent = self.timing.silent;
        // Nothing is done for a silent member while the arbiter has not answered.
        let watched = |remote: &&Remote| remote.counted && self.proposed.is_none();
        let silent = self.remotes.values().filter(watched).map(|remote| remote.heard + silent);
        let (from, shown) = self.clock;
        let master = self.master.poll_timeout().map(|due| from + (due - shown));
        silent.chain(master).chain([self.next_beat]).min().unwrap_or(self.next_beat)
    }

    /// A member without state has asked for it.
    pub(super) fn join(&mut self, now: Instant, member: MemberId, life: u64, actions: &mut VecDeque<Action>) {
        if self.remotes.get(&member).is_some_and(|remote| remote.life == life) {
            return self.send(member, actions);
        }
        // What the record says is about an earlier life.
        let lost = self.is_named(member);
        let remote = Remote {
            life,
            begun: false,
            acked: 0,
            sent: 0,
            sent_beat: 0,
            heard: now,
            leased_from: None,
            counted: lost,
            lost,
        };
        self.remotes.insert(member, remote);
        self.send(member, actions);
    }

    pub(super) fn has_acked(
        &mut self,
        now: Instant,
        member: MemberId,
        (life, lsn, beat): (u64, Lsn, u64),
        actions: &mut VecDeque<Action>,
    ) {
        let sent_at = self.beat.checked_sub(beat).and_then(|ago| self.sent_at.get(ago as usize).copied());
        let Some(remote) = self.remotes.get_mut(&member).filter(|remote| remote.life == life) else { return };
        remote.begun = true;
        remote.heard = now;
        remote.acked = remote.acked.max(lsn);
        remote.sent = remote.sent.max(remote.acked);
        if lsn < remote.sent && beat > remote.sent_beat {
            // It has heard of a later beat, and not of the commands before it: they were lost.
            remote.sent = remote.acked;
        }
        remote.leased_from = remote.leased_from.max(sent_at);
        self.release(now, actions);
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
        let mut acked = Lsn::MAX;
        for remote in self.counted() {
            let leased_from = remote?.leased_from?;
            if now >= leased_from + self.timing.lease {
                return None;
            }
            acked = acked.min(remote?.acked);
        }
        Some(acked)
    }

    /// Gives the answers that may be given.
    pub(super) fn release(&mut self, now: Instant, actions: &mut VecDeque<Action>) {
        let Some(acked) = self.acked(now) else { return };
        self.dependence.confirm(acked);
        while let Some(first) = self.held.front().filter(|held| held.lsn <= acked) {
            self.released = self.released.max(first.lsn);
            if let Some(Held { token, answer, .. }) = self.held.pop_front() {
                actions.push_back(Action::Release { token, answer });
            }
        }
    }

    /// Until when a leader alone may give answers without a word of the arbiter: another member may begin a
    /// new lineage after that.
    fn alone_until(&self) -> Option<Instant> {
        let unclean = self.timing.unclean.filter(|_| self.record.is_alone())?;
        Some(self.confirmed + unclean.saturating_sub(UNCLEAN_MARGIN))
    }

    /// The record that the arbiter should have, if it should have another one, or confirm this one.
    pub(super) fn wanted(&mut self, now: Instant) -> Option<Record> {
        if self.proposed.is_some() {
            return None;
        }
        let timing = self.timing;
        let me = self.record.leader;
        for member in &self.record.in_sync {
            if *member == me {
                continue;
            }
            let remote = self.remotes.get(member);
            if remote.is_none_or(|remote| remote.lost || now >= remote.heard + timing.silent) {
                return Some(self.record.without(*member));
            }
        }
        let lsn = self.lsn();
        for (member, remote) in &mut self.remotes {
            if self.record.in_sync.contains(member) {
                continue;
            }
            let alive = remote.begun && now < remote.heard + timing.silent;
            // It is counted first. When it has all that was answered until then, the record may name it.
            if !remote.counted {
                remote.counted = alive && remote.acked + 64 >= lsn;
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
            remote.counted = self.record.in_sync.contains(member);
            remote.lost &= remote.counted;
        }
    }
}
