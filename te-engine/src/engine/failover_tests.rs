//! The fault plans of `te_core::testkit::failover` under the engine's route: no fault on a rail fails a
//! transfer, and the farthest tier carries nothing while a nearer rail works.

use te_core::HealthConfig;
use te_core::testkit::failover::{TIERS, drawn, simulate};
use te_core::testkit::{Rng, each_seed};

use crate::tiers::Tiers;

#[test]
fn any_fault_on_any_rail_costs_no_transfer_under_the_engines_tiers() {
    for seed in each_seed(0..500) {
        let route = Tiers::new(&TIERS, HealthConfig::default());
        let plan = drawn(&mut Rng::new(seed), 6);
        if let Err(what) = simulate(seed, &plan, route, Tiers::health) {
            panic!("{what}\nthe plan: {plan:#?}");
        }
    }
}
