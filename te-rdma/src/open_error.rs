//! Why a transport could not be opened, and what to do about it.

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
    /// There is no RDMA on this host.
    NoRdma(NoRdma),
    /// The device could not be opened, or there is no such one.
    Provider(sys::OpenError),
    /// The port is there and carries nothing.
    PortDown,
    /// No entry of the port's GID table passed the loopback, or the one that was asked for does not exist.
    NoGid {
        /// What ended the last attempt: a completion's status, or an `errno`; 0: there was nothing to try.
        code: i32,
    },
    /// The device refused.
    Device {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: Error,
    },
    /// The system refused.
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
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
                f.write_str("the port is down: see `rdma link`, check cable and subnet manager")
            }
            Self::NoGid { code: 0 } => f.write_str("the port has no such GID: give its interface an address"),
            Self::NoGid { code } => write!(
                f,
                "no GID of the port reaches the port itself (code {code}): check the interface's addresses, or set `gid_index`"
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
