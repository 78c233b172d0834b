//! CXL memory, in both forms that the kernel gives it, and pools.

use std::path::{Path, PathBuf};

use super::super::source::Source;
use crate::dax::{Dax, memory_devices};

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
    let sysfs = source.at("sys");
    Cxl {
        devices: memory_devices(&sysfs),
        dax: Dax::list(&sysfs),
        pools: pools.iter().map(|path| (path.display().to_string(), pool(path))).collect(),
    }
}

#[cfg(feature = "cxl")]
fn pool(path: &Path) -> Result<String, String> {
    let found = te_cxl::Pool::inspect(path).map_err(|error| error.to_string())?;
    let (block, owners) = (found.superblock, found.owners.iter());
    let owned = owners.filter(|owner| owner.as_ref().is_some_and(|owner| owner.owned)).count();
    let extent = crate::size::ByteSize(block.extent_bytes);
    Ok(format!("a pool of {} extents of {extent}, of which {owned} have an owner", block.extents))
}

#[cfg(not(feature = "cxl"))]
fn pool(_: &Path) -> Result<String, String> {
    Err("this build lacks cxl".to_owned())
}
