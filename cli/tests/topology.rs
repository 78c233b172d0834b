//! `snowskin topology` on hosts of several kinds.

mod common;
#[path = "../../te-host/tests/sysfs/mod.rs"]
mod sysfs;

use common::{assert_exit, json, run, stderr, stdout};
use sysfs::Sysfs;

fn on(name: &str, args: &[&str]) -> std::process::Output {
    let host = Sysfs::named(name);
    run(&[&["topology", "--sysfs", host.path().to_str().expect("UTF-8")], args].concat())
}

#[test]
fn a_picture_shows_nodes_devices_distances_and_the_matrix() {
    let output = on("dgx", &[]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    for part in [
        "NUMA node 1  CPUs 56-111,168-223  memory 1008 GiB",
        "└─ PCI 0000:b8",
        "└┬─ cuda:6  0000:bb:00.0  GPU",
        "└─ mlx5_7  0000:be:00.0  400 Gb/s  RDMA, ib7",
        "node 0    10  21",
        "  cuda:0  mlx5_0 mlx5_1                mlx5_2 mlx5_3 mlx5_4",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_host_without_devices_is_reported_as_such() {
    let output = on("vm", &[]);
    assert_exit(&output, 0);
    assert!(stdout(&output).contains("no NICs and no GPUs to choose from"), "{}", stdout(&output));
    let value = json(&on("vm", &["--json"]));
    assert_eq!((value["nics"].as_array().unwrap().len(), value["gpus"].as_array().unwrap().len()), (0, 0));
    // The machine that runs the tests, whatever it has.
    assert_exit(&run(&["topology"]), 0);
}

#[test]
fn json_has_the_shape_that_the_help_promises() {
    let value = json(&on("dgx", &["--json"]));
    let help = stdout(&run(&["topology", "--help"]));
    let top = ["nodes", "nics", "gpus", "copies", "dax", "nvme", "distances", "matrix", "warnings"];
    assert_eq!(value.as_object().unwrap().len(), top.len());
    let promised = |field: &str| assert!(help.contains(field), "{field} is not documented");
    for field in top {
        promised(field);
        let first = value[field].as_array().and_then(|list| list.first()).and_then(|first| first.as_object());
        first.into_iter().flat_map(|first| first.keys()).for_each(|field| promised(field));
    }
    assert_eq!(value["matrix"]["cuda:7"][0], serde_json::json!(["mlx5_6", "mlx5_7"]));
    assert_eq!(value["nics"][0]["ports"][0]["mbit_per_s"], 400_000);
    assert_eq!(value["gpus"][7]["pci"]["root"], "0000:b8");
    assert_eq!(value["distances"].as_array().unwrap().len(), 10 * 9);
}

#[test]
fn a_graph_is_one_and_names_every_device() {
    let output = on("dgx", &["--dot"]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    assert!(text.starts_with("graph topology {") && text.ends_with("}\n"));
    assert_eq!(text.matches('{').count(), text.matches('}').count());
    for part in
        ["subgraph cluster_1", "\"cuda:7\" -- \"nic mlx5_7\" [label=\"switch+2\"]", "\"cpu:0\" -- \"cpu:1\""]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_written_matrix_is_shown_and_checked_against_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("matrix.json");
    let file = path.to_str().unwrap();
    std::fs::write(&path, r#"{"cpu:0": [["mlx5_1"], ["mlx5_9"]], "hip:3": [["mlx5_0"], []]}"#).unwrap();
    let output = on("dgx", &["--file", file]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    for part in ["as the file specifies", "  cpu:0  mlx5_1", "names NIC mlx5_9", "a row for hip:3"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let matrix = on("dgx", &["--file", file, "--json"]);
    assert_eq!(json(&matrix)["matrix"]["cpu:0"], serde_json::json!([["mlx5_1"], ["mlx5_9"]]));

    std::fs::write(&path, r#"{"cpu:0": [["mlx5_1"]]}"#).unwrap();
    let output = on("dgx", &["--file", file]);
    assert_exit(&output, 1);
    assert!(
        stderr(&output).contains("two lists") && stderr(&output).contains("hint:"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn what_it_prints_can_be_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("matrix.json");
    let matrix = json(&on("dgx", &["--json"]))["matrix"].clone();
    std::fs::write(&path, matrix.to_string()).unwrap();
    let again = on("dgx", &["--json", "--file", path.to_str().unwrap()]);
    assert_eq!(json(&again)["matrix"], matrix);
    assert_eq!(json(&again)["warnings"], serde_json::json!([]));
}

#[test]
fn bad_input_ends_with_a_code_and_advice() {
    for (args, code, part) in [
        (&["topology", "--json", "--dot"][..], 2, "cannot be used with"),
        (&["topology", "--sysfs", "/nonexistent"], 1, "is sysfs mounted there?"),
        (&["topology", "--sysfs", "/proc/self/fd"], 1, "neither devices, class nor bus"),
        (&["topology", "--file", "/nonexistent"], 1, "cannot read the priority matrix"),
    ] {
        let output = run(args);
        assert_exit(&output, code);
        assert!(stderr(&output).contains(part), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn invalid_values_are_reported_and_cannot_control_the_terminal() {
    let host = Sysfs::named("dgx");
    host.put("devices/system/node/node0/cpulist", "\u{1b}[2J");
    let output = run(&["topology", "--sysfs", host.path().to_str().unwrap()]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    assert!(text.contains("Odd\n  devices/system/node/node0/cpulist") && !text.contains('\u{1b}'), "{text}");
}

/// In builds with hwloc.
#[cfg(feature = "topology-hwloc")]
#[test]
fn hwloc_describes_this_host_one_from_xml_and_one_from_a_string() {
    let xml = concat!(env!("CARGO_MANIFEST_DIR"), "/../te-host/tests/fixtures/hwloc/two-sockets.xml");
    let output = run(&["topology", "--hwloc", xml]);
    assert_exit(&output, 0);
    let text = stdout(&output);
    for part in ["NUMA node 1  CPUs 1,3", "cuda:1", "mlx5_2", "node 0    10  21"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let value = json(&run(&["topology", "--hwloc", "package:2 numa:1 core:4 pu:1", "--json"]));
    assert_eq!(value["nodes"].as_array().unwrap().len(), 2);
    assert_exit(&run(&["topology", "--hwloc"]), 0);
    for (text, part) in [("/nonexistent/host.xml", "cannot read"), ("package:two", "no synthetic host")] {
        let output = run(&["topology", "--hwloc", text]);
        assert_exit(&output, 1);
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
    assert_exit(&run(&["topology", "--hwloc", xml, "--sysfs", "/sys"]), 2);
}

/// The fake driver, under the name by which drivers are found. It is no GPU, and what it says is no figure.
#[cfg(feature = "cuda")]
#[test]
fn copies_of_gpus_are_measured_when_they_are_asked_for() {
    let tests = std::env::current_exe().unwrap();
    let fake = tests.parent().unwrap().parent().unwrap().join("examples/libcuda.so");
    assert!(fake.exists(), "{} was not built: run `cargo build -p te-gpu --examples`", fake.display());
    let libraries = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(fake, libraries.path().join("libcuda.so.1")).unwrap();
    let ask = |args: &[&str]| {
        let mut command = common::snowskin(args);
        command.env("LD_LIBRARY_PATH", libraries.path()).output().unwrap()
    };
    let value = json(&ask(&["topology", "--gpu", "--json"]));
    let copies = value["copies"].as_array().unwrap();
    let cuda: Vec<_> = copies.iter().filter(|copy| copy["gpu"].as_str().unwrap().contains("cuda:")).collect();
    assert!(!cuda.is_empty(), "{value}");
    for copy in cuda {
        assert!(copy["error"].is_null() && copy["to_device_gb_s"].as_f64().unwrap() > 0.0, "{copy}");
        assert!(copy["paths"][0].as_str().unwrap().starts_with("to-device 4096:"), "{copy}");
    }
    let text = stdout(&ask(&["topology", "--gpu"]));
    assert!(text.contains("cuda:0  to the device") && text.contains("      to-host 262144:"), "{text}");
    let without = stdout(&run(&["topology", "--gpu"]));
    assert!(without.contains("not measured: ") || without.contains("to the device"), "{without}");
    assert!(json(&run(&["topology", "--json"]))["copies"].as_array().unwrap().is_empty());
}

#[test]
fn cxl_memory_is_shown_with_its_mode() {
    let host = Sysfs::named("vm");
    let device = |name: &str, driver: Option<&str>| {
        let at = host.path().join("bus/dax/devices").join(name);
        std::fs::create_dir_all(&at).unwrap();
        std::fs::write(at.join("size"), "17179869184\n").unwrap();
        std::fs::write(at.join("target_node"), "1\n").unwrap();
        if let Some(driver) = driver {
            std::os::unix::fs::symlink(format!("../../drivers/{driver}"), at.join("driver")).unwrap();
        }
    };
    device("dax0.0", Some("device_dax"));
    device("dax1.0", Some("kmem"));
    device("dax2.0", None);
    std::fs::write(host.path().join("bus/dax/devices/dax2.0/size"), "plenty").unwrap();
    let path = host.path().to_str().unwrap();
    let text = stdout(&run(&["topology", "--sysfs", path]));
    for line in [
        "  dax0.0, 16 GiB, devdax",
        "  dax1.0, 16 GiB, memory of NUMA node 1",
        "  dax2.0, 0 B, without a driver",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let value = json(&run(&["topology", "--sysfs", path, "--json"]));
    let modes: Vec<_> = value["dax"].as_array().unwrap().iter().map(|dax| dax["mode"].clone()).collect();
    assert_eq!(modes, ["devdax", "system-ram", "unused"]);
}

#[test]
fn namespaces_that_the_kernel_reaches_over_a_network_are_shown_with_how_it_reaches_them() {
    let host = Sysfs::named("vm");
    for (controller, transport, address) in [
        ("nvme0", "pcie", "0000:01:00.0"),
        ("nvme1", "tcp", "traddr=10.0.0.7,trsvcid=4420,src_addr=10.0.0.2"),
        ("nvme2", "rdma", "traddr=fe80::1,trsvcid=4420"),
    ] {
        let put =
            |attribute: &str, value: &str| host.put(format!("class/nvme/{controller}/{attribute}"), value);
        put("transport", transport);
        put("address", address);
        put("subsysnqn", "nqn.2026-11.org.example:disks");
        put("state", if controller == "nvme2" { "connecting" } else { "live" });
        put("power/control", "auto");
    }
    host.put("class/nvme/nvme1/nvme1n1/size", "2097152");
    host.put("class/nvme/nvme1/nvme1n1/nsid", "1");
    host.put("class/nvme/nvme1/nvme1n1/queue/logical_block_size", "4096");
    // A path of a namespace with several, and a size that is none.
    host.put("class/nvme/nvme1/nvme1c7n2/size", "-1");
    host.put("class/nvme/nvme1/nvmexn1/size", "8");
    host.put("class/nvme/nvme1/ng1n1/size", "8");
    let path = host.path().to_str().unwrap();
    let text = stdout(&run(&["topology", "--sysfs", path]));
    for line in [
        "NVMe over Fabrics, by the kernel",
        "  nvme1, tcp, traddr=10.0.0.7,trsvcid=4420,src_addr=10.0.0.2, nqn.2026-11.org.example:disks",
        "    nvme1n1, 1.0 GiB, blocks of 4096 B",
        "    nvme1n2, 0 B",
        "  nvme2, rdma, traddr=fe80::1,trsvcid=4420, connecting, nqn.",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("nvme0"), "a disk of this host: {text}");
    let value = json(&run(&["topology", "--sysfs", path, "--json"]));
    let namespaces = &value["nvme"][0]["namespaces"];
    assert_eq!(value["nvme"].as_array().unwrap().len(), 2);
    assert_eq!(
        namespaces[0],
        serde_json::json!({ "name": "nvme1n1", "nsid": 1, "bytes": 1_u64 << 30, "block_bytes": 4096 })
    );
    assert_eq!((&namespaces[1]["name"], namespaces.as_array().unwrap().len()), (&"nvme1n2".into(), 2));
    // Nothing that a target names controls the terminal.
    host.put("class/nvme/nvme1/subsysnqn", "\u{1b}[2J");
    assert!(!stdout(&run(&["topology", "--sysfs", path])).contains('\u{1b}'));
    assert!(!stdout(&run(&["topology", "--sysfs", path, "--json"])).contains('\u{1b}'));
}
