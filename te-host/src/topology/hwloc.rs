//! Reads a [`Topology`] with hwloc 2 (<https://www.open-mpi.org/projects/hwloc/>): of this host, of another
//! host from the XML that its `lstopo` wrote, or of one that a synthetic string describes.
//!
//! hwloc reports where devices are attached and what is near them. It does not report the width and speed of
//! their slots, nor the speed of ports: [`read_sysfs`](super::read_sysfs) does.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::string::String;
use std::vec::Vec;

use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{
    DownstreamAttributes, ObjectAttributes, PCIDeviceAttributes, UpstreamAttributes,
};
use hwlocality::object::distance::DistancesKind;
use hwlocality::object::types::{OSDeviceType, ObjectType};
use hwlocality::topology::builder::TypeFilter;
use te_core::topology::{
    BRIDGES_MAX, GPUS_MAX, Gpu, GpuVendor, NICS_MAX, NODES_MAX, Nic, NicKind, NicPort, NumaNode, PORTS_MAX,
    PciAddress, PciPath, PortState, Topology, TopologyError,
};

use super::found::{Found, Warnings};
use super::{SLIT_LOCAL, SLIT_REMOTE, gpu_vendor, is_plain};

/// Longest XML file, bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Characters of a synthetic string that an error repeats.
const SHOWN_MAX: usize = 80;

/// The source that hwloc reads.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HwlocSource {
    /// This host.
    ThisHost,
    /// A file that `lstopo host.xml` wrote, at most 16 MiB.
    Xml(PathBuf),
    /// A description such as `package:2 numa:1 core:4 pu:1`
    /// (<https://hwloc.readthedocs.io/en/stable/synthetic.html>). It has no devices.
    Synthetic(String),
}

impl HwlocSource {
    /// The source that a command-line argument means: an empty text is this host, a text with a colon that
    /// names no file is a synthetic string, anything else an XML file.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        if text.is_empty() {
            Self::ThisHost
        } else if text.contains(':') && fs::metadata(text).is_err() {
            Self::Synthetic(text.into())
        } else {
            Self::Xml(text.into())
        }
    }
}

/// Reads a host. Invalid devices, and those beyond the limits of [`te_core::topology`], are left out with a
/// warning.
///
/// # Errors
/// When the source is not of the stated kind, or hwloc fails.
pub fn read_hwloc(source: &HwlocSource) -> Result<Found, HwlocError> {
    let host = load(source)?;
    let mut reader = Reader { host: &host, nodes: Vec::new(), warnings: Warnings::default() };
    let nodes = reader.nodes();
    reader.nodes = nodes.iter().map(|node| node.id).collect();
    let gpus = reader.gpus();
    let nics = reader.nics();
    let warnings = reader.warnings.into_vec();
    let topology = Topology::new(nodes, nics, gpus).map_err(HwlocError::Topology)?;
    Ok(Found { topology, warnings })
}

fn load(source: &HwlocSource) -> Result<hwlocality::Topology, HwlocError> {
    let builder = hwlocality::Topology::builder();
    let refused = || match source {
        HwlocSource::ThisHost => HwlocError::Failed,
        HwlocSource::Xml(path) => HwlocError::Xml(path.clone()),
        HwlocSource::Synthetic(text) => HwlocError::Synthetic(text.chars().take(SHOWN_MAX).collect()),
    };
    let builder = match source {
        HwlocSource::ThisHost => builder,
        // Read here, because hwloc does not report why it cannot open a file.
        HwlocSource::Xml(path) => builder.from_xml(&read_text(path)?).map_err(|_| refused())?,
        HwlocSource::Synthetic(text) => builder.from_synthetic(text).map_err(|_| refused())?,
    };
    let builder = builder.with_io_type_filter(TypeFilter::KeepImportant).map_err(|_| refused())?;
    builder.build().map_err(|_| refused())
}

fn read_text(path: &Path) -> Result<String, HwlocError> {
    let io = |source| HwlocError::Io { path: path.into(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(HwlocError::TooLong(path.into()));
    }
    String::from_utf8(bytes).map_err(|_| HwlocError::Xml(path.into()))
}

struct Reader<'a> {
    host: &'a hwlocality::Topology,
    /// Ids of the NUMA nodes.
    nodes: Vec<u16>,
    warnings: Warnings,
}

impl Reader<'_> {
    fn nodes(&mut self) -> Vec<NumaNode> {
        let mut found: Vec<(u16, &TopologyObject)> = self
            .host
            .objects_with_type(ObjectType::NUMANode)
            .filter_map(|node| Some((u16::try_from(node.os_index()?).ok()?, node)))
            .collect();
        found.sort_by_key(|&(id, _)| id);
        found.dedup_by_key(|&mut (id, _)| id);
        self.warnings.cut(&mut found, NODES_MAX, "NUMA nodes");
        let ids: Vec<u16> = found.iter().map(|&(id, _)| id).collect();
        let mut distances = self.distances(&ids);
        let node = |(at, (id, node)): (usize, (u16, &TopologyObject))| NumaNode {
            id,
            cpus: cpus(node),
            memory_bytes: match node.attributes() {
                Some(ObjectAttributes::NUMANode(numa)) => numa.local_memory().map_or(0, u64::from),
                _ => 0,
            },
            distances: std::mem::take(&mut distances[at]),
        };
        found.into_iter().enumerate().map(node).collect()
    }

    /// The distances that the firmware reports; without them, those that the kernel assumes.
    fn distances(&mut self, ids: &[u16]) -> Vec<Vec<u8>> {
        let assumed = |a: usize| {
            (0..ids.len()).map(|b| if a == b { SLIT_LOCAL } else { SLIT_REMOTE }).collect::<Vec<u8>>()
        };
        let mut rows: Vec<Vec<u8>> = (0..ids.len()).map(assumed).collect();
        let kind = Some(DistancesKind::MEANS_LATENCY);
        let matrices = self.host.distances_with_type(kind, ObjectType::NUMANode).unwrap_or_default();
        let Some(matrix) = matrices.first() else { return rows };
        let index = |node: Option<&TopologyObject>| {
            let id = u16::try_from(node?.os_index()?).ok()?;
            ids.binary_search(&id).ok()
        };
        let at: Vec<Option<usize>> = matrix.objects().map(index).collect();
        for ((from, to), far) in matrix.enumerate_distances() {
            let (Some(from), Some(to)) = (at[from], at[to]) else { continue };
            match u8::try_from(far) {
                Ok(far) if far >= SLIT_LOCAL => rows[from][to] = far,
                _ => self.warnings.add(format!(
                    "the distance {far} of NUMA nodes {} and {} is not one of 10 to 255; it is ignored",
                    ids[from], ids[to]
                )),
            }
        }
        rows
    }

    fn gpus(&mut self) -> Vec<Gpu> {
        let mut found: Vec<(GpuVendor, PciAddress, &TopologyObject)> = Vec::new();
        for device in self.host.objects_with_type(ObjectType::PCIDevice) {
            let Some(ObjectAttributes::PCIDevice(pci)) = device.attributes() else { continue };
            if let (Some(vendor), Some(address)) = (gpu_vendor(pci.class_id(), pci.vendor_id()), address(pci))
            {
                found.push((vendor, address, device));
            }
        }
        found.sort_by_key(|&(vendor, address, _)| (vendor, address));
        self.warnings.cut(&mut found, GPUS_MAX, "GPUs");
        let mut gpus: Vec<Gpu> = Vec::with_capacity(found.len());
        for (vendor, address, device) in found {
            let index = gpus.iter().filter(|gpu| gpu.vendor == vendor).count() as u16;
            let pci = pci_path(device).unwrap_or_else(|| PciPath::alone(address));
            gpus.push(Gpu { vendor, index, numa_node: self.numa_node(device), pci, link: None });
        }
        gpus
    }

    /// RDMA devices, then network devices that belong to no RDMA device and are hardware.
    fn nics(&mut self) -> Vec<Nic> {
        let devices = |wanted: OSDeviceType| {
            let is_wanted = move |device: &&TopologyObject| matches!(device.attributes(), Some(ObjectAttributes::OSDevice(os)) if os.device_type() == wanted);
            self.host.objects_with_type(ObjectType::OSDevice).filter(is_wanted)
        };
        let mut rdma: Vec<&TopologyObject> = devices(OSDeviceType::OpenFabrics).collect();
        let mut sockets: Vec<&TopologyObject> =
            devices(OSDeviceType::Network).filter(|device| pci_device(device).is_some()).collect();
        self.warnings.cut(&mut rdma, NICS_MAX, "RDMA devices");

        let mut nics = Vec::with_capacity(rdma.len());
        let mut taken = HashSet::new();
        for device in rdma {
            let slot = pci_device(device).map(TopologyObject::global_persistent_index);
            let below = |other: &&&TopologyObject| {
                slot.is_some() && pci_device(other).map(TopologyObject::global_persistent_index) == slot
            };
            let netdev = sockets.iter().find(below).and_then(|other| name(other)).map(str::to_owned);
            taken.extend(slot);
            self.add(&mut nics, device, NicKind::Rdma, netdev);
        }
        let is_free = |device: &TopologyObject| {
            pci_device(device).is_none_or(|slot| !taken.contains(&slot.global_persistent_index()))
        };
        sockets.retain(|device| is_free(device));
        let room = NICS_MAX - nics.len().min(NICS_MAX);
        self.warnings.cut(&mut sockets, room, "network devices");
        for device in sockets {
            self.add(&mut nics, device, NicKind::Ethernet, None);
        }
        nics
    }

    fn add(&mut self, nics: &mut Vec<Nic>, device: &TopologyObject, kind: NicKind, netdev: Option<String>) {
        let Some(name) = name(device).filter(|name| is_plain(name)) else {
            let name = device.name().unwrap_or_default();
            self.warnings.add(format!(
                "NIC {name:?} is left out: its name is not one of up to 64 printable characters"
            ));
            return;
        };
        if nics.iter().any(|other| other.name == name) {
            self.warnings.add(format!("NIC {name:?} is left out: another NIC has the same name"));
            return;
        }
        nics.push(Nic {
            kind,
            netdev: netdev.filter(|name| is_plain(name)),
            numa_node: self.numa_node(device),
            pci: pci_device(device).and_then(pci_path),
            ports: ports(device),
            ..Nic::named(name)
        });
    }

    /// The node that is nearest to a device; `None` when several are equally near.
    fn numa_node(&self, device: &TopologyObject) -> Option<u16> {
        let near = device.first_non_io_ancestor()?.nodeset()?;
        let id = u16::try_from(usize::from(near.first_set()?)).ok()?;
        (near.weight() == Some(1) && self.nodes.contains(&id)).then_some(id)
    }
}

fn name(object: &TopologyObject) -> Option<&str> {
    object.name()?.to_str().ok()
}

/// The PCI device that a network or RDMA device belongs to.
fn pci_device(device: &TopologyObject) -> Option<&TopologyObject> {
    device.first_ancestor_with_type(ObjectType::PCIDevice)
}

/// Ranges of CPUs.
fn cpus(node: &TopologyObject) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    // A set without a weight is infinite.
    let Some(set) = node.cpuset().filter(|set| set.weight().is_some()) else { return runs };
    for cpu in set.iter_set().filter_map(|cpu| u32::try_from(usize::from(cpu)).ok()) {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(cpu) => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    runs
}

/// The state of each port as `ibstat` names it, as long as there are attributes `Port1State`, `Port2State`
/// and so on.
fn ports(device: &TopologyObject) -> Vec<NicPort> {
    let port = |number: u8| {
        let state = device.info(&format!("Port{number}State"))?;
        let state = match state.to_bytes().first() {
            Some(b'4' | b'5') => PortState::Up,
            Some(b'1'..=b'3') => PortState::Down,
            _ => PortState::Unknown,
        };
        Some(NicPort { number, state, mbit_per_s: None })
    };
    (1..=PORTS_MAX as u8).map_while(port).collect()
}

fn address(pci: &PCIDeviceAttributes) -> Option<PciAddress> {
    let (device, function) = (pci.bus_device(), pci.function());
    (device <= 31 && function <= 7).then(|| PciAddress {
        domain: pci.domain().into(),
        bus: pci.bus_id(),
        device,
        function,
    })
}

/// The path from the host bridge down to a PCI device; `None` when hwloc does not know all of it.
fn pci_path(device: &TopologyObject) -> Option<PciPath> {
    let Some(ObjectAttributes::PCIDevice(pci)) = device.attributes() else { return None };
    let mut bridges = Vec::new();
    for above in device.ancestors() {
        let Some(ObjectAttributes::Bridge(bridge)) = above.attributes() else { return None };
        match (bridge.upstream_attributes(), bridge.downstream_attributes()) {
            (Some(UpstreamAttributes::PCI(pci)), _) if bridges.len() < BRIDGES_MAX => {
                bridges.push(address(pci)?);
            }
            (None, Some(DownstreamAttributes::PCI(below))) => {
                bridges.reverse();
                let root = (below.domain().into(), below.secondary_bus());
                return Some(PciPath { address: address(pci)?, root, bridges });
            }
            _ => return None,
        }
    }
    None
}

/// Why hwloc read no host.
#[derive(Debug)]
#[non_exhaustive]
pub enum HwlocError {
    /// The file cannot be read.
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is longer than 16 MiB.
    TooLong(PathBuf),
    /// The file is not XML that hwloc 2 understands.
    Xml(PathBuf),
    /// The text is not a synthetic description; contains its first characters.
    Synthetic(String),
    /// hwloc cannot read this host.
    Failed,
    /// The source describes no valid host.
    Topology(TopologyError),
}

impl fmt::Display for HwlocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, source } => write!(f, "cannot read {}: {source}", path.display()),
            Self::TooLong(path) => write!(
                f,
                "{} is longer than {FILE_BYTES_MAX} bytes: is it a file that lstopo wrote?",
                path.display()
            ),
            Self::Xml(path) => write!(
                f,
                "{} is not XML of hwloc 2: write it with `lstopo host.xml` on the host that it is to describe",
                path.display()
            ),
            Self::Synthetic(text) => write!(
                f,
                "{text:?} is neither a file nor a synthetic host: write for example \"package:2 numa:1 core:4 pu:1\", with pu last"
            ),
            Self::Failed => f.write_str(
                "hwloc cannot read this host: run `lstopo` for its error message, and check the variables HWLOC_*",
            ),
            Self::Topology(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for HwlocError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Topology(error) => Some(error),
            Self::TooLong(_) | Self::Xml(_) | Self::Synthetic(_) | Self::Failed => None,
        }
    }
}
