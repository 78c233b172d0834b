//! A master, a node, and the commands that use them.

mod common;

use std::io::Write as _;
use std::process::Stdio;

use common::{Daemon, Store, assert_exit, eventually, json, run, snowskin, stderr, stdout};
use store_client::{RpcConfig, RpcConnection};
use store_core::Key;
use store_core::message::{Get, LeaseWanted};
use te_core::testkit::pattern;

#[test]
fn an_object_is_put_listed_fetched_shown_and_removed() {
    let store = Store::start_with(&["--lease-ms", "60000"]);
    let dir = tempfile::tempdir().unwrap();
    let (file, copy) = (dir.path().join("in.bin"), dir.path().join("out.bin"));
    let bytes = pattern(1, 300_000);
    std::fs::write(&file, &bytes).unwrap();

    let put = store.run(&["put", "kv/a", file.to_str().unwrap(), "--json"]);
    assert_exit(&put, 0);
    assert_eq!(json(&put)["bytes"], 300_000);
    assert_exit(&store.run(&["put", "other", file.to_str().unwrap()]), 0);

    let listed = store.run(&["ls", "kv/", "--json"]);
    assert_eq!(
        (json(&listed)["key"].as_str(), json(&listed)["bytes"].as_u64()),
        (Some("kv/a"), Some(300_000))
    );
    let all = stdout(&store.run(&["ls"]));
    assert!(all.contains("kv/a") && all.contains("other") && all.contains("293 KiB"), "{all}");
    assert_eq!(stdout(&store.run(&["ls", "--json", "--limit", "1"])).lines().count(), 1);

    let got = store.run(&["get", "kv/a", "-o", copy.to_str().unwrap(), "--json"]);
    assert_exit(&got, 0);
    assert_eq!(std::fs::read(&copy).unwrap(), bytes);
    assert_eq!(store.run(&["get", "kv/a"]).stdout, bytes);
    let part = |more: &[&str]| store.run(&[&["get", "kv/a"], more].concat());
    assert_eq!(part(&["--offset", "64KiB", "--length", "70000"]).stdout, bytes[65_536..135_536]);
    assert_eq!(part(&["--length", "1"]).stdout, bytes[..1]);
    assert_eq!(part(&["--offset", "299999"]).stdout, bytes[299_999..]);
    for beyond in [["--offset", "300000"].as_slice(), &["--offset", "299999", "--length", "2"]] {
        let refused = part(beyond);
        assert_exit(&refused, 1);
        assert!(stderr(&refused).contains("stat"), "{}", stderr(&refused));
    }
    assert_exit(&part(&["--length", "0"]), 2);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file is left");

    let object = json(&store.run(&["stat", "kv/a", "--json"]));
    assert_eq!(
        (object["bytes"].as_u64(), object["replicas"][0]["segment"].as_str()),
        (Some(300_000), Some("n1"))
    );
    let missing = store.run(&["admin", "tasks", "77", "78"]);
    assert_exit(&missing, 3);
    assert!(stderr(&missing).contains("77: ") && stderr(&missing).contains("78: "), "{}", stderr(&missing));
    assert_eq!(stdout(&missing), "");
    let cluster = json(&store.run(&["stat", "--json"]));
    assert_eq!((cluster["objects"].as_u64(), cluster["nodes"].as_u64()), (Some(2), Some(1)));
    assert!(stdout(&store.run(&["stat"])).contains("16 MiB"));

    // A reader returns its lease with its last message, which the master may handle a moment later. Without
    // that, the lease would last longer than this waits.
    assert_eq!(store.run(&["get", "kv/a"]).stdout, bytes);
    assert_exit(&store.run(&["stat", "kv/a"]), 0);
    eventually("the return of the lease", || store.run(&["rm", "kv/a"]).status.code() == Some(0));
    // A reader still has a lease on the other object.
    let mut reader = RpcConnection::connect(store.address.parse().unwrap(), RpcConfig::default()).unwrap();
    let (_, found) = reader.call::<Get>(&LeaseWanted::Quick, [Key(b"other")].into_iter()).unwrap();
    assert_eq!(found.filter(|found| found.is_ok()).count(), 1);
    let refused = store.run(&["rm", "other"]);
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("force"), "{}", stderr(&refused));
    assert_exit(&store.run(&["rm", "--force", "other"]), 0);
    assert_eq!(stdout(&store.run(&["ls", "--json"])), "");
}

#[test]
fn bytes_from_stdin_come_back_and_a_taken_key_is_kept_unless_replaced() {
    let store = Store::start();
    let put = |text: &str, more: &[&str]| {
        let args = [&["put", "greeting", "-"], more].concat();
        let mut child = snowskin(&args)
            .args(["--master", &store.address])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    assert_exit(&put("hello\n", &[]), 0);
    let taken = put("goodbye\n", &[]);
    assert_exit(&taken, 1);
    assert!(stderr(&taken).contains("--replace"), "{}", stderr(&taken));
    assert_eq!(stdout(&store.run(&["get", "greeting"])), "hello\n");
    assert_exit(&put("goodbye\n", &["--replace"]), 0);
    assert_eq!(stdout(&store.run(&["get", "greeting"])), "goodbye\n");
    assert_exit(&put("", &[]), 2);
}

#[test]
fn objects_are_placed_on_the_preferred_segments() {
    let mut args = vec!["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"];
    args.extend(["--allocator", "slab", "--allocation-strategy", "random", "--store-slow-start-ms", "0"]);
    let master = Daemon::start(&args);
    let address = master.text("rpc");
    let node =
        |name| Daemon::start(&["node", "--master", &address, "--memory", "16MiB", "--name", name, "--json"]);
    let _nodes = [node("n1"), node("n2"), node("n3")];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("in.bin");
    std::fs::write(&file, vec![7; 100_000]).unwrap();
    let run = |args: &[&str]| snowskin(args).env("SNOWSKIN_MASTER", &address).output().unwrap();
    let put = |key: &str, more: &[&str]| run(&[&["put", key, file.to_str().unwrap()], more].concat());
    let segments = |key: &str| -> Vec<String> {
        let object = json(&run(&["stat", key, "--json"]));
        let name = |replica: &serde_json::Value| replica["segment"].as_str().unwrap().to_owned();
        object["replicas"].as_array().unwrap().iter().map(name).collect()
    };
    let wish = ["--prefer-segment", "n3", "--prefer-segment", "n1", "--replicas", "2"];
    assert_exit(&put("in-order", &wish), 0);
    assert_eq!(segments("in-order"), ["n3", "n1"]);
    assert_exit(
        &put("without", &["--exclude-segment", "n1", "--exclude-segment", "n3", "--replicas", "3"]),
        0,
    );
    assert_eq!(segments("without"), ["n2"]);
    assert_exit(&put("near", &["--same-node", "n2", "--replicas", "2", "--distinct-nodes"]), 0);
    assert_eq!((segments("near").len(), segments("near")[0].as_str()), (2, "n2"));
    let unknown = put("nowhere", &["--prefer-segment", "n9"]);
    assert_exit(&unknown, 1);
    assert!(stderr(&unknown).contains("n9: no such segment"), "{}", stderr(&unknown));
    let nine = ["--exclude-segment", "n1"].repeat(9);
    assert_exit(&put("too-many", &nine), 2);
    let cluster = json(&run(&["stat", "--json"]));
    for segment in cluster["segment_list"].as_array().unwrap() {
        let (free, used) = (&segment["free_bytes_largest"], segment["utilisation"].as_f64().unwrap());
        assert!(free.as_u64().unwrap() < 16 << 20 && used > 0.005 && used < 0.05, "{segment}");
    }
    assert!(stdout(&run(&["stat"])).contains("largest free"));
    assert_exit(&run(&["master", "--allocator", "buddy"]), 2);
}

#[test]
fn pins_groups_and_times_to_live_are_put_and_explained() {
    let store = Store::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("in.bin");
    std::fs::write(&file, b"bytes").unwrap();
    let put = |key: &str, more: &[&str]| {
        assert_exit(&store.run(&[&["put", key, file.to_str().unwrap()], more].concat()), 0);
    };
    put("hard", &["--hard-pin"]);
    put("soft", &["--soft-pin"]);
    put("of-group", &["--group", "g"]);
    put("pin-of-group", &["--group", "g", "--hard-pin"]);
    put("plain", &[]);
    put("mortal", &["--ttl-ms", "1"]);
    eventually("the end of its time to live", || store.run(&["get", "mortal"]).status.code() == Some(3));

    let keys = ["hard", "soft", "of-group", "plain"];
    let output = store.run(&[&["admin", "evict", "--explain", "--json"], &keys[..]].concat());
    assert_exit(&output, 0);
    let explained = json(&output);
    let kept: Vec<_> =
        keys.iter().enumerate().map(|(at, _)| explained["keys"][at]["kept"].as_str()).collect();
    assert_eq!(kept, [Some("kept: hard pin"), Some("kept: soft pin"), Some("kept: group"), None]);
    let report = &explained["report"];
    assert_eq!((report["policy"].as_str(), report["kept_hard_pinned"].as_u64()), (Some("trial"), Some(2)));
    assert_eq!(report["expired_total"], 1);
    assert_eq!(explained["next"][0]["key"], "plain");

    let output = store.run(&["admin", "evict", "--explain", "no-such-key"]);
    assert_exit(&output, 3);
    let text = stdout(&output);
    assert!(text.contains("no such object") && text.contains("evicted next"), "{text}");
    assert_exit(&store.run(&["admin", "evict"]), 2);
}

#[test]
fn a_missing_key_ends_with_3_and_writes_nothing() {
    let store = Store::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out");
    let got = store.run(&["get", "missing", "-o", file.to_str().unwrap()]);
    assert_exit(&got, 3);
    assert!(stderr(&got).contains("missing: no such object"), "{}", stderr(&got));
    assert!(!file.exists());
    assert_exit(&store.run(&["stat", "missing"]), 3);
    let removed = store.run(&["rm", "missing"]);
    assert_exit(&removed, 3);
    let text = stderr(&removed);
    assert!(text.contains("missing: no such object") && !text.contains("compute it"), "{text}");
    let removed = store.run(&["rm", "missing", "--json"]);
    assert_exit(&removed, 3);
    assert_eq!(
        (json(&removed)["removed"].as_bool(), json(&removed)["error"].as_str()),
        (Some(false), Some("KEY_NOT_FOUND"))
    );
}

#[test]
fn without_a_master_every_command_explains_how_to_start_one() {
    for args in [&["ls"][..], &["stat"], &["rm", "a"], &["get", "a"], &["put", "a", "/proc/self/status"]] {
        let output = run(&[args, &["--master", "127.0.0.1:9"]].concat());
        assert_exit(&output, 1);
        let text = stderr(&output);
        assert!(
            text.contains("no master at 127.0.0.1:9") && text.contains("snowskin master"),
            "{args:?}: {text}"
        );
    }
    let output = run(&["ls", "--master", "nonsense"]);
    assert_exit(&output, 2);
    assert!(stderr(&output).contains("host:port"), "{}", stderr(&output));
}

#[test]
fn an_object_that_is_too_large_for_the_pool_is_refused_with_advice() {
    let store = Store::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("big");
    std::fs::write(&file, vec![7; 20 << 20]).unwrap();
    let output = store.run(&["put", "big", file.to_str().unwrap()]);
    assert_exit(&output, 1);
    let text = stderr(&output);
    assert!(text.contains("larger than every segment") && text.contains("snowskin stat"), "{text}");
    assert!(!text.contains("waiting"), "another node does not help: {text}");
}

#[test]
fn master_and_node_stop_in_order() {
    let store = Store::start();
    let Store { node, master, address } = store;
    assert_eq!(node.terminate(), Some(0));
    let stat = json(&run(&["stat", "--json", "--master", &address]));
    assert_eq!(stat["segments"].as_u64(), Some(0), "the node unmounted its memory");
    assert_eq!(master.terminate(), Some(0));
}

#[test]
fn a_port_that_is_taken_is_named() {
    let first = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
    let address = first.text("rpc");
    let second = run(&["master", "--listen", &address, "--http", "none"]);
    assert_exit(&second, 1);
    assert!(stderr(&second).contains(&address), "{}", stderr(&second));
}

#[test]
fn doctor_finds_whether_a_master_answers() {
    let store = Store::start();
    let verdict = |report: &serde_json::Value| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["check"] == "master").unwrap()["verdict"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let there = store.run(&["doctor", "--json", "--ports", "0"]);
    assert_eq!(verdict(&json(&there)), "ok");
    let gone = run(&["doctor", "--json", "--ports", "0", "--master", "127.0.0.1:9"]);
    assert_eq!(verdict(&json(&gone)), "fail");
    assert_exit(&gone, 1);
    assert!(stdout(&run(&["doctor"])).contains("open files"));
}

#[test]
fn the_error_without_the_cluster_secret_names_the_secret() {
    let secret = ["--cluster-secret", "sesame"];
    let master = Daemon::start(
        &[&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"], &secret[..]].concat(),
    );
    let address = master.text("rpc");
    let node = ["node", "--master", &address, "--memory", "16MiB", "--name", "n1", "--json"];
    let _node = Daemon::start(&[&node[..], &secret].concat());
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let with = |args: &[&str], more: &[&str]| run(&[args, &["--master", &address], more].concat());

    let refused = with(&["put", "k", file], &[]);
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("it requires the cluster secret"), "{}", stderr(&refused));
    let refused = with(&["put", "k", file], &["--cluster-secret", "simsim"]);
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("compare the cluster secret"), "{}", stderr(&refused));
    assert_exit(&with(&["put", "k", file], &secret), 0);
    let missed = with(&["get", "k"], &[]);
    assert_exit(&missed, 1);
    assert!(stderr(&missed).contains("it requires the cluster secret"), "{}", stderr(&missed));
}

#[test]
fn tenants_are_separate_and_bulk_commands_act_for_one_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tenants.toml");
    let text =
        "[[tenants]]\nname = \"a\"\nsecret = \"sesame\"\n[[tenants]]\nname = \"b\"\nquota_objects = 2\n";
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let admin = ["--store-admin-secret", "root"];
    let daemon = ["master", "--listen", "127.0.0.1:0", "--http", "none", "--json", "--tenants", file];
    let master = Daemon::start(&[&daemon[..], &admin].concat());
    let address = master.text("rpc");
    let node = [
        "node",
        "--master",
        &address,
        "--memory",
        "16MiB",
        "--name",
        "n1",
        "--http-listen",
        "none",
        "--json",
    ];
    let _node = Daemon::start(&[&node[..], &["--admin-secret", "root"]].concat());
    let store = |args: &[&str]| run(&[args, &["--master", &address]].concat());
    let a = |args: &[&str]| store(&[args, &["--tenant", "a", "--tenant-secret", "sesame"]].concat());
    let b = |args: &[&str]| store(&[args, &["--tenant", "b"]].concat());

    for args in [&["ls"][..], &["ls", "--tenant", "a"], &["ls", "--tenant", "c"]] {
        let refused = store(args);
        assert_exit(&refused, 1);
        assert!(stderr(&refused).contains("refused tenant"), "{}", stderr(&refused));
    }
    for key in ["k1", "k2", "other"] {
        assert_exit(&a(&["put", key, file]), 0);
        assert_exit(&b(&["put", key, file]), 0);
    }
    assert_eq!(stdout(&a(&["ls", "--json", "--regex", "^k[0-9]$"])).lines().count(), 2);
    assert_eq!(stdout(&b(&["ls", "--json"])).lines().count(), 2, "its quota");
    assert_exit(&a(&["ls", "--regex", "("]), 2);
    assert_eq!(json(&a(&["rm", "--regex", "^k", "--json"]))["removed"], 2);
    assert_eq!(stdout(&a(&["ls", "--json"])).lines().count(), 1);
    assert_eq!(json(&b(&["rm", "--all", "--json"]))["removed"], 2);
    assert_eq!(stdout(&a(&["ls", "--json"])).lines().count(), 1, "not those of the other tenant");

    let refused = a(&["admin", "tenants", "--set", "c"]);
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("admin secret"), "{}", stderr(&refused));
    let root = |args: &[&str]| store(&[args, &["--tenant", "a", "--admin-secret", "root"]].concat());
    let listed = stdout(&root(&["admin", "tenants", "--set", "c", "--quota", "1MiB", "--json"]));
    assert_eq!(listed.lines().count(), 3, "{listed}");
    let listed = stdout(&root(&["admin", "tenants", "--remove", "a", "--force"]));
    assert!(listed.contains("1.0 MiB") && !listed.contains("\na "), "{listed}");
}

#[test]
fn a_benchmark_does_not_touch_a_store_with_objects_of_others() {
    let store = Store::start();
    assert_exit(&store.run(&["put", "greeting", "/proc/self/status"]), 0);
    let bench = |more: &[&str]| {
        let args = ["bench", "store", "--op", "get", "--value", "4KiB", "--duration", "0.01", "--json"];
        run(&[&args[..], &["--master", &store.address], more].concat())
    };
    let refused = bench(&[]);
    assert_exit(&refused, 1);
    let text = stderr(&refused);
    assert!(text.contains("holds an object") && text.contains("--yes"), "{text}");
    assert_eq!(stdout(&store.run(&["ls", "--json"])).lines().count(), 1, "nothing was put");
    let refused = run(&["bench", "master", "--objects", "1", "--master", &store.address]);
    assert_exit(&refused, 1);
    assert!(stderr(&refused).contains("--yes"), "{}", stderr(&refused));

    assert_exit(&bench(&["--yes"]), 0);
    // The benchmark may have evicted it.
    store.run(&["rm", "--force", "greeting"]);
    // Objects that an earlier benchmark left behind are ignored.
    assert_exit(&bench(&[]), 0);
    assert_exit(&run(&["bench", "store", "--yes"]), 2);
}

#[test]
fn a_put_that_stored_fewer_replicas_than_requested_reports_it() {
    let store = Store::start();
    let put = store.run(&["put", "k", "/proc/self/status", "--replicas", "2", "--json"]);
    assert_exit(&put, 0);
    let stored = json(&put);
    assert_eq!((stored["replicas"].as_u64(), stored["replicas_wanted"].as_u64()), (Some(1), Some(2)));
    assert!(stderr(&put).contains("stored 1 of 2 copies"), "{}", stderr(&put));
    let put = store.run(&["put", "other", "/proc/self/status"]);
    assert_eq!(stderr(&put), "");
}

#[test]
fn a_pattern_that_is_empty_removes_nothing() {
    let store = Store::start();
    assert_exit(&store.run(&["put", "greeting", "/proc/self/status"]), 0);
    let refused = store.run(&["rm", "--regex", ""]);
    assert_exit(&refused, 2);
    assert!(stderr(&refused).contains("rm --all"), "{}", stderr(&refused));
    assert_exit(&store.run(&["rm", ""]), 2);
    assert_eq!(stdout(&store.run(&["ls", "--json"])).lines().count(), 1);
    assert_eq!(json(&store.run(&["rm", "--all", "--force", "--json"]))["removed"], 1);
}

#[test]
fn identifiers_are_texts_in_json_and_are_accepted_as_texts() {
    let store = Store::start();
    let node = ["node", "--master", &store.address, "--memory", "16MiB", "--name", "n2", "--json"];
    let _other = Daemon::start(&node);
    assert_exit(&store.run(&["put", "k", "/proc/self/status", "--prefer-segment", "n1"]), 0);
    let object = json(&store.run(&["stat", "k", "--json"]));
    assert!(object["generation"].as_str().is_some_and(|text| text.parse::<u64>().is_ok()), "{object}");
    let stat = json(&store.run(&["stat", "--json"]));
    assert!(stat["lineage"].is_string() && stat["lineage"] == stat["epoch"] && stat["term"] == "1", "{stat}");
    let nodes = json(&store.run(&["admin", "nodes", "--json"]));
    assert!(nodes[0]["incarnation"].is_string() && nodes[0]["node"].is_string(), "{nodes}");
    assert!(nodes[0]["name"].as_str().is_some_and(|name| name == "n1" || name == "n2"), "{nodes}");

    let copied = json(&store.run(&["admin", "copy", "k", "--wait", "--json"]));
    let id = copied[0]["id"].as_str().expect("a text").to_owned();
    let task = store.run(&["admin", "tasks", &id, "--json"]);
    assert_exit(&task, 0);
    assert_eq!(json(&task)[0]["key"], "k");
    let table = stdout(&store.run(&["admin", "tasks"]));
    assert!(table.lines().nth(1).is_some_and(|line| line.contains("n1") || line.contains("n2")), "{table}");
}
