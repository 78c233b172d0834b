//! Changes of the leader step by step, between two members whose messages arrive at once or not at all.

use std::time::Duration;

use store_core::ha::{
    Action, Ask, HandOverError, Limits, Member, MemberId, Message, Role, Rules, Timing, Told, Versioned,
};
use store_core::message::Operation;
use store_core::{ChangeHow, ConfigChange, ConfigChanges, Frame, MasterConfig, Session};
use te_core::Instant;

struct Pair {
    now: Instant,
    members: [Member; 2],
    arbiter: Versioned,
    /// Requests to take over do not arrive, but are kept.
    withheld: Option<Vec<Message>>,
    /// While the first member does not reach the arbiter: its questions.
    unanswered: Option<Vec<(u64, Ask)>>,
    dead: Option<usize>,
    deposed: u32,
}

impl Pair {
    /// Two members in sync, of which the first one leads.
    fn new() -> Self {
        let mut this = Self::begin();
        this.passes(1_000);
        assert_eq!((this.roles(), this.arbiter.record.in_sync.len()), ([Role::Leading, Role::Following], 2));
        this
    }

    /// Two members that were just started.
    fn begin() -> Self {
        let now = Instant::from_millis(1_000);
        let members = [Self::member(now, 0, 1), Self::member(now, 1, 2)];
        let arbiter = Versioned::default();
        Self { now, members, arbiter, withheld: None, unanswered: None, dead: None, deposed: 0 }
    }

    fn member(now: Instant, id: u64, life: u64) -> Member {
        let rules = Rules { timing: Timing::default(), limits: Limits::default(), crc32c: crc32c::crc32c };
        let config = MasterConfig { epoch: 7, ..MasterConfig::default() };
        Member::new(now, MemberId(id), life, config, rules).unwrap()
    }

    fn roles(&self) -> [Role; 2] {
        self.members.each_ref().map(|member| member.status().role)
    }

    fn passes(&mut self, ms: u64) {
        for _ in 0..ms / 10 {
            self.now = self.now + Duration::from_millis(10);
            self.members.iter_mut().for_each(|member| member.handle_timeout(self.now));
            self.deliver();
        }
    }

    /// Sends a request to the leader, which carries it out.
    fn ask<O: Operation>(&mut self, request: &O::Request<'_>) {
        let (mut frame, mut out) = (Vec::new(), Vec::new());
        O::encode_request(&mut frame, 1, request, std::iter::empty()).unwrap();
        let (frame, _) = Frame::parse(&frame).unwrap().unwrap();
        self.members[0].handle(self.now, &mut Session::owner(), &frame, &mut out).unwrap();
        assert_eq!(Frame::parse(&out).unwrap().unwrap().0.header.result(), Ok(()));
        self.passes(20);
    }

    fn deliver(&mut self) {
        while let Some((from, action)) = self.next() {
            self.act(from, action);
        }
    }

    fn act(&mut self, from: usize, action: Action) {
        let now = self.now;
        match action {
            Action::Send(_, message @ Message::TakeOver { .. }) if self.withheld.is_some() => {
                self.withheld.as_mut().unwrap().push(message);
            }
            Action::Send(to, _) if self.dead == Some(to.0 as usize) => {}
            Action::Send(to, message) => {
                self.members[to.0 as usize].handle_message(now, MemberId(from as u64), message);
            }
            Action::Ask(number, ask) if self.unanswered.is_some() && from == 0 => {
                self.unanswered.as_mut().unwrap().push((number, ask));
            }
            Action::Ask(number, ask) => {
                let told = self.told(ask);
                self.members[from].handle_told(now, number, told);
            }
            Action::Leads(_) => {}
            Action::Deposed => self.deposed += 1,
        }
        for member in self.members.iter_mut().filter(|member| member.wants_snapshot()) {
            member.take_snapshot(now, std::iter::empty());
        }
    }

    fn told(&mut self, ask: Ask) -> Told {
        match ask {
            Ask::Swap { version, record } if version == self.arbiter.version => {
                self.arbiter = Versioned { version: version + 1, record };
                Told::Swapped { version: version + 1 }
            }
            _ => Told::Is(self.arbiter.clone()),
        }
    }

    fn next(&mut self) -> Option<(usize, Action)> {
        let of = |(index, member): (usize, &mut Member)| member.poll_action().map(|action| (index, action));
        let dead = self.dead;
        self.members.iter_mut().enumerate().filter(|(index, _)| dead != Some(*index)).find_map(of)
    }
}

#[test]
fn a_switchover_takes_no_time_and_the_former_leader_joins_again() {
    let mut pair = Pair::new();
    let (now, term) = (pair.now, pair.arbiter.record.reign.term);
    assert_eq!(pair.members[1].hand_over(now, None), Err(HandOverError::NotLeading));
    let member = MemberId(9);
    assert_eq!(pair.members[0].hand_over(now, Some(member)), Err(HandOverError::NotInSync { member }));
    assert_eq!(pair.members[0].hand_over(now, None), Ok(MemberId(1)));
    assert!(!pair.members[0].is_serving());
    pair.deliver();
    assert_eq!((pair.arbiter.record.reign.term, pair.arbiter.record.leader), (term + 1, MemberId(1)));
    assert!(pair.members[1].is_serving() && pair.deposed == 1);
    pair.passes(1_000);
    assert_eq!((pair.roles(), pair.arbiter.record.in_sync.len()), ([Role::Following, Role::Leading], 2));
}

#[test]
fn while_the_other_member_may_take_over_no_answer_is_given_and_a_late_request_is_refused() {
    let mut pair = Pair::new();
    let now = pair.now;
    assert!(pair.members[0].ready(now).is_some());
    pair.withheld = Some(Vec::new());
    pair.members[0].hand_over(now, None).unwrap();
    pair.deliver();
    assert_eq!(pair.members[0].hand_over(now, None), Err(HandOverError::UnderWay));
    let limit = Timing::default().hand_over.as_millis() as u64;
    for _ in 0..limit / 50 - 1 {
        let now = pair.now;
        assert!(!pair.withheld.as_ref().unwrap().is_empty(), "it was not asked to");
        assert_eq!(pair.members[0].ready(now), None, "the other one may lead by now");
        pair.passes(50);
    }
    // It is given up.
    pair.passes(200);
    let (now, version) = (pair.now, pair.arbiter.version);
    assert!(pair.members[0].is_serving() && pair.members[0].ready(now).is_some());
    for late in pair.withheld.take().unwrap() {
        pair.members[1].handle_message(now, MemberId(0), late);
        pair.deliver();
    }
    assert_eq!((pair.roles(), pair.arbiter.version), ([Role::Leading, Role::Following], version));
    assert!(pair.members[0].ready(now).is_some());
}

#[test]
fn a_member_that_the_record_has_just_named_takes_over_though_the_leader_says_nothing_more() {
    let mut pair = Pair::begin();
    while pair.arbiter.record.in_sync.len() < 2 {
        pair.now = pair.now + Duration::from_millis(10);
        pair.members.iter_mut().for_each(|member| member.handle_timeout(pair.now));
        while pair.arbiter.record.in_sync.len() < 2
            && let Some((from, action)) = pair.next()
        {
            pair.act(from, action);
        }
    }
    // The leader does not even hear that it was done.
    let lineage = pair.arbiter.record.reign.lineage;
    pair.dead = Some(0);
    pair.passes(1_000);
    let record = &pair.arbiter.record;
    assert_eq!((record.leader, record.reign.lineage, record.reign.term), (MemberId(1), lineage, 2));
    assert!(pair.members[1].is_serving());
}

#[test]
fn a_member_does_not_take_over_for_what_it_had_in_an_earlier_life() {
    let mut pair = Pair::new();
    let record = pair.arbiter.record.clone();
    // It restarts so soon that the record still names it, and the leader does not reach the arbiter.
    pair.members[1] = Pair::member(pair.now, 1, 3);
    pair.unanswered = Some(Vec::new());
    pair.passes(500);
    assert_eq!((pair.roles(), &pair.arbiter.record), ([Role::Leading, Role::Joining], &record));
    pair.dead = Some(0);
    pair.passes(5_000);
    assert_eq!(
        pair.arbiter.record, record,
        "it has what the leader had at some time, perhaps not the latest"
    );
    assert!(!pair.members[1].is_serving());
}

/// Its own settings count when a member takes over, but for what was set while another one led.
#[test]
fn a_leader_has_the_settings_of_its_own_start_and_those_that_were_set() {
    let mut pair = Pair::new();
    let own = MasterConfig { demote_ahead: 0.3, disk_away_ms: 5, ..MasterConfig::default() };
    pair.members[1].set_config(&own);
    let changes = ConfigChanges { disk_away_ms: Some(9), ..ConfigChanges::default() };
    let change = ConfigChange { how: ChangeHow::Set, changes };
    pair.ask::<store_core::message::ChangeConfig>(&change);
    pair.members[0].hand_over(pair.now, Some(MemberId(1))).unwrap();
    pair.passes(100);
    let config = pair.members[1].leads().expect("it leads").1.config();
    assert_eq!((config.demote_ahead, config.disk_away_ms, config.epoch), (0.3, 9, 7));
}
