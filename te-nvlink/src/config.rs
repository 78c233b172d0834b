//! The settings of one transport, their defaults and their ranges.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use te_fabric::config::{ConfigError, check_advertised, check_ranges};

/// How an [`NvlinkTransport`](crate::NvlinkTransport) bounds itself. Every field has a default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Processes that may map memory of this process at the same time; 1 to 65,536. Default 1,024.
    pub peers_max: u32,
    /// Whether memory is shared with processes of users who are neither this process's user nor root, and
    /// theirs is mapped. An IPC handle of memory of cudaMalloc opens the whole allocation, with what else
    /// is in it. Default false.
    pub other_users: bool,
    /// A process that has connected and was granted nothing for this long is disconnected, ms; 1 to
    /// 3,600,000. Any process of the host can connect, and a peer requests a region at once. Default 2,000.
    pub idle_ms_max: u32,
    /// How long copies wait for an owner to grant a region, ms; 1 to 3,600,000. After that they fail with
    /// `Unreachable`, so that other fabrics take over, until the owner answers. Default 2,000.
    pub grant_ms_max: u32,
    /// When a peer whose process cannot be seen (on another host; or in another PID namespace, on a kernel
    /// before 6.5) closes its connection without having closed its mappings, its copies count as ended after
    /// this long, ms; 100 to 3,600,000. The end of other processes is seen. Default 1,000.
    pub quarantine_ms: u32,
    /// Whether memory of devices is shared with the other hosts of its NVLink domain, and theirs is mapped,
    /// by fabric handles. Each process needs an IMEX channel. Handles are given over a TCP connection to who
    /// shows the key of an export; the setting `other_users` says nothing about other hosts. Default false.
    pub across_hosts: bool,
    /// Port of the listener for processes of other hosts; 0: a free one. A port that is in use keeps the
    /// fabric from starting. Default 0.
    pub port: u16,
    /// The address of that listener. Default `127.0.0.1:0`, which other hosts cannot reach.
    #[serde(skip)]
    pub bind: SocketAddr,
    /// The address of that listener that exports carry. Default: the one in `bind`; when that is unspecified
    /// (`0.0.0.0`, `::`), the addresses of this host's interfaces.
    #[serde(skip)]
    pub advertise: Option<IpAddr>,
    /// The name of this host, which processes of one host have in common. Default: the id of its boot. Tests
    /// name hosts.
    #[serde(skip)]
    pub host: Option<[u8; 16]>,
    /// Upper limit of slices that are accepted and not yet completed, 1 to 1,048,576. Default 4,096.
    #[serde(skip)]
    pub inflight_max: u32,
    /// How peers identify this process, and expel it: the same for all transports of one engine. Default 0: a
    /// random one.
    #[serde(skip)]
    pub identity: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            peers_max: 1_024,
            other_users: false,
            idle_ms_max: 2_000,
            grant_ms_max: 2_000,
            quarantine_ms: 1_000,
            across_hosts: false,
            port: 0,
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise: None,
            host: None,
            inflight_max: 4_096,
            identity: 0,
        }
    }
}

impl Config {
    /// The address to listen on: `bind`, with the port in `port` if that is not 0.
    pub(crate) const fn listen(&self) -> SocketAddr {
        match self.port {
            0 => self.bind,
            port => SocketAddr::new(self.bind.ip(), port),
        }
    }

    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is out of its limits, with the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("peers_max", u64::from(self.peers_max), 1, 65_536),
            ("idle_ms_max", u64::from(self.idle_ms_max), 1, 3_600_000),
            ("grant_ms_max", u64::from(self.grant_ms_max), 1, 3_600_000),
            ("quarantine_ms", u64::from(self.quarantine_ms), 100, 3_600_000),
            ("inflight_max", u64::from(self.inflight_max), 1, 1 << 20),
        ])?;
        check_advertised(self.advertise)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::{Error, MapDeserializer};

    use super::*;

    #[test]
    fn settings_are_read_by_their_names_and_checked() {
        let read = |name: &'static str, value: u32| {
            Config::deserialize(MapDeserializer::<_, Error>::new([(name, value)].into_iter()))
        };
        assert_eq!(read("quarantine_ms", 500), Ok(Config { quarantine_ms: 500, ..Config::default() }));
        assert!(read("identity", 1).is_err() && read("inflight_max", 1).is_err() && read("x", 1).is_err());
        assert_eq!(Config::default().validate(), Ok(()));
        let error = Config { quarantine_ms: 9, ..Config::default() }.validate().expect_err("too short");
        assert_eq!(error.to_string(), "quarantine_ms is 9: set it to a value from 100 to 3600000");
    }
}
