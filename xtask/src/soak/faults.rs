//! The faults: which process is killed or stopped, and when, from a seed.

use super::process::{Role, Slot};
use anyhow::Result;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The last node and the last client are spared, so that some processes run for the whole soak; the master is
/// spared in its second half.
pub(super) struct Faults {
    rng: u64,
    next_at: Instant,
    master_until: Instant,
    counts: BTreeMap<&'static str, u64>,
}

impl Faults {
    pub(super) fn new(seed: u64, began: Instant, length: Duration) -> Self {
        let next_at = began + Duration::from_secs(1);
        Self { rng: seed, next_at, master_until: began + length / 2, counts: BTreeMap::new() }
    }

    pub(super) fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    pub(super) fn into_counts(self) -> BTreeMap<&'static str, u64> {
        self.counts
    }

    /// Causes a fault if one is due.
    pub(super) fn turn(&mut self, now: Instant, slots: &mut [Slot]) -> Result<()> {
        if now < self.next_at {
            return Ok(());
        }
        self.next_at = now + self.ms(500, 4_000);
        let last_node =
            slots.iter().rev().find(|slot| matches!(slot.role, Role::Node(_))).map(|slot| slot.role);
        let last_client = slots.last().map(|slot| slot.role);
        let master_may = now < self.master_until;
        let spared = |role: Role| match role {
            Role::Master => !master_may,
            role => Some(role) == last_node || Some(role) == last_client,
        };
        let mut victims: Vec<&mut Slot> = slots
            .iter_mut()
            .filter(|slot| slot.process().is_some() && !slot.is_stopped() && !spared(slot.role))
            .collect();
        if victims.is_empty() {
            return Ok(());
        }
        let victim = self.below(victims.len() as u64) as usize;
        let Some(victim) = victims.get_mut(victim) else { return Ok(()) };
        let kill = self.below(2) == 0;
        let name = match (victim.role, kill) {
            (Role::Master, true) => "master killed",
            (Role::Master, false) => "master stopped",
            (Role::Node(_), true) => "nodes killed",
            (Role::Node(_), false) => "nodes stopped",
            (Role::Client(_), true) => "clients killed",
            (Role::Client(_), false) => "clients stopped",
            // These roles do not run together with faults.
            (Role::Prober | Role::Hostile(_), _) => return Ok(()),
        };
        // Some are longer and some shorter than leases, windows and timeouts.
        if kill {
            victim.kill(now + self.ms(10, 2_000))?;
        } else {
            victim.stop(now + self.ms(50, 4_000))?;
        }
        *self.counts.entry(name).or_default() += 1;
        Ok(())
    }

    fn ms(&mut self, min: u64, max: u64) -> Duration {
        Duration::from_millis(min + self.below(max - min))
    }

    /// A random number below `n` (SplitMix64).
    fn below(&mut self, n: u64) -> u64 {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.rng;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n.max(1)
    }
}
