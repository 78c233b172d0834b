//! RDMA devices as the kernel reports them, and what user space needs to reach them.
//!
//! Layout: Linux `Documentation/ABI/stable/sysfs-class-infiniband`; providers are found as libibverbs of
//! rdma-core does.

use std::net::Ipv6Addr;

use crate::commands::doctor::source::Source;

const DEVICES_MAX: usize = 256;
const PORTS_MAX: usize = 16;
const GIDS_MAX: usize = 256;
const PKEYS_MAX: usize = 128;

/// The RDMA devices and libraries of a machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rdma {
    /// libibverbs, or why it cannot be loaded.
    pub(crate) library: Option<Result<Library, String>>,
    /// Devices, by name.
    pub(crate) devices: Vec<Device>,
    /// Configured providers of libibverbs; `None` without a configuration directory.
    pub(crate) providers: Option<Vec<Provider>>,
    /// Limits of the control group: device, most handles, most objects.
    pub(crate) limits: Vec<(String, Option<u64>, Option<u64>)>,
}

/// The verbs library.
#[derive(Clone, Debug)]
pub(crate) struct Library {
    /// Name or path.
    pub(crate) name: String,
    /// Whether it can register dma-bufs (rdma-core 34 and later); `None` when only its file was found.
    pub(crate) dmabuf: Option<bool>,
}

/// The part of libibverbs for one driver.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    /// `mlx5`.
    pub(crate) name: String,
    /// Whether its library is where libibverbs searches; `None` when that directory is unknown.
    pub(crate) is_installed: Option<bool>,
}

/// One RDMA device.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    /// `mlx5_0`.
    pub(crate) name: String,
    /// The kernel's driver; `None` for a virtual device.
    pub(crate) driver: Option<String>,
    /// PCI address.
    pub(crate) pci: Option<String>,
    /// NUMA node, if the firmware reports it.
    pub(crate) node: Option<u32>,
    /// Type of its IOMMU domain: `DMA`, `DMA-FQ`, `identity`.
    pub(crate) iommu: Option<String>,
    /// `uverbs0`, and whether it can be opened or why not.
    pub(crate) uverbs: Option<(String, Result<(), String>)>,
    /// The ports of the device.
    pub(crate) ports: Vec<Port>,
}

impl Device {
    /// Whether the kernel emulates the device.
    pub(crate) fn is_software(&self) -> bool {
        self.pci.is_none() && self.driver.is_none()
    }

    /// The provider of libibverbs for the device, if known.
    pub(crate) fn provider(&self) -> Option<&'static str> {
        match self.driver.as_deref() {
            Some(driver) => {
                // A sub-function of a NIC has its own driver, `mlx5_core.sf`, but the same provider.
                let family = driver.split('.').next();
                PROVIDERS.iter().find(|(name, _)| Some(*name) == family).map(|(_, provider)| *provider)
            }
            None => ["rxe", "siw"].into_iter().find(|kind| self.name.starts_with(kind)),
        }
    }
}

/// Drivers of the kernel, and their providers in user space.
const PROVIDERS: [(&str, &str); 14] = [
    ("mlx5_core", "mlx5"),
    ("mlx4_core", "mlx4"),
    ("bnxt_en", "bnxt_re"),
    ("efa", "efa"),
    ("erdma", "erdma"),
    ("mana", "mana"),
    ("ice", "irdma"),
    ("i40e", "irdma"),
    ("cxgb4", "cxgb4"),
    ("hns3", "hns"),
    ("qede", "qedr"),
    ("ocrdma", "ocrdma"),
    ("ib_mthca", "mthca"),
    ("hfi1", "hfi1verbs"),
];

/// One port of a device.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    /// `mlx5_0/1`.
    pub(crate) name: String,
    /// State number (4 is ACTIVE) and name.
    pub(crate) state: (u32, String),
    /// Physical state number (5 is LinkUp) and name.
    pub(crate) physical: (u32, String),
    /// `Ethernet`, `InfiniBand`.
    pub(crate) link_layer: String,
    /// Data rate, Gb/s.
    pub(crate) rate: Option<f64>,
    /// The GIDs of the port, without empty entries.
    pub(crate) gids: Vec<Gid>,
    /// The partition keys of the port, without empty entries.
    pub(crate) pkeys: Vec<u32>,
    /// The network interfaces of the port.
    pub(crate) netdevs: Vec<NetDev>,
    /// Error counters that are not zero.
    pub(crate) errors: Vec<(String, u64)>,
}

impl Port {
    /// Whether the port carries packets.
    pub(crate) const fn is_active(&self) -> bool {
        self.state.0 == 4
    }

    /// Whether the port is RoCE.
    pub(crate) fn is_ethernet(&self) -> bool {
        self.link_layer == "Ethernet"
    }

    /// Whether the port is InfiniBand.
    pub(crate) fn is_infiniband(&self) -> bool {
        self.link_layer == "InfiniBand"
    }
}

/// A GID of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gid {
    /// The address; an IPv4 address is mapped.
    pub(crate) address: Ipv6Addr,
    /// Whether packets with it can be routed (RoCE v2).
    pub(crate) is_v2: bool,
}

impl Gid {
    /// Whether it is in fe80::/10, which is reachable on the same link only.
    pub(crate) fn is_link_local(self) -> bool {
        self.address.is_unicast_link_local()
    }
}

/// A network interface under RoCE.
#[derive(Clone, Debug)]
pub(crate) struct NetDev {
    /// `eth0`.
    pub(crate) name: String,
    /// MTU, bytes.
    pub(crate) mtu: Option<u32>,
    /// The stricter of `all` and the interface's own value, as the kernel combines them.
    pub(crate) arp_ignore: u32,
    pub(crate) arp_announce: u32,
    pub(crate) rp_filter: u32,
}

/// Counters of bit errors on the link.
pub(crate) const PHYSICAL_ERRORS: [&str; 7] = [
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "rx_icrc_encapsulated",
];
/// Counters of packets that were dropped or came too late.
const LOSS_ERRORS: [&str; 6] = [
    "port_xmit_discards",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "implied_nak_seq_err",
    "rnr_nak_retry_err",
];

/// Gathers everything; the library is loaded only on a running machine.
pub(super) fn gather(source: &Source, limits: Vec<(String, Option<u64>, Option<u64>)>) -> Rdma {
    const CLASS: &str = "sys/class/infiniband";
    let devices = source.entries(CLASS);
    let uverbs: Vec<(String, String)> = source
        .entries("sys/class/infiniband_verbs")
        .into_iter()
        .filter(|name| name.starts_with("uverbs"))
        .filter_map(|name| Some((source.line(&format!("sys/class/infiniband_verbs/{name}/ibdev"))?, name)))
        .collect();
    Rdma {
        library: library(source),
        devices: devices
            .into_iter()
            .take(DEVICES_MAX)
            .filter(|name| source.exists(&format!("{CLASS}/{name}/ports")))
            .map(|name| device(source, CLASS, name, &uverbs))
            .collect(),
        providers: providers(source),
        limits,
    }
}

fn device(source: &Source, class: &str, name: String, uverbs: &[(String, String)]) -> Device {
    let dir = format!("{class}/{name}");
    let uverbs = uverbs.iter().find(|(device, _)| *device == name).map(|(_, node)| {
        let opened = source.open_device(&format!("dev/infiniband/{node}"));
        (node.clone(), opened)
    });
    let ports = source.entries(&format!("{dir}/ports"));
    let own_netdevs = source.entries(&format!("{dir}/device/net"));
    Device {
        driver: source.link_name(&format!("{dir}/device/driver")),
        pci: source.link_name(&format!("{dir}/device")),
        node: source.number(&format!("{dir}/device/numa_node")),
        iommu: source.line(&format!("{dir}/device/iommu_group/type")),
        uverbs,
        ports: ports
            .iter()
            .take(PORTS_MAX)
            .map(|number| {
                let netdevs = if ports.len() == 1 { own_netdevs.as_slice() } else { &[] };
                port(source, &format!("{dir}/ports/{number}"), format!("{name}/{number}"), netdevs)
            })
            .collect(),
        name,
    }
}

fn port(source: &Source, dir: &str, name: String, own_netdevs: &[String]) -> Port {
    let mut netdevs: Vec<String> = Vec::new();
    let mut gids = Vec::new();
    for index in source.entries(&format!("{dir}/gids")).iter().take(GIDS_MAX) {
        let Some(address) = source.number::<Ipv6Addr>(&format!("{dir}/gids/{index}")) else { continue };
        // Empty entries read as zero, or as the subnet prefix followed by zeros.
        if address.octets()[8..] == [0; 8] {
            continue;
        }
        let kind = source.line(&format!("{dir}/gid_attrs/types/{index}")).unwrap_or_default();
        netdevs.extend(source.line(&format!("{dir}/gid_attrs/ndevs/{index}")));
        gids.push(Gid { address, is_v2: kind == "RoCE v2" });
    }
    if netdevs.is_empty() {
        netdevs.extend_from_slice(own_netdevs);
    }
    netdevs.sort_unstable();
    netdevs.dedup();
    let counter = |name: &str| {
        let value = source
            .number::<u64>(&format!("{dir}/counters/{name}"))
            .or_else(|| source.number(&format!("{dir}/hw_counters/{name}")))?;
        (value > 0).then(|| (name.to_owned(), value))
    };
    Port {
        state: numbered(source, &format!("{dir}/state")),
        physical: numbered(source, &format!("{dir}/phys_state")),
        link_layer: source.line(&format!("{dir}/link_layer")).unwrap_or_default(),
        rate: source.line(&format!("{dir}/rate")).and_then(|text| {
            let rate = text.split_whitespace().next()?.parse::<f64>().ok()?;
            rate.is_finite().then_some(rate)
        }),
        pkeys: source
            .entries(&format!("{dir}/pkeys"))
            .iter()
            .take(PKEYS_MAX)
            .filter_map(|index| source.hex(&format!("{dir}/pkeys/{index}")))
            .filter(|key| key & 0x7fff != 0)
            .collect(),
        errors: PHYSICAL_ERRORS.iter().chain(&LOSS_ERRORS).filter_map(|name| counter(name)).collect(),
        netdevs: netdevs.into_iter().map(|name| netdev(source, name)).collect(),
        gids,
        name,
    }
}

/// A line such as `4: ACTIVE`.
fn numbered(source: &Source, path: &str) -> (u32, String) {
    let line = source.line(path).unwrap_or_default();
    match line.split_once(':') {
        Some((number, name)) => (number.trim().parse().unwrap_or(0), name.trim().to_owned()),
        None => (0, "unknown".to_owned()),
    }
}

fn netdev(source: &Source, name: String) -> NetDev {
    let sysctl = |what: &str| {
        let one = |device: &str| source.number::<u32>(&format!("proc/sys/net/ipv4/conf/{device}/{what}"));
        one("all").unwrap_or(0).max(one(&name).unwrap_or(0))
    };
    NetDev {
        mtu: source.number(&format!("sys/class/net/{name}/mtu")),
        arp_ignore: sysctl("arp_ignore"),
        arp_announce: sysctl("arp_announce"),
        rp_filter: sysctl("rp_filter"),
        name,
    }
}

/// Loads the library, as the fabric does; in a copy of another machine, only looks for its file.
fn library(source: &Source) -> Option<Result<Library, String>> {
    const SONAME: &str = "libibverbs.so.1";
    if !source.is_copy() {
        let found = crate::sys::library_has(c"libibverbs.so.1", c"ibv_reg_dmabuf_mr");
        return Some(found.map(|dmabuf| Library { name: SONAME.to_owned(), dmabuf: Some(dmabuf) }));
    }
    Some(find_library(source, SONAME).map(|name| Library { name, dmabuf: None }))
}

/// Loads a library, or looks for its file in a copy of another machine. Returns its name or path.
pub(super) fn find_library(source: &Source, name: &str) -> Result<String, String> {
    if !source.is_copy() {
        let soname = std::ffi::CString::new(name).map_err(|error| error.to_string())?;
        return crate::sys::library_has(&soname, c"").map(|_| name.to_owned());
    }
    let paths = library_dirs(source).into_iter().map(|dir| format!("{dir}/{name}"));
    let mut found = paths.filter(|path| source.exists(path));
    found.next().map(|path| format!("/{path}")).ok_or_else(|| format!("no {name}"))
}

/// Directories in which distributions install libraries.
fn library_dirs(source: &Source) -> Vec<String> {
    let triples = source.entries("usr/lib").into_iter().filter(|name| name.contains("-linux-gnu"));
    let mut dirs: Vec<String> = triples.map(|triple| format!("usr/lib/{triple}")).collect();
    dirs.extend(["usr/lib64", "usr/lib", "usr/local/lib"].map(str::to_owned));
    dirs
}

/// Reads `/etc/libibverbs.d/*.driver`, each with a line `driver NAME`; the library is libNAME-rdmavNN.so.
fn providers(source: &Source) -> Option<Vec<Provider>> {
    const CONFIG: &str = "etc/libibverbs.d";
    if !source.exists(CONFIG) {
        return None;
    }
    let libraries: Vec<String> = library_dirs(source)
        .iter()
        .flat_map(|dir| source.entries(&format!("{dir}/libibverbs")))
        .filter(|name| name.starts_with("lib"))
        .collect();
    let mut providers = Vec::new();
    for file in source.entries(CONFIG).iter().filter(|name| name.ends_with(".driver")) {
        let text = source.text(&format!("{CONFIG}/{file}")).unwrap_or_default();
        for line in text.lines() {
            let Some(name) = line.trim().strip_prefix("driver ").map(str::trim) else { continue };
            // Builds by vendors write a path, which is used as it is.
            let name = name.rsplit('/').next().unwrap_or(name);
            let name = name.strip_prefix("lib").unwrap_or(name).split("-rdmav").next().unwrap_or(name);
            let prefix = format!("lib{name}-rdmav");
            providers.push(Provider {
                name: name.to_owned(),
                is_installed: (!libraries.is_empty())
                    .then(|| libraries.iter().any(|library| library.starts_with(&prefix))),
            });
        }
    }
    Some(providers)
}
