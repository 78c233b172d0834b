//! The store in a deterministic simulator: one master, three nodes, five clients of three tenants, and a
//! fabric that loses, delays and reorders, and lands writes a minute late.
//!
//! Clients put whole objects, or range by range in any order, replace what others have put, get whole objects
//! and parts, remove, change pins and times to live, and request copies and moves; nodes carry those out, and
//! die in the middle of it; segments are drained, unmounted and mounted again; objects that are read often
//! get further replicas; bytes flip in the nodes' memories. One tenant has a quota, one a guarantee, one
//! takes what is left, and all have the same keys.
//!
//! In addition:
//!
//! * A client is *forked* during a put. The child has its parent's numbers in its memory, leaves its
//!   connection and its engine alone, and does the same put with its own.
//! * Writers are *stopped* during a write, for seconds or through a *night* in which no party begins anything
//!   and every timeout passes; they continue to write where they stopped. One that a node has cut off is
//!   informed, and starts another engine.
//! * *All processes* are stopped, the master included, and continue in any order.
//! * *Intruders* guess handles, generations and nodes' keys, mount under names of live nodes, and request the
//!   impossible.
//! * *Requests about many* objects list, find and remove keys, page by page, while the store continues, and
//!   replicas are cleared.
//! * The *limits of tenants* are changed while they use the store, also to less than they have, and to
//!   invalid values.
//! * *Wall clocks* are wrong by hours, and go back over a restart. No node's clock is more than 50 minutes
//!   ahead of the master's, which refuses one that is an hour ahead.
//!
//! Every run is a seed. `SNOWSKIN_SEED=n` runs that one and prints what it saw; `SNOWSKIN_SEEDS=a..b` or `=n`
//! runs these seeds in each of the tests that run many. A seed that fails is printed with the command that
//! runs it again; with `SNOWSKIN_TALK=1` it prints which put was given which range, which writer writes
//! where, and which was cut off.
//!
//! The requests and responses of clients are a history, which is judged by
//! `tests/linearizability/checker.rs`. The contents of memory and the permissions to touch it are judged as
//! they change, by `shadow` and `judge`, and the master's counters are recounted by `audit`, after every 16th
//! request and at the end. A listing may show what existed at some moment during it and has to show what
//! existed all the time; a request about many objects does what it reports and nothing else; limits and
//! guarantees of a tenant hold from the response on. Space belongs to a put until its writer has reported to
//! the master that it has ended, or the node has cut that writer off: given to another put before, it is a
//! violation, whether a write is in progress or not. A node that is not mounted after a number of responses
//! of the master is a violation, too. Clocks are bounded as `MasterConfig::lease_guard_ms` requires: each
//! runs up to 1 % fast or slow, the master's jumps ahead by up to 5 ms at a time, those of clients
//! arbitrarily; the master's leaves out the time in which it was stopped, as that of `store-master` does.
//! A standby repeats the master's command log as it is written; all of its state must be that of the master.
//! Disks are not simulated: no part of this writes a file.
//!
//! The tests whose names begin with `without_` or `when_` break one rule on purpose, and fail if the
//! simulation does not notice.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
#![allow(unsafe_code, reason = "registers memory with the simulated fabric")]

mod audit;
mod bulk;
#[path = "../linearizability/checker.rs"]
mod checker;
mod client;
mod clock;
mod common;
mod follower;
mod intruders;
mod judge;
mod memory;
mod mover;
mod moving;
mod node;
mod pauses;
mod quotas;
mod scenario;
mod sessions;
mod shadow;
mod trouble;
mod upserts;
mod world;

use std::ops::Range;
use std::time::Duration;

use scenario::{Lies, Report, Scenario};
use shadow::Violation;
use te_core::testkit::{one_seed, seeds};
use world::World;

/// The seeds that the four stormy tests share.
const STORMY: Range<u64> = 0..1_024;

/// Runs seeds of a test; returns the sum of what was seen.
fn run_all(test: &str, seeds: Range<u64>, scenario: &Scenario) -> Report {
    let mut sum = Report::default();
    for seed in seeds {
        let again = format!(
            "SNOWSKIN_SEED={seed} cargo test -p store-core --test simulation {test} -- --exact --nocapture"
        );
        let run = std::panic::catch_unwind(|| World::new(seed, scenario.clone()).run());
        let report = match run {
            Ok(Ok(report)) => report,
            Ok(Err(violation)) => panic!("seed {seed}: {violation}\nrun it again:\n  {again}\n"),
            Err(_) => panic!("seed {seed}: panicked, see above\nrun it again:\n  {again}\n"),
        };
        if one_seed() {
            println!("{report:#?}");
        }
        sum = sum.plus(&report);
    }
    sum
}

/// Whether these seeds were chosen by hand, so that sums are meaningless.
fn by_hand(default: Range<u64>) -> bool {
    seeds(default.clone()) != default
}

/// The first violation that a broken system shows within `seeds` seeds.
fn first_violation(seeds: u64, scenario: &Scenario) -> Option<Violation> {
    (0..seeds).find_map(|seed| World::new(seed, scenario.clone()).run().err())
}

/// All faults, and every client receives true responses.
fn storm(test: &str, quarter: u64) {
    let all = seeds(STORMY);
    // Each of the four tests has a quarter of the seeds; one seed alone runs in each of them.
    let edge = |quarter: u64| all.start + (all.end - all.start) * quarter / 4;
    let seeds = if one_seed() { all.clone() } else { edge(quarter)..edge(quarter + 1) };
    let sum = run_all(test, seeds, &Scenario::stormy());
    println!("{sum:#?}");
    if all != STORMY {
        return;
    }
    // Not vacuous: every fault happened, and the store served requests all the same.
    assert!(sum.hits > sum.gets / 8 && sum.hits > 10_000, "{sum:?}");
    assert!(sum.puts > 10_000 && sum.removes > 500, "{sum:?}");
    assert!(sum.upserts > 2_000 && sum.stats.objects_replaced_total > 500, "{sum:?}");
    assert!(sum.sessions > 1_000 && sum.opened > sum.sessions + 200, "{sum:?}");
    assert!(sum.recorded > 100_000 && sum.losses > 10_000, "{sum:?}");
    let rare = [
        sum.lease_expired,
        sum.failed_puts,
        sum.unknown_writes,
        sum.landed_late,
        sum.fences,
        sum.crashes,
        sum.master_restarts,
        sum.stops,
        sum.partitions,
        sum.jumps,
    ];
    assert!(rare.iter().all(|count| *count > 100), "{sum:?}");
    let master = [
        sum.expelled,
        sum.stats.leases_returned_total,
        sum.stats.puts_abandoned_total,
        sum.stats.evictions_total,
        sum.stats.nodes_expired_total,
    ];
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
    let tasks = sum.tasks;
    let moved = [
        sum.orders,
        sum.copies,
        sum.moves,
        sum.given_up,
        tasks.failed_total,
        tasks.retried_total,
        tasks.hot_gets_total,
        sum.drains,
        sum.drained,
    ];
    assert!(moved.iter().all(|count| *count > 100), "{sum:?}");
    // Rare events: a task is canceled in time, a node dies during a copy, an end is reported twice, a drained
    // segment is unmounted.
    let seldom = [tasks.canceled_total, sum.died_copying, sum.reported_again, sum.left];
    assert!(seldom.iter().all(|count| *count > 10), "{sum:?}");
    let rotten = [sum.flips, sum.mismatches, sum.reported_bad, tasks.bad_dropped_total];
    assert!(rotten.iter().all(|count| *count > 100), "{sum:?}");
    let hostile = [
        sum.forks,
        sum.paused,
        sum.standstills,
        sum.guesses,
        sum.thefts,
        sum.wishes,
        sum.set_back,
        sum.stale,
    ];
    assert!(hostile.iter().all(|count| *count > 100), "{sum:?}");
    // A writer is stopped through a night, and learns afterwards that it was cut off; a name is free.
    assert!(sum.slept > 10 && sum.turned_away > 10 && sum.successions > 2, "{sum:?}");
    shared_and_bulk(&sum);
}

/// The same for tenants, and for requests about many objects.
fn shared_and_bulk(sum: &Report) {
    assert!(sum.compared > 1_000 && sum.snapshots > 200 && sum.log_bytes > 1 << 20, "{sum:?}");
    let shared = [sum.parts, sum.parts_of_many, sum.refused, sum.audits];
    assert!(shared.iter().all(|count| *count > 100), "{sum:?}");
    assert!(sum.foreign > 50 && sum.tasks.extras_shed_total > 30, "{sum:?}");
    let bulk = [sum.listings, sum.listed, sum.sweeps, sum.swept, sum.cleared, sum.cleared_last];
    assert!(bulk.iter().all(|count| *count > 100), "{sum:?}");
    assert!(sum.cleared - sum.cleared_last > 50 && sum.spared > 5, "{sum:?}");
    assert!(sum.settings > 1_000 && sum.lowered > 100, "{sum:?}");
    assert!(sum.promised > 100 && sum.pinned > 100, "{sum:?}");
}

#[test]
fn whatever_goes_wrong_histories_are_linearizable_and_bytes_right_first_quarter() {
    storm("whatever_goes_wrong_histories_are_linearizable_and_bytes_right_first_quarter", 0);
}

#[test]
fn whatever_goes_wrong_histories_are_linearizable_and_bytes_right_second_quarter() {
    storm("whatever_goes_wrong_histories_are_linearizable_and_bytes_right_second_quarter", 1);
}

#[test]
fn whatever_goes_wrong_histories_are_linearizable_and_bytes_right_third_quarter() {
    storm("whatever_goes_wrong_histories_are_linearizable_and_bytes_right_third_quarter", 2);
}

#[test]
fn whatever_goes_wrong_histories_are_linearizable_and_bytes_right_fourth_quarter() {
    storm("whatever_goes_wrong_histories_are_linearizable_and_bytes_right_fourth_quarter", 3);
}

#[test]
fn when_nothing_goes_wrong_nothing_is_missed() {
    let sum = run_all("when_nothing_goes_wrong_nothing_is_missed", seeds(0..10), &Scenario::calm());
    let troubles =
        [sum.failed_reads, sum.mismatches, sum.unknown_writes, sum.stats.evictions_total, sum.losses];
    assert!(troubles.iter().all(|count| *count == 0), "{sum:?}");
    assert!(by_hand(0..10) || sum.hits > 1_000, "{sum:?}");
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let run = || World::new(7, Scenario::stormy()).run().unwrap();
    assert_eq!(run(), run());
}

/// A master that gives out a lost writer's space as soon as its key. It also gives out what nodes still read.
fn hasty() -> Scenario {
    let mut scenario = Scenario::stormy().without_flips();
    scenario.master.put_start_release_timeout_ms = scenario.master.put_start_discard_timeout_ms + 1;
    scenario
}

#[test]
fn without_the_release_timeout_ranges_are_given_out_under_a_writer() {
    let found = first_violation(60, &hasty());
    assert!(matches!(found, Some(Violation::GivenWhileWritten(_))), "{found:?}");
}

#[test]
fn without_the_release_timeout_and_cutting_off_checksums_still_keep_wrong_bytes_from_readers() {
    let sum = run_all(
        "without_the_release_timeout_and_cutting_off_checksums_still_keep_wrong_bytes_from_readers",
        seeds(0..60),
        &Scenario { blind: true, lies: Lies::EXPEL, ..hasty() },
    );
    assert!(by_hand(0..60) || sum.mismatches > 0, "{sum:?}");
}

#[test]
fn without_the_release_timeout_cutting_off_and_checksums_wrong_bytes_are_read() {
    let lies = Lies::CHECKSUM.and(Lies::EXPEL);
    let found = first_violation(60, &Scenario { blind: true, lies, ..hasty() });
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}

#[test]
fn without_the_readers_look_at_its_lease_and_checksums_wrong_bytes_are_read() {
    // Leases so short, and responses so slow, that many reads begin after their lease; and little room, so
    // that space is soon given out again.
    let mut scenario = Scenario {
        calls: (0, 0, 300_000, 700),
        segment_bytes: 12 * 1024,
        variety: false,
        ..Scenario::stormy()
    }
    .without_flips();
    (scenario.master.lease_ttl_ms, scenario.master.lease_guard_ms) = (5, 1);
    let honest = run_all(
        "without_the_readers_look_at_its_lease_and_checksums_wrong_bytes_are_read",
        seeds(0..20),
        &scenario,
    );
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
fn when_a_node_says_that_it_cut_a_writer_off_and_has_not_ranges_are_given_out_under_it() {
    let found = first_violation(60, &Scenario { lies: Lies::EXPEL, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::GivenWhileWritten(_))), "{found:?}");
}

#[test]
fn when_time_alone_passes_for_the_word_of_a_node_ranges_are_given_out_under_a_writer() {
    let found = first_violation(20, &Scenario { lies: Lies::TIME, ..nights() });
    assert!(matches!(found, Some(Violation::GivenWhileWritten(_))), "{found:?}");
}

/// Writers that are stopped for longer than any timeout.
fn nights() -> Scenario {
    Scenario::nightly(Duration::from_secs(100))
}

#[test]
fn writers_that_go_on_after_hours_write_into_nothing_that_is_anothers() {
    let scenario = Scenario::nightly(Duration::from_secs(2 * 3_600));
    let sum = run_all(
        "writers_that_go_on_after_hours_write_into_nothing_that_is_anothers",
        seeds(0..12),
        &scenario,
    );
    assert!(by_hand(0..12) || sum.slept > 12 && sum.turned_away > 0, "{sum:?}");
}

#[test]
fn when_writers_that_sleep_are_not_cut_off_checksums_still_keep_wrong_bytes_from_readers() {
    let scenario = Scenario { lies: Lies::EXPEL, blind: true, ..nights().without_flips() };
    let sum = run_all(
        "when_writers_that_sleep_are_not_cut_off_checksums_still_keep_wrong_bytes_from_readers",
        seeds(0..40),
        &scenario,
    );
    assert!(by_hand(0..40) || sum.mismatches > 0, "{sum:?}");
}

#[test]
fn when_what_was_forked_goes_on_with_its_parents_engine_two_write_to_one_place() {
    let found = first_violation(20, &Scenario { lies: Lies::TWIN, ..Scenario::stormy() });
    let expected = matches!(
        found,
        Some(Violation::TwoWriters(_) | Violation::WriteAfterLoss(_) | Violation::GivenWhileWritten(_))
    );
    assert!(expected, "{found:?}");
}

#[test]
fn when_intruders_know_handles_they_end_puts_of_others() {
    let found = first_violation(20, &Scenario { lies: Lies::HANDLE, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Forged(_))), "{found:?}");
}

#[test]
fn when_a_thief_knows_the_key_of_a_node_its_name_is_taken_while_it_lives() {
    let found = first_violation(20, &Scenario { lies: Lies::KEY, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Stolen(_))), "{found:?}");
}

#[test]
fn when_a_node_whose_clock_went_back_goes_by_it_alone_it_does_not_come_back() {
    let found = first_violation(20, &Scenario { lies: Lies::WALL, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Stuck(_))), "{found:?}");
}

#[test]
fn when_room_is_made_for_what_cannot_be_something_is_evicted_for_nothing() {
    let found = first_violation(20, &Scenario { lies: Lies::WISH, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::EvictedForNothing(_))), "{found:?}");
}

#[test]
fn everything_may_stand_still_and_go_on_in_any_order_and_nothing_is_lost() {
    let sum = run_all(
        "everything_may_stand_still_and_go_on_in_any_order_and_nothing_is_lost",
        seeds(0..20),
        &Scenario::standing_still(),
    );
    let lost = [sum.losses, sum.stats.nodes_expired_total, sum.stats.evictions_total, sum.mismatches];
    assert!(lost.iter().all(|count| *count == 0), "{sum:?}");
    assert!(by_hand(0..20) || sum.standstills > 60 && sum.hits > 1_000, "{sum:?}");
}

#[test]
fn when_the_master_counts_the_time_in_which_it_stood_still_nodes_that_live_are_given_up() {
    let scenario = Scenario { lies: Lies::PAUSE, ..Scenario::standing_still() };
    let found = first_violation(20, &scenario);
    assert!(matches!(found, Some(Violation::GivenUpEarly(_))), "{found:?}");
}

#[test]
fn when_a_lost_write_passes_for_done_and_checksums_are_off_half_an_object_is_read() {
    let lies = Lies::CHECKSUM.and(Lies::OUTCOME);
    let found = first_violation(60, &Scenario { lies, blind: true, ..Scenario::stormy().without_flips() });
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}

#[test]
fn when_a_put_or_remove_that_failed_is_said_to_be_done_no_order_explains_it() {
    let found = first_violation(20, &Scenario { lies: Lies::ANSWER, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::NotLinearizable(_))), "{found:?}");
}

/// Every put replaces.
fn upserting() -> Scenario {
    Scenario { upserts_pct: 100, ..Scenario::stormy() }
}

#[test]
fn when_every_put_replaces_histories_are_linearizable() {
    let sum = run_all("when_every_put_replaces_histories_are_linearizable", seeds(0..40), &upserting());
    assert!(by_hand(0..40) || sum.stats.objects_replaced_total > 200, "{sum:?}");
}

#[test]
fn when_an_upsert_that_failed_is_said_to_be_done_no_order_explains_it() {
    let found = first_violation(20, &Scenario { lies: Lies::ANSWER, ..upserting() });
    assert!(matches!(found, Some(Violation::NotLinearizable(_))), "{found:?}");
}

#[test]
fn when_an_object_is_gone_as_soon_as_its_replacement_begins_that_is_noticed() {
    let found = first_violation(20, &Scenario { lies: Lies::IN_PLACE, ..upserting() });
    assert!(matches!(found, Some(Violation::LostByUpsert(_))), "{found:?}");
}

#[test]
fn when_a_revoked_upsert_takes_the_old_object_along_that_is_noticed() {
    let found = first_violation(60, &Scenario { lies: Lies::UNDONE, ..upserting() });
    assert!(matches!(found, Some(Violation::LostByTask(_))), "{found:?}");
}

#[test]
fn when_the_leases_of_a_replaced_object_do_not_hold_its_space_leased_ranges_are_given_out() {
    let mut scenario = Scenario { segment_bytes: 12 * 1024, variety: false, ..upserting() };
    (scenario.master.lease_ttl_ms, scenario.master.lease_guard_ms) = (2_000, 100);
    scenario.jump_ms = 5;
    assert_eq!(first_violation(10, &scenario), None);
    scenario.lies = Lies::RECALL;
    let found = first_violation(60, &scenario);
    assert!(matches!(found, Some(Violation::GivenWhileLeased(_))), "{found:?}");
}

#[test]
fn when_what_is_said_to_exist_is_not_kept_for_its_lease_leased_ranges_are_given_out() {
    // Most of what exists is leased because it is read.
    let mut scenario = Scenario { segment_bytes: 12 * 1024, variety: false, ..Scenario::stormy() };
    (scenario.master.lease_ttl_ms, scenario.master.lease_guard_ms) = (2_000, 100);
    let found = first_violation(100, &Scenario { lies: Lies::GLANCE, ..scenario });
    assert!(matches!(found, Some(Violation::GivenWhileLeased(_))), "{found:?}");
}

#[test]
fn when_every_put_is_written_range_by_range_histories_are_linearizable() {
    let test = "when_every_put_is_written_range_by_range_histories_are_linearizable";
    let mut scenario = Scenario { sessions_pct: 100, ..Scenario::stormy() };
    let sum = run_all(test, seeds(0..20), &scenario);
    assert!(by_hand(0..20) || sum.sessions > 200, "{sum:?}");
    // Of several chunks, which a range need not respect.
    scenario.long_objects();
    let sum = run_all(test, seeds(0..10), &Scenario { variety: false, ..scenario });
    assert!(by_hand(0..10) || sum.sessions > 50 && sum.parts_of_many > 2, "{sum:?}");
}

#[test]
fn when_a_range_is_left_out_of_a_put_its_readers_notice() {
    let scenario = Scenario { lies: Lies::HOLE, sessions_pct: 100, ..Scenario::stormy() };
    let found = first_violation(20, &scenario);
    assert!(matches!(found, Some(Violation::Damaged(_))), "{found:?}");
}

#[test]
fn when_an_object_is_said_to_be_pinned_and_is_not_it_is_evicted() {
    let scenario = Scenario { lies: Lies::UNPINNED, segment_bytes: 12 * 1024, ..Scenario::stormy() };
    let found = first_violation(100, &scenario);
    assert!(matches!(found, Some(Violation::EvictedPinned(_))), "{found:?}");
}

#[test]
fn when_a_client_passes_for_another_tenant_foreign_bytes_are_read() {
    let found = first_violation(20, &Scenario { lies: Lies::TENANT, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}

/// Only objects of several chunks.
fn long() -> Scenario {
    let mut scenario = Scenario { variety: false, ..Scenario::stormy() };
    scenario.long_objects();
    scenario
}

#[test]
fn without_verifying_the_chunks_of_a_part_a_flipped_byte_is_read() {
    let found = first_violation(20, &Scenario { lies: Lies::TRAILER, ..long() });
    assert!(matches!(found, Some(Violation::WrongBytes(_))), "{found:?}");
}

#[test]
fn when_a_node_does_not_look_at_what_it_copied_a_copy_counts_that_is_bad() {
    let found = first_violation(60, &Scenario { lies: Lies::VERIFY, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::BadCopy(_))), "{found:?}");
}

#[test]
fn when_a_node_calls_a_place_quiet_that_it_still_reads_into_it_is_given_out_under_it() {
    let found = first_violation(60, &Scenario { lies: Lies::QUIET, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::GivenWhileWritten(_))), "{found:?}");
}

#[test]
fn when_a_node_reads_again_into_a_place_whose_end_it_has_reported_it_may_be_anothers() {
    let found = first_violation(500, &Scenario { lies: Lies::AGAIN, ..Scenario::stormy() });
    let expected = matches!(
        found,
        Some(
            Violation::GivenWhileWritten(_)
                | Violation::WriteAfterLoss(_)
                | Violation::TwoWriters(_)
                | Violation::BadCopy(_)
        )
    );
    assert!(expected, "{found:?}");
}

#[test]
fn without_a_request_to_the_master_a_reader_returns_what_is_gone() {
    let found = first_violation(20, &Scenario { lies: Lies::CACHE, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::NotLinearizable(_))), "{found:?}");
}

#[test]
fn when_the_masters_clock_jumps_further_than_the_guard_leased_ranges_are_given_out() {
    // Long leases and little room: all space that may be given out again is.
    let mut scenario =
        Scenario { jump_ms: 3_000, segment_bytes: 12 * 1024, variety: false, ..Scenario::stormy() };
    (scenario.master.lease_ttl_ms, scenario.master.lease_guard_ms) = (2_000, 100);
    let honest = Scenario { jump_ms: 5, ..scenario.clone() };
    assert_eq!(first_violation(30, &honest), None);
    let found = first_violation(300, &scenario);
    assert!(matches!(found, Some(Violation::GivenWhileLeased(_))), "{found:?}");
}

#[test]
fn when_the_first_page_of_a_listing_passes_for_all_of_it_keys_are_missed() {
    let found = first_violation(20, &Scenario { lies: Lies::PAGE, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Missed(_))), "{found:?}");
}

#[test]
fn when_a_listing_shows_what_the_one_before_has_shown_keys_are_shown_that_are_gone() {
    let found = first_violation(20, &Scenario { lies: Lies::FORMER, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Shown(_))), "{found:?}");
}

#[test]
fn when_a_removal_of_many_is_said_to_be_done_that_got_no_answer_something_is_left() {
    let found = first_violation(20, &Scenario { lies: Lies::SWEEP, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Left(_))), "{found:?}");
}

#[test]
fn when_a_removal_of_many_removes_something_else_besides_that_is_noticed() {
    let found = first_violation(20, &Scenario { lies: Lies::BROOM, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Swept(_))), "{found:?}");
}

#[test]
fn when_a_removal_of_many_does_not_spare_what_is_leased_that_is_noticed() {
    let scenario = Scenario { lies: Lies::SPARE, ..Scenario::stormy() };
    let found = first_violation(100, &scenario);
    assert!(matches!(found, Some(Violation::RemovedWhileLeased(_))), "{found:?}");
}

#[test]
fn when_another_replica_is_cleared_besides_the_one_that_was_meant_that_is_noticed() {
    let found = first_violation(20, &Scenario { lies: Lies::CLEAR, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Cleared(_))), "{found:?}");
}

#[test]
fn when_what_a_tenant_may_is_taken_back_behind_its_back_it_has_too_much_or_loses_too_much() {
    let found = first_violation(20, &Scenario { lies: Lies::QUOTA, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::OverQuota(_) | Violation::BelowGuarantee(_))), "{found:?}");
}

#[test]
fn when_the_command_log_lacks_what_was_leased_a_standby_is_not_as_its_master() {
    let found = first_violation(20, &Scenario { lies: Lies::UNTOUCHED, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Diverged(_))), "{found:?}");
}

#[test]
fn when_the_command_log_lacks_timeouts_a_standby_is_not_as_its_master() {
    let found = first_violation(20, &Scenario { lies: Lies::UNTIMED, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Diverged(_))), "{found:?}");
}

#[test]
fn when_the_command_log_lacks_ends_of_connections_a_standby_is_not_as_its_master() {
    let found = first_violation(20, &Scenario { lies: Lies::UNENDED, ..Scenario::stormy() });
    assert!(matches!(found, Some(Violation::Diverged(_))), "{found:?}");
}
