//! Errors of opening a device.

use std::fmt;

use super::load::NoRdma;

/// Why a device cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// RDMA is not available on this host.
    NoRdma(NoRdma),
    /// There is no device with this name.
    NoSuchDevice(String),
    /// The device has no such port.
    NoSuchPort {
        /// The device's name.
        device: String,
        /// The port that was requested.
        port: u8,
    },
    /// A call of the library failed.
    Failed {
        /// The device's name.
        device: String,
        /// The function that failed, by the name of its manual page.
        call: &'static str,
        /// The driver's `errno`.
        errno: i32,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRdma(reason) => reason.fmt(f),
            Self::NoSuchDevice(name) => {
                write!(f, "no RDMA device `{name}`: `rdma link` lists the devices of this host")
            }
            Self::NoSuchPort { device, port } => {
                write!(f, "RDMA device `{device}` has no port {port}: ports count from 1")
            }
            Self::Failed { device, call, errno } => {
                let why = std::io::Error::from_raw_os_error(*errno);
                write!(f, "RDMA device `{device}`: {call} failed ({why})")?;
                f.write_str(match *errno {
                    libc::EACCES | libc::EPERM => ": give this user access to /dev/infiniband/uverbs*",
                    libc::ENOENT | libc::ENXIO => ": pass /dev/infiniband into the container",
                    libc::ENOMEM => ": raise the limit of locked memory (`ulimit -l unlimited`)",
                    _ => "",
                })
            }
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NoRdma(reason) => Some(reason),
            _ => None,
        }
    }
}
