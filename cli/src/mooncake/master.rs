//! `mooncake_master`. Its flags: `mooncake-store/src/master.cpp` of Mooncake at commit 3b5a5941.
//!
//! Where a flag is not given, this program's own default counts, with one exception: as Mooncake's, this
//! master listens on all addresses, because users' commands rely on that.

use std::net::SocketAddr;

use super::gflags::{Flag, Values};
use super::{Native, address, millis, parsed, port, towards};
use crate::exit::Failure;

pub(super) const FLAGS: &[Flag] = &[
    Flag::used("config_path"),
    Flag::used("rpc_port"),
    Flag::used("port"),
    Flag::used("rpc_address"),
    Flag::used("metrics_port"),
    Flag::used("metrics_host"),
    Flag::switch("enable_http_metadata_server"),
    Flag::used("http_metadata_server_port"),
    Flag::used("http_metadata_server_host"),
    Flag::used("default_kv_lease_ttl"),
    Flag::used("default_kv_soft_pin_ttl"),
    Flag::used("eviction_ratio"),
    Flag::used("eviction_high_watermark_ratio"),
    Flag::used("client_ttl"),
    Flag::used("client_live_ttl_sec"),
    Flag::used("put_start_discard_timeout_sec"),
    Flag::used("put_start_release_timeout_sec"),
    Flag::used("memory_allocator"),
    Flag::used("allocation_strategy"),
    Flag::switch("enable_multi_tenants"),
    Flag::used("dynamic_replication_mode"),
    Flag::used("dynamic_replication_heat_window_seconds"),
    Flag::used("dynamic_replication_admission_qps_threshold"),
    Flag::used("dynamic_replication_max_memory_replicas"),
    Flag::used("max_total_finished_tasks"),
    Flag::used("max_total_pending_tasks"),
    Flag::used("max_total_processing_tasks"),
    Flag::used("pending_task_timeout_sec"),
    Flag::used("processing_task_timeout_sec"),
    Flag::used("max_retry_attempts"),
    // One thread serves, and connections have limits of their own.
    Flag::moot("rpc_thread_num"),
    Flag::moot("max_threads"),
    Flag::moot("rpc_conn_timeout_seconds"),
    Flag::moot_switch("rpc_enable_tcp_no_delay"),
    Flag::moot_switch("enable_metric_reporting"),
    Flag::moot("max_kv_soft_pin_ttl"),
    Flag::moot_switch("allow_evict_soft_pinned_objects"),
    Flag::used("cluster_id"),
    Flag::moot("pod_name"),
    Flag::moot("pod_namespace"),
    Flag::lacking("rpc_interface"),
    // High availability.
    Flag::switch("enable_ha"),
    Flag::used("ha_backend_type"),
    Flag::used("ha_backend_connstring"),
    Flag::used("etcd_endpoints"),
    // The masters send each other their log themselves.
    Flag::moot_switch("enable_oplog"),
    Flag::moot("oplog_poll_interval_ms"),
    Flag::moot("oplog_batch_max_entries"),
    Flag::moot("batch_oplog_retry_timeout_sec"),
    Flag::elsewhere_switch("enable_snapshot", JOURNAL),
    Flag::elsewhere_switch("enable_snapshot_restore", JOURNAL),
    Flag::moot("snapshot_interval_seconds"),
    Flag::moot("snapshot_child_timeout_seconds"),
    Flag::moot("snapshot_retention_count"),
    Flag::moot("snapshot_object_store_type"),
    Flag::moot("snapshot_payload_store_type"),
    Flag::moot("snapshot_payload_backend_type"),
    Flag::moot("snapshot_catalog_store_type"),
    Flag::moot("snapshot_catalog_backend_type"),
    Flag::moot("snapshot_catalog_store_connstring"),
    Flag::moot("snapshot_catalog_backend_connstring"),
    Flag::moot("snapshot_backup_dir"),
    // Tiers below memory.
    Flag::elsewhere_switch("enable_offload", DISKS),
    Flag::elsewhere_switch("offload_on_evict", DISKS),
    Flag::moot_switch("offload_force_evict"),
    Flag::moot("offloading_queue_limit"),
    Flag::moot("offload_cap_ratio"),
    Flag::moot_switch("promotion_on_hit"),
    Flag::moot("promotion_admission_threshold"),
    Flag::moot("promotion_queue_limit"),
    Flag::moot("promotion_max_per_heartbeat"),
    Flag::elsewhere("root_fs_dir", SHARED),
    Flag::moot("global_file_segment_size"),
    Flag::moot_switch("enable_disk_eviction"),
    Flag::moot("quota_bytes"),
    Flag::moot("nof_eviction_ratio"),
    Flag::moot("nof_eviction_high_watermark_ratio"),
    Flag::moot("nof_heartbeat_interval_sec"),
    Flag::moot("nof_heartbeat_probe_timeout_ms"),
    Flag::moot("nof_heartbeat_failures_threshold"),
    Flag::lacking_switch("enable_cxl"),
    Flag::moot("cxl_path"),
    Flag::moot("cxl_size"),
    // Events and cleaning.
    Flag::switch("enable_kv_events"),
    Flag::used("kv_events_bind_endpoint"),
    Flag::used("kv_events_backend_id"),
    Flag::moot_switch("kv_events_emit_legacy_compat"),
    Flag::moot_switch("kv_events_emit_object_key"),
    Flag::moot("kv_events_queue_capacity"),
    Flag::moot("kv_events_model_name"),
    Flag::moot("kv_events_tenant_id"),
    Flag::moot("kv_events_additional_salt"),
    Flag::moot("kv_events_lora_name"),
    Flag::moot("kv_events_block_size"),
    Flag::moot("kv_events_dp_rank"),
    Flag::lacking_switch("enable_metadata_cleanup_on_timeout"),
    Flag::moot("tenant_quota_connector_type"),
    Flag::lacking("tenant_quota_connector_uri"),
];

const JOURNAL: &str = "`snowskin master --journal DIR` keeps its state, and several masters have it all";
const DISKS: &str = "objects are copied to disks where nodes have them: `snowskin node --disk PATH:SIZE`";
const SHARED: &str = "name it to the nodes, with the bytes of each: `snowskin node --shared DIR:SIZE`";
/// The cluster of who names none.
pub(super) const CLUSTER: &str = "mooncake_cluster";

const DAY_MS: u64 = 86_400_000;
/// The longest part of a lease that is kept for drift of clocks.
const LEASE_GUARD_MS_MAX: u64 = 100;

pub(super) fn translate(values: &Values) -> Result<Native, Failure> {
    let mut native = vec!["master".to_owned()];
    native.extend(values.verbosity());
    native.extend(addresses(values)?);
    native.extend(several(values)?);
    native.extend(times(values)?);
    native.extend(eviction(values)?);
    native.extend(tasks(values)?);
    native.extend(kv_events(values)?);
    if values.is_on("enable_multi_tenants") {
        native.push("--store-multi-tenants=true".to_owned());
    }
    Ok(Native::Arguments(native))
}

fn addresses(values: &Values) -> Result<Vec<String>, Failure> {
    let at = |host: &str, port| {
        let host = values.text(host).unwrap_or("0.0.0.0");
        address(host, port)
    };
    // `rpc_port` came later, and 0 stands for `port`.
    let rpc = match port(values, "rpc_port", 0)? {
        0 => port(values, "port", 50051)?,
        port => port,
    };
    let mut native = vec![
        format!("--listen={}", at("rpc_address", rpc)?),
        format!("--http={}", at("metrics_host", port(values, "metrics_port", 9003)?)?),
    ];
    if values.is_on("enable_http_metadata_server") {
        let port = port(values, "http_metadata_server_port", 8080)?;
        native.push(format!("--mooncake-metadata-listen={}", at("http_metadata_server_host", port)?));
    }
    Ok(native)
}

/// One of several masters. etcd has them under another key than Mooncake's masters, and publishes the leader
/// where Mooncake's clients look for it.
fn several(values: &Values) -> Result<Vec<String>, Failure> {
    if !values.is_on("enable_ha") {
        return Ok(Vec::new());
    }
    let given = |name| values.text(name).filter(|text| !text.is_empty());
    let arbiter = match given("ha_backend_type").unwrap_or("etcd") {
        "etcd" => {
            let servers = given("ha_backend_connstring").or_else(|| given("etcd_endpoints"));
            let need = "--enable_ha: write --etcd_endpoints=HOST:PORT[;HOST:PORT…]";
            format!("etcd://{}", etcd_servers(servers.ok_or_else(|| Failure::usage(need))?))
        }
        "k8s" => format!("k8s://{}", given("ha_backend_connstring").unwrap_or("default")),
        other => {
            return Err(Failure::usage(format!("--ha_backend_type={other}: write etcd or k8s"))
                .hint("with etcd, `--ha-publish redis://…` of `snowskin master` tells Redis who leads"));
        }
    };
    let rpc = match port(values, "rpc_port", 0)? {
        0 => port(values, "port", 50051)?,
        port => port,
    };
    let host = match values.text("rpc_address") {
        Some(host) if host != "0.0.0.0" && host != "[::]" => address(host, 0)?.ip(),
        // The address under which others reach this machine is the one that reaches etcd.
        _ => towards(arbiter.trim_start_matches("etcd://").split(',').next().unwrap_or_default()),
    };
    Ok(vec![
        format!("--ha={arbiter}"),
        format!("--cluster-id={}", given("cluster_id").unwrap_or(CLUSTER)),
        format!("--advertise={}", SocketAddr::new(host, rpc)),
        format!("--ha-listen={}", SocketAddr::new(host, 0)),
    ])
}

/// Servers of etcd in the forms of Mooncake: separated by `;` or `,`, with or without `http://`.
pub(super) fn etcd_servers(text: &str) -> String {
    let servers = text.split([';', ',']).map(str::trim).filter(|server| !server.is_empty());
    let bare = servers.map(|server| server.rsplit_once("://").map_or(server, |(_, server)| server));
    bare.collect::<Vec<_>>().join(",")
}

fn kv_events(values: &Values) -> Result<Vec<String>, Failure> {
    if !values.is_on("enable_kv_events") {
        return Ok(Vec::new());
    }
    let given = |name| values.text(name).filter(|text| !text.is_empty());
    let need =
        "--enable_kv_events: write --kv_events_bind_endpoint=tcp://HOST:PORT and --kv_events_backend_id=NAME";
    let endpoint = given("kv_events_bind_endpoint").ok_or_else(|| Failure::usage(need))?;
    let bound = endpoint.strip_prefix("tcp://").and_then(|bound| bound.rsplit_once(':'));
    let (host, port) = bound.and_then(|(host, port)| Some((host, port.parse().ok()?))).ok_or_else(|| {
        Failure::usage(format!(
            "--kv_events_bind_endpoint={endpoint}: write tcp://HOST:PORT, or tcp://*:PORT"
        ))
    })?;
    let host = if host == "*" { "0.0.0.0" } else { host };
    let backend = given("kv_events_backend_id").ok_or_else(|| Failure::usage(need))?;
    Ok(vec![
        format!("--kv-events-listen={}", address(host, port)?),
        format!("--kv-events-backend-id={backend}"),
    ])
}

fn times(values: &Values) -> Result<Vec<String>, Failure> {
    let mut native = Vec::new();
    let time = |name: &str, min: u64, max: u64| {
        let need = format!("a time such as 500, 500ms, 5s, 3m or 1h, {min} ms to {max} ms");
        parsed(values, name, None, &need, |text| millis(text).filter(|ms| (min..=max).contains(ms)).map(Some))
    };
    let seconds = |name: &str, max: u64| {
        let need = format!("whole seconds, at most {max}");
        parsed(values, name, None, &need, |text| {
            text.parse::<u64>().ok().filter(|seconds| *seconds <= max).map(Some)
        })
    };
    if let Some(ms) = time("default_kv_lease_ttl", 1, DAY_MS)? {
        // Here an object stays for a while after the time for which readers may read it. Together they are
        // the time that Mooncake's flag names: what its users wait for until an object can be removed.
        let guard = LEASE_GUARD_MS_MAX.min(ms / 5);
        native.extend([format!("--lease-ms={}", ms - guard), format!("--store-lease-guard-ms={guard}")]);
    }
    if let Some(ms) = time("default_kv_soft_pin_ttl", 1, 30 * DAY_MS)? {
        native.push(format!("--soft-pin-ttl-ms={ms}"));
    }
    for (name, flag) in [
        ("client_live_ttl_sec", "node-ttl-ms"),
        ("client_ttl", "node-ttl-ms"),
        ("put_start_discard_timeout_sec", "store-put-start-discard-timeout-ms"),
        ("put_start_release_timeout_sec", "store-put-start-release-timeout-ms"),
    ] {
        if let Some(seconds) = seconds(name, DAY_MS / 1000)? {
            native.retain(|earlier: &String| !earlier.starts_with(&format!("--{flag}=")));
            native.push(format!("--{flag}={}", (seconds * 1000).max(1)));
        }
    }
    for (name, flag) in [
        ("pending_task_timeout_sec", "store-tasks-pending-timeout-ms"),
        ("processing_task_timeout_sec", "store-tasks-processing-timeout-ms"),
    ] {
        if let Some(seconds) = seconds(name, DAY_MS / 1000)? {
            // 0 stands for no limit; a day is the longest here.
            let ms = if seconds == 0 { DAY_MS } else { seconds * 1000 };
            native.push(format!("--{flag}={ms}"));
        }
    }
    Ok(native)
}

fn eviction(values: &Values) -> Result<Vec<String>, Failure> {
    let mut native = Vec::new();
    for (name, flag) in
        [("eviction_high_watermark_ratio", "evict-above"), ("eviction_ratio", "store-eviction-ratio")]
    {
        let share = parsed(values, name, None, "a number from 0 to 1", |text| {
            text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share)).map(Some)
        })?;
        native.extend(share.map(|share| format!("--{flag}={share}")));
    }
    let allocator = parsed(values, "memory_allocator", None, "offset or cachelib", |text| match text {
        "offset" => Some(Some("offset")),
        // Slabs of one size each, too.
        "cachelib" => Some(Some("slab")),
        _ => None,
    })?;
    native.extend(allocator.map(|kind| format!("--allocator={kind}")));
    let need = "random, free_ratio_first, ssd_free_ratio_first, local_first or cxl";
    let strategy = parsed(values, "allocation_strategy", None, need, |text| match text {
        "random" => Some(Some("random")),
        // Without the tiers and hosts that they consider, the others choose by free space.
        "free_ratio_first" | "ssd_free_ratio_first" | "local_first" | "cxl" => Some(Some("free-ratio-first")),
        _ => None,
    })?;
    native.extend(strategy.map(|kind| format!("--allocation-strategy={kind}")));
    Ok(native)
}

fn tasks(values: &Values) -> Result<Vec<String>, Failure> {
    let mut native = Vec::new();
    let count = |name: &str, max: u64| {
        let need = format!("a whole number, at most {max}");
        parsed(values, name, None, &need, |text| {
            text.parse::<u64>().ok().filter(|count| *count <= max).map(Some)
        })
    };
    const TASKS_MAX: u64 = 1 << 20;
    let pending = count("max_total_pending_tasks", TASKS_MAX)?;
    let processing = count("max_total_processing_tasks", TASKS_MAX)?;
    if pending.is_some() || processing.is_some() {
        let together = pending.unwrap_or(10_000) + processing.unwrap_or(10_000);
        native.push(format!("--store-tasks-unfinished-max={}", together.clamp(1, TASKS_MAX)));
    }
    if let Some(finished) = count("max_total_finished_tasks", TASKS_MAX)? {
        native.push(format!("--store-tasks-finished-max={}", finished.max(1)));
    }
    if let Some(retries) = count("max_retry_attempts", 999)? {
        native.push(format!("--store-tasks-attempts-max={}", retries + 1));
    }
    let mode = parsed(values, "dynamic_replication_mode", None, "off, observe or enforce", |text| {
        ["off", "observe", "enforce"].into_iter().find(|mode| *mode == text).map(Some)
    })?;
    native.extend(mode.map(|mode| format!("--store-replication-mode={mode}")));
    if let Some(seconds) = count("dynamic_replication_heat_window_seconds", 600)? {
        native.push(format!("--store-replication-window-ms={}", (seconds * 1000).max(100)));
    }
    let rate =
        parsed(values, "dynamic_replication_admission_qps_threshold", None, "a number above 0", |text| {
            text.parse::<f64>().ok().filter(|rate| *rate > 0.0 && rate.is_finite()).map(Some)
        })?;
    native.extend(rate.map(|rate| format!("--store-replication-gets-per-s-min={}", rate.clamp(0.001, 1e6))));
    if let Some(replicas) = count("dynamic_replication_max_memory_replicas", u64::from(u32::MAX))? {
        native.push(format!("--store-replication-replicas-max={}", replicas.clamp(1, 8)));
    }
    Ok(native)
}
