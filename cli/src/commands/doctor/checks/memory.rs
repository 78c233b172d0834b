//! Memory: its size, the limits on it, and page sizes.

use te_engine::HostNeed;

use super::{Check, Judgement, errno_text, fail, list, ok, skip, warn};
use crate::commands::doctor::facts::{Facts, RDMA_DEVICE};
use crate::size::ByteSize;

pub(super) const CHECKS: &[Check] = &[
    Check { name: "memory", why: "A node lends memory of this machine.", judge: memory },
    Check {
        name: "cgroup memory",
        why: "The kernel kills processes whose control group exceeds its limit; registered memory counts.",
        judge: cgroup,
    },
    Check {
        name: "overcommit",
        why: "Without overcommit, the kernel refuses to map a large pool before any of it is used.",
        judge: overcommit,
    },
    Check {
        name: "locked memory",
        why: "Memory that a NIC may access is pinned, and pinned memory counts against this limit.",
        judge: memlock,
    },
    Check {
        name: "huge pages",
        why: "NICs and CPUs translate addresses per page: small pages slow down registration and cause cache \
            misses.",
        judge: huge_pages,
    },
    Check { name: "/dev/shm", why: "Other software on the machine exchanges data there.", judge: dev_shm },
    Check {
        name: "memfd",
        why: "Shared memory between processes of one host is a memory file (memfd).",
        judge: memfd,
    },
];

fn memory(facts: &Facts) -> Judgement {
    let Some((total, available)) = facts.memory else { return skip("unknown") };
    let found = format!("{} of {} available", show(available), show(total));
    match available {
        a if a < 256 << 20 => {
            fail(found, "this is too little for even a small node: free memory, or use a larger machine")
        }
        a if a < 2 << 30 => {
            warn(found, "start nodes with a small --memory, and replay with --capacity-blocks")
        }
        _ => ok(found),
    }
}

fn cgroup(facts: &Facts) -> Judgement {
    let Some((limit, used)) = facts.cgroup_memory else { return skip("no visible limit") };
    let left = limit.saturating_sub(used);
    let found = format!("{} of {} left", show(left), show(limit));
    let fix = "raise `MemoryMax=` of the systemd unit, `docker run --memory`, or resources.limits.memory of \
    the pod; or start nodes with a --memory that fits";
    match left {
        l if l < 256 << 20 => fail(found, fix),
        l if l < 2 << 30 => warn(found, fix),
        _ => ok(found),
    }
}

fn overcommit(facts: &Facts) -> Judgement {
    match facts.overcommit {
        None => skip("unknown"),
        Some(2) => warn(
            "never",
            ("use heuristic overcommit, or raise vm.overcommit_ratio", "sudo sysctl vm.overcommit_memory=0"),
        ),
        Some(1) => ok("always"),
        Some(_) => ok("heuristic"),
    }
}

pub(super) fn memlock(facts: &Facts) -> Judgement {
    /// Enough for the queues of a few hundred connections and the buffers of io_uring, but not for a pool.
    const ENOUGH_WITHOUT_RDMA: u64 = 1 << 30;
    let Some(limit) = facts.memlock else { return skip("unknown") };
    if limit == u64::MAX {
        return ok("no limit");
    }
    let total = facts.memory.map_or(u64::MAX, |(total, _)| total);
    let has_devices = !facts.rdma.devices.is_empty();
    let needs_rdma = facts.requires(RDMA_DEVICE) || has_devices && facts.uses(RDMA_DEVICE);
    let found = show(limit);
    if facts.may_lock {
        return ok(format!("{found}, which does not apply with CAP_IPC_LOCK"));
    }
    if limit >= if needs_rdma { total } else { ENOUGH_WITHOUT_RDMA.min(total) } {
        return ok(found);
    }
    let fix = (
        "`LimitMEMLOCK=infinity` in a systemd unit, `* - memlock unlimited` in /etc/security/limits.d/, or \
        `docker run --ulimit memlock=-1`; in this shell, as root:",
        "ulimit -l unlimited",
    );
    match needs_rdma {
        true if limit < 1 << 30 => fail(format!("{found}: RDMA cannot register a pool"), fix),
        true => warn(format!("{found} of {} can be registered", show(total)), fix),
        false => warn(format!("{found}: enough for TCP, not for fixed buffers of io_uring or RDMA"), fix),
    }
}

fn huge_pages(facts: &Facts) -> Judgement {
    let transparent = facts.transparent_huge_pages.as_deref();
    if let Some((total, free, bytes)) = facts.huge_pages.filter(|&(total, ..)| total > 0) {
        let found = format!("{} of {} free, {} each", free, total, show(bytes));
        if free == 0 {
            return warn(
                found,
                (
                    "all are in use, so the next pool gets small pages: reserve more",
                    format!("sudo sysctl vm.nr_hugepages={}", total.saturating_mul(2)),
                ),
            );
        }
        let bare: Vec<_> =
            facts.huge_pages_by_node.iter().filter(|(_, pages)| *pages == 0).map(|(node, _)| node).collect();
        if !bare.is_empty() && bare.len() < facts.huge_pages_by_node.len() {
            let command = format!(
                "echo {} | sudo tee /sys/devices/system/node/node{}/hugepages/hugepages-{}kB/nr_hugepages",
                total,
                bare[0],
                bytes >> 10
            );
            return warn(
                format!("{found}, but none on NUMA node {}", list(&bare)),
                ("memory of that node gets small pages: reserve huge pages on each node", command),
            );
        }
        return ok(found);
    }
    match transparent {
        Some(mode @ ("always" | "madvise")) => ok(format!("none reserved, transparent: {mode}")),
        Some(mode) => warn(
            format!("none reserved, transparent: {mode}"),
            (
                "allow pools to request them",
                "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            ),
        ),
        None => skip("not supported by the kernel"),
    }
}

fn dev_shm(facts: &Facts) -> Judgement {
    match facts.shm_bytes {
        None => skip("not mounted, or not checked; the shm fabric does not need it"),
        Some(bytes) if bytes < 64 << 20 => warn(
            format!("{} free", show(bytes)),
            "NCCL and PyTorch's data loaders need more; in a container: `docker run --shm-size=8g`",
        ),
        Some(bytes) => ok(format!("{} free", show(bytes))),
    }
}

fn memfd(facts: &Facts) -> Judgement {
    match facts.memfd {
        None => skip("unknown"),
        Some(Ok(())) => ok("allowed"),
        Some(Err(errno)) => {
            let found = format!("refused ({})", errno_text(errno));
            if facts.requires(HostNeed::SharedMemory) {
                return fail(found, "allow memfd_create in the container's seccomp profile");
            }
            warn(
                found,
                "transfers between processes of this host use TCP instead of shared memory: allow \
                memfd_create in the container's seccomp profile",
            )
        }
    }
}

fn show(bytes: u64) -> String {
    ByteSize(bytes).approximate()
}
