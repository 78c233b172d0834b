//! Help, usage errors and messages: what a new user sees.

mod common;

use std::process::{Command, Stdio};

use common::{assert_exit, json, run, snowskin, stderr, stdout};

#[test]
fn help_of_every_command_has_usage_examples_and_exit_codes() {
    let commands: &[&[&str]] = &[
        &["master"],
        &["node"],
        &["put"],
        &["get"],
        &["rm"],
        &["ls"],
        &["stat"],
        &["config", "show"],
        &["config", "check"],
        &["config", "reference"],
        &["admin", "evict"],
        &["admin", "tenants"],
        &["replay"],
        &["conductor", "query"],
        &["conductor", "replay"],
        &["conductor", "serve"],
        &["conductor", "sim"],
        &["bench", "transfer"],
        &["bench", "store"],
        &["bench", "master"],
        &["bench", "allocator"],
        &["bench", "target"],
        &["disk", "format"],
        &["disk", "inspect"],
        &["disk", "verify"],
        &["disk", "bench"],
        &["topology"],
        &["doctor"],
    ];
    for command in commands {
        let output = run(&[command, &["--help"][..]].concat());
        assert_exit(&output, 0);
        let text = stdout(&output);
        for part in ["Usage: snowskin", "Examples:", "Exit codes:", "130"] {
            assert!(text.contains(part), "{command:?} lacks {part}");
        }
        let name = command.last().unwrap();
        let top = stdout(&run(&[&command[..command.len() - 1], &["--help"]].concat()));
        assert!(top.contains(name), "{name} is not listed");
    }
}

#[test]
fn an_invalid_settings_file_is_refused_with_its_lines_before_anything_starts() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[master]\nspin = 1\n\n[master.store]\nlease_ttl_ms = 0\n").unwrap();
    let name = file.path().to_str().unwrap();
    for args in [&["config", "check", name][..], &["--config", name, "master"], &["master", "--config", name]]
    {
        let output = run(args);
        assert_exit(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(&format!("{name}:2: master.spin: no such setting")), "{text}");
    }
    std::fs::write(file.path(), "[master.store]\nlease_ttl_ms = 0\n").unwrap();
    let text = stderr(&run(&["master", "--config", name]));
    assert!(text.contains(&format!("{name}:2: master.store.lease_ttl_ms: 0 is out of its limits")), "{text}");
    std::fs::write(file.path(), "[master.store]\nlease_ttl_ms = 7\n").unwrap();
    assert_exit(&run(&["config", "check", name]), 0);
    let shown = json(&run(&["--config", name, "config", "show", "--changed", "--json"]));
    assert_eq!(shown[0]["key"], "master.store.lease_ttl_ms");
    assert_eq!(shown[0]["origin"], format!("{name}:2"));
}

#[test]
fn config_check_warns_of_old_names_in_the_file_that_it_checks() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[node.engine]\nsegments_max = 70\n").unwrap();
    let output = run(&["config", "check", file.path().to_str().unwrap()]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("valid; 1 settings are set"), "{text}");
    let warning = "warning: node.engine.segments_max is the old name of node.engine.remote_regions_max";
    assert!(text.contains(warning), "{text}");
}

#[test]
fn a_master_of_tenants_does_not_start_without_an_admins_secret() {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::io::Write::write_all(&mut file, b"[[tenants]]\nname = \"a\"\n").unwrap();
    let path = file.path().to_str().unwrap();
    let master = run(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--tenants", path]);
    assert_exit(&master, 2);
    assert!(stderr(&master).contains("--admin-secret-file"), "{}", stderr(&master));
}

#[test]
fn wrong_usage_ends_with_2_and_names_the_right_usage() {
    for (args, hint) in [
        (&["replay", "--block-bytes", "4XB"][..], "64KiB"),
        (&["replay", "--block-bytes", "0"], "--block-bytes"),
        (&["replay", "--nodes", "0"], "--nodes"),
        (&["bench", "transfer", "--fabric", "pigeon"], "tcp"),
        (&["bench", "transfer", "--block", "1GiB"], "--window"),
        (&["bench", "transfer", "--fabric", "memcpy", "--target", "h:1"], "memcpy"),
        (&["bench", "store", "--value", "1GiB"], "--value"),
        (&["bench", "master", "--duration", "0"], "--duration"),
        (&["bench", "allocator", "--allocator", "buddy"], "slab"),
        (&["bench", "target", "--segment", "a"], "--metadata"),
        (&["bench", "transfer", "--connections", "17"], "1..=16"),
        (&["bench", "transfer", "--lanes", "17"], "1..=16"), // An alias of --connections.
        (&["bench", "target", "--metadata", "ftp://h:1"], "etcd://"),
        (&["get", "a", "--json"], "--output"),
        (&["repaly"], "replay"),
        (&[], "Usage"),
    ] {
        let output = run(args);
        assert_exit(&output, 2);
        assert!(stderr(&output).contains(hint), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_reader_that_leaves_early_ends_it_quietly() {
    for args in [
        &["doctor"][..],
        &["bench", "transfer", "--fabric", "memcpy", "--block", "4KiB", "--duration", "0.01"],
        &["--help"],
    ] {
        let mut child = snowskin(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Like `head -n 0`: closed before the first byte.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 1)), "{args:?}: {:?}", output.status);
        assert!(!stderr(&output).contains("panic"), "{}", stderr(&output));
    }
    let piped = Command::new("sh")
        .arg("-c")
        .arg(format!("'{}' doctor | head -n 1", env!("CARGO_BIN_EXE_snowskin")))
        .output()
        .unwrap();
    assert_eq!((stdout(&piped).lines().count(), stderr(&piped).as_str()), (1, ""));
}

#[test]
fn the_congestion_control_is_requested_on_both_ends() {
    let args = ["bench", "transfer", "--fabric", "tcp", "--op", "read", "--block", "4KiB", "--batch", "1"];
    let with = |name| run(&[&args[..], &["--duration", "0.02", "--congestion", name]].concat());
    assert_exit(&with("reno"), 0);
    // Each named fabric is started in this process first, so its refusal is reported here.
    let refused = with("no-such");
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("--fabric tcp"), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("congestion"), "{}", stderr(&refused));
}

#[test]
fn bench_transfer_prints_one_verified_row_per_combination() {
    let common = ["--block", "4KiB,64KiB", "--batch", "3", "--duration", "0.05", "--verify", "--json"];
    for fabric in ["tcp", "shm", "local"] {
        let output = run(&[&["bench", "transfer", "--fabric", fabric][..], &common].concat());
        assert_exit(&output, 0);
        let rows = json(&output);
        assert_eq!(rows.as_array().unwrap().len(), 4, "{rows}");
        for row in rows.as_array().unwrap() {
            assert_eq!(
                (row["fabric"].as_str(), row["batch"].as_u64(), row["threads"].as_u64()),
                (Some(fabric), Some(3), Some(1))
            );
            for field in ["gb_s", "p50_us", "p99_us", "p999_us", "cpu_s_per_gib", "block"] {
                assert!(row[field].as_f64().unwrap() > 0.0, "{field} in {row}");
            }
        }
    }
}

#[test]
fn bench_store_and_bench_master_print_their_rows() {
    for plain in [false, true] {
        let mut args = vec!["bench", "store", "--value", "4KiB", "--batch", "4", "--memory", "16MiB"];
        args.extend([
            "--op",
            "put,batch-put,get,batch-get,get-range,put-parts",
            "--duration",
            "0.05",
            "--verify",
            "--json",
        ]);
        args.extend(plain.then_some("--plain"));
        let output = run(&args);
        assert_exit(&output, 0);
        let rows = json(&output);
        let rows = rows.as_array().unwrap();
        let ops: Vec<_> = rows.iter().map(|row| row["op"].as_str().unwrap()).collect();
        assert_eq!(ops, ["put", "batch-put", "get", "batch-get", "get-range", "put-parts"]);
        for row in rows {
            assert!(row["misses"] == 0 && row["plain"] == plain, "{row}");
            assert!(row["verified"] == true && row["ops_s"].as_f64().unwrap() > 0.0, "{row}");
        }
    }

    let output = run(&[
        "bench",
        "master",
        "--objects",
        "1000",
        "--batch",
        "1,8",
        "--clients",
        "2",
        "--duration",
        "0.05",
        "--json",
    ]);
    assert_exit(&output, 0);
    let rows = json(&output);
    assert_eq!(rows.as_array().unwrap().len(), 6, "{rows}");
    for row in rows.as_array().unwrap() {
        assert_eq!(row["errors"], 0, "{row}");
        for field in ["ops_s", "keys_s", "p99_us", "bytes_per_object", "bytes_per_object_estimate"] {
            assert!(row[field].as_f64().unwrap() > 0.0, "{field} in {row}");
        }
    }
}

#[test]
fn bench_allocator_prints_published_results_beside_its_own() {
    // With 335,000 objects, the first refusal comes after 5 % of them.
    let common = ["--allocations", "40000", "--segment-gib", "1"];
    let workload = ["--workload", "random,kv,paired,cluster"];
    let output = run(&[&["bench", "allocator", "--json"], &workload[..], &common].concat());
    assert_exit(&output, 0);
    let rows = json(&output);
    let rows = rows.as_array().unwrap();
    let of = |workload: &str| rows.iter().filter(|row| row["workload"] == workload).collect::<Vec<_>>();
    let counts = ["random", "kv", "paired", "cluster"].map(|workload| of(workload).len());
    assert_eq!(counts, [2, 2, 2, 40]);
    for row in rows {
        let used = row["utilisation"].as_f64().unwrap();
        assert!(row["utilisation_min"].as_f64().unwrap() <= used && used <= 1.0, "{row}");
        let published = row["published"]["utilisation"].as_f64().unwrap();
        assert!(used > published && row["ns"].as_f64().unwrap() > 0.0, "{row}");
    }

    let output = run(&[&["bench", "allocator", "--workload", "kv,cluster"], &common[..]].concat());
    assert_exit(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("published") && text.contains("offset min") && text.contains("skewed"), "{text}");
}

#[test]
fn messages_name_each_cause_once_with_the_value_and_what_to_do() {
    let long = "k".repeat(1_100);
    let cases: &[(&[&str], i32, &[&str], &str)] = &[
        (&["put", &long, "/proc/self/status"], 2, &["1100 bytes", "1 to 1024", "…"], &long),
        (&["get", ""], 2, &["key is empty"], "INVALID"),
        (&["node", "--memory", "5"], 2, &["--memory 5B", "4KiB"], "INVALID_PARAMS"),
        (&["ls", "--tenant", &long[..65]], 2, &["--tenant", "1 to 64 bytes"], "check lengths"),
        (&["ls", "--config", "/nope.toml"], 2, &["/nope.toml: cannot be read"], "nope.toml:1"),
    ];
    for (args, code, parts, never) in cases {
        let output = run(args);
        assert_exit(&output, *code);
        let text = stderr(&output);
        for part in *parts {
            assert!(text.contains(part), "{args:?} lacks `{part}`: {text}");
        }
        assert!(!text.contains(never), "{args:?} says `{never}`: {text}");
    }
}

#[test]
fn help_lists_the_fabrics_and_shows_sizes_with_units() {
    let help =
        |command: &str| stdout(&run(&[command, "-h"])).split_whitespace().collect::<Vec<_>>().join(" ");
    for command in ["node", "put", "get", "gateway"] {
        assert!(
            help(command).contains("some of local,shm,nvlink,cxl,rdma,tcp,nvmeof"),
            "{command}: {}",
            help(command)
        );
    }
    assert!(help("node").contains("[default: 1GiB]"), "{}", help("node"));
    assert!(!help("node").contains("1073741824"));
}

#[test]
fn settings_are_shown_in_json_with_their_types() {
    let rows = json(&run(&["config", "show", "log", "--json"]));
    assert_eq!((rows[0]["key"].as_str(), rows[0]["value"].as_str()), (Some("log.format"), Some("text")));
    let rows = json(&run(&["config", "show", "master.store.lease_ttl_ms", "--json"]));
    assert!(rows[0]["value"].is_u64(), "{rows}");
}

#[test]
fn completions_and_manual_pages_cover_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = stdout(&run(&["completions", shell]));
        for word in ["drain-on-stop", "completions", "tenants"] {
            assert!(script.contains(word), "{shell} lacks {word}");
        }
    }
    assert_exit(&run(&["completions", "tcsh"]), 2);
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man1");
    assert_exit(&run(&["man", "--out", pages.to_str().unwrap()]), 0);
    for page in ["snowskin.1", "snowskin-put.1", "snowskin-admin-drain.1", "snowskin-bench-store.1"] {
        let text = std::fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.starts_with(".ie ") && text.contains(".SH NAME"), "{page}");
    }
    assert!(stdout(&run(&["man"])).contains(".SH NAME"));
}

#[test]
fn the_error_for_an_invalid_value_names_the_syntax_once() {
    let refused = run(&["ls", "--master", "127.0.0.1"]);
    assert_exit(&refused, 2);
    let text = stderr(&refused);
    assert!(text.contains("--master: ") && text.contains("`127.0.0.1` is not an address"), "{text}");
    assert_eq!(text.matches("write ").count(), 1, "{text}");
}

#[test]
fn a_build_reports_its_version_and_features() {
    let text = stdout(&run(&["--version", "--verbose"]));
    for part in ["snowskin ", "commit: ", "features: ", "target: ", "rustc: rustc "] {
        assert!(text.contains(part), "{text}");
    }
    assert!(cfg!(not(feature = "tcp")) || text.contains("tcp"), "{text}");
    assert_eq!(stdout(&run(&["--version"])).lines().count(), 1);
}

#[test]
fn health_reports_the_health_of_a_server_by_its_exit_code() {
    let master =
        common::Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json"]);
    let http = master.text("http");
    assert_exit(&run(&["health", &http]), 0);
    assert_exit(&run(&["health", &format!("http://{http}/")]), 0);
    let other = run(&["health", &master.text("rpc"), "--timeout-ms", "500"]);
    assert_exit(&other, 1);
    assert!(stderr(&other).contains("does not speak HTTP"), "{}", stderr(&other));
    drop(master);
    let gone = run(&["health", &http, "--timeout-ms", "500"]);
    assert_exit(&gone, 1);
    assert!(stderr(&gone).contains(&http), "{}", stderr(&gone));
}
