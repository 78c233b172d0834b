//! `snowskin conductor sim`: figures, other clusters, and what is said when something is missing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fmt::Write as _;
use std::path::Path;

use common::{assert_exit, json, run, stderr, stdout};

/// Writes a trace of conversations whose turns extend each other.
fn trace(file: &Path) {
    let mut text = String::new();
    for nth in 0..60u64 {
        let (conversation, turn) = (nth * 7 % 12, nth / 12);
        let blocks = 4 + 4 * turn;
        let ids: Vec<u64> = (0..blocks).map(|at| if at == 0 { 0 } else { conversation * 100 + at }).collect();
        let (timestamp, tokens) = (nth / 4 * 3_000, blocks * 512);
        let _ = writeln!(
            text,
            r#"{{"timestamp": {timestamp}, "input_length": {tokens}, "output_length": 30, "hash_ids": {ids:?}}}"#
        );
    }
    std::fs::write(file, text).unwrap();
}

#[test]
fn the_costs_are_compared_with_the_papers_without_any_trace() {
    let output = run(&["conductor", "sim"]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    for part in ["Figure 14", "simulated", "131072", "27.512", "calibrated"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let points = json(&run(&["conductor", "sim", "--figure", "14", "--json"]));
    let first = &points[0];
    assert_eq!((&first["figure"], &first["kind"]), (&"14".into(), &"calibrated".into()));
    assert!(first["x"].is_number() && first["paper"].is_number() && first["ours"].is_number(), "{first}");
}

#[test]
fn figures_are_made_of_traces_and_drawn_and_are_the_same_each_time() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["conversation_trace.jsonl", "synthetic_trace.jsonl"] {
        trace(&dir.path().join(name));
    }
    let (traces, plots) = (dir.path().to_str().unwrap(), dir.path().join("plots"));
    let all = || {
        let plots = plots.to_str().unwrap();
        run(&["conductor", "sim", "--figure", "all", "--trace-dir", traces, "--json", "--svg-dir", plots])
    };
    let output = all();
    assert_exit(&output, 0);
    let figures: std::collections::BTreeSet<String> =
        json(&output).as_array().unwrap().iter().map(|point| point["figure"].to_string()).collect();
    assert_eq!(figures.len(), 9, "{figures:?}");
    let plot = std::fs::read_to_string(plots.join("conductor-15.svg")).unwrap();
    assert!(plot.starts_with("<svg ") && plot.contains("polyline") && plot.len() < 40_000, "{plot}");
    assert_eq!(stdout(&all()), stdout(&output));
    assert_eq!(std::fs::read_to_string(plots.join("conductor-15.svg")).unwrap(), plot);
    let other = run(&["conductor", "sim", "--figure", "5", "--trace-dir", traces, "--json", "--seed", "2"]);
    assert_exit(&other, 0);
}

#[test]
fn another_cluster_is_simulated_and_its_best_split_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.jsonl");
    trace(&file);
    let what_if = |more: &[&str]| {
        run(&[&["conductor", "sim", "--what-if", "--trace", file.to_str().unwrap()], more].concat())
    };
    let report =
        json(&what_if(&["--nodes", "6", "--prefill", "2", "--speed", "2", "--policy", "local", "--json"]));
    assert_eq!((&report["prefill_nodes"], &report["decode_nodes"]), (&2.into(), &4.into()));
    assert_eq!((&report["policy"], &report["simulated"]), (&"local".into(), &true.into()));
    assert_eq!((&report["requests"], &report["rejected"]), (&60.into(), &0.into()));
    assert!(report["hit_pct"].as_f64().unwrap() > 0.0 && report["ttft_s"]["p99"].as_f64().unwrap() > 0.0);
    let text = stdout(&what_if(&["--nodes", "5", "--find-split"]));
    assert!(text.contains("best") && text.lines().count() >= 6, "{text}");
    let text = stdout(&what_if(&["--admission", "--ttft-slo-s", "0.2", "--nodes", "4"]));
    assert!(text.contains("refused at the door") && text.contains("Simulated: 2 prefill"), "{text}");
    for (wrong, hint) in [
        (&["--nodes", "4", "--prefill", "4"][..], "leaves one node"),
        (&["--group-nodes", "3", "--prefill", "4"], "multiple"),
        (&["--speed", "0"], "--speed"),
        (&["--bandwidth-gbps", "0"], "bandwidth"),
        (&["--policy", "fastest"], "algorithm1"),
        (&["--figure", "8"], "--figure"),
    ] {
        let output = what_if(wrong);
        assert_exit(&output, 2);
        assert!(stderr(&output).contains(hint), "{wrong:?}: {}", stderr(&output));
    }
}

#[test]
fn missing_and_damaged_traces_are_named_with_what_to_do() {
    let output = run(&["conductor", "sim", "--figure", "5"]);
    assert_exit(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("conversation_trace.jsonl") && text.contains("FAST25-release/traces"), "{text}");
    let output = run(&["conductor", "sim", "--figure", "15", "--trace-dir", "/no/such/dir"]);
    assert_exit(&output, 1);
    let text = stderr(&output);
    assert!(text.contains("/no/such/dir/synthetic_trace.jsonl") && text.contains("--synthetic"), "{text}");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.jsonl");
    for (line, hint) in [
        ("", "no requests"),
        ("{\"timestamp\": 1}", "missing field"),
        (r#"{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}"#, "0 tokens"),
        (r#"{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}"#, "negative"),
        (r#"{"timestamp": 1, "input_length": 9999999999999, "output_length": 1, "hash_ids": [1]}"#, "hashes"),
    ] {
        std::fs::write(&file, format!("{line}\n")).unwrap();
        let output = run(&["conductor", "sim", "--what-if", "--trace", file.to_str().unwrap()]);
        assert_exit(&output, 1);
        assert!(stderr(&output).contains(hint), "{line}: {}", stderr(&output));
    }
    assert_exit(&run(&["conductor", "sim", "--what-if"]), 2);
    assert_exit(&run(&["conductor", "sim", "--figure", "5,8", "--svg", "x.svg"]), 2);
}
