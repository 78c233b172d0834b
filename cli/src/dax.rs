//! CXL memory as the kernel presents it: DAX devices in sysfs.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use serde::Serialize;

use crate::output::printable;
use crate::size::ByteSize;

/// Most devices that are listed.
const DEVICES_MAX: usize = 1024;

/// A DAX device: memory that is not part of the kernel's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Dax {
    /// `dax0.0`.
    pub(crate) name: String,
    /// Its size, bytes.
    pub(crate) bytes: u64,
    /// The NUMA node that its memory has, or would have.
    pub(crate) numa_node: Option<u32>,
    /// How the kernel uses it.
    pub(crate) mode: Mode,
}

/// How the kernel uses a DAX device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// As a device that processes map: what a pool needs.
    Devdax,
    /// As memory of a NUMA node.
    SystemRam,
    /// No driver has it.
    Unused,
}

impl Dax {
    /// The devices of a host, by name.
    pub(crate) fn list(sysfs: &Path) -> Vec<Self> {
        let at = sysfs.join("bus/dax/devices");
        let mut all: Vec<Self> = names(&at).into_iter().map(|name| Self::read(&at, name)).collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    fn read(at: &Path, name: String) -> Self {
        let device = at.join(&name);
        let driver = fs::read_link(device.join("driver")).ok();
        let mode = match driver.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) {
            Some("kmem") => Mode::SystemRam,
            Some("device_dax") => Mode::Devdax,
            _ => Mode::Unused,
        };
        let bytes = number(&device.join("size")).unwrap_or(0);
        let numa_node = number(&device.join("target_node")).and_then(|node| u32::try_from(node).ok());
        Self { name: printable(&name), bytes, numa_node, mode }
    }

    /// A phrase: name, size, and how the kernel uses it.
    pub(crate) fn text(&self) -> String {
        let Self { name, bytes, numa_node, mode } = self;
        let size = ByteSize(*bytes).approximate();
        match (mode, numa_node) {
            (Mode::Devdax, _) => format!("{name}, {size}, devdax"),
            (Mode::SystemRam, Some(node)) => format!("{name}, {size}, memory of NUMA node {node}"),
            (Mode::SystemRam, None) => format!("{name}, {size}, memory of a NUMA node"),
            (Mode::Unused, _) => format!("{name}, {size}, without a driver"),
        }
    }
}

/// The number of CXL memory devices of a host.
pub(crate) fn memory_devices(sysfs: &Path) -> usize {
    let is_memory = |name: &&String| {
        let number = name.strip_prefix("mem").filter(|number| !number.is_empty());
        number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    names(&sysfs.join("bus/cxl/devices")).iter().filter(is_memory).count()
}

/// The names in a directory.
pub(crate) fn names(at: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(at) else { return Vec::new() };
    entries.flatten().take(DEVICES_MAX).filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The number in a file of sysfs.
pub(crate) fn number(at: &Path) -> Option<u64> {
    text(at)?.parse().ok()
}

/// The text in a file of sysfs, at most 512 bytes of it.
pub(crate) fn text(at: &Path) -> Option<String> {
    let mut text = String::new();
    // A pipe would wait for a writer.
    fs::metadata(at).ok().filter(fs::Metadata::is_file)?;
    fs::File::open(at).ok()?.take(512).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}
