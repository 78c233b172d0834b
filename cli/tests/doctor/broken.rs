//! The settings that can be wrong, and what the doctor reports for each.

use crate::host::{Host, config};

/// Breaks one setting of a healthy host.
pub(crate) type Break = fn(&Host);

pub(crate) const PORT0: &str = "sys/class/infiniband/mlx5_0/ports/1";
pub(crate) const PORT1: &str = "sys/class/infiniband/mlx5_1/ports/1";
pub(crate) const NIC0: &str = "sys/bus/pci/devices/0000:14:00.0";
pub(crate) const NIC1: &str = "sys/bus/pci/devices/0000:84:00.0";

/// The name of the check, its verdict, a part of its finding, a part of its fix, and how to break the
/// setting.
pub(crate) const BROKEN: &[(&str, &str, &str, &str, Break)] = &[
    ("kernel", "fail", "3.10", "5.15", |h| h.set("proc/sys/kernel/osrelease", "3.10.0-1160.el7")),
    ("kernel", "warn", "5.4", "5.15", |h| h.set("proc/sys/kernel/osrelease", "5.4.0")),
    ("cpus", "warn", "1", "two", |h| h.set("sys/devices/system/cpu/online", "0")),
    ("cxl memory", "warn", "dax0.0, 16 GiB, without a driver", "daxctl reconfigure-device", |h| {
        h.remove("sys/bus/dax/devices/dax0.0/driver");
    }),
    ("cxl memory", "warn", "2 CXL memory devices, and no region", "cxl create-region", |h| {
        h.remove("sys/bus/dax");
        h.set("sys/bus/cxl/devices/mem1/serial", "0x1");
    }),
    ("cpu governor", "warn", "powersave", "cpupower frequency-set", |h| {
        h.set("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave");
    }),
    ("numa", "warn", "on 2", "numactl", |h| {
        h.set("sys/devices/system/node/has_cpu", "0-2");
        h.set("sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages", "512");
    }),
    ("numa", "warn", "mlx5_1", "BIOS", |h| h.set(&format!("{NIC1}/numa_node"), "-1")),
    ("numa balancing", "warn", "on", "kernel.numa_balancing=0", |h| {
        h.set("proc/sys/kernel/numa_balancing", "1")
    }),
    ("zone reclaim", "warn", "1", "vm.zone_reclaim_mode=0", |h| h.set("proc/sys/vm/zone_reclaim_mode", "1")),
    ("clock", "warn", "hpet", "current_clocksource", |h| {
        h.set("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet");
    }),
    ("open files", "warn", "4,096", "LimitNOFILE", |h| {
        h.set(
            "proc/self/limits",
            "Max open files  1024  4096  files\nMax locked memory  unlimited  unlimited  bytes\n",
        );
    }),
    ("open files", "fail", "256", "ulimit -n", |h| {
        h.set(
            "proc/self/limits",
            "Max open files  256  256  files\nMax locked memory  unlimited  unlimited  bytes\n",
        );
    }),
    ("memory", "warn", "1.0 GiB", "--memory", |h| h.set("proc/meminfo", meminfo(1 << 20, 512))),
    ("memory", "fail", "1.0 MiB", "larger", |h| h.set("proc/meminfo", meminfo(1 << 10, 512))),
    ("cgroup memory", "warn", "1.0 GiB of 1.9 GiB left", "MemoryMax", |h| {
        h.set("sys/fs/cgroup/system.slice/memory.max", ((1u64 << 30) + 1_000_000_000).to_string());
    }),
    ("cgroup memory", "fail", "64 MiB", "docker run --memory", |h| {
        h.set("sys/fs/cgroup/system.slice/node.service/memory.max", (64 << 20).to_string());
    }),
    ("cgroup memory", "fail", "0 B of 64 MiB", "resources.limits.memory", |h| {
        h.set("proc/self/cgroup", "9:memory,hugetlb:/a/b\n3:cpuset:/\n");
        h.set("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712");
        h.set("sys/fs/cgroup/memory/a/memory.limit_in_bytes", (64 << 20).to_string());
        h.set("sys/fs/cgroup/memory/a/memory.usage_in_bytes", (64 << 20).to_string());
    }),
    ("overcommit", "warn", "never", "vm.overcommit_memory=0", |h| {
        h.set("proc/sys/vm/overcommit_memory", "2")
    }),
    ("locked memory", "fail", "8.0 MiB", "LimitMEMLOCK=infinity", |h| {
        h.set(
            "proc/self/limits",
            "Max open files  1024  1048576  files\nMax locked memory  8388608  8388608  bytes\n",
        );
    }),
    ("locked memory", "warn", "64 GiB of", "--ulimit memlock=-1", |h| {
        let limit = 64u64 << 30;
        h.set(
            "proc/self/limits",
            format!("Max open files  1024  1048576  files\nMax locked memory  {limit}  {limit}  bytes\n"),
        );
    }),
    ("huge pages", "warn", "0 of 1024 free", "vm.nr_hugepages=2048", |h| {
        h.set("proc/meminfo", meminfo(1 << 30, 0));
    }),
    ("huge pages", "warn", "none on NUMA node 1", "node1/hugepages", |h| {
        h.set("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "0");
    }),
    ("huge pages", "warn", "transparent: never", "madvise", |h| {
        h.set("proc/meminfo", "MemTotal: 1056763936 kB\nMemAvailable: 1000000000 kB\n");
        h.set("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]");
    }),
    ("tcp congestion control", "warn", "bbr", "tcp_congestion_control=cubic", |h| {
        h.set("proc/sys/net/ipv4/tcp_congestion_control", "bbr");
    }),
    ("tcp congestion control", "warn", "bbr", "modprobe tcp_cubic", |h| {
        h.set("proc/sys/net/ipv4/tcp_congestion_control", "bbr");
        h.set("proc/sys/net/ipv4/tcp_available_congestion_control", "reno bbr");
    }),
    ("socket buffers", "warn", "208 KiB", "net.ipv4.tcp_wmem", |h| {
        h.set("proc/sys/net/ipv4/tcp_wmem", "4096 16384 212992");
    }),
    ("listen backlog", "warn", "128", "somaxconn=4096", |h| h.set("proc/sys/net/core/somaxconn", "128")),
    ("ports", "warn", "50051 in use by java (process 77)", "sport = :50051", |h| {
        h.set("proc/net/tcp6", "  0: 00000000000000000000000000000000:C383 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 4242 1\n");
        h.link("proc/77/fd/5", "socket:[4242]");
        h.set("proc/77/comm", "java");
    }),
    ("ports", "warn", "9003 not free", "--http", |h| {
        h.set("proc/net/tcp", "  0: 0100007F:232B 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n");
    }),
    ("ephemeral ports", "warn", "includes 50051", "ip_local_reserved_ports=7,50051", |h| {
        h.set("proc/sys/net/ipv4/ip_local_reserved_ports", "7");
    }),
    ("ephemeral ports", "warn", "60000 to 60999", "ip_local_port_range", |h| {
        h.set("proc/sys/net/ipv4/ip_local_port_range", "60000\t60999");
    }),
    ("tcp sockets", "warn", "40 open, 20,000 closed", "reuse connections", |h| {
        h.set("proc/net/sockstat", "TCP: inuse 40 orphan 0 tw 20000 alloc 45 mem 7\n");
    }),
    ("connection tracking", "warn", "262,000 of 262,144", "nf_conntrack_max=1048576", |h| {
        h.set("proc/sys/net/netfilter/nf_conntrack_count", "262000");
    }),
    ("libibverbs", "fail", "libibverbs.so.1", "libibverbs1", |h| {
        h.remove("usr/lib/x86_64-linux-gnu/libibverbs.so.1");
    }),
    ("rdma providers", "fail", "no provider for mlx5", "ibverbs-providers", |h| {
        h.remove("etc/libibverbs.d/mlx5.driver")
    }),
    ("rdma providers", "fail", "its library is missing", "same release", |h| {
        h.remove("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so");
        h.set("usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", "");
    }),
    ("rdma device nodes", "fail", "/dev/infiniband/uverbs1", "--device=/dev/infiniband", |h| {
        h.remove("dev/infiniband/uverbs1");
    }),
    ("rdma device nodes", "fail", "/dev/infiniband/uverbs0: is a directory", "udevadm", |h| {
        h.remove("dev/infiniband/uverbs0");
        h.set("dev/infiniband/uverbs0/x", "");
    }),
    ("rdma device nodes", "fail", "mlx5_1 has none", "modprobe ib_uverbs", |h| {
        h.remove("sys/class/infiniband_verbs/uverbs1");
    }),
    ("rdma cgroup", "warn", "mlx5_0: 2 handles", "rdma.max", |h| {
        h.set("sys/fs/cgroup/system.slice/rdma.max", "mlx5_0 hca_handle=2 hca_object=max\n");
    }),
    ("rdma cgroup", "fail", "mlx5_1: any handles, 0 objects", "rdma.max", |h| {
        h.set("sys/fs/cgroup/system.slice/rdma.max", "mlx5_1 hca_handle=max hca_object=0\n");
    }),
    ("rdma port state", "warn", "mlx5_1/1 DOWN (Disabled)", "ip link set ens2np0 up", |h| {
        h.set(&format!("{PORT1}/state"), "1: DOWN");
        h.set(&format!("{PORT1}/phys_state"), "3: Disabled");
    }),
    ("rdma port state", "warn", "mlx5_1/1 DOWN (Polling)", "cable", |h| {
        h.set(&format!("{PORT1}/state"), "1: DOWN");
        h.set(&format!("{PORT1}/phys_state"), "2: Polling");
    }),
    ("rdma port state", "warn", "mlx5_1/1 INIT", "opensm", |h| {
        h.set(&format!("{PORT1}/state"), "2: INIT");
        h.set(&format!("{PORT1}/link_layer"), "InfiniBand");
    }),
    ("rdma gids", "fail", "mlx5_0/1 has none", "ip addr add 10.0.0.1/24 dev ens1np0", |h| {
        h.remove(&format!("{PORT0}/gids"));
    }),
    ("rdma gids", "warn", "none of RoCE v2", "cma_roce_mode -d mlx5_0 -p 1", |h| {
        h.set(&format!("{PORT0}/gid_attrs/types/1"), "IB/RoCE v1");
        h.set(&format!("{PORT0}/gid_attrs/types/3"), "IB/RoCE v1");
    }),
    ("rdma gids", "warn", "link-local", "ip addr add 10.0.0.1/24 dev ens2np0", |h| {
        h.remove(&format!("{PORT1}/gids/2"));
        h.remove(&format!("{PORT1}/gids/3"));
    }),
    ("rdma duplicate gids", "warn", "10.0.0.1 on mlx5_0/1, mlx5_1/1", "its own address", |h| {
        h.set(&format!("{PORT1}/gids/3"), "0000:0000:0000:0000:0000:ffff:0a00:0001");
    }),
    ("rdma subnets", "warn", "ens1np0, ens2np0", "arp_announce=2", |h| one_subnet(h)),
    ("rdma subnets", "warn", "ens1np0, ens2np0", "rp_filter=2", |h| {
        one_subnet(h);
        h.set("proc/sys/net/ipv4/conf/all/arp_ignore", "1");
        h.set("proc/sys/net/ipv4/conf/all/arp_announce", "2");
        h.set("proc/sys/net/ipv4/conf/ens2np0/rp_filter", "1");
    }),
    ("rdma mtu", "warn", "mlx5_0/1 1024 (ens1np0 has 1500)", "ip link set ens1np0 mtu 4200", |h| {
        h.set("sys/class/net/ens1np0/mtu", "1500");
    }),
    ("rdma rates", "warn", "mlx5_1/1 100 Gb/s, others of its model 400", "ethtool ens2np0", |h| {
        h.set(&format!("{PORT1}/rate"), "100 Gb/sec (1X NDR)");
    }),
    ("rdma errors", "warn", "mlx5_0/1 symbol_error 7", "cable", |h| {
        h.set(&format!("{PORT0}/counters/symbol_error"), "7");
    }),
    ("rdma errors", "warn", "link_downed 1", "mlx5_1/ports/1", |h| {
        h.set(&format!("{PORT1}/counters/link_downed"), "1");
    }),
    ("rdma errors", "warn", "out_of_sequence 1234", "ECN", |h| {
        h.set(&format!("{PORT1}/hw_counters/out_of_sequence"), "1234");
    }),
    ("pcie links", "warn", "0000:14:00.0 has 32 GT/s x8 of 32 GT/s x16", "slot", |h| {
        h.set(&format!("{NIC0}/current_link_width"), "8");
    }),
    ("pcie links", "warn", "16 GT/s", "lspci -vv -s 0000:84:00.0", |h| {
        h.set(&format!("{NIC1}/current_link_speed"), "16.0 GT/s PCIe");
    }),
    ("iommu", "warn", "mlx5_0", "iommu=pt", |h| h.set(&format!("{NIC0}/iommu_group/type"), "DMA-FQ")),
    ("gpudirect", "warn", "no nvidia_peermem", "modprobe nvidia_peermem", |h| {
        h.set("proc/modules", "nvidia 62 3 - Live 0x0\n");
    }),
    ("gpudirect", "warn", "this GPU driver does not export dma-bufs", "open kernel modules from 515", |h| {
        h.set("proc/modules", "nvidia 62 3 - Live 0x0\n");
        h.set(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  510.47.03\n",
        );
    }),
    ("gpu driver", "warn", "0000:13:00.0, 0000:83:00.0", "modprobe nvidia", |h| {
        h.set("proc/modules", "nvidia_peermem 16384 0 - Live 0x0\n");
        h.remove("proc/driver/nvidia/version");
    }),
    ("gpu window", "warn", "0000:83:00.0 shows 256 MiB", "Resizable BAR", |h| {
        h.set(
            "sys/bus/pci/devices/0000:83:00.0/resource",
            "0x00000000a0000000 0x00000000afffffff 0x0000000000040200\n",
        );
    }),
    ("gpu nic path", "warn", "0000:93:00.0", "switch or socket", |h| {
        // A third GPU, alone below a host bridge of a node without a NIC.
        h.set("sys/devices/pci0000:90/0000:93:00.0/class", "0x030200");
        h.set("sys/devices/pci0000:90/0000:93:00.0/vendor", "0x10de");
        h.set("sys/devices/pci0000:90/0000:93:00.0/numa_node", "3");
        h.link("sys/bus/pci/devices/0000:93:00.0", "../../../devices/pci0000:90/0000:93:00.0");
    }),
    ("pcie acs", "warn", "0000:12:01.0", "setpci -s 0000:12:01.0 ECAP_ACS+6.w=0000", |h| {
        h.set("sys/bus/pci/devices/0000:12:01.0/config", config(0x1d));
    }),
];

fn meminfo(available_kib: u64, huge_free: u64) -> String {
    format!(
        "MemTotal: 1056763936 kB\nMemAvailable: {available_kib} kB\n\
         HugePages_Total: 1024\nHugePages_Free: {huge_free}\nHugepagesize: 2048 kB\n"
    )
}

pub(crate) fn one_subnet(host: &Host) {
    host.set(
        "proc/net/route",
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
         ens1np0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\n\
         ens2np0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\n",
    );
}
