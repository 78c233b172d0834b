//! Both allocators against a list of what is allocated, through the trait.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use store_core::AllocatorKind;
use store_core::allocator::{Allocator, Block, GRAIN_BYTES, OffsetAllocator, SlabAllocator};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The naive allocator: what is allocated, by offset.
#[derive(Default)]
struct Model {
    taken: BTreeMap<u64, u64>,
}

impl Model {
    fn take(&mut self, offset: u64, len: u64, capacity: u64) {
        assert!(offset + len <= capacity, "outside");
        if let Some((below, below_len)) = self.taken.range(..=offset).next_back() {
            assert!(below + below_len <= offset, "overlaps the block below");
        }
        if let Some((above, _)) = self.taken.range(offset..).next() {
            assert!(offset + len <= *above, "overlaps the block above");
        }
        self.taken.insert(offset, len);
    }

    fn largest_gap(&self, capacity: u64) -> u64 {
        let mut end = 0;
        let mut largest = 0;
        for (offset, len) in &self.taken {
            largest = largest.max(offset - end);
            end = offset + len;
        }
        largest.max(capacity - end)
    }
}

#[derive(Clone, Copy, Debug)]
struct Step {
    allocate: bool,
    len: u64,
    pick: u32,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // A few lengths that recur, and arbitrary ones.
    let len = prop_oneof![
        1u64..300,
        Just(4096),
        Just(1000),
        Just(70_001),
        (6u32..21).prop_flat_map(|bits| 1u64 << bits..=1 << (bits + 1))
    ];
    // Runs of allocations and of frees, so that slabs fill and empty.
    let stretch =
        (0u32..4, prop::collection::vec((0u32..4, len, any::<u32>()), 1..120)).prop_map(|(bias, steps)| {
            steps
                .into_iter()
                .map(|(roll, len, pick)| Step { allocate: roll < bias, len, pick })
                .collect::<Vec<_>>()
        });
    prop::collection::vec(stretch, 1..8).prop_map(|stretches| stretches.concat())
}

/// Carries out the steps; `each` examines the allocator and the model after every step, and what was refused.
fn run<A: Allocator>(
    mut allocator: A,
    grain: u64,
    steps: &[Step],
    mut each: impl FnMut(&mut A, &Model, Option<u64>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let capacity = allocator.capacity_bytes();
    let mut model = Model::default();
    let mut live: Vec<(Block, u64, u32)> = Vec::new();
    for Step { allocate, len, pick } in steps.iter().copied() {
        let mut refused = None;
        if allocate || live.is_empty() {
            let rounded = allocator.rounded(len);
            prop_assert!(rounded >= len && rounded % grain == 0);
            match allocator.allocate(len, pick) {
                Some((block, offset)) => {
                    prop_assert_eq!(offset % grain, 0);
                    model.take(offset, rounded, capacity);
                    live.push((block, offset, pick));
                }
                None => refused = Some(len),
            }
        } else {
            let (block, offset, tag) = live.swap_remove(pick as usize % live.len());
            prop_assert_eq!(allocator.tag(block), Some(tag));
            prop_assert_eq!(allocator.free(block), model.taken.remove(&offset));
            prop_assert_eq!(allocator.free(block), None, "freed twice");
            prop_assert_eq!(allocator.tag(block), None);
        }
        let taken: u64 = model.taken.values().sum();
        prop_assert_eq!(allocator.used_bytes(), taken);
        prop_assert_eq!(allocator.free_bytes(), capacity - taken);
        prop_assert_eq!(allocator.blocks_used() as usize, live.len());
        // What it reports as free can be allocated.
        let largest = allocator.largest_free();
        if largest > 0 {
            let block = allocator.allocate(largest, 0);
            prop_assert!(block.is_some(), "{} bytes are not free", largest);
            let (block, offset) = block.unwrap();
            model.take(offset, largest, capacity);
            model.taken.remove(&offset);
            prop_assert_eq!(allocator.free(block), Some(largest));
        }
        each(&mut allocator, &model, refused)?;
    }
    for (block, _, tag) in &mut live {
        *tag ^= 1;
        allocator.set_tag(*block, *tag);
    }
    let mut walked: Vec<_> = allocator.blocks().collect();
    walked.sort_unstable_by_key(|(_, offset, ..)| *offset);
    let mut wanted: Vec<_> =
        live.iter().map(|(block, offset, tag)| (*block, *offset, model.taken[offset], *tag)).collect();
    wanted.sort_unstable_by_key(|(_, offset, ..)| *offset);
    prop_assert_eq!(walked, wanted);
    for (block, ..) in live {
        prop_assert!(allocator.free(block).is_some());
    }
    prop_assert_eq!(allocator.largest_free(), capacity, "the free space is not one range at the end");
    prop_assert_eq!((allocator.blocks_used(), allocator.used_bytes()), (0, 0));
    prop_assert_eq!(allocator.blocks().count(), 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_agrees_with_an_interval_map_and_ends_as_one_free_range(
        capacity in 1u64 << 16..1 << 23,
        steps in steps(),
    ) {
        for kind in AllocatorKind::ALL {
            let allocator = kind.build(capacity);
            run(allocator, GRAIN_BYTES, &steps, |allocator, _, refused| {
                // Until something is freed, what it reports as hopeless is refused.
                let Some(refused) = refused else { return Ok(()) };
                let above = allocator.refused_above(refused);
                for more in [refused, above + 1, above + 64, above + above / 3 + 1, 2 * above + 1, above + 70_000] {
                    if more > above || more == refused {
                        prop_assert!(allocator.allocate(more, 0).is_none(), "{}: {} after {}", kind, more, refused);
                    }
                }
                Ok(())
            })?;
        }
    }

    #[test]
    fn the_offset_allocator_refuses_only_when_no_gap_is_clearly_long_enough(
        grain in prop_oneof![Just(1u64), Just(64), Just(4096)],
        capacity in 1u64 << 16..1 << 24,
        steps in steps(),
    ) {
        let allocator = OffsetAllocator::with_grain(capacity, grain);
        let capacity = allocator.capacity_bytes();
        run(allocator, grain, &steps, |allocator, model, refused| {
            // The bin of its own length is searched up to a limit.
            if let Some(rounded) = refused.map(|len| allocator.rounded(len)) {
                prop_assert!(model.largest_gap(capacity) < rounded + rounded / 32 + grain);
            }
            let (largest, stated) = (model.largest_gap(capacity), allocator.largest_free());
            prop_assert!(stated <= largest && largest <= stated + stated / 32 + grain);
            Ok(())
        })?;
    }

    #[test]
    fn a_slot_is_hardly_longer_than_what_is_in_it_and_a_slab_hardly_longer_than_its_slots(
        capacity in 1u64 << 16..1 << 41, len in 1u64..1 << 24,
    ) {
        let allocator = SlabAllocator::new(capacity);
        let (rounded, slab) = (allocator.rounded(len), allocator.slab_bytes());
        prop_assert!(slab.is_power_of_two() && rounded % GRAIN_BYTES == 0);
        prop_assert!(rounded >= len && rounded <= len + len / 32 + GRAIN_BYTES, "{} for {}", rounded, len);
        if len <= allocator.shared_bytes_max() {
            prop_assert!(slab / rounded >= 32);
            prop_assert!(slab % rounded <= slab / 64 + rounded / 8, "{} left of {}", slab % rounded, slab);
        }
        prop_assert_eq!(allocator.rounded(rounded), rounded, "it is stored with its own length");
    }
}

#[test]
fn blocks_of_one_length_fill_everything_and_are_reused() {
    for kind in AllocatorKind::ALL {
        for len in [4096, 5000, 70_001] {
            let mut allocator = kind.build(64 * MIB);
            let mut blocks: Vec<Block> = std::iter::from_fn(|| Some(allocator.allocate(len, 0)?.0)).collect();
            let ideal = 64 * MIB / len;
            assert!(blocks.len() as u64 * 100 >= ideal * 97, "{kind}: {} of {ideal}", blocks.len());
            for turn in 0..blocks.len() {
                let at = turn * 7919 % blocks.len();
                allocator.free(blocks[at]).unwrap();
                blocks[at] = allocator.allocate(len, 0).expect("the hole just made fits").0;
            }
        }
    }
}

#[test]
fn ranges_of_any_length_work() {
    for kind in AllocatorKind::ALL {
        let mut huge = kind.build(1 << 50);
        for len in [1 << 45, MIB, 100] {
            let (block, _) = huge.allocate(len, 7).unwrap();
            assert_eq!((huge.tag(block), huge.free(block)), (Some(7), Some(huge.rounded(len))));
        }
        assert_eq!(huge.allocate(0, 0), None);
        assert_eq!(huge.allocate(1 << 51, 0), None);
        let mut tiny = kind.build(63);
        assert_eq!((tiny.capacity_bytes(), tiny.allocate(1, 0), tiny.largest_free()), (0, None, 0));
        let mut small = kind.build(128);
        assert_eq!((small.allocate(65, 0).map(|(_, at)| at), small.allocate(1, 0)), (Some(0), None));
        assert_eq!(small.free(Block::new(99)), None, "no such block was allocated");
        assert_eq!(kind.name().parse(), Ok(*kind));
    }
    assert!("buddy".parse::<AllocatorKind>().unwrap_err().to_string().contains("offset slab"));
}

#[test]
fn an_empty_slab_goes_to_another_class_or_to_a_long_object() {
    let mut allocator = SlabAllocator::new(64 * MIB);
    let fill = |allocator: &mut SlabAllocator, len| -> Vec<Block> {
        std::iter::from_fn(|| Some(allocator.allocate(len, 0)?.0)).collect()
    };
    let short = fill(&mut allocator, KIB);
    assert_eq!(allocator.allocate(1500, 0), None, "all slabs are of another class");
    // One allocated block per slab keeps the slab.
    let (keep, give): (Vec<_>, Vec<_>) = short.iter().enumerate().partition(|(at, _)| at % 64 == 0);
    give.into_iter().for_each(|(_, block)| assert!(allocator.free(*block).is_some()));
    assert_eq!(allocator.allocate(1500, 0), None);
    assert_eq!(allocator.largest_free(), KIB);
    keep.into_iter().for_each(|(_, block)| assert!(allocator.free(*block).is_some()));
    assert_eq!(allocator.largest_free(), 64 * MIB);
    assert!(fill(&mut allocator, 1500).len() as u64 * 1536 > 60 * MIB);
    let mut allocator = SlabAllocator::new(64 * MIB);
    let blocks = fill(&mut allocator, 640);
    blocks.into_iter().for_each(|block| assert!(allocator.free(block).is_some()));
    assert!(allocator.allocate(64 * MIB, 0).is_some());
}

#[test]
fn what_is_too_short_for_a_further_slab_is_used_too() {
    let mut allocator = SlabAllocator::new(100 * KIB);
    assert_eq!(allocator.slab_bytes(), 64 * KIB);
    let blocks = std::iter::from_fn(|| allocator.allocate(KIB, 0)).count();
    assert_eq!(blocks, 100);
}

#[test]
fn a_million_blocks_cost_little_memory() {
    for (kind, most) in [(AllocatorKind::Offset, 33), (AllocatorKind::Slab, 13)] {
        let mut allocator = kind.build(4 << 30);
        let empty = allocator.memory_bytes();
        for tag in 0..1_000_000 {
            allocator.allocate(4 * KIB, tag).unwrap();
        }
        let each = (allocator.memory_bytes() - empty) / 1_000_000;
        assert!(each < most, "{kind}: {each} bytes per block");
    }
}
