//! One typed struct configures an engine. TOML, environment and flags are the binaries' business.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::string::String;
use std::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::error::StartError;
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
    /// Which fabrics to use. One that does not start is left out with a warning, unless it was asked for: by
    /// [`fabrics_required`](Self::fabrics_required), by its port, or by the names of its devices.
    pub fabrics: Fabrics,
    /// Of those, the ones that must start. One that does not, or that this build lacks, keeps the engine from starting. Set by code,
    /// for a caller who knows that somebody has named them: it is no part of a configuration file.
    #[serde(skip)]
    pub fabrics_required: Fabrics,
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
    /// The TCP fabric.
    pub tcp: TcpConfig,
    /// The RDMA fabric.
    pub rdma: RdmaConfig,
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

/// Which fabrics an engine uses. One that this build lacks is ignored. In text `auto` for all, or some of `local`, `shm`, `rdma`
/// and `tcp` with commas between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Fabrics {
    /// Copies within the process.
    pub local: bool,
    /// Shared memory between processes of one host.
    pub shm: bool,
    /// RDMA, one rail for each port. A host without any says so once; that is an error only when no other fabric is on.
    pub rdma: bool,
    /// TCP.
    pub tcp: bool,
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

/// What the TCP fabric can be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TcpConfig {
    /// Port of the data listener; 0 picks one. The address is that of the control port. A port that is named and cannot be had keeps
    /// the engine from starting.
    pub port: u16,
    /// Connections to each peer; 1 to 16.
    pub lanes: u8,
    /// Connections of the data port, ours and peers', 1 to 1048576; a quarter is kept for our own. When there are as many, the peer's
    /// lane that has been silent longest makes room for a new one.
    pub connections_max: u32,
    /// Checks payloads end to end with CRC32C.
    pub checksum: bool,
    /// TCP congestion control, by the kernel's name for it (`sysctl net.ipv4.tcp_available_congestion_control`). Without it,
    /// `cubic` between addresses of one host and the kernel's default elsewhere. An algorithm that the kernel lacks or does
    /// not let this process use keeps the fabric from starting.
    pub congestion: Option<String>,
    /// `SO_SNDBUF` of each connection, bytes; 4096 to 1 GiB. Without it the kernel tunes it.
    pub send_buffer_bytes: Option<u32>,
    /// `SO_RCVBUF` of each connection, bytes; 4096 to 1 GiB. Without it the kernel tunes it.
    pub receive_buffer_bytes: Option<u32>,
}

/// What the RDMA fabric can be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RdmaConfig {
    /// Devices to use, by the kernel's names: `mlx5_0` for each of its active ports, `mlx5_0:1` for one port. Empty: every active
    /// port of the host. One that is named and does not open keeps the engine from starting.
    pub devices: Vec<String>,
    /// Port of the first rail's side channel; each further rail takes the next one. 0 picks them. The address is that of the
    /// control port.
    pub port: u16,
    /// Entry of each port's GID table. Without it one is chosen, RoCE v2 over IPv4 first, and proven by a loopback.
    pub gid_index: Option<u32>,
    /// Queue pairs to each peer on each rail; 1 to 16.
    pub qps: u8,
    /// Longest path MTU, bytes: 256, 512, 1024, 2048 or 4096. The smaller of both ports' counts.
    pub mtu_bytes_max: u32,
    /// Traffic class of our packets; on RoCE its upper six bits are the DSCP.
    pub traffic_class: u8,
    /// InfiniBand service level; 0 to 15.
    pub service_level: u8,
    /// A device resends what is not acknowledged within 4.096 µs × 2^this; 1 to 31.
    pub timeout_exponent: u8,
    /// How often it resends before it gives up; 0 to 7.
    pub retries: u8,
}

impl Config {
    /// Checks what can be checked before anything is opened.
    ///
    /// # Errors
    /// `StartError::Config` names the field and what it may be.
    pub fn validate(&self) -> Result<(), StartError> {
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
        if !(1..=16).contains(&self.tcp.lanes) {
            return Err(StartError::Config { field: "tcp.lanes", need: "must be 1 to 16" });
        }
        if !(1..=1 << 20).contains(&self.tcp.connections_max) {
            return Err(StartError::Config { field: "tcp.connections_max", need: "must be 1 to 1048576" });
        }
        let rdma = &self.rdma;
        for (field, value, range, need) in [
            ("rdma.qps", rdma.qps, 1..=16, "must be 1 to 16"),
            ("rdma.service_level", rdma.service_level, 0..=15, "must be 0 to 15"),
            ("rdma.timeout_exponent", rdma.timeout_exponent, 1..=31, "must be 1 to 31"),
            ("rdma.retries", rdma.retries, 0..=7, "must be 0 to 7"),
        ] {
            if !range.contains(&value) {
                return Err(StartError::Config { field, need });
            }
        }
        if !matches!(rdma.mtu_bytes_max, 256 | 512 | 1024 | 2048 | 4096) {
            let need = "must be 256, 512, 1024, 2048 or 4096";
            return Err(StartError::Config { field: "rdma.mtu_bytes_max", need });
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
        if self.tcp.congestion.as_ref().is_some_and(|name| !(1..16).contains(&name.len())) {
            return Err(StartError::Config {
                field: "tcp.congestion",
                need: "must be the name of an algorithm, of 1 to 15 bytes",
            });
        }
        for (field, bytes) in [
            ("tcp.send_buffer_bytes", self.tcp.send_buffer_bytes),
            ("tcp.receive_buffer_bytes", self.tcp.receive_buffer_bytes),
        ] {
            if bytes.is_some_and(|bytes| !(4096..=1 << 30).contains(&bytes)) {
                return Err(StartError::Config { field, need: "must be 4096 to 1073741824" });
            }
        }
        self.metadata.validate()?;
        if self.advertise_host.is_none() && self.listen.ip().is_unspecified() {
            return Err(StartError::Config {
                field: "advertise_host",
                need: "must be set when listen is 0.0.0.0 or [::]: peers cannot dial that",
            });
        }
        if !self.fabrics.any() {
            return Err(StartError::Config {
                field: "fabrics",
                need: "must leave at least one fabric of this build on",
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
            fabrics_required: Fabrics::NONE,
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
            tcp: TcpConfig::default(),
            rdma: RdmaConfig::default(),
        }
    }
}

impl Config {
    /// The fabrics of those that are on that must start.
    pub(crate) fn required(&self) -> Fabrics {
        let (on, named) = (self.fabrics, self.fabrics_required);
        Fabrics {
            local: on.local && named.local,
            shm: on.shm && named.shm,
            rdma: on.rdma && (named.rdma || self.rdma.port != 0 || !self.rdma.devices.is_empty()),
            tcp: on.tcp && (named.tcp || self.tcp.port != 0),
        }
    }
}

impl Fabrics {
    /// None; switch on what is wanted.
    pub const NONE: Self = Self { local: false, shm: false, rdma: false, tcp: false };
    /// Copies within the process alone.
    pub const LOCAL: Self = Self { local: true, ..Self::NONE };
    /// Shared memory alone.
    pub const SHM: Self = Self { shm: true, ..Self::NONE };
    /// RDMA alone.
    pub const RDMA: Self = Self { rdma: true, ..Self::NONE };
    /// TCP alone.
    pub const TCP: Self = Self { tcp: true, ..Self::NONE };

    /// Whether one that this build has is on.
    #[must_use]
    pub const fn any(self) -> bool {
        self.local || self.shm || (self.rdma && cfg!(feature = "rdma")) || (self.tcp && cfg!(feature = "tcp"))
    }
}

impl Default for Fabrics {
    fn default() -> Self {
        Self { local: true, shm: true, rdma: true, tcp: true }
    }
}

impl fmt::Display for Fabrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::default() {
            return f.write_str("auto");
        }
        let all = [("local", self.local), ("shm", self.shm), ("rdma", self.rdma), ("tcp", self.tcp)];
        let on: Vec<&str> = all.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
        f.write_str(if on.is_empty() { "none" } else { "" })?;
        f.write_str(&on.join(","))
    }
}

impl FromStr for Fabrics {
    type Err = UnknownFabric;

    fn from_str(text: &str) -> Result<Self, UnknownFabric> {
        let mut fabrics = Self::NONE;
        for name in text.split(',').map(str::trim) {
            match name {
                "auto" => fabrics = Self::default(),
                "local" => fabrics.local = true,
                "shm" => fabrics.shm = true,
                "rdma" => fabrics.rdma = true,
                "tcp" => fabrics.tcp = true,
                "none" => {}
                _ => return Err(UnknownFabric),
            }
        }
        Ok(fabrics)
    }
}

impl TryFrom<String> for Fabrics {
    type Error = UnknownFabric;

    fn try_from(text: String) -> Result<Self, UnknownFabric> {
        text.parse()
    }
}

impl From<Fabrics> for String {
    fn from(fabrics: Fabrics) -> Self {
        fabrics.to_string()
    }
}

/// No fabric has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownFabric;

impl fmt::Display for UnknownFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such fabric: write auto, or some of local,shm,rdma,tcp")
    }
}

impl std::error::Error for UnknownFabric {}

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

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            port: 0,
            lanes: 1,
            connections_max: 1024,
            checksum: false,
            congestion: None,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
        }
    }
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            port: 0,
            gid_index: None,
            qps: 2,
            mtu_bytes_max: 4096,
            traffic_class: 0,
            service_level: 0,
            timeout_exponent: 14,
            retries: 7,
        }
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

    #[test]
    fn tcp_settings_out_of_their_limits_are_refused_by_name() {
        let refused = |tcp: TcpConfig| match (Config { tcp, ..Config::default() }).validate() {
            Err(StartError::Config { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        let none = TcpConfig::default();
        for name in ["", "a-name-that-is-too-long"] {
            let tcp = TcpConfig { congestion: Some(name.into()), ..none.clone() };
            assert_eq!(refused(tcp), "tcp.congestion");
        }
        for bytes in [Some(4095), Some((1 << 30) + 1)] {
            let tcp = TcpConfig { send_buffer_bytes: bytes, ..none.clone() };
            assert_eq!(refused(tcp), "tcp.send_buffer_bytes");
            let tcp = TcpConfig { receive_buffer_bytes: bytes, ..none.clone() };
            assert_eq!(refused(tcp), "tcp.receive_buffer_bytes");
        }
    }

    #[test]
    fn rdma_settings_out_of_their_limits_are_refused_by_name() {
        let none = RdmaConfig::default();
        for (field, rdma) in [
            ("rdma.qps", RdmaConfig { qps: 0, ..none.clone() }),
            ("rdma.qps", RdmaConfig { qps: 17, ..none.clone() }),
            ("rdma.mtu_bytes_max", RdmaConfig { mtu_bytes_max: 1500, ..none.clone() }),
            ("rdma.service_level", RdmaConfig { service_level: 16, ..none.clone() }),
            ("rdma.timeout_exponent", RdmaConfig { timeout_exponent: 0, ..none.clone() }),
            ("rdma.retries", RdmaConfig { retries: 8, ..none }),
        ] {
            match (Config { rdma, ..Config::default() }).validate() {
                Err(StartError::Config { field: found, .. }) => assert_eq!(found, field),
                other => panic!("{field}: {other:?}"),
            }
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
    fn fabrics_are_read_as_they_are_written() {
        let (shm, rdma, tcp) = (Fabrics::SHM, Fabrics::RDMA, Fabrics::TCP);
        let two = Fabrics { shm: true, ..tcp };
        for fabrics in [Fabrics::default(), Fabrics::NONE, Fabrics::LOCAL, shm, rdma, tcp, two] {
            assert_eq!(fabrics.to_string().parse(), Ok(fabrics));
        }
        assert_eq!(" shm, tcp".parse(), Ok(two));
        assert_eq!("pigeon".parse::<Fabrics>(), Err(UnknownFabric));
    }

    #[test]
    fn an_engine_without_fabrics_is_refused() {
        let config = Config { fabrics: Fabrics::NONE, ..Config::default() };
        assert!(matches!(config.validate(), Err(StartError::Config { field: "fabrics", .. })));
    }
}
