//! The topology for people: a tree of devices, and two tables.

use te_core::topology::{Gpu, Nic, NicKind, NumaNode, PciPath, PortState, Topology};

use super::{Copies, Shown};
use crate::nvme::Controller;
use crate::output::{Align, Table, figure, printable};
use crate::size::ByteSize;

pub(super) fn text(shown: &Shown) -> String {
    let topology = &shown.found.topology;
    let mut out = String::new();
    for node in topology.nodes() {
        let cpus = if node.cpus.is_empty() { "no CPUs".into() } else { format!("CPUs {}", cpus(node)) };
        out.push_str(&format!("NUMA node {}  {cpus}  memory {}\n", node.id, memory(node)));
        tree(&mut out, &devices(topology, Some(node.id)));
    }
    let strays = devices(topology, None);
    if !strays.is_empty() {
        out.push_str("on no known NUMA node\n");
        tree(&mut out, &strays);
    }
    if topology.nodes().is_empty() && strays.is_empty() {
        out.push_str("This host reports no NUMA nodes, NICs or GPUs.\n");
    }
    if topology.nics().is_empty() && topology.gpus().is_empty() {
        out.push_str(
            "\nThere are no NICs and no GPUs to choose from. Transfers use local memory, shared memory, and \
            TCP as the system routes it.\n",
        );
    } else if topology.is_trivial() {
        out.push_str("\nAll memory uses the only NIC.\n");
    }
    if !shown.dax.is_empty() {
        let dax: Vec<String> = shown.dax.iter().map(|dax| format!("  {}\n", dax.text())).collect();
        out.push_str(&format!("\nCXL memory\n{}", dax.concat()));
    }
    if !shown.nvme.is_empty() {
        let lines = shown.nvme.iter().flat_map(Controller::lines).map(|line| format!("  {line}\n"));
        out.push_str(&format!("\nNVMe over Fabrics, by the kernel\n{}", lines.collect::<String>()));
    }
    if let Some(measured) = &shown.copies {
        out.push_str(&copies(measured));
    }
    if topology.nodes().len() > 1 {
        out.push_str(&format!("\nDistances between nodes (10 is local)\n{}", slit(topology)));
    }
    if shown.is_written || !topology.is_trivial() {
        let origin = if shown.is_written { "as the file specifies" } else { "the nearest are preferred" };
        out.push_str(&format!("\nNICs for memory, {origin}\n{}", matrix(shown)));
    }
    if !shown.found.warnings.is_empty() {
        out.push_str("\nOdd\n");
        for warning in &shown.found.warnings {
            out.push_str(&format!("  {}\n", printable(warning)));
        }
    }
    out
}

/// `0-55,112-167`.
pub(super) fn cpus(node: &NumaNode) -> String {
    let range = |&(first, last): &(u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    node.cpus.iter().map(range).collect::<Vec<_>>().join(",")
}

pub(super) fn memory(node: &NumaNode) -> String {
    if node.memory_bytes == 0 { "unknown".into() } else { ByteSize(node.memory_bytes).approximate() }
}

/// `400 Gb/s`, `down`.
pub(super) fn speed(nic: &Nic) -> String {
    let down = !nic.ports.is_empty() && nic.ports.iter().all(|port| port.state == PortState::Down);
    match nic.mbit_per_s() {
        _ if down => "down".into(),
        Some(speed) if speed % 1000 == 0 => format!("{} Gb/s", speed / 1000),
        Some(speed) => format!("{} Gb/s", speed as f64 / 1000.0),
        None => "speed unknown".into(),
    }
}

/// A device for the tree, with its PCI path if it has one.
struct Device<'a> {
    pci: Option<&'a PciPath>,
    name: String,
    text: String,
}

/// The devices of a NUMA node, in the order of the buses.
fn devices(topology: &Topology, node: Option<u16>) -> Vec<Device<'_>> {
    let gpus = topology.gpus().iter().filter(|gpu| gpu.numa_node == node).map(gpu);
    let nics = topology.nics().iter().filter(|nic| nic.numa_node == node).map(nic);
    let mut all: Vec<Device<'_>> = gpus.chain(nics).collect();
    all.sort_by_key(|device| device.pci.map(|pci| (pci.root, pci.bridges.first().copied(), pci.address)));
    all
}

fn gpu(gpu: &Gpu) -> Device<'_> {
    Device { pci: Some(&gpu.pci), name: gpu.location().to_string(), text: "GPU".into() }
}

fn nic(nic: &Nic) -> Device<'_> {
    let mut text = speed(nic);
    match (nic.kind, &nic.netdev) {
        (NicKind::Rdma, Some(netdev)) => text.push_str(&format!("  RDMA, {netdev}")),
        (NicKind::Rdma, None) => text.push_str("  RDMA"),
        _ => text.push_str("  sockets"),
    }
    if let Some(link) = nic.link.filter(|link| link.is_degraded()) {
        text.push_str(&format!(
            "  PCI x{} at {} GT/s, supports x{} at {}",
            link.lanes,
            f64::from(link.mega_transfers_per_s) / 1000.0,
            link.lanes_max,
            f64::from(link.mega_transfers_per_s_max) / 1000.0
        ));
    }
    Device { pci: nic.pci.as_ref(), name: nic.name.clone(), text }
}

/// Devices under their host bridges; those below the same root port stay together.
fn tree(out: &mut String, devices: &[Device<'_>]) {
    let wide = devices.iter().map(|device| device.name.chars().count()).max().unwrap_or(0);
    let roots: Vec<&[Device<'_>]> =
        devices.chunk_by(|a, b| a.pci.map(|pci| pci.root) == b.pci.map(|pci| pci.root)).collect();
    for (at, root) in roots.iter().enumerate() {
        let (branch, trunk) = if at + 1 == roots.len() { ("└─", "   ") } else { ("├─", "│  ") };
        let name = root[0]
            .pci
            .map_or("not on PCI".into(), |pci| format!("PCI {:04x}:{:02x}", pci.root.0, pci.root.1));
        out.push_str(&format!("{branch} {name}\n"));
        let port = |device: &Device<'_>| device.pci.and_then(|pci| pci.bridges.first().copied());
        let groups: Vec<&[Device<'_>]> =
            root.chunk_by(|a, b| port(a).is_some() && port(a) == port(b)).collect();
        for (at, group) in groups.iter().enumerate() {
            let last_group = at + 1 == groups.len();
            let together = group.len() > 1;
            for (at, device) in group.iter().enumerate() {
                let branch = match (together, at == 0, at + 1 == group.len(), last_group) {
                    (false, _, _, false) => "├──",
                    (false, _, _, true) => "└──",
                    (true, true, _, false) => "├┬─",
                    (true, true, _, true) => "└┬─",
                    (true, false, false, false) => "│├─",
                    (true, false, false, true) => " ├─",
                    (true, false, true, false) => "│└─",
                    (true, false, true, true) => " └─",
                };
                let address = device.pci.map(|pci| format!("{}  ", pci.address)).unwrap_or_default();
                out.push_str(&format!("{trunk}{branch} {:wide$}  {address}{}\n", device.name, device.text));
            }
        }
    }
}

/// What was measured of each GPU.
fn copies(measured: &[(String, Result<Copies, String>)]) -> String {
    let mut out = "\nCopies between GPUs and host memory, measured now\n".to_owned();
    for (gpu, copies) in measured {
        match copies {
            Ok(Copies { to_device_gb_s, to_host_gb_s, paths }) => {
                let (there, back) = (figure(*to_device_gb_s), figure(*to_host_gb_s));
                out.push_str(&format!("  {gpu}  to the device {there} GB/s, to the host {back} GB/s\n"));
                out.push_str("    paths by size, for groups of 8, 64 and 512 copies\n");
                paths.iter().for_each(|line| out.push_str(&format!("      {line}\n")));
            }
            Err(why) => out.push_str(&format!("  {gpu}  not measured: {}\n", printable(why))),
        }
    }
    out
}

fn slit(topology: &Topology) -> String {
    let mut out = String::new();
    for node in topology.nodes() {
        let row: Vec<String> = node.distances.iter().map(|far| format!("{far:>3}")).collect();
        out.push_str(&format!("  node {:<3} {}\n", node.id, row.join(" ")));
    }
    out
}

fn matrix(shown: &Shown) -> String {
    let mut table =
        Table::new(&[("memory", Align::Left), ("preferred", Align::Left), ("secondary", Align::Left)]);
    for row in shown.matrix.rows() {
        table.row([format!("  {}", row.location), row.preferred.join(" "), row.secondary.join(" ")]);
    }
    table.render()
}
