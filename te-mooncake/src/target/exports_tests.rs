#![allow(unsafe_code, reason = "makes ranges that nothing accesses")]

use te_core::{Access, MemSpan};

use super::*;

fn range(addr: u64, len: usize) -> ExportedRange {
    let span = MemSpan::new(std::ptr::without_provenance_mut(addr as usize), len);
    // SAFETY: nothing accesses the memory of these tests.
    unsafe { ExportedRange::new(span, Access::REMOTE_READ) }
}

fn exports(ranges: &[(u64, usize)]) -> Exports {
    let exports = Exports::new(8);
    for &(addr, len) in ranges {
        exports.insert(range(addr, len)).expect("they do not overlap");
    }
    exports
}

#[test]
fn bytes_are_served_if_they_lie_in_one_range() {
    let exports = exports(&[(0x2000, 0x1000), (0x1000, 0x1000), (0x5000, 8)]);
    let found = |addr, len| exports.find(addr, len).map(|(range, offset)| (range.addr(), offset));
    assert_eq!(found(0x1000, 0x1000), Some((0x1000, 0)));
    assert_eq!(found(0x2fff, 1), Some((0x2000, 0xfff)));
    assert_eq!(found(0x5001, 7), Some((0x5000, 1)));
    for (addr, len, what) in [
        (0x1000, 0, "no bytes"),
        (0x1fff, 2, "two ranges that touch"),
        (0xfff, 2, "before the first"),
        (0x2fff, 2, "past the end of one"),
        (0x5008, 1, "behind the last"),
        (0x5000, 1 << 63, "a huge length"),
        (0x5000, u64::MAX, "an end past the last address"),
        (u64::MAX, 1, "the last address"),
        (0, 0x1001, "everything up to one"),
        (0x4000, 0x2000, "everything around one"),
    ] {
        assert_eq!(found(addr, len), None, "{what}");
    }
}

#[test]
fn ranges_that_overlap_are_refused_with_the_one_that_is_there() {
    let exports = exports(&[(0x1000, 0x1000), (0x3000, 0x1000)]);
    for (addr, len, other) in [
        (0x1000, 1, 0x1000),
        (0x1fff, 1, 0x1000),
        (0x800, 0x801, 0x1000),
        (0x800, 0x4000, 0x3000),
        (0x2fff, 2, 0x3000),
    ] {
        let refused = exports.insert(range(addr, len));
        assert_eq!(refused, Err(ExportError::Overlap { addr: other, len: 0x1000 }), "{addr:#x} {len:#x}");
    }
    exports.insert(range(0x2000, 0x1000)).expect("it touches both and overlaps neither");
    assert_eq!(exports.remove(0x2000).map(|range| range.len()), Some(0x1000));
    assert!(exports.remove(0x2000).is_none() && exports.remove(0x1001).is_none());
}

#[test]
fn there_is_a_largest_number_of_ranges() {
    let exports = Exports::new(1);
    exports.insert(range(0x1000, 1)).expect("the first");
    assert_eq!(exports.insert(range(0x2000, 1)), Err(ExportError::Full { exports_max: 1 }));
    assert_eq!((exports.take_all().len(), exports.take_all().len()), (1, 0));
    exports.insert(range(0x2000, 1)).expect("there is room again");
}
