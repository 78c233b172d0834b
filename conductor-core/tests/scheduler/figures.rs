//! The figures, with their bounds. Each is a mean over three seeds, or one long run.

use std::time::Duration;

use conductor_core::cost::PrefillCost;
use conductor_core::scheduler::{Counters, PolicyKind, Slo};

use crate::world::{Outcome, Setup, autocorrelation, run};

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

/// KV of the prefills goes over the same NICs as what is fetched, and both together nearly fill them.
fn saturated(setup: &mut Setup) {
    setup.ships = true;
    setup.rate = 8.0;
    setup.bytes_per_s = 7_500_000_000;
}

#[test]
fn booking_nics_is_worth_a_factor_of_four_when_they_are_saturated() {
    let (booked, blind) =
        (mean_ttft(PolicyKind::Cost, saturated), mean_ttft(PolicyKind::CostBlind, saturated));
    println!("simulated mean TTFT: booked {booked:.2} s, blind {blind:.2} s");
    assert!(booked <= 0.25 * blind, "{booked} against {blind}");
}

#[test]
fn our_rule_is_not_above_the_best_threshold_of_algorithm_1_by_more_than_a_hundredth() {
    for (rate, bytes_per_s, ships) in [
        (4.0, 87_000_000_000, false),
        (6.0, 87_000_000_000, true),
        (7.0, 87_000_000_000, false),
        (7.0, 12_500_000_000, true),
    ] {
        let set = |setup: &mut Setup| {
            (setup.rate, setup.bytes_per_s, setup.ships) = (rate, bytes_per_s, ships);
        };
        let ours = mean_ttft(PolicyKind::Cost, set);
        // A prefix is held whole or not at all here: every threshold decides alike.
        let paper = mean_ttft(PolicyKind::Algorithm1 { threshold: 1.0 }, set);
        println!(
            "simulated mean TTFT at {rate}/s, {bytes_per_s} B/s: ours {ours:.3} s, Algorithm 1 {paper:.3} s"
        );
        assert!(ours <= 1.01 * paper, "{ours} against {paper}");
    }
}

#[test]
fn shipping_layer_by_layer_is_faster() {
    let at_160_gbps = |layerwise: bool| {
        mean_ttft(PolicyKind::Cost, |setup| {
            (setup.ships, setup.bytes_per_s, setup.config.layerwise) = (true, 20_000_000_000, layerwise);
        })
    };
    let (layerwise, after) = (at_160_gbps(true), at_160_gbps(false));
    println!("simulated mean TTFT: layer by layer {layerwise:.2} s, after the prefill {after:.2} s");
    assert!(layerwise < 0.9 * after, "{layerwise} against {after}");
}

const TTFT_S: f64 = 30.0;

/// Twice or three times the load that the cluster can serve.
fn overloaded(speed: f64, admission: bool) -> (Outcome, Counters) {
    let mut setup = Setup::new(PolicyKind::Cost);
    (setup.ships, setup.requests, setup.config.admission) = (true, 10_000, admission);
    setup.rate *= speed;
    setup.slo = Slo { ttft: Duration::from_secs(30), tbt: Duration::from_millis(100) };
    let (outcome, scheduler) = run(setup);
    (outcome, *scheduler.counters())
}

#[test]
fn admission_serves_in_time_what_it_accepts() {
    for (speed, in_time_min) in [(2.0, 0.99), (3.0, 0.93)] {
        let (with, counters) = overloaded(speed, true);
        let (without, _) = overloaded(speed, false);
        let slow = |outcome: &Outcome| {
            outcome.tbt.iter().filter(|&&tbt| tbt > 0.12).count() as f64 / outcome.tbt.len() as f64
        };
        println!(
            "simulated at {speed}x: {} of 10000 accepted, in time {:.4} (without admission {:.4}), above 120 ms \
             per token {:.4} (without {:.4}); refused for TTFT {}, for TBT {}",
            with.accepted.len(),
            with.in_time(TTFT_S),
            without.in_time(TTFT_S),
            slow(&with),
            slow(&without),
            counters.refused_ttft,
            counters.refused_tbt
        );
        assert!(with.in_time(TTFT_S) >= in_time_min, "{speed}: {}", with.in_time(TTFT_S));
        assert!(without.in_time(TTFT_S) < 0.5, "{speed}: {}", without.in_time(TTFT_S));
        assert!(slow(&with) <= 0.05 && slow(&without) > 0.3, "{speed}: {} {}", slow(&with), slow(&without));
    }
}

#[test]
fn refusals_do_not_oscillate() {
    for speed in [2.0, 3.0] {
        let (outcome, _) = overloaded(speed, true);
        let end = outcome.refused[outcome.refused.len() - 1];
        for bin in [1.0, 5.0] {
            // The first minute fills the cluster.
            let most = autocorrelation(&outcome.refused, 60.0, end, bin, 10);
            println!("simulated at {speed}x: autocorrelation of refusals per {bin} s {most:.2}");
            assert!(most < 0.3, "{speed}, {bin} s: {most}");
        }
    }
}

#[test]
fn times_to_the_first_token_are_predicted_on_engines_of_unknown_cost() {
    for seed in 1..=3 {
        let mut setup = Setup { seed, noise: 0.1, ships: true, ..Setup::new(PolicyKind::Cost) };
        setup.truth.prefill =
            PrefillCost { per_prompt: 0.02, per_token: 7e-5, per_square: 3e-10, per_reused: 4e-6 };
        let (fitted, _) = run(setup.clone());
        setup.config.online_fit = None;
        let (unfitted, _) = run(setup);
        let [p50, p90] = [0.5, 0.9].map(|q| fitted.prediction_error(q, 500));
        let without = unfitted.prediction_error(0.5, 500);
        println!(
            "simulated error of TTFT after 500 requests: p50 {p50:.3}, p90 {p90:.3}; without a fit {without:.3}"
        );
        assert!(p50 <= 0.10, "{p50}");
        assert!(without > 0.3, "{without}");
    }
}

#[test]
fn busy_holders_have_their_prefixes_copied() {
    let mut setup = Setup::new(PolicyKind::Cost);
    saturated(&mut setup);
    (setup.prefixes, setup.kept) = (24, 2);
    let (outcome, scheduler) = run(setup);
    println!("simulated: {} copies asked for", outcome.replicates);
    assert!(outcome.replicates > 0);
    assert_eq!(outcome.replicates, scheduler.counters().replicated);
}
