//! NVMe over Fabrics as the kernel's initiator presents it: controllers in sysfs, with their namespaces.

use std::path::Path;

use serde::Serialize;

use crate::dax::{names, number, text};
use crate::output::printable;
use crate::size::ByteSize;

/// The unit in which the kernel states the size of a block device, bytes.
const SECTOR_BYTES: u64 = 512;

/// A controller that is reached over a network. Disks of this host's PCIe are not listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Controller {
    /// `nvme1`.
    pub(crate) name: String,
    /// `tcp`, `rdma`, `fc` or `loop`.
    pub(crate) transport: String,
    /// As the kernel writes it: `traddr=10.0.0.7,trsvcid=4420`.
    pub(crate) address: String,
    /// The name of the subsystem.
    pub(crate) nqn: String,
    /// `live`, `connecting` and the like; empty: unknown.
    pub(crate) state: String,
    pub(crate) namespaces: Vec<Namespace>,
}

/// A namespace of a controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Namespace {
    /// Its block device, `nvme1n1`.
    pub(crate) name: String,
    /// Its number in the subsystem.
    pub(crate) nsid: Option<u64>,
    /// Its size, bytes.
    pub(crate) bytes: u64,
    /// The size of its blocks, bytes.
    pub(crate) block_bytes: Option<u64>,
}

impl Controller {
    /// The controllers of a host, by name.
    pub(crate) fn list(sysfs: &Path) -> Vec<Self> {
        let at = sysfs.join("class/nvme");
        let mut all: Vec<Self> =
            names(&at).into_iter().filter_map(|name| Self::read(&at.join(&name), &name)).collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    fn read(device: &Path, name: &str) -> Option<Self> {
        let of = |attribute: &str| printable(&text(&device.join(attribute)).unwrap_or_default());
        let transport = of("transport");
        if matches!(&*transport, "" | "pcie") {
            return None;
        }
        let mut namespaces: Vec<Namespace> = names(device)
            .into_iter()
            .filter_map(|entry| Namespace::read(&device.join(&entry), &entry))
            .collect();
        namespaces.sort_by(|one, other| one.name.cmp(&other.name));
        Some(Self {
            name: printable(name),
            transport,
            address: of("address"),
            nqn: of("subsysnqn"),
            state: of("state"),
            namespaces,
        })
    }

    /// Lines: the controller, and one for each namespace.
    pub(crate) fn lines(&self) -> Vec<String> {
        let Self { name, transport, address, nqn, state, namespaces } = self;
        let state = if matches!(&**state, "" | "live") { String::new() } else { format!(", {state}") };
        let namespace = |namespace: &Namespace| {
            let Namespace { name, bytes, block_bytes, .. } = namespace;
            let blocks = block_bytes.map_or_else(String::new, |bytes| format!(", blocks of {bytes} B"));
            format!("  {name}, {}{blocks}", ByteSize(*bytes).approximate())
        };
        let first = format!("{name}, {transport}, {address}{state}, {nqn}");
        std::iter::once(first).chain(namespaces.iter().map(namespace)).collect()
    }
}

impl Namespace {
    /// `nvme1n1`, or with multipathing the path `nvme1c2n1`, whose block device is `nvme1n1`. `None` for
    /// other entries of a controller's directory.
    fn read(device: &Path, entry: &str) -> Option<Self> {
        let (controller, namespace) = entry.strip_prefix("nvme")?.rsplit_once('n')?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let (subsystem, path) = controller.split_once('c').unwrap_or((controller, "0"));
        if ![subsystem, path, namespace].into_iter().all(digits) {
            return None;
        }
        let sectors = number(&device.join("size")).unwrap_or(0);
        Some(Self {
            name: format!("nvme{subsystem}n{namespace}"),
            nsid: number(&device.join("nsid")),
            bytes: sectors.saturating_mul(SECTOR_BYTES),
            block_bytes: number(&device.join("queue/logical_block_size")),
        })
    }
}
