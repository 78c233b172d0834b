//! Who proves wrong secrets is slowed down.
//!
//! A proof that is wrong ends its connection, after the answer. Each address may be wrong so often in a row ([`BURST`]); then a
//! proof from there is not even looked at until [`EVERY`] has passed since the one before, whoever brings it. Whoever knows
//! the secret waits as well, if somebody guesses from the same address: not for long, and there is the Unix socket.
//!
//! The table is bounded: when it is full, the address that was wrong longest ago is forgotten.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::places::Source;

/// Wrong proofs of one address that are answered at once.
const BURST: u32 = 16;
/// How long an address waits for each one more.
const EVERY: Duration = Duration::from_millis(250);
/// Addresses that are remembered.
const ADDRESSES_MAX: usize = 4_096;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    /// When an address would have made up for all its wrong proofs.
    wrong: HashMap<Source, Instant>,
}

impl Proofs {
    /// When a proof from there may be looked at. `None`: now.
    pub(crate) fn wait(&self, source: Source, now: Instant) -> Option<Instant> {
        // Who may open the Unix socket is known to the system.
        if source == Source::Unix {
            return None;
        }
        let made_up = *self.wrong.get(&source)?;
        let at = made_up.checked_sub(EVERY * (BURST - 1))?;
        (at > now).then_some(at)
    }

    /// One was wrong.
    pub(crate) fn was_wrong(&mut self, source: Source, now: Instant) {
        if !self.wrong.contains_key(&source) && self.wrong.len() >= ADDRESSES_MAX {
            self.wrong.retain(|_, made_up| *made_up > now);
            if self.wrong.len() >= ADDRESSES_MAX
                && let Some((&oldest, _)) = self.wrong.iter().min_by_key(|(_, made_up)| **made_up)
            {
                self.wrong.remove(&oldest);
            }
        }
        let made_up = self.wrong.entry(source).or_insert(now);
        *made_up = (*made_up).max(now) + EVERY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u32) -> Source {
        Source::of(std::net::Ipv4Addr::from(0x0a00_0000 + last).into())
    }

    #[test]
    fn an_address_that_is_wrong_often_waits_and_others_do_not() {
        let (mut proofs, start) = (Proofs::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(proofs.wait(ip(1), start), None);
            proofs.was_wrong(ip(1), start);
        }
        assert_eq!(proofs.wait(ip(1), start), Some(start + EVERY));
        assert_eq!((proofs.wait(ip(2), start), proofs.wait(Source::Unix, start)), (None, None));
        // One each time.
        let mut now = start;
        for _ in 0..100 {
            now += EVERY;
            assert_eq!(proofs.wait(ip(1), now), None);
            proofs.was_wrong(ip(1), now);
            assert_eq!(proofs.wait(ip(1), now), Some(now + EVERY));
        }
        // Rest makes up for it.
        now += EVERY * BURST;
        for _ in 0..BURST {
            assert_eq!(proofs.wait(ip(1), now), None);
            proofs.was_wrong(ip(1), now);
        }
        assert!(proofs.wait(ip(1), now).is_some());
    }

    #[test]
    fn the_table_is_bounded_and_forgets_who_was_wrong_longest_ago() {
        let (mut proofs, start) = (Proofs::default(), Instant::now());
        for round in 0..BURST {
            for address in 0..ADDRESSES_MAX as u32 {
                proofs.was_wrong(ip(address), start + Duration::from_nanos((address + round).into()));
            }
        }
        let now = start + Duration::from_millis(1);
        proofs.was_wrong(ip(99_999), now);
        assert_eq!(proofs.wrong.len(), ADDRESSES_MAX);
        assert_eq!(proofs.wait(ip(0), now), None);
        assert!(proofs.wait(ip(1), now).is_some());
    }
}
