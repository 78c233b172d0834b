//! Settings of a master.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;
use crate::kv_events::KvEventsConfig;

/// Settings of a master. The default serves loopback only.
///
/// ```
/// let config = store_master::Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), ..Default::default() };
/// config.validate().unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address at which nodes and clients connect; port 0: the system chooses a port. Default
    /// `127.0.0.1:50051`.
    pub rpc_listen: SocketAddr,
    /// Path of a Unix socket for clients on this host, in addition to `rpc_listen`. A socket that a dead
    /// master left behind is replaced. Default none.
    pub rpc_unix: Option<PathBuf>,
    /// Address of the HTTP server: status page, `/api`, `/health`, `/ready` and `/metrics`; none: no HTTP
    /// server. Default `127.0.0.1:9003`.
    pub http_listen: Option<SocketAddr>,
    /// Host names under which the status page and `/api` are served, in addition to addresses, `localhost`,
    /// names without dots and names below `.local`, `.internal`, `.localhost`, `.home.arpa` and `.test`.
    /// Requests under other names are refused, because a web page could have let its own name resolve to this
    /// host. `/health`, `/ready` and `/metrics` are served under every name. Default none.
    pub http_hosts: Vec<String>,
    /// Most RPC connections at a time, at least 1. When another one comes, the connection that was silent for
    /// the longest time is closed: first those that sent no request yet, then those that hold no lease and no
    /// unfinished put. When all are active, the new connection gets an error and is closed. Default 4,096.
    pub connections_max: u32,
    /// How long a new connection may take to send its first complete request, milliseconds, at least 1.
    /// Default 10,000.
    pub greet_ms_max: u32,
    /// Longest turn of one connection before others are served, microseconds, for searches, lists and large
    /// batches; lookups have 100 µs. A request that has begun is finished. 1 to 1,000,000. Default 1,000.
    pub turn_us_max: u32,
    /// Most bytes of answers that one connection may leave unread before its requests are not read any more,
    /// at least 1. A single answer may be longer. Default 1 MiB.
    pub backlog_bytes_max: u32,
    /// Limit on the memory of all connections together, MiB, at least 1: incomplete frames, and answers that
    /// peers have not read. Above it, frames over 16 KiB are not read further, each connection has one answer
    /// at a time, and the connections that have completed no frame for the longest time are closed until half
    /// of the memory is free. Default 256.
    pub buffered_mib_max: u32,
    /// How long a connection with an incomplete frame or with unread answers may transfer less than 64 KiB,
    /// milliseconds, at least 1. Then it is closed. Default 10,000.
    pub stall_ms_max: u32,
    /// How long a connection may be silent, milliseconds; 0: without limit. Clients reconnect by themselves.
    /// Default 3,600,000 (one hour).
    pub idle_ms_max: u32,
    /// How long the master spins after the last request before it sleeps in the kernel, microseconds.
    /// Spinning saves the next request the wake-up and uses a core meanwhile. 0 to 1,000,000; 0: it does not
    /// spin. Default 100.
    pub spin_us: u32,
    /// How long a stop may take to send the last answers, milliseconds. Default 1,000.
    pub stop_ms_max: u32,
    /// Requests that take longer than this are logged with their operation number, milliseconds; 0: none is
    /// logged. Default 100.
    pub slow_request_ms: u32,
    /// Directory in which the master keeps its state, so that it continues after a crash with all objects
    /// that it has acknowledged, while nodes keep their memory. It is made if it does not exist; it has to be
    /// on a disk that keeps what it has confirmed, and it contains the secrets of tenants. Answers to
    /// requests that change something wait for the disk. None: a master that is started again begins with
    /// nothing. Default none.
    pub journal: Option<PathBuf>,
    /// The master writes its whole state, and begins its journal anew, when the journal is longer than this,
    /// and than a quarter of that state, MiB, at least 1. A restart repeats about 60 MiB per second. Default
    /// 64.
    pub journal_snapshot_mib: u32,
    /// The same when the last time is longer ago than this and something has changed since, seconds, at least
    /// 1. Default 900.
    pub journal_snapshot_s: u32,
    /// Whether the HTTP server has `/metadata`, where engines register and look up names of segments. Every
    /// peer that reaches `http_listen` may write there. Default true.
    pub metadata_server: bool,
    /// Address of the metadata server for Mooncake's engines, whose connection string is
    /// `http://ADDR:PORT/metadata`; none: no such server. Every peer that reaches it may write there. Default
    /// none.
    pub mooncake_metadata_listen: Option<SocketAddr>,
    /// Several masters, of which one leads and the others have its state.
    pub ha: HaConfig,
    /// Which objects are where, published for routers and schedulers.
    pub kv_events: KvEventsConfig,
    /// Limits of `/metadata`, on either port.
    pub metadata: MetadataLimits,
    /// Limits on clients of the HTTP server.
    pub http: HttpLimits,
    /// Settings of the store itself: leases, limits, eviction.
    pub store: store_core::MasterConfig,
}

/// Settings of one of several masters: when the one that leads dies, another one takes over with all
/// objects, and nodes keep their memory. All masters have the same settings, but for addresses and numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct HaConfig {
    /// Where the masters agree on which of them leads: `etcd://HOST:PORT[,HOST:PORT…]`;
    /// `k8s://NAMESPACE[/LEASE]` for a Lease of the Kubernetes cluster in which they run (feature
    /// `kubernetes`); or `file:///DIRECTORY` for masters on one host. Empty: this master is alone. Default
    /// empty.
    pub arbiter: String,
    /// Where else the leader is published: `redis://[USER:PASSWORD@]HOST:PORT[/DB]`, for clients that look for
    /// Mooncake's master there (feature `redis`). The arbiters etcd and Kubernetes publish it themselves.
    /// Empty: nowhere else. Default empty.
    pub publish: String,
    /// Name of the cluster: masters with the same one belong together. Default `default`.
    pub cluster_id: String,
    /// Number of this master, which no other one of the cluster has; 0: made from `advertise`. Default 0.
    pub member_id: u64,
    /// Where clients and nodes reach this master, `host:port`; empty: `rpc_listen`. Default empty.
    pub advertise: String,
    /// Address at which other masters connect; port 0: the system chooses a port. What is sent there
    /// contains the secrets of tenants, and is not encrypted. Default `127.0.0.1:50052`.
    pub listen: SocketAddr,
    /// Where other masters reach `listen`, `host:port`; empty: the host of `advertise`. Default empty.
    pub link: String,
    /// Time between two messages to a master that has nothing to do, milliseconds, 1 to 200. Default 50.
    pub beat_ms: u32,
    /// A master that says nothing for this long is left out, and answers wait for it until then,
    /// milliseconds, at least two beats. Default 200.
    pub silent_ms: u32,
    /// The leader answers no longer than this after it has heard the others, milliseconds, at least
    /// `silent_ms`. Default 400.
    pub lease_ms: u32,
    /// Another master takes over when it has heard nothing for this long, milliseconds, at least 1.2 times
    /// `lease_ms`. Default 500.
    pub take_over_ms: u32,
    /// When no master that has all objects was there for this long, another one begins with an empty store,
    /// seconds, at least 4; 0: never. A leader without another master stops answering earlier than that
    /// when it does not reach the arbiter. Default 10.
    pub new_lineage_s: u32,
    /// Limit on the commands that the leader keeps for masters that lack them, MiB, at least 8. A master
    /// that falls further behind is sent the whole state. Default 1,024.
    pub history_mib: u32,
    /// Longest state that a master takes from the leader, MiB. Default 65,536.
    pub snapshot_mib_max: u32,
}

/// Limits of the metadata server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct MetadataLimits {
    /// Most keys at a time. Default 65,536.
    pub keys_max: u32,
    /// Longest key, bytes. Default 512.
    pub key_bytes_max: u32,
    /// Longest value, bytes. Default 1 MiB.
    pub value_bytes_max: u32,
    /// Limit on the memory of all entries, bytes: keys, values and 128 bytes per entry. Default 64 MiB.
    pub bytes_max: u64,
}

/// Limits on clients of an HTTP server. A client that is slower loses its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct HttpLimits {
    /// Most HTTP connections at a time, at least 1. When another one comes, the connection that was silent
    /// for the longest time is closed; while requests are being answered on all of them, `/health` and
    /// `/ready` have 32 more. Default 256.
    pub connections_max: u32,
    /// How long the head of a request may take, and how long a connection may be idle, milliseconds, at least
    /// 1. Default 10,000.
    pub head_ms_max: u32,
    /// How long a client may read less than 64 KiB of a pending answer, milliseconds, at least 1. Default
    /// 30,000.
    pub stall_ms_max: u32,
}

impl Config {
    /// Checks everything that can be checked before anything is opened.
    ///
    /// # Errors
    /// The field, and the values that it may have.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at_least_one = [
            ("connections_max", self.connections_max),
            ("greet_ms_max", self.greet_ms_max),
            ("turn_us_max", self.turn_us_max),
            ("stall_ms_max", self.stall_ms_max),
            ("backlog_bytes_max", self.backlog_bytes_max),
            ("journal_snapshot_mib", self.journal_snapshot_mib),
            ("journal_snapshot_s", self.journal_snapshot_s),
            ("buffered_mib_max", self.buffered_mib_max),
            ("http.connections_max", self.http.connections_max),
            ("kv_events.buffer_mib", self.kv_events.buffer_mib),
            ("kv_events.followers_max", self.kv_events.followers_max),
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
                need: "must be host names, without scheme and port",
            });
        }
        if self.turn_us_max > 1_000_000 {
            return Err(ConfigError {
                field: "turn_us_max",
                need: "must be at most 1000000: other connections wait",
            });
        }
        if self.spin_us > 1_000_000 {
            return Err(ConfigError {
                field: "spin_us",
                need: "must be at most 1000000: the master uses a core meanwhile",
            });
        }
        self.ha.check()?;
        self.kv_events.check()?;
        if self.ha.is_on() && self.journal.is_some() {
            return Err(ConfigError {
                field: "journal",
                need: "must be none with ha.arbiter: the other masters keep the state",
            });
        }
        let open = !self.store.admin_secret.is_set() && !self.store.cluster_secret.is_set();
        if self.store.multi_tenants && open {
            let need = "needs store.admin_secret or store.cluster_secret: without a secret, every peer could mount memory as a \
            node and receive all tenants' bytes; nodes send it as cluster.admin_secret (--admin-secret) or \
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
            mooncake_metadata_listen: None,
            kv_events: KvEventsConfig::default(),
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
            journal: None,
            journal_snapshot_mib: 64,
            journal_snapshot_s: 900,
            ha: HaConfig::default(),
            store: store_core::MasterConfig::default(),
        }
    }
}

impl Default for HaConfig {
    fn default() -> Self {
        Self {
            arbiter: String::new(),
            publish: String::new(),
            cluster_id: "default".into(),
            member_id: 0,
            advertise: String::new(),
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 50052),
            link: String::new(),
            beat_ms: 50,
            silent_ms: 200,
            lease_ms: 400,
            take_over_ms: 500,
            new_lineage_s: 10,
            history_mib: 1_024,
            snapshot_mib_max: 65_536,
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
    fn an_invalid_field_is_named() {
        let config = Config { connections_max: 0, ..Config::default() };
        assert_eq!(
            config.validate().unwrap_err().to_string(),
            "configuration: connections_max must be at least 1"
        );
    }

    #[test]
    fn tenants_need_a_secret_so_that_not_every_peer_is_a_node() {
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
