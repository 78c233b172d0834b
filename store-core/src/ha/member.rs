//! [`Member`]: which role a process has, and how it changes.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use te_core::Instant;

use super::following::{Appended, Following};
use super::leading::{Beginning, Leading};
use super::status::{self, Status, Totals};
use super::transfer::Receiving;
use super::{
    Action, Ask, HandOverError, MemberId, Message, NotLeading, Record, Reign, Rules, Told, Versioned,
};
use crate::command_log::{Lsn, Recorder, Standby};
use crate::wire::Frame;
use crate::{ConfigError, Master, MasterConfig, Session};

/// Bits of a life that count how often a process has lost its state.
const LIFE_SHIFT: u32 = 20;

/// One master of a cluster with high availability.
///
/// *Inputs*: requests of clients and nodes ([`Self::handle`], [`Self::session_ended`], and [`Self::flush`]
/// after some of them), messages of members ([`Self::handle_message`]), answers of the arbiter
/// ([`Self::handle_told`]), snapshots ([`Self::take_snapshot`], when [`Self::wants_snapshot`]), and time
/// ([`Self::handle_timeout`], due at [`Self::poll_timeout`]). *Outputs*: [`Self::poll_action`], and
/// [`Self::ready`], which says what answers may be given. The time that is passed must not decrease.
#[derive(Debug)]
pub struct Member {
    id: MemberId,
    /// Of the process, and of its state: each time that it loses its state it has another one.
    life: u64,
    config: MasterConfig,
    rules: Rules,
    role: Role,
    /// A snapshot that is on its way here.
    receiving: Option<Receiving>,
    /// The record, as the arbiter last had it.
    seen: Option<Seen>,
    /// Members that have said that they have no state, at that version of the record.
    empty: (u64, Vec<MemberId>),
    /// The latest reign that is known.
    known: Reign,
    actions: VecDeque<Action>,
    /// Number of questions to the arbiter.
    asks: u64,
    asking: Option<Asking>,
    /// The next try to join, or to read the record.
    retry_at: Instant,
    totals: Totals,
}

#[derive(Debug)]
struct Seen {
    is: Versioned,
    /// Since when the version is known to be the same.
    since: Instant,
    /// When the arbiter last said so.
    at: Instant,
}

#[derive(Debug)]
enum Role {
    /// Has no state.
    Joining,
    Following(Box<Following>),
    Leading(Box<Leading>),
}

/// A question to which the arbiter has not answered yet.
#[derive(Debug)]
struct Asking {
    number: u64,
    at: Instant,
    /// The record that is to be, and the version that it is to replace.
    swap: Option<(u64, Record)>,
}

impl Member {
    /// A member that was just started, without state. `life` is a number that each start has anew, of 44
    /// bits. The settings are those of a new lineage, and of an existing one when this member leads it; the
    /// [epoch](MasterConfig::epoch) is the lowest that a new lineage may have.
    ///
    /// # Errors
    /// A setting is not within its limits.
    pub fn new(
        now: Instant,
        id: MemberId,
        life: u64,
        config: MasterConfig,
        rules: Rules,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            id,
            life: life << LIFE_SHIFT,
            config,
            rules,
            role: Role::Joining,
            receiving: None,
            seen: None,
            empty: (0, Vec::new()),
            known: Reign::default(),
            actions: VecDeque::new(),
            asks: 0,
            asking: None,
            retry_at: now,
            totals: Totals::default(),
        })
    }

    /// Its number.
    #[must_use]
    pub const fn id(&self) -> MemberId {
        self.id
    }

    /// Its life: another one for each start of its process, and each time that it loses its state.
    #[must_use]
    pub const fn life(&self) -> u64 {
        self.life
    }

    /// Takes the settings with which it is to lead from its next term on. The epoch, the hash seed, the key
    /// of handles and the wall time of its start stay.
    pub fn set_config(&mut self, config: &MasterConfig) {
        let MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, .. } = self.config;
        self.config = MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, ..config.clone() };
    }

    /// The master, if the member leads, and its reign.
    #[must_use]
    pub fn leads(&self) -> Option<(Reign, &Master)> {
        match &self.role {
            Role::Leading(leading) => Some((leading.reign, &leading.master)),
            _ => None,
        }
    }

    /// The state that the member follows another one with, and the reign of that.
    #[must_use]
    pub fn follows(&self) -> Option<(Reign, &Standby)> {
        match &self.role {
            Role::Following(following) => Some((following.reign, &following.standby)),
            _ => None,
        }
    }

    /// The position of the last command that the member has; 0 without state.
    #[must_use]
    pub fn lsn(&self) -> Lsn {
        match &self.role {
            Role::Joining => 0,
            Role::Following(following) => following.standby.lsn(),
            Role::Leading(leading) => leading.lsn(),
        }
    }

    /// The leader to ask instead, as far as is known.
    #[must_use]
    pub fn leader(&self) -> Option<MemberId> {
        self.seen.as_ref().map(|seen| seen.is.record.leader)
    }

    /// The oldest action that was not taken yet.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// What the member shows of itself.
    #[must_use]
    pub fn status(&self) -> Status {
        let record = self.seen.as_ref().map(|seen| seen.is.record.clone());
        let (lsn, totals) = (self.lsn(), self.totals);
        let of = Status { reign: self.known, lsn, record, totals, ..Status::default() };
        match &self.role {
            Role::Joining => of,
            Role::Following(following) => {
                Status { role: status::Role::Following, reign: following.reign, ..of }
            }
            Role::Leading(leading) => Status {
                role: status::Role::Leading,
                reign: leading.reign,
                record: Some(leading.record.clone()),
                peers: leading.peers(),
                history_bytes: leading.history_bytes(),
                ..of
            },
        }
    }

    /// The master as this member has it, if it has any state: for questions whose answers need not be new.
    #[must_use]
    pub fn master(&self) -> Option<&Master> {
        match &self.role {
            Role::Joining => None,
            Role::Following(following) => Some(following.standby.master()),
            Role::Leading(leading) => Some(&leading.master),
        }
    }

    /// The master of a leader, for what changes no state: its events.
    pub fn master_mut(&mut self) -> Option<&mut Master> {
        match &mut self.role {
            Role::Leading(leading) => Some(&mut leading.master),
            _ => None,
        }
    }

    /// The time of the master of a leader.
    pub fn master_time(&mut self, now: Instant) -> Option<Instant> {
        match &mut self.role {
            Role::Leading(leading) => Some(leading.shown(now)),
            _ => None,
        }
    }

    fn serving(&mut self) -> Option<&mut Leading> {
        match &mut self.role {
            Role::Leading(leading) if !leading.is_handing_over() => Some(leading),
            _ => None,
        }
    }

    /// Whether requests are taken.
    #[must_use]
    pub fn is_serving(&self) -> bool {
        matches!(&self.role, Role::Leading(leading) if !leading.is_handing_over())
    }

    /// A request of a client or node: appends its answer to `out`, and returns the command that the answer
    /// depends on. It may be given when [`Self::ready`] has come so far, and not after the member was
    /// [deposed](Action::Deposed).
    ///
    /// # Errors
    /// The member does not lead, or hands over: the request was not carried out.
    pub fn handle(
        &mut self,
        now: Instant,
        session: &mut Session,
        frame: &Frame<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Lsn, NotLeading> {
        Ok(self.serving().ok_or(NotLeading)?.handle(now, session, frame, out))
    }

    /// Sends the commands of the latest requests to the other members.
    pub fn flush(&mut self, now: Instant) {
        if let Role::Leading(leading) = &mut self.role {
            leading.flush(&mut self.actions);
            leading.invite(now, &mut self.actions);
        }
    }

    /// The position of the last command that answers may depend on which are given at this moment; `None`:
    /// no answer may be given, whatever it depends on.
    pub fn ready(&mut self, now: Instant) -> Option<Lsn> {
        match &mut self.role {
            Role::Leading(leading) => leading.ready(now),
            _ => None,
        }
    }

    /// The last command that has changed anything.
    #[must_use]
    pub fn changed(&self) -> Lsn {
        match &self.role {
            Role::Leading(leading) => leading.changed(),
            _ => 0,
        }
    }

    /// As [`Master::set_wall_ms`]. Without effect if the member does not lead.
    pub fn set_wall_ms(&mut self, now: Instant, wall_ms: u64) {
        if let Role::Leading(leading) = &mut self.role {
            leading.set_wall_ms(now, wall_ms);
        }
    }

    /// A connection of the leader has ended. Without effect if the member does not lead.
    pub fn session_ended(&mut self, now: Instant, session: Session) {
        if let Role::Leading(leading) = &mut self.role {
            leading.session_ended(now, session);
        }
    }

    /// Whether another member waits for a snapshot.
    #[must_use]
    pub fn wants_snapshot(&self) -> bool {
        matches!(&self.role, Role::Leading(leading) if leading.wants_snapshot())
    }

    /// Takes a snapshot for the members that wait for one: the master stands still meanwhile. `sessions` are
    /// all connections for which [`Self::handle`] was called, and that have not ended.
    pub fn take_snapshot<'a>(&mut self, now: Instant, sessions: impl Iterator<Item = &'a Session>) {
        if let Role::Leading(leading) = &mut self.role
            && leading.take_snapshot(now, sessions, &mut self.actions) == Some(true)
        {
            self.totals.snapshots_taken += 1;
        }
    }

    /// Begins to hand over to another member; to the one that is least behind, if none is named. Returns
    /// which. From here on no request is taken; the member is [deposed](Action::Deposed) when the other one
    /// leads, and serves again if that does not happen in [`Timing::hand_over`](super::Timing::hand_over).
    ///
    /// # Errors
    /// See [`HandOverError`].
    pub fn hand_over(&mut self, now: Instant, to: Option<MemberId>) -> Result<MemberId, HandOverError> {
        let Role::Leading(leading) = &mut self.role else { return Err(HandOverError::NotLeading) };
        let to = leading.hand_over(now, to)?;
        self.flush(now);
        Ok(to)
    }

    /// A message of another member.
    pub fn handle_message(&mut self, now: Instant, from: MemberId, message: Message) {
        match message {
            Message::Join { life, version } => match &mut self.role {
                Role::Leading(leading) => leading.join(now, from, life),
                // With an answer of the arbiter it may lead.
                Role::Joining if self.asking.as_ref().is_none_or(|asking| asking.swap.is_none()) => {
                    self.actions.push_back(Action::Send(from, Message::Empty { version }));
                }
                Role::Joining | Role::Following(_) => {}
            },
            Message::Empty { version } if version == self.empty.0 => {
                if !self.empty.1.contains(&from) {
                    self.empty.1.push(from);
                }
            }
            Message::Empty { .. } => {}
            Message::Chunk { reign, life, lsn, number, chunks, bytes } => {
                if life == self.life {
                    self.chunk(now, from, (reign, lsn, chunks), number, bytes);
                }
            }
            Message::Taken { reign, life, lsn, chunks } => match &mut self.role {
                Role::Leading(leading) if leading.reign == reign => {
                    leading.has_taken(now, from, (life, lsn, chunks), &mut self.actions);
                }
                _ => {}
            },
            Message::Append { reign, after, commands, beat, digest } => {
                if let Some(appended) = self.append(now, from, reign, after, &commands) {
                    self.ack(now, from, beat, appended, digest);
                }
            }
            Message::Ack { reign, life, lsn, beat, gap } => match &mut self.role {
                Role::Leading(leading) if leading.reign == reign => {
                    leading.has_acked(now, from, (life, lsn, beat, gap), &mut self.actions);
                }
                _ => {}
            },
            Message::TakeOver { reign, lsn, beat } => self.invited(now, from, reign, lsn, beat),
            Message::Nack { reign } => self.learn(now, reign),
        }
        self.act(now);
    }

    /// Takes a part of a snapshot, and the state when it is whole.
    fn chunk(
        &mut self,
        now: Instant,
        from: MemberId,
        (reign, lsn, chunks): (Reign, Lsn, u32),
        number: u32,
        bytes: Arc<[u8]>,
    ) {
        if reign < self.known {
            return self.nack(from);
        }
        self.learn(now, reign);
        let life = self.life;
        match &self.role {
            Role::Joining => {}
            // It has fallen too far behind.
            Role::Following(following)
                if following.reign == reign
                    && following.leader == from
                    && following.promised.is_none()
                    && following.standby.lsn() < lsn => {}
            Role::Following(following) => {
                if following.reign == reign && following.promised.is_none() {
                    let ack = following.ack(life, following.beat, false);
                    self.actions.push_back(Action::Send(from, ack));
                }
                return;
            }
            Role::Leading(_) => return,
        }
        let limits = self.rules.limits;
        let same = self.receiving.take().filter(|receiving| receiving.is_of(from, reign, lsn, chunks));
        let Some(mut receiving) = same.or_else(|| Receiving::begin(from, reign, lsn, chunks, &limits)) else {
            self.totals.snapshots_refused += 1;
            return;
        };
        let chunks = receiving.take(number, bytes, &limits);
        self.actions.push_back(Action::Send(from, Message::Taken { reign, life, lsn, chunks }));
        if !receiving.is_whole() {
            self.receiving = Some(receiving);
            return;
        }
        match receiving.restore(self.rules.crc32c) {
            Some(standby) => {
                let following = Following::new(now, reign, from, standby);
                self.totals.snapshots_loaded += 1;
                self.actions.push_back(Action::Send(from, following.ack(life, 0, false)));
                self.role = Role::Following(Box::new(following));
            }
            None => {
                self.totals.snapshots_refused += 1;
                self.join(now);
            }
        }
    }

    fn nack(&mut self, to: MemberId) {
        self.actions.push_back(Action::Send(to, Message::Nack { reign: self.known }));
    }

    /// Returns what has become of commands; `None`: they are not those of the leader that the member follows.
    fn append(
        &mut self,
        now: Instant,
        from: MemberId,
        reign: Reign,
        after: Lsn,
        commands: &[u8],
    ) -> Option<Appended> {
        if reign < self.known {
            self.nack(from);
            return None;
        }
        self.learn(now, reign);
        let Role::Following(following) = &mut self.role else { return None };
        if following.reign != reign || following.leader != from || following.promised.is_some() {
            return None;
        }
        let Ok(appended) = following.append(after, commands) else {
            // The state is not that of the leader: it begins anew.
            self.diverged(now);
            return None;
        };
        following.heard = now;
        Some(appended)
    }

    fn ack(
        &mut self,
        now: Instant,
        leader: MemberId,
        beat: u64,
        appended: Appended,
        digest: Option<(Lsn, u64)>,
    ) {
        let Role::Following(following) = &mut self.role else { return };
        let at = following.standby.lsn();
        if digest.is_some_and(|(lsn, digest)| lsn == at && digest != following.standby.master().digest()) {
            return self.diverged(now);
        }
        following.beat = following.beat.max(beat);
        let ack = following.ack(self.life, beat, appended == Appended::Gap);
        self.actions.push_back(Action::Send(leader, ack));
    }

    fn diverged(&mut self, now: Instant) {
        self.totals.diverged += 1;
        self.join(now);
    }

    /// The leader asks the member to take over. It has no lease from this member from here on, because that
    /// acknowledges no later beat than the one of the request.
    fn invited(&mut self, now: Instant, from: MemberId, reign: Reign, lsn: Lsn, beat: u64) {
        let Role::Following(following) = &mut self.role else { return };
        let may = following.reign == reign
            && following.leader == from
            && following.promised.is_none()
            && following.standby.lsn() == lsn
            && following.beat <= beat;
        if may {
            (following.promised, following.invited) = (Some(now), true);
            self.retry_at = now;
        }
    }

    /// There is a reign at least as late as this one.
    fn learn(&mut self, now: Instant, reign: Reign) {
        if reign <= self.known {
            return;
        }
        self.known = reign;
        let own = match &self.role {
            Role::Joining => return,
            Role::Following(following) => following.reign,
            Role::Leading(leading) => leading.reign,
        };
        if own < reign {
            self.join(now);
        }
    }

    /// Gives up what it has, and joins.
    fn join(&mut self, now: Instant) {
        if let Role::Leading(_) = mem::replace(&mut self.role, Role::Joining) {
            self.totals.deposed += 1;
            self.actions.push_back(Action::Deposed);
        }
        self.receiving = None;
        self.life += 1;
        self.retry_at = now;
    }

    /// The arbiter has answered question `number`, or has not in time.
    pub fn handle_told(&mut self, now: Instant, number: u64, told: Told) {
        let Some(Asking { at, swap, .. }) = self.asking.take_if(|asking| asking.number == number) else {
            return;
        };
        match (told, swap) {
            (Told::Unknown, None) => self.totals.arbiter_errors += 1,
            // It may have been carried out, or may be later: the same again decides.
            (Told::Unknown, Some((version, record))) => {
                self.totals.arbiter_errors += 1;
                return self.ask(Some((version, record)), at);
            }
            (Told::Swapped { version }, Some((_, record))) => self.swapped(now, version, record, at),
            (Told::Swapped { .. }, None) => {}
            (Told::Is(is), Some((_, record))) if is.record == record => {
                // An earlier try was carried out, whose answer was lost.
                self.swapped(now, is.version, record, at);
            }
            (Told::Is(is), swap) => {
                if swap.is_some()
                    && let Role::Leading(leading) = &mut self.role
                {
                    leading.proposed = None;
                }
                if let Role::Following(_) = &self.role {
                    // With this it can decide.
                    self.retry_at = now;
                }
                self.note(now, is);
            }
        }
        self.act(now);
    }

    /// Notes what the arbiter has.
    fn note(&mut self, now: Instant, is: Versioned) {
        let same = self.seen.as_ref().filter(|seen| seen.is.version == is.version);
        let since = same.map_or(now, |seen| seen.since);
        let reign = is.record.reign;
        if let Role::Leading(leading) = &mut self.role
            && leading.reign == reign
        {
            (leading.record, leading.version) = (is.record.clone(), is.version);
        }
        self.seen = Some(Seen { is, since, at: now });
        self.learn(now, reign);
    }

    /// The arbiter has the record that this member wanted.
    fn swapped(&mut self, now: Instant, version: u64, record: Record, asked_at: Instant) {
        let reign = record.reign;
        let is = Versioned { version, record: record.clone() };
        self.seen = Some(Seen { is, since: now, at: now });
        match mem::replace(&mut self.role, Role::Joining) {
            Role::Leading(mut leading) if leading.reign == reign => {
                leading.recorded(record, version, asked_at);
                self.role = Role::Leading(leading);
            }
            Role::Following(following) if following.promised.is_some() && following.reign.next() == reign => {
                self.known = reign;
                let Following { mut standby, leader, invited, .. } = *following;
                // A setting that cannot be changed stays, with all others, as the former leader had them.
                let _ = standby.reconfigure(self.config.clone());
                let (after, at) = (standby.lsn(), standby.time());
                let (master, recorder) = standby.lead(invited);
                let rules = self.rules;
                let of = Beginning { reign, master, recorder, record, version, after, at, rules, asked_at };
                self.lead(now, of);
                // It learns at once that it does not lead any more.
                self.nack(leader);
            }
            // A new lineage, which begins with nothing.
            role if reign.term == 1 && self.known <= reign => {
                self.role = role;
                self.join(now);
                self.known = reign;
                let epoch = u32::try_from(reign.lineage).unwrap_or(u32::MAX);
                let config = MasterConfig { epoch, ..self.config.clone() };
                let Ok(mut master) = Master::new(config) else { return };
                let recorder = Recorder::new(&mut master);
                let (after, at, rules) = (0, Instant::ZERO, self.rules);
                let of = Beginning { reign, master, recorder, record, version, after, at, rules, asked_at };
                self.lead(now, of);
            }
            // The state is gone that was to be led.
            role => self.role = role,
        }
    }

    fn lead(&mut self, now: Instant, of: Beginning) {
        let reign = of.reign;
        self.totals.led += 1;
        self.receiving = None;
        self.role = Role::Leading(Box::new(Leading::new(now, of)));
        self.actions.push_back(Action::Leads(reign));
    }

    /// Does what is due. Call it when [`Self::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Role::Leading(leading) = &mut self.role {
            leading.master_timeout(now);
            leading.beat(now, &mut self.actions);
        }
        self.act(now);
    }

    /// When [`Self::handle_timeout`] is due next.
    #[must_use]
    pub fn poll_timeout(&self) -> Instant {
        match &self.role {
            Role::Leading(leading) => leading.due(),
            Role::Following(following) if following.promised.is_none() => {
                (following.heard + self.rules.timing.take_over).max(self.retry_at)
            }
            Role::Following(_) | Role::Joining => self.retry_at,
        }
    }

    /// Asks the arbiter, and others to join, where it is time to.
    fn act(&mut self, now: Instant) {
        match &mut self.role {
            Role::Leading(leading) => {
                if self.asking.is_none()
                    && let Some(record) = leading.wanted(now)
                {
                    leading.proposed = Some(record.clone());
                    let version = leading.version;
                    self.ask(Some((version, record)), now);
                }
            }
            Role::Following(following) => {
                let silent = now >= following.heard + self.rules.timing.take_over;
                if (silent || following.promised.is_some()) && now >= self.retry_at {
                    self.take_over(now);
                }
            }
            Role::Joining => {
                if now < self.retry_at {
                    return;
                }
                self.retry_at = now + self.rules.timing.retry;
                self.try_to_join(now);
            }
        }
    }

    /// The leader is silent: takes over if the record says that this member has everything.
    fn take_over(&mut self, now: Instant) {
        self.retry_at = now + self.rules.timing.retry;
        let (Role::Following(following), None) = (&mut self.role, &self.asking) else { return };
        let of_this = |seen: &&Seen| {
            seen.is.record.reign == following.reign && seen.is.record.leader == following.leader
        };
        let silent_since = following.promised.unwrap_or(following.heard + self.rules.timing.take_over);
        match self.seen.as_ref().filter(of_this) {
            Some(Seen { is: seen, .. }) if seen.record.has(self.id) => {
                following.promised.get_or_insert(now);
                let reign = following.reign.next();
                let record = Record { reign, leader: self.id, in_sync: vec![self.id] };
                let version = seen.version;
                // The record may have changed since it was read: then the arbiter says so, and it is read
                // again.
                self.ask(Some((version, record)), now);
            }
            // It was left out, or is not in sync yet, and the leader does not send anything.
            Some(seen) if seen.at >= silent_since => self.join(now),
            _ => self.ask(None, now),
        }
    }

    fn try_to_join(&mut self, now: Instant) {
        if let Some(Seen { is, since, .. }) = &self.seen
            && self.asking.is_none()
        {
            let Versioned { version, record } = is;
            // It is the epoch of the new master, too: no number of an earlier one is given again.
            let lineage = record.reign.lineage.max(self.known.lineage) + 1;
            let lineage = lineage.max(self.config.epoch.into());
            let fresh = Record { reign: Reign { lineage, term: 1 }, leader: self.id, in_sync: vec![self.id] };
            let version = *version;
            if self.empty.0 != version {
                self.empty = (version, Vec::new());
            }
            let is_empty = |id: &MemberId| *id == self.id || self.empty.1.contains(id);
            let anew = self.rules.timing.unclean.is_some_and(|unclean| {
                let abandoned = record.is_alone() && now >= *since + unclean;
                abandoned || record.in_sync.iter().all(is_empty)
            });
            if version == 0 || anew {
                return self.ask(Some((version, fresh)), now);
            }
            for member in record.in_sync.iter().filter(|id| **id != self.id) {
                let join = Message::Join { life: self.life, version };
                self.actions.push_back(Action::Send(*member, join));
            }
        }
        if self.asking.is_none() {
            self.ask(None, now);
        }
    }

    fn ask(&mut self, swap: Option<(u64, Record)>, at: Instant) {
        self.asks += 1;
        let number = self.asks;
        let ask = match &swap {
            Some((version, record)) => Ask::Swap { version: *version, record: record.clone() },
            None => Ask::Read,
        };
        self.asking = Some(Asking { number, at, swap });
        self.actions.push_back(Action::Ask(number, ask));
    }
}
