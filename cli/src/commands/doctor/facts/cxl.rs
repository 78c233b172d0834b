//! CXL memory, in both forms that the kernel gives it, and pools.

use std::path::PathBuf;

use super::super::source::Source;
use crate::size::ByteSize;

/// A DAX device: memory that is not part of the kernel's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dax {
    /// `dax0.0`.
    pub(crate) name: String,
    /// Its size.
    pub(crate) bytes: u64,
    /// The NUMA node that it would have.
    pub(crate) node: Option<u32>,
    /// How the kernel uses it.
    pub(crate) mode: Mode,
}

/// How the kernel uses a DAX device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As a device that processes map: what a pool needs.
    Device,
    /// As memory of a NUMA node.
    SystemRam,
    /// No driver has it.
    Unused,
}

/// What is known of CXL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cxl {
    /// The number of CXL memory devices.
    pub(crate) devices: usize,
    /// The DAX devices.
    pub(crate) dax: Vec<Dax>,
    /// The pools that were named: what is there, or why it cannot be used.
    pub(crate) pools: Vec<(String, Result<String, String>)>,
}

/// Lists the devices, and reads the pools.
pub(super) fn gather(source: &Source, pools: &[PathBuf]) -> Cxl {
    let devices = source.entries("sys/bus/cxl/devices");
    let is_memory = |name: &&String| {
        name.strip_prefix("mem").is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let dax = |name: String| {
        let at = format!("sys/bus/dax/devices/{name}");
        let mode = match source.link_name(&format!("{at}/driver")).as_deref() {
            Some("kmem") => Mode::SystemRam,
            Some("device_dax") => Mode::Device,
            _ => Mode::Unused,
        };
        let bytes = source.number(&format!("{at}/size")).unwrap_or(0);
        Dax { bytes, node: source.number(&format!("{at}/target_node")), mode, name }
    };
    Cxl {
        devices: devices.iter().filter(is_memory).count(),
        dax: source.entries("sys/bus/dax/devices").into_iter().map(dax).collect(),
        pools: pools.iter().map(|path| (path.display().to_string(), pool(path))).collect(),
    }
}

#[cfg(feature = "cxl")]
fn pool(path: &std::path::Path) -> Result<String, String> {
    let found = te_cxl::Pool::inspect(path).map_err(|error| error.to_string())?;
    let (block, owners) = (found.superblock, found.owners.iter());
    let owned = owners.filter(|owner| owner.as_ref().is_some_and(|owner| owner.owned)).count();
    let extent = ByteSize(block.extent_bytes);
    Ok(format!("a pool of {} extents of {extent}, of which {owned} have an owner", block.extents))
}

#[cfg(not(feature = "cxl"))]
fn pool(_: &std::path::Path) -> Result<String, String> {
    Err("this build lacks cxl".to_owned())
}

impl Dax {
    /// A sentence without a full stop.
    pub(crate) fn text(&self) -> String {
        let Self { name, bytes, node, mode } = self;
        let size = ByteSize(*bytes).approximate();
        match (mode, node) {
            (Mode::Device, _) => format!("{name}, {size}, devdax"),
            (Mode::SystemRam, Some(node)) => format!("{name}, {size}, memory of NUMA node {node}"),
            (Mode::SystemRam, None) => format!("{name}, {size}, memory of a NUMA node"),
            (Mode::Unused, _) => format!("{name}, {size}, without a driver"),
        }
    }
}
