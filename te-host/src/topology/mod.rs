//! Reads where a host's memory, NICs and GPUs are, from sysfs, hwloc or a file. The data types and the
//! scoring are in [`te_core::topology`]; nothing here runs on the data path.
//!
//! ```text
//!   /sys ────── read_sysfs ──┐
//!   hwloc ───── read_hwloc ──┼─►  Topology        (feature `topology-hwloc`)
//!   JSON file ─ read_matrix ─┴─►  PriorityMatrix
//! ```
//!
//! Reading never panics and never fails because of one odd device: invalid values are left out with a
//! warning.

mod found;
#[cfg(feature = "topology-hwloc")]
mod hwloc;
mod matrix;
mod sysfs;

pub use found::Found;
#[cfg(feature = "topology-hwloc")]
pub use hwloc::{HwlocError, HwlocSource, read_hwloc};
pub use matrix::{MatrixFileError, matrix_to_json, parse_matrix, read_matrix};
pub use sysfs::{SYSFS, SysfsError, read_sysfs};

use te_core::topology::{GpuVendor, NAME_BYTES_MAX};

/// SLIT's distance of a node to itself.
const SLIT_LOCAL: u8 = 10;
/// The distance that is assumed between two nodes.
const SLIT_REMOTE: u8 = 20;
/// PCI class and subclass of a VGA controller.
const VGA: u16 = 0x0300;
/// VGA controller, 3D controller, other display controller, processing accelerator (PCI Code and ID
/// Assignment, 1.1 and 1.19).
const GPU_CLASSES: [u16; 4] = [VGA, 0x0302, 0x0380, 0x1200];

/// The vendor of the GPU that a PCI device is, by class and subclass and by vendor id; `None` when it is not
/// a GPU that moves KV caches.
fn gpu_vendor(class: u16, vendor: u16) -> Option<GpuVendor> {
    // The graphics of a server board have another vendor, those of a desktop processor are Intel's.
    let vendor = GpuVendor::from_pci(vendor).filter(|_| GPU_CLASSES.contains(&class))?;
    (vendor != GpuVendor::Intel || class != VGA).then_some(vendor)
}

/// Whether the text can be the name of a NIC, and one component of a path.
fn is_plain(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
        && name != "."
        && name != ".."
}
