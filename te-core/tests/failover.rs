//! Rails fail one after another and come back: an application over all of them sees neither an error, nor a
//! wrong byte, nor a byte that changes after the end of a transfer.
//!
//! Every run is a seed; see `te_core::testkit::seeds`. With `SNOWSKIN_SEED=n` it prints what each fault cost.

use std::time::Duration;

use te_core::testkit::failover::{Fault, Phase, Recovery, drawn, every_fault, simulate};
use te_core::testkit::{Rng, each_seed, one_seed};
use te_core::{ErrorKind, HealthConfig, HealthRoute};

fn run(seed: u64, plan: &[Phase]) -> Result<Vec<Recovery>, String> {
    // The last resort is ten times as far.
    let route = HealthRoute::new(&[100, 100, 1000], HealthConfig::default());
    simulate(seed, plan, route, HealthRoute::health)
}

#[test]
fn any_fault_on_any_rail_costs_no_transfer_and_no_byte() {
    for seed in each_seed(0..500) {
        let plan = drawn(&mut Rng::new(seed), 6);
        match run(seed, &plan) {
            Ok(recoveries) if one_seed() => recoveries.iter().for_each(|recovery| println!("{recovery}")),
            Ok(_) => {}
            Err(what) => panic!("{what}\nthe plan: {plan:#?}"),
        }
    }
}

#[test]
fn the_plan_for_hardware_holds_in_the_simulation() {
    for recovery in run(1, &every_fault(Duration::from_millis(100))).unwrap_or_else(|what| panic!("{what}")) {
        println!("{recovery}");
    }
}

#[test]
fn a_failure_of_any_kind_at_any_stage_on_any_rails_is_failed_over() {
    let kinds = [
        ErrorKind::PeerDead,
        ErrorKind::Unreachable,
        ErrorKind::Rail,
        ErrorKind::TimedOut,
        ErrorKind::Protocol,
        ErrorKind::Corrupt,
        ErrorKind::System,
    ];
    for kind in kinds {
        for fault in [Fault::Refuses(kind), Fault::Fails(kind)] {
            let lasts = Duration::from_millis(30);
            let plan: Vec<Phase> = (1..7).map(|rails| Phase::new(fault, rails, lasts)).collect();
            run(7, &plan).unwrap_or_else(|what| panic!("{what}"));
        }
    }
}

#[test]
fn the_judge_sees_what_it_is_there_for() {
    // All three rails fail for longer than a transfer may wait.
    let plan = [Phase::new(Fault::Fails(ErrorKind::Rail), 0b111, Duration::from_millis(200))];
    assert!(run(1, &plan).is_err());
}
