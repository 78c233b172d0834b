//! Bits flip on the disk.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use store_client::disk::{Damage, DiskFile, Sharing, verify};
use te_core::testkit::{Rng, pattern};

use crate::bench_disk::{MIB, Owner, PATIENCE, Placed, caching, directory, format, open};

const EXTENT_BYTES: u32 = 4 << 20;

fn flip(path: &Path, at: u64, bit: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0] ^= 1 << bit;
    file.write_all_at(&byte, at).unwrap();
    file.sync_all().unwrap();
}

fn filled(path: &Path, objects: u64) -> Owner {
    let mut owner = Owner::new(format(path, 50 * MIB, EXTENT_BYTES));
    for at in 0..objects {
        owner.demote(&format!("{at}"), 4_096 + (at * 7_919) % 150_000);
    }
    owner.demoted(objects as usize);
    owner
}

/// Where the data and trailer of an object are in the file. Extents of a new disk are in the order of their
/// sequences, beginning with 1.
fn image_at(placed: &Placed) -> std::ops::Range<u64> {
    let extent = u64::from(EXTENT_BYTES);
    let (slot, offset) = (placed.locator / extent - 1, placed.locator % extent);
    let at = MIB + slot * extent + offset;
    at..at + store_core::chunks::stored_len(placed.len)
}

#[test]
fn of_a_thousand_flipped_bits_in_objects_every_one_is_found_and_none_is_served() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = filled(&path, 400);
    owner.verify_all();
    let places = owner.places.clone();
    assert!(owner.disk.close(PATIENCE));

    let mut rng = Rng::new(11);
    let objects: Vec<_> = places.iter().collect();
    let (mut flipped, mut damaged) = (BTreeSet::new(), BTreeSet::new());
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    while flipped.len() < 1_000 {
        // The half of them, so that there are intact ones as well.
        let (key, placed) = objects[rng.below(objects.len() as u64 / 2) as usize];
        let image = image_at(placed);
        let (at, bit) = (image.start + rng.below(image.end - image.start), rng.below(8));
        if flipped.insert((at, bit)) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
            damaged.insert(key.clone());
        }
    }
    file.sync_all().unwrap();
    drop(file);

    let file = DiskFile::open_to_read(&path, caching(&path), Sharing::Readers).unwrap();
    let verified = verify(&file, |_| ControlFlow::Continue(())).unwrap();
    let keys = verified.survey.damage.iter().map(|damage| match damage {
        Damage::Object(found) => found.object.key.clone(),
        other => panic!("{other:?}"),
    });
    assert_eq!(keys.collect::<BTreeSet<_>>(), damaged, "verify names exactly the damaged objects");
    assert_eq!((verified.damaged, verified.objects), (damaged.len() as u64, 400));
    drop(file);

    let mut owner = Owner::new(open(&path));
    let mut missed = 0;
    for (key, placed) in &places {
        match owner.read(key) {
            Some(bytes) => {
                assert!(!damaged.contains(key), "a damaged object was served: {placed:?}");
                assert!(bytes == pattern(placed.seed, placed.len as usize));
            }
            None => missed += 1,
        }
    }
    assert_eq!(missed, damaged.len(), "intact objects are served");
    assert!(owner.disk.close(PATIENCE));
}

#[test]
fn a_flipped_bit_anywhere_loses_at_most_objects_and_is_reported() {
    let directory = directory();
    let original = directory.path().join("original");
    let owner = filled(&original, 150);
    let places = owner.places.clone();
    assert!(owner.disk.close(PATIENCE));
    let extent = u64::from(EXTENT_BYTES);
    // Superblocks; first headers, later headers, footers of full extents and of those that are not.
    let mut bits = vec![(0, 3), (20, 1), (4_096, 2), (4_096 + 300, 7)];
    for slot in 0..3 {
        let at = MIB + slot * extent;
        bits.extend([
            (at + 1, 0),
            (at + 33, 4),
            (at + 900, 5),
            (at + extent - 100, 6),
            (at + extent - 3_000, 0),
        ]);
    }
    let mut silent = 0;
    for (at, bit) in bits {
        let path = directory.path().join("flipped");
        // Preserves what is allocated, as far as it matters here: nothing is written.
        std::fs::copy(&original, &path).unwrap();
        let mut page = [0; 1];
        let file = std::fs::File::open(&path).unwrap();
        file.read_exact_at(&mut page, at).unwrap();
        flip(&path, at, bit);
        let file = DiskFile::open_to_read(&path, caching(&path), Sharing::Readers).unwrap();
        let verified = verify(&file, |_| ControlFlow::Continue(())).unwrap();
        drop(file);
        silent += u32::from(verified.survey.damage.is_empty());
        let mut owner = Owner::new_after_damage(open(&path));
        for (key, placed) in owner.places.clone() {
            assert_eq!(places.get(&key), Some(&placed), "what is announced was there");
            if let Some(bytes) = owner.read(&key) {
                assert!(bytes == pattern(placed.seed, placed.len as usize));
            }
        }
        drop(owner);
        std::fs::remove_file(&path).unwrap();
    }
    // Flips in pages that nothing uses are not damage.
    assert!(silent <= 8, "{silent} flips were not reported");
}
