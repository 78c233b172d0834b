//! Reads a [`Topology`] from sysfs, or from a directory that looks like it.
//!
//! Files that are read, all below the root (`Documentation/ABI` of Linux describes them):
//!
//! ```text
//!   devices/system/node/nodeN/{cpulist,meminfo,distance}       NUMA nodes
//!   bus/pci/devices/ADDRESS ─► ../../../devices/pciDDDD:BB/…   where a device hangs; {class,vendor,numa_node},
//!                                                              {current,max}_link_{speed,width}
//!   class/infiniband/NAME/{device,parent,ports/N/{state,rate}} RDMA devices
//!   class/net/NAME/{device,operstate,speed}                    network devices that are not one of those
//! ```

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::string::String;
use std::vec::Vec;

use te_core::topology::{
    GPUS_MAX, Gpu, GpuVendor, NICS_MAX, NODES_MAX, Nic, NicKind, NicPort, NumaNode, PORTS_MAX, PciAddress,
    PciLink, PciPath, PortState, Topology, TopologyError,
};

use super::found::{Found, Warnings};
use super::{GPU_CLASSES, SLIT_LOCAL, SLIT_REMOTE, gpu_vendor, is_plain};

/// Where Linux mounts sysfs.
pub const SYSFS: &str = "/sys";
/// Longest file that is read, bytes; the rest of a longer file is ignored.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Entries of one directory that are read.
const ENTRIES_MAX: usize = 1 << 16;

/// Reads the host under `root`, which is [`SYSFS`] except in tests and in containers that mount it elsewhere.
///
/// A host without NUMA information has one node; one without PCI or NICs has no devices. Invalid values, and
/// devices beyond the limits of [`te_core::topology`], are left out with a warning.
///
/// # Errors
/// When `root` cannot be read, or has none of `devices`, `class` and `bus`.
pub fn read_sysfs(root: &Path) -> Result<Found, SysfsError> {
    fs::read_dir(root).map_err(|source| SysfsError::Root { path: root.into(), source })?;
    if !["devices", "class", "bus"].iter().any(|name| root.join(name).is_dir()) {
        return Err(SysfsError::NotSysfs(root.into()));
    }
    let mut reader = Reader { root, nodes: Vec::new(), warnings: Warnings::default() };
    let nodes = reader.nodes();
    reader.nodes = nodes.iter().map(|node| node.id).collect();
    let gpus = reader.gpus();
    let mut nics = reader.rdma_nics();
    reader.ethernet_nics(&mut nics);
    let warnings = reader.warnings.into_vec();
    let topology = Topology::new(nodes, nics, gpus).map_err(SysfsError::Topology)?;
    Ok(Found { topology, warnings })
}

struct Reader<'a> {
    root: &'a Path,
    /// Ids of the NUMA nodes.
    nodes: Vec<u16>,
    warnings: Warnings,
}

impl Reader<'_> {
    fn nodes(&mut self) -> Vec<NumaNode> {
        let base = Path::new("devices/system/node");
        let names = self.entries(base);
        let mut ids: Vec<u16> =
            names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
        ids.sort_unstable();
        self.warnings.cut(&mut ids, NODES_MAX, "NUMA nodes");
        if ids.is_empty() {
            // A kernel without NUMA.
            let cpus = self.cpus(Path::new("devices/system/cpu/online"));
            let node = NumaNode { cpus, distances: vec![SLIT_LOCAL], ..NumaNode::default() };
            return if node.cpus.is_empty() { Vec::new() } else { vec![node] };
        }
        let node = |(at, &id): (usize, &u16)| {
            let dir = base.join(format!("node{id}"));
            NumaNode {
                id,
                cpus: self.cpus(&dir.join("cpulist")),
                memory_bytes: self.memory(&dir.join("meminfo")),
                distances: self.distances(&dir.join("distance"), at, ids.len()),
            }
        };
        ids.iter().enumerate().map(node).collect()
    }

    /// `0-55,112-167`.
    fn cpus(&mut self, path: &Path) -> Vec<(u32, u32)> {
        let Some(text) = self.text(path) else { return Vec::new() };
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (range.0 <= range.1).then_some(range)
        };
        let ranges: Option<Vec<_>> = text.split(',').filter(|part| !part.is_empty()).map(range).collect();
        ranges.unwrap_or_else(|| {
            self.garbage(path, &text, "a list of CPUs");
            Vec::new()
        })
    }

    /// Bytes, from `Node 0 MemTotal:  131912316 kB`.
    fn memory(&mut self, path: &Path) -> u64 {
        let Some(text) = self.text(path) else { return 0 };
        let total = text.lines().find_map(|line| line.split_once("MemTotal:"));
        let kib = total.and_then(|(_, rest)| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.map_or_else(
            || {
                self.garbage(path, text.lines().next().unwrap_or_default(), "a MemTotal in kB");
                0
            },
            |kib| kib.saturating_mul(1024),
        )
    }

    /// The row of node number `at` among `count` nodes.
    fn distances(&mut self, path: &Path, at: usize, count: usize) -> Vec<u8> {
        // The kernel assumes the same when the firmware has no table.
        let assumed = || (0..count).map(|other| if other == at { SLIT_LOCAL } else { SLIT_REMOTE }).collect();
        let Some(text) = self.text(path) else { return assumed() };
        let row: Option<Vec<u8>> = text.split_whitespace().map(|number| number.parse().ok()).collect();
        match row {
            Some(row) if row.len() == count && row.iter().all(|&far| far >= SLIT_LOCAL) => row,
            _ => {
                self.garbage(path, &text, "one distance of at least 10 for each node");
                assumed()
            }
        }
    }

    fn gpus(&mut self) -> Vec<Gpu> {
        let base = Path::new("bus/pci/devices");
        let mut found: Vec<(GpuVendor, PciAddress)> = Vec::new();
        for name in self.entries(base) {
            let Ok(address) = name.parse::<PciAddress>() else { continue };
            let class = self.hex(&base.join(&name).join("class")).unwrap_or(0);
            // Bits above the programming interface.
            let Ok(class) = u16::try_from(class >> 8) else { continue };
            if !GPU_CLASSES.contains(&class) {
                continue;
            }
            let vendor = self.hex(&base.join(&name).join("vendor")).and_then(|id| u16::try_from(id).ok());
            found.extend(vendor.and_then(|vendor| gpu_vendor(class, vendor)).map(|vendor| (vendor, address)));
        }
        found.sort_unstable();
        self.warnings.cut(&mut found, GPUS_MAX, "GPUs");
        let mut gpus: Vec<Gpu> = Vec::with_capacity(found.len());
        for (vendor, address) in found {
            let index = gpus.iter().filter(|gpu| gpu.vendor == vendor).count() as u16;
            let pci = self.pci_path(address).unwrap_or_else(|| PciPath::alone(address));
            let numa_node = self.numa_node(Some(address));
            gpus.push(Gpu { vendor, index, numa_node, pci, link: self.link(address) });
        }
        gpus
    }

    fn rdma_nics(&mut self) -> Vec<Nic> {
        let base = Path::new("class/infiniband");
        let mut names = self.entries(base);
        self.warnings.cut(&mut names, NICS_MAX, "RDMA devices");
        let mut nics = Vec::with_capacity(names.len());
        for name in names {
            let dir = base.join(&name);
            // Software devices (rxe, siw) use a network device, which they name.
            let parent = self.text(&dir.join("parent")).filter(|name| is_plain(name));
            let pci = self.device(&dir).or_else(|| {
                let parent = parent.as_ref()?;
                self.device(&Path::new("class/net").join(parent))
            });
            let netdev = self.entries(&dir.join("device/net")).into_iter().next().or(parent);
            let numbers = self.entries(&dir.join("ports"));
            let mut numbers: Vec<u8> = numbers.iter().filter_map(|name| name.parse().ok()).collect();
            numbers.sort_unstable();
            self.warnings.cut(&mut numbers, PORTS_MAX, "ports");
            let ports = numbers.into_iter().map(|number| self.rdma_port(&dir, number)).collect();
            self.add(&mut nics, Nic { kind: NicKind::Rdma, netdev, ports, ..Nic::named(&name) }, pci);
        }
        nics
    }

    fn rdma_port(&mut self, nic: &Path, number: u8) -> NicPort {
        let dir = nic.join("ports").join(number.to_string());
        // "4: ACTIVE"
        let state = match self.text(&dir.join("state")).as_deref().and_then(|text| text.split(':').next()) {
            Some("4" | "5") => PortState::Up,
            Some("1" | "2" | "3") => PortState::Down,
            _ => PortState::Unknown,
        };
        // "400 Gb/sec (4X NDR)"
        let path = dir.join("rate");
        let rate = self.text(&path);
        let mbit_per_s = rate.as_deref().and_then(|text| {
            let (number, rest) = text.split_once(' ')?;
            if rest.starts_with("Gb/sec") { thousandths(number) } else { None }
        });
        if let (None, Some(text)) = (mbit_per_s, &rate) {
            self.garbage(&path, text, "a rate in Gb/sec");
        }
        NicPort { number, state, mbit_per_s }
    }

    /// Adds network devices that belong to no RDMA device and are hardware.
    fn ethernet_nics(&mut self, nics: &mut Vec<Nic>) {
        let taken: HashSet<String> = nics.iter().filter_map(|nic| nic.netdev.clone()).collect();
        let addresses: HashSet<PciAddress> =
            nics.iter().filter_map(|nic| nic.pci.as_ref()).map(|pci| pci.address).collect();
        let base = Path::new("class/net");
        let mut names = self.entries(base);
        names.retain(|name| !taken.contains(name) && self.root.join(base).join(name).join("device").exists());
        let room = NICS_MAX - nics.len().min(NICS_MAX);
        self.warnings.cut(&mut names, room, "network devices");
        for name in names {
            let dir = base.join(&name);
            let pci = self.device(&dir);
            if pci.as_ref().is_some_and(|pci| addresses.contains(&pci.address)) {
                continue;
            }
            let state = match self.text(&dir.join("operstate")).as_deref() {
                Some("up") => PortState::Up,
                Some("down" | "lowerlayerdown" | "notpresent") => PortState::Down,
                _ => PortState::Unknown,
            };
            // -1, or an error when reading it, while there is no link.
            let speed = self.number::<i64>(&dir.join("speed")).and_then(|speed| u32::try_from(speed).ok());
            let port = NicPort { number: 1, state, mbit_per_s: speed.filter(|&speed| speed > 0) };
            let nic = Nic { kind: NicKind::Ethernet, ports: vec![port], ..Nic::named(&name) };
            self.add(nics, nic, pci);
        }
    }

    /// Adds a NIC with what is known of its PCI device.
    fn add(&mut self, nics: &mut Vec<Nic>, mut nic: Nic, pci: Option<PciPath>) {
        if !is_plain(&nic.name) {
            self.warnings.add(format!(
                "NIC {:?} is left out: its name is not one of up to 64 printable characters",
                nic.name
            ));
            return;
        }
        if nics.iter().any(|other| other.name == nic.name) {
            self.warnings
                .add(format!("network device {:?} is left out: an RDMA device has the same name", nic.name));
            return;
        }
        let address = pci.as_ref().map(|pci| pci.address);
        nic.numa_node = self.numa_node(address);
        nic.link = address.and_then(|address| self.link(address));
        nic.pci = pci;
        nics.push(nic);
    }

    /// The PCI path of a device class entry, which is a link into `devices/`.
    fn device(&mut self, entry: &Path) -> Option<PciPath> {
        let path = self.target(entry).and_then(|target| PciPath::parse_sysfs(&target));
        path.or_else(|| {
            let target = self.target(&entry.join("device"))?;
            self.pci_path(target.rsplit('/').next()?.parse().ok()?)
        })
    }

    fn pci_path(&mut self, address: PciAddress) -> Option<PciPath> {
        let entry = pci_device(address);
        let path = self.target(&entry).and_then(|target| PciPath::parse_sysfs(&target));
        let path = path.filter(|path| path.address == address);
        if path.is_none() {
            self.warnings.add(format!(
                "{}: not a path below a PCI host bridge; the PCI path of the device is unknown",
                entry.display()
            ));
        }
        path
    }

    /// The node that sysfs names, if it exists. On a host with a single node it is that node.
    fn numa_node(&mut self, address: Option<PciAddress>) -> Option<u16> {
        let only = if let [only] = self.nodes[..] { Some(only) } else { None };
        let path = pci_device(address?).join("numa_node");
        // -1: the firmware does not report it.
        let node = self.number::<i64>(&path).filter(|&node| node != -1);
        let known = node.and_then(|node| u16::try_from(node).ok()).filter(|node| self.nodes.contains(node));
        if let (Some(node), None) = (node, known) {
            self.warnings
                .add(format!("{}: {node} is not a NUMA node of this host; it is ignored", path.display()));
        }
        known.or(only)
    }

    fn link(&mut self, address: PciAddress) -> Option<PciLink> {
        let dir = pci_device(address);
        // "32.0 GT/s PCIe", or "Unknown".
        let mut speed = |name: &str| thousandths(self.text(&dir.join(name))?.split_once(" GT/s")?.0);
        let speeds = (speed("current_link_speed")?, speed("max_link_speed")?);
        let mut width =
            |name: &str| self.number::<u8>(&dir.join(name)).filter(|lanes| (1..=32).contains(lanes));
        let widths = (width("current_link_width")?, width("max_link_width")?);
        Some(PciLink {
            mega_transfers_per_s: speeds.0,
            mega_transfers_per_s_max: speeds.1,
            lanes: widths.0,
            lanes_max: widths.1,
        })
    }

    /// The text of a file; `None` when it cannot be read, which for sysfs often means that it does not apply.
    fn text(&mut self, path: &Path) -> Option<String> {
        // Opening a pipe that is in the place of a file must not block.
        let file =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(self.root.join(path)).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    fn number<T: FromStr>(&mut self, path: &Path) -> Option<T> {
        let text = self.text(path)?;
        let number = text.parse().ok();
        if number.is_none() {
            self.garbage(path, &text, "a number");
        }
        number
    }

    /// `0x030200`.
    fn hex(&mut self, path: &Path) -> Option<u32> {
        let text = self.text(path)?;
        let number = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        if number.is_none() {
            self.garbage(path, &text, "a number in hexadecimal");
        }
        number
    }

    fn target(&self, path: &Path) -> Option<String> {
        Some(fs::read_link(self.root.join(path)).ok()?.to_str()?.to_owned())
    }

    /// Names in a directory, in order; none when the directory does not exist.
    fn entries(&mut self, path: &Path) -> Vec<String> {
        let entries = match fs::read_dir(self.root.join(path)) {
            Ok(entries) => entries,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Vec::new();
            }
            Err(error) => {
                self.warnings.add(format!("{}: {error}; nothing below it is used", path.display()));
                return Vec::new();
            }
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.take(ENTRIES_MAX + 1).collect();
        names.sort_unstable();
        self.warnings.cut(&mut names, ENTRIES_MAX, &path.display().to_string());
        names
    }

    fn garbage(&mut self, path: &Path, text: &str, wanted: &str) {
        let shown: String = text.chars().take(40).collect();
        self.warnings.add(format!("{}: {shown:?} is not {wanted}; it is ignored", path.display()));
    }
}

fn pci_device(address: PciAddress) -> PathBuf {
    Path::new("bus/pci/devices").join(address.to_string())
}

/// `2.5` as 2500.
fn thousandths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    if part.is_empty() || part.len() > 3 || !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let scale = 10u32.pow(3 - part.len() as u32);
    whole.parse::<u32>().ok()?.checked_mul(1000)?.checked_add(part.parse::<u32>().ok()? * scale)
}

/// Why a directory cannot be read as sysfs.
#[derive(Debug)]
#[non_exhaustive]
pub enum SysfsError {
    /// The directory cannot be read.
    Root {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory has nothing that sysfs has.
    NotSysfs(PathBuf),
    /// The files describe no valid host.
    Topology(TopologyError),
}

impl fmt::Display for SysfsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root { path, source } => {
                write!(f, "cannot read {}: {source}; is sysfs mounted there?", path.display())
            }
            Self::NotSysfs(path) => write!(
                f,
                "{} has neither devices, class nor bus: name a directory that looks like {SYSFS}",
                path.display()
            ),
            Self::Topology(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SysfsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Root { source, .. } => Some(source),
            Self::NotSysfs(_) => None,
            Self::Topology(error) => Some(error),
        }
    }
}
