//! The index against a naive model.

mod limits;
mod model;
mod restored;
mod streams;

use alloc::vec;
use alloc::vec::Vec;

use te_core::Instant;

use super::*;

fn keys(range: core::ops::Range<u64>) -> Vec<BlockKey> {
    range.map(|key| BlockKey(key.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
}

fn matches(index: &Index, keys: &[BlockKey]) -> Vec<(u32, u32)> {
    let mut out = Vec::new();
    index.query(keys, &mut out);
    let mut found: Vec<_> = out.iter().map(|found| (found.owner.0, found.blocks)).collect();
    found.sort_unstable();
    found
}

fn sweep_all(index: &mut Index) {
    while index.sweep(1000) > 0 {}
}

const A: OwnerId = OwnerId(7);
const B: OwnerId = OwnerId(3);

#[test]
fn owners_match_as_far_as_they_have_the_chain() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..101);
    assert_eq!(index.stored(A, None, &chain), Stored { added: 100, ..Stored::default() });
    assert_eq!(index.stored(B, None, &chain[..40]), Stored { added: 40, ..Stored::default() });
    assert_eq!(index.stored(B, Some(chain[39]), &chain[39..41]).refused, 2, "a block cannot follow itself");
    assert_eq!(index.counters().conflicts, 2);
    assert_eq!(matches(&index, &chain), [(3, 40), (7, 100)]);
    assert_eq!(matches(&index, &chain[..10]), [(3, 10), (7, 10)]);
    assert_eq!(matches(&index, &chain[1..]), [], "a chain begins at its first block");
    assert_eq!(matches(&index, &[]), []);
    assert_eq!(index.blocks(), 100);
}

#[test]
fn a_parent_that_no_owner_has_makes_orphans() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..11);
    assert_eq!(index.stored(A, Some(chain[3]), &chain[4..]), Stored { refused: 6, ..Stored::default() });
    assert_eq!(index.counters().orphans, 6);
    index.stored(B, None, &chain[..4]);
    assert!(!index.is_holey(A));
    assert_eq!(index.stored(A, Some(chain[3]), &chain[4..]).added, 6);
    assert!(index.is_holey(A), "it does not have the parent");
    assert_eq!(matches(&index, &chain), [(3, 4)]);
    index.stored(A, None, &chain[..4]);
    assert_eq!(matches(&index, &chain), [(3, 4), (7, 10)]);
    index.cleared(B);
    index.cleared(A);
    assert_eq!(index.stored(A, Some(chain[3]), &chain[4..]).refused, 6, "no owner has it any more");
}

#[test]
fn removals_from_leaves_keep_an_owner_regular_and_others_make_it_holey() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..21);
    index.stored(A, None, &chain);
    index.stored(B, None, &chain);
    for key in chain[10..].iter().rev() {
        index.removed(A, &[*key]);
    }
    assert!(!index.is_holey(A));
    assert_eq!(matches(&index, &chain), [(3, 20), (7, 10)]);
    index.removed(B, &[chain[4]]);
    assert!(index.is_holey(B));
    assert_eq!(matches(&index, &chain), [(3, 4), (7, 10)]);
    index.removed(B, &chain);
    assert!(!index.is_holey(B), "it has nothing");
    index.removed(A, &chain);
    sweep_all(&mut index);
    assert_eq!((index.blocks(), index.counters().removed_unknown), (0, 11));
}

#[test]
fn an_owner_whose_holes_were_filled_is_regular_after_a_sweep() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..21);
    index.stored(A, None, &chain);
    index.removed(A, &chain[4..6]);
    assert!(index.is_holey(A));
    index.stored(A, None, &chain);
    for _ in 0..3 {
        index.removed(A, &chain[10..]);
        index.stored(A, Some(chain[9]), &chain[10..]);
    }
    sweep_all(&mut index);
    assert!(!index.is_holey(A));
    assert_eq!(matches(&index, &chain), [(7, 20)]);
}

#[test]
fn a_clear_is_seen_at_once_and_the_id_may_be_used_again() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..1001);
    index.stored(A, None, &chain);
    index.stored(B, None, &chain[..500]);
    index.cleared(A);
    assert_eq!(matches(&index, &chain), [(3, 500)]);
    assert_eq!(index.digest(A), Digest::default());
    index.stored(A, None, &chain[..3]);
    assert_eq!(matches(&index, &chain), [(3, 500), (7, 3)]);
    sweep_all(&mut index);
    assert_eq!(matches(&index, &chain), [(3, 500), (7, 3)]);
    assert_eq!(index.blocks(), 500);
    assert_eq!(index.sweep(1000), 0);
}

#[test]
fn digests_do_not_depend_on_order_or_on_the_owners_id() {
    let (mut one, mut other) = (Index::new(IndexLimits::default()), Index::new(IndexLimits::default()));
    let (chain, branch) = (keys(1..101), keys(200..220));
    one.stored(A, None, &chain);
    one.stored(A, Some(chain[9]), &branch);
    one.assumed(A, &keys(300..310), Instant::from_millis(5));
    other.stored(B, None, &chain[..20]);
    other.stored(B, Some(chain[9]), &branch);
    other.stored(B, Some(chain[19]), &chain[20..]);
    assert_eq!(one.digest(A), other.digest(B));
    other.removed(B, &[branch[19]]);
    assert_ne!(one.digest(A), other.digest(B));
}

#[test]
fn what_is_assumed_ends_at_its_deadline_with_its_event_or_with_a_clear() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..31);
    let with = |index: &Index| {
        let mut out = Vec::new();
        index.query_with_assumed(&chain, &mut out);
        out.sort_unstable();
        out.iter().map(|found| (found.owner.0, found.blocks)).collect::<Vec<_>>()
    };
    index.stored(A, None, &chain[..10]);
    assert_eq!(index.assumed(A, &chain[..20], Instant::from_millis(5)), 10);
    assert_eq!(index.assumed(A, &chain[..15], Instant::from_millis(9)), 0);
    assert_eq!(index.assumed(B, &chain[..8], Instant::from_millis(7)), 8);
    assert_eq!(with(&index), [(3, 8), (7, 20)]);
    assert_eq!(matches(&index, &chain), [(7, 10)], "a query without assumptions has none");
    assert_eq!(index.next_deadline(), Some(Instant::from_millis(5)));
    assert_eq!(index.expire(Instant::from_millis(5)), 5);
    assert_eq!(with(&index), [(3, 8), (7, 15)]);
    index.stored(A, Some(chain[9]), &chain[10..12]);
    assert_eq!(index.counters().assumed_confirmed, 2);
    assert_eq!(with(&index), [(3, 8), (7, 15)]);
    index.cleared(B);
    assert_eq!(with(&index), [(7, 15)]);
    assert_eq!(index.expire(Instant::from_millis(9)), 3);
    assert_eq!(with(&index), [(7, 12)]);
    assert_eq!(index.next_deadline(), None);
}

#[test]
fn a_query_of_keys_that_are_no_chain_gives_no_more_than_there_are() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..50);
    index.stored(A, None, &chain);
    let doubled: Vec<_> = chain.iter().flat_map(|key| [*key, *key]).collect();
    assert_eq!(matches(&index, &doubled), [(7, 1)]);
    assert_eq!(matches(&index, &vec![chain[0]; 1000]), [(7, 1)]);
}
