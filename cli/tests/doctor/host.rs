//! A host in a directory: the kernel's files that the doctor reads.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;

use crate::common::{json, run};
use crate::verdicts;

/// The files of a host, by path.
pub(crate) struct Host(tempfile::TempDir);

/// A GPU, a NIC and the switch above them: PCI bus, NUMA node, RDMA device, network interface, last 16 bits
/// of the GID.
const SOCKETS: [(u8, u8, &str, &str, &str); 2] =
    [(0x10, 0, "mlx5_0", "ens1np0", "0001"), (0x80, 1, "mlx5_1", "ens2np0", "0101")];

impl Host {
    pub(crate) fn empty() -> Self {
        Self(tempfile::tempdir().expect("the disk takes it"))
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn set(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("it has one")).expect("the disk takes it");
        fs::write(path, content).expect("the disk takes it");
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().expect("it has one")).expect("the disk takes it");
        let _ = fs::remove_file(&path);
        symlink(target, path).expect("the disk takes it");
    }

    pub(crate) fn remove(&self, path: &str) {
        let path = self.path().join(path);
        let meta = fs::symlink_metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        if meta.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
            .expect("the disk takes it");
    }

    /// A host with two sockets, each with a GPU and a RoCE v2 NIC below a switch, on which no check warns.
    pub(crate) fn healthy() -> Self {
        let host = Self::empty();
        for (path, content) in [
            ("proc/sys/kernel/osrelease", "6.8.0-45-generic"),
            ("sys/bus/cxl/devices/mem0/serial", "0x0"),
            ("sys/bus/dax/devices/dax0.0/size", "17179869184"),
            ("sys/bus/dax/devices/dax0.0/target_node", "2"),
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
            ("proc/sys/net/netfilter/nf_conntrack_count", "1000"),
            ("proc/sys/net/netfilter/nf_conntrack_max", "262144"),
            ("proc/net/sockstat", "sockets: used 300\nTCP: inuse 40 orphan 0 tw 12 alloc 45 mem 7\n"),
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
        host.link("sys/bus/dax/devices/dax0.0/driver", "../../../../bus/dax/drivers/device_dax");
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
            self.set(
                &format!("{dir}/resource"),
                "0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n",
            );
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

    /// Runs the doctor on this host with further `arguments`; returns the report and the exit code.
    pub(crate) fn ask(&self, arguments: &[&str]) -> (Value, Option<i32>) {
        let root = self.path().to_str().expect("a text");
        let output = run(&[&["doctor", "--json", "--root", root], arguments].concat());
        (json(&output), output.status.code())
    }

    pub(crate) fn verdicts(&self, arguments: &[&str]) -> BTreeMap<String, String> {
        verdicts(&self.ask(arguments).0)
    }
}

/// A PCI configuration space whose access control services have the control word `control`.
pub(crate) fn config(control: u16) -> Vec<u8> {
    let mut space = vec![0; 4096];
    space[0x100..0x104].copy_from_slice(&(0x0001_0001u32 | 0x148 << 20).to_le_bytes());
    space[0x148..0x14c].copy_from_slice(&0x0001_000du32.to_le_bytes());
    space[0x14e..0x150].copy_from_slice(&control.to_le_bytes());
    space
}
