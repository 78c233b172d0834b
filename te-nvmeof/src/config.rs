//! The settings of one transport, their defaults and their ranges.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use te_fabric::config::{ConfigError, check_advertised, check_ranges};

/// Upper limit of [`Config::queues`].
pub const QUEUES_MAX: u8 = 16;
/// Upper limit of [`Config::queue_depth`].
pub const DEPTH_MAX: u16 = 1_024;

/// How an [`NvmeofTransport`](crate::NvmeofTransport) listens, connects, and bounds itself. Every field has a
/// default.
///
/// A settings file cannot contain `bind`, `advertise`, `inflight_max` and `identity`: the code that opens the
/// transport sets them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address to listen on. Port 0 picks a free port. Default `127.0.0.1:0`.
    #[serde(skip)]
    pub bind: SocketAddr,
    /// Port of the target's listener; it replaces the port in `bind`. 0 keeps the port in `bind`, and picks a
    /// free one when that is 0 as well. Default 0; that of NVMe/TCP is 4420.
    pub port: u16,
    /// The address written into exports. Default: the one in `bind`; when that is unspecified (`0.0.0.0`,
    /// `::`), the addresses of this host's interfaces.
    #[serde(skip)]
    pub advertise: Option<IpAddr>,
    /// I/O queues to one subsystem, each a connection of its own; 1 to 16. Default 2.
    pub queues: u8,
    /// Commands in flight on one queue, 4 to 1,024. Default 128.
    pub queue_depth: u16,
    /// Asks targets for a CRC-32C with every header. Default off.
    pub header_digest: bool,
    /// Asks targets for a CRC-32C with all data. Default off.
    pub data_digest: bool,
    /// Remote offsets and lengths of slices are multiples of this, bytes: a power of two from 512 to 65,536.
    /// A namespace whose blocks are larger is refused. It is also the size of the blocks of the namespaces
    /// that the target serves. Default 4,096.
    pub granule_bytes: u32,
    /// Data of this length or less travels within the command, bytes; 0 to 65,536. A target offers it, an
    /// initiator uses the smaller of its own and the target's. Default 16,384.
    pub in_capsule_bytes_max: u32,
    /// Longer slices are cut into commands of this size, or of what the target allows, bytes; 4,096 to 32
    /// MiB, a multiple of 4,096. It is also what our target allows. Default 1 MiB.
    pub transfer_bytes_max: u32,
    /// `SO_SNDBUF` of each connection, bytes; 4,096 to 1 GiB. Default: the kernel tunes it.
    pub send_buffer_bytes: Option<u32>,
    /// `SO_RCVBUF` of each connection, bytes; 4,096 to 1 GiB. Default: the kernel tunes it.
    pub receive_buffer_bytes: Option<u32>,
    /// A target that owes an answer and shows no sign of life for this long is considered dead, ms; 20 to
    /// 3,600,000. Default 5,000.
    pub peer_silence_ms_max: u32,
    /// The keep-alive timeout (KATO) that the initiator requests, ms; 100 to 3,600,000. A target ends a
    /// controller that is silent for longer. Keep Alive is sent every third part of it, or of
    /// `peer_silence_ms_max` when that is shorter. Default 5,000.
    pub keep_alive_ms: u32,
    /// How long a target may still carry out commands after it has ended a controller, ms, where the target
    /// does not state it (CQT = 0); up to 3,600,000. It is used by the fence by time alone, for targets that
    /// offer no better proof. 0: no fence by time; fences to such targets then never end `Applied` while a
    /// write is in doubt. Default 15,000.
    pub quiesce_ms: u32,
    /// A fence that has no proof after this time ends with an error, ms; 100 to 3,600,000. Default 60,000.
    pub fence_ms_max: u32,
    /// Time limit for connecting, up to the first I/O queue, ms; 1 to 3,600,000. Default 3,000.
    pub connect_ms_max: u32,
    /// Longest backoff between attempts to reach a target, ms; 10 to 3,600,000. The first is 10 ms. Default
    /// 1,000.
    pub reconnect_ms_max: u32,
    /// Upper limit of slices that are accepted and not yet completed, 1 to 1,048,576. Default 4,096.
    #[serde(skip)]
    pub inflight_max: u32,
    /// Longest slice, bytes, at least `granule_bytes`. Default 1 GiB.
    pub slice_bytes_max: u32,
    /// When a WRITE is cancelled, or a region is withdrawn while a host reads it, the unsent rest may be
    /// copied, so that the connection stays usable; this limits the copy, bytes, up to 1 GiB. When the rest
    /// is longer, the connection is closed instead. Default 4 MiB.
    pub detached_bytes_max: u32,
    /// Upper limit of connections that hosts have to the target, 1 to 1,048,576. One host may have half of
    /// them. Default 1,024.
    pub connections_max: u32,
    /// Whether any host may use the namespaces of the target without the key of an export. Default off.
    pub open_to_hosts: bool,
    /// Regions that can be registered, 1 to 16,777,216: region indexes are below this. Default 65,536.
    pub regions_max: u32,
    /// Remote regions that can be attached, 1 to 16,777,216: their indexes are below this. Default 65,536.
    pub remote_regions_max: u32,
    /// Fences that can run at the same time, 1 to 65,536. Default 64.
    pub fences_max: u32,
    /// How targets identify this process: the host's identifier and NQN are made from it, and so is its
    /// reservation key. It is the same for all transports of one engine. Default 0: a random one.
    #[serde(skip)]
    pub identity: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            port: 0,
            advertise: None,
            queues: 2,
            queue_depth: 128,
            header_digest: false,
            data_digest: false,
            granule_bytes: 4_096,
            in_capsule_bytes_max: 16 << 10,
            transfer_bytes_max: 1 << 20,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            peer_silence_ms_max: 5_000,
            keep_alive_ms: 5_000,
            quiesce_ms: 15_000,
            fence_ms_max: 60_000,
            connect_ms_max: 3_000,
            reconnect_ms_max: 1_000,
            inflight_max: 4_096,
            slice_bytes_max: 1 << 30,
            detached_bytes_max: 4 << 20,
            connections_max: 1_024,
            open_to_hosts: false,
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

    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is out of its limits, with the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("queues", u64::from(self.queues), 1, u64::from(QUEUES_MAX)),
            ("queue_depth", u64::from(self.queue_depth), 4, u64::from(DEPTH_MAX)),
            ("granule_bytes", u64::from(self.granule_bytes), 512, 65_536),
            ("granule_bytes (bits set)", u64::from(self.granule_bytes.count_ones()), 1, 1),
            ("in_capsule_bytes_max", u64::from(self.in_capsule_bytes_max), 0, 65_536),
            ("transfer_bytes_max", u64::from(self.transfer_bytes_max), 4_096, 32 << 20),
            ("transfer_bytes_max (rest of a page)", u64::from(self.transfer_bytes_max % 4_096), 0, 0),
            ("peer_silence_ms_max", u64::from(self.peer_silence_ms_max), 20, 3_600_000),
            ("keep_alive_ms", u64::from(self.keep_alive_ms), 100, 3_600_000),
            ("quiesce_ms", u64::from(self.quiesce_ms), 0, 3_600_000),
            ("fence_ms_max", u64::from(self.fence_ms_max), 100, 3_600_000),
            ("connect_ms_max", u64::from(self.connect_ms_max), 1, 3_600_000),
            ("reconnect_ms_max", u64::from(self.reconnect_ms_max), 10, 3_600_000),
            ("inflight_max", u64::from(self.inflight_max), 1, 1 << 20),
            (
                "slice_bytes_max",
                u64::from(self.slice_bytes_max),
                u64::from(self.granule_bytes),
                u64::from(u32::MAX),
            ),
            ("detached_bytes_max", u64::from(self.detached_bytes_max), 0, 1 << 30),
            ("connections_max", u64::from(self.connections_max), 1, 1 << 20),
            ("regions_max", u64::from(self.regions_max), 1, 1 << 24),
            ("remote_regions_max", u64::from(self.remote_regions_max), 1, 1 << 24),
            ("fences_max", u64::from(self.fences_max), 1, 65_536),
        ])?;
        let buffers = [
            ("send_buffer_bytes", self.send_buffer_bytes),
            ("receive_buffer_bytes", self.receive_buffer_bytes),
        ];
        let set =
            |(field, bytes): (_, Option<u32>)| bytes.map(|bytes| (field, u64::from(bytes), 4_096, 1 << 30));
        check_ranges(buffers.into_iter().filter_map(set))?;
        check_advertised(self.advertise)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_outside_its_limits_is_named() {
        assert_eq!(Config::default().validate(), Ok(()));
        let cases = [
            (Config { queues: 0, ..Config::default() }, "queues"),
            (Config { granule_bytes: 4_097, ..Config::default() }, "granule_bytes (bits set)"),
            (Config { granule_bytes: 256, ..Config::default() }, "granule_bytes"),
            (
                Config { transfer_bytes_max: 5_000, ..Config::default() },
                "transfer_bytes_max (rest of a page)",
            ),
            (Config { send_buffer_bytes: Some(1), ..Config::default() }, "send_buffer_bytes"),
        ];
        for (config, field) in cases {
            assert_eq!(config.validate().map_err(|error| error.field), Err(field));
        }
    }
}
