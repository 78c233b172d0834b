//! The flags that Mooncake's documentation, samples and tests use.

use super::*;

/// What a command line becomes, and its warnings.
fn run(name: &str, line: &[&str]) -> (Result<Native, Failure>, Vec<String>) {
    let command = COMMANDS.iter().find(|command| command.name == name).expect("a command");
    read(command, line.iter().map(|arg| (*arg).to_owned()).collect())
}

fn arguments(name: &str, line: &[&str]) -> (Vec<String>, Vec<String>) {
    match run(name, line) {
        (Ok(Native::Arguments(arguments)), warnings) => (arguments, warnings),
        other => panic!("{other:?}"),
    }
}

fn master(line: &[&str]) -> Vec<String> {
    let (arguments, warnings) = arguments("mooncake_master", line);
    assert_eq!(warnings, [""; 0], "{line:?}");
    arguments
}

fn refused(name: &str, line: &[&str]) -> String {
    run(name, line).0.expect_err("refused").to_string()
}

#[test]
fn commands_are_known_by_the_programs_name_and_by_the_first_argument() {
    let named = |args: &[&str]| {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        named(&args).map(|(command, rest)| (command.name, rest.len()))
    };
    assert_eq!(named(&["/usr/bin/mooncake_master", "--port=1"]), Some(("mooncake_master", 1)));
    assert_eq!(named(&["snowskin", "mooncake-client"]), Some(("mooncake_client", 0)));
    assert_eq!(named(&["transfer_engine_bench"]), Some(("transfer_engine_bench", 0)));
    assert_eq!(
        named(&["snowskin", "mooncake-http-metadata-server", "--port", "1"]).map(|(_, rest)| rest),
        Some(2)
    );
    assert_eq!(named(&["snowskin", "mooncake-transfer-engine-bench"]).map(|(_, rest)| rest), Some(0));
    for other in [
        &["snowskin"][..],
        &["snowskin", "master"],
        &["mooncake"],
        &[],
        &["snowskin", "put", "mooncake-master"],
    ] {
        assert_eq!(named(other), None, "{other:?}");
    }
}

#[test]
fn the_lines_of_mooncakes_documents_and_tests_start_a_master() {
    let everywhere = ["master", "--listen=0.0.0.0:50051", "--http=0.0.0.0:9003"];
    assert_eq!(master(&[]), everywhere);
    assert_eq!(
        master(&["--port=61351", "--max_threads=2", "--metrics_port=19003"]),
        ["master", "--listen=0.0.0.0:61351", "--http=0.0.0.0:19003"]
    );
    assert_eq!(
        master(&["--default_kv_lease_ttl=500"])[3..],
        ["--lease-ms=400", "--store-lease-guard-ms=100"],
        "an object can be removed after the time that the flag names, not later"
    );
    assert_eq!(master(&["--default_kv_lease_ttl=1"])[3..], ["--lease-ms=1", "--store-lease-guard-ms=0"]);
    let ci = [
        "--default_kv_lease_ttl=500",
        "--eviction_high_watermark_ratio=0.95",
        "--cluster_id=ci_test_cluster",
        "--port",
        "50051",
        "--enable_http_metadata_server=true",
    ];
    assert_eq!(
        master(&ci),
        [
            "master",
            "--listen=0.0.0.0:50051",
            "--http=0.0.0.0:9003",
            "--mooncake-metadata-listen=0.0.0.0:8080",
            "--lease-ms=400",
            "--store-lease-guard-ms=100",
            "--evict-above=0.95"
        ]
    );
    assert_eq!(
        master(&[
            "--enable_http_metadata_server",
            "--http_metadata_server_host=127.0.0.1",
            "--http_metadata_server_port=80"
        ])[3],
        "--mooncake-metadata-listen=127.0.0.1:80"
    );
    assert_eq!(master(&["-v=1", "--rpc_port=1", "--port=2"])[1..3], ["-v", "--listen=0.0.0.0:1"]);
    assert_eq!(
        master(&["--rpc_address=::1", "-metrics_host", "[::1]"])[1..3],
        ["--listen=[::1]:50051", "--http=[::1]:9003"]
    );
    assert_eq!(master(&["--rpc-address=localhost"])[1], "--listen=127.0.0.1:50051");
    assert_eq!(
        master(&["--allocation_strategy=free_ratio_first", "--memory_allocator=cachelib"])[3..],
        ["--allocator=slab", "--allocation-strategy=free-ratio-first"]
    );
}

#[test]
fn every_other_setting_of_the_master_that_there_is_here_is_translated() {
    let line = [
        "--default_kv_lease_ttl=5s",
        "--default_kv_soft_pin_ttl=30m",
        "--client_ttl=7",
        "--put_start_discard_timeout_sec=20",
        "--put_start_release_timeout_sec=300",
        "--pending_task_timeout_sec=0",
        "--processing_task_timeout_sec=60",
        "--eviction_ratio=0.1",
        "--max_total_pending_tasks=5",
        "--max_total_finished_tasks=0",
        "--max_retry_attempts=10",
        "--dynamic_replication_mode=enforce",
        "--dynamic_replication_heat_window_seconds=10",
        "--dynamic_replication_admission_qps_threshold=0.8",
        "--dynamic_replication_max_memory_replicas=99",
        "--enable_multi_tenants",
    ];
    assert_eq!(
        master(&line)[3..],
        [
            "--lease-ms=4900",
            "--store-lease-guard-ms=100",
            "--soft-pin-ttl-ms=1800000",
            "--node-ttl-ms=7000",
            "--store-put-start-discard-timeout-ms=20000",
            "--store-put-start-release-timeout-ms=300000",
            "--store-tasks-pending-timeout-ms=86400000",
            "--store-tasks-processing-timeout-ms=60000",
            "--store-eviction-ratio=0.1",
            "--store-tasks-unfinished-max=10005",
            "--store-tasks-finished-max=1",
            "--store-tasks-attempts-max=11",
            "--store-replication-mode=enforce",
            "--store-replication-window-ms=10000",
            "--store-replication-gets-per-s-min=0.8",
            "--store-replication-replicas-max=8",
            "--store-multi-tenants=true"
        ]
    );
}

#[test]
fn every_translation_is_understood_by_the_command_that_it_is_for() {
    use clap::Parser as _;
    let line = [
        "--default_kv_lease_ttl=5s",
        "--default_kv_soft_pin_ttl=30m",
        "--client_ttl=7",
        "--eviction_ratio=0.1",
        "--put_start_discard_timeout_sec=20",
        "--put_start_release_timeout_sec=300",
        "--max_total_pending_tasks=5",
        "--pending_task_timeout_sec=0",
        "--processing_task_timeout_sec=60",
        "--max_total_finished_tasks=0",
        "--max_retry_attempts=10",
        "--dynamic_replication_mode=enforce",
        "--eviction_high_watermark_ratio=1.0",
        "--dynamic_replication_heat_window_seconds=10",
        "--dynamic_replication_admission_qps_threshold=0.8",
        "--dynamic_replication_max_memory_replicas=9",
        "--memory_allocator=offset",
        "--allocation_strategy=random",
        "--enable_http_metadata_server=true",
        "-v=2",
    ];
    let client =
        ["--protocol=rdma", "--device_names=mlx5_0,mlx5_1", "--tenant_id=a", "--global_segment_size=1gb"];
    for (name, line) in [
        ("mooncake_master", &line[..]),
        ("mooncake_client", &client[..]),
        ("transfer_engine_bench", &["--mode=target", "--local_server_name=127.0.0.1:0"]),
        ("transfer_engine_bench", &["--segment_id=127.0.0.1:1", "--threads=2"]),
    ] {
        let (native, _) = arguments(name, line);
        let native = std::iter::once("snowskin".to_owned()).chain(native);
        if let Err(error) = crate::args::Cli::try_parse_from(native) {
            panic!("{name}: {error}");
        }
    }
}

#[test]
fn flags_are_read_in_all_forms_of_gflags_and_the_last_one_counts() {
    let on = "--mooncake-metadata-listen=0.0.0.0:8080";
    for (line, is_on) in [
        (&["--enable_http_metadata_server"][..], true),
        (&["-enable_http_metadata_server"], true),
        (&["--enable_http_metadata_server=true"], true),
        (&["--enable-http-metadata-server=1"], true),
        (&["--enable_http_metadata_server", "true"], true),
        (&["--enable_http_metadata_server", "false"], false),
        (&["--enable_http_metadata_server=true", "--noenable_http_metadata_server"], false),
        (&["--noenable_http_metadata_server", "--enable_http_metadata_server"], true),
        (&["--enable_http_metadata_server=f"], false),
    ] {
        assert_eq!(master(line).contains(&on.to_owned()), is_on, "{line:?}");
    }
    assert_eq!(master(&["-port", "1", "--port", "2"])[1], "--listen=0.0.0.0:2");
}

#[test]
fn what_is_unknown_or_lacking_is_a_warning_each_and_never_an_end() {
    let (native, warnings) = arguments(
        "mooncake_master",
        &[
            "--frobnicate=1",
            "--frobnicate_more",
            "value",
            "-x",
            "--port=7",
            "stray",
            "--rpc_interface=eth0",
            "--root_fs_dir=/data",
            "--enable_offload",
            "--metrics_port",
        ],
    );
    assert_eq!(native[1], "--listen=0.0.0.0:7");
    let expected = [
        "--frobnicate is not a flag",
        "--frobnicate_more is not a flag",
        "--x is not a flag",
        "\"stray\" is not a flag",
        "--metrics_port has no value",
        "--rpc_interface=eth0 has no effect: this program does not offer it",
        "--enable_offload=true has no effect: objects are copied to disks where nodes have them",
        "--root_fs_dir=/data has no effect: name it to the nodes",
    ];
    for what in expected {
        assert!(warnings.iter().any(|warning| warning.starts_with(what)), "{what}: {warnings:?}");
    }
    assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
    // What is off, or chooses something that does not exist here, is no reason for a warning.
    master(&[
        "--enable_ha=false",
        "--noenable_offload",
        "--root_fs_dir=",
        "--rpc_thread_num=8",
        "--logtostderr",
    ]);
    assert_eq!(master(&["--port=7", "--", "--metrics_port=1"])[2], "--http=0.0.0.0:9003");
}

#[test]
fn several_masters_agree_in_etcd_and_their_clients_look_there() {
    let line =
        ["--enable_ha", "--etcd_endpoints=http://10.0.0.1:2379;10.0.0.2:2379", "--rpc_address=10.0.0.7"];
    assert_eq!(
        master(&line)[3..],
        [
            "--ha=etcd://10.0.0.1:2379,10.0.0.2:2379",
            "--cluster-id=mooncake_cluster",
            "--advertise=10.0.0.7:50051",
            "--ha-listen=10.0.0.7:0"
        ]
    );
    let own = ["--enable_ha", "--ha_backend_connstring=127.0.0.1:1", "--cluster_id=kv", "--port=7"];
    assert_eq!(master(&own)[3..6], ["--ha=etcd://127.0.0.1:1", "--cluster-id=kv", "--advertise=127.0.0.1:7"]);
    for (flags, what) in [
        (&["--enable_ha"][..], "--etcd_endpoints=HOST:PORT"),
        (&["--enable_ha", "--ha_backend_type=redis"], "write etcd or k8s"),
    ] {
        let error = refused("mooncake_master", flags);
        assert!(error.contains(what), "{error}");
    }
    let (node, _) = arguments("mooncake_client", &["--master_server_address=etcd://127.0.0.1:2379"]);
    assert_eq!(node[1], "--master=etcd://127.0.0.1:2379/mooncake_cluster");
    let error = refused("mooncake_client", &["--master_server_address=redis://127.0.0.1:1"]);
    assert!(error.contains("only etcd says who leads"), "{error}");
}

#[test]
fn a_wrong_value_is_refused_with_the_flag_and_what_it_may_be() {
    for (flag, what) in [
        ("--port=65536", "a port, 0 to 65535"),
        ("--default_kv_lease_ttl=soon", "a time such as"),
        ("--default_kv_lease_ttl=0", "a time such as"),
        ("--default_kv_lease_ttl=18446744073709551615h", "a time such as"),
        ("--eviction_ratio=1.5", "a number from 0 to 1"),
        ("--eviction_ratio=NaN", "a number from 0 to 1"),
        ("--memory_allocator=buddy", "offset or cachelib"),
        ("--dynamic_replication_mode=on", "off, observe or enforce"),
        ("--client_ttl=-1", "whole seconds"),
    ] {
        let error = refused("mooncake_master", &[flag]);
        assert!(error.starts_with(flag) && error.contains(what), "{flag}: {error}");
    }
    assert!(
        refused("mooncake_master", &["--rpc_address=no such host"]).contains("no address of this machine")
    );
}

#[test]
fn a_file_gives_what_flags_do_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let yaml = dir.path().join("master.yaml");
    let sample = "rpc_port: 50061\nrpc_thread_num: 16\nrpc_address: \"127.0.0.1\"\neviction_ratio: 0.1\n\
                  enable_ha: false\nclient_live_ttl_sec: 60\nrpc_interface: \"\"\nsurprise: 1\n\
                  enable_http_metadata_server: false\n";
    std::fs::write(&yaml, sample).expect("written");
    let path = format!("--config_path={}", yaml.display());
    let (native, warnings) = arguments("mooncake_master", &[&path, "--eviction_ratio=0.2"]);
    assert_eq!(
        native,
        [
            "master",
            "--listen=127.0.0.1:50061",
            "--http=0.0.0.0:9003",
            "--node-ttl-ms=60000",
            "--store-eviction-ratio=0.2"
        ]
    );
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].ends_with("surprise is not a setting, and is ignored"), "{warnings:?}");
    let json = dir.path().join("master.json");
    std::fs::write(&json, r#"{"rpc_port": 50062, "enable_http_metadata_server": true}"#).expect("written");
    let native = master(&[&format!("--config_path={}", json.display())]);
    assert_eq!(native[1], "--listen=0.0.0.0:50062");
    assert_eq!(native[3], "--mooncake-metadata-listen=0.0.0.0:8080");
    std::fs::write(&json, "{").expect("written");
    assert!(
        refused("mooncake_master", &[&format!("--config_path={}", json.display())]).contains("master.json")
    );
    assert!(refused("mooncake_master", &["--config_path=/nonexistent"]).contains("/nonexistent"));
}

#[test]
fn a_client_is_a_node_with_a_local_server() {
    let (native, warnings) = arguments(
        "mooncake_client",
        &[
            "--host",
            "127.0.0.1",
            "--metadata_server=http://127.0.0.1:8080/metadata",
            "--master_server_address",
            "127.0.0.1:50051",
            "--global_segment_size",
            "1.5 GB",
            "--local_buffer_size=0",
            "--threads",
            "2",
            "--protocol=tcp",
            "--port=61352",
        ],
    );
    assert_eq!(warnings, [""; 0]);
    assert_eq!(
        native[..5],
        [
            "node",
            "--master=127.0.0.1:50051",
            "--listen=127.0.0.1:61352",
            "--name=127.0.0.1:61352",
            "--memory=1610612736"
        ]
    );
    assert!(
        native[5].starts_with("--local=/") && native[5].ends_with("/127-0-0-1-61352.sock"),
        "{}",
        native[5]
    );
    assert_eq!(native[6..], ["--populate=false"], "a large memory delays the start");
    // The address towards the master, when the host is all addresses.
    let (native, _) = arguments(
        "mooncake_client",
        &["--master_server_address=127.0.0.1:61351", "--port=61352", "--global_segment_size=64mb"],
    );
    assert_eq!(native[2..5], ["--listen=127.0.0.1:61352", "--name=127.0.0.1:61352", "--memory=67108864"]);
    for (flag, what) in [
        ("--global_segment_size=50%", "a size such as"),
        ("--global_segment_size=0", "a size such as"),
        ("--protocol=ascend", "tcp or rdma"),
        ("--master_server_address=redis://a:1", "only etcd"),
    ] {
        let error = refused("mooncake_client", &[flag]);
        assert!(error.contains(what), "{flag}: {error}");
    }
}

#[test]
fn the_bench_has_two_ends() {
    let (target, _) = arguments(
        "transfer_engine_bench",
        &[
            "--mode=target",
            "--metadata_server=P2PHANDSHAKE",
            "--local_server_name=127.0.0.1:12345",
            "--protocol=tcp",
            "--buffer_size=1048576",
        ],
    );
    assert_eq!(target, ["bench", "target", "--memory=1048576", "--listen=127.0.0.1:12345", "--fabric=tcp"]);
    let (initiator, _) = arguments(
        "transfer_engine_bench",
        &[
            "--segment_id=127.0.0.1:12345",
            "--operation=write",
            "--block_size=4096",
            "--batch_size=8",
            "--threads=1",
            "--duration=2",
        ],
    );
    assert_eq!(
        initiator,
        [
            "bench",
            "transfer",
            "--target=127.0.0.1:12345",
            "--fabric=tcp",
            "--op=write",
            "--block=4096",
            "--batch=8",
            "--threads=1",
            "--duration=2"
        ]
    );
    assert!(refused("transfer_engine_bench", &[]).contains("--segment_id is missing"));
    assert!(refused("transfer_engine_bench", &["--mode=both"]).contains("initiator or target"));
    let (named, _) = arguments(
        "transfer_engine_bench",
        &["--mode=target", "--metadata_server=http://h:8080/metadata", "--local_server_name=node-7"],
    );
    assert_eq!(named[3..], ["--segment=node-7", "--fabric=tcp", "--metadata=http://h:8080/metadata"]);
}

#[test]
fn the_metadata_server_listens_everywhere_by_default() {
    assert_eq!(
        run("mooncake_http_metadata_server", &[]).0.unwrap(),
        Native::Metadata("0.0.0.0:8080".parse().unwrap())
    );
    let line = ["--port", "0", "--host", "127.0.0.1", "--log-level", "DEBUG"];
    let (native, warnings) = run("mooncake_http_metadata_server", &line);
    assert_eq!((native.unwrap(), warnings.len()), (Native::Metadata("127.0.0.1:0".parse().unwrap()), 0));
}

#[test]
fn sizes_and_times_have_mooncakes_units() {
    for (text, bytes) in
        [("4 GB", 4 << 30), ("16mb", 16 << 20), ("0", 0), ("1.5k", 1536), ("2TiB", 2 << 40), ("7b", 7)]
    {
        assert_eq!(size(text), Some(bytes), "{text}");
    }
    for (text, ms) in [("500", 500), ("500ms", 500), ("5s", 5000), ("3 m", 180_000), ("1h", 3_600_000)] {
        assert_eq!(millis(text), Some(ms), "{text}");
    }
    for bad in ["", "GB", "-1", "1.2.3", "5 parsecs", "99999999999999999999", "9e9"] {
        assert_eq!((size(bad), millis(bad)), (None, None), "{bad}");
    }
}

#[test]
fn any_arguments_are_read_refused_or_warned_about() {
    use te_core::testkit::Rng;
    let parts = [
        "--",
        "-",
        "no",
        "port",
        "enable_ha",
        "v",
        "=",
        "1",
        "true",
        "\u{e9}",
        " ",
        "config_path",
        "x",
        "--port",
    ];
    let mut rng = Rng::new(7);
    for _ in 0..20_000 {
        let mut word = || {
            (0..rng.range(0..6)).map(|_| parts[rng.range(0..parts.len() as u64) as usize]).collect::<String>()
        };
        let line = [word(), word(), word(), word()];
        for command in &COMMANDS {
            // A file named by chance does not exist, and sockets of clients are not made for nothing.
            if command.name != "mooncake_client" {
                let _ = read(command, line.to_vec());
            }
        }
    }
}
