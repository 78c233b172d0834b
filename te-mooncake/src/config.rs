//! Settings. Nothing is read from the environment: a program that honours Mooncake's variables sets the
//! fields.

use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_fabric::config::check_ranges;

use crate::cidr::Cidr;
use crate::error::StartError;
use crate::frame::{FRAME_BYTES_DEFAULT, FRAME_BYTES_LIMIT};

/// The largest number of data connections to one peer.
pub const CONNECTIONS_PER_PEER_MAX: u32 = 16;

/// What of Mooncake's wire is spoken. As text: `off`, `initiator`, `target`, `both`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Nothing.
    #[default]
    Off,
    /// Own transfers to Mooncake peers. Nothing listens.
    Initiator,
    /// Peers' transfers to memory that is exported here.
    Target,
    /// Both.
    Both,
}

impl Mode {
    /// Whether own transfers to Mooncake peers are possible.
    #[must_use]
    pub const fn is_initiator(self) -> bool {
        matches!(self, Self::Initiator | Self::Both)
    }

    /// Whether ports for peers are open.
    #[must_use]
    pub const fn is_target(self) -> bool {
        matches!(self, Self::Target | Self::Both)
    }
}

/// A text that is not a [`Mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModeError;

impl fmt::Display for ModeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the mode is not one of off, initiator, target, both")
    }
}

impl std::error::Error for ModeError {}

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Self, ModeError> {
        match text {
            "off" => Ok(Self::Off),
            "initiator" => Ok(Self::Initiator),
            "target" => Ok(Self::Target),
            "both" => Ok(Self::Both),
            _ => Err(ModeError),
        }
    }
}

/// The settings of [`Service`](crate::Service), [`MooncakeTransport`](crate::MooncakeTransport) and
/// [`Client`](crate::Client).
///
/// The protocol has neither authentication nor keys: a peer that reaches the data port reads and writes every
/// exported byte. So everything is off by default, and a target needs `bind` and `peers`.
///
/// ```
/// use te_mooncake::{Config, Mode};
///
/// let config = Config {
///     mode: Mode::Both,
///     bind: Some("10.0.0.7".parse()?),
///     peers: vec!["10.0.0.0/24".parse()?],
///     ..Config::default()
/// };
/// config.validate()?;
/// assert!(Config { peers: Vec::new(), ..config }.validate().is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is spoken. Default `off`.
    pub mode: Mode,
    /// The address on which the handshake port and the data port listen. A target needs it; there is no
    /// default.
    pub bind: Option<IpAddr>,
    /// The networks whose addresses may connect. A target needs one at least. Default: none.
    pub peers: Vec<Cidr>,
    /// The host that peers are told, a name or an address. Default: `bind`; where that is unspecified, the
    /// first address of the host's interfaces.
    pub advertise_host: Option<String>,
    /// The name of the segment on a metadata server. Default: `host:port` of the handshake port, which it
    /// always is without a metadata server.
    pub name: Option<String>,
    /// The handshake port. Default 0: one from `port_min` to `port_max`.
    pub rpc_port: u16,
    /// The data port. Default 0: one from `port_min` to `port_max`.
    pub data_port: u16,
    /// The smallest port that is chosen. Default 15,000.
    pub port_min: u16,
    /// The largest port that is chosen. Default 17,000. 0, as `port_min`: the system chooses.
    pub port_max: u16,
    /// The port of a peer whose name has none. Default 12,001.
    pub peer_port: u16,
    /// A part of the keys on a metadata server, which separates clusters: `MC_METADATA_CLUSTER_ID` of
    /// Mooncake. Default: none.
    pub cluster_id: Option<String>,
    /// Data connections to one peer, 1 to 16: `MC_TCP_LANES_PER_PEER` of Mooncake. Default 4.
    #[serde(alias = "lanes")]
    pub connections: u32,
    /// Own data connections to all peers together, 1 to 1,048,576. When there are as many, each peer has one.
    /// Default 1,024.
    pub connections_max: u32,
    /// Whether a WRITE to a peer that speaks version 1 alone is sent. Nothing acknowledges it: it ends when
    /// the socket has taken its last byte, as `Applied` with `fence_needed`, and may still be refused or
    /// lost. Default false: such a WRITE is refused with `AccessDenied`.
    pub allow_unacknowledged_v1: bool,
    /// Whether version 1 is used even to peers that speak version 2: `MC_TCP_PROTO=1` of Mooncake. Default
    /// false.
    pub force_v1: bool,
    /// Time limit for a connection to a peer, ms; 1 to 3,600,000. Default 5,000.
    pub connect_ms_max: u32,
    /// Time limit of one handshake with a peer, from connecting to its answer, and of one request to a
    /// metadata server, ms; 1 to 3,600,000. Default 10,000.
    pub timeout_ms: u32,
    /// How long a connection with an operation in progress may move nothing, ms; 20 to 3,600,000. At the
    /// initiator the operation then ends, a WRITE as `Unknown`; at the target the connection is closed.
    /// Default 30,000.
    pub silence_ms_max: u32,
    /// Longest backoff between attempts to reach a peer, ms; 10 to 3,600,000. Default 1,000.
    pub reconnect_ms_max: u32,
    /// An own data connection that is idle for this long is closed, ms; 10 to 86,400,000. Default 60,000.
    pub idle_ms_max: u32,
    /// Slices that are accepted and not yet completed, 1 to 1,048,576. Default 4,096.
    #[serde(skip)]
    pub inflight_max: u32,
    /// Longest slice, bytes, at least 1. Default 1 GiB.
    pub slice_bytes_max: u32,
    /// The length of slices that is preferred, bytes, at least 4,096: one slice is one exchange on one
    /// connection. Default 1 MiB.
    pub slice_bytes_preferred: u32,
    /// Regions that can be registered with the rail, 1 to 16,777,216. Default 65,536.
    pub regions_max: u32,
    /// Remote regions that can be attached, 1 to 16,777,216. Default 65,536.
    pub remote_regions_max: u32,
    /// Ranges that can be exported, 1 to 65,536. Default 16,384. A descriptor of that many is longer than a
    /// peer accepts by default: 1 MiB is about 9,000.
    pub exports_max: u32,
    /// Longest handshake frame, bytes; 1 MiB to 128 MiB: `MC_HANDSHAKE_MAX_LENGTH` of Mooncake. Default 1
    /// MiB.
    pub frame_bytes_max: u32,
    /// Time limit for the request of a handshake, and again for its answer, ms; 10 to 3,600,000. Default
    /// 5,000.
    pub handshake_ms_max: u32,
    /// Handshakes at the same time, 1 to 65,536. Default 1,024. A further one replaces the one whose request
    /// has been incomplete for longest.
    pub handshakes_max: u32,
    /// Data connections of all peers together, 1 to 1,048,576. Default 1,024. A further one replaces the one
    /// that has been idle for longest.
    pub target_connections_max: u32,
    /// Data connections per address of a peer, 1 to 1,048,576. Default 512.
    pub target_connections_per_peer_max: u32,
    /// Bytes of all operations that are served at the same time, at least 1. Default 1 GiB. Further
    /// operations wait; one that is longer is served alone.
    pub target_inflight_bytes_max: u64,
    /// How long a request may be incomplete, ms; 10 to 3,600,000. Default 5,000.
    pub header_ms_max: u32,
    /// Notifications that wait to be taken, 0 to 1,048,576. Default 65,536. Further ones are refused.
    pub notifications_max: u32,
    /// Bytes of notifications that wait to be taken. Default 64 MiB.
    pub notification_bytes_max: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::Off,
            bind: None,
            peers: Vec::new(),
            advertise_host: None,
            name: None,
            rpc_port: 0,
            data_port: 0,
            port_min: 15_000,
            port_max: 17_000,
            peer_port: 12_001,
            cluster_id: None,
            connections: 4,
            connections_max: 1_024,
            allow_unacknowledged_v1: false,
            force_v1: false,
            connect_ms_max: 5_000,
            timeout_ms: 10_000,
            silence_ms_max: 30_000,
            reconnect_ms_max: 1_000,
            idle_ms_max: 60_000,
            inflight_max: 4_096,
            slice_bytes_max: 1 << 30,
            slice_bytes_preferred: 1 << 20,
            regions_max: 65_536,
            remote_regions_max: 65_536,
            exports_max: 16_384,
            frame_bytes_max: FRAME_BYTES_DEFAULT,
            handshake_ms_max: 5_000,
            handshakes_max: 1_024,
            target_connections_max: 1_024,
            target_connections_per_peer_max: 512,
            target_inflight_bytes_max: 1 << 30,
            header_ms_max: 5_000,
            notifications_max: 65_536,
            notification_bytes_max: 64 << 20,
        }
    }
}

impl Config {
    /// Checks every field against its limits, and that a target has `bind` and `peers`.
    ///
    /// # Errors
    /// `Config`, `Setting`: the first field that is wrong.
    pub fn validate(&self) -> Result<(), StartError> {
        let wrong = |field, need| Err(StartError::Config { field, need });
        if self.mode.is_target() && self.bind.is_none() {
            return wrong(
                "bind",
                "must be set for a target: name the address of the network on which the peers are",
            );
        }
        if self.mode.is_target() && self.peers.is_empty() {
            return wrong("peers", "must list the networks that may connect, such as 10.0.0.0/24");
        }
        if self.port_min > self.port_max {
            return wrong("port_min", "must not be above port_max");
        }
        let host = self.advertise_host.as_deref();
        if host.is_some_and(|host| host.is_empty() || host.len() > 255 || host.contains(char::is_whitespace))
        {
            return wrong("advertise_host", "must be a host name or an address");
        }
        if host.and_then(|host| host.parse::<IpAddr>().ok()).is_some_and(|address| address.is_unspecified()) {
            return wrong("advertise_host", "must be an address to which peers can connect");
        }
        if self
            .name
            .as_deref()
            .is_some_and(|name| name.is_empty() || name.len() > crate::export::SEGMENT_BYTES_MAX)
        {
            return wrong("name", "must have 1 to 512 bytes");
        }
        self.check_limits().map_err(StartError::Setting)
    }

    fn check_limits(&self) -> Result<(), te_fabric::ConfigError> {
        const HOUR_MS: u64 = 3_600_000;
        let row = |field, value: u32, min: u64, max: u64| (field, u64::from(value), min, max);
        check_ranges([
            row("connections", self.connections, 1, u64::from(CONNECTIONS_PER_PEER_MAX)),
            row("connections_max", self.connections_max, 1, 1 << 20),
            row("connect_ms_max", self.connect_ms_max, 1, HOUR_MS),
            row("timeout_ms", self.timeout_ms, 1, HOUR_MS),
            row("silence_ms_max", self.silence_ms_max, 20, HOUR_MS),
            row("reconnect_ms_max", self.reconnect_ms_max, 10, HOUR_MS),
            row("idle_ms_max", self.idle_ms_max, 10, 86_400_000),
            row("inflight_max", self.inflight_max, 1, 1 << 20),
            row("slice_bytes_max", self.slice_bytes_max, 1, u64::from(u32::MAX)),
            row("slice_bytes_preferred", self.slice_bytes_preferred, 4_096, u64::from(u32::MAX)),
            row("regions_max", self.regions_max, 1, 1 << 24),
            row("remote_regions_max", self.remote_regions_max, 1, 1 << 24),
            row("exports_max", self.exports_max, 1, 65_536),
            row(
                "frame_bytes_max",
                self.frame_bytes_max,
                u64::from(FRAME_BYTES_DEFAULT),
                u64::from(FRAME_BYTES_LIMIT),
            ),
            row("handshake_ms_max", self.handshake_ms_max, 10, HOUR_MS),
            row("handshakes_max", self.handshakes_max, 1, 65_536),
            row("target_connections_max", self.target_connections_max, 1, 1 << 20),
            row("target_connections_per_peer_max", self.target_connections_per_peer_max, 1, 1 << 20),
            row("header_ms_max", self.header_ms_max, 10, HOUR_MS),
            row("notifications_max", self.notifications_max, 0, 1 << 20),
            ("target_inflight_bytes_max", self.target_inflight_bytes_max, 1, u64::MAX),
        ])
    }

    pub(crate) const fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms as u64)
    }

    pub(crate) const fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_ms_max as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Config {
        let peers = vec![Cidr::from(IpAddr::from([127, 0, 0, 1]))];
        Config { mode: Mode::Target, bind: Some(IpAddr::from([127, 0, 0, 1])), peers, ..Config::default() }
    }

    fn refused(config: Config) -> String {
        config.validate().expect_err("it is refused").to_string()
    }

    #[test]
    fn it_is_off_and_a_target_needs_an_address_and_peers() {
        let default = Config::default();
        assert_eq!(default.mode, Mode::Off);
        default.validate().expect("the default is valid");
        assert!(!default.allow_unacknowledged_v1);
        target().validate().expect("it has both");
        assert!(refused(Config { bind: None, ..target() }).contains("bind"));
        assert!(refused(Config { peers: Vec::new(), ..target() }).contains("10.0.0.0/24"));
        Config { mode: Mode::Initiator, ..Config::default() }.validate().expect("an initiator needs neither");
    }

    #[test]
    fn a_setting_outside_its_limits_is_named() {
        for (config, named) in [
            (Config { connections: 17, ..target() }, "connections is 17"),
            (Config { frame_bytes_max: 1, ..target() }, "frame_bytes_max is 1"),
            (Config { silence_ms_max: 0, ..target() }, "silence_ms_max is 0"),
            (Config { target_inflight_bytes_max: 0, ..target() }, "target_inflight_bytes_max is 0"),
            (Config { port_min: 2, port_max: 1, ..target() }, "port_min must not be above port_max"),
            (Config { advertise_host: Some("0.0.0.0".into()), ..target() }, "advertise_host"),
            (Config { advertise_host: Some("a b".into()), ..target() }, "advertise_host"),
            (Config { name: Some(String::new()), ..target() }, "name"),
        ] {
            let error = refused(config);
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn modes_are_words() {
        for (text, initiator, is_target) in
            [("off", false, false), ("initiator", true, false), ("target", false, true), ("both", true, true)]
        {
            let mode: Mode = text.parse().expect(text);
            assert_eq!((mode.is_initiator(), mode.is_target()), (initiator, is_target));
        }
        assert_eq!("on".parse::<Mode>(), Err(ModeError));
    }

    #[test]
    fn settings_are_read_from_text_and_unknown_ones_refused() {
        let read = |text: &str| serde_json::from_str::<Config>(text);
        let config = read(r#"{"mode":"both","bind":"10.0.0.7","peers":["10.0.0.0/8"],"connections":2}"#)
            .expect("valid");
        assert_eq!(
            (config.mode, config.connections, config.peers[0].to_string().as_str()),
            (Mode::Both, 2, "10.0.0.0/8")
        );
        // alias of Mooncake's word
        assert_eq!(read(r#"{"lanes":3}"#).expect("valid").connections, 3);
        assert!(read(r#"{"no_such_setting":1}"#).is_err());
    }
}
