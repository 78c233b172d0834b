//! TRIAL: an LRU in which an object that nobody has come back for ages faster. Aware of prefixes; the default.
//!
//! ```text
//!                 new key ─▶ trial     age × 3 ─┐
//!   last key of its batch ─▶ end       age × 32 ┼─▶ the oldest of the three fronts goes; its key is
//!    read, or known again ─▶ proven    age × 1 ─┘   remembered for a while, unless it was an end
//! ```
//!
//! Three lists, each in the order of the last use, and a clock that counts uses. The victim is the oldest of the three fronts,
//! where an object that is still on trial counts as three times as old as it is. What is read is proven. What comes back
//! while its key is remembered (2 to 4 bytes an object, see `ghost.rs`) is proven at once: it was wanted, only later than it was
//! kept. Nobody starves: a new object lives for at least a third of the time that the least wanted proven one does, so a change of
//! mind of the workload is followed within one turnover, and with nothing read twice it is plain FIFO, with everything
//! read twice plain LRU.
//!
//! # Prefixes
//!
//! A block is of use only while all blocks before it are there. The master is told nothing about prefixes, and need not be: who
//! stores or reads a prefix names its blocks in order, in one batch. From that follows
//!
//! * *Ends.* The last block of a prompt is seldom whole, so the next turn of the same conversation has another in its
//!   place: 0.8 % of them are ever read again in the conversation trace and 5 % in the synthetic one, against 26 % and
//!   45 % of the rest. The last key of a batch of several ages 32 times as fast. It is no law: one read, and it is proven.
//! * *Whole beginnings.* If a later key of a batch is remembered, so were the ones before it: without them it could not have
//!   been read. The beginning of a batch up to the last remembered key is proven together, holes in the memory
//!   notwithstanding. Without this rule, chance lets single blocks go first and leaves what is behind them useless: it is
//!   the difference between 15.3 and 16.2 % in the table's first column.
//! * *Tails first.* Within a batch, later keys are placed as if they had been used before earlier ones, so that what is lost
//!   of a prefix is lost from its end.
//!
//! A batch of one key says nothing of this kind, and is an ordinary trial.
//!
//! # State
//!
//! Eight bytes of the node (a stamp of 48 bits, the list), besides the two links that any list has; 2 to 4 bytes of ghosts.
//! Each operation is O(1); a victim costs three comparisons.
//!
//! # Figures
//!
//! Share of block references in the longest cached prefix, %, at 3.0, 5.12, 10.24 and 25.6 million tokens (512 a block), of
//! the two traces that Mooncake's authors published (FAST'25); `snowskin replay --simulate` computes them.
//!
//! | Policy | conversation | synthetic |
//! |---|---|---|
//! | TRIAL | 16.2 23.2 30.6 35.5 | 32.6 45.1 59.5 64.0 |
//! | LRU | 13.6 21.1 28.7 35.5 | 30.9 42.3 57.1 64.0 |
//! | SIEVE | 9.7 13.2 21.0 34.4 | 24.3 35.8 59.2 64.0 |
//! | FIFO | 12.5 18.2 25.8 33.4 | 30.1 39.9 53.2 64.0 |
//! | Belady | 35.3 36.6 36.6 36.6 | 55.0 61.8 64.0 64.0 |
//!
//! It is no law of nature. Where the next request is chosen by recency alone, as in the workload that `snowskin replay` makes
//! up, LRU is right and TRIAL loses up to 1.3 points to it; and a cycle that is longer than three times what trials get is as
//! lost as under LRU. Simulate your own trace.
//!
//! # Tried, and not taken
//!
//! At the same eight points, in a model of the policy alone:
//!
//! * Ends alone, all else LRU: 14.1 21.5 29.4 35.6 and 31.5 43.5 58.2 64.0. Ends and trials without ghosts: 15.0 22.4 29.7
//!   35.5 and 31.8 43.8 59.3 64.0. So ghosts are worth a point in the first column.
//! * The same ghosts without the rule of whole beginnings: 15.3 23.0 30.5 35.5 and 30.7 44.0 59.5 64.0, once below LRU.
//! * Trials that age 2 or 4 times as fast: 15.5 22.8 30.3 35.6 and 32.5 44.4 59.2 64.0, or 16.5 23.0 30.2 35.1 and 33.2 45.2
//!   59.5 64.0. Four falls below LRU in the fourth column, so three.
//! * A factor that adapts itself between 1 and 3, towards whichever class more remembered keys come back from, as ARC
//!   does: 15.6 23.0 30.5 35.5 and 32.1 44.3 59.4 64.0 at its best, for 0.5 to 1.0 points gained where recency rules.
//! * More classes by the number of reads: within 0.3 points, worse at the synthetic trace's small pools.
//! * New blocks behind a cached prefix (a continued conversation) as a class of their own, which the wire would have to
//!   say: they are read again half as often as others at most, yet no weight gained more than 0.1 points.
//! * Long prompts as a class of their own: up to 0.4 points gained at the conversation trace, up to 3.6 lost at the other.
//! * Ghosts twice or four times as many: within 0.6 points, and no better.
//! * SIEVE's bit instead of moving what was read: see the table.
//!
//! Sources of its parts: a probation of newcomers and a memory of keys are 2Q's (Johnson and Shasha, VLDB'94) and ARC's
//! (Megiddo and Modha, FAST'03), the small memory of evicted keys in S3-FIFO's form (Yang et al., SOSP'23); the weighing of ages
//! instead of sizes comes from the hit density of LHD (Beckmann, Chen and Cidon, NSDI'18), with classes of our own.

use super::ghost::Ghosts;
use super::{Eviction, List, Nodes, Place};

/// Read since it came, or known again when it came.
const PROVEN: u8 = 0;
/// New.
const ON_TRIAL: u8 = 1;
/// New, and the last of its batch.
const END: u8 = 2;

/// How much faster each class ages.
const WEIGHTS: [u64; 3] = [1, 3, 32];

#[derive(Debug)]
pub(crate) struct Trial {
    lists: [List; 3],
    /// The last one that was placed on each list in the batch that is going on.
    latest: [Option<u32>; 3],
    ghosts: Ghosts,
    /// Uses so far.
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
        // One more, so that weights count among the youngest, too. The stamp is 48 bits long.
        let age = (self.clock + 1).wrapping_sub(node.stamp()) & ((1 << 48) - 1);
        age * WEIGHTS[usize::from(node.class)]
    }

    /// The one of three that goes first.
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

    /// It was read until now.
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
