//! Where a host's memory, NICs and GPUs are: read from sysfs, hwloc or a file. The data and the scoring are
//! [`te_core::topology`]; nothing here runs on the data path.
//!
//! ```text
//!   /sys ────── read_sysfs ──┐
//!   hwloc ───── read_hwloc ──┼─►  Topology ──┐
//!   JSON file ─ read_matrix ─┴─►  PriorityMatrix ──►  Affinity ──►  percent a rail, for HealthRoute
//! ```
//!
//! Reading never panics and never fails for one odd device: what makes no sense is left out, and a warning says so.

mod affinity;
mod matrix;
mod sysfs;

pub use affinity::Affinity;
pub use matrix::{MatrixFileError, matrix_to_json, parse_matrix, read_matrix};
pub use sysfs::{Found, SYSFS, SysfsError, read_sysfs};
pub use te_core::topology::*;
