//! The typed configuration of an engine. Reading TOML, environment variables and flags is left to the
//! programs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::string::String;

use serde::{Deserialize, Serialize};
use te_core::Secret;

use crate::error::StartError;
#[cfg(not(feature = "cxl"))]
use crate::fabrics::not_built::te_cxl;
#[cfg(not(any(feature = "cuda", feature = "hip")))]
use crate::fabrics::not_built::te_gpu;
#[cfg(not(feature = "nvmeof"))]
use crate::fabrics::not_built::te_nvmeof;
#[cfg(not(feature = "rdma"))]
use crate::fabrics::not_built::te_rdma;
#[cfg(not(feature = "tcp"))]
use crate::fabrics::not_built::te_tcp;
use crate::fabrics::{FabricEntry, Fabrics, UnknownFabric, fabrics};
use crate::metadata::{MetadataSource, is_segment_name};

/// The configuration of an engine. `Config::default()` listens on loopback and uses every fabric of this
/// build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The address of the control port, where peers fetch descriptors, send notifications and probe. Port 0:
    /// the system chooses a port.
    pub listen: SocketAddr,
    /// The host name or address under which peers reach `listen`. Without it, peers use the address of
    /// `listen`; required when that is `0.0.0.0` or `[::]`.
    pub advertise_host: Option<String>,
    /// The fabrics to use. A fabric that is named here, or whose own settings name a port or a device, must
    /// start; `auto` adds every other fabric that starts, without CXL pools and NVMe over TCP.
    pub fabrics: Fabrics,
    /// The source of the distances between NICs and memory. Matters on hosts with several RDMA NICs.
    pub topology: TopologySource,
    /// Length of the slices into which requests are cut, bytes; at least 4096. When all requests of a batch
    /// use the same nearest rail, the length that this rail prefers, if that is more.
    pub slice_bytes: u32,
    /// Maximum number of batches that exist at a time.
    pub batches_max: u32,
    /// Maximum number of requests per batch.
    pub requests_per_batch_max: u32,
    /// Maximum number of slices in flight, over all rails.
    pub inflight_slices_max: u32,
    /// Maximum number of registered regions.
    pub regions_max: u32,
    /// Maximum number of attached remote regions, over all open segments.
    #[serde(alias = "segments_max")]
    pub remote_regions_max: u32,
    /// How long the worker of a [`TransferEngine`](crate::TransferEngine) polls without result before it
    /// sleeps, and how long a waiting caller spins before it sleeps, microseconds. 0: no spinning.
    pub spin_us: u32,
    /// Maximum size of a batch that the submitting thread carries out itself, without a thread hop, bytes. It
    /// does so if no other thread is using the engine; over fabrics within the host, the batch has then
    /// ended. 0: all batches run on the worker.
    #[serde(alias = "inline_bytes_max")]
    pub caller_bytes_max: u32,
    /// How long a batch past its deadline, or an `unregister` during an operation of a peer, may take to
    /// drain, milliseconds. A batch that has not drained by then is quarantined.
    pub drain_ms: u32,
    /// Maximum number of commands that callers of a [`TransferEngine`](crate::TransferEngine) may have queued
    /// for its worker.
    pub mailbox_commands_max: u32,
    /// The secret that the engines of a cluster share. With it, the control port answers only probes until a
    /// connection has proved that it knows the secret, and this engine accepts only peers that prove it. Set
    /// by code: it is not read from a configuration file.
    #[serde(skip)]
    pub cluster_secret: Secret,
    /// Limits of the control port.
    pub control: ControlConfig,
    /// Where segment names are looked up, and this engine's name there.
    pub metadata: MetadataConfig,
    /// The CXL fabric, and the pools that it maps.
    #[cfg_attr(not(feature = "cxl"), serde(skip_serializing))]
    pub cxl: te_cxl::Config,
    /// Memory of GPUs.
    #[cfg_attr(not(any(feature = "cuda", feature = "hip")), serde(skip_serializing))]
    pub gpu: te_gpu::Config,
    /// The NVMe over TCP fabric.
    #[cfg_attr(not(feature = "nvmeof"), serde(skip_serializing))]
    pub nvmeof: te_nvmeof::Config,
    /// Shared memory between processes of one host.
    pub shm: te_host::ShmConfig,
    /// The RDMA fabric.
    #[cfg_attr(not(feature = "rdma"), serde(skip_serializing))]
    pub rdma: te_rdma::Config,
    /// The TCP fabric.
    #[cfg_attr(not(feature = "tcp"), serde(skip_serializing))]
    pub tcp: te_tcp::Config,
}

/// Where an engine reads which NICs are near which memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TopologySource {
    /// From sysfs. If sysfs cannot be read, as `Off`, with a warning in the log.
    #[default]
    Auto,
    /// From a file with a priority matrix in JSON: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], …}`. If the file does
    /// not hold one, the engine does not start.
    File(PathBuf),
    /// All NICs count as equally near.
    Off,
}

/// Limits of the control port, and of this engine's requests to the control ports of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct ControlConfig {
    /// Maximum number of connections. One more replaces the connection that has been silent longest.
    pub connections_max: u32,
    /// Maximum length of an answer (a descriptor) that this engine accepts from a peer, bytes; at least 4096.
    pub frame_bytes_max: u32,
    /// How long a connection may stay open with nothing but probes, how long it may pause in the middle of a
    /// frame, and how long a request of this engine may take, milliseconds.
    pub timeout_ms: u32,
    /// Maximum number of notifications in the queue; the sender of a further one gets an error. 0: all
    /// notifications are refused, for a process that never takes any.
    pub notifications_max: u32,
    /// Maximum length of the name and the message of one notification together, bytes.
    pub notification_bytes_max: u32,
    /// Maximum length of the names and messages of all notifications in the queue together, bytes.
    pub inbox_bytes_max: u32,
}

/// How segment names are looked up and registered. See [`metadata`](crate::metadata).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct MetadataConfig {
    /// Where segment names are looked up.
    pub source: MetadataSource,
    /// The name under which this engine's segment is registered there while the engine runs: 1 to 128 of
    /// `A–Z a–z 0–9 . _ - /`, a letter or digit first. Without it, peers open the segment by its address.
    pub name: Option<String>,
    /// How long the name stays registered after the engine has died, milliseconds; 1000 to 3600000. A running
    /// engine renews it after a third of this time.
    pub ttl_ms: u32,
    /// How long one request to one server may take, milliseconds; 1 to 60000.
    pub timeout_ms: u32,
}

impl Config {
    /// Checks everything that can be checked before a socket or a device is opened.
    ///
    /// # Errors
    /// `StartError::Config` and `StartError::Setting` name the field and its allowed values;
    /// `StartError::Fabric` names a fabric that is wanted by name and that this build lacks.
    pub fn validate(&self) -> Result<(), StartError> {
        self.validate_beside(&[])
    }

    /// As [`validate`](Self::validate), for an engine that also has the `given` fabrics.
    pub(crate) fn validate_beside(&self, given: &[FabricEntry<'_>]) -> Result<(), StartError> {
        self.validate_own()?;
        self.metadata.validate()?;
        for entry in fabrics().iter().chain(given) {
            if let Some(Err(source)) = entry.fabric.map(|fabric| fabric.validate(self)) {
                return Err(StartError::Setting { fabric: entry.name, source });
            }
        }
        #[cfg(any(feature = "cuda", feature = "hip"))]
        self.gpu.validate().map_err(crate::gpu::refused)?;
        if let Some(lacking) = self.fabrics.named().find(|entry| !entry.is_built()) {
            let source = Box::new(UnknownFabric::NotBuilt(lacking.name));
            return Err(StartError::Fabric { name: lacking.name, source });
        }
        if self.fabrics.is_none() && given.is_empty() {
            return Err(StartError::Config {
                field: "fabrics",
                need: "must name at least one fabric, or be \"auto\"",
            });
        }
        Ok(())
    }

    /// The engine's own settings.
    fn validate_own(&self) -> Result<(), StartError> {
        let at_least_one = [
            ("batches_max", self.batches_max),
            ("requests_per_batch_max", self.requests_per_batch_max),
            ("inflight_slices_max", self.inflight_slices_max),
            ("regions_max", self.regions_max),
            ("remote_regions_max", self.remote_regions_max),
            ("mailbox_commands_max", self.mailbox_commands_max),
            ("control.connections_max", self.control.connections_max),
            ("control.timeout_ms", self.control.timeout_ms),
        ];
        for (field, value) in at_least_one {
            if value == 0 {
                return Err(StartError::Config { field, need: "must be at least 1" });
            }
        }
        if self.slice_bytes < 4096 {
            return Err(StartError::Config { field: "slice_bytes", need: "must be at least 4096" });
        }
        if self.control.frame_bytes_max < 4096 {
            return Err(StartError::Config {
                field: "control.frame_bytes_max",
                need: "must be at least 4096",
            });
        }
        if self.advertise_host.is_none() && self.listen.ip().is_unspecified() {
            return Err(StartError::Config {
                field: "advertise_host",
                need: "must be set when listen is 0.0.0.0 or [::], to which peers cannot connect",
            });
        }
        Ok(())
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise_host: None,
            fabrics: Fabrics::default(),
            topology: TopologySource::default(),
            slice_bytes: 64 << 10,
            batches_max: 1024,
            requests_per_batch_max: 4096,
            inflight_slices_max: 4096,
            regions_max: 4096,
            remote_regions_max: 16384,
            spin_us: 100,
            caller_bytes_max: 64 << 10,
            drain_ms: 1000,
            mailbox_commands_max: 1024,
            cluster_secret: Secret::default(),
            control: ControlConfig::default(),
            metadata: MetadataConfig::default(),
            cxl: te_cxl::Config::default(),
            gpu: te_gpu::Config::default(),
            nvmeof: te_nvmeof::Config::default(),
            shm: te_host::ShmConfig::default(),
            rdma: te_rdma::Config::default(),
            tcp: te_tcp::Config::default(),
        }
    }
}

impl Default for ControlConfig {
    fn default() -> Self {
        Self {
            connections_max: 64,
            frame_bytes_max: 8 << 20,
            timeout_ms: 5000,
            notifications_max: 4096,
            notification_bytes_max: 64 << 10,
            inbox_bytes_max: 4 << 20,
        }
    }
}

impl MetadataConfig {
    fn validate(&self) -> Result<(), StartError> {
        let refuse = |field, need| Err(StartError::Config { field, need });
        if let Some(need) = self.source.missing_feature() {
            return refuse("metadata.source", need);
        }
        if let Some(name) = &self.name {
            if !is_segment_name(name) {
                return refuse(
                    "metadata.name",
                    "must be 1 to 128 letters, digits and . _ - /, beginning with a letter or digit",
                );
            }
            if self.source.is_peer_to_peer() {
                return refuse(
                    "metadata.name",
                    "needs metadata.source: the server at which to register the name",
                );
            }
        }
        if !(1000..=3_600_000).contains(&self.ttl_ms) {
            return refuse("metadata.ttl_ms", "must be 1000 to 3600000");
        }
        if !(1..=60_000).contains(&self.timeout_ms) {
            return refuse("metadata.timeout_ms", "must be 1 to 60000");
        }
        Ok(())
    }
}

impl Default for MetadataConfig {
    fn default() -> Self {
        Self { source: MetadataSource::default(), name: None, ttl_ms: 15_000, timeout_ms: 2000 }
    }
}
