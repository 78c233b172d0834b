//! A switchover step by step, between two members whose messages arrive at once or not at all.

use std::time::Duration;

use store_core::MasterConfig;
use store_core::ha::{
    Action, Ask, HandOverError, Limits, Member, MemberId, Message, Role, Rules, Timing, Told, Versioned,
};
use te_core::Instant;

struct Pair {
    now: Instant,
    members: [Member; 2],
    arbiter: Versioned,
    /// Requests to take over do not arrive, but are kept.
    withheld: Option<Vec<Message>>,
    deposed: u32,
}

impl Pair {
    /// Two members in sync, of which the first one leads.
    fn new() -> Self {
        let rules = Rules { timing: Timing::default(), limits: Limits::default(), crc32c: crc32c::crc32c };
        let now = Instant::from_millis(1_000);
        let member = |id: u64| {
            let config = MasterConfig { epoch: 7, ..MasterConfig::default() };
            Member::new(now, MemberId(id), id + 1, config, rules).unwrap()
        };
        let members = [member(0), member(1)];
        let mut this = Self { now, members, arbiter: Versioned::default(), withheld: None, deposed: 0 };
        this.passes(1_000);
        assert_eq!((this.roles(), this.arbiter.record.in_sync.len()), ([Role::Leading, Role::Following], 2));
        this
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

    fn deliver(&mut self) {
        while let Some((from, action)) = self.next() {
            let now = self.now;
            match action {
                Action::Send(_, message @ Message::TakeOver { .. }) if self.withheld.is_some() => {
                    self.withheld.as_mut().unwrap().push(message);
                }
                Action::Send(to, message) => {
                    self.members[to.0 as usize].handle_message(now, MemberId(from as u64), message);
                }
                Action::Ask(number, ask) => {
                    let told = match ask {
                        Ask::Swap { version, record } if version == self.arbiter.version => {
                            self.arbiter = Versioned { version: version + 1, record };
                            Told::Swapped { version: version + 1 }
                        }
                        _ => Told::Is(self.arbiter.clone()),
                    };
                    self.members[from].handle_told(now, number, told);
                }
                Action::Leads(_) => {}
                Action::Deposed => self.deposed += 1,
            }
            for member in self.members.iter_mut().filter(|member| member.wants_snapshot()) {
                member.take_snapshot(now, std::iter::empty());
            }
        }
    }

    fn next(&mut self) -> Option<(usize, Action)> {
        let of = |(index, member): (usize, &mut Member)| member.poll_action().map(|action| (index, action));
        self.members.iter_mut().enumerate().find_map(of)
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
