//! The doctor, asked about hosts that are directories: a healthy one, the same with one setting broken, one without
//! anything, one full of garbage; and about the host this runs on.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use common::{assert_exit, json, run, stderr, stdout};
use serde_json::Value;

/// Files of a host, by path.
struct Host(tempfile::TempDir);

/// One GPU, one NIC and the switch above them: PCI bus, NUMA node, RDMA device, network interface, the GID's last 16 bits.
const SOCKETS: [(u8, u8, &str, &str, &str); 2] =
    [(0x10, 0, "mlx5_0", "ens1np0", "0001"), (0x80, 1, "mlx5_1", "ens2np0", "0101")];

impl Host {
    fn empty() -> Self {
        Self(tempfile::tempdir().expect("the disk takes it"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn set(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("it has one")).expect("the disk takes it");
        fs::write(path, content).expect("the disk takes it");
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("it has one")).expect("the disk takes it");
        let _ = fs::remove_file(&path);
        symlink(target, path).expect("the disk takes it");
    }

    fn remove(&self, path: &str) {
        let path = self.path().join(path);
        let meta = fs::symlink_metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        if meta.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
            .expect("the disk takes it");
    }

    /// Two sockets, each with a GPU and a RoCE v2 NIC below a switch; nothing to complain about.
    fn healthy() -> Self {
        let host = Self::empty();
        for (path, content) in [
            ("proc/sys/kernel/osrelease", "6.8.0-45-generic"),
            ("proc/sys/kernel/numa_balancing", "0"),
            ("proc/sys/vm/zone_reclaim_mode", "0"),
            ("proc/sys/vm/overcommit_memory", "0"),
            ("proc/sys/net/ipv4/tcp_congestion_control", "cubic"),
            ("proc/sys/net/ipv4/tcp_available_congestion_control", "reno cubic bbr"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t16777216"),
            ("proc/sys/net/ipv4/tcp_wmem", "4096\t65536\t16777216"),
            ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999"),
            ("proc/sys/net/ipv4/ip_local_reserved_ports", "50051"),
            ("proc/sys/net/ipv4/conf/all/rp_filter", "0"),
            ("proc/sys/net/core/somaxconn", "4096"),
            ("proc/sys/net/core/rmem_max", "16777216"),
            ("proc/sys/net/core/wmem_max", "16777216"),
            (
                "proc/meminfo",
                "MemTotal:  1056763936 kB\nMemAvailable:  1000000000 kB\n\
                 HugePages_Total:  1024\nHugePages_Free:  512\nHugepagesize:  2048 kB\n",
            ),
            (
                "proc/self/limits",
                "Max open files   1024   1048576   files\nMax locked memory   unlimited   unlimited   bytes\n",
            ),
            ("proc/self/status", "Name:\tsnowskin\nCapEff:\t0000000000000000\n"),
            ("proc/self/uid_map", "         0          0 4294967295"),
            ("proc/self/cgroup", "0::/system.slice/node.service"),
            ("sys/fs/cgroup/system.slice/memory.max", "1000000000000"),
            ("sys/fs/cgroup/system.slice/memory.current", "1000000000"),
            ("sys/fs/cgroup/system.slice/node.service/memory.max", "max"),
            ("sys/fs/cgroup/system.slice/node.service/rdma.max", "mlx5_0 hca_handle=max hca_object=max\n"),
            (
                "proc/net/tcp",
                "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                 0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 149 1 0\n",
            ),
            (
                "proc/net/route",
                "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
                 ens1np0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n\
                 ens2np0\t0001000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n",
            ),
            (
                "proc/modules",
                "nvidia_peermem 16384 0 - Live 0x0\nnvidia 62 3 nvidia_peermem, Live 0x0\nmlx5_ib 1 0\n",
            ),
            (
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:\n",
            ),
            ("sys/devices/system/cpu/online", "0-127"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance"),
            ("sys/devices/system/node/has_cpu", "0-1"),
            ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "512"),
            ("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "512"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
            ("usr/lib/x86_64-linux-gnu/libibverbs.so.1", ""),
            ("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so", ""),
            ("etc/libibverbs.d/mlx5.driver", "driver mlx5\n"),
            ("etc/libibverbs.d/rxe.driver", "driver rxe\n"),
        ] {
            host.set(path, content);
        }
        for (i, (bus, node, device, netdev, gid)) in SOCKETS.into_iter().enumerate() {
            host.socket(i, bus, node, device, netdev, gid);
        }
        host
    }

    fn socket(&self, i: usize, bus: u8, node: u8, device: &str, netdev: &str, gid: &str) {
        let root = format!("0000:{bus:02x}:01.0");
        let upstream = format!("0000:{:02x}:00.0", bus + 1);
        let (gpu, nic) = (format!("0000:{:02x}:00.0", bus + 3), format!("0000:{:02x}:00.0", bus + 4));
        let tree = format!("sys/devices/pci0000:{bus:02x}");
        let (above_gpu, above_nic) =
            (format!("0000:{:02x}:01.0", bus + 2), format!("0000:{:02x}:02.0", bus + 2));
        for (path, class, ids) in [
            (root.clone(), "0x060400", ["0x8086", "0x347a"]),
            (format!("{root}/{upstream}"), "0x060400", ["0x1000", "0xc030"]),
            (format!("{root}/{upstream}/{above_gpu}"), "0x060400", ["0x1000", "0xc030"]),
            (format!("{root}/{upstream}/{above_nic}"), "0x060400", ["0x1000", "0xc030"]),
            (format!("{root}/{upstream}/{above_gpu}/{gpu}"), "0x030200", ["0x10de", "0x2330"]),
            (format!("{root}/{upstream}/{above_nic}/{nic}"), "0x020000", ["0x15b3", "0x1021"]),
        ] {
            let dir = format!("{tree}/{path}");
            self.set(&format!("{dir}/class"), class);
            self.set(&format!("{dir}/vendor"), ids[0]);
            self.set(&format!("{dir}/device"), ids[1]);
            self.set(&format!("{dir}/numa_node"), node.to_string());
            self.set(&format!("{dir}/config"), config(0));
            let address = path.rsplit('/').next().expect("one part");
            self.link(
                &format!("sys/bus/pci/devices/{address}"),
                &format!("../../../devices/pci0000:{bus:02x}/{path}"),
            );
        }
        let dir = format!("{tree}/{root}/{upstream}/{above_nic}/{nic}");
        for (path, content) in [
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_width", "16"),
            ("iommu_group/type", "identity"),
            (&format!("net/{netdev}/mtu"), "9000"),
        ] {
            self.set(&format!("{dir}/{path}"), content);
        }
        self.link(&format!("{dir}/driver"), "../../../../../../../bus/pci/drivers/mlx5_core");
        self.set(&format!("sys/class/net/{netdev}/mtu"), "9000");
        self.link(
            &format!("sys/class/infiniband/{device}/device"),
            &format!("../../../bus/pci/devices/{nic}"),
        );
        let global = format!("0000:0000:0000:0000:0000:ffff:0a00:{gid}");
        let local = format!("fe80:0000:0000:0000:0ac0:ebff:fe12:{gid}");
        let none = "0000:0000:0000:0000:0000:0000:0000:0000";
        for (path, content) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("link_layer", "Ethernet"),
            ("rate", "400 Gb/sec (4X NDR)"),
            ("pkeys/0", "0xffff"),
            ("pkeys/1", "0x0000"),
            ("gids/0", &local),
            ("gids/1", &local),
            ("gids/2", &global),
            ("gids/3", &global),
            ("gids/4", none),
            ("gid_attrs/types/0", "IB/RoCE v1"),
            ("gid_attrs/types/1", "RoCE v2"),
            ("gid_attrs/types/2", "IB/RoCE v1"),
            ("gid_attrs/types/3", "RoCE v2"),
            ("gid_attrs/ndevs/0", netdev),
            ("gid_attrs/ndevs/3", netdev),
            ("counters/symbol_error", "0"),
            ("counters/link_downed", "0"),
            ("counters/port_rcv_data", "123456789"),
            ("hw_counters/out_of_sequence", "0"),
        ] {
            self.set(&format!("sys/class/infiniband/{device}/ports/1/{path}"), content);
        }
        self.set(&format!("sys/class/infiniband_verbs/uverbs{i}/ibdev"), device);
        self.set("sys/class/infiniband_verbs/abi_version", "6");
        self.set(&format!("dev/infiniband/uverbs{i}"), "");
    }

    /// Asks, with `arguments` besides, and gives the report and the exit code.
    fn ask(&self, arguments: &[&str]) -> (Value, Option<i32>) {
        let root = self.path().to_str().expect("a text");
        let output = run(&[&["doctor", "--json", "--root", root], arguments].concat());
        (json(&output), output.status.code())
    }

    fn verdicts(&self, arguments: &[&str]) -> BTreeMap<String, String> {
        verdicts(&self.ask(arguments).0)
    }
}

/// PCI configuration space whose access control services say `control`.
fn config(control: u16) -> Vec<u8> {
    let mut space = vec![0; 4096];
    space[0x100..0x104].copy_from_slice(&(0x0001_0001u32 | 0x148 << 20).to_le_bytes());
    space[0x148..0x14c].copy_from_slice(&0x0001_000du32.to_le_bytes());
    space[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
    space
}

fn text<'a>(finding: &'a Value, field: &str) -> &'a str {
    finding[field].as_str().unwrap_or("")
}

fn checks(report: &Value) -> &[Value] {
    report["checks"].as_array().expect("a list")
}

fn verdicts(report: &Value) -> BTreeMap<String, String> {
    checks(report).iter().map(|f| (text(f, "check").to_owned(), text(f, "verdict").to_owned())).collect()
}

/// What a copy of files cannot tell; `firewall` nobody can.
const NOT_IN_FILES: [&str; 6] = ["/dev/shm", "memfd", "io_uring", "firewall", "tcp over loopback", "master"];
/// What a host of Ethernet alone cannot have wrong.
const INFINIBAND_ONLY: &str = "rdma partitions";

#[test]
fn a_healthy_host_has_nothing_to_fix() {
    let host = Host::healthy();
    for arguments in [&[][..], &["--fabric", "rdma"]] {
        let (report, code) = host.ask(arguments);
        assert_eq!(
            (code, &report["verdict"], &report["failed"], &report["warned"]),
            (Some(0), &"ok".into(), &0.into(), &0.into())
        );
        for finding in checks(&report) {
            let check = text(finding, "check");
            let expected =
                if NOT_IN_FILES.contains(&check) || check == INFINIBAND_ONLY { "skip" } else { "ok" };
            assert_eq!(text(finding, "verdict"), expected, "{finding}");
            assert!(finding.get("fix").is_none() && !text(finding, "why").is_empty(), "{finding}");
        }
    }
    let shown = stdout(&run(&["doctor", "--root", host.path().to_str().unwrap()]));
    assert!(shown.ends_with("Nothing to fix.\n"), "{shown}");
    assert!(shown.contains("mlx5_0/1 10.0.0.1, mlx5_1/1 10.0.1.1"), "{shown}");
}

/// Breaks one setting of a healthy host.
type Break = fn(&Host);

const PORT0: &str = "sys/class/infiniband/mlx5_0/ports/1";
const PORT1: &str = "sys/class/infiniband/mlx5_1/ports/1";
const NIC0: &str = "sys/bus/pci/devices/0000:14:00.0";
const NIC1: &str = "sys/bus/pci/devices/0000:84:00.0";

/// The check that changes, to which verdict, what its finding says, what its fix names, and how to break it.
const BROKEN: &[(&str, &str, &str, &str, Break)] = &[
    ("kernel", "fail", "3.10", "5.15", |h| h.set("proc/sys/kernel/osrelease", "3.10.0-1160.el7")),
    ("kernel", "warn", "5.4", "5.15", |h| h.set("proc/sys/kernel/osrelease", "5.4.0")),
    ("cpus", "warn", "1", "two", |h| h.set("sys/devices/system/cpu/online", "0")),
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
    ("ports", "warn", "50051 held by java (process 77)", "sport = :50051", |h| {
        h.set("proc/net/tcp6", "  0: 00000000000000000000000000000000:C383 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 4242 1\n");
        h.link("proc/77/fd/5", "socket:[4242]");
        h.set("proc/77/comm", "java");
    }),
    ("ports", "warn", "9003 not free", "--http", |h| {
        h.set("proc/net/tcp", "  0: 0100007F:232B 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n");
    }),
    ("ephemeral ports", "warn", "holds 50051", "ip_local_reserved_ports=7,50051", |h| {
        h.set("proc/sys/net/ipv4/ip_local_reserved_ports", "7");
    }),
    ("ephemeral ports", "warn", "60000 to 60999", "ip_local_port_range", |h| {
        h.set("proc/sys/net/ipv4/ip_local_port_range", "60000\t60999");
    }),
    ("libibverbs", "fail", "libibverbs.so.1", "libibverbs1", |h| {
        h.remove("usr/lib/x86_64-linux-gnu/libibverbs.so.1");
    }),
    ("rdma providers", "fail", "none for mlx5", "ibverbs-providers", |h| {
        h.remove("etc/libibverbs.d/mlx5.driver")
    }),
    ("rdma providers", "fail", "its library is not there", "same release", |h| {
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
    ("rdma gids", "fail", "none of RoCE v2", "cma_roce_mode -d mlx5_0 -p 1", |h| {
        h.set(&format!("{PORT0}/gid_attrs/types/1"), "IB/RoCE v1");
        h.set(&format!("{PORT0}/gid_attrs/types/3"), "IB/RoCE v1");
    }),
    ("rdma gids", "warn", "link-local", "ip addr add 10.0.0.1/24 dev ens2np0", |h| {
        h.remove(&format!("{PORT1}/gids/2"));
        h.remove(&format!("{PORT1}/gids/3"));
    }),
    ("rdma duplicate gids", "warn", "10.0.0.1 on mlx5_0/1, mlx5_1/1", "address of its own", |h| {
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
    ("rdma rates", "warn", "mlx5_1/1 100 Gb/s, its like 400", "ethtool ens2np0", |h| {
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
    ("gpudirect", "warn", "this GPU driver makes no dma-bufs", "open kernel modules from 515", |h| {
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

fn one_subnet(host: &Host) {
    host.set(
        "proc/net/route",
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
         ens1np0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\n\
         ens2np0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\n",
    );
}

#[test]
fn each_broken_setting_changes_its_own_check_alone_and_its_fix_names_the_knob() {
    let before = Host::healthy().verdicts(&[]);
    let mut wrong = Vec::new();
    for (check, verdict, found, fix, break_it) in BROKEN {
        let host = Host::healthy();
        break_it(&host);
        let (report, code) = host.ask(&[]);
        let finding = checks(&report).iter().find(|f| text(f, "check") == *check).unwrap();
        let way_out = format!("{}\n{}", text(finding, "fix"), text(finding, "command"));
        let expected = text(finding, "verdict") == *verdict
            && text(finding, "found").contains(found)
            && way_out.contains(fix)
            && code == Some(i32::from(*verdict == "fail"));
        if !expected {
            wrong.push(format!("{check}: not `{verdict}` with `{found}` and `{fix}`, but {finding}"));
        }
        for (other, verdict) in verdicts(&report) {
            if other != *check && verdict != before[&other] {
                wrong.push(format!("{check} ({found}) also made {other} {verdict}"));
            }
        }
    }
    for check in before.keys() {
        let elsewhere =
            [&NOT_IN_FILES[..], &["rdma devices", INFINIBAND_ONLY]].concat().contains(&check.as_str());
        if !elsewhere && !BROKEN.iter().any(|(name, ..)| name == check) {
            wrong.push(format!("nothing breaks {check}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_old_kernel_has_no_dma_bufs_either() {
    let host = Host::healthy();
    host.set("proc/modules", "nvidia 62 3 - Live 0x0\n");
    host.set(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n",
    );
    assert_eq!(host.verdicts(&[])["gpudirect"], "ok");
    host.set("proc/sys/kernel/osrelease", "5.10.0-28-amd64");
    let (report, _) = host.ask(&[]);
    let finding = checks(&report).iter().find(|f| text(f, "check") == "gpudirect").unwrap();
    assert!(text(finding, "found").contains("before Linux 5.12"), "{finding}");
    assert_eq!(report["warned"], 2, "the kernel itself is the other");
}

#[test]
fn what_looks_broken_but_works_is_left_alone() {
    let fine: &[(&str, &str, Break)] = &[
        ("locked memory", "CAP_IPC_LOCK", |h| {
            h.set(
                "proc/self/limits",
                "Max open files  1024  1048576  files\nMax locked memory  65536  65536  bytes\n",
            );
            h.set("proc/self/status", "CapEff:\t0000000000004000\n");
        }),
        ("ports", "held by snowskin", |h| {
            h.set("proc/net/tcp", "  0: 00000000:C383 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n");
            h.link("proc/77/fd/5", "socket:[4242]");
            h.set("proc/77/comm", "snowskin");
        }),
        ("rdma subnets", "answers for itself", |h| {
            one_subnet(h);
            h.set("proc/sys/net/ipv4/conf/all/arp_ignore", "1");
            h.set("proc/sys/net/ipv4/conf/all/arp_announce", "2");
            h.set("proc/sys/net/ipv4/conf/all/rp_filter", "2");
        }),
        ("gpudirect", "dma-buf", |h| {
            h.set("proc/modules", "nvidia 62 3 - Live 0x0\n");
            h.set(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n",
            );
        }),
        ("rdma gids", "2001:db8::1", |h| {
            h.remove(&format!("{PORT0}/gids/2"));
            h.set(&format!("{PORT0}/gids/3"), "2001:0db8:0000:0000:0000:0000:0000:0001");
        }),
        ("rdma providers", "mlx5", |h| {
            h.set(
                "etc/libibverbs.d/mlx5.driver",
                "# vendor's\ndriver /usr/lib/x86_64-linux-gnu/libibverbs/libmlx5\n",
            );
        }),
        // Different models may differ.
        ("rdma rates", "25 Gb/s", |h| {
            h.set(&format!("{NIC1}/device"), "0x1017");
            h.set(&format!("{PORT1}/rate"), "25 Gb/sec (1X EDR)");
        }),
    ];
    let before = Host::healthy().verdicts(&[]);
    for (check, found, change) in fine {
        let host = Host::healthy();
        change(&host);
        let (report, _) = host.ask(&[]);
        let finding = checks(&report).iter().find(|f| text(f, "check") == *check).unwrap();
        assert!(text(finding, "found").contains(found), "{finding}");
        assert_eq!(verdicts(&report), before);
    }
}

#[test]
fn infiniband_is_judged_by_its_own_rules() {
    let host = Host::healthy();
    for port in [PORT0, PORT1] {
        host.set(&format!("{port}/link_layer"), "InfiniBand");
        host.remove(&format!("{port}/gids"));
        host.remove(&format!("{port}/gid_attrs"));
    }
    host.set(&format!("{PORT0}/gids/0"), "fe80:0000:0000:0000:e8eb:d303:0012:3456");
    host.set(&format!("{PORT1}/gids/0"), "fe80:0000:0000:0000:e8eb:d303:0012:789a");
    host.set(&format!("{PORT0}/gids/1"), "fe80:0000:0000:0000:0000:0000:0000:0000");
    host.set(&format!("{PORT1}/gids/1"), "fe80:0000:0000:0000:0000:0000:0000:0000");
    let (report, code) = host.ask(&["--fabric", "rdma"]);
    assert_eq!((code, &report["warned"]), (Some(0), &0.into()), "{report}");
    let found = verdicts(&report);
    assert_eq!([&found["rdma gids"], &found["rdma partitions"], &found["rdma mtu"]], ["ok", "ok", "skip"]);

    host.set(&format!("{PORT1}/pkeys/0"), "0x7fff");
    let (report, _) = host.ask(&[]);
    let finding = checks(&report).iter().find(|f| text(f, "check") == INFINIBAND_ONLY).unwrap();
    assert_eq!((text(finding, "verdict"), &report["warned"]), ("warn", &1.into()), "{finding}");
    assert!(text(finding, "fix").contains("partitions.conf") && text(finding, "found").contains("mlx5_1/1"));

    host.set(&format!("{PORT1}/gids/0"), "fe80:0000:0000:0000:e8eb:d303:0012:3456");
    assert_eq!(host.verdicts(&[])["rdma duplicate gids"], "warn");
}

/// Everything about RDMA of a host that has none.
fn without_rdma() -> Host {
    let host = Host::healthy();
    for path in [
        "sys/class/infiniband",
        "sys/class/infiniband_verbs",
        "dev/infiniband",
        "etc/libibverbs.d",
        "usr/lib/x86_64-linux-gnu",
        "sys/bus/pci/devices",
        "proc/driver",
    ] {
        host.remove(path);
    }
    host.set("sys/devices/system/node/has_cpu", "0");
    host
}

#[test]
fn a_host_without_rdma_has_no_fault_unless_rdma_was_asked_for() {
    let host = without_rdma();
    let (report, code) = host.ask(&[]);
    assert_eq!((code, &report["failed"], &report["warned"]), (Some(0), &0.into(), &0.into()), "{report}");
    for finding in checks(&report).iter().filter(|f| ["rdma", "gpu"].contains(&text(f, "area"))) {
        assert_eq!(text(finding, "verdict"), "skip", "{finding}");
    }
    let shown = stdout(&run(&["doctor", "--root", host.path().to_str().unwrap()]));
    let rdma = shown.split("rdma\n").nth(1).unwrap().split("\n\n").next().unwrap();
    assert_eq!(rdma.lines().count(), 2, "{shown}");

    let (report, code) = host.ask(&["--fabric", "rdma"]);
    assert_eq!(code, Some(1));
    let failed: Vec<_> = checks(&report).iter().filter(|f| text(f, "verdict") == "fail").collect();
    let names: Vec<_> = failed.iter().map(|f| text(f, "check")).collect();
    assert_eq!(names, ["rdma devices", "libibverbs"]);
    for (finding, way_out) in failed.iter().zip(["rdma link add rxe0", "apt-get install libibverbs1"]) {
        assert!(text(finding, "command").contains(way_out), "{finding}");
    }
}

#[test]
fn a_nic_whose_driver_is_not_loaded_is_seen() {
    let host = Host::healthy();
    host.remove("sys/class/infiniband");
    let (report, code) = host.ask(&[]);
    let finding = checks(&report).iter().find(|f| text(f, "check") == "rdma devices").unwrap();
    assert_eq!((text(finding, "verdict"), code), ("warn", Some(0)), "{finding}");
    assert!(text(finding, "found").contains("0000:14:00.0") && text(finding, "command").contains("mlx5_ib"));
    assert_eq!(host.ask(&["--fabric", "rdma"]).1, Some(1));
    assert_eq!(host.verdicts(&["--fabric", "tcp"])["rdma devices"], "skip");
}

#[test]
fn whoever_means_to_use_tcp_hears_nothing_of_broken_rdma() {
    let host = Host::healthy();
    for path in
        ["usr/lib/x86_64-linux-gnu/libibverbs.so.1", "dev/infiniband/uverbs0", "etc/libibverbs.d/mlx5.driver"]
    {
        host.remove(path);
    }
    host.set(
        "proc/self/limits",
        "Max open files  1024  1048576  files\nMax locked memory  65536  65536  bytes\n",
    );
    assert_eq!(host.ask(&[]).1, Some(1));
    let (report, code) = host.ask(&["--fabric", "tcp"]);
    assert_eq!(code, Some(0), "{report}");
    for finding in checks(&report).iter().filter(|f| text(f, "area") == "rdma") {
        assert_eq!(text(finding, "verdict"), "skip", "{finding}");
    }
}

#[test]
fn soft_roce_works_and_is_called_what_it_is() {
    let host = without_rdma();
    for (path, content) in [
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("link_layer", "Ethernet"),
        ("rate", "2.5 Gb/sec (1X SDR)"),
        ("gids/0", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        ("gid_attrs/types/0", "RoCE v2"),
        ("gid_attrs/ndevs/0", "eth0"),
    ] {
        host.set(&format!("sys/class/infiniband/rxe0/ports/1/{path}"), content);
    }
    for (path, content) in [
        ("sys/class/infiniband/rxe0/parent", "eth0"),
        ("sys/class/net/eth0/mtu", "4200"),
        ("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0"),
        ("dev/infiniband/uverbs0", ""),
        ("usr/lib64/libibverbs.so.1", ""),
        ("usr/lib64/libibverbs/librxe-rdmav34.so", ""),
        ("etc/libibverbs.d/rxe.driver", "driver rxe"),
    ] {
        host.set(path, content);
    }
    let (report, code) = host.ask(&["--fabric", "rdma"]);
    assert_eq!((code, &report["warned"]), (Some(0), &1.into()), "{report}");
    let found = verdicts(&report);
    assert_eq!(found["rdma devices"], "warn");
    for check in
        ["libibverbs", "rdma providers", "rdma device nodes", "rdma port state", "rdma gids", "rdma mtu"]
    {
        assert_eq!(found[check], "ok", "{check}");
    }
}

#[test]
fn all_ports_down_is_a_failure_and_the_rest_is_not_judged() {
    let host = Host::healthy();
    for port in [PORT0, PORT1] {
        host.set(&format!("{port}/state"), "1: DOWN");
        host.set(&format!("{port}/phys_state"), "2: Polling");
    }
    let (report, code) = host.ask(&[]);
    let found = verdicts(&report);
    assert_eq!((code, found["rdma port state"].as_str()), (Some(1), "fail"));
    for check in ["rdma gids", "rdma mtu", "rdma rates", "rdma subnets"] {
        assert_eq!(found[check], "skip", "{check}");
    }
}

#[test]
fn a_host_that_says_nothing_is_skipped_over() {
    let (report, code) = Host::empty().ask(&[]);
    assert_eq!((code, &report["failed"], &report["warned"]), (Some(0), &0.into(), &0.into()), "{report}");
}

/// Every file of a healthy host in turn, and then all at once, holds nonsense. No verdict is expected: only that there is one.
#[test]
fn garbage_in_the_kernels_files_is_survived() {
    fn files(dir: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(dir).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                files(&entry.path(), found);
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    let garbage: [&[u8]; 6] = [
        b"",
        b"\xff\xfe\x00\x1b[2J\x07\n\x80",
        b"-1\n18446744073709551616: 99999999999999999999 kB [ 0-4294967295,",
        b"4294967295: \xf0\x9f\x8c\x91 NaN inf Gb/sec 0x 0.0 GT/s ::::/:::/../../..",
        b"0::/../../../../etc\n1:memory,rdma:\n::\n",
        &[b'9'; 100_000],
    ];
    let sound = |host: &Host| {
        for fabric in ["auto", "rdma"] {
            let output =
                run(&["doctor", "--json", "--fabric", fabric, "--root", host.path().to_str().unwrap()]);
            assert!(matches!(output.status.code(), Some(0 | 1)), "{}", stderr(&output));
            assert_eq!(stderr(&output), "");
            assert!(checks(&json(&output)).len() > 40);
        }
    };
    for (i, bytes) in garbage.iter().enumerate() {
        let host = Host::healthy();
        let mut all = Vec::new();
        files(host.path(), &mut all);
        all.sort();
        assert!(all.len() > 100);
        // All at once, and every sixth alone: over the six kinds of garbage each file has its turn.
        for path in all.iter().skip(i).step_by(garbage.len()) {
            let good = fs::read(path).unwrap();
            fs::write(path, bytes).unwrap();
            sound(&host);
            fs::write(path, good).unwrap();
        }
        for path in &all {
            fs::write(path, bytes).unwrap();
        }
        sound(&host);
        let shown = stdout(&run(&["doctor", "--root", host.path().to_str().unwrap()]));
        assert!(
            shown.chars().all(|c| c == '\n' || !c.is_control()),
            "a terminal must not be driven by {bytes:?}"
        );
    }
}

#[test]
fn names_that_lead_nowhere_are_survived() {
    let host = Host::healthy();
    host.link("sys/class/infiniband/mlx5_2", "mlx5_2");
    host.set("sys/class/infiniband/mlx5_3", "a file");
    host.set("sys/class/infiniband/mlx5_4/ports", "a file");
    fs::create_dir_all(host.path().join("sys/class/infiniband/mlx5_5/ports/x")).unwrap();
    host.link("sys/bus/pci/devices/0000:ff:00.0", "../../nowhere");
    host.link("proc/99/fd/1", "/");
    host.set("sys/class/infiniband_verbs/uverbs9/ibdev", "../../../../etc/passwd");
    let (report, _) = host.ask(&[]);
    assert_eq!(checks(&report).len(), Host::healthy().verdicts(&[]).len());
}

#[test]
fn this_host_can_be_judged_and_the_report_has_its_form() {
    for fabric in ["auto", "rdma", "tcp"] {
        let output = run(&["doctor", "--json", "--fabric", fabric]);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{}", stderr(&output));
        let report = json(&output);
        let worst = |verdict: &str| checks(&report).iter().filter(|f| text(f, "verdict") == verdict).count();
        assert_eq!(report["failed"].as_u64(), Some(worst("fail") as u64));
        assert_eq!(report["warned"].as_u64(), Some(worst("warn") as u64));
        assert_eq!(output.status.code(), Some(i32::from(worst("fail") > 0)));
        for finding in checks(&report) {
            let fixable = matches!(text(finding, "verdict"), "warn" | "fail");
            assert_eq!(fixable, !text(finding, "fix").is_empty(), "{finding}");
            for field in ["area", "check", "found", "why"] {
                assert!(!text(finding, field).is_empty(), "{finding}");
            }
        }
    }
}

#[test]
fn a_root_that_is_no_directory_is_wrong_usage() {
    let output = run(&["doctor", "--root", "/no/such/place"]);
    assert_exit(&output, 2);
    assert!(stderr(&output).contains("/no/such/place"), "{}", stderr(&output));
}
