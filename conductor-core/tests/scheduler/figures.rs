//! The figures.

use std::time::Duration;

use conductor_core::scheduler::{PolicyKind, Slo};

use crate::world::{Outcome, Setup, run};

fn mean_ttft(policy: PolicyKind, change: impl Fn(&mut Setup)) -> f64 {
    let total: f64 = (1..=3)
        .map(|seed| {
            let mut setup = Setup { seed, ..Setup::new(policy) };
            change(&mut setup);
            run(setup).0.mean_ttft()
        })
        .sum();
    total / 3.0
}

#[test]
fn explore() {
    let ab = |alpha, beta| PolicyKind::AlphaBeta { alpha, beta };
    let policies = [
        PolicyKind::Cost,
        PolicyKind::CostBlind,
        PolicyKind::Algorithm1 { threshold: 1.0 },
        PolicyKind::Local,
        ab(0.0, 0.5),
        ab(0.0, 1.0),
        ab(0.5, 0.0),
        ab(1.0, 0.0),
        ab(0.5, 0.5),
        ab(1.0, 1.0),
        ab(0.3, 0.3),
    ];
    for rate in [8.0, 7.0, 6.0, 4.0] {
        for gbps in [60, 80, 160, 700] {
            for layerwise in [false] {
                print!("{rate} {gbps} {layerwise}");
                for policy in policies {
                    let set = |s: &mut Setup| {
                        s.ships = true;
                        s.rate = rate;
                        s.config.layerwise = layerwise;
                        s.bytes_per_s = gbps * 125_000_000;
                    };
                    print!(" {policy}: {:.3}", mean_ttft(policy, set));
                }
                println!(" s");
            }
        }
    }
}
