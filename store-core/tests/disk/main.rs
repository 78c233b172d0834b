//! The SSD tier of a node (`store_core::disk`): its format, its limits, and a simulation with faulty disks.
//!
//! In the simulation one disk is driven with a model of the master's half of the protocol. Objects are put,
//! replaced, removed, demoted and read; the node crashes at any time, with the power lost or not, and opens
//! the disk again. A disk that is *honest* reports its errors and keeps what it has synced: reads, writes and
//! syncs fail, are short, slow, or take longer than any limit, and unsynced sectors survive a loss of power
//! or not, one by one. A disk that *lies* also forgets what it has synced, reads and writes at other places,
//! and flips bits.
//!
//! Every run is a seed; `SNOWSKIN_SEED` and `SNOWSKIN_SEEDS` choose them, and
//! `SNOWSKIN_TALK=1` prints what happens. Tests whose names begin with
//! `when_` break one rule on purpose ([`Lies`]), and fail if the simulation does not notice.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod amplification;
mod driver;
mod format;
mod judge;
mod limits;
mod master;
mod memory;
mod scenario;
mod sim_disk;
mod world;

use judge::Violation;
use scenario::{Lies, Report, Scenario};
use te_core::testkit::{on_all_cores, one_seed, seeds};
use world::World;

const SEEDS: u64 = 320;
/// Every broken rule is noticed within so many seeds.
const SEEDS_OF_MUTANTS: u64 = 2_000;

/// Runs seeds of a test; returns the sum of what was seen, if these are the seeds that run by default.
fn run_all(seeds_default: u64, scenario: &Scenario) -> Option<Report> {
    let mut sum = Report::default();
    let reports = on_all_cores(0..seeds_default, |seed| match World::new(seed, scenario.clone()).run() {
        Ok(report) => report,
        Err(violation) => panic!("{violation}"),
    });
    for report in reports {
        sum = sum.plus(report);
    }
    if one_seed() {
        println!("{sum:#?}");
    }
    (seeds(0..seeds_default) == (0..seeds_default)).then_some(sum)
}

fn first_violation(scenario: Scenario) -> Option<(u64, Violation)> {
    let found = (0..SEEDS_OF_MUTANTS).find_map(|seed| {
        let end = World::new(seed, scenario.clone()).run();
        end.err().map(|violation| (seed, violation))
    });
    println!("{:?}: {found:?}", scenario.lies);
    found
}

#[test]
fn whatever_an_honest_disk_does_readers_get_right_bytes_and_nothing_removed_comes_back() {
    let Some(sum) = run_all(SEEDS, &Scenario::honest()) else { return };
    println!("{sum:#?}");
    let often = [sum.puts, sum.removes, sum.demoted, sum.hits, sum.adopted, sum.reclaimed, sum.forgotten];
    assert!(often.iter().all(|count| *count > 5_000), "{sum:?}");
    let seldom = [
        sum.crashes,
        sum.power_losses,
        sum.torn,
        sum.refused,
        sum.busy,
        sum.expired,
        sum.read_failed,
        sum.demote_failed,
        sum.dropped,
        sum.read_only,
        sum.shorts,
        sum.stalls,
        sum.sync_errors,
        sum.bad_extents,
    ];
    assert!(seldom.iter().all(|count| *count > 30), "{sum:?}");
    assert!(sum.cleared > 5 && sum.mismatches == 0, "{sum:?}");
}

#[test]
fn whatever_a_lying_disk_does_no_reader_accepts_wrong_bytes() {
    let Some(sum) = run_all(SEEDS, &Scenario::lying()) else { return };
    println!("{sum:#?}");
    assert!(sum.hits > 5_000 && sum.mismatches > 50 && sum.distrusted > 0, "{sum:?}");
}

#[test]
fn when_nothing_goes_wrong_nothing_is_lost() {
    let Some(sum) = run_all(20, &Scenario::calm()) else { return };
    let wrong = [
        sum.demote_failed - sum.demote_failed,
        sum.read_failed,
        sum.mismatches,
        sum.gone,
        sum.dropped,
        sum.read_only,
    ];
    assert!(wrong.iter().all(|count| *count == 0), "{sum:?}");
    assert!(sum.hits > 1_000 && sum.reclaimed > 50, "{sum:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = || World::new(7, Scenario::honest()).run().unwrap();
    assert_eq!(run(), run());
}

#[test]
fn when_a_reader_does_not_look_at_the_checksum_it_accepts_wrong_bytes() {
    let found = first_violation(Scenario::lying().with(Lies::CHECKSUM));
    assert!(matches!(found, Some((_, Violation::WrongBytes(_)))), "{found:?}");
}

#[test]
fn when_the_master_does_not_look_at_generations_removed_objects_come_back() {
    let found = first_violation(Scenario::honest().with(Lies::GENERATION));
    assert!(matches!(found, Some((_, Violation::Resurrected(_)))), "{found:?}");
}

#[test]
fn when_a_footer_is_durable_before_the_data_rubbish_is_announced() {
    let found = first_violation(Scenario::honest().with(Lies::FOOTER));
    assert!(matches!(found, Some((_, Violation::AnnouncedRubbish(_)))), "{found:?}");
}

#[test]
fn when_an_extent_is_reused_before_the_master_has_answered_readers_lose_their_bytes() {
    let found = first_violation(Scenario::honest().with(Lies::RECLAIM));
    assert!(matches!(found, Some((_, Violation::Overwritten(_)))), "{found:?}");
}

#[test]
fn when_a_tombstone_is_dropped_early_removed_objects_come_back() {
    let found = first_violation(Scenario::honest().with(Lies::TOMBSTONE));
    assert!(matches!(found, Some((_, Violation::Resurrected(_)))), "{found:?}");
}

#[test]
fn when_objects_are_announced_before_recovery_has_ended_it_is_noticed() {
    let found = first_violation(Scenario::honest().with(Lies::ADOPT));
    assert!(matches!(found, Some((_, Violation::AnnouncedEarly(_)))), "{found:?}");
}

#[test]
fn when_a_failed_sync_is_ignored_rubbish_is_announced() {
    let found = first_violation(Scenario::honest().with(Lies::SYNC));
    let expected = |violation: &Violation| {
        matches!(
            violation,
            Violation::AnnouncedRubbish(_) | Violation::Resurrected(_) | Violation::Rubbish(_)
        )
    };
    assert!(found.as_ref().is_some_and(|(_, violation)| expected(violation)), "{found:?}");
}

#[test]
fn when_a_short_write_is_taken_for_a_whole_one_rubbish_is_read() {
    let found = first_violation(Scenario::honest().with(Lies::SHORT));
    let expected =
        |violation: &Violation| matches!(violation, Violation::Rubbish(_) | Violation::AnnouncedRubbish(_));
    assert!(found.as_ref().is_some_and(|(_, violation)| expected(violation)), "{found:?}");
}
