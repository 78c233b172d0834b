//! What is written is decoded again, and nothing else is: not what is truncated, flipped, or elsewhere.

use std::collections::BTreeSet;

use proptest::prelude::*;
use store_core::disk::format::{
    BAD_MAX, BatchHeader, Dead, EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, EXTENTS_MAX, Entry, Extent,
    FIRST_EXTENT_AT, Footer, Geometry, GeometryError, Lists, Mark, Marks, OBJECT_BYTES_MIN, PAGE_BYTES,
    Stream, Superblock,
};

const DISK: [u8; 16] = *b"a disk of a test";
const SLOT: u32 = 5;

fn geometry(block_bytes: u32) -> Geometry {
    Geometry::new(FIRST_EXTENT_AT + (20 << 20), 1 << 20, block_bytes).unwrap()
}

fn extent(sequence: u64) -> Extent {
    Extent { disk: DISK, lineage: 7, slot: SLOT, sequence, stream: Stream::Proven }
}

fn marks() -> Marks {
    let mark = |n: u64| Mark { sequence: 40 + n, offset: 8_192 };
    Marks { serial: 99, streams: [mark(0), mark(1)] }
}

fn superblock(bad: BTreeSet<u32>) -> Superblock {
    Superblock {
        disk: DISK,
        geometry: geometry(512),
        serial: 3,
        sequences_end: 65,
        floor: 2,
        written_bytes: 1 << 40,
        object_bytes: 1 << 39,
        marks: marks(),
        bad,
    }
}

type Object = (Vec<u8>, u32, u64);

fn keys() -> impl Strategy<Value = Vec<Object>> {
    let key = prop_oneof![prop::collection::vec(any::<u8>(), 1..40), Just(vec![7; 1_024])];
    prop::collection::vec((key, 4_096u32..20_000, any::<u64>()), 0..12)
}

/// Lists whose images begin at `from`, and where the last image ends.
fn lists(objects: &[Object], dead: &[Object], geometry: &Geometry, from: u32) -> (Lists, u32) {
    let (mut lists, mut at) = (Lists::default(), from);
    for (key, len, generation) in objects {
        lists.push(&Entry { tenant: 1, key, generation: *generation, len: *len, crc32c: *len, offset: at });
        at += geometry.image_bytes(u64::from(*len));
    }
    for (key, _, generation) in dead {
        lists.push_dead(&Dead { tenant: 2, key, generation: *generation, upto: 9 });
    }
    (lists, at)
}

/// Exactly the bytes that a header with these lists has, and the bytes of its images.
fn header(objects: &[Object], dead: &[Object], geometry: &Geometry, offset: u32) -> (Vec<u8>, u32) {
    let list_bytes = lists(objects, dead, geometry, 0).0.bytes();
    let from = offset + BatchHeader::bytes(list_bytes);
    let (lists, end) = lists(objects, dead, geometry, from);
    let image_bytes = (end - from).next_multiple_of(PAGE_BYTES);
    (BatchHeader::encode(&extent(41), offset, image_bytes, &marks(), &lists), image_bytes)
}

fn footer(objects: &[Object], dead: &[Object], geometry: &Geometry) -> Vec<u8> {
    let (lists, end) = lists(objects, dead, geometry, PAGE_BYTES);
    Footer::encode(&extent(41), end.next_multiple_of(PAGE_BYTES), &marks(), &lists)
}

#[test]
fn a_geometry_is_checked() {
    let (mib, first) = (1u64 << 20, FIRST_EXTENT_AT);
    assert_eq!(Geometry::new(first + 64 * mib, 8 << 20, 512).unwrap().extents(), 8);
    for block in [0, 1, 511, 1_024, 8_192, u32::MAX] {
        assert_eq!(Geometry::new(1 << 40, 64 << 20, block), Err(GeometryError::Block(block)));
    }
    for bytes in [0, 1, PAGE_BYTES, EXTENT_BYTES_MIN - 1, EXTENT_BYTES_MIN + 512, EXTENT_BYTES_MAX + 4_096] {
        assert_eq!(Geometry::new(1 << 40, bytes, 512), Err(GeometryError::Extent(bytes)));
    }
    for disk_bytes in [0, first, first + 63 * mib, u64::MAX] {
        let refused = Geometry::new(disk_bytes, 8 << 20, 4_096).unwrap_err();
        assert_eq!(refused, GeometryError::Disk { disk_bytes, extent_bytes: 8 << 20 });
        assert!(refused.to_string().contains("choose another length of extents"));
    }
    assert!(Geometry::new(first + u64::from(EXTENTS_MAX) * 8 * mib, 8 << 20, 512).is_ok());
}

#[test]
fn objects_that_are_too_short_or_too_long_have_no_image() {
    for block in [512, 4_096] {
        let geometry = geometry(block);
        let max = geometry.object_bytes_max();
        for len in [0, 1, OBJECT_BYTES_MIN - 1, max + 1, u64::MAX] {
            assert_eq!(geometry.image_bytes(len), 0, "{len}");
        }
        assert_eq!(geometry.image_bytes(OBJECT_BYTES_MIN), 4_096);
        assert!(geometry.image_bytes(max) <= geometry.extent_bytes() / 2);
        // The trailer of an object of two chunks.
        assert_eq!(geometry.image_bytes(128 << 10), (128 << 10) + block);
    }
}

#[test]
fn a_locator_names_a_sequence_and_an_offset() {
    let geometry = geometry(512);
    for (sequence, offset) in [(1, 0), (1, 4_096), (77, (1 << 20) - 512), ((1 << 44) - 1, 512)] {
        assert_eq!(geometry.place(geometry.locator(sequence, offset)), (sequence, offset));
    }
}

#[test]
fn a_mark_covers_what_is_before_it() {
    let mark = Mark { sequence: 5, offset: 4_096 };
    assert!(mark.covers(4, u32::MAX) && mark.covers(5, 4_096));
    assert!(!mark.covers(5, 4_097) && !mark.covers(6, 0));
    assert_eq!(marks().max(Marks::default()), marks());
}

#[test]
fn a_superblock_keeps_its_bad_extents_and_refuses_impossible_ones() {
    let full = superblock((0..20).collect());
    assert_eq!(Superblock::decode(&full.encode()), Some(full.clone()));
    let none = superblock(BTreeSet::new());
    assert_eq!(Superblock::decode(&none.encode()), Some(none.clone()));
    for wrong in [
        Superblock { bad: [20].into(), ..none.clone() },
        Superblock { floor: 66, ..none.clone() },
        Superblock { sequences_end: 0, floor: 0, ..none.clone() },
        Superblock { sequences_end: u64::MAX, ..none.clone() },
        Superblock { serial: u64::MAX, ..none.clone() },
        Superblock { written_bytes: u64::MAX, ..none.clone() },
        Superblock { marks: Marks { serial: u64::MAX, ..marks() }, ..none.clone() },
    ] {
        assert_eq!(Superblock::decode(&wrong.encode()), None, "{wrong:?}");
    }
    const { assert!(BAD_MAX > 900) };
}

/// A recovery counts on from the highest number that it finds.
#[test]
fn extents_whose_numbers_leave_none_for_the_next_are_refused() {
    let geometry = geometry(512);
    let highest = u64::MAX / u64::from(geometry.extent_bytes()) - 1;
    for (sequence, right) in [(0, false), (1, true), (highest, true), (highest + 1, false), (u64::MAX, false)]
    {
        let (extent, lists) = (extent(sequence), Lists::default());
        let header = BatchHeader::encode(&extent, 0, PAGE_BYTES, &marks(), &lists);
        let header = BatchHeader::decode(&header, &DISK, &geometry, SLOT, 0).is_some();
        let footer = Footer::encode(&extent, PAGE_BYTES, &marks(), &lists);
        let footer = Footer::decode(&footer, &DISK, &geometry, SLOT).is_some();
        assert_eq!((header, footer), (right, right), "{sequence}");
    }
    let counted = Marks { serial: u64::MAX, ..marks() };
    let header = BatchHeader::encode(&extent(41), 0, PAGE_BYTES, &counted, &Lists::default());
    assert_eq!(BatchHeader::decode(&header, &DISK, &geometry, SLOT, 0), None);
}

/// A flipped bit is found wherever it is; what is cut off at any byte is refused.
fn refused(
    bytes: &[u8],
    bit: usize,
    cut: usize,
    decodes: impl Fn(&[u8]) -> bool,
) -> Result<(), TestCaseError> {
    prop_assert!(decodes(bytes));
    let mut flipped = bytes.to_vec();
    flipped[bit / 8] ^= 1 << (bit % 8);
    prop_assert!(!decodes(&flipped), "bit {bit}");
    prop_assert!(!decodes(&bytes[..cut]), "cut at {cut}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_superblock_that_is_cut_off_or_flipped_is_refused(at in any::<prop::sample::Index>()) {
        let page = superblock([1, 3].into()).encode();
        let (bit, cut) = (at.index(page.len() * 8), at.index(page.len()));
        refused(&page, bit, cut, |page| Superblock::decode(page).is_some())?;
    }

    #[test]
    fn a_header_says_what_was_put_in_and_only_at_its_place(
        (objects, dead) in (keys(), keys()),
        block in prop_oneof![Just(512u32), Just(4_096)],
        at in any::<prop::sample::Index>(),
    ) {
        let geometry = geometry(block);
        let offset = 12_288;
        let (bytes, image_bytes) = header(&objects, &dead, &geometry, offset);
        let decode = |bytes: &[u8], disk: &[u8; 16], slot, offset| {
            BatchHeader::decode(bytes, disk, &geometry, slot, offset).is_some()
        };
        prop_assert_eq!(BatchHeader::announced_bytes(&bytes, &geometry), Some(bytes.len() as u32));
        let (bit, cut) = (at.index(bytes.len() * 8), at.index(bytes.len()));
        refused(&bytes, bit, cut, |bytes| decode(bytes, &DISK, SLOT, offset))?;
        prop_assert!(!decode(&bytes, b"some other disks", SLOT, offset));
        prop_assert!(!decode(&bytes, &DISK, SLOT + 1, offset));
        prop_assert!(!decode(&bytes, &DISK, SLOT, offset + PAGE_BYTES));
        let decoded = BatchHeader::decode(&bytes, &DISK, &geometry, SLOT, offset).unwrap();
        prop_assert_eq!((decoded.extent, decoded.marks), (extent(41), marks()));
        prop_assert_eq!(decoded.batch_bytes, bytes.len() as u32 + image_bytes);
        prop_assert_eq!(decoded.entries.len(), objects.len());
        for (entry, (key, len, generation)) in decoded.entries.iter().zip(&objects) {
            prop_assert_eq!((entry.key, entry.len, entry.generation), (key.as_slice(), *len, *generation));
        }
        for (tombstone, (key, _, generation)) in decoded.dead.iter().zip(&dead) {
            prop_assert_eq!((tombstone.key, tombstone.generation), (key.as_slice(), *generation));
        }
    }

    #[test]
    fn a_footer_says_what_was_put_in_and_only_in_its_slot(
        (objects, dead) in (keys(), keys()),
        at in any::<prop::sample::Index>(),
    ) {
        let geometry = geometry(512);
        let bytes = footer(&objects, &dead, &geometry);
        let decodes = |bytes: &[u8], slot| Footer::decode(bytes, &DISK, &geometry, slot).is_some();
        let bit = at.index(bytes.len() * 8);
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(decodes(&bytes, SLOT) && !decodes(&flipped, SLOT) && !decodes(&bytes, SLOT + 1));
        // Both ends can be missing; what comes before the footer does not matter.
        prop_assert!(!decodes(&bytes[..at.index(bytes.len())], SLOT));
        prop_assert!(!decodes(&bytes[1 + at.index(bytes.len() - 1)..], SLOT));
        prop_assert!(decodes(&[vec![9; 512], bytes.clone()].concat(), SLOT));
        let tail = &bytes[bytes.len() - PAGE_BYTES as usize..];
        let known = Footer::decode_tail(tail, &DISK, &geometry, SLOT).unwrap();
        prop_assert_eq!((known.extent, known.footer_bytes), (extent(41), bytes.len() as u32));
        let decoded = Footer::decode(&bytes, &DISK, &geometry, SLOT).unwrap();
        prop_assert_eq!((decoded.entries.len(), decoded.dead.len()), (objects.len(), dead.len()));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..9_000)) {
        let geometry = geometry(4_096);
        prop_assert!(Superblock::decode(&bytes).is_none());
        prop_assert!(BatchHeader::decode(&bytes, &DISK, &geometry, SLOT, 0).is_none());
        prop_assert!(Footer::decode(&bytes, &DISK, &geometry, SLOT).is_none());
        prop_assert!(Footer::decode_tail(&bytes, &DISK, &geometry, SLOT).is_none());
    }

    /// The checksum is right, and the contents are impossible: an image outside of its batch, or over
    /// another one, a key without bytes, or counts that the bytes do not have.
    #[test]
    fn impossible_lists_with_a_right_checksum_are_refused(
        (len, offset) in (0u32..2_000_000, 0u32..2_000_000),
        key in prop::collection::vec(any::<u8>(), 0..3),
    ) {
        let geometry = geometry(4_096);
        let mut lists = Lists::default();
        let entry = Entry { tenant: 0, key: &key, generation: 1, len, crc32c: 0, offset };
        lists.push(&entry);
        let bytes = BatchHeader::encode(&extent(41), 0, 64 << 10, &marks(), &lists);
        let fits = u64::from(len) >= OBJECT_BYTES_MIN
            && u64::from(offset) + u64::from(geometry.image_bytes(u64::from(len))) <= (68 << 10)
            && geometry.image_bytes(u64::from(len)) > 0;
        let right = fits && offset >= 4_096 && offset % 4_096 == 0 && !key.is_empty();
        prop_assert_eq!(BatchHeader::decode(&bytes, &DISK, &geometry, SLOT, 0).is_some(), right);
        lists.push(&entry);
        let twice = BatchHeader::encode(&extent(41), 0, 64 << 10, &marks(), &lists);
        prop_assert!(BatchHeader::decode(&twice, &DISK, &geometry, SLOT, 0).is_none());
    }
}
