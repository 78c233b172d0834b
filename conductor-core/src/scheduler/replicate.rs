//! Hot prefixes: those for which requests lost most because the NIC of their holder was busy, and those of
//! the store that NICs are busiest with.
//!
//! Requests copy what they fetch anyway. Beyond that, a prefix is copied once the waits for its holder add up
//! (what one request loses × how often), faded by time; there is no prediction. Of the store it is not known
//! how busy its nodes are, so that the times of fetches add up instead of waits.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use te_core::Instant;

use super::config::ReplicationConfig;
use super::decode::limit;
use super::types::{Replicate, Source};
use crate::{BlockKey, InstanceId};

/// Copies that wait to be taken; more are dropped.
const ACTIONS_MAX: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Prefix {
    key: BlockKey,
    lost_ns: f64,
    /// When it was `lost_ns`.
    at: u64,
}

impl Prefix {
    /// What it has lost by now: halved per half-life, and in a straight line between its multiples.
    fn faded(&self, nanos: u64, half_life: u64) -> f64 {
        let (elapsed, half_life) = (nanos.saturating_sub(self.at), half_life.max(1));
        let halvings = (elapsed / half_life).min(63);
        let rest = (elapsed % half_life) as f64 / half_life as f64;
        self.lost_ns / (1_u64 << halvings) as f64 * (1.0 - 0.5 * rest)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Replication {
    config: ReplicationConfig,
    prefixes: Vec<Prefix>,
    actions: VecDeque<Replicate>,
    last: Option<Instant>,
}

/// What came of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Noted {
    /// It was added up.
    Counted,
    /// A copy is asked for.
    Asked,
    /// A copy would be asked for, but too many have not been taken.
    Dropped,
}

impl Replication {
    pub(super) fn new(config: ReplicationConfig) -> Self {
        Self {
            config,
            prefixes: Vec::with_capacity(config.prefixes.max(1) as usize),
            actions: VecDeque::with_capacity(ACTIONS_MAX),
            last: None,
        }
    }

    pub(super) fn next(&mut self) -> Option<Replicate> {
        self.actions.pop_front()
    }

    /// A request lost `lost_ns` because the NIC of `from` was busy; `to` would be the next instance to hold
    /// the prefix that ends with `key`.
    pub(super) fn lost(
        &mut self,
        now: Instant,
        key: BlockKey,
        blocks: u32,
        lost_ns: u64,
        from: Source,
        to: InstanceId,
    ) -> Noted {
        let (nanos, half_life) = (now.as_nanos(), limit(self.config.half_life));
        let i = match self.prefixes.iter().position(|prefix| prefix.key == key) {
            Some(i) => i,
            None => {
                let cold = Prefix { key, lost_ns: 0.0, at: nanos };
                let i = if self.prefixes.len() < self.prefixes.capacity() {
                    self.prefixes.len()
                } else {
                    self.coldest(nanos)
                };
                match self.prefixes.get_mut(i) {
                    Some(prefix) => *prefix = cold,
                    None => self.prefixes.push(cold),
                }
                i
            }
        };
        let prefix = &mut self.prefixes[i];
        *prefix = Prefix { key, lost_ns: prefix.faded(nanos, half_life) + lost_ns as f64, at: nanos };
        let rested = self.last.is_none_or(|last| now.nanos_since(last) >= limit(self.config.interval));
        if !rested || prefix.lost_ns < limit(self.config.wait_min) as f64 {
            return Noted::Counted;
        }
        if self.actions.len() >= ACTIONS_MAX {
            return Noted::Dropped;
        }
        prefix.lost_ns = 0.0;
        self.last = Some(now);
        self.actions.push_back(Replicate { key, blocks, from, to });
        Noted::Asked
    }

    /// A longer prefix is copied, and this one with it.
    pub(super) fn covered(&mut self, key: BlockKey) {
        if let Some(prefix) = self.prefixes.iter_mut().find(|prefix| prefix.key == key) {
            prefix.lost_ns = 0.0;
        }
    }

    /// The prefix that has lost least; 0 without any.
    fn coldest(&self, nanos: u64) -> usize {
        let half_life = limit(self.config.half_life);
        let mut least = (f64::INFINITY, 0);
        for (i, prefix) in self.prefixes.iter().enumerate() {
            let lost_ns = prefix.faded(nanos, half_life);
            if lost_ns < least.0 {
                least = (lost_ns, i);
            }
        }
        least.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    const FROM: Source = Source::Instance(InstanceId(1));
    const TO: InstanceId = InstanceId(2);

    fn replication(prefixes: u32) -> Replication {
        Replication::new(ReplicationConfig {
            prefixes,
            half_life: Duration::from_secs(10),
            wait_min: Duration::from_secs(2),
            interval: Duration::from_secs(1),
        })
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    #[test]
    fn a_prefix_is_copied_once_its_losses_add_up() {
        let mut hot = replication(4);
        for ms in [0, 100, 200] {
            assert_eq!(hot.lost(at(ms), BlockKey(7), 3, 600_000_000, FROM, TO), Noted::Counted);
        }
        assert_eq!(hot.lost(at(300), BlockKey(7), 3, 600_000_000, FROM, TO), Noted::Asked);
        assert_eq!(hot.next(), Some(Replicate { key: BlockKey(7), blocks: 3, from: FROM, to: TO }));
        assert_eq!(hot.next(), None);
        // The rate is limited, whatever the loss.
        assert_eq!(hot.lost(at(400), BlockKey(7), 3, 9_000_000_000, FROM, TO), Noted::Counted);
        assert_eq!(hot.lost(at(1_400), BlockKey(7), 3, 1, FROM, TO), Noted::Asked);
    }

    #[test]
    fn losses_of_long_ago_are_forgotten() {
        let mut hot = replication(4);
        for s in 0..100 {
            assert_eq!(hot.lost(at(s * 10_000), BlockKey(7), 3, 900_000_000, FROM, TO), Noted::Counted);
        }
    }

    #[test]
    fn the_coldest_prefix_makes_room() {
        let mut hot = replication(2);
        hot.lost(at(0), BlockKey(1), 1, 1_900_000_000, FROM, TO);
        for key in 2..100 {
            assert_eq!(hot.lost(at(key), BlockKey(key), 1, 1_000_000, FROM, TO), Noted::Counted);
        }
        assert_eq!(hot.lost(at(100), BlockKey(1), 1, 200_000_000, FROM, TO), Noted::Asked);
    }

    #[test]
    fn copies_that_no_caller_takes_are_limited() {
        let mut hot = replication(2);
        let asked = (0..200)
            .map(|s| hot.lost(at(s * 1_000), BlockKey(1), 1, 5_000_000_000, FROM, TO))
            .filter(|noted| *noted == Noted::Asked)
            .count();
        assert_eq!(asked, ACTIONS_MAX);
    }
}
