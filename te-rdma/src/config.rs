//! The settings of one transport, their defaults and their limits.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use te_fabric::config::{ConfigError, check_advertised, check_ranges};

/// The most queue pairs to one peer.
pub const QPS_MAX: u8 = 16;
/// The most scatter/gather entries in one work request.
pub const SGES_MAX: u8 = 32;
/// The most chunks of one region; a region with more is refused.
pub const CHUNKS_MAX: u32 = 65_536;

/// How an [`RdmaTransport`](crate::RdmaTransport) uses its port, listens, connects, and limits its resources.
/// Every field has a default. A setting above the limits of the NIC is lowered without an error;
/// [`RdmaTransport::config`](crate::RdmaTransport::config) returns the settings in use.
///
/// As text it has only the settings of an installation: devices, port, GID, queue pairs, and those of the
/// network path. The code that opens the transport sets the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// NIC ports to use, by the kernel's names: `mlx5_0` for each active port of that device, `mlx5_0:1` for
    /// one port. Empty: every active port of the host. An engine opens one rail per port, and does not start
    /// when a port that is named cannot be opened; a single transport opens the first port, and every name
    /// must select one. Default: empty.
    pub devices: Vec<String>,
    /// Port of the listener for control connections, in place of the one in `bind`. Each further rail of an
    /// engine takes the next port. 0: the port in `bind`, and a free one where that is 0 too. A port that is
    /// in use keeps the fabric from starting. Default 0.
    pub port: u16,
    /// The address of the listener for control connections. Port 0 picks a free one. Default `127.0.0.1:0`,
    /// which peers on other hosts cannot reach.
    #[serde(skip)]
    pub bind: SocketAddr,
    /// The address that exports carry. Default: the one in `bind`; when that is unspecified (`0.0.0.0`,
    /// `::`), the addresses of this host's interfaces.
    #[serde(skip)]
    pub advertise: Option<IpAddr>,
    /// Index into the GID table of each port. Default: the first one that passes a loopback, RoCE v2 over
    /// IPv4 first.
    pub gid_index: Option<u32>,
    /// Time limit of the loopback proof of one GID when the transport is opened, milliseconds; 0: no proof.
    /// Default 2,000.
    #[serde(skip)]
    pub proof_ms_max: u32,
    /// Queue pairs to each peer on each rail; 1 to 16. Default 2.
    pub qps: u8,
    /// The most work requests that are posted to one queue pair and have not ended. Default 256.
    #[serde(skip)]
    pub qp_depth: u32,
    /// The most local pieces in one work request: slices that are contiguous at the peer share one. Default
    /// 8.
    #[serde(skip)]
    pub sges: u8,
    /// Longest WRITE that is carried inside its work request, bytes. Default 128.
    #[serde(skip)]
    pub inline_bytes_max: u32,
    /// One of this many work requests has a completion on success; so does the last one of each
    /// doorbell. Default 16.
    #[serde(skip)]
    pub signal_every: u16,
    /// The most READs in flight on one queue pair. Default 16.
    #[serde(skip)]
    pub reads: u8,
    /// A queue pair takes further work while fewer bytes than this are in flight on it. Default 8 MiB.
    #[serde(skip)]
    pub window_bytes_max: u32,
    /// Longest message, bytes. A longer slice is cut into several messages, which are spread over the queue
    /// pairs. Default 1 MiB.
    #[serde(skip)]
    pub message_bytes_max: u32,
    /// Largest path MTU, bytes: 256, 512, 1024, 2048 or 4096. The smaller of both ports' MTUs is used.
    /// Default 4096.
    pub mtu_bytes_max: u32,
    /// Traffic class of the packets. On RoCE its upper six bits are the DSCP, its lower two the ECN bits.
    /// Default 0.
    pub traffic_class: u8,
    /// InfiniBand service level, 0 to 15. Default 0.
    pub service_level: u8,
    /// The NIC sends a packet again when it is not acknowledged within 4.096 µs × 2^this; 1 to 31. Default
    /// 14, about 67 ms.
    pub timeout_exponent: u8,
    /// How often the NIC sends a packet again before the work request fails; 0 to 7. Default 7.
    pub retries: u8,
    /// How long a cancelled slice that is posted may take to complete, milliseconds. Afterwards its
    /// queue pair is flushed, and the other slices on it are sent again on a new one. Default 20.
    #[serde(skip)]
    pub cancel_drain_ms: u32,
    /// How long a queue pair in error may take to flush, milliseconds. Afterwards it is destroyed, which ends
    /// its work as well. Default 500.
    #[serde(skip)]
    pub flush_ms_max: u32,
    /// How often a slice is sent again because the failure or cancellation of another slice flushed it.
    /// Default 4.
    #[serde(skip)]
    pub replays_max: u8,
    /// Bytes of a registration chunk, a power of two: a longer region is registered in chunks, several at the
    /// same time. Default 1 GiB.
    #[serde(skip)]
    pub registration_chunk_bytes: u64,
    /// Threads that register the chunks of one region. Default 8.
    #[serde(skip)]
    pub registration_threads: u8,
    /// Faults in the pages of a region before it is registered. Registering would do so as well, but not in
    /// parallel. Default on.
    #[serde(skip)]
    pub populate: bool,
    /// Allows the NIC to reorder its writes to local memory where it can. Default on.
    #[serde(skip)]
    pub relaxed_ordering: bool,
    /// Counts the bytes of registrations by address while they run; registrations by a dma-buf are not
    /// counted. Default: only the log reports them.
    #[serde(skip)]
    pub progress: Option<Progress>,
    /// A peer that does not answer a request on the control connection for this many milliseconds is dead.
    /// Default 5,000.
    ///
    /// Transfers do not need the peer's process, but connections, keys and fences do: set this above the
    /// longest time between two polls of any peer.
    #[serde(skip)]
    pub peer_silence_ms_max: u32,
    /// Time limit for connecting and the handshake, milliseconds. Default 3,000.
    #[serde(skip)]
    pub connect_ms_max: u32,
    /// Longest backoff before a peer, or a queue pair to it, is tried again, milliseconds; the first one is
    /// 10 ms. Default 1,000.
    #[serde(skip)]
    pub reconnect_ms_max: u32,
    /// The most slices that are accepted and not completed. Default 4,096.
    #[serde(skip)]
    pub inflight_max: u32,
    /// Longest slice, bytes. Default 1 GiB.
    #[serde(skip)]
    pub slice_bytes_max: u32,
    /// The most control connections that this transport opens, one per peer. When another peer needs one, the
    /// connection that was not used for longest is closed. Default 1,024.
    #[serde(skip)]
    pub peers_max: u32,
    /// The most control connections that are accepted from peers at a time. Default 1,024.
    #[serde(skip)]
    pub connections_max: u32,
    /// Indexes of regions are smaller than this. Default 65,536.
    #[serde(skip)]
    pub regions_max: u32,
    /// Indexes of remote regions are smaller than this. Default 65,536.
    #[serde(skip)]
    pub remote_regions_max: u32,
    /// The most fences that run at the same time. Default 64.
    #[serde(skip)]
    pub fences_max: u32,
    /// The identity by which peers know and expel this transport, the same for all transports of one engine.
    /// Default 0: a random one.
    #[serde(skip)]
    pub identity: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            port: 0,
            bind: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
            advertise: None,
            gid_index: None,
            proof_ms_max: 2_000,
            qps: 2,
            qp_depth: 256,
            sges: 8,
            inline_bytes_max: 128,
            signal_every: 16,
            reads: 16,
            window_bytes_max: 8 << 20,
            message_bytes_max: 1 << 20,
            mtu_bytes_max: 4_096,
            traffic_class: 0,
            service_level: 0,
            timeout_exponent: 14,
            retries: 7,
            cancel_drain_ms: 20,
            flush_ms_max: 500,
            replays_max: 4,
            registration_chunk_bytes: 1 << 30,
            registration_threads: 8,
            populate: true,
            relaxed_ordering: true,
            progress: None,
            peer_silence_ms_max: 5_000,
            connect_ms_max: 3_000,
            reconnect_ms_max: 1_000,
            inflight_max: 4_096,
            slice_bytes_max: 1 << 30,
            peers_max: 1_024,
            connections_max: 1_024,
            regions_max: 65_536,
            remote_regions_max: 65_536,
            fences_max: 64,
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
    /// Names the first field that is out of its limits, and the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("proof_ms_max", u64::from(self.proof_ms_max), 0, 60_000),
            ("qps", u64::from(self.qps), 1, u64::from(QPS_MAX)),
            ("qp_depth", u64::from(self.qp_depth), 1, 32_768),
            ("sges", u64::from(self.sges), 1, u64::from(SGES_MAX)),
            ("inline_bytes_max", u64::from(self.inline_bytes_max), 0, 1_024),
            ("signal_every", u64::from(self.signal_every), 1, 1_024),
            ("reads", u64::from(self.reads), 1, 128),
            ("window_bytes_max", u64::from(self.window_bytes_max), 1, 1 << 30),
            ("message_bytes_max", u64::from(self.message_bytes_max), 256, 1 << 30),
            ("mtu_bytes_max", u64::from(self.mtu_bytes_max), 256, 4_096),
            ("service_level", u64::from(self.service_level), 0, 15),
            ("timeout_exponent", u64::from(self.timeout_exponent), 1, 31),
            ("retries", u64::from(self.retries), 0, 7),
            ("cancel_drain_ms", u64::from(self.cancel_drain_ms), 0, 3_600_000),
            ("flush_ms_max", u64::from(self.flush_ms_max), 1, 3_600_000),
            ("replays_max", u64::from(self.replays_max), 0, 255),
            ("registration_chunk_bytes", self.registration_chunk_bytes, 4_096, 1 << 46),
            ("registration_threads", u64::from(self.registration_threads), 1, 64),
            ("peer_silence_ms_max", u64::from(self.peer_silence_ms_max), 20, 3_600_000),
            ("connect_ms_max", u64::from(self.connect_ms_max), 1, 3_600_000),
            ("reconnect_ms_max", u64::from(self.reconnect_ms_max), 10, 3_600_000),
            ("inflight_max", u64::from(self.inflight_max), 1, 1 << 20),
            ("slice_bytes_max", u64::from(self.slice_bytes_max), 1, u64::from(u32::MAX)),
            ("peers_max", u64::from(self.peers_max), 1, 1 << 15),
            ("connections_max", u64::from(self.connections_max), 1, 1 << 15),
            ("regions_max", u64::from(self.regions_max), 1, 1 << 24),
            ("remote_regions_max", u64::from(self.remote_regions_max), 1, 1 << 24),
            ("fences_max", u64::from(self.fences_max), 1, 65_536),
        ])?;
        if !self.mtu_bytes_max.is_power_of_two() {
            let value = u64::from(self.mtu_bytes_max);
            return Err(ConfigError { field: "mtu_bytes_max (a power of two)", value, min: 256, max: 4_096 });
        }
        if !self.registration_chunk_bytes.is_power_of_two() {
            let field = "registration_chunk_bytes (a power of two)";
            let value = self.registration_chunk_bytes;
            return Err(ConfigError { field, value, min: 4_096, max: 1 << 46 });
        }
        check_advertised(self.advertise)
    }
}

/// The progress of registrations, shared between the thread that registers and the threads that display it.
/// Equal values are clones of each other.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Bytes registered since the value was made.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        self.0.done.load(Ordering::Relaxed)
    }

    /// Bytes whose registration was requested since the value was made.
    #[must_use]
    pub fn bytes_total(&self) -> u64 {
        self.0.total.load(Ordering::Relaxed)
    }

    pub(crate) fn requested(&self, bytes: u64) {
        self.0.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn done(&self, bytes: u64) {
        self.0.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl PartialEq for Progress {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Progress {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_within_their_limits() {
        assert_eq!(Config::default().validate(), Ok(()));
    }

    #[test]
    fn a_setting_out_of_its_limits_is_named() {
        let error = Config { qps: 0, ..Config::default() }.validate().expect_err("no queue pairs");
        assert_eq!(error.to_string(), "qps is 0: set it to a value from 1 to 16");
        let chunk = Config { registration_chunk_bytes: 5_000, ..Config::default() };
        assert!(chunk.validate().is_err_and(|error| error.field.contains("power of two")));
        let mtu = Config { mtu_bytes_max: 1_500, ..Config::default() };
        assert!(mtu.validate().is_err_and(|error| error.field.contains("mtu")));
    }

    #[test]
    fn the_port_replaces_that_of_the_listener() {
        let bind = "10.0.0.1:7".parse().expect("an address");
        let listen = |port| Config { bind, port, ..Config::default() }.listen().to_string();
        assert_eq!((listen(0), listen(9)), ("10.0.0.1:7".into(), "10.0.0.1:9".into()));
    }
}
