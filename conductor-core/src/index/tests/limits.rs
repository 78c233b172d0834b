//! What an index refuses and drops.

use alloc::vec::Vec;

use super::model::Tree;
use super::streams::Random;
use super::*;

/// The index's own answers, block by block.
fn walked(index: &Index, owners: u32, keys: &[BlockKey]) -> Vec<(u32, u32)> {
    let blocks = |owner| keys.iter().take_while(|key| index.holds(OwnerId(owner), **key)).count() as u32;
    (0..owners).map(|owner| (owner, blocks(owner))).filter(|(_, blocks)| *blocks > 0).collect()
}

#[test]
fn a_full_index_drops_the_least_recent_ends_of_chains() {
    let mut index = Index::new(IndexLimits { blocks_max: 4000, ..IndexLimits::default() });
    let chain = |at: u64| keys(at * 1000 + 1..at * 1000 + 101);
    for at in 0..200 {
        assert_eq!(index.stored(OwnerId(at as u32 % 8), None, &chain(at)).refused, 0);
        assert!(index.blocks() <= 4000);
        index.validate();
    }
    let counters = index.counters();
    assert_eq!(counters.dropped, 200 * 100 - index.blocks() as u64, "what is not there was counted");
    assert_eq!(counters.holey, 0, "only ends of chains were dropped");
    let left = |at| matches(&index, &chain(at)).first().map_or(0, |found| found.1);
    let (oldest, newest): (u32, u32) = ((0..20).map(left).sum(), (180..200).map(left).sum());
    assert!(oldest < newest / 4, "{oldest} of the oldest blocks and {newest} of the newest are left");
}

#[test]
fn one_chain_that_is_longer_than_the_index_is_cut() {
    let mut index = Index::new(IndexLimits { blocks_max: 100, ..IndexLimits::default() });
    let chain = keys(1..1001);
    let stored = index.stored(A, None, &chain);
    assert_eq!(stored, Stored { added: 100, known: 0, refused: 900 });
    assert_eq!(index.counters().refused_full, 900);
    assert_eq!(matches(&index, &chain), [(7, 100)]);
}

#[test]
fn random_streams_within_limits_stay_exact() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let tree = Tree::new(900, |end| random.below(end));
        let limits = IndexLimits { blocks_max: 300, owners_max: 20, depth_max: 12, ..IndexLimits::default() };
        let mut index = Index::new(limits);
        for step in 0..3000 {
            let path = tree.path(random.below(900));
            let owner = OwnerId(random.below(24) as u32);
            match random.below(10) {
                0..5 => drop(index.stored(owner, None, &tree.keys(&path))),
                5..7 => {
                    let last = &path[path.len() - 1 - random.below(path.len())..];
                    index.removed(owner, &tree.keys(last));
                }
                7 => {
                    let at = random.below(path.len());
                    index.stored(owner, (at > 0).then(|| tree.key(path[at - 1])), &tree.keys(&path[at..]));
                }
                8 if random.below(10) == 0 => index.cleared(owner),
                _ => drop(index.sweep(100)),
            }
            assert!(index.blocks() <= 300);
            let asked = tree.keys(&tree.path(random.below(900)));
            assert_eq!(matches(&index, &asked), walked(&index, 24, &asked), "seed {seed}, step {step}");
        }
        index.validate();
        let counters = *index.counters();
        assert!(counters.dropped > 0 && counters.refused_owners > 0 && counters.too_deep > 0, "{counters:?}");
    }
}

#[test]
fn further_owners_are_refused_when_the_sets_are_too_large() {
    let mut index = Index::new(IndexLimits { holders_bytes_max: 4096, ..IndexLimits::default() });
    let chain = keys(1..65);
    let mut refused = 0;
    for owner in 0..64 {
        // Every owner ends somewhere else: as many sets as owners.
        refused += index.stored(OwnerId(owner), None, &chain[..64 - owner as usize]).refused as u64;
    }
    assert!(refused > 0);
    assert_eq!(index.counters().refused_holders, refused);
    assert_eq!(matches(&index, &chain), walked(&index, 64, &chain));
    index.validate();
}

#[test]
fn assumptions_are_bounded() {
    let limits = IndexLimits { assumed_max: 100, ..IndexLimits::default() };
    let mut index = Index::new(limits);
    let chain = keys(1..81);
    assert_eq!(index.assumed(A, &chain, Instant::from_millis(1)), 80);
    assert_eq!(index.assumed(B, &chain, Instant::from_millis(1)), 20);
    for at in 2..100 {
        index.assumed(A, &chain, Instant::from_millis(at));
    }
    assert!(index.counters().assumed_refused > 60);
    assert!(index.bytes() < 200_000, "{} bytes", index.bytes());
    index.expire(Instant::from_millis(100));
    assert_eq!(index.next_deadline(), None);
}

#[test]
fn keys_that_collide_in_the_table_are_refused_in_the_end() {
    let mut index = Index::new(IndexLimits::default());
    // The same upper half of the hash: one home, however much the table grows.
    let crafted: Vec<_> = (0..6000u64).map(|low| BlockKey(unspread(0xabcd_ef01 << 32 | low))).collect();
    let stored = index.stored(A, None, &crafted);
    assert!(stored.added >= 4000 && stored.refused > 0, "{stored:?}");
    assert_eq!(index.counters().refused_full, stored.refused as u64);
    assert_eq!(matches(&index, &crafted), [(7, stored.added as u32)]);
    index.removed(A, &crafted);
    assert_eq!(index.blocks(), index.ghosts);
}

#[test]
fn a_block_with_very_many_successors_is_removed_without_a_look_at_all_of_them() {
    let mut index = Index::new(IndexLimits::default());
    let root = keys(1..2);
    let children = keys(2..2 + 2 * CHILDREN_SEARCHED as u64);
    index.stored(A, None, &root);
    children.iter().for_each(|child| assert_eq!(index.stored(A, Some(root[0]), &[*child]).added, 1));
    index.stored(B, None, &root);
    index.stored(B, Some(root[0]), &children[..1]);
    // One that has no child is holey, too, since its children were not looked at.
    let c = OwnerId(1);
    index.stored(c, None, &root);
    index.stored(c, None, &keys(100_000..100_001));
    index.removed(c, &root);
    assert!(index.is_holey(c));
    // B keeps one.
    index.removed(B, &root);
    assert!(index.is_holey(B));
    assert_eq!(matches(&index, &[root[0], children[0]]), [(7, 2)]);
    index.validate();
    index.stored(B, None, &root);
    sweep_all(&mut index);
    assert!(!index.is_holey(B), "a sweep finds that it has the parent of every block");
    assert_eq!(matches(&index, &[root[0], children[0]]), [(3, 2), (7, 2)]);
}

#[test]
fn a_block_follows_the_one_before_it_only() {
    let mut index = Index::new(IndexLimits::default());
    let (chain, other) = (keys(1..11), keys(21..31));
    index.stored(A, None, &chain);
    index.stored(B, None, &other);
    assert!(
        index.follows(None, chain[0]) && !index.follows(None, chain[1]) && !index.follows(None, BlockKey(5))
    );
    assert!(chain.windows(2).all(|pair| index.follows(Some(pair[0]), pair[1])));
    assert!(!index.follows(Some(chain[0]), other[1]) && !index.follows(Some(chain[0]), chain[2]));
    // What joins in the middle is holey, unless the block before it is there, too.
    assert!(index.joined(B, chain[0], None) && index.joined(B, chain[1], Some(chain[0])));
    assert!(!index.is_holey(B));
    assert!(index.joined(B, chain[2], Some(other[1])));
    assert!(index.is_holey(B));
    assert_eq!(matches(&index, &chain), [(3, 3), (7, 10)]);
}
