//! Settings of a Conductor.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use conductor_core::events::Dialect;
use serde::{Deserialize, Serialize};

mod gateway;
mod kubernetes;
mod store;

pub use gateway::GatewayConfig;
pub use kubernetes::KubernetesConfig;
pub use store::StoreConfig;

/// Settings of a Conductor. The default serves loopback only and knows no engine.
///
/// ```
/// let config = conductor::Config { listen: "127.0.0.1:0".parse().unwrap(), ..Default::default() };
/// config.validate().unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address of the HTTP interface: `/query`, `/schedule`, `/register`, `/metrics`, the status page and the
    /// rest; port 0: the system chooses a port. Default `127.0.0.1:13333`.
    pub listen: SocketAddr,
    /// Address of the OpenAI proxy, which forwards requests to the engines that are chosen for them; none: no
    /// proxy. It authenticates no client. Default none.
    pub proxy_listen: Option<SocketAddr>,
    /// Host names under which the HTTP interface is served, in addition to addresses, `localhost`, names
    /// without dots and names below `.local`, `.internal`, `.localhost`, `.home.arpa` and `.test`. Requests
    /// under other names are refused, because a web page could have let its own name resolve to this host.
    /// `/health`, `/ready` and `/metrics` are served under every name. Default none.
    pub http_hosts: Vec<String>,
    /// The secret that requests which change something have to send (`Authorization: Bearer`): `/register`,
    /// `/unregister`. Empty: such requests are accepted from this host only. On the command line
    /// it is `cluster.admin_secret`.
    #[serde(skip)]
    pub admin_secret: store_core::Secret,
    /// The engines and stores whose events are read. Others come by `POST /register`.
    pub engines: Vec<EngineConfig>,
    /// File in which the index is kept over a restart; none: a restart begins with an empty index, which the
    /// events of engines fill. Default none.
    pub snapshot: Option<PathBuf>,
    /// How often the file is written, seconds, at least 1. It is written when the Conductor stops, too.
    /// Default 60.
    pub snapshot_s: u32,
    /// HTTP address of a second Conductor with the same engines, `host:port`. Digests are compared with it.
    /// What an engine said before this Conductor heard it is fetched from there (with the admin secret, if
    /// there is one), and goes on with the engine's own messages; what differs otherwise, unchanged in
    /// several comparisons, is read anew from its engine. Empty: this Conductor is alone. Default empty.
    pub peer: String,
    /// How often digests are compared, milliseconds, at least 100. Default 2,000.
    pub peer_ms: u32,
    /// Seed of block hashes, as in Mooncake's `CONDUCTOR_SEED`. Default 0.
    pub seed: u64,
    /// Limits on clients of the HTTP interface.
    pub http: store_master::HttpLimits,
    /// Limits on what engines and clients can make the Conductor keep.
    pub limits: LimitsConfig,
    /// Connections to engines.
    pub streams: StreamsConfig,
    /// Where requests are placed, and which are refused.
    pub schedule: ScheduleConfig,
    /// Copies of hot prefixes in the store.
    pub store: StoreConfig,
    /// Who asks the store for them. On the command line it is `[cluster]`.
    #[serde(skip)]
    pub store_identity: store_client::Identity,
    /// Gateways that ask which engine a request goes to.
    pub gateway: GatewayConfig,
    /// Engines that are found in a Kubernetes cluster.
    pub kubernetes: KubernetesConfig,
}

/// An engine or store whose events are read. Names follow Mooncake's `POST /register`, spelled out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Name of the instance, unique per tenant.
    pub instance: String,
    /// What publishes: `vllm`, `sglang`, `mooncake` (Mooncake's store) or `snowskin` (this project's).
    pub kind: EngineKind,
    /// Where events are published, `tcp://HOST:PORT`. With several ranks, the one of rank 0: the port of rank
    /// n is n higher.
    pub endpoint: String,
    /// Where missed events are asked for, `tcp://HOST:PORT`; empty: nowhere, so that every gap removes what
    /// is known of the engine.
    pub replay_endpoint: String,
    /// Whether the Conductor listens at `endpoint` and the engine connects, instead of the other way round.
    pub bind: bool,
    /// Prefix of the topics that are subscribed to.
    pub topic: String,
    /// The model, as requests name it.
    pub model: String,
    /// The LoRA adapter that this instance serves; empty: none, or those that its events name.
    pub lora: String,
    /// The tenant.
    pub tenant: String,
    /// Salt of the cache that this instance's blocks belong to; empty: none, or those that its events name.
    pub salt: String,
    /// Tokens per block, 1 to 65,536; 0: as the engine's `/server_info` says.
    pub block_tokens: u32,
    /// The first data-parallel rank of this entry.
    pub dp_rank: u32,
    /// How many data-parallel ranks publish, 1 to 1,024; 0: as the engine's `/server_info` says.
    pub dp_ranks: u32,
    /// Whether requests are placed on the instance for `prefill`, for `decode` or for `both`.
    pub role: Role,
    /// Where the engine serves HTTP, `HOST:PORT`; empty: unknown, so that no text can be tokenised there and
    /// the proxy does not forward to it.
    pub http: String,
    /// Engines of the same tenant, model, role and class share what is learnt about how fast they are, such
    /// as those on one type of GPU. Default empty, a class like others.
    pub class: String,
    /// Port of the bootstrap server of a prefill engine of SGLang (`--disaggregation-bootstrap-port`).
    pub bootstrap_port: u16,
}

/// What publishes events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// vLLM.
    #[default]
    #[serde(alias = "vLLM", alias = "VLLM")]
    Vllm,
    /// SGLang.
    #[serde(alias = "SGLang", alias = "SGLANG")]
    Sglang,
    /// Mooncake's store.
    #[serde(alias = "Mooncake", alias = "MOONCAKE")]
    Mooncake,
    /// This project's store.
    #[serde(alias = "Snowskin", alias = "SNOWSKIN")]
    Snowskin,
}

/// What requests are placed on an instance for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// Limits on what engines and clients can make the Conductor keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// Most publishers at a time, 1 to 16,384: each data-parallel rank of an instance is one. Default 4,096.
    pub publishers_max: u32,
    /// Most blocks in the index of one model and tenant, at least 1,024. Beyond it, further blocks are
    /// counted and not indexed. Default 16,777,216.
    pub blocks_max: u32,
    /// Most pairs of model and tenant, at least 1. At the limit, one without engines makes room. Default 256.
    pub contexts_max: u32,
    /// How long what is known of a model is kept after its last engine was unregistered, seconds; 0: for
    /// ever, or until there is no room. Default 600.
    pub context_idle_s: u32,
    /// Longest message of an engine, bytes, at least 4 KiB. A longer one ends the connection. Default 16 MiB.
    pub message_bytes_max: u32,
    /// Longest body of a request, bytes, at least 4 KiB. Default 16 MiB.
    pub body_bytes_max: u32,
    /// Most tokens of a request, at least 1. Default 1,048,576.
    pub tokens_max: u32,
    /// Most requests whose place is reserved at a time, at least 1. Default 65,536.
    pub reservations_max: u32,
}

/// Connections to engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamsConfig {
    /// How often a silent peer is asked whether it is there, milliseconds; 0: never. Default 10,000.
    pub heartbeat_ms: u32,
    /// A peer that says nothing for this long after it was asked is given up, milliseconds, at least 1.
    /// Default 20,000.
    pub silent_ms_max: u32,
    /// First wait before a lost connection is opened again, milliseconds, at least 1. Each further failure
    /// doubles it. Default 50.
    pub reconnect_ms_min: u32,
    /// Longest such wait, milliseconds, at least `reconnect_ms_min`. Default 5,000.
    pub reconnect_ms_max: u32,
    /// How long missed events may take to arrive before what is known of the engine is removed, milliseconds,
    /// at least 1. Default 2,000.
    pub replay_ms_max: u32,
    /// An engine that is not connected for this long is removed from queries, milliseconds. Its blocks are
    /// unknown as soon as it is not connected. Default 10,000.
    pub lost_ms: u32,
}

/// Where requests are placed, and which are refused.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleConfig {
    /// The rule that places requests. Default `cost`: the least predicted time to the first token, with
    /// queues, transfers and prefill.
    pub policy: PolicyName,
    /// Limit on the predicted time to the first token, milliseconds; 0: none. A request beyond it is refused
    /// (HTTP 429). Default 30,000.
    pub ttft_slo_ms: u32,
    /// Limit on the predicted time between two tokens, milliseconds; 0: none. Default 300.
    pub tbt_slo_ms: u32,
    /// How long a reservation lives without news, milliseconds, at least 100. Default 600,000.
    pub reservation_ms_max: u32,
    /// Whether a decision may have an instance fetch a part of a prompt from another one. The client that
    /// asks for the decision has to see to it; with `proxy_listen` there is none, as engines fetch prefixes
    /// from stores only. Default true.
    pub fetch: bool,
    /// How long an instance is assumed to have a prompt's blocks after the prompt was placed there, unless
    /// its events say so, milliseconds. Default 30,000.
    pub assumed_ms: u32,
}

/// The rule that places requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// Least predicted time to the first token; transfers overlap queues and book network cards.
    #[default]
    Cost,
    /// The same, but transfers take bytes / bandwidth, whatever else uses the network cards.
    CostBlind,
    /// Algorithm 1 of the Mooncake paper (FAST'25, page 8).
    Algorithm1,
    /// Algorithm 1 without transfers.
    Local,
    /// The cost of Dynamo's router.
    Dynamo,
    /// Its variant that multiplies by the decode load.
    DynamoLmetric,
    /// Most overlap, unless loads differ much.
    TwoTier,
    /// SGLang's `cache_aware`.
    SglangCacheAware,
    /// Preble's E2.
    Preble,
    /// The less loaded one of two drawn at random.
    PowerOfTwo,
    /// The fewest requests.
    LeastRequests,
    /// The shortest queue, in time, whatever is cached.
    LeastTime,
    /// One after the other.
    RoundRobin,
    /// At random.
    Random,
    /// The longest prefix, whatever the load.
    MaxHit,
}

impl PolicyName {
    /// The name in settings, which is that of the policy in the scheduler.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::CostBlind => "cost-blind",
            Self::Algorithm1 => "algorithm1",
            Self::Local => "local",
            Self::Dynamo => "dynamo",
            Self::DynamoLmetric => "dynamo-lmetric",
            Self::TwoTier => "two-tier",
            Self::SglangCacheAware => "sglang-cache-aware",
            Self::Preble => "preble",
            Self::PowerOfTwo => "power-of-two",
            Self::LeastRequests => "least-requests",
            Self::LeastTime => "least-time",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::MaxHit => "max-hit",
        }
    }
}

/// A setting that is out of its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The field, as a path below `conductor`.
    pub field: String,
    /// What it has to be.
    pub need: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "configuration: {} {}", self.field, self.need)
    }
}

impl std::error::Error for ConfigError {}

/// Longest name (instance, model, tenant, adapter, salt, topic), bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// Longest endpoint or address, bytes.
pub(crate) const ENDPOINT_BYTES_MAX: usize = 512;
/// Most data-parallel ranks of an engine.
pub const DP_RANKS_MAX: u32 = 1_024;
/// Most tokens per block.
pub const BLOCK_TOKENS_MAX: u32 = 65_536;

impl Config {
    /// Checks everything that can be checked before anything is opened.
    ///
    /// # Errors
    /// The field, and the values that it may have.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let at_least = |field: &str, value: u32, least: u32| match value >= least {
            true => Ok(()),
            false => Err(wrong(field, format!("must be at least {least}"))),
        };
        let at_most = |field: &str, value: u32, most: u32| match value <= most {
            true => Ok(()),
            false => Err(wrong(field, format!("must be at most {most}"))),
        };
        at_least("snapshot_s", self.snapshot_s, 1)?;
        at_least("peer_ms", self.peer_ms, 100)?;
        at_least("http.connections_max", self.http.connections_max, 1)?;
        at_least("http.head_ms_max", self.http.head_ms_max, 1)?;
        at_least("http.stall_ms_max", self.http.stall_ms_max, 1)?;
        let limits = &self.limits;
        at_least("limits.publishers_max", limits.publishers_max, 1)?;
        at_most("limits.publishers_max", limits.publishers_max, 16_384)?;
        at_least("limits.blocks_max", limits.blocks_max, 1_024)?;
        at_least("limits.contexts_max", limits.contexts_max, 1)?;
        at_least("limits.message_bytes_max", limits.message_bytes_max, 4_096)?;
        at_least("limits.body_bytes_max", limits.body_bytes_max, 4_096)?;
        at_least("limits.tokens_max", limits.tokens_max, 1)?;
        at_least("limits.reservations_max", limits.reservations_max, 1)?;
        let streams = &self.streams;
        at_least("streams.silent_ms_max", streams.silent_ms_max, 1)?;
        at_least("streams.reconnect_ms_min", streams.reconnect_ms_min, 1)?;
        at_least("streams.reconnect_ms_max", streams.reconnect_ms_max, streams.reconnect_ms_min)?;
        at_least("streams.replay_ms_max", streams.replay_ms_max, 1)?;
        at_least("schedule.reservation_ms_max", self.schedule.reservation_ms_max, 100)?;
        if self.http_hosts.iter().any(|name| name.is_empty() || name.contains([':', '/'])) {
            return Err(wrong("http_hosts", "must be host names, without scheme and port"));
        }
        if !self.peer.is_empty() && host_port(&self.peer).is_none() {
            return Err(wrong("peer", "must be host:port of a Conductor's HTTP interface"));
        }
        self.gateway.validate()?;
        self.store.validate()?;
        self.kubernetes.validate()?;
        for (at, engine) in self.engines.iter().enumerate() {
            engine
                .validate()
                .map_err(|error| wrong(&format!("engines[{at}].{}", error.field), error.need))?;
        }
        Ok(())
    }
}

impl EngineConfig {
    /// Checks one entry, from the settings or from `POST /register`.
    ///
    /// # Errors
    /// The field, and the values that it may have.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let names = [
            ("instance", &self.instance, 1),
            ("model", &self.model, 1),
            ("tenant", &self.tenant, 1),
            ("lora", &self.lora, 0),
            ("salt", &self.salt, 0),
            ("topic", &self.topic, 0),
            ("class", &self.class, 0),
        ];
        for (field, text, least) in names {
            if !(least..=NAME_BYTES_MAX).contains(&text.len()) {
                return Err(wrong(field, format!("must have {least} to {NAME_BYTES_MAX} bytes")));
            }
            if text.contains(|c: char| c.is_control()) {
                return Err(wrong(field, "must not contain control characters"));
            }
        }
        for (field, text) in [("endpoint", &self.endpoint), ("replay_endpoint", &self.replay_endpoint)] {
            if !text.is_empty() && Endpoint::parse(text).is_none() {
                return Err(wrong(field, "must be tcp://HOST:PORT, for example tcp://10.0.0.7:5557"));
            }
        }
        if self.endpoint.is_empty() && self.http.is_empty() {
            return Err(wrong(
                "endpoint",
                "must be tcp://HOST:PORT, or http must name the engine's HTTP address",
            ));
        }
        if !self.http.is_empty() && host_port(self.http_address()).is_none() {
            return Err(wrong("http", "must be HOST:PORT"));
        }
        if self.block_tokens > BLOCK_TOKENS_MAX {
            return Err(wrong("block_tokens", format!("must be at most {BLOCK_TOKENS_MAX}")));
        }
        if self.dp_ranks > DP_RANKS_MAX || self.dp_rank >= 65_536 {
            return Err(wrong(
                "dp_ranks",
                format!("must be at most {DP_RANKS_MAX}, and dp_rank below 65536"),
            ));
        }
        let asks = self.block_tokens == 0 || self.dp_ranks == 0 || self.endpoint.is_empty();
        if asks && self.http.is_empty() {
            return Err(wrong(
                "http",
                "must be set when block_tokens, dp_ranks or endpoint is left to the engine",
            ));
        }
        let highest = Endpoint::parse(&self.endpoint).map_or(0, |endpoint| u32::from(endpoint.port));
        if highest + self.dp_ranks > 65_536 {
            return Err(wrong("dp_ranks", "must leave a port below 65536 for each rank"));
        }
        Ok(())
    }

    /// [`http`](Self::http) without a scheme.
    #[must_use]
    pub fn http_address(&self) -> &str {
        self.http.trim_start_matches("http://").trim_end_matches('/')
    }
}

/// A ZMQ endpoint over TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Name or address; `*` is `0.0.0.0`.
    pub host: String,
    /// Port; 0 only where it is listened at.
    pub port: u16,
}

impl Endpoint {
    /// Parses `tcp://HOST:PORT`. `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let rest = text.strip_prefix("tcp://")?;
        let (host, port) = host_port(rest)?;
        Some(Self { host: if host == "*" { "0.0.0.0".to_owned() } else { host.to_owned() }, port })
    }

    /// The endpoint of another rank. `None` when there is no such port.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Option<Self> {
        let port = u32::from(self.port).checked_add(rank)?;
        Some(Self { host: self.host.clone(), port: u16::try_from(port).ok()? })
    }

    /// `HOST:PORT`, with brackets around an IPv6 address.
    #[must_use]
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

/// Host and port of `HOST:PORT` or `[IPV6]:PORT`.
pub(crate) fn host_port(text: &str) -> Option<(&str, u16)> {
    if text.len() > ENDPOINT_BYTES_MAX {
        return None;
    }
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '*' | '%');
    (!host.is_empty() && host.chars().all(is_name)).then_some(())?;
    port.bytes().all(|digit| digit.is_ascii_digit()).then_some(())?;
    Some((host, port.parse().ok()?))
}

fn wrong(field: &str, need: impl Into<String>) -> ConfigError {
    ConfigError { field: field.to_owned(), need: need.into() }
}

impl EngineKind {
    /// How events of this kind are read.
    #[must_use]
    pub const fn dialect(self) -> Dialect {
        match self {
            Self::Vllm => Dialect::Vllm,
            Self::Sglang => Dialect::Sglang,
            Self::Mooncake | Self::Snowskin => Dialect::Mooncake,
        }
    }

    /// Whether it is a store, which every instance of its tenant can read, and not an engine.
    #[must_use]
    pub const fn is_store(self) -> bool {
        matches!(self, Self::Mooncake | Self::Snowskin)
    }

    /// The name in settings, answers and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Mooncake => "mooncake",
            Self::Snowskin => "snowskin",
        }
    }
}

impl Role {
    /// The name in settings and answers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 13_333),
            proxy_listen: None,
            http_hosts: Vec::new(),
            admin_secret: store_core::Secret::default(),
            http: store_master::HttpLimits::default(),
            engines: Vec::new(),
            snapshot: None,
            snapshot_s: 60,
            peer: String::new(),
            peer_ms: 2_000,
            seed: 0,
            limits: LimitsConfig::default(),
            streams: StreamsConfig::default(),
            schedule: ScheduleConfig::default(),
            store: StoreConfig::default(),
            store_identity: store_client::Identity::default(),
            gateway: GatewayConfig::default(),
            kubernetes: KubernetesConfig::default(),
        }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            instance: String::new(),
            kind: EngineKind::default(),
            endpoint: String::new(),
            replay_endpoint: String::new(),
            bind: false,
            topic: String::new(),
            model: String::new(),
            lora: String::new(),
            tenant: "default".to_owned(),
            salt: String::new(),
            block_tokens: 16,
            dp_rank: 0,
            dp_ranks: 1,
            role: Role::default(),
            http: String::new(),
            class: String::new(),
            bootstrap_port: 8_998,
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            publishers_max: 4_096,
            blocks_max: 16 << 20,
            contexts_max: 256,
            context_idle_s: 600,
            message_bytes_max: 16 << 20,
            body_bytes_max: 16 << 20,
            tokens_max: 1 << 20,
            reservations_max: 65_536,
        }
    }
}

impl Default for StreamsConfig {
    fn default() -> Self {
        Self {
            heartbeat_ms: 10_000,
            silent_ms_max: 20_000,
            reconnect_ms_min: 50,
            reconnect_ms_max: 5_000,
            replay_ms_max: 2_000,
            lost_ms: 10_000,
        }
    }
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            policy: PolicyName::default(),
            ttft_slo_ms: 30_000,
            tbt_slo_ms: 300,
            reservation_ms_max: 600_000,
            fetch: true,
            assumed_ms: 30_000,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> EngineConfig {
        EngineConfig {
            instance: "a".into(),
            model: "m".into(),
            endpoint: "tcp://127.0.0.1:5557".into(),
            ..EngineConfig::default()
        }
    }

    #[test]
    fn the_default_is_valid() {
        Config::default().validate().unwrap();
        engine().validate().unwrap();
    }

    #[test]
    fn an_invalid_field_of_an_engine_is_named_with_its_place() {
        let bad = EngineConfig { endpoint: "http://x".into(), ..engine() };
        let config = Config { engines: vec![engine(), bad], ..Config::default() };
        let error = config.validate().unwrap_err();
        assert_eq!(error.field, "engines[1].endpoint");
    }

    #[test]
    fn endpoints_that_cannot_be_connected_to_are_refused() {
        for text in [
            "",
            "tcp://",
            "tcp://:1",
            "tcp://h",
            "tcp://h:",
            "tcp://h:65536",
            "tcp://h:+1",
            "ipc://x",
            "tcp://a b:1",
            "tcp://a/b:1",
            "tcp://[::1:5",
            "tcp://::1:5",
        ] {
            assert_eq!(Endpoint::parse(text), None, "{text}");
        }
        let ipv6 = Endpoint::parse("tcp://[::1]:5557").unwrap();
        assert_eq!((ipv6.authority().as_str(), ipv6.of_rank(3).unwrap().port), ("[::1]:5557", 5560));
        assert_eq!(Endpoint::parse("tcp://*:5").unwrap().host, "0.0.0.0");
        assert_eq!(Endpoint::parse("tcp://h:65535").unwrap().of_rank(1), None);
    }

    #[test]
    fn what_is_left_to_the_engine_needs_its_http_address() {
        let asks = EngineConfig { block_tokens: 0, ..engine() };
        assert_eq!(asks.validate().unwrap_err().field, "http");
        EngineConfig { http: "10.0.0.7:30000".into(), ..asks }.validate().unwrap();
    }

    #[test]
    fn names_of_other_cases_are_read_as_mooncake_writes_them() {
        for (text, kind) in
            [("vLLM", EngineKind::Vllm), ("SGLang", EngineKind::Sglang), ("Mooncake", EngineKind::Mooncake)]
        {
            assert_eq!(serde_json::from_value::<EngineKind>(text.into()).unwrap(), kind);
        }
    }
}
