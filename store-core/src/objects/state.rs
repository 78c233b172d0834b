//! Objects in a snapshot. The hash tables are not written: they are made of the entries again.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use foldhash::quality::FixedState;
use te_core::Instant;

use super::leases::LeaseCount;
use super::{Entry, KeyBytes, Objects, Placements, State, short};
use crate::eviction::{Eviction as _, EvictionPolicy, Place};
use crate::message::REPLICAS_MAX;
use crate::segments::Placed;
use crate::snapshot::{Packed, take};
use crate::{SegmentNo, TenantNo};

impl Packed for Entry {
    const VACANT: Self = Self::VACANT;

    fn pack(&self, to: &mut Vec<u8>) {
        let Self { key, generation, len, time, replicas, checksum, tenant, state, marks } = self;
        to.push(*state as u8);
        if *state == State::Vacant {
            return;
        }
        let (key, replicas) = (key.as_slice(), replicas.as_slice());
        let mut fixed = [0; 34];
        fixed[..8].copy_from_slice(&generation.to_le_bytes());
        fixed[8..16].copy_from_slice(&len.to_le_bytes());
        fixed[16..24].copy_from_slice(&time.as_nanos().to_le_bytes());
        fixed[24..28].copy_from_slice(&checksum.to_le_bytes());
        fixed[28..30].copy_from_slice(&tenant.get().to_le_bytes());
        fixed[30..32].copy_from_slice(&(key.len() as u16).to_le_bytes());
        (fixed[32], fixed[33]) = (*marks, replicas.len() as u8);
        to.extend_from_slice(&fixed);
        to.extend_from_slice(key);
        replicas.iter().for_each(|placed| placed.pack(to));
    }

    fn unpack(from: &mut &[u8]) -> Option<Self> {
        let state = State::ALL.get(usize::from(take!(u8, from))).copied()?;
        if state == State::Vacant {
            return Some(Self::VACANT);
        }
        let (generation, len, time) = (take!(u64, from), take!(u64, from), take!(u64, from));
        let (checksum, tenant, key_len) = (take!(u32, from), take!(u16, from), take!(u16, from));
        let (marks, replicas) = (take!(u8, from), usize::from(take!(u8, from)));
        let (key, rest) = from.split_at_checked(key_len.into())?;
        *from = rest;
        let replicas = match replicas {
            0 => Placements::NONE,
            1 => Placements::One(Placed::unpack(from)?),
            2..=REPLICAS_MAX => {
                let many: Option<Box<[Placed]>> = (0..replicas).map(|_| Placed::unpack(from)).collect();
                Placements::Many(many?)
            }
            _ => return None,
        };
        Some(Self {
            key: KeyBytes::new(key),
            generation,
            len,
            time: Instant::from_nanos(time),
            replicas,
            checksum,
            tenant: TenantNo::new(tenant),
            state,
            marks,
        })
    }
}

impl State {
    const ALL: [Self; 9] = [
        Self::Processing,
        Self::Hard,
        Self::Soft,
        Self::Leased,
        Self::Candidate,
        Self::Leaving,
        Self::Member,
        Self::Replacing,
        Self::Vacant,
    ];
}

impl Packed for Placed {
    const VACANT: Self = Self::NOWHERE;

    fn pack(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.addr.to_le_bytes());
        to.extend_from_slice(&self.segment.get().to_le_bytes());
        to.extend_from_slice(&self.block().index().to_le_bytes());
    }

    fn unpack(from: &mut &[u8]) -> Option<Self> {
        let (addr, segment, block) = (take!(u64, from), take!(u32, from), take!(u32, from));
        Some(Self::new(addr, SegmentNo::new(segment), crate::allocator::Block::new(block)))
    }
}

impl Objects {
    /// Makes the tables that a snapshot leaves out.
    pub(crate) fn reindex(&mut self, hash_seed: u64) {
        self.hasher = FixedState::with_seed(hash_seed);
        self.table.reserve((self.slots.taken() as usize).saturating_sub(self.upserts_unindexed()));
        for index in 0..self.slots.end() {
            let entry = &self.entries[index];
            if entry.state == State::Vacant {
                continue;
            }
            let hash = short(self.hash(entry.full_key()));
            let table = if entry.has_key() { &mut self.table } else { &mut self.replacing };
            table.insert(hash, index);
        }
    }

    /// Takes other settings.
    pub(crate) fn reconfigure(&mut self, now: Instant, soft_pin_ttl: Duration, lease: Duration) {
        self.soft_pin_ttl = soft_pin_ttl;
        self.leases = LeaseCount::new(lease);
        for index in 0..self.slots.end() {
            let entry = &self.entries[index];
            let until = entry.leased_until();
            if entry.is_complete() && until > now {
                // Slots beyond the longest lease of now would be counted twice.
                self.entries[index].time = until.min(now + lease);
                self.leases.moved(now, Instant::ZERO, self.entries[index].time);
            }
        }
    }

    /// Takes another policy. What would have been evicted first still is.
    pub(crate) fn change_policy(&mut self, policy: EvictionPolicy) {
        for tenant in 0..self.orders.len() {
            let mut candidates = Vec::new();
            self.orders[tenant].policy.preview(&self.nodes, &mut |index| {
                candidates.push(index);
                true
            });
            let mut fresh = policy.build();
            for index in candidates {
                let hash = self.hash(self.entries[index].full_key());
                fresh.insert(&mut self.nodes, index, hash, Place::ALONE);
            }
            self.orders[tenant].policy = fresh;
        }
    }

    fn upserts_unindexed(&self) -> usize {
        (0..self.slots.end()).filter(|index| self.entries[*index].state == State::Replacing).count()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_its_number() {
        for (number, state) in State::ALL.into_iter().enumerate() {
            assert_eq!(state as usize, number);
        }
        assert_eq!(State::Vacant as usize + 1, State::ALL.len());
    }

    #[test]
    fn an_entry_that_is_cut_short_is_none() {
        let placed = Placed::new(64, SegmentNo::new(3), crate::allocator::Block::new(5));
        for replicas in [1, 2, 8] {
            for key in [&b"short"[..], &[7; 500]] {
                let replicas = Placements::new(&alloc::vec![placed; replicas]);
                let entry = Entry { key: KeyBytes::new(key), replicas, state: State::Hard, ..Entry::VACANT };
                let mut packed = Vec::new();
                entry.pack(&mut packed);
                let mut rest = &packed[..];
                let unpacked = Entry::unpack(&mut rest).unwrap();
                assert_eq!(alloc::format!("{unpacked:?}"), alloc::format!("{entry:?}"));
                assert!(rest.is_empty());
                for len in 0..packed.len() {
                    assert!(Entry::unpack(&mut &packed[..len]).is_none(), "{len}");
                }
                packed[0] = State::ALL.len() as u8;
                assert!(Entry::unpack(&mut &packed[..]).is_none(), "no such state");
            }
        }
    }
}
