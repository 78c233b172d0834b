//! What a master can be told.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;

/// Everything a master can be told. The default serves loopback only.
///
/// ```
/// let config = store_master::Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), ..Default::default() };
/// config.validate().unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where nodes and clients connect. Port 0 picks one. Default `127.0.0.1:50051`.
    pub rpc_listen: SocketAddr,
    /// A Unix socket for clients on this host, besides `rpc_listen`. A socket that a dead master left is replaced.
    /// Default none.
    pub rpc_unix: Option<PathBuf>,
    /// Where `/health`, `/ready` and `/metrics` are served; none: not at all. Default `127.0.0.1:9003`.
    pub http_listen: Option<SocketAddr>,
    /// Names under which the status page and `/api` are answered, beside addresses, `localhost`, names without dots and those
    /// below `.local`, `.internal`, `.localhost`, `.home.arpa` and `.test`. Others are refused, because a web page could have
    /// had its own name pointed here. `/health`, `/ready` and `/metrics` are answered under every name. Default none.
    pub http_hosts: Vec<String>,
    /// RPC connections at a time. When another one comes, the one that said nothing for the longest time makes way: first who
    /// never said anything, then who holds nothing. When all are in use, the newcomer is told so and closed. Default 4096.
    pub connections_max: u32,
    /// How long a connection may take to bring its first whole request, milliseconds. Default 10 s.
    pub greet_ms_max: u32,
    /// How long one connection's requests are handled before the others get their turn, microseconds, when they are searches,
    /// lists or large batches; lookups have 100 µs. One request more may begin before it is over. Default 1 ms.
    pub turn_us_max: u32,
    /// Answers that may wait for one connection, bytes, before its requests are no longer read. One answer may be longer.
    /// Default 1 MiB.
    pub backlog_bytes_max: u32,
    /// Memory that all connections may hold together, MiB: parts of frames, and answers that nobody has read yet. Above it,
    /// frames over 16 KiB are not read further, each connection has one answer at a time, and connections that have brought
    /// no whole frame for the longest time are closed until half of it is free. Default 256.
    pub buffered_mib_max: u32,
    /// How long a connection may owe us something (the rest of a frame, room for its answers) while fewer than 64 KiB move,
    /// milliseconds. Then it is closed. Default 10 s.
    pub stall_ms_max: u32,
    /// How long a connection may be silent altogether, milliseconds; 0: for ever. Clients reconnect by themselves.
    /// Default one hour.
    pub idle_ms_max: u32,
    /// How long the master polls without result before it sleeps in the kernel, microseconds. Spinning saves the wake-up
    /// of the next request; 0 never spins. Default 50.
    pub spin_us: u32,
    /// How long a graceful stop may take to hand out its last answers, milliseconds. Default 1 s.
    pub stop_ms_max: u32,
    /// Requests that take longer are logged, with the operation that they belong to, milliseconds; 0: none. Default 100.
    pub slow_request_ms: u32,
    /// Whether `/metadata` is served beside them, where engines register and look up names of segments. Whoever reaches
    /// `http_listen` may write there. Default true.
    pub metadata_server: bool,
    /// What may be kept there.
    pub metadata: MetadataLimits,
    /// What clients of `http_listen` are held to.
    pub http: HttpLimits,
    /// The state machine's own: leases, limits, eviction.
    pub store: store_core::MasterConfig,
}

/// What the metadata server may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetadataLimits {
    /// Keys at a time. Default 65,536.
    pub keys_max: u32,
    /// Longest key, bytes. Default 512.
    pub key_bytes_max: u32,
    /// Longest value, bytes. Default 1 MiB.
    pub value_bytes_max: u32,
    /// Keys, values and 128 bytes for each, together, bytes. Default 64 MiB.
    pub bytes_max: u64,
}

/// What an HTTP server holds its clients to. Who is slower loses the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpLimits {
    /// HTTP connections at a time. When another one comes, the one that was silent for the longest time makes way; when all are
    /// at work, `/health` and `/ready` have 32 more. Default 256.
    pub connections_max: u32,
    /// How long the head of a request may take, and a connection may lie idle, milliseconds. Default 10 s.
    pub head_ms_max: u32,
    /// How long a client may take less than 64 KiB of an answer that waits for it, milliseconds. Default 30 s.
    pub stall_ms_max: u32,
}

impl Config {
    /// Checks what can be checked before anything is opened.
    ///
    /// # Errors
    /// Names the field and what it may be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at_least_one = [
            ("connections_max", self.connections_max),
            ("greet_ms_max", self.greet_ms_max),
            ("turn_us_max", self.turn_us_max),
            ("stall_ms_max", self.stall_ms_max),
            ("backlog_bytes_max", self.backlog_bytes_max),
            ("buffered_mib_max", self.buffered_mib_max),
            ("http.connections_max", self.http.connections_max),
            ("http.head_ms_max", self.http.head_ms_max),
            ("http.stall_ms_max", self.http.stall_ms_max),
        ];
        for (field, value) in at_least_one {
            if value == 0 {
                return Err(ConfigError { field, need: "must be at least 1" });
            }
        }
        if self.http_hosts.iter().any(|name| name.is_empty() || name.contains([':', '/'])) {
            return Err(ConfigError {
                field: "http_hosts",
                need: "must be names of hosts, without scheme and port",
            });
        }
        if self.turn_us_max > 1_000_000 {
            return Err(ConfigError { field: "turn_us_max", need: "must be at most 1000000: others wait" });
        }
        if self.spin_us > 1_000_000 {
            return Err(ConfigError { field: "spin_us", need: "must be at most 1000000: it burns a core" });
        }
        let open = !self.store.admin_secret.is_set() && !self.store.cluster_secret.is_set();
        if self.store.multi_tenants && open {
            let need = "needs store.admin_secret or store.cluster_secret beside it: without one, whoever connects could be \
                        a node and be given everybody's bytes; nodes say it as cluster.admin_secret (--admin-secret) or \
                        cluster.cluster_secret (--cluster-secret)";
            return Err(ConfigError { field: "store.multi_tenants", need });
        }
        Ok(())
    }
}

impl Default for Config {
    fn default() -> Self {
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self {
            rpc_listen: SocketAddr::new(loopback, 50051),
            rpc_unix: None,
            http_listen: Some(SocketAddr::new(loopback, 9003)),
            metadata_server: true,
            metadata: MetadataLimits::default(),
            http: HttpLimits::default(),
            http_hosts: Vec::new(),
            connections_max: 4096,
            greet_ms_max: 10_000,
            turn_us_max: 1_000,
            backlog_bytes_max: 1 << 20,
            buffered_mib_max: 256,
            stall_ms_max: 10_000,
            idle_ms_max: 3_600_000,
            spin_us: 100,
            stop_ms_max: 1000,
            slow_request_ms: 100,
            store: store_core::MasterConfig::default(),
        }
    }
}

impl Default for MetadataLimits {
    fn default() -> Self {
        Self { keys_max: 65_536, key_bytes_max: 512, value_bytes_max: 1 << 20, bytes_max: 64 << 20 }
    }
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self { connections_max: 256, head_ms_max: 10_000, stall_ms_max: 30_000 }
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
    fn a_field_that_cannot_be_is_named() {
        let config = Config { connections_max: 0, ..Config::default() };
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "configuration: connections_max must be at least 1"
        );
    }

    #[test]
    fn tenants_need_a_secret_so_that_not_everybody_is_a_node() {
        let mut config = Config::default();
        config.store.multi_tenants = true;
        let error = config.validate().unwrap_err();
        assert_eq!(error.field, "store.multi_tenants");
        assert!(error.need.contains("store.admin_secret"), "{error}");
        config.store.cluster_secret = store_core::Secret::new(b"sesame");
        config.validate().unwrap();
        config.store.cluster_secret = store_core::Secret::default();
        config.store.admin_secret = store_core::Secret::new(b"sesame");
        config.validate().unwrap();
    }
}
