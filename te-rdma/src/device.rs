//! What RDMA devices this host has, and why there may be none.

use core::fmt;

/// One port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSummary {
    /// The kernel's name of the device: `mlx5_0`, `rxe0`.
    pub name: String,
    /// From 1.
    pub port: u8,
    /// Whether it can carry traffic.
    pub active: bool,
    /// InfiniBand (true) or Ethernet, that is RoCE (false).
    pub infiniband: bool,
    /// NUMA node of the device, when it has one.
    pub numa_node: Option<u16>,
    /// Link speed times width, bits per second; 0 when unknown.
    pub bits_per_s: u64,
}

/// Why there is no RDMA here. Never a failure of the host: other fabrics serve.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRdma {
    /// libibverbs is not installed, or too old; the loader's words.
    Library(String),
    /// There is a library, but no device.
    NoDevice,
    /// The kernel or the driver refused; its `errno`.
    System(i32),
}

impl fmt::Display for NoRdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(why) => write!(f, "no RDMA here: install libibverbs (rdma-core) ({why})"),
            Self::NoDevice => f.write_str("no RDMA here: no device (see `rdma link`, or `ibv_devices`)"),
            Self::System(errno) => {
                write!(
                    f,
                    "no RDMA here: the kernel refused (errno {errno}): is ib_uverbs loaded, and readable to us?"
                )
            }
        }
    }
}

impl std::error::Error for NoRdma {}
