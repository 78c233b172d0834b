//! The order of turns on the serving thread: fair by time, not by number of requests.
//!
//! ```text
//!   class    the next request of its connections        longest turn
//!   Node     any short request of a node: heartbeats     100 µs, less in a crowd
//!   Short    lookups and small batches                   100 µs, less in a crowd
//!   Long     searches, lists, large batches, mounts      `turn_us_max`
//! ```
//!
//! This is start-time fair queueing on two levels. Within a class each connection has a virtual time that
//! grows by the time of its turns, and the lowest goes next: connections that compute all the time wait
//! behind those with occasional requests, however many they are. A silent connection saves nothing up: it
//! continues at the virtual time of its class. The classes share the thread in the same way, nodes with the
//! larger share, so that a flood of searches leaves half of the thread to lookups, and vice versa.
//!
//! Connections that have sent no complete request yet count as one connection together: a peer that
//! reconnects does not escape the time that it has used.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The class of the request that a connection waits with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Node,
    Short,
    Long,
}

const CLASSES: usize = 3;

/// Longest and shortest turn of short requests.
const SHORT_TURN_MAX: Duration = Duration::from_micros(100);
const SHORT_TURN_MIN: Duration = Duration::from_micros(10);
/// A connection that has used no more than this beyond its share, in nanoseconds, is treated like those that
/// have used less, and goes first. Connections that flood always exceed it.
const GRACE: u64 = 1_000_000;
/// Every connection of a crowd gets a turn within this time, as far as [`SHORT_TURN_MIN`] allows.
const CYCLE: Duration = Duration::from_millis(10);

impl Class {
    const ALL: [Self; CLASSES] = [Self::Node, Self::Short, Self::Long];

    /// Its share of the thread, relative to the others.
    const fn weight(self) -> u64 {
        match self {
            Self::Node => 4,
            Self::Short | Self::Long => 1,
        }
    }
}

/// What one connection has used. Times are virtual, in nanoseconds, separate per class.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Account {
    next: [u64; CLASSES],
    /// Whether it has sent a complete request.
    known: bool,
}

impl Account {
    /// Records a complete request: from now on the connection is judged by itself.
    pub(crate) fn is_known_now(&mut self) {
        self.known = true;
    }

    pub(crate) fn is_known(&self) -> bool {
        self.known
    }
}

/// A turn that was given; it ends with [`Turns::ended`].
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) index: usize,
    pub(crate) class: Class,
    pub(crate) ticket: Ticket,
    start: u64,
}

/// Identifies one wait: an entry of the queue outlives a connection that closes, and another one may have its
/// index by then.
pub(crate) type Ticket = u64;

/// Connections that wait for a turn, each at most once.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    classes: [Waiting; CLASSES],
    /// Virtual time among the classes.
    now: u64,
    /// Counts upwards, so that equal entries keep the order in which they came.
    joined: u64,
}

#[derive(Debug, Default)]
struct Waiting {
    heap: BinaryHeap<Reverse<Rank>>,
    /// The start of the latest turn.
    now: u64,
    /// The virtual time of all connections without a complete request together.
    newcomers: u64,
    /// Virtual time of this class among the classes.
    next: u64,
}

/// The order within a class, lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    start: u64,
    new: bool,
    /// Among entries with the same start, the connection that has used less goes first.
    used: u64,
    joined: u64,
    index: usize,
}

impl Turns {
    /// Adds a connection to the queue.
    pub(crate) fn join(&mut self, index: usize, class: Class, account: &Account) -> Ticket {
        self.joined += 1;
        let waiting = &mut self.classes[class as usize];
        let used = if account.known { account.next[class as usize] } else { waiting.newcomers };
        let start = used.saturating_sub(if account.known { GRACE } else { 0 }).max(waiting.now);
        if waiting.heap.is_empty() {
            waiting.next = waiting.next.max(self.now);
        }
        let rank = Rank { start, new: !account.known, used, joined: self.joined, index };
        waiting.heap.push(Reverse(rank));
        self.joined
    }

    /// The next turn.
    pub(crate) fn next(&mut self) -> Option<Turn> {
        let occupied = Class::ALL.into_iter().filter(|class| !self.classes[*class as usize].heap.is_empty());
        let class = occupied.min_by_key(|class| self.classes[*class as usize].next)?;
        let waiting = &mut self.classes[class as usize];
        self.now = waiting.next;
        let Reverse(rank) = waiting.heap.pop()?;
        waiting.now = rank.start;
        Some(Turn { index: rank.index, class, ticket: rank.joined, start: rank.start })
    }

    /// Ends a turn that took this long.
    pub(crate) fn ended(&mut self, turn: &Turn, account: &mut Account, took: Duration) {
        // A turn without a cost would be repeated without limit.
        let cost = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).clamp(1, 1 << 40);
        let waiting = &mut self.classes[turn.class as usize];
        waiting.next = waiting.next.saturating_add((cost / turn.class.weight()).max(1));
        let next = &mut account.next[turn.class as usize];
        *next = turn.start.max(*next).saturating_add(cost);
        if !account.known {
            waiting.newcomers = waiting.newcomers.max(turn.start).saturating_add(cost);
        }
    }

    /// The current length of a turn in a class of short requests.
    pub(crate) fn short_turn(&self, class: Class) -> Duration {
        let waiting = u32::try_from(self.classes[class as usize].heap.len()).unwrap_or(u32::MAX);
        (CYCLE / waiting.max(1)).clamp(SHORT_TURN_MIN, SHORT_TURN_MAX)
    }

    /// Whether no connection waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.heap.is_empty())
    }

    /// Whether a connection waits in this class.
    pub(crate) fn is_waiting(&self, class: Class) -> bool {
        !self.classes[class as usize].heap.is_empty()
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

    /// A thread whose connections send a request as soon as they were served. Time is counted, not measured.
    struct Workload {
        turns: Turns,
        accounts: Vec<Account>,
    }

    impl Workload {
        fn new(crowd: usize, class: Class) -> Self {
            let mut load = Self { turns: Turns::default(), accounts: vec![known(); crowd + 1] };
            (1..=crowd).for_each(|index| load.join(index, class));
            load
        }

        fn join(&mut self, index: usize, class: Class) {
            let account = self.accounts[index];
            self.turns.join(index, class, &account);
        }

        /// Gives one turn that takes this long, and returns it.
        fn step(&mut self, took: Duration, again: bool) -> Turn {
            let turn = self.turns.next().unwrap();
            self.turns.ended(&turn, &mut self.accounts[turn.index], took);
            if again {
                self.join(turn.index, turn.class);
            }
            turn
        }

        fn steps(&mut self, times: std::ops::Range<usize>, took: Duration, again: bool) {
            for _ in times {
                self.step(took, again);
            }
        }

        /// Number of turns of others until connection 0, which sends a request now, has had its own; each of
        /// them takes this long.
        fn turns_before_mine(&mut self, class: Class, took: Duration) -> usize {
            self.join(0, class);
            let mut others = 0;
            loop {
                let turn = self.turns.next().unwrap();
                let mine = turn.index == 0;
                self.turns.ended(&turn, &mut self.accounts[turn.index], if mine { US } else { took });
                if mine {
                    return others;
                }
                self.join(turn.index, turn.class);
                others += 1;
            }
        }
    }

    #[test]
    fn a_lookup_waits_for_one_turn_of_a_search_however_many_search() {
        for crowd in [1, 40, 4_000] {
            let mut load = Workload::new(crowd, Class::Long);
            for _ in 0..200 {
                assert!(load.turns_before_mine(Class::Short, 1_000 * US) <= 1);
                // Further turns until it sends the next request.
                load.steps(0..7, 1_000 * US, true);
            }
        }
    }

    #[test]
    fn occasional_requests_go_before_constant_ones_of_the_same_class() {
        for class in Class::ALL {
            for crowd in [1, 40] {
                let mut load = Workload::new(crowd, class);
                load.steps(0..2 * crowd, 100 * US, true);
                for _ in 0..200 {
                    assert!(load.turns_before_mine(class, 100 * US) <= 1);
                    load.steps(0..7, 100 * US, true);
                }
            }
        }
    }

    #[test]
    fn in_the_largest_crowd_of_constant_requests_no_connection_waits_long() {
        let mut load = Workload::new(4_000, Class::Short);
        let turn = load.turns.short_turn(Class::Short);
        assert_eq!(turn, SHORT_TURN_MIN);
        load.steps(0..8_000, turn, true);
        for _ in 0..200 {
            let waited = turn * u32::try_from(load.turns_before_mine(Class::Short, turn)).unwrap();
            assert!(waited <= 4 * CYCLE, "{waited:?}");
            load.step(turn, true);
        }
    }

    #[test]
    fn a_crowd_that_rests_and_comes_back_all_at_once_does_not_go_first_again() {
        let mut load = Workload::new(4_000, Class::Short);
        load.steps(0..4_000, 100 * US, false);
        assert!(load.turns.is_empty());
        (1..=4_000).for_each(|index| load.join(index, Class::Short));
        load.step(100 * US, true);
        assert!(load.turns_before_mine(Class::Short, 100 * US) <= 1);
    }

    #[test]
    fn a_peer_that_reconnects_waits_behind_those_that_stayed() {
        let mut load = Workload::new(0, Class::Short);
        // A thousand new connections, each of which costs a turn and is closed.
        load.accounts.resize(1_001, Account::default());
        for _ in 0..3 {
            (1..=1_000).for_each(|index| load.join(index, Class::Short));
            load.steps(0..500, 100 * US, false);
            assert!(load.turns_before_mine(Class::Short, 100 * US) <= 1);
            while !load.turns.is_empty() {
                load.step(100 * US, false);
            }
            load.accounts[1..].fill(Account::default());
        }
    }

    #[test]
    fn classes_share_the_thread_by_time_and_nodes_have_most_of_it() {
        let mut load = Workload::new(3, Class::Long);
        load.accounts.resize(16, known());
        (4..8).for_each(|index| load.join(index, Class::Short));
        (8..16).for_each(|index| load.join(index, Class::Node));
        let mut had = [0_u64; CLASSES];
        for _ in 0..100_000 {
            let turn = load.turns.next().unwrap();
            // A long turn takes as long as ten short ones.
            let us = if turn.class == Class::Long { 1_000 } else { 100 };
            had[turn.class as usize] += us;
            load.turns.ended(&turn, &mut load.accounts[turn.index], Duration::from_micros(us));
            load.join(turn.index, turn.class);
        }
        let share = |class: Class| had[class as usize] as f64 / had.iter().sum::<u64>() as f64;
        assert!((share(Class::Node) - 4.0 / 6.0).abs() < 0.01, "{had:?}");
        assert!((share(Class::Short) - 1.0 / 6.0).abs() < 0.01, "{had:?}");
        assert!((share(Class::Long) - 1.0 / 6.0).abs() < 0.01, "{had:?}");
    }

    #[test]
    fn equal_connections_are_served_equally() {
        let mut load = Workload::new(10, Class::Long);
        let mut had = [0_u32; 11];
        // The turns of the first connection take ten times as long.
        for _ in 0..11_000 {
            let turn = load.turns.next().unwrap();
            let took = if turn.index == 1 { 1_000 } else { 100 };
            had[turn.index] += took;
            load.turns.ended(&turn, &mut load.accounts[turn.index], Duration::from_micros(took.into()));
            load.join(turn.index, turn.class);
        }
        let (least, most) = (had[1..].iter().min().unwrap(), had[1..].iter().max().unwrap());
        assert!(most - least <= 2_000, "{had:?}");
    }
}
