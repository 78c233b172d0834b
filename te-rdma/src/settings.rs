//! What people can tell the fabric: a part of what each of its transports can be told, and which ports to use.

use serde::{Deserialize, Serialize};
use te_fabric::ConfigError;

use crate::config::Config;

/// What the RDMA fabric of an engine can be told: it opens one transport for each port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Devices to use, by the kernel's names: `mlx5_0` for each of its active ports, `mlx5_0:1` for one port. Empty: every
    /// active port of the host. One that is named and does not open keeps the engine from starting.
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

impl Settings {
    /// The configuration of each transport, as far as people settle it.
    #[must_use]
    pub fn config(&self) -> Config {
        Config {
            gid_index: self.gid_index,
            qps: self.qps,
            mtu_bytes_max: self.mtu_bytes_max,
            traffic_class: self.traffic_class,
            service_level: self.service_level,
            timeout_exponent: self.timeout_exponent,
            retries: self.retries,
            ..Config::default()
        }
    }

    /// Checks every field against its limits.
    ///
    /// # Errors
    /// As [`Config::validate`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.config().validate()
    }
}

impl Default for Settings {
    fn default() -> Self {
        let Config {
            gid_index,
            qps,
            mtu_bytes_max,
            traffic_class,
            service_level,
            timeout_exponent,
            retries,
            ..
        } = Config::default();
        let (devices, port) = (Vec::new(), 0);
        Self {
            devices,
            port,
            gid_index,
            qps,
            mtu_bytes_max,
            traffic_class,
            service_level,
            timeout_exponent,
            retries,
        }
    }
}
