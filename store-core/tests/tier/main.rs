//! The tier of disks in a deterministic simulation: one master, three nodes with a disk each, and a client
//! that puts, replaces, gets and removes.
//!
//! Nodes die and come back; what a disk had written and not synced may be lost then, objects and removals
//! alike. Disks write slowly, fail to write, cannot read what they wrote, give extents up, and stay away for
//! too long. Requests of nodes are lost before the master sees them, or their answers are.
//!
//! Judged after every get: the object is the one that was put last under its key and was not removed since;
//! and if it is said to be on a disk, the disk has exactly this generation of this key there, or nothing any
//! more. A standby repeats the master's command log, and continues from snapshots now and then; all of its
//! state must be that of the master.
//!
//! The tests whose names begin with `when_` break a rule of nodes on purpose, and fail if that is not
//! noticed. `SNOWSKIN_SEED=n` runs one seed, `SNOWSKIN_SEEDS=a..b` or `=n` these seeds.
#![allow(clippy::unwrap_used, reason = "tests")]

mod node;
mod world;

use te_core::testkit::{on_all_cores, one_seed, seeds};
use world::{Lie, Report, World};

const STEPS: u32 = 1_500;
const SEEDS: u64 = 60;

fn run(seed: u64, lie: Lie) -> Result<Report, String> {
    World::new(seed, lie).run(STEPS).map_err(|what| format!("seed {seed}: {what}"))
}

#[test]
fn no_removed_object_comes_back_and_no_other_bytes_are_read() {
    let mut sum = Report::default();
    on_all_cores(0..SEEDS, |seed| run(seed, Lie::None).unwrap()).iter().for_each(|report| sum.add(report));
    // What is not reached is not tested.
    let Report {
        hits, disk_hits, removes, crashes, adopted, reclaimed, cleared, snapshots, promoted, ..
    } = sum;
    if !one_seed() {
        for (name, count) in [
            ("hits in memory", hits),
            ("hits on disks", disk_hits),
            ("removals", removes),
            ("crashes", crashes),
            ("adopted objects", adopted),
            ("reclaimed objects", reclaimed),
            ("cleared disks", cleared),
            ("snapshots", snapshots),
            ("promotions", promoted),
        ] {
            assert!(count > 10, "{name}: {count} in {sum:?}");
        }
    }
}

/// Some seed notices a lie.
fn is_noticed(lie: Lie) {
    let noticed = seeds(0..SEEDS).any(|seed| run(seed, lie).is_err());
    assert!(noticed, "{lie:?} was not noticed");
}

#[test]
fn when_a_node_confirms_removals_before_they_are_durable_removed_objects_come_back() {
    is_noticed(Lie::ConfirmsAtOnce);
}

#[test]
fn when_an_extent_is_overwritten_before_the_master_knows_other_bytes_are_read() {
    is_noticed(Lie::ReusesAtOnce);
}

#[test]
fn when_a_disk_ignores_an_order_to_clear_it_removed_objects_come_back() {
    is_noticed(Lie::DoesNotClear);
}

#[test]
fn when_a_disk_writes_after_its_memory_was_given_to_another_object_other_bytes_are_read() {
    is_noticed(Lie::WritesLate);
}

#[test]
fn when_a_standby_misses_what_gets_found_on_disks_it_is_not_as_the_master() {
    is_noticed(Lie::Untouched);
}
