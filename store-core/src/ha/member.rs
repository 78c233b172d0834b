//! [`Member`]: which role a process has, and how it changes.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::mem;

use te_core::Instant;

use super::following::Following;
use super::leading::{Beginning, Leading};
use super::{Action, Ask, MemberId, Message, Record, Reign, Start, Timing, Told, Versioned};
use crate::command_log::{Lsn, Standby};
use crate::wire::Frame;
use crate::{ConfigError, ErrorCode, Master, MasterConfig, Session};

/// Bits of a life that count how often a process has lost its state.
const LIFE_SHIFT: u32 = 20;

/// One master of a cluster with high availability.
///
/// *Inputs*: requests of clients and nodes ([`Self::request`], [`Self::session_ended`]), messages of members
/// ([`Self::handle_message`]), answers of the arbiter ([`Self::handle_told`]), and time
/// ([`Self::handle_timeout`], due at [`Self::poll_timeout`]). *Outputs*: [`Self::poll_action`]. The time that
/// is passed must not decrease.
#[derive(Debug)]
pub struct Member {
    id: MemberId,
    /// Of the process, and of its state: each time that it loses its state it has another one.
    life: u64,
    config: MasterConfig,
    timing: Timing,
    role: Role,
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
    /// bits; the settings of all members are the same, but for what [`Start`] has.
    ///
    /// # Errors
    /// A setting is not within its limits.
    pub fn new(
        now: Instant,
        id: MemberId,
        life: u64,
        config: MasterConfig,
        timing: Timing,
    ) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            id,
            life: life << LIFE_SHIFT,
            config,
            timing,
            role: Role::Joining,
            seen: None,
            empty: (0, Vec::new()),
            known: Reign::default(),
            actions: VecDeque::new(),
            asks: 0,
            asking: None,
            retry_at: now,
        })
    }

    /// Its number.
    #[must_use]
    pub const fn id(&self) -> MemberId {
        self.id
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

    /// A request of a client or node, whose answer is given by [`Action::Release`] with this token.
    ///
    /// # Errors
    /// `UnavailableInCurrentStatus`: the member does not lead.
    pub fn request(
        &mut self,
        now: Instant,
        token: u64,
        session: &mut Session,
        frame: &Frame<'_>,
    ) -> Result<(), ErrorCode> {
        let Role::Leading(leading) = &mut self.role else {
            return Err(ErrorCode::UnavailableInCurrentStatus);
        };
        leading.request(now, token, session, frame, &mut self.actions);
        Ok(())
    }

    /// A connection of the leader has ended. Without effect if the member does not lead.
    pub fn session_ended(&mut self, now: Instant, session: Session) {
        if let Role::Leading(leading) = &mut self.role {
            leading.session_ended(now, session, &mut self.actions);
        }
    }

    /// A message of another member.
    pub fn handle_message(&mut self, now: Instant, from: MemberId, message: Message) {
        match message {
            Message::Join { life, version } => match &mut self.role {
                Role::Leading(leading) => leading.join(now, from, life, &mut self.actions),
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
            Message::Begin { reign, life, start } => self.begin(now, from, reign, life, start),
            Message::Append { reign, after, commands, beat, trusted } => {
                if self.append(now, from, reign, after, &commands) {
                    self.ack(from, beat, trusted);
                }
            }
            Message::Ack { reign, life, lsn, beat } => match &mut self.role {
                Role::Leading(leading) if leading.reign == reign => {
                    leading.has_acked(now, from, (life, lsn, beat), &mut self.actions);
                }
                _ => {}
            },
            Message::Nack { reign } => self.learn(now, reign),
        }
        self.act(now);
    }

    fn begin(&mut self, now: Instant, from: MemberId, reign: Reign, life: u64, start: Start) {
        if life != self.life || reign < self.known || !matches!(self.role, Role::Joining) {
            return;
        }
        self.known = reign;
        let Ok(standby) = Standby::new(self.config_of(start)) else { return };
        self.role = Role::Following(Box::new(Following::new(now, reign, from, standby)));
    }

    /// Returns whether the commands are those of the leader that the member follows.
    fn append(&mut self, now: Instant, from: MemberId, reign: Reign, after: Lsn, commands: &[u8]) -> bool {
        if reign < self.known {
            let nack = Message::Nack { reign: self.known };
            self.actions.push_back(Action::Send(from, nack));
            return false;
        }
        self.learn(now, reign);
        let Role::Following(following) = &mut self.role else { return false };
        if following.reign != reign || following.leader != from || following.promised {
            return false;
        }
        if following.append(after, commands).is_err() {
            // The state is not that of the leader: it begins anew.
            self.join(now);
            return false;
        }
        following.heard = now;
        true
    }

    fn ack(&mut self, leader: MemberId, beat: u64, trusted: bool) {
        if let Role::Following(following) = &mut self.role {
            following.trusted = trusted;
            let ack = following.ack(self.life, beat);
            self.actions.push_back(Action::Send(leader, ack));
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
            self.actions.retain(|action| !matches!(action, Action::Release { .. }));
            self.actions.push_back(Action::Deposed);
        }
        self.life += 1;
        self.retry_at = now;
    }

    /// The arbiter has answered question `number`, or has not in time.
    pub fn handle_told(&mut self, now: Instant, number: u64, told: Told) {
        let Some(Asking { at, swap, .. }) = self.asking.take_if(|asking| asking.number == number) else {
            return;
        };
        match (told, swap) {
            (Told::Unknown, None) => {}
            // It may have been carried out, or may be later: the same again decides.
            (Told::Unknown, Some((version, record))) => {
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
                leading.release(now, &mut self.actions);
                self.role = Role::Leading(leading);
            }
            Role::Following(following) if following.promised && following.reign.next() == reign => {
                self.known = reign;
                let Following { standby, history, marks, .. } = *following;
                let start = start_of(standby.master().config());
                let at = standby.time();
                let (master, recorder) = standby.lead();
                let timing = self.timing;
                let of = Beginning {
                    reign,
                    start,
                    master,
                    recorder,
                    history,
                    marks,
                    record,
                    version,
                    at,
                    timing,
                    asked_at,
                };
                self.lead(now, of);
            }
            // A new lineage, which begins with nothing.
            role if reign.term == 1 && self.known <= reign => {
                self.role = role;
                self.join(now);
                self.known = reign;
                let epoch = u32::try_from(reign.lineage).unwrap_or(u32::MAX);
                let start = Start { epoch, ..start_of(&self.config) };
                let Ok(mut master) = Master::new(self.config_of(start)) else { return };
                let recorder = crate::command_log::Recorder::new(&mut master);
                let of = Beginning {
                    reign,
                    start,
                    master,
                    recorder,
                    history: vec![],
                    marks: vec![],
                    record,
                    version,
                    at: Instant::ZERO,
                    timing: self.timing,
                    asked_at,
                };
                self.lead(now, of);
            }
            // The state is gone that was to be led.
            role => self.role = role,
        }
    }

    fn lead(&mut self, now: Instant, of: Beginning) {
        let reign = of.reign;
        self.role = Role::Leading(Box::new(Leading::new(now, of)));
        self.actions.push_back(Action::Leads(reign));
    }

    /// Does what is due. Call it when [`Self::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Role::Leading(leading) = &mut self.role {
            leading.master_timeout(now, &mut self.actions);
            leading.beat(now, &mut self.actions);
        }
        self.act(now);
    }

    /// When [`Self::handle_timeout`] is due next.
    #[must_use]
    pub fn poll_timeout(&self) -> Instant {
        match &self.role {
            Role::Leading(leading) => leading.due(),
            Role::Following(following) if !following.promised => {
                (following.heard + self.timing.take_over).max(self.retry_at)
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
                if now < following.heard + self.timing.take_over || now < self.retry_at {
                    return;
                }
                self.take_over(now);
            }
            Role::Joining => {
                if now < self.retry_at {
                    return;
                }
                self.retry_at = now + self.timing.retry;
                self.try_to_join(now);
            }
        }
    }

    /// The leader is silent: takes over if the record says that this member has everything.
    fn take_over(&mut self, now: Instant) {
        self.retry_at = now + self.timing.retry;
        let (Role::Following(following), None) = (&mut self.role, &self.asking) else { return };
        let of_this = |seen: &&Seen| {
            seen.is.record.reign == following.reign && seen.is.record.leader == following.leader
        };
        let silent_since = following.heard + self.timing.take_over;
        match self.seen.as_ref().filter(of_this) {
            Some(Seen { is: seen, .. }) if seen.record.has(self.id) && following.trusted => {
                following.promised = true;
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
            let anew = self.timing.unclean.is_some_and(|unclean| {
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

    fn config_of(&self, start: Start) -> MasterConfig {
        let Start { epoch, started_wall_ms, handle_key, hash_seed } = start;
        MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, ..self.config.clone() }
    }
}

fn start_of(config: &MasterConfig) -> Start {
    let MasterConfig { epoch, started_wall_ms, handle_key, hash_seed, .. } = *config;
    Start { epoch, started_wall_ms, handle_key, hash_seed }
}
