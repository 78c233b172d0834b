//! The environment variables that Mooncake's users set, parsed once.
//!
//! Names, defaults and ranges are those of Mooncake (`TE/src/config.cpp`, python.md 3). A value that does not
//! parse, or is out of its range, is logged as a warning and keeps its default, as there. [`Env::of`] takes a
//! function, so that nothing here reads the process's environment behind its caller's back.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use te_engine::Fabrics;
use te_mooncake::Cidr;

/// Ports at which an engine answers handshakes, unless the environment names others.
pub const RPC_PORTS: RangeInclusive<u16> = 15_000..=17_000;
/// Ports of a store's name, unless the environment names others.
pub const STORE_PORTS: RangeInclusive<u16> = 12_300..=14_300;
/// Shortest timeout of a transfer.
const TIMEOUT_MIN: Duration = Duration::from_secs(5);
/// Timeout of a transfer, unless the environment sets it.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What `MC_FORCE_TCP` leaves.
pub(crate) const WITHOUT_RDMA: Fabrics = Fabrics::LOCAL.and(Fabrics::SHM).and(Fabrics::TCP);
/// Longest values that are read, bytes.
const VALUE_BYTES_MAX: usize = 4096;

/// What Mooncake's environment variables say.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Env {
    /// `SNOWSKIN_MOONCAKE_FABRICS`: names as `tcp` or `shm,rdma`, of those that may be used and must start.
    /// `MC_FORCE_TCP`, set to anything: all of this build but RDMA.
    pub fabrics: Option<Fabrics>,
    /// `MC_TRANSFER_TIMEOUT`, seconds, at least 5. Default 30 s. One nanosecond per byte is added to it.
    pub transfer_timeout: Duration,
    /// `MC_SLICE_TIMEOUT`, seconds, 1 to 65535: how long a transfer of the C interface may take. Default:
    /// until the fabric gives it up.
    pub slice_timeout: Option<Duration>,
    /// `MC_MIN_RPC_PORT` and `MC_MAX_RPC_PORT`: where the port for handshakes is chosen.
    pub rpc_ports: PortRange,
    /// `MC_STORE_CLIENT_MIN_PORT` and `MC_STORE_CLIENT_MAX_PORT`: where the port in a store's name is chosen.
    pub store_ports: PortRange,
    /// `MC_TCP_BIND_ADDRESS`: the address at which an engine listens and that it advertises.
    pub bind_address: Option<IpAddr>,
    /// `MC_USE_IPV6`, set to anything: an engine without a bind address listens on IPv6.
    pub ipv6: bool,
    /// `MC_METADATA_CLUSTER_ID`: a prefix of the keys in the metadata server.
    pub metadata_cluster: Option<String>,
    /// `MC_HANDSHAKE_MAX_LENGTH`, bytes, 1 MiB to 128 MiB. Default 1 MiB.
    pub handshake_bytes_max: u32,
    /// `MC_TCP_PROTO` is 1: the initiator uses version 1 of Mooncake's TCP transport.
    pub tcp_v1: bool,
    /// `MC_LEGACY_RPC_PORT_BINDING`, set to anything: the port of the local name is that for handshakes.
    pub legacy_rpc_port: bool,
    /// `MC_REDIS_USERNAME`, `MC_REDIS_PASSWORD` and `MC_REDIS_DB_INDEX`: the login of a Redis server.
    pub redis: Option<RedisLogin>,
    /// `SNOWSKIN_MOONCAKE_PEERS`: the networks whose processes may reach exported memory over Mooncake's
    /// protocol, which has no authentication. Default: every network that reaches the address at which the
    /// engine listens.
    pub peers: Vec<Cidr>,
    /// `MC_TE_FILTERS`: the RDMA devices to use.
    pub devices: Vec<String>,
    /// `MC_CUSTOM_TOPO_JSON`: a file with a priority matrix.
    pub topology: Option<PathBuf>,
    /// `MC_LOG_LEVEL`: `TRACE`, `INFO`, `WARNING`, `ERROR`.
    pub log_level: Option<log::LevelFilter>,
}

/// The login of a Redis server.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisLogin {
    /// The user; empty: the default one.
    pub user: String,
    /// The password; empty: none.
    pub password: String,
    /// The number of the database.
    pub db: u8,
}

/// Without the password.
impl fmt::Debug for RedisLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLogin").field("user", &self.user).field("db", &self.db).finish_non_exhaustive()
    }
}

/// A range of TCP ports, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortRange {
    /// The first port.
    pub min: u16,
    /// The last port.
    pub max: u16,
}

impl From<RangeInclusive<u16>> for PortRange {
    fn from(range: RangeInclusive<u16>) -> Self {
        Self { min: *range.start(), max: *range.end() }
    }
}

impl Env {
    /// Whether the environment allows RDMA.
    #[must_use]
    pub fn may_use_rdma(&self) -> bool {
        self.fabrics.is_none_or(|all| all.is_auto() || all.named().any(|entry| entry.name == "rdma"))
    }

    /// The environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    /// The environment in which `var` looks variables up.
    ///
    /// ```
    /// use snowskin_compat::env::Env;
    /// let env = Env::of(|name| (name == "MC_TRANSFER_TIMEOUT").then(|| "2".to_owned()));
    /// assert_eq!(env.transfer_timeout.as_secs(), 5); // the least that Mooncake accepts
    /// ```
    #[must_use]
    pub fn of(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = Vars(&var);
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        Self {
            fabrics: var
                .parsed("SNOWSKIN_MOONCAKE_FABRICS", "a list of fabrics of this build, such as `shm,tcp`")
                .or_else(|| var.is_set("MC_FORCE_TCP").then_some(WITHOUT_RDMA)),
            // A value below the least is raised, as in Mooncake, not refused.
            transfer_timeout: var
                .number("MC_TRANSFER_TIMEOUT", 0..=u32::MAX)
                .map_or(TIMEOUT, |given| seconds(given).max(TIMEOUT_MIN)),
            slice_timeout: var.number("MC_SLICE_TIMEOUT", 1..=65_535).map(seconds),
            rpc_ports: var.ports(
                // The misspelt names are alternatives in Mooncake, too.
                ["MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT"],
                ["MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT"],
                RPC_PORTS,
            ),
            store_ports: var.ports(
                ["MC_STORE_CLIENT_MIN_PORT"; 2],
                ["MC_STORE_CLIENT_MAX_PORT"; 2],
                STORE_PORTS,
            ),
            bind_address: var.parsed("MC_TCP_BIND_ADDRESS", "an IP address"),
            ipv6: var.is_set("MC_USE_IPV6"),
            metadata_cluster: var.text("MC_METADATA_CLUSTER_ID"),
            handshake_bytes_max: var
                .number("MC_HANDSHAKE_MAX_LENGTH", 1 << 20..=128 << 20)
                .unwrap_or(1 << 20),
            tcp_v1: var.number("MC_TCP_PROTO", 1..=3_u32) == Some(1),
            legacy_rpc_port: var.is_set("MC_LEGACY_RPC_PORT_BINDING"),
            redis: var.redis(),
            peers: var.networks("SNOWSKIN_MOONCAKE_PEERS"),
            devices: var.text("MC_TE_FILTERS").map(|list| device_list(&list)).unwrap_or_default(),
            topology: var.text("MC_CUSTOM_TOPO_JSON").map(PathBuf::from),
            log_level: var.text("MC_LOG_LEVEL").and_then(|text| level(&text)),
        }
    }

    /// How long a transfer of `bytes` may take.
    #[must_use]
    pub fn timeout_of(&self, bytes: u64) -> Duration {
        self.transfer_timeout.saturating_add(Duration::from_nanos(bytes))
    }
}

/// No variable is set.
impl Default for Env {
    fn default() -> Self {
        Self::of(|_| None)
    }
}

/// The names in a comma-separated list, without the empty ones.
pub(crate) fn device_list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn level(text: &str) -> Option<log::LevelFilter> {
    match text.to_ascii_uppercase().as_str() {
        "TRACE" => Some(log::LevelFilter::Trace),
        "DEBUG" => Some(log::LevelFilter::Debug),
        "INFO" => Some(log::LevelFilter::Info),
        "WARNING" | "WARN" => Some(log::LevelFilter::Warn),
        "ERROR" => Some(log::LevelFilter::Error),
        _ => {
            ignored("MC_LOG_LEVEL", text, "TRACE, INFO, WARNING or ERROR");
            None
        }
    }
}

/// Variables by name.
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn is_set(&self, name: &str) -> bool {
        (self.0)(name).is_some()
    }

    /// A text that is not empty.
    fn text(&self, name: &str) -> Option<String> {
        let text = (self.0)(name)?;
        if text.len() > VALUE_BYTES_MAX {
            ignored(name, "a long text", format_args!("at most {VALUE_BYTES_MAX} bytes"));
            return None;
        }
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn parsed<T: FromStr>(&self, name: &str, wanted: &str) -> Option<T> {
        let text = self.text(name)?;
        let parsed = text.parse().ok();
        if parsed.is_none() {
            ignored(name, &text, wanted);
        }
        parsed
    }

    fn number<T>(&self, name: &str, range: RangeInclusive<T>) -> Option<T>
    where
        T: FromStr + PartialOrd + fmt::Display,
    {
        let text = self.text(name)?;
        let number = text.parse().ok().filter(|number| range.contains(number));
        if number.is_none() {
            ignored(name, &text, format_args!("{} to {}", range.start(), range.end()));
        }
        number
    }

    fn redis(&self) -> Option<RedisLogin> {
        let text = |name| self.text(name).unwrap_or_default();
        let login = RedisLogin {
            user: text("MC_REDIS_USERNAME"),
            password: text("MC_REDIS_PASSWORD"),
            db: self.number("MC_REDIS_DB_INDEX", 0..=u8::MAX).unwrap_or(0),
        };
        (login != RedisLogin::default()).then_some(login)
    }

    fn networks(&self, name: &str) -> Vec<Cidr> {
        let Some(list) = self.text(name) else { return Vec::new() };
        let networks: Result<Vec<Cidr>, _> = list.split(',').map(|network| network.trim().parse()).collect();
        networks.unwrap_or_else(|_| {
            // Who names networks wants others refused: an error must not admit all of them.
            log::error!(
                "{name} is `{}`, which is not a list of networks such as 10.0.0.0/8: only this host may connect",
                list.escape_debug()
            );
            vec![Cidr::from(IpAddr::from([127, 0, 0, 1])), Cidr::from(IpAddr::from(std::net::Ipv6Addr::LOCALHOST))]
        })
    }

    fn ports(&self, min: [&str; 2], max: [&str; 2], default: RangeInclusive<u16>) -> PortRange {
        let of = |names: [&str; 2]| names.into_iter().find_map(|name| self.number(name, 1..=u16::MAX));
        let min_given = of(min).unwrap_or(*default.start());
        let max_given = of(max).unwrap_or(*default.end());
        if min_given <= max_given {
            return PortRange { min: min_given, max: max_given };
        }
        log::warn!(
            "{} is {min_given}, more than {}, {max_given}: using {} to {}",
            min[0],
            max[0],
            default.start(),
            default.end()
        );
        default.into()
    }
}

fn ignored(name: &str, text: &str, wanted: impl fmt::Display) {
    log::warn!("{name} is `{}`, which is not {wanted}: it is ignored", text.escape_debug());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(set: &[(&str, &str)]) -> Env {
        Env::of(|name| set.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn without_variables_the_defaults_are_mooncakes() {
        let env = Env::default();
        assert_eq!(env.transfer_timeout, Duration::from_secs(30));
        assert_eq!((env.rpc_ports.min, env.rpc_ports.max), (15_000, 17_000));
        assert_eq!((env.fabrics, env.slice_timeout, env.handshake_bytes_max), (None, None, 1 << 20));
    }

    #[test]
    fn the_timeout_has_a_least_value_and_grows_with_the_bytes() {
        assert_eq!(env(&[("MC_TRANSFER_TIMEOUT", "1")]).transfer_timeout, Duration::from_secs(5));
        let env = env(&[("MC_TRANSFER_TIMEOUT", "60")]);
        assert_eq!(env.timeout_of(3_000_000_000), Duration::from_secs(63));
        assert!(env.timeout_of(u64::MAX) > Duration::from_secs(60));
    }

    #[test]
    fn values_that_do_not_parse_keep_the_default() {
        for bad in ["", " ", "x", "-1", "1e3", "99999999999999999999"] {
            let env = env(&[
                ("MC_TRANSFER_TIMEOUT", bad),
                ("MC_SLICE_TIMEOUT", bad),
                ("MC_HANDSHAKE_MAX_LENGTH", bad),
                ("MC_TCP_BIND_ADDRESS", bad),
                ("MC_MIN_RPC_PORT", bad),
                ("MC_LOG_LEVEL", bad),
            ]);
            assert_eq!(env, Env::default(), "{bad:?}");
        }
        let long = "1".repeat(VALUE_BYTES_MAX + 1);
        assert_eq!(env(&[("MC_METADATA_CLUSTER_ID", &long)]).metadata_cluster, None);
    }

    #[test]
    fn a_range_of_ports_that_is_empty_is_replaced_by_the_default() {
        let ports = |min, max| env(&[("MC_MIN_RPC_PORT", min), ("MC_MAX_RPC_PORT", max)]).rpc_ports;
        assert_eq!(ports("20000", "20010"), (20_000..=20_010).into());
        assert_eq!(ports("20010", "20000"), RPC_PORTS.into());
        assert_eq!(ports("0", "70000"), RPC_PORTS.into());
        assert_eq!(env(&[("MC_MIN_PRC_PORT", "15500")]).rpc_ports.min, 15_500);
    }

    #[test]
    fn networks_that_do_not_parse_admit_this_host_alone() {
        assert!(Env::default().peers.is_empty());
        let peers = |list| env(&[("SNOWSKIN_MOONCAKE_PEERS", list)]).peers;
        assert_eq!(peers("10.0.0.0/8, ::1").len(), 2);
        for bad in ["10.0.0.0/33", "10.0.0.0/8,", "everyone"] {
            let peers = peers(bad);
            assert!(peers.iter().all(|network| !network.is_any()) && peers.len() == 2, "{bad}");
            assert!(!peers.iter().any(|network| network.contains([10, 0, 0, 1].into())), "{bad}");
        }
    }

    #[test]
    fn the_login_of_redis_is_read_and_its_password_not_shown() {
        let login = env(&[("MC_REDIS_PASSWORD", "sesame"), ("MC_REDIS_DB_INDEX", "3")]).redis.unwrap();
        assert_eq!((login.password.as_str(), login.db), ("sesame", 3));
        assert!(!format!("{login:?}").contains("sesame"));
        assert_eq!(env(&[("MC_REDIS_DB_INDEX", "256")]).redis, None);
    }

    #[test]
    fn fabrics_are_named_and_an_unknown_name_is_ignored() {
        let fabrics = |list| env(&[("SNOWSKIN_MOONCAKE_FABRICS", list)]).fabrics;
        assert_eq!(fabrics("tcp"), Some(Fabrics::TCP));
        assert!(Env::default().may_use_rdma() && !env(&[("MC_FORCE_TCP", "1")]).may_use_rdma());
        assert_eq!(fabrics("shm, tcp"), Some(Fabrics::SHM.and(Fabrics::TCP)));
        for bad in ["", "udp", "tcp,"] {
            assert_eq!(fabrics(bad), None, "{bad:?}");
        }
        let both = [("MC_FORCE_TCP", "1"), ("SNOWSKIN_MOONCAKE_FABRICS", "shm")];
        assert_eq!(env(&both).fabrics, Some(Fabrics::SHM), "the more specific one counts");
    }

    #[test]
    fn flags_are_set_by_their_presence() {
        assert_eq!(env(&[("MC_FORCE_TCP", "")]).fabrics, Some(WITHOUT_RDMA));
        assert!(env(&[("MC_USE_IPV6", "0")]).ipv6);
        assert_eq!(env(&[("MC_TE_FILTERS", "mlx5_0, ,mlx5_1,")]).devices, ["mlx5_0", "mlx5_1"]);
    }
}
