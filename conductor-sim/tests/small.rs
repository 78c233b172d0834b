//! A trace of conversations that is made here: what has to hold whatever the trace.

use conductor_sim::figures::{Figure, Traces};
use conductor_sim::what_if::{Limits, Report};
use conductor_sim::{
    Calibration, Coupled, CoupledSetup, KV_TOKENS, Outcome, PolicyKind, SEQUENCES_MAX, Setup, Shipping,
    Trace, TraceError, run, run_coupled,
};

/// Conversations of several turns: each turn's prompt begins with the one before it. They take turns in an
/// order that has nothing to do with the number of nodes.
fn conversations(count: u64, turns: u64) -> Trace {
    let mut trace = Trace::default();
    for nth in 0..count * turns {
        let (conversation, turn) = (nth * 7 % count, nth / count);
        let blocks = 4 + 4 * turn + conversation % 5;
        // Block 0 is the same for all: the system's prompt.
        let hashes: Vec<u64> =
            (0..blocks).map(|at| if at == 0 { 0 } else { conversation * 1_000 + at }).collect();
        let arrival_ms = nth * 200 / 3_000 * 3_000;
        trace.push(arrival_ms, blocks * 512, 20 + conversation % 30, &hashes).expect("a valid request");
    }
    trace
}

fn calibration() -> Calibration {
    Calibration::of_paper().expect("figure 14 determines the costs")
}

fn cluster(policy: PolicyKind) -> Setup {
    Setup { policy, ..Setup::paper(4, &calibration(), 7) }
}

fn coupled(trace: &Trace, mode: Coupled) -> Outcome {
    let setup = CoupledSetup {
        nodes: 4,
        mode,
        cost: calibration().cost,
        kv_tokens: KV_TOKENS,
        batch_tokens_max: 131_072,
        sequences_max: SEQUENCES_MAX,
        seed: 7,
        speed: 1.0,
    };
    run_coupled(trace, &setup)
}

#[test]
fn placements_are_ordered_as_in_the_paper() {
    let trace = conversations(60, 10);
    let ttft = |policy| run(&trace, &cluster(policy)).ttft_s();
    let [global, local, balanced, random] =
        [PolicyKind::Cost, PolicyKind::Local, PolicyKind::LeastRequests, PolicyKind::Random].map(ttft);
    assert!(global <= local && local < balanced && balanced < random, "{global} {local} {balanced} {random}");
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another_one() {
    let trace = conversations(40, 5);
    let setup = cluster(PolicyKind::Cost);
    assert_eq!(run(&trace, &setup), run(&trace, &setup));
    assert_ne!(run(&trace, &setup), run(&trace, &Setup { seed: 8, ..setup.clone() }));
    assert_eq!(coupled(&trace, Coupled::Plain), coupled(&trace, Coupled::Plain));
}

#[test]
fn no_token_is_lost_or_made() {
    let trace = conversations(40, 6);
    let mut outcomes = vec![
        run(&trace, &cluster(PolicyKind::Cost)),
        run(&trace, &Setup { shipping: Shipping::LayerWise, ..cluster(PolicyKind::Cost) }),
        run(&trace, &Setup { group_nodes: 2, ..cluster(PolicyKind::Cost) }),
        run(&trace, &Setup { cache_tokens: 20 * 512, ..cluster(PolicyKind::Cost) }),
        run(&trace, &Setup { cache_tokens: 0, ..cluster(PolicyKind::Cost) }),
        run(&trace, &Setup { kv_tokens: 9_000, ..cluster(PolicyKind::Cost) }),
        run(&trace, &Setup::prefill_only(4, &calibration(), 7)),
    ];
    outcomes.extend(
        [Coupled::Plain, Coupled::PrefixCaching, Coupled::Chunked { step_tokens: 512 }]
            .map(|mode| coupled(&trace, mode)),
    );
    for (nth, outcome) in outcomes.iter().enumerate() {
        let (mut prompts, mut answers) = (0, 0);
        for (record, request) in outcome.records.iter().zip(trace.requests()) {
            if record.rejected {
                assert_eq!((record.ttft_ns, record.prefill_ns, record.reused_tokens), (0, 0, 0));
                continue;
            }
            prompts += u64::from(request.tokens);
            answers += u64::from(request.output);
            assert!(record.reused_tokens < request.tokens, "{nth}: {record:?} {request:?}");
            assert!(record.fetched_tokens <= record.reused_tokens, "{nth}: {record:?}");
            assert!(record.ttft_ns >= record.prefill_ns / 2 && record.prefill_ns > 0, "{nth}: {record:?}");
        }
        assert_eq!((outcome.prompt_tokens, outcome.output_tokens), (prompts, answers), "{nth}");
        assert_eq!(outcome.rejected() > 0, nth == 5, "{nth}: prompts that no decode instance has room for");
    }
    assert_eq!(outcomes[4].hit_rate(), 0.0, "there is no cache");
}

#[test]
fn more_hits_take_less_gpu_time() {
    let trace = conversations(60, 10);
    let ours = run(&trace, &cluster(PolicyKind::Cost));
    let [plain, caching] = [Coupled::Plain, Coupled::PrefixCaching].map(|mode| coupled(&trace, mode));
    assert!(ours.prefill_s() < caching.prefill_s() && caching.prefill_s() < plain.prefill_s());
    assert!(ours.hit_rate() > caching.hit_rate() && plain.hit_rate() == 0.0);
}

#[test]
fn a_prefill_stalls_answers_on_coupled_instances_only() {
    let trace = conversations(60, 10);
    let (ours, plain) = (run(&trace, &cluster(PolicyKind::Cost)), coupled(&trace, Coupled::Plain));
    let p90 = |outcome: &Outcome| outcome.quantile(0.9, |record| record.tbt_ns);
    assert!(p90(&ours) < p90(&plain), "{} {}", p90(&ours), p90(&plain));
}

#[test]
fn less_bandwidth_is_slower_and_layers_that_are_sent_early_are_faster() {
    let trace = conversations(60, 8);
    let at = |nic_bytes_per_s, shipping| {
        run(&trace, &Setup { nic_bytes_per_s, shipping, ..cluster(PolicyKind::Cost) }).ttft_s()
    };
    let (slow, fast) = (at(3e9, Shipping::AfterPrefill), at(87e9, Shipping::AfterPrefill));
    assert!(fast < slow && at(3e9, Shipping::LayerWise) < slow, "{fast} {slow}");
}

#[test]
fn what_is_accepted_is_served_in_time() {
    let trace = conversations(60, 10);
    let base = Setup { speed: 20.0, ..Setup::prefill_only(4, &calibration(), 7) };
    let open = run(&trace, &base);
    let gated = run(&trace, &Setup { ttft_s_max: Some(2.0), ..base });
    let late = |outcome: &Outcome| outcome.served().filter(|record| record.ttft_ns > 2_000_000_000).count();
    assert!(late(&open) > 0 && gated.rejected() > 0 && late(&gated) == 0, "{} {}", late(&open), late(&gated));
}

#[test]
fn splits_are_compared_and_the_best_is_named() {
    let trace = conversations(40, 6);
    let limits = Limits { ttft_s: 30.0, tbt_s: 0.1 };
    let splits = Report::of_splits(&trace, &cluster(PolicyKind::Cost), limits);
    assert_eq!(
        splits.iter().map(|split| split.prefill_nodes).collect::<Vec<_>>(),
        (1..16).collect::<Vec<_>>()
    );
    let best = Report::best(&splits).expect("there are splits");
    assert!(splits.iter().all(|split| split.effective_pct <= splits[best].effective_pct + 0.1));
    assert_eq!(Report::best(&[]), None);
}

#[test]
fn every_figure_can_be_made_of_any_trace() {
    let traces = Traces { conversation: conversations(10, 3), synthetic: conversations(7, 4) };
    for figure in Figure::ALL {
        let points = figure.points(&traces, &calibration(), PolicyKind::Cost, 1);
        assert!(!points.is_empty() && points.iter().all(|point| point.figure == figure.name()), "{figure}");
        assert!(points.iter().all(|point| point.ours >= -100.0), "{figure}");
        for panel in figure.panels() {
            assert!(points.iter().any(|point| panel.shows(&point.series)), "{figure}: {panel:?}");
        }
    }
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let mut trace = Trace::default();
    trace.push(3_000, 1_000, 0, &[1, 2]).expect("an answer of no tokens counts as one");
    assert_eq!(trace.requests()[0].output, 1);
    assert_eq!(trace.push(0, 10, 1, &[]), Err(TraceError::Order { arrival_ms: 0 }));
    assert_eq!(trace.push(3_000, 0, 1, &[]), Err(TraceError::Tokens { tokens: 0, hashes: 0 }));
    assert_eq!(trace.push(3_000, 1_024, 1, &[1]), Err(TraceError::Tokens { tokens: 1_024, hashes: 1 }));
    assert!(trace.push(3_000, u64::MAX, 1, &[1]).is_err());
    assert_eq!(trace.requests().len(), 1);
    // Nothing of the last 200 tokens fills a block of the store.
    trace.push(3_000, 512 + 200, 1, &[1, 9]).expect("a valid request");
    assert_eq!(trace.blocks_of(&trace.requests()[1]).len(), 1);
}
