//! Random streams of events.

use alloc::vec::Vec;

use proptest::prelude::*;

use super::model::{Op, Pair, Tree};

const OWNERS: u32 = 12;
const BLOCKS: usize = 160;

fn op() -> impl Strategy<Value = Op> {
    let (owner, end, blocks) = (0..OWNERS, 0..BLOCKS, 1..40usize);
    prop_oneof![
        6 => (owner.clone(), end.clone(), blocks.clone())
            .prop_map(|(owner, end, blocks)| Op::Stored { owner, end, blocks }),
        4 => (owner.clone(), end.clone()).prop_map(|(owner, end)| Op::Stored { owner, end, blocks: BLOCKS }),
        4 => (owner.clone(), end.clone(), 1..4usize, any::<bool>())
            .prop_map(|(owner, end, blocks, from_leaf)| Op::Removed { owner, end, blocks, from_leaf }),
        1 => owner.clone().prop_map(|owner| Op::Cleared { owner }),
        2 => (owner, end.clone(), 0..100u64).prop_map(|(owner, end, until)| Op::Assumed { owner, end, until }),
        1 => (0..100u64).prop_map(|now| Op::Expired { now }),
        2 => (1..400usize).prop_map(|budget| Op::Swept { budget }),
        1 => Just(Op::Restored),
        8 => (end, any::<bool>()).prop_map(|(end, beyond)| Op::Queried { end, beyond }),
    ]
}

/// SplitMix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_index_equals_the_model(seed: u64, ops in prop::collection::vec(op(), 1..250)) {
        let mut random = Random(seed);
        let tree = Tree::new(BLOCKS, |end| random.below(end));
        let mut pair = Pair::new(&tree, OWNERS);
        ops.iter().for_each(|op| pair.apply(op));
        pair.check_all();
        while pair.index.sweep(100) > 0 {}
        pair.check_all();
    }
}

/// Engines that evict from the ends of chains, and a few that evict from anywhere.
fn random_op(random: &mut Random, owners: u32, blocks: usize) -> Op {
    let owner = random.below(owners as usize) as u32;
    let end = random.below(blocks);
    match random.below(100) {
        0..40 => {
            Op::Stored { owner, end, blocks: if random.below(3) == 0 { random.below(60) } else { blocks } }
        }
        40..70 => {
            let from_leaf = !owner.is_multiple_of(4) || random.below(2) == 0;
            Op::Removed {
                owner,
                end,
                blocks: 1 + random.below(if owner % 4 == 1 { 60 } else { 3 }),
                from_leaf,
            }
        }
        70 => Op::Cleared { owner },
        71..80 => Op::Swept { budget: 1 + random.below(500) },
        80..85 => Op::Assumed { owner, end, until: random.below(1000) as u64 },
        85 => Op::Expired { now: random.below(1000) as u64 },
        86 if random.below(20) == 0 => Op::Restored,
        _ => Op::Queried { end, beyond: random.below(2) == 0 },
    }
}

#[test]
fn long_streams_of_many_owners_equal_the_model() {
    for seed in 0..24 {
        let mut random = Random(seed);
        let blocks = 50 + random.below(800);
        let owners = [2, 5, 70, 200][random.below(4)];
        let mut shape = Random(seed ^ 0xf00d);
        let tree = Tree::new(blocks, |end| shape.below(end));
        let mut pair = Pair::new(&tree, owners);
        let ops: Vec<_> = (0..2500).map(|_| random_op(&mut random, owners, blocks)).collect();
        ops.iter().for_each(|op| pair.apply(op));
        pair.check_all();
        // Everything goes; nothing stays behind.
        (0..owners).for_each(|owner| pair.apply(&Op::Cleared { owner }));
        while pair.index.sweep(1000) > 0 {}
        pair.check_all();
        assert_eq!((pair.index.blocks(), pair.index.seats.dead()), (0, 0), "seed {seed}");
    }
}
