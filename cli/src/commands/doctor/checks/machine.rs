//! The kernel, CPUs and NUMA nodes.

use te_core::topology::{Location, MatrixRow};

use super::{Check, Judgement, count, fail, list, ok, skip, warn};
use crate::commands::doctor::facts::{Facts, RDMA_DEVICE};

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "kernel",
        why: "Shared memory, io_uring and RDMA need features of newer kernels.",
        judge: kernel,
    },
    Check {
        name: "cpus",
        why: "The thread that moves bytes and the thread that uses them need a CPU each.",
        judge: cpus,
    },
    Check {
        name: "cpu governor",
        why: "A CPU that lowers its frequency between transfers adds latency to each one.",
        judge: governor,
    },
    Check {
        name: "numa",
        why: "Memory and NICs of another node are behind the link between sockets, which is slower and shared.",
        judge: numa,
    },
    Check {
        name: "numa balancing",
        why: "The kernel unmaps pages to find out which CPU uses them, and moves pages that RDMA has not \
            pinned.",
        judge: numa_balancing,
    },
    Check {
        name: "zone reclaim",
        why: "A full NUMA node then drops its page cache instead of using memory of other nodes, and \
            allocations stall.",
        judge: zone_reclaim,
    },
    Check { name: "clock", why: "Each batch of transfers reads the clock.", judge: clock },
    Check {
        name: "open files",
        why: "Each connection and each region of shared memory uses a file descriptor.",
        judge: files,
    },
];

fn kernel(facts: &Facts) -> Judgement {
    let Some(release) = &facts.kernel else { return skip("unknown") };
    match version(release) {
        v if v < (4, 14) => fail(
            release,
            "memfd, TCP_ULP and epoll features that this program uses need Linux 4.14; use 5.15 or newer",
        ),
        v if v < (5, 15) => warn(
            release,
            "io_uring of this kernel is incomplete, so epoll is used; prefer Linux 5.15 or newer",
        ),
        _ => ok(release),
    }
}

/// `6.8.0-45-generic` → 6, 8.
pub(super) fn version(release: &str) -> (u32, u32) {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn cpus(facts: &Facts) -> Judgement {
    match facts.cpus {
        0 => skip("unknown"),
        1 => warn(
            "1",
            "client and node share one CPU, so latencies include context switches; use two or more CPUs",
        ),
        n => ok(n.to_string()),
    }
}

fn governor(facts: &Facts) -> Judgement {
    match facts.governor.as_deref() {
        None => skip("the kernel does not report it (usual in virtual machines)"),
        Some("performance") => ok("performance"),
        Some(name) => {
            warn(name, ("keep CPUs at a high frequency", "sudo cpupower frequency-set -g performance"))
        }
    }
}

fn numa(facts: &Facts) -> Judgement {
    match facts.nodes.len() {
        0 => return skip("the kernel reports no NUMA nodes"),
        1 => return ok("1 node"),
        _ => {}
    }
    let nodes = format!("{} nodes", facts.nodes.len());
    let cards: Vec<_> = facts.rdma.devices.iter().filter(|device| !device.is_software()).collect();
    if cards.is_empty() || !facts.uses(RDMA_DEVICE) {
        return warn(
            nodes,
            (
                "start one `snowskin node` per NUMA node, bound to it",
                "numactl --cpunodebind=0 --membind=0 snowskin node",
            ),
        );
    }
    let homeless: Vec<_> =
        cards.iter().filter(|device| device.node.is_none()).map(|device| &device.name).collect();
    if !homeless.is_empty() {
        return warn(
            format!("{nodes}, but the firmware does not report the node of {}", list(homeless)),
            "update the firmware (BIOS), or expose the host's topology to the guest; without it, the NIC \
            nearest to memory cannot be chosen",
        );
    }
    let bare: Vec<_> =
        facts.nodes.iter().filter(|node| cards.iter().all(|device| device.node != Some(**node))).collect();
    if bare.is_empty() {
        // As the engine routes: for every memory, its nearest NICs.
        let nearest = facts.topology.iter().flat_map(|found| {
            let rows = found.topology.matrix();
            let of = |row: &MatrixRow| format!("{} {}", row.location, row.preferred.join("+"));
            rows.rows().iter().filter(|row| row.location != Location::Host).map(of).collect::<Vec<_>>()
        });
        return ok(format!("{nodes}, each with an RDMA NIC; nearest: {}", list(nearest)));
    }
    warn(
        format!("{nodes}; there is no RDMA NIC on {}", list(bare)),
        (
            "move a NIC to a slot of that node, or keep memory and threads on nodes with a NIC",
            format!("numactl --cpunodebind={0} --membind={0} snowskin node", cards[0].node.unwrap_or(0)),
        ),
    )
}

fn numa_balancing(facts: &Facts) -> Judgement {
    match (facts.nodes.len(), facts.numa_balancing) {
        (..2, _) => skip("only one NUMA node"),
        (_, None) => skip("not in this kernel"),
        (_, Some(0)) => ok("off"),
        (_, Some(_)) => warn("on", ("switch it off", "sudo sysctl kernel.numa_balancing=0")),
    }
}

fn zone_reclaim(facts: &Facts) -> Judgement {
    match facts.zone_reclaim {
        None => skip("not in this kernel"),
        Some(0) => ok("off"),
        Some(mode) => warn(format!("mode {mode}"), ("switch it off", "sudo sysctl vm.zone_reclaim_mode=0")),
    }
}

fn clock(facts: &Facts) -> Judgement {
    match facts.clock_source.as_deref() {
        None => skip("unknown"),
        Some(name @ ("tsc" | "kvm-clock" | "arch_sys_counter" | "hyperv_clocksource_tsc_page")) => ok(name),
        Some(name) => warn(
            name,
            (
                "reading this clock needs a system call: use tsc if the kernel offers it",
                "echo tsc | sudo tee /sys/devices/system/clocksource/clocksource0/current_clocksource",
            ),
        ),
    }
}

fn files(facts: &Facts) -> Judgement {
    let Some((soft, hard)) = facts.files else { return skip("unknown") };
    let found = if soft == hard { count(soft) } else { format!("{}, at most {}", count(soft), count(hard)) };
    let fix = (
        "`LimitNOFILE=1048576` in a systemd unit, `* - nofile 1048576` in /etc/security/limits.d/, or \
        `docker run --ulimit nofile=1048576`; in this shell, as root:",
        "ulimit -n 65536",
    );
    match hard {
        h if h < 1024 => fail(found, fix),
        h if h < 16_384 => warn(found, fix),
        _ => ok(found),
    }
}
