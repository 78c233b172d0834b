//! [`Setup`]: the arguments of `initialize`, and the settings of the engine and of Mooncake's wire that they
//! stand for.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use te_engine::{Config, TopologySource};
use te_fabric::net::host_addresses;
use te_mooncake::{Cidr, MetadataString, Mode};

use super::EngineError;
use super::managed::ARENA_BYTES;
use crate::config::ConfigError;
use crate::env::{Env, PortRange, WITHOUT_RDMA};

/// Longest host name, bytes.
const HOST_BYTES_MAX: usize = 255;
/// How many ports of a range are tried.
const PORT_TRIES_MAX: u32 = 64;

/// What a [`Session`](super::Session) is started with: the arguments of Mooncake's `initialize` and
/// `createTransferEngine`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Setup {
    /// The host under which peers reach this process, with or without a port.
    pub local_hostname: String,
    /// Where segment names are looked up.
    pub metadata: MetadataString,
    /// RDMA devices to use; empty: all.
    pub devices: Vec<String>,
    /// The port for handshakes, where the caller chooses it; else one of [`Env::rpc_ports`].
    pub rpc_port: Option<u16>,
    /// The environment.
    pub env: Env,
    /// Length of the arenas from which buffers are allocated, bytes; a multiple of 8 KiB. Default 2 GiB.
    pub arena_bytes: u64,
}

impl Setup {
    /// The setup that the arguments of `initialize` describe. The protocol does not choose the fabric: in
    /// Mooncake's default build it does not, either (python.md 1.1).
    ///
    /// # Errors
    /// `Config` for a bad metadata string or host name, and for a protocol that Mooncake refuses.
    pub fn of(
        local_hostname: &str,
        metadata: &str,
        protocol: &str,
        device: &str,
        env: Env,
    ) -> Result<Self, EngineError> {
        Self::of_type(local_hostname, metadata, protocol, device, "etcd", env)
    }

    /// As [`of`](Self::of); a metadata string without a scheme is of the type `metadata_type`, as in
    /// `initialize_ext`.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_type(
        local_hostname: &str,
        metadata: &str,
        protocol: &str,
        device: &str,
        metadata_type: &str,
        env: Env,
    ) -> Result<Self, EngineError> {
        if protocol == "xgmi" {
            let need = "a protocol of this interface: use hip, or tcp";
            return Err(ConfigError::invalid("protocol", protocol, need).into());
        }
        let metadata = metadata_of(metadata, metadata_type, &env)?;
        let (host, port) = split_host(local_hostname);
        if host.len() > HOST_BYTES_MAX || host.contains(|c: char| c.is_control() || c.is_whitespace()) {
            return Err(ConfigError::invalid("local_hostname", local_hostname, "host or host:port").into());
        }
        let mut devices = crate::env::device_list(device);
        if devices.is_empty() || device.trim() == "auto-discovery" {
            devices.clone_from(&env.devices);
        }
        let rpc_port = port.filter(|_| env.legacy_rpc_port && !metadata.is_peer_to_peer());
        Ok(Self {
            local_hostname: local_hostname.to_owned(),
            metadata,
            devices,
            rpc_port,
            env,
            arena_bytes: ARENA_BYTES,
        })
    }

    /// The host without its port. An empty one is loopback.
    fn host(&self) -> &str {
        match split_host(&self.local_hostname).0 {
            "" => "127.0.0.1",
            host => host,
        }
    }

    /// The address at which to listen, and the host that peers are told.
    fn place(&self) -> (IpAddr, String) {
        let (host, listen) = (self.host(), listen_ip(self.host(), &self.env));
        let is_address = host.parse::<IpAddr>().is_ok_and(|ip| !ip.is_unspecified());
        // With a metadata server, the local name may be any name, and peers are told an address, as in
        // Mooncake. Without one they are told what they know already.
        let keep = is_address || self.metadata.is_peer_to_peer() && host.parse::<IpAddr>().is_err();
        let told = match () {
            () if keep => host.to_owned(),
            () if !listen.is_unspecified() => listen.to_string(),
            () => host_addresses().first().map_or_else(|| host.to_owned(), ToString::to_string),
        };
        (listen, told)
    }

    /// `host:port`, as peers are told it.
    pub(super) fn address(&self, port: u16) -> String {
        let (_, told) = self.place();
        if told.contains(':') { format!("[{told}]:{port}") } else { format!("{told}:{port}") }
    }

    /// The configuration of the engine.
    pub(super) fn engine_config(&self) -> Config {
        let (listen, told) = self.place();
        let mut config = Config {
            listen: SocketAddr::new(listen, 0),
            advertise_host: Some(told),
            // Integrations register one region per layer, or per tensor of a checkpoint, and submit one
            // request per block.
            regions_max: REGIONS_MAX,
            remote_regions_max: 1 << 20,
            batches_max: 16_384,
            requests_per_batch_max: REQUESTS_MAX,
            ..Config::default()
        };
        if let Some(fabrics) = self.env.fabrics {
            config.fabrics = fabrics;
        }
        #[cfg(feature = "rdma")]
        if self.env.may_use_rdma() {
            config.rdma.devices.clone_from(&self.devices);
        }
        if let Some(path) = &self.env.topology {
            config.topology = TopologySource::File(path.clone());
        }
        // A descriptor of as many regions as are allowed; notifications as long as a frame of Mooncake's.
        config.control.frame_bytes_max = 64 << 20;
        config.control.connections_max = 1_024;
        config.control.notifications_max = 65_536;
        config.control.notification_bytes_max = self.env.handshake_bytes_max;
        config.control.inbox_bytes_max = 64 << 20;
        config
    }

    /// The configuration of Mooncake's wire: everything that is registered is exported, to every process
    /// that reaches the address, as `initialize` of Mooncake does. `SNOWSKIN_MOONCAKE_PEERS` restricts it.
    pub(super) fn wire_config(&self) -> te_mooncake::Config {
        let (listen, told) = self.place();
        let peers = match self.env.peers.as_slice() {
            [] => vec![Cidr::ANY_V4, Cidr::ANY_V6],
            peers => peers.to_vec(),
        };
        let defaults = te_mooncake::Config::default();
        te_mooncake::Config {
            mode: Mode::Both,
            bind: Some(listen),
            peers,
            advertise_host: Some(told),
            name: Some(self.local_hostname.trim().to_owned()).filter(|name| !name.is_empty()),
            rpc_port: self.rpc_port.unwrap_or(0),
            port_min: self.env.rpc_ports.min,
            port_max: self.env.rpc_ports.max,
            cluster_id: self.env.metadata_cluster.clone(),
            force_v1: self.env.tcp_v1,
            frame_bytes_max: self.env.handshake_bytes_max,
            exports_max: REGIONS_MAX,
            regions_max: REGIONS_MAX,
            remote_regions_max: 1 << 20,
            notification_bytes_max: defaults.notification_bytes_max.max(self.env.handshake_bytes_max),
            ..defaults
        }
    }
}

/// A configuration whose engine uses no RDMA device.
pub(super) fn without_rdma(mut config: Config) -> Config {
    config.fabrics = WITHOUT_RDMA;
    #[cfg(feature = "rdma")]
    config.rdma.devices.clear();
    config
}

/// Most registered regions.
const REGIONS_MAX: u32 = 65_536;
/// Most requests that end together.
pub(super) const REQUESTS_MAX: u32 = 65_535;

/// The metadata string that `initialize` was given; one without a scheme is of the type `scheme`.
fn metadata_of(text: &str, scheme: &str, env: &Env) -> Result<MetadataString, EngineError> {
    let text = text.trim();
    let whole = match text.contains("://") || text == P2P || text.is_empty() {
        true => text.to_owned(),
        false => format!("{scheme}://{text}"),
    };
    let parsed = MetadataString::parse(&whole).and_then(|metadata| match &env.redis {
        Some(login) => metadata.with_login(&login.user, &login.password, login.db),
        None => Ok(metadata),
    });
    parsed.map_err(|error| te_mooncake::StartError::Metadata(error).into())
}

/// The metadata string that stands for no server.
const P2P: &str = "P2PHANDSHAKE";

/// Ports of a range, from a random one on.
pub(crate) fn ports_of(range: PortRange) -> Vec<u16> {
    let count = u32::from(range.max - range.min) + 1;
    let first = RandomState::new().hash_one(range.min) as u32 % count;
    (0..count.min(PORT_TRIES_MAX)).map(|step| range.min + ((first + step) % count) as u16).collect()
}

/// Divides `host`, `host:port`, `[v6]:port` and `v6`. A port that is not one belongs to the host.
pub(crate) fn split_host(text: &str) -> (&str, Option<u16>) {
    let text = text.trim();
    if let Some(rest) = text.strip_prefix('[') {
        if let Some((host, rest)) = rest.split_once(']') {
            return (host, rest.strip_prefix(':').and_then(|port| port.parse().ok()));
        }
        return (text, None);
    }
    match text.split_once(':') {
        Some((host, port)) if !port.contains(':') => match port.parse() {
            Ok(port) => (host, Some(port)),
            Err(_) => (text, None),
        },
        _ => (text, None),
    }
}

/// The address at which to listen so that peers that resolve `host` reach this process: the address of
/// `host` if it is one of this machine's, otherwise (a name that only others resolve, or a translated
/// address) every address.
pub(crate) fn listen_ip(host: &str, env: &Env) -> IpAddr {
    if let Some(bind) = env.bind_address {
        return bind;
    }
    let every = || if env.ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let Ok(found) = (host, 0_u16).to_socket_addrs() else {
        log::warn!("the name `{}` has no address here: listening on every address", host.escape_debug());
        return every();
    };
    let mut found: Vec<IpAddr> = found.map(|addr| addr.ip()).collect();
    // IPv4 first, unless IPv6 is asked for: a name such as localhost has both.
    found.sort_by_key(|ip| ip.is_ipv6() != env.ipv6);
    found.into_iter().find(|ip| TcpListener::bind((*ip, 0)).is_ok()).unwrap_or_else(every)
}

#[cfg(test)]
mod tests {
    use te_engine::Fabrics;

    use super::*;

    fn setup(host: &str, protocol: &str, device: &str, env: Env) -> Result<Setup, EngineError> {
        Setup::of(host, "P2PHANDSHAKE", protocol, device, env)
    }

    #[test]
    fn hosts_and_ports_are_divided() {
        for (text, host, port) in [
            ("localhost", "localhost", None),
            ("localhost:12345", "localhost", Some(12345)),
            ("[::1]:7", "::1", Some(7)),
            ("[::1]", "::1", None),
            ("fe80::1", "fe80::1", None),
            ("host:notaport", "host:notaport", None),
            ("host:70000", "host:70000", None),
            ("", "", None),
            (" h:1 ", "h", Some(1)),
            ("[bad", "[bad", None),
        ] {
            assert_eq!(split_host(text), (host, port), "{text:?}");
        }
    }

    #[test]
    fn a_loopback_name_listens_on_loopback_and_a_name_of_others_everywhere() {
        let env = Env::default();
        assert!(listen_ip("127.0.0.1", &env).is_loopback());
        assert!(listen_ip("localhost", &env).is_loopback());
        assert!(listen_ip("203.0.113.7", &env).is_unspecified());
        let bound = Env { bind_address: Some([127, 0, 0, 2].into()), ..Env::default() };
        assert_eq!(listen_ip("localhost", &bound), IpAddr::from([127, 0, 0, 2]));
    }

    #[test]
    fn peers_are_told_a_host_that_they_can_connect_to() {
        let told = |host: &str, metadata: &str| {
            Setup::of(host, metadata, "tcp", "", Env::default()).unwrap().place().1
        };
        assert_eq!(told("127.0.0.1:12345", P2P), "127.0.0.1");
        assert_eq!(told("localhost", P2P), "localhost");
        assert_eq!(told("", P2P), "127.0.0.1");
        // Any name will do with a server, and peers are told an address.
        assert_eq!(told("localhost", "http://127.0.0.1:8080/metadata"), "127.0.0.1");
        let named = told("prefill-7", "http://127.0.0.1:8080/metadata");
        assert!(named.parse::<IpAddr>().is_ok_and(|ip| !ip.is_unspecified()) || host_addresses().is_empty());
        assert_ne!(told("0.0.0.0", P2P), "0.0.0.0");
    }

    #[test]
    fn a_metadata_string_without_a_scheme_is_of_the_stated_type() {
        let parse = |text: &str, scheme: &str| metadata_of(text, scheme, &Env::default());
        let shown = |text: &str, scheme: &str| parse(text, scheme).unwrap().to_string();
        assert!(
            parse(P2P, "etcd").unwrap().is_peer_to_peer() && parse(P2P, "http").unwrap().is_peer_to_peer()
        );
        assert!(shown("10.0.0.1:2379", "etcd").starts_with("etcd://10.0.0.1:2379"));
        assert!(shown("10.0.0.1:6379", "redis").starts_with("redis://10.0.0.1:6379"));
        assert!(shown("redis://10.0.0.1", "etcd").starts_with("redis://10.0.0.1"));
        for bad in ["", "  ", "ftp://h", "https://h/metadata"] {
            assert!(parse(bad, "etcd").is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_settings_of_the_wire_are_valid() {
        for host in ["127.0.0.1", "localhost:7", "", "0.0.0.0", "a-name-of-others"] {
            for metadata in [P2P, "http://127.0.0.1:8080/metadata"] {
                let setup = Setup::of(host, metadata, "tcp", "", Env::default()).unwrap();
                setup.wire_config().validate().unwrap();
                setup.engine_config().validate().unwrap();
            }
        }
    }

    #[test]
    fn ports_are_tried_from_a_random_one_on_within_their_range() {
        for range in [15_000..=17_000, 7..=7, 1..=u16::MAX, 65_530..=65_535] {
            let ports = ports_of(range.clone().into());
            assert!(!ports.is_empty() && ports.iter().all(|port| range.contains(port)), "{range:?}");
            let distinct: std::collections::HashSet<_> = ports.iter().collect();
            assert_eq!(distinct.len(), ports.len());
        }
    }

    #[test]
    fn the_protocol_is_ignored_except_for_the_one_that_mooncake_refuses() {
        for protocol in ["tcp", "rdma", "ascend", ""] {
            assert!(setup("h", protocol, "", Env::default()).is_ok(), "{protocol}");
        }
        assert!(setup("h", "xgmi", "", Env::default()).is_err());
        assert!(setup("a b", "tcp", "", Env::default()).is_err());
        assert!(setup(&"h".repeat(HOST_BYTES_MAX + 1), "tcp", "", Env::default()).is_err());
    }

    #[test]
    fn devices_come_from_the_argument_or_the_environment() {
        let env = Env { devices: vec!["mlx5_9".into()], ..Env::default() };
        let devices = |device| setup("h", "rdma", device, env.clone()).unwrap().devices;
        assert_eq!(devices("mlx5_0,mlx5_1"), ["mlx5_0", "mlx5_1"]);
        assert_eq!(devices(""), ["mlx5_9"]);
        assert_eq!(devices("auto-discovery"), ["mlx5_9"]);
        let tcp = Env { fabrics: Some(Fabrics::TCP), ..env.clone() };
        assert_eq!(setup("h", "rdma", "mlx5_0", tcp).unwrap().engine_config().fabrics, Fabrics::TCP);
    }
}
