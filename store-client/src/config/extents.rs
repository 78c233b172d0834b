//! Settings of memory in a CXL pool.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The extents of a CXL pool that a node contributes in place of memory that it allocates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeCxlConfig {
    /// The pool: the path of a devdax device, such as `/dev/dax0.0`, or of a file, which `snowskin cxl
    /// format` made a pool of. The node's engine opens it as if `engine.cxl.pools` named it. With
    /// `engine.cxl.coherence` = `flush`, only processes that have opened the pool reach the memory. Default
    /// "": the node allocates its memory.
    pub pool: PathBuf,
    /// The first extent. Default 0.
    pub first: u32,
    /// The number of extents, at least 1. `capacity_bytes` has no effect then. Default 0.
    pub count: u32,
}

impl NodeCxlConfig {
    /// Whether there are any.
    #[must_use]
    pub fn is_set(&self) -> bool {
        !self.pool.as_os_str().is_empty()
    }
}
