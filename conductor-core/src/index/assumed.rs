//! Blocks that an owner is assumed to get, since a decision sent a request there.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use hashbrown::HashMap;
use te_core::Instant;

use super::Index;
use crate::{BlockKey, OwnerId, OwnerMatch};

/// The pairs of one decision.
#[derive(Debug)]
struct Batch {
    owner: OwnerId,
    tenure: u64,
    keys: Box<[BlockKey]>,
}

#[derive(Debug)]
pub(super) struct Assumptions {
    /// Until when a block is assumed of a tenure of a seat.
    until: HashMap<(BlockKey, u64), Instant, foldhash::fast::FixedState>,
    /// By deadline, and a number that makes it unique.
    batches: BTreeMap<(Instant, u64), Batch>,
    batches_made: u64,
    batched_keys: usize,
    pairs_max: usize,
}

impl Assumptions {
    pub(super) fn new(pairs_max: usize) -> Self {
        Self {
            until: HashMap::with_hasher(foldhash::fast::FixedState::with_seed(0)),
            batches: BTreeMap::new(),
            batches_made: 0,
            batched_keys: 0,
            pairs_max,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.until.allocation_size() + self.batched_keys * size_of::<BlockKey>() + self.batches.len() * 64
    }
}

impl Index {
    /// A decision lets `owner` compute or fetch the blocks of a chain from its beginning, `keys`: those that
    /// it does not have are assumed until `until`, or until the later of the deadlines when another decision
    /// assumed them too. An event that stores a block ends its assumption. Returns how many were newly
    /// assumed.
    pub fn assumed(&mut self, owner: OwnerId, keys: &[BlockKey], until: Instant) -> usize {
        let Some(seat) = self.seats.of_or_new(owner) else {
            self.counters.assumed_refused += keys.len() as u64;
            return 0;
        };
        let has = self.matched(owner, keys) as usize;
        let holey = self.seats.is_holey(seat);
        let tenure = self.seats.get(seat).tenure;
        let (mut renewed, mut new) = (Vec::new(), 0);
        for key in keys.get(has..).unwrap_or_default() {
            if holey && self.holds(owner, *key) {
                continue;
            }
            let full = self.assumed.until.len() >= self.assumed.pairs_max
                || self.assumed.batched_keys + renewed.len() >= self.assumed.pairs_max.saturating_mul(4);
            match self.assumed.until.get_mut(&(*key, tenure)) {
                Some(deadline) if *deadline >= until => continue,
                _ if full => {
                    self.counters.assumed_refused += 1;
                    continue;
                }
                Some(deadline) => *deadline = until,
                None => {
                    self.assumed.until.insert((*key, tenure), until);
                    new += 1;
                }
            }
            renewed.push(*key);
        }
        if !renewed.is_empty() {
            self.assumed.batched_keys += renewed.len();
            self.assumed.batches_made += 1;
            let batch = Batch { owner, tenure, keys: renewed.into() };
            self.assumed.batches.insert((until, self.assumed.batches_made), batch);
        }
        self.seats.get_mut(seat).assumed += new;
        self.counters.assumed += new as u64;
        new
    }

    /// The owner of `seat` has stored a block.
    pub(super) fn confirm(&mut self, seat: u32, key: BlockKey) {
        let of = self.seats.get_mut(seat);
        if self.assumed.until.remove(&(key, of.tenure)).is_some() {
            of.assumed = of.assumed.saturating_sub(1);
            self.counters.assumed_confirmed += 1;
        }
    }

    /// Drops what was assumed until `now` or earlier, and returns how many pairs.
    pub fn expire(&mut self, now: Instant) -> usize {
        let mut expired = 0;
        while let Some(first) = self.assumed.batches.first_entry() {
            if first.key().0 > now {
                break;
            }
            let Batch { owner, tenure, keys } = first.remove();
            self.assumed.batched_keys -= keys.len();
            let mut of_batch = 0;
            for key in keys {
                // A later decision may have prolonged it, and an event may have confirmed it.
                if self.assumed.until.get(&(key, tenure)).is_some_and(|until| *until <= now) {
                    self.assumed.until.remove(&(key, tenure));
                    of_batch += 1;
                }
            }
            if let Some(seat) = self.seats.of(owner) {
                let of = self.seats.get_mut(seat);
                if of.tenure == tenure {
                    of.assumed = of.assumed.saturating_sub(of_batch);
                    expired += of_batch;
                }
            }
        }
        self.counters.assumed_expired += expired as u64;
        expired
    }

    /// The earliest time at which [`Index::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.assumed.batches.first_key_value().map(|((until, _), _)| *until)
    }

    /// Like [`Index::query`], with assumed blocks as if their owner had them.
    pub fn query_with_assumed(&self, keys: &[BlockKey], out: &mut Vec<OwnerMatch>) {
        self.query(keys, out);
        let Some(first) = keys.first() else { return };
        for found in &mut *out {
            if let Some(seat) = self.seats.of(found.owner)
                && self.seats.get(seat).assumed > 0
            {
                found.blocks = self.with_assumed(seat, keys, found.blocks as usize);
            }
        }
        for (seat, of) in self.seats.owners() {
            if of.assumed > 0 && !self.holds(of.owner, *first) {
                let blocks = self.with_assumed(seat, keys, 0);
                if blocks > 0 {
                    out.push(OwnerMatch { owner: of.owner, blocks });
                }
            }
        }
    }

    /// How far the chain goes on after `blocks` with blocks that are assumed or there.
    fn with_assumed(&self, seat: u32, keys: &[BlockKey], blocks: usize) -> u32 {
        let of = self.seats.get(seat);
        let mut end = blocks;
        while let Some(key) = keys.get(end) {
            let assumed = self.assumed.until.contains_key(&(*key, of.tenure));
            // The block at `blocks` itself is not there: that is where the query ended.
            if !assumed && (end == blocks || !self.holds(of.owner, *key)) {
                break;
            }
            end += 1;
        }
        u32::try_from(end).unwrap_or(u32::MAX)
    }
}
