//! The topology as JSON. The command's help documents the structure.

use serde_json::{Value, json};
use te_core::topology::{Gpu, Nic, NicKind, NicPort, NumaNode, PciLink, PciPath, PortState, Topology};
use te_host::topology::matrix_to_json;

use super::picture::cpus;
use super::{Copies, Shown};
use crate::output::rounded;

pub(super) fn value(shown: &Shown) -> anyhow::Result<Value> {
    let topology = &shown.found.topology;
    Ok(json!({
        "nodes": topology.nodes().iter().map(node).collect::<Vec<_>>(),
        "nics": topology.nics().iter().map(nic).collect::<Vec<_>>(),
        "gpus": topology.gpus().iter().map(gpu).collect::<Vec<_>>(),
        "copies": shown.copies.iter().flatten().map(copies).collect::<Vec<_>>(),
        "dax": shown.dax,
        "nvme": shown.nvme,
        "distances": distances(topology),
        "matrix": serde_json::from_str::<Value>(&matrix_to_json(&shown.matrix))?,
        "warnings": shown.found.warnings,
    }))
}

fn node(node: &NumaNode) -> Value {
    json!({
        "id": node.id,
        "cpus": cpus(node),
        "memory_bytes": node.memory_bytes,
        "distances": node.distances,
    })
}

fn nic(nic: &Nic) -> Value {
    let kind = match nic.kind {
        NicKind::Rdma => "rdma",
        _ => "ethernet",
    };
    json!({
        "name": nic.name,
        "kind": kind,
        "netdev": nic.netdev,
        "numa_node": nic.numa_node,
        "pci": nic.pci.as_ref().map(pci),
        "link": nic.link.map(link),
        "ports": nic.ports.iter().map(port).collect::<Vec<_>>(),
    })
}

fn port(port: &NicPort) -> Value {
    let state = match port.state {
        PortState::Up => "up",
        PortState::Down => "down",
        PortState::Unknown => "unknown",
    };
    json!({ "number": port.number, "state": state, "mbit_per_s": port.mbit_per_s })
}

fn gpu(gpu: &Gpu) -> Value {
    json!({
        "name": gpu.location().to_string(),
        "numa_node": gpu.numa_node,
        "pci": pci(&gpu.pci),
        "link": gpu.link.map(link),
    })
}

fn copies((gpu, measured): &(String, Result<Copies, String>)) -> Value {
    let copies = measured.as_ref().ok();
    json!({
        "gpu": gpu,
        "to_device_gb_s": copies.map(|copies| rounded(copies.to_device_gb_s)),
        "to_host_gb_s": copies.map(|copies| rounded(copies.to_host_gb_s)),
        "paths": copies.map(|copies| &copies.paths),
        "error": measured.as_ref().err(),
    })
}

fn pci(path: &PciPath) -> Value {
    json!({
        "address": path.address.to_string(),
        "root": format!("{:04x}:{:02x}", path.root.0, path.root.1),
        "bridges": path.bridges.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn link(link: PciLink) -> Value {
    json!({
        "lanes": link.lanes,
        "lanes_max": link.lanes_max,
        "mt_per_s": link.mega_transfers_per_s,
        "mt_per_s_max": link.mega_transfers_per_s_max,
    })
}

fn distances(topology: &Topology) -> Vec<Value> {
    let pairs =
        topology.locations().flat_map(|location| topology.nics().iter().map(move |nic| (location, nic)));
    let pair = |(location, nic): (te_core::Location, &Nic)| {
        let distance = topology.distance(location, nic);
        json!({
            "location": location.to_string(),
            "nic": nic.name,
            "distance": distance.to_string(),
            "penalty_percent": distance.penalty_percent(),
        })
    };
    pairs.map(pair).collect()
}
