//! The facts about this machine. They contain no judgement: `checks` has that.

pub(super) mod cxl;
pub(super) mod gpu;
pub(super) mod pci;
pub(super) mod ports;
pub(super) mod rdma;

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use store_client::disk::DiskProbe;
use store_master::ArbiterReport;
use te_engine::{Fabrics, HostNeed};
use te_host::topology::{Found, read_sysfs};

use super::source::{Source, number_list};
use crate::sys;

/// The need of fabrics that use RDMA.
pub(super) const RDMA_DEVICE: HostNeed = HostNeed::DeviceClass("infiniband");

/// The facts; `None` where this machine does not report them.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// The fabrics that the user wants to use: an input of the checks rather than a fact.
    pub(super) fabrics: Fabrics,
    /// Libraries and device classes that fabrics need and this machine lacks, with an explanation.
    pub(super) missing: Vec<(HostNeed, String)>,
    /// `uname -r`.
    pub(super) kernel: Option<String>,
    /// Number of CPUs that this process may use.
    pub(super) cpus: usize,
    /// Frequency governor of the CPUs.
    pub(super) governor: Option<String>,
    /// NUMA nodes with CPUs.
    pub(super) nodes: Vec<u32>,
    /// `kernel.numa_balancing`; 0 is off.
    pub(super) numa_balancing: Option<u32>,
    pub(super) zone_reclaim: Option<u32>,
    /// Clock source of the kernel.
    pub(super) clock_source: Option<String>,
    /// Memory, bytes: total and available.
    pub(super) memory: Option<(u64, u64)>,
    /// The tightest memory limit among the control groups of this process and its current use, bytes.
    pub(super) cgroup_memory: Option<(u64, u64)>,
    /// `vm.overcommit_memory`.
    pub(super) overcommit: Option<u32>,
    /// Limits on open files: soft and hard.
    pub(super) files: Option<(u64, u64)>,
    /// Soft limit on locked memory, bytes; `u64::MAX` means unlimited.
    pub(super) memlock: Option<u64>,
    /// Whether this process may lock memory beyond the limit.
    pub(super) may_lock: bool,
    /// Huge pages: reserved, free, and bytes per page.
    pub(super) huge_pages: Option<(u64, u64, u64)>,
    /// Huge pages reserved per NUMA node, of any size.
    pub(super) huge_pages_by_node: Vec<(u32, u64)>,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub(super) transparent_huge_pages: Option<String>,
    /// Free space in /dev/shm, bytes.
    pub(super) shm_bytes: Option<u64>,
    /// Whether memory files can be created; errno otherwise.
    pub(super) memfd: Option<Result<(), i32>>,
    /// TCP congestion control: the one in force, and those available.
    pub(super) congestion: Option<String>,
    pub(super) congestion_available: Vec<String>,
    /// Largest socket buffers that a program may request, bytes.
    pub(super) rmem_max: Option<u64>,
    pub(super) wmem_max: Option<u64>,
    /// Largest socket buffers to which the kernel grows them automatically, bytes.
    pub(super) tcp_rmem_max: Option<u64>,
    pub(super) tcp_wmem_max: Option<u64>,
    /// Connections that may wait to be accepted, per listener.
    pub(super) somaxconn: Option<u32>,
    /// Ports for outgoing connections, and those excluded from them.
    pub(super) ephemeral: Option<RangeInclusive<u16>>,
    pub(super) reserved_ports: Vec<u32>,
    /// TCP sockets: open, and in TIME_WAIT.
    pub(super) tcp_sockets: Option<(u64, u64)>,
    /// Connections that the firewall tracks, and its limit.
    pub(super) conntrack: Option<(u64, u64)>,
    /// Whether an io_uring can be created; errno otherwise.
    pub(super) io_uring: Option<Result<(), i32>>,
    /// The ports to check.
    pub(super) ports: Vec<ports::Port>,
    /// Median round trip of one byte over loopback.
    pub(super) loopback: Option<Result<Duration, String>>,
    /// The master's address, and its round-trip time or why there is none.
    pub(super) master: Option<(String, Result<Duration, String>)>,
    /// Places for disks: what each can do, and the free bytes of its file system.
    pub(super) disks: Vec<(String, Result<DiskProbe, String>, Option<u64>)>,
    /// The arbiter, and what it says or why it does not.
    pub(super) arbiter: Option<(String, Result<ArbiterReport, String>)>,
    /// Directly connected subnets: interface, address, mask; in the kernel's byte order.
    pub(super) subnets: Vec<(String, u32, u32)>,
    /// RDMA devices and libraries.
    pub(super) rdma: rdma::Rdma,
    /// PCI functions.
    pub(super) pci: Vec<pci::Function>,
    /// The topology that `snowskin topology` shows and the engine uses for routing.
    pub(super) topology: Option<Found>,
    /// First line of the NVIDIA driver's version file.
    pub(super) nvidia: Option<String>,
    /// GPUs that this build reaches; `None` for the files of another machine.
    pub(super) gpus: Option<Vec<gpu::Reached>>,
    /// IMEX channels of this process, by their names in /dev.
    pub(super) imex: Vec<String>,
    /// CXL memory and pools.
    pub(super) cxl: cxl::Cxl,
    /// Loaded kernel modules.
    pub(super) modules: Vec<String>,
}

impl Facts {
    /// Whether a fabric with this need may be used.
    pub(super) fn uses(&self, need: HostNeed) -> bool {
        te_engine::fabrics().iter().any(|entry| entry.needs.contains(&need) && self.fabrics.uses(entry))
    }

    /// Whether a fabric with this need must work, because the user has named it.
    pub(super) fn requires(&self, need: HostNeed) -> bool {
        self.fabrics.named().any(|entry| entry.needs.contains(&need))
    }
}

/// What the user wants to know.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked<'a> {
    pub(super) fabrics: Fabrics,
    pub(super) ports: &'a [u16],
    pub(super) master: Option<&'a str>,
    pub(super) disks: &'a [PathBuf],
    pub(super) pools: &'a [PathBuf],
    /// With the name of the cluster.
    pub(super) arbiter: Option<(&'a str, &'a str)>,
}

/// Gathers all facts. Takes a fraction of a second, unless the master, a disk or the arbiter does not answer.
pub(super) fn gather(source: &Source, asked: &Asked<'_>) -> Facts {
    let Asked { fabrics, ports, master, disks, pools, arbiter } = *asked;
    let sysctl = |path: &str| source.line(&format!("proc/sys/{path}"));
    let last_number = |path: &str| sysctl(path)?.split_whitespace().last()?.parse().ok();
    let meminfo = source.text("proc/meminfo").unwrap_or_default();
    let mem = |name: &str| meminfo_bytes(&meminfo, name);
    let limits = source.text("proc/self/limits").unwrap_or_default();
    let errno = |result: io::Result<()>| result.map_err(|error| error.raw_os_error().unwrap_or(0));
    let is_running = !source.is_copy();
    let nodes = nodes(source);
    Facts {
        fabrics,
        missing: missing(source),
        kernel: sysctl("kernel/osrelease"),
        cpus: cpus(source),
        governor: source.line("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        numa_balancing: source.number("proc/sys/kernel/numa_balancing"),
        zone_reclaim: source.number("proc/sys/vm/zone_reclaim_mode"),
        clock_source: source.line("sys/devices/system/clocksource/clocksource0/current_clocksource"),
        memory: mem("MemTotal").zip(mem("MemAvailable")),
        cgroup_memory: cgroup_memory(source),
        overcommit: source.number("proc/sys/vm/overcommit_memory"),
        files: limit(&limits, "Max open files"),
        memlock: limit(&limits, "Max locked memory").map(|(soft, _)| soft),
        may_lock: may_lock(source),
        huge_pages: huge_pages(&meminfo),
        huge_pages_by_node: nodes.iter().map(|&node| (node, node_huge_pages(source, node))).collect(),
        nodes,
        transparent_huge_pages: source
            .line("sys/kernel/mm/transparent_hugepage/enabled")
            .as_deref()
            .and_then(bracketed),
        shm_bytes: is_running.then(|| sys::available_bytes("/dev/shm")).flatten(),
        memfd: is_running.then(|| errno(sys::try_memfd())),
        congestion: sysctl("net/ipv4/tcp_congestion_control"),
        congestion_available: sysctl("net/ipv4/tcp_available_congestion_control")
            .map(|names| names.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default(),
        rmem_max: last_number("net/core/rmem_max"),
        wmem_max: last_number("net/core/wmem_max"),
        tcp_rmem_max: last_number("net/ipv4/tcp_rmem"),
        tcp_wmem_max: last_number("net/ipv4/tcp_wmem"),
        somaxconn: source.number("proc/sys/net/core/somaxconn"),
        ephemeral: sysctl("net/ipv4/ip_local_port_range").and_then(|text| {
            let (first, last) = text.split_once(char::is_whitespace)?;
            Some(first.parse().ok()?..=last.trim().parse().ok()?)
        }),
        reserved_ports: source
            .text("proc/sys/net/ipv4/ip_local_reserved_ports")
            .map(|text| number_list(&text))
            .unwrap_or_default(),
        tcp_sockets: source.text("proc/net/sockstat").as_deref().and_then(tcp_sockets),
        conntrack: source
            .number("proc/sys/net/netfilter/nf_conntrack_count")
            .zip(source.number("proc/sys/net/netfilter/nf_conntrack_max")),
        io_uring: is_running.then(|| errno(sys::try_io_uring())),
        ports: ports::gather(source, ports),
        disks: disks.iter().map(|path| disk(path)).collect(),
        arbiter: arbiter.map(ask_arbiter),
        loopback: is_running.then(|| loopback_round_trip().map_err(|error| error.to_string())),
        master: master.map(|address| (address.to_owned(), master_round_trip(address))),
        subnets: source.text("proc/net/route").map(|text| connected(&text)).unwrap_or_default(),
        rdma: rdma::gather(source, cgroup_rdma(source)),
        pci: pci::gather(source),
        topology: read_sysfs(&source.at("sys")).ok(),
        nvidia: source.line("proc/driver/nvidia/version"),
        gpus: is_running.then(gpu::gather),
        imex: source.entries("dev/nvidia-caps-imex-channels"),
        cxl: cxl::gather(source, pools),
        modules: source
            .text("proc/modules")
            .map(|text| text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect())
            .unwrap_or_default(),
    }
}

/// The libraries and device classes that fabrics of the registry need and the machine lacks.
fn missing(source: &Source) -> Vec<(HostNeed, String)> {
    let needs = te_engine::fabrics().iter().flat_map(|entry| entry.needs);
    let lacks = |need: &HostNeed| match need {
        HostNeed::Library(name) => rdma::find_library(source, name).err(),
        HostNeed::DeviceClass(name) if source.entries(&format!("sys/class/{name}")).is_empty() => {
            Some(format!("no device in /sys/class/{name}"))
        }
        _ => None,
    };
    needs.filter_map(|need| Some((*need, lacks(need)?))).collect()
}

/// The value of a line `name:  123 kB`, in bytes; a number without a unit is taken as it is.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let mut words = rest.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    if words.next() == Some("kB") { number.checked_mul(1024) } else { Some(number) }
}

/// A line of `/proc/self/limits`: soft and hard limit; `u64::MAX` means unlimited.
fn limit(limits: &str, name: &str) -> Option<(u64, u64)> {
    let mut words = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut number = || match words.next()? {
        "unlimited" => Some(u64::MAX),
        word => word.parse().ok(),
    };
    number().zip(number())
}

fn huge_pages(meminfo: &str) -> Option<(u64, u64, u64)> {
    let value = |name| meminfo_bytes(meminfo, name);
    Some((value("HugePages_Total")?, value("HugePages_Free")?, value("Hugepagesize")?))
}

fn node_huge_pages(source: &Source, node: u32) -> u64 {
    let dir = format!("sys/devices/system/node/node{node}/hugepages");
    source
        .entries(&dir)
        .iter()
        .filter_map(|size| source.number::<u64>(&format!("{dir}/{size}/nr_hugepages")))
        .fold(0, u64::saturating_add)
}

/// `always [madvise] never` → `madvise`.
fn bracketed(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn cpus(source: &Source) -> usize {
    if source.is_copy() {
        source.line("sys/devices/system/cpu/online").map_or(0, |text| number_list(&text).len())
    } else {
        std::thread::available_parallelism().map_or(1, usize::from)
    }
}

fn nodes(source: &Source) -> Vec<u32> {
    const NODES: &str = "sys/devices/system/node";
    match source.line(&format!("{NODES}/has_cpu")) {
        Some(text) => number_list(&text),
        None => {
            source.entries(NODES).iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect()
        }
    }
}

/// CAP_IPC_LOCK (capabilities(7)) in the initial user namespace, which is where drivers check it.
fn may_lock(source: &Source) -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = source.text("proc/self/status").unwrap_or_default();
    let has = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1);
    let map = source.line("proc/self/uid_map").unwrap_or_default();
    has && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// This process's control group of `controller` and its ancestors, innermost first; and whether each is of
/// version 2.
fn cgroups(source: &Source, controller: &str) -> Vec<(String, bool)> {
    let text = source.text("proc/self/cgroup").unwrap_or_default();
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let is_v2 = controllers.is_empty();
        if !is_v2 && !controllers.split(',').any(|name| name == controller) {
            continue;
        }
        let base = if is_v2 { "sys/fs/cgroup".to_owned() } else { format!("sys/fs/cgroup/{controller}") };
        let mut dir: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | "." | "..")).collect();
        loop {
            groups.push((dir.iter().fold(base.clone(), |path, part| path + "/" + part), is_v2));
            if dir.pop().is_none() {
                break;
            }
        }
    }
    groups
}

fn cgroup_memory(source: &Source) -> Option<(u64, u64)> {
    /// Version 1 reports a number near the largest for "unlimited".
    const NONE: u64 = 1 << 60;
    cgroups(source, "memory")
        .into_iter()
        .filter_map(|(dir, is_v2)| {
            let (limit, used) = if is_v2 {
                ("memory.max", "memory.current")
            } else {
                ("memory.limit_in_bytes", "memory.usage_in_bytes")
            };
            let limit = source.number::<u64>(&format!("{dir}/{limit}")).filter(|bytes| *bytes < NONE)?;
            Some((limit, source.number(&format!("{dir}/{used}")).unwrap_or(0)))
        })
        .min_by_key(|(limit, used)| limit.saturating_sub(*used))
}

/// Lines such as `mlx5_0 hca_handle=2 hca_object=max`, where either value is limited.
fn cgroup_rdma(source: &Source) -> Vec<(String, Option<u64>, Option<u64>)> {
    let mut limits = Vec::new();
    for (dir, _) in cgroups(source, "rdma") {
        for line in source.text(&format!("{dir}/rdma.max")).unwrap_or_default().lines() {
            let Some((device, rest)) = line.split_once(' ') else { continue };
            let value = |name: &str| {
                rest.split_whitespace()
                    .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
            };
            let (handles, objects) = (value("hca_handle"), value("hca_object"));
            if handles.or(objects).is_some() {
                limits.push((device.to_owned(), handles, objects));
            }
        }
    }
    limits
}

/// Routes of `/proc/net/route` without a gateway: interface, address, mask.
fn connected(routes: &str) -> Vec<(String, u32, u32)> {
    let hex = |word: &str| u32::from_str_radix(word, 16).ok();
    routes
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().take(8).collect();
            let [name, address, "00000000", _, _, _, _, mask] = words[..] else { return None };
            let (address, mask) = (hex(address)?, hex(mask)?);
            (mask != 0).then(|| (name.to_owned(), address, mask))
        })
        .collect()
}

/// `TCP: inuse 5 orphan 0 tw 1 alloc 8 mem 1`.
fn tcp_sockets(sockstat: &str) -> Option<(u64, u64)> {
    let rest = sockstat.lines().find_map(|line| line.strip_prefix("TCP:"))?;
    let value = |name: &str| rest.split_whitespace().skip_while(|word| *word != name).nth(1)?.parse().ok();
    Some((value("inuse")?, value("tw")?))
}

fn loopback_round_trip() -> io::Result<Duration> {
    const ROUNDS: usize = 101;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    }
    let echo = std::thread::spawn(move || {
        let mut byte = [0];
        while far.read_exact(&mut byte).and_then(|()| far.write_all(&byte)).is_ok() {}
    });
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        near.write_all(&[1])?;
        near.read_exact(&mut [0])?;
        times.push(start.elapsed());
    }
    drop(near);
    let _ = echo.join();
    times.sort_unstable();
    Ok(times[ROUNDS / 2])
}

fn disk(path: &Path) -> (String, Result<DiskProbe, String>, Option<u64>) {
    let name = path.display().to_string();
    let free = sys::available_bytes(&name);
    (name, DiskProbe::of(path).map_err(|error| error.to_string()), free)
}

fn ask_arbiter((arbiter, cluster): (&str, &str)) -> (String, Result<ArbiterReport, String>) {
    (arbiter.to_owned(), ArbiterReport::ask(arbiter, cluster))
}

fn master_round_trip(address: &str) -> Result<Duration, String> {
    super::resolve(address).map_err(|error| error.to_string())?;
    crate::commands::ping_master(address).map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        let text = "MemTotal:       24675112 kB\nHugePages_Total:       3\nHugePages_Free:        2\nHugepagesize:       2048 kB\n";
        assert_eq!(meminfo_bytes(text, "MemTotal"), Some(24_675_112 << 10));
        assert_eq!(meminfo_bytes(text, "Mem"), None);
        assert_eq!(meminfo_bytes("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
        assert_eq!(huge_pages(text), Some((3, 2, 2 << 20)));
        assert_eq!(bracketed("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(bracketed("never"), None);
        assert_eq!(tcp_sockets("UDP: inuse 1\nTCP: inuse 5 orphan 0 tw 7 alloc 8 mem 1\n"), Some((5, 7)));
        assert_eq!(tcp_sockets("TCP: inuse"), None);
        let text = "Limit    Soft Limit  Hard Limit  Units\nMax open files   1024   unlimited   files\nMax nice priority  0  0\n";
        assert_eq!(limit(text, "Max open files"), Some((1024, u64::MAX)));
        assert_eq!(limit(text, "Max locked memory"), None);
        let text = "Iface\tDestination\tGateway\nens1\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\nens1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        assert_eq!(connected(text), [("ens1".to_owned(), 0x0a, 0xffff)]);
    }

    #[test]
    fn this_machine_can_be_examined() {
        let facts = gather(&Source::this_machine(), &Asked::default());
        assert!(facts.cpus >= 1 && facts.files.is_some() && facts.kernel.is_some());
        assert_eq!(facts.files, sys::limit(libc::RLIMIT_NOFILE));
        assert_eq!(facts.memlock, sys::limit(libc::RLIMIT_MEMLOCK).map(|(soft, _)| soft));
        assert!(facts.loopback.unwrap().is_ok());
    }
}
