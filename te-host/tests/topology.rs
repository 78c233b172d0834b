//! What is read from hosts of several kinds, and from hosts with wrong information.

mod sysfs;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use sysfs::Sysfs;
use te_core::topology::{
    Distance, GPUS_MAX, GpuVendor, Location, NICS_MAX, NODES_MAX, NicKind, PortState, PriorityMatrix,
    Topology,
};
use te_host::topology::{SYSFS, SysfsError, matrix_to_json, parse_matrix, read_matrix, read_sysfs};

/// Reads a host without warnings.
fn read(name: &str) -> Topology {
    let found = read_sysfs(Sysfs::named(name).path()).expect("it reads");
    assert_eq!(found.warnings, [""; 0]);
    found.topology
}

/// Reads a host; returns it with its warnings.
fn read_odd(sysfs: &Sysfs) -> (Topology, Vec<String>) {
    let found = read_sysfs(sysfs.path()).expect("it reads");
    assert!(!found.warnings.is_empty(), "nothing was odd");
    (found.topology, found.warnings)
}

const CUDA_0: Location = Location::Device(GpuVendor::Nvidia, 0);

#[test]
fn a_dgx_is_read_in_full() {
    let dgx = read("dgx");
    assert_eq!((dgx.nodes().len(), dgx.gpus().len(), dgx.nics().len()), (2, 8, 9));
    assert_eq!(dgx.nodes()[1].cpus, [(56, 111), (168, 223)]);
    assert_eq!(dgx.nodes()[0].memory_bytes, 1_056_439_856 << 10);
    assert_eq!((dgx.slit(0, 1), dgx.slit(1, 1), dgx.slit(0, 7)), (Some(21), Some(10), None));
    let nic = &dgx.nics()[7];
    assert_eq!((nic.name.as_str(), nic.netdev.as_deref(), nic.numa_node), ("mlx5_7", Some("ib7"), Some(1)));
    assert_eq!((nic.ports[0].state, nic.mbit_per_s()), (PortState::Up, Some(400_000)));
    assert!(!nic.link.expect("a slot").is_degraded());
    assert!(dgx.gpus()[0].link.expect("a slot").is_degraded(), "an idle GPU slows its link down");
    assert_eq!((dgx.nics()[8].name.as_str(), dgx.nics()[8].kind), ("eno1", NicKind::Ethernet));
}

#[test]
fn a_gpu_prefers_the_nics_of_its_switch_then_its_node_then_the_others() {
    let dgx = read("dgx");
    let far = |name| dgx.distance(CUDA_0, dgx.nic(name).expect("a NIC"));
    assert_eq!((far("mlx5_0"), far("mlx5_1")), (Distance::Switch(2), Distance::Switch(2)));
    assert_eq!((far("mlx5_2"), far("mlx5_4")), (Distance::Node, Distance::Remote(21)));
    let matrix = dgx.matrix();
    let row = |location| matrix.rows().iter().find(|row| row.location == location).expect("a row");
    assert_eq!(row(CUDA_0).preferred, ["mlx5_0", "mlx5_1"]);
    assert_eq!(row(CUDA_0).secondary, ["mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"]);
    assert_eq!(row(Location::Device(GpuVendor::Nvidia, 7)).preferred, ["mlx5_6", "mlx5_7"]);
    assert_eq!(row(Location::Numa(1)).preferred, ["mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"]);
    assert!(
        !matrix_to_json(&matrix).contains("eno1"),
        "NICs without RDMA are used only where there is no RDMA"
    );
}

#[test]
fn one_socket_needs_no_numa_information_and_a_port_without_cable_is_not_used() {
    let host = read("one-socket");
    let (first, second) = (&host.nics()[0], &host.nics()[1]);
    assert_eq!((first.numa_node, first.mbit_per_s()), (Some(0), Some(100_000)));
    assert_eq!((second.ports[0].state, second.mbit_per_s()), (PortState::Down, None));
    let link = first.link.expect("a slot");
    assert!(link.is_degraded(), "8 of 16 lanes");
    assert_eq!(link.mbit_per_s(), 64_000);
    assert_eq!(matrix_to_json(&host.matrix()), "{\n  \"cpu:0\": [[\"ens1f0np0\"], []]\n}\n");
}

#[test]
fn a_kernel_without_numa_is_one_node() {
    let arm = read("arm");
    assert_eq!((arm.nodes().len(), &arm.nodes()[0].cpus[..]), (1, &[(0, 71)][..]));
    assert_eq!((arm.nics().len(), arm.gpus().len()), (1, 1));
    let nic = arm.nic("enP2p1s0np0").expect("also known by its network device");
    assert_eq!(nic.name, "rocep1s0");
    assert_eq!(arm.distance(CUDA_0, nic), Distance::Node, "no host bridge in common");
}

#[test]
fn a_virtual_machine_may_have_nothing() {
    let vm = read("vm");
    assert_eq!((vm.nodes().len(), vm.nics().len(), vm.gpus().len()), (1, 0, 0));
    assert!(vm.is_trivial());
    assert_eq!(matrix_to_json(&vm.matrix()), "{\n  \"cpu:0\": [[], []]\n}\n");
}

#[test]
fn software_rdma_is_where_its_network_device_is() {
    let lab = read("lab");
    let names: Vec<_> = lab.nics().iter().map(|nic| (nic.name.as_str(), nic.numa_node)).collect();
    assert_eq!(names, [("rxe0", Some(0)), ("rxe1", Some(1))], "and the device below is not listed again");
    assert_eq!(lab.nics()[0].mbit_per_s(), Some(2500));
    assert_eq!(lab.distance(Location::Numa(2), &lab.nics()[0]), Distance::Remote(17), "memory without CPUs");
    assert_eq!(lab.rail_nics().count(), 1, "rxe1 is down");
}

#[test]
fn this_host_can_be_read() {
    match read_sysfs(Path::new(SYSFS)) {
        Ok(found) => drop(found.topology.matrix()),
        Err(error) => println!("no sysfs here: {error}"),
    }
}

#[test]
fn a_directory_without_sysfs_is_refused_with_advice() {
    let empty = Sysfs::of("");
    let error = read_sysfs(empty.path()).unwrap_err();
    assert!(
        matches!(error, SysfsError::NotSysfs(_)) && error.to_string().contains("neither devices"),
        "{error}"
    );
    let error = read_sysfs(&empty.path().join("gone")).unwrap_err();
    assert!(matches!(error, SysfsError::Root { .. }) && error.to_string().contains("mounted"), "{error}");
}

#[test]
fn missing_files_cost_only_what_they_contain() {
    let host =
        Sysfs::of("[devices/system/node/node0]\n[devices/system/node/node1]\n[class/infiniband/mlx5_0]");
    let found = read_sysfs(host.path()).expect("it reads");
    let topology = found.topology;
    assert_eq!((topology.slit(0, 1), topology.nodes()[0].memory_bytes), (Some(20), 0));
    let nic = &topology.nics()[0];
    assert_eq!((nic.pci.as_ref(), nic.numa_node, nic.may_have_link()), (None, None, true));
    assert_eq!(topology.distance(Location::Numa(0), nic), Distance::Unknown);
    assert_eq!(topology.matrix().rows()[1].preferred, ["mlx5_0"], "the only NIC");
}

#[test]
fn garbage_is_ignored_and_named() {
    let host = Sysfs::named("dgx");
    let nic = "devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:02.0/0000:1b:00.0";
    host.put("devices/system/node/node0/cpulist", "7-3,x");
    host.put("devices/system/node/node0/meminfo", "Node 0 MemTotal: lots");
    host.put("devices/system/node/node1/distance", "10 21 31");
    host.put(format!("{nic}/numa_node"), "9");
    host.put(format!("{nic}/current_link_width"), "wide");
    host.put(format!("{nic}/infiniband/mlx5_0/ports/1/rate"), "fast");
    host.put(format!("{nic}/infiniband/mlx5_0/ports/1/state"), "\u{1b}[2J");
    let (topology, warnings) = read_odd(&host);
    let text = warnings.join("\n");
    for part in
        ["\"7-3,x\"", "MemTotal: lots", "10 21 31", "numa_node: 9 is not a NUMA node", "\"wide\"", "\"fast\""]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "no control characters");
    let nic = topology.nic("mlx5_0").expect("still there");
    assert_eq!((nic.numa_node, nic.link, nic.mbit_per_s()), (None, None, None));
    assert_eq!(topology.distance(CUDA_0, nic), Distance::Switch(2), "by PCI");
    assert_eq!((topology.slit(1, 0), topology.slit(0, 1)), (Some(20), Some(21)));
    assert_eq!(topology.nics().len(), 9);
}

#[test]
fn loops_of_links_and_links_to_nowhere_end() {
    let host = Sysfs::named("vm");
    host.put_link("class/net/loop0", "loop1");
    host.put_link("class/net/loop1", "loop0");
    host.put_link("class/infiniband/self", "self");
    host.put_link("class/infiniband/gone", "../../devices/pci0000:00/0000:00:99.0/infiniband/gone");
    host.put_link("bus/pci/devices/0000:00:02.0", "../../../bus/pci/devices");
    host.put("bus/pci/x", "");
    let found = read_sysfs(host.path()).expect("it reads");
    let names: Vec<_> = found.topology.nics().iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["gone", "self"], "listed without details");
    assert!(found.topology.nics().iter().all(|nic| nic.pci.is_none() && nic.ports.is_empty()));
}

#[test]
fn thousands_of_devices_are_cut_to_the_limits() {
    let host = Sysfs::named("vm");
    for i in 0..2000 {
        host.put(format!("class/infiniband/mlx5_{i}/parent"), "lo");
    }
    for i in 0..300 {
        host.put(format!("devices/system/node/node{i}/distance"), "10");
    }
    for i in 0..600u32 {
        let (bus, device) = (i / 32, i % 32);
        let dir = format!("devices/pci0000:00/0000:{bus:02x}:{device:02x}.0");
        host.put(format!("{dir}/class"), "0x030200");
        host.put(format!("{dir}/vendor"), "0x10de");
    }
    let (topology, warnings) = read_odd(&host);
    assert_eq!(
        (topology.nodes().len(), topology.nics().len(), topology.gpus().len()),
        (NODES_MAX, NICS_MAX, GPUS_MAX)
    );
    assert!(warnings.iter().any(|warning| warning.contains("RDMA devices: only the first 256 of 2000")));
    assert!(warnings.len() <= 33, "{}", warnings.len());
    assert!(warnings.last().expect("some").starts_with("and "), "{warnings:?}");
    assert!(topology.matrix().rows().len() == NODES_MAX + GPUS_MAX);
}

#[test]
fn a_path_of_bridges_without_end_is_not_followed() {
    let host = Sysfs::named("vm");
    let deep: String = (0..200).map(|bus| format!("/0000:{bus:02x}:00.0")).collect();
    host.put_link("bus/pci/devices/0000:ff:00.0", &format!("../../../devices/pci0000:00{deep}"));
    host.put(format!("devices/pci0000:00{deep}/class"), "0x030200");
    host.put(format!("devices/pci0000:00{deep}/vendor"), "0x1002");
    let (topology, warnings) = read_odd(&host);
    assert_eq!(topology.gpus().len(), 2, "the device, and a link to it");
    assert!(topology.gpus().iter().all(|gpu| gpu.pci.bridges.is_empty()), "{warnings:?}");
}

#[test]
fn pipes_directories_and_forbidden_files_do_not_block_reading() {
    let host = Sysfs::named("one-socket");
    let nic = "devices/pci0000:40/0000:40:01.1/0000:41:00.0";
    let at = |name: &str| host.path().join(nic).join(name);
    fs::remove_file(at("numa_node")).unwrap();
    nix::unistd::mkfifo(&at("numa_node"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::remove_file(at("class")).unwrap();
    fs::create_dir(at("class")).unwrap();
    fs::write(at("vendor"), vec![b'9'; 1 << 20]).unwrap();
    fs::set_permissions(at("max_link_speed"), fs::Permissions::from_mode(0o000)).unwrap();
    let found = read_sysfs(host.path()).expect("it reads");
    assert_eq!(found.topology.nics()[0].numa_node, Some(0));
}

#[test]
fn a_matrix_written_as_json_reads_back() {
    for name in ["dgx", "one-socket", "arm", "vm", "lab"] {
        let matrix = read(name).matrix();
        assert_eq!(parse_matrix(&matrix_to_json(&matrix)).expect("it parses"), matrix);
    }
    assert_eq!(parse_matrix("{}").expect("it parses"), PriorityMatrix::default());
}

#[test]
fn a_matrix_gives_the_cost_of_each_nic() {
    let matrix = parse_matrix(r#"{"cpu:0": [["a"], ["b"]], "*": [["c"], []]}"#).expect("it parses");
    let cost = |location, nic| matrix.penalty_percent(location, nic);
    assert_eq!(
        (cost(Location::Numa(0), "a"), cost(Location::Numa(0), "b"), cost(Location::Numa(0), "c")),
        (100, 300, 2000)
    );
    assert_eq!((cost(Location::Numa(1), "c"), cost(CUDA_0, "a")), (100, 2000), "the row of *");
}

#[test]
fn errors_name_the_place_where_a_matrix_is_wrong() {
    for (text, part) in [
        ("", "EOF"),
        ("[]", "an object such as"),
        (r#"{"cpu:0": [["a"]]}"#, "length 1"),
        (r#"{"cpu:0": [["a"], ["b"], ["c"]]}"#, "line 1 column"),
        (r#"{"cpu:0": [["a"], [1]]}"#, "expected a string"),
        (r#"{"cpu:0": [["a"], ["a"]]}"#, "in the row twice"),
        (r#"{"cpu:0": [["a"], []], "cpu:0": [["b"], []]}"#, "two rows"),
        (r#"{"cpu:-1": [["a"], []]}"#, "not a location"),
        (r#"{"cpu:+1": [["a"], []]}"#, "not a location"),
        (r#"{"cpu:70000": [["a"], []]}"#, "not a location"),
        (r#"{"cpu:": [["a"], []]}"#, "not a location"),
        (r#"{"tpu:0": [["a"], []]}"#, "not a location"),
        (r#"{"cpu:0": [[""], []]}"#, "cannot be the name of a NIC"),
        (r#"{"cpu:0": [["\u001b[2J"], []]}"#, "cannot be the name of a NIC"),
        (r#"{} x"#, "trailing"),
    ] {
        let error = parse_matrix(text).expect_err(text).to_string();
        assert!(error.contains(part) && !error.contains('\u{1b}'), "{text}: {error}");
    }
    let rows: Vec<String> = (0..400).map(|i| format!("\"cpu:{i}\": [[],[]]")).collect();
    let error = parse_matrix(&format!("{{{}}}", rows.join(","))).unwrap_err().to_string();
    assert!(error.contains("the limit"), "{error}");
    let error = read_matrix(Path::new("/nonexistent/matrix.json")).unwrap_err().to_string();
    assert!(error.contains("cannot read") && error.contains("/nonexistent/matrix.json"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("long.json");
    fs::write(&long, vec![b' '; (1 << 20) + 1]).unwrap();
    assert!(read_matrix(&long).unwrap_err().to_string().contains("longer"));
}
