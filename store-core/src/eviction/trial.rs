//! TRIAL: an LRU in which an object that was not used again ages faster. Aware of prefixes; the default.
//!
//! ```text
//!                 new key ─▶ trial     age × 3 ─┐
//!   last key of its batch ─▶ end       age × 32 ┼─▶ the oldest of the three fronts is evicted; its key
//!    read, or remembered  ─▶ proven    age × 1 ─┘   is remembered for a while, unless it was an end
//! ```
//!
//! Three lists, each in the order of the last use, and a clock that counts uses. The victim is the oldest of
//! the three fronts, where an object on trial counts as three times as old as it is. An object that is read
//! is proven. An object that is put again while its key is remembered (2 to 4 bytes per object, see
//! `ghost.rs`) is proven at once: it was used again, only after its eviction. No class starves: a new object
//! stays for at least a third of the time that the least recently used proven one does, so a change of the
//! workload is followed within one turnover. If nothing is read twice the policy is plain FIFO, and if
//! everything is read twice plain LRU.
//!
//! # Prefixes
//!
//! A block is useful only while all blocks before it are present. The master has no information about
//! prefixes, and needs none: a client that stores or reads a prefix names its blocks in order, in one batch.
//! From that follows
//!
//! * *Ends.* The last block of a prompt is seldom whole, so the next turn of the same conversation has
//!   another one in its place: 0.8 % of them are ever read again in the conversation trace and 5 % in the
//!   synthetic one, against 26 % and 45 % of the rest. So the last key of a batch of several ages 32 times as
//!   fast, until it is read: then it is proven.
//! * *Whole beginnings.* If a later key of a batch is remembered, the earlier ones were used as well: without
//!   them it could not have been read. The beginning of a batch up to the last remembered key is proven
//!   together, even if some of its keys are not remembered. Without this rule, chance evicts single blocks
//!   first and makes all blocks behind them useless: that is the difference between 15.3 and 16.2 % in the
//!   table's first column.
//! * *Tails first.* Within a batch, later keys are placed as if they had been used before earlier ones, so
//!   that a prefix is evicted from its end.
//!
//! A batch of one key carries no such information, and is an ordinary trial.
//!
//! # State
//!
//! Eight bytes of the node (a stamp of 48 bits, the list), besides the two links that any list has; 2 to 4
//! bytes of remembered keys. Each operation is O(1); a victim costs three comparisons.
//!
//! # Figures
//!
//! Share of block references in the longest cached prefix, %, at 3.0, 5.12, 10.24 and 25.6 million tokens
//! (512 per block), of the two traces that Mooncake's authors published (FAST'25); `snowskin replay
//! --simulate` computes them.
//!
//! | Policy | conversation | synthetic |
//! |---|---|---|
//! | TRIAL | 16.2 23.2 30.6 35.5 | 32.6 45.1 59.5 64.0 |
//! | LRU | 13.6 21.1 28.7 35.5 | 30.9 42.3 57.1 64.0 |
//! | SIEVE | 9.7 13.2 21.0 34.4 | 24.3 35.8 59.2 64.0 |
//! | FIFO | 12.5 18.2 25.8 33.4 | 30.1 39.9 53.2 64.0 |
//! | Belady | 35.3 36.6 36.6 36.6 | 55.0 61.8 64.0 64.0 |
//!
//! The advantage depends on the workload. Where the next request is chosen by recency alone, as in the
//! workload that `snowskin replay` generates, LRU is optimal and TRIAL loses up to 1.3 points to it; and a
//! cycle that is longer than three times what trials get is lost as under LRU. Simulate your own trace.
//!
//! # Tried and rejected
//!
//! At the same eight points, in a model of the policy alone:
//!
//! * Ends alone, all else LRU: 14.1 21.5 29.4 35.6 and 31.5 43.5 58.2 64.0. Ends and trials without ghosts:
//!   15.0 22.4 29.7 35.5 and 31.8 43.8 59.3 64.0. So ghosts are worth a point in the first column.
//! * The same ghosts without the rule of whole beginnings: 15.3 23.0 30.5 35.5 and 30.7 44.0 59.5 64.0, once
//!   below LRU.
//! * Trials that age 2 or 4 times as fast: 15.5 22.8 30.3 35.6 and 32.5 44.4 59.2 64.0, or 16.5 23.0 30.2
//!   35.1 and 33.2 45.2 59.5 64.0. Four falls below LRU in the fourth column, so three.
//! * A factor that adapts itself between 1 and 3, towards the class that more remembered keys come back from,
//!   as ARC does: 15.6 23.0 30.5 35.5 and 32.1 44.3 59.4 64.0 at its best, which gains 0.5 to 1.0 points
//!   where recency decides.
//! * More classes by the number of reads: within 0.3 points, worse at the synthetic trace's small pools.
//! * New blocks behind a cached prefix (a continued conversation) as a separate class, which the wire would
//!   have to carry: they are read again at most half as often as others, yet no weight gained more than 0.1
//!   points.
//! * Long prompts as a separate class: up to 0.4 points gained in the conversation trace, up to 3.6 lost in
//!   the other.
//! * Twice or four times as many ghosts: within 0.6 points, and no better.
//! * SIEVE's bit instead of moving what was read: see the table.
//!
//! Sources of its parts: the probation of new objects and the memory of keys come from 2Q (Johnson and
//! Shasha, VLDB'94) and ARC (Megiddo and Modha, FAST'03), the small memory of evicted keys has the form of
//! S3-FIFO (Yang et al., SOSP'23); weighing ages instead of sizes comes from the hit density of LHD
//! (Beckmann, Chen and Cidon, NSDI'18), with different classes.

use super::ghost::Ghosts;
use super::{Eviction, List, Nodes, Place, Standing};
use serde::{Deserialize, Serialize};

/// Read since it was put, or remembered when it was put.
const PROVEN: u8 = 0;
/// Put, and not read since.
const ON_TRIAL: u8 = 1;
/// Put as the last of its batch, and not read since.
const END: u8 = 2;

/// The factor by which each class ages faster.
const WEIGHTS: [u64; 3] = [1, 3, 32];

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Trial {
    lists: [List; 3],
    /// The object that was placed last on each list in the current batch.
    latest: [Option<u32>; 3],
    ghosts: Ghosts,
    /// Number of uses so far.
    clock: u64,
}

impl Trial {
    pub(crate) const fn new() -> Self {
        Self { lists: [List::EMPTY; 3], latest: [None; 3], ghosts: Ghosts::new(), clock: 0 }
    }

    fn place(&mut self, nodes: &mut Nodes, index: u32, class: u8, follows: bool) {
        if !follows {
            self.latest = [None; 3];
        }
        self.clock += 1;
        let list = &mut self.lists[usize::from(class)];
        let latest = self.latest[usize::from(class)].replace(index);
        let stamp = match latest {
            Some(latest) => {
                list.insert_before(nodes, latest, index);
                nodes.node(latest).stamp()
            }
            None => {
                list.push_back(nodes, index);
                self.clock
            }
        };
        let node = nodes.node_mut(index);
        node.class = class;
        node.set_stamp(stamp);
    }

    fn take(&mut self, nodes: &mut Nodes, index: u32) -> u8 {
        let class = nodes.node(index).class;
        self.lists[usize::from(class)].unlink(nodes, index);
        let latest = &mut self.latest[usize::from(class)];
        *latest = latest.filter(|latest| *latest != index);
        class
    }

    fn weight(&self, nodes: &Nodes, index: u32) -> u64 {
        let node = nodes.node(index);
        // Plus one, so that weights have an effect among the youngest, too. The stamp has 48 bits.
        let age = (self.clock + 1).wrapping_sub(node.stamp()) & ((1 << 48) - 1);
        age * WEIGHTS[usize::from(node.class)]
    }

    /// The one of the three fronts that is evicted next.
    fn oldest(&self, nodes: &Nodes, fronts: [Option<u32>; 3]) -> Option<u32> {
        fronts.into_iter().flatten().max_by_key(|index| self.weight(nodes, *index))
    }

    fn fronts(&self) -> [Option<u32>; 3] {
        self.lists.each_ref().map(List::front)
    }
}

impl Eviction for Trial {
    fn insert(&mut self, nodes: &mut Nodes, index: u32, hash: u64, place: Place) {
        let known = place.returning || self.ghosts.has(hash);
        let class = match place {
            _ if known => PROVEN,
            Place { last: true, .. } => END,
            _ => ON_TRIAL,
        };
        self.ghosts.remove(hash);
        self.place(nodes, index, class, place.follows);
    }

    fn touch(&mut self, nodes: &mut Nodes, index: u32, follows: bool) {
        self.take(nodes, index);
        self.place(nodes, index, PROVEN, follows);
    }

    fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        self.take(nodes, index);
    }

    /// The object was being read until now.
    fn put_back(&mut self, nodes: &mut Nodes, index: u32) {
        self.place(nodes, index, PROVEN, false);
    }

    fn victim(&mut self, nodes: &mut Nodes) -> Option<u32> {
        nodes.look();
        self.oldest(nodes, self.fronts())
    }

    fn evict(&mut self, nodes: &mut Nodes, index: u32, hash: u64) {
        let candidates = self.len();
        if self.take(nodes, index) != END {
            self.ghosts.add(hash, candidates);
        }
    }

    fn standing(&self, nodes: &Nodes, index: u32) -> Standing {
        match nodes.node(index).class {
            PROVEN => Standing::Proven,
            END => Standing::End,
            _ => Standing::OnTrial,
        }
    }

    fn len(&self) -> u32 {
        self.lists.iter().map(List::len).sum()
    }

    fn remembers(&self, hash: u64) -> bool {
        self.ghosts.has(hash)
    }

    fn memory_bytes(&self) -> usize {
        self.ghosts.memory_bytes()
    }

    fn tidy(&mut self) {
        self.ghosts.trim(self.len());
    }

    fn preview(&self, nodes: &Nodes, each: &mut dyn FnMut(u32) -> bool) {
        let mut fronts = self.fronts();
        while let Some(index) = self.oldest(nodes, fronts).filter(|index| each(*index)) {
            fronts[usize::from(nodes.node(index).class)] = nodes.after(index);
        }
    }
}
