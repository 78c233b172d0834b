//! One typed struct configures an engine. TOML, environment and flags are the binaries' business.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::string::String;

use serde::{Deserialize, Serialize};

use crate::error::StartError;
use crate::fabrics::{FabricEntry, Fabrics, UnknownFabric, fabrics};
use crate::metadata::{MetadataSource, is_segment_name};
use crate::secret::Secret;

/// Everything an engine can be told. `Config::default()` listens on loopback and uses every fabric of this build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where the control port listens: peers fetch descriptors, send notifications and probe here. Port 0 picks one.
    pub listen: SocketAddr,
    /// The host under which peers reach `listen` (a name or an address). Without it, the address that is bound; needed
    /// when that is `0.0.0.0` or `[::]`.
    pub advertise_host: Option<String>,
    /// Which fabrics to use. One that is named here, or that its own settings ask for by a port or by devices, must start; `auto`
    /// takes every other one that starts.
    pub fabrics: Fabrics,
    /// Where to learn which NICs are near which memory. Counts for fabrics with several NICs.
    pub topology: TopologySource,
    /// Length at which requests are cut, bytes. Rounded up to what the nearest rail prefers when it is the only usable one.
    pub slice_bytes: u32,
    /// Batches that exist at a time, at most.
    pub batches_max: u32,
    /// Requests in one batch, at most.
    pub requests_per_batch_max: u32,
    /// Slices in flight over all rails, at most.
    pub inflight_slices_max: u32,
    /// Registered regions, at most.
    pub regions_max: u32,
    /// Attached remote regions over all open segments, at most.
    pub segments_max: u32,
    /// How long the worker of a [`TransferEngine`](crate::TransferEngine) polls without result before it parks, and how
    /// long a waiting caller spins before it sleeps, microseconds.
    pub spin_us: u32,
    /// A batch of up to so many bytes is carried out by the thread that submits it, if the engine is free and a copy within the
    /// host does: no thread hop. 0: always the worker.
    pub inline_bytes_max: u32,
    /// How long a batch past its deadline, or an `unregister` that meets a peer's running operation, may drain before
    /// the engine gives up on it, milliseconds. A batch that did not drain is quarantined.
    pub drain_ms: u32,
    /// Commands that callers of a [`TransferEngine`](crate::TransferEngine) may have queued, at most.
    pub mailbox_commands_max: u32,
    /// What engines that belong together share. With it, the control port answers nothing but probes to who does not prove that it
    /// knows it, and this engine proves it to others. Set by code: it is no part of a configuration file.
    #[serde(skip)]
    pub cluster_secret: Secret,
    /// The control port's limits.
    pub control: ControlConfig,
    /// Where segments are looked up by name, and this one's name there.
    pub metadata: MetadataConfig,
    /// Shared memory between processes of one host.
    pub shm: te_host::ShmConfig,
    /// The RDMA fabric.
    #[cfg(feature = "rdma")]
    pub rdma: te_rdma::Config,
    /// The TCP fabric.
    #[cfg(feature = "tcp")]
    pub tcp: te_tcp::Config,
}

/// Where an engine learns which NICs are near which memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TopologySource {
    /// From sysfs. A host that cannot be read counts as `Off`.
    #[default]
    Auto,
    /// From a priority matrix in JSON: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], …}`. A file that does not hold one keeps the
    /// engine from starting.
    File(PathBuf),
    /// Nowhere: all NICs are alike.
    Off,
}

/// Limits of the control port, and of our own requests to a peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControlConfig {
    /// Connections at a time, at most. One more takes the place of the one that has been silent longest.
    pub connections_max: u32,
    /// Longest frame that is accepted from a server (a descriptor), bytes.
    pub frame_bytes_max: u32,
    /// How long a connection may be without having asked more than whether we are there, how long it may sit in the middle of a
    /// frame, and how long our own requests take at most, milliseconds.
    pub timeout_ms: u32,
    /// Notifications that wait to be taken, at most; further ones are refused with an error to their sender. 0: all are, for a
    /// process that never takes any.
    pub notifications_max: u32,
    /// Longest name and message of one notification together, bytes.
    pub notification_bytes_max: u32,
    /// Names and messages of all notifications that wait to be taken together, bytes.
    pub inbox_bytes_max: u32,
}

/// Names of segments. See [`metadata`](crate::metadata).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetadataConfig {
    /// Where names are looked up.
    pub source: MetadataSource,
    /// Under which name this engine's memory is registered there, while it runs: 1 to 128 of `A–Z a–z 0–9 . _ - /`, a letter or
    /// digit first. Without it, peers open it by its address alone.
    pub name: Option<String>,
    /// How long the name outlives an engine that died, milliseconds; 1000 to 3600000. Renewed at a third of it.
    pub ttl_ms: u32,
    /// How long one request to one server takes at most, milliseconds; 1 to 60000.
    pub timeout_ms: u32,
}

impl Config {
    /// Checks what can be checked before anything is opened.
    ///
    /// # Errors
    /// `StartError::Config` and `StartError::Setting` name the field and what it may be; `StartError::Fabric`, a fabric that is
    /// named and that this build lacks.
    pub fn validate(&self) -> Result<(), StartError> {
        self.validate_beside(&[])
    }

    /// As [`validate`](Self::validate), for an engine that has the `given` fabrics as well.
    pub(crate) fn validate_beside(&self, given: &[FabricEntry<'_>]) -> Result<(), StartError> {
        self.validate_own()?;
        self.metadata.validate()?;
        for entry in fabrics().iter().chain(given) {
            if let Some(Err(source)) = entry.fabric.map(|fabric| fabric.validate(self)) {
                return Err(StartError::Setting { fabric: entry.name, source });
            }
        }
        if let Some(lacking) = self.fabrics.named().find(|entry| !entry.is_built()) {
            let source = Box::new(UnknownFabric::NotBuilt(lacking.name));
            return Err(StartError::Fabric { name: lacking.name, source });
        }
        if self.fabrics.is_none() && given.is_empty() {
            return Err(StartError::Config {
                field: "fabrics",
                need: "must leave at least one fabric of this build on",
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
            ("segments_max", self.segments_max),
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
                need: "must be set when listen is 0.0.0.0 or [::]: peers cannot dial that",
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
            segments_max: 16384,
            spin_us: 100,
            inline_bytes_max: 64 << 10,
            drain_ms: 1000,
            mailbox_commands_max: 1024,
            cluster_secret: Secret::default(),
            control: ControlConfig::default(),
            metadata: MetadataConfig::default(),
            shm: te_host::ShmConfig::default(),
            #[cfg(feature = "rdma")]
            rdma: te_rdma::Config::default(),
            #[cfg(feature = "tcp")]
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
                return refuse("metadata.name", "needs metadata.source, a server to be registered at");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid() {
        Config::default().validate().unwrap();
    }

    #[test]
    fn an_unspecified_address_needs_a_name_to_advertise() {
        let mut config = Config { listen: "0.0.0.0:0".parse().unwrap(), ..Config::default() };
        assert!(matches!(config.validate(), Err(StartError::Config { field: "advertise_host", .. })));
        config.advertise_host = Some("node-7".into());
        config.validate().unwrap();
    }

    /// The setting that is refused, and what it may be.
    fn refused(config: &Config) -> (String, String) {
        let error = config.validate().expect_err("it is out of its limits");
        error.setting().unwrap_or_else(|| panic!("{error}"))
    }

    #[test]
    fn shm_settings_out_of_their_limits_are_refused_by_name() {
        let mut config = Config::default();
        config.shm.peers_max = 0;
        assert_eq!(refused(&config), ("shm.peers_max".into(), "must be 1 to 65536".into()));
    }

    #[cfg(feature = "tcp")]
    #[test]
    fn tcp_settings_out_of_their_limits_are_refused_by_name() {
        let none = te_tcp::Config::default();
        let refused = |tcp| refused(&Config { tcp, ..Config::default() }).0;
        for name in ["", "a-name-that-is-too-long"] {
            assert_eq!(
                refused(te_tcp::Config { congestion: Some(name.into()), ..none.clone() }),
                "tcp.congestion"
            );
        }
        for bytes in [Some(4095), Some((1 << 30) + 1)] {
            let tcp = te_tcp::Config { send_buffer_bytes: bytes, ..none.clone() };
            assert_eq!(refused(tcp), "tcp.send_buffer_bytes");
            let tcp = te_tcp::Config { receive_buffer_bytes: bytes, ..none.clone() };
            assert_eq!(refused(tcp), "tcp.receive_buffer_bytes");
        }
    }

    #[cfg(feature = "rdma")]
    #[test]
    fn rdma_settings_out_of_their_limits_are_refused_by_name() {
        use te_rdma::Config as Rdma;
        let none = Rdma::default();
        for (field, rdma) in [
            ("rdma.qps", Rdma { qps: 0, ..none.clone() }),
            ("rdma.qps", Rdma { qps: 17, ..none.clone() }),
            ("rdma.mtu_bytes_max", Rdma { mtu_bytes_max: 1500, ..none.clone() }),
            ("rdma.service_level", Rdma { service_level: 16, ..none.clone() }),
            ("rdma.timeout_exponent", Rdma { timeout_exponent: 0, ..none.clone() }),
            ("rdma.retries", Rdma { retries: 8, ..none }),
        ] {
            assert_eq!(refused(&Config { rdma, ..Config::default() }).0, field);
        }
    }

    #[test]
    fn metadata_that_cannot_be_is_refused_by_name() {
        let none = MetadataConfig { source: "http://h:1".parse().unwrap(), ..MetadataConfig::default() };
        let named = |name: &str| Some(name.into());
        for (field, metadata) in [
            ("metadata.name", MetadataConfig { name: named("n"), ..MetadataConfig::default() }),
            ("metadata.name", MetadataConfig { name: named("host:1"), ..none.clone() }),
            ("metadata.ttl_ms", MetadataConfig { ttl_ms: 999, ..none.clone() }),
            ("metadata.timeout_ms", MetadataConfig { timeout_ms: 0, ..none.clone() }),
        ] {
            match (Config { metadata, ..Config::default() }).validate() {
                Err(StartError::Config { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
        }
        let metadata = MetadataConfig { name: named("prefill/3"), ..none };
        Config { metadata, ..Config::default() }.validate().unwrap();
    }

    #[test]
    fn an_engine_without_fabrics_is_refused() {
        let config = Config { fabrics: Fabrics::NONE, ..Config::default() };
        assert!(matches!(config.validate(), Err(StartError::Config { field: "fabrics", .. })));
    }
}
