//! Slows down peers that send wrong secrets.
//!
//! A wrong proof ends its connection, after the answer. Each address may send [`BURST`] wrong proofs in a
//! row; after that, a proof from there is not examined until [`EVERY`] has passed since the one before,
//! whichever connection sends it. A peer with the right secret waits as well if another one guesses from the
//! same address, but not for long, and it can use the Unix socket.
//!
//! The table is bounded: when it is full, the address whose last wrong proof is the oldest is forgotten.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::places::Source;

/// Wrong proofs of one address that are answered without delay.
const BURST: u32 = 16;
/// How long an address waits for each further one.
const EVERY: Duration = Duration::from_millis(250);
/// Most addresses in the table.
const ADDRESSES_MAX: usize = 4_096;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    /// When an address will have waited for all its wrong proofs.
    wrong: HashMap<Source, Instant>,
}

impl Proofs {
    /// When a proof from there may be examined. `None`: now.
    pub(crate) fn wait(&self, source: Source, now: Instant) -> Option<Instant> {
        // The file system decides who may open the Unix socket.
        if source == Source::Unix {
            return None;
        }
        let made_up = *self.wrong.get(&source)?;
        let at = made_up.checked_sub(EVERY * (BURST - 1))?;
        (at > now).then_some(at)
    }

    /// Records a wrong proof.
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
    fn an_address_with_many_wrong_proofs_waits_and_others_do_not() {
        let (mut proofs, start) = (Proofs::default(), Instant::now());
        for _ in 0..BURST {
            assert_eq!(proofs.wait(ip(1), start), None);
            proofs.was_wrong(ip(1), start);
        }
        assert_eq!(proofs.wait(ip(1), start), Some(start + EVERY));
        assert_eq!((proofs.wait(ip(2), start), proofs.wait(Source::Unix, start)), (None, None));
        // One more per period.
        let mut now = start;
        for _ in 0..100 {
            now += EVERY;
            assert_eq!(proofs.wait(ip(1), now), None);
            proofs.was_wrong(ip(1), now);
            assert_eq!(proofs.wait(ip(1), now), Some(now + EVERY));
        }
        // A long time without wrong proofs restores the burst.
        now += EVERY * BURST;
        for _ in 0..BURST {
            assert_eq!(proofs.wait(ip(1), now), None);
            proofs.was_wrong(ip(1), now);
        }
        assert!(proofs.wait(ip(1), now).is_some());
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest_wrong_proof() {
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
