//! The fault plan under the engine's own route: the last resort carries nothing while a fast rail lives.
//!
//! Every run is a seed; see `te_core::testkit::failover`.

use te_core::HealthConfig;
use te_core::sim::Rng;
use te_core::testkit::failover::{TIERS, drawn, simulate};

use crate::tiers::Tiers;

#[test]
fn any_fault_on_any_rail_costs_no_transfer_under_the_engines_tiers() {
    let seeds = match std::env::var("SNOWSKIN_SEED").ok().and_then(|seed| seed.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..500,
    };
    for seed in seeds {
        let route = Tiers::new(&TIERS, HealthConfig::default());
        let plan = drawn(&mut Rng::new(seed), 6);
        if let Err(what) = simulate(seed, &plan, route, Tiers::health) {
            panic!("SNOWSKIN_SEED={seed}: {what}\nthe plan: {plan:#?}");
        }
    }
}
