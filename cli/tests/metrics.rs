//! The metrics of master, node and client, and what uses them: the reference, the dashboard, the alerts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;

use common::{Daemon, PATIENCE, assert_exit, eventually, run, signal};
use store_client::{Client, ClientConfig, PutOptions, Store as _};

struct Cluster {
    master: Daemon,
    node: Daemon,
}

impl Cluster {
    fn start(master_args: &[&str]) -> Self {
        let args =
            [&["master", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json"], master_args].concat();
        let master = Daemon::start(&args);
        let rpc = master.text("rpc");
        let node =
            ["node", "--master", &rpc, "--memory", "8MiB", "--name", "n1", "--http", "127.0.0.1:0", "--json"];
        Self { node: Daemon::start(&node), master }
    }

    fn client(&self) -> Client {
        Client::connect(ClientConfig::new(self.master.text("rpc").parse().unwrap())).unwrap()
    }
}

/// Two masters of one cluster, in sync; a directory is their arbiter.
struct Members {
    leader: Daemon,
    _follower: Daemon,
    _arbiter: tempfile::TempDir,
}

impl Members {
    fn start() -> Self {
        let arbiter = tempfile::tempdir().unwrap();
        let record = format!("file://{}", arbiter.path().to_str().unwrap());
        let any = "127.0.0.1:0";
        let args = ["master", "--listen", any, "--http", any, "--ha", &record, "--ha-listen", any, "--json"];
        let [leader, follower] = [(); 2].map(|()| {
            let master = Daemon::start(&args);
            eventually("a master leads or follows", || {
                ["leading", "following"].iter().any(|role| is(&master, role))
            });
            master
        });
        Self { leader, _follower: follower, _arbiter: arbiter }
    }
}

fn is(master: &Daemon, role: &str) -> bool {
    value(&http(&master.text("http"), "/metrics").1, &format!("snowskin_master_ha_role{{role=\"{role}\"}}"))
        == 1.0
}

/// Status and body.
fn http(addr: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// Metric names as Prometheus stores them: counters end in `_total`.
fn families(text: &str) -> BTreeSet<String> {
    let family = |line: &str| {
        let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        // In Prometheus' plain format the name ends in `_total` already.
        let counter = || format!("{}_total", name.strip_suffix("_total").unwrap_or(name));
        Some(if kind == "counter" { counter() } else { name.to_owned() })
    };
    text.lines().filter_map(family).collect()
}

/// Every metric name in a text.
fn named(text: &str) -> BTreeSet<String> {
    let part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(|c| !part(c)).filter(|word| word.starts_with("snowskin_"));
    let family = |word: &str| {
        let word =
            ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word);
        word.to_owned()
    };
    words.map(family).collect()
}

fn file(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{text}")).parse().unwrap()
}

#[test]
fn the_reference_dashboard_and_alerts_name_the_metrics_that_there_are() {
    // Limits that are not set have no series.
    let limits =
        "[{name = \"default\", quota_bytes = 1048576, quota_objects = 100, quota_disk_bytes = 1048576}]";
    let journal = tempfile::tempdir().unwrap();
    let journal = journal.path().to_str().unwrap();
    let published = ["--kv-events-listen", "127.0.0.1:0"];
    let cluster =
        Cluster::start(&[&["--store-tenants", limits, "--journal", journal][..], &published].concat());
    let mut said = families(&http(&cluster.master.text("http"), "/metrics").1);
    said.extend(families(&http(&cluster.node.text("http"), "/metrics").1));
    said.extend(families(&cluster.client().metrics_text()));
    let rpc = cluster.master.text("rpc");
    let gateway = Daemon::start(&["gateway", "--listen", "127.0.0.1:0", "--master", &rpc, "--json"]);
    let (_, of_gateway) = http(&gateway.text("http"), "/metrics");
    said.extend(families(&of_gateway));

    let shared = tempfile::tempdir().unwrap();
    let packs = format!("{}:64MiB", shared.path().to_str().unwrap());
    let any = "127.0.0.1:0";
    let args = ["node", "--master", &rpc, "--memory", "8MiB", "--name", "n2", "--http", any, "--json"];
    let with_packs = Daemon::start(&[&args[..], &["--shared", &packs]].concat());
    let mut of_disks = BTreeSet::new();
    eventually("the node has its directory of packs", || {
        of_disks = families(&http(&with_packs.text("http"), "/metrics").1);
        of_disks.contains("snowskin_node_disk_ready")
    });
    said.extend(of_disks);
    // A master that has given extents of a pool away.
    let pool = shared.path().join("pool");
    std::fs::File::create(&pool).unwrap().set_len(64 << 20).unwrap();
    let pool = pool.to_str().unwrap();
    assert_exit(&run(&["cxl", "format", pool]), 0);
    let args = ["node", "--master", &rpc, "--name", "n3", "--cxl-pool", pool, "--cxl-count", "2", "--json"];
    let _in_pool = Daemon::start(&[&args[..], &["--engine-cxl-coherence", "hardware"]].concat());
    said.extend(families(&http(&cluster.master.text("http"), "/metrics").1));
    let members = Members::start();
    said.extend(families(&http(&members.leader.text("http"), "/metrics").1));

    let page = file("docs/reference/metrics.md");
    let row = |line: &str| Some(line.strip_prefix("| `snowskin_")?.split('`').next()?.to_owned());
    // Those of the Conductor are compared with the page by a test of its own.
    let here = page.lines().filter_map(row).filter(|name| !name.starts_with("conductor_"));
    let listed: BTreeSet<String> = here.map(|name| format!("snowskin_{name}")).collect();
    let missing: Vec<_> = said.difference(&listed).collect();
    assert!(missing.is_empty(), "add to docs/reference/metrics.md: {missing:?}");
    let gone: Vec<_> = listed.difference(&said).collect();
    assert!(gone.is_empty(), "not exported, remove from docs/reference/metrics.md: {gone:?}");

    let dashboard: serde_json::Value = serde_json::from_str(&file("deploy/grafana/snowskin.json")).unwrap();
    let mut used = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            used.extend(named(target["expr"].as_str().unwrap()));
        }
    }
    let alerts = file("deploy/prometheus/alerts.yml");
    let exprs = alerts.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    exprs.for_each(|expr| used.extend(named(expr)));
    let of_conductor = page.lines().filter_map(row).filter(|name| name.starts_with("conductor_"));
    said.extend(of_conductor.map(|name| format!("snowskin_{name}")));
    let unknown: Vec<_> = used.difference(&said).collect();
    assert!(used.len() > 30 && unknown.is_empty(), "not exported: {unknown:?}");
}

#[test]
fn what_a_client_does_is_seen_in_its_own_metrics_and_in_the_masters() {
    let cluster = Cluster::start(&[]);
    let mut client = cluster.client();
    assert!(client.put(b"a", &[7; 4096], &PutOptions::default()).unwrap());
    assert!(client.get(b"a").unwrap().is_some());
    assert!(client.get(b"b").unwrap().is_none());
    let text = client.metrics_text();
    for (series, expected) in [
        ("snowskin_client_hits_total", 1.0),
        ("snowskin_client_misses_total", 1.0),
        ("snowskin_client_read_bytes_total", 4096.0),
        ("snowskin_client_written_bytes_total", 4096.0),
        ("snowskin_client_checksum_mismatches_total", 0.0),
        ("snowskin_client_operation_seconds_count{op=\"get\"}", 2.0),
        ("snowskin_client_operation_seconds_count{op=\"put\"}", 1.0),
    ] {
        assert_eq!(value(&text, series), expected, "{series}");
    }
    let rails = text
        .lines()
        .filter_map(|line| line.strip_prefix("snowskin_engine_rail_bytes_total{")?.split(' ').nth(1));
    assert!(rails.map(|bytes| bytes.parse::<f64>().unwrap()).sum::<f64>() >= 8192.0, "{text}");
    let text = http(&cluster.master.text("http"), "/metrics").1;
    assert_eq!(value(&text, "snowskin_master_get_hits_total"), 1.0);
    assert_eq!(value(&text, "snowskin_master_segments"), 1.0);
    assert!(value(&text, "snowskin_master_request_seconds_count{op=\"Mount\"}") >= 1.0);
    let text = http(&cluster.node.text("http"), "/metrics").1;
    assert_eq!(value(&text, "snowskin_node_mounted"), 1.0);
    assert_eq!(value(&text, "snowskin_node_capacity_bytes"), f64::from(8 << 20));
}

#[test]
fn what_a_tenant_uses_and_what_a_drain_leaves_is_seen_at_the_master() {
    let cluster = Cluster::start(&[]);
    let (rpc, at) = (cluster.master.text("rpc"), cluster.master.text("http"));
    assert!(cluster.client().put(b"a", &[7; 4096], &PutOptions::default()).unwrap());
    let text = http(&at, "/metrics").1;
    assert_eq!(value(&text, "snowskin_master_tenant_objects{tenant=\"default\"}"), 1.0);
    assert!(value(&text, "snowskin_master_tenant_bytes{tenant=\"default\"}") >= 4096.0);
    // There is no other node to which the objects could be moved.
    common::assert_exit(&common::run(&["admin", "drain", "n1", "--master", &rpc]), 0);
    eventually("an object that the drain leaves", || {
        let text = http(&at, "/metrics").1;
        assert_eq!(value(&text, "snowskin_master_segments_draining"), 1.0);
        value(&text, "snowskin_master_drain_left_objects{reason=\"no_room\"}") == 1.0
    });
}

#[test]
fn ready_reports_whether_there_is_memory_and_health_whether_the_process_answers() {
    let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--json"]);
    let at = master.text("http");
    assert_eq!(http(&at, "/health").0, 200);
    let (status, body) = http(&at, "/ready");
    assert!(status == 503 && body.contains("no node has mounted"), "{status} {body}");
    drop(master);

    // Short, but not so short that a busy machine loses a node that is alive.
    let cluster = Cluster::start(&["--node-ttl-ms", "3000"]);
    let (master, node) = (cluster.master.text("http"), cluster.node.text("http"));
    assert_eq!(
        (http(&master, "/ready").0, http(&node, "/ready").0, http(&node, "/health").0),
        (200, 200, 200)
    );
    // The master does not answer: the node is alive, but not ready.
    signal(cluster.master.child.id(), "STOP");
    let mut body = String::new();
    eventually("a node that is not ready", || {
        let (status, text) = http(&node, "/ready");
        body = text;
        status == 503
    });
    assert!(body.contains("master does not answer"), "{body}");
    assert_eq!(http(&node, "/health").0, 200);
    // A master whose serving thread hangs reports that.
    signal(cluster.master.child.id(), "CONT");
}

#[test]
fn an_operation_has_one_number_in_the_error_and_in_the_masters_log() {
    let mut master = common::snowskin(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"])
        .args(["--log", "debug", "--log-format", "json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(master.stdout.take().unwrap()), &mut line)
        .unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    // A put without space: the master gets the request and refuses it.
    let rpc = ready["rpc"].as_str().unwrap();
    let mut client = Client::connect(ClientConfig::new(rpc.parse().unwrap())).unwrap();
    let error = client.put(b"a", b"b", &PutOptions::default()).unwrap_err();
    assert_eq!(error.code(), store_client::ErrorCode::NoSegment);
    let trace = client.trace().to_string();
    assert!(client.get(b"a").unwrap().is_none());
    assert_ne!(client.trace().to_string(), trace, "the next operation has another");
    signal(master.id(), "TERM");
    let output = master.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let records = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let ops: Vec<String> = records
        .filter(|record| record["trace"] == trace)
        .map(|record| record["op"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(ops, ["PutStart"], "{log}");
}
