//! What a master does for well-behaved clients.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{assert_greets, assert_serves, connect, exists, hello, read_answer, start, start_with};
use store_core::{MasterConfig, Secret, TenantConfig};
use store_master::{Config, MasterServer};

#[test]
fn pipelined_requests_are_answered_in_order() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    let all: Vec<u8> = (1..=500).flat_map(|id| exists(id, &[b"a", b"b"])).collect();
    stream.write_all(&all).unwrap();
    for id in 1..=500 {
        let answer = read_answer(&mut stream).unwrap();
        assert_eq!((answer.header.request_id, answer.header.status), (id, 0));
    }
}

#[test]
fn a_unix_socket_serves_and_is_removed_at_the_end() {
    let path = std::env::temp_dir().join(format!("snowskin-master-{}.sock", std::process::id()));
    let config = Config { rpc_unix: Some(path.clone()), ..common::config() };
    let master = start_with(config.clone());
    assert_greets(&mut UnixStream::connect(&path).unwrap());
    assert!(MasterServer::bind(config.clone()).is_err(), "the socket of a live master was taken over");
    master.stop().unwrap();
    assert!(!path.exists());
    // The socket of a dead master is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let master = start_with(config);
    assert_greets(&mut UnixStream::connect(&path).unwrap());
    master.stop().unwrap();
}

#[test]
fn an_address_in_use_is_named() {
    let master = start();
    let config = Config { rpc_listen: master.rpc_addr(), ..common::config() };
    let error = MasterServer::bind(config).unwrap_err().to_string();
    assert!(error.contains(&master.rpc_addr().to_string()) && error.contains("rpc_listen"), "{error}");
}

#[test]
fn a_setting_out_of_its_range_is_named() {
    let config = Config { store: MasterConfig { lease_ttl_ms: 0, ..Default::default() }, ..common::config() };
    let error = MasterServer::bind(config).unwrap_err().to_string();
    assert!(error.contains("lease_ttl_ms"), "{error}");
}

#[test]
fn a_stop_answers_what_was_read() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    assert_greets(&mut stream);
    stream.write_all(&[hello(1), exists(2, &[b"k"])].concat()).unwrap();
    // Both requests have arrived when the first is answered, because they were sent together.
    assert_eq!(read_answer(&mut stream).unwrap().header.request_id, 1);
    master.stop().unwrap();
    assert_eq!(read_answer(&mut stream).unwrap().header.request_id, 2);
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn a_stop_does_not_wait_for_peers_that_do_not_read() {
    let config = Config { stop_ms_max: 50, backlog_bytes_max: 1 << 20, ..common::config() };
    let master = start_with(config);
    let mut stream = connect(master.rpc_addr());
    stream.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let frame = exists(1, &vec![b"k".as_slice(); 4096]);
    while stream.write_all(&frame).is_ok() {}
    master.stop().unwrap();
}

#[test]
fn health_and_metrics_are_served() {
    let master = start();
    let http = master.http_addr().unwrap();
    assert_serves(master.rpc_addr());
    let mut stream = connect(master.rpc_addr());
    stream.write_all(b"junk junk junk junk junk").unwrap();
    let _ = read_answer(&mut stream).unwrap();

    let (status, body) = fetch(http, "/health");
    assert_eq!(status, 200);
    assert!(body.contains("\"status\":\"ok\"") && body.contains("\"epoch\":7"), "{body}");
    let (status, body) = fetch(http, "/ready");
    assert_eq!(status, 503, "{body}");
    let (status, body) = fetch(http, "/metrics");
    assert_eq!(status, 200);
    for line in [
        "snowskin_master_requests_total{op=\"Hello\",result=\"OK\"} 1",
        "snowskin_master_streams_broken_total 1",
        "snowskin_master_active_nodes 0",
        "snowskin_master_capacity_bytes 0",
        "snowskin_master_allocated_bytes 0",
        "snowskin_master_quarantined_bytes 0",
        "snowskin_master_evictions_total 0",
        "snowskin_master_puts_abandoned_total 0",
        "snowskin_master_zombies_total 0", // alias
        "# HELP snowskin_master_zombies_total Deprecated: use snowskin_master_puts_abandoned_total.",
        "snowskin_master_eviction_kept_objects{reason=\"hard_pinned\"} 0",
        "snowskin_master_eviction_passed_over_total{reason=\"leased\"} 0",
        "snowskin_master_eviction_looks_total 0",
        "snowskin_master_epoch 7",
        "snowskin_master_tenant_objects{tenant=\"default\"} 0",
        "snowskin_master_tenant_refusals_total{tenant=\"default\"} 0",
        "snowskin_master_tasks{state=\"pending\"} 0",
        "snowskin_master_tasks_ended_total{state=\"failed\"} 0",
        "snowskin_master_segments_draining 0",
        "snowskin_master_drain_left_objects{reason=\"no_room\"} 0",
        "snowskin_master_extra_replicas 0",
        "snowskin_master_bad_replicas_dropped_total 0",
    ] {
        assert!(body.lines().any(|found| found == line), "{line} is not in\n{body}");
    }
    let resident = body.lines().find_map(|line| line.strip_prefix("snowskin_master_resident_bytes "));
    assert!(resident.unwrap().parse::<u64>().unwrap() > 1 << 20);
    assert_eq!(fetch(http, "/nothing").0, 404);
}

#[test]
fn every_tenant_has_its_own_series_whatever_its_name_is() {
    let hostile = "a\"} 7\n# EOF\\";
    let limited = TenantConfig {
        name: hostile.into(),
        quota_bytes: Some(1 << 20),
        quota_objects: Some(9),
        quota_disk_bytes: Some(1 << 30),
        guaranteed_bytes: 4096,
        ..TenantConfig::default()
    };
    let store = MasterConfig {
        multi_tenants: true,
        admin_secret: Secret::new(b"sesame"),
        tenants: vec![limited, TenantConfig { name: "b".into(), ..TenantConfig::default() }],
        ..MasterConfig::default()
    };
    let master = start_with(Config { store, ..common::config() });
    let (status, body) = fetch(master.http_addr().unwrap(), "/metrics");
    assert_eq!(status, 200);
    let of_tenants: BTreeSet<&str> =
        body.lines().filter_map(|line| line.strip_prefix("snowskin_master_tenant_")).collect();
    let escaped = r#"{tenant="a\"} 7\n# EOF\\"}"#;
    let mut expected = BTreeSet::new();
    for (name, a, b) in [
        ("objects", Some(0), Some(0)),
        ("bytes", Some(0), Some(0)),
        ("held_bytes", Some(0), Some(0)),
        ("guaranteed_bytes", Some(4096), Some(0)),
        ("quota_bytes", Some(1 << 20), None),
        ("quota_objects", Some(9), None),
        ("disk_bytes", Some(0), Some(0)),
        ("quota_disk_bytes", Some(1 << 30), None),
        ("evictions_total", Some(0), Some(0)),
        ("refusals_total", Some(0), Some(0)),
    ] {
        expected.extend(a.map(|value| format!("{name}{escaped} {value}")));
        expected.extend(b.map(|value| format!("{name}{{tenant=\"b\"}} {value}")));
    }
    assert_eq!(of_tenants, expected.iter().map(String::as_str).collect());
    master.stop().unwrap();
}

fn fetch(addr: SocketAddr, path: &str) -> (u16, String) {
    let mut stream: TcpStream = connect(addr);
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}
