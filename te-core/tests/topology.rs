//! Topologies that are not valid are refused, and valid ones are sorted and measured as documented.

use te_core::topology::{
    BRIDGES_MAX, Distance, Gpu, GpuVendor, LOCATIONS_MAX, Location, MatrixError, MatrixRow, NICS_MAX,
    NODES_MAX, Nic, NumaNode, PciAddress, PciPath, PriorityMatrix, Topology, TopologyError,
};

fn node(id: u16, distances: &[u8]) -> NumaNode {
    NumaNode { id, distances: distances.into(), ..NumaNode::default() }
}

fn path(text: &str) -> PciPath {
    PciPath::parse_sysfs(text).expect("a path")
}

#[test]
fn parts_that_make_no_host_are_refused() {
    let refused = |nodes: Vec<NumaNode>, nics: Vec<Nic>| Topology::new(nodes, nics, vec![]).unwrap_err();
    assert_eq!(refused(vec![node(0, &[10, 20]), node(0, &[20, 10])], vec![]), TopologyError::NodeTwice(0));
    assert_eq!(refused(vec![node(3, &[10, 20])], vec![]), TopologyError::Distances { node: 3, count: 1 });
    assert_eq!(refused(vec![node(3, &[9])], vec![]), TopologyError::Distances { node: 3, count: 1 });
    let stray = Nic { numa_node: Some(7), ..Nic::named("a") };
    assert_eq!(refused(vec![node(0, &[10])], vec![stray]), TopologyError::NoSuchNode(7));
    let pair = vec![Nic::named("a"), Nic::named("a")];
    assert_eq!(refused(vec![], pair), TopologyError::NicTwice("a".into()));
    for name in ["", "two words", "\u{1b}[2J", &"x".repeat(65)] {
        assert_eq!(refused(vec![], vec![Nic::named(name)]), TopologyError::Nic(name.into()));
    }
    let many = (0..=NICS_MAX).map(|i| Nic::named(&format!("n{i}"))).collect();
    assert!(matches!(refused(vec![], many), TopologyError::TooMany { what: "NICs", .. }));
    let many = (0..=NODES_MAX as u16).map(|id| node(id, &[])).collect();
    assert!(matches!(refused(many, vec![]), TopologyError::TooMany { what: "NUMA nodes", .. }));
}

#[test]
fn names_are_ordered_as_people_count() {
    let nics = ["mlx5_10", "mlx5_2", "eth0"].map(Nic::named).into();
    let topology = Topology::new(vec![], nics, vec![]).expect("sound");
    let names: Vec<_> = topology.nics().iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["eth0", "mlx5_2", "mlx5_10"]);
}

#[test]
fn a_nearer_device_is_never_dearer() {
    use Distance::{HostBridge, Node, Remote, Switch, Unknown};
    let all = [Switch(0), Switch(9), HostBridge, Node, Unknown, Remote(11), Remote(21), Remote(255)];
    assert!(all.is_sorted());
    assert!(all.iter().map(|distance| distance.penalty_percent()).is_sorted());
}

#[test]
fn pci_distance_follows_the_bridges() {
    let gpu = path("../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0");
    let near = path("/x/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:02.0/0000:1b:00.0/net/eth0");
    let port = path("pci0000:16/0000:16:02.0/0000:30:00.0");
    let far = path("pci0000:38/0000:38:01.0/0000:39:00.0");
    assert_eq!(gpu.distance(&near), Some(Distance::Switch(2)));
    assert_eq!(gpu.distance(&port), Some(Distance::HostBridge));
    assert_eq!(gpu.distance(&far), None);
    // A volume management device: a second host bridge in the path, and a domain of five digits.
    let vmd = path("pci0000:64/0000:64:00.5/pci10000:00/10000:00:02.0/10000:01:00.0");
    assert_eq!((vmd.address.domain, vmd.bridges.len(), vmd.root), (0x10000, 2, (0, 0x64)));
    let deep: String = (0..=BRIDGES_MAX + 1).map(|bus| format!("/0000:{bus:02x}:00.0")).collect();
    for text in ["", "virtual/net/lo", "pci0000:00", "pcix:y/0000:00:00.0", &format!("pci0000:00{deep}")] {
        assert_eq!(PciPath::parse_sysfs(text), None, "{text}");
    }
}

#[test]
fn pci_addresses_are_written_and_parsed_again() {
    for text in ["0000:18:00.0", "10000:e1:1f.7"] {
        assert_eq!(text.parse::<PciAddress>().expect("an address").to_string(), text);
    }
    for text in [
        "",
        "18:00.0",
        "0000:18:20.0",
        "0000:18:00.8",
        "0000:1g:00.0",
        "0000:+8:00.0",
        "000:18:00.0",
        "0000:18:00",
    ] {
        assert!(text.parse::<PciAddress>().is_err(), "{text}");
    }
}

#[test]
fn a_gpu_whose_bus_tells_nothing_goes_by_its_node() {
    let address = |text: &str| text.parse::<PciAddress>().expect("an address");
    let gpu = Gpu {
        vendor: GpuVendor::Amd,
        index: 0,
        numa_node: Some(1),
        pci: PciPath::alone(address("0000:80:00.0")),
        link: None,
    };
    let nic = |name: &str, node| Nic { numa_node: node, ..Nic::named(name) };
    let nics = vec![nic("a", Some(0)), nic("b", Some(1)), nic("c", None)];
    let nodes = vec![node(0, &[10, 32]), node(1, &[32, 10])];
    let topology = Topology::new(nodes, nics, vec![gpu]).expect("sound");
    let far: Vec<_> = topology
        .nics()
        .iter()
        .map(|nic| topology.distance(Location::Device(GpuVendor::Amd, 0), nic))
        .collect();
    assert_eq!(far, [Distance::Remote(32), Distance::Node, Distance::Unknown]);
    assert_eq!(
        topology.distance(Location::Device(GpuVendor::Amd, 1), &topology.nics()[1]),
        Distance::Unknown
    );
}

#[test]
fn a_matrix_has_limits() {
    let row = |location| MatrixRow { location, preferred: vec![], secondary: vec![] };
    let many = (0..=LOCATIONS_MAX as u16).map(|id| row(Location::Numa(id))).collect();
    assert_eq!(PriorityMatrix::new(many), Err(MatrixError::TooManyLocations(LOCATIONS_MAX + 1)));
    let names = (0..=NICS_MAX).map(|i| format!("n{i}")).collect();
    let wide = MatrixRow { preferred: names, ..row(Location::Host) };
    assert!(matches!(PriorityMatrix::new(vec![wide]), Err(MatrixError::TooManyNics { .. })));
}
