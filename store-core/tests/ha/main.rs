//! Masters with high availability in a deterministic simulator: three members, an arbiter, four clients and a
//! node, and a network that loses, repeats and delays.
//!
//! Members die and restart without state, are stopped and continue (their clocks have gone on), and are cut
//! off from each other, from the arbiter and from clients, also in one direction. Clocks of members run up
//! to 1 % fast or slow. The arbiter is slow or away, and its answers are lost, so that no member knows
//! whether a swap was carried out. Clients put, read and remove objects, and repeat a request at another
//! member when it was not answered.
//!
//! What must hold:
//!
//! * The requests and responses of clients are linearizable (`tests/linearizability/checker.rs`). A change of
//!   the leader is no reason to lose an object; only a new lineage is.
//! * At any moment at most one reign answers: after an answer of a later reign there is none of an earlier
//!   one.
//! * A follower has the state of its leader at the same position of the log.
//! * No space is given to a put while a reader may have a lease on it, granted by this leader or an earlier
//!   one.
//! * No more is kept for members than may be.
//! * When everything works again, there is one leader, and every member is in sync.
//!
//! In some simulations there are three nodes with a disk each, and too little memory: objects are copied to
//! disks, read from there, and copied back. The nodes die, too, and lose what was not synced; disks fail to
//! write, cannot read what they wrote, give extents up, and stay away for so long that they are cleared. What
//! must hold then, too:
//!
//! * What is read, from memory or from a disk, is what was put; and nothing that was removed comes back.
//! * At the end, what is on a disk that works and was neither removed nor replaced is found: a change of the
//!   leader is no reason for a miss.
//!
//! In runs without disks, processes share a pool of CXL memory (`pools.rs`): no live process loses to another
//! what it can still write.
//!
//! Members join by snapshot, in as many chunks as it has, of which some are lost; in some runs the leader
//! keeps so little of its log that a member which was cut off for a while gets a snapshot again. The leader
//! is asked to hand over now and then, also while things go wrong.
//!
//! Every run is a seed, as in `tests/simulation`. The tests whose names begin with `when_` or `without_`
//! break one rule on purpose, and fail if the simulation does not notice.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../linearizability/checker.rs"]
mod checker;
mod clients;
mod followers;
mod nodes;
mod pools;
mod report;
mod switchover;
mod world;

use std::ops::Range;

use report::{Lies, Report, Violation};
use te_core::testkit::{on_all_cores, one_seed, seeds};
use world::World;

/// Runs a seed. The violation that it shows, if any.
fn run(seed: u64, lies: Lies, disks: bool) -> Result<Report, Violation> {
    World::new(seed, lies, disks).run()
}

/// The first seed that shows wrong answers, and not only that something waits for ever.
fn first_violation(seeds: u64, lies: Lies) -> Option<Violation> {
    first(seeds, lies, false)
}

fn first(seeds: u64, lies: Lies, disks: bool) -> Option<Violation> {
    let wrong = |violation: &Violation| !matches!(violation, Violation::NotHealed(_));
    (0..seeds).find_map(|seed| run(seed, lies, disks).err().filter(wrong))
}

fn run_all(range: Range<u64>, disks: bool) -> Report {
    let mut sum = Report::default();
    let reports = on_all_cores(range, |seed| match run(seed, Lies::NONE, disks) {
        Ok(report) => report,
        Err(violation) => panic!("seed {seed}: {violation:?}"),
    });
    reports.iter().for_each(|report| sum.add(report));
    println!("{sum:#?}");
    sum
}

const SEEDS: Range<u64> = 0..200;
const SEEDS_WITH_DISKS: Range<u64> = 0..60;

#[test]
fn no_acknowledged_change_is_lost_when_members_die() {
    let sum = run_all(SEEDS, false);
    if one_seed() || seeds(SEEDS) != SEEDS {
        return;
    }
    // Not vacuous: every fault happened, and the store served requests all the same.
    let often = [sum.puts, sum.hits, sum.removes];
    assert!(often.iter().all(|count| *count > 10_000), "{sum:?}");
    assert!(sum.told > 10_000, "{sum:?}");
    assert!(sum.behind > 10 && sum.chunks_lost > 50, "{sum:?}");
    let rare = [
        sum.snapshots,
        sum.loaded,
        sum.switchovers,
        sum.switched,
        sum.crashes,
        sum.stops,
        sum.cuts,
        sum.takeovers,
        sum.deposed,
        sum.joins,
        sum.unknown_swaps,
        sum.compared,
    ];
    assert!(rare.iter().all(|count| *count > 100), "{sum:?}");
    assert!(sum.lineages > 10 && sum.repeated > 1_000, "{sum:?}");
    let of_pools =
        [sum.pool_pages, sum.pool_extents, sum.pool_deaths, sum.pool_held, sum.pool_full, sum.pool_contested];
    assert!(of_pools.iter().all(|count| *count > 50), "{sum:?}");
}

#[test]
fn no_acknowledged_change_is_lost_when_members_and_nodes_with_disks_die() {
    let sum = run_all(SEEDS_WITH_DISKS, true);
    if one_seed() || seeds(SEEDS_WITH_DISKS) != SEEDS_WITH_DISKS {
        return;
    }
    let often = [sum.puts, sum.hits, sum.removes, sum.disk_hits, sum.demoted];
    assert!(often.iter().all(|count| *count > 1_000), "{sum:?}");
    let some = [
        sum.takeovers,
        sum.deposed,
        sum.node_crashes,
        sum.adopted,
        sum.reclaimed,
        sum.forgotten,
        sum.promoted,
        sum.found,
        sum.prefetches,
        sum.compared,
        sum.loaded,
    ];
    assert!(some.iter().all(|count| *count > 50), "{sum:?}");
    assert!(sum.lineages > 5 && sum.cleared > 5, "{sum:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for disks in [false, true] {
        assert_eq!(run(7, Lies::NONE, disks).unwrap(), run(7, Lies::NONE, disks).unwrap());
    }
}

#[test]
fn when_an_answer_does_not_wait_for_the_followers_changes_are_lost() {
    let found = first_violation(300, Lies::ACKED_BEFORE);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_a_member_is_dropped_before_the_arbiter_knows_changes_are_lost() {
    let found = first_violation(300, Lies::DROPPED_BEFORE);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_a_member_takes_over_that_is_not_in_sync_changes_are_lost() {
    let found = first_violation(300, Lies::TRUSTED);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn without_the_lease_of_the_leader_two_reigns_answer() {
    let found = first_violation(300, Lies::LEASED);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_a_swap_without_an_answer_counts_as_done_two_members_lead() {
    let found = first_violation(300, Lies::SWAP_WON);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_a_promise_is_not_kept_changes_are_lost() {
    let found = first_violation(300, Lies::PROMISE);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_commands_of_an_earlier_reign_are_acknowledged_changes_are_lost() {
    let found = first_violation(300, Lies::TERM);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_a_follower_repeats_other_commands_its_state_differs() {
    let found = first_violation(300, Lies::UNTOUCHED);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_a_new_leader_does_not_know_removals_that_disks_have_not_confirmed_removed_objects_come_back() {
    let found = first(300, Lies::TOMBSTONES, true);
    assert!(found.is_some(), "{found:?}");
}

#[test]
fn when_an_extent_is_written_again_before_the_leader_knows_other_bytes_are_read() {
    let found = first(300, Lies::REUSED, true);
    assert!(matches!(found, Some(Violation::OtherBytes(_))), "{found:?}");
}

#[test]
fn when_hosts_state_locks_that_they_do_not_share_two_processes_write_one_page_of_a_pool() {
    let found = first_violation(300, Lies::ONE_DOMAIN);
    assert!(matches!(found, Some(Violation::PoolShared(_))), "{found:?}");
}

#[test]
fn when_a_master_without_state_is_not_told_what_is_in_a_pool_two_processes_write_it() {
    let found = first_violation(300, Lies::UNTOLD);
    assert!(matches!(found, Some(Violation::PoolShared(_))), "{found:?}");
}
