//! The text of the kernel copies what descriptors say, whatever the shape of the launch.

use te_core::testkit::Rng;

use super::interpreter::{BASE, Entry, Memory};
use super::{PTX, Shape, THREADS};

const RING: usize = 64;
const DESCRIPTORS: u64 = BASE;
const TICKET: u64 = BASE + 2_048;
const WORD: u64 = BASE + 2_056;
const DATA: usize = 4_096;
const BYTES: usize = 256 << 10;

/// Copies of one launch: where to, where from, and their lengths.
type Copies = Vec<(usize, usize, usize)>;

/// Places of the destination and the source that do not overlap with others.
fn copies(rng: &mut Rng, count: usize, bytes_max: usize, is_aligned: bool) -> Copies {
    let cell = bytes_max + 32;
    assert!(DATA + 2 * count * cell < BYTES, "there is room");
    let mut place = |nth: usize| {
        let (shift, other) = (rng.index(16), rng.index(16));
        let to = DATA + 2 * nth * cell;
        let (to, from) = (to.next_multiple_of(16) + shift, (to + cell).next_multiple_of(16));
        (to, from + if is_aligned { shift } else { other }, 1 + rng.index(bytes_max - 16))
    };
    (0..count).map(&mut place).collect()
}

/// Runs a launch and compares all of the memory. `word`: whether the kernel publishes its end.
fn launch(entry: &str, copies: &Copies, (shape, threads): (Shape, u32), rng: &mut Rng, word: bool) {
    let mut memory = Memory::new(BYTES, WORD);
    rng.fill(&mut memory.bytes[DATA..]);
    let first = rng.index(1_000);
    memory.readable[(TICKET - BASE) as usize..][..4].fill(true);
    for (nth, (to, from, len)) in copies.iter().enumerate() {
        let at = (first + nth) % RING * 24;
        for (offset, value) in [(0, BASE + *to as u64), (8, BASE + *from as u64), (16, *len as u64)] {
            memory.bytes[at + offset..][..8].copy_from_slice(&value.to_le_bytes());
        }
        memory.readable[at..at + 24].fill(true);
        memory.readable[*from..from + len].fill(true);
    }
    let mut expected = memory.bytes.clone();
    for (to, from, len) in copies {
        expected.copy_within(*from..from + len, *to);
    }
    let sequence = 0x0123_4567_89AB_CDEF_u64;
    if word {
        expected[(WORD - BASE) as usize..][..8].copy_from_slice(&sequence.to_le_bytes());
    }
    let values = [
        DESCRIPTORS,
        first as u64,
        RING as u64 - 1,
        copies.len() as u64,
        shape.split.into(),
        TICKET,
        if word { WORD } else { 0 },
        sequence,
    ];
    Entry::parse(PTX, entry).run(&mut memory, &values, (shape.blocks, threads), rng);
    let wrong = memory.bytes.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "{entry}, {shape:?}, {copies:?}");
    // The end is told once, when everything is in place and the ticket is 0 again.
    assert!(memory.seen == if word { vec![expected] } else { Vec::new() }, "{entry}, {shape:?}: the word");
}

#[test]
fn launches_of_every_shape_copy_every_byte_and_no_other() {
    let mut rng = Rng::new(1);
    for round in 0..60 {
        // Few threads, so that warps take several descriptors and tiles.
        let threads = 32 << rng.index(3);
        let (blocks, count) = (1 + rng.index(4) as u32, 1 + rng.index(20));
        let bytes_max = [40, 700, 5_000][rng.index(3)];
        let split = 1 + rng.index((blocks * threads / 32) as usize) as u32;
        let is_aligned = round % 2 == 0;
        let copies = copies(&mut rng, count, bytes_max, is_aligned);
        let entry = if is_aligned { "copy16" } else { "copy1" };
        launch(entry, &copies, (Shape { blocks, split }, threads), &mut rng, round % 5 > 0);
    }
}

#[test]
fn the_shapes_that_are_used_copy_every_byte() {
    let mut rng = Rng::new(2);
    for (count, bytes_max, blocks_max) in [(5, 5_000, 2), (20, 4_096, 3), (1, 40_000, 2), (60, 100, 8)] {
        let copies = copies(&mut rng, count, bytes_max, true);
        let bytes = copies.iter().map(|(_, _, len)| *len as u64).sum();
        let shape = Shape::of(count as u32, bytes, blocks_max);
        launch("copy16", &copies, (shape, THREADS), &mut rng, true);
    }
}

#[test]
fn the_first_and_last_bytes_are_copied_at_every_alignment() {
    let mut rng = Rng::new(3);
    for shift in 0..16 {
        let lengths = [1, 2, 15, 16, 17, 31, 33, 512];
        let cell = |nth: usize| DATA + nth * 2_048 + shift;
        let copies: Copies =
            lengths.iter().enumerate().map(|(nth, len)| (cell(2 * nth), cell(2 * nth + 1), *len)).collect();
        launch("copy16", &copies, (Shape { blocks: 1, split: 1 }, 64), &mut rng, true);
    }
}

#[test]
fn a_shape_uses_the_blocks_that_there_is_work_for_and_no_more() {
    let shape = |count, bytes, blocks_max| {
        let Shape { blocks, split } = Shape::of(count, bytes, blocks_max);
        (blocks, split)
    };
    assert_eq!(shape(1, 1, 8), (1, 1));
    assert_eq!(shape(5, 5 * 4_096, 8), (1, 2), "two tiles each");
    assert_eq!(shape(4_096, 4_096 * 4_096, 8), (8, 1));
    assert_eq!(shape(5, 5 * (60 << 10), 8), (5, 30));
    assert_eq!(shape(5, 5 * (60 << 10), 1), (1, 6));
    for count in 1..200 {
        let Shape { blocks, split } = Shape::of(count, u64::from(count) * 32_768, 8);
        assert!((1..=8).contains(&blocks) && (1..=blocks * 32).contains(&split), "{count}");
    }
}
