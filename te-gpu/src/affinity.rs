//! Which number a device has in its host, and which NUMA node it is next to, by sysfs.
//!
//! The driver numbers the devices that one process may see, in an order that the environment chooses. Other
//! processes and the topology number all devices of the host, in PCI order; that number is the one in a
//! [`Location`](te_core::Location).

use std::fs;
use std::path::{Path, PathBuf};

use te_core::GpuVendor;
use te_core::topology::{GPUS_MAX, PciAddress};

/// Display controllers (VGA, 3D, other) and processing accelerators.
const CLASSES: [u32; 4] = [0x0300, 0x0302, 0x0380, 0x1200];
/// Entries of the directory that are read.
const ENTRIES_MAX: usize = 1 << 16;

/// The numbers of devices at these addresses among all of the vendor's in the host, in PCI order. Where
/// sysfs does not have all of them, the order among these; where not even their addresses are known, the
/// order in which they are given.
pub(crate) fn number(sysfs: &Path, vendor: GpuVendor, devices: &[Option<PciAddress>]) -> Vec<u16> {
    let in_order = |all: &[PciAddress]| -> Option<Vec<u16>> {
        let place = |device: &Option<PciAddress>| all.iter().position(|at| Some(*at) == *device);
        devices.iter().map(|device| place(device).map(|place| place as u16)).collect()
    };
    if let Some(numbers) = in_order(&in_host(sysfs, vendor)) {
        return numbers;
    }
    let mut visible: Vec<PciAddress> = devices.iter().flatten().copied().collect();
    visible.sort_unstable();
    visible.dedup();
    let numbers = if visible.len() == devices.len() { in_order(&visible) } else { None };
    numbers.unwrap_or_else(|| (0..devices.len() as u16).collect())
}

/// The addresses of the vendor's GPUs, ascending.
fn in_host(sysfs: &Path, vendor: GpuVendor) -> Vec<PciAddress> {
    let Ok(entries) = fs::read_dir(sysfs.join("bus/pci/devices")) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.take(ENTRIES_MAX).flatten() {
        let Some(address) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let is_gpu = hex(&entry.path().join("class")).is_some_and(|class| CLASSES.contains(&(class >> 8)));
        let id = hex(&entry.path().join("vendor")).and_then(|id| u16::try_from(id).ok());
        if is_gpu && id.and_then(GpuVendor::from_pci) == Some(vendor) {
            found.push(address);
        }
    }
    found.sort_unstable();
    found.truncate(GPUS_MAX);
    found
}

/// The NUMA node of a PCI device; `None`: the host does not report one.
pub(crate) fn numa_node(sysfs: &Path, device: PciAddress) -> Option<u16> {
    let path = sysfs.join("bus/pci/devices").join(device.to_string()).join("numa_node");
    // -1: none.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether a NIC's driver can register memory of the vendor's GPUs by its address.
pub(crate) fn is_peer_direct(sysfs: &Path, vendor: GpuVendor) -> bool {
    let modules: &[&str] = match vendor {
        GpuVendor::Nvidia => &["module/nvidia_peermem", "module/nv_peer_mem"],
        GpuVendor::Amd => &["kernel/mm/memory_peers/amdkfd"],
        _ => &[],
    };
    modules.iter().any(|module| sysfs.join(module).exists())
}

/// Whether the kernel has a driver for GPUs of this vendor. It is a look at the file system: nothing is
/// loaded for it.
pub(crate) fn has_driver(dev: &Path, vendor: GpuVendor) -> bool {
    let files: &[&str] = match vendor {
        // Servers and workstations; WSL; Jetson.
        GpuVendor::Nvidia => &["nvidiactl", "dxg", "nvhost-ctrl-gpu"],
        GpuVendor::Amd => &["kfd"],
        _ => &[],
    };
    files.iter().map(|file| dev.join(file)).any(|file: PathBuf| file.exists())
}

fn hex(path: &Path) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs(devices: &[(&str, &str, &str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (address, vendor, class, node) in devices {
            let device = root.path().join("bus/pci/devices").join(address);
            fs::create_dir_all(&device).unwrap();
            for (file, text) in [("vendor", vendor), ("class", class), ("numa_node", node)] {
                fs::write(device.join(file), format!("{text}\n")).unwrap();
            }
        }
        root
    }

    fn addresses<const N: usize>(texts: [&str; N]) -> [Option<PciAddress>; N] {
        texts.map(|text| text.parse().ok())
    }

    #[test]
    fn devices_have_their_number_in_the_host_however_the_process_sees_them() {
        let root = sysfs(&[
            ("0000:17:00.0", "0x10de", "0x030200", "0"),
            ("0000:65:00.0", "0x10de", "0x030200", "0"),
            ("0000:b3:00.0", "0x10de", "0x030200", "1"),
            ("0000:05:00.0", "0x1a03", "0x030000", "0"),
            ("0000:06:00.0", "0x10de", "0x020700", "0"),
            ("0000:07:00.0", "0x1002", "0x120000", "-1"),
        ]);
        let seen = addresses(["0000:b3:00.0", "0000:17:00.0"]);
        assert_eq!(number(root.path(), GpuVendor::Nvidia, &seen), [2, 0]);
        assert_eq!(number(root.path(), GpuVendor::Amd, &addresses(["0000:07:00.0"])), [0]);
        let node = |text: &str| numa_node(root.path(), text.parse().unwrap());
        assert_eq!((node("0000:b3:00.0"), node("0000:07:00.0"), node("0000:ff:00.0")), (Some(1), None, None));
    }

    #[test]
    fn where_sysfs_does_not_know_them_the_order_among_them_counts() {
        let nowhere = Path::new("/nonexistent");
        let seen = addresses(["0000:b3:00.0", "0000:17:00.0"]);
        assert_eq!(number(nowhere, GpuVendor::Nvidia, &seen), [1, 0]);
        assert_eq!(number(nowhere, GpuVendor::Nvidia, &[None, seen[0]]), [0, 1]);
        assert_eq!(number(nowhere, GpuVendor::Nvidia, &[seen[0], seen[0]]), [0, 1]);
    }

    #[test]
    fn drivers_are_found_by_their_files() {
        let root = tempfile::tempdir().unwrap();
        assert!(
            !has_driver(root.path(), GpuVendor::Nvidia) && !is_peer_direct(root.path(), GpuVendor::Nvidia)
        );
        fs::write(root.path().join("nvidiactl"), "").unwrap();
        fs::create_dir_all(root.path().join("module/nvidia_peermem")).unwrap();
        assert!(has_driver(root.path(), GpuVendor::Nvidia) && !has_driver(root.path(), GpuVendor::Amd));
        assert!(
            is_peer_direct(root.path(), GpuVendor::Nvidia) && !is_peer_direct(root.path(), GpuVendor::Amd)
        );
    }
}
