//! The store in a deterministic simulator: one master, three nodes, four clients, and a fabric that loses, delays and
//! reorders, and lands writes a minute late.
//!
//! Every run is a seed. `SNOWSKIN_SEED=n` runs that one and prints what it saw; `SNOWSKIN_SEEDS=n` runs the first `n`.
//!
//! The tests whose names begin with `without_` break one rule on purpose, and fail if the simulation does not notice.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
#![allow(unsafe_code, reason = "registers memory with the simulated fabric")]

mod client;
mod memory;
mod node;
mod shadow;
mod world;

use shadow::Violation;
use world::{Lies, Report, Scenario, World};

const SEEDS: u64 = 240;

fn seeds(default: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    match (number("SNOWSKIN_SEED"), number("SNOWSKIN_SEEDS")) {
        (Some(seed), _) => vec![seed],
        (None, count) => (0..count.unwrap_or(default)).collect(),
    }
}

/// Runs every seed; gives the sum of what was seen.
fn run_all(default: u64, scenario: &Scenario) -> Report {
    let mut sum = Report::default();
    for seed in seeds(default) {
        let run = std::panic::catch_unwind(|| World::new(seed, scenario.clone()).run());
        let report = match run {
            Ok(Ok(report)) => report,
            Ok(Err(violation)) => panic!("SNOWSKIN_SEED={seed}: {violation:?}"),
            Err(_) => panic!("SNOWSKIN_SEED={seed}: panicked, see above"),
        };
        if std::env::var("SNOWSKIN_SEED").is_ok() {
            println!("{report:#?}");
        }
        sum = sum.plus(&report);
    }
    sum
}

/// The first violation that a broken system shows within so many seeds.
fn first_violation(seeds: u64, scenario: &Scenario) -> Option<Violation> {
    (0..seeds).find_map(|seed| World::new(seed, scenario.clone()).run().err())
}

#[test]
fn an_acknowledged_object_is_returned_exactly_or_missed_whatever_goes_wrong() {
    let sum = run_all(SEEDS, &Scenario::stormy());
    println!("{sum:#?}");
    if std::env::var("SNOWSKIN_SEED").is_ok() || std::env::var("SNOWSKIN_SEEDS").is_ok() {
        return;
    }
    // No range is ever shared, so that the checksums have nothing to catch.
    assert_eq!(sum.mismatches, 0);
    // Not vacuous: everything that can go wrong did, and the store served all the same.
    assert!(sum.hits > sum.gets / 8 && sum.hits > 10_000, "{sum:?}");
    assert!(sum.puts > 10_000 && sum.removes > 500, "{sum:?}");
    let rare = [
        sum.lease_expired,
        sum.failed_puts,
        sum.unknown_writes,
        sum.landed_late,
        sum.fences,
        sum.crashes,
        sum.master_restarts,
    ];
    assert!(rare.iter().all(|count| *count > 100), "{sum:?}");
    let master = [sum.stats.zombies_total, sum.stats.evictions_total, sum.stats.nodes_expired_total];
    assert!(master.iter().all(|count| *count > 100), "{sum:?}");
    let eviction = sum.eviction;
    let kept = [
        sum.retained,
        eviction.groups_evicted_total,
        eviction.expired_total,
        eviction.soft_pins_decayed_total,
        eviction.kept_leased_total,
    ];
    assert!(kept.iter().all(|count| *count > 100), "{sum:?}");
}

#[test]
fn when_nothing_goes_wrong_nothing_is_missed() {
    let sum = run_all(10, &Scenario::calm());
    let troubles = [sum.failed_reads, sum.mismatches, sum.unknown_writes, sum.stats.evictions_total];
    assert!(troubles.iter().all(|count| *count == 0), "{sum:?}");
    assert!(sum.hits > 1_000, "{sum:?}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let run = || World::new(7, Scenario::stormy()).run().unwrap();
    assert_eq!(run(), run());
}

/// A master that gives a dead writer's space out as soon as its key.
fn hasty() -> Scenario {
    let mut scenario = Scenario::stormy();
    scenario.master.put_start_release_timeout_ms = scenario.master.put_start_discard_timeout_ms + 1;
    scenario
}

#[test]
fn without_the_release_timeout_ranges_are_given_out_under_a_writer() {
    let found = first_violation(60, &hasty());
    assert!(matches!(found, Some(Violation::GivenWhileWritten(_))), "{found:?}");
}

#[test]
fn without_the_release_timeout_checksums_still_keep_wrong_bytes_from_readers() {
    let sum = run_all(60, &Scenario { blind: true, ..hasty() });
    assert!(sum.mismatches > 0, "{sum:?}");
}

#[test]
fn without_the_release_timeout_and_checksums_wrong_bytes_are_read() {
    let found = first_violation(200, &Scenario { blind: true, lies: Lies::CHECKSUM, ..hasty() });
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}

#[test]
fn without_the_readers_look_at_its_lease_and_checksums_wrong_bytes_are_read() {
    // Leases so short, and answers so slow, that many a read begins after its lease; and little room, so that space is
    // given out again soon.
    let mut scenario =
        Scenario { calls: (0, 0, 300_000, 700), segment_bytes: 12 * 1024, ..Scenario::stormy() };
    (scenario.master.lease_ttl_ms, scenario.master.lease_guard_ms) = (5, 1);
    let honest = run_all(20, &scenario);
    assert!(honest.lease_expired > 100, "{honest:?}");
    scenario.lies = Lies::CHECKSUM.and(Lies::CLOCK);
    let found = first_violation(60, &scenario);
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}

#[test]
fn without_fences_ranges_are_given_out_under_a_writer() {
    let found = first_violation(60, &Scenario { lies: Lies::FENCE, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::GivenWhileWritten(_))), "{found:?}");
}

#[test]
fn when_a_lost_write_passes_for_done_and_checksums_are_off_half_an_object_is_read() {
    let lies = Lies::CHECKSUM.and(Lies::OUTCOME);
    let found = first_violation(60, &Scenario { lies, blind: true, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}
