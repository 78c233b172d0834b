//! The devices of a machine, as its kernel reports them.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// The devices that tests need. Sent between machines as JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Facts {
    /// Ports of RDMA devices, by name.
    pub(crate) rails: Vec<Rail>,
    /// NUMA nodes.
    pub(crate) nodes: Vec<Node>,
    /// GPUs of any vendor that has a driver here.
    pub(crate) gpus: u32,
    /// Device-DAX nodes on CXL memory.
    pub(crate) cxl: Vec<PathBuf>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rail {
    /// The device: `mlx5_0`, `rxe0`.
    pub(crate) device: String,
    /// The port, from 1.
    pub(crate) port: u32,
    /// Whether it carries traffic.
    pub(crate) active: bool,
    /// Its network interface (RoCE).
    pub(crate) netdev: Option<String>,
    /// NUMA node of the device.
    pub(crate) numa_node: Option<u32>,
    /// Addresses that RoCE v2 uses, with their index in the GID table.
    pub(crate) gids: Vec<(u32, IpAddr)>,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Node {
    /// Its number.
    pub(crate) number: u32,
    /// Whether it has CPUs.
    pub(crate) has_cpus: bool,
    /// Distances to all nodes, in the order of their numbers, on ACPI's scale: 10 is the node itself.
    pub(crate) distances: Vec<u32>,
}

impl Facts {
    /// The devices of this machine.
    pub(crate) fn gather() -> Self {
        Self::of(Path::new("/sys"), Path::new("/dev"))
    }

    fn of(sys: &Path, dev: &Path) -> Self {
        let gpus =
            names(dev).iter().filter(|name| name.strip_prefix("nvidia").is_some_and(is_number)).count()
                + names(&sys.join("class/kfd/kfd/topology/nodes"))
                    .iter()
                    .filter(|node| is_amd_gpu(sys, node))
                    .count();
        Self {
            rails: rails(&sys.join("class/infiniband")),
            nodes: nodes(&sys.join("devices/system/node")),
            gpus: gpus as u32,
            cxl: cxl(sys, dev),
        }
    }
}

impl Rail {
    /// The GID's index and the address that a peer's rail in the same network can reach: IPv4 first.
    pub(crate) fn address(&self) -> Option<(u32, IpAddr)> {
        let v4 = self.gids.iter().find(|(_, address)| address.is_ipv4());
        v4.or_else(|| self.gids.iter().find(|(_, address)| !is_link_local(*address))).copied()
    }

    /// Whether the two are in one network: for IPv4 the first 24 bits agree, for IPv6 the first 64.
    pub(crate) fn is_joined_to(&self, other: &Self) -> bool {
        match (self.address(), other.address()) {
            (Some((_, IpAddr::V4(a))), Some((_, IpAddr::V4(b)))) => a.octets()[..3] == b.octets()[..3],
            (Some((_, IpAddr::V6(a))), Some((_, IpAddr::V6(b)))) => a.octets()[..8] == b.octets()[..8],
            _ => false,
        }
    }

    /// The value of the counter `name` of the device or the port.
    pub(crate) fn counter(&self, name: &str) -> Option<u64> {
        let port = Path::new("/sys/class/infiniband").join(&self.device).join(format!("ports/{}", self.port));
        ["hw_counters", "counters"].iter().find_map(|dir| number(&port.join(dir).join(name)))
    }
}

/// Prints the devices of this machine as JSON, for `hw-tests facts`.
///
/// # Errors
/// When they cannot be serialized.
pub(crate) fn print() -> Result<()> {
    println!("{}", serde_json::to_string(&Facts::gather()).context("facts are JSON")?);
    Ok(())
}

fn rails(class: &Path) -> Vec<Rail> {
    let mut rails = Vec::new();
    for device in names(class) {
        let dir = class.join(&device);
        // An emulated device has no `device` link: the NUMA node of its network interface counts.
        for port in names(&dir.join("ports")).iter().filter_map(|port| port.parse().ok()) {
            let port_dir = dir.join(format!("ports/{port}"));
            let netdev = text(&port_dir.join("gid_attrs/ndevs/0")).or_else(|| text(&dir.join("parent")));
            let own_node = number(&dir.join("device/numa_node"));
            let net_class = class.with_file_name("net");
            let net_node =
                || netdev.as_ref().and_then(|name| number(&net_class.join(name).join("device/../numa_node")));
            rails.push(Rail {
                device: device.clone(),
                port,
                active: text(&port_dir.join("state")).is_some_and(|state| state.contains("ACTIVE")),
                numa_node: own_node.or_else(net_node).map(|node| node as u32),
                gids: gids(&port_dir),
                netdev,
            });
        }
    }
    rails
}

/// RoCE v2 entries of the GID table. Empty entries are zero, and reading their type fails.
fn gids(port: &Path) -> Vec<(u32, IpAddr)> {
    let indices = names(&port.join("gids")).into_iter().filter_map(|name| name.parse::<u32>().ok());
    let mut gids: Vec<(u32, IpAddr)> = indices
        .filter_map(|index| {
            let gid: Ipv6Addr = text(&port.join(format!("gids/{index}")))?.parse().ok()?;
            let kind = || text(&port.join(format!("gid_attrs/types/{index}")));
            if gid.is_unspecified() || !kind()?.contains("v2") {
                return None;
            }
            Some((index, gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4)))
        })
        .collect();
    gids.sort();
    gids
}

fn nodes(dir: &Path) -> Vec<Node> {
    let numbers = names(dir).into_iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    let mut nodes: Vec<Node> = numbers
        .map(|number: u32| {
            let node = dir.join(format!("node{number}"));
            let distances = text(&node.join("distance")).unwrap_or_default();
            Node {
                number,
                has_cpus: text(&node.join("cpulist")).is_some_and(|cpus| !cpus.is_empty()),
                distances: distances.split_whitespace().filter_map(|number| number.parse().ok()).collect(),
            }
        })
        .collect();
    nodes.sort_by_key(|node| node.number);
    nodes
}

/// Device-DAX nodes, if the machine has a CXL memory device.
fn cxl(sys: &Path, dev: &Path) -> Vec<PathBuf> {
    if !names(&sys.join("bus/cxl/devices")).iter().any(|name| name.strip_prefix("mem").is_some_and(is_number))
    {
        return Vec::new();
    }
    names(dev).into_iter().filter(|name| name.starts_with("dax")).map(|name| dev.join(name)).collect()
}

fn is_amd_gpu(sys: &Path, node: &str) -> bool {
    let properties =
        text(&sys.join(format!("class/kfd/kfd/topology/nodes/{node}/properties"))).unwrap_or_default();
    properties.lines().any(|line| line.strip_prefix("simd_count ").is_some_and(|count| count.trim() != "0"))
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.segments()[0] & 0xffc0 == 0xfe80)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Names in a directory, sorted; empty when there is no such directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn rails_gids_and_nodes_are_read_from_sysfs() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        let port = "class/infiniband/rxe0/ports/1";
        write(&format!("{port}/state"), "4: ACTIVE\n");
        write(&format!("{port}/gids/0"), "fe80:0000:0000:0000:5054:00ff:fe77:0001\n");
        write(&format!("{port}/gids/1"), "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        write(&format!("{port}/gids/2"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        for index in 0..2 {
            write(&format!("{port}/gid_attrs/types/{index}"), "RoCE v2\n");
        }
        write(&format!("{port}/gid_attrs/ndevs/0"), "rail0\n");
        write("class/infiniband/rxe0/device/numa_node", "1\n");
        for (node, cpus) in [(0, "0-1\n"), (1, "\n")] {
            write(&format!("devices/system/node/node{node}/cpulist"), cpus);
            write(&format!("devices/system/node/node{node}/distance"), "10 21\n");
        }
        let facts = Facts::of(dir.path(), &dir.path().join("dev"));
        let rail = &facts.rails[0];
        assert!(
            rail.active && rail.netdev.as_deref() == Some("rail0") && rail.numa_node == Some(1),
            "{rail:?}"
        );
        assert_eq!(rail.gids.len(), 2, "the empty entry does not count");
        assert_eq!(rail.address(), Some((1, "10.77.0.1".parse().expect("an address"))));
        assert_eq!(facts.nodes.iter().map(|node| node.has_cpus).collect::<Vec<_>>(), [true, false]);
        assert_eq!(facts.nodes[0].distances, [10, 21]);
        assert!(facts.gpus == 0 && facts.cxl.is_empty());
    }

    #[test]
    fn a_machine_with_nothing_has_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(Facts::of(dir.path(), dir.path()), Facts::default());
    }
}
