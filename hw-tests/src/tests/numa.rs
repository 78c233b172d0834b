//! NUMA nodes as the kernel reports them.

use crate::host::{Host, Need};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "every_numa_node_has_a_distance_to_every_other",
        needs: &[Need::Numa(2)],
        run: distances_are_complete,
    },
    Test {
        name: "every_rail_is_on_a_numa_node_that_exists",
        needs: &[Need::Numa(2), Need::Rdma],
        run: rails_are_on_nodes,
    },
    Test {
        name: "the_lab_has_a_far_numa_node_with_memory_alone",
        needs: &[Need::Lab(&["numa"]), Need::Numa(3)],
        run: a_far_node,
    },
];

fn distances_are_complete(host: &Host) -> Result<()> {
    let nodes = &host.facts.nodes;
    for (index, node) in nodes.iter().enumerate() {
        ensure!(node.distances.len() == nodes.len(), "node {}: {:?}", node.number, node.distances);
        let own = node.distances[index];
        let nearest_other = node
            .distances
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index)
            .map(|(_, distance)| *distance)
            .min();
        ensure!(
            nearest_other.is_some_and(|distance| distance > own),
            "node {} is not nearest to itself",
            node.number
        );
        println!(
            "    {}node {}: distances {:?}, CPUs: {}",
            host.label(),
            node.number,
            node.distances,
            node.has_cpus
        );
    }
    Ok(())
}

fn rails_are_on_nodes(host: &Host) -> Result<()> {
    for rail in host.rails() {
        let number =
            rail.numa_node.with_context(|| format!("the NUMA node of {} is unknown", rail.device))?;
        ensure!(
            host.facts.nodes.iter().any(|node| node.number == number),
            "{}: no node {number}",
            rail.device
        );
    }
    Ok(())
}

fn a_far_node(host: &Host) -> Result<()> {
    let nodes = &host.facts.nodes;
    let cpus: Vec<bool> = nodes.iter().map(|node| node.has_cpus).collect();
    ensure!(cpus == [true, true, false], "nodes with CPUs: {cpus:?}");
    let far: Vec<u32> = nodes.iter().filter_map(|node| node.distances.last().copied()).collect();
    ensure!(far == [24, 31, 10], "distances to the far node: {far:?}");
    Ok(())
}
