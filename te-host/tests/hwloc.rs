//! What hwloc reads from hosts, and from invalid input.
#![cfg(feature = "topology-hwloc")]

use std::fs;
use std::path::PathBuf;

use te_core::topology::{Distance, GpuVendor, Location, NODES_MAX, NicKind, PortState, Topology};
use te_host::topology::{Found, HwlocError, HwlocSource, matrix_to_json, read_hwloc};

/// Written by hand after the output of lstopo 2.9: two sockets; a switch with a GPU and a NIC on each, a
/// second NIC without a link on the first, and a NIC without RDMA on the second. It has no comments, because
/// hwloc's own parser, which is used without libxml2, does not support them.
const XML: &str = include_str!("fixtures/hwloc/two-sockets.xml");

fn read(source: &HwlocSource) -> Topology {
    let found = read_hwloc(source).expect("it reads");
    assert_eq!(found.warnings, [""; 0]);
    found.topology
}

fn two_sockets() -> Topology {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/hwloc/two-sockets.xml");
    read(&HwlocSource::Xml(path.into()))
}

/// Reads XML from a temporary file.
fn read_xml(text: impl AsRef<[u8]>) -> Result<Found, HwlocError> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("host.xml");
    fs::write(&path, text).expect("written");
    read_hwloc(&HwlocSource::Xml(path))
}

#[test]
fn xml_of_another_host_is_read_in_full() {
    let host = two_sockets();
    let cpus: Vec<_> = host.nodes().iter().map(|node| &node.cpus[..]).collect();
    assert_eq!(cpus, [[(0, 0), (2, 2)], [(1, 1), (3, 3)]]);
    assert_eq!(
        (host.nodes()[1].memory_bytes, host.slit(0, 1), host.slit(1, 1)),
        (67_108_864_000, Some(21), Some(10))
    );
    let nics: Vec<_> = host.nics().iter().map(|nic| (nic.name.as_str(), nic.kind, nic.numa_node)).collect();
    assert_eq!(
        nics,
        [
            ("mlx5_0", NicKind::Rdma, Some(0)),
            ("mlx5_1", NicKind::Rdma, Some(0)),
            ("mlx5_2", NicKind::Rdma, Some(1)),
            ("eno1", NicKind::Ethernet, Some(1)),
        ]
    );
    assert_eq!(
        (host.nics()[0].netdev.as_deref(), host.nics()[0].ports[0].state),
        (Some("ib0"), PortState::Up)
    );
    assert!(!host.nics()[1].may_have_link());
    let path = host.nics()[0].pci.as_ref().expect("on PCI");
    assert_eq!(
        (path.root, path.bridges.len(), path.address.to_string().as_str()),
        ((0, 0x16), 2, "0000:1a:00.0")
    );
    let gpus: Vec<_> = host.gpus().iter().map(|gpu| (gpu.location(), gpu.numa_node)).collect();
    assert_eq!(gpus, [0, 1].map(|nth| (Location::Device(GpuVendor::Nvidia, nth), Some(nth))));
}

#[test]
fn its_distances_are_those_that_sysfs_would_give() {
    let host = two_sockets();
    let far = |location, nic| host.distance(location, host.nic(nic).expect("a NIC"));
    let cuda_0 = Location::Device(GpuVendor::Nvidia, 0);
    assert_eq!((far(cuda_0, "mlx5_0"), far(cuda_0, "mlx5_1")), (Distance::Switch(2), Distance::HostBridge));
    assert_eq!(
        (far(cuda_0, "mlx5_2"), far(Location::Numa(1), "eno1")),
        (Distance::Remote(21), Distance::Node)
    );
    assert_eq!(
        matrix_to_json(&host.matrix()),
        r#"{
  "cpu:0": [["mlx5_0"], ["mlx5_2"]],
  "cpu:1": [["mlx5_2"], ["mlx5_0"]],
  "cuda:0": [["mlx5_0"], ["mlx5_2"]],
  "cuda:1": [["mlx5_2"], ["mlx5_0"]]
}
"#,
        "and mlx5_1 is down"
    );
}

#[test]
fn synthetic_strings_describe_hosts_without_devices() {
    for (text, nodes, cpus) in [
        ("package:2 numa:1 core:4 pu:1", 2, 4),
        ("package:1 core:2 pu:2", 1, 4),
        ("package:4 numa:2 pu:3", 8, 3),
    ] {
        let host = read(&HwlocSource::Synthetic(text.into()));
        assert_eq!((host.nodes().len(), host.nics().len(), host.gpus().len()), (nodes, 0, 0), "{text}");
        assert!(
            host.nodes().iter().all(|node| node.cpus.iter().map(|(a, b)| b - a + 1).sum::<u32>() == cpus),
            "{text}"
        );
        assert_eq!(host.slit(0, nodes as u16 - 1), Some(if nodes == 1 { 10 } else { 20 }), "assumed");
    }
    let found = read_hwloc(&HwlocSource::Synthetic("package:300 numa:1 pu:1".into())).expect("it reads");
    assert_eq!(found.topology.nodes().len(), NODES_MAX);
    assert!(found.warnings[0].contains("only the first 256 of 300"), "{:?}", found.warnings);
}

#[test]
fn this_host_can_be_read() {
    let host = read_hwloc(&HwlocSource::ThisHost).expect("it reads").topology;
    assert!(!host.nodes().is_empty() && host.nodes().iter().any(|node| !node.cpus.is_empty()), "{host:?}");
}

#[test]
fn texts_mean_what_a_reader_expects() {
    let xml = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/hwloc/two-sockets.xml");
    assert_eq!(HwlocSource::from_text(""), HwlocSource::ThisHost);
    assert_eq!(HwlocSource::from_text(xml), HwlocSource::Xml(xml.into()));
    assert_eq!(HwlocSource::from_text("gone.xml"), HwlocSource::Xml("gone.xml".into()));
    assert_eq!(HwlocSource::from_text("pack:2 pu:1"), HwlocSource::Synthetic("pack:2 pu:1".into()));
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("host:1.xml");
    fs::write(&odd, "").unwrap();
    assert_eq!(HwlocSource::from_text(odd.to_str().unwrap()), HwlocSource::Xml(odd));
}

#[test]
fn xml_that_is_broken_is_refused_with_advice() {
    let half = &XML[..XML.len() / 2];
    let no_topology = "<?xml version=\"1.0\"?><html><body/></html>";
    let version_9 = XML.replace("version=\"2.0\"", "version=\"9.0\"");
    for text in ["", " ", "{}", "<", "\0", half, no_topology, &version_9] {
        let error = read_xml(text).expect_err(text);
        assert!(matches!(error, HwlocError::Xml(_)) && error.to_string().contains("lstopo"), "{error}");
    }
    let error = read_xml([0xff, 0xfe, 0]).unwrap_err();
    assert!(matches!(error, HwlocError::Xml(_)), "{error}");
    let error = read_xml(vec![b' '; (16 << 20) + 1]).unwrap_err();
    assert!(error.to_string().contains("longer"), "{error}");
    let error = read_hwloc(&HwlocSource::Xml(PathBuf::from("/nonexistent/host.xml"))).unwrap_err();
    assert!(error.to_string().contains("cannot read /nonexistent/host.xml"), "{error}");
}

#[test]
fn xml_cut_anywhere_is_a_host_or_an_error() {
    let end = XML.find("</topology>").expect("it ends");
    for len in (0..end).step_by(97) {
        let Err(error) = read_xml(&XML[..len]) else { panic!("a host from {len} bytes") };
        assert!(matches!(error, HwlocError::Xml(_)), "{error}");
    }
}

#[test]
fn strings_that_describe_nothing_are_refused_with_advice() {
    for text in ["", "package:two", "package:0 pu:1", "pu:1 package:2", "package:2 \0 pu:1", "\u{1b}[2J"] {
        let error = read_hwloc(&HwlocSource::Synthetic(text.into())).expect_err(text).to_string();
        assert!(
            error.contains("package:2 numa:1 core:4 pu:1") && !error.contains('\u{1b}'),
            "{text}: {error}"
        );
    }
}

#[test]
fn invalid_parts_of_xml_are_left_out_with_a_warning() {
    let text = XML
        .replace("name=\"mlx5_2\"", "name=\"../x\"")
        .replace("name=\"mlx5_1\"", "name=\"mlx5_0\"")
        .replace(">10 21 21 10 <", ">10 900 21 3 <");
    let found = read_xml(text).expect("it reads");
    let names: Vec<_> = found.topology.nics().iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["mlx5_0", "eno1"]);
    assert_eq!(
        (found.topology.slit(0, 1), found.topology.slit(1, 0), found.topology.slit(1, 1)),
        (Some(20), Some(21), Some(10))
    );
    let said = found.warnings.join("\n");
    for part in ["\"../x\" is left out", "\"mlx5_0\" is left out", "distance 900", "distance 3"] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
}
