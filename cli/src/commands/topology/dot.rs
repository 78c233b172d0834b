//! The topology for Graphviz: a box per NUMA node, and edges from each GPU to its preferred NICs.

use std::fmt::Write as _;

use te_core::topology::{Location, Nic};

use super::Shown;
use super::picture::{cpus, memory, speed};

pub(super) fn graph(shown: &Shown) -> String {
    let topology = &shown.found.topology;
    let mut out =
        String::from("graph topology {\n  rankdir=LR;\n  node [shape=box, fontname=\"sans-serif\"];\n");
    let nodes = topology.nodes().iter().map(|node| Some(node.id)).chain([None]);
    for id in nodes {
        let mut inside = String::new();
        if let Some(node) = topology.nodes().iter().find(|node| Some(node.id) == id) {
            let location = Location::Numa(node.id);
            let label = format!("{location}\\nCPUs {}\\n{}", cpus(node), memory(node));
            // Lines of the label end in \n, Graphviz's own escape.
            let _ = writeln!(inside, "    \"{location}\" [label=\"{label}\", style=rounded];");
        }
        for gpu in topology.gpus().iter().filter(|gpu| gpu.numa_node == id) {
            let location = gpu.location();
            let address = gpu.pci.address;
            let _ = writeln!(inside, "    \"{location}\" [label=\"{location}\\n{address}\", style=bold];");
        }
        for nic in topology.nics().iter().filter(|nic| nic.numa_node == id) {
            let _ =
                writeln!(inside, "    {} [label=\"{}\\n{}\"];", node_of(nic), escaped(&nic.name), speed(nic));
        }
        match id {
            _ if inside.is_empty() => {}
            Some(id) => {
                let _ =
                    write!(out, "  subgraph cluster_{id} {{\n    label=\"NUMA node {id}\";\n{inside}  }}\n");
            }
            None => {
                let _ =
                    write!(out, "  subgraph cluster_unknown {{\n    label=\"node unknown\";\n{inside}  }}\n");
            }
        }
    }
    for (at, a) in topology.nodes().iter().enumerate() {
        for (b, far) in topology.nodes().iter().zip(&a.distances).skip(at + 1) {
            let _ = writeln!(out, "  \"cpu:{}\" -- \"cpu:{}\" [label=\"{far}\", style=dashed];", a.id, b.id);
        }
    }
    for row in shown.matrix.rows().iter().filter(|row| matches!(row.location, Location::Device(..))) {
        for nic in row.preferred.iter().filter_map(|name| topology.nic(name)) {
            let _ = writeln!(
                out,
                "  \"{}\" -- {} [label=\"{}\"];",
                row.location,
                node_of(nic),
                topology.distance(row.location, nic)
            );
        }
    }
    out.push_str("}\n");
    out
}

/// The identifier of a NIC. No NIC can have the name of a location.
fn node_of(nic: &Nic) -> String {
    format!("\"nic {}\"", escaped(&nic.name))
}

/// The name, escaped for a quoted identifier.
fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"")
}
