//! Whose turn it is on the serving thread: fair by time, not by requests.
//!
//! ```text
//!   lane     what is at its connections' head           a turn is at most
//!   Node     any short request of a node: beats          100 µs, less in a crowd
//!   Short    lookups and small batches                   100 µs, less in a crowd
//!   Long     searches, lists, large batches, mounts      `turn_us_max`
//! ```
//!
//! Start-time fair queueing, twice. Within a lane each connection has a virtual time that grows by what its turns took, and the
//! lowest goes next: whoever computes for others all the time waits behind whoever asks now and then, however many they are.
//! Who was silent does not save up: it begins where the lane is. The lanes share the thread in the same way, nodes with the
//! larger share, so that a flood of searches leaves lookups half of the thread, and the other way round.
//!
//! Connections that have brought no whole request yet count as one connection together: to hang up and come again is no
//! way around what was used before.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// What kind of work a connection waits with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Node,
    Short,
    Long,
}

const LANES: usize = 3;

/// How long a turn of short requests lasts at most, and at least.
const SHORT_TURN_MAX: Duration = Duration::from_micros(100);
const SHORT_TURN_MIN: Duration = Duration::from_micros(10);
/// Who has used no more than this beyond its share goes with those who have not, and first, in nanoseconds. Who floods has
/// always used more.
const GRACE: u64 = 1_000_000;
/// So often each of a crowd has a turn, as far as [`SHORT_TURN_MIN`] lets it.
const CYCLE: Duration = Duration::from_millis(10);

impl Lane {
    const ALL: [Self; LANES] = [Self::Node, Self::Short, Self::Long];

    /// Its share of the thread, relative to the others'.
    const fn weight(self) -> u64 {
        match self {
            Self::Node => 4,
            Self::Short | Self::Long => 1,
        }
    }
}

/// What one connection has used. Times are virtual, in nanoseconds, each lane's its own.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
    next: [u64; LANES],
    /// It has brought a whole request.
    known: bool,
}

impl Account {
    /// It has brought a whole request: from now on it is judged by itself.
    pub(crate) fn is_known_now(&mut self) {
        self.known = true;
    }

    pub(crate) fn is_known(&self) -> bool {
        self.known
    }
}

/// One turn that was given; [`Turns::ended`] takes it back.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) index: usize,
    pub(crate) lane: Lane,
    pub(crate) ticket: Ticket,
    start: u64,
}

/// Which wait this is: a place in the line outlives a connection that hangs up, and another one may have its number by then.
pub(crate) type Ticket = u64;

/// Connections that wait for a turn, each at most once.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    lanes: [Waiting; LANES],
    /// Where the lanes are among each other.
    now: u64,
    /// Counted up, so that equals go in the order in which they came.
    joined: u64,
}

#[derive(Debug, Default)]
struct Waiting {
    heap: BinaryHeap<Reverse<Rank>>,
    /// The start of the turn that was given last.
    now: u64,
    /// The virtual time of all who are not known together.
    strangers: u64,
    /// Where this lane is among the lanes.
    next: u64,
}

/// The order in a lane: lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    start: u64,
    stranger: bool,
    /// Of those that begin at the same time, who has used less.
    used: u64,
    joined: u64,
    index: usize,
}

impl Turns {
    /// The connection waits from now on.
    pub(crate) fn join(&mut self, index: usize, lane: Lane, account: &Account) -> Ticket {
        self.joined += 1;
        let waiting = &mut self.lanes[lane as usize];
        let used = if account.known { account.next[lane as usize] } else { waiting.strangers };
        let start = used.saturating_sub(if account.known { GRACE } else { 0 }).max(waiting.now);
        if waiting.heap.is_empty() {
            waiting.next = waiting.next.max(self.now);
        }
        let rank = Rank { start, stranger: !account.known, used, joined: self.joined, index };
        waiting.heap.push(Reverse(rank));
        self.joined
    }

    /// Who goes next.
    pub(crate) fn next(&mut self) -> Option<Turn> {
        let occupied = Lane::ALL.into_iter().filter(|lane| !self.lanes[*lane as usize].heap.is_empty());
        let lane = occupied.min_by_key(|lane| self.lanes[*lane as usize].next)?;
        let waiting = &mut self.lanes[lane as usize];
        self.now = waiting.next;
        let Reverse(rank) = waiting.heap.pop()?;
        waiting.now = rank.start;
        Some(Turn { index: rank.index, lane, ticket: rank.joined, start: rank.start })
    }

    /// The turn is over and took so long.
    pub(crate) fn ended(&mut self, turn: &Turn, account: &mut Account, took: Duration) {
        // A turn that costs nothing would be had again and again.
        let cost = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).clamp(1, 1 << 40);
        let waiting = &mut self.lanes[turn.lane as usize];
        waiting.next = waiting.next.saturating_add((cost / turn.lane.weight()).max(1));
        let next = &mut account.next[turn.lane as usize];
        *next = turn.start.max(*next).saturating_add(cost);
        if !account.known {
            waiting.strangers = waiting.strangers.max(turn.start).saturating_add(cost);
        }
    }

    /// How long a turn in a lane of short requests lasts now.
    pub(crate) fn short_turn(&self, lane: Lane) -> Duration {
        let waiting = u32::try_from(self.lanes[lane as usize].heap.len()).unwrap_or(u32::MAX);
        (CYCLE / waiting.max(1)).clamp(SHORT_TURN_MIN, SHORT_TURN_MAX)
    }

    /// Whether nobody waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.heap.is_empty())
    }

    /// Whether anybody waits in this lane.
    pub(crate) fn is_waiting(&self, lane: Lane) -> bool {
        !self.lanes[lane as usize].heap.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn known() -> Account {
        let mut account = Account::default();
        account.is_known_now();
        account
    }

    /// A thread whose connections ask again as soon as they were served. Time is counted, not measured.
    struct Floor {
        turns: Turns,
        accounts: Vec<Account>,
    }

    impl Floor {
        fn new(crowd: usize, lane: Lane) -> Self {
            let mut floor = Self { turns: Turns::default(), accounts: vec![known(); crowd + 1] };
            (1..=crowd).for_each(|index| floor.join(index, lane));
            floor
        }

        fn join(&mut self, index: usize, lane: Lane) {
            let account = self.accounts[index];
            self.turns.join(index, lane, &account);
        }

        /// Gives one turn that takes so long; whoever had it.
        fn step(&mut self, took: Duration, again: bool) -> Turn {
            let turn = self.turns.next().unwrap();
            self.turns.ended(&turn, &mut self.accounts[turn.index], took);
            if again {
                self.join(turn.index, turn.lane);
            }
            turn
        }

        fn steps(&mut self, times: std::ops::Range<usize>, took: Duration, again: bool) {
            for _ in times {
                self.step(took, again);
            }
        }

        /// Turns of others until connection 0, which asks now, has had its own; each of them takes so long.
        fn turns_before_mine(&mut self, lane: Lane, took: Duration) -> usize {
            self.join(0, lane);
            let mut others = 0;
            loop {
                let turn = self.turns.next().unwrap();
                let mine = turn.index == 0;
                self.turns.ended(&turn, &mut self.accounts[turn.index], if mine { US } else { took });
                if mine {
                    return others;
                }
                self.join(turn.index, turn.lane);
                others += 1;
            }
        }
    }

    #[test]
    fn a_lookup_waits_for_one_turn_of_a_search_however_many_search() {
        for crowd in [1, 40, 4_000] {
            let mut floor = Floor::new(crowd, Lane::Long);
            for _ in 0..200 {
                assert!(floor.turns_before_mine(Lane::Short, 1_000 * US) <= 1);
                // What happens until it asks again.
                floor.steps(0..7, 1_000 * US, true);
            }
        }
    }

    #[test]
    fn who_asks_now_and_then_goes_before_those_who_ask_all_the_time_in_the_same_lane() {
        for lane in Lane::ALL {
            for crowd in [1, 40] {
                let mut floor = Floor::new(crowd, lane);
                floor.steps(0..2 * crowd, 100 * US, true);
                for _ in 0..200 {
                    assert!(floor.turns_before_mine(lane, 100 * US) <= 1);
                    floor.steps(0..7, 100 * US, true);
                }
            }
        }
    }

    #[test]
    fn in_the_largest_crowd_of_those_who_ask_all_the_time_nobody_waits_long() {
        let mut floor = Floor::new(4_000, Lane::Short);
        let turn = floor.turns.short_turn(Lane::Short);
        assert_eq!(turn, SHORT_TURN_MIN);
        floor.steps(0..8_000, turn, true);
        for _ in 0..200 {
            let waited = turn * u32::try_from(floor.turns_before_mine(Lane::Short, turn)).unwrap();
            assert!(waited <= 4 * CYCLE, "{waited:?}");
            floor.step(turn, true);
        }
    }

    #[test]
    fn a_crowd_that_rests_and_comes_back_all_at_once_does_not_go_first_again() {
        let mut floor = Floor::new(4_000, Lane::Short);
        floor.steps(0..4_000, 100 * US, false);
        assert!(floor.turns.is_empty());
        (1..=4_000).for_each(|index| floor.join(index, Lane::Short));
        floor.step(100 * US, true);
        assert!(floor.turns_before_mine(Lane::Short, 100 * US) <= 1);
    }

    #[test]
    fn who_hangs_up_and_comes_again_waits_behind_who_stayed() {
        let mut floor = Floor::new(0, Lane::Short);
        // A thousand that nobody knows, each of which costs a turn and is gone.
        floor.accounts.resize(1_001, Account::default());
        for _ in 0..3 {
            (1..=1_000).for_each(|index| floor.join(index, Lane::Short));
            floor.steps(0..500, 100 * US, false);
            assert!(floor.turns_before_mine(Lane::Short, 100 * US) <= 1);
            while !floor.turns.is_empty() {
                floor.step(100 * US, false);
            }
            floor.accounts[1..].fill(Account::default());
        }
    }

    #[test]
    fn lanes_share_the_thread_by_time_and_nodes_have_most_of_it() {
        let mut floor = Floor::new(3, Lane::Long);
        floor.accounts.resize(16, known());
        (4..8).for_each(|index| floor.join(index, Lane::Short));
        (8..16).for_each(|index| floor.join(index, Lane::Node));
        let mut had = [0_u64; LANES];
        for _ in 0..100_000 {
            let turn = floor.turns.next().unwrap();
            // A long turn is ten short ones.
            let us = if turn.lane == Lane::Long { 1_000 } else { 100 };
            had[turn.lane as usize] += us;
            floor.turns.ended(&turn, &mut floor.accounts[turn.index], Duration::from_micros(us));
            floor.join(turn.index, turn.lane);
        }
        let share = |lane: Lane| had[lane as usize] as f64 / had.iter().sum::<u64>() as f64;
        assert!((share(Lane::Node) - 4.0 / 6.0).abs() < 0.01, "{had:?}");
        assert!((share(Lane::Short) - 1.0 / 6.0).abs() < 0.01, "{had:?}");
        assert!((share(Lane::Long) - 1.0 / 6.0).abs() < 0.01, "{had:?}");
    }

    #[test]
    fn those_who_ask_alike_are_served_alike() {
        let mut floor = Floor::new(10, Lane::Long);
        let mut had = [0_u32; 11];
        // The first one's turns take ten times as long.
        for _ in 0..11_000 {
            let turn = floor.turns.next().unwrap();
            let took = if turn.index == 1 { 1_000 } else { 100 };
            had[turn.index] += took;
            floor.turns.ended(&turn, &mut floor.accounts[turn.index], Duration::from_micros(took.into()));
            floor.join(turn.index, turn.lane);
        }
        let (least, most) = (had[1..].iter().min().unwrap(), had[1..].iter().max().unwrap());
        assert!(most - least <= 2_000, "{had:?}");
    }
}
