//! The cost of one query to all other requests: each call examines a bounded part, and the pages together
//! show everything.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use store_core::message::{FindQuery, ListQuery, MountSegment, PutOptions, RemoveQuery};
use store_core::{ErrorCode, Incarnation, Key, Master, MasterConfig, NodeId, TenantNo};
use te_core::Instant;

const NOW: Instant = Instant::from_millis(10);
/// Limit on the pages of one walk, so that a test that would not end fails.
const PAGES_MAX: usize = 100_000;

/// A store with these keys.
fn master(keys: impl Iterator<Item = Vec<u8>>) -> Master {
    let mut master = Master::new(MasterConfig::default()).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "n",
        endpoint: "n:1",
        len: 64 << 20,
        key: 1,
        ..MountSegment::default()
    };
    master.mount(NOW, &segment).unwrap().mounted().unwrap();
    for key in keys {
        let put = master.put_start(NOW, &*key, 1, &PutOptions::DEFAULT).unwrap();
        master.put_end(NOW, &*key, put.generation, 0).unwrap();
    }
    master
}

/// The keys that a pattern matches, and the most bytes of keys on which a page ran the pattern, given their
/// length.
fn find_all(master: &mut Master, pattern: &str) -> Result<(BTreeSet<Vec<u8>>, usize), ErrorCode> {
    let (mut found, mut cursor, mut largest) = (BTreeSet::new(), 0, 0);
    for _ in 0..PAGES_MAX {
        let mut page = 0;
        let query = FindQuery { pattern, cursor, limit: u32::MAX };
        cursor = master.find(NOW, TenantNo::new(0), &query, |listed| {
            page += 1;
            found.insert(listed.key.0.to_vec())
        })?;
        largest = largest.max(page);
        if cursor == 0 {
            return Ok((found, largest));
        }
    }
    panic!("the listing does not end");
}

#[test]
fn pages_are_short_and_together_see_everything() {
    let mut master = master((0..3_000).map(|i| format!("kv/{i:04}").into_bytes()));
    let (found, largest) = find_all(&mut master, "^kv/[0-9]*$").unwrap();
    assert_eq!((found.len(), largest), (3_000, 512));
    let (mut listed, mut cursor, mut largest) = (0, 0, 0);
    loop {
        let mut page = 0;
        let query = ListQuery { prefix: Key(b"kv/"), cursor, limit: u32::MAX };
        cursor = master.list_of(NOW, TenantNo::new(0), &query, |_| {
            page += 1;
            true
        });
        (listed, largest) = (listed + page, largest.max(page));
        if cursor == 0 {
            break;
        }
    }
    assert_eq!((listed, largest), (3_000, 512));
}

#[test]
fn a_pattern_is_run_on_so_many_bytes_of_keys_in_one_call() {
    let mut master = master((0..200u32).map(|i| {
        let mut key = vec![b'x'; 1_024];
        key[..4].copy_from_slice(&i.to_be_bytes());
        key
    }));
    // Every key matches, and still no page has more of them than 32 KiB hold.
    let (found, largest) = find_all(&mut master, "x$").unwrap();
    assert_eq!((found.len(), largest), (200, 32));
}

#[test]
fn a_removal_removes_so_many_objects_in_one_call() {
    let mut master = master((0..1_000).map(|i| format!("kv/{i:04}").into_bytes()));
    for pattern in [Some("^kv/0"), None] {
        let (mut cursor, mut removed) = (0, 0);
        loop {
            let page = master
                .remove_many(NOW, TenantNo::new(0), &RemoveQuery { pattern, cursor, force: true })
                .unwrap();
            assert!(page.removed <= 256);
            (cursor, removed) = (page.cursor, removed + page.removed);
            if cursor == 0 {
                break;
            }
        }
        assert_eq!(removed, if pattern.is_some() { 1_000 } else { 0 });
    }
}

/// Patterns that take microseconds per byte where a search falls back to simulating them.
#[test]
fn costly_patterns_are_refused_and_cheap_ones_with_the_same_look_are_not() {
    let mut dice = 1u64;
    let mut letter = || {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if dice >> 60 & 1 == 0 { b'a' } else { b'b' }
    };
    let keys: Vec<Vec<u8>> = (0..64).map(|_| (0..1_024).map(|_| letter()).collect()).collect();
    let mut master = master(keys.into_iter());
    for costly in ["(a[ab]{20}c|b[ab]{20}d)", "[ab]*a[ab]{14}c", &"(x+x+)+y".repeat(40), "(a?){200}b"] {
        assert_eq!(find_all(&mut master, costly), Err(ErrorCode::InvalidPattern), "{costly:.30}");
        let remove = RemoveQuery { pattern: Some(costly), cursor: 0, force: true };
        assert_eq!(
            master.remove_many(NOW, TenantNo::new(0), &remove),
            Err(ErrorCode::InvalidPattern),
            "{costly:.30}"
        );
    }
    for cheap in ["(a+)+$", "(a|b)*$", "[ab]{30}$", "(.*a){3}"] {
        assert!(!find_all(&mut master, cheap).unwrap().0.is_empty(), "{cheap}");
    }
}

#[test]
fn an_empty_pattern_removes_nothing() {
    let mut master = master((0..10).map(|i| vec![b'k', i]));
    let query = RemoveQuery { pattern: Some(""), cursor: 0, force: true };
    assert_eq!(master.remove_many(NOW, TenantNo::new(0), &query), Err(ErrorCode::InvalidPattern));
    assert_eq!(master.stats().objects, 10);
}
