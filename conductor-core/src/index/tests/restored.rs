//! Snapshots, hostile ones, and what one index gives to another.

use alloc::vec::Vec;

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::model::Tree;
use super::streams::Random;
use super::*;

fn filled() -> (Tree, Index) {
    let mut random = Random(5);
    let tree = Tree::new(400, |end| random.below(end));
    let mut index = Index::new(IndexLimits::default());
    for _ in 0..300 {
        let path = tree.keys(&tree.path(random.below(400)));
        let owner = OwnerId(random.below(100) as u32 * 3);
        index.stored(owner, None, &path);
        if random.below(4) == 0 {
            index.removed(owner, &path[random.below(path.len())..]);
        }
    }
    index.removed(OwnerId(3), &tree.keys(&tree.path(60)));
    (tree, index)
}

fn bytes_of(index: &Index) -> Vec<u8> {
    let mut bytes = Vec::new();
    index.snapshot(&mut bytes);
    bytes
}

/// With a checksum that is right.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - 8;
    let checksum = xxh3_64(&bytes[..end]);
    bytes[end..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn a_restored_index_gives_the_same_answers() {
    let (tree, mut index) = filled();
    index.cleared(OwnerId(6));
    let restored = Index::restore(&bytes_of(&index), IndexLimits::default()).expect("its own snapshot");
    restored.validate();
    for block in 0..400 {
        let path = tree.keys(&tree.path(block));
        assert_eq!(matches(&restored, &path), matches(&index, &path));
    }
    let (mut before, mut after): (Vec<_>, Vec<_>) = (index.owners().collect(), restored.owners().collect());
    before.sort_unstable_by_key(|state| state.owner);
    after.sort_unstable_by_key(|state| state.owner);
    assert_eq!(before, after);
    let empty = Index::restore(&bytes_of(&Index::new(IndexLimits::default())), IndexLimits::default());
    assert_eq!(empty.expect("an empty snapshot").blocks(), 0);
}

#[test]
fn truncated_and_damaged_snapshots_are_errors() {
    let (_, index) = filled();
    let bytes = bytes_of(&index);
    let limits = IndexLimits::default();
    for end in 0..bytes.len() {
        assert!(Index::restore(&bytes[..end], limits.clone()).is_err(), "{end} bytes");
    }
    let error = |bytes: &[u8]| Index::restore(bytes, limits.clone()).err();
    let mut other = bytes.clone();
    other[8] = 9;
    assert_eq!(error(&other), Some(SnapshotError::Version { found: 9, reads: 1 }));
    other[0] = b'X';
    assert_eq!(error(&other), Some(SnapshotError::NotASnapshot));
    for at in 12..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 0x10;
        assert_eq!(error(&flipped), Some(SnapshotError::Checksum), "byte {at}");
    }
    let small = IndexLimits { blocks_max: 10, ..limits.clone() };
    let found = index.blocks() as u64;
    assert_eq!(
        Index::restore(&bytes, small).err(),
        Some(SnapshotError::TooLarge { what: "blocks", found, max: 10 })
    );
    let small = IndexLimits { snapshot_bytes_max: 100, ..limits.clone() };
    assert!(matches!(Index::restore(&bytes, small), Err(SnapshotError::TooLarge { what: "bytes", .. })));
    let mut longer = bytes.clone();
    longer.extend_from_slice(&[0; 8]);
    assert_eq!(error(&sealed(longer)), Some(SnapshotError::Invalid("bytes follow its end")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// With a right checksum, whatever the bytes: an error or an index that works.
    #[test]
    fn sealed_nonsense_never_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        words in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>()), 0..3),
        cut in any::<prop::sample::Index>(),
        cuts: bool,
    ) {
        let (tree, index) = filled();
        let mut bytes = bytes_of(&index);
        for (at, value) in edits {
            let at = 12 + at.index(bytes.len() - 12);
            bytes[at] = value;
        }
        for (at, value) in words {
            let at = 12 + at.index(bytes.len() - 16) / 4 * 4;
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        if cuts {
            bytes.truncate(40 + cut.index(bytes.len() - 40));
        }
        if let Ok(mut index) = Index::restore(&sealed(bytes), IndexLimits::default()) {
            for block in 0..400 {
                matches(&index, &tree.keys(&tree.path(block)));
            }
            index.stored(A, None, &tree.keys(&tree.path(399)));
            index.removed(OwnerId(3), &tree.keys(&tree.path(200)));
            index.cleared(OwnerId(9));
            while index.sweep(1000) > 0 {}
        }
    }
}

#[test]
fn what_an_owner_has_is_brought_over_and_behaves_alike() {
    let (tree, mut ours) = filled();
    for owner in (0..300).step_by(3).map(OwnerId) {
        let theirs_id = OwnerId(owner.0 + 1000);
        let mut theirs = Index::new(IndexLimits::default());
        let mut random = Random(77 + u64::from(owner.0));
        for _ in 0..10 {
            theirs.stored(B, None, &tree.keys(&tree.path(random.below(400))));
        }
        let mut blocks = Vec::new();
        ours.blocks_of(owner, &mut blocks);
        assert!(blocks.is_sorted(), "by depth");
        assert_eq!(theirs.adopt(theirs_id, &blocks).refused, 0);
        theirs.validate();
        assert_eq!(ours.digest(owner), theirs.digest(theirs_id), "every block has its parent");
        assert!(ours.is_holey(owner) || !theirs.is_holey(theirs_id), "no hole is made");
        sweep_all(&mut theirs);
        sweep_all(&mut ours);
        assert_eq!(theirs.is_holey(theirs_id), ours.is_holey(owner));
        // From now on both are told the same.
        for round in 0..20 {
            let path = tree.keys(&tree.path(random.below(400)));
            let from = random.below(path.len());
            if round % 2 == 0 {
                ours.stored(owner, None, &path);
                theirs.stored(theirs_id, None, &path);
            } else {
                ours.removed(owner, &path[from..=from]);
                theirs.removed(theirs_id, &path[from..=from]);
            }
            theirs.validate();
            for block in 0..400 {
                let path = tree.keys(&tree.path(block));
                let of = |index: &Index, owner: OwnerId| {
                    matches(index, &path).into_iter().find(|found| found.0 == owner.0).map(|found| found.1)
                };
                assert_eq!(of(&theirs, theirs_id), of(&ours, owner));
            }
        }
    }
}

#[test]
fn entries_that_contradict_are_refused() {
    let mut index = Index::new(IndexLimits::default());
    let chain = keys(1..10);
    index.stored(A, None, &chain);
    let entry = |depth, key, parent| HeldBlock { depth, key, parent };
    let entries = [
        entry(0, chain[0], Some(chain[1])),
        entry(3, chain[3], None),
        entry(5, chain[3], Some(chain[4])),
        entry(2, chain[3], Some(chain[4])),
        entry(4, chain[4], Some(chain[4])),
        entry(u32::MAX, chain[5], Some(chain[4])),
    ];
    assert_eq!(index.adopt(B, &entries).refused, 6);
    assert_eq!((index.counters().conflicts, index.counters().too_deep), (5, 1));
    assert_eq!(matches(&index, &chain), [(7, 9)]);
    index.validate();
}
