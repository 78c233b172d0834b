//! The registry of fabrics. A fabric is one line of [`fabrics`]: its name, its tier, a description, what it
//! needs of the host, and what opens it.
//!
//! Everything else follows from that line: the names that [`Fabrics`] parses, the order of the rails, the
//! settings that are checked, what the command line and its help list, what `snowskin doctor` checks. A
//! program that embeds the engine passes further lines to
//! [`Engine::start_with_fabrics`](crate::Engine::start_with_fabrics).

#[cfg(feature = "cxl")]
mod cxl;
mod host;
#[cfg(not(all(
    feature = "cxl",
    feature = "nvlink",
    feature = "nvmeof",
    feature = "rdma",
    feature = "tcp",
    any(feature = "cuda", feature = "hip")
)))]
pub(crate) mod not_built;
#[cfg(feature = "nvlink")]
mod nvlink;
#[cfg(feature = "nvmeof")]
mod nvmeof;
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
use std::sync::Arc;
use std::vec::Vec;

use te_core::Transport;
use te_core::device::Devices;
use te_fabric::ConfigError;

use crate::config::Config;
use crate::gpu::GpuMemory;
#[cfg(feature = "cxl")]
use crate::pools::PoolMemory;
pub(crate) use set::Wanted;
pub use set::{Fabrics, UnknownFabric};

/// Every fabric, the nearest first.
const TABLE: &[FabricEntry<'static>] = &[
    FabricEntry {
        name: "local",
        tier: Tier::Local,
        about: "Copies within one process",
        needs: &[],
        auto: true,
        fabric: Some(&host::Local),
    },
    FabricEntry {
        name: "shm",
        tier: Tier::Shm,
        about: "Shared memory between processes of one host",
        needs: &[HostNeed::SharedMemory],
        auto: true,
        fabric: Some(&host::Shm),
    },
    FabricEntry {
        name: "nvlink",
        tier: Tier::Nvlink,
        about: "Memory of GPUs between processes of one host, or of an NVLink domain (CUDA)",
        needs: &[HostNeed::NvidiaGpu],
        auto: false,
        #[cfg(feature = "nvlink")]
        fabric: Some(&nvlink::Nvlink),
        #[cfg(not(feature = "nvlink"))]
        fabric: None,
    },
    FabricEntry {
        name: "cxl",
        tier: Tier::Cxl,
        about: "CXL pools, which several hosts map",
        needs: &[HostNeed::Pools],
        auto: false,
        #[cfg(feature = "cxl")]
        fabric: Some(&cxl::Cxl),
        #[cfg(not(feature = "cxl"))]
        fabric: None,
    },
    FabricEntry {
        name: "rdma",
        tier: Tier::Rdma,
        about: "RDMA, over every active port",
        needs: &[
            HostNeed::Library("libibverbs.so.1"),
            HostNeed::DeviceClass("infiniband"),
            HostNeed::LockedMemory,
            HostNeed::Network,
        ],
        auto: true,
        #[cfg(feature = "rdma")]
        fabric: Some(&rdma::Rdma),
        #[cfg(not(feature = "rdma"))]
        fabric: None,
    },
    FabricEntry {
        name: "tcp",
        tier: Tier::Tcp,
        about: "TCP, even within one host",
        needs: &[HostNeed::Network],
        auto: true,
        #[cfg(feature = "tcp")]
        fabric: Some(&tcp::Tcp),
        #[cfg(not(feature = "tcp"))]
        fabric: None,
    },
    FabricEntry {
        name: "nvmeof",
        tier: Tier::NvmeOf,
        about: "NVMe over TCP: regions are served as namespaces",
        needs: &[HostNeed::Network],
        auto: false,
        #[cfg(feature = "nvmeof")]
        fabric: Some(&nvmeof::NvmeOf),
        #[cfg(not(feature = "nvmeof"))]
        fabric: None,
    },
];

/// Every fabric, the nearest first, including those that this build lacks.
#[must_use]
pub const fn fabrics() -> &'static [FabricEntry<'static>] {
    TABLE
}

/// One line of the registry.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct FabricEntry<'a> {
    /// The name of the fabric in the setting `fabrics`: short, lower case. The feature that builds it has the
    /// same name.
    pub name: &'static str,
    /// The distance class of the fabric.
    pub tier: Tier,
    /// A description for help texts: one sentence without a full stop.
    pub about: &'static str,
    /// What the fabric needs of the host at run time. Known for a fabric that this build lacks, too.
    pub needs: &'static [HostNeed],
    /// Whether `auto` includes the fabric. If not, it is used when `fabrics` names it, or when its own
    /// settings name a port or a device.
    pub auto: bool,
    /// What opens the fabric. `None`: this build lacks it.
    pub fabric: Option<&'a dyn Fabric>,
}

/// Something that a fabric needs of the host at run time. `snowskin doctor` checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostNeed {
    /// Network interfaces with an address, free ports, and socket buffers that are large enough.
    Network,
    /// Memory files (`memfd`) that processes of one user map by `/proc/PID/fd`.
    SharedMemory,
    /// A shared library that the dynamic loader finds by this name.
    Library(&'static str),
    /// At least one device in `/sys/class` under this name.
    DeviceClass(&'static str),
    /// A limit of locked memory (`RLIMIT_MEMLOCK`) that covers the regions to be registered.
    LockedMemory,
    /// An NVIDIA GPU, and the library of its driver.
    NvidiaGpu,
    /// Devices or files that the setting `cxl.pools` names, and a pool on each.
    Pools,
}

/// The distance class of a fabric, the nearest first. Rails of the nearest tier that reaches a segment share
/// the work; those of farther tiers are used while all of them are paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
#[non_exhaustive]
pub enum Tier {
    /// Memory of this process.
    Local = 0,
    /// Memory that processes of one host share.
    Shm = 1,
    /// Memory of GPUs that processes of one host share. It is after `Shm`, which moves what is host memory at
    /// both ends; that this fabric refuses.
    Nvlink = 2,
    /// Memory that hosts share, such as a CXL pool.
    Cxl = 3,
    /// A network whose devices move the bytes.
    Rdma = 4,
    /// A network for which the CPUs of the hosts move the bytes.
    Tcp = 5,
    /// Storage over a network.
    NvmeOf = 6,
}

/// What opens a fabric. The settings of a fabric are part of the engine's [`Config`], or of the value that
/// implements this trait.
pub trait Fabric {
    /// Opens the rails of the fabric, at least one. A rail is a port of a NIC, for example. Engines match
    /// their rails by [`Transport::name`], which no other fabric may have.
    ///
    /// # Errors
    /// Why there is no rail.
    fn open(&self, context: &FabricContext<'_>) -> Result<Vec<Rail>, Cause>;

    /// Checks the settings of the fabric before any fabric is opened, even if the fabric is not used.
    ///
    /// # Errors
    /// The first setting that is out of its limits.
    fn validate(&self, config: &Config) -> Result<(), ConfigError> {
        let _ = config;
        Ok(())
    }

    /// Whether its settings name a port or a device: then it must start even if `fabrics` is `auto`.
    fn is_asked_for(&self, config: &Config) -> bool {
        let _ = config;
        false
    }
}

/// What a fabric is opened with.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FabricContext<'a> {
    /// The configuration of the engine.
    pub config: &'a Config,
    /// The address of the control port. A fabric that listens does so on the same IP address.
    pub control: SocketAddr,
    /// The identity of the engine as an initiator, on every fabric; never 0.
    pub identity: u64,
    /// The GPUs whose memory the engine registers.
    pub(crate) gpus: &'a GpuMemory,
    /// Where the CXL fabric puts the pools that it has opened.
    #[cfg(feature = "cxl")]
    pub(crate) pools: &'a PoolMemory,
}

/// One rail of a fabric.
pub struct Rail {
    /// Device and port, for reports: `mlx5_0:1`. Empty if the fabric has only one rail.
    pub device: String,
    /// The transport that moves the bytes.
    pub transport: Box<dyn Transport + Send>,
}

/// Why a fabric did not start.
#[derive(Debug)]
pub struct Cause {
    pub(crate) error: Box<dyn StdError + Send + Sync>,
    /// The host has no device or driver of the fabric, which is not a failure.
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

impl<'a> FabricEntry<'a> {
    /// A fabric that a program adds to those of the registry. It needs nothing of the host; set `needs` if it
    /// does.
    #[must_use]
    pub const fn new(name: &'static str, tier: Tier, about: &'static str, fabric: &'a dyn Fabric) -> Self {
        Self { name, tier, about, needs: &[], auto: true, fabric: Some(fabric) }
    }

    /// Whether this build has the fabric.
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
    /// The GPUs whose memory the engine registers, for a fabric that stages it. `None`: this build knows none
    /// (features `cuda` and `hip`).
    #[must_use]
    pub fn devices(&self) -> Option<Arc<dyn Devices>> {
        self.gpus.devices()
    }

    /// The address that exports carry if the configuration names a host to advertise. Looks up the name of
    /// that host.
    #[must_use]
    pub fn advertise(&self) -> Option<IpAddr> {
        let found = (self.config.advertise_host.as_deref()?, 0).to_socket_addrs().ok()?.next();
        found.map(|found| found.ip())
    }
}

impl Rail {
    /// The only rail of a fabric.
    pub fn only(transport: impl Transport + Send + 'static) -> Vec<Self> {
        vec![Self { device: String::new(), transport: Box::new(transport) }]
    }
}

impl Cause {
    /// The host has no device or driver of the fabric. It is logged once per process, as information, and is
    /// an error only if the fabric must start.
    pub fn absent(error: impl StdError + Send + Sync + 'static) -> Self {
        Self { error: Box::new(error), absent: true }
    }
}

impl<E: StdError + Send + Sync + 'static> From<E> for Cause {
    fn from(error: E) -> Self {
        Self { error: Box::new(error), absent: false }
    }
}
