//! The settings of one transport, their defaults and their limits.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use te_fabric::config::{ConfigError, check_advertised, check_ranges};

/// Queue pairs to one peer, at most.
pub const QPS_MAX: u8 = 16;
/// Scatter/gather entries in one work request, at most.
pub const SGES_MAX: u8 = 32;
/// Chunks of one region, at most; a region with more is refused.
pub const CHUNKS_MAX: u32 = 65_536;

/// How an [`RdmaTransport`](crate::RdmaTransport) uses its port, listens, connects, and bounds itself. Every
/// field has a default. What the device cannot do lowers a setting silently;
/// [`RdmaTransport::config`](crate::RdmaTransport::config) says what became of it.
#[derive(Clone, Debug)]
pub struct Config {
    /// The kernel's name of the device (`mlx5_0`, `rxe0`). Default: the first with an active port.
    pub device: Option<String>,
    /// Port of the device, from 1. Default: the first that is active.
    pub port: Option<u8>,
    /// Where the control connection listens. Port 0 picks a free one. Default `127.0.0.1:0`, which peers on
    /// other hosts cannot reach.
    pub bind: SocketAddr,
    /// The address that exports carry. Default: the one in `bind`; when that is unspecified (`0.0.0.0`,
    /// `::`), the addresses of this host's interfaces.
    pub advertise: Option<IpAddr>,
    /// Entry of the port's GID table. Default: chosen, RoCE v2 over IPv4 first, and proven by a loopback.
    pub gid_index: Option<u32>,
    /// Time for the loopback proof of one GID at opening; 0 leaves the proof out. Default 2,000.
    pub proof_ms_max: u32,
    /// Queue pairs for our work to one peer; 1 to 16. Default 2.
    pub qps: u8,
    /// Work requests posted to one queue pair and not yet ended. Default 256.
    pub qp_depth: u32,
    /// Local pieces in one work request: slices that lie side by side at the peer share one. Default 8.
    pub sges: u8,
    /// WRITEs up to this length travel inside the work request. Default 128.
    pub inline_bytes_max: u32,
    /// Every so many work requests one reports success; so does the last of each doorbell. Default 16.
    pub signal_every: u16,
    /// READs in flight on one queue pair. Default 16.
    pub reads: u8,
    /// A queue pair takes further work while fewer bytes than this are in flight on it. Default 8 MiB.
    pub window_bytes_max: u32,
    /// Longer slices travel as several messages, spread over the queue pairs. Default 1 MiB.
    pub message_bytes_max: u32,
    /// Longest path MTU: 256, 512, 1024, 2048 or 4096. Default 4096; the smaller of both ports' counts.
    pub mtu_bytes_max: u32,
    /// Traffic class of our packets (on RoCE: DSCP and ECN). Default 0.
    pub traffic_class: u8,
    /// InfiniBand service level, 0 to 15. Default 0.
    pub service_level: u8,
    /// The device resends what is not acknowledged within 4.096 µs × 2^this; 1 to 31. Default 14, about 67
    /// ms.
    pub timeout_exponent: u8,
    /// How often it resends before it gives up; 0 to 7. Default 7.
    pub retries: u8,
    /// A cancelled slice that is posted gets so long to end by itself; then its queue pair is flushed, and
    /// its neighbours are sent again on a new one. Default 20.
    pub cancel_drain_ms: u32,
    /// A queue pair in error gets so long to flush; then it is destroyed, which ends it too. Default 500.
    pub flush_ms_max: u32,
    /// How often a slice is sent again because the failure or cancel of another slice flushed it. Default 4.
    pub replays_max: u8,
    /// A region longer than this is registered in chunks, several at a time; a power of two. Default 1 GiB.
    pub registration_chunk_bytes: u64,
    /// Threads that register the chunks of one region. Default 8.
    pub registration_threads: u8,
    /// Faults in the pages of a region before it is registered, which takes the same time but is done in
    /// parallel. Default on.
    pub populate: bool,
    /// Lets the device reorder its writes to our memory where it can. Default on.
    pub relaxed_ordering: bool,
    /// Reports how far a registration is. Default: only the log does.
    pub progress: Option<Progress>,
    /// A peer that owes us an answer on the control connection for so long is dead. Default 5,000.
    ///
    /// Transfers do not need the peer's attention, but connections, keys and fences do: set this above the
    /// longest pause of any owner.
    pub peer_silence_ms_max: u32,
    /// Time to connect and shake hands. Default 3,000.
    pub connect_ms_max: u32,
    /// Longest pause before a peer, or a queue pair to it, is tried again; the first is 10 ms. Default 1,000.
    pub reconnect_ms_max: u32,
    /// Slices accepted and not yet completed. Default 4,096.
    pub inflight_max: u32,
    /// Longest slice. Default 1 GiB.
    pub slice_bytes_max: u32,
    /// Peers that we are connected to at a time. The one that was longest not used gives way. Default 1,024.
    pub endpoints_max: u32,
    /// Peers that are connected to us at a time. Default 1,024.
    pub connections_max: u32,
    /// Region indexes run from 0 to this. Default 65,536.
    pub regions_max: u32,
    /// Segment indexes run from 0 to this. Default 65,536.
    pub segments_max: u32,
    /// Fences that run at the same time. Default 64.
    pub fences_max: u32,
    /// Who our peers take us for: what they expel. The same for all transports of one engine. Default 0: a
    /// random one.
    pub identity: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            device: None,
            port: None,
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
            endpoints_max: 1_024,
            connections_max: 1_024,
            regions_max: 65_536,
            segments_max: 65_536,
            fences_max: 64,
            identity: 0,
        }
    }
}

impl Config {
    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is out of its limits, with the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("port", self.port.map_or(1, u64::from), 1, 254),
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
            ("endpoints_max", u64::from(self.endpoints_max), 1, 1 << 15),
            ("connections_max", u64::from(self.connections_max), 1, 1 << 15),
            ("regions_max", u64::from(self.regions_max), 1, 1 << 24),
            ("segments_max", u64::from(self.segments_max), 1, 1 << 24),
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

/// How far a registration is; shared between the thread that registers and the one that shows it.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Bytes registered so far, over the life of the value.
    #[must_use]
    pub fn bytes_done(&self) -> u64 {
        self.0.done.load(Ordering::Relaxed)
    }

    /// Bytes that were asked for, over the life of the value.
    #[must_use]
    pub fn bytes_total(&self) -> u64 {
        self.0.total.load(Ordering::Relaxed)
    }

    pub(crate) fn asked(&self, bytes: u64) {
        self.0.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn done(&self, bytes: u64) {
        self.0.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

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
        assert_eq!(error.to_string(), "qps is 0: set it to 1..=16");
        let chunk = Config { registration_chunk_bytes: 5_000, ..Config::default() };
        assert!(chunk.validate().is_err_and(|error| error.field.contains("power of two")));
        let mtu = Config { mtu_bytes_max: 1_500, ..Config::default() };
        assert!(mtu.validate().is_err_and(|error| error.field.contains("mtu")));
    }
}
