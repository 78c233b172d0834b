//! `snowskin replay`: the main use case, and how it ends when something fails.

mod common;

use std::io::Read as _;
use std::process::Stdio;

use common::{
    assert_exit, children_of, eventually, is_alive, json, run, signal, snowskin, stderr, stdout, wait,
};

/// A trace of two requests that share three blocks.
const TRACE: &str = r#"{"timestamp": 0, "input_length": 2048, "output_length": 9, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 1000, "input_length": 2000, "output_length": 9, "hash_ids": [0, 1, 2, 7]}
"#;

#[test]
fn a_tiny_trace_hits_what_it_must_and_reports_every_field() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.jsonl");
    std::fs::write(&file, TRACE).unwrap();
    let output = run(&["replay", "--trace", file.to_str().unwrap(), "--json"]);
    assert_exit(&output, 0);
    let report = json(&output);
    let number = |field: &str| report[field].as_f64().unwrap_or_else(|| panic!("no {field} in {report}"));
    assert_eq!((number("requests"), number("block_refs"), number("blocks_hit")), (2.0, 8.0, 3.0));
    assert_eq!((number("hit_rate"), number("blocks_put"), number("evicted")), (0.375, 5.0, 0.0));
    assert_eq!(number("verify_failures"), 0.0);
    assert!((number("written_gib") - 5.0 * 4096.0 / (1u64 << 30) as f64).abs() < 1e-9);
    for field in
        ["get_p50_us", "get_p99_us", "put_p50_us", "put_p99_us", "read_gib_s", "write_gib_s", "cpu_s_per_gib"]
    {
        assert!(number(field) > 0.0, "{field}");
    }
    assert_eq!(stderr(&output), "", "no bar without a terminal");
}

#[test]
fn the_same_workload_hits_the_same_over_each_fabric_and_prints_a_table() {
    let rate = |fabric: &str| {
        let report = json(&run(&[
            "replay",
            "--requests",
            "40",
            "--fabric",
            fabric,
            "--block-bytes",
            "5000",
            "--json",
        ]));
        assert_eq!(report["verify_failures"], 0, "{report}");
        report["hit_rate"].as_f64().unwrap()
    };
    assert_eq!(rate("tcp"), rate("shm"));
    let output = run(&["replay", "--requests", "10"]);
    assert_exit(&output, 0);
    assert!(stdout(&output).contains("verify failures"), "{}", stdout(&output));
}

#[test]
fn a_pool_smaller_than_the_workload_evicts_and_never_lies() {
    let output =
        run(&["replay", "--requests", "150", "--capacity-blocks", "200", "--lease-ms", "50", "--json"]);
    assert_exit(&output, 0);
    let report = json(&output);
    assert!(report["evicted"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(report["verify_failures"], 0, "{report}");
    assert!(report["blocks_hit"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn a_bad_trace_is_named_with_file_line_and_expectation_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.jsonl");
    std::fs::write(&file, format!("{TRACE}{{\"timestamp\": 1}}\n")).unwrap();
    let output = run(&["replay", "--trace", file.to_str().unwrap()]);
    assert_exit(&output, 1);
    let text = stderr(&output);
    assert!(
        text.contains("bad.jsonl:3: missing field `input_length`") && text.contains("hash_ids"),
        "{text}"
    );

    let output = run(&["replay", "--trace", "/no/such/file.jsonl"]);
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("/no/such/file.jsonl"), "{}", stderr(&output));
}

#[test]
fn a_pool_that_this_machine_cannot_hold_is_refused_with_advice() {
    let output = run(&["replay", "--capacity-blocks", "999999999999"]);
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("--capacity-blocks"), "{}", stderr(&output));
}

#[test]
fn a_simulation_gives_a_table_json_and_a_plot_and_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, plot) = (dir.path().join("trace.jsonl"), dir.path().join("hits.svg"));
    let line = |ids: &[u32]| {
        format!("{{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
    };
    // Room for three blocks: 0 is read again, the others come once, then 0 and 2 come again.
    let requests: String = [[0], [0], [1], [2], [3], [4], [0], [2]].iter().map(|ids| line(ids)).collect();
    std::fs::write(&trace, requests).unwrap();
    let simulate =
        |more: &[&str]| run(&[&["replay", "--simulate", "--trace", trace.to_str().unwrap()], more].concat());
    let output = simulate(&[
        "--capacity-tokens",
        "1536,1M",
        "--policies",
        "lru,trial",
        "--json",
        "--svg",
        plot.to_str().unwrap(),
    ]);
    assert_exit(&output, 0);
    let report = json(&output);
    assert_eq!((report["simulated"].as_bool(), report["block_refs"].as_u64()), (Some(true), Some(8)));
    assert_eq!(report["capacities_tokens"], serde_json::json!([1536, 1_000_000]));
    let rows = serde_json::json!([
        {"policy": "lru", "hit_rates": [0.125, 0.375]},
        {"policy": "trial", "hit_rates": [0.25, 0.375]},
        {"policy": "belady", "hit_rates": [0.375, 0.375]},
    ]);
    assert_eq!(report["rows"], rows);
    let plot = std::fs::read_to_string(plot).unwrap();
    assert_eq!(plot.matches("<polyline").count(), 3, "{plot}");

    let output = simulate(&[]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    for part in ["trial", "lru", "sieve", "fifo", "belady (bound)", "Simulated: 8 requests", "37.5 %"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(stderr(&output), "", "no bar without a terminal");
    for wrong in [&["--policies", "clock"][..], &["--capacity-tokens", "3.0Q"], &["--capacity-blocks", "3"]] {
        assert_exit(&simulate(wrong), 2);
    }
    assert_exit(&run(&["replay", "--svg", "x.svg"]), 2);
}

#[test]
fn a_simulation_with_disks_says_where_hits_are_and_is_the_same_each_time() {
    let simulate = |more: &[&str]| {
        let args = ["replay", "--simulate", "--requests", "500", "--policies", "trial", "--capacity-tokens"];
        run(&[&args[..], &["100k,200k", "--disk-tokens", "1M,2M"], more].concat())
    };
    let output = simulate(&["--json"]);
    assert_exit(&output, 0);
    let report = json(&output);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "no disk, two disks and the bound: {report}");
    assert_eq!(rows[0].get("memory_hit_rates"), None, "{report}");
    for row in &rows[1..3] {
        for at in 0..2 {
            let number = |field: &str| row[field][at].as_f64().unwrap_or_else(|| panic!("{field}: {row}"));
            assert!(number("hit_rates") > rows[0]["hit_rates"][at].as_f64().unwrap(), "{report}");
            assert!(number("memory_hit_rates") < number("hit_rates"), "{report}");
            assert!(number("disk_writes_per_ref") > 0.0, "{report}");
        }
    }
    assert_eq!(stdout(&simulate(&["--json"])), stdout(&output));
    let limited = json(&simulate(&["--json", "--disk-writes-max", "0.05"]));
    let writes = limited["rows"][1]["disk_writes_per_ref"][0].as_f64().expect("a number");
    assert!(writes <= 0.05, "{limited}");
    let text = stdout(&simulate(&[]));
    assert!(text.contains("trial + disk 1M") && text.contains("disk writes per reference"), "{text}");
}

/// Whether disks are possible in a directory: some file systems have no direct I/O.
fn has_disks(dir: &std::path::Path) -> bool {
    let probe = dir.join("probe");
    let output = run(&["disk", "format", probe.to_str().expect("a path in UTF-8"), "--size", "16MiB"]);
    let _ = std::fs::remove_file(&probe);
    if !output.status.success() {
        println!("not run: {}", stderr(&output));
    }
    output.status.success()
}

#[test]
fn blocks_that_no_longer_fit_into_memory_are_read_from_disks_whose_files_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    if !has_disks(dir.path()) {
        return;
    }
    let args = ["replay", "--requests", "300", "--capacity-blocks", "400", "--lease-ms", "50", "--json"];
    let output =
        snowskin(&[&args[..], &["--disk-tokens", "2M"]].concat()).env("TMPDIR", dir.path()).output().unwrap();
    assert_exit(&output, 0);
    let report = json(&output);
    let number = |field: &str| report[field].as_u64().unwrap_or_else(|| panic!("no {field} in {report}"));
    assert_eq!((number("verify_failures"), number("nodes_lost")), (0, 0), "{report}");
    assert!(number("blocks_hit_disk") > 100 && number("blocks_demoted") > 500, "{report}");
    assert_eq!(number("blocks_hit_memory") + number("blocks_hit_disk"), number("blocks_hit"));
    assert!(report["disk_writes_per_ref"].as_f64() > Some(0.1), "{report}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");

    let named = dir.path().to_str().unwrap();
    let output = run(&["replay", "--requests", "20", "--disk", &format!("{named}:64MiB")]);
    assert_exit(&output, 0);
    assert!(stdout(&output).contains(&format!("disks 64 MiB in {named}")), "{}", stdout(&output));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "what the user has named is kept");
    let again = run(&["replay", "--requests", "20", "--disk", named]);
    assert_exit(&again, 1);
    assert!(stderr(&again).contains("node-0.disk exists already"), "{}", stderr(&again));
}

#[test]
fn a_node_that_is_restarted_in_the_middle_has_what_is_on_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    if !has_disks(dir.path()) {
        return;
    }
    let run = |more: &[&str]| {
        let args = ["replay", "--requests", "400", "--capacity-blocks", "400", "--lease-ms", "50"];
        let disks = ["--disk-tokens", "2M", "--nodes", "1", "--json"];
        let output =
            snowskin(&[&args[..], &disks, more].concat()).env("TMPDIR", dir.path()).output().unwrap();
        assert_exit(&output, 0);
        let report = json(&output);
        assert_eq!((&report["verify_failures"], &report["nodes_lost"]), (&0.into(), &0.into()), "{report}");
        (report["second_half_hit_rate"].as_f64().unwrap(), report["blocks_hit"].as_u64().unwrap())
    };
    // The workload of 400 requests lasts for minutes: at this pace, for seconds.
    let (undisturbed, hits) = run(&["--pace", "100"]);
    let (restarted, fewer) = run(&["--pace", "100", "--restart-node"]);
    assert!(fewer < hits, "{fewer} of {hits}: what was in memory is gone");
    assert!(restarted > undisturbed / 2.0, "{restarted} after the restart, {undisturbed} without");
}

#[test]
fn requests_arrive_as_their_timestamps_say() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.jsonl");
    std::fs::write(&file, TRACE).unwrap();
    let elapsed = |more: &[&str]| {
        let output = run(&[&["replay", "--trace", file.to_str().unwrap(), "--json"], more].concat());
        assert_exit(&output, 0);
        json(&output)["elapsed_s"].as_f64().unwrap()
    };
    assert!(elapsed(&["--pace", "0.5"]) >= 2.0, "the second request arrives after a second of the trace");
    for pace in ["0", "-1", "nan", "1e9"] {
        let output = run(&["replay", &format!("--pace={pace}")]);
        assert_exit(&output, 2);
        assert!(stderr(&output).contains("--pace: choose"), "{}", stderr(&output));
    }
    let output = run(&["replay", "--restart-node", "--simulate"]);
    assert_exit(&output, 2);
}

#[test]
fn disks_that_are_not_possible_are_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let named = |size: &str| format!("{}{size}", dir.path().display());
    let (tiny, huge, odd) = (named(":1KiB"), named(":64TiB"), named(":4XB"));
    for (args, code, said) in [
        (&["--disk", "/no/such/dir:1GiB"][..], 1, "make it"),
        (&["--disk", &tiny], 2, "choose 3.0 MiB"),
        (&["--disk", &huge, "--block-bytes", "1MiB", "--capacity-blocks", "64"], 1, "has room for"),
        (&["--disk", &odd], 2, "4XB"),
        (&["--disk", &named(":1GiB"), "--disk-tokens", "1M"], 2, "give one of them"),
        (&["--disk-tokens", "512"], 2, "--disk-tokens: at least"),
        (&["--disk-tokens", "1M,2M"], 2, "--compare"),
        (&["--disk-tokens", "1M", "--block-bytes", "512"], 2, "not copied to disks"),
        (&["--disk-tokens", "1M", "--disk-writes-max", "0.5"], 2, "--simulate"),
        (&["--disk-tokens", "512", "--simulate"], 2, "--disk-tokens: at least"),
        (&["--disk-tokens", "1M", "--simulate", "--disk-writes-max=-1"], 2, "--disk-writes-max"),
        (&["--disk", &named(":1GiB"), "--compare"], 2, "--disk-tokens"),
    ] {
        let output = run(&[&["replay"], args].concat());
        assert_exit(&output, code);
        assert!(stderr(&output).contains(said), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// A replay in progress that continues until it is disturbed, and the processes that it has started.
fn long_replay(more: &[&str]) -> (std::process::Child, Vec<(u32, String)>) {
    let args = [&["replay", "--requests", "100000000", "--capacity-blocks", "5000", "--json"], more].concat();
    let child = snowskin(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut children = Vec::new();
    eventually("a master and two nodes", || {
        children = children_of(child.id());
        children.iter().filter(|(_, arguments)| arguments.contains(" node ")).count() == 2
    });
    // A process may exist long before it serves, and a failure before that ends the start, not the replay.
    eventually("it puts blocks", || counter(&children, "objects") > Some(0));
    (child, children)
}

/// A counter of the replay's master; `None` while it does not answer.
fn counter(children: &[(u32, String)], name: &str) -> Option<u64> {
    let (_, node) = children.iter().find(|(_, arguments)| arguments.contains(" node ")).expect("a node");
    let (_, master) = node.split_once(" --master ").expect("it has --master");
    let stat = run(&["stat", "--json", "--master", master.split(' ').next().expect("an address")]);
    stat.status.success().then(|| json(&stat)[name].as_u64())?
}

/// The output of a process that has ended.
fn output_of(mut child: std::process::Child) -> std::process::Output {
    let status = wait(&mut child).expect("it ends");
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    child.stdout.take().expect("piped").read_to_end(&mut stdout).expect("it reads");
    child.stderr.take().expect("piped").read_to_end(&mut stderr).expect("it reads");
    std::process::Output { status, stdout, stderr }
}

#[test]
fn ctrl_c_ends_it_with_130_a_summary_and_no_child_left() {
    let (child, children) = long_replay(&[]);
    signal(child.id(), "INT");
    let output = output_of(child);
    assert_exit(&output, 130);
    let report = json(&output);
    assert_eq!((report["interrupted"].as_bool(), report["verify_failures"].as_u64()), (Some(true), Some(0)));
    for (pid, arguments) in children {
        assert!(!is_alive(pid), "{arguments} is left");
    }
}

#[test]
fn kill_9_leaves_no_child_either() {
    let (mut child, children) = long_replay(&[]);
    child.kill().unwrap();
    child.wait().unwrap();
    for (pid, arguments) in children {
        eventually(&format!("the end of {arguments}"), || !is_alive(pid));
    }
}

#[test]
fn a_node_that_is_killed_costs_its_blocks_and_never_gives_wrong_bytes() {
    let (child, children) = long_replay(&[]);
    let node = children.iter().find(|(_, arguments)| arguments.contains("node-1")).unwrap().0;
    signal(node, "KILL");
    // A child that has been waited for is no child any more. After that, the replay continues with the other
    // node.
    let has_noticed = || children_of(child.id()).iter().all(|(pid, _)| *pid != node);
    eventually("the replay notices", has_noticed);
    let gets = counter(&children, "gets_total").expect("the master answers");
    eventually("reads without the node", || counter(&children, "gets_total") > Some(gets + 5_000));
    signal(child.id(), "INT");
    let output = output_of(child);
    assert_exit(&output, 130);
    let report = json(&output);
    assert_eq!(
        (report["verify_failures"].as_u64(), report["nodes_lost"].as_u64()),
        (Some(0), Some(1)),
        "{report}"
    );
    assert!(stderr(&output).contains("node-1 ended"), "{}", stderr(&output));
}

#[test]
fn a_master_that_is_killed_ends_it_with_a_clear_error() {
    let (child, children) = long_replay(&[]);
    let master = children.iter().find(|(_, arguments)| arguments.contains(" master ")).unwrap().0;
    signal(master, "KILL");
    let output = output_of(child);
    assert_exit(&output, 1);
    assert!(stderr(&output).contains("the master ended (signal: 9"), "{}", stderr(&output));
    for (pid, arguments) in children {
        eventually(&format!("the end of {arguments}"), || !is_alive(pid));
    }
}

#[test]
fn the_hit_rate_of_processes_is_that_of_the_simulation() {
    // Without SIEVE, for which batches of puts make a difference in a pool as small as this.
    let args =
        ["replay", "--compare", "--requests", "3000", "--capacity-blocks", "3000", "--block-bytes", "512"];
    let output =
        run(&[&args[..], &["--policies", "trial,lru,fifo", "--agree-within", "1.5", "--json"]].concat());
    assert_exit(&output, 0);
    let compared = json(&output);
    assert_eq!(compared["agree"], true, "{compared}");
    let rows = compared["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!((&row["verify_failures"], &row["put_no_room"]), (&0.into(), &0.into()), "{row}");
        assert!(row["evicted"].as_u64() > Some(5_000) && row["hit_rate"].as_f64() > Some(0.5), "{row}");
    }
}

#[test]
fn the_hit_rate_with_disks_is_that_of_the_simulation_too() {
    let dir = tempfile::tempdir().unwrap();
    if !has_disks(dir.path()) {
        return;
    }
    let args = ["replay", "--compare", "--requests", "1000", "--capacity-blocks", "1500", "--json"];
    let disk = ["--disk", dir.path().to_str().unwrap(), "--disk-tokens", "2.56M", "--policies", "trial"];
    let output = run(&[&args[..], &disk, &["--lease-ms", "50", "--agree-within", "2"]].concat());
    assert_exit(&output, 0);
    let compared = json(&output);
    let [row] = &compared["rows"].as_array().unwrap()[..] else { panic!("one row: {compared}") };
    assert_eq!((&row["disk_tokens"], &row["verify_failures"]), (&2_560_000.into(), &0.into()), "{row}");
    let rate = |field: &str| row[field].as_f64().unwrap_or_else(|| panic!("no {field} in {row}"));
    assert!(rate("hit_rate") > rate("memory_hit_rate") + 0.05, "{row}");
    assert!(rate("memory_hit_rate_simulated") > 0.1 && rate("disk_writes_per_ref") > 0.05, "{row}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "a comparison keeps no disks");
}

#[test]
fn a_comparison_that_finds_the_two_apart_ends_with_1() {
    let args = ["replay", "--compare", "--requests", "100", "--capacity-blocks", "100", "--policies", "fifo"];
    // Leased blocks are not evicted, so nearly all of such a small pool is closed to new blocks.
    let output = run(&[&args[..], &["--lease-ms", "60000", "--agree-within", "0"]].concat());
    assert_exit(&output, 1);
    let text = stdout(&output);
    assert!(text.contains("Not all agree within 0 points") && text.contains("<- apart"), "{text}");
    assert_exit(&run(&["replay", "--capacity-blocks", "1,2"]), 2);
    assert_exit(&run(&["replay", "--policies", "all"]), 2);
}
