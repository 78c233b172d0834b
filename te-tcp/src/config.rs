//! The settings of one transport, their defaults and their ranges.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use te_fabric::config::{ConfigError, check_advertised, check_ranges};

/// Upper limit of [`Config::connections`]: data connections to one peer.
pub const CONNECTIONS_PER_PEER_MAX: u8 = 16;

/// How a transport learns that its sockets are ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Driver {
    /// epoll: available on every supported kernel, and the better choice with one connection or a few.
    #[default]
    Epoll,
    /// io_uring: learning which sockets are ready costs no system call, and one call receives from up to 16
    /// connections.
    #[cfg(feature = "uring")]
    Uring,
}

/// How a [`TcpTransport`](crate::TcpTransport) listens, connects, and bounds itself. Every field has a
/// default.
///
/// A settings file cannot contain `bind`, `advertise`, `inflight_max` and `identity`: the code that opens the
/// transport sets them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// How the transport learns that sockets are ready: `epoll`, or `uring` in builds with that feature.
    /// Default epoll.
    pub driver: Driver,
    /// Address to listen on. Port 0 picks a free port. Default `127.0.0.1:0`.
    #[serde(skip)]
    pub bind: SocketAddr,
    /// Port of the data listener; it replaces the port in `bind`. 0 keeps the port in `bind`, and picks a
    /// free one when that is 0 as well. The fabric does not start when the named port is not available.
    /// Default 0.
    pub port: u16,
    /// The address written into exports. Default: the one in `bind`; when that is unspecified (`0.0.0.0`,
    /// `::`), the addresses of this host's interfaces.
    #[serde(skip)]
    pub advertise: Option<IpAddr>,
    /// Data connections to one peer, opened as work accumulates; 1 to 16. Default 1.
    #[serde(alias = "lanes")]
    pub connections: u8,
    /// Sends and checks a CRC32C with every payload of the operations that this transport initiates. Default
    /// off.
    pub checksum: bool,
    /// TCP congestion control, by the kernel's name for it (`sysctl
    /// net.ipv4.tcp_available_congestion_control`). The fabric does not start with an algorithm that the
    /// kernel lacks or that this process may not use. Default: `cubic` between addresses of one host, where a
    /// pacing algorithm such as BBR costs up to half of the throughput and gains nothing, and the kernel's
    /// default elsewhere.
    pub congestion: Option<String>,
    /// `SO_SNDBUF` of each connection, bytes; 4,096 to 1 GiB. Default: the kernel tunes it.
    pub send_buffer_bytes: Option<u32>,
    /// `SO_RCVBUF` of each connection, bytes; 4,096 to 1 GiB. Default: the kernel tunes it.
    pub receive_buffer_bytes: Option<u32>,
    /// A peer that owes an answer and shows no sign of life for this long is considered dead, ms; 20 to
    /// 3,600,000. Default 5,000.
    ///
    /// A target shows a sign of life only while its process polls it: set this above the longest pause
    /// between polls of any process.
    pub peer_silence_ms_max: u32,
    /// Time limit for connecting and the handshake, ms; 1 to 3,600,000. Default 3,000.
    pub connect_ms_max: u32,
    /// Longest backoff between attempts to reach a peer, ms; 10 to 3,600,000. The first is 10 ms. Default
    /// 1,000.
    pub reconnect_ms_max: u32,
    /// Upper limit of slices that are accepted and not yet completed, 1 to 1,048,576. Default 4,096.
    #[serde(skip)]
    pub inflight_max: u32,
    /// Longest slice, bytes, at least 1. A longer operation of a peer is refused. Default 1 GiB.
    pub slice_bytes_max: u32,
    /// Longer slices are cut into pieces of this size, spread over the connections to the peer, bytes; 4,096
    /// to 64 MiB. With checksums, pieces have 4 MiB at most. Default 256 KiB.
    pub piece_bytes_max: u32,
    /// A connection takes further pieces while fewer bytes than this wait for their answers, bytes; 4,096 to
    /// 1 GiB. Default 2 MiB between addresses of one host, where a longer queue only falls out of the caches,
    /// and 8 MiB elsewhere.
    pub window_bytes_max: Option<u32>,
    /// When a WRITE is cancelled, or a region is withdrawn while a peer reads it, the unsent rest of the
    /// frame may be copied, so that the connection stays usable; this limits the copy, bytes, up to 1 GiB.
    /// When the rest is longer, the connection is closed instead. Default 4 MiB.
    #[serde(alias = "aside_bytes_max")]
    pub detached_bytes_max: u32,
    /// Upper limit of open connections, those opened here and those of peers together, 1 to 1,048,576. A
    /// quarter is reserved for those opened here. Default 1,024.
    ///
    /// Each connection needs a file descriptor and about 200 KiB. When peers hold as many as they may, a new
    /// one replaces the connection that has carried nothing so far and has been silent for longest; if there
    /// is none, an idle one of the address, or of the process, that holds the most; if there is none, the one
    /// that has been idle for longest, if for one second at least. A peer that loses an idle connection in
    /// this way opens another when it has something to send, and its slices are not affected. Up to 64
    /// connections more are open while they shake hands or end.
    pub connections_max: u32,
    /// While peers hold more than half of the connections that they may hold, a peer's connection that has
    /// not accessed exported memory for this long is closed, ms; 10 to 86,400,000. One that has never carried
    /// anything is closed after five seconds in any case. Default 60,000.
    pub idle_ms_max: u32,
    /// Regions that can be registered, 1 to 16,777,216: region indexes are below this. Default 65,536.
    pub regions_max: u32,
    /// Remote regions that can be attached, 1 to 16,777,216: their indexes are below this. Default 65,536.
    #[serde(alias = "segments_max")]
    pub remote_regions_max: u32,
    /// Fences that can run at the same time, 1 to 65,536. Default 64.
    pub fences_max: u32,
    /// How peers identify this process: expelling goes by it, and so does one process's share of a peer's
    /// connections. It is the same for all transports of one engine. Default 0: a random one.
    #[serde(skip)]
    pub identity: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            driver: Driver::default(),
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            port: 0,
            advertise: None,
            connections: 1,
            checksum: false,
            congestion: None,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            peer_silence_ms_max: 5_000,
            connect_ms_max: 3_000,
            reconnect_ms_max: 1_000,
            inflight_max: 4_096,
            slice_bytes_max: 1 << 30,
            piece_bytes_max: 256 << 10,
            window_bytes_max: None,
            detached_bytes_max: 4 << 20,
            connections_max: 1_024,
            idle_ms_max: 60_000,
            regions_max: 65_536,
            remote_regions_max: 65_536,
            fences_max: 64,
            identity: 0,
        }
    }
}

impl Config {
    /// Where to listen: `bind`, with the port that was named.
    pub(crate) const fn listen(&self) -> SocketAddr {
        match self.port {
            0 => self.bind,
            port => SocketAddr::new(self.bind.ip(), port),
        }
    }

    /// Connections that only our own operations may use.
    pub(crate) const fn connections_kept(&self) -> usize {
        if self.connections_max < 2 {
            return 0;
        }
        let quarter = self.connections_max as usize / 4;
        if quarter == 0 { 1 } else { quarter }
    }

    /// Connections that peers may have.
    pub(crate) const fn connections_for_peers(&self) -> usize {
        self.connections_max as usize - self.connections_kept()
    }

    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is out of its limits, with the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("connections", u64::from(self.connections), 1, u64::from(CONNECTIONS_PER_PEER_MAX)),
            ("peer_silence_ms_max", u64::from(self.peer_silence_ms_max), 20, 3_600_000),
            ("connect_ms_max", u64::from(self.connect_ms_max), 1, 3_600_000),
            ("reconnect_ms_max", u64::from(self.reconnect_ms_max), 10, 3_600_000),
            ("inflight_max", u64::from(self.inflight_max), 1, 1 << 20),
            ("slice_bytes_max", u64::from(self.slice_bytes_max), 1, u64::from(u32::MAX)),
            ("piece_bytes_max", u64::from(self.piece_bytes_max), 4_096, 64 << 20),
            ("detached_bytes_max", u64::from(self.detached_bytes_max), 0, 1 << 30),
            ("connections_max", u64::from(self.connections_max), 1, 1 << 20),
            ("idle_ms_max", u64::from(self.idle_ms_max), 10, 86_400_000),
            ("regions_max", u64::from(self.regions_max), 1, 1 << 24),
            ("remote_regions_max", u64::from(self.remote_regions_max), 1, 1 << 24),
            ("fences_max", u64::from(self.fences_max), 1, 65_536),
        ])?;
        let buffers = [
            ("send_buffer_bytes", self.send_buffer_bytes),
            ("receive_buffer_bytes", self.receive_buffer_bytes),
            ("window_bytes_max", self.window_bytes_max),
        ];
        let set =
            |(field, bytes): (_, Option<u32>)| bytes.map(|bytes| (field, u64::from(bytes), 4_096, 1 << 30));
        check_ranges(buffers.into_iter().filter_map(set))?;
        check_ranges(
            self.congestion.as_ref().map(|name| ("congestion (bytes of its name)", name.len() as u64, 1, 15)),
        )?;
        check_advertised(self.advertise)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::{Error, MapDeserializer};

    use super::*;

    #[test]
    fn renamed_settings_are_accepted_by_their_old_names() {
        let set = |name: &'static str, value: u32| {
            Config::deserialize(MapDeserializer::<_, Error>::new([(name, value)].into_iter()))
        };
        let default = Config::default();
        for (old, new, expected) in [
            // alias of one release
            ("lanes", "connections", Config { connections: 7, ..default.clone() }),
            // alias of one release
            ("aside_bytes_max", "detached_bytes_max", Config { detached_bytes_max: 7, ..default.clone() }),
            // alias of one release
            ("segments_max", "remote_regions_max", Config { remote_regions_max: 7, ..default }),
        ] {
            assert_eq!((set(old, 7), set(new, 7)), (Ok(expected.clone()), Ok(expected)), "{old}");
        }
        assert!(set("no_such_setting", 7).is_err());
    }
}
