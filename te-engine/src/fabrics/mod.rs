//! The registry of fabrics. A fabric is one line of [`fabrics`]: its name, how far it is, what it is, and what opens it.
//!
//! Everything else follows from that line: the names that [`Fabrics`] reads, the order of the rails, the settings that are
//! checked, what the command line and its help list. A program that embeds the engine adds lines of its own when it starts one,
//! with [`Engine::start_with_fabrics`](crate::Engine::start_with_fabrics).

mod host;
#[cfg(feature = "rdma")]
mod rdma;
mod set;
#[cfg(feature = "tcp")]
mod tcp;

use std::boxed::Box;
use std::error::Error as StdError;
use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::string::String;
use std::vec::Vec;

use te_core::Transport;
use te_fabric::ConfigError;

use crate::config::Config;
pub(crate) use set::Wanted;
pub use set::{Fabrics, UnknownFabric};

/// Every fabric that there is, the nearest first.
const TABLE: &[FabricEntry<'static>] = &[
    FabricEntry {
        name: "local",
        tier: Tier::Local,
        about: "Copies within one process",
        fabric: Some(&host::Local),
    },
    FabricEntry {
        name: "shm",
        tier: Tier::Shm,
        about: "Shared memory between processes of one host",
        fabric: Some(&host::Shm),
    },
    FabricEntry {
        name: "rdma",
        tier: Tier::Rdma,
        about: "RDMA, over every active port",
        #[cfg(feature = "rdma")]
        fabric: Some(&rdma::Rdma),
        #[cfg(not(feature = "rdma"))]
        fabric: None,
    },
    FabricEntry {
        name: "tcp",
        tier: Tier::Tcp,
        about: "TCP, even within one host",
        #[cfg(feature = "tcp")]
        fabric: Some(&tcp::Tcp),
        #[cfg(not(feature = "tcp"))]
        fabric: None,
    },
];

/// Every fabric that there is, the nearest first, with those that this build lacks.
#[must_use]
pub const fn fabrics() -> &'static [FabricEntry<'static>] {
    TABLE
}

/// One line of the registry.
#[derive(Clone, Copy)]
pub struct FabricEntry<'a> {
    /// What people write in `fabrics`: short, lower case. The feature that builds it has the same name.
    pub name: &'static str,
    /// How far it is.
    pub tier: Tier,
    /// What it is, for help texts: a sentence without its full stop.
    pub about: &'static str,
    /// What opens it. `None`: this build lacks it.
    pub fabric: Option<&'a dyn Fabric>,
}

/// How far a fabric is, the nearest first. Rails of the nearest tier that reaches a segment share the work; farther ones wait
/// until all of those are paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum Tier {
    /// Memory of this process.
    Local = 0,
    /// Memory that processes of one host share.
    Shm = 1,
    /// Memory that hosts share, such as a CXL pool.
    Cxl = 2,
    /// A network whose devices move bytes by themselves.
    Rdma = 3,
    /// A network whose hosts move them.
    Tcp = 4,
    /// Storage over a network.
    NvmeOf = 5,
}

/// What the engine asks of a fabric: to open it. What a fabric can be told is a part of the engine's [`Config`], or is in
/// the value that implements this trait.
pub trait Fabric {
    /// Opens its rails, at least one: a rail is one path, a NIC's port for example, and peers find each other by
    /// [`Transport::name`], which no other fabric may have.
    ///
    /// # Errors
    /// Why there is no rail.
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause>;

    /// Checks its settings before anything is opened, also when it is not wanted.
    ///
    /// # Errors
    /// The first setting that is out of its limits.
    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        let _ = config;
        Ok(())
    }

    /// Whether its settings ask for it by name (a port, a device): then it must start even where `fabrics` is `auto`.
    fn is_asked_for(&self, config: &Config) -> bool {
        let _ = config;
        false
    }
}

/// What a fabric is opened with.
#[derive(Clone, Copy, Debug)]
pub struct FabricContext<'a> {
    /// What the engine was told.
    pub config: &'a Config,
    /// Where the control port listens. A fabric with listeners of its own listens on this address.
    pub control: SocketAddr,
    /// What peers know the engine by, on every fabric; never 0.
    pub identity: u64,
}

/// One rail, before it is one of many.
pub struct Rail {
    /// Device and port, for people: `mlx5_0:1`. Empty where its fabric has only one.
    pub device: String,
    /// What moves the bytes.
    pub transport: Box<dyn Transport + Send>,
}

/// Why a fabric did not start.
#[derive(Debug)]
pub struct Cause {
    pub(crate) error: Box<dyn StdError + Send + Sync>,
    /// Not a failure: this host has nothing of the kind.
    pub(crate) absent: bool,
}

/// A function that opens rails is a fabric without settings.
impl<F> Fabric for F
where
    F: Fn(&FabricContext<'_>) -> Result<Vec<Rail>, Cause>,
{
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause> {
        self(context)
    }
}

impl FabricEntry<'_> {
    /// Whether this build has it.
    #[must_use]
    pub const fn is_built(&self) -> bool {
        self.fabric.is_some()
    }
}

impl fmt::Debug for FabricEntry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FabricEntry")
            .field("name", &self.name)
            .field("tier", &self.tier)
            .finish_non_exhaustive()
    }
}

impl FabricContext<'_> {
    /// The address that exports carry, where the engine was told a host to advertise: its name is looked up here.
    #[must_use]
    pub fn advertise(&self) -> Option<IpAddr> {
        let found = (self.config.advertise_host.as_deref()?, 0).to_socket_addrs().ok()?.next();
        found.map(|found| found.ip())
    }
}

impl Rail {
    /// The rails of a fabric that has only one.
    pub fn only(transport: impl Transport + Send + 'static) -> Vec<Self> {
        vec![Self { device: String::new(), transport: Box::new(transport) }]
    }
}

impl Cause {
    /// This host has nothing of the kind (no such device, no driver), which is nothing to worry about: it is logged once for a
    /// process, and is an error only for a caller that named the fabric.
    pub fn absent(error: impl StdError + Send + Sync + 'static) -> Self {
        Self { error: Box::new(error), absent: true }
    }
}

impl<E: StdError + Send + Sync + 'static> From<E> for Cause {
    fn from(error: E) -> Self {
        Self { error: Box::new(error), absent: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_registry_is_in_the_order_of_the_tiers_and_no_name_is_there_twice() {
        assert!(fabrics().is_sorted_by_key(|entry| entry.tier));
        for (nth, entry) in fabrics().iter().enumerate() {
            assert!(fabrics()[..nth].iter().all(|before| before.name != entry.name), "{}", entry.name);
            assert!(entry.name.bytes().all(|byte| byte.is_ascii_lowercase()), "{}", entry.name);
            assert!(!entry.about.is_empty() && !entry.about.ends_with('.'), "{}", entry.about);
        }
    }

    #[test]
    fn a_fabric_is_built_by_the_feature_of_its_name() {
        let built = |name| fabrics().iter().any(|entry| entry.name == name && entry.is_built());
        assert!(built("local") && built("shm"));
        assert_eq!(built("rdma"), cfg!(feature = "rdma"));
        assert_eq!(built("tcp"), cfg!(feature = "tcp"));
    }
}
