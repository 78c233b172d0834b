//! Where memory and NICs are in a host, and how far they are from each other.
//!
//! Plain data and scoring. Nothing here reads from the machine: `te-host` reads sysfs, hwloc or a file and
//! builds a [`Topology`], which checks the parts once. The results are a [`Distance`] for each pair of memory
//! and NIC, a penalty in percent for the route, and the [`PriorityMatrix`] that administrators edit:
//!
//! ```text
//!   Location (cpu:0, cuda:3)  ── PCI path, NUMA node, SLIT ──►  Distance  ──►  percent, for HealthRoute
//!        Nic (mlx5_2)                                            └────────►  {"cuda:3": [["mlx5_2"], ["mlx5_0", …]]}
//! ```
//!
//! ```
//! use te_core::topology::{Location, Nic, NumaNode, Topology};
//!
//! let nodes = [0, 1].map(|id| NumaNode { id, distances: [[10, 21], [21, 10]][id as usize].into(), ..NumaNode::default() });
//! let nic = |name: &str, node| Nic { numa_node: Some(node), ..Nic::named(name) };
//! let topology = Topology::new(nodes.into(), vec![nic("mlx5_0", 0), nic("mlx5_1", 1)], vec![])?;
//!
//! let matrix = topology.matrix();
//! let row = &matrix.rows()[1];
//! assert_eq!((row.location, row.preferred[0].as_str(), row.secondary[0].as_str()), (Location::Numa(1), "mlx5_1", "mlx5_0"));
//! assert_eq!((matrix.penalty_percent(Location::Numa(1), "mlx5_1"), matrix.penalty_percent(Location::Numa(0), "mlx5_1")), (100, 300));
//! # Ok::<(), te_core::topology::TopologyError>(())
//! ```

mod matrix;
mod pci;

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

pub use matrix::{LOCATIONS_MAX, MatrixError, MatrixRow, PriorityMatrix};

pub use crate::memory::{GpuVendor, Location};
pub use pci::{BRIDGES_MAX, PciAddress, PciLink, PciPath};

/// The largest number of NUMA nodes in a host.
pub const NODES_MAX: usize = 256;
/// The largest number of NICs in a host; virtual functions count.
pub const NICS_MAX: usize = 256;
/// The largest number of GPUs in a host.
pub const GPUS_MAX: usize = 64;
/// The largest number of ports of a NIC.
pub const PORTS_MAX: usize = 16;
/// The longest name of a NIC, in bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// A host: its NUMA nodes, NICs and GPUs. [`new`](Self::new) checks them, so every `Topology` is valid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<NumaNode>,
    nics: Vec<Nic>,
    gpus: Vec<Gpu>,
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// The number that the kernel gives the node.
    pub id: u16,
    /// Its CPUs: first and last of each run, both included. Empty for a node of memory alone (HBM, CXL, a
    /// GPU's memory).
    pub cpus: Vec<(u32, u32)>,
    /// The size of its memory, in bytes; 0 when unknown.
    pub memory_bytes: u64,
    /// The distance to each node, in the order of [`Topology::nodes`]: 10 for itself, 20 for twice as far
    /// (ACPI 6.5, section 5.2.17, "SLIT").
    pub distances: Vec<u8>,
}

/// A NIC, over which a rail runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// The name that the kernel gives it: `mlx5_0`, `eth0`.
    pub name: String,
    /// What it can do.
    pub kind: NicKind,
    /// Its network device, when `name` is that of an RDMA device.
    pub netdev: Option<String>,
    /// Its NUMA node; `None` when the host does not report it.
    pub numa_node: Option<u16>,
    /// Its PCI path; `None` for devices that are not on PCI.
    pub pci: Option<PciPath>,
    /// The current and the possible speed of its slot.
    pub link: Option<PciLink>,
    /// Its ports; empty when unknown.
    pub ports: Vec<NicPort>,
}

/// What a NIC can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum NicKind {
    /// RDMA verbs: InfiniBand, RoCE, iWARP, EFA.
    Rdma,
    /// Sockets only.
    Ethernet,
}

/// A port of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicPort {
    /// The number of the port, from 1.
    pub number: u8,
    /// Whether it has a link.
    pub state: PortState,
    /// The speed of the link, in megabits per second; `None` when unknown.
    pub mbit_per_s: Option<u32>,
}

/// Whether a port has a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// It has a link.
    Up,
    /// It has no link.
    Down,
    /// The host does not report it.
    Unknown,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The vendor.
    pub vendor: GpuVendor,
    /// Its number among the vendor's GPUs in PCI order, from 0, as `CUDA_DEVICE_ORDER=PCI_BUS_ID` counts.
    pub index: u16,
    /// Its NUMA node; `None` when the host does not report it.
    pub numa_node: Option<u16>,
    /// Its PCI path.
    pub pci: PciPath,
    /// The current and the possible speed of its slot.
    pub link: Option<PciLink>,
}

/// How far a NIC is from memory. A nearer one compares as less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// Below a common PCI bridge, so that data need not pass the CPU's root complex. The number of bridges
    /// that are not common to both.
    Switch(u8),
    /// Under one host bridge (root complex).
    HostBridge,
    /// On one NUMA node.
    Node,
    /// The location of one of the two is unknown.
    Unknown,
    /// On another NUMA node, at this SLIT distance.
    Remote(u8),
}

impl Topology {
    /// Checks and sorts the parts: nodes by id, NICs by kind and name, GPUs by vendor and index. `distances`
    /// must be in the order of ascending ids.
    ///
    /// # Errors
    /// See [`TopologyError`].
    pub fn new(
        mut nodes: Vec<NumaNode>,
        mut nics: Vec<Nic>,
        mut gpus: Vec<Gpu>,
    ) -> Result<Self, TopologyError> {
        for (what, count, count_max) in [
            ("NUMA nodes", nodes.len(), NODES_MAX),
            ("NICs", nics.len(), NICS_MAX),
            ("GPUs", gpus.len(), GPUS_MAX),
        ] {
            if count > count_max {
                return Err(TopologyError::TooMany { what, count, count_max });
            }
        }
        nodes.sort_by_key(|node| node.id);
        nics.sort_by(|a, b| (a.kind, name_key(&a.name)).cmp(&(b.kind, name_key(&b.name))));
        gpus.sort_by_key(|gpu| (gpu.vendor, gpu.index));
        let count = nodes.len();
        for (at, node) in nodes.iter().enumerate() {
            if at > 0 && nodes[at - 1].id == node.id {
                return Err(TopologyError::NodeTwice(node.id));
            }
            if node.distances.len() != count || node.distances.iter().any(|&far| far < SLIT_LOCAL) {
                return Err(TopologyError::Distances { node: node.id, count });
            }
        }
        for (at, nic) in nics.iter().enumerate() {
            if !is_name(&nic.name) || nic.ports.len() > PORTS_MAX {
                return Err(TopologyError::Nic(nic.name.clone()));
            }
            if nics[..at].iter().any(|other| other.name == nic.name) {
                return Err(TopologyError::NicTwice(nic.name.clone()));
            }
        }
        if let Some(pair) = gpus.windows(2).find(|pair| pair[0].location() == pair[1].location()) {
            return Err(TopologyError::GpuTwice(pair[0].location()));
        }
        let named = nics.iter().map(|nic| nic.numa_node).chain(gpus.iter().map(|gpu| gpu.numa_node));
        for id in named.flatten() {
            if nodes.binary_search_by_key(&id, |node| node.id).is_err() {
                return Err(TopologyError::NoSuchNode(id));
            }
        }
        Ok(Self { nodes, nics, gpus })
    }

    /// The NUMA nodes, by id.
    #[must_use]
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }

    /// The NICs, RDMA devices first, then by name; `mlx5_2` comes before `mlx5_10`.
    #[must_use]
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// The GPUs, by vendor and index.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The NIC with this name, of the RDMA device or of its network device.
    #[must_use]
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        let by_netdev = || self.nics.iter().find(|nic| nic.netdev.as_deref() == Some(name));
        self.nics.iter().find(|nic| nic.name == name).or_else(by_netdev)
    }

    /// Every location that has memory: NUMA nodes, then GPUs.
    pub fn locations(&self) -> impl Iterator<Item = Location> + '_ {
        let nodes = self.nodes.iter().map(|node| Location::Numa(node.id));
        nodes.chain(self.gpus.iter().map(Gpu::location))
    }

    /// Whether there is no choice: no NIC, or one location and one NIC.
    #[must_use]
    pub fn is_trivial(&self) -> bool {
        self.nics.is_empty() || (self.nics.len() == 1 && self.locations().count() <= 1)
    }

    /// The distance of `nic` from memory at `location`.
    #[must_use]
    pub fn distance(&self, location: Location, nic: &Nic) -> Distance {
        let node = match location {
            Location::Numa(id) => Some(id),
            Location::Device(vendor, index) => {
                let Some(gpu) = self.gpus.iter().find(|gpu| gpu.vendor == vendor && gpu.index == index)
                else {
                    return Distance::Unknown;
                };
                if let Some(near) = nic.pci.as_ref().and_then(|path| path.distance(&gpu.pci)) {
                    return near;
                }
                gpu.numa_node
            }
            Location::Host | Location::Pool => None,
        };
        match (node, nic.numa_node) {
            (Some(a), Some(b)) if a == b => Distance::Node,
            (Some(a), Some(b)) => self.slit(a, b).map_or(Distance::Unknown, Distance::Remote),
            _ => Distance::Unknown,
        }
    }

    /// The distance of NUMA node `b` from `a` that the firmware reports; `None` when there is no such node.
    #[must_use]
    pub fn slit(&self, a: u16, b: u16) -> Option<u8> {
        let at = |id| self.nodes.binary_search_by_key(&id, |node: &NumaNode| node.id).ok();
        Some(self.nodes[at(a)?].distances[at(b)?])
    }

    /// The NICs that rails run over: the RDMA devices, or the network devices of a host that has none,
    /// without those whose ports are all down.
    pub fn rail_nics(&self) -> impl Iterator<Item = &Nic> {
        let kind = self.nics.first().map(|nic| nic.kind);
        self.nics.iter().filter(move |nic| Some(nic.kind) == kind && nic.may_have_link())
    }

    /// For every location, the NICs at the shortest distance, and the others with the nearest first.
    #[must_use]
    pub fn matrix(&self) -> PriorityMatrix {
        let row = |location| {
            let mut nics: Vec<(Distance, &Nic)> =
                self.rail_nics().map(|nic| (self.distance(location, nic), nic)).collect();
            // Stable: NICs at the same distance stay in the order of their names.
            nics.sort_by_key(|&(distance, _)| distance);
            let least = nics.first().map(|&(distance, _)| distance);
            let near = nics.iter().take_while(|&&(distance, _)| Some(distance) == least).count();
            let names = |nics: &[(Distance, &Nic)]| nics.iter().map(|(_, nic)| nic.name.clone()).collect();
            MatrixRow { location, preferred: names(&nics[..near]), secondary: names(&nics[near..]) }
        };
        PriorityMatrix::from_checked(self.locations().map(row).collect())
    }
}

/// The SLIT distance of a node to itself.
const SLIT_LOCAL: u8 = 10;

impl Nic {
    /// An RDMA NIC of which only the name is known.
    #[must_use]
    pub fn named(name: &str) -> Self {
        let name = String::from(name);
        Self {
            name,
            kind: NicKind::Rdma,
            netdev: None,
            numa_node: None,
            pci: None,
            link: None,
            ports: Vec::new(),
        }
    }

    /// False when every port is known to be down.
    #[must_use]
    pub fn may_have_link(&self) -> bool {
        self.ports.is_empty() || self.ports.iter().any(|port| port.state != PortState::Down)
    }

    /// The speed of all its ports together, in megabits per second; `None` when no port reports one.
    #[must_use]
    pub fn mbit_per_s(&self) -> Option<u64> {
        let speeds = self.ports.iter().filter_map(|port| port.mbit_per_s);
        speeds.map(u64::from).reduce(u64::saturating_add)
    }
}

impl Gpu {
    /// The location of its memory.
    #[must_use]
    pub fn location(&self) -> Location {
        Location::Device(self.vendor, self.index)
    }
}

impl Distance {
    /// The cost of a rail at this distance, in percent of a near one. These are guesses, not measurements:
    /// they decide only while a nearer rail is free. Under load the measured bandwidth of each rail counts as
    /// well, and a rail that costs 300 percent is used as soon as the near one has a queue three times as
    /// long.
    #[must_use]
    pub const fn penalty_percent(self) -> u32 {
        match self {
            Self::Switch(_) => 100,
            Self::HostBridge => 120,
            Self::Node => 150,
            Self::Unknown => 200,
            // SLIT 20 and 21 are two sockets; 255 means "unreachable".
            Self::Remote(slit) => {
                let percent = slit as u32 * 15;
                if percent < 200 { 200 } else { percent }
            }
        }
    }
}

/// Writes `switch+2`, `host-bridge`, `node`, `unknown` or `remote:21`.
impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(hops) => write!(f, "switch+{hops}"),
            Self::HostBridge => f.write_str("host-bridge"),
            Self::Node => f.write_str("node"),
            Self::Unknown => f.write_str("unknown"),
            Self::Remote(slit) => write!(f, "remote:{slit}"),
        }
    }
}

/// Why parts do not form a [`Topology`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopologyError {
    /// There is more than the limit.
    TooMany {
        /// Of what: "NUMA nodes", "NICs" or "GPUs".
        what: &'static str,
        /// How many there are.
        count: usize,
        /// The limit.
        count_max: usize,
    },
    /// Two NUMA nodes have this id.
    NodeTwice(u16),
    /// The distances of a node: their number is not that of the nodes, or one is below 10.
    Distances {
        /// The node's id.
        node: u16,
        /// The number of nodes.
        count: usize,
    },
    /// A NIC or GPU is on this node, which does not exist.
    NoSuchNode(u16),
    /// The name of this NIC is empty, too long or not printable, or it has too many ports.
    Nic(String),
    /// Two NICs have this name.
    NicTwice(String),
    /// Two GPUs have this number.
    GpuTwice(Location),
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { what, count, count_max } => {
                write!(f, "there are {count} {what}, and the limit is {count_max}: remove some")
            }
            Self::NodeTwice(id) => write!(f, "two NUMA nodes have the number {id}: remove one"),
            Self::Distances { node, count } => {
                write!(
                    f,
                    "NUMA node {node} needs {count} distances, one per node, each at least {SLIT_LOCAL}"
                )
            }
            Self::NoSuchNode(id) => {
                write!(
                    f,
                    "a device is on NUMA node {id}, which does not exist: correct the device or add the node"
                )
            }
            Self::Nic(name) => write!(
                f,
                "NIC {name:?} needs a name of 1 to {NAME_BYTES_MAX} printable ASCII characters, and at most \
                 {PORTS_MAX} ports"
            ),
            Self::NicTwice(name) => write!(f, "two NICs have the name {name:?}: remove one"),
            Self::GpuTwice(location) => write!(f, "two GPUs have the name {location}: remove one"),
        }
    }
}

impl core::error::Error for TopologyError {}

/// Whether this can be the name of a NIC.
fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Orders `mlx5_2` before `mlx5_10`: the text before the last number, then that number.
fn name_key(name: &str) -> (&str, u64, &str) {
    let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (head, name[head.len()..].parse().unwrap_or(0), name)
}
