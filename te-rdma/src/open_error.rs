//! Errors of opening a transport, with their remedies.

use core::fmt;
use std::io;

use te_core::Error;
use te_fabric::ConfigError;

use crate::sys::{self, NoRdma};

/// Why a transport could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is out of its limits.
    Config(ConfigError),
    /// RDMA is not available on this host.
    NoRdma(NoRdma),
    /// The device does not exist, or could not be opened.
    Provider(sys::OpenError),
    /// The port exists and is not active.
    PortDown,
    /// No entry of the port's GID table passed the loopback, or the one in `gid_index` does not exist.
    NoGid {
        /// The error of the last attempt: the status of a completion, or an `errno`; 0: there was no entry.
        code: i32,
    },
    /// A call of the device failed.
    Device {
        /// The step that failed.
        what: &'static str,
        /// The device's error.
        source: Error,
    },
    /// A system call failed.
    System {
        /// The step that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => write!(f, "setting {error}"),
            Self::NoRdma(why) => why.fmt(f),
            Self::Provider(error) => error.fmt(f),
            Self::PortDown => {
                f.write_str("the port is down: check `rdma link`, the cable and the subnet manager")
            }
            Self::NoGid { code: 0 } => f.write_str(
                "the port has no such GID: give its network interface an address, or change `gid_index`",
            ),
            Self::NoGid { code } => write!(
                f,
                "no GID of the port passes a loopback (code {code}): check the addresses of its network interface, or set \
                 `gid_index`"
            ),
            Self::Device { what, source } => write!(f, "could not {what}: {source}"),
            Self::System { what, source } => write!(f, "could not {what}: {source}"),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::NoRdma(why) => Some(why),
            Self::Provider(error) => Some(error),
            Self::Device { source, .. } => Some(source),
            Self::System { source, .. } => Some(source),
            Self::PortDown | Self::NoGid { .. } => None,
        }
    }
}
