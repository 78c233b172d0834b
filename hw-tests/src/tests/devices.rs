//! The devices of the machine, and of the lab's profile.

use crate::host::{Host, Need};
use crate::runner::Test;
use anyhow::{Result, ensure};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "every_rail_has_an_address_that_its_peers_can_reach",
        needs: &[Need::Rdma],
        run: every_rail_has_an_address,
    },
    Test {
        name: "the_lab_has_two_rails_on_two_numa_nodes",
        needs: &[Need::Lab(&["rdma", "numa"]), Need::Rails(2), Need::Numa(2)],
        run: two_rails_on_two_nodes,
    },
    Test {
        name: "each_rail_is_joined_to_one_of_the_peers",
        needs: &[Need::Rdma, Need::Peer],
        run: each_rail_is_joined,
    },
    Test { name: "a_gpu_has_a_driver", needs: &[Need::Gpu], run: a_gpu_has_a_driver },
];

fn every_rail_has_an_address(host: &Host) -> Result<()> {
    for rail in host.rails() {
        ensure!(rail.address().is_some(), "{} has no GID but link-local ones: {:?}", rail.device, rail.gids);
        println!(
            "    {}{} port {}: {:?}, NUMA node {:?}",
            host.label(),
            rail.device,
            rail.port,
            rail.gids,
            rail.numa_node
        );
    }
    Ok(())
}

fn two_rails_on_two_nodes(host: &Host) -> Result<()> {
    let mut nodes: Vec<_> = host.rails().map(|rail| rail.numa_node).collect();
    nodes.sort_unstable();
    ensure!(nodes == [Some(0), Some(1)], "the rails are on NUMA nodes {nodes:?}");
    Ok(())
}

fn each_rail_is_joined(host: &Host) -> Result<()> {
    let (joined, all) = (host.joined_rails()?.len(), host.rails().count());
    ensure!(joined == all, "{joined} of {all} rails have a rail of the peer in the same network");
    Ok(())
}

fn a_gpu_has_a_driver(host: &Host) -> Result<()> {
    println!("    {} GPUs", host.facts.gpus);
    Ok(())
}
